"""What the laboratory makes goes away, however it ends; what it cannot do it says."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stormline.core.errors import ConfigError, PlatformError
from stormline.lab import messages as m
from stormline.lab.control import Shaper
from stormline.lab.namespaces import WIFI, Topology, cleanup_stale
from stormline.lab.tun import NETNS_FOLDER, inside, open_tun

pytestmark = pytest.mark.lab

GONE_S = 5.0
STARTS_AND_WAITS = """
import sys, time
from stormline.lab import messages as m
from stormline.lab.control import Shaper
from stormline.lab.namespaces import WIFI, Topology
topology = Topology()
shaper = Shaper(m.Setup(links=[topology.link_setup(WIFI)]))
inside = topology.device.popen(["sleep", "300"])
print(topology.prefix, shaper.pid, inside.pid, flush=True)
time.sleep(300)
"""


def namespaces(prefix: str) -> list[Path]:
    return list(NETNS_FOLDER.glob(f"{prefix}-*"))


def wait_gone(pid: int) -> bool:
    """Wait for a process that is not ours to end; a dead one that nobody has collected counts as gone."""
    for _ in range(int(GONE_S / 0.02)):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


def test_topology_leaves_nothing_behind() -> None:
    with Topology(server_addresses=2) as topology:
        assert len(namespaces(topology.prefix)) == 4
        assert topology.server_v4 == ("203.0.113.10", "203.0.113.11")
        assert "2001:db8:53::11" in topology.server.run("ip", "address")
        sleeper = topology.device.popen(["sleep", "300"])
    assert namespaces(topology.prefix) == []
    assert sleeper.wait(GONE_S) == -signal.SIGKILL
    topology.close()


def test_two_topologies_do_not_meet() -> None:
    with Topology() as one, Topology() as other:
        assert one.prefix != other.prefix
    assert namespaces(one.prefix) == namespaces(other.prefix) == []


def test_killed_run_leaves_no_shaper_and_its_namespaces_are_removed_later() -> None:
    run = subprocess.Popen([sys.executable, "-c", STARTS_AND_WAITS], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    with run.stdout:
        prefix, shaper_pid, inside_pid = run.stdout.readline().split()
    try:
        assert cleanup_stale() == []  # it lives, so what it made stays
        assert len(namespaces(prefix)) == 4
    finally:
        run.kill()
        run.wait()
    assert wait_gone(int(shaper_pid))
    assert {name.rpartition("-1-")[0] for name in cleanup_stale()} == {prefix.rpartition("-1")[0]}
    assert namespaces(prefix) == []
    assert wait_gone(int(inside_pid))


def test_failed_command_inside_says_why() -> None:
    with Topology() as topology, pytest.raises(PlatformError, match=f"{topology.device.name}.*nowhere"):
        topology.device.run("ip", "link", "show", "nowhere")


def test_shaper_with_a_wrong_setup_does_not_start() -> None:
    with Topology() as topology:
        with pytest.raises(ConfigError, match="speed"):
            Shaper(m.Setup(links=[topology.link_setup(WIFI, up={"speed": 1})]))
        with pytest.raises(ConfigError, match="no trace named"):
            Shaper(m.Setup(links=[topology.link_setup(WIFI)], traces=["../etc/passwd"]))
        nowhere = m.Port("/run/netns/nowhere", "wifi0")
        with pytest.raises(PlatformError, match="cannot enter"):
            Shaper(m.Setup(links=[m.LinkSetup(name="x", near=nowhere, far=nowhere)]))
        with Shaper(m.Setup(links=[topology.link_setup(WIFI)], real_time=False)) as shaper:
            assert shaper.ready == m.Ready("other", False)
            with pytest.raises(PlatformError, match="attach"):
                Shaper(m.Setup(links=[topology.link_setup(WIFI)]))  # one shaper holds a device


def test_shaper_killed_under_us_is_an_error_and_no_hang() -> None:
    with Topology() as topology, Shaper(m.Setup(links=[topology.link_setup(WIFI)])) as shaper:
        os.kill(shaper.pid, signal.SIGKILL)
        with pytest.raises(PlatformError, match="shaper"):
            shaper.statistics()


def test_device_made_inside_a_namespace_stays_there() -> None:
    with Topology() as topology:
        before = os.readlink("/proc/self/ns/net")
        descriptor = open_tun("extra0", topology.device.path)
        try:
            assert "extra0" in topology.device.run("ip", "link")
            assert os.readlink("/proc/self/ns/net") == before
        finally:
            os.close(descriptor)
    with pytest.raises(PlatformError, match="cannot enter"), inside(topology.device.path):
        pass
