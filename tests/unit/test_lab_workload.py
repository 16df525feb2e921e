"""The schedule and the bodies: the same on every machine, with the shares they promise."""

import collections
import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.lab import workload


@given(seed=st.integers(), requests=st.integers(1, 400), duration_s=st.floats(0.1, 1000))
def test_schedule_keeps_its_promises(seed: int, requests: int, duration_s: float) -> None:
    asks = workload.schedule(seed, requests, duration_s)
    assert [ask.id for ask in asks] == list(range(requests))
    assert all(0 <= ask.at_s <= duration_s for ask in asks)
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(asks))
    sizes = collections.Counter(ask.size for ask in asks)
    assert sizes[workload.LARGE_BYTES] >= 1
    assert set(sizes) <= {workload.SMALL_BYTES, workload.MEDIUM_BYTES, workload.LARGE_BYTES}
    assert asks == workload.schedule(seed, requests, duration_s)


def test_schedule_of_300_has_the_shares() -> None:
    sizes = collections.Counter(ask.size for ask in workload.schedule(7, 300, 120))
    assert sizes == {1024: 279, 30 * 1024: 20, 128 * 1024: 1}


def test_schedule_of_a_seed_never_changes() -> None:
    # Figures of different versions are compared: the load must be the same in all of them.
    assert workload.schedule(1, 300, 120)[:3] == [(0, 0.2314, 30720), (1, 0.7508, 30720), (2, 1.0512, 1024)]


def test_schedule_other_seed_other_moments() -> None:
    assert workload.schedule(1, 50, 10) != workload.schedule(2, 50, 10)


def test_schedule_gaps_are_those_of_a_poisson_process() -> None:
    times = [ask.at_s for ask in workload.schedule(3, 4000, 1600)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert 0.95 < spread / mean < 1.05  # 1 of an exponential distribution, 0 of a metronome


@pytest.mark.parametrize(
    ("requests", "duration_s"), [(0, 10), (-1, 10), (10, 0), (10, -1), (10, float("nan")), (10**9, 10)]
)
def test_schedule_bad_number_is_refused(requests: int, duration_s: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        workload.schedule(1, requests, duration_s)


def test_body_is_its_own_and_has_its_size() -> None:
    assert len(workload.body(5, 30720)) == 30720
    assert workload.body(5, 1024) == workload.body(5, 1024)
    assert workload.body(5, 1024) != workload.body(6, 1024)
    assert workload.body(5, 2048)[:1024] != workload.body(5, 1024)
    assert workload.body(5, 0) == b""
    with pytest.raises(ValueError, match="size"):
        workload.body(5, -1)


def test_workload_loads_by_path_with_the_standard_library_alone() -> None:
    code = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('w', sys.argv[1]); "
        "m = importlib.util.module_from_spec(spec); sys.modules['w'] = m; spec.loader.exec_module(m); "
        "print(len(m.body(1, 10)), m.target(1, 10))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, workload.__file__], capture_output=True, text=True, check=True
    )
    assert done.stdout == "10 /item/1/10\n"
