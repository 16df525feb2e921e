"""What the client bench makes of its measurements."""

import pytest

from stormline.bench.client import median_pair
from stormline.bench.hosts import bytes_per_host
from stormline.bench.results import row


def test_median_pair_is_the_pair_of_turns_with_the_median_ratio() -> None:
    # In the second round the machine was slow for both; the ratio says what it would have said on a quiet one.
    assert median_pair([30.0, 100.0, 90.0], [100.0, 200.0, 100.0]) == (100.0, 200.0)


def test_median_pair_of_an_even_number_is_the_lower_one_in_the_middle() -> None:
    assert median_pair([10.0, 40.0], [100.0, 100.0]) == (10.0, 100.0)


@pytest.mark.parametrize(("ours", "better", "ok"), [(1.0, "lower", True), (3.0, "lower", False), (3.0, "higher", True)])
def test_row_is_judged_by_its_goal(ours, better, ok) -> None:
    assert row("name", ours, "us", goal=2.0, better=better).ok is ok


async def test_bytes_per_host_counts_what_is_kept_of_every_host() -> None:
    few, many = await bytes_per_host(200), await bytes_per_host(2000)

    assert 100 < many < 4096
    assert many < 2 * few
