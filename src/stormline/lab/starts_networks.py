"""The networks that a device comes back to: each of them punishes the usual first choice in its own way."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from stormline.lab.messages import Direction
from stormline.lab.namespaces import CELL, UPLINKS, WIFI, Uplink
from stormline.lab.profiles_model import LinkSpec, Profile, ServerSpec, link
from stormline.lab.specs import Behaviour, DnsSpec

if TYPE_CHECKING:
    from stormline.lab.stage import Stage

SERVER: Final = ServerSpec(v4=3, v6=1)
STAGE: Final = Profile(
    name="starts", about="A device that moves; see `NETWORKS`.", wifi=link(rtt_ms=40), cell=link(rtt_ms=40),
    server=SERVER,
)  # fmt: skip
"""What the stage is before the device has moved anywhere."""
_IPV6: Final = SERVER.v4
"""Index of the origin's IPv6 address."""
DISPATCH: Final = "203.0.113.40"
"""The scheduling centre, port 443."""
GATEWAYS: Final = ("203.0.113.41", "203.0.113.42")
GATEWAY_IPV6: Final = "2001:db8:53::41"
GATEWAY_PORTS: Final = (443, 8080)
ORIGIN_PORTS: Final = (443, 8443)
_CARRIES_DATA: Final = "tcp flags & (syn | fin | rst | psh) == psh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """One network, as the device finds it.

    Attributes:
        name: of it.
        about: one sentence with its numbers.
        uplink: what carries it.
        link: how it does that.
        device, router: IPv4 addresses on it, /24.
        ipv6: there is a route for IPv6.
        drops: nftables conditions on packets from the device that its router swallows.
        behaviours: what addresses of the origin do wrong while the device is here, by index.
        dns: how its name server does.
        learnable: something can be learned here.
    """

    name: str
    about: str
    uplink: Uplink
    link: LinkSpec
    device: str
    router: str
    ipv6: bool = True
    drops: tuple[str, ...] = ()
    behaviours: Mapping[int, Behaviour] = field(default_factory=dict)
    dns: DnsSpec = field(default_factory=DnsSpec)
    learnable: bool = True


HOME: Final = Network(
    name="home",
    about="WiFi, 24 ms, 40/20 Mbit/s, 0.1 % loss; IPv6 has a route and is a hole; DNS answers after 1.5 s.",
    uplink=WIFI,
    link=link(rtt_ms=24, down_mbps=40, up_mbps=20, loss_pct=0.1),
    device="192.168.1.23",
    router="192.168.1.1",
    drops=("meta nfproto ipv6",),
    dns=DnsSpec(delay_s=1.5),
)
OFFICE: Final = Network(
    name="office",
    about="WiFi, 12 ms, 40/40 Mbit/s, no IPv6; a box swallows the origin's first address, what is said over HTTP/2, "
    "and whatever a gateway is told on port 443 once TCP stands.",
    uplink=WIFI,
    link=link(rtt_ms=12, down_mbps=40, up_mbps=40),
    device="10.20.30.44",
    router="10.20.30.1",
    ipv6=False,
    drops=(
        "ip daddr 203.0.113.10",
        f"ip daddr {{ {', '.join(GATEWAYS)} }} tcp dport 443 {_CARRIES_DATA}",
        "meta l4proto udp udp dport != 53",
    ),
    behaviours=dict.fromkeys(range(SERVER.v4), Behaviour(mute_http2=True)),
)
CELLULAR: Final = Network(
    name="cellular",
    about="120 ms, 6/2 Mbit/s, 1 % loss; the origin's IPv6 address takes requests and never answers; the gateways' "
    "IPv6 and first IPv4 address are out of reach.",
    uplink=CELL,
    link=link(rtt_ms=120, down_mbps=6, up_mbps=2, loss_pct=1.0),
    device="10.71.2.2",
    router="10.71.2.1",
    drops=(f"ip6 daddr {GATEWAY_IPV6}", f"ip daddr {GATEWAYS[0]}"),
    behaviours={_IPV6: Behaviour(mute_pct=100)},
)
GOOD: Final = Network(
    name="good",
    about="WiFi, 50 ms, 12/6 Mbit/s, nothing wrong: nothing can be learned that would be worth time.",
    uplink=WIFI,
    link=link(rtt_ms=50, down_mbps=12, up_mbps=6),
    device="172.16.5.9",
    router="172.16.5.1",
    learnable=False,
)
SHOP_WIFI: Final = Network(
    name="first-run",
    about="Where the app is installed and runs once: WiFi, 40 ms, nothing wrong.",
    uplink=WIFI,
    link=link(rtt_ms=40),
    device="192.168.77.5",
    router="192.168.77.1",
    learnable=False,
)
NETWORKS: Final = (HOME, OFFICE, CELLULAR, GOOD)


def move(stage: "Stage", network: Network) -> None:
    """Take the device to another network: addresses, routes, link, and what is wrong there.

    Raises:
        PlatformError: the machine refuses.
    """
    uplink = network.uplink
    router = stage.topology.routers[uplink.name]
    lines = [f"ip address flush dev {each.name}\nip link set {each.name} down" for each in UPLINKS]
    lines += [
        f"ip link set {uplink.name} up",
        f"ip address add {network.device}/24 dev {uplink.name}",
        f"ip route add default via {network.router} dev {uplink.name} src {network.device}",
    ]
    if network.ipv6:
        lines += [
            f"ip address add {uplink.device_v6}/64 dev {uplink.name} nodad",
            f"ip -6 route add default via {uplink.router_v6} dev {uplink.name} src {uplink.device_v6}",
        ]
    stage.topology.device.shell("\n".join(lines))
    drops = "\n".join(f'iifname "lan0" {each} drop' for each in network.drops)
    router.shell(
        f"ip address replace {network.router}/24 dev lan0\n"
        "nft -f - <<'END'\n"
        "table inet starts {\nchain forward {\ntype filter hook forward priority filter\n}\n}\n"
        "flush table inet starts\n"
        f"table inet starts {{\nchain forward {{\n{drops}\n}}\n}}\nEND"
    )
    for direction, fields in ((Direction.UP, network.link.up), (Direction.DOWN, network.link.down)):
        stage.shaper.reconfigure(uplink.name, dict(fields), direction=direction, whole=True)
    for index in range(len(stage.addresses)):
        stage.behave([index], network.behaviours.get(index))
    stage.set_dns(network.dns)
