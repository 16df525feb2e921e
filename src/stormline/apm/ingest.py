"""Reports on their way into the store: cleaned, gathered, and acknowledged only once they are stored.

Group commit: while one insert runs, what arrives is gathered and goes into the next. One device alone waits for one
insert; a thousand share a few. Nothing is acknowledged that a `kill -9` could still lose.
"""

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from stormline.apm import rows as cleaning
from stormline.apm.rows import Bad, Origin, Row
from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.clock import Clock
from stormline.telemetry.report import Salvaged

log = logging.getLogger("stormline.apm")

Insert = Callable[[Sequence[Row]], Awaitable[None]]


class Receipt(NamedTuple):
    """What became of a report: rows that are stored (or were before), and rows left out as bad."""

    stored: int
    dropped: int


@dataclass(kw_only=True)
class IngestStats:
    """Counts since the start; records, where nothing else is said.

    Attributes:
        reports: reports acknowledged.
        stored: records stored.
        repeated: records that had been stored before, so a report came twice.
        dropped: records left out, by kind of defect.
        lost_by_clients: records that clients say they dropped for want of room.
        refused_full: reports refused because the queue was full.
        failed: reports refused because the store failed.
        commits: inserts into the store.
        queued: records that wait now.
    """

    reports: int = 0
    stored: int = 0
    repeated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    lost_by_clients: int = 0
    refused_full: int = 0
    failed: int = 0
    commits: int = 0
    queued: int = 0


class _Waiting(NamedTuple):
    rows: list[Row]
    diagnoses: list[Row]
    stored: asyncio.Future[None]

    @property
    def size(self) -> int:
        """How many rows of either kind."""
        return len(self.rows) + len(self.diagnoses)


class Ingest:
    """The queue in front of the store. `run` must be running for `submit` to return.

    Args:
        insert: stores calls durably, or raises StoreError.
        insert_diagnoses: likewise diagnoses.
        clock: for the time of arrival.
    """

    def __init__(self, insert: Insert, insert_diagnoses: Insert, clock: Clock) -> None:
        self._insert = insert
        self._insert_diagnoses = insert_diagnoses
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        # Calls and diagnoses stored lately, in order of storing. Known only to this process: after a restart a report
        # that is sent again because its answer was lost is counted twice.
        self._recent: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self.stats = IngestStats()

    async def submit(self, origin: Origin, salvaged: Salvaged) -> Receipt:
        """Store a report's good records; returns once they are safe.

        Cancelling gives up the answer; the records may be stored all the same. Sending a report again is harmless:
        a record is known by app, device and call id.

        Raises:
            StoreBusy: the queue is full; nothing of the report is stored.
            StoreError: the store failed; the report should be sent again later.
        """
        waiting, defects = self._clean(origin, salvaged)
        stats = self.stats
        if self._closing or stats.queued + waiting.size > limits.INGEST_ROWS_MAX:
            stats.refused_full += 1
            raise errors.StoreBusy("the queue of reports is full", retry_after_s=limits.INGEST_RETRY_AFTER_S)
        if waiting.size:
            self._waiting.append(waiting)
            stats.queued += waiting.size
            self._wake.set()
            await waiting.stored
        stats.reports += 1
        for kind, count in defects.items():
            stats.dropped[kind] = stats.dropped.get(kind, 0) + count
        stats.lost_by_clients += min(max(0, salvaged.report.dropped), cleaning.INT64_MAX)
        return Receipt(waiting.size, defects.total())

    def _clean(self, origin: Origin, salvaged: Salvaged) -> tuple[_Waiting, Counter[str]]:
        received_ms = int(self._clock.wall() * 1000)
        waiting = _Waiting([], [], asyncio.get_running_loop().create_future())
        defects: Counter[str] = Counter(malformed=salvaged.malformed) if salvaged.malformed else Counter()
        calls = [cleaning.clean(each, origin, received_ms) for each in salvaged.report.calls]
        told = [cleaning.clean_diagnosis(each, origin, received_ms) for each in salvaged.report.diagnoses]
        for found, target in ((calls, waiting.rows), (told, waiting.diagnoses)):
            for row in found:
                if isinstance(row, Bad):
                    defects[row.kind] += 1
                else:
                    target.append(row)
        return waiting, defects

    async def run(self) -> None:
        """Commit what waits until `close`; then what is left, and return."""
        try:
            while self._waiting or not self._closing:
                if self._waiting:
                    await self._commit(self._take())
                else:
                    self._wake.clear()
                    await self._wake.wait()
        finally:
            self._closing = True
            for waiting in self._waiting:
                _fail(waiting, "the store stopped")
            self._waiting.clear()

    def close(self) -> None:
        """Refuse new reports and let `run` end once the queue is empty."""
        self._closing = True
        self._wake.set()

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        size = 0
        while self._waiting and (not batch or size + self._waiting[0].size <= limits.INGEST_COMMIT_ROWS_MAX):
            batch.append(self._waiting.popleft())
            size += batch[-1].size
        return batch

    async def _commit(self, batch: list[_Waiting]) -> None:
        size = sum(waiting.size for waiting in batch)
        fresh = self._fresh([row for waiting in batch for row in waiting.rows])
        told = self._fresh([row for waiting in batch for row in waiting.diagnoses])
        stats = self.stats
        try:
            if fresh:
                await self._insert(list(fresh.values()))
                self._remember(fresh)  # at once: the second insert may fail, and then all of it is sent again
            if told:
                await self._insert_diagnoses(list(told.values()))
                self._remember(told)
        except errors.StoreError as error:
            stats.failed += len(batch)
            log.warning("%d records in %d reports not stored: %s", size, len(batch), error)
            for waiting in batch:
                _fail(waiting, str(error))
        except BaseException:
            for waiting in batch:
                _fail(waiting, "the store stopped")
            raise
        else:
            stats.commits += bool(fresh or told)
            stats.stored += len(fresh) + len(told)
            stats.repeated += size - len(fresh) - len(told)
            for waiting in batch:
                if not waiting.stored.done():
                    waiting.stored.set_result(None)
        finally:
            stats.queued -= size

    def _fresh(self, rows: Sequence[Row]) -> dict[tuple[str, str, str], Row]:
        """Give each row once that was not stored lately."""
        return {_key(row): row for row in rows if _key(row) not in self._recent}

    def _remember(self, fresh: dict[tuple[str, str, str], Row]) -> None:
        self._recent.update(dict.fromkeys(fresh))
        while len(self._recent) > limits.INGEST_RECENT_CALLS_MAX:
            self._recent.popitem(last=False)


def _key(row: Row) -> tuple[str, str, str]:
    own = row.get("call_id") or f"diagnosis {row['started_at']} {row['url']}"
    return row["app"], row["device"], own


def _fail(waiting: _Waiting, reason: str) -> None:
    if not waiting.stored.done():  # its reporter may have gone away
        waiting.stored.set_exception(errors.StoreError(reason))
