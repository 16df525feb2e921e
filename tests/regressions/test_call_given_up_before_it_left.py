"""A call that its caller was told had not left was made all the same, when the session went on elsewhere.

Its CALL stood among the frames that go again over the next connection, with the CANCEL behind it; a gateway that reads
the two apart has begun the work by then. A write whose caller had asked by other means meanwhile was done twice.
Found by simulation: `wires-cut`, seed 192, by the invariant that nobody processes what was called undelivered.
"""

import asyncio

import pytest

from stormline.client.greeting import greet
from stormline.client.link import Link
from stormline.core.errors import ChannelLost
from stormline.core.values import Address
from stormline.testing.pair import HELLO_RESUME
from stormline.testing.simloop import on_virtual_time
from stormline.wire import events as e
from stormline.wire import messages as m
from stormline.wire.connection import Connection
from stormline.wire.states import Role


class Gateway:
    """A gateway's session, over one connection after another."""

    def __init__(self):
        self.session = None
        self.calls = []

    def read(self, greeting, data):
        machine = greeting if self.session is None or not greeting.detached else self.session
        machine.receive_data(data, 0.0)
        while (event := machine.next_event()) is not None:
            if isinstance(event, e.HelloReceived):
                machine = self._welcome(machine, event.hello)
            elif isinstance(event, e.CallReceived):
                self.calls.append(event.call_id)
        return machine.data_to_send()

    def _welcome(self, greeting, hello):
        goes_on = self.session is not None
        greeting.send_welcome(
            m.Welcome(
                m.VERSION, "s1", "d1", resume="token", resume_window_s=60.0, resumed=goes_on,
                received=self.session.received if goes_on else 0, capabilities=(m.RESUME,),
            )
        )  # fmt: skip
        if goes_on:
            self.session.resume(greeting, hello.received, 0.0)
            greeting.detached = True  # used up
        else:
            self.session = greeting
        return self.session


class Wire:
    """A connection to it, whose kernel takes nothing more while it is `full`."""

    peer = Address("203.0.113.1", 443)
    local = Address("10.0.0.1", 1)
    alpn = m.ALPN
    has_unsent = False

    def __init__(self, gateway):
        self.gateway, self.machine = gateway, Connection(Role.SERVER, 0.0)
        self.sent_bytes, self.full, self.closed = 0, False, False
        self._moved = asyncio.Condition()
        self._inbox = b""

    async def send_all(self, data):
        async with self._moved:
            await self._moved.wait_for(lambda: not self.full or self.closed)
            if self.closed:
                raise ConnectionAbortedError
            self.sent_bytes += len(data)
            self._inbox += self.gateway.read(self.machine, bytes(data))
            self._moved.notify_all()

    async def receive(self, size_max=0):
        async with self._moved:
            await self._moved.wait_for(lambda: self._inbox or self.closed)
            if self.closed:
                raise ConnectionAbortedError
            data, self._inbox = self._inbox, b""
            return data

    async def drain(self):
        async with self._moved:
            self.full = False
            self._moved.notify_all()

    def close(self):
        self.closed = True


class Deaf:
    """Listens to nothing."""

    def __getattr__(self, name):
        return lambda *_: None


async def opened():
    gateway = Gateway()
    link = Link(Wire(gateway), Deaf())
    link.start(HELLO_RESUME)
    await asyncio.sleep(1)
    assert link.resumable
    return gateway, link


async def go_on(gateway, link):
    wire = Wire(gateway)
    hello = m.Hello(versions=(m.VERSION,), app="shop", resume="token", received=link.machine.received,
                    capabilities=(m.RESUME,))  # fmt: skip
    machine, welcome = await greet(wire, hello, heartbeat_s=30.0)
    link.attach(wire, machine, welcome)
    await asyncio.sleep(1)


@on_virtual_time
async def test_call_given_up_while_its_session_waits_is_never_made() -> None:
    gateway, link = await opened()
    link.stream.full = True
    asked, body = link.call("rpc", "orders.create"), link.call("rpc", "orders.create", more=True)
    link.machine.send_data(body.call_id, b"piece")
    await asyncio.sleep(1)
    gateway.session.detach()
    link.detach()
    waits, late = link.call("rpc", "orders.create"), link.call("rpc", "orders.create")
    for given_up in (asked, body, late):
        assert not given_up.maybe_delivered
        given_up.cancel()
    await go_on(gateway, link)
    assert gateway.calls == [waits.call_id]
    assert waits.maybe_delivered
    after = link.call("rpc", "orders.create")
    await asyncio.sleep(1)
    assert gateway.calls == [waits.call_id, after.call_id]
    await link.close()


@on_virtual_time
async def test_call_in_line_on_a_connection_that_stands_counts_as_delivered() -> None:
    gateway, link = await opened()
    link.stream.full = True
    call = link.call("rpc", "orders.create")
    await asyncio.sleep(1)
    assert call.maybe_delivered
    call.cancel()
    await link.stream.drain()
    await asyncio.sleep(1)
    assert gateway.calls == [call.call_id]
    await link.close()


@on_virtual_time
async def test_call_in_line_on_a_connection_that_ends_does_not_leave_with_the_farewell() -> None:
    gateway, link = await opened()
    call = link.call("rpc", "orders.create")
    link.end("nobody will carry it on")
    with pytest.raises(ChannelLost) as lost:
        await call.reply()
    assert not lost.value.maybe_delivered
    await link.close()
    assert gateway.calls == []
