"""Answers kept by the gateway, by HTTP's rules and app by app; and bodies compressed for weak networks."""

import asyncio

import brotli
import pytest
from backports import zstd

from stormline.appgw.api_cache import Cache, Entry
from stormline.core import limits_api
from stormline.core.codes import Code
from stormline.core.errors import CallError
from stormline.policy.httpcache import Kept

pytestmark = pytest.mark.loopback

HOST = "api.shop.example"
URL = f"http://{HOST}/items"
TEXT = b"".join(b'{"id": %d, "name": "item number %d", "price": "%d.99"},' % (n, n, n % 50) for n in range(3000))
BOTH = (("Accept-Encoding", "gzip, br, zstd"),)


class Shop:
    """An upstream whose answer a test sets.

    Attributes:
        asked: headers of the requests so far.
    """

    def __init__(self):
        self.asked = []
        self.status, self.headers, self.body = 200, [], b"one"
        self.cut = False

    def says(self, body, *headers, status=200):
        self.body, self.status = body, status
        self.headers = [(name.encode(), value.encode()) for name, value in headers]

    async def __call__(self, scope, receive, send):
        self.asked.append({name.decode(): value.decode() for name, value in scope["headers"]})
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        if self.cut:
            await send({"type": "http.response.body", "body": self.body[: len(self.body) // 2], "more_body": True})
            raise RuntimeError("the upstream dies")
        await send({"type": "http.response.body", "body": self.body})


@pytest.fixture(name="shop")
async def _shop(gateway, upstream):
    shop = Shop()
    await gateway.start(api_upstreams={HOST: await upstream(shop)})
    return shop


PUBLIC = ("cache-control", "public, max-age=60")
STALE = ("cache-control", "public, max-age=0, stale-if-error=60")
TAG = ("etag", '"v1"')


class TestCache:
    async def test_fresh_answer_is_given_to_others_of_the_app_without_asking(self, gateway, shop):
        shop.says(b"one", PUBLIC, ("content-type", "text/plain"))
        one, two = await gateway.connect("d1", user="ann"), await gateway.connect("d2", user="bob")
        assert (await one.get(URL)).body == b"one"
        answer = await two.get(URL)
        assert (answer.body, answer.headers["cache-status"]) == (b"one", "stormline; hit")
        assert int(answer.headers["age"]) < 60
        assert answer.headers["content-type"] == "text/plain"
        assert len(shop.asked) == 1
        assert (await two.get(f"{URL}?other")).body == b"one"
        assert len(shop.asked) == 2

    @pytest.mark.parametrize("control", ["max-age=60", "private, max-age=60", "no-store", "public, no-cache"])
    async def test_what_is_not_for_all_is_asked_for_each_time(self, gateway, shop, control):
        shop.says(b"one", ("cache-control", control))
        device = await gateway.connect()
        for _ in range(3):
            assert "cache-status" not in (await device.get(URL)).headers
        assert len(shop.asked) == 3

    async def test_vary_keeps_answers_apart(self, gateway, shop):
        device = await gateway.connect()
        for language in ("de", "en"):
            shop.says(language.encode(), PUBLIC, ("vary", "accept-language"))
            assert (await device.get(URL, headers=(("Accept-Language", language),))).body == language.encode()
        assert (await device.get(URL, headers=(("Accept-Language", "de"),))).body == b"de"
        assert (await device.get(URL, headers=(("Accept-Language", "en"),))).body == b"en"
        assert len(shop.asked) == 2

    async def test_stale_answer_is_asked_for_by_its_validator(self, gateway, shop):
        device = await gateway.connect()
        shop.says(b"one", ("cache-control", "public, max-age=0"), TAG)
        await device.get(URL)
        shop.says(b"", ("cache-control", "public, max-age=60"), TAG, status=304)
        answer = await device.get(URL, headers=(("If-None-Match", '"v0"'),))
        assert (answer.status, answer.body) == (200, b"one")
        assert answer.headers["cache-status"] == "stormline; hit; fwd=stale; fwd-status=304"
        assert shop.asked[-1]["if-none-match"] == '"v1"'
        assert (await device.get(URL)).headers["cache-status"] == "stormline; hit"
        assert len(shop.asked) == 2

    async def test_new_answer_takes_the_place_of_the_stale_one(self, gateway, shop):
        device = await gateway.connect()
        shop.says(b"one", ("cache-control", "public, max-age=0"), TAG)
        await device.get(URL)
        shop.says(b"two", PUBLIC, ("etag", '"v2"'))
        assert [(await device.get(URL)).body for _ in range(2)] == [b"two", b"two"]
        assert len(shop.asked) == 2

    async def test_condition_of_the_request_is_answered_here(self, gateway, shop):
        device = await gateway.connect()
        shop.says(b"one", PUBLIC, TAG)
        await device.get(URL)
        answer = await device.get(URL, headers=(("If-None-Match", 'W/"v1"'),))
        assert (answer.status, answer.body, answer.headers["etag"]) == (304, b"", '"v1"')
        assert len(shop.asked) == 1

    async def test_request_can_insist(self, gateway, shop):
        device = await gateway.connect()
        shop.says(b"one", PUBLIC)
        await device.get(URL)
        shop.says(b"two", PUBLIC)
        assert (await device.get(URL, headers=(("Cache-Control", "no-cache"),))).body == b"two"
        assert (await device.get(URL)).body == b"two"
        assert (await device.get(URL, headers=(("Range", "bytes=0-1"),))).body == b"two"
        assert len(shop.asked) == 3

    @pytest.mark.parametrize("broken", ["status", "cut"])
    async def test_stale_answer_serves_while_the_upstream_fails_where_it_says_so(self, gateway, shop, broken):
        device = await gateway.connect()
        shop.says(b"one", STALE, TAG)
        await device.get(URL)
        if broken == "status":
            shop.says(b"sorry", status=500)
        else:
            shop.says(b"sorry", ("content-length", "1"), ("content-length", "2"))
        answer = await device.get(URL)
        assert (answer.status, answer.body) == (200, b"one")
        assert "stormline; hit" in answer.headers["cache-status"]

    async def test_without_leave_an_error_is_an_error(self, gateway, shop):
        device = await gateway.connect()
        shop.says(b"one", ("cache-control", "public, max-age=0, must-revalidate, stale-if-error=60"), TAG)
        await device.get(URL)
        shop.says(b"sorry", status=500)
        assert (await device.get(URL)).status == 500

    async def test_write_makes_what_is_kept_worthless(self, gateway, shop):
        device = await gateway.connect()
        shop.says(b"one", PUBLIC)
        await device.get(URL)
        await device.call("api", "PUT", target=URL, body=b"x")
        shop.says(b"two", PUBLIC)
        assert (await device.get(URL)).body == b"two"

    async def test_answer_from_before_a_write_is_not_kept_though_it_comes_after(self, gateway, upstream):
        asked, begun, go = [], asyncio.Event(), asyncio.Event()

        async def app(scope, receive, send):
            asked.append(scope["method"])
            headers = [(b"cache-control", b"public, max-age=60")]
            if asked == ["GET"]:
                begun.set()
                await go.wait()
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"%d" % len(asked)})

        await gateway.start(api_upstreams={HOST: await upstream(app)})
        device = await gateway.connect()
        reading = asyncio.create_task(device.get(URL))
        await begun.wait()
        await device.call("api", "PUT", target=URL, body=b"x")
        go.set()
        await reading
        await device.get(URL)
        await device.get(URL)
        assert asked == ["GET", "PUT", "GET"]

    async def test_cut_answer_is_never_kept(self, gateway, shop):
        device = await gateway.connect()
        shop.says(TEXT, PUBLIC)
        shop.cut = True
        for _ in range(2):
            with pytest.raises(CallError) as raised:
                await device.get(URL)
            assert raised.value.code == Code.CALL_UPSTREAM
        shop.cut = False
        assert [(await device.get(URL)).body for _ in range(2)] == [TEXT, TEXT]
        assert len(shop.asked) == 3

    async def test_answer_whose_end_is_that_of_its_connection_is_never_kept(self, gateway, raw_upstream):
        asked = 0

        async def handler(reader, writer):
            nonlocal asked
            asked += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.0 200 OK\r\nCache-Control: public, max-age=60\r\n\r\nhello")
            await writer.drain()
            writer.write_eof()
            await reader.read()

        await gateway.start(api_upstreams={HOST: await raw_upstream(handler)})
        device = await gateway.connect()
        assert [(await device.get(URL)).body for _ in range(2)] == [b"hello", b"hello"]
        assert asked == 2


class TestBounds:
    def entry(self, size, **selecting):
        return Entry(Kept(200, (), tuple(selecting.items()), 0.0, 60.0, 0.0, False), bytes(size))

    def test_apps_do_not_see_each_other_s_answers(self):
        cache = Cache()
        cache.put("a", ("u", "h", b"/"), (), self.entry(10), 1)
        assert cache.find("a", ("u", "h", b"/"), ()) is not None
        assert cache.find("b", ("u", "h", b"/"), ()) is None

    def test_one_app_fills_its_share_and_drives_out_its_own_oldest_alone(self):
        cache = Cache(100_000)
        cache.put("b", ("u", "h", b"/"), (), self.entry(10_000), 1)
        for number in range(50):
            cache.put("a", ("u", "h", b"/%d" % number), (), self.entry(5000), 1)
            cache.find("a", ("u", "h", b"/0"), ())  # what is used stays
        assert cache.size <= 100_000
        kept = [number for number in range(50) if cache.find("a", ("u", "h", b"/%d" % number), ())]
        assert kept[0] == 0
        assert kept[1:] == list(range(50 - len(kept) + 1, 50))
        assert cache.find("b", ("u", "h", b"/"), ()) is not None

    def test_many_apps_together_stay_within_the_bound(self):
        cache = Cache(100_000)
        for number in range(30):
            for app in "abcdef":
                cache.put(app, ("u", "h", b"/%d" % number), (), self.entry(3000), 1)
        assert 80_000 < cache.size <= 100_000
        assert all(cache.find(app, ("u", "h", b"/29"), ()) for app in "abcdef")

    def test_variants_are_bounded_and_large_ones_left_out(self):
        cache, key = Cache(), ("u", "h", b"/")
        for number in range(20):
            cache.put("a", key, (("x", str(number)),), self.entry(10, x=str(number)), 1)
        found = [number for number in range(20) if cache.find("a", key, (("x", str(number)),))]
        assert found == list(range(20 - limits_api.CACHE_VARIANTS_MAX, 20))
        cache.put("a", ("u", "h", b"/large"), (), self.entry(limits_api.CACHE_ENTRY_BYTES_MAX + 1), 1)
        assert cache.find("a", ("u", "h", b"/large"), ()) is None
        cache.drop("a", key)
        assert cache.size == 0


JSON = ("content-type", "application/json")


@pytest.fixture(name="on")
def _on(gateway, mint):
    """Give what connects a device that says what network it is on."""

    async def connect(network, device="d1"):
        connected = await gateway.open()
        await connected.hello(app="demo", token=mint(device), network=network)
        return connected

    return connect


class TestCompression:
    @pytest.mark.parametrize(
        ("network", "extra", "coding"),
        [
            ("cell", (), "zstd"),
            ("cell", (("Accept-Encoding", "br"),), "br"),
            ("wifi", (), "zstd"),
            ("wifi", (("ECT", "2g"),), "br"),
            ("wifi", (("Save-Data", "on"),), "br"),
            ("nonsense", (), "zstd"),
        ],
    )
    async def test_large_text_is_coded_as_the_network_is_worth(self, shop, on, network, extra, coding):
        shop.says(TEXT, JSON, TAG, ("vary", "accept"))
        device = await on(network)
        answer = await device.get(URL, headers=extra if extra and extra[0][0] == "Accept-Encoding" else (*BOTH, *extra))
        assert answer.headers["content-encoding"] == coding
        assert len(answer.body) < len(TEXT) / 4
        assert (brotli.decompress if coding == "br" else zstd.decompress)(answer.body) == TEXT
        assert answer.headers["etag"] == 'W/"v1"'
        assert answer.headers["vary"] == "accept, accept-encoding"
        assert "content-length" not in answer.headers

    async def test_small_answers_are_coded_where_bytes_cost_and_left_alone_elsewhere(self, shop, on):
        shop.says(TEXT[:5000], JSON, ("content-length", "5000"))
        slow, quick = await on("cell", "d1"), await on("wired", "d2")
        answer = await slow.get(URL, headers=BOTH)
        assert (answer.headers["content-encoding"], zstd.decompress(answer.body)) == ("zstd", TEXT[:5000])
        answer = await quick.get(URL, headers=BOTH)
        assert ("content-encoding" in answer.headers, answer.body) == (False, TEXT[:5000])

    @pytest.mark.parametrize(
        "headers",
        [
            [("content-type", "image/png")],
            [JSON, ("content-encoding", "gzip")],
            [JSON, ("cache-control", "no-transform")],
            [("content-type", "text/event-stream")],
        ],
    )
    async def test_never_twice_and_never_what_gains_nothing(self, shop, on, headers):
        shop.says(TEXT, *headers)
        device = await on("cell")
        answer = await device.get(URL, headers=BOTH)
        assert answer.headers.get("content-encoding", "") in ("", "gzip")
        assert answer.body == TEXT

    async def test_client_that_takes_no_coding_gets_none(self, shop, on):
        shop.says(TEXT, JSON)
        device = await on("cell")
        assert (await device.get(URL)).body == TEXT

    async def test_kept_answer_is_coded_for_each_as_its_network_is(self, shop, on):
        shop.says(TEXT, JSON, PUBLIC, ("vary", "accept-encoding"))
        slow, plain = await on("cell", "d1"), await on("cell", "d2")
        for _ in range(2):
            answer = await slow.get(URL, headers=BOTH)
            assert zstd.decompress(answer.body) == TEXT
        assert answer.headers["cache-status"] == "stormline; hit"
        assert (await plain.get(URL)).body == TEXT
        assert len(shop.asked) == 2  # by Vary

    @pytest.mark.parametrize(
        ("extra", "coding", "decoder"),
        [
            ((), "zstd", lambda: zstd.ZstdDecompressor().decompress),
            ((("ECT", "2g"),), "br", lambda: brotli.Decompressor().process),
        ],
    )
    async def test_answer_made_piece_by_piece_leaves_piece_by_piece(
        self, gateway, upstream, on, extra, coding, decoder
    ):
        go_on = asyncio.Event()

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"first" * 100, "more_body": True})
            await go_on.wait()
            await send({"type": "http.response.body", "body": b"second"})

        await gateway.start(api_upstreams={HOST: await upstream(app)})
        device = await on("cell")
        call = device.open("api", "GET", target=URL, headers=(*BOTH, *extra))
        events, decode = device.calls[call], decoder()
        assert dict((await events.get()).headers)["content-encoding"] == coding
        read = b""
        while len(read) < 500:
            read += decode((await events.get()).body)
        assert read == b"first" * 100
        go_on.set()
        while not (event := await events.get()).end:
            read += decode(event.body)
        assert read == b"first" * 100 + b"second"

    async def test_upstream_that_dies_in_a_coded_body_is_an_error(self, shop, on):
        shop.says(TEXT, JSON)
        shop.cut = True
        device = await on("cell")
        with pytest.raises(CallError) as raised:
            await device.get(URL, headers=BOTH)
        assert raised.value.code == Code.CALL_UPSTREAM

    async def test_many_large_ones_at_once_are_all_whole(self, shop, on):
        shop.says(TEXT * 20, JSON)
        device = await on("cell")
        answers = await asyncio.gather(*(device.get(URL, headers=(*BOTH, ("ECT", "2g"))) for _ in range(6)))
        assert [brotli.decompress(answer.body) == TEXT * 20 for answer in answers] == [True] * 6
