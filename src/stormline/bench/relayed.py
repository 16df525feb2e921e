"""The relay with its gateway that the bench asks, in a process: `python -m stormline.bench.relayed ORIGIN CA KEY`.

ORIGIN is where the origin `served.test` is (`ip:port`, TLS), CA whom it is trusted by, KEY the gateway's. Beside the
relay's own paths it answers `/plain`: the same request without a seal, proxied over the same connections. See `served`
for what it prints.
"""

import asyncio
import itertools
import ssl
import sys
import time
from pathlib import Path
from typing import Final

import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from stormline.core import limits_relay
from stormline.core.values import Address, parse_address
from stormline.net.clock import SystemClock, SystemRng
from stormline.net.trust import roles_context
from stormline.outbound.messages import HttpRequest
from stormline.relay.gateway import Sender
from stormline.relay.service import RelayConfig, Service
from stormline.web.server import HttpServer
from stormline.wire import bhttp

NAME: Final = "served.test"
PLAIN: Final = "/plain"
_DEVICES: Final = 4096
"""Addresses that requests seem to come from: what one of them may ask is bounded, and is not what is measured."""


class Plain:
    """A proxy and no more: passes a request to the origin, and its answer back, without what is about a connection."""

    def __init__(self, sender: Sender, origin: Address) -> None:
        self._sender = sender
        self._addresses = (origin,)
        self._port = origin.port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        await receive()
        fields = [(name, value) for name, value in scope["headers"] if name not in bhttp.CONNECTION_FIELDS]
        fields = [(b"host", b"%s:%d" % (NAME.encode(), self._port)), *(each for each in fields if each[0] != b"host")]
        response = await self._sender.request(
            HttpRequest(scope["method"], "https", NAME, self._port, scope["raw_path"], tuple(fields)),
            deadline_s=limits_relay.RELAY_DEADLINE_S,
            body_deadline_s=2 * limits_relay.RELAY_DEADLINE_S,
            connect_timeout_s=limits_relay.RELAY_CONNECT_S,
            addresses=self._addresses,
            server_name=NAME,
        )
        try:
            body = await response.read(limits_relay.RELAY_RESPONSE_BYTES_MAX)
        finally:
            await response.aclose()
        passed = [(name.lower(), value) for name, value in response.headers]
        passed = [each for each in passed if each[0] not in bhttp.CONNECTION_FIELDS]
        await send({"type": "http.response.start", "status": response.status, "headers": passed})
        await send({"type": "http.response.body", "body": body})


def _app(service: Service, origin: Address) -> ASGIApp:
    relay, plain = service.app(tls=False), Plain(service.pool, origin)
    devices = itertools.cycle([f"192.0.{number // 256}.{number % 256}" for number in range(_DEVICES)])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["client"] = (next(devices), 1)
        await (plain if scope["path"] == PLAIN else relay)(scope, receive, send)

    return app


async def _serve(origin: str, trust: ssl.SSLContext, key: str) -> None:
    place = parse_address(origin)
    config = RelayConfig(
        keys=(Path(key),),
        origins={f"{NAME}:{place.port}": (origin,)},
        trust=trust,
    )
    service = Service(config, clock=SystemClock(), rng=SystemRng())
    server = HttpServer(_app(service, place), host="127.0.0.1", port=0, what="bench")
    await server.start()
    _say(server.address.port)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        _say(int(time.process_time() * 1e6))
    await server.stop()
    await service.aclose()


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    [origin, ca_file, key] = sys.argv[1:]
    uvloop.run(_serve(origin, roles_context(Path(ca_file).read_bytes(), []), key))
