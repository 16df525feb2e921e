"""Changing the rules: checked whole before anything is written, against the newest record, with who and why.

Every method raises `RequestRefused` with a code that callers act on:

| code | meaning |
| --- | --- |
| `rules-invalid` | not a rule set, or one that contradicts itself |
| `too-large` | more than `limits.RULES_BYTES_MAX` |
| `no-live-endpoint` | a changed host or app has endpoints and none answers, or no app is left; may be forced |
| `changed` | it was made from another version than the newest |
| `unchanged` | nothing would change |
| `rollout-open`, `no-rollout` | a roll-out is open, or none is |
| `not-found` | no such version or drain is kept |
| `unavailable` | the engine is away; where `maybe` is said, look at the log before trying again |
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.clock import Clock
from stormline.dispatch import compare, health, ledger, rollout
from stormline.dispatch import head as heads
from stormline.dispatch import rules as dispatch_rules
from stormline.dispatch.book import Book
from stormline.dispatch.compare import Differences
from stormline.dispatch.head import Body, Drained, Head, Note
from stormline.dispatch.health import Drains
from stormline.dispatch.ledger import Found, Ledger
from stormline.dispatch.probing import Try
from stormline.dispatch.rollout import Counts, GuardPolicy, Judgement
from stormline.dispatch.rules import RuleSet

_log = logging.getLogger("stormline.dispatch")


class Changed(NamedTuple):
    """What a change did, or would do.

    Attributes:
        head: the record after it; before it where it was only tried.
        differences: between the rules that held for all and the new ones.
        dead: hosts and apps without a live endpoint; only where that was forced or only tried.
        served: whether this centre answers by it already.
    """

    head: Head
    differences: Differences
    dead: tuple[str, ...] = ()
    served: bool = True


class Author(NamedTuple):
    """Who changes something, and why."""

    who: str
    why: str


class Editor:
    """Changes the rules of a unit. One instance serves any number of requests side by side.

    Args:
        book: the rules this centre serves.
        unit: this unit.
        clock: for the log.
        ill: tries the endpoints of what is about to be published; None: they are not tried.
        guard: when a roll-out is halted.
        renew: puts right what rules that are given may have of the past; None: they are taken as they are.
    """

    def __init__(
        self,
        book: Book,
        *,
        unit: str,
        clock: Clock,
        ill: Try | None = None,
        guard: GuardPolicy | None = None,
        renew: Callable[[RuleSet], RuleSet] | None = None,
    ) -> None:
        self._book = book
        self._unit = unit
        self._clock = clock
        self._ill = ill
        self._guard = guard or GuardPolicy()
        self._renew = renew

    @property
    def book(self) -> Book:
        """The rules this centre serves."""
        return self._book

    # -- reading ------------------------------------------------------------------------------------------------------

    def head(self) -> Head:
        """Give the record that is served here.

        Raises:
            RequestRefused: there is none: this centre has never had an engine.
        """
        head = self._book.head
        if head is None:
            raise errors.RequestRefused("unavailable", "this centre serves what its settings say: it has no engine yet")
        return head

    async def rules(self, version: int | None) -> RuleSet:
        """Give a version's rules; None for those that hold for all.

        Raises:
            RequestRefused: the version is not kept, or the engine that has it is away.
        """
        if version is None:
            return self._book.current()
        return await self._read(self.head().body(version), version)

    async def compare(self, old: int | None, new: int | None) -> Differences:
        """Say what differs between two versions; None stands for the one that holds for all."""
        return compare.diff(await self.rules(old), await self.rules(new))

    async def _read(self, body: Body, version: int) -> RuleSet:
        try:
            return await self._book.read(body, version)
        except errors.EngineError as error:
            raise _unavailable(error) from error
        except errors.ConfigError as error:
            raise errors.RequestRefused("internal", str(error)) from error

    # -- changing -----------------------------------------------------------------------------------------------------

    async def check(self, data: bytes) -> RuleSet:
        """Read a rule set and check all that can be checked without looking outside.

        Raises:
            RequestRefused: `too-large` or `rules-invalid`.
        """
        if len(data) > limits.RULES_BYTES_MAX:
            raise errors.RequestRefused("too-large", f"a rule set has at most {limits.RULES_BYTES_MAX} bytes")
        try:
            rules = await ledger.beside(len(data), lambda: dispatch_rules.decode(data))
        except errors.ConfigError as error:
            raise errors.RequestRefused("rules-invalid", str(error)) from error
        if rules.unit not in ("", self._unit):
            raise errors.RequestRefused(
                "rules-invalid", f"rules: they are for unit {rules.unit!r}, this is {self._unit!r}"
            )
        rules = msgspec.structs.replace(rules, unit=self._unit)
        rules = rules if self._renew is None else self._renew(rules)
        size = len(compare.content(rules))
        if size > limits.RULES_BYTES_MAX:  # as given it may have been written more tightly than it is kept
            raise errors.RequestRefused(
                "too-large", f"as it is kept it has {size} bytes, a rule set has at most {limits.RULES_BYTES_MAX}"
            )
        return rules

    async def publish(
        self,
        data: bytes,
        author: Author,
        *,
        expected: int | None,
        steps: tuple[float, ...] = (),
        force: bool = False,
        dry_run: bool = False,
    ) -> Changed:
        """Give everybody new rules, or the first share of the devices.

        Args:
            data: the rule set as JSON.
            author: who and why.
            expected: the version it was made from; None for any.
            steps: shares of a staged roll-out, in percent; none for everybody at once.
            force: publish also where a host has no live endpoint.
            dry_run: check everything, write nothing.
        """
        rules = await self.check(data)
        head = await self._newest()
        heads.check_no_rollout(head)
        heads.check_version(head, expected)
        if steps:
            rollout.check_steps(steps)
        present = await self._present(head)
        differences = compare.diff(present, rules)
        if not differences.count:
            raise errors.RequestRefused("unchanged", f"it says what version {head.current} says")
        dead = await self._dead(present, rules, head)
        if dead and not force and not dry_run:
            shown = ", ".join(f"{name} ({why})" for name, why in list(dead.items())[:5])
            shown += f" and {len(dead) - 5} more" if len(dead) > 5 else ""
            raise errors.RequestRefused("no-live-endpoint", f"no endpoint answers for {shown}")
        if dry_run:
            return Changed(head, differences, tuple(dead))
        note = self._note(author)

        def change(now: Head, body: Body) -> Head:
            heads.check_no_rollout(now)
            heads.check_version(now, expected)
            return heads.start(now, body, steps, note) if steps else heads.publish(now, body, note)

        found = await self._commit_body(rules, change)
        return Changed(found.head, differences, tuple(dead), await self._book.settled(found.revision))

    async def rollback(self, to: int | None, author: Author, *, expected: int | None, dry_run: bool = False) -> Changed:
        """Give everybody an earlier version's content again, under a new version; None for the one before."""
        note = self._note(author)

        def change(now: Head) -> Head:
            heads.check_no_rollout(now)
            heads.check_version(now, expected)
            return heads.rollback(now, to, note)

        head = await self._newest()
        after = change(head)
        old = await self._present(head)
        differences = compare.diff(old, await self._read(after.body(after.current), after.current))
        if dry_run:
            return Changed(head, differences)
        found = await self._commit(change)
        return Changed(found.head, differences, served=await self._book.settled(found.revision))

    async def step(self, percent: float | None, author: Author) -> Head:
        """Give the rules being rolled out to more devices; None for the next of its steps."""
        note = self._note(author)
        return await self._changed(lambda now: heads.step(now, percent, note))

    async def halt(self, author: Author) -> Head:
        """End the roll-out and give everybody what held before."""
        note = self._note(author)
        return await self._changed(lambda now: heads.halt(now, note))

    async def outcomes(self, version: int, new: Counts, old: Counts) -> tuple[Head, Judgement]:
        """Take in how both arms of the roll-out fare since its step began; halts it where the new one is worse."""
        note = self._note(Author("guard", ""))
        said: list[Judgement] = []

        def change(now: Head) -> Head:
            head, judgement = heads.outcomes(now, version, new, old, note, self._guard)
            said[:] = [judgement]
            return head

        head = await self._changed(change)
        if said[0].worse:
            _log.warning("roll-out of version %d halted: %s", version, head.log[0].why)
        return head, said[0]

    async def drain(self, drained: Drained, author: Author, *, end: bool = False) -> Head:
        """Take endpoints out of service, or back into it."""
        note = self._note(author)
        move = heads.undrain if end else heads.drain
        return await self._changed(lambda now: move(now, drained, note))

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _dead(self, present: RuleSet, rules: RuleSet, head: Head) -> dict[str, str]:
        """Name what is changed, has endpoints that should serve, and none that answers; each with a reason."""
        changed = msgspec.structs.replace(
            rules,
            hosts={host: rules.hosts[host] for host in compare.changed_hosts(present, rules)},
            gateways={
                app: endpoints
                for app, endpoints in sorted(rules.gateways.items())
                if present.gateways.get(app) != endpoints
            },
        )
        found = {} if self._ill is None else await self._ill(health.targets([changed]))
        drains = Drains(head.drains)
        dead: dict[str, str] = {}
        if present.apps and not rules.apps:
            dead["every app"] = "none is left"
        for part, endpoints in health.parts(changed):
            reasons = [
                "drained" if drains.covers(each.host, each.port) else found.get(health.target_of(each), "")
                for each in endpoints
            ]
            if reasons and all(reasons):
                dead[part.host or f"the gateways of app {part.app}"] = reasons[0]
        return dead

    async def _present(self, head: Head) -> RuleSet:
        """Give the rules that hold for all by a record; where they are damaged, those this centre serves instead."""
        try:
            return await self._read(head.body(head.current), head.current)
        except errors.RequestRefused as error:
            if error.code != "internal":
                raise
            return self._book.current()

    async def _newest(self) -> Head:
        """Read the record from the engine: what this centre serves may be a moment behind."""
        try:
            found = await self._ledger().find()
        except errors.EngineError as error:
            raise _unavailable(error) from error
        except errors.ConfigError as error:
            raise errors.RequestRefused("internal", str(error)) from error
        if found is None:
            raise errors.RequestRefused("unavailable", "the engine has no rules yet", retry_after_s=1.0)
        return found.head

    async def _changed(self, change: Callable[[Head], Head]) -> Head:
        found = await self._commit(change)
        await self._book.settled(found.revision)
        return found.head

    async def _commit(self, change: Callable[[Head], Head]) -> Found:
        try:
            return await self._ledger().commit(change)
        except errors.EngineError as error:
            raise _unavailable(error) from error

    async def _commit_body(self, rules: RuleSet, change: Callable[[Head, Body], Head]) -> Found:
        """Write a body and move the record to it; again, under a new id, where another rule set was first."""
        content = compare.content(rules)
        packed = await ledger.beside(len(content), lambda: ledger.pack(content))
        for _ in range(limits.RULES_COMMIT_TRIES_MAX):
            version = (await self._newest()).version + 1
            try:
                target = self._ledger()
                body = await target.write(
                    packed, version=version, size=len(content), content_digest=ledger.digest(content)
                )
                return await _move_to(target, body, change)
            except errors.Conflict:
                continue
            except errors.EngineError as error:
                raise _unavailable(error) from error
        raise errors.RequestRefused("unavailable", "others change the rules all the time; nothing was written")

    def _ledger(self) -> Ledger:
        try:
            return self._book.ledger()
        except errors.EngineError as error:
            raise _unavailable(error) from error

    def _note(self, author: Author) -> Note:
        return Note(who=author.who, why=author.why, at=int(self._clock.wall()))


async def _move_to(target: Ledger, body: Body, change: Callable[[Head, Body], Head]) -> Found:
    """Move the record to a body, and remove the body where it is certain that no record names it."""
    try:
        return await target.commit(lambda now: change(now, body))
    except (errors.Conflict, errors.RequestRefused):
        await target.remove([body])
        raise


def _unavailable(error: errors.EngineError) -> errors.RequestRefused:
    maybe = "; maybe it was done all the same, look at the history" if error.maybe_delivered else ""
    return errors.RequestRefused("unavailable", f"{error}{maybe}", retry_after_s=limits.CALL_RETRY_AFTER_S)
