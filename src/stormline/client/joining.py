"""Identical reads under way at once, sent once: "single flight".

Only where the caller asked for it (`Config.join_reads`, or the extension `stormline.join_reads` of one request). By
default each request is sent: two reads are the same only to who knows what their server does with them (counters,
one-time links), and an answer begun before is an answer of before.

What is identical: GET or HEAD without a body, the same scheme, host, port and target, and the same header fields with
the same values in any order of different names, `Authorization`, `Cookie`, `Range`, `Accept` and all others. Left out
are the fields that name the request and not what is asked: `traceparent`, `tracestate`, `baggage`, `x-request-id`.
Never joined: `Cache-Control` or `Pragma` with `no-cache` or `no-store`, long polls and event streams. A write to the
same origin ends joining, when it begins and when it ends: whoever reads after it sees what it did.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from stormline.client.answer import Answer, KeptBody
from stormline.client.lanes import CallLimits
from stormline.client.patterns import answer_pattern
from stormline.client.trace import CallTrace
from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.outbound.messages import HttpRequest
from stormline.policy.resend import SAFE_METHODS
from stormline.policy.shape import Pattern

Origin = tuple[str, str, int]
Send = Callable[[], Awaitable[Answer]]
_METHODS: Final = frozenset({"GET", "HEAD"})
_OF_THE_REQUEST: Final = frozenset({b"traceparent", b"tracestate", b"baggage", b"x-request-id"})
_FRESH: Final = frozenset({b"cache-control", b"pragma"})


class Key(NamedTuple):
    """What makes two reads the same."""

    method: str
    origin: Origin
    target: bytes
    fields: tuple[tuple[bytes, bytes], ...]


def key_of(request: HttpRequest, pattern: Pattern) -> Key | None:
    """Give what a read is joined by; None where it is not to be joined.

    Args:
        request: with its fields as they are sent.
        pattern: what kind of request it is.
    """
    if request.method not in _METHODS or request.body or pattern in (Pattern.LONG_POLL, Pattern.STREAM):
        return None
    fields: list[tuple[bytes, bytes]] = []
    for name, value in request.headers:
        lower = name.lower()
        if lower in _FRESH and (b"no-cache" in value.lower() or b"no-store" in value.lower()):
            return None
        if lower not in _OF_THE_REQUEST:
            fields.append((lower, value))
    fields.sort(key=lambda field: field[0])  # stable: values of one name keep their order (RFC 9110 section 5.3)
    return Key(request.method, (request.scheme, request.host, request.port), request.target, tuple(fields))


class _Alone(Exception):
    """The answer cannot be shared: who joined goes by itself."""


class _Shared(NamedTuple):
    """An answer that all who joined get a copy of."""

    answer: Answer
    body: bytes


class _Flight:
    """One read under way, and who waits for it."""

    __slots__ = ("callers", "leads", "task", "trace")

    def __init__(self, task: "asyncio.Task[_Shared | Answer]", trace: CallTrace) -> None:
        self.task = task
        self.trace = trace
        self.callers = 0
        self.leads = True  # the one who began it still waits


class Joining:
    """The reads under way of one client. Belongs to one event loop.

    Attributes:
        joined: requests that were not sent because another one like them was under way.
    """

    def __init__(self) -> None:
        self._flights: dict[Key, _Flight] = {}
        self._loop = asyncio.get_running_loop()
        self.joined = 0

    def written(self, request: HttpRequest) -> None:
        """A request that may change something begins or has ended: reads from before are joined no more."""
        if self._flights and request.method not in SAFE_METHODS:
            origin = (request.scheme, request.host, request.port)
            for key in [key for key in self._flights if key.origin == origin]:
                del self._flights[key]

    async def get(self, key: Key, send: Send, trace: CallTrace, call_limits: CallLimits) -> Answer:
        """Give an answer of one's own: of the read under way, or of one begun now.

        Cancelled, only this caller is; the read goes on as long as anybody waits for it.

        Args:
            key: of the read.
            send: sends it, followed by `trace`.
            trace: of this caller.
            call_limits: of this caller.

        Raises:
            TransportError: it failed; each caller gets an error of its own.
            DeadlineExceeded: this caller's deadline came first; `maybe_delivered` is True, as the read may be.
        """
        flight = self._flights.get(key)
        if flight is None and len(self._flights) >= limits.JOIN_FLIGHTS_MAX:
            return await send()
        if flight is None:
            return await self._lead(key, send, trace, call_limits)
        if flight.callers >= limits.ADMISSION_WAITING_MAX:
            return await send()
        return await self._follow(flight, send, trace, call_limits)

    async def _lead(self, key: Key, send: Send, trace: CallTrace, call_limits: CallLimits) -> Answer:
        task = self._loop.create_task(_fly(send, call_limits), name="joined read")
        flight = self._flights[key] = _Flight(task, trace)
        task.add_done_callback(lambda _: self._landed(key, flight))
        flight.callers += 1
        try:
            found = await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if not task.cancelled() and flight.callers > 1:
                flight.leads = False
                trace.part(error)
            raise
        finally:
            self._left(flight)
        return found.answer if isinstance(found, _Shared) else found

    async def _follow(self, flight: _Flight, send: Send, trace: CallTrace, call_limits: CallLimits) -> Answer:
        flight.callers += 1
        trace.enter(Phase.FIRST_BYTE)
        trace.note("joins a read like it that is under way")
        try:
            async with asyncio.timeout(call_limits.deadline_s) as timeout:
                found = await asyncio.shield(flight.task)
            if not isinstance(found, _Shared):
                raise _Alone
        except _Alone:
            trace.note("its answer is too large to be shared")
            return await send()
        except errors.DeadlineExceeded:
            trace.note("its time was over before ours")
            return await send()
        except TimeoutError as error:
            if not timeout.expired():
                raise
            own = errors.DeadlineExceeded("no answer within the deadline", phase=Phase.FIRST_BYTE, maybe_delivered=True)
            raise _told(own, trace) from error
        except errors.TransportError as error:
            raise _told(_again(error), trace) from error
        except BaseException as error:
            trace.failed(error)
            raise
        finally:
            self._left(flight)
        self.joined += 1
        answer, record = found.answer, flight.trace.record
        trace.record.means, trace.record.address, trace.record.family = record.means, record.address, record.family
        trace.answered(answer.status)
        return Answer(
            trace,
            KeptBody(found.body),
            status=answer.status,
            reason=answer.reason,
            http_version=answer.http_version,
            headers=answer.headers,
        )

    def _landed(self, key: Key, flight: _Flight) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        task = flight.task
        if not task.cancelled() and task.exception() is None and not flight.leads:
            found = task.result()
            # Nobody reads on: it was the stream of who began it, and that one is gone.
            closing = self._loop.create_task((found.answer if isinstance(found, _Shared) else found).aclose())
            _CLOSING.add(closing)
            closing.add_done_callback(_CLOSING.discard)

    def _left(self, flight: _Flight) -> None:
        flight.callers -= 1
        if not flight.callers and not flight.task.done():
            flight.task.cancel()

    async def aclose(self) -> None:
        """End what is under way."""
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_CLOSING: set[asyncio.Task[None]] = set()
"""Answers being let go: a loop keeps only weak references to its tasks."""


async def _fly(send: Send, call_limits: CallLimits) -> _Shared | Answer:
    """Send the read; give its answer with its body where it can be shared, else the answer alone."""
    answer = await send()
    if answer_pattern(Pattern.CALL, answer.headers) is Pattern.STREAM:
        return answer
    body = await answer.keep(limits.JOIN_BODY_BYTES_MAX)
    return answer if body is None else _Shared(answer, body)


def _again(error: errors.TransportError) -> errors.TransportError:
    """Give a second error like one: one object would gather everybody's traceback."""
    if isinstance(error, errors.GatewayError):
        return errors.GatewayError(
            str(error),
            phase=error.phase,
            maybe_delivered=error.maybe_delivered,
            code=error.code,
            retry_after_s=error.retry_after_s,
        )
    return type(error)(str(error), phase=error.phase, maybe_delivered=error.maybe_delivered)


def _told(error: errors.TransportError, trace: CallTrace) -> errors.TransportError:
    error.trace = trace
    trace.failed(error)
    return error
