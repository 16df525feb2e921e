"""The link model, packet by packet, and the statistics it promises."""

import math
import random

import pytest

from stormline.core.errors import ConfigError
from stormline.netmodel.fades import Fades
from stormline.netmodel.link import LinkModel, Reason, Verdict
from stormline.netmodel.params import (
    BlackoutMode,
    Distribution,
    FadeParams,
    GilbertElliott,
    LinkParams,
    read_fades,
    read_params,
)
from stormline.netmodel.schedule import read_schedule
from stormline.netmodel.trace import Trace

START = 1000.0


class Rng(random.Random):
    def token_bytes(self, size: int) -> bytes:
        return self.randbytes(size)


def make(seed: int = 1, **fields: object) -> LinkModel:
    return LinkModel(LinkParams(**fields), Rng(seed), START)  # type: ignore[arg-type]


def arrivals(link: LinkModel, sizes: list[int], now: float = START) -> list[float]:
    return [link.offer(size, now).deliver_at[0] - START for size in sizes]


# -- stages -----------------------------------------------------------------------------------------------------------
def test_perfect_wire_delivers_at_once() -> None:
    assert make().offer(1500, START) == Verdict(1, (START,), None)


def test_delay_is_added_to_every_packet() -> None:
    assert arrivals(make(delay_s=0.05), [1, 1500]) == pytest.approx([0.05, 0.05])


def test_rate_serialises_packets_one_after_the_other() -> None:
    link = make(rate_bps=1_000_000, delay_s=0.01)
    assert arrivals(link, [1250, 1250, 125]) == pytest.approx([0.02, 0.03, 0.031])
    assert link.backlog_bytes(START + 0.0099) == 2625
    assert link.backlog_bytes(START + 0.0101) == 1375
    assert link.backlog_bytes(START + 1) == 0


def test_full_queue_drops_the_newcomer() -> None:
    link = make(rate_bps=8000, queue_bytes=2500)
    said = [link.offer(1000, START) for _ in range(3)]
    assert [verdict.reason for verdict in said] == [None, None, Reason.QUEUE]
    assert link.offer(1000, START + 1.0).reason is None


def test_packet_above_the_mtu_vanishes() -> None:
    link = make(mtu_bytes=1280)
    assert link.offer(1281, START).reason is Reason.MTU
    assert link.offer(1280, START).reason is None


def test_lost_packet_has_used_the_link() -> None:
    link = make(rate_bps=1_000_000, loss_pct=100.0)
    assert link.offer(1250, START).reason is Reason.LOSS
    link.reconfigure(LinkParams(rate_bps=1_000_000), START)
    assert arrivals(link, [1250]) == pytest.approx([0.02])


def test_duplicated_packet_arrives_twice() -> None:
    verdict = make(duplicate_pct=100.0, delay_s=0.1).offer(100, START)
    assert verdict.deliver_at == (START + 0.1, START + 0.1)


def test_packet_held_back_is_overtaken_by_later_ones() -> None:
    link = make(reorder_pct=100.0, reorder_gap_s=0.02)
    first = link.offer(100, START)
    link.reconfigure(LinkParams(), START)
    assert link.offer(100, START + 0.01).deliver_at[0] < first.deliver_at[0]
    assert link.offer(100, START + 0.03).deliver_at[0] > first.deliver_at[0]


def test_counters_name_each_reason() -> None:
    link = make(rate_bps=8000, queue_bytes=1000, mtu_bytes=1000)
    for size in (1001, 1000, 1000):
        link.offer(size, START)
    counted = link.statistics()
    assert (counted.offered_packets, counted.offered_bytes) == (3, 3001)
    assert (counted.delivered_packets, counted.delivered_bytes) == (1, 1000)
    assert {reason: count for reason, count in counted.lost.items() if count} == {Reason.MTU: 1, Reason.QUEUE: 1}


# -- traces -----------------------------------------------------------------------------------------------------------
def test_small_packets_share_an_opportunity_and_large_ones_span_several() -> None:
    link = make(trace=Trace([10, 20, 30, 40]))
    assert arrivals(link, [700, 700, 700, 1500]) == pytest.approx([0.01, 0.01, 0.02, 0.03])
    assert arrivals(link, [1500]) == pytest.approx([0.04])


def test_opportunity_without_a_packet_is_lost() -> None:
    link = make(trace=Trace([10, 20, 40]))
    assert arrivals(link, [1500], START + 0.015) == pytest.approx([0.02])
    assert arrivals(link, [700], START + 0.021) == pytest.approx([0.04])


def test_trace_repeats_at_its_end() -> None:
    link = make(trace=Trace([10, 20]))
    assert arrivals(link, [1500] * 5) == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])
    assert arrivals(link, [1500], START + 100.012) == pytest.approx([100.02])


def test_trace_starts_at_its_offset_and_goes_on_through_other_changes() -> None:
    params = LinkParams(trace=Trace([10, 20, 100]), trace_offset_s=0.015)
    link = LinkModel(params, Rng(1), START)
    assert arrivals(link, [1500]) == pytest.approx([0.005])
    link.reconfigure(read_params({"delay_s": 1.0}, base=params), START + 0.01)
    assert arrivals(link, [1500], START + 0.01) == pytest.approx([1.085])


# -- blackouts --------------------------------------------------------------------------------------------------------
def test_dropping_blackout_loses_what_is_sent_into_it() -> None:
    link = make(delay_s=0.1)
    before = link.offer(100, START)
    link.start_blackout(BlackoutMode.DROP, START, until_s=START + 2)
    assert link.advance(START) == []  # what is on the air arrives
    assert before.deliver_at
    assert link.offer(100, START + 1).reason is Reason.BLACKOUT
    assert link.dark(START + 1)
    assert link.offer(100, START + 2).reason is None


def test_holding_blackout_keeps_what_the_queue_takes() -> None:
    link = make(delay_s=0.1, queue_bytes=250)
    link.start_blackout(BlackoutMode.HOLD, START, until_s=START + 2)
    said = [link.offer(100, START + 1) for _ in range(3)]
    assert [verdict.deliver_at for verdict in said] == [(START + 2.1,), (START + 2.1,), ()]
    assert said[2].reason is Reason.QUEUE


def test_held_packets_leave_at_the_rate_when_light_comes() -> None:
    link = make(rate_bps=8000)
    link.start_blackout(BlackoutMode.HOLD, START, until_s=START + 5)
    assert arrivals(link, [1000, 1000]) == pytest.approx([6, 7])


def test_open_blackout_holds_until_it_is_ended() -> None:
    link = make(delay_s=0.1)
    link.start_blackout(BlackoutMode.HOLD, START)
    said = [link.offer(100, START + 1) for _ in range(2)]
    assert [verdict.deliver_at for verdict in said] == [(math.inf,), (math.inf,)]
    assert link.statistics().held_packets == 2
    assert link.next_change() is None
    link.end_blackout(START + 9)
    assert link.next_change() == -math.inf
    assert link.advance(START + 9) == [Verdict(1, (START + 9.1,), None), Verdict(2, (START + 9.1,), None)]
    assert link.advance(START + 9) == []
    assert (link.statistics().held_packets, link.statistics().delivered_packets) == (0, 2)


def test_blackout_catches_what_still_waits_in_the_queue() -> None:
    link = make(rate_bps=8000)
    said = [link.offer(1000, START) for _ in range(3)]
    link.start_blackout(BlackoutMode.DROP, START + 1.5, until_s=START + 2.5)
    revised = {verdict.ticket: verdict for verdict in link.advance(START + 1.5)}
    assert revised == {2: Verdict(2, (), Reason.BLACKOUT)}
    assert said[2].deliver_at == (START + 3,)


def test_ending_a_blackout_that_is_over_changes_nothing() -> None:
    link = make(rate_bps=8000)
    link.offer(1000, START)
    link.end_blackout(START + 0.5)
    assert link.advance(START + 0.5) == []


# -- changes ----------------------------------------------------------------------------------------------------------
def test_rate_change_counts_the_part_already_sent() -> None:
    link = make(rate_bps=8000)
    link.offer(1000, START)
    link.reconfigure(LinkParams(rate_bps=80_000), START + 0.5)
    (revised,) = link.advance(START + 0.5)
    assert revised.deliver_at == pytest.approx((START + 0.55,))


def test_link_turned_fast_empties_its_queue_at_once() -> None:
    link = make(rate_bps=8000)
    for _ in range(10):
        link.offer(1000, START)
    link.reconfigure(LinkParams(), START + 2.5)
    revised = link.advance(START + 2.5)
    assert [verdict.ticket for verdict in revised] == list(range(3, 11))
    assert {verdict.deliver_at for verdict in revised} == {(START + 2.5,)}
    assert link.backlog_bytes(START + 2.5) == 0


def test_schedule_runs_when_it_is_due_and_repeats() -> None:
    link = make()
    steps = [{"at_s": 4, "blackout": {"mode": "drop", "duration_s": 3}}]
    link.set_schedule(read_schedule(steps, repeat_s=7), START)
    seen = [link.offer(100, START + second + 0.5).reason is None for second in range(21)]
    assert seen == [True] * 4 + [False] * 3 + [True] * 4 + [False] * 3 + [True] * 4 + [False] * 3
    assert link.next_change() == START + 25


def test_schedule_sets_parameters_and_tells_what_changed() -> None:
    link = make(rate_bps=8000)
    link.set_schedule(read_schedule([{"at_s": 1, "set": {"rate_bps": 80_000, "delay_s": 1}}]), START)
    for _ in range(3):
        link.offer(1000, START)
    assert link.next_change() == START + 1
    revised = link.advance(START + 1)
    assert [verdict.deliver_at[0] - START for verdict in revised] == pytest.approx([2.1, 2.2])
    assert link.next_change() is None


def test_schedule_that_began_earlier_is_caught_up_with() -> None:
    link = make()
    steps = [
        {"at_s": 1, "set": {"delay_s": 1}},
        {"at_s": 2, "blackout": {"mode": "drop"}},
        {"at_s": 9, "end_blackout": True},
    ]
    link.set_schedule(read_schedule(steps), START, start_s=START - 5)
    assert link.params.delay_s == 1
    assert link.offer(1, START + 3).reason is Reason.BLACKOUT
    assert link.offer(1, START + 4).reason is None
    link.set_schedule(None, START + 4)
    assert link.next_change() is None


# -- statistics -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("loss_pct", [0.5, 5.0, 40.0])
@pytest.mark.parametrize("seed", range(5))
def test_random_loss_stays_within_binomial_bounds(loss_pct: float, seed: int) -> None:
    link, count = make(seed, loss_pct=loss_pct), 20_000
    lost = sum(link.offer(100, START).reason is Reason.LOSS for _ in range(count))
    share = loss_pct / 100
    assert abs(lost - count * share) < 4.5 * math.sqrt(count * share * (1 - share))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("p_pct", "r_pct"), [(1.0, 25.0), (0.5, 10.0), (10.0, 50.0)])
def test_burst_loss_has_the_mean_and_length_of_its_chain(p_pct: float, r_pct: float, seed: int) -> None:
    burst, count = GilbertElliott(p_pct=p_pct, r_pct=r_pct), 100_000
    link = make(seed, burst=burst)
    fate = "".join("x" if link.offer(100, START).reason is Reason.BURST else "." for _ in range(count))
    bursts = [len(run) for run in fate.split(".") if run]
    assert fate.count("x") / count * 100 == pytest.approx(burst.mean_loss_pct, rel=0.15)
    assert sum(bursts) / len(bursts) == pytest.approx(100 / r_pct, rel=0.1)


def test_burst_states_have_losses_of_their_own() -> None:
    burst = GilbertElliott(p_pct=20.0, r_pct=20.0, loss_good_pct=10.0, loss_bad_pct=50.0)
    link = make(burst=burst)
    lost = sum(link.offer(100, START).reason is not None for _ in range(50_000))
    assert burst.mean_loss_pct == pytest.approx(30.0)
    assert lost / 500 == pytest.approx(30.0, abs=1.5)


def test_jitter_is_spread_evenly() -> None:
    link = make(jitter_s=0.01)
    added = [link.offer(100, START + at).deliver_at[0] - START - at for at in range(4000)]
    assert min(added) < 0.0005
    assert max(added) > 0.0095
    assert sum(added) / len(added) == pytest.approx(0.005, rel=0.1)


@pytest.mark.parametrize("distribution", Distribution)
def test_fades_take_their_share_of_time(distribution: Distribution) -> None:
    params = FadeParams(period_s=2.0, duration_s=0.5, loss_pct=60.0, distribution=distribution)
    fades = Fades(params, Rng(3), START)
    bad = sum(fades.loss_pct_at(START + n * 0.05, START + n * 0.05) > 0 for n in range(100_000))
    assert bad / 100_000 == pytest.approx(0.25, rel=0.1)


def test_fades_hit_both_directions_at_once() -> None:
    params = FadeParams(period_s=1.8, duration_s=0.15, loss_pct=100.0, distribution=Distribution.EXPONENTIAL)
    fades = Fades(params, Rng(1), START)
    up, down = (LinkModel(LinkParams(), Rng(seed), START, fades=fades) for seed in (1, 2))
    said = [(up.offer(100, START + n * 0.01).reason, down.offer(100, START + n * 0.01).reason) for n in range(5000)]
    assert all(one == other for one, other in said)
    assert {reason for reason, _ in said} == {None, Reason.FADE}


def test_fades_can_be_changed_while_running() -> None:
    link = make()
    link.set_fades(Fades(FadeParams(period_s=1.0, duration_s=0.5, loss_pct=100.0), Rng(1), START), START)
    assert [link.offer(1, START + at).reason for at in (0.4, 0.6, 1.2, 1.7)] == [None, Reason.FADE, None, Reason.FADE]
    link.set_fades(None, START + 1.8)
    assert link.offer(1, START + 1.8).reason is None


# -- plain data -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"delay_s": -1}, "delay_s"),
        ({"delay_s": math.inf}, "delay_s"),
        ({"delay_s": "1"}, "delay_s"),
        ({"delay_s": True}, "delay_s"),
        ({"loss_pct": 101}, "loss_pct"),
        ({"rate_bps": 0}, "rate_bps"),
        ({"rate_bps": math.nan}, "rate_bps"),
        ({"queue_bytes": 0}, "queue_bytes"),
        ({"queue_bytes": 1.5}, "queue_bytes"),
        ({"mtu_bytes": True}, "mtu_bytes"),
        ({"speed": 1}, "speed"),
        ({"burst": {"p_pct": 1}}, "r_pct missing"),
        ({"burst": {"p_pct": 1, "r_pct": 0}}, "r_pct"),
        ({"burst": {"p_pct": 1, "r_pct": 1, "q": 1}}, "q"),
        ({"burst": 3}, "burst"),
        ({"trace": "nowhere"}, "nowhere"),
        ({"trace": "a", "rate_bps": 1e6}, "rate_bps and trace"),
    ],
)
def test_parameters_that_make_no_sense_are_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_params(fields, traces={"a": Trace([1])})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"period_s": 1, "duration_s": 0.5}, "loss_pct missing"),
        ({"period_s": 1, "duration_s": 1, "loss_pct": 50}, "duration_s"),
        ({"period_s": 1, "duration_s": 0, "loss_pct": 50}, "duration_s"),
        ({"period_s": 0.001, "duration_s": 0.0005, "loss_pct": 50}, "period_s"),
        ({"period_s": 1, "duration_s": 0.5, "loss_pct": 101}, "loss_pct"),
        ({"period_s": 1, "duration_s": 0.5, "loss_pct": 50, "distribution": "odd"}, "distribution"),
        ({"period_s": 1, "duration_s": 0.5, "loss_pct": 50, "depth": 3}, "depth"),
    ],
)
def test_fades_that_make_no_sense_are_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_fades(fields)


def test_fades_are_read_from_data() -> None:
    read = read_fades({"period_s": 2, "duration_s": 0.5, "loss_pct": 50, "distribution": "exponential"})
    assert read == FadeParams(period_s=2, duration_s=0.5, loss_pct=50, distribution=Distribution.EXPONENTIAL)


def test_parameters_read_from_data_keep_what_is_not_named() -> None:
    trace = Trace([1])
    base = read_params({"delay_s": 0.1, "rate_bps": 1e6, "burst": {"p_pct": 1, "r_pct": 50}})
    assert base.burst == GilbertElliott(p_pct=1, r_pct=50)
    traced = read_params({"trace": "a", "burst": None}, base=base, traces={"a": trace})
    assert (traced.delay_s, traced.rate_bps, traced.trace, traced.burst) == (0.1, None, trace, None)
    assert read_params({"rate_bps": 5e5}, base=traced).trace is None


@pytest.mark.parametrize(
    ("step", "named"),
    [
        ({"blackout": {}}, "at_s"),
        ({"at_s": -1, "blackout": {}}, "at_s"),
        ({"at_s": 1}, "needs one of"),
        ({"at_s": 1, "blackout": {}, "set": {}}, "needs one of"),
        ({"at_s": 1, "explode": {}}, "needs one of"),
        ({"at_s": 1, "blackout": {"mode": "dim"}}, "mode"),
        ({"at_s": 1, "blackout": {"length": 1}}, "length"),
        ({"at_s": 1, "blackout": {"duration_s": "1"}}, "duration_s"),
        ({"at_s": 1, "blackout": 5}, "mapping"),
        ({"at_s": 1, "set": {"speed": 1}}, "step 1: .*speed"),
        ({"at_s": 1, "end_blackout": False}, "end_blackout"),
    ],
)
def test_schedule_step_that_makes_no_sense_is_named(step: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_schedule([step])


def test_schedule_out_of_order_or_with_a_short_round_is_refused() -> None:
    steps = [{"at_s": 2, "end_blackout": True}, {"at_s": 1, "end_blackout": True}]
    with pytest.raises(ConfigError, match="in order"):
        read_schedule(steps)
    with pytest.raises(ConfigError, match="repeat_s"):
        read_schedule(steps[:1], repeat_s=2)
    with pytest.raises(ConfigError, match="repeat_s"):
        read_schedule([], repeat_s=2)
    with pytest.raises(ConfigError, match="repeat_s"):
        read_schedule([{"at_s": 0, "end_blackout": True}], repeat_s=0)
