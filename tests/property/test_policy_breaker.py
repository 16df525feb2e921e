"""The circuit of an endpoint, for any story of requests that end well, badly, or not at all."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stormline.core import limits_api as limits
from stormline.policy.breaker import Breaker, State


def failed(breaker, times, now=0.0):
    for _ in range(times):
        breaker.observe(False, now)


def test_failures_in_a_row_open_it_and_a_good_trial_closes_it():
    breaker = Breaker()
    failed(breaker, limits.BREAKER_FAILURES - 1)
    assert breaker.plan(0.0)
    assert breaker.state(0.0) is State.CLOSED
    breaker.observe(False, 0.0)
    assert (breaker.state(0.5), breaker.plan(0.5), breaker.allows(0.5)) == (State.OPEN, False, False)
    at = breaker.next_timer()
    assert breaker.state(at) is State.HALF_OPEN
    assert breaker.allows(at)
    assert breaker.plan(at)
    assert not breaker.plan(at)  # one trial at a time
    breaker.observe(True, at)
    assert breaker.state(at) is State.CLOSED
    assert breaker.next_timer() is None


def test_trial_that_was_given_up_makes_room_for_the_next():
    breaker = Breaker()
    failed(breaker, limits.BREAKER_FAILURES)
    at = breaker.next_timer()
    assert breaker.plan(at)
    breaker.leave()
    assert breaker.plan(at)


def test_half_of_many_failing_opens_it_though_never_in_a_row():
    breaker, now, count = Breaker(), 0.0, 0
    while breaker.state(now) is State.CLOSED and count < 100:
        breaker.observe(count % 2 == 0, now)
        count, now = count + 1, now + 0.01
    assert limits.BREAKER_SAMPLES_MIN <= count < 100


@given(share=st.floats(0.0, 0.2), steps=st.floats(0.001, 2.0))
def test_one_in_five_failing_keeps_it_closed(share, steps):
    breaker, now, owed = Breaker(), 0.0, 0.0
    for _ in range(300):
        owed += share
        breaker.observe(owed < 1.0, now)
        owed -= owed >= 1.0
        now += steps
        assert breaker.state(now) is State.CLOSED


@given(fails=st.integers(1, 20))
def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_good_one(fails):
    breaker, now, pause = Breaker(), 0.0, limits.BREAKER_OPEN_FIRST_S
    failed(breaker, limits.BREAKER_FAILURES)
    for _ in range(fails):
        assert breaker.next_timer() == now + pause
        now = breaker.next_timer()
        assert breaker.plan(now)
        breaker.observe(False, now)
        pause = min(2 * pause, limits.BREAKER_OPEN_MAX_S)
    now = breaker.next_timer()
    assert breaker.plan(now)
    breaker.observe(True, now)
    failed(breaker, limits.BREAKER_FAILURES, now)
    assert breaker.next_timer() == now + limits.BREAKER_OPEN_FIRST_S


class Circuit(RuleBasedStateMachine):
    """Requests that overlap as they like."""

    def __init__(self):
        super().__init__()
        self.breaker = Breaker()
        self.now = 0.0
        self.trials = self.under_way = 0

    @rule(seconds=st.floats(0.0, 100.0))
    def time_passes(self, seconds):
        self.now += seconds

    @rule()
    def ask(self):
        state, allowed = self.breaker.state(self.now), self.breaker.allows(self.now)
        went = self.breaker.plan(self.now)
        assert went == allowed
        assert went or state is not State.CLOSED
        assert not (went and state is State.OPEN)
        self.under_way += went

    @rule(good=st.booleans())
    def answer(self, good):
        if self.under_way:
            self.under_way -= 1
            self.breaker.observe(good, self.now)
            assert not good or self.breaker.state(self.now) is State.CLOSED

    @rule()
    def give_up(self):
        if self.under_way:
            self.under_way -= 1
            self.breaker.leave()

    @invariant()
    def it_comes_back(self):
        due = self.breaker.next_timer()
        assert due is None or due - self.now <= limits.BREAKER_OPEN_MAX_S
        if not self.under_way:
            assert self.breaker.allows(max(self.now, due or 0.0))


TestCircuit = Circuit.TestCase
