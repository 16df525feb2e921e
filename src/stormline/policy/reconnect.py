"""When a lost or refused long connection is tried again: exponential back-off with jitter, never a herd."""

from stormline.core import limits


class Reconnect:
    """Back-off of one long connection.

    `observe_failure` and `observe_success` report outcomes; `may_try` and `next_timer` say when. The first try after
    a loss is jittered as well: when a gateway restarts, all its clients lose it in the same millisecond.
    """

    __slots__ = ("_failures", "_not_before", "_stopped")

    def __init__(self) -> None:
        self._failures = 0
        self._not_before = 0.0
        self._stopped = False

    def may_try(self, now: float) -> bool:
        """True where a connection may be opened at `now`."""
        return not self._stopped and now >= self._not_before

    def next_timer(self) -> float | None:
        """Earliest moment of the next try; None where none will come by itself."""
        return None if self._stopped else self._not_before

    @property
    def stopped(self) -> bool:
        """The server said that asking again will not help."""
        return self._stopped

    def observe_success(self) -> None:
        """A session stands."""
        self._failures = 0
        self._not_before = 0.0

    def observe_loss(self, now: float, chance: float) -> None:
        """A standing session was lost: come back soon, but not all at once.

        Args:
            now: monotonic seconds.
            chance: a draw from [0, 1).
        """
        self._not_before = now + limits.RECONNECT_FIRST_S * chance

    def observe_leave(self, now: float, chance: float, spread_s: float) -> None:
        """The server asked us to leave and come back (elsewhere) at a random moment within `spread_s`."""
        self._not_before = now + min(max(0.0, spread_s), limits.RECONNECT_MAX_S) * chance

    def observe_failure(self, now: float, chance: float, *, retry_after_s: float | None = None) -> None:
        """A try failed.

        Args:
            now: monotonic seconds.
            chance: a draw from [0, 1).
            retry_after_s: earliest return the server asked for.
        """
        span = min(limits.RECONNECT_MAX_S, limits.RECONNECT_FIRST_S * 2.0 ** min(self._failures, 16))
        self._failures += 1
        self._not_before = now + max(span * (0.5 + 0.5 * chance), (retry_after_s or 0.0) * (1.0 + 0.25 * chance))

    def observe_stop(self) -> None:
        """The server refused for good (`codes.Action.STOP`)."""
        self._stopped = True

    def reset(self) -> None:
        """Something changed (token, network, plan): try at once."""
        self._failures = 0
        self._not_before = 0.0
        self._stopped = False
