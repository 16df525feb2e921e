"""Carries out the probes that `policy.verdict` asks for: small, bounded, and to nobody the client does not talk to.

Each takes its time at most and never raises; cancelled, it leaves nothing behind.
"""

import asyncio
import contextlib
import errno
import json
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

from stormline.core import limits_network as limits
from stormline.core.errors import ConfigError
from stormline.core.values import Address
from stormline.net.stream import Stream
from stormline.net.tls import start_tls
from stormline.policy.network import NetworkInfo
from stormline.policy.verdict import Finding
from stormline.wire import dns as wire

DISCARD_PORT: Final = 9
"""Where the datagram goes that makes the kernel ask for its neighbour (RFC 863); a machine that is there says no."""
_DNS_HEAD_BYTES: Final = 12
_ANSWERED_RCODES: Final = frozenset({0, 3})  # NOERROR, NXDOMAIN: it knows
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})")
_OPEN_TEXT: Final = re.compile(r"success|connect ?test|is online", re.IGNORECASE)
"""What the usual check pages say (Apple, Firefox, Microsoft, NetworkManager)."""
_OPEN_TEXT_BYTES_MAX: Final = 128
_RESOLV_CONF: Final = Path("/etc/resolv.conf")

OpenTcp = Callable[[Address], Awaitable[Stream]]
"""Connects to one address."""
Resolve = Callable[[str, int], Awaitable[tuple[Address, ...]]]
"""Gives the addresses of a name."""


class Beside(Protocol):
    """What the kernel knows of a machine on the link; `net.rtnetlink.Neighbour` is one."""

    @property
    def failed(self) -> bool:
        """It was asked and did not answer."""
        ...

    @property
    def asking(self) -> bool:
        """The question is out."""
        ...

    @property
    def none(self) -> bool:
        """There is nothing to ask for on this link."""
        ...

    @property
    def confirmed_age_s(self) -> float | None:
        """Since it last showed life."""
        ...


async def gateway(info: NetworkInfo, neighbour: Callable[[int, str], Beside | None] | None) -> Finding:
    """Find out whether the next router answers on the link.

    One empty datagram to a port that nobody listens on makes the kernel ask for the router's link-layer address, and
    the router say that the port is closed. Either answer will do; silence to the datagram alone says nothing, as
    routers may be set to be silent.

    Args:
        info: the network.
        neighbour: gives the kernel's entry of a machine by interface number and address; None: it cannot be read.

    Returns:
        ANSWERED, SILENT (the kernel asked in vain), or UNKNOWN.
    """
    loop = asyncio.get_running_loop()
    host = info.gateway
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    began = loop.time()
    asking = False
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.setblocking(False)
            probe.connect((host, DISCARD_PORT, 0, info.index) if family == socket.AF_INET6 else (host, DISCARD_PORT))
            probe.send(b"")
            while loop.time() - began < limits.PROBE_GATEWAY_S:
                await asyncio.sleep(limits.PROBE_NEIGHBOUR_LOOK_S)
                try:
                    probe.recv(16)
                    return Finding.ANSWERED
                except BlockingIOError:
                    pass
                except ConnectionRefusedError:
                    return Finding.ANSWERED
                except OSError as error:
                    return Finding.SILENT if error.errno == errno.EHOSTUNREACH else Finding.UNKNOWN
                entry = neighbour(info.index, host) if neighbour is not None else None
                if entry is None or entry.none:
                    continue
                if entry.failed:
                    return Finding.SILENT
                asking = entry.asking
                age_s = entry.confirmed_age_s
                if not entry.asking and age_s is not None and age_s < loop.time() - began:
                    return Finding.ANSWERED
    except OSError as error:
        return Finding.SILENT if error.errno == errno.EHOSTUNREACH else Finding.UNKNOWN
    # Other traffic makes the kernel ask anew as soon as it has given up: still asking is no answer either.
    return Finding.SILENT if asking else Finding.UNKNOWN


async def server(address: Address, host: str, context: ssl.SSLContext | None, open_tcp: OpenTcp) -> Finding:
    """Find out whether a server takes a connection, and shows the certificate of `host` where `context` is given."""
    try:
        async with asyncio.timeout(limits.PROBE_S):
            stream = await open_tcp(address)
            if context is not None:
                stream = await start_tls(stream, context, host)
            stream.close()
    except ssl.SSLCertVerificationError:
        return Finding.FOREIGN
    except ConnectionRefusedError:
        return Finding.REFUSED
    except (ssl.SSLError, ConnectionResetError, BrokenPipeError):
        return Finding.FAILED
    except OSError:  # also TimeoutError
        return Finding.SILENT
    return Finding.ANSWERED


def dns_question(name: str, number: int) -> bytes:
    """Make a question for the IPv4 addresses of a name (RFC 1035 section 4.1); empty where it is no name."""
    try:
        asked = wire.question(name if name.isascii() else name.encode("idna").decode("ascii"), wire.RecordType.A)
    except ValueError:  # UnicodeError too
        return b""
    return number.to_bytes(2, "big") + asked[2:]


def read_dns_answer(data: bytes, question: bytes) -> Finding:
    """Say what an answer to `question` means: ANSWERED (it knows, also that there is none), FAILED, or UNKNOWN."""
    if len(data) < _DNS_HEAD_BYTES or data[:2] != question[:2] or not data[2] & 0x80:
        return Finding.UNKNOWN
    return Finding.ANSWERED if data[3] & 0x0F in _ANSWERED_RCODES else Finding.FAILED


async def dns(name_server: Address, name: str, number: int) -> Finding:
    """Ask a name server for a name by UDP, twice at most.

    Args:
        name_server: an IP literal and a port.
        name: what is asked for.
        number: of the question, hard to guess.
    """
    question = dns_question(name, number & 0xFFFF)
    if not question:
        return Finding.UNKNOWN
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in name_server.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asker:
            asker.setblocking(False)
            asker.connect((name_server.host, name_server.port))
            for _ in range(2):
                asker.send(question)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(limits.PROBE_S / 2):
                        while True:
                            found = read_dns_answer(await loop.sock_recv(asker, 1500), question)
                            if found is not Finding.UNKNOWN:
                                return found
    except ConnectionRefusedError:
        return Finding.REFUSED
    except OSError:
        return Finding.SILENT
    return Finding.SILENT


def name_servers(path: Path = _RESOLV_CONF) -> tuple[Address, ...]:
    """Give the configured name servers, `limits_network.PROBE_TARGETS_MAX` at most (`resolv.conf(5)`)."""
    try:
        with path.open("rb") as file:
            lines = file.read(limits.NETWORK_STORY_BYTES_MAX).decode("utf-8", "replace").splitlines()
    except OSError:
        return ()
    words = [line.split() for line in lines]
    found = [Address(each[1], 53) for each in words if len(each) >= 2 and each[0] == "nameserver"]
    return tuple(each for each in found if each.is_ip)[: limits.PROBE_TARGETS_MAX]


class CaptiveUrl:
    """A URL that tells a login page from the open network, in clear HTTP: portals cannot answer for others' HTTPS.

    Args:
        url: answers with status 204, with a few words such as `success`, or as a portal's own API (RFC 8908).

    Raises:
        ConfigError: it is no such URL.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port or 80
            host = parts.hostname or ""
        except ValueError:
            raise ConfigError(f"captive_url: {url[:80]!r} is no URL") from None
        if parts.scheme != "http" or not host or parts.username is not None or not url.isascii():
            raise ConfigError(f"captive_url: {url[:80]!r}: expected http://host/path")
        if any(char <= " " or char == "\x7f" for char in url):
            raise ConfigError("captive_url: no blanks and no control characters")
        self.address = Address(host, port)
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._field = f"[{host}]" if ":" in host else host
        if parts.port:
            self._field += f":{parts.port}"

    def request(self) -> bytes:
        """Give the request, whole."""
        return (
            f"GET {self._target} HTTP/1.1\r\nHost: {self._field}\r\nAccept: application/captive+json, */*\r\n"
            "Cache-Control: no-cache\r\nConnection: close\r\n\r\n"
        ).encode("ascii")


def read_captive_answer(data: bytes) -> Finding:
    """Say what an answer to `CaptiveUrl.request` means, as far as it has come.

    ANSWERED: status 204, a few words that say so, or an API that says so (RFC 8908 section 5). FOREIGN: a page, a
    redirection, 511. FAILED: the check's own server is unwell. UNKNOWN: no answer of HTTP.
    """
    match = _STATUS.match(data)
    if match is None:
        return Finding.UNKNOWN
    status = int(match[1])
    head, _, body = data.partition(b"\r\n\r\n")
    if status == 204:
        return Finding.ANSWERED
    if b"application/captive+json" in head.lower():
        try:
            told = json.loads(body)
        except (ValueError, RecursionError):
            return Finding.UNKNOWN
        captive = told.get("captive") if isinstance(told, dict) else None
        return Finding.UNKNOWN if not isinstance(captive, bool) else Finding.FOREIGN if captive else Finding.ANSWERED
    if status == 200 and len(body) <= _OPEN_TEXT_BYTES_MAX and _OPEN_TEXT.search(body.decode("latin-1")):
        return Finding.ANSWERED
    if status in (200, 301, 302, 303, 307, 308, 511):
        return Finding.FOREIGN
    return Finding.FAILED


async def captive(url: CaptiveUrl, resolve: Resolve, open_tcp: OpenTcp) -> Finding:
    """Ask the configured URL; reads at most `limits_network.PROBE_ANSWER_BYTES_MAX`."""
    data = b""
    try:
        async with asyncio.timeout(limits.PROBE_S):
            addresses = await resolve(url.address.host, url.address.port)
            stream = await open_tcp(addresses[0])
            try:
                await stream.send_all(url.request())
                while len(data) < limits.PROBE_ANSWER_BYTES_MAX and (piece := await stream.receive()):
                    data += piece
            finally:
                stream.close()
    except ConnectionRefusedError:
        return Finding.REFUSED
    except (OSError, IndexError):  # also TimeoutError
        if not data:
            return Finding.SILENT
    return read_captive_answer(data)
