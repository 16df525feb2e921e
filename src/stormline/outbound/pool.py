"""Connections kept and shared: bounded in number, fair in waiting, never left open by a cancelled request."""

import asyncio
import collections
import contextlib
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

from stormline.core import errors, limits
from stormline.core.clock import Clock
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.stream import Stream
from stormline.outbound.dial import quiet
from stormline.outbound.http1 import Http1Connection
from stormline.outbound.http1_codec import encode
from stormline.outbound.messages import HttpRequest, HttpResponse

if TYPE_CHECKING:
    from stormline.outbound.http2 import Http2Connection

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


class _Times(NamedTuple):
    """Bounds of one request: `head_by` and `body_by` in the loop's time; see `HttpPool.request`."""

    head_by: float
    body_by: float
    read_timeout_s: float | None
    connect_timeout_s: float | None


class _Slot:
    """The right to one connection. Held from the grant to `HttpPool._release`, which takes it once."""

    __slots__ = ("connection", "key", "released", "shared")

    def __init__(self, key: _Key, connection: Http1Connection | None) -> None:
        self.key = key
        self.connection = connection
        self.shared: Http2Connection | None = None  # instead of the other
        self.released = False


class _Waiter(NamedTuple):
    key: _Key
    grant: asyncio.Future[_Slot | None]
    """A slot; None where an HTTP/2 connection has come that the request can share."""


class _Progress:
    """How far one request is, for its deadline's error."""

    __slots__ = ("_host", "_on_stage", "connection", "phase")

    def __init__(self, host: str, on_stage: Callable[[str], None]) -> None:
        self._host = host
        self._on_stage = on_stage
        self.phase = Phase.QUEUED
        self.connection: Http1Connection | None = None  # over HTTP/2 the exchange itself knows

    def stage(self, stage: str) -> None:
        self.phase = Phase(stage)
        self._on_stage(stage)

    def too_late(self) -> errors.DeadlineExceeded:
        delivered = self.connection is not None and self.connection.maybe_delivered
        return errors.DeadlineExceeded(
            f"{self._host}: the deadline passed, while in {self.phase}", phase=self.phase, maybe_delivered=delivered
        )


class HttpPool:
    """Sends requests over kept connections, HTTP/1.1 or HTTP/2 as TLS agreed. Belongs to one event loop.

    Connections are shared by scheme, host, port, given addresses and server name. Their number is bounded over all and
    per origin; requests beyond wait first come, first served, except that nobody waits behind another origin's limit.
    An idle connection makes room where another is needed. The pool never sends a request twice.

    A connection that speaks HTTP/2 takes all requests of its place side by side. While the first connection to a place
    is being made, further requests wait a moment to see whether they can share it.

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
        self._shared: dict[_Key, list[_Slot]] = {}  # slots of HTTP/2 connections, which take many requests
        self._dialling: dict[_Key, asyncio.Future[None]] = {}  # first connections to places not known to speak HTTP/1
        self._speaks_h1: collections.OrderedDict[_Key, None] = collections.OrderedDict()
        self._checks: dict[_Slot, asyncio.Task[None]] = {}
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
        key = _key_of(request, addresses, server_name)
        progress = _Progress(request.host, on_stage)
        now = asyncio.get_running_loop().time()
        times = _Times(
            head_by=now + deadline_s,
            body_by=now + (deadline_s if body_deadline_s is None else body_deadline_s),
            read_timeout_s=read_timeout_s,
            connect_timeout_s=connect_timeout_s,
        )
        if deadline_s <= 0.0:
            raise progress.too_late()
        if fresh:
            self._leave_old(key)
        shared = self._take_shared(key)
        if shared is not None:
            return await self._exchange_shared(shared, request, times, progress)
        return await self._exchange(key, request, times, progress, on_note)

    async def _exchange(
        self, key: _Key, request: HttpRequest, times: _Times, progress: _Progress, on_note: Callable[[str], None]
    ) -> HttpResponse:
        """Send a request over a slot of its own, or over what turns out to be shared."""
        encoded = encode(request)  # now, so that what cannot be sent fails before anything is done for it
        slot = self._grant(key) if key not in self._dialling else None
        if slot is None:
            slot = await self._within(times.head_by, progress, self._wait_for_place(key))
        try:
            connection = slot.connection
            if connection is None and slot.shared is None:
                connection = slot.connection = await self._connect(slot, times, progress, on_note)
            if connection is None:
                return await self._exchange_shared(slot, request, times, progress)
            progress.connection = connection
            return await connection.exchange(
                encoded,
                deadline_at=times.body_by,
                head_by=times.head_by,
                read_timeout_s=times.read_timeout_s,
                done=lambda reusable: self._release(slot, reusable=reusable),
                on_stage=progress.stage,
            )
        except BaseException:
            if slot.shared is None:
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
        self, slot: _Slot, times: _Times, progress: _Progress, on_note: Callable[[str], None]
    ) -> Http1Connection | None:
        """Make the connection of a slot; None where it speaks HTTP/2: all requests of its place share it."""
        key = slot.key
        left_s = times.head_by - asyncio.get_running_loop().time()
        timeout_s = left_s if times.connect_timeout_s is None else min(left_s, times.connect_timeout_s)
        first: asyncio.Future[None] | None = None
        if key.origin.scheme == "https" and key not in self._speaks_h1 and key not in self._dialling:
            first = self._dialling[key] = asyncio.get_running_loop().create_future()
        try:
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
            if self._closed:
                stream.close()
                raise _pool_closed()
            if stream.alpn != "h2":
                if key.origin.scheme == "https":
                    self._remember_h1(key)
                return Http1Connection(stream)
            from stormline.outbound import http2  # 50 ms of importing, which a client that meets none need not pay

            slot.shared = http2.Http2Connection(stream)
            self._shared.setdefault(key, []).append(slot)
            self._call_waiters_to(key)
            return None
        finally:
            if first is not None:
                del self._dialling[key]
                first.set_result(None)

    def _remember_h1(self, key: _Key) -> None:
        self._speaks_h1[key] = None
        self._speaks_h1.move_to_end(key)
        if len(self._speaks_h1) > limits.POOL_PLACES_REMEMBERED:
            self._speaks_h1.popitem(last=False)

    # -- HTTP/2 connections, shared -------------------------------------------------------------------------------
    def _take_shared(self, key: _Key) -> _Slot | None:
        """Give the slot of an HTTP/2 connection that takes another request; those that are over are let go."""
        slots = self._shared.get(key)
        if slots is None:
            return None
        for slot in list(slots):
            if slot.shared is None or slot.shared.closed:
                self._let_shared_go(slot)
            elif not slot.shared.retired:
                return slot
        return None

    async def _exchange_shared(
        self, slot: _Slot, request: HttpRequest, times: _Times, progress: _Progress
    ) -> HttpResponse:
        from stormline.outbound import http2_codec

        if slot.shared is None:
            raise errors.LocalProtocolError("the connection is not shared")
        began = asyncio.get_running_loop().time()
        try:
            return await slot.shared.exchange(
                http2_codec.encode(request),
                deadline_at=times.body_by,
                head_by=times.head_by,
                read_timeout_s=times.read_timeout_s,
                done=lambda _: self._shared_rests(slot),
                on_stage=progress.stage,
            )
        except (errors.DeadlineExceeded, asyncio.CancelledError):
            if asyncio.get_running_loop().time() - began >= limits.H2_DOUBT_S:
                self._doubt(slot)
            raise

    def _doubt(self, slot: _Slot) -> None:
        """A request waited long in vain: see whether the connection lives, before more are put on it for ever."""
        if slot not in self._checks and not self._closed:
            self._checks[slot] = asyncio.create_task(self._check(slot), name="check a silent connection")

    async def _check(self, slot: _Slot) -> None:
        try:
            if slot.shared is not None and not await slot.shared.check(limits.H2_CHECK_S):
                self._let_shared_go(slot)
        finally:
            self._checks.pop(slot, None)

    def _shared_rests(self, slot: _Slot) -> None:
        """An exchange is over: the connection may be too, or may rest from now on."""
        connection = slot.shared
        if connection is not None:
            if connection.closed or (connection.retired and not connection.open_streams):
                self._let_shared_go(slot)
            elif not connection.open_streams:
                self._plan_sweep(self._idle_s)

    def _let_shared_go(self, slot: _Slot) -> None:
        slots = self._shared.get(slot.key)
        if slots is not None and slot in slots:
            slots.remove(slot)
            if not slots:
                del self._shared[slot.key]
        self._release(slot, reusable=False)

    def _leave_old(self, key: _Key) -> None:
        """Use nothing any more that stands: idle connections are closed, shared ones end with their last request."""
        if key in self._idle:
            self._close_idle(key, len(self._idle[key]))
        for slot in list(self._shared.get(key, ())):
            if slot.shared is not None:
                slot.shared.retire()
                self._shared_rests(slot)

    def _call_waiters_to(self, key: _Key) -> None:
        """Tell those who wait for the place that they can share a connection now."""
        for waiter in [waiter for waiter in self._waiters if waiter.key == key]:
            self._waiters.remove(waiter)
            if not waiter.grant.done():
                waiter.grant.set_result(None)

    async def _wait_for_place(self, key: _Key) -> _Slot:
        """Give a slot of its own, or that of a connection to share."""
        dialling = self._dialling.get(key)
        if dialling is not None:
            await asyncio.wait([dialling], timeout=limits.POOL_JOIN_WAIT_S)
        while True:
            shared = self._take_shared(key)
            slot = shared if shared is not None else self._grant(key) or await self._wait_for_grant(key)
            if slot is not None:
                return slot

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
        for check in list(self._checks.values()):
            with contextlib.suppress(RuntimeError):  # its loop is closed already
                check.cancel()
        waiters, self._waiters = self._waiters, collections.deque()
        for waiter in waiters:
            if not waiter.grant.done():
                waiter.grant.set_exception(_pool_closed())
        for key in list(self._idle):
            self._close_idle(key, len(self._idle[key]))
        for slot in list(self._slots):
            for connection in (slot.connection, slot.shared):
                if connection is not None:
                    connection.close()

    @property
    def open_connections(self) -> int:
        """Connections that are open or being made, idle ones included."""
        return self._total

    @property
    def idle_connections(self) -> int:
        """Connections that wait for a request."""
        shared = [slot.shared for slots in self._shared.values() for slot in slots]
        resting = sum(each is not None and each.idle_since is not None for each in shared)
        return resting + sum(len(entries) for entries in self._idle.values())

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

    async def _wait_for_grant(self, key: _Key) -> _Slot | None:
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
                slot = waiter.grant.result()
                if slot is not None:
                    self._release(slot, reusable=True)  # granted and cancelled in the same moment
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
            if slot.shared is not None:
                slot.shared.close()
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
            return self._evict_shared(origin)
        oldest = min(keys, key=lambda key: self._idle[key][0].since)
        self._close_idle(oldest, 1)
        return True

    def _evict_shared(self, origin: _Origin | None) -> bool:
        resting = [
            (slot.shared.idle_since, slot)
            for slots in self._shared.values()
            for slot in slots
            if slot.shared is not None
            and slot.shared.idle_since is not None
            and (origin is None or slot.key.origin == origin)
        ]
        if not resting:
            return False
        self._let_shared_go(min(resting, key=lambda entry: entry[0])[1])
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
        soonest = [entries[0].since + self._idle_s - now for entries in self._idle.values()]
        loop_now = asyncio.get_running_loop().time()
        for slot in [slot for slots in self._shared.values() for slot in slots]:
            connection = slot.shared
            if connection is not None and connection.idle_since is not None:
                left_s = connection.idle_since + self._idle_s - loop_now
                if left_s <= 0 or connection.closed:
                    self._let_shared_go(slot)
                else:
                    soonest.append(left_s)
        if soonest:
            self._plan_sweep(max(_SWEEP_STEP_S, min(soonest)))


def _key_of(request: HttpRequest, addresses: tuple[Address, ...] | None, server_name: str | None) -> _Key:
    if request.scheme not in ("http", "https"):
        raise errors.LocalProtocolError(f"scheme {request.scheme[:20]!r} is neither http nor https")
    return _Key(_Origin(request.scheme, request.host.lower(), request.port), addresses, server_name)


def _pool_closed() -> errors.LocalProtocolError:
    return errors.LocalProtocolError("the HTTP pool is closed")
