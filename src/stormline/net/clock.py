"""The real clock and the real source of chance: the only place that reads them."""

import secrets
import time


class SystemClock:
    """`core.clock.Clock` of this machine."""

    __slots__ = ()

    def monotonic(self) -> float:
        """Seconds that never step."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC."""
        return time.time()


class SystemRng:
    """`core.clock.Rng` of this machine, from the kernel's generator."""

    __slots__ = ()

    def random(self) -> float:
        """A float in [0, 1)."""
        return secrets.randbits(53) / (1 << 53)

    def token_bytes(self, size: int) -> bytes:
        """`size` unpredictable bytes."""
        return secrets.token_bytes(size)
