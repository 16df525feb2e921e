"""Fifty megabytes each way through the long connection: memory stays flat, small calls beside them are answered."""

import asyncio
import gc
import hashlib
import itertools

import psutil
import pytest

from stormline.core import limits
from stormline.wire import events as e

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(180)]

HOST = "api.shop.example"
MEGABYTE = 1024 * 1024
SIZE = 50 * MEGABYTE
PIECE = bytes(range(256)) * (limits.CHUNK_BYTES_MAX // 256)
COUNT = SIZE // len(PIECE)
GROWTH_BYTES = 12 * MEGABYTE
"""Credits, sockets' and HTTP buffers of both sides, and the allocator; a gathered body would be four times that."""
DIGEST = hashlib.sha256(PIECE * COUNT).hexdigest()


class Shop:
    """Gives and takes large bodies, the latter with pauses."""

    def __init__(self):
        self.taken = 0
        self.digest = hashlib.sha256()

    async def __call__(self, scope, receive, send):
        if scope["path"] == "/small":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})
            return
        if scope["method"] == "POST":
            self.digest, self.taken = hashlib.sha256(), 0
            more = True
            while more:
                message = await receive()
                self.digest.update(message.get("body", b""))
                self.taken += len(message.get("body", b""))
                more = message["more_body"]
                if self.taken % (10 * MEGABYTE) < len(message.get("body", b"")):
                    await asyncio.sleep(0.2)  # an upstream that is busy now and then
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(COUNT):
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Watched:
    """The memory of this process while something runs, and small calls beside it."""

    def __init__(self, device):
        self._device = device
        self._tasks = []
        self.answered = 0
        self.growth = 0

    async def __aenter__(self):
        gc.collect()
        self._before = psutil.Process().memory_info().rss
        self._tasks = [asyncio.create_task(self._look()), asyncio.create_task(self._ask())]
        return self

    async def __aexit__(self, *exc):
        for task in self._tasks:
            task.cancel()
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 2

    async def _look(self):
        while True:
            self.growth = max(self.growth, psutil.Process().memory_info().rss - self._before)
            await asyncio.sleep(0.02)

    async def _ask(self):
        while True:
            answer = await self._device.get(f"http://{HOST}/small")
            assert (answer.status, answer.body) == (200, b"ok")
            self.answered += 1


@pytest.fixture(name="shop")
async def _shop(gateway, upstream):
    shop = Shop()
    await gateway.start(api_upstreams={HOST: await upstream(shop)})
    return shop


async def download(device):
    """Read a large answer with pauses, keeping nothing of it."""
    call = device.open("api", "GET", target=f"http://{HOST}/large")
    events, digest, size, paused = device.calls[call], hashlib.sha256(), 0, 0
    while True:
        async with asyncio.timeout(30):
            event = await events.get()
        assert isinstance(event, e.ReplyReceived | e.DataReceived)
        digest.update(event.body)
        size += len(event.body)
        if size // (10 * MEGABYTE) > paused:
            paused += 1
            await asyncio.sleep(0.2)  # a reader that is busy now and then
        device.machine.consume(call, len(event.body))
        device.flush()
        if isinstance(event, e.DataReceived) and event.end:
            del device.calls[call]
            return size, digest.hexdigest()


async def test_fifty_megabytes_down_to_a_slow_reader(gateway, shop):
    device = await gateway.connect()
    await device.get(f"http://{HOST}/small")
    async with Watched(device) as watched:
        assert await download(device) == (SIZE, DIGEST)
    assert watched.growth < GROWTH_BYTES
    assert watched.answered > 20


async def test_fifty_megabytes_up_to_a_slow_upstream(gateway, shop):
    device = await gateway.connect()
    await device.get(f"http://{HOST}/small")
    async with Watched(device) as watched:
        call = device.open("api", "POST", target=f"http://{HOST}/large", more=True)
        uploading = device.upload(call, itertools.repeat(PIECE, COUNT))
        _, answer = await asyncio.gather(uploading, device.answer(call))
    assert (answer.body, shop.taken, shop.digest.hexdigest()) == (b"ok", SIZE, DIGEST)
    assert watched.growth < GROWTH_BYTES
    assert watched.answered > 20
