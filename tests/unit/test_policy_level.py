"""Five levels of a network's quality: what a link is worth, what samples say of it, what follows."""

import itertools
import math

import pytest

from stormline.core import limits_level
from stormline.policy.level import (
    BEHAVIOUR,
    LEVELS,
    Level,
    LevelBook,
    LevelEstimator,
    bars,
    behaviour,
    body_rate,
    bulk_bytes_per_s,
    level_of,
    requests_max,
    response_s,
    silence_level,
    spares_lane,
)

KBIT = 125.0
RISING = [Level.BAD, Level.POOR, Level.FAIR, Level.GOOD, Level.EXCELLENT]


def steady(rtt_s, *, begin=0.0, seconds=10.0, every_s=0.4, made=None):
    made = LevelEstimator() if made is None else made
    for step in range(int(seconds / every_s) + 1):
        made.observe_round_trip(rtt_s, begin + step * every_s)
    return made


class TestWorth:
    @pytest.mark.parametrize(
        ("rtt_s", "kbits", "loss", "level"),
        [
            (0.02, 40_000, 0.001, Level.EXCELLENT),  # WiFi at home
            (0.06, 12_000, 0.0, Level.EXCELLENT),  # 4G
            (0.125, 1600, 0.0, Level.GOOD),  # what Chromium calls typical of 4G
            (0.4, 400, 0.0, Level.FAIR),  # of 3G
            (1.5, 75, 0.0, Level.POOR),  # of 2G
            (3.0, 40, 0.0, Level.BAD),  # of slow-2G
            (0.6, 100, 0.03, Level.POOR),  # EDGE
            (0.05, 100, 0.0, Level.POOR),  # a rate can be what is wrong
            (0.05, None, 0.0, Level.EXCELLENT),
            (None, 300, 0.0, Level.FAIR),
            (None, None, 0.0, Level.UNKNOWN),
            (0.02, 40_000, 1.0, Level.BAD),  # dark
            (None, None, 1.0, Level.BAD),
        ],
    )
    def test_link_has_the_level_of_its_weakest_side(self, rtt_s, kbits, loss, level):
        assert level_of(rtt_s, None if kbits is None else kbits * KBIT, loss) is level

    def test_loss_costs_small_exchanges_time_outs_and_large_ones_their_rate(self):
        assert response_s(0.06, 0.05) == pytest.approx(0.06 + 2 * 0.05 / 0.95 * 0.3)
        assert response_s(0.06, 1.0) == math.inf
        assert bulk_bytes_per_s(1e6, 0.1, 0.01) == pytest.approx(1.22 * 1400 / (0.1 * 0.1))
        assert bulk_bytes_per_s(1e6, 0.1, 0.0) == bulk_bytes_per_s(1e6, None, 0.5) == 1e6
        assert level_of(0.1, 1e6, 0.04).rank < level_of(0.1, 1e6, 0.04, loss_events=0.005).rank

    def test_levels_rank_from_unknown_to_excellent_and_two_are_weak(self):
        assert [level.rank for level in LEVELS] == list(range(6))
        assert [level for level in LEVELS if level.weak] == [Level.BAD, Level.POOR]


class TestBodies:
    def test_body_as_quick_as_slow_start_alone_found_no_bound(self):
        assert body_rate(30_720, 0.07, 0.06) == math.inf

    def test_body_held_up_by_the_link_shows_its_rate(self):
        assert body_rate(30_720, 2.4, 0.6) == pytest.approx(10_240.0)
        assert body_rate(131_072, 10.0, None) == pytest.approx(13_107.2)

    def test_body_of_the_first_flight_tells_nothing(self):
        assert body_rate(limits_level.LEVEL_BODY_BYTES_MIN - 1, 5.0, 0.1) is None


class TestEstimate:
    def test_one_round_trip_is_a_level(self):
        assert steady(0.06, seconds=0.0).quality(0.1).level is Level.EXCELLENT

    def test_confidence_grows_with_samples_and_evidence_names_them(self):
        first, more = steady(0.06, seconds=0.0).quality(0.0), steady(0.06).quality(10.0)
        assert first.confidence < more.confidence <= 1.0
        assert "round trip 60 ms (26 samples)" in more.evidence

    @pytest.mark.parametrize(("before", "after"), [(0.06, 0.6), (0.6, 0.06), (0.06, 3.0), (3.0, 0.06), (0.2, 0.05)])
    @pytest.mark.parametrize("every_s", [0.1, 0.4, 1.0])
    def test_change_of_the_round_trip_shows_within_five_seconds(self, before, after, every_s):
        made = steady(before, every_s=every_s, seconds=30.0)
        steady(after, begin=30.0, every_s=every_s, seconds=5.0, made=made)
        assert abs(made.quality(35.0).level.rank - level_of(after, None).rank) <= 1

    def test_rate_alone_makes_a_level_worse_and_its_memory_fades(self):
        made = steady(0.06)
        made.observe_rate(100 * KBIT, 10.0)
        assert made.quality(10.0).level is Level.POOR
        steady(0.06, begin=10.4, seconds=20.0, made=made)
        assert made.quality(30.4).level is Level.EXCELLENT

    def test_rate_measured_behind_other_answers_weighs_less_than_one_alone(self):
        made = steady(0.06)
        made.observe_rate(2000 * KBIT, 10.0)
        made.observe_rate(100 * KBIT, 10.1, queued=True)
        assert made.quality(10.1).level is Level.GOOD

    def test_value_around_a_threshold_does_not_flap(self):
        made, shown = LevelEstimator(), []
        for step in range(300):
            made.observe_round_trip(0.272 * (1.15 if step % 7 < 3 else 0.9), step * 0.4)
            shown.append(made.quality(step * 0.4).level)
        assert len(set(shown[10:])) == 1

    def test_single_slow_answer_moves_nothing(self):
        made = steady(0.06)
        made.observe_round_trip(4.0, 10.2, sent_at=6.2)
        assert made.quality(10.2).level is Level.EXCELLENT

    def test_better_level_is_taken_only_after_a_while(self):
        made = steady(3.0)
        steady(0.06, begin=10.4, seconds=2.0, made=made)
        early = made.quality(12.4).level
        steady(0.06, begin=12.8, seconds=3.0, made=made)
        assert early.rank < made.quality(15.8).level.rank

    def test_without_traffic_it_is_unknown_after_a_minute(self):
        made = steady(0.06)
        assert made.quality(10.0 + limits_level.LEVEL_MEMORY_S - 1.0).level is Level.EXCELLENT
        later = made.quality(10.0 + limits_level.LEVEL_MEMORY_S + 1.0)
        assert (later.level, later.carries, later.confidence) == (Level.UNKNOWN, Level.UNKNOWN, 0.0)

    def test_since_says_for_how_long_the_level_has_held(self):
        made = steady(0.06)
        made.quality(10.0)
        assert made.quality(14.0).since_s == pytest.approx(4.0)
        assert made.quality(14.0, silent_s=5.0).since_s == 0.0

    @pytest.mark.parametrize("wild", [math.nan, -1.0, math.inf, None, "x", 1e9, True])
    def test_unsound_samples_are_dropped_and_counted(self, wild):
        made = steady(0.06)
        made.observe_round_trip(wild, 10.0)
        made.observe_silence(wild, 10.0)
        made.observe_rate(wild if wild not in (math.inf, 1e9) else math.nan, 10.0)
        assert made.quality(10.0).level is Level.EXCELLENT
        assert made.dropped == 3


class TestSilence:
    def test_silence_while_something_is_owed_counts_at_once_and_its_end_too(self):
        made = steady(0.06)
        assert made.quality(10.3, silent_s=0.3).level is Level.EXCELLENT  # a lost packet is on its way again
        assert made.quality(10.4, silent_s=0.4).level is Level.POOR  # and that one was lost too
        assert made.quality(10.7, silent_s=0.7).level is Level.POOR
        dark = made.quality(12.0, silent_s=2.0)
        assert (dark.level, dark.carries) == (Level.BAD, Level.EXCELLENT)
        assert "silent for 2.0 s" in dark.evidence
        made.observe_silence(2.5, 12.5)
        made.observe_round_trip(0.06, 12.6, sent_at=12.54)
        assert made.quality(12.6).level is Level.EXCELLENT

    def test_what_waited_through_a_dark_spell_is_not_counted_again(self):
        made = steady(0.06)
        made.observe_silence(8.0, 18.0)
        for call in range(20):
            made.observe_round_trip(8.0 - 0.4 * call, 18.01, sent_at=10.0 + 0.4 * call)
        assert made.quality(18.02).level is Level.EXCELLENT

    def test_slow_path_is_given_the_time_it_needs(self):
        assert silence_level(1.2, 0.06) is Level.BAD
        assert silence_level(1.2, 0.6) is Level.EXCELLENT
        assert silence_level(2.9, 0.6) is Level.POOR
        assert silence_level(3.1, 0.6) is Level.BAD
        assert silence_level(3.0, None) is Level.BAD

    def test_first_dial_in_the_dark_is_known_to_be_bad_though_nothing_was_measured(self):
        quality = LevelEstimator().quality(3.0, silent_s=3.0)
        assert quality.level is Level.BAD
        assert quality.confidence > 0.5


class TestSignalAndNetworks:
    def test_bars_are_a_guess_where_nothing_is_measured_and_none_elsewhere(self):
        assert LevelEstimator().quality(0.0, signal=0).level is Level.BAD
        assert LevelEstimator().quality(0.0, signal=4).level is Level.EXCELLENT
        assert LevelEstimator().quality(0.0, signal=9).level is Level.EXCELLENT
        assert steady(0.06).quality(10.0, signal=0).level is Level.EXCELLENT

    @pytest.mark.parametrize(
        ("kind", "dbm", "seen"),
        [
            ("wifi", -100, 0), ("wifi", -88, 1), ("wifi", -70, 2), ("wifi", -55, 4), ("wifi", 0, 4),
            ("cell", -140, 0), ("cell", -110, 2), ("cell", -90, 4),
            ("wifi", None, None), ("wired", -50, None), ("unknown", -50, None),
        ],
    )  # fmt: skip
    def test_bars_are_what_people_see(self, kind, dbm, seen):
        assert bars(kind, dbm) == seen

    def test_samples_of_another_signal_weigh_less(self):
        made = LevelEstimator()
        for step in range(10):
            made.observe_round_trip(0.06, step * 0.1, signal=4)
        for step in range(7):
            made.observe_round_trip(0.6, 1.0 + step * 0.1, signal=0)
        assert made.quality(1.7, signal=0).level is Level.FAIR

    def test_network_that_comes_back_starts_with_what_it_was(self):
        book = LevelBook()
        for step in range(10):
            book.at("home", step).observe_round_trip(0.03, step)
        assert book.at("train", 100.0).quality(100.0).level is Level.UNKNOWN
        book.at("train", 100.0).observe_round_trip(0.6, 100.0)
        back = book.at("home", 500.0).quality(500.0)
        assert (back.level, back.confidence) == (Level.EXCELLENT, 0.2)
        assert "when this network was left" in back.evidence
        unused = book.at("home", 700.0).quality(700.0)
        assert unused.level is Level.UNKNOWN

    def test_what_is_measured_ends_the_guess(self):
        made = LevelEstimator()
        made.remember(Level.EXCELLENT, 0.0)
        made.observe_round_trip(3.0, 1.0)
        assert made.quality(1.0).level is Level.BAD

    def test_level_of_the_day_before_is_no_guess(self):
        book = LevelBook()
        book.at("home", 0.0).observe_round_trip(0.03, 0.0)
        book.at("train", 1.0)
        late = limits_level.LEVEL_PRIOR_S + 10.0
        assert book.at("home", late).quality(late).level is Level.UNKNOWN

    def test_number_of_networks_is_bounded(self):
        book = LevelBook()
        for number in range(1000):
            book.at(str(number), float(number)).observe_round_trip(0.1, float(number))
        assert len(book._networks) <= 2 * limits_level.LEVEL_NETWORKS_MAX


class TestBehaviour:
    def test_every_level_has_one_and_worse_ones_ask_no_less_care(self):
        assert set(BEHAVIOUR) == set(LEVELS)
        for worse, better in itertools.pairwise(RISING):
            a, b = behaviour(worse), behaviour(better)
            assert a.requests_max <= b.requests_max
            assert a.concurrency <= b.concurrency
            assert a.patience >= b.patience
            assert a.stagger_s >= b.stagger_s
            assert a.heartbeat_answer >= b.heartbeat_answer
            assert (a.second_lane, a.prefetch, not a.large_wait) <= (b.second_lane, b.prefetch, not b.large_wait)

    def test_weak_levels_change_everything_the_table_knows(self):
        weak, well = behaviour(Level.POOR), behaviour(Level.EXCELLENT)
        assert all(a != b for a, b in zip(weak, well, strict=True))

    def test_requests_at_once_fall_with_the_level(self):
        assert [requests_max(level) for level in RISING] == [2, 4, 8, 32, 64]

    @pytest.mark.parametrize(
        ("rtt_s", "bytes_per_s", "room"),
        [
            (0.2, 40_000.0, True),
            (0.2, 20_000.0, False),
            (0.2, None, True),
            (0.3, None, False),
            (1.0, 1e6, False),
            (None, None, False),
            (None, 40_000.0, True),
        ],
    )
    def test_second_lane_needs_a_fair_link_and_a_good_one_where_no_rate_is_known(self, rtt_s, bytes_per_s, room):
        assert spares_lane(rtt_s, bytes_per_s) is room
