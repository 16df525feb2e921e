"""Capacity traces: read, counted, and made."""

import random

import pytest

from stormline.core.errors import ConfigError
from stormline.netmodel.synthetic import EVDO, LTE, SHAPES, UMTS, CellularShape, make_trace
from stormline.netmodel.trace import Trace


class Rng(random.Random):
    def token_bytes(self, size: int) -> bytes:
        return self.randbytes(size)


def test_trace_text_survives_reading_and_writing() -> None:
    text = "0\n0\n7\n20\n"
    trace = Trace.parse(text)
    assert trace.format() == text
    assert len(trace) == 4
    assert trace.period_s == 0.02
    assert trace.mean_bps == 4 * 1500 * 8 / 0.02
    assert trace.gap_s_max() == 0.013


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no opportunity"),
        ("0\n0\n", "no opportunity"),
        ("5\n3\n", "go back"),
        ("1\nx\n", "line 2"),
        ("1\n-2\n", "line 2"),
        ("1\n2.5\n", "line 2"),
        ("1\n\u0663\n", "line 2"),
        ("1\n99999999999999999999999\n", "line 2"),
    ],
)
def test_text_that_is_no_trace_is_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"trace lift: .*{named}"):
        Trace.parse(text, name="lift")


@pytest.mark.parametrize("at_ms", [[-1, 5], [2.5], [1 << 70]])
def test_opportunities_that_are_no_milliseconds_are_refused(at_ms: list[int]) -> None:
    with pytest.raises(ConfigError, match="trace"):
        Trace(at_ms)


def test_opportunities_are_counted_through_all_rounds() -> None:
    trace = Trace([0, 5, 10])
    assert trace.opportunities(0, 0.010) == 2
    assert trace.opportunities(0, 0.0101) == 4  # the end of a round and the start of the next are one moment
    assert trace.opportunities(0.005, 0.006) == 1
    assert trace.opportunities(0.006, 0.006) == 0
    assert trace.opportunities(0, 10.0005) == 3001
    assert trace.opportunities(-5, 0.001) == 1


def test_first_opportunity_from_a_moment_is_not_before_it() -> None:
    trace = Trace([3, 10])
    assert [trace.at_s(trace.first_from(at)) for at in (0, 0.003, 0.0031, 0.01, 0.0101, 7.0)] == pytest.approx(
        [0.003, 0.003, 0.01, 0.01, 0.013, 7.0]
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_synthetic_trace_repeats_with_its_seed(shape: CellularShape) -> None:
    one, same, other = (make_trace(shape, Rng(seed), 60).format() for seed in (1, 1, 2))
    assert one == same
    assert one != other


@pytest.mark.parametrize(
    ("shape", "mean_mbps", "gap_s"), [(LTE, (3, 8), (0.3, 2)), (UMTS, (1, 3.5), (1.5, 8)), (EVDO, (0.3, 1), (3, 14))]
)
def test_synthetic_trace_looks_like_its_network(
    shape: CellularShape, mean_mbps: tuple[float, float], gap_s: tuple[float, float]
) -> None:
    for seed in range(3):
        trace = make_trace(shape, Rng(seed), 900)
        assert trace.period_s == 900
        assert mean_mbps[0] < trace.mean_bps / 1e6 < mean_mbps[1]
        assert gap_s[0] < trace.gap_s_max() < gap_s[1]


@pytest.mark.parametrize("duration_s", [0, -1, 0.001, float("nan"), float("inf"), 1e9])
def test_synthetic_trace_of_no_or_endless_length_is_refused(duration_s: float) -> None:
    with pytest.raises(ConfigError, match="long"):
        make_trace(LTE, Rng(1), duration_s)
