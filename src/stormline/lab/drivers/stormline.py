"""stormline under httpx2. `options`: "disabled", names of means never to use; "bundle", path of a client bundle."""

import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2

from stormline.client.config import Config, load_bundle
from stormline.client.transport import AsyncTransport


@contextlib.asynccontextmanager
async def client(config: dict[str, Any]) -> AsyncIterator[Callable[[str], Awaitable[tuple[int, bytes]]]]:
    """Give a function that makes one request."""
    options = config["options"]
    settings = Config(
        bundle=load_bundle(options["bundle"]) if options.get("bundle") else None,
        disabled=frozenset(options.get("disabled", ())),
        deadline_s=config["patience_s"],
    )
    tls = ssl.create_default_context(cafile=config["ca_file"])
    transport = AsyncTransport(config=settings, verify=tls)
    timeout = httpx2.Timeout(None, connect=settings.connect_timeout_s, read=settings.read_timeout_s)
    async with httpx2.AsyncClient(transport=transport, timeout=timeout) as http:

        async def get(url: str) -> tuple[int, bytes]:
            answer = await http.get(url)
            return answer.status_code, answer.content

        yield get
