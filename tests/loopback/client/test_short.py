"""Short HTTP: a whole session through middleboxes that speak HTTP/1.0 and nothing else, cut anywhere; and beside a long
connection that stalls."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import socket
import ssl
from collections import Counter
from dataclasses import replace

import httpx2
import pytest

from stormline import AsyncClient, Config
from stormline.core import errors, limits_carriers, limits_heartbeat, limits_platform
from stormline.core.values import Address, Secret
from stormline.dispatch.rules import RuleSet
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.engine.nats import EngineConfig
from stormline.engine.port import Reply
from stormline.gateway import server
from stormline.gateway.config import GatewayConfig
from stormline.gateway.listener import Door, Listener
from stormline.gateway.short import Channels
from stormline.net.clock import SystemClock, SystemRng
from stormline.testing import foreign
from stormline.testing.http10 import http10_box
from stormline.testing.ranked import ranked
from stormline.testing.world import APP, GATEWAY_NAME, HOST, bundle_for, running_dispatch, wait_until
from stormline.wire import events as e
from stormline.wire import messages as m
from stormline.wire.connection import Connection
from stormline.wire.plan import Carrier, Endpoint, HostPlan
from stormline.wire.states import Role

pytestmark = pytest.mark.loopback

NGINX = """
daemon off;
pid {folder}/nginx.pid;
events {{ worker_connections 256; }}
http {{
    log_format asked '$request $status';
    access_log {folder}/access.log asked;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port} ssl;
        ssl_protocols TLSv1.2 TLSv1.3;
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        location / {{ proxy_pass http://{upstream}; proxy_http_version 1.0; }}
    }}
}}
"""
"""A front that knows HTTP/1.0 towards what it stands before, and hangs up after each answer."""
ADMIN_KEY = "a-business-key-0123456789"
LONG = (Carrier.LONG_TLS, Carrier.LONG_WSS, Carrier.SHORT)


def free_address() -> Address:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return Address(*sock.getsockname()[:2])


class Unit:
    """Gateways of one unit, each with a door without TLS, and services that count what they do."""

    def __init__(self, pki, stack):
        self.pki, self.stack = pki, stack
        self.broker = MemoryBroker()
        self.worked = Counter()
        self.asked = Counter()
        self.go = asyncio.Event()
        self.gateways, self.doors, self.admins, self.stops = [], [], [], []

    async def start(self, gateways=1):
        service = MemoryEngine(self.broker)
        self.stack.push_async_callback(service.close)
        await service.serve("rpc.big.echo", self._echo)
        await service.serve("rpc.orders.create", self._work)
        await service.serve("rpc.orders.slow", self._work_slowly)
        upstream = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.upstream = "http://{}:{}".format(*upstream.sockets[0].getsockname()[:2])
        self.stack.callback(upstream.close)
        for number in range(gateways):
            await self._gateway(f"n{number + 1}")
        return self

    async def _serve(self, reader, writer):
        """Be the API behind the gateway: count what is asked, and give it back."""
        with contextlib.suppress(OSError, EOFError):
            head = await reader.readuntil(b"\r\n\r\n")
            asked = head.partition(b" HTTP/")[0].decode()
            self.asked[asked] += 1
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(asked))
            writer.write(asked.encode())
            await writer.drain()
        writer.close()

    async def _echo(self, message):
        return Reply(message.data)

    async def _work(self, message):
        self.worked[json.loads(message.data)["n"]] += 1
        return Reply(message.data)

    async def _work_slowly(self, message):
        self.worked[json.loads(message.data)["n"]] += 1
        await self.go.wait()
        return Reply(b'"done"')

    async def _gateway(self, node):
        door = free_address()
        key = self.pki.token_key
        config = GatewayConfig(
            tls=self.pki.gateway,
            node=node,
            apps={APP: {key.kid: key.public_text}},
            engine=EngineConfig(url="nats://127.0.0.1:1", user="nobody", password=Secret("nothing")),
            admin_key=Secret(ADMIN_KEY),
            allow_plain_asyncio=True,
            plain=(door,),
            api_upstreams={HOST: self.upstream},
        )
        up, stop = asyncio.get_running_loop().create_future(), asyncio.Event()

        async def memory():
            return MemoryEngine(self.broker)

        running = server.run(
            config,
            clock=SystemClock(),
            rng=SystemRng(),
            started=lambda address, admin: up.set_result((address, admin)),
            stop=stop,
            connect=memory,
        )
        task = asyncio.create_task(running)
        address, admin = await up
        self.gateways.append(address)
        self.doors.append(door)
        self.stops.append(stop)
        asking = httpx2.AsyncClient(
            base_url=f"http://{admin}", headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=60
        )
        self.admins.append(asking)

        async def end():
            await asking.aclose()
            stop.set()
            await task

        self.stack.push_async_callback(end)

    async def bundle(self, places):
        """Start dispatch and give a bundle; `places` are carriers with the address each is at."""
        endpoints = ranked(
            Endpoint(host=at.host, port=at.port, carrier=carrier, server_name=GATEWAY_NAME) for carrier, at in places
        )
        rules = RuleSet(
            version=1,
            hosts={HOST: HostPlan(endpoints=endpoints)},
            apps={APP: frozenset({HOST})},
            gateways={APP: endpoints},
        )
        dispatch, _ = await self.stack.enter_async_context(running_dispatch(self.pki, rules))
        return bundle_for(self.pki, dispatch)

    async def box(self):
        return await self.stack.enter_async_context(http10_box(self.doors, self.pki.gateway))


def client_of(bundle, **change):
    return AsyncClient(config=replace(Config(bundle=bundle, report=False), **change))


@pytest.fixture(name="unit")
async def _unit(pki):
    async with contextlib.AsyncExitStack() as stack:

        async def make(gateways=1):
            return await Unit(pki, stack).start(gateways)

        yield make


@pytest.fixture(name="short_only")
async def _short_only(unit):
    """Give a unit, a box before it, and a bundle by which all carriers go through the box."""
    here = await unit()
    box = await here.box()
    return here, box, await here.bundle([(carrier, box.address) for carrier in LONG])


async def test_where_only_http_1_0_passes_the_session_goes_by_short_http(short_only):
    here, box, bundle = short_only
    async with client_of(bundle) as client, client.channel() as channel:
        welcome = await channel.wait_connected()
        assert await channel.call("big.echo", "x") == "x"
        assert channel._longline.link.carrier == "sl-short"
        body = "y" * 700_000
        assert await channel.call("big.echo", body) == body  # more than the credit, both ways
        answers = await asyncio.gather(*(channel.call("big.echo", number) for number in range(30)))
        assert answers == list(range(30))
        assert channel.session.session == welcome.session
    assert (await here.admins[0].get("/v1/sessions")).json()["count"] == 0  # its last word left too
    assert box.requests["POST"] > 4


async def test_pushes_come_once_each(short_only):
    here, box, bundle = short_only
    async with client_of(bundle) as client, client.channel() as channel:
        device = (await channel.wait_connected()).device
        box.cuts = itertools.cycle(["", "after", "", "", "middle", "", "", "before", ""])
        seen = []

        async def read():
            async for push in channel.pushes():
                push.ack()
                seen.append(push.json())

        reading = asyncio.create_task(read())
        for number in range(12):
            answer = await here.admins[0].post("/v1/push", json={"device": device, "body": number})
            assert answer.json()["state"] == "acked"
        reading.cancel()
        await asyncio.wait([reading])
        assert seen == list(range(12))


@pytest.mark.parametrize("seed", range(3))
async def test_writes_through_exchanges_that_break_anywhere_each_happen_once(short_only, seed):
    here, box, bundle = short_only
    chance = random.Random(seed)
    async with client_of(bundle) as client, client.channel() as channel:
        await channel.wait_connected()
        box.cuts = iter(chance.choices(["", "before", "after", "middle"], [9, 1, 1, 1], k=10_000))

        async def write(number):
            asked = {"n": number, "fill": "x" * chance.choice([10, 1000, 100_000])}
            assert await channel.call("orders.create", asked, deadline_s=60.0) == asked

        for begin in range(0, 40, 10):
            await asyncio.gather(*(write(number) for number in range(begin, begin + 10)))
    assert here.worked == dict.fromkeys(range(40), 1)


@pytest.fixture(name="hopping")
async def _hopping(unit, monkeypatch):
    """Give two nodes behind a box that brings each exchange to the other one than the one before."""
    monkeypatch.setattr(limits_platform, "HANDOVER_CALLS_S", 0.05)  # who hands over with a call ends it
    here = await unit(gateways=2)
    box = await here.box()
    return here, box, await here.bundle([(Carrier.SHORT, box.address)])


async def test_exchange_that_comes_to_another_node_is_passed_on_and_no_call_suffers(hopping):
    here, box, bundle = hopping
    async with client_of(bundle) as client, client.channel() as channel:
        session = (await channel.wait_connected()).session
        slow = asyncio.create_task(channel.call("orders.slow", {"n": 1}, deadline_s=60.0))
        await wait_until(lambda: here.worked[1])
        body = "z" * 300_000
        for number in range(6):
            assert await channel.call("big.echo", [number, body]) == [number, body]
        box.cuts = iter(["before"] * 12)  # the channel is given up; the next begins where the session is
        link = channel._longline.link
        stream = link.stream
        await wait_until(lambda: link.stream is not stream and not link.detached)
        assert await channel.call("big.echo", "y", deadline_s=60.0) == "y"
        here.go.set()
        assert await slow == "done"
        assert channel.session.session == session
    assert here.worked == {1: 1}


async def test_node_that_stops_is_left_for_the_other(hopping):
    here, _, bundle = hopping
    async with client_of(bundle) as client, client.channel() as channel:
        welcome = await channel.wait_connected()
        here.stops[int(welcome.resume[1]) - 1].set()
        await wait_until(lambda: channel.session is not None and channel.session.session != welcome.session)
        assert await channel.call("big.echo", "x", deadline_s=60.0) == "x"


class Stalling:
    """A TCP relay before a gateway, that stops carrying on what it has taken, and goes on later; it hangs up on nobody.

    Attributes:
        address: where it listens.
        flows: set while it carries.
        made: connections so far.
    """

    def __init__(self, target):
        self.target = target
        self.address = Address("", 0)
        self.flows = asyncio.Event()
        self.flows.set()
        self.made = 0
        self._tasks = set()

    async def start(self, stack):
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = Address(*server.sockets[0].getsockname()[:2])

        async def stop():
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        stack.push_async_callback(stop)
        return self

    async def _connected(self, reader, writer):
        self._tasks.add(task := asyncio.current_task())
        self.made += 1
        onward = None
        try:
            there, onward = await asyncio.open_connection(*self.target)
            await asyncio.gather(self._pipe(reader, onward), self._pipe(there, writer))
        except OSError:
            pass
        finally:
            self._tasks.discard(task)
            for each in (writer, onward):
                if each is not None:
                    each.transport.abort()

    async def _pipe(self, reader, writer):
        while data := await reader.read(65536):
            await self.flows.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


@pytest.fixture(name="stalling")
async def _stalling(unit, monkeypatch):
    """Give a unit, a relay before its TLS port that can stall, and a bundle whose short HTTP goes past it."""
    monkeypatch.setattr(limits_heartbeat, "DOUBT_FIRST_S", 0.3)
    monkeypatch.setattr(limits_heartbeat, "BESIDE_FIRST_S", 0.2)
    monkeypatch.setattr(limits_carriers, "CARRIER_CLIMB_FIRST_S", 0.5)
    async with contextlib.AsyncExitStack() as stack:
        here = await unit()
        wire = await Stalling(here.gateways[0]).start(stack)
        places = [(Carrier.LONG_TLS, wire.address), (Carrier.SHORT, here.gateways[0])]
        yield here, wire, await here.bundle(places)


async def test_calls_on_a_connection_that_stalls_are_answered_over_short_http_and_no_write_is_done_twice(stalling):
    here, wire, bundle = stalling
    async with client_of(bundle) as client, client.channel() as channel:
        session = (await channel.wait_connected()).session
        link = channel._longline.link
        assert link.carrier == "sl-tls"
        before = asyncio.create_task(channel.call("orders.slow", {"n": 1}, deadline_s=60.0))
        await wait_until(lambda: here.worked[1])
        wire.flows.clear()
        here.go.set()  # the answer of this one is stuck, of the others the call
        writes = [asyncio.create_task(channel.call("orders.create", {"n": n}, deadline_s=60.0)) for n in (2, 3)]
        read = asyncio.create_task(channel.call("big.echo", "x", deadline_s=60.0))
        assert await before == "done"
        assert [await each for each in writes] == [{"n": 2}, {"n": 3}]
        assert await read == "x"
        assert channel.session.session == session
        assert link is channel._longline.link
        assert link.carrier == "sl-short"
        assert wire.made == 1  # beside the one that stalls, not after it was given up
        wire.flows.set()  # what was stuck comes out, and finds nobody
        await wait_until(lambda: channel._longline.link is not None and channel._longline.link.carrier == "sl-tls")
        assert await channel.call("orders.create", {"n": 4}) == {"n": 4}
        assert channel.session.session == session
    assert here.worked == {1: 1, 2: 1, 3: 1, 4: 1}


async def test_requests_on_a_connection_that_stalls_are_answered_and_a_post_without_a_key_is_made_once(stalling):
    here, wire, bundle = stalling
    async with client_of(bundle) as client, client.channel() as channel:
        await channel.wait_connected()
        assert (await client.get(f"https://{HOST}/before")).text == "GET /before"
        wire.flows.clear()
        asking = [client.get(f"https://{HOST}/read"), client.post(f"https://{HOST}/write", content=b"x")]
        read, write = await asyncio.gather(*asking)
        assert (read.text, write.text) == ("GET /read", "POST /write")
        wire.flows.set()
        assert (await client.get(f"https://{HOST}/after")).text == "GET /after"
    assert here.asked == dict.fromkeys(("GET /before", "GET /read", "POST /write", "GET /after"), 1)


async def test_connection_that_comes_back_before_short_http_answers_keeps_its_session(unit, monkeypatch):
    monkeypatch.setattr(limits_heartbeat, "DOUBT_FIRST_S", 0.3)
    monkeypatch.setattr(limits_heartbeat, "BESIDE_FIRST_S", 0.2)
    here = await unit()
    async with contextlib.AsyncExitStack() as stack:
        wire = await Stalling(here.gateways[0]).start(stack)
        bundle = await here.bundle([(Carrier.LONG_TLS, wire.address), (Carrier.SHORT, wire.address)])
        async with client_of(bundle) as client, client.channel() as channel:
            await channel.wait_connected()
            wire.flows.clear()
            calls = [asyncio.create_task(channel.call("orders.create", {"n": n}, deadline_s=60.0)) for n in range(5)]
            await wait_until(lambda: wire.made == 2)  # short HTTP was tried, and stalls as well
            wire.flows.set()
            await asyncio.gather(*calls)
            assert channel._longline.link.carrier == "sl-tls"
    assert here.worked == dict.fromkeys(range(5), 1)


class Calling(asyncio.Protocol):
    """A gateway's end of a channel that calls its device.

    Attributes:
        answer: what the device says.
    """

    def __init__(self, params):
        self.machine = Connection(Role.SERVER, 0.0)
        self.params = params
        self.answer = bytearray()
        self.answered = asyncio.Event()
        self.session = None

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.machine.receive_data(data, 0.0)
        while (event := self.machine.next_event()) is not None:
            match event:
                case e.HelloReceived():
                    self.session = self
                    self.machine.send_welcome(m.Welcome(1, "s1", "d1"))
                    self.call_id = self.machine.send_call("rpc", "lamp.set", more=True)
                    self.send()
                case e.CreditGranted():
                    self.send()
                case e.ReplyReceived() | e.DataReceived():
                    self.answer += event.body
                    self.machine.consume(event.call_id, len(event.body))
                    if not getattr(event, "more", not getattr(event, "end", False)):
                        self.answered.set()
        self.transport.write(self.machine.data_to_send())

    def send(self):
        while self.params and (size := min(len(self.params), self.machine.credit(self.call_id), 16_384)):
            self.machine.send_data(self.call_id, self.params[:size], end=size == len(self.params))
            self.params = self.params[size:]


async def test_server_calls_a_device_with_more_than_the_credit(unit, pki):
    here = await unit()
    asked = "p" * 600_000
    carriers = []

    def carrier():
        carriers.append(Calling(json.dumps(asked).encode()))
        return carriers[-1]

    channels = Channels("u1", "n1", carrier, MemoryEngine(here.broker), SystemRng(), {})
    door = free_address()
    listener = Listener([Door(door, plain=True)], carrier, lambda begin: None, channels=channels)
    listener.start()
    try:
        async with http10_box([door], pki.gateway) as box:
            bundle = await here.bundle([(Carrier.SHORT, box.address)])
            async with client_of(bundle) as client:
                channel = client.channel()
                channel.serve("lamp.set", lambda params: params[:200_000])
                async with channel:
                    await wait_until(lambda: carriers and carriers[0].answered.is_set())
        assert json.loads(carriers[0].answer) == asked[:200_000]
    finally:
        listener.close()
        channels.close()


async def test_server_that_takes_its_time_is_waited_for_where_the_connection_lives(stalling):
    here, wire, bundle = stalling
    async with client_of(bundle) as client, client.channel() as channel:
        await channel.wait_connected()
        slow = asyncio.create_task(channel.call("orders.slow", {"n": 1}, deadline_s=60.0))
        asked = channel._longline.link.machine
        await wait_until(lambda: asked._ping_nonce >= 2)  # it was asked for signs of life, and gave them
        assert channel._longline.link.carrier == "sl-tls"
        here.go.set()
        assert await slow == "done"
        assert wire.made == 1


@pytest.mark.skipif(foreign.find("nginx") is None, reason="nginx is not installed")
async def test_nginx_that_speaks_http_1_0_to_the_gateway_carries_a_whole_session(unit, tmp_path):
    here = await unit()
    tmp_path.chmod(0o755)
    at = free_address()
    config = tmp_path / "nginx.conf"
    config.write_text(
        NGINX.format(
            folder=tmp_path,
            port=at.port,
            upstream=here.doors[0],
            certificate=here.pki.gateway.certificate,
            key=here.pki.gateway.key,
        )
    )
    user = ["-g", "user root;"] if os.geteuid() == 0 else []
    program = str(foreign.find("nginx"))
    nginx = foreign.ForeignServer(
        "nginx", at, tmp_path, "https", [program, "-c", str(config), "-e", str(tmp_path / "error.log"), *user]
    )
    try:
        nginx.wait_started()
        bundle = await here.bundle([(carrier, at) for carrier in LONG])
        async with client_of(bundle) as client, client.channel() as channel:
            device = (await channel.wait_connected()).device
            assert channel._longline.link.carrier == "sl-short"
            body = "y" * 500_000
            assert await channel.call("big.echo", body) == body
            pushed = asyncio.create_task(anext(channel.pushes()))
            posted = asyncio.create_task(here.admins[0].post("/v1/push", json={"device": device, "body": 7}))
            push = await pushed
            assert push.json() == 7
            push.ack()
            assert (await posted).json()["state"] == "acked"
        lines = (tmp_path / "access.log").read_text().splitlines()
        assert "POST /stormline/short HTTP/1.1 200" in lines
    finally:
        nginx.stop()


async def test_session_falls_to_short_http_and_climbs_back_when_more_passes(unit, monkeypatch):
    monkeypatch.setattr(limits_carriers, "CARRIER_CLIMB_FIRST_S", 0.4)
    here = await unit()
    box = await here.box()
    async with contextlib.AsyncExitStack() as stack:
        wire = await Stalling(box.address).start(stack)
        bundle = await here.bundle([(carrier, wire.address) for carrier in LONG])
        async with client_of(bundle) as client, client.channel() as channel:
            session = (await channel.wait_connected()).session
            link = channel._longline.link
            assert link.carrier == "sl-short"
            wire.target = here.gateways[0]
            seen = set()
            async with asyncio.timeout(30):
                for number in itertools.count():  # calls go on meanwhile, and none fails
                    assert await channel.call("orders.create", {"n": number}) == {"n": number}
                    seen.add(number)
                    if link.carrier == "sl-tls":
                        break
                    await asyncio.sleep(0.02)
            assert channel._longline.link is link
            assert channel.session.session == session
            assert here.worked == dict.fromkeys(seen, 1)


async def test_page_of_a_captive_portal_is_no_gateway(unit, pki):
    here = await unit()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki.gateway.certificate, pki.gateway.key)

    async def portal(reader, writer):
        with contextlib.suppress(OSError, EOFError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nlogin")
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(portal, "127.0.0.1", 0, ssl=context)
    async with listening:
        at = Address(*listening.sockets[0].getsockname()[:2])
        bundle = await here.bundle([(Carrier.SHORT, at)])
        async with client_of(bundle) as client, client.channel() as channel:
            with pytest.raises(errors.TransportError) as caught:
                await channel.call("big.echo", "x", deadline_s=1.0)
            assert caught.value.maybe_delivered is False
