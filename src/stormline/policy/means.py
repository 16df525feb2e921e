"""The means to get a request answered, and the ladder of steps one request climbs.

Each call gets a `Ladder` from `plan`; after every failed step `Ladder.next` is asked with the outcome and gives the
next step, or None: then the failure stands. The two-phase rule is enforced here and nowhere else.
"""

import enum
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from stormline.core import limits
from stormline.core.values import Address
from stormline.policy.presets import ORDINARY, Preset
from stormline.policy.resend import SAFE_METHODS, may_resend


class Means(enum.StrEnum):
    """Ways to an answer, in the order they are tried."""

    LONG = "long"
    """The long connection; the gateway asks the origin."""
    IP_DIRECT = "ip-direct"
    """The origin itself at an address from dispatch, or from the settings; certificate and SNI by name."""
    DIRECT = "direct"
    """The origin itself at an address from DNS; tried again it goes elsewhere."""
    RELAY = "relay"
    """Sealed, through a relay that fetches the origin: needs neither a name nor TLS to it."""
    CLEAR = "clear"
    """The origin itself over HTTP without TLS: reads without credentials, where a rule says whose signature counts."""
    ORIGINAL = "original"
    """The URL as it stands, as if nothing were known: every address its name has, a connection of its own."""


H1: Final = "h1"
"""Switches off that HTTP/1.1 takes the place of HTTP/2 where that has stalled and there is nowhere else to go."""
HEDGE: Final = "hedge"
"""Switches off second requests beside late ones."""
SWITCHES: Final = (*(means.value for means in Means), H1, HEDGE)
"""What can be switched off, by name."""


@dataclass(frozen=True, slots=True)
class Step:
    """One try: by which means and, for IP direct, where.

    Attributes:
        means: the way.
        addresses: the origin's addresses, best first, which are raced; empty to let the means find some.
        server_name: name for SNI and certificate, empty for the request's own host.
        fresh: over a connection of its own making, none that stood before.
        backup: at addresses that the client was set up with: a repetition, after the name was tried.
    """

    means: Means
    addresses: tuple[Address, ...] = ()
    server_name: str = ""
    fresh: bool = False
    backup: bool = False

    @property
    def repeats(self) -> bool:
        """It asks the origin once more for what it may have had already: it needs a token of the retry budget."""
        return self.backup or self.means not in (Means.LONG, Means.IP_DIRECT)

    @property
    def by_name(self) -> bool:
        """It needs the host's address from DNS."""
        return not self.addresses and self.means is not Means.LONG


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step failed.

    Attributes:
        maybe_delivered: the request may have been processed.
        reused: the connection it used had stood before and may just have been stale.
        untouched: the peer said that it has not processed the request (GOAWAY, a refused stream), or a connection that
            stood went away before anything of the request had left. This says nothing of the means.
        body_spent: the request's body was a stream and has been read from; it cannot be sent again.
        final: the means cannot do better a moment later: a name that does not exist, a wrong certificate.
    """

    maybe_delivered: bool
    reused: bool = False
    untouched: bool = False
    body_spent: bool = False
    final: bool = False


class Ladder:
    """The steps of one call. Not shared, not reusable.

    Args:
        steps: those of the plan, in their order; taken one after the other.
        repeat: the step that is taken again after them, elsewhere, `repeats` times at most; None for none.
        last: steps that come after all others.
        attempts: steps in all; what repeating leaves room for is `last`'s.
    """

    __slots__ = ("_attempts", "_has_key", "_last", "_method", "_refusals", "_repeat", "_repeats", "_resends", "_steps",
                 "_tail", "_tries")  # fmt: skip

    def __init__(
        self,
        steps: tuple[Step, ...],
        *,
        method: str,
        has_key: bool,
        resends: bool = True,
        repeat: Step | None = None,
        repeats: int = 0,
        last: tuple[Step, ...] = (),
        attempts: int = limits.ATTEMPTS_MAX,
    ) -> None:
        self._steps = list(steps)
        self._repeat = repeat
        self._repeats = repeats
        self._tail = list(last)
        self._attempts = attempts
        self._method = method
        self._has_key = has_key
        self._resends = resends
        self._last: Step | None = None
        self._tries = 0
        self._refusals = 0

    @property
    def tries(self) -> int:
        """Steps given so far, those after a refusal or over a fresh connection instead of a stale one left out."""
        return self._tries

    @property
    def repeatable(self) -> bool:
        """The request may be sent again although it may have been processed."""
        return self._resends and may_resend(self._method, maybe_delivered=True, has_key=self._has_key)

    def next(self, outcome: Outcome | None = None) -> Step | None:
        """Give the next step, None at the ladder's end; `outcome` tells how the last one failed, None at the start.

        Once it has given None it gives nothing else.
        """
        if outcome is None:
            return self._take()
        last = self._last
        if last is None or not self._may_go_on(outcome):
            self._end()
            return None
        if outcome.untouched and self._refusals < limits.REFUSALS_MAX:
            # A server that ends its connections after ten requests refuses what comes beyond: the same, elsewhere.
            self._refusals += 1
            return last
        if outcome.reused and not last.fresh:
            # The connection was stale, which says nothing of the means: once more on a fresh one, at no other's cost.
            self._last = replace(last, fresh=True)
            return self._last
        if outcome.final:
            self._give_up_on(last)
        return self._take()

    def beside(self, means: Means | None = None) -> Step | None:
        """Give a step to be taken beside those that run and have not answered, None where there may be none.

        Args:
            means: the first by this of those that come after all others, ahead of its turn; None: the next one.
        """
        if not self.repeatable or self._tries >= self._attempts:
            return None
        if means is None:
            return self._take()
        step = next((each for each in self._tail if each.means is means), None)
        if step is not None:
            self._tail.remove(step)
            self._tries += 1
        return step

    def skip_to(self, means: Means) -> Step | None:
        """Give the first step by this of those that come after all others, and leave out what is before it.

        For a request that nobody has, where what is next may not be taken; None where there is no such step.
        """
        at = next((at for at, each in enumerate(self._tail) if each.means is means), None)
        if at is None or self._tries >= self._attempts:
            return None
        self._steps.clear()
        self._repeats = 0
        del self._tail[:at]
        return self._take()

    def ends_with(self, means: Means) -> bool:
        """Say whether a step by this means is among those left that come after all others."""
        return any(each.means is means for each in self._tail)

    def _take(self) -> Step | None:
        step: Step | None = None
        if self._tries < self._attempts:
            if self._steps:
                step = self._steps.pop(0)
            elif self._may_repeat():
                self._repeats -= 1
                step = self._repeat
            elif self._tail:
                step = self._tail.pop(0)
        if step is None:
            self._end()
        else:
            self._last = step
            self._tries += 1
        return step

    def _may_repeat(self) -> bool:
        return self._repeats > 0 and self._tries < self._attempts - len(self._tail)

    def _give_up_on(self, failed: Step) -> None:
        """Take out what cannot do better a moment later than a step that just failed."""
        if failed.by_name:
            self._steps = [step for step in self._steps if not step.by_name]
            self._tail = [step for step in self._tail if not step.by_name]
        if self._repeat is not None and self._repeat.by_name is failed.by_name:
            self._repeats = 0

    def _end(self) -> None:
        self._steps.clear()
        self._tail.clear()
        self._repeats = 0
        self._last = None

    def _may_go_on(self, outcome: Outcome) -> bool:
        if outcome.body_spent or (not self._resends and outcome.maybe_delivered):
            return False
        return may_resend(self._method, maybe_delivered=outcome.maybe_delivered, has_key=self._has_key)


def plan(
    *,
    long: bool,
    long_last: bool = False,
    origins: tuple[Step, ...],
    disabled: Collection[str],
    method: str,
    has_key: bool,
    resends: bool = True,
    preset: Preset = ORDINARY,
    backup: tuple[Step, ...] = (),
    relays: tuple[Step, ...] = (),
    clear: Step | None = None,
    order: tuple[Means, ...] = (),
) -> Ladder:
    """Lay out the steps for a request.

    Args:
        long: dispatch serves the host over the long connection, and the gateway has not refused us for good.
        long_last: the long connection has just failed and is left alone for a while: the other means come first, and
            it waits that while out.
        origins: the origin's own addresses from dispatch, as `IP_DIRECT` steps, best first: one for each try it is
            worth, as a step that failed on one address leaves it to the next step to take another.
        disabled: means switched off by dispatch or by the caller.
        method: HTTP method.
        has_key: the request carries an idempotency key.
        resends: what may have been processed may be sent again where its method allows that; False: never.
        preset: how often each means is tried.
        backup: as `origins`, from the settings: they come after the first try by name.
        relays: the steps through relays, best first; they come after the origin's own addresses and its name.
        clear: the step over clear HTTP, where the request may be asked that way; None else.
        order: means that dispatch wants first, in this order; those it does not name follow in theirs. Relays, clear
            HTTP and the original URL stay behind all others, and a long connection that has just failed behind the
            other means.

    Returns:
        The long connection, then the origin at its addresses from dispatch, then the origin by DNS, then at its
        addresses from the settings, then by DNS again, elsewhere; at the end relays, clear HTTP and the original URL.
        At most `preset.attempts`, with the long connection, one try by DNS and the last three among them. Means that
        are absent or switched off are left out.
    """
    way = (Step(Means.LONG),) if long and preset.long and Means.LONG not in disabled else ()
    dns = (Step(Means.DIRECT),) if preset.direct != 0 and Means.DIRECT not in disabled else ()
    last = _last_resorts(relays, clear, disabled, method, preset, order)
    room = preset.attempts - len(way) - len(dns)
    last = last[: max(0, room)]
    numbered: tuple[Step, ...] = ()
    spare: tuple[Step, ...] = ()
    if Means.IP_DIRECT not in disabled:
        most = max(0, room - len(last))
        if preset.ip_direct is not None:
            most = min(most, preset.ip_direct)
        numbered = origins[:most]
        spare = backup[: most - len(numbered)]
    steps = _ordered((*numbered, *dns, *spare) if long_last else (*way, *numbered, *dns, *spare), order)
    most_by_last = preset.direct if dns else preset.ip_direct
    return Ladder(
        (*steps, *way) if long_last else steps,
        method=method,
        has_key=has_key,
        resends=resends,
        repeat=(dns or spare[-1:] or numbered[-1:] or (None,))[0],
        # A long connection comes last where it has just failed: then everything else has been tried.
        repeats=0 if long_last and way else _repeats(most_by_last, len(dns) or len(numbered) + len(spare), preset),
        last=last,
        attempts=preset.attempts,
    )


def _last_resorts(
    relays: tuple[Step, ...],
    clear: Step | None,
    disabled: Collection[str],
    method: str,
    preset: Preset,
    order: tuple[Means, ...],
) -> tuple[Step, ...]:
    """Give the steps that come after all others: relays, clear HTTP, the original URL; see `plan`."""
    found: tuple[Step, ...] = ()
    if relays and Means.RELAY not in disabled:
        found = tuple(relays[each % len(relays)] for each in range(preset.relay))
    if clear is not None and not preset.tls_only and method in SAFE_METHODS and Means.CLEAR not in disabled:
        found += (clear,) * preset.clear
    if Means.ORIGINAL not in disabled:
        found += (Step(Means.ORIGINAL),) * preset.original
    return _ordered(found, order)


def _ordered(steps: tuple[Step, ...], order: tuple[Means, ...]) -> tuple[Step, ...]:
    if not order:
        return steps
    rank = {name: place for place, name in reversed(tuple(enumerate(order)))}
    return tuple(sorted(steps, key=lambda step: rank.get(step.means, len(order))))  # stable: others stay as they stand


def by_name(*, disabled: Collection[str], method: str, has_key: bool, resends: bool) -> Ladder:
    """Lay out the ordinary steps for a request whose origin is known by its name alone: what `plan` gives for it."""
    if Means.DIRECT in disabled or (Means.ORIGINAL not in disabled and ORDINARY.original):
        return plan(long=False, origins=(), disabled=disabled, method=method, has_key=has_key, resends=resends)
    return Ladder(
        _BY_NAME,
        method=method,
        has_key=has_key,
        resends=resends,
        repeat=_BY_NAME[0],
        repeats=_BY_NAME_REPEATS,
        attempts=ORDINARY.attempts,
    )


def _repeats(most: int | None, planned: int, preset: Preset) -> int:
    """Give how often the last means may be tried beyond what is planned of it."""
    return max(0, (preset.attempts if most is None else most) - planned)


_BY_NAME: Final = (Step(Means.DIRECT),)
_BY_NAME_REPEATS: Final = _repeats(ORDINARY.direct, 1, ORDINARY)
