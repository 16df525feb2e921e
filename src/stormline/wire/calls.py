"""One open call on a long connection: how far it is, and the flow control of its bodies."""

from stormline.core import limits
from stormline.core.codes import Code
from stormline.core.errors import LocalProtocolError, RemoteProtocolError


class OpenCall:
    """One open call, ours or the peer's.

    Attributes:
        ours: we have opened it.
        sending: body bytes may still go out.
        receiving: body bytes may still come in.
        answered: its answer has begun.
        send_credit: body bytes that we may send now.
        receive_credit: body bytes that the peer may send now.
        consumed: body bytes of the peer that have been used up and not been granted anew.
        offset: where it begins in the stream of all bytes put out; ours only.
        number: of its CALL among the frames we sent, where frames are counted.
    """

    __slots__ = ("answered", "consumed", "number", "offset", "ours", "receive_credit", "receiving",
                 "send_credit", "sending")  # fmt: skip

    def __init__(self, *, ours: bool, sending: bool, receiving: bool, offset: int) -> None:
        self.ours = ours
        self.sending = sending
        self.receiving = receiving
        self.answered = False
        self.send_credit = limits.CREDIT_BYTES
        self.receive_credit = limits.CREDIT_BYTES
        self.consumed = 0
        self.offset = offset
        self.number = 0

    def take(self, call_id: int, size: int) -> None:
        """The peer has sent body bytes; raises RemoteProtocolError where it had no credit for them."""
        if size > self.receive_credit:
            raise RemoteProtocolError(
                f"call {call_id}: {size} bytes with credit for {self.receive_credit}", Code.FLOW_CONTROL
            )
        self.receive_credit -= size

    def use(self, call_id: int, size: int) -> int:
        """Body bytes of the peer have been used up: give what it may be granted now, in steps of half a window.

        Raises:
            LocalProtocolError: so many are not held.
        """
        held = limits.CREDIT_BYTES - self.receive_credit - self.consumed
        if not 0 <= size <= held:
            raise LocalProtocolError(f"call {call_id}: {size} bytes consumed, {held} are held")
        self.consumed += size
        return self.consumed if self.consumed >= limits.CREDIT_BYTES // 2 else 0

    def grant_peer(self, size: int) -> None:
        """The peer has been granted what was used up."""
        self.receive_credit += size
        self.consumed -= size

    def grant(self, call_id: int, size: int) -> None:
        """The peer lets us send more; raises RemoteProtocolError where that is beyond the largest window."""
        self.send_credit += size
        if self.send_credit > limits.CREDIT_WINDOW_BYTES_MAX:
            raise RemoteProtocolError(f"credit of call {call_id} overflows", Code.FLOW_CONTROL)
