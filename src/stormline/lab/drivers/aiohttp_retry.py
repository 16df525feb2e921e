"""aiohttp with a retry loop: up to three attempts, 3 s to connect, 4 s of silence, on client errors and 5xx."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp

ATTEMPTS = 3
CONNECT_S = 3.0
SILENCE_S = 4.0
PAUSE_S = 0.2
"""Before the second attempt; doubled before the third."""


@contextlib.asynccontextmanager
async def client(config: dict[str, Any]) -> AsyncIterator[Callable[[str], Awaitable[tuple[int, bytes]]]]:
    """Give a function that makes one request."""
    tls = ssl.create_default_context(cafile=config["ca_file"])
    timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_connect=CONNECT_S, sock_read=SILENCE_S)
    connector = aiohttp.TCPConnector(ssl=tls)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def attempt(url: str) -> tuple[int, bytes]:
            async with session.get(url) as answer:
                return answer.status, await answer.read()

        async def get(url: str) -> tuple[int, bytes]:
            for number in range(1, ATTEMPTS):
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    status, body = await attempt(url)
                    if status < 500:
                        return status, body
                await asyncio.sleep(PAUSE_S * number)
            return await attempt(url)

        yield get
