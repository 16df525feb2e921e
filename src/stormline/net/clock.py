"""The real clock and the real source of chance: the only place that reads them."""

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Final

from stormline.net.system import LINUX

_BOOTTIME: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None) if LINUX else None
"""Linux only: on other systems the monotonic clock goes on in sleep, or nothing tells."""


class SystemClock:
    """`core.clock.Clock` of this machine."""

    __slots__ = ()

    # The functions themselves: a call is asked for its time a dozen times.
    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    def boottime(self) -> float | None:
        """Seconds that never step and go on while the machine sleeps; None where there is no such clock."""
        return None if _BOOTTIME is None else time.clock_gettime(_BOOTTIME)


def time_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Give the clock of a loop. That of asyncio's own loops is the system's, which is asked directly: a request does so
    some twenty times.
    """
    return time.monotonic if type(loop).time is asyncio.BaseEventLoop.time else loop.time


class SystemRng:
    """`core.clock.Rng` of this machine, from the kernel's generator."""

    __slots__ = ()

    def random(self) -> float:
        """A float in [0, 1)."""
        return secrets.randbits(53) / (1 << 53)

    def token_bytes(self, size: int) -> bytes:
        """`size` unpredictable bytes."""
        return secrets.token_bytes(size)
