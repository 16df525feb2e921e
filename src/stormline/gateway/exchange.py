"""One call of a device on its long connection: `appgw.port.Exchange` over the wire's machine."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

from stormline.appgw.port import Answer, Identity
from stormline.core import limits, limits_platform
from stormline.core.codes import Code
from stormline.core.errors import CallError, LocalProtocolError
from stormline.wire.connection import Connection
from stormline.wire.events import CallReceived
from stormline.wire.messages import Headers
from stormline.wire.states import State


class Link(Protocol):
    """What a call needs of the connection it came on."""

    connection: Connection
    peer: str
    network: str

    def flush(self) -> None:
        """Hand what the machine has put out to the transport."""
        ...

    async def wait_writable(self) -> None:
        """Wait until the peer has taken enough of what was sent; in turn, so that no call starves another."""
        ...


class CallExchange:
    """See `appgw.port.Exchange`. Made and fed by the session, used by one gate.

    Attributes:
        deadline: by when the answer must have begun, as `loop.time()`.
        body_deadline: by when it must have ended. A caller that names a deadline means all of the call by it; one that
            names none waits `limits.CALL_DEADLINE_S` for the beginning, then for as long as the body flows.
        task: the task that handles the call.
        expired: it was cancelled because the deadline has passed.
    """

    __slots__ = (
        "_body_taken",
        "_chunks",
        "_credit_wait",
        "_data_wait",
        "_event",
        "_late",
        "_link",
        "_loop",
        "_receiving",
        "body_deadline",
        "deadline",
        "expired",
        "identity",
        "task",
    )

    def __init__(self, link: Link, identity: Identity, event: CallReceived, loop: asyncio.AbstractEventLoop) -> None:
        self._link = link
        self._event = event
        self._loop = loop
        self._receiving = event.more
        self._chunks: deque[bytes] | None = deque((event.body,)) if event.body else None
        self._body_taken = False
        self._data_wait: asyncio.Future[None] | None = None
        self._credit_wait: asyncio.Future[None] | None = None
        self._late: asyncio.TimerHandle | None = None
        self.identity = identity
        self.task: asyncio.Task[None] | None = None
        self.expired = False
        now, wait_s = loop.time(), event.deadline_s
        self.deadline = now + (limits.CALL_DEADLINE_S if wait_s is None else min(wait_s, limits.CALL_DEADLINE_MAX_S))
        self.body_deadline = now + limits.CALL_DEADLINE_MAX_S if wait_s is None else self.deadline

    @property
    def call_id(self) -> int:
        """The call's id on its connection."""
        return self._event.call_id

    @property
    def peer(self) -> str:
        """See `appgw.port.Exchange.peer`."""
        return self._link.peer.rpartition(":")[0]

    @property
    def network(self) -> str:
        """See `appgw.port.Exchange.network`."""
        return self._link.network

    @property
    def gate(self) -> str:
        """See `appgw.port.Exchange.gate`."""
        return self._event.gate

    @property
    def method(self) -> str:
        """See `appgw.port.Exchange.method`."""
        return self._event.method

    @property
    def target(self) -> str:
        """See `appgw.port.Exchange.target`."""
        return self._event.target

    @property
    def headers(self) -> Headers:
        """See `appgw.port.Exchange.headers`."""
        return self._event.headers

    # -- for the session -----------------------------------------------------------------------------------------

    def begin(self, task: asyncio.Task[None]) -> None:
        """A task handles the call: it is cancelled a little after the deadline."""
        self.task = task
        self._late = self._loop.call_at(self.deadline + limits_platform.CALL_DEADLINE_GRACE_S, self._expire, task)

    def end(self) -> None:
        """The task has ended."""
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _expire(self, task: asyncio.Task[None]) -> None:
        self.expired = True
        task.cancel()

    def answer(self, answer: Answer) -> bool:
        """Put a whole answer out at once; give False where it takes more than one chunk.

        Raises:
            LocalProtocolError: more headers than the wire carries.
        """
        status, headers, body = answer
        if len(body) > limits.CHUNK_BYTES_MAX:
            return False
        self._link.connection.send_reply(self._event.call_id, status, headers=headers, body=body)
        return True

    def feed(self, body: bytes, *, end: bool) -> None:
        """Take a further chunk of the caller's body."""
        if body:
            if self._chunks is None:
                self._chunks = deque()
            self._chunks.append(body)
        if end:
            self._receiving = False
        _wake(self._data_wait)

    def credit_granted(self) -> None:
        """More of the answer may be sent."""
        _wake(self._credit_wait)

    # -- for the gate --------------------------------------------------------------------------------------------

    def whole_body(self) -> bytes | None:
        """See `appgw.port.Exchange.whole_body`."""
        return None if self._event.more else self._event.body

    def body(self) -> AsyncIterator[bytes]:
        """See `appgw.port.Exchange.body`."""
        if self._body_taken:
            raise LocalProtocolError("the body of a call can be read once")
        self._body_taken = True
        return _Body(self)

    def live_on(self) -> None:
        """See `appgw.port.Exchange.live_on`."""
        self.deadline = self.body_deadline = math.inf
        self.end()

    async def next_chunk(self, used: int) -> bytes | None:
        """Give the next chunk of the body, None at its end; `used` bytes of the last one make room for more."""
        if used:
            self._link.connection.consume(self.call_id, used)
            self._link.flush()
        while not self._chunks:
            if not self._receiving:
                return None
            self._data_wait = self._loop.create_future()
            try:
                await self._data_wait
            finally:
                self._data_wait = None
        return self._chunks.popleft()

    async def reply(self, status: int, headers: Headers = (), body: bytes = b"", *, more: bool = False) -> None:
        """See `appgw.port.Exchange.reply`."""
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > limits.CALL_HEADERS_MAX or size > limits.CALL_HEADER_BYTES_MAX:
            raise LocalProtocolError(f"answer with {len(headers)} headers of {size} characters")
        first, rest = body[: limits.CHUNK_BYTES_MAX], body[limits.CHUNK_BYTES_MAX :]
        await self._link.wait_writable()
        self._check_open()
        self._link.connection.send_reply(self.call_id, status, headers=headers, body=first, more=more or bool(rest))
        self._link.flush()
        if (more or rest) and self.task is not None and self.body_deadline > self.deadline and not self.expired:
            self.end()
            self._late = self._loop.call_at(
                self.body_deadline + limits_platform.CALL_DEADLINE_GRACE_S, self._expire, self.task
            )
        if rest:
            await self.send(rest)
            if not more:
                await self.finish()

    async def send(self, chunk: bytes) -> None:
        """See `appgw.port.Exchange.send`."""
        connection = self._link.connection
        start = 0
        while start < len(chunk):
            credit = await self._wait_credit()
            await self._link.wait_writable()
            self._check_open()
            end = start + min(len(chunk) - start, credit, limits.CHUNK_BYTES_MAX)
            connection.send_data(self.call_id, chunk[start:end])
            self._link.flush()
            start = end

    async def finish(self) -> None:
        """See `appgw.port.Exchange.finish`."""
        await self._link.wait_writable()
        self._check_open()
        self._link.connection.send_data(self.call_id, b"", end=True)
        self._link.flush()

    # -- inside --------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        connection = self._link.connection
        if connection.state is State.CLOSED or not connection.is_open(self.call_id):
            raise CallError(Code.CALL_CANCELLED, "the call has ended")

    async def _wait_credit(self) -> int:
        while (credit := self._link.connection.credit(self.call_id)) == 0:
            self._check_open()
            self._credit_wait = self._loop.create_future()
            try:
                await self._credit_wait
            finally:
                self._credit_wait = None
        return credit


class _Body:
    """An iterator object, not an async generator: nothing to close where a reader leaves in the middle."""

    __slots__ = ("_exchange", "_used")

    def __init__(self, exchange: CallExchange) -> None:
        self._exchange = exchange
        self._used = 0

    def __aiter__(self) -> "_Body":
        return self

    async def __anext__(self) -> bytes:
        chunk = await self._exchange.next_chunk(self._used)
        if chunk is None:
            self._used = 0
            raise StopAsyncIteration
        self._used = len(chunk)
        return chunk


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
