"""The pushes of one session: their numbers, and which of them wait for the application to take them over."""

from stormline.core import limits
from stormline.core.codes import Code
from stormline.core.errors import LocalProtocolError, RemoteProtocolError
from stormline.wire import messages as m
from stormline.wire.checks import check_headers, headers_fault


class Pushes:
    """What one side knows of the pushes: it has sent them, or received them.

    Attributes:
        seq: number of the last one.
        unacked: those not acknowledged, `limits.PUSHES_UNACKED_MAX` at most.
    """

    __slots__ = ("seq", "unacked")

    def __init__(self, seq: int = 0, unacked: tuple[int, ...] = ()) -> None:
        self.seq = seq
        self.unacked = set(unacked)

    def next(self, push_id: str, body: bytes, topic: str, headers: m.Headers, expires_ms: int | None) -> m.Push:
        """Give the message of the next push of ours; `sent` counts it.

        Raises:
            LocalProtocolError: it is beyond the bounds, or too many wait.
        """
        if len(body) > limits.PUSH_BODY_BYTES_MAX:
            raise LocalProtocolError(f"push of {len(body)} bytes, at most {limits.PUSH_BODY_BYTES_MAX}")
        if fault := headers_fault(headers):
            raise LocalProtocolError(fault)
        if len(self.unacked) >= limits.PUSHES_UNACKED_MAX:
            raise LocalProtocolError(f"{limits.PUSHES_UNACKED_MAX} pushes wait for their acknowledgement")
        return m.Push(self.seq + 1, push_id, topic, headers, body, expires_ms)

    def sent(self) -> int:
        """The next push has been put out: give its number."""
        self.seq += 1
        self.unacked.add(self.seq)
        return self.seq

    def take(self, push: m.Push) -> None:
        """Take a push of the peer in.

        Raises:
            RemoteProtocolError: it is not the next one, beyond the bounds, or too many wait.
        """
        if push.seq != self.seq + 1:
            raise RemoteProtocolError(f"push {push.seq} after {self.seq}")
        if len(push.body) > limits.PUSH_BODY_BYTES_MAX:
            raise RemoteProtocolError(f"push of {len(push.body)} bytes", Code.FRAME_TOO_LARGE)
        if len(self.unacked) >= limits.PUSHES_UNACKED_MAX:
            raise RemoteProtocolError("more pushes than may be unacknowledged", Code.FLOW_CONTROL)
        check_headers(push.headers)
        self.seq = push.seq
        self.unacked.add(push.seq)

    def acked(self, seqs: tuple[int, ...]) -> tuple[int, ...]:
        """The peer acknowledges pushes; give those of them that waited, each once.

        Raises:
            RemoteProtocolError: one of them was never sent.
        """
        if len(seqs) == 1 and seqs[0] in self.unacked:  # nearly always
            self.unacked.discard(seqs[0])
            return seqs
        fresh = []
        for seq in seqs:
            if not 1 <= seq <= self.seq:
                raise RemoteProtocolError("acknowledgement of a push that was never sent")
            if seq in self.unacked and seq not in fresh:
                fresh.append(seq)
        self.unacked.difference_update(fresh)
        return tuple(fresh)
