"""TLS of gateways: tickets that another process takes, shown by OpenSSL's own client, and certificates read anew."""

import asyncio
import base64
import itertools
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from stormline.assembly.authority import ensure_authority
from stormline.core import limits_carriers
from stormline.core.values import Address, parse_address
from stormline.engine.nats import connect
from stormline.engine.server import start_server
from stormline.gateway import tickets
from stormline.net.clock import SystemClock, SystemRng
from stormline.net.stream import open_tcp
from stormline.net.tls import start_tls
from stormline.net.trust import roles_context
from stormline.wire import events as e
from stormline.wire import messages as m

pytestmark = pytest.mark.loopback

NAME = "gateway.test"
SHAPES = (
    bytes,
    lambda part: part.hex().encode(),
    lambda part: base64.b64encode(part)[:-4],
    lambda part: repr(part).encode(),
)
"""In which a secret could lie somewhere."""
OPENSSL = shutil.which("openssl")
GATEWAY = """
import asyncio, json, logging, sys
from pathlib import Path
import uvloop
from stormline.core import limits_carriers
from stormline.core.values import Secret
from stormline.engine.nats import EngineConfig
from stormline.gateway import server
from stormline.gateway.config import GatewayConfig
from stormline.net.clock import SystemClock, SystemRng
from stormline.web.server import TlsFiles

told = json.load(sys.stdin)
logging.basicConfig(level=logging.DEBUG)
limits_carriers.TICKET_LOOK_S = limits_carriers.TICKET_RETRY_S = 0.3
config = GatewayConfig(
    tls=TlsFiles(Path(told["certificate"]), Path(told["key"])), apps={}, node=told["node"],
    engine=EngineConfig(url=told["url"], user=told["user"], password=Secret(told["password"])),
    admin_key=Secret("a-business-key-0123456789"),
)
async def main():
    await server.run(config, clock=SystemClock(), rng=SystemRng(), stop=asyncio.Event(),
                     started=lambda address, admin: print(address, flush=True))
uvloop.run(main())
"""


async def s_client(address: Address, *arguments: str) -> str:
    """Connect with OpenSSL, say what no gateway understands, and give what OpenSSL says of the connection."""
    process = await asyncio.create_subprocess_exec(
        str(OPENSSL), "s_client", "-connect", str(address), "-servername", NAME, "-alpn", m.ALPN, "-ign_eof",
        *arguments,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    async with asyncio.timeout(30):
        output, _ = await process.communicate(b"\x00\x00\x00\x01\xc1")
    return output.decode("latin-1")


def ticket_name(output: str) -> bytes:
    """Give the name of the key in the last ticket that OpenSSL shows."""
    dump = output.rpartition("TLS session ticket:")[2].splitlines()[1]
    return bytes.fromhex(dump.partition(" - ")[2][:47].replace("-", " "))


class Pair(NamedTuple):
    """Two gateway processes of one unit.

    Attributes:
        places: where they listen.
        kv: the unit's bucket of ticket keys.
        logs: what they write.
    """

    places: list[Address]
    kv: Any
    logs: list[Path]

    async def keys(self) -> tuple[tickets.TicketKey, ...]:
        """Give the keys of the unit."""
        return tickets._decode((await self.kv.get("tls")).value)

    async def rotate(self, eventually, *, made_s_ago: float = 1.0) -> bytes:
        """Replace the key, so that it is in use at once or in time; wait until both processes use it."""
        entry = await self.kv.get("tls")
        fresh = tickets.new_key(SystemRng(), SystemClock().wall() - made_s_ago)
        data = msgspec.msgpack.encode(tickets._KeySet(tickets.rotated(tickets._decode(entry.value), fresh)))
        await self.kv.update("tls", data, entry.revision)

        async def makes(address: Address) -> bool:
            return ticket_name(await s_client(address)) == fresh.name

        for address in self.places:
            await eventually(lambda address=address: makes(address), 30)
        return fresh.name


@pytest.fixture(name="pair")
async def _pair(authority, tmp_path, eventually):
    engine = await start_server(tmp_path / "engine", rng=SystemRng())
    processes: list[asyncio.subprocess.Process] = []
    client = await connect(engine.core, rng=SystemRng(), wait_s=10)
    logs = [tmp_path / f"{node}.log" for node in ("n1", "n2")]
    try:
        places = []
        for log in logs:
            with log.open("wb") as stderr:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-c", GATEWAY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
                )
            processes.append(process)
            told = {
                "certificate": str(authority.files.certificate), "key": str(authority.files.key), "node": log.stem,
                "url": engine.core.url, "user": engine.core.user, "password": engine.core.password.reveal(),
            }  # fmt: skip
            process.stdin.write(msgspec.json.encode(told))
            process.stdin.write_eof()
            places.append(parse_address((await process.stdout.readline()).decode().strip()))
        kv = await client.kv(tickets.BUCKET, persistent=False)

        async def agreed() -> bool:
            return await kv.get("tls") is not None

        await eventually(agreed, 30)
        yield Pair(places, kv, logs)
    finally:
        await client.close()
        for process in processes:
            process.terminate()
            await process.wait()
        await engine.stop()


@pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed")
async def test_session_of_one_process_is_resumed_by_another_over_one_rotation_and_not_over_two(
    pair, tmp_path, eventually
):
    await pair.rotate(eventually)
    one, two = pair.places
    session = str(tmp_path / "session")
    assert "New, TLSv1.3" in await s_client(one, "-sess_out", session)
    assert "Reused, TLSv1.3" in await s_client(two, "-sess_in", session)
    await pair.rotate(eventually)
    assert "Reused, TLSv1.3" in await s_client(two, "-sess_in", session)
    assert "Reused, TLSv1.3" in await s_client(one, "-sess_in", session)
    await pair.rotate(eventually)
    assert "New, TLSv1.3" in await s_client(two, "-sess_in", session)
    assert "New, TLSv1.3" in await s_client(one, "-sess_in", session)


class Returner(threading.Thread):
    """A client that connects again and again, to one process or the other, with the ticket it got last.

    Attributes:
        resumed: handshakes after the first that took the ticket.
        full: those that did not.
        faults: those that failed.
    """

    def __init__(self, places: list[Address], pem: str, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._places, self._stopping = itertools.cycle(places), stop
        self._context = ssl.create_default_context(cadata=pem)
        self._context.set_alpn_protocols([m.ALPN])
        self.resumed = self.full = 0
        self.faults: list[str] = []

    def run(self) -> None:
        """Connect until told to stop."""
        session: ssl.SSLSession | None = None
        while not self._stopping.wait(0.02):
            try:
                with (
                    socket.create_connection(tuple(next(self._places)), 20) as raw,
                    self._context.wrap_socket(raw, server_hostname=NAME, session=session) as sock,
                ):
                    self.resumed += bool(session and sock.session_reused)
                    self.full += bool(session and not sock.session_reused)
                    sock.sendall(b"\x00\x00\x00\x01\xc1")  # what no gateway understands: it says so, behind its ticket
                    sock.recv(4096)
                    session = sock.session
            except OSError as error:
                self.faults.append(repr(error))


@pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed")
@pytest.mark.timeout(120)
async def test_clients_that_come_back_while_keys_rotate_resume_and_none_fails(pair, authority, tmp_path, eventually):
    secrets = list(await pair.keys())
    stop = threading.Event()
    clients = [Returner(pair.places[at % 2 :] + pair.places[: at % 2], authority.pem, stop) for at in range(6)]
    for client in clients:
        client.start()
    try:
        for _ in range(3):  # in use when both processes have had the time to learn of it
            secrets.append((await pair.keys())[0])
            done = sum(client.resumed for client in clients)
            await pair.rotate(eventually, made_s_ago=0.0)
            for _ in itertools.count():
                if sum(client.resumed for client in clients) > done + 30:
                    break
                await asyncio.sleep(0.1)
    finally:
        stop.set()
        for client in clients:
            await asyncio.to_thread(client.join, 30)
    secrets += await pair.keys()
    assert [fault for client in clients for fault in client.faults] == []
    resumed, full = sum(client.resumed for client in clients), sum(client.full for client in clients)
    assert resumed >= 0.95 * (resumed + full) > 90
    shapes = [shape(part) for key in secrets for part in (key.cipher, key.mac) for shape in SHAPES]
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):  # the engine's folder, and what was logged
        data = path.read_bytes()
        assert not any(each in data for each in shapes), f"{path} holds a ticket key"
    assert all(log.stat().st_size for log in pair.logs)


async def test_renewed_certificate_is_served_to_new_connections_and_a_broken_one_is_not(
    gateway, mint, tmp_path, eventually, caplog
):
    ca = ensure_authority(tmp_path / "pki", clock=SystemClock(), rng=SystemRng())
    files = ca.issue("gateway", names=[NAME])
    await gateway.start(tls=files)

    async def serial() -> str:
        raw = await open_tcp(gateway.address)
        stream = await start_tls(raw, roles_context(ca.ca_pem, (m.ALPN,)), NAME)
        try:
            return str(stream._tls.getpeercert()["serialNumber"])
        finally:
            stream.close()

    gateway.authority = gateway.authority._replace(pem=ca.ca_pem)
    standing = await gateway.connect("d1")
    first = await serial()
    whole = files.certificate.read_bytes(), files.key.read_bytes()
    files.certificate.write_bytes(whole[0][:100])
    os.kill(os.getpid(), signal.SIGHUP)
    await eventually(lambda: "stays in use" in caplog.text)
    assert await serial() == first

    other = ensure_authority(tmp_path / "pki", clock=SystemClock(), rng=SystemRng()).issue("renewed", names=[NAME])
    files.key.write_bytes(other.key.read_bytes())
    files.certificate.write_bytes(other.certificate.read_bytes())
    os.kill(os.getpid(), signal.SIGHUP)

    async def renewed() -> bool:
        return await serial() != first

    await eventually(renewed)
    standing.machine.ping(standing.now())
    standing.flush()
    await standing.next(e.PongReceived)


async def test_files_that_change_are_seen_without_a_signal(gateway, tmp_path, eventually, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(limits_carriers, "CERTIFICATE_LOOK_S", 0.05)
    files = ensure_authority(tmp_path / "pki", clock=SystemClock(), rng=SystemRng()).issue("gateway", names=[NAME])
    await gateway.start(tls=files)
    files.certificate.write_bytes(files.certificate.read_bytes() + b"\n")
    await eventually(lambda: "is read anew" in caplog.text)
