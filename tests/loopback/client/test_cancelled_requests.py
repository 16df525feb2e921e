"""A request may be given up at any moment; nothing of it stays, and it never becomes another try.

The story: twenty requests, cancelled at random within ten milliseconds, over and over: after some seconds the pool of
httpcore 1.0 counts ten connections as active for ever, and every later request fails with PoolTimeout
(encode/httpcore #1093, #658; encode/httpx #1461). Apps cancel all the time: a page is left, a newer search replaces an
older one, a time-out of their own fires.
"""

import asyncio
import contextlib
import importlib
import random
import socket
import ssl

import h2.events as h2e
import pytest
from h2.exceptions import ProtocolError

import stormline
from stormline.client.outside import Outside
from stormline.core import limits
from stormline.core.values import Address
from stormline.testing.gateway import answering
from stormline.testing.http2 import Peer
from stormline.testing.origin import plain, running_origin
from stormline.testing.world import HOST, bundle_for, wait_until

pytestmark = pytest.mark.loopback

TURNS_MAX = 25
"""Turns of the loop within which a cancelled request is over. A turn is what a ready callback waits; none of them waits
for the network, a timer or a thread."""


def once(task):
    task.cancel()


def twice(task):
    task.cancel()
    task.cancel()


def again_a_turn_later(task):
    task.cancel()
    asyncio.get_running_loop().call_soon(task.cancel)


WAYS = {"once": once, "twice": twice, "again a turn later": again_a_turn_later}


async def give_up(task, way):
    """Cancel a request in flight; it is over at once, and as cancelled."""
    assert not task.done()
    WAYS[way](task)
    for _ in range(TURNS_MAX):
        await asyncio.sleep(0)
        if task.done():
            break
    assert task.done(), "the cancelled request goes on"
    assert task.cancelled()


def at_rest(client):
    pool = transport_of(client).runtime()._pool
    return pool.open_connections == pool.idle_connections


def transport_of(client):
    return getattr(client, "_storm", None) or client._transport


def client_of(module, **options):
    if module == "stormline":
        return stormline.AsyncClient(**options)
    return importlib.import_module(module).AsyncClient(transport=stormline.AsyncTransport(**options))


@pytest.fixture(name="module", params=["stormline", "httpx"])
def _module(request):
    return request.param


@pytest.fixture(name="way", params=WAYS)
def _way(request):
    return request.param


# -- one request, one phase -------------------------------------------------------------------------------------------
class _SlowNames:
    """DNS that answers nothing but `localhost`, until it is told to."""

    def __init__(self):
        self.asked, self.release = 0, asyncio.Event()

    async def resolve(self, host, port, **options):
        if host != "localhost" and not Address(host, port).is_ip:
            self.asked += 1
            await self.release.wait()
        return (Address("127.0.0.1", port),)

    def doubt(self, host):
        """Nothing to doubt."""

    def close(self):
        """Nothing to close."""


async def test_while_the_name_is_looked_up(origin, way):
    there, dns = await origin(), _SlowNames()
    async with stormline.AsyncClient(outside=Outside(resolver=lambda: dns)) as client:
        task = asyncio.ensure_future(client.get(there.url(host="a.test")))
        await wait_until(lambda: dns.asked)
        await give_up(task, way)
        assert (await client.get(there.url())).text == "ok"
        dns.release.set()
        assert at_rest(client)
    assert there.connections == 1


@pytest.fixture(name="silent")
def _silent():
    """Give addresses that answer nothing: their queue of connections is full, so the kernel drops the SYN."""
    with contextlib.ExitStack() as stack:
        addresses = []
        for _ in range(3):
            sock = stack.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            sock.listen(0)
            for _ in range(3):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(sock.getsockname())
            addresses.append(Address(*sock.getsockname()))
        yield tuple(addresses)


async def test_while_addresses_race(origin, names, silent, way, monkeypatch):
    there, begun = await origin(), []

    async def counting(address):
        begun.append(address)
        return await outside.open_tcp(address)

    outside = names({"a.test": silent, "b.test": there.address})
    racing = Outside(resolver=outside.resolver, open_tcp=counting)
    async with stormline.AsyncClient(outside=racing) as client:
        task = asyncio.ensure_future(client.get("http://a.test/"))
        await wait_until(lambda: len(begun) == 3)
        await give_up(task, way)
        assert len(begun) == 3
        assert (await client.get(f"http://b.test:{there.address.port}/")).text == "ok"
        assert at_rest(client)


async def test_while_tls_shakes_hands(origin, way):
    async def mute(reader, writer):
        arrived.append(writer)
        await reader.read()  # until the client goes away
        writer.close()

    arrived, there = [], await origin()
    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    async with stormline.AsyncClient() as client:
        task = asyncio.ensure_future(client.get(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/"))
        await wait_until(lambda: arrived)
        await give_up(task, way)
        assert (await client.get(there.url())).text == "ok"
        assert at_rest(client)
        await wait_until(arrived[0].is_closing)
    server.close()
    await server.wait_closed()
    assert len(arrived) == 1


async def test_while_it_waits_for_a_connection(way, monkeypatch):
    async def answer(request, writer):
        if request.target == "/slow":
            await release.wait()
        writer.write(plain(request.target.encode()))

    release = asyncio.Event()
    async with running_origin(answer) as there, stormline.AsyncClient() as client:
        monkeypatch.setattr(transport_of(client).runtime()._pool, "_per_origin_max", 1)
        slow = asyncio.ensure_future(client.get(there.url("/slow")))
        await wait_until(lambda: there.requests)
        waiting = [asyncio.ensure_future(client.get(there.url(f"/{number}"))) for number in range(5)]
        await asyncio.sleep(0.02)
        for task in waiting[:4]:
            await give_up(task, way)
        release.set()
        assert (await slow).text == "/slow"
        assert (await waiting[4]).text == "/4"
        assert at_rest(client)
    assert [request.target for request in there.requests] == ["/slow", "/4"]


class Scripted:
    """An origin of either protocol that stops where it is told to, by path: `/upload`, `/headers`, `/body`.

    Attributes:
        begun: paths, in the order in which their heads came.
        url: gives URLs of it.
    """

    def __init__(self, protocol, context):
        self.begun, self._protocol, self._context = [], protocol, context
        self.rng = random.Random(7)
        self.at_once = 100 if protocol == "h2" else limits.POOL_CONNECTIONS_PER_ORIGIN_MAX
        self._writers, self._tasks = [], set()

    async def __aenter__(self):
        self._context.set_alpn_protocols(["h2"] if self._protocol == "h2" else ["http/1.1"])
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=self._context)
        self.address = Address(*self._server.sockets[0].getsockname()[:2])
        return self

    async def __aexit__(self, *exc):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def url(self, path="/"):
        return f"https://localhost:{self.address.port}{path}"

    def _connected(self, reader, writer):
        self._writers.append(writer)
        serve = self._serve_h2 if self._protocol == "h2" else self._serve_h1
        task = asyncio.ensure_future(serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve_h1(self, reader, writer):
        with contextlib.suppress(OSError, EOFError, ssl.SSLError):
            while True:
                path = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1].decode()
                self.begun.append(path)
                if path == "/upload":
                    await asyncio.sleep(60)  # nobody reads
                elif path == "/headers":
                    await reader.read()  # until the client goes away
                elif path == "/body":
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
                    await reader.read()
                else:
                    writer.write(plain())
        writer.close()

    async def _serve_h2(self, reader, writer):
        # What a server says on a stream that the client has just reset is an error to `h2`, and none to us.
        with contextlib.suppress(OSError, EOFError, ssl.SSLError, ProtocolError):
            await Peer(reader, writer).serve(self._play_h2)
        writer.close()

    async def _play_h2(self, peer):
        number = 0
        while True:
            number += 1
            request = await peer.wait(h2e.RequestReceived, number)
            path = {bytes(name): bytes(value) for name, value in request.headers}[b":path"].decode()
            self.begun.append(path)
            if path == "/upload":
                peer.credits = False
            elif path == "/body":
                peer.h2.send_headers(request.stream_id, [(b":status", b"200")])
                peer.h2.send_data(request.stream_id, b"half")
                await peer.flush()
            elif path == "/busy":
                self._later(peer, request.stream_id)
            elif path != "/headers":
                await peer.answer(request.stream_id, b"ok")

    def _later(self, peer, stream_id):
        """Answer in two steps, each a moment later, as far as the client still wants it."""

        def say(step, *arguments, **options):
            with contextlib.suppress(ProtocolError):
                step(stream_id, *arguments, **options)
                peer.writer.write(peer.h2.data_to_send())

        loop, delay = asyncio.get_running_loop(), 0.003 * self.rng.random()
        loop.call_later(delay, say, peer.h2.send_headers, [(b":status", b"200")])
        loop.call_later(delay * 1.5, lambda: say(peer.h2.send_data, b"ok", end_stream=True))


@pytest.fixture(name="scripted", params=["h1", "h2"])
async def _scripted(request, pki):
    files = pki.ca.issue("local", names=["localhost"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    async with Scripted(request.param, context) as there:
        yield there


async def endless():
    while True:
        yield bytes(65_536)


@pytest.mark.parametrize(("module", "way"), [*[("stormline", way) for way in WAYS], ("httpx", "once")])
@pytest.mark.parametrize("phase", ["headers", "body", "upload", "streamed upload"])
async def test_while_request_or_answer_is_on_its_way(module, scripted, trust, way, phase):
    path = f"/{phase.split()[-1]}"
    content = bytes(16 * 1024 * 1024) if phase == "upload" else endless() if phase == "streamed upload" else b"x"
    async with client_of(module, verify=trust()) as client:
        assert (await client.get(scripted.url())).text == "ok"
        for number in range(3):
            task = asyncio.ensure_future(client.post(scripted.url(path), content=content))
            await wait_until(lambda expected=number + 1: scripted.begun.count(path) == expected)
            await asyncio.sleep(0.01)  # as far as it comes
            await give_up(task, way)
            content = endless() if phase == "streamed upload" else content
        assert (await client.get(scripted.url())).text == "ok"
        assert at_rest(client)
    assert scripted.begun == ["/", *[path] * 3, "/"]


async def test_while_a_read_is_tried_again(origin, way):
    """The first try failed on a kept connection; it is given up in the second, and there is no third."""

    async def answer(request, writer):
        seen[id(writer)] = seen.get(id(writer), 0) + 1
        if request.target == "/" or seen[id(writer)] == 2:
            writer.write(plain()) if request.target == "/" else writer.close()
        else:
            await asyncio.sleep(60)

    seen = {}
    there = await origin(answer)
    async with stormline.AsyncClient() as client:
        await client.get(there.url())
        task = asyncio.ensure_future(client.get(there.url("/again")))
        await wait_until(lambda: len(there.requests) == 3)
        await give_up(task, way)
        assert (await client.get(there.url())).text == "ok"
        assert at_rest(client)
    assert [request.target for request in there.requests] == ["/", "/again", "/again", "/"]


async def test_while_dispatch_is_asked(origin, pki, way):
    async def mute(request, writer):
        await asyncio.sleep(60)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki.dispatch.certificate, pki.dispatch.key)
    there = await origin()
    async with running_origin(mute, ssl=context) as dispatch:
        config = stormline.Config(bundle=bundle_for(pki, dispatch.address), report=False)
        async with stormline.AsyncClient(config=config) as client:
            task = asyncio.ensure_future(client.get(f"https://{HOST}/"))
            await wait_until(lambda: dispatch.requests)
            await give_up(task, way)
            assert (await client.get(there.url())).text == "ok"
            assert at_rest(client)


@pytest.mark.parametrize("when", ["the link is opened", "the answer is awaited"])
async def test_on_the_long_connection(world, way, when):
    async def mute_once(end):
        await end.read_hello()
        greeted.append(end)
        if when == "the link is opened":
            await release.wait()
        await answering(handle)(end)

    async def handle(end, call):
        if call.target.endswith("/mute"):
            return
        end.reply(call, b"ok")

    greeted, release = [], asyncio.Event()
    here = await world(mute_once)
    async with stormline.AsyncClient(config=here.config(disabled=frozenset({"direct"}))) as client:
        task = asyncio.ensure_future(client.get(f"https://{HOST}/mute"))
        await wait_until(lambda: greeted)
        if when == "the answer is awaited":
            await wait_until(lambda: here.gateway.calls["GET"] == 1)
        await give_up(task, way)
        release.set()
        assert (await client.get(f"https://{HOST}/")).text == "ok"
    assert len(here.gateway.ends) == 1


async def test_by_a_time_out_of_zero_before_anything_is_done(module, origin):
    there = await origin()
    async with client_of(module) as client:
        for _ in range(50):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await client.get(there.url())
        assert (await client.get(there.url())).text == "ok"
        assert at_rest(client)
    assert there.counts["GET"] <= 51


async def both(*coroutines):
    async with asyncio.TaskGroup() as group:
        for each in coroutines:
            group.create_task(each)


async def test_by_a_task_group_whose_other_member_fails(module, scripted, trust):
    async def fails():
        await wait_until(lambda: "/headers" in scripted.begun)
        raise ZeroDivisionError

    async with client_of(module, verify=trust()) as client:
        with pytest.raises(ExceptionGroup) as caught:
            await both(client.get(scripted.url("/headers")), fails())
        assert [type(each) for each in caught.value.exceptions] == [ZeroDivisionError]
        assert (await client.get(scripted.url())).text == "ok"
        assert at_rest(client)


# -- thousands --------------------------------------------------------------------------------------------------------
class _Busy(asyncio.Protocol):
    """An HTTP/1.1 server that is quick to write and slow to answer: head and body come a moment apart."""

    def __init__(self, rng, transports):
        self._rng, self._transports, self._buffer, self._timers = rng, transports, b"", []

    def connection_made(self, transport):
        self._transport = transport
        self._transports.add(transport)

    def connection_lost(self, exc):
        self._transports.discard(self._transport)
        for timer in self._timers:
            timer.cancel()

    def data_received(self, data):
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
            if len(self._buffer) < end + 4 + size:
                return
            self._buffer = self._buffer[end + 4 + size :]
            loop, write = asyncio.get_running_loop(), self._transport.write
            delay = self._rng.random() * 0.003
            self._timers = [
                loop.call_later(delay, write, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"),
                loop.call_later(delay * 1.5, write, b"ok"),
            ]


def of_the_client(task):
    """Say whether a task does the client's work; what serves a connection of HTTP/2 that stands does not count."""
    file = task.get_coro().cr_code.co_filename
    ours = any(f"/stormline/{room}/" in file for room in ("client", "outbound", "net"))
    return ours and not task.get_name().startswith("http/2")


@contextlib.asynccontextmanager
async def busy_server(protocol, rng, context):
    if protocol == "h2":
        async with Scripted("h2", context) as there:
            yield there.address
            assert len(there.begun) > 200  # they did get that far
        return
    transports = set()
    server = await asyncio.get_running_loop().create_server(lambda: _Busy(rng, transports), "127.0.0.1", 0)
    yield Address(*server.sockets[0].getsockname()[:2])
    server.close()
    for transport in list(transports):
        transport.abort()
    await server.wait_closed()


@pytest.mark.parametrize(("protocol", "cancelled_min"), [("h1", 8_000), ("h2", 2_000)])
async def test_ten_thousand_given_up_at_any_turn_leave_the_client_as_new(pki, trust, protocol, cancelled_min):
    files = pki.ca.issue("local", names=["localhost"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    rng = random.Random(25)
    async with busy_server(protocol, rng, context) as address, stormline.AsyncClient(verify=trust()) as client:
        pool = client._storm.runtime()._pool
        pool._per_origin_max = 10
        url = f"{'https' if protocol == 'h2' else 'http'}://localhost:{address.port}/busy"
        tasks_before = asyncio.all_tasks()
        cancelled = answered = 0
        while cancelled < cancelled_min:
            batch = [
                asyncio.create_task(client.post(url, content=bytes(rng.choice((0, 10, 200_000)))) if rng.random() < 0.2
                                    else client.get(url))
                for _ in range(95)  # what one HTTP/2 connection of this server carries
            ]  # fmt: skip
            for task in batch:
                if rng.random() < 0.5:
                    await asyncio.sleep(0 if rng.random() < 0.9 else rng.random() * 0.002)
                task.cancel()
                if rng.random() < 0.2:
                    rng.choice(batch).cancel()
            results = await asyncio.gather(*batch, return_exceptions=True)
            cancelled += sum(isinstance(result, asyncio.CancelledError) for result in results)
            responses = [result for result in results if not isinstance(result, BaseException)]
            answered += len(responses)
            assert [result for result in results if isinstance(result, Exception)] == []
            assert all(response.status_code == 200 for response in responses)
        assert (await client.get(url)).text == "ok"
        await wait_until(lambda: pool.open_connections == pool.idle_connections)
        assert pool.open_connections <= 10
        assert (pool._waiting, pool._checks._tasks) == (0, {})
        assert [task for task in asyncio.all_tasks() - tasks_before if of_the_client(task)] == []
        assert cancelled + answered >= cancelled_min
    assert answered > 20  # it is a storm, not a wall


@pytest.mark.parametrize("scripted", ["h1", "h2"], indirect=True)
async def test_those_who_wait_for_a_stream_are_not_hurt_when_others_are_given_up(scripted, trust):
    """Twenty cancellations in a row retire an HTTP/2 connection; who still waited for a stream on it goes elsewhere."""
    async with stormline.AsyncClient(verify=trust()) as client:
        assert (await client.get(scripted.url())).text == "ok"
        leaving = [asyncio.create_task(client.get(scripted.url("/headers"))) for _ in range(100)]
        await wait_until(lambda: scripted.begun.count("/headers") >= scripted.at_once)
        staying = [asyncio.create_task(client.get(scripted.url())) for _ in range(20)]
        await asyncio.sleep(0.02)
        for task in leaving:
            task.cancel()
        results = await asyncio.gather(*staying, return_exceptions=True)
        assert [result for result in results if isinstance(result, Exception)] == []
        assert at_rest(client)
