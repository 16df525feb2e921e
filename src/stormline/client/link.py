"""One session of a client on the long connection: a `wire.Connection` driven over one `net` stream after another.

Everything here runs on one event loop. A link whose stream is lost waits, detached, for `client.longline` to attach it
to the next one; its calls wait with it, and lose nothing. A link ends once and for all.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from stormline.core import codes, limits, limits_heartbeat
from stormline.core.codes import Code
from stormline.core.errors import (
    CallError,
    ChannelLost,
    DeadlineExceeded,
    LocalProtocolError,
    QueueFull,
    RefusedError,
    RemoteProtocolError,
    StormlineError,
)
from stormline.core.phase import Phase
from stormline.net.stream import Stream, reason_of
from stormline.policy.heartbeat import Silence
from stormline.wire import connection, messages
from stormline.wire import events as e
from stormline.wire.states import Role, State

_log = logging.getLogger("stormline.client")


class LinkListener(Protocol):
    """Who is told what happens on a link beside the answers to calls. Called on the loop; must not block or raise."""

    def link_welcomed(self, link: "Link", welcome: messages.Welcome) -> None:
        """The session stands."""
        ...

    def link_push(self, link: "Link", push: e.PushReceived) -> None:
        """A push came; `link.ack(push.seq)` confirms it."""
        ...

    def link_notice(self, link: "Link", notice: e.NoticeReceived) -> None:
        """The plan has changed, says the gateway."""
        ...

    def link_call(self, link: "Link", call: e.CallReceived) -> None:
        """The server calls this device."""
        ...

    def link_call_data(self, link: "Link", event: e.DataReceived | e.CallCancelled) -> None:
        """More of a server's call, or its end."""
        ...

    def link_leaving(self, link: "Link", event: e.GoingAway) -> None:
        """The gateway wants us to leave: no new calls here; the link ends itself after its last call."""
        ...

    def link_detached(self, link: "Link", closed: e.Closed) -> None:
        """The connection below is lost; the session can go on over another one, for a while."""
        ...

    def link_ended(self, link: "Link", closed: e.Closed) -> None:
        """The link is over; all its calls have failed already."""
        ...


class LinkCall:
    """One call of ours on a link.

    Use: `start_body(...)` if it was opened with `more`, `await reply()`, then `await read()` until it gives `b""`.
    Leave it with `cancel()` at any point; harmless after its end.

    Attributes:
        call_id: its id on the link.
        offset: where it begins in the bytes of the link's stream; below zero where it left by an earlier one.
        impatient: it ends where no gateway can be reached at once: its caller has other means.
        ended: its answer is whole, or it failed, or it was given up.
        quiet_since: when the call last moved: it was opened, or a piece of its body left. In the loop's time.
    """

    __slots__ = ("_chunks", "_credit", "_error", "_link", "_reply", "_sender", "_wake", "call_id", "ended", "impatient",
                 "offset", "quiet_since")  # fmt: skip

    def __init__(self, link: "Link", call_id: int, offset: int, now: float) -> None:
        self._link = link
        self.call_id = call_id
        self.offset = offset
        self.ended = False
        self.impatient = False
        self.quiet_since = now
        self._reply: e.ReplyReceived | None = None
        self._chunks: deque[bytes] = deque()
        self._error: BaseException | None = None
        self._wake: asyncio.Future[None] | None = None
        self._credit: asyncio.Future[None] | None = None
        self._sender: asyncio.Task[None] | None = None

    @property
    def sending(self) -> bool:
        """True while the rest of the request's body is being sent."""
        return self._sender is not None and not self._sender.done()

    async def left(self) -> None:
        """Wait until the kernel has taken what was put out for this call so far."""
        await self._link.drained()

    def doubt(self) -> None:
        """No answer came when one was due: have the link looked at."""
        self._link.check()

    @property
    def stream(self) -> Stream:
        """The bytes below."""
        return self._link.stream

    @property
    def carrier(self) -> str:
        """By what it goes, as in `wire.plan.Carrier`."""
        return self._link.carrier

    @property
    def accepted(self) -> bool:
        """True where its link's session stands, or stood."""
        return self._link.welcome is not None

    @property
    def readable(self) -> bool:
        """True where `read` gives or raises something at once."""
        return bool(self._chunks) or self.ended

    @property
    def maybe_delivered(self) -> bool:
        """False where nothing of this call has left, nor will once it is given up: the next connection does without it.

        What was put out on a connection that stands still leaves, however late.
        """
        link = self._link
        carried = link.closed is None and not link.machine.detached
        return carried or link.sent_bytes > self.offset

    def start_body(self, chunks: AsyncIterator[bytes]) -> None:
        """Send the rest of the request body as credit allows, beside the waiting for the answer.

        An exception of `chunks` ends the call and is raised by `reply` or `read`. The end of the call ends the sending.
        """
        self._sender = asyncio.create_task(self._send_body(chunks), name="stormline send body")
        self._sender.add_done_callback(self._body_left)

    def when_sent(self, told: Callable[[], None]) -> None:
        """Have `told` called once nothing more of the body is sent: it has left whole, or the call has ended."""
        if self._sender is not None:
            self._sender.add_done_callback(lambda _: told())

    async def _send_body(self, chunks: AsyncIterator[bytes]) -> None:
        link, machine = self._link, self._link.machine
        async for whole in chunks:
            for start in range(0, len(whole), limits.CHUNK_BYTES_MAX):
                rest = whole[start : start + limits.CHUNK_BYTES_MAX]
                while rest:
                    await link.drained()
                    if self.ended:
                        return
                    size = min(len(rest), machine.credit(self.call_id))
                    if size == 0:
                        await self._wait_credit()
                        continue
                    machine.send_data(self.call_id, rest[:size])
                    rest = rest[size:]
                    self.quiet_since = link.now()
                    link.flush()
        if not self.ended:
            machine.send_data(self.call_id, b"", end=True)
            self.quiet_since = link.now()
            link.flush()

    async def _wait_credit(self) -> None:
        self._credit = asyncio.get_running_loop().create_future()
        try:
            await self._credit
        finally:
            self._credit = None

    def _body_left(self, sender: asyncio.Task[None]) -> None:
        error = None if sender.cancelled() else sender.exception()
        if error is not None and not self.ended:
            self._link.forget(self)
            self.fail(error)

    async def reply(self) -> e.ReplyReceived:
        """Wait for the answer's head.

        Raises:
            CallError: the other side said no.
            DeadlineExceeded: the gateway's word that time ran out.
            ChannelLost: the link went away; `maybe_delivered` is exact.
            Exception: of the source of the request's body.
        """
        while self._reply is None:
            if self._error is not None:
                raise self._error
            await self._wait()
        return self._reply

    async def read(self) -> bytes:
        """Give the next piece of the answer's body, `b""` at its end and ever after; ends only where it is whole.

        Cancellation loses nothing.

        Raises:
            CallError: the other side broke off.
            ChannelLost: the link went away in the middle.
            Exception: of the source of the request's body.
        """
        while True:
            while self._chunks:
                chunk = self._chunks.popleft()
                self._link.consume(self.call_id, len(chunk))
                if chunk:
                    return chunk
            if self._error is not None:
                raise self._error
            if self.ended:
                return b""
            await self._wait()

    def cancel(self) -> None:
        """Give the call up."""
        if not self.ended:
            self._end()
            self._link.forget(self)

    async def _wait(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await self._wake
        finally:
            self._wake = None

    def _notify(self) -> None:
        for future in (self._wake, self._credit):
            if future is not None and not future.done():
                future.set_result(None)

    def _end(self) -> None:
        self.ended = True
        if self._sender is not None:
            self._sender.cancel()

    def take(self, event: e.ReplyReceived | e.DataReceived | e.CreditGranted) -> None:
        """Link only: an event about this call came."""
        if isinstance(event, e.ReplyReceived):
            self._reply = event
            self._chunks.append(event.body)
            if not event.more:
                self._end()
        elif isinstance(event, e.DataReceived):
            self._chunks.append(event.body)
            if event.end:
                self._end()
        self._notify()

    def fail(self, error: BaseException) -> None:
        """Link only: the call ends with `error`."""
        self._end()
        self._error = error
        self._notify()


class Link:
    """A session from its HELLO to its end.

    Args:
        stream: its first connection.
        listener: told what happens.
        heartbeat_s: silence after which it asks for a sign of life.
        machine: one that has been greeted on the stream already (`greet`); then `begin` goes on instead of `start`.
    """

    def __init__(
        self,
        stream: Stream,
        listener: LinkListener,
        *,
        heartbeat_s: float = limits.HEARTBEAT_S,
        machine: connection.Connection | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.stream = stream
        self._listener = listener
        self.machine = machine or connection.Connection(Role.CLIENT, self._loop.time(), heartbeat_s=heartbeat_s)
        self.heartbeat_s = heartbeat_s
        self.lingers = False  # asked to leave, it stays for pushes until the next link stands
        self.silence = Silence(self._loop.time())
        self.survived: Callable[[float], None] = lambda silence_s: None  # told how long it was silent and lives
        self.woke: Callable[[], None] = lambda: None  # told when a timer of its own fires
        self.welcome: messages.Welcome | None = None
        self.closed: e.Closed | None = None
        self._calls: dict[int, LinkCall] = {}
        self._out: asyncio.Event = asyncio.Event()
        self._drained: asyncio.Event = asyncio.Event()
        self._drained.set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._farewell: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None

    def start(self, hello: messages.Hello) -> None:
        """Say HELLO; calls may be opened at once and leave in the same flight."""
        self.machine.send_hello(hello)
        self._drive()

    def begin(self, welcome: messages.Welcome) -> None:
        """Go on where `greet` has left the machine: the session stands."""
        self._welcomed(welcome)
        self._drive()

    def _drive(self) -> None:
        self._out.clear()
        self._drained.set()
        self._tasks = [
            asyncio.create_task(self._read(), name="stormline link reader"),
            asyncio.create_task(self._write(), name="stormline link writer"),
        ]
        self.flush()

    def detach(self) -> None:
        """Leave the connection below without ending the session: `attach` goes on, within the resume window.

        Raises:
            LocalProtocolError: the session cannot outlive its connection.
        """
        self.machine.detach(self.stream.sent_bytes)
        self._place_calls()
        self._drained.clear()
        self._expiry = self._loop.call_later(
            self.welcome.resume_window_s if self.welcome is not None else 0.0,
            self.end,
            "the gateway keeps the session no longer",
        )
        self._arm()
        self._part(b"")

    def attach(self, stream: Stream, greeting: connection.Connection, welcome: messages.Welcome) -> None:
        """Go on over another connection, on which the gateway has taken the session up again (`greet`).

        Raises:
            LocalProtocolError: the link has ended, or what the gateway lacks is kept no more.
        """
        if self.closed is not None:
            raise LocalProtocolError("the link has ended")
        self.machine.resume(greeting, welcome.received, self._loop.time())
        if self._expiry is not None:
            self._expiry.cancel()
        self.stream = stream
        self.silence.void(self._loop.time())
        self._place_calls()
        self._welcomed(welcome)
        self._drive()

    def _place_calls(self) -> None:
        for call in self._calls.values():
            call.offset = self.machine.call_offset(call.call_id)

    @property
    def carrier(self) -> str:
        """By what it goes, as in `wire.plan.Carrier`."""
        carrier: str = getattr(self.stream, "carrier", "sl-tls")
        return carrier

    @property
    def detached(self) -> bool:
        """True where it waits for a connection."""
        return self.closed is None and self.machine.detached

    @property
    def resumable(self) -> bool:
        """True where it can go on over another connection."""
        has_token = self.welcome is not None and bool(self.welcome.resume)
        return self.closed is None and has_token and self.machine.resumable

    @property
    def calls_open(self) -> int:
        """Calls that wait for the end of their answers."""
        return len(self._calls)

    @property
    def standing(self) -> bool:
        """True where it takes new calls, now or as soon as one of those open has ended."""
        return self.closed is None and not self.machine.detached and self.machine.state in (State.GREETING, State.OPEN)

    @property
    def busy(self) -> bool:
        """True while calls of ours are in flight."""
        return bool(self._calls)

    def now(self) -> float:
        """Give the loop's time."""
        return self._loop.time()

    async def slot(self) -> None:
        """Wait until a call may be opened; returns at once where one may, or where the link has ended.

        Open the call before the next `await`: the slot is not held. Who comes later waits behind those who wait.

        Raises:
            QueueFull: `limits.LINK_WAITING_MAX` calls wait already.
        """
        fresh = True
        while self.standing and (not self.machine.can_call or (fresh and self._waiters)):
            fresh = False
            if len(self._waiters) >= limits.LINK_WAITING_MAX:
                raise QueueFull(
                    f"{len(self._waiters)} calls wait for the long connection already",
                    phase=Phase.QUEUED,
                    maybe_delivered=False,
                )
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except BaseException:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                else:
                    self._wake_waiter()  # it was our turn: somebody else's now
                raise

    def _wake_waiter(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                if self.standing:
                    return

    @property
    def sent_bytes(self) -> int:
        """Bytes that the kernel has begun to take on the connection that carries the session now."""
        return 0 if self.machine.detached else self.stream.sent_bytes

    @property
    def peer(self) -> str:
        """`ip:port` of the gateway."""
        return str(self.stream.peer)

    def call(
        self,
        gate: str,
        method: str,
        *,
        target: str = "",
        headers: messages.Headers = (),
        body: bytes = b"",
        more: bool = False,
        deadline_s: float | None = None,
    ) -> LinkCall:
        """Open a call; it leaves with the next write.

        Raises:
            LocalProtocolError: no new call is possible here, or the call is too large.
        """
        if self.closed is not None:  # the machine of a lost connection does not know that it is lost
            raise LocalProtocolError("the long connection has ended")
        call_id = self.machine.send_call(
            gate, method, target=target, headers=headers, body=body, more=more, deadline_s=deadline_s
        )
        call = LinkCall(self, call_id, self.machine.call_offset(call_id), self._loop.time())
        self._calls[call_id] = call
        self.flush()
        return call

    def ack(self, seq: int) -> None:
        """Confirm a push; nothing happens where the link has ended."""
        if self.closed is None:
            with contextlib.suppress(LocalProtocolError):
                self.machine.send_ack(seq)
            self.flush()

    def consume(self, call_id: int, size: int) -> None:
        """Body bytes were used up: give the peer credit."""
        if self.closed is None:
            self.machine.consume(call_id, size)
            self.flush()

    def forget(self, call: LinkCall) -> None:
        """A call was given up."""
        if self._calls.pop(call.call_id, None) is not None and self.closed is None:
            self.machine.send_cancel(call.call_id)
            self.flush()
            self._call_ended()

    def check(self, within_s: float | None = None) -> None:
        """Ask the peer for a sign of life; a dead link ends within this time, see `Connection.ping`."""
        if self.closed is None and self.welcome is not None:
            self.machine.ping(self._loop.time(), within_s)
            self.flush()

    def network_changed(self, gone: Callable[[Stream], bool]) -> None:
        """End at once where `gone` says so of the connection below; else ask for a sign of life."""
        if self.closed is None and not self.machine.detached and gone(self.stream):
            self._lose(e.Closed(Code.OK, "the network is gone", lost=True))
        else:
            self.check()

    def flush(self) -> None:
        """Let the writer send what the machine has put out, and set the timer anew."""
        if self.closed is None and self.machine.has_data_to_send:
            self.silence.went(self._loop.time())
            self._drained.clear()
            self._out.set()
        self._arm()

    async def drained(self) -> None:
        """Wait until the kernel has taken all that was put out (back-pressure for bodies)."""
        await self._drained.wait()

    async def close(self, code: Code = Code.OK, reason: str = "") -> None:
        """Say CLOSE, give it `limits.CLOSE_FLUSH_S` to leave, end. Calls in flight fail with ChannelLost."""
        if self.closed is None:
            self.machine.close(code, reason)
            if not self.machine.detached:
                self.flush()
                with contextlib.suppress(OSError, LocalProtocolError):  # a TimeoutError is one
                    async with asyncio.timeout(limits.CLOSE_FLUSH_S):
                        await self._drained.wait()
                        if self.stream.has_unsent:
                            await self.stream.send_all(b"")
            self._end(e.Closed(code, reason))
        if self._farewell is not None:
            await self._farewell

    def end(self, why: str) -> None:
        """End a link that no connection carries, or that nobody will carry on."""
        self._end(e.Closed(Code.OK, why, lost=True))

    def lose_patience(self) -> None:
        """No gateway can be reached now: end the calls whose callers have other means."""
        for call in [call for call in self._calls.values() if call.impatient]:
            error = self._lost_error(call, e.Closed(Code.OK, "no gateway can be reached", lost=True))
            self.forget(call)
            call.fail(error)

    def abandon(self) -> None:
        """Drop the connection without a word, at once; also for a link whose event loop is closed."""
        self.closed = self.closed or e.Closed(Code.OK, "abandoned", lost=True)
        if self._expiry is not None:
            self._expiry.cancel()
        with contextlib.suppress(RuntimeError):  # a closed loop cannot cancel any more
            for task in self._tasks:
                task.cancel()
            self._arm()
        with contextlib.suppress(RuntimeError):
            self.stream.close()

    # -- inside --------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        stream = self.stream
        try:
            self._pump()  # what came behind the WELCOME
            while self.closed is None and self.stream is stream and not self.machine.detached:
                data = await stream.receive()
                if data:
                    self.machine.receive_data(data, self._loop.time())
                    self.survived(self.silence.came(self._loop.time()))
                else:
                    self.machine.receive_eof(self._loop.time())
                self._pump()
        except OSError as error:  # ssl.SSLError is one
            self._lose(e.Closed(Code.OK, reason_of(error), lost=True))
        except RemoteProtocolError as error:
            _log.warning("gateway %s broke the protocol: %s", self.peer, error)
            self._end(e.Closed(error.code, str(error)))
        except Exception as error:
            _log.exception("the long connection to %s ends by a fault of ours", self.peer)
            self._end(e.Closed(Code.INTERNAL, type(error).__name__, lost=True))

    async def _write(self) -> None:
        stream = self.stream
        try:
            while True:
                await self._out.wait()
                self._out.clear()
                while data := self.machine.data_to_send():
                    await stream.send_all(data)
                self._drained.set()
        except OSError as error:
            self._lose(e.Closed(Code.OK, reason_of(error), lost=True))

    def _arm(self) -> None:
        """Have one timer that fires no later than the next thing due, and hardly earlier.

        One that fires early finds out and sleeps on.
        """
        due = self.machine.next_timer() if self.closed is None else None
        if self._timer is not None:
            if due is not None and self._timer_at <= due <= self._timer_at + limits_heartbeat.TIMER_EARLY_S:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = self._loop.call_at(due, self._on_timer)
            self._timer_at = due

    def _on_timer(self) -> None:
        self._timer = None
        self.woke()
        self.machine.handle_timer(self._loop.time())
        self._pump()

    def _pump(self) -> None:
        while (event := self.machine.next_event()) is not None:
            self._handle(event)
        self.flush()

    def _handle(self, event: e.Event) -> None:
        match event:
            case e.ReplyReceived() | e.CreditGranted():
                self._to_call(event)
            case e.DataReceived():
                if event.call_id in self._calls:
                    self._to_call(event)
                else:
                    self._listener.link_call_data(self, event)
            case e.CallFailed():
                call = self._calls.pop(event.call_id, None)
                if call is not None:
                    call.fail(_call_error(event))
                self._call_ended()
            case e.PushReceived():
                self._listener.link_push(self, event)
            case e.NoticeReceived():
                self._listener.link_notice(self, event)
            case e.CallReceived():
                self._listener.link_call(self, event)
            case e.CallCancelled():
                self._listener.link_call_data(self, event)
            case e.Welcomed():
                self._welcomed(event.welcome)
            case e.Closed():
                renew = event.by_peer and codes.action(event.code) is codes.Action.RENEW
                if event.lost or renew:
                    self._lose(event)
                else:
                    self._end(event)
            case e.GoingAway():
                _log.info("gateway %s asks us to leave: %s", self.peer, codes.name(event.code))
                self._listener.link_leaving(self, event)
                self._call_ended()
            case e.PongReceived() | e.HelloReceived() | e.PushAcked():
                pass

    def _welcomed(self, welcome: messages.Welcome) -> None:
        self.welcome = welcome
        self._set_heartbeat()
        self._listener.link_welcomed(self, welcome)

    def set_heartbeat(self, heartbeat_s: float) -> None:
        """Ask for a sign of life after this much silence from now on, or earlier where the gateway wants it."""
        self.heartbeat_s = heartbeat_s
        if self.closed is None:
            self._set_heartbeat()
            self._arm()

    def _set_heartbeat(self) -> None:
        asked_s = self.welcome.heartbeat_s if self.welcome is not None else 0.0
        self.machine.heartbeat_s = min(self.heartbeat_s, asked_s) if asked_s > 0 else self.heartbeat_s

    def _to_call(self, event: e.ReplyReceived | e.DataReceived | e.CreditGranted) -> None:
        call = self._calls.get(event.call_id)
        if call is not None:
            call.take(event)
            if call.ended:
                self._calls.pop(event.call_id, None)
                self._call_ended()

    def _call_ended(self) -> None:
        if self._waiters:
            self._wake_waiter()
        self._leave_when_idle()

    def linger_no_longer(self) -> None:
        """The next link stands, or none is wanted: leave as asked once no call is open."""
        self.lingers = False
        self._leave_when_idle()

    def _leave_when_idle(self) -> None:
        if self.lingers:
            return
        if self.machine.state is State.DRAINING and not self._calls and self.closed is None:
            self.machine.close(Code.OK, "leaving as asked")
            self._pump()

    def _lose(self, closed: e.Closed) -> None:
        """The connection is gone: wait for the next one where the session can, else end."""
        if not self.resumable:
            self._end(closed)
        elif not self.machine.detached:
            self.detach()
            self._wake_waiter()
            self._listener.link_detached(self, closed)

    def _end(self, closed: e.Closed) -> None:
        """The link is over: fail the calls in flight, exactly, and tell the listener. Once."""
        if self.closed is not None:
            return
        self.closed = closed
        if self._expiry is not None:
            self._expiry.cancel()
        calls, self._calls = list(self._calls.values()), {}
        undelivered = any(not call.maybe_delivered for call in calls)
        for call in calls:
            call.fail(self._lost_error(call, closed))
        self._wake_waiter()
        self._arm()
        final = b"" if undelivered else self.machine.data_to_send()  # what was called undelivered stays so
        self.machine.release()
        self._part(final)
        self._drained.set()
        self._listener.link_ended(self, closed)

    def _part(self, final: bytes) -> None:
        """Stop the two tasks, send the last frames if they go at once, and close the stream."""
        stream, tasks, earlier = self.stream, self._tasks, self._farewell
        self._tasks = []
        for task in tasks:
            task.cancel()

        async def part() -> None:
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
                if final:
                    async with asyncio.timeout(limits.CLOSE_FLUSH_S):
                        await stream.send_all(final)
            except (OSError, TimeoutError, LocalProtocolError):
                pass
            finally:
                stream.close()
            if earlier is not None:
                await earlier

        self._farewell = self._loop.create_task(part(), name="stormline link farewell")

    def _lost_error(self, call: LinkCall, closed: e.Closed) -> StormlineError:
        refused = self.welcome is None and closed.by_peer and closed.code != Code.OK
        # Nothing behind the HELLO is read before the session is accepted: a refused session delivered no call.
        delivered = call.maybe_delivered and not refused
        error = ChannelLost(
            f"the long connection to {self.peer} ended: {connection.explain(closed)}",
            phase=Phase.FIRST_BYTE if delivered else Phase.SEND,
            maybe_delivered=delivered,
        )
        if refused:
            error.__cause__ = RefusedError(closed.code, closed.reason, closed.retry_after_s)
        return error


def _call_error(event: e.CallFailed) -> StormlineError:
    if event.code == Code.GOING_AWAY and not event.maybe_delivered:
        # It crossed the GOAWAY: nobody refused the call, it only has to go over another link.
        return ChannelLost(f"the gateway is leaving: {event.reason}", phase=Phase.SEND, maybe_delivered=False)
    if event.code == Code.CALL_DEADLINE:
        return DeadlineExceeded(
            f"the gateway gave up waiting: {event.reason}",
            phase=Phase.FIRST_BYTE,
            maybe_delivered=event.maybe_delivered,
        )
    return CallError(event.code, event.reason, retry_after_s=event.retry_after_s, maybe_delivered=event.maybe_delivered)
