"""Bad rules reach half the fleet: ten real centres on a real NATS server, and fifty clients that ask them.

The story: a file of twice its size met a bound that made every reader crash, and good and bad files took turns every
few minutes (Cloudflare, 2025-11-18); a bad value that clients set out to repair, each by asking the store once more,
took the store down (Facebook, 2010-09-23). Here centres and clients keep the last good rules and serve by them, count
what they refuse, and ask no more often than before.

What a client costs the centres meanwhile is in `tests/regressions/test_clients_storm_centres_that_answer_badly.py`.
"""

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from stormline.appgw import plans, subjects
from stormline.client.config import Config
from stormline.client.scheduling import Scheduling
from stormline.core import limits, limits_network, limits_platform
from stormline.dispatch import head as heads
from stormline.dispatch import ledger, rules
from stormline.dispatch.head import Note
from stormline.engine.nats import connect
from stormline.engine.port import Engine, Message
from stormline.net.clock import SystemClock, SystemRng
from stormline.net.trust import roles_context
from stormline.outbound.dial import Dialer
from stormline.outbound.doh import NoNames
from stormline.outbound.pool import HttpPool
from stormline.wire import tokens
from stormline.wire.bundle import Bundle

from .test_dispatch_rules import HOST, LATE_S, NAME, Centre, Unit, eventually, rule_set  # noqa: TID252 - one unit for both

pytestmark = pytest.mark.loopback

CENTRES, BEHIND, CLIENTS = 10, 4, 50
BYTES_MAX = 64 * 1024
"""A rule set here: small, so that twice of it is quickly made."""
LIVE, OTHER, DEAD = 1, 2, 3
"""Ports that rules name, by which they are told apart."""


async def until(condition: Callable[[], Any], wait_s: float = 2 * LATE_S) -> None:
    async with asyncio.timeout(wait_s):
        while not condition():  # noqa: ASYNC110 - the other side is another process
            await asyncio.sleep(0.01)


class Wire:
    """A way to NATS that can be cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.cut = False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.set(cut=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def set(self, *, cut: bool) -> None:
        self.cut = cut
        if cut:
            for writer in self._open:
                writer.transport.abort()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._join(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.cut:
            writer.transport.abort()
            return
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            self._open |= {writer, back}
            await asyncio.gather(self._copy(reader, back), self._copy(there, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
        self._open.discard(writer)


class Client:
    """A client's side of dispatch, which is told of changes as by its long connection.

    Attributes:
        seen: versions it has held, in their order.
    """

    def __init__(self, number: int, unit: Unit, centres: list[Centre], pool: HttpPool) -> None:
        at = number % len(centres)
        addresses = [str(each.client.base_url.host) + f":{each.client.base_url.port}" for each in centres]
        claims = tokens.DeviceToken(app="shop", device=f"d{number}", iat=0, exp=2**33)
        bundle = Bundle(
            app="shop",
            dispatch=(*addresses[at:], *addresses[:at]),
            dispatch_name=NAME,
            dispatch_keys={unit.plan_key.kid: unit.plan_key.public_text},
            token=tokens.mint(claims, key=unit.token_key.key, kid=unit.token_key.kid),
        )
        self.scheduling = Scheduling(Config(bundle=bundle), bundle, pool, SystemClock(), None, rng=SystemRng())
        self.seen: list[int] = []

    async def port(self) -> int:
        """Give the port the client would go to now; it always has one."""
        found = await self.scheduling.host_plan(HOST)
        assert found is not None
        held = self.scheduling.plan
        assert held is not None
        if not self.seen or self.seen[-1] != held.version:
            self.seen.append(held.version)
        return found.endpoints[0].port


class Fleet:
    """Everything, and an app in each client that asks for its host again and again.

    Attributes:
        ports: where each client would go now.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.centres: list[Centre] = []
        self.clients: list[Client] = []
        self.ports: dict[int, int] = {}
        self.wire: Wire
        self._ends: list[Callable[[], Awaitable[None]]] = []

    async def start(self, stack: contextlib.AsyncExitStack, clients: int) -> None:
        unit = self.unit
        self.wire = await stack.enter_async_context(Wire(unit.port))
        for number in range(CENTRES):
            way = unit.engine if number >= BEHIND else self._through_wire
            own = await stack.enter_async_context(contextlib.AsyncExitStack())
            self.centres.append(await unit.centre(f"c{number}", rule_set(LIVE), stack=own, connect=way))
            self._ends.append(own.aclose)
        pool = HttpPool(Dialer(NoNames(), unit.trust_roles), SystemClock())
        stack.callback(pool.close)
        self.clients = [Client(number, unit, self.centres, pool) for number in range(clients)]
        for client in self.clients:
            stack.push_async_callback(client.scheduling.aclose)
            await client.scheduling.refresh()
        await self.listen(stack)
        running = [asyncio.create_task(self._use(number)) for number in range(clients)]

        async def end() -> None:
            for task in running:
                task.cancel()
            for task, found in zip(running, await asyncio.gather(*running, return_exceptions=True), strict=True):
                assert task.cancelled(), found

        stack.push_async_callback(end)

    async def _through_wire(self) -> Engine:
        config = dataclasses.replace(self.unit.server.core, url=f"nats://127.0.0.1:{self.wire.port}")
        return await connect(config, rng=SystemRng(), wait_s=0)

    async def listen(self, stack: contextlib.AsyncExitStack) -> None:
        """Tell the clients of changes, as gateways do."""
        engine = await self.unit.engine()
        stack.push_async_callback(engine.close)

        async def heard(message: Message) -> None:
            for change in plans.decode_changes(message.data):
                for client in self.clients:
                    client.scheduling.notice(change.version, change.hosts)

        await engine.subscribe(subjects.of_unit("u1", plans.NOTICES), heard)

    async def _use(self, number: int) -> None:
        while True:
            self.ports[number] = await self.clients[number].port()
            await asyncio.sleep(0.05 + 0.05 * SystemRng().random())

    # -- what is looked at ----------------------------------------------------------------------------------------
    def versions(self) -> Counter[int]:
        """Give how many clients hold each version."""
        return Counter(each.scheduling.plan.version for each in self.clients if each.scheduling.plan is not None)

    async def health(self) -> list[dict[str, Any]]:
        answers = await asyncio.gather(*(each.client.get("/healthz") for each in self.centres))
        assert {each.status_code for each in answers} == {200}
        return [each.json() for each in answers]

    async def settle(self, version: int, port: int) -> None:
        """Wait until every centre and every client is at a version."""
        await until(lambda: all(each.book.current().version == version for each in self.centres))
        await until(lambda: self.versions() == {version: len(self.clients)})
        await until(lambda: set(self.ports.values()) == {port})
        assert set(await asyncio.gather(*(each.answer() for each in self.centres))) == {(version, port)}

    async def lose_last(self) -> None:
        """End the last centre."""
        self.centres.pop()
        await self._ends.pop()()

    async def refused(self, counts: dict[str, int]) -> None:
        """Wait until every centre has refused so much, and see that it serves and says so all the same."""
        await until(lambda: all(each.book.rejects == counts for each in self.centres))
        for each in await self.health():
            assert (each["status"], each["stale"], each["rejects"]) == ("ok", True, counts)


@pytest.fixture(name="fleet")
async def _fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Awaitable[Fleet]]]:
    monkeypatch.setattr(limits_platform, "RULES_BYTES_MAX", BYTES_MAX)
    monkeypatch.setattr(limits_platform, "NOTICE_BEAT_S", 0.5)
    monkeypatch.setattr(limits_network, "NOTICE_PAUSE_S", 0.1)
    monkeypatch.setattr(limits_network, "SNIFF_PAUSE_S", 0.2)
    monkeypatch.setattr(limits_network, "PLAN_RETRY_S_MAX", 0.5)
    monkeypatch.setattr(limits, "PLAN_RETRY_S", 0.1)
    async with contextlib.AsyncExitStack() as outer:
        unit = Unit(tmp_path, outer)
        unit.trust_roles = roles_context(unit.ca_pem, ("http/1.1",))
        await unit.start_nats()

        async def start(clients: int = CLIENTS) -> Fleet:
            fleet = Fleet(unit)
            await fleet.start(inner, clients)
            await fleet.settle(1, LIVE)
            return fleet

        async with contextlib.AsyncExitStack() as inner:
            try:
                yield start
                await inner.aclose()
                await outer.aclose()
            finally:
                await unit.server.stop()


# -- what a publisher gone mad writes ---------------------------------------------------------------------------------
def as_json(port: int, **more: Any) -> dict[str, Any]:
    return msgspec.json.decode(rules.encode(rule_set(port))) | more


def bad_rules() -> dict[str, tuple[str, bytes]]:
    """Give rule sets by what is wrong with them, each with the reason that is counted."""
    host = as_json(OTHER)["hosts"][HOST]
    endpoint = host["endpoints"][0]
    twice = msgspec.json.encode(host)
    return {
        "twice the size": ("too-large", b" " * BYTES_MAX + rules.encode(rule_set(OTHER))),
        "duplicate rows": (
            "malformed",
            b'{"version":2,"apps":{"shop":["%s"]},"hosts":{"%s":%s,"%s":%s}}'
            % (HOST.encode(), HOST.encode(), twice, HOST.encode(), twice),
        ),
        "a count over the limit": (
            "invalid",
            msgspec.json.encode(as_json(OTHER, hosts={HOST: {"endpoints": [endpoint] * 101}})),
        ),
        "empty": ("malformed", b""),
        "an empty object": ("malformed", b"{}"),
        "right JSON of a wrong type": ("malformed", msgspec.json.encode(as_json(OTHER, hosts=[host]))),
        "of another format": ("format", msgspec.json.encode(as_json(OTHER, format="stormline-rules/9"))),
        "not JSON": ("malformed", rules.encode(rule_set(OTHER))[:-20]),
    }


class Mad:
    """Writes into the engine past all checks."""

    def __init__(self, source: ledger.Ledger) -> None:
        self.source = source

    async def write(self, content: bytes, *, digest: str = "") -> None:
        found = await self.source.find()
        assert found is not None
        body = await self.source.write(
            ledger.pack(content), version=found.head.version + 1, size=len(content),
            content_digest=digest or ledger.digest(content),
        )  # fmt: skip
        await self.source.commit(lambda head: heads.publish(head, body, Note(who="mad", why="", at=0)))


async def test_rules_that_reached_six_centres_of_ten_serve_beside_the_old_ones_until_all_have_them(fleet):
    here: Fleet = await fleet()
    ahead = here.centres[BEHIND:]
    here.wire.set(cut=True)
    assert (await ahead[0].set(rule_set(OTHER))).status_code == 200
    await until(lambda: all(each.book.current().version == 2 for each in ahead))
    await here.unit.kill_nats()

    def without_engine() -> bool:
        return all(each.book.stale for each in here.centres)

    await until(without_engine, 5 * LATE_S)
    shown = [(each["version"], each["stale"]) for each in await here.health()]
    assert shown == [(1, True)] * BEHIND + [(2, True)] * len(ahead)
    # Whoever has the new rules gets them again, past the centres that are behind; who has the old ones gets either.
    await until(lambda: here.versions()[2] >= CLIENTS // 2)
    await here.lose_last()
    before = [each.scheduling.plan.version for each in here.clients if each.scheduling.plan]
    after = [(await each.scheduling.refresh()).version for each in here.clients]
    assert all(one <= other for one, other in zip(before, after, strict=True))
    assert set(after) == {1, 2}
    assert set(here.ports.values()) == {LIVE, OTHER}
    assert any(each.scheduling.rejects for each in here.clients)
    await here.unit.start_nats()
    here.wire.set(cut=False)
    await until(lambda: not any(each.book.stale for each in here.centres), 10 * LATE_S)
    await here.settle(2, OTHER)
    assert all(each.seen == sorted(each.seen) for each in here.clients)
    assert {reason for each in here.clients for reason in each.scheduling.rejects} <= {"stale-version"}
    assert not any(each.book.rejects for each in here.centres)


async def test_rules_that_may_not_be_served_change_nothing_and_are_counted_by_reason(fleet):
    here: Fleet = await fleet()
    source = await here.unit.ledger()
    mad, counts, first = Mad(source), Counter[str](), await source.find()
    for reason, content in bad_rules().values():
        await mad.write(content)
        counts[reason] += 1
        await here.refused(counts)
    await mad.write(rules.encode(rule_set(OTHER)), digest="0" * 64)  # what a signature is elsewhere
    counts["damaged"] += 1
    await here.refused(counts)
    await source.keys.put(ledger.HEAD_KEY, b'{"format":"stormline-rules-head/1"}')
    counts["record"] += 1
    await here.refused(counts)
    assert here.versions() == {1: CLIENTS}
    assert set(here.ports.values()) == {LIVE}
    status = (await here.centres[0].call("GET", "/status")).json()
    assert (status["version"], status["rejects"]) == (1, counts)
    assert "damaged record" in status["problem"]
    # And back, by an older record of the same lineage: version 1 is what is served.
    assert first is not None
    await source.keys.put(ledger.HEAD_KEY, heads.encode(first.head))
    await until(lambda: not any(each.book.stale for each in here.centres))
    await here.settle(1, LIVE)
    assert all(not each.scheduling.rejects for each in here.clients)


async def test_good_and_bad_rules_in_turn_and_an_old_record_end_with_the_newest_good_ones(fleet):
    here: Fleet = await fleet()
    source = await here.unit.ledger()
    mad, old = Mad(source), await source.find()
    bad = [content for _, content in bad_rules().values()]
    for turn in range(6):
        await mad.write(bad[turn])
        await mad.write(rules.encode(rule_set((OTHER, LIVE)[turn % 2])))
        await asyncio.sleep(0.1 * SystemRng().random())
    await here.settle(13, LIVE)
    assert not any(each.book.stale for each in here.centres)
    assert old is not None
    await source.keys.put(ledger.HEAD_KEY, heads.encode(old.head))

    async def restored() -> bool:
        found = await source.find()
        return found is not None and found.head.version == 13

    await eventually(restored)
    await here.settle(13, LIVE)
    assert sum(each.book.rejects.get("older", 0) for each in here.centres) >= 1
    assert all(each.seen == sorted(each.seen) for each in here.clients), "no client went back"

    async def nothing_left() -> bool:
        """Of ten centres that each wrote the lost rules, those that were second took theirs away again."""
        await source.keys.put("body.sweep.0", b"-")  # the newest key: all before it are seen
        bodies = set()
        async with contextlib.aclosing(source.keys.watch("body")) as changes:
            async for change in changes:
                name = change.key.split(".")[1]
                if name == "sweep":
                    break
                if heads.version_of(name) == 13 and change.value is not None:
                    bodies.add(name)
        return len(bodies) == 2  # the one that was lost, and the one in its place

    await eventually(nothing_left)


async def test_canary_ends_with_a_bad_version_and_everybody_is_back_within_a_minute(fleet):
    here: Fleet = await fleet()
    began = asyncio.get_running_loop().time()
    one = here.centres[5]
    query = {"who": "ann", "steps": "30", "force": "true"}
    answer = await one.call(
        "POST", "/rollout", content=rules.encode(rule_set(DEAD)), params=query, headers={"if-match": "*"}
    )
    assert answer.status_code == 200, answer.text
    chosen = {n for n in range(CLIENTS) if one.book.for_device(f"d{n}").version == 2}
    await until(lambda: all(each.book.head and each.book.head.rollout for each in here.centres))
    await until(lambda: {n for n, port in here.ports.items() if port == DEAD} == chosen)
    assert 0 < len(chosen) < CLIENTS // 2
    told = {"version": 2, "new": {"calls": 300, "successes": 3}, "old": {"calls": 700, "successes": 699}}
    assert (await here.centres[0].call("PUT", "/rollout/outcomes", json=told)).json()["halted"] is True
    await here.settle(3, LIVE)
    assert {n for n, each in enumerate(here.clients) if 2 in each.seen} == chosen
    # A version that went to all of them is taken back as quickly.
    assert (await one.set(rule_set(DEAD))).status_code == 200
    await here.settle(4, DEAD)
    answer = await one.call("POST", "/rules/rollback", json={"who": "ann", "why": "it is bad"})
    assert answer.status_code == 200, answer.text
    await here.settle(5, LIVE)
    assert asyncio.get_running_loop().time() - began < 60.0
