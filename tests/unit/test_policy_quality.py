"""Excellent, Evaluating, Bad: Mars's golden runs where its rules were kept, and what was changed."""

import pytest

from stormline.core import limits
from stormline.policy.quality import NetworkQuality, State, expected_s

LETTERS = {State.EXCELLENT: "X", State.EVALUATING: "E", State.BAD: "B"}
SIZES = {"s": 1000, "m": 5000}


def states(steps, *, host="a", fast=True, gap_s=1.0, start=1000.0):
    """Feed one step a second: s and m are quick answers, small and middling, S a slow one, f a failure."""
    quality, said = NetworkQuality(), ""
    for number, step in enumerate(steps):
        now = start + number * gap_s
        if step == "f":
            quality.observe_failure(host, now)
        elif step == "S":
            quality.observe_answer(host, 1000, 5.0, now, fast=fast)
        else:
            quality.observe_answer(host, SIZES[step], 0.1, now, fast=fast)
        said += LETTERS[quality.state(now)]
    return said


class TestGoldenRuns:
    """From the description of `stn/src/dynamic_timeout.cc`."""

    def test_small_answers_alone_never_make_a_network_excellent(self):
        assert states("s" * 14) == "E" * 14

    def test_ten_quick_answers_with_a_larger_one_do(self):
        assert states("m" + "s" * 13) == "E" * 9 + "X" * 5

    def test_one_failure_ends_excellent(self):
        assert states("m" * 10 + "f") == "E" * 9 + "X" + "E"

    def test_four_failures_of_ten_make_it_bad_and_seven_successes_good_again(self):
        assert states("fsfsfsf" + "s" * 9) == "E" * 6 + "B" * 7 + "E" * 3

    @pytest.mark.parametrize(
        ("size", "on_fast", "on_slow"),
        [(0, 0.5, 1), (3071, 0.5, 1), (3072, 2, 3), (10240, 4, 5), (30720, 6, 7), (10**9, 6, 7)],
    )
    def test_expectations_grow_with_size(self, size, on_fast, on_slow):
        assert (expected_s(size, fast=True), expected_s(size, fast=False)) == (on_fast, on_slow)


class TestChanged:
    def test_third_slow_answer_in_a_row_ends_excellent(self):
        assert states("m" * 10 + "SSmSSS") == "E" * 9 + "X" * 6 + "E"

    def test_one_host_that_is_down_makes_no_network_bad_while_others_answer(self):
        quality = NetworkQuality()
        for number in range(10):
            quality.observe_answer("good", 1000, 0.1, number, fast=True)
            quality.observe_failure("down", number)
        assert quality.state(10.0) is State.EVALUATING

    def test_failures_of_two_hosts_make_it_bad(self):
        quality = NetworkQuality()
        for number in range(2):
            quality.observe_answer("good", 1000, 0.1, number, fast=True)
            quality.observe_failure("one", number)
            quality.observe_failure("two", number)
        assert quality.state(2.0) is State.BAD

    @pytest.mark.parametrize("steps", ["m" * 12, "ffff"])
    def test_state_that_nothing_confirms_is_forgotten(self, steps):
        quality = NetworkQuality()
        for now, step in enumerate(steps):
            if step == "f":
                quality.observe_failure("a", now)
            else:
                quality.observe_answer("a", 5000, 0.1, now, fast=True)
        assert quality.state(20.0) is not State.EVALUATING
        assert quality.state(20.0 + limits.QUALITY_WINDOW_S) is State.EVALUATING

    def test_large_answer_of_long_ago_does_not_count(self):
        late = 2 * limits.QUALITY_WINDOW_S / 10
        assert "X" not in states("m" + "s" * 13, gap_s=late)
        assert "X" not in states("s" * 14, start=0.0)
