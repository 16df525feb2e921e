"""One supervisor per state folder."""

import fcntl
import os
import time
from pathlib import Path
from typing import Self

from stormline.core import errors
from stormline.core import limits_platform as limits


class StateLock:
    """An advisory lock on a file; the kernel drops it with the process, so none is ever left behind.

    Use as a context manager. Child processes do not hold it: the descriptor is closed on exec.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        """Take the lock.

        Raises:
            PlatformError: another process has it (its pid is named), or the file cannot be opened.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise errors.PlatformError(f"state folder: cannot open {self._path}: {error.strerror}") from error
        for _ in range(limits.LOCK_TRIES_MAX):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(limits.LOCK_PAUSE_S)  # `holder` in another process may have it for an instant
        else:
            owner = os.read(descriptor, limits.PLATFORM_FILE_BYTES_MAX).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise errors.PlatformError(
                f"a platform already runs on {self._path.parent} (pid {owner or 'unknown'}); "
                "stop it, or choose another folder with --state"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(self, *_: object) -> None:
        """Give the lock back; the file stays, so that no two processes lock two files of one name."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None


def holder(path: Path) -> int | None:
    """Say which process holds the lock, None where none does.

    The test is to take the lock for an instant, shared, so that two tests do not meet.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(descriptor, limits.PLATFORM_FILE_BYTES_MAX).decode("ascii", "replace").strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(descriptor)
    return None
