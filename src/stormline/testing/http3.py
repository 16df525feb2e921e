"""An HTTP/3 server for tests, by `aioquic`, and a path that loses datagrams before it.

What a request gets is in its path:
    /hello  /size/N  /echo  /sum  /none  /hold  /late/N  /short  /reject  /reset  /refuse  /goaway  /bye  /425
"""

import asyncio
import collections
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, cast

from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.asyncio.server import serve
from aioquic.buffer import encode_uint_var
from aioquic.h3 import events as h3
from aioquic.h3.connection import FrameType, H3Connection, encode_frame
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import ConnectionTerminated, QuicEvent, StopSendingReceived
from aioquic.tls import SessionTicket

from stormline.core.values import Address

REJECTED = 0x10B
INTERNAL_ERROR = 0x102
NO_ERROR = 0x100


class Http3Server:
    """What the server saw.

    Attributes:
        address: where it listens.
        requests: method and path, in order.
        early: how many of them came as early data.
        bodies: sizes of the requests' bodies that came whole, in order.
        stops: answers that the client gave up.
        connections: the server's ends, oldest first.
        closed: how connections ended: their codes.
        peers: the client's addresses that datagrams came from.
    """

    def __init__(self) -> None:
        self.address = Address("127.0.0.1", 0)
        self.requests: list[tuple[str, str]] = []
        self.early = 0
        self.bodies: list[int] = []
        self.stops = 0
        self.connections: list[Connection] = []
        self.closed: list[int] = []
        self.peers: set[int] = set()
        self.tickets: dict[bytes, SessionTicket] = {}


class Connection(QuicConnectionProtocol):
    """One connection of the server."""

    server: Http3Server

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.http: H3Connection | None = None
        self.paths: dict[int, str] = {}
        self.sizes: dict[int, int] = collections.defaultdict(int)
        self.server.connections.append(self)

    def datagram_received(self, data: bytes | str, addr: Any) -> None:
        """Note where datagrams come from."""
        self.server.peers.add(addr[1])
        super().datagram_received(data, addr)

    def quic_event_received(self, event: QuicEvent) -> None:
        """Answer what comes."""
        if isinstance(event, ConnectionTerminated):
            self.server.closed.append(event.error_code)
            return
        if self.http is None:
            self.http = H3Connection(self._quic)
        if isinstance(event, StopSendingReceived):
            self.server.stops += 1
        for each in self.http.handle_event(event):
            if isinstance(each, h3.HeadersReceived):
                self._on_head(each)
            elif isinstance(each, h3.DataReceived):
                self._on_body(each.stream_id, each.data, each.stream_ended)
        self.transmit()

    def _on_head(self, event: h3.HeadersReceived) -> None:
        fields = dict(event.headers)
        path = self.paths[event.stream_id] = fields[b":path"].decode()
        early = not self._quic._handshake_complete
        self.server.early += early
        self.server.requests.append((fields[b":method"].decode(), path))
        stream_id = event.stream_id
        if path == "/reject":
            self._quic.reset_stream(stream_id, REJECTED)
        elif path == "/reset":
            self._quic.reset_stream(stream_id, INTERNAL_ERROR)
        elif path == "/refuse":
            self._quic.stop_stream(stream_id, NO_ERROR)
            self.answer(stream_id, b"no", status=413)
        elif path == "/goaway":
            self.goaway(stream_id)
        elif path == "/bye":
            self._quic.close(error_code=NO_ERROR)
        elif path == "/425" and early:
            self.answer(stream_id, status=425)
        elif event.stream_ended:
            self._on_body(stream_id, b"", True)

    def _on_body(self, stream_id: int, data: bytes, ended: bool) -> None:
        path = self.paths[stream_id]
        self.sizes[stream_id] += len(data)
        if path == "/echo":
            if stream_id in self.sizes and self.sizes[stream_id] == len(data) and self.http is not None:
                self.http.send_headers(stream_id, [(b":status", b"200")])
            if self.http is not None:
                self.http.send_data(stream_id, data, ended)
            return
        if not ended:
            return
        self.server.bodies.append(self.sizes[stream_id])
        if path.startswith("/size/"):
            self.answer(stream_id, bytes(range(256)) * (int(path[6:]) // 256))
        elif path.startswith("/late/"):
            asyncio.get_running_loop().call_later(int(path[6:]) / 1000, self._late, stream_id)
        elif path == "/none":
            self.answer(stream_id, status=204)
        elif path == "/short":
            self.answer(stream_id, b"abc", length=9)
        elif path == "/sum":
            self.answer(stream_id, b"%d" % self.sizes[stream_id])
        elif path not in ("/hold", "/reject", "/reset", "/refuse", "/goaway", "/bye"):
            self.answer(stream_id, b"hello")

    def _late(self, stream_id: int) -> None:
        self.answer(stream_id, b"hello")
        self.transmit()

    def answer(self, stream_id: int, body: bytes = b"", *, status: int = 200, length: int | None = None) -> None:
        """Send an answer; to HEAD only its head."""
        if self.http is None:
            return
        fields = [(b":status", b"%d" % status), (b"content-length", b"%d" % (len(body) if length is None else length))]
        head = any(method == "HEAD" and path == self.paths[stream_id] for method, path in self.server.requests)
        if head or status in (204, 425):
            self.http.send_headers(stream_id, fields[: 1 if status == 204 else 2], end_stream=True)
            return
        self.http.send_headers(stream_id, fields)
        self.http.send_data(stream_id, body, end_stream=True)

    def goaway(self, stream_id: int) -> None:
        """Say that requests from a stream on are not touched."""
        if self.http is not None:
            control = cast("int", self.http._local_control_stream_id)
            self._quic.send_stream_data(control, encode_frame(FrameType.GOAWAY, encode_uint_var(stream_id)))


@asynccontextmanager
async def http3_server(
    certificate: Path,
    key: Path,
    *,
    host: str = "127.0.0.1",
    alpn: str = "h3",
    early_data: bool = True,
    retry: bool = False,
) -> AsyncIterator[Http3Server]:
    """Run a server on a port of a local address; with `retry` clients have to show that theirs is real first."""
    server = Http3Server()
    configuration = QuicConfiguration(is_client=False, alpn_protocols=[alpn], max_datagram_frame_size=65536)
    configuration.load_cert_chain(certificate, key)

    def fetch(ticket: bytes) -> SessionTicket | None:
        return server.tickets.pop(ticket, None) if early_data else None

    def keep(ticket: SessionTicket) -> None:
        server.tickets[ticket.ticket] = ticket

    class Bound(Connection):
        pass

    Bound.server = server
    listener = await serve(
        host,
        0,
        configuration=configuration,
        create_protocol=Bound,
        session_ticket_fetcher=fetch,
        session_ticket_handler=keep,
        retry=retry,
    )
    transport = cast("asyncio.DatagramTransport", listener._transport)
    server.address = Address(*transport.get_extra_info("sockname")[:2])
    try:
        yield server
    finally:
        for connection in server.connections:
            connection.close()
            connection.transmit()
        listener.close()
        for connection in server.connections:  # their timers would outlive the test
            if connection._timer is not None:
                connection._timer.cancel()


class LossyPath:
    """A UDP port that passes datagrams to another one and back, and loses some.

    Attributes:
        address: where it listens.
        loss: share of datagrams that are lost, each way.
        blocked: all are.
        lost: how many were.
    """

    def __init__(self, target: Address, seed: int = 1) -> None:
        self.loss = 0.0
        self.blocked = False
        self.lost = 0
        self.address = Address("127.0.0.1", 0)
        self._chance = Random(seed)  # noqa: S311 - losses, no secrets
        self._target = target
        self._front: asyncio.DatagramTransport | None = None
        self._backs: dict[Any, asyncio.DatagramTransport] = {}

    async def start(self) -> None:
        """Open the port."""
        loop = asyncio.get_running_loop()
        self._front, _ = await loop.create_datagram_endpoint(lambda: _End(self._forth), ("127.0.0.1", 0))
        self.address = Address(*self._front.get_extra_info("sockname")[:2])

    def _drop(self) -> bool:
        lost = self.blocked or self._chance.random() < self.loss
        self.lost += lost
        return lost

    def _forth(self, data: bytes, source: Any) -> None:
        if self._drop():
            return
        back = self._backs.get(source)
        if back is not None:
            back.sendto(data)
            return
        task = asyncio.ensure_future(self._open(data, source))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _open(self, data: bytes, source: Any) -> None:
        def back(answer: bytes, _: Any) -> None:
            if self._front is not None and not self._drop():
                self._front.sendto(answer, source)

        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            lambda: _End(back), remote_addr=(self._target.host, self._target.port)
        )
        self._backs.setdefault(source, transport)
        if self._backs[source] is not transport:
            transport.close()
        self._backs[source].sendto(data)

    def close(self) -> None:
        """Close all ports."""
        for transport in (self._front, *self._backs.values()):
            if transport is not None:
                transport.close()


class _End(asyncio.DatagramProtocol):
    def __init__(self, came: Any) -> None:
        self._came = came

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._came(data, addr)


@asynccontextmanager
async def lossy_path(target: Address, seed: int = 1) -> AsyncIterator[LossyPath]:
    """Run a path to a server; it loses nothing at first."""
    path = LossyPath(target, seed)
    await path.start()
    try:
        yield path
    finally:
        path.close()
