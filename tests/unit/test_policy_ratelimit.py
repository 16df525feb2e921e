"""Rate bounds on a clock of our own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.policy.ratelimit import RateLimiter


def limiter(**change: float) -> RateLimiter:
    arguments = {"rate_per_s": 2.0, "burst": 3, "keys_max": 10} | change
    return RateLimiter(**arguments)  # type: ignore[arg-type]


def test_burst_passes_and_the_next_waits_for_one_token() -> None:
    bound = limiter()
    assert [bound.take("a", 100.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert bound.take("a", 100.0) == pytest.approx(0.5)


def test_refused_take_takes_nothing() -> None:
    bound = limiter()
    for _ in range(10):
        bound.take("a", 100.0)
    assert bound.take("a", 100.5) == 0.0
    assert bound.take("a", 100.5) > 0.0


def test_waiting_as_told_is_enough() -> None:
    bound = limiter(rate_per_s=0.3)
    now = 1e9 + 0.1
    for _ in range(50):
        now += bound.take("a", now)
        assert bound.take("a", now) >= 0.0
    wait_s = bound.take("a", now)
    assert bound.take("a", now + wait_s) == 0.0


def test_keys_do_not_share() -> None:
    bound = limiter(burst=1)
    assert bound.take("a", 0.0) == 0.0
    assert bound.take("b", 0.0) == 0.0
    assert bound.take("a", 0.0) > 0.0


def test_table_is_bounded_and_forgets_the_silent_one() -> None:
    bound = limiter(burst=1, keys_max=2)
    bound.take("a", 0.0)
    bound.take("b", 0.0)
    assert bound.take("a", 0.1) > 0.0  # refused, and heard of
    bound.take("c", 0.1)
    assert len(bound) == 2
    assert bound.take("a", 0.1) > 0.0
    assert bound.take("b", 0.1) == 0.0


@pytest.mark.parametrize("change", [{"rate_per_s": 0.0}, {"burst": 0}, {"keys_max": 0}, {"rate_per_s": float("nan")}])
def test_useless_bounds_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        limiter(**change)


@given(
    st.floats(0.01, 100),
    st.integers(1, 20),
    st.lists(st.floats(0, 5), min_size=1, max_size=80),
    st.floats(0, 1e7),
)
def test_no_window_sees_more_than_burst_and_rate(rate: float, burst: int, gaps: list[float], start: float) -> None:
    bound = RateLimiter(rate_per_s=rate, burst=burst, keys_max=4)
    now, taken = start, []
    for gap in gaps:
        now += gap
        if bound.take("a", now) == 0.0:
            taken.append(now)
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            assert last - first + 1 <= burst + rate * (taken[last] - taken[first]) + 1e-3


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.floats(0, 2)), max_size=60))
def test_table_never_passes_its_bound(steps: list[tuple[str, float]]) -> None:
    bound, now = limiter(keys_max=3), 0.0
    for key, gap in steps:
        now += gap
        assert bound.take(key, now) >= 0.0
        assert len(bound) <= 3
