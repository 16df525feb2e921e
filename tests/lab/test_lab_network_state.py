"""What a client knows of its network, of a real kernel: news of the routing socket, sleep, and verdicts on faults."""

import contextlib
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from stormline.lab import verdicts
from stormline.lab.namespaces import Namespace
from stormline.lab.tun import inside
from stormline.net import probes, system
from stormline.net.netlink import NetlinkPort
from stormline.policy.verdict import Confidence, Finding
from stormline.testing.world import wait_until

pytestmark = pytest.mark.lab
needs_linux = pytest.mark.skipif(system.PORTABLE, reason="what is asked here is switched off (STORMLINE_PORTABLE)")

numbers = itertools.count(9000)  # beside those of topologies


class Cable(NamedTuple):
    """Two machines at the ends of a cable."""

    device: Namespace
    router: Namespace


@pytest.fixture(name="cable")
def _cable() -> Iterator[Cable]:
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    names = [f"stormline-{os.getpid()}-{started}-{next(numbers)}-{role}" for role in ("device", "router")]
    with contextlib.ExitStack() as stack:
        device, router = (Namespace(name) for name in names)
        stack.callback(device.remove)
        stack.callback(router.remove)
        device.shell(f"ip link set lo up\nip link add eth0 type veth peer name lan0 netns {router.name}")
        router.shell("ip link set lan0 up\nip address add 192.0.2.1/24 dev lan0\nip address add 192.0.2.9/24 dev lan0")
        yield Cable(device, router)


UP = "ip link set eth0 up\nip address add 192.0.2.2/24 dev eth0\nip route add default via 192.0.2.1 dev eth0\n"


@pytest.fixture(name="port")
def _port(cable: Cable) -> Iterator[NetlinkPort]:
    if system.PORTABLE:
        pytest.skip("the routing socket is switched off (STORMLINE_PORTABLE)")
    with inside(cable.device.path):
        port = NetlinkPort()
    yield port
    port.close()


async def test_kernel_tells_what_changes_the_way_out_and_what_it_is_now(cable: Cable, port: NetlinkPort) -> None:
    device = cable.device
    told = [port.look()]
    port.watch(lambda: told.append(port.look()))
    assert told[0].routed is False
    device.shell(UP)
    await wait_until(lambda: told and told[-1].routed)
    info = port.look()
    assert (info.kind, info.interface, info.gateway, info.prefixes) == (
        "wired", "eth0", "192.0.2.1", ("192.0.2.0/24",)
    )  # fmt: skip
    assert "192.0.2.2" in info.addresses
    for change, seen in (
        ("ip address add 192.0.2.3/24 dev eth0", lambda info: "192.0.2.3" in info.addresses),
        ("ip address delete 192.0.2.3/24 dev eth0", lambda info: "192.0.2.3" not in info.addresses),
        ("ip route replace default via 192.0.2.9 dev eth0", lambda info: info.gateway == "192.0.2.9"),
        ("ip link set eth0 down", lambda info: info.routed is False),
    ):
        told.clear()
        device.shell(change)
        await wait_until(lambda seen=seen: told and seen(told[-1]))  # type: ignore[misc]


async def test_routes_of_others_wake_nobody(cable: Cable, port: NetlinkPort) -> None:
    device = cable.device
    told: list[int] = []
    port.watch(lambda: told.append(1))
    device.shell(UP)
    await wait_until(lambda: told and port.look().routed)
    told.clear()
    lines = "\n".join(f"ip route add 10.{n // 250}.{n % 250}.0/24 via 192.0.2.1" for n in range(300))
    device.shell(lines)
    device.shell("ip route replace default via 192.0.2.9 dev eth0")
    await wait_until(lambda: told)
    assert len(told) <= 3


async def test_carrier_that_is_gone_is_no_network(cable: Cable, port: NetlinkPort) -> None:
    device = cable.device
    device.shell(UP)
    assert port.look().routed is True
    cable.router.shell("ip link set lan0 down")
    await wait_until(lambda: port.look().routed is False)


async def test_gateway_is_asked_on_its_link(cable: Cable, port: NetlinkPort) -> None:
    device = cable.device
    device.shell(UP)
    info = port.look()
    with inside(device.path):  # for the socket it makes; this thread is the loop's
        assert await probes.gateway(info, port.neighbour) is Finding.ANSWERED
        link = port.look().gateway_link
        assert link is not None
        assert len(link.reveal()) == 12
        cable.router.shell("ip link set lan0 arp off\nip address flush dev lan0")
        device.shell("ip neigh flush dev eth0")
        assert await probes.gateway(info, port.neighbour) is Finding.SILENT
        assert await probes.gateway(info, None) in (Finding.SILENT, Finding.UNKNOWN)


# -- sleep ------------------------------------------------------------------------------------------------------------
SLEEPER = """
import asyncio, ctypes, os, sys
import stormline
CLONE_NEWTIME = 0x80
libc = ctypes.CDLL(None, use_errno=True)

def sleep(seconds):
    # A time namespace whose boot clock is ahead is what a machine looks like after it slept.
    if libc.unshare(CLONE_NEWTIME):
        raise OSError(ctypes.get_errno(), "unshare")
    with open("/proc/self/timens_offsets", "w") as file:
        file.write(f"boottime {seconds} 0")
    ours = os.open("/proc/self/ns/time_for_children", os.O_RDONLY)
    if libc.setns(ours, CLONE_NEWTIME):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(ours)

async def main(url):
    told = []
    async with stormline.AsyncClient(config=stormline.Config(network_watch="off")) as client:
        client.on_network(lambda status: told.append(status.change and status.change.change.value))
        print((await client.get(url)).text)
        print((await client.get(url)).text)
        sleep(600)
        print((await client.get(url)).text)
        print((await client.get(url)).text, told)

asyncio.run(main(sys.argv[1]))
"""


@needs_linux
def test_machine_that_slept_has_its_idle_connections_made_anew(tmp_path: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            text = str(self.client_address[1]).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/"
        done = subprocess.run(
            [sys.executable, "-c", SLEEPER, url], capture_output=True, text=True, timeout=40, check=False
        )
        server.shutdown()
        thread.join()
    if "unshare" in done.stderr:
        pytest.skip("this kernel has no time namespaces")
    assert done.returncode == 0, done.stderr
    before, again, after, last = done.stdout.splitlines()
    assert before == again
    assert after not in (before, "")
    assert last == f"{after} ['woken']"


# -- verdicts ---------------------------------------------------------------------------------------------------------
@needs_linux
@pytest.mark.timeout(300)
def test_verdicts_on_every_fault_are_right_and_never_surely_wrong(tmp_path: Path) -> None:
    """One seed of each case; `stormline lab verdicts` makes as many as one likes."""
    found = verdicts.run_all(verdicts.CASES, [1], folder=tmp_path, jobs=len(verdicts.CASES))
    assert {each.case.name: each.wrong_high for each in found if each.wrong_high} == {}
    assert {each.case.name: (each.said, each.why) for each in found if not each.right} == {}
    sure = {each.case.name for each in found if each.confidence is Confidence.HIGH}
    assert sure >= {"offline", "airplane", "forbidden", "portal", "dns-dead", "fake-wifi", "server-down"}


@pytest.mark.timeout(200)
def test_verdicts_without_netlink_are_never_surely_wrong(tmp_path: Path) -> None:
    names = {"wifi", "offline", "forbidden", "portal", "dns-dead", "subway"}
    cases = [each for each in verdicts.CASES if each.name in names]
    found = verdicts.run_all(cases, [1], folder=tmp_path, jobs=len(cases), watch="polling")
    assert {each.case.name: each.wrong_high for each in found if each.wrong_high} == {}
    assert {each.case.name: (each.said, each.why) for each in found if not each.right} == {}
