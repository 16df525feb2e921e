"""Connections made before they are asked for: one, by the means a request would take first, and never at a price."""

import asyncio
import contextlib
import ssl

import h2.events
import pytest

import stormline
from stormline.core import limits, limits_memory
from stormline.core.values import Address
from stormline.testing.gateway import answering
from stormline.testing.http2 import Peer
from stormline.testing.world import HOST, wait_until

pytestmark = pytest.mark.loopback

NAME = "site.test"


def pool_of(client):
    return client._storm.runtime()._pool


@pytest.fixture(name="http2")
async def _http2(pki, trust, names):
    """An HTTP/2 origin; gives its peers and a maker of clients that know it."""
    files = pki.ca.issue("preconnect", names=[NAME])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    peers, tasks = [], set()

    async def play(peer):
        with contextlib.suppress(EOFError):
            for number in range(1, 100):
                request = await peer.wait(h2.events.RequestReceived, number)
                await peer.answer(request.stream_id, b"ok")

    async def connected(reader, writer):
        tasks.add(asyncio.current_task())
        peers.append(Peer(reader, writer))
        with contextlib.suppress(OSError):
            await peers[-1].serve(play)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
    outside = names({NAME: Address(*server.sockets[0].getsockname()[:2])})

    def client(**settings):
        return stormline.AsyncClient(config=stormline.Config(**settings), outside=outside, verify=trust())

    yield peers, client
    server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_request_goes_out_over_the_connection_made_before(origin):
    there = await origin()
    async with stormline.AsyncClient() as client:
        assert await client.preconnect(there.url("/whatever?x=1")) is True
        assert (there.connections, there.requests) == (1, [])
        assert pool_of(client).idle_connections == 1
        assert (await client.get(there.url())).text == "ok"
        assert there.connections == 1


async def test_http2_is_settled_and_asked_nothing(http2):
    peers, make = http2
    async with make() as client:
        assert await client.preconnect(f"https://{NAME}") is True
        (peer,) = peers
        assert not peer.all(h2.events.RequestReceived)
        (held,) = pool_of(client)._slots
        assert held.shared.streams_max is not None
        assert (await client.get(f"https://{NAME}/")).text == "ok"
        assert len(peers) == 1


async def test_second_has_no_effect_nor_have_many_at_once(origin, http2):
    there, (peers, make) = await origin(), http2
    async with make() as client:
        for url in (there.url(), f"https://{NAME}/"):
            assert any(await asyncio.gather(*(client.preconnect(url) for _ in range(limits_memory.PRECONNECTS_MAX))))
            assert await client.preconnect(url) is True
        assert there.connections == len(peers) == 1


async def test_more_at_once_than_may_be_are_not_made(origin):
    places = [await origin() for _ in range(limits_memory.PRECONNECTS_MAX + 3)]
    async with stormline.AsyncClient() as client:
        made = await asyncio.gather(*(client.preconnect(each.url()) for each in places))
        assert made.count(True) == limits_memory.PRECONNECTS_MAX == sum(each.connections for each in places)


async def test_nothing_is_made_for_an_app_in_the_background(origin):
    there = await origin()
    async with stormline.AsyncClient() as client:
        client._storm.runtime().preconnector.sparing = True
        assert await client.preconnect(there.url()) is False
        assert there.connections == 0


@pytest.mark.parametrize(
    "url", ["", "nonsense", "ftp://127.0.0.1/", "http://", "http://127.0.0.1:99999/", "http://nowhere.invalid:1/", "\0",
            "http://[::1", "https://xn--/", "http://" + "ä" * 300]
)  # fmt: skip
async def test_url_or_network_that_does_not_allow_it_is_no_error(url, names):
    async with stormline.AsyncClient(outside=names({})) as client:
        assert await client.preconnect(url) is False
        assert pool_of(client).open_connections == 0


async def test_cancelled_leaves_nothing(names):
    listening = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    place = Address(*listening.sockets[0].getsockname()[:2])
    async with stormline.AsyncClient(outside=names({NAME: place})) as client:
        making = asyncio.ensure_future(client.preconnect(f"https://{NAME}/"))
        for _ in range(3):
            await asyncio.sleep(0)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        await wait_until(lambda: pool_of(client).open_connections == 0)
    listening.close()
    await listening.wait_closed()


async def test_platform_that_serves_the_host_is_connected_to_over_the_long_connection(world):
    here = await world(answering())
    async with here.client() as client:
        assert await client.preconnect(f"https://{HOST}/") is True
        assert len(here.gateway.ends) == 1
        assert pool_of(client).open_connections == 0
        assert (await client.post(f"https://{HOST}/", content="x")).text == "x"
        assert len(here.gateway.ends) == 1


async def test_config_asks_for_it_when_the_client_begins(origin, http2):
    there, (peers, make) = await origin(), http2
    async with make(preconnect=(there.url(), f"https://{NAME}/")) as client:
        await wait_until(lambda: there.connections == len(peers) == 1)
        await wait_until(lambda: pool_of(client).open_connections == 2)
        assert there.requests == []


async def test_hosts_used_most_on_this_network_are_connected_to_at_the_start(http2, tmp_path):
    peers, make = http2
    async with make(store=tmp_path) as client:
        for _ in range(3):
            await client.get(f"https://{NAME}/")
            await asyncio.sleep(2 * limits.SAMPLE_PAUSE_S)
    peers.clear()
    async with make(store=tmp_path, preconnect=("*",)):
        await wait_until(lambda: peers)
        assert len(peers) == 1


async def test_start_that_knows_no_host_connects_to_nobody(http2, tmp_path):
    peers, make = http2
    async with make(store=tmp_path, preconnect=("*",)) as client:
        runtime = client._storm.runtime()
        await asyncio.sleep(0)
        assert runtime.preconnector._tasks == set()
    assert peers == []


async def test_client_closed_while_it_connects_leaves_nothing(http2):
    _, make = http2
    async with make(preconnect=(f"https://{NAME}/",)) as client:
        runtime = client._storm.runtime()
    assert runtime.preconnector._tasks == set()
    assert runtime._pool.open_connections == 0
