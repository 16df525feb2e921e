"""The program on the device that asks scheduling centres, and the origin by what they say; runs alone.

It takes orders on its input: to begin with a new client, to ask for something, to say what is held.
"""

import asyncio
import json
import logging
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from stormline.client.api import AsyncClient
from stormline.client.config import Config, load_bundle
from stormline.client.outside import Outside
from stormline.client.scheduling import Scheduling
from stormline.core import errors
from stormline.lab import workload
from stormline.lab.namespaces import UPLINKS
from stormline.net.network import NetworkPort, open_port
from stormline.outbound.doh_server import DohServer

SIZE: Final = 1000
"""Bytes of each answer of the origin."""
WAIT_S: Final = 15.0
"""How long an order that waits for something waits."""
STEP_S: Final = 0.01


class _Lines(logging.Handler):
    """Keeps what the client's log says until it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


class Orders:
    """What may be asked of the client, one method each; `open` begins with a new one, as an app starts.

    Args:
        base_url: of the origin.
        ca_file: authority of the origin and of DNS over HTTPS.
    """

    def __init__(self, base_url: str, ca_file: str) -> None:
        self._base_url = base_url
        self._ca_file = ca_file
        self._client: AsyncClient | None = None

    async def open(self, bundle: str, store: str, doh: list[tuple[str, list[str]]]) -> dict[str, Any]:
        """Begin anew: with the bundle in a file, what is kept in a folder, and servers for DNS over HTTPS."""
        await self.close()
        config = Config(
            bundle=load_bundle(bundle),
            store=Path(store) if store else None,
            doh=tuple(DohServer(url, tuple(ips)) for url, ips in doh),
            report=False,
            trust_env=False,
        )
        outside = Outside(network=_network, environ={})
        self._client = await AsyncClient(config=config, verify=self._trust, outside=outside).__aenter__()
        return {}

    async def close(self) -> dict[str, Any]:
        """End the client in order: what is to be kept is on disk then."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()
        return {}

    def _trust(self, alpn: Sequence[str]) -> ssl.SSLContext:
        tls = ssl.create_default_context(cafile=self._ca_file)
        tls.set_alpn_protocols(list(alpn))
        return tls

    @property
    def _opened(self) -> AsyncClient:
        if self._client is None:
            raise errors.ConfigError("no client is open")
        return self._client

    @property
    def _scheduling(self) -> Scheduling:
        scheduling = self._opened._storm.runtime().scheduling
        if scheduling is None:
            raise errors.ConfigError("the client has no bundle")
        return scheduling

    async def get(self, number: int) -> dict[str, Any]:
        """Ask the origin for an item."""
        try:
            answer = await self._opened.get(f"{self._base_url}/item/{number}/{SIZE}")
        except errors.TransportError as error:
            return {"right": False, "error": str(error), "story": _story(error.trace)}
        right = answer.status_code == 200 and answer.content == workload.body(number, SIZE)
        return {"right": right, "story": _story(answer.extensions["stormline"])}

    async def refresh(self) -> dict[str, Any]:
        """Ask for the plan."""
        try:
            await self._scheduling.refresh()
        except errors.DispatchError as error:
            return {"error": str(error)}
        return {}

    async def connected(self) -> dict[str, Any]:
        """Have a long connection from now on, and wait until it stands."""
        channel = await self._opened.channel().__aenter__()
        await channel.wait_connected()
        return {}

    async def version(self, version: int) -> dict[str, Any]:
        """Wait until a plan of this version or a newer one is held, or for `WAIT_S`."""
        end_at = asyncio.get_running_loop().time() + WAIT_S
        while (plan := self._scheduling.plan) is None or plan.version < version:
            if asyncio.get_running_loop().time() > end_at:
                return {"error": f"not within {WAIT_S} s"}
            await asyncio.sleep(STEP_S)
        return {}

    async def pause(self, pause_s: float) -> dict[str, Any]:
        """Do nothing for a while."""
        await asyncio.sleep(pause_s)
        return {}

    def state(self) -> dict[str, Any]:
        """Say what is held."""
        if self._client is None:
            return {}
        plan = self._scheduling.plan
        return {"version": None if plan is None else plan.version, "stale": self._scheduling.stale}


def _story(trace: Any) -> list[str]:
    return [line for _, line in trace.timeline.story]


def _network(how: str) -> NetworkPort:
    """Watch the network; the laboratory's uplinks are TUN devices, which elsewhere are VPNs."""
    return open_port(how, plain=[each.name for each in UPLINKS])


async def run(base_url: str, ca_file: str) -> None:
    """Do what is ordered until the input ends: one order a line, as JSON, and one line of answer each.

    The answer has what the order gives, what is held then (`version`, `stale`), how long it took (`took_s`) and what
    the client's log said since the last one (`log`).
    """
    lines = _Lines()
    log = logging.getLogger("stormline.client")
    log.addHandler(lines)
    log.setLevel(logging.DEBUG)
    loop = asyncio.get_running_loop()
    orders = Orders(base_url, ca_file)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        began_at = loop.time()
        answer = await getattr(orders, order.pop("do"))(**order)
        answer |= orders.state() | {"took_s": loop.time() - began_at, "log": lines.take()}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    await orders.close()


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:]))
