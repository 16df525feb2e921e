"""A session on the server: what outlives the connections it is carried by.

A session is whose it is, the wire's machine, a task for each call that is not answered at once, and who is told what
became of each push. A carrier (`gateway.carrier`) brings it bytes and takes some; there is one at a time, or none for a
while:

- when the connection is lost the session waits for the client's next one, for a while and within bounds. Its calls run
  on, and what it has to say is kept;
- a call that fails, for whatever reason, ends as a FAIL for that call alone;
- when the session ends all its calls are cancelled and nothing of it stays.
"""

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from stormline.appgw.port import Answer, Delivery, Gate, Identity, Push, Told
from stormline.appgw.record import About
from stormline.core import errors, limits, limits_platform
from stormline.core.clock import Clock, Rng
from stormline.core.codes import Code
from stormline.core.errors import CallError
from stormline.gateway.asked import Asked
from stormline.gateway.binding import GATE, bind
from stormline.gateway.config import Quota
from stormline.gateway.exchange import CallExchange
from stormline.gateway.notices import Due
from stormline.gateway.registry import Registry
from stormline.gateway.resume import ResumeTokens, Waiting
from stormline.gateway.router import Router
from stormline.gateway.wheel import Wheel
from stormline.policy.intake import Intake
from stormline.wire import events as e
from stormline.wire import handover
from stormline.wire import messages as m
from stormline.wire.connection import Connection
from stormline.wire.kept import Room
from stormline.wire.states import State

_log = logging.getLogger("stormline.gateway")

_NO_QUOTA = Quota()
_TOO_LATE = CallError(Code.CALL_DEADLINE, "no answer in time", maybe_delivered=True)


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
        node: this node's name.
        resume_window_s: how long a session waits for its client after a loss; 0: it ends with its connection.
        opened: told of each session once it is welcomed, and what its client says of itself.
        closed: told when it has ended, unless it was replaced.
        described: told what the client says of itself as its session goes on here.
        bound: told whose a session is from now on.
        changes_due: says what a session of an app has yet to be told of changed plans (`gateway.notices`).
        resume_tokens: makes and checks resume tokens.
        waiting: the sessions that have no connection.
        wheel: the timers of all connections.
        room: what all sessions keep for their clients.
        quotas: what each app may take of this node.
        calls: calls in progress, by app.
        fetch: asks another node for a session (`gateway.handover`).
        connections: every connection, welcomed or not.
        greetings: greetings that wait for another node.
        tasks: every call in progress.
        left: set with each connection that is gone.
        intake: the pace of new connections, and whether one that says HELLO is too many.
        leaving: this node stops, and takes nobody any more.
        refusals: connections that were ended by this node with a code, by its name.
    """

    keys: Mapping[str, Mapping[str, Ed25519PublicKey]]
    router: Router
    registry: Registry
    clock: Clock
    rng: Rng
    unit: str
    heartbeat_s: float
    opened: Callable[[Identity, About], None]
    closed: Callable[[Identity], None]
    described: Callable[[Identity, About], None] = lambda identity, about: None
    bound: Callable[[Identity], None] = lambda identity: None
    changes_due: Callable[[str, int], Due | None] = lambda app, told: None
    node: str = "n1"
    resume_window_s: float = limits.RESUME_WINDOW_S
    resume_tokens: ResumeTokens = field(init=False)
    waiting: Waiting = field(init=False)
    wheel: Wheel = field(init=False)
    room: Room = field(default_factory=lambda: Room(limits_platform.KEPT_NODE_BYTES_MAX))
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    fetch: Callable[[str, Identity, str, int], Awaitable[tuple[str, handover.Snapshot] | None]] | None = None
    greetings: dict[asyncio.Task[None], None] = field(default_factory=dict)
    connections: dict["Connected", None] = field(default_factory=dict)  # dicts: in order, so that runs repeat
    tasks: dict[asyncio.Task[None], None] = field(default_factory=dict)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    intake: Intake = field(init=False)
    leaving: bool = False
    refusals: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.resume_tokens = ResumeTokens(self.node, self.rng)
        self.waiting = Waiting(self.resume_window_s)
        self.wheel = Wheel(asyncio.get_running_loop())
        self.intake = Intake(asyncio.get_running_loop().time())

    def quota(self, app: str) -> Quota:
        """Give what an app may take."""
        return self.quotas.get(app, _NO_QUOTA)


class Connected(Protocol):
    """A connection, as the node sees it."""

    def close(self, code: Code, reason: str) -> None:
        """End it, and its session, with a CLOSE."""
        ...

    def go_away(self, code: Code, reason: str, *, spread_s: float) -> None:
        """Ask the client to leave."""
        ...

    def abort(self) -> None:
        """Drop it without a word."""
        ...


class Carries(Protocol):
    """What a session needs of the connection that carries it."""

    @property
    def peer(self) -> str:
        """Address of the other end, for logs."""
        ...

    @property
    def paused(self) -> bool:
        """The peer does not read."""
        ...

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were written and that the kernel has not taken."""
        ...

    def pump(self) -> None:
        """Do what the machine tells, and send what it wants sent."""
        ...

    def flush(self) -> None:
        """Send what the machine wants sent."""
        ...

    def part(self) -> None:
        """Drop the connection: the session goes on elsewhere, or has ended. Bytes written before still leave."""
        ...


class Session:
    """One session, from its WELCOME to its end.

    Attributes:
        connection: the machine.
        identity: whose it is.
        earlier_token: resume token it had on the node it came from: the client may not have heard of the new one.
        peer: address of the other end of its last connection, for logs.
        network: kind of network its client said it is on.
        expires_at: when the client's token expires, in the loop's time.
    """

    # What only some sessions need (calls, pushes, a pause) is made at first use: most of them are idle.
    __slots__ = (
        "_asked",
        "_calls",
        "_carrier",
        "_hub",
        "_loop",
        "_over",
        "_pushes",
        "_told",
        "_turn",
        "_writable",
        "connection",
        "earlier_token",
        "expires_at",
        "identity",
        "network",
        "peer",
    )

    def __init__(
        self, hub: Hub, loop: asyncio.AbstractEventLoop, connection: Connection, identity: Identity, expires_at: float
    ) -> None:
        self._hub = hub
        self._loop = loop
        self._carrier: Carries | None = None
        self._over = False
        self._turn: asyncio.Lock | None = None
        self._writable: asyncio.Future[None] | None = None
        self._calls: dict[int, CallExchange] | None = None
        self._asked: dict[int, Asked] | None = None
        self._pushes: dict[int, Told] | None = None
        self._told = 0  # number of the last change of the plan that the client was told of
        self.connection = connection
        self.identity = identity
        self.earlier_token = ""
        self.expires_at = expires_at
        self.peer = ""
        self.network = "unknown"

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

    @property
    def waiting_bytes(self) -> int:
        """Bytes for its client that the kernel has not taken."""
        return self._carrier.waiting_bytes if self._carrier is not None else 0

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept until its client confirms them."""
        return self.connection.kept_bytes

    # -- its carriers --------------------------------------------------------------------------------------------

    def attach(self, carrier: Carries) -> None:
        """Go on over `carrier`; the one before can do nothing to the session any more."""
        earlier, self._carrier = self._carrier, carrier
        self.peer = carrier.peer
        if earlier is not None:
            earlier.part()
        self._hub.waiting.discard(self)
        self._add_notice()  # in the WELCOME's flight: also a client that was away when its plan changed hears of it
        self.wake()

    def lost(self, carrier: Carries, why: str) -> None:
        """The connection is gone: wait for the next one where the session can, else end.

        News of a connection that the session has left already changes nothing.
        """
        if self._over or self._carrier is not carrier:
            return
        if not self.connection.resumable or self._hub.resume_window_s <= 0:
            self.end(why)
            return
        self._carrier = None
        self.connection.detach()
        _log.info("%s waits for its client: %s", self._name(), why)
        self._hub.waiting.add(self)

    def wait(self) -> None:
        """Begin as one that has no connection: taken over from another node, and its client is gone again."""
        self._hub.waiting.add(self)

    async def give_away(self) -> handover.Snapshot:
        """Give all that another node needs to go on, and end here.

        Calls are given `limits_platform.HANDOVER_CALLS_S` to end; then they fail with `maybe_delivered`.

        Raises:
            LocalProtocolError: it cannot be had: it has ended meanwhile, or its client is back here.
        """
        carrier = self._carrier
        if carrier is not None:
            carrier.part()
            self.lost(carrier, "it goes to another node")
        running = [call.task for call in self._calls.values() if call.task is not None] if self._calls else []
        if running:
            await asyncio.wait(running, timeout=limits_platform.HANDOVER_CALLS_S)
        if self._over or self._carrier is not None:
            raise errors.LocalProtocolError("the session has ended, or its client is back")
        for call_id in list(self._calls or ()):
            self._fail(call_id, CallError(Code.CALL_UNAVAILABLE, "the node has changed", maybe_delivered=True))
        for call_id in self.connection.open_calls():
            self.connection.send_cancel(call_id)
        machine = handover.snapshot(self.connection)
        self.end("it goes on on another node")
        return machine

    # -- for the node --------------------------------------------------------------------------------------------

    def close(self, code: Code, reason: str, *, retry_after_s: float | None = None) -> None:
        """End the session with a CLOSE that is flushed for at most `limits.CLOSE_FLUSH_S`. May be called again."""
        if self._over:
            return
        carrier = self._carrier
        self.connection.close(code, reason, retry_after_s=retry_after_s)
        if carrier is not None:
            carrier.pump()
        self.end(reason)

    def push(self, push: Push, told: Told) -> None:
        """See `appgw.port.Downlink.push`. A session that waits for its client takes pushes in while it keeps little."""
        connection = self.connection
        if self._over or (self._carrier is None and connection.kept_bytes + len(push.body) > limits.KEPT_ROOM_BYTES):
            told(Delivery.OFFLINE)
            return
        if not connection.can_push:
            told(Delivery.BUSY)
            return
        seq = connection.send_push(push.push_id, push.body, topic=push.topic, expires_ms=push.expires_ms)
        if self._pushes is None:
            self._pushes = {}
        self._pushes[seq] = told
        if self._carrier is not None:
            self._carrier.flush()

    async def call(self, method: str, body: bytes, *, key: str, deadline_s: float) -> bytes:
        """Call the app on the device and give its answer. Cancelled, the device is told to stop.

        A session that waits for its client takes calls in while it keeps little.

        Raises:
            CallError: the device said no, did not answer in time, or its session has ended.
        """
        connection = self.connection
        if self._over or (self._carrier is None and connection.kept_bytes + len(body) > limits.KEPT_ROOM_BYTES):
            raise CallError(Code.CALL_UNAVAILABLE, "the device has no session")
        if not connection.can_call:
            raise CallError(Code.CALL_TOO_MANY, "too many calls wait for the device, or it is leaving")
        asked = Asked(self._loop)
        headers: m.Headers = (("idempotency-key", key),) if key else ()
        first = body[: limits.CHUNK_BYTES_MAX]
        more = len(body) > len(first)
        call_id = connection.send_call("rpc", method, headers=headers, body=first, more=more, deadline_s=deadline_s)
        for at in range(len(first), len(body), limits.CHUNK_BYTES_MAX):  # all of it is within the first credit
            end = at + limits.CHUNK_BYTES_MAX
            connection.send_data(call_id, body[at:end], end=end >= len(body))
        if self._asked is None:
            self._asked = {}
        self._asked[call_id] = asked
        self.flush()
        try:
            async with asyncio.timeout(deadline_s):
                return await asked.answer
        except TimeoutError as error:
            raise CallError(Code.CALL_DEADLINE, "the device did not answer in time", maybe_delivered=True) from error
        finally:
            if self._asked is not None:
                self._asked.pop(call_id, None)
            if connection.is_open(call_id):
                connection.send_cancel(call_id)
                self.flush()

    def tell_changes(self) -> None:
        """See `gateway.notices.Recipient.tell_changes`.

        To a client that does not read, or is away, nothing is said: what it has missed by then it is told in one
        message when it reads again.
        """
        if self._carrier is not None and not self._carrier.paused and self._add_notice():
            self.flush()

    def _add_notice(self) -> bool:
        connection = self.connection
        if self._over or connection.state not in (State.OPEN, State.DRAINING) or m.PLAN not in connection.capabilities:
            return False
        due = self._hub.changes_due(self.identity.app, self._told)
        if due is None:
            return False
        self._told = due.number
        connection.send_notice(due.version, due.hosts)
        return True

    # -- for its calls -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Hand what the machine has put out to the connection; without one it is kept."""
        if self._carrier is not None:
            self._carrier.flush()

    def _may_write(self) -> bool:
        if self._carrier is not None:
            return not self._carrier.paused
        return self._over or self.connection.kept_bytes <= limits.KEPT_ROOM_BYTES

    def _turn_is_free(self) -> bool:
        return self._turn is None or not self._turn.locked()

    def wake(self) -> None:
        """The peer reads again: let those who wait go on."""
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    async def wait_writable(self) -> None:
        """Wait until the peer has taken enough; those who wait go on in the order they came."""
        if self._may_write() and self._turn_is_free():
            return
        if self._turn is None:
            self._turn = asyncio.Lock()
        async with self._turn:
            while not self._may_write():
                self._writable = self._loop.create_future()
                try:
                    await self._writable
                finally:
                    self._writable = None

    # -- what the machine tells ------------------------------------------------------------------------------------

    def handle(self, event: e.Event) -> None:
        """Act on an event of the machine; its carrier brings it."""
        match event:
            case e.CallReceived():
                self._open_call(event)
            case e.PushAcked():
                for seq in event.seqs:  # none waits for a push of the node the session came from
                    if self._pushes and (told := self._pushes.pop(seq, None)) is not None:
                        told(Delivery.ACKED)
            case e.DataReceived():
                if call := self._call(event.call_id):
                    call.feed(event.body, end=event.end)
                else:
                    self._answered(event)
            case e.CreditGranted():
                if call := self._call(event.call_id):
                    call.credit_granted()
            case e.CallCancelled():
                call = self._calls.pop(event.call_id, None) if self._calls else None
                if call is not None and call.task is not None:
                    call.task.cancel()
            case e.ReplyReceived() | e.CallFailed():
                self._answered(event)
            case _:  # a client's GOAWAY, PONG: nothing to do, the machine keeps account
                pass

    def _answered(self, event: e.ReplyReceived | e.DataReceived | e.CallFailed) -> None:
        asked = self._asked.get(event.call_id) if self._asked else None
        if asked is not None:
            asked.take(event, self.connection)

    def _call(self, call_id: int) -> CallExchange | None:
        return self._calls.get(call_id) if self._calls else None

    # -- inside: calls -------------------------------------------------------------------------------------------

    def _open_call(self, event: e.CallReceived) -> None:
        if event.gate == GATE:
            self._bind(event)
            return
        try:
            gate = self._hub.router.route(event.gate)
            if event.deadline_s is not None and event.deadline_s <= 0:
                raise CallError(Code.CALL_DEADLINE, "the deadline had passed on arrival")
            if len(self._hub.tasks) >= limits_platform.GATEWAY_CALLS_MAX:
                raise CallError(
                    Code.CALL_UNAVAILABLE, "this node is overloaded", retry_after_s=limits_platform.CALL_RETRY_AFTER_S
                )
            if 0 < self._hub.quota(self.app).calls <= self._hub.calls.get(self.app, 0):
                raise CallError(
                    Code.CALL_TOO_MANY,
                    "the app has reached its quota",
                    retry_after_s=limits_platform.CALL_RETRY_AFTER_S,
                )
        except CallError as error:
            self._fail(event.call_id, error)
            return
        if self.connection.frames_waiting >= limits_platform.ANSWERS_JOINED_MAX:
            self.flush()
            if self._over:
                return
        exchange = CallExchange(self, self.identity, event, self._loop)
        try:
            work = gate.handle(exchange)
            if isinstance(work, Answer):
                if self._may_write() and self._turn_is_free() and exchange.answer(work):
                    return  # `pump` sends it
                work = exchange.reply(*work)
        except Exception as error:
            self._fail(event.call_id, self._failure(gate, error))
            return
        if self._calls is None:
            self._calls = {}
        self._calls[event.call_id] = exchange
        task = self._loop.create_task(work)
        exchange.begin(task)
        self._hub.tasks[task] = None
        self._hub.calls[self.app] = self._hub.calls.get(self.app, 0) + 1
        task.add_done_callback(functools.partial(self._served, exchange, gate))

    def _bind(self, event: e.CallReceived) -> None:
        """Let another user have the session, as a token of the same device says; calls under way stay whose they were.

        The resume token changes with the user: a client that has not heard of it begins a session of its own.
        """
        hub, earlier = self._hub, self.identity
        try:
            identity, token = bind(event, earlier, hub.keys[earlier.app], hub.clock.wall())
        except CallError as error:
            self._fail(event.call_id, error)
            return
        self.identity = identity
        self.expires_at = self._loop.time() + token.exp - hub.clock.wall()
        self.earlier_token = ""
        hub.bound(identity)
        _log.info("%s is another user's now", self._name())
        resume = hub.resume_tokens.mint(identity) if self.connection.resumable else ""
        body = msgspec.json.encode({"user": identity.user, "resume": resume})
        self.connection.send_reply(event.call_id, 0, body=body)

    def _served(self, exchange: CallExchange, gate: Gate, task: asyncio.Task[None]) -> None:
        """A call's task has ended; whatever happened in it ends here."""
        exchange.end()
        self._hub.tasks.pop(task, None)
        self._hub.calls[self.app] -= 1
        if self._call(exchange.call_id) is exchange and self._calls:
            del self._calls[exchange.call_id]
        if task.cancelled():
            error: BaseException | None = _TOO_LATE if exchange.expired else None
        else:
            error = task.exception()
            if isinstance(error, TimeoutError) and exchange.expired:
                error = _TOO_LATE
            elif error is None and self.connection.is_open(exchange.call_id):
                error = errors.LocalProtocolError("the application gateway did not finish its answer")
        if error is not None:
            self._fail(exchange.call_id, self._failure(gate, error))

    def _failure(self, gate: Gate, error: BaseException) -> CallError:
        """Give what the caller hears of a call that failed."""
        if isinstance(error, CallError):
            return error
        _log.error("%s: a call of gate %s failed", self._name(), gate.name, exc_info=error)
        return CallError(Code.CALL_FAILED, "internal error", maybe_delivered=True)

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

    # -- its end ---------------------------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """Stop everything that belongs to the session; the CLOSE, if any, is flushed already. Once."""
        if self._over:
            return
        self._over = True
        self._hub.waiting.discard(self)
        self.connection.release()
        calls, self._calls = self._calls, None
        for call in calls.values() if calls else ():
            if call.task is not None:
                call.task.cancel()
        for asked in self._asked.values() if self._asked else ():
            asked.fail(Code.CALL_UNAVAILABLE, "the device's session has ended", maybe_delivered=True)
        pushes, self._pushes = self._pushes, None
        for told in pushes.values() if pushes else ():
            told(Delivery.UNCONFIRMED)
        _log.info("%s ended: %s", self._name(), why)
        if self._hub.registry.remove(self):
            self._hub.closed(self.identity)
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.part()

    def _name(self) -> str:
        return f"session {self.identity.session} ({self.identity.app}/{self.identity.device!r})"
