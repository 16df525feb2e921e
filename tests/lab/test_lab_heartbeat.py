"""The heartbeat through a real NAT: a kernel that masquerades, forgets after seconds, and drops what it has forgotten.

The gateway runs in a process on the server, the client in one on the device, between them a shaped link and the
router's connection tracking. Its memory for silent connections is four seconds instead of minutes, and the client's
bounds are smaller in proportion.
"""

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stormline.lab.namespaces import WIFI
from stormline.lab.profiles_model import Profile, ServerSpec, link
from stormline.lab.stage import Stage
from stormline.net.clock import SystemClock

pytestmark = [pytest.mark.lab, pytest.mark.timeout(120)]

LIMIT_S = 4
WAIT_S = 30.0
monotonic = SystemClock().monotonic

NAT = f"""
echo {LIMIT_S} > /proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established
echo 0 > /proc/sys/net/netfilter/nf_conntrack_tcp_loose
nft -f - <<END
table ip memory {{
  chain forward {{
    type filter hook forward priority filter
    ct state invalid drop
  }}
}}
END
"""

SERVER = """
import asyncio, json, sys
from pathlib import Path
import httpx2, uvloop
from stormline.core.values import Secret
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.engine.nats import EngineConfig
from stormline.gateway import server
from stormline.gateway.config import GatewayConfig
from stormline.net.clock import SystemClock, SystemRng
from stormline.testing import world as worlds
from stormline.wire import bundle as bundles

host, folder = sys.argv[1], Path(sys.argv[2])
ADMIN = "a-business-key-0123456789"

async def main():
    pki, broker, stop = worlds.make_pki(folder), MemoryBroker(), asyncio.Event()
    async def connect():
        return MemoryEngine(broker)
    config = GatewayConfig(
        host=host, tls=pki.gateway, apps={worlds.APP: {pki.token_key.kid: pki.token_key.public_text}},
        engine=EngineConfig(url="nats://127.0.0.1:1", user="nobody", password=Secret("nothing")),
        admin_key=Secret(ADMIN))
    started = asyncio.get_running_loop().create_future()
    gateway = asyncio.create_task(server.run(
        config, clock=SystemClock(), rng=SystemRng(), stop=stop, connect=connect,
        started=lambda address, admin: started.set_result((address, admin))))
    address, admin = await started
    async with worlds.running_dispatch(pki, worlds.rules_for(address), host=host) as (dispatch, _):
        (folder / "bundle").write_bytes(bundles.encode(worlds.bundle_for(pki, dispatch)))
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        print(json.dumps("ready"), flush=True)
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {ADMIN}"}, timeout=20) as asker:
            while line := await reader.readline():
                order = {"app": worlds.APP, "topic": "t"} | json.loads(line)
                answer = await asker.post(f"http://{admin}/v1/push", json=order)
                print(json.dumps(answer.json()), flush=True)
        stop.set()
        await gateway
uvloop.run(main())
"""

CLIENT = """
import asyncio, json, socket, sys, time
import stormline
from stormline.policy.heartbeat import Bounds, Heartbeats
from stormline.wire import bundle as bundles

async def main():
    bundle = bundles.decode(open(sys.argv[1], "rb").read())
    config = stormline.Config(report=False, network_watch="off")
    async with stormline.AsyncClient(bundle, config=config) as client, client.channel() as channel:
        runtime = client._storm.runtime()
        line = runtime.longline
        runtime.steering.strategy.heartbeats = Heartbeats(Bounds(min_s=1.0, start_s=3.0, max_s=12.0))
        client.set_activity("background")
        links, pushes = [], []
        began = line.beating.welcomed
        def welcomed(link):
            links.append(time.monotonic())
            began(link)
        line.beating.welcomed = welcomed
        async def take():
            async for push in channel.pushes():
                pushes.append(push.id)
                push.ack()
        taking = asyncio.create_task(take())
        session = await channel.wait_connected()
        keeps = line.link.stream._raw._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        print(json.dumps({"device": session.device, "keepalive": keeps}), flush=True)
        while await reader.readline():
            network = line.beating.network()
            link = line.link
            print(json.dumps({
                "links": len(links), "beat": line.beating.silence_s(), "pushes": pushes,
                "proven": runtime.steering.strategy.heartbeats.proven_s(network),
                "stands": link is not None and link.welcome is not None,
                "quiet": 0.0 if link is None else time.monotonic() - link.stream.heard_at,
                "wakeups": client.costs.wakeups,
            }), flush=True)
        taking.cancel()
asyncio.run(main())
"""


class Process:
    """A process that answers one line with one line."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def hear(self) -> Any:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], (), (), WAIT_S)
        line = self._process.stdout.readline() if readable else b""
        assert line, "it does not answer"
        return json.loads(line)

    def say(self, what: Any = None) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        self._process.stdin.flush()
        return self.hear()


@pytest.fixture(name="ends")
def _ends(tmp_path: Path) -> Iterator[tuple[Process, Process, dict[str, Any]]]:
    """Give the server, the client behind the NAT, and what the client said first."""
    profile = Profile(name="test", about="A test.", wifi=link(rtt_ms=20), server=ServerSpec(v4=2))
    folder = tmp_path / "platform"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(Stage(profile, 1, folder=tmp_path / "keys"))
        stage.topology.routers[WIFI.name].shell(NAT)

        def begin(popen: Callable[..., Any], *words: str) -> Process:
            process = popen([sys.executable, "-c", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.kill)
            return Process(process)

        server = begin(stage.topology.server.popen, SERVER, stage.addresses[0], str(folder))
        assert server.hear() == "ready"
        client = begin(stage.popen, CLIENT, str(folder / "bundle"))
        yield server, client, client.hear()


def test_heartbeat_is_found_with_three_links_lost_and_pushes_get_through_the_silence(
    ends: tuple[Process, Process, dict[str, Any]],
) -> None:
    server, client, hello = ends
    assert hello["keepalive"] == 0  # else the kernel would keep the NAT awake, and the device too
    until = monotonic() + 75.0
    while True:
        state = client.say()
        if state["links"] >= 3 and state["stands"] and state["proven"] * 0.9 < state["beat"] < state["proven"]:
            break
        assert monotonic() < until, state
        select.select((), (), (), 0.2)
    assert 3 <= state["links"] <= 4
    assert 0.8 * LIMIT_S <= state["beat"] < LIMIT_S
    for number in range(2):
        while not 0.7 * LIMIT_S < client.say()["quiet"] < LIMIT_S:  # late in a silence: most of the NAT's time is over
            assert monotonic() < until + 30.0
            select.select((), (), (), 0.05)
        pushed = server.say({"device": hello["device"], "body": "aGk=", "id": f"p{number}"})
        assert pushed["state"] == "acked", pushed
    after = client.say()
    assert after["pushes"] == ["p0", "p1"]
    assert after["links"] == state["links"]
    assert after["wakeups"] >= 4  # a beat each, two of them in vain
