"""Sessions over short HTTP: each exchange carries a piece of a channel, and a channel is a session's connection.

To its carrier (`gateway.carrier`) a channel is an `asyncio.Transport` that lives as long as exchanges come for it, over
whichever HTTP connections. It is held by one node; an exchange that comes to another is passed on to that one through
the engine, so no session has to move for it. What HTTP itself needs is in `gateway.short_http`.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sized
from typing import Any, Final, Protocol, cast

from stormline.appgw import subjects
from stormline.core import errors, limits_carriers
from stormline.core.clock import Rng
from stormline.core.values import Address, parse_address
from stormline.engine.port import Handler, Message, Reply, Subscription, error_reply, reply_error
from stormline.gateway.carrier import Carrier
from stormline.wire import short

_log = logging.getLogger("stormline.gateway")

_PEER: Final = "Peer"
"""Header that says who asks."""
_PARTS: Final = "0123456789abcdef"
"""Subjects under which a node takes exchanges: each holds `limits_platform.ENGINE_HANDLERS_MAX` at a time."""
_HIGH_BYTES: Final = limits_carriers.SHORT_DOWN_BYTES // 2
"""Bytes that wait for an exchange, above which senders pause; they go on when one has taken most of them."""


class Refused(Exception):
    """An exchange that is not served.

    Attributes:
        status: the status of the answer.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Engine(Protocol):
    """What passing exchanges on needs of the engine."""

    async def request(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, timeout_s: float
    ) -> Message:
        """See `engine.port.Engine.request`."""
        ...


class Server(Protocol):
    """What taking them needs of the engine."""

    async def serve(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """See `engine.port.Engine.serve`."""
        ...


class Channels:
    """The channels of one node.

    Args:
        unit: the unit's name.
        node: this node's name.
        carrier: makes the carrier of a new channel.
        engine: the way to other nodes.
        rng: draws names.
        sessions: the node's connections, counted together with those of HTTP.

    Attributes:
        connections: HTTP connections.
    """

    def __init__(
        self, unit: str, node: str, carrier: Callable[[], Carrier], engine: Engine, rng: Rng, sessions: Sized
    ) -> None:
        self._unit = unit
        self._node = node
        self._carrier = carrier
        self._engine = engine
        self._rng = rng
        self._channels: dict[str, _Channel] = {}
        self._openings: dict[_Channel, None] = {}  # the oldest first
        self.sessions = sessions
        self.connections: dict[Closes, None] = {}

    def __len__(self) -> int:
        """How many there are, those included that have ended and may be asked for their last bytes."""
        return len(self._channels)

    def __contains__(self, name: str) -> bool:
        """Say whether there is one of this name."""
        return name in self._channels

    async def start(self, engine: Server) -> None:
        """Begin to take exchanges that came to other nodes."""
        for part in _PARTS:
            await engine.serve(subjects.of_node(self._unit, self._node, f"short.{part}"), self._passed_on)

    def close(self) -> None:
        """End what is left, when the node has."""
        for channel in list(self._channels.values()):
            channel.abort()
        for connection in list(self.connections):
            connection.close()

    async def exchange(self, body: bytes, peer: Address) -> bytes:
        """Serve one exchange: give the body of its answer. Cancelled, nothing is lost: the client asks again.

        Args:
            body: of the request.
            peer: who asks.

        Raises:
            Refused: it cannot be served.
        """
        ask = _read(body)
        node = short.node_of(ask.channel)
        if node in ("", self._node):
            return await self._serve(ask, peer)
        try:
            answer = await self._engine.request(
                subjects.of_node(self._unit, node, f"short.{_part_of(ask.channel)}"),
                body,
                {_PEER: str(peer)},
                timeout_s=_wait_s(ask) + limits_carriers.SHORT_ANSWER_S,
            )
        except errors.NoResponders as error:
            raise Refused(410, "its node is gone") from error
        except (errors.EngineError, errors.ConfigError) as error:
            raise Refused(503, "its node cannot be reached") from error
        if (said := reply_error(answer)) is not None:
            raise Refused(said[0] if said[0] in (400, 410) else 503, said[1])
        return answer.data

    async def _passed_on(self, message: Message) -> Reply:
        """Serve an exchange that came to another node."""
        try:
            peer = parse_address(message.headers.get(_PEER, ""))
            return Reply(await self._serve(_read(message.data), peer))
        except Refused as refused:
            return error_reply(refused.status, str(refused))
        except errors.ConfigError as error:
            return error_reply(400, str(error))

    async def _serve(self, ask: short.Ask, peer: Address) -> bytes:
        if ask.channel in ("", f"{self._node}."):
            return short.encode(short.Tell(self._open(peer).name))
        channel = self._channels.get(ask.channel)
        if channel is None:
            raise Refused(410, "no such channel")
        try:
            return short.encode(await channel.exchange(ask))
        except errors.RemoteProtocolError as error:
            channel.abort()
            raise Refused(400, str(error)) from error

    def _open(self, peer: Address) -> "_Channel":
        if len(self._openings) >= limits_carriers.SHORT_OPENINGS_MAX:
            next(iter(self._openings)).abort()
        channel = _Channel(self, f"{self._node}.{self._rng.token_bytes(16).hex()}", self._carrier(), peer)
        self._channels[channel.name] = channel
        self._openings[channel] = None
        channel.begin()
        return channel

    def stands(self, channel: "_Channel") -> None:
        """Count a channel as a session."""
        self._openings.pop(channel, None)

    def over(self, channel: "_Channel") -> None:
        """Forget a channel."""
        self._openings.pop(channel, None)
        self._channels.pop(channel.name, None)


class Closes(Protocol):
    """An HTTP connection."""

    def close(self) -> None:
        """Close it; bytes written before still leave."""
        ...


class _Channel:
    """One channel; to its carrier an `asyncio.Transport`, and no more of it than a carrier needs.

    Attributes:
        name: what exchanges name it by.
    """

    __slots__ = ("_carrier", "_channels", "_closing", "_held", "_in", "_loop", "_out", "_paused", "_peer", "_reading",
                 "_sent", "_timer", "_under_way", "name")  # fmt: skip

    def __init__(self, channels: Channels, name: str, carrier: Carrier, peer: Address) -> None:
        self._loop = asyncio.get_running_loop()
        self._channels = channels
        self._carrier: Carrier | None = carrier
        self._peer = peer
        self._in = short.Incoming()
        self._out = short.Outgoing()
        self._sent = 0  # number of the first byte that no answer has carried
        self._held: asyncio.Future[None] | None = None  # the exchange that waits for something to bring down
        self._under_way = 0
        self._closing = self._paused = False
        self._reading = True
        self._timer: asyncio.TimerHandle | None = None
        self.name = name

    def begin(self) -> None:
        """Hand the carrier its connection."""
        if self._carrier is not None:
            self._carrier.connection_made(cast("asyncio.BaseTransport", self))
        self._rest()

    # -- exchanges -----------------------------------------------------------------------------------------------------

    async def exchange(self, ask: short.Ask) -> short.Tell:
        """Take what comes up, and give what goes down: now, or as soon as there is something, or when the wait is over.

        Raises:
            RemoteProtocolError: what is said does not fit what was said before.
        """
        self._under_way += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            self._take(ask)
            if ask.wait_ms <= 0 or ask.received < self._out.confirmed:  # of an exchange that was overtaken
                return self._tell(b"")
            if not await self._hold(_wait_s(ask)):
                return self._tell(b"")
            data = self._out.take(max(1, min(ask.room, limits_carriers.SHORT_DOWN_BYTES)))
            self._sent = max(self._sent, self._out.confirmed + len(data))
            self._flow()
            return self._tell(data)
        finally:
            self._under_way -= 1
            self._rest()

    def _take(self, ask: short.Ask) -> None:
        self._out.confirm(ask.received)
        self._sent = max(self._sent, self._out.confirmed)
        self._flow()
        if not ask.data or not self._reading or self._carrier is None or self._closing:
            return
        fresh = self._in.take(ask.begin, ask.data)
        if fresh:
            self._carrier.data_received(fresh)
            if self._carrier.session is not None:
                self._channels.stands(self)

    async def _hold(self, wait_s: float) -> bool:
        """Wait for something to bring down; False where a newer exchange has taken this one's place."""
        if self._held is not None and not self._held.done():
            self._held.cancel()
        if len(self._out) or self._closing:
            return True
        held = self._held = self._loop.create_future()
        try:
            await asyncio.wait([held], timeout=wait_s)
            return not held.cancelled()
        finally:
            if self._held is held:
                self._held = None

    def _tell(self, data: bytes) -> short.Tell:
        ended = self._closing and self._out.confirmed + len(data) == self._out.end
        return short.Tell(self.name, self._in.received, self._out.confirmed, data, ended)

    # -- what the carrier asks of its transport ------------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Give `peername`. TLS and sockets are of the HTTP connections."""
        return tuple(self._peer) if name == "peername" else default

    def write(self, data: bytes) -> None:
        """Bring these down."""
        if self._closing:
            return
        self._out.put(data)
        self._wake()
        self._flow()

    def get_write_buffer_size(self) -> int:
        """Bytes that no answer has carried."""
        return self._out.end - self._sent

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing: what waits is bounded by what one answer can carry."""

    def pause_reading(self) -> None:
        """Take nothing of what comes up: it is not confirmed, so it will come again."""
        self._reading = False

    def resume_reading(self) -> None:
        """Go on."""
        self._reading = True

    def is_closing(self) -> bool:
        """True after `close` and `abort`."""
        return self._closing

    def close(self) -> None:
        """Take nothing more; what was written can still be asked for, for a while."""
        if not self._closing:
            self._closing = True
            self._channels.stands(self)
            self._loop.call_soon(self._lost)
            self._wake()
            self._rest()

    def abort(self) -> None:
        """Be over at once."""
        self.close()
        self._channels.over(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- inside --------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._held is not None and not self._held.done():
            self._held.set_result(None)

    def _flow(self) -> None:
        """Let senders pause where much waits, and go on where little does."""
        waits = self.get_write_buffer_size()
        if self._carrier is None or self._paused == (waits > (_HIGH_BYTES // 4 if self._paused else _HIGH_BYTES)):
            return
        self._paused = not self._paused
        if self._paused:
            self._carrier.pause_writing()
        else:
            self._carrier.resume_writing()

    def _rest(self) -> None:
        """Be gone where no exchange comes any more."""
        if self._under_way or self.name not in self._channels:
            return
        if self._timer is not None:
            self._timer.cancel()
        wait_s = limits_carriers.SHORT_LINGER_S if self._closing else limits_carriers.SHORT_GONE_S
        self._timer = self._loop.call_later(wait_s, self.abort)

    def _lost(self) -> None:
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.connection_lost(None)


def _part_of(channel: str) -> str:
    """Say under which subject exchanges of a channel are passed on."""
    return channel[-1] if channel[-1] in _PARTS else _PARTS[0]


def _read(body: bytes) -> short.Ask:
    try:
        return short.decode_ask(body)
    except errors.RemoteProtocolError as error:
        raise Refused(400, str(error)) from error


def _wait_s(ask: short.Ask) -> float:
    return min(max(0, ask.wait_ms) / 1000, limits_carriers.SHORT_WAIT_MAX_S)
