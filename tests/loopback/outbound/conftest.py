"""Scripted servers on 127.0.0.1, certificates of a CA made here, and both event loops."""

import asyncio
import datetime
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from h2.settings import SettingCodes

from stormline.core.values import Address
from stormline.net.stream import Stream, open_tcp
from stormline.net.tls import start_tls
from stormline.net.trust import roles_context
from stormline.outbound.http2 import Http2Connection
from stormline.testing.http2 import Peer, Script

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Serve = Callable[..., Awaitable[Address]]


class Authority(NamedTuple):
    """A CA, and a server certificate of it for a.test.

    Attributes:
        pem: the CA certificate.
        server: server side context with the leaf.
        certificate: the leaf's PEM file.
        key: its key, PKCS#8.
    """

    pem: bytes
    server: ssl.SSLContext
    certificate: Path
    key: Path


def _make_authority(folder: Path) -> Authority:
    now = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    until = datetime.datetime(2049, 1, 1, tzinfo=datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def build(common_name: str, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test CA")]))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now)
            .not_valid_after(until)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        )

    ca = (
        build("test CA", ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(*[name in ("s", "c") for name in "sxxxxcxxx"]), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    leaf = (
        build("a.test", key.public_key())
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("a.test")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    certificate_file, key_file = folder / "a.test.pem", folder / "a.test.key"
    certificate_file.write_bytes(leaf.public_bytes(pem))
    key_file.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate_file, key_file)
    server.set_alpn_protocols(["http/1.1"])
    return Authority(ca.public_bytes(pem), server, certificate_file, key_file)


@pytest.fixture(scope="session", name="authority")
def _authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return _make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(name="serve")
async def _serve() -> AsyncIterator[Serve]:
    """Start a server that runs a coroutine per connection; give its address. All ends with the test."""
    servers: list[asyncio.Server] = []
    tasks: set[asyncio.Task[None]] = set()

    async def serve(handler: Handler, tls: ssl.SSLContext | None = None) -> Address:
        async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handler(reader, writer)
            except (OSError, EOFError, asyncio.CancelledError):
                pass
            except RuntimeError as error:
                if "closed" not in str(error):  # what uvloop says where asyncio drops a write after a close
                    raise
            finally:
                writer.transport.abort() if asyncio.current_task() in stopping else writer.close()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(run(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
        servers.append(server)
        return Address(*server.sockets[0].getsockname()[:2])

    stopping: set[asyncio.Task[None]] = set()
    yield serve
    for server in servers:
        server.close()
    stopping |= tasks
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    await asyncio.sleep(0.01)


@pytest.fixture(name="peers")
def _peers() -> list[Peer]:
    """Give the server's ends of the connections that `connect` made."""
    return []


@pytest.fixture(name="connect")
async def _connect(serve: Serve, peers: list[Peer], authority: Authority) -> AsyncIterator[Callable[..., object]]:
    """Give an HTTP/2 connection to a server that runs a script beside the reading."""
    connections: list[Http2Connection] = []

    async def connect(
        script: Script | None = None, *, settings: dict[SettingCodes, int] | None = None, tls: bool = False
    ) -> Http2Connection:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peers.append(Peer(reader, writer, settings))
            await peers[-1].serve(script)

        if tls:
            authority.server.set_alpn_protocols(["h2"])
        raw = await open_tcp(await serve(handler, authority.server if tls else None))
        stream: Stream = raw
        if tls:
            stream = await start_tls(raw, roles_context(authority.pem, ["h2"]), "a.test")
            authority.server.set_alpn_protocols(["http/1.1"])
            assert stream.alpn == "h2"
        connections.append(Http2Connection(stream))
        return connections[-1]

    yield connect
    for connection in connections:
        connection.close()
    await asyncio.sleep(0.01)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("http/2")]


def reset(writer: asyncio.StreamWriter) -> None:
    """Close the connection with a RST."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.fixture(name="reset")
def _reset() -> Callable[[asyncio.StreamWriter], None]:
    return reset


@pytest.fixture(name="refused")
def _refused():
    """Give an address where nobody listens: bound, so that nobody else takes it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield Address(*sock.getsockname())


@pytest.fixture(name="silent")
def _silent():
    """Give an address that answers nothing: its queue of connections is full, so the kernel drops the SYN."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        fillers = []
        for _ in range(3):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(sock.getsockname())
            fillers.append(filler)
        yield Address(*sock.getsockname())
        for filler in fillers:
            filler.close()


@pytest.fixture(name="until")
def _until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Wait for a condition that other tasks, threads or the kernel bring about; fail after 10 s."""

    async def until(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110  (nobody there could set an event)
                await asyncio.sleep(0.001)

    return until


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item):
    """Run every test here on both loops: raw sockets meet each loop's own poller."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": _new_uvloop}


def _new_uvloop() -> asyncio.AbstractEventLoop:
    """Give a loop that has listened before: libuv then opens a spare descriptor, which is no leak of a test."""
    loop = uvloop.new_event_loop()

    async def listen() -> None:
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        server.close()
        await server.wait_closed()

    loop.run_until_complete(listen())
    return loop
