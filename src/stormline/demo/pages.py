"""The demo shop's HTTP side: an ordinary upstream that knows nothing of the platform in front of it.

| request             | answer                                                                                  |
|---------------------|-----------------------------------------------------------------------------------------|
| `GET /feed`         | the items, JSON                                                                         |
| `GET /orders`       | how many orders were made, and the newest                                               |
| `POST /orders`      | `{"item": 3}` makes an order: 201; 200 and the same order for a repeated `Idempotency-Key`|
| `GET /orders/{id}`  | one order                                                                               |
| `GET /image/{n}`    | a picture of noise, 1 to 400 KB by `n`, the same bytes always; `ETag`, `If-None-Match`   |
| `GET /slow?s=1.5`   | an answer after that many seconds                                                       |
| `/status/{code}`    | an answer with that status, 200 to 599                                                  |
| `GET /openapi.json` | all this as an OpenAPI document                                                         |
"""

import asyncio
import functools
import hashlib
import struct
import zlib
from importlib import resources
from typing import Any, Final
from urllib.parse import unquote

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stormline.core import limits_platform as limits
from stormline.demo.orders import KeyReused, Order, OrderBook

ITEMS: Final = 40
"""Items on offer, numbered from 1."""
IMAGES: Final = 1_000_000
"""Pictures are numbered below this."""
_NAMES: Final = ("lamp", "kettle", "umbrella", "backpack", "bicycle bell", "notebook", "raincoat", "torch")
_NO_BODY: Final = frozenset({204, 205, 304})


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What an order says: the item's number."""

    item: int


class OrderRefused(Exception):
    """An order that cannot be taken.

    Attributes:
        status: as in HTTP.
        reason: for people.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def take_order(book: OrderBook, body: bytes, *, user: str, via: str, key: str) -> tuple[Order, bool]:
    """Read `{"item": 3}` and make the order; the flag says whether it was made now.

    Raises:
        OrderRefused: 400 malformed, 404 no such item, 413 too large, 422 the key belongs to another order.
    """
    if len(body) > limits.DEMO_BODY_BYTES_MAX:
        raise OrderRefused(413, f"an order has at most {limits.DEMO_BODY_BYTES_MAX} bytes")
    try:
        wanted = msgspec.json.decode(body, type=Wanted)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise OrderRefused(400, f'expected {{"item": number}}: {error}') from error
    if not 1 <= wanted.item <= ITEMS:
        raise OrderRefused(404, f"no such item: there are 1 to {ITEMS}")
    try:
        return book.create(wanted.item, user=user, via=via, key=key)
    except KeyReused as error:
        raise OrderRefused(422, "this Idempotency-Key belongs to another order") from error


def application(book: OrderBook) -> Starlette:
    """Make the ASGI application on an order book."""

    async def orders(request: Request) -> Response:
        if request.method != "POST":
            return _json({"created": book.created, "repeated": book.repeated, "orders": book.newest()})
        order, made = take_order(
            book,
            await _body(request),
            user=unquote(request.headers.get("stormline-user", "")),
            via="http",
            key=request.headers.get("idempotency-key", ""),
        )
        return _json(order, 201 if made else 200, {"Location": f"/orders/{order.id}"})

    async def one_order(request: Request) -> Response:
        order = book.get(request.path_params["id"])
        if order is None:
            raise HTTPException(404, "no such order")
        return _json(order)

    return Starlette(
        routes=[
            Route("/feed", _feed),
            Route("/orders", orders, methods=["GET", "POST"]),
            Route("/orders/{id:int}", one_order),
            Route("/image/{n:int}", _image),
            Route("/openapi.json", _openapi),
            Route("/slow", _slow),
            Route("/status/{code:int}", _status, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
        ],
        exception_handlers={HTTPException: _on_http_error, OrderRefused: _on_refused},
    )


async def _body(request: Request) -> bytes:
    """Gather a request's body, never more than an order may have."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limits.DEMO_BODY_BYTES_MAX:
            raise OrderRefused(413, f"an order has at most {limits.DEMO_BODY_BYTES_MAX} bytes")
    return bytes(body)


async def _feed(request: Request) -> Response:
    return _json(
        [
            {
                "item": number,
                "title": f"{_NAMES[number % len(_NAMES)]} no. {number}",
                "price_cents": 500 + number * 37 % 4000,
                "image": f"/image/{number}",
            }
            for number in range(1, ITEMS + 1)
        ]
    )


async def _image(request: Request) -> Response:
    number = request.path_params["n"]
    if number >= IMAGES:
        raise HTTPException(404, f"pictures are numbered 0 to {IMAGES - 1}")
    body, tag = image(number)
    headers = {"ETag": tag, "Cache-Control": "max-age=3600"}
    asked = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    if tag in asked or "*" in asked:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="image/png", headers=headers)


async def _openapi(request: Request) -> Response:
    return Response(openapi(), media_type="application/json")


@functools.cache
def openapi() -> bytes:
    """Give the shop's OpenAPI document."""
    return (resources.files("stormline.demo") / "openapi.json").read_bytes()


async def _slow(request: Request) -> Response:
    try:
        seconds = float(request.query_params.get("s", "1"))
    except ValueError as error:
        raise HTTPException(400, "s: expected seconds") from error
    if not 0 <= seconds <= limits.DEMO_SLOW_S_MAX:
        raise HTTPException(400, f"s: expected 0 to {limits.DEMO_SLOW_S_MAX:g} seconds")
    await asyncio.sleep(seconds)
    return _json({"slept_s": seconds})


async def _status(request: Request) -> Response:
    code = request.path_params["code"]
    if not 200 <= code <= 599:
        raise HTTPException(400, "status: expected 200 to 599")
    return Response(status_code=code) if code in _NO_BODY else _json({"status": code}, code)


@functools.lru_cache(maxsize=limits.DEMO_IMAGES_CACHED_MAX)
def image(number: int) -> tuple[bytes, str]:
    """Make picture `number`: a PNG of grey noise (which does not compress), and its strong ETag."""
    side = 24 + number * 97 % 600
    noise = hashlib.shake_256(number.to_bytes(8, "big")).digest(side * side)
    rows = b"".join(b"\0" + noise[at : at + side] for at in range(0, side * side, side))
    body = b"\x89PNG\r\n\x1a\n" + b"".join(
        _png_chunk(kind, data)
        for kind, data in (
            (b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)),
            (b"IDAT", zlib.compress(rows, 1)),
            (b"IEND", b""),
        )
    )
    return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - Starlette calls us for this class alone
    return _json({"error": error.detail}, error.status_code, dict(error.headers or {}))


async def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, OrderRefused)  # noqa: S101 - Starlette calls us for this class alone
    return _json({"error": error.reason}, error.status)
