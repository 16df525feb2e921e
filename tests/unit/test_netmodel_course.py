"""The course of a link: what it is like at each moment, as whoever judges knows it."""

import pytest

from stormline.core import errors
from stormline.netmodel.course import Course
from stormline.netmodel.params import FadeParams, GilbertElliott, LinkParams
from stormline.netmodel.trace import Trace

FAST = LinkParams(delay_s=0.03, rate_bps=8e6)
SLOW = LinkParams(delay_s=0.3, rate_bps=8e4, jitter_s=0.1)


def test_changes_and_dark_spells_hold_from_their_moment_on():
    course = Course(up=FAST, down=FAST, changes=((10.0, SLOW, SLOW), (20.0, FAST, FAST)), dark=((30.0, 32.0),))
    assert course.at(9.9).rtt_s == pytest.approx(0.06)
    assert course.at(10.0).rtt_s == pytest.approx(0.7)
    assert course.at(10.0).bytes_per_s == 1e4
    assert course.at(25.0).bytes_per_s == 1e6
    assert [course.at(at).dark for at in (29.9, 30.0, 31.9, 32.0)] == [False, True, True, False]


def test_link_without_a_bound_has_none():
    assert Course(up=LinkParams(), down=LinkParams()).at(0.0) == (0.0, None, 0.0, 0.0, False)


def test_losses_of_all_causes_add_up_and_bursts_and_fades_count_once_each():
    burst = GilbertElliott(p_pct=12.5 * 4 / 96, r_pct=12.5)
    lossy = LinkParams(delay_s=0.05, loss_pct=1, burst=burst)
    now = Course(up=lossy, down=LinkParams(delay_s=0.05)).at(0.0)
    assert now.loss == pytest.approx(1 - 0.99 * 0.96)
    assert now.loss_events == pytest.approx(0.01 + 0.04 / 8)
    fading = FadeParams(period_s=2.0, duration_s=0.2, loss_pct=50)
    faded = Course(up=FAST, down=FAST, fades=fading).at(0.0)
    assert faded.loss == pytest.approx(0.05)
    assert faded.loss_events == pytest.approx((0.06 / 2.0) ** 2 / 1.5)


def test_trace_gives_what_passed_in_the_last_second_and_is_dark_where_nothing_did():
    busy = LinkParams(trace=Trace([*range(0, 1000, 10), 4000]), trace_offset_s=0.0)
    course = Course(up=LinkParams(), down=busy)
    assert course.at(1.0).bytes_per_s == pytest.approx(100 * 1500)
    assert course.at(1.5).bytes_per_s == pytest.approx(50 * 1500, rel=0.05)
    assert course.at(3.0).dark
    assert Course(up=busy, down=LinkParams()).at(3.0).dark


def test_events_out_of_order_are_refused():
    with pytest.raises(errors.ConfigError):
        Course(up=FAST, down=FAST, changes=((2.0, SLOW, SLOW), (1.0, FAST, FAST)))
    with pytest.raises(errors.ConfigError):
        Course(up=FAST, down=FAST, dark=((2.0, 4.0), (3.0, 5.0)))
