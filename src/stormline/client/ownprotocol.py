"""A client's end of an own protocol: messages both ways on one call of the long connection."""

import asyncio
import contextlib
from collections import deque
from types import TracebackType
from typing import Self

from stormline.client.link import LinkCall
from stormline.client.longline import LongLine
from stormline.client.runtime import Runtime
from stormline.core import errors, limits, limits_api
from stormline.core.phase import Phase
from stormline.policy.means import Means, Step
from stormline.wire import messages, ownframes


class OwnProtocol:
    """One stream of a protocol. Get it from `Channel.protocol`; it opens as a context and closes with it.

    Any number of tasks of the loop may send at once, one at a time receives. The stream outlives a lost connection
    where the session goes on at the same gateway: no message is lost or doubled then. Where the session is over
    (`ChannelLost`) or goes on at another gateway (`CallError`), so is the stream, and the application opens another:
    what was sent last may have arrived or not.

    Attributes:
        name: the protocol id.
    """

    def __init__(self, runtime: Runtime, longline: LongLine, name: str, headers: messages.Headers) -> None:
        self.name = name
        self._runtime = runtime
        self._longline = longline
        self._headers = headers
        self._call: LinkCall | None = None
        self._outbox: deque[bytes] = deque()
        self._inbox: deque[bytes] = deque()
        self._unpacker = ownframes.Unpacker(limits_api.OWN_MESSAGE_BYTES_MAX)
        self._closing = False
        self._sent = False  # nothing more is sent
        self._work: asyncio.Future[None] | None = None  # of the one who sends the outbox
        self._room: deque[asyncio.Future[None]] = deque()  # of those who wait to put something in

    async def __aenter__(self) -> Self:
        """Open it, and wait for the plug-in's yes.

        Raises:
            CallError: there is no such protocol (CALL_NOT_FOUND), or its plug-in refuses.
            TransportError: the gateway was not reached, or did not answer in time.
        """
        if self._call is not None:
            raise errors.LocalProtocolError("a stream is opened once")
        trace = self._runtime.trace(method="OPEN", host=self.name, path=self.name)
        trace.attempt(Step(Means.LONG))
        ends_at = asyncio.get_running_loop().time() + (self._runtime.config.deadline_s or limits.CALL_DEADLINE_S)
        call: LinkCall | None = None
        try:
            call, _ = await self._longline.call(
                trace, self.name, "open", ends_at=ends_at, headers=self._headers, more=True
            )
            call.start_body(_Frames(self))
            call.when_sent(self._nothing_more)
            trace.enter(Phase.FIRST_BYTE)
            await self._opened(call, ends_at)
        except BaseException as error:
            if call is not None:
                call.cancel()
            trace.attempt_failed(error)
            trace.failed(error)
            raise
        trace.body_ended()
        self._call = call
        return self

    async def _opened(self, call: LinkCall, ends_at: float) -> None:
        try:
            async with asyncio.timeout_at(ends_at) as timeout:
                await call.reply()
        except TimeoutError as error:
            if not timeout.expired():
                raise
            call.doubt()
            raise errors.DeadlineExceeded(
                f"{self.name}: not opened in time", phase=Phase.FIRST_BYTE, maybe_delivered=call.maybe_delivered
            ) from error

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it: first the plug-in takes what was sent and ends its side, for as long as `limits.CLOSE_FLUSH_S`.

        What comes meanwhile is dropped. Where the block was left by an exception nothing is waited for.
        """
        self._closing = True
        _wake(self._work)
        call = self._call
        if call is not None:
            if kind is None:
                with contextlib.suppress(TimeoutError, errors.StormlineError):
                    async with asyncio.timeout(limits.CLOSE_FLUSH_S):
                        while await call.read():
                            pass
            call.cancel()
        self._nothing_more()

    async def send(self, message: bytes) -> None:
        """Send a message; waits while `limits_api.OWN_OUTBOX_MAX` are on their way, as a slow network holds back.

        On return it is on its way, not arrived: a protocol that must know lets its plug-in say so.

        Raises:
            LocalProtocolError: the stream is not open.
            ChannelLost: it has ended; what `receive` raises or gives says why.
        """
        if self._call is None or self._closing:
            raise errors.LocalProtocolError("the stream is not open")
        frame = ownframes.pack(message)
        while len(self._outbox) >= limits_api.OWN_OUTBOX_MAX and not self._sent:
            waiter = asyncio.get_running_loop().create_future()
            self._room.append(waiter)
            await waiter
        if self._sent:
            raise errors.ChannelLost(f"{self.name}: the stream has ended", phase=Phase.SEND, maybe_delivered=False)
        self._outbox.append(frame)
        _wake(self._work)

    async def receive(self) -> bytes | None:
        """Give the next message; None where the plug-in has ended the stream.

        Cancellation loses nothing.

        Raises:
            LocalProtocolError: the stream is not open.
            CallError: the gateway or the plug-in broke it off.
            ChannelLost: the session is over.
            RemoteProtocolError: a message too large, or cut.
        """
        if self._call is None:
            raise errors.LocalProtocolError("the stream is not open")
        while not self._inbox:
            piece = await self._call.read()
            if not piece:
                if self._unpacker.partial:
                    raise errors.RemoteProtocolError(f"{self.name}: the stream ended within a message")
                return None
            self._inbox.extend(self._unpacker.feed(piece))
        return self._inbox.popleft()

    def __aiter__(self) -> Self:
        """Iterate over messages until the plug-in ends the stream; each step raises like `receive`."""
        return self

    async def __anext__(self) -> bytes:
        message = await self.receive()
        if message is None:
            raise StopAsyncIteration
        return message

    # -- for the sender of the call's body ---------------------------------------------------------------------------

    async def next_frame(self) -> bytes | None:
        """Give the next frame to send, None once it is closed and all have left."""
        while not self._outbox:
            if self._closing:
                return None
            self._work = asyncio.get_running_loop().create_future()
            try:
                await self._work
            finally:
                self._work = None
        frame = self._outbox.popleft()
        while self._room:
            _wake(self._room.popleft())
        return frame

    def _nothing_more(self) -> None:
        self._sent = True
        self._outbox.clear()
        while self._room:
            _wake(self._room.popleft())


class _Frames:
    """The body of the call: an iterator object, so that nothing is left open where the call ends."""

    def __init__(self, stream: OwnProtocol) -> None:
        self._stream = stream

    def __aiter__(self) -> "_Frames":
        return self

    async def __anext__(self) -> bytes:
        frame = await self._stream.next_frame()
        if frame is None:
            raise StopAsyncIteration
        return frame


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
