"""The promises of the link model, for any parameters, packets and changes."""

import dataclasses
import math
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stormline.netmodel.fades import Fades
from stormline.netmodel.link import LinkModel, Verdict
from stormline.netmodel.params import BlackoutMode, Distribution, FadeParams, GilbertElliott, LinkParams
from stormline.netmodel.trace import OPPORTUNITY_BYTES, Trace


class Rng(random.Random):
    def token_bytes(self, size: int) -> bytes:
        return self.randbytes(size)


SECONDS = st.floats(0, 0.3)
PCT = st.sampled_from([0.0, 0.0, 3.0, 30.0, 100.0])
TRACES = st.lists(st.integers(0, 300), min_size=1, max_size=40).map(sorted).filter(lambda at: at[-1] > 0).map(Trace)


@st.composite
def params(draw: st.DrawFn, **fixed: Any) -> LinkParams:
    capacity = draw(st.sampled_from(["none", "rate", "trace"]))
    fields: dict[str, Any] = {
        "delay_s": draw(SECONDS),
        "jitter_s": draw(SECONDS),
        "rate_bps": draw(st.floats(5_000, 1e8)) if capacity == "rate" else None,
        "trace": draw(TRACES) if capacity == "trace" else None,
        "trace_offset_s": draw(SECONDS),
        "queue_bytes": draw(st.integers(1, 30_000)),
        "loss_pct": draw(PCT),
        "burst": draw(st.none() | st.builds(GilbertElliott, p_pct=PCT, r_pct=st.floats(1, 100))),
        "reorder_pct": draw(PCT),
        "reorder_gap_s": draw(SECONDS),
        "duplicate_pct": draw(PCT),
        "mtu_bytes": draw(st.integers(1000, 2000)),
    }
    return LinkParams(**(fields | fixed))


FADES = st.builds(
    FadeParams,
    period_s=st.floats(0.2, 2),
    duration_s=st.floats(0.01, 0.19),
    loss_pct=PCT,
    distribution=st.sampled_from(Distribution),
)
PACKETS = st.lists(st.tuples(st.floats(0, 0.05), st.integers(1, 1600)), min_size=1, max_size=120)
START = st.sampled_from([0.0, 1234.5, 1e6])

DARKNESS = st.tuples(st.sampled_from(BlackoutMode), st.floats(0, 0.5) | st.none())
ACTIONS = st.lists(
    st.tuples(st.floats(0, 0.05), st.just("packet"), st.integers(1, 1600))
    | st.tuples(st.floats(0, 0.05), st.just("params"), params())
    | st.tuples(st.floats(0, 0.05), st.just("dark"), DARKNESS)
    | st.tuples(st.floats(0, 0.05), st.just("light"), st.none()),
    max_size=80,
)


def send_all(link: LinkModel, packets: list[tuple[float, int]], now: float) -> list[tuple[float, int, Verdict]]:
    said = []
    for gap, size in packets:
        now += gap
        said.append((now, size, link.offer(size, now)))
    return said


@given(params(), FADES, PACKETS, START, st.integers(0, 5))
def test_packet_never_arrives_before_its_delay(
    link_params: LinkParams, fades: FadeParams, packets: list[tuple[float, int]], start: float, seed: int
) -> None:
    link = LinkModel(link_params, Rng(seed), start, fades=Fades(fades, Rng(1), start))
    for at, _, verdict in send_all(link, packets, start):
        assert bool(verdict.deliver_at) == (verdict.reason is None)
        assert all(arrival >= at + link_params.delay_s for arrival in verdict.deliver_at)


@given(params(reorder_pct=0.0), PACKETS, START, st.integers(0, 5))
def test_packets_keep_their_order_without_reordering(
    link_params: LinkParams, packets: list[tuple[float, int]], start: float, seed: int
) -> None:
    arrivals = [
        at
        for _, _, verdict in send_all(LinkModel(link_params, Rng(seed), start), packets, start)
        for at in verdict.deliver_at
    ]
    assert arrivals == sorted(arrivals)


@given(st.floats(5_000, 1e8), st.integers(1, 30_000), PACKETS, START)
def test_no_window_carries_more_than_the_rate_and_one_packet(
    rate_bps: float, queue_bytes: int, packets: list[tuple[float, int]], start: float
) -> None:
    link = LinkModel(LinkParams(rate_bps=rate_bps, queue_bytes=queue_bytes), Rng(1), start)
    left = [(v.deliver_at[0], size) for _, size, v in send_all(link, packets, start) if v.deliver_at]
    for first in range(len(left)):
        carried = 0
        for at, size in left[first:]:
            carried += size
            # The first packet of a window may have been on the air before it.
            allowed = rate_bps / 8 * (at - left[first][0]) + left[first][1]
            assert carried <= allowed * (1 + 1e-6) + 1e-6 * rate_bps


@given(params(mtu_bytes=65535), PACKETS, START)
def test_queue_never_holds_more_than_its_bound(
    link_params: LinkParams, packets: list[tuple[float, int]], start: float
) -> None:
    link, now = LinkModel(link_params, Rng(1), start), start
    for gap, size in packets:
        now += gap
        link.offer(size, now)
        assert 0 <= link.backlog_bytes(now) <= link_params.queue_bytes
    assert link.statistics().queue_bytes_max <= link_params.queue_bytes


@given(params(), FADES, PACKETS, st.integers(0, 5))
def test_same_seed_and_packets_meet_the_same_fate(
    link_params: LinkParams, fades: FadeParams, packets: list[tuple[float, int]], seed: int
) -> None:
    runs = [
        send_all(LinkModel(link_params, Rng(seed), 5.0, fades=Fades(fades, Rng(seed), 5.0)), packets, 5.0)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


@given(TRACES, SECONDS, st.floats(0.1, 2), START)
def test_saturated_trace_delivers_its_opportunities(trace: Trace, offset: float, window: float, start: float) -> None:
    link = LinkModel(LinkParams(trace=trace, trace_offset_s=offset, queue_bytes=10**9), Rng(1), start)
    expected = trace.opportunities(offset, offset + window)
    arrivals = [link.offer(OPPORTUNITY_BYTES, start).deliver_at[0] for _ in range(expected + 2)]
    # The sums of start, offset and opportunity round differently here and there: a nanosecond's worth of them.
    eps = 1e-7
    assert trace.opportunities(offset + eps, offset + window - eps) <= sum(at < start + window for at in arrivals)
    assert sum(at < start + window for at in arrivals) <= trace.opportunities(offset - eps, offset + window + eps)


@given(TRACES, PACKETS, START)
def test_trace_never_carries_more_bytes_than_its_opportunities(
    trace: Trace, packets: list[tuple[float, int]], start: float
) -> None:
    link = LinkModel(LinkParams(trace=trace), Rng(1), start)
    left = [(v.deliver_at[0], size) for _, size, v in send_all(link, packets, start) if v.deliver_at]
    for until, _ in left:
        carried = sum(size for at, size in left if at <= until)
        assert carried <= OPPORTUNITY_BYTES * trace.opportunities(0.0, until - start + 1e-7)


@given(params(), FADES, ACTIONS, START, st.integers(0, 3))
def test_changes_revise_what_waits_and_nothing_else(
    first: LinkParams, fades: FadeParams, actions: list[tuple[float, str, Any]], start: float, seed: int
) -> None:
    link = LinkModel(first, Rng(seed), start, fades=Fades(fades, Rng(1), start))
    verdicts: dict[int, Verdict] = {}
    now = start
    for gap, what, detail in actions:
        now += gap
        if what == "packet":
            verdict = link.offer(detail, now)
            assert verdict.ticket not in verdicts
            verdicts[verdict.ticket] = verdict
        elif what == "params":
            link.reconfigure(detail, now)
        elif what == "dark":
            mode, length = detail
            link.start_blackout(mode, now, until_s=math.inf if length is None else now + length)
        else:
            link.end_blackout(now)
        assert (link.next_change() is None) or link.next_change() == -math.inf
        for verdict in link.advance(now):
            before = verdicts[verdict.ticket]
            assert before.reason is None  # what is lost stays lost
            assert all(at > now for at in before.deliver_at)  # what has arrived is not called back
            assert all(at >= now + link.params.delay_s for at in verdict.deliver_at)
            verdicts[verdict.ticket] = verdict
        assert link.next_change() is None
    statistics = link.statistics()
    said = verdicts.values()
    assert statistics.offered_packets == len(verdicts)
    assert sum(statistics.lost.values()) == sum(v.reason is not None for v in said)
    assert statistics.held_packets == sum(v.deliver_at[:1] == (math.inf,) for v in said)
    assert statistics.delivered_packets == len(verdicts) - sum(statistics.lost.values()) - statistics.held_packets
    assert statistics.duplicated_packets == sum(max(0, len(v.deliver_at) - 1) for v in said)


@given(params(reorder_pct=0.0), ACTIONS, START)
def test_order_holds_through_changes(first: LinkParams, actions: list[tuple[float, str, Any]], start: float) -> None:
    link = LinkModel(first, Rng(1), start)
    last: dict[int, Verdict] = {}
    now = start
    for gap, what, detail in actions:
        now += gap
        if what == "packet":
            verdict = link.offer(detail, now)
            last[verdict.ticket] = verdict
        elif what == "dark":
            link.start_blackout(detail[0], now, until_s=math.inf if detail[1] is None else now + detail[1])
        elif what == "light":
            link.end_blackout(now)
        else:
            link.reconfigure(dataclasses.replace(detail, reorder_pct=0.0), now)
        last |= {verdict.ticket: verdict for verdict in link.advance(now)}
    arrivals = [at for ticket in sorted(last) for at in last[ticket].deliver_at]
    assert arrivals == sorted(arrivals)


@given(FADES, st.lists(st.tuples(st.floats(0, 0.4), st.floats(0, 2)), max_size=60), st.integers(0, 5))
def test_fades_do_not_depend_on_who_asks_when(
    fade_params: FadeParams, questions: list[tuple[float, float]], seed: int
) -> None:
    asked, now = [], 10.0
    for gap, ahead in questions:
        now += gap
        asked.append((now, now + ahead))
    busy = Fades(fade_params, Rng(seed), 10.0)
    answers = [busy.loss_pct_at(at, at_now) for at_now, at in asked]
    for (_, at), answer in zip(asked, answers, strict=True):
        assert Fades(fade_params, Rng(seed), 10.0).loss_pct_at(at, at) == answer


RATES = st.floats(10_000, 1e7)


@given(
    RATES,
    st.lists(
        st.tuples(st.floats(0, 0.1), st.integers(40, 1500) | RATES.map(lambda rate: ("rate", rate)) | st.booleans()),
        min_size=1,
        max_size=80,
    ),
)
def test_rate_holds_through_changes_and_held_blackouts(rate: float, actions: list[tuple[float, Any]]) -> None:
    link = LinkModel(LinkParams(rate_bps=rate, queue_bytes=10**6), Rng(1), 0.0)
    now, dark = 0.0, False
    budget = [(0.0, rate)]  # (from when on, bits per second)
    sizes: dict[int, int] = {}
    leaves: dict[int, float] = {}
    for gap, action in actions:
        now += gap
        if isinstance(action, bool):
            dark = action
            if dark:
                link.start_blackout(BlackoutMode.HOLD, now)
            else:
                link.end_blackout(now)
        elif isinstance(action, int):
            verdict = link.offer(action, now)
            sizes[verdict.ticket], leaves[verdict.ticket] = action, verdict.deliver_at[0]
        else:
            rate = action[1]
            link.reconfigure(LinkParams(rate_bps=rate, queue_bytes=10**6), now)
        budget.append((now, 0.0 if dark else rate))
        leaves |= {verdict.ticket: verdict.deliver_at[0] for verdict in link.advance(now)}

    def allowed_bytes(from_s: float, until_s: float) -> float:
        ends = [at for at, _ in budget[1:]] + [math.inf]
        pieces = ((max(at, from_s), min(end, until_s), bps) for (at, bps), end in zip(budget, ends, strict=True))
        return sum(max(0.0, end - at) * bps / 8 for at, end, bps in pieces)

    left = sorted((at, ticket) for ticket, at in leaves.items() if at != math.inf)
    for first, (from_s, first_ticket) in enumerate(left):
        carried = 0
        for until_s, ticket in left[first:]:
            carried += sizes[ticket]
            assert carried <= sizes[first_ticket] + allowed_bytes(from_s, until_s) * (1 + 1e-9) + 1e-3
