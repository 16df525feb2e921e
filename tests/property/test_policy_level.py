"""The level of a network: defined whatever is observed, never worse for a better network, bounded."""

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits_level
from stormline.policy.level import LEVELS, Level, LevelBook, LevelEstimator, level_of

wild = st.one_of(st.none(), st.text(max_size=3), st.integers(), st.floats(allow_nan=True, allow_infinity=True))
moments = st.floats(-1e6, 1e6)
bars = st.one_of(st.none(), st.integers(-2, 7))
calls = st.one_of(
    st.tuples(st.just("trip"), wild, moments, st.booleans()),
    st.tuples(st.just("rate"), wild, moments, st.booleans()),
    st.tuples(st.just("silence"), wild, moments, st.booleans()),
    st.tuples(st.just("remember"), st.sampled_from(LEVELS), moments, st.booleans()),
)


def play(made: LevelEstimator, kind: str, value: Any, now: float, queued: bool, signal: int | None) -> None:
    if kind == "trip":
        made.observe_round_trip(value, now, queued=queued, signal=signal)
    elif kind == "rate":
        made.observe_rate(value, now, queued=queued, signal=signal)
    elif kind == "silence":
        made.observe_silence(value, now)
    else:
        made.remember(value, now)


@given(st.lists(st.tuples(calls, bars), max_size=60), moments, wild, bars)
def test_any_samples_in_any_order_of_time_give_a_level(played, now, silent, signal):
    made = LevelEstimator()
    for (kind, value, at, queued), seen in played:
        play(made, kind, value, at, queued, seen)
        shown = made.quality(at, silent_s=silent, signal=seen)
        assert shown.level in LEVELS
    last = made.quality(now, silent_s=silent, signal=signal)
    assert last.level in LEVELS
    assert last.level.rank <= last.carries.rank or last.carries is Level.UNKNOWN
    assert 0.0 <= last.confidence <= 1.0
    assert last.since_s >= 0.0
    assert last.evidence
    kept = len(made._trips) + len(made._rates) + len(made._least)
    assert kept <= 3 * limits_level.LEVEL_SAMPLES_MAX


rtts = st.floats(0.001, 10.0)
rates = st.one_of(st.just(math.inf), st.floats(100.0, 1e8))
factors = st.floats(1.0, 20.0)


@given(
    st.lists(st.tuples(st.floats(0.0, 4.0), rtts, st.one_of(st.none(), rates), factors, factors), max_size=50),
    st.floats(0.0, 30.0),
)
def test_shorter_round_trips_and_higher_rates_never_give_a_worse_level(steps, pause_s):
    worse, better = LevelEstimator(), LevelEstimator()
    now = 0.0
    for gap_s, rtt_s, rate, quicker, wider in steps:
        now += gap_s
        worse.observe_round_trip(rtt_s, now)
        better.observe_round_trip(rtt_s / quicker, now)
        if rate is not None:
            worse.observe_rate(rate, now)
            better.observe_rate(min(rate * wider, 1e10) if math.isfinite(rate) else rate, now)
        assert worse.quality(now).level.rank <= better.quality(now).level.rank
    now += pause_s
    assert worse.quality(now).level.rank <= better.quality(now).level.rank


@given(rtts, rates, st.floats(0.0, 1.0), factors, factors, st.floats(0.0, 1.0))
def test_worth_of_a_link_is_monotone_in_round_trip_rate_and_loss(rtt_s, rate, loss, quicker, wider, share):
    mine = level_of(rtt_s, rate, loss).rank
    assert level_of(rtt_s / quicker, rate, loss).rank >= mine
    assert level_of(rtt_s, rate * wider, loss).rank >= mine
    assert level_of(rtt_s, rate, loss * share).rank >= mine
    assert level_of(rtt_s, rate, loss, slack=1.2).rank >= mine


@given(st.lists(st.tuples(st.floats(0.0, 4.0), rtts), min_size=1, max_size=30), st.floats(0.0, 60.0), factors)
def test_longer_silence_is_never_a_better_level(steps, silent_s, longer):
    made, now = LevelEstimator(), 0.0
    for gap_s, rtt_s in steps:
        now += gap_s
        made.observe_round_trip(rtt_s, now)
    before = made.quality(now, silent_s=silent_s).level.rank
    assert made.quality(now, silent_s=silent_s * longer).level.rank <= before


@given(st.lists(st.tuples(st.floats(0.0, 4.0), rtts), max_size=30), st.lists(st.floats(0.0, 200.0), max_size=10))
def test_asking_changes_no_later_level(steps, asked):
    quiet, curious, now = LevelEstimator(), LevelEstimator(), 0.0
    for gap_s, rtt_s in steps:
        now += gap_s
        for each in (quiet, curious):
            each.observe_round_trip(rtt_s, now)
        for later in asked:
            curious.quality(now + later, silent_s=later)
    assert quiet.quality(now)[:2] == curious.quality(now)[:2]


@given(st.lists(st.tuples(st.text(max_size=2), rtts, moments), max_size=80))
def test_any_walk_over_networks_is_bounded_and_gives_levels(walk):
    book = LevelBook()
    for name, rtt_s, now in walk:
        made = book.at(name, now)
        made.observe_round_trip(rtt_s, now)
        assert made.quality(now).level in LEVELS
    assert len(book._networks) <= 2 * limits_level.LEVEL_NETWORKS_MAX
