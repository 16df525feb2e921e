"""A box in the router that speaks for the servers: it ends TLS with certificates of its own, and changes clear pages.

Run as `python -m stormline.lab.interception` inside a router's namespace; `faults.Seized` sends connections to it, and
the kernel tells it where they were meant to go. It ends when its input does.
"""

import asyncio
import contextlib
import datetime
import enum
import ipaddress
import socket
import ssl
import sys
import tempfile
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from stormline.core import limits_lab
from stormline.core.values import Address
from stormline.net.clock import SystemClock

READY: Final = b"ready\n"
"""Said once it listens."""
SCRIPT: Final = b'<script src="http://ads.lab.test/a.js"></script>'
"""What is put into pages."""
ADS_URL: Final = "http://ads.lab.test/"
LOGIN_URL: Final = "http://login.lab.test/"
_SO_ORIGINAL_DST: Final = 80  # linux/netfilter_ipv4.h; the same number for IPv6
_HTML: Final = b"text/html"


class Way(enum.StrEnum):
    """What the box does to a connection."""

    TLS = "tls"
    """Ends TLS with a certificate of its own for the name asked for, and goes on to the server by TLS."""
    SCRIPT = "script"
    """Puts a script into pages (HTML) in clear."""
    ADS = "ads"
    """Answers requests for pages with a redirection to another host; what is no page passes."""
    PORTAL = "portal"
    """Answers every request with a redirection to a page to log in at."""
    REQUIRED = "required"
    """Answers every request with 511 (RFC 6585 section 6)."""


PORTS: Final = {way: 9443 + number for number, way in enumerate(Way)}
"""Where the box listens for each."""


class _Mint:
    """An authority nobody knows, which makes a certificate for any name."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "leaf.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._issuer = _name("Example Networks", "Example Web Filter CA")
        self._contexts: dict[str, ssl.SSLContext] = {}
        self.names: dict[ssl.SSLContext, str] = {}
        """What each context speaks for."""

    def context(self, name: str) -> ssl.SSLContext:
        """Give what speaks for a name; empty: for none in particular."""
        found = self._contexts.get(name)
        if found is None:
            found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            found.set_alpn_protocols(["http/1.1"])
            self._file.write_bytes(self._pem(name or "filter.lab.test"))
            found.load_cert_chain(self._file)
            if len(self._contexts) < limits_lab.LAB_BOX_NAMES_MAX:
                self._contexts[name] = found
                self.names[found] = name
        return found

    def _pem(self, name: str) -> bytes:
        now = datetime.datetime.fromtimestamp(SystemClock().wall(), datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name("Example Networks", name))
            .issuer_name(self._issuer)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=30))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        key = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return key + certificate.public_bytes(serialization.Encoding.PEM)


def _name(organization: str, common: str) -> x509.Name:
    return x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization), x509.NameAttribute(NameOID.COMMON_NAME, common)]
    )


def _meant(writer: asyncio.StreamWriter) -> Address:
    """Give where a connection was meant to go; raises OSError."""
    plug: socket.socket = writer.get_extra_info("socket")
    if plug.family == socket.AF_INET6:
        raw = plug.getsockopt(socket.IPPROTO_IPV6, _SO_ORIGINAL_DST, 28)
        return Address(str(ipaddress.IPv6Address(raw[8:24])), int.from_bytes(raw[2:4], "big"))
    raw = plug.getsockopt(socket.IPPROTO_IP, _SO_ORIGINAL_DST, 16)
    return Address(str(ipaddress.IPv4Address(raw[4:8])), int.from_bytes(raw[2:4], "big"))


# -- TLS --------------------------------------------------------------------------------------------------------------
class _Ender:
    """Ends TLS on both sides, and reads what it likes between."""

    def __init__(self, mint: _Mint) -> None:
        self._mint = mint
        self.context = mint.context("")
        self.context.sni_callback = self._named
        self._there = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._there.check_hostname = False
        self._there.verify_mode = ssl.CERT_NONE
        self._there.set_alpn_protocols(["http/1.1"])

    def _named(self, link: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext) -> None:
        if name:
            link.context = self._mint.context(name)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Join a connection to the server it was meant for."""
        link: ssl.SSLObject = writer.get_extra_info("ssl_object")
        host, port = _meant(writer)
        name = self._mint.names.get(link.context) or None
        beyond, onward = await asyncio.open_connection(host, port, ssl=self._there, server_hostname=name or "")
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, onward))
                both.create_task(_pump(beyond, writer))
        finally:
            onward.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(limits_lab.LAB_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    writer.close()


# -- clear HTTP -------------------------------------------------------------------------------------------------------
async def _clear(way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    request = await reader.readuntil(b"\r\n\r\n")
    if way is Way.PORTAL:
        writer.write(_redirection(LOGIN_URL))
    elif way is Way.REQUIRED:
        writer.write(_answer(b"HTTP/1.1 511 Network Authentication Required\r\n", b"<p>Log in."))
    else:
        head, body = await _ask(_meant(writer), request)
        if _HTML not in head.lower():
            writer.write(head + body)
        elif way is Way.ADS:
            writer.write(_redirection(ADS_URL))
        else:
            first = head.partition(b"\r\n")[0] + b"\r\n"
            writer.write(_answer(first, body.replace(b"</body>", SCRIPT + b"</body>")))
    await writer.drain()


def _redirection(url: str) -> bytes:
    return _answer(b"HTTP/1.1 302 Found\r\nlocation: %b\r\n" % url.encode(), b"")


def _answer(head: bytes, body: bytes) -> bytes:
    length = b"content-type: text/html\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
    return head + length + body


async def _ask(meant: Address, request: bytes) -> tuple[bytes, bytes]:
    """Ask the true server for what was asked, and give head and body of its answer."""
    reader, writer = await asyncio.open_connection(*meant)
    try:
        first, _, rest = request.partition(b"\r\n")
        kept = [line for line in rest.split(b"\r\n") if line and not line.lower().startswith(b"connection:")]
        writer.write(b"\r\n".join([first, *kept, b"connection: close", b"", b""]))
        head = await reader.readuntil(b"\r\n\r\n")
        body = bytearray()
        while data := await reader.read(limits_lab.LAB_CHUNK_BYTES):
            body += data
            if len(body) > limits_lab.LAB_BOX_PAGE_BYTES_MAX:
                raise OSError("a page too long")
        return head, bytes(body)
    finally:
        writer.close()


# -- the process ------------------------------------------------------------------------------------------------------
async def _listen(way: Way, ender: _Ender, host: str) -> asyncio.Server:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if way is Way.TLS:
                await ender.serve(reader, writer)
            else:
                await _clear(way, reader, writer)
        except* (OSError, EOFError, ssl.SSLError, asyncio.LimitOverrunError):
            pass  # either side went away, or spoke no HTTP
        writer.close()

    return await asyncio.start_server(
        serve,
        host,
        PORTS[way],
        ssl=ender.context if way is Way.TLS else None,
        backlog=limits_lab.LAB_BACKLOG,
    )


async def run() -> None:
    """Listen until the input ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        ender = _Ender(_Mint(Path(folder)))
        servers = [await _listen(way, ender, host) for way in Way for host in ("0.0.0.0", "::")]  # noqa: S104
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()
        with contextlib.suppress(asyncio.CancelledError):
            await reader.read()
        for server in servers:
            server.close()
    transport.close()


if __name__ == "__main__":
    asyncio.run(run())
