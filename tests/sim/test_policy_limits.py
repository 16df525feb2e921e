"""Limits of the policies that no client uses yet, on models of what they are for: a metered link, a tight loop."""

import random

from stormline.core import limits
from stormline.policy.budget import FlowLimit, RetryBudget, repetition_limit


def test_metered_link_carries_its_rate_and_no_more_over_an_hour():
    chance, limit = random.Random(1), FlowLimit(bytes_per_s=10_000, burst_bytes=200_000)
    now = carried = waited = 0.0
    while now < 3600.0:
        size = chance.randint(100, 60_000)
        wait_s = limit.take(size, now)
        if wait_s > 0.0:
            waited += 1
            now += wait_s
            continue
        carried += size
        if chance.random() < 0.2:
            answer = chance.randint(0, 5_000)
            limit.add(answer, now)
            carried += answer
        now += chance.expovariate(1.0)
    assert waited > 0
    assert 0.8 * 36_000_000 <= carried <= 36_000_000 + 200_000 + 60_000 * 2


def test_request_in_a_tight_loop_is_held_back_and_polling_is_not():
    limit = repetition_limit()
    taken = sum(limit.take("loop", 0.01 * step) == 0.0 for step in range(6000))
    assert taken <= limits.REPEAT_BURST + 60 * limits.REPEAT_RATE_PER_S + 1
    spacing_s = 1.0 / limits.REPEAT_RATE_PER_S
    assert all(limit.take("poll", 100.0 + spacing_s * step) == 0.0 for step in range(500))
    for key in range(limits.REPEAT_KEYS_MAX + 10):
        limit.take(str(key), 2000.0)
    assert len(limit) == limits.REPEAT_KEYS_MAX


def test_host_that_answers_well_again_ends_the_pause_it_asked_for():
    budget = RetryBudget()
    budget.observe_overload("a", 0.0, retry_after_s=float("nan"))
    assert budget.dropped == 1
    budget.observe_overload("a", 0.0, retry_after_s=30.0)
    assert budget.plan("a", 1.0).wait_s > 0.0
    budget.observe_answer("a", 2.0)
    assert budget.plan("a", 2.0).allowed
    assert budget.next_timer() is None
