"""Start the servers' process and tell it what to do."""

import contextlib
import os
import select
import subprocess
import sys
import tempfile
from typing import Final, Self

import msgspec

from stormline.core import errors, limits_lab
from stormline.core.clock import Clock
from stormline.lab import specs
from stormline.lab.namespaces import Namespace
from stormline.net.clock import SystemClock

_LOG_TAIL_BYTES: Final = 4096


class OriginProcess:
    """A running origin; a context manager that ends it.

    Its methods block until the answer is there, for one thread at a time. The process also ends by itself when this one
    does, however it ends.
    """

    def __init__(self, place: Namespace, clock: Clock | None = None) -> None:
        """Start it inside a namespace; `set_up` makes it serve.

        Raises:
            PlatformError: it could not be started.
        """
        self._clock = clock or SystemClock()
        self._read = bytearray()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        try:
            self._process = place.popen(
                [sys.executable, "-m", "stormline.lab.origin"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise errors.PlatformError(f"cannot start the origin: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def close(self) -> None:
        """End the process; again is harmless."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(limits_lab.LAB_ORIGIN_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    # -- commands: ConfigError where one is not understood, PlatformError where the origin is gone ---------------------
    def set_up(self, setup: specs.OriginSetup) -> None:
        """Serve."""
        self._ask(setup)

    def behave(self, behaviours: dict[str, specs.Behaviour]) -> None:
        """Let addresses behave otherwise."""
        self._ask(specs.Behave(behaviours))

    def set_dns(self, dns: specs.DnsSpec) -> None:
        """Answer DNS otherwise."""
        self._ask(specs.SetDns(dns))

    def report(self, *, reset_lag: bool = False) -> specs.OriginReport:
        """Give the counters."""
        answer = self._ask(specs.AskReport(reset_lag))
        if not isinstance(answer, specs.OriginReport):
            raise errors.PlatformError(f"origin: unexpected answer {answer!r}")
        return answer

    def _ask(self, command: specs.OriginCommand) -> specs.OriginAnswer:
        stdin = self._process.stdin
        try:
            if stdin is None:
                raise BrokenPipeError("no input")
            stdin.write(msgspec.json.encode(command) + b"\n")
            stdin.flush()
            line = self._line()
        except (OSError, ValueError) as error:  # ValueError: closed
            raise errors.PlatformError(f"origin: no answer ({error}){self._last_words()}") from error
        try:
            answer: specs.OriginAnswer = msgspec.json.decode(line, type=specs.OriginAnswer)
        except msgspec.DecodeError as error:
            raise errors.PlatformError(f"origin: answered nonsense ({error})") from error
        if isinstance(answer, specs.OriginFailed):
            kind = errors.PlatformError if answer.machine else errors.ConfigError
            raise kind(f"origin: {answer.message}")
        return answer

    def _line(self) -> bytes:
        """Read one line within `limits_lab.LAB_ORIGIN_ANSWER_S`; raises OSError."""
        if self._process.stdout is None:
            raise BrokenPipeError("no output")
        output = self._process.stdout.fileno()
        end_s = self._clock.monotonic() + limits_lab.LAB_ORIGIN_ANSWER_S
        while (end := self._read.find(b"\n")) < 0:
            readable, _, _ = select.select([output], (), (), max(0.0, end_s - self._clock.monotonic()))
            if not readable:
                raise TimeoutError("it took too long")
            data = os.read(output, 65_536)
            if not data:
                raise BrokenPipeError("it ended")
            self._read += data
            if len(self._read) > limits_lab.LAB_ORIGIN_LINE_BYTES_MAX:
                raise BrokenPipeError("its answer is too long")
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        return line

    def _last_words(self) -> str:
        if self._log.closed:
            return ""
        self._log.seek(0, 2)
        self._log.seek(max(0, self._log.tell() - _LOG_TAIL_BYTES))
        words = self._log.read().decode("utf-8", "replace").strip()
        return f": {words}" if words else ""
