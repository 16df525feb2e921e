"""A gateway whose check of a token costs 2 ms: `python -m stormline.bench.herd_host CERTIFICATE KEY PORT`.

It runs on the first core alone. It says `there` when it could listen, does so after a line on its standard input, and
then prints the address of its business API. It ends with a signal.
"""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import uvloop

from stormline.bench.gateway_host import APP, KEY, KID
from stormline.core.values import Secret
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.engine.nats import EngineConfig
from stormline.engine.port import Engine
from stormline.gateway import carrier, server
from stormline.gateway.config import GatewayConfig
from stormline.net.clock import SystemClock, SystemRng
from stormline.web.server import TlsFiles
from stormline.wire import jws, tokens

ADMIN_KEY: Final = "a-key-for-the-bench-alone"
AUTH_S: Final = 0.002
"""CPU time of each check, the signature's 0.1 ms included."""


class _CostlyTokens:
    """`wire.tokens` as a system would have it that asks its own store, with all of that on our core."""

    refusal_code = staticmethod(tokens.refusal_code)

    @staticmethod
    def verify(*arguments: Any, **named: Any) -> tokens.DeviceToken:
        end = time.thread_time() + AUTH_S
        token = tokens.verify(*arguments, **named)
        while time.thread_time() < end:
            pass
        return token


async def _serve(certificate: str, key: str, port: int) -> None:
    async def memory() -> Engine:
        return MemoryEngine(MemoryBroker())

    await server.run(
        GatewayConfig(
            port=port,
            tls=TlsFiles(Path(certificate), Path(key)),
            apps={APP: {KID: jws.SigningKey(KEY, KID).public_text}},
            engine=EngineConfig(url="nats://127.0.0.1:1", user="nobody", password=Secret("nothing")),
            admin_key=Secret(ADMIN_KEY),
        ),
        clock=SystemClock(),
        rng=SystemRng(),
        started=lambda address, admin: print(admin, flush=True),  # noqa: T201 - the bench reads it
        stop=asyncio.Event(),
        connect=memory,
    )


if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    carrier.tokens = _CostlyTokens  # type: ignore[attr-defined,assignment]
    print("there", flush=True)  # noqa: T201 - the bench reads it
    sys.stdin.readline()
    uvloop.run(_serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
