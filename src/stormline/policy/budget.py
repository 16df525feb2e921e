"""What keeps retries from becoming a storm: one budget of tokens, `Retry-After`, and limits on repetition and flow.

    verdict = budget.plan(host, now, heard=heard)    # may this request be sent again?
    budget.observe_request(host, now)                # each first attempt earns a tenth of a retry

The share of 10 % is that of the book "Site Reliability Engineering" (chapter 21, "Handling Overload"); a burst and a
floor beside it are as in Finagle's `RetryBudget`. Limits on repeated payloads and on bytes are Mars's anti-avalanche
(`stn/src/{frequency,flow}_limit.cc`), with the time to wait said to the caller.
"""

import calendar
import math
import re
from typing import Final, NamedTuple

from stormline.core import limits
from stormline.policy.estimate import sound
from stormline.policy.ratelimit import RateLimiter
from stormline.policy.recent import RecentTable

_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DATE: Final = re.compile(r"[A-Z][a-z]{2}, (\d\d) ([A-Z][a-z]{2}) (\d{4}) (\d\d):(\d\d):(\d\d) GMT", re.ASCII)


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

    def __init__(self, burst: float) -> None:
        self.tokens = burst
        self.filled_at: float | None = None
        self.overloaded_at: float | None = None
        self.not_before: float | None = None

    def fill(self, now: float, rate_per_s: float, burst: float) -> None:
        passed = math.inf if self.filled_at is None else now - self.filled_at
        if passed > 0.0:
            self.tokens = min(burst, self.tokens + (0.0 if self.filled_at is None else passed * rate_per_s))
            self.filled_at = now

    def earn(self, burst: float) -> None:
        self.tokens = min(burst, self.tokens + limits.RETRY_SHARE)


class RetryBudget:
    """Retries allowed per host and over all hosts.

    Over any span of time of `t` seconds with `n` requests, a host gets at most `RETRY_BURST` + `RETRY_SHARE` * n +
    `RETRY_FLOOR_PER_S` * t retries; without the last term once it has said that it is overloaded
    (`limits.RETRY_OVERLOAD_S` long). Retries of attempts of which nothing was heard count as a tenth.
    """

    __slots__ = ("_all", "_hosts", "dropped")

    def __init__(self) -> None:
        self._hosts = RecentTable[str, _Purse](limits.RETRY_HOSTS_MAX, lambda: _Purse(limits.RETRY_BURST))
        self._all = _Purse(limits.RETRY_BURST_ALL)
        self.dropped = 0
        """Samples that were not sound."""

    def plan(self, host: str, now: float, *, heard: bool = True) -> RetryVerdict:
        """Ask for one retry to `host`; where it is allowed the token is taken.

        Args:
            host: to whom.
            now: monotonic seconds.
            heard: something of the failed attempt came back: a SYN-ACK, an acknowledgement, an answer. Where nothing
                did the network is dark or the host is gone; it costs `limits.RETRY_UNHEARD_COST` of a token only, or
                eight dark seconds in a lift would use up what is needed at their end.
        """
        purse, whole = self._filled(host, now)
        if purse.not_before is not None and now < purse.not_before:
            wait_s = purse.not_before - now
            return RetryVerdict(False, wait_s, f"{host} asked to wait {wait_s:.1f} s more")
        cost = 1.0 if heard else limits.RETRY_UNHEARD_COST
        if purse.tokens < cost:
            return RetryVerdict(False, 0.0, f"retry budget of {host} is spent")
        if whole.tokens < cost:
            return RetryVerdict(False, 0.0, "retry budget of all hosts together is spent")
        purse.tokens -= cost
        whole.tokens -= cost
        return RetryVerdict(True, 0.0, f"{purse.tokens:.1f} retries left for {host}")

    def observe_request(self, host: str, now: float) -> None:
        """A request was sent for the first time: it earns `limits.RETRY_SHARE` of a retry."""
        purse, whole = self._hosts.use(host), self._all
        if purse.tokens >= limits.RETRY_BURST and whole.tokens >= limits.RETRY_BURST_ALL:
            return  # full purses, as almost always
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
        purse = self._hosts.use(host)
        overloaded = purse.overloaded_at is not None and now - purse.overloaded_at < limits.RETRY_OVERLOAD_S
        purse.fill(now, 0.0 if overloaded else limits.RETRY_FLOOR_PER_S, limits.RETRY_BURST)
        self._all.fill(now, limits.RETRY_FLOOR_ALL_PER_S, limits.RETRY_BURST_ALL)
        return purse, self._all


def retry_after_s(value: str, wall_s: float) -> float | None:
    """Read a `Retry-After` header: seconds, or an HTTP-date (RFC 9110 section 10.2.3; its obsolete forms are not read).

    Args:
        value: the header's value.
        wall_s: the wall clock's time, seconds since 1970; a date is only as good as that clock.

    Returns:
        Seconds to wait from now, 0 where the date is past; None where the value cannot be read.
    """
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text) if len(text) <= 15 else limits.RETRY_AFTER_S_MAX
    date_s = http_date_s(text)
    return None if date_s is None else max(0.0, date_s - wall_s)


def http_date_s(text: str) -> float | None:
    """Read an HTTP-date (RFC 9110 section 5.6.7; its obsolete forms are not read).

    Returns:
        Seconds since 1970; None where it cannot be read.
    """
    found = _DATE.fullmatch(text)
    if found is None or found[2] not in _MONTHS:
        return None
    day, year, hour, minute, second = (int(found[group]) for group in (1, 3, 4, 5, 6))
    if not (1 <= day <= 31 and hour < 24 and minute < 60 and second <= 60 and year >= 1970):
        return None
    month = _MONTHS.index(found[2]) + 1
    if day > calendar.monthrange(year, month)[1]:
        return None
    return float(calendar.timegm((year, month, day, hour, minute, second)))


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
