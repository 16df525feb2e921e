"""The gateway role: listener, sessions, application gateways, business API, joined and run in one event loop."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import uvloop

from stormline.appgw.api import ApiGate, make_pool, read_upstreams
from stormline.appgw.directory import Directory, Location
from stormline.appgw.port import Identity
from stormline.appgw.push import PushNode, PushService
from stormline.appgw.rpc import RpcGate
from stormline.core import errors, limits
from stormline.core.clock import Clock, Rng
from stormline.core.codes import Code
from stormline.core.values import Address
from stormline.engine import nats
from stormline.engine.port import Engine
from stormline.gateway.admin import AdminView, SessionView, make_app
from stormline.gateway.config import GatewayConfig
from stormline.gateway.late_engine import LateEngine
from stormline.gateway.registry import Registry
from stormline.gateway.router import Router
from stormline.gateway.session import Hub, Session
from stormline.web.server import HttpServer, TlsFiles, bind
from stormline.wire import jws
from stormline.wire import messages as m

_log = logging.getLogger("stormline.gateway")

Started = Callable[[Address, Address], None]
"""Told where the gateway and its business API listen, once both do."""
Connect = Callable[[], Awaitable[Engine]]
"""Makes the connection to the engine; see `gateway.late_engine`."""


def tls_context(files: TlsFiles) -> ssl.SSLContext:
    """Make the listener's TLS: version 1.3 only (RFC 8446), ALPN `sl/1` (RFC 7301).

    Raises:
        PlatformError: certificate or key cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([m.ALPN])
    try:
        context.load_cert_chain(files.certificate, files.key)
    except (OSError, ssl.SSLError) as error:
        raise errors.PlatformError(f"gateway: cannot use {files.certificate} with {files.key}: {error}") from error
    return context


class _Gateway:
    """The parts of the role."""

    def __init__(self, config: GatewayConfig, clock: Clock, rng: Rng, connect: Connect) -> None:
        upstreams = read_upstreams(config.api_upstreams)
        keys = {app: jws.load_public_keys(texts) for app, texts in config.apps.items()}
        self._config = config
        self._registry = Registry()
        self._engine = LateEngine(connect, ready=self._engine_ready)
        self._directory = Directory(
            self._engine, unit=config.unit, node=config.node, clock=clock, superseded=self._superseded
        )
        self._push_node = PushNode(self._registry, unit=config.unit, node=config.node, clock=clock)
        self._push = PushService(
            self._engine, self._directory, self._push_node, unit=config.unit, node=config.node, clock=clock, rng=rng
        )
        self._pool = make_pool(clock)
        self._hub = Hub(
            keys=keys,
            router=Router([ApiGate(self._pool, upstreams), RpcGate(self._engine)]),
            registry=self._registry,
            clock=clock,
            rng=rng,
            unit=config.unit,
            heartbeat_s=config.heartbeat_s,
            opened=self._directory.opened,
            closed=self._directory.closed,
        )

    async def run(self, started: Started, stop: asyncio.Event) -> None:
        config = self._config
        loop = asyncio.get_running_loop()
        context = tls_context(config.tls)
        async with contextlib.AsyncExitStack() as stack:
            sock = stack.enter_context(contextlib.closing(bind(config.host, config.port, "gateway")))
            http = HttpServer(
                cast("Any", make_app(self._view())),
                host=config.admin_host,
                port=config.admin_port,
                what="gateway business API",
            )
            stack.push_async_callback(http.stop)
            server = await loop.create_server(
                lambda: Session(self._hub, loop),
                sock=sock,
                ssl=context,
                backlog=limits.GATEWAY_BACKLOG,
                ssl_handshake_timeout=limits.TLS_HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=limits.CLOSE_FLUSH_S,
            )
            stack.callback(server.close)
            await http.start()
            background = [
                loop.create_task(self._engine.run(), name="gateway engine"),
                loop.create_task(self._directory.run(), name="gateway directory"),
            ]
            stack.push_async_callback(self._end, background)
            name = sock.getsockname()
            address = Address(name[0], name[1])
            _log.info("gateway %s/%s on %s, business API on %s", config.unit, config.node, address, http.address)
            started(address, http.address)
            await self._wait(stop, background)
            server.close()
            await asyncio.gather(http.stop(), self._leave())

    async def _wait(self, stop: asyncio.Event, background: list[asyncio.Task[None]]) -> None:
        """Wait for the order to stop, or for the death of a part that must live."""
        stopped = asyncio.create_task(stop.wait(), name="gateway stop")
        try:
            watched: set[asyncio.Task[None] | asyncio.Task[bool]] = {stopped, *background}
            while not stopped.done():
                done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if (error := task.exception()) is not None:
                        raise errors.PlatformError(f"gateway: {task.get_name()} died: {error!r}") from error
        finally:
            stopped.cancel()

    async def _leave(self) -> None:
        """Ask every client to leave, let calls end, close what is left."""
        for session in self._hub.connections:
            session.go_away(Code.GOING_AWAY, "this node is stopping", spread_s=limits.DRAIN_S)
        if self._hub.tasks:
            await asyncio.wait(self._hub.tasks, timeout=limits.DRAIN_S)
        for session in list(self._hub.connections):
            session.close(Code.GOING_AWAY, "this node is stopping")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.CLOSE_FLUSH_S):
                while self._hub.connections:
                    self._hub.left.clear()
                    await self._hub.left.wait()

    async def _end(self, background: list[asyncio.Task[None]]) -> None:
        """Leave nothing behind, however the role ended."""
        for session in list(self._hub.connections):
            session.abort()
        tasks = [*background, *self._hub.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self._push_node.close()
        with contextlib.suppress(errors.EngineError, TimeoutError):
            async with asyncio.timeout(limits.DIRECTORY_FLUSH_S):
                await self._directory.flush()
        await self._engine.close()
        await self._pool.aclose()

    # -- callbacks -----------------------------------------------------------------------------------------------

    async def _engine_ready(self, engine: Engine) -> None:
        await self._push_node.start(engine)

    def _superseded(self, identity: Identity) -> None:
        session = self._registry.get(identity.app, identity.device)
        if session is not None and session.identity.session == identity.session:
            session.close(Code.REPLACED, "the device has a newer session on another node")

    # -- the business API ----------------------------------------------------------------------------------------

    def _view(self) -> AdminView:
        return AdminView(
            key=self._config.admin_key,
            node=self._config.node,
            unit=self._config.unit,
            apps=tuple(self._config.apps),
            push=self._push.push,
            lookup=self._lookup,
            sessions=self._sessions,
            counts=lambda: (len(self._registry), len(self._hub.connections), len(self._hub.tasks)),
            engine_connected=lambda: self._engine.connected,
        )

    def _sessions(self) -> Iterator[SessionView]:
        return (session for session in self._registry if isinstance(session, Session))

    async def _lookup(self, app: str, device: str) -> Location | None:
        """Ask the directory; this node's own sessions are known also where it does not know (yet)."""
        here = self._registry.session_of(app, device)
        local = None if here is None else Location(self._config.node, here, 0)
        try:
            return await self._directory.lookup(app, device) or local
        except errors.EngineError:
            if local is None:
                raise
            return local


async def run(
    config: GatewayConfig,
    *,
    clock: Clock,
    rng: Rng,
    started: Started,
    stop: asyncio.Event,
    connect: Connect | None = None,
) -> None:
    """Serve until `stop` is set, then leave: no new connections, GOAWAY to all, a bounded wait for calls, CLOSE.

    The engine may be away, also at the start: sessions and the gate `api` work without it, `rpc` answers
    CALL_UNAVAILABLE, and all is well again when it comes. Ends at most 3 s after `stop`.

    Args:
        config: settings.
        clock: time.
        rng: chance.
        started: told where the gateway and its business API listen, once both do.
        stop: set it to end.
        connect: makes the connection to the engine; None for the NATS of the settings.

    Raises:
        ConfigError: an upstream is malformed.
        SignatureError: a public key is malformed.
        PlatformError: a port is taken, a certificate cannot be used, the event loop is not uvloop's, or a part died.
    """
    if not (config.allow_plain_asyncio or isinstance(asyncio.get_running_loop(), uvloop.Loop)):
        raise errors.PlatformError(
            "gateway: needs uvloop's event loop; asyncio's own TLS costs 268 KB a connection (use uvloop.run)"
        )

    async def connect_nats() -> Engine:
        return await nats.connect(config.engine, rng=rng, wait_s=0)

    await _Gateway(config, clock, rng, connect or connect_nats).run(started, stop)
