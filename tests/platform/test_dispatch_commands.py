"""`stormline dispatch` against a running platform: what clients are answered changes with it."""

import base64
import json
import os
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from stormline.net.clock import SystemClock
from stormline.testing.platform import RunningPlatform, running_platform

pytestmark = pytest.mark.platform

HOST = "api.shop.example"
SETTINGS = f"""
[api.upstreams]
"{HOST}" = "http://127.0.0.1:9"
"""
LATE_S = 20.0
"""Until the engine is back and found."""


@pytest.fixture(scope="module", name="platform")
def _platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlatform]:
    """A platform of its own: these tests change what it answers."""
    state = tmp_path_factory.mktemp("dispatch-commands") / "state"
    state.mkdir(mode=0o700)
    (state / "stormline.toml").write_text(SETTINGS)
    with running_platform(state, "--only", "dispatch", "--only", "gateway", demo=False) as platform:
        yield platform


def _run(platform: RunningPlatform, *arguments: str) -> dict[str, Any]:
    answer = platform.command("dispatch", *arguments, "--json")
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == ""
    shown: dict[str, Any] = json.loads(answer.stdout)
    return shown


def _refused(platform: RunningPlatform, *arguments: str) -> str:
    answer = platform.command("dispatch", *arguments)
    assert answer.returncode == 1
    assert answer.stderr.count("\n") == 1
    assert answer.stderr.startswith("error: ")
    return answer.stderr


def _plan(platform: RunningPlatform) -> dict[str, Any]:
    """Give what a client is answered; that its signature is good is shown elsewhere."""
    with httpx2.Client(verify=ssl.create_default_context(cafile=platform.admin.ca_file), trust_env=False) as client:
        answer = client.get(
            f"https://{platform.addresses['dispatch']}/v1/plan",
            params={"app": "demo", "host": HOST},
            extensions={"sni_hostname": "dispatch.stormline.test"},
        )
    payload = answer.text.split("\n")[0].split(".")[1]
    plan: dict[str, Any] = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return plan


def _edit(platform: RunningPlatform, file: Path, **change: Any) -> dict[str, Any]:
    """Take the rules that hold into a file, with the host's rule changed."""
    answer = platform.command("dispatch", "show", "--out", str(file))
    assert answer.returncode == 0, answer.stderr
    rules: dict[str, Any] = json.loads(file.read_text())
    rules["hosts"][HOST].update(change)
    file.write_text(json.dumps(rules))
    return rules


def test_set_changes_what_clients_are_answered(platform: RunningPlatform, tmp_path: Path) -> None:
    before = _plan(platform)
    file = tmp_path / "rules.json"
    _edit(platform, file, deadline_s=7.5)
    assert _run(platform, "diff", str(file))["count"] == 1
    assert _run(platform, "set", str(file), "--dry-run")["dry_run"] is True
    assert _plan(platform)["version"] == before["version"]
    changed = _run(platform, "set", str(file), "--who", "ann", "-m", "OPS-41")
    assert (changed["served"], changed["differences"][0]["after"]) == (True, "7.5")
    after = _plan(platform)
    assert after["version"] == changed["version"] > before["version"]
    assert after["hosts"][HOST]["deadline_s"] == 7.5
    line = _run(platform, "history")["log"][0]
    assert (line["who"], line["what"], line["why"]) == ("ann", "set", "OPS-41")
    assert "changed since" not in _refused(platform, "set", str(file), "--over")  # it says what holds: no change
    assert "was made from version" in _refused(platform, "set", str(file))


def test_health_shows_what_the_probes_found_and_drains(platform: RunningPlatform) -> None:
    gateway = str(platform.addresses["gateway"])

    def target() -> dict[str, Any]:
        [found, *_] = [each for each in _run(platform, "health")["targets"] if each["address"] == gateway]
        return dict(found)

    clock = SystemClock()
    end = clock.monotonic() + LATE_S
    while target()["verdict"] != "well":
        assert clock.monotonic() < end, target()
    _run(platform, "drain", gateway, "-m", "new kernel")
    assert target()["drained"] is True
    shown = platform.command("dispatch", "health").stdout
    assert gateway in shown
    assert "well, drained" in shown
    _run(platform, "undrain", gateway)
    assert target()["drained"] is False


def test_set_takes_rules_from_standard_input_and_people_read_what_changed(
    platform: RunningPlatform, tmp_path: Path
) -> None:
    rules = _edit(platform, tmp_path / "rules.json", deadline_s=6.0)
    answer = platform.command("dispatch", "set", "-", input=json.dumps(rules))
    assert answer.returncode == 0, answer.stderr
    assert f"+ hosts/{HOST}/deadline_s: 6.0" in answer.stdout
    assert f"version {_plan(platform)['version']} holds" in answer.stdout


def test_set_what_cannot_be_is_one_clear_line(platform: RunningPlatform, tmp_path: Path) -> None:
    version = _plan(platform)["version"]
    file = tmp_path / "rules.json"
    rules = _edit(platform, file)
    file.write_text(json.dumps(rules | {"apps": {"demo": [HOST, "nowhere.example"]}}))
    assert "lists host 'nowhere.example', which has no rules" in _refused(platform, "set", str(file))
    for each in rules["hosts"][HOST]["endpoints"]:
        each["port"] = 9
    file.write_text(json.dumps(rules))
    assert f"no endpoint answers for {HOST}" in _refused(platform, "set", str(file))
    file.write_text("{")
    assert "not JSON" in _refused(platform, "set", str(file))
    file.write_text("[]")
    assert "not a rule set" in _refused(platform, "set", str(file))
    assert "none.json" in _refused(platform, "set", str(tmp_path / "none.json"))
    assert _plan(platform)["version"] == version


def test_rollback_brings_back_what_held_under_a_higher_version(platform: RunningPlatform, tmp_path: Path) -> None:
    first = _plan(platform)
    file = tmp_path / "rules.json"
    _edit(platform, file, deadline_s=5.0)
    second = _run(platform, "set", str(file))["version"]
    assert _run(platform, "diff", "--old", str(first["version"]))["count"] == 1
    back = _run(platform, "rollback", "-m", "a mistake")["version"]
    after = _plan(platform)
    assert after["version"] == back > second > first["version"]
    assert after["hosts"] == first["hosts"]
    assert "version 9999 is not kept" in _refused(platform, "rollback", "9999")


def test_rollout_is_started_stepped_and_halted(platform: RunningPlatform, tmp_path: Path) -> None:
    before = _plan(platform)
    file = tmp_path / "rules.json"
    _edit(platform, file, deadline_s=4.0)
    started = _run(platform, "rollout", "start", str(file), "--steps", "10,50")
    assert started["rollout"]["steps"] == [10.0, 50.0, 100.0]
    assert "is being rolled out" in _refused(platform, "set", str(file))
    assert _run(platform, "rollout", "step")["rollout"]["percent"] == 50.0
    shown = platform.command("dispatch", "rollout", "show")
    assert f"version {started['newest']} goes to 50 % of the devices" in shown.stdout
    assert _plan(platform)["version"] == before["version"]  # the question names no device
    assert _run(platform, "rollout", "halt")["rollout"] is None
    after = _plan(platform)
    assert (after["version"], after["hosts"]) == (started["newest"] + 1, before["hosts"])
    assert "no roll-out is open" in _refused(platform, "rollout", "step")


def test_drained_endpoint_is_left_out_of_plans_until_it_is_given_back(
    platform: RunningPlatform, tmp_path: Path
) -> None:
    gateway, centre = platform.addresses["gateway"], platform.addresses["dispatch"]
    file = tmp_path / "rules.json"
    rules = _edit(platform, file)
    more = {"host": centre.host, "port": centre.port, "carrier": "h1", "server_name": "dispatch.stormline.test"}
    rules["hosts"][HOST]["endpoints"].append(more)
    file.write_text(json.dumps(rules))
    _run(platform, "set", str(file))

    def ports() -> set[int]:
        return {each["port"] for each in _plan(platform)["hosts"][HOST]["endpoints"]}

    assert ports() == {gateway.port, centre.port}
    _run(platform, "drain", str(gateway))
    assert ports() == {centre.port}
    _run(platform, "drain", str(centre))
    assert len(ports()) == 1, "one is handed out whatever is drained"
    _run(platform, "undrain", str(gateway))
    _run(platform, "undrain", str(centre))
    assert ports() == {gateway.port, centre.port}
    _run(platform, "rollback")


def test_drain_and_undrain_are_kept_and_logged(platform: RunningPlatform) -> None:
    gateway = str(platform.addresses["gateway"])
    assert _run(platform, "drain", gateway, "-m", "new kernel")["drains"] == [gateway]
    assert f"drained: {gateway}" in platform.command("dispatch", "status").stdout
    assert _run(platform, "drain", "127.0.0.1")["drains"] == [gateway, "127.0.0.1"]
    assert _run(platform, "undrain", "127.0.0.1")["drains"] == [gateway]
    assert _run(platform, "undrain", gateway)["drains"] == []
    assert "is not drained" in _refused(platform, "undrain", gateway)
    history = platform.command("dispatch", "history").stdout
    assert "undrain" in history
    assert "new kernel" in history


@pytest.mark.parametrize("arguments", [("diff",), ("diff", "x.json", "--old", "1"), ("history", "--limit", "0")])
def test_commands_used_wrongly_say_how(platform: RunningPlatform, arguments: tuple[str, ...]) -> None:
    answer = platform.command("dispatch", *arguments)
    assert answer.returncode in (1, 2)
    assert answer.stderr.startswith("error: ")


def test_engine_killed_rules_go_on_and_outlive_the_platform(tmp_path: Path) -> None:
    state, file = tmp_path / "state", tmp_path / "rules.json"
    state.mkdir(mode=0o700)
    (state / "stormline.toml").write_text(SETTINGS)
    only = ("--only", "dispatch", "--only", "gateway")
    with running_platform(state, *only, demo=False) as platform:
        before = _plan(platform)
        os.kill(platform.wait_event("answers", part="nats")["pid"], signal.SIGKILL)
        assert _plan(platform)["hosts"] == before["hosts"]
        _edit(platform, file, deadline_s=7.5)
        end = SystemClock().monotonic() + LATE_S
        while (answer := platform.command("dispatch", "set", str(file), "--json")).returncode != 0:
            assert "HTTP 503" in answer.stderr
            assert SystemClock().monotonic() < end
        version = json.loads(answer.stdout)["version"]
        assert _plan(platform)["version"] == version
    with running_platform(state, *only, demo=False) as platform:
        # The host's rule is the operator's own; the gateway's new port follows the settings.
        after = _plan(platform)
        assert after["version"] > version
        assert after["hosts"][HOST]["deadline_s"] == 7.5
        assert after["gateways"][0]["port"] == platform.addresses["gateway"].port


def test_commands_without_a_platform_say_so(tmp_path: Path, platform: RunningPlatform) -> None:
    answer = platform.command("dispatch", "status", "--state", str(tmp_path / "none"))
    assert answer.returncode == 1
    assert "no platform runs on" in answer.stderr


def test_centre_without_an_engine_serves_and_says_that_it_cannot_be_changed(tmp_path: Path) -> None:
    with running_platform(tmp_path / "state", "--only", "dispatch", demo=False) as platform:
        assert _run(platform, "status")["stale"] is False
        assert "no engine" in _refused(platform, "history")
        platform.command("dispatch", "show", "--out", str(tmp_path / "rules.json"))
        assert "no engine" in _refused(platform, "set", str(tmp_path / "rules.json"))
