"""Quantiles and rates, and what they refuse to take in."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits
from stormline.policy.estimate import DurationSketch, RateWindow, sound

WILD = [None, math.nan, math.inf, -math.inf, -0.001, 2**63, 10**400, "1", b"1", True, [], object()]


class TestSound:
    @pytest.mark.parametrize("value", WILD)
    def test_sound_of_what_is_no_duration_is_none(self, value):
        assert sound(value, 3600.0) is None

    @pytest.mark.parametrize("value", [0, 0.0, 1, 3600.0, 1e-300])
    def test_sound_of_a_duration_is_itself(self, value):
        assert sound(value, 3600.0) == value


class TestSketch:
    def test_sketch_without_samples_knows_nothing(self):
        sketch = DurationSketch()
        assert sketch.quantile(0.5) is None
        assert sketch.upper() is None
        assert len(sketch) == 0

    @given(st.lists(st.floats(0.001, 120), min_size=1, max_size=limits.SKETCH_SAMPLES_MAX), st.floats(0.01, 1))
    def test_quantile_is_never_below_the_true_one_and_at_most_a_quarter_above(self, samples, share):
        sketch = DurationSketch()
        for sample in samples:
            sketch.observe(sample, 0.0)
        true = sorted(samples)[max(1, math.ceil(share * len(samples))) - 1]
        assert true * (1 - 1e-6) <= sketch.quantile(share) <= true * 2 ** (1 / 3) * (1 + 1e-6)

    @pytest.mark.parametrize(("seconds", "shown"), [(0.0, 0.001), (1e-9, 0.001), (3600.0, 0.001 * 2 ** (51 / 3))])
    def test_durations_outside_the_range_count_as_its_ends(self, seconds, shown):
        sketch = DurationSketch()
        sketch.observe(seconds, 0.0)
        assert sketch.quantile(0.5) == pytest.approx(shown)

    def test_upper_is_three_times_the_first_sample_and_nearer_with_more(self):
        sketch = DurationSketch()
        sketch.observe(0.064, 0.0)
        assert sketch.upper() == pytest.approx(0.064 * 3, rel=0.01)
        for _ in range(63):
            sketch.observe(0.064, 0.0)
        assert sketch.upper() == pytest.approx(0.064 * 1.25, rel=0.01)

    def test_one_slow_sample_shows_at_once_and_is_forgotten_after_some_good_ones(self):
        sketch = DurationSketch()
        for _ in range(30):
            sketch.observe(0.05, 0.0)
        sketch.observe(4.0, 0.0)
        assert sketch.quantile(0.99) >= 4.0
        for _ in range(limits.SKETCH_SAMPLES_MAX):
            sketch.observe(0.05, 0.0)
        assert sketch.quantile(0.99) < 0.07

    def test_sample_count_is_bounded(self):
        sketch = DurationSketch()
        for _ in range(10_000):
            sketch.observe(0.05, 0.0)
        assert len(sketch) <= limits.SKETCH_SAMPLES_MAX

    def test_old_samples_fade_and_a_long_sleep_empties_the_sketch(self):
        sketch = DurationSketch()
        for _ in range(40):
            sketch.observe(1.0, 0.0)
        sketch.observe(0.01, limits.SKETCH_HALF_LIFE_S)
        assert len(sketch) == 21
        sketch.observe(0.01, 1e9)
        assert len(sketch) == 1
        assert sketch.quantile(1.0) < 0.02

    def test_clock_that_steps_back_ages_nothing(self):
        sketch = DurationSketch()
        for now in (1e6, 0.0, 1e6):
            sketch.observe(0.05, now)
        assert len(sketch) == 3


class TestRate:
    def test_best_of_an_epoch_counts_and_the_worst_of_the_epochs(self):
        window = RateWindow()
        for rate, now in ((100.0, 0.0), (1000.0, 5.0), (300.0, 9.0), (800.0, 12.0), (50.0, 13.0)):
            window.observe(rate, now)
        assert window.bytes_per_s(13.0) == 800.0

    def test_epochs_beyond_the_memory_are_forgotten(self):
        window = RateWindow()
        window.observe(10.0, 0.0)
        for number in range(1, limits.RATE_EPOCHS_MAX + 1):
            window.observe(1000.0 * number, number * limits.RATE_EPOCH_S)
        assert window.bytes_per_s(50.0) == 1000.0
        assert window.bytes_per_s(1e6) is None

    def test_rate_of_zero_is_no_sample(self):
        window = RateWindow()
        window.observe(0.0, 0.0)
        assert window.bytes_per_s(0.0) is None
