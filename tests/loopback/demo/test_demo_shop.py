"""The demo shop over real HTTP and real NATS."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import httpx2
import pytest

from stormline.core import errors
from stormline.core.values import Address, Secret
from stormline.demo import shop
from stormline.demo.orders import OrderBook
from stormline.demo.pages import image
from stormline.engine.nats import EngineConfig, NatsEngine, connect
from stormline.engine.port import reply_error
from stormline.engine.server import RunningServer, start_server
from stormline.net.clock import SystemRng

pytestmark = pytest.mark.loopback

WAIT_S = 10.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class RunningShop:
    """`shop.run` as a task."""

    def __init__(self, biz: EngineConfig) -> None:
        self._stop = asyncio.Event()
        self._started: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
        config = shop.ShopConfig(port=0, biz=biz)
        self._task = asyncio.create_task(shop.run(config, started=self._started.set_result, stop=self._stop))

    async def client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=f"http://{await self._started}", trust_env=False, timeout=WAIT_S)

    async def stop(self) -> None:
        self._stop.set()
        await self._task


def nobody() -> EngineConfig:
    return EngineConfig(url=f"nats://127.0.0.1:{free_port()}", user="biz", password=Secret("x"))


@pytest.fixture(name="http")
async def _http() -> AsyncIterator[httpx2.AsyncClient]:
    """Give a client of a shop without NATS: its HTTP side works all the same."""
    running = RunningShop(nobody())
    async with await running.client() as client:
        yield client
    await running.stop()


class TestHttp:
    async def test_feed_lists_items_whose_images_exist(self, http):
        answer = await http.get("/feed")
        assert answer.status_code == 200
        items = answer.json()
        assert [item["item"] for item in items] == list(range(1, 41))
        assert (await http.get(items[7]["image"])).status_code == 200

    async def test_posted_order_is_counted_and_can_be_read(self, http):
        answer = await http.post("/orders", json={"item": 3}, headers={"Stormline-User": "ann"})
        assert answer.status_code == 201
        assert answer.json() == {"id": 1, "item": 3, "user": "ann", "via": "http"}
        assert (await http.get(answer.headers["location"])).json() == answer.json()
        listed = (await http.get("/orders")).json()
        assert (listed["created"], listed["orders"]) == (1, [answer.json()])

    async def test_repeated_key_makes_one_order(self, http):
        headers = {"Idempotency-Key": "k1"}
        first = await http.post("/orders", json={"item": 3}, headers=headers)
        second = await http.post("/orders", json={"item": 3}, headers=headers)
        other = await http.post("/orders", json={"item": 4}, headers=headers)
        assert (first.status_code, second.status_code, other.status_code) == (201, 200, 422)
        assert first.json() == second.json()
        listed = (await http.get("/orders")).json()
        assert (listed["created"], listed["repeated"]) == (1, 1)

    @pytest.mark.parametrize(("body", "status"), [(b"nonsense", 400), (b'{"item": 99}', 404), (b"x" * 70_000, 413)])
    async def test_bad_order_is_refused_in_json(self, http, body, status):
        answer = await http.post("/orders", content=body)
        assert answer.status_code == status
        assert answer.json()["error"]
        assert (await http.get("/orders")).json()["created"] == 0

    async def test_image_has_length_and_etag_and_answers_304(self, http):
        answer = await http.get("/image/5")
        body, tag = image(5)
        assert answer.content == body
        assert answer.headers["content-length"] == str(len(body))
        assert answer.headers["content-type"] == "image/png"
        assert answer.headers["etag"] == tag
        for value in (tag, f'"other", W/{tag}', "*"):
            again = await http.get("/image/5", headers={"If-None-Match": value})
            assert (again.status_code, again.content) == (304, b"")
        assert (await http.get("/image/5", headers={"If-None-Match": '"other"'})).status_code == 200
        head = await http.head("/image/5")
        assert (head.headers["content-length"], head.content) == (str(len(body)), b"")

    @pytest.mark.parametrize(
        ("path", "status"),
        [
            ("/slow?s=0", 200),
            ("/slow?s=0.01", 200),
            ("/slow?s=-1", 400),
            ("/slow?s=61", 400),
            ("/slow?s=nan", 400),
            ("/slow?s=x", 400),
            ("/status/200", 200),
            ("/status/204", 204),
            ("/status/304", 304),
            ("/status/429", 429),
            ("/status/503", 503),
            ("/status/100", 400),
            ("/status/999", 400),
            ("/image/1000000", 404),
            ("/image/x", 404),
            ("/orders/7", 404),
            ("/nothing", 404),
        ],
    )
    async def test_paths_answer_with_their_status(self, http, path, status):
        assert (await http.get(path)).status_code == status

    async def test_status_answers_every_method(self, http):
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
            assert (await http.request(method, "/status/418")).json() == {"status": 418}

    async def test_wrong_method_is_405(self, http):
        answer = await http.delete("/orders")
        assert answer.status_code == 405
        assert "POST" in answer.headers["allow"]

    async def test_taken_port_is_a_platform_error(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            config = shop.ShopConfig(port=taken.getsockname()[1], biz=nobody())
            with pytest.raises(errors.PlatformError, match="shop: cannot listen"):
                await shop.run(config, started=lambda address: None, stop=asyncio.Event())


async def call(core: NatsEngine, method: str, data: bytes, headers: dict[str, str] | None = None):
    """Call until the service is there: it joins in its own time."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await core.request(f"rpc.{method}", data, headers, timeout_s=WAIT_S)
            except (errors.NoResponders, errors.EngineUnavailable):
                await asyncio.sleep(0.01)


@pytest.fixture(name="world")
async def _world(tmp_path) -> AsyncIterator[tuple[RunningServer, NatsEngine, httpx2.AsyncClient]]:
    """Give an engine, the platform's connection to it, and the HTTP side of a shop on it."""
    server = await start_server(tmp_path, rng=SystemRng(), port=free_port())
    running = RunningShop(server.biz)
    core = await connect(server.core, rng=SystemRng())
    async with await running.client() as http:
        yield server, core, http
    await core.close()
    await running.stop()
    await server.stop()


class TestRpc:
    async def test_rpc_and_http_share_the_book(self, world):
        _, core, http = world
        headers = {"Stormline-User": "ann", "Stormline-Device": "d1", "Stormline-App": "demo"}
        made = json.loads((await call(core, "orders.create", b'{"item": 3}', headers)).data)
        assert made == {"id": 1, "item": 3, "user": "ann", "via": "rpc"}
        assert (await http.get("/orders/1")).json() == made
        posted = (await http.post("/orders", json={"item": 4})).json()
        assert json.loads((await call(core, "orders.get", b'{"id": 2}')).data) == posted

    async def test_rpc_repeated_key_makes_one_order(self, world):
        _, core, http = world
        headers = {"Idempotency-Key": "k", "Stormline-User": "ann"}
        answers = [(await call(core, "orders.create", b'{"item": 3}', headers)).data for _ in range(3)]
        assert len(set(answers)) == 1
        assert (await http.get("/orders")).json()["created"] == 1
        reply = await call(core, "orders.create", b'{"item": 4}', headers)
        assert reply_error(reply) == (422, "this Idempotency-Key belongs to another order")

    @pytest.mark.parametrize(
        ("method", "data", "headers", "code"),
        [
            ("orders.create", b"", {}, 400),
            ("orders.create", b"nonsense", {}, 400),
            ("orders.create", b"{}", {}, 400),
            ("orders.create", b"\xff", {}, 400),
            ("orders.create", b'{"item": 999}', {}, 404),
            ("orders.create", b"[" + b"1," * 40_000 + b"1]", {}, 413),
            ("orders.create", b'{"item": 1}', {"Stormline-Deadline-Ms": "0"}, 408),
            ("orders.create", b'{"item": 1}', {"Stormline-Deadline-Ms": "-5"}, 408),
            ("orders.create", b'{"item": 1}', {"Stormline-Deadline-Ms": "soon"}, 400),
            ("orders.get", b"", {}, 400),
            ("orders.get", b'{"id": "1"}', {}, 400),
            ("orders.get", b'{"id": 12345}', {}, 404),
            ("orders.get", b'{"id": 1}', {"Stormline-Deadline-Ms": "000"}, 408),
        ],
    )
    async def test_rpc_says_no_by_the_convention_and_does_nothing(self, world, method, data, headers, code):
        _, core, http = world
        problem = reply_error(await call(core, method, data, headers))
        assert problem is not None
        assert problem[0] == code
        assert problem[1]
        assert (await http.get("/orders")).json()["created"] == 0

    async def test_rpc_with_time_left_is_done(self, world):
        _, core, _ = world
        reply = await call(core, "orders.create", b'{"item": 1}', {"Stormline-Deadline-Ms": "5000"})
        assert reply_error(reply) is None

    async def test_shop_joins_when_nats_comes_later_and_again_after_each_loss(self, tmp_path):
        first = await start_server(tmp_path, rng=SystemRng(), port=(port := free_port()))
        await first.child.stop(0.0)
        running = RunningShop(first.biz)
        async with await running.client() as http:
            assert (await http.post("/orders", json={"item": 1})).status_code == 201
            for _ in range(2):
                server = await start_server(tmp_path, rng=SystemRng(), port=port)
                core = await connect(server.core, rng=SystemRng())
                made = json.loads((await call(core, "orders.create", b'{"item": 2}')).data)
                assert (await http.get(f"/orders/{made['id']}")).json() == made
                await core.close()
                await server.child.stop(0.0)
            assert (await http.get("/orders")).json()["created"] == 3
        await running.stop()

    async def test_two_shops_share_the_calls(self, world):
        server, core, _ = world
        second = OrderBook()
        service = shop.order_service(second)
        task = asyncio.create_task(service.serve(server.biz.url, password=server.biz.password))
        await service.ready.wait()
        ids_made = [json.loads((await call(core, "orders.create", b'{"item": 1}')).data)["id"] for _ in range(40)]
        assert 0 < second.created < 40
        assert len(ids_made) == 40
        task.cancel()
        await asyncio.wait([task])

    async def test_service_cancelled_at_any_moment_ends(self):
        for turns in range(150):
            task = asyncio.create_task(shop.order_service(OrderBook()).serve(nobody().url, password="x"))
            for _ in range(turns % 30):
                await asyncio.sleep(0)
            task.cancel()
            async with asyncio.timeout(WAIT_S):
                await asyncio.wait([task])
            assert task.cancelled()
