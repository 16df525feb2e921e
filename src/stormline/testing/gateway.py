"""A gateway that plays what a test says: real TLS on 127.0.0.1, the real protocol machine, and a script per connection.

    async def dies(end: GatewayEnd) -> None:
        await end.welcome()
        await end.next(CallReceived)
        end.abort()

    async with scripted_gateway(tls, dies, answering()) as gateway:
        gateway.address                         # the first connection is dropped in the first call, later ones answer

Scripts are played in order, one per connection; the last is played for all that follow.
"""

import asyncio
import contextlib
import ssl
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeAlias

from stormline.core.codes import Code
from stormline.core.values import Address
from stormline.web.server import TlsFiles
from stormline.wire import events as e
from stormline.wire import messages as m
from stormline.wire.connection import Connection
from stormline.wire.states import Role

WAIT_S: Final = 15.0
"""How long a script waits for the client before its test fails."""


class GatewayEnd:
    """The server's side of one connection, in the hands of a script.

    Attributes:
        machine: what is allowed, and what the bytes mean.
        reader: bytes of the client.
        writer: bytes to the client.
        hello: how the client introduced itself.
        heard: every event so far, in order.
    """

    def __init__(self, gateway: "ScriptedGateway", reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._gateway = gateway
        self._waiting: deque[e.Event] = deque()
        self.machine = Connection(Role.SERVER, asyncio.get_running_loop().time())
        self.reader = reader
        self.writer = writer
        self.hello: m.Hello | None = None
        self.heard: list[e.Event] = []

    def flush(self) -> None:
        """Hand the transport what the machine has put out."""
        self.writer.write(self.machine.data_to_send())

    async def next(self, *kinds: type[e.Event]) -> Any:
        """Give the next event of these kinds (of any kind where none is named); what comes before it is passed over.

        Raises:
            TimeoutError: none came within `WAIT_S`.
            ConnectionResetError: the client went away.
        """
        async with asyncio.timeout(WAIT_S):
            while True:
                event = await self._event()
                if not kinds or isinstance(event, kinds):
                    return event
                if isinstance(event, e.Closed):
                    raise ConnectionResetError(f"the client closed: {event}")

    async def _event(self) -> e.Event:
        while (event := self.machine.next_event()) is None:
            self.flush()
            data = await self.reader.read(65536)
            now = asyncio.get_running_loop().time()
            if data:
                self.machine.receive_data(data, now)
            else:
                self.machine.receive_eof(now)
        self.flush()
        self.heard.append(event)
        if isinstance(event, e.CallReceived):
            self._gateway.calls[event.method] += 1
        return event

    async def read_hello(self) -> m.Hello:
        """Wait for the HELLO and give it; nothing is answered yet."""
        event: e.HelloReceived = await self.next(e.HelloReceived)
        self.hello = event.hello
        return event.hello

    async def welcome(self, **fields: Any) -> m.Hello:
        """Wait for the HELLO, welcome the client, give the HELLO."""
        hello = self.hello or await self.read_hello()
        given: dict[str, Any] = {"version": m.VERSION, "session": f"s{len(self._gateway.ends)}", "device": "d1"}
        self.machine.send_welcome(m.Welcome(**given | fields))
        self.flush()
        return hello

    async def refuse(self, code: Code, reason: str = "", *, retry_after_s: float | None = None) -> None:
        """Wait for the HELLO and answer it with CLOSE."""
        if self.hello is None:
            await self.read_hello()
        self.close(code, reason, retry_after_s=retry_after_s)

    def close(self, code: Code, reason: str = "", *, retry_after_s: float | None = None) -> None:
        """Say CLOSE."""
        self.machine.close(code, reason, retry_after_s=retry_after_s)
        self.flush()

    def reply(self, call: e.CallReceived, body: bytes = b"", *, status: int = 200, headers: m.Headers = ()) -> None:
        """Answer a call with a body of at most one chunk."""
        self.machine.send_reply(call.call_id, status, headers=headers, body=body)
        self.flush()

    async def body(self, call: e.CallReceived) -> bytes:
        """Read the rest of a call's body, giving credit as it comes; no other call may be open meanwhile."""
        gathered = bytearray(call.body)
        self.machine.consume(call.call_id, len(call.body))
        ended = not call.more
        while not ended:
            event: e.DataReceived = await self.next(e.DataReceived)
            gathered += event.body
            ended = event.end
            self.machine.consume(call.call_id, len(event.body))
            self.flush()
        return bytes(gathered)

    async def send(self, call: e.CallReceived, body: bytes, *, status: int = 200, chunk_bytes: int = 16384) -> None:
        """Answer a call with a body of any size, as the client's credit allows."""
        self.machine.send_reply(call.call_id, status, more=True)
        at = 0
        while at < len(body):
            while (credit := self.machine.credit(call.call_id)) == 0:
                self.flush()
                await self.next(e.CreditGranted)
            piece = body[at : at + min(credit, chunk_bytes)]
            self.machine.send_data(call.call_id, piece)
            at += len(piece)
            self.flush()
            await self.writer.drain()
        self.machine.send_data(call.call_id, b"", end=True)
        self.flush()

    async def stay(self) -> None:
        """Go on reading, so that PINGs are answered, until the client goes away; give what it said last."""
        with contextlib.suppress(ConnectionError):
            while not isinstance(await self._event(), e.Closed):
                pass

    def abort(self) -> None:
        """Drop the connection without a word."""
        self.writer.transport.abort()


Script: TypeAlias = Callable[[GatewayEnd], Awaitable[None]]
Handler: TypeAlias = Callable[[GatewayEnd, e.CallReceived], Awaitable[None]]


class ScriptedGateway:
    """Where it listens and what came to it. Made by `scripted_gateway`.

    Attributes:
        address: where it listens.
        ends: every connection so far.
        calls: how many CALLs of each method were read from the wire, on all connections together.
        faults: what went wrong in the scripts themselves.
    """

    def __init__(self, scripts: tuple[Script, ...]) -> None:
        self._scripts = scripts
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = Address("", 0)
        self.ends: list[GatewayEnd] = []
        self.calls: Counter[str] = Counter()
        self.faults: list[BaseException] = []

    @property
    def open(self) -> int:
        """Connections whose script still runs."""
        return len(self._tasks)

    async def listen(self, context: ssl.SSLContext) -> None:
        """Begin to take connections."""
        self._server = await asyncio.start_server(self.connected, "127.0.0.1", 0, ssl=context)
        self.address = Address(*self._server.sockets[0].getsockname()[:2])

    async def stop(self) -> None:
        """Take no more connections, and drop those that are open."""
        if self._server is not None:
            self._server.close()
        await self._end()
        if self._server is not None:
            await self._server.wait_closed()

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Begin a connection's script."""
        end = GatewayEnd(self, reader, writer)
        script = self._scripts[min(len(self.ends), len(self._scripts) - 1)]
        self.ends.append(end)
        task = asyncio.ensure_future(self._play(script, end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _play(self, script: Script, end: GatewayEnd) -> None:
        try:
            await script(end)
        except (ConnectionError, ssl.SSLError):
            pass  # the client went away, as it may
        except Exception as error:
            self.faults.append(error)
        finally:
            with contextlib.suppress(OSError, RuntimeError):
                end.flush()
            end.writer.close()

    async def _end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        for connection in self.ends:
            connection.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def scripted_gateway(tls: TlsFiles, *scripts: Script) -> AsyncIterator[ScriptedGateway]:
    """Listen on a free port of 127.0.0.1 for as long as the context lasts.

    Raises:
        BaseExceptionGroup: at the end, what went wrong in the scripts themselves.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(tls.certificate, tls.key)
    context.set_alpn_protocols([m.ALPN])
    gateway = ScriptedGateway(scripts)
    await gateway.listen(context)
    try:
        yield gateway
    finally:
        await gateway.stop()
    if gateway.faults:
        raise BaseExceptionGroup("a script of the gateway failed", gateway.faults)


def answering(handler: Handler | None = None, **welcome: Any) -> Script:
    """Give a script that welcomes the client and hands each call to `handler`, one task per call.

    Without a handler every call is answered with status 200, its own method as a header `method`, and its own body.
    """
    handle = handler if handler is not None else _echo

    async def script(end: GatewayEnd) -> None:
        await end.welcome(**welcome)
        async with asyncio.TaskGroup() as tasks:
            with contextlib.suppress(ConnectionError):
                while not isinstance(event := await end._event(), e.Closed):
                    if isinstance(event, e.CallReceived):
                        tasks.create_task(_quietly(handle(end, event)))

    return script


async def _quietly(handling: Awaitable[None]) -> None:
    with contextlib.suppress(ConnectionError):
        await handling


async def _echo(end: GatewayEnd, call: e.CallReceived) -> None:
    end.reply(call, call.body, headers=(("method", call.method),))
