"""Small files that are there whole or not at all."""

import contextlib
import os
from pathlib import Path


def write_atomic(path: Path, data: bytes, *, mode: int) -> None:
    """Put `data` at `path` in one step that outlives a power cut: a reader sees the old file or the new one.

    Args:
        path: the file; its folder must be there.
        data: all of it.
        mode: permissions of the file, from its first byte on.

    Raises:
        OSError: it cannot be written; an earlier file stays as it was.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    # The name is ours alone: what a crashed process of our number left is removed, a link is not followed.
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
