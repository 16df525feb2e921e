"""The real clock and the real source of chance: the only place that reads them."""

import secrets
import time


class SystemClock:
    """`core.clock.Clock` of this machine."""

    __slots__ = ()

    # The functions themselves: a call is asked for its time a dozen times.
    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


class SystemRng:
    """`core.clock.Rng` of this machine, from the kernel's generator."""

    __slots__ = ()

    def random(self) -> float:
        """A float in [0, 1)."""
        return secrets.randbits(53) / (1 << 53)

    def token_bytes(self, size: int) -> bytes:
        """`size` unpredictable bytes."""
        return secrets.token_bytes(size)
