"""The timeline of a request: stages add up to the whole, whatever the clock does."""

import pytest

from stormline.telemetry.timeline import STAGES, CallRecord, Timeline


def test_timeline_stages_in_order_add_up_to_the_whole():
    timeline = Timeline(10.0)
    timeline.enter("plan", 10.001)
    timeline.enter("connect", 10.003)
    assert timeline.stage == "connect"
    total, stages = timeline.finish(10.25)
    assert total == pytest.approx(250)
    assert stages == pytest.approx({"queued": 1, "plan": 2, "connect": 247})
    assert list(stages) == ["queued", "plan", "connect"]


def test_timeline_stage_entered_again_adds_to_it():
    timeline = Timeline(0.0)
    for stage, now in (("connect", 0.0), ("send", 1.0), ("connect", 3.0), ("send", 7.0)):
        timeline.enter(stage, now)
    assert timeline.finish(7.5)[1] == pytest.approx({"queued": 0, "connect": 5000, "send": 2500})


def test_timeline_clock_that_steps_back_takes_no_time_away():
    timeline = Timeline(10.0)
    timeline.enter("plan", 11.0)
    timeline.enter("send", 5.0)
    total, stages = timeline.finish(11.5)
    assert total == pytest.approx(1500)
    assert stages == pytest.approx({"queued": 1000, "plan": 0, "send": 500})


@pytest.mark.parametrize("stage", ["", "Connect", "dns"])
def test_timeline_unknown_stage_is_refused(stage: str):
    timeline = Timeline(0.0)
    with pytest.raises(ValueError, match="no such stage"):
        timeline.enter(stage, 1.0)
    with pytest.raises(ValueError, match="no such stage"):
        timeline.move("queued", stage, 1.0)
    assert timeline.finish(1.0) == (1000.0, {"queued": 1000.0})


@pytest.mark.parametrize(("seconds", "decode"), [(0.5, 500), (99.0, 2000), (-1.0, 0), (0.0, 0)])
def test_timeline_move_takes_no_more_than_was_counted(seconds: float, decode: float):
    timeline = Timeline(0.0)
    timeline.enter("body", 0.0)
    timeline.enter("parse", 2.0)
    timeline.move("body", "decode", seconds)
    total, stages = timeline.finish(3.0)
    assert stages.get("decode", 0.0) == pytest.approx(decode)
    assert sum(stages.values()) == pytest.approx(total)


def test_timeline_story_counts_from_the_start():
    timeline = Timeline(100.0)
    timeline.note(100.5, "long connection is down, going direct")
    assert timeline.story == [(0.5, "long connection is down, going direct")]


def test_timeline_stages_are_all_known_names():
    assert len(set(STAGES)) == len(STAGES)
    timeline = Timeline(0.0)
    for second, stage in enumerate(STAGES):
        timeline.enter(stage, float(second))
    assert tuple(timeline.finish(99.0)[1]) == STAGES


@pytest.mark.parametrize(
    ("network", "http", "parse", "ok"),
    [
        (True, True, None, True),
        (True, True, True, True),
        (True, True, False, False),
        (True, False, True, False),
        (False, True, True, False),
    ],
)
def test_record_is_a_success_only_where_network_http_and_verdict_are(network, http, parse, ok):
    record = CallRecord(
        call_id="c", started_at_ms=0, method="GET", host="a", path="/", ok_network=network, ok_http=http, ok_parse=parse
    )
    assert record.ok is ok
