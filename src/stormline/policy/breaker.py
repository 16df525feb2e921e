"""When an endpoint that fails is left alone, and when it is tried again: a circuit breaker.

    if breaker.plan(now):            # may a request go there? it is under way then
        breaker.observe(True, now)   # or False, or `leave()` where nothing was learned

Closed, everything goes there. It opens on `limits_api.BREAKER_FAILURES` failures in a row, or where at least half of
what is remembered of the last seconds failed. Open, nothing goes there for a while; then it is half open, and one
request at a time goes there as a trial: where that is answered the circuit closes, where it fails it is open again,
for twice as long. The states are those of Nygard's "Release It!" (2007).
"""

import enum

from stormline.core import limits_api as limits


class State(enum.StrEnum):
    """What a circuit lets through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """The circuit of one endpoint. Times are monotonic seconds."""

    __slots__ = ("_at", "_failed", "_good", "_open_s", "_row", "_trial", "_until")

    def __init__(self) -> None:
        self._row = 0  # failures since the last good one
        self._good = self._failed = 0.0  # outcomes, fading
        self._at = 0.0  # as of when
        self._until: float | None = None  # open until then; None: closed
        self._open_s = 0.0  # how long it was open last
        self._trial = False  # one is under way

    def state(self, now: float) -> State:
        """Say what it lets through."""
        if self._until is None:
            return State.CLOSED
        return State.OPEN if now < self._until else State.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Say whether a request may go there; takes nothing."""
        return self._until is None or (now >= self._until and not self._trial)

    def plan(self, now: float) -> bool:
        """Say whether a request may go there; where it is a trial, no other one may until its outcome is told."""
        if self._until is None:
            return True
        if now < self._until or self._trial:
            return False
        self._trial = True
        return True

    def observe(self, good: bool, now: float) -> None:
        """Take in how a request fared.

        One that was sent before the circuit opened and comes to its end later changes nothing, unless it is good.
        """
        self._trial = False
        if good:
            if self._until is not None:
                self._good = self._failed = 0.0
            self._row, self._until, self._open_s = 0, None, 0.0
            self._count(now)
            self._good += 1.0
            return
        if self._until is not None:
            if now >= self._until:
                self._open(now)
            return
        self._count(now)
        self._failed += 1.0
        self._row += 1
        known = self._good + self._failed
        if self._row >= limits.BREAKER_FAILURES or (
            known >= limits.BREAKER_SAMPLES_MIN and self._failed >= limits.BREAKER_SHARE * known
        ):
            self._open(now)

    def leave(self) -> None:
        """A request that went there ended without saying anything of the endpoint: it was given up, say."""
        self._trial = False

    def next_timer(self) -> float | None:
        """Give when it becomes half open; None where it is closed."""
        return self._until

    def _open(self, now: float) -> None:
        self._open_s = min(max(limits.BREAKER_OPEN_FIRST_S, 2.0 * self._open_s), limits.BREAKER_OPEN_MAX_S)
        self._until = now + self._open_s
        self._row = 0

    def _count(self, now: float) -> None:
        if now > self._at:
            fade = 0.5 ** ((now - self._at) / limits.BREAKER_HALF_LIFE_S)
            self._good *= fade
            self._failed *= fade
            self._at = now
