"""The laboratory's named networks.

Rates are to the device / from it, losses are of each direction, and where nothing else is said the network is that of
`4g` and the origin has three IPv4 addresses. In profiles about setting connections up a connection serves 10 requests,
so that set-up is met some 30 times in a run.
"""

from typing import Final

from stormline.core import errors
from stormline.lab.faults import (
    Cable,
    CaptivePortal,
    Dark,
    DeadAddress,
    Handover,
    MtuCliff,
    NatForgets,
    OnlyPort,
    Prohibited,
    Resets,
    RouterDead,
    SynDrop,
    UdpBlock,
    UdpLossy,
    UnitCut,
    Unwell,
    V6Dead,
    V6Lossy,
)
from stormline.lab.namespaces import WIFI
from stormline.lab.profiles_model import (
    LinkSpec,
    Profile,
    RttQuantiles,
    ServerSpec,
    always,
    between,
    blinking,
    each_in_turn,
    episodes,
    link,
    recorded_link,
    together,
    with_fades,
)
from stormline.lab.specs import Behaviour, DnsSpec

_WIFI: Final = link(rtt_ms=20, down_mbps=40, up_mbps=40, loss_pct=0.1)
_4G: Final = link(rtt_ms=60, down_mbps=12, up_mbps=6)
_3G: Final = link(rtt_ms=200, down_mbps=1, up_mbps=0.4, loss_pct=1)
_EDGE: Final = link(rtt_ms=600, down_mbps=0.1, up_mbps=0.06, loss_pct=3, queue_kb=32)
_UBER_RTT: Final = RttQuantiles(points=((0, 200), (50, 350), (75, 425), (95, 725), (99, 2300), (100, 3000)))
_FEW: Final = Behaviour(requests_max=10)
"""A server that works, and closes connections often."""


def _bursts(*, mean_loss_pct: float, packets: float) -> dict[str, float]:
    """Give the Gilbert-Elliott chain with that mean loss and mean length of a burst."""
    r_pct = 100 / packets
    return {"p_pct": r_pct * mean_loss_pct / (100 - mean_loss_pct), "r_pct": r_pct}


def _uber() -> LinkSpec:
    base = link(rtt_ms=350, down_mbps=2, up_mbps=0.8, burst=_bursts(mean_loss_pct=3.5, packets=2))
    return LinkSpec(up=base.up, down=base.down, rtt=_UBER_RTT)


def _recorded(name: str, about: str, stem: str, *, rtt_ms: float, queue_kb: int, requests: int = 300) -> Profile:
    wifi = recorded_link(rtt_ms=rtt_ms, down=f"{stem}.down", up=f"{stem}.up", queue_kb=queue_kb)
    return Profile(name=name, about=about, wifi=wifi, requests=requests)


_LINKS: Final = (
    Profile(name="wifi", about="A good home network: 20 ms RTT, 40/40 Mbit/s, 0.1 % loss.", wifi=_WIFI),
    Profile(name="4g", about="A good mobile network: 60 ms RTT, 12/6 Mbit/s, no loss.", wifi=_4G),
    Profile(name="3g", about="An old mobile network: 200 ms RTT, 1/0.4 Mbit/s, 1 % loss.", wifi=_3G),
    Profile(
        name="edge",
        about="The slowest network in use: 600 ms RTT, 100/60 kbit/s, 3 % loss, a queue of 32 KB; 100 requests.",
        wifi=_EDGE,
        requests=100,
    ),
    Profile(
        name="lossy4g",
        about="4G at the edge of the cell: 80 ms RTT, 12/6 Mbit/s; every 1.8 s a fade of 150 ms that loses 60 %.",
        wifi=with_fades(
            link(rtt_ms=80, down_mbps=12, up_mbps=6),
            period_s=1.8,
            duration_s=0.15,
            loss_pct=60.0,
            distribution="uniform",
        ),
    ),
    Profile(
        name="subway",
        about="4G between stations: 4 s of light, 3 s of dark, through the whole run.",
        wifi=_4G,
        plan=blinking(Dark(), good_s=4.0, bad_s=3.0),
    ),
    Profile(
        name="elevator",
        about="4G with four rides: 8 s of dark once in each 30 s.",
        wifi=_4G,
        plan=episodes(Dark(), every_s=30.0, length_s=8.0),
    ),
    Profile(
        name="uber",
        about="RTT of 350, 425, 725 and 2300 ms at the 50th, 75th, 95th and 99th percentile, drawn anew every second, "
        "and 3.5 % loss in bursts of 2 packets, as Uber measured in its markets; 2/0.8 Mbit/s.",
        wifi=_uber(),
    ),
)
_ADDRESSES: Final = (
    Profile(
        name="dead-ip",
        about="One of three addresses of the origin swallows everything; 10 requests a connection.",
        wifi=_4G,
        plan=always(DeadAddress(address=0)),
        server=ServerSpec(behaviour=_FEW),
    ),
    Profile(
        name="ip-dies",
        about="The three addresses of the origin die in turn, each for a quarter of the run.",
        wifi=_4G,
        plan=each_in_turn(0.125, 0.875, *(DeadAddress(address=index) for index in range(3))),
    ),
    Profile(
        name="v6-dead",
        about="Three addresses of each family; IPv6 has a route, and its packets vanish; 10 requests a connection.",
        wifi=_4G,
        plan=always(V6Dead()),
        server=ServerSpec(v6=3, behaviour=_FEW),
    ),
    Profile(
        name="fake-wifi",
        about="WiFi is up and dead from an eighth to five eighths of the run (15 to 75 s); a 4G link works beside it, "
        "and the default route stays on WiFi.",
        wifi=_WIFI,
        cell=_4G,
        plan=between(0.125, 0.625, Dark()),
    ),
    Profile(
        name="handover",
        about="WiFi goes away twice, for 15 s in each minute, and comes back with other addresses; in between the "
        "default route is the 4G link.",
        wifi=_WIFI,
        cell=_4G,
        plan=episodes(Handover(), every_s=60.0, length_s=15.0),
    ),
)
_NAMES: Final = (
    Profile(
        name="dns-hijack",
        about="Every answer of DNS gives the address of a server with a wrong certificate; DNS over HTTPS is honest.",
        wifi=_4G,
        dns=DnsSpec(lie_pct=100),
    ),
    Profile(
        name="dns-flaky",
        about="30 % of DNS answers are lies and 30 % are lost; a TTL of 5 s; 10 requests a connection.",
        wifi=_4G,
        dns=DnsSpec(lie_pct=30, drop_pct=30, ttl_s=5),
        server=ServerSpec(behaviour=_FEW),
    ),
    Profile(
        name="http-hijack",
        about="The origin is asked over plain HTTP, and a box on the way answers every request with a page of its own.",
        wifi=_4G,
        scheme="http",
        plan=always(CaptivePortal(ports=(80,))),
    ),
)
_SERVERS: Final = (
    Profile(
        name="ssl-cut",
        about="35 % of connections lose all TLS records after the first 400 bytes of the server, 15 % are reset in the "
        "handshake; 10 requests a connection.",
        wifi=_4G,
        server=ServerSpec(behaviour=Behaviour(cut_pct=35, reset_pct=15, requests_max=10)),
    ),
    Profile(
        name="stall-accept",
        about="One of three addresses takes connections and requests, and never answers a request.",
        wifi=_4G,
        server=ServerSpec(special={0: Behaviour(mute_pct=100)}),
    ),
    Profile(
        name="accept-only",
        about="One of three addresses accepts TCP and never a TLS handshake; 10 requests a connection.",
        wifi=_4G,
        server=ServerSpec(behaviour=_FEW, special={0: Behaviour(accept_only_pct=100)}),
    ),
    Profile(
        name="stall-body",
        about="8 % of answers stop in mid-body and never go on.",
        wifi=_4G,
        server=ServerSpec(behaviour=Behaviour(stall_pct=8)),
    ),
    Profile(
        name="e5xx",
        about="20 % of requests are answered with 503.",
        wifi=_4G,
        server=ServerSpec(behaviour=Behaviour(error_pct=20)),
    ),
)
_BOXES: Final = (
    Profile(
        name="rst",
        about="2 % of the device's packets on open connections are swallowed and answered with RST.",
        wifi=_4G,
        plan=always(Resets(pct=2)),
    ),
    Profile(
        name="udp-block",
        about="UDP but DNS does not pass.",
        wifi=_4G,
        plan=always(UdpBlock()),
    ),
    Profile(
        name="udp-lossy",
        about="UDP but DNS loses 15 % of its packets and all beyond 64 KB/s.",
        wifi=_4G,
        plan=always(UdpLossy(pct=15, police_kbytes_per_s=64)),
    ),
)
_TRACES: Final = (
    _recorded(
        "tr-lte", "Recorded capacity of LTE in a moving car (AT&T), 60 ms RTT.", "ATT-LTE-driving",
        rtt_ms=60, queue_kb=256,
    ),
    _recorded(
        "tr-umts", "Recorded capacity of UMTS in a moving car (T-Mobile US), 120 ms RTT.", "TMobile-UMTS-driving",
        rtt_ms=120, queue_kb=128,
    ),
    _recorded(
        "tr-evdo", "Recorded capacity of EV-DO in a moving car (Verizon), 150 ms RTT; 150 requests.",
        "Verizon-EVDO-driving", rtt_ms=150, queue_kb=128, requests=150,
    ),
    _recorded(
        "syn-lte", "Capacity made by chance in the manner of LTE: median 4 Mbit/s, short dead spots; 60 ms RTT.",
        "lte-like", rtt_ms=60, queue_kb=256,
    ),
    _recorded(
        "syn-umts", "Capacity made by chance in the manner of UMTS: median 1.5 Mbit/s, dead spots to 6 s; 120 ms RTT.",
        "umts-like", rtt_ms=120, queue_kb=128,
    ),
    _recorded(
        "syn-evdo", "Capacity made by chance in the manner of EV-DO: median 0.5 Mbit/s, dead spots to 12 s; 150 ms "
        "RTT; 150 requests.", "evdo-like", rtt_ms=150, queue_kb=128, requests=150,
    ),
)  # fmt: skip
_TRAPS: Final = (
    Profile(
        name="trap-hol",
        about="Head-of-line blocking: 100 ms RTT, 8/4 Mbit/s, 4 % loss in bursts of 8 packets, 15 requests a second; "
        "lost packets of one answer hold up all that share its connection.",
        wifi=link(rtt_ms=100, down_mbps=8, up_mbps=4, burst=_bursts(mean_loss_pct=4, packets=8)),
        requests=900,
        duration_s=60.0,
    ),
    Profile(
        name="trap-v6",
        about="IPv6 worse than IPv4: three addresses of each, IPv6 loses 20 % of its packets, IPv4 none; 10 requests a "
        "connection; what prefers IPv6 pays.",
        wifi=_4G,
        plan=always(V6Lossy(pct=20)),
        server=ServerSpec(v6=3, behaviour=_FEW),
    ),
    Profile(
        name="trap-concurrency",
        about="Failures rise with requests in flight: the origin works 0.4 s on each, takes 2 side by side, and each "
        "more adds 8 points of chance that a new one keeps its place for 3 s and ends with 503; 480 requests; retries "
        "make it worse, a bound on what is in flight heals it.",
        wifi=_4G,
        server=ServerSpec(
            behaviour=Behaviour(in_flight_free=2, in_flight_pct=8, in_flight_hold_s=0.4, in_flight_stall_s=3.0)
        ),
        requests=480,
    ),
    Profile(
        name="trap-oversize",
        about="Oversize bodies: 300 ms RTT, 200/100 kbit/s, 1 % loss, a queue of 64 KB; an answer of 30 KB fills the "
        "link for 1.2 s and one of 128 KB for 5 s, while small ones wait; 150 requests.",
        wifi=link(rtt_ms=300, down_mbps=0.2, up_mbps=0.1, loss_pct=1, queue_kb=64),
        requests=150,
    ),
)
_MORE: Final = (
    Profile(
        name="syn-drop",
        about="30 % of the packets that open TCP connections vanish; 10 requests a connection.",
        wifi=_4G,
        plan=always(SynDrop(pct=30)),
        server=ServerSpec(behaviour=_FEW),
    ),
    Profile(
        name="one-port",
        about="Nothing but TCP port 443 and DNS passes.",
        wifi=_4G,
        plan=always(OnlyPort(port=443)),
    ),
    Profile(
        name="unit-cut",
        about="The entry of a unit is cut from a quarter to three quarters of the run: two of four addresses at once.",
        wifi=_4G,
        plan=between(0.25, 0.75, UnitCut(unit=(0, 1))),
        server=ServerSpec(v4=4),
    ),
    Profile(
        name="captive",
        about="A captive portal takes all connections over from a quarter to three quarters of the run.",
        wifi=_WIFI,
        plan=between(0.25, 0.75, CaptivePortal()),
    ),
    Profile(
        name="nat-forgets",
        about="The NAT forgets what was idle for 2 s and tells nobody; 40 requests, 3 s apart in the mean.",
        wifi=_4G,
        plan=always(NatForgets(after_s=2)),
        requests=40,
    ),
    Profile(
        name="mtu-cliff",
        about="Packets above 1400 bytes vanish from a quarter to three quarters of the run.",
        wifi=_4G,
        plan=between(0.25, 0.75, MtuCliff(mtu_bytes=1400, uplink=WIFI.name)),
    ),
    Profile(
        name="http10",
        about="A box before the origin speaks only HTTP/1.0: a connection for each request, ended by its close.",
        wifi=_4G,
        server=ServerSpec(behaviour=Behaviour(http10=True)),
    ),
    Profile(
        name="gzip-cut",
        about="10 % of answers are compressed and lack their second half, with a length that fits.",
        wifi=_4G,
        server=ServerSpec(behaviour=Behaviour(truncate_pct=10)),
    ),
    Profile(
        name="slow-body",
        about="10 % of bodies come at 8 kbit/s.",
        wifi=_4G,
        server=ServerSpec(behaviour=Behaviour(slow_pct=10)),
    ),
    Profile(
        name="e5xx-burst",
        about="All requests are answered with 503 for 10 s in each 30 s.",
        wifi=_4G,
        plan=episodes(Unwell(behaviour=Behaviour(error_pct=100), unit=(0, 1, 2)), every_s=30.0, length_s=10.0),
    ),
    Profile(
        name="dns-slow",
        about="Every DNS answer takes 3 s; a TTL of 5 s; 10 requests a connection.",
        wifi=_4G,
        dns=DnsSpec(delay_s=3.0, ttl_s=5),
        server=ServerSpec(behaviour=_FEW),
    ),
    Profile(
        name="dns-empty",
        about="60 % of DNS answers are of no use: 20 % each are empty, NXDOMAIN, SERVFAIL; a TTL of 5 s; 10 requests a "
        "connection.",
        wifi=_4G,
        dns=DnsSpec(empty_pct=20, nxdomain_pct=20, servfail_pct=20, ttl_s=5),
        server=ServerSpec(behaviour=_FEW),
    ),
)
_VERDICTS: Final = (
    Profile(
        name="offline",
        about="WiFi goes away from a quarter to three quarters of the run, and there is no other network.",
        wifi=_WIFI,
        plan=between(0.25, 0.75, Handover()),
    ),
    Profile(
        name="forbidden",
        about="The device's kernel refuses every way out from a quarter to three quarters of the run.",
        wifi=_WIFI,
        plan=between(0.25, 0.75, Prohibited()),
    ),
    Profile(
        name="router-dead",
        about="A cable to a router that hangs from a quarter to three quarters of the run: its port is up and nobody "
        "answers, not even ARP.",
        wifi=_WIFI,
        plan=together(always(Cable()), between(0.25, 0.75, RouterDead())),
    ),
    Profile(
        name="portal",
        about="As `captive`, with 3 requests a connection: those from before, which it leaves alone, do not last.",
        wifi=_WIFI,
        plan=between(0.25, 0.75, CaptivePortal()),
        server=ServerSpec(behaviour=Behaviour(requests_max=3)),
    ),
    Profile(
        name="dns-dead",
        about="DNS does not answer at all; DNS over HTTPS does.",
        wifi=_4G,
        dns=DnsSpec(drop_pct=100),
    ),
    Profile(
        name="server-down",
        about="All addresses of the origin take connections and say nothing from a quarter to three quarters of the "
        "run; 10 requests a connection.",
        wifi=_4G,
        plan=between(0.25, 0.75, Unwell(behaviour=Behaviour(accept_only_pct=100, requests_max=1), unit=(0, 1, 2))),
        server=ServerSpec(behaviour=_FEW),
    ),
)

GROUPS: Final = {
    "Links": _LINKS,
    "Addresses and interfaces": _ADDRESSES,
    "Names and pages": _NAMES,
    "Servers": _SERVERS,
    "Boxes on the way": _BOXES,
    "Capacity traces": _TRACES,
    "Traps": _TRAPS,
    "More faults": _MORE,
    "Verdicts": _VERDICTS,
}
"""All profiles by what they are about."""
PROFILES: Final = {profile.name: profile for group in GROUPS.values() for profile in group}
"""All profiles by name."""
STANDARD: Final = (
    "wifi", "4g", "3g", "edge", "lossy4g", "subway", "elevator", "dead-ip", "dns-hijack", "ssl-cut", "stall-accept",
    "fake-wifi",
)  # fmt: skip
"""The set that clients are compared on."""
QUICK: Final = ("wifi", "elevator", "dead-ip", "stall-accept", "dns-hijack")
"""The set for tests."""


def get(name: str) -> Profile:
    """Give the profile of that name.

    Raises:
        ConfigError: there is none; the message lists the names.
    """
    profile = PROFILES.get(name)
    if profile is None:
        raise errors.ConfigError(f"no profile named {name!r}; there are {', '.join(PROFILES)}")
    return profile
