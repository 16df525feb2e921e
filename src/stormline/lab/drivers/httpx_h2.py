"""httpx with HTTP/2: one client and so one connection, 5 s for each phase, no retry."""

import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx


@contextlib.asynccontextmanager
async def client(config: dict[str, Any]) -> AsyncIterator[Callable[[str], Awaitable[tuple[int, bytes]]]]:
    """Give a function that makes one request."""
    tls = ssl.create_default_context(cafile=config["ca_file"])
    async with httpx.AsyncClient(verify=tls, http2=True) as http:

        async def get(url: str) -> tuple[int, bytes]:
            answer = await http.get(url)
            return answer.status_code, answer.content

        yield get
