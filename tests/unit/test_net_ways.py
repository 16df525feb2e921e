"""Which ways out a machine has, as `/proc/net` tells, and that no other is named where it would go around a VPN."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.net import ways
from stormline.net.network import NoNetworkPort
from stormline.net.recorded import PushedNetwork
from stormline.policy.network import NetworkInfo

HEAD = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
NOWHERE = "0" * 32


def v4(name: str, metric: int, *, flags: str = "0003", to: str = "00000000", gateway: str = "0101A8C0") -> str:
    return f"{name}\t{to}\t{gateway}\t{flags}\t0\t0\t{metric}\t00000000\t0\t0\t0\n"


def v6(name: str, metric: int, *, flags: str = "00000003", length: str = "00", gateway: str = NOWHERE) -> str:
    return f"{NOWHERE} {length} {NOWHERE} 00 {gateway} {metric:08x} 00000001 00000000 {flags} {name:>8}\n"


def machine(tmp_path: Path, *, route: str | None = None, ipv6_route: str | None = None) -> Path:
    folder = tmp_path / "proc" / "net"
    folder.mkdir(parents=True, exist_ok=True)
    if route is not None:
        (folder / "route").write_text(route, "utf-8")
    if ipv6_route is not None:
        (folder / "ipv6_route").write_text(ipv6_route, "utf-8")
    return tmp_path


def test_default_routes_are_given_by_metric_each_interface_once(tmp_path: Path) -> None:
    told = (
        HEAD + v4("wwan0", 700, gateway="00000000") + v4("wlan0", 600) + v4("wlan0", 900) + v4("eth9", 1, to="0000A8C0")
    )
    assert ways.default_routes(machine(tmp_path, route=told)) == [("wlan0", "192.168.1.1"), ("wwan0", "")]


def test_default_routes_of_ipv6_alone_are_found_and_those_that_refuse_are_not(tmp_path: Path) -> None:
    gateway = "fe80000000000000000000000000" + "0001"
    told = (
        v6("wlan0", 600, gateway=gateway) + v6("lo", 1) + v6("eth0", 1, flags="00000203") + v6("tun9", 1, length="01")
    )
    assert ways.default_routes(machine(tmp_path, ipv6_route=told)) == [("wlan0", "fe80::1")]


def test_default_route_that_is_down_is_none(tmp_path: Path) -> None:
    assert ways.default_routes(machine(tmp_path, route=HEAD + v4("wlan0", 1, flags="0002"))) == []


def test_default_routes_where_nothing_is_told_are_none(tmp_path: Path) -> None:
    assert ways.default_routes(tmp_path) == []


@given(st.text(st.sampled_from("0123456789abcdefF \t\nwlan"), max_size=400))
def test_routes_whatever_the_lines_are_do_not_raise(text: str) -> None:
    lines = text.splitlines()
    for _, name, _ in (*ways._routes_v4(lines), *ways._routes_v6(lines)):
        assert name


def test_interface_of_no_such_name_leads_nowhere() -> None:
    assert ways.leaving("no-such-one") == frozenset()


@pytest.mark.parametrize(
    "found",
    [
        [],
        [NetworkInfo(interface="wlan0", routed=True)],
        [NetworkInfo(interface="tun0", routed=True, vpn=True), NetworkInfo(interface="wlan0", routed=True)],
        [NetworkInfo(interface="lo", routed=True), NetworkInfo(interface="wlan0", routed=True)],
        [NetworkInfo(routed=False), NetworkInfo(interface="wwan0", routed=True)],
        [NetworkInfo(interface="no-such-1", routed=True), NetworkInfo(interface="no-such-2", routed=True)],
    ],
    ids=["none", "one", "vpn", "loopback", "no-route", "gone"],
)
def test_ways_are_none_where_there_is_no_second_that_may_be_used(found: list[NetworkInfo]) -> None:
    assert ways.usable(found) == ()


def test_tunnel_is_no_second_way(tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/net/wg0"
    folder.mkdir(parents=True)
    (folder / "type").write_text("65534\n")
    assert ways._is_tunnel("wg0", tmp_path)
    assert not ways._is_tunnel("wlan0", tmp_path)


def test_port_that_cannot_tell_gives_no_ways() -> None:
    assert NoNetworkPort().ways() == ()
    assert PushedNetwork().ways() == ()
