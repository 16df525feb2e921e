"""What every client under test is asked: the same requests at the same moments, with answers that prove themselves.

Drivers load this file by its path in other environments, so it uses the standard library alone.
"""

import hashlib
import math
import random
from typing import Final, NamedTuple

PATIENCE_S: Final = 10.0
"""How long a user waits for one answer; what comes later is no success."""
IMPATIENCE_S: Final = 3.0
"""How long an impatient user waits; counted beside the other."""

SMALL_BYTES: Final = 1024
MEDIUM_BYTES: Final = 30 * 1024
LARGE_BYTES: Final = 128 * 1024
MEDIUM_SHARE: Final = 0.067
LARGE_SHARE: Final = 0.003
REQUESTS_MAX: Final = 100_000
"""Of one schedule: a bound against slips of the hand."""
DURATION_S_MAX: Final = 86_400.0
SIZE_BYTES_MAX: Final = 1 << 20
"""Of one body: an origin refuses to make a larger one."""


class Ask(NamedTuple):
    """One request of the schedule."""

    id: int
    """Unique in a schedule, from 0 in order of time."""
    at_s: float
    """When it is asked, from the begin of the run."""
    size: int
    """Bytes of the body it must give."""


def schedule(seed: int, requests: int, duration_s: float) -> list[Ask]:
    """Make the requests of one run: Poisson arrivals, 93 % of 1 KB, 6.7 % of 30 KB, the rest (at least one) of 128 KB.

    The number is exact: arrival times of a Poisson process whose count is known are independent and uniform. The same
    arguments give the same schedule on every machine and Python.

    Args:
        seed: any number.
        requests: how many, 1 to `REQUESTS_MAX`.
        duration_s: all are asked before this moment.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 1 <= requests <= REQUESTS_MAX:
        raise ValueError(f"requests: expected 1 to {REQUESTS_MAX}, got {requests}")
    if not (math.isfinite(duration_s) and 0 < duration_s <= DURATION_S_MAX):
        raise ValueError(f"duration: expected more than 0 and at most {DURATION_S_MAX:g} s, got {duration_s:g}")
    # Only `random()` is the same in every version of Python; shuffles and ranges are not promised to be.
    chance = random.Random(f"lab/schedule/{seed}")  # noqa: S311 - to be repeated, not to be secret
    times = sorted(round(chance.random() * duration_s, 4) for _ in range(requests))
    large = max(1, round(requests * LARGE_SHARE))
    medium = min(requests - large, round(requests * MEDIUM_SHARE))
    sizes = [LARGE_BYTES] * large + [MEDIUM_BYTES] * medium + [SMALL_BYTES] * (requests - large - medium)
    order = sorted(range(requests), key=lambda _: chance.random())
    return [Ask(number, at_s, sizes[place]) for number, (at_s, place) in enumerate(zip(times, order, strict=True))]


def target(id: int, size: int) -> str:
    """Give the path of a request, as the origin serves it."""
    return f"/item/{id}/{size}"


def body(id: int, size: int) -> bytes:
    """Give the one right answer to a request: no two requests share it, and nothing compresses it.

    Raises:
        ValueError: the size is out of range.
    """
    if not 0 <= size <= SIZE_BYTES_MAX:
        raise ValueError(f"size: expected 0 to {SIZE_BYTES_MAX}, got {size}")
    return hashlib.shake_128(f"stormline lab item {id} of {size}".encode()).digest(size)
