"""Each invariant of worlds without gateways says what breaks it and is silent where it holds."""

import pytest

from stormline.core import limits
from stormline.testing import invariants_direct as invariants
from stormline.testing.history import Attempt, CallEntry, History, Processing, RetryAsk, Wait


def good_history() -> History:
    """One well-behaved post that was asked twice, and what the budget granted for it."""
    history = History(scenario="s", seed=1)
    history.calls["d1-1"] = CallEntry(
        id="d1-1", device="d1", kind="post-key", deadline_s=5.0, started_s=10.0, ended_s=12.0, status=200, intact=True,
        head_s=12.0,
    )  # fmt: skip
    history.processed["d1-1"] = Processing(arrivals=1, executed=1, refusals=1)
    direct = history.direct
    direct.attempts = [Attempt("d1-1", 10.0, 10.5, retry_after_s=1.0), Attempt("d1-1", 11.5, 12.0)]
    direct.lanes["d1-1"] = 1
    direct.asks = [RetryAsk("d1", "h", 10.0, 0.0, first=True), RetryAsk("d1", "h", 10.5, 1.0)]
    direct.connects = [("d1", "h:443", 10.0)]
    direct.dark = [("d1", 9.0, 11.0)]
    direct.waits = [
        Wait(device="d1", host="h", call_id=f"d1-{n}", urgency=3, came_s=n, queued_s=n, granted_s=10.0 + n)
        for n in (1, 2)
    ]
    direct.stories["d1-1"] = ["try direct", "status 503", "pause 1 s", "try direct"]
    return history


def call(history: History) -> CallEntry:
    return history.calls["d1-1"]


def late_head(history):
    call(history).deadline_s = 1.0


def slow_cancel(history):
    call(history).cancelled_s = 11.0


def write_done_twice(history):
    history.processed["d1-1"].executed = 2


def resent(history):
    call(history).kind = "once"
    history.processed["d1-1"].arrivals = 2


def many_attempts(history):
    number = limits.ATTEMPTS_MAX + limits.REFUSALS_MAX + 1
    history.direct.attempts = [Attempt("d1-1", 10.0, 11.0, "ReadError") for _ in range(number)]
    history.direct.stories.clear()


def many_lanes(history):
    history.direct.lanes["d1-1"] = limits.LANES_MAX + 1


def attempt_outlives(history):
    history.direct.attempts[1].ended_s = 12.5


def attempt_after_the_end(history):
    history.direct.attempts[1] = Attempt("d1-1", 12.1, 12.1005, "ReadError")
    call(history).ended_s = 12.0999


def storm(history):
    history.direct.asks += [RetryAsk("d1", "h", 10.6, 1.0) for _ in range(limits.RETRY_BURST + 1)]


def not_asked(history):
    history.direct.asks.pop()


def too_early(history):
    history.direct.attempts[1].began_s = 11.0


def untold(history):
    history.direct.stories["d1-1"].pop()


def knocking(history):
    history.direct.connects += [("d1", "h:443", 10.0 + number / 100) for number in range(60)]


def out_of_turn(history):
    first, second = history.direct.waits
    history.direct.waits = [second, first]


def leak(history):
    history.direct.left.append("d1 at rest: 1 connections")


BREACHES = [
    (late_head, "heads_keep_the_deadline"),
    (slow_cancel, "a_cancelled_call_ends_at_once"),
    (write_done_twice, "an_answered_write_was_done_once"),
    (resent, "what_may_not_be_resent_arrives_once"),
    (many_attempts, "attempts_stay_within_their_number"),
    (many_lanes, "lanes_stay_within_their_number"),
    (attempt_outlives, "no_attempt_outlives_its_call"),
    (attempt_after_the_end, "no_attempt_outlives_its_call"),
    (storm, "retries_stay_in_budget"),
    (not_asked, "retries_ask_the_budget"),
    (too_early, "retry_after_is_heeded"),
    (untold, "every_attempt_has_its_line"),
    (knocking, "a_dark_path_is_knocked_at_evenly"),
    (out_of_turn, "who_waits_goes_in_turn"),
    (leak, "nothing_is_left"),
]


def test_good_history_breaks_nothing() -> None:
    assert invariants.check(good_history()) == []


@pytest.mark.parametrize(("spoil", "name"), BREACHES, ids=lambda value: getattr(value, "__name__", value))
def test_breach_is_told_by_its_invariant_alone(spoil, name) -> None:
    history = good_history()
    spoil(history)
    told = invariants.check(history)
    assert {line.partition(":")[0] for line in told} == {name}
    assert all("d1" in line for line in told)


def test_every_invariant_has_a_breach_here() -> None:
    assert {name for _, name in BREACHES} == {each.__name__ for each in invariants.ALL}
