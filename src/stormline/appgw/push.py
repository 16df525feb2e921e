"""The PUSH gateway: from a business system to the node that holds the device's session, and down to the device.

`PushService` is the sender's side, on every node. `PushNode` is the receiving side: it listens on one subject for its
node and hands pushes to the live sessions. Pushes are not stored in this version: what cannot be delivered now is
answered `offline`.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from stormline.appgw import subjects
from stormline.appgw.port import Delivery, Downlink, Lookup, Place, Push
from stormline.core import errors, ids, limits, limits_platform
from stormline.core.clock import Clock, Rng
from stormline.engine.port import Handler, Message, Reply, Subscription, error_reply, reply_error

_log = logging.getLogger("stormline.appgw")


class Requester(Protocol):
    """What the sender's side needs of the engine."""

    async def request(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, timeout_s: float
    ) -> Message:
        """See `engine.port.Engine.request`."""
        ...


class Server(Protocol):
    """What the receiving side needs of the engine."""

    async def serve(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """See `engine.port.Engine.serve`."""
        ...


class _Order(msgspec.Struct, frozen=True, array_like=True):
    """A push on its way to a node, as MessagePack. Fields are only ever added at the end, with a default."""

    app: str
    device: str
    push_id: str
    topic: str
    body: bytes
    expires_ms: int | None = None


_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(_Order)


@dataclass(frozen=True, slots=True)
class PushResult:
    """What became of a push.

    Attributes:
        delivery: the outcome.
        push_id: the push's id, drawn by us where the sender gave none.
        node: the node that had the device's session, empty where none had.
    """

    delivery: Delivery
    push_id: str
    node: str


class PushNode:
    """The receiving side: delivers to the sessions of this node, each push id once.

    A push sent again (its sender did not hear the answer, say) is not put on the wire a second time while the first
    may still be acknowledged on the same session, nor ever after it was: the sender gets the first one's outcome.
    The last `limits_platform.PUSH_RECENT_MAX` pushes are remembered.
    """

    def __init__(self, downlink: Downlink, *, unit: str, node: str, clock: Clock) -> None:
        self._downlink = downlink
        self._subject = subjects.of_node(unit, node, "push")
        self._clock = clock
        self._recent: OrderedDict[tuple[str, str, str], _Recent] = OrderedDict()
        self._waiting: dict[asyncio.Future[Delivery], None] = {}  # in order, so that runs repeat

    async def start(self, engine: Server) -> Subscription:
        """Begin to take pushes of other nodes; the interest outlives losses of the engine."""
        return await engine.serve(self._subject, self._take)

    def close(self) -> None:
        """Cancel those who wait for an acknowledgement."""
        for waiter in list(self._waiting):
            waiter.cancel()

    async def deliver(self, app: str, device: str, push: Push) -> Delivery:
        """Deliver to the device's session here, and wait at most `limits.PUSH_ACK_TIMEOUT_S` for its acknowledgement.

        Cancelled or unconfirmed, the push goes on to the device all the same, and a repetition hears of an
        acknowledgement that came meanwhile.
        """
        if push.expires_ms is not None and self._clock.wall() * 1000 >= push.expires_ms:
            return Delivery.EXPIRED
        session = self._downlink.session_of(app, device)
        key = (app, device, push.push_id)
        recent = self._recent.get(key)
        if recent is None or not recent.stands(session):
            if session is None:
                return Delivery.OFFLINE
            recent = _Recent(session)  # knows the outcome also where the one who asked has gone
            self._downlink.push(app, device, push, recent.tell)
            self._recent[key] = recent
            while len(self._recent) > limits_platform.PUSH_RECENT_MAX:
                self._recent.popitem(last=False)
        self._recent.move_to_end(key)
        return recent.outcome or await self._wait(recent)

    async def _wait(self, recent: "_Recent") -> Delivery:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Delivery] = loop.create_future()
        late = loop.call_later(limits.PUSH_ACK_TIMEOUT_S, _give_up, waiter)
        recent.waiting.append(waiter)
        self._waiting[waiter] = None
        try:
            return await waiter
        finally:
            late.cancel()
            recent.waiting.remove(waiter)
            del self._waiting[waiter]

    async def _take(self, message: Message) -> Reply:
        try:
            order = _orders.decode(message.data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return error_reply(400, f"malformed push: {error}")
        push = Push(order.push_id, order.topic, order.body, order.expires_ms)
        return Reply((await self.deliver(order.app, order.device, push)).value.encode())


class _Recent:
    """A push that was sent on a session here."""

    __slots__ = ("outcome", "session", "waiting")

    def __init__(self, session: str) -> None:
        self.session = session
        self.outcome: Delivery | None = None
        self.waiting: list[asyncio.Future[Delivery]] = []

    def tell(self, outcome: Delivery) -> None:
        """The outcome is known."""
        self.outcome = outcome
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_result(outcome)

    def stands(self, session: str | None) -> bool:
        """Say whether the outcome answers a repetition too: it does unless the push surely or probably never came."""
        match self.outcome:
            case None | Delivery.ACKED:
                return True
            case Delivery.UNCONFIRMED:
                return self.session == session
            case _:
                return False


def _give_up(waiter: asyncio.Future[Delivery]) -> None:
    if not waiter.done():
        waiter.set_result(Delivery.UNCONFIRMED)


class PushService:
    """The sender's side.

    Args:
        engine: the way to other nodes.
        directory: says where a device is.
        local: the receiving side of this node.
        unit: this unit.
        node: this node.
        clock: for expiry.
        rng: draws ids.
    """

    def __init__(
        self,
        engine: Requester,
        directory: Lookup,
        local: PushNode,
        *,
        unit: str,
        node: str,
        clock: Clock,
        rng: Rng,
    ) -> None:
        self._engine = engine
        self._directory = directory
        self._local = local
        self._unit = unit
        self._node = node
        self._clock = clock
        self._rng = rng

    async def push(
        self,
        app: str,
        device: str,
        body: bytes,
        *,
        topic: str = "",
        push_id: str = "",
        ttl_s: float = limits_platform.PUSH_TTL_S,
    ) -> PushResult:
        """Push to a device and say what became of it, at most `limits.PUSH_ACK_TIMEOUT_S` and a margin later.

        Works for devices of this node also while the engine is away. Cancelled, the push may be delivered.

        Args:
            app: application id.
            device: device id.
            body: content.
            topic: what it belongs to, empty for the device itself.
            push_id: its own id; the same one again is the same push, and reaches the device once (`PushNode`).
            ttl_s: seconds after which it is worthless.

        Raises:
            RequestRefused: `bad-request`, `too-large`; `unavailable` where the engine is away and the device not here.
        """
        _check(app, device, body, topic, push_id, ttl_s)
        expires_ms = int((self._clock.wall() + ttl_s) * 1000)
        push = Push(push_id or ids.new_id(self._rng), topic, body, expires_ms)
        place: Place | None = None
        for _ in range(2):  # once more where the device has moved meanwhile
            earlier = place
            try:
                place = await self._directory.lookup(app, device)
            except errors.EngineError as error:
                return await self._without_engine(app, device, push, error)
            if place is None or (earlier is not None and earlier.session == place.session):
                break
            if place.node == self._node:
                break
            delivery = await self._remote(place.node, app, device, push)
            if delivery is not Delivery.OFFLINE:
                return PushResult(delivery, push.push_id, place.node)
        # The directory may not know yet what this node knows: a session opened a moment ago.
        return self._result(push, await self._local.deliver(app, device, push))

    async def _without_engine(self, app: str, device: str, push: Push, error: errors.EngineError) -> PushResult:
        delivery = await self._local.deliver(app, device, push)
        if delivery is Delivery.OFFLINE:
            _log.info("push %s: %s", push.push_id, error)
            raise errors.RequestRefused(
                "unavailable",
                "the engine is away, and the device is not on this node",
                retry_after_s=limits_platform.CALL_RETRY_AFTER_S,
            ) from error
        return self._result(push, delivery)

    async def _remote(self, node: str, app: str, device: str, push: Push) -> Delivery:
        order = _Order(app, device, push.push_id, push.topic, push.body, push.expires_ms)
        try:
            answer = await self._engine.request(
                subjects.of_node(self._unit, node, "push"),
                _encoder.encode(order),
                timeout_s=limits.PUSH_ACK_TIMEOUT_S + limits_platform.PUSH_REQUEST_MARGIN_S,
            )
        except errors.NoResponders:
            return Delivery.OFFLINE  # the node has died; what it held is gone
        except errors.EngineError as error:
            if error.maybe_delivered:
                return Delivery.UNCONFIRMED
            raise errors.RequestRefused(
                "unavailable", "the engine is away", retry_after_s=limits_platform.CALL_RETRY_AFTER_S
            ) from error
        problem = reply_error(answer)
        if problem is None:
            try:
                return Delivery(answer.data.decode("ascii"))
            except ValueError:
                problem = (500, "unknown outcome")
        _log.warning("node %s answered a push with %d %s", node, *problem)
        return Delivery.BUSY if problem[0] == 503 else Delivery.UNCONFIRMED

    def _result(self, push: Push, delivery: Delivery) -> PushResult:
        return PushResult(delivery, push.push_id, "" if delivery is Delivery.OFFLINE else self._node)


def _check(app: str, device: str, body: bytes, topic: str, push_id: str, ttl_s: float) -> None:
    try:
        for name in (app, device, *((topic,) if topic else ())):
            ids.subject_token(name)
    except errors.ConfigError as error:
        raise errors.RequestRefused("bad-request", str(error)) from error
    if len(body) > limits.PUSH_BODY_BYTES_MAX:
        raise errors.RequestRefused(
            "too-large", f"a push has at most {limits.PUSH_BODY_BYTES_MAX} bytes, this one has {len(body)}"
        )
    if len(push_id) > limits_platform.PUSH_ID_CHARS_MAX or not (
        push_id.isascii() and (push_id.isprintable() or not push_id)
    ):
        raise errors.RequestRefused(
            "bad-request", f"id: expected at most {limits_platform.PUSH_ID_CHARS_MAX} printable ASCII characters"
        )
    if not 0 < ttl_s <= limits_platform.PUSH_TTL_MAX_S:
        raise errors.RequestRefused(
            "bad-request", f"ttl_s: expected more than 0, at most {limits_platform.PUSH_TTL_MAX_S:.0f}"
        )
