"""What a client does less of in the background: the table, and a long connection's way back."""

import itertools
import re
from pathlib import Path

import pytest

from stormline.core import limits
from stormline.policy import activity
from stormline.policy.activity import CONDUCT, Activity
from stormline.policy.reconnect import Reconnect

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "admission.md"


def test_each_state_does_no_more_than_the_one_before() -> None:
    states = [CONDUCT[each] for each in Activity]
    for more, less in itertools.pairwise(states):
        assert less.heartbeat_s >= more.heartbeat_s
        assert less.return_first_s >= more.return_first_s
        assert less.return_max_s >= more.return_max_s
        assert less.hedges <= more.hedges
        assert less.preconnects <= more.preconnects


def test_foreground_is_as_it_is_without_any_activity() -> None:
    foreground = CONDUCT[Activity.FOREGROUND]
    assert foreground.heartbeat_s == limits.HEARTBEAT_S
    assert (foreground.return_first_s, foreground.return_max_s) == (limits.RECONNECT_FIRST_S, limits.RECONNECT_MAX_S)


@pytest.mark.parametrize("text", [activity.__doc__, PAGE.read_text(encoding="utf-8")], ids=["module", "page"])
def test_table_says_what_the_code_does(text: str) -> None:
    def row(name: str) -> list[float]:
        found = re.search(rf"^\| {name}[^|]*\|(.+)\|$", text, re.MULTILINE)
        assert found is not None
        return [float(number) for number in re.findall(r"(\d+) s", found[1])]

    conducts = list(CONDUCT.values())
    assert row("heartbeat") == [each.heartbeat_s for each in conducts]
    assert row("first return") == [each.return_first_s for each in conducts]
    assert row("longest pause") == [each.return_max_s for each in conducts]


def lost(state: Activity, chance: float = 0.999) -> Reconnect:
    line = Reconnect()
    line.set_pace(CONDUCT[state].return_first_s, CONDUCT[state].return_max_s)
    line.observe_success(0.0)
    line.observe_loss(100.0, chance)
    return line


@pytest.mark.parametrize("state", Activity)
def test_lost_connection_returns_within_its_span_and_for_a_call_at_once(state: Activity) -> None:
    line = lost(state)
    due = line.keep_timer()
    assert due is not None
    assert due == pytest.approx(100.0 + CONDUCT[state].return_first_s, rel=0.01)
    at_once = line.next_timer()
    assert at_once is not None
    assert at_once <= 100.0 + limits.RECONNECT_FIRST_S


@pytest.mark.parametrize("state", Activity)
def test_failures_make_pauses_longer_up_to_their_bound(state: Activity) -> None:
    line, now, pauses = lost(state), 200.0, []
    for _ in range(14):
        line.observe_failure(now, 0.999)
        due = line.keep_timer()
        assert due is not None
        pauses.append(round(due - now, 6))
        now = due
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(CONDUCT[state].return_max_s, rel=0.01)


def test_coming_to_the_foreground_ends_a_long_pause() -> None:
    line = lost(Activity.INACTIVE)
    line.set_pace(limits.RECONNECT_FIRST_S, limits.RECONNECT_MAX_S)
    due = line.keep_timer()
    assert due is not None
    assert due <= 101.0


def test_network_change_ends_every_pause() -> None:
    line = lost(Activity.INACTIVE)
    line.reset()
    assert line.keep_timer() == 0.0
