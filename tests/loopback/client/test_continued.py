"""Bodies that break off or stop in their middle, and those that only take their time."""

import asyncio
import contextlib
import gzip
import importlib
import ssl

import h2.events
import httpx2
import pytest

import stormline
from stormline.client import allowance
from stormline.client.background import BACKGROUND
from stormline.client.steering import Steering
from stormline.core import limits
from stormline.core.values import Address
from stormline.policy import timeouts
from stormline.testing.http2 import Peer
from stormline.testing.origin import plain

pytestmark = pytest.mark.loopback

SHORT = bytes(range(256)) * 4
LONG = b"".join(b"%07d," % n for n in range(12_000))
"""Long enough that its rest is asked for by range."""
HALF = len(LONG) // 2
TAG = '"v1"'
NAME = "site.test"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Lose patience soon: how long it lasts is policy's, and its own tests hold it."""
    monkeypatch.setattr(limits, "RETRY_PAUSE_S", 0.001)
    monkeypatch.setattr(limits, "TIMEOUT_GAP_FAST_S_MIN", 0.3)
    monkeypatch.setattr(timeouts, "RTO_MIN_S", 0.02)
    monkeypatch.setattr(timeouts, "RTO_VARIANCE_S", 0.02)


@pytest.fixture(name="module", params=["httpx2", "httpx"])
def _module(request):
    return importlib.import_module(request.param)


def client_of(module, *, timeout=30.0, **settings):
    return module.AsyncClient(
        transport=stormline.AsyncTransport(config=stormline.Config(**settings)), timeout=module.Timeout(timeout)
    )


def head(length, status="200 OK", **fields):
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status}\r\ncontent-length: {length}\r\n{lines}\r\n".encode()


def breaking(body, *at, stops=False, **fields):
    """Send so much of the body of each answer in turn, then break off or stop; whole after them."""
    left = list(at)

    async def answer(request, writer):
        if not left:
            writer.write(head(len(body), **fields) + body)
            return
        writer.write(head(len(body), **fields) + body[: left.pop(0)])
        await writer.drain()
        if stops:
            await asyncio.sleep(60)
        writer.close()

    return answer


async def gather(response, got):
    async for piece in response.aiter_raw():
        got.append(piece)


def story(response):
    return [line for _, line in response.extensions["stormline"].timeline.story]


class TestContinued:
    @pytest.mark.parametrize("stops", [False, True], ids=["breaks off", "stops"])
    async def test_body_goes_on_over_another_connection(self, module, origin, stops):
        there = await origin(breaking(SHORT, 500, stops=stops))
        async with client_of(module) as client:
            response = await client.get(there.url())
        assert response.content == SHORT
        assert (there.counts["GET"], there.connections) == (2, 2)
        assert "range" not in there.requests[1].headers  # short ones come again as a whole
        assert any("the body broke off; asking again" in line for line in story(response))
        assert response.extensions["stormline"].record.ok

    async def test_body_goes_on_as_often_as_the_attempts_last(self, origin):
        there = await origin(breaking(SHORT, 100, 600, 300))
        async with client_of(httpx2) as client:
            assert (await client.get(there.url())).content == SHORT
        assert there.counts["GET"] == limits.ATTEMPTS_MAX

    async def test_error_is_given_when_the_attempts_are_used_up(self, module, origin):
        there = await origin(breaking(SHORT, 100, 600, 300, 900))
        async with client_of(module) as client:
            with pytest.raises(module.ReadError) as caught:
                await client.get(there.url())
        assert caught.value.phase == "body"
        assert there.counts["GET"] == limits.ATTEMPTS_MAX

    async def test_coded_body_goes_on_before_it_is_decoded(self, module, origin):
        coded = gzip.compress(LONG, mtime=0)
        there = await origin(breaking(coded, len(coded) // 2, content_encoding="gzip"))
        async with client_of(module) as client:
            assert (await client.get(there.url())).content == LONG

    async def test_reader_of_a_stream_sees_each_byte_once(self, module, origin):
        there, got = await origin(breaking(LONG, HALF)), b""
        async with client_of(module) as client, client.stream("GET", there.url()) as response:
            async for piece in response.aiter_raw():
                got += piece
        assert got == LONG

    async def test_synchronous_reader_gets_the_whole_body(self, origin):
        def ask():
            with stormline.Client() as client:
                return client.get(there.url()).content

        there = await origin(breaking(SHORT, 500))
        assert await asyncio.to_thread(ask) == SHORT
        BACKGROUND.stop()


class TestRange:
    async def test_rest_of_a_long_body_is_asked_for_by_range(self, module, origin):
        async def answer(request, writer):
            if "range" not in request.headers:
                writer.write(head(len(LONG), etag=TAG) + LONG[:HALF])
                await writer.drain()
                writer.close()
                return
            start = int(request.headers["range"].removeprefix("bytes=").removesuffix("-"))
            said = f"bytes {start}-{len(LONG) - 1}/{len(LONG)}"
            writer.write(plain(LONG[start:], "206 Partial Content", etag=TAG, content_range=said))

        there = await origin(answer)
        async with client_of(module) as client:
            response = await client.get(there.url())
        assert (response.status_code, response.content) == (200, LONG)
        asked = there.requests[1].headers
        assert (asked["range"], asked["if-range"]) == (f"bytes={HALF}-", TAG)
        assert any("asking again for the rest" in line for line in story(response))

    async def test_server_that_sends_the_whole_instead_is_compared(self, origin):
        there = await origin(breaking(LONG, HALF, etag=TAG))
        async with client_of(httpx2) as client:
            assert (await client.get(there.url())).content == LONG
        assert there.requests[1].headers["range"] == f"bytes={HALF}-"

    @pytest.mark.parametrize("tag", ['W/"v1"', None])
    async def test_rest_without_a_strong_tag_is_compared_as_a_whole(self, origin, tag):
        there = await origin(breaking(LONG, HALF, **({"etag": tag} if tag else {})))
        async with client_of(httpx2) as client:
            assert (await client.get(there.url())).content == LONG
        assert "range" not in there.requests[1].headers

    @pytest.mark.parametrize(
        "second",
        [
            pytest.param({"content_range": f"bytes {HALF + 1}-{len(LONG) - 1}/{len(LONG)}", "etag": TAG}, id="place"),
            pytest.param({"content_range": f"bytes {HALF}-{len(LONG) - 1}/{len(LONG)}", "etag": '"v2"'}, id="tag"),
            pytest.param({"etag": TAG}, id="nothing said"),
        ],
    )
    async def test_part_that_is_another_one_is_an_error(self, origin, second):
        async def answer(request, writer):
            if "range" in request.headers:
                writer.write(plain(LONG[HALF:], "206 Partial Content", **second))
            else:
                writer.write(head(len(LONG), etag=TAG) + LONG[:HALF])
                await writer.drain()
                writer.close()

        there = await origin(answer)
        async with client_of(httpx2) as client:
            with pytest.raises(httpx2.ReadError):
                await client.get(there.url())


class TestNotContinued:
    @pytest.mark.parametrize("body", [SHORT, LONG], ids=["short", "long"])
    @pytest.mark.parametrize("change", ["beginning", "tag", "length", "status", "coding"])
    async def test_answer_that_has_changed_is_an_error_after_what_was_good(self, module, origin, body, change):
        async def answer(request, writer):
            if len(there.requests) == 1:
                writer.write(head(len(body), last_modified="then") + body[: len(body) // 2])
                await writer.drain()
                writer.close()
            elif change == "beginning":
                writer.write(plain(b"x" + body[1:]))
            elif change == "tag":
                writer.write(plain(body, last_modified="now"))
            elif change == "length":
                writer.write(plain(body[: len(body) // 3]))
            elif change == "coding":
                writer.write(plain(body, content_encoding="identity"))
            else:
                writer.write(plain(body, "203 Non-Authoritative Information"))

        there, got = await origin(answer), []
        async with client_of(module) as client:
            response = await client.send(client.build_request("GET", there.url()), stream=True)
            with pytest.raises(module.ReadError) as caught:
                await gather(response, got)
        assert caught.value.phase == "body"
        assert body.startswith(b"".join(got))
        assert there.counts["GET"] == 2

    @pytest.mark.parametrize("key", [{}, {"idempotency-key": "k1"}], ids=["plain", "key"])
    async def test_answer_to_a_write_is_not_asked_for_again(self, module, origin, key):
        there = await origin(breaking(SHORT, 500))
        async with client_of(module) as client:
            with pytest.raises(module.ReadError) as caught:
                await client.post(there.url(), content=b"order", headers=key)
        assert (caught.value.phase, caught.value.maybe_delivered) == ("body", True)
        assert there.counts["POST"] == 1

    async def test_body_is_not_asked_for_again_where_the_caller_wants_no_retries(self, module, origin):
        there = await origin(breaking(SHORT, 500))
        async with client_of(module) as client:
            with pytest.raises(module.ReadError):
                await client.get(there.url(), extensions={"stormline.retries": False})
        assert there.counts["GET"] == 1

    async def test_body_given_up_by_its_reader_is_not_asked_for_again(self, module, origin):
        there = await origin(breaking(LONG, HALF, stops=True))
        async with client_of(module) as client:
            async with client.stream("GET", there.url()) as response:
                async for _ in response.aiter_raw():
                    break
            assert client._transport.runtime()._pool.open_connections == 0
        assert there.counts["GET"] == 1


class TestPatience:
    @pytest.mark.parametrize("said", ["nothing", "None"])
    async def test_events_that_are_rare_are_no_failure(self, module, origin, monkeypatch, said):
        monkeypatch.setattr(allowance, "HTTPX_TIMEOUT_S", 0.4)  # as if it were what the modules send by themselves

        async def events(request, writer):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 0\n\n")
            await writer.drain()
            await asyncio.sleep(1.2)  # four times what a body may be silent
            writer.write(b"data: 1\n\n")
            await writer.drain()
            writer.close()

        there = await origin(events)
        async with client_of(module, timeout=0.4 if said == "nothing" else None) as client:
            assert (await client.get(there.url())).text == "data: 0\n\ndata: 1\n\n"
        assert there.counts["GET"] == 1

    async def test_read_timeout_that_is_set_holds_for_events_too(self, module, origin):
        async def events(request, writer):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 0\n\n")
            await writer.drain()
            await asyncio.sleep(60)

        there, got = await origin(events), []
        async with client_of(module, timeout=0.4) as client:
            response = await client.send(client.build_request("GET", there.url()), stream=True)
            with pytest.raises(module.ReadTimeout):
                await gather(response, got)
        assert got == [b"data: 0\n\n"]
        assert there.counts["GET"] == 1

    @pytest.mark.parametrize("http2", [False, True], ids=["http1", "http2"])
    async def test_reader_that_takes_its_time_is_no_silence_of_the_server(self, module, pki, http2):
        size = 4 * 1024 * 1024
        trust = ssl.create_default_context(cadata=pki.ca.ca_pem)
        trust.set_alpn_protocols(["h2", "http/1.1"])
        async with _Large(pki, size, http2=http2) as url:
            transport = stormline.AsyncTransport(verify=trust)
            async with module.AsyncClient(transport=transport, timeout=module.Timeout(30.0, read=0.4)) as client:
                got = 0
                async with client.stream("GET", url) as response:
                    async for piece in response.aiter_raw():
                        if got < size // 2 <= got + len(piece):
                            await asyncio.sleep(1.0)
                        got += len(piece)
        assert response.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
        assert got == size


class _Large:
    """A server of one large body."""

    def __init__(self, pki, size, *, http2):
        files = pki.ca.issue("origin", names=["localhost"])
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(files.certificate, files.key)
        self._context.set_alpn_protocols(["h2"] if http2 else ["http/1.1"])
        self._size = size
        self._http2 = http2
        self._tasks = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        return f"https://localhost:{Address(*self._server.sockets[0].getsockname()[:2]).port}/"

    async def __aexit__(self, *exc):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        if self._http2:

            async def script(peer):
                request = await peer.wait(h2.events.RequestReceived)
                await peer.answer(request.stream_id, bytes(self._size))

            await Peer(reader, writer).serve(script)
        else:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(plain(bytes(self._size)))
            await writer.drain()
            await reader.read()
        writer.close()


@pytest.fixture(name="tls")
def _tls(pki):
    """Make a server's context with a certificate for a name."""

    def make(name=NAME, *alpn):
        files = pki.ca.issue(name.replace(".", "-"), names=[name])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        context.set_alpn_protocols(list(alpn or ("http/1.1",)))
        return context

    return make


class TestSlowLink:
    """Where silence is a matter of course an answered ping tells that no more of the body is on its way."""

    @pytest.fixture(autouse=True)
    def _slow(self, monkeypatch):
        monkeypatch.setattr(Steering, "room", lambda self, host: False)
        monkeypatch.setattr(limits, "TIMEOUT_GAP_SLOW_S_MIN", 0.3)

    @staticmethod
    async def server(tls, script):
        async def connected(reader, writer):
            with contextlib.suppress(OSError, EOFError):
                await Peer(reader, writer).serve(script)

        listening = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls(NAME, "h2"))
        return listening, Address(*listening.sockets[0].getsockname()[:2])

    @pytest.mark.parametrize("answers_pings", [True, False])
    async def test_body_is_asked_for_again_where_its_server_has_stopped_and_only_there(
        self, tls, trust, names, answers_pings
    ):
        asked = []

        async def silence():
            """Say nothing any more."""

        async def script(peer):
            request = await peer.wait(h2.events.RequestReceived)
            asked.append(request.stream_id)
            if len(asked) > 1:
                await peer.answer(request.stream_id, SHORT)
                return
            peer.h2.send_headers(request.stream_id, [(b":status", b"200"), (b"content-length", b"%d" % len(SHORT))])
            peer.h2.send_data(request.stream_id, SHORT[:500])
            await peer.flush()
            if not answers_pings:
                peer.flush = silence
            await peer.wait(h2.events.RequestReceived, 2)

        listening, address = await self.server(tls, script)
        transport = stormline.AsyncTransport(verify=trust("h2"), outside=names({NAME: address}))
        async with listening, httpx2.AsyncClient(transport=transport, timeout=30.0) as client:
            asking = asyncio.create_task(client.get(f"https://{NAME}/"))
            done, _ = await asyncio.wait([asking], timeout=10.0 if answers_pings else 1.5)
            assert len(asked) == (2 if answers_pings else 1)
            if done:
                assert asking.result().content == SHORT
                assert any("asking again" in line for line in story(asking.result()))
            asking.cancel()
            await asyncio.wait([asking])
