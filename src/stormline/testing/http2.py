"""The other end of an HTTP/2 connection for tests: `h2` in the server's role, told what to do step by step."""

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

import h2.config
import h2.connection
import h2.events
import h2.settings
from h2.settings import SettingCodes

from stormline.outbound.http2 import Http2Connection
from stormline.outbound.http2_codec import encode
from stormline.outbound.messages import HttpRequest, HttpResponse

_T = TypeVar("_T", bound=h2.events.Event)
Fields = Iterable[tuple[bytes, bytes]]
Script = Callable[["Peer"], Awaitable[None]]


class Peer:
    """The server's end of one connection.

    Attributes:
        h2: sends; call `flush` after it.
        writer: for bytes that `h2` would not send.
        seen: every event, oldest first.
        bodies: what came of each stream's body.
        credits: give credit for what comes.
        gone: the client has closed.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        settings: Mapping[SettingCodes, int] | None = None,
    ) -> None:
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
        self.h2.local_settings = h2.settings.Settings(
            client=False, initial_values={SettingCodes.MAX_CONCURRENT_STREAMS: 100, **(settings or {})}
        )
        self.h2.initiate_connection()
        self.writer = writer
        self.seen: list[h2.events.Event] = []
        self.bodies: dict[int, bytes] = {}
        self.credits = True
        self.gone = False
        self._reader = reader
        self._moved = asyncio.Event()

    async def serve(self, script: Script | None) -> None:
        """Read until the client is gone, with `script` beside it."""
        if script is None:
            await self._pump()
            return
        pumping = asyncio.create_task(self._pump())
        try:
            await script(self)
            await pumping
        finally:
            pumping.cancel()
            await asyncio.wait([pumping])
            if not pumping.cancelled():
                pumping.exception()

    async def _pump(self) -> None:
        try:
            await self.flush()
            while data := await self._reader.read(65_536):
                for event in self.h2.receive_data(data):
                    self._take(event)
                self._moved.set()
                await self.flush()
        finally:
            self.gone = True
            self._moved.set()

    def _take(self, event: h2.events.Event) -> None:
        self.seen.append(event)
        if isinstance(event, h2.events.DataReceived):
            stream_id = event.stream_id or 0
            self.bodies[stream_id] = self.bodies.get(stream_id, b"") + (event.data or b"")
            if self.credits:
                self.h2.acknowledge_received_data(event.flow_controlled_length or 0, stream_id)

    async def flush(self) -> None:
        """Send what `h2` has to say."""
        self.writer.write(self.h2.data_to_send())
        await self.writer.drain()

    def all(self, kind: type[_T]) -> list[_T]:
        """Give the events of one kind so far."""
        return [event for event in self.seen if isinstance(event, kind)]

    async def wait(self, kind: type[_T], number: int = 1) -> _T:
        """Give the `number`-th event of a kind, when it has come.

        Raises:
            EOFError: the client went before.
        """
        while len(self.all(kind)) < number:
            if self.gone:
                raise EOFError
            self._moved.clear()
            await self._moved.wait()
        return self.all(kind)[number - 1]

    async def answer(
        self, stream_id: int | None, body: bytes = b"", fields: Fields = (), *, status: bytes = b"200"
    ) -> None:
        """Send a whole answer, as fast as the windows let it."""
        number = stream_id or 0
        self.h2.send_headers(number, [(b":status", status), *fields])
        for offset in range(0, len(body), 16_384):
            piece = body[offset : offset + 16_384]
            while self.h2.local_flow_control_window(number) < len(piece):
                await self.flush()
                self._moved.clear()
                if self.h2.local_flow_control_window(number) < len(piece):
                    await self._moved.wait()
            self.h2.send_data(number, piece)
        self.h2.end_stream(number)
        await self.flush()


async def send(
    connection: Http2Connection,
    method: str = "GET",
    path: bytes = b"/",
    *,
    body: bytes | AsyncIterable[bytes] | None = None,
    headers: Fields = (),
    deadline_s: float = 10.0,
    head_within_s: float | None = None,
    read_timeout_s: float | None = None,
    stages: list[str] | None = None,
    ended: list[bool] | None = None,
) -> HttpResponse:
    """Do one exchange on a connection; what `on_stage` and `done` are told is added to `stages` and `ended`."""
    now = asyncio.get_running_loop().time()
    message = HttpRequest(method, "https", "a.test", 443, path, tuple(headers), body)
    return await connection.exchange(
        encode(message),
        deadline_at=now + deadline_s,
        head_by=None if head_within_s is None else now + head_within_s,
        read_timeout_s=read_timeout_s,
        done=([] if ended is None else ended).append,
        on_stage=([] if stages is None else stages).append,
    )


async def read(response: HttpResponse) -> bytes:
    """Read a body to its end."""
    return b"".join([chunk async for chunk in response.aiter_raw()])
