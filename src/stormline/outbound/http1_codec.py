"""HTTP/1.1 without I/O: a request to bytes, and bytes to an answer (RFC 9112).

A plain head that comes in one piece is read by two patterns, which costs less; every other, and chunks, by `httptools`
(llhttp). The framing is decided here and is strict: whatever could be read in two ways is refused, as two readers that
disagree on where a message ends are how answers get mixed up.
"""

import re
from collections.abc import AsyncIterable
from itertools import chain
from typing import Final, NamedTuple

import httptools

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.outbound.messages import Headers, HttpRequest

_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
"""RFC 9110 section 5.6.2."""
_VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
"""RFC 9110 section 5.5: no control character, so neither CR, LF nor NUL."""
_TARGET: Final = re.compile(rb"[\x21-\x7e]+")
_HOST: Final = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=%:\-]+")
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_START: Final = b"HTTP/1."
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.1 ([2-9][0-9]{2}) ([\t\x20-\x7e\x80-\xff]*)\r\n")
_FIELDS: Final = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+): (?![\t ])([\t\x20-\x7e\x80-\xff]*)(?<![\t ])\r\n")
"""Field lines as almost all servers write them: one blank before the value, none after it."""
_WITH_CONTENT: Final = frozenset({"POST", "PUT", "PATCH"})
"""Methods whose meaning expects content: without it they say `Content-Length: 0` (RFC 9110 section 8.6)."""
_METHODS: Final = {
    each: each.encode("ascii") for each in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "QUERY")
}
"""Those that need no check."""
_PORTS: Final = {"http": 80, "https": 443}


class Encoded(NamedTuple):
    """A request ready to go.

    Attributes:
        head: request line and fields, with the empty line.
        body: what follows, not yet framed.
        chunked: each piece of the body goes as one chunk.
        length: bytes the body must have, None where it is chunked.
        is_head: the method is HEAD, the answer has no body whatever it says.
        close: the request asks to close the connection after it.
    """

    head: bytes
    body: bytes | AsyncIterable[bytes]
    chunked: bool
    length: int | None
    is_head: bool
    close: bool

    def __repr__(self) -> str:
        """Show no header and no body: they carry credentials."""
        return f"<Encoded head of {len(self.head)} bytes>"


def _begin(name: bytes) -> bytes:
    """Give as much of a bad header name as is one: the rest may be a whole line with its credentials."""
    found = _TOKEN.match(name)
    return found[0][:40] if found else b""


class _Fields(NamedTuple):
    """Header fields that were checked.

    Attributes:
        block: their lines.
        seen: values by lower-case name.
        close: they ask to close the connection.
    """

    block: bytes
    seen: dict[bytes, bytes]
    close: bool


class Encoder:
    """Puts requests into bytes. Remembers the header fields it has checked: a client sends few kinds, over and over.

    At most `limits.HTTP_FIELDS_REMEMBERED`, which go with it.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[Headers, _Fields] = {}

    def encode(self, request: HttpRequest) -> Encoded:
        """Check a request and put its head into bytes.

        Raises:
            LocalProtocolError: a part of it could break out of its place (CR, LF, NUL, spaces), or the framing fields
                contradict the body, or the method is CONNECT. Nothing was sent.
        """
        method = _METHODS.get(request.method)
        if method is None:
            method = request.method.encode("utf-8", "surrogateescape")
            if not _TOKEN.fullmatch(method) or method == b"CONNECT":
                raise errors.LocalProtocolError(f"method {request.method[:40]!r} cannot be sent")
        if not _TARGET.fullmatch(request.target):
            raise errors.LocalProtocolError(
                "the request target is empty or holds a space, control or non-ASCII character"
            )
        fields = self._known.get(request.headers)
        if fields is None:
            fields = _check(request.headers)
            if len(self._known) >= limits.HTTP_FIELDS_REMEMBERED:
                self._known.clear()
            if len(fields.block) <= limits.HTTP_FIELDS_REMEMBERED_BYTES:
                self._known[request.headers] = fields
        length, chunked, framing = _framing(request, fields.seen)
        host = b"" if b"host" in fields.seen else b"Host: %s\r\n" % _host(request)
        return Encoded(
            b"%s %s HTTP/1.1\r\n%s%s%s\r\n" % (method, request.target, host, fields.block, framing),
            b"" if request.body is None else request.body,
            chunked,
            length,
            method == b"HEAD",
            fields.close,
        )


def encode(request: HttpRequest) -> Encoded:
    """Put one request into bytes; see `Encoder.encode`."""
    return Encoder().encode(request)


def _check(headers: Headers) -> _Fields:
    """Check header fields.

    Raises:
        LocalProtocolError: see `Encoder.encode`.
    """
    lines: list[bytes] = []
    seen: dict[bytes, bytes] = {}
    for name, value in headers:
        if not _TOKEN.fullmatch(name):
            raise errors.LocalProtocolError(f"a header name that begins {_begin(name)!r} is not a token")
        if not _VALUE.fullmatch(value):
            raise errors.LocalProtocolError(f"the value of header {name[:40]!r} holds a control character")
        lower = name.lower()
        if lower in seen:
            if lower in (b"host", b"content-length", b"transfer-encoding"):
                raise errors.LocalProtocolError(f"header {name!r} is given twice")
            value_seen = seen[lower] + b"," + value
        else:
            value_seen = value
        seen[lower] = value_seen
        lines.append(b"%s: %s\r\n" % (name, value))
    return _Fields(b"".join(lines), seen, b"close" in _tokens(seen.get(b"connection", b"")))


def _host(request: HttpRequest) -> bytes:
    if not _HOST.fullmatch(request.host):
        raise errors.LocalProtocolError(f"host {request.host[:80]!r} cannot stand in a Host header")
    host = f"[{request.host}]" if ":" in request.host else request.host
    return (host if request.port == _PORTS.get(request.scheme) else f"{host}:{request.port}").encode("ascii")


def _framing(request: HttpRequest, seen: dict[bytes, bytes]) -> tuple[int | None, bool, bytes]:
    """Say how the body is framed: length, whether chunked, and the line for it where it is absent."""
    body = request.body
    coding, given = seen.get(b"transfer-encoding"), seen.get(b"content-length")
    if coding is not None:
        if given is not None or coding.strip().lower() != b"chunked":
            raise errors.LocalProtocolError("Transfer-Encoding may only be 'chunked', and without Content-Length")
        return None, True, b""
    if given is not None:
        if not _LENGTH.fullmatch(given):
            raise errors.LocalProtocolError("Content-Length is not a number")
        if not isinstance(body, AsyncIterable) and int(given) != len(body or b""):
            raise errors.LocalProtocolError(f"Content-Length {int(given)}, but the body has {len(body or b'')} bytes")
        return int(given), False, b""
    if body is None or isinstance(body, bytes):
        size = len(body or b"")
        said = b"Content-Length: %d\r\n" % size if size or request.method in _WITH_CONTENT else b""
        return size, False, said
    return None, True, b"Transfer-Encoding: chunked\r\n"


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip().lower() for token in value.split(b",")]


class ResponseReader:
    """Reads one answer: `receive_data` and `receive_eof` in; head, body pieces and the end out.

    Interim answers (1xx) are skipped; trailers are read and dropped. The outcome is the same however the bytes are
    cut into pieces.

    Args:
        is_head: the request's method was HEAD.

    Attributes:
        status: 0 until the head is whole, then 200 to 999.
        reason: the reason phrase.
        http_version: `HTTP/1.1` or `HTTP/1.0`.
        headers: field lines of the final head.
        complete: the answer is whole; body pieces may still wait in `take_body`.
        keep_alive: after `complete`, the connection may carry another request.
        began: a byte of an answer has come.
    """

    __slots__ = ("_body", "_chunk_silence", "_chunked", "_fields", "_head_done", "_head_size", "_is_head",
                 "_message_done", "_parser", "_reason", "_remaining", "_start", "_tail", "began", "complete", "headers",
                 "http_version", "keep_alive", "reason", "status")  # fmt: skip

    def __init__(self, *, is_head: bool) -> None:
        self._is_head = is_head
        self._head_size = 0
        self._body: list[bytes] = []
        self._remaining: int | None = None  # of a body with a length
        self._chunked = False  # chunks come now; fields among them are trailers
        self._chunk_silence = 0  # bytes of a chunked body since the last that were data
        self.status = 0
        self.reason = b""
        self.http_version = ""
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = self.keep_alive = self.began = False
        self._parser: httptools.HttpResponseParser | None = None  # made where a head or a body needs one

    def _next_head(self) -> httptools.HttpResponseParser:
        self._start = b""
        self._tail = b""  # what came of this head last: the empty line may be cut anywhere
        self._reason = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self._head_done = self._message_done = False
        parser = self._parser = httptools.HttpResponseParser(self)
        return parser

    # -- called by httptools; must not raise ----------------------------------------------------------------------
    def on_status(self, reason: bytes) -> None:
        """Gather the reason phrase."""
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """Gather one field line of the head."""
        if not self._chunked:
            self._fields.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Note the end of a head."""
        self._head_done = True

    def on_body(self, data: bytes) -> None:
        """Gather data of a chunk."""
        self._body.append(data)
        self._chunk_silence = 0

    def on_message_begin(self) -> None:
        """Note that something follows a finished chunked body: not ours, so the connection is done with."""
        if self._message_done:
            self.keep_alive = False

    def on_message_complete(self) -> None:
        """Note the end of a chunked body."""
        self._message_done = True

    # -- in -------------------------------------------------------------------------------------------------------
    def receive_data(self, data: bytes) -> None:
        """Take the next bytes from the peer, at least one.

        Raises:
            ProtocolViolation: they break HTTP, or pass a bound; phase FIRST_BYTE in the head, BODY after it.
        """
        if not self.began:
            self.began = True
            data = self._receive_plain(data)
        while data and not self.status:
            data = self._receive_head(data)
        if not data:
            return
        if self.complete:
            self.keep_alive = False  # more than was asked for
        elif self._chunked and self._parser is not None:
            self._receive_chunked(self._parser, data)
        elif self._remaining is None:
            self._body.append(data)
        else:
            taken = data[: self._remaining]
            self._body.append(taken)
            self._remaining -= len(taken)
            self.complete = not self._remaining
            self.keep_alive = self.keep_alive and len(taken) == len(data)

    def receive_eof(self) -> None:
        """Take the end of the peer's stream.

        Raises:
            ReadError: the answer is not whole; phase FIRST_BYTE in the head, BODY after it.
        """
        self.keep_alive = False
        if self.complete:
            return
        if not self.status:
            where = "in the middle of the head" if self.began else "before it answered"
            raise errors.ReadError(
                f"the peer closed the connection {where}", phase=Phase.FIRST_BYTE, maybe_delivered=True
            )
        if self._chunked or self._remaining is not None:
            missing = "" if self._remaining is None else f", {self._remaining} bytes short"
            raise errors.ReadError(
                f"the peer closed the connection in the middle of the body{missing}",
                phase=Phase.BODY,
                maybe_delivered=True,
            )
        self.complete = True  # delimited by the close itself (RFC 9112 section 6.3, rule 8)

    def take_body(self) -> bytes:
        """Give the body bytes that have come since the last call."""
        data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        return data

    # -- inside ---------------------------------------------------------------------------------------------------
    def _receive_plain(self, data: bytes) -> bytes:
        """Read a plain head that begins `data` and is whole; give what is left to be read."""
        end = data.find(b"\r\n\r\n") + 2
        line = _STATUS_LINE.match(data)
        if line is None or end < 2 or end > limits.HTTP_HEAD_BYTES_MAX - 2:
            return data
        begin = line.end()
        fields: list[tuple[bytes, bytes]] = _FIELDS.findall(data, begin, end)
        size = sum(map(len, chain.from_iterable(fields))) + 4 * len(fields)
        if size != end - begin or len(fields) > limits.HTTP_HEADERS_MAX:
            return data  # something that is no plain field stands between
        framing = _framing_fields(fields)
        if framing.codings:
            return data
        self._take_head(int(line[1]), "1.1", line[2], fields, framing)
        return data[end + 2 :]

    def _receive_head(self, data: bytes) -> bytes:
        """Read of `data` what belongs to the head; give the rest."""
        parser = self._parser or self._next_head()
        window = self._tail + data
        end = window.find(b"\r\n\r\n")
        part = data if end < 0 else data[: end + 4 - len(self._tail)]
        self._tail = window[-3:]
        if len(self._start) < len(_START):
            # Said at the first wrong byte, not after a head that never ends: another protocol answers here.
            self._start += part[: len(_START) - len(self._start)]
            if not _START.startswith(self._start):
                raise self._violation("it does not begin like HTTP/1")
        self._head_size += len(part)
        if self._head_size > limits.HTTP_HEAD_BYTES_MAX:
            raise self._violation(f"the head has more than {limits.HTTP_HEAD_BYTES_MAX} bytes")
        self._feed(parser, part)
        if len(self._fields) > limits.HTTP_HEADERS_MAX:
            raise self._violation(f"the head has more than {limits.HTTP_HEADERS_MAX} fields")
        if self._head_done != (end >= 0):
            raise self._violation("the head ends where no empty line is")
        if self._head_done:
            self._finish_head(parser)
        return data[len(part) :]

    def _finish_head(self, parser: httptools.HttpResponseParser) -> None:
        status, version = parser.get_status_code(), parser.get_http_version()
        if version not in ("1.0", "1.1") or status < 100:
            raise self._violation(f"HTTP/{version} with status {status}")
        if status < 200:
            self._parser = None  # another head follows
            return
        self._take_head(status, version, self._reason, self._fields, _framing_fields(self._fields))
        if not self._chunked:
            self._parser = None  # it holds our methods: a circle that only the garbage collector would break

    def _take_head(
        self, status: int, version: str, reason: bytes, fields: list[tuple[bytes, bytes]], framing: "_Framing"
    ) -> None:
        """Take the final head, and decide how its body is framed."""
        codings, lengths, connection = framing
        if codings and (version == "1.0" or lengths or [coding.lower() for coding in codings] != [b"chunked"]):
            # We offer no other coding (no TE is sent); RFC 9112 sections 6.1 and 7.
            raise self._violation("a transfer coding that is not plain 'chunked'")
        if len(lengths) > 1 or (lengths and not _LENGTH.fullmatch(lengths[0])):
            raise self._violation("the content length is not one number")
        self.keep_alive = b"close" not in connection and (version == "1.1" or b"keep-alive" in connection)
        self.reason, self.headers, self.http_version = reason, fields, f"HTTP/{version}"
        bodiless = self._is_head or status in (204, 304)
        self._chunked = bool(codings) and not bodiless
        if bodiless:
            self.complete = True
        elif lengths:
            self._remaining = int(lengths[0])
            self.complete = self._remaining == 0
        elif not codings:
            self.keep_alive = False
        self.status = status

    def _receive_chunked(self, parser: httptools.HttpResponseParser, data: bytes) -> None:
        self._chunk_silence += len(data)
        try:
            self._feed(parser, data)
        except errors.ProtocolViolation:
            if not self._message_done:
                raise
            self.keep_alive = False  # the answer is whole; what is wrong comes after it
        if self._message_done:
            self.complete = True
            self._parser = None
        elif self._chunk_silence > limits.HTTP_HEAD_BYTES_MAX:
            raise self._violation("chunk extensions or trailers without end")

    def _feed(self, parser: httptools.HttpResponseParser, data: bytes) -> None:
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise self._violation("it switches protocols unasked") from None
        except httptools.HttpParserError as error:
            raise self._violation(str(error).lower() or "it cannot be parsed") from error

    def _violation(self, what: str) -> errors.ProtocolViolation:
        phase = Phase.BODY if self.status else Phase.FIRST_BYTE
        return errors.ProtocolViolation(f"the answer breaks HTTP: {what}", phase=phase, maybe_delivered=True)


class _Framing(NamedTuple):
    """Values of Transfer-Encoding and Content-Length, and tokens of Connection."""

    codings: list[bytes]
    lengths: list[bytes]
    connection: list[bytes]


def _framing_fields(fields: list[tuple[bytes, bytes]]) -> _Framing:
    """Find what frames an answer."""
    codings: list[bytes] = []
    lengths: list[bytes] = []
    connection: list[bytes] = []
    for name, value in fields:
        match len(name):
            case 14 if name.lower() == b"content-length":
                lengths.append(value)
            case 17 if name.lower() == b"transfer-encoding":
                codings.append(value)
            case 10 if name.lower() == b"connection":
                connection += _tokens(value)
    return _Framing(codings, lengths, connection)
