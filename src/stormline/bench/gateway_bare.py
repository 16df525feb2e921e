"""The floor of a gateway on this event loop: protocol objects that read and write the same bytes, and do nothing else.

They keep no account of sessions, calls or pushes, check nothing, bound nothing: what the gateway costs more is what it
does for that.
"""

import asyncio
import ssl
from typing import cast

from stormline.web.server import TlsFiles
from stormline.wire import frames
from stormline.wire import messages as m

_WELCOME = frames.encode(m.Welcome(1, "s", "d", heartbeat_s=60.0))


class Bare:
    """All connections of the process; pushes have this body."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.connections: dict[_Connection, None] = {}
        self._awaited = 0
        self._all: asyncio.Future[None] | None = None

    async def listen(self, files: TlsFiles) -> tuple[int, int]:
        """Take connections; give the plain and the TLS port."""
        loop = asyncio.get_running_loop()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(files.certificate, files.key)
        context.set_alpn_protocols([m.ALPN])
        ports = []
        for tls in (None, context):
            server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0, ssl=tls, backlog=4096)
            ports.append(server.sockets[0].getsockname()[1])
        return ports[0], ports[1]

    async def push(self, rounds: int) -> None:
        """Push as `gateway_host` does; a frame is made once for all who are at the same number."""
        self._awaited = rounds * len(self.connections)
        self._all = asyncio.get_running_loop().create_future()
        for number in range(rounds):
            made: dict[int, bytes] = {}
            for each in self.connections:
                each.pushed += 1
                frame = made.get(each.pushed)
                if frame is None:
                    push = m.Push(each.pushed, str(number), "t", (), self._body)
                    frame = made[each.pushed] = frames.encode(push)
                each.transport.write(frame)
            await asyncio.sleep(0)
        await self._all

    def acked(self) -> None:
        """Count an acknowledgement."""
        self._awaited -= 1
        if self._awaited == 0 and self._all is not None:
            self._all.set_result(None)


class _Connection(asyncio.Protocol):
    __slots__ = ("_all", "_greeted", "pushed", "transport")

    transport: asyncio.WriteTransport

    def __init__(self, everyone: Bare) -> None:
        self._all = everyone
        self._greeted = False
        self.pushed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        if not self._greeted:
            self._greeted = True
            self._all.connections[self] = None
            self.transport.write(_WELCOME)
            return
        start = 0
        while start < len(data):  # the clients send whole frames, below 64 KiB
            size = data[start + 2] << 8 | data[start + 3]
            end = start + frames.PREFIX_BYTES + size
            message = frames.decode_payload(data[start + frames.PREFIX_BYTES : end])
            if isinstance(message, m.Call):
                self.transport.write(frames.encode(m.Reply(message.id, 0, (), message.body)))
            else:
                self._all.acked()
            start = end

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.connections.pop(self, None)
