"""Clients of a gateway or of a peer, in a process: `python -m stormline.bench.gateway_crowd WHAT CARRIER PORT FIRST`.

`WHAT` is `ours` (sessions), `task` (the same, with echoes that take a task there), `ws` (echoes of `websockets`) or
`mqtt`. Each line on its standard input is done and answered with a line: `stand N` opens N connections that stay;
`connect N` opens N, some at once, and drops each once it is greeted; `echo N` sends N messages of 128 bytes and waits
for each to come back; `publish N` (mqtt) sends N messages to all who stand here.
"""

import asyncio
import contextlib
import ssl
import sys
from typing import Any, Final, cast

import uvloop
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import OPEN
from websockets.uri import parse_uri

from stormline.bench.gateway_host import APP, BODY, KEY, KID
from stormline.net.clock import SystemClock
from stormline.wire import events as e
from stormline.wire import messages as m
from stormline.wire import tokens, websocket
from stormline.wire.connection import Connection
from stormline.wire.states import Role

AT_ONCE: Final = 20
"""Connections opened at the same time."""
ECHOING: Final = 20
"""Connections that echo at the same time."""


class Client(asyncio.Protocol):
    """One connection: the carrier here, what is spoken in the classes below."""

    transport: asyncio.Transport

    def __init__(self, number: int, carrier: str) -> None:
        self.number = number
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.left = 0
        self.done: asyncio.Future[None] | None = None
        self.ws: ClientProtocol | None = None
        if carrier in ("ws", "wss"):
            asked = cast("Any", [websocket.SUBPROTOCOL]) if isinstance(self, Session) else None
            self.ws = ClientProtocol(parse_uri(f"ws://bench{websocket.PATH}"), subprotocols=asked)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = cast("asyncio.Transport", transport)
        if self.ws is None:
            self.greet()
        else:
            self.ws.send_request(self.ws.connect())
            self.transport.write(b"".join(self.ws.data_to_send()))

    def data_received(self, data: bytes) -> None:
        """Hand on what the carrier carries."""
        if self.ws is None:
            self.take(data)
            return
        opening = self.ws.state is not OPEN
        self.ws.receive_data(data)
        if opening and self.ws.state is OPEN:
            self.greet()
        for event in self.ws.events_received():
            if isinstance(event, Frame) and event.opcode is Opcode.BINARY:
                self.take(bytes(event.data))

    def send(self, data: bytes) -> None:
        """Send through the carrier."""
        if self.ws is not None:
            self.ws.send_binary(data)
            data = b"".join(self.ws.data_to_send())
        self.transport.write(data)

    def greeted(self) -> None:
        """Say that it stands."""
        if not self.ready.done():
            self.ready.set_result(None)

    async def echo(self, times: int) -> None:
        """Send so many messages, each when the one before has come back."""
        self.left, self.done = times, asyncio.get_running_loop().create_future()
        self.ask()
        await self.done

    def came_back(self) -> None:
        """Count one, send the next."""
        self.left -= 1
        if self.left > 0:
            self.ask()
        elif self.done is not None and not self.done.done():
            self.done.set_result(None)

    def greet(self) -> None:
        """Introduce itself."""
        raise TypeError("a client speaks something")

    def take(self, data: bytes) -> None:
        """Read what came."""
        raise TypeError("a client speaks something")

    def ask(self) -> None:
        """Send one message that comes back."""
        raise TypeError("a client speaks something")


class Session(Client):
    """Speaks our wire."""

    gate = "echo"

    def greet(self) -> None:
        """Say HELLO."""
        self.machine = Connection(Role.CLIENT, 0.0)
        now = int(SystemClock().wall())
        token = tokens.DeviceToken(app=APP, device=f"d{self.number}", iat=now, exp=now + 3600)
        self.machine.send_hello(m.Hello(versions=(1,), app=APP, token=tokens.mint(token, key=KEY, kid=KID)))
        self.send(self.machine.data_to_send())

    def take(self, data: bytes) -> None:
        """Acknowledge pushes, count answers."""
        self.machine.receive_data(data, 0.0)
        while (event := self.machine.next_event()) is not None:
            if isinstance(event, e.PushReceived):
                self.machine.send_ack(event.seq)
            elif isinstance(event, e.Welcomed):
                self.greeted()
            elif isinstance(event, e.ReplyReceived):
                self.came_back()
        if out := self.machine.data_to_send():
            self.send(out)

    def ask(self) -> None:
        """Call the gate."""
        self.machine.send_call(self.gate, "echo", body=BODY)
        self.send(self.machine.data_to_send())


class Tasked(Session):
    """Calls a gate whose answers take a task."""

    gate = "task"


class Echo(Client):
    """Speaks nothing but the carrier."""

    def greet(self) -> None:
        """It stands."""
        self.greeted()

    def take(self, data: bytes) -> None:
        """Count it."""
        self.came_back()

    def ask(self) -> None:
        """Send one message."""
        self.send(BODY)


class Mqtt(Client):
    """Speaks MQTT 3.1.1 with quality of service 1: what is published is acknowledged."""

    def __init__(self, number: int, carrier: str) -> None:
        super().__init__(number, carrier)
        self.buffer = bytearray()

    def greet(self) -> None:
        """CONNECT and SUBSCRIBE."""
        name = f"c{self.number}".encode()
        connect = b"\x00\x04MQTT\x04\x02\x00\x00" + len(name).to_bytes(2, "big") + name
        subscribe = b"\x00\x01\x00\x01t\x01"
        self.send(bytes((0x10, len(connect))) + connect + bytes((0x82, len(subscribe))) + subscribe)

    def take(self, data: bytes) -> None:
        """Acknowledge what is published, count what was acknowledged."""
        self.buffer += data
        while len(self.buffer) >= 2:
            size, at = self.buffer[1] & 0x7F, 2
            if self.buffer[1] & 0x80:  # these packets are below 16 KiB
                if len(self.buffer) < 3:
                    return
                size, at = size | self.buffer[2] << 7, 3
            if len(self.buffer) < at + size:
                return
            kind, packet = self.buffer[0] >> 4, bytes(self.buffer[at : at + size])
            del self.buffer[: at + size]
            if kind == 9:
                self.greeted()
            elif kind == 3:
                topic = int.from_bytes(packet[:2], "big")
                self.send(b"\x40\x02" + packet[2 + topic : 4 + topic])
                CROWD.delivered()
            elif kind == 4:
                self.came_back()

    def ask(self) -> None:
        """PUBLISH one message."""
        packet = b"\x00\x01t" + (self.left & 0x7FFF or 1).to_bytes(2, "big") + BODY
        self.send(bytes((0x32, len(packet) & 0x7F | 0x80, len(packet) >> 7)) + packet)


class Crowd:
    """All clients of the process."""

    def __init__(self) -> None:
        self.standing: list[Client] = []
        self._awaited = 0
        self._all = asyncio.Event()

    def delivered(self) -> None:
        """Count a delivery."""
        self._awaited -= 1
        if self._awaited == 0:
            self._all.set()

    async def do(self, what: str, times: int, opened: Any) -> None:
        """Do what a line says."""
        match what:
            case "stand":
                first = len(self.standing)
                for begin in range(first, first + times, AT_ONCE):
                    numbers = range(begin, min(begin + AT_ONCE, first + times))
                    self.standing += await asyncio.gather(*map(opened, numbers))
            case "connect":
                for begin in range(0, times, AT_ONCE):
                    for each in await asyncio.gather(*map(opened, range(begin, begin + AT_ONCE))):
                        each.transport.abort()
            case "echo":
                await asyncio.gather(*(each.echo(times // ECHOING) for each in self.standing[:ECHOING]))
            case "publish":
                self._all.clear()
                self._awaited = times * len(self.standing)
                await self.standing[0].echo(times)
                await self._all.wait()


CROWD = cast("Crowd", None)
_KINDS: Final[dict[str, type[Client]]] = {"ours": Session, "task": Tasked, "ws": Echo, "mqtt": Mqtt}


async def _run(what: str, carrier: str, port: int, first: int) -> None:
    global CROWD
    CROWD = Crowd()
    loop = asyncio.get_running_loop()
    context = None
    if carrier in ("tls", "wss"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the bench measures the server
        ours = carrier == "tls" and issubclass(_KINDS[what], Session)
        context.set_alpn_protocols([m.ALPN if ours else websocket.ALPN])

    async def opened(number: int) -> Client:
        client = _KINDS[what](first + number, carrier)
        await loop.create_connection(lambda: client, "127.0.0.1", port, ssl=context)
        await client.ready
        return client

    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked, times = line.split()
        await CROWD.do(asked, int(times), opened)
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_run(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
