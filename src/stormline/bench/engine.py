"""What an acknowledged record costs in time, by where it is kept: memory, disk, disk synced each time, three servers.

Wall time of real servers on loopback, one record after the other and 64 at once; each append names its record.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Final

from stormline.bench.results import Row, row
from stormline.engine.cluster import start_cluster
from stormline.engine.nats import EngineConfig, connect
from stormline.engine.port import Stream
from stormline.engine.server import start_server
from stormline.net.clock import SystemRng

RECORD: Final = bytes(256)
APPENDS: Final = 1500
SIDE_BY_SIDE: Final = 64
_GOALS_MS: Final = {"memory": 0.4, "disk": 0.5, "synced": 1.2, "cluster": 1.5, "cluster_synced": 4.0}
_PORT: Final = 8791


def run() -> list[Row]:
    """Measure; takes half a minute."""
    with tempfile.TemporaryDirectory(prefix="stormline-bench-") as folder:
        return asyncio.run(_run(Path(folder)))


async def _run(folder: Path) -> list[Row]:
    rows: list[Row] = []
    for sync_always in (False, True):
        server = await start_server(folder / f"one-{sync_always}", rng=SystemRng(), port=_PORT, sync_always=sync_always)
        try:
            rows += await _measure("synced" if sync_always else "disk", server.core, persistent=True)
            if not sync_always:
                rows += await _measure("memory", server.core, persistent=False)
        finally:
            await server.stop()
        cluster = await start_cluster(folder / f"three-{sync_always}", rng=SystemRng(), sync_always=sync_always)
        try:
            rows += await _measure("cluster_synced" if sync_always else "cluster", cluster.core, persistent=True)
        finally:
            await cluster.stop()
    return rows


async def _measure(name: str, config: EngineConfig, *, persistent: bool) -> list[Row]:
    engine = await connect(config, rng=SystemRng())
    try:
        stream = await engine.stream(name, [f"{name}.>"], persistent=persistent, max_bytes=256 * 1024 * 1024)
        await _appends(stream, name, 0, APPENDS // 10)  # warm
        waits_s = await _appends(stream, name, APPENDS, APPENDS)
        begin = time.perf_counter()  # noqa: TID251 - wall time is what is measured
        async with asyncio.TaskGroup() as group:
            for number in range(SIDE_BY_SIDE):
                group.create_task(_appends(stream, name, (2 + number) * APPENDS, APPENDS // SIDE_BY_SIDE))
        together_s = (time.perf_counter() - begin) / (APPENDS // SIDE_BY_SIDE * SIDE_BY_SIDE)  # noqa: TID251
    finally:
        await engine.close()
    waits_s.sort()
    goal = _GOALS_MS[name]
    return [
        row(f"append_{name}_p50_ms", waits_s[len(waits_s) // 2] * 1000, "ms", goal=goal),
        row(f"append_{name}_{SIDE_BY_SIDE}_ms", together_s * 1000, "ms", goal=goal / 2),
    ]


async def _appends(stream: Stream, name: str, first: int, count: int) -> list[float]:
    waits_s = []
    for number in range(first, first + count):
        begin = time.perf_counter()  # noqa: TID251
        await stream.append(f"{name}.a", RECORD, message_id=f"m-{number}")
        waits_s.append(time.perf_counter() - begin)  # noqa: TID251
    return waits_s
