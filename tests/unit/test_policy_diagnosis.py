"""Each verdict of a diagnosis from the evidence that tells it, and what keeps it from being sure."""

from typing import Any

import pytest

from stormline.core.checks import CheckName, CheckState, Reason
from stormline.policy.diagnosis import Cause, conclude
from stormline.policy.hints import HINTS
from stormline.telemetry.diagnosis import Check

OK, BAD, UNKNOWN, SKIPPED = CheckState
TRUE, FALSE = "203.0.113.10", "198.51.100.66"
V6 = "2001:db8::10"


def check(name: CheckName, state: CheckState = OK, **data: Any) -> Check:
    return Check(name=name, state=state, data=data)


def interfaces(**data: Any) -> Check:
    return check(CheckName.INTERFACES, kind="wifi", **data)


def routes(**data: Any) -> Check:
    return check(CheckName.ROUTES, **{"routed": True, "v4": True, "v6": True, **data})


def system(*addresses: str, error: str = "", servers: Any = ()) -> Check:
    return check(
        CheckName.DNS_SYSTEM, OK if addresses else BAD, addresses=list(addresses), error=error, servers=list(servers)
    )


def doh(*addresses: str, error: str = "") -> Check:
    state = OK if addresses or error == "absent" else BAD
    return check(CheckName.DNS_DOH, state, addresses=list(addresses), error=error)


def tcp(address: str = TRUE, reason: str = "", rtt_s: float = 0.02) -> Check:
    return check(CheckName.TCP, BAD if reason else OK, address=address, port=443, reason=reason, rtt_s=rtt_s)


def tls(address: str = TRUE, reason: str = "", **data: Any) -> Check:
    return check(CheckName.TLS, BAD if reason else OK, address=address, port=443, reason=reason, **data)


def http(state: CheckState = OK, **data: Any) -> Check:
    return check(CheckName.HTTP, state, **{"status": 200, "first_byte_s": 0.05, **data})


def quic(sent: int, answered: int, **data: Any) -> Check:
    told = {"address": TRUE, "expected": "alt-svc", "rtt_s": 0.02 if answered else None, **data}
    return check(CheckName.QUIC, sent=sent, answered=answered, **told)


def captive(finding: str) -> Check:
    return check(CheckName.CAPTIVE, BAD if finding == "foreign" else OK, finding=finding)


def gateway(finding: str) -> Check:
    return check(CheckName.GATEWAY, finding=finding)


def clock(skew_s: float, witnesses: int = 1) -> Check:
    return check(CheckName.CLOCK, BAD if abs(skew_s) >= 300 else OK, skew_s=skew_s, witnesses=witnesses)


def by_gateways(*reasons: str, fresh: bool = True) -> tuple[Check, ...]:
    """Give what is found of a host that the plan names gateways for, and no address; why each did not answer."""
    plan = check(CheckName.DNS_DISPATCH, OK if fresh else BAD, addresses=[], fresh=fresh, by_gateway=True)
    knocks = (
        check(CheckName.TCP, BAD if reason else OK, address=f"192.0.2.{number}", role="gateway", reason=reason)
        for number, reason in enumerate(reasons, 1)
    )
    return (*HERE, NO_ANSWER, system(error="absent"), plan, *knocks)


HERE = (interfaces(), routes())
WELL = (*HERE, system(TRUE), tcp(), tls(), http())
OPEN = captive("answered")
NO_ANSWER = check(CheckName.HTTP, SKIPPED)
SILENT_SERVER = {"server": "192.0.2.53", "finding": "silent", "near": False}

CASES = {
    "all is well": (WELL, Cause.OK, "high"),
    "nothing was looked at": ((), Cause.UNKNOWN, "low"),
    "denied by the system": ((interfaces(denied=True), routes(routed=False)), Cause.PERMISSION, "high"),
    "denied to each address": ((*HERE, tcp(reason=Reason.DENIED), NO_ANSWER), Cause.PERMISSION, "high"),
    "no route": ((interfaces(), routes(routed=False)), Cause.NO_NETWORK, "high"),
    "radios off": ((interfaces(airplane=True), routes(routed=False)), Cause.AIRPLANE, "high"),
    "no route, and the machine itself refuses": (
        (interfaces(), routes(routed=False), tcp("127.0.0.1", Reason.REFUSED), NO_ANSWER), Cause.SERVER_SIDE, "low"),
    "portal": ((*HERE, captive("foreign"), tcp(), tls(reason=Reason.WRONG_NAME)), Cause.CAPTIVE_PORTAL, "high"),
    "portal that lets the origin through": ((*WELL, captive("foreign")), Cause.CAPTIVE_PORTAL, "low"),
    "status 511 in clear": (
        (*HERE, tcp(), tls(reason=Reason.WRONG_NAME), check(CheckName.CLEAR_HTTP, BAD, status=511)),
        Cause.CAPTIVE_PORTAL, "high"),
    "stranger, and clear HTTP leads elsewhere": (
        (*HERE, tcp(), tls(reason=Reason.WRONG_NAME), check(CheckName.CLEAR_HTTP, OK, redirects_to="login.test")),
        Cause.CAPTIVE_PORTAL, "low"),
    "nothing at 443, and clear HTTP leads elsewhere": (
        (*HERE, tcp(reason=Reason.SILENT), check(CheckName.CLEAR_HTTP, OK, redirects_to="login.test")),
        Cause.CAPTIVE_PORTAL, "low"),
    "a page in clear HTTP that has moved": (
        (*HERE, tcp(), http(status=301), check(CheckName.CLEAR_HTTP, UNKNOWN, redirects_to="new.test")),
        Cause.OK, "high"),
    "hijack": (
        (*HERE, system(FALSE), doh(TRUE), tcp(FALSE), tls(FALSE, Reason.WRONG_NAME), tcp(), tls(), http()),
        Cause.DNS_HIJACK, "high"),
    "the system's addresses are dead, another's are good": (
        (*HERE, system(FALSE), doh(TRUE), tcp(FALSE, Reason.SILENT), tcp(), tls(), http()), Cause.DNS_HIJACK, "low"),
    "sources differ, and all are genuine": (
        (*HERE, system(TRUE), doh(FALSE), tcp(), tls(), tcp(FALSE), tls(FALSE), http()), Cause.OK, "high"),
    "no address, another source's answers": (
        (*HERE, system(error="failed"), doh(TRUE), tcp(), tls(), http()), Cause.DNS_BROKEN, "high"),
    "no name server answers, the network is open": (
        (*HERE, system(error="silent", servers=[SILENT_SERVER]), OPEN, NO_ANSWER), Cause.DNS_BROKEN, "high"),
    "a name server is alive and silent": (
        (*HERE, system(error="silent", servers=[{**SILENT_SERVER, "echo": True}]), NO_ANSWER),
        Cause.DNS_BROKEN, "high"),
    "nobody knows the name": ((*HERE, system(error="absent"), doh(error="absent")), Cause.SERVER_SIDE, "high"),
    "the system alone knows no such name": ((*HERE, system(error="absent")), Cause.SERVER_SIDE, "low"),
    "dead proxy": ((*HERE, check(CheckName.PROXY, BAD), http(BAD, status=0)), Cause.PROXY_FAULT, "high"),
    "an origin that is not reached through its proxy": (
        (*HERE, check(CheckName.PROXY, OK), http(BAD, status=0)), Cause.SERVER_SIDE, "low"),
    "a minted certificate": (
        (*HERE, system(TRUE), tcp(), tls(reason=Reason.UNTRUSTED, minted=True)), Cause.TLS_INTERCEPTION, "high"),
    "an unknown issuer": ((*HERE, system(TRUE), tcp(), tls(reason=Reason.UNTRUSTED)), Cause.TLS_INTERCEPTION, "low"),
    "a certificate that nobody signed": (
        (*HERE, tcp(), tls(reason=Reason.UNTRUSTED, self_signed=True)), Cause.SERVER_SIDE, "low"),
    "our clock is behind": (
        (*HERE, tcp(), tls(reason=Reason.NOT_YET_VALID), clock(-86400)), Cause.CLOCK_WRONG, "high"),
    "its certificate has expired": ((*HERE, tcp(), tls(reason=Reason.EXPIRED), clock(1.0)), Cause.SERVER_SIDE, "high"),
    "two servers say that our clock is off": ((*WELL, clock(4000, 2)), Cause.CLOCK_WRONG, "high"),
    "one server says that our clock is off": ((*WELL, clock(4000, 1)), Cause.CLOCK_WRONG, "low"),
    "only small packets pass": (
        (*HERE, tcp(), tls(reason=Reason.SILENT), check(CheckName.MTU, BAD, small_works=True)),
        Cause.MTU_BLACKHOLE, "high"),
    "a stranger, no portal": (
        (*HERE, system(TRUE), OPEN, tcp(), tls(reason=Reason.WRONG_NAME)), Cause.DNS_HIJACK, "low"),
    "a stranger at the address that all give": (
        (*HERE, system(TRUE), doh(TRUE), tcp(), tls(reason=Reason.WRONG_NAME)), Cause.SERVER_SIDE, "low"),
    "injected redirect of a clear page": (
        (*HERE, tcp(), http(status=302),
         check(CheckName.CLEAR_HTTP, BAD, injected=True, proof="redirect", redirects_to="ads.test")),
        Cause.INJECTED_PAGE, "high"),
    "injected by digest": (
        (*WELL, check(CheckName.CLEAR_HTTP, BAD, injected=True, proof="digest")), Cause.INJECTED_PAGE, "high"),
    "another page than over TLS": (
        (*WELL, check(CheckName.CLEAR_HTTP, BAD, injected=True, proof="content")), Cause.INJECTED_PAGE, "low"),
    "silent IPv6": ((*WELL, tcp(V6, Reason.SILENT)), Cause.IPV6_BROKEN, "high"),
    "silent IPv6 on a slow network": (
        (*HERE, tcp(rtt_s=0.7), tls(), http(), tcp(V6, Reason.SILENT)), Cause.IPV6_BROKEN, "low"),
    "no IPv6 at all": ((*HERE, tcp(), tls(), http(), check(CheckName.TCP, SKIPPED, address=V6)), Cause.OK, "high"),
    "UDP blocked": ((*WELL, quic(8, 0)), Cause.UDP_BLOCKED, "high"),
    "UDP blocked, hardly asked": ((*WELL, quic(3, 0)), Cause.UDP_BLOCKED, "low"),
    "no QUIC, and nobody said so": ((*WELL, quic(8, 0, expected="")), Cause.OK, "high"),
    "QUIC refused by the machine": ((*WELL, quic(1, 0, refused=True)), Cause.OK, "high"),
    "UDP loses": ((*WELL, quic(8, 2)), Cause.UDP_DEGRADED, "high"),
    "UDP loses a little": ((*WELL, quic(8, 5)), Cause.OK, "high"),
    "UDP is late": ((*WELL, quic(8, 8, rtt_s=0.9)), Cause.UDP_DEGRADED, "low"),
    "UDP loses on a slow network": ((*HERE, tcp(rtt_s=0.7), tls(), http(), quic(8, 1)), Cause.SLOW, "high"),
    "slow": ((*HERE, tcp(rtt_s=0.7), tls(), http(first_byte_s=0.8)), Cause.SLOW, "high"),
    "a server that takes its time": ((*HERE, tcp(), tls(), http(first_byte_s=3.0)), Cause.SERVER_SIDE, "low"),
    "status 503": ((*HERE, tcp(), tls(), http(BAD, status=503)), Cause.SERVER_SIDE, "high"),
    "refused while others answer": ((*HERE, OPEN, tcp(reason=Reason.REFUSED), NO_ANSWER), Cause.SERVER_SIDE, "high"),
    "silent while others answer": ((*HERE, OPEN, tcp(reason=Reason.SILENT), NO_ANSWER), Cause.SERVER_SIDE, "high"),
    "silent, routers answer": (
        (*HERE, tcp(reason=Reason.SILENT), check(CheckName.TRACE, UNKNOWN, hops=[{"ttl": 3, "address": "192.0.2.9"}])),
        Cause.SERVER_SIDE, "low"),
    "cut in the handshake": ((*HERE, tcp(), tls(reason=Reason.CUT)), Cause.SERVER_SIDE, "low"),
    "by gateways, which answer": (by_gateways("", Reason.SILENT), Cause.OK, "high"),
    "by gateways, which answer, without a plan of now": (by_gateways("", fresh=False), Cause.OK, "high"),
    "by gateways, which refuse": (by_gateways(Reason.REFUSED, Reason.SILENT), Cause.SERVER_SIDE, "high"),
    "by gateways, which refuse, and nobody else was heard": (
        by_gateways(Reason.REFUSED, fresh=False), Cause.SERVER_SIDE, "low"),
    "by gateways, which are silent": (by_gateways(Reason.SILENT), Cause.SERVER_SIDE, "high"),
    "by gateways, and nobody is heard": (by_gateways(Reason.SILENT, fresh=False), Cause.DEAD_WIFI, "high"),
    "by gateways, which do not finish TLS": (by_gateways(Reason.CUT), Cause.SERVER_SIDE, "low"),
    "by gateways, in whose place is a stranger": (by_gateways(Reason.UNTRUSTED), Cause.TLS_INTERCEPTION, "low"),
    "by gateways that were not tried": (by_gateways(), Cause.SERVER_SIDE, "low"),
    "by gateways, and the name leads to a stranger": (
        (*(each for each in by_gateways("") if each.name != CheckName.DNS_SYSTEM), OPEN, system(FALSE), tcp(FALSE),
         tls(FALSE, Reason.WRONG_NAME)), Cause.DNS_HIJACK, "low"),
    "the router is silent": (
        (check(CheckName.INTERFACES, kind="wired"), routes(), gateway("silent"), tcp(reason=Reason.SILENT)),
        Cause.ROUTER_FAULT, "high"),
    "the router is silent, far away": (
        (interfaces(signal_dbm=-88), routes(), gateway("silent"), tcp(reason=Reason.SILENT)), Cause.DEAD_WIFI, "low"),
    "nothing beyond the router": (
        (*HERE, gateway("answered"), system(TRUE, servers=[SILENT_SERVER]), tcp(reason=Reason.SILENT), NO_ANSWER),
        Cause.DEAD_WIFI, "high"),
    "one thing is silent beyond the router": (
        (*HERE, gateway("answered"), tcp(reason=Reason.SILENT), NO_ANSWER), Cause.DEAD_WIFI, "low"),
    "the network alone, open": ((*HERE, OPEN), Cause.OK, "high"),
    "the network alone, a name server answers": (
        (*HERE, check(CheckName.DNS_SYSTEM, OK, servers=[{**SILENT_SERVER, "finding": "answered"}])), Cause.OK, "low"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_evidence_gives_its_verdict(case: str) -> None:
    checks, cause, confidence = CASES[case]
    said = conclude(checks)
    assert (said.cause, said.confidence) == (cause, confidence), said.why
    assert said.hint.endswith(".")
    assert said.why


def test_order_of_checks_does_not_matter() -> None:
    for checks, cause, _ in CASES.values():
        assert conclude(tuple(reversed(checks))).cause == cause


def test_every_cause_is_told_by_some_evidence_and_has_one_hint() -> None:
    assert {cause for _, cause, _ in CASES.values()} == set(Cause)
    hints = {conclude(checks).hint for checks, _, _ in CASES.values()}
    assert len(hints) >= len(Cause)  # some have a text for the kind of network too
    assert hints <= set(HINTS.values())
