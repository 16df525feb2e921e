"""The API gate: a device's HTTP request goes on to the upstream of its host, bodies streamed both ways.

Only hosts of the configuration are reached, at addresses of the configuration: the name a client asks for never
decides where we connect, so this is no open proxy.
"""

import asyncio
import logging
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from stormline.appgw import identity
from stormline.appgw.port import Exchange
from stormline.core import errors, limits, limits_platform
from stormline.core.clock import Clock
from stormline.core.codes import Code
from stormline.core.errors import CallError, TransportError
from stormline.core.phase import Phase
from stormline.core.values import Address, parse_address
from stormline.outbound.dial import Dialer
from stormline.outbound.held import Follower, Unfollowed
from stormline.outbound.messages import HttpRequest, HttpResponse
from stormline.outbound.pool import HttpPool
from stormline.wire import hostname
from stormline.wire.messages import Headers

_log = logging.getLogger("stormline.appgw")

_PORTS: Final = {"http": 80, "https": 443}
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
_WITHOUT_BODY: Final = frozenset({204, 304})


class Upstream(NamedTuple):
    """Where the requests for one host go."""

    scheme: str
    address: Address


class Sender(Protocol):
    """What this gate needs of the HTTP client; `outbound.pool.HttpPool` is one."""

    async def request(
        self,
        request: HttpRequest,
        *,
        deadline_s: float,
        addresses: tuple[Address, ...] | None = None,
        server_name: str | None = None,
        follower: Follower | None = None,
    ) -> HttpResponse:
        """See `outbound.pool.HttpPool.request`."""
        ...


class _NoNames:
    """The resolver of a pool that is only ever given addresses."""

    async def resolve(self, host: str, port: int) -> tuple[Address, ...]:
        raise OSError(f"{host} is not resolved here")

    def doubt(self, host: str) -> None:
        """There is nothing to doubt."""


def make_pool(clock: Clock, ca: Path | None = None) -> HttpPool:
    """Make the HTTP client for upstreams: no name is ever resolved.

    Args:
        clock: time.
        ca: file of another authority that vouches for upstreams, beside the system's.
    """
    context = ssl.create_default_context()
    if ca is not None:
        context.load_verify_locations(ca)
    return HttpPool(
        Dialer(_NoNames(), context),
        clock,
        connections_max=limits_platform.UPSTREAM_CONNECTIONS_MAX,
        connections_per_origin_max=limits_platform.UPSTREAM_CONNECTIONS_PER_ORIGIN_MAX,
    )


def read_upstreams(origins: Mapping[str, str]) -> dict[str, Upstream]:
    """Read the configuration: origin `http(s)://ip:port` by host, `host` or `host:port` as clients ask for it.

    Raises:
        ConfigError: a host or an origin is malformed, or an origin is no address.
    """
    return {_read_name(name): _read_origin(name, origin) for name, origin in origins.items()}


def _read_name(name: str) -> str:
    host, separator, port = name.partition(":") if name.count(":") == 1 else (name, "", "")
    if not separator:
        return hostname.normalise(host)
    return str(parse_address(f"{hostname.normalise(host)}:{port}"))


def _read_origin(name: str, origin: str) -> Upstream:
    scheme, _, rest = origin.partition("://")
    rest = rest.removesuffix("/")
    if scheme not in _PORTS or not rest or "/" in rest:
        raise errors.ConfigError(f"upstream of {name!r}: expected 'http(s)://ip:port', not {origin!r}")
    address = parse_address(rest, default_port=_PORTS[scheme])
    if not address.is_ip:
        raise errors.ConfigError(f"upstream of {name!r}: {address.host!r} is not an IP address")
    return Upstream(scheme, address)


class _Target(NamedTuple):
    """A target URL taken apart."""

    host: str
    authority: str
    path: bytes


class ApiGate:
    """Gate `api`. The method is HTTP's, the target an absolute URL; header values are the Latin-1 of their bytes.

    The upstream gets the request as the client made it, but for: hop-by-hop fields, which end here; `Host`, which is
    the host of the URL; `Forwarded`, `X-Forwarded-*`, `Via` and `Stormline-*`, which are ours to set
    (`appgw.identity` says whose call it is). The answer comes back as it is, without hop-by-hop fields; its body is
    passed on piece by piece, each held until the device's connection has taken the last.

    | what happens                                   | code             | maybe delivered             |
    |------------------------------------------------|------------------|-----------------------------|
    | target, method or headers cannot be sent       | CALL_BAD_REQUEST | no                          |
    | no upstream for the host                       | CALL_NOT_FOUND   | no                          |
    | too many requests wait for the upstream        | CALL_UNAVAILABLE | no                          |
    | upstream down, or its HTTP broken              | CALL_UPSTREAM    | as the connection knows     |
    | no answer by the deadline                      | CALL_DEADLINE    | as the connection knows     |

    The last two also end an answer in the middle of its body.
    """

    name: Final = "api"

    def __init__(self, sender: Sender, upstreams: Mapping[str, Upstream]) -> None:
        self._sender = sender
        self._upstreams = upstreams

    async def handle(self, exchange: Exchange) -> None:
        """See `appgw.port.Gate.handle`."""
        target = _parse(exchange.target)
        upstream = self._upstreams.get(target.authority)
        if upstream is None:
            raise CallError(Code.CALL_NOT_FOUND, f"no upstream for host {target.authority}")
        whole = exchange.whole_body()
        request = HttpRequest(
            method=exchange.method,
            scheme=upstream.scheme,
            host=target.host,
            port=upstream.address.port,
            target=target.path,
            headers=_request_headers(exchange, target),
            body=exchange.body() if whole is None else whole or None,
        )
        try:
            response = await self._send(exchange, request, upstream)
            try:
                await _pass_on(exchange, response)
            finally:
                await response.aclose()
        except TransportError as error:
            raise _failure(target.authority, error) from error
        except errors.LocalProtocolError as error:
            _log.info("request for %s cannot be sent: %s", target.authority, error)
            raise CallError(Code.CALL_BAD_REQUEST, str(error)) from error

    async def _send(self, exchange: Exchange, request: HttpRequest, upstream: Upstream) -> HttpResponse:
        follower = Unfollowed()
        now = asyncio.get_running_loop().time()
        # Where one deadline holds for all, the pool keeps it, and knows exactly how far the request had come.
        begin_by = exchange.deadline if exchange.deadline < exchange.body_deadline else None
        try:
            async with asyncio.timeout_at(begin_by):
                return await self._sender.request(
                    request,
                    deadline_s=max(0.0, exchange.body_deadline - now),
                    addresses=(upstream.address,),
                    server_name=request.host if upstream.scheme == "https" else None,
                    follower=follower,
                )
        except TimeoutError as error:
            # From SEND on the kernel may have taken bytes.
            raise CallError(
                Code.CALL_DEADLINE,
                f"{request.host}: no answer in time",
                maybe_delivered=follower.phase.reached(Phase.SEND),
            ) from error


async def _pass_on(exchange: Exchange, response: HttpResponse) -> None:
    headers = _response_headers(response)
    length = _length(headers)
    if exchange.method == "HEAD" or response.status in _WITHOUT_BODY:
        length = 0
    if length is not None and length <= limits.CHUNK_BYTES_MAX:
        # Whole in one message. Also where it should have no body: what comes all the same is an error of the upstream.
        await exchange.reply(response.status, headers, await response.read(length))
        return
    await exchange.reply(response.status, headers, more=True)
    async for chunk in response.aiter_raw():
        await exchange.send(chunk)
    await exchange.finish()


def _parse(target: str) -> _Target:
    if not target.isascii() or not target.isprintable() or " " in target or "\\" in target:
        raise CallError(Code.CALL_BAD_REQUEST, "the target URL holds characters that need percent-encoding")
    try:
        url = urlsplit(target)
        host, port = url.hostname or "", url.port
        if url.scheme not in _PORTS or "@" in url.netloc:
            raise ValueError("expected an absolute http or https URL without user name")
        host = hostname.normalise(host)
    except (ValueError, errors.ConfigError) as error:
        raise CallError(Code.CALL_BAD_REQUEST, f"target URL: {error}") from error
    authority = host if port in (None, _PORTS[url.scheme]) else str(Address(host, port or 0))
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    return _Target(host, authority, path.encode("ascii"))


def _nominated(headers: Headers) -> set[str]:
    """Give the further fields that a Connection field names as hop-by-hop."""
    return {
        token.strip().lower() for name, value in headers if name.lower() == "connection" for token in value.split(",")
    }


def _request_headers(exchange: Exchange, target: _Target) -> tuple[tuple[bytes, bytes], ...]:
    dropped = HOP_BY_HOP | _OURS | _nominated(exchange.headers)
    kept = [
        (name, value)
        for name, value in exchange.headers
        if (lower := name.lower()) not in dropped
        # `_` and `-` are one to CGI and its heirs: X_Forwarded_For would arrive there as X-Forwarded-For.
        and not lower.replace("_", "-").startswith(("x-forwarded-", identity.PREFIX))
    ]
    fields = [
        ("Host", _bracketed(target.authority)),
        *kept,
        *identity.headers(exchange.identity),
        ("Via", "1.1 stormline"),
    ]
    try:
        return tuple((name.encode("ascii"), value.encode("latin-1")) for name, value in fields)
    except UnicodeEncodeError as error:
        raise CallError(Code.CALL_BAD_REQUEST, "header names are ASCII, header values Latin-1") from error


def _bracketed(authority: str) -> str:
    return f"[{authority}]" if authority.count(":") > 1 and not authority.startswith("[") else authority


def _response_headers(response: HttpResponse) -> Headers:
    headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers)
    dropped = HOP_BY_HOP | _nominated(headers)
    kept = tuple((name, value) for name, value in headers if name.lower() not in dropped)
    size = sum(len(name) + len(value) for name, value in kept)
    if len(kept) > limits.CALL_HEADERS_MAX or size > limits.CALL_HEADER_BYTES_MAX:
        raise CallError(
            Code.CALL_UPSTREAM, f"the answer has {len(kept)} headers of {size} characters", maybe_delivered=True
        )
    return kept


def _length(headers: Headers) -> int | None:
    """Give the body's length as the answer says it; the pool has refused contradictions."""
    for name, value in headers:
        if name.lower() == "content-length" and value.isascii() and value.isdigit():
            return int(value)
    return None


def _failure(host: str, error: TransportError) -> CallError:
    # The reason goes to the device: it names the host it asked for, never the addresses behind us.
    _log.info("upstream of %s: %s", host, error)
    if isinstance(error, errors.DeadlineExceeded):
        return CallError(Code.CALL_DEADLINE, f"{host}: no answer in time", maybe_delivered=error.maybe_delivered)
    if isinstance(error, errors.QueueFull):
        return CallError(
            Code.CALL_UNAVAILABLE, f"{host}: too many requests wait", retry_after_s=limits_platform.CALL_RETRY_AFTER_S
        )
    what = {
        errors.ConnectError: "cannot be reached",
        errors.TlsError: "did not show the right certificate",
        errors.ProtocolViolation: "answered with broken HTTP",
        errors.DecodeError: "ended its answer too early",
    }.get(type(error), "broke the connection")
    retry_after_s = None if error.maybe_delivered else limits_platform.CALL_RETRY_AFTER_S
    return CallError(
        Code.CALL_UPSTREAM,
        f"the upstream of {host} {what}",
        retry_after_s=retry_after_s,
        maybe_delivered=error.maybe_delivered,
    )
