"""The pool against real servers: uvicorn in this process, granian as a process of its own, plain and TLS."""

import asyncio
import random
import socket
import subprocess
import sys

import pytest
import uvicorn
from granian.constants import HTTPModes

from stormline.core import errors
from stormline.core.values import Address
from stormline.net.clock import SystemClock
from stormline.net.resolve import Resolver
from stormline.net.trust import roles_context
from stormline.outbound.dial import Dialer
from stormline.outbound.messages import HttpRequest
from stormline.outbound.pool import HttpPool

pytestmark = pytest.mark.loopback
LARGE = random.Random(1).randbytes(2_000_000)

APP = """
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    headers = [(b"x-path", scope["path"].encode()), (b"x-query", scope["query_string"])]
    status = 204 if scope["path"] == "/none" else 200
    if scope["path"] == "/length":
        headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if status == 204 or scope["path"] == "/length":
        await send({"type": "http.response.body", "body": b"" if status == 204 else body})
        return
    for start in range(0, len(body), 100_000):
        await send({"type": "http.response.body", "body": body[start:start + 100_000], "more_body": True})
    await send({"type": "http.response.body", "body": b""})
"""


@pytest.fixture(name="start_uvicorn")
async def _start_uvicorn(authority, until):
    running = []

    async def start(tls):
        namespace = {}
        exec(APP, namespace)
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        files = {"ssl_certfile": authority.certificate, "ssl_keyfile": authority.key} if tls else {}
        config = uvicorn.Config(namespace["app"], lifespan="off", log_config=None, ws="none", http="httptools", **files)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server._serve([sock]))
        running.append((server, task, sock))
        await until(lambda: server.started)
        return Address(*sock.getsockname())

    yield start
    for server, task, sock in running:
        server.should_exit = True
        await task
        sock.close()


@pytest.fixture(name="start_granian")
async def _start_granian(authority, tmp_path):
    running = []

    async def start(tls):
        (tmp_path / "served.py").write_text(APP)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            address = Address(*sock.getsockname())
        files = ["--ssl-certificate", authority.certificate, "--ssl-keyfile", authority.key] if tls else []
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "granian", "--interface", "asgi", "--port", str(address.port), "--http",
             HTTPModes.http1.value, "--no-log", *files, "served:app",
            cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        running.append(process)
        async with asyncio.timeout(30):
            while True:
                try:
                    _, writer = await asyncio.open_connection(*address)
                    writer.close()
                    return address
                except OSError:
                    await asyncio.sleep(0.02)

    yield start
    for process in running:
        process.terminate()
        await asyncio.wait_for(process.wait(), 20)


@pytest.fixture(name="pool")
async def _pool(authority):
    pool = HttpPool(Dialer(Resolver(), roles_context(authority.pem, ["http/1.1"])), SystemClock())
    yield pool
    await pool.aclose()


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("server", ["uvicorn", "granian"])
async def test_pool_with_a_real_server_carries_every_kind_of_body(start_uvicorn, start_granian, pool, server, tls):
    address = await {"uvicorn": start_uvicorn, "granian": start_granian}[server](tls)
    scheme = "https" if tls else "http"

    async def send(method, target, body=None, host="a.test"):
        message = HttpRequest(method, scheme, host, address.port, target, ((b"Accept", b"*/*"),), body)
        response = await pool.request(message, deadline_s=20, addresses=(address,))
        return response, await response.read(5_000_000)

    async def pieces():
        for start in range(0, len(LARGE), 333_333):
            yield LARGE[start : start + 333_333]

    response, body = await send("GET", b"/a%20b?c=%20d")
    headers = dict(response.headers)
    assert (response.status, body, headers[b"x-path"], headers[b"x-query"]) == (200, b"", b"/a b", b"c=%20d")
    for target in (b"/chunked", b"/length"):
        for source in (b"small", LARGE, pieces()):
            expected = LARGE if not isinstance(source, bytes) else source
            response, body = await send("POST", target, source)
            assert (response.status, body == expected, response.reused) == (200, True, True)
    assert (await send("HEAD", b"/length"))[1] == b""
    assert (await send("GET", b"/none"))[0].status == 204
    assert pool.open_connections == 1
    together = await asyncio.gather(*[send("POST", b"/length", b"%d" % number) for number in range(50)])
    assert [body for _, body in together] == [b"%d" % number for number in range(50)]
    assert pool.open_connections <= 32
    if tls:
        with pytest.raises(errors.TlsError):
            await send("GET", b"/", host="b.test")
