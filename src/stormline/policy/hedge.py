"""A second request beside a read that is later than most: when, and at what cost ("The Tail at Scale", 2013).

A hedge knows nothing but time: on a slow network all reads are late at once, and second ones make them later. So it is
made only where the link has room (`stall.has_room`, asked by the caller), for classes of path whose waits are known,
and within a share of all bytes. What silence says of a connection is `policy.stall`'s matter.

    if hedges.late(network, host, path_class, waited_s) and hedges.grant(cost_bytes): ...
"""

from typing import Final

from stormline.core import limits, limits_means
from stormline.policy.estimate import DurationSketch, sound
from stormline.policy.recent import RecentTable

_KEPT: Final = limits_means.HEDGE_CLASSES_MAX


class HedgePolicy:
    """Waits for the first byte by class of path, and the bytes that hedges may cost.

    Over any time hedges cost at most `limits_means.HEDGE_BYTES_SHARE` of the bytes of all other requests and answers.

    Attributes:
        begun: hedges granted.
        bytes_spent: what they were reckoned to cost.
        bytes_carried: of requests and answers otherwise.
        dropped: samples that were not sound.
    """

    __slots__ = ("_waits", "begun", "bytes_carried", "bytes_spent", "dropped")

    def __init__(self) -> None:
        self._waits = RecentTable[tuple[str, str, str], DurationSketch](_KEPT, DurationSketch)
        self.begun = 0
        self.bytes_spent = 0
        self.bytes_carried = 0
        self.dropped = 0

    def observe(
        self, network: str, host: str, path_class: str, *, first_byte_s: object, carried_bytes: object, now: float
    ) -> None:
        """Learn from an answer.

        Args:
            network: id of the network.
            host: of the origin.
            path_class: see `shape.path_class`.
            first_byte_s: from the request's last byte to the answer's first; None where it was not measured.
            carried_bytes: of request and answer.
            now: monotonic seconds.
        """
        carried = sound(carried_bytes, 2.0**53)
        if carried is None:
            self.dropped += 1
        else:
            self.bytes_carried += int(carried)
        if first_byte_s is None:
            return
        waited = sound(first_byte_s, limits.SAMPLE_DURATION_S_MAX)
        if waited is None:
            self.dropped += 1
        else:
            self._waits.use((network, host, path_class)).observe(waited, now)

    def late_s(self, network: str, host: str, path_class: str) -> float | None:
        """Give the wait from which a request is late; None where too little is known."""
        waits = self._waits.find((network, host, path_class))
        if waits is None or len(waits) < limits_means.HEDGE_SAMPLES_MIN:
            return None
        usual = waits.quantile(limits_means.HEDGE_QUANTILE)
        return None if usual is None else usual + limits_means.HEDGE_MARGIN_S

    def grant(self, cost_bytes: int) -> bool:
        """Ask for one hedge; where it is granted its bytes are taken.

        Args:
            cost_bytes: its request and answer, handshake left out.
        """
        cost = max(0, cost_bytes) + limits_means.HEDGE_HANDSHAKE_BYTES
        if self.bytes_spent + cost > limits_means.HEDGE_BYTES_SHARE * self.bytes_carried:
            return False
        self.begun += 1
        self.bytes_spent += cost
        return True
