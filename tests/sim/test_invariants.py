"""Each invariant says what breaks it and is silent where it holds; a thing that is never told is no check."""

import dataclasses

import pytest

from stormline.core import limits
from stormline.telemetry.timeline import AttemptRecord, CallRecord
from stormline.testing import invariants
from stormline.testing.history import CallEntry, History, LinkLife, Processing, PushEntry, RecordEntry


def good_history() -> History:
    """One well-behaved post and one push."""
    history = History(scenario="s", seed=1)
    history.calls["c-1"] = CallEntry(
        id="c-1", device="d1", kind="post", deadline_s=5.0, started_s=10.0, ended_s=11.0, status=200, intact=True,
        fresh=True,
    )  # fmt: skip
    history.processed["c-1"] = Processing(arrivals=1, keyless=1, executed=1)
    attempt = AttemptRecord(means="long", address="g:443", carrier="sl-tls", start_ms=0.0, duration_ms=1000.0)
    record = CallRecord(
        call_id="r", started_at_ms=0, method="POST", host="h", path="/op/c-1", total_ms=1000.0,
        stages_ms={"send": 400.0, "first_byte": 600.0}, attempts=[attempt],
    )  # fmt: skip
    history.records["d1"] = [RecordEntry(record, 11.0)]
    history.links.append(LinkLife("d1", ("g:443",), 0.0, 100.0))
    history.pushes["p1"] = PushEntry(id="p1", device="d1", results=["acked"], shown=1, acked_s=2.0, confirmed_s=3.0)
    history.saw("a queue", 3, 4)
    return history


def call(history: History) -> CallEntry:
    return history.calls["c-1"]


def fail(history: History, **changes) -> None:
    """Let the call fail, and its record say so."""
    values = {"error": "ReadError", "phase": "first_byte", "status": 0, "maybe_delivered": True, "fresh": False}
    for name, value in (values | changes).items():
        setattr(call(history), name, value)


def attempt(history: History) -> AttemptRecord:
    return history.records["d1"][0].record.attempts[0]


def hang(history):
    call(history).ended_s = None
    history.records["d1"].clear()


def twice(history):
    history.processed["c-1"] = Processing(arrivals=2, keyless=2, executed=2)


def lose_key(history):
    call(history).kind = "post-key"


def deny(history):
    fail(history, maybe_delivered=False)


def wrong_answer(history):
    call(history).intact = False


def invented_answer(history):
    del history.processed["c-1"]


def foreign_error(history):
    fail(history, error="AttributeError", phase="")


def late(history):
    fail(history)
    call(history).deadline_s = 0.5
    attempt(history).duration_ms = 400.0


def unseen_push(history):
    history.pushes["p1"].shown = 0


def early_ack(history):
    history.pushes["p1"].acked_s = 3.5


def shown_twice(history):
    history.pushes["p1"].shown = 2


def changed_push(history):
    history.pushes["p1"].intact = False


def strange_push(history):
    history.strange_pushes.append("p9")


def ill_after_the_storm(history):
    fail(history, fresh=True)


def refused(history):
    history.given_up.append("d1: replaced")


def dead_wait(history):
    fail(history)
    attempt(history).failure = "timeout.first_byte"
    attempt(history).phase = "first_byte"
    history.links[0] = LinkLife("d1", ("g:443",), 0.0, 10.0 - 0.5)
    history.links.append(dataclasses.replace(history.links[0], opened_s=10.0, closed_s=10.1))
    history.records["d1"][0] = RecordEntry(history.records["d1"][0].record, 13.0)
    history.records["d1"][0].record.total_ms = 3000.0
    history.records["d1"][0].record.stages_ms = {"send": 3000.0}
    attempt(history).duration_ms = 3000.0


def no_record(history):
    history.records["d1"].clear()


def strange_record(history):
    history.records["d1"].append(
        RecordEntry(CallRecord(call_id="x", started_at_ms=0, method="GET", host="h", path="/op/c-9"), 1.0)
    )


def bad_sum(history):
    history.records["d1"][0].record.stages_ms["send"] = 1.0


def attempt_outlives_call(history):
    attempt(history).duration_ms = 1500.0


def attempt_outlives_deadline(history):
    call(history).deadline_s = 0.2
    attempt(history).failure, attempt(history).phase = "tcp.read", "first_byte"


def many_attempts(history):
    record = history.records["d1"][0].record
    record.attempts = [AttemptRecord(means="direct") for _ in range(2 * limits.ATTEMPTS_MAX + 1)]


def overflow(history):
    history.saw("a queue", 5, 4)


BREACHES = [
    (hang, "every_call_ends"),
    (twice, "no_write_happens_twice"),
    (lose_key, "keys_are_never_lost"),
    (deny, "undelivered_means_unprocessed"),
    (wrong_answer, "an_answer_is_the_right_one"),
    (invented_answer, "an_answer_is_the_right_one"),
    (foreign_error, "errors_are_ours"),
    (late, "a_call_keeps_its_deadline"),
    (unseen_push, "a_confirmed_push_was_seen"),
    (early_ack, "a_confirmed_push_was_seen"),
    (shown_twice, "no_push_is_shown_twice"),
    (changed_push, "no_push_is_shown_twice"),
    (strange_push, "no_push_is_shown_twice"),
    (ill_after_the_storm, "all_is_well_after_the_storm"),
    (refused, "no_device_gives_up"),
    (dead_wait, "no_call_waits_on_a_dead_link"),
    (no_record, "each_call_has_one_record"),
    (strange_record, "each_call_has_one_record"),
    (bad_sum, "records_add_up"),
    (attempt_outlives_call, "records_add_up"),
    (attempt_outlives_deadline, "attempts_keep_the_deadline"),
    (many_attempts, "http_attempts_stay_in_budget"),
    (overflow, "bounds_hold"),
]


def test_good_history_breaks_nothing() -> None:
    assert invariants.check(good_history()) == []


@pytest.mark.parametrize(("spoil", "name"), BREACHES, ids=lambda value: getattr(value, "__name__", value))
def test_breach_is_told_by_its_invariant_alone(spoil, name) -> None:
    history = good_history()
    spoil(history)
    told = invariants.check(history)
    assert {line.partition(":")[0] for line in told} == {name}


def test_every_invariant_has_a_breach_here() -> None:
    assert {name for _, name in BREACHES} == {each.__name__ for each in invariants.ALL}


def test_breach_names_call_or_push() -> None:
    for spoil, _ in BREACHES:
        history = good_history()
        spoil(history)
        [line] = invariants.check(history)[:1]
        assert any(name in line for name in ("c-1", "c-9", "p1", "p9", "d1", "a queue")), line


def test_bound_keeps_the_most_that_was_seen() -> None:
    history = good_history()
    history.saw("a queue", 9, 4)
    history.saw("a queue", 2, 4)
    assert history.bounds["a queue"].seen == 9
