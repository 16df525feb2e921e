"""One HTTP/2 connection on a stream: many exchanges at once, none of which can hurt another (RFC 9113).

Two tasks serve a connection: one reads, one writes. What is to be sent is gathered when the kernel has taken what was
sent before: a request that is given up while it waits leaves no trace on the wire, and `maybe_delivered` of the
others is exact by the stream's count of bytes. A request that finds the connection at rest is handed to the kernel at
once, and the writer gets what the kernel does not take; beside others it waits for the writer's turn, as requests made
in one turn of the loop leave in one piece.
"""

import asyncio
import contextlib
import logging
import math
import ssl
from collections.abc import Callable, Coroutine
from typing import Final, NamedTuple

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.net.clock import time_of
from stormline.net.stream import Stream, TcpStream, reason_of
from stormline.net.tls import TlsStream
from stormline.outbound import http2_codec as wire
from stormline.outbound.http2_exchange import Bounds, Exchange
from stormline.outbound.http2_request import RequestEncoder
from stormline.outbound.messages import HttpRequest, HttpResponse

_log: Final = logging.getLogger("stormline.outbound")


class _Batch(NamedTuple):
    """What is sent in one go, and what has gone when it is out."""

    data: bytes
    carried: list[Exchange]
    """Those that have a part in it."""
    pinging: bool
    """The PING of the check under way is in it, or went before."""


class Http2Connection:
    """A connection that carries requests side by side. Made inside a running loop, on a stream that agreed on `h2`.

    Args:
        stream: owned from now on; its ALPN is the caller's to check.
        streams_untold: streams to open before the peer's SETTINGS have come.
        window_bytes: what the peer may have on its way of each answer.

    Attributes:
        stream: the bytes below.
        time: the clock of its event loop.
        exchanges: requests begun on it.
        idle_since: the loop's time since when it carries nothing; None while it does.
        answered_at: the loop's time when the head of an answer last came; None before the first.
        served: streams the peer took before it said, with a GOAWAY that refused others, that it takes no more of them.
        on_news: called after bytes of the peer were dealt with, and when the connection is over; must not raise.
    """

    __slots__ = ("_base", "_checking", "_closed", "_codec", "_due", "_fences", "_going_away", "_loop", "_open",
                 "_pending", "_ping_sent", "_pings", "_reader", "_requests", "_reset_at", "_resets_left", "_rest",
                 "_retired", "_sending", "_timer", "_uploads", "_wake", "_write_error", "_writer", "_written",
                 "answered_at", "exchanges", "idle_since", "on_news", "served", "stream", "time")  # fmt: skip

    def __init__(
        self,
        stream: Stream,
        *,
        streams_untold: int = limits.H2_STREAMS_UNTOLD,
        window_bytes: int = limits.H2_STREAM_WINDOW_BYTES,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.time = time_of(self._loop)
        self.stream: Final = stream
        self.exchanges = 0
        self.idle_since: float | None = self.time()
        self.answered_at: float | None = None
        self.served: int | None = None
        self.on_news: Callable[[], None] | None = None
        self._codec = wire.Http2Codec(streams_untold, window_bytes)
        self._requests = RequestEncoder()
        self._base = stream.sent_bytes
        self._written = 0  # bytes given to the stream, or about to be
        self._open: dict[int, Exchange] = {}
        self._pending: dict[Exchange, None] = {}  # wait for a stream, first come first served
        self._uploads: dict[Exchange, None] = {}  # have a piece of a body to send
        self._resets_left = float(limits.H2_RESETS_BURST)
        self._reset_at = self.time()  # when `_resets_left` was true
        self._retired = self._going_away = self._closed = False
        self._write_error: BaseException | None = None
        self._checking: asyncio.Future[bool] | None = None
        self._fences: dict[int, asyncio.Future[bool]] = {}
        self._ping_sent = False
        self._pings = 0
        self._wake: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # looks after the time of all: one for each would cost more
        self._due = math.inf  # when it fires
        self._sending = False  # the kernel has not all of a batch yet
        self._rest: _Batch | None = None  # what of it is the writer's to send
        self._reader: asyncio.Task[None] | None = None
        if isinstance(stream, TcpStream | TlsStream) and stream.watch(self._take_what_came):
            self._loop.call_soon(self._take_what_came)  # what has come with the handshake
        else:
            self._reader = self._loop.create_task(self._read(), name="http/2 reader")
        self._writer = self._loop.create_task(self._write(), name="http/2 writer")

    # -- state ----------------------------------------------------------------------------------------------------
    @property
    def usable(self) -> bool:
        """True where a request given now gets a stream at once."""
        return not self.retired and self.open_streams < self._codec.streams_max

    @property
    def room(self) -> int:
        """Requests that would get a stream at once; 0 or less for none."""
        return 0 if self.retired else self._codec.streams_max - self.open_streams

    @property
    def laden(self) -> bool:
        """See `Http2Codec.laden`."""
        return self._codec.laden

    @property
    def streams_max(self) -> int | None:
        """Streams that may be open at once; None before the peer has told."""
        return self._codec.streams_max if self._codec.settled else None

    @property
    def begun(self) -> int:
        """Streams opened over its life, and requests that wait for one."""
        return self._codec.begun + len(self._pending)

    @property
    def open_streams(self) -> int:
        """Streams open, and requests that wait for one. 0: at rest."""
        return self._codec.open_streams + len(self._pending)

    @property
    def retired(self) -> bool:
        """True where it takes no more requests; it closes itself after the last."""
        return (
            self._retired or self._going_away or self._closed or self._write_error is not None or self._codec.exhausted
        )

    @property
    def closed(self) -> bool:
        """True where it is over."""
        return self._closed

    async def check(self, timeout_s: float) -> bool:
        """Ask whether the peer is still there: True once it answers a PING, or sends anything at all after it.

        Cancellation is harmless. Several checks at once share one PING.
        """
        self.ping()
        checking = self._checking
        if checking is None:
            return False
        await asyncio.wait([checking], timeout=timeout_s)
        return checking.done() and checking.result()

    async def fence(self, timeout_s: float) -> bool:
        """Wait until all is here that the peer had sent by now: until it has answered a PING of ours (RFC 9113 section
        6.7), which comes after that. False where it does not in time, or the connection ends.

        Cancellation is harmless.
        """
        if self._closed or self._write_error is not None:
            return False
        self._pings += 1
        number = self._pings
        self._codec.ping(number.to_bytes(8, "big"))
        answered = self._fences[number] = self._loop.create_future()
        self._wake_writer()
        try:
            await asyncio.wait([answered], timeout=timeout_s)
        finally:
            self._fences.pop(number, None)
        return answered.done() and answered.result()

    def ping(self) -> None:
        """Send a PING, unless one is out already or the connection is over; `stream.heard_at` tells what came of it."""
        if self._checking is None and not self._closed and self._write_error is None:
            self._pings += 1
            self._codec.ping(self._pings.to_bytes(8, "big"))
            self._checking = self._loop.create_future()
            self._ping_sent = False
            self._wake_writer()

    @property
    def quiet_since(self) -> float | None:
        """The loop's time since when it owes an answer and has brought nothing; None where it owes none."""
        first = next(iter(self._open.values()), None)
        return None if first is None else max(self.stream.heard_at, first.moved_at)

    @property
    def window_bytes(self) -> int:
        """What the peer may have on its way of each answer."""
        return self._codec.window_bytes

    def fit(self, window_bytes: int) -> None:
        """Let the peer have so much on its way of each answer, also of those that are coming."""
        if window_bytes != self._codec.window_bytes and not self._closed:
            self._codec.fit(window_bytes)
            self._wake_writer()

    # -- requests -------------------------------------------------------------------------------------------------
    def encode(self, request: HttpRequest) -> wire.Encoded:
        """Make of a request what `exchange` takes; see `http2_request.RequestEncoder.encode`."""
        return self._requests.encode(request)

    def exchange(
        self,
        request: wire.Encoded,
        *,
        deadline_at: float,
        head_by: float | None = None,
        read_timeout_s: float | None = None,
        done: Callable[[bool], None],
        on_stage: Callable[[Phase], None],
    ) -> Coroutine[None, None, HttpResponse]:
        """Send a request and give its answer as soon as the head is there.

        Where the peer allows no more streams now, it waits for one, first come first served. An answer that comes
        before the request is out is given all the same; the rest of the request is held back where the answer is an
        error, or whole (RFC 9113 section 8.1). Cancelled, failed or closed early, only its own stream is reset.

        Args:
            request: made by `encode`.
            deadline_at: the loop's time at which the body must have been read.
            head_by: the loop's time at which the head must be there; None leaves that to the caller.
            read_timeout_s: longest silence of this stream, in waiting for the head (pieces of our body that leave
                break it) and between two pieces of the answer's body. Waiting for a stream is no silence. None: any
                until the head, then `limits.PACKET_GAP_S`.
            done: called once, when the stream is over, which may be before the body has been read: True where the
                connection takes another request.
            on_stage: told `send`, `first_byte`, `body`.

        Raises:
            WriteError: the connection broke while sending, and no answer was there; or, phase QUEUED, it ended before
                the request had a stream.
            ReadError: the stream or the connection ended before the head was whole. `maybe_delivered` is False where
                the peer says that it has not touched the request (GOAWAY, REFUSED_STREAM), or nothing of it was sent.
            ProtocolViolation: the answer, or the connection, breaks HTTP.
            DeadlineExceeded: `head_by` or `read_timeout_s` passed; phase QUEUED, SEND or FIRST_BYTE.
            QueueFull: `limits.H2_WAITING_MAX` requests wait already.
            LocalProtocolError: the body source gave not as many bytes as its Content-Length says, or the connection
                takes no more requests.
        """
        bounds = Bounds(deadline_at, head_by, read_timeout_s)
        return Exchange(self, request, bounds, peer=self.stream.peer, done=done, on_stage=on_stage).run()

    # -- the end --------------------------------------------------------------------------------------------------
    def retire(self) -> None:
        """Take no more requests, and close after those that were given."""
        self._retired = True
        self._close_if_over()

    def close(self) -> None:
        """Close at once, with a GOAWAY where the kernel takes it now; what is under way fails."""
        if not self._closed:
            if self._write_error is None:
                with contextlib.suppress(Exception):
                    self._codec.goaway()
                    self._send_last_words()
            self._lost(ConnectionAbortedError("the connection was closed here"))

    def _send_last_words(self) -> None:
        """Hand the kernel what waits, if it takes it at once; called just before the stream is closed."""
        if not self._sending:  # else they would land in the middle of a frame
            with contextlib.suppress(OSError):  # also TLS's
                self.stream.send_nowait(self._codec.data_to_send())

    def _lost(self, cause: BaseException | None) -> None:
        """End everything: the stream broke, ended (None), broke the protocol, or is closed here."""
        if self._closed:
            return
        self._closed = True
        self.stream.close()
        if self._timer is not None:
            self._timer.cancel()
        self._wake_writer()
        if self._checking is not None and not self._checking.done():
            self._checking.set_result(False)
        for fence in self._fences.values():
            if not fence.done():
                fence.set_result(False)
        for exchange in [*self._open.values(), *self._pending]:
            exchange.fail(self._failure(exchange, cause))
        if self.on_news is not None:
            self.on_news()

    def _failure(self, exchange: Exchange, cause: BaseException | None) -> errors.TransportError:
        """Say how the end of the connection ended an exchange."""
        phase, peer = exchange.phase, self.stream.peer
        opened = exchange.stream_id != 0
        delivered = phase is Phase.BODY or (opened and self.stream.sent_bytes - self._base > exchange.mark)
        error: errors.TransportError
        if isinstance(cause, wire.ConnectionBroken):
            error = errors.ProtocolViolation(
                f"{peer}: the peer breaks HTTP/2: {cause}", phase=phase, maybe_delivered=delivered
            )
        elif phase is Phase.QUEUED or (phase is Phase.SEND and self._write_error is not None):
            why = "the peer closed the connection" if cause is None else reason_of(self._write_error or cause)
            error = errors.WriteError(f"{peer}: sending broke off: {why}", phase=phase, maybe_delivered=delivered)
        else:
            why = "the peer closed the connection" if cause is None else reason_of(cause)
            where = "the body broke off" if phase is Phase.BODY else "no answer"
            error = errors.ReadError(f"{peer}: {where}: {why}", phase=phase, maybe_delivered=delivered)
        error.__cause__ = self._write_error if isinstance(error, errors.WriteError) and self._write_error else cause
        return error

    def _close_if_over(self) -> None:
        if self.retired and not self._open and not self._pending:
            self.close()

    # -- called by exchanges --------------------------------------------------------------------------------------
    def begin(self, exchange: Exchange) -> bool:
        """See `Carrier.begin`."""
        if self.retired:
            raise errors.LocalProtocolError("the HTTP/2 connection takes no more requests")
        if self.open_streams - self._codec.streams_max >= limits.H2_WAITING_MAX:
            raise errors.QueueFull(
                f"{self.stream.peer}: {limits.H2_WAITING_MAX} requests wait for a stream already",
                phase=Phase.QUEUED,
                maybe_delivered=False,
            )
        self.exchanges += 1
        self.idle_since = None
        self._pending[exchange] = None
        if self._open or self._sending:
            self._wake_writer()
        else:
            self._send_at_once()
        return self.exchanges > 1

    def watch(self, due: float) -> None:
        """See `Carrier.watch`."""
        if self._due <= due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = self._loop.call_at(due, self._time_came), due

    def _time_came(self) -> None:
        self._timer, self._due = None, math.inf
        for exchange in [*self._open.values(), *self._pending]:
            exchange.expire()

    def upload(self, exchange: Exchange) -> None:
        """See `Carrier.upload`."""
        self._uploads[exchange] = None
        self._wake_writer()

    def consumed(self, exchange: Exchange, size: int) -> None:
        """See `Carrier.consumed`."""
        if not self._closed:
            self._codec.consumed(exchange.stream_id, size)
            if self._codec.wants_send:
                self._wake_writer()

    def release(self, exchange: Exchange) -> None:
        """See `Carrier.release`."""
        self._pending.pop(exchange, None)
        self._uploads.pop(exchange, None)
        if self._open.pop(exchange.stream_id, None) is not None and not self._closed:
            if self._codec.is_open(exchange.stream_id):
                # A whole answer that leaves the stream open came before our body was out (RFC 9113 section 8.1).
                self._reset(exchange.stream_id, wire.ErrorCode.NO_ERROR if exchange.complete else wire.ErrorCode.CANCEL)
            if self._pending or self._codec.wants_send:
                self._wake_writer()
        if not self._open and not self._pending:
            self.idle_since = self.time()
        retired = self.retired
        exchange.tell_done(not retired)
        if retired:
            self._close_if_over()

    def _reset(self, stream_id: int, code: wire.ErrorCode) -> None:
        """Reset a stream if we may reset another so soon; else let it run on unread, and take no more requests.

        A stream that runs on stalls when its window is used up. The connection is closed after the last request that
        somebody still waits for, which ends it too, with no reset for a server to count.
        """
        if self._take_reset():
            self._codec.reset(stream_id, code)
        elif not self._retired:
            self._retired = True
            _log.debug("retiring the HTTP/2 connection to %s: too many requests were given up", self.stream.peer)
            self._refuse_pending("the connection takes no more requests")

    def _refuse_pending(self, why: str) -> None:
        """Fail what has no stream yet, so that it can go elsewhere."""
        for exchange in list(self._pending):
            exchange.fail(errors.WriteError(f"{self.stream.peer}: {why}", phase=Phase.QUEUED, maybe_delivered=False))

    def _take_reset(self) -> bool:
        now = self.time()
        regained = (now - self._reset_at) * limits.H2_RESETS_PER_S
        self._resets_left = min(self._resets_left + regained, float(limits.H2_RESETS_BURST))
        self._reset_at = now
        if self._resets_left < 1.0:
            return False
        self._resets_left -= 1.0
        return True

    # -- writing --------------------------------------------------------------------------------------------------
    def _wake_writer(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _write(self) -> None:
        try:
            while not self._closed and self._write_error is None:
                batch, self._rest = self._rest or self._gather(), None
                if batch is not None:
                    self._sending = True
                    await self.stream.send_all(batch.data)
                    self._was_sent(batch)
                else:
                    self._wake = self._loop.create_future()
                    await self._wake
                    self._wake = None
        except OSError as error:  # also TLS's
            self._write_failed(error)
        except BaseException as error:
            self._lost(error)
            raise

    def _send_at_once(self) -> None:
        """Hand the kernel what waits to be sent, a turn of the loop before the writer would."""
        try:
            batch = self._gather()
            if batch is None:
                return  # the peer allows no stream now
            self._sending = True
            taken = self.stream.send_nowait(batch.data)
        except OSError as error:  # also TLS's
            self._write_failed(error)
        except BaseException as error:
            self._lost(error)
            raise
        else:
            if taken == len(batch.data) and not self.stream.has_unsent:
                self._was_sent(batch)
            else:
                self._rest = batch._replace(data=batch.data[taken:])
                self._wake_writer()

    def _was_sent(self, batch: _Batch) -> None:
        """Note that the kernel has all of a batch."""
        self._sending = False
        self._ping_sent = batch.pinging
        for exchange in batch.carried:
            exchange.sent()

    def _write_failed(self, error: OSError) -> None:
        """Send no more. The peer may have answered, or said what it has not touched, before it hung up."""
        if self._closed:
            return
        self._write_error = error
        if isinstance(error, ssl.SSLError):
            self._lost(error)
        self._refuse_pending(f"sending broke off: {reason_of(error)}")
        self._close_if_over()

    def _gather(self) -> _Batch | None:
        """Give what is to be sent next, None for nothing."""
        codec = self._codec
        carried: list[Exchange] = []
        while self._pending and codec.open_streams < codec.streams_max and not codec.exhausted:
            exchange = next(iter(self._pending))
            mark = self._written + codec.waiting_bytes
            stream_id = codec.open(exchange.request, ended=not exchange.uploads)
            del self._pending[exchange]
            self._open[stream_id] = exchange
            exchange.opened(stream_id, mark)
            carried.append(exchange)
            if codec.waiting_bytes >= limits.SEND_PIECE_BYTES:
                break
        if self._uploads:
            self._gather_bodies(limits.SEND_PIECE_BYTES - codec.waiting_bytes, carried)
        if not codec.wants_send:
            return None
        data = codec.data_to_send()
        self._written += len(data)
        return _Batch(data, carried, self._checking is not None)

    def _gather_bodies(self, room: int, carried: list[Exchange]) -> None:
        """Let each body that waits send a frame in turn, until there is enough or none may go on."""
        codec = self._codec
        moved = True
        while moved and room > 0:
            moved = False
            for exchange in list(self._uploads):
                taken = exchange.take(min(codec.sendable(exchange.stream_id), max(room, 0)))
                if taken is None:
                    continue
                piece, last = taken
                codec.send_data(exchange.stream_id, piece, ended=last)
                room -= len(piece) + 9
                moved = True
                carried.append(exchange)
                if not exchange.has_more:
                    del self._uploads[exchange]

    # -- reading --------------------------------------------------------------------------------------------------
    def _take_what_came(self) -> None:
        """Deal with what has come; called by the loop. However fast the peer is, others have their turn."""
        if self._closed:
            return
        try:
            for _ in range(limits.EAGER_OPERATIONS_MAX):
                data = self.stream.receive_nowait()
                if data is None or not self._take(data):
                    return
            self._loop.call_soon(self._take_what_came)  # TLS may hold more than the socket shows
        except BaseException as error:
            self._broke(error)

    async def _read(self) -> None:
        try:
            while self._take(await self.stream.receive()):
                pass
        except BaseException as error:
            self._broke(error)

    def _take(self, data: bytes) -> bool:
        """Deal with bytes of the peer, none at its end; False where nothing more is to come."""
        if not data:
            self._lost(None)
            return False
        codec = self._codec
        if self._checking is not None and self._ping_sent:
            self._answered()
        for event in codec.receive_data(data):
            self._handle(event)
        if codec.wants_send or self._pending:
            self._wake_writer()
        if self.on_news is not None:
            self.on_news()
        return not self._closed

    def _broke(self, error: BaseException) -> None:
        """End everything: reading failed. What is no fault of peer or path is raised again."""
        if isinstance(error, wire.ConnectionBroken) and not self._closed:
            with contextlib.suppress(Exception):
                self._send_last_words()
        self._lost(error)
        if not isinstance(error, wire.ConnectionBroken | OSError | ssl.SSLError):
            raise error

    def _answered(self) -> None:
        if self._checking is not None and not self._checking.done():
            self._checking.set_result(True)
        self._checking = None

    def _handle(self, event: wire.Event) -> None:
        if isinstance(event, wire.Data):
            exchange = self._open.get(event.stream_id)
            if exchange is not None:
                exchange.got_data(event.data, ended=event.ended)
            else:
                self._codec.consumed(0, len(event.data))  # of a stream that runs on unread: no new credit for it
        elif isinstance(event, wire.Head):
            self.answered_at = self.time()
            exchange = self._open.get(event.stream_id)
            if exchange is not None:
                exchange.got_head(event.status, event.headers, ended=event.ended)
        elif isinstance(event, wire.Changed):
            self._wake_writer()
        elif isinstance(event, wire.PingAck):
            self._answered()
            fence = self._fences.get(int.from_bytes(event.data, "big"))
            if fence is not None and not fence.done():
                fence.set_result(True)
        elif isinstance(event, wire.GoAway):
            self._go_away(event)
        else:
            self._handle_rare(event)

    def _handle_rare(self, event: wire.Event) -> None:
        if not isinstance(event, wire.Interim | wire.Ended | wire.Reset | wire.Malformed):
            return
        exchange = self._open.get(event.stream_id)
        if isinstance(event, wire.Malformed) and self._codec.is_open(event.stream_id):
            self._reset(event.stream_id, event.code)
        if exchange is None:
            return
        if isinstance(event, wire.Interim):
            exchange.got_interim()
        elif isinstance(event, wire.Ended):
            exchange.got_end()
        elif isinstance(event, wire.Malformed):
            exchange.fail(
                errors.ProtocolViolation(
                    f"{self.stream.peer}: the answer breaks HTTP: {event.what}",
                    phase=exchange.phase,
                    maybe_delivered=True,
                )
            )
        else:
            self._was_reset(exchange, event)

    def _was_reset(self, exchange: Exchange, event: wire.Reset) -> None:
        if event.code == wire.ErrorCode.ENHANCE_YOUR_CALM:
            self._retired = True
        phase = exchange.phase
        # RFC 9113 section 8.7: REFUSED_STREAM says that nothing of the request was processed.
        untouched = event.code == wire.ErrorCode.REFUSED_STREAM and phase is not Phase.BODY
        what = "refused the request unprocessed" if untouched else "reset the stream"
        exchange.fail(
            errors.ReadError(
                f"{self.stream.peer}: the peer {what} ({wire.code_name(event.code)})",
                phase=phase,
                maybe_delivered=not untouched,
            )
        )

    def _go_away(self, event: wire.GoAway) -> None:
        """Fail what the peer has not touched, and go on with the rest (RFC 9113 section 6.8)."""
        self._going_away = True
        name = wire.code_name(event.code)
        refused = [exchange for number, exchange in self._open.items() if number > event.last_stream_id]
        if (refused or self._pending) and event.code == wire.ErrorCode.NO_ERROR:
            self.served = (event.last_stream_id + 1) // 2
        for exchange in refused:
            phase = exchange.phase
            exchange.fail(
                errors.ReadError(
                    f"{self.stream.peer}: the peer is going away ({name}) and has not processed the request",
                    phase=phase,
                    maybe_delivered=phase is Phase.BODY,
                )
            )
        self._refuse_pending(f"the peer is going away ({name})")
        self._close_if_over()
