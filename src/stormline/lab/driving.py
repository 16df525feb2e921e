"""A client under test as a process: started, told to go, listened to, ended."""

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Self

from stormline.core import errors, limits_lab
from stormline.core.clock import Clock
from stormline.lab import clients, workload

Popen = Callable[[Sequence[str], Mapping[str, str], Mapping[str, Any]], "subprocess.Popen[bytes]"]
"""Starts a program: its words, its environment, and what `subprocess.Popen` shall know beside them."""

_KEPT_VARIABLES: Final = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
"""Of our environment; proxies, bundles and trust stores of the machine are no part of a laboratory."""

_SOURCES: Final = Path(__file__).parents[2]


def driver_environment(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Give the environment of a driver: little of ours, and a home of its own."""
    kept = {name: environ[name] for name in _KEPT_VARIABLES if name in environ}
    return {**kept, "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}


class Driver:
    """One client that makes its requests; a context manager that ends it."""

    def __init__(
        self,
        client: clients.Client,
        schedule: Sequence[workload.Ask],
        *,
        base_url: str,
        ca_file: Path,
        folder: Path,
        environ: Mapping[str, str],
        popen: Popen,
        options: Mapping[str, Any] | None = None,
        query: str = "",
        patience_s: float = workload.PATIENCE_S,
        on_line: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        """Start it; it makes its client and waits.

        Args:
            client: which.
            schedule: its requests.
            base_url: scheme and host.
            ca_file: PEM file of the CA to trust.
            folder: an empty folder of its own.
            environ: our environment.
            popen: starts it where it shall run.
            options: for this driver.
            query: appended to each URL.
            patience_s: how long each request may take.
            on_line: told each line of a request as it comes, on another thread.

        Raises:
            ConfigError: no Python here has its packages.
        """
        self.client = client
        self.lines: list[Mapping[str, Any]] = []
        """What it told of its requests."""
        self.levels: list[tuple[float, str]] = []
        """What it took the network for: (second, level) whenever that changed; empty where it does not tell."""
        self.end: Mapping[str, Any] | None = None
        """Its last line; None where it ended early."""
        self._on_line = on_line
        self._greeted = False
        self._ready = threading.Event()  # set too where it ends before it has greeted us
        self._log_path = folder / "stderr"
        config = {
            "base_url": base_url,
            "ca_file": str(ca_file),
            "schedule": [list(ask) for ask in schedule],
            "patience_s": patience_s,
            "options": dict(options or {}),
            "workload": workload.__file__,
            "query": query,
        }
        self._start(popen, clients.python_for(client, environ), config, environ, folder)

    def _start(
        self, popen: Popen, python: Path, config: Mapping[str, Any], environ: Mapping[str, str], folder: Path
    ) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(config))
        # -P: its folder stays off the module path, where drivers are named like the libraries they import.
        environment = driver_environment(environ, folder)
        if self.client.ours:
            environment["PYTHONPATH"] = str(_SOURCES)  # the code that measures is the code that is measured
        words = [str(python), "-P", str(clients.HARNESS), str(self.client.driver), str(path)]
        theirs_in, self._stdin = os.pipe()
        ours_out, theirs_out = os.pipe()
        try:
            with self._log_path.open("wb") as log:
                self._process = popen(
                    words,
                    environment,
                    {"stdin": theirs_in, "stdout": theirs_out, "stderr": log, "cwd": str(folder)},
                )
        except BaseException:
            os.close(self._stdin)
            os.close(ours_out)
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._closed = False
        self._reader = threading.Thread(target=self._read, args=(os.fdopen(ours_out, "rb"),), daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until its client is made.

        Raises:
            PlatformError: it did not get so far; the message has its last words.
        """
        self._ready.wait(limits_lab.LAB_READY_S)
        if not self._greeted or self._process.poll() is not None:
            raise errors.PlatformError(f"client {self.client.name} did not start: {self.last_words()}")

    def go(self) -> None:
        """Start its clock."""
        with contextlib.suppress(OSError):  # it has ended: `wait_end` tells
            os.write(self._stdin, b"go\n")

    def wait_end(self, until_s: float, clock: Clock) -> str:
        """Wait until it has made all its requests.

        Args:
            until_s: when it is killed, on `clock`.
            clock: monotonic.

        Returns:
            What went wrong; empty where nothing did.
        """
        self._reader.join(max(0.0, until_s - clock.monotonic()))
        late = self._reader.is_alive()
        self.close()
        if self.end is not None:
            return ""
        if late:
            return "the client was killed: it did not end in time"
        return f"the client ended early: {self.last_words()}"

    def last_words(self) -> str:
        """Give the end of what it wrote on standard error."""
        try:
            words = self._log_path.read_bytes()[-limits_lab.LAB_TAIL_BYTES :].decode("utf-8", "replace").strip()
        except OSError:
            words = ""
        return words.splitlines()[-1] if words else f"exit status {self._process.poll()}"

    def close(self) -> None:
        """End it; again is harmless."""
        if self._closed:
            return
        self._closed = True
        os.close(self._stdin)
        if self.end is None:
            self._process.kill()
        try:
            self._process.wait(limits_lab.LAB_DRIVER_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _read(self, stdout: IO[bytes]) -> None:
        with stdout:
            for raw in stdout:
                try:
                    line = json.loads(raw)
                except ValueError:
                    continue  # a library that prints
                if "ready" in line:
                    self._greeted = True
                    self._ready.set()
                elif "done" in line:
                    self.end = line
                elif "level" in line:
                    self.levels.append((float(line["at_s"]), str(line["level"])))
                elif "id" in line:
                    self.lines.append(line)
                    self._on_line(line)
        self._ready.set()
