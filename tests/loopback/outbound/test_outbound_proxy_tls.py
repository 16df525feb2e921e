"""`https` proxies: tinyproxy behind a relay that ends TLS, so that TLS to origins runs inside TLS to the proxy."""

import asyncio
import hashlib
import random

import h2.events
import pytest

from stormline.core import errors
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net import tcpinfo
from stormline.net.clock import SystemClock
from stormline.net.tls import TlsStream
from stormline.net.trust import roles_context
from stormline.outbound.dial import Dialer
from stormline.outbound.messages import HttpRequest
from stormline.outbound.pool import HttpPool
from stormline.outbound.proxy import ProxyDialer, forwarded
from stormline.outbound.proxy_rules import explicit
from stormline.testing import proxies
from stormline.testing.http2 import Peer, read

pytestmark = pytest.mark.loopback

LARGE = random.Random(5).randbytes(2_000_000)


class Here:
    """A resolver for which every name is this machine."""

    async def resolve(self, host, port):
        return (Address("127.0.0.1", port),)


@pytest.fixture(scope="module", name="tinyproxy")
def _tinyproxy(tmp_path_factory):
    if not proxies.installed("tinyproxy"):
        pytest.skip("tinyproxy is not installed")
    with proxies.running_tinyproxy(tmp_path_factory.mktemp("tinyproxy")) as running:
        yield running


@pytest.fixture(name="front")
async def _front(authority, tinyproxy):
    """Give the address of a relay to tinyproxy that speaks TLS as a.test."""

    async with proxies.relaying(tinyproxy.address, authority.server) as address:
        yield address


@pytest.fixture(name="behind")
def _behind(authority):
    """Make dialers behind an https proxy; roles, so that a.test as an origin is known by its number."""

    def make(address, *, name="a.test", alpn=("http/1.1",), rules=None):
        context = roles_context(authority.pem, alpn)
        return ProxyDialer(
            Dialer(Here(), context),
            rules or explicit(f"https://{name}:{address.port}"),
            context=context,
            resolver=Here(),
            by_name=False,
            proxy_context=lambda: roles_context(authority.pem, ["http/1.1"]),
        )

    return make


@pytest.fixture(name="pools")
async def _pools(behind):
    made = []

    def make(*arguments, **options):
        made.append(HttpPool(behind(*arguments, **options), SystemClock()))
        return made[-1]

    yield make
    for pool in made:
        pool.close()
    await asyncio.sleep(0.02)


async def _echo(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


async def _hold(reader, writer):
    reader._transport.pause_reading()
    await asyncio.Event().wait()


async def _digest(reader, writer):
    """Answer each request with the digest of its body, and as many bytes as its path says."""
    while head := await reader.readuntil(b"\r\n\r\n"):
        path = head.split()[1].lstrip(b"/")
        length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
        body = await reader.readexactly(int(length.partition(b":")[2]))
        answer = hashlib.sha256(body).hexdigest().encode() + LARGE[: int(path)]
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer)
        await writer.drain()


async def _dial(dialer, origin, *, timeout_s=10.0, **more):
    return await dialer.dial("a.test", 1, tls=True, timeout_s=timeout_s, addresses=(origin,), **more)


async def test_tls_inside_tls_carries_large_data_both_ways_and_counts_it(front, behind, serve, authority):
    origin = await serve(_echo, authority.server)
    stages, notes = [], []
    stream = await _dial(behind(front), origin, on_stage=stages.append, on_note=notes.append)
    assert isinstance(stream, TlsStream)
    assert (stream.peer, stream.alpn, stream.sent_bytes) == (front, "http/1.1", 0)
    assert stages == ["resolve", "connect", "tls"]
    assert f"tunnel through proxy https://a.test:{front.port} to {origin}" in notes
    sender = asyncio.create_task(stream.send_all(LARGE))
    got = bytearray()
    while len(got) < len(LARGE):
        got += await stream.receive(100_000)
    await sender
    assert got == LARGE
    assert (stream.sent_bytes, stream.has_unsent) == (len(LARGE), False)
    assert not stream.is_readable()
    assert (stream.tcp_info() is not None) == tcpinfo.available()
    stream.close()
    assert stream.closed
    with pytest.raises(ConnectionAbortedError):
        await stream.send_all(b"x")
    assert stream.sent_bytes == len(LARGE)


async def test_tls_inside_tls_nowait_stops_where_the_kernel_does_and_goes_on_whole(
    front, behind, serve, authority, until
):
    go_on, got, sent = asyncio.Event(), hashlib.sha256(), hashlib.sha256()
    size = offset = idle = 0

    async def later(reader, writer):
        nonlocal size
        reader._transport.pause_reading()
        await go_on.wait()
        reader._transport.resume_reading()
        while data := await reader.read(65536):
            got.update(data)
            size += len(data)

    stream = await _dial(behind(front), await serve(later, authority.server))
    while idle < 50:  # until every buffer on the way is full
        start = offset % 1_900_000
        taken = stream.send_nowait(LARGE[start : start + 20_000])
        sent.update(LARGE[start : start + taken])
        offset += taken
        idle = 0 if taken else idle + 1
        if not taken:
            await asyncio.sleep(0.002)
    assert 0 <= offset - stream.sent_bytes < 16_385
    go_on.set()
    await stream.send_all(b"")
    assert (stream.has_unsent, stream.sent_bytes) == (False, offset)
    await until(lambda: size == offset)
    assert got.digest() == sent.digest()
    stream.close()


async def test_tls_inside_tls_send_cancelled_closes_and_counts_what_is_out(front, behind, serve, authority, until):
    stream = await _dial(behind(front), await serve(_hold, authority.server))
    task = asyncio.create_task(stream.send_all(bytes(40_000_000)))
    await until(lambda: stream.sent_bytes)
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert 0 < stream.sent_bytes < 40_000_000
    assert stream.closed
    with pytest.raises(ConnectionAbortedError):
        await stream.receive()


async def test_http_1_requests_with_large_bodies_share_the_tunnel(front, pools, serve, authority):
    origin = await serve(_digest, authority.server)
    pool = pools(front)
    for size in (0, len(LARGE)):
        request = HttpRequest("PUT", "https", "a.test", origin.port, b"/%d" % size, (), LARGE)
        response = await pool.request(request, deadline_s=20.0, addresses=(origin,))
        assert (response.http_version, response.reused) == ("HTTP/1.1", size > 0)
        assert await read(response) == hashlib.sha256(LARGE).hexdigest().encode() + LARGE[:size]
    assert pool.open_connections == 1


async def test_http_2_origin_is_spoken_to_through_the_tunnel(front, pools, serve, authority):
    async def script(peer):
        for number in range(1, 6):
            request = await peer.wait(h2.events.RequestReceived, number)
            await peer.answer(request.stream_id, LARGE)

    async def handler(reader, writer):
        await Peer(reader, writer).serve(script)

    origin = await serve(handler, authority.server)
    authority.server.set_alpn_protocols(["h2"])
    pool = pools(front, alpn=("h2", "http/1.1"))
    try:
        request = HttpRequest("GET", "https", "a.test", origin.port, b"/")
        for _ in range(5):
            response = await pool.request(request, deadline_s=20.0, addresses=(origin,))
            assert response.http_version == "HTTP/2"
            assert await read(response) == LARGE
    finally:
        authority.server.set_alpn_protocols(["http/1.1"])
    assert pool.open_connections == 1


async def test_http_origin_is_asked_for_by_the_absolute_form_inside_tls(front, behind, tinyproxy, serve):
    async def hello(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    origin = await serve(hello)
    rules = explicit(f"https://a.test:{front.port}")
    pool = HttpPool(behind(front, rules=rules), SystemClock())
    request = HttpRequest("GET", "http", "localhost", origin.port, b"/forwarded")
    response = await pool.request(forwarded(request, rules), deadline_s=10.0)
    assert (response.status, await read(response), response.peer) == (200, b"ok", front)
    assert tinyproxy.lines(f"GET http://localhost:{origin.port}/forwarded")
    pool.close()


async def _error(dialer, origin, **options):
    with pytest.raises(errors.TransportError) as caught:
        await _dial(dialer, origin, **options)
    assert caught.value.maybe_delivered is False
    return caught.value


async def test_proxy_with_another_certificate_is_a_proxy_error_that_says_so(front, behind, refused):
    error = await _error(behind(front, name="b.test"), refused)
    assert isinstance(error, errors.ProxyError)
    assert error.phase is Phase.CONNECT
    assert f"proxy https://b.test:{front.port}: no TLS with it: certificate refused" in str(error)


async def test_proxy_that_speaks_no_tls_is_a_proxy_error(behind, serve, refused):
    async def plain(reader, writer):
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    error = await _error(behind(await serve(plain)), refused)
    assert isinstance(error, errors.ProxyError)
    assert "no TLS with it" in str(error)


async def test_origin_with_another_certificate_is_still_a_tls_error(front, behind, serve, authority):
    origin = await serve(_echo, authority.server)
    error = await _error(behind(front), origin, server_name="b.test")
    assert isinstance(error, errors.TlsError)
    assert "certificate refused" in str(error)


async def test_origin_that_refuses_is_a_proxy_error(front, behind, refused):
    error = await _error(behind(front), refused)
    assert isinstance(error, errors.ProxyError)
    assert str(refused) in str(error)


async def test_silent_proxy_ends_at_the_deadline_in_connect(behind, serve):
    error = await _error(behind(await serve(_hold)), Address("127.0.0.1", 1), timeout_s=0.1)
    assert isinstance(error, errors.DeadlineExceeded)
    assert error.phase is Phase.CONNECT


async def test_dial_cancelled_in_either_handshake_leaves_nothing(front, behind, serve, until):
    reached = 0

    async def silent(reader, writer):
        nonlocal reached
        reached += 1
        await reader.read()

    through = _dial(behind(front), await serve(silent))  # the origin never answers our hello
    outside = _dial(behind(await serve(silent)), Address("127.0.0.1", 1))  # the proxy never does
    for number, dial in enumerate((through, outside), 1):
        task = asyncio.create_task(dial)
        await until(lambda number=number: reached == number)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
