"""How quickly a node begins new connections: no quicker than it has proven to finish them. Pure.

A handshake and the check of a token cost a node a hundred times what one message of a session does. Begun without a
bound they hold up those who are connected, and each other until all are too late. So they are begun at a pace:

- the pace grows while it is the bound, the event loop is quick, and most of what was begun is finished: by a quarter
  each time at first, by steps once it was too quick;
- it is cut while the loop is late, whatever made it so, to below what was really begun in that time;
- who is not begun waits in the kernel's queue, at no cost, and beyond that queue in the network.

Where the loop is late all the same, a client that has shaken hands is sent away with a pause, before its token costs
anything. And each client is told over which span to come back should its node be gone without a word.
"""

import math

from stormline.core import limits_carriers as limits


class Intake:
    """The pace of one process.

    `room` and `wait_s` ask, `began` and `finished` report connections, `look` is called every
    `limits_carriers.INTAKE_LOOK_S` with the loop's lag.

    Args:
        now: monotonic seconds.

    Attributes:
        pace_per_s: connections begun a second, at most.
        lag_s: how late the loop was at the last look.
    """

    __slots__ = ("_at", "_begun", "_bound", "_finished", "_lag_before_s", "_seeking", "_tokens", "lag_s", "pace_per_s")

    def __init__(self, now: float) -> None:
        self.pace_per_s = limits.INTAKE_FIRST_PER_S
        self.lag_s = 0.0
        self._lag_before_s = 0.0
        self._at = now
        self._tokens = self._burst
        self._bound = False
        self._seeking = True
        self._begun = self._finished = 0

    @property
    def _burst(self) -> float:
        return max(1.0, self.pace_per_s * limits.INTAKE_LOOK_S)

    def room(self, now: float) -> bool:
        """Say whether one more may begin now."""
        if now > self._at:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self.pace_per_s)
            self._at = now
        if self._tokens >= 1.0:
            return True
        self._bound = True
        return False

    def wait_s(self) -> float:
        """Give the seconds until `room` says yes, where it has just said no."""
        return max(0.0, (1.0 - self._tokens) / self.pace_per_s)

    def began(self) -> None:
        """One begins: its handshake is about to cost something."""
        self._tokens -= 1.0
        self._begun += 1

    def finished(self) -> None:
        """One stands."""
        self._finished += 1

    def look(self, lag_s: float) -> None:
        """Learn from the time since the last look.

        Args:
            lag_s: how late the loop was just now.
        """
        self._lag_before_s, self.lag_s = self.lag_s, lag_s
        if lag_s > limits.INTAKE_LAG_S:
            self._seeking = False
            shown_per_s = self._begun / (limits.INTAKE_LOOK_S + lag_s) if self._begun else self.pace_per_s
            self.pace_per_s = max(limits.INTAKE_MIN_PER_S, min(self.pace_per_s, shown_per_s) * limits.INTAKE_CUT)
        elif self._bound and lag_s <= limits.INTAKE_LAG_S / 2 and 2 * self._finished >= self._begun:
            grown = self.pace_per_s * limits.INTAKE_GROWTH if self._seeking else self.pace_per_s
            self.pace_per_s = min(limits.INTAKE_MAX_PER_S, max(grown, self.pace_per_s + limits.INTAKE_STEP_PER_S))
        self._bound = False
        self._begun = self._finished = 0

    @property
    def overloaded(self) -> bool:
        """The loop was late at two looks in a row: whoever says HELLO is better off later."""
        return min(self._lag_before_s, self.lag_s) > limits.INTAKE_SHED_LAG_S

    @staticmethod
    def retry_after_s(chance: float) -> float:
        """Give how long a client that is sent away stays away; `chance` is a draw from [0, 1) that spreads them."""
        return limits.INTAKE_RETRY_S * (1.0 + 3.0 * chance)

    def return_spread_s(self, sessions: int) -> float:
        """Give the span over which clients come back, should so many sessions be lost at once.

        At most at half the pace: those who are still connected are to notice nothing.
        """
        wanted_s = sessions / max(limits.RETURN_PER_S, self.pace_per_s / 2)
        return min(max(wanted_s, limits.RETURN_SPREAD_MIN_S), limits.RETURN_SPREAD_MAX_S)


def connections_max(descriptors: int, sessions_max: int) -> int:
    """Give how many clients a process may have at once, so that descriptors stay for all else.

    Args:
        descriptors: how many the process may open.
        sessions_max: the bound where there are plenty.
    """
    kept = min(limits.DESCRIPTORS_KEPT_MAX, math.ceil(descriptors * limits.DESCRIPTORS_KEPT_SHARE))
    return max(1, min(sessions_max, descriptors - kept))
