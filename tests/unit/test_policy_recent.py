"""A bounded table that keeps what was used last."""

from hypothesis import given
from hypothesis import strategies as st

from stormline.policy.recent import RecentTable


@given(st.lists(st.integers(0, 30), max_size=300), st.integers(1, 10))
def test_table_keeps_the_last_used_entries_and_never_more_than_twice_as_many(keys, keep):
    made = []
    table = RecentTable(keep, lambda: made.append(None) or [])
    for key in keys:
        table.use(key).append(key)
        assert len(table) <= 2 * keep
    last = list(dict.fromkeys(reversed(keys)))[:keep]
    assert all(table.find(key) for key in last)


def test_entry_used_again_is_kept_once():
    table = RecentTable(2, list)
    for key in "abca":
        table.use(key)
    assert len(table) == 3


def test_find_makes_nothing_and_does_not_count_as_use():
    table = RecentTable(2, list)
    assert table.find("a") is None
    assert len(table) == 0
    kept = table.use("a")
    for key in "bcde":
        assert table.find("a") in (kept, None)
        table.use(key)
    assert table.find("a") is None
