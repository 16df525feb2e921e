"""Telling businesses of devices that come and go: one message each on a subject of the account BIZ.

The subject is `presence.<unit>.<app>.<event>.<user>.<device>`: `event` is `online` or `offline`, user and device are
tokens (`core.ids.subject_token`), the user `_` where nobody is logged in. The message is a JSON object (`Event`).

Each message is sent at most once, right after the directory's entry was written; who was not listening, or lost the
engine, asks for the present state. Messages about one device may come in the wrong order from two nodes: `epoch` orders
them, and one with an older epoch than seen is to be dropped. A device that moves from one node to another is online
again with a new epoch, without an offline in between.
"""

import logging
from collections.abc import Mapping
from typing import Protocol

import msgspec

from stormline.appgw.record import Record
from stormline.core import errors
from stormline.core.ids import subject_token

_log = logging.getLogger("stormline.appgw")
NOBODY = "_"
"""Token of no user; base32 has no such sign."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A device has come or gone.

    Attributes:
        event: `online` or `offline`.
        unit: the unit.
        app: application id.
        device: device id.
        user: who is logged in, absent for nobody.
        epoch: grows with each session of the device.
        session: id of the session.
        node: the node that has or had it.
        at_ms: when, in milliseconds since 1970; of a device whose node died, when the node was heard last.
        reason: of `offline`: `ended`, or `lease` where its node died.
        network: kind of network.
        version: version of the application, absent where it says none.
        tags: what the application calls the device.
    """

    event: str
    unit: str
    app: str
    device: str
    user: str = ""
    epoch: int
    session: str
    node: str
    at_ms: int
    reason: str = ""
    network: str = "unknown"
    version: str = ""
    tags: tuple[str, ...] = ()


_encoder = msgspec.json.Encoder()


class Publisher(Protocol):
    """What is needed of the engine."""

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """See `engine.port.Engine.publish`."""
        ...


class PresenceEvents:
    """Sends them. See `appgw.directory.Watcher`."""

    def __init__(self, engine: Publisher, *, unit: str) -> None:
        self._engine = engine
        self._unit = unit

    async def online(self, key: str, app: str, device: str, entry: Record) -> None:
        """See `appgw.directory.Watcher`."""
        await self._tell("online", key, app, device, entry, "")

    async def offline(self, key: str, app: str, device: str, entry: Record, reason: str) -> None:
        """See `appgw.directory.Watcher`."""
        await self._tell("offline", key, app, device, entry, reason)

    async def _tell(self, what: str, key: str, app: str, device: str, entry: Record, reason: str) -> None:
        about, user = entry.about, entry.user
        event = Event(
            event=what,
            unit=self._unit,
            app=app,
            device=device,
            user=user,
            epoch=entry.epoch,
            session=entry.session,
            node=entry.node,
            at_ms=entry.seen_ms,
            reason=reason,
            network=about.network,
            version=about.version,
            tags=about.tags,
        )
        who = f"{subject_token(user) if user else NOBODY}.{key.rpartition('.')[2]}"
        try:
            await self._engine.publish(f"presence.{self._unit}.{app}.{what}.{who}", _encoder.encode(event))
        except errors.EngineError as error:
            _log.info("nobody was told that a device is %s: %s", what, error)
