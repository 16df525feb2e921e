"""Centres that met rules they may not serve read them again two seconds later, and again, without end.

The story: good and bad files took turns, and each bad one had every reader fail and begin anew (Cloudflare,
2025-11-18). Here a centre that had refused a rule set fetched it again, whole, every 2 s, in step with all other
centres: up to 64 MB from the engine and seconds of work each time, for content that cannot get better. A rule set that
was larger than it may be was fetched before its size was looked at. And where the checks themselves failed, the centre
gave up its connection to the engine and began anew every 2 s. On virtual time, ten centres on one engine.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest

from stormline.core import limits_platform as limits
from stormline.dispatch import book, head, ledger, rules
from stormline.dispatch.book import Book
from stormline.dispatch.head import Note
from stormline.dispatch.ledger import Ledger
from stormline.dispatch.rules import RuleSet
from stormline.engine.memory import MemoryBroker, MemoryEngine, MemoryKeyValue
from stormline.engine.port import Engine
from stormline.testing.simloop import SimClock, SimRng, on_virtual_time
from stormline.wire.plan import Endpoint, HostPlan

CENTRES, LONG_S = 10, 1200.0


def rule_set(port: int) -> RuleSet:
    plans = {"a.example": HostPlan(endpoints=(Endpoint(host="192.0.2.1", port=port),))}
    return rules.check(RuleSet(version=1, unit="u1", hosts=plans, apps={"shop": frozenset(plans)}))


class Fleet:
    """Centres on one engine.

    Attributes:
        read: when keys were read.
        fetched: how many chunks of rule sets among them.
        connected: connections made to the engine.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broker = MemoryBroker()
        self.read: list[float] = []
        self.fetched = 0
        self.connected = 0
        get = MemoryKeyValue.get

        async def counted(keys: MemoryKeyValue, key: str):  # type: ignore[no-untyped-def]
            self.read.append(now())
            self.fetched += key.startswith("body.")
            return await get(keys, key)

        monkeypatch.setattr(MemoryKeyValue, "get", counted)

    async def connect(self) -> Engine:
        self.connected += 1
        return MemoryEngine(self.broker)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[list[Book]]:
        clock = SimClock(asyncio.get_running_loop())
        books = [
            Book(rule_set(1), unit="u1", path=None, clock=clock, rng=SimRng(number), connect=self.connect)
            for number in range(CENTRES)
        ]
        async with contextlib.AsyncExitStack() as stack:
            for each in books:
                await stack.enter_async_context(each.following())
            engine = MemoryEngine(self.broker)
            keys = await engine.kv(ledger.bucket("u1"), persistent=True)
            self.source = Ledger(keys, rng=SimRng(99))
            await asyncio.sleep(1)
            self.read.clear()
            self.fetched = 0
            yield books
            await engine.close()

    async def write(self, content: bytes, *, size: int = 0, digest: str = "") -> None:
        found = await self.source.find()
        assert found is not None
        body = await self.source.write(
            ledger.pack(content), version=found.head.version + 1, size=size or len(content),
            content_digest=digest or ledger.digest(content),
        )  # fmt: skip
        await self.source.commit(lambda old: head.publish(old, body, Note(who="mad", why="", at=0)))


def now() -> float:
    return asyncio.get_running_loop().time()


def ports(books: list[Book]) -> set[int]:
    return {each.current().hosts["a.example"].endpoints[0].port for each in books}


BAD: dict[str, Callable[[Fleet], object]] = {
    "malformed": lambda fleet: fleet.write(b"{}"),
    "invalid": lambda fleet: fleet.write(rules.encode(rule_set(2)).replace(b'"a.example"', b'"a..example"')),
    "damaged": lambda fleet: fleet.write(rules.encode(rule_set(2)), digest="0" * 64),
    "record": lambda fleet: fleet.source.keys.put(ledger.HEAD_KEY, b"{"),
}


@pytest.mark.parametrize("how", sorted(BAD))
def test_refused_rules_are_left_alone_until_they_change(monkeypatch, how):
    @on_virtual_time
    async def story() -> None:
        fleet = Fleet(monkeypatch)
        async with fleet.running() as books:
            good = await fleet.source.find()
            await BAD[how](fleet)  # type: ignore[misc]
            began = now()
            await asyncio.sleep(LONG_S)
            assert ports(books) == {1}
            assert [each.rejects for each in books] == [{how: 1}] * CENTRES
            assert all(each.stale and each.problem for each in books)
            # At most a record and a chunk, from half the pause to the whole.
            assert len(fleet.read) <= CENTRES * 2 * (2 + LONG_S / (limits.RULES_REJECTED_PAUSE_S / 2))
            late = Counter(round(at) for at in fleet.read if at > began + LONG_S / 2)
            assert max(late.values()) <= CENTRES, "two keys a look, and fewer than half of the centres in one second"
            await fleet.source.keys.put(ledger.HEAD_KEY, head.encode(good.head))
            await asyncio.sleep(1)
            assert not any(each.stale for each in books)
            await fleet.write(rules.encode(rule_set(3)))
            await asyncio.sleep(1)
            assert ports(books) == {3}, "what is good is taken at once"
            assert fleet.connected == CENTRES

    story()


def test_rules_that_are_larger_than_they_may_be_are_not_fetched(monkeypatch):
    @on_virtual_time
    async def story() -> None:
        fleet = Fleet(monkeypatch)
        async with fleet.running() as books:
            await fleet.write(rules.encode(rule_set(2)), size=limits.RULES_BYTES_MAX + 1)
            await asyncio.sleep(1)
            assert [each.rejects for each in books] == [{"too-large": 1}] * CENTRES
            assert (fleet.fetched, ports(books)) == (0, {1})

    story()


def test_chunks_that_hold_more_than_the_record_says_are_not_gathered(monkeypatch):
    monkeypatch.setattr(limits, "RULES_CHUNK_BYTES", 256)

    @on_virtual_time
    async def story() -> None:
        fleet = Fleet(monkeypatch)
        async with fleet.running() as books:
            monkeypatch.setattr(limits, "RULES_BYTES_MAX", 1024)
            body = await fleet.source.write(bytes(8192), version=2, size=10, content_digest="0" * 64)
            await fleet.source.commit(lambda old: head.publish(old, body, Note(who="mad", why="", at=0)))
            await asyncio.sleep(1)
            assert [each.rejects for each in books] == [{"too-large": 1}] * CENTRES
            assert fleet.fetched <= CENTRES * (1280 / 256 + 1)

    story()


def test_fault_of_the_checks_is_a_refusal_and_no_new_beginning(monkeypatch):
    monkeypatch.setattr(logging.getLogger("stormline.dispatch"), "filters", [lambda record: False])

    def broken(*_: object, **__: object) -> RuleSet:
        raise ZeroDivisionError

    @on_virtual_time
    async def story() -> None:
        fleet = Fleet(monkeypatch)
        async with fleet.running() as books:
            with monkeypatch.context() as patched:
                patched.setattr(book.dispatch_rules, "decode", broken)
                await fleet.write(rules.encode(rule_set(2)))
                await asyncio.sleep(LONG_S)
                assert [each.rejects for each in books] == [{"fault": 1}] * CENTRES
                assert (ports(books), fleet.connected) == ({1}, CENTRES)
            await asyncio.sleep(limits.RULES_REJECTED_PAUSE_S)
            assert ports(books) == {2}

    story()


def test_device_that_has_seen_what_is_rolled_out_goes_on_with_it_under_another_id(monkeypatch):
    @on_virtual_time
    async def story() -> None:
        fleet = Fleet(monkeypatch)
        async with fleet.running() as books:
            content = rules.encode(rule_set(2))
            body = await fleet.source.write(
                ledger.pack(content), version=2, size=len(content), content_digest=ledger.digest(content)
            )
            await fleet.source.commit(lambda old: head.start(old, body, (1.0,), Note(who="ann", why="", at=0)))
            await asyncio.sleep(1)
            for each in books:
                assert [each.for_device("", seen).version for seen in (0, 1, 2)] == [1, 1, 2]

    story()
