"""Rights that end while a session is live: the sessions of a device or a user are closed, on every node of the unit."""

import logging
from collections.abc import Mapping
from typing import Protocol

import msgspec

from stormline.appgw import subjects
from stormline.core import errors, limits_platform
from stormline.core.codes import Code
from stormline.core.errors import RequestRefused
from stormline.engine.port import Listener, Message, Subscription
from stormline.gateway.registry import Registry

_log = logging.getLogger("stormline.gateway")

_SUBJECT = "revocations"


class Publisher(Protocol):
    """What telling the other nodes needs of the engine."""

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """See `engine.port.Engine.publish`."""
        ...


class Subscriber(Protocol):
    """What hearing of it needs of the engine."""

    async def subscribe(self, subject: str, handler: Listener, *, queue: str = "") -> Subscription:
        """See `engine.port.Engine.subscribe`."""
        ...


class _Order(msgspec.Struct, frozen=True, array_like=True):
    """Whose sessions end. Fields are only ever added at the end, with a default."""

    app: str
    device: str
    user: str
    renew: bool


_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(_Order)


class Revocations:
    """Ends sessions here and has the other nodes of the unit end theirs."""

    def __init__(self, registry: Registry, engine: Publisher, *, unit: str) -> None:
        self._registry = registry
        self._engine = engine
        self._subject = subjects.of_unit(unit, _SUBJECT)

    async def start(self, engine: Subscriber) -> Subscription:
        """Begin to hear from other nodes."""
        return await engine.subscribe(self._subject, self._take)

    async def revoke(self, app: str, *, device: str = "", user: str = "", renew: bool = False) -> int:
        """End the sessions of a device or a user; give how many ended on this node.

        Safe to repeat. Whoever has a token that is still valid may come back with it: have its issuer stop first.

        Args:
            app: application id.
            device: device id, empty where a user is meant.
            user: user id, empty where a device is meant.
            renew: the client needs a new token (TOKEN_REVOKED); else it stays away (REVOKED).

        Raises:
            RequestRefused: `unavailable`: sessions here have ended, and the other nodes could not be told.
        """
        order = _Order(app, device, user, renew)
        ended = self._end(order)
        try:
            await self._engine.publish(self._subject, _encoder.encode(order))
        except errors.EngineError as error:
            raise RequestRefused(
                "unavailable",
                f"{ended} sessions ended here; the engine is away, so other nodes do not know",
                retry_after_s=limits_platform.CALL_RETRY_AFTER_S,
            ) from error
        return ended

    async def _take(self, message: Message) -> None:
        try:
            self._end(_orders.decode(message.data))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            _log.warning("a revocation that cannot be read was dropped")

    def _end(self, order: _Order) -> int:
        code = Code.TOKEN_REVOKED if order.renew else Code.REVOKED
        if order.device:
            one = self._registry.get(order.app, order.device)
            found = [one] if one is not None else []
        else:
            found = [
                each for each in self._registry if (each.identity.app, each.identity.user) == (order.app, order.user)
            ]
        for session in found:
            session.close(code, "the right to this session has ended")
        return len(found)
