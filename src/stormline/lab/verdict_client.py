"""The program on the device whose verdicts on its network are looked at; runs alone, told by its arguments.

It asks for something now and then, and writes one JSON line each half second: what it holds its network for.
"""

import asyncio
import json
import ssl
import sys
from pathlib import Path
from typing import Any, Final

from stormline.client.api import AsyncClient
from stormline.client.config import Config
from stormline.client.outside import Outside
from stormline.core import errors
from stormline.net.netlink import NetlinkPort
from stormline.net.network import NetworkPort, open_port

EVERY_S: Final = 0.5
"""Between two looks at the verdict."""
ASK_S: Final = 1.0
"""Between two requests."""
PATIENCE_S: Final = 10.0
"""Of each request."""


async def _ask(client: AsyncClient, url: str) -> None:
    try:
        await client.get(url)
    except errors.TransportError:
        return  # the verdict is what counts


async def run(told: dict[str, Any]) -> None:
    """Ask and tell until killed.

    Args:
        told: `base_url`, `ca_file`, `check_url` (None: no check), `watch` (as `Config.network_watch`), `root` (folder
            that stands for `/` where radios are looked at; None: `/`).
    """
    root = told.get("root")

    def network(how: str) -> NetworkPort:
        return NetlinkPort(root=Path(root)) if root is not None and how == "auto" else open_port(how)

    context = ssl.create_default_context(cafile=told["ca_file"])
    context.set_alpn_protocols(["h2", "http/1.1"])
    config = Config(
        deadline_s=PATIENCE_S,
        report=False,
        captive_url=told.get("check_url"),
        network_watch=told.get("watch", "auto"),
        network_probes=True,
    )
    loop = asyncio.get_running_loop()
    asks: set[asyncio.Task[None]] = set()
    async with AsyncClient(config=config, verify=context, outside=Outside(network=network, environ={})) as client:
        number = 0
        ask_at = loop.time()
        while True:
            now = loop.time()
            if now >= ask_at:
                number += 1
                ask_at = now + ASK_S
                task = loop.create_task(_ask(client, f"{told['base_url']}/item/{number}/2000"))
                asks.add(task)
                task.add_done_callback(asks.discard)
            info, verdict, _ = client.network
            line = {
                "condition": verdict.condition,
                "confidence": verdict.confidence,
                "why": verdict.why,
                "id": info.id,
                "kind": info.kind,
            }
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
            await asyncio.sleep(EVERY_S)


if __name__ == "__main__":
    asyncio.run(run(json.loads(sys.argv[1])))
