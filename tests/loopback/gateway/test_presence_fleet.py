"""Three nodes as processes on a real nats-server: one is killed, all are restarted, one joins. No ghost stays."""

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from nats.aio.client import Client

from stormline.appgw import record
from stormline.core import limits_platform
from stormline.core.ids import subject_token
from stormline.engine.nats import connect
from stormline.engine.server import start_server
from stormline.net.clock import SystemClock, SystemRng
from stormline.wire import events as e
from stormline.wire import jws, tokens
from stormline.wire import messages as m
from stormline.wire.connection import Connection
from stormline.wire.states import Role

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(120)]

KEY = Ed25519PrivateKey.generate()
ADMIN_KEY = "a-business-key-0123456789"
SIZES = {"n1": 40, "n2": 600, "n3": 60}
"""Devices of each node: the one that dies has more than any batch."""
RIGHT_S = 5 * limits_platform.NODE_LEASE_S
"""All is right a lease after the crash, and a busy machine is slow."""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Link(asyncio.Protocol):
    """A device that keeps a connection without TLS, and answers what it is asked."""

    def __init__(self, token: str) -> None:
        self.machine = Connection(Role.CLIENT, 0.0)
        self.welcomed = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self._token = token

    def connection_made(self, transport):
        self.transport = transport
        self.machine.send_hello(
            m.Hello(versions=(1,), app="demo", token=self._token, network="wifi", app_version="1.0")
        )
        transport.write(self.machine.data_to_send())

    def data_received(self, data):
        self.machine.receive_data(data, asyncio.get_running_loop().time())
        while (event := self.machine.next_event()) is not None:
            if isinstance(event, e.Welcomed) and not self.welcomed.done():
                self.welcomed.set_result(event.welcome.session)
        self.transport.write(self.machine.data_to_send())

    def connection_lost(self, exc):
        self.lost.set()
        if not self.welcomed.done():
            self.welcomed.cancel()


class Fleet:
    """The nodes, and the devices on them."""

    def __init__(self, folder: Path, authority) -> None:
        self.folder = folder
        self.files = authority.files
        self.nodes: dict[str, asyncio.subprocess.Process] = {}
        self.ports: dict[str, int] = {}
        self.http: dict[str, httpx2.AsyncClient] = {}
        self.links: dict[str, Link] = {}
        self.at: dict[str, str] = {}

    async def start_engine(self) -> None:
        self.engine = await start_server(self.folder / "engine", rng=SystemRng(), port=free_port())

    async def start(self, node: str) -> None:
        self.ports[node] = free_port()
        told = {
            "node": node,
            "plain": str(self.ports[node]),
            "certificate": str(self.files.certificate),
            "key": str(self.files.key),
            "public": jws.SigningKey(KEY, "k1").public_text,
            "url": self.engine.core.url,
            "password": self.engine.core.password.reveal(),
            "admin_key": ADMIN_KEY,
        }
        program = Path(__file__).with_name("node_process.py")
        log = (self.folder / f"{node}.log").open("ab")
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(program), json.dumps(told), stdout=asyncio.subprocess.PIPE, stderr=log
        )
        log.close()
        self.nodes[node] = process
        assert process.stdout is not None
        port = (await process.stdout.readline()).strip()
        assert port, (self.folder / f"{node}.log").read_text()[-2000:]
        if node in self.http:
            await self.http[node].aclose()
        self.http[node] = httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port.decode()}",
            headers={"authorization": f"Bearer {ADMIN_KEY}"},
            timeout=20,
            trust_env=False,
        )

    async def connect(self, node: str, devices: list[str]) -> None:
        for start in range(0, len(devices), 50):
            await asyncio.gather(*(self._connect(node, device) for device in devices[start : start + 50]))

    async def _connect(self, node: str, device: str) -> None:
        iat = int(SystemClock().wall())
        claims = tokens.DeviceToken(app="demo", device=device, user=f"u-{device}", iat=iat, exp=iat + 600)
        earlier = self.links.pop(device, None)
        if earlier is not None:
            earlier.transport.abort()
        _, link = await asyncio.get_running_loop().create_connection(
            lambda: Link(tokens.mint(claims, key=KEY, kid="k1")), "127.0.0.1", self.ports[node]
        )
        await link.welcomed
        self.links[device] = link
        self.at[device] = node

    def on(self, node: str) -> list[str]:
        return sorted(device for device, at in self.at.items() if at == node)

    async def kill(self, node: str) -> list[str]:
        """Kill a node with all it holds; give the devices that were there."""
        self.nodes[node].send_signal(signal.SIGKILL)
        return await self._gone(node)

    async def stop(self, node: str) -> list[str]:
        self.nodes[node].send_signal(signal.SIGTERM)
        return await self._gone(node)

    async def _gone(self, node: str) -> list[str]:
        await self.nodes.pop(node).wait()
        devices = self.on(node)
        for device in devices:
            await self.links[device].lost.wait()
            del self.links[device], self.at[device]
        return devices

    async def close(self) -> None:
        for link in self.links.values():
            link.transport.abort()
        for process in self.nodes.values():
            process.kill()
            await process.wait()
        for process in self.nodes.values():
            process._transport.close()
        for http in self.http.values():
            await http.aclose()
        await self.engine.stop()

    # -- what each node says -------------------------------------------------------------------------------------

    async def count(self, node: str) -> int:
        answer = (await self.http[node].get("/v1/presence/counts")).json()
        return int(answer["devices"])

    async def listed(self, node: str) -> dict[str, str]:
        """List all devices that are online, as a node sees it, page by page."""
        found: dict[str, str] = {}
        cursor = ""
        while True:
            query = {"limit": 170, "cursor": cursor}
            page = (await self.http[node].get("/v1/presence", params=query)).json()
            assert not found.keys() & {one["device"] for one in page["devices"]}
            found.update((one["device"], one["node"]) for one in page["devices"])
            assert page["silent"] == []
            cursor = page["cursor"]
            if not cursor:
                return found

    async def journaled(self, node: str, size: int) -> bool:
        """Say whether a node has written down all it holds, for those who would clear up behind it."""
        engine = await connect(self.engine.core, rng=SystemRng())
        try:
            kv = await engine.kv(record.bucket_of("u1"), persistent=False, ttl_s=limits_platform.DIRECTORY_LIFE_S)
            chunks = await kv.under(f"j.{subject_token(node)}")
            return sum(len(msgspec.msgpack.decode(chunk.value)) for chunk in chunks.values()) == size
        finally:
            await engine.close()

    async def online(self, node: str, device: str) -> bool:
        return bool((await self.http[node].get(f"/v1/presence/devices/{device}")).json()["online"])

    async def is_right(self) -> bool:
        """Say whether every node counts and lists exactly the connections that stand."""
        for node in self.nodes:
            if await self.count(node) != len(self.at) or await self.listed(node) != self.at:
                return False
        return True


@pytest.fixture(name="fleet")
async def _fleet(tmp_path: Path, authority) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path, authority)
    await fleet.start_engine()
    yield fleet
    await fleet.close()


class Told:
    """What a business hears of devices that come and go."""

    def __init__(self) -> None:
        self.client = Client()
        self.events: list[dict[str, object]] = []

    async def listen(self, fleet: Fleet) -> None:
        biz = fleet.engine.biz
        await self.client.connect(biz.url, user=biz.user, password=biz.password.reveal())

        async def take(message):
            self.events.append(json.loads(message.data))

        await self.client.subscribe("presence.u1.demo.>", cb=take)
        await self.client.flush()

    def offline(self, reason: str) -> Counter[str]:
        return Counter(
            str(one["device"]) for one in self.events if one["event"] == "offline" and one["reason"] == reason
        )

    def newest(self) -> dict[str, str]:
        """Give the last word about each device, ordered by epoch as a business should."""
        last: dict[str, tuple[tuple[int, bool], str]] = {}
        for one in self.events:
            order = (int(str(one["epoch"])), one["event"] == "offline")
            if one["device"] not in last or last[str(one["device"])][0] < order:
                last[str(one["device"])] = (order, str(one["event"]))
        return {device: event for device, (_, event) in last.items()}


async def test_crash_return_restart_and_join_leave_no_ghosts(fleet: Fleet, eventually) -> None:
    await asyncio.gather(*(fleet.start(node) for node in SIZES))
    told = Told()
    await told.listen(fleet)
    for node, size in SIZES.items():
        await fleet.connect(node, [f"{node}-{number}" for number in range(size)])
    await eventually(fleet.is_right, RIGHT_S)
    await eventually(lambda: len(told.newest()) == sum(SIZES.values()), RIGHT_S)
    await eventually(lambda: fleet.journaled("n2", SIZES["n2"]), RIGHT_S)

    # A node dies; half its devices come back at once, elsewhere. Meanwhile a node joins that knows nothing.
    orphans = await fleet.kill("n2")
    returned, gone = orphans[::2], orphans[1::2]
    await asyncio.gather(fleet.connect("n3", returned), fleet.start("n4"))
    await eventually(fleet.is_right, RIGHT_S)
    await eventually(lambda: told.offline("lease").total() >= len(gone), RIGHT_S)
    assert told.offline("lease") == Counter(gone), "each once, and none that had come back"
    for device in (*gone[:5], *returned[:5]):
        for node in fleet.nodes:
            assert await fleet.online(node, device) is (device in returned)

    # Every node is restarted, one after the other.
    moved = await fleet.stop("n1")
    back = asyncio.create_task(fleet.start("n1"))
    await fleet.connect("n4", moved)
    moved = await fleet.stop("n3")
    await asyncio.gather(fleet.connect("n4", moved), fleet.start("n3"), back)
    moved = await fleet.stop("n4")
    await asyncio.gather(fleet.connect("n3", moved), fleet.start("n4"))
    await eventually(fleet.is_right, RIGHT_S)

    # All that is left says good-bye.
    for device in list(fleet.links):
        link = fleet.links.pop(device)
        link.machine.close()
        link.transport.write(link.machine.data_to_send())
        link.transport.close()
    everybody = set(fleet.at)
    fleet.at.clear()
    await eventually(fleet.is_right, RIGHT_S)
    await eventually(lambda: set(told.newest().values()) == {"offline"}, RIGHT_S)
    assert told.newest().keys() >= everybody
    assert told.offline("lease") == Counter(gone)
    with contextlib.suppress(OSError):
        await told.client.close()
