"""Small files that are there whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from stormline.net.files import write_atomic


def test_write_replaces_the_file_and_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    path.chmod(0o644)
    write_atomic(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["f"]


def test_write_clears_what_a_crash_left_and_follows_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".f.{os.getpid()}").symlink_to(victim)
    write_atomic(tmp_path / "f", b"new", mode=0o600)
    assert victim.read_text() == "mine"
    assert (tmp_path / "f").read_bytes() == b"new"
    assert not (tmp_path / "f").is_symlink()


def test_write_that_fails_leaves_the_earlier_file(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    with pytest.raises(OSError):  # noqa: PT011 - any of them: a folder is in the way
        write_atomic(tmp_path / "f", b"new", mode=0o600)
    assert os.listdir(tmp_path) == ["f"]
