"""What HTTP requests through the long connection cost the gateway: small ones, kept ones, and compressed ones.

Sessions over plain TCP and the origin are in this process, the gateway alone in the one that is measured
(`python -m stormline.bench.appgw_api ORIGIN_PORT`); identities are signed, as in a platform.
"""

import asyncio
import contextlib
import functools
import hashlib
import json
import ssl
import subprocess
import sys
import time
from typing import Final, cast

import uvloop

from stormline.appgw.api import ApiGate, make_pool
from stormline.appgw.identity import Signer
from stormline.appgw.upstreams import Book, read_upstreams
from stormline.bench.gateway_crowd import Session
from stormline.bench.gateway_host import APP, KEY, KID
from stormline.bench.onecore import one_core
from stormline.bench.results import Row, row
from stormline.core import errors
from stormline.core.values import Address
from stormline.gateway.carrier import Carrier
from stormline.gateway.listener import Door, Listener
from stormline.gateway.registry import Registry
from stormline.gateway.router import Router
from stormline.gateway.session import Hub
from stormline.net.clock import SystemClock, SystemRng
from stormline.wire import events as e
from stormline.wire.jws import SigningKey

HOST: Final = "api.bench.example"
SESSIONS: Final = 20
"""Devices that ask, each one request after the other."""
REQUESTS: Final = 4000
"""Requests of one turn."""
LARGE_REQUESTS: Final = 400
ROUNDS: Final = 7
"""Turns; the row is the lower quartile: what others do on the machine only adds."""
GOAL_GET_US: Final = 250.0
GOAL_KEPT_US: Final = 150.0
GOAL_CODED_US: Final = 1000.0
GOAL_RATIO: Final = 2.5
_SMALL: Final = b'{"items": [1, 2, 3, 4, 5]}\n'
_WORDS: Final = (
    "red", "green", "small", "large", "cotton", "leather", "summer", "winter", "shirt", "shoe", "coat", "lamp", "chair",
    "table", "for", "and", "with",
)  # fmt: skip


def _article(number: int) -> dict[str, object]:
    drawn = hashlib.sha256(str(number).encode()).digest()
    title = " ".join(_WORDS[each % len(_WORDS)] for each in drawn[:7])
    return {"id": drawn[8:16].hex(), "title": title, "price": drawn[16] + drawn[17] / 100, "stock": drawn[18]}


_LARGE: Final = json.dumps([_article(number) for number in range(400)]).encode()
"""A list as APIs give them, some 40 KB."""


class _Origin(asyncio.Protocol):
    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            path = self._buffer[:end].split(b" ", 2)[1]
            self._buffer = self._buffer[end + 4 :]
            if self._transport is not None:
                self._transport.write(_ANSWERS[path])


def _answer(body: bytes, *more: str) -> bytes:
    head = ["HTTP/1.1 200 OK", "content-type: application/json", f"content-length: {len(body)}", *more, "", ""]
    return "\r\n".join(head).encode() + body


_ANSWERS: Final = {
    b"/small": _answer(_SMALL),
    b"/kept": _answer(_SMALL, "cache-control: public, max-age=3600"),
    b"/large": _answer(_LARGE),
}


class _Device(Session):
    """Asks for one path again and again."""

    path = "/small"
    received = 0

    def take(self, data: bytes) -> None:
        """Count the bytes, and the answers that are whole."""
        self.received += len(data)
        self.machine.receive_data(data, 0.0)
        while (event := self.machine.next_event()) is not None:
            if isinstance(event, e.Welcomed):
                self.greeted()
            elif isinstance(event, e.ReplyReceived | e.DataReceived):
                self.machine.consume(event.call_id, len(event.body))
                if not event.more if isinstance(event, e.ReplyReceived) else event.end:
                    self.came_back()
        if out := self.machine.data_to_send():
            self.send(out)

    def ask(self) -> None:
        """Send one request."""
        network = "3g" if self.path == "/large" else "4g"
        headers = (
            ("accept", "*/*"),
            ("accept-encoding", "gzip, deflate, br, zstd"),
            ("ect", network),
            ("user-agent", "bench"),
        )
        self.machine.send_call("api", "GET", target=f"https://{HOST}{self.path}", headers=headers)
        self.send(self.machine.data_to_send())


class _Gateway:
    """The process that is measured."""

    def __init__(self, origin: int) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - a module of our own
            [sys.executable, "-m", "stormline.bench.appgw_api", str(origin)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._line())

    def cpu_us(self) -> float:
        """CPU time used so far."""
        if self._process.stdin is not None:
            self._process.stdin.write("cpu\n")
            self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise errors.PlatformError("bench: the gateway failed; what it said stands above")
        return line

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


async def _measure() -> list[Row]:
    loop = asyncio.get_running_loop()
    origin = await loop.create_server(_Origin, "127.0.0.1", 0)
    gateway = await loop.run_in_executor(None, _Gateway, origin.sockets[0].getsockname()[1])
    try:
        devices = []
        for number in range(SESSIONS):
            _, device = await loop.create_connection(
                functools.partial(_Device, number, "raw"), "127.0.0.1", gateway.port
            )
            await device.ready
            devices.append(device)

        async def turn(path: str, requests: int) -> float:
            for device in devices:
                device.path, device.received = path, 0
            before = gateway.cpu_us()
            await asyncio.gather(*(device.echo(requests // SESSIONS) for device in devices))
            return (gateway.cpu_us() - before) / requests

        async def cost(path: str, requests: int) -> float:
            await turn(path, requests // 4)
            return sorted([await turn(path, requests) for _ in range(ROUNDS)])[ROUNDS // 4]

        rows = [
            row("api_get_us", await cost("/small", REQUESTS), "us", goal=GOAL_GET_US),
            row("api_get_kept_us", await cost("/kept", REQUESTS), "us", goal=GOAL_KEPT_US),
            row("api_get_coded_us", await cost("/large", LARGE_REQUESTS), "us", goal=GOAL_CODED_US),
        ]
        received = sum(device.received for device in devices) / LARGE_REQUESTS
        rows.append(row("api_coded_ratio", len(_LARGE) / received, "x", goal=GOAL_RATIO, better="higher"))
        for device in devices:
            device.transport.abort()
        return rows
    finally:
        gateway.close()
        origin.close()


def run() -> list[Row]:
    """Measure.

    Raises:
        PlatformError: the process of the gateway failed.
    """
    with one_core():
        return uvloop.run(_measure())


async def _serve(origin: int) -> None:
    loop = asyncio.get_running_loop()
    clock, rng = SystemClock(), SystemRng()
    book = Book(read_upstreams({HOST: f"http://127.0.0.1:{origin}"}))
    signer = Signer(SigningKey(KEY, KID), unit="u1", clock=clock)
    hub = Hub(
        keys={APP: {KID: KEY.public_key()}},
        router=Router([ApiGate(make_pool(clock), book, clock=clock, signer=signer)]),
        registry=Registry(),
        clock=clock,
        rng=rng,
        unit="u1",
        heartbeat_s=60.0,
        opened=lambda identity, about: None,
        closed=lambda identity: None,
    )
    listener = Listener([Door(Address("127.0.0.1", 0), plain=True)], lambda: Carrier(hub, loop), _no_tls)
    listener.start()
    _say(listener.addresses[0].port)
    while await loop.run_in_executor(None, sys.stdin.readline):
        _say(int(time.process_time() * 1e6))


def _no_tls(hello: bytes) -> ssl.SSLContext:
    raise errors.PlatformError("bench: nobody asks for TLS here")


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(int(sys.argv[1])))
