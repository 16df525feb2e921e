"""stormline under httpx2. `options`: "disabled", what to do without (means, "h2", "doh", "admission"); "bundle", path
of a bundle; "network", the kind it is told to be on; "doh", servers for DNS over HTTPS: [[URL, [address, ...]], ...];
"plan", preset for all requests; "fresh", each request is an app's first, with a client of its own."""

import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import httpx2

from stormline.client.config import Config, load_bundle
from stormline.client.costs import Costs
from stormline.client.outside import Outside
from stormline.client.rules import BusinessRule
from stormline.client.transport import AsyncTransport
from stormline.lab.drivers import _taken_out
from stormline.lab.namespaces import UPLINKS
from stormline.net.network import NetworkPort, open_port
from stormline.outbound.doh_server import DohServer


def _network(how: str) -> NetworkPort:
    """Watch the network; the laboratory's uplinks are TUN devices, which elsewhere are VPNs."""
    return open_port(how, plain=[each.name for each in UPLINKS])


@contextlib.asynccontextmanager
async def client(config: dict[str, Any]) -> AsyncIterator[Callable[[str], Awaitable[tuple[int, bytes]]]]:
    """Give a function that makes one request."""
    options = config["options"]
    off = frozenset(options.get("disabled", ()))
    off -= _taken_out.take_out(off)
    settings = Config(
        trust_env=False,
        network=options.get("network", "unknown"),
        bundle=load_bundle(options["bundle"]) if options.get("bundle") else None,
        disabled=off - {"h2", "doh", "admission", "second-link"},
        http2="h2" not in off,
        admission="admission" not in off,
        second_path="second-link" not in off,
        deadline_s=config["patience_s"],
        rules=(BusinessRule(plan=options["plan"]),) if options.get("plan") else (),
        doh=() if "doh" in off else tuple(DohServer(url, tuple(ips)) for url, ips in options.get("doh", ())),
    )

    def trust(alpn: Sequence[str]) -> ssl.SSLContext:
        tls = ssl.create_default_context(cafile=config["ca_file"])
        tls.set_alpn_protocols(list(alpn))
        return tls

    timeout = httpx2.Timeout(None, connect=settings.connect_timeout_s, read=settings.read_timeout_s)

    def opened() -> httpx2.AsyncClient:
        transport = AsyncTransport(config=settings, verify=trust, outside=Outside(network=_network))
        _open[:] = [transport]
        return httpx2.AsyncClient(transport=transport, timeout=timeout)

    async def first(url: str) -> tuple[int, bytes]:
        async with opened() as http:
            answer = await http.get(url)
            return answer.status_code, answer.content

    if options.get("fresh"):
        yield first
        return
    async with opened() as http:

        async def get(url: str) -> tuple[int, bytes]:
            answer = await http.get(url)
            return answer.status_code, answer.content

        yield get


_open: list[AsyncTransport] = []


def costs() -> dict[str, int]:
    """Say how many bytes were reckoned for what was made beside attempts, and how often there were none left for it."""
    spent = _open[-1].costs if _open else Costs()
    return {"extra_bytes": spent.extra_bytes, "extras_refused": spent.extras_refused}


def level() -> str:
    """Say what the client takes the network for."""
    return str(_open[-1].quality.level) if _open else "unknown"
