"""The long connection inside a WebSocket (RFC 6455), as a stream of the frames' bytes.

`websockets` is imported with this module, which costs 50 ms: whoever dials nothing of this kind need not load it.
"""

import contextlib
import logging
from http import HTTPStatus
from typing import Any, Final, cast

from websockets.client import ClientProtocol
from websockets.exceptions import WebSocketException
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import OPEN
from websockets.uri import parse_uri

from stormline.core import errors, limits, limits_carriers
from stormline.core.codes import Code
from stormline.net.stream import Stream, closed_error
from stormline.net.tcpinfo import TcpInfo
from stormline.wire import frames, messages, websocket

_library_log: Final = logging.getLogger("stormline.outbound.websockets")
_library_log.setLevel(logging.WARNING)  # it tells of each connection


class WebSocketStream:
    """`Stream` of whole frames (`wire.frames`) through a WebSocket on another stream, which it owns.

    Made by `open_websocket`. Every `send_all` brings whole frames; what is received may be cut anywhere.
    """

    carrier: Final = "sl-wss"
    """`wire.plan.Carrier`, by value: that module is loaded with a platform only."""

    __slots__ = ("_ended", "_mark", "_pending", "_plain", "_raw", "_receiving", "_sending", "_sent", "_size", "_ws",
                 "alpn", "local", "peer")  # fmt: skip

    def __init__(self, raw: Stream, ws: ClientProtocol) -> None:
        self._raw = raw
        self._ws = ws
        self._plain = bytearray()  # received and not yet asked for
        self._pending = bytearray()  # answers to pings that wait for their turn
        self._ended = False
        self._receiving = self._sending = False
        self._sent = 0  # bytes of frames in messages that are out
        self._size = self._mark = 0  # the message on its way: its frames' bytes; raw.sent_bytes before it
        self.alpn: str | None = messages.ALPN
        self.peer = raw.peer
        self.local = raw.local

    @property
    def sent_bytes(self) -> int:
        """Bytes of the frames of every message of which the kernel has taken at least one byte."""
        return self._sent + (self._size if self._raw.sent_bytes > self._mark else 0)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._raw.closed

    def leave_quiet(self) -> None:
        """See `Stream.leave_quiet`."""
        self._raw.leave_quiet()

    @property
    def heard_at(self) -> float:
        """See `Stream.heard_at`."""
        return self._raw.heard_at

    def tcp_info(self) -> TcpInfo | None:
        """See `Stream.tcp_info`."""
        return self._raw.tcp_info()

    @property
    def has_unsent(self) -> bool:
        """See `Stream.has_unsent`."""
        return bool(self._pending) or self._raw.has_unsent

    async def send_all(self, data: bytes | memoryview) -> None:
        """See `Stream.send_all`; `data` is whole frames."""
        if self._sending:
            raise errors.LocalProtocolError("another task is sending on this stream")
        if self._raw.closed or self._ws.state is not OPEN:
            raise closed_error()
        self._sending = True
        try:
            await self._send_pending()
            for message in websocket.messages(bytes(data)):
                self._ws.send_binary(message)
                out = b"".join(self._ws.data_to_send())
                self._mark, self._size = self._raw.sent_bytes, len(message)
                await self._raw.send_all(out)
                self._settle()
                await self._send_pending()
        finally:
            self._settle()
            self._sending = False

    def send_nowait(self, data: bytes | memoryview) -> int:
        """See `Stream.send_nowait`: nothing goes without waiting."""
        return 0

    def _settle(self) -> None:
        self._sent = self.sent_bytes
        self._size = 0

    async def _send_pending(self) -> None:
        while self._pending:
            pending, self._pending = bytes(self._pending), bytearray()
            await self._raw.send_all(pending)

    async def receive(self, size_max: int = limits.RECEIVE_BYTES_MAX) -> bytes:
        """See `Stream.receive`."""
        if self._receiving:
            raise errors.LocalProtocolError("another task is receiving on this stream")
        self._receiving = True
        try:
            while (data := self._take(size_max)) is None:
                await self._feed(await self._raw.receive())
            return data
        finally:
            self._receiving = False

    def receive_nowait(self, size_max: int = limits.RECEIVE_BYTES_MAX) -> bytes | None:
        """See `Stream.receive_nowait`. Answers to pings wait for the next send."""
        while (data := self._take(size_max)) is None:
            received = self._raw.receive_nowait()
            if received is None:
                return None
            self._digest(received)
        return data

    def _take(self, size_max: int) -> bytes | None:
        if self._plain:
            data = bytes(self._plain[:size_max])
            del self._plain[:size_max]
            return data
        return b"" if self._ended else None

    async def _feed(self, data: bytes) -> None:
        self._digest(data)
        if self._pending and not self._sending:
            self._sending = True
            try:
                await self._send_pending()
            finally:
                self._sending = False

    def _digest(self, data: bytes) -> None:
        """Put the payload of what came aside, and what has to be answered."""
        ws = self._ws
        if data:
            ws.receive_data(data)
        else:
            self._ended = True
        for event in ws.events_received():
            if isinstance(event, Frame) and event.opcode in (Opcode.BINARY, Opcode.CONT):
                self._plain += event.data
        self._pending += b"".join(ws.data_to_send())
        if ws.state is not OPEN:
            self._ended = True
        if ws.parser_exc is not None or len(self._pending) > limits_carriers.WS_CONTROL_BYTES_MAX:
            raise ConnectionAbortedError(f"WebSocket: {ws.parser_exc or 'it asks for signs of life and reads none'}")

    def is_readable(self) -> bool:
        """See `Stream.is_readable`."""
        return bool(self._plain) or self._ended or self._raw.is_readable()

    def close(self) -> None:
        """See `Stream.close`. Says good-bye where the kernel takes it at once."""
        if self._ws.state is OPEN and not (self._sending or self.has_unsent or self._raw.closed):
            self._ws.send_close(CloseCode.NORMAL_CLOSURE)
            with contextlib.suppress(OSError, errors.LocalProtocolError):
                self._raw.send_nowait(b"".join(self._ws.data_to_send()))
        self._raw.close()


async def open_websocket(raw: Stream, host: str, *, secure: bool = True) -> WebSocketStream:
    """Ask for a WebSocket on `raw` and take it over; failed or cancelled, `raw` is closed.

    Args:
        raw: a fresh connection to the gateway, TLS and all.
        host: `Host` of the request: the gateway's name, with its port where that is not the scheme's.
        secure: TLS is below.

    Raises:
        OSError: the connection broke, or what answers opens none: a proxy, a captive portal. The text says what it
            answered.
        RefusedError: it says that it takes nobody for so long: 503 with `Retry-After` in seconds.
        ssl.SSLError: TLS is broken.
    """
    try:
        uri = parse_uri(f"{'wss' if secure else 'ws'}://{host}{websocket.PATH}")
        ws = ClientProtocol(
            uri,
            subprotocols=cast("Any", [websocket.SUBPROTOCOL]),
            max_size=frames.PREFIX_BYTES + limits.FRAME_BYTES_MAX,
            logger=_library_log,
        )
        ws.send_request(ws.connect())
        await raw.send_all(b"".join(ws.data_to_send()))
        stream = WebSocketStream(raw, ws)
        size = 0
        while ws.state is not OPEN:
            data = await raw.receive()
            size += len(data)
            if not data:
                raise ConnectionResetError("it hung up in place of a WebSocket")
            ws.receive_data(data)
            events = ws.events_received()
            if (wait_s := _retry_after_s(events)) is not None:
                raise errors.RefusedError(Code.OVERLOADED, "no WebSocket: status 503", wait_s)
            if ws.handshake_exc is not None or size > limits.HTTP_HEAD_BYTES_MAX:
                raise ConnectionRefusedError(f"no WebSocket: {_reason(ws.handshake_exc, events)}")
            for event in events:
                if isinstance(event, Frame) and event.opcode in (Opcode.BINARY, Opcode.CONT):
                    stream._plain += event.data
        return stream
    except (WebSocketException, ValueError) as error:
        raw.close()
        raise OSError(f"no WebSocket: {error}") from error
    except BaseException:
        raw.close()
        raise


def _retry_after_s(events: list[Any]) -> float | None:
    for event in events:
        if isinstance(event, Response) and event.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
            told = event.headers.get_all("Retry-After")
            if len(told) == 1 and told[0].isascii() and told[0].isdigit() and len(told[0]) <= 6:
                return float(told[0])
    return None


def _reason(error: BaseException | None, events: list[Any]) -> str:
    for event in events:
        if isinstance(event, Response):
            return f"status {event.status_code}"
    return str(error) if error is not None else "the answer's head is too large"
