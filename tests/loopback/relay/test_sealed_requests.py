"""The client side of a relay, through a real one: answers as by any other means, and failures whose reach it knows."""

import asyncio
import contextlib
import ssl

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from stormline.client.sealed import RelayPlace, Sealer, UnknownRelayKey
from stormline.core import errors
from stormline.core.phase import Phase
from stormline.core.values import parse_address
from stormline.net.clock import SystemClock, SystemRng
from stormline.net.resolve import Resolver
from stormline.outbound.dial import Dialer
from stormline.outbound.messages import HttpRequest
from stormline.outbound.pool import HttpPool
from stormline.wire import ohttp

pytestmark = pytest.mark.loopback
either = pytest.mark.parametrize("stage", ["together", "apart"], indirect=True)


class Moved(SystemClock):
    """A clock that was never set."""

    def wall(self):
        return super().wall() - 10_000_000


class Carrier:
    """A sealer with the pool that carries."""

    def __init__(self, sealing, pool):
        self._sealing, self._pool = sealing, pool

    def request(self, request, relay, **times):
        return self._sealing.request(request, relay, self._pool, **times)


@contextlib.asynccontextmanager
async def sealer(clock=None):
    names = Resolver()
    pool = HttpPool(Dialer(names, ssl.create_default_context()), SystemClock())
    try:
        yield Carrier(Sealer(clock=clock or SystemClock(), rng=SystemRng()), pool)
    finally:
        await pool.aclose()
        names.close()


def place(stage, config=None):
    return RelayPlace(parse_address(stage.relay.split("/")[2]), config or stage.config)


def asked(stage, method="GET", target=b"/", body=None, headers=(), host="a.test"):
    return HttpRequest(method, "https", host, stage.origin_port, target, tuple(headers), body)


async def ask(stage, request, *, clock=None, config=None, deadline_s=10.0):
    async with sealer(clock) as sealing:
        response = await sealing.request(request, place(stage, config), deadline_s=deadline_s)
        try:
            return response, await response.read(10_000_000)
        finally:
            await response.aclose()


@either
async def test_an_answer_comes_as_by_any_other_means(stage):
    headers = [(b"Accept", b"*/*"), (b"Host", b"a.test"), (b"Connection", b"close"), (b"User-Agent", b"t")]
    response, content = await ask(stage, asked(stage, target=b"/x?y=1", headers=headers))
    assert (response.status, content) == (200, b"hello ")
    assert (b"x-mixed", b"Case") in response.headers
    (scope,) = stage.origin.seen
    assert dict(scope["headers"])[b"user-agent"] == b"t"
    assert b"date" not in dict(scope["headers"]), "a read says when it was made, which tells more than it must"


async def test_what_the_origin_says_is_no_failure(stage):
    response, content = await ask(stage, asked(stage, target=b"/none"))
    assert (response.status, content) == (404, b"hello ")


async def test_a_large_answer_comes_piece_by_piece(stage):
    _, content = await ask(stage, asked(stage, target=b"/large"))
    assert len(content) == 40 * 50_000 + 6


@either
async def test_bodies_go_whole_and_as_they_come(stage):
    async def pieces():
        for number in range(30):
            yield bytes([number]) * 3000

    whole = bytes(100_000)
    assert (await ask(stage, asked(stage, "POST", body=whole)))[1] == b"hello " + whole
    streamed = b"".join([piece async for piece in pieces()])
    assert (await ask(stage, asked(stage, "POST", body=pieces())))[1] == b"hello " + streamed


async def test_a_device_whose_clock_was_never_set_asks_again_by_the_right_time(stage):
    response, content = await ask(stage, asked(stage, "POST", body=b"pay"), clock=Moved())
    assert (response.status, content) == (200, b"hello pay")
    assert stage.origin.bodies == [b"pay"]


async def test_a_gateway_whose_time_nobody_can_meet_is_asked_twice_and_no_more(stage):
    stale = [(b"date", b"Thu, 01 Jan 1970 00:00:00 GMT")]
    with pytest.raises(errors.GatewayError, match="http_request_denied") as caught:
        await ask(stage, asked(stage, "POST", body=b"pay", headers=stale))
    assert not caught.value.maybe_delivered
    assert stage.origin.seen == []


@either
async def test_another_key_is_told_apart_and_nobody_has_the_request(stage):
    other = ohttp.GatewayKey(200, X25519PrivateKey.generate())
    with pytest.raises(UnknownRelayKey) as caught:
        await ask(stage, asked(stage, "POST", body=b"pay"), config=other.config)
    assert not caught.value.maybe_delivered
    assert stage.origin.seen == []


async def test_an_origin_that_is_not_reached_has_not_the_request(stage):
    with pytest.raises(errors.GatewayError, match="tls_certificate_error") as caught:
        await ask(stage, asked(stage, "POST", body=b"pay", host="wrong.test"))
    assert not caught.value.maybe_delivered
    with pytest.raises(errors.GatewayError, match="http_request_denied"):
        await ask(stage, asked(stage, host="evil.test"))


@either
async def test_an_origin_that_breaks_off_may_have_the_request(stage):
    async with sealer() as sealing:
        response = await sealing.request(asked(stage, target=b"/breaks"), place(stage), deadline_s=10)
        assert await response.source.read() == b"only half"
        stage.origin.go_on.set()
        with pytest.raises(errors.TransportError) as caught:
            await response.source.read()
        assert (caught.value.phase, caught.value.maybe_delivered) == (Phase.BODY, True)
        assert not response.source.complete
        await response.aclose()


async def test_a_silent_origin_costs_no_more_than_the_deadline(stage):
    with pytest.raises(errors.DeadlineExceeded) as caught:
        async with sealer() as sealing:
            await (await sealing.request(asked(stage, target=b"/stream"), place(stage), deadline_s=0.5)).read(100)
    assert caught.value.maybe_delivered


async def test_a_relay_that_is_not_there_has_nothing(stage):
    async with sealer() as sealing:
        gone = RelayPlace(parse_address("127.0.0.1:1"), stage.config)
        with pytest.raises(errors.ConnectError) as caught:
            await sealing.request(asked(stage, "POST", body=b"pay"), gone, deadline_s=5)
    assert not caught.value.maybe_delivered


@pytest.mark.parametrize(
    ("answer", "maybe_delivered"),
    [
        (b"HTTP/1.1 429 Slow\r\ncontent-length: 0\r\n\r\n", False),
        (b"HTTP/1.1 503 Full\r\ncontent-length: 0\r\n\r\n", False),
        (b"HTTP/1.1 502 Broken\r\ncontent-length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 9\r\n\r\n<portal/>", True),
        (b"HTTP/1.1 302 Found\r\nlocation: http://portal/\r\ncontent-length: 0\r\n\r\n", True),
    ],
)
async def test_what_stands_in_the_relays_place_is_never_the_answer(stage, answer, maybe_delivered):
    async def portal(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(portal, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with sealer() as sealing:
        where = RelayPlace(parse_address(f"{host}:{port}"), stage.config)
        with pytest.raises(errors.GatewayError) as caught:
            await sealing.request(asked(stage), where, deadline_s=5)
        assert caught.value.maybe_delivered is maybe_delivered
    server.close()
    await server.wait_closed()


async def test_a_forged_answer_is_refused(stage):
    """A box on the way that answers in the relay's place cannot make one."""
    forged = ohttp.ResponseSealer(
        ohttp.ResponseKey(bytes(32), ohttp.AES_128_GCM.aead, bytes(16)), nonce=bytes(32)
    ).chunk(b"\1\x40\xc8", last=True)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: message/ohttp-chunked-res\r\ncontent-length: %d\r\n\r\n" % len(forged)

    async def box(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + forged)
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(box, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with sealer() as sealing:
        with pytest.raises(errors.ProtocolViolation):
            await sealing.request(asked(stage), RelayPlace(parse_address(f"{host}:{port}"), stage.config), deadline_s=5)
    server.close()
    await server.wait_closed()


async def test_what_cannot_be_sealed_is_refused_here(stage):
    with pytest.raises(errors.LocalProtocolError, match="relay"):
        await ask(stage, asked(stage, headers=[(b"x", b"a\r\nb")]))


@either
async def test_cancelled_requests_leave_nothing(stage):
    async with sealer() as sealing:
        tasks = [
            asyncio.create_task(sealing.request(asked(stage, target=b"/stream"), place(stage), deadline_s=10))
            for _ in range(10)
        ]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, BaseException):
                await result.aclose()
        response = await sealing.request(asked(stage), place(stage), deadline_s=10)
        assert await response.read(100) == b"hello "
