"""Staged roll-outs: which devices take part, and when the new rules are worse than the old ones. Pure.

A device's place in a roll-out is a hash of its id and of the version rolled out: the same on every node and at every
question, so a device that takes part stays in while the share grows, and another roll-out begins with other devices.

Whether the new rules are worse is decided by Fisher's exact test on the calls of both arms, one-sided: exact for any
counts, also where failures are rare or one arm is small, which is where the normal approximation of the two-proportion
test fails. Counts are looked at again and again, and each look could err by chance. So looks are spaced (the smaller
arm must have grown by a quarter) and the k-th look gets the share 6 / (pi k)^2 of the allowed error: over all looks of
a roll-out the chance to halt rules that are not worse stays below `GuardPolicy.false_halt` (the union bound).

The test takes calls as independent. Those of one device are not quite; `GuardPolicy.margin` and `calls_min` keep a few
unlucky devices from halting a roll-out.
"""

import hashlib
import itertools
import math
from dataclasses import dataclass
from typing import Annotated

import msgspec

from stormline.core import errors
from stormline.core import limits_platform as limits

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
_LOOK_GROWTH = 1.25


def place(device: str, version: int) -> float:
    """Give a device's place in the roll-out of a version: evenly spread over [0, 100)."""
    digest = hashlib.sha256(b"%d\0%s" % (version, device.encode("utf-8", "surrogatepass"))).digest()
    return int.from_bytes(digest[:6], "big") * 100.0 / 2**48


def takes_part(device: str, version: int, percent: float) -> bool:
    """Say whether a device gets the new rules. A device without an id never does."""
    return bool(device) and place(device, version) < percent


def check_steps(steps: tuple[float, ...]) -> tuple[float, ...]:
    """Give back the percentages of a roll-out, 100 added where they end below it.

    Raises:
        RequestRefused: none, too many, not growing, or outside 0 to 100 (`bad-request`).
    """
    if not 1 <= len(steps) <= limits.ROLLOUT_STEPS_MAX:
        raise errors.RequestRefused("bad-request", f"a roll-out has 1 to {limits.ROLLOUT_STEPS_MAX} steps")
    if not all(0 < step <= 100 for step in steps):  # not-a-number fails too
        raise errors.RequestRefused("bad-request", "a step is above 0 and at most 100 percent")
    if any(a >= b for a, b in itertools.pairwise(steps)):
        raise errors.RequestRefused("bad-request", "the steps of a roll-out must grow")
    return steps if steps[-1] == 100 else (*steps, 100.0)


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Calls of one arm since the present step began.

    Attributes:
        calls: finished calls.
        successes: those of them that succeeded.
    """

    calls: _Count = 0
    successes: _Count = 0

    @property
    def failures(self) -> int:
        """Calls that did not succeed."""
        return self.calls - self.successes


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardPolicy:
    """When a roll-out is halted.

    Attributes:
        calls_min: calls each arm must have before it is judged.
        margin: how much lower the new arm's success rate must be at least, as a share: a difference that is certain
            and tiny is no reason to halt.
        false_halt: largest chance to halt a roll-out that is not worse, over all its looks.

    Raises:
        ConfigError: one is out of range.
    """

    calls_min: int = limits.ROLLOUT_CALLS_MIN
    margin: float = limits.ROLLOUT_MARGIN
    false_halt: float = limits.ROLLOUT_FALSE_HALT

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.calls_min < 1 or not 0 <= self.margin < 1 or not 0 < self.false_halt < 1:
            raise errors.ConfigError("roll-out: calls_min must be at least 1, margin and false_halt between 0 and 1")


class Looks(msgspec.Struct, frozen=True):
    """How often the counts were looked at.

    Attributes:
        done: looks so far in this roll-out.
        next_calls: calls the smaller arm must have for the next one.
    """

    done: int = 0
    next_calls: int = 0


class Judgement(msgspec.Struct, frozen=True):
    """What a look says.

    Attributes:
        worse: the new arm is worse: halt.
        p_value: chance of such a difference if the arms were equal; None where there was no look.
        looks: to be kept for the next one.
    """

    worse: bool
    p_value: float | None
    looks: Looks


def judge(new: Counts, old: Counts, looks: Looks, policy: GuardPolicy | None = None) -> Judgement:
    """Look at the counts, if there are enough and enough new ones.

    Args:
        new: calls of devices with the new rules.
        old: calls of the others.
        looks: what the last judgement gave.
        policy: when to halt.
    """
    policy = policy or GuardPolicy()
    smaller = min(new.calls, old.calls)
    if smaller < max(policy.calls_min, looks.next_calls):
        return Judgement(False, None, looks)
    done = looks.done + 1
    p_value = tail(new, old)
    allowed = policy.false_halt * 6.0 / (math.pi * done) ** 2
    lower = old.successes / old.calls - new.successes / new.calls
    worse = p_value <= allowed and lower >= policy.margin
    return Judgement(worse, p_value, Looks(done, math.ceil(smaller * _LOOK_GROWTH)))


def tail(new: Counts, old: Counts) -> float:
    """Give Fisher's one-sided p-value: the chance that as many of all failures, or more, fall to the new arm.

    1.0 where the new arm fails no more often than the old one. Takes a number of steps in the order of the standard
    deviation of the failures: microseconds for thousands of calls.
    """
    total, failed = new.calls + old.calls, new.failures + old.failures
    seen, most = new.failures, min(failed, new.calls)
    if seen * total <= failed * new.calls:
        return 1.0
    log_term = _log_choose(failed, seen) + _log_choose(total - failed, new.calls - seen) - _log_choose(total, new.calls)
    term = whole = 1.0  # relative to the first, which may be far below the smallest float
    for count in range(seen, most):
        term *= (failed - count) * (new.calls - count)
        term /= (count + 1) * (total - failed - new.calls + count + 1)
        whole += term
        if term < whole * 1e-17:
            break
    return min(1.0, math.exp(log_term) * whole)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
