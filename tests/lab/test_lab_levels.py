"""Real kernels: what the client takes the network for, beside the truth of the profile."""

import os
from pathlib import Path

import pytest

from stormline.lab import run

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]


def test_level_is_near_the_truth_on_real_links(tmp_path: Path) -> None:
    profiles = ["wifi", "3g", "edge", "elevator"]
    keys = run.plan(profiles, ["stormline"], [1], duration_s=30.0)
    found = {each.profile: each for each in run.run_all(keys, jobs=8, out=tmp_path / "a.jsonl", environ=os.environ)}
    for name in profiles:
        result = found[name]
        first_at_s, first = result.levels[0]
        assert first != "unknown" or first_at_s < 1.0  # told as it starts, to the hundredth of a busy machine
        assert result.level_near_pct is not None
        assert result.level_prompt_pct is not None
        assert result.level_near_pct >= 80.0, result.levels
        assert result.level_prompt_pct >= 90.0, result.levels
        assert result.level_missed == 0, result.levels
    assert {level for _, level in found["elevator"].levels} >= {"bad", "excellent"}


def test_client_that_tells_no_level_has_none(tmp_path: Path) -> None:
    keys = run.plan(["wifi"], ["httpx2"], [1], duration_s=4.0, requests=4)
    (result,) = run.run_all(keys, jobs=1, out=tmp_path / "a.jsonl", environ=os.environ)
    assert result.levels == []
    assert result.level_near_pct is None
