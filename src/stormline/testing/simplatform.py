"""The servers of a simulated world: the real dispatch application and gateway nodes, an origin and a service.

What is real: `DispatchService`, `GatewayNode` with its sessions, gates, push and directory, on the memory engine.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final, cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.core import errors, limits_heartbeat, limits_platform
from stormline.core.values import Address, Secret
from stormline.dispatch.config import DispatchConfig
from stormline.dispatch.rules import RuleSet
from stormline.dispatch.service import DispatchService
from stormline.engine.memory import MemoryBroker, MemoryEngine, MemoryKeyValue
from stormline.engine.port import Message, Reply
from stormline.gateway.carrier import Carrier as Connection
from stormline.gateway.node import GatewayNode, NodeConfig
from stormline.net.stream import TcpStream
from stormline.net.tcpinfo import TcpInfo
from stormline.outbound.dial import Dialer, OpenTcp
from stormline.outbound.pool import HttpPool
from stormline.testing.history import History, Processing
from stormline.testing.ranked import ranked
from stormline.testing.simloop import SimClock, SimRng, VirtualLoop
from stormline.testing.simnet import Host, SimNet, SimSocket, Sites
from stormline.testing.simserver import HttpCall, HttpReply, HttpServer, asgi, serve
from stormline.testing.simtls import SimTlsContext, SimTrust
from stormline.wire.bundle import Bundle
from stormline.wire.jws import SigningKey
from stormline.wire.messages import ALPN
from stormline.wire.plan import Carrier, Endpoint, HostPlan

APP: Final = "shop"
SHOP: Final = "shop.sim"
"""The origin's name."""
GATEWAY_NAME: Final = "gateway.sim"
DISPATCH: Final = Address("203.0.113.10", 443)
REPORTS: Final = Address("203.0.113.11", 443)
ORIGIN: Final = Address("198.51.100.80", 443)
ORIGIN_PLAIN_PORT: Final = 80
SERVICE_SUBJECT: Final = "rpc.orders.*"
"""Calls of the simulated service: `orders.` and the id of the call."""
_UNIT: Final = "u1"
_HTTP_ALPN: Final = ("http/1.1",)


class SimTcpStream(TcpStream):
    """The real stream of the client, on a simulated socket."""

    __slots__ = ()

    def is_readable(self) -> bool:
        """See `net.stream.Stream`; asks the simulated kernel instead of `poll`."""
        return self._sock is None or self._arrived is not None or bool(cast("Any", self._sock).readable)

    def leave_quiet(self) -> None:
        """See `net.stream.Stream`; the simulated kernel asks nobody."""

    def tcp_info(self) -> TcpInfo | None:
        """See `net.stream.Stream`; asks the simulated kernel instead of the real one."""
        if self._sock is None or not self._tcp_info:
            return None
        return cast("SimSocket", self._sock).end.tcp_info()


def open_tcp_of(host: Host) -> OpenTcp:
    """Give the `net.stream.open_tcp` of a simulated host."""

    async def open_tcp(address: Address) -> TcpStream:
        sock = await host.connect(address)
        return SimTcpStream(cast("Any", sock), asyncio.get_running_loop())

    return open_tcp


def answer_text(call_id: str, size: int) -> bytes:
    """Give the answer of origin and service to a call: its id again and again, so that a wrong one shows."""
    unit = f"{call_id};".encode()
    return (unit * (size // len(unit) + 1))[: max(size, len(unit))]


class Ledger:
    """Who counts what was done, across origin and service, and keeps idempotency keys as they promise to."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._keys: set[str] = set()

    def work(self, call_id: str, key: str) -> None:
        """One request of a call has arrived whole."""
        done = self._history.processed.setdefault(call_id, Processing())
        done.arrivals += 1
        if not key:
            done.keyless += 1
            done.executed += 1
        elif key not in self._keys:
            self._keys.add(key)
            done.executed += 1

    def arrivals(self, call_id: str) -> int:
        """Give how many requests of a call have come."""
        return self._history.processed.setdefault(call_id, Processing()).arrivals

    def refused(self, call_id: str) -> None:
        """One request of a call was answered with a status that is no answer to it."""
        self._history.processed.setdefault(call_id, Processing()).refusals += 1


class Origin:
    """An HTTP origin: `POST /op/ID?size=N` works and answers N bytes. It answers on TLS and on a plain port.

    Attributes:
        extra_s: how much longer than usual it takes now.
    """

    def __init__(self, host: Host, ledger: Ledger, rng: SimRng, sites: Sites) -> None:
        self._host = host
        self._ledger = ledger
        self._rng = rng
        self._sites = sites
        self.extra_s = 0.0
        tls = SimTlsContext(_HTTP_ALPN, names=(SHOP,))
        self._servers = [
            HttpServer(host, ORIGIN.port, self._answer, context=tls),
            HttpServer(host, ORIGIN_PLAIN_PORT, self._answer),
        ]

    def start(self) -> None:
        """Begin to serve."""
        for server in self._servers:
            server.start()

    async def kill(self) -> None:
        """Die at once."""
        for server in self._servers:
            await server.kill()

    async def _answer(self, call: HttpCall) -> HttpReply:
        path, _, query = call.target.partition("?")
        call_id = path.rpartition("/")[2]
        self._ledger.work(call_id, call.headers.get("idempotency-key", ""))
        delay_s = self._rng.gap_s(50.0) + self.extra_s
        if self._sites.fires("origin-slow"):
            delay_s += self._rng.uniform(0.0, 3.0)
        await asyncio.sleep(delay_s)
        if self._sites.fires("origin-hangs-up"):
            self._host.kill_connections(ORIGIN_PLAIN_PORT if self._rng.chance(0.5) else ORIGIN.port)
        return HttpReply(200, answer_text(call_id, int(query.rpartition("=")[2] or 0)))


class FaultyEngine(MemoryEngine):
    """A process's way to the memory engine that is slow and loses answers now and then."""

    def __init__(self, broker: MemoryBroker, rng: SimRng, sites: Sites) -> None:
        super().__init__(broker)
        self._rng = rng
        self._sites = sites

    async def request(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, timeout_s: float
    ) -> Message:
        """See `engine.port.Engine.request`."""
        if self._sites.fires("engine-slow"):
            slow_s = min(timeout_s, self._rng.uniform(0.0, 0.5))
            await asyncio.sleep(slow_s)
            timeout_s -= slow_s
        answer = await super().request(subject, data, headers, timeout_s=max(0.001, timeout_s))
        if self._sites.fires("engine-lost"):
            raise errors.EngineUnavailable("engine lost while waiting", maybe_delivered=True)
        return answer

    async def kv(self, bucket: str, *, persistent: bool, ttl_s: float | None = None) -> MemoryKeyValue:
        """See `engine.port.Engine.kv`."""
        if self._sites.fires("engine-slow"):
            await asyncio.sleep(self._rng.uniform(0.0, 0.5))
        return await super().kv(bucket, persistent=persistent, ttl_s=ttl_s)

    async def die(self) -> None:
        """End without a word: the broker notices that this process is gone."""
        for subscription in [one for one in self.broker.subscriptions if one.engine is self]:
            await subscription.close()
        self.closed = True


class Gateway:
    """A gateway's machine and, while it runs, the node on it.

    Attributes:
        node: the node, None while it is down.
    """

    def __init__(self, world: "Platform", number: int) -> None:
        self._world = world
        self.name = f"n{number}"
        self.address = Address(f"203.0.113.{20 + number}", 443)
        self.host = world.net.host(self.name, self.address.host)
        self._rng = world.rng.child(self.name)
        self.clock = SimClock(world.loop)
        self.node: GatewayNode | None = None
        self._engine: FaultyEngine | None = None

    async def start(self) -> None:
        """Start the node's process."""
        self.host.dark = False
        world = self._world
        dialer = Dialer(_NoNames(), SimTrust().foreign_context(), open_tcp=open_tcp_of(self.host))
        node = GatewayNode(
            NodeConfig(
                unit=_UNIT,
                node=self.name,
                apps={APP: {world.token_key.kid: world.token_key.public_text}},
                api_upstreams={SHOP: f"http://{ORIGIN.host}:{ORIGIN_PLAIN_PORT}"},
                heartbeat_s=limits_heartbeat.HEARTBEAT_ASKED_S,
            ),
            clock=self.clock,
            rng=self._rng,
            connect=self._connect,
            pool=HttpPool(
                dialer,
                self.clock,
                connections_max=limits_platform.UPSTREAM_CONNECTIONS_MAX,
                connections_per_origin_max=limits_platform.UPSTREAM_CONNECTIONS_PER_ORIGIN_MAX,
            ),
        )
        self.node = node
        context = SimTlsContext((ALPN,), names=(GATEWAY_NAME,))
        serve(self.host, self.address.port, node.session, context=context)
        await node.start()

    async def _connect(self) -> FaultyEngine:
        if not self._world.broker.up:
            raise errors.EngineUnavailable("engine unavailable")
        self._engine = FaultyEngine(self._world.broker, self._rng.child("engine"), self._world.sites)
        return self._engine

    def holds(self, device_id: str) -> bool:
        """Say whether a device has its session here."""
        sessions = self.node.sessions() if self.node is not None else ()
        return any(session.identity.device == device_id for session in sessions)

    def connections(self) -> list[Connection]:
        """Give its connections."""
        return [each for each in self.node._hub.connections if isinstance(each, Connection)] if self.node else []

    async def crash(self, *, power: bool) -> None:
        """Lose the process: its kernel resets what was open. With `power` the machine falls silent instead."""
        node, self.node = self.node, None
        if node is None:
            return
        self._lost(node)
        self.host.unlisten(self.address.port)
        if self._engine is not None:
            await self._engine.die()
        if power:
            self.host.dark = True
            self.host.forget_connections()
        else:
            self.host.kill_connections()
        await node.end()

    def _lost(self, node: GatewayNode) -> None:
        if self._world.over:
            return
        hit = frozenset(session.identity.device for session in node.sessions())
        self._world.history.fleet.outages.append((self.name, self._world.loop.time(), hit))

    async def drain(self) -> None:
        """Stop in good order, as on SIGTERM."""
        node, self.node = self.node, None
        if node is None:
            return
        self._lost(node)
        self.host.unlisten(self.address.port)
        await node.leave()
        await node.end()
        self.host.kill_connections()  # the process ends: what was still shaking hands goes with it


class _NoNames:
    async def resolve(self, host: str, port: int) -> tuple[Address, ...]:
        raise OSError(f"{host} is not resolved here")

    def doubt(self, host: str) -> None:
        """There is nothing to doubt."""


class Platform:
    """Every server of a world.

    Attributes:
        broker: the engine.
        gateways: their machines.
        origin: the HTTP origin.
        bundle: what clients are shipped with.
        token_key: signs device tokens.
        server_clock: wall time of dispatch.
        reports: reports the report server took.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        net: SimNet,
        rng: SimRng,
        sites: Sites,
        history: History,
        *,
        gateways: int,
        even: bool = False,
    ) -> None:
        self.loop = loop
        self.net = net
        self.rng = rng
        self.sites = sites
        self.broker = MemoryBroker()
        self.token_key = SigningKey(Ed25519PrivateKey.from_private_bytes(rng.token_bytes(32)), "token-1")
        self._plan_key = SigningKey(Ed25519PrivateKey.from_private_bytes(rng.token_bytes(32)), "plan-1")
        self.server_clock = SimClock(loop)
        self.ledger = Ledger(history)
        self._even = even
        self.over = False
        self.history = history
        self.gateways = [Gateway(self, number) for number in range(1, gateways + 1)]
        self.origin = Origin(net.host("origin", ORIGIN.host), self.ledger, rng.child("origin"), sites)
        self._service = FaultyEngine(self.broker, rng.child("service"), sites)
        self.reports = 0
        self.dispatch = self._make_dispatch()
        self._apm = HttpServer(
            net.host("apm", REPORTS.host), REPORTS.port, self._take_report,
            context=SimTlsContext(_HTTP_ALPN, names=("apm.sim",)),
        )  # fmt: skip
        self.bundle = Bundle(
            app=APP,
            dispatch=(str(DISPATCH),),
            dispatch_name="dispatch.sim",
            dispatch_keys={self._plan_key.kid: self._plan_key.public_text},
        )

    def _make_dispatch(self) -> HttpServer:
        ends = tuple(
            Endpoint(host=each.address.host, port=each.address.port, server_name=GATEWAY_NAME) for each in self.gateways
        )
        long = ends if self._even else ranked(ends)
        direct = Endpoint(host=ORIGIN.host, port=ORIGIN.port, carrier=Carrier.H1, server_name=SHOP)
        config = DispatchConfig(
            host="127.0.0.1",
            port=0,
            tls=None,
            unit=_UNIT,
            rules=RuleSet(
                version=1,
                hosts={SHOP: HostPlan(endpoints=(*long, direct))},
                apps={APP: frozenset({SHOP})},
                gateways={APP: long},
                report=Endpoint(host=REPORTS.host, port=REPORTS.port, carrier=Carrier.H1, server_name="apm.sim"),
            ),
            plan_key=self._plan_key,
            token_key=self.token_key,
            admin_key=Secret("simulated-admin-key"),
        )
        service = DispatchService(config, clock=self.server_clock, rng=self.rng.child("dispatch"))
        return HttpServer(
            self.net.host("dispatch", DISPATCH.host), DISPATCH.port, asgi(service.app(trusted=True)),
            context=SimTlsContext(_HTTP_ALPN, names=("dispatch.sim",)),
        )  # fmt: skip

    async def start(self) -> None:
        """Start every server."""
        self.dispatch.start()
        self._apm.start()
        self.origin.start()
        await self._service.serve(SERVICE_SUBJECT, self._serve, queue="service")
        for gateway in self.gateways:
            await gateway.start()

    async def stop(self) -> None:
        """Stop every server in good order."""
        self.over = True
        for gateway in self.gateways:
            await gateway.drain()
        await self.origin.kill()
        await self.dispatch.kill()
        await self._apm.kill()
        await self._service.close()

    async def _take_report(self, call: HttpCall) -> HttpReply:
        self.reports += 1
        return HttpReply(202, b"{}", {"content-type": "application/json"})

    async def _serve(self, message: Message) -> Reply:
        call_id = message.subject.rpartition(".")[2]
        headers = {name.lower(): value for name, value in message.headers.items()}
        self.ledger.work(call_id, headers.get("idempotency-key", ""))
        delay_s = self.rng.gap_s(50.0)
        if self.sites.fires("service-slow"):
            delay_s += self.rng.uniform(0.0, 3.0)
        await asyncio.sleep(delay_s)
        size = int(json.loads(message.data)["size"])
        return Reply(json.dumps(answer_text(call_id, size).decode()).encode())
