"""TLS of gateways: tickets that another process takes, shown by OpenSSL's own client, and certificates read anew."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys

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
OPENSSL = shutil.which("openssl")
GATEWAY = """
import asyncio, json, sys
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
limits_carriers.TICKET_LOOK_S = limits_carriers.TICKET_RETRY_S = 0.1
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


@pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed")
async def test_session_of_one_process_is_resumed_by_another_over_one_rotation_and_not_over_two(
    authority, tmp_path, eventually
):
    engine = await start_server(tmp_path / "engine", rng=SystemRng())
    processes: list[asyncio.subprocess.Process] = []
    client = await connect(engine.core, rng=SystemRng(), wait_s=10)
    try:
        places = []
        for node in ("n1", "n2"):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", GATEWAY, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            processes.append(process)
            told = {
                "certificate": str(authority.files.certificate), "key": str(authority.files.key), "node": node,
                "url": engine.core.url, "user": engine.core.user, "password": engine.core.password.reveal(),
            }  # fmt: skip
            process.stdin.write(msgspec.json.encode(told))
            process.stdin.write_eof()
            places.append(parse_address((await process.stdout.readline()).decode().strip()))
        kv = await client.kv(tickets.BUCKET, persistent=False)

        async def makes(address: Address, name: bytes) -> bool:
            return ticket_name(await s_client(address)) == name

        async def rotate() -> bytes:
            """Replace the key long ago, so that it is in use at once; wait until both processes use it."""
            entry = await kv.get("tls")
            keys = tickets._decode(entry.value)
            fresh = tickets.new_key(SystemRng(), SystemClock().wall() - 1.0)
            data = msgspec.msgpack.encode(tickets._KeySet(tickets.rotated(keys, fresh)))
            await kv.update("tls", data, entry.revision)
            for address in places:
                await eventually(lambda address=address: makes(address, fresh.name), 30)
            return fresh.name

        async def agreed() -> bool:
            return await kv.get("tls") is not None

        await eventually(agreed, 30)
        await rotate()
        one, two = places
        session = str(tmp_path / "session")
        assert "New, TLSv1.3" in await s_client(one, "-sess_out", session)
        assert "Reused, TLSv1.3" in await s_client(two, "-sess_in", session)
        await rotate()
        assert "Reused, TLSv1.3" in await s_client(two, "-sess_in", session)
        assert "Reused, TLSv1.3" in await s_client(one, "-sess_in", session)
        await rotate()
        assert "New, TLSv1.3" in await s_client(two, "-sess_in", session)
        assert "New, TLSv1.3" in await s_client(one, "-sess_in", session)
    finally:
        await client.close()
        for process in processes:
            process.terminate()
            await process.wait()
        await engine.stop()


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
