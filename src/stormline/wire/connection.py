"""The long connection as a machine without I/O: bytes and `now` in; bytes, events and the next timer out.

Drive it like this, the same on both sides:

    machine.receive_data(data, now)            or  machine.receive_eof(now)
    while (event := machine.next_event()) is not None: ...     until None; may raise RemoteProtocolError
    stream.send(machine.data_to_send())
    wake up at machine.next_timer() and call machine.handle_timer(now)

Where the capability `resume` is in force the session outlives its transport: `detach` when that is gone, `resume` with
the machine that has greeted the peer on the next one. What either side had not received is sent again, once.

After a RemoteProtocolError the machine is CLOSED and `data_to_send` holds the CLOSE that tells the peer why: send it,
then drop the connection. Messages and their order: `wire.messages`, `wire.states`; written down in
`docs/reference/protocol.md`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from stormline.core import codes, limits
from stormline.core.codes import Code
from stormline.core.errors import LocalProtocolError, RemoteProtocolError
from stormline.wire import events as e
from stormline.wire import frames, kept, states
from stormline.wire import messages as m
from stormline.wire.calls import OpenCall, still_wanted
from stormline.wire.checks import check_body, check_chunk, check_headers, milliseconds, seconds
from stormline.wire.pushes import Pushes
from stormline.wire.states import Role, State

_DELIVERED = -1  # offset of a call that left by an earlier transport
_NOT_SENT = 2**63  # of one that did not, and has no place in the bytes of a new one yet


class Connection:
    """One long connection of either role.

    Args:
        role: which side this is.
        now: monotonic seconds at creation; a server's HELLO deadline counts from here.
        heartbeat_s: client: silence after which it pings, None for never.
        idle_s: silence after which the peer counts as gone, None for never. Only whole frames break a silence.
        room: what kept frames of the process may take together, None for a session of its own.

    Raises (from its methods):
        LocalProtocolError: the call is not allowed in this state; nothing was changed.
        RemoteProtocolError: the peer broke the rules (only from `next_event`).
    """

    def __init__(
        self,
        role: Role,
        now: float,
        *,
        heartbeat_s: float | None = None,
        idle_s: float | None = None,
        room: kept.Room | None = None,
    ) -> None:
        self.role = role
        self.state = State.NEW
        self.heartbeat_s = heartbeat_s
        self.idle_s = idle_s
        self._in = frames.FrameBuffer(
            limits.FRAME_BEFORE_HELLO_BYTES_MAX if role is Role.SERVER else limits.FRAME_BYTES_MAX
        )
        self._out: list[bytes] = []
        self._queued_bytes = 0
        self._events: list[e.Event] = []  # a few at most, and an empty deque takes ten times as much
        self._calls: dict[int, OpenCall] = {}
        self._next_call = 1 if role is Role.CLIENT else 2
        self._peer_call = 0
        self._peer_calls_open = 0
        self._pushes: Pushes | None = None  # made at first use: most sessions are idle
        self._ping: tuple[int, float, float] | None = None
        self._ping_nonce = 0
        self._now = now
        self._last_frame = now
        self._greet_by: float | None = now + limits.HELLO_TIMEOUT_S if role is Role.SERVER else None
        self._eof = False
        self._offered: tuple[str, ...] = ()
        self.capabilities: tuple[str, ...] = ()
        """Optional features in force: named in HELLO and in WELCOME, and known to this version."""
        self.detached = False
        """The transport is gone, and the session waits for the next one."""
        self._counts = False
        self._left = False  # the peer has said GOAWAY: calls it will not serve count as failed already
        self._room = room
        self._kept: kept.Kept | None = None

    # -- input ---------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes, now: float) -> None:
        """Take bytes from the peer; `next_event` reads them. Bytes after CLOSED are dropped."""
        self._now = now
        if self.state is not State.CLOSED and not self.detached:
            self._in.feed(data)

    def receive_eof(self, now: float) -> None:
        """The peer ended the stream."""
        self._now = now
        self._eof = True

    def handle_timer(self, now: float) -> None:
        """Do what is due at `now`: ping, or give a silent peer up."""
        self._now = now
        if self.state is State.CLOSED or self.detached:
            return
        if self._greet_by is not None and now >= self._greet_by:
            self._end(Code.HELLO_TIMEOUT, "no complete greeting in time")
            return
        if self.state is State.GREETING or self.state is State.NEW:
            return
        if self._ping is not None:
            if now >= self._answer_by(self._ping):
                self._ping = None
                if self.resumable:
                    self._lost(Code.HEARTBEAT_TIMEOUT, "no answer to a ping")
                else:
                    self._end(Code.HEARTBEAT_TIMEOUT, "no answer to a ping")
                return
        elif self.heartbeat_s is not None and now >= self._last_frame + self.heartbeat_s:
            self.ping(now)
        if self.idle_s is not None and now >= self._last_frame + self.idle_s:
            self._end(Code.HEARTBEAT_TIMEOUT, "nothing heard for too long")

    def _answer_by(self, ping: tuple[int, float, float]) -> float:
        """When an unanswered ping means a dead link: each frame that still comes proves it alive.

        On a slow link a PONG waits behind body bytes for longer than the bound.
        """
        return max(ping[1], self._last_frame) + ping[2]

    # -- output --------------------------------------------------------------------------------------------------

    def data_to_send(self) -> bytes:
        """Give and forget the bytes to send now."""
        out = self._out
        if len(out) == 1:
            return out.pop()
        data = b"".join(out)
        out.clear()
        return data

    @property
    def frames_waiting(self) -> int:
        """How many frames `data_to_send` would give."""
        return len(self._out)

    @property
    def has_data_to_send(self) -> bool:
        """True where `data_to_send` would give something."""
        return bool(self._out)

    def next_timer(self) -> float | None:
        """When to call `handle_timer`, in the caller's monotonic seconds; None for never."""
        if self.state is State.CLOSED or self.detached:
            return None
        if self._greet_by is not None:
            return self._greet_by
        if self.state is State.GREETING or self.state is State.NEW:
            return None
        due = []
        if self._ping is not None:
            due.append(self._answer_by(self._ping))
        elif self.heartbeat_s is not None:
            due.append(self._last_frame + self.heartbeat_s)
        if self.idle_s is not None:
            due.append(self._last_frame + self.idle_s)
        return min(due, default=None)

    def next_event(self) -> e.Event | None:
        """Give the next thing that happened, None when there is nothing (yet).

        Raises:
            RemoteProtocolError: the peer broke the rules; see the module's text for what to do.
        """
        while not self._events:
            state = self.state
            if state is State.CLOSED or (state is State.GREETING and self.role is Role.SERVER):
                return None
            try:
                message = self._in.next_message()
                if message is not None:
                    self._last_frame = self._now
                    self._receive(message)
                elif self._eof:
                    self._lost(Code.OK, "the peer ended the connection without a word")
                else:
                    return None
            except RemoteProtocolError as error:
                self._end(error.code, str(error), silent=True)
                raise
        return self._events.pop(0)

    @property
    def reading_held(self) -> bool:
        """True while the peer's bytes must wait (server, between HELLO and WELCOME): pause reading the socket."""
        return self._reading_is_held() and len(self._in) > 0

    def _reading_is_held(self) -> bool:
        return self.state is State.GREETING and self.role is Role.SERVER

    @property
    def queued_bytes(self) -> int:
        """All bytes ever put out; with `call_offset` it tells how much of a call the kernel has taken."""
        return self._queued_bytes

    def call_offset(self, call_id: int) -> int:
        """Position of the first byte of an open call of ours in the stream of all bytes put out.

        While no more than this many bytes have been handed to the kernel, the call is certainly undelivered. Where the
        session goes on over another transport it counts in the bytes of that one; below zero the call has left.
        """
        return self._own(call_id).offset

    def open_calls(self) -> list[int]:
        """Ids of our calls that still wait for the end of their answer."""
        return [call_id for call_id, call in self._calls.items() if call.ours]

    # -- greeting and ending -------------------------------------------------------------------------------------

    def send_hello(self, hello: m.Hello) -> None:
        """Client: open the conversation. Calls may follow at once, in the same flight."""
        self._send(hello, frame_bytes_max=limits.FRAME_BEFORE_HELLO_BYTES_MAX)
        self._offered = _known_capabilities(hello.capabilities)
        self._counts = m.RESUME in self._offered  # calls in the same flight are frames of the session
        self._greet_by = self._now + limits.HELLO_TIMEOUT_S

    def send_welcome(self, welcome: m.Welcome) -> None:
        """Server: accept the client; what it sent after its HELLO is read from now on."""
        self._send(welcome)
        self._agree(welcome)
        self._greet_by = None
        self._in.frame_bytes_max = limits.FRAME_BYTES_MAX

    def _agree(self, welcome: m.Welcome) -> None:
        self.capabilities = tuple(name for name in self._offered if name in welcome.capabilities)
        self._counts = m.RESUME in self.capabilities
        if not self._counts:
            self.release()

    def send_goaway(
        self, code: Code, reason: str = "", *, spread_s: float = 0.0, retry_after_s: float | None = None
    ) -> None:
        """Ask the peer to leave; its calls up to now are still served."""
        spread, retry = milliseconds(spread_s) or 0, milliseconds(retry_after_s)
        self._send(m.GoAway(code, self._peer_call, reason[: limits.REASON_CHARS_MAX], spread, retry))

    def close(self, code: int = Code.OK, reason: str = "", *, retry_after_s: float | None = None) -> None:
        """Say CLOSE and be done; a second time it does nothing. A `Closed` event follows."""
        if self.state is not State.CLOSED:
            self._end(code, reason, retry_after_s=retry_after_s)

    def _end(self, code: int, reason: str, *, retry_after_s: float | None = None, silent: bool = False) -> None:
        reason = reason[: limits.REASON_CHARS_MAX]
        self._send(m.Close(code, reason, milliseconds(retry_after_s)))
        if not silent:
            self._events.append(e.Closed(code, reason, retry_after_s))

    def _lost(self, code: Code, reason: str) -> None:
        self._eof = False
        if not self.resumable:
            self.state = State.CLOSED
        self._events.append(e.Closed(code, reason, lost=True))

    # -- from one transport to the next --------------------------------------------------------------------------

    @property
    def resumable(self) -> bool:
        """True where the session can outlive its transport."""
        return self._counts and not self._left and self.state in (State.OPEN, State.DRAINING)

    @property
    def received(self) -> int:
        """Frames of the session received so far, to be named in HELLO or WELCOME."""
        return self._kept.received if self._kept is not None else 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of frames that wait for the peer's confirmation."""
        return self._kept.size if self._kept is not None else 0

    def detach(self, sent_bytes: int = 0) -> None:
        """The transport is gone; the session goes on without one. Frames that count are kept, others are not said.

        Args:
            sent_bytes: how many of all bytes put out on the transport were handed to the kernel.
        """
        if not self.resumable:
            raise LocalProtocolError("this session cannot outlive its connection")
        if self.detached:
            return
        self.detached = True
        self.state = State.OPEN  # a GOAWAY was about the connection that is gone
        self._in = frames.FrameBuffer(limits.FRAME_BYTES_MAX)
        self._out.clear()
        self._ping, self._eof = None, False
        for call in self._calls.values():
            call.offset = _DELIVERED if sent_bytes > call.offset else _NOT_SENT

    def can_resume(self, received: int) -> bool:
        """Say whether a peer that has received so many of our frames can be given all that follow."""
        ledger = self._kept
        return self.resumable and (received == 0 if ledger is None else ledger.after(received) is not None)

    def resume(self, greeting: "Connection", received: int, now: float) -> None:
        """Go on over the transport on which `greeting` has met the peer; that machine is used up by it.

        What the peer has not received is sent again, without the calls that were given up meanwhile.

        Call it as soon as `greeting` has sent or received the WELCOME, before anything else is read from it.

        Args:
            greeting: a machine of the same role.
            received: how many of our frames the peer has received.
            now: monotonic seconds.

        Raises:
            LocalProtocolError: `can_resume` says no.
        """
        if not self.can_resume(received):
            raise LocalProtocolError(f"the frames behind the first {received} are not kept")
        if not self.detached:
            self.detach()
        self.detached = False
        self._now = self._last_frame = now
        self._in, self._out, self._eof = greeting._in, greeting._out, greeting._eof
        again: list[bytes] = []
        places: dict[int, int] = {}
        if self._kept is not None:
            self._kept.confirmed(received)
            self._kept.tell()
            again, places = still_wanted(self._kept.after(received) or [], self._calls)
            self._kept.replace(again)
        begins = kept.offsets(greeting._queued_bytes, again)
        for call_id, call in self._calls.items():
            call.offset = begins[places[call_id]] if call_id in places else _DELIVERED
        self._out += again
        self._queued_bytes = greeting._queued_bytes + sum(map(len, again))

    def release(self) -> None:
        """Keep no frames any more; for a session that has ended."""
        if self._kept is not None:
            self._kept.release()
            self._kept = None

    def _ledger(self) -> kept.Kept:
        if self._kept is None:
            self._kept = kept.Kept(self._room or kept.Room(limits.KEPT_BYTES_MAX))
        return self._kept

    def _confirm(self) -> None:
        """Say what was received since it was said last."""
        if self._kept is not None and self._kept.received > self._kept.told:
            self._send(m.Received(self._kept.tell()))

    # -- calls of ours -------------------------------------------------------------------------------------------

    @property
    def can_call(self) -> bool:
        """True where `send_call` is allowed now."""
        return (
            states.after_send(self.role, self.state, m.Call) is not None
            and len(self._calls) - self._peer_calls_open < limits.CALLS_IN_FLIGHT_MAX
        )

    def send_call(
        self,
        gate: str,
        method: str,
        *,
        target: str = "",
        headers: m.Headers = (),
        body: bytes = b"",
        more: bool = False,
        deadline_s: float | None = None,
    ) -> int:
        """Open a call; give its id. `body` is at most `limits.CHUNK_BYTES_MAX`, the rest goes by `send_data`."""
        if len(self._calls) - self._peer_calls_open >= limits.CALLS_IN_FLIGHT_MAX:
            raise LocalProtocolError(f"{limits.CALLS_IN_FLIGHT_MAX} calls are open, no more are allowed")
        check_chunk(body, headers)
        call_id, offset = self._next_call, self._queued_bytes
        self._send(m.Call(call_id, gate, method, target, headers, body, more, milliseconds(deadline_s)))
        self._next_call += 2
        call = OpenCall(ours=True, sending=more, receiving=True, offset=_NOT_SENT if self.detached else offset)
        call.send_credit -= len(body)
        self._calls[call_id] = call
        return call_id

    def send_cancel(self, call_id: int, code: Code = Code.CALL_CANCELLED) -> None:
        """Give a call of ours up; no event about it follows. Harmless where it has already ended."""
        call = self._calls.get(call_id)
        if call is None or not call.ours:
            return
        if states.after_send(self.role, self.state, m.Cancel) is not None:
            self._send(m.Cancel(call_id, code))
        self._forget(call_id)

    def _own(self, call_id: int) -> OpenCall:
        call = self._calls.get(call_id)
        if call is None or not call.ours:
            raise LocalProtocolError(f"call {call_id} is not an open call of ours")
        return call

    # -- calls of the peer ---------------------------------------------------------------------------------------

    def send_reply(
        self, call_id: int, status: int, *, headers: m.Headers = (), body: bytes = b"", more: bool = False
    ) -> None:
        """Answer a call of the peer; `body` is at most one chunk, the rest goes by `send_data`."""
        call = self._theirs(call_id)
        if call.answered:
            raise LocalProtocolError(f"call {call_id} is answered already")
        check_chunk(body, headers)
        self._send(m.Reply(call_id, status, headers, body, more))
        call.answered = True
        call.sending = more
        call.send_credit -= len(body)
        self._forget_if_done(call_id, call)

    def send_fail(
        self,
        call_id: int,
        code: int,
        reason: str = "",
        *,
        retry_after_s: float | None = None,
        maybe_delivered: bool = False,
    ) -> None:
        """End a call of the peer without (the rest of) an answer."""
        self._theirs(call_id)
        reason = reason[: limits.REASON_CHARS_MAX]
        self._send(m.Fail(call_id, code, reason, milliseconds(retry_after_s), maybe_delivered))
        self._forget(call_id)

    def is_open(self, call_id: int) -> bool:
        """True while the call, of either side, has not ended."""
        return call_id in self._calls

    def _theirs(self, call_id: int) -> OpenCall:
        call = self._calls.get(call_id)
        if call is None or call.ours:
            raise LocalProtocolError(f"call {call_id} is not an open call of the peer")
        return call

    # -- bodies --------------------------------------------------------------------------------------------------

    def send_data(self, call_id: int, body: bytes, *, end: bool = False, trailers: m.Headers = ()) -> None:
        """Send a further chunk of a call's or a reply's body, at most `credit(call_id)` bytes of it."""
        call = self._calls.get(call_id)
        if call is None or not call.sending:
            raise LocalProtocolError(f"call {call_id}: no body is being sent")
        check_chunk(body, trailers)
        if len(body) > call.send_credit:
            raise LocalProtocolError(f"call {call_id}: {len(body)} bytes with credit for {call.send_credit}")
        self._send(m.Data(call_id, body, end, trailers))
        call.send_credit -= len(body)
        if end:
            call.sending = False
            self._forget_if_done(call_id, call)

    def credit(self, call_id: int) -> int:
        """Body bytes that may be sent on the call now; 0 where it is over."""
        call = self._calls.get(call_id)
        return call.send_credit if call is not None and call.sending else 0

    def consume(self, call_id: int, size: int) -> None:
        """`size` received body bytes have been used up: the peer gets new credit, in steps of half a window.

        Bytes of CALL and REPLY count like those of DATA. Does nothing where no more of the body is to come.
        """
        call = self._calls.get(call_id)
        if call is None or not call.receiving:
            return
        if (granted := call.use(call_id, size)) and states.after_send(self.role, self.state, m.Credit):
            self._send(m.Credit(call_id, granted))
            call.grant_peer(granted)

    # -- push and liveness ---------------------------------------------------------------------------------------

    @property
    def can_push(self) -> bool:
        """True where `send_push` is allowed now: open, and fewer than the bound unacknowledged."""
        return states.after_send(self.role, self.state, m.Push) is not None and (
            self._pushes is None or len(self._pushes.unacked) < limits.PUSHES_UNACKED_MAX
        )

    def send_push(
        self,
        push_id: str,
        body: bytes,
        *,
        topic: str = "",
        headers: m.Headers = (),
        expires_ms: int | None = None,
    ) -> int:
        """Server: push to the device; give the sequence that `PushAcked` will name."""
        pushes = self._pushes or self._account()
        self._send(pushes.next(push_id, body, topic, headers, expires_ms))
        return pushes.sent()

    def _account(self) -> Pushes:
        if self._pushes is None:
            self._pushes = Pushes()
        return self._pushes

    def send_notice(self, version: int, hosts: tuple[str, ...] = ()) -> None:
        """Server: tell the client that its plan has changed; only where the capability `plan` is in force."""
        if fault := self._notice_fault(version, hosts):
            raise LocalProtocolError(fault)
        self._send(m.Notice(version, hosts))

    def _notice_fault(self, version: int, hosts: tuple[str, ...]) -> str:
        if m.PLAN not in self.capabilities:
            return "notice without the capability"
        if not 0 <= version <= limits.PLAN_VERSION_MAX:
            return f"notice of version {version}"
        if len(hosts) > limits.PLAN_HOSTS_MAX or any(len(host) > limits.NOTICE_HOST_CHARS_MAX for host in hosts):
            return f"notice of {len(hosts)} hosts, or of a host with too long a name"
        return ""

    def send_ack(self, seq: int) -> None:
        """Client: the application has taken push `seq` over. A second time it does nothing."""
        if self._pushes is not None and seq in self._pushes.unacked:
            self._send(m.Ack((seq,)))
            self._pushes.unacked.discard(seq)

    def ping(self, now: float, within_s: float | None = None) -> None:
        """Ask the peer for a sign of life; `PongReceived` or, after the bound, `Closed` follows.

        Args:
            now: monotonic seconds.
            within_s: the bound, `limits.HEARTBEAT_ANSWER_S` unless given. Nothing changes where it was asked already.
        """
        self._now = now
        if self._ping is None and not self.detached:
            self._send(m.Ping(self._ping_nonce + 1))
            self._ping_nonce += 1
            self._ping = (self._ping_nonce, now, limits.HEARTBEAT_ANSWER_S if within_s is None else within_s)
            self._confirm()

    # -- inside --------------------------------------------------------------------------------------------------

    def _send(self, message: m.Message, *, frame_bytes_max: int = limits.FRAME_BYTES_MAX) -> None:
        kind = type(message)
        state = states.after_send(self.role, self.state, kind)
        if state is None:
            raise LocalProtocolError(f"{self.role} may not send {kind.__name__} in state {self.state}")
        counted = self._counts and kind in states.COUNTED
        if self.detached and not counted and kind is not m.Close:
            raise LocalProtocolError(f"{kind.__name__} belongs to a connection, and there is none")
        try:
            frame = frames.encode(message)
        except ValueError as error:
            raise LocalProtocolError(str(error)) from error
        if len(frame) - frames.PREFIX_BYTES > frame_bytes_max:
            raise LocalProtocolError(f"{kind.__name__} of {len(frame)} bytes, at most {frame_bytes_max}")
        if counted:
            self._ledger().add(frame)
        self.state = state
        if not self.detached:
            self._out.append(frame)
            self._queued_bytes += len(frame)

    def _forget(self, call_id: int) -> None:
        call = self._calls.pop(call_id)
        if not call.ours:
            self._peer_calls_open -= 1

    def _forget_if_done(self, call_id: int, call: OpenCall) -> None:
        """A call ends with its answer, on both sides alike; what is left of the question is dropped."""
        if not call.ours and call.answered and not call.sending:
            self._forget(call_id)

    def _receive(self, message: m.Message) -> None:
        kind = type(message)
        before = self.state
        state = states.after_receive(self.role, before, kind)
        if state is None:
            raise RemoteProtocolError(f"{kind.__name__} is not allowed in state {self.state}")
        if self._counts and kind in states.COUNTED and self._ledger().take(self._in.frame_bytes):
            self._confirm()
        _RECEIVERS[kind](self, message)
        if state is not before and State.CLOSED not in (self.state, state):  # a CLOSE decides for itself
            self.state = state

    def _receive_hello(self, hello: m.Hello) -> None:
        if m.VERSION not in hello.versions:
            raise RemoteProtocolError(
                f"protocol versions {hello.versions[:8]} offered, this side speaks {m.VERSION}",
                Code.VERSION_UNSUPPORTED,
            )
        self._offered = _known_capabilities(hello.capabilities)
        self._events.append(e.HelloReceived(hello))

    def _receive_welcome(self, welcome: m.Welcome) -> None:
        if welcome.version != m.VERSION:
            raise RemoteProtocolError(f"version {welcome.version} chosen", Code.VERSION_UNSUPPORTED)
        for span in (welcome.resume_window_s, welcome.heartbeat_s, welcome.return_spread_s):
            if not 0 <= span <= limits.WIRE_SECONDS_MAX:  # also not a number: no timer could run on it
                raise RemoteProtocolError(f"time span of {span} s in the WELCOME")
        self._greet_by = None
        self._agree(welcome)
        self._events.append(e.Welcomed(welcome))

    def _receive_goaway(self, goaway: m.GoAway) -> None:
        self._left = True
        retry = seconds(goaway.retry_after_ms)
        reason = goaway.reason[: limits.REASON_CHARS_MAX]
        self._events.append(e.GoingAway(goaway.code, reason, max(0, goaway.spread_ms) / 1000, retry))
        for call_id in [i for i, call in self._calls.items() if call.ours and i > goaway.last_call]:
            answered = self._calls[call_id].answered  # then the peer contradicts itself: stay careful
            self._forget(call_id)
            self._events.append(e.CallFailed(call_id, goaway.code, reason, retry, answered))

    def _receive_close(self, close: m.Close) -> None:
        # One that asks for a new token or plan leaves the session for the connection that comes with it.
        if not (self.resumable and codes.action(close.code) is codes.Action.RENEW):
            self.state = State.CLOSED
        reason = close.reason[: limits.REASON_CHARS_MAX]
        self._events.append(e.Closed(close.code, reason, seconds(close.retry_after_ms), by_peer=True))

    def _receive_notice(self, notice: m.Notice) -> None:
        if fault := self._notice_fault(notice.version, notice.hosts):
            raise RemoteProtocolError(fault)
        self._events.append(e.NoticeReceived(notice.version, notice.hosts))

    def _receive_call(self, call: m.Call) -> None:
        if call.id % 2 == self._next_call % 2 or call.id <= self._peer_call:
            raise RemoteProtocolError(f"call id {call.id} after {self._peer_call}")
        check_body(call.id, call.body)
        check_headers(call.headers)
        self._peer_call = call.id
        entry = OpenCall(ours=False, sending=False, receiving=call.more, offset=0)
        entry.receive_credit -= len(call.body)
        self._calls[call.id] = entry
        self._peer_calls_open += 1
        if self.state is State.DRAINING:
            self.send_fail(call.id, Code.GOING_AWAY, "this connection takes no new calls")
        elif self._peer_calls_open > limits.CALLS_IN_FLIGHT_MAX:
            self.send_fail(call.id, Code.CALL_TOO_MANY, f"more than {limits.CALLS_IN_FLIGHT_MAX} calls are open")
        else:
            self._events.append(
                e.CallReceived(
                    call.id,
                    call.gate,
                    call.method,
                    call.target,
                    call.headers,
                    call.body,
                    call.more,
                    seconds(call.deadline_ms),
                )
            )

    def _known(self, call_id: int, *, ours: bool | None = None) -> OpenCall | None:
        """Find the call a message is about; None where it has ended; an id never used is a violation."""
        mine = call_id % 2 == self._next_call % 2
        if (ours is not None and mine is not ours) or call_id < 1:
            raise RemoteProtocolError(f"message about call {call_id}, which is not of the right side")
        if call_id >= self._next_call if mine else call_id > self._peer_call:
            raise RemoteProtocolError(f"message about call {call_id}, which was never opened")
        return self._calls.get(call_id)

    def _receive_reply(self, reply: m.Reply) -> None:
        check_body(reply.id, reply.body)
        check_headers(reply.headers)
        call = self._known(reply.id, ours=True)
        if call is None:
            return
        if call.answered:
            raise RemoteProtocolError(f"second reply to call {reply.id}")
        call.answered = True
        call.receiving = reply.more
        call.take(reply.id, len(reply.body))
        if not reply.more:
            self._forget(reply.id)
        self._events.append(e.ReplyReceived(reply.id, reply.status, reply.headers, reply.body, reply.more))

    def _receive_data_message(self, data: m.Data) -> None:
        check_body(data.id, data.body)
        check_headers(data.trailers)
        call = self._known(data.id)
        if call is None:
            return
        if not call.receiving or (call.ours and not call.answered):
            raise RemoteProtocolError(f"body bytes for call {data.id}, which expects none")
        call.take(data.id, len(data.body))
        if data.end:
            call.receiving = False
            if call.ours:
                self._forget(data.id)
        self._events.append(e.DataReceived(data.id, data.body, data.end, data.trailers))

    def _receive_credit(self, credit: m.Credit) -> None:
        call = self._known(credit.id)
        if credit.size < 1:
            raise RemoteProtocolError(f"credit of {credit.size} bytes for call {credit.id}", Code.FLOW_CONTROL)
        if call is None or (not call.sending and call.ours):
            return
        call.grant(credit.id, credit.size)  # a caller may do so before our answer begins
        if call.sending:
            self._events.append(e.CreditGranted(credit.id, call.send_credit))

    def _receive_cancel(self, cancel: m.Cancel) -> None:
        if self._known(cancel.id, ours=False) is not None:
            self._forget(cancel.id)
            self._events.append(e.CallCancelled(cancel.id, cancel.code))

    def _receive_fail(self, fail: m.Fail) -> None:
        if self._known(fail.id, ours=True) is not None:
            self._forget(fail.id)
            retry = seconds(fail.retry_after_ms)
            reason = fail.reason[: limits.REASON_CHARS_MAX]
            self._events.append(e.CallFailed(fail.id, fail.code, reason, retry, fail.maybe_delivered))

    def _receive_push(self, push: m.Push) -> None:
        self._account().take(push)
        self._events.append(e.PushReceived(push.seq, push.id, push.topic, push.headers, push.body, push.expires_ms))

    def _receive_ack(self, ack: m.Ack) -> None:
        if fresh := self._account().acked(ack.seqs):
            self._events.append(e.PushAcked(fresh))

    def _receive_received(self, received: m.Received) -> None:
        if m.RESUME not in self.capabilities:
            raise RemoteProtocolError("confirmation without the capability")
        if not self._ledger().confirmed(received.count):
            raise RemoteProtocolError(f"confirmation of {received.count} frames, more than were sent")

    def _receive_ping(self, ping: m.Ping) -> None:
        self._send(m.Pong(ping.nonce))
        self._confirm()

    def _receive_pong(self, pong: m.Pong) -> None:
        if self._ping is not None and pong.nonce == self._ping[0]:
            self._events.append(e.PongReceived(max(0.0, self._now - self._ping[1])))
            self._ping = None


_RECEIVERS: Final[Mapping[type[m.Message], Callable[[Connection, Any], None]]] = {
    m.Hello: Connection._receive_hello,
    m.Welcome: Connection._receive_welcome,
    m.Close: Connection._receive_close,
    m.Call: Connection._receive_call,
    m.Data: Connection._receive_data_message,
    m.Reply: Connection._receive_reply,
    m.Fail: Connection._receive_fail,
    m.Cancel: Connection._receive_cancel,
    m.Credit: Connection._receive_credit,
    m.Push: Connection._receive_push,
    m.Ack: Connection._receive_ack,
    m.Ping: Connection._receive_ping,
    m.Pong: Connection._receive_pong,
    m.GoAway: Connection._receive_goaway,
    m.Notice: Connection._receive_notice,
    m.Received: Connection._receive_received,
}


def _known_capabilities(names: tuple[str, ...]) -> tuple[str, ...]:
    """Keep what we know: a list of our own making, however long the peer's is."""
    return tuple(sorted(m.CAPABILITIES.intersection(names)))


def explain(closed: e.Closed) -> str:
    """Say in words why a connection is over."""
    who = "the peer closed it" if closed.by_peer else "it was lost" if closed.lost else "we closed it"
    return f"{who} ({codes.name(closed.code)}{': ' + closed.reason if closed.reason else ''})"
