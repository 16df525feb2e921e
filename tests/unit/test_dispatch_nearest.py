"""Where a client is, and the order of endpoints for it."""

import ipaddress
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import limits_platform as limits
from stormline.dispatch import nearest
from stormline.dispatch.nearest import ClientPlace, Found, Measures, Nearest, Prefixes
from stormline.dispatch.rules import Network, Region, RuleSet, check
from stormline.wire.plan import Endpoint

RULES = check(
    RuleSet(
        version=1,
        regions={
            "eu": Region(unit="u1", near=("us",), countries=frozenset({"DE"})),
            "us": Region(unit="u2", near=("eu",)),
            "ap": Region(near=("us", "eu")),
        },
        operators={"tele": frozenset({64500})},
        networks={
            "10.0.0.0/8": Network(region="us"),
            "10.1.0.0/16": Network(region="eu", operator="tele"),
            "10.1.2.0/24": Network(region="ap"),
            "2001:db8::/32": Network(region="eu"),
        },
    )
)


def at(number: int, **change: object) -> Endpoint:
    return Endpoint(**({"host": f"192.0.2.{number}", "port": 443} | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("address", "kept", "region", "unit"),
    [
        ("10.9.9.9", "10.9.9.0", "us", "u2"),
        ("10.1.9.9", "10.1.9.0", "eu", "u1"),
        ("10.1.2.3", "10.1.2.0", "ap", ""),
        ("::ffff:10.1.2.3", "10.1.2.0", "ap", ""),
        ("192.0.2.1", "192.0.2.0", "", ""),
        ("2001:db8:1:2:3::4", "2001:db8:1::", "eu", "u1"),
        ("fe80::1%eth0", "fe80::", "", ""),
        ("", "", "", ""),
        ("a unix socket", "", "", ""),
    ],
)
def test_longest_prefix_places_a_client_and_its_address_is_cut(address: str, kept: str, region: str, unit: str) -> None:
    place = Nearest(RULES).place(address)
    assert (place.address, place.region, place.unit) == (kept, region, unit)


def test_bits_beyond_the_client_subnet_do_not_count() -> None:
    assert Nearest(RULES).place("10.1.2.3", prefix=16).region == "eu"
    assert Nearest(RULES).place("10.1.2.3", prefix=0).region == ""


def test_database_fills_what_the_networks_leave_open() -> None:
    place = Nearest(RULES, locate=lambda address: Found("DE", 64500)).place
    assert place("203.0.113.9")[1:4] == ("eu", "tele", "u1")
    assert place("10.1.2.3")[1:3] == ("ap", "tele")
    assert Nearest(RULES, locate=lambda address: Found("XX", 1)).place("203.0.113.9").region == ""


def test_unit_counts_before_region_before_operator_before_quality() -> None:
    own = at(1, unit="u1", region="ap")
    here = at(2, unit="u2", region="eu", operator="other")
    line = at(3, unit="u2", region="us", operator="tele")
    good = at(4, unit="u2", region="us", operator="other")
    poor = at(5, unit="u2", region="us", operator="other")
    last = at(6, unit="u1", region="eu", weight=0)
    measures = Measures(quality={poor: 0.3, own: 0.1}, load={})
    near = Nearest(RULES, measures=measures)
    assert near.order((last, poor, good, line, here, own), near.place("10.1.0.1")) == (
        own, here, line, good, poor, last,
    )  # fmt: skip


def test_full_endpoint_comes_after_one_with_room_and_noise_moves_nobody() -> None:
    a, b = at(1), at(2)
    for group in range(limits.PLACEMENT_BUCKETS):
        place = ClientPlace(bucket=group)
        assert Nearest(RULES, measures=Measures(load={a: 0.95})).order((a, b), place)[0] == b
        calm = Nearest(RULES, measures=Measures(quality={a: 0.91, b: 0.99}))
        assert calm.order((a, b), place) == Nearest(RULES).order((b, a), place)


def test_devices_are_shared_out_by_weight_and_keep_their_place() -> None:
    near = Nearest(RULES)
    a, b, c = at(1, weight=300), at(2, weight=100), at(3, weight=100)
    first = Counter(near.order((a, b), near.place("", device=f"d{n}"))[0].host for n in range(4000))
    assert 0.6 < first[a.host] / 4000 < 0.9
    for n in range(200):
        place = near.place("", device=f"d{n}")
        without, with_c = near.order((a, b), place), near.order((a, b, c), place)
        assert tuple(each for each in with_c if each != c) == without


@pytest.mark.parametrize("name", ["d{}", "device-{:06}", "{:032x}", "10.0.{}.0", "2001:db8:0:{:x}00::"])
def test_devices_and_networks_numbered_in_any_way_are_spread_over_all_groups(name: str) -> None:
    count = 100 * limits.PLACEMENT_BUCKETS
    groups = Counter(nearest.bucket(name.format(number)) for number in range(count))
    assert set(groups) == set(range(limits.PLACEMENT_BUCKETS))
    assert all(60 < size < 140 for size in groups.values())  # four deviations of chance


def test_gateways_of_role_push_are_for_push_devices_alone() -> None:
    shop, push, origin = at(1), at(2, role="push"), at(3, carrier="h2")
    assert nearest.for_role((shop, push, origin), push=False) == (shop, origin)
    assert nearest.for_role((shop, push, origin), push=True) == (push, origin)
    assert nearest.for_role((push,), push=False) == (push,)
    assert nearest.for_role((shop,), push=True) == (shop,)


def _network(number: int, prefix: int, bits: int) -> str:
    kind = ipaddress.IPv4Address if bits == 32 else ipaddress.IPv6Address
    return f"{kind(number >> bits - prefix << bits - prefix)}/{prefix}"


networks = st.one_of(
    st.builds(_network, st.integers(0, 2**bits - 1), st.integers(0, bits), st.just(bits)) for bits in (32, 128)
)
several = st.lists(
    st.builds(
        at,
        st.integers(1, 250),
        weight=st.integers(0, 2**53 - 1),
        region=st.sampled_from(["", "eu", "us"]),
        unit=st.sampled_from(["", "u1", "u2"]),
    ),
    max_size=8,
    unique_by=lambda each: each.host,
)


@given(st.lists(networks, max_size=12), st.data())
def test_prefixes_find_what_a_search_through_all_finds(cidrs: list[str], data: st.DataObject) -> None:
    table = {cidr: Network(operator=f"o{n}") for n, cidr in enumerate(cidrs)}
    parsed = [ipaddress.ip_network(cidr) for cidr in table]
    inside = [network.network_address for network in parsed] + [network.broadcast_address for network in parsed]
    address = data.draw(st.ip_addresses() | (st.sampled_from(inside) if inside else st.nothing()))
    fitting = [net for net in parsed if net.version == address.version and address in net]
    want = table[str(max(fitting, key=lambda net: net.prefixlen))] if fitting else None
    assert Prefixes(table).find(address) == want


@given(several, st.text(max_size=20), st.text(max_size=20), st.floats(allow_nan=False))
def test_order_loses_nothing_and_does_not_depend_on_the_order_given(
    endpoints: list[Endpoint], address: str, device: str, quality: float
) -> None:
    near = Nearest(RULES, measures=Measures(quality=dict.fromkeys(endpoints[:2], quality)))
    place = near.place(address, device=device)
    ordered = near.order(tuple(endpoints), place)
    assert Counter(ordered) == Counter(endpoints)
    assert near.order(tuple(endpoints[::-1]), place) == ordered
    weights = [each.weight > 0 for each in ordered]
    assert weights == sorted(weights, reverse=True)


def test_choice_by_weight_moves_only_those_of_who_comes_or_goes() -> None:
    for n in range(300):
        three = nearest.choose(f"u{n}", [("a", 1), ("b", 2), ("c", 0)])
        assert three in ("a", "b")
        assert nearest.choose(f"u{n}", [("b", 2), ("a", 1), ("d", 1)]) in (three, "d")
    assert nearest.choose("u", []) == ""
