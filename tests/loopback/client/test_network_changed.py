"""What an app may say of the network: it has changed. In real namespaces: tests/lab/test_lab_network_switch.py."""

import asyncio

import httpx2
import pytest

import stormline
from stormline.client.background import BACKGROUND
from stormline.client.outside import Outside
from stormline.core import limits
from stormline.core.values import Address
from stormline.testing.origin import plain
from stormline.testing.world import wait_until

pytestmark = pytest.mark.loopback


class Machine:
    """A machine that loses its addresses when it is told to."""

    def __init__(self):
        self.there = True
        self.outside = Outside(is_assigned=lambda host: self.there)

    def client(self, **settings):
        return stormline.AsyncClient(config=stormline.Config(**settings), outside=self.outside)


@pytest.fixture(name="machine")
def _machine():
    return Machine()


@pytest.fixture(name="slow")
async def _slow(origin):
    """An origin that answers `/slow` on its first connection only when it is told to."""
    go_on = asyncio.Event()

    async def answer(request, writer):
        writers.setdefault(writer, None)
        if request.target == "/slow" and next(iter(writers)) is writer:
            await go_on.wait()
        writer.write(plain())

    writers = {}
    there = await origin(answer)
    there.go_on = go_on
    return there


def open_connections(client):
    return client._storm.runtime()._pool.open_connections


async def test_connection_of_a_lost_address_is_closed_and_its_read_asked_again(machine, slow):
    async with machine.client() as client:
        asking = asyncio.ensure_future(client.get(slow.url("/slow")))
        await wait_until(lambda: slow.requests)
        machine.there = False
        client.network_changed()
        assert (await asking).text == "ok"
        assert slow.connections == slow.counts["GET"] == 2


async def test_write_on_a_lost_address_is_made_once_and_says_that_it_may_have_been(machine, slow):
    async with machine.client() as client:
        asking = asyncio.ensure_future(client.post(slow.url("/slow"), content=b"x"))
        await wait_until(lambda: slow.requests)
        machine.there = False
        client.network_changed()
        with pytest.raises(httpx2.ReadError) as caught:
            await asking
        assert caught.value.maybe_delivered is True
        assert slow.counts["POST"] == 1
        assert open_connections(client) == 0


async def test_idle_connections_are_not_used_again_and_those_in_use_go_on_where_the_address_stays(machine, slow):
    async with machine.client() as client:
        asking = asyncio.ensure_future(client.get(slow.url("/slow")))
        await wait_until(lambda: slow.requests)
        await client.get(slow.url())
        assert open_connections(client) == 2
        client.network_changed()
        assert open_connections(client) == 1
        slow.go_on.set()
        assert (await asking).text == "ok"
        assert slow.counts["GET"] == 2


async def test_long_connection_of_a_lost_address_comes_back_at_once(machine, world, monkeypatch):
    monkeypatch.setattr(limits, "RECONNECT_FIRST_S", 60.0)

    async def welcome(end):
        await end.welcome()
        await end.stay()

    here = await world(welcome)
    config = here.config()
    async with stormline.AsyncClient(config=config, outside=machine.outside) as client, client.channel() as channel:
        await channel.wait_connected()
        machine.there = False
        client.network_changed()
        await wait_until(lambda: len(here.gateway.ends) == 2)
        await wait_until(lambda: here.gateway.open == 1)


async def test_change_is_harmless_at_any_time(machine):
    transport = stormline.AsyncTransport(outside=machine.outside)
    transport.network_changed()
    async with machine.client() as client:
        client.network_changed()
        with pytest.raises(httpx2.ConnectError):
            await client.get(f"http://{Address('127.0.0.1', 1)}/")
        client.network_changed()
    client.network_changed()


async def test_synchronous_client_may_be_told_from_any_thread(slow):
    def work():
        with stormline.Client() as client:
            client.network_changed()
            first = client.get(slow.url()).text
            client.network_changed()
            return first, client.get(slow.url()).text

    assert await asyncio.to_thread(work) == ("ok", "ok")
    BACKGROUND.stop()
    assert slow.connections == 2  # an idle connection is no proof that the network is still there
