"""Platforms and origins for the client's tests, and what they share."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from stormline.client import recorder
from stormline.client.api import AsyncClient
from stormline.client.channel import Channel
from stormline.client.config import Config
from stormline.client.outside import Outside
from stormline.core import limits, limits_carriers
from stormline.core.values import Address, Secret
from stormline.dispatch.rules import RuleSet
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.engine.nats import EngineConfig
from stormline.engine.port import Engine
from stormline.gateway import server
from stormline.gateway.config import GatewayConfig
from stormline.net.clock import SystemClock, SystemRng
from stormline.telemetry.timeline import CallRecord
from stormline.testing.origin import Answer, Origin, answer_plainly, running_origin
from stormline.testing.ranked import ranked
from stormline.testing.world import APP, Pki, World, bundle_for, make_pki, rules_for, running_dispatch, running_world
from stormline.wire import tokens
from stormline.wire.bundle import Bundle
from stormline.wire.plan import Carrier, Endpoint, HostPlan


@pytest.fixture(scope="session", name="pki")
def _pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(name="world")
async def _world(pki: Pki) -> AsyncIterator[Callable[..., Awaitable[World]]]:
    """Make worlds: `await world(script, ...)`."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(*scripts, **rules):
            return await stack.enter_async_context(running_world(pki, *scripts, **rules))

        yield make


@pytest.fixture(name="origin")
async def _origin() -> AsyncIterator[Callable[..., Awaitable[Origin]]]:
    """Make origins: `await origin(answer)`."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(answer: Answer = answer_plainly, **options) -> Origin:
            return await stack.enter_async_context(running_origin(answer, **options))

        yield make


@pytest.fixture(name="records")
def _records(monkeypatch: pytest.MonkeyPatch) -> list[CallRecord]:
    """Catch every record that would be reported; ask for `report=True` in the client."""
    taken: list[CallRecord] = []
    monkeypatch.setattr(recorder.Recorder, "add", lambda self, record: taken.append(record))
    return taken


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Come back soon: the spans are policy's, and its own tests hold them."""
    monkeypatch.setattr(limits, "RECONNECT_FIRST_S", 0.05)
    monkeypatch.setattr(limits_carriers, "RETURN_SPREAD_MIN_S", 0.05)
    monkeypatch.setattr(limits, "PLAN_RETRY_S", 0.2)


@pytest.fixture(name="all_logs")
def _all_logs(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Capture every log at DEBUG."""
    caplog.set_level(logging.DEBUG)
    return caplog


@pytest.fixture(name="trust")
def _trust(pki: Pki) -> Callable[..., ssl.SSLContext]:
    """Make a caller's own trust: the test's authority, TLS 1.2 and up; offers what it is given."""

    def make(*alpn: str) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=pki.ca.ca_pem)
        context.set_alpn_protocols(list(alpn or ("h2", "http/1.1")))
        return context

    return make


class _Names:
    """A resolver that knows what a test tells it: by `name:port`, else by name."""

    def __init__(self, places: dict[str, tuple[Address, ...]]) -> None:
        self._places = places

    async def resolve(self, host: str, port: int, **options: object) -> tuple[Address, ...]:
        if Address(host, port).is_ip:
            return (Address(host, port),)
        found = self._places.get(f"{host}:{port}") or self._places.get(host)
        if found is None:
            raise socket.gaierror(socket.EAI_NONAME, "no such name in this test")
        return found

    def doubt(self, host: str) -> None:
        """Nothing to doubt."""

    def close(self) -> None:
        """Nothing to close."""


@pytest.fixture(name="names")
def _names() -> Callable[..., Outside]:
    """Make machines whose DNS is a table: `names({"a.test": address})`."""

    def make(places: dict[str, Address | tuple[Address, ...]]) -> Outside:
        table = {name: (place,) if isinstance(place, Address) else place for name, place in places.items()}
        return Outside(resolver=lambda: _Names(table))

    return make


@pytest.fixture(name="planned")
async def _planned(pki: Pki) -> AsyncIterator[Callable[..., Awaitable[Bundle]]]:
    """Make dispatches: `await planned({"a.test": (endpoint, ...)})` gives a bundle that names one."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(hosts: dict[str, tuple[Endpoint, ...]], **bundle: object) -> Bundle:
            gateways = dict.fromkeys(each for places in hosts.values() for each in places)
            rules = RuleSet(
                version=1,
                hosts={host: HostPlan(endpoints=ranked(places)) for host, places in hosts.items()},
                apps={APP: frozenset(hosts)},
                gateways={APP: ranked(each for each in gateways if each.carrier == Carrier.LONG_TLS)},
            )
            address, _ = await stack.enter_async_context(running_dispatch(pki, rules))
            return bundle_for(pki, address, **bundle)

        yield make


class Gated:
    """A real gateway, and clients of it."""

    def __init__(self, pki: Pki, bundle: Bundle) -> None:
        self.pki, self.bundle = pki, bundle

    def client(self, device: str = "d1", user: str = "ann", **change: Any) -> AsyncClient:
        now, key = int(SystemClock().wall()), self.pki.token_key
        claims = tokens.DeviceToken(app=APP, device=device, user=user, iat=now, exp=now + 600)
        token = Secret(tokens.mint(claims, key=key.key, kid=key.kid))
        return AsyncClient(config=Config(bundle=self.bundle, token=token, report=False, **change))

    @contextlib.asynccontextmanager
    async def channel(self, device: str = "d1", user: str = "ann", **change: Any) -> AsyncIterator[Channel]:
        async with self.client(device, user, **change) as client, client.channel() as channel:
            await channel.wait_connected()
            yield channel


@pytest.fixture(name="gated")
async def _gated(pki: Pki) -> AsyncIterator[Callable[..., Awaitable[Gated]]]:
    """Make real gateways: `await gated(api_upstreams=...)`."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(**change: Any) -> Gated:
            key, broker = pki.token_key, MemoryBroker()
            up: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
            stop = asyncio.Event()
            config = GatewayConfig(
                tls=pki.gateway,
                apps={APP: {key.kid: key.public_text}},
                engine=EngineConfig(url="nats://127.0.0.1:1", user="nobody", password=Secret("nothing")),
                admin_key=Secret("a-business-key-0123456789"),
                allow_plain_asyncio=True,
                **change,
            )

            async def memory() -> Engine:
                return MemoryEngine(broker)

            task = asyncio.create_task(
                server.run(
                    config,
                    clock=SystemClock(),
                    rng=SystemRng(),
                    started=lambda address, admin: up.set_result(address),
                    stop=stop,
                    connect=memory,
                )
            )

            async def end() -> None:
                stop.set()
                await task

            stack.push_async_callback(end)
            await asyncio.wait([task, up], return_when=asyncio.FIRST_COMPLETED)
            dispatch, _ = await stack.enter_async_context(running_dispatch(pki, rules_for(await up)))
            return Gated(pki, bundle_for(pki, dispatch))

        yield make
