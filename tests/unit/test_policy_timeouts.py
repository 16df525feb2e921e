"""Time-outs of one attempt: the cold start is Mars's, then what is measured counts; each pattern has its own rules."""

import math
import tracemalloc

import pytest

from stormline.core import limits
from stormline.policy.addresses import AddressBook, AddressOutcome, Candidate
from stormline.policy.addresses import Verdict as AddressVerdict
from stormline.policy.budget import RetryBudget
from stormline.policy.quality import State
from stormline.policy.shape import Network, Pattern, Queue, RequestShape, path_class
from stormline.policy.timeouts import Outcome, TimeoutPolicy

WIFI = Network("home", "wifi")
CELL = Network("carrier", "cell")
UNKNOWN = Network("somewhere")
FOREVER = math.inf


def shape(**changes):
    return RequestShape(**{"host": "a.test", "path_class": "GET /", "request_bytes": 600, **changes})


def answered(network=WIFI, **changes):
    usual = {
        "host": "a.test",
        "path_class": "GET /",
        "answered": True,
        "first_byte_s": 0.04,
        "body_s": 0.001,
        "total_s": 0.041,
        "request_bytes": 600,
        "answer_bytes": 1024,
    }
    return Outcome(network=network, **{**usual, **changes})


def warmed(network=WIFI, rtt_s=0.02, server_s=0.02, answers=40, policy=None, start=0.0):
    """A policy that has seen some good answers, one of them larger."""
    policy = policy or TimeoutPolicy()
    for number in range(answers):
        now = start + number
        policy.observe_rtt(network, "a.test", rtt_s, now)
        policy.observe(
            answered(
                network,
                first_byte_s=rtt_s + server_s,
                total_s=rtt_s + server_s + 0.01,
                answer_bytes=4096 if number % 5 == 0 else 1024,
            ),
            now,
        )
    return policy


class TestColdStart:
    """Golden vectors of Mars's formula (`first package` without server cost), as far as its caps do not bite."""

    @pytest.mark.parametrize(
        ("network", "size", "ahead", "first"),
        [
            (WIFI, 144, 0, 12.0117),
            (WIFI, 4096, 5, 19.8333),
            (WIFI, 65536, 0, 17.3333),
            (CELL, 144, 0, 15.0352),
            (CELL, 4096, 5, 31.0),
            (UNKNOWN, 4096, 5, 31.0),
        ],
    )
    def test_first_packet_is_as_mars_has_it(self, network, size, ahead, first):
        plan = TimeoutPolicy().plan(shape(request_bytes=size), network, 0.0, queue=Queue(ahead))
        assert plan.first_packet_s == pytest.approx(first, abs=0.001)

    def test_larger_request_than_mars_caps_at_still_has_its_time(self):
        plan = TimeoutPolicy().plan(shape(request_bytes=200_000), WIFI, 0.0, queue=Queue(9))
        assert plan.first_packet_s == pytest.approx(12.0 + 200_000 / 12288 + 5 * 1.5)

    @pytest.mark.parametrize(("network", "first"), [(WIFI, 14.5), (CELL, 25.0)])
    def test_excellent_shortens_it_and_needs_no_server_cost_of_zero(self, network, first):
        policy = TimeoutPolicy()
        for now in range(12):
            policy.observe(answered(network, first_byte_s=None, answer_bytes=5000), now)
        assert policy.state(network, 12.0) is State.EXCELLENT
        plan = policy.plan(shape(request_bytes=0), network, 12.0, queue=Queue(5))
        assert plan.first_packet_s == pytest.approx(first)
        costly = policy.plan(shape(request_bytes=0, server_cost_s=3.0), network, 12.0, queue=Queue(5))
        assert costly.first_packet_s == pytest.approx(first + 3.0)

    @pytest.mark.parametrize(("network", "gap"), [(WIFI, 8.0), (CELL, 12.0)])
    def test_packet_gap_is_as_mars_has_it(self, network, gap):
        assert TimeoutPolicy().plan(shape(), network, 0.0).packet_gap_s == gap

    def test_read_write_reckons_with_128_kb_where_the_answer_is_unknown(self):
        policy = TimeoutPolicy()
        unknown, known = (policy.plan(shape(answer_bytes=size), WIFI, 0.0) for size in (None, 128 * 1024))
        assert unknown == known
        assert unknown.read_write_s > policy.plan(shape(answer_bytes=1024), WIFI, 0.0).read_write_s + 10.0

    @pytest.mark.parametrize(("attempts", "cost", "seconds"), [(2, None, 40.0), (1, 10.0, 30.0), (1000, None, 3600.0)])
    def test_task_without_a_deadline_is_as_mars_has_it(self, attempts, cost, seconds):
        assert TimeoutPolicy().task_s(shape(server_cost_s=cost), attempts) == seconds


class TestMeasured:
    def test_dead_path_is_found_within_seconds_after_warm_up(self):
        for network, rtt_s, most in ((WIFI, 0.02, 1.5), (CELL, 0.06, 2.5), (UNKNOWN, 0.06, 2.5)):
            policy = warmed(network, rtt_s)
            assert policy.state(network, 40.0) is State.EXCELLENT
            plan = policy.plan(shape(), network, 40.0, deadline=50.0, attempts=4)
            assert plan.first_packet_s <= most

    def test_one_connect_is_enough_to_leave_the_cold_start(self):
        policy = TimeoutPolicy()
        policy.observe_rtt(WIFI, "a.test", 0.03, 0.0)
        assert policy.plan(shape(), WIFI, 0.0).first_packet_s < 3.0

    def test_first_packet_is_never_below_twice_the_slowest_round_trips_and_what_is_ahead(self):
        policy = warmed(CELL, 0.6)
        policy.observe_rate(CELL, 40.0, up_bytes_per_s=7500, down_bytes_per_s=12500)
        queue = Queue(2, 0, 64 * 1024)
        plan = policy.plan(shape(), CELL, 40.0, queue=queue)
        assert plan.first_packet_s >= 2 * 0.6 + 64 * 1024 / 12500 + 600 / 7500

    def test_server_cost_is_learned_per_class(self):
        policy = warmed()
        for now in range(40, 80):
            policy.observe(answered(path_class="POST /report", first_byte_s=4.02, total_s=4.03), now)
        slow, quick = (policy.plan(shape(path_class=name), WIFI, 80.0) for name in ("POST /report", "GET /"))
        assert slow.first_packet_s >= quick.first_packet_s + 3.5
        assert policy.state(WIFI, 80.0) is State.EXCELLENT, "a slow server is no slow network"

    def test_server_timing_says_it_exactly_and_configuration_overrules(self):
        policy = TimeoutPolicy()
        for now in range(20):
            policy.observe(answered(first_byte_s=2.03, total_s=2.04, server_s=2.0), now)
        assert policy.rtt_s(WIFI, "a.test", 0.9) < 0.05
        learned = policy.plan(shape(), WIFI, 20.0).first_packet_s
        assert 3.0 < learned < 6.0
        told = policy.plan(shape(server_cost_s=9.0), WIFI, 20.0).first_packet_s
        assert told > learned + 6.0

    def test_answer_size_is_learned_at_once_upwards_and_slowly_downwards(self):
        policy = TimeoutPolicy()
        assert policy.answer_bytes(shape()) == 128 * 1024
        policy.observe(answered(answer_bytes=1000), 0.0)
        assert policy.answer_bytes(shape()) == 1000
        policy.observe(answered(answer_bytes=50_000), 1.0)
        assert policy.answer_bytes(shape()) == 50_000
        policy.observe(answered(answer_bytes=1000), 2.0)
        assert 40_000 < policy.answer_bytes(shape()) < 50_000

    def test_rate_of_large_answers_counts_and_of_small_ones_does_not(self):
        policy = TimeoutPolicy()
        policy.observe(answered(answer_bytes=1000, body_s=1.0), 0.0)
        assert policy.bytes_per_s(WIFI, 0.0) == (None, None)
        policy.observe(answered(answer_bytes=100_000, body_s=1.0), 1.0)
        assert policy.bytes_per_s(WIFI, 1.0)[1] == pytest.approx(100_000, rel=0.1)

    def test_networks_are_apart(self):
        policy = warmed(WIFI)
        assert policy.plan(shape(), CELL, 40.0).first_packet_s >= 15.0

    def test_other_host_starts_with_what_the_network_has_shown(self):
        policy = warmed(WIFI)
        assert policy.plan(shape(host="new.test"), WIFI, 40.0).first_packet_s < 3.0

    def test_bad_network_is_given_more_time(self):
        policy = warmed(CELL, 0.1)
        before = policy.plan(shape(), CELL, 40.0).first_packet_s
        for now in range(40, 50):
            policy.observe(answered(CELL, answered=False), now)
        assert policy.state(CELL, 50.0) is State.BAD
        assert policy.plan(shape(), CELL, 50.0).first_packet_s == pytest.approx(2 * before, rel=0.3)

    def test_bad_moment_is_forgotten_after_a_hundred_good_answers(self):
        policy = warmed(CELL, 0.06)
        for now in range(40, 60):
            policy.observe(answered(CELL, first_byte_s=6.0, total_s=6.1), now)
        slow = policy.plan(shape(), CELL, 60.0).first_packet_s
        assert slow > 12.0
        warmed(CELL, 0.06, policy=policy, start=60.0, answers=100)
        assert policy.plan(shape(), CELL, 160.0).first_packet_s < 3.0

    def test_where_another_waits_for_long_this_one_may_wait_twice_as_long(self):
        policy = warmed()
        usual, piled = (policy.plan(shape(), WIFI, 40.0, queue=Queue(1, 0, 0, waited)) for waited in (0.0, 4.0))
        assert usual.first_packet_s < 3.0
        assert 8.0 <= piled.first_packet_s < 9.0

    def test_waiting_behind_others_teaches_no_server_cost(self):
        policy = TimeoutPolicy()
        policy.observe_rtt(WIFI, "a.test", 0.02, 0.0)
        for now in range(20):
            policy.observe(answered(first_byte_s=3.0, total_s=3.1, queued=True), now)
        other = Network("elsewhere", "wifi")
        policy.observe_rtt(other, "a.test", 0.02, 20.0)
        assert policy.plan(shape(), other, 20.0).first_packet_s < 3.0

    def test_network_slower_than_every_time_out_is_learned_from_them(self):
        policy, now, slow_s = warmed(CELL, 0.06), 40.0, 6.0
        for _ in range(3):
            deadline, attempt = now + 10.0, 0
            while attempt < 4:
                attempt += 1
                plan = policy.plan(shape(), CELL, now, deadline=deadline, attempt=attempt, attempts=4)
                if plan is None or plan.first_packet_s >= slow_s:
                    break
                now += plan.first_packet_s
                policy.observe(answered(CELL, answered=False, first_byte_s=plan.first_packet_s), now)
            now = deadline
        first = policy.plan(shape(), CELL, now, deadline=now + 10.0, attempts=4)
        assert first.first_packet_s >= slow_s

    def test_mute_host_makes_no_network_look_slow_where_others_answer(self):
        policy = warmed()
        before = policy.plan(shape(), WIFI, 40.0).first_packet_s
        for number in range(20):
            policy.observe(answered(), 40.5 + number)
            policy.observe(answered(host="mute.test", answered=False, first_byte_s=1.2), 41.0 + number)
        assert policy.plan(shape(), WIFI, 60.0).first_packet_s <= 1.5 * before
        assert policy.plan(shape(host="mute.test"), WIFI, 60.0).first_packet_s <= 1.5 * before

    def test_basis_tells_how_it_was_reckoned(self):
        assert "cold start" in TimeoutPolicy().plan(shape(), WIFI, 0.0).basis
        assert "excellent, rtt" in warmed().plan(shape(), WIFI, 40.0).basis


class TestDeadline:
    def test_attempts_share_it_the_first_short_and_the_last_with_all_that_is_left(self):
        policy, now, spans = warmed(WIFI), 40.0, []
        for attempt in (1, 2, 3, 4):
            plan = policy.plan(shape(), WIFI, now, deadline=52.0, attempt=attempt, attempts=4)
            spans.append(plan.first_by_s)
            now += plan.first_by_s
        assert now == pytest.approx(52.0)
        assert spans == sorted(spans)
        assert spans[0] < 2.0

    def test_slow_network_gives_the_whole_deadline_to_one_attempt(self):
        policy = warmed(CELL, 3.0)
        plan = policy.plan(shape(), CELL, 40.0, deadline=50.0, attempts=4)
        assert plan.first_by_s == 10.0
        assert plan.first_packet_s == 10.0

    def test_cold_start_leaves_time_for_another_attempt(self):
        plan = TimeoutPolicy().plan(shape(), UNKNOWN, 0.0, deadline=15.0, attempts=4)
        assert plan.first_by_s < 10.0

    def test_answer_that_has_begun_may_use_all_that_is_left(self):
        plan = warmed().plan(shape(answer_bytes=100 * 1024 * 1024), WIFI, 40.0, deadline=50.0, attempts=4)
        assert plan.first_by_s < 5.0
        assert plan.read_write_s == 10.0

    @pytest.mark.parametrize("deadline", [0.0, -1.0, 1e-9, math.nan, -math.inf])
    def test_no_attempt_is_begun_when_no_time_is_left(self, deadline):
        assert TimeoutPolicy().plan(shape(), WIFI, 0.0, deadline=deadline) is None

    def test_later_attempts_are_more_patient(self):
        policy = warmed()
        firsts = [policy.plan(shape(), WIFI, 40.0, attempt=attempt).first_packet_s for attempt in (1, 2, 3, 9)]
        assert firsts[0] < firsts[1] < firsts[2] == firsts[3]


class TestPatterns:
    def test_idle_stream_is_no_packet_gap_failure(self):
        plan = warmed().plan(shape(pattern=Pattern.STREAM), WIFI, 40.0)
        assert plan.packet_gap_s is None
        assert plan.read_write_s == math.inf
        assert 12.0 <= plan.first_packet_s < 20.0

    def test_long_poll_may_be_held(self):
        policy = warmed()
        call, poll, usual = (
            policy.plan(shape(pattern=pattern, hold_s=hold), WIFI, 40.0, attempts=4, deadline=1000.0)
            for pattern, hold in ((Pattern.CALL, None), (Pattern.LONG_POLL, 30.0), (Pattern.LONG_POLL, None))
        )
        assert poll.first_packet_s == pytest.approx(call.first_packet_s + 30.0)
        assert usual.first_packet_s == pytest.approx(call.first_packet_s + limits.LONG_POLL_HOLD_S)
        assert poll.packet_gap_s == call.packet_gap_s

    def test_held_answers_teach_no_server_cost(self):
        policy = warmed()
        before = policy.plan(shape(), WIFI, 40.0)
        for now in range(40, 60):
            policy.observe(answered(first_byte_s=30.0, total_s=30.0, held=True), now)
        assert policy.plan(shape(), WIFI, 60.0).first_packet_s == before.first_packet_s

    def test_upload_is_bound_by_silence_and_the_deadline_only(self):
        plan = warmed().plan(shape(pattern=Pattern.UPLOAD, request_bytes=10**9), WIFI, 40.0, deadline=640.0, attempts=4)
        assert plan.read_write_s == plan.first_by_s == 600.0
        assert plan.send_gap_s < 10.0

    def test_download_is_bound_by_silence_and_the_deadline_only(self):
        plan = warmed().plan(shape(pattern=Pattern.DOWNLOAD), WIFI, 40.0, deadline=640.0, attempts=2)
        assert plan.read_write_s == 600.0
        assert plan.first_packet_s < 3.0
        assert plan.packet_gap_s < 10.0

    @pytest.mark.parametrize("pattern", [Pattern.STREAM, Pattern.UPLOAD, Pattern.DOWNLOAD])
    def test_open_ended_patterns_have_no_task_limit_of_their_own(self, pattern):
        assert TimeoutPolicy().task_s(shape(pattern=pattern), 4) == math.inf

    def test_long_poll_task_includes_the_hold(self):
        assert TimeoutPolicy().task_s(shape(pattern=Pattern.LONG_POLL, hold_s=30.0), 1) == 50.0


class TestWildSamples:
    WILD = (None, math.nan, math.inf, -math.inf, -0.001, 2**63, "0.1")

    def test_wild_samples_are_dropped_and_counted_and_change_nothing(self):
        policy = warmed()
        before = policy.plan(shape(), WIFI, 40.0)
        for value in self.WILD:
            policy.observe_rtt(WIFI, "a.test", value, 40.0)
            policy.observe_rate(WIFI, 40.0, up_bytes_per_s=value, down_bytes_per_s=value)
        assert policy.plan(shape(), WIFI, 40.0) == before
        # None is no rate given, but no round trip measured either.
        assert policy.dropped == len(self.WILD) + 2 * (len(self.WILD) - 1)

    def test_outcome_with_wild_durations_raises_nothing(self):
        policy = warmed()
        for value in self.WILD:
            policy.observe(
                answered(first_byte_s=value, body_s=value, total_s=value, server_s=value, answer_bytes=value), 40.0
            )
        assert policy.dropped > 0
        assert policy.plan(shape(), WIFI, 41.0, deadline=50.0) is not None


def test_nothing_here_happens_by_itself():
    assert [each.next_timer() for each in (TimeoutPolicy(), AddressBook(), RetryBudget())] == [None] * 3


def test_twenty_thousand_hosts_cost_less_than_a_kilobyte_each():
    hosts = 20_000
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        policy, book = TimeoutPolicy(), AddressBook()
        for number in range(hosts):
            host, now = f"host{number}.example.com", 1000.0 + number * 0.37
            policy.observe_rtt(WIFI, host, 0.02, now)
            policy.observe(
                Outcome(
                    network=WIFI,
                    host=host,
                    path_class=path_class("GET", f"/things/{number}/parts"),
                    answered=True,
                    first_byte_s=0.05,
                    total_s=0.06,
                    answer_bytes=2000,
                ),
                now,
            )
            place = Candidate(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 443, "h2")
            book.observe(AddressOutcome(WIFI.id, host, place, AddressVerdict.WORKED, 0.03 + number * 1e-9), now)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert policy.plan(RequestShape(host="host7.example.com"), WIFI, 9000.0).first_packet_s < 5.0
    assert (after - before) / hosts < 1024


def test_level_of_the_network_adds_patience_and_never_takes_any():
    policy, network = TimeoutPolicy(), Network("n", "cell")
    policy.observe_rtt(network, "a", 0.6, 0.0)
    shape = RequestShape(host="a", answer_bytes=1024)
    usual = policy.plan(shape, network, 0.0)
    for patience in (0.0, 0.5, 1.0, float("nan"), 1e9):
        assert policy.plan(shape, network, 0.0, patience=patience) == usual
    more = policy.plan(shape, network, 0.0, patience=2.0)
    assert more.first_packet_s > usual.first_packet_s
    assert more.connect_s >= usual.connect_s
