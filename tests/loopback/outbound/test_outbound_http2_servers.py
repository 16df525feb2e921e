"""HTTP/2 connections with real servers: granian (hyper's h2) and nginx, over TLS with ALPN."""

import asyncio
import random
import shutil
import socket
import subprocess
import sys

import pytest

from stormline.core import limits
from stormline.core.values import Address
from stormline.net.stream import open_tcp
from stormline.net.tls import start_tls
from stormline.net.trust import roles_context
from stormline.outbound.http2 import Http2Connection
from stormline.outbound.http2_codec import encode
from stormline.outbound.messages import HttpRequest

pytestmark = pytest.mark.loopback
LARGE = random.Random(1).randbytes(2_000_000)

APP = """
import asyncio
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    if scope["path"] == "/slow":
        await asyncio.sleep(3600)
    headers = [(b"x-path", scope["path"].encode()), (b"x-query", scope["query_string"])]
    status = 204 if scope["path"] == "/none" else 200
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for start in range(0, len(body), 100_000):
        await send({"type": "http.response.body", "body": body[start:start + 100_000], "more_body": True})
    await send({"type": "http.response.body", "body": b""})
"""

NGINX = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_max_body_size 1m;
    keepalive_requests {requests};
    server {{
        listen 127.0.0.1:{port} ssl http2;
        ssl_protocols TLSv1.3;
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        root {folder};
        location = /hello {{ return 200 "hello"; }}
        location = /none {{ return 204; }}
    }}
}}
"""


def _free():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return Address(*sock.getsockname())


async def _until_up(address, process):
    async with asyncio.timeout(30):
        while process.returncode is None:
            try:
                _, writer = await asyncio.open_connection(*address)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return
    raise AssertionError("the server did not start")


@pytest.fixture(name="run")
async def _run():
    processes = []

    async def run(*command, cwd):
        process = await asyncio.create_subprocess_exec(
            *map(str, command), cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 20)


@pytest.fixture(name="granian")
async def _granian(authority, tmp_path, run):
    (tmp_path / "served.py").write_text(APP)
    address = _free()
    process = await run(
        sys.executable, "-m", "granian", "--interface", "asgi", "--port", address.port, "--http", "2", "--no-log",
        "--ssl-certificate", authority.certificate, "--ssl-keyfile", authority.key, "served:app", cwd=tmp_path,
    )  # fmt: skip
    await _until_up(address, process)
    return address


@pytest.fixture(name="start_nginx")
def _start_nginx(authority, tmp_path, run):
    program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        pytest.skip("nginx is not installed (apt-get install nginx-light)")

    async def start(requests):
        address = _free()
        config = tmp_path / "nginx.conf"
        tmp_path.chmod(0o755)
        config.write_text(
            NGINX.format(
                folder=tmp_path, port=address.port, certificate=authority.certificate, key=authority.key,
                requests=requests,
            )
        )  # fmt: skip
        (tmp_path / "large").write_bytes(LARGE)
        command = [program, "-c", config, "-e", tmp_path / "error.log", "-p", tmp_path, "-g", "user root;"]
        process = await run(*command, cwd=tmp_path)
        await _until_up(address, process)
        return address

    return start


@pytest.fixture(name="connect")
async def _connect(authority):
    connections = []

    async def connect(address):
        stream = await start_tls(await open_tcp(address), roles_context(authority.pem, ["h2"]), "a.test")
        assert stream.alpn == "h2"
        connections.append(Http2Connection(stream))
        return connections[-1]

    yield connect
    for connection in connections:
        connection.close()
    await asyncio.sleep(0.01)


async def send(connection, method="GET", target=b"/", body=None, **more):
    message = HttpRequest(method, "https", "a.test", 443, target, ((b"Accept", b"*/*"),), body)
    return await connection.exchange(
        encode(message),
        deadline_at=asyncio.get_running_loop().time() + 20,
        done=lambda _: None,
        on_stage=lambda _: None,
        **more,
    )


async def fetch(connection, *arguments):
    response = await send(connection, *arguments)
    return response, await response.read(5_000_000)


async def _pieces():
    for start in range(0, len(LARGE), 333_333):
        yield LARGE[start : start + 333_333]


async def test_granian_carries_every_kind_of_body(granian, connect):
    connection = await connect(granian)
    response, body = await fetch(connection, "GET", b"/a%20b?c=%20d")
    headers = dict(response.headers)
    assert (response.status, body, headers[b"x-path"], headers[b"x-query"]) == (200, b"", b"/a b", b"c=%20d")
    for source in (b"small", LARGE, _pieces()):
        response, body = await fetch(connection, "POST", b"/echo", source)
        assert (response.status, body == (source if isinstance(source, bytes) else LARGE)) == (200, True)
    assert (await fetch(connection, "HEAD", b"/"))[1] == b""
    assert (await fetch(connection, "GET", b"/none"))[0].status == 204
    together = await asyncio.gather(*[fetch(connection, "POST", b"/", b"%d" % number) for number in range(200)])
    assert [body for _, body in together] == [b"%d" % number for number in range(200)]
    large = await asyncio.gather(*[fetch(connection, "POST", b"/", LARGE) for _ in range(8)])
    assert all(body == LARGE for _, body in large)
    assert (connection.open_streams, connection.usable, await connection.check(5)) == (0, True, True)


async def test_granian_is_not_provoked_by_cancelled_requests(granian, connect):
    """Its guard ends a connection at 20 resets at once (CVE-2023-44487); others in flight would fail with it."""
    for _ in range(8):
        connection = await connect(granian)
        slow = [asyncio.create_task(send(connection, "GET", b"/slow")) for _ in range(80)]
        await asyncio.sleep(0.02)
        echo = asyncio.create_task(fetch(connection, "POST", b"/echo", LARGE))
        await asyncio.sleep(0)
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)
        assert all(task.cancelled() for task in slow)
        assert (await echo)[1] == LARGE
        assert connection.retired


async def test_granian_serves_on_after_slow_cancels(granian, connect, until):
    connection = await connect(granian)
    for _ in range(5):
        tasks = [asyncio.create_task(send(connection, "GET", b"/slow")) for _ in range(3)]
        await until(lambda: connection.open_streams == 3)
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert (await fetch(connection, "POST", b"/", b"x"))[1] == b"x"
    assert (connection.open_streams, connection.usable) == (0, True)


async def test_nginx_serves_files_together_and_answers_pings(start_nginx, connect):
    connection = await connect(await start_nginx(1000))
    assert (await fetch(connection, "GET", b"/hello"))[1] == b"hello"
    assert (await fetch(connection, "GET", b"/none"))[0].status == 204
    response, body = await fetch(connection, "HEAD", b"/large")
    assert (dict(response.headers)[b"content-length"], body) == (b"%d" % len(LARGE), b"")
    bodies = await asyncio.gather(*[fetch(connection, "GET", b"/large") for _ in range(10)])
    assert all(body == LARGE for _, body in bodies)
    response, _ = await fetch(connection, "GET", b"/missing")
    assert response.status == 404
    assert (connection.open_streams, connection.usable, await connection.check(5)) == (0, True, True)


async def test_nginx_early_answer_to_a_large_body_is_given_and_the_connection_kept(start_nginx, connect):
    connection = await connect(await start_nginx(1000))
    response, _ = await fetch(connection, "POST", b"/hello", LARGE)
    assert response.status == 413
    assert (await fetch(connection, "GET", b"/hello"))[1] == b"hello"
    assert connection.open_streams == 0


async def test_nginx_goaway_after_its_number_of_requests_loses_none(start_nginx, connect, until):
    """nginx says GOAWAY with the hundredth request in flight; what it has taken is answered all the same."""
    address = await start_nginx(100)
    connection = await connect(address)
    answered = 0
    while not connection.retired:
        results = await asyncio.gather(
            *[fetch(connection, "GET", b"/large") for _ in range(10)], return_exceptions=True
        )  # fmt: skip
        for result in results:
            if isinstance(result, BaseException):
                assert result.maybe_delivered is False
            else:
                assert result[1] == LARGE
                answered += 1
    assert 100 <= answered <= 101
    await until(lambda: connection.closed)


async def test_nginx_cancelled_downloads_leave_the_others_whole(start_nginx, connect):
    connection = await connect(await start_nginx(100_000))
    for _ in range(3):
        responses = [await send(connection, "GET", b"/large") for _ in range(5)]
        whole = asyncio.create_task(fetch(connection, "GET", b"/large"))
        for response in responses:
            await response.source.read()
            await response.aclose()
        assert (await whole)[1] == LARGE
    assert connection.open_streams == 0
    assert connection._codec.unread_bytes == 0
    assert limits.H2_RESETS_BURST >= 15
    assert connection.usable
