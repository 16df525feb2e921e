"""From what a diagnosis found to one verdict in words. Pure.

`conclude` reads checks and gives the first of these that the evidence carries, in this order:

 1. permission       the system lets this program use no network
 2. airplane, no_network   there is no way out, and nothing answered without one
 3. captive_portal   a page of the network's came where the open network would have said "open", or status 511
 4. by gateways      the plan names gateways and no address: whether they answer decides, a missing name does not
 5. dns_hijack       the system and another source give different addresses; only the other's show the certificate
 6. dns_broken       the system gives no address, while others have one or the rest of the network works
 7. proxy_fault      requests go by a proxy, and that takes none
 8. tls_interception nobody shows a trusted certificate, somebody one for the right name from an unknown issuer
 9. clock_wrong      certificates out of their time, or a server's clock far from ours
10. mtu_blackhole    what was silent answers as soon as packets are small
11. strangers        a certificate for another name: a hijack, a portal or a server, by what else is known
12. injected_page    a page in clear HTTP is not what it should be
13. ipv6_broken, udp_blocked, udp_degraded, slow, ok   the origin answered: what of the way there is bad
14. server_side      the network works and the server does not: it refuses, fails, or is the only one that is silent
15. router_fault, dead_wifi   nothing beyond the router answers; the router itself may not
16. unknown          nothing of all that

So what explains more comes first: a lying resolver before the wrong certificate that it leads to, a wrong clock before
the certificate that it makes look old. Confidence is high only where the evidence leaves nothing else that is likely;
an absent check is no evidence, so fewer checks make a verdict less sure, never surer.

What is meant by a verdict that requests tell as well, and its hint, are `policy.verdict`'s and `policy.hints`'.
"""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from stormline.core import limits_diagnosis as limits
from stormline.core import limits_network
from stormline.core.checks import CheckName, CheckState, Reason
from stormline.policy.hints import hint
from stormline.policy.verdict import Condition, Confidence, Finding


class Cause(enum.StrEnum):
    """What is wrong."""

    OK = Condition.OK.value
    SLOW = Condition.SLOW.value
    NO_NETWORK = Condition.NO_NETWORK.value
    AIRPLANE = Condition.AIRPLANE.value
    PERMISSION = Condition.PERMISSION.value
    ROUTER_FAULT = Condition.ROUTER_FAULT.value
    DEAD_WIFI = Condition.DEAD_WIFI.value
    CAPTIVE_PORTAL = Condition.CAPTIVE_PORTAL.value
    DNS_HIJACK = "dns_hijack"
    DNS_BROKEN = "dns_broken"
    TLS_INTERCEPTION = "tls_interception"
    INJECTED_PAGE = "injected_page"
    UDP_BLOCKED = "udp_blocked"
    UDP_DEGRADED = "udp_degraded"
    IPV6_BROKEN = "ipv6_broken"
    CLOCK_WRONG = "clock_wrong"
    MTU_BLACKHOLE = "mtu_blackhole"
    PROXY_FAULT = "proxy_fault"
    SERVER_SIDE = "server_side"
    UNKNOWN = "unknown"


_HINTED: Final = {
    Cause.DNS_BROKEN: Condition.DNS_ONLY_BROKEN.value,
    Cause.SERVER_SIDE: Condition.SERVER_FAULT.value,
}
"""Where a hint stands under another name: a diagnosis tells lies of DNS from its failures."""


class Conclusion(NamedTuple):
    """A verdict.

    Attributes:
        cause: what is wrong.
        confidence: how sure that is.
        hint: what a person can do.
        why: what it is said from.
    """

    cause: Cause
    confidence: Confidence
    hint: str
    why: str


class Seen(Protocol):
    """A check, as far as it is judged; `telemetry.diagnosis.Check` is one."""

    @property
    def name(self) -> str:
        """What was looked at."""
        ...

    @property
    def state(self) -> str:
        """How it ended."""
        ...

    @property
    def data(self) -> Mapping[str, Any]:
        """What was found."""
        ...


def conclude(checks: Sequence[Seen]) -> Conclusion:
    """Give the verdict on checks of any number, order and content. Never raises."""
    facts = _read(checks)
    for rule in _RULES:
        said = rule(facts)
        if said is not None:
            cause, sure, why = said
            confidence = Confidence.HIGH if sure else Confidence.LOW
            return Conclusion(cause, confidence, hint(_HINTED.get(cause, cause.value), facts.kind), why)
    return Conclusion(Cause.UNKNOWN, Confidence.LOW, hint(Cause.UNKNOWN.value), "nothing that was found explains it")


_HEARD: Final = (Finding.ANSWERED, Finding.FAILED, Finding.REFUSED)


# -- what is known ----------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Place:
    """One address of the origin, and how far it was reached. None: that was not tried, or came to nothing."""

    address: str
    family: int = 4
    tcp: bool | None = None
    tcp_reason: str = ""
    rtt_s: float | None = None
    tls: bool | None = None
    tls_reason: str = ""
    minted: bool = False
    self_signed: bool = False
    sources: frozenset[str] = frozenset()

    @property
    def stranger(self) -> bool:
        """Somebody else answers there."""
        return self.tls is False and self.tls_reason in (Reason.UNTRUSTED, Reason.WRONG_NAME)


class _NameServer(NamedTuple):
    """A configured name server: what it said, whether it is on this machine or the router, and whether it is alive."""

    finding: str
    near: bool
    alive: bool | None


@dataclass(slots=True)
class _Facts:
    """All that checks say, in the words of the rules."""

    kind: str = "unknown"
    routed: bool | None = None
    denied: bool = False
    airplane: bool = False
    weak_signal: bool = False
    routes_v6: bool | None = None
    gateway: str = ""
    places: dict[str, _Place] = field(default_factory=dict)
    system: frozenset[str] = frozenset()
    system_error: str = ""
    others: frozenset[str] = frozenset()
    others_absent: bool = False
    servers: list["_NameServer"] = field(default_factory=list)
    captive: str = ""
    proxy: str = ""
    http_state: str = ""
    http: Mapping[str, Any] = field(default_factory=dict)
    clear: Mapping[str, Any] = field(default_factory=dict)
    clear_state: str = ""
    quic: list[Mapping[str, Any]] = field(default_factory=list)
    skew_s: float | None = None
    skew_witnesses: int = 0
    clock_bad: bool = False
    small_works: bool = False
    hops_beyond: bool = False
    doh_answered: bool = False
    dispatch_answered: bool = False
    by_gateway: bool = False
    gateways: list[str] = field(default_factory=list)
    """How far each gateway of the plan was reached: empty where it answers, else why not."""
    silent_others: int = 0
    """Servers for names that are reached by address, and are silent."""

    @property
    def answered(self) -> bool:
        """The origin gave an answer of its own."""
        return self.http_state == CheckState.OK

    @property
    def by_gateways_alone(self) -> bool:
        """The platform serves the host, its gateways were tried, and nobody names an address of the host's own."""
        return self.by_gateway and bool(self.gateways) and not (self.places or self.http_state or self.proxy)

    @property
    def verified(self) -> list[_Place]:
        """Addresses that are the origin's for certain."""
        return [each for each in self.places.values() if each.tls]

    @property
    def far(self) -> str:
        """What beyond the router answered, other than the origin; empty for nothing."""
        if self.captive == Finding.ANSWERED:
            return "the check page answers"
        if self.doh_answered:
            return "DNS over HTTPS answers"
        if self.dispatch_answered:
            return "a scheduling centre answers"
        return ""

    @property
    def something_far(self) -> str:
        """The same, with what only shows that packets get beyond the router."""
        if self.far:
            return self.far
        if any(not each.near and (each.finding in _HEARD or each.alive) for each in self.servers):
            return "a name server answers"
        return "routers beyond the first answer" if self.hops_beyond else ""


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    return str(value) if isinstance(value, str) else ""


def _number(data: Mapping[str, Any], key: str) -> float | None:
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _flag(data: Mapping[str, Any], key: str) -> bool | None:
    value = data.get(key)
    return value if isinstance(value, bool) else None


def _words(data: Mapping[str, Any], key: str) -> frozenset[str]:
    value = data.get(key)
    return frozenset(str(each) for each in value) if isinstance(value, list | tuple) else frozenset()


def _read(checks: Sequence[Seen]) -> _Facts:
    facts = _Facts()
    for check in checks:
        if check.state == CheckState.SKIPPED or not isinstance(check.data, Mapping):
            continue
        reader = _READERS.get(check.name)
        if reader is not None:
            reader(facts, check.state, check.data)
    return facts


def _read_interfaces(facts: _Facts, state: str, data: Mapping[str, Any]) -> None:
    facts.kind = _text(data, "kind") or "unknown"
    facts.denied |= bool(_flag(data, "denied"))
    facts.airplane = bool(_flag(data, "airplane"))
    signal = _number(data, "signal_dbm")
    facts.weak_signal = signal is not None and signal < limits_network.SIGNAL_GOOD_DBM


def _read_routes(facts: _Facts, state: str, data: Mapping[str, Any]) -> None:
    facts.routed = _flag(data, "routed")
    facts.routes_v6 = _flag(data, "v6")


def _read_gateway(facts: _Facts, state: str, data: Mapping[str, Any]) -> None:
    facts.gateway = _text(data, "finding")


def _read_system(facts: _Facts, state: str, data: Mapping[str, Any]) -> None:
    facts.system = _words(data, "addresses")
    facts.system_error = _text(data, "error")
    servers = data.get("servers")
    for each in servers if isinstance(servers, list | tuple) else ():
        if isinstance(each, Mapping):
            facts.servers.append(_NameServer(_text(each, "finding"), bool(_flag(each, "near")), _flag(each, "echo")))


def _read_doh(facts: _Facts, state: str, data: Mapping[str, Any]) -> None:
    facts.others |= _words(data, "addresses")
    absent = _text(data, "error") == "absent"
    facts.others_absent |= absent
    facts.doh_answered |= state == CheckState.OK or absent
    facts.silent_others += _text(data, "error") == "silent"


def _read_dispatch(facts: _Facts, state: str, data: Mapping[str, Any]) -> None:
    facts.others |= _words(data, "addresses")
    facts.dispatch_answered |= state == CheckState.OK and bool(_flag(data, "fresh"))
    facts.by_gateway |= bool(_flag(data, "by_gateway"))
    facts.silent_others += state == CheckState.BAD


def _place(facts: _Facts, data: Mapping[str, Any]) -> _Place | None:
    address = _text(data, "address")
    if not address or _text(data, "role"):
        return None
    key = f"{address} {_number(data, 'port')}"
    place = facts.places.get(key)
    if place is None:
        place = facts.places[key] = _Place(address, 6 if ":" in address else 4, sources=_words(data, "sources"))
    return place


def _read_tcp(facts: _Facts, state: str, data: Mapping[str, Any]) -> None:
    if _text(data, "role") == "gateway" and state != CheckState.UNKNOWN:
        facts.gateways.append("" if state == CheckState.OK else _text(data, "reason") or Reason.FAILED.value)
    place = _place(facts, data)
    if place is None or state == CheckState.UNKNOWN:
        return
    place.tcp = state == CheckState.OK
    place.tcp_reason = "" if place.tcp else _text(data, "reason")
    place.rtt_s = _number(data, "rtt_s")


def _read_tls(facts: _Facts, state: str, data: Mapping[str, Any]) -> None:
    place = _place(facts, data)
    if place is None or state == CheckState.UNKNOWN:
        return
    place.tls = state == CheckState.OK
    place.tls_reason = "" if place.tls else _text(data, "reason")
    place.minted = bool(_flag(data, "minted"))
    place.self_signed = bool(_flag(data, "self_signed"))


def _read_http(facts: _Facts, state: str, data: Mapping[str, Any]) -> None:
    if facts.http_state != CheckState.OK:  # one answer is an answer
        facts.http_state, facts.http = state, data


def _read_clear(facts: _Facts, state: str, data: Mapping[str, Any]) -> None:
    facts.clear_state, facts.clear = state, data


def _read_quic(facts: _Facts, state: str, data: Mapping[str, Any]) -> None:
    facts.quic.append(data)


def _read_captive(facts: _Facts, state: str, data: Mapping[str, Any]) -> None:
    facts.captive = _text(data, "finding")


def _read_proxy(facts: _Facts, state: str, data: Mapping[str, Any]) -> None:
    facts.proxy = state


def _read_clock(facts: _Facts, state: str, data: Mapping[str, Any]) -> None:
    facts.skew_s = _number(data, "skew_s")
    facts.skew_witnesses = int(min(99.0, max(0.0, _number(data, "witnesses") or 0.0)))
    facts.clock_bad = state == CheckState.BAD


def _read_trace(facts: _Facts, state: str, data: Mapping[str, Any]) -> None:
    hops = data.get("hops")
    for each in hops if isinstance(hops, list | tuple) else ():
        if isinstance(each, Mapping) and _text(each, "address") and (_number(each, "ttl") or 0.0) >= 2.0:
            facts.hops_beyond = True


def _read_mtu(facts: _Facts, state: str, data: Mapping[str, Any]) -> None:
    facts.small_works = state == CheckState.BAD and bool(_flag(data, "small_works"))


_READERS: Final[Mapping[str, Callable[[_Facts, str, Mapping[str, Any]], None]]] = {
    CheckName.INTERFACES: _read_interfaces,
    CheckName.ROUTES: _read_routes,
    CheckName.GATEWAY: _read_gateway,
    CheckName.DNS_SYSTEM: _read_system,
    CheckName.DNS_DOH: _read_doh,
    CheckName.DNS_DISPATCH: _read_dispatch,
    CheckName.TCP: _read_tcp,
    CheckName.TLS: _read_tls,
    CheckName.HTTP: _read_http,
    CheckName.CLEAR_HTTP: _read_clear,
    CheckName.QUIC: _read_quic,
    CheckName.CAPTIVE: _read_captive,
    CheckName.PROXY: _read_proxy,
    CheckName.CLOCK: _read_clock,
    CheckName.TRACE: _read_trace,
    CheckName.MTU: _read_mtu,
}

# -- the rules, in their order ----------------------------------------------------------------------------------------
_Said = tuple[Cause, bool, str] | None
_TIMELY: Final = (Reason.EXPIRED, Reason.NOT_YET_VALID)
_DARK: Final = (Reason.SILENT, Reason.UNREACHABLE)


def _permission(facts: _Facts) -> _Said:
    if facts.answered:
        return None
    if facts.denied:
        return Cause.PERMISSION, True, "the system lets this program see no network"
    tried = [each for each in facts.places.values() if each.tcp is not None]
    if tried and all(each.tcp_reason == Reason.DENIED for each in tried):
        return Cause.PERMISSION, True, "the system lets this program connect to nobody"
    return None


def _no_network(facts: _Facts) -> _Said:
    reached = any(each.tcp or each.tcp_reason == Reason.REFUSED for each in facts.places.values())
    reached |= any(each in ("", Reason.REFUSED) for each in facts.gateways)
    if facts.answered or reached or facts.routed is not False:
        return None
    if facts.airplane:
        return Cause.AIRPLANE, True, "there is no way out, and all radios are switched off"
    return Cause.NO_NETWORK, True, "there is no way out: no default route"


def _portal(facts: _Facts) -> _Said:
    if facts.captive == Finding.FOREIGN:
        return Cause.CAPTIVE_PORTAL, not facts.answered, "a page of somebody else's came instead of the check page's"
    if _number(facts.clear, "status") == 511.0:
        return Cause.CAPTIVE_PORTAL, not facts.answered, "status 511: the network itself wants a login"
    if _number(facts.http, "status") == 511.0:
        return Cause.CAPTIVE_PORTAL, True, "status 511: the network itself wants a login"
    elsewhere = "" if _flag(facts.clear, "injected") else _text(facts.clear, "redirects_to")
    if elsewhere and not facts.verified and not facts.answered:
        return Cause.CAPTIVE_PORTAL, False, f"the origin is not reached, and clear HTTP leads to {elsewhere}"
    return None


def _gateways(facts: _Facts) -> _Said:
    if not facts.by_gateways_alone:
        return None
    if "" in facts.gateways:
        name = f"; the system has no address for it ({facts.system_error}), and none is needed"
        return Cause.OK, True, f"the platform's gateways serve it, and they answer{name if facts.system_error else ''}"
    if any(each in (Reason.UNTRUSTED, Reason.WRONG_NAME) for each in facts.gateways):
        return Cause.TLS_INTERCEPTION, False, "somebody else answers in the place of the platform's gateways"
    if Reason.REFUSED in facts.gateways:
        why = "the platform's gateways, which serve it, refuse connections"
        return Cause.SERVER_SIDE, bool(facts.far), "; ".join(filter(None, (why, facts.far)))
    if not all(each in _DARK for each in facts.gateways):
        return (
            Cause.SERVER_SIDE,
            False,
            "the platform's gateways, which serve it, do not finish TLS",
        )
    if facts.something_far:
        why = f"the platform's gateways, which serve it, are silent; {facts.something_far}"
        return Cause.SERVER_SIDE, bool(facts.far), why
    return None


def _hijack(facts: _Facts) -> _Said:
    if not facts.system or not facts.others or facts.system & facts.others:
        return None
    mine = [each for each in facts.places.values() if each.address in facts.system]
    theirs = [each for each in facts.places.values() if each.address in facts.others]
    if not mine or any(each.tls for each in mine):
        return None
    strange = any(each.stranger for each in mine)
    genuine = any(each.tls for each in theirs)
    lost = all(each.tcp is False or each.tls is False for each in mine)
    if genuine and (strange or lost):
        return Cause.DNS_HIJACK, strange, (
            "the system's addresses lead to a stranger, another source's to the origin" if strange
            else "the system's addresses do not answer, another source's are the origin's"
        )  # fmt: skip
    if strange and not any(each.stranger for each in theirs):
        return Cause.DNS_HIJACK, False, "the system's addresses lead to a stranger, and another source gives others"
    return None


def _names(facts: _Facts) -> _Said:
    if facts.system or not facts.system_error or facts.by_gateways_alone:
        return None
    absent = facts.system_error == "absent"
    if any(each.tls or each.tcp for each in facts.places.values() if each.address in facts.others):
        return Cause.DNS_BROKEN, True, f"the system has no address ({facts.system_error}); another source's answers"
    if facts.others:
        return Cause.DNS_BROKEN, False, f"the system has no address ({facts.system_error}), another source has one"
    if absent and facts.others_absent:
        return Cause.SERVER_SIDE, True, "every source says that there is no such name"
    if absent:
        return Cause.SERVER_SIDE, False, "there is no such name, says the system"
    silent = bool(facts.servers) and all(each.finding == Finding.SILENT for each in facts.servers)
    if facts.far:
        return Cause.DNS_BROKEN, silent, f"the system has no address ({facts.system_error}); {facts.far}"
    if silent and any(each.alive and not each.near for each in facts.servers):
        return Cause.DNS_BROKEN, True, "the name server's machine is there, and answers no question"
    if any(each.finding in _HEARD for each in facts.servers) or facts.something_far:
        return Cause.DNS_BROKEN, False, f"the system has no address ({facts.system_error}), the network carries"
    return None


def _proxy(facts: _Facts) -> _Said:
    if facts.proxy == CheckState.BAD and not facts.answered:
        return Cause.PROXY_FAULT, True, "requests go by a proxy, which takes no connection"
    if _number(facts.http, "status") == 407.0:
        return Cause.PROXY_FAULT, True, "the proxy wants a user and a password"
    return None


def _interception(facts: _Facts) -> _Said:
    shown = [each for each in facts.places.values() if each.tls_reason == Reason.UNTRUSTED]
    if not shown or facts.verified:
        return None
    if any(each.minted for each in shown):
        return Cause.TLS_INTERCEPTION, True, "a certificate of an unknown issuer is made up for any name one asks for"
    if all(each.self_signed for each in shown):
        return Cause.SERVER_SIDE, False, "the certificate is the server's own word: nobody has signed it"
    agreed = any(each.address in facts.others for each in shown)
    why = "the certificate is for the right name, from an issuer that is not trusted"
    return Cause.TLS_INTERCEPTION, agreed and bool(facts.far), why


def _clock(facts: _Facts) -> _Said:
    timely = [each.tls_reason for each in facts.places.values() if each.tls_reason in _TIMELY]
    off = facts.skew_s is not None and abs(facts.skew_s) >= limits.DIAGNOSIS_CLOCK_S
    if timely and not facts.verified:
        if off:
            return Cause.CLOCK_WRONG, True, f"certificates are out of their time: our clock is {_off(facts.skew_s)}"
        if facts.skew_s is not None:
            return Cause.SERVER_SIDE, True, "its certificate is out of its time, and our clock is right"
        if Reason.NOT_YET_VALID in timely:
            return Cause.CLOCK_WRONG, False, "its certificate is not valid yet by our clock"
        return Cause.SERVER_SIDE, False, "its certificate has expired by our clock"
    if off and facts.clock_bad:
        sure = facts.skew_witnesses >= 2
        return Cause.CLOCK_WRONG, sure, f"by the server's clock ours is {_off(facts.skew_s)}"
    return None


def _off(skew_s: float | None) -> str:
    """Say in words how far a clock is off."""
    off_s = abs(skew_s or 0.0)
    amount, unit = next(
        ((off_s / size, unit) for size, unit in ((86400.0, "days"), (3600.0, "hours")) if off_s >= 2.0 * size),
        (off_s / 60.0, "minutes"),
    )
    return f"{amount:.0f} {unit} {'ahead' if (skew_s or 0.0) > 0.0 else 'behind'}"


def _blackhole(facts: _Facts) -> _Said:
    if facts.small_works and not facts.answered:
        return Cause.MTU_BLACKHOLE, True, "what is silent with packets of the usual size answers to small ones"
    return None


def _strangers(facts: _Facts) -> _Said:
    shown = [each for each in facts.places.values() if each.tls_reason == Reason.WRONG_NAME]
    if not shown or facts.verified:
        return None
    if any(each.address in facts.others for each in shown):
        return Cause.SERVER_SIDE, False, "another source gives the same address, and it shows another's certificate"
    if facts.captive == Finding.ANSWERED:
        return Cause.DNS_HIJACK, False, "somebody else answers for the name, and there is no login page"
    return Cause.CAPTIVE_PORTAL, False, "somebody else answers for the name"


def _injected(facts: _Facts) -> _Said:
    if facts.clear_state != CheckState.BAD or not _flag(facts.clear, "injected"):
        return None
    proof = _text(facts.clear, "proof")
    return Cause.INJECTED_PAGE, proof in ("digest", "redirect", "inserted"), {
        "digest": "a page in clear HTTP has not the content that it is known to have",
        "redirect": "clear HTTP leads to another host, the same over TLS does not",
        "inserted": "the page in clear HTTP is the one over TLS with something put in",
    }.get(proof, "the page in clear HTTP is another than the one over TLS")  # fmt: skip


def _answered(facts: _Facts) -> _Said:
    if not facts.answered:
        return None
    slow = _slow(facts)
    v4 = [each for each in facts.places.values() if each.family == 4 and (each.tls or (each.tls is None and each.tcp))]
    v6 = [each for each in facts.places.values() if each.family == 6 and each.tcp is not None]
    broken = [each for each in v6 if each.tcp_reason in _DARK or each.tls_reason == Reason.SILENT]
    if v6 and len(broken) == len(v6) and v4 and facts.routes_v6 is not False:
        # On a slow network the few packets of one try may all be lost by chance.
        sure = bool(facts.routes_v6) and slow is None and all(each.tcp_reason != Reason.UNREACHABLE for each in broken)
        return Cause.IPV6_BROKEN, sure, "nothing answers over IPv6, IPv4 does"
    said = _udp(facts)
    if said is not None and slow is not None:
        return slow
    tried = [each for each in facts.places.values() if each.tcp is not None]
    failed = sum(each.tcp is False or each.tls is False for each in tried)
    why = f"the origin answers; {failed} of its {len(tried)} addresses failed" if failed else "the origin answers"
    return said or slow or (Cause.OK, True, why)


def _slow(facts: _Facts) -> _Said:
    trips = [each.rtt_s for each in facts.places.values() if each.tcp and each.rtt_s is not None]
    first_s = _number(facts.http, "first_byte_s")
    if trips and min(trips) >= limits.DIAGNOSIS_SLOW_RTT_S:
        return Cause.SLOW, True, f"a round trip takes {min(trips):.1f} s"
    if first_s is not None and first_s >= limits_network.VERDICT_SLOW_S:
        if trips and min(trips) * 5.0 < first_s:
            return Cause.SERVER_SIDE, False, f"the server took {first_s:.1f} s, a round trip {min(trips):.2f} s"
        return Cause.SLOW, bool(trips), f"the first byte of an answer took {first_s:.1f} s"
    return None


def _udp(facts: _Facts) -> _Said:
    asked = [each for each in facts.quic if _text(each, "expected") and (_number(each, "sent") or 0.0) > 0.0]
    if not asked or any(_flag(each, "refused") for each in asked):
        return None
    counts = [((_number(each, "sent") or 0.0), (_number(each, "answered") or 0.0)) for each in asked]
    if not any(answered for _, answered in counts):
        enough = all(sent >= limits.DIAGNOSIS_QUIC_DATAGRAMS for sent, _ in counts)
        return Cause.UDP_BLOCKED, enough, "the origin speaks QUIC, and no datagram of it comes through; TCP does"
    sent, answered = max(counts, key=lambda each: each[1] / each[0])
    lost = 1.0 - min(1.0, answered / sent)
    if lost >= limits.DIAGNOSIS_UDP_LOST and sent >= limits.DIAGNOSIS_QUIC_DATAGRAMS:
        return Cause.UDP_DEGRADED, True, f"{lost:.0%} of the datagrams are lost, TCP works"
    tcp = [each.rtt_s for each in facts.places.values() if each.tcp and each.rtt_s is not None]
    udp = [trip for each in asked if (trip := _number(each, "rtt_s")) is not None]
    if tcp and udp:
        slower = max(limits.DIAGNOSIS_UDP_SLOWER * min(tcp), min(tcp) + limits.DIAGNOSIS_UDP_SLOWER_S)
        if min(udp) >= slower:
            return Cause.UDP_DEGRADED, False, f"datagrams take {min(udp):.2f} s, TCP {min(tcp):.2f} s"
    return None


def _server(facts: _Facts) -> _Said:
    if facts.answered:
        return None
    status = _number(facts.http, "status")
    if facts.http_state == CheckState.BAD and status is not None and status >= 500.0:
        return Cause.SERVER_SIDE, True, f"the server answers with status {status:.0f}"
    tried = [each for each in facts.places.values() if each.tcp is not None]
    if any(each.tls is False for each in tried if each.tcp):
        return Cause.SERVER_SIDE, False, "the server takes connections and does not finish TLS"
    if any(each.tcp for each in tried) and facts.http_state == CheckState.BAD:
        return Cause.SERVER_SIDE, False, "the server takes connections and gives no answer"
    if facts.proxy == CheckState.OK and facts.http_state == CheckState.BAD:
        return Cause.SERVER_SIDE, False, "the proxy takes connections, and the origin is not reached through it"
    if any(each.tcp_reason == Reason.REFUSED for each in tried):
        return (
            Cause.SERVER_SIDE,
            bool(facts.far),
            "; ".join(filter(None, ("the server refuses connections", facts.far))),
        )
    if tried and not any(each.tcp for each in tried) and facts.something_far:
        return Cause.SERVER_SIDE, bool(facts.far), f"the server is silent; {facts.something_far}"
    return None


def _dark(facts: _Facts) -> _Said:
    tried = [each for each in facts.places.values() if each.tcp is not None]
    if facts.answered or facts.something_far or any(each.tcp for each in tried):
        return None
    silent = {each.address for each in tried if each.tcp_reason in _DARK}
    quiet = len(silent) + facts.silent_others
    quiet += sum(each.finding == Finding.SILENT and not each.near for each in facts.servers)
    quiet += facts.captive == Finding.SILENT
    quiet += sum(each in _DARK for each in facts.gateways)
    if facts.gateway == Finding.SILENT:
        if facts.weak_signal:
            return Cause.DEAD_WIFI, False, "the router is silent, and its signal is weak"
        return Cause.ROUTER_FAULT, facts.kind == "wired" and quiet > 0, "the router does not answer on its own link"
    if not quiet:
        if facts.system_error and not facts.system:
            return Cause.DNS_BROKEN, False, "names are not resolved, nothing else is known"
        return None
    if facts.routed is None and tried and all(each.tcp_reason == Reason.UNREACHABLE for each in tried):
        return Cause.NO_NETWORK, False, "the system has no way to any address"
    beyond = facts.gateway in (Finding.ANSWERED, Finding.REFUSED)
    why = "the router answers, nothing beyond it does" if beyond else "nothing comes back from anywhere"
    return Cause.DEAD_WIFI, quiet >= 2, why


def _network_alone(facts: _Facts) -> _Said:
    if facts.places or facts.http_state or facts.system_error:
        return None
    if facts.far:
        return Cause.OK, True, facts.far
    if facts.something_far:
        return Cause.OK, False, facts.something_far
    return None


_RULES: Final = (
    _permission, _no_network, _portal, _gateways, _hijack, _names, _proxy, _interception, _clock, _blackhole,
    _strangers, _injected, _answered, _server, _dark, _network_alone,
)  # fmt: skip
