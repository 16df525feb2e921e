"""What differs, and what follows where settings and an operator both changed."""

import msgspec

from stormline.dispatch import compare, rules
from stormline.dispatch.compare import Difference
from stormline.dispatch.rules import RuleSet
from stormline.wire.plan import Endpoint, HostPlan


def _host(port: int) -> HostPlan:
    return HostPlan(endpoints=(Endpoint(host="192.0.2.1", port=port),))


BASE = rules.check(
    RuleSet(version=3, hosts={"a.example": _host(1), "b.example": _host(2)}, apps={"shop": frozenset({"a.example"})})
)


def _with(version: int = 3, **change: object) -> RuleSet:
    return msgspec.structs.replace(BASE, version=version, **change)  # type: ignore[arg-type]


def test_content_says_nothing_of_the_version() -> None:
    assert compare.content(BASE) == compare.content(_with(9))
    assert compare.content(BASE) != compare.content(_with(disabled=("long",)))


def test_diff_of_equal_rules_is_empty() -> None:
    assert compare.diff(BASE, _with(9)).count == 0


def test_diff_names_each_value() -> None:
    new = _with(
        hosts={"a.example": _host(5), "c.example": _host(3)},
        apps={"shop": frozenset({"a.example", "c.example"})},
        disabled=("long",),
    )
    found = compare.diff(BASE, new)
    assert found.count == len(found.listed) == 5
    assert Difference("hosts/a.example/endpoints/0/port", "1", "5") in found.listed
    assert Difference("apps/shop/-", None, '"c.example"') in found.listed
    assert Difference("disabled/-", None, '"long"') in found.listed
    gone = next(each for each in found.listed if each.path == "hosts/b.example")
    assert gone.after is None


def test_diff_lists_a_bounded_number_and_counts_all() -> None:
    many = {f"h{n}.example": _host(1) for n in range(1500)}
    found = compare.diff(BASE, _with(hosts={**BASE.hosts, **many}))
    assert (found.count, len(found.listed)) == (1500, 1000)


def test_changed_hosts_are_new_and_other_ones() -> None:
    new = _with(hosts={"a.example": _host(1), "b.example": _host(9), "c.example": _host(3)})
    assert compare.changed_hosts(BASE, new) == ["b.example", "c.example"]


class TestMerge:
    def test_merge_untouched_entries_follow_the_settings(self) -> None:
        settings = _with(hosts={"a.example": _host(7), "c.example": _host(3)}, report=Endpoint(host="::1", port=5))
        merged = compare.merge(BASE, settings, BASE)
        assert merged == settings

    def test_merge_an_operators_entry_stays(self) -> None:
        ours = _with(9, hosts={"a.example": _host(40), "b.example": _host(2), "own.example": _host(1)})
        settings = _with(hosts={"a.example": _host(7), "b.example": _host(8)})
        merged = compare.merge(BASE, settings, ours)
        assert merged.hosts == {"a.example": _host(40), "b.example": _host(8), "own.example": _host(1)}
        assert merged.version == 9

    def test_merge_adds_to_and_takes_from_the_hosts_of_an_app(self) -> None:
        ours = _with(apps={"shop": frozenset({"a.example", "own.example"})})
        settings = _with(apps={"shop": frozenset({"b.example"})})
        assert compare.merge(BASE, settings, ours).apps == {"shop": frozenset({"own.example", "b.example"})}

    def test_merge_what_the_operator_removed_stays_away(self) -> None:
        ours = _with(hosts={"b.example": _host(2)})
        settings = _with(hosts={"a.example": _host(7), "b.example": _host(2)})
        assert compare.merge(BASE, settings, ours).hosts == {"b.example": _host(2)}

    def test_merge_of_unchanged_settings_is_what_holds(self) -> None:
        ours = _with(disabled=("long",))
        assert compare.merge(BASE, BASE, ours) == ours
