"""The scheduling centre that the bench asks, over clear HTTP, in a process: `python -m stormline.bench.centre`.

It prints its port, then for each line on its standard input the CPU time it has used so far (microseconds), and ends
with that input. Beside the centre's own paths it answers `/bare`: a small JSON, the least that this server can do.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable
from typing import Final

import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from starlette.types import ASGIApp, Receive, Scope, Send

from stormline.core.values import Secret
from stormline.dispatch.config import DispatchConfig
from stormline.dispatch.rules import RuleSet
from stormline.dispatch.service import DispatchService
from stormline.dispatch.unit import HeldRules
from stormline.net.clock import SystemClock, SystemRng
from stormline.web.server import HttpServer
from stormline.wire.jws import SigningKey
from stormline.wire.plan import Endpoint, HostPlan

HOSTS: Final = tuple(f"h{number}.example" for number in range(10))
APP: Final = "shop"
PLAN_KID: Final = "plan"
BARE: Final = b'{"host": "h0.example", "addresses": ["192.0.2.1", "192.0.2.2"], "ttl": 30}'
_BARE_HEAD: Final = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BARE))]


def _rules() -> RuleSet:
    endpoints = tuple(
        Endpoint(host=f"192.0.2.{n}", port=443, carrier=carrier) for n in (1, 2) for carrier in ("h3", "h2", "h1")
    )
    plan = HostPlan(endpoints=endpoints)
    return RuleSet(version=1, hosts=dict.fromkeys(HOSTS, plan), apps={APP: frozenset(HOSTS)})


def service(rules: RuleSet) -> DispatchService:
    """Make a centre's part behind HTTP, with keys of its own."""
    config = DispatchConfig(
        host="127.0.0.1",
        port=0,
        tls=None,
        unit="u1",
        rules=_rules(),
        plan_key=SigningKey(Ed25519PrivateKey.generate(), PLAN_KID),
        token_key=SigningKey(Ed25519PrivateKey.generate(), "token"),
        admin_key=Secret("a-key-for-the-bench"),
    )
    return DispatchService(config, clock=SystemClock(), rng=SystemRng(), source=HeldRules(rules))


def _app() -> ASGIApp:
    made = service(_rules())
    centre = made.doh.in_front(made.app(trusted=True))

    def app(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return (_bare if scope["path"] == "/bare" else centre)(scope, receive, send)

    return app


async def _bare(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": _BARE_HEAD})
    await send({"type": "http.response.body", "body": BARE})


async def _serve() -> None:
    server = HttpServer(_app(), host="127.0.0.1", port=0, what="bench")
    await server.start()
    _say(server.address.port)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        _say(int(time.process_time() * 1e6))
    await server.stop()


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(_serve())
