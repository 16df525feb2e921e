"""The long connection over short HTTP, as a stream of the frames' bytes; what an exchange carries is in `wire.short`.

Two tasks make the exchanges of a stream: one sends what goes up, whenever there is something; the other asks for what
comes down, and has its question held while there is nothing. Each has at most one exchange under way. One that fails is
repeated, on another connection: bytes are counted, so nothing comes twice.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from stormline.core import errors, limits, limits_carriers
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.stream import closed_error
from stormline.net.tcpinfo import TcpInfo
from stormline.outbound.held import Held
from stormline.outbound.messages import HttpRequest
from stormline.outbound.pool import HttpPool
from stormline.wire import messages, short

_log = logging.getLogger("stormline.outbound")
_FIELDS: Final = (
    (b"Content-Type", short.CONTENT_TYPE.encode()),
    (b"Cache-Control", b"no-store, no-transform"),
    (b"Accept", short.CONTENT_TYPE.encode()),
)


class Place(NamedTuple):
    """Where exchanges go.

    Attributes:
        name: whom the certificate and `Host` name.
        host, port: what is connected to where there are no addresses.
        addresses: what is connected to; None: the host is resolved.
        connect_timeout_s: for one connection.
    """

    name: str
    host: str
    port: int
    addresses: tuple[Address, ...] | None
    connect_timeout_s: float


class _Failed(Exception):
    """An exchange brought no answer of the gateway.

    Attributes:
        gone: the gateway has no such channel.
        untouched: nothing of it has left.
    """

    def __init__(self, reason: str, *, gone: bool = False, untouched: bool = False) -> None:
        super().__init__(reason)
        self.gone = gone
        self.untouched = untouched


class _Following:
    """Follows one exchange through the pool; see `outbound.held.Follower`."""

    __slots__ = ("leaves", "local", "on_stage", "peer", "phase")

    def __init__(self, leaves: Callable[[], None], on_stage: Callable[[Phase], None]) -> None:
        self.leaves = leaves
        self.on_stage = on_stage
        self.phase = Phase.QUEUED
        self.peer: Address | None = None
        self.local: Address | None = None

    def stage(self, stage: Phase) -> None:
        self.phase = stage
        if stage is Phase.SEND:
            self.leaves()
        if not stage.reached(Phase.SEND):
            self.on_stage(stage)

    def note(self, line: str) -> None:
        pass

    def on_held(self, held: Held) -> None:
        if held.stream is not None:
            self.peer, self.local = held.stream.peer, held.stream.local


class _Exchanges:
    """Makes exchanges at one place."""

    __slots__ = ("_fields", "_place", "_pool", "local", "peer")

    def __init__(self, pool: HttpPool, place: Place) -> None:
        self._pool = pool
        self._place = place
        host = place.name if place.port == 443 else f"{place.name}:{place.port}"
        self._fields = ((b"Host", host.encode("ascii")), *_FIELDS)
        self.peer = Address(place.host, place.port)
        self.local = Address("0.0.0.0", 1)  # noqa: S104 - until there is a connection

    async def make(
        self,
        ask: short.Ask,
        *,
        leaves: Callable[[], None] = lambda: None,
        newer_than: float | None = None,
        on_stage: Callable[[Phase], None] = lambda stage: None,
    ) -> short.Tell:
        """Make one exchange.

        Args:
            ask: what is sent.
            leaves: called before the first byte goes.
            newer_than: not over a connection that has brought nothing since then.
            on_stage: told how far a connection is.

        Raises:
            _Failed: it brought no answer of the gateway.
        """
        place = self._place
        following = _Following(leaves, on_stage)
        answer_s = ask.wait_ms / 1000 + limits_carriers.SHORT_ANSWER_S
        deadline_s = place.connect_timeout_s + answer_s + limits_carriers.SHORT_REQUEST_S
        target, body = short.PATH.encode(), short.encode(ask)
        request = HttpRequest("POST", "https", place.host, place.port, target, self._fields, body)
        try:
            response = await self._pool.request(
                request,
                deadline_s=deadline_s,
                body_deadline_s=deadline_s + limits_carriers.SHORT_REQUEST_S,
                connect_timeout_s=place.connect_timeout_s,
                read_timeout_s=answer_s,
                newer_than=newer_than,
                addresses=place.addresses,
                server_name=place.name,
                follower=following,
            )
            self.peer, self.local = following.peer or self.peer, following.local or self.local
            answer = bytearray()
            try:
                while piece := await response.source.read():
                    answer += piece
                    if len(answer) > limits_carriers.SHORT_ANSWER_BYTES_MAX:
                        raise _Failed(f"{self.peer} answers with more than an exchange holds")
            finally:
                await response.source.aclose()
        except errors.TransportError as error:
            raise _Failed(str(error), untouched=not error.maybe_delivered) from error
        if response.status != 200:
            raise _Failed(f"{self.peer} answers with status {response.status}", gone=response.status == 410)
        try:
            tell = short.decode_tell(bytes(answer))
        except errors.RemoteProtocolError as error:
            raise _Failed(f"{self.peer} is no gateway: {error}") from error
        if ask.channel and short.node_of(ask.channel) != short.node_of(tell.channel):
            raise _Failed(f"{self.peer} answers for another channel")
        return tell


class ShortStream:
    """`Stream` over short HTTP. Made by `open_short`.

    What is sent counts as taken when it is put into an exchange that goes out; beyond what one exchange carries
    `send_all` waits until the gateway has confirmed what came before.

    Attributes:
        peer, local: the ends of the latest connection.
        node: the node that holds the channel.
    """

    carrier: Final = "sl-short"
    """`wire.plan.Carrier`, by value: that module is loaded with a platform only."""

    __slots__ = ("_channel", "_closed", "_ended", "_error", "_exchanges", "_in", "_loop", "_moved", "_out", "_plain",
                 "_receiving", "_room", "_sending", "_sent", "_tasks", "_up", "alpn", "heard_at", "local", "node",
                 "peer")  # fmt: skip

    def __init__(self, exchanges: _Exchanges, channel: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._exchanges = exchanges
        self._channel = channel
        self.node = short.node_of(channel)
        self._in = short.Incoming()
        self._out = short.Outgoing()
        self._room = limits_carriers.SHORT_DOWN_FIRST_BYTES
        self._plain = bytearray()  # received and not yet asked for
        self._sent = 0
        self._ended = self._closed = False
        self._error: str | None = None
        self._receiving = self._sending = False
        self._up = asyncio.Event()  # there is something to send
        self._moved = asyncio.Event()  # something came, was confirmed or taken, or the stream is over
        self.heard_at = self._loop.time()
        self.alpn: str | None = messages.ALPN
        self.peer = exchanges.peer
        self.local = exchanges.local
        self._tasks = [
            self._loop.create_task(self._run(self._bring_up), name="stormline short up"),
            self._loop.create_task(self._run(self._bring_down), name="stormline short down"),
        ]

    @property
    def sent_bytes(self) -> int:
        """Bytes of every exchange that has gone out, or begun to."""
        return self._sent

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def leave_quiet(self) -> None:
        """See `Stream.leave_quiet`: there is nothing to be left."""

    def tcp_info(self) -> TcpInfo | None:
        """See `Stream.tcp_info`: no one connection says anything of the stream."""
        return None

    @property
    def has_unsent(self) -> bool:
        """See `Stream.has_unsent`."""
        return len(self._out) > 0

    # -- what goes up --------------------------------------------------------------------------------------------------

    async def send_all(self, data: bytes | memoryview) -> None:
        """See `Stream.send_all`; without data it waits until the gateway has confirmed all."""
        if self._sending:
            raise errors.LocalProtocolError("another task is sending on this stream")
        self._sending = True
        try:
            while not data and self.has_unsent:
                self._check()
                await self._wait()
            while data:
                self._check()
                room = limits_carriers.SHORT_UP_BYTES - len(self._out)
                if room > 0:
                    self._out.put(data[:room])
                    data = data[room:]
                    self._up.set()
                else:
                    await self._wait()
            self._check()
        finally:
            self._sending = False

    def send_nowait(self, data: bytes | memoryview) -> int:
        """See `Stream.send_nowait`: nothing goes without waiting."""
        return 0

    def _check(self) -> None:
        if self._closed:
            raise closed_error()
        if self._error is not None or self._ended:
            raise BrokenPipeError(self._error or "the channel has ended")

    async def _bring_up(self, tries: int, newer_than: float | None) -> None:
        """Send what waits, in one exchange; after failures less of it."""
        while not len(self._out):
            self._up.clear()
            await self._up.wait()
        size_max = max(limits_carriers.SHORT_UP_BYTES >> 2 * tries, limits_carriers.SHORT_PIECE_BYTES)
        data, begin, before = self._out.take(size_max), self._out.confirmed, self._sent

        def leaves() -> None:
            self._sent = max(self._sent, begin + len(data))

        ask = short.Ask(self._channel, self._in.received, begin, data)
        try:
            tell = await self._exchanges.make(ask, leaves=leaves, newer_than=newer_than)
        except _Failed as failed:
            if failed.untouched:
                self._sent = before
            raise
        self._confirm(tell)

    def _confirm(self, tell: short.Tell) -> None:
        self.heard_at = self._loop.time()
        self.peer, self.local = self._exchanges.peer, self._exchanges.local
        try:
            self._out.confirm(tell.received)
        except errors.RemoteProtocolError as error:
            raise _Failed(str(error), gone=True) from error
        self._tell_moved()

    # -- what comes down -----------------------------------------------------------------------------------------------

    async def _bring_down(self, tries: int, newer_than: float | None) -> None:
        """Ask for what comes down, once there is room for it."""
        if tries:
            self._room = max(self._room >> 2, limits_carriers.SHORT_PIECE_BYTES)
        while len(self._plain) >= limits_carriers.SHORT_DOWN_BYTES:
            await self._wait()
        wait_ms = int(limits_carriers.SHORT_WAIT_S * 1000)
        ask = short.Ask(self._channel, self._in.received, self._out.confirmed, b"", wait_ms, self._room)
        tell = await self._exchanges.make(ask, newer_than=newer_than)
        try:
            self._plain += self._in.take(tell.begin, tell.data)
        except errors.RemoteProtocolError as error:
            raise _Failed(str(error), gone=True) from error
        if len(tell.data) >= self._room:
            self._room = min(2 * self._room, limits_carriers.SHORT_DOWN_BYTES)
        self._ended = tell.ended
        self._confirm(tell)

    async def receive(self, size_max: int = limits.RECEIVE_BYTES_MAX) -> bytes:
        """See `Stream.receive`."""
        if self._receiving:
            raise errors.LocalProtocolError("another task is receiving on this stream")
        self._receiving = True
        try:
            while (data := self.receive_nowait(size_max)) is None:
                await self._wait()
            return data
        finally:
            self._receiving = False

    def receive_nowait(self, size_max: int = limits.RECEIVE_BYTES_MAX) -> bytes | None:
        """See `Stream.receive_nowait`."""
        if self._closed:
            raise closed_error()
        if self._plain:
            data = bytes(self._plain[:size_max])
            del self._plain[:size_max]
            self._tell_moved()
            return data
        if self._error is not None:
            raise ConnectionResetError(self._error)
        return b"" if self._ended else None

    def is_readable(self) -> bool:
        """See `Stream.is_readable`."""
        return bool(self._plain) or self._ended or self._closed or self._error is not None

    def close(self) -> None:
        """See `Stream.close`."""
        if not self._closed:
            self._closed = True
            for task in self._tasks:
                task.cancel()
            self._tell_moved()

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _wait(self) -> None:
        await self._moved.wait()

    def _tell_moved(self) -> None:
        """Wake all who wait; whoever waits next waits for what comes next."""
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def _run(self, bring: Callable[[int, float | None], Awaitable[None]]) -> None:
        """Make exchanges of one direction until the stream is over."""
        tries, newer_than = 0, None
        while self._goes_on():
            try:
                await bring(tries, newer_than)
                tries, newer_than = 0, None
            except _Failed as failed:
                tries += 1
                if failed.gone or tries >= limits_carriers.SHORT_TRIES_MAX:
                    self._fail(str(failed))
                    return
                _log.info("an exchange of short HTTP failed: %s", failed)
                newer_than = self._loop.time()
                await asyncio.sleep(limits_carriers.SHORT_PAUSE_S * (tries - 1))
            except Exception as error:
                _log.exception("short HTTP to %s ends by a fault of ours", self.peer)
                self._fail(type(error).__name__)
                return

    def _goes_on(self) -> bool:
        return not self._ended and self._error is None

    def _fail(self, why: str) -> None:
        if self._goes_on():
            self._error = why
            self._tell_moved()


async def open_short(
    pool: HttpPool, place: Place, *, home: str = "", on_stage: Callable[[Phase], None] = lambda stage: None
) -> ShortStream:
    """Open a channel; cancelled or failed, nothing is left.

    Args:
        pool: makes the connections, over HTTP/1.1.
        place: where.
        home: the node that has the session which is to go on; one that is not there any more is done without.
        on_stage: told how far a connection is.

    Raises:
        OSError: nobody answers, or not a gateway; the text says what.
    """
    exchanges = _Exchanges(pool, place)
    ask = short.Ask(f"{home}." if home else "")
    tries = 1
    while True:
        try:
            tell = await exchanges.make(ask, on_stage=on_stage)
            return ShortStream(exchanges, tell.channel)
        except _Failed as failed:
            if failed.gone and ask.channel:
                ask = short.Ask("")
            elif failed.untouched or tries == limits_carriers.SHORT_OPEN_TRIES_MAX:
                raise OSError(f"no short HTTP: {failed}") from failed
            else:
                tries += 1  # a channel that nobody uses costs nothing, and is soon forgotten
