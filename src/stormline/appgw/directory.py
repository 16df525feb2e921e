"""The directory: on which node each device has its session, kept in the engine for all nodes of a unit.

A session costs one write when it begins and one when it ends; what is in between costs nothing (`appgw.record` has the
layout, `appgw.nodes` says which nodes live). Entries are written by compare-and-set only, so two nodes never undo each
other's work unseen:

- a session that has just been opened takes the entry over, whoever had it;
- one that is announced late or again (the engine was away) yields to a newer one, and its node is told so;
- one whose client came back after another has logged in as the same device yields to that one's, always;
- an ended session marks only what it wrote itself as ended: a late end never touches a newer session.

Sessions do not wait for any of this: `opened` and `closed` only note what is to be done.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple, Protocol

from stormline.appgw import record, subjects
from stormline.appgw.nodes import Count
from stormline.appgw.port import Identity
from stormline.appgw.record import UNKNOWN, About, Record, key_of, user_key_of
from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.clock import Clock
from stormline.core.ids import from_subject_token, subject_token
from stormline.engine.port import Entry, KeyValue, Listener, Message, Subscription

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


class Watcher(Protocol):
    """Who is told of devices that come and go, once the entry says so; see `appgw.presence_events`."""

    async def online(self, key: str, app: str, device: str, entry: Record) -> None:
        """A session has begun, and has the entry at `key`. Never raises."""
        ...

    async def offline(self, key: str, app: str, device: str, entry: Record, reason: str) -> None:
        """The session that had the entry has ended. Never raises."""
        ...


class Journal(Protocol):
    """Who keeps a list of this node's entries for those who clear up behind it; see `appgw.journal`."""

    def add(self, key: str) -> None:
        """An entry is written for a session here."""
        ...

    def drop(self, key: str) -> None:
        """It is a session's no more."""
        ...

    async def work(self, kv: KeyValue) -> None:
        """Write what is new."""
        ...

    def again(self) -> None:
        """The engine has lost its memory: all is new."""
        ...


class Held(NamedTuple):
    """A session of this node, as it is announced."""

    identity: Identity
    about: About
    epoch: int


class _Lease:
    """One session of this node, and the revision at which its entry was written last."""

    __slots__ = ("about", "due", "epoch", "fresh", "identity", "indexed_ms", "opened_s", "revision", "told")

    def __init__(self, identity: Identity, about: About, epoch: int, now: float) -> None:
        self.identity = identity
        self.about = about
        self.epoch = epoch
        self.fresh = True  # just opened, and not announced yet
        self.told = False  # watchers know that it is online
        self.due = self.opened_s = now
        self.revision: int | None = None
        self.indexed_ms = 0


class _End(NamedTuple):
    """A session that has ended, and the revision of its entry."""

    lease: _Lease
    revision: int
    seen_ms: int


def _always(node: str, run: str, epoch_ms: int) -> bool:
    return True


class Directory:
    """This node's part of the directory, and lookups in all of it.

    Args:
        engine: where it is kept; may be away at any time.
        unit: this unit; each has a directory of its own.
        node: this node.
        run: this start of it.
        clock: wall time, for epochs.
        superseded: told when a session of this node turns out to be older than one elsewhere. It should be closed.
        alive: see `appgw.nodes.Nodes.alive`.
        watcher: told of sessions that come and go; None for nobody.
        journal: keeps a list of what this node holds; None for none.
    """

    def __init__(
        self,
        engine: Buckets,
        *,
        unit: str,
        node: str,
        run: str = "",
        clock: Clock,
        superseded: Callable[[Identity], None],
        alive: Callable[[str, str, int], bool] = _always,
        watcher: Watcher | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._engine = engine
        self._bucket = record.bucket_of(unit)
        self._unit = unit
        self._node = node
        self._run = run
        self._node_key = f"n.{subject_token(node)}"
        self._node_due = 0.0
        self._clock = clock
        self._superseded = superseded
        self._alive = alive
        self._watcher = watcher
        self._journal = journal
        self._kv: KeyValue | None = None
        self._leases: dict[str, _Lease] = {}  # in the order of their due times, but for those in _new
        self._new: dict[str, None] = {}
        self._ends: dict[str, _End] = {}
        self._abouts: dict[About, About] = {}
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._woken = asyncio.Event()
        self._well = True
        self._worked_s: float | None = None

    def __len__(self) -> int:
        """Sessions of this node it announces."""
        return len(self._leases)

    def held(self) -> Iterator[tuple[str, Held]]:
        """Give the sessions of this node by their keys; none may come or go meanwhile."""
        for key, lease in self._leases.items():
            yield key, Held(lease.identity, lease.about, lease.epoch)

    def counts(self) -> dict[str, Count]:
        """Count the sessions of this node by app, version and network."""
        found: dict[str, Count] = {}
        for (app, version, network), number in self._counts.most_common():
            count = found.setdefault(app, Count(0, {}, {}))
            count.devices += number
            count.networks[network] = count.networks.get(network, 0) + number
            if len(count.versions) >= limits.PRESENCE_VERSIONS_MAX and version not in count.versions:
                version = "other"
            count.versions[version] = count.versions.get(version, 0) + number
        return found

    # -- for the sessions ----------------------------------------------------------------------------------------

    def opened(self, identity: Identity, about: About = UNKNOWN) -> None:
        """Note a new session; it replaces an earlier one of the same device."""
        key = key_of(identity.app, identity.device)
        earlier = self._leases.pop(key, None)
        if earlier is not None:
            self._count(earlier, -1)
        lease = _Lease(identity, self._shared(about), int(self._clock.wall() * 1000), asyncio.get_running_loop().time())
        self._leases[key] = lease
        self._count(lease, 1)
        self._new[key] = None
        self._woken.set()

    def closed(self, identity: Identity) -> None:
        """Note the end of a session. Does nothing where the device has a newer one here."""
        key = key_of(identity.app, identity.device)
        lease = self._leases.get(key)
        if lease is not None and lease.identity.session == identity.session:
            self._forget(key, lease)
            self._woken.set()

    def described(self, identity: Identity, about: About) -> None:
        """Note what a device says of itself now: it is on another network, say. Written where it has changed."""
        key = key_of(identity.app, identity.device)
        lease = self._leases.get(key)
        if lease is None or lease.identity.session != identity.session or lease.about == about:
            return
        self._count(lease, -1)
        lease.about = self._shared(about)
        self._count(lease, 1)
        self._new[key] = None
        self._woken.set()

    def bound(self, identity: Identity) -> None:
        """Note that a session is another user's now: those who watch hear that he is online."""
        key = key_of(identity.app, identity.device)
        lease = self._leases.get(key)
        if lease is None or lease.identity.session != identity.session:
            return
        lease.identity = identity
        lease.indexed_ms = 0
        lease.told = False
        self._new[key] = None
        self._woken.set()

    def _shared(self, about: About) -> About:
        """Give the same object for the same words: a thousand devices share them."""
        known = self._abouts.get(about)
        if known is None:
            if len(self._abouts) >= limits.PRESENCE_ABOUTS_MAX:
                self._abouts.clear()
            known = self._abouts[about] = about
        return known

    def _count(self, lease: _Lease, change: int) -> None:
        key = (lease.identity.app, lease.about.version, lease.about.network)
        self._counts[key] += change
        if not self._counts[key]:
            del self._counts[key]

    # -- for the callers -----------------------------------------------------------------------------------------

    async def lookup(self, app: str, device: str) -> Record | None:
        """Say where a device is, None where it is nowhere. Of another node's sessions it learns a moment later.

        Raises:
            EngineError: the engine is away, or does not answer, and the device is not here.
            ConfigError: a name is empty or too long.
        """
        entry = await self.last(app, device)
        return entry if entry is not None and entry.online else None

    async def last(self, app: str, device: str) -> Record | None:
        """Give a device's newest session, also one that has ended; None where none is known.

        Raises:
            EngineError: the engine is away, or does not answer, and the device is not here.
            ConfigError: a name is empty or too long.
        """
        key = key_of(app, device)
        here = self._leases.get(key)
        try:
            there = self.judge(await (await self._open()).get(key))
        except errors.EngineError:
            if here is None:
                raise
            there = None
        # A session that has just come here is not in the directory yet.
        if here is not None and (there is None or not there.online or there.epoch < here.epoch):
            return self._record(here)
        return there

    async def of_user(self, app: str, user: str) -> dict[str, Record]:
        """Give the newest sessions of the devices where a user is, or was last, logged in, by device.

        Raises:
            EngineError: the engine is away, does not answer, or the user has too many devices.
            ConfigError: a name is empty or too long.
        """
        kv = await self._open()
        tokens = [key.rpartition(".")[2] for key in await kv.under(user_key_of(app, user))]
        prefix = f"d.{subject_token(app)}."
        entries = await kv.get_many([prefix + token for token in tokens])
        found = {token: self.judge(entries.get(prefix + token)) for token in tokens}
        return {
            from_subject_token(token): entry
            for token, entry in found.items()
            if entry is not None and entry.user == user
        }

    def judge(self, entry: Entry | None) -> Record | None:
        """Read an entry; a session of a node that does not live any more has ended."""
        there = None if entry is None else record.read(entry.value)
        if there is not None and there.online and not self._alive(there.node, there.run, there.epoch):
            return record.ended(there, there.seen_ms)
        return there

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
        """Write once what is to be written now: the ends of a node that stops.

        Raises:
            EngineError: the engine is away.
        """
        await self._work()

    # -- inside --------------------------------------------------------------------------------------------------

    async def _open(self) -> KeyValue:
        if self._kv is None:
            try:
                self._kv = await self._engine.kv(self._bucket, persistent=False, ttl_s=limits.DIRECTORY_LIFE_S)
            except errors.ConfigError as error:  # another version made it: wait until it is gone
                raise errors.EngineError(str(error)) from error
        return self._kv

    async def _work(self) -> None:
        kv = await self._open()
        await self._announce_node(kv)
        while keys := list(islice(self._ends, limits.DIRECTORY_WRITES_MAX)):
            await _all(self._end(kv, key) for key in keys)
        while keys := self._due():
            await self._write_all(kv, keys)
        if self._journal is not None:
            await self._journal.work(kv)
        self._worked_s = asyncio.get_running_loop().time()

    async def _announce_node(self, kv: KeyValue) -> None:
        """Write the node's own key. Where it is gone before its time the engine has lost its memory: the entries are
        gone with it and are written again. Revisions begin anew then, so those we know could name others' writes. Where
        we were away for long, others may have held us for dead, and have said so in our entries."""
        now = asyncio.get_running_loop().time()
        there = await kv.get(self._node_key)
        away = self._worked_s is not None and now - self._worked_s > limits.DIRECTORY_AWAY_S
        if there is None or now >= self._node_due:
            await kv.put(self._node_key, b"")
            self._node_due = now + limits.DIRECTORY_REFRESH_S
        if there is not None and not away:
            return
        if there is None:
            self._ends.clear()
            if self._journal is not None:
                self._journal.again()
        for key, lease in self._leases.items():
            lease.revision = None
            if there is None:
                lease.indexed_ms = 0
            self._new[key] = None
        self._worked_s = now
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

    async def _write_all(self, kv: KeyValue, keys: list[str]) -> None:
        unknown = [key for key in keys if key in self._leases and self._leases[key].revision is None]
        there: dict[str, Entry] | None = None
        if len(unknown) >= limits.DIRECTORY_READS_MIN:
            there = await kv.get_many(unknown)
        await _all(self._write(kv, key, there) for key in keys)

    async def _write(self, kv: KeyValue, key: str, read: dict[str, Entry] | None) -> None:
        lease = self._leases.get(key)
        if lease is None:
            self._new.pop(key, None)
            return
        for _ in range(limits.DIRECTORY_TAKEOVER_TRIES_MAX):
            try:
                written = await self._try_write(kv, key, lease, read)
            except errors.Conflict:
                lease.revision = read = None  # somebody else wrote it, or it ended: look again
                continue
            if self._leases.get(key) is lease:
                self._new.pop(key, None)
                if written is None:
                    self._forget(key, lease)
                    self._superseded(lease.identity)
                    return
                lease.revision = written
                lease.fresh = False
                lease.due = asyncio.get_running_loop().time() + limits.DIRECTORY_REFRESH_S
                self._leases[key] = self._leases.pop(key)  # to the end: the latest to fall due
                if self._journal is not None:
                    self._journal.add(key)
                if self._watcher is not None and not lease.told:
                    lease.told = True
                    await self._watcher.online(key, lease.identity.app, lease.identity.device, self._record(lease))
            elif key not in self._leases and written is not None:
                self._ends[key] = _End(lease, written, int(self._clock.wall() * 1000))  # it ended while we wrote
            return
        raise errors.EngineError(f"directory entry {key} is fought over")

    async def _try_write(self, kv: KeyValue, key: str, lease: _Lease, read: dict[str, Entry] | None) -> int | None:
        """Write the entry and give its revision; None where a newer session has it.

        Raises:
            Conflict: somebody else wrote it meanwhile.
        """
        if lease.revision is not None:
            await self._index(kv, lease)
            return await kv.update(key, record.encode(self._record(lease)), lease.revision)
        entry = await kv.get(key) if read is None else read.get(key)
        there = self.judge(entry)
        taken = False
        if there is not None:
            if there.session != lease.identity.session:
                if there.online:
                    # A session that has just come is the newest because the device is here, unless another can have
                    # come while ours waited to be announced; later only clocks can tell.
                    waited_ms = (asyncio.get_running_loop().time() - lease.opened_s) * 1000
                    clock_ahead = lease.fresh and there.epoch - lease.epoch > waited_ms
                    ours = lease.identity
                    outdone = ours.older_than(there.login_ms)
                    outdoes = there.returned and 0 < there.login_ms < ours.login_ms
                    later = there.epoch > lease.epoch and not clock_ahead and not outdoes
                    if outdone or later or self._leases.get(key) is not lease:
                        return None
                    taken = there.node != self._node
                if lease.fresh or not there.online:
                    lease.epoch = max(lease.epoch, there.epoch + 1)
            elif not there.online:  # we were held for dead
                lease.epoch = max(lease.epoch, there.epoch + 1)
                lease.told = False
            if there.user == lease.identity.user:
                lease.indexed_ms = max(lease.indexed_ms, there.indexed_ms)
        await self._index(kv, lease)
        value = record.encode(self._record(lease))
        revision = await (kv.create(key, value) if entry is None else kv.update(key, value, entry.revision))
        if taken and there is not None:
            # So that it ends the older session now; without this it learns of it at its end.
            await self._engine.publish(subjects.of_node(self._unit, there.node, "taken"), key.encode())
        return revision

    async def _index(self, kv: KeyValue, lease: _Lease) -> None:
        """Write that the user was on the device, where that is not known or will soon be forgotten."""
        who, now_ms = lease.identity, int(self._clock.wall() * 1000)
        if who.user and now_ms - lease.indexed_ms >= limits.DIRECTORY_REFRESH_S * 1000:
            await kv.put(user_key_of(who.app, who.user, who.device), b"")
            lease.indexed_ms = now_ms

    async def _taken(self, message: Message) -> None:
        """Another node says that it took an entry over. Not believed, but looked at: `_write` finds out."""
        key = message.data.decode("ascii", "replace")
        lease = self._leases.get(key)
        if lease is not None:
            lease.revision = None
            lease.fresh = False
            self._new[key] = None
            self._woken.set()

    async def _end(self, kv: KeyValue, key: str) -> None:
        end = self._ends[key]
        entry = record.ended(self._record(end.lease), end.seen_ms)
        try:
            await kv.update(key, record.encode(entry), end.revision)
        except errors.Conflict:
            _log.debug("directory entry %s has another owner by now", key)
        else:
            if self._watcher is not None:
                who = end.lease.identity
                await self._watcher.offline(key, who.app, who.device, entry, "ended")
        if self._ends.get(key) is end:
            del self._ends[key]

    def _forget(self, key: str, lease: _Lease) -> None:
        del self._leases[key]
        self._count(lease, -1)
        self._new.pop(key, None)
        if self._journal is not None:
            self._journal.drop(key)
        if lease.revision is not None:
            if len(self._ends) >= limits.DIRECTORY_ENDS_MAX:
                del self._ends[next(iter(self._ends))]
            self._ends[key] = _End(lease, lease.revision, int(self._clock.wall() * 1000))

    def _record(self, lease: _Lease) -> Record:
        return Record(
            self._node,
            self._run,
            lease.identity.session,
            lease.epoch,
            True,
            lease.identity.user,
            lease.about,
            int(self._clock.wall() * 1000),
            lease.indexed_ms,
            lease.identity.login_ms,
            lease.identity.returned,
        )


async def _all(work: Iterable[Awaitable[None]]) -> None:
    """Do all side by side, wait for all, and raise the first error."""
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
