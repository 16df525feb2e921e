"""The demo shop: one HTTP upstream and one RPC service on the same order book.

It stands for a business team's system, so it uses nothing of the platform's but `stormline.Service`.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from stormline.core import errors
from stormline.core.values import Address
from stormline.demo.orders import OrderBook
from stormline.demo.pages import OrderRefused, application, take_order
from stormline.engine.nats import EngineConfig
from stormline.service.rpc import Service, ServiceCall
from stormline.web.server import HttpServer

_log = logging.getLogger("stormline.demo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShopConfig:
    """What the shop needs to run.

    Attributes:
        host: IP address its HTTP side listens on.
        port: its port; 0 for a free one.
        biz: how to reach NATS, as a business service.
    """

    host: str = "127.0.0.1"
    port: int
    biz: EngineConfig


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Argument of `orders.get`."""

    id: int


def order_service(book: OrderBook) -> Service:
    """Give the RPC side."""
    service = Service("orders", version="1.0.0", description="Orders of the demo shop")

    @service.method("orders.create", msgspec.Raw)
    def create(call: ServiceCall) -> object:
        try:
            order, _ = take_order(book, bytes(call.params), user=call.user, via="rpc", key=call.key)
        except OrderRefused as error:
            raise errors.ServiceError(error.status, error.reason) from error
        return order

    @service.method("orders.get", Wanted)
    def get(call: ServiceCall) -> object:
        order = book.get(call.params.id)
        if order is None:
            raise errors.ServiceError(404, "no such order")
        return order

    return service


async def run(config: ShopConfig, *, started: Callable[[Address], None], stop: asyncio.Event) -> None:
    """Be the demo shop until `stop` is set.

    `started` is called once, when HTTP requests are answered; the RPC side joins as soon as NATS is there. After
    `stop` requests in flight get at most `limits.HTTP_DRAIN_S`.

    Raises:
        PlatformError: the address is taken.
    """
    book = OrderBook()
    app: Any = application(book)  # Starlette and uvicorn write the type of an ASGI application differently
    server = HttpServer(app, host=config.host, port=config.port, what="shop")
    service = asyncio.create_task(
        order_service(book).serve(config.biz.url, user=config.biz.user, password=config.biz.password), name="shop rpc"
    )
    stopped = asyncio.create_task(stop.wait(), name="shop stop")
    try:
        await server.start()
        started(server.address)
        _log.info("shop answers on %s", server.address)
        await asyncio.wait({service, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if service.done():
            service.result()  # it never returns: raise what ended it
    finally:
        for task in (service, stopped):
            task.cancel()
        await asyncio.gather(service, stopped, return_exceptions=True)
        await server.stop()
