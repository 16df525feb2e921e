"""Connections in memory, with servers behind them that do what a test wants: for the pool on virtual time.

    net = MemoryNet()
    net.server("https", "a.test").streams = 4
    pool = HttpPool(net, SimClock(loop))

What a `Server` is set to holds for what happens from then on, on connections that stand too.
"""

import asyncio
import collections
import struct
from collections.abc import Callable, Collection
from typing import Final

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from stormline.core import errors
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.outbound.dial import quiet

_FLIGHT_S: Final = 0.01
"""From a server to the client."""
_LARGE_PIECE_BYTES: Final = 1000


class _Settings(h2.settings.Settings):
    """Told to the client, and not kept by h2: who asks for more is refused by `MemoryStream`."""

    max_concurrent_streams = 2**31


class Server:
    """How the servers of one place behave.

    Attributes:
        dials: how making a connection ends: `h2`, `h1`, `refused`, `silent`.
        dial_s: how long that takes.
        answer_s: from a request to its answer.
        streams: HTTP/2 streams allowed at once; more are refused.
        lasts: requests after which a connection ends; None for never.
        large_bytes: length of answers, of which only the beginning comes; None: `ok`, whole.
        mute: pings are answered, requests are not.
        dead: nothing is answered. A connection that lost something by it stays so.
    """

    def __init__(self) -> None:
        self.dials = "h2"
        self.dial_s = 0.03
        self.answer_s = 0.05
        self.streams = 100
        self.lasts: int | None = None
        self.large_bytes: int | None = None
        self.mute = self.dead = False


class MemoryStream:
    """One connection; a `net.stream.Stream`.

    Attributes:
        targets: of the requests that came, in their order.
        refused: requests that were refused, or not looked at any more.
    """

    local = Address("192.0.2.99", 1)

    def __init__(self, net: "MemoryNet", server: Server, peer: Address, alpn: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._net = net
        self._server = server
        self.peer = peer
        self.alpn: str | None = alpn
        self.sent_bytes = 0
        self.heard_at = self._loop.time()
        self.targets: list[bytes] = []
        self.refused = 0
        self._last = 0  # stream that was taken
        self._closed = self._ended = self._lost = self._going = False
        self._inbox = bytearray()
        self._moved = asyncio.Event()
        net.open.add(self)
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
        if alpn == "h2":
            values = {SettingCodes.MAX_CONCURRENT_STREAMS: server.streams}
            self._h2.local_settings = _Settings(client=False, initial_values=values)
            self._h2.initiate_connection()
            self._loop.call_later(_FLIGHT_S, self._flush)

    # -- the client's side --------------------------------------------------------------------------------------------
    has_unsent = False

    @property
    def closed(self) -> bool:
        """See `Stream`."""
        return self._closed

    async def send_all(self, data: bytes | memoryview) -> None:
        """See `Stream`."""
        self.send_nowait(data)

    def send_nowait(self, data: bytes | memoryview) -> int:
        """See `Stream`."""
        if self._closed or self._ended:
            raise ConnectionAbortedError
        self.sent_bytes += len(data)
        self._lost = self._lost or self._server.dead
        if not self._lost:
            self._arrive(data)
        return len(data)

    def receive_nowait(self, size_max: int = 65_536) -> bytes | None:
        """See `Stream`."""
        if self._closed:
            raise ConnectionAbortedError
        if not self._inbox:
            return b"" if self._ended else None
        data = bytes(self._inbox)
        self._inbox.clear()
        self.heard_at = self._loop.time()
        return data

    def _arrive(self, data: bytes | memoryview) -> None:
        if self.alpn == "h2":
            for event in self._h2.receive_data(bytes(data)):
                self._take(event)
            self._loop.call_later(_FLIGHT_S, self._flush)
        else:
            for head in bytes(data).split(b"\r\n\r\n")[:-1]:
                self.targets.append(head.split(b" ")[1])
                if not self._server.mute:
                    self._loop.call_later(self._server.answer_s, self._answer_h1)

    async def receive(self, size_max: int = 65_536) -> bytes:
        """See `Stream`."""
        while not self._inbox:
            if self._closed:
                raise ConnectionAbortedError
            if self._ended:
                return b""
            self._moved.clear()
            await self._moved.wait()
        data = bytes(self._inbox)
        self._inbox.clear()
        self.heard_at = self._loop.time()
        return data

    def is_readable(self) -> bool:
        """See `Stream`."""
        return bool(self._inbox) or self._ended

    def leave_quiet(self) -> None:
        """Do nothing: there is no kernel below."""

    def tcp_info(self) -> None:
        """Say nothing: there is no kernel below."""

    def close(self) -> None:
        """See `Stream`."""
        self._closed = True
        self._net.open.discard(self)
        self._moved.set()

    # -- the server's side --------------------------------------------------------------------------------------------
    def hang_up(self) -> None:
        """End it without a word."""
        self._ended = True
        self._moved.set()

    def go_away(self) -> None:
        """Take no more requests; those that came are answered."""
        if self.alpn == "h2" and not self._going:
            self._going = True
            self._flush()
            self._bring(b"\x00\x00\x08\x07\x00\x00\x00\x00\x00" + struct.pack(">LL", self._last, ErrorCodes.NO_ERROR))

    def _bring(self, data: bytes) -> None:
        self._lost = self._lost or self._server.dead
        if not (self._closed or self._ended or self._lost):
            self._inbox += data
            self._moved.set()

    def _flush(self) -> None:
        self._bring(self._h2.data_to_send())

    def _take(self, event: h2.events.Event) -> None:
        if not isinstance(event, h2.events.RequestReceived):
            return
        stream_id = event.stream_id or 0
        if self._going or self._h2.open_inbound_streams > self._server.streams:
            self.refused += 1
            if not self._going:
                self._h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            return
        self._last = stream_id
        self.targets.append(dict(event.headers or ())[b":path"])
        if len(self.targets) == self._server.lasts:
            self.go_away()
        if not self._server.mute:
            self._loop.call_later(self._server.answer_s, self._answer, stream_id)

    def _answer(self, stream_id: int) -> None:
        large = self._server.large_bytes
        length = [] if large is None else [(b"content-length", b"%d" % large)]
        try:
            self._h2.send_headers(stream_id, [(b":status", b"200"), *length])
            self._h2.send_data(stream_id, b"ok" if large is None else bytes(_LARGE_PIECE_BYTES), large is None)
        except h2.exceptions.ProtocolError:
            return  # given up meanwhile
        self._flush()

    def _answer_h1(self) -> None:
        large = self._server.large_bytes
        last = b"Connection: close\r\n" if len(self.targets) == self._server.lasts else b""
        body = b"ok" if large is None else bytes(_LARGE_PIECE_BYTES)
        self._bring(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%b\r\n%b" % (large or len(body), last, body))


class MemoryNet:
    """Makes connections; a `pool.Connector`.

    Attributes:
        open: connections that the client has not closed.
        made: all, in the order in which they were made.
        dialling: places to which connections are being made now.
        dials: how many were begun.
    """

    def __init__(self) -> None:
        self._servers: dict[tuple[str, str], Server] = {}
        self.open: set[MemoryStream] = set()
        self.made: list[MemoryStream] = []
        self.dialling: collections.Counter[str] = collections.Counter()
        self.dials = 0

    def server(self, scheme: str, host: str) -> Server:
        """Give the servers of a place."""
        return self._servers.setdefault((scheme, host), Server())

    async def dial(
        self,
        host: str,
        port: int,
        *,
        tls: bool,
        timeout_s: float,
        addresses: tuple[Address, ...] | None = None,
        server_name: str | None = None,
        left: Collection[Address] = (),
        h1: bool = False,
        on_stage: Callable[[Phase], None] = quiet,
        on_note: Callable[[str], None] = quiet,
    ) -> MemoryStream:
        """See `Dialer.dial`."""
        server = self.server("https" if tls else "http", host)
        dial_s = server.dial_s
        self.dials += 1
        self.dialling[host] += 1
        try:
            on_stage(Phase.CONNECT)
            await asyncio.sleep(min(dial_s, timeout_s))
            if tls:
                on_stage(Phase.TLS)
            if server.dials == "refused":
                raise errors.ConnectError(f"{host}: refused", phase=Phase.CONNECT, maybe_delivered=False)
            if server.dials == "silent" or dial_s > timeout_s:
                await asyncio.sleep(max(0.0, timeout_s - dial_s))
                raise errors.DeadlineExceeded(f"{host}: silent", phase=Phase.CONNECT, maybe_delivered=False)
            peers = addresses or (Address("192.0.2.7", port),)
            peer = next((each for each in peers if each not in left), peers[0])
            stream = MemoryStream(self, server, peer, "h2" if tls and server.dials == "h2" and not h1 else "http/1.1")
            self.made.append(stream)
            return stream
        finally:
            self.dialling[host] -= 1
