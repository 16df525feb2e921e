"""The bench of the gateway measures what it says: a small run of its real processes."""

import pytest

from stormline.assembly.authority import ensure_authority
from stormline.bench import gateway
from stormline.net.clock import SystemClock, SystemRng

pytestmark = pytest.mark.loopback


@pytest.fixture(name="files")
def _files(tmp_path):
    return ensure_authority(tmp_path, clock=SystemClock(), rng=SystemRng()).issue("gateway", names=["bench.test"])


@pytest.mark.parametrize("what", ["ours", "ws"])
def test_crowd_stands_echoes_and_costs_something(files, what):
    with gateway._host(what, files) as server:
        for carrier in ("ws", "wss") if what == "ws" else ("plain", "tls", "ws", "wss"):
            with server.crowd(carrier, 20) as crowd:
                assert gateway._per(server, 100, lambda crowd=crowd: crowd.ask("echo 100")) > 0.0
                assert server.resident_kib() > 1000.0


@pytest.mark.parametrize("what", ["ours", "bare"])
@pytest.mark.parametrize("carrier", ["plain", "tls"])
def test_pushes_reach_the_whole_crowd(files, what, carrier):
    with gateway._host(what, files) as server, server.crowd(carrier, 5) as crowd:
        server.push(crowd, 2)
        assert crowd.ask("echo 20") == "done\n"


def test_echo_may_take_a_task(files):
    with gateway._host("ours", files) as server, server.crowd("tls", 2, "task") as crowd:
        assert crowd.ask("echo 20") == "done\n"


@pytest.mark.skipif(gateway._MOSQUITTO is None, reason="mosquitto is not installed")
def test_broker_delivers_to_the_whole_crowd(files, tmp_path):
    with gateway._mosquitto(files, tmp_path) as server:
        for carrier in ("plain", "tls"):
            with server.crowd(carrier, 5) as crowd:
                server.push(crowd, 3)
                assert crowd.ask("echo 20") == "done\n"
