"""Whatever the probes say and operators drain: what is handed out is never nothing, never below the floor, in order."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stormline.core import limits_platform as limits
from stormline.dispatch.head import Drained
from stormline.dispatch.health import Drains, Health, HealthPolicy, Verdict, target_of, targets
from stormline.dispatch.rules import RuleSet
from stormline.wire.plan import Endpoint, HostPlan

ENDPOINTS = tuple(Endpoint(host=f"192.0.2.{number}", port=443, weight=number) for number in range(1, 7))
HOSTS = {
    "one.example": ENDPOINTS[:1],
    "three.example": ENDPOINTS[1:4],
    "all.example": ENDPOINTS,
    "twice.example": (ENDPOINTS[0], ENDPOINTS[0], ENDPOINTS[5]),
    "none.example": (),
}


class Story(RuleBasedStateMachine):
    """Probes, drains, rules and time in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = HealthPolicy(fall=2, rise=2, floor_share=0.5)
        self.drains = Drains()
        self.health = Health(self.policy, self.drains)
        self.now = 0.0
        self.seen: dict[int, dict[str, tuple[Endpoint, ...]]] = {}
        self.take(list(HOSTS))

    @rule(hosts=st.lists(st.sampled_from(list(HOSTS)), unique=True))
    def take(self, hosts: list[str]) -> None:
        rules = RuleSet(version=1, hosts={host: HostPlan(endpoints=HOSTS[host]) for host in hosts})
        self.health.watch(targets([rules]), self.now, lambda: 0.5)

    @rule(endpoint=st.sampled_from(ENDPOINTS), good=st.booleans(), times=st.integers(1, 4), gap_s=st.floats(0, 200))
    def probe(self, endpoint: Endpoint, good: bool, times: int, gap_s: float) -> None:
        for _ in range(times):
            self.now += gap_s
            self.health.observe(target_of(endpoint), good, "" if good else "no", self.now, 0.5)

    @rule(good=st.booleans())
    def probe_all(self, good: bool) -> None:
        for endpoint in ENDPOINTS:
            self.probe(endpoint, good, 2, 1.0)

    @rule(endpoint=st.sampled_from(ENDPOINTS), whole=st.booleans(), on=st.booleans())
    def drain(self, endpoint: Endpoint, whole: bool, on: bool) -> None:
        drain = Drained(host=endpoint.host, port=0 if whole else endpoint.port)
        if on:
            self.drains.put(drain)
        else:
            self.drains.end(drain)

    @invariant()
    def what_is_handed_out_keeps_floor_and_order(self) -> None:
        ill = {
            state.address
            for state in self.health.snapshot(self.now).targets
            if state.verdict in (Verdict.ILL, Verdict.DAMPED)
        }
        for host, endpoints in HOSTS.items():
            given_out = self.health.standing(endpoints)
            rest = iter(endpoints)
            assert all(any(each is other for other in rest) for each in given_out), "not in their order"
            serving = [each for each in endpoints if not self.drains.covers(each.host, each.port)]
            if not serving:
                assert len(given_out) == min(1, len(endpoints)), host
                continue
            assert len(given_out) >= max(1, math.ceil(self.policy.floor_share * len(serving)))
            assert not any(self.drains.covers(each.host, each.port) for each in given_out)
            good = [each for each in serving if f"{each.host}:{each.port}" not in ill]
            assert [each for each in given_out if each in good] == good, "a good one is missing"
            if len(good) >= self.policy.floor(len(serving)):
                assert list(given_out) == good, "an ill one without need"

    @invariant()
    def same_revision_means_same_answer(self) -> None:
        now = {host: self.health.standing(endpoints) for host, endpoints in HOSTS.items()}
        assert self.seen.setdefault(self.health.revision, now) == now


Story.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestStory = Story.TestCase


@given(outcomes=st.lists(st.tuples(st.booleans(), st.floats(0, 1000)), max_size=200))
def test_flapping_endpoint_becomes_usable_ever_more_rarely_and_always_in_the_end(
    outcomes: list[tuple[bool, float]],
) -> None:
    health = Health(HealthPolicy(fall=1, rise=1), Drains())
    (target,) = [target_of(ENDPOINTS[0])]
    health.watch(dict.fromkeys(map(target_of, ENDPOINTS[:1]), "a.example"), 0.0, lambda: 0.0)
    now = 0.0
    for good, gap_s in outcomes:
        now += gap_s
        health.observe(target, good, "", now, 0.5)
        (state,) = health.snapshot(now).targets
        assert 0 <= state.falls <= limits.HEALTH_FLAP_MAX
    for _ in range(100):
        now += 10
        health.observe(target, True, "", now, 0.5)
    assert health.snapshot(now).targets[0].verdict is Verdict.WELL


@given(chance=st.floats(0, 1, exclude_max=True), interval_s=st.floats(0.05, 1e6), jitter=st.floats(0, 0.99))
def test_pause_is_within_its_jitter(chance: float, interval_s: float, jitter: float) -> None:
    pause_s = HealthPolicy(interval_s=interval_s, jitter=jitter).pause_s(chance)
    assert pause_s > 0
    assert interval_s * (1 - jitter) * 0.999 <= pause_s <= interval_s * (1 + jitter) * 1.001


@given(count=st.integers(0, 1000), share=st.floats(0, 1))
def test_floor_is_at_least_one_and_at_most_all(count: int, share: float) -> None:
    floor = HealthPolicy(floor_share=share).floor(count)
    assert min(1, count) <= floor <= count
    assert floor >= share * count or math.isclose(floor, share * count)
