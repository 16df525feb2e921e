"""Nodes that die, are cut off and return, on virtual time (`simloop.VirtualLoop`) and the memory engine."""

import asyncio
from collections import Counter

import msgspec
import pytest

from stormline.appgw import record
from stormline.appgw.directory import Directory
from stormline.appgw.journal import Clearing, NodeJournal
from stormline.appgw.nodes import Nodes
from stormline.appgw.port import Identity
from stormline.appgw.presence import Filter, Presence
from stormline.appgw.record import About
from stormline.core import errors, limits_platform
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.testing import simloop

LEASE_S = limits_platform.NODE_LEASE_S
GONE_S = 10.0
"""In which no trace of a dead node is left."""


class Clock:
    """Wall time that goes with the loop."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return 1_700_000_000.0 + asyncio.get_running_loop().time()


class Wire:
    """An engine that a test can cut for one node alone."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._engine = MemoryEngine(broker)
        self.cut = False

    @property
    def connected(self) -> bool:
        return not self.cut and self._engine.connected

    def _need(self) -> None:
        if self.cut:
            raise errors.EngineUnavailable("cut")

    async def publish(self, subject, data, headers=None):
        self._need()
        await self._engine.publish(subject, data, headers)

    async def request(self, subject, data, headers=None, *, timeout_s):
        self._need()
        return await self._engine.request(subject, data, headers, timeout_s=timeout_s)

    async def kv(self, bucket, *, persistent, ttl_s=None):
        self._need()
        return _Keys(self, await self._engine.kv(bucket, persistent=persistent, ttl_s=ttl_s))

    async def subscribe(self, subject, handler, *, queue=""):
        async def take(message):
            if not self.cut:
                await handler(message)

        return await self._engine.subscribe(subject, take, queue=queue)

    async def serve(self, subject, handler, *, queue=""):
        return await self._engine.serve(subject, handler, queue=queue)


class _Keys:
    def __init__(self, wire: Wire, kv) -> None:
        self._wire = wire
        self._kv = kv

    def __getattr__(self, name):
        self._wire._need()
        return getattr(self._kv, name)


class Told:
    """What businesses hear, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str, int]] = []

    async def online(self, key, app, device, entry):
        self.events.append(("online", device, "", entry.epoch))

    async def offline(self, key, app, device, entry, reason):
        self.events.append(("offline", device, reason, entry.epoch))

    def count(self, what: str) -> Counter[str]:
        return Counter(device for event, device, *_ in self.events if event == what)


class Node:
    """The presence of one node, run by run."""

    def __init__(self, world: "World", name: str, run: str) -> None:
        self.wire = Wire(world.broker)
        self.ended: list[str] = []
        clock = Clock()
        facts = {"unit": "u1", "node": name, "run": run, "clock": clock}
        self.nodes = Nodes(
            self.wire, **facts, counts=lambda: self.directory.counts(), died=lambda *told: self.clearing.died(*told)
        )
        self.clearing = Clearing(self.wire, self.nodes, **facts, watcher=world.told)
        self.directory = Directory(
            self.wire,
            **facts,
            superseded=lambda who: self.ended.append(who.session),
            alive=self.nodes.alive,
            watcher=world.told,
            journal=NodeJournal(name, run),
        )
        self.presence = Presence(self.wire, self.directory, self.nodes, unit="u1", node=name)
        self.tasks: list[asyncio.Task[None]] = []
        self._sessions = 0
        self.name = name

    async def start(self) -> None:
        await self.directory.start(self.wire)
        await self.nodes.start(self.wire)
        await self.presence.start(self.wire)
        for part in (self.directory, self.nodes, self.clearing):
            self.tasks.append(asyncio.create_task(part.run()))

    def open(self, *devices: str, user: str = "") -> list[Identity]:
        opened = []
        for device in devices:
            self._sessions += 1
            opened.append(Identity("demo", device, user, f"{self.name}-{self._sessions}-{device}"))
            self.directory.opened(opened[-1], About("wifi", "", "1.0"))
        return opened

    async def die(self) -> None:
        self.wire.cut = True
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)

    async def leave(self) -> None:
        """End as a node does that is stopped."""
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        await self.directory.flush()
        await self.nodes.leave()
        self.wire.cut = True

    async def online(self, device: str) -> bool:
        return (await self.presence.device("demo", device)).online

    def counted(self) -> int:
        counts = self.presence.counts("demo")
        return counts["u1"].devices


class World:
    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.told = Told()
        self.nodes: list[Node] = []
        self._runs = 0

    async def node(self, name: str) -> Node:
        self._runs += 1
        node = Node(self, name, f"r{self._runs}")
        await node.start()
        self.nodes.append(node)
        return node

    async def end(self) -> None:
        for node in self.nodes:
            for task in node.tasks:
                task.cancel()
            await asyncio.wait(node.tasks)


def on_virtual_time(scenario):
    async def main() -> None:
        world = World()
        try:
            await scenario(world)
        finally:
            await world.end()

    loop = simloop.VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())


def names(size: int, of: str = "d") -> list[str]:
    return [f"{of}{number:03}" for number in range(size)]


class TestCrash:
    @pytest.mark.parametrize("size", [1, 40, 300, 600])
    def test_sessions_of_a_dead_node_are_gone_within_the_lease_and_told_once(self, size):
        async def scenario(world):
            a, b, c = [await world.node(name) for name in "abc"]
            b.open(*names(size))
            c.open(*names(3, "c"))
            await asyncio.sleep(3)
            assert (a.counted(), c.counted()) == (size + 3, size + 3)
            await b.die()
            for _ in range(int(GONE_S)):
                await asyncio.sleep(1)
            for node in (a, c):
                assert node.counted() == 3
                assert not await node.online("d000")
                assert await node.online("c000")
                page = await node.presence.page("demo", Filter(), limit=1000)
                assert [one.device for one in page.devices] == names(3, "c")
            assert world.told.count("offline") == Counter(names(size))
            assert {reason for event, _, reason, _ in world.told.events if event == "offline"} == {"lease"}
            last = await a.presence.device("demo", "d000")
            assert last.node == "b"
            assert last.seen_ms <= (Clock().wall() - GONE_S + 1) * 1000  # not when it was cleared up

        on_virtual_time(scenario)

    def test_device_that_returned_elsewhere_is_never_offline(self):
        async def scenario(world):
            a, b = [await world.node(name) for name in "ab"]
            b.open(*names(600))
            await asyncio.sleep(3)
            await b.die()
            a.open(*names(300))
            for _ in range(40):
                await asyncio.sleep(0.5)
                assert await a.online("d007")
            assert not await a.online("d450")
            assert a.counted() == 300
            assert world.told.count("offline") == Counter(names(600)[300:])

        on_virtual_time(scenario)

    def test_first_living_node_that_dies_while_clearing_up_is_followed_by_the_next(self):
        async def scenario(world):
            a, b, c = [await world.node(name) for name in "abc"]
            b.open(*names(500))
            await asyncio.sleep(3)
            await b.die()
            await asyncio.sleep(LEASE_S - 1)
            await a.die()  # before it could clear up
            await asyncio.sleep(2 * GONE_S)
            assert world.told.count("offline") == Counter(names(500))
            assert c.counted() == 0

        on_virtual_time(scenario)

    def test_node_back_before_its_lease_was_over_clears_up_behind_itself(self):
        async def scenario(world):
            a = await world.node("a")
            b = await world.node("b")
            b.open(*names(40))
            await asyncio.sleep(3)
            await b.die()
            again = await world.node("b")
            again.open("d001")
            await asyncio.sleep(2)
            assert world.told.count("offline") == Counter(set(names(40)) - {"d001"})
            assert await again.online("d001")
            await asyncio.sleep(GONE_S)
            assert await a.online("d001")
            assert a.counted() == 1

        on_virtual_time(scenario)

    def test_node_that_comes_later_believes_no_dead_one(self):
        async def scenario(world):
            b = await world.node("b")
            b.open("d1")
            await asyncio.sleep(3)
            await b.die()
            await asyncio.sleep(LEASE_S)
            late = await world.node("z")
            await asyncio.sleep(GONE_S)
            assert not await late.online("d1")
            assert late.counted() == 0

        on_virtual_time(scenario)


class TestStop:
    def test_node_that_leaves_in_order_is_gone_at_once_and_leaves_no_list(self):
        async def scenario(world):
            a, b = [await world.node(name) for name in "ab"]
            opened = b.open(*names(300))
            await asyncio.sleep(3)
            for one in opened:
                b.directory.closed(one)
            await b.leave()
            await asyncio.sleep(1)
            assert a.counted() == 0
            assert world.told.count("offline") == Counter(names(300))
            assert {reason for event, _, reason, _ in world.told.events if event == "offline"} == {"ended"}
            kv = await a.wire.kv(record.bucket_of("u1"), persistent=False, ttl_s=limits_platform.DIRECTORY_LIFE_S)
            assert await kv.under("j") == {}

        on_virtual_time(scenario)


class TestAway:
    def test_node_cut_off_for_longer_than_its_lease_is_online_again_with_a_new_epoch(self):
        async def scenario(world):
            a, b = [await world.node(name) for name in "ab"]
            b.open(*names(200))
            await asyncio.sleep(3)
            b.wire.cut = True
            await asyncio.sleep(GONE_S)
            assert a.counted() == 0
            assert world.told.count("offline") == Counter(names(200))
            b.wire.cut = False
            await asyncio.sleep(4)
            assert (a.counted(), b.counted()) == (200, 200)
            assert await a.online("d000")
            of_one = [(event, epoch) for event, device, _, epoch in world.told.events if device == "d000"]
            assert [event for event, _ in of_one] == ["online", "offline", "online"]
            assert of_one[0][1] == of_one[1][1] < of_one[2][1]

        on_virtual_time(scenario)

    @pytest.mark.parametrize("restarted", [False, True])
    def test_engine_away_nobody_dies_and_all_is_known_afterwards(self, restarted):
        async def scenario(world):
            a, b = [await world.node(name) for name in "ab"]
            b.open(*names(200))
            a.open("a1", user="ann")
            await asyncio.sleep(3)
            world.broker.cut()
            await asyncio.sleep(5 * LEASE_S)
            world.broker.heal(restarted=restarted)
            for _ in range(10):
                await asyncio.sleep(0.5)
                assert a.counted() == 201
            assert await a.online("d100")
            assert [one.device for one in await b.presence.of_user("demo", "ann")] == ["a1"]
            assert world.told.count("offline") == Counter()
            assert world.told.count("online") == Counter([*names(200), "a1"])
            await b.die()  # and the list of what it holds is there again too
            await asyncio.sleep(GONE_S)
            assert world.told.count("offline") == Counter(names(200))

        on_virtual_time(scenario)


class TestJournal:
    async def listed(self, kv) -> Counter[str]:
        chunks = await kv.under("j")
        return Counter(key for chunk in chunks.values() for key in msgspec.msgpack.decode(chunk.value))

    def test_list_follows_what_is_held_and_stays_small(self):
        async def scenario(world):
            kv = await MemoryEngine(world.broker).kv("x", persistent=False, ttl_s=100.0)
            journal = NodeJournal("n", "r1")
            held: dict[str, None] = {}

            def add(key):
                journal.add(key)
                held[key] = None

            for step in range(60):  # every step 100 come and 90 of the oldest go
                for number in range(100):
                    add(f"d.a.{step}-{number}")
                for key in list(held)[:90] if step else ():
                    journal.drop(key)
                    del held[key]
                await asyncio.sleep(limits_platform.JOURNAL_PAUSE_S)
                await journal.work(kv)
            await asyncio.sleep(limits_platform.JOURNAL_PAUSE_S)
            await journal.work(kv)
            listed = await self.listed(kv)
            assert held.keys() <= listed.keys()
            chunks = await kv.under("j")
            assert len(chunks) <= len(held) // limits_platform.JOURNAL_CHUNK_KEYS_MIN + 2

        on_virtual_time(scenario)

    def test_engine_away_what_was_not_written_is_written_later(self):
        async def scenario(world):
            engine = MemoryEngine(world.broker)
            kv = await engine.kv("x", persistent=False, ttl_s=100.0)
            journal = NodeJournal("n", "r1")
            for number in range(300):
                journal.add(f"d.a.{number}")
            world.broker.cut()
            with pytest.raises(errors.EngineUnavailable):
                await journal.work(kv)
            journal.drop("d.a.7")
            world.broker.heal()
            await journal.work(kv)
            assert (await self.listed(kv)).keys() == {f"d.a.{number}" for number in range(300)} - {"d.a.7"}

        on_virtual_time(scenario)
