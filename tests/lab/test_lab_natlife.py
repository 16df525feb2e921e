"""`stormline diagnose --nat` behind real NATs: kernels that forget after seconds, and drop or reset what they have
forgotten. What is measured must have the true limit in its middle."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stormline.lab import diagnosing
from stormline.lab.diagnosing import Case
from stormline.lab.faults import NatForgets
from stormline.lab.namespaces import WIFI
from stormline.lab.profiles_model import ServerSpec
from stormline.lab.stage import Stage

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

LIMIT_S = 16.0
"""The longest silence that is tried; the ladder is 1, 1.5, 2.2, 3.3, 4.9, 7.2, 10.8, 16 seconds."""
BLUR_S = 0.3
"""Packets take time, and the last of an answer is our kernel's acknowledgement, up to 40 ms later."""
RESETS = """
nft -f - <<END
table ip resets {
  chain forward {
    type filter hook forward priority filter - 1
    iifname "lan0" ct state invalid meta l4proto tcp reject with tcp reset
  }
}
END
"""
NO_RESETS = "nft delete table ip resets"


@pytest.fixture(name="home", scope="module")
def _home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, Case]]:
    """Give a home's network over IPv4, whose router is a NAT, and a case in it."""
    wifi = next(each for each in diagnosing.CASES if each.name == "wifi")
    spec = ServerSpec(v4=1, v6=0, behaviour=wifi.profile.server.behaviour)
    options = (*wifi.options, "--no-trace", "--nat", "--nat-limit", str(LIMIT_S))
    case = replace(wifi, profile=replace(wifi.profile, name="wifi-nat", server=spec), options=options)
    with diagnosing.place(case, 1, tmp_path_factory.mktemp("keys")) as stage:
        yield stage, case


def nat_of(stage: Stage, case: Case, folder: Path) -> dict[str, Any]:
    """Measure."""
    with diagnosing.made(stage, case):
        text, code = diagnosing.ask(stage, case, folder)
    said = json.loads(text)
    assert (said["verdict"], code) == ("ok", 0)
    [check] = [each for each in said["checks"] if each["name"] == "nat"]
    assert check["state"] == "ok", check
    assert check["took_s"] < LIMIT_S + 20.0
    return dict(check["data"] | {"detail": check["detail"]})


@pytest.mark.parametrize("true_s", [2, 6])
def test_limit_of_a_nat_is_between_what_answered_and_what_was_lost(
    home: tuple[Stage, Case], tmp_path: Path, true_s: int
) -> None:
    stage, case = home
    found = nat_of(stage, replace(case, faults=lambda _: (NatForgets(after_s=true_s),)), tmp_path)
    assert true_s / 2.0 < found["answered_s"] < true_s + BLUR_S, found
    assert true_s - BLUR_S < found["lost_s"] < 2.0 * true_s, found
    assert found["sure"]
    assert not found["reset"]
    assert found["keep_alive_s"] < true_s
    assert "lost without a word" in found["detail"]


def test_nat_that_sends_a_reset_is_told_from_one_that_is_silent(home: tuple[Stage, Case], tmp_path: Path) -> None:
    stage, case = home
    router = stage.topology.routers[WIFI.name]
    router.shell(RESETS)
    try:
        found = nat_of(stage, replace(case, faults=lambda _: (NatForgets(after_s=3),)), tmp_path)
    finally:
        router.shell(NO_RESETS)
    assert 1.5 < found["answered_s"] < 3.0 + BLUR_S, found
    assert 3.0 - BLUR_S < found["lost_s"] < 6.0, found
    assert found["reset"]
    assert "is reset after" in found["detail"]


def test_healthy_network_keeps_it_longer_than_was_tried(home: tuple[Stage, Case], tmp_path: Path) -> None:
    stage, case = home
    found = nat_of(stage, case, tmp_path)
    assert found["lost_s"] is None
    assert 0.95 * LIMIT_S < found["answered_s"] < LIMIT_S + 5.0, found
    assert len(found["tried"]) == 8
    assert "longer than that" in found["detail"]
