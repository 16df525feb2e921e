"""One HTTP/1.1 connection on a stream: one exchange at a time, with the exact two-phase boundary."""

import asyncio
import math
import ssl
from collections.abc import Callable, Coroutine
from typing import Final, NoReturn

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.net.clock import time_of
from stormline.net.stream import Stream, reason_of
from stormline.outbound.http1_codec import Encoded, ResponseReader
from stormline.outbound.messages import HttpResponse


class Http1Connection:
    """A connection that carries requests one after the other.

    Args:
        stream: owned from now on.

    Attributes:
        loop: the event loop it belongs to.
        time: its clock.
        stream: the bytes below.
        exchanges: requests begun on it.
        answers: heads of answers that came.
    """

    __slots__ = ("_current", "_due", "_mark", "_timer", "answers", "exchanges", "loop", "stream", "time")

    def __init__(self, stream: Stream) -> None:
        self.loop = asyncio.get_running_loop()
        self.time = time_of(self.loop)
        self.stream: Final = stream
        self.exchanges = self.answers = 0
        self._mark = 0
        self._current: _Exchange | None = None
        self._timer: asyncio.TimerHandle | None = None  # outlives an exchange: to make one for each costs more
        self._due = math.inf  # when it fires

    @property
    def maybe_delivered(self) -> bool:
        """True once the kernel has taken a byte of the latest request."""
        return self.stream.sent_bytes > self._mark

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
        """Send a request and give its answer as soon as the head is there.

        An answer that comes before the request is out is given all the same (and the connection not used again);
        the rest of the request is held back where the answer is an error or announces the close (RFC 9112 section
        9.5). Cancelled or failed, the connection is closed.

        Args:
            request: made by `encode`.
            deadline_at: the loop's time at which the body must have been read.
            head_by: the loop's time at which the head must be there; None leaves that to the caller.
            read_timeout_s: longest silence, in waiting for the head (pieces of our body that leave break it) and
                between two pieces of the answer's body. None: any until the head, then `limits.PACKET_GAP_S`.
            done: called once, at the end: True where the connection can carry another request. It is closed else.
            on_stage: told `send`, `first_byte`, `body`.

        Raises:
            WriteError: the connection broke while sending, and no answer was there.
            ReadError: it ended or broke before the head was whole.
            ProtocolViolation: the answer breaks HTTP.
            DeadlineExceeded: `head_by` or `read_timeout_s` passed; phase SEND or FIRST_BYTE.
            LocalProtocolError: the body source gave not as many bytes as its Content-Length says.
        """
        self.exchanges += 1
        self._mark = self.stream.sent_bytes
        exchange = self._current = _Exchange(self, request, deadline_at, head_by, read_timeout_s, done, on_stage)
        return exchange.run()

    def watch(self, due: float) -> None:
        """Have the timer fire no later than `due`. One that fires early finds out and sleeps on."""
        if self._due <= due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = self.loop.call_at(due, self._time_came), due

    def _time_came(self) -> None:
        self._timer, self._due = None, math.inf
        if self._current is not None:
            self._current.expire()

    def rest(self) -> None:
        """The exchange is over: nothing is watched."""
        self._current = None

    def close(self) -> None:
        """Close at once."""
        self._current = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._due = None, math.inf
        self.stream.close()


class _SendFailed(Exception):
    """The stream broke while sending; the cause says how. Apart from errors of the body's source."""


class _Exchange:
    """One request and its answer; the `BodySource` of that answer."""

    __slots__ = ("_broken", "_connection", "_deadline_at", "_done", "_expired", "_failure", "_finished",
                 "_moved_at", "_on_stage", "_out", "_read_timeout_s", "_reader", "_reading", "_request", "_sender",
                 "_sent_all", "_size", "_stop", "_stream", "_time", "_until")  # fmt: skip

    def __init__(
        self,
        connection: Http1Connection,
        request: Encoded,
        deadline_at: float,
        head_by: float | None,
        read_timeout_s: float | None,
        done: Callable[[bool], None],
        on_stage: Callable[[Phase], None],
    ) -> None:
        self._time = connection.time
        self._connection = connection
        self._stream = connection.stream
        self._request = request
        self._deadline_at = deadline_at
        self._until = deadline_at if head_by is None or head_by > deadline_at else head_by  # what nothing puts off
        self._read_timeout_s = read_timeout_s
        self._done = done
        self._on_stage = on_stage
        self._reader = ResponseReader(is_head=request.is_head)
        self._sender: asyncio.Task[None] | None = None  # only for bodies that do not leave in one send
        self._out = 0  # bytes of the head sent at once
        self._broken: OSError | None = None  # how that failed
        self._size = 0  # body bytes sent
        self._sent_all = False
        self._stop = False  # an early answer makes the rest of the body pointless
        self._finished = False  # the connection is given back or closed
        self._expired = ""  # what ran out of time
        self._moved_at = self._time()  # when bytes last went either way
        self._reading = True  # somebody waits for bytes: silence counts
        self._failure: errors.TransportError | None = None  # how reading the body ended, said again if asked again

    async def run(self) -> HttpResponse:
        """Send, and read as far as the head's end."""
        reader, connection = self._reader, self._connection
        reused = connection.exchanges > 1
        try:
            self._watch()
            self._on_stage(Phase.SEND)
            write_error = self._broken if self._sent_at_once() else await self._send_or_begin_to()
            try:
                while True:
                    data = await self._stream.receive()
                    if data:
                        reader.receive_data(data)
                    else:
                        reader.receive_eof()
                    if reader.status:
                        break
                    self._moved_at = self._time()
            except (OSError, errors.TransportError) as error:
                self._head_failed(error, write_error)
            self._until = self._deadline_at
            connection.answers += 1
            if not self._sent_all:
                reader.keep_alive = False
                self._stop = reader.status >= 300 or self._says_close()
                self._on_stage(Phase.FIRST_BYTE)
            self._on_stage(Phase.BODY)
            self._reading = False
            if not reader.complete:
                self._watch()
            elif self._sender is None:
                self._finish(reader.keep_alive)
            else:
                await self._end(reusable=reader.keep_alive)
        except BaseException:
            await self._end(reusable=False)
            raise
        return HttpResponse(
            reader.status, reader.reason, reader.http_version, reader.headers, self._stream.peer, reused, self
        )

    # -- sending --------------------------------------------------------------------------------------------------
    def _sent_at_once(self) -> bool:
        """Hand the kernel a request without a body, as almost all are; False where it does not take all of it now.

        True where there is no more to send, also as sending failed (`_broken`).
        """
        request, stream = self._request, self._stream
        if request.body or request.chunked or len(request.head) > limits.SEND_PIECE_BYTES:
            return False
        try:
            self._out = stream.send_nowait(request.head)
        except OSError as error:
            self._broken = error  # the peer may have answered before it hung up: the reading tells
            return True
        if self._out < len(request.head) or stream.has_unsent:
            return False
        self._all_sent()
        return True

    async def _send_or_begin_to(self) -> OSError | None:
        """Send what is left of a request that fits one piece; a larger or streamed one is sent by a task."""
        head, body = self._request.head[self._out :], self._request.body
        if not isinstance(body, bytes) or len(head) + len(body) > limits.SEND_PIECE_BYTES:
            self._sender = asyncio.create_task(self._send_streamed(), name="request body")
            self._sender.add_done_callback(self._sender_done)
            return None
        if self._request.chunked:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n"
        try:
            await self._stream.send_all(head + body)
        except OSError as error:
            return error  # the peer may have answered before it hung up: the reading tells
        self._all_sent()
        return None

    async def _send_streamed(self) -> None:
        await self._send(self._request.head)
        if self._request.length == 0:
            self._all_sent()
        body = self._request.body
        if isinstance(body, bytes):
            for offset in range(0, len(body), limits.SEND_PIECE_BYTES):
                if self._stop:
                    return
                await self._send_piece(body[offset : offset + limits.SEND_PIECE_BYTES])
        else:
            async for piece in body:
                if self._stop:
                    return
                await self._send_piece(piece)
        if self._request.chunked:
            await self._send(b"0\r\n\r\n")
        elif self._size != self._request.length:
            raise errors.LocalProtocolError(
                f"the body ended after {self._size} bytes, its Content-Length is {self._request.length}"
            )
        self._all_sent()

    async def _send_piece(self, piece: bytes) -> None:
        if not piece:
            return  # as a chunk it would end the body
        self._size += len(piece)
        if self._request.chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        elif self._request.length is not None and self._size > self._request.length:
            raise errors.LocalProtocolError(f"the body is longer than its Content-Length, {self._request.length}")
        await self._send(piece)
        if self._size == self._request.length:
            self._all_sent()  # now, not when the source says it has no more: the answer may come before that

    async def _send(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except OSError as error:
            raise _SendFailed from error
        self._moved_at = self._time()

    def _all_sent(self) -> None:
        if self._sent_all:
            return
        self._sent_all = True
        if not self._reader.status:
            self._on_stage(Phase.FIRST_BYTE)

    def _sender_done(self, sender: asyncio.Task[None]) -> None:
        error = None if sender.cancelled() else sender.exception()
        if error is None or self._reader.status:
            return
        if not isinstance(error, _SendFailed) or isinstance(error.__cause__, ssl.SSLError):
            self._stream.close()  # wakes the reading; a broken socket does that by itself, and may hold an answer

    # -- the head -------------------------------------------------------------------------------------------------
    def _head_failed(self, error: Exception, write_error: BaseException | None) -> NoReturn:
        """Say how waiting for the head ended."""
        if self._expired:
            phase, delivered = Phase.FIRST_BYTE if self._sent_all else Phase.SEND, self._connection.maybe_delivered
            raise errors.DeadlineExceeded(
                f"{self._stream.peer}: {self._expired}, while in {phase}", phase=phase, maybe_delivered=delivered
            ) from error
        if self._sender is not None and self._sender.done():
            write_error = self._sender.exception()
            if isinstance(write_error, _SendFailed):
                write_error = write_error.__cause__
            elif write_error is not None:
                raise write_error from None  # the body's source failed
        peer, delivered = self._stream.peer, self._connection.maybe_delivered
        if write_error is not None:
            raise errors.WriteError(
                f"{peer}: sending broke off: {reason_of(write_error)}", phase=Phase.SEND, maybe_delivered=delivered
            ) from write_error
        if isinstance(error, errors.ProtocolViolation):
            error.maybe_delivered = delivered
            raise error
        phase = Phase.FIRST_BYTE if self._sent_all else Phase.SEND
        raise errors.ReadError(
            f"{peer}: no answer: {reason_of(error)}", phase=phase, maybe_delivered=delivered
        ) from error

    def _says_close(self) -> bool:
        return any(name.lower() == b"connection" and b"close" in value.lower() for name, value in self._reader.headers)

    # -- body -----------------------------------------------------------------------------------------------------
    @property
    def complete(self) -> bool:
        """See `BodySource.complete`."""
        return self._reader.complete

    def patience(self, silence_s: float) -> None:
        """See `BodySource.patience`."""
        self._read_timeout_s = silence_s
        self._watch()

    async def read(self) -> bytes:
        """See `BodySource.read`."""
        reader = self._reader
        while not (data := reader.take_body()):
            if self._failure is not None:
                raise self._failure
            if reader.complete:
                return b""
            if self._expired:
                self._fail(errors.DeadlineExceeded, f"{self._expired} before the body was read")
            if self._finished:
                self._fail(errors.ReadError, "the answer was closed before its end")
            await self._read_more()
        return data

    async def _read_more(self) -> None:
        self._reading = True
        self._moved_at = self._time()
        self._watch()
        try:
            data = await self._stream.receive()
            self._reading = False
            if data:
                self._reader.receive_data(data)
            else:
                self._reader.receive_eof()
        except errors.TransportError as error:
            self._failure = error
            await self._end(reusable=False)
            raise
        except OSError as error:
            await self._end(reusable=False)
            if self._expired:
                self._fail(errors.DeadlineExceeded, f"{self._expired} in the middle of the body", error)
            self._fail(errors.ReadError, f"the body broke off: {reason_of(error)}", error)
        except BaseException:
            await self._end(reusable=False)
            raise
        if self._reader.complete:
            await self._end(reusable=self._reader.keep_alive)

    def _fail(self, kind: type[errors.TransportError], what: str, cause: BaseException | None = None) -> NoReturn:
        self._failure = kind(f"{self._stream.peer}: {what}", phase=Phase.BODY, maybe_delivered=True)
        raise self._failure from cause

    # -- the end --------------------------------------------------------------------------------------------------
    async def aclose(self) -> None:
        """See `BodySource.aclose`."""
        await self._end(reusable=False)

    async def _end(self, *, reusable: bool) -> None:
        self._finish(reusable)
        if self._sender is not None and not self._sender.done():
            self._sender.cancel()
            await asyncio.wait([self._sender])

    def _finish(self, reusable: bool) -> None:
        if self._finished:
            return
        self._finished = True
        reusable = reusable and not self._request.close
        if reusable:
            self._connection.rest()
        else:
            self._connection.close()
        self._done(reusable)

    # -- time -----------------------------------------------------------------------------------------------------
    def _due(self) -> float:
        """Give the moment at which time runs out, if nothing moves until then."""
        if not self._reading:
            return self._until
        silence_s = self._read_timeout_s
        if silence_s is None:
            silence_s = limits.PACKET_GAP_S if self._reader.status else math.inf
        quiet_until = self._moved_at + silence_s
        return min(self._until, quiet_until)

    def _watch(self) -> None:
        """See to it that somebody looks when time runs out."""
        if not self._finished:
            self._connection.watch(self._due())

    def expire(self) -> None:
        """Free the connection where time has run out, whether or not anybody reads the body."""
        due = self._due()
        if self._time() < due:
            self._watch()
            return
        silent_s = due - self._moved_at
        self._expired = "the deadline passed" if due == self._until else f"nothing came for {silent_s:.3g} s"
        if self._sender is not None:
            self._sender.cancel()
        self._finish(reusable=False)
