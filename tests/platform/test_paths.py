"""The paths a user walks, with every part a real process: a request, a call, a push, and what is seen of them after.

Then the same with something broken: what a person reads must be one line that says what is wrong.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stormline.assembly import layout
from stormline.net.clock import SystemClock
from stormline.testing.platform import RunningPlatform, running_platform
from stormline.wire import bundle as wire_bundle

pytestmark = pytest.mark.platform

PATIENCE_S = 20.0
"""Bound for things that take a second or two here: five to ten times what they need."""


def _json(platform: RunningPlatform, *arguments: str) -> Any:
    answer = platform.command(*arguments, "--json")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def _error(platform: RunningPlatform, *arguments: str) -> str:
    """Run a command that fails, and give its one line."""
    answer = platform.command(*arguments)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "Traceback" not in answer.stderr
    lines = answer.stderr.splitlines()
    assert len(lines) == 1, answer.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def _until(condition: Callable[[], bool], what: str) -> None:
    clock = SystemClock()
    end = clock.monotonic() + PATIENCE_S
    while not condition():
        assert clock.monotonic() < end, f"not within {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.1)


class Listener:
    """`stormline listen --json` in a child, its lines read as they come."""

    def __init__(self, platform: RunningPlatform, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stormline.cli.main", "listen", *arguments, "--json"],
            env=platform.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[dict[str, Any]] = []
        self._ended: tuple[int, str] | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.lines.append(json.loads(line))

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == kind]

    def end(self, number: signal.Signals | None = signal.SIGINT) -> tuple[int, str]:
        """End it, and give its exit code and what it wrote on standard error. May be called again."""
        if self._ended is not None:
            return self._ended
        if number is not None and self._process.poll() is None:
            self._process.send_signal(number)
        try:
            code = self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
        self._reader.join(PATIENCE_S)
        error = self._process.stderr.read() if self._process.stderr else ""
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._ended = (code, error)
        return self._ended


@contextlib.contextmanager
def _listening(platform: RunningPlatform, *arguments: str) -> Iterator[Listener]:
    listener = Listener(platform, *arguments)
    try:
        _until(lambda: bool(listener.events("connected")), "the listener is connected")
        yield listener
    finally:
        listener.end()


class TestGet:
    def test_get_goes_by_dispatch_and_the_long_connection_and_gives_the_body(self, platform: RunningPlatform) -> None:
        shown = _json(platform, "get", "https://shop.demo/feed")
        assert shown["status"] == 200
        assert isinstance(json.loads(shown["body"]), list)
        record = shown["timeline"]
        assert (record["means"], record["address"]) == ("long", str(platform.addresses["gateway"]))
        assert set(record["stages_ms"]) >= {"queued", "plan", "connect", "tls", "send", "first_byte", "body", "decode"}
        assert sum(record["stages_ms"].values()) == pytest.approx(record["total_ms"])

    def test_get_for_people_writes_the_body_alone(self, platform: RunningPlatform) -> None:
        answer = platform.command("get", "https://shop.demo/feed")
        assert (answer.returncode, answer.stderr) == (0, "")
        assert json.loads(answer.stdout)[0]["item"] == 1

    def test_get_verbose_tells_the_story_beside_the_body(self, platform: RunningPlatform) -> None:
        answer = platform.command("get", "-v", "https://shop.demo/feed")
        assert json.loads(answer.stdout)
        for told in (
            r"plan version \d+: 3 endpoints",
            r"try long",
            r"connected sl-tls 127",
            r"status 200",
            r"in all: ",
        ):
            assert re.search(told, answer.stderr), answer.stderr

    def test_get_large_binary_comes_whole_to_a_file(self, platform: RunningPlatform, tmp_path: Path) -> None:
        file = tmp_path / "image"
        shown = _json(platform, "get", "https://shop.demo/image/6", "--out", str(file))
        length = next(value for name, value in shown["headers"] if name == "content-length")
        assert file.stat().st_size == shown["size_bytes"] == int(length)
        assert file.stat().st_size > 256 * 1024  # more than one window of credit

    def test_get_posts_a_body_and_upstream_errors_come_through(self, platform: RunningPlatform) -> None:
        made = _json(platform, "get", "https://shop.demo/orders", "-X", "POST", "-d", '{"item": 2}')
        assert made["status"] == 201
        assert json.loads(made["body"])["item"] == 2
        missing = _json(platform, "get", "https://shop.demo/nothing-here")
        assert missing["status"] == 404

    def test_get_fail_option_turns_a_status_into_an_exit_code(self, platform: RunningPlatform) -> None:
        answer = platform.command("get", "https://shop.demo/status/503", "--fail")
        assert answer.returncode == 1
        assert answer.stderr == "error: HTTP status 503\n"

    def test_get_unknown_host_goes_directly_and_says_what_failed(self, platform: RunningPlatform) -> None:
        assert "nope.invalid" in _error(platform, "get", "https://nope.invalid/")

    def test_get_host_unknown_to_dispatch_is_asked_directly(self, platform: RunningPlatform) -> None:
        shown = _json(platform, "get", f"http://{platform.addresses['shop']}/feed")
        assert (shown["status"], shown["timeline"]["means"]) == (200, "direct")

    @pytest.mark.parametrize("url", ["ftp://shop.demo/", "shop.demo/feed", "https://", "http://[::1", "https://a b/"])
    def test_get_useless_url_is_one_line(self, platform: RunningPlatform, url: str) -> None:
        _error(platform, "get", url)

    def test_get_with_an_exported_bundle_needs_no_state_folder(self, platform: RunningPlatform, tmp_path: Path) -> None:
        file = tmp_path / "bundle.json"
        assert platform.command("bundle", "export", "--out", str(file)).returncode == 0
        answer = subprocess.run(
            [sys.executable, "-m", "stormline.cli.main", "get", "https://shop.demo/feed"],
            env={**os.environ, "STORMLINE_BUNDLE": str(file), "STORMLINE_STATE": str(tmp_path / "elsewhere")},
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        assert json.loads(answer.stdout)


class TestCall:
    def test_call_reaches_the_service_and_gives_its_answer(self, platform: RunningPlatform) -> None:
        made = _json(platform, "call", "orders.create", '{"item": 3}')["result"]
        assert made["item"] == 3
        assert _json(platform, "call", "orders.get", json.dumps({"id": made["id"]}))["result"] == made

    def test_call_with_a_key_is_done_once(self, platform: RunningPlatform) -> None:
        first, second = (_json(platform, "call", "orders.create", '{"item": 4}', "--key", "k-1") for _ in range(2))
        assert first["result"]["id"] == second["result"]["id"]

    @pytest.mark.parametrize(
        ("method", "params", "said"),
        [
            ("orders.create", "{}", "call-failed"),
            ("orders.no_such_method", "{}", "call-not-found"),
            ("nobody.home", "null", "call-not-found"),
            ("Orders.*", "{}", "method 'Orders.*'"),
            ("orders.create", "{item", "is not JSON"),
        ],
    )
    def test_call_that_cannot_be_done_says_why(
        self, platform: RunningPlatform, method: str, params: str, said: str
    ) -> None:
        assert said in _error(platform, "call", method, params)


class TestPush:
    def test_push_to_a_listening_device_is_shown_once_and_acknowledged(self, platform: RunningPlatform) -> None:
        with _listening(platform, "--device", "d-push") as listener:
            result = _json(platform, "push", "--device", "d-push", '{"text": "hi"}', "--topic", "news", "--id", "m-1")
            again = _json(platform, "push", "--device", "d-push", '{"text": "hi"}', "--topic", "news", "--id", "m-1")
            assert (result["state"], again["state"]) == ("acked", "acked")
            _until(lambda: bool(listener.events("push")), "the push is shown")
        assert listener.events("push") == [{"event": "push", "id": "m-1", "topic": "news", "body": {"text": "hi"}}]

    def test_listen_for_people_ends_after_count_pushes(self, platform: RunningPlatform) -> None:
        with _listening(platform, "--device", "d-count", "--count", "2") as listener:
            for text in ("one", "two"):
                assert _json(platform, "push", "--device", "d-count", json.dumps(text))["state"] == "acked"
            code, error = listener.end(None)
        assert (code, error) == (0, "")
        assert [each["body"] for each in listener.events("push")] == ["one", "two"]

    def test_push_to_an_absent_device_says_offline(self, platform: RunningPlatform) -> None:
        answer = platform.command("push", "--device", "d-nobody", '"x"')
        assert answer.returncode == 1
        assert answer.stdout.startswith("offline")
        assert answer.stderr.count("\n") == 1

    def test_listen_is_replaced_by_a_newer_login_of_the_same_device(self, platform: RunningPlatform) -> None:
        with _listening(platform, "--device", "d-twice") as first, _listening(platform, "--device", "d-twice"):
            code, error = first.end(None)
            assert code == 1
            assert re.fullmatch(r"error: replaced: [^\n]+\n", error)
            assert _json(platform, "push", "--device", "d-twice", '"y"')["state"] == "acked"


class TestTelemetry:
    def test_every_request_and_call_leaves_its_timeline_in_the_apm(self, platform: RunningPlatform) -> None:
        before = {row["host"]: row["calls"] for row in _json(platform, "apm", "top")["hosts"]}
        assert platform.command("get", "https://shop.demo/feed").returncode == 0
        assert platform.command("call", "orders.create", '{"item": 5}').returncode == 0
        _error(platform, "get", "https://down.invalid/")
        after = {row["host"]: row for row in _json(platform, "apm", "top")["hosts"]}
        assert after["shop.demo"]["calls"] == before.get("shop.demo", 0) + 1
        assert after["orders"]["calls"] == before.get("orders", 0) + 1
        assert after["down.invalid"]["success_pct"] == 0
        assert after["down.invalid"]["failures"] == {"dns.failed": before.get("down.invalid", 0) + 1}


class TestBroken:
    """Parts that die or lie. Each test has a platform of its own."""

    @pytest.fixture(name="own")
    def _own(self, tmp_path: Path) -> Iterator[RunningPlatform]:
        with running_platform(tmp_path / "state") as platform:
            yield platform

    def test_upstream_down_is_said_by_the_gateway_and_the_rest_goes_on(self, own: RunningPlatform) -> None:
        pid = _pid(own, "shop")
        os.kill(pid, signal.SIGSTOP)
        try:
            line = _error(own, "get", "https://shop.demo/feed", "--deadline", "2")
            assert "shop.demo" in line or "in time" in line or "deadline" in line or "waiting" in line
        finally:
            os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)
        own.wait_event("died", part="shop")
        _until(lambda: own.command("get", "https://shop.demo/feed").returncode == 0, "the shop serves again")

    def test_engine_killed_calls_say_unavailable_requests_go_on_and_all_recovers(self, own: RunningPlatform) -> None:
        assert own.command("call", "orders.create", '{"item": 1}').returncode == 0
        pid = _pid(own, "nats")
        os.kill(pid, signal.SIGSTOP)  # away, and not restarted yet: what a partition looks like
        try:
            line = _error(own, "call", "orders.create", '{"item": 1}', "--deadline", "3")
            assert re.search("call-unavailable|call-deadline|gave up waiting|no answer|no whole answer", line), line
            assert own.command("get", "https://shop.demo/feed").returncode == 0
        finally:
            os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGKILL)
        _until(lambda: own.command("call", "orders.create", '{"item": 1}').returncode == 0, "calls work again")
        with _listening(own, "--device", "d-after"):
            assert _json(own, "push", "--device", "d-after", '"z"')["state"] == "acked"

    def test_gateway_killed_under_a_listener_it_comes_back_and_pushes_reach_it(self, own: RunningPlatform) -> None:
        with _listening(own, "--device", "d-stay") as listener:
            assert _json(own, "push", "--device", "d-stay", '"before"')["state"] == "acked"
            os.kill(_pid(own, "gateway"), signal.SIGKILL)
            own.wait_event("died", part="gateway")
            _until(
                lambda: own.command("push", "--device", "d-stay", '"after"', "--id", "after").returncode == 0,
                "a push reaches the device again",
            )
            _until(lambda: len(listener.events("push")) == 2, "both pushes were shown")
        assert [each["body"] for each in listener.events("push")] == ["before", "after"]

    def test_dispatch_dead_a_client_with_a_stored_plan_goes_on(self, own: RunningPlatform) -> None:
        assert own.command("get", "https://shop.demo/feed").returncode == 0
        pid = _pid(own, "dispatch")
        os.kill(pid, signal.SIGSTOP)
        try:
            assert own.command("get", "https://shop.demo/feed").returncode == 0
        finally:
            os.kill(pid, signal.SIGCONT)

    def test_bundle_with_a_foreign_key_no_answer_is_believed(self, own: RunningPlatform, tmp_path: Path) -> None:
        bundle = wire_bundle.decode(own.command("bundle", "export").stdout.encode())
        foreign = dict.fromkeys(bundle.dispatch_keys, "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo")
        file = tmp_path / "foreign.json"
        file.write_bytes(wire_bundle.encode(wire_bundle.Bundle(
            app=bundle.app, dispatch=bundle.dispatch, dispatch_name=bundle.dispatch_name, dispatch_keys=foreign,
            ca_pem=bundle.ca_pem, preload=bundle.preload,
        )))  # fmt: skip
        answer = own.command("get", "https://shop.demo/feed", "-v", "--bundle", str(file), "--state", str(tmp_path))
        assert answer.returncode == 1
        line = own.command("call", "orders.create", '{"item": 1}', "--bundle", str(file), "--state", str(tmp_path))
        assert "rejected (signature)" in line.stderr

    @pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"format": "stormline-bundle/9"}', b"[]"])
    def test_bundle_that_is_none_is_one_line_naming_the_file(
        self, platform: RunningPlatform, tmp_path: Path, content: bytes
    ) -> None:
        file = tmp_path / "odd.json"
        file.write_bytes(content)
        assert str(file) in _error(platform, "get", "https://shop.demo/feed", "--bundle", str(file))


def _pid(platform: RunningPlatform, part: str) -> int:
    run = layout.read(layout.Layout(platform.state).role(part), layout.RoleRun)
    assert run is not None, part
    return run.pid
