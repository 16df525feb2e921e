"""The relay itself: sees who asks, and not what; passes sealed requests to the gateway and adds nothing (RFC 9458 5.1).

It speaks plain HTTP on ports that pass nearly everywhere: what is sealed needs no TLS below it, and so neither a name
nor a handshake to the origin can fail.
"""

import logging
from collections.abc import AsyncIterator, Iterable
from typing import Final, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from stormline.core import errors, limits_relay
from stormline.core.clock import Clock
from stormline.core.values import Address
from stormline.outbound.messages import HttpRequest, HttpResponse
from stormline.policy.ratelimit import RateLimiter
from stormline.relay.gateway import Sender
from stormline.web import peers
from stormline.wire import ohttp

_log = logging.getLogger("stormline.relay")

_TYPES: Final = frozenset({ohttp.REQUEST_TYPE.encode(), ohttp.CHUNKED_REQUEST_TYPE.encode()})
_TO_GATEWAY: Final = frozenset({b"content-type", b"content-length", b"incremental"})
_TO_CLIENT: Final = _TO_GATEWAY | {b"cache-control", b"date"}


class GatewayUrl(NamedTuple):
    """A gateway that stands apart.

    Attributes:
        host: its name, that of its certificate.
        port: TCP port.
        path: where it takes requests.
        addresses: where it is; empty: by its name.
    """

    host: str
    port: int = 443
    path: str = "/"
    addresses: tuple[Address, ...] = ()


class Relay:
    """The ASGI application. Any number of requests at once; belongs to one event loop.

    Whose requests they are goes no further: of the client's fields only those about the content are passed on.

    Args:
        gateway: a gateway that stands apart, or the application of one in this process.
        sender: makes requests to one that stands apart.
        clock: time of rates.
    """

    def __init__(self, gateway: GatewayUrl | ASGIApp, sender: Sender, *, clock: Clock) -> None:
        self._gateway = gateway
        self._sender = sender
        self._clock = clock
        self._rates = RateLimiter(
            rate_per_s=limits_relay.RELAY_RATE_PER_S,
            burst=limits_relay.RELAY_BURST,
            keys_max=limits_relay.RELAY_PEERS_MAX,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        client = scope.get("client")
        wait_s = self._rates.take(peers.line_of(client[0]) if client else "", self._clock.monotonic())
        if wait_s > 0:
            await _refuse(send, 429, (b"retry-after", b"%d" % (int(wait_s) + 1)))
        elif isinstance(self._gateway, GatewayUrl):
            await self._pass_on(self._gateway, scope, receive, send)
        else:
            bare = {
                "type": "http",
                "method": scope["method"],
                "path": "/",
                "headers": _kept(scope["headers"], _TO_GATEWAY),
            }
            await self._gateway(bare, receive, send)

    async def _pass_on(self, gateway: GatewayUrl, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _kept(scope["headers"], _TO_GATEWAY)
        media = next((value for name, value in headers if name == b"content-type"), b"")
        method = scope["method"]
        if method == "POST" and media not in _TYPES:
            await _refuse(send, 415)
            return
        if method not in ("GET", "POST"):
            await _refuse(send, 405, (b"allow", b"GET, POST"))
            return
        request = HttpRequest(
            method,
            "https",
            gateway.host,
            gateway.port,
            gateway.path.encode("ascii"),
            tuple(headers),
            _Content(receive) if method == "POST" else None,
        )
        try:
            response = await self._sender.request(
                request,
                deadline_s=limits_relay.RELAY_HEAD_S + limits_relay.RELAY_DEADLINE_S,
                body_deadline_s=limits_relay.RELAY_HEAD_S + 2 * limits_relay.RELAY_DEADLINE_S,
                connect_timeout_s=limits_relay.RELAY_CONNECT_S,
                addresses=gateway.addresses or None,
                server_name=gateway.host,
            )
        except errors.StormlineError as error:
            _log.warning("the gateway gave no answer: %s", error)
            await _refuse(send, 503 if isinstance(error, errors.QueueFull) else 502)
            return
        try:
            await _pass_back(send, response)
        finally:
            await response.aclose()


class _Content:
    """What the client sends, as a body to send on; a client that leaves breaks it off."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise errors.LocalProtocolError("the client went away")
            piece: bytes = message.get("body", b"")
            size += len(piece)
            if size > limits_relay.RELAY_BODY_BYTES_MAX:
                raise errors.LocalProtocolError(f"more than {limits_relay.RELAY_BODY_BYTES_MAX} bytes")
            if piece:
                yield piece
            if not message.get("more_body", False):
                return


async def _pass_back(send: Send, response: HttpResponse) -> None:
    headers = _kept(((name.lower(), value) for name, value in response.headers), _TO_CLIENT)
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    # A gateway that breaks off breaks off the connection: the client sees that its answer is not whole.
    async for piece in response.aiter_raw():
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _kept(headers: Iterable[tuple[bytes, bytes]], names: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    return [each for each in headers if each[0] in names]


async def _refuse(send: Send, status: int, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0"), *headers]})
    await send({"type": "http.response.body", "body": b""})
