"""Connecting through proxies: HTTP CONNECT (RFC 9110 section 9.3.6) and SOCKS5 (RFC 1928, RFC 1929).

The tunnel is part of connecting: nothing of a request has left while it is made, so whatever fails in it may be sent
again. TLS to the origin runs inside it and is verified by the origin's own name; the proxy sees a name and bytes. To
an `https` proxy the tunnel itself, and what is forwarded, goes through TLS that is verified by the proxy's name.
"""

import asyncio
import functools
import ipaddress
import re
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.stream import Stream, reason_of
from stormline.net.tls import start_tls
from stormline.net.trust import foreign_context
from stormline.outbound.dial import AddressSource, interleave, quiet
from stormline.outbound.messages import HttpRequest
from stormline.outbound.pool import Connector
from stormline.outbound.proxy_rules import Proxy, ProxyRules

_TARGET_HOST: Final = re.compile(r"[A-Za-z0-9._~:%\-]{1,255}")
"""What may stand in a CONNECT line or a SOCKS address: no space, no line end."""
_HEAD_END: Final = re.compile(rb"\r?\n\r?\n")
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (?P<status>[1-5][0-9]{2})(?: (?P<reason>[^\r\n]*))?\r?\n")
_UNPRINTABLE: Final = re.compile(r"[^\x20-\x7e]")
_REASON_CHARS_MAX: Final = 80
_SOCKS_REPLIES: Final = {
    1: "general failure", 2: "not allowed by its rules", 3: "network unreachable", 4: "host unreachable",
    5: "connection refused", 6: "TTL expired", 7: "it cannot CONNECT", 8: "it does not know this kind of address",
}  # fmt: skip
"""RFC 1928 section 6."""
_SOCKS_ADDRESS_BYTES: Final = {1: 4, 4: 16}


class _Refused(Exception):
    """The proxy answered, and made no connection; the text says why."""


class _Wish(NamedTuple):
    """What a dial is asked for; see `Dialer.dial`."""

    host: str
    tls: bool
    server_name: str
    on_stage: Callable[[Phase], None]
    on_note: Callable[[str], None]
    more: dict[str, Any]
    """For the dialer below, as it came."""


class ProxyDialer:
    """A `Connector` that goes through the proxy that the rules name, and by the dialer below where they name none.

    For `https` origins, and through SOCKS for all, the stream is a tunnel to the origin. For `http` origins behind an
    HTTP proxy it leads to the proxy itself, which wants such requests in another form: see `forwarded`.

    Args:
        direct: makes the connections, to origins and to proxies.
        rules: which proxy for whom.
        context: TLS to origins inside tunnels, as in `direct`.
        resolver: finds addresses for `socks5`, whose names are resolved here.
        by_name: tunnels lead to the origin's name, whatever addresses are given: a proxy looks names up where it
            stands, and may forbid numbers. Where False, they lead to the addresses given, one after the other: the
            platform's roles are known by number, and their names need not be in DNS.
        proxy_context: makes the context for TLS to `https` proxies, which offers HTTP/1.1; asked once, when the first
            is dialled: it reads the system's roots.
    """

    def __init__(
        self,
        direct: Connector,
        rules: ProxyRules,
        *,
        context: ssl.SSLContext,
        resolver: AddressSource,
        by_name: bool = True,
        proxy_context: Callable[[], ssl.SSLContext] = foreign_context,
    ) -> None:
        self._direct = direct
        self._rules = rules
        self._context = context
        self._resolver = resolver
        self._by_name = by_name
        self._proxy_context = functools.cache(proxy_context)

    async def dial(
        self,
        host: str,
        port: int,
        *,
        tls: bool,
        timeout_s: float,
        addresses: tuple[Address, ...] | None = None,
        server_name: str | None = None,
        on_stage: Callable[[Phase], None] = quiet,
        on_note: Callable[[str], None] = quiet,
        **more: Any,
    ) -> Stream:
        """Give a connected stream; arguments as `Dialer.dial`, further ones are handed to the dialer below.

        Nothing of a request is sent: every error has `maybe_delivered` False. Cancelled or failed, no descriptor and
        no task stays behind.

        Raises:
            ConnectError: the proxy cannot be reached.
            ProxyError: it can, and does not connect us, or an `https` one does not show the right certificate.
            TlsError: the tunnel stands, and the origin did not finish the handshake with the right certificate.
            ResolveError: `socks5` and no address for the host; or of the direct dial.
            DeadlineExceeded: `timeout_s` ran out; `phase` is CONNECT, TLS or RESOLVE.
        """
        scheme = "https" if tls else "http"
        proxy = self._rules.proxy_for(scheme, host, port)
        by_number = addresses is not None and not self._by_name
        targets: tuple[Address, ...] = (Address(host, port),)
        here = addresses  # who of them is reached directly
        if addresses is not None and by_number and proxy is not None:
            here = tuple(each for each in addresses if self._is_direct(scheme, each))
            targets = interleave(each for each in addresses if each not in here)

        async def directly(timeout_s: float) -> Stream:
            return await self._direct.dial(
                host, port, tls=tls, timeout_s=timeout_s, addresses=here, server_name=server_name,
                on_stage=on_stage, on_note=on_note, **more,
            )  # fmt: skip

        if proxy is None or not targets:
            return await directly(timeout_s)
        ends_at = asyncio.get_running_loop().time() + timeout_s
        # The name of an endpoint holds for its addresses only: by name, this goes elsewhere.
        wish = _Wish(host, tls, (server_name or host) if by_number else host, on_stage, on_note, more)
        if proxy.scheme == "socks5" and not by_number:
            targets = await self._resolve(host, port, wish, timeout_s)
        ways = [functools.partial(self._open, proxy, target, wish) for target in targets]
        return await _first([directly, *ways] if by_number and here else ways, ends_at, on_note)

    def _is_direct(self, scheme: str, address: Address) -> bool:
        """Say whether an address is reached without a proxy.

        One of this machine itself is, unless the app says otherwise: the environment's proxy is the way out of here.
        """
        if (
            not self._rules.explicit
            and address.is_ip
            and ipaddress.ip_address(address.host.partition("%")[0]).is_loopback
        ):
            return True
        return self._rules.proxy_for(scheme, *address) is None

    async def _resolve(self, host: str, port: int, wish: _Wish, timeout_s: float) -> tuple[Address, ...]:
        wish.on_stage(Phase.RESOLVE)
        try:
            async with asyncio.timeout(timeout_s):
                found = await self._resolver.resolve(host, port)
        except TimeoutError as error:
            raise _late(f"{host}: no address within {timeout_s:.3g} s", Phase.RESOLVE) from error
        except OSError as error:
            raise errors.ResolveError(
                f"{host}: {reason_of(error)}", phase=Phase.RESOLVE, maybe_delivered=False
            ) from error
        if not found:
            raise errors.ResolveError(f"{host}: no address", phase=Phase.RESOLVE, maybe_delivered=False)
        return interleave(found)

    async def _open(self, proxy: Proxy, target: Address, wish: _Wish, timeout_s: float) -> Stream:
        """Connect to the proxy and, unless it is to forward requests, through it to `target`."""
        phase = Phase.CONNECT
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                raw = await self._reach(proxy, wish, timeout_s)
                try:
                    if proxy.scheme == "https":
                        raw = await self._enter_proxy(raw, proxy)
                    if not wish.tls and proxy.is_http:
                        wish.on_note(f"requests go to {proxy}")
                        return raw
                    wish.on_note(f"tunnel through {proxy} to {target}")
                    await _make_tunnel(raw, proxy, target)
                    if not wish.tls:
                        return raw
                    phase = Phase.TLS
                    wish.on_stage(phase)
                    return await self._start_tls(raw, proxy, wish)
                except BaseException:
                    raw.close()
                    raise
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise _late(f"{target} through {proxy}: not connected within {timeout_s:.3g} s", phase) from error

    async def _reach(self, proxy: Proxy, wish: _Wish, timeout_s: float) -> Stream:
        try:
            return await self._direct.dial(
                *proxy.address, tls=False, timeout_s=timeout_s, on_stage=wish.on_stage, on_note=wish.on_note,
                **wish.more,
            )  # fmt: skip
        except errors.DeadlineExceeded as error:
            raise _late(f"{proxy}: {error}", Phase.CONNECT) from error
        except (errors.ResolveError, errors.ConnectError) as error:
            # Not a ResolveError: it is not the origin's name that has no address.
            raise errors.ConnectError(f"{proxy}: {error}", phase=Phase.CONNECT, maybe_delivered=False) from error

    async def _enter_proxy(self, raw: Stream, proxy: Proxy) -> Stream:
        """Speak TLS with the proxy itself."""
        try:
            return await start_tls(raw, self._proxy_context(), proxy.address.host.partition("%")[0])
        except (OSError, ValueError) as error:
            raise errors.ProxyError(
                f"{proxy}: no TLS with it: {reason_of(error)}", phase=Phase.CONNECT, maybe_delivered=False
            ) from error

    async def _start_tls(self, raw: Stream, proxy: Proxy, wish: _Wish) -> Stream:
        try:
            return await start_tls(raw, self._context, wish.server_name)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError; ValueError: no name TLS could ask for
            raise errors.TlsError(
                f"{wish.server_name} through {proxy}: {reason_of(error)}", phase=Phase.TLS, maybe_delivered=False
            ) from error


async def _first(
    ways: Sequence[Callable[[float], Awaitable[Stream]]], ends_at: float, on_note: Callable[[str], None]
) -> Stream:
    """Try one way after the other, each with an even share of the time that is left, given to it in seconds."""
    loop = asyncio.get_running_loop()
    failures: list[errors.TransportError] = []
    for index, way in enumerate(ways):
        try:
            return await way((ends_at - loop.time()) / (len(ways) - index))
        except errors.TransportError as error:
            if len(ways) == 1:
                raise
            on_note(str(error))
            failures.append(error)
    story = "; ".join(map(str, failures))
    for kind, phase in ((errors.TlsError, Phase.TLS), (errors.ProxyError, Phase.CONNECT)):
        if any(isinstance(error, kind) for error in failures):
            raise kind(story, phase=phase, maybe_delivered=False)
    if all(isinstance(error, errors.DeadlineExceeded) for error in failures):
        raise _late(story, failures[-1].phase)
    raise errors.ConnectError(story, phase=Phase.CONNECT, maybe_delivered=False)


def _late(text: str, phase: Phase) -> errors.DeadlineExceeded:
    return errors.DeadlineExceeded(text, phase=phase, maybe_delivered=False)


async def _make_tunnel(stream: Stream, proxy: Proxy, target: Address) -> None:
    """Have the proxy connect `stream` to `target`."""
    if not _TARGET_HOST.fullmatch(target.host):
        raise errors.LocalProtocolError(f"host {target.host[:80]!r} cannot be asked of a proxy")
    try:
        await (_ask_http if proxy.is_http else _ask_socks5)(stream, proxy, target)
    except _Refused as error:
        raise errors.ProxyError(
            f"{proxy} does not connect to {target}: {error}", phase=Phase.CONNECT, maybe_delivered=False
        ) from None
    except OSError as error:  # of the connection; the deadline above cancels instead
        raise errors.ProxyError(
            f"{proxy} broke off: {reason_of(error)}", phase=Phase.CONNECT, maybe_delivered=False
        ) from error


# -- HTTP -------------------------------------------------------------------------------------------------------------
async def _ask_http(stream: Stream, proxy: Proxy, target: Address) -> None:
    lines = [f"CONNECT {target} HTTP/1.1".encode("ascii"), f"Host: {target}".encode("ascii")]
    if proxy.authorization is not None:
        lines.append(b"Proxy-Authorization: " + proxy.authorization)
    await stream.send_all(b"\r\n".join(lines) + b"\r\n\r\n")
    status, reason = await _read_answer(stream)
    if 200 <= status < 300:  # a length or coding that it names means nothing here (RFC 9110 section 9.3.6)
        return
    if status in (401, 407):  # some say 401 of their own credentials
        given = "the user name and password" if proxy.username is not None else "a request without them"
        raise _Refused(f"{status}, it wants credentials and does not take {given}")
    raise _Refused(f"{status} {reason}".rstrip())


async def _read_answer(stream: Stream) -> tuple[int, str]:
    """Give status and reason of the final answer's head, and read not a byte of what follows it."""
    data = b""
    room = limits.PROXY_HEAD_BYTES_MAX  # for interim answers too
    while True:
        while (end := _HEAD_END.search(data)) is None:
            if not room:
                raise _Refused(f"its answer's head has more than {limits.PROXY_HEAD_BYTES_MAX} bytes")
            if not b"HTTP/1.".startswith(data[:7]):  # said at the first wrong byte, not after a wait for more
                raise _Refused("it does not answer like an HTTP proxy")
            received = await stream.receive(room)
            if not received:
                raise _Refused("it closed the connection" + (" in the middle of its answer" if data else ""))
            data += received
            room -= len(received)
        match = _STATUS.match(data)
        if match is None:
            raise _Refused("it does not answer like an HTTP proxy")
        data = data[end.end() :]
        status = int(match["status"])
        if status >= 200:
            break
    if data and status < 300:
        raise _Refused("it sent more than its answer, and the origin has been asked nothing yet")
    reason = _UNPRINTABLE.sub("?", (match["reason"] or b"").decode("latin-1"))[:_REASON_CHARS_MAX]
    return status, reason


def forwarded(request: HttpRequest, rules: ProxyRules) -> HttpRequest:
    """Give a request in the form in which it leaves: `http` through an HTTP proxy names the origin in its target.

    That is the absolute form (RFC 9112 section 3.2.2), with the proxy's credentials. Every other request, and one
    whose origin has no proxy, leaves as it is: it goes to its origin, directly or by a tunnel.
    """
    if request.scheme != "http":
        return request
    proxy = rules.proxy_for("http", request.host, request.port)
    if proxy is None or not proxy.is_http:
        return request
    host = f"[{request.host}]" if ":" in request.host else request.host
    port = "" if request.port == 80 else f":{request.port}"
    # `OPTIONS *` is the URL without a path here (RFC 9112 section 3.2.4); the last proxy turns it back.
    path = b"" if request.target == b"*" else request.target
    headers = request.headers
    if proxy.authorization is not None and not any(name.lower() == b"proxy-authorization" for name, _ in headers):
        headers = (*headers, (b"Proxy-Authorization", proxy.authorization))
    target = b"http://" + f"{host}{port}".encode("utf-8", "surrogateescape") + path
    return request._replace(target=target, headers=headers)


# -- SOCKS5 -----------------------------------------------------------------------------------------------------------
async def _ask_socks5(stream: Stream, proxy: Proxy, target: Address) -> None:
    pair = proxy.credentials
    methods = b"\x00" if pair is None else b"\x00\x02"
    await stream.send_all(bytes((5, len(methods))) + methods)
    version, method = await _exactly(stream, 2)
    if version != 5:
        raise _Refused("it does not answer like a SOCKS5 proxy")
    if method == 2 and pair is not None:
        await stream.send_all(b"\x01" + b"".join(bytes((len(part),)) + part for part in pair))
        _, status = await _exactly(stream, 2)
        if status:
            raise _Refused("it does not take the user name and password")
    elif method == 0xFF:
        raise _Refused("it takes none of our ways to sign in" if pair else "it wants credentials")
    elif method:
        raise _Refused("it chose a way to sign in that was not offered")
    await stream.send_all(b"\x05\x01\x00" + _socks_address(target) + target.port.to_bytes(2, "big"))
    version, reply, _, kind = await _exactly(stream, 4)
    if version != 5:
        raise _Refused("it does not answer like a SOCKS5 proxy")
    if reply:
        raise _Refused(_SOCKS_REPLIES.get(reply, f"reply {reply}"))
    size = (await _exactly(stream, 1))[0] if kind == 3 else _SOCKS_ADDRESS_BYTES.get(kind)
    if size is None:
        raise _Refused("it does not answer like a SOCKS5 proxy")
    await _exactly(stream, size + 2)  # where it connects from: nothing to us


def _socks_address(target: Address) -> bytes:
    if target.is_ip:
        packed = ipaddress.ip_address(target.host.partition("%")[0]).packed
        return (b"\x01" if len(packed) == 4 else b"\x04") + packed
    name = target.host.encode("ascii")
    return bytes((3, len(name))) + name


async def _exactly(stream: Stream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = await stream.receive(size - len(data))
        if not received:
            raise _Refused("it closed the connection")
        data += received
    return data
