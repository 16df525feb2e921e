"""From question and rules to the answer."""

import msgspec
import pytest

from stormline.core import errors, limits
from stormline.dispatch import planner
from stormline.dispatch.rules import Homes, RuleSet, check
from stormline.wire.plan import Endpoint, HostPlan, PlanRequest

NOW = 1_800_000_000.75
SHOP = HostPlan(endpoints=(Endpoint(host="127.0.0.1", port=8702),), deadline_s=9.0)
BANK = HostPlan(endpoints=(Endpoint(host="127.0.0.2", port=8702),))
RULES = check(
    RuleSet(
        version=5,
        unit="u1",
        hosts={"api.shop.example": SHOP, "api.bank.example": BANK},
        apps={"shop": frozenset({"api.shop.example"}), "bank": frozenset({"api.bank.example"})},
        report=Endpoint(host="127.0.0.1", port=8704, carrier="h1"),
        disabled=("direct",),
    )
)


def ask(*hosts: str, app: str = "shop") -> PlanRequest:
    return PlanRequest(app=app, hosts=hosts)


def refusal(request: PlanRequest) -> errors.RequestRefused:
    with pytest.raises(errors.RequestRefused) as caught:
        planner.plan_for(request, RULES, NOW)
    return caught.value


def test_known_host_gets_its_plan_and_an_unknown_one_is_named() -> None:
    plan = planner.plan_for(ask("api.shop.example", "www.else.example"), RULES, NOW)
    assert plan.hosts == {"api.shop.example": SHOP}
    assert plan.unknown == ("www.else.example",)


def test_plan_says_for_whom_from_whom_and_until_when() -> None:
    plan = planner.plan_for(ask(), RULES, NOW)
    assert (plan.app, plan.unit, plan.version) == ("shop", "u1", 5)
    assert plan.issued_at == int(NOW)
    assert plan.expires_at == int(NOW) + limits.PLAN_LIFE_S
    assert plan.report == RULES.report
    assert plan.disabled == ("direct",)


def test_host_of_another_app_is_unknown() -> None:
    plan = planner.plan_for(ask("api.bank.example"), RULES, NOW)
    assert (plan.hosts, plan.unknown) == ({}, ("api.bank.example",))


def test_hosts_are_answered_in_their_normal_form_once() -> None:
    plan = planner.plan_for(ask("API.shop.example.", "api.shop.example", "B.example", "b.example."), RULES, NOW)
    assert (set(plan.hosts), plan.unknown) == ({"api.shop.example"}, ("b.example",))


def test_order_of_the_question_does_not_matter() -> None:
    hosts = ("b.example", "api.shop.example", "a.example")
    assert planner.plan_for(ask(*hosts), RULES, NOW) == planner.plan_for(ask(*hosts[::-1]), RULES, NOW)


@pytest.mark.parametrize("app", ["", "unknown", "Shop", "\n"])
def test_unknown_app_is_refused(app: str) -> None:
    assert refusal(ask("a.example", app=app)).code == "app-unknown"


@pytest.mark.parametrize("host", ["", "a.example:443", "https://a.example", "münchen.de", "xn--", "a b"])
def test_bad_host_is_refused_and_quoted(host: str) -> None:
    error = refusal(ask("api.shop.example", host))
    assert error.code == "bad-host"
    assert repr(host) in str(error)


def test_too_many_hosts_are_refused() -> None:
    most = tuple(f"h{n}.example" for n in range(limits.PLAN_HOSTS_MAX))
    assert len(planner.plan_for(ask(*most), RULES, NOW).unknown) == limits.PLAN_HOSTS_MAX
    assert refusal(ask(*most, "one.more.example")).code == "too-many-hosts"


def test_largest_answer_fits_the_clients_bound() -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from stormline.wire import plan as wire_plan

    hosts = [f"{n:03}." + ".".join(["a" * 60] * 4) for n in range(limits.PLAN_HOSTS_MAX)]
    endpoint = Endpoint(host="2001:db8::1:2:3:4", port=65535, server_name="gateway.stormline.test", unit="u" * 32)
    rules = check(
        RuleSet(
            version=1,
            hosts={host: HostPlan(endpoints=(endpoint,) * 20) for host in hosts},
            apps={"shop": frozenset(hosts)},
        )
    )
    text = wire_plan.sign(
        planner.plan_for(ask(*hosts), rules, NOW), key=Ed25519PrivateKey.from_private_bytes(bytes(32)), kid="k"
    )
    assert len(text) <= limits.PLAN_BYTES_MAX


def with_rules(**change: object) -> RuleSet:
    return check(msgspec.structs.replace(RULES, **change))


def test_preload_is_answered_unasked_as_far_as_there_is_room() -> None:
    rules = with_rules(preload={"shop": ("api.shop.example",)})
    assert set(planner.plan_for(ask("b.example"), rules, NOW).hosts) == {"api.shop.example"}
    full = planner.plan_for(ask(*(f"h{n}.example" for n in range(limits.PLAN_HOSTS_MAX))), rules, NOW)
    assert (len(full.hosts), len(full.unknown)) == (0, limits.PLAN_HOSTS_MAX)


def test_shortest_life_of_a_host_is_that_of_the_plan() -> None:
    rules = with_rules(hosts={**RULES.hosts, "api.shop.example": msgspec.structs.replace(SHOP, ttl_s=60)})
    assert planner.plan_for(ask("api.shop.example"), rules, NOW).expires_at == int(NOW) + 60
    assert planner.plan_for(ask("b.example"), rules, NOW).expires_at == int(NOW) + limits.PLAN_LIFE_S


def test_everything_to_dns_names_no_endpoint_to_any_client() -> None:
    rules = with_rules(dns_only=True, gateways={"shop": SHOP.endpoints}, preload={"shop": ("api.shop.example",)})
    plan = planner.plan_for(ask("api.shop.example", "b.example"), rules, NOW)
    assert (plan.dns_only, plan.hosts, plan.gateways) == (True, {}, ())
    assert plan.unknown == ("api.shop.example", "b.example")


def test_carrier_that_is_off_is_left_out() -> None:
    h3 = Endpoint(host="127.0.0.1", port=443, carrier="h3")
    rules = with_rules(
        disabled=("h3",), hosts={**RULES.hosts, "api.shop.example": HostPlan(endpoints=(h3, *SHOP.endpoints))}
    )
    assert planner.plan_for(ask("api.shop.example"), rules, NOW).hosts["api.shop.example"].endpoints == SHOP.endpoints


def test_push_devices_are_placed_on_push_gateways() -> None:
    push = Endpoint(host="127.0.0.9", port=8702, role="push")
    rules = with_rules(gateways={"shop": (*SHOP.endpoints, push)})
    assert planner.plan_for(ask(), rules, NOW).gateways == SHOP.endpoints
    assert planner.plan_for(PlanRequest(app="shop", hosts=(), role="push"), rules, NOW).gateways == (push,)


def test_home_is_by_hash_unless_the_user_was_moved() -> None:
    rules = with_rules(homes=Homes(epoch=3, units={"u1": 1, "u2": 1}, moved={"ann": "u9"}))
    moved = planner.home_for("shop", "ann", rules, NOW)
    assert moved is not None
    assert (moved.unit, moved.epoch, moved.user) == ("u9", 3, "ann")
    homes = [planner.home_for("shop", f"u{n}", rules, NOW) for n in range(50)]
    assert {home.unit for home in homes if home is not None} == {"u1", "u2"}
    assert planner.home_for("shop", "", rules, NOW) is None
    assert planner.home_for("shop", "ann", RULES, NOW) is None
