"""stormline under httpx2. `options`: "disabled", what to do without (means, "h2"); "bundle", path of a bundle."""

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
    off = frozenset(options.get("disabled", ()))
    settings = Config(
        trust_env=False,
        bundle=load_bundle(options["bundle"]) if options.get("bundle") else None,
        disabled=off - {"h2"},
        http2="h2" not in off,
        deadline_s=config["patience_s"],
    )
    tls = ssl.create_default_context(cafile=config["ca_file"])
    tls.set_alpn_protocols(["h2", "http/1.1"] if settings.http2 else ["http/1.1"])  # a context given rules alone
    transport = AsyncTransport(config=settings, verify=tls)
    timeout = httpx2.Timeout(None, connect=settings.connect_timeout_s, read=settings.read_timeout_s)
    async with httpx2.AsyncClient(transport=transport, timeout=timeout) as http:

        async def get(url: str) -> tuple[int, bytes]:
            answer = await http.get(url)
            return answer.status_code, answer.content

        yield get
