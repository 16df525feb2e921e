"""200 seeds over the scenarios with a platform and 200 over those without, a few of those with crowds: nothing that
must hold breaks, and equal seeds give equal runs."""

import os
import subprocess
import sys

import pytest

from stormline.testing import scenario, simworld

NAMES = scenario.names()
DIRECT = tuple(name for name in NAMES if scenario.load(name).direct is not None)
"""Without a gateway: clients ask origins themselves."""
CROWDS = tuple(name for name in NAMES if scenario.load(name).workload.devices >= 100)
"""With so many devices that a run takes seconds."""
FAMILIES = (DIRECT, tuple(name for name in NAMES if name not in DIRECT + CROWDS), CROWDS)
SEEDS = (200, 200, 4)
"""Of each family."""
BATCHES = 4
"""Parts in which a scenario's seeds run, so that none comes near the time-out of a test on a slow machine."""
TWICE_EVERY = 20
"""Each twentieth seed runs twice."""


def seeds_of(name: str, batch: int) -> list[int]:
    """Give the offsets of one batch: all of them together are `SEEDS`, dealt to a family's scenarios in turn."""
    family, seeds = next(each for each in zip(FAMILIES, SEEDS, strict=True) if name in each[0])
    mine = range(family.index(name), seeds, len(family))
    return list(mine[batch::BATCHES])


@pytest.mark.parametrize(
    ("family", "seeds"), list(zip(FAMILIES, SEEDS, strict=True)), ids=["direct", "platform", "crowds"]
)
def test_batches_together_are_every_seed_once(family: tuple[str, ...], seeds: int) -> None:
    dealt = [seed for name in family for batch in range(BATCHES) for seed in seeds_of(name, batch)]
    assert sorted(dealt) == list(range(seeds))


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("name", NAMES)
def test_scenario_holds_with_every_seed(name: str, batch: int, base_seed: int) -> None:
    loaded = scenario.load(name)
    problems = []
    for offset in seeds_of(name, batch):
        report = simworld.run(name, base_seed + offset, scenario=loaded)
        if report.problems:
            problems += [*report.problems, f"repeat it with: {report.repeat}"]
        elif offset % TWICE_EVERY == 0:
            again = simworld.run(name, base_seed + offset, scenario=loaded)
            if again.trace_hash != report.trace_hash:
                problems.append(f"two runs of {report.repeat!r} differ: {report.trace_hash}, {again.trace_hash}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_trace_does_not_depend_on_the_order_of_sets(hash_seed: str, base_seed: int) -> None:
    some = [name for name in NAMES if name not in CROWDS][::3]
    text = (
        "from stormline.testing import simworld\n"
        f"for name in {some!r}: print(simworld.run(name, {base_seed}).trace_hash)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    other = subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True, timeout=50
    ).stdout.split()
    assert other == [simworld.run(name, base_seed).trace_hash for name in some]


def test_other_seed_gives_another_trace(base_seed: int) -> None:
    hashes = {simworld.run("elevator", base_seed + offset).trace_hash for offset in range(3)}
    assert len(hashes) == 3


def test_log_of_a_run_tells_its_faults_and_changes_nothing(base_seed: int) -> None:
    log: list[str] = []
    loud = simworld.run("elevator", base_seed, log=log)
    assert any("fault blackout" in line for line in log)
    assert loud.trace_hash == simworld.run("elevator", base_seed).trace_hash
