"""niquests with happy eyeballs: up to three attempts, 3 s to connect, 4 s to read, on its errors and 5xx."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import niquests

ATTEMPTS = 3
CONNECT_S = 3.0
READ_S = 4.0
PAUSE_S = 0.2
"""Before the second attempt; doubled before the third."""


@contextlib.asynccontextmanager
async def client(config: dict[str, Any]) -> AsyncIterator[Callable[[str], Awaitable[tuple[int, bytes]]]]:
    """Give a function that makes one request."""
    async with niquests.AsyncSession(happy_eyeballs=True) as session:

        async def attempt(url: str) -> tuple[int, bytes]:
            # The session's own `verify` is not looked at by its asynchronous half (3.21).
            answer = await session.get(url, timeout=(CONNECT_S, READ_S), verify=config["ca_file"])
            return answer.status_code or 0, answer.content or b""

        async def get(url: str) -> tuple[int, bytes]:
            for number in range(1, ATTEMPTS):
                with contextlib.suppress(niquests.RequestException):
                    status, body = await attempt(url)
                    if status < 500:
                        return status, body
                await asyncio.sleep(PAUSE_S * number)
            return await attempt(url)

        yield get
