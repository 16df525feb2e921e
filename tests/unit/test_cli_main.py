"""The frame of the command line: help, versions, exit codes, and one line for an error."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from stormline.cli import main

COMMANDS = [["up"], ["status"], ["doctor"], ["token"], ["bundle", "export"], ["bundle", "show"], ["apm", "top"]]


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the settings of whoever runs the tests out, and a wide terminal in."""
    for name in ("STORMLINE_BUNDLE", "STORMLINE_DEBUG", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STORMLINE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")


def _one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    return captured.err


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"stormline {metadata.version('stormline')}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f" {command[0]} " in text


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_json(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*command, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["upp"], "No such command 'upp'"),
        (["up", "--zz"], "No such option: --zz"),
        (["token"], "Missing option '--device'"),
        (["bundle", "show"], "Missing argument 'FILE'"),
        (["apm", "top", "--window", "x"], "Invalid value for '--window'"),
        (["apm", "top", "--window", "0"], "Invalid value for '--window'"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == 2
    assert said in _one_line(capsys)


@pytest.mark.parametrize("command", [["status"], ["token", "--device", "d1"], ["bundle", "export"], ["apm", "top"]])
@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_command_without_a_platform_says_how_to_start_one(
    command: list[str], json_too: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([*command, *json_too]) == 1
    assert "start one with 'stormline up --demo'" in _one_line(capsys)


def test_bundle_show_of_a_missing_file_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bundle", "show", str(tmp_path / "none.json")]) == 1
    assert "none.json: no such file" in _one_line(capsys)


def test_up_with_a_wrong_setting_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STORMLINE_PORTS__GATEWAY", "x")
    assert main.run(["up"]) == 1
    assert "STORMLINE_PORTS__GATEWAY: ports.gateway: expected a port" in _one_line(capsys)


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORMLINE_DEBUG", "1")
    with pytest.raises(Exception, match="no platform runs"):
        main.run(["status"])


def test_missing_server_package_says_what_to_install() -> None:
    code = """
import sys
sys.modules["uvloop"] = sys.modules["uvicorn"] = None
from stormline.cli import main
sys.exit(main.run(["up", "--only", "dispatch"]))
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert answer.stderr.count("\n") == 1
    assert "install stormline[server]" in answer.stderr


def test_import_of_the_frame_loads_no_server_package_and_no_http_client() -> None:
    code = """
import sys
import stormline.cli.main
print(sorted({name.partition(".")[0] for name in sys.modules} & {
    "nats", "uvloop", "uvicorn", "starlette", "fastapi", "pydantic", "chdb", "clickhouse_connect", "pyarrow",
    "httpx2", "cryptography",
}))
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


class TestDoctor:
    def test_doctor_checks_everything_the_platform_needs(self, capsys: pytest.CaptureFixture[str]) -> None:
        main.run(["doctor", "--json"])
        checks = json.loads(capsys.readouterr().out)
        assert [check["name"] for check in checks] == [
            "Python", "OpenSSL", "event loop", "nats-server", "chDB", "open files", "settings", "state folder", "ports",
        ]  # fmt: skip
        assert {check["result"] for check in checks} <= {"ok", "warn", "fail"}
        assert all(check["hint"] for check in checks if check["result"] != "ok")

    def test_doctor_changes_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        main.run(["doctor"])
        assert list(tmp_path.iterdir()) == []

    def test_doctor_wrong_settings_fail_with_the_reason(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "state").mkdir(mode=0o700)
        (tmp_path / "state" / "stormline.toml").write_text("x = 1")
        assert main.run(["doctor", "--json"]) == 1
        [check] = [check for check in json.loads(capsys.readouterr().out) if check["name"] == "settings"]
        assert check["result"] == "fail"
        assert "unknown key 'x'" in check["found"]

    def test_doctor_open_state_folder_is_a_warning(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "state").mkdir()
        (tmp_path / "state").chmod(0o755)
        main.run(["doctor", "--json"])
        [check] = [check for check in json.loads(capsys.readouterr().out) if check["name"] == "state folder"]
        assert check["result"] == "warn"
        assert check["hint"].startswith("chmod 700")

    def test_doctor_state_that_is_a_file_fails(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "state").write_text("")
        assert main.run(["doctor", "--json"]) == 1
        [check] = [check for check in json.loads(capsys.readouterr().out) if check["name"] == "state folder"]
        assert check["result"] == "fail"
