"""The engine inside one process: for simulation and tests. No I/O and no threads, so it runs on virtual time too.

A `MemoryBroker` is the engine; each `MemoryEngine` is one process's way to it. `cut` and `heal` take the engine away
and bring it back.
"""

import abc
import asyncio
import contextlib
import dataclasses
import logging
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.engine.memory_stream import Consuming, MemoryStream, StoredStream
from stormline.engine.port import (
    Change,
    Entry,
    Handler,
    Listener,
    Message,
    Reply,
    StreamConfig,
    check_bucket,
    check_key,
    check_keys,
    check_message,
    check_stream,
    check_subscription,
    error_reply,
    subject_matches,
    subjects_overlap,
)

_log = logging.getLogger("stormline.engine")


@dataclasses.dataclass(slots=True)
class _Delivery:
    """A message on its way, and where its reply goes."""

    message: Message
    answer: asyncio.Future[Message] | None


class _Subscription(abc.ABC):
    """One standing interest; its engine runs the handlers."""

    def __init__(self, engine: "MemoryEngine", subject: str, queue: str) -> None:
        self.engine = engine
        self.subject = subject
        self.queue = queue

    @abc.abstractmethod
    def deliver(self, delivery: _Delivery) -> None:
        """Take a message."""

    async def close(self) -> None:
        """End the interest."""
        self.engine.broker.subscriptions.pop(self, None)


class _Served(_Subscription):
    def __init__(self, engine: "MemoryEngine", subject: str, queue: str, handler: Handler) -> None:
        super().__init__(engine, subject, queue)
        self._handler = handler
        self._running = 0

    def deliver(self, delivery: _Delivery) -> None:
        if self._running >= limits.ENGINE_HANDLERS_MAX:
            self._answer(delivery, error_reply(503, "overloaded"))
            return
        self._running += 1
        self.engine.spawn(self._run(delivery))

    async def _run(self, delivery: _Delivery) -> None:
        try:
            reply = await self._handler(delivery.message)
            check_message("reply", reply.data, reply.headers)
        except Exception:
            _log.exception("handler of %s failed", self.subject)
            reply = error_reply(500, "internal error")
        finally:
            self._running -= 1
        self._answer(delivery, reply)

    def _answer(self, delivery: _Delivery, reply: Reply) -> None:
        answer = delivery.answer
        if answer is not None and not answer.done() and self.engine.broker.up:
            answer.set_result(Message("reply", reply.data, dict(reply.headers)))


class _Listening(_Subscription):
    def __init__(self, engine: "MemoryEngine", subject: str, queue: str, handler: Listener) -> None:
        super().__init__(engine, subject, queue)
        self._handler = handler
        self._waiting: deque[Message] = deque()
        self._bytes = 0
        self._busy = False
        self._closed = False

    def deliver(self, delivery: _Delivery) -> None:
        size = len(delivery.message.data)
        if len(self._waiting) >= limits.ENGINE_QUEUE_MESSAGES_MAX or (
            self._bytes + size > limits.ENGINE_QUEUE_BYTES_MAX
        ):
            _log.warning("listener of %s is too slow: a message was dropped", self.subject)
            return
        self._waiting.append(delivery.message)
        self._bytes += size
        if not self._busy:
            self._busy = True
            self.engine.spawn(self._run())

    async def _run(self) -> None:
        while self._waiting:
            message = self._waiting.popleft()
            self._bytes -= len(message.data)
            try:
                await self._handler(message)
            except Exception:
                _log.exception("listener of %s failed", self.subject)
        self._busy = False

    async def close(self) -> None:
        self._waiting.clear()
        self._bytes = 0
        await super().close()


class MemoryBroker:
    """The engine that several `MemoryEngine`s share."""

    def __init__(self) -> None:
        self.up = True
        self.subscriptions: dict[_Subscription, None] = {}  # a dict: in order of subscription, so runs repeat
        self.buckets: dict[str, _Bucket] = {}
        self.streams: dict[str, StoredStream] = {}
        self._turns: dict[tuple[str, str], int] = {}
        self.requests: dict[asyncio.Future[Message], None] = {}

    def cut(self) -> None:
        """Take the engine away: nobody is connected, requests in flight fail, messages are lost."""
        self.up = False
        for answer in list(self.requests):
            if not answer.done():
                answer.set_exception(errors.EngineUnavailable("engine lost while waiting", maybe_delivered=True))

    def heal(self, *, restarted: bool = False) -> None:
        """Bring it back; subscriptions work again.

        Args:
            restarted: as after a new start of its process: buckets and streams that are not persistent are empty.
        """
        self.up = True
        for bucket in self.buckets.values():
            if restarted and not bucket.persistent:
                bucket.forget()
            bucket.wake_all(resync=True)
        for stream in self.streams.values():
            if restarted and not stream.config.persistent:
                stream.forget()
            stream.wake()

    def route(self, delivery: _Delivery) -> bool:
        """Hand a message to all interested, of each queue to one in turn. False where nobody is interested."""
        subject = delivery.message.subject
        queues: dict[tuple[str, str], list[_Subscription]] = {}
        targets: list[_Subscription] = []
        for subscription in self.subscriptions:
            if subject_matches(subscription.subject, subject):
                if subscription.queue:
                    queues.setdefault((subscription.queue, subscription.subject), []).append(subscription)
                else:
                    targets.append(subscription)
        for key, members in queues.items():
            turn = self._turns.get(key, 0)
            self._turns[key] = turn + 1
            targets.append(members[turn % len(members)])
        for target in targets:
            target.deliver(delivery)
        return bool(targets)


class MemoryEngine:
    """`engine.port.Engine` on a `MemoryBroker`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker
        self.closed = False
        self._tasks: dict[asyncio.Task[None], None] = {}  # in order, so that runs repeat
        self._consumers: dict[Consuming, None] = {}

    @property
    def reachable(self) -> bool:
        """Whether the broker is there."""
        return self.broker.up

    @property
    def connected(self) -> bool:
        """Whether the broker is there and this engine is open."""
        return self.broker.up and not self.closed

    def need(self) -> None:
        """Raise `EngineUnavailable` where not connected."""
        if not self.connected:
            raise errors.EngineUnavailable("engine closed" if self.closed else "engine unavailable")

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a handler beside us."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def request(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, timeout_s: float
    ) -> Message:
        """See `engine.port.Engine.request`."""
        check_message(subject, data, headers)
        self.need()
        if len(self.broker.requests) >= limits.ENGINE_REQUESTS_MAX:
            raise errors.EngineUnavailable("too many requests await their answers")
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.broker.requests[answer] = None
        try:
            if not self.broker.route(_Delivery(Message(subject, data, dict(headers or {})), answer)):
                raise errors.NoResponders(f"nobody listens on {subject}")
            try:
                async with asyncio.timeout(timeout_s):
                    return await answer
            except TimeoutError:
                raise errors.EngineTimeout(f"no answer on {subject} within {timeout_s:g} s") from None
        finally:
            del self.broker.requests[answer]

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """See `engine.port.Engine.publish`."""
        check_message(subject, data, headers)
        self.need()
        self.broker.route(_Delivery(Message(subject, data, dict(headers or {})), None))

    async def serve(self, subject: str, handler: Handler, *, queue: str = "") -> _Subscription:
        """See `engine.port.Engine.serve`."""
        return self._add(_Served(self, subject, queue, handler))

    async def subscribe(self, subject: str, handler: Listener, *, queue: str = "") -> _Subscription:
        """See `engine.port.Engine.subscribe`."""
        return self._add(_Listening(self, subject, queue, handler))

    def _add(self, subscription: _Subscription) -> _Subscription:
        check_subscription(subscription.subject, subscription.queue)
        if self.closed:
            raise errors.EngineUnavailable("engine closed")
        self.broker.subscriptions[subscription] = None
        return subscription

    async def kv(self, bucket: str, *, persistent: bool, ttl_s: float | None = None) -> "MemoryKeyValue":
        """See `engine.port.Engine.kv`."""
        check_bucket(bucket, ttl_s)
        self.need()
        found = self.broker.buckets.setdefault(bucket, _Bucket(persistent, ttl_s))
        if (found.persistent, found.ttl_s) != (persistent, ttl_s):
            raise errors.ConfigError(f"engine bucket {bucket} exists with other properties")
        return MemoryKeyValue(self, found)

    async def stream(
        self,
        name: str,
        subjects: Sequence[str],
        *,
        persistent: bool,
        max_bytes: int,
        max_age_s: float | None = None,
        max_per_subject: int | None = None,
    ) -> MemoryStream:
        """See `engine.port.Engine.stream`."""
        wanted = StreamConfig(
            name=name,
            subjects=tuple(subjects),
            persistent=persistent,
            max_bytes=max_bytes,
            max_age_s=max_age_s,
            max_per_subject=max_per_subject,
        )
        check_stream(wanted)
        self.need()
        found = self.broker.streams.get(name)
        if found is None:
            others = [each for stream in self.broker.streams.values() for each in stream.config.subjects]
            if any(subjects_overlap(mine, other) for mine in subjects for other in others):
                raise errors.ConfigError(f"engine stream {name}: another stream has one of its subjects")
            found = self.broker.streams[name] = StoredStream(wanted)
        elif found.config != wanted:
            raise errors.ConfigError(f"engine stream {name} exists with other properties")
        return MemoryStream(self, found)

    def consuming(self, consumer: Consuming) -> None:
        """Let a consumer run for as long as this engine is open."""
        if self.closed:
            raise errors.EngineUnavailable("engine closed")
        self._consumers[consumer] = None
        consumer.start().add_done_callback(lambda _: self._consumers.pop(consumer, None))

    async def close(self) -> None:
        """See `engine.port.Engine.close`."""
        if self.closed:
            return
        self.closed = True
        for consumer in list(self._consumers):
            await consumer.close()
        for subscription in [one for one in self.broker.subscriptions if one.engine is self]:
            await subscription.close()
        for bucket in self.broker.buckets.values():
            bucket.wake_all(resync=False)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limits.ENGINE_DRAIN_S)
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@dataclasses.dataclass(slots=True)
class _Stored:
    value: bytes
    revision: int
    expiry: asyncio.TimerHandle | None


@dataclasses.dataclass(slots=True, eq=False)
class _Watcher:
    """What one watcher has yet to be told: per key the newest change, so it is bounded by the keys there are."""

    prefix: str
    changes: dict[str, Change]
    woken: asyncio.Event
    resync: bool = True


class _Bucket:
    def __init__(self, persistent: bool, ttl_s: float | None) -> None:
        self.persistent = persistent
        self.ttl_s = ttl_s
        self.keys: dict[str, _Stored] = {}
        self.watchers: dict[_Watcher, None] = {}
        self._revision = 0
        self._last: dict[str, int] = {}
        """Revision of each deleted key's mark, for compare-and-set."""

    def last_revision(self, key: str) -> int:
        stored = self.keys.get(key)
        return stored.revision if stored is not None else self._last.get(key, 0)

    def write(self, key: str, value: bytes) -> int:
        self._drop(key)
        self._last.pop(key, None)
        self._revision += 1
        expiry = None
        if self.ttl_s is not None:
            expiry = asyncio.get_running_loop().call_later(self.ttl_s, self.remove, key)
        self.keys[key] = _Stored(value, self._revision, expiry)
        self._tell(Change(key, value, self._revision))
        return self._revision

    def remove(self, key: str) -> None:
        existed = self._drop(key)
        self._revision += 1
        self._last[key] = self._revision
        asyncio.get_running_loop().call_later(limits.ENGINE_DELETED_KEY_LIFE_S, self._forget_mark, key, self._revision)
        if existed:
            self._tell(Change(key, None, self._revision))

    def _forget_mark(self, key: str, revision: int) -> None:
        if self._last.get(key) == revision:
            del self._last[key]

    def forget(self) -> None:
        for key in list(self.keys):
            self._drop(key)
        self._last.clear()
        self._revision = 0

    def wake_all(self, *, resync: bool) -> None:
        for watcher in self.watchers:
            watcher.resync = watcher.resync or resync
            watcher.woken.set()

    def _drop(self, key: str) -> bool:
        stored = self.keys.pop(key, None)
        if stored is not None and stored.expiry is not None:
            stored.expiry.cancel()
        return stored is not None

    def _tell(self, change: Change) -> None:
        for watcher in self.watchers:
            if change.key.startswith(watcher.prefix):
                watcher.changes.pop(change.key, None)  # to the end: in the order of the newest writes
                watcher.changes[change.key] = change
                watcher.woken.set()


class MemoryKeyValue:
    """`engine.port.KeyValue` on a `MemoryBroker`."""

    def __init__(self, engine: MemoryEngine, bucket: _Bucket) -> None:
        self._engine = engine
        self._bucket = bucket

    async def get(self, key: str) -> Entry | None:
        """See `engine.port.KeyValue.get`."""
        check_key(key)
        self._engine.need()
        stored = self._bucket.keys.get(key)
        return None if stored is None else Entry(stored.value, stored.revision)

    async def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        """See `engine.port.KeyValue.get_many`."""
        check_keys(keys)
        self._engine.need()
        stored = self._bucket.keys
        return {key: Entry(stored[key].value, stored[key].revision) for key in keys if key in stored}

    async def under(self, prefix: str) -> dict[str, Entry]:
        """See `engine.port.KeyValue.under`."""
        check_key(prefix)
        self._engine.need()
        found = {
            key: Entry(stored.value, stored.revision)
            for key, stored in self._bucket.keys.items()
            if key.startswith(f"{prefix}.")
        }
        if len(found) > limits.ENGINE_KV_READ_MAX:
            raise errors.EngineError(f"more than {limits.ENGINE_KV_READ_MAX} keys below {prefix}")
        return found

    async def put(self, key: str, value: bytes) -> int:
        """See `engine.port.KeyValue.put`."""
        self._check(key, value)
        return self._bucket.write(key, value)

    async def create(self, key: str, value: bytes) -> int:
        """See `engine.port.KeyValue.create`."""
        self._check(key, value)
        if key in self._bucket.keys:
            raise errors.Conflict(f"key {key} exists")
        return self._bucket.write(key, value)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """See `engine.port.KeyValue.update`."""
        self._check(key, value)
        self._expect(key, revision)
        return self._bucket.write(key, value)

    async def delete(self, key: str, revision: int | None = None) -> None:
        """See `engine.port.KeyValue.delete`."""
        self._check(key, b"")
        if revision is not None:
            self._expect(key, revision)
        self._bucket.remove(key)

    async def watch(self, prefix: str = "") -> AsyncGenerator[Change, None]:
        """See `engine.port.KeyValue.watch`."""
        if prefix:
            check_key(prefix)
        start = f"{prefix}." if prefix else ""
        watcher = _Watcher(start, {}, asyncio.Event())
        known: set[str] = set()
        self._bucket.watchers[watcher] = None
        try:
            while not self._engine.closed:
                for change in self._take(watcher, known):
                    if change.value is not None:
                        known.add(change.key)
                    elif change.key in known:
                        known.discard(change.key)
                    else:
                        continue
                    yield change
                if not watcher.changes and not (watcher.resync and self._engine.connected):
                    await watcher.woken.wait()
        finally:
            self._bucket.watchers.pop(watcher, None)

    def _take(self, watcher: _Watcher, known: set[str]) -> list[Change]:
        """Take what there is to tell; after a resync all that is there, and what is gone."""
        watcher.woken.clear()
        if not self._engine.connected:
            watcher.changes.clear()  # what was lost comes again with the resync
            watcher.resync = True
            return []
        if watcher.resync:
            watcher.resync = False
            watcher.changes.clear()
            keys = self._bucket.keys
            present = [Change(k, s.value, s.revision) for k, s in keys.items() if k.startswith(watcher.prefix)]
            return present + [Change(k, None, 0) for k in sorted(known) if k not in keys]
        changes = list(watcher.changes.values())
        watcher.changes.clear()
        return changes

    def _check(self, key: str, value: bytes) -> None:
        check_key(key)
        check_message("key", value, None)
        self._engine.need()

    def _expect(self, key: str, revision: int) -> None:
        last = self._bucket.last_revision(key)
        if last != revision:
            raise errors.Conflict(f"key {key} is at revision {last}, not {revision}")
