"""The network log on disk: one folder, a ring of bounded files, safe against crashes, off the way of who writes.

    <time>-<instance>.tail          records of a live process, as they come: memory mapped, not compressed
    <time>-<instance>-<n>.slog      blocks of records, compressed (`telemetry.netlog`)

A record is in the mapped tail when `write` returns: a kill -9 then loses none, as the pages are the kernel's. A thread
compresses what has gathered and takes it out of the tail, when half of that is full or its first record is
`limits_netlog.NETLOG_MOVE_S` old; within the same time what it wrote is synced to disk. So a power cut loses at most
what came within twice that time. Both halves full, a record is dropped and counted: nobody ever waits for the disk.

A tail whose process is gone is taken over by the next one to open the folder: a lock (flock) tells who lives. Any
number of processes may use one folder, and a child after `fork` begins files of its own.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from stormline.core import limits_netlog as limits
from stormline.core import zstandard
from stormline.core.clock import Clock, Rng
from stormline.net.clock import SystemClock, SystemRng
from stormline.net.files import write_atomic
from stormline.telemetry import netlog

_log = logging.getLogger("stormline.client")

TAIL: Final = ".tail"
_PAGE: Final = 4096
_STALE_S: Final = 3600.0
"""Age at which a file that was being made was left by a crash."""
_TAIL_BYTES: Final = _PAGE + 2 * limits.NETLOG_HALF_BYTES
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class _Half:
    """One half of the tail: where it lies, and what is in it."""

    __slots__ = ("begin", "end", "limit", "number", "records", "since")

    def __init__(self, begin: int) -> None:
        self.begin = self.end = begin
        self.limit = begin + limits.NETLOG_HALF_BYTES
        self.records: list[bytes] = []
        self.number = 0
        self.since = 0.0


class _Tail:
    """The mapped file of one process, and who makes its bytes."""

    def __init__(self, path: Path, writer: netlog.FileWriter) -> None:
        self.path = path
        self.writer = writer
        fresh = path.with_suffix(".new")  # under its own name only when it is locked
        self._descriptor = os.open(fresh, _FLAGS, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _allocate(self._descriptor, _TAIL_BYTES)  # a full disk is an error here, and not a signal later
            self.map = mmap.mmap(self._descriptor, _TAIL_BYTES)
            self.map[: netlog.HEADER_BYTES] = writer.header
            fresh.replace(path)
        except BaseException:
            os.close(self._descriptor)
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise

    def close(self) -> None:
        """Let go of it; the file stays. In a child after `fork` the lock stays the parent's."""
        self.map.close()
        os.close(self._descriptor)


class LogStore:
    """One opening of a folder. Any thread may write; nothing here raises, and nobody waits for the disk.

    A folder or a disk that cannot be used costs one warning: what is written then is counted in `lost`.

    Args:
        folder: made where it is not there (0700).
        bytes_max: of all its files.
        public: X25519 key that the files are sealed to; None: they are clear.
        client: name and version of who writes.
        clock: time.
        rng: chance, for keys and names.

    Attributes:
        lost: records that were dropped so far.
        problem: why it cannot be written, empty while it can.
    """

    def __init__(
        self, folder: Path, *, bytes_max: int = limits.NETLOG_BYTES, public: bytes | None = None, client: str = "",
        clock: Clock | None = None, rng: Rng | None = None,
    ) -> None:  # fmt: skip
        self.folder = folder
        self._bytes_max = bytes_max
        self._public = public
        self._client = client
        self._clock = clock or SystemClock()
        self._rng = rng or SystemRng()
        self.lost = 0
        self.problem = ""
        self._told: set[str] = set()
        self._closed = False
        self._begin()
        _LIVE.add(self)

    def _begin(self) -> None:
        """Be as new; also in a child after `fork`, where nothing of the parent's may be used."""
        self._lock = threading.RLock()  # a log line from a finalizer may come while we hold it
        self._busy = False
        self._worker: threading.Thread | None = None
        self._wake = threading.Event()
        self._waiters: list[threading.Event] = []
        self._pending: list[bytes] = []
        self._tail: _Tail | None = None
        self._halves = (_Half(_PAGE), _Half(_PAGE + limits.NETLOG_HALF_BYTES))
        self._active = self._halves[0]
        self._number = 0
        self._file: int | None = None
        self._file_bytes = 0
        self._file_count = 0
        self._unsynced_at: float | None = None
        self._instance = b""
        self._started_ms = 0

    # -- who writes ---------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Open the folder, on a thread; else the first record does so."""
        with self._lock:
            self._start()

    def _start(self) -> None:
        if self._worker is None and not (self._closed or self.problem):
            worker = threading.Thread(target=self._work, name="stormline-netlog", daemon=True)
            self._worker = worker
            try:
                worker.start()
            except RuntimeError:  # the interpreter ends, or there are no more threads
                self.problem = "no thread could be started"

    def write(self, record: bytes) -> bool:
        """Keep one record; False where it was dropped. Takes some microseconds.

        Args:
            record: encoded (`netlog.encode`), without secrets.
        """
        with self._lock:
            if self._busy or self._closed or self.problem or len(record) > limits.NETLOG_RECORD_BYTES_MAX:
                self.lost += 1
                return False
            self._busy = True
            try:
                if self._tail is not None:
                    return self._put(self._tail, record)
                self._start()
                if len(self._pending) >= limits.NETLOG_PENDING_RECORDS_MAX:
                    self.lost += 1
                    return False
                self._pending.append(record)
                return True
            finally:
                self._busy = False

    def _put(self, tail: _Tail, record: bytes) -> bool:
        half, number = self._active, self._number
        data = tail.writer.record(record, number)
        if half.end + len(data) > half.limit:
            half = self._halves[self._halves[0] is half]
            self._wake.set()
            if half.records:  # it is still being compressed
                self.lost += 1
                return False
            self._active = half
        end = half.end + len(data)
        tail.map[half.end : end] = data
        half.end = end
        self._number = number + 1
        if not half.records:
            half.number, half.since = number, self._clock.monotonic()
            self._wake.set()
        half.records.append(record)
        return True

    def flush(self, timeout_s: float = limits.NETLOG_CLOSE_S) -> bool:
        """Have what was written compressed and synced; False where that was not done in time. Blocks."""
        done = threading.Event()
        with self._lock:
            self._start()
            if self._worker is None or self.problem or self._closed:
                return False
            self._waiters.append(done)
            self._wake.set()
        return done.wait(timeout_s)

    def close(self, timeout_s: float = limits.NETLOG_CLOSE_S) -> None:
        """Write what is left, and end; blocks for so long at most. Harmless a second time."""
        with self._lock:
            self._closed = True
            worker = self._worker
            self._wake.set()
        if worker is not None and worker is not threading.current_thread():
            worker.join(timeout_s)

    def abandon_in_child(self) -> None:
        """Let go of what came over by `fork`; the next record opens the folder anew."""
        tail, file, closed = self._tail, self._file, self._closed
        self._begin()
        self._closed = closed
        with contextlib.suppress(OSError, ValueError):
            if tail is not None:
                tail.close()
        with contextlib.suppress(OSError):
            if file is not None:
                os.close(file)

    # -- the thread ---------------------------------------------------------------------------------------------------
    def _work(self) -> None:
        try:
            self._open()
            while not self._turn():
                pass
        except OSError as error:
            self._fail(error.strerror or str(error))
        except Exception as error:  # a fault of ours: the app goes on
            self._fail(repr(error))

    def _turn(self) -> bool:
        """Sleep until there is something to do, and do it; True at the end."""
        self._wake.wait(self._wait_s())
        self._wake.clear()
        with self._lock:
            waiters, self._waiters = self._waiters, []
            closed = self._closed
        everything = bool(waiters) or closed
        for _ in self._halves:
            self._move(everything=everything)
        if self._unsynced_at is not None and (everything or self._due(self._unsynced_at)):
            self._sync()
        for waiter in waiters:
            waiter.set()
        if closed:
            self._end()
        return closed

    def _due(self, since: float) -> bool:
        return since + limits.NETLOG_MOVE_S <= self._clock.monotonic()

    def _wait_s(self) -> float | None:
        """Say how long the thread may sleep."""
        with self._lock:
            begun = [self._active.since] if self._active.records else []
        if self._unsynced_at is not None:
            begun.append(self._unsynced_at)
        return max(0.0, min(begun) + limits.NETLOG_MOVE_S - self._clock.monotonic()) if begun else None

    def _sync(self) -> None:
        self._unsynced_at = None
        try:
            if self._file is not None:
                os.fsync(self._file)
        except OSError as error:
            self._tell(error.strerror or str(error))

    def _open(self) -> None:
        zstandard.zstd()  # now, and not while the tail fills
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._started_ms = int(self._clock.wall() * 1000)
        self._instance = self._rng.token_bytes(netlog.INSTANCE_BYTES)
        tail = _Tail(self._path(TAIL), self._writer())
        with self._lock:
            pending, self._pending = self._pending, []
            began = netlog.Began(at_ms=self._started_ms, client=self._client, platform=sys.platform, pid=os.getpid())
            self._tail = tail
            for record in (netlog.encode(began), *pending):
                self._put(tail, record)
        self._take_over()
        self._prune()

    def _fail(self, reason: str) -> None:
        with self._lock:
            self.problem = reason
            self.lost += len(self._pending)
            self._pending.clear()
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.set()
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        if not self._told:
            self._told.add(reason)
            _log.warning("the network log in %s cannot be written: %s", self.folder, reason)

    def _writer(self) -> netlog.FileWriter:
        entropy = b"" if self._public is None else self._rng.token_bytes(netlog.ENTROPY_BYTES)
        return netlog.FileWriter(self._instance, self._started_ms, public=self._public, entropy=entropy)

    def _path(self, end: str) -> Path:
        return self.folder / f"{self._started_ms:013d}-{self._instance.hex()}{end}"

    # -- from the tail into files -------------------------------------------------------------------------------------
    def _move(self, *, everything: bool) -> None:
        """Compress one half, where one is full, or due, or everything is wanted."""
        with self._lock:
            tail, active = self._tail, self._active
            half = self._halves[self._halves[0] is active]
            if tail is None:
                return
            if not half.records:
                if not (active.records and (everything or self._due(active.since))):
                    return
                half, self._active = active, half
            records, number = half.records, half.number
        try:
            self._append(records, number)
        except OSError as error:
            self._tell(error.strerror or str(error))
            with self._lock:
                self.lost += len(records)
        tail.map[half.begin : half.end] = bytes(half.end - half.begin)
        with self._lock:
            half.end, half.records = half.begin, []

    def _append(self, records: list[bytes], number: int) -> None:
        if self._file is None:
            self._file, self._segment = self._new_file()
        block = self._segment.block(records, number)
        try:
            self._write(self._file, block)
        except OSError as error:
            if error.errno != errno.ENOSPC or not self._prune(room=len(block), least=1):
                raise
            self._write(self._file, block)
        self._file_bytes += len(block)
        if self._unsynced_at is None:
            self._unsynced_at = self._clock.monotonic()
        if self._file_bytes >= self._bytes_max // limits.NETLOG_FILES:
            self._sync()
            os.close(self._file)
            self._file = None
        self._prune()

    def _write(self, file: int, data: bytes) -> None:
        """Write all of `data` or nothing."""
        at = self._file_bytes
        try:
            while data:
                done = os.pwrite(file, data, at)
                data, at = data[done:], at + done
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, self._file_bytes)
            raise

    def _new_file(self) -> tuple[int, netlog.FileWriter]:
        writer = self._writer()
        self._file_count += 1
        file = os.open(self._path(f"-{self._file_count:06d}{netlog.SUFFIX}"), _FLAGS, 0o600)
        self._file_bytes = 0
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write(file, writer.header)
        except BaseException:
            os.close(file)
            raise
        self._file_bytes = len(writer.header)
        return file, writer

    def _end(self) -> None:
        with self._lock:
            tail, self._tail = self._tail, None
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if tail is not None:
            with contextlib.suppress(OSError):
                tail.path.unlink()
            tail.close()
        _LIVE.discard(self)

    # -- the folder ---------------------------------------------------------------------------------------------------
    def _take_over(self) -> None:
        """Make files of the tails that dead processes left, and remove what they had not finished."""
        own = self._path(TAIL)
        for path in self.folder.glob("*.new"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < self._clock.wall() - _STALE_S:
                    path.unlink()
        for path in self.folder.glob(f"*{TAIL}"):
            if path == own:
                continue
            try:
                with _locked(path) as file:
                    if file is not None:
                        _recover(path, file)
            except OSError as error:
                self._tell(f"{path.name}: {error.strerror or error}")

    def _prune(self, *, room: int = 0, least: int = 0) -> int:
        """Remove the oldest files until all are within the bound, and at least `least`; give how many went.

        What a live process writes is locked, and stays.
        """
        found = []
        for path in _files(self.folder):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime_ns, path, status.st_size))
        excess = sum(size for _, _, size in found) + room - self._bytes_max
        removed = 0
        for _, path, size in sorted(found):
            if excess <= 0 and removed >= least:
                break
            with contextlib.suppress(OSError), _locked(path) as file:
                if file is not None and path.suffix == netlog.SUFFIX and size:  # of no size: its maker will lock it now
                    path.unlink()
                    excess -= size
                    removed += 1
        return removed


def _allocate(file: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    os.pwrite(file, bytes(size), 0)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """Give the open file where its process is gone, None where it lives."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield None
        else:
            yield file
    finally:
        os.close(file)


def _recover(path: Path, file: int) -> None:
    """Turn a tail into a file of the ring; what is sealed is copied as it is."""
    data = os.pread(file, _TAIL_BYTES, 0)
    found = list(netlog.blocks(data, netlog.Reading()))
    if found:
        header = found[0].header
        clear = netlog.FileWriter(header.instance, header.started_ms)
        parts = [header.data]
        if header.sealed:
            parts += [block.data for block in found]
        else:
            parts += [clear.block(records, number) for number, records in _runs(found)]
        write_atomic(path.with_name(f"{path.stem}-tail{netlog.SUFFIX}"), b"".join(parts), mode=0o600)
    path.unlink()


def _runs(found: list[netlog.Block]) -> Iterator[tuple[int, list[bytes]]]:
    """Give the records of clear blocks, in runs without a gap that fit into one block."""
    opener = netlog.Opener()
    run: list[bytes] = []
    first = size = 0
    for block in sorted(found, key=lambda each: each.number):
        try:
            records = opener.raw(block) or []
        except ValueError:
            continue
        if run and (block.number != first + len(run) or size > limits.NETLOG_HALF_BYTES):
            yield first, run
            run, size = [], 0
        if not run:
            first = block.number
        run += records
        size += len(block.data)
    if run:
        yield first, run


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix in (netlog.SUFFIX, TAIL)]


def read_folder(folder: Path) -> list[bytes]:
    """Give the content of a folder's files, tails too, for `netlog.read`; at most `NETLOG_FILES_READ_MAX`, the newest.

    May be called while others write.

    Raises:
        OSError: there is no such folder, or it cannot be read.
    """
    found = []
    # Tails first: what moves meanwhile is read twice then, which does no harm, and never missed.
    for path in sorted(_files(folder), key=lambda each: (each.suffix == TAIL, each.name), reverse=True):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            found.append(file.read(limits.NETLOG_FILE_BYTES_MAX))
        if len(found) >= limits.NETLOG_FILES_READ_MAX:
            break
    return found


# -- one store for all who write to a folder --------------------------------------------------------------------------
_LIVE: Final[weakref.WeakSet[LogStore]] = weakref.WeakSet()
_shared: dict[tuple[Path, bytes | None], tuple[LogStore, int]] = {}
_sharing = threading.Lock()


def share(folder: Path, *, public: bytes | None, make: Callable[[], LogStore]) -> LogStore:
    """Give the store of a folder, the same to all of this process; `unshare` gives it back."""
    key = (Path(os.path.abspath(folder)), public)
    with _sharing:
        store, users = _shared.get(key) or (make(), 0)
        _shared[key] = (store, users + 1)
    return store


def unshare(store: LogStore) -> bool:
    """Give a store back; True where nobody else has it, so that it is to be closed now."""
    with _sharing:
        for key, (each, users) in _shared.items():
            if each is store:
                if users > 1:
                    _shared[key] = (store, users - 1)
                    return False
                del _shared[key]
                return True
    return False


def _forked() -> None:
    global _sharing
    _sharing = threading.Lock()
    for store in list(_LIVE):
        store.abandon_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
