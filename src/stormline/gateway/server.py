"""The gateway role: listener, sessions, application gateways, business API, joined and run in one event loop."""

import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import Callable
from typing import Any, cast

import uvloop

from stormline.appgw.api import make_pool
from stormline.core import errors, limits_platform
from stormline.core.clock import Clock, Rng
from stormline.core.values import Address
from stormline.engine import nats
from stormline.engine.port import Engine
from stormline.gateway.access import Access
from stormline.gateway.admin import AdminView, Load, make_app
from stormline.gateway.admin_upstreams import UpstreamsView
from stormline.gateway.business import Business
from stormline.gateway.config import GatewayConfig
from stormline.gateway.listener import Door, Listener
from stormline.gateway.node import Connect, GatewayNode, NodeConfig
from stormline.gateway.tickets import TicketKeys
from stormline.gateway.tls import LiveTls
from stormline.policy.intake import connections_max
from stormline.web.server import HttpServer

_log = logging.getLogger("stormline.gateway")

Started = Callable[[Address, Address], None]
"""Told where the gateway and its business API listen, once both do."""


class _Gateway:
    """The parts of the role."""

    def __init__(self, config: GatewayConfig, clock: Clock, rng: Rng, connect: Connect) -> None:
        self._config = config
        self._clock = clock
        self._rng = rng
        self._arriving: Listener | None = None
        self._node = GatewayNode(
            NodeConfig(
                unit=config.unit,
                node=config.node,
                apps=config.apps,
                api_upstreams=config.api_upstreams,
                heartbeat_s=config.heartbeat_s,
                resume_window_s=config.resume_window_s,
                quotas=config.quotas,
                identity_key=config.identity_key,
                protocols=config.protocols,
                drain_s=config.drain_s,
            ),
            clock=clock,
            rng=rng,
            connect=connect,
            pool=make_pool(clock, config.api_ca),
        )

    async def run(self, started: Started, stop: asyncio.Event) -> None:
        config = self._config
        loop = asyncio.get_running_loop()
        tickets = TicketKeys(self._clock, self._rng)
        tls = LiveTls(config.tls, tickets)
        async with contextlib.AsyncExitStack() as stack:
            listener = self._listener(tls)
            self._arriving = listener
            stack.callback(listener.close)
            http = HttpServer(
                cast("Any", make_app(self._view())),
                host=config.admin_host,
                port=config.admin_port,
                what="gateway business API",
            )
            stack.push_async_callback(http.stop, limits_platform.LEAVE_END_S)
            await http.start()
            stack.push_async_callback(self._node.end)
            await self._node.start()
            following = [
                asyncio.create_task(tls.run(), name="gateway certificate"),
                asyncio.create_task(tickets.run(self._node.ticket_bucket), name="gateway ticket keys"),
                asyncio.create_task(self._node.keys.run(), name="gateway business keys"),
                asyncio.create_task(self._node.audit.run(), name="gateway audit"),
            ]
            for task in following:
                stack.callback(task.cancel)
            listener.start()
            with contextlib.suppress(ValueError, RuntimeError):  # signals are the main thread's alone
                loop.add_signal_handler(signal.SIGHUP, tls.reload)
                stack.callback(loop.remove_signal_handler, signal.SIGHUP)
            address = listener.addresses[0]
            _log.info("gateway %s/%s on %s, business API on %s", config.unit, config.node, address, http.address)
            started(address, http.address)
            await self._wait(stop, [*self._node.background, *following])
            _log.info("gateway %s/%s is stopping: %d sessions", config.unit, config.node, self._node.counts()[0])
            listener.stop()
            await self._node.leave(lambda: listener.arriving)
            listener.close()
            await http.stop(limits_platform.LEAVE_END_S)  # while the engine is there for what it is still asked

    def _listener(self, tls: LiveTls) -> Listener:
        config = self._config
        doors = [Door(address) for address in (Address(config.host, config.port), *config.listen)]
        return Listener(
            [*doors, *(Door(address, plain=True) for address in config.plain)],
            self._node.session,
            tls.context,
            origins=config.origins,
            fronts=config.fronts,
            mptcp=config.mptcp,
            reuse_port=config.reuse_port,
            intake=self._node.intake,
            connected=lambda: self._node.counts()[1] + len(self._node.channels.connections),
            connections_max=connections_max(
                resource.getrlimit(resource.RLIMIT_NOFILE)[0], limits_platform.SESSIONS_MAX
            ),
            channels=self._node.channels,
        )

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

    # -- the business API ----------------------------------------------------------------------------------------

    def _view(self) -> AdminView:
        node, config = self._node, self._config
        return AdminView(
            node=config.node,
            unit=config.unit,
            access=Access(config.admin_key, tuple(config.apps), node.keys, node.audit, self._clock),
            business=Business(push=node.push.push, presence=node.presence, calls=node.calls, once=node.once),
            revoke=node.revoke,
            sessions=node.sessions,
            counts=node.counts,
            load=self._load,
            engine_connected=lambda: node.engine_connected,
            keys=node.keys,
            audit=node.audit,
            upstreams=UpstreamsView(
                key=config.operator_key,
                read=node.upstreams.read,
                write=node.upstreams.write,
                book=node.book,
                now=self._clock.monotonic,
                public_keys=None if node.signer is None else node.signer.public_keys,
            ),
        )

    def _load(self) -> Load:
        listener, intake = self._arriving, self._node.intake
        return Load(
            draining=self._node.leaving or (listener is not None and listener.leaving),
            arriving=0 if listener is None else listener.arriving,
            lag_s=intake.lag_s,
            pace_per_s=intake.pace_per_s,
            closes={} if listener is None else dict(listener.closes),
            refusals=dict(self._node.refusals),
        )


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

    Meanwhile the business API answers and says that the node is draining.

    The engine may be away, also at the start: sessions and the gate `api` work without it, `rpc` answers
    CALL_UNAVAILABLE, and all is well again when it comes. Ends at most `config.drain_s` and a second after `stop`.

    Args:
        config: settings.
        clock: time.
        rng: chance.
        started: told where the gateway and its business API listen, once both do.
        stop: set it to end.
        connect: makes the connection to the engine; None for the NATS of the settings.

    Raises:
        ConfigError: an upstream is malformed, or two protocols have one name.
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
