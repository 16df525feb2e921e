"""A push that was acknowledged after the sender's patience stayed `unconfirmed` for ever.

The session forgot a push when its 5 s were over, and the node answered every repetition on the same session with the
outcome of the first. So behind a link that was dark for 6 s the device had the push, had confirmed it, and its sender
could never learn of it. Found by simulation: `elevator`, a third of all pushes in some seeds.
"""

import asyncio

from stormline.appgw.port import Delivery, Push, Told
from stormline.appgw.push import PushNode
from stormline.core import limits
from stormline.testing.simloop import SimClock, on_virtual_time


class SlowDevice:
    """One device whose acknowledgement takes its time."""

    def __init__(self) -> None:
        self.waiting: list[Told] = []
        self.sent: list[str] = []

    def session_of(self, app: str, device: str) -> str | None:
        return "s1"

    def push(self, app: str, device: str, push: Push, told: Told) -> None:
        self.sent.append(push.push_id)
        self.waiting.append(told)


@on_virtual_time
async def test_repetition_after_a_late_acknowledgement_is_acked_and_not_sent_again() -> None:
    loop, device = asyncio.get_running_loop(), SlowDevice()
    node = PushNode(device, unit="u1", node="n1", clock=SimClock(loop))
    push = Push("p1", "", b"x")
    assert await node.deliver("shop", "d1", push) is Delivery.UNCONFIRMED
    assert loop.time() == limits.PUSH_ACK_TIMEOUT_S
    assert await node.deliver("shop", "d1", push) is Delivery.UNCONFIRMED
    device.waiting[0](Delivery.ACKED)
    assert await node.deliver("shop", "d1", push) is Delivery.ACKED
    assert device.sent == ["p1"]
    node.close()
