"""What single servers do that others do not: trailers, padding, tiny windows, codings, HTTP/1.0."""

import asyncio
import contextlib
import gzip
import random
import ssl
import sys

import httpx2
import pytest

import stormline
from stormline.testing.foreign import find, running_server
from stormline.testing.origin import plain, running_origin
from stormline.testing.world import make_pki, wait_until

pytestmark = pytest.mark.loopback
LARGE = random.Random(1).randbytes(2_000_000)
TEXT = "the same again and again " * 4000


@pytest.fixture(scope="module", name="pki")
def _pki(tmp_path_factory):
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module", name="files")
def _files(pki):
    return pki.ca.issue("origin", names=["localhost"])


@pytest.fixture(name="start")
async def _start(files, tmp_path):
    """Start a server with options of its own; its folder has `large` and `text`."""
    (tmp_path / "large").write_bytes(LARGE)
    (tmp_path / "text").write_text(TEXT)
    with contextlib.ExitStack() as stack:

        async def start(name, options="", upstream=None):
            if find(name) is None:
                pytest.skip(f"{name} is not installed")
            server = running_server(name, tmp_path, files, options=options, upstream=upstream)
            return await asyncio.to_thread(stack.enter_context, server)

        yield start
        await asyncio.to_thread(stack.close)


@pytest.fixture(name="client_of")
async def _client_of(pki):
    async with contextlib.AsyncExitStack() as stack:

        async def client_of(url, *alpn):
            trust = ssl.create_default_context(cadata=pki.ca.ca_pem)
            trust.set_alpn_protocols(alpn or ["h2", "http/1.1"])
            transport = stormline.AsyncTransport(verify=trust)
            return await stack.enter_async_context(httpx2.AsyncClient(transport=transport, base_url=url, timeout=20.0))

        yield client_of


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--trailer=x-sum:1",
        "--padding=200",
        "--window-bits=10 --connection-window-bits=16",
        "--max-concurrent-streams=3",
        "--push=/text=/large",
        "--header-table-size=0 --encoder-header-table-size=0",
        "--early-response",
    ],
    ids=lambda options: options.replace("--", "") or "plain",
)
async def test_nghttpd_serves_files_whole_whatever_its_settings(start, client_of, options):
    server = await start("nghttpd", options)
    client = await client_of(server.url())
    answers = await asyncio.gather(*(client.get("/large") for _ in range(20)))
    assert all(answer.content == LARGE for answer in answers)
    for _ in range(5):
        assert (await client.get("/text")).text == TEXT
        assert (await client.get("/missing")).status_code == 404
        head = await client.head("/large")
        assert (head.headers["content-length"], head.content) == (str(len(LARGE)), b"")
        assert (await client.post("/text", content=LARGE)).status_code in (200, 405)
    assert head.http_version == "HTTP/2"


@pytest.mark.parametrize("alpn", ["h2", "http/1.1"])
async def test_nginx_serves_ranges_conditions_and_gzip(start, client_of, alpn):
    options = "gzip on; gzip_types *; gzip_min_length 1; location ~ ^/(large|text)$ {{ root {folder}; }}"
    server = await start("nginx", options.format(folder="."))
    client = await client_of(server.url(), alpn)
    answer = await client.get("/text")
    assert (answer.headers["content-encoding"], answer.text) == ("gzip", TEXT)
    assert int(answer.extensions["stormline"].record.bytes_down) < len(TEXT) / 10
    part = await client.get("/large", headers={"range": "bytes=1000-1999", "accept-encoding": "identity"})
    assert (part.status_code, part.content) == (206, LARGE[1000:2000])
    parts = await client.get("/large", headers={"range": "bytes=0-9,20-29", "accept-encoding": "identity"})
    assert parts.headers["content-type"].startswith("multipart/byteranges")
    full = await client.get("/large", headers={"accept-encoding": "identity"})
    same = await client.get("/large", headers={"if-none-match": full.headers["etag"], "accept-encoding": "identity"})
    assert (same.status_code, same.content) == (304, b"")
    for path, name, status in (("/" + "a" * 20_000, "x-small", 414), ("/text", "x-large", 400)):
        request = client.get(path, headers={name: "v" * (40_000 if name == "x-large" else 1)})
        if alpn == "h2":  # there nginx ends the whole connection: GOAWAY, ENHANCE_YOUR_CALM
            with pytest.raises(httpx2.TransportError):
                await request
        else:
            assert (await request).status_code == status
    assert (await client.get("/text")).text == TEXT


@pytest.mark.parametrize("alpn", ["h2", "http/1.1"])
async def test_caddy_encodes_what_comes_from_its_upstream(start, client_of, alpn):
    async def answer(request, writer):
        writer.write(plain(TEXT.encode(), content_type="text/plain"))

    async with running_origin(answer) as origin:
        server = await start("caddy", "encode gzip", upstream=origin.address)
        client = await client_of(server.url(), alpn)
        answers = await asyncio.gather(*(client.get("/") for _ in range(20)))
    assert {(each.headers["content-encoding"], each.text == TEXT) for each in answers} == {("gzip", True)}


@pytest.mark.parametrize("alpn", ["h2", "http/1.1"])
@pytest.mark.parametrize("name", ["nginx", "caddy", "haproxy"])
async def test_upstream_that_breaks_off_in_the_body_is_an_error_and_no_short_body(start, client_of, name, alpn):
    async def half(request, writer):
        chunked = request.target == "/chunked"
        head = b"transfer-encoding: chunked\r\n\r\n3e8\r\n" if chunked else b"content-length: 100000\r\n\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + head + bytes(1000))
        await writer.drain()
        await asyncio.sleep(0.05)  # so that the proxy passes on what it has
        writer.close()

    async with running_origin(half) as origin:
        server = await start(name, upstream=origin.address)
        client = await client_of(server.url(), alpn)
        # Of an upstream's broken chunks caddy (2.6) makes an answer that ends well, and so does haproxy over HTTP/2.
        for path in ("/length", "/chunked") if name == "nginx" else ("/length",):
            with pytest.raises((httpx2.ReadError, httpx2.RemoteProtocolError)):
                await client.get(path)


@pytest.mark.parametrize("alpn", ["h2", "http/1.1"])
@pytest.mark.parametrize("name", ["nginx", "caddy", "haproxy"])
async def test_event_stream_through_a_proxy_comes_piece_by_piece(start, client_of, name, alpn):
    go = asyncio.Semaphore(0)

    async def events(request, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number in range(5):
            await go.acquire()
            writer.write(b"9\r\ndata: %d\n\n\r\n" % number)
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async with running_origin(events) as origin:
        server = await start(name, upstream=origin.address)
        client = await client_of(server.url(), alpn)
        got = []
        go.release()  # nginx passes the head on with the first piece
        async with client.stream("GET", "/") as answer:
            async for line in answer.aiter_lines():
                if line:
                    got.append(line)
                    go.release()  # the next one is sent only when this one has come
    assert got == [f"data: {number}" for number in range(5)]


async def test_http_1_0_server_is_read_to_the_end_of_each_connection(client_of, tmp_path):
    (tmp_path / "large").write_bytes(LARGE)
    (tmp_path / "folder").mkdir()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "0", cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        line = (await process.stdout.readline()).decode()
        client = await client_of(f"http://127.0.0.1:{line.split(' port ')[1].split()[0]}")
        answers = await asyncio.gather(*(client.get("/large") for _ in range(5)))
        assert {(each.http_version, each.content == LARGE) for each in answers} == {("HTTP/1.0", True)}
        assert (await client.head("/large")).headers["content-length"] == str(len(LARGE))
        assert (await client.get("/folder/")).status_code == 200
        assert (await client.post("/large", content=b"x" * 1000)).status_code == 501
        assert (await client.get("/nothing")).status_code == 404
    finally:
        process.terminate()
        await process.wait()
        process._transport.close()


async def test_http_1_0_answer_without_a_length_ends_with_its_connection(client_of):
    async def answer(request, writer):
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + TEXT.encode())
        await writer.drain()
        writer.close()

    async with running_origin(answer) as origin:
        client = await client_of(origin.url())
        for _ in range(3):
            assert (await client.get("/")).text == TEXT
        assert origin.connections == 3


async def test_compressed_request_body_and_answer_stay_as_they_are_raw(client_of):
    packed = gzip.compress(TEXT.encode())

    async def answer(request, writer):
        assert request.body == packed
        writer.write(plain(packed, content_encoding="gzip"))

    async with running_origin(answer) as origin:
        client = await client_of(origin.url())
        async with client.stream("POST", "/", content=packed, headers={"content-encoding": "gzip"}) as response:
            assert b"".join([chunk async for chunk in response.aiter_raw()]) == packed
        await wait_until(lambda: len(origin.requests) == 1)
