"""Two ways out that go dark by chance, on made-up time: whoever asks gets an answer as long as one of them lives."""

import random

import pytest

from stormline.core import limits
from stormline.policy.paths import PathPolicy, Way

WAYS = (Way("wlan0"), Way("wwan0", metered=True))
STEP_S = 0.25
ROUND_TRIP_S = 0.1


class World:
    """When each way carries anything: spells of light and dark by chance."""

    def __init__(self, seed):
        self.chance = random.Random(f"ways/{seed}")
        self.until = dict.fromkeys((way.name for way in WAYS), 0.0)
        self.light = {"wlan0": False, "wwan0": True}

    def at(self, now):
        for name in self.until:
            while now >= self.until[name]:
                self.light[name] = not self.light[name] or (name == "wwan0" and self.chance.random() < 0.8)
                self.until[name] += self.chance.uniform(2.0, 25.0)
        return self.light


def ask(policy, world, now):
    """Ask once; give the seconds until an answer (None where none comes in ten seconds), and the time then."""
    first = policy.plan(now)[0]
    tried, begun = {first}, now
    while now - begun < 10.0:
        light = world.at(now)
        answering = next((name for name in tried if light[name]), None)
        if answering is not None:
            policy.answered(answering, now + ROUND_TRIP_S)
            policy.carried(answering, 5_000, now)
            return now + ROUND_TRIP_S - begun, now + ROUND_TRIP_S
        other = policy.beside(first, dark_s=now - begun, now=now)
        if other is not None:
            tried.add(other)
        now += STEP_S
        probe(policy, world, now)
    return None, now


def probe(policy, world, now):
    due = policy.next_timer()
    if due is not None and due <= now:
        name = policy.probe(now)
        if name is not None:
            policy.probed(name, now + ROUND_TRIP_S, alive=world.at(now)[name])


@pytest.mark.parametrize("seed", range(20))
def test_one_living_way_is_enough_and_the_usual_one_is_taken_again(seed):
    policy, world, now, lit_since, longest = PathPolicy(), World(seed), 0.0, 0.0, 0.0
    policy.routes(WAYS)
    while now < 600.0:
        light = world.at(now)
        lives = any(light[name] and world.until[name] > now + 8.0 for name in light)
        took_s, now = ask(policy, world, now)
        if lives:
            assert took_s is not None
            longest = max(longest, took_s)
        for _ in range(4):
            now += STEP_S
            probe(policy, world, now)
            lit_since = lit_since if world.at(now)["wlan0"] else now
        if now - lit_since > limits.PATH_PROBE_S_MAX + 2.0:
            assert policy.plan(now)[0] == "wlan0"
    assert longest <= limits.PATH_DARK_S + limits.PATH_PROBE_S + 4 * STEP_S + ROUND_TRIP_S
    policy.routes(WAYS[1:])
    assert policy.plan(now) == ("wwan0",)


@pytest.mark.parametrize("seed", range(5))
def test_metered_way_carries_no_more_than_its_bound_however_long_the_other_is_dark(seed):
    policy, chance, now, carried = (
        PathPolicy(metered_bytes=100_000, metered_bytes_per_s=10.0),
        random.Random(seed),
        0.0,
        0,
    )
    policy.routes(WAYS)
    while now < 900.0:
        if policy.beside("wlan0", dark_s=2.0, now=now) or policy.plan(now)[0] == "wwan0":
            policy.answered("wwan0", now)
            size = chance.randint(500, 30_000)
            policy.carried("wwan0", size, now)
            carried += size
        now += 1.0
        if policy.probe(now) is not None:
            policy.probed("wlan0", now, alive=False)
    assert carried <= 100_000 + 10.0 * now + 30_000
    policy.heard("wlan0", now)
    assert policy.plan(now)[0] == "wlan0"
