"""A centre within its unit, on the memory engine and virtual time (`simloop.VirtualLoop`).

What its gateways hear, also where the engine was away.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from stormline.appgw import plans, subjects
from stormline.appgw.plans import PlanChange
from stormline.core import errors, limits_platform
from stormline.dispatch.rules import RuleSet
from stormline.dispatch.unit import HeldRules, UnitLink
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.engine.port import Engine, Message, Reply
from stormline.testing import simloop
from stormline.wire.plan import Endpoint, HostPlan

A, B = (HostPlan(endpoints=(Endpoint(host=f"192.0.2.{number}", port=443),)) for number in (1, 2))
RULES = RuleSet(version=5, hosts={"a.example": A}, apps={"shop": frozenset({"a.example"})})
NEWER = msgspec.structs.replace(RULES, version=6, hosts={"a.example": B})
CHANGE = PlanChange("shop", 6, 5, ("a.example",))


class World:
    """A centre on a broker, and a gateway that notes what it hears."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.rules = HeldRules(RULES)
        self.heard: list[tuple[float, PlanChange]] = []
        self.tries = 0

    async def answer(self, message: Message) -> Reply:
        return Reply(message.data.upper())

    async def hear(self, message: Message) -> None:
        now = asyncio.get_running_loop().time()
        self.heard += [(now, change) for change in plans.decode_changes(message.data)]

    async def connect(self) -> Engine:
        self.tries += 1
        if not self.broker.up:
            raise errors.EngineUnavailable("engine unavailable")
        return MemoryEngine(self.broker)

    def changes(self) -> list[PlanChange]:
        """Give what was told but the beats."""
        return [change for _, change in self.heard if change.since]


def run(story: Callable[[World], Awaitable[None]]) -> World:
    async def main() -> World:
        world = World()
        gateway = MemoryEngine(world.broker)
        await gateway.subscribe(subjects.of_unit("u1", plans.NOTICES), world.hear)
        link = UnitLink("u1", rules=RULES, answer=world.answer)
        world.rules.on_change(link.changed)
        task = asyncio.create_task(link.run(world.connect))
        await story(world)
        task.cancel()
        await asyncio.wait([task])
        await gateway.close()
        assert not world.broker.subscriptions
        return world

    return simloop.run(main).result


def test_a_change_is_told_at_once_and_its_version_again_and_again() -> None:
    async def story(world: World) -> None:
        await asyncio.sleep(10)
        world.rules.put(NEWER)
        await asyncio.sleep(10)

    world = run(story)
    assert world.changes() == [CHANGE]
    assert [at for at, change in world.heard if change == CHANGE] == [10.0]
    beats = [(at, change) for at, change in world.heard if not change.since]
    assert [change.version for _, change in beats] == [5] * 5 + [6] * (len(beats) - 5)
    assert 9 <= len(beats) <= 12


def test_changes_while_the_engine_is_away_are_told_as_one_when_it_is_back() -> None:
    async def story(world: World) -> None:
        await asyncio.sleep(10)
        world.broker.cut()
        world.rules.put(NEWER)
        await asyncio.sleep(30)
        world.rules.put(msgspec.structs.replace(NEWER, version=7, hosts=RULES.hosts))
        await asyncio.sleep(30)
        assert world.changes() == []
        world.broker.heal()
        await asyncio.sleep(1)

    world = run(story)
    assert world.changes() == [PlanChange("shop", 7, 5, ("a.example",))]
    assert world.heard[-1][1] == PlanChange("shop", 7)


def test_a_gateway_that_missed_the_change_hears_its_version_soon() -> None:
    async def story(world: World) -> None:
        await asyncio.sleep(10)
        world.rules.put(NEWER)
        await asyncio.sleep(0.1)
        world.heard.clear()  # as one that starts now
        await asyncio.sleep(limits_platform.NOTICE_BEAT_S)

    assert PlanChange("shop", 6) in [change for _, change in run(story).heard]


def test_an_engine_that_comes_late_is_found() -> None:
    async def story(world: World) -> None:
        world.broker.cut()
        await asyncio.sleep(30)
        world.rules.put(NEWER)
        world.broker.heal()
        await asyncio.sleep(5)

    world = run(story)
    assert world.tries > 5
    assert world.changes() == [CHANGE]


def test_questions_go_to_one_centre_of_the_unit() -> None:
    async def story(world: World) -> None:
        other = MemoryEngine(world.broker)
        counted = 0

        async def answer(message: Message) -> Reply:
            nonlocal counted
            counted += 1
            return Reply(b"other")

        await other.serve(subjects.of_unit("u1", plans.QUESTIONS), answer, queue=plans.QUEUE)
        await asyncio.sleep(1)
        asker = MemoryEngine(world.broker)
        answers = [
            (await asker.request(subjects.of_unit("u1", plans.QUESTIONS), b"x", timeout_s=1)).data for _ in range(10)
        ]
        assert sorted(answers) == [b"X"] * 5 + [b"other"] * 5
        assert counted == 5
        await other.close()
        await asker.close()

    run(story)
