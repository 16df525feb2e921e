"""What identifies a network, what a change of it means, and what sleep and a set clock look like."""

from dataclasses import replace

import pytest

from stormline.core import limits_network as limits
from stormline.core.values import Secret
from stormline.policy.network import (
    NO_NETWORK_ID,
    NOTHING_KNOWN,
    Change,
    ClockWatch,
    Jump,
    NetworkInfo,
    NetworkTracker,
    identify,
    prefix_of,
)

KEY = bytes(range(32))
HOME = NetworkInfo(
    kind="wifi",
    interface="wlan0",
    index=3,
    addresses=("192.168.1.20",),
    prefixes=("192.168.1.0/24",),
    gateway="192.168.1.1",
    gateway_link=Secret("00005e005301"),
    name=Secret("Home sweet home"),
    routed=True,
)
CELL = NetworkInfo(kind="cell", interface="rmnet0", index=7, addresses=("10.9.8.7",), name=Secret("Op"), routed=True)
CABLE = NetworkInfo(
    kind="wired", interface="eth0", index=2, addresses=("10.0.0.5",), prefixes=("10.0.0.0/8",), gateway="10.0.0.1",
    routed=True,
)  # fmt: skip
NONE = NetworkInfo(routed=False)


# -- identity ---------------------------------------------------------------------------------------------------------
def test_id_of_a_network_is_the_same_after_a_reconnect_with_another_address() -> None:
    again = replace(HOME, addresses=("192.168.1.77",), index=9, gateway_link=Secret("00005e005302"), signal_dbm=-60)
    assert identify(KEY, again) == identify(KEY, HOME)


def test_id_differs_by_name_kind_gateway_and_tunnel() -> None:
    unnamed = replace(HOME, name=None)
    bare = replace(unnamed, gateway_link=None)
    seen = [
        HOME,
        replace(HOME, name=Secret("Other")),
        replace(HOME, kind="cell"),
        unnamed,
        replace(unnamed, gateway_link=Secret("00005e005309")),
        bare,
        replace(bare, gateway="192.168.1.254"),
        replace(bare, prefixes=("192.168.0.0/16",)),
        replace(HOME, vpn=True),
        CELL,
        replace(CELL, name=None),
        NOTHING_KNOWN,
    ]
    ids = [identify(KEY, info) for info in seen]
    assert len(set(ids)) == len(ids)
    assert all(len(each) == 2 * limits.NETWORK_ID_BYTES for each in ids)


def test_id_is_of_one_installation_and_shows_no_name() -> None:
    assert identify(KEY, HOME) != identify(bytes(32), HOME)
    shown = f"{HOME!r} {HOME}"
    assert "sweet" not in shown
    assert "00005e" not in shown


def test_id_where_there_is_no_network_is_a_word() -> None:
    assert identify(KEY, NONE) == NO_NETWORK_ID


@pytest.mark.parametrize(
    ("address", "length", "network"),
    [("192.168.1.20", 24, "192.168.1.0/24"), ("10.1.2.3", 0, "0.0.0.0/0"), ("fe80::1", 64, ""), ("x", 8, ""),
     ("10.0.0.1", 33, "")],
)  # fmt: skip
def test_prefix_is_that_of_ipv4_addresses(address: str, length: int, network: str) -> None:
    assert prefix_of(address, length) == network


# -- changes ----------------------------------------------------------------------------------------------------------
def test_look_that_shows_the_same_tells_nothing() -> None:
    tracker = NetworkTracker(KEY, HOME)
    assert tracker.observe(HOME, 1.0) is None
    assert tracker.observe(replace(HOME, signal_dbm=-80), 2.0) is None
    assert tracker.observe(replace(HOME, addresses=("192.168.1.20", "fd00::1")), 3.0) is None


def test_another_network_is_new_and_names_the_addresses_that_are_gone() -> None:
    tracker = NetworkTracker(KEY, HOME)
    told = tracker.observe(CELL, 1.0)
    assert told is not None
    assert (told.change, told.gone) == (Change.NEW, frozenset({"192.168.1.20"}))
    assert told.before.id != told.after.id == tracker.info.id
    tracker = NetworkTracker(KEY, HOME)
    told = tracker.observe(CELL, 1.0, lambda address: True)  # the WiFi still has its address
    assert told is not None
    assert told.gone == frozenset()


def test_hand_over_with_a_gap_tells_the_new_network_and_no_loss() -> None:
    tracker = NetworkTracker(KEY, HOME)
    assert tracker.observe(NONE, 1.0) is None
    assert tracker.lost_due_at == 1.0 + limits.NETWORK_LOST_HOLD_S
    told = tracker.observe(CELL, 1.4)
    assert told is not None
    assert (told.change, told.gone) == (Change.NEW, frozenset({"192.168.1.20"}))
    assert tracker.lost_due_at is None


def test_loss_that_lasts_is_told_once_and_the_return_is_the_same_network() -> None:
    tracker = NetworkTracker(KEY, HOME)
    tracker.observe(NONE, 1.0)
    told = tracker.observe(NONE, 2.0)
    assert told is not None
    assert (told.change, told.before.id, told.after.id) == (Change.LOST, identify(KEY, HOME), NO_NETWORK_ID)
    assert tracker.observe(NONE, 9.0) is None
    told = tracker.observe(replace(HOME, addresses=("192.168.1.99",)), 60.0)
    assert told is not None
    assert (told.change, told.gone) == (Change.SAME, frozenset({"192.168.1.20"}))


def test_short_loss_that_comes_back_unchanged_tells_nothing() -> None:
    tracker = NetworkTracker(KEY, HOME)
    assert tracker.observe(NONE, 1.0) is None
    assert tracker.observe(HOME, 1.2) is None


def test_same_name_with_another_address_is_roamed() -> None:
    tracker = NetworkTracker(KEY, HOME)
    told = tracker.observe(replace(HOME, addresses=("192.168.1.21",)), 1.0)
    assert told is not None
    assert told.change is Change.ROAMED


def test_link_layer_address_learned_later_makes_no_new_network() -> None:
    tracker = NetworkTracker(KEY, CABLE)
    assert tracker.look_again_s == limits.NETWORK_REFINE_S
    first = tracker.info.id
    full = replace(CABLE, gateway_link=Secret("00005e005310"))
    assert tracker.observe(full, 1.0) is None
    assert tracker.info.id != first
    assert tracker.look_again_s is None
    assert tracker.observe(CABLE, 2.0) is None  # the kernel has forgotten it; we have not
    assert tracker.info.id == identify(KEY, full)
    told = tracker.observe(replace(CABLE, gateway_link=Secret("00005e005311")), 3.0)
    assert told is not None  # same addresses, another router: told by nobody but its link-layer address
    assert told.change is Change.NEW


# -- clocks -----------------------------------------------------------------------------------------------------------
def test_sleep_is_told_by_the_clock_that_goes_on_in_it() -> None:
    watch = ClockWatch(100.0, 1e9, 150.0)
    assert watch.observe(110.0, 1e9 + 10, 160.0) == Jump()
    assert watch.observe(111.0, 1e9 + 611, 761.0) == Jump(slept_s=600.0)
    assert watch.observe(112.0, 1e9 + 612, 762.0) == Jump()


@pytest.mark.parametrize("step_s", [3600.0, -3600.0, 86400.0 * 365])
def test_wall_clock_that_is_set_is_no_sleep(step_s: float) -> None:
    watch = ClockWatch(100.0, 1e9, 150.0)
    jump = watch.observe(101.0, 1e9 + 1 + step_s, 151.0)
    assert jump.slept_s == 0.0
    assert jump.stepped_s == pytest.approx(step_s)


def test_sleep_and_a_set_clock_together_are_told_apart() -> None:
    watch = ClockWatch(0.0, 1000.0, 0.0)
    jump = watch.observe(1.0, 1000.0 + 1 + 60 - 3600, 61.0)
    assert jump.slept_s == pytest.approx(60.0)
    assert jump.stepped_s == pytest.approx(-3600.0)


def test_without_such_a_clock_a_jump_ahead_counts_as_sleep_and_one_back_does_not() -> None:
    watch = ClockWatch(0.0, 1000.0, None)
    assert watch.observe(1.0, 1301.0, None).slept_s == pytest.approx(300.0)
    assert watch.observe(2.0, 1002.0, None).slept_s == 0.0


def test_slow_drift_over_a_long_pause_is_neither() -> None:
    watch = ClockWatch(0.0, 1000.0, None)
    assert watch.observe(86400.0, 1000.0 + 86400.0 * 1.0004, None) == Jump()
