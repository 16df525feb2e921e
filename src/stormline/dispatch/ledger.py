"""Rules in the engine: one record moved by compare-and-set, and the rule sets' bytes in chunks beside it.

    head.rules                the record, `dispatch.head`
    body.<id>.<n>             the n-th chunk of a rule set: zlib (RFC 1950) of its JSON

A writer puts the chunks first, under an id that is never used again, and then moves the record. A reader starts at the
record, so it sees a whole rule set or none of it; what it read is held against the digest in the record. A writer whose
record was moved under it cannot write (`Conflict`): it looks again, and what it asked for holds against the newest
record or is refused. Chunks are removed only when the record in the engine no longer names them, and since ids are not
used again no later record can.

In a cluster a reader may be asked of a node that lags: a chunk that is not there yet reads as missing, and is read
again.
"""

import asyncio
import contextlib
import hashlib
import logging
import zlib
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeVar

from stormline.core import errors, ids
from stormline.core import limits_platform as limits
from stormline.core.clock import Rng
from stormline.dispatch import head as heads
from stormline.dispatch.head import Body, Head
from stormline.engine.port import KeyValue

_log = logging.getLogger("stormline.dispatch")
T = TypeVar("T")

HEAD_PREFIX: Final = "head"
HEAD_KEY: Final = "head.rules"
_SWEEP_KEY: Final = "body.sweep.0"


def bucket(unit: str) -> str:
    """Name the bucket of a unit's rules."""
    return f"dispatch-{unit}"


class Found(NamedTuple):
    """The record, and the revision it was written with."""

    head: Head
    revision: int


def pack(content: bytes) -> bytes:
    """Compress a rule set's bytes."""
    return zlib.compress(content, 6)


def unpack(packed: bytes, body: Body) -> bytes:
    """Give back what `pack` took.

    Raises:
        RulesRejected: it is not what `body` names: cut or altered (`damaged`), or larger than it may be (`too-large`).
    """
    _check_size(body, body.size, limits.RULES_BYTES_MAX)
    machine = zlib.decompressobj()
    try:
        content = machine.decompress(packed, body.size + 1)
    except zlib.error as error:
        raise errors.RulesRejected("damaged", f"rules {body.id}: damaged: {error}") from error
    if hashlib.sha256(content).hexdigest() != body.digest or len(content) != body.size:
        raise errors.RulesRejected("damaged", f"rules {body.id}: their digest is not the one in the record")
    return content


def _check_size(body: Body, size: int, most: int) -> None:
    if size > most:
        raise errors.RulesRejected("too-large", f"rules {body.id}: {size} bytes, at most {most}")


def digest(content: bytes) -> str:
    """Give the digest by which a rule set's bytes are known."""
    return hashlib.sha256(content).hexdigest()


async def beside(size: int, work: Callable[[], T]) -> T:
    """Run work on `size` bytes: at once where it is short, else in a thread."""
    return work() if size <= limits.RULES_THREAD_BYTES else await asyncio.to_thread(work)


class Ledger:
    """The rules of one unit in the engine.

    Methods raise `EngineError` when the engine cannot do what is asked; a `commit` that ends so, or is cancelled, may
    have happened.
    """

    def __init__(self, keys: KeyValue, *, rng: Rng) -> None:
        self._keys = keys
        self._rng = rng

    @property
    def keys(self) -> KeyValue:
        """The bucket."""
        return self._keys

    async def find(self) -> Found | None:
        """Read the record; None where there is none.

        Raises:
            RulesRejected: it is damaged, or of a format this version does not read.
        """
        entry = await self._keys.get(HEAD_KEY)
        return None if entry is None else Found(heads.decode(entry.value), entry.revision)

    async def read(self, body: Body) -> bytes:
        """Read a rule set as `pack` made it.

        Raises:
            EngineError: a chunk is missing: the record has moved on, or the engine lost it.
            RulesRejected: it is larger than it may be, by its record or by its chunks (`too-large`).
        """
        _check_size(body, body.size, limits.RULES_BYTES_MAX)
        parts, size = [], 0
        for number in range(body.chunks):
            entry = await self._keys.get(f"body.{body.id}.{number}")
            if entry is None:
                raise errors.EngineError(f"rules {body.id}: chunk {number} of {body.chunks} is not in the engine")
            size += len(entry.value)
            # What does not compress is a little larger packed; no more than a chunk.
            _check_size(body, size, limits.RULES_BYTES_MAX + limits.RULES_CHUNK_BYTES)
            parts.append(entry.value)
        return b"".join(parts)

    async def write(self, packed: bytes, *, version: int, size: int, content_digest: str) -> Body:
        """Write a rule set's chunks under a new id; nobody sees them until a record names them.

        Cancelled or failing, it leaves nothing a reader could meet; `sweep` removes the rest.

        Args:
            packed: what `pack` made.
            version: the version it is to become.
            size: bytes before packing.
            content_digest: their digest.
        """
        step = limits.RULES_CHUNK_BYTES
        chunks = [packed[at : at + step] for at in range(0, len(packed), step)]
        body = Body(heads.body_id(version, ids.new_id(self._rng)), len(chunks), size, content_digest)
        for number, chunk in enumerate(chunks):
            await self._keys.create(f"body.{body.id}.{number}", chunk)
        return body

    async def remove(self, bodies: Iterable[Body]) -> None:
        """Remove chunks that no record names. Never raises `EngineError`: what is left is swept later."""
        try:
            for body in bodies:
                for number in range(body.chunks):
                    await self._keys.delete(f"body.{body.id}.{number}")
        except errors.EngineError as error:
            _log.debug("chunks of old rules left behind: %s", error)

    async def create(self, head: Head) -> int:
        """Write the first record.

        Raises:
            Conflict: there is one.
        """
        return await self._keys.create(HEAD_KEY, heads.encode(head))

    async def commit(self, change: Callable[[Head], Head]) -> Found:
        """Move the record by a change, against whatever it is now.

        Args:
            change: gives the next record; called again where another writer was first. What it raises ends the
                commit, with nothing written.

        Returns:
            The new record.

        Raises:
            EngineError: the engine is away, has no record, or others write without end (`Conflict`).
        """
        pause_s = limits.RULES_COMMIT_PAUSE_S
        for _ in range(limits.RULES_COMMIT_TRIES_MAX):
            found = await self.find()
            if found is None:
                raise errors.EngineError("the engine has no rules yet")
            new = change(found.head)
            if new == found.head:
                return found
            try:
                revision = await self.move(new, found)
            except errors.Conflict:
                await asyncio.sleep(pause_s)
                pause_s *= 2
                continue
            return Found(new, revision)
        raise errors.Conflict("others change the rules all the time; nothing was written")

    async def move(self, new: Head, old: Found) -> int:
        """Put a record in place of one that was read, and remove the bodies it no longer names.

        Raises:
            Conflict: the record was moved since; nothing was written.
        """
        revision = await self._keys.update(HEAD_KEY, heads.encode(new), old.revision)
        kept = new.bodies()
        await self.remove(body for name, body in old.head.bodies().items() if name not in kept)
        return revision

    async def sweep(self) -> int:
        """Remove chunks of writers that died between chunks and record; gives their number.

        A body is written for one version. The record names none for versions it has passed that it does not name now,
        and none can be added (`heads.publish` refuses them): what is found of these belongs to nobody. Call it rarely:
        all chunks are read.
        """
        found = await self.find()
        if found is None:
            return 0
        # The mark is the newest key, and a watch gives keys in the order they were written: all before it were seen.
        await self._keys.put(_SWEEP_KEY, b"-")
        named = found.head.bodies()
        orphans = []
        async with contextlib.aclosing(self._keys.watch("body")) as changes:
            async for change in changes:
                if change.key == _SWEEP_KEY:
                    break
                name = change.key.split(".")[1]
                if change.value is not None and name not in named and heads.version_of(name) <= found.head.version:
                    orphans.append(change.key)
        for key in orphans:
            await self._keys.delete(key)
        return len(orphans)
