"""What a client learned of its network is there at the next start, on real sockets and a real disk."""

import asyncio
import contextlib
import gc
import os
import socket
import threading

import pytest

import stormline
from stormline.client.background import BACKGROUND
from stormline.client.outside import Outside
from stormline.core import limits_memory
from stormline.core.values import Address, Secret
from stormline.net import stream
from stormline.net.network import NoNetworkPort
from stormline.policy.addresses import Candidate
from stormline.policy.network import NetworkInfo
from stormline.testing.gateway import answering
from stormline.testing.origin import plain
from stormline.testing.world import APP, GATEWAY_NAME, HOST, bundle_for, rules_for, running_dispatch
from stormline.wire.plan import Endpoint, HostPlan

pytestmark = pytest.mark.loopback

HELD = [("/held", "six")] * 2


class Hole:
    """A listening socket on ::1 or 127.0.0.1 whose queue is full: the kernel drops what comes."""

    def __init__(self, host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.sock = socket.socket(family)
        try:
            self.sock.bind((host, 0))
        except OSError:
            self.sock.close()
            pytest.skip(f"{host} cannot be used here")
        self.sock.listen(0)
        self.address = Address(*self.sock.getsockname()[:2])
        self.fillers = [socket.socket(family) for _ in range(3)]
        for filler in self.fillers:
            filler.setblocking(False)
            filler.connect_ex(self.sock.getsockname())

    def close(self):
        for sock in (*self.fillers, self.sock):
            sock.close()


class Machine:
    """A machine whose connections are noted."""

    def __init__(self, names, places):
        self.begun = []
        self.outside = names(places)
        self.outside = Outside(resolver=self.outside.resolver, open_tcp=self.open_tcp)

    async def open_tcp(self, address):
        self.begun.append(address)
        return await stream.open_tcp(address)

    async def start(self, store, calls=1, **settings):
        """Run an app once that asks some times, each over a connection of its own; give where it connected to."""
        self.begun.clear()
        client = stormline.AsyncClient(
            config=stormline.Config(**{"store": store, "network": "wifi", **settings}), outside=self.outside
        )
        async with client:
            for _ in range(calls):
                assert (await client.get("http://a.test/")).text == "ok"
                client._storm.runtime()._pool.leave(lambda stream: True)
        return list(self.begun)


@pytest.mark.parametrize("broken", ["::1", "127.0.0.1"])
async def test_second_start_begins_no_connection_to_the_address_that_is_dead(broken, names, origin, tmp_path):
    there = await origin()
    with contextlib.closing(Hole(broken)) as hole:
        machine = Machine(names, {"a.test": (hole.address, there.address)})
        first = await machine.start(tmp_path, calls=2)
        assert hole.address in first
        assert await machine.start(tmp_path) == [there.address]
        assert await machine.start(None) == [hole.address, there.address]


async def test_second_start_opens_the_long_connection_where_it_stood(world, tmp_path):
    with contextlib.closing(Hole("127.0.0.1")) as hole:
        began = []

        async def open_tcp(address):
            began.append(address)
            return await stream.open_tcp(address)

        made = await world(answering())
        there = made.gateway.address
        gateways = [
            Endpoint(host=each.host, port=each.port, server_name=GATEWAY_NAME, weight=weight)
            for each, weight in ((hole.address, 1), (there, 0))
        ]
        hosts = {HOST: HostPlan(endpoints=tuple(gateways))}
        rules = rules_for(hosts=hosts, gateways={}, apps={APP: frozenset(hosts)})
        async with running_dispatch(made.pki, rules) as (dispatch, _):
            bundle = bundle_for(made.pki, dispatch)
            tried = []
            for store in (tmp_path, tmp_path, None):
                config = made.config(bundle=bundle, store=store, network="wifi")
                began.clear()
                async with stormline.AsyncClient(config=config, outside=Outside(open_tcp=open_tcp)) as client:
                    assert (await client.get(f"https://{HOST}/")).status_code == 200
                tried.append([each for each in began if each in (hole.address, there)])
    assert tried == [[hole.address, there], [there], [hole.address, there]]


async def test_client_without_a_store_writes_nothing(names, origin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    there = await origin()
    await Machine(names, {"a.test": there.address}).start(None, calls=2)
    assert os.listdir(tmp_path) == []


async def test_file_holds_no_path_query_header_or_body(names, origin, tmp_path):
    there = await origin()
    machine = Machine(names, {"a.test": there.address})
    config = stormline.Config(store=tmp_path, network="wifi")
    async with stormline.AsyncClient(config=config, outside=machine.outside) as client:
        await client.post(
            "http://a.test/private-path/x?q=private-query",
            content=b"private-body",
            headers={"authorization": "Bearer private-token"},
        )
    (path,) = (tmp_path / "networks").iterdir()
    assert b"a.test" in path.read_bytes()
    assert b"private" not in path.read_bytes()


async def test_forgotten_is_all(names, origin, tmp_path):
    there = await origin()
    machine = Machine(names, {"a.test": there.address})
    await machine.start(tmp_path)
    config = stormline.Config(store=tmp_path, network="wifi")
    unused = stormline.AsyncClient(config=config, outside=machine.outside)
    assert len(os.listdir(tmp_path / "networks")) == 1
    unused.forget()
    assert os.listdir(tmp_path / "networks") == []
    await machine.start(tmp_path)
    async with stormline.AsyncClient(config=config, outside=machine.outside) as client:
        await client.get("http://a.test/")
        client.forget()
        assert os.listdir(tmp_path / "networks") == []
        assert not client._storm.runtime().steering.strategy.export("wifi", 0.0, 0.0).hosts


def test_synchronous_client_keeps_and_forgets_too(tmp_path):
    with stormline.Client(config=stormline.Config(store=tmp_path, network="wifi")) as client:
        assert client.preconnect("http://127.0.0.1:9/") is False
        client.forget()
    BACKGROUND.stop()


async def test_threads_and_descriptors_of_writing_are_gone_with_the_client(names, origin, tmp_path):
    there = await origin()
    machine = Machine(names, {"a.test": there.address})
    await machine.start(tmp_path)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        await machine.start(tmp_path)
    async with asyncio.timeout(10):
        while any(each.name == "stormline-aside" for each in threading.enumerate()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        while len(os.listdir("/proc/self/fd")) > before:  # noqa: ASYNC110  (the server closes a moment later)
            await asyncio.sleep(0.01)


async def test_host_marked_as_worse_over_ipv6_is_asked_over_ipv4_first(names, origin, tmp_path):
    four, six = await origin(), await origin(host="::1")
    machine = Machine(names, {"a.test": (six.address, four.address)})
    assert await machine.start(None) == [six.address]
    assert await machine.start(None, prefer_ipv4=("*.example", "A.test")) == [four.address]


async def test_api_marked_as_worse_over_ipv6_is_dialled_over_ipv4_first_and_others_are_not(names, origin):
    four, six = await origin(), await origin(host="::1")
    machine = Machine(names, {"a.test": (six.address, four.address)})
    rules = (stormline.BusinessRule(host="a.test", path="/big/**", ipv4_first=True),)
    async with stormline.AsyncClient(config=stormline.Config(rules=rules), outside=machine.outside) as client:
        for path, address in (("/small", six.address), ("/big/1", four.address), ("/small", six.address)):
            machine.begun.clear()
            assert (await client.get(f"http://a.test{path}")).text == "ok"
            assert machine.begun == [address]
            client._storm.runtime()._pool.leave(lambda stream: True)


@pytest.mark.parametrize(("marked", "second"), [(True, "four"), (False, "six")])
async def test_api_marked_as_worse_over_ipv6_leaves_kept_ipv6_connections_when_repeated(names, origin, marked, second):
    asked, both = [], asyncio.Event()

    def at(name):
        async def answer(request, writer):
            asked.append((request.target, name))
            if request.target == "/held":
                if len(asked) == 2:
                    both.set()
                await both.wait()
            if asked == [*HELD, ("/big", "six")]:
                writer.close()
            else:
                writer.write(plain())

        return answer

    four, six = await origin(at("four")), await origin(at("six"), host="::1")
    outside = names({"a.test": (six.address, four.address)})
    rules = (stormline.BusinessRule(host="a.test", path="/big", ipv4_first=marked),)
    async with stormline.AsyncClient(config=stormline.Config(rules=rules), outside=outside) as client:
        await asyncio.gather(*(client.get("http://a.test/held") for _ in HELD))  # two connections are kept
        assert (await client.get("http://a.test/big")).text == "ok"
    assert asked == [*HELD, ("/big", "six"), ("/big", second)]


async def test_file_of_a_full_memory_is_read_in_some_milliseconds(tmp_path, names, origin):
    """No time is asserted: the file's size is, and that it is read at once."""
    there = await origin()
    machine = Machine(names, {"a.test": there.address})
    config = stormline.Config(store=tmp_path, network="wifi")
    async with stormline.AsyncClient(config=config, outside=machine.outside) as client:
        steering = client._storm.runtime().steering
        steering.enter_network()
        for number in range(3 * limits_memory.MEMORY_HOSTS_MAX):
            for place in range(limits_memory.MEMORY_ADDRESSES_MAX):
                steering.connected(f"host-{number}.test", Address(f"192.0.2.{place}", 443), connect_s=0.02, tls_s=0.03)
    (path,) = (tmp_path / "networks").iterdir()
    assert path.stat().st_size <= limits_memory.MEMORY_FILE_BYTES_MAX
    async with stormline.AsyncClient(config=config, outside=machine.outside) as client:
        steering = client._storm.runtime().steering
        steering.enter_network()
        last = f"host-{3 * limits_memory.MEMORY_HOSTS_MAX - 1}.test"
        known = [Candidate(f"192.0.2.{place}", 443) for place in range(limits_memory.MEMORY_ADDRESSES_MAX)]
        ranked = steering.addresses.plan(steering.network.id, last, known, asyncio.get_running_loop().time())
        assert {each.why for each in ranked} == {"0 of the last 8 failed"}


class Joined(NoNetworkPort):
    """A WiFi whose router's link-layer address the kernel may not know yet."""

    def __init__(self, *, known):
        self.known = known

    def look(self):
        return NetworkInfo(
            kind="wifi",
            interface="wlan0",
            addresses=("192.168.1.7",),
            prefixes=("192.168.1.0/24",),
            gateway="192.168.1.1",
            gateway_link=Secret("02:00:00:00:00:01") if self.known else None,
            routed=True,
        )


async def test_what_is_learned_before_the_router_is_known_is_there_when_it_is(names, origin, tmp_path):
    there = await origin()
    with contextlib.closing(Hole("127.0.0.1")) as hole:
        machine = Machine(names, {"a.test": (hole.address, there.address)})
        port = Joined(known=False)
        client = stormline.AsyncClient(
            config=stormline.Config(store=tmp_path, network_port=port), outside=machine.outside
        )
        async with client:
            assert (await client.get("http://a.test/")).text == "ok"
            before = client.network.info.id
            port.known = True
            client._storm.runtime().network.look()
            assert client.network.info.id == client._storm.runtime().steering.network.id != before
        assert hole.address in machine.begun
        assert await machine.start(tmp_path, network="unknown", network_port=Joined(known=True)) == [there.address]
