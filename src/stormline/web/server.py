"""HTTP for the server roles: an ASGI application under uvicorn inside the role's own event loop.

We bind the socket ourselves: a busy port is one clear error before anything starts, and port 0 gives a free one.
"""

import asyncio
import contextlib
import logging
import math
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.limits import CLOSE_FLUSH_S
from stormline.core.values import Address
from stormline.web.peers import line_of

_log = logging.getLogger("stormline.web")
_LATE: Final = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_STOP_STEP_S: Final = 0.25
"""How often a stopping server looks for peers that do not take their end of the connection."""


class TlsFiles(NamedTuple):
    """Certificate chain and private key, PEM."""

    certificate: Path
    key: Path


class _Crowd:
    """The connections of one server that owe it a head, by the subscriber's line they come from.

    Attributes:
        closes: connections that the server ended, by the reason.
    """

    def __init__(self) -> None:
        self.closes: Counter[str] = Counter()
        self._lines: dict[str, dict[_Protocol, None]] = {}  # of each line the oldest first

    def owes(self, connection: "_Protocol", line: str) -> None:
        """A head is awaited. Of a line that owes too many the one awaited for longest goes."""
        same_line = self._lines.setdefault(line, {})
        same_line[connection] = None
        if len(same_line) > limits.HTTP_HEADS_PER_LINE_MAX:
            next(iter(same_line)).refuse("crowded-line", _LATE)

    def paid(self, connection: "_Protocol", line: str) -> None:
        """The head is there, or its connection is gone."""
        same_line = self._lines.get(line)
        if same_line is not None:
            same_line.pop(connection, None)
            if not same_line:
                del self._lines[line]


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, crowd: _Crowd) -> None:
        super().__init__(config)
        self._crowd = crowd

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as uvicorn does, with a bound for the time that a TLS handshake takes: its own is 60 s."""
        await self.lifespan.startup()
        loop, config = asyncio.get_running_loop(), self.config
        self.lifespan.state["closes"] = self._crowd.closes
        bounds: dict[str, float] = {}
        if config.ssl is not None:
            bounds = {"ssl_handshake_timeout": limits.TLS_HANDSHAKE_TIMEOUT_S, "ssl_shutdown_timeout": CLOSE_FLUSH_S}

        def connected() -> _Protocol:
            return _Protocol(config, self.server_state, self.lifespan.state, self._crowd)

        self.servers = [
            await loop.create_server(connected, sock=sock, ssl=config.ssl, backlog=config.backlog, **bounds)  # type: ignore[call-overload]
            for sock in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the role; uvicorn would take SIGINT and SIGTERM for itself."""
        yield


class _Joined:
    """The transport as the answer to one request sees it: a piece waits for the one that follows in the same turn of
    the loop, so that head and body leave in one system call, one segment and one TLS record.
    """

    __slots__ = ("_held", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""

    def write(self, data: bytes) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held + data)
        elif data:
            self._held = data
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        held, self._held = self._held, b""
        if held and not self._transport.is_closing():  # the peer may have gone meanwhile
            self._transport.write(held)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._flush()
        self._transport.close()


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with the bounds it lacks: the size of a request's head, and an absolute time for it.

    The time runs from the first byte of a head (for the first one from the connection's start) and is not reset by
    bytes that dribble in. Between requests uvicorn's own keep-alive time-out rules.
    """

    _read_bytes = 0
    _head_bytes = 0
    _head_due = math.inf
    _head_timer: asyncio.TimerHandle | None = None
    _line = ""

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], crowd: _Crowd
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._crowd = crowd

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None:
            self._line = line_of(self.client[0])
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._read_bytes = len(data)
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if self._head_due == math.inf and (cycle is None or (cycle.response_complete and not cycle.more_body)):
            self._expect_head()  # uvicorn's keep-alive ends with any byte, also with one that begins no head
        if self._head_due < math.inf:
            # Counted in whole reads: at most one read more than the bound is ever held.
            self._head_bytes += self._read_bytes
        super().data_received(data)
        if self._head_due < math.inf and self._head_bytes > limits.REQUEST_HEAD_BYTES_MAX:
            self.refuse("large-head", _LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_due == math.inf:
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_came()
        if self._head_bytes or self._read_bytes > limits.REQUEST_HEAD_BYTES_MAX:  # else it came whole in a small read
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > limits.REQUEST_HEAD_BYTES_MAX:
                self.refuse("large-head", _LARGE)
                raise ValueError("request head too large")
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.transport = cast("asyncio.Transport", _Joined(self.transport, self.loop))
        super()._start_asgi_task(cycle, app)

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._head_due = self.loop.time() + limits.REQUEST_HEAD_TIMEOUT_S
        self._crowd.owes(self, self._line)
        if self._head_timer is None:
            self._head_timer = self.loop.call_at(self._head_due, self._look_at_head)

    def _head_came(self) -> None:
        self._head_due = math.inf
        self._crowd.paid(self, self._line)

    def _look_at_head(self) -> None:
        """Refuse a head that is late; a timer that is moved along costs less than one for each request."""
        self._head_timer = None
        if self._head_due <= self.loop.time():
            self.refuse("late-head", _LATE)
        elif self._head_due < math.inf:
            self._head_timer = self.loop.call_at(self._head_due, self._look_at_head)

    def timeout_keep_alive_handler(self) -> None:
        """See uvicorn."""
        self._crowd.closes["idle"] += 1
        super().timeout_keep_alive_handler()

    def refuse(self, why: str, answer: bytes) -> None:
        """End the connection with an answer; `why` is counted."""
        self._head_came()
        self._crowd.closes[why] += 1
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()


def bind(host: str, port: int, what: str) -> socket.socket:
    """Bind a listening TCP socket.

    Raises:
        PlatformError: the address is taken or not ours; the message names `what` and the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY only then
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        raise errors.PlatformError(f"{what}: cannot listen on {Address(host, port)}: {reason}") from error
    return sock


def _config(app: Any, tls: TlsFiles | None, what: str) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        ssl_certfile=str(tls.certificate) if tls else None,
        ssl_keyfile=str(tls.key) if tls else None,
        interface="asgi3",
        ws="none",
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_config=None,
        timeout_keep_alive=int(limits.HTTP_KEEP_ALIVE_S),
        timeout_graceful_shutdown=int(limits.HTTP_DRAIN_S),
        limit_concurrency=min(limits.HTTP_CONNECTIONS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2),
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise errors.PlatformError(f"{what}: certificate {tls.certificate if tls else ''}: {error}") from error
    if config.ssl is not None:
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
    return config


class HttpServer:
    """One ASGI application on one address.

    Use as `await server.start()` ... `await server.stop()`; both may be called once.

    Args:
        app: the ASGI application.
        host: address to listen on.
        port: port, 0 for a free one.
        what: names the server in errors.
        tls: serve HTTPS, TLS 1.3 only; None serves plain HTTP.

    Raises:
        PlatformError: the address is taken, or the certificate cannot be used.
    """

    def __init__(self, app: Any, *, host: str, port: int, what: str, tls: TlsFiles | None = None) -> None:
        self._what = what
        self._crowd = _Crowd()
        self._server = _Server(_config(app, tls, what), self._crowd)
        self._socket = bind(host, port, what)
        name = self._socket.getsockname()
        self.address = Address(name[0], name[1])
        """Where it listens; the port is the real one also where 0 was asked for."""
        self._task: asyncio.Task[None] | None = None

    @property
    def closes(self) -> Mapping[str, int]:
        """Connections that the server ended, by the reason; an application finds it in `scope["state"]["closes"]`."""
        return self._crowd.closes

    async def start(self) -> None:
        """Begin to serve.

        Raises:
            PlatformError: it stopped before it had started.
        """
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name=f"http {self._what}")
        while not self._server.started:
            if self._task.done():
                self._socket.close()
                error = self._task.exception()
                raise errors.PlatformError(f"{self._what}: HTTP server did not start: {error}") from error
            await asyncio.sleep(0.005)

    async def stop(self, within_s: float = limits.HTTP_DRAIN_S) -> None:
        """Stop accepting, let requests in flight end for at most `within_s`, close.

        A peer that does not take its end of the connection (idle TLS clients seldom do) is cut off.
        """
        # uvicorn says int and hands it to a time-out, which takes a part of a second as well.
        self._server.config.timeout_graceful_shutdown = cast("int", within_s)
        self._server.should_exit = True
        closing: set[asyncio.BaseTransport] = set()
        while self._task is not None and not self._task.done():
            await asyncio.wait({self._task}, timeout=_STOP_STEP_S)
            now = {each.transport for each in self._server.server_state.connections if each.transport.is_closing()}
            for transport in closing & now:
                transport.abort()  # type: ignore[attr-defined]
            closing = set(now)
        self._socket.close()
        if self._task is not None:
            self._task.result()
