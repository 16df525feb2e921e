"""What is said of a network's limit holds for any outcomes, and brackets the limit of a network that has one."""

from hypothesis import given
from hypothesis import strategies as st

from stormline.policy.natlife import Fate, Tried, decided, in_words, judge, ladder_s

TRIED = st.lists(st.builds(Tried, st.floats(0.0, 4000.0), st.sampled_from(Fate)), max_size=8)
LIMITS = st.floats(8.0, 3600.0)


@given(TRIED, LIMITS)
def test_lifetime_is_ordered_and_can_be_put_in_words(tried: list[Tried], limit_s: float) -> None:
    found = judge(tried)
    assert found.lost_s is None or found.answered_s < found.lost_s
    assert found.keep_alive_s is None or found.keep_alive_s <= found.answered_s
    assert decided(tried) is found.sure
    assert in_words(found, limit_s).isprintable()
    said = {each.fate for each in tried} - {Fate.UNKNOWN}
    assert said or not in_words(found, limit_s)


@given(LIMITS, st.floats(0.1, 4000.0), st.floats(0.1, 4000.0), st.booleans())
def test_limit_is_within_what_is_found(limit_s: float, network_s: float, server_s: float, told: bool) -> None:
    def fate(silence_s: float) -> Tried:
        if silence_s < min(network_s, server_s):
            return Tried(silence_s, Fate.ANSWERED)
        if server_s < network_s:
            return Tried(server_s, Fate.CLOSED)
        return Tried(silence_s, Fate.RESET if told else Fate.LOST)

    found = judge([fate(each) for each in ladder_s(limit_s)])
    assert found.answered_s <= network_s
    assert found.lost_s is None or found.lost_s >= network_s
    assert found.closed_s in (None, server_s)
    assert found.lost_s is not None or found.answered_s > 0.0
