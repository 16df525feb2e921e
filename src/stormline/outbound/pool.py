"""Connections kept and shared: bounded in number, fair in waiting, never left open by a cancelled request."""

import asyncio
import collections
from collections.abc import Callable, Coroutine
from typing import Final, NamedTuple, Protocol, TypeVar

from stormline.core import errors, limits
from stormline.core.clock import Clock
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.stream import Stream
from stormline.outbound.dial import quiet
from stormline.outbound.http1 import Http1Connection
from stormline.outbound.http1_codec import encode
from stormline.outbound.messages import HttpRequest, HttpResponse

_T = TypeVar("_T")
_SWEEP_STEP_S: Final = 0.5
"""Least pause between two looks for expired connections."""


class Connector(Protocol):
    """What the pool needs of a dialer; `outbound.dial.Dialer` is one."""

    async def dial(
        self,
        host: str,
        port: int,
        *,
        tls: bool,
        timeout_s: float,
        addresses: tuple[Address, ...] | None = None,
        server_name: str | None = None,
        on_stage: Callable[[str], None] = quiet,
        on_note: Callable[[str], None] = quiet,
    ) -> Stream:
        """Give a connected stream; see `Dialer.dial`."""
        ...


class _Origin(NamedTuple):
    scheme: str
    host: str
    port: int


class _Key(NamedTuple):
    """What two requests must have in common to share a connection."""

    origin: _Origin
    addresses: tuple[Address, ...] | None
    server_name: str | None


class _Idle(NamedTuple):
    connection: Http1Connection
    since: float


class _Slot:
    """The right to one connection. Held from the grant to `HttpPool._release`, which takes it once."""

    __slots__ = ("connection", "key", "released")

    def __init__(self, key: _Key, connection: Http1Connection | None) -> None:
        self.key = key
        self.connection = connection
        self.released = False


class _Waiter(NamedTuple):
    key: _Key
    grant: asyncio.Future[_Slot]


class _Progress:
    """How far one request is, for its deadline's error."""

    __slots__ = ("_host", "_on_stage", "connection", "phase")

    def __init__(self, host: str, on_stage: Callable[[str], None]) -> None:
        self._host = host
        self._on_stage = on_stage
        self.phase = Phase.QUEUED
        self.connection: Http1Connection | None = None

    def stage(self, stage: str) -> None:
        self.phase = Phase(stage)
        self._on_stage(stage)

    def too_late(self) -> errors.DeadlineExceeded:
        delivered = self.connection is not None and self.connection.maybe_delivered
        return errors.DeadlineExceeded(
            f"{self._host}: the deadline passed, while in {self.phase}", phase=self.phase, maybe_delivered=delivered
        )


class HttpPool:
    """Sends HTTP/1.1 requests over kept connections. Belongs to one event loop.

    Connections are shared by scheme, host, port, given addresses and server name. Their number is bounded over all and
    per origin; requests beyond wait first come, first served, except that nobody waits behind another origin's limit.
    An idle connection makes room where another is needed. The pool never sends a request twice.

    Args:
        dialer: makes connections.
        clock: says how long a connection has been idle.
        connections_max: over all origins, idle ones included.
        connections_per_origin_max: to one scheme, host and port.
        idle_s: seconds an unused connection is kept.
    """

    def __init__(
        self,
        dialer: Connector,
        clock: Clock,
        *,
        connections_max: int = limits.POOL_CONNECTIONS_MAX,
        connections_per_origin_max: int = limits.POOL_CONNECTIONS_PER_ORIGIN_MAX,
        idle_s: float = limits.POOL_IDLE_S,
    ) -> None:
        self._dialer = dialer
        self._clock = clock
        self._connections_max = connections_max
        self._per_origin_max = connections_per_origin_max
        self._idle_s = idle_s
        self._idle: dict[_Key, list[_Idle]] = {}  # each list oldest first
        self._slots: dict[_Slot, None] = {}  # granted and not released; in order, so that runs repeat
        self._count: collections.Counter[_Origin] = collections.Counter()  # slots and idle connections
        self._total = 0
        self._waiters: collections.deque[_Waiter] = collections.deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def request(
        self,
        request: HttpRequest,
        *,
        deadline_s: float,
        body_deadline_s: float | None = None,
        connect_timeout_s: float | None = None,
        read_timeout_s: float | None = None,
        fresh: bool = False,
        addresses: tuple[Address, ...] | None = None,
        server_name: str | None = None,
        on_stage: Callable[[str], None] = quiet,
        on_note: Callable[[str], None] = quiet,
    ) -> HttpResponse:
        """Send one request and give its answer when the head is there; see `HttpResponse` for the body.

        Cancelled or failed at any point, its slot is free and its connection closed before this raises.

        Args:
            request: what to send.
            deadline_s: seconds for everything from waiting in the queue to the head of the answer.
            body_deadline_s: seconds until the last byte of the body, default `deadline_s`.
            connect_timeout_s: seconds for making a connection, names, TCP and TLS together; None: until the deadline.
            read_timeout_s: longest silence; see `Http1Connection.exchange`.
            fresh: over a connection made for it; those that wait for the same place are closed, being as old.
            addresses: connect to these instead of resolving the host (IP direct).
            server_name: name for SNI and certificate instead of the host.
            on_stage: told the name of each stage of `telemetry.timeline.STAGES` as it begins.
            on_note: told decisions in words.

        Raises:
            QueueFull: `limits.POOL_WAITING_MAX` requests wait already.
            ResolveError, ConnectError, TlsError: no connection; see `Dialer.dial`.
            WriteError, ReadError, ProtocolViolation: see `Http1Connection.exchange`. `maybe_delivered` is exact also on
                a kept connection that the peer closed meanwhile.
            DeadlineExceeded: `phase` says in what.
            LocalProtocolError: the request cannot be sent as it is, or the pool is closed.
        """
        encoded = encode(request)
        key = _key_of(request, addresses, server_name)
        progress = _Progress(request.host, on_stage)
        now = asyncio.get_running_loop().time()
        deadline_at = now + deadline_s
        body_deadline_at = deadline_at if body_deadline_s is None else now + body_deadline_s
        if deadline_s <= 0.0:
            raise progress.too_late()
        if fresh and key in self._idle:
            self._close_idle(key, len(self._idle[key]))
        slot = self._grant(key)
        if slot is None:
            slot = await self._within(deadline_at, progress, self._wait_for_grant(key))
        try:
            if slot.connection is None:
                left_s = deadline_at - asyncio.get_running_loop().time()
                timeout_s = left_s if connect_timeout_s is None else min(left_s, connect_timeout_s)
                slot.connection = await self._connect(key, timeout_s, progress, on_note)
            progress.connection = slot.connection
            return await slot.connection.exchange(
                encoded,
                deadline_at=body_deadline_at,
                head_by=deadline_at,
                read_timeout_s=read_timeout_s,
                done=lambda reusable: self._release(slot, reusable=reusable),
                on_stage=progress.stage,
            )
        except BaseException:
            self._release(slot, reusable=False)
            raise

    async def _within(self, deadline_at: float, progress: _Progress, work: Coroutine[None, None, _T]) -> _T:
        try:
            async with asyncio.timeout_at(deadline_at) as timeout:
                return await work
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise progress.too_late() from error

    async def _connect(
        self, key: _Key, timeout_s: float, progress: _Progress, on_note: Callable[[str], None]
    ) -> Http1Connection:
        stream = await self._dialer.dial(
            key.origin.host,
            key.origin.port,
            tls=key.origin.scheme == "https",
            timeout_s=timeout_s,
            addresses=key.addresses,
            server_name=key.server_name,
            on_stage=progress.stage,
            on_note=on_note,
        )
        connection = Http1Connection(stream)
        if self._closed:
            connection.close()
            raise _pool_closed()
        return connection

    async def aclose(self) -> None:
        """Close every connection; see `close`."""
        self.close()

    def close(self) -> None:
        """Close every connection, also those in use: their requests fail, as do those that wait. Takes no more.

        A connection being made is closed as soon as it stands; its request fails then, at its deadline at the latest.
        Works also when the pool's event loop is closed already.
        """
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        waiters, self._waiters = self._waiters, collections.deque()
        for waiter in waiters:
            if not waiter.grant.done():
                waiter.grant.set_exception(_pool_closed())
        for key in list(self._idle):
            self._close_idle(key, len(self._idle[key]))
        for slot in list(self._slots):
            if slot.connection is not None:
                slot.connection.close()

    @property
    def open_connections(self) -> int:
        """Connections that are open or being made, idle ones included."""
        return self._total

    @property
    def idle_connections(self) -> int:
        """Connections that wait for a request."""
        return sum(len(entries) for entries in self._idle.values())

    # -- slots ----------------------------------------------------------------------------------------------------
    def _grant(self, key: _Key) -> _Slot | None:
        """Give a slot, with an idle connection in it where there is one; None where every one is taken."""
        if self._closed:
            raise _pool_closed()
        connection = self._take_idle(key)
        if connection is None:
            origin = key.origin
            if self._count[origin] >= self._per_origin_max and not self._evict(origin):
                return None
            if self._total >= self._connections_max and not self._evict(None):
                return None
            self._count[origin] += 1
            self._total += 1
        slot = _Slot(key, connection)
        self._slots[slot] = None
        return slot

    async def _wait_for_grant(self, key: _Key) -> _Slot:
        if len(self._waiters) >= limits.POOL_WAITING_MAX:
            raise errors.QueueFull(
                f"{key.origin.host}: {len(self._waiters)} requests wait for a connection already",
                phase=Phase.QUEUED,
                maybe_delivered=False,
            )
        waiter = _Waiter(key, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            return await waiter.grant
        except BaseException:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not waiter.grant.cancelled() and waiter.grant.exception() is None:
                self._release(waiter.grant.result(), reusable=True)  # granted and cancelled in the same moment
            raise

    def _release(self, slot: _Slot, *, reusable: bool) -> None:
        """Take a slot back, once; its connection is kept where it is reusable and closed else."""
        if slot.released:
            return
        slot.released = True
        self._slots.pop(slot, None)
        connection = slot.connection
        if reusable and connection is not None and not self._closed:
            self._idle.setdefault(slot.key, []).append(_Idle(connection, self._clock.monotonic()))
            self._plan_sweep(self._idle_s)
        else:
            self._drop(slot.key.origin, connection)
        self._serve_waiters()

    def _serve_waiters(self) -> None:
        """Give what one release made free to the first who can use it."""
        full: set[_Origin] = set()
        for index, waiter in enumerate(self._waiters):
            if waiter.grant.done() or waiter.key.origin in full:
                continue
            slot = self._grant(waiter.key)
            if slot is not None:
                del self._waiters[index]
                waiter.grant.set_result(slot)
                return
            full.add(waiter.key.origin)

    # -- idle connections -----------------------------------------------------------------------------------------
    def _take_idle(self, key: _Key) -> Http1Connection | None:
        """Give the idle connection used last, if it still lives; dead and expired ones are closed on the way."""
        entries = self._idle.get(key)
        now = self._clock.monotonic()
        while entries:
            connection, since = entries.pop()
            if not entries:
                del self._idle[key]
            if now - since < self._idle_s and not connection.stream.is_readable():
                return connection
            self._drop(key.origin, connection)
        return None

    def _evict(self, origin: _Origin | None) -> bool:
        """Close the connection that is idle for longest, of one origin or of all; False where none is idle."""
        keys = [key for key in self._idle if origin is None or key.origin == origin]
        if not keys:
            return False
        oldest = min(keys, key=lambda key: self._idle[key][0].since)
        self._close_idle(oldest, 1)
        return True

    def _close_idle(self, key: _Key, number: int) -> None:
        for entry in self._idle[key][:number]:
            self._drop(key.origin, entry.connection)
        del self._idle[key][:number]
        if not self._idle[key]:
            del self._idle[key]

    def _drop(self, origin: _Origin, connection: Http1Connection | None) -> None:
        if connection is not None:
            connection.close()
        self._total -= 1
        self._count[origin] -= 1
        if not self._count[origin]:
            del self._count[origin]

    def _plan_sweep(self, delay_s: float) -> None:
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(delay_s, self._close_expired)

    def _close_expired(self) -> None:
        self._sweep = None
        now = self._clock.monotonic()
        for key, entries in list(self._idle.items()):
            self._close_idle(key, sum(now - entry.since >= self._idle_s for entry in entries))
        if self._idle:
            oldest = min(entries[0].since for entries in self._idle.values())
            self._plan_sweep(max(_SWEEP_STEP_S, oldest + self._idle_s - now))


def _key_of(request: HttpRequest, addresses: tuple[Address, ...] | None, server_name: str | None) -> _Key:
    if request.scheme not in ("http", "https"):
        raise errors.LocalProtocolError(f"scheme {request.scheme[:20]!r} is neither http nor https")
    return _Key(_Origin(request.scheme, request.host.lower(), request.port), addresses, server_name)


def _pool_closed() -> errors.LocalProtocolError:
    return errors.LocalProtocolError("the HTTP pool is closed")
