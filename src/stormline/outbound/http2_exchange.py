"""One request and its answer on an HTTP/2 stream; the connection does the sending and the reading."""

import asyncio
import collections
import math
from collections.abc import AsyncIterable, Callable
from typing import Final, NamedTuple, Protocol

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.outbound.http2_codec import Encoded
from stormline.outbound.messages import HttpResponse


class Bounds(NamedTuple):
    """See `Http2Connection.exchange`."""

    deadline_at: float
    head_by: float | None
    read_timeout_s: float | None


class Carrier(Protocol):
    """What an exchange needs of its connection.

    Attributes:
        time: the clock of its event loop.
    """

    time: Callable[[], float]

    def begin(self, exchange: "Exchange") -> bool:
        """Give it a stream, or a place among those that wait for one; True where the connection stood before.

        Raises:
            QueueFull, LocalProtocolError: see `Http2Connection.exchange`.
        """
        ...

    def watch(self, due: float) -> None:
        """Call `expire` no later than `due`. An exchange that is asked early says so by asking anew."""
        ...

    def upload(self, exchange: "Exchange") -> None:
        """Send what `take` gives, as far as the peer lets us."""
        ...

    def consumed(self, exchange: "Exchange", size: int) -> None:
        """Give the peer credit for body bytes that were read, or thrown away."""
        ...

    def release(self, exchange: "Exchange") -> None:
        """Forget an exchange; its stream is reset where it is still open."""
        ...


class Exchange:
    """One request and its answer; the `BodySource` of that answer.

    Attributes:
        request: what is sent.
        stream_id: 0 until the stream is opened.
        mark: bytes that the connection had sent before the stream's first frame.
        uploads: there is a body to send.
        status: 0 until the head is there.
        complete: the answer is whole; pieces of it may be unread.
        finished: the stream is over for us.
    """

    __slots__ = ("_bounds", "_carrier", "_chunks", "_done", "_failure", "_headers", "_loop", "_moved_at", "_on_stage",
                 "_out", "_out_last", "_out_taken", "_peer", "_reading", "_sent_all", "_size", "_source", "_time",
                 "_waiter", "complete", "finished", "mark", "request", "status", "stream_id", "uploads")  # fmt: skip

    http_version = "HTTP/2"

    def __init__(
        self,
        carrier: Carrier,
        request: Encoded,
        bounds: Bounds,
        *,
        peer: Address,
        done: Callable[[bool], None],
        on_stage: Callable[[Phase], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._time = carrier.time
        self._carrier = carrier
        self._bounds = bounds
        self._peer = peer
        self._done: Final = done
        self._on_stage = on_stage
        self._chunks: collections.deque[bytes] = collections.deque()
        self._headers: list[tuple[bytes, bytes]] = []
        self._failure: BaseException | None = None  # how it ended badly, said again if asked again
        self._moved_at = self._time()  # when bytes of this stream last went either way
        self._reading = True  # somebody waits for bytes: silence counts
        self._size = 0  # body bytes sent or about to be
        self._sent_all = False
        self._out: memoryview | None = None  # a piece of the body that waits to be sent
        self._out_last = False  # and nothing comes after it
        self._out_taken: asyncio.Future[None] | None = None  # done when the kernel has the piece
        self._source: asyncio.Task[None] | None = None  # only for bodies that come piece by piece
        self._waiter: asyncio.Future[None] | None = None
        self.request: Final = request
        self.stream_id = self.mark = self.status = 0
        self.uploads = not isinstance(request.body, bytes) or bool(request.body)
        self.complete = self.finished = False

    @property
    def delivered(self) -> bool:
        """The peer may know of it: a head that the writer has begun to hand over goes out, whatever we say later."""
        return self.stream_id != 0

    @property
    def moved_at(self) -> float:
        """The loop's time when bytes of its stream last went either way."""
        return self._moved_at

    @property
    def phase(self) -> Phase:
        """How far it is."""
        if self.status:
            return Phase.BODY
        if self._sent_all:
            return Phase.FIRST_BYTE
        return Phase.SEND if self.stream_id else Phase.QUEUED

    async def run(self) -> HttpResponse:
        """Begin, and wait for the head of the answer."""
        reused = self._carrier.begin(self)
        try:
            if not self.stream_id:
                self._watch()
            while not self.status:
                if self._failure is not None:
                    raise self._failure
                await self._news()
        except BaseException:
            await self._end()
            raise
        return HttpResponse(self.status, b"", self.http_version, self._headers, self._peer, reused, self)

    def _news(self) -> asyncio.Future[None]:
        """Give what is done when something happens."""
        waiter = self._waiter = self._loop.create_future()
        return waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- called by the connection: sending ------------------------------------------------------------------------
    def opened(self, stream_id: int, mark: int) -> None:
        """Note that the stream exists; its head is on its way to the kernel."""
        self.stream_id, self.mark = stream_id, mark
        self._moved_at = self._time()
        self._on_stage(Phase.SEND)
        self._watch()
        if not self.uploads:
            return
        body = self.request.body
        if isinstance(body, bytes):
            self._out, self._out_last = memoryview(body), True
            self._carrier.upload(self)
        else:
            self._source = asyncio.create_task(self._pull(body), name="request body")
            self._source.add_done_callback(self._pulled)

    def take(self, size_max: int) -> tuple[memoryview, bool] | None:
        """Give the next bytes of the body and whether they are the last; None where there are none now.

        Args:
            size_max: of the frame they go in; 0: only an empty last one may go; below it, which it is when the peer has
                made its windows smaller, none: some servers break the connection over it.
        """
        out = self._out
        if out is None or size_max < 0 or (out and not size_max):
            return None
        piece, rest = out[:size_max], out[size_max:]
        self._out = rest or None
        return piece, self._out_last and not rest

    @property
    def has_more(self) -> bool:
        """True where `take` can give more, if it may."""
        return self._out is not None

    def sent(self) -> None:
        """Note that the kernel has all that was taken so far."""
        self._moved_at = self._time()
        if self._out is not None or self.finished:
            return
        if self._out_taken is not None and not self._out_taken.done():
            self._out_taken.set_result(None)
        if (self._out_last or not self.uploads) and not self._sent_all:
            self._sent_all = True
            if not self.status:
                self._on_stage(Phase.FIRST_BYTE)

    async def _pull(self, body: AsyncIterable[bytes]) -> None:
        length = self.request.length
        async for piece in body:
            if not piece:
                continue
            self._size += len(piece)
            if length is not None and self._size > length:
                raise errors.LocalProtocolError(f"the body is longer than its Content-Length, {length}")
            await self._offer(piece, last=self._size == length)  # the answer may come before the source says it ends
        if length is not None and self._size != length:
            raise errors.LocalProtocolError(f"the body ended after {self._size} bytes, its Content-Length is {length}")
        if not self._out_last:
            await self._offer(b"", last=True)

    async def _offer(self, piece: bytes, *, last: bool) -> None:
        self._out, self._out_last = memoryview(piece), last
        self._out_taken = self._loop.create_future()
        self._carrier.upload(self)
        await self._out_taken

    def _pulled(self, source: asyncio.Task[None]) -> None:
        """Fail where the body's source did, unless an answer is there: that is more use."""
        error = None if source.cancelled() else source.exception()
        if error is not None and not self.status:
            self.fail(error)

    # -- called by the connection: the answer ---------------------------------------------------------------------
    def got_interim(self) -> None:
        """Note that an interim answer came."""
        self._moved_at = self._time()

    def got_head(self, status: int, headers: list[tuple[bytes, bytes]], *, ended: bool) -> None:
        """Take the head of the answer. An error makes the rest of our body pointless: it is held back."""
        self._moved_at = self._time()
        self.status, self._headers = status, headers
        if not self._sent_all:
            self._on_stage(Phase.FIRST_BYTE)
            if status >= 300:
                self._stop_upload()
        self._on_stage(Phase.BODY)
        self._reading = False
        if ended:
            self.got_end()
        else:
            self._watch()
        self._wake()

    def got_data(self, data: bytes, *, ended: bool) -> None:
        """Take a piece of the body."""
        self._moved_at = self._time()
        if data:
            self._chunks.append(data)
        if ended:
            self.got_end()
        self._wake()

    def got_end(self) -> None:
        """Note that the answer is whole."""
        self.complete = True
        self._finish()
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End badly; what came before can still be read."""
        if self.finished:
            return
        self._failure = error
        self._finish()
        self._wake()

    # -- body -----------------------------------------------------------------------------------------------------
    def patience(self, silence_s: float) -> None:
        """See `BodySource.patience`."""
        self._bounds = self._bounds._replace(read_timeout_s=silence_s)
        self._watch()

    async def read(self) -> bytes:
        """See `BodySource.read`."""
        while not self._chunks:
            if self._failure is not None:
                raise self._failure
            if self.complete:
                return b""
            if self.finished:
                self._failure = self._closed_early()
                continue
            self._reading = True
            self._moved_at = self._time()
            self._watch()
            try:
                await self._news()
            except BaseException:
                self._failure = self._closed_early()
                await self._end()
                raise
            self._reading = False
        chunks = self._chunks
        data = chunks.popleft() if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._carrier.consumed(self, len(data))
        return data

    def _closed_early(self) -> errors.ReadError:
        return errors.ReadError(
            f"{self._peer}: the answer was closed before its end", phase=Phase.BODY, maybe_delivered=True
        )

    # -- the end --------------------------------------------------------------------------------------------------
    async def aclose(self) -> None:
        """See `BodySource.aclose`. The stream is reset where it is still open; the connection goes on."""
        if self._chunks:
            self._carrier.consumed(self, sum(map(len, self._chunks)))
            self._chunks.clear()
            self.complete = False
        if not self.complete and self._failure is None:
            self._failure = self._closed_early()
        await self._end()

    async def _end(self) -> None:
        if self._chunks:
            self._carrier.consumed(self, sum(map(len, self._chunks)))
            self._chunks.clear()
        self._finish()
        if self._source is not None and not self._source.done():
            await asyncio.wait([self._source])

    def _finish(self) -> None:
        if self.finished:
            return
        self.finished = True
        self._stop_upload()
        self._carrier.release(self)

    def tell_done(self, reusable: bool) -> None:
        """Tell who asked for the exchange that its stream is over."""
        self._done(reusable)

    def _stop_upload(self) -> None:
        self._out = None
        self._out_last = False
        if self._source is not None:
            self._source.cancel()

    # -- time -----------------------------------------------------------------------------------------------------
    def _deadline(self) -> float:
        """Give the moment that nothing puts off."""
        deadline, head_by, _ = self._bounds
        return head_by if head_by is not None and head_by < deadline and not self.status else deadline

    def _due(self) -> float:
        """Give the moment at which time runs out, if nothing moves until then."""
        deadline = self._deadline()
        if not self._reading or not self.stream_id:
            return deadline
        silence_s = self._bounds.read_timeout_s
        if silence_s is None:
            silence_s = limits.PACKET_GAP_S if self.status else math.inf
        return min(deadline, self._moved_at + silence_s)

    def _watch(self) -> None:
        """See to it that somebody looks when time runs out."""
        if not self.finished:
            self._carrier.watch(self._due())

    def expire(self) -> None:
        """Free the stream where time has run out, whether or not anybody reads the body."""
        if self.finished:
            return
        due = self._due()
        if self._time() < due:
            self._watch()
            return
        what = "the deadline passed" if due == self._deadline() else f"nothing came for {due - self._moved_at:.3g} s"
        phase = self.phase
        self.fail(
            errors.DeadlineExceeded(
                f"{self._peer}: {what}, while in {phase}",
                phase=phase,
                maybe_delivered=self.delivered,
            )
        )
