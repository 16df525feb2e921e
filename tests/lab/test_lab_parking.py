"""A request that waits for the network, on a device whose only interface is taken down and comes back.

Nothing tells the client: it finds out by what its attempts meet, and by looking for a route.
"""

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stormline.lab.namespaces import WIFI
from stormline.lab.profiles_model import Profile, link
from stormline.lab.stage import Stage

pytestmark = pytest.mark.lab

WAIT_S = 30.0
"""How long the client may take for one line, with room for a busy machine."""

CLIENT = """
import asyncio, json, ssl, sys
import psutil
import stormline
from stormline.core import errors

base, ca = sys.argv[1], sys.argv[2]

def say(**what):
    print(json.dumps(what), flush=True)

def sockets():
    return len([each for each in psutil.Process().net_connections("tcp") if each.raddr])

async def main():
    trust = ssl.create_default_context(cafile=ca)
    client = stormline.AsyncClient(verify=trust, config=stormline.Config(deadline_s=5.0))
    loop = asyncio.get_running_loop()
    parking = client._storm.runtime().parking
    say(status=(await client.get(base + "/item/1/100")).status_code)
    await loop.run_in_executor(None, sys.stdin.readline)          # the interface is down now
    client.network_changed()                                      # what stood is gone with its address
    try:
        await client.get(base + "/item/2/100")
        say(plain="answered")
    except errors.TransportError as error:
        say(plain=type(error).__mro__[1].__name__, maybe_delivered=error.maybe_delivered, absent=parking.absent)
    more = {"stormline.wait_for_network": 60.0}
    connections = client.costs.connections
    asking = [asyncio.ensure_future(client.get(f"{base}/item/{n}/100", extensions=more)) for n in (3, 4)]
    asking.append(asyncio.ensure_future(client.post(base + "/item/5/100", extensions=more)))
    while parking.parked < 3:
        await asyncio.sleep(0.01)
    await asyncio.sleep(3.0)                                      # longer than a look
    say(parked=parking.parked, sockets=sockets(), connections=client.costs.connections - connections)
    answers = await asyncio.gather(*asking)
    say(statuses=[each.status_code for each in answers],
        attempts=[len(each.extensions["stormline"].record.attempts) for each in answers],
        queued_s=min(each.extensions["stormline"].record.stages_ms["queued"] for each in answers) / 1000)
    await client.aclose()
asyncio.run(main())
"""


class Device:
    """The client on the device, and the network under it."""

    def __init__(self, stage: Stage, client: "subprocess.Popen[bytes]") -> None:
        self.stage = stage
        self._client = client

    def hear(self) -> dict[str, Any]:
        """Wait for the client's next line."""
        assert self._client.stdout is not None
        readable, _, _ = select.select([self._client.stdout], (), (), WAIT_S)
        line = self._client.stdout.readline() if readable else b""
        assert line, "the client does not answer"
        heard: dict[str, Any] = json.loads(line)
        return heard

    def go_on(self) -> None:
        """Tell the client that the network has been changed."""
        assert self._client.stdin is not None
        self._client.stdin.write(b"\n")
        self._client.stdin.flush()


@pytest.fixture(name="device")
def _device(tmp_path: Path) -> Iterator[Device]:
    profile = Profile(name="test", about="A test.", wifi=link(rtt_ms=20))
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(Stage(profile, 1, folder=tmp_path / "keys"))
        words = [sys.executable, "-c", CLIENT, stage.base_url, str(stage.ca_file)]
        client = stage.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.enter_context(client)
        stack.callback(client.kill)
        yield Device(stage, client)


def test_requests_wait_while_the_interface_is_down_and_go_when_it_is_back(device: Device) -> None:
    assert device.hear() == {"status": 200}
    device.stage.topology.set_uplink(WIFI, up=False)
    device.go_on()
    plain = device.hear()
    assert plain["plain"] in ("ConnectError", "ResolveError"), plain
    assert (plain["maybe_delivered"], plain["absent"]) == (False, True), plain
    parked = device.hear()
    assert parked == {"parked": 3, "sockets": 0, "connections": 0}
    device.stage.topology.set_uplink(WIFI, up=True)
    back = device.hear()
    assert back["statuses"] == [200, 200, 404], back  # the origin serves no POST: it was asked, and answered
    assert back["attempts"] == [1, 1, 1], back
    assert back["queued_s"] > 3.0
