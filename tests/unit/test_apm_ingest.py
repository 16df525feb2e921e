import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from stormline.apm.ingest import Ingest
from stormline.apm.rows import Origin, Row
from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.telemetry.diagnosis import Diagnosis
from stormline.telemetry.report import Report, Salvaged
from stormline.telemetry.timeline import CallRecord

ORIGIN = Origin("demo", "device-1")
WALL_S = 1_800_000_000.0


class _Clock:
    def monotonic(self) -> float:
        return 0.0

    def wall(self) -> float:
        return WALL_S


class _Table:
    """Where rows go in these tests; `gate` holds inserts back, `fail` makes the next ones fail."""

    def __init__(self) -> None:
        self.inserts: list[list[Row]] = []
        self.diagnoses: list[Row] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.fail = 0

    async def insert(self, rows: Sequence[Row]) -> None:
        await self.gate.wait()
        if self.fail:
            self.fail -= 1
            raise errors.StoreError("no")
        self.inserts.append(list(rows))

    async def insert_diagnoses(self, rows: Sequence[Row]) -> None:
        self.diagnoses += rows

    @property
    def ids(self) -> list[str]:
        return [row["call_id"] for rows in self.inserts for row in rows]


def _batch(*ids: str, malformed: int = 0, **fields: Any) -> Salvaged:
    calls = [
        CallRecord(call_id=call_id, started_at_ms=int(WALL_S * 1000), method="GET", host="h", path="/", **fields)
        for call_id in ids
    ]
    return Salvaged(Report(calls=calls), malformed)


@contextlib.asynccontextmanager
async def _running(table: _Table) -> AsyncIterator[Ingest]:
    ingest = Ingest(table.insert, table.insert_diagnoses, _Clock())
    task = asyncio.create_task(ingest.run())
    yield ingest
    table.gate.set()
    ingest.close()
    await task


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_submit_returns_only_after_the_insert() -> None:
    table = _Table()
    table.gate.clear()
    async with _running(table) as ingest:
        answer = asyncio.create_task(ingest.submit(ORIGIN, _batch("a")))
        await _settle()
        assert not answer.done()
        table.gate.set()
        assert await answer == (1, 0)
    assert table.ids == ["a"]


async def test_submits_during_an_insert_share_the_next() -> None:
    table = _Table()
    table.gate.clear()
    async with _running(table) as ingest:
        first = asyncio.create_task(ingest.submit(ORIGIN, _batch("a")))
        await _settle()
        others = [asyncio.create_task(ingest.submit(ORIGIN, _batch(f"b{n}"))) for n in range(10)]
        await _settle()
        table.gate.set()
        await asyncio.gather(first, *others)
        assert [len(rows) for rows in table.inserts] == [1, 10]
        assert (ingest.stats.commits, ingest.stats.stored, ingest.stats.queued) == (2, 11, 0)


async def test_commit_never_takes_more_rows_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INGEST_COMMIT_ROWS_MAX", 5)
    table = _Table()
    table.gate.clear()
    async with _running(table) as ingest:
        answers = [asyncio.create_task(ingest.submit(ORIGIN, _batch(f"{n}x", f"{n}y"))) for n in range(6)]
        await _settle()
        table.gate.set()
        await asyncio.gather(*answers)
        assert max(map(len, table.inserts)) <= 5
        assert len(table.ids) == 12


async def test_submit_to_a_full_queue_is_refused_and_later_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INGEST_ROWS_MAX", 3)
    table = _Table()
    table.gate.clear()
    async with _running(table) as ingest:
        answer = asyncio.create_task(ingest.submit(ORIGIN, _batch("a", "b")))
        await _settle()
        with pytest.raises(errors.StoreBusy) as caught:
            await ingest.submit(ORIGIN, _batch("c", "d"))
        assert caught.value.retry_after_s == limits.INGEST_RETRY_AFTER_S
        table.gate.set()
        await answer
        assert await ingest.submit(ORIGIN, _batch("c", "d")) == (2, 0)
        assert ingest.stats.refused_full == 1
    assert table.ids == ["a", "b", "c", "d"]


async def test_submit_while_the_store_fails_raises_and_can_be_repeated() -> None:
    table = _Table()
    table.fail = 1
    async with _running(table) as ingest:
        with pytest.raises(errors.StoreError, match="no"):
            await ingest.submit(ORIGIN, _batch("a"))
        assert await ingest.submit(ORIGIN, _batch("a")) == (1, 0)
        assert (ingest.stats.failed, ingest.stats.repeated) == (1, 0)
    assert table.ids == ["a"]


async def test_submit_repeated_is_acknowledged_and_stored_once() -> None:
    table = _Table()
    async with _running(table) as ingest:
        await ingest.submit(ORIGIN, _batch("a", "a", "b"))
        assert await ingest.submit(ORIGIN, _batch("b", "c")) == (2, 0)
        await ingest.submit(Origin("demo", "device-2"), _batch("a"))
        assert ingest.stats.repeated == 2
    assert sorted(table.ids) == ["a", "a", "b", "c"]


async def test_repeats_are_remembered_up_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INGEST_RECENT_CALLS_MAX", 2)
    table = _Table()
    async with _running(table) as ingest:
        await ingest.submit(ORIGIN, _batch("a", "b", "c"))
        await ingest.submit(ORIGIN, _batch("b", "c"))
        assert table.ids == ["a", "b", "c"]
        await ingest.submit(ORIGIN, _batch("a"))
    assert table.ids == ["a", "b", "c", "a"]


async def test_submit_of_only_bad_rows_is_acknowledged_and_counted() -> None:
    table = _Table()
    async with _running(table) as ingest:
        assert await ingest.submit(ORIGIN, _batch("a", total_ms=float("nan"), malformed=2)) == (0, 3)
        assert ingest.stats.dropped == {"duration": 1, "malformed": 2}
    assert table.inserts == []


async def test_cancelled_submit_does_not_disturb_the_others() -> None:
    table = _Table()
    table.gate.clear()
    async with _running(table) as ingest:
        gone = asyncio.create_task(ingest.submit(ORIGIN, _batch("a")))
        stays = asyncio.create_task(ingest.submit(ORIGIN, _batch("b")))
        await _settle()
        gone.cancel()
        await _settle()
        table.gate.set()
        assert await stays == (1, 0)
    assert sorted(table.ids) == ["a", "b"]


async def test_close_stores_what_waits_and_refuses_what_comes() -> None:
    table = _Table()
    table.gate.clear()
    async with _running(table) as ingest:
        answers = [asyncio.create_task(ingest.submit(ORIGIN, _batch(f"{n}"))) for n in range(3)]
        await _settle()
        ingest.close()
        with pytest.raises(errors.StoreBusy):
            await ingest.submit(ORIGIN, _batch("late"))
        table.gate.set()
        assert await asyncio.gather(*answers) == [(1, 0)] * 3


async def test_run_that_dies_fails_everyone_who_waits() -> None:
    async def insert(rows: Sequence[Row]) -> None:
        raise ZeroDivisionError

    ingest = Ingest(insert, insert, _Clock())
    waiting = asyncio.create_task(ingest.submit(ORIGIN, _batch("a")))
    await _settle()
    with pytest.raises(ZeroDivisionError):
        await ingest.run()
    with pytest.raises(errors.StoreError):
        await waiting
    with pytest.raises(errors.StoreBusy):
        await ingest.submit(ORIGIN, _batch("b"))


# -- diagnoses --------------------------------------------------------------------------------------------------------
def _told(at_s: float = WALL_S) -> Diagnosis:
    return Diagnosis(
        url="https://h/", host="h", started_at=at_s, took_s=1.0, verdict="ok", confidence="high", hint="", why=""
    )


async def test_diagnoses_are_stored_beside_the_calls_and_once() -> None:
    table = _Table()
    async with _running(table) as ingest:
        batch = Salvaged(Report(calls=_batch("a").report.calls, diagnoses=[_told(), _told(WALL_S - 1)]), 0)
        assert await ingest.submit(ORIGIN, batch) == (3, 0)
        assert await ingest.submit(ORIGIN, batch) == (3, 0)
    assert table.ids == ["a"]
    assert [row["verdict"] for row in table.diagnoses] == ["ok", "ok"]
    assert (ingest.stats.stored, ingest.stats.repeated, ingest.stats.queued) == (3, 3, 0)


async def test_diagnoses_that_cannot_be_stored_do_not_store_the_calls_twice() -> None:
    table = _Table()
    failures = [errors.StoreError("no")]

    async def insert_diagnoses(rows: Sequence[Row]) -> None:
        if failures:
            raise failures.pop()
        table.diagnoses += rows

    ingest = Ingest(table.insert, insert_diagnoses, _Clock())
    task = asyncio.create_task(ingest.run())
    batch = Salvaged(Report(calls=_batch("a").report.calls, diagnoses=[_told()]), 0)
    with pytest.raises(errors.StoreError):
        await ingest.submit(ORIGIN, batch)
    assert await ingest.submit(ORIGIN, batch) == (2, 0)
    ingest.close()
    await task
    assert (table.ids, len(table.diagnoses)) == (["a"], 1)
