"""Coded bodies through the API gateway, real at both ends: whole, or an error that says so, never a short good one."""

import asyncio
import contextlib
import gzip

import brotli
import pytest
from backports import zstd

from stormline.client.sensing import Sensing
from stormline.core import errors
from stormline.policy.level import Level
from stormline.testing.world import HOST

pytestmark = pytest.mark.loopback

URL = f"https://{HOST}/"
TEXT = b"".join(b'{"line": %d},' % n for n in range(6000))
CODERS = {"gzip": gzip.compress, "br": brotli.compress, "zstd": zstd.compress}
BAD_CRC = bytearray(gzip.compress(TEXT))
BAD_CRC[-6] ^= 1


def closed(head, body):
    return b"HTTP/1.1 200 OK\r\n" + head + b"connection: close\r\n\r\n" + body


def sized(head, body):
    return b"HTTP/1.1 200 OK\r\n" + head + b"content-length: %d\r\n\r\n" % len(body) + body


def chunked(head, body):
    pieces = [body[at : at + 999] for at in range(0, len(body), 999)]
    coded = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\n" + head + b"transfer-encoding: chunked\r\n\r\n" + coded + b"0\r\n\r\n"


FRAMINGS = {"close": closed, "length": sized, "chunked": chunked}


@pytest.fixture(name="serve")
async def _serve(gated):
    """Give what serves one answer to every request, behind a real gateway."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(answer, **change):
            async def connected(reader, writer):
                with contextlib.suppress(OSError, EOFError):
                    while await reader.readuntil(b"\r\n\r\n"):
                        writer.write(answer)
                        await writer.drain()
                        if b"connection: close" in answer:
                            break
                writer.close()

            server = await stack.enter_async_context(await asyncio.start_server(connected, "127.0.0.1", 0))
            host, port = server.sockets[0].getsockname()[:2]
            here = await gated(api_upstreams={HOST: f"http://{host}:{port}"})
            client = await stack.enter_async_context(here.client(**change))
            return client

        yield make


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("coding", CODERS)
async def test_body_cut_in_the_middle_is_an_error_and_whole_is_whole(serve, coding, framing):
    body, head = CODERS[coding](TEXT), f"content-encoding: {coding}\r\ncontent-type: application/json\r\n".encode()
    client = await serve(FRAMINGS[framing](head, body[: len(body) // 2]))
    with pytest.raises(errors.DecodeError) as caught:
        await client.get(URL)
    assert (caught.value.phase, caught.value.maybe_delivered) == ("decode", True)
    client = await serve(FRAMINGS[framing](head, body))
    assert (await client.get(URL)).content == TEXT


@pytest.mark.parametrize(
    ("coding", "body"),
    [("gzip", bytes(BAD_CRC)), ("br", TEXT), ("gzip, br", brotli.compress(gzip.compress(TEXT)[:-9]))],
)
async def test_damaged_body_is_an_error(serve, coding, body):
    client = await serve(sized(f"content-encoding: {coding}\r\n".encode(), body))
    with pytest.raises(errors.DecodeError):
        await client.get(URL)


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(TEXT[:9000]) + gzip.compress(TEXT[9000:])),
        ("zstd", zstd.compress(TEXT[:9000]) + zstd.compress(TEXT[9000:])),
        ("gzip, br", brotli.compress(gzip.compress(TEXT))),
    ],
)
async def test_members_frames_and_stacks_are_whole(serve, coding, body):
    client = await serve(sized(f"content-encoding: {coding}\r\n".encode(), body))
    assert (await client.get(URL)).content == TEXT


async def test_answers_without_a_body_never_fail(serve):
    client = await serve(b"HTTP/1.1 204 No Content\r\ncontent-encoding: zstd\r\n\r\n")
    assert (await client.get(URL)).status_code == 204
    client = await serve(b"HTTP/1.1 200 OK\r\ncontent-encoding: zstd\r\ncontent-length: 5000\r\n\r\n")
    assert (await client.head(URL)).status_code == 200


@pytest.mark.parametrize(("network", "coding"), [("cell", "zstd"), ("wifi", "zstd")])
@pytest.mark.parametrize("framing", FRAMINGS)
async def test_gateway_codes_for_the_client_s_network_and_the_client_reads_it(serve, framing, network, coding):
    client = await serve(FRAMINGS[framing](b"content-type: application/json\r\n", TEXT), network=network)
    response = await client.get(URL)
    assert (response.headers["content-encoding"], response.content) == (coding, TEXT)


@pytest.mark.parametrize(
    ("level", "coding"),
    [(Level.POOR, "br"), (Level.FAIR, "zstd"), (Level.GOOD, None), (Level.UNKNOWN, None)],
)
async def test_client_tells_of_a_network_that_it_found_weak(serve, monkeypatch, level, coding):
    """What the level is found from has tests of its own; here it is what a client acts on."""
    monkeypatch.setattr(Sensing, "carries", lambda self: level)
    client = await serve(sized(b"content-type: application/json\r\n", TEXT[:9000]), network="wifi")
    response = await client.get(URL)
    assert (response.headers.get("content-encoding"), response.content) == (coding, TEXT[:9000])
    response = await client.get(URL, headers={"ect": "slow-2g"})
    assert response.headers["content-encoding"] == "br"


@pytest.mark.parametrize("network", ["cell", "wifi"])
async def test_plain_body_cut_by_the_upstream_is_an_error_though_the_gateway_codes_it(serve, network):
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 90000\r\nconnection: close\r\n\r\n"
    client = await serve(answer + TEXT[:50_000], network=network)
    with pytest.raises(errors.TransportError) as caught:
        await client.get(URL)
    assert caught.value.maybe_delivered
