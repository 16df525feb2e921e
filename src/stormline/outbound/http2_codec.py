"""HTTP/2 without I/O: requests to frames, and frames to what happened (RFC 9113); the client's side.

What it does where the RFC leaves a choice, or real servers do:

- GOAWAY: the streams that the peer goes on with do go on (section 6.8).
- What still comes for a stream that is over is dropped in silence: another reset would be one more for the server to
  count. Its bytes are given back to the connection's window.
- What makes an answer malformed ends its stream; what breaks the connection's own state (frames, header tables,
  windows) ends the connection, as does every flood.
- Credit is two things: the connection's is given back when bytes arrive, the stream's when they are read, so that a
  slow reader holds back its own stream only.
- Whitespace around a field's value, which section 8.2.1 forbids, is taken, as by most clients.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from hpack import HPACKError, OversizedHeaderListError

from stormline.core import limits
from stormline.outbound import http2_frames as frames
from stormline.outbound.http2_fields import Answer, FieldDecoder, FieldEncoder
from stormline.outbound.http2_frames import ConnectionBroken, ErrorCode, Setting, code_name
from stormline.outbound.http2_request import Encoded, encode

__all__ = [
    "Changed", "ConnectionBroken", "Data", "Encoded", "Ended", "ErrorCode", "Event", "GoAway", "Head", "Http2Codec",
    "Interim", "Malformed", "PingAck", "Reset", "code_name", "encode",
]  # fmt: skip


# -- what happens -----------------------------------------------------------------------------------------------------
class Head(NamedTuple):
    """The head of an answer; its interim answers (1xx) are not told of."""

    stream_id: int
    status: int
    headers: list[tuple[bytes, bytes]]
    ended: bool


class Interim(NamedTuple):
    """An interim answer came."""

    stream_id: int


class Data(NamedTuple):
    """A piece of a body, maybe empty. Its bytes are to be given back with `Http2Codec.consumed`."""

    stream_id: int
    data: bytes
    ended: bool


class Ended(NamedTuple):
    """An answer is whole; trailers came, and are dropped."""

    stream_id: int


class Reset(NamedTuple):
    """The peer ended a stream. `finished`: its answer was whole, and only our body is unwanted (RFC 9113 8.1)."""

    stream_id: int
    code: int
    finished: bool


class Malformed(NamedTuple):
    """An answer breaks HTTP. Nothing more is told of its stream, which is to be reset with `code` where it is open."""

    stream_id: int
    what: str
    code: ErrorCode


class GoAway(NamedTuple):
    """The peer takes no new stream; those above `last_stream_id` it has not touched."""

    last_stream_id: int
    code: int


class PingAck(NamedTuple):
    """The peer answered a ping."""

    data: bytes


class Changed(NamedTuple):
    """Windows or settings of the peer changed: what waited may go on."""


Event = Head | Interim | Data | Ended | Reset | Malformed | GoAway | PingAck | Changed


class _Track:
    """One open stream."""

    __slots__ = ("bodiless", "expected", "fields_bytes", "got_head", "is_head", "local_done", "malformed", "owed",
                 "received", "remote_done", "unreturned", "window")  # fmt: skip

    def __init__(self, window: int, *, is_head: bool, local_done: bool) -> None:
        self.is_head = is_head
        self.bodiless = False  # the answer has no body, whatever it says
        self.malformed = False  # nothing more is told of it
        self.local_done = local_done
        self.remote_done = False
        self.got_head = False
        self.expected: int | None = None  # by Content-Length
        self.received = 0  # body bytes
        self.window = window  # what we may send; below zero where the peer made its windows smaller
        self.owed = 0  # credit that the peer is to be given back
        self.unreturned = 0  # bytes it sent less the credit given back: what its window lacks
        self.fields_bytes = 0  # of interim answers


class Http2Codec:
    """A client's end of one HTTP/2 connection, without I/O. Bytes to send gather in `data_to_send`.

    The preface, our settings and the connection's window are there from the start. Push is refused.

    Args:
        streams_untold: streams that may be open at once before the peer's SETTINGS have come.

    Attributes:
        settled: they have come.
        unread_bytes: body bytes told of and not yet `consumed`.
        wants_send: something waits in `data_to_send`.
        waiting_bytes: size of what waits there.
        window_bytes: what the peer may have on its way of each answer; see `fit`.
    """

    __slots__ = ("_block", "_block_flags", "_block_frames", "_block_stream", "_broken_by", "_buffer", "_control_bytes",
                 "_credit_frames", "_decoder", "_empty_frames", "_encoder", "_going", "_initial_window", "_large",
                 "_next_id", "_out", "_owed", "_streams", "_streams_max", "_window", "settled", "unread_bytes",
                 "waiting_bytes", "wants_send", "window_bytes")  # fmt: skip

    def __init__(
        self, streams_untold: int = limits.H2_STREAMS_UNTOLD, window_bytes: int = limits.H2_STREAM_WINDOW_BYTES
    ) -> None:
        self.window_bytes = window_bytes
        self._encoder = FieldEncoder()
        self._decoder = FieldDecoder(max_header_list_size=limits.HTTP_HEAD_BYTES_MAX)
        self._streams: dict[int, _Track] = {}
        self._next_id = 1
        self._large: dict[int, None] = {}  # streams of answers that are, or were, large
        self._out: list[bytes | memoryview] = []
        self._buffer = b""  # of a frame that is not whole
        self._block = b""  # field block that is coming, of a HEADERS frame with these flags:
        self._block_flags = 0
        self._block_frames = 0  # CONTINUATION frames of it so far
        self._block_stream = 0  # 0 for none
        self._window = frames.WINDOW_BYTES  # of the connection: what we may send
        self._initial_window = frames.WINDOW_BYTES  # of streams, for us
        self._streams_max = streams_untold
        self._owed = 0  # credit of the connection not given back yet: what its window lacks
        self._control_bytes = 0  # of the peer's frames that ask for an answer, since the last were sent
        self._empty_frames = 0  # in a row
        self._credit_frames = 0
        self._going = False  # a GOAWAY of ours was made
        self._broken_by: ConnectionBroken | None = None
        self.settled = False
        self.unread_bytes = 0
        self.waiting_bytes = 0
        self._send(frames.opening(window_bytes))

    # -- out ------------------------------------------------------------------------------------------------------
    @property
    def open_streams(self) -> int:
        """Streams that count against the peer's limit."""
        return len(self._streams)

    @property
    def streams_max(self) -> int:
        """Streams that may be open at once, now."""
        return min(self._streams_max, limits.H2_STREAMS_MAX)

    @property
    def begun(self) -> int:
        """Streams opened so far."""
        return self._next_id // 2

    @property
    def laden(self) -> bool:
        """An answer is coming of which more than `limits.H2_LARGE_BYTES` are still missing."""
        for stream_id in list(self._large):
            track = self._streams.get(stream_id)
            if track is not None and (track.expected or 0) - track.received > limits.H2_LARGE_BYTES:
                return True
            del self._large[stream_id]
        return False

    @property
    def exhausted(self) -> bool:
        """True where no stream number is left."""
        return self._next_id >= frames.STREAM_ID_MAX

    def data_to_send(self) -> bytes:
        """Give, and forget, the frames that wait."""
        out = self._out
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        self.wants_send = False
        self.waiting_bytes = self._control_bytes = 0
        return bytes(data)

    def _send(self, frame: bytes, data: bytes | memoryview = b"") -> None:
        """Add a frame to what waits; large `data` is not copied before it is sent."""
        self._out.append(frame)
        self.waiting_bytes += len(frame)
        self.wants_send = True
        if data:
            self._out.append(data)
            self.waiting_bytes += len(data)

    def open(self, request: Encoded, *, ended: bool) -> int:
        """Begin a stream with the head of a request; give its number. `open_streams` must be below `streams_max`."""
        stream_id = self._next_id
        self._next_id = stream_id + 2
        self._send(frames.fields_frames(stream_id, self._encoder.encode(request.fields), ended=ended))
        self._streams[stream_id] = _Track(self._initial_window, is_head=request.is_head, local_done=ended)
        return stream_id

    def is_open(self, stream_id: int) -> bool:
        """Say whether a stream counts as open."""
        return stream_id in self._streams

    def sendable(self, stream_id: int) -> int:
        """Give the size of the largest DATA frame the stream may send now; 0 for an empty one, below it for none."""
        track = self._streams.get(stream_id)
        return 0 if track is None else min(track.window, self._window, frames.FRAME_BYTES_LEAST)

    def send_data(self, stream_id: int, data: bytes | memoryview, *, ended: bool) -> None:
        """Add a DATA frame to an open stream. `data` must stay as it is until it has been sent.

        Raises:
            ValueError: it is more than `sendable`.
        """
        track, size = self._streams[stream_id], len(data)
        if size > max(0, self.sendable(stream_id)):
            raise ValueError(f"{size} bytes do not fit the windows of stream {stream_id}")
        track.window -= size
        self._window -= size
        self._credit_frames = 0
        self._send(frames.header(size, frames.DATA, frames.END_STREAM if ended else 0, stream_id), data)
        if ended:
            track.local_done = True
            if track.remote_done:
                del self._streams[stream_id]

    def reset(self, stream_id: int, code: ErrorCode) -> bool:
        """End a stream at once; False where it had ended by itself and nothing needs to be said."""
        if self._streams.pop(stream_id, None) is None:
            return False
        self._send(frames.rst_stream(stream_id, code))
        return True

    def ping(self, data: bytes) -> None:
        """Ask for a `PingAck` with the same 8 bytes."""
        self._send(frames.header(8, frames.PING, 0, 0), data)

    def fit(self, window_bytes: int) -> None:
        """Let the peer have so much on its way of each answer, those coming included (RFC 9113 section 6.9.2).

        Args:
            window_bytes: at most `limits.H2_STREAM_WINDOW_BYTES`, to which the peer is held before it has taken notice.
        """
        if window_bytes != self.window_bytes:
            self.window_bytes = window_bytes
            self._send(frames.settings((frames.Setting.INITIAL_WINDOW_SIZE, window_bytes)))
            for stream_id, track in self._streams.items():
                self._owe(stream_id, track, 0)  # else a window that went below zero may never open again

    def goaway(self, code: ErrorCode = ErrorCode.NO_ERROR) -> None:
        """Say, once, that we are going; nothing is to be sent after it."""
        if not self._going:
            self._going = True
            self._send(frames.goaway(code))

    def consumed(self, stream_id: int, size: int) -> None:
        """Give back the credit for `size` bytes of a stream that have been read or thrown away."""
        self.unread_bytes -= size
        track = self._streams.get(stream_id)
        if track is not None:
            self._owe(stream_id, track, size)
        if self._owed >= limits.H2_CONNECTION_WINDOW_BYTES // 4:
            self._give_credit()

    def _owe(self, stream_id: int, track: _Track, size: int) -> None:
        """Give the stream's credit back, in large pieces and as long as more of it is to come."""
        track.owed += size
        if track.owed and track.owed >= self.window_bytes // 4 and not (track.remote_done or track.malformed):
            self._send(frames.window_update(stream_id, track.owed))
            track.unreturned -= track.owed
            track.owed = 0

    def _give_credit(self) -> None:
        """Give the connection's credit back, except for what is unread above `limits.H2_UNREAD_BYTES`."""
        size = self._owed - max(0, self.unread_bytes - limits.H2_UNREAD_BYTES)
        if size >= limits.H2_CONNECTION_WINDOW_BYTES // 4:
            self._send(frames.window_update(0, size))
            self._owed -= size

    # -- in -------------------------------------------------------------------------------------------------------
    def receive_data(self, data: bytes) -> Iterator[Event]:
        """Take the peer's next bytes and tell what they bring; between two events the codec may be used.

        All events are to be taken: what is left in an iterator is lost.

        Raises:
            ConnectionBroken: they break HTTP/2, or pass a bound. What came before has been told.
        """
        if self._broken_by is not None:
            raise self._broken_by
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        position, end = 0, len(data)
        while end - position >= frames.HEADER_BYTES:
            high, low, kind, flags, stream_id = frames.parse_header(data, position)
            stream_id &= frames.STREAM_ID_MAX
            begin = position + frames.HEADER_BYTES
            after = begin + (high << 8) + low
            if after - begin > limits.H2_FRAME_BYTES_MAX:
                raise self._too_large(data[position:], after - begin)
            if after > end:
                break
            position = after
            if self._block_stream or not self.settled:
                self._check_order(kind, flags, stream_id)
            if kind == frames.DATA:
                event = self._on_data(stream_id, flags, data, begin, after)
            elif kind == frames.HEADERS:
                event = self._on_headers(stream_id, flags, data, begin, after)
            else:
                handler = _HANDLERS.get(kind)
                if handler is None:
                    self._count_empty()
                    continue
                event = handler(self, stream_id, flags, data[begin:after])
            if event is not None:
                yield event
        self._buffer = data[position:]

    def _broken(self, what: str, code: ErrorCode = ErrorCode.PROTOCOL_ERROR) -> ConnectionBroken:
        self.goaway(code)
        self._broken_by = ConnectionBroken(what, code)
        return self._broken_by

    def _too_large(self, data: bytes, size: int) -> ConnectionBroken:
        if not self.settled and data.startswith(b"HTTP/"):
            return self._broken("it answers in HTTP/1")
        return self._broken(f"a frame of {size} bytes", ErrorCode.FRAME_SIZE_ERROR)

    def _check_order(self, kind: int, flags: int, stream_id: int) -> None:
        """Have SETTINGS come first (section 3.4), and nothing come within a field block (section 4.3)."""
        if not self.settled:
            if kind != frames.SETTINGS or flags & frames.ACK:
                raise self._broken("it does not begin with SETTINGS")
        elif kind != frames.CONTINUATION or stream_id != self._block_stream:
            raise self._broken(f"the head on stream {self._block_stream} is interrupted by a frame of type {kind}")

    def _check_size(self, name: str, size: int, right: int) -> None:
        if size != right:
            raise self._broken(f"{name} of {size} bytes instead of {right}", ErrorCode.FRAME_SIZE_ERROR)

    def _check_connections(self, name: str, stream_id: int) -> None:
        """Raise where a frame of the whole connection comes on a stream."""
        if stream_id:
            raise self._broken(f"{name} on stream {stream_id}")

    def _track(self, name: str, stream_id: int) -> _Track | None:
        """Give the stream of a frame, None where it is over; raise where it never was."""
        track = self._streams.get(stream_id)
        if track is None and (stream_id >= self._next_id or stream_id % 2 == 0):
            raise self._broken(f"{name} on stream {stream_id}, which was not opened")
        return track

    def _count_empty(self) -> None:
        self._empty_frames += 1
        if self._empty_frames > limits.H2_EMPTY_FRAMES_MAX:
            raise self._broken("frames that bring nothing, without end", ErrorCode.ENHANCE_YOUR_CALM)

    def _count_control(self, size: int) -> None:
        self._control_bytes += size + frames.HEADER_BYTES
        if self._control_bytes > limits.H2_CONTROL_BYTES_MAX:
            raise self._broken("it asks for more than it takes answers", ErrorCode.ENHANCE_YOUR_CALM)

    def _padding(self, name: str, data: bytes, begin: int, after: int) -> int:
        """Give the bytes of padding (section 6.1), with the one that tells them."""
        padding = data[begin] + 1 if after > begin else 1
        if padding > after - begin:
            raise self._broken(f"the padding of {name} is longer than its frame")
        return padding

    def _end_remote(self, stream_id: int, track: _Track) -> None:
        track.remote_done = True
        if track.local_done:
            del self._streams[stream_id]

    def _malformed(self, stream_id: int, track: _Track, what: str, *, ended: bool) -> Malformed:
        track.malformed = True
        if ended:
            self._end_remote(stream_id, track)
        return Malformed(stream_id, what, ErrorCode.PROTOCOL_ERROR)

    # -- DATA (section 6.1) ---------------------------------------------------------------------------------------
    def _on_data(self, stream_id: int, flags: int, data: bytes, begin: int, after: int) -> Event | None:
        track = self._streams.get(stream_id) or self._track("DATA", stream_id)
        size = after - begin
        self._owed += size
        if self._owed > limits.H2_CONNECTION_WINDOW_BYTES:
            raise self._broken("DATA beyond the window of the connection", ErrorCode.FLOW_CONTROL_ERROR)
        padding = self._padding("DATA", data, begin, after) if flags & frames.PADDED else 0
        length = size - padding
        ended = flags & frames.END_STREAM != 0
        if length:
            self._empty_frames = 0
        elif not ended or track is None:
            self._count_empty()
        event: Event | None = None
        if track is not None:
            if padding:
                begin, after = begin + 1, begin + 1 + length
            event = self._on_body(stream_id, track, data[begin:after], size, ended=ended)
        if self._owed >= limits.H2_CONNECTION_WINDOW_BYTES // 4:
            self._give_credit()
        return event

    def _on_body(self, stream_id: int, track: _Track, piece: bytes, size: int, *, ended: bool) -> Event | None:
        if track.remote_done:
            raise self._broken(f"DATA after the end of stream {stream_id}", ErrorCode.STREAM_CLOSED)
        track.unreturned += size
        if track.unreturned > limits.H2_STREAM_WINDOW_BYTES:
            raise self._broken(f"DATA beyond the window of stream {stream_id}", ErrorCode.FLOW_CONTROL_ERROR)
        length = len(piece)
        if not track.malformed:
            what = _body_fault(track, length, ended=ended)
            if what:
                return self._malformed(stream_id, track, what, ended=ended)
        if ended:
            self._end_remote(stream_id, track)
        if track.malformed:
            return None
        track.received += length
        self.unread_bytes += length
        if size != length:
            self._owe(stream_id, track, size - length)  # padding is nobody's to read
        return Data(stream_id, piece, ended)

    # -- HEADERS and CONTINUATION (sections 6.2 and 6.10) ---------------------------------------------------------
    def _on_headers(self, stream_id: int, flags: int, data: bytes, begin: int, after: int) -> Event | None:
        if stream_id not in self._streams:
            self._track("HEADERS", stream_id)
        if flags & (frames.PADDED | frames.PRIORITIZED):
            if flags & frames.PADDED:
                padding = self._padding("HEADERS", data, begin, after)
                begin, after = begin + 1, after - padding + 1
            if flags & frames.PRIORITIZED:
                begin += 5
            if begin > after:
                raise self._broken("HEADERS too short for its priority", ErrorCode.FRAME_SIZE_ERROR)
        if flags & frames.END_HEADERS:
            return self._on_block(stream_id, data[begin:after], ended=flags & frames.END_STREAM != 0)
        self._block, self._block_flags, self._block_stream, self._block_frames = data[begin:after], flags, stream_id, 0
        return None

    def _on_continuation(self, stream_id: int, flags: int, payload: bytes) -> Event | None:
        if not self._block_stream:
            raise self._broken(f"CONTINUATION on stream {stream_id}, where no head is coming")
        self._block_frames += 1
        self._block += payload
        if len(self._block) > limits.HTTP_HEAD_BYTES_MAX or self._block_frames > limits.H2_CONTINUATIONS_MAX:
            raise self._broken(
                f"a head of more than {limits.HTTP_HEAD_BYTES_MAX} bytes or {limits.H2_CONTINUATIONS_MAX} frames",
                ErrorCode.ENHANCE_YOUR_CALM,
            )
        if not flags & frames.END_HEADERS:
            return None
        block, self._block, self._block_stream = self._block, b"", 0
        return self._on_block(stream_id, block, ended=self._block_flags & frames.END_STREAM != 0)

    def _on_block(self, stream_id: int, block: bytes, *, ended: bool) -> Event | None:
        """Read a whole field block, whatever it belongs to: it may change the header table."""
        try:
            answer = self._decoder.answer(block)
        except OversizedHeaderListError:
            what = f"a head of more than {limits.HTTP_HEAD_BYTES_MAX} bytes, or one that becomes so"
            raise self._broken(what, ErrorCode.ENHANCE_YOUR_CALM) from None
        except HPACKError:  # its text quotes the block
            raise self._broken("a field block that cannot be read", ErrorCode.COMPRESSION_ERROR) from None
        track = self._streams.get(stream_id)
        if track is None or track.malformed:
            self._count_empty()
        if track is None:
            return None
        if track.remote_done:
            raise self._broken(f"HEADERS after the end of stream {stream_id}", ErrorCode.STREAM_CLOSED)
        if track.malformed:
            if ended:
                self._end_remote(stream_id, track)
            return None
        if track.got_head:
            return self._on_trailers(stream_id, track, answer, ended=ended)
        what = answer.fault or ("" if answer.status else "it has no status")
        if what:
            return self._malformed(stream_id, track, what, ended=ended)
        if answer.status < 200:
            return self._on_interim(stream_id, track, answer.status, len(block), ended=ended)
        return self._on_head(stream_id, track, answer, ended=ended)

    def _on_head(self, stream_id: int, track: _Track, answer: Answer, *, ended: bool) -> Event:
        self._empty_frames = 0
        track.got_head = True
        status, length = answer.status, answer.length
        track.bodiless = track.is_head or status in (204, 304)
        track.expected = length
        if length and not track.bodiless:
            if ended:
                return self._malformed(stream_id, track, f"the body ended {length} bytes short", ended=True)
            if length > limits.H2_LARGE_BYTES:
                self._large[stream_id] = None
        if ended:
            self._end_remote(stream_id, track)
        return Head(stream_id, status, answer.fields.copy(), ended)

    def _on_interim(self, stream_id: int, track: _Track, status: int, size: int, *, ended: bool) -> Event:
        track.fields_bytes += size + frames.HEADER_BYTES
        if status == 101 or ended:
            what = "the answer 101, which HTTP/2 does not have" if status == 101 else "it ended with an interim answer"
            return self._malformed(stream_id, track, what, ended=ended)
        if track.fields_bytes > limits.HTTP_HEAD_BYTES_MAX:
            what = f"interim answers of more than {limits.HTTP_HEAD_BYTES_MAX} bytes"
            return self._malformed(stream_id, track, what, ended=False)
        return Interim(stream_id)

    def _on_trailers(self, stream_id: int, track: _Track, answer: Answer, *, ended: bool) -> Event:
        what = answer.fault
        if answer.status:
            what = "a second head"
        elif not ended:
            what = what or "trailers that do not end it"
        elif not what and track.expected is not None and not track.bodiless and track.received != track.expected:
            what = f"the body ended {track.expected - track.received} bytes short"
        if what:
            return self._malformed(stream_id, track, what, ended=ended)
        self._end_remote(stream_id, track)
        return Ended(stream_id)

    # -- the other frames (sections 6.3 to 6.9) -------------------------------------------------------------------
    def _on_priority(self, stream_id: int, flags: int, payload: bytes) -> None:
        if not stream_id:
            raise self._broken("PRIORITY on no stream")
        self._check_size("PRIORITY", len(payload), 5)
        self._count_empty()

    def _on_rst_stream(self, stream_id: int, flags: int, payload: bytes) -> Event | None:
        track = self._track("RST_STREAM", stream_id)
        self._check_size("RST_STREAM", len(payload), 4)
        if track is None:
            self._count_empty()
            return None
        del self._streams[stream_id]
        if track.malformed:
            return None
        return Reset(stream_id, int.from_bytes(payload, "big"), track.remote_done)

    def _on_settings(self, stream_id: int, flags: int, payload: bytes) -> Event | None:
        self._check_connections("SETTINGS", stream_id)
        self._count_control(len(payload))
        if flags & frames.ACK:
            self._check_size("SETTINGS with ACK", len(payload), 0)
            return None
        if len(payload) % 6:
            raise self._broken(f"SETTINGS of {len(payload)} bytes", ErrorCode.FRAME_SIZE_ERROR)
        if not self.settled:
            self.settled = True
            self._streams_max = limits.H2_STREAMS_MAX
        for name, value in frames.parse_settings(payload):
            self._set(name, value)
        self._send(frames.header(0, frames.SETTINGS, frames.ACK, 0))
        return Changed()

    def _set(self, name: int, value: int) -> None:
        """Take one setting of the peer (section 6.5.2); unknown ones mean nothing."""
        if name == Setting.HEADER_TABLE_SIZE:
            self._encoder.header_table_size = value
        elif name == Setting.ENABLE_PUSH:
            if value:
                raise self._broken(f"SETTINGS_ENABLE_PUSH of {value} from a server")
        elif name == Setting.MAX_CONCURRENT_STREAMS:
            self._streams_max = value
        elif name == Setting.INITIAL_WINDOW_SIZE:
            if value > frames.WINDOW_MAX:
                raise self._broken(f"SETTINGS_INITIAL_WINDOW_SIZE of {value}", ErrorCode.FLOW_CONTROL_ERROR)
            change, self._initial_window = value - self._initial_window, value
            for number, track in self._streams.items():
                track.window += change
                if track.window > frames.WINDOW_MAX:
                    what = f"SETTINGS_INITIAL_WINDOW_SIZE of {value} makes the window of stream {number} too large"
                    raise self._broken(what, ErrorCode.FLOW_CONTROL_ERROR)
        elif name == Setting.MAX_FRAME_SIZE and not frames.FRAME_BYTES_LEAST <= value < 2**24:
            raise self._broken(f"SETTINGS_MAX_FRAME_SIZE of {value}")  # else: we send none larger than the least

    def _on_push_promise(self, stream_id: int, flags: int, payload: bytes) -> None:
        raise self._broken(f"PUSH_PROMISE on stream {stream_id}, though push is off")

    def _on_ping(self, stream_id: int, flags: int, payload: bytes) -> Event | None:
        self._check_connections("PING", stream_id)
        self._check_size("PING", len(payload), 8)
        self._count_control(len(payload))
        if flags & frames.ACK:
            return PingAck(payload)
        self._send(frames.header(8, frames.PING, frames.ACK, 0), payload)
        return None

    def _on_goaway(self, stream_id: int, flags: int, payload: bytes) -> Event:
        self._check_connections("GOAWAY", stream_id)
        if len(payload) < 8:
            raise self._broken(f"GOAWAY of {len(payload)} bytes", ErrorCode.FRAME_SIZE_ERROR)
        self._count_empty()
        last = int.from_bytes(payload[:4], "big") & frames.STREAM_ID_MAX
        return GoAway(last, int.from_bytes(payload[4:8], "big"))

    def _on_window_update(self, stream_id: int, flags: int, payload: bytes) -> Event | None:
        track = self._track("WINDOW_UPDATE", stream_id) if stream_id else None
        self._check_size("WINDOW_UPDATE", len(payload), 4)
        self._credit_frames += 1
        if self._credit_frames > limits.H2_CREDIT_FRAMES_MAX:
            raise self._broken("credit without end", ErrorCode.ENHANCE_YOUR_CALM)
        size = int.from_bytes(payload, "big") & frames.WINDOW_MAX
        if not stream_id:
            self._window += size
            if not size:
                raise self._broken("WINDOW_UPDATE by nothing")
            if self._window > frames.WINDOW_MAX:
                raise self._broken("the window of the connection becomes too large", ErrorCode.FLOW_CONTROL_ERROR)
            return Changed()
        if track is None or track.malformed:
            return None
        track.window += size
        if not size or track.window > frames.WINDOW_MAX:
            track.malformed = True
            if not size:
                return Malformed(stream_id, "WINDOW_UPDATE by nothing", ErrorCode.PROTOCOL_ERROR)
            return Malformed(stream_id, "its window becomes too large", ErrorCode.FLOW_CONTROL_ERROR)
        return None if track.local_done else Changed()


_HANDLERS: Final = {
    frames.PRIORITY: Http2Codec._on_priority,
    frames.RST_STREAM: Http2Codec._on_rst_stream,
    frames.SETTINGS: Http2Codec._on_settings,
    frames.PUSH_PROMISE: Http2Codec._on_push_promise,
    frames.PING: Http2Codec._on_ping,
    frames.GOAWAY: Http2Codec._on_goaway,
    frames.WINDOW_UPDATE: Http2Codec._on_window_update,
    frames.CONTINUATION: Http2Codec._on_continuation,
}


def _body_fault(track: _Track, length: int, *, ended: bool) -> str:
    """Say what is wrong with a piece of a body (RFC 9113 section 8.1.1); empty for nothing."""
    if not track.got_head:
        return "a body before its head"
    if track.bodiless:
        return "a body where there is none" if length else ""
    if track.expected is None:
        return ""
    missing = track.expected - track.received - length
    if missing < 0:
        return f"the body is longer than its Content-Length, {track.expected}"
    return f"the body ended {missing} bytes short" if ended and missing else ""
