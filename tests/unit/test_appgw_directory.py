"""The directory on the memory engine: who wins an entry, who may remove it, and what an absence of the engine does."""

import asyncio

import pytest

from stormline.appgw import subjects
from stormline.appgw.directory import Directory, key_of
from stormline.appgw.port import Identity
from stormline.core import errors, limits
from stormline.engine.memory import MemoryBroker, MemoryEngine


class SetClock:
    """A wall clock that stands where it is set."""

    def __init__(self, wall_s):
        self.wall_s = wall_s

    def monotonic(self):
        return 0.0

    def wall(self):
        return self.wall_s


class Node:
    """One node's directory."""

    def __init__(self, broker, name, wall_s=1000.0):
        self.engine = MemoryEngine(broker)
        self.clock = SetClock(wall_s)
        self.ended = []
        self.directory = Directory(
            self.engine, unit="u1", node=name, clock=self.clock, superseded=lambda who: self.ended.append(who.session)
        )

    async def open(self, session, device="d1", *, flush=True, login_ms=0, returned=False):
        identity = Identity("demo", device, "", session, login_ms, returned)
        self.directory.opened(identity)
        if flush:
            await self.directory.flush()
        return identity

    async def close(self, identity):
        self.directory.closed(identity)
        await self.directory.flush()

    async def where(self, device="d1"):
        place = await self.directory.lookup("demo", device)
        return None if place is None else (place.node, place.session)


@pytest.fixture(name="broker")
def _broker():
    return MemoryBroker()


@pytest.fixture(name="a")
def _a(broker):
    return Node(broker, "a")


@pytest.fixture(name="b")
def _b(broker):
    return Node(broker, "b")


class TestOlderLogin:
    """A copy of a device that comes back yields to the copy that logged in after it, whoever is announced first."""

    async def test_that_comes_back_yields_at_once(self, a, b):
        await a.open("s1", login_ms=1000)
        await b.open("s2", login_ms=2000)
        await a.open("s3", login_ms=1000, returned=True)
        assert (await b.where(), a.ended, b.ended) == (("b", "s2"), ["s3"], [])

    async def test_yields_where_it_was_announced_before_the_newer_one(self, a, b):
        await a.open("s3", login_ms=1000, returned=True)
        b.clock.wall_s -= 500.0
        await b.open("s2", login_ms=2000, returned=True)
        assert (await b.where(), b.ended) == (("b", "s2"), [])

    async def test_same_client_goes_where_it_likes(self, a, b):
        await a.open("s1", login_ms=1000)
        await b.open("s2", login_ms=1000, returned=True)
        await a.open("s3", login_ms=1000, returned=True)
        assert (await b.where(), a.ended) == (("a", "s3"), [])

    async def test_fresh_login_takes_over_whatever_the_clocks_say(self, a, b):
        await a.open("s1", login_ms=5000)
        await b.open("s2", login_ms=1000)
        assert await b.where() == ("b", "s2")


class TestEntry:
    async def test_session_is_found_by_every_node_until_it_ends(self, a, b):
        identity = await a.open("s1")
        assert await b.where() == ("a", "s1")
        assert await b.where("other") is None
        await a.close(identity)
        assert await b.where() is None

    async def test_devices_of_two_apps_and_odd_names_are_apart(self, a):
        for app, device in (("demo", "x.y"), ("demo", "x"), ("x", "demo"), ("demo", ">"), ("demo", "*")):
            a.directory.opened(Identity(app, device, "", f"{app}/{device}"))
        await a.directory.flush()
        for app, device in (("demo", "x.y"), ("demo", "x"), ("x", "demo"), ("demo", ">"), ("demo", "*")):
            assert (await a.directory.lookup(app, device)).session == f"{app}/{device}"

    async def test_session_that_ends_before_it_was_written_leaves_nothing(self, a, b):
        identity = await a.open("s1", flush=False)
        await a.close(identity)
        assert await b.where() is None
        assert len(a.directory) == 0

    async def test_lookup_of_a_name_too_long_is_refused(self, a):
        with pytest.raises(errors.ConfigError):
            await a.directory.lookup("demo", "d" * (limits.NAME_BYTES_MAX + 1))


class TestTakeover:
    async def test_newest_session_wins_also_over_a_clock_ahead(self, a, b):
        a.clock.wall_s = 5000.0
        await a.open("s1")
        await b.open("s2")
        assert await a.where() == ("b", "s2")

    async def test_late_end_of_the_older_session_keeps_the_newer_entry(self, a, b):
        old = await a.open("s1")
        await b.open("s2")
        await a.close(old)
        assert await a.where() == ("b", "s2")

    async def test_node_that_lost_an_entry_is_told_and_ends_its_session(self, a, b, settle):
        await a.directory.start(a.engine)
        await a.open("s1")
        await b.open("s2")
        await settle()
        await a.directory.flush()
        assert a.ended == ["s1"]
        assert len(a.directory) == 0
        assert await a.where() == ("b", "s2")

    async def test_false_word_of_a_takeover_changes_nothing(self, a, b, settle):
        await a.directory.start(a.engine)
        await a.open("s1")
        for key in (key_of("demo", "d1").encode(), b"nonsense", b"\xff"):
            await b.engine.publish(subjects.of_node("u1", "a", "taken"), key)
        await settle()
        await a.directory.flush()
        assert a.ended == []
        assert await b.where() == ("a", "s1")

    async def test_second_session_on_one_node_replaces_the_first(self, a, b):
        old = await a.open("s1")
        await a.open("s2")
        await a.close(old)
        assert await b.where() == ("a", "s2")

    async def test_session_back_on_the_first_node_wins(self, a, b):
        await a.open("s1")
        second = await b.open("s2")
        await a.open("s3")
        await b.close(second)
        assert await b.where() == ("a", "s3")


class TestEngineAway:
    async def test_memory_lost_all_sessions_are_announced_again(self, broker, a, b):
        for number in range(100):
            await a.open(f"s{number}", f"d{number}", flush=False)
        await a.directory.flush()
        broker.cut()
        with pytest.raises(errors.EngineUnavailable):
            await a.directory.flush()
        broker.heal(restarted=True)
        assert await b.where("d7") is None
        await a.directory.flush()
        for number in range(100):
            assert await b.where(f"d{number}") == ("a", f"s{number}")

    async def test_older_session_announced_again_yields_to_a_newer_one(self, broker, a, b):
        await a.open("s1")
        broker.cut()
        broker.heal(restarted=True)
        b.clock.wall_s = 2000.0
        await b.open("s2")
        await a.directory.flush()
        assert await a.where() == ("b", "s2")
        assert a.ended == ["s1"]

    async def test_newer_session_announced_late_still_wins(self, broker, a, b):
        await b.open("s2")
        broker.cut()
        broker.heal(restarted=True)
        a.clock.wall_s = 2000.0
        await a.open("s1")
        await b.directory.flush()
        assert await b.where() == ("a", "s1")
        assert b.ended == ["s2"]

    async def test_session_that_ended_meanwhile_is_removed_afterwards(self, broker, a, b):
        identity = await a.open("s1")
        broker.cut()
        a.directory.closed(identity)
        with pytest.raises(errors.EngineUnavailable):
            await a.directory.flush()
        broker.heal(restarted=False)
        await a.directory.flush()
        assert await b.where() is None

    async def test_bucket_of_another_version_is_trouble_of_the_engine_not_of_sessions(self, broker, a):
        await a.engine.kv("directory_u1", persistent=True)
        with pytest.raises(errors.EngineError, match="other properties"):
            await a.open("s1")
        assert len(a.directory) == 1


@pytest.fixture(name="settle")
def _settle():
    """Give what lets messages of the memory engine arrive."""

    async def settle():
        for _ in range(10):
            await asyncio.sleep(0)

    return settle
