"""A whole platform as real processes, for tests: started as `stormline up --demo` is, on free ports, in its own folder.

    with running_platform(tmp_path) as platform:
        platform.addresses["gateway"]
        platform.command("apm", "top", "--json").stdout

Every process of it is found by a mark in its environment, so one that was left behind is found too.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stormline.assembly import layout
from stormline.core import errors, ids
from stormline.core.values import Address, parse_address
from stormline.net.clock import SystemClock, SystemRng
from stormline.settings.model import Ports

MARK: Final = "PLATFORM_UNDER_TEST"
START_TIMEOUT_S: Final = 50.0
"""Wait for `ready`: above the platform's own bound for a role, so that its own message is what a test shows."""
STOP_TIMEOUT_S: Final = 5.0
"""From the signal to the end of every process, as promised to the user."""
COMMAND_TIMEOUT_S: Final = 30.0
_STEP_S: Final = 0.02

_clock = SystemClock()


class RunningPlatform:
    """`stormline up` in a child process. Made by `start_platform`.

    Attributes:
        state: its state folder.
        pid: the supervisor.
        environ: environment under which `stormline` commands find it.
        addresses: by part, known once `wait_ready` has returned.
    """

    def __init__(self, state: Path, process: "subprocess.Popen[bytes]", environ: Mapping[str, str], mark: str) -> None:
        self.state = state
        self.environ = dict(environ)
        self.addresses: dict[str, Address] = {}
        self._process = process
        self._mark = mark

    @property
    def pid(self) -> int:
        """The supervisor's process."""
        return self._process.pid

    @property
    def admin(self) -> layout.Admin:
        """Addresses and keys of its admin APIs."""
        admin = layout.read(layout.Layout(self.state).admin, layout.Admin)
        assert admin is not None, "the platform is not ready"  # noqa: S101
        return admin

    @property
    def events(self) -> list[dict[str, Any]]:
        """What `up --json` has printed so far."""
        lines = _output(self.state).read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def errors(self) -> str:
        """What it has printed on standard error so far."""
        return _errors(self.state).read_text()

    def log(self, part: str) -> str:
        """Give the log of a part."""
        return layout.Layout(self.state).log(part).read_text()

    def processes(self) -> list[int]:
        """Give the pids of all processes of this platform that live, the supervisor's among them."""
        return [pid for pid in _pids() if _has_mark(pid, self._mark)]

    def wait_event(self, kind: str, *, part: str = "", timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """Wait for an event and give it.

        Raises:
            PlatformError: the platform ended first, or the time is over.
        """
        end = _clock.monotonic() + timeout_s
        while True:
            over = self._process.poll() is not None or _clock.monotonic() > end
            for event in self.events:
                if event["event"] == kind and event.get("part", "") == part:
                    return event
            if over:
                raise errors.PlatformError(f"no event {kind!r} {part}; printed: {self.events} {self.errors}")
            time.sleep(_STEP_S)

    def wait_ready(self) -> None:
        """Wait until every part answers.

        Raises:
            PlatformError: the platform ended first, or did not answer in time.
        """
        addresses = self.wait_event("ready")["addresses"]
        self.addresses = {part: parse_address(text) for part, text in addresses.items()}

    def wait_end(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait for the end of the supervisor, and give its exit code.

        Raises:
            PlatformError: it has not ended in time.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise errors.PlatformError(f"the platform did not end within {timeout_s} s") from None

    def wait_gone(self, timeout_s: float = STOP_TIMEOUT_S) -> list[int]:
        """Wait until no process is left, and give those that are after `timeout_s`."""
        end = _clock.monotonic() + timeout_s
        while True:
            self._process.poll()  # reaps it
            left = self.processes()
            if not left or _clock.monotonic() > end:
                return left
            time.sleep(_STEP_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor."""
        self._process.send_signal(number)

    def command(
        self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S, input: str | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run `stormline ARGUMENTS...` against this platform and give its output and exit code."""
        return subprocess.run(  # noqa: S603 - our own command
            [sys.executable, "-m", "stormline.cli.main", *arguments],
            env=self.environ,
            input=input,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Stop it as Ctrl-C does, and give the exit code. May be called again.

        Raises:
            PlatformError: a process is left; all have been killed then.
        """
        self.signal(signal.SIGINT)
        try:
            code = self.wait_end(timeout_s)
            if left := self.wait_gone(1.0):
                raise errors.PlatformError(f"the platform left processes behind: {_describe(left)}")
        finally:
            self.kill()
        return code

    def kill(self) -> None:
        """Kill whatever is left of it."""
        if self._process.poll() is None:
            self._process.kill()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self.wait_gone()


def start_platform(
    state: Path,
    *arguments: str,
    demo: bool = True,
    ports: Mapping[str, int] | None = None,
    environ: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> RunningPlatform:
    """Start `stormline up --json ARGUMENTS...`; does not wait for it.

    Args:
        state: its state folder.
        arguments: more arguments.
        demo: whether to run the demo too.
        ports: ports by part; the others are free ones.
        environ: more environment variables.
        python: the interpreter.
    """
    mark = ids.new_id(SystemRng())
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Settings of whoever runs the tests are not the test's.
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("STORMLINE_") or name == "STORMLINE_PORTABLE"  # what the machine has
    }
    for_commands = {**inherited, "STORMLINE_STATE": str(state)}
    numbers = {**dict.fromkeys(Ports.__struct_fields__, 0), **(ports or {})}
    settings = {f"STORMLINE_PORTS__{part.upper()}": str(port) for part, port in numbers.items()}
    command = [python, "-m", "stormline.cli.main", "up", "--json", *(["--demo"] if demo else []), *arguments]
    with _output(state).open("wb") as out, _errors(state).open("wb") as err:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command,
            env={**for_commands, **settings, MARK: mark, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
    return RunningPlatform(state, process, for_commands, mark)


@contextlib.contextmanager
def running_platform(
    state: Path,
    *arguments: str,
    demo: bool = True,
    environ: Mapping[str, str] | None = None,
    stop_timeout_s: float = STOP_TIMEOUT_S,
) -> Iterator[RunningPlatform]:
    """Run a platform: ready on entry, stopped on exit, with no process left. Arguments as for `start_platform`.

    `stop_timeout_s` is what it may take to stop: more where its gateways have a long drain.

    Raises:
        PlatformError: it did not get ready, or left a process behind.
    """
    platform = start_platform(state, *arguments, demo=demo, environ=environ)
    try:
        platform.wait_ready()
        yield platform
    except BaseException:
        platform.kill()
        raise
    platform.stop(stop_timeout_s)


def _output(state: Path) -> Path:
    return state / "up.jsonl"


def _errors(state: Path) -> Path:
    return state / "up.err"


def _pids() -> Sequence[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _has_mark(pid: int, mark: str) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False
    return f"{MARK}={mark}".encode() in variables


def _describe(pids: Sequence[int]) -> str:
    commands = []
    for pid in pids:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            commands.append(f"{pid} {command.strip()}")
    return ", ".join(commands)
