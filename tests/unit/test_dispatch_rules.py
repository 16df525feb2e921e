"""Rule sets: checked whole before they are used."""

import json

import pytest

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.dispatch import rules
from stormline.dispatch.rules import RuleSet
from stormline.wire.plan import Endpoint, HostPlan

GATEWAY = Endpoint(host="127.0.0.1", port=8702, server_name="gateway.internal", unit="u1")
PLAN = HostPlan(endpoints=(GATEWAY,))
RULES = RuleSet(
    version=3,
    unit="u1",
    hosts={"api.shop.example": PLAN, "img.shop.example": PLAN},
    apps={"shop": frozenset({"api.shop.example", "img.shop.example"}), "bank": frozenset()},
    report=Endpoint(host="127.0.0.1", port=8704, carrier="h1"),
    disabled=("direct",),
)


def test_rules_round_trip_through_their_file() -> None:
    assert rules.decode(rules.encode(RULES)) == RULES
    assert rules.encode(rules.decode(rules.encode(RULES))) == rules.encode(RULES)


def test_check_brings_names_into_their_form() -> None:
    loose = RuleSet(version=1, hosts={"API.Shop.Example.": PLAN}, apps={"shop": frozenset({"Api.shop.example"})})
    checked = rules.check(loose)
    assert set(checked.hosts) == {"api.shop.example"}
    assert checked.apps["shop"] == {"api.shop.example"}


def endpoint(**change: object) -> dict[str, HostPlan]:
    return {"a.example": HostPlan(endpoints=(Endpoint(**({"host": "127.0.0.1", "port": 1} | change)),))}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (RuleSet(version=0), "version"),
        (RuleSet(version=-(10**30)), "version"),
        (RuleSet(version=1, unit="U 1"), "unit"),
        (RuleSet(version=1, hosts={"a.example:443": PLAN}), "a.example:443"),
        (RuleSet(version=1, hosts={"a.example": PLAN, "A.example.": PLAN}), "twice"),
        (RuleSet(version=1, apps={"shop": frozenset({"a.example"})}), "a.example"),
        (RuleSet(version=1, apps={"Shop": frozenset()}), "Shop"),
        (RuleSet(version=1, hosts=endpoint(port=0)), "a.example"),
        (RuleSet(version=1, hosts=endpoint(port=70000)), "a.example"),
        (RuleSet(version=1, hosts=endpoint(host="")), "host"),
        (RuleSet(version=1, hosts=endpoint(host="10.0.0.1:80")), "10.0.0.1:80"),
        (RuleSet(version=1, hosts=endpoint(server_name="*.example")), "*.example"),
        (RuleSet(version=1, hosts=endpoint(unit="no unit")), "no unit"),
        (RuleSet(version=1, hosts=endpoint(weight=-1)), "a.example"),
        (RuleSet(version=1, hosts={"a.example": HostPlan(deadline_s=-1.0)}), "a.example"),
        (RuleSet(version=1, hosts={"a.example": HostPlan(connect_timeout_s=0.0)}), "a.example"),
        (RuleSet(version=1, hosts={"a.example": HostPlan(endpoints=(GATEWAY,) * 101)}), "at most"),
        (RuleSet(version=1, report=Endpoint(host="127.0.0.1", port=0)), "report"),
        (RuleSet(version=1, disabled=("long",) * 101), "at most"),
    ],
)
def test_check_refuses_and_names_what_is_wrong(wrong: RuleSet, named: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        rules.check(wrong)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "stormline-rules/2"},
        {"version": 0},
        {"version": "3"},
        {"hosts": []},
        {"hostz": {}},
        {"apps": {"shop": ["unlisted.example"]}},
        {"unit": "a b"},
    ],
)
def test_decode_refuses_and_names_the_file(change: dict[str, object]) -> None:
    data = json.dumps(json.loads(rules.encode(RULES)) | change).encode()
    with pytest.raises(errors.ConfigError) as caught:
        rules.decode(data, where="/x/rules.json")
    assert "rules" in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b'{"x":' + b"[" * 9999, rules.encode(RULES)[:-9]])
def test_what_is_no_rule_set_is_refused(data: bytes) -> None:
    with pytest.raises(errors.ConfigError, match=r"x\.json: not a rule set"):
        rules.decode(data, where="x.json")


def test_file_over_the_bound_is_refused_unread() -> None:
    with pytest.raises(errors.ConfigError, match="at most"):
        rules.decode(b" " * (limits.RULES_BYTES_MAX + 1))
