"""Whatever happened to addresses: an order names each at most once, and never none."""

from hypothesis import given
from hypothesis import strategies as st

from stormline.policy.addresses import AddressBook, AddressOutcome, Candidate, Verdict

PLACES = [Candidate(f"192.0.2.{number}", 443) for number in range(4)] + [
    Candidate(f"2001:db8::{number}", 443) for number in range(3)
]
places = st.sampled_from(PLACES)
wild = st.none() | st.floats() | st.integers() | st.text(max_size=2)
outcomes = st.builds(AddressOutcome, st.sampled_from("xy"), st.just("h"), places, st.sampled_from(Verdict), wild, wild)


@given(
    st.lists(st.tuples(outcomes, st.floats(-10, 10_000)), max_size=60),
    st.lists(st.tuples(st.lists(places, min_size=1), st.sets(places), st.floats(-10, 100_000)), min_size=1, max_size=5),
)
def test_order_is_never_empty_names_each_once_and_puts_what_was_left_last(events, asks):
    book = AddressBook()
    for outcome, now in events:
        book.observe(outcome, now)
        book.ban("x", "h", outcome.candidate, now, 60.0) if outcome.connect_s == 0 else None
    for candidates, left, now in asks:
        ranked = book.plan("x", "h", candidates, now, left=left)
        chosen = [each.candidate for each in ranked]
        assert chosen
        assert len(chosen) == len(set(chosen))
        assert set(chosen) <= set(candidates)
        seen_left = False
        for each in chosen:
            assert not (seen_left and each not in left)
            seen_left = seen_left or each in left


@given(st.lists(st.tuples(places, st.floats(0, 5)), max_size=60))
def test_where_nothing_ever_works_nothing_is_banned(failures):
    book, now = AddressBook(), 0.0
    for place, passed in failures:
        now += passed
        book.observe(AddressOutcome("x", "h", place, Verdict.FAILED, tried_s=1.0), now)
        assert {each.candidate for each in book.plan("x", "h", PLACES, now)} == set(PLACES)
