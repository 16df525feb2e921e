"""Real kernels: what is made beside attempts keeps to its share of bytes where they cost money, and costs no answer."""

import os
from pathlib import Path

import pytest

from stormline.core import limits_means
from stormline.lab import run

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]


def test_rescues_on_a_cellular_network_keep_to_their_share_and_cost_no_answer(tmp_path: Path) -> None:
    keys = run.plan(["subway"], ["stormline", "stormline_cell"], [1], duration_s=30.0)
    usual, cell = run.run_all(keys, jobs=2, out=tmp_path / "a.jsonl", environ=os.environ)
    assert (usual.extra_bytes, usual.extras_refused) == (0, 0)
    total = cell.bytes_up + cell.bytes_down
    assert 0 < cell.extra_bytes <= limits_means.METERED_FLOAT_BYTES + limits_means.METERED_SHARE * total
    assert cell.extras_refused > 0
    assert cell.ok >= 0.95 * cell.requests
