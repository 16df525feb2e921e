"""What the runs about relays are, and what is made of them."""

import pytest

from stormline.core import errors
from stormline.lab import relays, results
from stormline.lab.faults import LostFlows
from stormline.lab.relays_servers import OFF_SITE, ON_SITE
from stormline.lab.results import Outcome


def _result(*outcomes: Outcome) -> results.Result:
    key = results.RunKey(profile="operator-incident", client="stormline", seed=1, requests=3, duration_s=40.0)
    traffic = results.Traffic(connections=0, bytes_up=0, bytes_down=0, duplicates=0)
    return results.summarise(key, outcomes, traffic, results.Trust())


def test_a_curve_counts_only_what_had_all_its_patience_in_the_incident() -> None:
    outcomes = [Outcome(9.9, 10.0, "timeout"), Outcome(10.0, 1.0, ""), Outcome(19.9, 10.0, "timeout"),
                Outcome(20.1, 10.0, "timeout"), Outcome(39.0, 0.5, "")]  # fmt: skip
    found = relays.curve("no relay", [_result(*outcomes), _result(Outcome(12.0, 3.0, ""))])
    assert (found.requests, found.failed_pct) == (3, pytest.approx(100 / 3))
    assert found.median_s == 1.0
    by_time = {at_s: (count, pct) for at_s, count, pct in found.points}
    assert by_time[5.0] == (1, 0.0)
    assert by_time[10.0] == (2, 100.0)
    assert by_time[35.0] == (1, 100.0)
    assert len(by_time) == 8


def test_curves_of_a_seed_differ_in_the_relays_alone() -> None:
    none, on_site, off_site = relays.incident([3], 60.0)
    assert [case.relays for case in (none, on_site, off_site)] == [(), (ON_SITE,), (OFF_SITE, ON_SITE)]
    assert none == on_site._replace(name=none.name, relays=()) == off_site._replace(name=none.name, relays=())
    direct, beside = none.profile.expand(3, 60.0)
    assert (direct.at_s, direct.until_s) == (relays.BEGIN_S, 60.0 - relays.BEGIN_S)
    assert (direct.fault.pct, beside.fault.pct) == (relays.DIRECT_PCT, relays.ON_SITE_PCT)
    assert beside.fault.hosts == (ON_SITE,)


def test_each_network_is_met_with_and_without_a_relay_by_both_clients() -> None:
    cases = relays.ablation([1, 2], 24.0)
    assert len(cases) == len(relays.PROFILES) * 2 * 4
    for case in cases:
        known = "ip-direct" not in case.off
        assert bool(case.relays) is (known or "relay" not in case.off)


def test_lost_flows_are_a_share_of_them() -> None:
    fault = LostFlows(pct=93.8, hosts=("203.0.113.10", "203.0.113.11"))
    (rule,) = fault.rules(None)["forward"]
    assert "mod 10000" in rule
    assert "< 9380 drop" in rule
    for pct in (0.0, 100.1, float("nan")):
        with pytest.raises(errors.ConfigError):
            LostFlows(pct=pct, hosts=("203.0.113.10",))
