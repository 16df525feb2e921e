"""What the application gateways cost a gateway's process: the presence of devices that come.

A real nats-server beside us takes the writes. Devices come as in a storm after an outage: many at once, known from
before, to another node than the last time. CPU time is this process's: the directory, the client of NATS and the loop.
"""

import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from time import process_time
from typing import Final

import uvloop

from stormline.appgw.directory import Directory
from stormline.appgw.journal import NodeJournal
from stormline.appgw.port import Identity
from stormline.appgw.presence_events import PresenceEvents
from stormline.appgw.record import About
from stormline.bench.results import Row, row
from stormline.engine.nats import NatsEngine, connect
from stormline.engine.server import start_server
from stormline.net.clock import SystemClock, SystemRng

DEVICES: Final = 2000
ROUNDS: Final = 5
"""Turns of each; odd, so that one is the median."""
GOAL_PRESENCE_US: Final = 60.0


def run() -> list[Row]:
    """Measure.

    Raises:
        PlatformError: the engine did not start.
    """
    return uvloop.run(_run())


async def _run() -> list[Row]:
    async with _engine() as engine:
        presence_us = await _presence_us(engine)
    return [row("presence_us", presence_us, "us", goal=GOAL_PRESENCE_US)]


@contextlib.asynccontextmanager
async def _engine() -> AsyncIterator[NatsEngine]:
    with tempfile.TemporaryDirectory(prefix="stormline-bench-") as folder:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        server = await start_server(Path(folder) / "nats", rng=SystemRng(), port=port)
        engine = await connect(server.core, rng=SystemRng())
        try:
            yield engine
        finally:
            await engine.close()
            await server.stop()


async def _presence_us(engine: NatsEngine) -> float:
    """Give the cost of a device that comes: its entry read and written, its share of the list, its event told."""
    about = About("wifi", "stormline/1", "3.1", ("kiosk",))
    costs = []
    for turn in range(ROUNDS + 1):
        node = f"n{turn}"
        directory = Directory(
            engine,
            unit="u1",
            node=node,
            run="1",
            clock=SystemClock(),
            superseded=lambda identity: None,
            watcher=PresenceEvents(engine, unit="u1"),
            journal=NodeJournal(node, "1"),
        )
        coming = [
            Identity("shop", f"device-{number}", f"user-{number}", f"session-{turn}-{number}")
            for number in range(DEVICES)
        ]
        before = process_time()
        for identity in coming:
            directory.opened(identity, about)
        await directory.flush()
        if turn:  # in the first all devices and users are new, which they are once
            costs.append((process_time() - before) / DEVICES * 1e6)
        for identity in coming:
            directory.closed(identity)
        await directory.flush()
    return median(costs)
