"""Keys on NATS JetStream, by its wire interface (NATS ADR-8 key-value, ADR-31 direct reads, ADR-43 message life).

A bucket is a stream `KV_<bucket>` with the subjects `$KV.<bucket>.<key>`, one message each; other NATS clients see an
ordinary key-value bucket. We speak the wire interface and not `nats-py`'s wrapper because that one reads a server's
mark of an expired key as an empty value, cannot create a key over such a mark, and loses its watches without a word
when a server that kept them in memory starts again.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

import msgspec
from nats.aio.msg import Msg

from stormline.core import errors, limits_platform
from stormline.engine.nats_api import (
    OTHER_CONFIGURATION,
    SECOND_NS,
    WRONG_LAST_SEQUENCE,
    Links,
    api,
    call,
    positions,
    reach,
)
from stormline.engine.nats_link import FAILURES, Link
from stormline.engine.port import Change, Entry, check_key, check_keys, check_message

_log = logging.getLogger("stormline.engine")
_DUPLICATES_S: Final = 120.0
_EXPECT: Final = "Nats-Expected-Last-Subject-Sequence"
_OPERATION: Final = "KV-Operation"
_MARKER: Final = "Nats-Marker-Reason"
_END: Final = "204"
_NOTHING: Final = "404"
_TOO_MANY: Final = "413"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """A bucket's properties."""

    name: str
    persistent: bool
    ttl_s: float | None
    replicas: int


async def ensure_bucket(link: Link, bucket: Bucket) -> None:
    """Make the bucket where it does not exist.

    Raises:
        ConfigError: it exists with other properties.
        EngineError: the engine cannot do it.
    """
    life_ns = int((bucket.ttl_s or 0) * SECOND_NS)
    config = {
        "name": f"KV_{bucket.name}",
        "subjects": [f"$KV.{bucket.name}.>"],
        "storage": "file" if bucket.persistent else "memory",
        "num_replicas": bucket.replicas,
        "retention": "limits",
        "discard": "new",
        "max_msgs_per_subject": 1,
        "max_age": life_ns,
        "duplicate_window": min(life_ns or SECOND_NS * 120, int(_DUPLICATES_S) * SECOND_NS),
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "allow_msg_ttl": True,
        "deny_delete": True,
    }
    if life_ns:  # so that watchers hear of keys that expire
        config["subject_delete_marker_ttl"] = SECOND_NS * limits_platform.ENGINE_DELETED_KEY_LIFE_S
    answer = await api(link, f"$JS.API.STREAM.CREATE.KV_{bucket.name}", msgspec.json.encode(config))
    if answer.error is not None:
        if answer.error.err_code == OTHER_CONFIGURATION:
            raise errors.ConfigError(f"engine bucket {bucket.name} exists with other properties")
        raise errors.EngineError(f"engine bucket {bucket.name}: {answer.error.description}")
    if bucket.replicas > 1:
        await reach(link, f"KV_{bucket.name}", f"$KV.{bucket.name}.-")


def _ended(headers: Mapping[str, str] | None) -> bool:
    """Whether a stored message says that its key ended: deleted, purged, or expired (the server's own mark)."""
    return headers is not None and (headers.get(_OPERATION) in ("DEL", "PURGE") or _MARKER in headers)


class NatsKeyValue:
    """`engine.port.KeyValue` on NATS JetStream."""

    def __init__(self, links: Links, bucket: str) -> None:
        self._links = links
        self._bucket = bucket
        self._stream = f"KV_{bucket}"
        self._subject = f"$KV.{bucket}."

    async def get(self, key: str) -> Entry | None:
        """See `engine.port.KeyValue.get`."""
        check_key(key)
        message = await self._last(key)
        if message is None or _ended(message.headers):
            return None
        return Entry(message.data, _revision(message))

    async def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        """See `engine.port.KeyValue.get_many`."""
        check_keys(keys)
        return await self._read(list(keys)) if keys else {}

    async def under(self, prefix: str) -> dict[str, Entry]:
        """See `engine.port.KeyValue.under`."""
        check_key(prefix)
        return await self._read([f"{prefix}.>"])

    async def _read(self, patterns: list[str]) -> dict[str, Entry]:
        """Read the newest message of all keys that match, in one request (NATS ADR-31)."""
        data = msgspec.json.encode({"multi_last": [self._subject + pattern for pattern in patterns]})
        messages = await self._links.link().gather(
            f"$JS.API.DIRECT.GET.{self._stream}", data, timeout_s=limits_platform.ENGINE_KV_TIMEOUT_S
        )
        last = messages.pop().headers or {}
        status = last.get("Status")
        if status == _TOO_MANY:
            raise errors.EngineError(f"more than {limits_platform.ENGINE_KV_READ_MAX} keys of {self._bucket} match")
        if status not in (_END, _NOTHING) or last.get("Nats-Num-Pending", "0") != "0":
            raise errors.EngineError(f"engine bucket {self._bucket}: reading keys ended with status {status}")
        start = len(self._subject)
        return {
            str((message.headers or {})["Nats-Subject"])[start:]: Entry(message.data, _revision(message))
            for message in messages
            if not _ended(message.headers)
        }

    async def put(self, key: str, value: bytes) -> int:
        """See `engine.port.KeyValue.put`."""
        return await self._write(key, value, {})

    async def create(self, key: str, value: bytes) -> int:
        """See `engine.port.KeyValue.create`."""
        try:
            return await self._write(key, value, {_EXPECT: "0"})
        except errors.Conflict:
            last = await self._last(key)
            if last is None or not _ended(last.headers):
                raise
            return await self._write(key, value, {_EXPECT: str(_revision(last))})  # over the mark of its end

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """See `engine.port.KeyValue.update`."""
        return await self._write(key, value, {_EXPECT: str(revision)})

    async def delete(self, key: str, revision: int | None = None) -> None:
        """See `engine.port.KeyValue.delete`."""
        headers = {_OPERATION: "DEL", "Nats-TTL": f"{limits_platform.ENGINE_DELETED_KEY_LIFE_S}s"}
        if revision is not None:
            headers[_EXPECT] = str(revision)
        await self._write(key, b"", headers)

    async def _last(self, key: str) -> Msg | None:
        """Read the key's newest message, also a mark of its end."""
        subject = f"$JS.API.DIRECT.GET.{self._stream}.{self._subject}{key}"
        message = await call(self._links.link(), subject, b"", None)
        status = (message.headers or {}).get("Status")
        if status is None:
            return message
        if status == "404":
            return None
        raise errors.EngineError(f"engine bucket {self._bucket}: reading a key gave status {status}")

    async def _write(self, key: str, value: bytes, headers: dict[str, str]) -> int:
        check_key(key)
        check_message("key", value, None)
        answer = await api(self._links.link(), self._subject + key, value, headers)
        if answer.error is None:
            return answer.seq
        if answer.error.err_code in WRONG_LAST_SEQUENCE:
            raise errors.Conflict(f"key {key}: {answer.error.description}")
        raise errors.EngineError(f"engine bucket {self._bucket}: {answer.error.description}")

    async def watch(self, prefix: str = "") -> AsyncGenerator[Change, None]:
        """See `engine.port.KeyValue.watch`."""
        if prefix:
            check_key(prefix)
        known: set[str] = set()
        pause_s = limits_platform.ENGINE_RECONNECT_PAUSE_S
        while (link := await self._links.wait_link()) is not None:
            run = _WatchRun(link, self._stream, self._subject, f"{prefix}.>" if prefix else ">")
            try:
                await run.start()
                pause_s = limits_platform.ENGINE_RECONNECT_PAUSE_S
                async with contextlib.aclosing(run.changes(known)) as changes:
                    async for change in changes:
                        yield change
            except (errors.EngineError, *FAILURES) as error:
                _log.debug("watch of %s starts anew: %s", self._bucket, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, limits_platform.ENGINE_RECONNECT_PAUSE_MAX_S)
            finally:
                await run.stop()


def _revision(message: Msg) -> int:
    try:
        return int((message.headers or {})["Nats-Sequence"])
    except (KeyError, ValueError) as error:
        raise errors.EngineError("engine's answer to a read has no revision") from error


class _WatchRun:
    """One ordered, unacknowledged consumer. It ends when its link is lost, a message missed, or the server silent."""

    def __init__(self, link: Link, stream: str, subject: str, pattern: str) -> None:
        self._link = link
        self._stream = stream
        self._subject = subject
        self._filter = subject + pattern
        self._inbox = link.new_inbox()
        self._name = "w" + self._inbox.replace(".", "")[-40:]
        self._queue: asyncio.Queue[Msg | None] = asyncio.Queue(limits_platform.ENGINE_WATCH_QUEUE_MAX)
        self._subscription: Any = None
        self._pending = 0

    async def start(self) -> None:
        """Make the consumer; its messages begin to come."""
        self._link.on_lost.add(self._on_lost)
        self._subscription = await self._link.client.subscribe(self._inbox, cb=self._queue.put)
        config = {
            "name": self._name,
            "deliver_subject": self._inbox,
            "deliver_policy": "last_per_subject",
            "filter_subject": self._filter,
            "ack_policy": "none",
            "max_deliver": 1,
            "replay_policy": "instant",
            "flow_control": True,
            "idle_heartbeat": limits_platform.ENGINE_WATCH_HEARTBEAT_S * SECOND_NS,
            "inactive_threshold": limits_platform.ENGINE_WATCH_IDLE_S * SECOND_NS,
            "mem_storage": True,
            "num_replicas": 1,
        }
        data = msgspec.json.encode({"stream_name": self._stream, "config": config})
        answer = await api(self._link, f"$JS.API.CONSUMER.CREATE.{self._stream}.{self._name}.{self._filter}", data)
        if answer.error is not None:
            raise errors.EngineError(f"engine watch: {answer.error.description}")
        self._pending = answer.num_pending

    async def stop(self) -> None:
        """Leave nothing behind: neither subscription nor consumer. Never raises."""
        self._link.on_lost.discard(self._on_lost)
        if self._subscription is None or not self._link.connected:
            return
        try:
            await self._subscription.unsubscribe()
            await self._link.send(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._name}", b"", None)
        except (errors.EngineError, *FAILURES) as error:
            _log.debug("ending a watch: %s", error)  # the server forgets it by itself

    def _on_lost(self) -> None:
        while self._queue.full():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def changes(self, known: set[str]) -> AsyncGenerator[Change, None]:
        """Give the present keys, then deletions of those in `known` that are gone, then changes. Keeps `known`."""
        stale = set(known)
        present = self._pending == 0
        expected = 1
        while True:
            if present and stale:
                for key in sorted(stale):
                    known.discard(key)
                    yield Change(key, None, 0)
                stale.clear()
            async with asyncio.timeout(3.0 * limits_platform.ENGINE_WATCH_HEARTBEAT_S):
                message = await self._queue.get()
            if message is None:
                return
            if (message.headers or {}).get("Status") == "100" and not message.data:
                present = await self._on_control(message, expected) or present
                continue
            _, sequence, consumed, pending = positions(message.reply)
            if consumed != expected:
                raise errors.EngineError(f"message {expected} of the watch was missed")
            expected += 1
            present = present or pending == 0
            key = message.subject[len(self._subject) :]
            stale.discard(key)
            if not _ended(message.headers):
                known.add(key)
                yield Change(key, message.data, sequence)
            elif key in known:
                known.discard(key)
                yield Change(key, None, sequence)

    async def _on_control(self, message: Msg, expected: int) -> bool:
        """Answer flow control; check a heartbeat. True where the server is idle, so that all was given."""
        headers = message.headers or {}
        stalled = headers.get("Nats-Consumer-Stalled")
        if message.reply or stalled:
            await self._link.send(message.reply or stalled or "", b"", None)
        last = headers.get("Nats-Last-Consumer")
        if last is None:
            return False
        if last != str(expected - 1):
            raise errors.EngineError(f"message {expected} of the watch was missed")
        return True
