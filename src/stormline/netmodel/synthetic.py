"""Capacity traces made by chance, with the look of recorded cellular ones: for machines without recordings.

The rate walks at random around a mean (an Ornstein-Uhlenbeck walk of its logarithm), and now and then the device is in
a dead spot. The three shapes have the mean rate, spread and gaps of drives recorded in U.S. networks (Winstein,
Sivaraman, Balakrishnan, NSDI 2013); they are no copies of them.
"""

import math
from dataclasses import dataclass
from typing import Final

from stormline.core import errors, limits_lab
from stormline.core.clock import Rng
from stormline.netmodel.trace import OPPORTUNITY_BYTES, Trace

_STEP_MS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CellularShape:
    """What a cellular link's capacity looks like over time."""

    name: str
    median_bps: float
    """Half of the time outside dead spots the rate is above this."""
    sigma: float
    """Standard deviation of the logarithm of the rate; 0.7: two thirds of the time within a factor of 2."""
    memory_s: float
    """How long the rate stays near what it is: the time constant of the walk."""
    dead_spots_per_hour: float
    dead_spot_s: float
    """Mean length of a dead spot, exponentially distributed."""
    dead_spot_s_max: float
    """Longer ones are cut."""


LTE: Final = CellularShape(
    name="lte-like", median_bps=4.0e6, sigma=0.7, memory_s=8.0,
    dead_spots_per_hour=120, dead_spot_s=0.5, dead_spot_s_max=1.5,
)  # fmt: skip
UMTS: Final = CellularShape(
    name="umts-like", median_bps=1.5e6, sigma=0.8, memory_s=12.0,
    dead_spots_per_hour=200, dead_spot_s=1.5, dead_spot_s_max=6.0,
)  # fmt: skip
EVDO: Final = CellularShape(
    name="evdo-like", median_bps=0.5e6, sigma=0.8, memory_s=15.0,
    dead_spots_per_hour=180, dead_spot_s=3.0, dead_spot_s_max=12.0,
)  # fmt: skip
SHAPES: Final = (LTE, UMTS, EVDO)


def make_trace(shape: CellularShape, rng: Rng, duration_s: float) -> Trace:
    """Make a trace of `duration_s` seconds; the same shape and chance give the same trace.

    Raises:
        ConfigError: the duration is not above 0, too long, or so short that nothing could be sent in it.
    """
    steps = int(duration_s * 1000) // _STEP_MS if math.isfinite(duration_s) else 0
    if steps < 1 or duration_s * shape.median_bps / (8 * OPPORTUNITY_BYTES) > limits_lab.TRACE_OPPORTUNITIES_MAX / 4:
        raise errors.ConfigError(f"trace {shape.name}: cannot be {duration_s:g} s long")
    keep = math.exp(-_STEP_MS / 1000 / shape.memory_s)
    fresh = math.sqrt(1 - keep * keep)
    start_dead = shape.dead_spots_per_hour / 3600 * _STEP_MS / 1000
    walk = _normal(rng)
    dead_steps = 0
    credit_bytes = 0.0
    at_ms: list[int] = []
    for step in range(steps):
        walk = walk * keep + fresh * _normal(rng)
        if dead_steps:
            dead_steps -= 1
            continue
        if rng.random() < start_dead:
            length_s = min(-shape.dead_spot_s * math.log(1.0 - rng.random()), shape.dead_spot_s_max)
            dead_steps = int(length_s * 1000) // _STEP_MS
        # Three sigma bound the walk: no rate is more than about ten times the median.
        rate_bps = shape.median_bps * math.exp(shape.sigma * max(-3.0, min(3.0, walk)))
        step_bytes = rate_bps * _STEP_MS / 8000
        at_ms += _opportunities(step * _STEP_MS, credit_bytes, step_bytes)
        credit_bytes = (credit_bytes + step_bytes) % OPPORTUNITY_BYTES
    end_ms = steps * _STEP_MS
    return Trace([*at_ms, end_ms], name=shape.name)


def _opportunities(from_ms: int, credit_bytes: float, step_bytes: float) -> list[int]:
    """Spread a step's opportunities evenly over it."""
    count = int((credit_bytes + step_bytes) // OPPORTUNITY_BYTES)
    return [
        from_ms + min(_STEP_MS - 1, int((number * OPPORTUNITY_BYTES - credit_bytes) / step_bytes * _STEP_MS))
        for number in range(1, count + 1)
    ]


def _normal(rng: Rng) -> float:
    """Draw from the standard normal distribution (Box and Muller 1958)."""
    return math.sqrt(-2.0 * math.log(1.0 - rng.random())) * math.cos(2.0 * math.pi * rng.random())
