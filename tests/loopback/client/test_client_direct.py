"""Requests to the origin itself, under httpx2 and httpx alike: what they are used for must just work."""

import asyncio
import importlib
import threading

import pytest

import stormline
from stormline.core import errors, limits
from stormline.testing.origin import plain
from stormline.testing.world import wait_until

pytestmark = pytest.mark.loopback


@pytest.fixture(name="module", params=["httpx2", "httpx"])
def _module(request):
    return importlib.import_module(request.param)


def client_of(module, **options):
    return module.AsyncClient(transport=stormline.AsyncTransport(), **options)


class TestHttpxFeatures:
    async def test_get_gives_a_response_of_the_caller_s_module(self, module, origin):
        there = await origin()
        async with client_of(module) as client:
            response = await client.get(there.url("/a?b=1"))
        assert isinstance(response, module.Response)
        assert (response.status_code, response.text, response.http_version) == (200, "ok", "HTTP/1.1")
        assert response.extensions["reason_phrase"] == b"OK"
        assert there.requests[0].target == "/a?b=1"

    async def test_connection_is_kept_and_used_again(self, module, origin):
        there = await origin()
        async with client_of(module) as client:
            for _ in range(5):
                await client.get(there.url())
        assert there.connections == 1

    @pytest.mark.parametrize("content", [b"", b"abc", bytes(1_000_000)])
    async def test_post_sends_the_body_whole(self, module, origin, content):
        there = await origin()
        async with client_of(module) as client:
            await client.post(there.url(), content=content)
        assert there.requests[0].body == content

    async def test_form_and_json_and_files_are_sent(self, module, origin):
        there = await origin()
        async with client_of(module) as client:
            await client.post(there.url(), data={"a": "1"})
            await client.post(there.url(), json={"a": 1})
            await client.post(there.url(), files={"f": ("n.txt", b"content")})
        form, text, files = there.requests
        assert form.body == b"a=1"
        assert text.body.replace(b" ", b"") == b'{"a":1}'
        assert b"content" in files.body

    async def test_streamed_request_body_is_chunked(self, module, origin):
        async def chunks():
            for n in range(5):
                yield str(n).encode()

        there = await origin()
        async with client_of(module) as client:
            await client.put(there.url(), content=chunks())
        assert there.requests[0].body == b"01234"

    async def test_events_come_as_they_are_sent(self, module, origin):
        go_on = asyncio.Event()

        async def events(request, writer):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
            for n in range(3):
                writer.write(f"data: {n}\n\n".encode())
                await writer.drain()
                await go_on.wait()
                go_on.clear()
            writer.close()

        there, got = await origin(events), []
        async with client_of(module) as client, client.stream("GET", there.url()) as response:
            async for line in response.aiter_lines():
                if line:
                    got.append(line)
                    go_on.set()
        assert got == ["data: 0", "data: 1", "data: 2"]

    async def test_redirects_are_followed_and_each_hop_has_its_record(self, origin, world, records):
        async def answer(request, writer):
            hops = int(request.target[1:])
            await asyncio.sleep(0.02)
            writer.write(plain(b"end") if not hops else plain(b"", status="302 Found", location=f"/{hops - 1}"))

        there = await origin(answer)
        config = stormline.Config(bundle=(await world(lambda end: asyncio.sleep(0))).bundle)
        async with stormline.AsyncClient(config=config, follow_redirects=True) as client:
            response = await client.get(there.url("/3"))
        assert response.text == "end"
        assert [record.path for record in records] == ["/3", "/2", "/1", "/0"]
        assert [record.status for record in records] == [302, 302, 302, 200]
        starts = [record.started_at_ms for record in records]
        for record, following in zip(records, starts[1:], strict=False):
            assert record.started_at_ms + record.total_ms <= following + 2  # a hop's time is its own

    async def test_cookies_are_kept(self, module, origin):
        async def answer(request, writer):
            writer.write(plain(request.headers.get("cookie", "").encode(), set_cookie="a=1; Path=/"))

        there = await origin(answer)
        async with client_of(module) as client:
            assert (await client.get(there.url())).text == ""
            assert (await client.get(there.url())).text == "a=1"

    async def test_digest_authentication_asks_twice(self, module, origin):
        async def answer(request, writer):
            if "authorization" in request.headers:
                writer.write(plain(b"in"))
            else:
                challenge = 'Digest realm="r", nonce="n", qop="auth", algorithm=MD5'
                writer.write(plain(b"who?", status="401 Unauthorized", www_authenticate=challenge))

        there = await origin(answer)
        async with client_of(module, auth=module.DigestAuth("user", "word")) as client:
            assert (await client.get(there.url())).text == "in"

    async def test_head_and_no_content_have_no_body(self, module, origin):
        async def answer(request, writer):
            if request.method == "HEAD":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
            else:
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

        there = await origin(answer)
        async with client_of(module) as client:
            head = await client.head(there.url())
            gone = await client.delete(there.url())
            assert (head.content, head.headers["content-length"], gone.status_code) == (b"", "1000", 204)
        assert there.connections == 1

    async def test_compressed_body_is_decoded(self, module, origin):
        import gzip

        async def answer(request, writer):
            writer.write(plain(gzip.compress(b"text" * 1000), content_encoding="gzip"))

        there = await origin(answer)
        async with client_of(module) as client:
            response = await client.get(there.url())
        assert response.content == b"text" * 1000
        assert response.extensions["stormline"].record.bytes_down < 1000

    async def test_event_hooks_run(self, module, origin):
        seen = []

        async def hook(message):
            seen.append(type(message).__name__)

        there = await origin()
        async with client_of(module, event_hooks={"request": [hook], "response": [hook]}) as client:
            await client.get(there.url())
        assert seen == ["Request", "Response"]

    async def test_twenty_at_once_are_answered_each_with_its_own(self, module, origin):
        async def answer(request, writer):
            writer.write(plain(request.target.encode()))

        there = await origin(answer)
        async with client_of(module) as client:
            answers = await asyncio.gather(*(client.get(there.url(f"/{n}")) for n in range(20)))
        assert [answer.text for answer in answers] == [f"/{n}" for n in range(20)]


class TestErrors:
    async def test_refused_connection_is_of_both_trees(self, module):
        async with client_of(module) as client:
            with pytest.raises(module.ConnectError) as caught:
                await client.post("http://127.0.0.1:1/", content=b"x")
        assert isinstance(caught.value, errors.ConnectError)
        assert (caught.value.phase, caught.value.maybe_delivered) == ("connect", False)
        assert caught.value.request.method == "POST"

    async def test_unknown_name_is_a_connect_error(self, module):
        async with client_of(module) as client:
            with pytest.raises(module.ConnectError) as caught:
                await client.get("http://nobody.invalid/")
        assert isinstance(caught.value, errors.ResolveError)

    async def test_foreign_certificate_is_a_connect_error(self, module, origin, pki):
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pki.apm.certificate, pki.apm.key)
        there = await origin(ssl=context)
        async with client_of(module) as client:
            with pytest.raises(module.ConnectError) as caught:
                await client.get(f"https://127.0.0.1:{there.address.port}/")
        assert isinstance(caught.value, errors.TlsError)
        assert there.requests == []

    async def test_own_trust_is_used_for_origins(self, module, origin, pki):
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        files = pki.ca.issue("origin", names=["localhost"])
        context.load_cert_chain(files.certificate, files.key)
        there = await origin(ssl=context)
        trust = ssl.create_default_context(cadata=pki.ca.ca_pem)
        async with module.AsyncClient(transport=stormline.AsyncTransport(verify=trust)) as client:
            assert (await client.get(f"https://localhost:{there.address.port}/")).text == "ok"

    async def test_connection_dropped_without_an_answer_is_a_read_error(self, module, origin):
        async def drop(request, writer):
            writer.close()

        there = await origin(drop)
        async with client_of(module) as client:
            with pytest.raises(module.ReadError) as caught:
                await client.post(there.url(), content=b"x")
        assert caught.value.maybe_delivered is True
        assert there.counts["POST"] == 1

    async def test_write_on_a_kept_connection_that_dies_is_made_once(self, module, origin):
        async def second_dies(request, writer):
            writer.close() if len(there.requests) == 2 else writer.write(plain())

        there = await origin(second_dies)
        async with client_of(module) as client:
            await client.get(there.url())
            with pytest.raises(module.ReadError):
                await client.post(there.url(), content=b"x")
        assert there.counts["POST"] == 1

    async def test_read_on_a_kept_connection_that_dies_is_asked_on_a_fresh_one(self, module, origin):
        async def dies_in_second(request, writer):
            seen[id(writer)] = seen.get(id(writer), 0) + 1
            writer.close() if seen[id(writer)] == 2 else writer.write(plain())

        seen = {}
        there = await origin(dies_in_second)
        async with client_of(module) as client:
            # Two connections are kept; both would die: the second try may not be on the other one.
            await asyncio.gather(client.get(there.url()), client.get(there.url()))
            response = await client.get(there.url())
        assert response.status_code == 200
        assert len(response.extensions["stormline"].record.attempts) == 2

    async def test_half_a_body_is_an_error(self, module, origin):
        async def half(request, writer):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
            writer.close()

        there = await origin(half)
        async with client_of(module) as client:
            with pytest.raises(module.ReadError) as caught:
                await client.get(there.url())
        assert caught.value.phase == "body"

    async def test_answer_that_is_no_http_is_a_protocol_error(self, module, origin):
        async def junk(request, writer):
            writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")

        there = await origin(junk)
        async with client_of(module) as client:
            with pytest.raises(module.RemoteProtocolError):
                await client.get(there.url())

    async def test_header_that_would_break_out_is_refused_of_both_trees(self, module, origin):
        there = await origin()
        async with client_of(module) as client:
            with pytest.raises(module.LocalProtocolError) as caught:
                await client.get(there.url(), headers={"x": "a\r\nsecret: b"})
        assert isinstance(caught.value, errors.LocalProtocolError)
        assert there.requests == []

    async def test_other_schemes_are_refused(self, module):
        async with client_of(module) as client:
            with pytest.raises(module.UnsupportedProtocol):
                await client.get("ftp://127.0.0.1/")


class TestTimeouts:
    async def test_read_timeout_bounds_the_wait_for_the_answer(self, module, origin):
        async def silent(request, writer):
            await asyncio.sleep(60)

        there = await origin(silent)
        async with client_of(module, timeout=module.Timeout(10, read=0.2)) as client:
            with pytest.raises(module.ReadTimeout) as caught:
                await client.post(there.url(), content=b"x")
        assert (caught.value.phase, caught.value.maybe_delivered) == ("first_byte", True)

    async def test_read_timeout_bounds_gaps_in_the_body_not_its_length(self, module, origin):
        async def dribble(request, writer):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
            for _ in range(8):
                writer.write(b"x")
                await asyncio.sleep(0.05)
            await asyncio.sleep(60)

        there, got = await origin(dribble), b""
        async with client_of(module, timeout=module.Timeout(10, read=0.3)) as client:
            response = await client.send(client.build_request("GET", there.url()), stream=True)
            chunks = response.aiter_raw()
            for _ in range(8):
                got += await anext(chunks)
            with pytest.raises(module.ReadTimeout) as caught:
                await anext(chunks)
            await response.aclose()
        assert got == b"x" * 8
        assert caught.value.phase == "body"

    async def test_no_read_timeout_means_none(self, module, origin, monkeypatch):
        monkeypatch.setattr(limits, "PACKET_GAP_S", 0.1)
        monkeypatch.setattr(limits, "READ_TIMEOUT_S", 0.1)

        async def slow(request, writer):
            await asyncio.sleep(0.3)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no")
            await writer.drain()
            await asyncio.sleep(0.3)
            writer.write(b"k")

        there = await origin(slow)
        async with client_of(module, timeout=None) as client:
            assert (await client.get(there.url())).text == "ok"

    async def test_connect_timeout_bounds_the_connection(self, module):
        import socket

        with socket.socket() as full:  # nobody accepts, and the queue is full: SYNs are not answered
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            taken = [socket.socket() for _ in range(4)]
            for sock in taken:
                sock.setblocking(False)
                sock.connect_ex(full.getsockname())
            async with client_of(module, timeout=module.Timeout(10, connect=0.2)) as client:
                with pytest.raises(module.ConnectTimeout) as caught:
                    await client.post(f"http://127.0.0.1:{full.getsockname()[1]}/", content=b"x")
            for sock in taken:
                sock.close()
        assert caught.value.maybe_delivered is False

    async def test_deadline_of_one_request_is_taken_from_its_extension(self, module, origin):
        async def silent(request, writer):
            await asyncio.sleep(60)

        there = await origin(silent)
        async with client_of(module) as client:
            with pytest.raises(module.ReadTimeout):
                await client.get(there.url(), extensions={"stormline.deadline_s": 0.2})
            with pytest.raises(module.LocalProtocolError):
                await client.get(there.url(), extensions={"stormline.deadline_s": -1})

    async def test_slow_upload_is_no_silence(self, module, origin):
        async def slow():
            for _ in range(8):
                await asyncio.sleep(0.05)
                yield b"x"

        there = await origin()
        async with client_of(module, timeout=module.Timeout(10, read=0.3)) as client:
            await client.post(there.url(), content=slow())
        assert there.requests[0].body == b"x" * 8


class TestSync:
    @pytest.mark.parametrize("name", ["httpx2", "httpx"])
    def test_twenty_threads_share_one_client(self, name):
        module = importlib.import_module(name)
        with _OriginInThread() as url, module.Client(transport=stormline.Transport()) as client:
            answers = []

            def work():
                for _ in range(10):
                    text = client.get(url).text
                    answers.append(text)

            threads = [threading.Thread(target=work) for _ in range(20)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert answers == ["ok"] * 200
        stormline_background_stop()

    def test_request_body_is_read_in_the_caller_s_thread(self):
        readers = set()

        def chunks():
            for n in range(3):
                readers.add(threading.current_thread())
                yield str(n).encode()

        with _OriginInThread(echo=True) as url, stormline.Client() as client:
            assert client.post(url, content=chunks()).text == "012"
        assert readers == {threading.current_thread()}
        stormline_background_stop()

    def test_error_of_the_body_s_source_comes_to_the_caller(self):
        def chunks():
            yield b"x"
            raise ZeroDivisionError

        with _OriginInThread() as url, stormline.Client() as client:
            with pytest.raises(ZeroDivisionError):
                client.post(url, content=chunks())
            assert client.get(url).text == "ok"
        stormline_background_stop()

    def test_answer_can_be_streamed(self):
        with _OriginInThread() as url, stormline.Client() as client, client.stream("GET", url) as response:
            assert b"".join(response.iter_raw()) == b"ok"
        stormline_background_stop()

    def test_errors_are_of_both_trees(self):
        import httpx2

        with stormline.Client() as client, pytest.raises(httpx2.ConnectError) as caught:
            client.get("http://127.0.0.1:1/")
        assert isinstance(caught.value, errors.ConnectError)
        stormline_background_stop()

    def test_unused_client_starts_no_thread(self):
        from stormline.client.background import BACKGROUND

        with stormline.Client():
            pass
        assert BACKGROUND._thread is None


class TestApi:
    async def test_parse_hook_gives_its_verdict(self, world, origin, records):
        verdicts = {"/good": True, "/bad": False, "/none": None}

        def parse(response):
            if response.url.path == "/raises":
                raise KeyError("secret")
            return verdicts[response.url.path]

        there = await origin()
        config = stormline.Config(bundle=(await world(lambda end: asyncio.sleep(0))).bundle)
        async with stormline.AsyncClient(config=config, parse=parse) as client:
            for path in ("/good", "/bad", "/none", "/raises"):
                assert (await client.get(there.url(path))).status_code == 200
        assert [(each.ok_parse, each.ok, each.failure) for each in records] == [
            (True, True, ""),
            (False, False, "parse"),
            (None, True, ""),
            (False, False, "parse"),
        ]
        assert all("parse" in each.stages_ms for each in records)

    @pytest.mark.parametrize("option", ["transport", "mounts"])
    def test_option_that_leads_past_stormline_is_refused(self, option):
        for kind in (stormline.AsyncClient, stormline.Client):
            with pytest.raises(errors.ConfigError, match=option):
                kind(**{option: object()})

    async def test_stages_add_up_and_stand_in_order(self, origin):
        from stormline.telemetry.timeline import STAGES

        async def answer(request, writer):
            await asyncio.sleep(0.05)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no")
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.write(b"k")

        there = await origin(answer)
        async with stormline.AsyncClient() as client:
            record = (await client.get(there.url())).extensions["stormline"].record
        assert sum(record.stages_ms.values()) == pytest.approx(record.total_ms)
        assert list(record.stages_ms) == [stage for stage in STAGES if stage in record.stages_ms]
        assert {"connect", "send", "first_byte", "body", "callback"} <= record.stages_ms.keys()
        assert record.stages_ms["first_byte"] >= 40
        assert record.stages_ms["body"] >= 40
        assert record.bytes_up > 0

    @pytest.mark.parametrize(
        "change",
        [
            {"deadline_s": 0},
            {"read_timeout_s": -1},
            {"connect_timeout_s": float("nan")},
            {"disabled": frozenset({"x"})},
        ],
    )
    def test_config_out_of_range_names_the_field(self, change):
        with pytest.raises(errors.ConfigError, match=next(iter(change))):
            stormline.Config(**change)


class TestCancellation:
    async def test_request_given_up_leaves_nothing(self, origin):
        async def silent(request, writer):
            await asyncio.sleep(60)

        there = await origin(silent)
        transport = stormline.AsyncTransport()
        async with stormline.AsyncClient() as client:
            task = asyncio.ensure_future(client.get(there.url()))
            await wait_until(lambda: there.requests)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert client._storm.runtime()._pool.open_connections == 0
        await transport.aclose()

    async def test_body_given_up_in_the_middle_leaves_nothing(self, origin):
        async def half(request, writer):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
            await writer.drain()
            await asyncio.sleep(60)

        there = await origin(half)
        async with stormline.AsyncClient() as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.get(there.url())
            assert client._storm.runtime()._pool.open_connections == 0


# -- tools -----------------------------------------------------------------------------------------------------------


def stormline_background_stop():
    """End the thread of the sync clients, so that no descriptor of its loop stays."""
    from stormline.client.background import BACKGROUND

    BACKGROUND.stop()


class _OriginInThread:
    """An origin for synchronous clients, on a loop of its own."""

    def __init__(self, *, echo=False):
        self._echo = echo

    def __enter__(self):
        from stormline.testing.origin import answer_plainly, running_origin

        async def echo(request, writer):
            writer.write(plain(request.body))

        async def serve():
            async with running_origin(echo if self._echo else answer_plainly) as origin:
                self._stop = asyncio.Event()
                self._loop = asyncio.get_running_loop()
                self.url = origin.url()
                started.set()
                await self._stop.wait()

        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(serve()))
        self._thread.start()
        started.wait()
        return self.url

    def __exit__(self, *exc):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
