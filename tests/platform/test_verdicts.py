"""From what devices see to what they are told, by itself: every part a real process, the devices real clients."""

import asyncio
import contextlib
import json
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx2
import pytest

from stormline.assembly.authority import ensure_authority
from stormline.assembly.layout import Layout
from stormline.client.api import AsyncClient
from stormline.client.config import Config
from stormline.core import errors
from stormline.net.clock import SystemClock, SystemRng
from stormline.testing.origin import Request, plain, running_origin
from stormline.testing.platform import RunningPlatform, running_platform
from stormline.wire import bundle as wire_bundle

pytestmark = pytest.mark.platform

HOST = "shop.test"
URL = f"https://{HOST}/"
DEVICES = 12
SETTINGS = """
[api.upstreams]
"other.test" = "http://127.0.0.1:9"
"""
LATE_S = 60.0
"""Until the platform has acted; what is promised is some seconds, of a machine that does nothing else."""
ORIGIN_ROLE = "origin"

_log = logging.getLogger("stormline.tests")


@pytest.fixture(scope="module", name="platform")
def _platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlatform]:
    """A platform of its own: these tests change what it answers."""
    state = tmp_path_factory.mktemp("verdicts") / "state"
    state.mkdir(mode=0o700)
    (state / "stormline.toml").write_text(SETTINGS)
    only = (part for role in ("dispatch", "gateway", "apm") for part in ("--only", role))
    with running_platform(state, *only, demo=False) as platform:
        yield platform


@pytest.fixture(scope="module", name="server_tls")
def _server_tls(platform: RunningPlatform) -> ssl.SSLContext:
    """TLS of origins, by the platform's own authority: its probes find them well."""
    ca = ensure_authority(Layout(platform.state).pki, clock=SystemClock(), rng=SystemRng())
    files = ca.issue(ORIGIN_ROLE, names=[HOST])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["http/1.1"])
    return context


class Operator:
    """The admin API of dispatch, as an operator uses it."""

    def __init__(self, platform: RunningPlatform) -> None:
        self._trust = ssl.create_default_context(cafile=platform.admin.ca_file)
        self._address = platform.addresses["dispatch"]
        self._key = platform.admin.admin_key.reveal()

    async def call(self, method: str, path: str, **more: Any) -> Any:
        headers = {"authorization": f"Bearer {self._key}", **more.pop("headers", {})}
        async with httpx2.AsyncClient(verify=self._trust, trust_env=False, timeout=20) as client:
            answer = await client.request(
                method,
                f"https://{self._address}/v1/admin{path}",
                headers=headers,
                extensions={"sni_hostname": "dispatch.stormline.test"},
                **more,
            )
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def rules(self, *ports: int) -> bytes:
        """Give the rules that hold, with the host at these ports; the first has nearly all of the devices."""
        rules = await self.call("GET", "/rules")
        weights = (1000, *(1 for _ in ports))
        rules["hosts"][HOST] = {
            "endpoints": [
                {"host": "127.0.0.1", "port": port, "carrier": "h1", "weight": weight}
                for port, weight in zip(ports, weights, strict=False)
            ]
        }
        rules["apps"]["demo"] = sorted({*rules["apps"]["demo"], HOST})
        return json.dumps(rules).encode()

    async def publish(self, *ports: int) -> int:
        order = {"content": await self.rules(*ports), "params": {"who": "ann"}, "headers": {"if-match": "*"}}
        return int((await self.call("PUT", "/rules", **order))["version"])

    async def log(self) -> list[dict[str, Any]]:
        return list((await self.call("GET", "/rules/history"))["log"])


class Fleet:
    """Devices that each ask the host again and again."""

    def __init__(self, clients: list[AsyncClient]) -> None:
        self.clients = clients
        self.statuses: list[int] = []

    async def ask(self) -> list[int]:
        """Have each ask once; 0 stands for no answer."""

        async def one(client: AsyncClient) -> int:
            try:
                return (await client.get(URL)).status_code
            except errors.TransportError:
                return 0

        self.statuses = list(await asyncio.gather(*map(one, self.clients)))
        return self.statuses

    async def ask_until(self, done: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(LATE_S):
            while not await done():
                await self.ask()

    def plan_versions(self) -> set[int]:
        plans = [client._storm.runtime().scheduling.plan for client in self.clients]
        return {plan.version for plan in plans if plan is not None}

    def ports(self) -> set[int]:
        plans = [client._storm.runtime().scheduling.plan for client in self.clients]
        return {each.port for plan in plans if plan is not None for each in plan.hosts[HOST].endpoints}


@contextlib.asynccontextmanager
async def fleet(platform: RunningPlatform) -> AsyncIterator[Fleet]:
    """Give devices that hold their long connection, by which they are told of changed plans."""
    bundle = wire_bundle.decode((platform.state / "bundle.json").read_bytes())
    trust = ssl.create_default_context(cadata=bundle.ca_pem)
    async with contextlib.AsyncExitStack() as stack:
        clients = [AsyncClient(config=Config(bundle=bundle), verify=trust) for _ in range(DEVICES)]
        for client in clients:
            await stack.enter_async_context(client)
            await stack.enter_async_context(client.channel())
        yield Fleet(clients)


async def test_roll_out_that_fails_more_calls_is_halted_and_every_device_gets_back_what_held(platform, server_tls):
    """The new rules lead to a server that answers 500."""

    async def broken(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(b"oops", "500 Internal Server Error"))

    operator = Operator(platform)
    async with running_origin(ssl=server_tls) as good, running_origin(broken, ssl=server_tls) as bad:
        before = await operator.publish(good.address.port)
        async with fleet(platform) as devices:
            assert await devices.ask() == [200] * DEVICES
            started = await operator.call(
                "POST",
                "/rollout",
                content=await operator.rules(bad.address.port),
                params={"who": "ann", "steps": "50"},
                headers={"if-match": "*"},
            )
            candidate = started["rollout"]["version"]

            async def halted() -> bool:
                return (await operator.log())[0]["what"] == "rollout-halt"

            began = SystemClock().monotonic()
            await devices.ask_until(halted)
            found_s = SystemClock().monotonic() - began
            line = (await operator.log())[0]
            assert (line["who"], line["version"]) == ("guard", candidate + 1)
            assert "0.00 %" in line["why"]

            async def recovered() -> bool:
                return devices.plan_versions() == {candidate + 1} and devices.statuses == [200] * DEVICES

            await devices.ask_until(recovered)
            told_s = SystemClock().monotonic() - began
            _log.info("halted %.1f s after the start, all devices back after %.1f s", found_s, told_s)
            assert bad.requests, "nobody had the new rules"
            assert devices.ports() == {good.address.port}
        assert (await operator.call("GET", "/status"))["version"] > before


async def test_address_that_fails_for_many_devices_is_drained_and_all_of_them_told(platform, server_tls):
    """A server that shakes hands, so that no probe finds it ill, and then ends each connection without an answer."""

    async def mute(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.close()

    operator = Operator(platform)
    async with running_origin(ssl=server_tls) as good, running_origin(mute, ssl=server_tls) as bad:
        await operator.publish(bad.address.port, good.address.port)
        async with fleet(platform) as devices:

            async def drained() -> bool:
                return (await operator.log())[0]["what"] == "drain"

            began = SystemClock().monotonic()
            await devices.ask_until(drained)
            found_s = SystemClock().monotonic() - began
            line = (await operator.log())[0]
            assert (line["who"], line["detail"]) == ("apm", f"127.0.0.1:{bad.address.port}")

            async def told() -> bool:
                return devices.ports() == {good.address.port}

            await devices.ask_until(told)
            told_s = SystemClock().monotonic() - began
            _log.info("drained %.1f s after the first failure, all devices told after %.1f s", found_s, told_s)
            served = len(bad.requests)
            assert await devices.ask() == [200] * DEVICES
            assert len(bad.requests) == served
        order = {"who": "ann", "why": "it is well", "host": "127.0.0.1", "port": bad.address.port}
        assert (await operator.call("POST", "/drains/end", json=order))["drains"] == []
