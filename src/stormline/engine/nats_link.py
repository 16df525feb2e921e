"""One connection to NATS, from greeting to loss: what is sent on it and who awaits an answer on it."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from stormline.core import errors
from stormline.core import limits_platform as limits

_log = logging.getLogger("stormline.engine")
_NO_RESPONDERS: Final = "503"
FAILURES: Final = (nats.errors.Error, OSError, TimeoutError)
"""What the client raises for trouble with the connection."""


class QuickClient(Client):
    """The client, reading headers at a quarter of the cost: each key we read comes with six."""

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        """Read `Name: Value` lines as the library does; those with a malformed name are none."""
        found: dict[str, str] = {}
        for line in raw.decode("utf-8", "replace").split("\r\n"):
            name, separator, value = line.partition(":")
            name = name.strip()
            if separator and name.isascii() and " " not in name and "\t" not in name:
                found[name] = value.strip()
        return found


class CancelGuard:
    """Notices a cancellation of the present task that somebody below has swallowed.

    `asyncio.wait_for` before Python 3.12, which the client uses, swallows one that meets the end of what it waits for:
    a task that tries again and again would then never end.
    """

    def __init__(self) -> None:
        self._before = self._count()

    @staticmethod
    def _count() -> int:
        task = asyncio.current_task()
        return 0 if task is None else task.cancelling()

    def check(self) -> None:
        """Raise `CancelledError` where the task was cancelled since the guard was made."""
        if self._count() > self._before:
            raise asyncio.CancelledError


class Link:
    """One connection's life: what is sent on it, and the requests that await their answers on it."""

    def __init__(self, client: Client, inbox: str) -> None:
        self.client = client
        self.lost = asyncio.Event()
        self.on_lost: set[Callable[[], None]] = set()
        self._inbox = inbox
        self._waiting: dict[str, asyncio.Future[Msg]] = {}
        self._gathering: dict[str, list[Msg]] = {}
        self._counter = 0

    @property
    def connected(self) -> bool:
        """Whether it stands, as far as the client knows."""
        return self.client.is_connected and not self.lost.is_set()

    async def start(self) -> None:
        """Listen for answers: one subscription for all of them."""
        await self.client.subscribe(f"{self._inbox}.r.*", cb=self._on_answer)

    def new_inbox(self) -> str:
        """Give a subject of our own that nobody else can guess."""
        self._counter += 1
        return f"{self._inbox}.w.{self._counter}"

    async def sync(self, timeout_s: float = limits.ENGINE_CONNECT_TIMEOUT_S) -> None:
        """Return when the server has taken all we sent before: a message to ourselves has come back."""
        await self.call(None, b"", None, timeout_s=timeout_s)

    async def send(self, subject: str, data: bytes, headers: Mapping[str, str] | None, reply: str = "") -> None:
        """Send a message.

        Raises:
            EngineUnavailable: not connected, or too much waits to be sent.
        """
        if not self.connected:
            raise errors.EngineUnavailable("engine unavailable")
        if self.client.pending_data_size > limits.ENGINE_OUT_BYTES_MAX:
            raise errors.EngineUnavailable("the engine does not take what we send")
        try:
            await self.client.publish(subject, data, reply, dict(headers) if headers else None)
        except nats.errors.MaxPayloadError as error:
            raise errors.ConfigError(f"the engine takes at most {self.client.max_payload} bytes") from error
        except FAILURES as error:
            raise errors.EngineUnavailable(f"engine unavailable: {error}") from error

    async def call(
        self,
        subject: str | None,
        data: bytes,
        headers: Mapping[str, str] | None,
        *,
        timeout_s: float,
        into: list[Msg] | None = None,
    ) -> Msg:
        """Send a request and give the first answer, as the client has it; without a subject, to ourselves.

        With `into`, answers without a status are gathered there, and the first with one is given.

        Raises:
            EngineUnavailable: not connected, or lost while waiting.
            NoResponders: nobody listens.
            EngineTimeout: no answer in time.
        """
        if len(self._waiting) >= limits.ENGINE_REQUESTS_MAX:
            raise errors.EngineUnavailable("too many requests await their answers")
        self._counter += 1
        token = str(self._counter)
        inbox = f"{self._inbox}.r.{token}"
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Msg] = loop.create_future()
        # A timer and not asyncio.timeout: the client swallows a cancellation that meets it while it flushes.
        timer = loop.call_later(timeout_s, _expire, answer, subject or "our inbox", timeout_s)
        self._waiting[token] = answer
        if into is not None:
            self._gathering[token] = into
        try:
            await self.send(subject or inbox, data, headers, inbox if subject else "")
            message = await answer
        finally:
            timer.cancel()
            self._waiting.pop(token, None)
            self._gathering.pop(token, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen, also where sending failed first
        if not message.data and message.headers and message.headers.get("Status") == _NO_RESPONDERS:
            raise errors.NoResponders(f"nobody listens on {subject}")
        return message

    async def gather(self, subject: str, data: bytes, *, timeout_s: float) -> list[Msg]:
        """Send a request and give all its answers; the last is the one that ends them, by a status.

        Raises:
            EngineUnavailable: not connected, lost while waiting, or nobody answers such requests.
            EngineTimeout: not all came in time.
        """
        gathered: list[Msg] = []
        try:
            gathered.append(await self.call(subject, data, None, timeout_s=timeout_s, into=gathered))
        except errors.NoResponders as error:
            raise errors.EngineUnavailable(f"engine has nobody who answers {subject}") from error
        return gathered

    async def _on_answer(self, message: Msg) -> None:
        token = message.subject.rpartition(".")[2]
        answer = self._waiting.get(token)
        if answer is None or answer.done():
            return
        gathered = self._gathering.get(token)
        if gathered is None or (message.headers and "Status" in message.headers):
            answer.set_result(message)
        else:
            gathered.append(message)

    def fail(self) -> None:
        """Mark it lost: requests in flight fail now, watches begin anew."""
        self.lost.set()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(errors.EngineUnavailable("engine lost while waiting", maybe_delivered=True))
        for tell in list(self.on_lost):
            tell()


def _expire(answer: "asyncio.Future[Msg]", subject: str, timeout_s: float) -> None:
    if not answer.done():
        answer.set_exception(errors.EngineTimeout(f"no answer on {subject} within {timeout_s:g} s"))


async def shut(client: Client) -> None:
    """Close a client whatever state it is in: it neither hangs nor keeps its socket."""
    try:
        async with asyncio.timeout(limits.ENGINE_OUT_WAIT_S):
            await client.close()
    except FAILURES as error:
        _log.debug("closing the engine's connection: %r", error)
    # Where closing failed half-way the client leaves its socket open and its subscriptions waiting, with no public way
    # to end them.
    for subscription in client._subs.values():
        task: asyncio.Task[None] | None = getattr(subscription, "_wait_for_msgs_task", None)
        if task is not None:
            task.cancel()
    transport = client._transport
    if transport:
        transport.close()  # type: ignore[no-untyped-call]
