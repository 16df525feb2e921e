"""One supervisor per state folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from stormline.assembly import lock
from stormline.core import errors

pytestmark = pytest.mark.loopback

HOLD = """
import sys, pathlib
from stormline.assembly import lock
with lock.StateLock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_lock_held_elsewhere_is_refused_and_names_the_pid(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert lock.holder(path) == process.pid
        with (
            pytest.raises(errors.PlatformError, match=rf"already runs on .* \(pid {process.pid}\)"),
            lock.StateLock(path),
        ):
            pass
        process.kill()
    assert lock.holder(path) is None  # the kernel dropped it with the process
    with lock.StateLock(path):
        assert lock.holder(path) is not None


def test_lock_given_back_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        with lock.StateLock(tmp_path / "lock"):
            pass
    assert lock.holder(tmp_path / "lock") is None


def test_lock_is_given_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x"), lock.StateLock(tmp_path / "lock"):
        raise ValueError("x")
    assert lock.holder(tmp_path / "lock") is None


def test_lock_in_a_missing_folder_names_the_file(tmp_path: Path) -> None:
    with (
        pytest.raises(errors.PlatformError, match=r"cannot open .*none/lock"),
        lock.StateLock(tmp_path / "none" / "lock"),
    ):
        pass


def test_holder_of_a_folder_that_never_ran_is_none(tmp_path: Path) -> None:
    assert lock.holder(tmp_path / "lock") is None
