"""Capacity traces in mahimahi's format (Netravali et al., USENIX ATC 2015).

One whole number a line: milliseconds since the start at which the link may send 1500 bytes. A trace repeats; its last
line is also its length. Lines with the same number are several opportunities in one millisecond.
"""

import bisect
import math
from array import array
from collections.abc import Iterable
from typing import Final

from stormline.core import errors, limits_lab

OPPORTUNITY_BYTES: Final = 1500
"""What one line of a trace may send."""


class Trace:
    """The opportunities of one recording. Immutable; any number of links may share it."""

    __slots__ = ("_at_ms", "name")

    def __init__(self, at_ms: Iterable[int], *, name: str = "trace") -> None:
        """Take the opportunities in milliseconds.

        Raises:
            ConfigError: none, too many, negative, out of order, or all at 0 (a trace without length).
        """
        self.name = name
        try:
            self._at_ms = array("Q", at_ms)
        except (OverflowError, TypeError) as error:
            raise errors.ConfigError(f"trace {name}: {error}") from None
        if not self._at_ms or self._at_ms[-1] == 0:
            raise errors.ConfigError(f"trace {name}: holds no opportunity after 0 ms")
        if len(self._at_ms) > limits_lab.TRACE_OPPORTUNITIES_MAX:
            raise errors.ConfigError(f"trace {name}: more than {limits_lab.TRACE_OPPORTUNITIES_MAX} opportunities")
        if any(later < earlier for earlier, later in zip(self._at_ms, self._at_ms[1:], strict=False)):
            raise errors.ConfigError(f"trace {name}: times go back")

    @classmethod
    def parse(cls, text: str, *, name: str = "trace") -> "Trace":
        """Read a trace file's text; empty lines are skipped.

        Raises:
            ConfigError: it is not such a trace; the message names the line.
        """
        at_ms = []
        for number, line in enumerate(text.splitlines(), 1):
            word = line.strip()
            if not word:
                continue
            if not (word.isascii() and word.isdigit() and len(word) <= 15):
                raise errors.ConfigError(f"trace {name}: line {number} is no whole number of milliseconds")
            at_ms.append(int(word))
        return cls(at_ms, name=name)

    def format(self) -> str:
        """Give the text of a trace file."""
        return "".join(f"{at_ms}\n" for at_ms in self._at_ms)

    def __len__(self) -> int:
        """Number of opportunities before it repeats."""
        return len(self._at_ms)

    def __repr__(self) -> str:
        return f"Trace({self.name!r}, {self.period_s:g} s, {self.mean_bps / 1e6:.2f} Mbit/s)"

    @property
    def period_s(self) -> float:
        """Seconds after which it repeats."""
        return self._at_ms[-1] / 1000

    @property
    def mean_bps(self) -> float:
        """Bits per second over the whole trace."""
        return len(self._at_ms) * OPPORTUNITY_BYTES * 8 / self.period_s

    def gap_s_max(self) -> float:
        """Longest time without an opportunity inside one round."""
        longest = max((b - a for a, b in zip(self._at_ms, self._at_ms[1:], strict=False)), default=0)
        return max(longest, self._at_ms[0]) / 1000

    def opportunities(self, from_s: float, until_s: float) -> int:
        """Count the opportunities in [from_s, until_s), seconds since the start, through all rounds."""
        return max(0, self._before(until_s) - self._before(from_s))

    def _before(self, at_s: float) -> int:
        # Number of opportunities in [0, at_s). An opportunity at exactly one period (the last line) belongs to the
        # round it ends; compared in milliseconds with a tolerance, since 0.1 s is not exact in binary.
        if at_s <= 0:
            return 0
        at_ms = at_s * 1000 - 1e-6
        rounds = max(0, math.ceil(at_ms / self._at_ms[-1]) - 1)
        return rounds * len(self._at_ms) + bisect.bisect_right(self._at_ms, at_ms - rounds * self._at_ms[-1])

    def at_s(self, number: int) -> float:
        """Seconds from the trace's start to opportunity `number`, counted from 0 through all rounds."""
        rounds, index = divmod(number, len(self._at_ms))
        return (rounds * self._at_ms[-1] + self._at_ms[index]) / 1000

    def first_from(self, at_s: float) -> int:
        """Number of the first opportunity at or after `at_s` seconds from the start."""
        number = self._before(at_s)
        # `_before` works with a tolerance; what it skips too little or too much is settled here.
        while self.at_s(number) < at_s:
            number += 1
        return number


class TraceCursor:
    """One link's place in a trace: which opportunity comes next and what is left of it.

    An opportunity is used by whatever waits when it comes; what it has left over serves the next packet waiting, and is
    lost where none waits. A packet larger than what is left goes on in the following ones.
    """

    __slots__ = ("_at_s", "_left_bytes", "_number", "_origin_s", "_trace")

    def __init__(self, trace: Trace, origin_s: float, now: float) -> None:
        """Begin at the first opportunity after `now`.

        Args:
            trace: the opportunities.
            origin_s: when the trace's own time 0 is.
            now: opportunities up to this moment are past.
        """
        self._trace = trace
        self._origin_s = origin_s
        self._number = -1
        self._at_s = -math.inf
        self._left_bytes = 0
        self.skip_past(now)

    def skip_past(self, now: float) -> None:
        """Give up what is left of opportunities at or before `now`, and what later ones had promised."""
        self._number = max(0, self._trace.first_from(now - self._origin_s))
        while self._origin_s + self._trace.at_s(self._number) <= now:
            self._number += 1
        self._arrive()

    def _arrive(self) -> None:
        self._at_s = self._origin_s + self._trace.at_s(self._number)
        self._left_bytes = OPPORTUNITY_BYTES

    def take(self, size_bytes: int, ready_s: float) -> float:
        """Send a packet that waits from `ready_s` on; gives the moment its last byte leaves."""
        if self._at_s < ready_s:
            self._number = self._trace.first_from(ready_s - self._origin_s)
            self._arrive()
            while self._at_s < ready_s:  # the sum with the origin may round below
                self._number += 1
                self._arrive()
        while size_bytes > self._left_bytes:
            size_bytes -= self._left_bytes
            self._number += 1
            self._arrive()
        self._left_bytes -= size_bytes
        return self._at_s
