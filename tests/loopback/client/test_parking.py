"""Requests that wait for the network. With an interface that is taken down: tests/lab/test_lab_parking.py."""

import asyncio
import errno
import os

import httpx2
import pytest

import stormline
from stormline.client.outside import Outside
from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.net.local import has_route
from stormline.net.recorded import PushedNetwork
from stormline.net.stream import open_tcp
from stormline.policy.network import NetworkInfo
from stormline.testing.world import wait_until

pytestmark = pytest.mark.loopback
WAIT = {"stormline.wait_for_network": 30.0}


class Machine:
    """A machine whose network is there or not."""

    def __init__(self, code=errno.ENETUNREACH):
        self.code = code
        self.there = self.route = False
        self.tries = self.looks = 0
        self.outside = Outside(open_tcp=self._open, has_route=self._look)

    async def _open(self, address):
        self.tries += 1
        if not self.there:
            raise OSError(self.code, os.strerror(self.code))
        return await open_tcp(address)

    def _look(self):
        self.looks += 1
        return self.route

    def client(self, **settings):
        return stormline.AsyncClient(config=stormline.Config(**settings), outside=self.outside)


@pytest.fixture(name="machine")
def _machine():
    return Machine()


def parked(client):
    return client._storm.runtime().parking.parked


@pytest.mark.parametrize("code", [errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH])
async def test_request_without_a_way_out_waits_and_goes_when_the_network_is_back(origin, code):
    there, machine = await origin(), Machine(code)
    async with machine.client() as client:
        asking = asyncio.create_task(client.get(there.url(), extensions=WAIT))
        await wait_until(lambda: parked(client))
        tries = machine.tries
        await asyncio.sleep(0.05)
        assert machine.tries == tries  # no attempt is spent
        machine.there = True
        client.network_changed()
        answer = await asking
    assert answer.status_code == 200
    assert answer.extensions["stormline"].record.stages_ms["queued"] > 40


async def test_request_that_does_not_ask_to_wait_fails_at_once(origin, machine):
    there = await origin()
    async with machine.client() as client:
        with pytest.raises(errors.ConnectError) as caught:
            await client.get(there.url())
    assert not caught.value.maybe_delivered


async def test_once_it_is_known_nothing_is_tried_and_all_go_together(origin, machine):
    there = await origin()
    async with machine.client() as client:
        with pytest.raises(errors.ConnectError):
            await client.get(there.url())
        tries = machine.tries
        asking = [asyncio.create_task(client.post(there.url(), extensions=WAIT)) for _ in range(10)]
        await wait_until(lambda: parked(client) == 10)
        assert machine.tries == tries
        machine.there = True
        client.network_changed()
        assert {each.status_code for each in await asyncio.gather(*asking)} == {200}
    assert there.counts["POST"] == 10


async def test_look_finds_the_route_where_nobody_tells(origin, machine, monkeypatch):
    monkeypatch.setattr(limits, "PARK_LOOK_S", 0.02)
    there = await origin()
    async with machine.client() as client:
        asking = asyncio.create_task(client.get(there.url(), extensions=WAIT))
        await wait_until(lambda: machine.looks > 3)
        assert parked(client) == 1
        machine.there = machine.route = True
        assert (await asking).status_code == 200
        looks = machine.looks
        await asyncio.sleep(0.1)
        assert machine.looks == looks  # nobody waits: nobody looks


async def test_another_request_that_comes_through_lets_them_go(origin, machine):
    there = await origin()
    async with machine.client() as client:
        asking = asyncio.create_task(client.get(there.url("/parked"), extensions=WAIT))
        await wait_until(lambda: parked(client))
        machine.there = True
        assert (await client.get(there.url("/first"))).status_code == 200
        assert (await asking).status_code == 200


async def test_port_decides_where_there_is_one(origin, machine):
    there, port = await origin(), PushedNetwork(NetworkInfo(routed=False))
    machine.there = True
    async with machine.client(network_port=port) as client:
        asking = asyncio.create_task(client.get(there.url(), extensions=WAIT))
        await wait_until(lambda: parked(client))
        assert machine.tries == 0
        port.push({"airplane": True})
        await asyncio.sleep(0.02)
        assert parked(client) == 1
        port.push({"kind": "cell", "addresses": ["127.0.0.1"]})
        assert (await asking).status_code == 200
    assert machine.looks == 0


async def test_time_it_may_wait_ends_it_with_nothing_sent(machine):
    async with machine.client() as client:
        with pytest.raises(httpx2.ConnectError) as caught:
            await client.get("http://192.0.2.1/", extensions={"stormline.wait_for_network": 0.1})
    error = caught.value
    assert isinstance(error, errors.ConnectError)
    assert (error.phase, error.maybe_delivered) == (Phase.QUEUED, False)
    assert "no network for" in str(error)


async def test_deadline_begins_when_the_network_is_back(origin, machine):
    there = await origin()
    async with machine.client(deadline_s=0.5) as client:
        asking = asyncio.create_task(client.get(there.url(), extensions=WAIT))
        await wait_until(lambda: parked(client))
        await asyncio.sleep(0.7)
        machine.there = True
        client.network_changed()
        assert (await asking).status_code == 200


async def test_number_of_those_that_wait_is_bounded(machine, monkeypatch):
    monkeypatch.setattr(limits, "PARKED_MAX", 2)
    async with machine.client() as client:
        url = "http://192.0.2.1/"
        asking = [asyncio.create_task(client.get(url, extensions=WAIT)) for _ in range(2)]
        await wait_until(lambda: parked(client) == 2)
        with pytest.raises(errors.QueueFull) as caught:
            await client.get(url, extensions=WAIT)
        assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.QUEUED, False)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert parked(client) == 0


async def test_cancelled_request_is_gone_at_once(machine):
    async with machine.client() as client:
        asking = asyncio.create_task(client.get("http://192.0.2.1/", extensions=WAIT))
        await wait_until(lambda: parked(client))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        runtime = client._storm.runtime()
        assert parked(client) == 0
        assert runtime.parking._look is None
        assert runtime._executor.admission.policy.gate("192.0.2.1").in_flight == 0


async def test_refused_connection_is_no_missing_network(origin, machine):
    there = await origin()
    machine.code = errno.ECONNREFUSED
    async with machine.client(deadline_s=2.0) as client:
        with pytest.raises(errors.ConnectError):
            await client.get(there.url(), extensions=WAIT)
    assert machine.looks == 0


async def test_unreachable_address_of_a_machine_with_a_route_is_no_missing_network(origin, machine):
    there = await origin()
    machine.route = True
    async with machine.client(deadline_s=2.0) as client:
        with pytest.raises(errors.ConnectError):
            await client.get(there.url(), extensions=WAIT)
    assert machine.looks > 0


@pytest.mark.parametrize("value", ["yes", -1, 1e9])
async def test_wait_that_is_no_time_is_refused(origin, value):
    there = await origin()
    async with stormline.AsyncClient() as client:
        with pytest.raises(errors.LocalProtocolError, match="wait_for_network"):
            await client.get(there.url(), extensions={"stormline.wait_for_network": value})


def test_machine_says_whether_it_has_a_route():
    assert has_route() in (True, False)
