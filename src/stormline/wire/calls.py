"""Open calls on a long connection: how far each is, the flow control of its bodies, and what is sent again of it."""

import contextlib
from collections.abc import Container

from stormline.core import limits
from stormline.core.codes import Code
from stormline.core.errors import LocalProtocolError, RemoteProtocolError
from stormline.wire import frames
from stormline.wire import messages as m


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
    """

    __slots__ = ("answered", "consumed", "offset", "ours", "receive_credit", "receiving", "send_credit", "sending")

    def __init__(self, *, ours: bool, sending: bool, receiving: bool, offset: int) -> None:
        self.ours = ours
        self.sending = sending
        self.receiving = receiving
        self.answered = False
        self.send_credit = limits.CREDIT_BYTES
        self.receive_credit = limits.CREDIT_BYTES
        self.consumed = 0
        self.offset = offset

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


def still_wanted(unreceived: list[bytes], open_calls: Container[int]) -> tuple[list[bytes], dict[int, int]]:
    """Leave the calls that were given up out of frames of ours that the peer has not received.

    It hears nothing of them: who gave one up was told that it had not left, or has long ceased to wait.

    Returns:
        The frames that are left, and where among them the CALL of each open call is.
    """
    wanted: list[bytes] = []
    places: dict[int, int] = {}
    given_up: set[int] = set()
    for frame in unreceived:
        message: m.Message | None = None
        with contextlib.suppress(RemoteProtocolError):  # of a later version, by whose node it was kept
            message = frames.decode_payload(memoryview(frame)[frames.PREFIX_BYTES :])
        match message:
            case m.Call() if message.id in open_calls:
                places[message.id] = len(wanted)
            case m.Call():
                given_up.add(message.id)
        if not (isinstance(message, (m.Call, m.Data, m.Cancel, m.Credit)) and message.id in given_up):
            wanted.append(frame)
    return wanted, places
