"""How a network does: Excellent, Evaluating or Bad, by what requests of their size took.

Mars's dynamic time-out (`stn/src/dynamic_timeout.cc`) is the start: the sizes and their expectations, ten quick answers
to Excellent, four failures of ten to Bad, seven successes out of it, a memory of five minutes. Changed, each for a
reason found in reading it:

- a server's own time is no fault of the network, so it is taken off before an answer is judged;
- a slow answer leaves Excellent, not only a failed one, but only the third in a row;
- one host that is down makes no network bad while others answer;
- a window begins empty, neither all good nor all bad, and what is older than five minutes is forgotten in every state;
- no answer counts as large that was not (Mars's start at zero ticks counts as one).
"""

import enum
from collections import deque
from typing import Final, NamedTuple

from stormline.core import limits

EXPECTED_S: Final = ((3 * 1024, 0.5, 1.0), (10 * 1024, 2.0, 3.0), (30 * 1024, 4.0, 5.0))
"""Up to that many bytes both ways together: the expected seconds on fast kinds of network, and on others (Mars)."""
EXPECTED_LARGEST_S: Final = (6.0, 7.0)
"""The same for what is larger (Mars)."""
SMALL_BYTES: Final = EXPECTED_S[0][0]
"""Answers of this size alone prove nothing about the rate (Mars: Excellent needs one that is larger)."""
EXCELLENT_RUN: Final = 10
"""Quick answers in a row that make a network excellent (Mars)."""
SLOW_RUN: Final = 3
"""Slow answers in a row that end it."""
BAD_FAILURES: Final = 4
"""Failures among the last ten results that make a network bad (Mars)."""
GOOD_AGAIN: Final = 7
"""Successes among the results since then that end it (Mars)."""
FAST_KINDS: Final = frozenset({"wifi", "wired"})
"""Kinds of network whose numbers are Mars's for "not mobile". An unknown kind is taken for mobile: too patient costs
time, too eager costs the answer."""


class State(enum.StrEnum):
    """What recent requests say of a network."""

    EXCELLENT = "excellent"
    EVALUATING = "evaluating"
    BAD = "bad"


class _Result(NamedTuple):
    at: float
    ok: bool
    host: str


def expected_s(size_bytes: int, *, fast: bool) -> float:
    """Give what an exchange of this size, both ways together, takes on a network that does well, in seconds."""
    for most, on_fast, on_slow in EXPECTED_S:
        if size_bytes < most:
            return on_fast if fast else on_slow
    return EXPECTED_LARGEST_S[0 if fast else 1]


class NetworkQuality:
    """The state of one network. Memory: ten results."""

    __slots__ = ("_large_at", "_quick", "_results", "_slow", "_state")

    def __init__(self) -> None:
        self._state = State.EVALUATING
        self._results: deque[_Result] = deque(maxlen=limits.QUALITY_RESULTS_MAX)
        self._quick = 0
        self._slow = 0
        self._large_at: float | None = None

    def state(self, now: float) -> State:
        """Give the state; one that nothing confirmed for `limits.QUALITY_WINDOW_S` has become Evaluating."""
        self._forget(now)
        if not self._results:
            self._enter(State.EVALUATING)
        return self._state

    def observe_answer(self, host: str, size_bytes: int, seconds: float, now: float, *, fast: bool) -> None:
        """Take an answered request.

        Args:
            host: who answered.
            size_bytes: request and answer together.
            seconds: from the first byte sent to the last received, less the server's own time.
            now: monotonic seconds.
            fast: the kind of network is one of `FAST_KINDS`.
        """
        state = self.state(now)
        self._results.append(_Result(now, True, host))
        if seconds <= expected_s(size_bytes, fast=fast):
            self._quick += 1
            self._slow = 0
            if size_bytes >= SMALL_BYTES:
                self._large_at = now
        else:
            self._quick = 0
            self._slow += 1
        if state is State.BAD:
            if sum(result.ok for result in self._results) >= GOOD_AGAIN:
                self._enter(State.EVALUATING)
        elif state is State.EXCELLENT:
            if self._slow >= SLOW_RUN:
                self._enter(State.EVALUATING)
        elif self._quick >= EXCELLENT_RUN and self._large_at is not None:
            self._enter(State.EXCELLENT)

    def observe_failure(self, host: str, now: float) -> None:
        """Take a failure of the path: a time-out, a connection refused, cut or lost; not an answer that says no."""
        state = self.state(now)
        self._results.append(_Result(now, False, host))
        self._quick = 0
        failed = [result.host for result in self._results if not result.ok]
        if state is State.EXCELLENT:
            self._enter(State.EVALUATING)
        elif state is State.EVALUATING and len(failed) >= BAD_FAILURES:
            # One host's failures speak for the network only where no other host speaks at all.
            hosts = {result.host for result in self._results}
            if len(hosts) == 1 or len(set(failed)) > 1:
                self._enter(State.BAD)

    def _forget(self, now: float) -> None:
        while self._results and now - self._results[0].at >= limits.QUALITY_WINDOW_S:
            self._results.popleft()
        if self._large_at is not None and now - self._large_at >= limits.QUALITY_WINDOW_S:
            self._large_at = None

    def _enter(self, state: State) -> None:
        if state is self._state:
            return
        self._state = state
        self._quick = self._slow = 0
        if state is State.BAD:
            # Only what comes from now on ends it; the last failure stays, so that its age keeps the state alive.
            last = self._results[-1]
            self._results.clear()
            self._results.append(last)
