"""A client that does without what only Linux has. `make test-portable` runs everything that way; this is a part of it.

The switch is read when stormline is imported, so what is tested here runs in interpreters of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.loopback

TESTS = Path(__file__).parent
ROOT = TESTS.parents[1]
SUBSET = (
    "client/test_client_direct.py",
    "client/test_lanes.py",
    "client/test_memory.py",
    "client/test_names.py",
    "client/test_network_state.py",
    "client/test_parking.py",
    "outbound/test_net_stream.py",
    "outbound/test_net_tcpinfo.py",
)
"""What leans on one of these parts where it is there."""
WAIT_S = 240
"""Above what the subset takes on a busy machine; alone it takes about half a minute."""

WHAT_IS_THERE = """
import asyncio, json, socket
from stormline.core.values import Address
from stormline.net import network, radio, system, tcpinfo
from stormline.net.clock import SystemClock
from stormline.net.stream import open_tcp

async def connection():
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    stream = await open_tcp(Address(*server.sockets[0].getsockname()), mptcp=True)
    told = {"tcp_info": stream.tcp_info() is not None, "protocol": stream._sock.proto}
    stream.close()
    server.close()
    return told

port = network.open_port("auto")
info = port.look()
port.close()
print(json.dumps({
    "linux": system.LINUX,
    "port": type(port).__name__,
    "told": [info.interface, info.gateway, info.kind, info.airplane],
    "airplane": radio.airplane(),
    "boottime": SystemClock().boottime(),
    "available": tcpinfo.available(),
    **asyncio.run(connection()),
}))
"""


def portable(value: str) -> dict[str, str]:
    """The environment of an interpreter that does without (or not, by `value`)."""
    # An outer pytest's own variables would make the inner one its worker.
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    return {**ours, "STORMLINE_PORTABLE": value}


@pytest.mark.parametrize("value", ["1", "on", "True"])
def test_switch_leaves_nothing_of_linux(value):
    done = subprocess.run(
        [sys.executable, "-c", WHAT_IS_THERE], env=portable(value), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "linux": False,
        "port": "PollingPort",
        "told": ["", "", "unknown", None],
        "airplane": None,
        "boottime": None,
        "available": False,
        "tcp_info": False,
        "protocol": 0,
    }


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is switched off is Linux' own")
@pytest.mark.parametrize("value", ["", "0", "off"])
def test_switch_that_is_off_changes_nothing(value):
    done = subprocess.run(
        [sys.executable, "-c", WHAT_IS_THERE], env=portable(value), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["linux"], told["available"], told["tcp_info"]) == (True, True, True)
    assert told["boottime"] > 0


@pytest.mark.timeout(WAIT_S + 30)
def test_client_without_what_only_linux_has_passes_its_tests(request, tmp_path):
    seed = request.config.getoption("randomly_seed", None)
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
        f"--basetemp={tmp_path / 'inner'}",
        *([f"--randomly-seed={seed}"] if isinstance(seed, int) else []),
        *(str(TESTS / name) for name in SUBSET),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=portable("1"), capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
