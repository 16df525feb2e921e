"""A call with a key that was lost after delivery, and then refused when it was sent again, said "not delivered".

The error of the last attempt was raised as it was; that an earlier attempt had reached the service was forgotten, so
an application was told that it may safely do the work anew under another key. Found by simulation:
`gateway-restart`, seed 204, by the invariant that what was not delivered was not processed.
"""

import asyncio
from types import SimpleNamespace

import pytest

from stormline.client.channel import Channel
from stormline.client.trace import CallTrace
from stormline.core.codes import Code
from stormline.core.errors import CallError, ChannelLost
from stormline.core.phase import Phase
from stormline.testing.simloop import SimClock, SimRng, on_virtual_time


@on_virtual_time
async def test_refusal_of_a_repetition_keeps_that_the_first_may_be_delivered(monkeypatch) -> None:
    loop = asyncio.get_running_loop()

    def trace(**named) -> CallTrace:
        return CallTrace(SimClock(loop), SimRng(1), business="", network="wifi", sink=None, **named)

    outcomes = [
        ChannelLost("the link is gone", phase=Phase.FIRST_BYTE, maybe_delivered=True),
        CallError(Code.CALL_UNAVAILABLE, "the service bus is away"),
    ]

    async def next_outcome(*_: object) -> bytes:
        raise outcomes.pop(0)

    monkeypatch.setattr(Channel, "_call_once", next_outcome)
    runtime = SimpleNamespace(trace=trace, config=SimpleNamespace(deadline_s=5.0), scheduling=None)
    channel = Channel(runtime, SimpleNamespace(stopped=False, pause_s=lambda: 0.0))
    with pytest.raises(CallError) as caught:
        await channel.call("orders.create", idempotency_key="k1")
    assert caught.value.code == Code.CALL_UNAVAILABLE
    assert caught.value.maybe_delivered
    assert not outcomes
