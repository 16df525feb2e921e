"""What a small GET costs the client, in CPU time of its own process, beside httpx2 under the same API and aiohttp.

Each client has a process of its own, and so has the origin. Clients take their turns one after the other; a row is
the pair of neighbouring turns whose ratio is the median, so that what the machine does meanwhile cancels out. All of
them stay on one core; see `onecore`.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from stormline.assembly.authority import ensure_authority
from stormline.bench import contestant, hosts
from stormline.bench.onecore import one_core
from stormline.bench.results import Row, row
from stormline.core import errors
from stormline.net.clock import SystemClock, SystemRng

ROUNDS: Final = 9
"""Turns of each client; odd, so that one is the median."""
REQUESTS: Final = 600
"""Requests of one turn."""
WARM_UP: Final = 300
"""Requests before the first turn, uncounted."""
GOAL_HTTPX2: Final = 0.5
"""Share of httpx2's cost that we want to reach."""
GOAL_AIOHTTP: Final = 1.0
"""The aim after that: aiohttp's cost, which has an API and a core in C of its own."""
GOAL_HOP_US: Final = 100.0
"""What the way to the background thread and back may add: four switches of threads, 20 us each, and a future."""
GOAL_GROWTH_KIB: Final = 128.0
"""Memory that may be added by `MEMORY_REQUESTS`: about a byte a request. Less is the allocator's noise."""
MEMORY_REQUESTS: Final = 100_000
MEMORY_WARM_UP: Final = 20_000
GOAL_HOST_BYTES: Final = 1024.0
"""What may be kept of one known host (`limits.TIMEOUT_HOSTS_MAX`)."""
_LOOPS: Final = ("asyncio", "uvloop")
_PEERS_VARIABLE: Final = "STORMLINE_LAB_PEERS"
"""Folder of an environment with the peers' packages; default `.venv-peers` beside our own (`make peers`)."""


class Turn(NamedTuple):
    """What one turn gave: CPU time of a request, and memory resident at its end."""

    us: float
    resident_kib: float


class Contestant:
    """One client in its process."""

    def __init__(self, client: str, loop: str, ca_file: Path, *, python: str = sys.executable) -> None:
        self.client = client
        self._process = subprocess.Popen(  # noqa: S603
            [python, "-P", contestant.__file__, client, loop, str(ca_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self, url: str, in_flight: int, requests: int) -> Turn:
        """Let it send `requests`, `in_flight` at once.

        Raises:
            PlatformError: it failed.
        """
        answer = ""
        if self._process.stdin is not None and self._process.stdout is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(f"{url} {in_flight} {requests}\n")
                self._process.stdin.flush()
                answer = self._process.stdout.readline()
        if not answer:
            raise errors.PlatformError(f"bench: the client {self.client} failed; what it said stands above")
        us, resident_kib = answer.split()
        return Turn(float(us), float(resident_kib))

    def end(self) -> None:
        """End its process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()


class Stage(NamedTuple):
    """Where clients are measured: the origin's two URLs and whom to trust."""

    h1: str
    h2: str
    ca_file: Path

    @contextlib.contextmanager
    def contestants(self, loop: str, *names: str) -> Iterator[list[Contestant]]:
        """Start clients; end them all."""
        started: list[Contestant] = []
        try:
            for name in names:
                python = _peers_python() if name == "aiohttp" else sys.executable
                if python is not None:
                    started.append(Contestant(name, loop, self.ca_file, python=python))
            yield started
        finally:
            for each in started:
                each.end()


def run() -> list[Row]:
    """Measure; takes one and a half minutes on a quiet machine."""
    with one_core(), _stage() as stage:
        rows = [each for loop in _LOOPS for each in _rows(stage, loop)]
        return [*rows, _hop(stage), _growth(stage), _host()]


@contextlib.contextmanager
def _stage() -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="stormline-bench-") as folder:
        authority = ensure_authority(Path(folder) / "ca", clock=SystemClock(), rng=SystemRng())
        files = authority.issue("origin", names=["localhost"], ips=["127.0.0.1"])
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "stormline.bench.origin", files.certificate, files.key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            ports = process.stdout.readline().split() if process.stdout is not None else []
            if len(ports) != 3:
                raise errors.PlatformError("bench: the origin did not start; what it said stands above")
            yield Stage(
                f"http://127.0.0.1:{ports[0]}/items", f"https://127.0.0.1:{ports[1]}/items", authority.certificate
            )
        finally:
            process.communicate()


def _peers_python() -> str | None:
    """Give the Python that has the peers' packages, None where there is none."""
    named = os.environ.get(_PEERS_VARIABLE)
    folder = Path(named).expanduser() if named else Path(sys.prefix).parent / ".venv-peers"
    python = folder / "bin" / "python"
    return str(python) if python.is_file() else None


# -- rows -------------------------------------------------------------------------------------------------------------
def _rows(stage: Stage, loop: str) -> Iterator[Row]:
    suffix = "" if loop == "asyncio" else f"_{loop}"
    peers = ("httpx2", "aiohttp") if loop == "asyncio" else ("httpx2",)  # uvloop is not in the peers' environment
    with stage.contestants(loop, "ours", *peers) as clients:
        for version, url in (("h1", stage.h1), ("h2", stage.h2)):
            some = clients if version == "h1" else clients[:2]  # aiohttp has no HTTP/2
            for label, in_flight in (("seq", 1), ("20", 20)):
                turns = _turns(some, url, in_flight)
                name = f"get_{version}_{label}_us{suffix}"
                yield _against(name, turns, "httpx2", GOAL_HTTPX2)
                if "aiohttp" in turns:
                    yield _against(f"{name}_aiohttp", turns, "aiohttp", GOAL_AIOHTTP)


def _turns(clients: list[Contestant], url: str, in_flight: int, requests: int = REQUESTS) -> dict[str, list[float]]:
    """Give the figures of all rounds by client; who begins changes from round to round."""
    for each in clients:
        each.turn(url, in_flight, WARM_UP)
    found: dict[str, list[float]] = {each.client: [] for each in clients}
    for index in range(ROUNDS):
        for each in clients if index % 2 == 0 else reversed(clients):
            found[each.client].append(each.turn(url, in_flight, requests).us)
    return found


def _against(name: str, turns: dict[str, list[float]], peer: str, share: float) -> Row:
    ours, theirs = median_pair(turns["ours"], turns[peer])
    return row(name, ours, "us", goal=share * theirs, peer=peer, peer_value=theirs)


def median_pair(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Give, of turns taken side by side, the pair whose ratio is the median; the lower one of an even number."""
    pairs = sorted(zip(ours, theirs, strict=True), key=lambda pair: pair[0] / pair[1])
    return pairs[(len(pairs) - 1) // 2]


def _hop(stage: Stage) -> Row:
    """Say what the synchronous client adds to the asynchronous one."""
    with stage.contestants("asyncio", "ours-sync", "ours") as clients:
        turns = _turns(clients, stage.h1, 1)
    through, direct = median_pair(turns["ours-sync"], turns["ours"])
    return row("sync_hop_us", through - direct, "us", goal=GOAL_HOP_US, peer="AsyncClient in all", peer_value=direct)


def _growth(stage: Stage) -> Row:
    """Say what memory grows by over many requests, half of them over HTTP/1.1 and half over HTTP/2."""
    with stage.contestants("asyncio", "ours") as (client,):
        for url in (stage.h1, stage.h2):
            before = client.turn(url, 20, MEMORY_WARM_UP // 2)
        for url in (stage.h1, stage.h2):
            after = client.turn(url, 20, MEMORY_REQUESTS // 2)
    return row("memory_growth_kib", after.resident_kib - before.resident_kib, "KiB", goal=GOAL_GROWTH_KIB)


def _host() -> Row:
    return row("host_bytes", asyncio.run(hosts.bytes_per_host()), "bytes", goal=GOAL_HOST_BYTES)
