"""Calling a device: from a business system to the node that holds the device's session, and down to the device.

`DeviceCalls` is the caller's side, on every node: businesses reach it by HTTP, or by a NATS request on
`device.<app>.<device>.<method>` (the device a token of `core.ids.subject_token`). `CallNode` is the receiving side, on
one subject for its node. There is no subscription for a device anywhere.

| what happens                                          | word          | number | maybe delivered      |
|-------------------------------------------------------|---------------|--------|----------------------|
| malformed app, device, method or deadline             | `bad-request` | 400    | no                   |
| the device has no session                             | `offline`     | 404    | no                   |
| the app on the device serves no such method           | `no-handler`  | 405    | no                   |
| the argument is too large                             | `too-large`   | 413    | no                   |
| the app on the device failed, or its answer is broken | `failed`      | 502    | yes                  |
| too much waits for the device, or on this node        | `busy`        | 503    | no                   |
| the engine is away                                    | `unavailable` | 503    | as the engine knows  |
| no answer by the deadline, or the session ended       | `deadline`    | 504    | yes                  |
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec

from stormline.appgw import subjects
from stormline.appgw.port import Lookup, Place
from stormline.core import errors, ids, limits, limits_platform
from stormline.core.clock import Rng
from stormline.core.codes import Code
from stormline.core.errors import CallError, RequestRefused
from stormline.engine.port import Handler, Listener, Message, Reply, Subscription, error_reply, reply_error

_log = logging.getLogger("stormline.appgw")

NUMBERS: Final = {
    "bad-request": 400,
    "offline": 404,
    "no-handler": 405,
    "too-large": 413,
    "failed": 502,
    "busy": 503,
    "unavailable": 503,
    "deadline": 504,
}
"""Number of each word, as in HTTP."""
_MAYBE: Final = frozenset({"failed", "deadline"})
_SUBJECT: Final = "device"
_GROUP: Final = "gateways"


class Requester(Protocol):
    """What the caller's side needs of the engine."""

    async def request(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, timeout_s: float
    ) -> Message:
        """See `engine.port.Engine.request`."""
        ...

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """See `engine.port.Engine.publish`."""
        ...


class Server(Protocol):
    """What the receiving side needs of the engine."""

    async def serve(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """See `engine.port.Engine.serve`."""
        ...

    async def subscribe(self, subject: str, handler: Listener, *, queue: str = "") -> Subscription:
        """See `engine.port.Engine.subscribe`."""
        ...


class Downlink(Protocol):
    """The way to the devices whose sessions this node holds."""

    async def call(self, app: str, device: str, method: str, body: bytes, *, key: str, deadline_s: float) -> bytes:
        """Call a device and give its answer; cancelled, the device is told.

        Raises:
            CallError: the device or its app said no, or did not answer; `CALL_UNAVAILABLE` where it is not here.
        """
        ...


class _Order(msgspec.Struct, frozen=True, array_like=True):
    """A call on its way to a node, as MessagePack. Fields are only ever added at the end, with a default."""

    call: str
    app: str
    device: str
    method: str
    body: bytes
    deadline_ms: int
    key: str = ""


_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(_Order)


def refused(word: str, message: str) -> RequestRefused:
    """Make the error of one of the words above."""
    return RequestRefused(
        word,
        message,
        retry_after_s=limits_platform.CALL_RETRY_AFTER_S if NUMBERS[word] == 503 else None,
        maybe_delivered=word in _MAYBE,
    )


class CallNode:
    """The receiving side: calls devices whose sessions are here, for other nodes."""

    def __init__(self, downlink: Downlink, *, unit: str, node: str) -> None:
        self._downlink = downlink
        self._unit = unit
        self._node = node
        self._running: dict[str, asyncio.Task[bytes]] = {}

    async def start(self, engine: Server) -> None:
        """Begin to take calls of other nodes; the interest outlives losses of the engine."""
        await engine.serve(subjects.of_node(self._unit, self._node, "call"), self._take)
        await engine.subscribe(subjects.of_node(self._unit, self._node, "uncall"), self._cancel)

    async def call(self, app: str, device: str, method: str, body: bytes, *, key: str, deadline_s: float) -> bytes:
        """Call a device here.

        Raises:
            RequestRefused: one of the words above.
        """
        try:
            return await self._downlink.call(app, device, method, body, key=key, deadline_s=deadline_s)
        except CallError as error:
            match error.code:
                case Code.CALL_NOT_FOUND:
                    word = "no-handler"
                case Code.CALL_UNAVAILABLE if not error.maybe_delivered:
                    word = "offline"
                case Code.CALL_TOO_MANY | Code.OVERLOADED:
                    word = "busy"
                case Code.CALL_DEADLINE | Code.CALL_UNAVAILABLE | Code.CALL_CANCELLED:
                    word = "deadline"
                case _:
                    word = "failed"
            raise refused(word, error.reason) from error

    async def _take(self, message: Message) -> Reply:
        try:
            order = _orders.decode(message.data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return error_reply(400, f"bad-request: {error}")
        work = self.call(
            order.app, order.device, order.method, order.body, key=order.key, deadline_s=order.deadline_ms / 1000
        )
        task = self._running[order.call] = asyncio.get_running_loop().create_task(work, name="gateway call of a device")
        try:
            await asyncio.wait([task])
        finally:
            del self._running[order.call]
            task.cancel()
        if task.cancelled():
            return error_reply(504, "deadline: the caller has given up")
        problem = task.exception()
        return Reply(task.result()) if problem is None else _said_no(problem)

    async def _cancel(self, message: Message) -> None:
        task = self._running.get(message.data.decode("ascii", "replace"))
        if task is not None:
            task.cancel()


class DeviceCalls:
    """The caller's side.

    Args:
        engine: the way to other nodes.
        directory: says where a device is.
        local: the receiving side of this node.
        unit: this unit.
        node: this node.
        apps: the apps served here: businesses call devices of no other.
        rng: draws ids.
    """

    def __init__(
        self,
        engine: Requester,
        directory: Lookup,
        local: CallNode,
        *,
        unit: str,
        node: str,
        apps: frozenset[str],
        rng: Rng,
    ) -> None:
        self._engine = engine
        self._directory = directory
        self._local = local
        self._unit = unit
        self._node = node
        self._apps = apps
        self._rng = rng

    async def start(self, engine: Server) -> Subscription:
        """Begin to take calls of businesses by NATS: each call goes to one of the nodes."""
        return await engine.serve(f"{_SUBJECT}.*.*.>", self._take, queue=_GROUP)

    async def call(
        self,
        app: str,
        device: str,
        method: str,
        body: bytes,
        *,
        key: str = "",
        deadline_s: float = limits.CALL_DEADLINE_S,
    ) -> bytes:
        """Call a device and give its answer. Cancelled, the device is told to stop.

        Args:
            app: application id.
            device: device id.
            method: dotted name, served by the app on the device.
            body: the argument, at most `limits.CREDIT_BYTES`.
            key: idempotency key, for the device.
            deadline_s: how long the caller waits.

        Raises:
            RequestRefused: one of the words above.
        """
        _check(app, device, method, body, deadline_s)
        end = asyncio.get_running_loop().time() + deadline_s
        place: Place | None = None
        for _ in range(2):  # once more where the device has moved meanwhile
            earlier = place
            try:
                place = await self._directory.lookup(app, device)
            except errors.EngineError as error:
                raise refused("unavailable", "the engine is away, and the device is not on this node") from error
            if place is None or (earlier is not None and earlier.session == place.session):
                break
            left_s = end - asyncio.get_running_loop().time()
            try:
                if place.node == self._node:
                    return await self._local.call(app, device, method, body, key=key, deadline_s=left_s)
                return await self._remote(place.node, app, device, method, body, key, left_s)
            except RequestRefused as error:
                if error.code != "offline":
                    raise
        raise refused("offline", "the device has no session")

    async def _remote(
        self, node: str, app: str, device: str, method: str, body: bytes, key: str, deadline_s: float
    ) -> bytes:
        order = _Order(ids.new_id(self._rng), app, device, method, body, max(1, round(deadline_s * 1000)), key)
        try:
            answer = await self._engine.request(
                subjects.of_node(self._unit, node, "call"),
                _encoder.encode(order),
                timeout_s=deadline_s + limits_platform.PUSH_REQUEST_MARGIN_S,
            )
        except asyncio.CancelledError:
            await self._tell_cancelled(node, order.call)
            raise
        except errors.NoResponders as error:  # the node has died; what it held is gone
            raise refused("offline", "the device has no session") from error
        except errors.EngineError as error:
            word = "deadline" if error.maybe_delivered else "unavailable"
            raise refused(word, "the engine is away, or the device's node does not answer") from error
        problem = reply_error(answer)
        if problem is None:
            return answer.data
        word, _, text = problem[1].partition(": ")
        raise refused(word if word in NUMBERS else "busy" if problem[0] == 503 else "failed", text or problem[1])

    async def _tell_cancelled(self, node: str, call: str) -> None:
        try:
            await self._engine.publish(subjects.of_node(self._unit, node, "uncall"), call.encode())
        except errors.EngineError as error:
            _log.info("a node was not told that a call was given up: %s", error)  # its deadline ends it

    async def _take(self, message: Message) -> Reply:
        _, app, token, method = message.subject.split(".", 3)
        try:
            if app not in self._apps:
                raise RequestRefused("bad-request", f"app {app[:64]!r} is not served here")
            device = ids.from_subject_token(token)
            deadline_s = _deadline_s(message.headers.get("Stormline-Deadline-Ms", ""))
            key = message.headers.get("Idempotency-Key", "")
            return Reply(await self.call(app, device, method, message.data, key=key, deadline_s=deadline_s))
        except errors.ConfigError as error:
            return error_reply(400, f"bad-request: {error}")
        except RequestRefused as error:
            return _said_no(error)


def _check(app: str, device: str, method: str, body: bytes, deadline_s: float) -> None:
    try:
        for name in (app, device):
            ids.subject_token(name)
        ids.check_method(method)
    except errors.ConfigError as error:
        raise refused("bad-request", str(error)) from error
    if not 0 < deadline_s <= limits.CALL_DEADLINE_MAX_S:
        raise refused("bad-request", f"deadline: expected more than 0, at most {limits.CALL_DEADLINE_MAX_S:.0f} s")
    if len(body) > limits.CREDIT_BYTES:
        raise refused("too-large", f"an argument has at most {limits.CREDIT_BYTES} bytes, this one has {len(body)}")


def _deadline_s(text: str) -> float:
    if not text:
        return limits.CALL_DEADLINE_S
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise refused("bad-request", "Stormline-Deadline-Ms: expected milliseconds")
    return int(text) / 1000


def _said_no(error: BaseException) -> Reply:
    if isinstance(error, RequestRefused) and error.code in NUMBERS:
        return error_reply(NUMBERS[error.code], f"{error.code}: {error}")
    _log.error("a call of a device failed: %r", error)
    return error_reply(502, "failed: internal error")
