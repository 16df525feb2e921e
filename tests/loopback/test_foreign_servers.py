"""The client against servers of others, what all of them must do: granian, hypercorn, uvicorn, nginx, caddy, haproxy.

All speak TLS; the version is agreed by ALPN. nginx, caddy and haproxy stand before an upstream. Those that the machine
does not have are skipped (`make test` installs them where it may).
"""

import asyncio
import contextlib
import ssl

import httpx2
import psutil
import pytest

import stormline
from stormline.core import errors
from stormline.testing.foreign import PROGRAMS, find, running_server
from stormline.testing.world import make_pki

pytestmark = pytest.mark.loopback
SERVERS = ("granian", "hypercorn", "uvicorn", "nginx", "caddy", "haproxy")
BODY = bytes(range(256)) * 8_000  # 2 MB
MEMORY_MAX = 24 * 1024 * 1024
"""What a slow reader may cost beside its 64 MB: windows, kernel buffers, and what else the process does meanwhile."""


@pytest.fixture(scope="module", name="pki")
def _pki(tmp_path_factory):
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module", name="files")
def _files(pki):
    return pki.ca.issue("origin", names=["localhost"])


@pytest.fixture(scope="module", name="upstream")
def _upstream(tmp_path_factory):
    with running_server("granian", tmp_path_factory.mktemp("upstream"), None, http="1") as server:
        yield server.address


@pytest.fixture(scope="module", name="servers")
def _servers(files, upstream, tmp_path_factory):
    """Start a server at its first use."""
    with contextlib.ExitStack() as stack:
        running = {}

        def start(name):
            if name not in running:
                folder = tmp_path_factory.mktemp(name)
                running[name] = stack.enter_context(running_server(name, folder, files, upstream=upstream))
            return running[name]

        yield start


@pytest.fixture(
    scope="module",
    name="place",
    params=[(name, version) for name in SERVERS for version in ("1.1", "2") if (name, version) != ("uvicorn", "2")],
    ids=lambda param: "-".join(param),
)
def _place(request, servers):
    name, version = request.param
    if name in PROGRAMS and find(name) is None:
        pytest.skip(f"{name} is not installed")
    return servers(name), version


def trust_in(pki, *alpn):
    context = ssl.create_default_context(cadata=pki.ca.ca_pem)
    context.set_alpn_protocols(alpn)
    return context


@pytest.fixture(name="client")
async def _client(place, pki):
    server, version = place
    trust = trust_in(pki, *(("h2", "http/1.1") if version == "2" else ("http/1.1",)))
    async with httpx2.AsyncClient(
        transport=stormline.AsyncTransport(verify=trust), base_url=server.url(), timeout=20.0
    ) as client:
        yield client


async def pieces(body, size=77_777):
    for start in range(0, len(body), size):
        yield body[start : start + size]


def reused(response):
    return response.extensions["stormline"].record.attempts[-1].reused


async def test_every_kind_of_request_and_answer_passes(client, place):
    answer = await client.get("/hello")
    assert (answer.status_code, answer.text) == (200, "hello")
    assert answer.http_version == {"1.1": "HTTP/1.1", "2": "HTTP/2"}[place[1]]
    head = await client.head("/hello")
    assert (head.content, head.headers["content-length"]) == (b"", "5")
    none = await client.get("/none")
    assert (none.status_code, none.content) == (204, b"")
    for path in ("/echo", "/chunked"):
        for body in (b"", b"small", BODY):
            for content in (body, pieces(body)):
                answer = await client.post(path, content=content)
                assert (answer.status_code, answer.content == body) == (200, True), (path, len(body))
    for method in ("PUT", "PATCH", "DELETE", "OPTIONS"):
        assert (await client.request(method, "/echo", content=b"x")).content == b"x"
    assert len((await client.get("/text")).text) == 100_000
    assert reused(answer)


async def test_expect_100_continue_is_answered_once_the_body_was_sent(client):
    headers = {"expect": "100-continue"}
    for content in (b"x" * 100_000, pieces(BODY)):
        answer = await client.post("/echo", content=content, headers=headers)
        assert answer.status_code == 200
        assert len(answer.content) in (100_000, len(BODY))
    assert (await client.get("/hello")).text == "hello"


async def test_large_heads_pass_both_ways(client):
    headers = {f"x-mine-{number}": "v" * 100 for number in range(30)}
    answer = await client.get("/headers?q=" + "a" * 3000, headers=headers)
    assert [answer.headers[f"x-many-{number}"] for number in range(60)] == ["v" * 200] * 60


async def test_a_hundred_at_once_get_each_its_own_answer(client):
    async def ask(number):
        text = f"{number}".encode() * 100
        return (await client.post("/echo", content=text)).content == text

    assert all(await asyncio.gather(*(ask(number) for number in range(100))))
    answers = await asyncio.gather(*(client.get("/large/65536") for _ in range(100)))
    assert {len(answer.content) for answer in answers} == {65536}


async def test_slow_reader_holds_little_and_hinders_nobody(client):
    size = 64 * 1024 * 1024
    process = psutil.Process()
    async with client.stream("GET", f"/large/{size}") as answer:
        chunks = answer.aiter_raw()
        got = len(await anext(chunks))
        before = process.memory_info().rss
        for _ in range(10):
            assert (await client.post("/echo", content=b"meanwhile")).content == b"meanwhile"
            await asyncio.sleep(0.02)
        assert process.memory_info().rss - before < MEMORY_MAX
        async for chunk in chunks:
            got += len(chunk)
    assert got == size


@pytest.mark.parametrize("streamed", [False, True])
async def test_early_refusal_of_a_large_upload_is_the_answer(client, place, streamed):
    if (place[0].name, place[1]) == ("hypercorn", "2"):
        pytest.skip("hypercorn 0.18 ends the connection itself: a KeyError, as the request's stream is gone")
    for _ in range(5):
        body = bytes(20_000_000)
        answer = await client.post("/refuse", content=pieces(body) if streamed else body)
        assert answer.status_code == 413
    assert (await client.get("/hello")).text == "hello"


async def test_answers_left_in_the_middle_leave_the_client_working(client):
    for _ in range(5):
        async with client.stream("GET", "/large/8388608") as answer:
            await anext(answer.aiter_raw())
        assert (await client.post("/echo", content=b"after")).content == b"after"


async def test_requests_given_up_leave_the_client_working(client):
    for _ in range(3):
        tasks = [asyncio.create_task(client.get("/slow")) for _ in range(6)]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await client.get("/hello")).text == "hello"


async def test_silence_of_one_answer_is_a_read_timeout_and_no_more(client):
    quick = [asyncio.create_task(client.get("/large/1048576")) for _ in range(5)]
    with pytest.raises(httpx2.ReadTimeout) as caught:
        await client.get("/slow", timeout=0.3)
    assert isinstance(caught.value, errors.DeadlineExceeded)
    assert {len(answer.content) for answer in await asyncio.gather(*quick)} == {1048576}
    assert (await client.get("/hello")).text == "hello"
