"""The routers on the way to an address, and the size of packets that they pass on; Linux, no privileges needed.

A packet that may not go far (TTL, hop limit) comes to its end at a router, which says so; the kernel keeps what it said
in the socket's queue of errors (`IP_RECVERR`, ip(7)). UDP and TCP are sent side by side, as many networks answer for
one of them only; TCP goes to the port that is asked about, so it gets as far as requests do.
"""

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from stormline.core import limits_diagnosis as limits
from stormline.core.values import Address
from stormline.net.icmp import family_of, target_of
from stormline.net.system import LINUX

_RECVERR: Final = {socket.AF_INET: (socket.IPPROTO_IP, 11), socket.AF_INET6: (socket.IPPROTO_IPV6, 25)}
_HOPS: Final = {
    socket.AF_INET: (socket.IPPROTO_IP, socket.IP_TTL),
    socket.AF_INET6: (socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS),
}
_MTU: Final = {socket.AF_INET: (socket.IPPROTO_IP, 14), socket.AF_INET6: (socket.IPPROTO_IPV6, 24)}
_MTU_DISCOVER: Final = {socket.AF_INET: (socket.IPPROTO_IP, 10), socket.AF_INET6: (socket.IPPROTO_IPV6, 23)}
_DO: Final = 2
"""`IP_PMTUDISC_DO`: never fragment, heed what routers say of the path."""
_ERRQUEUE: Final = 0x2000
_EXTENDED: Final = struct.Struct("=IBBBBII")
"""`struct sock_extended_err` of linux/errqueue.h; the address of who said it follows."""
_FROM_ROUTERS: Final = frozenset({2, 3})  # SO_EE_ORIGIN_ICMP, SO_EE_ORIGIN_ICMP6
_HEADS_BYTES: Final = {socket.AF_INET: 28, socket.AF_INET6: 48}
"""IP's and UDP's headers."""


class Hop(NamedTuple):
    """A router on the way, or the end of it.

    Attributes:
        ttl: its place, from 1.
        host: its IP literal; empty where it says nothing.
        rtt_s: until it said something, to `limits_diagnosis.DIAGNOSIS_POLL_S`; None where it did not.
        end: it is the address itself.
    """

    ttl: int
    host: str = ""
    rtt_s: float | None = None
    end: bool = False


class _Told(NamedTuple):
    """An error that the kernel queued: its errno, who said it, and the port that the packet was for."""

    errno: int
    host: str
    port: int


def _next_error(sock: socket.socket) -> _Told | None:
    """Take one error off a socket's queue; None where there is none."""
    try:
        _, control, _, name = sock.recvmsg(512, 512, _ERRQUEUE)
    except OSError:
        return None
    level, option = _RECVERR[sock.family]
    for at_level, kind, data in control:
        if (at_level, kind) != (level, option) or len(data) < _EXTENDED.size:
            continue
        number, origin, _, _, _, _, _ = _EXTENDED.unpack_from(data)
        if origin not in _FROM_ROUTERS:
            return _Told(number, "", name[1] if name else 0)
        offender = data[_EXTENDED.size :]
        host = ""
        if sock.family == socket.AF_INET and len(offender) >= 8:
            host = socket.inet_ntop(socket.AF_INET, offender[4:8])
        elif sock.family == socket.AF_INET6 and len(offender) >= 24:
            host = socket.inet_ntop(socket.AF_INET6, offender[8:24])
        return _Told(number, host, name[1] if name else 0)
    return None


async def trace(address: Address) -> list[Hop]:
    """Find the routers on the way, `limits_diagnosis.DIAGNOSIS_HOPS_MAX` at most; the last that answered ends the list.

    Safe to cancel.

    Raises:
        OSError: this system has no queue of errors, or sends nothing there.
    """
    if not LINUX:
        raise OSError(errno.ENOTSUP, "only Linux tells a program without privileges what routers say")
    by_udp, by_tcp = await asyncio.gather(_trace_udp(address), _trace_tcp(address))
    hops: list[Hop] = []
    for ttl in range(1, limits.DIAGNOSIS_HOPS_MAX + 1):
        seen = [each[ttl] for each in (by_tcp, by_udp) if ttl in each]
        ends = [each for each in seen if each.end]
        hops.append((ends or [each for each in seen if each.host] or [Hop(ttl)])[0])
        if ends:
            return hops
    while hops and not hops[-1].host:
        hops.pop()
    return hops


async def _trace_udp(address: Address) -> dict[int, Hop]:
    """Send a datagram for each hop, to a port of its own by which its error is known."""
    loop = asyncio.get_running_loop()
    family = family_of(address.host)
    hops: dict[int, Hop] = {}
    sent_at: dict[int, float] = {}

    def look() -> None:
        while (told := _next_error(sock)) is not None:
            ttl = told.port - limits.DIAGNOSIS_TRACE_PORT
            if ttl in sent_at and ttl not in hops and told.host:
                end = told.errno == errno.ECONNREFUSED and told.host == address.host
                hops[ttl] = Hop(ttl, told.host, loop.time() - sent_at[ttl], end)

    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.setsockopt(*_RECVERR[family], 1)
        for ttl in range(1, limits.DIAGNOSIS_HOPS_MAX + 1):
            sock.setsockopt(*_HOPS[family], ttl)
            with contextlib.suppress(OSError):  # what an earlier one met is told with a later one
                sock.sendto(bytes(16), target_of(address.host, limits.DIAGNOSIS_TRACE_PORT + ttl))
            sent_at[ttl] = loop.time()
            if await _looked(look, hops, limits.DIAGNOSIS_TRACE_PAUSE_S):
                return hops
        await _looked(look, hops, limits.DIAGNOSIS_TRACE_S)
    return hops


async def _trace_tcp(address: Address) -> dict[int, Hop]:
    """Try to connect with each hop as the farthest; what gets through is closed at once."""
    loop = asyncio.get_running_loop()
    family = family_of(address.host)
    hops: dict[int, Hop] = {}
    socks: dict[int, tuple[socket.socket, float]] = {}

    def look() -> None:
        for ttl, (sock, at) in socks.items():
            if ttl not in hops and (hop := _tcp_hop(sock, ttl, loop.time() - at, address)) is not None:
                hops[ttl] = hop

    try:
        for ttl in range(1, limits.DIAGNOSIS_HOPS_MAX + 1):
            sock = socket.socket(family, socket.SOCK_STREAM)
            socks[ttl] = sock, loop.time()
            sock.setblocking(False)
            sock.setsockopt(*_RECVERR[family], 1)
            sock.setsockopt(*_HOPS[family], ttl)
            sock.connect_ex(target_of(*address))
            if await _looked(look, hops, limits.DIAGNOSIS_TRACE_PAUSE_S):
                return hops
        await _looked(look, hops, limits.DIAGNOSIS_TRACE_S)
    finally:
        for sock, _ in socks.values():
            sock.close()
    return hops


async def _looked(look: Callable[[], None], hops: dict[int, Hop], longest_s: float) -> bool:
    """Look for a while; say whether the end and all before it are known."""
    loop = asyncio.get_running_loop()
    until = loop.time() + longest_s
    while True:
        look()
        if _complete(hops):
            return True
        if loop.time() >= until:
            return False
        await asyncio.sleep(limits.DIAGNOSIS_POLL_S)


def _tcp_hop(sock: socket.socket, ttl: int, took_s: float, address: Address) -> Hop | None:
    """Say what one connection met by now; None: nothing yet."""
    told = _next_error(sock)
    if told is not None and told.host:
        return Hop(ttl, told.host, took_s)
    failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if failed == errno.ECONNREFUSED:
        return Hop(ttl, address.host, took_s, end=True)
    if failed:
        return None
    try:
        sock.getpeername()
    except OSError:
        return None
    return Hop(ttl, address.host, took_s, end=True)


def _complete(hops: dict[int, Hop]) -> bool:
    """Say whether the end and all before it are known."""
    end = next((ttl for ttl in sorted(hops) if hops[ttl].end), None)
    return end is not None and all(ttl in hops for ttl in range(1, end))


async def path_mtu(address: Address) -> int:
    """Give the size of packets that pass to an address as far as the kernel knows, having tried with a large one.

    Where a router drops large packets and does not say so, this is the size of the first link. Safe to cancel.

    Raises:
        OSError: this system does not tell, or sends nothing there.
    """
    if not LINUX:
        raise OSError(errno.ENOTSUP, "only Linux tells a program the size of a path")
    loop = asyncio.get_running_loop()
    family = family_of(address.host)
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.setsockopt(*_MTU_DISCOVER[family], _DO)
        sock.connect(target_of(address.host, limits.DIAGNOSIS_TRACE_PORT))
        mtu = sock.getsockopt(*_MTU[family])
        for _ in range(limits.DIAGNOSIS_MTU_TRIES):
            with contextlib.suppress(OSError):
                sock.send(bytes(max(0, min(mtu, 65535) - _HEADS_BYTES[family])))
            until = loop.time() + limits.DIAGNOSIS_MTU_S
            smaller = mtu
            while smaller == mtu and loop.time() < until:
                await asyncio.sleep(limits.DIAGNOSIS_POLL_S)
                answered = _answered(sock)
                smaller = sock.getsockopt(*_MTU[family])
                if answered and smaller == mtu:
                    return mtu
            if smaller >= mtu:
                break
            mtu = smaller
    return mtu


def _answered(sock: socket.socket) -> bool:
    """Say whether the end itself has said that nobody listens there: the packet arrived."""
    try:
        sock.recv(16)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
