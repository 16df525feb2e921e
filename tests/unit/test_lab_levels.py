"""Levels beside the truth of a profile: what the truth is, and how a score is reckoned."""

import math

import pytest

from stormline.lab import held_out, levels, profiles
from stormline.netmodel.course import Course
from stormline.netmodel.params import LinkParams
from stormline.policy.level import Level

GOOD = LinkParams(delay_s=0.075, rate_bps=8e6)
BLINKING = Course(up=GOOD, down=GOOD, dark=((20.0, 30.0), (50.0, 53.0)))


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("wifi", Level.EXCELLENT),
        ("4g", Level.EXCELLENT),
        ("3g", Level.FAIR),
        ("edge", Level.POOR),
        ("lossy4g", Level.GOOD),
        ("trap-hol", Level.GOOD),
        ("trap-oversize", Level.POOR),
        ("dead-ip", Level.EXCELLENT),
        ("stall-accept", Level.EXCELLENT),
    ],
)
def test_steady_profile_has_one_truth(name, level):
    course = levels.course_of(profiles.get(name), 1, 60.0)
    assert {levels.truth(course, float(at)) for at in range(60)} == {level}


def test_dark_profile_is_bad_in_the_dark_and_excellent_in_the_light():
    profile = profiles.get("elevator")
    course = levels.course_of(profile, 3, 120.0)
    assert [begin for begin, _ in course.dark] == [event.at_s for event in profile.expand(3, 120.0)]
    (begin, end), *_ = course.dark
    seen = [levels.truth(course, at) for at in (begin - 0.1, begin + 0.1, end - 0.1, end + 0.1)]
    assert seen == [Level.EXCELLENT, Level.BAD, Level.BAD, Level.EXCELLENT]


def test_hand_over_is_judged_by_the_link_in_use():
    course = levels.course_of(profiles.get("handover"), 1, 120.0)
    assert {course.at(at * 0.5).rtt_s for at in range(240)} == {0.02, 0.06}


def test_dead_wifi_is_judged_by_the_second_way_where_the_client_has_one():
    alone, beside = (levels.course_of(profiles.get("fake-wifi"), 1, 120.0, second=each) for each in (False, True))
    assert (alone.dark, beside.dark) == (((15.0, 75.0),), ())
    assert [beside.at(at_s).rtt_s for at_s in (14.0, 16.0, 74.0, 76.0)] == [0.02, 0.06, 0.06, 0.02]
    for second in (False, True):  # where there is no other link the dark is dark
        assert levels.course_of(profiles.get("elevator"), 1, 120.0, second=second).dark


def test_round_trips_drawn_anew_are_the_runs_own():
    course = levels.course_of(profiles.get("uber"), 2, 30.0)
    assert len({course.at(at + 0.5).rtt_s for at in range(30)}) == 30
    assert course == levels.course_of(profiles.get("uber"), 2, 30.0)


@pytest.mark.parametrize("name", [name for name, profile in profiles.PROFILES.items() if "tr-" not in name])
def test_every_profile_has_a_truth(name):
    course = levels.course_of(profiles.get(name), 1, 30.0)
    assert all(levels.truth(course, float(at)) is not Level.UNKNOWN for at in range(30))


def test_perfect_knowledge_scores_full_marks():
    told = [(0.0, Level.GOOD), (20.0, Level.BAD), (30.0, Level.GOOD), (50.0, Level.BAD), (53.0, Level.GOOD)]
    found = levels.score(told, BLINKING, 60.0)
    assert (found.near_pct, found.prompt_pct, found.exact_pct) == (100.0, 100.0, 100.0)
    assert (found.changes, found.seen, found.missed, found.delay_max_s) == (4, 4, 0, 0.0)
    assert found.moves_per_min == found.truth_moves_per_min


def test_late_level_costs_near_not_prompt_and_shows_in_the_delay():
    told = [(0.0, Level.GOOD), (22.0, Level.POOR), (33.0, Level.FAIR)]
    found = levels.score(told, BLINKING, 45.0)
    assert found.near_pct == pytest.approx(100.0 * (1 - 5.0 / 43.0), abs=0.5)
    assert found.prompt_pct == 100.0
    assert (found.changes, found.seen, found.missed) == (2, 2, 0)
    assert (found.delay_p50_s, found.delay_max_s) == (pytest.approx(3.0), pytest.approx(3.0))


def test_change_that_is_not_seen_in_time_is_missed_and_one_too_short_is_not():
    found = levels.score([(0.0, Level.GOOD)], BLINKING, 60.0)
    assert (found.changes, found.seen, found.missed) == (4, 2, 1)
    assert found.prompt_pct < 100.0


def test_client_that_knows_nothing_is_never_near():
    found = levels.score([(0.0, Level.UNKNOWN)], Course(up=GOOD, down=GOOD), 30.0)
    assert (found.near_pct, found.prompt_pct, found.changes) == (0.0, 0.0, 0)
    assert math.isnan(found.delay_max_s)


def test_ceiling_is_what_packets_have_shown():
    every = [0.1 * number for number in range(600)]
    assert levels.ceiling_pct(BLINKING, every, every, 60.0) > 99.0
    none_in_the_dark = [at for at in every if not 19.6 <= at < 30.0]
    blind = levels.ceiling_pct(BLINKING, none_in_the_dark, every, 60.0)
    assert blind == pytest.approx(100.0 * (1 - 10.0 / 58.0), abs=1.0)
    late = [at for at in every if not 20.0 <= at < 32.0]
    assert levels.ceiling_pct(BLINKING, every, late, 60.0) == pytest.approx(100.0 * (1 - 2.0 / 58.0), abs=1.0)
    steady = Course(up=GOOD, down=GOOD)
    assert levels.ceiling_pct(steady, [], [], 60.0) == 100.0


def test_held_out_networks_are_others_than_those_thresholds_were_chosen_on(tmp_path):
    every = (*held_out.WATCHED, *held_out.WATCHED_RECORDED, *held_out.FRESH, *held_out.FRESH_RECORDED)
    made = held_out.there(every, tmp_path)
    assert made == (*held_out.WATCHED, *held_out.FRESH)
    assert len(every) == len({each.name for each in every})
    assert len(made) == len({each.wifi.numbers() for each in made})
    assert not {each.wifi.numbers() for each in made} & {
        profile.wifi.numbers() for profile in profiles.PROFILES.values()
    }
    known = held_out.drawings()
    for profile in made:
        course = levels.course_of(profile, 1, 30.0, folder=tmp_path, made=known)
        assert all(levels.truth(course, float(at)) is not Level.UNKNOWN for at in range(30))
