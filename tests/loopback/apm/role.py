"""Runs one role as the platform does, in a process of its own: settings by standard input, address by output."""

import asyncio
import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any

from stormline.core.values import Address, Secret
from stormline.net.clock import SystemClock
from stormline.web.server import TlsFiles


def _config(role: str, spec: dict[str, Any]) -> Any:
    for name in ("admin_key", "access_key", "store_url"):
        if name in spec:
            spec[name] = Secret(spec[name])
    for name in ("store_path", "apm_ca"):
        if name in spec:
            spec[name] = Path(spec[name])
    if "tls" in spec:
        spec["tls"] = TlsFiles(*map(Path, spec["tls"]))
    if role == "apm":
        from stormline.apm.config import ApmConfig

        return ApmConfig(**spec)
    from stormline.console.config import ConsoleConfig

    return ConsoleConfig(**spec)


async def _main() -> None:
    spec = json.load(sys.stdin)
    role = spec.pop("role")
    config = _config(role, spec)
    if role == "apm":
        from stormline.apm.service import run
    else:
        from stormline.console.service import run  # type: ignore[assignment]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    def started(address: Address) -> None:
        print(json.dumps(address), flush=True)

    await run(config, clock=SystemClock(), started=started, stop=stop)


logging.basicConfig(level=logging.INFO)
asyncio.run(_main())
