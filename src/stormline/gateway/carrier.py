"""One connection on the server: the transport's callbacks, the greeting, and the session it then carries.

The machine decides what is allowed; the carrier moves bytes, checks who the client is, and bounds what a peer that does
not read costs: senders pause, then reading pauses, then the session is dropped as OVERLOADED.
"""

import asyncio
import logging
import math
import socket
from typing import cast

from stormline.appgw import record
from stormline.appgw.port import Identity
from stormline.core import codes, errors, ids, limits, limits_platform
from stormline.core.codes import Code
from stormline.core.errors import RefusedError, RemoteProtocolError
from stormline.gateway.resume import login_of, node_of
from stormline.gateway.session import Hub, Session
from stormline.wire import connection as machine
from stormline.wire import events as e
from stormline.wire import frames, handover, tokens
from stormline.wire import messages as m
from stormline.wire.connection import Connection
from stormline.wire.states import Role, State

_log = logging.getLogger("stormline.gateway")

_NETWORKS = {name: name for name in ("wifi", "cell", "wired")}  # one text for all sessions
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)  # Linux' number; the module has it from 3.12 on


class Carrier(asyncio.Protocol):
    """One connection, from the end of its TLS handshake to its loss.

    Attributes:
        session: what it carries, None before the WELCOME and once the session has gone elsewhere.
        peer: address of the other end, for logs.
    """

    __slots__ = (
        "_greeting",
        "_hub",
        "_loop",
        "_over",
        "_paused_at",
        "_timer_at",
        "_transport",
        "peer",
        "session",
    )

    _transport: asyncio.Transport

    def __init__(self, hub: Hub, loop: asyncio.AbstractEventLoop) -> None:
        self._hub = hub
        self._loop = loop
        self._greeting: Connection | None = None
        self._over = False
        self._paused_at: float | None = None
        self._timer_at = math.inf
        self.session: Session | None = None
        self.peer = ""

    @property
    def paused(self) -> bool:
        """See `gateway.session.Carries.paused`."""
        return self._paused_at is not None

    @property
    def waiting_bytes(self) -> int:
        """See `gateway.session.Carries.waiting_bytes`."""
        return self._transport.get_write_buffer_size()

    @property
    def machine(self) -> Connection:
        """What is spoken with: the session's machine, before there is one that of the greeting."""
        if self.session is not None:
            return self.session.connection
        if self._greeting is None:
            raise errors.LocalProtocolError("this connection carries nothing")
        return self._greeting

    # -- the transport's callbacks -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TLS stands; wait for the HELLO."""
        self._transport = cast("asyncio.Transport", transport)
        self._greeting = Connection(
            Role.SERVER,
            self._loop.time(),
            idle_s=self._idle_s(),
            room=self._hub.room,
        )
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if peer else "unknown"
        if len(self._hub.connections) >= limits_platform.SESSIONS_MAX:
            _log.warning("%s refused: this node has %d connections", self.peer, limits_platform.SESSIONS_MAX)
            self.abort()
            return
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != m.ALPN:  # without TLS the listener has chosen
            _log.info("%s refused: it does not speak %s", self.peer, m.ALPN)
            self.abort()
            return
        self._hub.connections[self] = None
        self._transport.set_write_buffer_limits(high=limits_platform.SEND_BUFFER_BYTES)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, limits_platform.SEND_UNSENT_BYTES)
        self._arm()

    def _idle_s(self) -> float:
        return max(limits.SESSION_IDLE_S, 1.25 * self._hub.heartbeat_s + limits.HEARTBEAT_ANSWER_S)

    def data_received(self, data: bytes) -> None:
        """Bytes of the peer."""
        if not self._over:
            session = self.session
            (self.machine if session is None else session.connection).receive_data(data, self._loop.time())
            self.pump()

    def eof_received(self) -> bool:
        """The peer ended its side; so do we."""
        self._leave()
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
        if not self._over:
            self._transport.resume_reading()
            if self.session is not None:
                self.session.wake()
                self.session.tell_changes()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        session = self._stop(f"lost ({exc})" if exc else "lost")
        if session is not None:
            session.lost(self, f"its connection was lost ({exc})" if exc else "its connection was lost")
        self._hub.wheel.cancel(self, self._timer_at)
        self._hub.connections.pop(self, None)
        self._hub.left.set()

    # -- for the node and the session ------------------------------------------------------------------------------

    def close(self, code: Code, reason: str) -> None:
        """End the connection and what it carries, with a CLOSE. May be called again."""
        if self._over:
            return
        if self.session is not None:
            self.session.close(code, reason)
        else:
            self.machine.close(code, reason)
            self.pump()

    def go_away(self, code: Code, reason: str, *, spread_s: float) -> None:
        """Ask the client to leave. Its calls up to now are served, later ones refused. A second time does nothing."""
        if not self._over and self.machine.state is State.OPEN:
            self.machine.send_goaway(code, reason, spread_s=spread_s)
            self.flush()

    def abort(self) -> None:
        """Drop the connection without a word, and end what it carries."""
        session = self._stop("dropped")
        if session is not None:
            session.end("dropped")
        self._transport.abort()

    def part(self) -> None:
        """See `gateway.session.Carries.part`."""
        self._stop("its session goes on elsewhere")
        self._leave()

    def flush(self) -> None:
        """Hand what the machine has put out to the transport."""
        session = self.session
        data = (self.machine if session is None else session.connection).data_to_send()
        if not data or self._transport.is_closing():
            return
        self._transport.write(data)
        if (
            self._paused_at is not None
            and self._transport.get_write_buffer_size() > limits_platform.SESSION_BACKLOG_BYTES_MAX
            and not self._over
        ):
            self.close(Code.OVERLOADED, "the client does not read what it asked for")

    def pump(self) -> None:
        """Do what the machine tells, send what it wants sent, set the timer."""
        closed: e.Closed | None = None
        try:
            while not self._over:
                session = self.session  # the HELLO puts another machine in the greeting's place
                event = (self.machine if session is None else session.connection).next_event()
                if event is None:
                    break
                if isinstance(event, e.Closed):
                    closed = event
                elif session is not None:
                    session.handle(event)
                elif isinstance(event, e.HelloReceived):
                    self._greet(event.hello)
        except RemoteProtocolError as error:
            _log.info("%s broke the protocol: %s", self.peer, error)
            closed = e.Closed(error.code, str(error))
        if self._over:
            return
        if self.machine.has_data_to_send:
            self.flush()
        if closed is not None:
            if self.session is None and not (closed.by_peer or closed.lost):
                self._hub.refusals[codes.name(closed.code)] += 1
            session = self._stop(machine.explain(closed))
            if session is not None:
                session.end(machine.explain(closed))
            self._leave()
        elif self._timer_at == math.inf and not self._over:
            self._arm()

    # -- inside: greeting ----------------------------------------------------------------------------------------

    def _greet(self, hello: m.Hello) -> None:
        try:
            self._admit()
            token = self._authenticate(hello)
        except RefusedError as error:
            self.machine.close(error.code, error.reason, retry_after_s=error.retry_after_s)
            return
        expires_at = self._loop.time() + token.exp - self._hub.clock.wall()  # no step of the wall clock moves it
        hub, node = self._hub, node_of(hello.resume)
        here = hub.registry.get(token.app, token.device)
        if here is not None and self._identify(hello, token, "").older_than(here.identity.login_ms):
            self.machine.close(Code.REPLACED, "the device has a newer session")
            return
        if node and self._resume(hello, token, expires_at):
            return
        if node and node != hub.node and hub.fetch is not None:
            task = self._loop.create_task(self._fetch(node, hello, token, expires_at), name="gateway fetch session")
            hub.greetings[task] = None
            task.add_done_callback(lambda done: hub.greetings.pop(done, None))
            return
        self._open(hello, token, expires_at)

    def _identify(self, hello: m.Hello, token: tokens.DeviceToken, session: str) -> Identity:
        login_ms = login_of(hello.resume)
        at_ms = login_ms or int(self._hub.clock.wall() * 1000)
        return Identity(token.app, token.device, token.user, session, at_ms, returned=login_ms > 0)

    def _open(self, hello: m.Hello, token: tokens.DeviceToken, expires_at: float) -> None:
        """Begin a fresh session."""
        hub, greeting = self._hub, self.machine
        quota = hub.quota(token.app).sessions
        if 0 < quota <= hub.registry.count(token.app) and hub.registry.get(token.app, token.device) is None:
            greeting.close(
                Code.OVERLOADED, "the app has reached its quota", retry_after_s=limits_platform.QUOTA_RETRY_S
            )
            return
        identity = self._identify(hello, token, ids.new_id(hub.rng))
        greeting.send_welcome(self._welcome(hello, identity))
        self._carry(Session(hub, self._loop, greeting, identity, expires_at), hello)
        if self.session is not None:
            hub.registry.add(self.session)
            hub.opened(identity, _about(hello))
        _log.info("session %s (%s/%r) opened from %s by %.80r",
                  identity.session, identity.app, identity.device, self.peer, hello.client)  # fmt: skip

    async def _fetch(self, node: str, hello: m.Hello, token: tokens.DeviceToken, expires_at: float) -> None:
        """Have the session brought here from the node that holds it; where it cannot be had begin a fresh one."""
        hub = self._hub
        given = None
        if hub.fetch is not None:
            given = await hub.fetch(node, self._identify(hello, token, ""), hello.resume, hello.received)
        if given is not None:
            identity = self._identify(hello, token, given[0])
            connection = handover.restore(given[1], self._loop.time(), idle_s=self._idle_s(), room=hub.room)
            session = Session(hub, self._loop, connection, identity, expires_at)
            session.earlier_token = hello.resume
            hub.registry.add(session)
            hub.opened(identity, _about(hello))
            if not self._over and self.machine.state is State.GREETING and connection.can_resume(hello.received):
                self._go_on(session, hello)
                self.pump()
                return
            session.wait()
        if not self._over and self.machine.state is State.GREETING:
            self._open(hello, token, expires_at)
            self.pump()

    def _resume(self, hello: m.Hello, token: tokens.DeviceToken, expires_at: float) -> bool:
        """Let the session that the client names go on here; give False where it cannot."""
        hub = self._hub
        session = hub.registry.get(token.app, token.device)
        if not isinstance(session, Session) or session.identity.user != token.user:
            return False
        if not hub.resume_tokens.check(hello.resume, session.identity, earlier=session.earlier_token):
            return False
        if not session.connection.can_resume(hello.received):
            return False
        session.expires_at = expires_at
        self._go_on(session, hello)
        hub.described(session.identity, _about(hello))
        return True

    def _go_on(self, session: Session, hello: m.Hello) -> None:
        greeting, connection, identity = self.machine, session.connection, session.identity
        greeting.send_welcome(self._welcome(hello, identity, goes_on=connection))
        connection.resume(greeting, hello.received, self._loop.time())
        self._carry(session, hello)
        _log.info("session %s (%s/%r) goes on from %s", identity.session, identity.app, identity.device, self.peer)

    def _carry(self, session: Session, hello: m.Hello) -> None:
        self._greeting = None
        self.session = session
        session.network = _NETWORKS.get(hello.network, "unknown")
        session.attach(self)
        self._arm()

    def _welcome(self, hello: m.Hello, identity: Identity, *, goes_on: Connection | None = None) -> m.Welcome:
        hub = self._hub
        known = m.CAPABILITIES if hub.resume_window_s > 0 else m.CAPABILITIES - {m.RESUME}
        capabilities = tuple(sorted(known.intersection(hello.capabilities)))
        resumable = m.RESUME in capabilities
        return m.Welcome(
            version=m.VERSION,
            session=identity.session,
            device=identity.device,
            user=identity.user,
            unit=hub.unit,
            resume=hub.resume_tokens.mint(identity) if resumable else "",
            resume_window_s=hub.resume_window_s if resumable else 0.0,
            resumed=goes_on is not None,
            heartbeat_s=hub.heartbeat_s,
            time_ms=int(hub.clock.wall() * 1000),
            capabilities=capabilities,
            received=goes_on.received if goes_on is not None else 0,
            return_spread_s=hub.intake.return_spread_s(len(hub.registry)),
        )

    def _admit(self) -> None:
        """Send away who would only wait, before the token costs anything.

        Raises:
            RefusedError: the node stops, or is overloaded.
        """
        hub = self._hub
        if hub.leaving:
            raise RefusedError(Code.GOING_AWAY, "this node is stopping", limits_platform.LEAVING_RETRY_S)
        if hub.intake.overloaded or len(hub.greetings) >= limits_platform.GREETINGS_MAX:
            raise RefusedError(Code.OVERLOADED, "this node is overloaded", hub.intake.retry_after_s(hub.rng.random()))

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

    # -- inside: time and end ------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Have an entry in the wheel no later than the next thing due. One that is early finds out and sleeps on."""
        due = self.machine.next_timer()
        if self.session is not None and (due is None or self.session.expires_at < due):
            due = self.session.expires_at
        if self._paused_at is not None:
            stall = self._paused_at + limits_platform.STALL_TIMEOUT_S
            due = stall if due is None else min(due, stall)
        if due is None or self._timer_at <= due:
            return
        self._hub.wheel.cancel(self, self._timer_at)
        self._hub.wheel.add(self, due)
        self._timer_at = due

    def on_timer(self) -> None:
        """See `gateway.wheel.Due`."""
        self._timer_at = math.inf
        if self._transport.is_closing():
            self._transport.abort()
            return
        now = self._loop.time()
        if self._paused_at is not None and now >= self._paused_at + limits_platform.STALL_TIMEOUT_S:
            self.close(Code.OVERLOADED, "the client reads nothing")
            return
        if self.session is not None and now >= self.session.expires_at:
            self._expire(self.session)
            return
        self.machine.handle_timer(now)
        self.pump()

    def _expire(self, session: Session) -> None:
        """The token has expired: close the connection; the session waits for its client to come with a new one."""
        reason = "the token has expired"
        if not session.connection.resumable:
            session.close(Code.TOKEN_EXPIRED, reason)
            return
        self._stop(reason)
        session.lost(self, reason)
        if not self._transport.is_closing():
            self._transport.write(frames.encode(m.Close(Code.TOKEN_EXPIRED, reason)))
        self._leave()

    def _leave(self) -> None:
        """Close once all that was written has left, or after `limits.CLOSE_FLUSH_S`: the peer may never take it."""
        self._hub.wheel.cancel(self, self._timer_at)
        self._timer_at = self._loop.time() + limits.CLOSE_FLUSH_S
        self._hub.wheel.add(self, self._timer_at)
        self._transport.close()

    def _stop(self, why: str) -> Session | None:
        """Have nothing to do with the session any more, and give it; once."""
        if self._over:
            return None
        self._over = True
        self._hub.wheel.cancel(self, self._timer_at)
        self._timer_at = math.inf
        session, self.session = self.session, None
        if session is None:
            _log.info("connection of %s ended before it was a session: %s", self.peer, why)
        self._greeting = None
        return session


def _about(hello: m.Hello) -> record.About:
    return record.about(hello.network, hello.client, hello.app_version, hello.tags)
