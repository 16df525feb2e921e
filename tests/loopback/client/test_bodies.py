"""Coded bodies over every framing, through both modules and both kinds of client: whole or an error, never short."""

import asyncio
import contextlib
import copy
import gzip
import importlib
import pickle
import ssl
import zlib
from typing import NamedTuple

import brotli
import h2.events
import h2.exceptions
import pytest
from backports import zstd

import stormline
from stormline.client.background import BACKGROUND
from stormline.core import errors, limits
from stormline.core.values import Address
from stormline.testing.gateway import answering
from stormline.testing.http2 import Peer
from stormline.testing.origin import plain
from stormline.testing.world import HOST, wait_until

pytestmark = pytest.mark.loopback
CODERS = {"gzip": gzip.compress, "br": brotli.compress, "zstd": zstd.compress}
TEXT = b"".join(b"line %d\n" % n for n in range(20_000))
GZIP = gzip.compress(TEXT)  # made once: it holds the time
BAD_CRC = bytearray(GZIP)
BAD_CRC[-6] ^= 1
LOOKS = {"phase": "decode", "failure": "http.body.decode"}


def closed(head: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\n" + head + b"connection: close\r\n\r\n" + body


def sized(head: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\n" + head + b"content-length: %d\r\n\r\n" % len(body) + body


def chunked(head: bytes, body: bytes) -> bytes:
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(body[at : at + 999]), body[at : at + 999]) for at in range(0, len(body), 999)
    )
    return b"HTTP/1.1 200 OK\r\n" + head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


FRAMINGS = {"close": closed, "length": sized, "chunked": chunked}


class Way(NamedTuple):
    """Whose client asks, and how."""

    module: str
    is_async: bool

    def __str__(self) -> str:
        return f"{self.module}-{'async' if self.is_async else 'sync'}"


WAYS = [Way(module, is_async) for module in ("httpx2", "httpx") for is_async in (True, False)]


class Asker:
    """A client of any way, asked from the test's loop."""

    def __init__(self, way: Way, verify: ssl.SSLContext | None) -> None:
        self.module = importlib.import_module(way.module)
        self.is_async = way.is_async
        if way.is_async:
            self.client = self.module.AsyncClient(transport=stormline.AsyncTransport(verify=verify))
        else:
            self.client = self.module.Client(transport=stormline.Transport(verify=verify))

    async def ask(self, url: str, method: str = "GET", **options):
        if self.is_async:
            return await self.client.request(method, url, **options)
        return await asyncio.to_thread(self.client.request, method, url, **options)

    async def stream(self, url: str, steps: str, *arguments):
        """Give what an iterator over the body gives, `steps` its name without the `a` of the asynchronous one."""
        if not self.is_async:
            return await asyncio.to_thread(self._stream, url, steps, *arguments)
        async with self.client.stream("GET", url) as response:
            return [piece async for piece in getattr(response, f"a{steps}")(*arguments)]

    def _stream(self, url: str, steps: str, *arguments):
        with self.client.stream("GET", url) as response:
            return list(getattr(response, steps)(*arguments))

    async def fails(self, url: str):
        with pytest.raises(errors.DecodeError) as caught:
            await self.ask(url)
        assert isinstance(caught.value, self.module.DecodingError)
        assert (caught.value.phase, caught.value.maybe_delivered) == ("decode", True)
        assert str(caught.value.request.url) == url
        return caught.value


@pytest.fixture(name="way", params=WAYS, ids=str)
def _way(request):
    return request.param


@pytest.fixture(name="asker")
async def _asker(way):
    asker = Asker(way, None)
    yield asker
    await _close(asker)


async def _close(asker: Asker) -> None:
    if asker.is_async:
        await asker.client.aclose()
        return
    await asyncio.to_thread(asker.client.close)
    BACKGROUND.stop()


@pytest.fixture(name="serve")
async def _serve(origin):
    """Serve these bytes for each path; `close` in the path closes the connection after them."""

    async def serve(answers: dict[str, bytes]):
        async def answer(request, writer):
            writer.write(answers[request.target])
            if b"connection: close" in answers[request.target]:
                writer.close()

        return await origin(answer)

    return serve


class TestHttp1:
    @pytest.mark.parametrize("framing", FRAMINGS)
    @pytest.mark.parametrize("coding", CODERS)
    async def test_whole_body_is_given_and_half_of_it_is_an_error(self, asker, serve, coding, framing):
        body, head = CODERS[coding](TEXT), b"content-encoding: %s\r\n" % coding.encode()
        made = FRAMINGS[framing]
        there = await serve({"/whole": made(head, body), "/half": made(head, body[: len(body) // 2])})
        assert (await asker.ask(there.url("/whole"))).content == TEXT
        error = await asker.fails(there.url("/half"))
        assert f"{coding} data is cut short after {len(body) // 2} bytes" in str(error)

    @pytest.mark.parametrize("framing", FRAMINGS)
    @pytest.mark.parametrize("coding", CODERS)
    async def test_body_cut_after_any_byte_is_an_error(self, serve, coding, framing):
        body, head = CODERS[coding](TEXT[:60]), b"content-encoding: %s\r\n" % coding.encode()
        made = FRAMINGS[framing]
        shortest = 0 if framing == "close" else 1
        there = await serve({f"/{size}": made(head, body[:size]) for size in range(shortest, len(body) + 1)})
        async with stormline.AsyncClient() as client:
            for size in range(shortest, len(body)):
                with pytest.raises(errors.DecodeError):
                    await client.get(there.url(f"/{size}"))
            assert (await client.get(there.url(f"/{len(body)}"))).content == TEXT[:60]
        assert framing == "close" or there.connections == 1  # the connection was never at fault

    @pytest.mark.parametrize(
        ("coding", "body"),
        [
            ("gzip", bytes(BAD_CRC)),
            ("br", b"{'identity': 'this is not coded'}" * 9),
            ("gzip", b"<html>this is not coded</html>"),
            ("gzip, br", brotli.compress(GZIP[:-1])),
            ("deflate", zlib.compress(TEXT)[:-1]),
            ("br", brotli.compress(TEXT) + b"<script src=//ads.test>"),
            ("gzip", GZIP + GZIP[:-1]),
            (", ".join(["gzip"] * 6), b"x"),
        ],
        ids=["bad crc", "br on identity", "gzip on identity", "inner cut", "deflate cut", "more after br", "second cut",
             "six codings"],
    )  # fmt: skip
    async def test_damaged_body_is_an_error(self, asker, serve, coding, body):
        there = await serve({"/": sized(b"content-encoding: %s\r\n" % coding.encode(), body), "/next": plain()})
        await asker.fails(there.url())
        assert (await asker.ask(there.url("/next"))).text == "ok"

    @pytest.mark.parametrize(
        ("coding", "body"),
        [
            ("gzip", gzip.compress(TEXT[:1000]) + gzip.compress(TEXT[1000:])),
            ("zstd", zstd.compress(TEXT[:1000]) + zstd.compress(TEXT[1000:])),
            ("gzip", GZIP + bytes(512)),
            ("gzip", GZIP + b"\r\n<!-- served by -->"),
            ("gzip, br", brotli.compress(GZIP)),
            ("x-gzip", GZIP),
            ("GZIP", GZIP),
            ("deflate", zlib.compress(TEXT)),
            ("deflate", zlib.compress(TEXT)[2:-4]),
            ("identity", TEXT),
        ],
        ids=["members", "frames", "padding", "surplus", "stacked", "x-gzip", "upper", "deflate", "raw", "identity"],
    )
    @pytest.mark.parametrize("framing", FRAMINGS)
    async def test_body_of_any_valid_form_is_given_whole(self, asker, serve, coding, body, framing):
        there = await serve({"/": FRAMINGS[framing](b"content-encoding: %s\r\n" % coding.encode(), body)})
        assert (await asker.ask(there.url())).content == TEXT

    @pytest.mark.parametrize("coding", CODERS)
    async def test_empty_body_is_whole_where_it_is_announced(self, asker, serve, coding):
        head = b"content-encoding: %s\r\n" % coding.encode()
        there = await serve({"/sized": sized(head, b""), "/chunked": chunked(head, b""), "/close": closed(head, b"")})
        assert (await asker.ask(there.url("/sized"))).content == b""
        assert (await asker.ask(there.url("/chunked"))).content == b""
        await asker.fails(there.url("/close"))

    @pytest.mark.parametrize("coding", CODERS)
    async def test_answers_without_content_never_fail(self, asker, serve, coding):
        head = b"content-encoding: %s\r\n" % coding.encode()
        there = await serve(
            {
                "/head": b"HTTP/1.1 200 OK\r\n" + head + b"content-length: 1000\r\n\r\n",
                "/204": b"HTTP/1.1 204 No Content\r\n" + head + b"\r\n",
                "/304": b"HTTP/1.1 304 Not Modified\r\n" + head + b"content-length: 1000\r\n\r\n",
            }
        )
        for path, method in (("/head", "HEAD"), ("/204", "GET"), ("/304", "GET")):
            response = await asker.ask(there.url(path), method)
            assert (response.content, response.headers["content-encoding"]) == (b"", coding)
        assert there.connections == 1

    async def test_part_of_a_coded_body_is_given_as_it_is(self, asker, serve):
        part = GZIP[100:200]
        head = b"HTTP/1.1 206 Partial Content\r\ncontent-encoding: gzip\r\ncontent-range: bytes 100-199/999999\r\n"
        there = await serve({"/": head + b"content-length: 100\r\n\r\n" + part})
        assert b"".join(await asker.stream(there.url(), "iter_raw")) == part


class TestPlain:
    """Bodies without a content coding, read whole by an asynchronous client."""

    @pytest.fixture(name="way", params=[way for way in WAYS if way.is_async], ids=str)
    def _way(self, request):
        return request.param

    @pytest.fixture(name="there")
    async def _there(self, serve):
        head = b"HTTP/1.1 200 OK\r\ncontent-length: 20000\r\n\r\n"
        return await serve({"/": head + TEXT[:20_000], "/half": head + TEXT[:10_000]})

    async def test_body_is_there_and_told_of_as_by_the_module(self, asker, there):
        async with asker.client.stream("GET", there.url()) as response:
            assert await response.aread() == TEXT[:20_000]
            assert (response.num_bytes_downloaded, response.is_closed, response.is_stream_consumed) == (
                20_000,
                True,
                True,
            )
            assert response.elapsed.total_seconds() > 0
            assert await response.aread() is response.content
        await asker.ask(there.url())
        assert there.connections == 1

    async def test_stream_that_a_hook_puts_around_it_is_read(self, asker, there):
        class Upper(asker.module.AsyncByteStream):
            def __init__(self, stream):
                self._stream = stream

            async def __aiter__(self):
                async for piece in self._stream:
                    yield piece.upper()

            async def aclose(self):
                await self._stream.aclose()

        async def hook(response):
            response.stream = Upper(response.stream)

        asker.client.event_hooks = {"response": [hook]}
        assert (await asker.ask(there.url())).content == TEXT[:20_000].upper()

    async def test_stream_that_was_read_raw_says_so(self, asker, there):
        async with asker.client.stream("GET", there.url()) as response:
            _ = [piece async for piece in response.aiter_raw()]
            with pytest.raises(asker.module.StreamConsumed):
                await response.aread()

    async def test_reader_who_is_cancelled_leaves_nothing_open(self, asker, there):
        async with asker.client.stream("GET", there.url("/half")) as response:
            reading = asyncio.create_task(response.aread())
            await wait_until(lambda: response.is_stream_consumed)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert response.is_closed
        runtime = asker.client._transport.runtime()
        assert runtime._pool.open_connections == 0


class TestIterators:
    @pytest.fixture(name="there")
    async def _there(self, serve):
        return await serve(
            {
                "/": chunked(b"content-encoding: gzip\r\ncontent-type: text/plain\r\n", GZIP),
                "/cut": chunked(b"content-encoding: gzip\r\n", GZIP[:-1]),
            }
        )

    async def test_bytes_come_decoded(self, asker, there):
        pieces = await asker.stream(there.url(), "iter_bytes")
        assert b"".join(pieces) == TEXT
        assert len(pieces) > 1

    @pytest.mark.parametrize("size", [1000, 65_536, 10_000_000])
    async def test_bytes_come_in_pieces_of_the_size_asked_for(self, asker, there, size):
        pieces = await asker.stream(there.url(), "iter_bytes", size)
        assert b"".join(pieces) == TEXT
        assert {len(piece) for piece in pieces[:-1]} <= {size}
        assert 0 < len(pieces[-1]) <= size

    async def test_text_and_lines_come_decoded(self, asker, there):
        assert "".join(await asker.stream(there.url(), "iter_text")).encode() == TEXT
        assert await asker.stream(there.url(), "iter_lines") == TEXT.decode().splitlines()

    async def test_raw_bytes_come_as_they_were_sent(self, asker, there):
        assert b"".join(await asker.stream(there.url(), "iter_raw")) == GZIP

    @pytest.mark.parametrize("steps", ["iter_bytes", "iter_text", "iter_lines", "iter_raw"])
    async def test_every_iterator_ends_with_the_error(self, asker, there, steps):
        with pytest.raises(errors.DecodeError) as caught:
            await asker.stream(there.url("/cut"), steps)
        assert isinstance(caught.value, asker.module.DecodingError)

    async def test_content_can_be_had_again_and_in_pieces(self, asker, there):
        response = await asker.ask(there.url())
        if asker.is_async:
            assert b"".join([piece async for piece in response.aiter_bytes(999)]) == TEXT
        else:
            assert b"".join(response.iter_bytes(999)) == TEXT
        assert response.content == TEXT
        assert isinstance(response, asker.module.Response)

    async def test_stream_that_was_read_raw_says_so(self, asker, there):
        if asker.is_async:
            async with asker.client.stream("GET", there.url()) as response:
                _ = [chunk async for chunk in response.aiter_raw()]
                with pytest.raises(asker.module.StreamConsumed):
                    await response.aread()

    async def test_response_left_early_can_be_closed(self, asker, there):
        if asker.is_async:
            async with asker.client.stream("GET", there.url()) as response:
                async for _ in response.aiter_bytes():
                    break
        assert (await asker.ask(there.url())).content == TEXT

    @pytest.mark.parametrize("again", [lambda each: pickle.loads(pickle.dumps(each)), copy.copy])
    async def test_response_survives_pickling_and_copying_as_one_of_its_module(self, asker, there, again):
        response = again(await asker.ask(there.url()))
        assert type(response) is asker.module.Response
        assert (response.status_code, response.content) == (200, TEXT)

    async def test_bomb_comes_in_small_pieces_and_leaves_others_their_turn(self, serve):
        zeros = 64 * 1024 * 1024
        head = b"content-encoding: br\r\n"
        there = await serve({"/": sized(head, brotli.compress(bytes(zeros)))})
        turns = 0

        async def others():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with stormline.AsyncClient() as client:
            for steps, size in (("aiter_bytes", zeros), ("aiter_raw", len(brotli.compress(bytes(zeros))))):
                async with client.stream("GET", there.url()) as response:
                    turns, task = 0, asyncio.create_task(others())
                    sizes = [len(piece) async for piece in getattr(response, steps)()]
                    task.cancel()
                assert sum(sizes) == size
                assert max(sizes) <= 2 * limits.DECODE_PIECE_BYTES
                assert turns >= zeros // limits.DECODE_TURN_BYTES // 2

    async def test_events_in_a_coded_stream_come_as_they_are_sent(self, origin):
        go_on, machine = asyncio.Event(), zlib.compressobj(wbits=31)

        async def events(request, writer):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\n\r\n")
            for n in range(3):
                writer.write(machine.compress(b"data: %d\n\n" % n) + machine.flush(zlib.Z_SYNC_FLUSH))
                await go_on.wait()
                go_on.clear()
            writer.write(machine.flush())
            writer.close()

        there, got = await origin(events), []
        async with stormline.AsyncClient() as client, client.stream("GET", there.url()) as response:
            async for line in response.aiter_lines():
                if line:
                    got.append(line)
                    go_on.set()
        assert got == ["data: 0", "data: 1", "data: 2"]


class TestHttp2:
    @pytest.fixture(name="asker")
    async def _asker(self, way, pki):
        context = ssl.create_default_context(cadata=pki.ca.ca_pem)
        context.set_alpn_protocols(["h2"])
        asker = Asker(way, context)
        yield asker
        await _close(asker)

    @pytest.fixture(name="serve")
    async def _serve(self, pki):
        """Answer `/KEY` with the fields and the body of that key; give the base URL."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        files = pki.ca.issue("origin", names=["localhost"])
        context.load_cert_chain(files.certificate, files.key)
        context.set_alpn_protocols(["h2"])
        tasks, peers = set(), []

        async def serve(answers):
            async def script(peer: Peer):
                number = 0
                while True:
                    number += 1
                    request = await peer.wait(h2.events.RequestReceived, number)
                    fields, body = answers[dict(request.headers)[b":path"].decode()]
                    tasks.add(asyncio.create_task(answer(peer, request.stream_id, body, fields)))

            async def answer(peer, stream_id, body, fields):
                with contextlib.suppress(h2.exceptions.StreamClosedError):  # the client has seen enough
                    await peer.answer(stream_id, body, fields)

            async def handler(reader, writer):
                tasks.add(asyncio.current_task())
                peers.append(Peer(reader, writer))
                with contextlib.suppress(EOFError, OSError):
                    await peers[-1].serve(script)
                writer.close()

            server = await asyncio.start_server(handler, "127.0.0.1", 0, ssl=context)
            servers.append(server)
            return f"https://localhost:{Address(*server.sockets[0].getsockname()[:2]).port}", peers

        servers = []
        yield serve
        for server in servers:
            server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @pytest.mark.parametrize("length", [True, False], ids=["length", "no length"])
    @pytest.mark.parametrize("coding", CODERS)
    async def test_whole_body_is_given_and_half_of_it_is_an_error(self, asker, serve, coding, length):
        def answer(body):
            sizes = [(b"content-length", b"%d" % len(body))] if length else []
            return [(b"content-encoding", coding.encode()), *sizes], body

        body = CODERS[coding](TEXT)
        url, peers = await serve({"/whole": answer(body), "/half": answer(body[: len(body) // 2])})
        whole = await asker.ask(f"{url}/whole")
        assert (whole.content, whole.http_version) == (TEXT, "HTTP/2")
        await asker.fails(f"{url}/half")
        assert (await asker.ask(f"{url}/whole")).content == TEXT
        assert len(peers) == 1  # the connection was never at fault

    @pytest.mark.parametrize("coding", CODERS)
    async def test_body_cut_after_any_byte_is_an_error(self, asker, serve, coding):
        body, fields = CODERS[coding](TEXT[:60]), [(b"content-encoding", coding.encode())]
        url, _ = await serve({f"/{size}": (fields, body[:size]) for size in range(len(body) + 1)})
        for size in range(1, len(body)):
            await asker.fails(f"{url}/{size}")
        assert (await asker.ask(f"{url}/{len(body)}")).content == TEXT[:60]
        assert (await asker.ask(f"{url}/0")).content == b""  # the end of the stream was said

    async def test_damage_in_the_middle_of_a_large_body_takes_no_other_call_along(self, asker, serve):
        body = bytearray(
            zstd.compress(bytes(range(256)) * 40_000, options={zstd.CompressionParameter.checksum_flag: 1})
        )
        body += b"no frame" * 500_000
        fields = [(b"content-encoding", b"zstd")]
        url, peers = await serve({"/bad": (fields, bytes(body)), "/good": (fields, zstd.compress(TEXT))})
        await asker.ask(f"{url}/good")  # there is one connection to share
        results = await asyncio.gather(
            *(asker.ask(f"{url}/{name}") for name in ["good", "bad"] * 5), return_exceptions=True
        )
        assert [isinstance(result, errors.DecodeError) for result in results] == [False, True] * 5
        assert all(result.content == TEXT for result in results[::2])
        assert len(peers) <= limits.H2_CONNECTIONS_SPREAD

    async def test_members_are_given_whole(self, asker, serve):
        body = gzip.compress(TEXT[:1000]) + gzip.compress(TEXT[1000:])
        url, _ = await serve({"/": ([(b"content-encoding", b"gzip")], body)})
        assert (await asker.ask(f"{url}/")).content == TEXT

    async def test_head_and_no_content_never_fail(self, asker, serve):
        url, _ = await serve({"/": ([(b"content-encoding", b"zstd"), (b"content-length", b"99")], b"")})
        assert (await asker.ask(f"{url}/", "HEAD")).content == b""


async def _read(client, url, steps):
    if not steps:
        await client.get(url)
        return
    async with client.stream("GET", url) as response:
        _ = [piece async for piece in getattr(response, steps)()]


class TestRecords:
    @pytest.mark.parametrize("steps", ["aiter_bytes", "aiter_raw", ""])
    @pytest.mark.parametrize("damage", ["cut", "crc"])
    async def test_damaged_body_is_recorded_as_a_failure_in_decode(self, world, serve, records, damage, steps):
        body = GZIP[:-1] if damage == "cut" else bytes(BAD_CRC)
        there = await serve({"/": sized(b"content-encoding: gzip\r\n", body)})
        config = stormline.Config(bundle=(await world(lambda end: asyncio.sleep(0))).bundle)
        async with stormline.AsyncClient(config=config, parse=lambda response: True) as client:
            with pytest.raises(errors.DecodeError):
                await _read(client, there.url(), steps)
        (record,) = records
        assert {name: getattr(record, name) for name in LOOKS} == LOOKS
        assert (record.status, record.ok, record.ok_network, record.ok_http) == (200, False, False, False)
        (attempt,) = record.attempts
        assert {name: getattr(attempt, name) for name in LOOKS} == LOOKS
        assert attempt.maybe_delivered

    async def test_whole_body_is_recorded_as_success(self, world, serve, records):
        there = await serve({"/": sized(b"content-encoding: gzip\r\n", GZIP)})
        config = stormline.Config(bundle=(await world(lambda end: asyncio.sleep(0))).bundle)
        async with stormline.AsyncClient(config=config) as client:
            await client.get(there.url())
        (record,) = records
        assert (record.ok, record.failure, record.bytes_down) == (True, "", len(GZIP))

    async def test_surplus_after_gzip_stands_in_the_story(self, serve):
        there = await serve({"/": sized(b"content-encoding: gzip\r\n", GZIP + b"surplus")})
        async with stormline.AsyncClient() as client:
            response = await client.get(there.url())
        story = [line for _, line in response.extensions["stormline"].timeline.story]
        assert "7 bytes after the end of the content left out" in story


class TestLong:
    @pytest.mark.parametrize("coding", CODERS)
    async def test_body_over_the_long_connection_is_held_to_its_end(self, world, records, coding):
        body = CODERS[coding](TEXT[:500])

        async def handle(end, call):
            whole = call.target.endswith("/whole")
            end.reply(call, body if whole else body[:-1], headers=(("content-encoding", coding),))

        here = await world(answering(handle))
        async with here.client(report=True) as client:
            assert (await client.get(f"https://{HOST}/whole")).content == TEXT[:500]
            with pytest.raises(errors.DecodeError):
                await client.get(f"https://{HOST}/cut")
            assert (await client.get(f"https://{HOST}/whole")).content == TEXT[:500]
        assert [record.failure for record in records] == ["", "http.body.decode", ""]
        assert {record.means for record in records} == {"long"}


async def test_every_coding_that_is_verified_is_asked_for(origin):
    there = await origin()
    async with stormline.AsyncClient() as client:
        await client.get(there.url())
    asked = {word.strip() for word in there.requests[0].headers["accept-encoding"].split(",")}
    assert asked == {"gzip", "deflate", "br", "zstd"}
