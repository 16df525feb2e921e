"""The journey of a device that moves, and what its starts add up to; no network is made."""

import itertools

import pytest

from stormline.core.errors import ConfigError
from stormline.lab import starts
from stormline.lab.starts_client import FIRST, PATIENCE_S, Told
from stormline.lab.starts_networks import GATEWAYS, NETWORKS, SERVER
from stormline.lab.starts_servers import LONG_HOST, rules

HARSH = [each for each in NETWORKS if each.learnable]


def visit(first_s: float | None, *, learns: bool = True, again: int = 0, **more: object) -> starts.Visit:
    told = Told(first_s=first_s, ok=FIRST if first_s is not None else 0, address="a:1", begun=["a:1"])
    fields = {"seed": 1, "network": "home", "way": "origin", "learns": learns, "visit": again, "told": told}
    return starts.Visit(**(fields | more))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("restarts", [6, 7, 20])
def test_journey_visits_each_network_once_before_it_returns(seed: int, restarts: int) -> None:
    order = starts.journey(seed, restarts)
    assert len({each.name for each in order[: len(NETWORKS)]}) == len(NETWORKS)
    assert sum(each.learnable for each in order) == restarts
    counts = [sum(each is network for each in order) for network in HARSH]
    assert max(counts) - min(counts) <= 1
    assert order == starts.journey(seed, restarts)
    if restarts != 7:  # where one is left out its neighbours may be the same
        assert all(one is not other for one, other in itertools.pairwise(order))


def test_journey_without_a_return_is_refused() -> None:
    with pytest.raises(ConfigError, match="6 or more"):
        starts.journey(1, 5)


def test_figures_compare_returns_with_first_visits_and_count_who_waited_in_vain() -> None:
    found = [
        visit(1.0),
        visit(1.0, learns=False),
        visit(0.4, again=1),
        visit(0.6, again=2),
        visit(None, learns=False, again=1),
        visit(1.1, learns=False, again=2),
        visit(0.3, network="good"),
        visit(0.3, network="good", again=1),
        visit(0.3, network="good", learns=False),
        visit(0.2, network="good", learns=False, again=1),
    ]
    figures = {each.name: each for each in starts.figures(found)}
    assert figures["start30_success_pct"].value == 100.0
    assert figures["start30_success_pct"].without == pytest.approx(200 / 3)
    assert figures["return_median_reduction_pct"].value == pytest.approx(50.0)
    assert figures["return_median_reduction_pct"].without == pytest.approx(100 * (1 - (PATIENCE_S + 1.1) / 2))
    assert figures["return_first_connection_best_pct"].value == 100.0
    assert figures["return_home_origin_ms"].value == pytest.approx(500.0)
    assert figures["harm_good_origin_pct"].value == pytest.approx(50.0)
    assert [(each.starts, each.ok, each.without_ok) for each in starts.cells(found)] == [(3, 3, 2), (2, 2, 2)]


def test_first_connection_elsewhere_is_not_straight() -> None:
    there = visit(1.0)
    there.told.begun = ["b:1", "a:1"]
    assert not there.straight
    assert starts.line(there) == "1,home,origin,1,0,1.0,,5,0,0,0,0.0,a:1"
    assert len(starts.line(there).split(",")) == len(starts.FIELDS.split(","))


def test_each_harsh_network_spoils_something_of_each_way() -> None:
    for network in HARSH:
        assert network.drops
    plan = rules(("2001:db8:53::10", "203.0.113.10"))
    assert SERVER.v6 == 1
    assert {each.host for each in plan.hosts[LONG_HOST].endpoints} > set(GATEWAYS)
    assert len({each.port for each in plan.hosts[LONG_HOST].endpoints}) == 2
    devices = [(each.uplink.name, each.router) for each in NETWORKS]
    assert len(set(devices)) == len(devices)  # or two would be one to the client
