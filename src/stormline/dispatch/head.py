"""What is true of a centre's rules, in one small record: which version holds, what came before, who did what. Pure.

The record is one key in the engine, moved by compare-and-set: versions, a roll-out, drains and the log of changes can
never contradict each other, and whoever read an older record cannot write. Rule sets themselves are too large for it;
it names them, by an id under which their bytes lie beside it (`dispatch.ledger`).

Every function here takes a record and gives the next one, with a line in its log.
"""

from typing import Annotated, Final

import msgspec

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.values import Address
from stormline.dispatch import rollout as judging
from stormline.dispatch.rollout import Counts, Looks

FORMAT: Final = "stormline-rules-head/1"

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Body(msgspec.Struct, frozen=True):
    """Where a rule set's bytes are.

    Attributes:
        id: see `body_id`; never used twice.
        chunks: number of keys it is spread over.
        size: bytes of the rule set, not compressed.
        digest: their SHA-256, hexadecimal.
    """

    id: str
    chunks: Annotated[int, msgspec.Meta(ge=1, le=limits.RULES_CHUNKS_MAX)]
    size: _Count
    digest: str


class Version(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rule set under the number clients know it by; two versions may have one body.

    Attributes:
        version: the number.
        body: where the rule set is.
        held: whether it held for everybody once; a roll-out that was halted did not.
    """

    version: _Count
    body: Body
    held: bool = False


class Drained(msgspec.Struct, frozen=True, order=True):
    """Endpoints out of service by hand: all with this host and port, or with this host where `port` is 0."""

    host: str
    port: _Port = 0

    def covers(self, address: Address) -> bool:
        """Say whether it means what is at this address."""
        return address.host == self.host and self.port in (0, address.port)

    def __str__(self) -> str:
        """Give `host`, `host:port` or `[v6]:port`."""
        if not self.port:
            return self.host
        return str(Address(self.host, self.port))


class Rollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A roll-out under way.

    Attributes:
        version: what is rolled out.
        percent: share of devices that get it now.
        steps: the shares, growing; the last is 100.
        started_at: seconds since 1970.
        stepped_at: when the present step began; the counts are since then.
        new: calls of devices that have it.
        old: calls of the others.
        looks: how often the counts were looked at.
    """

    version: _Count
    percent: float
    steps: tuple[float, ...]
    started_at: int
    stepped_at: int
    new: Counts = Counts()
    old: Counts = Counts()
    looks: Looks = Looks()


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Who changes something, when and why.

    Attributes:
        who: a name they give: there is one admin key, not one per person.
        why: for people.
        at: seconds since 1970.
    """

    who: str
    why: str
    at: int


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the log.

    Attributes:
        number: grows by one; lines never get another.
        at: seconds since 1970.
        who: see `Note`.
        what: `first`, `set`, `rollback`, `rollout-start`, `rollout-step`, `rollout-done`, `rollout-halt`, `settings`,
            `drain`, `undrain` or `restore`.
        detail: what it was done to or with.
        why: see `Note`.
        version: version that holds after it, or that it is about.
    """

    number: _Count
    at: int
    who: str
    what: str
    version: _Count
    detail: str = ""
    why: str = ""


class Head(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record.

    Attributes:
        format: always `FORMAT`.
        lineage: drawn when the record is first made; another one is another platform's.
        version: newest version given out; only grows.
        current: version that holds for all, a roll-out aside.
        versions: those whose bodies are kept, newest first.
        assembled: rule set that the platform's settings last gave, so that a change of settings can be told from an
            operator's.
        rollout: the roll-out under way.
        drains: endpoints out of service by hand.
        log: what was done, newest first.
    """

    format: str = FORMAT
    lineage: str
    version: _Count
    current: _Count
    versions: tuple[Version, ...]
    assembled: Body
    rollout: Rollout | None = None
    drains: tuple[Drained, ...] = ()
    log: tuple[Record, ...] = ()

    def body(self, version: int) -> Body:
        """Give where a version is.

        Raises:
            RequestRefused: it is not kept (`not-found`).
        """
        for each in self.versions:
            if each.version == version:
                return each.body
        raise errors.RequestRefused(
            "not-found", f"version {version} is not kept; there are {self.versions[-1].version} to {self.version}"
        )

    def bodies(self) -> dict[str, Body]:
        """Give every body it needs, by id."""
        return {body.id: body for body in (self.assembled, *(each.body for each in self.versions))}


_decoder = msgspec.json.Decoder(Head)


def encode(head: Head) -> bytes:
    """Give the record's bytes."""
    return msgspec.json.encode(head)


def decode(data: bytes) -> Head:
    """Read a record.

    Raises:
        RulesRejected: it is none, or of another format (`record`).
    """
    try:
        head = _decoder.decode(data)
        if head.format != FORMAT:
            raise errors.RulesRejected(
                "record", f"rules in the engine: format {head.format[:40]!r}, this version reads {FORMAT!r}"
            )
        head.body(head.current)
        if head.rollout is not None:
            head.body(head.rollout.version)
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError, errors.RequestRefused) as error:
        raise errors.RulesRejected("record", f"rules in the engine: damaged record: {error}") from error
    return head


def body_id(version: int, unique: str) -> str:
    """Name a body that is written to become a version."""
    return f"{version}-{unique}"


def version_of(name: str) -> int:
    """Give the version a body was written for; 0 where the name is none of ours."""
    number = name.partition("-")[0]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 17 else 0


def first(body: Body, version: int, lineage: str, note: Note) -> Head:
    """Begin a record with the rules the platform was started with."""
    head = Head(
        lineage=lineage, version=version, current=version, versions=(Version(version, body, held=True),), assembled=body
    )
    return _logged(head, note, "first", version)


def check_version(head: Head, expected: int | None) -> None:
    """Refuse a change that was made from another version than the newest; None stands for any.

    Raises:
        RequestRefused: `changed`.
    """
    if expected is not None and expected != head.version:
        raise errors.RequestRefused(
            "changed", f"the rules are at version {head.version}, and this change was made from version {expected}"
        )


def check_no_rollout(head: Head) -> None:
    """Refuse a change while a roll-out is open.

    Raises:
        RequestRefused: `rollout-open`.
    """
    if head.rollout is not None:
        raise errors.RequestRefused(
            "rollout-open",
            f"version {head.rollout.version} is being rolled out: step it to 100 percent or halt it first",
        )


def publish(head: Head, body: Body, note: Note) -> Head:
    """Give everybody new rules.

    Raises:
        RequestRefused: a roll-out is open (`rollout-open`).
        Conflict: the body was written for a version that another rule set has become.
    """
    check_no_rollout(head)
    _check_fresh(head, body)
    version = head.version + 1
    return _logged(_for_all(_added(head, body), version), note, "set", version)


def resettle(head: Head, body: Body, assembled: Body, note: Note) -> Head:
    """Give everybody the rules that follow from changed settings.

    Raises:
        RequestRefused: a roll-out is open (`rollout-open`).
        Conflict: see `publish`.
    """
    check_no_rollout(head)
    for each in (body, assembled):
        _check_fresh(head, each)
    version = head.version + 1
    head = msgspec.structs.replace(_for_all(_added(head, body), version), assembled=assembled)
    return _logged(head, note, "settings", version)


def reassembled(head: Head, assembled: Body) -> Head:
    """Remember what the settings say, where the rules that hold are not changed by it."""
    _check_fresh(head, assembled)
    return msgspec.structs.replace(head, assembled=assembled)


def rollback(head: Head, to: int | None, note: Note) -> Head:
    """Give everybody the content of an earlier version, under a new one.

    Args:
        head: the record.
        to: the version; None for the newest that once held for everybody and says something else than the present one.
        note: who and why.

    Raises:
        RequestRefused: it is not kept (`not-found`), it is what holds (`unchanged`), or a roll-out is open.
    """
    check_no_rollout(head)
    present = head.body(head.current)
    if to is None:
        earlier = [each for each in head.versions if each.held and each.body.digest != present.digest]
        if not earlier:
            raise errors.RequestRefused("not-found", "there is no earlier version to go back to")
        to = earlier[0].version
    body = head.body(to)
    if body.digest == present.digest:
        raise errors.RequestRefused("unchanged", f"version {to} says what version {head.current} says")
    version = head.version + 1
    return _logged(_for_all(_added(head, body), version), note, "rollback", version, f"to version {to}")


def start(head: Head, body: Body, steps: tuple[float, ...], note: Note) -> Head:
    """Give new rules to the first share of the devices.

    Raises:
        RequestRefused: a roll-out is open, or the steps are wrong (`bad-request`).
        Conflict: see `publish`.
    """
    check_no_rollout(head)
    _check_fresh(head, body)
    steps = judging.check_steps(steps)
    head = _added(head, body)
    if steps[0] == 100:
        return _logged(_for_all(head, head.version), note, "set", head.version)
    opened = Rollout(version=head.version, percent=steps[0], steps=steps, started_at=note.at, stepped_at=note.at)
    head = msgspec.structs.replace(head, rollout=opened)
    return _logged(head, note, "rollout-start", head.version, f"{steps[0]:g} percent")


def step(head: Head, percent: float | None, note: Note) -> Head:
    """Give the new rules to more devices; at 100 percent they hold for all and the roll-out is over.

    Args:
        head: the record.
        percent: the share; None for the next of its steps.
        note: who and why.

    Raises:
        RequestRefused: no roll-out is open (`no-rollout`), or the share does not grow (`bad-request`).
    """
    opened = _open(head)
    if percent is None:
        percent = next(each for each in opened.steps if each > opened.percent)
    if not opened.percent < percent <= 100:
        raise errors.RequestRefused(
            "bad-request", f"a step goes above the present {opened.percent:g} percent and to at most 100"
        )
    if percent == 100:
        return _logged(_for_all(head, opened.version), note, "rollout-done", opened.version)
    opened = msgspec.structs.replace(
        opened,
        percent=percent,
        stepped_at=note.at,
        new=Counts(),
        old=Counts(),
        looks=Looks(done=opened.looks.done),  # the chance to err is shared by all looks of the roll-out
    )
    head = msgspec.structs.replace(head, rollout=opened)
    return _logged(head, note, "rollout-step", opened.version, f"{percent:g} percent")


def halt(head: Head, note: Note) -> Head:
    """End the roll-out and give everybody what held before, under a new version.

    A client refuses a version older than the one it holds: only a higher one reaches those that took part.

    Raises:
        RequestRefused: no roll-out is open (`no-rollout`).
    """
    opened = _open(head)
    back = head.current
    head = _added(head, head.body(back))
    detail = f"version {opened.version} at {opened.percent:g} percent, back to version {back}"
    return _logged(_for_all(head, head.version), note, "rollout-halt", head.version, detail)


def outcomes(
    head: Head, version: int, new: Counts, old: Counts, note: Note, policy: judging.GuardPolicy | None = None
) -> tuple[Head, judging.Judgement]:
    """Take in how both arms fare, and halt the roll-out where the new one is worse.

    Args:
        head: the record.
        version: what the counts are about.
        new: calls of devices that have it, since the present step began.
        old: calls of the others, since then.
        note: in whose name it is halted; `why` is made here.
        policy: when to halt.

    Raises:
        RequestRefused: no roll-out of this version is open (`no-rollout`), or more calls succeeded than were made
            (`bad-request`).
    """
    opened = _open(head)
    if opened.version != version:
        raise errors.RequestRefused("no-rollout", f"version {opened.version} is being rolled out, not {version}")
    for counts in (new, old):
        if counts.successes > counts.calls:
            raise errors.RequestRefused("bad-request", "more successes than calls")
    judgement = judging.judge(new, old, opened.looks, policy)
    opened = msgspec.structs.replace(opened, new=new, old=old, looks=judgement.looks)
    head = msgspec.structs.replace(head, rollout=opened)
    if judgement.worse:
        why = (
            f"success {_percent(new)} of {new.calls} calls with it, {_percent(old)} of {old.calls} without, "
            f"p = {judgement.p_value:.1e}"
        )
        head = halt(head, msgspec.structs.replace(note, why=why))
    return head, judgement


def drain(head: Head, drained: Drained, note: Note) -> Head:
    """Take endpoints out of service.

    Raises:
        RequestRefused: too many are (`bad-request`), or these are already (`unchanged`).
    """
    if drained in head.drains:
        raise errors.RequestRefused("unchanged", f"{drained} is drained already")
    if len(head.drains) >= limits.RULES_DRAINS_MAX:
        raise errors.RequestRefused("bad-request", f"at most {limits.RULES_DRAINS_MAX} endpoints are drained at once")
    head = msgspec.structs.replace(head, drains=(*head.drains, drained))
    return _logged(head, note, "drain", head.current, str(drained))


def undrain(head: Head, drained: Drained, note: Note) -> Head:
    """Take endpoints back into service.

    Raises:
        RequestRefused: they are not drained (`not-found`).
    """
    if drained not in head.drains:
        raise errors.RequestRefused("not-found", f"{drained} is not drained")
    head = msgspec.structs.replace(head, drains=tuple(each for each in head.drains if each != drained))
    return _logged(head, note, "undrain", head.current, str(drained))


def restored(head: Head, held: dict[str, Body], note: Note) -> Head:
    """Give the record as it goes back into an engine that lost it: with what is still there.

    Args:
        head: the record of the copy on disk.
        held: bodies as they lie in the engine again, by their old ids; those of the record's current version, its
            roll-out and `assembled` are among them.
        note: who and why.
    """
    kept = tuple(
        msgspec.structs.replace(each, body=held[each.body.id]) for each in head.versions if each.body.id in held
    )
    head = msgspec.structs.replace(head, versions=kept, assembled=held[head.assembled.id])
    return _logged(head, note, "restore", head.current)


def needed(head: Head) -> dict[str, Body]:
    """Give the bodies without which it cannot be served: by id."""
    wanted = [head.assembled, head.body(head.current)]
    if head.rollout is not None:
        wanted.append(head.body(head.rollout.version))
    return {body.id: body for body in wanted}


def _check_fresh(head: Head, body: Body) -> None:
    """Hold to the rule by which left chunks are told from wanted ones, see `dispatch.ledger.Ledger.sweep`."""
    if version_of(body.id) != head.version + 1:
        raise errors.Conflict(f"version {version_of(body.id)} is another rule set by now")


def _open(head: Head) -> Rollout:
    if head.rollout is None:
        raise errors.RequestRefused("no-rollout", "no roll-out is open")
    return head.rollout


def _added(head: Head, body: Body) -> Head:
    """Add a version; the oldest one beyond the bound goes, never the present one."""
    version = head.version + 1
    versions = (Version(version, body), *head.versions)
    while len(versions) > limits.RULES_VERSIONS_MAX:
        oldest = next(each for each in reversed(versions) if each.version != head.current)
        versions = tuple(each for each in versions if each != oldest)
    return msgspec.structs.replace(head, version=version, versions=versions)


def _for_all(head: Head, version: int) -> Head:
    versions = tuple(
        msgspec.structs.replace(each, held=True) if each.version == version else each for each in head.versions
    )
    return msgspec.structs.replace(head, current=version, versions=versions, rollout=None)


def _logged(head: Head, note: Note, what: str, version: int, detail: str = "") -> Head:
    line = Record(
        number=head.log[0].number + 1 if head.log else 1,
        at=note.at,
        who=note.who[: limits.RULES_WHO_CHARS_MAX],
        what=what,
        version=version,
        detail=detail,
        why=note.why[: limits.RULES_WHY_CHARS_MAX],
    )
    return msgspec.structs.replace(head, log=(line, *head.log)[: limits.RULES_LOG_MAX])


def _percent(counts: Counts) -> str:
    return f"{100.0 * counts.successes / counts.calls:.2f} %"
