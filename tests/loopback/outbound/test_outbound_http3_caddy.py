"""HTTP/3 with caddy, a server in another language and process; skipped where the machine has none."""

import asyncio
import random

import pytest

from stormline.net.quic import QuicTickets
from stormline.net.quictrust import roles_trust
from stormline.outbound import http3
from stormline.outbound.messages import HttpRequest
from stormline.testing.foreign import NAME, find, running_server
from stormline.testing.http2 import read
from stormline.testing.world import make_pki

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(120)]
BODY = random.Random(1).randbytes(2_000_000)
PATIENCE_S = 20.0


@pytest.fixture(scope="module", name="pki")
def _pki(tmp_path_factory):
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module", name="address")
def _address(pki, tmp_path_factory):
    if find("caddy") is None:
        pytest.skip("caddy is not installed")
    files = pki.ca.issue("origin", names=[NAME])
    upstream, folder = tmp_path_factory.mktemp("upstream"), tmp_path_factory.mktemp("caddy")
    with (
        running_server("granian", upstream, None, http="1") as app,
        running_server("caddy", folder, files, upstream=app.address, http="3") as server,
    ):
        yield server.address


@pytest.fixture(name="connection")
async def _connection(address, pki):
    connection = await http3.connect(address, NAME, roles_trust(pki.ca.ca_pem), timeout_s=PATIENCE_S)
    yield connection
    connection.close()


async def send(connection, path, method="GET", body=None):
    return await connection.exchange(
        connection.encode(HttpRequest(method, "https", NAME, connection.stream.peer.port, path, (), body)),
        deadline_at=asyncio.get_running_loop().time() + 100.0,
        done=lambda _: None,
        on_stage=lambda _: None,
    )


async def get(connection, path=b"/hello", **more):
    response = await send(connection, path, **more)
    return response.status, await read(response)


async def test_bodies_pass_whole_both_ways(connection):
    assert await get(connection) == (200, b"hello")
    status, body = await get(connection, b"/large/2000128")
    assert (status, len(body)) == (200, 2_000_128)
    assert await get(connection, b"/echo", method="POST", body=BODY) == (200, BODY)
    response = await send(connection, b"/large/2000128", "HEAD")
    assert (response.status, await read(response)) == (200, b"")
    assert (await get(connection, b"/none"), connection.open_streams) == ((204, b""), 0)


async def test_hundred_at_once_and_cancelled_ones_leave_it_usable(connection):
    assert set(await asyncio.gather(*[get(connection) for _ in range(100)])) == {(200, b"hello")}
    for _ in range(10):
        tasks = [asyncio.create_task(send(connection, b"/large/2000128")) for _ in range(50)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        for response in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(response, BaseException):
                await response.aclose()
    assert set(await asyncio.gather(*[get(connection) for _ in range(100)])) == {(200, b"hello")}
    assert connection.open_streams == 0


async def test_migration_to_another_port_works_or_closes(connection):
    """Its older versions forbid migration."""
    assert await get(connection) == (200, b"hello")
    moved = await connection.migrate(PATIENCE_S)
    assert moved is not connection.closed
    if moved:
        assert await get(connection) == (200, b"hello")


@pytest.mark.flaky(reruns=1)  # one in fifteen ends with "missing onertt packet key", see docs/plan.md
async def test_second_connection_resumes(address, pki):
    tickets, trust = QuicTickets(), roles_trust(pki.ca.ca_pem)
    for resumed in (False, True):
        connection = await http3.connect(address, NAME, trust, timeout_s=PATIENCE_S, tickets=tickets, early=resumed)
        assert await get(connection) == (200, b"hello")
        assert connection.stream.resumed == resumed
        connection.close()
