"""The HTTP below the exchanges of `gateway.short`: one request after the other on a connection, of HTTP/1.1 or 1.0.

Answers have a length and the version of their request, and are not to be kept or changed by anybody on the way. What is
read is bounded in bytes and time, and a connection carries one exchange at a time.
"""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, cast

import httptools

from stormline.core import limits_carriers, limits_platform
from stormline.core.values import Address
from stormline.gateway.short import Channels, Refused
from stormline.wire import short, websocket

_log = logging.getLogger("stormline.gateway")

_POST: Final = ord("P")
_STATUSES: Final = {each.value: each.phrase for each in HTTPStatus}


class HttpStart(asyncio.Protocol):
    """A connection that speaks HTTP, until its first byte says for what: `POST` is short HTTP, `GET` a WebSocket.

    Args:
        long: makes the protocol object of a WebSocket.
        brief: makes that of short HTTP.
        over: told where the connection ends before.
    """

    __slots__ = ("_brief", "_long", "_over", "_transport")

    _transport: asyncio.Transport

    def __init__(
        self, long: Callable[[], asyncio.Protocol], brief: Callable[[], asyncio.Protocol], over: Callable[[], None]
    ) -> None:
        self._long = long
        self._brief = brief
        self._over = over

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first byte."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Let the one take over whose it is."""
        protocol = self._brief() if data[0] == _POST else self._long()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(data)

    def eof_received(self) -> bool:
        """The peer ended its side; so do we."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """It said nothing."""
        self._over()


class RequestReader:
    """Reads one request; the outcome is the same however the bytes are cut into pieces.

    Attributes:
        fault: status and reason of the answer where it cannot be read; then nothing else counts.
        done: it is whole.
        excess: more has come than the request.
        head_done: its head is whole.
        method, path, version, headers, body: what it says; names of headers in lower case.
        keep: its sender would send another over the same connection.
    """

    __slots__ = ("_head_bytes", "_parser", "_url", "body", "done", "excess", "fault", "head_done", "headers", "keep",
                 "method", "version")  # fmt: skip

    def __init__(self) -> None:
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._head_bytes = 0
        self._url = b""
        self.fault: tuple[int, str] | None = None
        self.done = self.excess = self.head_done = self.keep = False
        self.method = self.version = ""
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()

    @property
    def path(self) -> str:
        """The target without its query."""
        return self._url.partition(b"?")[0].decode("latin-1")

    def feed(self, data: bytes) -> None:
        """Take bytes."""
        if self._parser is None:
            self.excess = self.excess or bool(data.strip(b"\r\n"))  # empty lines between requests are nothing
            return
        if not self.head_done:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(400, "no request of HTTP")
        if self._head_bytes > limits_platform.REQUEST_HEAD_BYTES_MAX and not self.head_done:
            self._fail(431, "request head too large")
        elif len(self.body) > limits_carriers.SHORT_BODY_BYTES_MAX:
            self.fault = 413, "request body too large"
        if self.done or self.fault is not None:
            self._parser = None  # it holds our methods: a circle that only the garbage collector would break

    def _fail(self, status: int, why: str) -> None:
        if self.done:
            self.excess = True
        elif self.fault is None:
            self.fault = status, why

    # -- called by httptools; must not raise ---------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Note the beginning of another."""
        self.excess = self.excess or self.done

    def on_url(self, url: bytes) -> None:
        """Gather the request target."""
        if not self.done:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Gather a field of the head; those behind a body say nothing."""
        if not self.head_done:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Note the end of the head."""
        if self._parser is not None and not self.head_done:
            self.head_done = True
            self.method = self._parser.get_method().decode("latin-1")
            self.version = self._parser.get_http_version()

    def on_body(self, body: bytes) -> None:
        """Gather the body."""
        if not self.done and len(self.body) <= limits_carriers.SHORT_BODY_BYTES_MAX:
            self.body += body

    def on_message_complete(self) -> None:
        """Note the end of the request."""
        if self._parser is not None and not self.done:
            self.done = True
            self.keep = self._parser.should_keep_alive()


class ShortConnection(asyncio.Protocol):
    """One connection of short HTTP.

    Args:
        channels: serves the exchanges.
        peer: who is at the other end, where that is not the peer of the connection.
        stands: told that the head of a request has come, or that the connection is over.
    """

    __slots__ = ("_channels", "_peer", "_request", "_stands", "_task", "_timer", "_told", "_transport")

    _transport: asyncio.Transport

    def __init__(self, channels: Channels, *, peer: Address | None, stands: Callable[[], None]) -> None:
        self._channels = channels
        self._peer = peer or Address("0.0.0.0", 1)  # noqa: S104 - until there is a connection
        self._told = peer is not None
        self._stands = stands
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._request: RequestReader | None = None

    # -- what the connection below tells -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a request, where there is room for another connection."""
        self._transport = cast("asyncio.Transport", transport)
        channels = self._channels
        if len(channels.connections) + len(channels.sessions) >= limits_platform.SESSIONS_MAX:
            _log.warning("a connection of short HTTP refused: this node has %d", limits_platform.SESSIONS_MAX)
            self._transport.abort()
            return
        channels.connections[self] = None
        at = transport.get_extra_info("peername")
        if at and not self._told:
            self._peer = Address(*at[:2])
        self._watch(limits_carriers.SHORT_REQUEST_S)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
        if self._transport.is_closing():
            return
        request = self._request
        if request is None:
            request = self._request = RequestReader()
            self._watch(limits_carriers.SHORT_REQUEST_S)
        request.feed(data)
        if self._task is not None:
            self._transport.pause_reading()  # more, before its answer: nobody whom we serve does so
            return
        if request.head_done:
            self._stands()
        if request.fault is not None:
            self._refuse(request, *request.fault)
        elif request.done:
            self._serve(request)

    def eof_received(self) -> bool:
        """The peer ended its side; so do we: an answer to it is kept for the next."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._channels.connections.pop(self, None)
        self._stands()
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """See `gateway.short.Closes`."""
        if self._task is not None:
            self._task.cancel()
        self._transport.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _serve(self, request: RequestReader) -> None:
        if request.path != short.PATH:
            self._refuse(request, 404, "nothing here")
        elif request.method != "POST":
            self._refuse(request, 405, "POST only")
        elif request.version not in ("1.0", "1.1"):
            self._refuse(request, 505, "HTTP/1.1 or 1.0")
        elif not self._may_ask(request):
            self._refuse(request, 403, "not for this page")
        else:
            self._watch(None)
            self._task = asyncio.get_running_loop().create_task(self._exchange(request), name="short exchange")

    def _may_ask(self, request: RequestReader) -> bool:
        """Say whether the page that asks is of our own name; what does not say where it comes from is no browser.

        Where a front ends TLS, either scheme may be meant.
        """
        asked_by = [value.decode("latin-1") for name, value in request.headers if name == b"origin"]
        hosts = [value.decode("latin-1") for name, value in request.headers if name == b"host"]
        secure = self._transport.get_extra_info("ssl_object") is not None
        own = {
            websocket.same_origin(scheme, host) for scheme in ("https", "http")[: 1 if secure else 2] for host in hosts
        }
        return not asked_by or (len(hosts) == len(asked_by) == 1 and asked_by[0] in own)

    async def _exchange(self, request: RequestReader) -> None:
        try:
            answer = await self._channels.exchange(bytes(request.body), self._peer)
        except Refused as refused:
            self._refuse(request, refused.status, str(refused))
        else:
            self._answer(request, 200, short.CONTENT_TYPE, answer, keep=request.keep and not request.excess)
        finally:
            self._task = None

    def _refuse(self, request: RequestReader, status: int, why: str) -> None:
        """Say no, and close."""
        _log.info("%s: short HTTP refused: %d %s", self._peer, status, why)
        self._answer(request, status, "text/plain", f"{why}\n".encode(), keep=False)

    def _answer(self, request: RequestReader, status: int, content_type: str, body: bytes, *, keep: bool) -> None:
        if self._transport.is_closing():
            return
        again = "Retry-After: 1\r\n" if status == 503 else ""
        head = (
            f"HTTP/{'1.0' if request.version == '1.0' else '1.1'} {status} {_STATUSES[status]}\r\n"
            f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{again}"
            "Cache-Control: no-store, no-transform\r\nX-Content-Type-Options: nosniff\r\n"
            f"Connection: {'keep-alive' if keep else 'close'}\r\n\r\n"
        )
        self._transport.write(head.encode("ascii") + body)
        if not keep:
            self._transport.close()
            self._watch(limits_carriers.SHORT_REQUEST_S)  # a peer that takes nothing keeps it no longer
            return
        self._request = None
        self._watch(limits_carriers.SHORT_IDLE_S)

    def _watch(self, within_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if within_s is not None:
            self._timer = asyncio.get_running_loop().call_later(within_s, self._late)

    def _late(self) -> None:
        self._timer = None
        self._transport.abort()
