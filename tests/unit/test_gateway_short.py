"""Channels of short HTTP on a VirtualLoop: flow, holding, repetition, and their end."""

import asyncio

import pytest

from stormline.core import errors, limits_carriers
from stormline.core.values import Address
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.gateway.short import Channels, Refused
from stormline.testing.simloop import SimRng, on_virtual_time
from stormline.wire import short

PEER = Address("192.0.2.1", 5)
BIG = bytes(limits_carriers.SHORT_DOWN_BYTES)


class Carrier:
    """What a channel carries; the test says what it sends."""

    def __init__(self):
        self.came = bytearray()
        self.paused = self.over = False
        self.session = None

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.came += data
        self.session = self

    def pause_writing(self):
        self.paused = True
        self.transport.pause_reading()

    def resume_writing(self):
        self.paused = False
        self.transport.resume_reading()

    def connection_lost(self, exc):
        self.over = True


class Node:
    """A node, and what asks it."""

    def __init__(self, name="n1", broker=None):
        self.carriers = []
        self.engine = MemoryEngine(broker or MemoryBroker())
        self.channels = Channels("u1", name, self._carrier, self.engine, SimRng(1, name), {})

    def _carrier(self):
        self.carriers.append(Carrier())
        return self.carriers[-1]

    async def ask(self, channel, *fields):
        answer = await self.channels.exchange(short.encode(short.Ask(channel, *fields)), PEER)
        return short.decode_tell(answer)

    async def open(self):
        return (await self.ask("")).channel, self.carriers[-1]

    async def end(self):
        self.channels.close()
        await asyncio.sleep(0)
        await self.engine.close()


async def refused(asking):
    with pytest.raises(Refused) as caught:
        await asking
    return caught.value.status


@on_virtual_time
async def test_sender_pauses_where_much_waits_and_goes_on_when_it_was_taken():
    node = Node()
    channel, carrier = await node.open()
    carrier.transport.write(BIG)
    assert carrier.paused
    tell = await node.ask(channel, 0, 0, b"up", 1000, 1000)
    assert carrier.paused
    assert (tell.received, len(tell.data), carrier.came) == (0, 1000, b"")  # what is not taken is not confirmed
    tell = await node.ask(channel, 1000, 0, b"up", 1000)
    assert not carrier.paused
    assert len(tell.data) == len(BIG) - 1000
    assert (await node.ask(channel, len(BIG), 0, b"up")).received == 2
    assert carrier.came == b"up"
    await node.end()


@on_virtual_time
async def test_held_question_is_answered_by_what_comes_or_by_time_or_by_a_newer_one():
    node, loop = Node(), asyncio.get_running_loop()
    channel, carrier = await node.open()
    began = loop.time()
    assert (await node.ask(channel, 0, 0, b"", 7000)).data == b""
    assert loop.time() - began == 7.0
    older = asyncio.create_task(node.ask(channel, 0, 0, b"", 7000))
    await asyncio.sleep(1)
    newer = asyncio.create_task(node.ask(channel, 0, 0, b"", 7000))
    await asyncio.sleep(1)
    assert older.done()
    assert not newer.done()
    carrier.transport.write(b"news")
    assert (await newer).data == b"news"
    assert (await older).data == b""
    assert (await node.ask(channel, 0, 0, b"", 7000)).data == b"news"  # the answer was lost
    assert loop.time() - began == 9.0
    await node.end()


@on_virtual_time
async def test_held_question_is_given_up_with_its_connection_and_nothing_is_lost():
    node = Node()
    channel, carrier = await node.open()
    held = asyncio.create_task(node.ask(channel, 0, 0, b"", 7000))
    await asyncio.sleep(1)
    held.cancel()
    await asyncio.wait([held])
    carrier.transport.write(b"news")
    assert (await node.ask(channel, 0, 0, b"", 7000)).data == b"news"
    await node.end()


@on_virtual_time
async def test_channel_lives_as_long_as_it_is_asked_for_and_its_last_bytes_a_little_longer():
    node = Node()
    channel, carrier = await node.open()
    for _ in range(5):
        await asyncio.sleep(limits_carriers.SHORT_GONE_S - 1)
        await node.ask(channel)
    carrier.transport.write(b"bye")
    carrier.transport.close()
    await asyncio.sleep(limits_carriers.SHORT_LINGER_S - 1)
    assert carrier.over
    tell = await node.ask(channel, 0, 0, b"", 9000)
    assert (tell.data, tell.ended) == (b"bye", True)
    assert (await node.ask(channel, 3, 0, b"x", 9000)).ended
    assert carrier.came == b""
    await asyncio.sleep(limits_carriers.SHORT_LINGER_S + 1)
    assert await refused(node.ask(channel)) == 410
    silent, carrier = await node.open()
    await asyncio.sleep(limits_carriers.SHORT_GONE_S + 1)
    assert carrier.over
    assert await refused(node.ask(silent)) == 410
    assert len(node.channels) == 0
    await node.end()


@on_virtual_time
async def test_exchange_is_passed_on_to_the_node_of_its_channel_and_not_to_one_that_is_gone():
    broker = MemoryBroker()
    one, two = Node("n1", broker), Node("n2", broker)
    await one.channels.start(one.engine)
    channel = (await two.ask("n1.")).channel
    assert short.node_of(channel) == "n1"
    [carrier] = one.carriers
    assert carrier.transport.get_extra_info("peername") == tuple(PEER)
    held = asyncio.create_task(two.ask(channel, 0, 0, b"up", 60_000))
    await asyncio.sleep(30)
    carrier.transport.write(b"down")
    assert (await held).data == b"down"
    assert carrier.came == b"up"
    assert await refused(two.ask("n1.0123")) == 410
    assert await refused(two.ask(channel, 99)) == 400
    assert await refused(one.ask("n2.0123")) == 410
    broker.cut()
    assert await refused(two.ask("n1.")) == 503
    await one.end()
    await two.end()


@on_virtual_time
async def test_exchanges_of_many_channels_are_held_on_behalf_of_another_node():
    broker = MemoryBroker()
    one, two = Node("n1", broker), Node("n2", broker)
    await one.channels.start(one.engine)
    channels = [(await two.ask("n1.")).channel for _ in range(400)]
    held = [asyncio.create_task(two.ask(channel, 0, 0, b"", 20_000)) for channel in channels]
    await asyncio.sleep(10)
    assert not any(task.done() for task in held)
    await asyncio.gather(*held)
    await one.end()
    await two.end()


@on_virtual_time
async def test_malformed_exchange_is_refused():
    node = Node()
    with pytest.raises(Refused):
        await node.channels.exchange(b"\x93abc", PEER)
    with pytest.raises(errors.RemoteProtocolError):
        short.decode_tell(short.encode(short.Tell("")))
    await node.end()
