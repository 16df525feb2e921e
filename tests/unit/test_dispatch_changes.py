"""What differs between rule sets, and what the gateways are told of it."""

from typing import Any

import msgspec
import pytest

from stormline.appgw.plans import PlanChange
from stormline.core import limits
from stormline.dispatch.changes import differences
from stormline.dispatch.health import Part
from stormline.dispatch.rules import RuleSet
from stormline.dispatch.unit import Announcements, HeldRules
from stormline.wire.messages import GATEWAYS
from stormline.wire.plan import Endpoint, HostPlan

A, B, C = (HostPlan(endpoints=(Endpoint(host=f"192.0.2.{number}", port=443),)) for number in (1, 2, 3))
RULES = RuleSet(
    version=5,
    hosts={"a.example": A, "b.example": B, "c.example": C},
    apps={"shop": frozenset({"a.example", "b.example"}), "bank": frozenset({"c.example"})},
)


def after(**changes: Any) -> RuleSet:
    return msgspec.structs.replace(RULES, **{"version": 6, **changes})


class TestDifferences:
    def test_a_higher_version_of_the_same_content_changes_nothing(self) -> None:
        assert differences(RULES, after()) == {}

    def test_a_changed_host_changes_only_the_apps_that_have_it(self) -> None:
        assert differences(RULES, after(hosts={**RULES.hosts, "b.example": C})) == {"shop": ("b.example",)}

    def test_a_host_given_to_or_taken_from_an_app_is_named(self) -> None:
        apps = {"shop": frozenset({"a.example"}), "bank": frozenset({"b.example", "c.example"})}
        assert differences(RULES, after(apps=apps)) == {"shop": ("b.example",), "bank": ("b.example",)}

    def test_a_gateway_changes_all_of_one_app(self) -> None:
        gateways = {"bank": (Endpoint(host="192.0.2.9", port=443),)}
        assert differences(RULES, after(gateways=gateways)) == {"bank": ()}

    @pytest.mark.parametrize(
        "changes", [{"disabled": ("long",)}, {"report": Endpoint(host="192.0.2.9", port=443)}, {"unit": "u2"}]
    )
    def test_a_switch_changes_all_of_every_app(self, changes: dict[str, Any]) -> None:
        assert differences(RULES, after(**changes)) == {"shop": (), "bank": ()}

    def test_a_new_and_a_removed_app_are_there(self) -> None:
        apps = {"shop": RULES.apps["shop"], "new": frozenset({"c.example"})}
        assert differences(RULES, after(apps=apps)) == {"bank": (), "new": ()}

    def test_an_app_named_like_a_host_is_not_taken_for_it(self) -> None:
        old = RuleSet(version=1, hosts={"shop": A}, apps={"shop": frozenset(), "bank": frozenset({"shop"})})
        new = msgspec.structs.replace(old, version=2, hosts={"shop": B})
        assert differences(old, new) == {"bank": ("shop",)}

    def test_more_hosts_than_a_notice_names_are_any(self) -> None:
        names = [f"h{number}.example" for number in range(limits.PLAN_HOSTS_MAX + 1)]
        old = RuleSet(version=1, hosts=dict.fromkeys(names, A), apps={"shop": frozenset(names)})
        new = msgspec.structs.replace(old, version=2, hosts=dict.fromkeys(names, B))
        assert differences(old, new) == {"shop": ()}


class TestAnnouncements:
    def test_a_change_is_due_once_with_the_version_before(self) -> None:
        announcements = Announcements(RULES)
        assert announcements.changed(RULES, after(hosts={**RULES.hosts, "a.example": C}))
        assert announcements.take() == [PlanChange("shop", 6, 5, ("a.example",))]
        assert announcements.take() == []
        assert announcements.versions() == [PlanChange("shop", 6), PlanChange("bank", 5)]

    def test_two_changes_not_told_yet_are_one_from_before_the_first(self) -> None:
        announcements = Announcements(RULES)
        second = after(hosts={**RULES.hosts, "a.example": C})
        announcements.changed(RULES, second)
        untold = announcements.take()
        announcements.give_back(untold)
        announcements.changed(second, msgspec.structs.replace(second, version=7, hosts=RULES.hosts))
        announcements.touched([Part(host="b.example"), Part(host="unknown.example")])
        assert announcements.take() == [PlanChange("shop", 7, 5, ("a.example", "b.example"))]

    def test_any_stays_any_when_joined(self) -> None:
        announcements = Announcements(RULES)
        second = after(disabled=("long",))
        announcements.changed(RULES, second)
        announcements.changed(second, msgspec.structs.replace(second, version=7, hosts={**RULES.hosts, "a.example": C}))
        assert announcements.take() == [PlanChange("bank", 6, 5, ()), PlanChange("shop", 7, 5, ())]

    def test_the_same_version_for_more_devices_is_told_by_its_hosts(self) -> None:
        announcements = Announcements(RULES)
        candidate = after(hosts={**RULES.hosts, "a.example": C})
        announcements.changed(RULES, candidate)
        announcements.take()
        assert announcements.changed(RULES, candidate)
        assert announcements.take() == [PlanChange("shop", 6, 6, ("a.example",))]

    def test_endpoints_that_stand_otherwise_are_told_under_the_same_version(self) -> None:
        announcements = Announcements(RULES)
        assert announcements.touched([Part(host="c.example")])
        assert not Announcements(RULES).touched([Part(host="unknown.example"), Part(app="unknown")])
        announcements.changed(RULES, after(hosts={**RULES.hosts, "c.example": A}))
        assert announcements.take() == [PlanChange("bank", 6, 5, ("c.example",))]

    def test_gateways_that_stand_otherwise_are_told_to_their_app_alone(self) -> None:
        announcements = Announcements(RULES)
        assert announcements.touched([Part(app="shop")])
        assert announcements.take() == [PlanChange("shop", 5, 5, (GATEWAYS,))]
        announcements.touched([Part(app="shop"), Part(host="b.example")])
        announcements.touched([Part(host="a.example")])
        assert announcements.take() == [PlanChange("shop", 5, 5, (GATEWAYS, "a.example", "b.example"))]

    def test_gateways_of_a_roll_out_that_grows_are_named(self) -> None:
        announcements = Announcements(RULES)
        candidate = after(gateways={"bank": (Endpoint(host="192.0.2.9", port=443),)})
        announcements.changed(RULES, candidate)
        announcements.take()
        assert announcements.changed(RULES, candidate)
        assert announcements.take() == [PlanChange("bank", 6, 6, (GATEWAYS, "c.example"))]

    def test_more_touched_at_once_than_a_notice_names_are_as_many_as_it_names(self) -> None:
        names = [f"h{number:03}.example" for number in range(2 * limits.PLAN_HOSTS_MAX)]
        announcements = Announcements(
            RuleSet(version=5, hosts=dict.fromkeys(names, A), apps={"shop": frozenset(names)})
        )
        announcements.touched(Part(host=name) for name in names[:60])
        announcements.touched(Part(host=name) for name in names[60:])
        [change] = announcements.take()
        assert change == PlanChange("shop", 5, 5, tuple(names[: limits.PLAN_HOSTS_MAX]))

    def test_first_rules_ever_are_told_where_they_are_newer(self) -> None:
        announcements = Announcements(RULES)
        assert not announcements.changed(None, RULES)
        assert announcements.changed(None, after())
        assert announcements.take() == [PlanChange("shop", 6, 5), PlanChange("bank", 6, 5)]

    def test_a_removed_app_is_told_once_and_forgotten(self) -> None:
        announcements = Announcements(RULES)
        announcements.changed(RULES, after(apps={"shop": RULES.apps["shop"]}))
        assert announcements.take() == [PlanChange("bank", 6, 5)]
        assert announcements.versions() == [PlanChange("shop", 5)]


def test_held_rules_tell_each_listener_until_it_ends() -> None:
    held = HeldRules(RULES)
    told: list[tuple[int, int]] = []
    end = held.on_change(lambda old, new: told.append((old.version if old else 0, new.version)))
    held.on_change(lambda old, new: None)
    held.put(after())
    end()
    end()
    held.put(after(version=7))
    assert told == [(5, 6)]
    assert held.current().version == 7
