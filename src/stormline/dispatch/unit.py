"""A scheduling centre within its unit: it tells the gateways of changed plans, and answers what comes through them.

Each change is told once, exactly, and which versions there are is told again every `limits_platform.NOTICE_BEAT_S`:
a gateway that missed a change, for whatever reason, hears of it then. Several centres of a unit do the same beside
each other; gateways take each change from whoever tells it first.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol

from stormline.appgw import plans, subjects
from stormline.appgw.plans import PlanChange
from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.dispatch.changes import differences
from stormline.dispatch.head import Drained
from stormline.dispatch.health import Part
from stormline.dispatch.rules import RuleSet
from stormline.engine.port import Engine, Handler
from stormline.wire.messages import GATEWAYS

_log = logging.getLogger("stormline.dispatch")

DrainsTold = Callable[[tuple[Drained, ...]], None]
"""Told of all that is out of service by hand."""
Told = Callable[[RuleSet | None, RuleSet], None]
"""Told of new rules: those before (None at the first), and those now."""


class RulesSource(Protocol):
    """Where a centre's rules come from."""

    @property
    def stale(self) -> bool:
        """Whether newer rules may exist."""
        ...

    @property
    def rejects(self) -> Mapping[str, int]:
        """How many rules were refused, by reason."""
        ...

    def for_device(self, device: str, seen: int = 0) -> RuleSet:
        """Give the rules to answer a device from: those being rolled out, where it takes part.

        Args:
            device: its id, empty where it has none.
            seen: newest version it has seen. It takes nothing older, so who has seen what is being rolled out takes
                part, whatever id it has by now.
        """
        ...

    def on_drains(self, told: DrainsTold) -> Callable[[], None]:
        """Have `told` called with what is out of service by hand, now and after each change; give what ends that."""
        ...

    def current(self) -> RuleSet:
        """Give the rules to answer from."""
        ...

    def served(self) -> tuple[RuleSet, ...]:
        """Give every rule set that answers are made from: the current one, then the one being rolled out if any."""
        ...

    def on_change(self, told: Told) -> Callable[[], None]:
        """Have `told` called after each change; give what ends that."""
        ...


class HeldRules:
    """Rules held in memory; whoever has it may put others in."""

    stale = False
    rejects: Mapping[str, int] = {}

    def __init__(self, rules: RuleSet) -> None:
        self._rules = rules
        self._told: dict[int, Told] = {}
        self._next = 0

    def current(self) -> RuleSet:
        """See `RulesSource.current`."""
        return self._rules

    def for_device(self, device: str, seen: int = 0) -> RuleSet:
        """See `RulesSource.for_device`."""
        return self._rules

    def served(self) -> tuple[RuleSet, ...]:
        """See `RulesSource.served`."""
        return (self._rules,)

    def on_drains(self, told: DrainsTold) -> Callable[[], None]:
        """See `RulesSource.on_drains`: here nothing is."""
        told(())
        return lambda: None

    def on_change(self, told: Told) -> Callable[[], None]:
        """See `RulesSource.on_change`."""
        number = self._next
        self._next += 1
        self._told[number] = told

        def end() -> None:
            self._told.pop(number, None)

        return end

    def put(self, rules: RuleSet) -> None:
        """Take other rules, checked ones of a higher version."""
        old, self._rules = self._rules, rules
        for told in list(self._told.values()):
            told(old, rules)


class Announcements:
    """What the gateways have yet to be told. Pure; bounded by the apps there are.

    Args:
        rules: those that hold at the start.
    """

    def __init__(self, rules: RuleSet) -> None:
        self._apps: Mapping[str, frozenset[str]] = rules.apps
        self._versions = dict.fromkeys(rules.apps, rules.version)
        self._due: dict[str, PlanChange] = {}

    def changed(self, old: RuleSet | None, new: RuleSet) -> bool:
        """Take a change of the rules in; False where it changes nothing for anybody.

        The same version again, with rules that differ from `old`, says that these rules now hold for more devices: it
        is told as well.
        """
        self._apps = new.apps
        found = dict.fromkeys(new.apps, ()) if old is None else differences(old, new)
        for app, hosts in found.items():
            since = self._versions.get(app, 0)
            if new.version > since:
                self._versions[app] = new.version
                self._add(PlanChange(app, new.version, since, hosts))
            elif old is not None:
                self._touch(app, hosts or (GATEWAYS, *sorted(new.apps.get(app, ()))))
        for app in self._versions.keys() - new.apps.keys():
            del self._versions[app]  # said once more by what is due, and no more after that
        return bool(self._due)

    def touched(self, parts: Iterable[Part]) -> bool:
        """Take in that these endpoints stand otherwise than before; False where no app has them."""
        named = frozenset(parts)
        hosts = frozenset(part.host for part in named)
        for app, allowed in self._apps.items():
            gateways = (GATEWAYS,) if Part(app=app) in named else ()
            self._touch(app, (*gateways, *sorted(allowed & hosts)))
        return bool(self._due)

    def take(self) -> list[PlanChange]:
        """Give what is due, and forget it."""
        due = list(self._due.values())
        self._due.clear()
        return due

    def give_back(self, changes: Iterable[PlanChange]) -> None:
        """Take back what could not be told."""
        newer = self.take()
        for change in [*changes, *newer]:
            self._add(change)

    def versions(self) -> list[PlanChange]:
        """Give the version of each app, without saying what changed."""
        return [PlanChange(app, version) for app, version in self._versions.items()]

    def _touch(self, app: str, hosts: tuple[str, ...]) -> None:
        version = self._versions.get(app)
        if version is not None and hosts:
            self._add(PlanChange(app, version, version, hosts[: limits.NOTICE_TOUCHED_MAX]))

    def _add(self, change: PlanChange) -> None:
        """Join it with what is due for the app already: all hosts of both, since before the earlier one."""
        earlier = self._due.get(change.app)
        if earlier is not None:
            since = change.since if earlier.since == earlier.version else earlier.since
            if since == change.version:  # no new rules are among it: there is no word for any
                hosts = tuple(sorted({*earlier.hosts, *change.hosts}))[: limits.NOTICE_TOUCHED_MAX]
            else:
                hosts = plans.join_hosts((earlier.hosts, change.hosts))
            change = PlanChange(change.app, change.version, since, hosts)
        self._due[change.app] = change


class UnitLink:
    """The centre's part in its unit, over the engine. Works from the moment the engine is there, and again after it
    was away; nothing of the centre waits for it.

    Args:
        unit: this unit.
        rules: those that hold at the start.
        answer: answers a question: its data is a `wire.plan.PlanRequest` as JSON; the reply's the signed plan.
    """

    def __init__(self, unit: str, *, rules: RuleSet, answer: Handler) -> None:
        self._unit = unit
        self._answer = answer
        self._announcements = Announcements(rules)
        self._wake = asyncio.Event()

    def changed(self, old: RuleSet | None, new: RuleSet) -> None:
        """Tell the gateways of a change of the rules; see `RulesSource.on_change`."""
        if self._announcements.changed(old, new):
            self._wake.set()

    def touched(self, parts: Iterable[Part]) -> None:
        """Tell the gateways that these endpoints stand otherwise than before, under the same rules.

        Such a word is not repeated: whoever misses it learns of it with the next plan.
        """
        if self._announcements.touched(parts):
            self._wake.set()

    async def run(self, connect: Callable[[], Awaitable[Engine]]) -> None:
        """Connect, however long that takes, then answer and tell until cancelled. The engine is closed at the end.

        Args:
            connect: makes the connection; tries for a while, then raises `EngineUnavailable`.
        """
        reason = ""
        while True:
            try:
                engine = await connect()
                break
            except errors.EngineUnavailable as error:
                if str(error) != reason:
                    _log.warning("serving without the engine: %s", error)
                reason = str(error)
                await asyncio.sleep(limits.ENGINE_RECONNECT_PAUSE_MAX_S)
        try:
            await self.serve(engine)
        finally:
            await engine.close()

    async def serve(self, engine: Engine) -> None:
        """Answer and tell over a connected engine until cancelled."""
        subscription = await engine.serve(
            subjects.of_unit(self._unit, plans.QUESTIONS), self._answer, queue=plans.QUEUE
        )
        try:
            await self._tell(engine)
        finally:
            await subscription.close()

    async def _tell(self, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        beat_at = loop.time()
        while True:
            self._wake.clear()
            told = await self._publish(engine, self._announcements.take())
            if not (told and engine.connected):
                beat_at = loop.time()  # what was said while the engine went may be lost: say it again once it is back
                await asyncio.sleep(limits.NOTICE_RETRY_S)
                continue
            if loop.time() >= beat_at:
                await self._publish(engine, self._announcements.versions(), again=False)
                beat_at = loop.time() + limits.NOTICE_BEAT_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(beat_at):
                    await self._wake.wait()

    async def _publish(self, engine: Engine, changes: list[PlanChange], *, again: bool = True) -> bool:
        """Publish; what fails is taken back where it is to be told `again`. Whoever hears a part twice drops it."""
        try:
            for data in plans.encode_changes(changes):
                await engine.publish(subjects.of_unit(self._unit, plans.NOTICES), data)
        except errors.EngineUnavailable:
            if again:
                self._announcements.give_back(changes)
            return False
        return True
