"""The verdict of a diagnosis on any evidence: always one, never an error, and nothing said that nothing speaks for."""

from hypothesis import given
from hypothesis import strategies as st

from stormline.core.checks import CheckName, CheckState, Reason
from stormline.policy.diagnosis import Cause, conclude
from stormline.policy.verdict import Confidence, Finding
from stormline.telemetry.diagnosis import Check

ADDRESSES = st.sampled_from(["203.0.113.1", "203.0.113.2", "198.51.100.9", "2001:db8::1"])
WORDS = st.sampled_from([*Reason, *Finding, "absent", "alt-svc", "digest", "redirect", "wifi", "wired", "", "x"])
NUMBERS = st.one_of(st.integers(-(10**400), 10**400), st.floats(), st.sampled_from([0, 8, 200, 407, 511, 503, 0.7]))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, ADDRESSES),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["address", "addresses", "port", "reason", "rtt_s", "finding", "error", "servers", "status", "first_byte_s", "sent",
     "answered", "expected", "refused", "minted", "self_signed", "skew_s", "witnesses", "injected", "proof", "hops",
     "redirects_to", "small_works", "routed", "v6", "denied", "airplane", "signal_dbm", "kind", "fresh", "sources",
     "by_gateway", "role"]
)  # fmt: skip
WILD = st.builds(
    lambda name, state, data: Check(name=name, state=state, data=data),
    st.sampled_from(CheckName),
    st.sampled_from(CheckState),
    st.dictionaries(KEYS, VALUES, max_size=5),
)


@st.composite
def sensible(draw: st.DrawFn) -> Check:
    """Give a check as a diagnosis makes it."""
    name, state = draw(st.sampled_from(CheckName)), draw(st.sampled_from(CheckState))
    shapes = {
        CheckName.INTERFACES: {"kind": st.sampled_from(["wifi", "wired", "cell"]), "denied": st.booleans(),
                               "airplane": st.booleans()},
        CheckName.ROUTES: {"routed": st.sampled_from([True, False, None]), "v6": st.booleans()},
        CheckName.GATEWAY: {"finding": st.sampled_from(Finding)},
        CheckName.DNS_SYSTEM: {"addresses": st.lists(ADDRESSES, max_size=2),
                               "error": st.sampled_from(["", "absent", "failed", "silent"]),
                               "servers": st.lists(st.fixed_dictionaries(
                                   {"finding": st.sampled_from(Finding), "near": st.booleans()}), max_size=2)},
        CheckName.DNS_DOH: {"addresses": st.lists(ADDRESSES, max_size=2)},
        CheckName.DNS_DISPATCH: {"addresses": st.lists(ADDRESSES, max_size=2), "fresh": st.booleans(),
                                 "by_gateway": st.booleans()},
        CheckName.TCP: {"address": ADDRESSES, "reason": st.sampled_from(Reason), "rtt_s": st.floats(0, 2),
                        "role": st.sampled_from(["", "gateway"])},
        CheckName.TLS: {"address": ADDRESSES, "reason": st.sampled_from(Reason), "minted": st.booleans(),
                        "self_signed": st.booleans()},
        CheckName.HTTP: {"status": st.sampled_from([0, 200, 404, 407, 503, 511]), "first_byte_s": st.floats(0, 5)},
        CheckName.CLEAR_HTTP: {"status": st.sampled_from([200, 302, 511]), "injected": st.booleans(),
                               "redirects_to": st.sampled_from(["", "login.test"])},
        CheckName.QUIC: {"sent": st.integers(0, 8), "answered": st.integers(0, 8),
                         "expected": st.sampled_from(["", "alt-svc"])},
        CheckName.CAPTIVE: {"finding": st.sampled_from(Finding)},
        CheckName.CLOCK: {"skew_s": st.floats(-1e6, 1e6), "witnesses": st.integers(0, 3)},
        CheckName.TRACE: {"hops": st.lists(st.fixed_dictionaries(
            {"ttl": st.integers(1, 20), "address": ADDRESSES}), max_size=3)},
        CheckName.MTU: {"small_works": st.booleans()},
    }  # fmt: skip
    data = {key: draw(value) for key, value in shapes.get(name, {}).items()}
    return Check(name=name, state=state, data=data)


def speaks_for(cause: Cause, checks: list[Check]) -> bool:
    """Say whether some check that was made speaks for a verdict at all, written without a look at the rules."""
    made = [each for each in checks if each.state is not CheckState.SKIPPED]

    def any_of(name: CheckName, *states: CheckState) -> bool:
        return any(each.name is name and (not states or each.state in states) for each in made)

    def reasons(name: CheckName, *those: str) -> bool:
        return any(each.name is name and each.data.get("reason") in those for each in made)

    told = {each.name: each.data for each in made}
    return {
        Cause.OK: any_of(CheckName.HTTP, CheckState.OK) or any_of(CheckName.CAPTIVE) or any_of(CheckName.DNS_SYSTEM)
        or any_of(CheckName.DNS_DOH) or any_of(CheckName.DNS_DISPATCH) or any_of(CheckName.TRACE),
        Cause.SLOW: any_of(CheckName.HTTP, CheckState.OK),
        Cause.NO_NETWORK: any_of(CheckName.ROUTES) or reasons(CheckName.TCP, Reason.UNREACHABLE),
        Cause.AIRPLANE: any(each.data.get("airplane") for each in made),
        Cause.PERMISSION: any(each.data.get("denied") for each in made) or reasons(CheckName.TCP, Reason.DENIED),
        Cause.ROUTER_FAULT: any_of(CheckName.GATEWAY),
        Cause.DEAD_WIFI: not any_of(CheckName.HTTP, CheckState.OK),
        Cause.CAPTIVE_PORTAL: any_of(CheckName.CAPTIVE) or any_of(CheckName.CLEAR_HTTP) or any_of(CheckName.TLS)
        or any_of(CheckName.HTTP),
        Cause.DNS_HIJACK: any_of(CheckName.DNS_SYSTEM) or reasons(CheckName.TLS, Reason.WRONG_NAME),
        Cause.DNS_BROKEN: any_of(CheckName.DNS_SYSTEM),
        Cause.TLS_INTERCEPTION: reasons(CheckName.TLS, Reason.UNTRUSTED)
        or reasons(CheckName.TCP, Reason.UNTRUSTED, Reason.WRONG_NAME),
        Cause.INJECTED_PAGE: any_of(CheckName.CLEAR_HTTP, CheckState.BAD),
        Cause.UDP_BLOCKED: any_of(CheckName.QUIC) and any_of(CheckName.HTTP, CheckState.OK),
        Cause.UDP_DEGRADED: any_of(CheckName.QUIC) and any_of(CheckName.HTTP, CheckState.OK),
        Cause.IPV6_BROKEN: any(":" in str(each.data.get("address", "")) for each in made),
        Cause.CLOCK_WRONG: "skew_s" in told.get(CheckName.CLOCK, {})
        or reasons(CheckName.TLS, Reason.EXPIRED, Reason.NOT_YET_VALID),
        Cause.MTU_BLACKHOLE: any_of(CheckName.MTU, CheckState.BAD),
        Cause.PROXY_FAULT: any_of(CheckName.PROXY, CheckState.BAD) or any_of(CheckName.HTTP),
        Cause.SERVER_SIDE: any_of(CheckName.TCP) or any_of(CheckName.TLS) or any_of(CheckName.HTTP)
        or any_of(CheckName.DNS_SYSTEM),
        Cause.UNKNOWN: True,
    }[cause]  # fmt: skip


@given(st.lists(WILD, max_size=8))
def test_any_checks_give_a_verdict_with_a_hint_and_a_reason(checks: list[Check]) -> None:
    said = conclude(checks)
    assert said.cause in Cause
    assert said.hint
    assert said.why


@given(st.lists(sensible(), max_size=8), st.data())
def test_verdict_is_never_said_without_evidence_also_with_checks_taken_away(
    checks: list[Check], data: st.DataObject
) -> None:
    left = list(checks)
    while True:
        said = conclude(left)
        assert speaks_for(said.cause, left), (said, left)
        if not left:
            break
        left.pop(data.draw(st.integers(0, len(left) - 1)))
    assert said.cause is Cause.UNKNOWN
    assert said.confidence is Confidence.LOW


@given(st.lists(sensible(), max_size=8))
def test_skipped_checks_say_nothing(checks: list[Check]) -> None:
    made = [each for each in checks if each.state is not CheckState.SKIPPED]
    assert conclude(checks) == conclude(made)


@given(st.lists(sensible(), max_size=8))
def test_answer_of_the_origin_is_never_explained_away_by_a_dead_network(checks: list[Check]) -> None:
    others = [each for each in checks if each.name is not CheckName.HTTP]
    answered = Check(name=CheckName.HTTP, state=CheckState.OK, data={"status": 200, "first_byte_s": 0.1})
    dead = {
        Cause.NO_NETWORK,
        Cause.AIRPLANE,
        Cause.PERMISSION,
        Cause.ROUTER_FAULT,
        Cause.DEAD_WIFI,
        Cause.MTU_BLACKHOLE,
    }
    assert conclude([*others, answered]).cause not in dead


@given(st.lists(sensible(), max_size=8), st.sampled_from(["absent", "failed", "silent", ""]))
def test_whether_the_name_is_there_changes_nothing_where_gateways_serve_the_host(
    checks: list[Check], error: str
) -> None:
    own = {CheckName.DNS_SYSTEM, CheckName.DNS_DOH, CheckName.TCP, CheckName.TLS, CheckName.HTTP, CheckName.PROXY,
           CheckName.DNS_DISPATCH}  # fmt: skip
    served = [
        *(each for each in checks if each.name not in own),
        Check(name=CheckName.DNS_DISPATCH, state=CheckState.OK, data={"fresh": True, "by_gateway": True}),
        Check(name=CheckName.TCP, state=CheckState.OK, data={"address": "203.0.113.9", "port": 443, "role": "gateway"}),
    ]
    name = Check(name=CheckName.DNS_SYSTEM, state=CheckState.BAD, data={"addresses": [], "error": error})
    said = conclude([*served, name])
    assert said.cause is conclude(served).cause
    assert said.cause in (Cause.OK, Cause.CAPTIVE_PORTAL, Cause.PERMISSION)
