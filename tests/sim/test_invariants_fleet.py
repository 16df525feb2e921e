"""Each invariant of fleets says what breaks it and is silent where it holds; so do the checks of a herd."""

import pytest

from stormline.core.codes import Code
from stormline.testing import invariants_fleet
from stormline.testing.history import CallEntry, Goodbye, History, PushEntry
from stormline.testing.scenario import Checks

HERD = Checks(bin_pct=5.0, tries=2.0, back_s=60.0)
DEVICES = [f"d{number}" for number in range(1, 41)]


def good_history() -> History:
    """A gateway that dies under forty devices, which come back one after the other; and a device with two copies."""
    history = History(scenario="s", seed=1)
    fleet = history.fleet
    fleet.names = {f"id-{name}": name for name in DEVICES}
    fleet.outages.append(("n1", 10.0, frozenset(fleet.names)))
    for number, name in enumerate(DEVICES):
        fleet.dials.append((name, 10.01 + 0.1 * number))
        fleet.welcomes.append((name, 10.5 + 0.1 * number))
    fleet.copies["id-d1"] = [("d1", 0.0), ("d50", 30.0)]
    fleet.welcomes.append(("d50", 31.0))
    fleet.goodbyes.append(Goodbye("d1", 31.2, Code.REPLACED, "the device has a newer session"))
    history.pushes["p1"] = PushEntry(id="p1", device="id-d1", fresh=True, confirmed_s=40.0)
    return history


def lose_push(history):
    history.pushes["p1"].confirmed_s = None


def come_back(history):
    history.fleet.welcomes.append(("d1", 35.0))


def replace_newest(history):
    history.fleet.goodbyes.append(Goodbye("d50", 36.0, Code.REPLACED, "the device has a newer session"))


def hear_nothing(history):
    history.fleet.goodbyes.clear()


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lose_push, "pushes_are_well_after_the_storm"),
        (come_back, "a_replaced_copy_stays_away"),
        (replace_newest, "only_a_newer_copy_replaces"),
        (hear_nothing, "one_copy_is_left"),
    ],
)
def test_breach_is_told_by_its_invariant_alone(spoil, name):
    history = good_history()
    assert invariants_fleet.check(history) == []
    spoil(history)
    told = invariants_fleet.check(history)
    assert {each.partition(":")[0] for each in told} == {name}


def test_every_invariant_is_tried_here():
    tried = {"pushes_are_well_after_the_storm", "a_replaced_copy_stays_away", "only_a_newer_copy_replaces"}
    assert {each.__name__ for each in invariants_fleet.ALL} == tried | {"one_copy_is_left"}


def rush(history):
    history.fleet.dials[:] = [(name, 10.01 + 0.1 * (number // 8)) for number, name in enumerate(DEVICES)]


def knock(history):
    history.fleet.dials += [(name, 20.0 + number) for name in DEVICES for number in range(2)]


def stay_away(history):
    history.fleet.welcomes.remove(("d7", 10.5 + 0.1 * 6))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (rush, "8 of 40 devices began to come back in the same 0.1 s"),
        (knock, "120 connections were begun by 40 devices"),
        (stay_away, "1 of 40 devices were not back 60 s"),
    ],
)
def test_herd_is_told_with_its_gateway(spoil, words):
    history = good_history()
    assert invariants_fleet.herd(history, HERD) == []
    assert invariants_fleet.herd(history, Checks()) == []
    spoil(history)
    [told] = invariants_fleet.herd(history, HERD)
    assert told == f"check: {words} after the end of n1 at 10.000 s"


def test_few_devices_are_no_herd():
    history = good_history()
    history.fleet.outages[:] = [("n1", 10.0, frozenset(["id-d1", "id-d2"]))]
    rush(history)
    assert invariants_fleet.herd(history, HERD) == []


def test_call_counts_as_slow_while_its_device_reads_slowly_and_a_while_after():
    history = good_history()
    history.fleet.slow.append(("d1", 50.0, 60.0))
    calls = [
        CallEntry(id=str(start), device=device, kind="get", deadline_s=5.0, started_s=start, ended_s=start + 1.0)
        for device in ("d1", "d2")
        for start in (40.0, 49.5, 55.0, 70.0, 90.0)
    ]
    assert [invariants_fleet.is_slow(history, call) for call in calls] == [False, True, True, True, False, *[False] * 5]
