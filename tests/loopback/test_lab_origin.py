"""The laboratory's origin on 127.0.0.1: right answers, and each way to go wrong."""

import asyncio
import gzip
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import h2.config
import h2.connection
import httpx2
import pytest

from stormline.assembly.authority import ensure_authority
from stormline.lab import workload
from stormline.lab.chance import SeededRng
from stormline.lab.origin_answers import PAGE, Counters, Site
from stormline.lab.origin_http import Connection
from stormline.lab.specs import SHOP, Behaviour
from stormline.net.clock import SystemClock, SystemRng

pytestmark = pytest.mark.loopback

SOON_S = 0.4
"""Longer than any answer here takes, and how long a test waits for one that never comes."""
HEADERS = {"host": SHOP}
SNI = {"sni_hostname": SHOP}


class Place:
    """One site with HTTPS and HTTP ports."""

    def __init__(self, site: Site, counters: Counters, https: int, http: int, trust: ssl.SSLContext) -> None:
        self.site = site
        self.counters = counters
        self.https = f"https://127.0.0.1:{https}"
        self.http = f"http://127.0.0.1:{http}"
        self.port = https
        self.trust = trust

    def client(self, *, http2: bool = False) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=self.https, verify=self.trust, http2=http2, http1=not http2, timeout=SOON_S, headers=HEADERS
        )


Start = Callable[..., Awaitable[Place]]


@pytest.fixture(name="start")
async def _start(tmp_path: Path) -> AsyncIterator[Start]:
    authority = ensure_authority(tmp_path, clock=SystemClock(), rng=SystemRng())
    files = authority.issue("origin", names=[SHOP])
    trust = ssl.create_default_context(cafile=str(authority.certificate))
    loop = asyncio.get_running_loop()
    servers: list[asyncio.Server] = []
    connections: set[Connection] = set()

    async def start(behaviour: Behaviour | None = None, *, doh: Callable[[bytes], bytes | None] | None = None) -> Place:
        counters = Counters(Counter())
        site = Site(behaviour or Behaviour(), counters, SeededRng("test", 1), doh=doh)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        context.set_alpn_protocols(["h2", "http/1.1"])
        ports = []
        for tls in (context, None):

            def connect(tls: ssl.SSLContext | None = tls) -> Connection:
                connection = Connection(site, tls, connections.discard)
                connections.add(connection)
                return connection

            servers.append(await loop.create_server(connect, "127.0.0.1", 0))
            ports.append(servers[-1].sockets[0].getsockname()[1])
        return Place(site, counters, ports[0], ports[1], trust)

    yield start
    for server in servers:
        server.close()
    for connection in list(connections):
        connection.abort()
    await asyncio.sleep(0)


async def get(client: httpx2.AsyncClient, path: str) -> httpx2.Response:
    return await client.get(path, extensions=SNI)


both_versions = pytest.mark.parametrize("http2", [False, True], ids=["h1", "h2"])


@both_versions
async def test_item_is_served_whole_and_counted(start: Start, http2: bool) -> None:
    place = await start()
    async with place.client(http2=http2) as client:
        answers = [await get(client, f"/item/{number}/200000") for number in (1, 2, 1)]
        missing = [(await get(client, path)).status_code for path in ("/", "/item/9/2000000", "/item/a/1")]
    assert [answer.content for answer in answers] == [workload.body(number, 200_000) for number in (1, 2, 1)]
    assert {answer.http_version for answer in answers} == {"HTTP/2" if http2 else "HTTP/1.1"}
    assert missing == [404, 404, 404]
    assert (place.counters.requests_by_id["1"], place.counters.requests_by_id["2"]) == (2, 1)
    assert place.counters.connections == 1
    assert place.counters.in_flight == 0


async def test_requests_share_one_http2_connection(start: Start) -> None:
    place = await start()
    async with place.client(http2=True) as client:
        answers = await asyncio.gather(*(get(client, f"/item/{number}/50000") for number in range(20)))
    assert [answer.content for answer in answers] == [workload.body(number, 50_000) for number in range(20)]
    assert place.counters.connections == 1


async def test_plain_http_serves_the_same(start: Start) -> None:
    place = await start()
    async with httpx2.AsyncClient(timeout=SOON_S) as client:
        answer = await client.get(f"{place.http}/item/5/300")
    assert answer.content == workload.body(5, 300)


async def test_pipelined_requests_are_answered_in_order(start: Start) -> None:
    place = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(place.http.rpartition(":")[2]))
    writer.write(b"".join(b"GET /item/%d/10 HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in range(3)))
    for number in range(3):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert await reader.readexactly(10) == workload.body(number, 10)
    writer.write(b"\0\0nonsense\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    writer.close()


@both_versions
async def test_compressed_item_is_the_same_after_unpacking(start: Start, http2: bool) -> None:
    place = await start()
    async with place.client(http2=http2) as client:
        answer = await get(client, "/item/1/5000?z=gzip")
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.content == workload.body(1, 5000)


async def test_connection_ends_after_its_last_request(start: Start) -> None:
    place = await start(Behaviour(requests_max=2))
    async with place.client() as client:
        closes = [(await get(client, f"/item/{number}/10")).headers.get("connection") for number in range(5)]
    assert closes == [None, "close", None, "close", None]
    assert place.counters.connections == 3


async def test_http2_connection_says_goodbye_and_finishes_what_it_has(start: Start) -> None:
    place = await start(Behaviour(requests_max=2, in_flight_hold_s=0.05))
    place.trust.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection("127.0.0.1", place.port, ssl=place.trust, server_hostname=SHOP)
    client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    client.initiate_connection()
    for stream in (1, 3, 5):
        path = [(":method", "GET"), (":path", "/item/1/10"), (":scheme", "https"), (":authority", SHOP)]
        client.send_headers(stream, path, end_stream=True)
    writer.write(client.data_to_send())
    frames = bytearray()
    async with asyncio.timeout(5):
        while data := await reader.read(65_536):
            frames += data
    # The state machine of this client takes nothing after GOAWAY, so its frames are read here.
    kinds = []
    while frames:
        length, kind, stream = int.from_bytes(frames[:3]), frames[3], int.from_bytes(frames[5:9])
        kinds.append((kind, stream))
        if kind == 7:
            assert int.from_bytes(frames[9:13]) == 3
        del frames[: 9 + length]
    assert (7, 0) in kinds
    assert {stream for kind, stream in kinds if kind == 1} == {1, 3}
    assert (3, 5) in kinds
    writer.close()


@both_versions
async def test_mute_server_takes_requests_and_never_answers(start: Start, http2: bool) -> None:
    place = await start(Behaviour(mute_pct=100))
    async with place.client(http2=http2) as client:
        with pytest.raises(httpx2.ReadTimeout):
            await get(client, "/item/1/10")
    assert place.counters.requests_by_id["1"] == 1


async def test_server_that_is_mute_over_http2_answers_over_http1(start: Start) -> None:
    place = await start(Behaviour(mute_http2=True))
    async with place.client(http2=True) as client:
        with pytest.raises(httpx2.ReadTimeout):
            await get(client, "/item/1/10")
    async with place.client(http2=False) as client:
        assert (await get(client, "/item/2/10")).status_code == 200
    assert place.counters.requests_by_id == {"1": 1, "2": 1}


async def test_accept_only_server_never_shakes_hands(start: Start) -> None:
    place = await start(Behaviour(accept_only_pct=100))
    async with place.client() as client:
        with pytest.raises(httpx2.ConnectTimeout):
            await get(client, "/item/1/10")
    assert place.counters.connections == 1


async def test_reset_in_the_handshake_is_an_error_at_once(start: Start) -> None:
    place = await start(Behaviour(reset_pct=100))
    async with place.client() as client:
        with pytest.raises(httpx2.ConnectError):
            await get(client, "/item/1/10")


async def test_cut_before_the_handshake_ends_leaves_it_hanging(start: Start) -> None:
    place = await start(Behaviour(cut_pct=100))
    async with place.client() as client:
        with pytest.raises(httpx2.ConnectTimeout):
            await get(client, "/item/1/10")


async def test_cut_later_loses_what_comes_after(start: Start) -> None:
    place = await start(Behaviour(cut_pct=100, cut_after_bytes=20_000))
    async with place.client() as client:
        assert (await get(client, "/item/1/1000")).status_code == 200
        with pytest.raises(httpx2.ReadTimeout):
            await get(client, "/item/2/100000")


async def test_chances_of_a_connection_share_them_as_given(start: Start) -> None:
    place = await start(Behaviour(accept_only_pct=20, reset_pct=20, cut_pct=20, mute_pct=20))
    fates = Counter(place.site.connection_fate() for _ in range(5000))
    assert set(fates) == {"accept-only", "reset", "cut", "mute", ""}
    assert all(850 < count < 1150 for count in fates.values())


@both_versions
async def test_error_is_answered_with_its_status(start: Start, http2: bool) -> None:
    place = await start(Behaviour(error_pct=100, error_status=502))
    async with place.client(http2=http2) as client:
        assert (await get(client, "/item/1/10")).status_code == 502
        place.site.behaviour = Behaviour()
        assert (await get(client, "/item/1/10")).status_code == 200


async def collect(answer: httpx2.Response, pieces: list[bytes]) -> None:
    async for piece in answer.aiter_bytes():
        pieces.append(piece)  # noqa: PERF401 - what came before an error counts


@both_versions
async def test_body_stalls_in_its_middle(start: Start, http2: bool) -> None:
    place = await start(Behaviour(stall_pct=100))
    pieces: list[bytes] = []
    async with place.client(http2=http2) as client, client.stream("GET", "/item/1/40000", extensions=SNI) as answer:
        with pytest.raises(httpx2.ReadTimeout):
            await collect(answer, pieces)
    assert 0 < sum(map(len, pieces)) <= 20_000


async def test_stalled_stream_does_not_hold_up_its_neighbours(start: Start) -> None:
    place = await start(Behaviour(body_bytes_max=1000))
    async with place.client(http2=True) as client:
        large = asyncio.ensure_future(get(client, "/item/1/5000"))
        small = await asyncio.gather(*(get(client, f"/item/{number}/1000") for number in range(5)))
        with pytest.raises(httpx2.ReadTimeout):
            await large
    assert [answer.status_code for answer in small] == [200] * 5


async def test_truncated_compressed_body_has_a_fitting_length(start: Start) -> None:
    place = await start(Behaviour(truncate_pct=100))
    async with place.client() as client, client.stream("GET", "/item/1/4000", extensions=SNI) as answer:
        raw = b"".join([piece async for piece in answer.aiter_raw()])
    assert len(raw) == int(answer.headers["content-length"])
    with pytest.raises(EOFError):
        gzip.decompress(raw)


async def test_slow_body_takes_its_time_and_comes(start: Start) -> None:
    place = await start(Behaviour(slow_pct=100, slow_bps=80_000))
    clock = SystemClock()
    began_s = clock.monotonic()
    async with place.client() as client:
        answer = await get(client, "/item/1/3000")
    assert answer.content == workload.body(1, 3000)
    assert clock.monotonic() - began_s >= 0.29


async def test_failures_rise_with_requests_in_flight(start: Start) -> None:
    place = await start(Behaviour(in_flight_free=2, in_flight_pct=25, in_flight_hold_s=0.05, in_flight_stall_s=0.1))
    async with place.client(http2=True) as client:
        for number in range(5):  # one after the other: never harmed
            assert (await get(client, f"/item/{number}/10")).status_code == 200
        answers = await asyncio.gather(*(get(client, f"/item/{number}/10") for number in range(20)))
    assert [answer.status_code for answer in answers].count(503) >= 10


async def test_http10_box_ends_the_body_with_the_connection(start: Start) -> None:
    place = await start(Behaviour(http10=True))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(place.http.rpartition(":")[2]))
    writer.write(b"GET /item/1/5000 HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.0 200 OK\r\n")
    assert b"content-length" not in head
    assert body == workload.body(1, 5000)


async def test_page_server_answers_everything_with_its_page(start: Start) -> None:
    place = await start(Behaviour(page=True))
    async with place.client() as client:
        answer = await get(client, "/item/1/10")
    assert (answer.status_code, answer.content) == (200, PAGE)


async def test_dns_over_https_takes_get_and_post(start: Start) -> None:
    place = await start(doh=lambda question: question[::-1] or None)
    async with place.client(http2=True) as client:
        posted = await client.post("/dns-query", content=b"\1\2\3", extensions=SNI)
        got = await get(client, "/dns-query?dns=AQID")
        bad = await get(client, "/dns-query?dns=")
    assert posted.content == got.content == b"\3\2\1"
    assert posted.headers["content-type"] == "application/dns-message"
    assert bad.status_code == 400


async def test_client_that_speaks_no_tls_is_sent_away(start: Start) -> None:
    place = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(5):
        await reader.read()
    writer.close()


async def test_client_that_gives_up_frees_its_place(start: Start) -> None:
    place = await start(Behaviour(mute_pct=0, stall_pct=100))
    async with place.client(http2=True) as client:
        with pytest.raises(httpx2.ReadTimeout):
            await get(client, "/item/1/4000")
    for _ in range(500):
        if not place.counters.in_flight:
            break
        await asyncio.sleep(0.01)
    assert place.counters.in_flight == 0
