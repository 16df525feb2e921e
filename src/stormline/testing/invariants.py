"""What must hold in every run, however bad the network: one function each, over what happened.

Each gives a line for every breach, which names the call or push; `check` puts them all together. The first ones are
the promises to applications, the last ones keep the system small.
"""

from collections.abc import Callable, Iterator
from typing import Final

from stormline.core import limits, limits_platform
from stormline.telemetry.timeline import AttemptRecord
from stormline.testing.history import CallEntry, History, Processing

DEADLINE_SLACK_S: Final = 0.1
"""How long after its deadline a call may end: timers fire at once here, closing takes a few turns of the loop."""
DEAD_LINK_S: Final = 1.0
"""How long after its session has ended a call may still wait on it."""
STAGES_SLACK_MS: Final = 0.5
"""Rounding between a record's total and the sum of its stages."""

Invariant = Callable[[History], Iterator[str]]
_NOTHING: Final = Processing()


def _processed(history: History, call: CallEntry) -> Processing:
    return history.processed.get(call.id, _NOTHING)


# -- promises to applications ------------------------------------------------------------------------------------------
def every_call_ends(history: History) -> Iterator[str]:
    """A call gives an answer or raises; it never hangs."""
    for call in history.calls.values():
        if call.ended_s is None:
            yield f"call {call.id} ({call.kind}) of {call.device}, begun at {call.started_s:.3f} s, never ended"


def no_write_happens_twice(history: History) -> Iterator[str]:
    """A write without an idempotency key is processed once at most, over all means together."""
    for call in history.calls.values():
        done = _processed(history, call)
        if call.is_write and not call.has_key and done.executed > 1:
            yield f"call {call.id} ({call.kind}) has no key and was processed {done.executed} times"


def keys_are_never_lost(history: History) -> Iterator[str]:
    """A write with a key arrives with that key, by every means, each time."""
    for call in history.calls.values():
        done = _processed(history, call)
        if call.has_key and done.keyless:
            yield f"call {call.id} ({call.kind}) arrived {done.keyless} times without its key"


def undelivered_means_unprocessed(history: History) -> Iterator[str]:
    """Where an error says `maybe_delivered` False, nobody has processed the call."""
    for call in history.calls.values():
        done = _processed(history, call)
        if call.error and not call.maybe_delivered and done.executed:
            yield (
                f"call {call.id} ({call.kind}) raised {call.error} with maybe_delivered False ({call.message}) "
                f"and was processed {done.executed} times"
            )


def an_answer_is_the_right_one(history: History) -> Iterator[str]:
    """A call that succeeds was processed, and got its own answer, whole."""
    for call in history.calls.values():
        if call.ok and not call.intact:
            yield f"call {call.id} ({call.kind}) got a wrong or short answer"
        if call.ok and not _processed(history, call).arrivals:
            yield f"call {call.id} ({call.kind}) succeeded and nobody has processed it"


def errors_are_ours(history: History) -> Iterator[str]:
    """Applications see errors of `stormline.errors` only."""
    for call in history.calls.values():
        if call.error and not call.phase and call.error not in ("CallError", "RefusedError"):
            yield f"call {call.id} ({call.kind}) raised {call.error}: {call.message}"


def a_call_keeps_its_deadline(history: History) -> Iterator[str]:
    """A call that fails before its answer has begun does so by its deadline."""
    for call in history.calls.values():
        if call.ended_s is None or not call.error or call.phase in ("body", "decode") or call.head_s is not None:
            continue
        late = call.ended_s - call.started_s - call.deadline_s
        if late > DEADLINE_SLACK_S:
            yield f"call {call.id} ({call.kind}) ended {late:.3f} s after its deadline, with {call.error}"


def a_confirmed_push_was_seen(history: History) -> Iterator[str]:
    """When a sender is told `acked`, the application has seen the push and acknowledged it before."""
    for push in history.pushes.values():
        if push.confirmed_s is None:
            continue
        if not push.shown:
            yield f"push {push.id} to {push.device} was reported acked; the application never saw it"
        elif push.acked_s is None or push.acked_s > push.confirmed_s:
            yield (
                f"push {push.id} to {push.device} was reported acked at {push.confirmed_s:.3f} s, before the "
                f"application acknowledged it"
            )


def no_push_is_shown_twice(history: History) -> Iterator[str]:
    """An application sees each push once at most, and as it was sent."""
    for push in history.pushes.values():
        if push.shown > 1:
            yield f"push {push.id} was shown {push.shown} times to {push.device} (sender heard {push.results})"
        if push.shown and not push.intact:
            yield f"push {push.id} was shown to {push.device} with another content or topic"
    for strange in history.strange_pushes:
        yield f"push {strange} was shown and never sent"


def all_is_well_after_the_storm(history: History) -> Iterator[str]:
    """Calls begun when every fault is over, and some time has passed, succeed."""
    for call in history.calls.values():
        if call.fresh and call.ended_s is not None and not call.ok:
            yield (
                f"call {call.id} ({call.kind}) of {call.device} failed on a healthy network: "
                f"{call.error or f'status {call.status}'} {call.message}"
            )


def no_device_gives_up(history: History) -> Iterator[str]:
    """No device is refused for good: each is enrolled, and each is the only one of its name."""
    for what in history.given_up:
        yield f"device {what}"


# -- what keeps the system small and honest ----------------------------------------------------------------------------
def no_call_waits_on_a_dead_link(history: History) -> Iterator[str]:
    """When the session under a call ends, its attempt ends with it."""
    for device, entries in history.records.items():
        for entry in entries:
            for attempt in entry.record.attempts:
                if attempt.carrier != "sl-tls" or not attempt.failure or attempt.phase == "body":
                    continue
                start_s = entry.started_s + attempt.start_ms / 1000
                end_s = start_s + attempt.duration_ms / 1000
                ends = [
                    life.closed_s
                    for life in history.links
                    if life.device == device
                    and attempt.address in life.addresses
                    and life.opened_s <= end_s
                    and life.closed_s >= start_s
                ]
                if ends and max(ends) < end_s - DEAD_LINK_S:
                    yield (
                        f"call {entry.call_id} of {device}: an attempt over {attempt.address} failed at {end_s:.3f} s "
                        f"({attempt.failure}), its session had ended at {max(ends):.3f} s"
                    )


def each_call_has_one_record(history: History) -> Iterator[str]:
    """Every call that ended made exactly one record, under its own name."""
    counts: dict[str, int] = {}
    for entries in history.records.values():
        for entry in entries:
            counts[entry.call_id] = counts.get(entry.call_id, 0) + 1
    for call in history.calls.values():
        number = counts.pop(call.id, 0)
        if call.ended_s is not None and number != 1:
            yield f"call {call.id} ({call.kind}) made {number} records"
    for name in counts:
        yield f"a record names {name!r}, which no call did"


def records_add_up(history: History) -> Iterator[str]:
    """The stages of a record sum to its total; its attempts lie inside it and are bounded in number."""
    for entries in history.records.values():
        for record in (entry.record for entry in entries):
            total = sum(record.stages_ms.values())
            if abs(total - record.total_ms) > STAGES_SLACK_MS:
                yield f"record of {record.path}: stages sum to {total:.3f} ms, the total is {record.total_ms:.3f} ms"
            if len(record.attempts) > limits_platform.REPORT_ATTEMPTS_MAX:
                yield f"record of {record.path}: {len(record.attempts)} attempts"
            for attempt in record.attempts:
                if attempt.start_ms + attempt.duration_ms > record.total_ms + STAGES_SLACK_MS:
                    yield f"record of {record.path}: an attempt by {attempt.means} ends after the call"


def attempts_keep_the_deadline(history: History) -> Iterator[str]:
    """No attempt begins after its call's deadline, nor waits for an answer beyond it."""
    for entries in history.records.values():
        for entry in entries:
            record, call = entry.record, history.calls.get(entry.call_id)
            if call is None:
                continue
            deadline_ms = (call.deadline_s + DEADLINE_SLACK_S) * 1000
            for attempt in record.attempts:
                end_ms = attempt.start_ms + attempt.duration_ms
                if call.head_s is not None and entry.started_s + attempt.start_ms / 1000 >= call.head_s:
                    continue  # it goes on with a body that broke off; its head was in time
                late = end_ms > deadline_ms and attempt.failure and attempt.phase not in ("body", "decode")
                if attempt.start_ms > deadline_ms or late:
                    yield f"call {call.id}: an attempt by {attempt.means} ran to {end_ms:.0f} ms, past the deadline"


def http_attempts_stay_in_budget(history: History) -> Iterator[str]:
    """An HTTP request makes at most `limits.ATTEMPTS_MAX` attempts, each twice where its connection was stale."""
    for entries in history.records.values():
        for record in (entry.record for entry in entries):
            refused = sum(_refused(attempt) for attempt in record.attempts)
            number = len(record.attempts) - min(refused, limits.REFUSALS_MAX)
            if record.method != "CALL" and number > 2 * limits.ATTEMPTS_MAX:
                yield f"record of {record.path}: {number} attempts, at most 2 x {limits.ATTEMPTS_MAX}"


def _refused(attempt: AttemptRecord) -> bool:
    """Say whether an attempt failed on a connection that stood, with nothing processed."""
    return bool(
        attempt.failure
        and attempt.means != "long"
        and not attempt.maybe_delivered
        and not attempt.failure.startswith("timeout")
        and attempt.phase in ("queued", "send", "first_byte")
    )


def bounds_hold(history: History) -> Iterator[str]:
    """Queues, buffers and numbers of calls stay within their limits."""
    for seen in history.bounds.values():
        if seen.seen > seen.bound:
            yield f"{seen.what} reached {seen.seen:g}, its bound is {seen.bound:g}"


ALL: Final[tuple[Invariant, ...]] = (
    every_call_ends,
    no_write_happens_twice,
    keys_are_never_lost,
    undelivered_means_unprocessed,
    an_answer_is_the_right_one,
    errors_are_ours,
    a_call_keeps_its_deadline,
    a_confirmed_push_was_seen,
    no_push_is_shown_twice,
    all_is_well_after_the_storm,
    no_device_gives_up,
    no_call_waits_on_a_dead_link,
    each_call_has_one_record,
    records_add_up,
    attempts_keep_the_deadline,
    http_attempts_stay_in_budget,
    bounds_hold,
)
"""Every invariant, in the order they are reported."""


def check(history: History) -> list[str]:
    """Give every breach as `invariant name: what happened`."""
    return [f"{each.__name__}: {breach}" for each in ALL for breach in each(history)]
