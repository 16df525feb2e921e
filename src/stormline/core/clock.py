"""The two things a pure room may not take for itself: time and chance."""

from typing import Protocol, runtime_checkable


class Clock(Protocol):
    """Where time comes from. `net.clock.SystemClock` is the real one; tests and simulation bring their own."""

    def monotonic(self) -> float:
        """Seconds that never step: for every time-out, age and duration."""
        ...

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC; may step either way: only for signatures, expiry and reports."""
        ...


@runtime_checkable
class SleepClock(Clock, Protocol):
    """A clock that can tell sleep from time."""

    def boottime(self) -> float | None:
        """Seconds that never step and go on while the machine sleeps; None where the system has no such clock."""
        ...


class Rng(Protocol):
    """Where chance comes from. `net.clock.SystemRng` is the real one; simulation seeds its own."""

    def random(self) -> float:
        """A float in [0, 1)."""
        ...

    def token_bytes(self, size: int) -> bytes:
        """`size` unpredictable bytes."""
        ...
