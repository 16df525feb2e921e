"""Public SDKs over stormline, turned over by the two lines of the README, against servers that speak their APIs.

`openai` is built on httpx2 and takes clients of httpx too; `notion-client` is built on httpx and has retry rules of its
own. Hypercorn serves both APIs from here, over HTTP/1.1 and over HTTP/2 with TLS.
"""

import asyncio
import collections
import contextlib
import json
import socket
import ssl
from email.parser import BytesParser

import httpx
import httpx2
import hypercorn.asyncio
import hypercorn.config
import notion_client
import notion_client.errors
import notion_client.helpers
import openai
import pytest

import stormline
from stormline.client.background import BACKGROUND
from stormline.core import errors, limits
from stormline.testing.origin import running_origin
from stormline.testing.world import make_pki, wait_until

pytestmark = pytest.mark.loopback
KEY = "sk-not-a-real-key"
FILES = 25
PAGE = 10
LARGE = bytes(range(256)) * 8_000  # 2 MB: many packets, more than one HTTP/2 window


class Api:
    """Enough of two public APIs to be used by their SDKs.

    Attributes:
        seen: method and path of every request whose body was read.
        peers: ports of the clients' ends of the connections.
        uploads: parts of every multipart body: name to content.
        failures: how many of the next requests are turned away, by status.
        go: lets the next piece of a streamed answer go; set it once for each.
    """

    def __init__(self):
        self.seen = []
        self.peers = set()
        self.versions = set()
        self.uploads = []
        self.failures = collections.Counter()
        self.go = asyncio.Semaphore(0)
        self.gone = 0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.seen.append((scope["method"], scope["path"]))
        self.peers.add(scope["client"][1])
        self.versions.add(scope["http_version"])
        headers = dict(scope["headers"])
        assert headers[b"authorization"] == b"Bearer " + KEY.encode()
        for status in self.failures:
            if self.failures[status]:
                self.failures[status] -= 1
                await self._turn_away(scope["path"], send, status)
                return
        await self._route(scope, headers, body, receive, send)

    async def _route(self, scope, headers, body, receive, send):
        match scope["path"]:
            case "/v1/chat/completions":
                question = json.loads(body)
                text = question["messages"][-1]["content"]
                if text == "silence":
                    await self._until_gone(receive)
                elif question.get("stream"):
                    await self._stream(text, send)
                else:
                    message = {"role": "assistant", "content": text.upper()}
                    await self._say(send, self._chunk({"message": message}) | {"object": "chat.completion"})
            case "/v1/files" if scope["method"] == "POST":
                self.uploads.append(_parts(headers[b"content-type"], body))
                await self._say(send, _file(0))
            case "/v1/files/file-0/content":
                await self._say(send, LARGE)
            case "/v1/files" | "/v1/users" as path:
                await self._say(send, _page(path, dict(_query(scope["query_string"]))))
            case "/v1/file_uploads/f/send":
                self.uploads.append(_parts(headers[b"content-type"], body))
                await self._say(send, {"object": "file_upload", "id": "f"})
            case "/v1/silence":
                await self._until_gone(receive)
            case _:
                await self._say(send, {"error": {"message": "no such thing"}}, 404)

    async def _turn_away(self, path, send, status):
        error = {"message": "not now", "code": "rate_limited"}
        # Each SDK reads one of these as "soon": the other takes no fractions, and openai no 0.
        after = b"0" if path == "/v1/users" else b"0.02"
        await self._say(send, {"object": "error", "error": error, **error}, status, (b"retry-after", after))

    async def _until_gone(self, receive):
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone += 1

    async def _stream(self, text, send):
        await send(_start(200, b"text/event-stream"))
        for word in text.split():
            await self.go.acquire()
            event = f"data: {json.dumps(self._chunk({'delta': {'content': word}}))}\n\n"
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _chunk(self, choice):
        choice = {"index": 0, "finish_reason": None, "logprobs": None, **choice}
        return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}

    async def _say(self, send, what, status=200, *headers):
        body = what if isinstance(what, bytes) else json.dumps(what).encode()
        await send(_start(status, b"application/json", *headers))
        await send({"type": "http.response.body", "body": body})


def _start(status, kind, *headers):
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *headers]}


def _file(number):
    return {
        "id": f"file-{number}", "object": "file", "bytes": 1, "created_at": 1, "filename": "f", "purpose": "batch",
        "status": "processed",
    }  # fmt: skip


def _query(raw):
    return [pair.partition("=")[::2] for pair in raw.decode().split("&") if pair]


def _page(path, query):
    """One page of a list, by the cursors of either API."""
    first = int(query["after"].rpartition("-")[2]) + 1 if "after" in query else int(query.get("start_cursor", 0))
    numbers = range(first, min(first + PAGE, FILES))
    more = numbers.stop < FILES
    if path == "/v1/files":
        return {"object": "list", "data": [_file(number) for number in numbers], "has_more": more}
    users = [{"object": "user", "id": f"user-{number}"} for number in numbers]
    return {"object": "list", "results": users, "has_more": more, "next_cursor": str(numbers.stop) if more else None}


def _parts(kind, body):
    message = BytesParser().parsebytes(b"Content-Type: " + kind + b"\r\n\r\n" + body)
    return {
        part.get_param("name", header="content-disposition"): part.get_payload(decode=True)
        for part in message.get_payload()
    }


@contextlib.asynccontextmanager
async def _serving(api, files):
    config = hypercorn.config.Config()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        config.bind = [f"fd://{sock.detach()}"]
    config.accesslog = config.errorlog = None
    config.include_server_header = False
    if files is not None:
        config.certfile, config.keyfile = str(files.certificate), str(files.key)
    stop = asyncio.Event()
    task = asyncio.create_task(hypercorn.asyncio.serve(api, config, shutdown_trigger=stop.wait))
    try:
        yield port
    finally:
        stop.set()
        await task


@pytest.fixture(scope="module", name="pki")
def _pki(tmp_path_factory):
    return make_pki(tmp_path_factory.mktemp("pki"))


class Place:
    """Where an API is served, and how its clients are made.

    Attributes:
        api: what serves.
        root: URL without a path.
        version: HTTP version that is spoken there.
    """

    def __init__(self, api, root, version, trust):
        self.api, self.root, self.version, self._trust = api, root, version, trust

    def http_client(self, module, *, synchronous):
        """Give what the README says; an origin with a certificate of its own needs its trust besides."""
        verify = {} if self._trust is None else {"verify": self._trust}
        if synchronous:
            return module.Client(transport=stormline.Transport(**verify))
        return module.AsyncClient(transport=stormline.AsyncTransport(**verify))


@pytest.fixture(name="place", params=["1.1", "2"])
async def _place(request, pki):
    api = Api()
    files = pki.ca.issue("origin", names=["localhost"]) if request.param == "2" else None
    trust = ssl.create_default_context(cadata=pki.ca.ca_pem) if files is not None else None
    if trust is not None:
        trust.set_alpn_protocols(["h2", "http/1.1"])
    async with _serving(api, files) as port:
        root = f"https://localhost:{port}" if files is not None else f"http://127.0.0.1:{port}"
        yield Place(api, root, request.param, trust)


class Threaded:
    """Uses a synchronous SDK in a thread, so that the server can run here."""

    synchronous = True

    async def run(self, call, /, *args, **more):
        return await asyncio.to_thread(call, *args, **more)

    async def each(self, items):
        iterator, end = iter(items), object()
        while (item := await asyncio.to_thread(next, iterator, end)) is not end:
            yield item


class Awaited:
    """Uses an asynchronous SDK."""

    synchronous = False

    async def run(self, call, /, *args, **more):
        return await call(*args, **more)

    async def each(self, items):
        async for item in items:
            yield item


@pytest.fixture(name="how", params=[Threaded, Awaited])
async def _how(request):
    yield request.param()
    await asyncio.to_thread(BACKGROUND.stop)


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Let the SDK try again soon: its own pause, half a second, is not ours to test."""
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)


@pytest.fixture(name="ai", params=[httpx2, httpx], ids=["httpx2", "httpx"])
async def _ai(request, place, how):
    """The SDK of openai over either module."""
    http_client = place.http_client(request.param, synchronous=how.synchronous)
    kind = openai.OpenAI if how.synchronous else openai.AsyncOpenAI
    sdk = kind(api_key=KEY, base_url=f"{place.root}/v1", http_client=http_client, max_retries=2)
    yield sdk
    await how.run(sdk.close)


def _question(text, **more):
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


async def test_openai_question_is_answered_and_connections_are_used_again(ai, place, how):
    for number in range(5):
        answer = await how.run(ai.chat.completions.create, **_question(f"hello {number}"))
        assert answer.choices[0].message.content == f"HELLO {number}"
    assert (len(place.api.peers), place.api.versions) == (1, {place.version})
    assert place.api.seen == [("POST", "/v1/chat/completions")] * 5


async def test_openai_questions_side_by_side_get_each_its_own_answer(ai, place, how):
    texts = [f"q{number}" for number in range(30)]
    answers = await asyncio.gather(*(how.run(ai.chat.completions.create, **_question(text)) for text in texts))
    assert [answer.choices[0].message.content for answer in answers] == [text.upper() for text in texts]
    if place.version == "2":
        assert len(place.api.peers) <= limits.H2_CONNECTIONS_SPREAD


async def test_openai_stream_comes_word_by_word_as_it_is_sent(ai, place, how):
    stream = await how.run(ai.chat.completions.create, **_question("one two three four", stream=True))
    got = []
    place.api.go.release()
    async for chunk in how.each(stream):
        got.append(chunk.choices[0].delta.content)
        place.api.go.release()  # the next word leaves the server only when this one has come
    assert got == ["one", "two", "three", "four"]
    answer = await how.run(ai.chat.completions.create, **_question("after"))
    assert answer.choices[0].message.content == "AFTER"
    assert len(place.api.peers) == 1


async def test_openai_stream_left_in_the_middle_leaves_the_client_working(ai, place, how):
    stream = await how.run(ai.chat.completions.create, **_question("one two three", stream=True))
    place.api.go.release()
    async for chunk in how.each(stream):
        assert chunk.choices[0].delta.content == "one"
        break
    await how.run(stream.close)
    for _ in range(2):
        place.api.go.release()  # what nobody takes any more
    answer = await how.run(ai.chat.completions.create, **_question("after"))
    assert answer.choices[0].message.content == "AFTER"


@pytest.mark.parametrize("status", [429, 503])
async def test_openai_turned_away_asks_again_and_is_answered(ai, place, how, status):
    place.api.failures[status] = 2
    answer = await how.run(ai.chat.completions.create, **_question("hello"))
    assert answer.choices[0].message.content == "HELLO"
    assert (len(place.api.seen), len(place.api.peers)) == (3, 1)


async def test_openai_turned_away_for_good_raises_its_own_error(ai, place, how):
    place.api.failures[429] = 9
    with pytest.raises(openai.RateLimitError) as caught:
        await how.run(ai.chat.completions.create, **_question("hello"))
    assert caught.value.response.headers["retry-after"]
    assert caught.value.code == "rate_limited"
    assert len(place.api.seen) == 3
    place.api.failures.clear()
    with pytest.raises(openai.NotFoundError):
        await how.run(ai.models.retrieve, "none")


async def test_openai_file_is_uploaded_and_downloaded_whole(ai, place, how):
    made = await how.run(ai.files.create, file=("f.bin", LARGE), purpose="batch")
    assert made.id == "file-0"
    assert {name: len(part) for name, part in place.api.uploads[0].items()} == {"purpose": 5, "file": len(LARGE)}
    assert place.api.uploads[0]["file"] == LARGE
    content = await how.run(ai.files.content, "file-0")
    assert content.content == LARGE


async def test_openai_upload_turned_away_is_sent_again_whole(ai, place, how):
    place.api.failures[429] = 1
    await how.run(ai.files.create, file=("f.bin", LARGE), purpose="batch")
    assert [upload["file"] == LARGE for upload in place.api.uploads] == [True]
    assert len(place.api.seen) == 2


async def test_openai_list_is_walked_over_all_its_pages(ai, place, how):
    if how.synchronous:
        files = await how.run(lambda: list(ai.files.list(limit=PAGE)))
    else:
        files = [file async for file in ai.files.list(limit=PAGE)]
    assert [file.id for file in files] == [f"file-{number}" for number in range(FILES)]
    assert (len(place.api.seen), len(place.api.peers)) == (3, 1)


async def test_openai_silence_is_its_own_timeout_after_its_own_retries(ai, place, how):
    with pytest.raises(openai.APITimeoutError) as caught:
        await how.run(ai.with_options(timeout=0.2, max_retries=1).chat.completions.create, **_question("silence"))
    cause = caught.value.__cause__
    assert isinstance(cause, errors.DeadlineExceeded)
    assert cause.maybe_delivered
    assert place.api.seen == [("POST", "/v1/chat/completions")] * 2  # each was sent once: the SDK alone repeats a write
    answer = await how.run(ai.chat.completions.create, **_question("after"))
    assert answer.choices[0].message.content == "AFTER"


async def test_openai_client_that_refuses_is_told_of_by_its_own_error(ai, how):
    sdk = ai.with_options(base_url="http://127.0.0.1:1/v1", max_retries=1)
    with pytest.raises(openai.APIConnectionError) as caught:
        await how.run(sdk.chat.completions.create, **_question("hello"))
    assert isinstance(caught.value.__cause__, errors.ConnectError)
    assert not isinstance(caught.value, openai.APITimeoutError)


async def test_openai_stream_that_breaks_off_is_its_own_connection_error(ai, how):
    async def half(request, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        event = b'data: {"id":"c","object":"x","created":1,"model":"m","choices":[]}\n\n'
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await writer.drain()
        writer.close()

    async with running_origin(half) as origin:
        sdk = ai.with_options(base_url=origin.url("/v1"), max_retries=0)
        stream = await how.run(sdk.chat.completions.create, **_question("hello", stream=True))
        chunks = how.each(stream)
        assert (await anext(chunks)).id == "c"
        with pytest.raises(openai.APIConnectionError) as caught:
            await anext(chunks)
        assert isinstance(caught.value.__cause__, errors.TransportError)


async def test_openai_connection_dropped_without_an_answer_is_tried_again_by_the_sdk(ai, how):
    asked = []

    async def drop(request, writer):
        asked.append(request.method)
        writer.close()

    async with running_origin(drop) as origin:
        sdk = ai.with_options(base_url=origin.url("/v1"), max_retries=1)
        with pytest.raises(openai.APIConnectionError):
            await how.run(sdk.chat.completions.create, **_question("hello"))
    assert asked == ["POST", "POST"]


async def test_openai_answer_that_takes_long_is_waited_for_as_the_sdk_says(ai, place, how, monkeypatch):
    """Its own default is 600 s for an answer, for models think long; ours of 15 s is made 0.2 s here."""
    monkeypatch.setattr(limits, "CALL_DEADLINE_S", 0.2)
    http_client = place.http_client(httpx2, synchronous=how.synchronous)

    async def slow(request, writer):
        await asyncio.sleep(0.5)
        body = json.dumps({"object": "list", "data": []}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    async with running_origin(slow) as origin:
        sdk = ai.with_options(http_client=http_client, base_url=origin.url("/v1"), max_retries=0)
        try:
            answer = await how.run(sdk.files.list)
        finally:
            await how.run(sdk.close)
    assert answer.data == []


async def test_openai_call_given_up_reaches_the_server_as_such(place, how):
    if how.synchronous:
        pytest.skip("a thread cannot be cancelled")
    http_client = place.http_client(httpx2, synchronous=False)
    async with openai.AsyncOpenAI(api_key=KEY, base_url=f"{place.root}/v1", http_client=http_client) as sdk:
        task = asyncio.create_task(sdk.chat.completions.create(**_question("silence")))
        await wait_until(lambda: place.api.seen)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until(lambda: place.api.gone)
        assert (await sdk.chat.completions.create(**_question("after"))).choices[0].message.content == "AFTER"


@pytest.fixture(name="notion")
async def _notion(place, how):
    """The SDK of Notion; it sets base URL, time-out and headers on the client it is given."""
    http_client = place.http_client(httpx, synchronous=how.synchronous)
    kind = notion_client.Client if how.synchronous else notion_client.AsyncClient
    sdk = kind(auth=KEY, base_url=place.root, client=http_client, timeout_ms=5_000)
    yield sdk
    await how.run(http_client.close if how.synchronous else http_client.aclose)


async def test_notion_list_is_walked_over_all_its_pages(notion, place, how):
    if how.synchronous:
        users = await how.run(notion_client.helpers.collect_paginated_api, notion.users.list)
    else:
        users = await notion_client.helpers.async_collect_paginated_api(notion.users.list)
    assert [user["id"] for user in users] == [f"user-{number}" for number in range(FILES)]
    assert (len(place.api.seen), len(place.api.peers), place.api.versions) == (3, 1, {place.version})


async def test_notion_turned_away_waits_and_asks_again(notion, place, how):
    place.api.failures[429] = 1
    assert (await how.run(notion.users.list))["results"]
    assert (len(place.api.seen), len(place.api.peers)) == (2, 1)


async def test_notion_file_is_sent_whole(notion, place, how):
    await how.run(notion.file_uploads.send, "f", file=("n.bin", LARGE), part_number="1")
    assert place.api.uploads[0]["file"] == LARGE


async def test_notion_errors_are_of_its_own_kind(notion, place, how):
    with pytest.raises(notion_client.errors.HTTPResponseError) as caught:
        await how.run(notion.request, "nowhere", "GET")
    assert caught.value.status == 404
    notion.client.timeout = httpx.Timeout(0.2)
    with pytest.raises(notion_client.errors.RequestTimeoutError):
        await how.run(notion.request, "silence", "GET")
