"""One HTTP/3 connection: many exchanges at once over QUIC, none of which can hurt another (RFC 9114).

The pool can hold it as it holds `Http2Connection`. What is to be sent is put into datagrams when there is something
new: at once where the connection is at rest, else once in a turn of the loop for all that was asked in it. A request
is undelivered until the kernel has taken a datagram with a part of it.

QUIC has what HTTP/2 needs care for: a lost packet holds up one stream, and a cancelled request gives no new stream
before the server is done with it, so that resets need no allowance.
"""

import asyncio
import errno
import logging
import ssl
from collections.abc import Callable, Coroutine
from typing import Final, cast

from stormline.core import errors, limits, limits_quic
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.clock import time_of
from stormline.net.quic import QuicClosed, QuicLink, QuicTickets
from stormline.net.quictrust import QuicTrust
from stormline.net.stream import reason_of
from stormline.outbound import http3_codec as wire
from stormline.outbound.http2_exchange import Bounds, Exchange
from stormline.outbound.http2_request import Encoded, RequestEncoder
from stormline.outbound.http3_codec import H3Code
from stormline.outbound.http3_exchange import Http3Exchange
from stormline.outbound.messages import HttpRequest, HttpResponse

_log: Final = logging.getLogger("stormline.outbound")
_TOO_EARLY: Final = 425


class Http3Connection:
    """A connection that carries requests side by side. Made by `connect`.

    Attributes:
        stream: the QUIC connection below; tells who is at the other end.
        time: the clock of its event loop.
        exchanges: requests begun on it.
        idle_since: the loop's time since when it carries nothing; None while it does.
        answered_at: the loop's time when the head of an answer last came; None before the first.
        served: streams the peer took before it said, with a GOAWAY that refused others, that it takes no more of them.
        on_news: called after datagrams of the peer were dealt with, and when the connection is over; must not raise.
        laden: never: a large answer holds up no other.
    """

    __slots__ = ("_checked_at", "_checking", "_closed", "_codec", "_early_by", "_expiry", "_expiry_due",
                 "_going_away", "_leaving", "_loop", "_open", "_opened", "_pending", "_pings", "_pump_due",
                 "_pumping", "_requests", "_retired", "_seen_sent", "_streams_most", "_unread", "_uploads",
                 "_waiters", "answered_at", "exchanges", "idle_since", "laden", "on_news", "served", "stream",
                 "time", "window_bytes")  # fmt: skip

    def __init__(
        self,
        address: Address,
        server_name: str,
        trust: QuicTrust,
        *,
        tickets: QuicTickets | None = None,
        window_bytes: int = limits.H2_STREAM_WINDOW_BYTES,
        device: str | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.time = time_of(self._loop)
        self.exchanges = 0
        self.idle_since: float | None = self.time()
        self.answered_at: float | None = None
        self.served: int | None = None
        self.on_news: Callable[[], None] | None = None
        self.laden = False
        self.window_bytes: Final = window_bytes
        self._codec = wire.Http3Codec()
        self._requests = RequestEncoder()
        self._open: dict[int, Http3Exchange] = {}  # by QUIC's number
        self._pending: dict[Http3Exchange, None] = {}  # wait for a stream, first come first served
        self._uploads: dict[Http3Exchange, None] = {}  # have a piece of a body to send
        self._leaving: dict[Http3Exchange, None] = {}  # something of them is queued in QUIC
        self._unread = 0  # body bytes told of and not read
        self._retired = self._going_away = self._closed = self._opened = False
        self._pings = 0
        self._checking = 0  # number of the ping that is out, 0 for none
        self._checked_at = 0.0  # when it was sent
        self._waiters: dict[int, asyncio.Future[bool]] = {}
        self._streams_most = 0
        self._pumping = self._pump_due = False
        self._seen_sent = 0  # datagrams that the kernel had when last looked
        self._expiry: asyncio.TimerHandle | None = None  # looks after the time of all
        self._expiry_due = 0.0
        self._early_by: asyncio.TimerHandle | None = None
        self.stream: Final = QuicLink(
            address,
            server_name,
            trust,
            self,
            alpn="h3",
            tickets=tickets,
            stream_window_bytes=window_bytes,
            device=device,
        )
        if self.stream.early:
            self._early_by = self._loop.call_later(limits_quic.H3_HANDSHAKE_S, self._shook_too_long)
            self._open_control()
        self.stream.flush()

    def _open_control(self) -> None:
        if not self._opened:
            self._opened = True
            self.stream.send(self.stream.next_stream(one_way=True), wire.opening())

    def _shook_too_long(self) -> None:
        if not self.stream.ready:
            self._end(H3Code.H3_NO_ERROR, TimeoutError(errno.ETIMEDOUT, "the handshake did not end"))

    # -- state ----------------------------------------------------------------------------------------------------
    @property
    def usable(self) -> bool:
        """True where a request given now gets a stream at once."""
        return self.room > 0

    @property
    def room(self) -> int:
        """Requests that would get a stream at once; 0 or less for none."""
        return 0 if self.retired or not self.stream.ready else self._free - len(self._pending)

    @property
    def _free(self) -> int:
        """Streams that may be opened now."""
        return min(limits_quic.H3_STREAMS_MAX - len(self._open), self.stream.streams_left)

    @property
    def streams_max(self) -> int | None:
        """Streams that may be open at once; None before the handshake is over."""
        return self._streams_most or None

    @property
    def begun(self) -> int:
        """Streams opened over its life, and requests that wait for one."""
        return self.stream.next_stream() // 4 + len(self._pending)

    @property
    def open_streams(self) -> int:
        """Streams open, and requests that wait for one. 0: at rest."""
        return len(self._open) + len(self._pending)

    @property
    def retired(self) -> bool:
        """True where it takes no more requests; it closes itself after the last."""
        return self._retired or self._going_away or self._closed

    @property
    def closed(self) -> bool:
        """True where it is over."""
        return self._closed

    @property
    def quiet_since(self) -> float | None:
        """The loop's time since when it owes an answer and has brought nothing; None where it owes none."""
        first = next(iter(self._open.values()), None)
        return None if first is None else max(self.stream.heard_at, first.moved_at)

    def fit(self, window_bytes: int) -> None:
        """Do nothing: QUIC's windows are those the connection was made with, and grow only."""

    # -- signs of life --------------------------------------------------------------------------------------------
    async def check(self, timeout_s: float) -> bool:
        """Ask whether the peer is still there: True once anything of it comes. Cancellation is harmless."""
        self.ping()
        return await self._pong(self._checking, timeout_s) if self._checking else False

    async def fence(self, timeout_s: float) -> bool:
        """Wait until the peer has acknowledged a ping; False where it does not in time. Cancellation is harmless."""
        if self._closed:
            return False
        number = self._send_ping()
        try:
            return await self._pong(number, timeout_s)
        finally:
            self._waiters.pop(number, None)

    def ping(self) -> None:
        """Send a ping, unless one is out already or the connection is over; `stream.heard_at` tells what came of it."""
        if not self._checking and not self._closed and self.stream.ready:
            self._checked_at = self.time()
            self._checking = self._send_ping()

    def _send_ping(self) -> int:
        self._pings += 1
        self.stream.ping(self._pings)
        self._pump_soon()
        return self._pings

    async def _pong(self, number: int, timeout_s: float) -> bool:
        waiter = self._waiters.get(number)
        if waiter is None:
            waiter = self._waiters[number] = self._loop.create_future()
        await asyncio.wait([waiter], timeout=timeout_s)
        return waiter.done() and waiter.result()

    def on_pong(self, number: int) -> None:
        """See `QuicUser.on_pong`."""
        waiter = self._waiters.pop(number, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(True)

    async def migrate(self, timeout_s: float, *, device: str | None = None) -> bool:
        """Go on over another network (RFC 9000 section 9): True once the server has answered there.

        Where that is not possible, or the server does not answer in time, the connection is closed. What is under way
        goes on, or fails with it. Cancellation is harmless.

        Args:
            timeout_s: what the answer may take.
            device: the interface to go out by; None: as the system's routes say.
        """
        if self._closed:
            return False
        if self.stream.rebind(device) and await self.fence(timeout_s):
            return True
        self.close()
        return False

    # -- requests -------------------------------------------------------------------------------------------------
    def encode(self, request: HttpRequest) -> Encoded:
        """Make of a request what `exchange` takes; see `http2_request.RequestEncoder.encode`."""
        return self._requests.encode(request)

    def exchange(
        self,
        request: Encoded,
        *,
        deadline_at: float,
        head_by: float | None = None,
        read_timeout_s: float | None = None,
        done: Callable[[bool], None],
        on_stage: Callable[[Phase], None],
    ) -> Coroutine[None, None, HttpResponse]:
        """Send a request and give its answer as soon as the head is there; see `Http2Connection.exchange`.

        Before the handshake is over only reads without a body are sent, and only where a ticket allows early data; one
        that the server answers with 425 is sent again afterwards.

        Raises:
            WriteError: the connection ended before the request had a stream (QUEUED), or any of it had left (SEND).
            ReadError: the stream or the connection ended before the head was whole. `maybe_delivered` is False where
                the peer says that it has not touched the request (GOAWAY, H3_REQUEST_REJECTED), or the kernel has
                taken nothing of it.
            ProtocolViolation: the answer, or the connection, breaks HTTP.
            DeadlineExceeded: `head_by` or `read_timeout_s` passed; phase QUEUED, SEND or FIRST_BYTE.
            QueueFull: `limits_quic.H3_WAITING_MAX` requests wait already.
            LocalProtocolError: the body source gave not as many bytes as its Content-Length says, or the connection
                takes no more requests.
        """
        bounds = Bounds(deadline_at, head_by, read_timeout_s)
        return Http3Exchange(self, request, bounds, peer=self.stream.peer, done=done, on_stage=on_stage).run()

    # -- the end --------------------------------------------------------------------------------------------------
    def retire(self) -> None:
        """Take no more requests, and close after those that were given."""
        self._retired = True
        self._close_if_over()

    def close(self) -> None:
        """Close at once; what is under way fails."""
        if not self._closed:
            self._end(H3Code.H3_NO_ERROR, ConnectionAbortedError(errno.ECONNABORTED, "the connection was closed here"))

    def _end(self, code: int, cause: BaseException) -> None:
        """End everything for a reason of ours, and tell the peer."""
        self._look_what_left()
        self.stream.close(code)
        self._seen_sent = self.stream.datagrams_sent  # the one that tells the peer has nothing of a request
        self.on_end(cause)

    def on_end(self, cause: BaseException) -> None:
        """See `QuicUser.on_end`: end everything."""
        if self._closed:
            return
        self._look_what_left()
        self._closed = True
        for timer in (self._expiry, self._early_by):
            if timer is not None:
                timer.cancel()
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters.values():
            if not waiter.done():
                waiter.set_result(False)
        for exchange in [*self._open.values(), *self._pending]:
            exchange.fail(self._failure(exchange, cause))
        if self.on_news is not None:
            self.on_news()

    def _failure(self, exchange: Http3Exchange, cause: BaseException) -> errors.TransportError:
        """Say how the end of the connection ended an exchange."""
        phase, peer = exchange.phase, self.stream.peer
        delivered = phase is Phase.BODY or exchange.delivered
        error: errors.TransportError
        if isinstance(cause, wire.Http3Broken):
            error = errors.ProtocolViolation(
                f"{peer}: the peer breaks HTTP/3: {cause}", phase=phase, maybe_delivered=delivered
            )
        elif phase is Phase.QUEUED or (phase is Phase.SEND and not delivered):
            error = errors.WriteError(
                f"{peer}: sending broke off: {_why(cause)}", phase=phase, maybe_delivered=delivered
            )
        else:
            where = "the body broke off" if phase is Phase.BODY else "no answer"
            error = errors.ReadError(f"{peer}: {where}: {_why(cause)}", phase=phase, maybe_delivered=delivered)
        error.__cause__ = cause
        return error

    def _close_if_over(self) -> None:
        if self.retired and not self._open and not self._pending:
            self.close()

    # -- called by exchanges --------------------------------------------------------------------------------------
    def begin(self, exchange: Exchange) -> bool:
        """See `Carrier.begin`."""
        exchange = cast("Http3Exchange", exchange)
        if self.retired:
            raise errors.LocalProtocolError("the HTTP/3 connection takes no more requests")
        if len(self._pending) - self._free >= limits_quic.H3_WAITING_MAX:
            raise errors.QueueFull(
                f"{self.stream.peer}: {limits_quic.H3_WAITING_MAX} requests wait for a stream already",
                phase=Phase.QUEUED,
                maybe_delivered=False,
            )
        self.exchanges += 1
        self.idle_since = None
        self._pending[exchange] = None
        if self._open:
            self._pump_soon()
        else:
            self._pump()
        return self.exchanges > 1

    def watch(self, due: float) -> None:
        """See `Carrier.watch`."""
        if self._expiry is not None:
            if self._expiry_due <= due:
                return
            self._expiry.cancel()
        self._expiry, self._expiry_due = self._loop.call_at(due, self._time_came), due

    def _time_came(self) -> None:
        self._expiry = None
        for exchange in [*self._open.values(), *self._pending]:
            exchange.expire()

    def upload(self, exchange: Exchange) -> None:
        """See `Carrier.upload`."""
        exchange = cast("Http3Exchange", exchange)
        self._uploads[exchange] = None
        self._pump_soon()

    def consumed(self, exchange: Exchange, size: int) -> None:
        """See `Carrier.consumed`."""
        exchange = cast("Http3Exchange", exchange)
        size = min(size, exchange.unread)
        exchange.unread -= size
        self._unread -= size
        if self.stream.paused and self._unread <= limits_quic.H3_UNREAD_BYTES // 2:
            self.stream.pause(False)

    def release(self, exchange: Exchange) -> None:
        """See `Carrier.release`. A stream that is not over in both directions is given up."""
        exchange = cast("Http3Exchange", exchange)
        self._pending.pop(exchange, None)
        self._uploads.pop(exchange, None)
        self._leaving.pop(exchange, None)
        if not exchange.complete:
            self.consumed(exchange, exchange.unread)  # what nobody may ever read must not hold up the others
        if exchange.stream_id and self._open.get(exchange.quic_id) is exchange:
            stream_id = exchange.quic_id
            del self._open[stream_id]
            if not self._closed and (self._codec.expects(stream_id) or exchange.uploading):
                # A whole answer came before our body was out (RFC 9114 section 4.1), or nobody wants the answer.
                self._codec.forget(stream_id)
                self.stream.abort(stream_id, H3Code.H3_NO_ERROR if exchange.complete else H3Code.H3_REQUEST_CANCELLED)
                self._pump_soon()
            elif self._pending:
                self._pump_soon()
        if not self._open and not self._pending:
            self.idle_since = self.time()
        retired = self.retired
        exchange.tell_done(not retired)
        if retired:
            self._close_if_over()

    # -- sending --------------------------------------------------------------------------------------------------
    def _pump_soon(self) -> None:
        if not self._pump_due and not self._closed:
            self._pump_due = True
            self._loop.call_soon(self._pump_if_due)

    def _pump_if_due(self) -> None:
        if self._pump_due:
            self._pump()

    def _pump(self) -> None:
        """Open streams, queue bodies, and hand the kernel what QUIC lets go."""
        self._pump_due = False
        if self._closed or self._pumping:
            return
        self._pumping = True
        try:
            if self._pending:
                self._begin_streams()
            if self._uploads:
                self._queue_bodies()
            self.stream.flush()
            self._look_what_left()
        finally:
            self._pumping = False

    def _begin_streams(self) -> None:
        stream = self.stream
        for exchange in list(self._pending):
            if self._free <= 0:
                return
            if not stream.ready and not (stream.early and exchange.may_go_early):
                continue
            stream_id = stream.next_stream()
            del self._pending[exchange]
            frame = self._codec.encode(exchange.request)
            stream.send(stream_id, frame, ended=not exchange.uploads)
            exchange.early, exchange.handed, exchange.gone = not stream.ready, len(frame), 0
            self._codec.opened(stream_id, is_head=exchange.request.is_head)
            self._open[stream_id] = exchange
            self._leaving[exchange] = None
            exchange.opened(stream_id // 4 + 1, 0)

    def _queue_bodies(self) -> None:
        for exchange in list(self._uploads):
            stream_id = exchange.quic_id
            unsent = self.stream.unsent(stream_id)
            while unsent < limits_quic.QUIC_SEND_BACKLOG_BYTES:
                taken = exchange.take(limits.H2_FRAME_BYTES_MAX)
                if taken is None:
                    break
                piece, last = taken
                if piece:
                    head = wire.data_frame_head(len(piece))
                    self.stream.send(stream_id, head)
                    self.stream.send(stream_id, piece, ended=last)
                    unsent += len(head) + len(piece)
                    exchange.handed += len(head) + len(piece)
                else:
                    self.stream.send(stream_id, b"", ended=last)
                self._leaving[exchange] = None
            if not exchange.has_more:
                del self._uploads[exchange]

    def _look_what_left(self) -> None:
        """Tell those of whom something has gone, where the kernel has taken datagrams since the last look."""
        seen, self._seen_sent = self._seen_sent, self.stream.datagrams_sent
        if not self._leaving or seen == self._seen_sent:
            return
        for exchange in list(self._leaving):
            unsent = self.stream.unsent(exchange.quic_id)
            gone = exchange.handed - unsent
            exchange.left = exchange.left or gone > 0
            if gone > exchange.gone or not unsent:
                exchange.gone = gone
                if not unsent and exchange not in self._uploads:
                    del self._leaving[exchange]
                exchange.sent_some(all_of_it=not unsent)

    # -- what comes -----------------------------------------------------------------------------------------------
    def on_ready(self) -> None:
        """See `QuicUser.on_ready`."""
        self._streams_most = min(limits_quic.H3_STREAMS_MAX, self.stream.streams_left + len(self._open))
        self._open_control()

    def on_data(self, stream_id: int, data: bytes, ended: bool) -> None:
        """See `QuicUser.on_data`."""
        try:
            for event in self._codec.receive(stream_id, data, ended):
                self._handle(event)
        except wire.Http3Broken as error:
            self._end(error.code, error)

    def _handle(self, event: wire.Event) -> None:
        if isinstance(event, wire.GoAway):
            self._go_away(event)
            return
        exchange = self._open.get(event.stream_id)
        if exchange is None:
            return
        if isinstance(event, wire.Data):
            exchange.unread += len(event.data)
            self._unread += len(event.data)
            exchange.got_data(event.data, ended=event.ended)
            if self._unread > limits_quic.H3_UNREAD_BYTES:
                self.stream.pause(True)
        elif isinstance(event, wire.Head):
            self._on_head(exchange, event)
        elif isinstance(event, wire.Ended):
            exchange.got_end()
        elif isinstance(event, wire.Interim):
            exchange.got_interim()
        else:
            self.stream.abort(event.stream_id, event.code)
            exchange.fail(
                errors.ProtocolViolation(
                    f"{self.stream.peer}: the answer breaks HTTP: {event.what}",
                    phase=exchange.phase,
                    maybe_delivered=True,
                )
            )

    def _on_head(self, exchange: Http3Exchange, event: wire.Head) -> None:
        self.answered_at = self.time()
        if event.status == _TOO_EARLY and exchange.early and not self._going_away:
            del self._open[event.stream_id]
            self._leaving.pop(exchange, None)
            self._codec.forget(event.stream_id)
            self.stream.ignore(event.stream_id, H3Code.H3_REQUEST_CANCELLED)
            exchange.again()
            self._pending = {exchange: None, **self._pending}
            return
        exchange.got_head(event.status, event.headers, ended=event.ended)

    def on_reset(self, stream_id: int, code: int) -> None:
        """See `QuicUser.on_reset`."""
        try:
            self._codec.reset(stream_id)
        except wire.Http3Broken as error:
            self._end(error.code, error)
            return
        exchange = self._open.get(stream_id)
        if exchange is None:
            return
        phase = exchange.phase
        # RFC 9114 section 4.1.1: H3_REQUEST_REJECTED says that nothing of the request was processed.
        untouched = code == H3Code.H3_REQUEST_REJECTED and phase is not Phase.BODY
        what = "refused the request unprocessed" if untouched else "reset the stream"
        exchange.fail(
            errors.ReadError(
                f"{self.stream.peer}: the peer {what} ({wire.code_name(code)})",
                phase=phase,
                maybe_delivered=not untouched,
            )
        )

    def on_stop(self, stream_id: int, code: int) -> None:
        """See `QuicUser.on_stop`: the peer needs no more of our body; its answer may still come."""
        exchange = self._open.get(stream_id)
        if exchange is not None:
            self._uploads.pop(exchange, None)
            self._leaving.pop(exchange, None)
            exchange.stop_upload()

    def _go_away(self, event: wire.GoAway) -> None:
        """Fail what the peer has not touched, and go on with the rest (RFC 9114 section 5.2)."""
        self._going_away = True
        refused = [exchange for number, exchange in self._open.items() if number >= event.stream_id]
        if refused or self._pending:
            self.served = event.stream_id // 4
        for exchange in refused:
            phase = exchange.phase
            exchange.fail(
                errors.ReadError(
                    f"{self.stream.peer}: the peer is going away and has not processed the request",
                    phase=phase,
                    maybe_delivered=phase is Phase.BODY,
                )
            )
        for exchange in list(self._pending):
            exchange.fail(
                errors.WriteError(
                    f"{self.stream.peer}: the peer is going away", phase=Phase.QUEUED, maybe_delivered=False
                )
            )
        self._close_if_over()

    def on_turn(self) -> None:
        """See `QuicUser.on_turn`."""
        if self._checking and self.stream.heard_at > self._checked_at:
            number, self._checking = self._checking, 0
            self.on_pong(number)
        if self.stream.ready:
            self._pump_soon()  # a request that an answer leads to takes the acknowledgement along
        else:
            self._pump()
        if self.on_news is not None and not self._closed:
            self.on_news()


def _why(cause: BaseException) -> str:
    if isinstance(cause, QuicClosed) and cause.by_application:
        return f"the peer closed the connection ({wire.code_name(cause.code)})"
    return reason_of(cause)


async def connect(
    address: Address,
    server_name: str,
    trust: QuicTrust,
    *,
    timeout_s: float,
    tickets: QuicTickets | None = None,
    early: bool = False,
    window_bytes: int = limits.H2_STREAM_WINDOW_BYTES,
    device: str | None = None,
) -> Http3Connection:
    """Give a connection to one address that has shown the certificate of a name.

    Nothing of a request is sent: every error has `maybe_delivered` False. Cancelled or failed, nothing stays behind.

    Args:
        address: an IP literal and a port.
        server_name: name for SNI and certificate.
        trust: whom to believe.
        timeout_s: what the handshake may take.
        tickets: to resume with, and where new ones are kept.
        early: do not wait for the handshake where a ticket allows early data; reads leave with the first flight then.
        window_bytes: what the peer may have on its way of each answer.
        device: the interface to go out by.

    Raises:
        ConnectError: no way there, or the address says no.
        TlsError: the certificate is not the name's or not trusted, or the server speaks no HTTP/3.
        DeadlineExceeded: nobody answered in time; phase CONNECT.
        LocalProtocolError: `address` holds a name.
    """
    connection: Http3Connection | None = None
    try:
        async with asyncio.timeout(timeout_s) as timeout:
            connection = Http3Connection(
                address, server_name, trust, tickets=tickets, window_bytes=window_bytes, device=device
            )
            if not (early and connection.stream.early):
                await connection.stream.handshake()
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, OSError):  # also TLS's
            raise _connect_error(address, error, timeout_s if timeout.expired() else None) from error
        raise
    return connection


def _connect_error(address: Address, error: OSError, timeout_s: float | None) -> errors.TransportError:
    if timeout_s is not None:
        what = f"{address}: not connected by QUIC within {timeout_s:.3g} s"
        return errors.DeadlineExceeded(what, phase=Phase.CONNECT, maybe_delivered=False)
    what = f"{address}: {_why(error)}"
    if isinstance(error, ssl.SSLError):
        return errors.TlsError(what, phase=Phase.TLS, maybe_delivered=False)
    return errors.ConnectError(what, phase=Phase.CONNECT, maybe_delivered=False)
