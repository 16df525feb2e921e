"""HTTP messages as bytes of their own, without a connection: binary HTTP (RFC 9292).

    data = encode_request(Request(b"GET", b"https", b"shop.test", b"/cart"))
    request = decode_request(data)

A message whose end is not known yet is written piece by piece (`request_head`, `chunk`, `end`) and read by a `Decoder`;
both forms, of known and of indeterminate length, are read by the same one.

Fields are pairs of a name in lower case and a value, as in HTTP/2 (RFC 9113 section 8.2.1); what breaks that is an
invalid message (RFC 9292 section 4), never mended. Fields that are about a connection have no place here: who
translates a message leaves them out.
"""

import re
from collections.abc import Generator
from typing import Final, NamedTuple, TypeAlias

from stormline.core import limits_relay
from stormline.core.errors import RemoteProtocolError

Fields: TypeAlias = tuple[tuple[bytes, bytes], ...]

CONNECTION_FIELDS: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade"}
)  # fmt: skip
"""Fields about one connection, which end with it (RFC 9110 section 7.6.1; Trailer because none are passed on)."""
_KNOWN_REQUEST: Final = 0
_KNOWN_RESPONSE: Final = 1
_STREAMED_REQUEST: Final = 2
_STREAMED_RESPONSE: Final = 3
_WHOLE_REQUEST: Final = bytes((_KNOWN_REQUEST,))
_VARINT_MAX: Final = (1 << 62) - 1
_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_SCHEME: Final = re.compile(rb"[a-z][a-z0-9+\-.]*")
_VISIBLE: Final = re.compile(rb"[\x21-\x7e]+")
_AUTHORITY: Final = re.compile(rb"[A-Za-z0-9.\-_~!$&'()*+,;=%:\[\]]*")
_VALUE_BAD: Final = re.compile(rb"[\0\r\n]|\A[ \t]|[ \t]\Z")


class Request(NamedTuple):
    """A request.

    Attributes:
        method: as it is, case included.
        scheme: in lower case.
        authority: host with its port where that is not the scheme's own; empty where the host is among the fields.
        path: path with query, `*` for OPTIONS; empty only for CONNECT.
        headers: fields before the content.
        content: the body.
        trailers: fields after it.
    """

    method: bytes
    scheme: bytes
    authority: bytes
    path: bytes
    headers: Fields = ()
    content: bytes = b""
    trailers: Fields = ()


class Response(NamedTuple):
    """A final response.

    Attributes:
        status: 200 to 599.
        headers: fields before the content.
        content: the body.
        trailers: fields after it.
    """

    status: int
    headers: Fields = ()
    content: bytes = b""
    trailers: Fields = ()


class RequestHead(NamedTuple):
    """What a request begins with; see `Request`."""

    method: bytes
    scheme: bytes
    authority: bytes
    path: bytes
    headers: Fields


class ResponseHead(NamedTuple):
    """What a response begins with; an informational one (100 to 199) is followed by another head."""

    status: int
    headers: Fields


class Data(NamedTuple):
    """A piece of the content, never empty."""

    content: bytes


class End(NamedTuple):
    """The message is whole."""

    trailers: Fields


Event: TypeAlias = RequestHead | ResponseHead | Data | End


# -- writing ----------------------------------------------------------------------------------------------------------
def varint(value: int) -> bytes:
    """Encode a number of variable length (RFC 9000 section 16).

    Raises:
        ValueError: negative, or more than 62 bits.
    """
    if 0 <= value < 0x40:
        return bytes((value,))
    if 0 <= value < 0x4000:
        return (value | 0x4000).to_bytes(2, "big")
    if 0 <= value < 0x4000_0000:
        return (value | 0x8000_0000).to_bytes(4, "big")
    if 0 <= value <= _VARINT_MAX:
        return (value | 0xC000_0000_0000_0000).to_bytes(8, "big")
    raise ValueError(f"{value} is no number of 62 bits")


def encode_request(request: Request, *, pad_to: int = 1) -> bytes:
    """Give a whole request in the form of known length.

    Args:
        request: the request.
        pad_to: zero bytes make the length a multiple of this, so that it tells less.

    Raises:
        ValueError: it cannot be a message.
    """
    head = RequestHead(request.method, request.scheme, request.authority, request.path, request.headers)
    return _whole(_control(head, _KNOWN_REQUEST), request.headers, request.content, request.trailers, pad_to)


def encode_response(response: Response, *, pad_to: int = 1) -> bytes:
    """Give a whole response in the form of known length; see `encode_request`.

    Raises:
        ValueError: it cannot be a message.
    """
    if not 200 <= response.status <= 599:
        raise ValueError(f"status {response.status} is not final")
    control = varint(_KNOWN_RESPONSE) + varint(response.status)
    return _whole(control, response.headers, response.content, response.trailers, pad_to)


def request_head(head: RequestHead) -> bytes:
    """Begin a request whose end is not known yet; `chunk` and `end` go on.

    Raises:
        ValueError: it cannot be a message.
    """
    return _control(head, _STREAMED_REQUEST) + _field_lines(head.headers) + b"\0"


def response_head(head: ResponseHead) -> bytes:
    """Begin a response whose end is not known yet.

    Raises:
        ValueError: it cannot be a message.
    """
    if not 200 <= head.status <= 599:
        raise ValueError(f"status {head.status} is not final")
    return varint(_STREAMED_RESPONSE) + varint(head.status) + _field_lines(head.headers) + b"\0"


def chunk(content: bytes) -> bytes:
    """Give a piece of the content; nothing for an empty one, which would be its end."""
    return varint(len(content)) + content if content else b""


def end(trailers: Fields = ()) -> bytes:
    """End a message that `request_head` or `response_head` began.

    Raises:
        ValueError: a field cannot be sent.
    """
    return b"\0" + _field_lines(trailers) + b"\0"


def _whole(control: bytes, headers: Fields, content: bytes, trailers: Fields, pad_to: int) -> bytes:
    before, after = _field_lines(headers), _field_lines(trailers)
    parts = (control, varint(len(before)), before, varint(len(content)), content, varint(len(after)), after)
    data = b"".join(parts)
    return data + bytes(-len(data) % pad_to)


def _control(head: RequestHead, framing: int) -> bytes:
    wrong = _wrong_control(head)
    if wrong:
        raise ValueError(wrong)
    texts = (head.method, head.scheme, head.authority, head.path)
    return varint(framing) + b"".join(varint(len(text)) + text for text in texts)


def _field_lines(fields: Fields) -> bytes:
    parts: list[bytes] = []
    for name, value in fields:
        wrong = _wrong_field(name, value)
        if wrong:
            raise ValueError(wrong)
        parts += (varint(len(name)), name, varint(len(value)), value)
    return b"".join(parts)


def _wrong_control(head: RequestHead) -> str:
    """Say what cannot be in control data, empty where all can."""
    if not _TOKEN.fullmatch(head.method):
        return f"no method: {head.method[:40]!r}"
    if not _AUTHORITY.fullmatch(head.authority):
        return f"no authority: {head.authority[:80]!r}"
    if head.method == b"CONNECT":
        return "" if head.authority and not head.scheme and not head.path else "CONNECT with more than an authority"
    if not _SCHEME.fullmatch(head.scheme):
        return f"no scheme: {head.scheme[:40]!r}"
    if head.path == b"*" and head.method == b"OPTIONS":
        return ""
    return "" if head.path[:1] == b"/" and _VISIBLE.fullmatch(head.path) else f"no path: {head.path[:80]!r}"


def _wrong_field(name: bytes, value: bytes) -> str:
    if not _NAME.fullmatch(name):
        return f"no field name: {name[:40]!r}"
    return f"the value of {name.decode()!r} cannot be sent" if _VALUE_BAD.search(value) else ""


# -- reading ----------------------------------------------------------------------------------------------------------
def decode_request(data: bytes, *, head_bytes_max: int = limits_relay.RELAY_HEAD_BYTES_MAX) -> Request:
    """Read a whole request, of either form.

    Args:
        data: the message; the caller has bounded its size.
        head_bytes_max: the most that control data, and each section of fields, may have.

    Raises:
        RemoteProtocolError: it is none, is cut short, or breaks the rules.
    """
    head, content, trailers = _read(data, head_bytes_max)
    if not isinstance(head, RequestHead):
        raise RemoteProtocolError("a binary response, and no request")
    return Request(*head, content, trailers)


def decode_response(data: bytes, *, head_bytes_max: int = limits_relay.RELAY_HEAD_BYTES_MAX) -> Response:
    """Read a whole response, of either form; informational ones before it are passed over.

    Raises:
        RemoteProtocolError: see `decode_request`.
    """
    head, content, trailers = _read(data, head_bytes_max)
    if not isinstance(head, ResponseHead):
        raise RemoteProtocolError("a binary request, and no response")
    return Response(*head, content, trailers)


def _read(data: bytes, head_bytes_max: int) -> tuple[RequestHead | ResponseHead, bytes, Fields]:
    events = Decoder(head_bytes_max=head_bytes_max).feed(data, last=True)
    heads = [each for each in events if isinstance(each, RequestHead | ResponseHead)]
    content = b"".join(each.content for each in events if isinstance(each, Data))
    ends = [each for each in events if isinstance(each, End)]
    return heads[-1], content, ends[0].trailers


class Decoder:
    """Reads one message as it comes.

    Holds what is not yet whole: at most `head_bytes_max` of a head or of trailers, and of the content nothing.

    Args:
        head_bytes_max: the most that control data, and each section of fields, may have.
    """

    def __init__(self, *, head_bytes_max: int = limits_relay.RELAY_HEAD_BYTES_MAX) -> None:
        self._head_bytes_max = head_bytes_max
        self._buffer = bytearray()
        self._at = 0
        self._last = False
        self._events: list[Event] = []
        self._reading: Generator[None] | None = None

    def feed(self, data: bytes, *, last: bool = False) -> list[Event]:
        """Take bytes of the message and give what they complete.

        Args:
            data: the next bytes, any number of them.
            last: no more will come. The answer then ends with `End`.

        Raises:
            RemoteProtocolError: the message breaks the rules, or is cut short. Nothing may be fed afterwards.
        """
        if self._reading is None:
            if last and data[:1] == _WHOLE_REQUEST:
                return _read_request(data, self._head_bytes_max)
            self._reading = self._message()
        self._buffer += data
        self._last = last
        try:
            next(self._reading)
        except StopIteration:
            self._at = len(self._buffer)
        del self._buffer[: self._at]
        self._at = 0
        found, self._events = self._events, []
        return found

    # The message, top down. Each `yield` waits for more bytes.

    def _message(self) -> Generator[None]:
        framing = yield from self._number()
        known = framing in (_KNOWN_REQUEST, _KNOWN_RESPONSE)
        if framing in (_KNOWN_REQUEST, _STREAMED_REQUEST):
            yield from self._request_head(known)
        elif framing in (_KNOWN_RESPONSE, _STREAMED_RESPONSE):
            yield from self._response_heads(known)
        else:
            raise RemoteProtocolError(f"no binary HTTP message: framing {framing}")
        yield from self._content(known)
        trailers = yield from self._section(known)
        while not self._last or self._held():
            if any(memoryview(self._buffer)[self._at :]):
                raise RemoteProtocolError("a binary message with something behind its end")
            self._at = len(self._buffer)
            if not self._last:
                yield
        self._events.append(End(trailers))

    def _request_head(self, known: bool) -> Generator[None]:
        texts, left = [], self._head_bytes_max
        for _ in range(4):
            length = yield from self._number()
            left -= length
            if left < 0:
                raise RemoteProtocolError(f"control data has more than {self._head_bytes_max} bytes")
            texts.append((yield from self._take(length)))
        method, scheme, authority, path = texts
        head = RequestHead(method, scheme, authority, path, ())
        wrong = _wrong_control(head)
        if wrong:
            raise RemoteProtocolError(wrong)
        headers = yield from self._section(known)
        self._events.append(head._replace(headers=headers))

    def _response_heads(self, known: bool) -> Generator[None]:
        for _ in range(limits_relay.RELAY_INFORMATIONAL_MAX + 1):
            status = yield from self._number()
            if not 100 <= status <= 599:
                raise RemoteProtocolError(f"no status: {status}")
            headers = yield from self._section(known)
            self._events.append(ResponseHead(status, headers))
            if status >= 200:
                return
        raise RemoteProtocolError(f"more than {limits_relay.RELAY_INFORMATIONAL_MAX} informational responses")

    def _section(self, known: bool) -> Generator[None, None, Fields]:
        if (yield from self._is_over()):
            return ()
        if known:
            length = yield from self._number()
            if length > self._head_bytes_max:
                raise RemoteProtocolError(f"a section of fields has more than {self._head_bytes_max} bytes")
            return _read_fields((yield from self._take(length)))
        fields, left = [], self._head_bytes_max
        while name_length := (yield from self._number()):
            left -= name_length
            if left < 0:
                break
            name = yield from self._take(name_length)
            value_length = yield from self._number()
            left -= value_length
            if left < 0:
                break
            fields.append(_checked(name, (yield from self._take(value_length))))
        if left < 0:
            raise RemoteProtocolError(f"a section of fields has more than {self._head_bytes_max} bytes")
        return tuple(fields)

    def _content(self, known: bool) -> Generator[None]:
        if (yield from self._is_over()):
            return
        while length := (yield from self._number()):
            while length:
                if not self._held():
                    yield from self._more()
                    continue
                piece = bytes(memoryview(self._buffer)[self._at : self._at + length])
                self._at += len(piece)
                length -= len(piece)
                self._events.append(Data(piece))
            if known:
                return

    # Bytes.

    def _held(self) -> int:
        return len(self._buffer) - self._at

    def _more(self) -> Generator[None]:
        if self._last:
            raise RemoteProtocolError("a binary message is cut short")
        yield

    def _is_over(self) -> Generator[None, None, bool]:
        """Say whether the message ends where an empty part may be left out (RFC 9292 section 3.8)."""
        while not self._held() and not self._last:
            yield
        return not self._held()

    def _take(self, length: int) -> Generator[None, None, bytes]:
        while self._held() < length:
            yield from self._more()
        taken = bytes(memoryview(self._buffer)[self._at : self._at + length])
        self._at += length
        return taken

    def _number(self) -> Generator[None, None, int]:
        while not self._held():
            yield from self._more()
        first = self._buffer[self._at]
        size = 1 << (first >> 6)
        return int.from_bytes((yield from self._take(size)), "big") & ((1 << (8 * size - 2)) - 1)


def _read_request(data: bytes, head_bytes_max: int) -> list[Event]:
    """Read a request of known length that is here whole: as the decoder does, in a third of its time."""
    texts, at, left = [], 1, head_bytes_max
    for _ in range(4):
        text, at = _read_text(data, at, "control data is cut short", left)
        left -= len(text)
        texts.append(text)
    method, scheme, authority, path = texts
    head = RequestHead(method, scheme, authority, path, ())
    wrong = _wrong_control(head)
    if wrong:
        raise RemoteProtocolError(wrong)
    # An empty part at the end may be left out (RFC 9292 section 3.8).
    headers, at = _read_section(data, at, head_bytes_max)
    content, at = _read_text(data, at, "the content is cut short") if at < len(data) else (b"", at)
    trailers, at = _read_section(data, at, head_bytes_max)
    if any(data[at:]):
        raise RemoteProtocolError("a binary message with something behind its end")
    body = [Data(content)] if content else []
    return [head._replace(headers=headers), *body, End(trailers)]


def _read_section(data: bytes, at: int, head_bytes_max: int) -> tuple[Fields, int]:
    if at == len(data):
        return (), at
    section, at = _read_text(data, at, "a section of fields is cut short", head_bytes_max)
    return _read_fields(section), at


def _read_fields(data: bytes) -> Fields:
    fields, at = [], 0
    while at < len(data):
        name, at = _read_text(data, at, "a field reaches over its section's end")
        value, at = _read_text(data, at, "a field reaches over its section's end")
        fields.append(_checked(name, value))
    return tuple(fields)


def _read_text(data: bytes, at: int, short: str, most: int = _VARINT_MAX) -> tuple[bytes, int]:
    length = data[at] if at < len(data) else 0x40
    if length < 0x40:  # a number of one byte
        at += 1
    else:
        length, at = read_varint(data, at)
    if length > most:
        raise RemoteProtocolError(f"the head of a message has more than {most} bytes")
    if length > len(data) - at:
        raise RemoteProtocolError(short)
    return data[at : at + length], at + length


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a number of variable length and where it ends.

    Raises:
        RemoteProtocolError: it is cut short.
    """
    size = 1 << (data[at] >> 6) if at < len(data) else 1
    if size > len(data) - at:
        raise RemoteProtocolError("a number is cut short")
    return int.from_bytes(data[at : at + size], "big") & ((1 << (8 * size - 2)) - 1), at + size


def _checked(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    wrong = _wrong_field(name, value)
    if wrong:
        raise RemoteProtocolError(wrong)
    return name, value
