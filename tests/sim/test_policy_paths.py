"""The policies on models of slow, fading and dark networks: no timer fires on what is merely slow, dead is found fast.

A pure loop over virtual time. The model is a queue each way, losses mended by doubling time-outs, and rates that are
functions of time: a dead spot is a low rate, a blackout is none. An exchange is reckoned whole when it begins.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from stormline.policy.quality import State
from stormline.policy.shape import Network, Queue, RequestShape
from stormline.policy.timeouts import Outcome, TimeoutPolicy

STEP_S = 0.01
SEGMENT_BYTES = 1400
NEVER_S = 600.0
PATIENCE_S = 10.0
SEEDS = range(20)


@dataclass
class Exchange:
    start_s: float
    request_bytes: int
    answer_bytes: int
    first_s: float = NEVER_S
    last_s: float = NEVER_S
    ahead: int = 0
    waited_s: float = 0.0


@dataclass
class Path:
    """One access link under one warm connection.

    Attributes:
        up: bytes per second at a moment; 0 is dark, and what is sent then is lost.
        down: the same.
        trip_s: round trip of an empty link.
        loss: chance of each packet to be lost.
        server_s: what the server needs.
    """

    up: Callable[[float], float]
    down: Callable[[float], float]
    trip_s: float
    loss: float
    chance: random.Random
    server_s: float = 0.02
    up_free_s: float = 0.0
    down_free_s: float = 0.0
    exchanges: list[Exchange] = field(default_factory=list)

    def _serve(self, begin_s: float, size: float, rate: Callable[[float], float]) -> float:
        """Give when `size` bytes that take their turn at `begin_s` are through."""
        now, left = begin_s, float(size)
        while left > 0.0 and now < begin_s + NEVER_S:
            carried = rate(now)
            if carried * STEP_S >= left:
                return now + left / carried
            left -= carried * STEP_S
            now += STEP_S
        return now

    def _recover(self, now: float, rate: Callable[[float], float]) -> float:
        """Give when a packet sent at `now` gets on its way: losses and dark spells cost doubling time-outs."""
        rto, end = max(0.2, 1.5 * self.trip_s + 0.2), now + NEVER_S
        while now < end and (self.chance.random() < self.loss or rate(now) <= 0.0):
            now += rto
            rto = min(60.0, 2 * rto)
        return now

    def exchange(self, start_s: float, request_bytes: int, answer_bytes: int) -> Exchange:
        """Reckon one request; they come in the order of their start."""
        ahead = sum(each.last_s > start_s for each in self.exchanges)
        waited = max((start_s - each.start_s for each in self.exchanges if each.first_s > start_s), default=0.0)
        made = Exchange(start_s, request_bytes, answer_bytes, ahead=ahead, waited_s=waited)
        moved = self._recover(start_s, self.up)
        self.up_free_s = through = self._serve(max(moved, self.up_free_s), request_bytes + 60, self.up)
        asked = through + self.trip_s / 2 + self.server_s
        turn = max(self._recover(asked, self.down), self.down_free_s)
        first = self._serve(turn, min(answer_bytes, SEGMENT_BYTES), self.down)
        last = self._serve(first, max(0, answer_bytes - SEGMENT_BYTES), self.down)
        self.down_free_s = max(self.down_free_s, last)
        made.first_s, made.last_s = first + self.trip_s / 2, last + self.trip_s / 2
        self.exchanges.append(made)
        return made


def steady(up_bps: float, down_bps: float, trip_s: float, loss: float) -> Callable[[int], Path]:
    return lambda seed: Path(lambda _: up_bps / 8, lambda _: down_bps / 8, trip_s, loss, random.Random(seed))


def umts(seed: int) -> Path:
    """A second at a time 0.2 to 2 Mbit/s, and a dead spot of 5 to 100 kbit/s for 40 s."""
    chance = random.Random(seed)

    def wavering() -> Callable[[float], float]:
        rates = [chance.uniform(5e3, 100e3) if 50 <= at < 90 else chance.uniform(200e3, 2e6) for at in range(2000)]
        return lambda now: rates[int(now)] / 8

    return Path(wavering(), wavering(), 0.15, 0.005, chance)


def interrupted(on_s: float, off_s: float) -> Callable[[int], Path]:
    """4G that goes dark every now and then."""

    def rate(bps: float) -> Callable[[float], float]:
        return lambda now: 0.0 if now % (on_s + off_s) >= on_s else bps / 8

    return lambda seed: Path(rate(6e6), rate(12e6), 0.06, 0.001, random.Random(seed))


NETWORKS = {
    "edge": (steady(60e3, 100e3, 0.6, 0.03), 100 / 120),
    "umts": (umts, 300 / 120),
    "3g": (steady(400e3, 1e6, 0.2, 0.01), 300 / 120),
    "4g": (steady(6e6, 12e6, 0.06, 0.001), 300 / 120),
    "lossy4g": (steady(6e6, 12e6, 0.08, 0.05), 300 / 120),
    "wifi": (steady(40e6, 40e6, 0.02, 0.001), 300 / 120),
}


@dataclass
class Told:
    """What a run showed: requests whose answer would have come in time, and those whose timer fired before it."""

    alive: int = 0
    fired: int = 0
    first_packet_s: float = 0.0


def run(path: Path, network: Network, policy: TimeoutPolicy, seed: int, rate_hz: float, seconds: float = 120.0) -> Told:
    """Put the usual load on a path: 93 % of answers 1 KB, 6.7 % 30 KB, the rest 128 KB; sizes are not known before."""
    chance, told, now, pending = random.Random(seed + 1000), Told(), 0.0, []
    policy.observe_rtt(network, "a", path.trip_s, now)
    while now < seconds:
        now += chance.expovariate(rate_hz)
        for each in sorted(pending, key=lambda each: min(each.last_s, each.start_s + PATIENCE_S)):
            ended = min(each.last_s, each.start_s + PATIENCE_S)
            if ended <= now:
                pending.remove(each)
                policy.observe(outcome(network, each, ended), ended)
        draw = chance.random()
        made = path.exchange(now, 600, 1024 if draw < 0.93 else 30 * 1024 if draw < 0.997 else 128 * 1024)
        shape = RequestShape(host="a", path_class="GET /", request_bytes=600)
        queue = Queue(made.ahead, 0, made.ahead * policy.answer_bytes(shape), made.waited_s)
        plan = policy.plan(shape, network, now, deadline=now + PATIENCE_S, attempts=4, queue=queue)
        told.first_packet_s = plan.first_packet_s
        if made.first_s - now <= PATIENCE_S:
            told.alive += 1
            told.fired += made.first_s - now > plan.first_packet_s
        pending.append(made)
    return told


def outcome(network: Network, each: Exchange, ended_s: float) -> Outcome:
    answered = each.last_s <= ended_s
    return Outcome(
        network=network,
        host="a",
        path_class="GET /",
        answered=answered,
        first_byte_s=min(each.first_s, ended_s) - each.start_s if answered or each.first_s > ended_s else None,
        body_s=each.last_s - each.first_s if answered else None,
        total_s=each.last_s - each.start_s if answered else None,
        request_bytes=each.request_bytes,
        answer_bytes=each.answer_bytes,
        queued=each.ahead > 0,
    )


@pytest.mark.parametrize("kind", ["unknown", "cell", "wifi"])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_first_packet_time_out_fires_on_a_network_that_is_merely_slow(name, kind):
    make, rate_hz = NETWORKS[name]
    runs = [run(make(seed), Network(name, kind), TimeoutPolicy(), seed, rate_hz) for seed in SEEDS]
    alive, fired = sum(each.alive for each in runs), sum(each.fired for each in runs)
    assert alive > 300
    assert fired <= 0.01 * alive


@pytest.mark.parametrize(
    ("name", "kind", "most_s"), [("wifi", "wifi", 2.0), ("4g", "cell", 3.0), ("4g", "unknown", 3.0)]
)
def test_dead_path_is_found_within_seconds_after_warm_up(name, kind, most_s):
    make, rate_hz = NETWORKS[name]
    for seed in SEEDS:
        policy, network = TimeoutPolicy(), Network(name, kind)
        told = run(make(seed), network, policy, seed, rate_hz)
        assert policy.state(network, 120.0) is State.EXCELLENT
        assert told.first_packet_s <= most_s


@pytest.mark.parametrize(("on_s", "off_s"), [(4.0, 3.0), (22.0, 8.0)])
def test_blackouts_make_the_policy_patient_and_good_minutes_quick_again(on_s, off_s):
    for seed in SEEDS:
        policy, network = TimeoutPolicy(), Network("train", "cell")
        before = run(interrupted(on_s, off_s)(seed), network, policy, seed, 2.5)
        assert before.first_packet_s > 4.0
        clear = NETWORKS["4g"][0](seed)
        for second in range(200):
            now = 130.0 + second * 0.4
            each = clear.exchange(now, 600, 1024)
            policy.observe(outcome(network, each, each.last_s), each.last_s)
        plan = policy.plan(RequestShape(host="a", path_class="GET /"), network, 220.0, deadline=230.0, attempts=4)
        assert plan.first_packet_s <= 4.0


def test_attempts_that_are_cut_by_a_blackout_leave_time_for_one_after_it():
    make, rate_hz = NETWORKS["4g"]
    policy, network = TimeoutPolicy(), Network("lift", "cell")
    run(make(1), network, policy, 1, rate_hz)
    start, dark_until = 200.0, 208.0
    shape, now, attempt = RequestShape(host="a", path_class="GET /", request_bytes=600), start, 1
    while attempt <= 4:
        plan = policy.plan(shape, network, now, deadline=start + PATIENCE_S, attempt=attempt, attempts=4)
        if plan is None or now + plan.first_by_s > dark_until:
            break
        now += plan.first_by_s
        attempt += 1
    assert plan is not None
    assert attempt <= 4
    assert now + plan.first_by_s == pytest.approx(start + PATIENCE_S), "the last one lasts to the end of patience"
