"""Estimators that cannot be poisoned: quantiles of durations, and rates.

What is no number, negative or beyond belief is dropped and counted by the owner, never averaged in: clocks step, and a
smoothed round trip that went below zero once took a whole resolver down.
"""

import math
from collections.abc import Iterable
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
    single bad moment is soon forgotten. A slow sample shows at once in the high quantiles. About 100 bytes.
    """

    # Small whole numbers and one text of bytes: tens of thousands of these are kept. The text is the number of the
    # first bucket that counts, then the counts from there to the last: most paths need few buckets of the 52.
    __slots__ = ("_counts", "_half_lives", "_total")

    def __init__(self) -> None:
        self._counts = b""
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
        self._count(_bucket(seconds))

    def quantile(self, share: float) -> float | None:
        """Give the duration that `share` of the samples do not exceed; None without samples."""
        if not self._total:
            return None
        return _edge(self._bucket_at(max(1, math.ceil(share * self._total))))

    def upper(self) -> float | None:
        """Give the 99th percentile, widened while samples are few; None without samples.

        The factor is 1 + 2 / sqrt(n): three for the first sample, as RFC 6298 (2.2) has it (RTO = R + 4 * R / 2), 1.25
        for 64.
        """
        high = self.quantile(0.99)
        return None if high is None else high * (1.0 + 2.0 / math.sqrt(self._total))

    def summary(self) -> tuple[int, ...]:
        """Give the buckets of at most `limits.SKETCH_SAMPLES_KEPT` samples that stand for all, shortest first.

        Where there are no more than that it is all of them; else the middles of as many equal shares, and the longest.
        """
        total, kept = self._total, min(self._total, limits.SKETCH_SAMPLES_KEPT)
        ranks = [math.ceil((number + 0.5) * total / kept) for number in range(kept - 1)] + [total] * (kept > 0)
        buckets: list[int] = []
        seen = 0
        for bucket, count in enumerate(self._counts[1:], self._counts[0] if self._counts else 0):
            seen += count
            while len(buckets) < kept and ranks[len(buckets)] <= seen:
                buckets.append(bucket)
        return tuple(buckets)

    def restore(self, buckets: Iterable[object], now: float) -> None:
        """Take a `summary` of an earlier time as so many samples of now, where there are none yet; what is no bucket is
        left out."""
        self._age(now)
        sound_ones = [each for each in buckets if type(each) is int and 0 <= each < _BUCKETS]
        taken = sound_ones[: limits.SKETCH_SAMPLES_KEPT]
        if taken and not self._total:
            first = min(taken)
            counts = bytearray(max(taken) - first + 1)
            for bucket in taken:
                counts[bucket - first] += 1
            self._counts = b"%c%b" % (first, bytes(counts))
            self._total = len(taken)

    def _count(self, bucket: int) -> None:
        if self._total >= limits.SKETCH_SAMPLES_MAX:
            self._halve()
        counts = self._counts
        first = counts[0] if counts else bucket
        at = bucket - first + 1
        if at < 1:
            self._counts = b"%c\1%b%b" % (bucket, bytes(-at), counts[1:])
        elif at >= len(counts):
            self._counts = b"%c%b%b\1" % (first, counts[1:], bytes(at - max(1, len(counts))))
        else:
            self._counts = b"%b%c%b" % (counts[:at], counts[at] + 1, counts[at + 1 :])
        self._total += 1

    def _bucket_at(self, rank: int) -> int:
        seen = 0
        for bucket, count in enumerate(self._counts[1:], self._counts[0]):
            seen += count
            if seen >= rank:
                return bucket
        return _BUCKETS - 1

    def _age(self, now: float) -> None:
        half_lives = math.floor(now / limits.SKETCH_HALF_LIFE_S)
        passed = 0 if self._half_lives is None else half_lives - self._half_lives
        # After seven halvings of at most 64 nothing is left; a long sleep needs no long loop.
        for _ in range(min(passed, 7)):
            self._halve()
        if self._half_lives is None or passed > 0:
            self._half_lives = half_lives

    def _halve(self) -> None:
        halved = bytes(count >> 1 for count in self._counts[1:])
        self._total = sum(halved)
        begun = halved.lstrip(b"\0")
        self._counts = b"%c%b" % (self._counts[0] + len(halved) - len(begun), begun.rstrip(b"\0")) if begun else b""


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

    def last(self) -> tuple[float, float] | None:
        """Give the newest epoch, when it began and its best rate; None where nothing was measured."""
        return self._epochs[-1] if self._epochs else None

    def bytes_per_s(self, now: float) -> float | None:
        """Give the rate to count on; None where none was measured within `limits.RATE_MEMORY_S`."""
        fresh = [best for start, best in self._epochs if now - start < limits.RATE_MEMORY_S]
        return min(fresh, default=None)
