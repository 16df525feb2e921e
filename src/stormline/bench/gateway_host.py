"""A gateway's sessions (`ours`), or a server of `websockets` (`ws`), in a process.

`python -m stormline.bench.gateway_host WHAT CERTIFICATE KEY`

It prints its plain and its TLS port, then answers each line on its standard input with a number: `cpu` (microseconds
used so far), `rss` (KiB of memory) or `push N` (that many pushes to every session, when all are acknowledged), and ends
with that input.
"""

import asyncio
import contextlib
import gc
import ssl
import sys
import time
from pathlib import Path
from typing import Any, Final

import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.appgw.port import Exchange, Push
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
    """The gate `echo`: gives back what it is given."""

    name = "echo"

    async def handle(self, exchange: Exchange) -> None:
        gathered = b"".join([chunk async for chunk in exchange.body()])
        await exchange.reply(0, (), gathered)


def _sessions(files: TlsFiles) -> tuple[int, int, Registry]:
    loop = asyncio.get_running_loop()
    clock, rng, registry = SystemClock(), SystemRng(), Registry()
    hub = Hub(
        keys={APP: {KID: KEY.public_key()}},
        router=Router([_Echo()]),
        registry=registry,
        clock=clock,
        rng=rng,
        unit="u1",
        heartbeat_s=60.0,
        opened=lambda identity: None,
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
    sessions: list[Any] = list(registry)
    for number in range(rounds):
        push = Push(push_id=str(number), body=BODY, topic="t", expires_ms=None)
        await asyncio.gather(*(each.push(push) for each in sessions))


def _resident_kib() -> int:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


async def _serve(what: str, files: TlsFiles) -> None:
    registry = Registry()
    if what == "ours":
        plain, tls, registry = _sessions(files)
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
            case ["push", rounds]:
                await _push(registry, int(rounds))
                _say(0)


def _say(*numbers: int) -> None:
    sys.stdout.write(" ".join(map(str, numbers)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(sys.argv[1], TlsFiles(Path(sys.argv[2]), Path(sys.argv[3]))))
