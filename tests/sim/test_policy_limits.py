"""Limits of the policies on models of what they are for: a metered link, a tight loop, an hour with a long tail."""

import random

import pytest

from stormline.core import errors, limits, limits_means
from stormline.policy import presets
from stormline.policy.budget import FlowLimit, RetryBudget, repetition_limit
from stormline.policy.hedge import HedgePolicy


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


def test_hedges_of_an_hour_with_a_long_tail_stay_within_their_share_of_bytes():
    chance, hedges = random.Random(2), HedgePolicy()
    asked = late = 0
    for second in range(3600):
        waited_s = chance.uniform(0.05, 0.1) if chance.random() < 0.9 else chance.uniform(1.0, 3.0)
        late_s = hedges.late_s("net", "a.test", "GET /")
        asked += 1
        late += late_s is not None and waited_s > late_s and hedges.grant(20_000)
        hedges.observe("net", "a.test", "GET /", first_byte_s=waited_s, carried_bytes=20_000, now=float(second))
    hedges.observe("net", "a.test", "GET /", first_byte_s=float("nan"), carried_bytes=-1, now=3600.0)
    assert hedges.dropped == 2
    assert 0 < late == hedges.begun <= asked * limits_means.HEDGE_BYTES_SHARE
    assert hedges.bytes_spent <= limits_means.HEDGE_BYTES_SHARE * hedges.bytes_carried


@pytest.mark.parametrize("change", [{"clear": 4}, {"attempts": 0}, {"direct": -1}, {"tls_only": True, "clear": 1}])
def test_plan_beyond_its_bounds_is_refused(change):
    with pytest.raises(errors.ConfigError):
        presets.Preset(name="own", **change)


def test_tries_and_presets_that_do_not_exist_are_refused():
    with pytest.raises(errors.ConfigError):
        presets.KEY.with_tries({"pigeon": 1})
    with pytest.raises(errors.ConfigError):
        presets.preset("fast")
