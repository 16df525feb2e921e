"""Whom a client asks for a plan, in which order, and who is left alone."""

from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits_network as limits
from stormline.policy.asking import Centres, Question, Rung, Way, ladder

LINE = Way(Rung.LINE)
OWN = Way(Rung.OWN, "192.0.2.1", 443)
OTHER = Way(Rung.OTHER, "192.0.2.2", 443)
FIRST = Way(Rung.BOOTSTRAP, "192.0.2.3", 443)
CLEAR = Way(Rung.OWN, "192.0.2.1", 80, secure=False)
DOH = Way(Rung.DOH, "dispatch.test", 443)
DNS = Way(Rung.DNS, "dispatch.test", 443)
ALL = (LINE, OWN, OTHER, FIRST, CLEAR, DOH, DNS)


def test_ladder_puts_ways_in_the_order_of_their_rungs_and_clear_http_before_names():
    assert ladder(reversed(ALL)) == ALL


def test_ladder_keeps_a_centre_once_on_its_best_rung():
    assert ladder([Way(Rung.BOOTSTRAP, *OWN[1:3]), OWN, OWN]) == (OWN,)


def test_one_that_failed_goes_behind_all_that_are_well():
    centres = Centres()
    centres.observe_failure(OWN, 0.0, 0.5)
    assert centres.plan([OWN, OTHER, DNS]) == (OTHER, DNS, OWN)


def test_one_that_answered_again_is_back_in_its_place():
    centres = Centres()
    centres.observe_failure(OWN, 0.0, 0.5)
    centres.observe_answer(OWN, 0.1, 20.0)
    assert centres.plan([OTHER, OWN]) == (OWN, OTHER)


def test_sunk_one_is_sniffed_after_pauses_that_grow():
    centres, now, pauses = Centres(), 0.0, []
    for _ in range(12):
        centres.observe_failure(OWN, now, 1.0)
        assert centres.sniff([OWN, OTHER], OTHER, now) is None
        due = centres.next_timer()
        pauses.append(due - now)
        now = due
        assert centres.sniff([OWN, OTHER], OTHER, now) == OWN
    assert pauses[:3] == [10.0, 20.0, 40.0]
    assert pauses[-1] == limits.SNIFF_PAUSE_S_MAX


def test_nothing_below_the_one_that_answered_is_sniffed():
    centres = Centres()
    centres.observe_failure(DNS, 0.0, 0.0)
    assert centres.sniff(ALL, OWN, 1000.0) is None


def test_another_network_forgets_who_failed():
    centres = Centres()
    centres.observe_failure(OWN, 0.0, 1.0)
    centres.reset()
    assert centres.plan([OTHER, OWN]) == (OWN, OTHER)
    assert centres.next_timer() is None


def test_head_start_is_learned_within_its_bounds():
    centres = Centres()
    assert centres.stagger_s == limits.ASK_STAGGER_S
    for _ in range(10):
        centres.observe_answer(OWN, 0.4, 0.0)
    assert 0.4 <= centres.stagger_s <= 0.51
    for _ in range(60):
        centres.observe_answer(OWN, 9.0, 0.0)
    assert centres.stagger_s == limits.ASK_STAGGER_S_MAX


def test_silent_one_has_the_next_beside_it_after_the_head_start():
    question = Question([OWN, OTHER, FIRST, DNS], 1.0, 0.0)
    assert question.plan(0.0) == (OWN,)
    assert question.plan(0.5) == ()
    assert question.next_timer() == 1.0
    assert question.plan(1.0) == (OTHER,)
    assert question.plan(2.0) == (FIRST,)
    assert question.plan(9.0) == ()  # three are under way
    assert question.next_timer() is None


def test_one_that_fails_has_the_next_at_once():
    question = Question([OWN, OTHER], 1.0, 0.0)
    question.plan(0.0)
    question.observe(OWN, 0.1)
    assert question.plan(0.1) == (OTHER,)
    question.observe(OTHER, 0.2)
    assert question.over


@given(
    st.lists(st.sampled_from(ALL), max_size=12),
    st.lists(st.tuples(st.integers(0, 6), st.floats(0, 3)), max_size=60),
    st.floats(0.01, 2.0),
)
def test_every_way_is_asked_once_and_never_more_at_once_than_allowed(ways, course, stagger_s):
    order = Centres().plan(ways)
    question, now, live, asked = Question(order, stagger_s, 0.0), 0.0, [], []
    for which, passes_s in (*course, *((0, 3.0),) * 40):
        for way in question.plan(now):
            live.append(way)
            asked.append(way)
        assert len(live) <= limits.ASK_BESIDE_MAX
        if live:
            question.observe(live.pop(which % len(live)), now)
        now += passes_s
    assert question.over
    assert tuple(asked) == order
