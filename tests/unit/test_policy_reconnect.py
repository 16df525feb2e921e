"""When a long connection comes back."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits, limits_carriers
from stormline.policy.reconnect import Reconnect

chances = st.floats(0, 1, exclude_max=True)


def stood(seconds=limits.RECONNECT_STABLE_S, now=100.0):
    """A line whose session has stood that long at `now`."""
    line = Reconnect()
    line.observe_success(now - seconds)
    return line


class TestLoss:
    @given(chances)
    def test_first_try_after_a_loss_is_spread_over_the_first_span(self, chance):
        line = stood()
        line.observe_loss(100.0, chance)
        assert line.next_timer() == pytest.approx(100.0 + limits.RECONNECT_FIRST_S * chance)
        assert not line.failing

    def test_a_thousand_clients_of_one_gateway_do_not_come_at_once(self):
        bins = [0] * 10
        for n in range(1000):
            line = stood()
            line.observe_loss(100.0, n / 1000)
            bins[int((line.next_timer() - 100.0) / limits.RECONNECT_FIRST_S * 10)] += 1
        assert max(bins) <= 110

    def test_session_that_was_short_counts_as_a_failure(self):
        line = stood(seconds=limits.RECONNECT_STABLE_S - 1)
        line.observe_loss(100.0, 0.0)
        assert line.failing
        assert line.next_timer() >= 100.0 + limits.RECONNECT_FIRST_S / 2

    def test_gateway_that_accepts_and_drops_is_left_alone_more_and_more(self):
        line, now, pauses = Reconnect(), 0.0, []
        for _ in range(10):
            line.observe_success(now)
            line.observe_loss(now + 0.1, 0.0)
            pauses.append(line.next_timer() - now - 0.1)
            now = line.next_timer()
        assert all(later >= earlier - 1e-6 for earlier, later in itertools.pairwise(pauses))
        assert pauses[-1] == pytest.approx(limits.RECONNECT_MAX_S / 2)

    def test_long_session_forgets_the_failures_before_it(self):
        line = Reconnect()
        for _ in range(5):
            line.observe_failure(0.0, 0.5)
        line.observe_success(100.0)
        line.observe_loss(100.0 + limits.RECONNECT_STABLE_S, 0.0)
        assert not line.failing


class TestFailure:
    @given(failures=st.integers(1, 60), chance=chances)
    def test_pause_grows_within_its_bounds(self, failures, chance):
        line = Reconnect()
        for _ in range(failures):
            line.observe_failure(0.0, chance)
        span = min(limits.RECONNECT_MAX_S, limits.RECONNECT_FIRST_S * 2 ** min(failures - 1, 16))
        assert span / 2 <= line.next_timer() <= span <= limits.RECONNECT_MAX_S

    @given(retry_after_s=st.floats(allow_nan=False), chance=chances)
    def test_pause_the_server_asked_for_is_kept_up_to_a_bound(self, retry_after_s, chance):
        line = Reconnect()
        line.observe_failure(0.0, chance, retry_after_s=retry_after_s)
        asked = min(max(0.0, retry_after_s), limits.RECONNECT_RETRY_AFTER_MAX_S)
        assert asked <= line.next_timer() <= max(limits.RECONNECT_FIRST_S, asked * 1.25)

    def test_no_try_before_its_time(self):
        line = Reconnect()
        line.observe_failure(10.0, 0.5)
        assert not line.may_try(10.0)
        assert line.may_try(line.next_timer())


class TestLeave:
    @given(spread_s=st.floats(allow_nan=False), chance=chances)
    def test_kept_connection_comes_back_within_the_spread(self, spread_s, chance):
        line = stood()
        line.observe_leave(100.0, chance, spread_s)
        assert 100.0 <= line.keep_timer() <= 100.0 + limits.RECONNECT_MAX_S
        assert line.keep_timer() <= 100.0 + max(0.0, spread_s)

    def test_call_need_not_wait_for_it(self):
        line = stood()
        line.observe_leave(100.0, 0.9, 30.0)
        assert line.may_try(100.0)
        assert line.keep_timer() > 100.0

    def test_gateway_that_accepts_and_sends_away_is_left_alone(self):
        line = stood(seconds=0.1)
        line.observe_leave(100.0, 0.0, 0.0)
        assert not line.may_try(100.0)


class TestStop:
    def test_refused_for_good_never_tries_by_itself(self):
        line = Reconnect()
        line.observe_stop()
        assert line.stopped
        assert not line.may_try(1e9)
        assert line.next_timer() is None
        assert line.keep_timer() is None

    def test_something_new_makes_it_try_at_once(self):
        line = Reconnect()
        for _ in range(9):
            line.observe_failure(0.0, 0.9, retry_after_s=1000)
        line.observe_stop()
        line.reset()
        assert line.may_try(0.0)
        assert not line.stopped
        assert not line.failing


class TestAdvice:
    """The server's advice, kept from its WELCOME for the day on which it can say nothing more."""

    @given(chance=chances, spread_s=st.floats(0.0, 60.0))
    def test_first_return_of_an_idle_line_is_spread_as_advised_and_a_call_need_not_wait(self, chance, spread_s):
        line = Reconnect()
        line.observe_success(0.0, spread_s=spread_s)
        line.observe_loss(100.0, chance)
        assert line.keep_timer() == pytest.approx(100.0 + max(spread_s, limits.RECONNECT_FIRST_S) * chance)
        assert line.next_timer() == pytest.approx(100.0 + limits.RECONNECT_FIRST_S * chance)

    def test_two_thousand_clients_come_back_with_no_more_than_five_in_a_hundred_at_once(self):
        bins = Counter()
        for number in range(2000):
            line = Reconnect()
            line.observe_success(0.0, spread_s=limits_carriers.RETURN_SPREAD_MIN_S)
            line.observe_loss(100.0, random.Random(number).random())
            bins[int((line.keep_timer() - 100.0) / 0.1)] += 1
        assert max(bins.values()) <= 0.05 * 2000

    @given(chance=chances)
    def test_line_found_dead_by_its_own_silence_does_not_wait_for_others(self, chance):
        line = Reconnect()
        line.observe_success(0.0, spread_s=30.0)
        line.observe_loss(100.0, chance, soon=True)
        assert line.keep_timer() <= 100.0 + limits.RECONNECT_FIRST_S

    @given(chance=chances)
    def test_try_that_failed_is_repeated_within_the_advice_too(self, chance):
        line = Reconnect()
        line.observe_success(0.0, spread_s=8.0)
        line.observe_loss(100.0, chance)
        line.observe_failure(105.0, chance)
        assert line.keep_timer() == pytest.approx(105.0 + 8.0 * (0.5 + 0.5 * chance))

    @given(spread_s=st.floats(-1e6, 1e6))
    def test_advice_is_believed_up_to_a_bound_and_ends_with_the_next(self, spread_s):
        line = Reconnect()
        line.observe_success(0.0, spread_s=spread_s)
        line.observe_loss(100.0, 0.999)
        assert line.keep_timer() <= 100.0 + limits.RECONNECT_MAX_S
        line.observe_success(200.0)
        line.observe_loss(300.0, 0.999)
        assert line.keep_timer() <= 300.0 + limits.RECONNECT_FIRST_S


events = st.one_of(
    st.tuples(st.just("success")),
    st.tuples(st.just("loss"), chances),
    st.tuples(st.just("leave"), chances, st.floats(0, 1e6)),
    st.tuples(st.just("failure"), chances),
    st.tuples(st.just("reset")),
)


@given(st.lists(st.tuples(st.floats(0, 100), events), max_size=30))
def test_next_try_is_never_further_away_than_the_longest_pause(steps):
    line, now = Reconnect(), 0.0
    for wait_s, (kind, *arguments) in steps:
        now += wait_s
        if kind in ("success", "loss", "leave", "failure"):
            getattr(line, f"observe_{kind}")(now, *arguments)
        else:
            line.reset()
        assert line.next_timer() <= now + limits.RECONNECT_MAX_S
        assert line.next_timer() <= line.keep_timer() <= now + limits.RECONNECT_MAX_S
