"""The origin's connections: TLS, HTTP/1.1, HTTP/2, and what goes wrong on them by order of a `specs.Behaviour`.

TLS runs over memory buffers, so that a connection can be cut at any byte of what the network sees.
"""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import httptools
from hyperframe.frame import GoAwayFrame

from stormline.core import limits, limits_lab
from stormline.lab.origin_answers import Request, Site
from stormline.lab.specs import Behaviour

_REASONS: Final = {200: "OK", 400: "Bad Request", 404: "Not Found", 503: "Service Unavailable"}
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close sends RST

Headers = Sequence[tuple[str, str]]


class _Tls:
    """A server's TLS over memory buffers."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.ready = False
        self.ended = False

    @property
    def protocol(self) -> str | None:
        return self._object.selected_alpn_protocol()

    def receive(self, data: bytes) -> bytes:
        """Take bytes from the network and give what they hold; raises `ssl.SSLError`."""
        self._incoming.write(data)
        parts: list[bytes] = []
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            if not self.ready:
                self._object.do_handshake()
                self.ready = True
            while True:
                part = self._object.read(65_536)
                if not part:
                    self.ended = True
                    break
                parts.append(part)
        return b"".join(parts)

    def send(self, data: bytes) -> None:
        self._object.write(data)

    def end(self) -> None:
        with contextlib.suppress(ssl.SSLError):
            self._object.unwrap()

    def take(self) -> bytes:
        """Give what is to be sent to the network."""
        return self._outgoing.read()


class _Session(Protocol):
    """HTTP of one version on a connection."""

    def receive(self, data: bytes) -> None:
        """Take bytes from the client."""

    def close(self) -> None:
        """End all work; the connection is gone."""


class Connection(asyncio.Protocol):
    """One TCP connection to a site."""

    def __init__(self, site: Site, context: ssl.SSLContext | None, on_end: Callable[["Connection"], None]) -> None:
        """Serve a client.

        Args:
            site: what is served and what goes wrong.
            context: TLS; None: plain HTTP.
            on_end: told when the connection is gone.
        """
        self.site = site
        self._tls = None if context is None else _Tls(context)
        self._on_end = on_end
        self._fate = site.connection_fate()
        self._left_bytes = site.behaviour.cut_after_bytes
        self._transport: asyncio.Transport | None = None
        self._session: _Session | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._linger: asyncio.TimerHandle | None = None
        """Set once the connection is being closed."""

    # -- from the loop ------------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(f"no stream: {transport!r}")
        self._transport = transport
        self.site.count_connection()
        if self._tls is None:
            self._session = Http1(self)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the network."""
        if self._fate == "accept-only" or self._linger is not None:
            return
        if self._fate == "reset":
            self.abort()
            return
        if self._tls is not None:
            try:
                data = self._tls.receive(data)
            except ssl.SSLError:
                self._flush()  # the alert
                self.close()
                return
            self._flush()
            if self._session is None and self._tls.ready:
                self._session = Http2(self) if self._tls.protocol == "h2" else Http1(self)
        if data and self._session is not None:
            self._session.receive(data)
        if self._tls is not None and self._tls.ended:
            self.close()

    def eof_received(self) -> bool:
        """Close also our side: a client that has closed waits for nothing."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """End all work."""
        self._transport = None
        self._writable.set()
        if self._linger is not None:
            self._linger.cancel()
        if self._session is not None:
            self._session.close()
        self._on_end(self)

    def pause_writing(self) -> None:
        """Wait with more."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Go on."""
        self._writable.set()

    # -- for the session ----------------------------------------------------------------------------------------------
    @property
    def mute(self) -> bool:
        """True where requests are read and never answered, as by a server whose workers hang: TLS, SETTINGS and PING
        of the same connection work."""
        if self.site.behaviour.mute_http2 and isinstance(self._session, Http2):
            return True
        return self._fate == "mute"

    @property
    def open(self) -> bool:
        """False once the connection is gone or being closed."""
        return self._transport is not None and not self._transport.is_closing() and self._linger is None

    def send(self, data: bytes) -> None:
        """Send bytes to the client; nothing happens on a connection that is gone."""
        if self._tls is not None:
            with contextlib.suppress(ssl.SSLError):
                self._tls.send(data)
            self._flush()
        else:
            self._put(data)

    async def drain(self) -> None:
        """Wait until the connection takes more."""
        await self._writable.wait()

    def close(self) -> None:
        """Close after what was sent, and take no notice of what still comes.

        Lingers as web servers do: a socket closed while the client still sends is answered by RST, which would destroy
        answers on their way.
        """
        if self._transport is None or self._linger is not None:
            return
        if self._tls is not None and self._tls.ready:
            self._tls.end()
            self._flush()
        self._linger = asyncio.get_running_loop().call_later(limits.LAB_LINGER_S, self._transport.close)
        if not self._transport.is_closing():
            self._transport.write_eof()

    def abort(self) -> None:
        """Reset the connection."""
        if self._transport is None:
            return
        plug = self._transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()

    def _flush(self) -> None:
        if self._tls is not None:
            self._put(self._tls.take())

    def _put(self, data: bytes) -> None:
        if self._fate == "cut":
            data = data[: self._left_bytes]
            self._left_bytes -= len(data)
        if data and self.open and self._transport is not None:
            self._transport.write(data)


class Tasks:
    """The work of one connection; ends with it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run something beside the rest."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """End all."""
        for task in self._tasks:
            task.cancel()

    def __len__(self) -> int:
        return len(self._tasks)


class Http1:
    """HTTP/1.1 (and 1.0) on a connection: one request after the other, in order."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[tuple[Request, bool]] = deque()
        self._tasks = Tasks()
        self._served = 0
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body = bytearray()

    def receive(self, data: bytes) -> None:
        """Take bytes from the client."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # not asked for by anybody here; the request itself was taken
        except httptools.HttpParserError:
            self._connection.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self._connection.close()

    def close(self) -> None:
        """End all work."""
        self._tasks.cancel()

    # -- from the parser ----------------------------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        """Forget the request before."""
        self._url, self._headers, self._body = b"", {}, bytearray()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._body += body
        if len(self._body) > limits_lab.LAB_REQUEST_BODY_BYTES_MAX:
            self._connection.abort()

    def on_message_complete(self) -> None:
        """Queue the request."""
        method = self._parser.get_method().decode("latin-1")
        request = Request(method, self._url.decode("latin-1"), self._headers, bytes(self._body))
        self._waiting.append((request, self._parser.should_keep_alive()))
        if len(self._waiting) > limits_lab.LAB_PIPELINE_MAX:
            self._connection.abort()
        elif len(self._waiting) == 1:
            self._tasks.start(self._serve())

    # -- answers ------------------------------------------------------------------------------------------------------
    async def _serve(self) -> None:
        while self._waiting:
            request, keep = self._waiting[0]
            self._served += 1
            if self._connection.mute:
                self._connection.site.count_request(request)
                await asyncio.Event().wait()
            behaviour = self._connection.site.behaviour
            keep = keep and not behaviour.http10
            if behaviour.requests_max is not None and self._served >= behaviour.requests_max:
                keep = False
            await self._connection.site.answer(request, _Http1Answer(self._connection, behaviour, keep))
            if not keep:
                self._connection.close()
                return
            self._waiting.popleft()


class _Http1Answer:
    def __init__(self, connection: Connection, behaviour: Behaviour, keep: bool) -> None:
        self._connection = connection
        self._http10 = behaviour.http10
        self._keep = keep

    def start(self, status: int, headers: Headers) -> None:
        version = "1.0" if self._http10 else "1.1"
        lines = [f"HTTP/{version} {status} {_REASONS.get(status, 'Status')}"]
        # What speaks HTTP/1.0 passes the body on until the connection ends.
        lines += [f"{name}: {value}" for name, value in headers if not (self._http10 and name == "content-length")]
        if not self._keep:
            lines.append("connection: close")
        self._connection.send("\r\n".join([*lines, "", ""]).encode("latin-1"))

    async def write(self, data: bytes) -> None:
        await self._connection.drain()
        self._connection.send(data)

    def end(self) -> None:
        pass


class Http2:
    """HTTP/2 on a connection (RFC 9113)."""

    def __init__(self, connection: Connection) -> None:
        config = h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        self._connection = connection
        self._h2 = h2.connection.H2Connection(config)
        self._h2.initiate_connection()
        self._tasks = Tasks()
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._requests: dict[int, Request] = {}
        self._window = asyncio.Event()
        self._served = 0
        self._last_stream: int | None = None
        self.flush()

    def receive(self, data: bytes) -> None:
        """Take bytes from the client."""
        try:
            events = self._h2.receive_data(data)
        except h2.exceptions.ProtocolError:
            self.flush()
            self._connection.close()
            return
        for event in events:
            self._take(event)
        self.flush()

    def close(self) -> None:
        """End all work."""
        self._tasks.cancel()

    def flush(self) -> None:
        """Send what the state machine wants sent."""
        data = self._h2.data_to_send()
        if data:
            self._connection.send(data)

    def _take(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived():
                self._begin(event)
            case h2.events.DataReceived():
                self._take_body(event)
            case h2.events.StreamEnded():
                self._end(event.stream_id)
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                self._window.set()
            case h2.events.StreamReset():
                self._requests.pop(event.stream_id, None)
                task = self._streams.get(event.stream_id)
                if task is not None:
                    task.cancel()
            case h2.events.ConnectionTerminated():
                self._connection.close()
            case _:
                pass

    def _begin(self, event: h2.events.RequestReceived) -> None:
        if self._last_stream is not None:  # after GOAWAY: the client may ask elsewhere (RFC 9113 section 6.8)
            self._h2.reset_stream(event.stream_id, h2.errors.ErrorCodes.REFUSED_STREAM)
            return
        headers = {str(name): str(value) for name, value in event.headers}
        request = Request(headers.get(":method", ""), headers.get(":path", ""), headers, b"")
        self._requests[event.stream_id] = request
        self._served += 1
        most = self._connection.site.behaviour.requests_max
        if most is not None and self._served >= most:
            self._last_stream = event.stream_id
            self.flush()
            # `H2Connection.close_connection` would forbid the answers that are still owed.
            goodbye = GoAwayFrame(0, last_stream_id=event.stream_id, error_code=0)
            self._connection.send(goodbye.serialize())

    def _take_body(self, event: h2.events.DataReceived) -> None:
        if event.flow_controlled_length:
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        request = self._requests.get(event.stream_id)
        if request is not None:
            request.body += event.data
            if len(request.body) > limits_lab.LAB_REQUEST_BODY_BYTES_MAX:
                self._connection.abort()

    def _end(self, stream_id: int) -> None:
        request = self._requests.pop(stream_id, None)
        if request is None:
            return
        task = self._tasks.start(self._serve(stream_id, request))
        self._streams[stream_id] = task
        task.add_done_callback(lambda _: self._finished(stream_id))

    def _finished(self, stream_id: int) -> None:
        self._streams.pop(stream_id, None)
        if self._last_stream is not None and not self._streams and not self._requests:
            self._connection.close()

    async def _serve(self, stream_id: int, request: Request) -> None:
        if self._connection.mute:
            self._connection.site.count_request(request)
            await asyncio.Event().wait()
        with contextlib.suppress(h2.exceptions.ProtocolError):  # the client has given the stream up
            await self._connection.site.answer(request, _Http2Answer(self, stream_id))

    # -- for answers --------------------------------------------------------------------------------------------------
    def send_headers(self, stream_id: int, status: int, headers: Headers) -> None:
        """Begin an answer."""
        self._h2.send_headers(stream_id, [(":status", str(status)), *headers])
        self.flush()

    async def send_data(self, stream_id: int, data: bytes) -> None:
        """Send a piece of a body within the client's windows."""
        left = memoryview(data)
        while left:
            await self._connection.drain()
            room = min(self._h2.local_flow_control_window(stream_id), self._h2.max_outbound_frame_size, len(left))
            if room <= 0:
                self._window.clear()
                await self._window.wait()
                continue
            self._h2.send_data(stream_id, bytes(left[:room]))
            self.flush()
            left = left[room:]

    def end_stream(self, stream_id: int) -> None:
        """End an answer."""
        self._h2.end_stream(stream_id)
        self.flush()


class _Http2Answer:
    def __init__(self, session: Http2, stream_id: int) -> None:
        self._session = session
        self._stream_id = stream_id

    def start(self, status: int, headers: Headers) -> None:
        self._session.send_headers(self._stream_id, status, headers)

    async def write(self, data: bytes) -> None:
        await self._session.send_data(self._stream_id, data)

    def end(self) -> None:
        self._session.end_stream(self._stream_id)
