"""Streams on NATS JetStream, by its wire interface (NATS ADR-31 batched direct reads, ADR-13 pull consumers).

Reads are direct: any copy answers, and nothing is made on the server for them. Consumers are durable and pulled.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec
from nats.aio.msg import Msg

from stormline.core import errors, limits_platform
from stormline.engine.nats_api import (
    NO_ROOM,
    OTHER_CONFIGURATION,
    SECOND_NS,
    SUBJECTS_OVERLAP,
    WRONG_LAST_SEQUENCE,
    Links,
    Problem,
    api,
    call,
    positions,
    reach,
)
from stormline.engine.nats_link import FAILURES, Link
from stormline.engine.port import (
    Record,
    StreamConfig,
    Worker,
    check_append,
    check_consume,
    check_last,
    check_read,
    retry_pause_s,
)

_log = logging.getLogger("stormline.engine")
_NOTHING: Final = "404"
_END: Final = "204"
_NO_MORE: Final = ("404", "408")


async def ensure_stream(link: Link, config: StreamConfig, replicas: int) -> None:
    """Make the stream where it does not exist.

    Raises:
        ConfigError: it exists with other properties, or another has one of its subjects.
        EngineError: the engine cannot do it.
    """
    life_ns = int((config.max_age_s or 0) * SECOND_NS)
    wanted = {
        "name": config.name,
        "subjects": config.subjects,
        "storage": "file" if config.persistent else "memory",
        "num_replicas": replicas,
        "retention": "limits",
        "discard": "new",  # the stream as a whole refuses; of one subject the oldest still gives way
        "max_bytes": config.max_bytes,
        "max_msgs_per_subject": config.max_per_subject or -1,
        "max_age": life_ns,
        "duplicate_window": min(life_ns or math.inf, limits_platform.ENGINE_DUPLICATES_S * SECOND_NS),
        "allow_direct": True,
        "allow_msg_ttl": True,
        "deny_delete": True,
    }
    answer = await api(link, f"$JS.API.STREAM.CREATE.{config.name}", msgspec.json.encode(wanted))
    if answer.error is None:
        if replicas > 1:
            await reach(link, config.name, config.subjects[0].replace("*", "-").replace(">", "-"))
        return
    if answer.error.err_code == OTHER_CONFIGURATION:
        raise errors.ConfigError(f"engine stream {config.name} exists with other properties")
    if answer.error.err_code == SUBJECTS_OVERLAP:
        raise errors.ConfigError(f"engine stream {config.name}: another stream has one of its subjects")
    raise _refusal(f"engine stream {config.name}", answer.error)


def _refusal(what: str, problem: Problem) -> errors.EngineError:
    kind = errors.EngineFull if problem.err_code in NO_ROOM else errors.EngineError
    return kind(f"{what}: {problem.description}")


class _Engine(Links, Protocol):
    def consuming(self, consumer: "Consuming") -> None:
        """Let a consumer run for as long as the engine is open."""
        ...


class NatsStream:
    """`engine.port.Stream` on NATS JetStream."""

    def __init__(self, links: _Engine, config: StreamConfig) -> None:
        self._links = links
        self._config = config

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
        check_append(self._config, (subject, data), message_id, expect_last, ttl_s)
        headers = {"Nats-Expected-Stream": self._config.name}
        if message_id:
            headers["Nats-Msg-Id"] = message_id
        if expect_last is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(expect_last)
        if ttl_s is not None:
            headers["Nats-TTL"] = str(math.ceil(ttl_s))
        try:
            answer = await api(self._links.link(), subject, data, headers)
        except errors.EngineTimeout as error:  # what it could not write, the server does not speak of
            raise errors.EngineTimeout(
                f"engine stream {self._config.name} did not confirm a record of {subject}, which may be there: "
                "no leader, or its disk is full"
            ) from error
        if answer.error is None:
            return answer.seq
        if answer.error.err_code in WRONG_LAST_SEQUENCE:
            raise errors.Conflict(f"subject {subject}: {answer.error.description}")
        raise _refusal(f"engine stream {self._config.name}", answer.error)

    async def read(self, subject: str, after: int, limit: int) -> list[Record]:
        """See `engine.port.Stream.read`."""
        check_read(subject, after, limit)
        question = {
            "next_by_subj": subject,
            "seq": after + 1,
            "batch": limit,
            "max_bytes": limits_platform.ENGINE_READ_BYTES_MAX,
        }
        return (await self._direct(question))[0]

    async def last(self, subjects: Sequence[str]) -> list[Record]:
        """See `engine.port.Stream.last`."""
        check_last(subjects)
        missing = dict.fromkeys(subjects)
        found: list[Record] = []
        pending = bool(missing)
        while pending:
            question = {
                "multi_last": list(missing),
                "batch": len(missing),
                "max_bytes": limits_platform.ENGINE_READ_BYTES_MAX,
            }
            records, pending = await self._direct(question)
            for record in records:
                missing.pop(record.subject, None)
            found += records
        return sorted(found, key=lambda record: record.sequence)

    async def _direct(self, question: dict[str, Any]) -> tuple[list[Record], bool]:
        """Ask any copy for records; also whether there are more."""
        messages: list[Msg] = []
        subject = f"$JS.API.DIRECT.GET.{self._config.name}"
        end = await call(self._links.link(), subject, msgspec.json.encode(question), into=messages)
        headers = end.headers or {}
        if headers["Status"] == _NOTHING and not messages:
            return [], False
        if headers["Status"] != _END:
            raise errors.EngineError(f"engine stream {self._config.name}: reading gave status {headers['Status']}")
        previous = "0"
        for message in messages:
            if (message.headers or {}).get("Nats-Last-Sequence") != previous:
                raise errors.EngineError(f"engine stream {self._config.name}: a record was lost on its way")
            previous = (message.headers or {})["Nats-Sequence"]
        if headers.get("Nats-Last-Sequence") != previous:
            raise errors.EngineError(f"engine stream {self._config.name}: the last records were lost on their way")
        return [_record(message) for message in messages], headers.get("Nats-Num-Pending") != "0"

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
        consumer = Consuming(self._links, self._config.name, name, worker, subject, batch, ack_wait_s)
        self._links.consuming(consumer)
        return consumer


def _record(message: Msg) -> Record:
    headers = message.headers or {}
    try:
        return Record(int(headers["Nats-Sequence"]), headers["Nats-Subject"], message.data)
    except (KeyError, ValueError) as error:
        raise errors.EngineError("engine's answer to a read has no sequence") from error


class Consuming:
    """One process's part in a durable consumer: asks for records, has them worked on, says that they are done."""

    def __init__(
        self, links: Links, stream: str, name: str, worker: Worker, subject: str, batch: int, ack_wait_s: float
    ) -> None:
        self._links = links
        self._stream = stream
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
        self._task = asyncio.create_task(self._run(), name=f"engine consumer {self._name}")
        return self._task

    async def close(self) -> None:
        """End it; a batch that is worked on is finished."""
        self._closed = True
        if self._task is not None and not self._working:
            self._task.cancel()

    async def _run(self) -> None:
        """Consume over any number of connections."""
        pause_s = limits_platform.ENGINE_RECONNECT_PAUSE_S
        while not self._closed and (link := await self._links.wait_link()) is not None:
            pull = _Pull(link, self._stream, self._name)
            try:
                await pull.start(self._settings())
                while not self._closed:
                    messages = await pull.next(self._batch)
                    pause_s = limits_platform.ENGINE_RECONNECT_PAUSE_S
                    if messages:
                        self._working = True
                        await self._work(link, messages)
                        self._working = False
            except (errors.EngineError, *FAILURES) as error:
                _log.debug("consumer %s of %s starts anew: %s", self._name, self._stream, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, limits_platform.ENGINE_RECONNECT_PAUSE_MAX_S)
            finally:
                await pull.stop()

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "durable_name": self._name,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": int(self._ack_wait_s * SECOND_NS),
            "max_deliver": -1,
            "max_ack_pending": limits_platform.ENGINE_UNFINISHED_MAX,
            "replay_policy": "instant",
        }
        if self._subject != ">":
            settings["filter_subject"] = self._subject
        return settings

    async def _work(self, link: Link, messages: list[Msg]) -> None:
        """Have a batch worked on, saying meanwhile that it is, and then how it went. A failure is the log's."""
        places = [positions(message.reply) for message in messages]
        records = [Record(place[1], each.subject, each.data) for place, each in zip(places, messages, strict=True)]
        records.sort(key=lambda record: record.sequence)
        beating = asyncio.create_task(self._beat(link, messages))
        answer = b"-NAK"
        try:
            await self._worker(records)
            answer = b"+ACK"
        except Exception:
            _log.exception("worker %s of %s failed", self._name, self._stream)
            pause_s = retry_pause_s(max(place[0] for place in places))
            answer = b'-NAK {"delay": %d}' % int(pause_s * SECOND_NS)
        finally:
            beating.cancel()
            await _say(link, messages, answer)

    async def _beat(self, link: Link, messages: list[Msg]) -> None:
        while True:
            await asyncio.sleep(self._ack_wait_s / 3.0)
            await _say(link, messages, b"+WPI")


async def _say(link: Link, messages: list[Msg], answer: bytes) -> None:
    """Say something about these messages; where that fails they come again."""
    try:
        for message in messages:
            await link.send(message.reply, answer, None)
    except errors.EngineError as error:
        _log.debug("engine consumer: %d records will come again: %s", len(messages), error)


class _Pull:
    """Asks for the next messages of a durable consumer, over one connection."""

    def __init__(self, link: Link, stream: str, name: str) -> None:
        self._link = link
        self._stream = stream
        self._name = name
        self._inbox = link.new_inbox()
        self._subscription: Any = None
        self._messages: list[Msg] = []
        self._wanted = 0
        self._asked = 0
        self._end: asyncio.Future[str] | None = None

    async def start(self, settings: dict[str, Any]) -> None:
        """Make the consumer where it does not exist."""
        self._link.on_lost.add(self._on_lost)
        self._subscription = await self._link.client.subscribe(f"{self._inbox}.*", cb=self._on_message)
        data = msgspec.json.encode({"stream_name": self._stream, "config": settings})
        answer = await api(self._link, f"$JS.API.CONSUMER.DURABLE.CREATE.{self._stream}.{self._name}", data)
        if answer.error is not None:
            raise errors.EngineError(f"engine consumer: {answer.error.description}")

    async def stop(self) -> None:
        """Leave: what came and was not given goes back at once. Never raises."""
        self._link.on_lost.discard(self._on_lost)
        if self._subscription is None or not self._link.connected:
            return
        try:
            await self._subscription.unsubscribe()
        except FAILURES as error:
            _log.debug("ending a consumer: %s", error)
        await _say(self._link, self._messages, b"-NAK")

    async def next(self, batch: int) -> list[Msg]:
        """Give what is there, or the first that comes; nothing where none came in `ENGINE_PULL_S`.

        Raises:
            EngineError: the consumer is away, or does not answer.
        """
        await self._ask({"batch": batch, "no_wait": True}, 0.0)
        if not self._messages:
            wait_s = limits_platform.ENGINE_PULL_S
            await self._ask({"batch": 1, "expires": int(wait_s * SECOND_NS)}, wait_s)
        messages, self._messages = self._messages, []
        return messages

    async def _ask(self, question: dict[str, Any], wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        self._wanted = question["batch"]
        self._asked += 1
        question["max_bytes"] = limits_platform.ENGINE_BATCH_BYTES_MAX
        timer = loop.call_later(wait_s + limits_platform.ENGINE_KV_TIMEOUT_S, self._finish, "no answer")
        try:
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}"
            await self._link.send(subject, msgspec.json.encode(question), None, f"{self._inbox}.{self._asked}")
            status = await self._end
        finally:
            timer.cancel()
        if not self._messages and status not in _NO_MORE:
            raise errors.EngineUnavailable(f"engine consumer {self._name} of {self._stream}: status {status}")

    async def _on_message(self, message: Msg) -> None:
        if message.reply:
            self._messages.append(message)
            if len(self._messages) >= self._wanted:
                self._finish("")
        elif message.subject.endswith(f".{self._asked}"):
            status = (message.headers or {}).get("Status", "")
            if status != "100":
                self._finish(status)

    def _on_lost(self) -> None:
        self._finish("lost")

    def _finish(self, status: str) -> None:
        if self._end is not None and not self._end.done():
            self._end.set_result(status)
