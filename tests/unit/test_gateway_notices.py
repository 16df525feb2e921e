"""Notices of changed plans within a node, on virtual time (`simloop.VirtualLoop`): when, to whom, and what."""

import asyncio
import itertools
import random

import pytest

from stormline.appgw import plans, subjects
from stormline.appgw.plans import PlanChange
from stormline.core import limits, limits_platform
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.engine.port import Message
from stormline.gateway.notices import AppChanges, Due, Notices
from stormline.testing import simloop

REACH_S = 2.0
"""In which a changed plan reaches everybody."""


class Chance:
    """Seeded chance."""

    def __init__(self, seed: int = 1) -> None:
        self._random = random.Random(seed)

    def random(self) -> float:
        return self._random.random()

    def token_bytes(self, size: int) -> bytes:
        return self._random.randbytes(size)


class Session:
    """Notes what it is told and when; tells nothing while it is `paused`."""

    def __init__(self, world: "World", app: str) -> None:
        self.world = world
        self.app = app
        self.told = 0
        self.paused = False
        self.heard: list[tuple[float, int, tuple[str, ...]]] = []

    def tell_changes(self) -> None:
        due = None if self.paused else self.world.notices.due(self.app, self.told)
        if due is not None:
            self.told = due.number
            self.heard.append((asyncio.get_running_loop().time(), due.version, due.hosts))


class World:
    def __init__(self, sessions: int = 0) -> None:
        self.sessions = [Session(self, "shop") for _ in range(sessions)]
        self.notices = Notices(["shop", "bank"], rng=Chance(), sessions=lambda: iter(self.sessions))

    async def change(self, *changes: PlanChange) -> None:
        for data in plans.encode_changes(changes):
            await self.notices.take(Message("s", data, {}))


def hosts_of(session: Session) -> list[tuple[int, tuple[str, ...]]]:
    return [(version, hosts) for _, version, hosts in session.heard]


class TestAppChanges:
    def test_first_news_names_no_hosts_for_nobody_knows_what_it_follows(self) -> None:
        changes = AppChanges()
        assert changes.due(0) is None
        assert changes.take(PlanChange("shop", 7, 6, ("a",)))
        assert changes.due(0) == Due(1, 7, ())

    def test_change_that_follows_what_is_known_names_its_hosts(self) -> None:
        changes = AppChanges()
        changes.take(PlanChange("shop", 7))
        assert changes.take(PlanChange("shop", 9, 7, ("a",)))
        assert changes.due(1) == Due(2, 9, ("a",))
        assert changes.due(0) == Due(2, 9, ())
        assert changes.due(2) is None

    def test_change_after_one_that_was_missed_may_concern_any_host(self) -> None:
        changes = AppChanges()
        changes.take(PlanChange("shop", 7))
        changes.take(PlanChange("shop", 9, 8, ("a",)))
        assert changes.due(1) == Due(2, 9, ())

    def test_known_older_and_repeated_news_are_dropped(self) -> None:
        changes = AppChanges()
        changes.take(PlanChange("shop", 7))
        changes.take(PlanChange("shop", 8, 7, ("a",)))
        for stale in (PlanChange("shop", 8, 7, ("a",)), PlanChange("shop", 8), PlanChange("shop", 7, 7, ("a",))):
            assert not changes.take(stale)
        assert changes.number == 2

    def test_other_standing_under_the_same_version_is_news(self) -> None:
        changes = AppChanges()
        changes.take(PlanChange("shop", 7))
        assert changes.take(PlanChange("shop", 7, 7, ("b",)))
        assert changes.take(PlanChange("shop", 7, 7, ("a",)))
        assert changes.due(1) == Due(3, 7, ("a", "b"))

    def test_a_session_far_behind_is_told_any(self) -> None:
        changes = AppChanges()
        changes.take(PlanChange("shop", 1))
        for version in range(2, limits_platform.NOTICE_CHANGES_KEPT + 4):
            changes.take(PlanChange("shop", version, version - 1, (f"h{version}",)))
        assert changes.due(1) == Due(changes.number, changes.version, ())
        recent = changes.due(changes.number - 2)
        assert recent is not None
        assert recent.hosts == ("h18", "h19")


class TestPasses:
    @pytest.mark.parametrize("count", [1, 200, 5000])
    def test_every_session_is_told_once_within_its_time_at_moments_of_its_own(self, count: int) -> None:
        async def main() -> World:
            world = World(count)
            await world.change(PlanChange("shop", 7))
            await asyncio.sleep(10)
            return world

        world = simloop.run(main).result
        assert all(hosts_of(session) == [(7, ())] for session in world.sessions)
        moments = [session.heard[0][0] for session in world.sessions]
        assert max(moments) <= limits_platform.NOTICE_SPREAD_S
        if count > 1:
            assert max(moments) - min(moments) > limits_platform.NOTICE_SPREAD_S / 2
            crowd = max(sum(at <= other < at + 0.1 for other in moments) for at in sorted(set(moments)))
            assert crowd < count / 2

    @pytest.mark.parametrize("gap_s", [0.0, 0.01, 0.3, 0.89, 0.95])
    def test_a_second_change_in_the_middle_reaches_all_within_two_seconds_and_joins_the_first(self, gap_s: float):
        async def main() -> World:
            world = World(300)
            await world.change(PlanChange("shop", 7))
            await asyncio.sleep(5)
            await world.change(PlanChange("shop", 8, 7, ("a",)))
            await asyncio.sleep(gap_s)
            await world.change(PlanChange("shop", 9, 8, ("b",)))
            await asyncio.sleep(10)
            return world

        world = simloop.run(main).result
        for session in world.sessions:
            at, version, _ = session.heard[-1]
            assert version == 9
            assert at <= 5 + gap_s + REACH_S
            heard = hosts_of(session)[1:]
            assert heard in ([(9, ("a", "b"))], [(8, ("a",)), (9, ("b",))])

    def test_changes_without_end_never_keep_a_session_waiting_nor_flood_it(self) -> None:
        async def main() -> World:
            world = World(100)
            await world.change(PlanChange("shop", 1))
            for version in range(2, 202):
                await asyncio.sleep(0.1)
                await world.change(PlanChange("shop", version, version - 1, ("a",)))
            await asyncio.sleep(10)
            return world

        world = simloop.run(main).result
        for session in world.sessions:
            assert session.heard[-1][1] == 201
            moments = [at for at, _, _ in session.heard]
            gaps = [later - at for at, later in itertools.pairwise(moments)]
            assert max(gaps) <= REACH_S
            assert len(moments) <= 2 + 20 / limits_platform.NOTICE_SPREAD_S

    def test_only_sessions_of_the_app_are_told_and_unknown_apps_are_dropped(self) -> None:
        async def main() -> World:
            world = World(5)
            world.sessions += [Session(world, "bank") for _ in range(5)]
            await world.change(PlanChange("bank", 3), PlanChange("other", 3))
            await asyncio.sleep(10)
            return world

        world = simloop.run(main).result
        assert [len(session.heard) for session in world.sessions] == [0] * 5 + [1] * 5
        assert world.notices.due("other", 0) is None

    def test_a_session_that_does_not_read_holds_nobody_up_and_is_told_all_later(self) -> None:
        async def main() -> World:
            world = World(3)
            await world.change(PlanChange("shop", 1))
            await asyncio.sleep(5)
            world.sessions[0].paused = True
            await world.change(PlanChange("shop", 2, 1, ("a",)))
            await asyncio.sleep(5)
            await world.change(PlanChange("shop", 3, 2, ("b",)))
            await asyncio.sleep(5)
            world.sessions[0].paused = False
            world.sessions[0].tell_changes()
            return world

        world = simloop.run(main).result
        assert hosts_of(world.sessions[0])[1:] == [(3, ("a", "b"))]
        assert hosts_of(world.sessions[1])[1:] == [(2, ("a",)), (3, ("b",))]

    def test_malformed_messages_are_dropped(self) -> None:
        async def main() -> World:
            world = World(1)
            too_many = (PlanChange("shop", number) for number in range(limits_platform.NOTICE_CHANGES_MAX + 1))
            for data in (
                b"",
                b"\xc1",
                b"\x91\x92\xa4shop\xff",  # a version below zero
                plans._encoder.encode(list(too_many)),
                plans._encoder.encode([PlanChange("shop", 1, 0, ("a",) * (limits.PLAN_HOSTS_MAX + 1))]),
                plans._encoder.encode([PlanChange("shop", 1, 0, ("a" * 254,))]),
            ):
                await world.notices.take(Message("s", data, {}))
            await asyncio.sleep(5)
            return world

        assert simloop.run(main).result.sessions[0].heard == []

    def test_close_ends_a_pass(self) -> None:
        async def main() -> None:
            world = World(100)
            await world.change(PlanChange("shop", 1))
            await asyncio.sleep(0.1)
            await world.notices.close()

        assert simloop.run(main).end_s < limits_platform.NOTICE_SPREAD_S

    def test_centre_heard_over_the_engine(self) -> None:
        async def main() -> World:
            world = World(1)
            engine = MemoryEngine(MemoryBroker())
            await world.notices.start(engine, "u1")
            (data,) = plans.encode_changes([PlanChange("shop", 1)])
            await engine.publish(subjects.of_unit("u1", plans.NOTICES), data)
            await engine.publish(subjects.of_unit("u2", plans.NOTICES), data.replace(b"\x01", b"\x02"))
            await asyncio.sleep(5)
            await engine.close()
            return world

        assert hosts_of(simloop.run(main).result.sessions[0]) == [(1, ())]


def test_changes_are_cut_into_messages_of_a_bounded_number() -> None:
    many = [PlanChange(f"app{number}", number) for number in range(2 * limits_platform.NOTICE_CHANGES_MAX + 1)]
    messages = [plans.decode_changes(data) for data in plans.encode_changes(many)]
    assert [len(message) for message in messages] == [64, 64, 1]
    assert [change for message in messages for change in message] == many
    assert list(plans.encode_changes([])) == []


def test_joined_hosts_are_sorted_bounded_and_any_where_one_is() -> None:
    assert plans.join_hosts([("b", "a"), ("a",)]) == ("a", "b")
    assert plans.join_hosts([("a",), ()]) == ()
    assert plans.join_hosts([tuple(map(str, range(60))), tuple(map(str, range(60, 101)))]) == ()
