"""The rules a centre answers from: those in the engine, followed as they change, and a copy on disk.

    book = Book(assembled, unit="u1", path=folder / "rules-held.json", clock=clock, rng=rng, connect=connect)
    async with book.following():
        book.current()

A change of the record in the engine is told by a watch and taken at once; many may come as one. Until the new rule set
is read whole and found good, the one before it serves. Without the engine, at the start too, the last good rules are
served from disk, and `stale` says so.

A version never goes back. An engine that lost its data, or came back with older data of the same lineage, is given the
record of whoever remembers the newest, by compare-and-set; one of another lineage is believed.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from stormline.core import errors, ids
from stormline.core import limits_platform as limits
from stormline.core.clock import Clock, Rng
from stormline.dispatch import compare, ledger, rollout
from stormline.dispatch import head as heads
from stormline.dispatch import rules as dispatch_rules
from stormline.dispatch.head import Body, Drained, Head, Note
from stormline.dispatch.ledger import Found, Ledger
from stormline.dispatch.rules import RuleSet
from stormline.engine.port import Change, Engine
from stormline.net.files import write_atomic

_log = logging.getLogger("stormline.dispatch")

T = TypeVar("T")

COPY_FORMAT: Final = "stormline-rules-held/1"
PLATFORM: Final = "platform"
"""Who changes rules where no person does."""

Told = Callable[[RuleSet | None, RuleSet], None]
"""Told of new rules: those before (None at the first), and those now."""
DrainsTold = Callable[[tuple[Drained, ...]], None]
"""Told of all endpoints that are out of service by hand."""
Connect = Callable[[], Awaitable[Engine]]
"""Makes a connection to the engine, trying once."""


class _Copy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file: the record as in the engine, and the bodies it needs, packed."""

    format: str = COPY_FORMAT
    revision: int
    head: bytes
    bodies: dict[str, bytes]


class _Held(NamedTuple):
    """One record and what it names, ready to serve."""

    head: Head
    revision: int
    current: RuleSet
    candidate: RuleSet | None
    packed: dict[str, bytes]


_copy_decoder = msgspec.json.Decoder(_Copy)


class Book:
    """A centre's rules. See the module for its promises; `following` may be used once.

    Args:
        assembled: what the platform's settings say; the first rules, and followed by later ones where an operator left
            them alone.
        unit: this unit.
        path: the copy on disk; None for none.
        clock: for the log of changes.
        rng: for ids.
        connect: makes a connection to the engine; None for a centre without one.
    """

    def __init__(
        self,
        assembled: RuleSet,
        *,
        unit: str,
        path: Path | None,
        clock: Clock,
        rng: Rng,
        connect: Connect | None = None,
    ) -> None:
        self._assembled = assembled
        self._unit = unit
        self._path = path
        self._clock = clock
        self._rng = rng
        self._connect = connect
        self._engine: Engine | None = None
        self._ledger: Ledger | None = None
        self._held: _Held | None = None
        self._newest: Change | None = None
        self._woken = asyncio.Event()
        self._kept_revision = 0
        self._kept = asyncio.Event()
        self._in_step = asyncio.Event()
        self._settings_followed = False
        self._rejected: tuple[int, str] | None = None
        self._told: list[Told] = []
        self._drains_told: list[DrainsTold] = []
        self.problem = ""
        """Why the newest rules are not served, for people; empty where they are."""
        self.rejects: dict[str, int] = {}
        """Rules that were in the engine and not served, by the reason of their `RulesRejected`."""

    # -- what is served -----------------------------------------------------------------------------------------------

    def current(self) -> RuleSet:
        """Give the rules that hold for everybody, a roll-out aside."""
        return self._assembled if self._held is None else self._held.current

    def for_device(self, device: str, seen: int = 0) -> RuleSet:
        """Give the rules to answer a device from; see `RulesSource.for_device`."""
        held = self._held
        if held is None or held.candidate is None or held.head.rollout is None:
            return self.current()
        opened = held.head.rollout
        takes_part = seen >= opened.version or rollout.takes_part(device, opened.version, opened.percent)
        return held.candidate if takes_part else held.current

    def served(self) -> tuple[RuleSet, ...]:
        """Give every rule set that answers are made from: the current one, then the one being rolled out if any."""
        candidate = None if self._held is None else self._held.candidate
        return (self.current(),) if candidate is None else (self.current(), candidate)

    @property
    def stale(self) -> bool:
        """Whether newer rules may exist: the engine is away, or what it has could not be taken."""
        if self._connect is None:
            return self._held is not None
        return not (self._in_step.is_set() and self._engine is not None and self._engine.connected)

    @property
    def head(self) -> Head | None:
        """The record that is served; None before there was one."""
        return None if self._held is None else self._held.head

    @property
    def drains(self) -> tuple[Drained, ...]:
        """Endpoints out of service by hand."""
        return () if self._held is None else self._held.head.drains

    def on_change(self, told: Told) -> Callable[[], None]:
        """Have `told` called after each change of the answers; gives what ends that.

        When a roll-out begins or grows it is told of the rules for all and of those rolled out: these now hold for more
        devices. When one is halted, of those rolled out and of those that hold for all again.
        """
        self._told.append(told)
        return functools.partial(_forget, self._told, told)

    def on_drains(self, told: DrainsTold) -> Callable[[], None]:
        """Have `told` called with all drains, now and after each change of them; gives what ends that."""
        self._drains_told.append(told)
        told(self.drains)
        return functools.partial(_forget, self._drains_told, told)

    def ledger(self) -> Ledger:
        """Give the rules in the engine, to change them.

        Raises:
            EngineUnavailable: there is no engine, or it is away.
        """
        if self._ledger is None or self._engine is None or not self._engine.connected:
            away = "there is no engine" if self._connect is None else "the engine is away"
            raise errors.EngineUnavailable(f"{away}: rules are served, and cannot be changed")
        return self._ledger

    async def settled(self, revision: int) -> bool:
        """Wait until the record of `revision` or a later one is served here and kept on disk.

        Returns:
            False where that takes longer than `limits.RULES_SETTLE_S`.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.RULES_SETTLE_S):
                while self._kept_revision < revision:
                    self._kept.clear()
                    await self._kept.wait()
                return True
        return False

    async def read(self, body: Body, version: int) -> RuleSet:
        """Give a rule set that is kept, from memory or from the engine.

        Raises:
            EngineError: it is in the engine, and cannot be read.
            ConfigError: what is there is damaged, or not understood by this version.
        """
        held = self._held
        rules = _known(held, body, version) if held is not None else None
        if rules is not None:
            return rules
        packed = held.packed.get(body.id) if held is not None else None
        return await self._decode(body, packed or await self.ledger().read(body), version)

    # -- following ----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow the engine while the block runs.

        It is entered once the engine's rules are served, or after `limits.RULES_FIRST_WAIT_S` with those on disk, or
        with what the settings say where there are none.
        """
        self._load()
        task = None
        if self._connect is not None:
            task = asyncio.create_task(self._follow(self._connect), name="dispatch book")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limits.RULES_FIRST_WAIT_S):
                    await self._in_step.wait()
            if not self._in_step.is_set():
                _log.warning("serving rules of version %d without the engine", self.current().version)
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
            await self._leave()

    async def _follow(self, connect: Connect) -> None:
        """Follow for ever: a fault of ours costs a pause, never the rules."""
        while True:
            try:
                await self._follow_once(connect)
            except Exception:
                _log.exception("following the rules failed; it begins anew")
            await self._leave()
            await asyncio.sleep(limits.ENGINE_RECONNECT_PAUSE_MAX_S)

    async def _follow_once(self, connect: Connect) -> None:
        engine = self._engine = await self._persist(connect)
        keys = await self._persist(lambda: engine.kv(ledger.bucket(self._unit), persistent=True))
        self._ledger = Ledger(keys, rng=self._rng)
        self._woken.set()  # an empty bucket has no change to tell of
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_up(self._ledger), name="dispatch book reader")
            group.create_task(self._sweep(self._ledger), name="dispatch book sweep")
            async with contextlib.aclosing(keys.watch(ledger.HEAD_PREFIX)) as changes:
                async for change in changes:
                    if change.key == ledger.HEAD_KEY:
                        self._newest = change
                        self._woken.set()

    async def _leave(self) -> None:
        engine, self._engine, self._ledger = self._engine, None, None
        self._in_step.clear()
        if engine is not None:
            await engine.close()

    async def _persist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try until it works."""
        while True:
            try:
                return await attempt()
            except (errors.EngineError, errors.ConfigError) as error:
                self._out_of_step(error)
                await asyncio.sleep(limits.ENGINE_RECONNECT_PAUSE_MAX_S / 4)

    async def _keep_up(self, source: Ledger) -> None:
        pause_s = limits.RULES_RETRY_PAUSE_S
        while True:
            await self._woken.wait()
            self._woken.clear()
            try:
                await self._take(source)
            except errors.Conflict as error:
                _log.info("another centre was first: %s", error)
                self._woken.set()
            except errors.RulesRejected as error:
                self._reject(error)
                self._out_of_step(error)
                await self._pause(limits.RULES_REJECTED_PAUSE_S)
            except (errors.EngineError, errors.ConfigError) as error:
                self._out_of_step(error)
                await self._pause(pause_s)
                pause_s = min(2 * pause_s, limits.ENGINE_RECONNECT_PAUSE_MAX_S)
            else:
                pause_s = limits.RULES_RETRY_PAUSE_S
                self.problem = ""
                self._in_step.set()

    async def _pause(self, longest_s: float) -> None:
        """Wait before the next look, or until something changes; not as long as every other centre."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s * (0.5 + 0.5 * self._rng.random())):
                await self._woken.wait()
        self._woken.set()

    def _reject(self, error: errors.RulesRejected) -> None:
        """Count it, once however often it is looked at."""
        what = (self._newest.revision if self._newest is not None else 0, str(error))
        if what != self._rejected:
            self._rejected = what
            self.rejects[error.reason] = self.rejects.get(error.reason, 0) + 1

    async def _sweep(self, source: Ledger) -> None:
        """Remove once what writers that died left; not before there is something to serve."""
        await self._in_step.wait()
        try:
            count = await source.sweep()
        except errors.StormlineError as error:
            _log.debug("sweep of rules put off to the next start: %s", error)
        else:
            if count:
                _log.info("removed %d chunks of rules that nobody published", count)

    def _out_of_step(self, error: errors.StormlineError) -> None:
        self._in_step.clear()
        if str(error) != self.problem:
            _log.warning("serving rules of version %d, maybe not the newest: %s", self.current().version, error)
            self.problem = str(error)

    async def _take(self, source: Ledger) -> None:
        """Serve what the engine has, or give it what it lacks."""
        newest = self._newest
        found = await source.find()
        if newest is not None and newest.value is not None and (found is None or newest.revision > found.revision):
            found = Found(heads.decode(newest.value), newest.revision)  # a read may lag in a cluster, a watch does not
        held = self._held
        if found is None:
            await self._begin(source)
        elif held is not None and held.head.lineage == found.head.lineage and found.head.version < held.head.version:
            versions = f"version {found.head.version}, while {held.head.version} is served"
            self._reject(errors.RulesRejected("older", f"rules in the engine: {versions}"))
            await self._restore(source, held, found)
        elif held is None or held.head != found.head:
            await self._serve(source, found)
        elif held.revision != found.revision:
            self._set(held._replace(revision=found.revision))
            self._tell_kept(found.revision)
        if not self._settings_followed:
            await self._follow_settings(source)
            self._settings_followed = True

    # -- writing ------------------------------------------------------------------------------------------------------

    async def _begin(self, source: Ledger) -> None:
        """Give an empty engine its first rules: those of the copy on disk, else those of the settings."""
        self._newest = None
        if self._held is not None:
            await self._restore(source, self._held, None)
            return
        version = self._assembled.version
        body = await self._write(source, self._assembled, version)
        head = heads.first(body, version, ids.new_id(self._rng), self._note("first start"))
        try:
            revision = await source.create(head)
        except errors.Conflict:
            await source.remove([body])
            raise
        _log.info("first rules published: version %d", version)
        await self._serve(source, Found(head, revision))

    async def _restore(self, source: Ledger, held: _Held, found: Found | None) -> None:
        """Give the engine back what it lost."""
        there = {} if found is None else found.head.bodies()
        written = {}
        for name, body in heads.needed(held.head).items():
            if name not in there:
                written[name] = await source.write(
                    held.packed[name], version=held.head.version, size=body.size, content_digest=body.digest
                )
        why = "the engine had none" if found is None else f"the engine had version {found.head.version}"
        head = heads.restored(held.head, there | written, self._note(why))
        try:
            revision = await source.create(head) if found is None else await source.move(head, found)
        except errors.Conflict:
            await source.remove(written.values())
            raise
        _log.warning("rules of version %d given back to the engine: %s", held.head.version, why)
        await self._serve(source, Found(head, revision))

    async def _follow_settings(self, source: Ledger) -> None:
        """Take changed settings into the rules, where an operator did not change the same."""
        assert self._held is not None  # noqa: S101 - `_take` has served something
        head, ours = self._held.head, self._held.current
        data = compare.content(self._assembled)
        if head.assembled.digest == ledger.digest(data):
            return
        if head.rollout is not None:
            _log.warning("settings changed while a roll-out is open: rules are left as they are until the next start")
            return
        base = await self.read(head.assembled, 1)
        try:
            merged = dispatch_rules.check(compare.merge(base, self._assembled, ours))
        except errors.ConfigError as error:
            _log.warning("changed settings do not fit the rules, which are left as they are: %s", error)
            merged = ours
        version = head.version + 1
        assembled = await self._write(source, self._assembled, version)
        if compare.content(merged) == data:
            body = assembled
        else:
            body = await self._write(source, merged, version)
        note = self._note("settings changed")

        def change(now: Head) -> Head:
            if merged == ours:
                return heads.reassembled(now, assembled)
            heads.check_version(now, head.version)
            return heads.resettle(now, body, assembled, note)

        try:
            found = await source.commit(change)
        except (errors.Conflict, errors.RequestRefused) as error:
            await source.remove({each.id: each for each in (assembled, body)}.values())
            raise errors.Conflict(str(error)) from error
        if body.id not in found.head.bodies():
            await source.remove([body])
        await self._serve(source, found)

    async def _write(self, source: Ledger, rules: RuleSet, version: int) -> Body:
        content = compare.content(rules)
        packed = await ledger.beside(len(content), lambda: ledger.pack(content))
        return await source.write(packed, version=version, size=len(content), content_digest=ledger.digest(content))

    def _note(self, why: str) -> Note:
        return Note(who=PLATFORM, why=why, at=int(self._clock.wall()))

    # -- serving ------------------------------------------------------------------------------------------------------

    async def _serve(self, source: Ledger, found: Found) -> None:
        """Read what a record names, serve it, and keep a copy."""
        head = found.head
        packed = {} if self._held is None else dict(self._held.packed)
        wanted = heads.needed(head)
        for name, body in wanted.items():
            if name not in packed:
                packed[name] = await source.read(body)
        held = await self._ready(head, found.revision, {name: packed[name] for name in wanted})
        self._set(held)
        await self._keep_copy(held)
        self._tell_kept(found.revision)

    def _tell_kept(self, revision: int) -> None:
        self._kept_revision = revision
        self._kept.set()

    async def _ready(self, head: Head, revision: int, packed: dict[str, bytes]) -> _Held:
        async def rules(version: int) -> RuleSet:
            body = head.body(version)
            known = None if self._held is None else _known(self._held, body, version)
            return known or await self._decode(body, packed[body.id], version)

        candidate = None if head.rollout is None else await rules(head.rollout.version)
        return _Held(head, revision, await rules(head.current), candidate, packed)

    async def _decode(self, body: Body, packed: bytes, version: int) -> RuleSet:
        def work() -> RuleSet:
            try:
                return dispatch_rules.decode(ledger.unpack(packed, body), where=f"rules of version {version}")
            except errors.ConfigError:
                raise
            except Exception as error:  # a fault of the checks must not have every centre begin anew without end
                _log.exception("rules of version %d could not be checked", version)
                raise errors.RulesRejected("fault", f"rules of version {version}: {error!r}") from error

        rules = await ledger.beside(body.size, work)
        return msgspec.structs.replace(rules, version=version, unit=self._unit)

    def _set(self, held: _Held) -> None:
        """Serve it, and tell of what changed."""
        before, self._held = self._held, held
        for old, new in _changes(before, self._assembled, held):
            _log.info("rules of version %d are served", new.version)
            for told in list(self._told):
                _tell(told, old, new)
        if held.head.drains != (() if before is None else before.head.drains):
            for drains_told in list(self._drains_told):
                _tell(drains_told, held.head.drains)

    # -- the copy on disk ---------------------------------------------------------------------------------------------

    def _load(self) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("rb") as file:
                data = file.read(limits.RULES_HELD_BYTES_MAX + 1)
            if len(data) > limits.RULES_HELD_BYTES_MAX:
                raise errors.ConfigError("too large")
            copy = _copy_decoder.decode(data)
            if copy.format != COPY_FORMAT:
                raise errors.ConfigError(f"format {copy.format[:40]!r}")
            head = heads.decode(copy.head)
            wanted = heads.needed(head)
            sets = {}
            for version in {head.current, head.rollout.version if head.rollout else head.current}:
                body = head.body(version)
                rules = dispatch_rules.decode(ledger.unpack(copy.bodies[body.id], body), where=str(self._path))
                sets[version] = msgspec.structs.replace(rules, version=version, unit=self._unit)
            packed = {name: copy.bodies[name] for name in wanted}
        except FileNotFoundError:
            return
        except (OSError, KeyError, msgspec.MsgspecError, UnicodeDecodeError, errors.ConfigError) as error:
            _log.warning("%s: no copy of the rules that can be served: %s", self._path, error)
            return
        candidate = sets[head.rollout.version] if head.rollout else None
        self._set(_Held(head, 0, sets[head.current], candidate, packed))  # revisions are the engine's own

    async def _keep_copy(self, held: _Held) -> None:
        if self._path is None:
            return
        path = self._path
        copy = _Copy(revision=held.revision, head=heads.encode(held.head), bodies=held.packed)

        def write() -> None:
            write_atomic(path, msgspec.json.encode(copy), mode=0o600)

        try:
            await asyncio.to_thread(write)  # it waits for the disk
        except OSError as error:
            _log.warning("%s: no copy of the rules kept: %s", path, error.strerror)


def _known(held: _Held, body: Body, version: int) -> RuleSet | None:
    """Give a rule set that is in memory already, under another version maybe."""
    for rules in (held.current, held.candidate):
        if rules is not None and held.head.body(rules.version).id == body.id:
            return msgspec.structs.replace(rules, version=version)
    return None


def _changes(before: _Held | None, assembled: RuleSet, now: _Held) -> list[tuple[RuleSet | None, RuleSet]]:
    """Give the changes of the answers as pairs, see `Book.on_change`."""
    found: list[tuple[RuleSet | None, RuleSet]] = []
    current = assembled if before is None else before.current
    if now.current != current:
        found.append((current, now.current))
        if before is not None and before.candidate is not None and before.candidate.version != now.current.version:
            found.append((before.candidate, now.current))
    if now.candidate is not None and now.head.rollout is not None:
        opened = None if before is None else before.head.rollout
        step = (now.head.rollout.version, now.head.rollout.percent)
        if opened is None or (opened.version, opened.percent) != step:
            found.append((now.current, now.candidate))
    return found


def _tell(told: Callable[..., None], *what: object) -> None:
    try:
        told(*what)
    except Exception:
        _log.exception("a listener for rules failed")


def _forget(listeners: list[Callable[..., None]], told: Callable[..., None]) -> None:
    with contextlib.suppress(ValueError):
        listeners.remove(told)
