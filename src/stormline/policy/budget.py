"""What keeps retries from becoming a storm: one budget of tokens, `Retry-After`, and limits on repetition and flow.

    verdict = budget.plan(host, now)         # may this request be sent again?
    budget.observe_request(host, now)        # each first attempt earns a tenth of a retry

The share of 10 % is that of the book "Site Reliability Engineering" (chapter 21, "Handling Overload"); a burst and a
floor beside it are as in Finagle's `RetryBudget`. Limits on repeated payloads and on bytes are Mars's anti-avalanche
(`stn/src/{frequency,flow}_limit.cc`), with the time to wait said to the caller.
"""

from collections import OrderedDict
from typing import NamedTuple

from stormline.core import limits
from stormline.policy.estimate import sound
from stormline.policy.ratelimit import RateLimiter


class RetryVerdict(NamedTuple):
    """Whether a retry may be made.

    Attributes:
        allowed: it may, and its token is taken.
        wait_s: it may after this long: the pause the server asked for. 0 with `allowed`. With neither, the budget is
            spent and the failure stands.
        why: for the call's story.
    """

    allowed: bool
    wait_s: float
    why: str


class _Purse:
    """Tokens of one host, or of all."""

    __slots__ = ("filled_at", "not_before", "overloaded_at", "tokens")

    def __init__(self, now: float, burst: float) -> None:
        self.tokens = burst
        self.filled_at = now
        self.overloaded_at: float | None = None
        self.not_before: float | None = None

    def fill(self, now: float, rate_per_s: float, burst: float) -> None:
        passed = now - self.filled_at
        if passed > 0.0:
            self.filled_at = now
            self.tokens = min(burst, self.tokens + passed * rate_per_s)

    def earn(self, burst: float) -> None:
        self.tokens = min(burst, self.tokens + limits.RETRY_SHARE)


class RetryBudget:
    """Retries allowed per host and over all hosts.

    Over any span of time of `t` seconds with `n` requests, a host gets at most `RETRY_BURST` + `RETRY_SHARE` * n +
    `RETRY_FLOOR_PER_S` * t retries; without the last term once it has said that it is overloaded
    (`limits.RETRY_OVERLOAD_S` long).
    """

    __slots__ = ("_all", "_hosts", "dropped")

    def __init__(self) -> None:
        self._hosts: OrderedDict[str, _Purse] = OrderedDict()
        self._all: _Purse | None = None
        self.dropped = 0
        """Samples that were not sound."""

    def plan(self, host: str, now: float) -> RetryVerdict:
        """Ask for one retry to `host`; where it is allowed the token is taken."""
        purse, whole = self._filled(host, now)
        if purse.not_before is not None and now < purse.not_before:
            wait_s = purse.not_before - now
            return RetryVerdict(False, wait_s, f"{host} asked to wait {wait_s:.1f} s more")
        if purse.tokens < 1.0:
            return RetryVerdict(False, 0.0, f"retry budget of {host} is spent")
        if whole.tokens < 1.0:
            return RetryVerdict(False, 0.0, "retry budget of all hosts together is spent")
        purse.tokens -= 1.0
        whole.tokens -= 1.0
        return RetryVerdict(True, 0.0, f"{purse.tokens:.1f} retries left for {host}")

    def observe_request(self, host: str, now: float) -> None:
        """A request was sent for the first time: it earns `limits.RETRY_SHARE` of a retry."""
        purse, whole = self._filled(host, now)
        purse.earn(limits.RETRY_BURST)
        whole.earn(limits.RETRY_BURST_ALL)

    def observe_overload(self, host: str, now: float, *, retry_after_s: object = None) -> None:
        """`host` said that it has too much to do (429, 503, a refused stream).

        Args:
            host: who.
            now: monotonic seconds.
            retry_after_s: the pause it asked for, believed up to `limits.RETRY_AFTER_S_MAX`. What is no number is
                dropped.
        """
        purse, _ = self._filled(host, now)
        purse.overloaded_at = now
        if retry_after_s is None:
            return
        pause = sound(retry_after_s, 2.0**53)
        if pause is None:
            self.dropped += 1
            return
        until = now + min(pause, limits.RETRY_AFTER_S_MAX)
        purse.not_before = until if purse.not_before is None else max(until, purse.not_before)

    def observe_answer(self, host: str, now: float) -> None:
        """`host` answered well: what it asked for before no longer holds."""
        purse, _ = self._filled(host, now)
        purse.not_before = purse.overloaded_at = None

    def next_timer(self) -> float | None:
        """None: `plan` says how long to wait."""
        return None

    def _filled(self, host: str, now: float) -> tuple[_Purse, _Purse]:
        purse = self._hosts.get(host)
        if purse is None:
            purse = self._hosts[host] = _Purse(now, limits.RETRY_BURST)
            if len(self._hosts) > limits.RETRY_HOSTS_MAX:
                self._hosts.popitem(last=False)
        else:
            self._hosts.move_to_end(host)
        if self._all is None:
            self._all = _Purse(now, limits.RETRY_BURST_ALL)
        overloaded = purse.overloaded_at is not None and now - purse.overloaded_at < limits.RETRY_OVERLOAD_S
        purse.fill(now, 0.0 if overloaded else limits.RETRY_FLOOR_PER_S, limits.RETRY_BURST)
        self._all.fill(now, limits.RETRY_FLOOR_ALL_PER_S, limits.RETRY_BURST_ALL)
        return purse, self._all


def repetition_limit() -> RateLimiter:
    """Make the limit on one and the same request (keyed by a digest of method, target and body): loops are stopped.

    `take` gives the seconds to wait. Mars refuses the 106th send within the hour; here sends are earned back, so that
    polling once a second goes on for ever.
    """
    return RateLimiter(rate_per_s=limits.REPEAT_RATE_PER_S, burst=limits.REPEAT_BURST, keys_max=limits.REPEAT_KEYS_MAX)


class FlowLimit:
    """Bytes a network may carry for us: a leaky bucket, for callers that set one (a metered link).

    One request larger than the whole bucket may go when the bucket is full: it can never fit better.
    """

    __slots__ = ("_burst", "_level", "_looked_at", "_per_s")

    def __init__(
        self, *, bytes_per_s: float = limits.FLOW_BYTES_PER_S, burst_bytes: int = limits.FLOW_BYTES_BURST
    ) -> None:
        if not (bytes_per_s > 0 and burst_bytes >= 1):
            raise ValueError("bytes_per_s must be above 0, burst_bytes at least 1")
        self._per_s = bytes_per_s
        self._burst = burst_bytes
        self._level = 0.0
        self._looked_at: float | None = None

    def take(self, size_bytes: int, now: float) -> float:
        """Take room for `size_bytes`; give 0.0, or the seconds until there is room and take nothing.

        What turns out larger (an answer) is booked by `add`.
        """
        self._leak(now)
        over = self._level + min(max(0, size_bytes), self._burst) - self._burst
        if over > 1e-6 * self._burst:
            return over / self._per_s
        self._level += max(0, size_bytes)
        return 0.0

    def add(self, size_bytes: int, now: float) -> None:
        """Book bytes that came unasked: they are carried already."""
        self._leak(now)
        self._level += max(0, size_bytes)

    def _leak(self, now: float) -> None:
        if self._looked_at is not None and now > self._looked_at:
            self._level = max(0.0, self._level - (now - self._looked_at) * self._per_s)
        if self._looked_at is None or now > self._looked_at:
            self._looked_at = now
