"""The simulation reaches the policies and the parts of the client that act on them: 90 % of the lines of each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stormline
from stormline.testing import scenario

LEAST_PCT = 90.0
SEEDS = 36
"""A sample of those of `test_scenarios`: enough for the number, and it is over in half a minute."""
SOURCES = Path(stormline.__path__[0])
MEASURED = ("policy/*", "client/executor.py", "client/lanes.py", "client/steering.py", "client/following.py")
OTHERS = (
    "test_heartbeat.py::test_links_lost_by_chance_do_not_end_the_search",
    "test_heartbeat.py::test_network_that_gets_a_name_keeps_what_was_found",
    "test_heartbeat.py::TestHalfOpen",
    "test_policy_limits.py",
    "test_policy_verdicts.py",
    "test_policy_ways.py",
    "test_second_start.py::test_second_start_goes_straight_to_what_worked[0-h2-mute]",
    "test_second_start.py::test_memory_that_is_wrong_by_now_costs_a_head_start_and_no_answer[0-ipv6-dead]",
    "test_second_start.py::test_address_that_healed_is_used_again",
    "../property/test_policy_breaker.py",
    "../property/test_policy_carriers.py",
    "../property/test_policy_compress.py",
    "../property/test_policy_httpcache.py",
    "../property/test_policy_intake.py",
    "../unit/test_policy_means.py",
    "../unit/test_policy_reconnect.py",
)
"""Tests that are measured too: of this folder, and of relays, WebSockets and the API gate, which no scenario has."""
APART = {"policy/diagnosis.py", "policy/natlife.py", "policy/pace.py"}
"""What a diagnosis asks the kernel for no simulated network has; `tests/property` holds its rules."""
_RUNNER = """
import sys, pytest
code = pytest.main(["-q", "-p", "no:randomly", "-p", "no:cacheprovider", *sys.argv[4:]])
from stormline.testing import simworld
names, first, seeds = sys.argv[1].split(), int(sys.argv[2]), int(sys.argv[3])
for seed in range(first, first + seeds):
    report = simworld.run(names[seed % len(names)], seed)
    assert not report.problems, report.problems
sys.exit(code)
"""


@pytest.mark.timeout(240)
def test_sample_of_seeds_reaches_ninety_percent_of_each_file(tmp_path, base_seed):
    names = [name for name in scenario.names() if scenario.load(name).direct is not None]
    others = [name for name in scenario.names() if name not in names and scenario.load(name).workload.devices < 100]
    names += others[::3]
    names += ["direct-servers"] * 3  # it alone has bodies that break off
    runner, rc, data, told = (tmp_path / name for name in ("runner.py", "rc", "data", "told.json"))
    runner.write_text(_RUNNER)
    rc.write_text(f"[run]\ndata_file = {data}\ninclude =\n" + "".join(f"    {SOURCES}/{each}\n" for each in MEASURED))
    environment = {**os.environ, "PYTHONPATH": str(SOURCES.parent)}
    others = [str(Path(__file__).parent / name) for name in OTHERS]
    for command in (
        ["run", f"--rcfile={rc}", str(runner), " ".join(names), str(base_seed), str(SEEDS), *others],
        ["json", f"--rcfile={rc}", "-q", "-o", str(told)],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "coverage", *command],
            env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=110,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    files = json.loads(told.read_text())["files"]
    reached = {name.rpartition("stormline/")[2]: each["summary"]["percent_covered"] for name, each in files.items()}
    policies = {path.relative_to(SOURCES).as_posix() for path in SOURCES.glob("policy/*.py") if path.stat().st_size}
    assert set(reached) >= policies - APART | {name for name in MEASURED if "*" not in name}
    assert {name: pct for name, pct in reached.items() if pct < LEAST_PCT} == {}
