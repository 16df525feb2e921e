"""Is what `stormline diagnose` says right? Each thing that goes wrong is made on a real network, and asked about."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stormline.core import limits_diagnosis as limits
from stormline.lab import diagnosing
from stormline.lab.diagnosing import Case, Outcome
from stormline.net import system

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(400),
    pytest.mark.skipif(system.PORTABLE, reason="what is asked here is switched off (STORMLINE_PORTABLE)"),
]

JOBS = 6
"""Stages side by side: a diagnosis mostly waits."""
LATE_S = 5.0
"""How much later than its bound one may be where many share two cores."""
AGAIN = {"no-network", "airplane", "permission", "udp-degraded", "syn-drop", "edge"}
"""Causes that are made in one way only, and what chance has a part in; the others have several forms."""


def look(cases: Sequence[Case], seeds: Sequence[int], folder: Path) -> list[Outcome]:
    """Ask in every case, and look at what holds for every diagnosis."""
    found = diagnosing.run_all(cases, seeds, folder=folder, jobs=JOBS)
    for each in found:
        assert each.said["hint"], each.case.name
        assert each.said["why"], each.case.name
        assert each.said["checks"], each.case.name
        assert each.code == (0 if each.verdict == "ok" else 1), each.case.name
        assert each.said["took_s"] < limits.DIAGNOSIS_S + LATE_S, each.case.name
    return found


def not_right(found: Sequence[Outcome]) -> dict[str, tuple[str, str, str]]:
    return {
        f"{each.case.name}/{each.seed}": (each.verdict, each.said["confidence"], each.said["why"])
        for each in found
        if not each.right
    }


@pytest.mark.parametrize("at_home", [True, False])
def test_what_is_made_is_what_is_said(at_home: bool, tmp_path: Path) -> None:
    """Faults by their name, healthy and slow networks by none; what cannot be told by one of what it may be."""
    cases = [each for each in diagnosing.CASES if (each.profile is diagnosing.HOME_NETWORK) is at_home]
    assert not_right(look(cases, [1], tmp_path)) == {}


def test_other_chance_changes_nothing(tmp_path: Path) -> None:
    cases = [each for each in diagnosing.CASES if each.name in AGAIN]
    assert len(cases) == len(AGAIN)
    assert not_right(look(cases, [2], tmp_path)) == {}


@pytest.fixture(name="open_folder")
def _open_folder() -> Iterator[Path]:
    """A folder that every user may read; pytest's own are closed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def test_program_without_rights_finds_the_same_and_says_what_it_could_not_do(open_folder: Path) -> None:
    cases = {each.name: each for each in diagnosing.CASES}
    with diagnosing.place(cases["wifi"], 1, open_folder / "keys") as stage:

        def ask(name: str, number: int) -> dict[str, Any]:
            own = open_folder / str(number)
            own.mkdir()
            with diagnosing.made(stage, cases[name]):
                text, _ = diagnosing.ask(stage, cases[name], own, prefix=diagnosing.WITHOUT_RIGHTS)
            said = json.loads(text)
            return {"verdict": said["verdict"], **{each["name"]: each for each in said["checks"]}}

        well = ask("wifi", 1)
        box = ask("tls-box", 2)
        stage.topology.device.shell("echo '0 2147483647' > /proc/sys/net/ipv4/ping_group_range")
        allowed = ask("wifi", 3)
    assert well["verdict"] == allowed["verdict"] == "ok"
    assert box["verdict"] == "tls_interception"
    assert "ICMP" in well["gateway"]["detail"]
    assert well["trace"]["state"] == "ok"  # it takes no rights
    assert allowed["gateway"]["state"] == "ok"
