"""Retries stay a share of requests; what a server asks for is honoured; loops and floods are stopped with a reason."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits
from stormline.policy.budget import FlowLimit, RetryBudget, repetition_limit, retry_after_s


def retries(budget, host, now, most=10_000):
    """Take retries until one is refused; give how many."""
    for taken in range(most):
        if not budget.plan(host, now).allowed:
            return taken
    return most


class TestBudget:
    def test_quiet_host_has_a_small_burst(self):
        budget = RetryBudget()
        assert retries(budget, "a", 0.0) == limits.RETRY_BURST
        assert budget.plan("a", 0.0).why == "retry budget of a is spent"

    def test_ten_requests_earn_one_retry(self):
        budget = RetryBudget()
        retries(budget, "a", 0.0)
        for _ in range(100):
            budget.observe_request("a", 0.0)
        assert retries(budget, "a", 0.0) in (9, 10)

    def test_slow_app_may_always_retry_now_and_then(self):
        budget = RetryBudget()
        retries(budget, "a", 0.0)
        assert not budget.plan("a", 0.9 / limits.RETRY_FLOOR_PER_S).allowed
        assert budget.plan("a", 1.1 / limits.RETRY_FLOOR_PER_S).allowed

    def test_overloaded_host_gets_retries_by_share_only(self):
        budget = RetryBudget()
        retries(budget, "a", 0.0)
        for now in range(100):
            budget.observe_overload("a", now)
            for _ in range(10):
                budget.observe_request("a", now)
        assert 95 * 0.1 <= retries(budget, "a", 100.0) <= limits.RETRY_BURST

    def test_answer_ends_the_overload(self):
        budget = RetryBudget()
        retries(budget, "a", 0.0)
        budget.observe_overload("a", 0.0)
        assert not budget.plan("a", 5.0).allowed
        budget.observe_answer("a", 5.0)
        assert budget.plan("a", 7.0).allowed

    def test_blackout_leaves_retries_for_its_end(self):
        budget, now = RetryBudget(), 0.0
        for _ in range(20):  # eight dark seconds, 2.5 requests a second, three retries each
            budget.observe_request("a", now)
            assert all(budget.plan("a", now, heard=False).allowed for _ in range(3))
            now += 0.4
        assert retries(budget, "a", now) >= 5

    def test_host_that_is_gone_is_not_asked_without_end(self):
        budget = RetryBudget()
        taken = sum(budget.plan("a", 0.0, heard=False).allowed for _ in range(10_000))
        assert taken == pytest.approx(limits.RETRY_BURST / limits.RETRY_UNHEARD_COST, abs=1)

    def test_hosts_are_apart_and_all_together_are_bound(self):
        budget = RetryBudget()
        assert retries(budget, "a", 0.0) == limits.RETRY_BURST
        assert sum(retries(budget, f"h{number}", 0.0) for number in range(50)) == (
            limits.RETRY_BURST_ALL - limits.RETRY_BURST
        )
        assert "all hosts" in budget.plan("new", 0.0).why

    @given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.floats(0, 1)), max_size=400))
    def test_retries_never_exceed_burst_share_and_floor(self, steps):
        budget, now, requests, taken = RetryBudget(), 0.0, 0, {"a": 0, "b": 0}
        for host, retry, passed in steps:
            now += passed
            if retry:
                taken[host] += budget.plan(host, now).allowed
            else:
                requests += 1
                budget.observe_request(host, now)
        bound = limits.RETRY_BURST + limits.RETRY_SHARE * requests + limits.RETRY_FLOOR_PER_S * now
        assert max(taken.values()) <= bound + 1e-6

    def test_storm_is_a_tenth_when_everything_fails(self):
        budget, sent, taken = RetryBudget(), 0, 0
        for number in range(100_000):
            now = number / 1000  # a thousand requests a second, all of which want four tries
            budget.observe_request("a", now)
            sent += 1
            taken += sum(budget.plan("a", now).allowed for _ in range(3))
        assert taken <= 0.1 * sent + limits.RETRY_BURST + 100 * limits.RETRY_FLOOR_PER_S

    def test_hosts_remembered_are_bounded(self):
        budget = RetryBudget()
        for number in range(3 * limits.RETRY_HOSTS_MAX):
            budget.observe_request(f"h{number}", 0.0)
        assert len(budget._hosts) <= 2 * limits.RETRY_HOSTS_MAX


class TestRetryAfter:
    def test_pause_is_honoured_and_costs_no_token(self):
        budget = RetryBudget()
        budget.observe_overload("a", 0.0, retry_after_s=5)
        verdict = budget.plan("a", 2.0)
        assert (verdict.allowed, verdict.wait_s) == (False, 3.0)
        assert budget.plan("a", 5.0).allowed
        assert budget.plan("b", 2.0).allowed

    def test_pause_is_bounded(self):
        budget = RetryBudget()
        budget.observe_overload("a", 0.0, retry_after_s=1e12)
        assert budget.plan("a", 0.0).wait_s == limits.RETRY_AFTER_S_MAX

    def test_shorter_pause_does_not_shorten_a_longer_one(self):
        budget = RetryBudget()
        budget.observe_overload("a", 0.0, retry_after_s=60)
        budget.observe_overload("a", 1.0, retry_after_s=1)
        assert budget.plan("a", 10.0).wait_s == 50.0

    @pytest.mark.parametrize("value", [math.nan, math.inf, -1, "soon", -math.inf])
    def test_wild_pause_is_dropped_and_counted(self, value):
        budget = RetryBudget()
        budget.observe_overload("a", 0.0, retry_after_s=value)
        assert budget.plan("a", 0.0).allowed
        assert budget.dropped == 1

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ("120", 120.0),
            (" 0 ", 0.0),
            ("9" * 400, limits.RETRY_AFTER_S_MAX),
            ("Thu, 01 Jan 1970 00:03:20 GMT", 100.0),
            ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
            ("Fri, 29 Feb 1980 00:00:00 GMT", 320630400.0 - 100.0),
            ("Thu, 29 Feb 2026 00:00:00 GMT", None),
            ("Sat, 31 Dec 2016 23:59:60 GMT", 1483228800.0 - 100.0),
            ("Thu, 01 Foo 1970 00:00:00 GMT", None),
            ("-1", None),
            ("1.5", None),
            ("soon", None),
            ("\u0661", None),
            ("", None),
        ],
    )
    def test_header_is_read_as_seconds_or_a_date(self, value, expected):
        assert retry_after_s(value, 100.0) == expected


class TestLimits:
    def test_loop_is_stopped_and_polling_is_not(self):
        limit = repetition_limit()
        assert sum(limit.take("same", 0.0) == 0.0 for _ in range(1000)) == limits.REPEAT_BURST
        assert limit.take("same", 0.0) > 0.0
        assert limit.take("other", 0.0) == 0.0
        assert all(limit.take("poll", float(now)) == 0.0 for now in range(10_000))

    def test_flow_stops_at_the_bucket_and_says_when_there_is_room(self):
        flow = FlowLimit(bytes_per_s=10.0, burst_bytes=100)
        assert [flow.take(40, 0.0) for _ in range(2)] == [0.0, 0.0]
        wait = flow.take(40, 0.0)
        assert wait == pytest.approx(2.0)
        assert flow.take(40, wait) == 0.0

    def test_flow_lets_one_larger_than_the_bucket_pass_when_it_is_empty(self):
        flow = FlowLimit(bytes_per_s=10.0, burst_bytes=100)
        assert flow.take(500, 0.0) == 0.0
        assert flow.take(1, 0.0) == pytest.approx(40.1)

    def test_flow_books_what_came_unasked(self):
        flow = FlowLimit(bytes_per_s=10.0, burst_bytes=100)
        flow.add(200, 0.0)
        assert flow.take(10, 0.0) == pytest.approx(11.0)
        assert flow.take(-5, 100.0) == 0.0

    @pytest.mark.parametrize(("rate", "burst"), [(0, 1), (-1, 1), (math.nan, 1), (1, 0)])
    def test_flow_without_sense_is_refused(self, rate, burst):
        with pytest.raises(ValueError, match="above 0"):
            FlowLimit(bytes_per_s=rate, burst_bytes=burst)

    @given(st.lists(st.tuples(st.integers(0, 300), st.floats(0, 20)), max_size=100))
    def test_flow_never_carries_more_than_bucket_and_rate_allow(self, steps):
        flow, now, carried = FlowLimit(bytes_per_s=10.0, burst_bytes=100), 0.0, 0
        for size, passed in steps:
            now += passed
            if size <= 100 and flow.take(size, now) == 0.0:
                carried += size
        assert carried <= 100 + 10.0 * now + 1e-3
