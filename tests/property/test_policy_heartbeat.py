"""The search for what a network stands, on any network: few links, a narrow end, no way to be stuck."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from stormline.bench.heartbeat import DAY_S, Learned, live
from stormline.core import limits_heartbeat, limits_memory
from stormline.policy.heartbeat import Heartbeats

limits_s = st.floats(20.0, limits_heartbeat.HEARTBEAT_MAX_S)
starts_s = st.floats(limits_heartbeat.HEARTBEAT_MIN_S, limits_heartbeat.HEARTBEAT_MAX_S)


@given(limits_s, starts_s)
@settings(max_examples=200)
@example(20.0, 3600.0)
@example(3600.0, 15.0)
def test_limit_is_found_with_three_links_and_kept_within_a_fifth(limit_s, start_s):
    pace = Learned(start_s)
    life = live(pace, lambda now: limit_s, 3 * DAY_S, until=lambda: pace.settled)
    assert pace.settled
    assert life.losses <= 3
    assert 0.8 * limit_s <= life.last_s < limit_s
    assert len(life.history) <= 60


@given(limits_s, limits_s, starts_s)
@settings(max_examples=25)
def test_limit_that_changes_is_followed(was_s, is_s, start_s):
    pace = Learned(start_s)
    live(pace, lambda now: was_s, 3 * DAY_S, until=lambda: pace.settled)
    life = live(pace, lambda now: is_s, 10 * DAY_S)
    silences = [(at, silence_s) for at, silence_s, lost in life.history if not lost]
    assert all(0.7 * is_s <= silence_s < is_s for at, silence_s in silences if at > 3 * DAY_S)
    early = [lost for at, _, lost in life.history if at < 0.9 * DAY_S]
    assert early.count(True) <= 4  # three, and one where the search began before the change


@given(st.floats(60.0, 3600.0), st.floats(0.0, 0.05), st.integers(0, 2**32))
@settings(max_examples=12)
def test_chance_neither_holds_it_low_nor_makes_it_restless(limit_s, chance, seed):
    life = live(Learned(), lambda now: limit_s, 14 * DAY_S, chance=chance, seed=seed)
    assert life.low_s <= 5 * DAY_S
    ideal = 14 * DAY_S / (0.8 * limit_s)
    assert len(life.history) <= 2.5 * ideal + 200
    assert life.losses <= 0.02 * len(life.history) + 40


events = st.tuples(
    st.sampled_from(["a", "b"]), st.floats(allow_nan=True, allow_infinity=True) | st.floats(0.0, 4000.0), st.booleans(),
    st.booleans(), st.floats(0.0, 1e6),
)  # fmt: skip


@given(st.lists(events, max_size=60))
def test_plan_is_within_its_bounds_whatever_happens_and_survives_a_start(history):
    known, now = Heartbeats(), 0.0
    for network_id, silence_s, alive, worked, passed_s in history:
        now += passed_s
        known.observe(network_id, silence_s, now, alive=alive)
        known.dialled(network_id, now, worked=worked)
        planned_s = known.plan(network_id, now)
        assert limits_heartbeat.HEARTBEAT_MIN_S <= planned_s <= limits_heartbeat.HEARTBEAT_MAX_S
        kept = known.export(network_id, now, 0.0)
        if kept is not None:
            again = Heartbeats()
            again.restore(network_id, kept, now, 0.0)
            assert again.proven_s(network_id) <= known.proven_s(network_id) + 0.001
            assert limits_heartbeat.HEARTBEAT_MIN_S <= again.plan(network_id, now) <= limits_heartbeat.HEARTBEAT_MAX_S
    assert known.export("a", now + limits_memory.MEMORY_LIFE_S + 1.0, 0.0) is None


@given(st.lists(events, max_size=40), limits_s)
def test_two_networks_do_not_mix(history, limit_s):
    alone, both, now = Heartbeats(), Heartbeats(), 0.0
    for network_id, silence_s, alive, worked, passed_s in history:
        now += passed_s
        for known in (both, alone) if network_id == "a" else (both,):
            known.observe(network_id, silence_s, now, alive=alive)
            known.dialled(network_id, now, worked=worked)
    assert alone.plan("a", now) == both.plan("a", now)
