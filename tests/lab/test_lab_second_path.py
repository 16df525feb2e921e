"""A WiFi that is up and dead, with cellular beside it: what the client does over the second way, and what never."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stormline.lab import results, run
from stormline.lab.faults import Dark
from stormline.lab.profiles_model import Profile, ServerSpec, between, link
from stormline.lab.stage import Stage
from stormline.net import system

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

CLIENT = """
import asyncio, json, ssl, sys
import stormline
from stormline.client.outside import Outside
from stormline.core import errors
from stormline.net.network import open_port
from stormline.outbound.doh_server import DohServer

base, ca, how = sys.argv[1:4]
settings = json.loads(sys.argv[4])
plain = settings.pop("plain", ["wifi0", "cell0"])
settings["doh"] = [DohServer(url, tuple(ips)) for url, ips in settings.get("doh", ())]
settings.setdefault("deadline_s", 4.0)

async def ask(client, number, **more):
    try:
        answer = await client.get(f"{base}/item/{number}/1000", extensions=more)
    except errors.TransportError as error:
        return {"status": 0, "error": str(error), "sent": error.maybe_delivered, "story": story(error.trace)}
    return {"status": answer.status_code, "story": story(answer.extensions["stormline"])}

def story(trace):
    return [line for _, line in trace.timeline.story]

async def main():
    trust = ssl.create_default_context(cafile=ca)
    outside = Outside(network=lambda how: open_port(how, plain=plain), environ={})
    config = stormline.Config(report=False, http2=False, network_watch=how, **settings)
    async with stormline.AsyncClient(config=config, verify=trust, outside=outside) as client:
        print("ready", flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command = json.loads(line)
            asks = [ask(client, number, **command["more"]) for number in command["numbers"]]
            told = await asyncio.gather(*asks)
            paths = client._storm.runtime()._paths
            carried = sum(path.meter.bytes_down for path in paths.others)
            level, words = client.quality.level, client.quality.evidence
            line = {"told": told, "away": paths.away, "carried": carried, "level": level, "words": words}
            print(json.dumps(line), flush=True)

asyncio.run(main())
"""

Say = Callable[..., dict[str, Any]]


class Device:
    """A stage, and a client on its device that makes requests when it is told to."""

    def __init__(self, stage: Stage, client: "subprocess.Popen[bytes]") -> None:
        self.stage = stage
        self._client = client

    def get(self, *numbers: int, **more: Any) -> dict[str, Any]:
        """Make GETs side by side; `more` are extensions."""
        assert self._client.stdin is not None
        self._client.stdin.write(json.dumps({"numbers": numbers, "more": more}).encode() + b"\n")
        self._client.stdin.flush()
        told: dict[str, Any] = json.loads(self.line())
        return told

    def line(self) -> bytes:
        assert self._client.stdout is not None
        line = self._client.stdout.readline()
        assert line, "the client has ended"
        return line


Start = Callable[..., Device]


@pytest.fixture(name="device")
def _device(tmp_path: Path) -> Iterator[Start]:
    """Give what starts a client on a device whose WiFi is dark for a share of 40 s."""
    if system.PORTABLE:
        pytest.skip("SO_BINDTODEVICE, which leads over the second way, is switched off (STORMLINE_PORTABLE)")
    with contextlib.ExitStack() as stack:

        def start(
            dark_from: float, dark_to: float, *, watch: str = "netlink", doh: bool = False, **settings: Any
        ) -> Device:
            plan = between(dark_from, dark_to, Dark())
            fast = link(rtt_ms=20)
            profile = Profile(name="test", about="A test.", wifi=fast, cell=fast, plan=plan, server=ServerSpec(v4=1))
            stage = stack.enter_context(Stage(profile, 1, folder=tmp_path / "keys", duration_s=40.0))
            if doh:
                settings["doh"] = [[stage.doh_url, list(stage.dns_servers)]]
            words = [sys.executable, "-c", CLIENT, stage.base_url, str(stage.ca_file), watch, json.dumps(settings)]
            client = stack.enter_context(stage.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            stack.callback(client.kill)
            device = Device(stage, client)
            assert device.line() == b"ready\n"
            return device

        yield start


def wait_dark(device: Device) -> None:
    """Begin, with a name that is known and no connection kept, and wait until the WiFi is dark."""
    device.stage.begin()
    assert [each["status"] for each in device.get(1)["told"]] == [200]


def notes(told: dict[str, Any]) -> str:
    return "\n".join(line for each in told["told"] for line in each["story"])


@pytest.mark.parametrize("watch", ["netlink", "polling"])
def test_requests_in_the_dark_go_over_the_other_way_and_what_follows_too(device: Start, watch: str) -> None:
    here = device(0.02, 1.0, watch=watch)
    wait_dark(here)
    first = dark(here)
    assert "is dark for" in notes(first)
    assert "over cell0 too" in notes(first)
    assert first["away"] is True
    then = here.get(50, 51, 52)
    assert [each["status"] for each in then["told"]] == [200] * 3
    assert "dark" not in notes(then)
    assert then["level"] not in ("unknown", "bad")
    assert then["words"].startswith("over cell0: ")


def test_name_that_nobody_has_asked_for_is_found_in_the_dark_by_dns_over_https(device: Start) -> None:
    here = device(0.0, 1.0, doh=True, deadline_s=10.0)
    here.stage.begin()
    told = here.get(1)
    assert [each["status"] for each in told["told"]] == [200], notes(told)
    assert "asked for over cell0 instead" in notes(told)
    assert told["away"] is True


def test_request_that_may_not_be_repeated_is_moved_before_it_is_sent_and_sent_once(device: Start) -> None:
    here = device(0.02, 1.0)
    wait_dark(here)
    told = dark(here, **{"stormline.retries": False, "stormline.join_reads": False})
    assert "over cell0 instead" in notes(told)
    assert max(here.stage.finish().requests_by_id.values()) == 1


def test_way_that_heals_is_the_first_again(device: Start) -> None:
    here = device(0.02, 0.2)
    wait_dark(here)
    # A machine that stood still for a second looks dark too; then the WiFi answers after all, and is not left.
    assert any(dark(here)["away"] for _ in range(3))
    for number in range(200, 1200):
        told = here.get(number)
        assert [each["status"] for each in told["told"]] == [200]
        if not told["away"]:
            assert told["level"] not in ("unknown", "bad")
            assert not told["words"].startswith("over ")
            return
    pytest.fail("the WiFi is back, and nobody has noticed")


@pytest.mark.parametrize(
    "settings", [{"second_path": False}, {"second_path_bytes": 0}, {"plain": ["cell0"]}], ids=["off", "no-bytes", "vpn"]
)
def test_nothing_goes_another_way_where_that_is_switched_off_costs_too_much_or_would_go_around_a_vpn(
    device: Start, settings: dict[str, Any]
) -> None:
    here = device(0.02, 1.0, **settings)
    wait_dark(here)
    lost = 0
    for number in range(100, 4000):
        told = here.get(number)
        assert told["carried"] == 0
        lost += told["told"][0]["status"] == 0
        if lost:
            break
    assert lost


def dark(device: Device, **more: Any) -> dict[str, Any]:
    """Ask until a request has met the dark; each is answered."""
    for number in range(100, 4000):
        told = device.get(number, 10_000 + number, **more)
        if "is dark for" in notes(told):
            return told
        if not more:
            assert [each["status"] for each in told["told"]] == [200, 200], told
    raise AssertionError("it never was dark")


def test_second_path_saves_a_run_on_a_dead_wifi_and_without_it_requests_fail(tmp_path: Path) -> None:
    found = []
    for without in ((), ("second-link",)):
        keys = run.plan(["fake-wifi"], ["stormline"], [1], duration_s=40.0, without=without)
        found += run.run_all(keys, jobs=1, out=tmp_path / f"{len(found)}.jsonl", environ=os.environ)
    whole, less = found
    assert isinstance(whole, results.Result)
    assert whole.ok / whole.requests >= 0.99
    assert whole.level_prompt_pct is not None
    assert whole.level_prompt_pct >= 90.0, whole.levels
    assert less.ok / less.requests < 0.9
    assert whole.duplicates <= whole.requests * 0.1
