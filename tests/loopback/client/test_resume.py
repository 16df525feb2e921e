"""Real clients, real gateways, and wires between them that are cut: the session goes on, and nothing happens twice."""

import asyncio
import contextlib
import json
import random
from collections import Counter

import httpx2
import pytest

from stormline.appgw.protocols import Limits
from stormline.client.api import AsyncClient
from stormline.client.config import Config
from stormline.core import errors
from stormline.core.codes import Code
from stormline.core.values import Address, Secret
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.engine.nats import EngineConfig
from stormline.engine.port import Reply
from stormline.gateway import server
from stormline.gateway.config import GatewayConfig
from stormline.net.clock import SystemClock, SystemRng
from stormline.testing.world import APP, bundle_for, rules_for, running_dispatch, wait_until
from stormline.wire import tokens

pytestmark = pytest.mark.loopback

ADMIN_KEY = "a-business-key-0123456789"


class Wire:
    """A TCP relay before a gateway, that can be cut."""

    def __init__(self, target):
        self.target = target
        self.address = Address("", 0)
        self.up = True
        self.made = 0
        self._pairs = set()
        self._tasks = set()

    async def start(self):
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = Address(*self._server.sockets[0].getsockname()[:2])
        return self

    def cut(self):
        """Break every connection; what is under way is lost."""
        for writers in self._pairs:
            for writer in writers:
                writer.transport.abort()

    async def stop(self):
        self._server.close()
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _connected(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        if not self.up:
            writer.transport.abort()
            return
        self.made += 1
        inner_reader, inner_writer = await asyncio.open_connection(*self.target)
        pair = (writer, inner_writer)
        self._pairs.add(pair)
        try:
            await asyncio.gather(self._pump(reader, inner_writer), self._pump(inner_reader, writer))
        finally:
            self._pairs.discard(pair)
            for each in pair:
                each.transport.abort()

    async def _pump(self, reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(4096):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


class Echo:
    """An own protocol that sends back what comes."""

    name = "echo"
    limits = Limits(messages_per_s=1e6, burst=1000, message_bytes=100_000)

    async def opened(self, stream):
        pass

    async def message(self, stream, message):
        await stream.send(message)

    async def closed(self, stream):
        pass


class Platform:
    """Gateways of one unit, each behind a wire, and a service that counts."""

    def __init__(self, pki, stack):
        self.pki, self.stack = pki, stack
        self.broker = MemoryBroker()
        self.worked = Counter()
        self.echo = Echo()
        self.cut_at = set()
        self.go = asyncio.Event()
        self.wires, self.admins, self.stops, self.tasks = [], [], [], []

    async def start(self, gateways):
        service = MemoryEngine(self.broker)
        self.stack.push_async_callback(service.close)
        await service.serve("rpc.orders.create", self._work)
        await service.serve("rpc.orders.slow", self._work_slowly)
        for number in range(gateways):
            await self._gateway(f"n{number + 1}")
        rules = rules_for(*(wire.address for wire in self.wires))
        dispatch, _ = await self.stack.enter_async_context(running_dispatch(self.pki, rules))
        self.bundle = bundle_for(self.pki, dispatch)
        return self

    async def _work(self, message):
        asked = json.loads(message.data)
        self.worked[asked["n"]] += 1
        if asked["n"] in self.cut_at:
            self.cut()  # the work is done, and its answer has not left
        return Reply(json.dumps({"n": asked["n"], "fill": asked["fill"]}).encode())

    async def _work_slowly(self, message):
        self.worked[json.loads(message.data)["n"]] += 1
        await self.go.wait()
        return Reply(b'"done"')

    async def _gateway(self, node):
        key = self.pki.token_key
        config = GatewayConfig(
            tls=self.pki.gateway,
            node=node,
            apps={APP: {key.kid: key.public_text}},
            engine=EngineConfig(url="nats://127.0.0.1:1", user="nobody", password=Secret("nothing")),
            admin_key=Secret(ADMIN_KEY),
            protocols=(self.echo,),
            allow_plain_asyncio=True,
        )
        up = asyncio.get_running_loop().create_future()

        async def memory():
            return MemoryEngine(self.broker)

        stop = asyncio.Event()
        task = asyncio.create_task(
            server.run(
                config,
                clock=SystemClock(),
                rng=SystemRng(),
                started=lambda address, admin: up.set_result((address, admin)),
                stop=stop,
                connect=memory,
            )
        )
        address, admin = await up
        wire = await Wire(address).start()
        self.wires.append(wire)
        self.stops.append(stop)
        self.tasks.append(task)
        self.admins.append(
            httpx2.AsyncClient(base_url=f"http://{admin}", headers={"authorization": f"Bearer {ADMIN_KEY}"})
        )

        async def end():
            await self.admins[self.wires.index(wire)].aclose()
            await wire.stop()
            stop.set()
            await task

        self.stack.push_async_callback(end)

    def cut(self):
        for wire in self.wires:
            wire.cut()

    def token(self, device):
        now, key = int(SystemClock().wall()), self.pki.token_key
        claims = tokens.DeviceToken(app=APP, device=device, iat=now, exp=now + 600)
        return Secret(tokens.mint(claims, key=key.key, kid=key.kid))

    def client(self, **change):
        return AsyncClient(config=Config(bundle=self.bundle, report=False, **change))


@pytest.fixture(name="platform")
async def _platform(pki):
    async with contextlib.AsyncExitStack() as stack:

        async def make(gateways=1):
            return await Platform(pki, stack).start(gateways)

        yield make


async def test_call_whose_connection_is_cut_is_answered_and_its_work_done_once(platform):
    here = await platform()
    async with here.client() as client, client.channel() as channel:
        session = (await channel.wait_connected()).session
        call = asyncio.create_task(channel.call("orders.slow", {"n": 1}))
        await wait_until(lambda: here.worked[1])
        here.cut()
        here.go.set()
        assert await call == "done"
        assert channel.session.session == session
        assert channel.session.resumed
    assert here.worked == {1: 1}


async def test_writes_over_a_wire_that_is_cut_again_and_again_each_happen_once(platform):
    here = await platform()
    chance = random.Random(7)
    async with here.client() as client, client.channel() as channel:
        await channel.wait_connected()

        async def write(number):
            fill = "x" * chance.choice([10, 1000, 100_000])
            answer = await channel.call("orders.create", {"n": number, "fill": fill}, deadline_s=60.0)
            assert answer == {"n": number, "fill": fill}

        here.cut_at = {number for number in range(60) if number % 10 in (2, 5)}
        for begin in range(0, 60, 10):
            await asyncio.gather(*(write(number) for number in range(begin, begin + 10)))
    assert here.worked == dict.fromkeys(range(60), 1)
    assert here.wires[0].made > 3


async def test_messages_of_an_own_protocol_over_a_wire_that_is_cut_come_once_and_in_order(platform):
    here = await platform()
    chance = random.Random(3)
    sent = [b"%d " % number + bytes(chance.choice([1, 1000, 50_000])) for number in range(120)]
    async with here.client() as client, client.channel() as channel:
        await channel.wait_connected()
        async with channel.protocol("echo") as stream:

            async def send():
                for message in sent:
                    await stream.send(message)

            sending = asyncio.create_task(send())
            for number, message in enumerate(sent):
                assert await stream.receive() == message
                if number % 25 == 10:
                    here.cut()
            await sending
    assert here.wires[0].made > 3


async def test_session_goes_on_at_another_gateway_when_its_own_cannot_be_reached(platform):
    here = await platform(gateways=2)
    async with here.client(connect_timeout_s=1.0) as client, client.channel() as channel:
        session = (await channel.wait_connected()).session
        call = asyncio.create_task(channel.call("orders.slow", {"n": 1}))
        await wait_until(lambda: here.worked[1])
        used = next(wire for wire in here.wires if wire.made)
        used.up = False
        used.cut()
        here.go.set()
        assert await call == "done"
        assert (channel.session.session, channel.session.resumed) == (session, True)
    assert here.worked == {1: 1}


async def test_push_to_a_client_that_is_away_for_a_moment_is_acknowledged(platform):
    here = await platform()
    async with here.client() as client, client.channel() as channel:
        device = (await channel.wait_connected()).device

        async def read():
            async for push in channel.pushes():
                push.ack()
                return push.json()

        reading = asyncio.create_task(read())
        here.cut()
        answer = await here.admins[0].post("/v1/push", json={"device": device, "body": 7})
        assert answer.json()["state"] == "acked"
        assert await reading == 7


async def test_gateway_that_stops_ends_its_calls_with_the_truth_and_the_client_goes_elsewhere(platform):
    here = await platform(gateways=2)
    async with here.client() as client, client.channel() as channel:
        await channel.wait_connected()
        used = next(number for number, wire in enumerate(here.wires) if wire.made)
        call = asyncio.create_task(channel.call("orders.slow", {"n": 1}))
        await wait_until(lambda: here.worked[1])
        here.stops[used].set()
        with pytest.raises(errors.StormlineError) as lost:
            await call
        assert lost.value.maybe_delivered
        assert (await channel.call("orders.create", {"n": 2, "fill": ""}))["n"] == 2
    assert here.worked == {1: 1, 2: 1}


async def test_second_client_of_a_device_takes_over_once_and_the_first_stays_away(platform):
    here = await platform()
    token = here.token("twin")
    async with here.client(token=token) as first, first.channel() as channel:
        await channel.wait_connected()
        async with here.client(token=token) as second, second.channel() as other:
            session = (await other.wait_connected()).session
            with pytest.raises(errors.RefusedError) as refused:
                async for _ in channel.pushes():
                    pass
            assert refused.value.code == Code.REPLACED
            here.cut()
            await other.call("orders.create", {"n": 1, "fill": ""})
            assert other.session.session == session
            with pytest.raises(errors.RefusedError):
                await channel.call("orders.create", {"n": 2, "fill": ""})
    assert here.worked == {1: 1}


async def test_revoked_device_is_told_to_stay_away_also_while_its_session_waits(platform):
    here = await platform()
    async with here.client() as client, client.channel() as channel:
        device = (await channel.wait_connected()).device
        here.wires[0].up = False
        here.cut()
        answer = await here.admins[0].post("/v1/revocations", json={"device": device})
        assert answer.json() == {"ended": 1}
        here.wires[0].up = True
        assert not (await channel.call("orders.create", {"n": 1, "fill": ""}))["fill"]
        assert (await here.admins[0].post("/v1/revocations", json={"device": device})).json() == {"ended": 1}
        with pytest.raises(errors.RefusedError) as refused:
            async for _ in channel.pushes():
                pass
        assert refused.value.code == Code.REVOKED
        with pytest.raises(errors.RefusedError):
            await channel.call("orders.create", {"n": 2, "fill": ""})
        assert (await here.admins[0].post("/v1/revocations", json={})).status_code == 400


async def test_session_moves_to_another_connection_under_its_calls(platform):
    here = await platform()
    async with here.client() as client, client.channel() as channel:
        await channel.wait_connected()
        call = asyncio.create_task(channel.call("orders.slow", {"n": 1}))
        await wait_until(lambda: here.worked[1])
        await channel._longline.move()
        assert channel.session.resumed
        here.go.set()
        assert await call == "done"
    assert here.worked == {1: 1}
    assert here.wires[0].made == 2
