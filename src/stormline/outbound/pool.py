"""Connections kept and shared: bounded in number, fair in waiting, never left open by a cancelled request."""

import asyncio
import collections
import contextlib
from collections.abc import Callable, Collection
from typing import Final, NamedTuple, Protocol

from stormline.core import errors, limits
from stormline.core.clock import Clock
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.stream import Stream
from stormline.outbound.dial import quiet
from stormline.outbound.held import Held, Key, Opening, Origin, Progress
from stormline.outbound.http1 import Http1Connection
from stormline.outbound.http1_codec import Encoded, encode
from stormline.outbound.messages import HttpRequest, HttpResponse

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
        left: Collection[Address] = (),
        on_stage: Callable[[str], None] = quiet,
        on_note: Callable[[str], None] = quiet,
    ) -> Stream:
        """Give a connected stream; see `Dialer.dial`."""
        ...


class _Idle(NamedTuple):
    connection: Http1Connection
    since: float


class _Times(NamedTuple):
    """Bounds of one request: `head_by` and `body_by` in the loop's time; see `HttpPool.request`."""

    head_by: float
    body_by: float
    read_timeout_s: float | None
    connect_timeout_s: float | None


class _Waiter(NamedTuple):
    key: Key
    left: Collection[Address]
    grant: asyncio.Future[Held | None]
    """A slot; None where an HTTP/2 connection has come that the request may be able to share."""


class HttpPool:
    """Sends requests over kept connections, HTTP/1.1 or HTTP/2 as TLS agreed. Belongs to one event loop.

    Connections are shared by scheme, host, port, given addresses and server name. Their number is bounded over all and
    per origin; requests beyond wait first come, first served, except that nobody waits behind another origin's limit.
    An idle connection makes room where another is needed. The pool never sends a request twice.

    A connection that speaks HTTP/2 takes all requests of its place side by side, and it alone, unless it is doubted
    (`Held.doubt`, `Held.distrust`): then another is opened beside it, which takes what comes from now on. Where a place
    may speak HTTP/2 one connection is made for all who ask; it lives as long as one of them waits.

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
        self._idle: dict[Key, list[_Idle]] = {}  # each list oldest first
        self._slots: dict[Held, None] = {}  # granted and not released; in order, so that runs repeat
        self._count: collections.Counter[Origin] = collections.Counter()  # slots and idle connections
        self._total = 0
        self._waiters: collections.deque[_Waiter] = collections.deque()
        self._shared: dict[Key, list[Held]] = {}  # slots of HTTP/2 connections, which take many requests
        self._openings: dict[Key, Opening] = {}  # connections to places not known to speak HTTP/1.1 only
        self._speaks_h1: collections.OrderedDict[Key, None] = collections.OrderedDict()
        self._checks: dict[Held, asyncio.Task[None]] = {}
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
        newer_than: float | None = None,
        left: Collection[Address] = (),
        addresses: tuple[Address, ...] | None = None,
        server_name: str | None = None,
        on_stage: Callable[[str], None] = quiet,
        on_note: Callable[[str], None] = quiet,
        on_held: Callable[[Held], None] | None = None,
    ) -> HttpResponse:
        """Send one request and give its answer when the head is there; see `HttpResponse` for the body.

        Cancelled or failed at any point, its slot is free and its connection closed before this raises.

        Args:
            request: what to send.
            deadline_s: seconds for everything from waiting in the queue to the head of the answer.
            body_deadline_s: seconds until the last byte of the body, default `deadline_s`.
            connect_timeout_s: seconds for making a connection, names, TCP and TLS together; None: until the deadline.
            read_timeout_s: longest silence; see `Http1Connection.exchange`.
            newer_than: only over a connection that was made, or has brought something, after this moment of the loop's
                time; idle ones to the same place that have not are closed.
            left: addresses that failed before: no kept connection to them is used, and they are dialled last.
            addresses: connect to these instead of resolving the host (IP direct).
            server_name: name for SNI and certificate instead of the host.
            on_stage: told the name of each stage of `telemetry.timeline.STAGES` as it begins.
            on_note: told decisions in words.
            on_held: told the connection the request is put on, before anything is sent; must not raise.

        Raises:
            QueueFull: `limits.POOL_WAITING_MAX` requests wait already.
            ResolveError, ConnectError, TlsError: no connection; see `Dialer.dial`.
            WriteError, ReadError, ProtocolViolation: see `Http1Connection.exchange`. `maybe_delivered` is exact also on
                a kept connection that the peer closed meanwhile.
            DeadlineExceeded: `phase` says in what.
            LocalProtocolError: the request cannot be sent as it is, or the pool is closed.
        """
        key = _key_of(request, addresses, server_name)
        progress = Progress(request.host, on_stage)
        now = asyncio.get_running_loop().time()
        times = _Times(
            head_by=now + deadline_s,
            body_by=now + (deadline_s if body_deadline_s is None else body_deadline_s),
            read_timeout_s=read_timeout_s,
            connect_timeout_s=connect_timeout_s,
        )
        if deadline_s <= 0.0:
            raise progress.too_late()
        if newer_than is not None:
            self._leave_old(key, newer_than)
        held = self._take_shared(key, left)
        if held is not None:
            if on_held is not None:
                on_held(held)
            return await self._exchange_shared(held, request, times, progress)
        encoded = encode(request)  # now, so that what cannot be sent fails before anything is done for it
        held = await self._find(key, left, times, progress, on_note)
        if on_held is not None:
            on_held(held)
        if held.shared is not None:
            return await self._exchange_shared(held, request, times, progress)
        return await self._exchange(held, encoded, times, progress)

    async def _find(
        self, key: Key, left: Collection[Address], times: _Times, progress: Progress, on_note: Callable[[str], None]
    ) -> Held:
        """Give a connection: one to share, an idle one, or one made now."""
        while True:
            held = self._take_shared(key, left)
            if held is not None:
                return held
            opening = self._openings.get(key)
            if opening is None:
                held = self._grant(key, left)
                if held is None:
                    held = await self._wait_for_grant(key, left, times, progress)
                if held is None:
                    continue
                if held.connection is not None:
                    return held
                if not self._may_share(key):
                    return await self._connect(held, left, times, progress, on_note)
                if key in self._openings:  # begun by another while this one waited for its slot
                    self._release(held, reusable=False)
                    continue
                opening = self._begin(held, left)
            await self._join(key, opening, times, progress, on_note)

    def _may_share(self, key: Key) -> bool:
        return key.origin.scheme == "https" and key not in self._speaks_h1

    async def _exchange(self, held: Held, encoded: Encoded, times: _Times, progress: Progress) -> HttpResponse:
        """Send a request over an HTTP/1.1 connection of its own."""
        connection = held.connection
        try:
            if connection is None:
                raise errors.LocalProtocolError("the slot has no connection")
            return await connection.exchange(
                encoded,
                deadline_at=times.body_by,
                head_by=times.head_by,
                read_timeout_s=times.read_timeout_s,
                done=lambda reusable: self._release(held, reusable=reusable),
                on_stage=progress.stage,
            )
        except BaseException:
            self._release(held, reusable=False)
            raise

    # -- making connections ---------------------------------------------------------------------------------------
    async def _connect(
        self,
        held: Held,
        left: Collection[Address],
        times: _Times,
        progress: Progress,
        on_note: Callable[[str], None],
    ) -> Held:
        """Make the connection of a slot for one request; failed or cancelled, the slot is free."""
        left_s = times.head_by - asyncio.get_running_loop().time()
        timeout_s = left_s if times.connect_timeout_s is None else min(left_s, times.connect_timeout_s)
        try:
            self._adopt(held, await self._dial(held.key, left, timeout_s, progress.stage, on_note))
        except BaseException:
            self._release(held, reusable=False)
            raise
        return held

    def _begin(self, held: Held, left: Collection[Address]) -> Opening:
        """Begin to make a connection for all who ask for its place."""
        key = held.key
        mute = [each.peer for each in self._shared.get(key, ()) if each.mute and each.peer is not None]
        opening = self._openings[key] = Opening()
        task = asyncio.create_task(self._open(held, opening, {*left, *mute}), name=f"connect to {key.origin.host}")
        task.add_done_callback(_retrieve)
        opening.task = task
        return opening

    async def _open(self, held: Held, opening: Opening, left: Collection[Address]) -> None:
        key = held.key
        try:
            stream = await self._dial(key, left, limits.POOL_OPENING_S, opening.stage, opening.note)
            self._adopt(held, stream)
            if held.shared is None:
                self._release(held, reusable=True)
        except BaseException:
            self._release(held, reusable=False)
            raise
        finally:
            if self._openings.get(key) is opening:
                del self._openings[key]
            self._call_waiters_to(key)

    async def _join(
        self, key: Key, opening: Opening, times: _Times, progress: Progress, on_note: Callable[[str], None]
    ) -> None:
        """Wait until a connection that is being made stands; its failure is that of all who wait."""
        task = opening.task
        if task is None:
            raise errors.LocalProtocolError("the connection was never begun")
        now = asyncio.get_running_loop().time()
        left_s = times.head_by - now
        patience_s = left_s if times.connect_timeout_s is None else min(left_s, times.connect_timeout_s)
        opening.join(progress, on_note)
        try:
            await asyncio.wait([task], timeout=max(0.0, patience_s))
        finally:
            opening.leave(progress)
            if not opening.waiting and not task.done():
                task.cancel()
                if self._openings.get(key) is opening:
                    del self._openings[key]
        if not task.done():
            raise errors.DeadlineExceeded(
                f"{key.origin.host}: not connected within {patience_s:.3g} s, while in {opening.phase};"
                f" {opening.story}",
                phase=opening.phase,
                maybe_delivered=False,
            )
        if task.cancelled():
            raise _pool_closed()
        error = task.exception()
        if isinstance(error, errors.TransportError):
            # Each who waited gets an error of its own: one object would gather everybody's traceback.
            raise type(error)(str(error), phase=error.phase, maybe_delivered=False) from error
        if error is not None:
            raise error

    async def _dial(
        self,
        key: Key,
        left: Collection[Address],
        timeout_s: float,
        on_stage: Callable[[str], None],
        on_note: Callable[[str], None],
    ) -> Stream:
        return await self._dialer.dial(
            key.origin.host,
            key.origin.port,
            tls=key.origin.scheme == "https",
            timeout_s=timeout_s,
            addresses=key.addresses,
            server_name=key.server_name,
            left=left,
            on_stage=on_stage,
            on_note=on_note,
        )

    def _adopt(self, held: Held, stream: Stream) -> None:
        """Give a slot its connection, of the kind that TLS agreed on."""
        if self._closed:
            stream.close()
            raise _pool_closed()
        key = held.key
        if stream.alpn != "h2":
            if key.origin.scheme == "https":
                self._remember_h1(key)
            held.connection = Http1Connection(stream)
            return
        from stormline.outbound import http2  # 50 ms of importing, which a client that meets none need not pay

        self._speaks_h1.pop(key, None)
        held.shared = http2.Http2Connection(stream)
        self._shared.setdefault(key, []).append(held)
        self._call_waiters_to(key)

    def _remember_h1(self, key: Key) -> None:
        self._speaks_h1[key] = None
        self._speaks_h1.move_to_end(key)
        if len(self._speaks_h1) > limits.POOL_PLACES_REMEMBERED:
            self._speaks_h1.popitem(last=False)

    # -- HTTP/2 connections, shared -------------------------------------------------------------------------------
    def _take_shared(self, key: Key, left: Collection[Address]) -> Held | None:
        """Give an HTTP/2 connection that takes another request and is not doubted; those that are over are let go."""
        places = self._shared.get(key)
        if places is None:
            return None
        found: Held | None = None
        for held in list(places):
            connection = held.shared
            if connection is None or connection.closed:
                self._let_shared_go(held)
            elif connection.retired or held.silent or held.mute or (left and connection.stream.peer in left):
                continue
            elif connection.usable:
                found = held
                break
            elif found is None:
                found = held
        if found is not None and len(places) > 1:
            self._let_doubted_go(places)
        return found

    def _let_doubted_go(self, places: list[Held]) -> None:
        """Keep no connection that is doubted and carries nothing: there is a better one."""
        for held in [each for each in places if each.silent or each.mute]:
            if held.shared is not None and not held.shared.open_streams:
                self._let_shared_go(held)

    async def _exchange_shared(
        self, slot: Held, request: HttpRequest, times: _Times, progress: Progress
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

    def _doubt(self, slot: Held) -> None:
        """A request waited long in vain: see whether the connection lives, before more are put on it for ever."""
        if slot not in self._checks and not self._closed:
            self._checks[slot] = asyncio.create_task(self._check(slot), name="check a silent connection")

    async def _check(self, slot: Held) -> None:
        try:
            if slot.shared is not None and not await slot.shared.check(limits.H2_CHECK_S):
                self._let_shared_go(slot)
        finally:
            self._checks.pop(slot, None)

    def _shared_rests(self, slot: Held) -> None:
        """An exchange is over: the connection may be too, or may rest from now on."""
        connection = slot.shared
        if connection is not None:
            if connection.closed or (connection.retired and not connection.open_streams):
                self._let_shared_go(slot)
            elif not connection.open_streams:
                self._plan_sweep(self._idle_s)

    def _let_shared_go(self, slot: Held) -> None:
        slots = self._shared.get(slot.key)
        if slots is not None and slot in slots:
            slots.remove(slot)
            if not slots:
                del self._shared[slot.key]
        self._release(slot, reusable=False)

    def _leave_old(self, key: Key, since: float) -> None:
        """Put nothing more on what has been quiet since then: idle ones are closed, shared ones doubted."""
        for entry in [each for each in self._idle.get(key, ()) if each.connection.stream.heard_at <= since]:
            self._close_idle(key, entry)
        for held in self._shared.get(key, ()):
            if held.heard_at <= since:
                held.doubt()

    def leave(self, gone: Callable[[Stream], bool]) -> int:
        """Close the connections for which `gone` is true, those in use too: their requests fail, and may be repeated.

        For a network that went away: what was connected through it will never hear another byte.

        Returns:
            How many were closed.
        """
        idle = [(key, entry) for key, entries in self._idle.items() for entry in entries]
        idle = [(key, entry) for key, entry in idle if gone(entry.connection.stream)]
        for key, entry in idle:
            self._close_idle(key, entry)
        used = [held for held in self._slots if (stream := held.stream) is not None and gone(stream)]
        for held in used:
            if held.shared is not None:
                self._let_shared_go(held)
            elif held.connection is not None:
                held.connection.close()
        return len(idle) + len(used)

    def doubt(self) -> None:
        """Put no request on what stands until it has shown that it lives: idle ones are closed, shared ones asked.

        For a network that has changed under connections which may still work.
        """
        for key, entries in list(self._idle.items()):
            for entry in list(entries):
                self._close_idle(key, entry)
        for held in [held for places in self._shared.values() for held in places]:
            held.doubt()
            held.probe()

    def _call_waiters_to(self, key: Key) -> None:
        """Have those who wait for the place look again: they may be able to share a connection now."""
        for waiter in [waiter for waiter in self._waiters if waiter.key == key]:
            self._waiters.remove(waiter)
            if not waiter.grant.done():
                waiter.grant.set_result(None)

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
        for opening in list(self._openings.values()):
            if opening.task is not None:
                with contextlib.suppress(RuntimeError):
                    opening.task.cancel()
        for key, entries in list(self._idle.items()):
            for entry in list(entries):
                self._close_idle(key, entry)
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
    def _grant(self, key: Key, left: Collection[Address]) -> Held | None:
        """Give a slot, with an idle connection in it where there is one; None where every one is taken."""
        if self._closed:
            raise _pool_closed()
        connection = self._take_idle(key, left)
        if connection is None:
            origin = key.origin
            if self._count[origin] >= self._per_origin_max and not self._evict(origin):
                return None
            if self._total >= self._connections_max and not self._evict(None):
                return None
            self._count[origin] += 1
            self._total += 1
        slot = Held(key, connection)
        self._slots[slot] = None
        return slot

    async def _wait_for_grant(
        self, key: Key, left: Collection[Address], times: _Times, progress: Progress
    ) -> Held | None:
        """Wait for a slot; None where something else has come of it, see `_Waiter.grant`."""
        if len(self._waiters) >= limits.POOL_WAITING_MAX:
            raise errors.QueueFull(
                f"{key.origin.host}: {len(self._waiters)} requests wait for a connection already",
                phase=Phase.QUEUED,
                maybe_delivered=False,
            )
        waiter = _Waiter(key, left, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout_at(times.head_by) as timeout:
                return await waiter.grant
        except BaseException as error:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not waiter.grant.cancelled() and waiter.grant.exception() is None:
                slot = waiter.grant.result()
                if slot is not None:
                    self._release(slot, reusable=True)  # granted and cancelled in the same moment
            if isinstance(error, TimeoutError) and timeout.expired():
                raise progress.too_late() from error
            raise

    def _release(self, slot: Held, *, reusable: bool) -> None:
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
        full: set[Origin] = set()
        for index, waiter in enumerate(self._waiters):
            if waiter.grant.done() or waiter.key.origin in full:
                continue
            slot = self._grant(waiter.key, waiter.left)
            if slot is not None:
                del self._waiters[index]
                waiter.grant.set_result(slot)
                return
            full.add(waiter.key.origin)

    # -- idle connections -----------------------------------------------------------------------------------------
    def _take_idle(self, key: Key, left: Collection[Address]) -> Http1Connection | None:
        """Give the idle connection used last, if it still lives; dead and expired ones are closed on the way."""
        entries = self._idle.get(key)
        if entries is None:
            return None
        now = self._clock.monotonic()
        for entry in reversed(list(entries)):
            stream = entry.connection.stream
            if left and stream.peer in left:
                continue
            if now - entry.since < self._idle_s and not stream.is_readable():
                self._take_out(key, entry)
                return entry.connection
            self._close_idle(key, entry)
        return None

    def _take_out(self, key: Key, entry: _Idle) -> None:
        entries = self._idle[key]
        entries.remove(entry)
        if not entries:
            del self._idle[key]

    def _evict(self, origin: Origin | None) -> bool:
        """Close the connection that is idle for longest, of one origin or of all; False where none is idle."""
        keys = [key for key in self._idle if origin is None or key.origin == origin]
        if not keys:
            return self._evict_shared(origin)
        oldest = min(keys, key=lambda key: self._idle[key][0].since)
        self._close_idle(oldest, self._idle[oldest][0])
        return True

    def _evict_shared(self, origin: Origin | None) -> bool:
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

    def _close_idle(self, key: Key, entry: _Idle) -> None:
        self._take_out(key, entry)
        self._drop(key.origin, entry.connection)

    def _drop(self, origin: Origin, connection: Http1Connection | None) -> None:
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
            for entry in [each for each in entries if now - each.since >= self._idle_s]:
                self._close_idle(key, entry)
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


def _key_of(request: HttpRequest, addresses: tuple[Address, ...] | None, server_name: str | None) -> Key:
    if request.scheme not in ("http", "https"):
        raise errors.LocalProtocolError(f"scheme {request.scheme[:20]!r} is neither http nor https")
    return Key(Origin(request.scheme, request.host.lower(), request.port), addresses, server_name)


def _pool_closed() -> errors.LocalProtocolError:
    return errors.LocalProtocolError("the HTTP pool is closed")


def _retrieve(task: asyncio.Task[None]) -> None:
    """Take note of how a connection ended to be made, also where nobody waits for it any more."""
    if not task.cancelled():
        task.exception()
