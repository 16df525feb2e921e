"""The course of one link in time, laid out beforehand: what it is like at each moment, known to whoever judges.

course = Course(up=params, down=params, dark=((10.0, 18.0),))
course.at(12.0).dark        # True
"""

import bisect
from dataclasses import dataclass
from typing import Final, NamedTuple

from stormline.core import errors
from stormline.netmodel.params import FadeParams, LinkParams
from stormline.netmodel.trace import OPPORTUNITY_BYTES

TRACE_WINDOW_S: Final = 1.0
"""Stretch over which a trace's capacity is counted: one with none in it is dark."""


class Conditions(NamedTuple):
    """What a link is like at one moment.

    Attributes:
        rtt_s: round trip of a small packet on the empty link.
        bytes_per_s: capacity towards the device; None: no bound.
        loss: share of packets lost in each direction (the worse one) in the long run, fades and bursts included.
        loss_events: share with which a loss begins: of several lost in one burst one counts, and a fade counts once.
        dark: nothing passes.
    """

    rtt_s: float
    bytes_per_s: float | None
    loss: float
    loss_events: float
    dark: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One link from second 0 on.

    Raises:
        ConfigError: changes or dark spells out of order.
    """

    up: LinkParams
    down: LinkParams
    fades: FadeParams | None = None
    changes: tuple[tuple[float, LinkParams, LinkParams], ...] = ()
    """(second, up, down): what it is from then on."""
    dark: tuple[tuple[float, float], ...] = ()
    """(from, until), seconds: nothing passes in either direction."""

    def __post_init__(self) -> None:
        times = [at_s for at_s, _, _ in self.changes]
        edges = [edge for spell in self.dark for edge in spell]
        if times != sorted(times) or edges != sorted(edges):
            raise errors.ConfigError("course: changes and dark spells must be in order")

    def params_at(self, at_s: float) -> tuple[LinkParams, LinkParams]:
        """Give the parameters up and down."""
        number = bisect.bisect_right([begin_s for begin_s, _, _ in self.changes], at_s)
        return (self.up, self.down) if number == 0 else self.changes[number - 1][1:]

    def at(self, at_s: float) -> Conditions:
        """Give what the link is like at a moment."""
        up, down = self.params_at(at_s)
        dark = any(begin_s <= at_s < end_s for begin_s, end_s in self.dark)
        capacity = [_capacity(way, at_s) for way in (up, down)]
        rtt_s = sum(way.delay_s + way.jitter_s / 2.0 for way in (up, down))
        return Conditions(
            rtt_s=rtt_s,
            bytes_per_s=capacity[1],
            loss=max(_loss(way, self.fades) for way in (up, down)),
            loss_events=max(_loss_events(way, self.fades, rtt_s) for way in (up, down)),
            dark=dark or 0.0 in capacity,
        )


def _capacity(params: LinkParams, at_s: float) -> float | None:
    if params.trace is None:
        return None if params.rate_bps is None else params.rate_bps / 8.0
    place_s = at_s + params.trace_offset_s
    begin_s = max(0.0, place_s - TRACE_WINDOW_S)
    passed = params.trace.opportunities(begin_s, begin_s + TRACE_WINDOW_S)
    return passed * OPPORTUNITY_BYTES / TRACE_WINDOW_S


def _loss(params: LinkParams, fades: FadeParams | None) -> float:
    """Give the share lost in the long run; causes are independent."""
    passing = 1.0 - params.loss_pct / 100.0
    if params.burst is not None:
        passing *= 1.0 - params.burst.mean_loss_pct / 100.0
    if fades is not None:
        passing *= 1.0 - fades.duration_s / fades.period_s * fades.loss_pct / 100.0
    return 1.0 - passing


def _loss_events(params: LinkParams, fades: FadeParams | None, rtt_s: float) -> float:
    """Give the share of packets with which a loss begins.

    A fade is one event in its period T, however many packets it takes. TCP grows by a segment with each round trip R
    and halves at each event, so it sends 1.5 (T / R)^2 segments from one to the next.
    """
    share = params.loss_pct / 100.0
    if params.burst is not None:
        share += params.burst.mean_loss_pct / 100.0 * params.burst.r_pct / 100.0
    if fades is not None:
        share += (rtt_s / fades.period_s) ** 2 / 1.5
    return min(1.0, share)
