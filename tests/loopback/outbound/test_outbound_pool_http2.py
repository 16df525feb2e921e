"""The pool where an origin speaks HTTP/2: one connection for all, against granian in a process of its own."""

import asyncio
import os
import random
import signal
import socket
import sys

import psutil
import pytest

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.clock import SystemClock
from stormline.net.resolve import Resolver
from stormline.net.trust import roles_context
from stormline.outbound.dial import Dialer
from stormline.outbound.messages import HttpRequest
from stormline.outbound.pool import HttpPool

pytestmark = pytest.mark.loopback

APP = """
import asyncio
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    if scope["path"] == "/slow":
        await asyncio.sleep(3600)
    body = scope["http_version"].encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})
"""


@pytest.fixture(name="origin")
async def _origin(authority, tmp_path):
    (tmp_path / "served.py").write_text(APP)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = Address(*sock.getsockname())
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "granian", "--interface", "asgi", "--port", str(address.port), "--http", "auto",
        "--no-log", "--ssl-certificate", authority.certificate, "--ssl-keyfile", authority.key, "served:app",
        cwd=tmp_path, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    for _ in range(400):
        try:
            _, writer = await asyncio.open_connection(*address)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            await writer.wait_closed()
            break
    yield address
    process.send_signal(signal.SIGCONT)
    process.terminate()
    await asyncio.wait_for(process.wait(), 20)


@pytest.fixture(name="pools")
def _pools(authority):
    made = []

    def make(*alpn, **options):
        dialer = Dialer(Resolver(), roles_context(authority.pem, alpn or ("h2", "http/1.1")))
        made.append(HttpPool(dialer, SystemClock(), **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def _request(address, path=b"/", method="GET", body=None):
    return HttpRequest(method, "https", "a.test", address.port, path, (), body)


async def _version(pool, address, **options):
    response = await pool.request(_request(address), deadline_s=20.0, addresses=(address,), **options)
    return (await response.read(100)).decode()


async def test_requests_at_once_share_the_one_connection(pools, origin):
    pool = pools()
    assert set(await asyncio.gather(*(_version(pool, origin) for _ in range(60)))) == {"2"}
    assert (pool.open_connections, pool.idle_connections) == (1, 1)


async def test_origin_that_is_offered_only_http_1_gets_connections_side_by_side(pools, origin):
    pool = pools("http/1.1")
    assert set(await asyncio.gather(*(_version(pool, origin) for _ in range(8)))) == {"1.1"}
    assert pool.open_connections > 1


async def test_fresh_request_goes_over_a_new_connection_and_leaves_others_theirs(pools, origin):
    pool = pools()
    await _version(pool, origin)
    slow = asyncio.create_task(pool.request(_request(origin, b"/slow"), deadline_s=20.0, addresses=(origin,)))
    await asyncio.sleep(0.1)
    assert await _version(pool, origin, newer_than=asyncio.get_running_loop().time()) == "2"
    assert pool.open_connections == 2  # the old one still carries the slow request
    assert not slow.done()
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    assert await _version(pool, origin) == "2"
    assert pool.open_connections == 1


async def test_cancelled_requests_leave_every_stream_free_and_the_pool_working(pools, origin):
    pool = pools()
    chance = random.Random(1)

    async def one():
        path = b"/slow" if chance.random() < 0.5 else b"/"
        try:
            async with asyncio.timeout(chance.random() * 0.02):
                response = await pool.request(_request(origin, path), deadline_s=20.0, addresses=(origin,))
                await response.read(100)
        except TimeoutError:
            pass

    for _ in range(20):
        await asyncio.gather(*(one() for _ in range(50)))
    assert await _version(pool, origin) == "2"
    assert pool.idle_connections == pool.open_connections <= 2


async def test_time_out_of_one_request_hurts_no_other(pools, origin):
    pool = pools()
    await _version(pool, origin)
    slow = asyncio.create_task(
        pool.request(_request(origin, b"/slow"), deadline_s=20.0, read_timeout_s=0.2, addresses=(origin,))
    )
    others = await asyncio.gather(*(_version(pool, origin) for _ in range(20)))
    with pytest.raises(errors.DeadlineExceeded) as caught:
        await slow
    assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.FIRST_BYTE, True)
    assert set(others) == {"2"}
    assert await _version(pool, origin) == "2"
    assert pool.open_connections == 1


async def test_connection_that_rests_is_closed_after_its_time(pools, origin, until):
    pool = pools(idle_s=0.1)
    await _version(pool, origin)
    await until(lambda: pool.open_connections == 0)
    assert await _version(pool, origin) == "2"


async def test_resting_connection_makes_room_for_another_place(pools, origin):
    pool = pools(connections_max=1)
    assert await _version(pool, origin) == "2"
    assert await _version(pool, origin, server_name="a.test") == "2"
    assert pool.open_connections == 1


async def test_closed_pool_fails_what_is_under_way_and_takes_no_more(pools, origin):
    pool = pools()
    await _version(pool, origin)
    slow = asyncio.create_task(pool.request(_request(origin, b"/slow"), deadline_s=20.0, addresses=(origin,)))
    await asyncio.sleep(0.1)
    pool.close()
    with pytest.raises(errors.TransportError):
        await slow
    with pytest.raises(errors.LocalProtocolError, match="closed"):
        await _version(pool, origin)
    assert pool.open_connections == 0


def _stop_and_go(address, number):
    """Send a signal to the server that listens there, workers and all."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == address.port and connection.pid:
            os.kill(connection.pid, number)


async def test_connection_that_died_in_silence_is_left_after_the_first_vain_wait(pools, origin, until, monkeypatch):
    """A link that is up and dead: without a look at the connection every later request would be lost on it."""
    monkeypatch.setattr(limits, "H2_DOUBT_S", 0.1)
    monkeypatch.setattr(limits, "H2_CHECK_S", 0.3)
    pool = pools()
    await _version(pool, origin)
    _stop_and_go(origin, signal.SIGSTOP)
    try:
        with pytest.raises(errors.DeadlineExceeded):
            await pool.request(_request(origin), deadline_s=20.0, read_timeout_s=0.2, addresses=(origin,))
        await until(lambda: pool.open_connections == 0)
    finally:
        _stop_and_go(origin, signal.SIGCONT)
    assert await _version(pool, origin) == "2"


async def test_connection_that_is_only_slow_to_answer_one_request_is_kept(pools, origin, monkeypatch):
    monkeypatch.setattr(limits, "H2_DOUBT_S", 0.1)
    pool = pools()
    with pytest.raises(errors.DeadlineExceeded):
        await pool.request(_request(origin, b"/slow"), deadline_s=20.0, read_timeout_s=0.2, addresses=(origin,))
    await asyncio.sleep(0.3)
    assert await _version(pool, origin) == "2"
    assert pool.open_connections == 1
