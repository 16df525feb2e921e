"""Whatever was observed: time-outs are positive, within the deadline, and never shorter for what needs longer."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits
from stormline.policy.shape import Network, Pattern, Queue, RequestShape
from stormline.policy.timeouts import Outcome, TimeoutPolicy

NETWORKS = [Network("home", "wifi"), Network("carrier", "cell"), Network("somewhere")]
FIELDS = ("first_by_s", "connect_s", "tls_s", "send_gap_s", "first_packet_s", "read_write_s")

wild = st.one_of(st.none(), st.floats(), st.integers(), st.text(max_size=3), st.booleans())
networks = st.sampled_from(NETWORKS)
hosts = st.sampled_from(["a", "b"])
seconds = st.floats(0.0005, 30)
sizes = st.integers(0, 10**8)
shapes = st.builds(
    RequestShape,
    host=hosts,
    path_class=st.just("GET /"),
    pattern=st.sampled_from(Pattern),
    request_bytes=sizes,
    answer_bytes=st.none() | sizes,
    server_cost_s=st.none() | st.floats(0, 100),
    hold_s=st.none() | st.floats(0, 100),
)
queues = st.builds(Queue, st.integers(0, 20), st.integers(0, 10**7), st.integers(0, 10**7), st.floats(0, 100))
wild_outcomes = st.builds(
    Outcome,
    network=networks,
    host=hosts,
    path_class=st.just("GET /"),
    answered=st.booleans(),
    first_byte_s=wild,
    body_s=wild,
    total_s=wild,
    request_bytes=wild,
    answer_bytes=wild,
    server_s=wild,
    queued=st.booleans(),
    held=st.booleans(),
)


def values(plan):
    found = {name: getattr(plan, name) for name in FIELDS}
    found["packet_gap_s"] = math.inf if plan.packet_gap_s is None else plan.packet_gap_s
    return found


def never_shorter(longer, shorter):
    a, b = values(longer), values(shorter)
    assert all(a[name] >= b[name] * (1 - 1e-9) for name in a), {name: (a[name], b[name]) for name in a}


@given(
    st.lists(st.tuples(wild_outcomes, st.floats(-1e9, 1e9), wild, wild, wild), max_size=12),
    shapes,
    networks,
    queues,
    st.floats(0, 1e6),
    st.floats(limits.TIMEOUT_MIN_S * 2, 1e5) | st.just(math.inf),
    st.integers(-3, 9),
    st.integers(-3, 9),
)
def test_wild_samples_raise_nothing_and_leave_time_outs_positive_and_within_the_deadline(
    events, shape, network, queue, now, patience, attempt, attempts
):
    policy = TimeoutPolicy()
    for outcome, at, rtt, up, down in events:
        policy.observe(outcome, at)
        policy.observe_rtt(outcome.network, outcome.host, rtt, at)
        policy.observe_rate(outcome.network, at, up_bytes_per_s=up, down_bytes_per_s=down)
    plan = policy.plan(shape, network, now, deadline=now + patience, attempt=attempt, attempts=attempts, queue=queue)
    assert plan is not None
    for name, value in values(plan).items():
        if name == "packet_gap_s" and plan.packet_gap_s is None:
            assert shape.pattern is Pattern.STREAM
            continue
        assert value > 0.0, name
        assert value <= plan.task_s, name
    assert plan.connect_s <= plan.first_by_s
    assert plan.first_packet_s <= plan.first_by_s
    assert plan.basis


@given(st.lists(wild, min_size=6, max_size=6), networks, st.sampled_from(Pattern), st.floats(0.01, 1e4), st.booleans())
def test_wild_requests_and_queues_raise_nothing(wilds, network, pattern, patience, measured):
    policy = TimeoutPolicy()
    if measured:
        policy.observe_rtt(network, "a", 0.1, 0.0)
    request, answer, cost, hold, *ahead = wilds
    shape = RequestShape(
        host="a", pattern=pattern, request_bytes=request, answer_bytes=answer, server_cost_s=cost, hold_s=hold
    )
    plan = policy.plan(shape, network, 0.0, deadline=patience, queue=Queue(ahead[0], ahead[1], ahead[0], ahead[1]))
    assert all(value > 0.0 for value in values(plan).values())
    assert policy.task_s(shape, 2) > 0.0


@given(
    st.lists(st.tuples(seconds, st.floats(100, 1e7), st.booleans()), max_size=30),
    networks,
    shapes,
    sizes,
    st.integers(0, 10**7),
    queues,
    st.floats(0.1, 100) | st.just(math.inf),
    st.integers(1, 4),
)
def test_bigger_request_or_longer_queue_never_has_less_time(
    history, network, shape, more, more_ahead, queue, patience, attempt
):
    policy = TimeoutPolicy()
    for number, (rtt, rate, good) in enumerate(history):
        policy.observe_rtt(network, shape.host, rtt, number)
        policy.observe_rate(network, number, up_bytes_per_s=rate, down_bytes_per_s=rate)
        policy.observe(
            Outcome(
                network=network,
                host=shape.host,
                path_class="GET /",
                answered=good,
                first_byte_s=rtt,
                total_s=rtt,
                answer_bytes=5000,
            ),
            number,
        )
    bigger = RequestShape(
        host=shape.host,
        path_class=shape.path_class,
        pattern=shape.pattern,
        request_bytes=shape.request_bytes + more,
        answer_bytes=shape.answer_bytes,
        server_cost_s=shape.server_cost_s,
        hold_s=shape.hold_s,
    )
    longer = Queue(
        queue.requests + more_ahead % 7, queue.bytes_up + more_ahead, queue.bytes_down + more_ahead, 2 * queue.waited_s
    )

    def plan(of, behind):
        return policy.plan(of, network, 40.0, deadline=40.0 + patience, attempt=attempt, attempts=4, queue=behind)

    never_shorter(plan(bigger, queue), plan(shape, queue))
    never_shorter(plan(shape, longer), plan(shape, queue))


@given(
    st.lists(st.tuples(seconds, st.floats(1000, 1e7)), min_size=1, max_size=40),
    st.floats(1, 50),
    networks,
    shapes,
    queues,
    st.floats(0.1, 100) | st.just(math.inf),
    st.integers(1, 4),
)
def test_slower_network_never_has_less_time(history, factor, network, shape, queue, patience, attempt):
    quick, slow = TimeoutPolicy(), TimeoutPolicy()
    for number, (rtt, rate) in enumerate(history):
        for policy, by in ((quick, 1.0), (slow, factor)):
            policy.observe_rtt(network, shape.host, rtt * by, number)
            policy.observe_rate(network, number, up_bytes_per_s=rate / by, down_bytes_per_s=rate / by)
    never_shorter(
        *(
            policy.plan(shape, network, 50.0, deadline=50.0 + patience, attempt=attempt, attempts=4, queue=queue)
            for policy in (slow, quick)
        )
    )


@given(
    st.lists(seconds, max_size=20),
    networks,
    shapes,
    st.floats(0.1, 1000),
    st.integers(1, 6),
)
def test_attempts_never_outlast_the_deadline_and_each_has_time(rtts, network, shape, patience, attempts):
    policy = TimeoutPolicy()
    for number, rtt in enumerate(rtts):
        policy.observe_rtt(network, shape.host, rtt, number)
    now, deadline, shares = 30.0, 30.0 + patience, []
    for attempt in range(1, attempts + 1):
        plan = policy.plan(shape, network, now, deadline=deadline, attempt=attempt, attempts=attempts)
        if plan is None:
            assert deadline - now < limits.TIMEOUT_MIN_S
            break
        shares.append(plan.first_by_s)
        now += plan.first_by_s
        assert now <= deadline + 1e-9 * deadline
    assert all(later >= earlier * (1 - 1e-6) for earlier, later in itertools.pairwise(shares))
