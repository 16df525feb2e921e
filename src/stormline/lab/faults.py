"""What goes wrong on the way: small values that a stage's event clock applies and undoes.

Filters are nftables tables of their own in the routers' or the servers' namespace, so that one fault never touches
another's rules. Equal faults must not overlap in time.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Protocol

from stormline.core import errors, limits_lab
from stormline.lab.control import Shaper
from stormline.lab.namespaces import UPLINKS, WIFI, Namespace, Topology, Uplink
from stormline.lab.specs import Behaviour, DnsSpec

_PASS_DNS: Final = ("th sport 53 accept", "th dport 53 accept")
"""Two rules: nft (1.0.6) makes "unequal to both" of two comparisons with `!=` in one."""


class Ground(Protocol):
    """What faults work on: a stage."""

    @property
    def topology(self) -> Topology:
        """The namespaces."""

    @property
    def shaper(self) -> Shaper:
        """The links."""

    @property
    def captive(self) -> str:
        """IPv4 address of the captive server."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The origin's true addresses, by index as faults name them."""

    def behave(self, unit: Iterable[int], behaviour: Behaviour | None) -> None:
        """Let origin addresses, by index, behave otherwise; None: as the profile has it."""

    def set_dns(self, dns: DnsSpec | None) -> None:
        """Let DNS answer otherwise; None: as the profile has it."""

    def next_host(self) -> int:
        """Give a host number that the device had on no link yet."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    about: ClassVar[str]
    """One sentence for the documentation."""

    @property
    def what(self) -> str:
        """Name and what is not as by default, for reports and plots."""
        values = [(field, getattr(self, field.name)) for field in fields(self)]
        named = [f"{field.name}={_text(value)}" for field, value in values if value != field.default]
        return " ".join([kebab(type(self).__name__), *named])

    def apply(self, stage: Ground) -> None:
        """Begin. Raises PlatformError where the machine refuses."""
        raise TypeError(f"{type(self).__name__} does not say how")

    def undo(self, stage: Ground) -> None:
        """End. Raises PlatformError where the machine refuses."""
        raise TypeError(f"{type(self).__name__} does not say how")


def kebab(name: str) -> str:
    """Give a class's name as reports show it: `DeadAddress` is `dead-address`."""
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name).strip("-")


def _text(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check_pct(fault: Fault, pct: float) -> None:
    if not (math.isfinite(pct) and 0 < pct <= 100):
        raise errors.ConfigError(f"fault {fault.what}: pct must be above 0 and at most 100")


# -- filters ----------------------------------------------------------------------------------------------------------
class _Filter(Fault):
    """A fault made of nftables rules."""

    def places(self, stage: Ground) -> Iterable[Namespace]:
        """Give the namespaces that get the rules."""
        return stage.topology.routers.values()

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Give the rules by chain: `forward`, `prerouting`, `output` (filters) or `nat` (destination NAT)."""
        raise TypeError(f"{type(self).__name__} has no rules")

    def apply(self, stage: Ground) -> None:
        """Load the table."""
        lines = [f"table inet {self._table} {{"]
        for chain, rules in self.rules(stage).items():
            lines += [f"chain fault_{chain} {{", f"type {_HOOKS[chain]}", *rules, "}"]
        for place in self.places(stage):
            _nft(place, "\n".join([*lines, "}"]))

    def undo(self, stage: Ground) -> None:
        """Remove it."""
        for place in self.places(stage):
            _nft(place, f"delete table inet {self._table}")

    @property
    def _table(self) -> str:
        return f"fault_{hashlib.sha256(self.what.encode()).hexdigest()[:12]}"


_HOOKS: Final = {
    "forward": "filter hook forward priority filter",
    "prerouting": "filter hook prerouting priority raw",
    "output": "filter hook output priority raw",
    "nat": "nat hook prerouting priority dstnat",
}


def _nft(place: Namespace, script: str) -> None:
    place.shell(f"nft -f - <<'END'\n{script}\nEND")


def _chance(pct: float) -> str:
    """Match that share of packets, to a ten-thousandth."""
    return "" if pct == 100 else f"numgen random mod 10000 < {round(pct * 100)}"


def _family(address: str) -> str:
    return "ip6" if ":" in address else "ip"


@dataclass(frozen=True, kw_only=True)
class DeadAddress(_Filter):
    """An address swallows everything, new connections and open ones."""

    about = "packets to and from an address of the origin vanish"
    address: int
    """Index into the origin's addresses."""

    def places(self, stage: Ground) -> Iterable[Namespace]:
        """At the servers' side: dead on every link."""
        return [stage.topology.server]

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Drop both ways."""
        address = stage.addresses[self.address]
        family = _family(address)
        return {"prerouting": [f"{family} daddr {address} drop"], "output": [f"{family} saddr {address} drop"]}


@dataclass(frozen=True, kw_only=True)
class UnitCut(_Filter):
    """The entry of a whole unit is cut: all its addresses at once."""

    about = "packets to and from several addresses of the origin, one unit, vanish"
    unit: tuple[int, ...]
    """Indexes into the origin's addresses."""

    def places(self, stage: Ground) -> Iterable[Namespace]:
        """At the servers' side."""
        return [stage.topology.server]

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Drop both ways."""
        addresses = [stage.addresses[index] for index in self.unit]
        return {
            "prerouting": [f"{_family(address)} daddr {address} drop" for address in addresses],
            "output": [f"{_family(address)} saddr {address} drop" for address in addresses],
        }


@dataclass(frozen=True, kw_only=True)
class SynDrop(_Filter):
    """New TCP connections do not get through; open ones live."""

    about = "a share of the packets that open TCP connections vanish"
    pct: float = 100.0

    def __post_init__(self) -> None:
        _check_pct(self, self.pct)

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Drop SYN without ACK."""
        return {"forward": [f"tcp flags & (syn | ack) == syn {_chance(self.pct)} drop"]}


@dataclass(frozen=True, kw_only=True)
class LostFlows(_Filter):
    """One of the ways through an operator's network is broken: the flows that are led there are lost whole.

    Which way a flow takes hangs on its addresses and port: a new connection may have more luck, the same never has.
    """

    about = "a share of the TCP flows from the device to some servers is lost, from the first packet to the last"
    pct: float
    hosts: tuple[str, ...]
    """IPv4 addresses."""

    def __post_init__(self) -> None:
        _check_pct(self, self.pct)

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Drop by the hash of the flow."""
        there = f'iifname "lan0" ip daddr {{ {", ".join(self.hosts)} }}'
        share = f"jhash ip saddr . tcp sport . ip daddr mod 10000 seed {_FLOWS_SEED} < {round(self.pct * 100)}"
        return {"forward": [f"{there} meta l4proto tcp {share} drop"]}


_FLOWS_SEED: Final = 0x5EED


@dataclass(frozen=True, kw_only=True)
class OnlyPort(_Filter):
    """A firewall that lets one TCP port through, and DNS."""

    about = "everything but one TCP port (and DNS) vanishes"
    port: int

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Drop what is neither."""
        return {"forward": [*_PASS_DNS, f"tcp sport {self.port} accept", f"tcp dport {self.port} accept", "drop"]}


@dataclass(frozen=True, kw_only=True)
class OnlyProtocol(_Filter):
    """A network that carries one protocol, and DNS."""

    about = "everything but one protocol (and DNS) vanishes"
    protocol: str
    """`tcp`, `udp` or `icmp`."""

    def __post_init__(self) -> None:
        if self.protocol not in ("tcp", "udp", "icmp"):
            raise errors.ConfigError("fault only-protocol: must be tcp, udp or icmp")

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Drop the others."""
        return {"forward": [*_PASS_DNS, f"meta l4proto != {self.protocol} drop"]}


@dataclass(frozen=True, kw_only=True)
class UdpBlock(_Filter):
    """No UDP but DNS, as in many company networks."""

    about = "UDP but DNS vanishes"

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Drop it."""
        return {"forward": [*_PASS_DNS, "meta l4proto udp drop"]}


@dataclass(frozen=True, kw_only=True)
class UdpThinned(_Filter):
    """UDP loses packets in a fixed rhythm, so that no run is lucky."""

    about = "of the UDP packets to a port all but every nth vanish"
    port: int
    keep: int
    """Every `keep`th packet passes."""

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Count and drop."""
        return {"forward": [f"udp dport {self.port} numgen inc mod {self.keep} != 0 drop"]}


@dataclass(frozen=True, kw_only=True)
class UdpLossy(_Filter):
    """UDP is lossy and policed while TCP is well, as operators do to what they do not know."""

    about = "UDP but DNS loses a share of its packets, and all beyond a rate"
    pct: float
    police_kbytes_per_s: int | None = None

    def __post_init__(self) -> None:
        _check_pct(self, self.pct)

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Drop by chance, and beyond the rate."""
        rules = [*_PASS_DNS, f"meta l4proto udp {_chance(self.pct)} drop"]
        if self.police_kbytes_per_s is not None:
            rules.append(f"meta l4proto udp limit rate over {self.police_kbytes_per_s} kbytes/second drop")
        return {"forward": rules}


@dataclass(frozen=True, kw_only=True)
class Resets(_Filter):
    """A middlebox that resets connections at random."""

    about = "a share of the device's TCP packets on open connections is swallowed and answered with RST"
    pct: float

    def __post_init__(self) -> None:
        _check_pct(self, self.pct)

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Answer in the server's name; the server learns of it by the device's next packet."""
        return {"forward": [f'iifname "lan0" tcp flags & syn == 0 {_chance(self.pct)} reject with tcp reset']}


@dataclass(frozen=True, kw_only=True)
class V6Dead(_Filter):
    """IPv6 has addresses and routes, and nothing comes back."""

    about = "all IPv6 packets vanish in the router"

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Drop it."""
        return {"forward": ["meta nfproto ipv6 drop"]}


@dataclass(frozen=True, kw_only=True)
class V6Lossy(_Filter):
    """IPv6 works, and worse than IPv4."""

    about = "a share of all IPv6 packets vanishes in the router"
    pct: float

    def __post_init__(self) -> None:
        _check_pct(self, self.pct)

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Drop by chance."""
        return {"forward": [f"meta nfproto ipv6 {_chance(self.pct)} drop"]}


@dataclass(frozen=True, kw_only=True)
class CaptivePortal(_Filter):
    """A hotel's network: every connection ends at the portal."""

    about = "TCP to ports 80 and 443 ends at a server that answers a page of its own, with a wrong certificate"
    ports: tuple[int, ...] = (80, 443)

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Rewrite IPv4, drop IPv6."""
        ports = ", ".join(map(str, self.ports))
        return {
            "nat": [f'iifname "lan0" meta nfproto ipv4 tcp dport {{ {ports} }} dnat ip to {stage.captive}'],
            "forward": [f'iifname "lan0" meta nfproto ipv6 tcp dport {{ {ports} }} drop'],
        }


@dataclass(frozen=True, kw_only=True)
class Unreachable(_Filter):
    """Servers are out of the device's reach, by all their TCP ports or by one; each other they still reach."""

    about = "what the device sends to some servers vanishes, or is answered with RST"
    hosts: tuple[str, ...]
    """IPv4 addresses."""
    port: int | None = None
    refused: bool = False
    """Answered with RST, new connections and open ones."""

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Drop both ways, or answer in the servers' name."""
        there, back = (f"tcp {end} {self.port or '1-65535'}" for end in ("dport", "sport"))
        verdict = "reject with tcp reset" if self.refused else "drop"
        rules = [f'iifname "lan0" ip daddr {host} {there} {verdict}' for host in self.hosts]
        if not self.refused:
            rules += [f"ip saddr {host} {back} drop" for host in self.hosts]
        return {"forward": rules}


@dataclass(frozen=True, kw_only=True)
class Diverted(_Filter):
    """A box on the way takes the connections to a port of some servers."""

    about = "TCP connections to a port of some servers end at another server"
    hosts: tuple[str, ...]
    """IPv4 addresses."""
    port: int
    to: str
    """`ip:port` of the box."""

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Rewrite the destination."""
        return {
            "nat": [f'iifname "lan0" ip daddr {host} tcp dport {self.port} dnat ip to {self.to}' for host in self.hosts]
        }


@dataclass(frozen=True, kw_only=True)
class Seized(_Filter):
    """A box in the router takes the connections to a port, whoever they are for."""

    about = "TCP connections to a port end at a box in the router that speaks for the servers"
    port: int
    box: int
    """The port where it listens."""
    hosts: tuple[str, ...] = ()
    """Addresses; none: all."""

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Rewrite the destination to the router's own address."""
        places = [f"{_family(host)} daddr {host}" for host in self.hosts] or [""]
        return {
            "nat": [f'iifname "lan0" {place} tcp dport {self.port} redirect to :{self.box}' for place in places],
        }


@dataclass(frozen=True, kw_only=True)
class Severed(_Filter):
    """The router answers, and passes nothing on, or nothing to a TCP port."""

    about = "the router works and nothing passes through it, or nothing to one TCP port"
    port: int | None = None
    """None: nothing at all."""

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Drop it."""
        return {"forward": ["drop" if self.port is None else f"tcp dport {self.port} drop"]}


@dataclass(frozen=True, kw_only=True)
class NatForgets(_Filter):
    """A NAT with a short memory: what was idle for longer is not known any more, and nobody is told."""

    about = "the router forgets idle TCP and UDP flows after some seconds, and drops what belongs to none"
    after_s: int

    def __post_init__(self) -> None:
        if self.after_s < limits_lab.LAB_NAT_TIMEOUT_S_MIN:
            raise errors.ConfigError(f"fault nat-forgets: after_s must be {limits_lab.LAB_NAT_TIMEOUT_S_MIN} or more")

    def rules(self, stage: Ground) -> Mapping[str, list[str]]:
        """Drop what belongs to no known flow."""
        return {"forward": ['iifname "lan0" meta nfproto ipv4 ct state invalid drop']}

    def apply(self, stage: Ground) -> None:
        """Shorten the memory, and take up no flow in its middle."""
        super().apply(stage)
        self._set(stage, dict.fromkeys(_NAT_DEFAULTS, self.after_s) | {"tcp_loose": 0})

    def undo(self, stage: Ground) -> None:
        """Give the kernel's defaults back."""
        super().undo(stage)
        self._set(stage, {**_NAT_DEFAULTS, "tcp_loose": 1})

    def _set(self, stage: Ground, values: Mapping[str, int]) -> None:
        lines = [f"echo {value} > /proc/sys/net/netfilter/nf_conntrack_{name}" for name, value in values.items()]
        for router in self.places(stage):
            router.shell("\n".join(lines))


_NAT_DEFAULTS: Final = {
    "tcp_timeout_established": 432_000,
    "tcp_timeout_unacknowledged": 300,
    "tcp_timeout_max_retrans": 300,
    "udp_timeout": 30,
    "udp_timeout_stream": 120,
}


# -- links ------------------------------------------------------------------------------------------------------------
def _links(uplink: str | None) -> tuple[Uplink, ...]:
    found = tuple(up for up in UPLINKS if uplink in (None, up.name))
    if not found:
        raise errors.ConfigError(f"no uplink named {uplink!r}; there are {', '.join(up.name for up in UPLINKS)}")
    return found


@dataclass(frozen=True, kw_only=True)
class Dark(Fault):
    """The radio is gone; the interface stays up (elevator, tunnel, WiFi that is up and dead)."""

    about = "nothing passes in either direction while the interface stays up"
    uplink: str | None = WIFI.name
    """None: all."""
    mode: str = "drop"
    """`drop`, or `hold`: modems keep packets and send them afterwards."""

    def apply(self, stage: Ground) -> None:
        """Go dark."""
        for up in _links(self.uplink):
            stage.shaper.start_blackout(up.name, mode=self.mode)

    def undo(self, stage: Ground) -> None:
        """Come back."""
        for up in _links(self.uplink):
            stage.shaper.end_blackout(up.name)


@dataclass(frozen=True, kw_only=True)
class MtuCliff(Fault):
    """Large packets vanish and no ICMP says so: path MTU discovery fails."""

    about = "packets above a size vanish without a word"
    mtu_bytes: int
    uplink: str | None = None

    def apply(self, stage: Ground) -> None:
        """Lower the limit."""
        self._set(stage, self.mtu_bytes)

    def undo(self, stage: Ground) -> None:
        """Lift it."""
        self._set(stage, limits_lab.LINK_MTU_BYTES_MAX)

    def _set(self, stage: Ground, mtu_bytes: int) -> None:
        for up in _links(self.uplink):
            stage.shaper.reconfigure(up.name, {"mtu_bytes": mtu_bytes})


@dataclass(frozen=True, kw_only=True)
class Handover(Fault):
    """WiFi is lost and comes back with other addresses; in between the default route is the cellular one."""

    about = "the WiFi interface goes down with its addresses and comes back with other ones"

    def apply(self, stage: Ground) -> None:
        """Take the interface down; its routes go with it."""
        stage.topology.device.shell(
            f"ip link set {WIFI.name} down\nip address flush dev {WIFI.name}\n"
            + "\n".join(f"ip {family} rule delete lookup {WIFI.table}" for family in ("-4", "-6"))
        )

    def undo(self, stage: Ground) -> None:
        """Bring it up with new addresses, routes and rules."""
        host = stage.next_host()
        v4, v6 = f"{WIFI.router_v4.rpartition('.')[0]}.{host}", f"{WIFI.router_v6.rpartition('::')[0]}::{host:x}"
        lines = [
            f"ip link set {WIFI.name} up",
            f"ip address add {v4}/24 dev {WIFI.name}",
            f"ip address add {v6}/64 dev {WIFI.name} nodad",
        ]
        for family, router, own in (("-4", WIFI.router_v4, v4), ("-6", WIFI.router_v6, v6)):
            lines += [
                f"ip {family} route add default via {router} dev {WIFI.name} metric 100 src {own}",
                f"ip {family} route add default via {router} dev {WIFI.name} src {own} table {WIFI.table}",
                f"ip {family} rule add from {own} lookup {WIFI.table} priority {1000 + WIFI.number}",
            ]
        stage.topology.device.shell("\n".join(lines))


@dataclass(frozen=True, kw_only=True)
class Cable(Fault):
    """The device hangs on a cable beside its radios: a link with neighbours that have to be asked for."""

    about = "the default route is a cable to the WiFi's router, on which neighbours are found by ARP"

    def apply(self, stage: Ground) -> None:
        """Lay it. Neighbours are doubted after a second or two, where Linux takes half a minute."""
        device, router = stage.topology.device, stage.topology.routers[WIFI.name]
        router.shell(f"ip link add lan1 type veth peer name eth0 netns {device.name}")
        router.shell("ip link set lan1 up\nip address add 10.71.3.1/24 dev lan1")
        device.shell(
            "ip link set eth0 up\nip address add 10.71.3.2/24 dev eth0\n"
            "ip route add default via 10.71.3.1 dev eth0 src 10.71.3.2 metric 50\n"
            "echo 1000 > /proc/sys/net/ipv4/neigh/eth0/base_reachable_time_ms\n"
            "echo 1 > /proc/sys/net/ipv4/neigh/eth0/delay_first_probe_time"
        )

    def undo(self, stage: Ground) -> None:
        """Take it away."""
        stage.topology.device.shell("ip link delete eth0")


@dataclass(frozen=True, kw_only=True)
class RouterDead(Fault):
    """The router at the other end of the cable hangs: its port has a carrier, and nobody answers."""

    about = "the router takes no packet from the cable and answers no ARP, while its port stays up"

    def apply(self, stage: Ground) -> None:
        """Hang."""
        router = stage.topology.routers[WIFI.name]
        router.shell("ip link set lan1 arp off")
        hook = "type filter hook ingress device lan1 priority 0; policy drop;"
        _nft(router, f"table netdev hung {{ chain everything {{ {hook} }}; }}")

    def undo(self, stage: Ground) -> None:
        """Work again."""
        router = stage.topology.routers[WIFI.name]
        _nft(router, "delete table netdev hung")
        router.shell("ip link set lan1 arp on")


@dataclass(frozen=True, kw_only=True)
class Prohibited(Fault):
    """The system does not let programs use the network."""

    about = "the device's kernel refuses every way out with EACCES"

    def apply(self, stage: Ground) -> None:
        """Forbid it."""
        for family in ("-4", "-6"):
            stage.topology.device.shell(f"ip {family} rule add prohibit priority 10")

    def undo(self, stage: Ground) -> None:
        """Allow it."""
        for family in ("-4", "-6"):
            stage.topology.device.shell(f"ip {family} rule delete priority 10")


# -- servers ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Unwell(Fault):
    """Addresses of the origin behave otherwise for a time."""

    about = "addresses of the origin behave otherwise for a time"
    behaviour: Behaviour
    unit: tuple[int, ...]
    """Indexes into the origin's addresses."""

    @property
    def what(self) -> str:
        """Name and what differs from a server that works."""
        return f"unwell {_differences(self.behaviour)} at {','.join(map(str, self.unit))}"

    def apply(self, stage: Ground) -> None:
        """Behave so."""
        stage.behave(self.unit, self.behaviour)

    def undo(self, stage: Ground) -> None:
        """Behave as the profile has it."""
        stage.behave(self.unit, None)


@dataclass(frozen=True, kw_only=True)
class DnsUnwell(Fault):
    """DNS answers otherwise for a time."""

    about = "DNS answers otherwise for a time"
    dns: DnsSpec

    @property
    def what(self) -> str:
        """Name and what differs from a server that works."""
        return f"dns-unwell {_differences(self.dns)}"

    def apply(self, stage: Ground) -> None:
        """Answer so."""
        stage.set_dns(self.dns)

    def undo(self, stage: Ground) -> None:
        """Answer as the profile has it."""
        stage.set_dns(None)


def _differences(spec: Behaviour | DnsSpec) -> str:
    return " ".join(f"{name}={value}" for name, value in differences(spec).items())


def differences(spec: Behaviour | DnsSpec) -> dict[str, Any]:
    """Give the fields that are not as by default."""
    usual = type(spec)()
    names = spec.__struct_fields__
    return {name: getattr(spec, name) for name in names if getattr(spec, name) != getattr(usual, name)}
