"""libcurl with a retry loop: up to three attempts, 3 s to connect, 4 s of silence, a fresh connection for retries."""

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pycurl

ATTEMPTS = 3
PAUSE_S = 0.2
"""Before the second attempt; doubled before the third."""
LIMITS = {pycurl.CONNECTTIMEOUT: 3, pycurl.LOW_SPEED_LIMIT: 1, pycurl.LOW_SPEED_TIME: 4}
AGAIN = {**LIMITS, pycurl.FRESH_CONNECT: 1}


def _plain() -> ModuleType:
    """Load the driver beside this one; by its path, as it is named like the library."""
    spec = importlib.util.spec_from_file_location("lab_pycurl", Path(__file__).with_name("pycurl.py"))
    if spec is None or spec.loader is None:
        raise ImportError("pycurl.py is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


plain = _plain()
kind = plain.kind


@contextlib.asynccontextmanager
async def client(config: dict[str, Any]) -> AsyncIterator[Callable[[str], Awaitable[tuple[int, bytes]]]]:
    """Give a function that makes one request."""
    multi = plain.Multi()

    async def attempt(url: str, number: int) -> tuple[int, bytes]:
        answer: tuple[int, bytes] = await plain.transfer(
            multi, url, config["ca_file"], LIMITS if number == 1 else AGAIN
        )
        return answer

    async def get(url: str) -> tuple[int, bytes]:
        for number in range(1, ATTEMPTS):
            with contextlib.suppress(pycurl.error):
                status, body = await attempt(url, number)
                if status < 500:
                    return status, body
            await asyncio.sleep(PAUSE_S * number)
        return await attempt(url, ATTEMPTS)

    try:
        yield get
    finally:
        multi.close()
