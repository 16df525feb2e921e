"""Lanes of one call: the first answer counts, whoever loses is freed, and a cancelled caller is cancelled."""

import asyncio

import pytest

from stormline.client.answer import RequestBody
from stormline.client.lanes import CallLimits, Failed, Reply, Run
from stormline.client.trace import CallTrace
from stormline.core import errors
from stormline.core.phase import Phase
from stormline.net.clock import SystemClock
from stormline.outbound.messages import HttpRequest
from stormline.policy.shape import RequestShape

LIMITS = CallLimits(10.0, 5.0, 5.0, 5.0, True)
SHAPE = RequestShape(host="a.test")


class Body:
    """A body that knows whether it was let go."""

    def __init__(self):
        self.closed = False

    async def aclose(self):
        self.closed = True


class Lane:
    """A lane that does as it is told, and knows how it ended."""

    def __init__(self):
        self.told = asyncio.get_running_loop().create_future()
        self.reply = Reply(200, b"", "HTTP/1.1", (), Body(), None, "h1", False)
        self.cancelled = self.given_up = False

    def answers(self):
        self.told.set_result(self.reply)

    def fails(self):
        error = errors.ReadError("broken", phase=Phase.FIRST_BYTE, maybe_delivered=True)
        self.told.set_exception(Failed(error, reused=False))

    async def run(self):
        try:
            return await self.told
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def turns():
    for _ in range(4):
        await asyncio.sleep(0)


@pytest.fixture
def run():
    async def make():
        trace = CallTrace(
            SystemClock(), "1", method="GET", host="a.test", path="/", business="", network="", sink=lambda record: None
        )
        return Run(
            HttpRequest("GET", "https", "a.test", 443, b"/"), RequestBody(None, lambda size: None), SHAPE, LIMITS, trace
        )

    return make


async def start(run, *, others=1):
    """Give the call's task, its first lane and those beside it, all under way; and what failed beside."""
    first, failed = Lane(), []
    call = asyncio.create_task(run.first(first.run()))
    await turns()
    beside = [Lane() for _ in range(others)]
    for lane in beside:
        run.beside(lane, lane.run(), failed.append)
    await turns()
    return call, first, beside, failed


async def test_first_lane_that_answers_is_the_calls_answer_and_the_others_end(run):
    made = await run()
    call, first, (other,), _ = await start(made)
    first.answers()
    assert await call is first.reply
    made.end_lanes()
    await turns()
    assert other.cancelled
    assert not made.others


async def test_lane_beside_it_that_answers_first_interrupts_it(run):
    made = await run()
    call, first, (other,), _ = await start(made)
    other.answers()
    assert await call is other.reply
    assert first.cancelled
    assert call.cancelling() == 0  # the interruption leaves no trace in the caller's task


async def test_first_lane_that_fails_waits_for_those_beside_it(run):
    made = await run()
    call, first, (other,), _ = await start(made)
    first.fails()
    await turns()
    assert not call.done()
    other.answers()
    assert await call is other.reply


async def test_call_fails_when_every_lane_has(run):
    made = await run()
    call, first, (one, two), failed = await start(made, others=2)
    one.fails()
    first.fails()
    await turns()
    assert not call.done()
    two.fails()
    with pytest.raises(Failed):
        await call
    assert len(failed) == 2


async def test_lane_beside_it_that_fails_leaves_the_first_alone(run):
    made = await run()
    call, first, (other,), failed = await start(made)
    other.fails()
    await turns()
    assert [str(each) for each in failed] == ["broken"]
    first.answers()
    assert await call is first.reply


async def test_two_answers_at_once_give_one_and_the_other_is_let_go(run):
    made = await run()
    call, _first, (one, two), _ = await start(made, others=2)
    one.answers()
    two.answers()
    assert await call is one.reply
    made.end_lanes()
    await turns()
    assert two.reply.source.closed
    assert not one.reply.source.closed


async def test_first_lanes_answer_in_the_same_moment_is_not_lost(run):
    made = await run()
    call, first, (other,), _ = await start(made)
    first.answers()
    other.answers()
    winner = await call
    made.end_lanes()
    await turns()
    assert winner in (first.reply, other.reply)
    assert not winner.source.closed


async def test_answer_that_comes_after_the_call_is_over_is_let_go(run):
    made = await run()
    call, first, (other,), _ = await start(made)
    first.answers()
    await call
    made.over = True
    other.answers()
    await turns()
    assert other.reply.source.closed


async def test_cancelled_caller_is_cancelled_and_every_lane_ends(run):
    made = await run()
    call, first, (other,), _ = await start(made)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    made.end_lanes()
    await turns()
    assert first.cancelled
    assert other.cancelled


async def test_caller_cancelled_in_the_moment_another_lane_wins_is_cancelled_and_the_answer_let_go(run):
    made = await run()
    call, _, (other,), _ = await start(made)
    other.answers()
    await asyncio.sleep(0)  # the winner interrupts the first lane ...
    call.cancel()  # ... and the caller goes
    with pytest.raises(asyncio.CancelledError):
        await call
    made.end_lanes()
    await turns()
    assert other.reply.source.closed


async def test_time_out_around_the_call_is_a_time_out_even_as_another_lane_wins(run):
    made = await run()
    first, other = Lane(), Lane()

    async def bounded():
        async with asyncio.timeout(0.01):
            return await made.first(first.run())

    call = asyncio.create_task(bounded())
    await turns()
    made.beside(other, other.run(), lambda error: None)
    with pytest.raises(TimeoutError):
        await call
    made.end_lanes()
    await turns()
    assert other.cancelled


async def test_cancelled_while_it_waits_for_the_others_it_is_cancelled(run):
    made = await run()
    call, first, (other,), _ = await start(made)
    first.fails()
    await turns()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    made.end_lanes()
    await turns()
    assert other.cancelled


async def test_lane_that_was_given_up_makes_room_for_another(run):
    made = await run()
    call, first, (one, two), _ = await start(made, others=2)
    assert not made.has_room()
    two.given_up = True
    assert made.has_room()
    third = Lane()
    made.beside(third, third.run(), lambda error: None)
    await turns()
    assert (one.cancelled, two.cancelled) == (False, True)
    third.answers()
    assert await call is third.reply
    made.end_lanes()
    await turns()
    assert first.cancelled


async def moved(run, call):
    """Move a call, and see that its first lane fails as one that has not been touched."""
    error = errors.ConnectError("dark", phase=Phase.CONNECT, maybe_delivered=False)
    run.move(error)
    with pytest.raises(Failed) as failed:
        await call
    assert failed.value.error is error
    assert (failed.value.untouched, failed.value.heard) == (True, False)


async def test_first_lane_that_is_moved_ends_and_fails_as_untouched(run):
    made = await run()
    first = Lane()
    call = asyncio.create_task(made.first(first.run()))
    await turns()
    await moved(made, call)
    assert first.cancelled
    assert call.cancelling() == 0


async def test_first_lane_that_is_moved_in_the_moment_it_could_go_on_does_not_go_on(run):
    made = await run()
    first, sent = Lane(), []

    async def lane():
        await first.told  # a connection; what follows would send
        sent.append(True)

    call = asyncio.create_task(made.first(lane()))
    await turns()
    first.answers()
    await moved(made, call)
    assert sent == []


async def test_caller_that_is_cancelled_as_its_lane_is_moved_is_cancelled(run):
    made = await run()
    first = Lane()
    call = asyncio.create_task(made.first(first.run()))
    await turns()
    made.move(errors.ConnectError("dark", phase=Phase.CONNECT, maybe_delivered=False))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_move_of_a_call_that_has_no_first_lane_does_nothing(run):
    made = await run()
    made.move(errors.ConnectError("dark", phase=Phase.CONNECT, maybe_delivered=False))
    first = Lane()
    first.answers()
    assert await made.first(first.run()) is first.reply
