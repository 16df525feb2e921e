"""Start a shaper and tell it what to do."""

import contextlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, Final, Self

import msgspec

from stormline.core import errors, limits_lab
from stormline.lab import messages as m

_LOG_TAIL_BYTES: Final = 4096
_SO_SNDBUFFORCE: Final = 32


class Shaper:
    """A running shaper process; a context manager that ends it.

    Commands are blocking calls of well under a millisecond, for one thread at a time. The process also ends by itself
    when this process does, however it ends.
    """

    def __init__(self, setup: m.Setup) -> None:
        """Start it and wait until packets flow.

        Raises:
            ConfigError: the setup is not understood; the message says what.
            PlatformError: it could not be started, or may not use the devices.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        for end in (ours, theirs):
            with contextlib.suppress(OSError):  # refused without root: then long schedules do not fit
                end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 2 * limits_lab.SHAPER_MESSAGE_BYTES_MAX)
        ours.settimeout(limits_lab.SHAPER_ANSWER_S)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        try:
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - our own module, no shell
                    [sys.executable, "-m", "stormline.lab.shaper", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            self._log.close()
            raise errors.PlatformError(f"cannot start the shaper: {error.strerror}") from error
        try:
            answer = self._ask(setup)
        except BaseException:
            self.close()
            raise
        if not isinstance(answer, m.Ready):
            self.close()
            raise errors.PlatformError(f"shaper: unexpected answer {answer!r}")
        self.ready = answer
        """Whether it got real-time scheduling and locked memory."""

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
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                self._control.send(msgspec.json.encode(m.Stop()))
        self._control.close()
        try:
            self._process.wait(limits_lab.SHAPER_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    # -- commands: ConfigError where one is not understood, PlatformError where the shaper is gone ---------------------
    def reconfigure(
        self, link: str, fields: dict[str, Any], *, direction: m.Direction = m.Direction.BOTH, whole: bool = False
    ) -> float:
        """Change parameters of a link, from the defaults on where `whole`. Gives the moment it holds from."""
        return self._do(m.Reconfigure(link=link, direction=direction, fields=fields, whole=whole))

    def start_blackout(
        self,
        link: str,
        *,
        mode: str = "drop",
        duration_s: float | None = None,
        direction: m.Direction = m.Direction.BOTH,
    ) -> float:
        """Make a link dark for a time, or until `end_blackout`. Gives the moment it holds from."""
        return self._do(m.StartBlackout(link=link, direction=direction, mode=mode, duration_s=duration_s))

    def end_blackout(self, link: str, *, direction: m.Direction = m.Direction.BOTH) -> float:
        """Bring a link back. Gives the moment it holds from."""
        return self._do(m.EndBlackout(link=link, direction=direction))

    def follow(
        self,
        link: str,
        steps: Sequence[dict[str, Any]],
        *,
        repeat_s: float | None = None,
        start_s: float | None = None,
        direction: m.Direction = m.Direction.BOTH,
    ) -> float:
        """Let a link follow a schedule with time 0 at `start_s` (monotonic; None: now); no steps: stop following."""
        return self._do(m.Follow(link=link, direction=direction, steps=list(steps), repeat_s=repeat_s, start_s=start_s))

    def set_fades(
        self, link: str, fades: dict[str, Any] | None, *, seed: int = 0, start_s: float | None = None
    ) -> float:
        """Have other fades on a link, or none. Gives the moment it holds from."""
        return self._do(m.SetFades(link=link, fades=fades, seed=seed, start_s=start_s))

    def statistics(self, *, reset_lateness: bool = False) -> m.Statistics:
        """Give the counters, and how far the shaper can be trusted."""
        answer = self._ask(m.AskStatistics(reset_lateness=reset_lateness))
        if not isinstance(answer, m.Statistics):
            raise errors.PlatformError(f"shaper: unexpected answer {answer!r}")
        return answer

    def take_drops(self) -> m.Drops:
        """Take all remembered losses, oldest first."""
        drops: list[m.Drop] = []
        while True:
            answer = self._ask(m.AskDrops())
            if not isinstance(answer, m.Drops):
                raise errors.PlatformError(f"shaper: unexpected answer {answer!r}")
            drops += answer.drops
            # A lossy link makes new ones while we read: what fills an answer may be followed by more, the rest waits.
            if len(answer.drops) < limits_lab.SHAPER_DROPS_ANSWER_MAX or len(drops) >= limits_lab.SHAPER_DROPS_KEPT_MAX:
                return m.Drops(drops, answer.forgotten)

    def _do(self, command: m.Command) -> float:
        answer = self._ask(command)
        if not isinstance(answer, m.Done):
            raise errors.PlatformError(f"shaper: unexpected answer {answer!r}")
        return answer.at_s

    def _ask(self, command: m.Command) -> m.Answer:
        data = msgspec.json.encode(command)
        if len(data) > limits_lab.SHAPER_MESSAGE_BYTES_MAX:
            raise errors.ConfigError(f"shaper: a command of {len(data)} bytes is too long")
        try:
            self._control.send(data)
            reply = self._control.recv(limits_lab.SHAPER_MESSAGE_BYTES_MAX)
        except OSError as error:
            raise errors.PlatformError(f"shaper: no answer ({error}){self._last_words()}") from error
        if not reply:
            raise errors.PlatformError(f"shaper: ended{self._last_words()}")
        answer: m.Answer = msgspec.json.decode(reply, type=m.Answer)
        if isinstance(answer, m.Failed):
            kind = errors.PlatformError if answer.machine else errors.ConfigError
            raise kind(f"shaper: {answer.message}")
        return answer

    def _last_words(self) -> str:
        self._log.seek(0, 2)
        self._log.seek(max(0, self._log.tell() - _LOG_TAIL_BYTES))
        words = self._log.read().decode("utf-8", "replace").strip()
        return f": {words}" if words else ""
