"""What is made beside something else on a metered network never costs more than its share, over any span of time."""

from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits_means
from stormline.policy.extras import ExtraBytes

SHARE, FLOAT = limits_means.METERED_SHARE, limits_means.METERED_FLOAT_BYTES
_SIZES = st.integers(0, 60_000) | st.integers(0, 5_000_000)
_EVENTS = st.lists(st.tuples(st.sampled_from(["useful", "take", "flush"]), _SIZES), max_size=80)


@given(_EVENTS)
def test_taken_is_never_more_than_the_share_and_the_float_over_any_span(events):
    extras, total, owed = ExtraBytes(), 0, 0
    marks = [(0, 0)]  # bytes of use, bytes taken, after each event
    useful = taken = 0
    for kind, size in events:
        if kind == "useful":
            useful += size
            total += size
        elif kind == "flush":  # what was taken passes the sockets
            total += owed
            owed = 0
        else:
            extras.carried(total)
            if extras.take(size):
                taken += size
                owed += size
        marks.append((useful, taken))
    for number, (useful_before, taken_before) in enumerate(marks):
        for useful_after, taken_after in marks[number:]:
            assert taken_after - taken_before <= FLOAT + SHARE * (useful_after - useful_before) + 1e-6


@given(_EVENTS)
def test_what_was_spent_and_taken_agree(events):
    extras, total = ExtraBytes(), 0
    given_bytes = []
    for kind, size in events:
        if kind == "take":
            extras.carried(total)
            if extras.take(size):
                given_bytes.append(size)
        else:
            total += size
    assert extras.bytes_taken == sum(given_bytes)
    assert extras.taken == len(given_bytes)
    assert extras.taken + extras.refused == sum(kind == "take" for kind, _ in events)


@given(st.lists(st.one_of(st.floats(), st.integers(-10, 2**70), st.none(), st.text(max_size=2)), max_size=20))
def test_wild_counters_raise_nothing_and_give_nothing_beyond_the_float(values):
    extras = ExtraBytes()
    for value in values:
        extras.start(value)
        extras.carried(value)
    assert not extras.take(FLOAT + 1)
    assert extras.take(FLOAT)
