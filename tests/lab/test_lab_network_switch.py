"""A device changes its network under living connections: WiFi goes without a word, cellular takes over, and back.

The client runs in a process of its own on the device. Nothing tells its sockets: the WiFi router drops everything both
ways before the address goes, so there is no RST and no FIN.
"""

import asyncio
import contextlib
import json
import select
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from stormline.core.values import Address
from stormline.lab.namespaces import CELL, WIFI, Uplink
from stormline.lab.profiles_model import Profile, ServerSpec, link
from stormline.lab.stage import Stage
from stormline.lab.tun import inside
from stormline.net import system
from stormline.net.clock import SystemClock
from stormline.testing import world as worlds
from stormline.testing.gateway import GatewayEnd, ScriptedGateway, answering
from stormline.wire import bundle as bundles
from stormline.wire import events as e
from stormline.wire import messages as m

pytestmark = pytest.mark.lab

WAIT_S = 30.0
"""How long the client may take for one command, with room for a busy machine."""
BUDGET_S = 5.0
"""Patience of each request."""
GETS = 20
WAYS = ("h1", "h2", "long")
monotonic = SystemClock().monotonic
FAST_S = 2.0
"""Above what a request with a new handshake takes here (0.15 s) by more than the load of a machine adds, and below the
budget that whoever finds out nothing waits for a dead connection."""

CLIENT = """
import asyncio, json, os, ssl, sys, time
import psutil
import stormline
from stormline.core import errors
from stormline.client.lanes import Lane
from stormline.wire import bundle as bundles

shop, ca, bundle, budget, watch = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5]
placed = []  # what each request was put on
on_held = Lane.on_held
def held_by(self, held):
    pool = self.path.pool
    if names.get(id(pool)) is not None:
        placed.append([names[id(pool)], time.monotonic(), held.stream.local.host])
    on_held(self, held)
Lane.on_held = held_by
names = {}

def state():
    me = psutil.Process()
    sockets = [each.laddr.ip for each in me.net_connections("tcp") if each.raddr]
    return {"sockets": sockets, "descriptors": me.num_fds(), "tasks": len(asyncio.all_tasks())}

async def ask(client, url, method, number):
    began = time.monotonic()
    answer = {"began": began, "way": number}
    try:
        response = await client.request(method, url)
        answer["status"] = response.status_code
        trace = response.extensions["stormline"]
        answer["attempts"] = len(trace.record.attempts)
        answer["story"] = [[began + at, line] for at, line in trace.timeline.story]
    except errors.TransportError as error:
        answer.update(status=0, error=f"{type(error).__name__}: {error}", maybe_delivered=error.maybe_delivered)
    answer["took"] = time.monotonic() - began
    return answer

async def main():
    trust = ssl.create_default_context(cafile=ca)
    h2_trust = ssl.create_default_context(cafile=ca)
    h2_trust.set_alpn_protocols(["h2", "http/1.1"])
    def config(**more):
        return stormline.Config(deadline_s=budget, report=False, network_watch=watch, **more)
    clients = {
        "h1": stormline.AsyncClient(config=config(http2=False), verify=trust, timeout=60),
        "h2": stormline.AsyncClient(config=config(), verify=h2_trust, timeout=60),
        "long": stormline.AsyncClient(bundles.decode(open(bundle, "rb").read()), config=config(), timeout=60),
    }
    bases = {"h1": shop, "h2": shop, "long": "https://shop.test"}
    for way in ("h1", "h2"):
        names[id(clients[way]._storm.runtime()._pool)] = way
    under_way = {}
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print(json.dumps("ready"), flush=True)
    numbers = iter(range(1, 1000))
    while line := await reader.readline():
        command = json.loads(line)
        match command["do"]:
            case "gets":
                tasks = []
                for way in command["ways"]:
                    url = f"{bases[way]}/item/{next(numbers)}/1000"
                    tasks.append(asyncio.ensure_future(ask(clients[way], url, "GET", way)))
                    await asyncio.sleep(command["pause"])
                said = await asyncio.gather(*tasks)
            case "begin":
                url = f"{bases[command['way']]}/item/{next(numbers)}/1000"
                under_way[command["name"]] = asyncio.ensure_future(
                    ask(clients[command["way"]], url, command["method"], command["way"]))
                await asyncio.sleep(0.1)
                said = None
            case "end":
                said = await under_way.pop(command["name"])
            case "changed":
                for client in clients.values():
                    client.network_changed()
                said = time.monotonic()
            case "state":
                said = state()
            case "network":
                said = clients["h1"].network.info.id
            case "placed":
                said, placed[:] = list(placed), []
            case "close":
                for client in clients.values():
                    await client.aclose()
                said = state()
        print(json.dumps(said), flush=True)
asyncio.run(main())
"""


class Device:
    """The client on the device, and the network under it."""

    def __init__(self, stage: Stage, client: "subprocess.Popen[bytes]") -> None:
        self._stage = stage
        self._client = client

    def say(self, do: str, **more: Any) -> Any:
        """Give the client a command, and its answer."""
        assert self._client.stdin is not None
        self._client.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
        self._client.stdin.flush()
        return self.hear()

    def hear(self) -> Any:
        """Wait for the client's next line."""
        assert self._client.stdout is not None
        readable, _, _ = select.select([self._client.stdout], (), (), WAIT_S)
        line = self._client.stdout.readline() if readable else b""
        assert line, "the client does not answer"
        return json.loads(line)

    def gets(self, *ways: str, pause_s: float = 0.1) -> list[dict[str, Any]]:
        """Make GETs, each begun a little after the one before."""
        told: list[dict[str, Any]] = self.say("gets", ways=ways, pause=pause_s)
        return told

    def switch(self, old: Uplink, new: Uplink) -> None:
        """Lose one uplink without a word and have the other: first the packets go, then the route, then the address."""
        routers, device = self._stage.topology.routers, self._stage.topology.device
        routers[new.name].shell("nft delete table inet gone 2>/dev/null || true")
        self._stage.topology.set_uplink(new, up=True)
        routers[old.name].shell(
            "nft 'add table inet gone;"
            " add chain inet gone both_ways { type filter hook forward priority -300; policy drop; }'"
        )
        device.shell(f"ip -4 route del default dev {old.name}; ip -6 route del default dev {old.name}")
        device.shell(
            f"ip address del {old.device_v4}/24 dev {old.name}; ip address del {old.device_v6}/64 dev {old.name}"
        )

    def wait_for_state(self, condition: Callable[[dict[str, Any]], bool], *, wait_s: float) -> dict[str, Any]:
        """Give the client's state as soon as it is as it should be, or when it should have been."""
        until = monotonic() + wait_s
        while True:
            state: dict[str, Any] = self.say("state")
            if condition(state) or monotonic() > until:
                return state


async def _item(end: GatewayEnd, call: e.CallReceived) -> None:
    end.reply(call, b"an item")


class _Platform:
    """A dispatch and a gateway in the server's namespace, on a thread that stays in it."""

    def __init__(self, stage: Stage, pki: worlds.Pki) -> None:
        self._thread = threading.Thread(target=self._run, name="platform", daemon=True)
        self._stage = stage
        self._pki = pki
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self.bundle = b""
        self.gateway: ScriptedGateway | None = None

    def _run(self) -> None:
        try:
            with inside(self._stage.topology.server.path):
                asyncio.run(self._serve())
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        host, pki = self._stage.addresses[0], self._pki
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pki.gateway.certificate, pki.gateway.key)
        context.set_alpn_protocols([m.ALPN])
        self.gateway = gateway = ScriptedGateway((answering(_item),))
        server = await asyncio.start_server(gateway.connected, host, 0, ssl=context)
        gateway.address = Address(*server.sockets[0].getsockname()[:2])
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with server, worlds.running_dispatch(pki, worlds.rules_for(gateway.address), host=host) as (address, _):
            self.bundle = bundles.encode(worlds.bundle_for(pki, address))
            self._ready.set()
            await self._stop.wait()
            await gateway.stop()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        assert self.bundle
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)


@pytest.fixture(scope="session", name="pki")
def _pki(tmp_path_factory: pytest.TempPathFactory) -> worlds.Pki:
    return worlds.make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(name="watch")
def _watch() -> str:
    """How the client learns of its network: by nothing but its connections."""
    return "off"


@pytest.fixture(name="device")
def _device(tmp_path: Path, pki: worlds.Pki, watch: str) -> Iterator[Device]:
    profile = Profile(
        name="test",
        about="A test.",
        wifi=link(rtt_ms=20),
        cell=link(rtt_ms=40),
        server=ServerSpec(v4=2),
    )
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(Stage(profile, 1, folder=tmp_path / "keys"))
        platform = stack.enter_context(_Platform(stage, pki))
        (tmp_path / "bundle").write_bytes(platform.bundle)
        words = [sys.executable, "-c", CLIENT, stage.base_url, str(stage.ca_file), str(tmp_path / "bundle"),
                 str(BUDGET_S), watch]  # fmt: skip
        client = stage.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.enter_context(client)
        stack.callback(client.kill)
        device = Device(stage, client)
        device.hear()
        yield device


def old_ones(state: dict[str, Any], old: Uplink) -> int:
    """Count connections from an uplink's address."""
    count: int = state["sockets"].count(old.device_v4)
    return count


def warm(device: Device) -> dict[str, Any]:
    """Have three idle HTTP/1.1 connections, one of HTTP/2 and the long one."""
    answers = device.gets("h1", "h1", "h1", "h2", "long", pause_s=0)
    assert [each["status"] for each in answers] == [200] * 5, answers
    state: dict[str, Any] = device.say("state")
    assert old_ones(state, WIFI) >= 5
    device.say("placed")
    return state


def test_switch_that_is_told_leaves_no_request_on_a_dead_connection(device: Device) -> None:
    bare = device.say("state")
    before = warm(device)
    for old, new in ((WIFI, CELL), (CELL, WIFI)):
        device.switch(old, new)
        device.say("changed")
        answers = device.gets(*[WAYS[n % len(WAYS)] for n in range(GETS)])
        assert [each["status"] for each in answers] == [200] * GETS, answers
        assert [each["attempts"] for each in answers] == [1] * GETS, answers
        assert max(each["took"] for each in answers) < FAST_S
        assert {host for _, _, host in device.say("placed")} == {new.device_v4}
        after = device.say("state")
        assert old_ones(after, old) == 0
        assert after["descriptors"] <= before["descriptors"]
        assert after["tasks"] <= before["tasks"]
    assert device.say("close") | {"tasks": bare["tasks"]} == bare


def test_switch_that_is_told_closes_connections_of_the_old_address_at_once(device: Device) -> None:
    before = warm(device)
    device.switch(WIFI, CELL)
    device.say("changed")
    after = device.wait_for_state(lambda state: not old_ones(state, WIFI), wait_s=1.0)
    assert old_ones(after, WIFI) == 0
    assert after["descriptors"] <= before["descriptors"] - 5


def test_network_change_that_was_none_costs_no_request(device: Device) -> None:
    warm(device)
    device.say("changed")
    answers = device.gets(*WAYS, *WAYS)
    assert [(each["status"], each["attempts"]) for each in answers] == [(200, 1)] * 6, answers
    assert device.say("placed")


@pytest.mark.parametrize("way", WAYS)
def test_switch_that_is_told_has_what_is_under_way_asked_again_where_it_may_be(device: Device, way: str) -> None:
    warm(device)
    device.switch(WIFI, CELL)
    device.say("begin", name="read", way=way, method="GET")
    device.say("begin", name="write", way=way, method="POST")
    device.say("changed")
    read, write = device.say("end", name="read"), device.say("end", name="write")
    assert (read["status"], read["attempts"]) == (200, 2), read
    assert (write["status"], write.get("maybe_delivered")) == (0, True), write
    assert max(read["took"], write["took"]) < FAST_S


def noticed_at(answers: list[dict[str, Any]]) -> float:
    """Give the moment at which the client first said that something is wrong with a connection."""
    signs = ("is silent", "does not answer", "is gone", "failed in")
    return float(min(at for each in answers for at, line in each["story"] if any(sign in line for sign in signs)))


@pytest.mark.parametrize("way", ["h1", "h2"])
def test_switch_that_nobody_tells_costs_only_what_went_before_it_was_noticed(device: Device, way: str) -> None:
    warm(device)
    for old, new in ((WIFI, CELL), (CELL, WIFI)):
        device.switch(old, new)
        answers = device.gets(*[way] * GETS, pause_s=0.2)
        assert [each["status"] for each in answers] == [200] * GETS, answers
        assert max(each["took"] for each in answers) < BUDGET_S
        late = [host for _, at, host in device.say("placed") if at > noticed_at(answers)]
        assert late
        assert set(late) == {new.device_v4}
        if way == "h2":
            assert device.gets(way)[0]["status"] == 200  # finds the doubted one without anything to carry
            device.say("placed")
    assert old_ones(device.say("state"), CELL) == 0


def test_switch_that_nobody_tells_costs_the_long_connection_no_call(device: Device) -> None:
    warm(device)
    device.switch(WIFI, CELL)
    answers = device.gets(*["long"] * GETS, pause_s=0.2)
    assert [each["status"] for each in answers] == [200] * GETS


@pytest.mark.parametrize(
    "watch",
    [
        pytest.param(
            "netlink",
            marks=pytest.mark.skipif(system.PORTABLE, reason="the routing socket is switched off (STORMLINE_PORTABLE)"),
        ),
        "polling",
    ],
)
def test_switch_that_only_the_system_tells_leaves_no_request_on_a_dead_connection(device: Device) -> None:
    names = [device.say("network")]
    warm(device)
    for old, new in ((WIFI, CELL), (CELL, WIFI)):
        device.switch(old, new)
        after = device.wait_for_state(lambda state, old=old: not old_ones(state, old), wait_s=FAST_S + 2.0)  # type: ignore[misc]
        assert old_ones(after, old) == 0  # closed before anybody asked for anything
        answers = device.gets(*[WAYS[n % len(WAYS)] for n in range(6)], pause_s=0)
        assert [(each["status"], each["attempts"]) for each in answers] == [(200, 1)] * 6, answers
        assert {host for _, _, host in device.say("placed")} == {new.device_v4}
        names.append(device.say("network"))
    assert names[0] == names[2] != names[1]
