"""The operator's commands against a running platform."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stormline.assembly import layout
from stormline.net.clock import SystemClock
from stormline.testing.platform import RunningPlatform
from stormline.wire import bundle as wire_bundle
from stormline.wire import jws, tokens

pytestmark = pytest.mark.platform


def _json(platform: RunningPlatform, *arguments: str) -> dict[str, object]:
    answer = platform.command(*arguments, "--json")
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == ""
    shown: dict[str, object] = json.loads(answer.stdout)
    return shown


def _verify(platform: RunningPlatform, token: str) -> tokens.DeviceToken:
    resolved = layout.read(layout.Layout(platform.state).resolved, layout.Resolved)
    assert resolved is not None
    keys = jws.load_public_keys(resolved.token_keys)
    return tokens.verify(token, keys=keys, wall=SystemClock().wall())


class TestToken:
    def test_token_is_signed_by_the_platform_for_device_and_user(self, platform: RunningPlatform) -> None:
        minted = _json(platform, "token", "--device", "d1", "--user", "ann")
        claims = _verify(platform, str(minted["token"]))
        assert (claims.app, claims.device, claims.user) == ("demo", "d1", "ann")
        assert minted["expires_at"] == claims.exp

    def test_token_for_people_is_the_token_alone(self, platform: RunningPlatform) -> None:
        answer = platform.command("token", "--device", "d1")
        assert _verify(platform, answer.stdout.strip()).device == "d1"

    def test_token_for_an_impossible_device_is_one_line(self, platform: RunningPlatform) -> None:
        answer = platform.command("token", "--device", "x" * 300)
        assert answer.returncode == 1
        assert answer.stderr.count("\n") == 1
        assert answer.stderr.startswith("error: dispatch: HTTP 400: ")
        assert "128 bytes" in answer.stderr


class TestServices:
    def test_services_lists_the_shop_s(self, platform: RunningPlatform) -> None:
        (orders,) = json.loads(platform.command("services", "--json").stdout)
        assert (orders["name"], orders["version"]) == ("orders", "1.0.0")
        assert sorted(orders["methods"]) == ["orders.create", "orders.get"]

    def test_services_for_people_is_a_table(self, platform: RunningPlatform) -> None:
        answer = platform.command("services")
        assert (answer.returncode, answer.stderr) == (0, "")
        assert "orders.create orders.get" in answer.stdout


class TestBundle:
    def test_export_gives_the_bundle_of_the_running_platform(self, platform: RunningPlatform) -> None:
        answer = platform.command("bundle", "export")
        bundle = wire_bundle.decode(answer.stdout.encode())
        assert bundle.addresses() == (platform.addresses["dispatch"],)
        assert bundle.token == ""

    def test_export_as_json_is_one_line_of_the_same(self, platform: RunningPlatform) -> None:
        answer = platform.command("bundle", "export", "--json")
        assert answer.stdout.count("\n") == 1
        assert wire_bundle.decode(answer.stdout.encode()) == wire_bundle.decode(
            platform.command("bundle", "export").stdout.encode()
        )

    def test_export_for_a_device_holds_its_token_and_is_private(
        self, platform: RunningPlatform, tmp_path: Path
    ) -> None:
        file = tmp_path / "bundle.json"
        shown = _json(platform, "bundle", "export", "--device", "d1", "--user", "ann", "--out", str(file))
        assert shown == {"file": str(file), "app": "demo", "device": "d1"}
        assert file.stat().st_mode & 0o777 == 0o600
        claims = _verify(platform, wire_bundle.decode(file.read_bytes()).token)
        assert (claims.device, claims.user) == ("d1", "ann")

    def test_export_without_a_device_may_be_read_by_all(self, platform: RunningPlatform, tmp_path: Path) -> None:
        file = tmp_path / "bundle.json"
        assert platform.command("bundle", "export", "--out", str(file)).returncode == 0
        assert file.stat().st_mode & 0o777 == 0o644

    def test_export_user_without_device_is_refused(self, platform: RunningPlatform) -> None:
        answer = platform.command("bundle", "export", "--user", "ann")
        assert answer.returncode == 1
        assert answer.stderr == "error: --user needs --device: a token is for a device\n"

    def test_export_to_a_missing_folder_names_it(self, platform: RunningPlatform, tmp_path: Path) -> None:
        answer = platform.command("bundle", "export", "--out", str(tmp_path / "none" / "b.json"))
        assert answer.returncode == 1
        assert str(tmp_path / "none" / "b.json") in answer.stderr
        assert answer.stderr.count("\n") == 1

    @pytest.mark.parametrize("json_too", [[], ["--json"]])
    def test_show_tells_all_but_the_token(self, platform: RunningPlatform, tmp_path: Path, json_too: list[str]) -> None:
        file = tmp_path / "bundle.json"
        platform.command("bundle", "export", "--device", "d1", "--out", str(file))
        answer = platform.command("bundle", "show", str(file), *json_too)
        assert answer.returncode == 0
        assert str(platform.addresses["dispatch"]) in answer.stdout
        assert "present" in answer.stdout
        assert wire_bundle.decode(file.read_bytes()).token not in answer.stdout


class TestStatusAndDoctor:
    def test_status_for_people_shows_every_address_and_the_console_link(self, platform: RunningPlatform) -> None:
        answer = platform.command("status")
        assert answer.returncode == 0
        for address in platform.addresses.values():
            assert str(address) in answer.stdout
        assert f"console: {platform.admin.console_link}" in answer.stdout

    def test_doctor_beside_a_running_platform_finds_its_ports_well_used(self, platform: RunningPlatform) -> None:
        checks = {check["name"]: check for check in json.loads(platform.command("doctor", "--json").stdout)}
        assert checks["ports"]["result"] == "ok"
        assert str(platform.pid) in checks["ports"]["found"]
        assert checks["state folder"]["result"] == "ok"


class TestApmTop:
    def test_top_as_json_has_total_and_hosts(self, platform: RunningPlatform) -> None:
        answer = _json(platform, "apm", "top", "--window", "60")
        assert answer["window_s"] == 60
        assert isinstance(answer["total"], dict)
        assert isinstance(answer["hosts"], list)

    def test_top_for_people_is_a_table(self, platform: RunningPlatform) -> None:
        answer = platform.command("apm", "top")
        assert answer.returncode == 0
        assert "last 300 s" in answer.stdout
        assert "success" in answer.stdout

    def test_top_window_beyond_the_bound_says_the_bound(self, platform: RunningPlatform) -> None:
        answer = platform.command("apm", "top", "--window", "999999999")
        assert answer.returncode == 1
        assert answer.stderr.startswith("error: apm: HTTP 400: window_s must be")

    @pytest.mark.parametrize("json_too", [[], ["--json"]])
    def test_top_watch_ends_with_ctrl_c_and_no_traceback(self, platform: RunningPlatform, json_too: list[str]) -> None:
        with subprocess.Popen(
            [sys.executable, "-m", "stormline.cli.main", "apm", "top", "--watch", *json_too],
            env={**platform.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stderr is not None
                assert process.stdout.readline()
                process.send_signal(signal.SIGINT)
                assert process.wait(10) == 130
                assert process.stderr.read() == ""
            finally:
                process.kill()


class TestDiagnose:
    def test_diagnosis_ends_in_the_apm_and_is_counted_there(self, platform: RunningPlatform, tmp_path: Path) -> None:
        file = tmp_path / "bundle.json"
        assert platform.command("bundle", "export", "--out", str(file)).returncode == 0
        url = "http://127.0.0.1:1/cart?x=1"
        asked = platform.command("diagnose", url, "--no-trace", "--json", "--bundle", str(file))
        assert asked.returncode == 1, asked.stderr
        made = json.loads(asked.stdout)
        assert (made["verdict"], made["url"]) == ("server_side", "http://127.0.0.1:1/cart")
        told = _json(platform, "apm", "diagnoses", "--window", "600")
        assert told["verdicts"] == [{"verdict": "server_side", "times": 1, "devices": 1}]
        [kept] = told["diagnoses"]  # type: ignore[misc]
        assert kept["checks"] == made["checks"]
        people = platform.command("apm", "diagnoses")
        assert people.returncode == 0
        assert "server_side: 1 times, 1 devices" in people.stdout
