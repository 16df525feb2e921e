"""The gate before a call and the line before it, on virtual time (`simloop.VirtualLoop`)."""

import asyncio
import random

import pytest

from stormline.client.admission import Admission
from stormline.client.answer import RequestBody
from stormline.client.lanes import CallLimits, Run
from stormline.client.trace import CallTrace
from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.net.clock import SystemClock
from stormline.outbound.messages import HttpRequest
from stormline.policy.admission import Verdict
from stormline.policy.shape import Pattern, RequestShape
from stormline.testing.simloop import on_virtual_time

HOST = "shop.test"


def call(urgency=3, *, deadline_s=10.0, pattern=Pattern.CALL, host=HOST):
    trace = CallTrace(
        SystemClock(), "1", method="GET", host=host, path="/", business="", network="", sink=lambda record: None
    )
    shape = RequestShape(host=host, pattern=pattern)
    known = CallLimits(deadline_s, 5.0, 5.0, 5.0, True, urgency=urgency)
    return Run(HttpRequest("GET", "https", host, 443, b"/"), RequestBody(None, lambda size: None), shape, known, trace)


async def go(admission, run):
    if not admission.enter(run):
        await admission.wait(run)


def narrow(admission, room, host=HOST):
    """Leave room for few."""
    gate = admission.policy.gate(host)
    gate.bound(room)
    return gate


async def turns():
    for _ in range(6):
        await asyncio.sleep(0)


@on_virtual_time
async def test_call_to_a_healthy_host_does_not_wait():
    admission = Admission()
    runs = [call() for _ in range(500)]
    assert all(admission.enter(run) for run in runs)


@on_virtual_time
async def test_waiting_call_goes_when_another_leaves_and_tells_what_it_waited_for():
    admission = Admission()
    gate = narrow(admission, 1)
    first, second = call(), call()
    await go(admission, first)
    waiting = asyncio.create_task(go(admission, second))
    await asyncio.sleep(2.0)
    assert not waiting.done()
    admission.leave(first, good=True)
    await waiting
    assert second.gate is gate
    assert any("room for 1" in line for _, line in second.trace.timeline.story)


@on_virtual_time
async def test_deadline_covers_the_waiting():
    admission = Admission()
    narrow(admission, 1)
    await go(admission, call())
    late = call(deadline_s=3.0)
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await go(admission, late)
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.QUEUED, False)
    assert loop.time() - began == pytest.approx(3.0)
    assert admission.policy.waiting == 0


@on_virtual_time
async def test_full_line_refuses_and_says_that_nothing_was_sent(monkeypatch):
    monkeypatch.setattr(limits, "ADMISSION_WAITING_MAX", 2)
    admission = Admission()
    gate = narrow(admission, 1)
    await go(admission, call())
    waiting = [asyncio.create_task(go(admission, call())) for _ in range(2)]
    await turns()
    with pytest.raises(errors.QueueFull) as caught:
        await go(admission, call())
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.QUEUED, False)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (gate.in_flight, admission.policy.waiting) == (1, 0)


@on_virtual_time
async def test_call_cancelled_in_the_moment_it_is_granted_gives_its_place_on():
    admission = Admission()
    gate = narrow(admission, 1)
    first, gone, last = call(), call(), call()
    await go(admission, first)
    tasks = [asyncio.create_task(go(admission, run)) for run in (gone, last)]
    await turns()
    admission.leave(first)
    tasks[0].cancel()  # its future is set, and it has not run yet
    await asyncio.gather(*tasks, return_exceptions=True)
    assert tasks[0].cancelled()
    assert last.gate is gate
    assert gate.in_flight == 1


@on_virtual_time
async def test_calls_given_up_at_any_moment_leave_every_place_free():
    admission = Admission()
    gate = narrow(admission, 3)
    chance = random.Random(7)

    async def one():
        run = call(chance.choice([0, 3, 7]), deadline_s=chance.uniform(0.1, 5.0))
        await asyncio.sleep(chance.uniform(0.0, 20.0))
        try:
            await go(admission, run)
            assert gate.in_flight <= 3
            await asyncio.sleep(chance.uniform(0.0, 0.5))
        finally:
            admission.leave(run, good=True)

    tasks = [asyncio.create_task(one()) for _ in range(300)]

    async def cancel():
        for task in chance.sample(tasks, 150):
            await asyncio.sleep(chance.uniform(0.0, 0.1))
            task.cancel()

    await asyncio.gather(cancel(), *tasks, return_exceptions=True)
    assert (gate.in_flight, gate.waiting, gate.background, admission.policy.waiting) == (0, 0, 0, 0)


@on_virtual_time
async def test_key_calls_go_first_and_each_class_in_order():
    admission = Admission()
    narrow(admission, 1)
    first = call()
    await go(admission, first)
    order = []

    async def one(name, urgency):
        run = call(urgency, deadline_s=60.0)
        await go(admission, run)
        order.append(name)
        await asyncio.sleep(0.01)
        admission.leave(run)

    tasks = []
    for name, urgency in (("b1", 7), ("n1", 3), ("n2", 3), ("k1", 0), ("b2", 7), ("k2", 0)):
        tasks.append(asyncio.create_task(one(name, urgency)))
        await turns()
    admission.leave(first)
    await asyncio.gather(*tasks)
    assert order == ["k1", "k2", "n1", "n2", "b1", "b2"]


@pytest.mark.parametrize("pattern", [Pattern.LONG_POLL, Pattern.STREAM])
@on_virtual_time
async def test_answers_that_a_server_holds_take_no_place(pattern):
    admission = Admission()
    gate = narrow(admission, 1)
    assert all(admission.enter(call(pattern=pattern)) for _ in range(50))
    assert gate.in_flight == 0


@on_virtual_time
async def test_overdue_answer_is_a_sign_only_where_the_host_answered_others():
    admission = Admission()
    gate = admission.policy.gate(HOST)
    runs = [call() for _ in range(9)]
    for run in runs:
        await go(admission, run)
    await asyncio.sleep(1.0)
    admission.silent(runs[8])
    assert not gate.limited  # nobody was answered: the path is dark
    admission.leave(runs[0], good=True)
    admission.silent(runs[7])
    assert gate.limited


@on_virtual_time
async def test_refusals_are_learned_from_and_judge_an_attempt_once():
    admission = Admission()
    gate = admission.policy.gate(HOST)
    runs = [call() for _ in range(10)]
    for run in runs:
        await go(admission, run)
    admission.answered(runs[9], 503)
    assert gate.room == 7
    admission.leave(runs[9], good=True)
    assert gate._total is not None
    assert sum(gate._total) == 1


@on_virtual_time
async def test_lane_beside_is_counted_until_its_task_ends():
    admission = Admission()
    gate = admission.policy.gate(HOST)
    run = call()
    await go(admission, run)
    lane = asyncio.create_task(asyncio.sleep(5.0))
    admission.beside(run, lane)
    assert gate.in_flight == 2
    lane.cancel()  # before its first step
    await asyncio.gather(lane, return_exceptions=True)
    await turns()
    assert gate.in_flight == 1


@on_virtual_time
async def test_gate_that_is_switched_off_bounds_nothing():
    admission = Admission(enabled=False)
    gate = narrow(admission, 1)
    assert all(admission.enter(call()) for _ in range(20))
    admission.learn(call(), weak=True, bytes_per_s=1000.0, rtt_s=1.0)
    assert gate.in_flight == 0
    assert admission.policy.weak_limit == limits.ADMISSION_FULL


@on_virtual_time
async def test_weak_link_that_recovers_lets_everybody_go():
    admission = Admission()
    gate = admission.policy.gate(HOST)
    probe = call()
    await go(admission, probe)
    admission.leave(probe, good=True)
    admission.learn(probe, weak=True, bytes_per_s=2000.0, rtt_s=0.5)
    runs = [call(deadline_s=60.0) for _ in range(20)]
    tasks = [asyncio.create_task(go(admission, run)) for run in runs]
    await turns()
    assert gate.in_flight == limits.ADMISSION_WEAK_FLOOR
    admission.learn(probe, weak=False, bytes_per_s=1e6, rtt_s=0.05)
    await asyncio.gather(*tasks)
    assert gate.in_flight == 20


@on_virtual_time
async def test_unknown_verdicts_change_nothing():
    gate = Admission().policy.gate(HOST)
    for level in range(2, 30):
        gate.observe(level, Verdict.UNKNOWN, 0.0, 1.0)
    assert not gate.limited


@on_virtual_time
async def test_call_that_comes_back_too_late_is_told_and_what_was_before_stands():
    admission = Admission()
    gate = narrow(admission, 1)
    first, again = call(), call(deadline_s=5.0)
    await go(admission, again)
    assert await admission.back(again)  # it has a place
    admission.leave(again)
    await go(admission, first)
    assert not await admission.back(again)
    assert any("no room" in line for _, line in again.trace.timeline.story)
    assert (gate.in_flight, admission.policy.waiting) == (1, 0)


@on_virtual_time
async def test_call_that_comes_back_keeps_its_turn():
    admission = Admission()
    narrow(admission, 1)
    first, old, new = call(), call(), call()
    old.came_at = 0.001
    await asyncio.sleep(1.0)
    await go(admission, first)
    waiting_new = asyncio.create_task(go(admission, new))
    await turns()
    waiting_old = asyncio.create_task(admission.back(old))
    await turns()
    admission.leave(first)
    await waiting_old
    assert not waiting_new.done()
    admission.leave(old)
    await waiting_new


@on_virtual_time
async def test_large_requests_on_a_weak_link_leave_room_to_small_ones():
    admission = Admission()
    small, key_upload = call(), call(0, pattern=Pattern.UPLOAD)
    admission.learn(small, weak=True, bytes_per_s=2000.0, rtt_s=0.5)
    uploads = [call(pattern=Pattern.UPLOAD) for _ in range(limits.ADMISSION_WEAK_FLOOR)]
    let_in = [admission.enter(run) for run in uploads]
    assert let_in.count(True) == limits.ADMISSION_WEAK_FLOOR // 2
    assert admission.enter(small)
    assert admission.enter(key_upload)
    for run in (*uploads, small, key_upload):
        admission.leave(run)
    gate = admission.policy.gate(HOST)
    assert (gate.in_flight, gate.background) == (0, 0)


@on_virtual_time
async def test_large_requests_on_a_good_link_are_like_all_others():
    admission = Admission()
    assert all(admission.enter(call(pattern=Pattern.UPLOAD)) for _ in range(100))


@on_virtual_time
async def test_other_network_has_its_own_room():
    admission = Admission()
    gate = admission.policy.gate(HOST)
    admission.learn(call(), weak=True, bytes_per_s=2000.0, rtt_s=0.5)
    assert gate.limited
    admission.network_changed()
    assert not gate.limited
