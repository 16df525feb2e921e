"""HTTP/3 without I/O: requests to frames, and the bytes of streams to what happened (RFC 9114); the client's side.

QUIC below it keeps the streams apart, gives them their credit and tells of resets. What breaks one answer ends its
stream; what breaks the connection's own state ends the connection, as does every flood. Push is never allowed to a
server, so all that speaks of it is a fault of the connection.
"""

import enum
from collections.abc import Iterator
from typing import Final, NamedTuple

from stormline.core import limits, limits_quic
from stormline.outbound.http2_codec import Data, Ended, Head, Interim
from stormline.outbound.http2_fields import Answer
from stormline.outbound.http2_request import Encoded
from stormline.outbound.http3_fields import FieldCoder, FieldsBroken

__all__ = ["Data", "Ended", "Event", "GoAway", "H3Code", "Head", "Http3Broken", "Http3Codec", "Interim", "Malformed"]

_VARINT_MAX: Final = 2**62 - 1
_DATA, _HEADERS, _CANCEL_PUSH, _SETTINGS, _PUSH_PROMISE, _GOAWAY, _MAX_PUSH_ID = 0, 1, 3, 4, 5, 7, 13
_OF_HTTP2: Final = frozenset({2, 6, 8, 9})
"""Frame types and settings that HTTP/2 had and HTTP/3 must not (RFC 9114 section 7.2.8)."""
_SETTINGS_OF_HTTP2: Final = frozenset({0, 2, 3, 4, 5})
_FIELD_SECTION_SIZE: Final = 6
_CONTROL, _PUSH, _ENCODER, _DECODER = 0, 1, 2, 3
_NO_TABLE: Final = 0x20
"""Set Dynamic Table Capacity to nothing (RFC 9204 section 4.3.1), all that an encoder may say where there is none."""


class H3Code(enum.IntEnum):
    """Error codes (RFC 9114 section 8.1, RFC 9204 section 6)."""

    H3_NO_ERROR = 0x100
    H3_GENERAL_PROTOCOL_ERROR = 0x101
    H3_INTERNAL_ERROR = 0x102
    H3_STREAM_CREATION_ERROR = 0x103
    H3_CLOSED_CRITICAL_STREAM = 0x104
    H3_FRAME_UNEXPECTED = 0x105
    H3_FRAME_ERROR = 0x106
    H3_EXCESSIVE_LOAD = 0x107
    H3_ID_ERROR = 0x108
    H3_SETTINGS_ERROR = 0x109
    H3_MISSING_SETTINGS = 0x10A
    H3_REQUEST_REJECTED = 0x10B
    H3_REQUEST_CANCELLED = 0x10C
    H3_REQUEST_INCOMPLETE = 0x10D
    H3_MESSAGE_ERROR = 0x10E
    H3_CONNECT_ERROR = 0x10F
    H3_VERSION_FALLBACK = 0x110
    QPACK_DECOMPRESSION_FAILED = 0x200
    QPACK_ENCODER_STREAM_ERROR = 0x201
    QPACK_DECODER_STREAM_ERROR = 0x202


def code_name(code: int) -> str:
    """Give the name of an error code, or its number where it has none."""
    return H3Code(code).name if code in H3Code._value2member_map_ else f"code {code:#x}"


class Http3Broken(Exception):
    """The peer broke HTTP/3: the connection is over.

    Attributes:
        code: what to close it with.
    """

    def __init__(self, what: str, code: H3Code) -> None:
        super().__init__(what)
        self.code = code


class Malformed(NamedTuple):
    """An answer breaks HTTP. Nothing more is told of its stream, which is to be given up with `code`."""

    stream_id: int
    what: str
    code: H3Code


class GoAway(NamedTuple):
    """The peer takes no new stream; those from `stream_id` on it has not touched."""

    stream_id: int


Event = Head | Interim | Data | Ended | Malformed | GoAway


def varint(value: int) -> bytes:
    """Code a number as QUIC does (RFC 9000 section 16)."""
    if value < 64:
        return bytes((value,))
    if value < 16384:
        return (value | 0x4000).to_bytes(2, "big")
    if value < 2**30:
        return (value | 0x80000000).to_bytes(4, "big")
    return (value | 0xC000000000000000).to_bytes(8, "big")


def read_varint(data: bytes, at: int) -> tuple[int, int] | None:
    """Read a number: it and where it ends; None where it is not whole."""
    if at >= len(data):
        return None
    first = data[at]
    size = 1 << (first >> 6)
    if size == 1:
        return first, at + 1
    if at + size > len(data):
        return None
    return int.from_bytes(data[at : at + size], "big") & ((1 << (8 * size - 2)) - 1), at + size


def opening() -> bytes:
    """Give what our control stream begins with: its type and our settings."""
    settings = varint(_FIELD_SECTION_SIZE) + varint(limits.HTTP_HEAD_BYTES_MAX)
    return varint(_CONTROL) + varint(_SETTINGS) + varint(len(settings)) + settings


def data_frame_head(size: int) -> bytes:
    """Give the head of a DATA frame."""
    return b"\0" + varint(size)


class _Track:
    """One answer on its way."""

    __slots__ = ("bodiless", "buffer", "expected", "fields_bytes", "got_head", "got_trailers", "is_head", "left",
                 "received", "skip")  # fmt: skip

    def __init__(self, *, is_head: bool) -> None:
        self.is_head = is_head
        self.bodiless = False  # the answer has no body, whatever it says
        self.got_head = self.got_trailers = False
        self.expected: int | None = None  # by Content-Length
        self.received = 0  # body bytes
        self.fields_bytes = 0  # of interim answers
        self.left = 0  # of a DATA frame
        self.skip = 0  # of a frame that means nothing to us
        self.buffer = b""  # of a frame that is not whole


class Http3Codec:
    """A client's end of one HTTP/3 connection, without I/O.

    Attributes:
        settled: the peer's settings have come.
    """

    __slots__ = ("_coder", "_control", "_empty_frames", "_goaway", "_streams", "_uni", "_uni_count", "settled")

    def __init__(self) -> None:
        self._coder = FieldCoder()
        self._streams: dict[int, _Track] = {}
        self._uni: dict[int, int] = {}  # the peer's one-way streams: the first byte of their type
        self._uni_count = 0
        self._control = b""  # of a frame of its control stream that is not whole
        self._empty_frames = 0  # in a row
        self._goaway = _VARINT_MAX
        self.settled = False

    def encode(self, request: Encoded) -> bytes:
        """Give the HEADERS frame of a request."""
        block = self._coder.encode(request.fields)
        return b"\x01" + varint(len(block)) + block

    def opened(self, stream_id: int, *, is_head: bool) -> None:
        """Expect an answer on a stream."""
        self._streams[stream_id] = _Track(is_head=is_head)

    def forget(self, stream_id: int) -> None:
        """Expect nothing more on a stream; what comes all the same is dropped."""
        self._streams.pop(stream_id, None)

    def expects(self, stream_id: int) -> bool:
        """Say whether the answer on a stream is not over yet."""
        return stream_id in self._streams

    # -- in -------------------------------------------------------------------------------------------------------
    def receive(self, stream_id: int, data: bytes, ended: bool) -> Iterator[Event]:
        """Take bytes of a stream and tell what they bring; all events are to be taken.

        Raises:
            Http3Broken: they break HTTP/3, or pass a bound. What came before has been told.
        """
        if stream_id & 3 == 0:
            track = self._streams.get(stream_id)
            if track is not None:
                yield from self._on_answer(stream_id, track, data, ended)
        elif stream_id & 3 == 3:
            yield from self._on_one_way(stream_id, data, ended)
        else:
            raise Http3Broken("a stream that only a client may open", H3Code.H3_STREAM_CREATION_ERROR)

    def reset(self, stream_id: int) -> None:
        """Take note that the peer gave up a stream.

        Raises:
            Http3Broken: the connection cannot do without it.
        """
        if self._uni.get(stream_id) in (_CONTROL, _ENCODER, _DECODER):
            raise Http3Broken("a stream was reset that is needed", H3Code.H3_CLOSED_CRITICAL_STREAM)
        self.forget(stream_id)

    def _count_empty(self) -> None:
        self._empty_frames += 1
        if self._empty_frames > limits_quic.H3_EMPTY_FRAMES_MAX:
            raise Http3Broken("frames that bring nothing, without end", H3Code.H3_EXCESSIVE_LOAD)

    # -- answers (RFC 9114 section 4.1) ---------------------------------------------------------------------------
    def _on_answer(self, stream_id: int, track: _Track, data: bytes, ended: bool) -> Iterator[Event]:
        if track.buffer:
            data, track.buffer = track.buffer + data, b""
        at, end = 0, len(data)
        while at < end:
            if track.skip:
                step = min(track.skip, end - at)
                track.skip -= step
                at += step
                continue
            if track.left:
                step = min(track.left, end - at)
                track.left -= step
                last = ended and at + step == end and not track.left
                event = self._on_body(stream_id, track, data[at : at + step] if at or step < end else data, last)
                yield event
                if last or isinstance(event, Malformed):
                    return
                at += step
                continue
            frame = self._frame(track, data, at)
            if frame is None:
                break
            kind, begin, size = frame
            if kind == _HEADERS:
                if begin + size > end:
                    break
                at = begin + size
                yield (event := self._on_block(stream_id, track, data[begin:at], ended and at == end))
                if isinstance(event, Malformed) or not self.expects(stream_id):
                    return
            else:
                self._begin_frame(track, kind, size)
                at = begin
        track.buffer = data[at:]
        if ended:
            yield self._on_end(stream_id, track)

    def _frame(self, track: _Track, data: bytes, at: int) -> tuple[int, int, int] | None:
        """Read the head of a frame: its type, where it begins, its size; None where it is not whole."""
        kind = read_varint(data, at)
        size = None if kind is None else read_varint(data, kind[1])
        if kind is None or size is None:
            return None
        if kind[0] == _HEADERS and size[0] > limits.HTTP_HEAD_BYTES_MAX:
            raise Http3Broken(f"a head of more than {limits.HTTP_HEAD_BYTES_MAX} bytes", H3Code.H3_EXCESSIVE_LOAD)
        return kind[0], size[1], size[0]

    def _begin_frame(self, track: _Track, kind: int, size: int) -> None:
        if kind == _DATA:
            if not track.got_head or track.got_trailers:
                raise Http3Broken("DATA before a head or after its trailers", H3Code.H3_FRAME_UNEXPECTED)
            track.left = size
        elif kind in (_CANCEL_PUSH, _SETTINGS, _GOAWAY, _MAX_PUSH_ID) or kind in _OF_HTTP2:
            raise Http3Broken("a frame that does not belong on a request's stream", H3Code.H3_FRAME_UNEXPECTED)
        elif kind == _PUSH_PROMISE:
            raise Http3Broken("a push, which was not allowed", H3Code.H3_ID_ERROR)
        else:
            track.skip = size
        if not size or track.skip:
            self._count_empty()

    def _on_block(self, stream_id: int, track: _Track, block: bytes, ended: bool) -> Event:
        try:
            answer = self._coder.answer(block)
        except FieldsBroken as error:
            raise Http3Broken(str(error), H3Code.QPACK_DECOMPRESSION_FAILED) from None
        if track.got_trailers:
            raise Http3Broken("HEADERS after trailers", H3Code.H3_FRAME_UNEXPECTED)
        if track.got_head:
            return self._on_trailers(stream_id, track, answer, ended)
        what = answer.fault or ("" if answer.status else "it has no status")
        if not what and answer.status < 200:
            track.fields_bytes += len(block)
            self._count_empty()
            if answer.status == 101 or ended:
                is_101 = answer.status == 101
                what = "the answer 101, which HTTP/3 does not have" if is_101 else "it ended with an interim answer"
            elif track.fields_bytes > limits.HTTP_HEAD_BYTES_MAX:
                what = f"interim answers of more than {limits.HTTP_HEAD_BYTES_MAX} bytes"
            else:
                return Interim(stream_id)
        if what:
            return self._malformed(stream_id, what)
        return self._on_head(stream_id, track, answer, ended)

    def _on_head(self, stream_id: int, track: _Track, answer: Answer, ended: bool) -> Event:
        self._empty_frames = 0
        track.got_head = True
        track.bodiless = track.is_head or answer.status in (204, 304)
        track.expected = None if track.bodiless else answer.length
        if ended:
            if track.expected:
                return self._malformed(stream_id, f"the body ended {track.expected} bytes short")
            self.forget(stream_id)
        return Head(stream_id, answer.status, answer.fields.copy(), ended)

    def _on_trailers(self, stream_id: int, track: _Track, answer: Answer, ended: bool) -> Event:
        """Drop trailers; they end the answer."""
        track.got_trailers = True
        if answer.status:
            return self._malformed(stream_id, "a second head")
        what = answer.fault or self._short(track)
        if what:
            return self._malformed(stream_id, what)
        if ended:
            self.forget(stream_id)
        return Ended(stream_id) if ended else Interim(stream_id)

    def _on_body(self, stream_id: int, track: _Track, piece: bytes, ended: bool) -> Event:
        self._empty_frames = 0
        if track.bodiless:
            return self._malformed(stream_id, "a body where there is none")
        track.received += len(piece)
        if track.expected is not None and track.received > track.expected:
            return self._malformed(stream_id, f"the body is longer than its Content-Length, {track.expected}")
        if ended:
            what = self._short(track)
            if what:
                return self._malformed(stream_id, what)
            self.forget(stream_id)
        return Data(stream_id, piece, ended)

    def _on_end(self, stream_id: int, track: _Track) -> Event:
        if track.buffer or track.left or track.skip:
            raise Http3Broken("a stream ended in the middle of a frame", H3Code.H3_FRAME_ERROR)
        if not track.got_head:
            return self._malformed(stream_id, "it ended before its head")
        what = self._short(track)
        if what:
            return self._malformed(stream_id, what)
        self.forget(stream_id)
        return Ended(stream_id)

    @staticmethod
    def _short(track: _Track) -> str:
        if track.expected is None or track.received == track.expected:
            return ""
        return f"the body ended {track.expected - track.received} bytes short"

    def _malformed(self, stream_id: int, what: str) -> Malformed:
        self.forget(stream_id)
        return Malformed(stream_id, what, H3Code.H3_MESSAGE_ERROR)

    # -- one-way streams (RFC 9114 section 6.2) -------------------------------------------------------------------
    def _on_one_way(self, stream_id: int, data: bytes, ended: bool) -> Iterator[Event]:
        kind = self._uni.get(stream_id)
        if kind is None:
            kind, data = self._begin_one_way(stream_id, data)
        if kind == _CONTROL:
            self._control += data
            yield from self._on_control()
        elif kind == _ENCODER and data.strip(bytes((_NO_TABLE,))):
            raise Http3Broken("entries for a dynamic table, of which there is none", H3Code.QPACK_ENCODER_STREAM_ERROR)
        if ended and kind in (_CONTROL, _ENCODER, _DECODER):
            raise Http3Broken("a stream ended that is needed", H3Code.H3_CLOSED_CRITICAL_STREAM)

    def _begin_one_way(self, stream_id: int, data: bytes) -> tuple[int, bytes]:
        """Read what a stream is for. A type is one byte, or one nobody needs: its rest is dropped like its content."""
        if not data:
            return -1, b""
        self._uni_count += 1
        if self._uni_count > limits_quic.H3_UNI_STREAMS_MAX:
            raise Http3Broken("one-way streams without end", H3Code.H3_EXCESSIVE_LOAD)
        kind = data[0]
        if kind == _PUSH:
            raise Http3Broken("a push, which was not allowed", H3Code.H3_ID_ERROR)
        if kind in (_CONTROL, _ENCODER, _DECODER) and kind in self._uni.values():
            raise Http3Broken("a second stream of a kind that comes once", H3Code.H3_STREAM_CREATION_ERROR)
        self._uni[stream_id] = kind
        return kind, data[1:]

    def _on_control(self) -> Iterator[Event]:
        while True:
            kind = read_varint(self._control, 0)
            size = None if kind is None else read_varint(self._control, kind[1])
            if kind is None or size is None:
                return
            if size[0] > limits_quic.H3_CONTROL_FRAME_BYTES_MAX:
                raise Http3Broken("a frame too large for the control stream", H3Code.H3_EXCESSIVE_LOAD)
            end = size[1] + size[0]
            if end > len(self._control):
                return
            payload, self._control = self._control[size[1] : end], self._control[end:]
            event = self._on_control_frame(kind[0], payload)
            if event is not None:
                yield event

    def _on_control_frame(self, kind: int, payload: bytes) -> Event | None:
        if (kind == _SETTINGS) == self.settled:
            if self.settled:
                raise Http3Broken("a second SETTINGS", H3Code.H3_FRAME_UNEXPECTED)
            raise Http3Broken("a control stream without SETTINGS", H3Code.H3_MISSING_SETTINGS)
        if kind == _SETTINGS:
            self._on_settings(payload)
            return None
        self._count_empty()
        if kind == _GOAWAY:
            return self._on_goaway(payload)
        if kind in (_DATA, _HEADERS, _PUSH_PROMISE, _MAX_PUSH_ID) or kind in _OF_HTTP2:
            raise Http3Broken("a frame that does not belong on the control stream", H3Code.H3_FRAME_UNEXPECTED)
        if kind == _CANCEL_PUSH:
            raise Http3Broken("a push, which was not allowed", H3Code.H3_ID_ERROR)
        return None

    def _on_settings(self, payload: bytes) -> None:
        """Check settings (RFC 9114 section 7.2.4). None of them changes what we do: no table, and small heads."""
        seen: set[int] = set()
        at = 0
        while at < len(payload):
            name = read_varint(payload, at)
            value = None if name is None else read_varint(payload, name[1])
            if name is None or value is None:
                raise Http3Broken("SETTINGS that cannot be read", H3Code.H3_FRAME_ERROR)
            if name[0] in seen or name[0] in _SETTINGS_OF_HTTP2:
                raise Http3Broken("a setting that may not be there", H3Code.H3_SETTINGS_ERROR)
            seen.add(name[0])
            at = value[1]
        self.settled = True

    def _on_goaway(self, payload: bytes) -> GoAway:
        found = read_varint(payload, 0)
        if found is None or found[1] != len(payload):
            raise Http3Broken("GOAWAY that cannot be read", H3Code.H3_FRAME_ERROR)
        if found[0] & 3 or found[0] > self._goaway:
            raise Http3Broken("GOAWAY with the number of no request, or a higher one", H3Code.H3_ID_ERROR)
        self._goaway = found[0]
        return GoAway(found[0])
