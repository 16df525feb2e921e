"""Any bytes for a `struct tcp_info`: a look at a connection with sane numbers, or None."""

import math

from hypothesis import given
from hypothesis import strategies as st

from stormline.net.tcpinfo import parse


@given(st.binary(max_size=300))
def test_parse_any_bytes_gives_numbers_that_are_not_negative(raw):
    info = parse(raw)
    assert (info is None) == (not raw or raw[0] == 7)
    for value in info or ():
        assert value is None or (math.isfinite(value) and value >= 0)


@given(st.binary(min_size=1, max_size=300), st.integers(0, 300))
def test_parse_shorter_struct_gives_the_same_or_none(raw, size):
    whole, part = parse(raw), parse(raw[: max(1, size)])
    if whole is None or part is None:
        assert whole is part
        return
    for name, short, long in zip(part._fields, part, whole, strict=True):
        if name == "unacked_bytes" and short is not None:
            assert short >= long, "without byte counters the segments bound it"
        else:
            assert short in (long, None, False)
