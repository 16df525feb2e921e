"""The long connection falls to a WebSocket where TLS of its own does not pass, and climbs back: a real gateway behind a
middlebox."""

import asyncio
import contextlib
import random
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from stormline import AsyncClient, Config
from stormline.core import errors, limits_carriers
from stormline.core.values import Address, Secret
from stormline.dispatch.rules import RuleSet
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.engine.nats import EngineConfig
from stormline.engine.port import Engine, Reply
from stormline.gateway import server
from stormline.gateway.config import GatewayConfig
from stormline.net.clock import SystemClock, SystemRng
from stormline.testing import proxies
from stormline.testing.ranked import ranked
from stormline.testing.world import APP, GATEWAY_NAME, HOST, bundle_for, running_dispatch, wait_until
from stormline.wire.bundle import Bundle
from stormline.wire.plan import Carrier, Endpoint, HostPlan

pytestmark = pytest.mark.loopback


@dataclass
class Middlebox:
    """Carries TCP to the gateway, and knows a ClientHello that offers `sl/1` when it sees one.

    Attributes:
        gateway: where it carries to.
        blocks: what it does to those: `reset`, `silent`, `late` (cut after the handshake); empty lets them pass.
        seen: connections by kind, `sl` or `ws`.
        open: those that stand.
    """

    gateway: Address
    blocks: str = ""
    seen: Counter[str] = field(default_factory=Counter)
    open: Counter[str] = field(default_factory=Counter)
    address: Address = field(default_factory=lambda: Address("", 0))

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await reader.read(65536)
            kind = "sl" if b"\x04sl/1" in hello else "ws"
            self.seen[kind] += 1
            if kind == "sl" and self.blocks == "reset":
                return
            if kind == "sl" and self.blocks == "silent":
                await reader.read()
                return
            there, onward = await asyncio.open_connection(*self.gateway)
            self.open[kind] += 1
            onward.write(hello)
            ways = [self._pipe(reader, onward), self._pipe(there, writer, 1 if kind == "sl" and self.blocks else 0)]
            tasks = [asyncio.ensure_future(each) for each in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self.open[kind] -= 1
            onward.transport.abort()
        except OSError:
            pass
        finally:
            writer.transport.abort()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pieces: int = 0) -> None:
        """Carry one way; with `pieces` only so many, and then nothing more, as one that looks at what follows does."""
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
                pieces -= 1
                if pieces == 0:
                    return


@pytest.fixture(name="place")
async def _place(pki: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Start a gateway with a service, a middlebox before it, and dispatch; give the box and a bundle."""
    monkeypatch.setattr(limits_carriers, "CARRIER_HEAD_START_S", 0.3)
    monkeypatch.setattr(limits_carriers, "CARRIER_CLIMB_FIRST_S", 0.4)
    async with contextlib.AsyncExitStack() as stack:

        async def make(blocks: str, **more: Any) -> tuple[Middlebox, Bundle]:
            broker, stop = MemoryBroker(), asyncio.Event()
            up: asyncio.Future[Address] = asyncio.get_running_loop().create_future()

            async def connect() -> Engine:
                return MemoryEngine(broker)

            async def echo(message: Any) -> Reply:
                return Reply(message.data)

            config = GatewayConfig(
                tls=pki.gateway,
                apps={APP: {pki.token_key.kid: pki.token_key.public_text}},
                engine=EngineConfig(url="nats://127.0.0.1:1", user="nobody", password=Secret("nothing")),
                admin_key=Secret("a-business-key-0123456789"),
                allow_plain_asyncio=True,
            )
            running = server.run(
                config,
                clock=SystemClock(),
                rng=SystemRng(),
                started=lambda gateway, admin: up.set_result(gateway),
                stop=stop,
                connect=connect,
            )
            task = asyncio.create_task(running)

            async def end() -> None:
                stop.set()
                await task

            stack.push_async_callback(end)
            box = Middlebox(await up, blocks)
            await MemoryEngine(broker).serve("rpc.big.echo", echo)
            tasks: set[asyncio.Task[None]] = set()

            def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                tasks.add(each := asyncio.ensure_future(box.carry(reader, writer)))
                each.add_done_callback(tasks.discard)

            listening = await asyncio.start_server(carry, "127.0.0.1", 0)
            stack.callback(listening.close)
            stack.callback(lambda: [each.cancel() for each in tasks])
            box.address = Address(*listening.sockets[0].getsockname()[:2])
            endpoints = ranked(
                Endpoint(host=box.address.host, port=box.address.port, carrier=carrier, server_name=GATEWAY_NAME)
                for carrier in (Carrier.LONG_TLS, Carrier.LONG_WSS)
            )
            rules = RuleSet(
                version=1,
                hosts={HOST: HostPlan(endpoints=endpoints)},
                apps={APP: frozenset({HOST})},
                gateways={APP: endpoints},
                **more,
            )
            address, _ = await stack.enter_async_context(running_dispatch(pki, rules))
            return box, bundle_for(pki, address)

        yield make


def client_of(bundle: Bundle, **change: Any) -> AsyncClient:
    return AsyncClient(config=replace(Config(bundle=bundle, report=False), **change))


async def test_open_network_takes_tls_alone(place):
    box, bundle = await place("")
    async with client_of(bundle) as client, client.channel() as channel:
        assert await channel.call("big.echo", "x") == "x"
    assert box.seen == {"sl": 1}


async def test_carrier_that_the_plan_switches_off_is_not_tried(place):
    box, bundle = await place("", disabled=("sl-tls",))
    async with client_of(bundle) as client, client.channel() as channel:
        assert await channel.call("big.echo", "x") == "x"
    assert box.seen == {"ws": 1}


@pytest.mark.parametrize("blocks", ["reset", "silent", "late"])
async def test_call_does_not_notice_that_tls_is_blocked_and_the_link_climbs_back_when_it_is_not(place, blocks):
    box, bundle = await place(blocks)
    rng = random.Random(blocks)
    async with client_of(bundle) as client, client.channel() as channel:
        assert await channel.call("big.echo", "first", idempotency_key="k") == "first"
        assert (box.open["sl"], box.open["ws"]) == (0, 1)
        await wait_until(lambda: box.seen["sl"] >= 2 + rng.randrange(2))  # tried beside it, in vain
        assert await channel.call("big.echo", "second") == "second"
        assert box.open["ws"] == 1
        box.blocks = ""
        calls = 0
        async with asyncio.timeout(30):
            while (box.open["sl"], box.open["ws"]) != (1, 0):  # calls go on meanwhile, and none fails
                assert await channel.call("big.echo", calls) == calls
                calls += 1
                await asyncio.sleep(rng.random() * 0.05)
        assert await channel.call("big.echo", "third") == "third"
        assert box.open == {"sl": 1, "ws": 0}


async def test_next_start_on_that_network_begins_with_what_passes(place, tmp_path):
    box, bundle = await place("reset")
    async with client_of(bundle, store=tmp_path) as client, client.channel() as channel:
        await channel.call("big.echo", 1)
        await wait_until(lambda: box.seen["sl"] >= 2)
        await channel.call("big.echo", 2)
    seen = box.seen["sl"]
    async with client_of(bundle, store=tmp_path) as client, client.channel() as channel:
        assert await channel.call("big.echo", 3) == 3
        assert box.seen["sl"] == seen


@pytest.mark.skipif(not proxies.installed("tinyproxy"), reason="tinyproxy is not installed")
async def test_websocket_goes_through_an_http_proxy(place, tmp_path):
    box, bundle = await place("reset")
    with proxies.running_tinyproxy(tmp_path) as proxy:
        async with client_of(bundle, proxy=proxy.url) as client, client.channel() as channel:
            assert await channel.call("big.echo", "through") == "through"
        assert box.seen["ws"] == 1
        assert proxy.lines(str(box.address.port))


async def test_retry_after_in_place_of_a_websocket_is_kept(place, pki):
    box, bundle = await place("reset")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pki.gateway)
    context.set_alpn_protocols(["http/1.1"])

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 60\r\ncontent-length: 0\r\n\r\n")
            await reader.read()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0, ssl=context) as busy:
        box.gateway = Address(*busy.sockets[0].getsockname()[:2])
        async with client_of(bundle) as client, client.channel() as channel:
            for _ in range(2):
                with pytest.raises(errors.TransportError) as caught:
                    await channel.call("big.echo", "x", deadline_s=1.0)
                assert caught.value.maybe_delivered is False
            line = client._storm.runtime().longline
            assert line is not None
            assert 50 < line.pause_s() <= 75
            assert not line.stopped
    assert box.seen["ws"] == 1


async def test_nothing_passes_says_why_by_carrier(place):
    box, bundle = await place("")
    box.gateway = Address("127.0.0.1", 1)
    async with client_of(bundle) as client, client.channel() as channel:
        with pytest.raises(errors.TransportError) as caught:
            await channel.call("big.echo", "x", deadline_s=2.0)
        assert caught.value.maybe_delivered is False
    assert box.seen.keys() == {"sl", "ws"}
