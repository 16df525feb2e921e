"""One way out of the machine: its connections, and what is known of its network."""

import itertools

from stormline.client.steering import Steering
from stormline.core import limits
from stormline.net.meter import Meter
from stormline.outbound.pool import HttpPool


class Path:
    """One way out.

    Attributes:
        name: of its interface; empty for the system's own choice, until somebody has looked which that is.
        pool: connections over it.
        steering: what is known of its network.
        meter: of its sockets.
        told_at: the loop's time of what the policy was last told to have come over it.
        booked: bytes that were booked.
    """

    __slots__ = ("booked", "meter", "name", "pool", "steering", "told_at")

    def __init__(self, name: str, pool: HttpPool, steering: Steering, meter: Meter) -> None:
        self.name = name
        self.pool = pool
        self.steering = steering
        self.meter = meter
        self.told_at = float("-inf")
        self.booked = 0

    def heard_at(self) -> float:
        """Give the loop's time when anything last came over it; the bodies under way count."""
        steering = self.steering
        at = max(steering.heard_at, steering.sensing.heard_at)
        for call in itertools.islice(steering.calls, limits.QUEUE_CALLS_MAX):
            if (held := call.answering) is not None:
                at = max(at, held.heard_at)
        steering.sensing.heard(at)
        return at
