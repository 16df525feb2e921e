"""What goes to an upstream of a device's request, and back of its answer: target, headers, lengths."""

import functools
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from stormline.appgw import identity
from stormline.appgw.port import Exchange, Identity
from stormline.appgw.upstreams import PORTS
from stormline.core import errors, limits, limits_api
from stormline.core.codes import Code
from stormline.core.errors import CallError
from stormline.core.values import Address
from stormline.outbound.messages import HttpResponse
from stormline.wire import hostname
from stormline.wire.messages import Headers

HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Fields about one connection, which end with it (RFC 9110 section 7.6.1; the two for proxies by section 11.7, and
Trailer because we carry no trailers)."""
_OURS: Final = frozenset({"host", "forwarded", "expect", "via"})
"""Set by us, or without meaning behind us: a client could only lie in them. `Expect: 100-continue` is answered by the
flow control of the wire."""
_DROPPED: Final = HOP_BY_HOP | _OURS
_VIA: Final = (b"Via", b"1.1 stormline")
_SIGNED: Final = identity.SIGNED_HEADER.encode("ascii")


class Target(NamedTuple):
    """A target URL taken apart.

    Attributes:
        host: its host.
        authority: host, and port where it is not the scheme's own.
        path: path as it stands there.
        target: path and query as they go on the wire.
    """

    host: str
    authority: str
    path: str
    target: bytes


def parse(url: str) -> Target:
    """Take a target URL apart.

    Raises:
        CallError: it is no absolute HTTP URL (CALL_BAD_REQUEST).
    """
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise CallError(Code.CALL_BAD_REQUEST, "the target URL holds characters that need percent-encoding")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        if parts.scheme not in PORTS or "@" in parts.netloc:
            raise ValueError("expected an absolute http or https URL without user name")
        host = hostname.normalise(host)
    except (ValueError, errors.ConfigError) as error:
        raise CallError(Code.CALL_BAD_REQUEST, f"target URL: {error}") from error
    authority = host if port in (None, PORTS[parts.scheme]) else str(Address(host, port or 0))
    path = parts.path or "/"
    return Target(host, authority, path, (path + (f"?{parts.query}" if parts.query else "")).encode("ascii"))


def _dropped(headers: Headers, always: frozenset[str]) -> frozenset[str]:
    """Give the names of fields to drop: also those that a Connection field names as hop-by-hop."""
    for name, value in headers:
        if len(name) == 10 and name.lower() == "connection":
            always = always.union(token.strip().lower() for token in value.split(","))
    return always


def cleaned(headers: Headers) -> Headers:
    """Give a request's headers without what ends here, and without what only we may say."""
    dropped = _dropped(headers, _DROPPED)
    return tuple(
        [
            (name, value)
            for name, value in headers
            if (lower := name.lower()) not in dropped
            # `_` and `-` are one to CGI and its heirs: X_Forwarded_For would arrive there as X-Forwarded-For.
            and not lower.replace("_", "-").startswith(("x-forwarded-", identity.PREFIX))
        ]
    )


def request_headers(
    exchange: Exchange, target: Target, kept: Headers, signed: str, left_s: float
) -> tuple[tuple[bytes, bytes], ...]:
    """Give the headers for an upstream.

    Args:
        exchange: the call.
        target: its target.
        kept: its own headers, cleaned.
        signed: the caller's signed identity, empty for none.
        left_s: seconds that the caller still waits for the answer to begin.

    Raises:
        CallError: a header is not text of its kind (CALL_BAD_REQUEST).
    """
    try:
        fields = [
            (b"Host", _bracketed(target.authority).encode("ascii")),
            *[(name.encode("ascii"), value.encode("latin-1")) for name, value in kept],
            *_identity_fields(exchange.identity),
            (b"Stormline-Deadline-Ms", b"%d" % _coarse_ms(left_s)),
            _VIA,
        ]
    except UnicodeEncodeError as error:
        raise CallError(Code.CALL_BAD_REQUEST, "header names are ASCII, header values Latin-1") from error
    if signed:
        fields.append((_SIGNED, signed.encode("ascii")))
    return tuple(fields)


@functools.lru_cache(limits_api.IDENTITIES_KEPT)
def _identity_fields(who: Identity) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name.encode("ascii"), value.encode("ascii")) for name, value in identity.headers(who))


def _coarse_ms(left_s: float) -> int:
    """Give milliseconds, rounded down by a tenth at most: requests whose headers are equal are encoded once."""
    left_ms = int(left_s * 1000)
    step_ms = 100 if left_ms >= 1000 else 10 if left_ms >= 100 else 1
    return max(1, left_ms - left_ms % step_ms)


def _bracketed(authority: str) -> str:
    return f"[{authority}]" if authority.count(":") > 1 and not authority.startswith("[") else authority


def response_headers(response: HttpResponse) -> Headers:
    """Give an answer's headers without what ends here, and without what looks like ours.

    Raises:
        CallError: there are more than the wire carries (CALL_UPSTREAM).
    """
    headers = tuple([(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers])
    dropped = _dropped(headers, HOP_BY_HOP)
    kept = tuple(
        [
            (name, value)
            for name, value in headers
            if (lower := name.lower()) not in dropped and not lower.startswith(identity.PREFIX)
        ]
    )
    size = sum([len(name) + len(value) for name, value in kept])
    if len(kept) > limits.CALL_HEADERS_MAX or size > limits.CALL_HEADER_BYTES_MAX:
        raise CallError(
            Code.CALL_UPSTREAM, f"the answer has {len(kept)} headers of {size} characters", maybe_delivered=True
        )
    return kept


def lowered(headers: Headers) -> Headers:
    """Give headers with names in lower case."""
    return tuple([(name.lower(), value) for name, value in headers])


def length_of(headers: Headers) -> int | None:
    """Give the body's length as the answer says it; the pool has refused contradictions."""
    for name, value in headers:
        if name.lower() == "content-length" and value.isascii() and value.isdigit():
            return int(value)
    return None
