"""The rules of a centre, on an engine in memory: published, followed, kept, restored."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import msgspec
import pytest

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.dispatch import compare, editor, ledger, rules
from stormline.dispatch import head as heads
from stormline.dispatch.book import Book
from stormline.dispatch.editor import Author, Editor
from stormline.dispatch.head import Drained, Note
from stormline.dispatch.health import Target
from stormline.dispatch.ledger import Ledger
from stormline.dispatch.probing import Try
from stormline.dispatch.rollout import Counts
from stormline.dispatch.rules import RuleSet
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.engine.port import Engine, KeyValue
from stormline.net.clock import SystemClock
from stormline.wire.plan import Endpoint, HostPlan

ANN = Author("ann", "ticket 7")


class _Rng(random.Random):
    def token_bytes(self, size: int) -> bytes:
        return self.randbytes(size)


def _host(port: int) -> HostPlan:
    return HostPlan(endpoints=(Endpoint(host="192.0.2.1", port=port),))


def _rules(version: int = 1, port: int = 1, **hosts: int) -> RuleSet:
    table = {"a.example": _host(port), **{f"{name}.example": _host(number) for name, number in hosts.items()}}
    return rules.check(RuleSet(version=version, unit="u1", hosts=table, apps={"shop": frozenset(table)}))


def _data(version: int = 1, port: int = 1, **hosts: int) -> bytes:
    return rules.encode(_rules(version, port, **hosts))


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event of its own
            await asyncio.sleep(0)


class Node:
    """One centre."""

    def __init__(self, book: Book, ill: Try | None) -> None:
        self.book = book
        self.editor = Editor(book, unit="u1", clock=SystemClock(), ill=ill)
        self.told: list[tuple[int | None, int]] = []
        book.on_change(lambda old, new: self.told.append((old.version if old else None, new.version)))

    def port(self, device: str = "") -> int:
        return self.book.for_device(device).hosts["a.example"].endpoints[0].port


class Unit:
    """Centres on one engine."""

    def __init__(self, folder: Path, stack: contextlib.AsyncExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.broker = MemoryBroker()
        self.stack = stack
        self.count = 0

    async def keys(self) -> KeyValue:
        return await MemoryEngine(self.broker).kv(ledger.bucket("u1"), persistent=True)

    async def node(
        self,
        assembled: RuleSet | None = None,
        *,
        name: str = "",
        stack: contextlib.AsyncExitStack | None = None,
        ill: Try | None = None,
    ) -> Node:
        async def connect() -> Engine:
            if not self.broker.up:
                raise errors.EngineUnavailable("engine unavailable")
            return MemoryEngine(self.broker)

        self.count += 1
        book = Book(
            assembled or _rules(),
            unit="u1",
            path=self.folder / f"{name or self.count}.json",
            clock=SystemClock(),
            rng=_Rng(self.count),
            connect=connect,
        )
        node = Node(book, ill)
        self.monkeypatch.setattr(limits, "RULES_FIRST_WAIT_S", 10.0 if self.broker.up else 0.0)
        await (stack or self.stack).enter_async_context(book.following())
        return node

    async def lose_everything(self) -> None:
        """As an engine whose disk was replaced."""
        self.broker.cut()
        self.broker.buckets[ledger.bucket("u1")].forget()
        self.broker.heal()


@pytest.fixture(name="unit")
async def _unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Unit]:
    monkeypatch.setattr(limits, "RULES_RETRY_PAUSE_S", 0.001)
    monkeypatch.setattr(limits, "ENGINE_RECONNECT_PAUSE_MAX_S", 0.01)
    async with contextlib.AsyncExitStack() as stack:
        yield Unit(tmp_path, stack, monkeypatch)


class TestFollowing:
    async def test_first_start_publishes_what_the_settings_say(self, unit: Unit) -> None:
        node = await unit.node(_rules(4, 7))
        assert (node.book.current().version, node.port(), node.book.stale) == (4, 7, False)
        found = await Ledger(await unit.keys(), rng=_Rng(9)).find()
        assert found is not None
        assert found.head.log[0].what == "first"

    async def test_change_reaches_every_node_and_is_told_once(self, unit: Unit) -> None:
        one, two = await unit.node(), await unit.node()
        await one.editor.publish(_data(port=2), ANN, expected=1)
        await _until(lambda: two.port() == 2)
        assert one.port() == 2
        assert one.told == two.told == [(1, 2)]

    async def test_large_rules_go_in_chunks_and_come_whole(self, unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "RULES_CHUNK_BYTES", 100)
        one, two = await unit.node(), await unit.node()
        await one.editor.publish(_data(**{f"h{n}": n + 1 for n in range(400)}), ANN, expected=1)
        await _until(lambda: len(two.book.current().hosts) == 401)
        head = two.book.head
        assert head is not None
        assert head.body(head.current).chunks > 10

    async def test_listener_that_fails_harms_nobody(self, unit: Unit) -> None:
        node = await unit.node()

        def broken(old: RuleSet | None, new: RuleSet) -> None:
            raise ValueError

        end = node.book.on_change(broken)
        await node.editor.publish(_data(port=2), ANN, expected=1)
        assert node.told == [(1, 2)]
        end()
        end()

    async def test_damaged_rules_in_the_engine_leave_the_last_good_ones(self, unit: Unit) -> None:
        node = await unit.node()
        keys = await unit.keys()
        source = Ledger(keys, rng=_Rng(5))
        body = await source.write(b"no zlib", version=2, size=10, content_digest="0" * 64)
        await source.commit(lambda head: heads.publish(head, body, Note(who="x", why="", at=0)))
        await _until(lambda: node.book.stale)
        assert node.port() == 1
        assert "damaged" in node.book.problem
        await node.editor.rollback(1, ANN, expected=None)  # a way out without the engine's own tools
        assert (node.book.stale, node.book.current().version, node.port()) == (False, 3, 1)

    async def test_damaged_record_leaves_the_last_good_rules(self, unit: Unit) -> None:
        node = await unit.node()
        await (await unit.keys()).put(ledger.HEAD_KEY, b"{")
        await _until(lambda: node.book.stale)
        assert node.port() == 1
        with pytest.raises(errors.RequestRefused, match="damaged"):
            await node.editor.publish(_data(port=2), ANN, expected=None)


class TestAway:
    async def test_without_engine_the_copy_serves_and_says_so(self, unit: Unit) -> None:
        async with contextlib.AsyncExitStack() as first:
            node = await unit.node(name="n", stack=first)
            await node.editor.publish(_data(port=2), ANN, expected=1)
            await node.editor.drain(Drained("192.0.2.1", 9), ANN)
        unit.broker.cut()
        node = await unit.node(name="n")
        assert (node.port(), node.book.current().version, node.book.stale) == (2, 2, True)
        assert node.book.drains == (Drained("192.0.2.1", 9),)
        with pytest.raises(errors.RequestRefused, match="cannot be changed") as refused:
            await node.editor.publish(_data(port=3), ANN, expected=None)
        assert refused.value.code == "unavailable"
        unit.broker.heal()
        await _until(lambda: not node.book.stale)
        assert (await node.editor.publish(_data(port=3), ANN, expected=2)).served

    async def test_without_engine_and_copy_the_settings_serve(self, unit: Unit) -> None:
        unit.broker.cut()
        node = await unit.node(_rules(4, 7))
        assert (node.port(), node.book.stale, node.book.head) == (7, True, None)
        unit.broker.heal()
        await _until(lambda: not node.book.stale)
        assert node.book.current().version == 4

    async def test_rollout_is_in_the_copy_too(self, unit: Unit) -> None:
        async with contextlib.AsyncExitStack() as first:
            node = await unit.node(name="n", stack=first)
            await node.editor.publish(_data(port=2), ANN, expected=1, steps=(50.0,))
            expected = {f"d{n}": node.port(f"d{n}") for n in range(40)}
        assert set(expected.values()) == {1, 2}
        unit.broker.cut()
        node = await unit.node(name="n")
        assert {f"d{n}": node.port(f"d{n}") for n in range(40)} == expected

    @pytest.mark.parametrize("damage", [b"", b"{}", b"half"])
    async def test_damaged_copy_is_not_served(self, unit: Unit, damage: bytes) -> None:
        (unit.folder / "n.json").write_bytes(damage)
        unit.broker.cut()
        assert (await unit.node(name="n")).port() == 1

    async def test_altered_copy_is_not_served(self, unit: Unit) -> None:
        async with contextlib.AsyncExitStack() as first:
            node = await unit.node(name="n", stack=first)
            await node.editor.publish(_data(port=2), ANN, expected=1)
        path = unit.folder / "n.json"
        copy = msgspec.json.decode(path.read_bytes())
        altered = msgspec.json.encode(ledger.pack(compare.content(_rules(port=66))))
        copy["bodies"] = {name: msgspec.json.decode(altered) for name in copy["bodies"]}
        path.write_bytes(msgspec.json.encode(copy))
        unit.broker.cut()
        assert (await unit.node(name="n")).port() == 1

    async def test_copy_that_cannot_be_written_costs_a_line_in_the_log(
        self, unit: Unit, caplog: pytest.LogCaptureFixture
    ) -> None:
        node = await unit.node()
        (unit.folder / "1.json").unlink()
        (unit.folder / "1.json").mkdir()
        await node.editor.publish(_data(port=2), ANN, expected=1)
        await _until(lambda: "no copy of the rules kept" in caplog.text)
        assert node.port() == 2

    async def test_engine_that_lost_all_is_given_it_back(self, unit: Unit) -> None:
        one, two = await unit.node(), await unit.node()
        await one.editor.publish(_data(port=2), ANN, expected=1)
        await one.editor.publish(_data(port=3), ANN, expected=2, steps=(50.0,))
        await _until(lambda: two.book.head is not None and two.book.head.rollout is not None)
        await unit.lose_everything()
        await _until(lambda: ledger.HEAD_KEY in unit.broker.buckets[ledger.bucket("u1")].keys)
        third = await unit.node()
        await _until(lambda: not (one.book.stale or two.book.stale))
        assert third.book.current().version == 2
        assert third.book.head is not None
        assert third.book.head.rollout is not None
        await third.editor.step(100.0, ANN)
        await _until(lambda: one.port() == two.port() == 3)

    async def test_engine_that_came_back_older_is_given_the_newest(self, unit: Unit) -> None:
        node = await unit.node()
        keys = await unit.keys()
        old = await keys.get(ledger.HEAD_KEY)
        assert old is not None
        await node.editor.publish(_data(port=2), ANN, expected=1)
        await keys.put(ledger.HEAD_KEY, old.value)
        await _until(lambda: node.book.head is not None and node.book.head.log[0].what == "restore")
        assert node.book.current().version == 2
        found = await Ledger(keys, rng=_Rng(5)).find()
        assert found is not None
        assert (found.head.version, found.head.current) == (2, 2)
        assert (await node.editor.rollback(1, ANN, expected=2)).head.version == 3

    async def test_record_of_another_platform_is_believed(self, unit: Unit) -> None:
        async with contextlib.AsyncExitStack() as first:
            node = await unit.node(name="n", stack=first)
            for port in (2, 3, 4):
                await node.editor.publish(_data(port=port), ANN, expected=None)
        unit.broker = MemoryBroker()
        await unit.node(_rules(1, 8))
        node = await unit.node(_rules(1, 8), name="n")
        assert (node.port(), node.book.current().version) == (8, 1)


class TestSettings:
    async def test_changed_settings_reach_rules_nobody_touched(self, unit: Unit) -> None:
        async with contextlib.AsyncExitStack() as first:
            await unit.node(_rules(1, 1), stack=first)
        node = await unit.node(_rules(2, 9, new=4))
        assert (node.book.current().version, node.port()) == (2, 9)
        assert node.book.head is not None
        assert node.book.head.log[0].what == "settings"

    async def test_changed_settings_leave_an_operators_entry(self, unit: Unit) -> None:
        async with contextlib.AsyncExitStack() as first:
            node = await unit.node(_rules(1, 1), stack=first)
            await node.editor.publish(_data(port=5), ANN, expected=1)
        node = await unit.node(_rules(2, 9, new=4))
        assert node.port() == 5
        assert "new.example" in node.book.current().hosts

    async def test_settings_that_change_nothing_new_are_remembered(self, unit: Unit) -> None:
        async with contextlib.AsyncExitStack() as first:
            node = await unit.node(_rules(1, 1), stack=first)
            await node.editor.publish(_data(port=5), ANN, expected=1)
        for _ in range(2):
            async with contextlib.AsyncExitStack() as again:
                node = await unit.node(_rules(2, 9), stack=again)
                assert (node.port(), node.book.current().version) == (5, 2)

    async def test_nodes_with_the_same_new_settings_make_one_version(self, unit: Unit) -> None:
        async with contextlib.AsyncExitStack() as first:
            await unit.node(stack=first)
        nodes = await asyncio.gather(*(unit.node(_rules(2, 9)) for _ in range(3)))
        await _until(lambda: all(node.port() == 9 for node in nodes))
        assert {node.book.current().version for node in nodes} == {2}


class TestRollout:
    async def test_rollout_reaches_its_share_then_all(self, unit: Unit) -> None:
        one, two = await unit.node(), await unit.node()
        devices = [f"d{n}" for n in range(300)]
        await one.editor.publish(_data(port=2), ANN, expected=1, steps=(10.0, 50.0))
        await _until(lambda: two.book.head == one.book.head)
        first = {device for device in devices if two.port(device) == 2}
        assert 10 <= len(first) <= 60
        assert first == {device for device in devices if one.port(device) == 2}
        assert two.port() == 1
        await two.editor.step(None, ANN)
        assert first < {device for device in devices if two.port(device) == 2}
        await two.editor.step(None, ANN)
        await _until(lambda: one.port() == 2)
        assert one.told == [(1, 2), (1, 2), (1, 2)]
        assert one.book.current().version == 2

    async def test_rollout_with_worse_outcomes_goes_back_under_a_higher_version(self, unit: Unit) -> None:
        node = await unit.node()
        await node.editor.publish(_data(port=2), ANN, expected=1, steps=(50.0,))
        head, judgement = await node.editor.outcomes(2, Counts(500, 499), Counts(500, 499))
        assert not judgement.worse
        head, judgement = await node.editor.outcomes(2, Counts(900, 700), Counts(900, 899))
        assert judgement.worse
        assert (head.current, head.rollout) == (3, None)
        assert {node.port(f"d{n}") for n in range(50)} == {1}
        assert node.told == [(1, 2), (1, 3), (2, 3)]
        assert head.log[0].what == "rollout-halt"
        assert "77.78 % of 900" in head.log[0].why

    async def test_outcomes_of_another_rollout_are_refused(self, unit: Unit) -> None:
        node = await unit.node()
        await node.editor.publish(_data(port=2), ANN, expected=1, steps=(50.0,))
        for version, counts in ((7, Counts(1, 1)), (2, Counts(1, 2))):
            with pytest.raises(errors.RequestRefused):
                await node.editor.outcomes(version, counts, Counts(1, 1))

    async def test_nothing_is_published_while_a_rollout_is_open(self, unit: Unit) -> None:
        node = await unit.node()
        await node.editor.publish(_data(port=2), ANN, expected=1, steps=(50.0,))
        for call in (
            node.editor.publish(_data(port=3), ANN, expected=2),
            node.editor.publish(_data(port=3), ANN, expected=2, steps=(1.0,)),
            node.editor.rollback(None, ANN, expected=None),
        ):
            with pytest.raises(errors.RequestRefused) as refused:
                await call
            assert refused.value.code == "rollout-open"


class TestEditing:
    async def test_late_writer_cannot_overwrite(self, unit: Unit) -> None:
        one, two = await unit.node(), await unit.node()
        await one.editor.publish(_data(port=2), ANN, expected=1)
        with pytest.raises(errors.RequestRefused) as refused:
            await two.editor.publish(_data(port=3), ANN, expected=1)
        assert refused.value.code == "changed"
        await _until(lambda: two.port() == 2)

    async def test_writers_at_once_each_get_a_version_of_their_own(self, unit: Unit) -> None:
        nodes = [await unit.node() for _ in range(3)]
        await asyncio.gather(
            *(node.editor.publish(_data(port=n + 2), ANN, expected=None) for n, node in enumerate(nodes))
        )
        await _until(lambda: all(node.book.current().version == 4 for node in nodes))
        assert len({node.port() for node in nodes}) == 1

    async def test_writers_at_once_from_one_version_only_one_wins(self, unit: Unit) -> None:
        nodes = [await unit.node() for _ in range(4)]
        done = await asyncio.gather(
            *(node.editor.publish(_data(port=n + 2), ANN, expected=1) for n, node in enumerate(nodes)),
            return_exceptions=True,
        )
        assert sum(isinstance(each, editor.Changed) for each in done) == 1
        assert {each.code for each in done if isinstance(each, errors.RequestRefused)} == {"changed"}

    async def test_dry_run_says_what_would_change_and_writes_nothing(self, unit: Unit) -> None:
        node = await unit.node()
        changed = await node.editor.publish(_data(port=2), ANN, expected=1, dry_run=True)
        assert changed.differences.count == 1
        assert (node.port(), changed.head.version) == (1, 1)

    async def test_rollback_gives_old_content_under_a_higher_version(self, unit: Unit) -> None:
        node = await unit.node()
        for port in (2, 3):
            await node.editor.publish(_data(port=port), ANN, expected=None)
        assert (await node.editor.rollback(None, ANN, expected=3, dry_run=True)).differences.count == 1
        await node.editor.rollback(None, ANN, expected=3)
        assert (node.port(), node.book.current().version) == (2, 4)
        await node.editor.rollback(1, ANN, expected=None)
        assert (node.port(), node.book.current().version) == (1, 5)

    async def test_rollback_does_not_go_back_to_a_rollout_that_was_halted(self, unit: Unit) -> None:
        node = await unit.node()
        await node.editor.publish(_data(port=2), ANN, expected=1)
        await node.editor.publish(_data(port=3), ANN, expected=2, steps=(5.0,))
        await node.editor.halt(ANN)
        await node.editor.rollback(None, ANN, expected=4)
        assert (node.port(), node.book.current().version) == (1, 5)

    async def test_rollback_without_an_earlier_version_is_refused(self, unit: Unit) -> None:
        node = await unit.node()
        with pytest.raises(errors.RequestRefused, match="no earlier version"):
            await node.editor.rollback(None, ANN, expected=None)

    async def test_log_says_who_when_what_and_why(self, unit: Unit) -> None:
        node = await unit.node()
        before = SystemClock().wall()
        await node.editor.publish(_data(port=2), ANN, expected=1)
        line = node.editor.head().log[0]
        assert (line.who, line.what, line.why, line.version) == ("ann", "set", "ticket 7", 2)
        assert int(before) <= line.at <= SystemClock().wall()

    @pytest.mark.parametrize(
        ("data", "code"),
        [
            (b"{", "rules-invalid"),
            (b"[]", "rules-invalid"),
            (rules.encode(RuleSet(version=1)).replace(b"stormline-rules/1", b"x"), "unchanged"),
            (b'{"version": 1, "apps": {"shop": ["nowhere.example"]}}', "rules-invalid"),
            (b'{"version": 1, "unit": "u9"}', "rules-invalid"),
            (b'{"version": 1, "surprise": 1}', "rules-invalid"),
            (b" " * (limits.RULES_BYTES_MAX + 1), "too-large"),
            (_data(), "unchanged"),
        ],
        ids=["half", "list", "same", "reference", "unit", "unknown", "large", "equal"],
    )
    async def test_bad_rules_are_not_published(self, unit: Unit, data: bytes, code: str) -> None:
        node = await unit.node(RuleSet(version=1, unit="u1") if data.startswith(b'{\n  "version": 1\n}') else None)
        with pytest.raises(errors.RequestRefused) as refused:
            await node.editor.publish(data, ANN, expected=1)
        assert refused.value.code == code
        assert node.book.current().version == 1

    async def test_rules_that_grow_too_large_as_they_are_kept_are_not_published(
        self, unit: Unit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node = await unit.node()
        data = msgspec.json.format(_data(b=1, c=2), indent=-1)
        monkeypatch.setattr(limits, "RULES_BYTES_MAX", len(data))
        with pytest.raises(errors.RequestRefused, match="as it is kept") as refused:
            await node.editor.publish(data, ANN, expected=1)
        assert refused.value.code == "too-large"

    async def test_rules_without_any_app_are_refused_unless_forced(self, unit: Unit) -> None:
        node = await unit.node()
        nothing = rules.encode(RuleSet(version=2))
        with pytest.raises(errors.RequestRefused, match="every app") as refused:
            await node.editor.publish(nothing, ANN, expected=1)
        assert refused.value.code == "no-live-endpoint"
        assert (await node.editor.publish(nothing, ANN, expected=1, force=True)).served

    async def test_host_without_a_live_endpoint_is_refused_unless_forced(self, unit: Unit) -> None:
        async def all_but_port_1(names: Mapping[Target, str]) -> dict[Target, str]:
            return {target: f"no {name}" for target, name in names.items() if target.port != 1}

        node = await unit.node(ill=all_but_port_1)
        with pytest.raises(
            errors.RequestRefused, match=r"no endpoint answers for b\.example \(no b\.example\)"
        ) as refused:
            await node.editor.publish(_data(b=2), ANN, expected=1)
        assert refused.value.code == "no-live-endpoint"
        tried = await node.editor.publish(_data(b=2), ANN, expected=1, dry_run=True)
        assert tried.dead == ("b.example",)
        forced = await node.editor.publish(_data(b=2), ANN, expected=1, force=True)
        assert forced.dead == ("b.example",)
        # What was dead before is nobody's fault now: another host can still be changed.
        await node.editor.publish(_data(b=2, c=1), ANN, expected=2)

    async def test_endpoint_that_is_drained_is_none_that_serves(self, unit: Unit) -> None:
        node = await unit.node()
        await node.editor.drain(Drained("192.0.2.1", 5), ANN)
        with pytest.raises(errors.RequestRefused, match=r"no endpoint answers for b\.example \(drained\)"):
            await node.editor.publish(_data(b=5), ANN, expected=1)

    async def test_drains_are_told_to_every_node(self, unit: Unit) -> None:
        one, two = await unit.node(), await unit.node()
        told: list[tuple[Drained, ...]] = []
        two.book.on_drains(told.append)
        await one.editor.drain(Drained("192.0.2.1", 5), ANN)
        await one.editor.drain(Drained("192.0.2.1", 5), ANN, end=True)
        await _until(lambda: len(told) >= 2 and told[-1] == ())
        assert told[0] == ()
        assert one.told == two.told == []


class TestChunks:
    async def _bodies(self, unit: Unit) -> set[str]:
        bucket = unit.broker.buckets[ledger.bucket("u1")]
        return {key.split(".")[1] for key in bucket.keys if key.startswith("body.")} - {"sweep"}

    async def test_bodies_nobody_needs_are_removed(self, unit: Unit) -> None:
        node = await unit.node()
        for port in range(2, limits.RULES_VERSIONS_MAX + 8):
            await node.editor.publish(_data(port=port), ANN, expected=None)
        head = node.editor.head()
        assert await self._bodies(unit) == set(head.bodies())
        assert len(head.versions) == limits.RULES_VERSIONS_MAX

    async def test_refused_writer_leaves_no_chunks(self, unit: Unit) -> None:
        nodes = [await unit.node() for _ in range(4)]
        await asyncio.gather(
            *(node.editor.publish(_data(port=n + 2), ANN, expected=1) for n, node in enumerate(nodes)),
            return_exceptions=True,
        )
        head = nodes[0].editor.head()
        await _until(lambda: nodes[0].editor.head().version == 2)
        head = nodes[0].editor.head()
        assert await self._bodies(unit) == set(head.bodies())

    async def test_chunks_of_a_dead_writer_are_swept_and_those_of_a_living_one_stay(self, unit: Unit) -> None:
        async with contextlib.AsyncExitStack() as first:
            node = await unit.node(stack=first)
            source = Ledger(await unit.keys(), rng=_Rng(77))
            packed = ledger.pack(b"x")
            dead = await source.write(packed, version=2, size=1, content_digest="d")
            await node.editor.publish(_data(port=2), ANN, expected=None)
            living = await source.write(packed, version=3, size=1, content_digest="d")
            await source.sweep()
        bodies = await self._bodies(unit)
        assert dead.id not in bodies
        assert living.id in bodies

    async def test_unpack_refuses_what_is_cut_altered_or_grows(self) -> None:
        content = compare.content(_rules())
        packed = ledger.pack(content)
        body = heads.Body("1-x", 1, len(content), ledger.digest(content))
        assert ledger.unpack(packed, body) == content
        bomb = ledger.pack(b"0" * 10_000_000)
        for bad in (packed[:-9], packed[:10] + b"\0" + packed[11:], b"", bomb):
            with pytest.raises(errors.ConfigError):
                ledger.unpack(bad, body)
