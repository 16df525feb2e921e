"""Connections kept and shared: bounded in number, fair in waiting, never left open by a cancelled request."""

import asyncio
import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Coroutine
from typing import Final

from stormline.core import errors, limits
from stormline.core.clock import Clock
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.stream import Stream
from stormline.outbound.held import Checks, Follower, Held, Key, Origin, Unfollowed, key_of, too_late
from stormline.outbound.http1 import Http1Connection
from stormline.outbound.http1_codec import Encoded, Encoder
from stormline.outbound.messages import HttpRequest, HttpResponse
from stormline.outbound.places import Connector as Connector
from stormline.outbound.places import Idle, Memory, NoSense, Opening, Place, Sense, Times, Waiter, is_overdue

_SWEEP_STEP_S: Final = 0.5
"""Least pause between two looks for expired connections."""


class HttpPool:
    """Sends requests over kept connections, HTTP/1.1 or HTTP/2 as TLS agreed. Belongs to one event loop.

    Connections are shared by scheme, host, port, given addresses and server name. Their number is bounded over all and
    per origin; requests beyond wait first come, first served, except that nobody waits behind another origin's limit.
    An idle connection makes room where another is needed. The pool never sends a request twice.

    A connection that speaks HTTP/2 takes the requests of its place side by side, as many as its peer allows; the rest
    waits here, in turn, not on the connection, so that one that goes away takes none of them with it. Where a place may
    speak HTTP/2 one connection is made for all who ask, and given up with the last of them. Others are made beside it
    where it is doubted (`Held.doubt`, `Held.distrust`), where those of the place take few requests (the peer says so,
    or has ended connections after few), where all its streams stay taken, and for what comes while a large answer is
    on its way, or while many requests share one on a link with room.

    Args:
        dialer: makes connections.
        clock: says how long a connection has been idle.
        connections_max: over all origins, idle ones included.
        connections_per_origin_max: to one scheme, host and port.
        idle_s: seconds an unused connection is kept.
        sense: knows the network; None: nobody does.
    """

    def __init__(
        self,
        dialer: Connector,
        clock: Clock,
        *,
        connections_max: int = limits.POOL_CONNECTIONS_MAX,
        connections_per_origin_max: int = limits.POOL_CONNECTIONS_PER_ORIGIN_MAX,
        idle_s: float = limits.POOL_IDLE_S,
        sense: Sense | None = None,
    ) -> None:
        self._sense = NoSense() if sense is None else sense
        self._dialer = dialer
        self._clock = clock
        self._connections_max = connections_max
        self._per_origin_max = connections_per_origin_max
        self._idle_s = idle_s
        self._places: dict[Key, Place] = {}
        self._memory = Memory()
        self._slots: dict[Held, None] = {}  # granted and not released; in order, so that runs repeat
        self._count: collections.Counter[Origin] = collections.Counter()  # slots and idle connections
        self._total = 0
        self._waiting = 0
        self._numbers = itertools.count(1)
        self._encoder = Encoder()
        self._due: dict[Place, None] = {}  # whose waiters are to be looked at
        self._slot_free = False  # for whomever
        self._serving = False
        self._checks = Checks(self._let_go)
        self._sweep: asyncio.TimerHandle | None = None
        self.on_wake: Callable[[], None] = lambda: None  # told when a timer of its own fires
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
        h1: bool = False,
        follower: Follower | None = None,
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
            h1: only over HTTP/1.1, if the dialer can offer it alone.
            follower: told what happens, as it happens.

        Raises:
            QueueFull: `limits.POOL_WAITING_MAX` requests wait already.
            ResolveError, ConnectError, TlsError: no connection; see `Dialer.dial`.
            WriteError, ReadError, ProtocolViolation: see `Http1Connection.exchange`. `maybe_delivered` is exact also on
                a kept connection that the peer closed meanwhile.
            DeadlineExceeded: `phase` says in what.
            LocalProtocolError: the request cannot be sent as it is, or the pool is closed.
        """
        key = key_of(request, addresses, server_name, h1)
        if follower is None:
            follower = Unfollowed()
        now = asyncio.get_running_loop().time()
        body_by = now + (deadline_s if body_deadline_s is None else body_deadline_s)
        times = Times(now + deadline_s, body_by, read_timeout_s, connect_timeout_s)
        if deadline_s <= 0.0:
            raise too_late(request.host, follower.phase)
        place = self._places.get(key)
        if newer_than is not None and place is not None:
            self._leave_old(place, newer_than)
        if place is not None and place.shared and not place.waiters:
            held = self._take_shared(place, None, left)
            if held is not None:
                return await self._exchange_shared(held, request, times, follower)
        # Now, so that what cannot be sent fails before anything is done for it.
        encoded = self._encoder.encode(request)
        held = self._idle_at(place, left) or await self._find(key, left, times, follower)
        if held.shared is not None:
            return await self._exchange_shared(held, request, times, follower)
        return await self._exchange(held, encoded, times, follower)

    async def preconnect(self, key: Key, timeout_s: float) -> bool:
        """Have a connection to a place, of HTTP/2 with its settings; True where one stands. Errors as `request`.

        Nothing is done where one stands, is used or is being made, or where another would have to go for it.
        """
        place = self._places.get(key)
        if (place is not None and not place.empty) or self._total >= self._connections_max:
            return place is not None and bool(place.idle or place.live)
        by = asyncio.get_running_loop().time() + timeout_s
        held = await self._find(key, (), Times(by, by, None, None), Unfollowed())
        if held.shared is None:
            self._release(held, reusable=True)
            return True
        return held.shared.streams_max is not None or await held.shared.check(limits.H2_CHECK_S)

    async def _find(self, key: Key, left: Collection[Address], times: Times, follower: Follower) -> Held:
        """Give a connection: one to share, an idle one, or one made now."""
        number = next(self._numbers)
        while True:
            if self._closed:
                raise _pool_closed()
            place = self._place(key)
            held = None if place.may_share or place.waiters else self._grant(place, left, number)
            if held is None:
                held = await self._wait(place, Waiter(number, left, times, follower))
            if held.shared is not None:
                if not held.live:  # it went away in this moment
                    self._give_back(place, held)
                    continue
                held.promised -= 1
            elif held.connection is None:
                await self._connect(held, left, times, follower)
            return held

    def _exchange(
        self, held: Held, encoded: Encoded, times: Times, follower: Follower
    ) -> Coroutine[None, None, HttpResponse]:
        """Send a request over an HTTP/1.1 connection of its own, which gives its slot back however that ends."""
        follower.on_held(held)
        connection = held.connection
        if connection is None:
            self._release(held, reusable=False)
            raise errors.LocalProtocolError("the slot has no connection")
        return connection.exchange(
            encoded,
            deadline_at=times.body_by,
            head_by=times.head_by,
            read_timeout_s=times.read_timeout_s,
            done=lambda reusable: self._release(held, reusable=reusable),
            on_stage=follower.stage,
        )

    # -- making connections ---------------------------------------------------------------------------------------
    async def _connect(self, held: Held, left: Collection[Address], times: Times, follower: Follower) -> None:
        """Make the connection of a slot for one request; failed or cancelled, the slot is free."""
        left_s = times.head_by - asyncio.get_running_loop().time()
        timeout_s = left_s if times.connect_timeout_s is None else min(left_s, times.connect_timeout_s)
        try:
            stream = await self._dial(held.key, left, timeout_s, follower.stage, follower.note)
            held.promised += 1  # where it can be shared, this request has the first stream
            self._adopt(held, stream)
            held.promised -= 1
        except BaseException:
            self._release(held, reusable=False)
            raise

    def _begin(self, place: Place, held: Held) -> None:
        """Begin to make a connection for all who wait at a place."""
        opening = Opening(place, held)
        waiter = place.unserved()
        left = () if waiter is None else waiter.left
        mute = [each.peer for each in place.shared if (each.mute or each.silent) and each.peer is not None]
        timeout_s = limits.POOL_OPENING_BESIDE_S if opening.beside else limits.POOL_OPENING_S
        dial = self._dial(place.key, {*left, *mute}, timeout_s, opening.stage, opening.note)
        opening.task = task = asyncio.get_running_loop().create_task(dial, name=f"connect to {place.key.origin.host}")
        place.openings.append(opening)
        # Not in the task: one that is cancelled before its first step does nothing at all.
        task.add_done_callback(functools.partial(self._opened, place, opening))
        for waiter in place.waiters:
            self._follow(place, waiter)

    def _opened(self, place: Place, opening: Opening, task: asyncio.Task[Stream]) -> None:
        """Give a connection that was made to those who wait, or its failure to those who have nothing else."""
        held = opening.held
        if opening in place.openings:
            place.openings.remove(opening)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self._release(held, reusable=False, tell=False)
            if error is not None:
                self._fail_unserved(place, error)
            self._tell(None)
            return
        try:
            self._adopt(held, task.result())
        except errors.LocalProtocolError:  # closed meanwhile
            self._release(held, reusable=False)
            return
        if held.shared is None:
            first = next((waiter for waiter in place.waiters if not waiter.grant.done()), None)
            if first is not None:
                self._unqueue(place, first)
                first.grant.set_result(held)
            else:
                self._release(held, reusable=True)
            self._tell(place)
        for waiter in place.waiters:
            if waiter.follower.phase is not Phase.QUEUED and not waiter.grant.done():
                waiter.follower.stage(Phase.QUEUED)

    def _fail_unserved(self, place: Place, error: BaseException) -> None:
        place.more_at = asyncio.get_running_loop().time() + limits.POOL_BESIDE_PAUSE_S
        if place.openings:
            return  # another may do better
        for waiter in [waiter for waiter in place.waiters if not place.serves(waiter)]:
            self._unqueue(place, waiter)
            if isinstance(error, errors.TransportError):
                # Each who waited gets an error of its own: one object would gather everybody's traceback.
                own = type(error)(str(error), phase=error.phase, maybe_delivered=False)
                own.__cause__ = error
                waiter.fail(own)
            else:
                waiter.fail(error)

    async def _dial(
        self,
        key: Key,
        left: Collection[Address],
        timeout_s: float,
        on_stage: Callable[[Phase], None],
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
            h1=key.h1,
            on_stage=on_stage,
            on_note=on_note,
        )

    def _adopt(self, held: Held, stream: Stream) -> None:
        """Give a slot its connection, of the kind that TLS agreed on."""
        if self._closed:
            stream.close()
            raise _pool_closed()
        place = self._places[held.key]
        held.made = next(self._numbers)
        if stream.alpn != "h2":
            place.known.speaks_h1 = True
            held.connection = Http1Connection(stream)
            return
        from stormline.outbound import http2  # 50 ms of importing, which a client that meets none need not pay

        known = place.known
        known.speaks_h1 = False
        untold = limits.H2_STREAMS_UNTOLD if known.streams is None else known.streams
        window = self._sense.window_bytes(held.key.origin.host, limits.H2_STREAM_WINDOW_BYTES)
        held.shared = http2.Http2Connection(stream, streams_untold=untold, window_bytes=window)
        held.shared.on_news = functools.partial(self._heard, held)
        held.on_doubt = self._doubted
        place.shared.append(held)
        self._plan_sweep(self._idle_s)
        self._tell(place)
        self._tell(None)  # where nobody needs it any more it makes room for another

    # -- HTTP/2 connections, shared -------------------------------------------------------------------------------
    def _take_shared(self, place: Place, waiter: Waiter | None, left: Collection[Address] = ()) -> Held | None:
        """Give an HTTP/2 connection that takes a request at once."""
        held = place.take(waiter, left)
        while held is not None and is_overdue(held, self._sense):
            held.doubt()  # it is served there all the same where that brings something before another one stands
            held = place.take(waiter, left)
        if held is not None and len(place.shared) > 1:
            for other in [each for each in place.shared if each.silent or each.mute]:
                if other.shared is not None and not other.shared.open_streams:
                    self._let_go(other)  # doubted, and carries nothing: there is a better one
        if held is not None and (wanted := place.crowded(held, self._sense)):
            self._connect_beside(place, wanted)
        return held

    def answered_beside(self, held: Held, since: float) -> bool:
        """Say whether another HTTP/2 connection to the same place, which takes requests, has answered since then."""
        place = self._places.get(held.key)
        return place is not None and place.answered_beside(held, since)

    def _connect_beside(self, place: Place, wanted: int) -> None:
        """Have one more connection made, up to `wanted`, if there is room; the request that needs it does not wait."""
        now = asyncio.get_running_loop().time()
        full = self._total >= self._connections_max or self._count[place.key.origin] >= self._per_origin_max
        unwanted = place.openings or place.live >= wanted or now < place.more_at or full
        if not unwanted and (held := self._new_slot(place)) is not None:
            self._begin(place, held)

    def _heard(self, held: Held) -> None:
        """Learn from what a connection brought, or from its end, and give the streams that came free."""
        place, connection = self._places.get(held.key), held.shared
        if place is None or connection is None or held.released:
            return
        streams = connection.streams_max
        if streams is not None:
            place.known.streams = streams
        if connection.served and connection.served < limits.H2_STREAMS_MAX:
            place.known.served = connection.served
        if connection.closed:
            self._let_go(held)
        elif place.waiters:
            self._tell(place)
        elif place.openings:
            self._trim(place)

    async def _exchange_shared(
        self, slot: Held, request: HttpRequest, times: Times, follower: Follower
    ) -> HttpResponse:
        follower.on_held(slot)
        if slot.shared is None:
            raise errors.LocalProtocolError("the connection is not shared")
        began = asyncio.get_running_loop().time()
        try:
            return await slot.shared.exchange(
                slot.shared.encode(request),
                deadline_at=times.body_by,
                head_by=times.head_by,
                read_timeout_s=times.read_timeout_s,
                done=lambda _: self._shared_rests(slot),
                on_stage=follower.stage,
            )
        except (errors.DeadlineExceeded, asyncio.CancelledError):
            if asyncio.get_running_loop().time() - began >= limits.H2_DOUBT_S:
                self._checks.add(slot)
            raise

    def _doubted(self, held: Held) -> None:
        """See to those who wait for a connection that is no longer relied on."""
        place = self._places.get(held.key)
        if place is not None and not held.released:
            self._trim(place)
            self._tell(place)

    def _shared_rests(self, slot: Held) -> None:
        """An exchange is over: the connection may be too, or may rest from now on."""
        connection, place = slot.shared, self._places.get(slot.key)
        if connection is None or place is None or slot.released:
            return
        if connection.closed or (connection.retired and not connection.open_streams):
            self._let_go(slot)
        elif slot.resting_since is None:
            if connection.retired:
                self._trim(place)  # it may have been the last beside which others are made
            self._tell(place)
        else:
            served = place.known.served
            if served is not None and not connection.retired and connection.begun >= served:
                place.known.served = None  # it goes on
            self._plan_sweep(self._idle_s)
            self._tell(place)
            self._tell(None)  # it makes room, where another place needs that

    def _let_go(self, slot: Held, *, tell: bool = True) -> None:
        place = self._places.get(slot.key)
        if place is not None and slot in place.shared:
            place.shared.remove(slot)
        self._release(slot, reusable=False, tell=tell)

    def _leave_old(self, place: Place, since: float) -> None:
        """Put nothing more on what has been quiet since then: idle ones are closed, shared ones doubted."""
        for entry in [each for each in place.idle if each.connection.stream.heard_at <= since]:
            self._close_idle(place, entry)
        for held in list(place.shared):
            if held.heard_at <= since:
                held.doubt()

    def leave(self, gone: Callable[[Stream], bool]) -> int:
        """Close the connections for which `gone` is true, those in use too: their requests fail, and may be repeated.

        For a network that went away: what was connected through it will never hear another byte.

        Returns:
            How many were closed.
        """
        idle = [(place, entry) for place in self._places.values() for entry in place.idle]
        idle = [(place, entry) for place, entry in idle if gone(entry.connection.stream)]
        for place, entry in idle:
            self._close_idle(place, entry)
        used = [held for held in self._slots if (stream := held.stream) is not None and gone(stream)]
        for held in used:
            self._let_go(held)
        self._tell(None)
        return len(idle) + len(used)

    def doubt(self) -> None:
        """Put no request on what stands until it has shown that it lives: idle ones are closed, shared ones asked.

        For a network that has changed under connections which may still work.
        """
        for place in list(self._places.values()):
            for entry in list(place.idle):
                self._close_idle(place, entry)
            for held in list(place.shared):
                held.probe()
                held.doubt()
        self._tell(None)

    async def aclose(self) -> None:
        """See `close`."""
        self.close()

    def close(self) -> None:
        """Close every connection, also those in use: their requests fail, as do those that wait. Takes no more.

        A connection being made is closed as soon as it stands; its request fails then, at its deadline at the latest.
        Works also when the pool's event loop is closed already.
        """
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        self._checks.close()
        for place in list(self._places.values()):
            for entry in list(place.idle):
                self._close_idle(place, entry)
            with contextlib.suppress(RuntimeError):
                for waiter in place.waiters:
                    waiter.fail(_pool_closed())
                for opening in place.openings:
                    opening.cancel()
        for slot in list(self._slots):
            if slot.stream is not None:
                with contextlib.suppress(RuntimeError):
                    self._let_go(slot)

    @property
    def open_connections(self) -> int:
        """Connections that are open or being made, idle ones included."""
        return self._total

    @property
    def idle_connections(self) -> int:
        """Connections that wait for a request."""
        resting = sum(held.resting_since is not None for place in self._places.values() for held in place.shared)
        return resting + sum(len(place.idle) for place in self._places.values())

    # -- slots ----------------------------------------------------------------------------------------------------
    def _place(self, key: Key) -> Place:
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = Place(key, self._memory.of(key))
        return place

    def _tidy(self, place: Place) -> None:
        if place.empty and self._places.get(place.key) is place:
            del self._places[place.key]

    def _grant(self, place: Place, left: Collection[Address], number: int) -> Held | None:
        """Give a slot, with an idle connection in it where there is one; None where every one is taken."""
        entry = self._take_idle(place, left, number)
        return self._new_slot(place) if entry is None else self._occupy(place, entry.connection, entry.made)

    def _new_slot(self, place: Place) -> Held | None:
        """Give a slot for a connection to be made; None where every one is taken."""
        origin = place.key.origin
        if self._count[origin] >= self._per_origin_max and not self._evict(place, origin):
            return None
        if self._total >= self._connections_max and not self._evict(place, None):
            return None
        self._count[origin] += 1
        self._total += 1
        self._places[place.key] = place  # its last idle connection may just have been closed
        return self._occupy(place, None, 0)

    def _occupy(self, place: Place, connection: Http1Connection | None, made: int) -> Held:
        slot = Held(place.key, connection, made)
        self._slots[slot] = None
        place.used += 1
        return slot

    def _release(self, slot: Held, *, reusable: bool, tell: bool = True) -> None:
        """Take a slot back, once; its connection is kept where it is reusable and closed else."""
        if slot.released:
            return
        slot.released = True
        self._slots.pop(slot, None)
        place, connection = self._places[slot.key], slot.connection
        place.used -= 1
        if reusable and connection is not None and not self._closed:
            place.idle.append(Idle(connection, self._clock.monotonic(), slot.made))
            if self._sweep is None:
                self._plan_sweep(self._idle_s)
        else:
            self._drop(slot.key.origin)
            if connection is not None:
                connection.close()
            if slot.shared is not None:
                slot.shared.close()
                self._trim(place)
        if tell and self._waiting:
            self._tell(None)
        if not place.idle:
            self._tidy(place)

    # -- waiting --------------------------------------------------------------------------------------------------
    async def _wait(self, place: Place, waiter: Waiter) -> Held:
        """Wait for a slot, or for a stream; who is cancelled or comes too late leaves nothing behind."""
        if self._waiting >= limits.POOL_WAITING_MAX:
            self._tidy(place)
            raise errors.QueueFull(
                f"{place.key.origin.host}: {self._waiting} requests wait for a connection already",
                phase=Phase.QUEUED,
                maybe_delivered=False,
            )
        self._places[place.key] = place
        place.add(waiter)
        self._waiting += 1
        try:
            self._tell(place)
            if not waiter.grant.done():
                self._follow(place, waiter)
            return await waiter.grant
        except BaseException:
            if waiter.grant.done() and not waiter.grant.cancelled() and waiter.grant.exception() is None:
                self._give_back(place, waiter.grant.result())  # granted and cancelled in the same moment
            raise
        finally:
            if waiter.timer is not None:
                waiter.timer.cancel()
            self._unqueue(place, waiter)
            self._trim(place)
            self._tidy(place)
            if place.shared and not place.waiters:
                self._tell(None)  # what rests there makes room now

    def _give_back(self, place: Place, held: Held) -> None:
        if held.shared is None:
            self._release(held, reusable=True)
        else:
            held.promised -= 1
            self._tell(place)
            self._tell(None)

    def _unqueue(self, place: Place, waiter: Waiter) -> None:
        if place.remove(waiter):
            self._waiting -= 1

    def _trim(self, place: Place) -> None:
        """Give up connections that are being made for nobody.

        One beside others that serve is finished all the same: a load that just needs it would begin it again and again.
        """
        if place.openings and not place.waiters:
            given_up = [opening for opening in place.openings if not (opening.beside and place.live)]
            for opening in given_up:
                place.openings.remove(opening)
                opening.cancel()

    def _follow(self, place: Place, waiter: Waiter) -> None:
        """Have one who waits take part in what is done for it, and look after its time."""
        now = asyncio.get_running_loop().time()
        if place.openings and not place.serves(waiter):
            if waiter.times.connect_timeout_s is not None:
                waiter.connect_by = now + waiter.times.connect_timeout_s
            phase = place.openings[0].phase
            if phase is not Phase.QUEUED:
                waiter.follower.stage(phase)
        self._look_after(place, waiter, now)

    def _look_after(self, place: Place, waiter: Waiter, now: float) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        loop = asyncio.get_running_loop()
        waiter.timer = loop.call_at(waiter.next_look(now), self._time_came, place, waiter)

    def _time_came(self, place: Place, waiter: Waiter) -> None:
        if waiter.grant.done():
            return
        now = asyncio.get_running_loop().time()
        opening = place.openings[0] if place.openings and not place.serves(waiter) else None
        connect_by = waiter.connect_by if opening is not None else None
        if now >= waiter.times.head_by or (connect_by is not None and now >= connect_by):
            self._unqueue(place, waiter)
            waiter.fail(waiter.too_late(place.key, opening))
            return
        if not waiter.impatient and now >= waiter.since + limits.H2_STREAM_WAIT_S:
            waiter.impatient = True
            self._tell(place)
        if not waiter.grant.done():
            self._look_after(place, waiter, now)

    # -- serving those who wait -----------------------------------------------------------------------------------
    def _tell(self, place: Place | None) -> None:
        """Look after those who wait: something may have come free at a place, or (None) a slot for anybody."""
        if self._closed or not self._waiting:
            return
        if place is None:
            self._slot_free = True
        else:
            self._due[place] = None
        if self._serving:
            return  # whoever is serving sees to it; nobody is served in the middle of serving another
        self._serving = True
        try:
            while self._due or self._slot_free:
                if self._due:
                    place = next(iter(self._due))
                    del self._due[place]
                    self._serve(place)
                else:
                    self._slot_free = False
                    self._serve_all()
        finally:
            self._serving = False

    def _serve_all(self) -> None:
        """Give slots to those who wait, first come first served, but nobody behind another origin's limit."""
        places = [place for place in self._places.values() if place.waiters]
        for place in sorted(places, key=lambda place: next(iter(place.waiters)).number):
            self._serve(place)

    def _serve(self, place: Place) -> None:
        if place.shared and place.waiters:
            self._hand_out_streams(place)
        if place.waiters and (place.idle or not place.may_share):
            self._hand_out_slots(place)
        if place.waiters and place.may_share:
            now = asyncio.get_running_loop().time()
            while place.wants_another(now):
                held = self._new_slot(place)
                if held is None:
                    return
                self._begin(place, held)

    def _hand_out_streams(self, place: Place) -> None:
        if not place.has_room():
            return
        for waiter in list(place.waiters):
            if waiter.grant.done():
                continue
            held = self._take_shared(place, waiter)
            if held is not None:
                held.promised += 1
                self._unqueue(place, waiter)
                waiter.grant.set_result(held)
            if not place.has_room():
                return

    def _hand_out_slots(self, place: Place) -> None:
        for waiter in list(place.waiters):
            if waiter.grant.done():
                continue
            if not place.may_share:
                held = self._grant(place, waiter.left, waiter.number)
                if held is None:
                    return
            else:
                entry = self._take_idle(place, waiter.left, waiter.number)
                if entry is None:
                    continue
                held = self._occupy(place, entry.connection, entry.made)
            self._unqueue(place, waiter)
            waiter.grant.set_result(held)

    # -- idle connections -----------------------------------------------------------------------------------------
    def _take_idle(self, place: Place, left: Collection[Address], number: int) -> Idle | None:
        """Give the idle connection used last, if it still lives; dead and expired ones are closed on the way."""
        now = self._clock.monotonic()
        for entry in reversed(list(place.idle)):
            stream = entry.connection.stream
            if left and stream.peer in left and entry.made < number:
                continue
            if now - entry.since < self._idle_s and not stream.is_readable():
                place.idle.remove(entry)
                return entry
            self._close_idle(place, entry)
        return None

    def _idle_at(self, place: Place | None, left: Collection[Address]) -> Held | None:
        """Give a slot with an idle connection where nothing else comes into question, as almost always."""
        if place is None or not place.idle or place.waiters or place.may_share or self._closed:
            return None
        entry = self._take_idle(place, left, next(self._numbers))
        return None if entry is None else self._occupy(place, entry.connection, entry.made)

    def _evict(self, asks: Place, origin: Origin | None) -> bool:
        """Close the connection that is idle for longest, of one origin or of all; False where none is idle."""
        places = [place for place in self._places.values() if origin is None or place.key.origin == origin]
        idle = [place for place in places if place.idle]
        if idle:
            place = min(idle, key=lambda place: place.idle[0].since)
            self._close_idle(place, place.idle[0])
            return True
        # One that rests where somebody waits takes nothing now, and would be made again at once: for ever, in turns.
        # Where it is of no use to the first who waits at that very place it may go.
        places = [place for place in places if not place.waiters or (place is asks and place.unserved() is not None)]
        shared = [held for place in places for held in place.shared]
        resting = [(since, held) for held in shared if (since := held.resting_since) is not None]
        if not resting:
            return False
        # Nobody is told: the slot is taken at once.
        self._let_go(min(resting, key=lambda entry: entry[0])[1], tell=False)
        return True

    def _close_idle(self, place: Place, entry: Idle) -> None:
        place.idle.remove(entry)
        entry.connection.close()
        self._drop(place.key.origin)
        self._tidy(place)

    def _drop(self, origin: Origin) -> None:
        self._total -= 1
        self._count[origin] -= 1
        if not self._count[origin]:
            del self._count[origin]

    def _plan_sweep(self, delay_s: float) -> None:
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(delay_s, self._close_expired)

    def _close_expired(self) -> None:
        self._sweep = None
        self.on_wake()
        now = self._clock.monotonic()
        loop_now = asyncio.get_running_loop().time()
        soonest: list[float] = []
        for place in list(self._places.values()):
            for entry in [each for each in place.idle if now - each.since >= self._idle_s]:
                self._close_idle(place, entry)
            soonest += [entry.since + self._idle_s - now for entry in place.idle[:1]]
            for held in list(place.shared):
                if held.resting_since is not None:
                    left_s = held.resting_since + self._idle_s - loop_now
                    if left_s <= 0:
                        self._let_go(held)
                    else:
                        soonest.append(left_s)
        if soonest:
            self._plan_sweep(max(_SWEEP_STEP_S, min(soonest)))


def _pool_closed() -> errors.LocalProtocolError:
    return errors.LocalProtocolError("the HTTP pool is closed")
