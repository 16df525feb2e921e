"""The server's end of HTTP/1.1 and HTTP/2 connections in simulation, as `asyncio.Protocol`s for `simserver`."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import httptools
from hyperframe.frame import GoAwayFrame

from stormline.testing.simserver import HttpTasks

_HTTP2_STREAMS: Final = 100
_FRAME_BYTES: Final = 16_384


@dataclass(frozen=True, slots=True)
class Asked:
    """A whole request; header names are in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body_bytes: int


class Exchange(Protocol):
    """One request on its connection, and the way its answer goes."""

    @property
    def version(self) -> int:
        """1 or 2."""
        ...

    def head(self, status: int, headers: list[tuple[str, str]], length: int | None) -> None:
        """Begin the answer; `length` None where it is not said."""
        ...

    def piece(self, data: bytes) -> None:
        """Send a part of the body."""
        ...

    def end(self) -> None:
        """The answer is whole."""
        ...

    def refuse(self) -> None:
        """Say that the request was not processed (REFUSED_STREAM; over HTTP/1.1 the connection ends)."""
        ...

    def goaway(self) -> None:
        """Say that this request and later ones are not processed, and take no more on this connection."""
        ...

    def reset(self) -> None:
        """Reset the whole connection."""
        ...

    def close(self, after_s: float) -> None:
        """Close the connection in good order in a while, whatever comes on it meanwhile."""
        ...


Handler = Callable[[Asked, Exchange], Awaitable[None]]


class Connection(asyncio.Protocol):
    """One connection; it speaks what TLS agreed on, HTTP/1.1 without TLS.

    Args:
        handler: answers.
        tasks: where answers are worked on.
    """

    def __init__(self, handler: Handler, tasks: HttpTasks) -> None:
        self._handler = handler
        self._tasks = tasks
        self._inner: _Http1 | _Http2 | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Find out what is spoken."""
        tls = transport.get_extra_info("ssl_object")
        agreed = tls.selected_alpn_protocol() if tls is not None else None
        kind = _Http2 if agreed == "h2" else _Http1
        self._inner = kind(transport, self._handler, self._tasks)

    def data_received(self, data: bytes) -> None:
        """Take bytes."""
        if self._inner is not None:
            self._inner.take(data)

    def eof_received(self) -> bool:
        """The client is done."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Answer nothing more."""
        if self._inner is not None:
            self._inner.lost()


class _Base:
    def __init__(self, transport: Any, handler: Handler, tasks: HttpTasks) -> None:
        self._transport = transport
        self._handler = handler
        self._tasks = tasks
        self._work: dict[asyncio.Task[None], None] = {}
        self.gone = False

    def _start(self, asked: Asked, exchange: "_Http1 | _Stream") -> None:
        task = self._tasks.start(self._handler(asked, exchange))
        self._work[task] = None
        task.add_done_callback(lambda done: self._work.pop(done, None))

    def lost(self) -> None:
        self.gone = True
        for task in list(self._work):
            task.cancel()

    def reset(self) -> None:
        self.gone = True
        self._transport.abort()

    def close(self, after_s: float) -> None:
        asyncio.get_running_loop().call_later(after_s, self._transport.close)


class _Http1(_Base):
    """HTTP/1.1: one request at a time; also its `Exchange`."""

    version = 1

    def __init__(self, transport: Any, handler: Handler, tasks: HttpTasks) -> None:
        super().__init__(transport, handler, tasks)
        self._parser = httptools.HttpRequestParser(self)
        self._chunked = False
        self.on_message_begin()

    def take(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.reset()

    # called by httptools
    def on_message_begin(self) -> None:
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self._body_bytes += len(data)

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode("ascii")
        self._start(Asked(method, self._target.decode("ascii"), self._headers, self._body_bytes), self)

    # the exchange
    def head(self, status: int, headers: list[tuple[str, str]], length: int | None) -> None:
        self._chunked = length is None
        framing = ("transfer-encoding", "chunked") if length is None else ("content-length", str(length))
        lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in (framing, *headers))]
        self._write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n")

    def piece(self, data: bytes) -> None:
        if data:
            self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self) -> None:
        if self._chunked:
            self._write(b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        if not self.gone:
            self._transport.write(data)

    def refuse(self) -> None:
        self._transport.close()

    def goaway(self) -> None:
        self._transport.close()


class _Http2(_Base):
    """HTTP/2 by `h2`."""

    def __init__(self, transport: Any, handler: Handler, tasks: HttpTasks) -> None:
        super().__init__(transport, handler, tasks)
        config = h2.config.H2Configuration(client_side=False, header_encoding="latin-1", validate_inbound_headers=False)
        self.h2 = h2.connection.H2Connection(config)
        codes = h2.settings.SettingCodes
        self.h2.local_settings = h2.settings.Settings(
            client=False, initial_values={codes.MAX_CONCURRENT_STREAMS: _HTTP2_STREAMS}
        )
        self._asked: dict[int, tuple[dict[str, str], list[int]]] = {}
        self.streams: dict[int, _Stream] = {}
        self.leaving = False
        self._last = 0
        self._begun: list[int] = []
        self.h2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        data = self.h2.data_to_send()
        if data and not self.gone:
            self._transport.write(data)

    def take(self, data: bytes) -> None:
        try:
            events = self.h2.receive_data(data)
        except h2.exceptions.ProtocolError:
            self.reset()
            return
        for event in events:  # the machine has dealt with all of them already: no frame goes out on what was reset
            if isinstance(event, h2.events.StreamReset) and (stream := self.streams.get(event.stream_id or 0)):
                stream.over = True
        for event in events:
            self._take(event)
        self.flush()

    def _take(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived():
                fields = {str(name): str(value) for name, value in event.headers or ()}
                self._asked[event.stream_id or 0] = (fields, [0])
            case h2.events.DataReceived():
                self.h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id or 0)
                if (event.stream_id or 0) in self._asked:
                    self._asked[event.stream_id or 0][1][0] += len(event.data or b"")
            case h2.events.StreamEnded():
                self._whole(event.stream_id or 0)
            case h2.events.StreamReset():
                self._asked.pop(event.stream_id or 0, None)
                stream = self.streams.pop(event.stream_id or 0, None)
                if stream is not None:
                    stream.over = True
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                for stream in list(self.streams.values()):
                    stream.pump()

    def _whole(self, number: int) -> None:
        found = self._asked.pop(number, None)
        if found is None or (self.leaving and number > self._last):
            return
        fields, size = found
        self._begun.append(number)
        stream = self.streams[number] = _Stream(self, number)
        headers = {name: value for name, value in fields.items() if not name.startswith(":")}
        self._start(Asked(fields[":method"], fields[":path"], headers, size[0]), stream)

    def goaway(self, refused: int) -> None:
        """Say that a stream and all that come are not processed; those that were begun before go on."""
        self.leaving = True
        self._last = max((number for number in self._begun if number != refused), default=0)
        if refused < self._last:  # it was begun before another, which is processed: it has to be refused alone
            self.h2.reset_stream(refused, h2.errors.ErrorCodes.REFUSED_STREAM)
            self.flush()
        self._transport.write(GoAwayFrame(0, last_stream_id=self._last).serialize())
        self.rest()

    def rest(self) -> None:
        """A stream is over; where the connection is leaving and none is left it ends."""
        if self.leaving and not self.streams:
            self._transport.close()


class _Stream:
    """One stream; see `Exchange`."""

    version = 2

    def __init__(self, connection: _Http2, number: int) -> None:
        self._connection = connection
        self._number = number
        self._pending = bytearray()
        self._ending = False
        self.over = False

    @property
    def _dead(self) -> bool:
        closed = self._connection.h2.state_machine.state is h2.connection.ConnectionState.CLOSED
        return self.over or self._connection.gone or closed  # closed: the client has said GOAWAY

    def head(self, status: int, headers: list[tuple[str, str]], length: int | None) -> None:
        if self._dead:
            return
        fields = [(":status", str(status)), *headers]
        if length is not None:
            fields.append(("content-length", str(length)))
        self._connection.h2.send_headers(self._number, fields)
        self._connection.flush()

    def piece(self, data: bytes) -> None:
        self._pending += data
        self.pump()

    def end(self) -> None:
        self._ending = True
        self.pump()

    def pump(self) -> None:
        """Send what the windows let."""
        if self._dead:
            return
        machine = self._connection.h2
        while self._pending and (room := machine.local_flow_control_window(self._number)) > 0:
            size = min(room, _FRAME_BYTES, len(self._pending))
            machine.send_data(self._number, bytes(self._pending[:size]))
            del self._pending[:size]
        if self._ending and not self._pending:
            machine.end_stream(self._number)
            self._over()
        self._connection.flush()
        self._connection.rest()

    def _over(self) -> None:
        self.over = True
        self._connection.streams.pop(self._number, None)

    def refuse(self) -> None:
        if not self._dead:
            self._connection.h2.reset_stream(self._number, h2.errors.ErrorCodes.REFUSED_STREAM)
            self._over()
            self._connection.flush()

    def goaway(self) -> None:
        if not self._dead:
            self._over()
            self._connection.goaway(self._number)

    def reset(self) -> None:
        self._connection.reset()

    def close(self, after_s: float) -> None:
        self._connection.close(after_s)
