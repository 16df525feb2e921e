"""Messages of Linux' routing socket: the few questions we ask and the little we read of the answers.

Pure: bytes in, values out, within bounds whatever the bytes are. Sources: `linux/netlink.h`, `linux/rtnetlink.h`,
`linux/if_addr.h`, `linux/neighbour.h`; RFC 3549. Numbers are in the machine's own byte order, addresses in the
network's.
"""

import ipaddress
import socket
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from stormline.core import limits_network as limits

NEWLINK: Final = 16
DELLINK: Final = 17
GETLINK: Final = 18
NEWADDR: Final = 20
DELADDR: Final = 21
GETADDR: Final = 22
NEWROUTE: Final = 24
DELROUTE: Final = 25
GETROUTE: Final = 26
NEWNEIGH: Final = 28
GETNEIGH: Final = 30
ERROR: Final = 2
DONE: Final = 3
MAIN: Final = 254
"""The table of routes that everything uses for which no rule names another."""

GROUPS: Final = 0x1 | 0x10 | 0x40 | 0x100 | 0x400
"""What is listened to (`RTMGRP_*`): links, IPv4 addresses and routes, IPv6 addresses and routes."""

_HEADER: Final = struct.Struct("=IHHII")
_ATTRIBUTE: Final = struct.Struct("=HH")
_LINK: Final = struct.Struct("=BxHiII")
_ADDRESS: Final = struct.Struct("=BBBBI")
_ROUTE: Final = struct.Struct("=BBBBBBBBI")
_NEIGHBOUR: Final = struct.Struct("=BxxxiHBB")
_CACHE: Final = struct.Struct("=IIII")
_REQUEST: Final = 0x1
_DUMP: Final = 0x300
_IFNAME: Final = 3
_IFLA_LINKINFO: Final = 18
_IFLA_INFO_KIND: Final = 1
_IFA_ADDRESS: Final = 1
_IFA_LOCAL: Final = 2
_RTA_DST: Final = 1
_RTA_OIF: Final = 4
_RTA_GATEWAY: Final = 5
_RTA_PRIORITY: Final = 6
_RTA_TABLE: Final = 15
_RTA_VIA: Final = 18
_NDA_DST: Final = 1
_NDA_LLADDR: Final = 2
_NDA_CACHEINFO: Final = 3
_NESTED: Final = 0x3FFF
_IFF_UP: Final = 0x1
_IFF_RUNNING: Final = 0x40
_IFA_UNUSABLE: Final = 0x08 | 0x20 | 0x40  # failed detection of duplicates, deprecated, tentative
_RTN_UNICAST: Final = 1
_NUD_ALIVE: Final = 0x02 | 0x40 | 0x80  # reachable, no ARP, permanent
_NUD_GONE: Final = 0x20  # failed
_NUD_ASKING: Final = 0x01  # incomplete
_NUD_NOARP: Final = 0x40
_LINK_ETHER: Final = 1
_TICKS_PER_S: Final = 100.0  # USER_HZ


class Link(NamedTuple):
    """An interface.

    Attributes:
        number: of the interface.
        name: its name.
        up: it is switched on and has a carrier.
        ethernet: it is one that asks for link-layer addresses (WiFi too).
        what: the kernel's word for a virtual one (`tun`, `wireguard`, `veth`), else empty.
        gone: this message says that it is no more.
    """

    number: int
    name: str
    up: bool
    ethernet: bool
    what: str
    gone: bool


class OwnAddress(NamedTuple):
    """An address of ours: the number of its interface, the IP literal, length of its prefix; `gone`: it is no more."""

    number: int
    address: str
    prefix: int
    gone: bool


class Route(NamedTuple):
    """A route.

    Attributes:
        number: of its interface.
        gateway: empty where none is needed.
        default: it leads everywhere.
        gone: this message says that it is no more.
        metric: the lower, the better.
        table: of the kernel's tables; that of everybody is `MAIN`.
    """

    number: int
    gateway: str
    default: bool
    gone: bool
    metric: int = 0
    table: int = 254


class Neighbour(NamedTuple):
    """A machine on the same link.

    Attributes:
        number: of the interface.
        address: its IP literal.
        link: its link-layer address in hexadecimal, empty where unknown.
        alive: the kernel holds it for reachable, by its own measure.
        failed: it was asked and did not answer.
        asking: the question is out.
        none: this link has no link-layer addresses.
        confirmed_age_s: since it last showed life; None where unknown.
    """

    number: int
    address: str
    link: str
    alive: bool
    failed: bool
    asking: bool
    none: bool
    confirmed_age_s: float | None


class Failed(NamedTuple):
    """The kernel says no, with a positive errno; 0: yes."""

    errno: int


class Done(NamedTuple):
    """The end of a list."""


Message = Link | OwnAddress | Route | Neighbour | Failed | Done


# -- questions --------------------------------------------------------------------------------------------------------
def _ask(kind: int, body: bytes, sequence: int, *, dump: bool = False) -> bytes:
    flags = _REQUEST | (_DUMP if dump else 0)
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, sequence, 0) + body


def _attribute(kind: int, value: bytes) -> bytes:
    size = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(size, kind) + value + bytes(-size % 4)


def _packed(address: str) -> tuple[int, bytes]:
    literal = ipaddress.ip_address(address.partition("%")[0])
    return (socket.AF_INET6 if literal.version == 6 else socket.AF_INET), literal.packed


def ask_route(address: str, sequence: int) -> bytes:
    """Ask by which route a packet to `address` (an IP literal) would go; nothing is sent there."""
    family, packed = _packed(address)
    head = _ROUTE.pack(family, 8 * len(packed), 0, 0, 0, 0, 0, 0, 0)
    return _ask(GETROUTE, head + _attribute(_RTA_DST, packed), sequence)


def ask_routes(family: int, sequence: int) -> bytes:
    """Ask for all routes of an address family."""
    return _ask(GETROUTE, _ROUTE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0), sequence, dump=True)


def ask_link(index: int, sequence: int) -> bytes:
    """Ask for one interface."""
    return _ask(GETLINK, _LINK.pack(0, 0, index, 0, 0), sequence)


def ask_addresses(sequence: int) -> bytes:
    """Ask for all our addresses."""
    return _ask(GETADDR, _ADDRESS.pack(0, 0, 0, 0, 0), sequence, dump=True)


def ask_neighbour(index: int, address: str, sequence: int) -> bytes:
    """Ask what the kernel knows of a machine on the link (Linux 5.0)."""
    family, packed = _packed(address)
    return _ask(GETNEIGH, _NEIGHBOUR.pack(family, index, 0, 0, 0) + _attribute(_NDA_DST, packed), sequence)


# -- answers ----------------------------------------------------------------------------------------------------------
def parse(data: bytes, sequence: int | None = None) -> Iterator[Message]:
    """Read a datagram; what is not of interest, cut short or makes no sense is passed over.

    Args:
        data: what the socket gave.
        sequence: only answers to this question; None: everything.
    """
    at = 0
    for _ in range(limits.NETLINK_MESSAGES_MAX):
        if at + _HEADER.size > len(data):
            return
        size, kind, _, number, _ = _HEADER.unpack_from(data, at)
        if size < _HEADER.size or at + size > len(data):
            return
        body = data[at + _HEADER.size : at + size]
        at += (size + 3) & ~3
        if sequence is not None and number != sequence:
            continue
        message = _message(kind, body)
        if message is not None:
            yield message


def _message(kind: int, body: bytes) -> Message | None:
    if kind == DONE:
        return Done()
    if kind == ERROR:
        return Failed(abs(struct.unpack_from("=i", body)[0])) if len(body) >= 4 else None
    if kind in (NEWLINK, DELLINK):
        return _link(body, kind == DELLINK)
    if kind in (NEWADDR, DELADDR):
        return _own(body, kind == DELADDR)
    if kind in (NEWROUTE, DELROUTE):
        return _route(body, kind == DELROUTE)
    return _neighbour(body) if kind == NEWNEIGH else None


def _attributes(data: bytes, at: int) -> dict[int, bytes]:
    """Read attributes; of two of a kind the last counts."""
    found: dict[int, bytes] = {}
    for _ in range(limits.NETLINK_ATTRIBUTES_MAX):
        if at + _ATTRIBUTE.size > len(data):
            break
        size, kind = _ATTRIBUTE.unpack_from(data, at)
        if size < _ATTRIBUTE.size or at + size > len(data):
            break
        found[kind & _NESTED] = data[at + _ATTRIBUTE.size : at + size]
        at += (size + 3) & ~3
    return found


def _text(value: bytes) -> str:
    return value.split(b"\0", 1)[0].decode("utf-8", "replace")


def _literal(value: bytes) -> str:
    return str(ipaddress.ip_address(value)) if len(value) in (4, 16) else ""


def _link(body: bytes, gone: bool) -> Link | None:
    if len(body) < _LINK.size:
        return None
    _, kind, index, flags, _ = _LINK.unpack_from(body)
    found = _attributes(body, _LINK.size)
    info = _attributes(found.get(_IFLA_LINKINFO, b""), 0)
    running = flags & (_IFF_UP | _IFF_RUNNING) == _IFF_UP | _IFF_RUNNING
    return Link(
        index, _text(found.get(_IFNAME, b"")), running, kind == _LINK_ETHER, _text(info.get(_IFLA_INFO_KIND, b"")), gone
    )


def _own(body: bytes, gone: bool) -> OwnAddress | None:
    if len(body) < _ADDRESS.size:
        return None
    _, prefix, flags, _, index = _ADDRESS.unpack_from(body)
    found = _attributes(body, _ADDRESS.size)
    address = _literal(found.get(_IFA_LOCAL, found.get(_IFA_ADDRESS, b"")))
    if not address or (flags & _IFA_UNUSABLE and not gone):
        return None
    return OwnAddress(index, address, prefix, gone)


def _route(body: bytes, gone: bool) -> Route | None:
    if len(body) < _ROUTE.size:
        return None
    _, length, _, _, table, _, _, kind, _ = _ROUTE.unpack_from(body)
    if kind != _RTN_UNICAST:
        return None
    found = _attributes(body, _ROUTE.size)
    oif = found.get(_RTA_OIF, b"")
    via = found.get(_RTA_VIA, b"")
    gateway = _literal(found.get(_RTA_GATEWAY, b"")) or _literal(via[2:])
    return Route(
        _number(oif, 0),
        gateway,
        length == 0,
        gone,
        _number(found.get(_RTA_PRIORITY, b""), 0),
        _number(found.get(_RTA_TABLE, b""), table),
    )


def _number(value: bytes, absent: int) -> int:
    number: int = struct.unpack("=I", value)[0] if len(value) == 4 else absent
    return number


def _neighbour(body: bytes) -> Neighbour | None:
    if len(body) < _NEIGHBOUR.size:
        return None
    _, index, state, _, _ = _NEIGHBOUR.unpack_from(body)
    found = _attributes(body, _NEIGHBOUR.size)
    address = _literal(found.get(_NDA_DST, b""))
    if not address:
        return None
    cache = found.get(_NDA_CACHEINFO, b"")
    confirmed = _CACHE.unpack_from(cache)[0] / _TICKS_PER_S if len(cache) >= _CACHE.size else None
    link = found.get(_NDA_LLADDR, b"")
    return Neighbour(
        index,
        address,
        link.hex() if 0 < len(link) <= 32 and any(link) else "",
        bool(state & _NUD_ALIVE),
        bool(state & _NUD_GONE),
        bool(state & _NUD_ASKING),
        bool(state & _NUD_NOARP),
        confirmed,
    )
