"""The directory: on which node each device has its session, kept in the engine for all nodes of a unit.

Each node writes what it holds as leases that it renews; a node that dies leaves nothing behind for longer than a
lease. An entry is written by compare-and-set only, so two nodes never undo each other's work unseen:

- a session that has just been opened takes the entry over, whoever had it;
- one that is announced late or again (the engine was away) yields to a newer one, and its node is told so;
- one whose client came back after another has logged in as the same device yields to that one's, always;
- an ended session removes only what it wrote itself.

Sessions do not wait for any of this: `opened` and `closed` only note what is to be done.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice
from typing import Protocol

import msgspec

from stormline.appgw import subjects
from stormline.appgw.port import Identity
from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.clock import Clock
from stormline.core.ids import subject_token
from stormline.engine.port import KeyValue, Listener, Message, Subscription

_log = logging.getLogger("stormline.appgw")


class Buckets(Protocol):
    """What the directory needs of the engine."""

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """See `engine.port.Engine.publish`."""
        ...

    async def kv(self, bucket: str, *, persistent: bool, ttl_s: float | None = None) -> KeyValue:
        """See `engine.port.Engine.kv`."""
        ...


class Subscriber(Protocol):
    """What listening for other nodes needs of the engine."""

    async def subscribe(self, subject: str, handler: Listener, *, queue: str = "") -> Subscription:
        """See `engine.port.Engine.subscribe`."""
        ...


class Location(msgspec.Struct, frozen=True):
    """Where a device is.

    Attributes:
        node: the node that holds its session.
        session: the session's id.
        epoch: grows with each session of the device: milliseconds since 1970 at its begin, more where the last
            session's node had a clock ahead of ours.
        login_ms: see `appgw.port.Identity`.
        returned: likewise.
    """

    node: str
    session: str
    epoch: int
    login_ms: int = 0
    returned: bool = False


_decoder = msgspec.json.Decoder(Location)


class _Lease:
    """One session of this node, and the revision at which its entry was written last."""

    __slots__ = ("due", "epoch", "fresh", "identity", "opened_s", "revision")

    def __init__(self, identity: Identity, epoch: int, now: float) -> None:
        self.identity = identity
        self.epoch = epoch
        self.fresh = True  # just opened, and not announced yet
        self.due = self.opened_s = now
        self.revision: int | None = None


def key_of(app: str, device: str) -> str:
    """Give the key of a device's entry.

    Raises:
        ConfigError: a name is empty or too long.
    """
    return f"d.{subject_token(app)}.{subject_token(device)}"


class Directory:
    """This node's part of the directory, and lookups in all of it.

    Args:
        engine: where it is kept; may be away at any time.
        unit: this unit; each has a directory of its own.
        node: this node.
        clock: wall time, for epochs.
        superseded: told when a session of this node turns out to be older than one elsewhere. It should be closed.
    """

    def __init__(
        self, engine: Buckets, *, unit: str, node: str, clock: Clock, superseded: Callable[[Identity], None]
    ) -> None:
        self._engine = engine
        self._bucket = f"directory_{unit}"
        self._unit = unit
        self._node = node
        self._node_key = f"n.{subject_token(node)}"
        self._node_due = 0.0
        self._clock = clock
        self._superseded = superseded
        self._kv: KeyValue | None = None
        self._leases: dict[str, _Lease] = {}  # in the order of their due times, but for those in _new
        self._new: dict[str, None] = {}
        self._removals: dict[str, int] = {}
        self._woken = asyncio.Event()
        self._well = True

    def __len__(self) -> int:
        """Sessions of this node it announces."""
        return len(self._leases)

    # -- for the sessions ----------------------------------------------------------------------------------------

    def opened(self, identity: Identity) -> None:
        """Note a new session; it replaces an earlier one of the same device."""
        key = key_of(identity.app, identity.device)
        self._leases.pop(key, None)
        self._leases[key] = _Lease(identity, int(self._clock.wall() * 1000), asyncio.get_running_loop().time())
        self._new[key] = None
        self._woken.set()

    def closed(self, identity: Identity) -> None:
        """Note the end of a session. Does nothing where the device has a newer one here."""
        key = key_of(identity.app, identity.device)
        lease = self._leases.get(key)
        if lease is not None and lease.identity.session == identity.session:
            self._forget(key, lease)
            self._woken.set()

    # -- for the callers -----------------------------------------------------------------------------------------

    async def lookup(self, app: str, device: str) -> Location | None:
        """Say where a device is, None where it is nowhere. Of sessions opened a moment ago it may not know yet.

        Raises:
            EngineError: the engine is away, or does not answer.
            ConfigError: a name is empty or too long.
        """
        entry = await (await self._open()).get(key_of(app, device))
        return None if entry is None else _read(entry.value)

    async def start(self, engine: Subscriber) -> Subscription:
        """Begin to hear from other nodes that they took an entry of ours over."""
        return await engine.subscribe(subjects.of_node(self._unit, self._node, "taken"), self._taken)

    async def run(self) -> None:
        """Keep the directory up to date, until cancelled. The engine may come and go."""
        while True:
            self._woken.clear()
            try:
                await self._work()
            except errors.EngineError as error:
                if self._well:
                    _log.warning("directory: %s; sessions go on, and are announced when it is back", error)
                self._well = False
                for key in self._new:
                    self._leases[key].fresh = False  # by the time they are announced there may be newer ones
                await asyncio.sleep(limits.DIRECTORY_TICK_S)  # also where woken: no storm against an engine in trouble
                continue
            if not self._well:
                _log.info("directory: the engine is back")
            self._well = True
            try:
                async with asyncio.timeout(limits.DIRECTORY_TICK_S):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def flush(self) -> None:
        """Write once what is to be written now: the removals of a node that stops.

        Raises:
            EngineError: the engine is away.
        """
        await self._work()

    # -- inside --------------------------------------------------------------------------------------------------

    async def _open(self) -> KeyValue:
        if self._kv is None:
            try:
                self._kv = await self._engine.kv(self._bucket, persistent=False, ttl_s=limits.DIRECTORY_LEASE_S)
            except errors.ConfigError as error:  # another version made it: wait until it is gone
                raise errors.EngineError(str(error)) from error
        return self._kv

    async def _work(self) -> None:
        kv = await self._open()
        await self._announce_node(kv)
        while keys := list(islice(self._removals, limits.DIRECTORY_WRITES_MAX)):
            await _all(self._remove(kv, key) for key in keys)
        while keys := self._due():
            await _all(self._write(kv, key) for key in keys)

    async def _announce_node(self, kv: KeyValue) -> None:
        """Write the node's own key. Where it is gone before its time the engine has lost its memory: the entries are
        gone with it and are written again. Revisions begin anew then, so those we know could name others' writes."""
        now = asyncio.get_running_loop().time()
        there = await kv.get(self._node_key)
        if there is not None and now < self._node_due:
            return
        await kv.put(self._node_key, b"{}")
        self._node_due = now + limits.DIRECTORY_REFRESH_S
        if there is None:
            self._removals.clear()
            for key, lease in self._leases.items():
                lease.revision = None
                self._new[key] = None
            if self._leases:
                _log.info("directory: announcing %d sessions", len(self._leases))

    def _due(self) -> list[str]:
        """Give keys to write now, a bounded number."""
        keys = list(islice(self._new, limits.DIRECTORY_WRITES_MAX))
        now = asyncio.get_running_loop().time()
        for key, lease in self._leases.items():
            if len(keys) >= limits.DIRECTORY_WRITES_MAX or lease.due > now:
                break
            if key not in self._new:
                keys.append(key)
        return keys

    async def _write(self, kv: KeyValue, key: str) -> None:
        lease = self._leases.get(key)
        if lease is None:
            return
        for _ in range(limits.DIRECTORY_TAKEOVER_TRIES_MAX):
            try:
                revision = await self._try_write(kv, key, lease)
            except errors.Conflict:
                lease.revision = None  # somebody else wrote it, or it ended: look again
                continue
            if self._leases.get(key) is lease:
                self._new.pop(key, None)
                if revision is None:
                    self._forget(key, lease)
                    self._superseded(lease.identity)
                    return
                lease.revision = revision
                lease.fresh = False
                lease.due = asyncio.get_running_loop().time() + limits.DIRECTORY_REFRESH_S
                self._leases[key] = self._leases.pop(key)  # to the end: the latest to fall due
            elif key not in self._leases and revision is not None:
                self._removals[key] = revision  # it ended while we wrote
            return
        raise errors.EngineError(f"directory entry {key} is fought over")

    async def _try_write(self, kv: KeyValue, key: str, lease: _Lease) -> int | None:
        """Write the entry and give its revision; None where a newer session has it.

        Raises:
            Conflict: somebody else wrote it meanwhile.
        """
        if lease.revision is not None:
            return await kv.update(key, self._value(lease), lease.revision)
        entry = await kv.get(key)
        if entry is None:
            return await kv.create(key, self._value(lease))
        there = _read(entry.value)
        if there is not None and there.session != lease.identity.session:
            # A session that has just come is the newest because the device is here, unless another can have come while
            # ours waited to be announced; later only clocks can tell.
            waited_ms = (asyncio.get_running_loop().time() - lease.opened_s) * 1000
            clock_ahead = lease.fresh and there.epoch - lease.epoch > waited_ms
            ours = lease.identity
            outdone = ours.older_than(there.login_ms)
            outdoes = there.returned and 0 < there.login_ms < ours.login_ms
            later = there.epoch > lease.epoch and not clock_ahead and not outdoes
            if outdone or later or self._leases.get(key) is not lease:
                return None
            if lease.fresh:
                lease.epoch = max(lease.epoch, there.epoch + 1)
        revision = await kv.update(key, self._value(lease), entry.revision)
        if there is not None and there.node != self._node:
            # So that it ends the older session now; without this it learns of it when it renews its lease.
            await self._engine.publish(subjects.of_node(self._unit, there.node, "taken"), key.encode())
        return revision

    async def _taken(self, message: Message) -> None:
        """Another node says that it took an entry over. Not believed, but looked at: `_write` finds out."""
        key = message.data.decode("ascii", "replace")
        lease = self._leases.get(key)
        if lease is not None:
            lease.revision = None
            lease.fresh = False
            self._new[key] = None
            self._woken.set()

    async def _remove(self, kv: KeyValue, key: str) -> None:
        revision = self._removals[key]
        try:
            await kv.delete(key, revision)
        except errors.Conflict:
            _log.debug("directory entry %s has another owner by now", key)
        if self._removals.get(key) == revision:
            del self._removals[key]

    def _forget(self, key: str, lease: _Lease) -> None:
        del self._leases[key]
        self._new.pop(key, None)
        if lease.revision is not None:
            if len(self._removals) >= limits.DIRECTORY_REMOVALS_MAX:
                del self._removals[next(iter(self._removals))]  # its lease ends it
            self._removals[key] = lease.revision

    def _value(self, lease: _Lease) -> bytes:
        ours = lease.identity
        return msgspec.json.encode(Location(self._node, ours.session, lease.epoch, ours.login_ms, ours.returned))


def _read(value: bytes) -> Location | None:
    """Read an entry; one that is malformed (another version's, say) counts as none."""
    try:
        return _decoder.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


async def _all(work: Iterable[Awaitable[None]]) -> None:
    """Do all side by side, wait for all, and raise the first error."""
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
