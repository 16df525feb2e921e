"""Estimators that cannot be poisoned: quantiles of durations, and rates.

What is no number, negative or beyond belief is dropped and counted by the owner, never averaged in: clocks step, and a
smoothed round trip that went below zero once took a whole resolver down.
"""

import math
from typing import Final

from stormline.core import limits

_BUCKETS: Final = 52
_FIRST_S: Final = 0.001
_STEPS_PER_OCTAVE: Final = 3


def sound(value: object, largest: float) -> float | None:
    """Give `value` as a float where it is a number from 0 to `largest`, else None.

    Takes anything, raises nothing: None, NaN, infinities, negatives, texts and numbers that fit no float are not sound.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= largest else None


class DurationSketch:
    """Quantiles of durations from 1 ms to 131 s in 52 buckets, each a quarter wider than the one before.

    Answers are a bucket's upper edge: never below the true quantile of what counts, at most 26 % above it (for
    durations within the range; longer ones count as 131 s). Old samples fade: all counts are halved when
    `limits.SKETCH_SAMPLES_MAX` are reached and for every `limits.SKETCH_HALF_LIFE_S` of the clock that passes, so a
    single bad moment is soon forgotten. A slow sample shows at once in the high quantiles. About 140 bytes.
    """

    # Small whole numbers and one text of bytes: tens of thousands of these are kept.
    __slots__ = ("_counts", "_half_lives", "_total")

    def __init__(self) -> None:
        self._counts = bytes(_BUCKETS)
        self._total = 0
        self._half_lives: int | None = None

    def __len__(self) -> int:
        """Samples that count."""
        return self._total

    def observe(self, seconds: float, now: float) -> None:
        """Take one sound sample (see `sound`).

        Args:
            seconds: the duration.
            now: monotonic seconds; a step back ages nothing.
        """
        self._age(now)
        if self._total >= limits.SKETCH_SAMPLES_MAX:
            self._halve()
        bucket, counts = _bucket(seconds), self._counts
        self._counts = b"%b%c%b" % (counts[:bucket], counts[bucket] + 1, counts[bucket + 1 :])
        self._total += 1

    def quantile(self, share: float) -> float | None:
        """Give the duration that `share` of the samples do not exceed; None without samples."""
        if not self._total:
            return None
        rank = max(1, math.ceil(share * self._total))
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if seen >= rank:
                return _edge(bucket)
        return _edge(_BUCKETS - 1)

    def upper(self) -> float | None:
        """Give the 99th percentile, widened while samples are few; None without samples.

        The factor is 1 + 2 / sqrt(n): three for the first sample, as RFC 6298 (2.2) has it (RTO = R + 4 * R / 2), 1.25
        for 64.
        """
        high = self.quantile(0.99)
        return None if high is None else high * (1.0 + 2.0 / math.sqrt(self._total))

    def _age(self, now: float) -> None:
        half_lives = math.floor(now / limits.SKETCH_HALF_LIFE_S)
        passed = 0 if self._half_lives is None else half_lives - self._half_lives
        # After seven halvings of at most 64 nothing is left; a long sleep needs no long loop.
        for _ in range(min(passed, 7)):
            self._halve()
        if self._half_lives is None or passed > 0:
            self._half_lives = half_lives

    def _halve(self) -> None:
        self._counts = bytes(count >> 1 for count in self._counts)
        self._total = sum(self._counts)


def _bucket(seconds: float) -> int:
    if seconds <= _FIRST_S:
        return 0
    # The tiny step down keeps an edge in its own bucket although log2 rounds.
    return min(_BUCKETS - 1, max(0, math.ceil(_STEPS_PER_OCTAVE * math.log2(seconds / _FIRST_S) - 1e-9)))


def _edge(bucket: int) -> float:
    return float(_FIRST_S * 2.0 ** (bucket / _STEPS_PER_OCTAVE))


class RateWindow:
    """What a path carried lately, bytes per second: the best of each epoch, and of the epochs the worst.

    A transfer may be slow because the server is, or because it was short; none is faster than the path. So the best
    sample of an epoch (`limits.RATE_EPOCH_S`) is the nearest to the truth (the same filter as BBR's,
    draft-cardwell-iccrg-bbr-congestion-control section 4.1.1). Of the last epochs the worst is believed, because
    waiting too little costs answers on a network whose rate wavers.
    """

    __slots__ = ("_epochs",)

    def __init__(self) -> None:
        self._epochs: list[tuple[float, float]] = []

    def observe(self, bytes_per_s: float, now: float) -> None:
        """Take one sound sample above zero."""
        if bytes_per_s <= 0.0:
            return
        if self._epochs:
            start, best = self._epochs[-1]
            if now - start < limits.RATE_EPOCH_S:
                self._epochs[-1] = (start, max(best, bytes_per_s))
                return
        self._epochs.append((now, bytes_per_s))
        del self._epochs[: -limits.RATE_EPOCHS_MAX]

    def bytes_per_s(self, now: float) -> float | None:
        """Give the rate to count on; None where none was measured within `limits.RATE_MEMORY_S`."""
        fresh = [best for start, best in self._epochs if now - start < limits.RATE_MEMORY_S]
        return min(fresh, default=None)
