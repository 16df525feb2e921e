"""What must hold beside `invariants` where clients ask origins themselves: of attempts, retries and leftovers."""

import bisect
from collections.abc import Iterator
from typing import Final

from stormline.core import limits
from stormline.policy.admission import BACKGROUND
from stormline.testing.history import Attempt, CallEntry, History, RetryAsk, Wait
from stormline.testing.invariants import DEADLINE_SLACK_S, Invariant

CANCEL_SLACK_S: Final = 0.001
"""How long after it was cancelled a call may end: turns of the loop, and no wait for anything."""
TIMES_SLACK_S: Final = 1e-6
DARK_WINDOW_S: Final = 10.0
"""Spans of a dark link in which connections are counted."""
KNOCKS_PER_CALL: Final = limits.ATTEMPTS_MAX + 2 * DARK_WINDOW_S / limits.DIAL_REPEAT_S
"""Connections to one address that one call may cause in such a span: at the start of each attempt, and then at a pace
that is never quicker than `limits.DIAL_REPEAT_S`; twice that, for addresses whose rounds begin anew."""


def heads_keep_the_deadline(history: History) -> Iterator[str]:
    """An answer's head comes by the call's deadline or not at all."""
    for call in history.calls.values():
        if call.head_s is not None and call.head_s - call.started_s > call.deadline_s + DEADLINE_SLACK_S:
            late = call.head_s - call.started_s - call.deadline_s
            yield f"call {call.id} ({call.kind}) was answered {late:.3f} s after its deadline"


def a_cancelled_call_ends_at_once(history: History) -> Iterator[str]:
    """Whoever cancels waits for nothing."""
    for call in history.calls.values():
        if call.cancelled_s is None or call.ended_s is None:
            continue
        took = call.ended_s - call.cancelled_s
        if took > CANCEL_SLACK_S:
            yield f"call {call.id} ({call.kind}) ended {took:.3f} s after it was cancelled"


def an_answered_write_was_done_once(history: History) -> Iterator[str]:
    """A write whose caller got its answer was processed exactly once."""
    for call in history.calls.values():
        done = history.processed.get(call.id)
        if call.ok and call.is_write and done is not None and done.executed != 1:
            yield f"call {call.id} ({call.kind}) was answered and processed {done.executed} times"


def what_may_not_be_resent_arrives_once(history: History) -> Iterator[str]:
    """A call with retries switched off arrives once at most, reads too."""
    for call in history.calls.values():
        done = history.processed.get(call.id)
        if call.kind == "once" and done is not None and done.arrivals + done.refusals > 1:
            # A server that is broken counts the same request as arrived and as refused.
            arrived = max(done.arrivals, done.refusals)
            if arrived > 1:
                yield f"call {call.id} ({call.kind}) arrived {arrived} times"


def attempts_stay_within_their_number(history: History) -> Iterator[str]:
    """A call makes at most `ATTEMPTS_MAX` attempts, and as many more as servers refused unprocessed."""
    counts: dict[str, int] = {}
    for attempt in history.direct.attempts:
        counts[attempt.call_id] = counts.get(attempt.call_id, 0) + 1
    for call_id, number in counts.items():
        if number > limits.ATTEMPTS_MAX + limits.REFUSALS_MAX:
            yield f"call {call_id} made {number} attempts"


def lanes_stay_within_their_number(history: History) -> Iterator[str]:
    """At most `LANES_MAX` attempts of a call run side by side."""
    for call_id, number in history.direct.lanes.items():
        if number > limits.LANES_MAX:
            yield f"call {call_id} had {number} attempts side by side, at most {limits.LANES_MAX}"


def no_attempt_outlives_its_call(history: History) -> Iterator[str]:
    """When a call has its answer or has failed, nothing of it goes on."""
    for attempt in history.direct.attempts:
        call = history.calls.get(attempt.call_id)
        if call is None or call.ended_s is None:
            continue
        if attempt.ended_s is None or attempt.ended_s > call.ended_s + CANCEL_SLACK_S:
            yield f"call {call.id} ({call.kind}) ended, and an attempt begun at {attempt.began_s:.3f} s went on"
        if attempt.began_s > call.ended_s + TIMES_SLACK_S:
            yield f"call {call.id} ({call.kind}) ended, and another attempt was begun at {attempt.began_s:.3f} s"


def retries_stay_in_budget(history: History) -> Iterator[str]:
    """Over any span, a host gets at most `RETRY_BURST` + a tenth of its requests + one retry a second."""
    by_host: dict[tuple[str, str], list[RetryAsk]] = {}
    for ask in history.direct.asks:
        by_host.setdefault((ask.device, ask.host), []).append(ask)
    for (device, host), asks in by_host.items():
        # The most that was ever above the allowance: a bucket of `RETRY_BURST` that fills as the budget promises.
        level = float(limits.RETRY_BURST)
        last_s = asks[0].at_s
        for ask in asks:
            level = min(limits.RETRY_BURST, level + (ask.at_s - last_s) * limits.RETRY_FLOOR_PER_S)
            last_s = ask.at_s
            if ask.first:
                level = min(limits.RETRY_BURST, level + limits.RETRY_SHARE)
            level -= ask.cost
            if level < -TIMES_SLACK_S:
                yield f"{device} had {-level:.2f} retries too many for {host} at {ask.at_s:.3f} s"
                break


def retries_ask_the_budget(history: History) -> Iterator[str]:
    """An attempt after one that brought an answer was granted by the budget."""
    granted: dict[str, int] = {}
    for ask in history.direct.asks:
        granted[ask.device] = granted.get(ask.device, 0) + (ask.cost > 0.0)
    spare: dict[str, int] = {}  # attempts of a call less the first and those that brought no answer
    for attempt in history.direct.attempts:
        spare[attempt.call_id] = spare.get(attempt.call_id, -1) + (not attempt.error)
    again: dict[str, int] = {}
    for call_id, number in spare.items():
        device = call_id.partition("-")[0]
        again[device] = again.get(device, 0) + max(0, number)
    for device, number in again.items():
        if number > granted.get(device, 0):
            yield f"{device} asked again after {number} answers, its budget granted {granted.get(device, 0)}"


def retry_after_is_heeded(history: History) -> Iterator[str]:
    """Who was told to come back later comes back later, or not at all."""
    told: dict[str, Attempt] = {}
    for attempt in history.direct.attempts:
        before = told.get(attempt.call_id)
        if before is not None and before.ended_s is not None and attempt.began_s >= before.ended_s:
            early = before.ended_s + (before.retry_after_s or 0.0) - attempt.began_s
            if early > TIMES_SLACK_S:
                yield f"call {attempt.call_id} was sent again {early:.3f} s before the time its server asked for"
        if attempt.retry_after_s is not None:
            told[attempt.call_id] = attempt


def every_attempt_has_its_line(history: History) -> Iterator[str]:
    """A call's story has one line for each attempt, and says how it ended."""
    counts: dict[str, int] = {}
    for attempt in history.direct.attempts:
        counts[attempt.call_id] = counts.get(attempt.call_id, 0) + 1
    for call_id, story in history.direct.stories.items():
        if len(story) >= limits.STORY_LINES_MAX:
            continue
        told = sum(line.removeprefix("beside: ").startswith("try ") for line in story)
        if told != counts.get(call_id, 0):
            yield f"call {call_id} tells of {told} attempts and made {counts.get(call_id, 0)}"


def a_dark_path_is_knocked_at_evenly(history: History) -> Iterator[str]:
    """While a link is dark an address is not flooded with new connections."""
    by_place: dict[tuple[str, str], list[float]] = {}
    for device, address, at_s in history.direct.connects:
        by_place.setdefault((device, address), []).append(at_s)
    for device, from_s, to_s in history.direct.dark:
        calls = [call for call in history.calls.values() if call.device == device]
        start_s = from_s
        while start_s < to_s:
            end_s = min(to_s, start_s + DARK_WINDOW_S)
            alive = sum(_alive(call, start_s, end_s) for call in calls)
            for (owner, address), times in by_place.items():
                number = bisect.bisect(times, end_s) - bisect.bisect_left(times, start_s)
                if owner == device and number > KNOCKS_PER_CALL * max(1, alive):
                    yield f"{device} began {number} connections to {address} in {end_s - start_s:.1f} dark seconds"
            start_s = end_s


def _alive(call: CallEntry, from_s: float, to_s: float) -> bool:
    return call.started_s <= to_s and (call.ended_s is None or call.ended_s >= from_s)


def who_waits_goes_in_turn(history: History) -> Iterator[str]:
    """Of two calls that wait before a host the one goes first whose turn it is: by age, and `ADMISSION_AGE_S` a step.

    Background work may be held back longer, as it leaves room to others.
    """
    waits: dict[tuple[str, str], list[Wait]] = {}
    for wait in history.direct.waits:
        waits.setdefault((wait.device, wait.host), []).append(wait)
    for (device, host), those in waits.items():
        for number, wait in enumerate(those):
            for later in those[number + 1 :]:
                waited_too = later.queued_s <= wait.granted_s - TIMES_SLACK_S
                if waited_too and later.urgency < BACKGROUND and _turn(later) < _turn(wait) - TIMES_SLACK_S:
                    yield f"{device}: {later.call_id} waited for {host} and {wait.call_id} went before its turn"


def _turn(wait: Wait) -> float:
    return wait.came_s + limits.ADMISSION_AGE_S * wait.urgency


def nothing_is_left(history: History) -> Iterator[str]:
    """A client at rest holds no connection and no call; a closed one no socket and no timer."""
    yield from history.direct.left


ALL: Final[tuple[Invariant, ...]] = (
    heads_keep_the_deadline,
    a_cancelled_call_ends_at_once,
    an_answered_write_was_done_once,
    what_may_not_be_resent_arrives_once,
    attempts_stay_within_their_number,
    lanes_stay_within_their_number,
    no_attempt_outlives_its_call,
    retries_stay_in_budget,
    retries_ask_the_budget,
    retry_after_is_heeded,
    every_attempt_has_its_line,
    a_dark_path_is_knocked_at_evenly,
    who_waits_goes_in_turn,
    nothing_is_left,
)
"""Every one, in the order they are reported."""


def check(history: History) -> list[str]:
    """Give every breach as `invariant name: what happened`."""
    return [f"{each.__name__}: {breach}" for each in ALL for breach in each(history)]
