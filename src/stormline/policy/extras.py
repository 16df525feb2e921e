"""What may be made beside a request on a network whose bytes cost money: a share of the bytes that are of use.

    share.carried(total_bytes)                 # what the sockets have carried so far
    if share.take(cost_bytes): ...             # another attempt beside a silent one, a second handshake

Only what is *beside* something that may still succeed is asked for here: a hedge, a second lane, a second TLS handshake
of one dial. A first attempt and one that follows a failure are never asked for, so nothing that could succeed with
one attempt at a time fails for want of bytes.
"""

from stormline.core import limits_means
from stormline.policy.estimate import sound


class ExtraBytes:
    """A bucket of bytes: filled by a share of those of use, and never fuller than at its beginning.

    Over any span of time what is taken is at most `limits_means.METERED_FLOAT_BYTES` +
    `limits_means.METERED_SHARE` * the bytes of use in that span.

    Attributes:
        taken: times it gave.
        refused: times it did not.
        bytes_taken: what was taken, as it was reckoned.
    """

    __slots__ = ("_room", "_total", "_unseen", "bytes_taken", "refused", "taken")

    def __init__(self) -> None:
        self._room = float(limits_means.METERED_FLOAT_BYTES)
        self._total = 0.0
        self._unseen = 0.0  # taken, and not yet among the bytes carried
        self.taken = self.refused = self.bytes_taken = 0

    def start(self, total_bytes: object) -> None:
        """Begin to count from here: what was carried before costs nobody anything."""
        self._total = sound(total_bytes, 2.0**53) or 0.0
        self._unseen = 0.0

    def carried(self, total_bytes: object) -> None:
        """Take note of all that was carried so far, of use or not; what was taken here is not of use.

        Args:
            total_bytes: since the counter began; a value that is not sound, or below one before, changes nothing.
        """
        total = sound(total_bytes, 2.0**53)
        if total is None or total <= self._total:
            return
        more, self._total = total - self._total, total
        extra = min(more, self._unseen)
        self._unseen -= extra
        room = self._room + limits_means.METERED_SHARE * (more - extra)
        self._room = min(float(limits_means.METERED_FLOAT_BYTES), room)

    def take(self, cost_bytes: int) -> bool:
        """Ask for bytes; where they are there they are taken."""
        cost = max(0, cost_bytes)
        if cost > self._room:
            self.refused += 1
            return False
        self._room -= cost
        self._unseen += cost
        self.taken += 1
        self.bytes_taken += cost
        return True
