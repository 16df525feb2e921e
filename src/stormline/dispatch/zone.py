"""What the rules say in DNS: addresses and HTTPS records (RFC 9460) from the same endpoints as the signed plans. Pure.

Those endpoints count that any client can use who knows the host's name alone: HTTP over TLS, under the host's own
certificate. A host without such an endpoint is not spoken of here.

What one record says of its target holds for all the target's addresses. So where endpoints differ in port or protocol,
each kind of them has a name of its own below the host, `sl8443-h2.HOST`, which is answered here too.
"""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from stormline.core import limits_platform as limits
from stormline.dispatch.planner import Standing
from stormline.dispatch.rules import RuleSet
from stormline.wire import hostname, svcb
from stormline.wire.dns import Rcode, RecordType
from stormline.wire.dns_server import Record, name_bytes, soa_data
from stormline.wire.plan import Endpoint, HostPlan

ALPN: Final = {"h1": "http/1.1", "h2": "h2", "h3": "h3"}
"""ALPN ids of the carriers that any HTTP client speaks."""
_HTTPS_PORT: Final = 443
_OURS: Final = frozenset(
    {RecordType.A, RecordType.AAAA, RecordType.CNAME, RecordType.SOA, RecordType.HTTPS, RecordType.SVCB, RecordType.ANY}
)
_RESOLVER: Final = "resolver.arpa"
_RESOLVER_SERVICE: Final = "_dns.resolver.arpa"
_LOCAL: Final = frozenset({"localhost", "local", "onion", "invalid"})
"""Never asked of anybody else (RFC 6761, RFC 6762 section 22.1, RFC 7686)."""
_MARKS: Final[dict[int, str]] = {RecordType.A: ".", RecordType.AAAA: ":"}
"""What stands in addresses of each kind."""
_ANY_DATA: Final = b"\x07RFC8482\x00"


class ClientNetwork(NamedTuple):
    """Where a client is; `network` is its truncated network (`192.0.2.0/24`), empty where nothing may be known."""

    network: str = ""


Order = Callable[[tuple[Endpoint, ...], ClientNetwork], tuple[Endpoint, ...]]
"""Puts endpoints in the order that is best for a client."""


@dataclass(frozen=True, kw_only=True)
class Resolver:
    """How this server itself is asked, for those who want to find that out (RFC 9462).

    Attributes:
        name: the name in its certificate; empty: it is not told.
        port: TCP.
        path: URL template of questions.
        alpn: what it speaks, by ALPN id.
        addresses: IP addresses it is reached at.
    """

    name: str = ""
    port: int = _HTTPS_PORT
    path: str = "/dns-query{?dns}"
    alpn: tuple[str, ...] = ("http/1.1",)
    addresses: tuple[str, ...] = ()


class Answer(NamedTuple):
    """What is said of a name.

    Attributes:
        rcode: the outcome.
        answers: records.
        authorities: the zone's authority, where there is no record.
        ttl_s: how long it holds.
        alias: the addresses are those of this name, to be found in turn; empty: all is said.
        elsewhere: another server may know more: nothing in the rules is about records of this kind.
    """

    rcode: Rcode
    answers: tuple[Record, ...] = ()
    authorities: tuple[Record, ...] = ()
    ttl_s: int = 0
    alias: str = ""
    elsewhere: bool = False


class _Group(NamedTuple):
    """Endpoints that one record describes.

    Attributes:
        target: the name they are known by, empty where they are addresses.
        port: TCP and UDP.
        carriers: what they speak.
        spare: only for when nothing else does.
        addresses: in their order.
    """

    target: str
    port: int
    carriers: tuple[str, ...]
    spare: bool
    addresses: tuple[str, ...]

    @property
    def label(self) -> str:
        return "-".join((f"sl{self.port}", *sorted(self.carriers), *(["spare"] if self.spare else [])))


@dataclass(frozen=True, kw_only=True)
class Zone:
    """Answers questions.

    Attributes:
        rules: checked rules.
        resolver: how this server itself is asked.
        ohttp: hosts that take oblivious HTTP (RFC 9540).
        ohttp_only: those of them that take nothing else.
        standing: which endpoints may be handed out; None: all.
        order: which is best for a client; None: as the rules have them.
    """

    rules: RuleSet
    resolver: Resolver = field(default_factory=Resolver)
    ohttp: frozenset[str] = frozenset()
    ohttp_only: frozenset[str] = frozenset()
    standing: Standing | None = None
    order: Order | None = None

    def answer(self, name: str, kind: int, place: ClientNetwork) -> Answer | None:
        """Answer a question; None: the rules say nothing of this name.

        Args:
            name: lower case, without the root's dot.
            kind: type of the records asked for.
            place: where the client is.
        """
        if (endpoints := self._endpoints(name, place)) is not None:
            return self._host(name, kind, endpoints)
        label, _, rest = name.partition(".")
        if label.startswith("_"):
            return self._service(name, label, rest, kind, place)
        if label.startswith("sl") and (endpoints := self._endpoints(rest, place)) is not None:
            for group in _groups(endpoints):
                if group.label == label and not group.target:
                    return self._addresses(rest, kind, group.addresses)
        if name == self.resolver.name and name:
            return self._addresses(name, kind, self.resolver.addresses)
        if name == _RESOLVER or name.endswith("." + _RESOLVER):
            return self._nothing(_RESOLVER)  # RFC 9462 section 6.4: never asked of anybody else
        return self._local(name, kind)

    def _endpoints(self, host: str, place: ClientNetwork) -> tuple[Endpoint, ...] | None:
        plan: HostPlan | None = self.rules.hosts.get(host)
        if plan is None:
            return None
        usable = tuple(
            each for each in plan.endpoints if each.carrier in ALPN and each.server_name in ("", host) and each.port
        )
        if not usable:
            return None
        if self.standing is not None:
            usable = self.standing(usable)
        return self.order(usable, place) if self.order is not None else usable

    # -- one host -----------------------------------------------------------------------------------------------------
    def _host(self, host: str, kind: int, endpoints: tuple[Endpoint, ...]) -> Answer:
        if kind in (RecordType.A, RecordType.AAAA):
            groups = _groups(endpoints)
            own = _own_addresses(groups)
            if not own:
                return self._alias(groups[0].target)
            return self._addresses(host, kind, own)
        if kind == RecordType.HTTPS:
            return self._https(host, host, _HTTPS_PORT, endpoints)
        if kind == RecordType.ANY:  # RFC 8482 section 4.2
            return _some(Record(RecordType.HINFO, limits.DOH_TTL_S, _ANY_DATA))
        if kind == RecordType.SOA:
            return _some(self._soa(""))
        return self._nothing("", host=host)._replace(elsewhere=kind not in _OURS)

    def _addresses(self, host: str, kind: int, addresses: tuple[str, ...]) -> Answer:
        mark = _MARKS.get(kind, "")
        fitting = [each for each in addresses if mark and mark in each][: limits.DOH_ADDRESSES_MAX]
        if not fitting:
            return self._nothing(host)
        return _some(*(Record(kind, limits.DOH_TTL_S, _packed(each)) for each in fitting))

    def _alias(self, target: str) -> Answer:
        alias = _some(Record(RecordType.CNAME, limits.DOH_TTL_S, name_bytes(target)))
        return alias._replace(alias=target)

    def _https(self, host: str, owner: str, port: int, endpoints: tuple[Endpoint, ...]) -> Answer:
        """Give the HTTPS records for a port of a host."""
        groups = _groups(endpoints)
        own = frozenset(_own_addresses(groups))
        groups = [each for each in groups if port in (_HTTPS_PORT, each.port)][: limits.DOH_SERVICES_MAX]
        if not groups:
            return self._nothing(host)
        if len(groups) == 1 and self._is_alias(host, port, groups[0]):
            service = svcb.Service(0, groups[0].target)
            return _some(Record(RecordType.HTTPS, limits.DOH_TTL_S, svcb.encode(service)))
        made = (self._of_group(number, each, host, owner, port, own) for number, each in enumerate(groups, 1))
        return _some(*(Record(RecordType.HTTPS, limits.DOH_TTL_S, svcb.encode(each)) for each in made))

    def _is_alias(self, host: str, port: int, group: _Group) -> bool:
        # Where all that is known is another name, that name's own records say the rest.
        standard = (group.target != "", port, group.port, group.carriers) == (True, _HTTPS_PORT, _HTTPS_PORT, ("h1",))
        return standard and host not in self.ohttp

    def _of_group(
        self, number: int, group: _Group, host: str, owner: str, port: int, own: frozenset[str]
    ) -> svcb.Service:
        target = group.target
        if not target:
            named = f"{group.label}.{host}"
            same = own == frozenset(group.addresses) or len(named) > limits.HOST_CHARS_MAX
            # "." is the owner's own name (RFC 9460 section 2.5.2), which of `_8443._https.HOST` has no addresses.
            target = named if not same else "" if owner == host else host
        ids = tuple(ALPN[each] for each in group.carriers if each != "h1")
        ohttp = host in self.ohttp
        return svcb.Service(
            number,
            target,
            alpn=ids,
            default_alpn="h1" in group.carriers,
            port=None if group.port == port else group.port,
            ipv4hint=tuple(each for each in group.addresses if "." in each)[: limits.DOH_HINTS_MAX],
            ipv6hint=tuple(each for each in group.addresses if ":" in each)[: limits.DOH_HINTS_MAX],
            ohttp=ohttp,
            mandatory=(svcb.Key.OHTTP,) if ohttp and host in self.ohttp_only else (),
        )

    # -- other names --------------------------------------------------------------------------------------------------
    def _service(self, name: str, label: str, rest: str, kind: int, place: ClientNetwork) -> Answer | None:
        if label == "_dns" and (name == _RESOLVER_SERVICE or rest == self.resolver.name):
            return self._resolver(rest, kind)
        scheme, _, host = rest.partition(".")
        if scheme == "_https" and (endpoints := self._endpoints(host, place)) is not None:
            number = label[1:]
            if kind == RecordType.HTTPS and number.isdecimal() and number == str(int(number[:6])):
                return self._https(host, name, int(number), endpoints)
            return self._nothing(host)
        return self._local(name, kind) or (self._nothing(_RESOLVER) if name.endswith("." + _RESOLVER) else None)

    def _resolver(self, parent: str, kind: int) -> Answer | None:
        if kind != RecordType.SVCB or not self.resolver.name:
            return self._nothing(parent) if parent else None
        service = svcb.Service(
            1,
            self.resolver.name,
            alpn=self.resolver.alpn,
            port=None if self.resolver.port == _HTTPS_PORT else self.resolver.port,
            ipv4hint=tuple(each for each in self.resolver.addresses if "." in each)[: limits.DOH_HINTS_MAX],
            ipv6hint=tuple(each for each in self.resolver.addresses if ":" in each)[: limits.DOH_HINTS_MAX],
            dohpath=self.resolver.path,
        )
        return _some(Record(RecordType.SVCB, limits.DOH_RESOLVER_TTL_S, svcb.encode(service)))

    def _local(self, name: str, kind: int) -> Answer | None:
        last = name.rpartition(".")[2]
        if last not in _LOCAL:
            return None
        if last == "localhost" and kind in (RecordType.A, RecordType.AAAA):  # RFC 6761 section 6.3
            return self._addresses(name, kind, ("127.0.0.1", "::1"))
        absent = self._nothing(last)
        return absent if last == "localhost" else absent._replace(rcode=Rcode.NXDOMAIN)

    def _nothing(self, zone: str, *, host: str = "") -> Answer:
        return Answer(Rcode.NOERROR, (), (self._soa(zone, host=host),), limits.DOH_ABSENT_TTL_S)

    def _soa(self, zone: str, *, host: str = "") -> Record:
        """Give the authority of a zone, or of the name asked for where `zone` is empty (RFC 2308 section 3)."""
        ttl_s = limits.DOH_ABSENT_TTL_S
        primary = self.resolver.name or zone or host
        data = soa_data(primary, "", serial=self.rules.version, minimum_s=ttl_s)
        return Record(RecordType.SOA, ttl_s, data, zone)


def _some(*records: Record) -> Answer:
    return Answer(Rcode.NOERROR, records, (), min(each.ttl_s for each in records))


def _groups(endpoints: tuple[Endpoint, ...]) -> list[_Group]:
    """Sort endpoints into those that one record describes, the best first, those kept as a last resort behind."""
    weighed = any(each.weight for each in endpoints)
    spoken: dict[tuple[str, int, bool], dict[str, None]] = {}
    for each in endpoints:
        spoken.setdefault((each.host, each.port, weighed and not each.weight), {})[each.carrier] = None
    grouped: dict[tuple[str, int, frozenset[str], bool], tuple[tuple[str, ...], list[str]]] = {}
    for (host, port, spare), carriers in spoken.items():
        target = "" if hostname.is_address(host) else host
        key = (target, port, frozenset(carriers), spare)
        grouped.setdefault(key, (tuple(carriers), []))[1].append(host)
    groups = [
        _Group(target, port, carriers, spare, () if target else tuple(hosts))
        for (target, port, _, spare), (carriers, hosts) in grouped.items()
    ]
    return sorted(groups, key=lambda each: each.spare)


def _own_addresses(groups: list[_Group]) -> tuple[str, ...]:
    """Give the addresses of the host itself; those of a last resort have a name of their own."""
    main = [each for each in groups if each.addresses and not each.spare] or [each for each in groups if each.addresses]
    return tuple(dict.fromkeys(address for each in main for address in each.addresses))


def _packed(address: str) -> bytes:
    return ipaddress.ip_address(address).packed
