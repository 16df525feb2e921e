"""When a silent link is asked for a sign of life, and how long the answer may take."""

import pytest

from stormline.core import limits, limits_heartbeat
from stormline.policy.halfopen import answer_within_s, beside_after_s, doubt_after_s, stalls

FIRST_S, SHORT_S, LONG_S = limits_heartbeat.DOUBT_FIRST_S, limits_heartbeat.ANSWER_S_MIN, limits.HEARTBEAT_ANSWER_S


@pytest.mark.parametrize(
    ("rtt_s", "after_s"), [(None, FIRST_S), (0.02, FIRST_S), (0.5, 4.0), (20.0, limits.HEARTBEAT_S)]
)
def test_link_is_asked_after_some_round_trips_and_never_at_once(rtt_s, after_s):
    assert doubt_after_s(rtt_s) == after_s


def test_link_that_answers_is_asked_ever_more_rarely():
    pauses = [doubt_after_s(0.02, asked) for asked in range(8)]
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert doubt_after_s(0.02, 10**6) == limits.HEARTBEAT_S


@pytest.mark.parametrize(
    ("rtt_s", "unacked_bytes", "ack_age_s", "within_s"),
    [
        (0.02, 100, 5.0, SHORT_S),  # the peer's kernel is silent too
        (0.5, 100, 5.0, 6.0),
        (3.0, 100, 60.0, LONG_S),
        (0.02, 0, 60.0, LONG_S),  # all arrived: it is busy at most
        (0.02, 10**6, 0.3, LONG_S),  # a body is still going up
        (0.02, 100, None, LONG_S),
        (0.02, None, 5.0, LONG_S),
        (None, 100, 5.0, LONG_S),
    ],
)
def test_short_wait_only_where_nothing_of_the_peer_is_heard(rtt_s, unacked_bytes, ack_age_s, within_s):
    assert answer_within_s(rtt_s, unacked_bytes, ack_age_s) == within_s


@pytest.mark.parametrize(("rtt_s", "after_s"), [(None, 1.0), (0.02, 1.0), (0.5, 2.0)])
def test_another_way_is_tried_when_the_question_had_time_to_be_answered(rtt_s, after_s):
    assert beside_after_s(rtt_s) == after_s


@pytest.mark.parametrize(
    ("unacked_bytes", "ack_age_s", "stands_still"),
    [
        (0, 60.0, True),  # all arrived, and nothing comes: somebody between holds it
        (100, 5.0, True),  # nothing arrives
        (10**6, 0.3, False),  # a body is still going up
        (None, 0.3, True),
        (100, None, True),
    ],
)
def test_link_whose_bytes_are_still_taken_does_not_stall(unacked_bytes, ack_age_s, stands_still):
    assert stalls(unacked_bytes, ack_age_s) is stands_still
