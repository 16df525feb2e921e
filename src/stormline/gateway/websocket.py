"""A session inside a WebSocket (RFC 6455): the protocol object below is at the same time the session's transport.

The upgrade is bounded in bytes here and in time by the listener. Browsers name the page that asks (`Origin`): it must
be of the gateway's own name or be listed. Pings are answered and never sent: the long connection has its own.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, cast

from websockets.datastructures import MultipleValuesError
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import OPEN
from websockets.server import ServerProtocol

from stormline.core import errors, limits, limits_carriers, limits_platform
from stormline.core.values import Address
from stormline.wire import frames, websocket

_log = logging.getLogger("stormline.gateway")
_CONTROL = (Opcode.PING, Opcode.PONG, Opcode.CLOSE)
_library_log = logging.getLogger("stormline.gateway.websockets")
_library_log.setLevel(logging.WARNING)  # it tells of each connection


class WebSocketCarrier(asyncio.Protocol):
    """One connection that begins with an HTTP request.

    To the session it is an `asyncio.Transport`: only whole frames are written to it, and only their bytes come out.

    Args:
        session: makes the session's protocol object, once the WebSocket stands.
        origins: pages that may connect beside those of the gateway's own name, as browsers write them.
        peer: who is at the other end, where that is not the peer of the connection.
        stands: told once: the WebSocket stands, or (False) the connection is over before it did.
        leaving: says whether the node stops: nobody is taken any more, and who goes is told to come back.
    """

    __slots__ = ("_early_bytes", "_farewell", "_leaving", "_origins", "_peer", "_session", "_session_of", "_stands",
                 "_transport", "_ws")  # fmt: skip

    _transport: asyncio.Transport

    def __init__(
        self,
        session: Callable[[], asyncio.Protocol],
        *,
        origins: Sequence[str],
        peer: Address | None,
        stands: Callable[[bool], None],
        leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        self._session_of: Callable[[], asyncio.Protocol] | None = session
        self._session: asyncio.Protocol | None = None
        self._origins = origins
        self._peer = peer
        self._stands = stands
        self._leaving = leaving
        self._farewell: asyncio.TimerHandle | None = None
        self._early_bytes = 0  # of the request, then of the first message: nobody knows yet whose they are
        self._ws = ServerProtocol(
            subprotocols=cast("Any", [websocket.SUBPROTOCOL]),
            max_size=frames.PREFIX_BYTES + limits.FRAME_BYTES_MAX,
            logger=_library_log,
        )

    # -- what the connection below tells -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the request."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Take bytes of the request, later of messages."""
        if self._early_bytes >= 0 and not self._may_come(data):
            return
        empty = 0
        for start in range(0, len(data), limits_carriers.WS_SLICE_BYTES):
            self._ws.receive_data(data[start : start + limits_carriers.WS_SLICE_BYTES])
            for event in self._ws.events_received():
                if isinstance(event, Request):
                    self._answer(event)
                elif isinstance(event, Frame):
                    empty += not event.data or event.opcode in _CONTROL
                    self._take(event)
            if empty > limits_carriers.WS_EMPTY_FRAMES_MAX and not self._ws.eof_sent:
                self._ws.fail(CloseCode.POLICY_VIOLATION, "frames that carry nothing")
            if self._ws.eof_sent or self._transport.is_closing():
                break
        if self._ws.parser_exc is not None:
            _log.info("%s: the WebSocket broke: %s", self.get_extra_info("peername"), self._ws.parser_exc)
        self._flush()
        if self._ws.eof_sent:
            self._transport.close()

    def _may_come(self, data: bytes) -> bool:
        """Count bytes of somebody unknown; at most one read more than the bound is ever held."""
        if self._session is None and self._early_bytes == 0 and not data.startswith(b"G"):
            self._transport.abort()
            return False
        if self._early_bytes > limits_platform.REQUEST_HEAD_BYTES_MAX:
            if self._session is None:
                reject = self._ws.reject(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "request head too large\n")
                self._ws.send_response(reject)
            else:
                self._ws.fail(CloseCode.MESSAGE_TOO_BIG)
            self._flush()
            self._transport.close()
            return False
        self._early_bytes += len(data)
        return True

    def eof_received(self) -> bool:
        """The peer ended its side; so do we."""
        return False

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        if self._session is not None:
            self._session.pause_writing()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        if self._session is not None:
            self._session.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        if self._farewell is not None:
            self._farewell.cancel()
            self._farewell = None
        if self._session is not None:
            self._session.connection_lost(exc)
        else:
            self._stands(False)

    # -- what the session asks of its transport ------------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Give `peername` or `socket`. TLS is the carrier's matter: the session sees none."""
        if name == "peername" and self._peer is not None:
            return tuple(self._peer)
        return default if name == "ssl_object" else self._transport.get_extra_info(name, default)

    def write(self, data: bytes) -> None:
        """Send whole frames."""
        if self._ws.state is not OPEN:
            return
        for message in websocket.messages(data):
            self._ws.send_binary(message)
        self._flush()

    def get_write_buffer_size(self) -> int:
        """Bytes that the kernel has not taken."""
        return self._transport.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """See `asyncio.WriteTransport`."""
        self._transport.set_write_buffer_limits(high, low)

    def pause_reading(self) -> None:
        """Take nothing from the kernel; messages that were taken already may still come."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on."""
        self._transport.resume_reading()

    def is_closing(self) -> bool:
        """True after `close`, `abort` or a loss."""
        return self._ws.state is not OPEN or self._transport.is_closing()

    def close(self) -> None:
        """Say good-bye and send what waits; close when the peer has said it too, at most `CLOSE_FLUSH_S` later.

        Closed at once, what the peer has just sent would be answered by a reset, and that can overtake the good-bye.
        """
        if self._ws.state is OPEN and not self._transport.is_closing():
            self._ws.send_close(CloseCode.SERVICE_RESTART if self._leaving() else CloseCode.NORMAL_CLOSURE)
            self._flush()
            loop = asyncio.get_running_loop()
            self._farewell = loop.call_later(limits.CLOSE_FLUSH_S, self._transport.close)
        elif self._farewell is None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _answer(self, request: Request) -> None:
        """Accept or refuse the upgrade."""
        if request.path.partition("?")[0] != websocket.PATH:
            self._respond(self._ws.reject(HTTPStatus.NOT_FOUND, "nothing here\n"))
            return
        if self._leaving():
            refusal = self._ws.reject(HTTPStatus.SERVICE_UNAVAILABLE, "this node is stopping\n")
            refusal.headers["Retry-After"] = str(math.ceil(limits_platform.LEAVING_RETRY_S))
            self._ws.send_response(refusal)
            return
        self._ws.origins = [None, *cast("Any", self._origins), *cast("Any", self._own_origins(request))]
        self._respond(self._ws.accept(request))
        if self._ws.handshake_exc is not None:
            _log.info("%s: no WebSocket: %s", self.get_extra_info("peername"), self._ws.handshake_exc)
            return
        if self._session_of is None:
            raise errors.LocalProtocolError("one request opens one WebSocket")
        session_of, self._session_of = self._session_of, None
        self._early_bytes = 0
        self._flush()
        self._stands(True)
        self._session = session_of()
        self._session.connection_made(cast("asyncio.BaseTransport", self))

    def _respond(self, response: Response) -> None:
        if not self._ws.eof_sent:  # bytes in the request's own flight may have broken the connection already
            self._ws.send_response(response)

    def _own_origins(self, request: Request) -> list[str]:
        """Give the origins of pages of the gateway's own name. Where a front ends TLS, both schemes may be meant."""
        try:
            host = request.headers["Host"]
        except (KeyError, MultipleValuesError):
            return []
        if self._transport.get_extra_info("ssl_object") is not None:
            return [websocket.same_origin("https", host)]
        return [websocket.same_origin(scheme, host) for scheme in ("http", "https")]

    def _take(self, frame: Frame) -> None:
        if self._session is None or frame.opcode in _CONTROL:
            return  # the library has answered
        if self._transport.is_closing():
            return  # nothing behind a message that was refused
        if frame.opcode is Opcode.TEXT:
            self._ws.fail(CloseCode.UNSUPPORTED_DATA, "binary messages only")
            self._flush()
            self._transport.close()
            return
        self._early_bytes = -1
        self._session.data_received(bytes(frame.data))

    def _flush(self) -> None:
        data = b"".join(self._ws.data_to_send())
        if data and not self._transport.is_closing():
            self._transport.write(data)
