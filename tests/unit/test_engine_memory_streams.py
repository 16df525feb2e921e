"""Streams of the memory engine on virtual time: ages, forgotten ids, workers that fail, vanish or take long."""

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.engine.port import Record, Stream, subjects_overlap
from stormline.testing.simloop import VirtualLoop


def run(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(time_max_s=1e6)) as runner:
        return runner.run(main)


async def opened(broker: MemoryBroker, **properties: Any) -> Stream:
    wanted = {"persistent": True, "max_bytes": 10_000_000, **properties}
    return await MemoryEngine(broker).stream("s", ["s.>"], **wanted)


def test_records_end_by_age_and_by_their_own_life_whichever_is_first():
    async def main() -> list[list[bytes]]:
        stream = await opened(MemoryBroker(), max_age_s=3600.0)
        await stream.append("s.a", b"hour")
        await stream.append("s.a", b"minute", ttl_s=59.5)
        await stream.append("s.a", b"age is first", ttl_s=86400.0)
        seen = []
        for pause_s in (59.9, 0.2, 3539.8, 0.2):
            await asyncio.sleep(pause_s)
            seen.append([record.data for record in await stream.read("s.a", 0, 10)])
        return seen

    everything = [b"hour", b"minute", b"age is first"]
    assert run(main()) == [everything, [b"hour", b"age is first"], [b"hour", b"age is first"], []]


def test_message_id_is_forgotten_after_its_window():
    async def main() -> list[int]:
        stream = await opened(MemoryBroker())
        sequences = [await stream.append("s.a", b"1", message_id="m")]
        await asyncio.sleep(limits.ENGINE_DUPLICATES_S - 1)
        sequences.append(await stream.append("s.a", b"1", message_id="m"))
        await asyncio.sleep(2)
        sequences.append(await stream.append("s.a", b"1", message_id="m"))
        return sequences

    assert run(main()) == [1, 1, 2]


def test_room_comes_back_as_records_end():
    async def main() -> None:
        stream = await opened(MemoryBroker(), max_bytes=1000, max_age_s=60.0)
        await stream.append("s.a", bytes(900))
        with pytest.raises(errors.EngineFull):
            await stream.append("s.a", bytes(900))
        await asyncio.sleep(61)
        await stream.append("s.a", bytes(900))

    run(main())


def test_failing_worker_rests_longer_each_time_up_to_a_minute():
    async def main() -> list[float]:
        stream = await opened(MemoryBroker())
        loop = asyncio.get_running_loop()
        tries: list[float] = []

        async def worker(records: Sequence[Record]) -> None:
            tries.append(loop.time())
            raise RuntimeError("no")

        await stream.append("s.a", b"1")
        consumer = await stream.consume("c", worker)
        await asyncio.sleep(300)
        await consumer.close()
        return [round(later - earlier, 3) for earlier, later in itertools.pairwise(tries)]

    assert run(main())[:8] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_batch_of_a_worker_that_vanished_goes_to_another_after_its_wait():
    async def main() -> list[tuple[str, float]]:
        broker = MemoryBroker()
        first, second = await opened(broker), await opened(broker)
        got: list[tuple[str, float]] = []
        loop = asyncio.get_running_loop()
        begin = loop.time()

        async def other(records: Sequence[Record]) -> None:
            got.append(("second", round(loop.time() - begin)))

        async def vanishes(records: Sequence[Record]) -> None:
            got.append(("first", round(loop.time() - begin)))
            broker.cut()  # from its side
            await asyncio.sleep(0)

        await first.append("s.a", b"1")
        await first.consume("c", vanishes, ack_wait_s=30.0)
        await asyncio.sleep(1)
        broker.heal()
        await second.consume("c", other, ack_wait_s=30.0)
        await asyncio.sleep(100)
        return got[:2]

    [(_, at_first), (_, again)] = run(main())
    assert (at_first, again) == (0, 30)


def test_slow_worker_keeps_its_batch_for_hours():
    async def main() -> int:
        broker = MemoryBroker()
        stream, other = await opened(broker), await opened(broker)
        runs = 0

        async def slow(records: Sequence[Record]) -> None:
            nonlocal runs
            runs += 1
            await asyncio.sleep(3 * 3600)

        await stream.append("s.a", b"1")
        for each in (stream, other):
            await each.consume("c", slow)
        await asyncio.sleep(4 * 3600)
        return runs

    assert run(main()) == 1


def test_unfinished_records_are_bounded_for_all_workers_of_a_name(monkeypatch):
    monkeypatch.setattr(limits, "ENGINE_UNFINISHED_MAX", 3)

    async def main() -> tuple[int, int]:
        stream = await opened(MemoryBroker())
        gate = asyncio.Event()
        got: list[int] = []

        async def held(records: Sequence[Record]) -> None:
            got.extend(record.sequence for record in records)
            await gate.wait()

        for number in range(10):
            await stream.append("s.a", b"%d" % number)
        for _ in range(4):
            await stream.consume("c", held, batch=2)
        await asyncio.sleep(1)
        before = len(got)
        gate.set()
        await asyncio.sleep(1)
        return before, len(set(got))

    assert run(main()) == (3, 10)


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a.*", "*.b", True),
        ("a.>", "a", False),
        ("a.>", "a.b.c", True),
        ("a.b.>", "a.*", False),
        ("a.b.>", "a.*.c", True),
        ("a.*", "a.b.c", False),
    ],
)
def test_patterns_overlap_where_one_subject_matches_both(one, other, overlap):
    assert subjects_overlap(one, other) is overlap
    assert subjects_overlap(other, one) is overlap
