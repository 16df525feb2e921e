"""Servers in simulation: asyncio protocol objects on simulated connections, and a small HTTP/1.1 server.

`serve` drives real `asyncio.Protocol` objects, such as the gateway's sessions, by a transport with write buffer,
`pause_writing`, `pause_reading` and TLS.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import httptools

from stormline.core import limits, limits_platform
from stormline.testing.simnet import Host, SimSocket
from stormline.testing.simtls import SimTlsContext

_HIGH_WATER_BYTES: Final = 64 * 1024
"""asyncio's own default of a transport's write buffer."""
_LOW_WATER_DIVISOR: Final = 4


class SimTransport(asyncio.Transport):
    """A server's end of a connection. `connection_made` comes when TLS stands.

    Args:
        sock: the connection.
        factory: makes the protocol object when it stands.
        context: TLS; None for plain.
        handshake_timeout_s: after which a TLS handshake is given up.
    """

    def __init__(
        self,
        sock: SimSocket,
        factory: Callable[[], asyncio.Protocol],
        context: SimTlsContext | None,
        *,
        handshake_timeout_s: float = limits_platform.TLS_HANDSHAKE_TIMEOUT_S,
    ) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._factory = factory
        self._protocol: asyncio.Protocol | None = None
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True) if context else None
        self._buffer = bytearray()
        self._high = _HIGH_WATER_BYTES
        self._paused_writing = False
        self._paused_reading = False
        self._closing = False
        self._lost = False
        self._handshake: asyncio.TimerHandle | None = None
        if self._tls is not None:
            self._handshake = self._loop.call_later(handshake_timeout_s, self.abort)
        else:
            self._connect()
        sock.watch_reading(self._readable)

    # -- asyncio.Transport -------------------------------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Give `peername`, `sockname` or `ssl_object`; there is no real socket."""
        match name:
            case "peername":
                return tuple(self._sock.getpeername())
            case "sockname":
                return tuple(self._sock.getsockname())
            case "ssl_object":
                return self._tls if self._tls is not None else default
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the high-water mark; the low one is a quarter of it."""
        self._high = _HIGH_WATER_BYTES if high is None else high

    def get_write_buffer_size(self) -> int:
        """Bytes written and not yet taken by the simulated kernel."""
        return len(self._buffer)

    def is_closing(self) -> bool:
        """True after `close` or a loss."""
        return self._closing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send; what the kernel has no room for waits in the buffer."""
        if self._closing or not data:
            return
        if self._tls is not None:
            for start in range(0, len(data), limits.CHUNK_BYTES_MAX):
                self._tls.write(bytes(data[start : start + limits.CHUNK_BYTES_MAX]))
            self._buffer += self._outgoing.read()
        else:
            self._buffer += data
        self._flush()

    def pause_reading(self) -> None:
        """Take nothing from the kernel, whose window then shuts."""
        self._paused_reading = True
        self._sock.watch_reading(None)

    def resume_reading(self) -> None:
        """Go on taking."""
        if self._paused_reading and not self._lost:
            self._paused_reading = False
            self._sock.watch_reading(self._readable)

    def close(self) -> None:
        """Send what is buffered, say close_notify, close."""
        if self._closing:
            return
        self._closing = True
        if self._tls is not None:
            with contextlib.suppress(ssl.SSLError):  # the peer's close_notify is not waited for
                self._tls.unwrap()
            self._buffer += self._outgoing.read()
        self._flush()

    def abort(self) -> None:
        """Reset the connection; what is buffered is lost."""
        self._closing = True
        self._buffer.clear()
        self._sock.end.abort()
        self._lose(None)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._handshake is not None:
            self._handshake.cancel()
        self._protocol = self._factory()
        self._protocol.connection_made(self)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(limits.RECEIVE_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError as error:
            self._closing = True
            self._lose(error)
            return
        if self._tls is None:
            self._take(data)
        else:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()
            self._through_tls()
        if not self._lost and not self._paused_reading:
            self._sock.watch_reading(self._readable)

    def _through_tls(self) -> None:
        tls = self._tls
        assert tls is not None  # noqa: S101  (the caller has looked)
        try:
            if self._protocol is None:
                tls.do_handshake()
                self._answer()
                self._connect()
            while not self._lost:
                self._take(tls.read(limits.RECEIVE_BYTES_MAX))
        except ssl.SSLWantReadError:
            self._answer()
        except ssl.SSLZeroReturnError:
            self._take(b"")
        except ssl.SSLError as error:
            self._closing = True
            self._sock.close()
            self._lose(error if self._protocol is not None else None)

    def _answer(self) -> None:
        self._buffer += self._outgoing.read()
        self._flush()

    def _take(self, data: bytes) -> None:
        if self._lost or self._protocol is None:
            return
        if data:
            if not self._closing:
                self._protocol.data_received(data)
        else:
            keep = self._protocol.eof_received()
            if not keep or self._tls is not None:
                self.close()
                self._sock.watch_reading(None)
                self._paused_reading = True

    def _flush(self) -> None:
        if self._lost:
            return
        try:
            while self._buffer:
                taken = self._sock.send(memoryview(bytes(self._buffer)))
                del self._buffer[:taken]
        except BlockingIOError:
            self._sock.watch_writing(self._writable)
        except OSError as error:
            self._closing = True
            self._lose(error)
            return
        self._mark()
        if self._closing and not self._buffer:
            self._sock.close()
            self._lose(None)

    def _writable(self) -> None:
        self._sock.watch_writing(None)
        self._flush()

    def _mark(self) -> None:
        if self._protocol is None:
            return
        if not self._paused_writing and len(self._buffer) > self._high:
            self._paused_writing = True
            self._protocol.pause_writing()
        elif self._paused_writing and len(self._buffer) <= self._high // _LOW_WATER_DIVISOR:
            self._paused_writing = False
            self._protocol.resume_writing()

    def _lose(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = True
        if self._handshake is not None:
            self._handshake.cancel()
        self._sock.close()
        if self._protocol is not None:
            self._loop.call_soon(self._protocol.connection_lost, error)


def serve(
    host: Host, port: int, factory: Callable[[], asyncio.Protocol], *, context: SimTlsContext | None = None
) -> None:
    """Listen, and give each connection that stands a protocol object."""
    host.listen(port, lambda sock: _begin(sock, factory, context))


def _begin(sock: SimSocket, factory: Callable[[], asyncio.Protocol], context: SimTlsContext | None) -> None:
    SimTransport(sock, factory, context)


# -- HTTP -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HttpCall:
    """A whole request as the simulated server got it; header names are in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    peer: str


@dataclass(frozen=True, slots=True)
class HttpReply:
    """What it answers."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


Handler = Callable[[HttpCall], Awaitable[HttpReply]]


class HttpProtocol(asyncio.Protocol):
    """One connection of the HTTP server: requests one after another, keep-alive, bodies whole in memory."""

    def __init__(self, handler: Handler, tasks: "HttpTasks") -> None:
        self._handler = handler
        self._tasks = tasks
        self._transport: asyncio.Transport | None = None
        self._peer = ""
        self._waiting: list[HttpCall] = []
        self._task: asyncio.Task[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101
        self._transport = transport
        self._peer = transport.get_extra_info("peername")[0]

    def data_received(self, data: bytes) -> None:
        """Parse."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self._transport is not None:
                self._transport.abort()

    def eof_received(self) -> bool:
        """The client is done."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop answering."""
        self._transport = None
        self._waiting.clear()

    # called by httptools
    def on_url(self, url: bytes) -> None:
        """Gather the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Gather a field."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        """Gather the body."""
        self._body += data

    def on_message_complete(self) -> None:
        """A request is whole."""
        method = self._parser.get_method().decode("ascii")
        call = HttpCall(method, self._target.decode("ascii"), self._headers, bytes(self._body), self._peer)
        self._target, self._headers, self._body = b"", {}, bytearray()
        self._waiting.append(call)
        if self._task is None:
            self._task = self._tasks.start(self._answer_all())

    async def _answer_all(self) -> None:
        try:
            while self._waiting:
                call = self._waiting.pop(0)
                reply = await self._handler(call)
                if self._transport is None:
                    return
                head = [f"HTTP/1.1 {reply.status} X", f"content-length: {len(reply.body)}"]
                head += [f"{name}: {value}" for name, value in reply.headers.items()]
                text = "\r\n".join(head).encode("latin-1") + b"\r\n\r\n"
                self._transport.write(text + (b"" if call.method == "HEAD" else reply.body))
        finally:
            self._task = None


class HttpTasks:
    """The requests a server works on."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}

    def start(self, work: Any) -> asyncio.Task[None]:
        """Run one."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work, name="sim http")
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def stop(self) -> None:
        """End them all, as the death of the process does."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class HttpServer:
    """An HTTP/1.1 server on a simulated host.

    Args:
        host: where.
        port: on which port.
        handler: answers.
        context: TLS; None for plain.
    """

    def __init__(self, host: Host, port: int, handler: Handler, *, context: SimTlsContext | None = None) -> None:
        self._host = host
        self._port = port
        self._handler = handler
        self._context = context
        self._tasks = HttpTasks()

    def start(self) -> None:
        """Listen."""
        serve(self._host, self._port, lambda: HttpProtocol(self._handler, self._tasks), context=self._context)

    async def kill(self) -> None:
        """Die at once: connections are reset, requests in progress come to nothing."""
        self._host.unlisten(self._port)
        self._host.kill_connections(self._port)
        await self._tasks.stop()


def asgi(app: Any) -> Handler:
    """Answer by an ASGI application."""

    async def handle(call: HttpCall) -> HttpReply:
        path, _, query = call.target.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": call.method,
            "scheme": "https",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in call.headers.items()],
            "client": (call.peer, 0),
            "server": ("sim", 443),
        }
        given = False

        async def receive() -> dict[str, Any]:
            nonlocal given
            if given:
                return {"type": "http.disconnect"}
            given = True
            return {"type": "http.request", "body": call.body, "more_body": False}

        status, headers, body = 500, {}, bytearray()

        async def send(message: dict[str, Any]) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            else:
                body.extend(message.get("body", b""))

        await app(scope, receive, send)
        headers.pop("content-length", None)
        return HttpReply(status, bytes(body), headers)

    return handle
