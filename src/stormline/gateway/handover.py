"""Sessions that go from one node of the unit to another: the client came back elsewhere, or its node stops.

The node a client comes to asks the one that its resume token names. That one lets the session's calls end, for a short
while; what still runs then fails with `maybe_delivered`. Then it gives all it holds away and forgets the session.
"""

import logging
from collections.abc import Mapping
from typing import Protocol

import msgspec

from stormline.appgw import subjects
from stormline.appgw.port import Identity
from stormline.core import errors, limits_platform
from stormline.engine.port import Handler, Message, Reply, Subscription, error_reply, reply_error
from stormline.gateway.session import Hub, Session
from stormline.wire import handover

_log = logging.getLogger("stormline.gateway")


class Engine(Protocol):
    """What handing over needs of the engine."""

    async def request(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, timeout_s: float
    ) -> Message:
        """See `engine.port.Engine.request`."""
        ...


class Server(Protocol):
    """What giving away needs of the engine."""

    async def serve(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """See `engine.port.Engine.serve`."""
        ...


class _Claim(msgspec.Struct, frozen=True, array_like=True):
    """A client has come with a resume token. Fields are only ever added at the end, with a default."""

    app: str
    device: str
    user: str
    token: str
    received: int


class _Given(msgspec.Struct, frozen=True, array_like=True):
    """The session, given away."""

    session: str
    machine: handover.Snapshot


_encoder = msgspec.msgpack.Encoder()
_claims = msgspec.msgpack.Decoder(_Claim)
_givens = msgspec.msgpack.Decoder(_Given)


class Handover:
    """This node's part: it asks others for sessions, and gives its own to those who ask.

    Args:
        hub: the sessions of this node.
        engine: the way to other nodes.
    """

    def __init__(self, hub: Hub, engine: Engine) -> None:
        self._hub = hub
        self._engine = engine

    async def start(self, engine: Server) -> Subscription:
        """Begin to give sessions to nodes that ask."""
        return await engine.serve(subjects.of_node(self._hub.unit, self._hub.node, "session"), self._give)

    async def fetch(
        self, node: str, identity: Identity, token: str, received: int
    ) -> tuple[str, handover.Snapshot] | None:
        """Ask a node for a session; give its id and what it holds, None where it cannot be had.

        Args:
            node: who made the token, as it says itself.
            identity: whose session it must be; its session id is not looked at.
            token: the resume token.
            received: frames of the session that the client has received.
        """
        try:
            subject = subjects.of_node(self._hub.unit, node, "session")
            claim = _Claim(identity.app, identity.device, identity.user, token, received)
            answer = await self._engine.request(
                subject, _encoder.encode(claim), timeout_s=limits_platform.HANDOVER_TIMEOUT_S
            )
            if reply_error(answer) is not None:
                return None
            given = _givens.decode(answer.data)
        except (errors.EngineError, errors.ConfigError) as error:
            _log.info("no session from node %.64s: %s", node, error)
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            _log.warning("node %.64s gave a session that cannot be read", node)
            return None
        return given.session, given.machine

    async def _give(self, message: Message) -> Reply:
        try:
            claim = _claims.decode(message.data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return error_reply(400, f"malformed claim: {error}")
        hub = self._hub
        session = hub.registry.get(claim.app, claim.device)
        if (
            not isinstance(session, Session)
            or session.identity.user != claim.user
            or not hub.resume_tokens.check(claim.token, session.identity, earlier=session.earlier_token)
            or not session.connection.can_resume(claim.received)
        ):
            return error_reply(404, "no such session")
        try:
            machine = await session.give_away()
        except errors.LocalProtocolError as error:
            return error_reply(409, str(error))
        return Reply(_encoder.encode(_Given(session.identity.session, machine)))
