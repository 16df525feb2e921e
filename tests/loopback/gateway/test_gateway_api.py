"""HTTP through the long connection to real upstreams: streaming both ways, and every way it can go wrong."""

import asyncio
import gc
import itertools

import psutil
import pytest

from stormline.core import limits
from stormline.core.codes import Code
from stormline.core.errors import CallError
from stormline.wire import events as e

pytestmark = pytest.mark.loopback

HOST = "api.shop.example"
MEGABYTE = 1024 * 1024


async def read(receive):
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


def answering(status=200, headers=(), body=b"", seen=None):
    """Make an application with one answer, that notes the requests it sees."""

    async def app(scope, receive, send):
        if seen is not None:
            seen.append((scope, await read(receive)))
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        await send({"type": "http.response.body", "body": body})

    return app


async def failing(device, *, gate="api", method="GET", **fields):
    with pytest.raises(CallError) as raised:
        await device.call(gate, method, **fields)
    return raised.value


class TestRequest:
    async def test_get_reaches_the_upstream_of_its_host_with_identity(self, gateway, upstream):
        seen = []
        headers = [(b"x-a", b"caf\xe9"), (b"x-a", b"2"), (b"content-length", b"5")]
        origin = await upstream(answering(201, headers, b"hello", seen))
        await gateway.start(api_upstreams={HOST: origin})
        device = await gateway.connect("d 1", user="änn")
        call = device.open(
            "api", "GET", target=f"https://{HOST.upper()}/a%20b?c=d#e", headers=(("Accept", "x/\xe9"), ("X-Two", "1"))
        )
        event = await device.calls[call].get()
        assert (event.status, event.body, event.more) == (201, b"hello", False)
        assert [pair for pair in event.headers if pair[0] == "x-a"] == [("x-a", "caf\xe9"), ("x-a", "2")]
        scope, body = seen[0]
        assert (scope["method"], scope["raw_path"], scope["query_string"], body) == ("GET", b"/a%20b", b"c=d", b"")
        [left_ms] = [int(value) for name, value in scope["headers"] if name == b"stormline-deadline-ms"]
        assert 5000 < left_ms <= 15_000
        assert sorted(field for field in scope["headers"] if field[0] != b"stormline-deadline-ms") == [
            (b"accept", b"x/\xe9"),
            (b"host", HOST.encode()),
            (b"stormline-app", b"demo"),
            (b"stormline-device", b"d%201"),
            (b"stormline-user", b"%C3%A4nn"),
            (b"via", b"1.1 stormline"),
            (b"x-two", b"1"),
        ]

    async def test_headers_that_lie_or_belong_to_one_hop_are_dropped(self, gateway, upstream):
        seen = []
        answer_headers = [(b"connection", b"x-hop, close"), (b"x-hop", b"1"), (b"keep-alive", b"3"), (b"x-kept", b"1")]
        origin = await upstream(answering(200, answer_headers, b"", seen))
        await gateway.start(api_upstreams={HOST: origin})
        device = await gateway.connect()
        dropped = ["Host", "Forwarded", "X-Forwarded-For", "x_forwarded_proto", "Stormline-User", "STORMLINE_USER",
                   "Stormline-Anything", "Connection", "Keep-Alive", "TE", "Trailer", "Upgrade", "Proxy-Authorization",
                   "X-Private", "Via", "Expect"]  # fmt: skip
        headers = (*((name, "x-private") for name in dropped), ("X-Kept", "1"), ("Authorization", "Bearer x"))
        answer = await device.get(f"http://{HOST}/", headers=headers)
        names = {name.decode() for name, _ in seen[0][0]["headers"]}
        assert names == {
            "host",
            "x-kept",
            "authorization",
            "via",
            "stormline-app",
            "stormline-device",
            "stormline-deadline-ms",
        }
        assert dict(seen[0][0]["headers"])[b"host"] == HOST.encode()
        assert {name for name in answer.headers if name.startswith(("x-", "conn", "keep"))} == {"x-kept"}

    @pytest.mark.parametrize(
        "target",
        ["", "/x", "ftp://api.shop.example/", "http://u:p@api.shop.example/", "http:///x", "http://api shop/",
         "http://api.shop.example/a b", "http://api.shop.example:x/", "http://api.shop.example/ä", "http://a..b/",
         "http://api.shop.example\\@evil/", "http://api.shop.example/\r\nx: y"],
    )  # fmt: skip
    async def test_target_malformed_is_a_bad_request(self, gateway, target):
        await gateway.start(api_upstreams={HOST: "http://127.0.0.1:9"})
        device = await gateway.connect()
        assert (await failing(device, target=target)).code == Code.CALL_BAD_REQUEST

    @pytest.mark.parametrize(
        ("method", "headers", "body"),
        [
            ("CONNECT", (), b""),
            ("GE T", (), b""),
            ("GET", (("X-A", "1\r\nX-B: 2"),), b""),
            ("GET", (("X A", "1"),), b""),
            ("GET", (("X-A", "漢"),), b""),
            ("POST", (("Content-Length", "3"),), b"four"),
            ("POST", (("Content-Length", "4"), ("Content-Length", "4")), b"four"),
        ],
    )
    async def test_request_that_cannot_be_sent_is_a_bad_request(self, gateway, upstream, method, headers, body):
        seen = []
        await gateway.start(api_upstreams={HOST: await upstream(answering(seen=seen))})
        device = await gateway.connect()
        error = await failing(device, method=method, target=f"http://{HOST}/", headers=headers, body=body)
        assert error.code == Code.CALL_BAD_REQUEST
        assert not seen

    @pytest.mark.parametrize("host", ["other.example", "127.0.0.1:1", "localhost", "[::1]", f"{HOST}:8080"])
    async def test_host_without_upstream_is_never_reached(self, gateway, upstream, host):
        seen = []
        await gateway.start(api_upstreams={HOST: await upstream(answering(seen=seen))})
        device = await gateway.connect()
        error = await failing(device, target=f"http://{host}/")
        assert error.code == Code.CALL_NOT_FOUND
        assert host.strip("[]").split(":")[0] in error.reason or "::1" in error.reason
        assert not seen

    async def test_host_with_a_port_is_an_upstream_of_its_own(self, gateway, upstream):
        seen = []
        await gateway.start(api_upstreams={f"{HOST}:8080": await upstream(answering(204, seen=seen))})
        device = await gateway.connect()
        assert (await device.get(f"https://{HOST}:8080/")).status == 204
        assert dict(seen[0][0]["headers"])[b"host"] == f"{HOST}:8080".encode()


class TestAnswer:
    @pytest.mark.parametrize(
        ("method", "status", "headers"),
        [("HEAD", 200, [(b"content-length", b"5000")]), ("GET", 204, []), ("GET", 304, [(b"etag", b'"x"')])],
    )
    async def test_answer_without_body_is_whole(self, gateway, upstream, method, status, headers):
        await gateway.start(api_upstreams={HOST: await upstream(answering(status, headers))})
        device = await gateway.connect()
        for _ in range(2):
            answer = await device.call("api", method, target=f"http://{HOST}/")
            assert (answer.status, answer.body) == (status, b"")
            assert set(answer.headers) - {"date", "server"} == {name.decode() for name, _ in headers}

    async def test_answer_of_unknown_length_begins_before_it_ends(self, gateway, upstream):
        go_on = asyncio.Event()

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await go_on.wait()
            await send({"type": "http.response.body", "body": b"second"})

        await gateway.start(api_upstreams={HOST: await upstream(app)})
        device = await gateway.connect()
        call = device.open("api", "GET", target=f"http://{HOST}/")
        events = device.calls[call]
        assert isinstance(await events.get(), e.ReplyReceived)
        assert (await events.get()).body == b"first"
        go_on.set()
        assert (await events.get()).body == b"second"
        assert (await events.get()).end

    async def test_five_megabytes_both_ways_arrive_and_are_never_gathered(self, gateway, upstream):
        async def echo(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                message = await receive()
                await send({"type": "http.response.body", "body": message["body"], "more_body": message["more_body"]})
                if not message["more_body"]:
                    return

        await gateway.start(api_upstreams={HOST: await upstream(echo)})
        device = await gateway.connect()
        chunk = bytes(range(256)) * (limits.CHUNK_BYTES_MAX // 256)
        count = 5 * MEGABYTE // len(chunk)
        before = 0
        for attempt in range(4):
            call = device.open("api", "POST", target=f"http://{HOST}/", more=True)
            _, answer = await asyncio.gather(device.upload(call, itertools.repeat(chunk, count)), device.answer(call))
            assert answer.body == chunk * count
            del answer
            gc.collect()
            if attempt == 0:
                before = psutil.Process().memory_info().rss
        assert psutil.Process().memory_info().rss - before < 15 * MEGABYTE

    async def test_reader_that_stops_holds_the_upstream_back(self, gateway, upstream, eventually):
        sent = 0

        async def endless(scope, receive, send):
            nonlocal sent
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
                sent += 65536

        await gateway.start(api_upstreams={HOST: await upstream(endless)})
        device = await gateway.connect()
        call = device.open("api", "GET", target=f"http://{HOST}/")
        assert isinstance(await device.calls[call].get(), e.ReplyReceived)
        before = -1

        async def standing():
            nonlocal before
            before, now = sent, sent
            await asyncio.sleep(0.3)
            return sent == now == before

        await eventually(standing)
        # The credit, and what the kernel and the HTTP buffers between gateway and upstream take.
        assert limits.CREDIT_BYTES <= sent < 12 * MEGABYTE


class TestFailure:
    async def test_upstream_down_was_certainly_not_reached(self, gateway):
        await gateway.start(api_upstreams={HOST: "http://127.0.0.1:1"})
        device = await gateway.connect()
        error = await failing(device, method="POST", target=f"http://{HOST}/", body=b"x")
        assert (error.code, error.maybe_delivered) == (Code.CALL_UPSTREAM, False)
        assert error.retry_after_s is not None
        assert "127.0.0.1" not in error.reason

    async def test_upstream_that_closes_without_answer_may_have_acted(self, gateway, raw_upstream):
        async def handler(reader, writer):
            await reader.readuntil(b"\r\n\r\n")

        await gateway.start(api_upstreams={HOST: await raw_upstream(handler)})
        device = await gateway.connect()
        error = await failing(device, target=f"http://{HOST}/")
        assert (error.code, error.maybe_delivered) == (Code.CALL_UPSTREAM, True)

    async def test_upstream_that_speaks_no_http_is_an_upstream_error(self, gateway, raw_upstream):
        async def handler(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"220 mail ready\r\n")
            await writer.drain()
            await reader.read()

        await gateway.start(api_upstreams={HOST: await raw_upstream(handler)})
        device = await gateway.connect()
        error = await failing(device, target=f"http://{HOST}/")
        assert (error.code, error.maybe_delivered) == (Code.CALL_UPSTREAM, True)

    async def test_upstream_too_slow_is_a_deadline(self, gateway, raw_upstream):
        async def handler(reader, writer):
            await reader.read()

        await gateway.start(api_upstreams={HOST: await raw_upstream(handler)})
        device = await gateway.connect()
        error = await failing(device, target=f"http://{HOST}/", deadline_s=0.3)
        assert (error.code, error.maybe_delivered) == (Code.CALL_DEADLINE, True)

    @pytest.mark.parametrize(
        "head",
        [
            b"Content-Length: 100000\r\n\r\n",
            b"Transfer-Encoding: chunked\r\n\r\n8000\r\n",
            b"Content-Length: 9999\r\n\r\n",
        ],
    )
    async def test_upstream_dies_in_the_body_never_gives_a_short_good_answer(self, gateway, raw_upstream, head):
        async def handler(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n" + head + bytes(5000))
            await writer.drain()

        await gateway.start(api_upstreams={HOST: await raw_upstream(handler)})
        device = await gateway.connect()
        error = await failing(device, target=f"http://{HOST}/")
        assert (error.code, error.maybe_delivered) == (Code.CALL_UPSTREAM, True)

    async def test_answer_with_too_many_headers_is_an_upstream_error(self, gateway, raw_upstream):
        async def handler(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n" + b"X-A: 1\r\n" * 200 + b"Content-Length: 0\r\n\r\n")
            await writer.drain()
            await reader.read()

        await gateway.start(api_upstreams={HOST: await raw_upstream(handler)})
        device = await gateway.connect()
        assert (await failing(device, target=f"http://{HOST}/")).code == Code.CALL_UPSTREAM


class TestSideBySide:
    async def test_two_hundred_calls_with_failing_ones_among_them(self, gateway, upstream):
        async def app(scope, receive, send):
            if scope["path"] == "/break":
                raise RuntimeError("an upstream's bug")
            await asyncio.sleep(0.01)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": scope["path"].encode()})

        await gateway.start(api_upstreams={HOST: await upstream(app), "down.example": "http://127.0.0.1:1"})
        device = await gateway.connect()
        paths = [f"http://{HOST}/{n}" for n in range(198)] + ["http://down.example/x", "http://unknown.example/"]
        answers = await asyncio.gather(*(device.get(path) for path in paths), return_exceptions=True)
        assert [answer.body.decode() for answer in answers[:198]] == [f"/{n}" for n in range(198)]
        assert [error.code for error in answers[198:]] == [Code.CALL_UPSTREAM, Code.CALL_NOT_FOUND]

    async def test_client_vanishing_leaves_no_call_and_no_connection(self, gateway, raw_upstream, eventually):
        left = asyncio.Event()
        waiting = 0

        async def handler(reader, writer):
            nonlocal waiting
            await reader.readuntil(b"\r\n\r\n")
            waiting += 1
            if await reader.read() == b"":
                waiting -= 1
                if not waiting:
                    left.set()

        await gateway.start(api_upstreams={HOST: await raw_upstream(handler)})
        device = await gateway.connect()
        for _ in range(20):
            device.open("api", "GET", target=f"http://{HOST}/")
        await eventually(lambda: waiting == 20)
        device.vanish()
        async with asyncio.timeout(10):
            await left.wait()

        async def nothing_left():
            answer = (await gateway.admin.get("/v1/sessions")).json()
            return (answer["count"], answer["connections"], answer["calls"]) == (0, 0, 0)

        await eventually(nothing_left)

    async def test_cancel_ends_the_upstream_request(self, gateway, raw_upstream):
        left = asyncio.Event()

        async def handler(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            await reader.read()
            left.set()

        await gateway.start(api_upstreams={HOST: await raw_upstream(handler)})
        device = await gateway.connect()
        call = device.open("api", "GET", target=f"http://{HOST}/")
        await asyncio.sleep(0.1)
        device.machine.send_cancel(call)
        device.flush()
        async with asyncio.timeout(10):
            await left.wait()

    async def test_slow_reader_is_bounded_and_others_go_on(self, gateway, upstream):
        piece = bytes(65536)

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(64):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        await gateway.start(api_upstreams={HOST: await upstream(app)})
        slow, quick = await gateway.connect("slow"), await gateway.connect("quick")
        before = psutil.Process().memory_info().rss
        slow.stop_reading()
        for _ in range(100):
            slow.open("api", "GET", target=f"http://{HOST}/")
        for _ in range(3):
            assert len((await quick.get(f"http://{HOST}/")).body) == 4 * MEGABYTE
        assert psutil.Process().memory_info().rss - before < 60 * MEGABYTE
        slow.go_on_reading()
        assert len((await slow.answer(1)).body) == 4 * MEGABYTE
