"""Peers that hold what they can and give nothing, and a process that runs out of descriptors.

The gateway is a process of its own, so that its descriptors are its own to count and to bound. The counts are those of
the case divided by ten and the times by about five: 80 bad peers that come back as soon as they are dropped, and some
20 good ones a second.
"""

import asyncio
import contextlib
import json
import os
import resource
import socket
import ssl
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx2
import pytest

from stormline.core import errors, limits_carriers
from stormline.core.values import Address, parse_address
from stormline.wire import frames, websocket
from stormline.wire import messages as m

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(120)]

NAME = "gateway.test"
APP = "demo"

HOST = """
import asyncio, json, resource, sys
from pathlib import Path
import uvloop
from stormline.core import limits, limits_carriers, limits_platform
from stormline.core.values import Secret, parse_address
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.gateway import server
from stormline.gateway.config import GatewayConfig
from stormline.engine.nats import EngineConfig
from stormline.net.clock import SystemClock, SystemRng
from stormline.web.server import TlsFiles

told = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_NOFILE, (told["descriptors"], told["descriptors"]))
limits_platform.TLS_HANDSHAKE_TIMEOUT_S = limits.HELLO_TIMEOUT_S = told["timeout_s"]
limits_carriers.ARRIVALS_PER_LINE_MAX = told["per_line"]
config = GatewayConfig(
    tls=TlsFiles(Path(told["certificate"]), Path(told["key"])), apps=told["apps"],
    engine=EngineConfig(url="nats://127.0.0.1:1", user="nobody", password=Secret("nothing")),
    admin_key=Secret(told["admin"]),
)
async def memory():
    return MemoryEngine(MemoryBroker())
async def main():
    await server.run(config, clock=SystemClock(), rng=SystemRng(), stop=asyncio.Event(), connect=memory,
                     started=lambda address, admin: print(address, admin, flush=True))
uvloop.run(main())
"""


class Host:
    """A gateway's process, and the fixture's `gateway` as what reaches it."""

    def __init__(self, process: asyncio.subprocess.Process, reach: Any) -> None:
        self.process = process
        self.reach = reach
        self.address: Address = reach.address

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def close_wait(self) -> int:
        """Sockets of the gateway whose peer has ended its side, and it has not."""
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(fields[1].endswith(f":{self.address.port:04X}") and fields[3] == "08" for fields in lines)

    async def load(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.reach.admin.get("/v1/load")).json()
        return found

    def context(self, alpn: str = m.ALPN) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.reach.authority.pem)
        context.set_alpn_protocols([alpn])
        return context

    async def open(self, alpn: str = m.ALPN) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.address, ssl=self.context(alpn), server_hostname=NAME)

    async def session(self, name: str) -> Any:
        return await self.reach.connect(name)


@pytest.fixture(name="hosted")
async def _hosted(gateway: Any) -> AsyncIterator[Callable[..., Coroutine[Any, Any, Host]]]:
    """Give what starts a gateway as a process."""
    processes: list[asyncio.subprocess.Process] = []

    async def start(*, descriptors: int = 1024, timeout_s: float = 2.0, per_line: int = 512) -> Host:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", HOST, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        processes.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        config = gateway.config
        told = {
            "descriptors": descriptors, "timeout_s": timeout_s, "per_line": per_line, "apps": config.apps,
            "admin": config.admin_key.reveal(), "certificate": str(config.tls.certificate), "key": str(config.tls.key),
        }  # fmt: skip
        process.stdin.write(json.dumps(told).encode())
        process.stdin.close()
        address, admin = (await process.stdout.readline()).decode().split()
        gateway.address = parse_address(address)
        gateway.admin = httpx2.AsyncClient(
            base_url=f"http://{admin}", timeout=10, trust_env=False,
            headers={"authorization": f"Bearer {config.admin_key.reveal()}"},
        )  # fmt: skip
        return Host(process, gateway)

    yield start
    for device in gateway.devices:
        await device.close()
    for process in processes:
        process.kill()
        await process.communicate()


# -- peers that give nothing -------------------------------------------------------------------------------------------
async def _dribble(data: bytes, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
    """Send a byte every 50 ms until the gateway has enough."""
    ended = asyncio.ensure_future(reader.read())
    try:
        for at in range(len(data)):
            writer.write(data[at : at + 1])
            await asyncio.wait([ended], timeout=0.05)
            if ended.done():
                return
        await ended
    finally:
        ended.cancel()
        await asyncio.wait([ended])


async def _slow_hello_of_tls(host: Host) -> None:
    reader, writer = await asyncio.open_connection(*host.address)
    await _held(reader, writer, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500))


async def _silent(host: Host) -> None:
    reader, writer = await asyncio.open_connection(*host.address)
    await _held(reader, writer, b"")


async def _half_tls(host: Host) -> None:
    reader, writer = await asyncio.open_connection(*host.address)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        host.context().wrap_bio(incoming, outgoing, server_hostname=NAME).do_handshake()
    writer.write(outgoing.read())  # and never a Finished
    await reader.read(1)
    await _held(reader, writer, b"")


async def _slow_upgrade(host: Host) -> None:
    reader, writer = await host.open(websocket.ALPN)
    await _held(reader, writer, f"GET {websocket.PATH} HTTP/1.1\r\nhost: {NAME}\r\nx: {'a' * 500}".encode())


async def _slow_frame(host: Host) -> None:
    reader, writer = await host.open()
    hello = frames.encode(m.Hello(versions=(1,), app=APP, token="t" * 300))
    await _held(reader, writer, hello)


async def _held(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
    try:
        await _dribble(data, writer, reader)
    finally:
        writer.transport.abort()


async def _again(host: Host, peer: Callable[[Host], Coroutine[Any, Any, None]], held: Counter[str]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        begin = loop.time()
        with contextlib.suppress(OSError):
            await peer(host)
        held[peer.__name__] = max(held[peer.__name__], round(1000 * (loop.time() - begin)))


async def test_slow_senders_on_every_stage_are_ended_in_time_and_good_clients_notice_nothing(hosted):
    host = await hosted(timeout_s=2.0)
    held: Counter[str] = Counter()
    slow = [(_slow_hello_of_tls, 30), (_silent, 20), (_half_tls, 10), (_slow_upgrade, 10), (_slow_frame, 10)]
    tasks = [asyncio.create_task(_again(host, peer, held)) for peer, count in slow for _ in range(count)]
    good = 0
    try:
        async with asyncio.timeout(60):
            while len(held) < len(slow) or good < 150:  # each kind was ended at least once
                device = await host.session(f"d{good}")
                await device.close()
                good += 1
                await asyncio.sleep(0.02)
        load = await host.load()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    # Times are absolute: a byte every 50 ms moves none of them. Upgrade and HELLO have theirs after that of TLS.
    assert all(took_ms < 1000 * (2 * 2.0 + 8.0) for took_ms in held.values()), held
    assert load["closes"]["late"] > 0
    assert load["refusals"]["hello-timeout"] > 0


async def test_line_that_holds_more_than_its_share_loses_its_own_oldest(hosted, eventually):
    host = await hosted(timeout_s=60.0, per_line=40)
    silent = [await asyncio.open_connection(*host.address) for _ in range(60)]
    other = socket.socket()
    other.bind(("127.0.0.9", 0))  # another line, silent as well
    other.setblocking(False)
    await asyncio.get_running_loop().sock_connect(other, tuple(host.address))

    async def crowded() -> bool:
        return (await host.load())["closes"].get("crowded-line") == 20

    await eventually(crowded)
    for reader, _ in silent[:20]:
        assert await reader.read() == b""
    device = await host.session("d1")
    assert (await host.load())["arriving"] == 40  # 39 silent ones of the first line, and the other
    await device.close()
    other.close()
    for _, writer in silent:
        writer.transport.abort()


# -- every way to end --------------------------------------------------------------------------------------------------
def _reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _end_half_closed(host: Host, number: int) -> None:
    reader, writer = await asyncio.open_connection(*host.address)
    writer.write(b"\x16\x03\x01"[: number % 4])
    writer.write_eof()
    await reader.read()
    writer.transport.abort()


async def _end_reset(host: Host, number: int) -> None:
    _, writer = await (host.open() if number % 2 else host.open(websocket.ALPN))
    _reset(writer)


async def _end_inside_tls(host: Host, number: int) -> None:
    reader, writer = await asyncio.open_connection(*host.address)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        host.context().wrap_bio(incoming, outgoing, server_hostname=NAME).do_handshake()
    hello = outgoing.read()
    writer.write(hello if number % 2 else hello[:100])
    if number % 2:
        await reader.read(1)
    if number % 4 < 2:
        _reset(writer)
    writer.transport.abort()


async def _end_inside_upgrade(host: Host, number: int) -> None:
    _, writer = await host.open(websocket.ALPN)
    writer.write(f"GET {websocket.PATH} HTTP/1.1\r\nhost: {NAME}\r\n".encode())
    await writer.drain()
    if number % 2:
        _reset(writer)
    writer.transport.abort()


async def _end_close_without_tcp(host: Host, number: int) -> None:
    device = await host.session(f"d{number}")
    device.machine.close()
    device.flush()
    await device.wait_closed()
    await device.close()


async def _end_session_vanished(host: Host, number: int) -> None:
    device = await host.session(f"v{number}")
    device.vanish()


async def _ended(end: Callable[[Host, int], Coroutine[Any, Any, None]], host: Host, number: int) -> None:
    with contextlib.suppress(OSError):  # the gateway may be first to end it
        await end(host, number)


async def test_descriptors_are_back_after_every_way_to_end_and_none_waits_to_be_closed(hosted, eventually):
    """40 connections of each way; that of the case is 5,000, and what does not leak 40 times does not leak then."""
    host = await hosted(timeout_s=1.0)
    await host.load()
    baseline = host.descriptors
    for end in (
        _end_half_closed, _end_reset, _end_inside_tls, _end_inside_upgrade, _end_close_without_tcp,
        _end_session_vanished,
    ):  # fmt: skip
        for begin in range(0, 40, 10):
            await asyncio.gather(*(_ended(end, host, begin + number) for number in range(10)))
        await eventually(lambda: host.descriptors <= baseline + 5 and host.close_wait == 0, 20.0)


async def test_process_out_of_room_says_so_to_the_others_answers_its_operators_and_recovers(hosted, eventually):
    """`ulimit -n 256` and 300 clients, where the case has 512 and 600."""
    host = await hosted(descriptors=256, timeout_s=5.0)
    devices: list[Any] = []
    refused = 0

    async def come(number: int) -> None:
        nonlocal refused
        try:
            devices.append(await host.session(f"d{number}"))
        except (OSError, errors.StormlineError):
            refused += 1

    for begin in range(0, 300, 20):
        await asyncio.gather(*(come(begin + number) for number in range(20)))
    assert len(devices) == 192  # a quarter is kept
    assert refused == 108
    load = await host.load()  # the business API has descriptors of its own
    assert (load["connections"], load["closes"]["full"]) == (192, 108)
    before = host.cpu_s
    await asyncio.sleep(1.0)
    assert host.cpu_s - before < 0.5  # nothing spins
    for device in devices[:50]:
        device.vanish()

    async def room() -> bool:
        return (await host.load())["connections"] == 142

    await eventually(room)
    again = await host.session("again")
    await again.close()
    for device in devices[50:]:
        await device.close()


async def test_accept_that_fails_for_want_of_descriptors_pauses_and_goes_on(gateway, monkeypatch, eventually):
    """What else in the process opens them counts too: then `accept` itself fails."""
    await gateway.start()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = [socket.socket() for _ in range(3)]
    for sock in waiting:
        sock.setblocking(False)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used - 1, hard))
    try:
        for sock in waiting:
            with contextlib.suppress(BlockingIOError):
                sock.connect(tuple(gateway.address))
        await asyncio.sleep(3 * limits_carriers.ACCEPT_PAUSE_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    load = (await gateway.admin.get("/v1/load")).json()
    assert 1 <= load["closes"]["cannot-accept"] <= 10
    device = await gateway.connect()
    for sock in waiting:
        sock.close()
    await device.close()
