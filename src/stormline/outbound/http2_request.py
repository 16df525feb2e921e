"""Requests as fields of HTTP/2 (RFC 9113 section 8.3.1)."""

import re
from collections.abc import AsyncIterable
from typing import Final, NamedTuple

from hpack import NeverIndexedHeaderTuple

from stormline.core import errors, limits
from stormline.outbound.http2_fields import CONNECTION_SPECIFIC
from stormline.outbound.messages import Headers, HttpRequest

_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
"""RFC 9110 section 5.6.2."""
_TARGET: Final = re.compile(rb"[\x21-\x7e]+")
_HOST: Final = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=%:\-]+")
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_WITH_CONTENT: Final = frozenset({b"POST", b"PUT", b"PATCH"})
"""Methods whose meaning expects content: without it they say that there is none (RFC 9110 section 8.6)."""
_PORTS: Final = {"http": 80, "https": 443}
_VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_CHANGING: Final = frozenset({
    b":path", b"content-length", b"content-range", b"idempotency-key", b"if-match", b"if-modified-since",
    b"if-none-match", b"range", b"traceparent", b"x-request-id",
})  # fmt: skip
"""Fields whose values rarely come again: in the header table they would only push out those that do."""
_SPECIAL: Final = frozenset({b"connection", b"content-length", b"host", b"transfer-encoding"})
"""Fields that are not sent as they are given."""
_CREDENTIALS: Final = frozenset({b"authorization", b"cookie", b"proxy-authorization"})


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


class _Checked(NamedTuple):
    """Header fields of a request, checked.

    Attributes:
        fields: those that are sent as they are, names in lower case.
        special: values of `_SPECIAL`.
    """

    fields: list[tuple[bytes, bytes]]
    special: dict[bytes, bytes]


class RequestEncoder:
    """Puts requests into fields. Remembers header fields that it has checked: a client sends few sets, over and over.

    At most `limits.H2_REQUESTS_KNOWN` of them, which go with it.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[Headers, _Checked] = {}

    def encode(self, request: HttpRequest) -> Encoded:
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
            raise errors.LocalProtocolError(
                "the request target is empty or holds a space, control or non-ASCII character"
            )
        checked = self._known.get(request.headers)
        if checked is None:
            checked = self._check(request.headers)
        special = checked.special
        fields = [
            (b":method", method),
            (b":scheme", request.scheme.encode("ascii")),
            (b":authority", special[b"host"] if b"host" in special else _authority(request)),
            NeverIndexedHeaderTuple(b":path", request.target),
            *checked.fields,
        ]
        length = _length(request, special)
        if length is not None and (length or b"content-length" in special or method in _WITH_CONTENT):
            fields.append(NeverIndexedHeaderTuple(b"content-length", b"%d" % length))
        return Encoded(fields, b"" if request.body is None else request.body, length, method == b"HEAD")

    def _check(self, headers: Headers) -> _Checked:
        checked = _check(headers)
        if len(self._known) >= limits.H2_REQUESTS_KNOWN:
            self._known.clear()
        if sum(len(name) + len(value) for name, value in headers) <= limits.H2_KNOWN_BYTES_MAX:
            self._known[headers] = checked
        return checked


def encode(request: HttpRequest) -> Encoded:
    """Put one request into fields; see `RequestEncoder.encode`."""
    return RequestEncoder().encode(request)


def _check(headers: Headers) -> _Checked:
    fields: list[tuple[bytes, bytes]] = []
    special: dict[bytes, bytes] = {}
    for given, value in headers:
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
        elif name not in CONNECTION_SPECIFIC and (name != b"te" or value.strip().lower() == b"trailers"):
            fields.append((name, value))
    if b"connection" in special:
        dropped = {token.strip().lower() for token in special[b"connection"].split(b",")}
        fields = [field for field in fields if field[0] not in dropped]
    return _Checked(fields, special)


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
