"""Streams inside one process, for `engine.memory`. Times are the running loop's, so they may be virtual."""

import asyncio
import dataclasses
import heapq
import logging
import math
from collections.abc import Coroutine, Sequence
from typing import Any, Final, Protocol

from stormline.core import errors, limits_platform
from stormline.engine.port import (
    Record,
    StreamConfig,
    Worker,
    check_append,
    check_consume,
    check_last,
    check_read,
    retry_pause_s,
    subject_matches,
)

_log = logging.getLogger("stormline.engine")
_RECORD_BYTES: Final = 40
"""What is counted for each record beside data and subject; between the server's counts in memory and on disk."""


class _Engine(Protocol):
    @property
    def closed(self) -> bool: ...

    @property
    def reachable(self) -> bool: ...

    def need(self) -> None: ...

    def consuming(self, consumer: "Consuming") -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]": ...


@dataclasses.dataclass(slots=True)
class _Pending:
    """A record given to a worker and not done, and when it comes again."""

    deliveries: int
    due: float


class _Durable:
    """How far all workers of one name are."""

    def __init__(self) -> None:
        self.next = 1
        self.pending: dict[int, _Pending] = {}


class StoredStream:
    """A stream as the broker keeps it."""

    def __init__(self, config: StreamConfig) -> None:
        self.config = config
        self.woken: dict[asyncio.Event, None] = {}
        self._clear()

    def _clear(self) -> None:
        self._records: dict[int, Record] = {}
        self._subjects: dict[str, dict[int, None]] = {}
        self._bytes = 0
        self._last = 0
        self._ends: list[tuple[float, int]] = []
        self._ids: dict[str, tuple[float, int]] = {}
        self._durables: dict[str, _Durable] = {}

    def forget(self) -> None:
        """Lose everything, as memory does with its process."""
        self._clear()

    def wake(self) -> None:
        """Let all who consume look again."""
        for event in self.woken:
            event.set()

    def append(self, subject: str, data: bytes, message_id: str, expect_last: int | None, ttl_s: float | None) -> int:
        """See `engine.port.Stream.append`."""
        now = asyncio.get_running_loop().time()
        self._expire(now)
        known = self._ids.get(message_id) if message_id else None
        if known is not None:
            return known[1]
        newest = next(reversed(self._subjects.get(subject, {})), 0)
        if expect_last is not None and expect_last != newest:
            raise errors.Conflict(f"subject {subject}: its last record is {newest}, not {expect_last}")
        if self._bytes + _size(subject, data) > self.config.max_bytes:
            raise errors.EngineFull(f"engine stream {self.config.name}: maximum bytes exceeded")
        self._last += 1
        self._records[self._last] = Record(self._last, subject, data)
        self._bytes += _size(subject, data)
        mine = self._subjects.setdefault(subject, {})
        mine[self._last] = None
        if self.config.max_per_subject is not None and len(mine) > self.config.max_per_subject:
            self._drop(next(iter(mine)))
        life_s = min(math.inf if ttl_s is None else math.ceil(ttl_s), self.config.max_age_s or math.inf)
        if life_s < math.inf:
            heapq.heappush(self._ends, (now + life_s, self._last))
        if message_id:
            window_s = min(limits_platform.ENGINE_DUPLICATES_S, self.config.max_age_s or math.inf)
            self._ids[message_id] = (now + window_s, self._last)
        self.wake()
        return self._last

    def _drop(self, sequence: int) -> None:
        record = self._records.pop(sequence, None)
        if record is None:
            return
        self._bytes -= _size(record.subject, record.data)
        mine = self._subjects[record.subject]
        del mine[sequence]
        if not mine:
            del self._subjects[record.subject]

    def _expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            self._drop(heapq.heappop(self._ends)[1])
        while self._ids and (oldest := next(iter(self._ids))) and self._ids[oldest][0] <= now:
            del self._ids[oldest]

    def read(self, subject: str, after: int, limit: int) -> list[Record]:
        """See `engine.port.Stream.read`."""
        self._expire(asyncio.get_running_loop().time())
        found: list[Record] = []
        size = 0
        exact = self._subjects.get(subject, {}) if not {"*", ">"} & set(subject.split(".")) else self._records
        for sequence in exact:
            if sequence > after and subject_matches(subject, self._records[sequence].subject):
                found.append(self._records[sequence])
                size += len(found[-1].data)
                if len(found) == limit or size > limits_platform.ENGINE_READ_BYTES_MAX:
                    break
        return found

    def last(self, subjects: Sequence[str]) -> list[Record]:
        """See `engine.port.Stream.last`."""
        self._expire(asyncio.get_running_loop().time())
        newest = (next(reversed(self._subjects[each])) for each in dict.fromkeys(subjects) if each in self._subjects)
        return [self._records[sequence] for sequence in sorted(newest)]

    def take(self, name: str, subject: str, batch: int, ack_wait_s: float) -> tuple[dict[int, Record], float]:
        """Give the next records for a worker, and how long until others are due again."""
        now = asyncio.get_running_loop().time()
        self._expire(now)
        durable = self._durables.setdefault(name, _Durable())
        durable.pending = {each: what for each, what in durable.pending.items() if each in self._records}
        taken = [each for each, what in durable.pending.items() if what.due <= now][:batch]
        while len(taken) < batch and durable.next <= self._last:
            room = len(durable.pending) < limits_platform.ENGINE_UNFINISHED_MAX
            record = self._records.get(durable.next)
            if record is not None and subject_matches(subject, record.subject):
                if not room:
                    break
                durable.pending[durable.next] = _Pending(0, math.inf)
                taken.append(durable.next)
            durable.next += 1
        for each in taken:
            durable.pending[each].deliveries += 1
            durable.pending[each].due = now + ack_wait_s
        rest_s = min((what.due for what in durable.pending.values()), default=math.inf) - now
        return {each: self._records[each] for each in sorted(taken)}, rest_s

    def again(self, name: str, taken: dict[int, Record], after_s: float | None) -> None:
        """Say when records come again to workers of a name; None: by how often they were delivered."""
        pending = self._durables.setdefault(name, _Durable()).pending
        held = [pending[each] for each in taken if each in pending]
        if after_s is None:
            after_s = retry_pause_s(max((each.deliveries for each in held), default=1))
        for each in held:
            each.due = asyncio.get_running_loop().time() + after_s
        self.wake()

    def done(self, name: str, taken: dict[int, Record]) -> None:
        """Say that records are done for a name."""
        for each in taken:
            self._durables.setdefault(name, _Durable()).pending.pop(each, None)
        self.wake()


def _size(subject: str, data: bytes) -> int:
    return len(subject) + len(data) + _RECORD_BYTES


class MemoryStream:
    """`engine.port.Stream` on a `MemoryBroker`."""

    def __init__(self, engine: _Engine, stored: StoredStream) -> None:
        self._engine = engine
        self._stored = stored

    async def append(
        self,
        subject: str,
        data: bytes,
        *,
        message_id: str = "",
        expect_last: int | None = None,
        ttl_s: float | None = None,
    ) -> int:
        """See `engine.port.Stream.append`."""
        check_append(self._stored.config, (subject, data), message_id, expect_last, ttl_s)
        self._engine.need()
        return self._stored.append(subject, data, message_id, expect_last, ttl_s)

    async def read(self, subject: str, after: int, limit: int) -> list[Record]:
        """See `engine.port.Stream.read`."""
        check_read(subject, after, limit)
        self._engine.need()
        return self._stored.read(subject, after, limit)

    async def last(self, subjects: Sequence[str]) -> list[Record]:
        """See `engine.port.Stream.last`."""
        check_last(subjects)
        self._engine.need()
        return self._stored.last(subjects)

    async def consume(
        self,
        name: str,
        worker: Worker,
        *,
        subject: str = ">",
        batch: int = 1,
        ack_wait_s: float = limits_platform.ENGINE_ACK_WAIT_S,
    ) -> "Consuming":
        """See `engine.port.Stream.consume`."""
        check_consume(name, subject, batch, ack_wait_s)
        consumer = Consuming(self._engine, self._stored, name, worker, subject, batch, ack_wait_s)
        self._engine.consuming(consumer)
        return consumer


class Consuming:
    """One process's part in a durable consumer."""

    def __init__(
        self,
        engine: _Engine,
        stored: StoredStream,
        name: str,
        worker: Worker,
        subject: str,
        batch: int,
        ack_wait_s: float,
    ) -> None:
        self._engine = engine
        self._stored = stored
        self._name = name
        self._worker = worker
        self._subject = subject
        self._batch = batch
        self._ack_wait_s = ack_wait_s
        self._working = False
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> "asyncio.Task[None]":
        """Begin, and give the task that goes on until `close`."""
        self._task = self._engine.spawn(self._run())
        return self._task

    async def close(self) -> None:
        """End it; a batch that is worked on is finished."""
        self._closed = True
        if self._task is not None and not self._working:
            self._task.cancel()

    async def _run(self) -> None:
        woken = asyncio.Event()
        self._stored.woken[woken] = None
        try:
            while not self._closed and not self._engine.closed:
                woken.clear()
                rest_s = math.inf
                if self._engine.reachable:
                    taken, rest_s = self._stored.take(self._name, self._subject, self._batch, self._ack_wait_s)
                    if taken:
                        self._working = True
                        await self._work(taken)
                        self._working = False
                        continue
                await self._wait(woken, rest_s)
        finally:
            del self._stored.woken[woken]

    @staticmethod
    async def _wait(woken: asyncio.Event, rest_s: float) -> None:
        timer = None
        if rest_s < math.inf:
            timer = asyncio.get_running_loop().call_later(rest_s, woken.set)
        try:
            await woken.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def _work(self, taken: dict[int, Record]) -> None:
        beating = asyncio.create_task(self._beat(taken))
        try:
            await self._worker(list(taken.values()))
        except Exception:
            _log.exception("worker %s of %s failed", self._name, self._stored.config.name)
            self._again(taken, None)
        except BaseException:
            self._again(taken, 0.0)
            raise
        else:
            if self._engine.reachable:
                self._stored.done(self._name, taken)
        finally:
            beating.cancel()

    def _again(self, taken: dict[int, Record], after_s: float | None) -> None:
        if self._engine.reachable:
            self._stored.again(self._name, taken, after_s)

    async def _beat(self, taken: dict[int, Record]) -> None:
        while True:
            await asyncio.sleep(self._ack_wait_s / 3.0)
            self._again(taken, self._ack_wait_s)
