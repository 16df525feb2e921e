"""The bench of the API gate runs, and its figures are figures; what they are is no test's business."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.loopback

SMALL_RUN = """
import json
from stormline.bench import appgw_api
appgw_api.REQUESTS, appgw_api.LARGE_REQUESTS, appgw_api.ROUNDS = 80, 40, 1
print(json.dumps({row.name: row.ours for row in appgw_api.run()}))
"""


def test_bench_gives_all_its_rows():
    done = subprocess.run([sys.executable, "-c", SMALL_RUN], capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert set(rows) == {"api_get_us", "api_get_kept_us", "api_get_coded_us", "api_coded_ratio"}
    assert all(figure > 0 for figure in rows.values())
    assert rows["api_coded_ratio"] > 2  # it was coded
