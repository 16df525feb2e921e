"""What the platform needs of a distributed engine, and no more: messages by subject, and keys with revisions.

There are two versions: `engine.nats` (NATS with JetStream) and `engine.memory` (one process, also on virtual time).
One suite of tests runs on both. The words are those of NATS: a subject is tokens joined by dots; in a subscription `*`
stands for one token and a last `>` for one or more. Names from outside become tokens only by `core.ids.subject_token`.

Messages are delivered at most once. A request tells its sender whether it may have been acted on
(`EngineError.maybe_delivered`). Keys are durable as their bucket says.
"""

import dataclasses
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
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


Handler = Callable[[Message], Awaitable[Reply]]
"""Answers a request. What it raises becomes a 500 reply without details, and a line in the log."""
Listener = Callable[[Message], Awaitable[None]]
"""Takes a one-way message. What it raises becomes a line in the log."""


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


def check_key(key: str) -> None:
    """Refuse a malformed key.

    Raises:
        ConfigError: it is malformed or too long.
    """
    if len(key) > limits_platform.ENGINE_SUBJECT_CHARS_MAX or not _KEY.fullmatch(key):
        raise errors.ConfigError(f"engine key {key[:80]!r} is malformed or too long")


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
