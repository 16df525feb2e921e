"""Whatever a request goes through and whatever its clock does, its stages add up to its whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.telemetry.timeline import STAGES, Timeline

STEPS = st.lists(st.tuples(st.sampled_from(STAGES), st.floats(-5, 60), st.booleans()), max_size=40)


@given(steps=STEPS, start=st.floats(0, 1e9))
def test_timeline_any_way_through_adds_up_to_the_whole(steps: list[tuple[str, float, bool]], start: float):
    timeline = Timeline(start)
    now = start
    for stage, seconds, moves in steps:
        if moves:
            timeline.move(timeline.stage, stage, seconds)
        else:
            now += seconds
            timeline.enter(stage, now)
    total, stages = timeline.finish(now)
    assert total >= 0
    assert all(spent >= -1e-6 for spent in stages.values())
    assert sum(stages.values()) == pytest.approx(total, abs=1e-3)
