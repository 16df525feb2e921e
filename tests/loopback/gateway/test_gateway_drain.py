"""A gateway that stops: its order, its bounds, and what each kind of client sees of it."""

import asyncio
import ssl
from typing import Any

import pytest
from websockets.client import ClientProtocol
from websockets.frames import CloseCode
from websockets.uri import parse_uri

from stormline.core import errors, limits_platform
from stormline.core.codes import Code
from stormline.engine.memory import MemoryEngine
from stormline.engine.port import Reply
from stormline.wire import events as e
from stormline.wire import messages as m
from stormline.wire import websocket
from stormline.wire.states import State

pytestmark = pytest.mark.loopback

NAME = "gateway.test"
DRAIN_S = 3.0
MARGIN_S = 3.0
"""Beyond the second that a gateway has after its drain: what a busy machine takes."""


class Work:
    """A service whose calls take as long as the test wants, and that counts them."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.done: list[bytes] = []

    async def serve(self, message: Any) -> Reply:
        self.done.append(message.data)
        await self.go.wait()
        return Reply(message.data)


@pytest.fixture(name="work")
async def _work(gateway):
    work = Work()
    await gateway.start(drain_s=DRAIN_S)
    engine = MemoryEngine(gateway.broker)
    await engine.serve("rpc.work.do", work.serve)
    yield work
    await engine.close()


async def _stopping(gateway, eventually) -> asyncio.Task[None]:
    stopping = asyncio.create_task(gateway.stop())

    async def draining() -> bool:
        return (await gateway.admin.get("/healthz")).json()["status"] == "draining"

    await eventually(draining)
    return stopping


async def test_order_is_said_to_drain_no_new_connections_goaway_with_a_spread_calls_to_their_end_close(
    gateway, work, eventually
):
    devices = [await gateway.connect(f"d{number}") for number in range(10)]
    asked = [(device, device.open("rpc", "work.do", body=str(at).encode())) for at, device in enumerate(devices)]
    await eventually(lambda: len(work.done) == 10)
    ungreeted = await gateway.open()
    stopping = await _stopping(gateway, eventually)
    assert (await gateway.admin.get("/healthz")).status_code == 503
    assert (await gateway.admin.get("/v1/load")).json()["status"] == "draining"
    with pytest.raises(OSError):  # noqa: PT011 - refused or reset, as the kernel likes
        await gateway.open()
    for device in devices:
        going = await device.next(e.GoingAway)
        assert going.code == Code.GOING_AWAY
        assert going.spread_s == pytest.approx(limits_platform.DRAIN_SPREAD_SHARE * DRAIN_S)
    ungreeted.machine.send_hello(m.Hello(versions=(1,), app="demo", token="any"))
    ungreeted.flush()
    refused = await ungreeted.wait_closed()
    assert (refused.code, refused.retry_after_s) == (Code.GOING_AWAY, limits_platform.LEAVING_RETRY_S)
    late = devices[0].machine
    assert late.state is State.DRAINING  # a new call cannot even be written
    gateway.stop_event.set()  # a second order changes nothing
    work.go.set()
    for device, call_id in asked:
        assert (await device.answer(call_id)).body == str(devices.index(device)).encode()
    for device in devices:
        await device.close()
    await stopping
    assert gateway.seconds_to_stop < DRAIN_S + 1.0 + MARGIN_S
    assert len(work.done) == 10


async def test_ends_when_all_have_left_and_does_not_wait_for_the_rest_of_its_time(gateway, eventually):
    await gateway.start(drain_s=60.0)
    devices = [await gateway.connect(f"d{number}") for number in range(3)]
    stopping = await _stopping(gateway, eventually)
    for device in devices:
        await device.next(e.GoingAway)
        await device.close()
    async with asyncio.timeout(20):
        await stopping


async def test_client_that_never_answers_and_call_that_never_ends_hold_it_no_longer_than_its_time(
    gateway, work, eventually
):
    deaf, busy = await gateway.connect("deaf"), await gateway.connect("busy")
    deaf.stop_reading()
    call_id = busy.open("rpc", "work.do", body=b"1")
    await eventually(lambda: len(work.done) == 1)
    await gateway.stop()
    assert DRAIN_S <= gateway.seconds_to_stop < DRAIN_S + 1.0 + MARGIN_S
    with pytest.raises(errors.RefusedError, match="going-away"):
        await busy.answer(call_id)


class Browser:
    """A WebSocket by a library of its own; it notes with which code it was closed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.ws = ClientProtocol(parse_uri(f"wss://{NAME}{websocket.PATH}"), subprotocols=[websocket.SUBPROTOCOL])

    def ask(self) -> None:
        self.ws.send_request(self.ws.connect())
        self.flush()

    def flush(self) -> None:
        self.writer.write(b"".join(self.ws.data_to_send()))

    async def read(self) -> bool:
        data = await self.reader.read(65536)
        if data:
            self.ws.receive_data(data)
        else:
            self.ws.receive_eof()
        self.flush()
        return bool(data)

    async def to_the_end(self) -> None:
        async with asyncio.timeout(20):
            while await self.read():
                pass


@pytest.fixture(name="browser")
async def _browser(gateway):
    made: list[Browser] = []

    async def open_() -> Browser:
        context = ssl.create_default_context(cadata=gateway.authority.pem)
        context.set_alpn_protocols([websocket.ALPN])
        reader, writer = await asyncio.open_connection(*gateway.address, ssl=context, server_hostname=NAME)
        made.append(Browser(reader, writer))
        return made[-1]

    yield open_
    for each in made:
        each.writer.transport.abort()


async def test_websockets_end_with_1012_and_late_ones_get_503_with_retry_after(gateway, browser, eventually):
    await gateway.start(drain_s=0.5)
    standing, chatting, late = await browser(), await browser(), await browser()
    for each in (standing, chatting):
        each.ask()
        while not each.ws.events_received():
            await each.read()
    stopping = asyncio.create_task(gateway.stop())
    with pytest.raises(OSError):  # noqa: PT011, PT012 - it takes nobody any more
        while True:
            await browser()
    late.ask()
    await late.to_the_end()
    answer = late.ws.handshake_exc
    assert answer is not None
    [response] = [event for event in late.ws.events_received() if hasattr(event, "status_code")]
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")

    async def chat() -> None:  # what crosses the close must not turn it into a reset
        while chatting.ws.state.name == "OPEN":
            chatting.ws.send_ping(b"are you there")
            chatting.flush()
            await asyncio.sleep(0.001)

    chat_task = asyncio.create_task(chat())
    await asyncio.gather(standing.to_the_end(), chatting.to_the_end(), chat_task)
    await stopping
    for each in (standing, chatting):
        assert each.ws.close_code == CloseCode.SERVICE_RESTART
