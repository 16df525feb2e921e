"""One suite for the streams of every version of the engine: what holds here is the port's contract."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

import pytest

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.engine.nats import connect
from stormline.engine.port import Engine, Record, Stream, Worker
from stormline.net.clock import SystemRng

pytestmark = pytest.mark.loopback

WAIT_S = 20.0


async def opened(engine: Engine, **properties: object) -> Stream:
    wanted: dict[str, object] = {"persistent": True, "max_bytes": 1024 * 1024, **properties}
    return await engine.stream("s", ["s.>"], **wanted)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the other side may be another process
            await asyncio.sleep(0.01)


async def read_from(stream: Stream, subject: str, after: int, wanted: int) -> list[Record]:
    """Read until `wanted` records came: a copy in a cluster may lag."""
    found: list[Record] = []
    async with asyncio.timeout(WAIT_S):
        while len(found) < wanted:
            found += await stream.read(subject, found[-1].sequence if found else after, 100)
    return found


def data(records: Sequence[Record]) -> list[bytes]:
    return [record.data for record in records]


class TestAppendAndRead:
    clustered = True

    async def test_records_are_read_by_subject_and_cursor_in_order(self, platform):
        mine, theirs = await opened(await platform.engine()), await opened(await platform.engine())
        sequences = [await mine.append(f"s.{name}", name.encode() + b"%d" % turn) for turn in range(3) for name in "ab"]
        assert sequences == sorted(set(sequences))
        records = await read_from(theirs, "s.a", 0, 3)
        assert [(record.subject, record.data) for record in records] == [("s.a", b"a0"), ("s.a", b"a1"), ("s.a", b"a2")]
        assert [record.sequence for record in records] == sequences[::2]
        assert data(await theirs.read("s.a", records[0].sequence, 10)) == [b"a1", b"a2"]
        assert data(await theirs.read("s.a", records[0].sequence, 1)) == [b"a1"]
        assert await theirs.read("s.a", records[-1].sequence, 10) == []
        assert await theirs.read("s.a", 10**9, 10) == []
        assert await theirs.read("s.nobody", 0, 10) == []
        assert data(await read_from(theirs, "s.*", sequences[1], 4)) == [b"a1", b"b1", b"a2", b"b2"]

    async def test_read_ends_by_bytes_with_at_least_one_record(self, platform, monkeypatch):
        monkeypatch.setattr(limits, "ENGINE_READ_BYTES_MAX", 10_000)
        stream = await opened(await platform.engine())
        for number in range(10):
            await stream.append("s.a", bytes([number]) * 6000)
        await read_from(stream, "s.a", 0, 10)
        first = await stream.read("s.a", 0, 10)
        assert 1 <= len(first) < 10
        found = await read_from(stream, "s.a", 0, 10)
        assert [record.data[0] for record in found] == list(range(10))

    async def test_last_gives_the_newest_of_each_subject_that_has_one(self, platform, monkeypatch):
        monkeypatch.setattr(limits, "ENGINE_READ_BYTES_MAX", 10_000)
        stream = await opened(await platform.engine())
        for turn in range(2):
            for number in range(5):
                await stream.append(f"s.{number}", bytes([turn, number]) * 3000)
        await read_from(stream, "s.>", 0, 10)
        async with asyncio.timeout(WAIT_S):  # another copy may lag
            while len(found := await stream.last([f"s.{number}" for number in (4, 0, 9, 2, 2)])) < 3:
                pass
        assert [(record.subject, record.data[:2]) for record in found] == [
            ("s.0", b"\x01\x00"),
            ("s.2", b"\x01\x02"),
            ("s.4", b"\x01\x04"),
        ]
        assert await stream.last([]) == []
        assert await stream.last(["s.9"]) == []

    async def test_repeated_message_id_is_taken_once_and_gives_the_first_sequence(self, platform):
        stream = await opened(await platform.engine())
        first = await stream.append("s.a", b"1", message_id="m-1")
        other = await stream.append("s.a", b"2", message_id="m-2")
        assert await stream.append("s.a", b"1", message_id="m-1") == first
        assert await stream.append("s.b", b"elsewhere", message_id="m-2") == other
        assert data(await read_from(stream, "s.>", 0, 2)) == [b"1", b"2"]

    async def test_expected_last_sequence_is_compared_for_the_subject_alone(self, platform):
        stream = await opened(await platform.engine())
        first = await stream.append("s.a", b"1", expect_last=0)
        await stream.append("s.b", b"other", expect_last=0)
        with pytest.raises(errors.Conflict) as caught:
            await stream.append("s.a", b"x", expect_last=0)
        assert caught.value.maybe_delivered is False
        second = await stream.append("s.a", b"2", expect_last=first)
        with pytest.raises(errors.Conflict):
            await stream.append("s.a", b"x", expect_last=first)
        assert second > first
        assert data(await read_from(stream, "s.a", 0, 2)) == [b"1", b"2"]

    async def test_expected_last_sequence_of_many_at_once_lets_one_through(self, platform):
        stream = await opened(await platform.engine())
        outcomes = await asyncio.gather(
            *(stream.append("s.a", b"%d" % number, expect_last=0) for number in range(8)), return_exceptions=True
        )
        assert sum(isinstance(outcome, int) for outcome in outcomes) == 1
        assert sum(isinstance(outcome, errors.Conflict) for outcome in outcomes) == 7
        assert len(await read_from(stream, "s.a", 0, 1)) == 1

    async def test_subject_keeps_its_newest_records(self, platform):
        stream = await opened(await platform.engine(), max_per_subject=3)
        sequences = [await stream.append("s.a", b"%d" % number) for number in range(5)]
        await stream.append("s.b", b"other")
        found = await read_from(stream, "s.>", sequences[3], 2)
        assert data(found) == [b"4", b"other"]
        async with asyncio.timeout(WAIT_S):
            while data(await stream.read("s.a", 0, 10)) != [b"2", b"3", b"4"]:
                pass

    async def test_full_stream_refuses_the_new_and_keeps_the_old(self, platform):
        stream = await opened(await platform.engine(), max_bytes=100_000)
        taken = [await stream.append("s.a", bytes([number]) * 30_000) for number in range(3)]
        with pytest.raises(errors.EngineFull, match="stream s") as caught:
            await stream.append("s.b", bytes(30_000))
        assert caught.value.maybe_delivered is False
        assert [record.sequence for record in await read_from(stream, "s.>", 0, 3)] == taken
        assert await stream.append("s.b", b"small") > taken[-1]

    async def test_records_end_by_their_own_life_and_by_the_age_of_the_stream(self, platform):
        stream = await opened(await platform.engine(), max_age_s=3.0)
        await stream.append("s.a", b"short", ttl_s=1.0)
        await stream.append("s.a", b"long")
        await read_from(stream, "s.a", 1, 1)
        async with asyncio.timeout(WAIT_S):
            while data(await stream.read("s.a", 0, 10)) != [b"long"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            while await stream.read("s.a", 0, 10):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        async with asyncio.timeout(WAIT_S):
            while True:  # each copy in a cluster lets it end by itself
                try:
                    assert await stream.append("s.a", b"next", expect_last=0) == 3
                    break
                except errors.Conflict:
                    await asyncio.sleep(0.05)

    async def test_large_record_passes_and_larger_is_refused(self, platform):
        stream = await opened(await platform.engine(), max_bytes=64 * 1024 * 1024)
        await stream.append("s.a", bytes(limits.ENGINE_MESSAGE_BYTES_MAX - 1024))
        assert len((await read_from(stream, "s.a", 0, 1))[0].data) == limits.ENGINE_MESSAGE_BYTES_MAX - 1024
        with pytest.raises(errors.ConfigError):
            await stream.append("s.a", bytes(limits.ENGINE_MESSAGE_BYTES_MAX + 1))


class TestRefusals:
    async def test_stream_with_other_properties_or_anothers_subject_is_refused(self, platform):
        engine = await platform.engine()
        await opened(engine)
        await opened(engine)
        for other in ({"persistent": False}, {"max_bytes": 5000}, {"max_age_s": 60.0}, {"max_per_subject": 2}):
            with pytest.raises(errors.ConfigError):
                await opened(engine, **other)
        for subject in ("s.a", "s.>", "s.*.b"):
            with pytest.raises(errors.ConfigError):
                await engine.stream("t", [subject], persistent=True, max_bytes=1000)
        await engine.stream("t", ["s", "t.>"], persistent=True, max_bytes=1000)

    async def test_malformed_arguments_are_refused(self, platform):
        engine = await platform.engine()
        stream = await opened(engine)

        async def nothing(records: Sequence[Record]) -> None:
            pass

        for attempt in (
            engine.stream("a.b", ["x"], persistent=True, max_bytes=1),
            engine.stream("KV_x", ["x"], persistent=True, max_bytes=1),
            engine.stream("x", [], persistent=True, max_bytes=1),
            engine.stream("x", ["a..b"], persistent=True, max_bytes=1),
            engine.stream("x", [">"], persistent=True, max_bytes=1),
            engine.stream("x", ["*.b"], persistent=True, max_bytes=1),
            engine.stream("x", ["x"], persistent=True, max_bytes=0),
            engine.stream("x", ["x"], persistent=True, max_bytes=1, max_per_subject=0),
            engine.stream("x", ["x"], persistent=True, max_bytes=1, max_age_s=0.5),
            stream.append("t.a", b""),
            stream.append("s.>", b""),
            stream.append("s.a", b"", message_id="two words"),
            stream.append("s.a", b"", message_id="x" * 129),
            stream.append("s.a", b"", message_id="m", expect_last=0),
            stream.append("s.a", b"", expect_last=-1),
            stream.append("s.a", b"", ttl_s=0.5),
            stream.append("s.a", b"", ttl_s=float("nan")),
            stream.read("s..a", 0, 1),
            stream.read("s.a", -1, 1),
            stream.read("s.a", 0, 0),
            stream.read("s.a", 0, 100_000),
            stream.last(["s.*"]),
            stream.last(["s.a"] * 501),
            stream.consume("a.b", nothing),
            stream.consume("c", nothing, subject="a..b"),
            stream.consume("c", nothing, batch=0),
            stream.consume("c", nothing, ack_wait_s=0.1),
        ):
            with pytest.raises(errors.ConfigError):
                await attempt
        assert await stream.read("s.>", 0, 1) == []


def collecting(into: list[bytes]) -> Worker:
    async def worker(records: Sequence[Record]) -> None:
        into.extend(data(records))

    return worker


class TestConsume:
    clustered = True

    async def test_worker_gets_records_from_before_and_after_in_order_of_one_subject(self, platform):
        stream = await opened(await platform.engine())
        for number in range(5):
            await stream.append("s.a", b"%d" % number)
            await stream.append("s.b", b"other")
        got: list[bytes] = []
        await stream.consume("c", collecting(got), subject="s.a", batch=3)
        await until(lambda: len(got) == 5)
        for number in range(5, 8):
            await stream.append("s.a", b"%d" % number)
        await until(lambda: len(got) == 8)
        assert got == [b"%d" % number for number in range(8)]

    async def test_workers_of_one_name_share_and_of_another_get_all(self, platform):
        engines = [await platform.engine() for _ in range(3)]
        streams = [await opened(engine) for engine in engines]
        shared: list[bytes] = []
        own: list[bytes] = []
        await streams[0].consume("shared", collecting(shared))
        await streams[1].consume("shared", collecting(shared))
        await streams[2].consume("own", collecting(own), batch=7)
        sent = [b"%d" % number for number in range(40)]
        for each in sent:
            await streams[0].append("s.a", each)
        await until(lambda: len(shared) >= 40 and len(own) >= 40)
        assert sorted(shared) == sorted(sent)
        assert own == sent

    async def test_place_is_kept_while_nobody_consumes(self, platform):
        engine = await platform.engine()
        stream = await opened(engine)
        got: list[bytes] = []
        for number in range(3):
            await stream.append("s.a", b"%d" % number)
        consumer = await stream.consume("c", collecting(got), batch=10)
        await until(lambda: len(got) == 3)
        await consumer.close()
        await consumer.close()
        await stream.append("s.a", b"3")
        await asyncio.sleep(0.05)
        assert len(got) == 3
        await (await opened(await platform.engine())).consume("c", collecting(got))
        await until(lambda: len(got) == 4)
        assert got == [b"0", b"1", b"2", b"3"]

    async def test_batch_whose_worker_failed_comes_again_after_a_pause(self, platform, monkeypatch, caplog):
        monkeypatch.setattr(limits, "ENGINE_RETRY_PAUSE_S", 0.1)
        stream = await opened(await platform.engine())
        got: list[bytes] = []
        failures = 0

        async def worker(records: Sequence[Record]) -> None:
            nonlocal failures
            if records[0].data == b"bad" and failures < 2:
                failures += 1
                raise RuntimeError("not yet")
            got.extend(data(records))

        await stream.append("s.a", b"bad")
        await stream.append("s.a", b"good")
        await stream.consume("c", worker)
        await until(lambda: len(got) == 2)
        assert got == [b"good", b"bad"]
        assert failures == 2
        assert "worker c of s failed" in caplog.text

    async def test_slow_worker_keeps_its_batch_beyond_the_wait(self, platform):
        stream = await opened(await platform.engine())
        got: list[bytes] = []

        async def slow(records: Sequence[Record]) -> None:
            await asyncio.sleep(1.6)
            got.extend(data(records))

        await stream.append("s.a", b"1")
        await stream.consume("c", slow, ack_wait_s=1.0)
        await (await opened(await platform.engine())).consume("c", slow, ack_wait_s=1.0)
        await until(lambda: len(got) >= 1)
        await asyncio.sleep(1.0)
        assert got == [b"1"]

    async def test_closing_engine_gives_back_what_its_worker_did_not_finish(self, platform):
        engine = await platform.engine()
        entered = asyncio.Event()

        async def never(records: Sequence[Record]) -> None:
            entered.set()
            await asyncio.Event().wait()

        stream = await opened(engine)
        await stream.append("s.a", b"1")
        await stream.consume("c", never)
        async with asyncio.timeout(WAIT_S):
            await entered.wait()
        await engine.close()
        got: list[bytes] = []
        await (await opened(await platform.engine())).consume("c", collecting(got))
        await until(lambda: got == [b"1"])  # at once, long before `ENGINE_ACK_WAIT_S`

    async def test_closed_engine_refuses(self, platform):
        engine = await platform.engine()
        stream = await opened(engine)
        await engine.close()
        for attempt in (
            stream.append("s.a", b""),
            stream.read("s.a", 0, 1),
            stream.last(["s.a"]),
            stream.consume("c", collecting([])),
            opened(engine),
        ):
            with pytest.raises(errors.EngineUnavailable):
                await attempt


class TestLoss:
    async def test_persistent_records_and_places_survive_and_ids_are_still_known(self, platform):
        engine = await platform.engine()
        stream = await opened(engine)
        got: list[bytes] = []
        sequence = await stream.append("s.a", b"1", message_id="m-1")
        await stream.consume("c", collecting(got))
        await until(lambda: got == [b"1"])
        await asyncio.sleep(0.05)  # so that its end is known
        await platform.cut()
        for attempt in (stream.append("s.a", b"x"), stream.read("s.a", 0, 1), stream.last(["s.a"])):
            with pytest.raises(errors.EngineUnavailable) as caught:
                await attempt
            assert caught.value.maybe_delivered is False
        await platform.heal()
        assert await stream.append("s.a", b"again", message_id="m-1") == sequence
        assert data(await stream.read("s.a", 0, 10)) == [b"1"]
        assert await stream.append("s.a", b"2") > sequence
        await until(lambda: got == [b"1", b"2"])

    async def test_stream_in_memory_is_empty_and_works_again(self, platform):
        stream = await opened(await platform.engine(), persistent=False)
        got: list[bytes] = []
        await stream.append("s.a", b"1", message_id="m-1")
        await stream.consume("c", collecting(got))
        await until(lambda: got == [b"1"])
        await platform.cut()
        await platform.heal()
        assert await stream.read("s.a", 0, 10) == []
        await stream.append("s.a", b"2", message_id="m-1")
        await until(lambda: got == [b"1", b"2"])

    async def test_work_under_way_when_the_engine_is_lost_is_done_again(self, platform):
        stream = await opened(await platform.engine())
        entered, gate = asyncio.Event(), asyncio.Event()
        got: list[bytes] = []

        async def worker(records: Sequence[Record]) -> None:
            got.extend(data(records))
            entered.set()
            await gate.wait()

        await stream.append("s.a", b"1")
        await stream.consume("c", worker, ack_wait_s=1.0)
        async with asyncio.timeout(WAIT_S):
            await entered.wait()
        await platform.cut()
        gate.set()
        await asyncio.sleep(0)
        await platform.heal()
        await until(lambda: got == [b"1", b"1"])


async def outcome(attempt: Awaitable[object]) -> object:
    """Give what came of it: the result, or the error's kind."""
    try:
        return await attempt
    except errors.StormlineError as error:
        return type(error)


async def test_memory_and_nats_agree_on_any_sequence_of_operations(server):
    nats = await connect(server.core, rng=SystemRng())
    memory = MemoryEngine(MemoryBroker())
    properties = {"persistent": True, "max_bytes": 1024 * 1024, "max_per_subject": 5}
    streams = [await opened(engine, **properties) for engine in (nats, memory)]
    subjects = ["s.a", "s.a.x", "s.b"]
    patterns = [*subjects, "s.>", "s.*", "s.a.>"]
    chance = Random(random.getrandbits(64))
    for number in range(500):
        if chance.random() < 0.6:
            subject = chance.choice(subjects)
            kind = chance.choice(["id", "expect", "plain"])
            options: dict[str, Any] = {}
            if kind == "id":
                options["message_id"] = f"m-{chance.randrange(80)}"
            elif kind == "expect":
                newest = await streams[1].last([subject])
                known = [newest[0].sequence if newest else 0, 0, chance.randrange(number + 1)]
                options["expect_last"] = chance.choice(known)
            data = b"%d" % number + bytes(chance.choice([10, 3000]))
            results = [await outcome(stream.append(subject, data, **options)) for stream in streams]
        elif chance.random() < 0.7:
            question = (chance.choice(patterns), chance.randrange(number + 1), chance.choice([1, 3, 1000]))
            results = [await outcome(stream.read(*question)) for stream in streams]
        else:
            asked = chance.sample([*subjects, "s.nobody"], chance.randrange(5))
            results = [await outcome(stream.last(asked)) for stream in streams]
        assert results[0] == results[1]
    assert await streams[0].read("s.>", 0, 1000) == await streams[1].read("s.>", 0, 1000)
    await nats.close()
    await memory.close()
