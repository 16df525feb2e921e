"""What a relay is worth in an operator's incident, in real namespaces: a small form of `stormline lab relay`."""

import os

import pytest

from stormline.lab import relays

pytestmark = pytest.mark.lab
BEGIN_S = 2.0
DURATION_S = 22.0


def test_an_off_site_relay_serves_what_an_on_site_one_serves_in_part_and_none_does_not(tmp_path) -> None:
    cases = relays.incident([1], DURATION_S, begin_s=BEGIN_S, rate=4.0)
    found = relays.run_all(cases, folder=tmp_path, jobs=len(cases), environ=os.environ, again=False)
    for result in found:
        if result.distrust:
            pytest.skip(f"the machine got in the way: {result.distrust}")
    none, on_site, off_site = (
        relays.curve(case.name, [result], begin_s=BEGIN_S) for case, result in zip(cases, found, strict=True)
    )
    assert none.requests == on_site.requests == off_site.requests >= 20
    # 28 to 30 %, some 4 %, and hardly any over many runs; one short run on a busy machine is told apart with room.
    assert none.failed_pct >= 10.0, found
    assert off_site.failed_pct <= 4.0, found
    assert off_site.failed_pct <= on_site.failed_pct <= none.failed_pct * 0.6, found
    before = [each for result in found for each in result.outcomes if each.at_s < BEGIN_S - 1.0]
    assert all(not each.kind for each in before)
