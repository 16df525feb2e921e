"""Attempts side by side: what a client does about a server that takes a request and says nothing."""

import asyncio
import contextlib
import importlib
import ssl
from dataclasses import dataclass, field

import h2.events
import httpx2
import pytest

import stormline
from stormline.client.background import BACKGROUND
from stormline.client.outside import Outside
from stormline.core import limits
from stormline.core.values import Address
from stormline.policy import timeouts
from stormline.testing.http2 import Peer
from stormline.testing.origin import Request, plain, read_request
from stormline.testing.world import wait_until

pytestmark = pytest.mark.loopback

NAME = "site.test"
PATIENCE_S = 30.0
"""Of a request that is expected to be answered; not waited for."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Lose patience soon: how long it lasts is policy's, and its own tests hold it."""
    monkeypatch.setattr(limits, "LOOK_FIRST_S", 0.05)
    monkeypatch.setattr(limits, "TIMEOUT_FLOOR_FAST_S", 0.1)
    monkeypatch.setattr(limits, "STALL_PROVE_S", PATIENCE_S)
    monkeypatch.setattr(timeouts, "RTO_MIN_S", 0.02)
    monkeypatch.setattr(timeouts, "RTO_VARIANCE_S", 0.02)


# -- servers ---------------------------------------------------------------------------------------------------------
@dataclass
class Server:
    """One address of the site.

    Attributes:
        address: where it listens.
        asked: every request read whole.
        given_up: requests that the client ended before they were answered: the connection closed, the stream reset.
        answers: set as long as it answers what it was asked.
        body: its answer.
    """

    address: Address = field(default_factory=lambda: Address("", 0))
    asked: list[Request] = field(default_factory=list)
    given_up: int = 0
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    body: bytes = b"ok"


class Site:
    """Servers under one name, and what was asked of them."""

    def __init__(self, servers, pki, protocol):
        for server in servers:
            server.answers.set()
        self.servers = servers
        self.protocol = protocol
        self._pki = pki

    @property
    def asked(self):
        return [request for server in self.servers for request in server.asked]

    @property
    def given_up(self):
        return sum(server.given_up for server in self.servers)

    @property
    def url(self):
        return f"{'http' if self.protocol == 'http' else 'https'}://{NAME}/"

    def transport(self, **settings):
        """Give a transport that finds the name at all the site's addresses, the first one first."""
        addresses = tuple(server.address for server in self.servers)
        trust = ssl.create_default_context(cadata=self._pki.ca.ca_pem)
        trust.set_alpn_protocols(["h2", "http/1.1"])
        outside = Outside(resolver=lambda: Names(addresses))
        return stormline.AsyncTransport(config=stormline.Config(**settings), verify=trust, outside=outside)

    def client(self, module, *, timeout=PATIENCE_S, **settings):
        return module.AsyncClient(
            transport=self.transport(**{"deadline_s": PATIENCE_S} | settings), timeout=module.Timeout(timeout)
        )

    def hush(self):
        """Let no server answer."""
        for server in self.servers:
            server.answers.clear()

    def other(self, server):
        return next(each for each in self.servers if each is not server)


class Names:
    """A resolver that knows one name."""

    def __init__(self, addresses):
        self._addresses = addresses

    async def resolve(self, host, port):
        return self._addresses

    def close(self):
        pass


async def serve_h1(server, reader, writer):
    """Answer as the server is set to, and take note of a client that goes away instead of waiting."""
    with contextlib.suppress(OSError, EOFError):
        while True:
            server.asked.append(await read_request(reader))
            if not await before(server.answers, reader.read(1)):
                server.given_up += 1
                return
            writer.write(plain(server.body))
            await writer.drain()


async def before(event, end):
    """Wait for an event; False where the end came first."""
    waiting = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(end)]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return waiting[0].done()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def serve_h2(server, reader, writer):
    """The same over HTTP/2; the silent answer PINGs."""
    peer = Peer(reader, writer)

    async def answer(request):
        reset = peer.wait(h2.events.StreamReset, len(peer.all(h2.events.StreamReset)) + 1)
        if await before(server.answers, reset):
            await peer.answer(request.stream_id, server.body)
        else:
            server.given_up += 1

    async def script(peer):
        async with asyncio.TaskGroup() as tasks:
            with contextlib.suppress(EOFError):
                for number in range(1, 1000):
                    request = await peer.wait(h2.events.RequestReceived, number)
                    fields = {name.decode(): value.decode() for name, value in request.headers}
                    if fields[":method"] == "POST":
                        await peer.wait(h2.events.StreamEnded, number)
                    body = peer.bodies.get(request.stream_id, b"")
                    server.asked.append(Request(fields[":method"], fields[":path"], fields, body))
                    tasks.create_task(answer(request))

    with contextlib.suppress(OSError):
        await peer.serve(script)


@pytest.fixture(name="protocol", params=["http", "h1", "h2"])
def _protocol(request):
    return request.param


@pytest.fixture(name="site")
async def _site(pki, protocol):
    """Two servers under one name."""
    context = None
    if protocol != "http":
        files = pki.ca.issue("site", names=[NAME])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        context.set_alpn_protocols(["h2"] if protocol == "h2" else ["http/1.1"])
    serve = serve_h2 if protocol == "h2" else serve_h1
    listening, tasks = [], set()

    async def listen(server):
        async def connected(reader, writer):
            tasks.add(asyncio.current_task())
            try:
                await serve(server, reader, writer)
            finally:
                writer.close()

        listening.append(await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context))
        server.address = Address(*listening[-1].sockets[0].getsockname()[:2])
        return server

    yield Site([await listen(Server(body=name)) for name in (b"one", b"two")], pki, protocol)
    for each in listening:
        each.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def story(response):
    return [line for _, line in response.extensions["stormline"].timeline.story]


def silence(site):
    """Let the server that is asked first be silent: which one that is the client decides."""
    site.hush()

    async def first():
        await wait_until(lambda: site.asked)
        mute = next(server for server in site.servers if server.asked)
        site.other(mute).answers.set()
        return mute

    return asyncio.ensure_future(first())


# -- tests -----------------------------------------------------------------------------------------------------------
class TestSilence:
    @pytest.fixture(name="module", params=["httpx2", "httpx"])
    def _module(self, request):
        return importlib.import_module(request.param)

    async def test_read_that_one_address_leaves_unanswered_is_answered_by_the_other(self, module, site):
        mute = silence(site)
        async with site.client(module) as client:
            response = await client.get(site.url)
            other = site.other(await mute)
            assert (response.status_code, response.content) == (200, other.body)
            assert len(mute.result().asked) == len(other.asked) == 1
            lines = story(response)
            assert any(f"{mute.result().address} does not answer" in line for line in lines)
            assert "beside: try direct" in lines
            assert response.extensions["stormline"].record.address == str(other.address)
            await wait_until(lambda: mute.result().given_up == 1)  # the loser is told that nobody waits any more
            assert (await client.get(site.url)).content == other.body
        assert len(mute.result().asked) == 1  # nothing more is put where nothing is answered

    async def test_read_on_a_connection_that_never_answered_is_asked_beside_before_its_time_is_over(
        self, module, site, monkeypatch
    ):
        monkeypatch.setattr(limits, "TIMEOUT_FLOOR_FAST_S", PATIENCE_S)
        monkeypatch.setattr(limits, "STALL_PROVE_S", 0.05)
        mute = silence(site)
        async with site.client(module) as client:
            response = await client.get(site.url)
            other = site.other(await mute)
            assert response.content == other.body
            lines = story(response)
            assert any(f"{mute.result().address} has not shown that it answers" in line for line in lines)
            assert (await client.get(site.url)).content == other.body
        assert (len(mute.result().asked), len(other.asked)) == (1, 2)

    async def test_read_whose_host_has_one_address_is_not_asked_beside_for_want_of_proof(
        self, module, site, monkeypatch
    ):
        monkeypatch.setattr(limits, "TIMEOUT_FLOOR_FAST_S", PATIENCE_S)
        monkeypatch.setattr(limits, "STALL_PROVE_S", 0.05)
        (only,) = site.servers = site.servers[:1]
        only.answers.clear()
        async with site.client(module) as client:
            asking = asyncio.ensure_future(client.get(site.url))
            await wait_until(lambda: only.asked)
            await asyncio.sleep(0.3)
            only.answers.set()
            assert (await asking).content == only.body
        assert len(only.asked) == 1

    async def test_write_is_sent_once_and_its_error_says_so(self, module, site):
        mute = silence(site)
        async with site.client(module, deadline_s=1.0) as client:
            with pytest.raises(module.ReadTimeout) as caught:
                await client.post(site.url, content=b"x")
        assert caught.value.maybe_delivered is True
        assert [request.method for request in site.asked] == ["POST"]
        await mute


class TestLanes:
    async def test_write_with_a_key_is_answered_by_the_other_with_the_same_key_and_body(self, site):
        mute = silence(site)
        async with site.client(httpx2) as client:
            response = await client.post(site.url, content=b"order", headers={"idempotency-key": "k1"})
        assert response.content == site.other(await mute).body
        assert [(each.body, each.headers["idempotency-key"]) for each in site.asked] == [(b"order", "k1")] * 2

    async def test_read_whose_caller_wants_no_retries_is_sent_once(self, site):
        mute = silence(site)
        async with site.client(httpx2, deadline_s=1.0) as client:
            with pytest.raises(httpx2.ReadTimeout):
                await client.get(site.url, extensions={"stormline.retries": False})
        assert len(site.asked) == 1
        await mute

    async def test_body_that_is_a_stream_is_sent_once_even_with_a_key(self, site):
        async def chunks():
            yield b"order"

        mute = silence(site)
        async with site.client(httpx2, deadline_s=1.0) as client:
            with pytest.raises(httpx2.ReadTimeout) as caught:
                await client.post(site.url, content=chunks(), headers={"idempotency-key": "k1"})
        assert caught.value.maybe_delivered is True
        assert len(site.asked) == 1
        await mute

    async def test_first_one_wins_where_it_answers_after_all(self, site):
        site.hush()
        async with site.client(httpx2) as client:
            asking = asyncio.ensure_future(client.get(site.url))
            await wait_until(lambda: site.asked)
            slow = next(server for server in site.servers if server.asked)
            await wait_until(lambda: site.other(slow).asked)
            slow.answers.set()
            response = await asking
            assert response.content == slow.body
            assert response.extensions["stormline"].record.address == str(slow.address)
            await wait_until(lambda: site.other(slow).given_up == 1)
            await settled(client)


class TestGivingUp:
    async def test_deadline_is_shared_by_all_that_stay_silent_and_nothing_is_left(self, site):
        site.hush()
        async with site.client(httpx2, deadline_s=1.5) as client:
            with pytest.raises(httpx2.ReadTimeout) as caught:
                await client.get(site.url)
            assert caught.value.maybe_delivered is True
            asked = len(site.asked)
            assert 2 <= asked <= limits.ATTEMPTS_MAX
            await wait_until(lambda: site.given_up == asked)
            await settled(client)
        assert len(site.asked) == asked

    @pytest.mark.parametrize("how", ["cancelled", "timed out"])
    async def test_call_given_up_while_two_lanes_run_leaves_nothing(self, site, how):
        site.hush()
        async with site.client(httpx2) as client:
            asking = asyncio.ensure_future(_ask(client, site, timed_out=how == "timed out"))
            await wait_until(lambda: all(server.asked for server in site.servers))
            if how == "cancelled":
                asking.cancel()
            with pytest.raises(asyncio.CancelledError if how == "cancelled" else TimeoutError):
                await asking
            asked = len(site.asked)
            await wait_until(lambda: site.given_up == asked)
            await settled(client)
            for server in site.servers:
                server.answers.set()
            assert (await client.get(site.url)).status_code == 200

    async def test_answer_that_comes_with_the_caller_s_cancellation_is_let_go(self, site):
        mute = silence(site)
        async with site.client(httpx2) as client:
            asking = asyncio.ensure_future(client.get(site.url))
            first = await mute
            await wait_until(lambda: site.other(first).asked)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
            await wait_until(lambda: first.given_up == 1)
            await settled(client)


async def _ask(client, site, *, timed_out):
    """Ask, with a time-out of the caller's own that ends while two lanes run, or none."""

    async def end():
        await wait_until(lambda: all(server.asked for server in site.servers))
        timeout.reschedule(asyncio.get_running_loop().time())

    async with asyncio.timeout(None) as timeout:
        ending = asyncio.ensure_future(end()) if timed_out else None
        try:
            await client.get(site.url)
        finally:
            if ending is not None:
                await ending


async def settled(client):
    """Wait until nothing is under way on any connection; HTTP/1.1 connections of what was given up are closed."""
    pool = client._transport.runtime()._pool
    await wait_until(lambda: pool.open_connections == pool.idle_connections)


# -- the synchronous client ------------------------------------------------------------------------------------------
async def test_synchronous_read_on_a_connection_that_falls_silent_is_answered_over_another(origin):
    silent = []

    async def answer(request, writer):
        if not silent or silent[0] is writer:
            silent[:] = [writer]
            await asyncio.sleep(60)
        writer.write(plain())

    def ask():
        with stormline.Client(timeout=PATIENCE_S) as client:
            return client.get(there.url())

    there = await origin(answer)
    response = await asyncio.to_thread(ask)
    BACKGROUND.stop()
    assert response.text == "ok"
    assert there.connections == len(there.requests) == 2
    assert any("does not answer" in line for line in story(response))
