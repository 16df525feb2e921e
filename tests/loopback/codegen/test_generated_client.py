"""Generated clients against real servers: the demo shop, and a server that tells what it was sent."""

import asyncio
import importlib.util
import io
import sys
import uuid
from collections.abc import AsyncIterator
from email import message_from_bytes
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import stormline
from stormline.client.background import BACKGROUND
from stormline.codegen.generate import generate
from stormline.core.values import Address
from stormline.demo import pages
from stormline.demo.orders import OrderBook
from stormline.web.server import HttpServer

pytestmark = pytest.mark.loopback
TEXT = {"type": "string"}


def answered(schema: dict[str, Any], media: str = "application/json") -> dict[str, Any]:
    return {"description": "x", "content": {media: {"schema": schema}}}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def param(name: str, where: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "in": where, "schema": schema, "required": where == "path", **more}


NUMBERS = {"type": "array", "items": {"type": "integer"}}
SEEN = {"200": answered(ref("Seen"))}
ECHO = {
    "openapi": "3.0.3",
    "info": {"title": "Echo"},
    "security": [{"token": []}],
    "paths": {
        "/echo/{place}/{nums}": {
            "get": {
                "operationId": "places",
                "parameters": [
                    param("place", "path", TEXT),
                    param("nums", "path", NUMBERS),
                    param("many", "query", NUMBERS),
                    param("joined", "query", NUMBERS, explode=False),
                    param("piped", "query", NUMBERS, style="pipeDelimited", explode=False),
                    param("deep", "query", ref("Point"), style="deepObject", explode=True),
                    param("flag", "query", {"type": "boolean"}),
                    param("json", "query", {}) | {"content": {"application/json": {"schema": ref("Point")}}},
                    param("X-Id", "header", {"type": "string", "format": "uuid"}),
                    param("crumb", "cookie", TEXT),
                ],
                "responses": SEEN,
            }
        },
        "/echo/json": {
            "post": {"operationId": "sendShape", "requestBody": {**answered(ref("Shape")), "required": True},
                     "responses": {"200": answered(ref("Shape"))}}
        },
        "/echo/form": {
            "post": {"operationId": "sendForm", "security": [{"user": []}], "responses": SEEN,
                     "requestBody": answered(ref("Point"), "application/x-www-form-urlencoded")}
        },
        "/echo/upload": {
            "post": {
                "operationId": "upload", "security": [{"key": []}], "responses": SEEN,
                "requestBody": answered({
                    "type": "object", "required": ["picture"],
                    "properties": {
                        "picture": {"type": "string", "format": "binary"},
                        "others": {"type": "array", "items": {"type": "string", "format": "binary"}},
                        "at": ref("Point"), "title": TEXT,
                    },
                }, "multipart/form-data"),
            }
        },
        "/echo/bytes": {"put": {"operationId": "sendBytes", "security": [], "responses": SEEN,
                                "requestBody": answered({}, "application/octet-stream")}},
        "/echo/text": {"put": {"operationId": "sendText", "responses": SEEN,
                               "requestBody": answered(TEXT, "text/plain")}},
        "/answer/{how}": {
            "get": {
                "operationId": "answer",
                "parameters": [param("how", "path", TEXT)],
                "responses": {
                    "200": answered(ref("Shape")),
                    "202": answered(TEXT, "text/plain"),
                    "203": answered({"type": "string", "format": "binary"}, "image/png"),
                    "204": {"description": "x"},
                    "404": answered(ref("Missing"), "application/problem+json"),
                    "5XX": answered(ref("Trouble")),
                },
            }
        },
        "/events": {"get": {"operationId": "watch", "parameters": [param("n", "query", {"type": "integer"})],
                            "responses": {"200": answered(TEXT, "text/event-stream"),
                                          "default": answered(ref("Missing"))}}},
    },
    "components": {
        "securitySchemes": {
            "token": {"type": "http", "scheme": "bearer"},
            "user": {"type": "http", "scheme": "basic"},
            "key": {"type": "apiKey", "in": "query", "name": "api key"},
        },
        "schemas": {
            "Point": {"type": "object", "required": ["x"], "properties": {"x": {"type": "integer"},
                                                                          "y-axis": {"type": "integer"}}},
            "Circle": {"type": "object", "required": ["form"],
                       "properties": {"form": TEXT, "centre": ref("Point"),
                                      "data": {"type": "string", "format": "byte"}}},
            "Square": {"type": "object", "required": ["form", "side"],
                       "properties": {"form": TEXT, "side": {"type": "number", "nullable": True}}},
            "Shape": {"oneOf": [ref("Circle"), ref("Square")], "discriminator": {"propertyName": "form"}},
            "Missing": {"type": "object", "required": ["what"], "properties": {"what": TEXT}},
            "Trouble": {"type": "object", "required": ["code"], "properties": {"code": {"type": "integer"}}},
            "Seen": {
                "type": "object",
                "required": ["target", "headers", "body"],
                "properties": {"target": TEXT, "body": TEXT,
                               "headers": {"type": "object", "additionalProperties": TEXT}},
            },
        },
    },
}  # fmt: skip


def json_of(value: Any, status: int = 200, media: str = "application/json") -> Response:
    return Response(msgspec.json.encode(value), status, media_type=media)


async def echo(request: Request) -> Response:
    body = await request.body()
    if request.url.path == "/echo/json":
        return Response(body, media_type="application/json")
    target = request.scope["raw_path"].decode() + "?" + request.scope["query_string"].decode()
    return json_of({"target": target, "headers": dict(request.headers), "body": body.decode("latin-1")})


async def answer(request: Request) -> Response:
    how = request.path_params["how"]
    answers = {
        "shape": json_of({"form": "Square", "side": 2}),
        "other": json_of({"form": "Triangle"}),
        "text": PlainTextResponse("later", 202),
        "picture": Response(b"\x89PNG", 203, media_type="image/png"),
        "nothing": Response(status_code=204),
        "missing": json_of({"what": "it"}, 404, "application/problem+json"),
        "trouble": json_of({"code": 7}, 501),
        "page": Response("<p>sorry", 404, media_type="text/html"),
        "teapot": PlainTextResponse("short and stout", 418),
        "redirect": Response(status_code=302, headers={"location": "/elsewhere"}),
        "html": Response("<p>log in", media_type="text/html"),
    }
    return answers[how]


async def watch(request: Request) -> Response:
    if "n" not in request.query_params:
        return json_of({"what": "n"}, 400)

    async def lines() -> AsyncIterator[str]:
        for n in range(int(request.query_params["n"])):
            yield f"id: {n}\ndata: {n}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


def echo_app() -> Starlette:
    return Starlette(
        routes=[
            Route("/echo/{rest:path}", echo, methods=["GET", "POST", "PUT"]),
            Route("/answer/{how}", answer),
            Route("/events", watch),
        ]
    )


def load(data: bytes, folder: Path, name: str) -> Any:
    path = folder / f"{name}.py"
    path.write_text(generate(data).code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
async def leak_guard_async(warm_loop: None, leak_guard_async: None) -> None:
    """Guard a process whose loop for synchronous clients is there already; it stays until the process ends."""


@pytest.fixture(name="warm_loop")
def _warm_loop() -> None:
    BACKGROUND.loop()


@pytest.fixture(name="module", scope="module")
def _module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(msgspec.json.encode(ECHO), tmp_path_factory.mktemp("echo"), "generated_echo")


async def serve(app: Any) -> HttpServer:
    server = HttpServer(app, host="127.0.0.1", port=0, what="test")
    await server.start()
    return server


def url_of(address: Address) -> str:
    return f"http://{address}"


@pytest.fixture(name="url")
async def _url() -> AsyncIterator[str]:
    server = await serve(echo_app())
    yield url_of(server.address)
    await server.stop()


@pytest.fixture(name="api")
async def _api(module: Any, url: str) -> AsyncIterator[Any]:
    async with module.Client(url, token="t0ken", user=("ann", "p:w"), key="k&y") as api:
        yield api


class TestShop:
    async def test_orders_are_made_once_and_read(self, tmp_path):
        shop = load(pages.openapi(), tmp_path, "generated_shop")
        server = await serve(pages.application(OrderBook()))
        async with shop.Client(url_of(server.address)) as api:
            items = await api.list_items()
            assert [each.item for each in items] == list(range(1, 41))
            order = await api.create_order(shop.Wanted(item=3), idempotency_key="k1", stormline_user="ann")
            assert order == await api.create_order(shop.Wanted(item=3), idempotency_key="k1", stormline_user="ann")
            assert order == shop.Order(id=1, item=3, user="ann", via="http") == await api.get_order(1)
            assert (await api.list_orders()).repeated == 1
            picture, tag = pages.image(7)
            assert await api.get_image(7) == picture
            assert await api.get_image(7, if_none_match=tag) is None
            assert (await api.wait_for(s=0.0)).slept_s == 0.0
            assert await api.answer_with(204) is None
            with pytest.raises(shop.RefusalRaised) as refused:
                await api.create_order(shop.Wanted(item=99))
            assert (refused.value.status, refused.value.error.error) == (404, "no such item: there are 1 to 40")
            with pytest.raises(shop.StatusRaised) as told:
                await api.answer_with(418)
            assert told.value.error.status == 418
        await server.stop()

    async def test_synchronous_client_does_the_same(self, tmp_path):
        shop = load(pages.openapi(), tmp_path, "generated_shop")
        server = await serve(pages.application(OrderBook()))

        def use() -> tuple[Any, Any]:
            with shop.SyncClient(url_of(server.address)) as api:
                made = api.create_order(shop.Wanted(item=5), business="checkout", deadline_s=20.0)
                with pytest.raises(shop.RefusalRaised):
                    api.get_order(77)
                return made, api.get_order(made.id)

        made, read = await asyncio.to_thread(use)
        assert made == read
        await server.stop()

    def test_document_names_every_route_of_the_shop(self):
        said = set(msgspec.json.decode(pages.openapi())["paths"])
        routes = {route.path.replace(":int", "") for route in pages.application(OrderBook()).routes}
        assert said == routes - {"/openapi.json"}

    async def test_shop_serves_its_document(self):
        server = await serve(pages.application(OrderBook()))
        async with stormline.AsyncClient() as client:
            answer = await client.get(f"{url_of(server.address)}/openapi.json")
        assert answer.json()["info"]["title"] == "Demo shop"
        await server.stop()


class TestRequests:
    async def test_parameters_stand_where_and_how_the_document_says(self, api, module):
        ident = uuid.UUID(int=5)
        point = module.Point(x=1, y_axis=2)
        seen = await api.places(
            "a/b ?c", [1, 2], many=[1, 2], joined=[3, 4], piped=[5, 6], deep=point, flag=True, json=point, x_id=ident,
            crumb="c;d",
        )  # fmt: skip
        path, _, query = seen.target.partition("?")
        assert path == "/echo/a%2Fb%20%3Fc/1,2"
        assert query.split("&") == [
            "many=1", "many=2", "joined=3,4", "piped=5%7C6", "deep%5Bx%5D=1", "deep%5By-axis%5D=2", "flag=true",
            "json=%7B%22x%22%3A1%2C%22y-axis%22%3A2%7D",
        ]  # fmt: skip
        assert seen.headers["x-id"] == str(ident)
        assert seen.headers["cookie"] == "crumb=c%3Bd"
        assert seen.headers["authorization"] == "Bearer t0ken"

    async def test_what_would_make_another_path_or_field_is_refused(self, api):
        for place in ("..", ".", "", None):
            with pytest.raises(stormline.errors.ConfigError, match="cannot be part of a path"):
                await api.places(place, [1])
        async with type(api)(api._sender.base_url, token="a\r\nx: y") as other:
            with pytest.raises(stormline.errors.ConfigError, match="control characters"):
                await other.places("a", [1])

    async def test_union_goes_and_comes_by_its_tag(self, api, module):
        for shape in (module.Circle(centre=module.Point(x=1), data=b"\0\xff"), module.Square(side=None)):
            assert await api.send_shape(shape) == shape

    async def test_form_is_sent_with_basic_credentials(self, api, module):
        seen = await api.send_form(body=module.Point(x=1, y_axis=-2))
        assert (seen.body, seen.headers["authorization"]) == ("x=1&y-axis=-2", "Basic YW5uOnA6dw==")

    async def test_files_and_fields_are_sent_in_parts_with_a_key(self, api, module):
        body = module.UploadBody(
            picture=module.typed.File(b"\x89PNG", name="a.png", media="image/png"),
            others=[module.typed.File(io.BytesIO(b"1")), module.typed.File(b"2")],
            at=module.Point(x=4),
            title="é",
        )
        seen = await api.upload(body=body)
        mail = message_from_bytes(f"content-type: {seen.headers['content-type']}\n\n{seen.body}".encode("latin-1"))
        parts = mail.get_payload()
        assert isinstance(parts, list)
        told = [
            (part.get_param("name", header="content-disposition"), part.get_filename(), part.get_content_type(),
             part.get_payload(decode=True))
            for part in parts
        ]  # fmt: skip
        assert told == [
            ("picture", "a.png", "image/png", b"\x89PNG"),
            ("others", "file", "application/octet-stream", b"1"),
            ("others", "file", "application/octet-stream", b"2"),
            ("at", None, "application/json", b'{"x":4}'),
            ("title", None, "text/plain", "é".encode()),
        ]
        assert seen.target.endswith("?api%20key=k%26y")

    async def test_plain_bodies_are_sent_as_they_are(self, api):
        raw = await api.send_bytes(body=b"\0\x01")
        assert (raw.body, raw.headers["content-type"]) == ("\0\x01", "application/octet-stream")
        assert "authorization" not in raw.headers
        text = await api.send_text(body="hé")
        assert (text.body.encode("latin-1").decode(), text.headers["content-type"]) == ("hé", "text/plain")
        none = await api.send_text()
        assert (none.body, "content-type" in none.headers) == ("", False)


class TestAnswers:
    async def test_success_gives_what_the_status_stands_for(self, api, module):
        assert await api.answer("shape") == module.Square(side=2.0)
        assert await api.answer("text") == "later"
        assert await api.answer("picture") == b"\x89PNG"
        assert await api.answer("nothing") is None

    async def test_errors_hold_the_documents_model(self, api, module):
        with pytest.raises(module.MissingRaised) as missing:
            await api.answer("missing")
        assert (missing.value.status, missing.value.error) == (404, module.Missing(what="it"))
        with pytest.raises(module.TroubleRaised) as trouble:
            await api.answer("trouble")
        assert (trouble.value.status, trouble.value.error.code) == (501, 7)

    @pytest.mark.parametrize(("how", "status"), [("page", 404), ("teapot", 418)])
    async def test_errors_that_the_document_does_not_know_hold_the_body(self, api, module, how, status):
        with pytest.raises(stormline.errors.ApiError) as refused:
            await api.answer(how)
        assert (type(refused.value), refused.value.status, refused.value.error) == (module.typed.ApiError, status, None)
        assert refused.value.body

    @pytest.mark.parametrize("how", ["other", "redirect", "html"])
    async def test_success_that_is_not_as_the_document_says_is_an_error(self, api, how):
        with pytest.raises(stormline.errors.UnexpectedAnswer):
            await api.answer(how)

    async def test_events_come_one_by_one(self, api, module):
        assert [(event.id, event.data) async for event in api.watch(n=3)] == [("0", "0"), ("1", "1"), ("2", "2")]
        with pytest.raises(module.MissingRaised):
            _ = [event async for event in api.watch()]

    async def test_synchronous_events_come_too(self, module, url):
        def use() -> list[str]:
            with module.SyncClient(url) as api:
                return [event.data for event in api.watch(n=2)]

        assert await asyncio.to_thread(use) == ["0", "1"]


class TestClient:
    async def test_many_operations_are_grouped_by_their_tags(self, url, tmp_path):
        paths = {
            f"/echo/n{n}": {"get": {"tags": [f"part {n % 2}"], "operationId": "read" if n < 2 else f"read{n}",
                                    "responses": SEEN}}
            for n in range(26)
        }  # fmt: skip
        module = load(msgspec.json.encode({**ECHO, "paths": paths}), tmp_path, "generated_grouped")
        async with module.Client(url) as api:
            assert (await api.part_0.read()).target == "/echo/n0?"
            assert (await api.part_1.read()).target == "/echo/n1?"
            assert (await api.part_1.read25()).target == "/echo/n25?"

    async def test_credentials_are_not_shown(self, api):
        assert repr(api).startswith("Client('http://127.0.0.1:")
        shown = repr(api._sender._credentials)
        assert not any(secret in shown for secret in ("t0ken", "p:w", "k&y"))

    async def test_client_of_the_caller_is_used_and_left_open(self, module, url):
        async with stormline.AsyncClient() as client:
            async with module.Client(url, client=client) as api:
                await api.answer("nothing", business="checkout", deadline_s=20.0)
            assert not client.is_closed
            assert client.costs.connections >= 1
