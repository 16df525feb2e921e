"""Server-sent events from a real server (uvicorn): httpx2's own reader, ours, and the subscription that comes back."""

import asyncio
import contextlib
import gzip
import importlib
import itertools

import httpx2
import pytest

import stormline
from stormline.client import sse
from stormline.client.background import BACKGROUND
from stormline.client.sse import Event
from stormline.core import errors, limits
from stormline.testing.origin import plain
from stormline.web.server import HttpServer

pytestmark = pytest.mark.loopback
STREAM = b"\xef\xbb\xbf: hello\n\nid: 1\ndata: one\n\nevent: more\nid: 2\r\ndata: two\r\ndata: lines\r\n\r\ndata: lost"
EVENTS = [Event("message", "one", "1"), Event("more", "two\nlines", "2")]


@pytest.fixture(name="module", params=["httpx2", "httpx"])
def _module(request):
    return importlib.import_module(request.param)


@pytest.fixture(autouse=True)
def _end_background():
    """End the thread of the sync clients, so that no descriptor of its loop stays."""
    yield
    BACKGROUND.stop()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """Come back at once: the spans are policy's, and its own tests hold them."""
    monkeypatch.setattr(limits, "RECONNECT_FIRST_S", 0.001)
    monkeypatch.setattr(limits, "RECONNECT_MAX_S", 0.001)


class Service:
    """An ASGI app that plays one answer per request and keeps what it was asked."""

    def __init__(self, *answers):
        self._answers = iter(answers)
        self.asked: list[dict[str, str]] = []

    async def __call__(self, scope, receive, send):
        self.asked.append({name.decode(): value.decode() for name, value in scope["headers"]})
        status, headers, body = next(self._answers)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for piece in body:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})

    def last_ids(self):
        return [headers.get("last-event-id") for headers in self.asked]


def stream(*pieces, **headers):
    fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return 200, [(b"content-type", b"text/event-stream; charset=utf-8"), *fields], pieces


GONE = (204, [], ())


@pytest.fixture(name="serve")
async def _serve():
    async with contextlib.AsyncExitStack() as stack:

        async def serve(*answers):
            service = Service(*answers)
            server = HttpServer(service, host="127.0.0.1", port=0, what="test")
            await server.start()
            stack.push_async_callback(server.stop)
            return service, f"http://{server.address}/events"

        yield serve


def bytewise(stream):
    return tuple(stream[at : at + 1] for at in range(len(stream)))


async def gather(client, url, **options):
    return [event async for event in sse.asubscribe(client, url, **options)]


class TestOneAnswer:
    async def test_httpx2_reads_events_over_stormline(self, serve):
        _, url = await serve(stream(STREAM.removeprefix(b"\xef\xbb\xbf")), stream(STREAM.removeprefix(b"\xef\xbb\xbf")))
        async with stormline.AsyncClient() as client, client.sse(url) as source:
            got = [(event.event, event.data, event.id) async for event in source]
        assert got == EVENTS

        def ask():
            with stormline.Client() as client, client.sse(url) as source:
                return [(event.event, event.data, event.id) for event in source]

        assert await asyncio.to_thread(ask) == EVENTS

    async def test_events_of_an_answer_of_either_module_are_read(self, serve, module):
        _, url = await serve(stream(*bytewise(STREAM)), stream(*bytewise(STREAM)))
        async with (
            module.AsyncClient(transport=stormline.AsyncTransport()) as client,
            client.stream("GET", url) as response,
        ):
            assert [event async for event in sse.aevents(response)] == EVENTS

        def ask():
            with module.Client(transport=stormline.Transport()) as client, client.stream("GET", url) as response:
                return list(sse.events(response))

        assert await asyncio.to_thread(ask) == EVENTS

    async def test_coded_stream_is_read(self, serve):
        _, url = await serve(stream(gzip.compress(STREAM), content_encoding="gzip"))
        async with stormline.AsyncClient() as client, client.stream("GET", url) as response:
            assert [event async for event in sse.aevents(response)] == EVENTS

    async def test_answer_of_another_type_is_an_error(self, serve):
        _, url = await serve((200, [(b"content-type", b"text/html")], (b"<html>",)))
        async with stormline.AsyncClient() as client, client.stream("GET", url) as response:
            with pytest.raises(errors.ProtocolViolation, match="text/html"):
                await anext(sse.aevents(response))


class TestSubscription:
    async def test_stream_that_ends_is_asked_on_from_the_last_whole_event(self, serve, module):
        service, url = await serve(
            stream(b"id: 1\ndata: a\n\n", b"id: 2\ndata: cut"), stream(b"id: 2\ndata: b\n\n"), stream(), GONE
        )
        async with module.AsyncClient(transport=stormline.AsyncTransport()) as client:
            got = await gather(client, url, headers={"X-Key": "k"})
        assert [event.data for event in got] == ["a", "b"]
        assert service.last_ids() == [None, "1", "2", "2"]
        assert {headers["x-key"] for headers in service.asked} == {"k"}
        assert {headers["accept"] for headers in service.asked} == {"text/event-stream"}

    async def test_synchronous_subscription_goes_on_too(self, serve, module):
        service, url = await serve(stream(b"id: 1\ndata: a\n\n"), stream(b"id: 2\ndata: b\n\n"), GONE)

        def ask():
            with module.Client(transport=stormline.Transport()) as client:
                return [event.data for event in sse.subscribe(client, url, last_event_id="\u00fc0")]

        assert await asyncio.to_thread(ask) == ["a", "b"]
        assert service.last_ids() == ["\u00fc0", "1", "2"]

    async def test_stream_that_breaks_off_is_asked_on(self, origin):
        async def answer(request, writer):
            ids.append(request.headers.get("last-event-id"))
            if len(ids) == 4:
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                return
            if len(ids) != 2:  # the second request gets nothing at all
                event = b"id: %d\ndata: x\n\n" % len(ids)
                head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                writer.write(head + b"%x\r\n" % len(event) + event + b"\r\n")
                await writer.drain()
            writer.close()

        ids = []
        there = await origin(answer)
        async with stormline.AsyncClient() as client:
            # POST, so that the broken second request is not repeated below.
            got = await gather(client, there.url(), method="POST")
        assert [event.id for event in got] == ["1", "3"]
        assert ids == [None, "1", "1", "3"]

    @pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
    async def test_server_that_cannot_just_now_is_asked_again_once_a_stream_has_stood(self, serve, status):
        service, url = await serve(
            stream(b"id: 1\ndata: a\n\n"), (status, [(b"retry-after", b"0")], ()), stream(b"data: b\n\n"), GONE
        )
        async with stormline.AsyncClient() as client:
            assert [event.data for event in await gather(client, url)] == ["a", "b"]
        assert service.last_ids() == [None, "1", "1", "1"]

    async def test_portal_page_is_waited_out_once_a_stream_has_stood(self, serve):
        portal = (200, [(b"content-type", b"text/html")], (b"<html>please pay</html>",))
        _, url = await serve(stream(b"id: 1\ndata: a\n\n"), portal, stream(b"data: b\n\n"), GONE)
        async with stormline.AsyncClient() as client:
            assert [event.data for event in await gather(client, url)] == ["a", "b"]

    @pytest.mark.parametrize("status", [401, 404, 501])
    async def test_first_answer_that_refuses_is_the_caller_s(self, serve, module, status):
        service, url = await serve((status, [], ()))
        async with module.AsyncClient(transport=stormline.AsyncTransport()) as client:
            with pytest.raises(module.HTTPStatusError):
                await gather(client, url)
        assert len(service.asked) == 1

    async def test_later_answer_that_refuses_for_good_ends_it(self, serve):
        _, url = await serve(stream(b"data: a\n\n"), (401, [], ()))
        async with stormline.AsyncClient() as client:
            with pytest.raises(httpx2.HTTPStatusError):
                await gather(client, url)

    async def test_first_answer_that_is_no_stream_or_does_not_come_is_an_error(self, serve):
        _, url = await serve((200, [(b"content-type", b"text/html")], ()))
        async with stormline.AsyncClient() as client:
            with pytest.raises(errors.ProtocolViolation):
                await gather(client, url)
            with pytest.raises(errors.ConnectError):
                await gather(client, "http://127.0.0.1:1/")

    async def test_event_that_is_too_large_ends_it(self, serve, monkeypatch):
        monkeypatch.setattr(limits, "SSE_EVENT_BYTES_MAX", 1000)
        service, url = await serve(stream(b"data: a\n\n"), stream(b"data: " + b"x" * 1000))
        async with stormline.AsyncClient() as client:
            with pytest.raises(errors.ProtocolViolation, match="more than 1000 bytes"):
                await gather(client, url)
        assert len(service.asked) == 2

    async def test_pause_is_what_the_server_asks_for(self, serve):
        _, url = await serve(stream(b"retry: 200\n", b"data: a\n\n"), stream(b"data: b\n\n"), GONE)
        loop = asyncio.get_running_loop()
        async with stormline.AsyncClient() as client:
            times = [loop.time() async for _ in sse.asubscribe(client, url)]
        assert times[1] - times[0] >= 0.2 * 0.75

    async def test_silent_stream_is_left_and_asked_on(self, origin, monkeypatch):
        async def answer(request, writer):
            number = next(numbers)
            if number == 3:
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                return
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\nid: %d\ndata: x\n\n" % number)
            await writer.drain()
            await asyncio.sleep(60)

        monkeypatch.setattr(limits, "SSE_SILENCE_S", 0.2)
        numbers = itertools.count(1)
        there = await origin(answer)
        async with stormline.AsyncClient() as client:
            got = await gather(client, there.url())
        assert [event.id for event in got] == ["1", "2"]

    async def test_subscription_that_is_left_frees_its_connection(self, origin):
        async def answer(request, writer):
            if request.target == "/other":
                writer.write(plain())
                return
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: x\n\n")
            await writer.drain()
            await writer.wait_closed()

        there = await origin(answer)
        async with stormline.AsyncClient() as client:
            async with contextlib.aclosing(sse.asubscribe(client, there.url())) as events:
                async for _ in events:
                    break
            assert (await client.get(there.url("/other"))).text == "ok"

    @pytest.mark.parametrize("ident", ["a\x01b", "\x7f"])
    async def test_id_that_no_header_can_carry_is_not_sent(self, serve, ident):
        service, url = await serve(stream(b"id: " + ident.encode() + b"\ndata: a\n\n"), GONE)
        async with stormline.AsyncClient() as client:
            assert [event.id for event in await gather(client, url)] == [ident]
        assert service.last_ids() == [None, None]
