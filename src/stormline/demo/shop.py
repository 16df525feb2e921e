"""The demo shop: one HTTP upstream and one RPC service on the same order book.

It stands for a business team's system, so it uses nothing of the platform's but its conventions. The RPC convention, in
any language:

- **Register**: connect to NATS with the BIZ credential and answer on `rpc.<method>`, here `rpc.orders.create` and
  `rpc.orders.get`. Use a queue group, so that several processes share the work. Libraries for NATS services (`micro`)
  do it.
- **Request**: the data is the argument, JSON here. Headers:
    - `Stormline-App`, `Stormline-Device`, `Stormline-User`: who calls. The platform has checked it; no client can
      send these. `Stormline-User` is missing where nobody is logged in. Other than printable ASCII is `%XX`.
    - `Stormline-Deadline-Ms`: how long the caller still waits. Nobody hears an answer after that: do not begin work
      that cannot be done in time.
    - `Idempotency-Key` (optional): the same key of the same user means the same call again, after a lost answer,
      say. Answer what was answered before; do nothing twice.
- **Answer**: data on the reply subject, within the deadline, once.
- **Say no**: headers `Nats-Service-Error-Code` (a number as in HTTP; 500 and more: the work may have been done) and
  `Nats-Service-Error` (for people).
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec
import nats.micro
from nats.aio.client import Client
from nats.micro.request import Request, ServiceError
from nats.micro.service import Service, ServiceConfig

from stormline.core import limits_platform as limits
from stormline.core.clock import Rng
from stormline.core.values import Address
from stormline.demo.orders import OrderBook
from stormline.demo.pages import OrderRefused, application, take_order
from stormline.engine.nats import EngineConfig
from stormline.engine.nats_link import FAILURES, CancelGuard, shut
from stormline.web.server import HttpServer

_log = logging.getLogger("stormline.demo")
_VERSION: Final = "1.0.0"


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


class OrderService:
    """The RPC side. `run` keeps it on NATS, whenever and however often NATS comes and goes."""

    def __init__(self, book: OrderBook, config: EngineConfig, rng: Rng) -> None:
        self._book = book
        self._config = config
        self._rng = rng
        self.ready = asyncio.Event()
        """Set while it answers calls."""

    async def run(self) -> None:
        """Serve until cancelled."""
        attempt = 0
        guard = CancelGuard()
        while True:
            try:
                await self._serve(guard)
                attempt = 0
                _log.warning("orders: lost NATS at %s", self._config.url)
            except FAILURES as error:
                attempt += 1
                _log.log(logging.WARNING if attempt == 1 else logging.DEBUG, "orders: no NATS yet: %r", error)
            guard.check()
            whole_s = limits.ENGINE_RECONNECT_PAUSE_S * 2.0 ** min(attempt, 16)
            pause_s = min(whole_s, limits.ENGINE_RECONNECT_PAUSE_MAX_S)
            await asyncio.sleep(pause_s * (0.5 + self._rng.random() / 2))

    async def _serve(self, guard: CancelGuard) -> None:
        """Be on NATS for one connection's life."""
        client = Client()
        gone = asyncio.Event()

        async def on_error(error: Exception) -> None:
            _log.debug("orders: %r", error)

        async def on_gone() -> None:
            gone.set()

        try:
            async with asyncio.timeout(limits.ENGINE_CONNECT_TIMEOUT_S):
                await client.connect(
                    self._config.url.split(","),
                    name="demo shop",
                    user=self._config.user,
                    password=self._config.password.reveal(),
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=limits.ENGINE_CONNECT_TIMEOUT_S,
                    ping_interval=limits.ENGINE_PING_S,
                    max_outstanding_pings=limits.ENGINE_PINGS_MAX,
                    error_cb=on_error,
                    disconnected_cb=on_gone,
                    closed_cb=on_gone,
                )
                await self._register(client)
            guard.check()
            self.ready.set()
            _log.info("orders: answering on NATS at %s", self._config.url)
            while client.is_connected:  # looked at, too: the client does not always tell
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(limits.ENGINE_LOOK_S):
                        await gone.wait()
        finally:
            self.ready.clear()
            await shut(client)

    async def _register(self, client: Client) -> Service:
        service = await nats.micro.add_service(
            client, ServiceConfig(name="orders", version=_VERSION, description="Orders of the demo shop")
        )
        for method, handler in (("create", self._create), ("get", self._get)):
            await service.add_endpoint(
                name=f"orders-{method}", subject=f"rpc.orders.{method}", queue_group="orders", handler=handler
            )
        await client.flush(limits.ENGINE_CONNECT_TIMEOUT_S)  # registered when we say so
        return service

    async def _create(self, request: Request) -> None:
        headers = request.headers or {}
        _check_deadline(headers)
        try:
            order, _ = take_order(
                self._book,
                request.data,
                user=headers.get("Stormline-User", ""),
                via="rpc",
                key=headers.get("Idempotency-Key", ""),
            )
        except OrderRefused as error:
            raise ServiceError(str(error.status), error.reason) from error
        await request.respond(msgspec.json.encode(order))

    async def _get(self, request: Request) -> None:
        _check_deadline(request.headers or {})
        try:
            wanted = msgspec.json.decode(request.data, type=Wanted)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ServiceError("400", f'expected {{"id": number}}: {error}') from error
        order = self._book.get(wanted.id)
        if order is None:
            raise ServiceError("404", "no such order")
        await request.respond(msgspec.json.encode(order))


def _check_deadline(headers: dict[str, str]) -> None:
    """Refuse work whose caller is gone, and a deadline that is none."""
    text = headers.get("Stormline-Deadline-Ms")
    if text is None:
        return
    if not (text.removeprefix("-").isdigit() and text.isascii()):
        raise ServiceError("400", "Stormline-Deadline-Ms: expected milliseconds")
    if text.startswith("-") or not text.strip("0"):
        raise ServiceError("408", "the caller's deadline has passed; nothing was done")


async def run(config: ShopConfig, *, rng: Rng, started: Callable[[Address], None], stop: asyncio.Event) -> None:
    """Be the demo shop until `stop` is set.

    `started` is called once, when HTTP requests are answered; the RPC side joins as soon as NATS is there. After
    `stop` requests in flight get at most `limits.HTTP_DRAIN_S`.

    Raises:
        PlatformError: the address is taken.
    """
    book = OrderBook()
    app: Any = application(book)  # Starlette and uvicorn write the type of an ASGI application differently
    server = HttpServer(app, host=config.host, port=config.port, what="shop")
    service = asyncio.create_task(OrderService(book, config.biz, rng).run(), name="shop rpc")
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
