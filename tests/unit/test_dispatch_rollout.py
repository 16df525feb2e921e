"""Who takes part in a roll-out, and when it is halted."""

import math
import random

import pytest

from stormline.core import errors
from stormline.dispatch import rollout
from stormline.dispatch.rollout import Counts, GuardPolicy, Looks

MANY = 20_000


def test_place_is_spread_evenly_over_the_devices() -> None:
    shares = [rollout.takes_part(f"device-{n}", 7, 10.0) for n in range(MANY)]
    assert sum(shares) / MANY == pytest.approx(0.10, abs=0.01)


def test_place_of_two_versions_is_independent() -> None:
    first = {n for n in range(MANY) if rollout.takes_part(f"device-{n}", 7, 10.0)}
    second = {n for n in range(MANY) if rollout.takes_part(f"device-{n}", 8, 10.0)}
    assert len(first & second) / len(first) == pytest.approx(0.10, abs=0.03)


def test_place_is_the_same_for_ever() -> None:
    # A change of the hash would move devices between the arms of a roll-out while nodes are renewed one by one.
    # The number is the head of `printf '7\0device-1' | sha256sum`.
    assert rollout.place("device-1", 7) == pytest.approx(41.523683190855465)


def test_device_without_an_id_takes_no_part() -> None:
    assert not rollout.takes_part("", 7, 100.0)
    assert rollout.takes_part("d", 7, 100.0)


def test_steps_end_at_all_devices() -> None:
    assert rollout.check_steps((1.0, 10.0)) == (1.0, 10.0, 100.0)
    assert rollout.check_steps((100.0,)) == (100.0,)


@pytest.mark.parametrize("steps", [(), (0.0,), (101.0,), (10.0, 10.0), (10.0, 5.0), (math.nan,), tuple(range(1, 30))])
def test_steps_that_are_none_are_refused(steps: tuple[float, ...]) -> None:
    with pytest.raises(errors.RequestRefused):
        rollout.check_steps(steps)


@pytest.mark.parametrize(
    ("new", "old"),
    [
        (Counts(10, 5), Counts(10, 10)),
        (Counts(4, 1), Counts(4, 3)),
        (Counts(300, 250), Counts(2000, 1990)),
        (Counts(7, 0), Counts(3, 2)),
    ],
)
def test_tail_is_fishers_exact_test(new: Counts, old: Counts) -> None:
    failed = new.failures + old.failures
    ways = [math.comb(new.calls, k) * math.comb(old.calls, failed - k) for k in range(new.failures, failed + 1)]
    assert rollout.tail(new, old) == pytest.approx(sum(ways) / math.comb(new.calls + old.calls, failed))


@pytest.mark.parametrize(("new", "old"), [(Counts(100, 100), Counts(100, 90)), (Counts(5, 5), Counts(5, 5))])
def test_tail_of_an_arm_that_is_no_worse_is_one(new: Counts, old: Counts) -> None:
    assert rollout.tail(new, old) == 1.0


def test_judge_too_few_calls_say_nothing() -> None:
    judgement = rollout.judge(Counts(199, 0), Counts(10_000, 10_000), Looks())
    assert judgement == (rollout.Judgement(False, None, Looks()))


def test_judge_clearly_worse_rules_are_halted_at_the_first_look() -> None:
    judgement = rollout.judge(Counts(200, 180), Counts(20_000, 19_900), Looks())
    assert judgement.worse
    assert judgement.p_value is not None
    assert judgement.p_value < 1e-9


def test_judge_equal_and_better_rules_go_on() -> None:
    assert not rollout.judge(Counts(1000, 990), Counts(20_000, 19_800), Looks()).worse
    assert not rollout.judge(Counts(1000, 1000), Counts(20_000, 19_000), Looks()).worse


def test_judge_certain_but_tiny_difference_is_no_reason() -> None:
    judgement = rollout.judge(Counts(10**7, 9_990_000), Counts(10**7, 9_995_000), Looks())
    assert judgement.p_value is not None
    assert judgement.p_value < 1e-9
    assert not judgement.worse


def test_judge_the_same_counts_again_are_not_looked_at_twice() -> None:
    first = rollout.judge(Counts(400, 398), Counts(4000, 3990), Looks())
    second = rollout.judge(Counts(401, 399), Counts(4000, 3990), first.looks)
    assert first.looks == Looks(1, 500)
    assert second.p_value is None


def test_judge_rollouts_that_are_not_worse_are_seldom_halted() -> None:
    """With the error allowed set to 5 %, of 1000 roll-outs with equal arms far fewer than 80 are halted."""
    rng, halted = random.Random(3), 0
    policy = GuardPolicy(calls_min=50, margin=0.0, false_halt=0.05)
    for _ in range(1000):
        calls = [0, 0]
        successes = [0, 0]
        looks = Looks()
        for _ in range(10):
            for arm in (0, 1):
                calls[arm] += 60
                successes[arm] += sum(rng.random() < 0.95 for _ in range(60))
            judgement = rollout.judge(Counts(calls[0], successes[0]), Counts(calls[1], successes[1]), looks, policy)
            looks = judgement.looks
            if judgement.worse:
                halted += 1
                break
    assert halted < 80


def test_judge_takes_counts_of_a_large_fleet() -> None:
    judgement = rollout.judge(Counts(10**9, 10**9 - 10**7), Counts(10**9, 10**9 - 10**6), Looks())
    assert judgement.worse


@pytest.mark.parametrize("change", [{"calls_min": 0}, {"margin": -0.1}, {"margin": 1.0}, {"false_halt": 0.0}])
def test_guard_out_of_range_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(errors.ConfigError):
        GuardPolicy(**change)  # type: ignore[arg-type]
