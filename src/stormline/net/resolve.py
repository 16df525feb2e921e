"""Names to addresses by the system's resolver, on threads of our own.

`loop.getaddrinfo` uses the loop's shared executor: a resolver that hangs (half a minute is usual) takes all of its
threads, and the interpreter waits for them at exit. Here the threads are few, daemons, and end when idle.
"""

import asyncio
import collections
import contextlib
import errno
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

from stormline.core import limits
from stormline.core.values import Address

Lookup = Callable[[str], list[tuple[Any, ...]]]
"""What asks the system: a name in, `socket.getaddrinfo` rows out. It may block."""


def _ask_system(host: str) -> list[tuple[Any, ...]]:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)


class _Job:
    """One name being looked up, for all who wait for it."""

    __slots__ = ("answer", "host", "waiters")

    def __init__(self, host: str, answer: asyncio.Future[tuple[str, ...]]) -> None:
        self.host: Final = host
        self.answer: Final = answer
        self.waiters = 0


class Resolver:
    """Looks names up without blocking the loop. Belongs to the loop that uses it first.

    At most `threads_max` lookups run at once and `limits.RESOLVE_WAITING_MAX` wait. The same name asked again while
    its lookup runs joins that lookup, so one name that hangs holds one thread. A lookup nobody waits for any more is
    dropped if it has not begun; one that has cannot be stopped and ends by itself.

    Args:
        threads_max: lookups in the system resolver at once.
        lookup: asks the system; another one for tests.
    """

    def __init__(self, *, threads_max: int = limits.RESOLVE_THREADS_MAX, lookup: Lookup = _ask_system) -> None:
        self._lookup = lookup
        self._threads_max = threads_max
        self._lock = threading.Lock()  # guards the two below, which the threads use too
        self._threads = 0
        self._queue: collections.deque[_Job] = collections.deque()
        self._jobs: dict[str, _Job] = {}

    async def resolve(
        self, host: str, port: int, *, timeout_s: float = limits.RESOLVE_TIMEOUT_S
    ) -> tuple[Address, ...]:
        """Give the addresses of `host` with `port`, in the system's order, each once; an IP literal gives itself.

        Cancellation is safe at any moment.

        Raises:
            socket.gaierror: the name has no address, or the resolver failed.
            OSError: too many lookups wait already (BlockingIOError), or no thread could be started.
            TimeoutError: no answer within `timeout_s` seconds.
        """
        address = Address(host, port)
        if address.is_ip:
            return (address,)
        job = self._jobs.get(host)
        if job is None:
            job = self._begin(host)
        job.waiters += 1
        try:
            async with asyncio.timeout(timeout_s):
                found = await asyncio.shield(job.answer)
        finally:
            job.waiters -= 1
            if job.waiters == 0:
                self._drop_if_waiting(job)
        return tuple(Address(ip, port) for ip in found)

    def _begin(self, host: str) -> _Job:
        answer: asyncio.Future[tuple[str, ...]] = asyncio.get_running_loop().create_future()
        job = _Job(host, answer)
        with self._lock:
            if self._threads < self._threads_max:
                try:
                    threading.Thread(target=self._work, args=(job,), name="stormline-resolve", daemon=True).start()
                except RuntimeError as error:
                    raise OSError(f"no thread to look up a name: {error}") from error
                self._threads += 1
            elif len(self._queue) < limits.RESOLVE_WAITING_MAX:
                self._queue.append(job)
            else:
                raise BlockingIOError(errno.EAGAIN, "too many names are being looked up")
        self._jobs[host] = job
        answer.add_done_callback(lambda _: self._forget(job))
        return job

    def _forget(self, job: _Job) -> None:
        if self._jobs.get(job.host) is job:
            del self._jobs[job.host]
        if job.answer.done() and not job.answer.cancelled():
            job.answer.exception()  # nobody may be waiting any more; then its failure interests nobody

    def _drop_if_waiting(self, job: _Job) -> None:
        with self._lock:
            try:
                self._queue.remove(job)
            except ValueError:
                return
        self._forget(job)
        job.answer.cancel()

    def _work(self, job: _Job) -> None:
        """Run on a thread: this job, then waiting ones, then end."""
        while True:
            failure: OSError | None = None
            found: tuple[str, ...] = ()
            try:
                found = tuple(dict.fromkeys(row[4][0] for row in self._lookup(job.host)))
                if not found:
                    failure = socket.gaierror(socket.EAI_NONAME, "the name has no address")
            except OSError as error:
                failure = error
            except (UnicodeError, ValueError):
                failure = socket.gaierror(socket.EAI_NONAME, "not a host name")
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                job.answer.get_loop().call_soon_threadsafe(_settle, job.answer, found, failure)
            with self._lock:
                if not self._queue:
                    self._threads -= 1
                    return
                job = self._queue.popleft()


def _settle(answer: asyncio.Future[tuple[str, ...]], found: tuple[str, ...], failure: OSError | None) -> None:
    if answer.done():
        return
    if failure is not None:
        answer.set_exception(failure)
    else:
        answer.set_result(found)
