"""The browser's client in a real browser, on a real gateway."""

import asyncio
import contextlib
import socket
from collections import Counter
from typing import Any

import pytest

from stormline.engine.port import Message, Reply
from stormline.wire import websocket

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(120)]

UPSTREAM = "http://upstream.test"


async def echo(message: Message) -> Reply:
    return Reply(message.data)


async def slow(message: Message) -> Reply:
    await asyncio.sleep(30)
    return Reply(b"")


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Give back what came; at `/endless` send until nobody listens."""
    headers = dict(scope["headers"])
    body, more = b"", True
    while more:
        event = await receive()
        body += event.get("body", b"")
        more = event.get("more_body", False)
    status = 204 if scope["path"] == "/nothing" else 200
    await send({"type": "http.response.start", "status": status, "headers": [(b"x-seen", headers.get(b"x-a", b""))]})
    with contextlib.suppress(OSError):
        while scope["path"] == "/endless":
            await send({"type": "http.response.body", "body": b"x" * 16_384, "more_body": True})
            await asyncio.sleep(0.001)
    await send({"type": "http.response.body", "body": body if status == 200 else b""})


async def test_page_calls_fetches_takes_pushes_and_comes_back(
    gateway: Any, bus: Any, service: Any, upstream: Any, mint: Any, browser: Any
) -> None:
    await service.serve("rpc.shop.echo", echo)
    await service.serve("rpc.shop.slow", slow)
    given = {"api_upstreams": {"upstream.test": await upstream(application)}, "origins": (browser.origin,)}
    await gateway.start(bus.connect, **given)
    loop = asyncio.get_running_loop()

    def acts(action: Any) -> Any:
        return lambda **fields: asyncio.run_coroutine_threadsafe(action(**fields), loop).result(30)

    async def push(**fields: Any) -> Any:
        answer = await gateway.admin.post("/v1/push", json={"device": "page", **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def restart() -> None:
        await gateway.stop()
        gateway.stop_event.clear()
        await gateway.admin.aclose()
        await gateway.start(bus.connect, port=gateway.address.port)

    with socket.create_server(("127.0.0.1", 0)) as mute:
        where = {
            "url": f"wss://127.0.0.1:{gateway.address.port}{websocket.PATH}",
            "silent": f"wss://127.0.0.1:{mute.getsockname()[1]}{websocket.PATH}",
            "token": mint("page"),
            "upstream": UPSTREAM,
        }
        actions = {"where": lambda: where, "push": acts(push), "restart": acts(restart)}
        ran = await asyncio.to_thread(browser.run, "live.html", "--ignore-certificate-errors", actions=actions)
    assert [each for each in ran if each["error"]] == []
    assert len(ran) == 15


class Cutter:
    """Stands between page and gateway, and cuts what runs through it."""

    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        await self._open.wait()
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection(*self._gateway.address)
            self._writers.add(back)
            for source, sink in ((reader, back), (there, writer)):
                task = asyncio.create_task(self._pass_on(source, sink))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(4096):
                sink.write(data)
                await sink.drain()
        sink.transport.abort()

    async def cut(self) -> None:
        """Cut all connections."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def hold(self) -> None:
        """Let nothing new through."""
        self._open.clear()

    def let(self) -> None:
        """Let all through."""
        self._open.set()

    async def close(self) -> None:
        self._server.close()
        await self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Shop:
    """Counts what it did."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.begun = asyncio.Event()
        self.release = asyncio.Event()

    async def count(self, message: Message) -> Reply:
        self.done[message.data.decode()] += 1
        await asyncio.sleep(0.02)
        return Reply(message.data)

    async def held(self, message: Message) -> Reply:
        self.done[message.data.decode()] += 1
        self.begun.set()
        await self.release.wait()
        return Reply(message.data)


async def test_page_goes_on_with_its_session_where_the_connection_is_cut(
    gateway: Any, bus: Any, service: Any, mint: Any, browser: Any
) -> None:
    shop = Shop()
    await service.serve("rpc.shop.echo", echo)
    await service.serve("rpc.shop.count", shop.count)
    await service.serve("rpc.shop.held", shop.held)
    await gateway.start(bus.connect, origins=(browser.origin,))
    cutter = Cutter(gateway)
    await cutter.start()
    loop = asyncio.get_running_loop()

    def acts(action: Any) -> Any:
        return lambda **fields: asyncio.run_coroutine_threadsafe(action(**fields), loop).result(30)

    async def begun(name: str) -> None:
        await shop.begun.wait()

    async def release() -> None:
        shop.release.set()

    async def count(name: str) -> int:
        return shop.done[name]

    async def push_while_cut(**fields: Any) -> Any:
        cutter.hold()
        await cutter.cut()
        pushing = asyncio.create_task(gateway.admin.post("/v1/push", json={"device": "page", **fields}))
        await asyncio.sleep(0.2)
        cutter.let()
        answer = await pushing
        assert answer.status_code == 200, answer.text
        return answer.json()

    where = {"url": f"wss://127.0.0.1:{cutter.port}{websocket.PATH}", "token": mint("page")}
    actions = {
        "where": lambda: where,
        "cut": acts(cutter.cut),
        "begun": acts(begun),
        "release": acts(release),
        "count": acts(count),
        "push_while_cut": acts(push_while_cut),
    }
    try:
        ran = await asyncio.to_thread(browser.run, "cut.html", "--ignore-certificate-errors", actions=actions)
    finally:
        await cutter.close()
    assert [each for each in ran if each["error"]] == []
    assert len(ran) == 5
