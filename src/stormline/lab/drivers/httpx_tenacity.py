"""httpx with tenacity: up to three attempts, each given a third of the user's patience, on transport errors and 5xx."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import tenacity

ATTEMPTS = 3


class ServerFailed(Exception):
    """The server answered 5xx."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


def kind(error: Exception) -> str:
    """Name what only this driver knows."""
    return "status" if isinstance(error, ServerFailed) else ""


@contextlib.asynccontextmanager
async def client(config: dict[str, Any]) -> AsyncIterator[Callable[[str], Awaitable[tuple[int, bytes]]]]:
    """Give a function that makes one request."""
    tls = ssl.create_default_context(cafile=config["ca_file"])
    attempt_s = config["patience_s"] / ATTEMPTS
    retrying = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_exponential_jitter(initial=0.1, max=1, jitter=0.2),
        retry=tenacity.retry_if_exception_type((httpx.TransportError, TimeoutError, ServerFailed)),
        reraise=True,
    )
    async with httpx.AsyncClient(verify=tls) as http:

        async def attempt(url: str) -> tuple[int, bytes]:
            async with asyncio.timeout(attempt_s):
                answer = await http.get(url)
            if answer.status_code >= 500:
                raise ServerFailed(answer.status_code)
            return answer.status_code, answer.content

        async def get(url: str) -> tuple[int, bytes]:
            answer: tuple[int, bytes] = await retrying.copy()(attempt, url)
            return answer

        yield get
