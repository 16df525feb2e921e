"""The state folder's small files: whole or not at all, private, and named when damaged."""

import os
import stat
from pathlib import Path

import pytest

from stormline.assembly import keys, layout
from stormline.core import errors
from stormline.net.clock import SystemRng

RUN = layout.RoleRun(role="dispatch", pid=4711, addresses={"dispatch": "127.0.0.1:1"})


def test_write_then_read_gives_the_same(tmp_path: Path) -> None:
    layout.write(tmp_path / "run.json", RUN)
    assert layout.read(tmp_path / "run.json", layout.RoleRun) == RUN


def test_write_is_private_and_leaves_nothing_beside(tmp_path: Path) -> None:
    layout.write(tmp_path / "run.json", RUN)
    assert os.listdir(tmp_path) == ["run.json"]
    assert stat.S_IMODE((tmp_path / "run.json").stat().st_mode) == 0o600


def test_write_replaces_a_file_that_was_open_to_others(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("old")
    (tmp_path / "run.json").chmod(0o666)
    layout.write(tmp_path / "run.json", RUN)
    assert stat.S_IMODE((tmp_path / "run.json").stat().st_mode) == 0o600


def test_write_does_not_follow_a_link_left_at_its_working_name(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".run.json.{os.getpid()}").symlink_to(victim)
    layout.write(tmp_path / "run.json", RUN)
    assert victim.read_text() == "mine"
    assert layout.read(tmp_path / "run.json", layout.RoleRun) == RUN


def test_write_into_a_missing_folder_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(errors.PlatformError, match=r"cannot write .*none/run\.json"):
        layout.write(tmp_path / "none" / "run.json", RUN)


def test_read_missing_file_gives_none(tmp_path: Path) -> None:
    assert layout.read(tmp_path / "run.json", layout.RoleRun) is None
    (tmp_path / "file").write_text("")
    assert layout.read(tmp_path / "file" / "run.json", layout.RoleRun) is None


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"role": "x"}', b'{"role": 1, "pid": 1, "addresses": {}}'])
def test_read_damaged_file_names_it(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "run.json").write_bytes(data)
    with pytest.raises(errors.PlatformError, match=r"run\.json is damaged"):
        layout.read(tmp_path / "run.json", layout.RoleRun)


def test_make_folder_is_private_and_may_be_there(tmp_path: Path) -> None:
    for _ in range(2):
        layout.make_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_make_folder_leaves_a_folder_of_others_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    layout.make_folder(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_make_folder_where_a_file_is_names_it(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(errors.PlatformError, match=r"cannot make .*state"):
        layout.make_folder(tmp_path / "state")


class TestLastWords:
    def test_last_words_prefer_the_line_that_says_why(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("2026 INFO starts\nerror: port taken\n  trailing noise\n\n")
        assert layout.last_words(log, 0) == "port taken"

    def test_last_words_without_one_are_the_last_line(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("Traceback\n  File\nValueError: x\n")
        assert layout.last_words(log, 0) == "ValueError: x"

    def test_last_words_of_an_earlier_run_do_not_count(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("error: of yesterday\n")
        since = log.stat().st_size
        assert layout.last_words(log, since) == ""

    def test_last_words_of_a_log_that_was_put_aside_are_read_from_its_start(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("error: new\n")
        assert layout.last_words(log, 100_000) == "new"

    def test_last_words_of_a_huge_line_are_cut(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("x" * 1_000_000)
        assert len(layout.last_words(log, 0)) == 256

    def test_last_words_of_no_log_are_empty(self, tmp_path: Path) -> None:
        assert layout.last_words(tmp_path / "none", 0) == ""


class TestKeys:
    def test_keys_are_drawn_once_and_found_again(self, tmp_path: Path) -> None:
        place = layout.Layout(tmp_path)
        first = keys.ensure_keys(place, rng=SystemRng())
        assert keys.ensure_keys(place, rng=SystemRng()) == first
        assert first.admin != first.business
        assert len(first.admin) == len(first.business) == 26

    def test_keys_open_to_others_are_refused(self, tmp_path: Path) -> None:
        place = layout.Layout(tmp_path)
        keys.ensure_keys(place, rng=SystemRng())
        place.keys.chmod(0o640)
        with pytest.raises(errors.PlatformError, match="open to other users"):
            keys.ensure_keys(place, rng=SystemRng())

    def test_keys_are_not_shown(self, tmp_path: Path) -> None:
        drawn = keys.ensure_keys(layout.Layout(tmp_path), rng=SystemRng())
        admin = layout.Admin(pid=1, app="demo", unit="u1", addresses={}, ca_file="", keys=drawn)
        for text in (repr(drawn), repr(admin), repr(admin.admin_key), str(admin.business_key)):
            assert drawn.admin not in text
            assert drawn.business not in text
        assert admin.admin_key.reveal() == drawn.admin
