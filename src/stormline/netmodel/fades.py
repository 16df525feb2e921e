"""Fades: moments at which the radio is bad, the same ones for both directions of a link."""

import math
from collections import deque

from stormline.core.clock import Rng
from stormline.netmodel.params import Distribution, FadeParams


class Fades:
    """A sequence of fades, made as time goes on. Give one object to both directions.

    The sequence depends on the parameters and the source of chance alone, not on who asks when or how often.
    """

    __slots__ = ("_episodes", "_made_until_s", "_rng", "params")

    def __init__(self, params: FadeParams, rng: Rng, now: float) -> None:
        """Begin with a gap at `now`.

        Args:
            params: how often, how long, how bad.
            rng: a source of chance that nothing else draws from, or the sequence depends on that too.
            now: monotonic seconds.
        """
        self.params = params
        self._rng = rng
        self._episodes: deque[tuple[float, float]] = deque()
        self._made_until_s = now

    def loss_pct_at(self, at_s: float, now: float) -> float:
        """Share of packets lost on the air at `at_s`.

        Args:
            at_s: when a packet is sent; at `now` or later, and finite.
            now: monotonic seconds; fades that ended before it are forgotten.
        """
        episodes = self._episodes
        while episodes and episodes[0][1] <= now:
            episodes.popleft()
        while self._made_until_s <= at_s:
            self._make_one(now)
        for start_s, end_s in episodes:
            if at_s < start_s:
                return 0.0
            if at_s < end_s:
                return self.params.loss_pct
        return 0.0

    def _make_one(self, now: float) -> None:
        start_s = self._made_until_s + self._length(self.params.period_s - self.params.duration_s)
        # A length of 0 is possible and harmless; that time always moves on is not left to chance.
        end_s = max(start_s + self._length(self.params.duration_s), math.nextafter(self._made_until_s, math.inf))
        if end_s > now:
            self._episodes.append((start_s, end_s))
        self._made_until_s = end_s

    def _length(self, mean_s: float) -> float:
        match self.params.distribution:
            case Distribution.FIXED:
                return mean_s
            case Distribution.UNIFORM:
                return mean_s * (0.5 + self._rng.random())
            case Distribution.EXPONENTIAL:
                return -mean_s * math.log(1.0 - self._rng.random())
