"""Hedges: when a read is late, and what all of them together may cost."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits_means
from stormline.policy.hedge import HedgePolicy

CLASS = ("net", "a.test", "GET /items")


def learned(waits, carried=1_000_000):
    policy = HedgePolicy()
    for number, wait in enumerate(waits):
        policy.observe(*CLASS, first_byte_s=wait, carried_bytes=carried, now=float(number))
    return policy


def test_nothing_is_late_before_enough_is_known():
    assert learned([0.1] * (limits_means.HEDGE_SAMPLES_MIN - 1)).late_s(*CLASS) is None
    assert learned([]).late_s(*CLASS) is None


def test_late_is_beyond_the_learned_quantile_of_the_class():
    late_s = learned([0.1] * 30).late_s(*CLASS)
    assert 0.1 + limits_means.HEDGE_MARGIN_S <= late_s <= 0.13 + limits_means.HEDGE_MARGIN_S
    assert learned([0.1] * 30).late_s("net", "a.test", "GET /other") is None
    assert learned([0.1] * 30 + [3.0] * 10).late_s(*CLASS) > 3.0


@pytest.mark.parametrize("sample", [-0.001, math.nan, math.inf, 2.0**63, "x"])
def test_sample_that_is_not_sound_is_dropped_and_counted(sample):
    policy = learned([0.1] * 30)
    before = policy.late_s(*CLASS)
    policy.observe(*CLASS, first_byte_s=sample, carried_bytes=sample, now=40.0)
    assert policy.late_s(*CLASS) == before
    assert policy.dropped >= 1


def test_nothing_is_granted_before_anything_was_carried():
    assert not HedgePolicy().grant(0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2_000_000)), max_size=200))
def test_hedges_never_cost_more_than_their_share(steps):
    policy = HedgePolicy()
    for hedge, size in steps:
        if hedge:
            policy.grant(size)
        else:
            policy.observe(*CLASS, first_byte_s=None, carried_bytes=size, now=0.0)
        assert policy.bytes_spent <= limits_means.HEDGE_BYTES_SHARE * policy.bytes_carried
