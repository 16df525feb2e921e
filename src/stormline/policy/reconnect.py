"""When a lost or refused long connection is tried again: exponential back-off with jitter, never a herd."""

from stormline.core import codes, errors, limits


def renewable(error: BaseException | None) -> bool:
    """True where a refusal says that a new token would help.

    One that is not genuine counts too: a token kept from a platform whose keys were made anew since.
    """
    return isinstance(error, errors.RefusedError) and (
        error.action is codes.Action.RENEW or error.code == codes.Code.TOKEN_INVALID
    )


class Reconnect:
    """Back-off of one long connection.

    `observe_*` report outcomes; `may_try` and the timers say when. The first try after a loss is jittered as well: when
    a gateway restarts, all its clients lose it in the same millisecond. A session that was lost soon after it began
    counts as a failed try: a gateway that accepts and drops is not asked twice a second for ever.
    """

    __slots__ = ("_failures", "_first_s", "_keep_from", "_max_s", "_not_before", "_slow_until", "_spread_s",
                 "_stands_since", "_stopped")  # fmt: skip

    def __init__(self) -> None:
        self._failures = 0
        self._not_before = 0.0
        self._keep_from = 0.0
        self._first_s, self._max_s = limits.RECONNECT_FIRST_S, limits.RECONNECT_MAX_S
        self._slow_until = 0.0
        self._spread_s = 0.0
        self._stands_since: float | None = None
        self._stopped = False

    def set_pace(self, first_s: float, max_s: float) -> None:
        """Have a connection that nobody waits for come back at another pace; a quicker one counts from now on.

        Args:
            first_s: span of the first return.
            max_s: longest pause between two tries.
        """
        if first_s < self._first_s:
            self._slow_until = 0.0
        self._first_s, self._max_s = first_s, max_s

    def may_try(self, now: float) -> bool:
        """True where a connection may be opened at `now`."""
        return not self._stopped and now >= self._not_before

    def next_timer(self) -> float | None:
        """Earliest moment of the next try; None where none will come by itself."""
        return None if self._stopped else self._not_before

    def keep_timer(self) -> float | None:
        """As `next_timer`, for a connection that nobody waits for: also by `observe_leave`'s spread and the pace."""
        return None if self._stopped else max(self._not_before, self._keep_from, self._slow_until)

    @property
    def failing(self) -> bool:
        """The last try failed, or its session was short: another way is the better bet for now."""
        return self._failures > 0

    @property
    def stopped(self) -> bool:
        """The server said that asking again will not help."""
        return self._stopped

    def observe_success(self, now: float, *, spread_s: float = 0.0) -> None:
        """A session stands.

        Args:
            now: monotonic seconds.
            spread_s: the server's advice: over which span to come back where it is gone without a word. Kept for a
                connection that nobody waits for, up to `limits.RECONNECT_MAX_S`: a call comes at a moment of its own.
        """
        self._spread_s = min(max(0.0, spread_s), limits.RECONNECT_MAX_S)
        self._stands_since = now
        self._not_before = self._keep_from = self._slow_until = 0.0

    def observe_loss(self, now: float, chance: float, *, soon: bool = False) -> None:
        """A standing session was lost: come back soon, but not all at once.

        Args:
            now: monotonic seconds.
            chance: a draw from [0, 1).
            soon: it was found dead by silence, so none comes back at the same moment; what it missed waits, and a dial
                at once tells whether the network was dead as well.
        """
        if self._was_stable(now):
            self._not_before = now + limits.RECONNECT_FIRST_S * chance
            first_s = limits.RECONNECT_FIRST_S if soon else max(self._first_s, self._spread_s)
            self._slow_until = now + first_s * chance
        else:
            self.observe_failure(now, chance)

    def observe_leave(self, now: float, chance: float, spread_s: float) -> None:
        """The server asked us to leave and come back (elsewhere) at a random moment within `spread_s`.

        A call may open the next connection at once: calls come at random moments themselves.
        """
        if not self._was_stable(now):
            self.observe_failure(now, chance)
        self._keep_from = now + min(max(0.0, spread_s), limits.RECONNECT_MAX_S) * chance

    def observe_failure(self, now: float, chance: float, *, retry_after_s: float | None = None) -> None:
        """A try failed.

        Args:
            now: monotonic seconds.
            chance: a draw from [0, 1).
            retry_after_s: earliest return the server asked for; believed up to `limits.RECONNECT_RETRY_AFTER_MAX_S`.
        """
        doubled = 2.0 ** min(self._failures, 16)
        span = min(limits.RECONNECT_MAX_S, limits.RECONNECT_FIRST_S * doubled)
        slow_s = min(self._max_s, max(self._first_s * doubled, self._spread_s))
        self._slow_until = now + slow_s * (0.5 + 0.5 * chance)
        self._failures += 1
        self._stands_since = None
        asked = min(max(0.0, retry_after_s or 0.0), limits.RECONNECT_RETRY_AFTER_MAX_S)
        self._not_before = now + max(span * (0.5 + 0.5 * chance), asked * (1.0 + 0.25 * chance))

    def _was_stable(self, now: float) -> bool:
        """Say whether the session that just ended stood long enough to forget the failures before it."""
        since, self._stands_since = self._stands_since, None
        stable = since is not None and now - since >= limits.RECONNECT_STABLE_S
        if stable:
            self._failures = 0
        return stable

    def observe_stop(self) -> None:
        """The server refused for good (`codes.Action.STOP`)."""
        self._stopped = True

    def reset(self) -> None:
        """Something changed (token, network, plan): try at once."""
        self._failures = 0
        self._not_before = self._keep_from = self._slow_until = 0.0
        self._stopped = False
