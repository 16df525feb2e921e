"""The client's end of short HTTP on a VirtualLoop, with a gateway that answers each exchange as a test says."""

import asyncio

import pytest

from stormline.core import errors, limits_carriers
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.outbound.short import Place, open_short
from stormline.testing.simloop import on_virtual_time
from stormline.wire import short

PLACE = Place("g.test", "g.test", 8443, (Address("192.0.2.1", 8443),), 10.0)
UP = limits_carriers.SHORT_UP_BYTES


class Body:
    """The body of an answer."""

    def __init__(self, data):
        self.pieces = [data[:7], data[7:], b""]

    async def read(self):
        return self.pieces.pop(0) if self.pieces else b""

    async def aclose(self):
        self.pieces.clear()


class Answer:
    """An answer of HTTP."""

    def __init__(self, data, status=200):
        self.status = status
        self.source = Body(data)


class Gateway:
    """Stands for the pool: holds one channel, and does with each exchange what `plan` says.

    Attributes:
        asks: every exchange that was begun.
        plan: what becomes of the next ones: `lost` before or `cut` after the gateway had it, `status`, `page`; then all
            are served.
    """

    def __init__(self, *plan):
        self.plan = list(plan)
        self.asks = []
        self.requests = []
        self.into, self.out = short.Incoming(), short.Outgoing()
        self.came = bytearray()
        self.ended = False
        self.news = asyncio.Event()

    def say(self, data):
        self.out.put(data)
        self.news.set()

    async def request(self, request, *, follower, **more):
        ask = short.decode_ask(request.body)
        self.asks.append(ask)
        self.requests.append(request)
        what = self.plan.pop(0) if self.plan and (not ask.wait_ms or self.plan[0] == "page") else ""
        if what == "lost":
            raise errors.ConnectError("no way", phase=Phase.CONNECT, maybe_delivered=False)
        follower.stage(Phase.SEND)
        if isinstance(what, int):
            return Answer(b"", what)
        if what == "page":
            return Answer(b"<html>log in</html>")
        tell = await self.serve(ask)
        if what == "cut":
            raise errors.ReadError("it hung up", phase=Phase.FIRST_BYTE, maybe_delivered=True)
        return Answer(short.encode(tell))

    async def serve(self, ask):
        self.out.confirm(ask.received)
        self.came += self.into.take(ask.begin, ask.data)
        data = b""
        if ask.wait_ms:
            while not (len(self.out) or self.ended):
                self.news.clear()
                await self.news.wait()
            data = self.out.take(ask.room)
        return short.Tell("n1.c", self.into.received, self.out.confirmed, data, ended=self.ended)


def ups(gateway):
    """Give the exchanges that brought something up."""
    return [ask for ask in gateway.asks if ask.data]


@on_virtual_time
async def test_bytes_go_up_and_come_down_once_whatever_breaks():
    gateway = Gateway("", "cut", "lost", "cut", "", "cut")
    stream = await open_short(gateway, PLACE)
    for piece in (b"one", b"two", b"three"):
        await stream.send_all(piece)
        await stream.send_all(b"")
        assert not stream.has_unsent
    assert gateway.came == b"onetwothree"
    gateway.say(b"answer")
    assert await stream.receive(3) == b"ans"
    assert await stream.receive() == b"wer"
    assert dict(gateway.requests[0].headers)[b"Host"] == b"g.test:8443"
    stream.close()
    await asyncio.sleep(0)
    with pytest.raises(ConnectionAbortedError):
        await stream.receive()
    with pytest.raises(ConnectionAbortedError):
        await stream.send_all(b"x")


@on_virtual_time
async def test_what_has_certainly_not_left_is_not_counted_as_sent():
    gateway = Gateway("", "lost", "lost")
    stream = await open_short(gateway, PLACE)
    await stream.send_all(b"call")
    await asyncio.sleep(0.1)
    assert len(ups(gateway)) == 2
    assert stream.sent_bytes == 0
    await stream.send_all(b"")
    assert stream.sent_bytes == 4
    gateway.plan = ["cut"]
    await stream.send_all(b"more")
    await asyncio.sleep(0.1)
    assert len(ups(gateway)) == 5
    assert stream.sent_bytes == 8
    stream.close()
    assert stream.sent_bytes == 8


@on_virtual_time
async def test_sender_waits_while_one_exchange_of_bytes_is_on_its_way_and_less_goes_after_failures():
    gateway = Gateway("", "cut", "cut")
    stream = await open_short(gateway, PLACE)
    data = bytes(range(256)) * 1000
    await stream.send_all(data)
    await stream.send_all(b"")
    assert gateway.came == data
    sizes = [len(ask.data) for ask in ups(gateway)]
    assert sizes[:3] == [UP, UP // 4, UP // 16]
    assert max(sizes) <= UP
    stream.close()


@on_virtual_time
async def test_what_nobody_reads_is_not_asked_for_without_end_and_room_grows():
    gateway = Gateway()
    stream = await open_short(gateway, PLACE)
    gateway.say(bytes(4_000_000))
    await asyncio.sleep(10)
    asked = len(gateway.asks)
    assert gateway.out.confirmed <= 2 * limits_carriers.SHORT_DOWN_BYTES
    rooms = [ask.room for ask in gateway.asks if ask.wait_ms]
    assert rooms[:3] == [limits_carriers.SHORT_DOWN_FIRST_BYTES << step for step in range(3)]
    await asyncio.sleep(100)
    assert len(gateway.asks) == asked
    size = 0
    while size < 4_000_000:
        size += len(await stream.receive())
    stream.close()


@pytest.mark.parametrize("plan", [[410], ["cut"] * limits_carriers.SHORT_TRIES_MAX, [502] * 9, ["page"] * 9])
def test_channel_that_is_gone_or_cannot_be_reached_is_a_lost_connection(plan):
    @on_virtual_time
    async def run():
        gateway = Gateway()
        stream = await open_short(gateway, PLACE)
        gateway.plan = plan
        await stream.send_all(b"x")
        with pytest.raises(ConnectionResetError):
            await stream.receive()
        with pytest.raises(BrokenPipeError):
            await stream.send_all(b"y")
        stream.close()

    run()


@on_virtual_time
async def test_end_of_the_channel_comes_behind_its_last_bytes():
    gateway = Gateway()
    stream = await open_short(gateway, PLACE)
    gateway.ended = True
    gateway.say(b"bye")
    assert await stream.receive() == b"bye"
    assert await stream.receive() == b""
    assert stream.is_readable()
    stream.close()


@on_virtual_time
async def test_gateway_that_confirms_what_was_never_sent_is_left():
    gateway = Gateway()
    stream = await open_short(gateway, PLACE)
    gateway.into.received = 5
    gateway.say(b"x")
    assert await stream.receive() == b"x"
    with pytest.raises(ConnectionResetError, match="confirmed"):
        await stream.receive()
    stream.close()


@pytest.mark.parametrize(
    ("plan", "asked"),
    [
        (["page"], 2),  # once more: what breaks off may be chance
        (["lost"], 1),
        ([404, 404], 2),
        (["cut", "cut"], 2),
    ],
)
def test_what_is_no_gateway_opens_no_channel(plan, asked):
    @on_virtual_time
    async def run():
        gateway = Gateway(*plan, *plan)
        with pytest.raises(OSError, match="no short HTTP"):
            await open_short(gateway, PLACE)
        assert len(gateway.asks) == asked

    run()


@on_virtual_time
async def test_channel_is_opened_where_the_session_is_or_anywhere_where_that_node_is_gone():
    gateway = Gateway("cut", "", 410)
    (await open_short(gateway, PLACE, home="n1")).close()
    elsewhere = await open_short(gateway, PLACE, home="n9")
    assert elsewhere.node == "n1"
    elsewhere.close()
    assert [ask.channel for ask in gateway.asks if not ask.wait_ms] == ["n1.", "n1.", "n9.", ""]
