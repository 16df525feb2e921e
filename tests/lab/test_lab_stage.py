"""Whole stages in real namespaces: what a client on the device meets under each profile and fault."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stormline.core.errors import ConfigError, PlatformError
from stormline.lab import faults, profiles, workload
from stormline.lab.namespaces import CELL, WIFI, cleanup_stale
from stormline.lab.profiles_model import Event, Profile, ServerSpec, always, link
from stormline.lab.specs import Behaviour, DnsSpec
from stormline.lab.stage import Stage
from stormline.lab.tun import NETNS_FOLDER
from stormline.net.clock import SystemClock

pytestmark = pytest.mark.lab

SHORT_S = 1.0
"""How long the probe waits for what will not come."""
LONG_S = 6.0
"""How long it waits for what will."""
ETC = Path("/etc/netns")
FAST = link(rtt_ms=10)
monotonic = SystemClock().monotonic

PROBE = """
import hashlib, http.client, json, socket, ssl, sys
ca, = sys.argv[1:]
trust = ssl.create_default_context(cafile=ca)
kept = {}
def connect(ask):
    tls = ask["scheme"] == "https"
    port = ask.get("port") or (443 if tls else 80)
    families = {4: socket.AF_INET, 6: socket.AF_INET6}
    target = ask.get("address")
    if target is None:
        found = socket.getaddrinfo(ask["host"], port, families.get(ask.get("family"), 0), socket.SOCK_STREAM)
        target = found[0][4][0]
    source = (ask["source"], 0) if ask.get("source") else None
    plug = socket.create_connection((target, port), ask["timeout"], source)
    if tls:
        try:
            plug = trust.wrap_socket(plug, server_hostname=ask["host"])
        except BaseException:
            plug.close()
            raise
    connection = http.client.HTTPConnection(ask["host"], port, timeout=ask["timeout"])
    connection.sock = plug
    return connection, target
for line in sys.stdin:
    ask = json.loads(line)
    name, answer, connection = ask.get("keep"), {}, None
    try:
        connection, answer["address"] = kept.pop(name) if name in kept else connect(ask)
        answer["source"] = connection.sock.getsockname()[0]
        connection.sock.settimeout(ask["timeout"])
        connection.request(ask.get("method", "GET"), ask["path"], bytes.fromhex(ask.get("body", "")) or None)
        reply = connection.getresponse()
        body = reply.read()
        answer.update(status=reply.status, body=body.hex(), error="")
        if name:
            kept[name] = connection, answer["address"]
    except Exception as error:
        answer.update(error=type(error).__name__, status=0, body="")
    if connection is not None and name not in kept:
        connection.close()
    print(json.dumps(answer), flush=True)
"""


class Play:
    """A stage, and a probe on its device that makes one request when it is told to."""

    def __init__(self, stage: Stage, probe: "subprocess.Popen[bytes]") -> None:
        self.stage = stage
        self._probe = probe

    def ask(self, number: int = 1, size: int = 500, *, wait_s: float = LONG_S, **more: Any) -> dict[str, Any]:
        scheme, _, host = self.stage.base_url.partition("://")
        ask = {"scheme": scheme, "host": host, "path": f"/item/{number}/{size}", "timeout": wait_s, **more}
        assert self._probe.stdin is not None
        assert self._probe.stdout is not None
        self._probe.stdin.write(json.dumps(ask).encode() + b"\n")
        self._probe.stdin.flush()
        readable, _, _ = select.select([self._probe.stdout], (), (), 4 * LONG_S)
        assert readable, "the probe does not answer"
        answer: dict[str, Any] = json.loads(self._probe.stdout.readline())
        answer["right"] = answer["status"] == 200 and bytes.fromhex(answer["body"]) == workload.body(number, size)
        return answer

    def wait_until(self, at_s: float, start_s: float) -> None:
        while monotonic() < start_s + at_s:
            time.sleep(0.01)


Start = Callable[..., Play]


@pytest.fixture(name="play")
def _play(tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def start(profile: Profile, seed: int = 1, duration_s: float | None = None) -> Play:
            stage = stack.enter_context(Stage(profile, seed, folder=tmp_path / "keys", duration_s=duration_s))
            words = [sys.executable, "-c", PROBE, str(stage.ca_file)]
            # Without this a lost DNS packet costs glibc's 5 s.
            environment = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"}
            probe = stage.popen(words, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.enter_context(probe)
            return Play(stage, probe)

        yield start


def steady(*happening: faults.Fault, **more: Any) -> Profile:
    """Make a fast network on which faults are there from the start."""
    return Profile(name="test", about="A test.", wifi=FAST, plan=always(*happening), **more)


def episode(fault: faults.Fault, at_s: float = 1.5, until_s: float = 3.5, **more: Any) -> Profile:
    """Make a fast network with one episode."""
    events = [Event(at_s=at_s, fault=fault, until_s=until_s)]
    return Profile(name="test", about="A test.", wifi=FAST, plan=lambda duration_s, rng: events, **more)


# -- a stage ----------------------------------------------------------------------------------------------------------
def test_stage_carries_requests_and_counts_them(play: Start) -> None:
    here = play(profiles.get("wifi"))
    start_s = here.stage.begin()
    answers = [here.ask(number, 30_000, keep="one") for number in (1, 2, 2)]
    assert all(answer["right"] for answer in answers)
    assert monotonic() - start_s >= 0.06  # name, connection, TLS and answer take a round trip of 20 ms each
    report = here.stage.finish()
    assert report.requests_by_id == {1: 1, 2: 2}
    assert report.connections == {"tcp": 1, "quic": 0}
    assert report.bytes_down > 90_000
    assert 1000 < report.bytes_up < 30_000
    assert report.dns_questions >= 1
    assert report.captive_requests == report.doh_questions == 0
    assert report.events == []
    assert report.shaper["packets"] > 60
    assert report.shaper["overflow_packets"] == 0


def test_stage_leaves_nothing_behind(tmp_path: Path) -> None:
    with Stage(profiles.get("handover"), 1, folder=tmp_path) as stage:
        prefix = stage.topology.prefix
        assert len(list(NETNS_FOLDER.glob(f"{prefix}-*"))) == 4
        assert len(list(ETC.glob(f"{prefix}-*"))) == 1
        client = stage.popen(["sleep", "300"])
        stage.begin()
    assert list(NETNS_FOLDER.glob(f"{prefix}-*")) == list(ETC.glob(f"{prefix}-*")) == []
    assert client.wait(LONG_S) == -signal.SIGKILL
    stage.close()


def test_stage_that_fails_while_it_is_made_leaves_nothing_behind(tmp_path: Path) -> None:
    stage = Stage(steady(faults.DeadAddress(address=7)), 1, folder=tmp_path)
    with pytest.raises(IndexError), stage:
        pass
    assert list(NETNS_FOLDER.glob(f"{stage.topology.prefix}-*")) == []


def test_stage_without_root_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PlatformError, match="needs root"), Stage(profiles.get("wifi"), 1, folder=tmp_path):
        pass


def test_stage_without_its_recordings_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ATT-LTE-driving.down.*STORMLINE_TRACES"):
        Stage(profiles.get("tr-lte"), 1, folder=tmp_path, trace_folder=tmp_path)


INTERRUPTED = """
import sys, time
from pathlib import Path
from stormline.lab import profiles
from stormline.lab.stage import Stage
with Stage(profiles.get("wifi"), 1, folder=Path(sys.argv[1])) as stage:
    stage.begin()
    print(stage.topology.prefix, flush=True)
    time.sleep(300)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_stage_that_is_interrupted_or_killed_goes_away(tmp_path: Path, sent: signal.Signals) -> None:
    words = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None
        prefix = run.stdout.readline().strip()
        run.send_signal(sent)
        run.wait(4 * LONG_S)
    if sent is signal.SIGKILL:
        assert any(name.startswith(prefix) for name in cleanup_stale())
    assert list(NETNS_FOLDER.glob(f"{prefix}-*")) == list(ETC.glob(f"{prefix}-*")) == []


def test_two_stages_run_beside_each_other(play: Start) -> None:
    one, other = play(profiles.get("wifi")), play(profiles.get("stall-accept"), 2)
    one.stage.begin()
    other.stage.begin()
    assert one.ask(1)["right"]
    assert other.ask(2, address=other.stage.addresses[1])["right"]
    assert one.stage.finish().requests_by_id == {1: 1}
    assert other.stage.finish().requests_by_id == {2: 1}


def test_event_that_cannot_be_carried_out_voids_the_run(play: Start) -> None:
    here = play(episode(faults.MtuCliff(mtu_bytes=0), 0.1, 0.2))
    start_s = here.stage.begin()
    here.wait_until(0.6, start_s)
    with pytest.raises(PlatformError, match=r"event of the run failed.*mtu_bytes"):
        here.stage.finish()


def test_stage_begins_once_and_before_it_finishes(play: Start) -> None:
    here = play(profiles.get("wifi"))
    with pytest.raises(ConfigError, match="has not begun"):
        here.stage.finish()
    here.stage.begin()
    with pytest.raises(ConfigError, match="begins once"):
        here.stage.begin()


# -- addresses and servers --------------------------------------------------------------------------------------------
def test_dead_address_swallows_connections_and_others_work(play: Start) -> None:
    here = play(profiles.get("dead-ip"))
    assert here.ask(address=here.stage.addresses[0], wait_s=SHORT_S)["error"] == "TimeoutError"
    assert all(here.ask(address=address)["right"] for address in here.stage.addresses[1:])


def test_addresses_die_with_their_open_connections_and_come_back(play: Start) -> None:
    here = play(episode(faults.UnitCut(unit=(0, 1))))
    start_s = here.stage.begin()
    first, second, third = here.stage.addresses
    assert here.ask(1, address=first, keep="first")["right"]
    here.wait_until(1.8, start_s)
    assert here.ask(2, keep="first", wait_s=SHORT_S)["error"] == "TimeoutError"
    assert here.ask(3, address=second, wait_s=0.5)["error"] == "TimeoutError"
    assert here.ask(4, address=third)["right"]
    here.wait_until(3.7, start_s)
    assert here.ask(5, address=first)["right"]
    report = here.stage.finish()
    assert report.events == [{"at_s": 1.5, "what": "unit-cut unit=0+1", "until_s": 3.5}]
    assert 3 not in report.requests_by_id  # 2 may come late: the kernel goes on sending what a closed socket has left


@pytest.mark.parametrize(("name", "seen"), [("stall-accept", 1), ("accept-only", 0)])
def test_server_that_accepts_and_is_silent(play: Start, name: str, seen: int) -> None:
    here = play(profiles.get(name))
    here.stage.begin()
    mute = here.stage.addresses[0]
    assert here.ask(1, address=mute, wait_s=SHORT_S)["error"] == "TimeoutError"
    assert here.ask(2, address=here.stage.addresses[1])["right"]
    report = here.stage.finish()
    assert report.requests_by_id.get(1, 0) == seen
    assert report.connections["tcp"] == 2


def test_tls_is_cut_or_reset_in_half_of_the_connections(play: Start) -> None:
    here = play(Profile(name="test", about="A test.", wifi=FAST, server=profiles.get("ssl-cut").server))
    errors = [here.ask(number, wait_s=0.4)["error"] for number in range(24)]
    assert 3 <= errors.count("TimeoutError") <= 15
    assert 1 <= errors.count("ConnectionResetError") <= 10
    assert 5 <= errors.count("") <= 19


def test_server_is_unwell_for_a_time(play: Start) -> None:
    here = play(episode(faults.Unwell(behaviour=Behaviour(error_pct=100), unit=(0, 1, 2)), 1.0, 2.0))
    start_s = here.stage.begin()
    statuses = [here.ask(keep="one")["status"]]
    for at_s in (1.3, 2.3):
        here.wait_until(at_s, start_s)
        statuses.append(here.ask(keep="one")["status"])
    assert statuses == [200, 503, 200]


# -- names ------------------------------------------------------------------------------------------------------------
def test_lying_dns_leads_to_a_wrong_certificate_and_https_tells_the_truth(play: Start) -> None:
    here = play(profiles.get("dns-hijack"))
    here.stage.begin()
    answer = here.ask()
    assert answer["error"] == "SSLCertVerificationError"
    # A question of type A for shop.lab.test, in the form of RFC 1035.
    question = "000001000001000000000000" + "0473686f70036c6162047465737400" + "00010001"
    (host,) = here.stage.dns_servers
    told = here.ask(host=host, address=host, path="/dns-query", method="POST", body=question)
    assert all(socket.inet_aton(address).hex() in told["body"] for address in here.stage.addresses)
    report = here.stage.finish()
    assert report.doh_questions == 1
    assert report.connections["tcp"] == 0


def test_dns_is_silent_for_a_time(play: Start) -> None:
    here = play(episode(faults.DnsUnwell(dns=DnsSpec(drop_pct=100)), 0.5, 2.0))
    start_s = here.stage.begin()
    here.wait_until(0.8, start_s)
    assert here.ask()["error"] == "gaierror"
    here.wait_until(2.3, start_s)
    assert here.ask()["right"]


def test_page_is_injected_on_port_80(play: Start) -> None:
    here = play(profiles.get("http-hijack"))
    here.stage.begin()
    answer = here.ask()
    assert (answer["status"], answer["right"]) == (200, False)
    assert here.ask(scheme="https")["right"]
    assert here.stage.finish().captive_requests == 1


def test_captive_portal_takes_all_over_and_lets_go(play: Start) -> None:
    here = play(episode(faults.CaptivePortal(), 0.5, 2.0))
    start_s = here.stage.begin()
    here.wait_until(0.8, start_s)
    assert here.ask()["error"] == "SSLCertVerificationError"
    assert here.ask(scheme="http")["right"] is False
    here.wait_until(2.3, start_s)
    assert here.ask()["right"]


# -- links ------------------------------------------------------------------------------------------------------------
def test_dark_link_loses_what_is_sent_and_comes_back(play: Start) -> None:
    here = play(episode(faults.Dark()))
    start_s = here.stage.begin()
    assert here.ask()["right"]
    here.wait_until(1.7, start_s)
    assert here.ask(address=here.stage.addresses[0], wait_s=SHORT_S)["error"] == "TimeoutError"
    here.wait_until(3.6, start_s)
    assert here.ask()["right"]
    assert here.stage.finish().shaper["drops"].get("blackout", 0) >= 1


def test_second_link_works_while_wifi_is_up_and_dead(play: Start) -> None:
    here = play(profiles.get("fake-wifi"), duration_s=16.0)  # dark from 2 to 10 s
    start_s = here.stage.begin()
    target = here.stage.addresses[0]
    here.wait_until(2.3, start_s)
    assert here.ask(address=target, wait_s=SHORT_S)["error"] == "TimeoutError"
    answer = here.ask(address=target, source=CELL.device_v4)
    assert (answer["right"], answer["source"]) == (True, CELL.device_v4)


def test_device_without_a_second_link_has_none(play: Start) -> None:
    here = play(profiles.get("wifi"))
    answer = here.ask(address=here.stage.addresses[0], source=CELL.device_v4, wait_s=SHORT_S)
    assert answer["error"] in ("OSError", "TimeoutError")


def test_handover_changes_the_address_and_kills_connections(play: Start) -> None:
    here = play(episode(faults.Handover(), 1.0, 2.5, cell=FAST, server=ServerSpec(v4=1, v6=1)))
    start_s = here.stage.begin()
    assert here.ask(1, family=4, keep="old")["source"] == WIFI.device_v4
    here.wait_until(1.4, start_s)
    assert here.ask(2, family=4)["source"] == CELL.device_v4
    here.wait_until(3.0, start_s)
    assert here.ask(3, keep="old", wait_s=SHORT_S)["error"] != ""
    v4, v6 = here.ask(4, family=4), here.ask(5, family=6)
    assert (v4["right"], v4["source"]) == (True, "10.71.1.3")
    assert (v6["right"], v6["source"]) == (True, "2001:db8:71:1::3")
    here.stage.finish()


def test_large_packets_vanish_beyond_the_mtu_cliff(play: Start) -> None:
    here = play(steady(faults.MtuCliff(mtu_bytes=1300, uplink=WIFI.name)))
    assert here.ask(1, 200)["right"]
    assert here.ask(2, 30_000, wait_s=SHORT_S)["error"] == "TimeoutError"


def test_round_trips_of_a_profile_are_those_published(play: Start) -> None:
    here = play(profiles.get("uber"))
    start_s = here.stage.begin()
    answer = here.ask(address=here.stage.addresses[0], wait_s=10.0)
    assert answer["error"] == "" or monotonic() - start_s > 2.0
    assert monotonic() - start_s >= 0.6  # three round trips of 200 ms at least


def test_capacity_trace_carries_requests(play: Start) -> None:
    here = play(profiles.get("syn-lte"))
    here.stage.begin()
    assert any(here.ask(number, 30_000)["right"] for number in range(3))


# -- boxes on the way -------------------------------------------------------------------------------------------------
def test_dead_ipv6_leaves_ipv4_alone(play: Start) -> None:
    here = play(profiles.get("v6-dead"))
    assert len(here.stage.addresses) == 6
    assert here.ask(address=here.stage.addresses[0])["right"]
    assert here.ask(address=here.stage.addresses[3], wait_s=SHORT_S)["error"] == "TimeoutError"


def test_ipv6_works_where_nothing_is_wrong(play: Start) -> None:
    here = play(steady(server=ServerSpec(v4=1, v6=1)))
    assert here.ask(family=6)["right"]


def test_reset_box_kills_open_connections(play: Start) -> None:
    here = play(episode(faults.Resets(pct=100), 1.0, 2.0))
    start_s = here.stage.begin()
    assert here.ask(keep="one")["right"]
    here.wait_until(1.3, start_s)
    assert here.ask(keep="one")["error"] in ("ConnectionResetError", "RemoteDisconnected")
    here.wait_until(2.3, start_s)
    assert here.ask(keep="one")["right"]


def test_syn_drop_spares_open_connections(play: Start) -> None:
    here = play(episode(faults.SynDrop(), 1.0, 4.0))
    start_s = here.stage.begin()
    assert here.ask(1, keep="one")["right"]
    here.wait_until(1.3, start_s)
    assert here.ask(2, keep="one")["right"]
    assert here.ask(3, wait_s=SHORT_S)["error"] == "TimeoutError"


def test_nat_that_forgets_drops_idle_connections(play: Start) -> None:
    here = play(profiles.get("nat-forgets"))
    start_s = here.stage.begin()
    assert here.ask(1, keep="busy")["right"]
    assert here.ask(1, keep="idle")["right"]
    for number in range(1, 5):
        here.wait_until(number * 1.0, start_s)
        assert here.ask(2, keep="busy")["right"]
    assert here.ask(3, keep="idle", wait_s=SHORT_S)["error"] == "TimeoutError"
    assert here.ask(4)["right"]


@pytest.mark.parametrize(
    ("fault", "tcp_443", "tcp_80", "udp"),
    [
        (faults.OnlyPort(port=443), True, False, False),
        (faults.OnlyProtocol(protocol="tcp"), True, True, False),
        (faults.OnlyProtocol(protocol="udp"), False, False, True),
        (faults.UdpBlock(), True, True, False),
        (faults.UdpLossy(pct=50, police_kbytes_per_s=64), True, True, True),
    ],
    ids=lambda value: value.what.replace(" ", "-") if isinstance(value, faults.Fault) else None,
)
def test_filter_lets_through_what_it_says(
    play: Start, fault: faults.Fault, tcp_443: bool, tcp_80: bool, udp: bool
) -> None:
    here = play(steady(fault))
    assert here.ask(wait_s=LONG_S if tcp_443 else SHORT_S)["right"] is tcp_443
    assert here.ask(scheme="http", wait_s=LONG_S if tcp_80 else SHORT_S)["right"] is tcp_80
    topology, address = here.stage.topology, (here.stage.addresses[0], 443)
    with (
        topology.server.socket(socket.AF_INET, socket.SOCK_DGRAM) as server,
        topology.device.socket(socket.AF_INET, socket.SOCK_DGRAM) as device,
    ):
        server.bind(address)
        server.settimeout(SHORT_S)
        for _ in range(200):
            device.sendto(b"datagram", address)
        arrived = 0
        with contextlib.suppress(TimeoutError):
            while True:
                server.recv(100)
                arrived += 1
    if udp:
        assert (60 < arrived < 140) if isinstance(fault, faults.UdpLossy) else arrived == 200
    else:
        assert arrived == 0


def test_policed_udp_loses_what_is_beyond_the_rate(play: Start) -> None:
    here = play(steady(faults.UdpLossy(pct=1, police_kbytes_per_s=32)))
    topology, address = here.stage.topology, (here.stage.addresses[0], 443)
    with (
        topology.server.socket(socket.AF_INET, socket.SOCK_DGRAM) as server,
        topology.device.socket(socket.AF_INET, socket.SOCK_DGRAM) as device,
    ):
        server.bind(address)
        server.settimeout(SHORT_S)
        for _ in range(200):
            device.sendto(bytes(1000), address)
        arrived = 0
        with contextlib.suppress(TimeoutError):
            while True:
                server.recv(2000)
                arrived += 1
    assert 5 < arrived < 100  # 200 KB at once: about a second's worth passes


def test_lossy_ipv6_loses_its_share(play: Start) -> None:
    here = play(steady(faults.V6Lossy(pct=50), server=ServerSpec(v4=1, v6=1)))
    topology, address = here.stage.topology, (here.stage.addresses[1], 9000)
    with (
        topology.server.socket(socket.AF_INET6, socket.SOCK_DGRAM) as server,
        topology.device.socket(socket.AF_INET6, socket.SOCK_DGRAM) as device,
    ):
        server.bind(address)
        server.settimeout(SHORT_S)
        for _ in range(200):
            device.sendto(b"datagram", address)
        arrived = 0
        with contextlib.suppress(TimeoutError):
            while True:
                server.recv(100)
                arrived += 1
    assert 60 < arrived < 140
    assert here.ask(address=here.stage.addresses[0])["right"]
