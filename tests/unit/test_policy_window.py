"""How much of one answer may be on its way over one stream."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits
from stormline.policy.window import STEP, stream_window_bytes

LEAST, MOST = limits.H2_STREAM_WINDOW_BYTES_MIN, limits.H2_STREAM_WINDOW_BYTES
RATES = st.floats(0.0, 1e9)
TIMES = st.floats(0.0, 100.0)
WILD = st.one_of(st.none(), st.floats(), st.integers())


@pytest.mark.parametrize(
    ("rate", "rtt", "window"),
    [
        (12_500.0, 0.6, pytest.approx(21_250, abs=1)),  # EDGE: 1.7 seconds of the link
        (125_000.0, 0.2, pytest.approx(112_500, abs=1)),  # 3G: four and a half times what is on its way at full rate
        (1_500_000.0, 0.06, MOST),
        (1_000.0, 0.1, LEAST),
        (None, 0.06, MOST),  # nothing measured, and the round trips are a quick network's
        (None, 0.6, LEAST),
        (None, None, MOST),
        (12_500.0, None, MOST),
    ],
)
def test_window_is_what_keeps_the_link_busy(rate, rtt, window):
    assert stream_window_bytes(MOST, rate, rtt) == window


def test_window_stays_where_it_is_about_right():
    assert stream_window_bytes(80_000, 60_000.0, 0.5) == 80_000
    assert stream_window_bytes(80_000, 140_000.0, 0.5) == 210_000
    assert stream_window_bytes(80_000, 25_000.0, 0.5) == 37_500


@given(rate=RATES, rtt=TIMES, faster=st.floats(1.0, 100.0), longer=TIMES)
def test_window_quicker_or_longer_links_never_get_less(rate, rtt, faster, longer):
    window = stream_window_bytes(0, rate, rtt)
    assert LEAST <= window <= MOST
    assert stream_window_bytes(0, rate * faster, rtt + longer) >= window


@given(rtt=st.floats(0.01, 5.0), held_back=st.integers(LEAST, MOST))
def test_window_that_holds_a_transfer_back_grows_until_it_does_not(rtt, held_back):
    """One window comes in a round trip where the link is quicker than that: the rate measured then widens it."""
    window, rounds = held_back, 0
    while window < MOST:
        wider = stream_window_bytes(window, window / rtt, rtt)
        assert wider >= STEP * window or wider == MOST
        window, rounds = wider, rounds + 1
    assert rounds <= math.ceil(math.log2(MOST / LEAST))


@given(now=st.integers(-(2**40), 2**40), rate=WILD, rtt=WILD)
def test_window_wild_numbers_raise_nothing(now, rate, rtt):
    assert LEAST <= stream_window_bytes(now, rate, rtt) <= MOST
