"""Bugs planted into copies of the sources, each a patch of `bugs/`: every one is found within 200 seeds.

A patch begins with three comments: what it breaks, the scenarios that should show it, and which invariants tell of it
(`check` stands for a scenario's own threshold). A change of the sources may make a patch unfit; it is then to be made
anew, so that the same thing is broken.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import stormline

BUGS = sorted((Path(__file__).parent / "bugs").glob("*.patch"))
SEEDS_MAX = 200
FOUND_WITHIN_S = 50
SOURCES = Path(stormline.__path__[0])
_HUNK = re.compile(r"@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@")
_RUNNER = """
import json, sys
from stormline.testing import simworld
names, first, seeds = sys.argv[1].split(), int(sys.argv[2]), int(sys.argv[3])
for seed in range(first, first + seeds):
    name = names[seed % len(names)]
    problems = simworld.run(name, seed).problems
    if problems:
        print(json.dumps({"scenario": name, "seed": seed, "problems": problems[:20]}))
        break
"""


class DoesNotApply(Exception):
    """The sources have changed where a patch changes them."""


@dataclass
class Bug:
    what: str
    scenarios: str
    told_by: set[str]
    changes: dict[str, list[tuple[str, str]]]


def read_bug(path: Path) -> Bug:
    """Read a unified diff with its three comments: for each file the texts that make way, and for what."""
    comments, changes, file = [], {}, ""
    for line in path.read_text().splitlines(keepends=True):
        if line.startswith("#"):
            comments.append(line[1:].strip())
        elif line.startswith("+++ "):
            file = line[4:].strip().removeprefix("b/src/stormline/")
            changes[file] = []
        elif _HUNK.match(line):
            changes[file].append(("", ""))
        elif file and not line.startswith("---"):
            before, after = changes[file][-1]
            changes[file][-1] = (before + line[1:] * (line[0] != "+"), after + line[1:] * (line[0] != "-"))
    what, scenarios, told_by = comments
    return Bug(what, scenarios.removeprefix("scenarios: "), set(told_by.removeprefix("told by: ").split()), changes)


def plant(bug: Bug, sources: Path) -> None:
    """Change the sources as a patch says."""
    for file, hunks in bug.changes.items():
        text = (sources / file).read_text()
        for before, after in hunks:
            if text.count(before) != 1:
                raise DoesNotApply(f"{file} has not one place like this any more, but {text.count(before)}:\n{before}")
            text = text.replace(before, after)
        (sources / file).write_text(text)


@pytest.mark.parametrize("path", BUGS, ids=lambda path: path.stem)
def test_planted_bug_is_found_within_two_hundred_seeds(path, tmp_path, base_seed, record_property):
    bug = read_bug(path)
    copy = tmp_path / "src" / "stormline"
    shutil.copytree(SOURCES, copy)
    try:
        plant(bug, copy)
    except DoesNotApply as error:
        pytest.fail(f"{path.name} no longer applies ({bug.what}); make it anew: {error}", pytrace=False)
    environment = {**os.environ, "PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    arguments = [bug.scenarios, str(base_seed), str(SEEDS_MAX)]
    run = subprocess.run(
        [sys.executable, "-c", _RUNNER, *arguments],
        env=environment, capture_output=True, text=True, check=False, timeout=FOUND_WITHIN_S,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout, f"{path.stem}: no invariant broke in {SEEDS_MAX} seeds of {bug.scenarios}"
    found = json.loads(run.stdout)
    names = {re.split(r"\W", problem.partition(": ")[2].strip(), maxsplit=1)[0] for problem in found["problems"]}
    record_property("found", f"{found['scenario']} seed {found['seed']}")
    print(f"{path.stem}: {found['scenario']} seed {found['seed']}, {sorted(names)}")
    assert names & bug.told_by, found["problems"]


def test_there_are_at_least_ten_bugs():
    assert len(BUGS) >= 10


def test_patch_that_does_not_fit_says_where(tmp_path):
    bug = read_bug(BUGS[0])
    [(file, _)] = bug.changes.items()
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("something = else_entirely\n")
    with pytest.raises(DoesNotApply, match=file):
        plant(bug, tmp_path)
