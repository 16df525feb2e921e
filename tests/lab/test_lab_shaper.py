"""Real packets through the shaper: outcomes with wide margins, so that a busy machine does not matter."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from stormline.core import limits_lab
from stormline.core.errors import ConfigError
from stormline.lab import messages as m
from stormline.lab.control import Shaper
from stormline.lab.namespaces import CELL, WIFI, Topology, Uplink
from stormline.net.clock import SystemClock

pytestmark = pytest.mark.lab

StartShaper = Callable[..., Shaper]
PORT = 9000
SLACK_S = 0.05
"""How much later than due a packet may be noticed here."""
monotonic = SystemClock().monotonic


@pytest.fixture(name="server")
def _server(topology: Topology) -> Iterator[socket.socket]:
    with topology.server.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        server.bind((topology.server_v4[0], PORT))
        server.settimeout(3)
        yield server


@pytest.fixture(name="device")
def _device(topology: Topology) -> Iterator[socket.socket]:
    with topology.device.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        device.connect((topology.server_v4[0], PORT))
        device.settimeout(3)
        yield device


def received(server: socket.socket, quiet_s: float) -> list[bytes]:
    """Take what arrives until nothing does for `quiet_s`."""
    server.settimeout(quiet_s)
    packets = []
    with contextlib.suppress(TimeoutError):
        while True:
            packets.append(server.recv(2048))
    return packets


def round_trip_s(device: socket.socket, server: socket.socket) -> float:
    """Give the best of five round trips."""
    best_s = 10.0
    for _ in range(5):
        sent_s = monotonic()
        device.send(b"ping")
        data, peer = server.recvfrom(100)
        server.sendto(data, peer)
        device.recv(100)
        best_s = min(best_s, monotonic() - sent_s)
    return best_s


def test_round_trip_takes_the_delay_of_both_directions(
    start_shaper: StartShaper, device: socket.socket, server: socket.socket
) -> None:
    start_shaper({"delay_s": 0.06})
    assert 0.12 <= round_trip_s(device, server) < 0.12 + SLACK_S


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["ipv4", "ipv6"])
@pytest.mark.parametrize("uplink", [None, WIFI, CELL], ids=["default", "wifi", "cell"])
def test_source_address_chooses_the_uplink(
    start_shaper: StartShaper, topology: Topology, uplink: Uplink | None, family: socket.AddressFamily
) -> None:
    start_shaper({"delay_s": 0.01}, {"delay_s": 0.08})
    v4 = family is socket.AF_INET
    target = topology.server_v4[1] if v4 else topology.server_v6[1]
    taken = uplink or WIFI
    with (
        topology.server.socket(family, socket.SOCK_DGRAM) as server,
        topology.device.socket(family, socket.SOCK_DGRAM) as device,
    ):
        server.bind((target, PORT))
        server.settimeout(3)
        device.settimeout(3)
        if uplink is not None:
            device.bind((uplink.device_v4 if v4 else uplink.device_v6, 0))
        sent_s = monotonic()
        device.sendto(b"ping", (target, PORT))
        data, peer = server.recvfrom(100)
        server.sendto(data, peer)
        device.recv(100)
        took_s = monotonic() - sent_s
    # IPv4 is masqueraded by the router, IPv6 is not.
    assert peer[0] == (taken.wan_v4 if v4 else taken.device_v6)
    assert took_s >= (0.16 if taken is CELL else 0.02)


def test_lost_packets_are_lost_and_named(
    start_shaper: StartShaper, device: socket.socket, server: socket.socket
) -> None:
    shaper = start_shaper({"loss_pct": 20})
    for number in range(1000):
        device.send(bytes(100))
        if number % 50 == 0:
            time.sleep(0.002)
    arrived = len(received(server, 0.3))
    assert 700 < arrived < 900  # six standard deviations are 76
    wifi_up = shaper.statistics().links[0]
    assert (wifi_up.link, wifi_up.direction) == ("wifi0", m.Direction.UP)
    assert (wifi_up.offered_packets, wifi_up.delivered_packets) == (1000, arrived)
    assert wifi_up.lost["loss"] == 1000 - arrived
    drops = shaper.take_drops()
    assert len(drops.drops) == 1000 - arrived
    assert {(drop.link, drop.reason, drop.protocol, drop.size_bytes) for drop in drops.drops} == {
        ("wifi0", "loss", 17, 128)
    }
    assert shaper.take_drops().drops == []


def test_same_seed_loses_the_same_packets(
    start_shaper: StartShaper, device: socket.socket, server: socket.socket
) -> None:
    runs = []
    for seed in (1, 1, 2):
        with start_shaper({"loss_pct": 30}, seed=seed):
            for number in range(200):
                device.send(bytes([number]))
            runs.append(received(server, 0.3))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def transfer_bps(topology: Topology, size_bytes: int) -> float:
    """Send bytes from the device to the server over TCP and give the rate at which they arrive."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(topology.server.socket(socket.AF_INET, socket.SOCK_STREAM))
        listener.bind((topology.server_v4[0], PORT))
        listener.listen()
        device = stack.enter_context(topology.device.socket(socket.AF_INET, socket.SOCK_STREAM))
        device.settimeout(5)
        device.connect((topology.server_v4[0], PORT))
        server = stack.enter_context(listener.accept()[0])
        server.settimeout(5)
        device.setblocking(False)
        left = memoryview(bytes(size_bytes))
        taken, first_s = 0, 0.0
        while taken < size_bytes:
            with contextlib.suppress(BlockingIOError):
                left = left[device.send(left[:65536]) :]
            taken += len(server.recv(65536))
            first_s = first_s or monotonic()
        return taken * 8 / (monotonic() - first_s)


def test_tcp_reaches_the_rate_of_the_link_and_no_more(start_shaper: StartShaper, topology: Topology) -> None:
    shaper = start_shaper({"delay_s": 0.02, "rate_bps": 4e6, "queue_bytes": 64 * 1024})
    assert 0.8 * 4e6 < transfer_bps(topology, 1_000_000) < 1.05 * 4e6
    assert shaper.statistics().write_errors == 0


@pytest.mark.parametrize("mode", ["drop", "hold"])
def test_blackout_drops_or_holds(
    start_shaper: StartShaper, device: socket.socket, server: socket.socket, mode: str
) -> None:
    shaper = start_shaper()
    began_s = shaper.start_blackout("wifi0", mode=mode, duration_s=0.5, direction=m.Direction.UP)
    device.send(b"into the dark")
    while monotonic() < began_s + 0.5:
        time.sleep(0.01)
    device.send(b"after")
    assert received(server, 0.3) == ([b"after"] if mode == "drop" else [b"into the dark", b"after"])


def test_open_blackout_holds_until_it_is_ended(
    start_shaper: StartShaper, device: socket.socket, server: socket.socket
) -> None:
    shaper = start_shaper({"rate_bps": 8e6})
    shaper.start_blackout("wifi0", mode="hold")
    device.send(b"one")
    device.send(b"two")
    assert received(server, 0.3) == []
    assert shaper.statistics().links[0].held_packets == 2
    shaper.end_blackout("wifi0")
    assert received(server, 0.3) == [b"one", b"two"]


def test_schedule_changes_the_link_by_itself(
    start_shaper: StartShaper, device: socket.socket, server: socket.socket
) -> None:
    shaper = start_shaper()
    dark = {"at_s": 0.4, "blackout": {"mode": "drop", "duration_s": 0.4}}
    start_s = monotonic() + 0.1
    shaper.follow("wifi0", [dark, {"at_s": 0.9, "set": {"delay_s": 0.15}}], start_s=start_s)
    for number, at_s in enumerate((0.1, 0.6, 1.1)):
        while monotonic() < start_s + at_s:
            time.sleep(0.005)
        device.send(bytes([number]))
    sent_s = monotonic()
    assert [server.recv(10), server.recv(10)] == [b"\0", b"\2"]
    assert monotonic() - sent_s >= 0.14


def test_fades_come_and_go(start_shaper: StartShaper, device: socket.socket, server: socket.socket) -> None:
    shaper = start_shaper(fades={"period_s": 0.2, "duration_s": 0.1, "loss_pct": 100})
    for _ in range(200):
        device.send(b"x")
        time.sleep(0.005)
    arrived = len(received(server, 0.2))
    assert 40 < arrived < 160
    assert shaper.statistics().links[0].lost["fade"] == 200 - arrived
    shaper.set_fades("wifi0", None)
    device.send(b"x")
    assert received(server, 0.2) == [b"x"]


def test_large_packets_vanish_beyond_the_mtu(
    start_shaper: StartShaper, device: socket.socket, server: socket.socket
) -> None:
    shaper = start_shaper({"mtu_bytes": 1000})
    device.send(bytes(973))  # 28 bytes of headers: 1001
    device.send(bytes(972))
    assert [len(packet) for packet in received(server, 0.2)] == [972]
    assert shaper.statistics().links[0].lost["mtu"] == 1


def test_command_that_makes_no_sense_changes_nothing(
    start_shaper: StartShaper, device: socket.socket, server: socket.socket
) -> None:
    shaper = start_shaper()
    with pytest.raises(ConfigError, match="no link named 'moon'"):
        shaper.end_blackout("moon")
    with pytest.raises(ConfigError, match="delay_s"):
        shaper.reconfigure("wifi0", {"delay_s": -1})
    with pytest.raises(ConfigError, match="mode"):
        shaper.start_blackout("wifi0", mode="dim")
    with pytest.raises(ConfigError, match="needs one of"):
        shaper.follow("wifi0", [{"at_s": 1}])
    device.send(b"still here")
    assert server.recv(100) == b"still here"


def test_shaper_says_how_late_it_was(start_shaper: StartShaper, device: socket.socket, server: socket.socket) -> None:
    shaper = start_shaper({"delay_s": 0.01})
    for _ in range(20):
        device.send(b"x")
    assert len(received(server, 0.3)) == 20
    statistics = shaper.statistics(reset_lateness=True)
    assert statistics.deliveries.count == 20
    assert 0 <= statistics.deliveries.p50_s <= statistics.deliveries.p99_s <= statistics.deliveries.max_s
    assert statistics.wakeups.count > 0
    assert statistics.overflow_packets == 0
    assert shaper.statistics().deliveries.count == 0


def test_uplink_taken_down_sends_traffic_over_the_other(
    start_shaper: StartShaper, topology: Topology, server: socket.socket
) -> None:
    start_shaper({"delay_s": 0.01}, {"delay_s": 0.01})
    seen = []
    for wifi_up in (True, False, True):
        topology.set_uplink(WIFI, up=wifi_up)
        with topology.device.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
            device.sendto(b"x", (topology.server_v4[0], PORT))
            seen.append(server.recvfrom(10)[1][0])
    assert seen == [WIFI.wan_v4, CELL.wan_v4, WIFI.wan_v4]


def test_stopped_shaper_shows_in_what_it_cannot_hide(
    start_shaper: StartShaper, topology: Topology, device: socket.socket
) -> None:
    shaper = start_shaper()
    shaper.statistics(reset_lateness=True)
    before = topology.kernel_drops()
    os.kill(shaper.pid, signal.SIGSTOP)
    try:
        for _ in range(limits_lab.LAB_DEVICE_QUEUE_PACKETS + 500):
            device.send(b"x")
        time.sleep(0.1)
    finally:
        os.kill(shaper.pid, signal.SIGCONT)
    assert shaper.statistics().wakeups.max_s > 0.1
    assert topology.kernel_drops() - before >= 500
