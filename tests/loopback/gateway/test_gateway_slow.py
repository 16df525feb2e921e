"""Clients that take little of what is sent to them (O15): what they cost is bounded, and others do not notice.

Scaled: 24 readers of 1 KiB a second instead of 300, 100 pushes of 4 KiB to each instead of 3,000 of 2, and a session
that takes nothing is dropped after 3 s instead of 120 s. Readers are threads with blocking sockets and a receive buffer
of 4 KiB, over TLS, over a WebSocket in TLS, and over neither; they beat, acknowledge nothing, and read a quarter of a
KiB four times a second.
"""

import asyncio
import contextlib
import itertools
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from websockets.client import ClientProtocol
from websockets.uri import parse_uri

from stormline.appgw.port import Delivery
from stormline.core import limits, limits_platform
from stormline.core.values import Address
from stormline.gateway import server
from stormline.gateway.node import GatewayNode
from stormline.wire import frames, websocket
from stormline.wire import messages as m

pytestmark = pytest.mark.loopback

NAME = "gateway.test"
READERS = 24
BODY = bytes(4096)
STALL_S = 3.0
ROUNDS = 100
CAP_BYTES = (
    limits_platform.SEND_BUFFER_BYTES
    + limits_platform.SEND_UNSENT_BYTES
    + 3 * limits.PUSHES_UNACKED_MAX * (len(BODY) + 512)
)
"""What one reader may cost: our buffer, the kernel's, and the pushes it has not acknowledged: as they were asked for,
as they are kept for a resumption, and as they wait."""


class SlowReader(threading.Thread):
    """A client that reads a KiB a second.

    Attributes:
        taken: bytes it has read.
        fault: why it ended.
    """

    def __init__(self, address: Address, kind: str, pem: str, token: str) -> None:
        super().__init__(daemon=True)
        self._address, self._kind, self._pem = address, kind, pem
        self._hello = m.Hello((1,), "demo", token, client="slow", capabilities=(m.RESUME,))
        self._ws: ClientProtocol | None = None
        self.stop = threading.Event()
        self.taken = 0
        self.fault = ""

    def run(self) -> None:
        """Connect, greet, read slowly, beat."""
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(20)
        sock: Any = raw
        try:
            raw.connect(tuple(self._address))
            if self._kind != "plain":
                context = ssl.create_default_context(cadata=self._pem)
                context.set_alpn_protocols([m.ALPN if self._kind == "tls" else websocket.ALPN])
                sock = context.wrap_socket(raw, server_hostname=NAME)
            if self._kind == "wss":
                self._upgrade(sock)
            self._say(sock, self._hello)
            for turn in itertools.count(1):
                self.taken += len(self._some(sock))
                if turn % 4 == 0:
                    self._say(sock, m.Ping(turn))
                if self.stop.wait(0.25):
                    break
        except OSError as error:
            self.fault = type(error).__name__
        finally:
            sock.close()

    def _some(self, sock: Any) -> bytes:
        sock.settimeout(0.05)
        try:
            data: bytes = sock.recv(256)
        except TimeoutError:
            return b""
        finally:
            sock.settimeout(20)
        if not data:
            raise ConnectionResetError("the gateway ended it")
        return data

    def _upgrade(self, sock: Any) -> None:
        ws = self._ws = ClientProtocol(
            parse_uri(f"wss://{NAME}{websocket.PATH}"),
            subprotocols=[websocket.SUBPROTOCOL],  # type: ignore[list-item]
        )
        ws.send_request(ws.connect())
        sock.sendall(b"".join(ws.data_to_send()))
        while ws.state.name == "CONNECTING":
            ws.receive_data(sock.recv(1024))
        ws.events_received()

    def _say(self, sock: Any, message: m.Message) -> None:
        data = frames.encode(message)
        if self._ws is not None:
            self._ws.send_binary(data)
            data = b"".join(self._ws.data_to_send())
        with contextlib.suppress(TimeoutError):  # the gateway does not read from who does not read
            sock.settimeout(0.5)
            sock.sendall(data)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture(name="slow")
def _slow(authority):
    started: list[SlowReader] = []

    def slow(address: Address, kind: str, token: str) -> SlowReader:
        started.append(SlowReader(address, kind, authority.pem, token))
        started[-1].start()
        return started[-1]

    yield slow
    for reader in started:
        reader.stop.set()
    for reader in started:
        reader.join(5)


async def sessions(gateway) -> dict[str, dict[str, Any]]:
    listed = (await gateway.admin.get("/v1/sessions", params={"limit": 100})).json()["sessions"]
    return {each["device"]: each for each in listed}


@pytest.fixture(name="until")
def _until(gateway):
    async def until(holds: Callable[[dict[str, dict[str, Any]]], bool]) -> None:
        async with asyncio.timeout(40):
            for _ in itertools.count():
                if holds(await sessions(gateway)):
                    return
                await asyncio.sleep(0.1)

    return until


@pytest.mark.timeout(120)
async def test_slow_readers_cost_no_more_than_their_cap_and_are_dropped(
    gateway, until, mint, slow, monkeypatch, caplog
):
    monkeypatch.setattr(limits_platform, "STALL_TIMEOUT_S", STALL_S)
    nodes: list[GatewayNode] = []
    monkeypatch.setattr(server, "GatewayNode", lambda *args, **kw: nodes.append(GatewayNode(*args, **kw)) or nodes[-1])
    caplog.set_level("INFO", "stormline.gateway")
    plain = Address("127.0.0.1", 0)
    with socket.socket() as free:
        free.bind(tuple(plain))
        plain = Address(*free.getsockname()[:2])
    await gateway.start(plain=(plain,))
    [node] = nodes
    good = [await gateway.connect(f"good{n}") for n in range(4)]
    names = [f"slow{n}" for n in range(READERS)]
    kinds = ("tls", "wss", "plain")
    readers = {
        name: slow(plain if kinds[n % 3] == "plain" else gateway.address, kinds[n % 3], mint(name))
        for n, name in enumerate(names)
    }
    await until(lambda shown: len(shown) == READERS + len(good))
    before = resident_bytes()
    most = {"waiting_bytes": 0, "resident": 0}
    took: list[float] = []
    refused = 0

    async def push(name: str, number: int) -> None:
        nonlocal refused
        begun = asyncio.get_running_loop().time()
        delivery = (await node.push.push("demo", name, BODY, push_id=f"{name}-{number}")).delivery
        if name.startswith("good"):
            assert delivery is Delivery.ACKED
            took.append(asyncio.get_running_loop().time() - begun)
        else:
            refused += delivery is Delivery.BUSY

    pushing: list[asyncio.Task[None]] = []
    for number in range(ROUNDS):
        pushing += [asyncio.create_task(push(name, number)) for name in (*names, *(f"good{n}" for n in range(4)))]
        if number % 5 == 0:
            shown = await sessions(gateway)
            most["waiting_bytes"] = max([most["waiting_bytes"], *(each["waiting_bytes"] for each in shown.values())])
        most["resident"] = max(most["resident"], resident_bytes() - before)
        await asyncio.sleep(0.05)
    await until(lambda shown: not set(names) & set(shown))  # each is dropped, and not one that reads
    await asyncio.gather(*pushing)
    assert len(await sessions(gateway)) == len(good)
    said = [record.getMessage() for record in caplog.records]
    reason = "ended: we closed it (overloaded: the client reads nothing)"
    for name in names:
        assert any(f"{name!r}" in line and reason in line for line in said), name
    assert limits_platform.SEND_BUFFER_BYTES < most["waiting_bytes"] <= CAP_BYTES
    assert most["resident"] <= READERS * CAP_BYTES + 16 * 1024 * 1024
    assert refused > 0
    assert sorted(took)[len(took) * 99 // 100] < 5.0  # 0.5 s on a quiet machine; this one may be busy
    async with asyncio.timeout(40):  # and their connections go, though nobody has taken what they were sent
        while node.counts()[1] != len(good):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert not any(reader.stop.is_set() for reader in readers.values())
