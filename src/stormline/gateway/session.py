"""One long connection on the server: the transport's callbacks, the wire's machine, a task for each call.

The machine decides what is allowed; the session moves bytes, checks who the client is, and bounds what it costs:

- a peer that does not read: senders pause, then reading pauses, then the session is dropped as OVERLOADED;
- a call that fails, for whatever reason, ends as a FAIL for that call alone;
- when the connection ends, all its calls are cancelled and nothing of it stays.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from stormline.appgw.port import Delivery, Gate, Identity, Push
from stormline.core import errors, ids, limits, limits_platform
from stormline.core.clock import Clock, Rng
from stormline.core.codes import Code
from stormline.core.errors import CallError, RefusedError, RemoteProtocolError
from stormline.gateway.exchange import CallExchange
from stormline.gateway.notices import Due
from stormline.gateway.registry import Registry
from stormline.gateway.router import Router
from stormline.wire import connection as machine
from stormline.wire import events as e
from stormline.wire import messages as m
from stormline.wire import tokens
from stormline.wire.connection import Connection
from stormline.wire.states import Role, State

_log = logging.getLogger("stormline.gateway")

_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)  # Linux' number; the module has it from 3.12 on


@dataclass(slots=True, kw_only=True)
class Hub:
    """What the sessions of one node share.

    Attributes:
        keys: public keys that sign device tokens, by key id, by app.
        router: finds the application gateway of a call.
        registry: the live sessions.
        clock: for the expiry of tokens.
        rng: draws session ids.
        unit: this unit's name.
        heartbeat_s: longest silence a client is asked to keep before a PING.
        opened: told of each session once it is welcomed.
        closed: told when it has ended, unless it was replaced.
        changes_due: says what a session of an app has yet to be told of changed plans (`gateway.notices`).
        connections: every connection, welcomed or not.
        tasks: every call in progress.
        left: set with each connection that is gone.
    """

    keys: Mapping[str, Mapping[str, Ed25519PublicKey]]
    router: Router
    registry: Registry
    clock: Clock
    rng: Rng
    unit: str
    heartbeat_s: float
    opened: Callable[[Identity], None]
    closed: Callable[[Identity], None]
    changes_due: Callable[[str, int], Due | None] = lambda app, told: None
    connections: dict["Session", None] = field(default_factory=dict)  # dicts: in order, so that runs repeat
    tasks: dict[asyncio.Task[None], None] = field(default_factory=dict)
    left: asyncio.Event = field(default_factory=asyncio.Event)


class Session(asyncio.Protocol):
    """One connection, from the end of its TLS handshake to its loss.

    Attributes:
        connection: the machine.
        identity: whose it is; only once it is welcomed.
        peer: address of the other end, for logs.
    """

    # What only some connections need (calls, pushes, a pause) is made at first use: most of them are idle.
    __slots__ = (
        "_calls",
        "_hub",
        "_identity",
        "_loop",
        "_over",
        "_paused_at",
        "_pushes",
        "_resumed",
        "_timer",
        "_timer_at",
        "_told",
        "_transport",
        "_turn",
        "connection",
        "peer",
    )

    connection: Connection
    _transport: asyncio.Transport

    def __init__(self, hub: Hub, loop: asyncio.AbstractEventLoop) -> None:
        self._hub = hub
        self._loop = loop
        self._identity: Identity | None = None
        self._over = False
        self._paused_at: float | None = None
        self._turn: asyncio.Lock | None = None
        self._resumed: asyncio.Future[None] | None = None
        self._calls: dict[int, CallExchange] | None = None
        self._pushes: dict[int, asyncio.Future[bool]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._told = 0  # number of the last change of the plan that the client was told of
        self.peer = ""

    @property
    def identity(self) -> Identity:
        """Whose session it is."""
        if self._identity is None:
            raise errors.LocalProtocolError("a session has an identity once it is welcomed")
        return self._identity

    @property
    def app(self) -> str:
        """The application whose session it is."""
        return self.identity.app

    @property
    def leaving(self) -> bool:
        """A GOAWAY was said and calls are still open: the client may be back already, on another connection."""
        return not self._over and self.connection.state is State.DRAINING and self.calls_open > 0

    @property
    def calls_open(self) -> int:
        """Calls in progress."""
        return len(self._calls) if self._calls else 0

    # -- the transport's callbacks -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TLS stands; wait for the HELLO."""
        self._transport = cast("asyncio.Transport", transport)
        self.connection = Connection(
            Role.SERVER,
            self._loop.time(),
            idle_s=max(limits.SESSION_IDLE_S, 2 * self._hub.heartbeat_s + limits.HEARTBEAT_ANSWER_S),
        )
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if peer else "unknown"
        if len(self._hub.connections) >= limits_platform.SESSIONS_MAX:
            _log.warning("%s refused: this node has %d connections", self.peer, limits_platform.SESSIONS_MAX)
            self._drop()
            return
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != m.ALPN:  # without TLS the listener has chosen
            _log.info("%s refused: it does not speak %s", self.peer, m.ALPN)
            self._drop()
            return
        self._hub.connections[self] = None
        self._transport.set_write_buffer_limits(high=limits_platform.SEND_BUFFER_BYTES)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, limits_platform.SEND_UNSENT_BYTES)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Bytes of the peer."""
        if not self._over:
            self.connection.receive_data(data, self._loop.time())
            self._pump()

    def eof_received(self) -> bool:
        """The peer ended its side; so do we."""
        return False

    def pause_writing(self) -> None:
        """The peer does not read: senders wait, and its own bytes wait too, lest it make us answer without end."""
        self._paused_at = self._loop.time()
        if not self._over:
            self._transport.pause_reading()
            self._arm()

    def resume_writing(self) -> None:
        """The peer reads again."""
        self._paused_at = None
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)
        if not self._over:
            self._transport.resume_reading()
            self.tell_changes()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        if not self._over:
            self._end(f"lost ({exc})" if exc else "lost")
        self._hub.connections.pop(self, None)
        self._hub.left.set()

    # -- for the node --------------------------------------------------------------------------------------------

    def close(self, code: Code, reason: str, *, retry_after_s: float | None = None) -> None:
        """End the session with a CLOSE that is flushed for at most `limits.CLOSE_FLUSH_S`. May be called again."""
        if not self._over:
            self.connection.close(code, reason, retry_after_s=retry_after_s)
            self._pump()

    def go_away(self, code: Code, reason: str, *, spread_s: float) -> None:
        """Ask the client to leave. Its calls up to now are served, later ones refused. A second time does nothing."""
        if not self._over and self.connection.state is State.OPEN:
            self.connection.send_goaway(code, reason, spread_s=spread_s)
            self.flush()

    def abort(self) -> None:
        """Drop the connection without a word."""
        self._drop()

    async def push(self, push: Push) -> Delivery:
        """Send a push and wait for its acknowledgement, or the session's end.

        Cancelled, the push may have been sent.
        """
        if self._over:
            return Delivery.OFFLINE
        if not self.connection.can_push:
            return Delivery.BUSY
        seq = self.connection.send_push(push.push_id, push.body, topic=push.topic, expires_ms=push.expires_ms)
        if self._pushes is None:
            self._pushes = {}
        acked = self._pushes[seq] = self._loop.create_future()
        self.flush()
        try:
            return Delivery.ACKED if await acked else Delivery.UNCONFIRMED
        finally:
            del self._pushes[seq]

    def tell_changes(self) -> None:
        """See `gateway.notices.Recipient.tell_changes`.

        To a client that does not read nothing is said: what it has missed by then it is told in one message when it
        reads again.
        """
        if self._paused_at is None and self._add_notice():
            self.flush()

    def _add_notice(self) -> bool:
        connection = self.connection
        if self._over or connection.state not in (State.OPEN, State.DRAINING) or self._identity is None:
            return False
        if m.PLAN not in connection.capabilities:
            return False
        due = self._hub.changes_due(self._identity.app, self._told)
        if due is None:
            return False
        self._told = due.number
        connection.send_notice(due.version, due.hosts)
        return True

    # -- for its calls -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Hand what the machine has put out to the transport."""
        data = self.connection.data_to_send()
        if not data or self._transport.is_closing():
            return
        self._transport.write(data)
        if (
            self._paused_at is not None
            and self._transport.get_write_buffer_size() > limits_platform.SESSION_BACKLOG_BYTES_MAX
            and not self._over
        ):
            self.close(Code.OVERLOADED, "the client does not read what it asked for")

    async def wait_writable(self) -> None:
        """Wait until the peer has taken enough; those who wait go on in the order they came."""
        if self._paused_at is None and (self._turn is None or not self._turn.locked()):
            return
        if self._turn is None:
            self._turn = asyncio.Lock()
        async with self._turn:
            while self._paused_at is not None:
                self._resumed = self._loop.create_future()
                try:
                    await self._resumed
                finally:
                    self._resumed = None

    # -- inside: events ------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Do what the machine tells, send what it wants sent, set the timer."""
        closed: e.Closed | None = None
        try:
            while (event := self.connection.next_event()) is not None:
                if isinstance(event, e.Closed):
                    closed = event
                else:
                    self._handle(event)
        except RemoteProtocolError as error:
            _log.info("%s broke the protocol: %s", self._name(), error)
            closed = e.Closed(error.code, str(error))
        self.flush()
        if closed is not None:
            self._end(machine.explain(closed))
        elif not self._over:
            self._arm()

    def _handle(self, event: e.Event) -> None:
        match event:
            case e.DataReceived():
                if call := self._call(event.call_id):
                    call.feed(event.body, end=event.end)
            case e.CallReceived():
                self._open_call(event)
            case e.CreditGranted():
                if call := self._call(event.call_id):
                    call.credit_granted()
            case e.PushAcked():
                for seq in event.seqs:
                    acked = self._pushes.get(seq) if self._pushes else None
                    if acked is not None and not acked.done():
                        acked.set_result(True)
            case e.CallCancelled():
                call = self._calls.pop(event.call_id, None) if self._calls else None
                if call is not None and call.task is not None:
                    call.task.cancel()
            case e.HelloReceived():
                self._greet(event.hello)
            case _:  # a client's GOAWAY, PONG: nothing to do, the machine keeps account
                pass

    def _call(self, call_id: int) -> CallExchange | None:
        return self._calls.get(call_id) if self._calls else None

    # -- inside: greeting ----------------------------------------------------------------------------------------

    def _greet(self, hello: m.Hello) -> None:
        try:
            token = self._authenticate(hello)
        except RefusedError as error:
            self.connection.close(error.code, error.reason)
            return
        hub = self._hub
        identity = Identity(token.app, token.device, token.user, ids.new_id(hub.rng))
        self._identity = identity
        self.connection.send_welcome(
            m.Welcome(
                version=m.VERSION,
                session=identity.session,
                device=identity.device,
                user=identity.user,
                unit=hub.unit,
                heartbeat_s=hub.heartbeat_s,
                time_ms=int(hub.clock.wall() * 1000),
                capabilities=tuple(m.CAPABILITIES.intersection(hello.capabilities)),
            )
        )
        self._add_notice()  # in the same flight: also a client that was away when its plan changed hears of it at once
        hub.registry.add(self)
        hub.opened(identity)
        _log.info("%s opened from %s by %.80r", self._name(), self.peer, hello.client)

    def _authenticate(self, hello: m.Hello) -> tokens.DeviceToken:
        keys = self._hub.keys.get(hello.app)
        if keys is None:
            raise RefusedError(Code.APP_UNKNOWN, f"app {hello.app[:64]!r} is not served here")
        if not hello.token:
            raise RefusedError(Code.TOKEN_MISSING, "a device token is needed")
        try:
            token = tokens.verify(hello.token, keys=keys, wall=self._hub.clock.wall())
        except errors.SignatureError as error:
            raise RefusedError(tokens.refusal_code(error), str(error)) from error
        if token.app != hello.app:
            raise RefusedError(Code.TOKEN_INVALID, "the token is for another app")
        return token

    # -- inside: calls -------------------------------------------------------------------------------------------

    def _open_call(self, event: e.CallReceived) -> None:
        try:
            gate = self._hub.router.route(event.gate)
            if event.deadline_s is not None and event.deadline_s <= 0:
                raise CallError(Code.CALL_DEADLINE, "the deadline had passed on arrival")
            if len(self._hub.tasks) >= limits_platform.GATEWAY_CALLS_MAX:
                raise CallError(
                    Code.CALL_UNAVAILABLE, "this node is overloaded", retry_after_s=limits_platform.CALL_RETRY_AFTER_S
                )
        except CallError as error:
            self._fail(event.call_id, error)
            return
        exchange = CallExchange(self, self.identity, event, self._loop)
        if self._calls is None:
            self._calls = {}
        self._calls[event.call_id] = exchange
        task = exchange.task = self._loop.create_task(self._serve(exchange, gate))
        self._hub.tasks[task] = None
        task.add_done_callback(lambda done: self._hub.tasks.pop(done, None))

    async def _serve(self, exchange: CallExchange, gate: Gate) -> None:
        """Run one call; whatever happens in it ends here."""
        timeout = exchange.time_limit()
        try:
            async with timeout:
                await gate.handle(exchange)
            if self.connection.is_open(exchange.call_id):
                raise errors.LocalProtocolError("the application gateway did not finish its answer")
        except CallError as error:
            self._fail(exchange.call_id, error)
        except Exception as error:
            if isinstance(error, TimeoutError) and timeout.expired():
                failure = CallError(Code.CALL_DEADLINE, "no answer in time", maybe_delivered=True)
            else:
                _log.exception("%s: a call of gate %s failed", self._name(), gate.name)
                failure = CallError(Code.CALL_FAILED, "internal error", maybe_delivered=True)
            self._fail(exchange.call_id, failure)
        finally:
            if self._call(exchange.call_id) is exchange and self._calls:
                del self._calls[exchange.call_id]

    def _fail(self, call_id: int, error: CallError) -> None:
        if self._over or not self.connection.is_open(call_id):
            return
        self.connection.send_fail(
            call_id,
            error.code,
            error.reason.encode("utf-8", "replace").decode(),
            retry_after_s=error.retry_after_s,
            maybe_delivered=error.maybe_delivered,
        )
        self.flush()

    # -- inside: time and end ------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Have one timer that fires no later than the next thing due. One that fires early finds out and sleeps on."""
        due = self.connection.next_timer()
        if self._paused_at is not None:
            stall = self._paused_at + limits_platform.STALL_TIMEOUT_S
            due = stall if due is None else min(due, stall)
        if due is None or (self._timer is not None and self._timer_at <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due
        self._timer = self._loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = self._loop.time()
        if self._paused_at is not None and now >= self._paused_at + limits_platform.STALL_TIMEOUT_S:
            self.close(Code.OVERLOADED, "the client reads nothing")
            return
        self.connection.handle_timer(now)
        self._pump()

    def _drop(self) -> None:
        if not self._over:
            self._end("dropped")
        self._transport.abort()

    def _end(self, why: str) -> None:
        """Stop everything that belongs to the session; the CLOSE, if any, is flushed already."""
        if self._over:
            return
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        calls, self._calls = self._calls, None
        for call in calls.values() if calls else ():
            if call.task is not None:
                call.task.cancel()
        for acked in self._pushes.values() if self._pushes else ():
            if not acked.done():
                acked.set_result(False)
        if self._identity is not None:
            _log.info("%s ended: %s", self._name(), why)
            if self._hub.registry.remove(self):
                self._hub.closed(self._identity)
        else:
            _log.info("connection of %s ended before it was a session: %s", self.peer, why)
        self._transport.close()

    def _name(self) -> str:
        if self._identity is None:
            return self.peer
        return f"session {self._identity.session} ({self._identity.app}/{self._identity.device!r})"
