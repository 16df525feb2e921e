"""Two real gateway nodes and a centre's part in its unit on virtual time: 2000 sessions, and an engine that goes."""

import asyncio
from typing import Any, cast

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.appgw.api import make_pool
from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.dispatch.rules import RuleSet
from stormline.dispatch.unit import HeldRules, UnitLink
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.engine.port import Engine, Message, Reply
from stormline.gateway.node import GatewayNode, NodeConfig
from stormline.testing import simloop
from stormline.testing.simloop import SimClock, SimRng
from stormline.wire import events as e
from stormline.wire import jws, tokens
from stormline.wire import messages as m
from stormline.wire.connection import Connection
from stormline.wire.plan import Endpoint, HostPlan
from stormline.wire.states import Role

KEY = Ed25519PrivateKey.generate()
PUBLIC = jws.SigningKey(KEY, "k1").public_text
A, B = (HostPlan(endpoints=(Endpoint(host=f"192.0.2.{number}", port=443),)) for number in (1, 2))
RULES = RuleSet(version=5, hosts={"a.example": A, "b.example": A}, apps={"demo": frozenset({"a.example", "b.example"})})
REACH_S = 2.0


class Client:
    """A client's machine, joined to a session without a network; notes its notices and when they came."""

    def __init__(self, node: GatewayNode, name: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.machine = Connection(Role.CLIENT, self.loop.time())
        self.notices: list[tuple[float, int, tuple[str, ...]]] = []
        self.answers: list[bytes] = []
        self.failures: list[int] = []
        self.session = node.session()
        self.session.connection_made(cast("Any", self))
        now = int(simloop.WALL_START_S + self.loop.time())
        token = tokens.mint(tokens.DeviceToken(app="demo", device=name, iat=now, exp=now + 3600), key=KEY, kid="k1")
        self.machine.send_hello(m.Hello((m.VERSION,), "demo", token, capabilities=(m.PLAN,)))
        self.flush()

    def flush(self) -> None:
        self.session.data_received(self.machine.data_to_send())

    # what a session sees of a transport
    def get_extra_info(self, name: str) -> Any:
        return {"ssl_object": self, "peername": ("192.0.2.1", 5)}.get(name)

    def selected_alpn_protocol(self) -> str:
        return m.ALPN

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        self.loop.call_soon(self.session.connection_lost, None)

    abort = close

    def write(self, data: bytes) -> None:
        self.machine.receive_data(data, self.loop.time())
        while (event := self.machine.next_event()) is not None:
            match event:
                case e.NoticeReceived():
                    self.notices.append((self.loop.time(), event.version, event.hosts))
                    if event.hosts:
                        self.machine.send_call("dispatch", "plan", body=",".join(event.hosts).encode())
                        self.loop.call_soon(self.flush)
                case e.ReplyReceived():
                    self.answers.append(event.body)
                case e.CallFailed():
                    self.failures.append(event.code)


class World:
    """The unit: an engine, two nodes, a centre."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.rules = HeldRules(RULES)
        rng = SimRng(7)
        self.nodes = [self._node(name, rng) for name in ("n1", "n2")]
        self.clients: list[Client] = []
        link = UnitLink("u1", rules=RULES, answer=self.answer)
        self.rules.on_change(link.changed)
        self.centre = asyncio.create_task(link.run(self.connect))

    def _node(self, name: str, rng: SimRng) -> GatewayNode:
        config = NodeConfig(unit="u1", node=name, apps={"demo": {"k1": PUBLIC}}, api_upstreams={}, heartbeat_s=60.0)
        clock = SimClock(cast("Any", asyncio.get_running_loop()))
        return GatewayNode(config, clock=clock, rng=rng, connect=self.connect, pool=make_pool(clock))

    async def answer(self, message: Message) -> Reply:
        return Reply(str(self.rules.current().version).encode())

    async def connect(self) -> Engine:
        if not self.broker.up:
            raise errors.EngineUnavailable("engine unavailable")
        return MemoryEngine(self.broker)

    def arrive(self, count: int) -> None:
        for number in range(count):
            self.clients.append(Client(self.nodes[number % 2], f"d{len(self.clients)}"))

    async def end(self) -> None:
        self.centre.cancel()
        await asyncio.wait([self.centre])
        for node in self.nodes:
            await node.end()
        await asyncio.sleep(1)


def run(story: Any) -> World:
    async def main() -> World:
        world = World()
        for node in world.nodes:
            await node.start()
        await asyncio.sleep(limits.NOTICE_BEAT_S + 1)
        await story(world)
        await world.end()
        return world

    return cast("World", simloop.run(main).result)


def newer(version: int, **hosts: HostPlan) -> RuleSet:
    return msgspec.structs.replace(RULES, version=version, hosts={**RULES.hosts, **hosts})


def test_change_reaches_2000_sessions_within_two_seconds_and_no_moment_has_them_all() -> None:
    changed_at = 0.0

    async def story(world: World) -> None:
        nonlocal changed_at
        world.arrive(2000)
        await asyncio.sleep(5)
        changed_at = asyncio.get_running_loop().time()
        world.rules.put(newer(6, **{"a.example": B}))
        await asyncio.sleep(5)

    world = run(story)
    moments = sorted(client.notices[-1][0] - changed_at for client in world.clients)
    assert all([notice[1:] for notice in client.notices] == [(5, ()), (6, ("a.example",))] for client in world.clients)
    assert moments[-1] <= REACH_S
    assert max(sum(at <= other < at + 0.1 for other in moments) for at in set(moments)) < 500
    assert all(client.answers == [b"6"] for client in world.clients)


@pytest.mark.parametrize("away_s", [0.5, 5.0, 120.0])
def test_change_while_the_engine_is_away_reaches_all_within_two_seconds_of_its_return(away_s: float) -> None:
    back_at = 0.0

    async def story(world: World) -> None:
        nonlocal back_at
        world.arrive(300)
        await asyncio.sleep(5)
        world.broker.cut()
        world.rules.put(newer(6, **{"a.example": B}))
        await asyncio.sleep(away_s / 2)
        world.rules.put(newer(7, **{"a.example": B, "b.example": B}))
        world.arrive(20)  # they come while it is away, and learn what the node knows
        await asyncio.sleep(away_s / 2)
        back_at = asyncio.get_running_loop().time()
        world.broker.heal(restarted=True)
        await asyncio.sleep(5)

    world = run(story)
    assert all(
        [notice[1:] for notice in client.notices] == [(5, ()), (7, ("a.example", "b.example"))]
        for client in world.clients
    )
    assert max(client.notices[-1][0] for client in world.clients) <= back_at + REACH_S + limits.NOTICE_RETRY_S
    assert all(client.answers == [b"7"] for client in world.clients)


def test_session_that_comes_after_the_change_hears_of_it_in_the_flight_of_its_welcome() -> None:
    async def story(world: World) -> None:
        world.rules.put(newer(6, **{"a.example": B}))
        await asyncio.sleep(5)
        world.arrive(2)
        now = asyncio.get_running_loop().time()
        assert [client.notices for client in world.clients] == [[(now, 6, ())]] * 2

    run(story)
