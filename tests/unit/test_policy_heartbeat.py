"""How long a long connection may be silent: the search, what it believes, what it does when a network changes."""

import itertools
import math

import pytest

from stormline.bench.heartbeat import DAY_S, Learned, Mars, live
from stormline.core import limits_heartbeat, limits_memory
from stormline.policy.heartbeat import Bounds, Heartbeats, Silence

WALL_S = 1.7e9


def always(limit_s):
    return lambda now: limit_s


def find(limit_s, pace=None):
    """Let the search end; give its pace and what it took."""
    pace = pace or Learned()
    return pace, live(pace, always(limit_s), 3 * DAY_S, until=lambda: pace.settled)


class TestSearch:
    def test_goes_up_in_quarters_and_believes_the_second_loss(self):
        _, life = find(100.0)
        tried = [(round(silence_s, 1), lost) for _, silence_s, lost in life.history]
        grown = [(30.0, False), (37.5, False), (46.9, False), (58.6, False), (73.2, False), (91.6, False)]
        assert tried[:8] == [*grown, (114.4, True), (102.4, True)]
        assert life.last_s == pytest.approx(91.55 * limits_heartbeat.HEARTBEAT_MARGIN, abs=0.1)
        assert len(tried) == 8 + limits_heartbeat.HEARTBEAT_CONFIRMED

    def test_half_a_step_that_is_survived_is_used_once_the_lost_silence_is_lost_again(self):
        _, life = find(110.0)
        assert [(round(silence_s, 1), lost) for _, silence_s, lost in life.history[6:9]] == [
            (114.4, True), (102.4, False), (114.4, True),
        ]  # fmt: skip
        assert life.last_s == pytest.approx(102.4 * limits_heartbeat.HEARTBEAT_MARGIN, abs=0.1)

    def test_first_silence_that_is_too_long_is_followed_by_the_shortest(self):
        _, life = find(22.0)
        assert [lost for *_, lost in life.history].count(True) <= 3
        assert life.history[1][1] == limits_heartbeat.HEARTBEAT_MIN_S
        assert 0.8 * 22.0 <= life.last_s < 22.0

    def test_network_without_a_limit_is_left_at_the_longest(self):
        life = live(Learned(), always(math.inf), DAY_S)
        assert life.losses == 0
        assert life.last_s == limits_heartbeat.HEARTBEAT_MAX_S

    def test_cap_holds_and_what_it_keeps_from_being_tried_is_tried_later(self):
        known = Heartbeats()
        for now in range(100):
            silence_s = known.plan("n", now, 60.0)
            assert silence_s <= 60.0
            known.observe("n", silence_s, now, alive=True)
        assert known.proven_s("n") == 60.0
        assert known.plan("n", 200.0) == pytest.approx(75.0)

    def test_longer_silence_between_calls_counts_as_tried(self):
        known = Heartbeats()
        known.observe("n", 200.0, 0.0, alive=True)
        assert known.plan("n", 1.0) == 250.0


class TestEvidence:
    def test_loss_counts_only_where_the_first_dial_after_it_stands_soon(self):
        for worked, later_s, counts in (
            (True, 1.0, True),
            (False, 1.0, False),
            (True, limits_heartbeat.HEARTBEAT_PROOF_S + 1.0, False),
        ):
            known = Heartbeats()
            known.observe("n", 100.0, 0.0, alive=True)
            known.observe("n", 125.0, 0.0, alive=False)
            assert known.dialled("n", later_s, worked=worked) == counts
            assert known.plan("n", later_s) == pytest.approx(111.8 if counts else 125.0, abs=0.1)
            assert not known.dialled("n", later_s, worked=True)

    def test_loss_by_chance_costs_two_beats_and_the_search_goes_on(self):
        known, tried = Heartbeats(), []
        for now in itertools.count():
            silence_s = known.plan("n", now)
            tried.append(round(silence_s))
            alive = len(tried) != 4
            known.observe("n", silence_s, now, alive=alive)
            known.dialled("n", now, worked=True)
            if silence_s > 80:
                break
        assert tried == [30, 38, 47, 59, 52, 59, 73, 92]

    def test_noisy_network_needs_three_losses_of_one_silence(self):
        known = Heartbeats()
        for silence_s, alive in ((100.0, True), (125.0, False), (111.8, True), (125.0, True)):
            known.observe("n", silence_s, 0.0, alive=alive)
            known.dialled("n", 0.0, worked=True)
        losses = []
        for now in range(40):
            silence_s = known.plan("n", now)
            losses.append(silence_s > 130.0)
            known.observe("n", silence_s, now, alive=silence_s <= 130.0)
            known.dialled("n", now, worked=True)
        assert 3 <= sum(losses) <= 5
        assert 104.0 <= known.plan("n", 50.0) < 130.0
        assert known.settled("n")

    @pytest.mark.parametrize("silence_s", [math.nan, math.inf, -1.0, 1.0, None, "60", 2**600])
    def test_unsound_and_short_silences_say_nothing(self, silence_s):
        known = Heartbeats()
        for alive in (True, False):
            assert not known.observe("n", silence_s, 0.0, alive=alive)
        assert known.plan("n", 0.0) == limits_heartbeat.HEARTBEAT_START_S

    def test_two_networks_do_not_mix(self):
        known = Heartbeats()
        known.observe("wifi", 300.0, 0.0, alive=True)
        known.observe("cell", 40.0, 0.0, alive=False)
        known.dialled("wifi", 1.0, worked=True)
        assert known.plan("wifi", 1.0) == 375.0
        known.dialled("cell", 1.0, worked=True)
        assert known.plan("cell", 1.0) == limits_heartbeat.HEARTBEAT_MIN_S
        assert known.plan("new", 1.0) == limits_heartbeat.HEARTBEAT_START_S

    def test_table_of_networks_is_bounded(self):
        known = Heartbeats()
        for number in range(10 * limits_memory.MEMORY_NETWORKS_MAX):
            known.observe(str(number), 60.0, 0.0, alive=True)
        assert len(known._networks) <= 2 * limits_memory.MEMORY_NETWORKS_MAX


class TestChange:
    @pytest.mark.parametrize(
        ("was_s", "is_s"), [(300.0, 240.0), (300.0, 60.0), (600.0, 20.0), (3600.0, 20.0), (60.0, 50.0)]
    )
    def test_shorter_limit_is_found_again_with_three_losses(self, was_s, is_s):
        pace, _ = find(was_s)
        life = live(pace, always(is_s), 3 * DAY_S, until=lambda: pace.settled and pace.next_s(0.0) < is_s)
        assert life.losses <= 3
        assert 0.8 * is_s <= life.last_s < is_s
        assert life.history[1][1] < 0.85 * life.history[0][1]

    def test_longer_limit_is_found_within_two_days_by_asking_again(self):
        pace, _ = find(60.0)
        life = live(pace, always(600.0), 2 * DAY_S)
        assert life.losses <= 2
        assert 480.0 <= life.last_s < 600.0

    def test_settled_limit_is_asked_after_more_rarely_each_time(self):
        pace, _ = find(300.0)
        life = live(pace, always(300.0), 30 * DAY_S)
        asked = [0.0, *(at / DAY_S for at, _, lost in life.history if lost)]
        pauses = [round(later - earlier) for earlier, later in itertools.pairwise(asked)]
        assert pauses == [1, 2, 4, 7, 7, 7]


class TestBetweenStarts:
    def test_settled_heartbeat_is_used_at_once(self):
        pace, life = find(300.0)
        at = life.history[-1][0]
        kept = pace.heartbeats.export("n", at, WALL_S)
        again = Heartbeats()
        again.restore("n", kept, 5.0, WALL_S + at - 5.0 + 3600.0)
        assert again.settled("n")
        assert again.plan("n", 5.0) == pytest.approx(life.last_s, rel=1e-3)

    def test_search_goes_on_where_it_was(self):
        known = Heartbeats()
        known.observe("n", 100.0, 0.0, alive=True)
        known.observe("n", 125.0, 0.0, alive=False)
        known.dialled("n", 1.0, worked=True)
        again = Heartbeats()
        again.restore("n", known.export("n", 1.0, WALL_S), 0.0, WALL_S + 60.0)
        assert again.plan("n", 0.0) == pytest.approx(known.plan("n", 1.0), rel=1e-3)

    def test_what_is_known_stands_and_what_is_old_is_left(self):
        known = Heartbeats()
        known.observe("n", 100.0, 0.0, alive=True)
        kept = known.export("n", 0.0, WALL_S)
        other = Heartbeats()
        other.observe("n", 40.0, 0.0, alive=True)
        other.restore("n", kept, 0.0, WALL_S)
        assert other.proven_s("n") == 40.0
        late = Heartbeats()
        late.restore("n", kept, limits_memory.MEMORY_LIFE_S, WALL_S)
        assert late.proven_s("n") == 0.0
        assert known.export("n", limits_memory.MEMORY_LIFE_S, WALL_S) is None
        assert known.export("other", 0.0, WALL_S) is None


class TestSilence:
    def test_answer_proves_the_silence_before_the_question(self):
        silence = Silence(0.0)
        silence.went(100.0)
        assert silence.came(101.0) == 100.0
        silence.went(105.0)
        silence.went(106.0)
        assert silence.came(107.0) == 4.0

    def test_what_the_peer_says_by_itself_proves_it_too(self):
        silence = Silence(0.0)
        assert silence.came(300.0) == 300.0

    def test_unanswered_question_names_the_longest_silence_before_it(self):
        silence = Silence(0.0)
        silence.went(1.0)  # an ACK that nobody answers
        silence.went(201.0)
        silence.went(206.0)
        assert silence.lost_s(209.0) == 200.0

    def test_connection_that_breaks_in_silence_names_that(self):
        silence = Silence(0.0)
        silence.went(1.0)
        silence.came(2.0)
        assert silence.lost_s(92.0) == 90.0

    def test_void_silence_says_nothing(self):
        silence = Silence(0.0)
        silence.went(100.0)
        silence.void(101.0)
        assert silence.lost_s(101.0) == 0.0
        silence.went(102.0)
        assert silence.came(103.0) == 1.0


class TestPeer:
    """Mars's rules, held against the figures known of them."""

    def test_without_a_limit_it_takes_fifty_beats(self):
        life = live(Mars(), always(math.inf), 5.7 * 3600)
        counts = [(silence_s, len(list(each))) for silence_s, each in itertools.groupby(s for _, s, _ in life.history)]
        assert counts[:7] == [(210.0, 8), (270.0, 6), (330.0, 6), (390.0, 6), (450.0, 6), (510.0, 6), (570.0, 6)]
        assert counts[7][0] == 580.0

    @pytest.mark.parametrize(("limit_s", "ends_s"), [(240.0, 210.0), (300.0, 250.0), (400.0, 370.0), (500.0, 430.0)])
    def test_with_a_limit_it_settles_where_it_is_known_to(self, limit_s, ends_s):
        life = live(Mars(), always(limit_s), DAY_S)
        assert (life.last_s, life.losses) == (ends_s, 2)


def test_bounds_can_be_scaled():
    known = Heartbeats(Bounds(min_s=1.0, start_s=2.0, max_s=30.0))
    assert known.plan("n", 0.0) == 2.0
    known.observe("n", 2.0, 0.0, alive=True)
    assert known.plan("n", 0.0) == 2.5
    known.observe("n", 29.0, 0.0, alive=True)
    assert known.plan("n", 0.0) == 30.0
