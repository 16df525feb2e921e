"""Connections that servers of others end: limits, graceful reloads, idle time. No request may be lost or doubled by it.

The origin behind the proxies runs here and remembers every request, so "once" is what it saw.
"""

import asyncio
import collections
import contextlib
import signal
import ssl

import httpx2
import pytest

import stormline
from stormline.testing.foreign import find, running_server
from stormline.testing.origin import plain, running_origin
from stormline.testing.world import make_pki

pytestmark = pytest.mark.loopback
RELOADS = 8
TASKS = 24


@pytest.fixture(scope="module", name="pki")
def _pki(tmp_path_factory):
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module", name="files")
def _files(pki):
    return pki.ca.issue("origin", names=["localhost"])


async def _echo(request, writer):
    body = request.body if request.method == "POST" else b"ok"
    writer.write(plain(b"" if request.method == "HEAD" else body))


@pytest.fixture(name="origin")
async def _origin():
    async with running_origin(_echo) as origin:
        yield origin


@pytest.fixture(name="start")
async def _start(files, origin, tmp_path):
    """Start a proxy before the origin with lines of configuration of its own."""
    with contextlib.ExitStack() as stack:

        async def start(name, options=""):
            if find(name) is None:
                pytest.skip(f"{name} is not installed")
            server = running_server(name, tmp_path, files, upstream=origin.address, options=options)
            return await asyncio.to_thread(stack.enter_context, server)

        yield start
        await asyncio.to_thread(stack.close)


@pytest.fixture(name="version", params=["1.1", "2"])
def _version(request):
    return request.param


@pytest.fixture(name="client_of")
async def _client_of(pki):
    async with contextlib.AsyncExitStack() as stack:

        async def client_of(server, version, timeout_s=20.0):
            trust = ssl.create_default_context(cadata=pki.ca.ca_pem)
            trust.set_alpn_protocols(["h2", "http/1.1"] if version == "2" else ["http/1.1"])
            transport = stormline.AsyncTransport(verify=trust)
            client = httpx2.AsyncClient(transport=transport, base_url=server.url(), timeout=timeout_s)
            return await stack.enter_async_context(client)

        yield client_of


class Traffic:
    """Reads and writes, each write with a body of its own.

    Attributes:
        failures: method and error of what did not succeed.
        done: how many did.
    """

    def __init__(self, client):
        self._client = client
        self._number = 0
        self.failures = []
        self.done = 0
        self.versions = set()

    async def one(self, method):
        self._number += 1
        body = f"{method}-{self._number}".encode()
        content = body if method == "POST" else None
        try:
            answer = await self._client.request(method, "/work", content=content)
        except httpx2.TransportError as error:
            self.failures.append((method, error))
            return
        self.versions.add(answer.http_version)
        if (answer.status_code, answer.content) == (200, body if content else b"ok"):
            self.done += 1
        else:
            self.failures.append((method, answer))

    async def burst(self, number, methods=("GET", "POST")):
        await asyncio.gather(*(self.one(methods[index % len(methods)]) for index in range(number)))

    async def until(self, stop):
        async def work(method):
            while not stop.is_set():
                await self.one(method)

        await asyncio.gather(*(work(("GET", "POST")[index % 2]) for index in range(TASKS)))


def doubled(origin):
    bodies = collections.Counter(request.body for request in origin.requests if request.method == "POST")
    return [body for body, times in bodies.items() if times > 1]


async def test_nginx_that_ends_connections_after_ten_requests_loses_none_one_after_the_other(
    start, client_of, version, origin
):
    server = await start("nginx", "keepalive_requests 10;")
    traffic = Traffic(await client_of(server, version))
    for number in range(120):
        await traffic.one(("GET", "POST")[number % 2])
    assert (traffic.failures, traffic.done) == ([], 120)
    assert len(origin.requests) == 120


@pytest.mark.parametrize("methods", [("GET",), ("POST",), ("GET", "POST")], ids="-".join)
@pytest.mark.parametrize("number", [15, 100])
async def test_nginx_that_ends_connections_after_ten_requests_loses_none_of_a_burst(
    start, client_of, version, origin, number, methods
):
    server = await start("nginx", "keepalive_requests 10;")
    traffic = Traffic(await client_of(server, version))
    for _ in range(3):
        await traffic.burst(number, methods)
    assert (traffic.failures, traffic.done) == ([], 3 * number)
    assert doubled(origin) == []


@pytest.mark.parametrize("number", [500, 1500])
async def test_nginx_asked_by_very_many_at_once_answers_all(start, client_of, version, origin, number):
    server = await start("nginx")
    traffic = Traffic(await client_of(server, version, timeout_s=45.0))  # the machine may be busy
    await traffic.burst(number)
    assert (traffic.failures, traffic.done) == ([], number)
    assert doubled(origin) == []


@pytest.mark.parametrize("limit", [1, 8])
async def test_nginx_with_few_streams_at_once_answers_a_hundred(start, client_of, origin, limit):
    server = await start("nginx", f"http2_max_concurrent_streams {limit};")
    traffic = Traffic(await client_of(server, "2"))
    await traffic.burst(100)
    await traffic.burst(100)
    assert (traffic.failures, traffic.done, traffic.versions) == ([], 200, {"HTTP/2"})
    assert doubled(origin) == []


async def test_nginx_that_keeps_no_connection_is_asked_over_new_ones(start, client_of, version, origin):
    server = await start("nginx", "keepalive_timeout 0;")
    traffic = Traffic(await client_of(server, version))
    for _ in range(3):
        await traffic.burst(20)
    assert (traffic.failures, traffic.done) == ([], 60)
    assert doubled(origin) == []


async def test_nginx_that_closed_the_idle_connection_gets_the_write_over_a_new_one(start, client_of, version, origin):
    server = await start("nginx", "keepalive_timeout 1s;")
    traffic = Traffic(await client_of(server, version))
    await traffic.burst(10)
    await asyncio.sleep(1.3)  # real time: nginx's own timer, in whole seconds
    await traffic.burst(10, ("POST",))
    assert (traffic.failures, traffic.done) == ([], 20)
    assert doubled(origin) == []


def _fair(traffic, version):
    """What nobody can know over HTTP/1.1 is a write on a connection that was closed in that moment, unanswered."""
    unknown = [
        error
        for method, error in traffic.failures
        if version == "1.1" and method == "POST" and getattr(error, "maybe_delivered", False)
    ]
    return [failure for failure in traffic.failures if failure[1] not in unknown]


async def test_nginx_reloaded_under_traffic_loses_none(start, client_of, version, origin):
    server = await start("nginx")
    traffic, stop = Traffic(await client_of(server, version)), asyncio.Event()
    work = asyncio.create_task(traffic.until(stop))
    for _ in range(RELOADS):
        await asyncio.sleep(0.15)
        server.signal(signal.SIGHUP)
    for _ in range(400):  # the machine may be slow; the traffic must go on
        if traffic.done > 10 * TASKS:
            break
        await asyncio.sleep(0.05)
    stop.set()
    await work
    assert _fair(traffic, version) == []
    assert traffic.done > 10 * TASKS
    assert doubled(origin) == []


async def test_nginx_reloaded_under_long_downloads_ends_them_whole(start, client_of, version, tmp_path):
    size = 4_000_000
    (tmp_path / "large").write_bytes(bytes(size))
    server = await start("nginx", "location = /large { root .; }")
    client = await client_of(server, version)

    async def download():
        got = 0
        async with client.stream("GET", "/large") as answer:
            async for chunk in answer.aiter_raw():
                got += len(chunk)
                await asyncio.sleep(0.002)
        return got

    downloads = [asyncio.create_task(download()) for _ in range(5)]
    for _ in range(3):
        await asyncio.sleep(0.1)
        server.signal(signal.SIGHUP)
        assert (await client.get("/work")).text == "ok"
    assert await asyncio.gather(*downloads) == [size] * 5


async def test_haproxy_replaced_under_traffic_loses_none(start, client_of, version, origin):
    """`-sf`: the new process takes the port, the old one ends its connections with their last answer."""
    server = await start("haproxy")
    traffic, stop = Traffic(await client_of(server, version)), asyncio.Event()
    work = asyncio.create_task(traffic.until(stop))
    for _ in range(3):
        await asyncio.sleep(0.15)
        await asyncio.to_thread(server.replace, "-sf", "{pid}")
    await asyncio.sleep(0.15)
    stop.set()
    await work
    assert _fair(traffic, version) == []
    assert traffic.done > 10 * TASKS
    assert doubled(origin) == []


async def test_haproxy_with_few_streams_at_once_answers_a_hundred(start, client_of, origin):
    server = await start("haproxy", "tune.h2.max-concurrent-streams 4")
    traffic = Traffic(await client_of(server, "2"))
    await traffic.burst(100)
    assert (traffic.failures, traffic.done, traffic.versions) == ([], 100, {"HTTP/2"})
    assert doubled(origin) == []


async def test_nginx_that_hangs_up_without_a_word_is_a_read_error_that_says_what_is_known(start, client_of, version):
    server = await start("nginx", "location = /nothing { return 444; }")
    client = await client_of(server, version)
    with pytest.raises(httpx2.TransportError) as caught:
        await client.post("/nothing", content=b"x")
    assert caught.value.maybe_delivered
    assert (await client.post("/work", content=b"after")).content == b"after"
