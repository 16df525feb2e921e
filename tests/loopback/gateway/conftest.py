"""A real gateway on uvloop with real TLS, devices that speak the wire, and upstreams that do what a test says."""

import asyncio
import contextlib
import datetime
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import nats.errors
import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID
from nats.aio.client import Client
from nats.aio.msg import Msg

from stormline.core import errors
from stormline.core.errors import CallError, RemoteProtocolError
from stormline.core.values import Address, Secret
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.engine.nats import EngineConfig, connect
from stormline.engine.port import Engine, Message, Reply
from stormline.engine.server import start_server
from stormline.gateway import server
from stormline.gateway.config import GatewayConfig
from stormline.net.clock import SystemClock, SystemRng
from stormline.web.server import HttpServer, TlsFiles
from stormline.wire import events as e
from stormline.wire import jws, tokens
from stormline.wire import messages as m
from stormline.wire.connection import Connection
from stormline.wire.states import Role, State

NAME = "gateway.test"
APP = "demo"
ADMIN_KEY = "a-business-key-0123456789"
NOWHERE = EngineConfig(url="nats://127.0.0.1:1", user="nobody", password=Secret("nothing"))
KEY = Ed25519PrivateKey.generate()


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], Any]]:
    """Run on uvloop: the gateway refuses anything else."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(name="warm_loop")
async def _warm_loop() -> None:
    """Listen once: libuv opens one descriptor for as long as its loop lives, to refuse with when others run out."""
    (await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)).close()


@pytest.fixture
async def leak_guard_async(warm_loop: None, leak_guard_async: None) -> None:
    """Guard a loop that has listened before."""


def token(device: str, *, app: str = APP, user: str = "", age_s: float = 0.0, key: Ed25519PrivateKey = KEY) -> str:
    """Mint a device token that lives ten minutes."""
    iat = int(SystemClock().wall() - age_s)
    return tokens.mint(tokens.DeviceToken(app=app, device=device, user=user, iat=iat, exp=iat + 600), key=key, kid="k1")


class Authority(NamedTuple):
    """A certificate for gateway.test that is its own authority."""

    files: TlsFiles
    pem: str


@pytest.fixture(scope="session", name="authority")
def _authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2049, 1, 1, tzinfo=datetime.UTC))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    files = TlsFiles(folder / "certificate.pem", folder / "key.pem")
    files.certificate.write_bytes(certificate.public_bytes(pem))
    files.key.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return Authority(files, files.certificate.read_text())


@dataclass
class Answer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes


class Device:
    """A client that speaks the wire over TLS.

    Attributes:
        machine: its side of the connection.
        events: what happened that belongs to no call of `call`.
        welcome: the gateway's yes.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.machine = Connection(Role.CLIENT, self.now())
        self.events: asyncio.Queue[e.Event] = asyncio.Queue()
        self.calls: dict[int, asyncio.Queue[e.Event]] = {}
        self.welcome: m.Welcome | None = None
        self.ack = True
        self.broken: RemoteProtocolError | None = None
        self._credit = asyncio.Event()
        self._reading = asyncio.Event()
        self._reading.set()
        self._task = asyncio.create_task(self._read())

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    def flush(self) -> None:
        self.writer.write(self.machine.data_to_send())

    def stop_reading(self) -> None:
        self._reading.clear()

    def go_on_reading(self) -> None:
        self._reading.set()

    async def _read(self) -> None:
        while True:
            await self._reading.wait()
            try:
                data = await self.reader.read(65536)
            except OSError:
                data = b""
            if data:
                self.machine.receive_data(data, self.now())
            else:
                self.machine.receive_eof(self.now())
            try:
                while (event := self.machine.next_event()) is not None:
                    self._take(event)
            except RemoteProtocolError as error:
                self.broken = error
                self.events.put_nowait(e.Closed(error.code, str(error)))
            with contextlib.suppress(OSError):
                self.flush()
            if not data:
                return

    def _take(self, event: e.Event) -> None:
        call_id = getattr(event, "call_id", None)
        if isinstance(event, e.PushReceived) and self.ack:
            self.machine.send_ack(event.seq)
        if isinstance(event, e.CreditGranted):
            self._credit.set()
        elif call_id in self.calls:
            self.calls[call_id].put_nowait(event)
        else:
            self.events.put_nowait(event)
        if isinstance(event, e.Closed):
            for queue in self.calls.values():
                queue.put_nowait(event)

    async def hello(self, **fields: Any) -> m.Welcome:
        """Greet and wait for the welcome; the end of the connection raises RefusedError."""
        self.machine.send_hello(m.Hello(versions=(1,), client="test", **fields))
        self.flush()
        event = await self.next(e.Welcomed, e.Closed)
        if isinstance(event, e.Closed):
            raise errors.RefusedError(event.code, event.reason)
        assert isinstance(event, e.Welcomed)
        self.welcome = event.welcome
        return event.welcome

    async def next(self, *kinds: type[e.Event], wait_s: float = 10.0) -> Any:
        """Give the next event of one of these kinds; others are dropped."""
        async with asyncio.timeout(wait_s):
            while not isinstance(event := await self.events.get(), kinds):
                pass
            return event

    def open(self, gate: str, method: str, **fields: Any) -> int:
        """Send a call and give its id."""
        call_id = self.machine.send_call(gate, method, **fields)
        self.calls[call_id] = asyncio.Queue()
        self.flush()
        return call_id

    async def upload(self, call_id: int, chunks: Iterable[bytes]) -> None:
        """Send a body as credit allows."""
        for chunk in chunks:
            while self.machine.credit(call_id) < len(chunk):
                self._credit.clear()
                await self._credit.wait()
            self.machine.send_data(call_id, chunk)
            self.flush()
            await self.writer.drain()
        self.machine.send_data(call_id, b"", end=True)
        self.flush()

    async def answer(self, call_id: int) -> Answer:
        """Gather an answer. Raises CallError where the call failed, also after a part of its body."""
        queue, status, headers, body = self.calls[call_id], 0, {}, bytearray()
        try:
            while True:
                async with asyncio.timeout(20):
                    event = await queue.get()
                match event:
                    case e.ReplyReceived():
                        status, headers = event.status, dict(event.headers)
                        body += event.body
                        self.machine.consume(call_id, len(event.body))
                        if not event.more:
                            return Answer(status, headers, bytes(body))
                    case e.DataReceived():
                        body += event.body
                        self.machine.consume(call_id, len(event.body))
                        if event.end:
                            return Answer(status, headers, bytes(body))
                    case e.CallFailed():
                        error = CallError(
                            event.code,
                            event.reason,
                            retry_after_s=event.retry_after_s,
                            maybe_delivered=event.maybe_delivered,
                        )
                        error.add_note(f"after status {status} and {len(body)} bytes")
                        raise error
                    case e.Closed():
                        raise errors.RefusedError(event.code, event.reason)
                self.flush()
        finally:
            del self.calls[call_id]

    async def call(self, gate: str, method: str, **fields: Any) -> Answer:
        """Call and gather the answer."""
        return await self.answer(self.open(gate, method, **fields))

    async def get(self, url: str, **fields: Any) -> Answer:
        """Call the gate `api`."""
        return await self.call("api", "GET", target=url, **fields)

    async def wait_closed(self) -> e.Closed:
        """Wait for the end of the connection."""
        closed: e.Closed = await self.next(e.Closed)
        return closed

    async def close(self) -> None:
        """Leave as a client that ends in order."""
        if self.machine.state is not State.CLOSED:
            self.machine.close()
            with contextlib.suppress(OSError):
                self.flush()
        self._task.cancel()
        await asyncio.wait([self._task])
        self.writer.transport.abort()

    def vanish(self) -> None:
        """Leave without a word."""
        self._task.cancel()
        self.writer.transport.abort()


class Gateway:
    """A running gateway, and devices on it.

    Attributes:
        address: where devices connect.
        admin: client of the business API.
        broker: the memory engine behind it; unused where another was given.
        seconds_to_stop: how long it took to end.
    """

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self.config = GatewayConfig(
            tls=authority.files,
            apps={APP: {"k1": jws.SigningKey(KEY, "k1").public_text}},
            engine=NOWHERE,
            admin_key=Secret(ADMIN_KEY),
        )
        self.broker = MemoryBroker()
        self.address = Address("", 0)
        self.admin = httpx2.AsyncClient()
        self.devices: list[Device] = []
        self.stop_event = asyncio.Event()
        self.seconds_to_stop = 0.0
        self._task: asyncio.Task[None] | None = None

    async def start(self, connect: Callable[[], Awaitable[Engine]] | None = None, **changes: Any) -> None:
        self.config = replace(self.config, **changes)
        up: asyncio.Future[tuple[Address, Address]] = asyncio.get_running_loop().create_future()

        async def memory() -> Engine:
            return MemoryEngine(self.broker)

        self._task = asyncio.create_task(
            server.run(
                self.config,
                clock=SystemClock(),
                rng=SystemRng(),
                started=lambda gateway, admin: up.set_result((gateway, admin)),
                stop=self.stop_event,
                connect=connect or memory,
            )
        )
        await asyncio.wait([self._task, up], return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            await self._task
        self.address, admin = up.result()
        self.admin = httpx2.AsyncClient(
            base_url=f"http://{admin}", headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=20, trust_env=False
        )

    async def stop(self) -> None:
        """Stop it as a supervisor does."""
        if self._task is None:
            return
        loop = asyncio.get_running_loop()
        begin = loop.time()
        self.stop_event.set()
        await self._task
        self.seconds_to_stop = loop.time() - begin
        self._task = None

    async def open(self, alpn: str | None = m.ALPN) -> Device:
        """Connect without greeting."""
        context = ssl.create_default_context(cadata=self.authority.pem)
        if alpn is not None:
            context.set_alpn_protocols([alpn])
        reader, writer = await asyncio.open_connection(*self.address, ssl=context, server_hostname=NAME)
        device = Device(reader, writer)
        self.devices.append(device)
        return device

    async def connect(self, device: str = "d1", *, user: str = "") -> Device:
        """Connect and greet."""
        connected = await self.open()
        await connected.hello(app=APP, token=token(device, user=user))
        return connected

    async def sessions(self) -> int:
        """Ask the business API how many sessions there are."""
        count: int = (await self.admin.get("/v1/sessions")).json()["count"]
        return count


@pytest.fixture(name="gateway")
async def _gateway(authority: Authority) -> AsyncIterator[Gateway]:
    """Give a gateway that the test starts, and end it with all its devices."""
    gateway = Gateway(authority)
    yield gateway
    for device in gateway.devices:
        await device.close()
    await gateway.stop()
    await gateway.admin.aclose()


@pytest.fixture(name="mint")
def _mint() -> Callable[..., str]:
    """Give what mints device tokens."""
    return token


Application = Callable[
    [dict[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]
]


@pytest.fixture(name="upstream")
async def _upstream() -> AsyncIterator[Callable[[Application], Awaitable[str]]]:
    """Give what serves an ASGI application under uvicorn, and says its origin."""
    servers: list[HttpServer] = []

    async def serve(app: Application) -> str:
        served: Any = app
        http = HttpServer(served, host="127.0.0.1", port=0, what="upstream")
        await http.start()
        servers.append(http)
        return f"http://{http.address}"

    yield serve
    for http in servers:
        await http.stop()


@pytest.fixture(name="raw_upstream")
async def _raw_upstream() -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Give what serves a coroutine for each TCP connection, and says its origin."""
    servers: list[asyncio.AbstractServer] = []
    tasks: set[asyncio.Task[None]] = set()

    async def serve(handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> str:
        async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                with contextlib.suppress(OSError, EOFError):
                    await handler(reader, writer)
            finally:
                writer.transport.abort()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(run(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        one = await asyncio.start_server(connected, "127.0.0.1", 0)
        servers.append(one)
        return "http://{}:{}".format(*one.sockets[0].getsockname()[:2])

    yield serve
    for one in servers:
        one.close()
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


@pytest.fixture(name="eventually")
def _eventually() -> Callable[..., Awaitable[None]]:
    """Give what waits until an async or plain condition holds."""

    async def eventually(condition: Callable[[], Any], wait_s: float = 10.0) -> None:
        async with asyncio.timeout(wait_s):
            while True:
                value = condition()
                if await value if asyncio.iscoroutine(value) else value:
                    return
                await asyncio.sleep(0.01)

    return eventually


class MemoryBus:
    """The memory engine."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()

    async def connect(self) -> Engine:
        return MemoryEngine(self.broker)

    service = connect

    async def cut(self) -> None:
        self.broker.cut()

    async def heal(self) -> None:
        self.broker.heal(restarted=True)

    async def stop(self) -> None:
        pass


class NatsService:
    """A business system with the stock client, as any would be."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def serve(self, subject: str, handler: Callable[[Message], Awaitable[Reply]]) -> None:
        async def answer(message: Msg) -> None:
            reply = await handler(Message(message.subject, message.data, message.headers or {}))
            with contextlib.suppress(nats.errors.Error):  # the engine may have gone meanwhile
                await self._client.publish(message.reply, reply.data, headers=dict(reply.headers) or None)

        await self._client.subscribe(subject, cb=answer)
        await self._client.flush()

    async def close(self) -> None:
        await self._client.close()


class NatsBus:
    """A real nats-server. It keeps its port over a restart."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self._port = sock.getsockname()[1]

    async def start(self) -> None:
        self._server = await start_server(self._folder, rng=SystemRng(), port=self._port)

    @property
    def biz(self) -> EngineConfig:
        """How business services reach it."""
        return self._server.biz

    @property
    def core(self) -> EngineConfig:
        """How the platform reaches it."""
        return self._server.core

    async def connect(self) -> Engine:
        return await connect(self._server.core, rng=SystemRng(), wait_s=0)

    async def service(self) -> NatsService:
        client, biz = Client(), self._server.biz

        async def on_error(error: Exception) -> None:
            pass

        await client.connect(
            biz.url,
            user=biz.user,
            password=biz.password.reveal(),
            error_cb=on_error,
            reconnect_time_wait=0.05,
            max_reconnect_attempts=-1,
        )
        return NatsService(client)

    async def cut(self) -> None:
        await self._server.child.stop(0.0)

    heal = start

    async def stop(self) -> None:
        await self._server.stop()


@pytest.fixture(name="bus", params=["memory", "nats"])
async def _bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[MemoryBus | NatsBus]:
    """Give an engine that can be taken away and brought back."""
    bus: MemoryBus | NatsBus = MemoryBus()
    if request.param == "nats":
        bus = NatsBus(tmp_path / "engine")
        await bus.start()
    yield bus
    await bus.stop()


@pytest.fixture(name="service")
async def _service(bus: MemoryBus | NatsBus) -> AsyncIterator[Engine | NatsService]:
    """Give a business service's way to the engine."""
    engine = await bus.service()
    yield engine
    await engine.close()


@pytest.fixture(name="second")
async def _second(authority: Authority) -> AsyncIterator[Gateway]:
    """Give another node, for the test to start."""
    gateway = Gateway(authority)
    yield gateway
    for device in gateway.devices:
        await device.close()
    await gateway.stop()
    await gateway.admin.aclose()
