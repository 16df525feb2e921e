"""The program on the device whose starts are measured: each start is a process of its own with a client of its own.

Run as `python -m stormline.lab.starts_client`: one start a line on the input, what became of it a line on the output.
The starts are forked off a process that has loaded the code and never had a client, as phones start their apps: the
time to load Python is no part of a start.
"""

import asyncio
import json
import os
import ssl
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx2

# What a client loads when it first needs it:
from stormline.client import longline, memory, names_file, recorder, scheduling, store
from stormline.client.config import Config, load_bundle
from stormline.client.outside import Outside
from stormline.client.transport import AsyncTransport
from stormline.core.values import Address
from stormline.lab import workload
from stormline.lab.namespaces import UPLINKS
from stormline.lab.starts_networks import DISPATCH
from stormline.net import stream
from stormline.net.clock import SystemClock
from stormline.net.network import NetworkPort, open_port
from stormline.net.stream import TcpStream
from stormline.outbound.race import NO_WAY_OUT

if TYPE_CHECKING:
    from stormline.telemetry.timeline import CallRecord

_LOADED: Final = (longline, memory, names_file, recorder, scheduling, store)
PATIENCE_S: Final = 30.0
"""How long a user waits after the start of an app."""
FIRST: Final = 5
"""Requests at the start, all at once."""
LATER: Final = 3
"""Requests of a short use after it."""
LATER_PAUSE_S: Final = 0.2
SIZE_BYTES: Final = 2000
_BEGUN_MAX: Final = 16
"""Connections of one start that are told of."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a start is told.

    Attributes:
        base_url: whom to ask.
        ca_file: PEM file of the authority to trust.
        bundle: path of the client bundle, empty for none.
        store: the client's folder.
        number: of the first request; they go on from there.
        later_s: how far the device's wall clock is ahead: the time that has passed since the first start.
    """

    base_url: str
    ca_file: str
    bundle: str
    store: str
    number: int
    later_s: float


@dataclass(kw_only=True)
class Told:
    """What became of a start; seconds from when the client was made.

    Attributes:
        first_s: the first right answer; None: there was none within `PATIENCE_S`.
        all_s: the last of the first requests' right answers; None: one had none.
        ok: right answers to the first requests.
        failures: why others failed.
        later_ok: right answers to those of the short use.
        network: the id the client gave the network.
        where: means, carrier and address of each attempt of the first request that was answered, with its kind of
            failure.
        address: that gave the first right answer.
        begun: where connections were begun until then, in order, those to dispatch left out.
        connections: TCP connections that stood.
        waited_s: how long the client waited for a core until the first right answer: the machine's fault.
    """

    first_s: float | None = None
    all_s: float | None = None
    ok: int = 0
    failures: list[str] = field(default_factory=list)
    later_ok: int = 0
    network: str = ""
    where: list[str] = field(default_factory=list)
    address: str = ""
    begun: list[str] = field(default_factory=list)
    connections: int = 0
    waited_s: float = 0.0


class _Ahead(SystemClock):
    """The machine's clock with the time of day of a later start."""

    def __init__(self, later_s: float) -> None:
        self._later_s = later_s

    def wall(self) -> float:
        return super().wall() + self._later_s


def _network(how: str) -> NetworkPort:
    """Watch the network; the laboratory's uplinks are TUN devices, which elsewhere are VPNs."""
    return open_port(how, plain=[each.name for each in UPLINKS])


def _waited_s() -> float:
    """Give how long this thread has waited for a core since its start."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


async def _ask(http: httpx2.AsyncClient, url: str, number: int) -> str:
    """Ask for one item; give what went wrong, empty where nothing did."""
    try:
        answer = await http.get(url + workload.target(number, SIZE_BYTES))
    except httpx2.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    if answer.status_code != 200:
        return f"status {answer.status_code}"
    return "" if answer.content == workload.body(number, SIZE_BYTES) else "wrong body"


async def start(told: Start) -> Told:
    """Start the app once, and use it for a moment."""

    def trust(alpn: Sequence[str]) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=told.ca_file)
        context.set_alpn_protocols(list(alpn))
        return context

    async def open_tcp(address: Address) -> TcpStream:
        if address.host != DISPATCH:
            begun.append(str(address))
        try:
            return await stream.open_tcp(address)
        except OSError as error:
            if error.errno in NO_WAY_OUT:  # no packet has left
                begun.remove(str(address))
            raise

    loop = asyncio.get_running_loop()
    begun: list[str] = []
    records: list[CallRecord] = []
    found = Told()
    waited_s = _waited_s()
    began_at = loop.time()
    bundle = load_bundle(told.bundle) if told.bundle else None
    config = Config(bundle=bundle, store=Path(told.store), deadline_s=PATIENCE_S, trust_env=False)
    outside = Outside(clock=_Ahead(told.later_s), network=_network, open_tcp=open_tcp)
    transport = AsyncTransport(config=config, verify=trust, outside=outside)
    runtime = transport.runtime()
    runtime.on_record = records.append
    timeout = httpx2.Timeout(None, connect=config.connect_timeout_s, read=config.read_timeout_s)
    async with httpx2.AsyncClient(transport=transport, timeout=timeout, trust_env=False) as http:

        async def one(number: int) -> None:
            failure = await _ask(http, told.base_url, number)
            passed_s = loop.time() - began_at
            if failure or passed_s > PATIENCE_S:
                found.failures.append(failure or "after the user's patience")
                return
            found.ok += 1
            found.all_s = passed_s
            if found.first_s is None:
                found.first_s = passed_s
                found.waited_s = _waited_s() - waited_s
                found.begun = begun[:_BEGUN_MAX]
                found.address = records[0].address if records else ""
                found.where = [
                    f"{each.means} {each.carrier} {each.address} {each.failure}".strip()
                    for record in records[:1]
                    for each in record.attempts
                ]

        await asyncio.gather(*(one(told.number + each) for each in range(FIRST)))
        if found.failures:
            found.all_s = None
        for each in range(LATER):
            await asyncio.sleep(LATER_PAUSE_S)
            found.later_ok += not await _ask(http, told.base_url, told.number + FIRST + each)
        found.network = runtime.network.status.info.id
        found.connections = runtime.costs.connections
    return found


def serve() -> None:
    """Start what the input asks for, one after the other, each in a process of its own."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            code = 1
            try:
                found = asyncio.run(start(Start(**json.loads(line))))
                sys.stdout.write(json.dumps(asdict(found)) + "\n")
                sys.stdout.flush()
                code = 0
            finally:
                os._exit(code)  # threads that still wait for a name server would keep the process
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"a start ended with status {status}")


if __name__ == "__main__":
    serve()
