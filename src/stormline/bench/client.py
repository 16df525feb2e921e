"""What a small GET costs the client, in CPU time of its own process, beside httpx2 under the same API."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import httpx2

from stormline.bench.results import Row, row
from stormline.client.transport import AsyncTransport

ROUNDS = 7
"""Each client takes its turn this often; the median turn counts."""
REQUESTS = 1500
"""Requests of one turn."""
WARM_UP = 100
"""Requests before the first turn, uncounted."""


def run() -> list[Row]:
    """Measure; takes about a minute."""
    with _origin() as url:
        return asyncio.run(_measure(url))


@contextlib.contextmanager
def _origin() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "stormline.bench.origin"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        if process.stdout is None or process.stdin is None:
            raise RuntimeError("no pipes to the origin")
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/items"
    finally:
        process.communicate()


async def _measure(url: str) -> list[Row]:
    async with _clients() as (ours, peer):
        rows = []
        for name, in_flight in (("get_h1_seq_us", 1), ("get_h1_20_us", 20)):
            mine, theirs = [], []
            for client in (ours, peer):
                await _turn(client, url, in_flight, WARM_UP)
            for _ in range(ROUNDS):
                mine.append(await _turn(ours, url, in_flight, REQUESTS))
                theirs.append(await _turn(peer, url, in_flight, REQUESTS))
            median, peer_median = sorted(mine)[ROUNDS // 2], sorted(theirs)[ROUNDS // 2]
            rows.append(row(name, median, "us", goal=0.5 * peer_median, peer="httpx2", peer_value=peer_median))
        return rows


@contextlib.asynccontextmanager
async def _clients() -> AsyncIterator[tuple[httpx2.AsyncClient, httpx2.AsyncClient]]:
    async with (
        httpx2.AsyncClient(transport=AsyncTransport()) as ours,
        httpx2.AsyncClient(trust_env=False) as peer,
    ):
        yield ours, peer


async def _turn(client: httpx2.AsyncClient, url: str, in_flight: int, requests: int) -> float:
    """Send `requests` and give the CPU time of each, microseconds."""

    async def worker(count: int) -> None:
        for _ in range(count):
            response = await client.get(url)
            if response.status_code != 200 or len(response.content) != 27:
                raise RuntimeError(f"the origin answered {response.status_code}")

    started = time.process_time()
    await asyncio.gather(*(worker(requests // in_flight) for _ in range(in_flight)))
    return (time.process_time() - started) / (requests // in_flight * in_flight) * 1e6
