"""Verdicts with hysteresis and damping, drains, the floor, and the probes' moments."""

from typing import Any

import pytest

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.dispatch.head import Drained
from stormline.dispatch.health import (
    Condition,
    Drains,
    Health,
    HealthPolicy,
    Target,
    Verdict,
    target_of,
    targets,
)
from stormline.dispatch.rules import RuleSet
from stormline.wire.plan import Endpoint, HostPlan

POLICY = HealthPolicy(fall=3, rise=2)
E1, E2, E3, E4 = (Endpoint(host=f"192.0.2.{number}", port=443) for number in range(1, 5))
ALL = (E1, E2, E3, E4)


def rules(*endpoints: Endpoint, **changes: Any) -> RuleSet:
    return RuleSet(version=1, hosts={"a.example": HostPlan(endpoints=endpoints)}, **changes)


class World:
    """A health with one host, on a clock that only moves when told."""

    def __init__(self, *endpoints: Endpoint, policy: HealthPolicy = POLICY) -> None:
        self.drains = Drains()
        self.health = Health(policy, self.drains)
        self.now = 0.0
        self.health.watch(targets([rules(*(endpoints or ALL))]), self.now, lambda: 0.0)

    def probe(self, endpoint: Endpoint, good: bool, times: int = 1, step_s: float = 1.0) -> None:
        for _ in range(times):
            self.now += step_s
            self.health.observe(target_of(endpoint), good, "" if good else "refused", self.now, 0.5)

    def verdict(self, endpoint: Endpoint) -> Verdict:
        states = {state.address: state.verdict for state in self.health.snapshot(self.now).targets}
        return states[f"{endpoint.host}:{endpoint.port}"]


class TestVerdict:
    def test_endpoint_falls_after_so_many_failures_in_a_row_and_rises_after_so_many_good_ones(self) -> None:
        world = World()
        assert world.verdict(E1) is Verdict.UNKNOWN
        world.probe(E1, False, 2)
        world.probe(E1, True)
        world.probe(E1, False, 2)
        assert world.verdict(E1) is Verdict.UNKNOWN
        world.probe(E1, False)
        assert world.verdict(E1) is Verdict.ILL
        world.probe(E1, True)
        world.probe(E1, False)
        world.probe(E1, True)
        assert world.verdict(E1) is Verdict.ILL
        world.probe(E1, True)
        assert world.verdict(E1) is Verdict.WELL

    def test_endpoint_that_falls_again_and_again_is_not_believed_until_it_was_quiet(self) -> None:
        world = World()
        for _ in range(4):
            world.probe(E1, True, 2)
            assert world.verdict(E1) in (Verdict.WELL, Verdict.DAMPED)
            world.probe(E1, False, 3)
        world.probe(E1, True, 2)
        assert world.verdict(E1) is Verdict.DAMPED
        assert E1 not in world.health.standing(ALL)
        revision = world.health.revision
        began = world.now
        while world.verdict(E1) is Verdict.DAMPED:
            world.probe(E1, True)
        assert world.verdict(E1) is Verdict.WELL
        assert limits.HEALTH_FLAP_HALF_LIFE_S < world.now - began < 3 * limits.HEALTH_FLAP_HALF_LIFE_S
        assert world.health.revision == revision + 1

    def test_memory_of_falls_is_bounded_and_fades(self) -> None:
        condition = Condition(0.0)
        for now in range(1000):
            condition.observe(now % 5 < 2, "x", float(now), POLICY)
        assert condition.falls(1000.0) <= limits.HEALTH_FLAP_MAX
        assert condition.falls(1000.0 + 20 * limits.HEALTH_FLAP_HALF_LIFE_S) < 0.001
        assert condition.falls(0.0) <= limits.HEALTH_FLAP_MAX  # a clock that went back

    def test_reason_is_kept_bounded_and_forgotten_when_good(self) -> None:
        condition = Condition(0.0)
        condition.observe(False, "x" * 10_000, 1.0, POLICY)
        assert len(condition.reason) == limits.HEALTH_REASON_CHARS_MAX
        condition.observe(True, "", 2.0, POLICY)
        assert condition.reason == ""


class TestStanding:
    def test_all_well_is_all_in_the_same_order(self) -> None:
        assert World().health.standing(ALL) is ALL

    def test_ill_one_is_left_out(self) -> None:
        world = World()
        world.probe(E2, False, 3)
        assert world.health.standing(ALL) == (E1, E3, E4)

    def test_floor_is_filled_by_those_that_fell_last(self) -> None:
        world = World()
        for endpoint in (E3, E2, E1):
            world.probe(endpoint, False, 3)
        assert world.health.standing(ALL) == (E1, E4)
        world.probe(E3, True)
        assert world.health.standing(ALL) == (E1, E4), "one good probe changes nothing that is handed out"

    def test_where_none_is_well_all_are_given(self) -> None:
        world = World()
        for endpoint in ALL:
            world.probe(endpoint, False, 3)
        assert world.health.standing(ALL) == ALL

    def test_single_endpoint_is_never_left_out(self) -> None:
        world = World(E1)
        world.probe(E1, False, 10)
        assert world.health.standing((E1,)) == (E1,)
        assert world.health.standing(()) == ()

    def test_drained_one_is_left_out_although_the_others_are_ill(self) -> None:
        world = World()
        world.drains.put(Drained(host=E1.host, port=443))
        for endpoint in (E2, E3, E4):
            world.probe(endpoint, False, 3)
        assert world.health.standing(ALL) == (E2, E3, E4)

    def test_all_drained_gives_one_that_is_well(self) -> None:
        world = World()
        for endpoint in ALL:
            world.drains.put(Drained(host=endpoint.host))
        assert world.health.standing(ALL) == (E1,)
        world.probe(E1, False, 3)
        assert world.health.standing(ALL) == (E2,)

    def test_unknown_endpoints_are_given(self) -> None:
        other = Endpoint(host="192.0.2.99", port=1)
        assert World().health.standing((other, E1)) == (other, E1)


class TestDrains:
    def test_drain_of_one_port_or_of_all(self) -> None:
        drains = Drains([Drained(host="192.0.2.1", port=443), Drained(host="192.0.2.2")])
        assert drains.covers("192.0.2.1", 443)
        assert not drains.covers("192.0.2.1", 444)
        assert drains.covers("192.0.2.2", 1)

    def test_drain_changes_the_revision_once_and_tells(self) -> None:
        world, told = World(), []
        world.drains.on_change(told.append)
        drain = Drained(host=E1.host)
        before = world.health.revision
        assert world.drains.put(drain)
        assert not world.drains.put(drain)
        assert world.health.revision == before + 1
        assert world.drains.end(drain)
        assert not world.drains.end(drain)
        assert world.health.revision == before + 2
        assert told == [drain, drain]
        assert world.health.standing(ALL) == ALL

    def test_drains_are_bounded_and_checked(self) -> None:
        drains = Drains(Drained(host=f"h{number}") for number in range(limits.DRAINS_MAX))
        for bad in (
            Drained(host="one-more"),
            Drained(host="x", port=65536),
            Drained(host="x", port=-1),
            Drained(host=""),
        ):
            with pytest.raises(errors.ConfigError):
                drains.put(bad)


class TestTargets:
    def test_endpoints_that_are_the_same_to_the_network_are_probed_once(self) -> None:
        named = Endpoint(host="192.0.2.9", port=443, server_name="g.example", weight=1)
        plan = HostPlan(endpoints=(E1, named))
        many = RuleSet(version=1, hosts={"a.example": plan, "b.example": plan}, gateways={"shop": (named, E2)})
        health = Health(POLICY, Drains())
        health.watch(targets([many]), 0.0, lambda: 0.0)
        assert health.take_due(0.0) == [
            (target_of(named), "g.example"),
            (target_of(E2), E2.host),
            (target_of(E1), "a.example"),
        ]

    def test_first_probes_are_spread_and_later_ones_jittered(self) -> None:
        health = Health(POLICY, Drains())
        draws = iter([0.0, 0.5, 0.25, 0.75])
        health.watch(targets([rules(*ALL)]), 100.0, lambda: next(draws))
        assert health.next_due() == 100.0
        assert [target.host for target, _ in health.take_due(100.0)] == [E1.host]
        assert health.next_due() == 100.0 + 0.25 * POLICY.interval_s
        health.take_due(200.0)
        assert health.next_due() is None, "all are under way"
        health.observe(target_of(E1), True, "", 200.0, 0.0)
        assert health.next_due() == 200.0 + POLICY.interval_s * (1 - POLICY.jitter)

    def test_new_rules_keep_the_course_of_what_stays(self) -> None:
        world = World()
        world.probe(E1, False, 3)
        world.health.watch(targets([rules(E1, E2)]), world.now, lambda: 0.0)
        assert world.verdict(E1) is Verdict.ILL
        revision = world.health.revision
        world.health.watch(targets([rules(E2)]), world.now, lambda: 0.0)
        assert world.health.revision > revision, "it is handed out again where somebody still asks"
        assert not world.health.observe(target_of(E1), True, "", world.now, 0.5)

    def test_more_targets_than_the_bound_are_counted_and_handed_out(self) -> None:
        many = tuple(Endpoint(host="192.0.2.1", port=port) for port in range(1, limits.HEALTH_TARGETS_MAX + 3))
        world = World(*many)
        assert world.health.snapshot(0.0).unprobed == 2
        assert len(world.health.take_due(1e9)) == limits.HEALTH_TARGETS_MAX
        assert world.health.standing(many) == many

    def test_kinds_that_cannot_be_probed_are_handed_out(self) -> None:
        health = Health(POLICY, Drains(), can_probe=lambda target: target.carrier != "h3")
        quic = Endpoint(host="192.0.2.5", port=443, carrier="h3")
        health.watch(targets([rules(E1, quic)]), 0.0, lambda: 0.0)
        assert health.unprobed == 1
        assert [target for target, _ in health.take_due(1e9)] == [Target(E1.host, 443, "sl-tls", "")]
        assert health.standing((quic, E1)) == (quic, E1)

    def test_snapshot_shows_course_and_drain(self) -> None:
        world = World(E1)
        world.probe(E1, False, 3)
        world.drains.put(Drained(host=E1.host))
        world.now += 10
        (state,) = world.health.snapshot(world.now).targets
        assert (state.address, state.verdict, state.since_s, state.streak, state.reason, state.drained) == (
            "192.0.2.1:443",
            Verdict.ILL,
            10.0,
            -3,
            "refused",
            True,
        )
        assert state.falls == pytest.approx(0.94, abs=0.01)


@pytest.mark.parametrize(
    "bad",
    [
        {"interval_s": 0.0},
        {"interval_s": float("inf")},
        {"interval_s": float("nan")},
        {"jitter": 1.0},
        {"jitter": -0.1},
        {"fall": 0},
        {"rise": 0},
        {"floor_share": 1.1},
    ],
)
def test_policy_out_of_range_is_a_config_error(bad: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError):
        HealthPolicy(**bad)
