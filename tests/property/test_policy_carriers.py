"""Which carrier is tried first, for any story of networks that let some pass."""

import math

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stormline.core import limits_carriers
from stormline.policy.carriers import RANK, CarrierPolicy
from stormline.policy.snapshot import CarrierRecord, NetworkRecord, bound, merge

TLS, WSS, SHORT = RANK
NETWORKS = st.sampled_from(("home", "office"))
CARRIERS = st.sampled_from(RANK)


def test_unknown_network_begins_with_the_best_and_skips_what_nobody_knows():
    assert CarrierPolicy().order("home", ("sl-wss", "sl-quic", "sl-short", "sl-tls", "h1")) == RANK


def test_one_failure_is_chance_and_two_are_not_once_another_stands():
    policy = CarrierPolicy()
    policy.failed("home", TLS)
    policy.stands("home", WSS, 0.0)
    assert policy.order("home", RANK) == (TLS, WSS, SHORT)
    policy.failed("home", TLS)
    policy.stands("home", WSS, 1.0)
    assert policy.order("home", RANK) == (WSS, SHORT, TLS)
    assert policy.order("office", RANK) == (TLS, WSS, SHORT)


def test_where_nothing_passes_all_have_their_turns():
    policy, firsts = CarrierPolicy(), []
    for _ in range(18):
        firsts.append(policy.order("home", RANK)[0])
        policy.failed("home", firsts[-1])
    assert firsts == [TLS, TLS, WSS, WSS, SHORT, SHORT] * 3
    assert policy.next_timer("home", WSS) is None  # nothing stands: nothing was learned


def test_carrier_that_stalled_is_tried_again_after_the_first_pause_and_goes_behind_where_it_stalls_once_more():
    policy = CarrierPolicy()
    policy.stands("home", TLS, 0.0)
    policy.stalled("home", TLS)
    policy.stands("home", SHORT, 10.0)
    assert policy.next_timer("home", SHORT) == 10.0 + limits_carriers.CARRIER_CLIMB_FIRST_S
    assert policy.order("home", RANK) == (TLS, WSS, SHORT)
    policy.stalled("home", TLS)
    policy.stands("home", SHORT, 20.0)
    assert policy.order("home", RANK) == (WSS, SHORT, TLS)


@given(fails=st.integers(0, 20))
def test_pauses_between_trials_double_up_to_the_longest_and_a_good_one_ends_them(fails):
    policy, now = CarrierPolicy(), 0.0
    policy.failed("home", TLS)
    policy.stands("home", WSS, now)
    pause = limits_carriers.CARRIER_CLIMB_FIRST_S
    for _ in range(fails):
        due = policy.next_timer("home", WSS)
        assert due == now + pause
        assert policy.climb("home", WSS, math.nextafter(due, 0.0)) is None
        assert policy.climb("home", WSS, due) == TLS
        now = due
        policy.tried("home", TLS, now, good=False)
        pause = min(2 * pause, limits_carriers.CARRIER_CLIMB_MAX_S)
        assert policy.order("home", RANK) == (WSS, SHORT, TLS)
    policy.tried("home", TLS, now, good=True)
    assert policy.order("home", RANK) == (TLS, WSS, SHORT)
    policy.stands("home", TLS, now)
    assert policy.next_timer("home", TLS) is None


@given(
    at=st.integers(-(2**40), 2**40),
    pause=st.integers(-(2**40), 2**40),
    wall_s=st.floats(0, 2e9),
    now=st.floats(0, 1e6),
)
def test_what_was_kept_comes_back_within_the_bounds_whatever_it_says(at, pause, wall_s, now):
    policy = CarrierPolicy()
    policy.restore("home", (CarrierRecord(TLS, at, pause), CarrierRecord("sl-pigeon", at, pause)), now, wall_s)
    assert policy.order("home", RANK) == (WSS, SHORT, TLS)
    due = policy.next_timer("home", WSS)
    assert now <= due <= now + limits_carriers.CARRIER_CLIMB_MAX_S


def test_kept_and_given_back_it_is_the_same_and_the_newer_word_wins():
    policy = CarrierPolicy()
    policy.failed("home", TLS)
    policy.stands("home", WSS, 100.0)
    assert policy.export("home", 1000.0) == ()  # one failure may be chance
    policy.tried("home", TLS, 200.0, good=False)
    kept = policy.export("home", 1000.0)
    assert kept == (CarrierRecord(TLS, 1320, 120),)
    again = CarrierPolicy()
    again.restore("home", kept, 250.0, 1000.0)
    assert again.next_timer("home", WSS) == 320.0
    assert merge(NetworkRecord(at=5, carriers=kept), NetworkRecord(at=9)).carriers == ()
    assert merge(NetworkRecord(at=9, carriers=kept), NetworkRecord(at=5)).carriers == kept
    many = tuple(CarrierRecord(f"c{n}", 0, 0) for n in range(100))
    assert len(bound(NetworkRecord(at=1, carriers=many)).carriers) == limits_carriers.CARRIERS_REMEMBERED


class Story(RuleBasedStateMachine):
    """Any order of events, by any network."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = CarrierPolicy()
        self.now = 0.0
        self.trials: list[float] = []

    @rule(network=NETWORKS, carrier=CARRIERS)
    def fail(self, network, carrier):
        self.policy.failed(network, carrier)

    @rule(network=NETWORKS, carrier=CARRIERS)
    def stand(self, network, carrier):
        self.policy.stands(network, carrier, self.now)

    @rule(network=NETWORKS, standing=CARRIERS, good=st.booleans(), wait=st.floats(0, 1e5))
    def look(self, network, standing, good, wait):
        self.now += wait
        tried: list[str] = []
        while (better := self.policy.climb(network, standing, self.now)) is not None:
            assert RANK.index(better) < RANK.index(standing)
            assert better not in tried  # each has its own pauses
            self.policy.tried(network, better, self.now, good=good)
            tried.append(better)
        due = self.policy.next_timer(network, standing)
        assert due is None or due > self.now

    @invariant()
    def nothing_is_left_out_and_trials_are_bounded(self):
        for network in ("home", "office"):
            assert sorted(self.policy.order(network, RANK)) == sorted(RANK)
            due = self.policy.next_timer(network, WSS)
            assert due is None or due <= self.now + limits_carriers.CARRIER_CLIMB_MAX_S
            assert self.policy.next_timer(network, TLS) is None


TestStory = Story.TestCase
