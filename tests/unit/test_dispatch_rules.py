"""Rule sets: checked whole before they are used."""

import json

import msgspec
import pytest

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.dispatch import rules
from stormline.dispatch.rules import Homes, Network, Region, RuleSet
from stormline.wire.plan import Endpoint, HostPlan, PathPlan, Policy

GATEWAY = Endpoint(host="127.0.0.1", port=8702, server_name="gateway.internal", unit="u1")
PLAN = HostPlan(endpoints=(GATEWAY,))
RULES = RuleSet(
    version=3,
    unit="u1",
    hosts={"api.shop.example": PLAN, "img.shop.example": PLAN},
    apps={"shop": frozenset({"api.shop.example", "img.shop.example"}), "bank": frozenset()},
    report=Endpoint(host="127.0.0.1", port=8704, carrier="h1"),
    disabled=("direct",),
    preload={"shop": ("api.shop.example",)},
    regions={"eu": Region(unit="u1", countries=frozenset({"DE", "AT"}))},
    networks={"10.0.0.0/8": Network(region="eu", operator="tele"), "2001:db8::/32": Network()},
    operators={"tele": frozenset({64500})},
    homes=Homes(epoch=2, units={"u1": 1}, moved={"ann": "u1"}),
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


def policy(**change: object) -> dict[str, HostPlan]:
    return {"a.example": HostPlan(endpoints=(GATEWAY,), policy=Policy(**change))}  # type: ignore[arg-type]


def path(**change: object) -> dict[str, HostPlan]:
    return {"a.example": HostPlan(endpoints=(GATEWAY,), paths=(PathPlan(**change),))}  # type: ignore[arg-type]


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
        (RuleSet(version=1, disabled=("lonng",)), "'lonng'"),
        (RuleSet(version=1, hosts={"a.example": HostPlan()}), "no endpoint with a weight"),
        (RuleSet(version=1, hosts=endpoint(weight=0)), "no endpoint with a weight"),
        (RuleSet(version=1, hosts={"a.example": HostPlan(endpoints=(GATEWAY,), dns=True)}), "which of the two"),
        (RuleSet(version=1, hosts=endpoint(carrier="h4")), "'a.example': endpoint 1: carrier 'h4'"),
        (RuleSet(version=1, hosts=endpoint(role="boss")), "role 'boss'"),
        (RuleSet(version=1, hosts=endpoint(region="eu")), "region 'eu'"),
        (RuleSet(version=1, hosts={"a.example": HostPlan(endpoints=(GATEWAY,), ttl_s=1)}), "ttl_s 1"),
        (RuleSet(version=1, hosts=policy(preset="fast")), "'a.example': policy: preset 'fast'"),
        (RuleSet(version=1, hosts=policy(order=("direct", "magic"))), "'magic' is no means"),
        (RuleSet(version=1, hosts=policy(tries={"magic": 1})), "'magic' is no means"),
        (RuleSet(version=1, hosts=policy(tries={"direct": -1})), "a.example"),
        (RuleSet(version=1, hosts=policy(urgency=8)), "a.example"),
        (RuleSet(version=1, hosts=policy(disabled=("magic",))), "'magic' cannot be disabled"),
        (RuleSet(version=1, hosts=path(path="orders")), "path 1 ('orders')"),
        (RuleSet(version=1, hosts=path(path="/**", policy=Policy(preset="x"))), "path 1 ('/**'): preset 'x'"),
        (RuleSet(version=1, hosts=path(business="x" * 4000)), "as JSON"),
        (RuleSet(version=1, hosts={"a.example": PLAN}, preload={"shop": ("a.example",)}), "preload of app 'shop'"),
        (RuleSet(version=1, regions={"eu": Region(near=("us",))}), "near 'us'"),
        (
            RuleSet(version=1, regions={name: Region(countries=frozenset({"DE"})) for name in ("a", "b")}),
            "country 'DE' is in 'a' too",
        ),
        (RuleSet(version=1, networks={"10.0.0.1/8": Network()}), "'10.0.0.1/8'"),
        (RuleSet(version=1, networks={"10.0.0.0/8": Network(region="eu")}), "network '10.0.0.0/8': region 'eu'"),
        (RuleSet(version=1, networks={"10.0.0.0/8": Network(), "10.0.0.0/255.0.0.0": Network()}), "twice"),
        (RuleSet(version=1, operators={"No": frozenset({1})}), "operator"),
        (RuleSet(version=1, homes=Homes(units={"u1": 0})), "homes"),
        (RuleSet(version=1, homes=Homes(units={"u1": 1}, moved={"ann": "U 2"})), "homes"),
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


def test_host_whose_rule_cannot_be_read_is_named() -> None:
    data = json.loads(rules.encode(RULES))
    data["hosts"]["img.shop.example"]["endpoints"][0]["weight"] = "many"
    with pytest.raises(errors.ConfigError, match=r"host 'img\.shop\.example': .*weight"):
        rules.decode(json.dumps(data).encode())


def test_equal_endpoints_of_many_hosts_become_one_object() -> None:
    read = rules.decode(rules.encode(RULES)).hosts
    assert read["api.shop.example"].endpoints[0] is read["img.shop.example"].endpoints[0]


def test_checking_what_is_checked_copies_no_host() -> None:
    once = rules.decode(rules.encode(RULES))
    again = rules.check(once)
    assert all(again.hosts[host] is once.hosts[host] for host in once.hosts)


def test_a_hundred_thousand_hosts_are_read() -> None:
    hosts = {f"h{n}.example": HostPlan(endpoints=(GATEWAY,), ttl_s=60) for n in range(100_000)}
    read = rules.decode(msgspec.json.encode(RuleSet(version=1, hosts=hosts, apps={"shop": frozenset(hosts)})))
    assert (len(read.hosts), len(read.apps["shop"])) == (100_000, 100_000)
