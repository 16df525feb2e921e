"""`Channel`: calls both ways and pushes over the long connection, for applications."""

import asyncio
import contextlib
import inspect
import json
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from stormline.client.binding import bind
from stormline.client.link import Link, LinkCall
from stormline.client.longline import LongLine
from stormline.client.ownprotocol import OwnProtocol
from stormline.client.runtime import Runtime
from stormline.client.trace import CallTrace
from stormline.core import errors, ids, limits, limits_outbox, limits_platform
from stormline.core.codes import Code
from stormline.core.phase import Phase
from stormline.policy.activity import Activity
from stormline.policy.means import Means, Step
from stormline.policy.resend import may_resend
from stormline.wire import events as e
from stormline.wire import messages

if TYPE_CHECKING:
    from stormline.client.outbox import Outbox, Told, Waiting

_log = logging.getLogger("stormline.client")
Handler = Callable[[Any], Any | Awaitable[Any]]


class _Delivery:
    """How one message came last, and what became of it.

    Attributes:
        link: the connection it came on.
        seq: its number there.
        acked: the application has confirmed it.
    """

    __slots__ = ("acked", "link", "seq")

    def __init__(self, link: Link, seq: int) -> None:
        self.link = link
        self.seq = seq
        self.acked = False

    def again(self, link: Link, seq: int) -> None:
        """It came once more: the sender did not hear of the confirmation, or there was none yet."""
        self.link, self.seq = link, seq
        if self.acked:
            link.ack(seq)


@dataclass(frozen=True, slots=True)
class Push:
    """A message that was pushed to this device.

    Attributes:
        id: the message's own id; the same message comes at most once out of one channel.
        topic: what it belongs to, empty for the device itself.
        body: its content as it was sent.
        headers: metadata.
    """

    id: str
    topic: str
    body: bytes = field(repr=False)
    headers: messages.Headers = field(repr=False)
    _delivery: _Delivery = field(repr=False)

    def json(self) -> Any:
        """Read the body as JSON; raises ValueError where it is none."""
        return json.loads(self.body)

    def ack(self) -> None:
        """Confirm that the application has taken the message over.

        Where the connection is lost just now, the message is confirmed when it comes again; it is not shown again.
        """
        self._delivery.acked = True
        self._delivery.link.ack(self._delivery.seq)


class Channel:
    """One application's end of the long connection. Get it from `AsyncClient.channel()`.

    Use it as a context manager. While it is open the connection is kept and reopened after losses. Calls may be made
    by any number of tasks of the loop at once; one task at a time iterates over `pushes()`.
    """

    def __init__(self, runtime: Runtime, longline: LongLine) -> None:
        self._runtime = runtime
        self._longline = longline
        self._handlers: dict[str, Handler] = {}
        self._pushes: deque[Push] = deque()
        self._seen: OrderedDict[str, _Delivery] = OrderedDict()
        self._wake = asyncio.Event()
        self._welcomed = asyncio.Event()
        self._serving: dict[tuple[int, int], _DeviceCall] = {}
        self._open = False
        self._link: Link | None = None
        self._outbox: Outbox | None = None
        self._told: list[Told] = []
        self.session: messages.Welcome | None = None

    async def __aenter__(self) -> Self:
        """Open it; returns at once, the connection is made in the background (`wait_connected`)."""
        if self._longline.listener is not None:
            raise errors.LocalProtocolError("this client has an open channel already")
        self._open = True
        self._longline.listener = self
        self._longline.keep()
        link = self._longline.link
        if link is not None and link.welcome is not None:
            self.line_welcomed(link, link.welcome)
        path = self._outbox_path()
        if path is not None and path.exists():
            self._open_outbox()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close it; calls in flight go on, pushes not yet acknowledged stay so."""
        self._open = False
        if self._outbox is not None:
            await self._outbox.close()
            self._outbox = None
        self._longline.listener = None
        self.session = self._link = None
        await self._longline.unkeep()
        self._wake.set()
        self._welcomed.set()
        for call in list(self._serving.values()):
            call.task.cancel()
        await asyncio.gather(*(call.task for call in self._serving.values()), return_exceptions=True)

    def set_activity(self, activity: Activity | str) -> None:
        """Say what the user does with the app, for the whole client; see `AsyncTransport.set_activity`."""
        self._runtime.set_activity(activity)

    async def wait_connected(self) -> messages.Welcome:
        """Wait for a session; give the gateway's greeting.

        Raises:
            RefusedError: the gateway refused for good.
            LocalProtocolError: the channel was closed.
        """
        while self._open:
            if self.session is not None:
                return self.session
            refusal = self._longline.last_refusal
            if refusal is not None and self._longline.stopped:
                raise refusal
            self._welcomed.clear()
            await self._welcomed.wait()
        raise errors.LocalProtocolError("the channel is closed")

    # -- calls to the server -----------------------------------------------------------------------------------------

    async def call(
        self, method: str, params: Any = None, *, deadline_s: float | None = None, idempotency_key: str = ""
    ) -> Any:
        """Call a business service and give its answer.

        A call that certainly did not reach the gateway is sent again within the deadline; one that may have is not,
        except with an idempotency key, which the service uses to do the work once.

        Args:
            method: dotted name, `orders.create`.
            params: anything JSON can carry.
            deadline_s: seconds for all of it; default the config's.
            idempotency_key: makes the call safe to repeat.

        Raises:
            ConfigError: `method` is not a method name, or the deadline is not above 0.
            TypeError: `params` cannot be put into JSON; ValueError where they hold a NaN or a circle.
            CallError: the service or the gateway said no.
            RefusedError: the gateway refused this device for good; nothing was sent.
            TransportError: it did not get there and back; see `maybe_delivered`.
        """
        ids.check_method(method)
        if deadline_s is None:
            deadline_s = self._runtime.config.deadline_s or limits.CALL_DEADLINE_S
        if not 0 < deadline_s <= limits.CALL_DEADLINE_MAX_S:
            raise errors.ConfigError(f"deadline_s={deadline_s!r}: at most {limits.CALL_DEADLINE_MAX_S:.0f}, above 0")
        return await self.deliver(method, _dump(params), idempotency_key, deadline_s)

    async def deliver(self, method: str, body: bytes, key: str, deadline_s: float, user: str | None = None) -> Any:
        """Make a call whose parameters are JSON already; see `call`. With a user: once, over that user's session."""
        trace = self._runtime.trace(method="CALL", host=method.partition(".")[0], path=method)
        plan = self._runtime.scheduling.plan if self._runtime.scheduling is not None else None
        trace.record.plan_version = plan.version if plan is not None else 0
        headers: messages.Headers = (("idempotency-key", key),) if key else ()
        try:
            answer = await self._call(method, body, headers, deadline_s, trace, user)
            trace.enter(Phase.PARSE)
            result = _parse(method, answer)
        except BaseException as error:
            trace.attempt_failed(error)
            trace.failed(error)
            raise
        trace.body_ended()
        return result

    async def _call(
        self,
        method: str,
        body: bytes,
        headers: messages.Headers,
        deadline_s: float,
        trace: CallTrace,
        user: str | None,
    ) -> bytes:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + deadline_s
        delivered: errors.TransportError | None = None  # an attempt that may have been; what comes after hides it not
        tries = 0
        while True:
            trace.attempt(Step(Means.LONG))
            tries += 1
            try:
                return await self._call_once(method, body, headers, ends_at, trace, user)
            except errors.CallError as error:
                error.maybe_delivered = error.maybe_delivered or delivered is not None
                raise
            except errors.TransportError as error:
                if isinstance(error.__cause__, errors.RefusedError) and self._longline.stopped:
                    # It is that error's cause: a circle would never end. What was sent before it stays told.
                    raise delivered or error.__cause__ from None
                if error.maybe_delivered:
                    delivered = error
                again = may_resend("POST", maybe_delivered=error.maybe_delivered, has_key=bool(headers))
                again = again and user is None
                if not again or tries >= limits.CALL_TRIES_MAX or loop.time() + self._longline.pause_s() >= ends_at:
                    raise delivered or error from None
                trace.attempt_failed(error)

    async def _call_once(
        self,
        method: str,
        body: bytes,
        headers: messages.Headers,
        ends_at: float,
        trace: CallTrace,
        user: str | None,
    ) -> bytes:
        small = len(body) <= limits.CHUNK_BYTES_MAX
        call, _ = await self._longline.call(
            trace,
            "rpc",
            method,
            ends_at=ends_at,
            headers=headers,
            body=body if small else b"",
            more=not small,
            user=user,
        )
        try:
            async with asyncio.timeout_at(ends_at) as timeout:
                if not small:
                    call.start_body(_once(body))
                trace.enter(Phase.FIRST_BYTE)
                reply = await call.reply()
                trace.answered(reply.status)
                return await _gather(call)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            call.doubt()
            raise errors.DeadlineExceeded(
                f"{method}: no whole answer before the deadline",
                phase=Phase(trace.timeline.stage),
                maybe_delivered=call.maybe_delivered,
            ) from error
        finally:
            call.cancel()

    # -- calls that are left -----------------------------------------------------------------------------------------

    async def enqueue(
        self,
        method: str,
        params: Any = None,
        *,
        id: str = "",
        lane: str = "",
        life_s: float = limits_outbox.OUTBOX_LIFE_S,
    ) -> str:
        """Leave a call that is made when there is a way, however long that takes; give its id.

        On return it lies on disk, where the client has a `Config.store`, and is made by the next channel that is opened
        with the same store even if this process is killed now; without a store it lies in memory. It is repeated under
        its id as idempotency key until the service answers. It belongs to the user who is logged in now, and waits
        while another one is. Cancelled, the call may or may not be kept: leave it again under the same id.

        Args:
            method: dotted name, `orders.create`.
            params: anything JSON can carry.
            id: the app's own, printable ASCII, drawn here where it gives none. One that waits here already is not left
                twice.
            lane: calls of one lane are made one after the other, in order; lanes do not wait for each other.
            life_s: seconds after which it is worth nothing any more.

        Raises:
            ConfigError: a name, the id or the life is not what it should be.
            TypeError: `params` cannot be put into JSON; ValueError where they hold a NaN or a circle.
            OutboxFull: too much waits already; nothing was kept.
            OutboxError: it could not be kept; the disk is full, say.
        """
        ids.check_method(method)
        if not self._open:
            raise errors.LocalProtocolError("the channel is closed")
        user = self.user
        if user is None:
            user = self._runtime.scheduling.user if self._runtime.scheduling is not None else ""
        return await self._open_outbox().put(method, _dump(params), user=user, id_=id, lane=lane, life_s=life_s)

    async def queued(self) -> "list[Waiting]":
        """Give the calls that were left and have not ended.

        Raises:
            OutboxError: they cannot be read.
        """
        return await self._open_outbox().waiting()

    async def withdraw(self, id: str) -> bool:
        """Take back a call that was left; False where it is under way, has ended, or was never left."""
        return await self._open_outbox().withdraw(id)

    def on_outcome(self, told: "Told") -> None:
        """Have `told` called, and awaited where it is async, with how each call that was left has ended.

        Say it before the channel is opened: calls of an earlier process may end at once. Each outcome is told at least
        once, and again after a crash in between.
        """
        self._told.append(told)

    def _outbox_path(self) -> Path | None:
        store, bundle = self._runtime.config.store, self._runtime.config.bundle
        return None if store is None or bundle is None else store / f"{bundle.app}.outbox"

    def _open_outbox(self) -> "Outbox":
        if self._outbox is None:
            from stormline.client.outbox import Outbox  # only who leaves calls pays for SQLite

            if not self._open:
                raise errors.LocalProtocolError("the channel is closed")
            runtime = self._runtime
            self._outbox = Outbox(
                self._outbox_path(), self, self._told, runtime.clock, runtime.rng, alone=runtime.owns_store
            )
        return self._outbox

    @property
    def user(self) -> str | None:
        """The user of the session that stands, empty where nobody is logged in; None where no session stands."""
        return None if self.session is None else self.session.user

    # -- whose the session is ----------------------------------------------------------------------------------------

    async def bind(self, token: str, *, deadline_s: float = limits.CALL_DEADLINE_S) -> messages.Welcome:
        """Let a user log in: have the session that stands be whose the token says, and every later one.

        Nothing is reconnected; calls under way stay whose they were, calls made after the return are the new user's.
        The app's backend makes the token, for this device (`tokens` of the platform). Where it expires or is refused
        later the device goes on as it was before.

        Args:
            token: a device token that names the user.
            deadline_s: seconds for all of it, a connection included.

        Returns:
            The session's greeting, with its user of now.

        Raises:
            CallError: the gateway refused the token; nothing has changed.
            TransportError: it is not known to be done; where it may be, the connection is given up, so that what
                follows is the earlier user's for certain.
        """
        scheduling = self._runtime.scheduling
        if scheduling is None:
            raise errors.LocalProtocolError("there is no platform")
        welcome = await self._bind(token, deadline_s)
        scheduling.bind(token)
        return welcome

    async def unbind(self, *, deadline_s: float = limits.CALL_DEADLINE_S) -> messages.Welcome:
        """Let the user log out: the session is whose it was before the first `bind`; else as `bind`."""
        scheduling = self._runtime.scheduling
        if scheduling is None:
            raise errors.LocalProtocolError("there is no platform")
        welcome = await self._bind(scheduling.own_token, deadline_s)
        scheduling.bind(None)
        return welcome

    async def _bind(self, token: str, deadline_s: float) -> messages.Welcome:
        link: Link | None = None
        try:
            async with asyncio.timeout(deadline_s) as timeout:
                while link is None or link.welcome is None:
                    await self.wait_connected()
                    link = self._link
                bound = await bind(link, token, deadline_s)
        except BaseException as error:
            if link is not None and not isinstance(error, errors.CallError):
                await link.close(reason="it is not known whose the session is")
            if isinstance(error, TimeoutError) and timeout.expired():
                raise errors.DeadlineExceeded(
                    "no answer whose the session is", phase=Phase.FIRST_BYTE, maybe_delivered=link is not None
                ) from error
            raise
        if self._link is link:
            self.session = bound
            if self._outbox is not None:
                self._outbox.welcomed()
        return bound

    # -- own protocols -----------------------------------------------------------------------------------------------

    def protocol(self, name: str, *, headers: messages.Headers = ()) -> OwnProtocol:
        """Give a handle to a protocol that a business has put on the gateway; use it as a context manager.

            async with channel.protocol("chess") as game:
                await game.send(b"e4")
                async for message in game: ...

        Args:
            name: the protocol id.
            headers: told to the protocol's plug-in with the opening.

        Raises:
            ConfigError: `name` is no protocol id.
        """
        return OwnProtocol(self._runtime, self._longline, ids.check_label(name, "protocol"), headers)

    # -- pushes ------------------------------------------------------------------------------------------------------

    async def pushes(self) -> AsyncIterator[Push]:
        """Give pushes as they come, until the channel is closed or the gateway refuses for good.

        Acknowledge each with `Push.ack()` when it is taken over; what is not comes again on the next connection.

        Raises:
            RefusedError: the gateway refused for good (another login of this device replaced it, say).
        """
        while self._open:
            self._wake.clear()  # first: the channel may be closed while the application has a push in hand
            while self._pushes:
                yield self._pushes.popleft()
            if self._longline.stopped and self._longline.last_refusal is not None:
                raise self._longline.last_refusal
            await self._wake.wait()

    # -- calls of the server -------------------------------------------------------------------------------------------

    def serve(self, method: str, handler: Handler) -> None:
        """Answer the server's calls of `method`: `handler(params)`, plain or async, gives what JSON can carry.

        An exception of the handler fails that call alone.
        """
        self._handlers[ids.check_method(method)] = handler

    # -- LineListener ------------------------------------------------------------------------------------------------

    def line_welcomed(self, link: Link, welcome: messages.Welcome) -> None:
        """See `LineListener`."""
        self._link = link
        self.session = welcome
        self._welcomed.set()
        if self._outbox is not None:
            self._outbox.welcomed()

    def line_push(self, link: Link, push: e.PushReceived) -> None:
        """See `LineListener`: a message seen before is not shown again, and confirmed again if it was."""
        delivery = self._seen.get(push.push_id)
        if delivery is not None:
            delivery.again(link, push.seq)
            return
        delivery = self._seen[push.push_id] = _Delivery(link, push.seq)
        if len(self._seen) > limits_platform.PUSH_IDS_REMEMBERED:
            self._seen.popitem(last=False)
        self._pushes.append(Push(push.push_id, push.topic, push.body, push.headers, delivery))
        self._wake.set()

    def line_call(self, link: Link, call: e.CallReceived) -> None:
        """See `LineListener`."""
        handler = self._handlers.get(call.method) if call.gate == "rpc" else None
        if handler is None:
            _fail(link, call.call_id, Code.CALL_NOT_FOUND, f"this device serves no {call.method[:80]!r}")
        elif len(self._serving) >= limits.DEVICE_CALLS_MAX:
            _fail(link, call.call_id, Code.CALL_TOO_MANY, "this device is busy")
        else:
            key = (id(link), call.call_id)
            self._serving[key] = _DeviceCall(link, call, handler, lambda: self._serving.pop(key, None))

    def line_call_data(self, link: Link, event: e.DataReceived | e.CallCancelled) -> None:
        """See `LineListener`."""
        serving = self._serving.get((id(link), event.call_id))
        if serving is None:
            return
        if isinstance(event, e.CallCancelled):
            serving.task.cancel()
        else:
            serving.data(event)

    def line_ended(self, link: Link, closed: e.Closed) -> None:
        """See `LineListener`: what the application has not seen will come again, so it is forgotten here."""
        for push in [push for push in self._pushes if push._delivery.link is link]:
            self._pushes.remove(push)
            self._seen.pop(push.id, None)
        for serving in list(self._serving.values()):
            if serving.link is link:
                serving.task.cancel()
        if self._link is link:
            self.session = self._link = None
        self._wake.set()
        self._welcomed.set()


class _DeviceCall:
    """One call of the server that this device works on."""

    def __init__(self, link: Link, call: e.CallReceived, handler: Handler, done: Callable[[], object]) -> None:
        self.link = link
        self._call = call
        self._handler = handler
        self._body = bytearray(call.body)
        self._whole = asyncio.Event()
        if not call.more:
            self._whole.set()
        self.task = asyncio.create_task(self._run(), name=f"stormline serve {call.method}")
        self.task.add_done_callback(lambda _: done())

    def data(self, event: e.DataReceived) -> None:
        """More of the parameters came."""
        self._body += event.body
        self.link.consume(event.call_id, len(event.body))
        if len(self._body) > limits.CALL_BODY_BYTES_MAX:
            _fail(self.link, event.call_id, Code.CALL_TOO_LARGE, f"more than {limits.CALL_BODY_BYTES_MAX} bytes")
            self.task.cancel()
        elif event.end:
            self._whole.set()

    async def _run(self) -> None:
        call = self._call
        try:
            async with asyncio.timeout(call.deadline_s or limits.CALL_DEADLINE_S):
                await self._whole.wait()
                result = self._handler(json.loads(self._body) if self._body else None)
                if inspect.isawaitable(result):
                    result = await result
            answer = json.dumps(result, separators=(",", ":")).encode()
        except TimeoutError:
            _fail(self.link, call.call_id, Code.CALL_DEADLINE, "the device took too long")
        except Exception as error:
            _log.exception("handler of %s failed", call.method)
            _fail(self.link, call.call_id, Code.CALL_FAILED, type(error).__name__)
        else:
            await self._answer(answer)

    async def _answer(self, answer: bytes) -> None:
        machine, call_id = self.link.machine, self._call.call_id
        if not machine.is_open(call_id) or self.link.closed is not None:
            return
        size = min(limits.CHUNK_BYTES_MAX, len(answer))
        machine.send_reply(call_id, 0, body=answer[:size], more=len(answer) > size)
        while size < len(answer) and machine.is_open(call_id) and self.link.closed is None:
            piece = answer[size : size + min(limits.CHUNK_BYTES_MAX, machine.credit(call_id))]
            if not piece:
                _fail(self.link, call_id, Code.CALL_TOO_LARGE, f"an answer has at most {limits.CREDIT_BYTES} bytes")
                return
            size += len(piece)
            machine.send_data(call_id, piece, end=size >= len(answer))
        self.link.flush()


def _fail(link: Link, call_id: int, code: Code, reason: str) -> None:
    if link.closed is None and link.machine.is_open(call_id):
        with contextlib.suppress(errors.LocalProtocolError):
            link.machine.send_fail(call_id, code, reason)
        link.flush()


def _dump(params: Any) -> bytes:
    body = json.dumps(params, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > limits.CALL_BODY_BYTES_MAX:
        raise errors.LocalProtocolError(f"call of {len(body)} bytes, at most {limits.CALL_BODY_BYTES_MAX}")
    return body


def _parse(method: str, answer: bytes) -> Any:
    try:
        return json.loads(answer) if answer else None
    except ValueError:
        raise errors.DecodeError(f"{method}: the answer is not JSON", phase=Phase.PARSE, maybe_delivered=True) from None


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _gather(call: LinkCall) -> bytes:
    gathered = bytearray()
    while chunk := await call.read():
        gathered += chunk
        if len(gathered) > limits.CALL_BODY_BYTES_MAX:
            raise errors.CallError(
                Code.CALL_TOO_LARGE, f"answer of more than {limits.CALL_BODY_BYTES_MAX} bytes", maybe_delivered=True
            )
    return bytes(gathered)
