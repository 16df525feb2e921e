"""What was learned of networks, on disk: one small file for each network, for the next start.

    <store>/networks/<digest of the network's id>.json

A file is JSON that msgspec checks against `policy.snapshot.NetworkRecord`. It holds hosts, their IP addresses and
numbers, in clear: whoever may read the app's own folder may read them (0700 and 0600). No path, query, header or body
comes into it. What cannot be read, is damaged, or was written by a later version counts as empty, with one line in the
log; nothing here raises. Several clients and processes may use one folder: who writes takes in first what the others
have written, and a reader sees the old file or the new one.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec

from stormline.client.steering import Steering
from stormline.core import limits_memory
from stormline.core.clock import Clock
from stormline.net.files import write_atomic
from stormline.policy import snapshot
from stormline.policy.shape import Network
from stormline.policy.snapshot import NetworkRecord

_log = logging.getLogger("stormline.client")

VERSION: Final = 2
_FOLDER: Final = "networks"
_STALE_S: Final = 3600.0
"""Age at which a half-written file was left by a crash."""
_WRITING: Final = threading.Lock()
"""Clients of one process take turns: the name of a half-written file is the process's own."""

Aside = Callable[[Callable[[], None]], Awaitable[None]]
"""Does something that may block elsewhere than on the loop."""


class _Header(msgspec.Struct):
    version: int


class _File(msgspec.Struct):
    version: int
    network: NetworkRecord


def decode(data: bytes) -> NetworkRecord:
    """Read a file's content; the record is within the bounds of `snapshot.bound`.

    Raises:
        ValueError: it is none of ours, or of a later version; the message says which.
    """
    if len(data) > limits_memory.MEMORY_FILE_BYTES_MAX:
        raise ValueError(f"more than {limits_memory.MEMORY_FILE_BYTES_MAX} bytes")
    try:
        version = msgspec.json.decode(data, type=_Header).version
        if version != VERSION:
            raise ValueError(f"version {version}, expected {VERSION}")
        return snapshot.bound(msgspec.json.decode(data, type=_File).network)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"damaged: {error}") from error


def encode(record: NetworkRecord) -> bytes:
    """Write a record; hosts unused for longest are left out until `limits_memory.MEMORY_FILE_BYTES_MAX` is kept."""
    record = snapshot.bound(record)
    while True:
        data = msgspec.json.encode(_File(VERSION, record))
        if len(data) <= limits_memory.MEMORY_FILE_BYTES_MAX:
            return data
        record = snapshot.bound(record, hosts_max=len(record.hosts) // 2)


class NetworkFiles:
    """The files of one folder. Every method may block for some milliseconds and raises nothing; any thread may call.

    Args:
        store: the client's store; the files are in a folder of their own below it.
    """

    def __init__(self, store: Path) -> None:
        self._folder = store / _FOLDER
        self._complained = False
        self.epoch = 0
        """Counts how often everything was forgotten: a write that was begun before comes too late."""

    def path(self, network_id: str) -> Path:
        """Give the file of a network."""
        name = hashlib.blake2b(network_id.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
        return self._folder / f"{name}.json"

    def load(self, network_id: str) -> NetworkRecord | None:
        """Give what was kept of a network; None where there is nothing, or nothing that can be used."""
        path = self.path(network_id)
        try:
            with path.open("rb") as file:
                data = file.read(limits_memory.MEMORY_FILE_BYTES_MAX + 1)
            return decode(data)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("what was kept of a network is not used: %s: %s", path, error)
            return None

    def save(self, network_id: str, record: NetworkRecord, *, wall_s: float, epoch: int) -> None:
        """Keep what is known of a network, with what other clients have kept of it meanwhile.

        Args:
            network_id: which.
            record: all that is known here.
            wall_s: the wall clock's time.
            epoch: `epoch` when `record` was taken.
        """
        with _WRITING:
            if epoch != self.epoch:
                return
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                kept = self.load(network_id)
                if kept is not None:
                    record = snapshot.merge(record, _not_ahead(kept, wall_s))
                hosts = tuple(each for each in record.hosts if each.at > wall_s - limits_memory.MEMORY_LIFE_S)
                write_atomic(self.path(network_id), encode(record._replace(hosts=hosts)), mode=0o600)
                self._prune(self.path(network_id), wall_s)
            except OSError as error:
                if not self._complained:
                    self._complained = True
                    _log.warning("what is learned of networks cannot be kept: %s", error)

    def forget(self) -> None:
        """Remove all files."""
        with _WRITING:
            self.epoch += 1
            for path in self._files():
                with contextlib.suppress(OSError):
                    path.unlink()

    def _prune(self, written: Path, wall_s: float) -> None:
        """Remove the files written longest ago beyond the bound, and what a crash left; never the one just written."""
        ages = []
        for path in self._files():
            with contextlib.suppress(OSError):
                ages.append((math.inf if path == written else path.stat().st_mtime, path))
        whole = sorted((at, path) for at, path in ages if not path.name.startswith("."))
        stale = [(at, path) for at, path in ages if path.name.startswith(".") and at < wall_s - _STALE_S]
        for _, path in whole[: max(0, len(whole) - limits_memory.MEMORY_NETWORKS_MAX)] + stale:
            with contextlib.suppress(OSError):
                path.unlink()

    def _files(self) -> list[Path]:
        try:
            return [path for path in self._folder.iterdir() if ".json" in path.name]
        except OSError:
            return []


class NetworkMemory:
    """Keeps what one client learns: loads when it enters a network, saves soon after the first thing learned.

    A write follows the first thing learned within `limits_memory.MEMORY_SAVE_FIRST_S`, later ones come at most every
    `limits_memory.MEMORY_SAVE_S`, one more at the end. Belongs to one event loop.

    Args:
        steering: what the client has learned; from here on it loads what was kept, and tells what is new.
        files: where.
        clock: the wall clock's time.
        aside: does the writing.
    """

    def __init__(self, steering: Steering, files: NetworkFiles, clock: Clock, aside: Aside) -> None:
        self._loop = asyncio.get_running_loop()
        self._steering = steering
        self._files = files
        self._clock = clock
        self._aside = aside
        self._network: Network | None = None
        self._news = False
        self._timer: asyncio.TimerHandle | None = None
        self._saved_at = -math.inf
        self._saving: dict[asyncio.Task[None], None] = {}
        self._over = False
        steering.recalls = self._enter
        steering.learned = self.learned

    def _enter(self, network: Network) -> NetworkRecord | None:
        """Give what was kept of a network that the client enters; what is new of the one it leaves is written."""
        self._save()
        self._network = network
        return self._files.load(network.id)

    def learned(self) -> None:
        """Take note that something is new."""
        self._news = True
        if self._timer is None and not self._over:
            after_s = max(
                limits_memory.MEMORY_SAVE_FIRST_S, self._saved_at + limits_memory.MEMORY_SAVE_S - self._loop.time()
            )
            self._timer = self._loop.call_later(after_s, self._save)

    def _save(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._news or self._network is None or self._over:
            return
        self._news = False
        self._saved_at = self._loop.time()
        wall_s = self._clock.wall()
        record = self._steering.collect(self._network)
        files, network_id, epoch = self._files, self._network.id, self._files.epoch

        async def write() -> None:
            await self._aside(lambda: files.save(network_id, record, wall_s=wall_s, epoch=epoch))

        task = self._loop.create_task(write(), name="stormline keep network")
        self._saving[task] = None
        task.add_done_callback(lambda done: self._saving.pop(done, None))

    def forget(self) -> None:
        """Forget what was learned of every network, here and on disk."""
        self._news = False
        self._steering.forget()
        self._files.forget()

    async def aclose(self) -> None:
        """Write what is new, and wait for it up to `limits_memory.MEMORY_CLOSE_S`."""
        self._save()
        self.abandon()
        if self._saving:
            await asyncio.wait(list(self._saving), timeout=limits_memory.MEMORY_CLOSE_S)
        for task in list(self._saving):
            task.cancel()

    def abandon(self) -> None:
        """Write nothing more."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _not_ahead(record: NetworkRecord, wall_s: float) -> NetworkRecord:
    """Give a record in which nothing is of later than now: the clock was set back, and newer words must count."""
    latest = math.floor(wall_s) - 1
    hosts = tuple(each if each.at <= wall_s else each._replace(at=latest) for each in record.hosts)
    return record._replace(at=record.at if record.at <= wall_s else latest, hosts=hosts)
