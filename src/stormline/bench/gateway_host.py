"""A gateway's sessions (`ours`), a server of `websockets` (`ws`), or the floor (`bare`), in a process.

`python -m stormline.bench.gateway_host WHAT CERTIFICATE KEY`

It prints its plain and its TLS port, then answers each line on its standard input with a number: `cpu` (microseconds
used so far), `rss` (KiB of memory) or `push N` (that many pushes to every session, the next when the one before has
been handed to all; answered when all are acknowledged), and ends with that input.
"""

import asyncio
import contextlib
import functools
import gc
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.appgw.port import Answer, Delivery, Exchange, Push
from stormline.bench.gateway_bare import Bare
from stormline.core import errors
from stormline.core.values import Address
from stormline.gateway.carrier import Carrier
from stormline.gateway.listener import Door, Listener
from stormline.gateway.registry import Registry
from stormline.gateway.router import Router
from stormline.gateway.session import Hub
from stormline.gateway.tickets import TicketKeys
from stormline.gateway.tls import LiveTls
from stormline.net.clock import SystemClock, SystemRng
from stormline.web.server import TlsFiles

APP: Final = "bench"
KEY: Final = Ed25519PrivateKey.from_private_bytes(bytes(32))
"""Signs the tokens of the bench; the crowd has it too."""
KID: Final = "bench"
BODY: Final = bytes(128)


class _Echo:
    """The gate `echo`: gives back what it is given, at once."""

    name = "echo"

    def handle(self, exchange: Exchange) -> Answer | Coroutine[Any, Any, None]:
        body = exchange.whole_body()
        return self._later(exchange) if body is None else Answer(0, (), body)

    async def _later(self, exchange: Exchange) -> None:
        await exchange.reply(0, (), b"".join([chunk async for chunk in exchange.body()]))


class _Task:
    """The gate `task`: the same in a task, as where an upstream is asked."""

    name = "task"

    async def handle(self, exchange: Exchange) -> None:
        await exchange.reply(0, (), exchange.whole_body() or b"")


def _sessions(files: TlsFiles) -> tuple[int, int, Registry]:
    loop = asyncio.get_running_loop()
    clock, rng, registry = SystemClock(), SystemRng(), Registry()
    hub = Hub(
        keys={APP: {KID: KEY.public_key()}},
        router=Router([_Echo(), _Task()]),
        registry=registry,
        clock=clock,
        rng=rng,
        unit="u1",
        heartbeat_s=60.0,
        opened=lambda identity, about: None,
        closed=lambda identity: None,
    )
    doors = [Door(Address("127.0.0.1", 0), plain=True), Door(Address("127.0.0.1", 0))]
    listener = Listener(doors, lambda: Carrier(hub, loop), LiveTls(files, TicketKeys(clock, rng)).context)
    listener.start()
    return listener.addresses[0].port, listener.addresses[1].port, registry


async def _websockets(files: TlsFiles) -> tuple[int, int]:
    from websockets.asyncio.server import ServerConnection, serve
    from websockets.exceptions import ConnectionClosed

    async def echo(connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):  # the crowd does not say good-bye
            async for message in connection:
                await connection.send(message)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(files.certificate, files.key)
    ports = []
    for tls in (None, context):
        server = await serve(
            echo, "127.0.0.1", 0, ssl=tls, compression=None, ping_interval=None, backlog=4096, max_size=65536
        )
        ports.append(next(iter(server.sockets)).getsockname()[1])
    return ports[0], ports[1]


async def _push(registry: Registry, rounds: int) -> None:
    sessions = list(registry)
    counted = _Counted(rounds * len(sessions))
    for number in range(rounds):
        push = Push(push_id=str(number), body=BODY, topic="t", expires_ms=None)
        for each in sessions:
            each.push(push, counted.told)
        await asyncio.sleep(0)
    await counted.all


class _Counted:
    """Waits for so many pushes to be acknowledged."""

    def __init__(self, count: int) -> None:
        self._left = count
        self.all: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def told(self, outcome: Delivery) -> None:
        if outcome is not Delivery.ACKED:
            raise errors.PlatformError(f"bench: a push was {outcome}")
        self._left -= 1
        if self._left == 0:
            self.all.set_result(None)


def _resident_kib() -> int:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


async def _serve(what: str, files: TlsFiles) -> None:
    push: Callable[[int], Awaitable[None]] | None = None
    if what == "ours":
        plain, tls, registry = _sessions(files)
        push = functools.partial(_push, registry)
    elif what == "bare":
        bare = Bare(BODY)
        plain, tls = await bare.listen(files)
        push = bare.push
    else:
        plain, tls = await _websockets(files)
    _say(plain, tls)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        match line.split():
            case ["cpu"]:
                _say(int(time.process_time() * 1e6))
            case ["rss"]:
                _say(_resident_kib())
            case ["push", rounds] if push is not None:
                await push(int(rounds))
                _say(0)


def _say(*numbers: int) -> None:
    sys.stdout.write(" ".join(map(str, numbers)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(sys.argv[1], TlsFiles(Path(sys.argv[2]), Path(sys.argv[3]))))
