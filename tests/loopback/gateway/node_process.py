"""A gateway node as a process of its own, for tests that kill it: `python node_process.py JSON`.

Says the port of its business API once it serves; ends in order on SIGTERM.
"""

import asyncio
import json
import signal
import sys
from pathlib import Path

import uvloop

from stormline.core.values import Address, Secret
from stormline.engine.nats import EngineConfig
from stormline.gateway import server
from stormline.gateway.config import GatewayConfig
from stormline.net.clock import SystemClock, SystemRng
from stormline.web.server import TlsFiles


async def main(told: dict[str, str]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    config = GatewayConfig(
        tls=TlsFiles(Path(told["certificate"]), Path(told["key"])),
        plain=(Address("127.0.0.1", int(told["plain"])),),
        node=told["node"],
        apps={"demo": {"k1": told["public"]}},
        engine=EngineConfig(url=told["url"], user="core", password=Secret(told["password"])),
        admin_key=Secret(told["admin_key"]),
    )

    def started(gateway: Address, admin: Address) -> None:
        print(admin.port, flush=True)

    await server.run(config, clock=SystemClock(), rng=SystemRng(), started=started, stop=stop)


if __name__ == "__main__":
    uvloop.run(main(json.loads(sys.argv[1])))
