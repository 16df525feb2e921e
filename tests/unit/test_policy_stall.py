"""What a silent connection calls for."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits
from stormline.policy.quality import State
from stormline.policy.stall import Action, Link, Silence, has_room, overdue, plan

QUICK = Link(bytes_per_s=500_000.0, rtt_s=0.06, state=State.EXCELLENT)
SLOW = Link(bytes_per_s=8_000.0, rtt_s=0.8)
LOST_TWICE = {"unacked_bytes": 1400, "backoffs": 2, "rto_s": 1.0}


def silence(waited_s, **more):
    return Silence(**{"waited_s": waited_s, "limit_s": 10.0, **more})


class TestRoom:
    @pytest.mark.parametrize(
        ("link", "room"),
        [
            (QUICK, True),
            (SLOW, False),
            (Link(), False),
            (Link(rtt_s=0.05), True),
            (Link(rtt_s=0.6), False),
            (Link(rtt_s=0.05, state=State.BAD), False),
            (Link(bytes_per_s=500_000.0, state=State.BAD), True),
            (Link(bytes_per_s=100_000.0, queued_bytes=200_000), False),
            (Link(bytes_per_s=100_000.0, queued_bytes=50_000), True),
            (Link(bytes_per_s=math.nan, rtt_s=math.nan), False),
        ],
    )
    def test_second_connection_finds_room_on_a_quick_link_with_little_under_way(self, link, room):
        assert has_room(link) is room


class TestSilence:
    def test_two_back_offs_start_a_fresh_connection_before_the_timer(self):
        decision = plan(silence(1.4, **LOST_TWICE), QUICK)
        assert decision.action is Action.FRESH
        assert "unacknowledged" in decision.why

    @pytest.mark.parametrize("seen", [{"backoffs": 1}, {"unacked_bytes": 0}])
    def test_one_back_off_or_nothing_unacknowledged_does_not(self, seen):
        assert plan(silence(1.0, **{**LOST_TWICE, **seen}), QUICK).action is Action.WAIT

    def test_after_one_back_off_the_next_is_waited_for_and_no_longer(self):
        assert plan(silence(0.5, unacked_bytes=1400, backoffs=1, rto_s=0.52), QUICK).look_again_s == pytest.approx(0.26)
        assert plan(silence(0.5, unacked_bytes=1400, backoffs=0, rto_s=0.26), QUICK).look_again_s > 1.0

    def test_on_a_slow_link_eagerness_costs_answers_so_it_waits(self):
        decision = plan(silence(5.0, **LOST_TWICE), SLOW)
        assert decision.action is Action.WAIT
        assert "no room" in decision.why

    def test_what_must_not_be_sent_again_gets_no_fresh_connection(self):
        assert plan(silence(1.4, may_fresh=False, **LOST_TWICE), QUICK).action is Action.WAIT

    def test_path_that_is_dark_is_probed_at_an_even_pace(self):
        dark = {**LOST_TWICE, "fresh_age_s": 0.3}
        first = plan(silence(1.7, **dark), QUICK)
        assert first.action is Action.WAIT
        assert first.look_again_s == pytest.approx(limits.STALL_PROBE_S - 0.3)
        assert plan(silence(2.5, **{**dark, "fresh_age_s": 1.1}), QUICK).action is Action.PROBE
        assert plan(silence(3.0, **{**dark, "fresh_age_s": 1.6, "probe_age_s": 0.5}), QUICK).action is Action.WAIT
        assert plan(silence(3.6, **{**dark, "fresh_age_s": 2.2, "probe_age_s": 1.1}), QUICK).action is Action.PROBE

    def test_time_out_gives_up(self):
        assert plan(silence(10.0), QUICK).action is Action.GIVE_UP
        busy = Link(bytes_per_s=500_000.0, rtt_s=0.06, queued_bytes=40_000)
        assert plan(silence(10.0, network_age_s=0.1), busy).action is Action.GIVE_UP

    def test_slow_link_that_brings_what_was_before_is_not_given_up(self):
        busy = Link(bytes_per_s=8_000.0, rtt_s=0.8, queued_bytes=40_000)
        assert plan(silence(10.0, network_age_s=0.4, heard_age_s=0.4), busy).action is Action.WAIT
        assert plan(silence(10.0, network_age_s=0.4, heard_age_s=0.4), SLOW).action is Action.GIVE_UP

    def test_slow_link_that_is_dark_is_knocked_at_and_not_given_up(self):
        decision = plan(silence(10.0, network_age_s=5.0, heard_age_s=5.0), SLOW)
        assert (decision.action, decision.look_again_s) == (Action.KNOCK, limits.STALL_PROBE_SLOW_S)
        assert plan(silence(10.0, network_age_s=5.0, heard_age_s=5.0), QUICK).action is Action.GIVE_UP

    def test_connection_that_is_silent_while_a_slow_link_brings_other_data_is_given_up(self):
        busy = Link(bytes_per_s=8_000.0, rtt_s=0.8, queued_bytes=40_000)
        assert plan(silence(10.0, network_age_s=0.4, heard_age_s=8.0, **LOST_TWICE), busy).action is Action.GIVE_UP
        acknowledged = {**LOST_TWICE, "unacked_bytes": 0}
        assert plan(silence(10.0, network_age_s=0.4, heard_age_s=8.0, **acknowledged), busy).action is Action.WAIT


class TestWithoutTcpInfo:
    def test_ping_asks_first_and_its_silence_starts_a_fresh_connection(self):
        assert plan(silence(0.5, can_probe=True), QUICK).action is Action.WAIT
        assert plan(silence(2.5, can_probe=True), QUICK).action is Action.PROBE
        assert plan(silence(2.7, can_probe=True, probe_age_s=0.2), QUICK).action is Action.WAIT
        assert plan(silence(3.6, can_probe=True, probe_age_s=1.1), QUICK).action is Action.FRESH

    def test_kernels_doublings_do_not_make_a_probe_wait_longer(self):
        doubled = silence(2.0, unacked_bytes=0, backoffs=2, rto_s=1.0, can_probe=True, probe_age_s=0.8)
        assert plan(doubled, QUICK).action is Action.FRESH

    def test_answered_ping_means_that_the_server_is_slow_not_the_path(self):
        assert plan(silence(5.0, can_probe=True, heard_age_s=0.1), QUICK).action is Action.WAIT
        assert plan(silence(10.0, can_probe=True, heard_age_s=0.1), QUICK).action is Action.GIVE_UP

    def test_only_elapsed_time_is_enough_to_try_beside_it(self):
        assert plan(silence(1.0), QUICK).action is Action.WAIT
        assert plan(silence(2.5), QUICK).action is Action.FRESH
        assert plan(silence(2.5, server_cost_s=2.0), QUICK).action is Action.WAIT

    def test_acknowledged_request_waits_for_its_server(self):
        assert plan(silence(5.0, unacked_bytes=0, backoffs=0, rto_s=0.25), QUICK).action is Action.WAIT

    def test_one_back_off_is_enough_once_its_retransmission_has_had_its_round_trip(self):
        lost = {"unacked_bytes": 100, "backoffs": 1, "rto_s": 0.52, "rtt_s": 0.06}
        assert plan(silence(0.45, **lost), QUICK).action is Action.WAIT
        assert plan(silence(0.48, **lost), QUICK).action is Action.FRESH

    def test_packet_that_is_not_acknowledged_in_time_is_looked_at_again_soon(self):
        owed = {"unacked_bytes": 100, "backoffs": 0, "rto_s": 0.26, "rtt_s": 0.06}
        assert plan(silence(0.1, **owed), QUICK).look_again_s > 1.0
        assert plan(silence(0.25, **owed), QUICK).look_again_s < 0.27


ACKNOWLEDGED = {"unacked_bytes": 0, "backoffs": 0, "rto_s": 0.26, "rtt_s": 0.06, "unproven": True}


class TestProof:
    def test_connection_that_never_answered_is_asked_beside_soon(self):
        due = plan(silence(0.25, **ACKNOWLEDGED), QUICK)
        assert (due.action, due.look_again_s) == (Action.WAIT, pytest.approx(limits.STALL_PROVE_S - 0.25))
        assert plan(silence(limits.STALL_PROVE_S, **ACKNOWLEDGED), QUICK).action is Action.PROVE

    @pytest.mark.parametrize(
        "change",
        [
            {"unproven": False},
            {"may_fresh": False},
            {"fresh_age_s": 0.1},
            {"learned_cost_s": 1.0},
            {"server_cost_s": 1.0},
            {"rtt_s": 0.3},
        ],
    )
    def test_it_is_not_where_it_answered_before_or_may_still_be_at_it(self, change):
        assert plan(silence(1.0, **{**ACKNOWLEDGED, **change}), QUICK).action is not Action.PROVE

    def test_slow_link_gets_no_second_connection_for_it(self):
        assert plan(silence(5.0, **ACKNOWLEDGED), SLOW).action is Action.WAIT

    def test_it_is_not_asked_for_twice(self):
        again = plan(silence(1.0, **ACKNOWLEDGED, fresh_age_s=0.5), QUICK)
        assert again.action is not Action.PROVE


OWED = {"unacked_bytes": 100, "backoffs": 0, "rto_s": 0.26, "rtt_s": 0.06}


class TestOverdue:
    @pytest.mark.parametrize(
        ("waited_s", "change", "late"),
        [
            (0.3, {}, True),
            (0.3, {"rto_s": 0.5}, False),  # round trips waver
            (0.3, {"rto_s": 0.52, "backoffs": 1}, True),
            (0.12, {}, False),  # a tail loss probe may still be on its way
            (5.0, {"unacked_bytes": 0}, False),  # the server is at it
            (0.3, {"heard_age_s": 0.05}, False),
            (0.3, {"rtt_s": 0.2}, False),
            (5.0, {"rtt_s": None}, False),
            (1.0, {"unacked_bytes": None}, False),  # nobody tells: three losses' time has to pass
            (2.5, {"unacked_bytes": None}, True),
        ],
    )
    def test_acknowledgement_that_does_not_come_sends_the_next_request_elsewhere(self, waited_s, change, late):
        assert overdue(silence(waited_s, **{**OWED, **change}), QUICK) is late

    def test_slow_link_keeps_its_one_connection(self):
        assert not overdue(silence(5.0, **OWED), SLOW)


class TestIdle:
    def test_idle_stream_never_fails_by_silence(self):
        for waited in (1.0, 100.0, 3000.0):
            decision = plan(silence(waited, limit_s=5.0, expecting=False), QUICK)
            assert decision.action is Action.WAIT

    def test_long_idle_stream_is_asked_for_a_sign_of_life(self):
        asked = plan(silence(limits.STALL_LIVENESS_S - 10.0, expecting=False, can_probe=True), QUICK)
        assert (asked.action, asked.look_again_s) == (Action.WAIT, 10.0)
        assert plan(silence(limits.STALL_LIVENESS_S, expecting=False, can_probe=True), QUICK).action is Action.PROBE

    def test_probe_of_an_idle_stream_that_is_not_answered_starts_a_fresh_connection(self):
        unheard = silence(70.0, expecting=False, can_probe=True, probe_age_s=5.0)
        assert plan(unheard, QUICK).action is Action.FRESH

    @pytest.mark.parametrize("link", [QUICK, SLOW])
    def test_connection_under_it_that_stays_mute_is_given_up(self, link):
        for probe, fresh in ((20.0, None), (0.5, 20.0)):
            mute = silence(100.0, expecting=False, can_probe=True, probe_age_s=probe, fresh_age_s=fresh)
            assert plan(mute, link).action is Action.GIVE_UP


def blackout(dark_s, link=QUICK, deadline_s=10.0, rto_s=0.26):
    """Play a request sent at the start of a blackout; give when an answer comes and how many packets it cost."""
    now, fresh_at, probe_at, packets, backoffs, resend = 0.0, None, None, 1, 0, rto_s
    while now < deadline_s:
        if now >= resend:
            backoffs += 1
            if now >= dark_s:
                return now + 0.06, packets
            resend = now + rto_s * 2**backoffs
        state = silence(
            now,
            limit_s=deadline_s,
            unacked_bytes=600,
            backoffs=backoffs,
            rto_s=rto_s * 2**backoffs,
            fresh_age_s=None if fresh_at is None else now - fresh_at,
            probe_age_s=None if probe_at is None else now - probe_at,
        )
        decision = plan(state, link)
        if decision.action in (Action.FRESH, Action.PROBE):
            packets += 1
            fresh_at = now if decision.action is Action.FRESH else fresh_at
            probe_at = now if decision.action is Action.PROBE else probe_at
            if now >= dark_s:
                return now + 4 * 0.06, packets
        now += min(decision.look_again_s, 0.05)
    return math.inf, packets


class TestBlackout:
    @pytest.mark.parametrize("dark_s", [1.0, 3.0, 5.0, 8.0])
    def test_answer_comes_soon_after_its_end_for_few_packets(self, dark_s):
        answered, packets = blackout(dark_s)
        assert answered - dark_s <= limits.STALL_PROBE_S + 0.35
        assert packets <= 3 + dark_s

    def test_slow_link_gets_no_second_connection(self):
        _, packets = blackout(8.0, link=SLOW)
        assert packets == 1


wild = st.none() | st.floats() | st.integers() | st.text(max_size=2) | st.booleans()


@given(
    st.fixed_dictionaries(
        {
            name: wild
            for name in Silence.__dataclass_fields__
            if name not in ("expecting", "can_probe", "may_fresh", "limit_s")
        }
    ),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.floats(),
    st.builds(Link, bytes_per_s=wild, rtt_s=wild, queued_bytes=st.integers(), state=st.sampled_from(State)),
)
def test_wild_numbers_raise_nothing_and_the_next_look_is_bounded(numbers, expecting, ping, fresh, limit_s, link):
    state = Silence(**numbers, expecting=expecting, can_probe=ping, may_fresh=fresh, limit_s=limit_s)
    decision = plan(state, link)
    assert 0.0 < decision.look_again_s <= limits.STALL_LIVENESS_S
    assert decision.why
    if decision.action is Action.FRESH:
        assert fresh
        assert has_room(link)
    if decision.action is Action.GIVE_UP and not expecting:
        ages = (age for age in (state.probe_age_s, state.fresh_age_s) if isinstance(age, int | float))
        assert any(age >= limits.HEARTBEAT_ANSWER_S for age in ages)


@given(
    st.floats(0, 100), st.floats(0.01, 100), st.integers(0, 5), st.integers(0, 5000), st.floats(0.2, 60), st.booleans()
)
def test_fresh_is_never_asked_for_twice(waited, limit_s, backoffs, unacked, rto, ping):
    state = silence(
        waited, limit_s=limit_s, backoffs=backoffs, unacked_bytes=unacked, rto_s=rto, can_probe=ping, fresh_age_s=1.0
    )
    assert plan(state, QUICK).action is not Action.FRESH
