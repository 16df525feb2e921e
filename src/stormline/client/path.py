"""One way out of the machine: its connections, and what is known of its network."""

import itertools
from typing import TYPE_CHECKING

from stormline.client.steering import Steering
from stormline.core import limits
from stormline.net.meter import Meter
from stormline.outbound.pool import HttpPool

if TYPE_CHECKING:
    from stormline.outbound.doh import DohNames


class Path:
    """One way out.

    Attributes:
        name: of its interface; empty for the system's own choice, until somebody has looked which that is.
        pool: connections over it.
        steering: what is known of its network.
        meter: of its sockets.
        told_at: the loop's time of what the policy was last told to have come over it.
        booked: bytes that were booked.
        doh: DNS over HTTPS over it; None for the system's own choice, and where there is none.
    """

    __slots__ = ("booked", "doh", "meter", "name", "pool", "steering", "told_at")

    def __init__(
        self, name: str, pool: HttpPool, steering: Steering, meter: Meter, doh: "DohNames | None" = None
    ) -> None:
        self.name = name
        self.pool = pool
        self.steering = steering
        self.meter = meter
        self.told_at = float("-inf")
        self.booked = 0
        self.doh = doh

    def close(self) -> None:
        """Close its connections; again is harmless, also where the loop is closed."""
        if self.doh is not None:
            self.doh.close()
        self.pool.close()

    def heard_at(self) -> float:
        """Give the loop's time when anything last came over it; the bodies under way count."""
        steering = self.steering
        at = max(steering.heard_at, steering.sensing.heard_at)
        for call in itertools.islice(steering.calls, limits.QUEUE_CALLS_MAX):
            if (held := call.answering) is not None:
                at = max(at, held.heard_at)
        steering.sensing.heard(at)
        return at
