"""What works best where: protocols, trials, use, heartbeat; and what of it is kept between two starts."""

import pytest

from stormline.core import limits, limits_memory
from stormline.policy import snapshot, strategy
from stormline.policy.addresses import AddressBook, AddressOutcome, Candidate, Verdict
from stormline.policy.shape import Network, RequestShape
from stormline.policy.snapshot import HeartbeatRecord, HostRecord, NetworkRecord, PathRecord, ProtocolRecord, RateRecord
from stormline.policy.strategy import Strategy
from stormline.policy.timeouts import Outcome, TimeoutPolicy

NET, HOST = Network("home", "wifi"), "a.test"
OFFERED = ("h2", "h1")
WALL_S = 1_800_000_000.0
DAY_S = 24 * 3600.0
FOUR, FOUR_TOO, SIX = Candidate("192.0.2.1", 443), Candidate("192.0.2.2", 443), Candidate("2001:db8::1", 443)


def always(network_id, start, end):
    return True


def never(network_id, start, end):
    return False


def tell(known, protocol, worked, now, *, times=1, **more):
    for _ in range(times):
        known.observe("home", HOST, protocol, now, worked=worked, **more)


def best(known, now, offered=OFFERED):
    return known.choose("home", HOST, offered, now).protocols[0]


class Client:
    """All that one start of a client knows, and its clocks."""

    def __init__(self, started_s):
        self.wall_s = WALL_S + started_s  # of the wall clock, when the monotonic one said nothing
        self.book, self.times = AddressBook(), TimeoutPolicy()
        self.known = Strategy(self.book.worked_within)

    def collect(self, now):
        return strategy.collect(NET, self.book, self.times, self.known, now, self.wall_s)

    def recall(self, kept, now=0.0):
        strategy.recall(kept, NET, self.book, self.times, self.known, now, self.wall_s)

    def tell(self, candidate, verdict, now, host=HOST):
        self.book.observe(AddressOutcome("home", host, candidate, verdict, connect_s=0.03), now)
        self.known.touch("home", host, now)

    def order(self, candidates, now, host=HOST):
        return [each.candidate for each in self.book.plan("home", host, candidates, now)]


class TestProtocols:
    def test_given_order_stands_where_nothing_is_known(self):
        assert Strategy(always).choose("home", HOST, OFFERED, 0.0).protocols == OFFERED

    def test_one_or_two_failures_are_chance_and_three_are_not(self):
        known = Strategy(always)
        tell(known, "h2", False, 0.0, times=2)
        assert best(known, 1.0) == "h2"
        tell(known, "h2", False, 1.0)
        assert best(known, 2.0) == "h1"

    def test_two_failures_are_enough_where_the_other_is_known_to_work(self):
        known = Strategy(always)
        tell(known, "h2", False, 0.0, times=2)
        tell(known, "h1", True, 0.0)
        assert best(known, 0.0) == "h1"

    def test_failures_in_a_blackout_are_nobodys(self):
        known = Strategy(never)
        tell(known, "h2", False, 0.0, times=9)
        assert best(known, 1.0) == "h2"

    def test_failure_counts_when_something_else_has_worked_after_it(self):
        book = AddressBook()
        known = Strategy(book.worked_within)
        for at in (0.0, 10.0, 20.0):
            tell(known, "h2", False, at, tried_s=1.0)
            book.observe(AddressOutcome("home", "b.test", FOUR, Verdict.WORKED), at + 2.0)
        assert best(known, 22.0) == "h1"

    def test_where_both_fail_the_given_order_stands(self):
        known = Strategy(always)
        tell(known, "h2", False, 0.0, times=5)
        tell(known, "h1", False, 0.0, times=5)
        assert best(known, 0.0) == "h2"

    def test_many_answers_bear_some_failures(self):
        known = Strategy(always)
        tell(known, "h2", True, 0.0, times=20)
        tell(known, "h2", False, 0.0, times=5)
        tell(known, "h1", True, 0.0, times=5)
        assert best(known, 0.0) == "h2"

    @pytest.mark.parametrize(("pace_s", "first"), [(0.15, "h2"), (0.4, "h1")])
    def test_slower_one_is_left_only_where_it_is_much_slower(self, pace_s, first):
        known = Strategy(always)
        tell(known, "h2", True, 0.0, times=5, pace_s=pace_s)
        tell(known, "h1", True, 0.0, times=5, pace_s=0.12)
        assert best(known, 0.0) == first

    def test_fault_of_friday_is_known_on_monday_and_forgotten_after_some_weeks(self):
        known = Strategy(always)
        tell(known, "h2", False, 0.0, times=3)
        tell(known, "h1", True, 0.0, times=3)
        assert best(known, 3 * DAY_S) == "h1"
        assert best(known, 21 * DAY_S) == "h2"

    def test_networks_and_hosts_are_apart(self):
        known = Strategy(always)
        tell(known, "h2", False, 0.0, times=5)
        assert known.choose("work", HOST, OFFERED, 0.0).protocols == OFFERED
        assert known.choose("home", "b.test", OFFERED, 0.0).protocols == OFFERED

    def test_more_protocols_than_there_are_names_for_are_not_kept(self):
        known = Strategy(always)
        for number in range(20):
            tell(known, f"p{number}", True, 0.0)
        (host,) = known.export("home", 0.0, WALL_S).hosts
        assert len(host.protocols) == limits_memory.MEMORY_PROTOCOLS_MAX


class TestTrials:
    def test_first_half_minute_on_a_network_belongs_to_what_works(self):
        known = Strategy(always)
        assert not known.explore("home", 1e9, 0.0)
        known.enter("home", 100.0)
        assert not known.explore("home", 100.0 + limits_memory.EXPLORE_QUIET_S - 0.1, 0.0)
        assert known.explore("home", 100.0 + limits_memory.EXPLORE_QUIET_S, 0.0)

    def test_no_trial_follows_another_within_a_minute(self):
        known = Strategy(always)
        known.enter("home", -100.0)
        tries = [now for now in range(600) if known.explore("home", float(now), 0.0)]
        assert tries == list(range(0, 600, int(limits_memory.EXPLORE_PAUSE_S)))

    def test_chance_decides(self):
        known = Strategy(always)
        known.enter("home", -100.0)
        assert not known.explore("home", 0.0, limits_memory.EXPLORE_SHARE)
        assert known.explore("home", 0.0, limits_memory.EXPLORE_SHARE / 2)


class TestUse:
    def test_most_used_are_those_asked_often_and_lately(self):
        known = Strategy(always)
        for host, times, at in (("often.test", 9, 0.0), ("once.test", 1, 0.0), ("long-ago.test", 9, -9 * DAY_S)):
            for _ in range(times):
                known.observe("home", host, "h2", at, worked=True, tls_port=8443)
        known.observe("home", "plain.test", "h1", 0.0, worked=True)
        assert known.most_used("home", 1.0, 5) == [("often.test", 8443), ("once.test", 8443)]
        assert known.most_used("home", 1.0, 1) == [("often.test", 8443)]
        assert known.most_used("work", 1.0, 5) == []

    def test_heartbeat_is_kept_per_network_and_forgotten_after_a_week(self):
        known = Strategy(always)
        known.heartbeats.observe("home", 240.0, 0.0, alive=True)
        assert known.export("home", 1.0, 0.0).heartbeat.good_ms == 240_000
        assert known.export("work", 1.0, 0.0).heartbeat is None
        assert known.export("home", limits_memory.MEMORY_LIFE_S, 0.0).heartbeat is None


class TestBetweenStarts:
    def test_address_that_worked_goes_first_at_the_next_start(self):
        one = Client(0.0)
        one.tell(FOUR_TOO, Verdict.WORKED, 5.0)
        two = Client(3600.0)
        two.recall(one.collect(10.0))
        assert two.order([FOUR, FOUR_TOO], 0.0) == [FOUR_TOO, FOUR]

    def test_address_that_failed_goes_last_although_its_ban_is_over(self):
        one = Client(0.0)
        for at in (0.0, 10.0, 20.0):
            one.tell(FOUR, Verdict.FAILED, at)
            one.tell(FOUR_TOO, Verdict.WORKED, at + 0.5)
        two = Client(3 * limits.ADDRESS_BAN_S_MAX)
        two.recall(one.collect(30.0))
        third = Candidate("192.0.2.3", 443)
        assert two.order([FOUR, third, FOUR_TOO], 0.0) == [FOUR_TOO, third, FOUR]

    def test_ban_that_lasts_is_taken_over(self):
        one = Client(0.0)
        for at in (0.0, 10.0, 20.0):
            one.tell(FOUR, Verdict.FAILED, at)
            one.tell(FOUR_TOO, Verdict.WORKED, at + 0.5)
        two = Client(60.0)
        two.recall(one.collect(30.0))
        assert two.order([FOUR, FOUR_TOO], 0.0) == [FOUR_TOO]
        assert [each.banned for each in two.book.plan("home", HOST, [FOUR], 0.0)] == [True]

    @pytest.mark.parametrize("verdict", [Verdict.OUTRUN, Verdict.FAILED])
    def test_one_loss_of_ipv6_is_enough_at_the_next_start_and_it_is_tried_again_later(self, verdict):
        one = Client(0.0)
        one.tell(FOUR, Verdict.WORKED, 1.0)
        one.tell(SIX, verdict, 1.1)
        two = Client(3600.0)
        two.recall(one.collect(10.0))
        assert two.order([SIX, FOUR], 0.0, host="b.test") == [FOUR, SIX]
        assert two.order([SIX, FOUR], limits.FAMILY_REPROBE_S, host="b.test") == [SIX, FOUR]

    def test_ipv6_that_worked_again_stays_first(self):
        one = Client(0.0)
        one.tell(SIX, Verdict.OUTRUN, 1.0)
        one.tell(SIX, Verdict.WORKED, 2.0)
        two = Client(3600.0)
        two.recall(one.collect(10.0))
        assert two.order([SIX, FOUR], 0.0) == [SIX, FOUR]

    def test_protocol_that_did_badly_is_left_at_the_next_start(self):
        one = Client(0.0)
        one.tell(FOUR, Verdict.WORKED, 0.0)
        for at in (0.0, 1.0, 2.0):
            one.known.observe("home", HOST, "h2", at, worked=False, tried_s=2.0)
        two = Client(3600.0)
        two.recall(one.collect(10.0))
        assert best(two.known, 0.0) == "h1"

    def test_time_outs_begin_with_what_was_measured_and_not_with_the_cold_start(self):
        one = Client(0.0)
        one.times.observe_rtt(NET, HOST, 0.05, 0.0)
        one.known.touch("home", HOST, 0.0)
        shape = RequestShape(host=HOST, path_class="GET /slow")
        answer = Outcome(network=NET, host=HOST, path_class="GET /slow", answered=True, first_byte_s=2.0, server_s=1.95)
        one.times.observe(answer, 1.0)
        two = Client(20 * 3600.0)
        cold = two.times.plan(shape, NET, 0.0, deadline=60.0)
        two.recall(one.collect(10.0))
        warm = two.times.plan(shape, NET, 0.0, deadline=60.0)
        assert "cold start" in cold.basis
        assert "cold start" not in warm.basis
        assert 2.0 < warm.first_packet_s < cold.first_packet_s
        other = two.times.plan(RequestShape(host=HOST, path_class="GET /quick"), NET, 0.0, deadline=60.0)
        assert other.first_packet_s < warm.first_packet_s - 1.5

    def test_cost_of_a_path_is_kept_although_nobody_asked_for_it_this_time(self):
        record = HostRecord(HOST, round(WALL_S), paths=(PathRecord(snapshot.path_digest("GET /x"), (20,), 900),))
        one = Client(0.0)
        one.recall(NetworkRecord(at=round(WALL_S), hosts=(record,)))
        assert one.collect(5.0).hosts[0].paths == record.paths
        one.times.observe(Outcome(network=NET, host=HOST, path_class="GET /x", answered=True, answer_bytes=100), 6.0)
        (path,) = one.collect(7.0).hosts[0].paths
        assert path.digest == record.paths[0].digest
        assert path.cost == (20,)

    def test_rate_is_kept_for_minutes_only(self):
        for away_s, known in ((limits.RATE_MEMORY_S - 20.0, True), (limits.RATE_MEMORY_S, False)):
            one, two = Client(0.0), Client(away_s)
            one.times.observe_rate(NET, 1.0, down_bytes_per_s=1e6)
            one.known.touch("home", HOST, 1.0)
            two.recall(one.collect(2.0))
            assert (two.times.bytes_per_s(NET, 1.0)[1] is not None) is known

    def test_all_is_too_old_after_a_week(self):
        one = Client(0.0)
        one.tell(FOUR_TOO, Verdict.WORKED, 0.0)
        one.tell(SIX, Verdict.OUTRUN, 0.0)
        one.times.observe_rtt(NET, HOST, 0.05, 0.0)
        two = Client(limits_memory.MEMORY_LIFE_S + 1.0)
        two.recall(one.collect(0.0))
        assert two.order([SIX, FOUR, FOUR_TOO], 0.0) == [SIX, FOUR, FOUR_TOO]
        assert two.times.rtt_s(NET, HOST, 0.5) is None
        assert two.collect(0.0).hosts == ()

    def test_what_is_known_already_stands(self):
        one = Client(0.0)
        one.tell(FOUR, Verdict.WORKED, 0.0)
        two = Client(60.0)
        two.tell(FOUR, Verdict.FAILED, 0.0)
        two.tell(FOUR_TOO, Verdict.WORKED, 0.5)
        two.recall(one.collect(10.0), now=1.0)
        assert two.order([FOUR, FOUR_TOO], 2.0) == [FOUR_TOO, FOUR]

    def test_clock_that_was_set_back_makes_nothing_of_the_future(self):
        one = Client(0.0)
        one.tell(FOUR_TOO, Verdict.WORKED, 0.0)
        two = Client(-30 * DAY_S)
        two.recall(one.collect(0.0))
        assert two.order([FOUR, FOUR_TOO], 0.0) == [FOUR_TOO, FOUR]
        assert two.order([FOUR, FOUR_TOO], limits_memory.MEMORY_LIFE_S) == [FOUR, FOUR_TOO]

    def test_numbers_that_are_none_of_ours_are_left_out(self):
        good = HostRecord(
            "good.test",
            round(WALL_S),
            addresses=(snapshot.AddressRecord("192.0.2.2", 443, "", round(WALL_S), 0, False, 0, 5),),
        )
        bad = [
            HostRecord("b1.test", 10**400),
            HostRecord("b2.test", 0, uses=float("inf")),
            HostRecord("b3.test", 0, protocols=(ProtocolRecord("h2", float("nan"), 0.0, None, 0),)),
            HostRecord("b4.test", 0, rtt=(10**40,)),
            HostRecord("x" * 300, 0),
        ]
        two = Client(10.0)
        two.recall(snapshot.bound(NetworkRecord(at=10**300, up=RateRecord(1.0, 0), hosts=(*bad, good))))
        assert [each.host for each in two.collect(0.0).hosts] == ["good.test"]
        assert two.order([FOUR, FOUR_TOO], 0.0, host="good.test") == [FOUR_TOO, FOUR]


def test_merge_takes_of_each_host_the_newer_word():
    one = NetworkRecord(at=10, rtt=(1,), hosts=(HostRecord("a", 10, uses=1.0), HostRecord("b", 5, uses=1.0)))
    other = NetworkRecord(at=8, rtt=(2,), heartbeat=HeartbeatRecord(8, 5), hosts=(HostRecord("b", 8, uses=2.0),))
    for merged in (snapshot.merge(one, other), snapshot.merge(other, one)):
        assert [(each.host, each.uses) for each in merged.hosts] == [("b", 2.0), ("a", 1.0)]
        assert merged.rtt == (1,)
        assert merged.heartbeat == HeartbeatRecord(8, 5)
