"""What a client tells its owner of the network, on real sockets."""

import asyncio

import httpx2
import pytest

import stormline
from stormline.client.background import BACKGROUND
from stormline.net.recorded import PushedNetwork
from stormline.policy.level import Level, Quality

pytestmark = pytest.mark.loopback


async def test_client_knows_the_network_after_one_answer_and_nothing_before(origin):
    server = await origin()
    async with stormline.AsyncClient() as client:
        assert client.quality.level is Quality().level
        await client.get(server.url())
        quality = client.quality
        assert quality.level is quality.carries is Level.EXCELLENT
        assert quality.confidence > 0
        assert quality.evidence.startswith("round trip")


async def test_signal_that_the_system_tells_is_a_guess_before_the_first_answer_and_none_after_it(origin):
    server, port = await origin(), PushedNetwork()
    async with stormline.AsyncClient(config=stormline.Config(network_port=port)) as client:
        for dbm, level in ((-135, Level.BAD), (-110, Level.FAIR), (-80, Level.EXCELLENT)):
            port.push({"kind": "cell", "addresses": ["10.44.7.9/30"], "signal_dbm": dbm})
            client.network_changed()
            assert client.quality.level is level
            assert "of 4 bars" in client.quality.evidence
        port.push({"kind": "cell", "addresses": ["10.44.7.9/30"], "signal_dbm": -135})
        client.network_changed()
        await client.get(server.url())
        assert client.quality.level is Level.EXCELLENT


async def test_transport_under_httpx2_tells_it_too_and_not_after_its_end(origin):
    server = await origin()
    transport = stormline.AsyncTransport()
    async with httpx2.AsyncClient(transport=transport) as client:
        await client.get(server.url())
        assert transport.quality.level is Level.EXCELLENT
    assert transport.quality == Quality()


async def test_synchronous_client_tells_it_on_any_thread(origin):
    server = await origin()

    def use():
        with stormline.Client() as client:
            assert client.quality == Quality()
            client.get(server.url())
            return client.quality

    try:
        quality = await asyncio.to_thread(use)
    finally:
        BACKGROUND.stop()
    assert quality.level is Level.EXCELLENT
