"""Echo requests (RFC 792, RFC 4443), without privileges where the system has datagram sockets for them.

Linux gives them to the groups in `net.ipv4.ping_group_range`, macOS to everybody; else a raw socket is tried, which
needs privileges. Where neither is to be had the answer says so.
"""

import asyncio
import socket
import struct
from typing import Final, NamedTuple

from stormline.core import limits_diagnosis as limits
from stormline.core.clock import Rng
from stormline.net.system import LINUX

_HEAD: Final = struct.Struct("!BBHHH")
_REQUEST: Final = {socket.AF_INET: 8, socket.AF_INET6: 128}
_REPLY: Final = {socket.AF_INET: 0, socket.AF_INET6: 129}
_PROTOCOL: Final = {socket.AF_INET: socket.IPPROTO_ICMP, socket.AF_INET6: socket.IPPROTO_ICMPV6}
_IPV4_HEAD_BYTES: Final = 20
_RECEIVE_BYTES: Final = 4096
_MTU_DISCOVER: Final = {socket.AF_INET: (socket.IPPROTO_IP, 10), socket.AF_INET6: (socket.IPPROTO_IPV6, 23)}
"""`IP_MTU_DISCOVER`, `IPV6_MTU_DISCOVER` of Linux."""
_PROBE: Final = 3
"""`IP_PMTUDISC_PROBE`: never fragment, and heed no path MTU that is known."""


class Echo(NamedTuple):
    """What came of echo requests.

    Attributes:
        sent: how many went out.
        answered: how many came back.
        rtt_s: the shortest round trip; None where none came back.
        why_not: why none could be sent; empty where they could.
    """

    sent: int
    answered: int
    rtt_s: float | None
    why_not: str = ""


def family_of(host: str) -> socket.AddressFamily:
    """Give the family of an IP literal."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def target_of(host: str, port: int, index: int = 0) -> tuple[str, int] | tuple[str, int, int, int]:
    """Give an address as sockets take it; `index` is the interface of an address that holds on one link only."""
    if ":" not in host:
        return (host, port)
    bare, _, scope = host.partition("%")
    if scope:
        index = int(scope) if scope.isdecimal() else socket.if_nametoindex(scope)
    return (bare, port, 0, index)


def checksum(data: bytes) -> int:
    """Give the Internet checksum (RFC 1071)."""
    if len(data) % 2:
        data += b"\0"
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def request(family: int, number: int, sequence: int, payload: bytes) -> bytes:
    """Make an echo request; the kernel puts in what is its own (identifier of datagram sockets, checksum of IPv6)."""
    kind = _REQUEST[socket.AddressFamily(family)]
    head = _HEAD.pack(kind, 0, 0, number, sequence)
    if family == socket.AF_INET:
        head = _HEAD.pack(kind, 0, checksum(head + payload), number, sequence)
    return head + payload


def read_reply(data: bytes, family: int, payload: bytes, *, raw: bool) -> int | None:
    """Give the sequence number of the reply to a request with `payload`; None for anything else."""
    if raw and family == socket.AF_INET and data:
        data = data[max(_IPV4_HEAD_BYTES, 4 * (data[0] & 0x0F)) :]
    if len(data) < _HEAD.size or not data[_HEAD.size :].startswith(payload[:16]):
        return None
    sequence: int
    kind, code, _, _, sequence = _HEAD.unpack_from(data)
    return sequence if (kind, code) == (_REPLY[socket.AddressFamily(family)], 0) else None


def _open(family: socket.AddressFamily) -> tuple[socket.socket, bool]:
    """Open a socket for echo requests, and say whether it is a raw one.

    Raises:
        OSError: neither kind is to be had.
    """
    try:
        return socket.socket(family, socket.SOCK_DGRAM, _PROTOCOL[family]), False
    except OSError:
        return socket.socket(family, socket.SOCK_RAW, _PROTOCOL[family]), True


async def echo(
    host: str, rng: Rng, *, index: int = 0, payload_bytes: int = 56, whole: bool = False, count: int | None = None
) -> Echo:
    """Ask a machine for echoes, `limits_diagnosis.DIAGNOSIS_ECHOES` times unless `count` says otherwise.

    Never raises; cancelled, it leaves nothing behind.

    Args:
        host: an IP literal.
        rng: for the number of the questions, and what is in them.
        index: interface of an address that holds on one link only.
        payload_bytes: size of what is to be echoed; at least 16.
        whole: the packets must not be cut on the way (Linux).
    """
    family = family_of(host)
    try:
        sock, raw = _open(family)
    except OSError as error:
        return Echo(0, 0, None, f"the system gives no ICMP socket to this program ({error.strerror})")
    with sock:
        sock.setblocking(False)
        try:
            if whole and LINUX:
                level, option = _MTU_DISCOVER[family]
                sock.setsockopt(level, option, _PROBE)
            sock.connect(target_of(host, 0, index))
        except OSError as error:
            return Echo(0, 0, None, f"{error.strerror or error}")
        payload = rng.token_bytes(16).ljust(payload_bytes, b"\0")
        number = int.from_bytes(rng.token_bytes(2), "big")
        return await _exchange(sock, raw, number, payload, limits.DIAGNOSIS_ECHOES if count is None else count)


async def _exchange(sock: socket.socket, raw: bool, number: int, payload: bytes, count: int) -> Echo:
    loop = asyncio.get_running_loop()
    sent_at: dict[int, float] = {}
    trips: dict[int, float] = {}

    async def listen() -> None:
        while len(trips) < count:
            try:
                data = await loop.sock_recv(sock, _RECEIVE_BYTES)
            except OSError:  # a router says that it cannot be reached; another may still come through
                await asyncio.sleep(limits.DIAGNOSIS_POLL_S)
                continue
            sequence = read_reply(data, sock.family, payload, raw=raw)
            if sequence is not None and sequence in sent_at:
                trips.setdefault(sequence, loop.time() - sent_at[sequence])

    listener = loop.create_task(listen(), name="echoes")
    why = ""
    try:
        for sequence in range(1, count + 1):
            try:
                sock.send(request(sock.family, number, sequence, payload))
                sent_at[sequence] = loop.time()
            except OSError as error:
                why = f"{error.strerror or error}"
            if sequence < count:
                await asyncio.wait({listener}, timeout=limits.DIAGNOSIS_ECHO_PAUSE_S)
        if sent_at:
            await asyncio.wait({listener}, timeout=limits.DIAGNOSIS_ECHO_S)
    finally:
        listener.cancel()
        await asyncio.wait({listener})
    return Echo(len(sent_at), len(trips), min(trips.values(), default=None), "" if sent_at else why)
