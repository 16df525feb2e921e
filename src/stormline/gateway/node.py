"""A gateway node without its sockets: sessions, application gateways, directory and engine, joined.

`gateway.server` puts it behind a listener with TLS and beside the business API; the simulator puts the same node on a
simulated network.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stormline.appgw.api import ApiGate
from stormline.appgw.calls import CallNode, DeviceCalls
from stormline.appgw.directory import Directory
from stormline.appgw.identity import Signer
from stormline.appgw.journal import Clearing, NodeJournal
from stormline.appgw.nodes import Nodes
from stormline.appgw.plans import DispatchGate
from stormline.appgw.port import Gate, Identity
from stormline.appgw.presence import Presence
from stormline.appgw.presence_events import PresenceEvents
from stormline.appgw.protocols import OwnProtocol, ProtocolGate
from stormline.appgw.push import PushNode, PushService
from stormline.appgw.rpc import RpcGate
from stormline.appgw.upstream_rules import UpstreamRules
from stormline.appgw.upstreams import Book, read_upstreams
from stormline.core import errors, limits, limits_platform
from stormline.core.clock import Clock, Rng
from stormline.core.codes import Code
from stormline.engine.port import Engine, KeyValue
from stormline.gateway import tickets
from stormline.gateway.apikeys import ApiKeys
from stormline.gateway.audit import Audit
from stormline.gateway.carrier import Carrier
from stormline.gateway.config import Quota
from stormline.gateway.handover import Handover
from stormline.gateway.idempotency import Idempotency
from stormline.gateway.late_engine import LateEngine
from stormline.gateway.notices import Notices
from stormline.gateway.registry import Registry
from stormline.gateway.revocation import Revocations
from stormline.gateway.router import Router
from stormline.gateway.session import Hub, Session
from stormline.gateway.short import Channels
from stormline.outbound.pool import HttpPool
from stormline.policy.intake import Intake
from stormline.wire import jws

Connect = Callable[[], Awaitable[Engine]]
"""Makes the connection to the engine; see `gateway.late_engine`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """What a node is told; the attributes are those of `gateway.config.GatewayConfig`."""

    unit: str
    node: str
    apps: Mapping[str, Mapping[str, str]]
    api_upstreams: Mapping[str, str]
    heartbeat_s: float
    resume_window_s: float = limits.RESUME_WINDOW_S
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    identity_key: jws.SigningKey | None = None
    protocols: Sequence[OwnProtocol] = ()
    drain_s: float = limits_platform.DRAIN_S


class GatewayNode:
    """The node. Made inside a running loop; `start`, then `session` for each connection, then `leave` and `end`.

    Args:
        config: settings.
        clock: time.
        rng: chance.
        connect: makes the connection to the engine.
        pool: connections to upstreams; closed by `end`.

    Attributes:
        background: tasks that must live as long as the node.
        book: the upstreams of the gate `api`.
        upstreams: their record in the engine.
        signer: signs identities; None where there is no key for it.
        channels: sessions over short HTTP.

    Raises:
        ConfigError: an upstream is malformed, or two protocols have one name.
        SignatureError: a public key is malformed.
    """

    def __init__(self, config: NodeConfig, *, clock: Clock, rng: Rng, connect: Connect, pool: HttpPool) -> None:
        self.book = Book(read_upstreams(config.api_upstreams))
        keys = {app: jws.load_public_keys(texts) for app, texts in config.apps.items()}
        unit, node = config.unit, config.node
        self._loop = asyncio.get_running_loop()
        self._unit, self._node = unit, node
        self._drain_s = config.drain_s
        self._registry = Registry()
        self._engine = LateEngine(connect, ready=self._engine_ready)
        self._make_directory(clock)
        self._push_node = PushNode(self._registry, unit=unit, node=node, clock=clock)
        self.push = PushService(
            self._engine, self._directory, self._push_node, unit=unit, node=node, clock=clock, rng=rng
        )
        self._call_node = CallNode(self._registry, unit=unit, node=node)
        self.calls = DeviceCalls(
            self._engine, self._directory, self._call_node, unit=unit, node=node, apps=frozenset(keys), rng=rng
        )
        self.keys = ApiKeys(self._engine, clock=clock, rng=rng)
        self.audit = Audit(self._engine, node=node, clock=clock)
        self.once = Idempotency(self._engine, clock=clock)
        self._pool = pool
        self._notices = Notices(keys, rng=rng, sessions=self.sessions)
        self.upstreams = UpstreamRules(self._engine, unit=unit, changed=self.book.replace)
        key = config.identity_key
        self.signer = None if key is None else Signer(key, unit=unit, clock=clock)
        gates: list[Gate] = [
            ApiGate(pool, self.book, clock=clock, signer=self.signer),
            RpcGate(self._engine),
            DispatchGate(self._engine, unit=unit),
        ]
        self._hub = Hub(
            keys=keys,
            router=Router([*gates, *(ProtocolGate(protocol) for protocol in config.protocols)]),
            registry=self._registry,
            clock=clock,
            rng=rng,
            unit=unit,
            heartbeat_s=config.heartbeat_s,
            node=node,
            resume_window_s=config.resume_window_s,
            quotas=config.quotas,
            opened=self._directory.opened,
            closed=self._directory.closed,
            described=self._directory.described,
            bound=self._directory.bound,
            changes_due=self._notices.due,
        )
        self._handover = Handover(self._hub, self._engine)
        self._hub.fetch = self._handover.fetch
        self.channels = Channels(unit, node, self.session, self._engine, rng, self._hub.connections)
        self._revocations = Revocations(self._registry, self._engine, unit=unit)
        self.revoke = self._revocations.revoke
        self.background: list[asyncio.Task[None]] = []

    def _make_directory(self, clock: Clock) -> None:
        run = f"{int(clock.wall() * 1000):x}"
        self._nodes = Nodes(
            self._engine,
            unit=self._unit,
            node=self._node,
            run=run,
            clock=clock,
            counts=lambda: self._directory.counts(),
            died=lambda node, run, seen_ms: self._clearing.died(node, run, seen_ms),
        )
        watcher = PresenceEvents(self._engine, unit=self._unit)
        self._clearing = Clearing(
            self._engine, self._nodes, unit=self._unit, node=self._node, run=run, clock=clock, watcher=watcher
        )
        self._directory = Directory(
            self._engine,
            unit=self._unit,
            node=self._node,
            run=run,
            clock=clock,
            superseded=self._superseded,
            alive=self._nodes.alive,
            watcher=watcher,
            journal=NodeJournal(self._node, run),
        )
        self.presence = Presence(self._engine, self._directory, self._nodes, unit=self._unit, node=self._node)

    def session(self) -> Carrier:
        """Make the protocol object of a new connection."""
        return Carrier(self._hub, self._loop)

    async def start(self) -> None:
        """Look for the engine, a short while only: a node serves without it."""
        self.background.append(self._loop.create_task(self._engine.run(), name="gateway engine"))
        await asyncio.wait(self.background, timeout=limits_platform.ENGINE_FIRST_WAIT_S)
        for what, part in (
            ("directory", self._directory),
            ("nodes", self._nodes),
            ("clearing", self._clearing),
        ):
            self.background.append(self._loop.create_task(part.run(), name=f"gateway {what}"))
        self.background.append(self._loop.create_task(self.upstreams.follow(), name="gateway upstreams"))

    async def leave(self, arriving: Callable[[], int] = lambda: 0) -> None:
        """Ask every client to leave, let them go and their calls end, close what is left after `drain_s`.

        Takes at most `drain_s` and `limits_platform.LEAVE_FLUSH_S`; less where all have left.

        Args:
            arriving: gives how many connections do not stand yet; they are still told that this node is stopping.
        """
        hub = self._hub
        hub.leaving = True
        ends_at = self._loop.time() + self._drain_s
        for carrier in list(hub.connections):
            spread_s = limits_platform.DRAIN_SPREAD_SHARE * self._drain_s
            carrier.go_away(Code.GOING_AWAY, "this node is stopping", spread_s=spread_s)
        await self._until_left(ends_at, arriving)
        for carrier in list(hub.connections):
            carrier.close(Code.GOING_AWAY, "this node is stopping")
        await self._until_left(self._loop.time() + limits_platform.LEAVE_FLUSH_S)

    async def _until_left(self, ends_at: float, arriving: Callable[[], int] = lambda: 0) -> None:
        hub = self._hub
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(ends_at):
                while hub.connections or arriving():
                    if hub.connections:
                        hub.left.clear()
                        await hub.left.wait()
                    else:
                        await asyncio.sleep(limits_platform.LEAVE_LOOK_S)
                while hub.tasks:  # of sessions that wait for their clients
                    await asyncio.wait(list(hub.tasks))

    async def end(self) -> None:
        """Leave nothing behind, however the node ended."""
        for carrier in list(self._hub.connections):
            carrier.abort()
        self.channels.close()
        self._hub.waiting.close()
        tasks = [*self.background, *self._hub.tasks, *self._hub.greetings]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=limits_platform.LEAVE_END_S)
        self._push_node.close()
        await self._notices.close()
        with contextlib.suppress(errors.EngineError, TimeoutError):
            async with asyncio.timeout(limits_platform.DIRECTORY_FLUSH_S):
                await self._directory.flush()
                await self._nodes.leave()
        await self._engine.close()
        await self._pool.aclose()

    # -- what is to be seen of it ------------------------------------------------------------------------------------

    @property
    def engine_connected(self) -> bool:
        """Whether the engine is there."""
        return self._engine.connected

    async def ticket_bucket(self) -> KeyValue:
        """Give the engine's bucket of TLS ticket keys.

        Raises:
            EngineError: the engine is away.
        """
        return await self._engine.kv(tickets.BUCKET, persistent=False)

    @property
    def intake(self) -> Intake:
        """The pace of new connections."""
        return self._hub.intake

    @property
    def leaving(self) -> bool:
        """Whether it takes nobody any more."""
        return self._hub.leaving

    @property
    def refusals(self) -> Mapping[str, int]:
        """Connections that were ended with a code before they were sessions, by its name."""
        return self._hub.refusals

    def counts(self) -> tuple[int, int, int]:
        """Give the numbers of sessions, connections and calls."""
        return len(self._registry), len(self._hub.connections), len(self._hub.tasks)

    def sessions(self) -> Iterator[Session]:
        """Give the live sessions, oldest first."""
        return (session for session in self._registry if isinstance(session, Session))

    # -- callbacks ---------------------------------------------------------------------------------------------------

    async def _engine_ready(self, engine: Engine) -> None:
        await self._push_node.start(engine)
        await self._handover.start(engine)
        await self.channels.start(engine)
        await self._revocations.start(engine)
        await self._notices.start(engine, self._unit)
        await self._directory.start(engine)
        await self._nodes.start(engine)
        await self.presence.start(engine)
        await self._call_node.start(engine)
        await self.calls.start(engine)

    def _superseded(self, identity: Identity) -> None:
        session = self._registry.get(identity.app, identity.device)
        if session is not None and session.identity.session == identity.session and not session.leaving:
            session.close(Code.REPLACED, "the device has a newer session on another node")
