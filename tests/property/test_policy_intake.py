"""The pace of new connections, for any story of bursts, slow peers and a loop that is late."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stormline.core import limits_carriers as limits
from stormline.core import limits_platform
from stormline.policy.intake import Intake, connections_max

GAPS = st.floats(min_value=0.0, max_value=10.0)
LAGS = st.floats(min_value=0.0, max_value=5.0)


class Stories(RuleBasedStateMachine):
    """Whatever happens, no more begin than the quickest pace allows, and there is always a way on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.intake = Intake(self.now)
        self.begun = 0
        self.allowed = self.intake.pace_per_s * limits.INTAKE_LOOK_S

    @rule(gap_s=GAPS)
    def wait(self, gap_s: float) -> None:
        self.allowed += gap_s * self.intake.pace_per_s
        self.now += gap_s

    @rule(wanted=st.integers(min_value=1, max_value=500), finish=st.booleans())
    def come(self, wanted: int, finish: bool) -> None:
        for _ in range(wanted):
            if not self.intake.room(self.now):
                assert 0.0 < self.intake.wait_s() <= 1.0 / limits.INTAKE_MIN_PER_S
                break
            self.intake.began()
            self.begun += 1
            if finish:
                self.intake.finished()

    @rule(lag_s=LAGS)
    def look(self, lag_s: float) -> None:
        before = self.intake.pace_per_s
        self.intake.look(lag_s)
        if lag_s > limits.INTAKE_LAG_S:
            assert self.intake.pace_per_s <= before
        else:
            grown = max(before + limits.INTAKE_STEP_PER_S, before * limits.INTAKE_GROWTH)
            assert before <= self.intake.pace_per_s <= grown

    @invariant()
    def paced(self) -> None:
        assert self.begun <= self.allowed + 1.0
        assert limits.INTAKE_MIN_PER_S <= self.intake.pace_per_s <= limits.INTAKE_MAX_PER_S

    @invariant()
    def who_waits_is_let_in(self) -> None:
        if not self.intake.room(self.now):
            self.allowed += self.intake.wait_s() * self.intake.pace_per_s
            self.now += self.intake.wait_s() + 1e-6
            assert self.intake.room(self.now)


TestStories = Stories.TestCase


def served(cost_s: float, seconds: float, *, finish: bool = True) -> tuple[list[int], list[float]]:
    """Serve a crowd without end by a loop on which each costs so much; give how many began at each look, and lags."""
    now, intake, begun, lags = 0.0, Intake(0.0), [], []
    for _ in range(round(seconds / limits.INTAKE_LOOK_S)):
        due, count = now + limits.INTAKE_LOOK_S, 0
        while now < due:
            if intake.room(now):
                intake.began()
                count += 1
                now += cost_s
                if finish:
                    intake.finished()
            else:
                now = min(due, now + max(intake.wait_s(), 1e-4))
        begun.append(count)
        lags.append(now - due)
        intake.look(lags[-1])
    return begun, lags


def test_a_quick_node_comes_to_take_all_it_can():
    begun, lags = served(0.0002, 20.0)
    assert sum(begun[-50:]) / 5 > 0.9 * limits.INTAKE_MAX_PER_S
    assert max(lags) < limits.INTAKE_LAG_S


def test_peers_that_finish_nothing_do_not_make_it_quicker():
    begun, _ = served(0.0, 20.0, finish=False)
    assert max(begun[1:]) <= limits.INTAKE_FIRST_PER_S * limits.INTAKE_LOOK_S + 1  # the first look has a burst beside


def test_a_loop_that_is_late_begins_fewer_within_a_second_and_more_again_when_it_is_quick():
    intake = Intake(0.0)
    for _ in range(10):
        intake.look(0.4)
    assert intake.pace_per_s == limits.INTAKE_MIN_PER_S
    now = 0.0
    for _ in range(100):
        while intake.room(now):
            intake.began()
            intake.finished()
        now += limits.INTAKE_LOOK_S
        intake.look(0.0)
    assert intake.pace_per_s >= limits.INTAKE_FIRST_PER_S


def test_late_loop_cuts_to_what_it_has_shown_at_once_and_is_found_again_by_steps():
    begun, lags = served(0.003, 20.0)
    assert max(lags) < limits.INTAKE_SHED_LAG_S
    assert 200 < sum(begun[-100:]) / 10 <= 1.05 / 0.003
    assert sum(lag > limits.INTAKE_LAG_S for lag in lags[50:]) <= 0.1 * len(lags[50:])


def test_overload_is_two_late_looks_in_a_row():
    intake = Intake(0.0)
    late = limits.INTAKE_SHED_LAG_S + 0.01
    seen = []
    for lag_s in (late, 0.0, late, late, 0.0):
        intake.look(lag_s)
        seen.append(intake.overloaded)
    assert seen == [False, False, False, True, False]


@given(chance=st.floats(min_value=0.0, max_value=1.0, exclude_max=True))
def test_pause_of_one_sent_away_is_spread(chance: float):
    assert limits.INTAKE_RETRY_S <= Intake.retry_after_s(chance) < 4 * limits.INTAKE_RETRY_S


@given(sessions=st.integers(min_value=0, max_value=10**6))
def test_span_of_the_return_grows_with_the_sessions_within_its_bounds(sessions: int):
    intake = Intake(0.0)
    span_s = intake.return_spread_s(sessions)
    assert limits.RETURN_SPREAD_MIN_S <= span_s <= limits.RETURN_SPREAD_MAX_S
    assert span_s <= intake.return_spread_s(sessions + 1000)
    assert 0.1 / span_s <= 0.05  # of all first returns in any 100 ms


@pytest.mark.parametrize(("descriptors", "clients"), [(20_000, 18_000), (4096, 3072), (512, 384), (1, 1)])
def test_descriptors_are_kept_for_all_else(descriptors: int, clients: int):
    assert connections_max(descriptors, limits_platform.SESSIONS_MAX) == clients


@given(descriptors=st.integers(min_value=1, max_value=10**6))
def test_clients_never_take_all_descriptors(descriptors: int):
    clients = connections_max(descriptors, limits_platform.SESSIONS_MAX)
    kept = min(limits.DESCRIPTORS_KEPT_MAX, math.floor(descriptors * limits.DESCRIPTORS_KEPT_SHARE))
    assert 1 <= clients <= limits_platform.SESSIONS_MAX
    assert descriptors == 1 or descriptors - clients >= kept
