"""HTTP/2 without I/O: requests to frames, and frames to what happened (RFC 9113), on `h2`.

`h2` keeps the header tables, the windows and the states of the streams. Frames pass here first, as four things are
done otherwise than it does them:

- GOAWAY: `h2` is closed by it; here the streams that the peer goes on with do go on (RFC 9113 section 6.8).
- What still comes for a stream that we reset is dropped in silence; `h2` answers each DATA frame with one more reset,
  and servers count those.
- A body that is longer or shorter than its Content-Length ends its stream; in `h2` the whole connection.
- Credit is two things: the connection's is given back when bytes arrive, the stream's when they are read, so that a
  slow reader holds back its own stream only.
"""

import logging
import re
import struct
from collections.abc import AsyncIterable, Iterator
from typing import Final, NamedTuple

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hpack import NeverIndexedHeaderTuple

from stormline.core import errors, limits
from stormline.outbound.http2_fields import FieldDecoder, FieldEncoder
from stormline.outbound.messages import HttpRequest

_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
"""RFC 9110 section 5.6.2."""
_TARGET: Final = re.compile(rb"[\x21-\x7e]+")
_HOST: Final = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=%:\-]+")
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_WITH_CONTENT: Final = frozenset({b"POST", b"PUT", b"PATCH"})
"""Methods whose meaning expects content: without it they say that there is none (RFC 9110 section 8.6)."""
_PORTS: Final = {"http": 80, "https": 443}
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
"""RFC 9113 section 8.2.1: a token without upper case."""
_VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_STATUS: Final = re.compile(rb"[1-9][0-9][0-9]")
_CONNECTION_SPECIFIC: Final = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade",
})  # fmt: skip
"""Fields of HTTP/1's connections, malformed in HTTP/2 (RFC 9113 section 8.2.2)."""
_CHANGING: Final = frozenset({
    b":path", b"content-length", b"content-range", b"idempotency-key", b"if-match", b"if-modified-since",
    b"if-none-match", b"range", b"traceparent", b"x-request-id",
})  # fmt: skip
"""Fields whose values rarely come again: in the header table they would only push out those that do."""
_SPECIAL: Final = frozenset({b"connection", b"content-length", b"host", b"transfer-encoding"})
"""Fields that are not sent as they are given."""
_CREDENTIALS: Final = frozenset({b"authorization", b"cookie", b"proxy-authorization"})

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PUSH_PROMISE = 0x0, 0x1, 0x3, 0x4, 0x5
_PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0x6, 0x7, 0x8, 0x9
_END_STREAM, _PADDED = 0x1, 0x8
_HEADER_BYTES: Final = 9

# hpack writes every header it codes to its log, credentials too. A level set by the application itself stays.
if logging.getLogger("hpack").level == logging.NOTSET:
    logging.getLogger("hpack").setLevel(logging.INFO)


# -- requests ---------------------------------------------------------------------------------------------------------
class Encoded(NamedTuple):
    """A request ready to go.

    Attributes:
        fields: pseudo-header fields first, all names in lower case.
        body: what follows.
        length: bytes the body must have, None where it is not known.
        is_head: the method is HEAD, the answer has no body whatever it says.
    """

    fields: list[tuple[bytes, bytes]]
    body: bytes | AsyncIterable[bytes]
    length: int | None
    is_head: bool

    def __repr__(self) -> str:
        """Show no header and no body: they carry credentials."""
        return f"<Encoded with {len(self.fields)} fields>"


def _begin(name: bytes) -> bytes:
    """Give as much of a bad header name as is one: the rest may be a whole line with its credentials."""
    found = _TOKEN.match(name)
    return found[0][:40] if found else b""


def encode(request: HttpRequest) -> Encoded:
    """Check a request and put its head into the fields of HTTP/2 (RFC 9113 section 8.3.1).

    What `http1_codec.encode` refuses is refused here. `Host` becomes `:authority`; fields that belong to HTTP/1's
    connections are left out, with those that `Connection` names; cookie fields stay as they are.

    Raises:
        LocalProtocolError: a part of it could break out of its place (CR, LF, NUL, spaces), or the framing fields
            contradict the body, or the method is CONNECT. Nothing was sent.
    """
    method = request.method.encode("utf-8", "surrogateescape")
    if not _TOKEN.fullmatch(method) or method == b"CONNECT":
        raise errors.LocalProtocolError(f"method {request.method[:40]!r} cannot be sent")
    if not _TARGET.fullmatch(request.target):
        raise errors.LocalProtocolError("the request target is empty or holds a space, control or non-ASCII character")
    fields: list[tuple[bytes, bytes]] = [
        (b":method", method),
        (b":scheme", request.scheme.encode("ascii")),
        (b":authority", b""),
        NeverIndexedHeaderTuple(b":path", request.target),
    ]
    special: dict[bytes, bytes] = {}
    for given, value in request.headers:
        if not _TOKEN.fullmatch(given):
            raise errors.LocalProtocolError(f"a header name that begins {_begin(given)!r} is not a token")
        if not _VALUE.fullmatch(value):
            raise errors.LocalProtocolError(f"the value of header {given[:40]!r} holds a control character")
        name = given.lower()
        if name in _SPECIAL:
            if name in special:
                if name != b"connection":
                    raise errors.LocalProtocolError(f"header {given!r} is given twice")
                value = special[name] + b"," + value
            special[name] = value
        elif name in _CHANGING or (name in _CREDENTIALS and len(value) < limits.H2_INDEXED_BYTES_MIN):
            fields.append(NeverIndexedHeaderTuple(name, value))
        elif name not in _CONNECTION_SPECIFIC and (name != b"te" or value.strip().lower() == b"trailers"):
            fields.append((name, value))
    fields[2] = (b":authority", special[b"host"] if b"host" in special else _authority(request))
    if b"connection" in special:
        dropped = {token.strip().lower() for token in special[b"connection"].split(b",")}
        fields[4:] = [field for field in fields[4:] if field[0] not in dropped]
    length = _length(request, special)
    if length is not None and (length or b"content-length" in special or method in _WITH_CONTENT):
        fields.append(NeverIndexedHeaderTuple(b"content-length", b"%d" % length))
    return Encoded(fields, b"" if request.body is None else request.body, length, method == b"HEAD")


def _authority(request: HttpRequest) -> bytes:
    if not _HOST.fullmatch(request.host):
        raise errors.LocalProtocolError(f"host {request.host[:80]!r} cannot stand in a Host header")
    host = f"[{request.host}]" if ":" in request.host else request.host
    return (host if request.port == _PORTS.get(request.scheme) else f"{host}:{request.port}").encode("ascii")


def _length(request: HttpRequest, special: dict[bytes, bytes]) -> int | None:
    """Give the bytes that the body must have, None where that is not known."""
    body = request.body
    coding, given = special.get(b"transfer-encoding"), special.get(b"content-length")
    if coding is not None:
        if given is not None or coding.strip().lower() != b"chunked":
            raise errors.LocalProtocolError("Transfer-Encoding may only be 'chunked', and without Content-Length")
        return None
    if given is not None:
        if not _LENGTH.fullmatch(given):
            raise errors.LocalProtocolError("Content-Length is not a number")
        if not isinstance(body, AsyncIterable) and int(given) != len(body or b""):
            raise errors.LocalProtocolError(f"Content-Length {int(given)}, but the body has {len(body or b'')} bytes")
        return int(given)
    return None if isinstance(body, AsyncIterable) else len(body or b"")


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
    """An answer breaks HTTP. Nothing more is told of its stream, which must be reset."""

    stream_id: int
    what: str


class GoAway(NamedTuple):
    """The peer takes no new stream; those above `last_stream_id` it has not touched."""

    last_stream_id: int
    code: int


class PingAck(NamedTuple):
    """The peer answered a ping."""

    data: bytes


class Late(NamedTuple):
    """A head came for a stream that is over; one more reset answers it."""


class Changed(NamedTuple):
    """Windows or settings of the peer changed: what waited may go on."""


Event = Head | Interim | Data | Ended | Reset | Malformed | GoAway | PingAck | Late | Changed


class ConnectionBroken(Exception):
    """The peer broke HTTP/2 itself: the connection cannot go on. The GOAWAY that says so waits in `data_to_send`."""


def code_name(code: int) -> str:
    """Give the name of an error code (RFC 9113 section 7)."""
    try:
        return ErrorCodes(code).name
    except ValueError:
        return f"code {code}"


class _Track:
    """One open stream, as far as `h2` does not follow it."""

    __slots__ = ("bodiless", "expected", "fields_bytes", "got_head", "is_head", "local_done", "owed", "received",
                 "remote_done")  # fmt: skip

    def __init__(self, *, is_head: bool, local_done: bool) -> None:
        self.is_head = is_head
        self.bodiless = False  # the answer has no body, whatever it says
        self.local_done = local_done
        self.remote_done = False
        self.got_head = False
        self.expected: int | None = None  # by Content-Length
        self.received = 0  # body bytes
        self.owed = 0  # credit not given back yet
        self.fields_bytes = 0  # of the heads so far


class _Protocol(h2.connection.H2Connection):
    """h2's connection, remembering fewer closed streams."""

    MAX_CLOSED_STREAMS = limits.H2_CLOSED_REMEMBERED


# The checks of outgoing fields are made in `encode`, those of answers in `_answer`.
_CONFIG: Final = h2.config.H2Configuration(
    client_side=True,
    header_encoding=None,
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
    validate_inbound_headers=False,
    normalize_inbound_headers=False,
)


class Http2Codec:
    """A client's end of one HTTP/2 connection, without I/O. Bytes to send gather in `data_to_send`.

    The preface, our settings and the connection's window are there from the start. Push is refused.

    Args:
        streams_untold: streams that may be open at once before the peer's SETTINGS have come.

    Attributes:
        settled: they have come.
        unread_bytes: body bytes told of and not yet `consumed`.
        wants_send: something waits in `data_to_send`.
    """

    __slots__ = ("_block_bytes", "_buffer", "_control_bytes", "_empty_frames", "_extra", "_h2", "_large", "_owed",
                 "_streams", "_untold", "settled", "unread_bytes", "wants_send")  # fmt: skip

    def __init__(self, streams_untold: int = limits.H2_STREAMS_UNTOLD) -> None:
        self._h2 = _Protocol(_CONFIG)
        self._h2.local_settings = h2.settings.Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: limits.H2_STREAM_WINDOW_BYTES,
                SettingCodes.MAX_HEADER_LIST_SIZE: limits.HTTP_HEAD_BYTES_MAX,
                SettingCodes.MAX_CONCURRENT_STREAMS: limits.H2_STREAMS_MAX,
            },
        )
        self._h2.encoder = FieldEncoder()
        self._h2.decoder = FieldDecoder(max_header_list_size=limits.HTTP_HEAD_BYTES_MAX)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(limits.H2_CONNECTION_WINDOW_BYTES - 65_535)
        self._streams: dict[int, _Track] = {}
        self._large: dict[int, None] = {}  # streams of answers that are, or were, large
        self._buffer = b""  # of a frame that is not whole
        self._extra = bytearray()  # frames that h2 does not know of
        self._owed = 0  # credit of the connection not given back yet
        self._block_bytes = 0  # of the header block that is coming
        self._control_bytes = 0  # answers to the peer's frames in h2's buffer, at most
        self._empty_frames = 0
        self._untold = streams_untold
        self.settled = False
        self.unread_bytes = 0
        self.wants_send = True

    # -- out ------------------------------------------------------------------------------------------------------
    @property
    def open_streams(self) -> int:
        """Streams that count against the peer's limit."""
        return len(self._streams)

    @property
    def streams_max(self) -> int:
        """Streams that may be open at once, now."""
        allowed: int = self._h2.remote_settings.max_concurrent_streams if self.settled else self._untold
        return min(allowed, limits.H2_STREAMS_MAX)

    @property
    def begun(self) -> int:
        """Streams opened so far."""
        return (self._h2.highest_outbound_stream_id + 1) // 2

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
        return self._h2.highest_outbound_stream_id >= self._h2.HIGHEST_ALLOWED_STREAM_ID - 2

    def data_to_send(self) -> bytes:
        """Give, and forget, the frames that wait."""
        self.wants_send = False
        self._control_bytes = 0
        data: bytes = self._h2.data_to_send()
        if self._extra:
            data += bytes(self._extra)
            self._extra.clear()
        return data

    def open(self, request: Encoded, *, ended: bool) -> int:
        """Begin a stream with the head of a request; give its number. `open_streams` must be below `streams_max`."""
        stream_id: int = self._h2.get_next_available_stream_id()
        self._h2.send_headers(stream_id, request.fields, end_stream=ended)
        self._streams[stream_id] = _Track(is_head=request.is_head, local_done=ended)
        self.wants_send = True
        return stream_id

    def is_open(self, stream_id: int) -> bool:
        """Say whether a stream counts as open."""
        return stream_id in self._streams

    def sendable(self, stream_id: int) -> int:
        """Give the size of the largest DATA frame the stream may send now; 0 or less for none."""
        if stream_id not in self._streams:
            return 0
        window: int = self._h2.local_flow_control_window(stream_id)
        size: int = min(window, self._h2.max_outbound_frame_size, limits.H2_FRAME_BYTES_MAX)
        return size

    def send_data(self, stream_id: int, data: bytes | memoryview, *, ended: bool) -> None:
        """Add a DATA frame, of at most `sendable` bytes."""
        self._h2.send_data(stream_id, data, end_stream=ended)
        self.wants_send = True
        if ended:
            self._streams[stream_id].local_done = True
            self._forget_if_done(stream_id)

    def reset(self, stream_id: int, code: ErrorCodes) -> bool:
        """End a stream at once; False where it had ended by itself and nothing needs to be said."""
        if self._streams.pop(stream_id, None) is None:
            return False
        try:
            self._h2.reset_stream(stream_id, code)
        except h2.exceptions.StreamClosedError:
            return False  # a malformed answer that was whole
        self.wants_send = True
        return True

    def ping(self, data: bytes) -> None:
        """Ask for a `PingAck` with the same 8 bytes."""
        self._h2.ping(data)
        self.wants_send = True

    def goaway(self, code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Say that we are going; nothing can be sent after it."""
        self._h2.close_connection(code)
        self.wants_send = True

    def consumed(self, stream_id: int, size: int) -> None:
        """Give back the credit for `size` bytes of a stream that have been read or thrown away."""
        self.unread_bytes -= size
        track = self._streams.get(stream_id)
        if track is not None and not track.remote_done:
            track.owed += size
            if track.owed >= limits.H2_STREAM_WINDOW_BYTES // 4:
                self._h2.increment_flow_control_window(track.owed, stream_id)
                track.owed = 0
                self.wants_send = True
        self._give_credit()

    def _give_credit(self) -> None:
        """Give the connection's credit back, except for what is unread above `limits.H2_UNREAD_BYTES`."""
        size = self._owed - max(0, self.unread_bytes - limits.H2_UNREAD_BYTES)
        if size >= limits.H2_CONNECTION_WINDOW_BYTES // 4:
            self._h2.increment_flow_control_window(size)
            self._owed -= size
            self.wants_send = True

    def _forget_if_done(self, stream_id: int) -> None:
        track = self._streams.get(stream_id)
        if track is not None and track.local_done and track.remote_done:
            del self._streams[stream_id]

    # -- in -------------------------------------------------------------------------------------------------------
    def receive_data(self, data: bytes) -> Iterator[Event]:
        """Take the peer's next bytes and tell what they bring; between two events the codec may be used.

        Raises:
            ConnectionBroken: they break HTTP/2, or pass a bound. What came before has been told.
        """
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        position, end = 0, len(data)
        while end - position >= _HEADER_BYTES:
            size = int.from_bytes(data[position : position + 3], "big")
            if size > limits.H2_FRAME_BYTES_MAX:
                raise self._broken(f"a frame of {size} bytes", ErrorCodes.FRAME_SIZE_ERROR)
            after = position + _HEADER_BYTES + size
            if after > end:
                break
            yield from self._receive_frame(data[position:after])
            position = after
        self._buffer = data[position:]

    def _receive_frame(self, frame: bytes) -> Iterator[Event]:
        kind, flags = frame[3], frame[4]
        stream_id = int.from_bytes(frame[5:9], "big") & 0x7FFF_FFFF
        size = len(frame) - _HEADER_BYTES
        if self._block_bytes and kind != _CONTINUATION:
            raise self._broken("a header block is interrupted", ErrorCodes.PROTOCOL_ERROR)
        if kind == _DATA and stream_id:
            yield from self._receive_data_frame(frame, stream_id, flags, size)
            return
        if kind == _GOAWAY and not stream_id and size >= 8:
            last, code = struct.unpack_from(">LL", frame, _HEADER_BYTES)
            yield GoAway(last & 0x7FFF_FFFF, code)
            return
        if kind in (_RST_STREAM, _WINDOW_UPDATE) and stream_id and self._is_past(stream_id):
            return
        if kind in (_HEADERS, _CONTINUATION):
            self._count_block(kind, flags, size)
            if kind == _HEADERS and self._is_past(stream_id):
                self.wants_send = True
                yield Late()
        elif kind in (_SETTINGS, _PING):
            self._count_control(size)
        elif kind not in (_RST_STREAM, _PUSH_PROMISE, _WINDOW_UPDATE, _GOAWAY):
            self._count_empty()
        for event in self._feed(frame):
            yield from self._told(event, size)

    def _is_past(self, stream_id: int) -> bool:
        """Say whether a stream was ours and is over."""
        return stream_id % 2 == 1 and stream_id <= self._h2.highest_outbound_stream_id and (
            stream_id not in self._streams
        )  # fmt: skip

    def _count_block(self, kind: int, flags: int, size: int) -> None:
        self._block_bytes += size + 1
        if self._block_bytes > limits.HTTP_HEAD_BYTES_MAX:
            raise self._broken(f"a head of more than {limits.HTTP_HEAD_BYTES_MAX} bytes", ErrorCodes.ENHANCE_YOUR_CALM)
        if flags & 0x4:  # END_HEADERS
            self._block_bytes = 0

    def _count_control(self, size: int) -> None:
        self.wants_send = True
        self._control_bytes += size + _HEADER_BYTES
        if self._control_bytes > limits.H2_CONTROL_BYTES_MAX:
            raise self._broken("it asks for more than it takes answers", ErrorCodes.ENHANCE_YOUR_CALM)

    def _count_empty(self) -> None:
        self._empty_frames += 1
        if self._empty_frames > limits.H2_EMPTY_FRAMES_MAX:
            raise self._broken("frames that bring nothing, without end", ErrorCodes.ENHANCE_YOUR_CALM)

    def _receive_data_frame(self, frame: bytes, stream_id: int, flags: int, size: int) -> Iterator[Event]:
        track = self._streams.get(stream_id)
        if track is None and self._is_past(stream_id):
            # Sent before our reset got there. The peer has taken it off the connection's window; h2 never sees it.
            if size:
                self._extra += struct.pack(">HBBBLL", 0, 4, _WINDOW_UPDATE, 0, 0, size)
                self.wants_send = True
            return
        padding = 0
        if flags & _PADDED:
            padding = (frame[_HEADER_BYTES] if size else 0) + 1
        length, ended = size - padding, bool(flags & _END_STREAM)
        if track is not None and length >= 0:
            what = _body_fault(track, length, ended=ended)
            if what:
                yield from self._drop(stream_id, track, size, what)
                return
            if track.bodiless and track.expected and ended:
                # Right, but h2 would miss the bytes that Content-Length speaks of.
                self._end_remote(stream_id, track)
                self.reset(stream_id, ErrorCodes.NO_ERROR)
                yield Ended(stream_id)
                return
        for event in self._feed(frame):
            if isinstance(event, h2.events.DataReceived) and track is not None:
                self._owed += size
                if length:
                    self._empty_frames = 0
                elif not ended:
                    self._count_empty()
                track.received += length
                track.owed += padding
                self.unread_bytes += length
                if not length:
                    self.consumed(stream_id, 0)  # padding is nobody's to read
                if ended:
                    self._end_remote(stream_id, track)
                self._give_credit()
                yield Data(stream_id, event.data or b"", ended)

    def _drop(self, stream_id: int, track: _Track, size: int, what: str) -> Iterator[Event]:
        """Tell that an answer breaks HTTP, without h2's knowing of the frame."""
        self._extra += struct.pack(">HBBBLL", 0, 4, _WINDOW_UPDATE, 0, 0, size) if size else b""
        self.wants_send = True
        track.remote_done = False
        yield Malformed(stream_id, what)

    def _end_remote(self, stream_id: int, track: _Track) -> None:
        track.remote_done = True
        self._forget_if_done(stream_id)

    def _feed(self, frame: bytes) -> list[h2.events.Event]:
        try:
            return self._h2.receive_data(frame)
        except h2.exceptions.ProtocolError as error:
            self.wants_send = True
            raise ConnectionBroken(str(error).splitlines()[0][:200].lower() or type(error).__name__) from error

    def _broken(self, what: str, code: ErrorCodes) -> ConnectionBroken:
        self.goaway(code)
        return ConnectionBroken(what)

    def _told(self, event: h2.events.Event, size: int) -> Iterator[Event]:
        if isinstance(event, h2.events.ResponseReceived):
            yield from self._answer(
                event.stream_id or 0, event.headers or [], size, ended=event.stream_ended is not None
            )
        elif isinstance(event, h2.events.InformationalResponseReceived):
            yield from self._interim(event.stream_id or 0, size)
        elif isinstance(event, h2.events.TrailersReceived):
            yield from self._trailers(event.stream_id or 0, event.headers or [])
        elif isinstance(event, h2.events.StreamReset):
            stream_id = event.stream_id or 0
            track = self._streams.pop(stream_id, None)
            if track is not None:
                self.wants_send = self.wants_send or not event.remote_reset
                yield Reset(stream_id, int(event.error_code or 0), track.remote_done)
        elif isinstance(event, h2.events.PingAckReceived):
            yield PingAck(event.ping_data or b"")
        elif isinstance(event, h2.events.WindowUpdated | h2.events.RemoteSettingsChanged):
            self.settled = self.settled or isinstance(event, h2.events.RemoteSettingsChanged)
            yield Changed()

    def _answer(self, stream_id: int, headers: list[tuple[bytes, bytes]], size: int, *, ended: bool) -> Iterator[Event]:
        track = self._streams.get(stream_id)
        if track is None:
            return
        self._empty_frames = 0
        track.got_head = True
        what = _head_fault(headers)
        if what:
            yield Malformed(stream_id, what)
            return
        status, fields = int(headers[0][1]), [(name, value) for name, value in headers[1:]]
        lengths = [value for name, value in fields if name == b"content-length"]
        track.bodiless = track.is_head or status in (204, 304)
        if len(lengths) > 1:
            yield Malformed(stream_id, "the content length is not one number")
            return
        track.expected = int(lengths[0]) if lengths else None
        if track.expected is not None and track.expected > limits.H2_LARGE_BYTES and not track.bodiless:
            self._large[stream_id] = None
        if ended:
            if track.expected and not track.bodiless:
                yield Malformed(stream_id, f"the body ended {track.expected} bytes short")
                return
            self._end_remote(stream_id, track)
        yield Head(stream_id, status, fields, ended)

    def _interim(self, stream_id: int, size: int) -> Iterator[Event]:
        track = self._streams.get(stream_id)
        if track is None:
            return
        track.fields_bytes += size
        if track.fields_bytes > limits.HTTP_HEAD_BYTES_MAX:
            yield Malformed(stream_id, f"interim answers of more than {limits.HTTP_HEAD_BYTES_MAX} bytes")
        else:
            yield Interim(stream_id)

    def _trailers(self, stream_id: int, headers: list[tuple[bytes, bytes]]) -> Iterator[Event]:
        track = self._streams.get(stream_id)
        if track is None:
            return
        what = _fields_fault(headers)
        if not what and track.expected is not None and not track.bodiless and track.received != track.expected:
            what = f"the body ended {track.expected - track.received} bytes short"
        if what:
            yield Malformed(stream_id, what)
            return
        self._end_remote(stream_id, track)
        yield Ended(stream_id)


# -- what makes an answer malformed (RFC 9113 section 8.1.1) ----------------------------------------------------------
def _body_fault(track: _Track, length: int, *, ended: bool) -> str:
    if not track.got_head:
        return ""  # h2 says so
    if track.bodiless:
        return "a body where there is none" if length else ""
    if track.expected is None:
        return ""
    missing = track.expected - track.received - length
    if missing < 0:
        return f"the body is longer than its Content-Length, {track.expected}"
    return f"the body ended {missing} bytes short" if ended and missing else ""


def _head_fault(headers: list[tuple[bytes, bytes]]) -> str:
    if not headers or headers[0][0] != b":status" or not _STATUS.fullmatch(headers[0][1]):
        return "it has no status"
    return _fields_fault(headers[1:])


def _fields_fault(fields: list[tuple[bytes, bytes]]) -> str:
    if len(fields) > limits.HTTP_HEADERS_MAX:
        return f"more than {limits.HTTP_HEADERS_MAX} fields"
    for name, value in fields:
        if not _NAME.fullmatch(name):
            return "a field name that is none"  # also a pseudo-header field in the wrong place
        if not _VALUE.fullmatch(value):
            return "a control character in a field"
        if name in _CONNECTION_SPECIFIC:
            return f"the field {name.decode()}, which belongs to HTTP/1"
    return ""
