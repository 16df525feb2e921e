"""Names to addresses by the system's resolver, on threads of our own, with a memory.

`loop.getaddrinfo` uses the loop's shared executor: a resolver that hangs (half a minute is usual) takes all of its
threads, and the interpreter waits for them at exit. Here the threads are few, daemons, and end when idle.

A lookup in a blackout takes the system 5 to 10 s and then fails, although the addresses of a service hardly ever
change. So `Resolver` gives what it knows and asks again behind it (the idea of RFC 8767): DNS is waited for only where
nothing is known, or where what is known is old or has just failed.
"""

import asyncio
import collections
import contextlib
import copy
import errno
import math
import socket
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from stormline.core import limits, limits_names
from stormline.core.values import Address

Lookup = Callable[[str], list[tuple[Any, ...]]]
"""What asks the system: a name in, `socket.getaddrinfo` rows out. It may block."""


SYSTEM: Final = "the system"
"""`Found.source` of the system's resolver."""


class Found(NamedTuple):
    """An answer.

    Attributes:
        addresses: at least one IP literal, each once, the best first.
        ttl_s: how long it may be given without asking again, seconds; None where the source does not say.
        source: who gave it, for people.
    """

    addresses: tuple[str, ...]
    ttl_s: float | None = None
    source: str = SYSTEM


class NoName(socket.gaierror):
    """The name does not exist, or has no address.

    Attributes:
        ttl_s: how long that may be believed, seconds; 0 where nobody says.
    """

    ttl_s: float = 0.0  # set by `no_name`: an exception is copied by its arguments, which are the C library's


def no_name(reason: str, ttl_s: float = 0.0) -> NoName:
    """Make a `NoName`."""
    error = NoName(socket.EAI_NONAME, reason)
    error.ttl_s = ttl_s
    return error


class NameSource(Protocol):
    """What answers the questions of a `Resolver`."""

    def ask(self, host: str, *, refresh: bool) -> asyncio.Future[Found]:
        """Begin to look a name up: the future gives an answer or an OSError.

        Args:
            host: the name.
            refresh: there is an answer already; only ask where that keeps nobody waiting who has none.

        Raises:
            OSError: it cannot be asked now.
        """
        ...

    def withdraw(self, host: str) -> None:
        """Take note that nobody waits for `host` any more: cancel its future, unless the answer will come anyway."""
        ...


def _ask_system(host: str) -> list[tuple[Any, ...]]:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)


class _Job:
    """One name being looked up on a thread, or waiting for one."""

    __slots__ = ("answer", "asked", "host", "refresh", "running")

    def __init__(self, host: str, answer: asyncio.Future[Found], *, refresh: bool) -> None:
        self.host: Final = host
        self.answer: Final = answer
        self.refresh: Final = refresh
        self.asked = self.running = 0  # lookups begun, and not ended


class SystemNames:
    """`NameSource` that asks the system without blocking the loop. Belongs to the loop that uses it first.

    At most `threads_max` lookups run at once, at most half of them refresh, and `limits.RESOLVE_WAITING_MAX` wait. The
    same name asked again while its lookup runs joins that lookup. One that takes longer than `limits.RESOLVE_REPEAT_S`
    is repeated beside the first where a thread is free, because the system waits 5 s for an answer that was lost; the
    first answer counts. So one name that hangs holds `limits.RESOLVE_LOOKUPS_MAX` threads at most. A lookup withdrawn
    is dropped if it has not begun; one that has cannot be stopped and ends by itself.

    Args:
        threads_max: lookups in the system resolver at once.
        lookup: asks the system; another one for tests.
    """

    def __init__(self, *, threads_max: int = limits.RESOLVE_THREADS_MAX, lookup: Lookup = _ask_system) -> None:
        self._lookup = lookup
        self._threads_max = threads_max
        self._lock = threading.Lock()  # guards the three below, which the threads use too
        self._threads = 0
        self._refreshing = 0
        self._queue: collections.deque[_Job] = collections.deque()
        self._jobs: dict[str, _Job] = {}  # waiting or running

    def ask(self, host: str, *, refresh: bool = False) -> asyncio.Future[Found]:
        """See `NameSource.ask`; nothing waits where `refresh`.

        Raises:
            OSError: too many lookups run or wait (BlockingIOError), or no thread could be started.
        """
        job = self._jobs.get(host)
        if job is not None:
            return job.answer
        job = _Job(host, asyncio.get_running_loop().create_future(), refresh=refresh)
        with self._lock:
            busy = self._threads >= self._threads_max
            if refresh and (busy or self._refreshing >= max(1, self._threads_max // 2)):
                raise BlockingIOError(errno.EAGAIN, "no thread is free to ask a known name again")
            if not busy:
                self._start(job)
                self._refreshing += refresh
            elif len(self._queue) < limits.RESOLVE_WAITING_MAX:
                self._queue.append(job)
            else:
                raise BlockingIOError(errno.EAGAIN, "too many names are being looked up")
        self._jobs[host] = job
        if not refresh:
            asyncio.get_running_loop().call_later(limits.RESOLVE_REPEAT_S, self._repeat, job)
        return job.answer

    def _start(self, job: _Job) -> None:
        """Begin a lookup on a thread; the lock is held, and a thread free.

        Raises:
            OSError: there is none.
        """
        try:
            threading.Thread(target=self._work, args=(job,), name="stormline-resolve", daemon=True).start()
        except RuntimeError as error:
            raise OSError(f"no thread to look up a name: {error}") from error
        self._threads += 1
        job.asked += 1
        job.running += 1

    def _repeat(self, job: _Job) -> None:
        """Look a name up once more beside a lookup that takes long."""
        if job.answer.done() or job.asked >= limits.RESOLVE_LOOKUPS_MAX:
            return
        with self._lock, contextlib.suppress(OSError):
            if job.asked and self._threads < self._threads_max:
                self._start(job)
        job.answer.get_loop().call_later(limits.RESOLVE_REPEAT_S, self._repeat, job)

    def withdraw(self, host: str) -> None:
        """See `NameSource.withdraw`."""
        job = self._jobs.get(host)
        if job is None:
            return
        with self._lock:
            try:
                self._queue.remove(job)
            except ValueError:
                return
        del self._jobs[host]
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
            with self._lock:
                self._refreshing -= job.refresh
                following = self._queue.popleft() if self._queue else None
                if following is None:
                    self._threads -= 1
                else:
                    following.asked += 1
                    following.running += 1
                job.running -= 1
                alone = not job.running
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                job.answer.get_loop().call_soon_threadsafe(self._settle, job, found, failure, alone)
            if following is None:
                return
            job = following

    def _settle(self, job: _Job, found: tuple[str, ...], failure: OSError | None, alone: bool) -> None:
        if failure is not None and not (alone or says_absent(failure)):
            return  # the other lookup may do better
        if self._jobs.get(job.host) is job:
            del self._jobs[job.host]
        if job.answer.done():
            return
        if failure is not None:
            job.answer.set_exception(failure)
        else:
            job.answer.set_result(Found(found))


class _Known:
    """What is remembered of a name."""

    __slots__ = ("addresses", "answered_at", "doubted", "failed_at", "failure", "fresh_s", "source")

    def __init__(self) -> None:
        self.addresses: tuple[str, ...] = ()
        self.source = ""
        self.answered_at = -math.inf
        self.fresh_s = limits.RESOLVE_FRESH_S
        self.doubted = False
        self.failure: OSError | None = None  # of the latest question; None where that was answered
        self.failed_at = -math.inf

    @property
    def failed_s(self) -> float:
        """How long the failure stands: of "there is no such name" as long as its zone says, within bounds."""
        ttl_s = min(getattr(self.failure, "ttl_s", 0.0), limits_names.NAMES_ABSENT_S_MAX)
        return max(limits.RESOLVE_FAILED_S, ttl_s)

    def take(self, found: Found, answered_at: float) -> None:
        """Remember an answer."""
        ttl_s = limits.RESOLVE_FRESH_S if found.ttl_s is None else max(found.ttl_s, limits_names.NAMES_TTL_S_MIN)
        self.addresses = found.addresses
        self.source = found.source
        self.fresh_s = min(ttl_s, limits_names.NAMES_TTL_S_MAX)
        self.answered_at = answered_at
        self.doubted = False
        self.failure = None


class Remembered(NamedTuple):
    """What a `Resolver` holds of a name.

    Attributes:
        host: the name, in lower case.
        found: its last answer.
        age_s: how old that is, seconds.
    """

    host: str
    found: Found
    age_s: float


class _Query:
    """A question under way, for all who wait for it."""

    __slots__ = ("answer", "asked_at", "host", "known", "waiters")

    def __init__(self, host: str, answer: asyncio.Future[Found], known: _Known, asked_at: float) -> None:
        self.host: Final = host
        self.answer: Final = answer
        self.known: Final = known
        self.asked_at: Final = asked_at
        self.waiters = 0


class Resolver:
    """Gives the addresses of names and remembers them. Never blocks the loop; belongs to the loop that uses it first.

    - An answer younger than its TTL, `limits_names.NAMES_TTL_S_MIN` at least and `NAMES_TTL_S_MAX` at most, is given
      without asking anybody; one without a TTL for `limits.RESOLVE_FRESH_S`.
    - An older one, up to `RESOLVE_STALE_S`, is given at once too, while one question behind it brings a newer.
    - Where it is older than `RESOLVE_OLD_S`, or doubted, that question has `RESOLVE_PATIENCE_S` from its start to be
      answered first; unless somebody is sure of the answer.
    - A failure takes no answer away, unless it says that the name does not exist.
    - For `RESOLVE_FAILED_S` after a failure a name is not asked for again: its answer or the failure is given at once.
      "There is no such name" stands as long as it says, at most `limits_names.NAMES_ABSENT_S_MAX`.
    - Whoever asks for a name joins the question that is under way.

    Args:
        names: who is asked; the system where None.
        sure: says of a name whether its addresses have been proven by other means than DNS, so that nobody needs to
            wait for a newer answer.
        on_change: told of each name, in lower case, of which something was learned.
    """

    def __init__(
        self,
        names: NameSource | None = None,
        *,
        sure: Callable[[str], bool] = lambda host: False,
        on_change: Callable[[str], None] = lambda host: None,
    ) -> None:
        self._names: NameSource = names if names is not None else SystemNames()
        self._sure = sure
        self._on_change = on_change
        self._known: collections.OrderedDict[str, _Known] = collections.OrderedDict()
        self._queries: dict[str, _Query] = {}
        self._closed = False

    async def resolve(
        self, host: str, port: int, *, timeout_s: float = limits.RESOLVE_TIMEOUT_S
    ) -> tuple[Address, ...]:
        """Give the addresses of `host` with `port`, in the source's order, each once; an IP literal gives itself.

        Cancellation is safe at any moment.

        Raises:
            socket.gaierror: the name has no address, or the resolver failed, and nothing usable is remembered.
            OSError: the same for too many lookups (BlockingIOError), no thread, or a resolver that was closed.
            TimeoutError: nothing is remembered and no answer came within `timeout_s` seconds.
        """
        address = Address(host, port)
        if address.is_ip:
            return (address,)
        if self._closed:
            raise _closed()
        key = host.lower()
        now = asyncio.get_running_loop().time()
        known = self._find(key)
        if now - known.answered_at < limits.RESOLVE_STALE_S:
            await self._renew(key, host, known, now, timeout_s)
        else:
            await self._learn(key, host, known, now, timeout_s)
        if not known.addresses and known.failure is not None:
            raise copy.copy(known.failure)  # without the traceback of whoever got it before
        return tuple(Address(ip, port) for ip in known.addresses)

    def doubt(self, host: str) -> None:
        """Take note that no address of the last answer worked: the next `resolve` asks again and waits a little.

        An answer that is just in (`limits.RESOLVE_FAILED_S`) is not doubted: asking again would bring the same.
        """
        known = self._find(host.lower())
        if asyncio.get_running_loop().time() - known.answered_at >= limits.RESOLVE_FAILED_S:
            known.doubted = bool(known.addresses)

    def doubt_all(self) -> None:
        """Take note that every answer may be wrong now: the device is on another network."""
        for known in self._known.values():
            known.doubted = bool(known.addresses)
            known.failed_at = -math.inf

    def learn(self, host: str, found: Found, *, age_s: float = 0.0) -> None:
        """Remember an answer that came by another way than a question of this resolver.

        Args:
            host: the name.
            found: its answer.
            age_s: how old it is, seconds.
        """
        if self._closed:
            return
        key = host.lower()
        known = self._find(key)
        known.take(found, asyncio.get_running_loop().time() - age_s)
        self._keep(key, known)

    def forget(self, host: str) -> None:
        """Forget the answer to a name; a question under way goes on."""
        key = host.lower()
        query = self._queries.get(key)
        known = query.known if query is not None else self._known.get(key)
        if known is not None:
            known.addresses = ()
            known.answered_at = -math.inf

    def remembered(self, host: str) -> Remembered | None:
        """Give the last answer to a name, however old; None where there is none."""
        key = host.lower()
        query = self._queries.get(key)
        known = query.known if query is not None else self._known.get(key)
        if known is None or not known.addresses:
            return None
        return self._told(key, known)

    def memory(self) -> list[Remembered]:
        """Give all answers, the one used last at the end."""
        return [self._told(key, known) for key, known in self._known.items() if known.addresses]

    def close(self) -> None:
        """Forget everything and end what waits; `resolve` fails from now on. May be called again.

        A lookup that hangs in the system cannot be ended: its thread ends with it, or with the process.
        """
        self._closed = True
        queries, self._queries = self._queries, {}
        for query in queries.values():
            self._names.withdraw(query.host)
            query.answer.cancel()
        self._known.clear()

    def _find(self, key: str) -> _Known:
        """Give what is known of a name, and what the question under way will change."""
        query = self._queries.get(key)
        if query is not None:
            return query.known
        known = self._known.get(key)
        if known is None:
            return _Known()
        self._known.move_to_end(key)
        return known

    @staticmethod
    def _told(key: str, known: _Known) -> Remembered:
        # The TTL as it is applied, so that learning it again elsewhere means the same.
        found = Found(known.addresses, known.fresh_s, known.source)
        return Remembered(key, found, asyncio.get_running_loop().time() - known.answered_at)

    def _keep(self, key: str, known: _Known) -> None:
        self._known[key] = known
        self._known.move_to_end(key)
        if len(self._known) > limits.RESOLVE_NAMES_REMEMBERED:
            self._known.popitem(last=False)
        self._on_change(key)

    async def _renew(self, key: str, host: str, known: _Known, now: float, timeout_s: float) -> None:
        """Have a known name asked again where it is time to, and wait for the answer where that may be worth it."""
        age_s = now - known.answered_at
        pressing = known.doubted or age_s >= limits.RESOLVE_OLD_S
        if age_s < known.fresh_s and not pressing:
            return
        query = self._queries.get(key)
        if query is None:
            if now - known.failed_at < known.failed_s:
                return
            try:
                query = self._ask(key, host, known, now, refresh=True)
            except OSError:  # no room: another time
                return
        if pressing and not self._sure(key):
            await self._wait(key, query, min(timeout_s, query.asked_at + limits.RESOLVE_PATIENCE_S - now))

    async def _learn(self, key: str, host: str, known: _Known, now: float, timeout_s: float) -> None:
        """Wait for a name of which nothing usable is known; the answer or the failure is in `known` then."""
        known.addresses = ()
        query = self._queries.get(key)
        if query is None:
            if now - known.failed_at < known.failed_s:
                return
            query = self._ask(key, host, known, now, refresh=False)
        await self._wait(key, query, timeout_s)
        if self._closed:
            raise _closed()
        if not query.answer.done() or query.answer.cancelled():  # cancelled: withdrawn just now
            raise TimeoutError(errno.ETIMEDOUT, f"no answer of the resolver within {timeout_s:.3g} s")
        error = query.answer.exception()
        if error is not None and not isinstance(error, OSError):
            raise error  # a fault of the source, which is not remembered

    def _ask(self, key: str, host: str, known: _Known, now: float, *, refresh: bool) -> _Query:
        query = _Query(host, self._names.ask(host, refresh=refresh), known, now)
        self._queries[key] = query
        query.answer.add_done_callback(lambda _: self._take(key, query))
        return query

    async def _wait(self, key: str, query: _Query, timeout_s: float) -> None:
        """Wait until `query` is answered, at most `timeout_s`; what it brought is remembered then."""
        query.waiters += 1
        try:
            if timeout_s > 0:
                await asyncio.wait((query.answer,), timeout=timeout_s)
        finally:
            query.waiters -= 1
            if not query.waiters and not query.known.addresses and not query.answer.done():
                self._names.withdraw(query.host)
            if query.answer.done():  # and not yet told to the callback
                self._take(key, query)

    def _take(self, key: str, query: _Query) -> None:
        """Remember what a question brought."""
        answer, known = query.answer, query.known
        error = None if answer.cancelled() else answer.exception()  # else asyncio would report that nobody looked
        if self._queries.get(key) is not query:
            return
        del self._queries[key]
        if answer.cancelled():
            return
        now = answer.get_loop().time()
        if error is None:
            known.take(answer.result(), now)
        elif isinstance(error, OSError):
            known.failure = copy.copy(error)
            known.failed_at = now
            if says_absent(error) and now - known.answered_at >= min(known.fresh_s, limits.RESOLVE_FRESH_S):
                known.addresses = ()
                known.answered_at = -math.inf
        else:
            return
        self._keep(key, known)


def says_absent(error: OSError) -> bool:
    """Tell "there is no such name" (NXDOMAIN) from "I could not find out"."""
    return isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME


def _closed() -> OSError:
    return ConnectionAbortedError(errno.ECONNABORTED, "the resolver was closed here")
