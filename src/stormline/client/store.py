"""What a client keeps between starts: its device token, the last plan and its user's home, in one small folder."""

import contextlib
import fcntl
import os
from pathlib import Path

from stormline.core import errors, limits
from stormline.net.files import write_atomic


class Store:
    """Files of one app on one device.

    Two processes must not be the same device at the same time: the platform gives the device to the newer one. So
    the token belongs to the process that holds the lock; another process gets none and enrols itself anew.
    """

    def __init__(self, folder: Path, app: str) -> None:
        self._folder = folder
        self._token = folder / f"{app}.token"
        self._plan = folder / f"{app}.plan"
        self._floor = folder / f"{app}.floor"
        self._home = folder / f"{app}.home"
        self._lock_path = folder / f"{app}.lock"
        self._lock: int | None = None

    def open(self) -> bool:
        """Create the folder (0700) and take the lock; False where another process has it.

        Raises:
            ConfigError: the folder cannot be used.
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise errors.ConfigError(f"client store {self._folder}: {error.strerror or error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def close(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def owned(self) -> bool:
        """True where this process may use and change the device token."""
        return self._lock is not None

    def load_token(self) -> str:
        """Give the stored token, empty where there is none for us."""
        return self._read(self._token, limits.TOKEN_BYTES_MAX) if self.owned else ""

    def save_token(self, token: str) -> None:
        """Keep a token; best effort, only where this process owns the store."""
        if self.owned:
            self._write(self._token, token)

    def load_plan(self) -> str:
        """Give the stored signed plan, empty where there is none. Verify it before use, like any answer."""
        return self._read(self._plan, limits.PLAN_BYTES_MAX)

    def save_plan(self, signed: str) -> None:
        """Keep a signed plan; best effort."""
        if self.owned:
            self._write(self._plan, signed)

    def load_floor(self) -> str:
        """Give what is kept of the highest version seen, empty where nothing is."""
        return self._read(self._floor, limits.TOKEN_BYTES_MAX)

    def save_floor(self, text: str) -> None:
        """Keep the highest version seen; best effort."""
        if self.owned:
            self._write(self._floor, text)

    def load_home(self) -> str:
        """Give the stored signed home, empty where there is none. Verify it before use."""
        return self._read(self._home, limits.HOME_BYTES_MAX)

    def save_home(self, signed: str) -> None:
        """Keep a user's signed home, empty for none; best effort."""
        if self.owned:
            self._write(self._home, signed)

    @staticmethod
    def _read(path: Path, size_max: int) -> str:
        try:
            with path.open("rb") as file:
                return file.read(size_max).decode("ascii", "replace")
        except OSError:
            return ""

    @staticmethod
    def _write(path: Path, text: str) -> None:
        # Fails too where the text is not ASCII: it came from a server, and is no token or plan of ours then.
        with contextlib.suppress(OSError, UnicodeEncodeError):
            write_atomic(path, text.encode("ascii"), mode=0o600)
