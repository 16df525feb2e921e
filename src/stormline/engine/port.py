"""What the platform needs of a distributed engine, and no more: messages by subject, keys with revisions, and streams.

There are two versions: `engine.nats` (NATS with JetStream) and `engine.memory` (one process, also on virtual time).
One suite of tests runs on both. The words are those of NATS: a subject is tokens joined by dots; in a subscription `*`
stands for one token and a last `>` for one or more. Names from outside become tokens only by `core.ids.subject_token`.

Messages are delivered at most once. A request tells its sender whether it may have been acted on
(`EngineError.maybe_delivered`). Keys are durable as their bucket says, records as their stream does.
"""

import dataclasses
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol

from stormline.core import errors, limits, limits_platform

ERROR_CODE_HEADER: Final = "Nats-Service-Error-Code"
"""Header of a reply that says no: a number as in HTTP. The convention of NATS services, kept by every language's."""
ERROR_HEADER: Final = "Nats-Service-Error"
"""Header of a reply that says no: for people."""

_TOKEN = r"[!-)+,\-/-=?-~]+"  # noqa: S105 - printable ASCII without '.', '*', '>' and blank
_SUBJECT = re.compile(rf"{_TOKEN}(?:\.{_TOKEN})*")
_PATTERN = re.compile(rf"(?:(?:{_TOKEN}|\*)(?:\.(?:{_TOKEN}|\*))*(?:\.>)?|>)")
_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(?:\.[-/_=a-zA-Z0-9]+)*")
_BUCKET = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MESSAGE_ID = re.compile(rf"[!-~]{{1,{limits_platform.ENGINE_MESSAGE_ID_CHARS_MAX}}}")
_STREAM = re.compile(r"(?!KV_)[a-zA-Z0-9_-]{1,64}")  # buckets are streams too, named KV_...
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# No control characters, no lone surrogates (not text), no blanks at the ends: the far side gets exactly what was sent.
_HEADER_VALUE = re.compile(r"(?!\s)[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]*(?<!\s)")


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """A message as received. Header names keep the case they were sent with."""

    subject: str
    data: bytes
    headers: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """What a handler answers."""

    data: bytes = b""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


def error_reply(code: int, description: str) -> Reply:
    """Make a reply that says no, in the form `reply_error` understands."""
    text = "".join(each if each.isprintable() else " " for each in description)
    text = " ".join(text.split())[: limits.REASON_CHARS_MAX].strip()
    return Reply(headers={ERROR_CODE_HEADER: str(code), ERROR_HEADER: text})


def reply_error(message: Message) -> tuple[int, str] | None:
    """Read the code and text of a reply that says no; None for one that does not. A malformed code reads as 500."""
    code = message.headers.get(ERROR_CODE_HEADER)
    if code is None:
        return None
    text = message.headers.get(ERROR_HEADER, "")[: limits.REASON_CHARS_MAX]
    return (int(code) if code.isascii() and code.isdigit() and len(code) <= 4 else 500), text


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A key's value and the revision it was written with."""

    value: bytes
    revision: int


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A key's new value, or its end where `value` is None."""

    key: str
    value: bytes | None
    revision: int


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A message as kept in a stream, and its place there."""

    sequence: int
    subject: str
    data: bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """A stream's properties; see `Engine.stream`."""

    name: str
    subjects: tuple[str, ...]
    persistent: bool
    max_bytes: int
    max_age_s: float | None
    max_per_subject: int | None

    def covers(self, subject: str) -> bool:
        """Whether the stream keeps what is sent to this subject."""
        return any(subject_matches(pattern, subject) for pattern in self.subjects)


Handler = Callable[[Message], Awaitable[Reply]]
"""Answers a request. What it raises becomes a 500 reply without details, and a line in the log."""
Listener = Callable[[Message], Awaitable[None]]
"""Takes a one-way message. What it raises becomes a line in the log."""
Worker = Callable[[Sequence[Record]], Awaitable[None]]
"""Works on records of a stream. They are done when it returns; when it raises they come again, and the log says so."""


class Subscription(Protocol):
    """A standing interest in a subject. It outlives the loss of the engine: it works again when the engine does."""

    async def close(self) -> None:
        """End it. No message comes after this; handlers that run go on. May be called again."""
        ...


class KeyValue(Protocol):
    """A bucket of keys.

    Every write gives the key a revision larger than every earlier one in the bucket. Reads are of the newest write on
    a single node; in a cluster `get` may lag by a moment, and only compare-and-set decides.

    Keys are tokens of letters, digits and `-/_=`, joined by dots. All methods raise `EngineUnavailable` when the
    engine is away, `EngineTimeout` when it does not answer in `limits_platform.ENGINE_KV_TIMEOUT_S`, and `ConfigError`
    for a malformed key. A write that was cancelled, timed out or lost the engine may have happened.
    """

    async def get(self, key: str) -> Entry | None:
        """Give the key's value and revision, None where it does not exist."""
        ...

    async def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        """Give those of the keys that exist, by key: one request, at most `limits_platform.ENGINE_KV_READ_MAX` keys."""
        ...

    async def under(self, prefix: str) -> dict[str, Entry]:
        """Give all keys below `prefix` (whole tokens, see `watch`), by key, in the order of their last writes.

        Raises:
            EngineError: there are more than `limits_platform.ENGINE_KV_READ_MAX`.
        """
        ...

    async def put(self, key: str, value: bytes) -> int:
        """Write the key whatever it was, and give its revision."""
        ...

    async def create(self, key: str, value: bytes) -> int:
        """Write a key that does not exist (or no longer), and give its revision.

        Raises:
            Conflict: it exists.
        """
        ...

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Write the key only if its last write was `revision` (compare-and-set), and give its new revision.

        Raises:
            Conflict: it was written or deleted since.
        """
        ...

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Delete the key; with `revision`, only if that was its last write. Deleting a missing key is no error.

        Raises:
            Conflict: it was written or deleted since `revision`.
        """
        ...

    def watch(self, prefix: str = "") -> AsyncGenerator[Change, None]:
        """Give the present keys below `prefix`, then each change, for as long as the engine is open.

        `prefix` is whole tokens: `a` means `a.b` and `a.b.c`, not `a` and not `ab.c`; empty means all. Several
        changes of one key may come as one, the newest. After a loss of the engine the present keys are given again,
        and those that went meanwhile as deletions: apply changes as "this key is now this". A deletion is given only
        for a key that was given before. Meant for a few watchers a process, never one per user; close it
        (`contextlib.aclosing`) when leaving early.
        """
        ...


class Stream(Protocol):
    """Records in the order they were taken, each with a sequence larger than every earlier one's.

    What `append` returned from is kept until it is older than the stream's age or its own life, or until its subject
    has more newer ones than the stream keeps of each. A full stream takes nothing new and loses nothing old. In a
    cluster reads may come from a copy that lags by a moment: what it gives is in order and without holes, and the
    newest may be missing, so ask again for a record that is known to be there.

    All methods raise `EngineUnavailable` when the engine is away, `EngineTimeout` when it does not answer in
    `limits_platform.ENGINE_KV_TIMEOUT_S`, and `ConfigError` for malformed arguments or a subject that is not the
    stream's.
    """

    async def append(
        self,
        subject: str,
        data: bytes,
        *,
        message_id: str = "",
        expect_last: int | None = None,
        ttl_s: float | None = None,
    ) -> int:
        """Add a record and give its sequence.

        When it raises with `maybe_delivered` the record may be there. With a `message_id` it is safe to repeat: within
        `limits_platform.ENGINE_DUPLICATES_S` a second record of that id is not taken, and the sequence of the first
        given.

        Args:
            subject: one of the stream's, without wildcards.
            data: the record.
            message_id: 1 to `limits_platform.ENGINE_MESSAGE_ID_CHARS_MAX` printable ASCII characters without blanks.
            expect_last: take it only if this is the sequence of the subject's newest record, 0 for none at all
                (compare-and-set). Not together with `message_id`: of two answers one would have to come first.
            ttl_s: its life; whole seconds, rounded up, at least one. It ends up to about two seconds later.

        Raises:
            Conflict: the newest record is not `expect_last`.
            EngineFull: the stream holds as many bytes as it may, or the engine has no room.
        """
        ...

    async def read(self, subject: str, after: int, limit: int) -> list[Record]:
        """Give records of a subject (wildcards allowed) with a sequence above `after`, oldest first.

        At least one where there is one, at most `limit`, fewer where they are more than
        `limits_platform.ENGINE_READ_BYTES_MAX` bytes together: read on after the last until nothing comes. It makes
        nothing on the engine: meant for many readers, each with a cursor of its own.

        Args:
            subject: which.
            after: the cursor: the last sequence already seen, 0 for none.
            limit: at most this many, 1 to `limits_platform.ENGINE_READ_RECORDS_MAX`.
        """
        ...

    async def last(self, subjects: Sequence[str]) -> list[Record]:
        """Give the newest record of each of these subjects that has one, in order of sequence.

        Args:
            subjects: without wildcards, at most `limits_platform.ENGINE_LAST_SUBJECTS_MAX`.
        """
        ...

    async def consume(
        self,
        name: str,
        worker: Worker,
        *,
        subject: str = ">",
        batch: int = 1,
        ack_wait_s: float = limits_platform.ENGINE_ACK_WAIT_S,
    ) -> Subscription:
        """Work through the stream's records, each at least once, sharing them with all that consume under this name.

        The engine remembers how far they are, also while nobody consumes. The worker gets one batch at a time: what is
        there, at most `batch` records (fewer where they are large), in order of sequence. A batch whose worker raised
        comes again after a pause that doubles from `limits_platform.ENGINE_RETRY_PAUSE_S` to
        `ENGINE_RETRY_PAUSE_MAX_S`, others meanwhile, for as long as the stream keeps it; one whose process vanished
        comes again after `ack_wait_s`. A worker may take longer than that. For few names, never one per user. The
        interest outlives the loss of the engine.

        Args:
            name: letters, digits, `_` and `-`.
            worker: what is done.
            subject: which records; wildcards allowed.
            batch: most records at once, 1 to `limits_platform.ENGINE_BATCH_MAX`.
            ack_wait_s: see above; at least one second.
        """
        ...


class Engine(Protocol):
    """One process's way to the engine."""

    @property
    def connected(self) -> bool:
        """Whether it works now, as far as we know."""
        ...

    async def request(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, timeout_s: float
    ) -> Message:
        """Send a request and give the first reply, also one that says no (`reply_error`). Safe to cancel.

        Raises:
            EngineUnavailable: not connected, or lost while waiting.
            NoResponders: nobody listens on the subject; known at once.
            EngineTimeout: no reply in `timeout_s` seconds.
            ConfigError: a malformed subject or header, or a message that is too large.
        """
        ...

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send a one-way message to everybody who listens now; it is not known whether it arrived.

        Raises:
            EngineUnavailable: not connected, or too much waits to be sent.
            ConfigError: a malformed subject or header, or a message that is too large.
        """
        ...

    async def serve(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Answer requests. Handlers run side by side, at most `limits_platform.ENGINE_HANDLERS_MAX` for this
        subscription; a request beyond that gets the reply 503 'overloaded' at once.

        Of subscribers with the same `queue` one gets each message. On return the interest is known to the engine; if
        it is away, it will be when it comes back.
        """
        ...

    async def subscribe(self, subject: str, handler: Listener, *, queue: str = "") -> Subscription:
        """Take one-way messages, one at a time, those of one sender in the order sent.

        More than `limits_platform.ENGINE_QUEUE_MESSAGES_MAX` waiting ones are dropped, newest first, with a line in the
        log.
        """
        ...

    async def kv(self, bucket: str, *, persistent: bool, ttl_s: float | None = None) -> KeyValue:
        """Open a bucket, making it where it does not exist.

        Args:
            bucket: letters, digits, `_` and `-`.
            persistent: on disk and kept over a restart of the engine; otherwise in its memory and lost with it.
            ttl_s: keys end this many seconds after their last write; at least `limits_platform.ENGINE_KV_TTL_MIN_S`.

        Raises:
            EngineUnavailable: not connected.
            ConfigError: a malformed name, or the bucket exists with other properties.
        """
        ...

    async def stream(
        self,
        name: str,
        subjects: Sequence[str],
        *,
        persistent: bool,
        max_bytes: int,
        max_age_s: float | None = None,
        max_per_subject: int | None = None,
    ) -> Stream:
        """Open a stream, making it where it does not exist.

        Args:
            name: letters, digits, `_` and `-`.
            subjects: what it keeps, wildcards allowed but at the front; no subject may be in two streams. Give streams
                subjects of their own: what is published to them or listened for on them beside the stream has no
                defined meaning.
            persistent: on disk and kept over a restart of the engine; otherwise in its memory and lost with it.
            max_bytes: most bytes of records, subjects and some tens for each record together; room for them is
                reserved. Beyond it appending fails.
            max_age_s: records end this many seconds after they were taken; at least one.
            max_per_subject: of each subject this many newest are kept; older ones give way.

        Raises:
            EngineUnavailable: not connected.
            EngineFull: the engine cannot reserve so much.
            ConfigError: a malformed argument, the stream exists with other properties, or a subject is another's.
        """
        ...

    async def close(self) -> None:
        """Let running handlers finish (`limits_platform.ENGINE_DRAIN_S`), then leave. May be called again."""
        ...


def check_message(subject: str, data: bytes, headers: Mapping[str, str] | None) -> None:
    """Refuse what may not be sent: a control character in a subject or header would speak to the server itself.

    Raises:
        ConfigError: a malformed subject or header, or more than `limits_platform.ENGINE_MESSAGE_BYTES_MAX` in all.
    """
    if len(subject) > limits_platform.ENGINE_SUBJECT_CHARS_MAX or not _SUBJECT.fullmatch(subject):
        raise errors.ConfigError(f"engine subject {subject[:80]!r} is malformed or too long")
    size = len(data)
    for name, value in (headers or {}).items():
        if not _HEADER_NAME.fullmatch(name):
            raise errors.ConfigError(f"engine header name {name[:80]!r} is malformed")
        if not _HEADER_VALUE.fullmatch(value):
            raise errors.ConfigError(f"engine header {name}: control characters or outer blanks in its value")
        size += len(name) + len(value.encode("utf-8", "surrogatepass")) + 4
    if size > limits_platform.ENGINE_MESSAGE_BYTES_MAX:
        raise errors.ConfigError(f"engine message of {size} bytes, at most {limits_platform.ENGINE_MESSAGE_BYTES_MAX}")


def check_subscription(subject: str, queue: str) -> None:
    """Refuse a malformed subject (wildcards allowed) or queue name.

    Raises:
        ConfigError: one of them is malformed or too long.
    """
    if len(subject) > limits_platform.ENGINE_SUBJECT_CHARS_MAX or not _PATTERN.fullmatch(subject):
        raise errors.ConfigError(f"engine subscription {subject[:80]!r} is malformed or too long")
    if queue and (len(queue) > limits_platform.ENGINE_SUBJECT_CHARS_MAX or not _SUBJECT.fullmatch(queue)):
        raise errors.ConfigError(f"engine queue {queue[:80]!r} is malformed or too long")


def check_stream(config: StreamConfig) -> None:
    """Refuse malformed properties of a stream.

    Raises:
        ConfigError: one of them is malformed or out of range.
    """
    if not _STREAM.fullmatch(config.name):
        raise errors.ConfigError(f"engine stream {config.name[:80]!r}: expected 1 to 64 of a-z, A-Z, 0-9, '_' and '-'")
    if not config.subjects:
        raise errors.ConfigError(f"engine stream {config.name}: no subjects")
    for subject in config.subjects:
        check_subscription(subject, "")
        if subject[0] in "*>":  # the server's own subjects would be kept with ours
            raise errors.ConfigError(f"engine stream {config.name}: {subject[:80]!r} begins with a wildcard")
    for number, label in ((config.max_bytes, "max_bytes"), (config.max_per_subject, "max_per_subject")):
        if number is not None and number < 1:
            raise errors.ConfigError(f"engine stream {config.name}: {label} {number} is below 1")
    if config.max_age_s is not None and not config.max_age_s >= 1.0:
        raise errors.ConfigError(f"engine stream {config.name}: max_age_s {config.max_age_s} is below 1")


def check_append(
    config: StreamConfig, record: tuple[str, bytes], message_id: str, expect_last: int | None, ttl_s: float | None
) -> None:
    """Refuse what may not be appended.

    Raises:
        ConfigError: see `Stream.append`.
    """
    subject, data = record
    check_message(subject, data, None)
    if not config.covers(subject):
        raise errors.ConfigError(f"engine subject {subject[:80]!r} is not one of stream {config.name}")
    if message_id and not _MESSAGE_ID.fullmatch(message_id):
        raise errors.ConfigError(f"engine message id {message_id[:80]!r} is malformed or too long")
    if message_id and expect_last is not None:
        raise errors.ConfigError("engine append: either a message id or an expected last sequence")
    if expect_last is not None and expect_last < 0:
        raise errors.ConfigError(f"engine append: expected last sequence {expect_last} is below 0")
    if ttl_s is not None and not 1.0 <= ttl_s <= limits_platform.ENGINE_RECORD_LIFE_MAX_S:
        raise errors.ConfigError(f"engine append: a life of {ttl_s} s is out of range")


def check_read(subject: str, after: int, limit: int) -> None:
    """Refuse a malformed question for records.

    Raises:
        ConfigError: see `Stream.read`.
    """
    check_subscription(subject, "")
    if after < 0:
        raise errors.ConfigError(f"engine read: a cursor of {after} is below 0")
    most = limits_platform.ENGINE_READ_RECORDS_MAX
    if not 1 <= limit <= most:
        raise errors.ConfigError(f"engine read: limit {limit} is not 1 to {most}")


def check_last(subjects: Sequence[str]) -> None:
    """Refuse a malformed question for newest records.

    Raises:
        ConfigError: see `Stream.last`.
    """
    most = limits_platform.ENGINE_LAST_SUBJECTS_MAX
    if len(subjects) > most:
        raise errors.ConfigError(f"engine question for {len(subjects)} subjects, at most {most}")
    for subject in subjects:
        check_message(subject, b"", None)


def check_consume(name: str, subject: str, batch: int, ack_wait_s: float) -> None:
    """Refuse a malformed wish to consume.

    Raises:
        ConfigError: see `Stream.consume`.
    """
    if not _BUCKET.fullmatch(name):
        raise errors.ConfigError(f"engine consumer {name[:80]!r}: expected 1 to 64 of a-z, A-Z, 0-9, '_' and '-'")
    check_subscription(subject, "")
    most = limits_platform.ENGINE_BATCH_MAX
    if not 1 <= batch <= most:
        raise errors.ConfigError(f"engine consumer {name}: batch {batch} is not 1 to {most}")
    if not ack_wait_s >= 1.0:
        raise errors.ConfigError(f"engine consumer {name}: ack_wait_s {ack_wait_s} is below 1")


def retry_pause_s(deliveries: int) -> float:
    """Say how long a batch rests whose worker failed, by how often it was delivered."""
    whole_s: float = limits_platform.ENGINE_RETRY_PAUSE_S * 2.0 ** min(deliveries - 1, 16)
    return min(whole_s, limits_platform.ENGINE_RETRY_PAUSE_MAX_S)


def check_key(key: str) -> None:
    """Refuse a malformed key.

    Raises:
        ConfigError: it is malformed or too long.
    """
    if len(key) > limits_platform.ENGINE_SUBJECT_CHARS_MAX or not _KEY.fullmatch(key):
        raise errors.ConfigError(f"engine key {key[:80]!r} is malformed or too long")


def check_keys(keys: Sequence[str]) -> None:
    """Refuse a list of keys that is too long, or has a malformed one.

    Raises:
        ConfigError: it is, or has.
    """
    if len(keys) > limits_platform.ENGINE_KV_READ_MAX:
        raise errors.ConfigError(f"{len(keys)} engine keys at once, at most {limits_platform.ENGINE_KV_READ_MAX}")
    for key in keys:
        check_key(key)


def check_bucket(bucket: str, ttl_s: float | None) -> None:
    """Refuse a malformed bucket.

    Raises:
        ConfigError: its name or the life of its keys is out of range.
    """
    if not _BUCKET.fullmatch(bucket):
        raise errors.ConfigError(f"engine bucket {bucket[:80]!r}: expected 1 to 64 of a-z, A-Z, 0-9, '_' and '-'")
    if ttl_s is not None and not ttl_s >= limits_platform.ENGINE_KV_TTL_MIN_S:
        raise errors.ConfigError(
            f"engine bucket {bucket}: ttl_s {ttl_s} is below {limits_platform.ENGINE_KV_TTL_MIN_S}"
        )


def subject_matches(pattern: str, subject: str) -> bool:
    """Say whether a subscription to `pattern` gets messages on `subject`."""
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(tokens) <= len(wanted):
            return False
    elif len(tokens) != len(wanted):
        return False
    return all(want in ("*", token) for want, token in zip(wanted, tokens, strict=False))


def subjects_overlap(one: str, other: str) -> bool:
    """Whether some subject is matched by both of these well-formed patterns."""
    mine, theirs = one.split("."), other.split(".")
    for a, b in zip(mine, theirs, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(mine) == len(theirs)
