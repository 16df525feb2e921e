"""Server-sent events (WHATWG HTML, section 9.2): the parser, and a subscription that comes back where it was cut.

    async for event in sse.asubscribe(client, "https://shop.demo/events"):
        print(event.type, event.data)

httpx2's own `client.sse()` works over stormline too. This module is for what it does not do: it serves httpx as well,
reads what the standard reads (a byte order mark, CR line ends as they come, no event without data), and reconnects.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final, NamedTuple

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.net.clock import SystemClock, SystemRng
from stormline.policy.reconnect import Reconnect

CONTENT_TYPE: Final = "text/event-stream"
_LATER: Final = frozenset({429, 500, 502, 503, 504})
"""Answers of servers that are being replaced, or of what stands before them: no reason to stop for good."""


class Event(NamedTuple):
    """One event.

    Attributes:
        type: its name, `message` where it has none.
        data: its lines, joined by newlines.
        id: the last id that the stream has named, here or before; empty for none.
    """

    type: str
    data: str
    id: str


class EventParser:
    """Reads one event stream; the cut of its bytes does not matter.

    Args:
        last_event_id: the id at which the stream goes on.
        size_max: bytes of one event's data, and of any line; None: `limits.SSE_EVENT_BYTES_MAX`.

    Attributes:
        last_event_id: the id to ask for after a break: of the last event that ended with its empty line.
        retry_s: pause before a reconnection, as the server asked for it; None where it did not.
    """

    __slots__ = ("_after_cr", "_begun", "_data", "_id", "_line", "_size", "_size_max", "_type", "last_event_id",
                 "retry_s")  # fmt: skip

    def __init__(self, last_event_id: str = "", *, size_max: int | None = None) -> None:
        self.last_event_id = last_event_id
        self.retry_s: float | None = None
        self._id = last_event_id
        self._type = ""
        self._data: list[str] = []
        self._size = 0
        self._size_max = limits.SSE_EVENT_BYTES_MAX if size_max is None else size_max
        self._line = bytearray()  # that has not ended
        self._after_cr = False  # a LF that comes next belongs to the CR before it
        self._begun = False

    def feed(self, data: bytes) -> Iterator[Event]:
        """Give the events that `data` completes; they must all be taken before the next call.

        Raises:
            ProtocolViolation: an event is larger than `size_max`; phase PARSE.
        """
        if self._after_cr and data:
            data = data.removeprefix(b"\n")
            self._after_cr = False
        if not data:
            return
        self._after_cr = data.endswith(b"\r")
        first, *rest = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._line += first
        for line in rest:
            whole = bytes(self._line)
            self._line[:] = line
            event = self._take(whole)
            if event is not None:
                yield event
        self._bound(len(self._line))

    def _bound(self, more: int) -> None:
        if self._size + more > self._size_max:
            raise errors.ProtocolViolation(
                f"an event of more than {self._size_max} bytes", phase=Phase.PARSE, maybe_delivered=True
            )

    def _take(self, line: bytes) -> Event | None:
        self._bound(len(line))
        if not self._begun:
            self._begun = True
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        text = value.removeprefix(b" ").decode("utf-8", "replace")
        if name == b"data":
            self._data.append(text)
            self._size += len(line)
        elif name == b"event":
            self._type = text
        elif name == b"id":
            if "\0" not in text:
                self._id = text
        elif name == b"retry" and text.isascii() and text.isdigit():
            self.retry_s = min(int(text[:10]) / 1000.0, limits.RECONNECT_RETRY_AFTER_MAX_S)
        return None

    def _dispatch(self) -> Event | None:
        self.last_event_id = self._id
        kind, data = self._type, self._data
        self._type, self._data, self._size = "", [], 0
        return Event(kind or "message", "\n".join(data), self._id) if data else None


def events(response: Any) -> Iterator[Event]:
    """Give the events of one answer of httpx2 or httpx, opened with `client.stream(...)`, until it ends.

    Raises:
        ProtocolViolation: it is no event stream, or an event is too large.
        TransportError: it broke off.
    """
    _check_type(response)
    parser = EventParser()
    for chunk in response.iter_bytes():
        yield from parser.feed(chunk)


async def aevents(response: Any) -> AsyncIterator[Event]:
    """Give the events of an asynchronous answer; see `events`."""
    _check_type(response)
    parser = EventParser()
    async for chunk in response.aiter_bytes():
        for event in parser.feed(chunk):
            yield event


def _check_type(response: Any) -> None:
    value = response.headers.get("content-type", "")
    if value.partition(";")[0].strip().lower() != CONTENT_TYPE:
        raise errors.ProtocolViolation(
            f"expected {CONTENT_TYPE}, got {value[:100]!r}", phase=Phase.FIRST_BYTE, maybe_delivered=True
        )


class _Subscription:
    """What a subscription knows between its answers; decides whether and when it asks again."""

    def __init__(self, client: Any, last_event_id: str, headers: Mapping[str, str] | None) -> None:
        self._client = client
        self._headers = dict(headers or {})
        self._clock, self._rng = SystemClock(), SystemRng()
        self._back_off = Reconnect()
        self._retry_s = limits.RECONNECT_FIRST_S
        self._last_event_id = last_event_id
        self._parser = EventParser(last_event_id)
        self._ever = False

    def options(self) -> dict[str, Any]:
        """Give the options of the next request."""
        usual = self._client.timeout
        headers: dict[str, str | bytes] = {"Accept": CONTENT_TYPE, "Cache-Control": "no-store", **self._headers}
        if self._last_event_id.isprintable() and self._last_event_id:  # others no header can carry
            headers["Last-Event-ID"] = self._last_event_id.encode("utf-8")
        return {
            "headers": headers,
            "timeout": type(usual)(
                connect=usual.connect, read=limits.SSE_SILENCE_S, write=usual.write, pool=usual.pool
            ),
        }

    def accept(self, response: Any) -> EventParser | None:
        """Give the parser of an answer; None where the server says that there is nothing more.

        Raises:
            ProtocolViolation: it is no event stream.
            _AskLater: it is none, and there was one before.
            Exception: the client's own, for a status of 400 and above.
        """
        status = response.status_code
        if status == 204:
            return None
        if self._ever and status in _LATER:
            raise _AskLater(_retry_after_s(response.headers.get("retry-after", "")))
        response.raise_for_status()
        try:
            _check_type(response)
        except errors.ProtocolViolation:
            if self._ever:  # a portal's page, or one that says that the service is being mended
                raise _AskLater(None) from None
            raise
        self._ever = True
        self._back_off.observe_success(self._clock.monotonic())
        self._parser = EventParser(self._last_event_id)
        return self._parser

    def pause_s(self, error: "errors.TransportError | _AskLater | None") -> float:
        """Give how long to wait before asking again, after this failure or, None, after an answer that ended.

        Raises:
            TransportError: the failure, where it is no reason to ask again.
        """
        now, chance = self._clock.monotonic(), self._rng.random()
        if isinstance(error, _AskLater):
            self._back_off.observe_failure(now, chance, retry_after_s=error.retry_after_s)
        elif error is not None and (not self._ever or error.phase is Phase.PARSE):
            raise error
        else:
            self._back_off.observe_loss(now, chance)
        self._last_event_id = self._parser.last_event_id
        if self._parser.retry_s is not None:
            self._retry_s = self._parser.retry_s
        due = self._back_off.next_timer()
        return max(self._retry_s * (0.75 + 0.5 * chance), (due or now) - now)


class _AskLater(Exception):
    """The server cannot just now."""

    def __init__(self, retry_after_s: float | None) -> None:
        super().__init__("the server cannot just now")
        self.retry_after_s = retry_after_s


def _retry_after_s(value: str) -> float | None:
    """Read the seconds of a Retry-After; a date is not believed: whose clock would it be?"""
    return float(value) if value.isascii() and value.isdigit() and len(value) < 10 else None


def subscribe(
    client: Any, url: Any, *, method: str = "GET", last_event_id: str = "", headers: Mapping[str, str] | None = None,
    **options: Any,
) -> Iterator[Event]:  # fmt: skip
    """Give the events of a synchronous client; see `asubscribe`. Between two answers it sleeps."""
    subscription = _Subscription(client, last_event_id, headers)
    while True:
        failed: errors.TransportError | _AskLater | None = None
        try:
            with client.stream(method, url, **{**subscription.options(), **options}) as response:
                parser = subscription.accept(response)
                if parser is None:
                    return
                for chunk in response.iter_bytes():
                    yield from parser.feed(chunk)
        except (errors.TransportError, _AskLater) as error:
            failed = error
        time.sleep(subscription.pause_s(failed))


async def asubscribe(
    client: Any, url: Any, *, method: str = "GET", last_event_id: str = "", headers: Mapping[str, str] | None = None,
    **options: Any,
) -> AsyncIterator[Event]:  # fmt: skip
    """Give the events of a stream, and go on after every break from the last event that came whole.

    Ended or broken off, the stream is asked for again with `Last-Event-ID`: after the pause that the server named, and
    ever longer while that fails. What the server sends again after its own reading of that id comes again. It ends with
    status 204. Leave it with `contextlib.aclosing` or `aclose`, so that the connection is free at once.

    Args:
        client: of httpx2 or httpx, with a stormline transport underneath.
        url: as the client takes it.
        method: `GET`, unless the service is asked otherwise.
        last_event_id: where an earlier subscription ended.
        headers: beside `Accept`, `Cache-Control` and `Last-Event-ID`.
        **options: further options of `client.stream`; `timeout` takes the place of `limits.SSE_SILENCE_S`.

    Raises:
        TransportError: the first answer did not come, or is no event stream, or any event is too large.
        Exception: the client's `HTTPStatusError`, for a status of 400 and above. Once a stream has stood, 429, 500,
            502, 503, 504 and answers that are no event stream are waited out.
    """
    subscription = _Subscription(client, last_event_id, headers)
    while True:
        failed: errors.TransportError | _AskLater | None = None
        try:
            async with client.stream(method, url, **{**subscription.options(), **options}) as response:
                parser = subscription.accept(response)
                if parser is None:
                    return
                async for chunk in response.aiter_bytes():
                    for event in parser.feed(chunk):
                        yield event
        except (errors.TransportError, _AskLater) as error:
            failed = error
        await asyncio.sleep(subscription.pause_s(failed))
