"""The means to get a request answered, and the ladder of steps one request climbs.

Each call gets a `Ladder` from `plan`; after every failed step `Ladder.next` is asked with the outcome and gives the
next step, or None: then the failure stands. The two-phase rule is enforced here and nowhere else.
"""

import enum
from collections.abc import Collection
from dataclasses import dataclass, replace

from stormline.core import limits
from stormline.core.values import Address
from stormline.policy.resend import may_resend


class Means(enum.StrEnum):
    """Ways to an answer, in the order they are tried."""

    LONG = "long"
    """The long connection; the gateway asks the origin."""
    IP_DIRECT = "ip-direct"
    """The origin itself at an address from dispatch; certificate and SNI by name."""
    DIRECT = "direct"
    """The origin itself at an address from DNS."""


@dataclass(frozen=True, slots=True)
class Step:
    """One try: by which means and, for IP direct, where.

    Attributes:
        means: the way.
        addresses: the origin's addresses, best first, which are raced; empty to let the means find some.
        server_name: name for SNI and certificate, empty for the request's own host.
        fresh: over a connection of its own making, none that stood before.
    """

    means: Means
    addresses: tuple[Address, ...] = ()
    server_name: str = ""
    fresh: bool = False


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

    Its last means that asks the origin itself is tried again, elsewhere, as long as `limits.ATTEMPTS_MAX` allows.
    """

    __slots__ = ("_has_key", "_last", "_method", "_refusals", "_resends", "_steps", "_tries")

    def __init__(self, steps: tuple[Step, ...], *, method: str, has_key: bool, resends: bool = True) -> None:
        self._steps = list(steps)
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
            self._steps.clear()
            self._last = None
            return None
        if outcome.untouched and self._refusals < limits.REFUSALS_MAX:
            # A server that ends its connections after ten requests refuses what comes beyond: the same, elsewhere.
            self._refusals += 1
            return last
        if outcome.reused and not last.fresh:
            # The connection was stale, which says nothing of the means: once more on a fresh one, at no other's cost.
            self._last = replace(last, fresh=True)
            return self._last
        return self._take(None if outcome.final else last)

    def beside(self) -> Step | None:
        """Give a step to be taken beside those that run and have not answered, None where there may be none."""
        return self._take(self._last) if self.repeatable and self._tries < limits.ATTEMPTS_MAX else None

    def _take(self, again: Step | None = None) -> Step | None:
        self._last = None
        if self._tries < limits.ATTEMPTS_MAX:
            if self._steps:
                self._last = self._steps.pop(0)
            elif again is not None and again.means is not Means.LONG:
                self._last = replace(again, fresh=False)
        if self._last is None:
            self._steps.clear()
        else:
            self._tries += 1
        return self._last

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

    Returns:
        The long connection, then the origin at its addresses from dispatch, then the origin by DNS; at most
        `limits.ATTEMPTS_MAX` with the long connection and DNS among them. Means that are absent or switched off are
        left out.
    """
    way = (Step(Means.LONG),) if long and Means.LONG not in disabled else ()
    dns = (Step(Means.DIRECT),) if Means.DIRECT not in disabled else ()
    room = limits.ATTEMPTS_MAX - len(way) - len(dns)
    numbered = origins[:room] if Means.IP_DIRECT not in disabled else ()
    steps = (*numbered, *dns, *way) if long_last else (*way, *numbered, *dns)
    return Ladder(steps, method=method, has_key=has_key, resends=resends)
