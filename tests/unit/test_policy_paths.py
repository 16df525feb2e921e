"""Which way out a request takes."""

import pytest

from stormline.core import limits
from stormline.policy.paths import PathPolicy, Way

WIFI, CELL = Way("wlan0"), Way("wwan0", metered=True)


@pytest.fixture
def paths():
    made = PathPolicy()
    made.routes((WIFI, CELL))
    return made


def kill_wifi(paths, now=10.0):
    assert paths.beside("wlan0", dark_s=1.5, now=now) == "wwan0"
    return paths.answered("wwan0", now + 0.2)


def test_system_s_order_holds_while_nothing_speaks_against_it(paths):
    assert paths.plan(0.0) == ("wlan0", "wwan0")
    assert paths.next_timer() is None


def test_short_silence_is_no_reason_to_try_elsewhere(paths):
    assert paths.beside("wlan0", dark_s=limits.PATH_DARK_S / 2, now=10.0) is None


def test_dark_way_whose_neighbour_answers_is_dead_and_comes_last(paths):
    assert kill_wifi(paths) == "wlan0"
    assert paths.plan(11.0) == ("wwan0", "wlan0")


def test_dark_way_whose_neighbour_is_silent_too_stays_first(paths):
    paths.beside("wlan0", dark_s=1.5, now=10.0)
    assert paths.plan(11.0) == ("wlan0", "wwan0")
    assert paths.beside("wwan0", dark_s=1.5, now=11.0) is None  # in a tunnel both are dark
    assert paths.beside("wwan0", dark_s=6.0, now=15.0) == "wlan0"  # of which nobody has told for a while


def test_way_that_brought_something_meanwhile_is_not_dead(paths):
    paths.beside("wlan0", dark_s=1.5, now=10.0)
    paths.heard("wlan0", 10.1)
    assert paths.answered("wwan0", 10.2) is None
    assert paths.plan(11.0) == ("wlan0", "wwan0")


def test_dead_way_is_asked_one_question_at_a_time_until_it_answers(paths):
    kill_wifi(paths)
    assert paths.probe(10.3) is None
    due = paths.next_timer()
    assert due == pytest.approx(10.2 + limits.PATH_PROBE_S)
    assert paths.probe(due) == "wlan0"
    assert paths.probe(due) is None
    assert paths.next_timer() is None
    paths.probed("wlan0", due + 1.0, alive=False)
    assert paths.plan(due + 1.0)[0] == "wwan0"
    assert paths.probe(due + 1.0 + limits.PATH_PROBE_S) == "wlan0"
    paths.probed("wlan0", due + 4.0, alive=True)
    assert paths.plan(due + 4.0)[0] == "wlan0"


def test_dead_way_that_brings_an_old_answer_is_back_without_a_question(paths):
    kill_wifi(paths)
    paths.heard("wlan0", 11.0)
    assert paths.plan(11.0) == ("wlan0", "wwan0")


def test_way_that_keeps_relapsing_is_asked_less_and_less_and_forgiven_when_it_is_steady(paths):
    now, pauses = 10.0, []
    for _ in range(8):
        kill_wifi(paths, now)
        due = paths.next_timer()
        pauses.append(round(due - now - 0.2, 6))
        assert paths.probe(due) == "wlan0"
        paths.probed("wlan0", due, alive=True)
        now = due + 1.0
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(limits.PATH_PROBE_S)
    assert pauses[-1] == pytest.approx(limits.PATH_PROBE_S_MAX)
    paths.heard("wlan0", now + limits.PATH_STEADY_S)
    kill_wifi(paths, now + limits.PATH_STEADY_S + 5.0)
    assert paths.next_timer() - now - limits.PATH_STEADY_S - 5.2 == pytest.approx(limits.PATH_PROBE_S)


def test_metered_way_carries_no_more_than_its_bound_and_has_room_again_later(paths):
    paths.carried("wwan0", limits.PATH_METERED_BYTES + 1000, 10.0)
    assert paths.beside("wlan0", dark_s=1.5, now=10.0) is None
    assert paths.plan(10.0) == ("wlan0",)
    later = 10.0 + 86_400.0
    assert paths.beside("wlan0", dark_s=1.5, now=later) == "wwan0"


def test_metered_way_that_the_system_itself_has_chosen_is_not_counted():
    paths = PathPolicy()
    paths.routes((CELL,))
    paths.carried("wwan0", 10 * limits.PATH_METERED_BYTES, 10.0)
    assert paths.plan(10.0) == ("wwan0",)


def test_way_that_went_away_is_forgotten_and_one_that_stays_is_not(paths):
    kill_wifi(paths)
    paths.routes((WIFI, CELL, Way("eth0")))
    assert paths.plan(11.0) == ("wwan0", "eth0", "wlan0")
    paths.routes((CELL,))
    paths.routes((WIFI, CELL))
    assert paths.plan(12.0) == ("wlan0", "wwan0")


def test_machine_without_a_way_out_has_an_empty_plan():
    paths = PathPolicy()
    assert paths.plan(0.0) == ()
    assert paths.beside("wlan0", dark_s=9.0, now=0.0) is None
    paths.heard("wlan0", 0.0)
    paths.probed("wlan0", 0.0, alive=True)
    paths.carried("wlan0", 5, 0.0)
