"""The ways out of a machine beside the one its routes prefer, and whether a socket can be bound to them (Linux).

Binding a socket to an interface and connecting it over UDP sends nothing, and shows three things at once: that this
program may do so, that the interface has a route to far away, and from which address of ours a packet would leave.
"""

import contextlib
import dataclasses
import socket
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from stormline.core import limits_network as limits
from stormline.net import radio
from stormline.net.local import FAR
from stormline.net.stream import bind_device
from stormline.policy.network import NetworkInfo

_UP: Final = 0x1  # RTF_UP of linux/route.h
_REJECT: Final = 0x200
_POINT_TO_POINT: Final = frozenset({"768", "769", "776", "778", "823", "65534"})
"""`ARPHRD_*` of tunnels, and "none": WireGuard, tun."""


def usable(
    found: Sequence[NetworkInfo], plain: Collection[str] = (), *, root: Path = Path("/")
) -> tuple[NetworkInfo, ...]:
    """Give those of the ways found that can be used, the first first; none where there is no second.

    Where the first is a VPN's, or is not what a packet really takes (a rule leads it elsewhere, as VPNs do), there is
    no other: nothing of ours goes around a VPN.

    Args:
        found: networks as looked at, that of the system's own choice first.
        plain: names of interfaces that are no VPN's, whatever they look like.
        root: where `sys` and `proc` are.
    """
    ours = [each for each in found if each.interface in plain or not (each.vpn or _is_tunnel(each.interface, root))]
    if len(ours) < 2 or ours[0] is not found[0]:
        return ()
    first = leaving(found[0].interface)
    if not first or not first & leaving(""):
        return ()
    others = tuple(
        other if other.addresses else dataclasses.replace(other, addresses=tuple(sorted(own)))
        for other in ours[1:]
        if other.routed and (own := leaving(other.interface))
    )
    return (found[0], *others) if others else ()


def leaving(interface: str) -> frozenset[str]:
    """Give the addresses from which packets to far away would leave by an interface; empty text: by any."""
    own = set()
    for family, far in FAR:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            if interface:
                bind_device(probe, interface)
            probe.connect((far, 9))
            own.add(probe.getsockname()[0])
    return frozenset(own)


def _is_tunnel(name: str, root: Path) -> bool:
    if not name or "/" in name or name == "lo":
        return True  # nobody knows what it is
    folder = root / "sys/class/net" / name
    with contextlib.suppress(OSError, ValueError):
        if (folder / "tun_flags").exists():
            return True
        kind = (folder / "type").read_text("ascii").strip()
        return kind in _POINT_TO_POINT and radio.kind_of(name, ethernet=False, root=root) != "cell"
    return False


def default_routes(root: Path = Path("/")) -> list[tuple[str, str]]:
    """Give interface and gateway (empty: none told) of each default route that `/proc/net` shows, the preferred first.

    Lines that make no sense are passed over; an interface is named once.
    """
    found = [*_routes_v4(_lines(root / "proc/net/route")[1:]), *_routes_v6(_lines(root / "proc/net/ipv6_route"))]
    best: dict[str, str] = {}
    for _, name, gateway in sorted(found, key=lambda each: each[0]):  # a stable sort: IPv4 first
        best.setdefault(name, gateway)
    return list(best.items())


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            return file.read(limits.NETLINK_BYTES_MAX).decode("ascii", "replace").splitlines()
    except OSError:
        return []


def _routes_v4(lines: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    for line in lines:
        words = line.split()
        if len(words) < 8 or words[1] != "00000000" or words[7] != "00000000":
            continue
        with contextlib.suppress(ValueError, OSError):
            gateway = socket.inet_ntoa(bytes.fromhex(words[2])[::-1]) if words[2] != "00000000" else ""
            if int(words[3], 16) & (_UP | _REJECT) == _UP:
                yield int(words[6]), words[0], gateway


def _routes_v6(lines: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    for line in lines:
        words = line.split()
        if len(words) < 10 or words[0].strip("0") or words[1] != "00":
            continue
        with contextlib.suppress(ValueError, OSError):
            gateway = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[4])) if words[4].strip("0") else ""
            if int(words[8], 16) & (_UP | _REJECT) == _UP and words[9] != "lo":
                yield int(words[5], 16), words[9], gateway
