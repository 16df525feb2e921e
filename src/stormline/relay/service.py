"""The role: a relay on its ports, and the gateway behind it, in one process or apart.

    POST /                              a sealed request, on every port; passed to the gateway
    GET  /                              the gateway's keys
         /.well-known/ohttp-gateway     the gateway itself (RFC 9540 section 4), on the port behind TLS
    GET  /healthz                       {"status": "ok"}

Where both are in one process, that process sees who asks and what: it is as trusted as the origin's own front, and no
more private. Apart, run by two parties, neither sees both.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from stormline.core import errors, limits_relay
from stormline.core.clock import Clock, Rng
from stormline.core.values import Address
from stormline.net.resolve import Resolver
from stormline.outbound.dial import Dialer
from stormline.outbound.pool import HttpPool
from stormline.relay.forward import GatewayUrl, Relay
from stormline.relay.gateway import Gateway
from stormline.relay.keys import Keys, read_keys
from stormline.relay.targets import Targets
from stormline.web.server import HttpServer, TlsFiles

_log = logging.getLogger("stormline.relay")

GATEWAY_PATH: Final = "/.well-known/ohttp-gateway"
"""RFC 9540 section 4."""


@dataclass(frozen=True, kw_only=True)
class RelayConfig:
    """What is served.

    Attributes:
        host: address to listen on.
        ports: clear HTTP, where clients come in; 80 passes most networks. 0 for a free one.
        tls_port: the same and the gateway over TLS; None: not served.
        tls: certificate of that port.
        gateway: a gateway that stands apart; None: it is here.
        keys: files of the gateway's private keys, that of the newest first; see `keys`. They are looked at again and
            again: what is changed there holds `limits_relay.RELAY_KEYS_LOOK_S` later.
        origins: where the gateway may fetch from: addresses by host, see `targets.Targets`.
        trust: TLS trust towards origins and the gateway; None: the system's.
    """

    host: str = "127.0.0.1"
    ports: tuple[int, ...] = (0,)
    tls_port: int | None = None
    tls: TlsFiles | None = None
    gateway: GatewayUrl | None = None
    keys: tuple[Path, ...] = ()
    origins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    trust: ssl.SSLContext | None = None


class Service:
    """A relay and its gateway, without ports.

    Args:
        config: what to serve.
        clock: time of rates and replays.
        rng: nonces of answers.

    Attributes:
        pool: makes the requests to origins, or to a gateway apart.
        gateway: the one here; None where it stands apart.
        relay: what clients ask.

    Raises:
        ConfigError: a key or an origin is malformed.
    """

    def __init__(self, config: RelayConfig, *, clock: Clock, rng: Rng) -> None:
        self._config = config
        self._clock = clock
        self._names = Resolver()
        self.pool = HttpPool(
            Dialer(self._names, config.trust or ssl.create_default_context()),
            clock,
            connections_max=limits_relay.RELAY_CONNECTIONS_MAX,
            connections_per_origin_max=limits_relay.RELAY_CONNECTIONS_PER_ORIGIN_MAX,
        )
        self.gateway: Gateway | None = None
        if config.gateway is None:
            self._keys, targets = self._read_keys(), Targets(config.origins)
            self.gateway = Gateway(self._keys, targets, self.pool, self._names, clock=clock, rng=rng)
        self.relay = Relay(config.gateway or cast("ASGIApp", self.gateway), self.pool, clock=clock)

    def _read_keys(self) -> Keys:
        return read_keys(self._config.keys, self._clock.wall())

    async def follow_keys(self) -> None:
        """Take up what changes in the files of keys, and leave keys whose time is over, for as long as it runs.

        Where they cannot be used those before stay.
        """
        problem = ""
        while self.gateway is not None:
            await asyncio.sleep(limits_relay.RELAY_KEYS_LOOK_S)
            try:
                keys = self._read_keys()
            except errors.ConfigError as error:
                if str(error) != problem:
                    _log.warning("the keys stay as they were: %s", error)
                    problem = str(error)
                continue
            problem = ""
            if keys.listed != self._keys.listed:
                self._keys = keys
                self.gateway.use(keys)
                _log.info("keys now: %s", ", ".join(str(key.key_id) for key in keys.held))

    def app(self, *, tls: bool) -> ASGIApp:
        """Give the application for one kind of port."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope["path"]
            if path == "/":
                await self.relay(scope, receive, send)
            elif path == GATEWAY_PATH and tls and self.gateway is not None:
                await self.gateway(scope, receive, send)
            elif path == "/healthz" and scope["method"] == "GET":
                closes = scope.get("state", {}).get("closes", {})
                await _answer(send, 200, msgspec.json.encode({"status": "ok", "closes": closes}))
            else:
                await _answer(send, 404, b'{"error":{"code":"not-found","message":"no such path"}}')

        return app

    async def aclose(self) -> None:
        """End what is under way to origins."""
        await self.pool.aclose()
        self._names.close()


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def run(
    config: RelayConfig,
    *,
    clock: Clock,
    rng: Rng,
    started: Callable[[tuple[Address, ...]], None],
    stop: asyncio.Event,
) -> None:
    """Serve until `stop` is set.

    Args:
        config: what to serve.
        clock: time of rates and replays.
        rng: nonces of answers.
        started: called once, with the addresses of the ports in their order, that behind TLS last.
        stop: ends the service.

    Raises:
        ConfigError: a key, an origin or a certificate cannot be used.
        PlatformError: a port is taken, or the server did not start.

    Cancellation stops it as `stop` does.
    """
    service = Service(config, clock=clock, rng=rng)
    servers: list[HttpServer] = []
    try:
        clear = service.app(tls=False)
        for port in config.ports:
            server = HttpServer(clear, host=config.host, port=port, what="relay")
            servers.append(server)
        if config.tls_port is not None:
            app = service.app(tls=True)
            servers.append(HttpServer(app, host=config.host, port=config.tls_port, what="relay (TLS)", tls=config.tls))
        for server in servers:
            await server.start()
            _log.info("relay answers on %s", server.address)
        started(tuple(server.address for server in servers))
        following = asyncio.create_task(service.follow_keys(), name="relay keys")
        try:
            await stop.wait()
        finally:
            following.cancel()
    finally:
        await asyncio.gather(*(server.stop() for server in servers))
        await service.aclose()
    _log.info("relay stopped")
