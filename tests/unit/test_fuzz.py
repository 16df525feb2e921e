"""Every fuzz target holds for its valid inputs and a fixed number of damaged ones; a finding can be repeated."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
ITERATIONS = 400
NAMES = [
    "frames", "connection_server", "connection_client", "jws", "plan", "dns", "dns_server", "bundle", "report",
    "address", "proxy_settings", "httpsig", "http2", "bhttp", "ohttp", "decoding", "network_memory",
    "rtnetlink", "network_story", "probe_answer", "network_log", "feedback", "proxy_header",
    "first_bytes", "websocket", "tokens", "resumption",
    "short_exchange", "short_request",
]  # fmt: skip


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import the `fuzz` folder, which is no part of the package."""
    monkeypatch.syspath_prepend(ROOT)
    importlib.import_module("fuzz.__main__")
    importlib.import_module("fuzz.targets")
    return importlib.import_module("fuzz")


def test_fuzz_targets_are_those_that_are_tested_here(fuzz: ModuleType):
    assert list(fuzz.targets.TARGETS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_fuzz_target_holds_for_valid_and_damaged_inputs(fuzz: ModuleType, name: str):
    target = fuzz.targets.TARGETS[name]
    seeds = target.seeds()
    for data in [*seeds, b""]:
        target.run(data)
    for number in range(ITERATIONS):
        data = fuzz.mutate.make(1, number, seeds)
        try:
            target.run(data)
        except Exception as error:
            error.add_note(f"input {number} of seed 1: {data!r}")
            raise


def test_fuzz_inputs_of_one_seed_are_always_the_same(fuzz: ModuleType):
    seeds = [b"abcdef", b"0123456789"]
    assert [fuzz.mutate.make(5, n, seeds) for n in range(50)] == [fuzz.mutate.make(5, n, seeds) for n in range(50)]
    assert len({fuzz.mutate.make(5, n, seeds) for n in range(50)}) > 30


def test_fuzz_finding_is_written_down_with_the_command_that_repeats_it(
    fuzz: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def parse(data: bytes) -> None:
        assert b"\xff" not in data, "no 0xff"

    target = fuzz.targets.Target(run=parse, seeds=lambda: [b"harmless"])
    assert not fuzz.__main__.run("frames", target, seconds=30.0, seed=3, folder=tmp_path)
    (found,) = tmp_path.iterdir()
    assert b"\xff" in found.read_bytes()
    assert f"python -m fuzz frames --repeat {found}" in capsys.readouterr().out


def test_fuzz_repeat_of_a_harmless_input_says_that_it_held(tmp_path: Path):
    path = tmp_path / "input.bin"
    path.write_bytes(b"GET / HTTP/1.1\r\n\r\n")
    command = [sys.executable, "-m", "fuzz", "connection_server", "--repeat", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "connection_server: held\n"), done.stderr
