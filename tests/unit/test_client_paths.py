"""The ways out of one client: which there are, which one calls begin on, and what a metered one may carry.

What calls meet over them is tested with real links: tests/lab/test_lab_second_path.py.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from stormline.client.doh_ways import WaysDoh
from stormline.client.path import Path
from stormline.client.paths import Paths, stays
from stormline.client.steering import Steering
from stormline.core import limits
from stormline.core.values import Address
from stormline.net.clock import SystemClock
from stormline.net.meter import Meter
from stormline.net.resolve import Found
from stormline.net.stream import TcpStream
from stormline.outbound.dial import Dialer
from stormline.outbound.doh import NoNames
from stormline.outbound.pool import HttpPool
from stormline.policy.level import Level
from stormline.policy.network import NetworkInfo
from stormline.policy.shape import Network

WIFI = NetworkInfo(kind="wifi", interface="wlan0", routed=True, id="1" * 16)
CELL = NetworkInfo(kind="cell", interface="wwan0", routed=True, id="2" * 16)
CABLE = NetworkInfo(kind="wired", interface="eth0", routed=True, id="3" * 16)


async def refuse(*_: Any) -> TcpStream:
    raise ConnectionRefusedError


def make_path(info: NetworkInfo) -> Path:
    async def open_tcp(address: Address) -> TcpStream:
        return await refuse(address)

    dialer = Dialer(NoNames(), None, open_tcp=open_tcp)  # type: ignore[arg-type]
    pool = HttpPool(dialer, SystemClock())
    return Path(info.interface, pool, Steering(Network(info.id, info.kind)), Meter())


def make(ways: Sequence[NetworkInfo], **more: Any) -> Paths:
    first = make_path(WIFI)
    first.name = ""
    return Paths(
        first, ways=lambda: ways, make=make_path, open_tcp=refuse, open_over=refuse, **{"enabled": True, **more}
    )


def die(paths: Paths, other: str) -> None:
    """Have the first way be dark for long, and another one answer."""
    paths._refresh()
    now = asyncio.get_running_loop().time()
    assert paths._policy.beside(paths.first.name, dark_s=5.0, now=now) == other
    assert paths._policy.answered(paths._path(other).name, now) == paths.first.name
    paths._settle()


async def test_other_way_is_made_when_it_is_needed_and_calls_begin_there() -> None:
    paths = make((WIFI, CELL))
    assert (paths.watching, paths.others, paths.away) == (True, [], False)
    die(paths, "wwan0")
    assert paths.away
    assert paths.begin("shop.test") is paths.usual is paths.others[0]
    assert paths.usual.steering.network == (CELL.id, "cell")
    assert paths.begin("192.168.1.1") is paths.first
    await paths.aclose()


@pytest.mark.parametrize("ways", [(), (WIFI,)])
async def test_nothing_is_watched_where_there_is_one_way(ways: tuple[NetworkInfo, ...]) -> None:
    paths = make(ways)
    paths._refresh()
    assert not paths.watching
    paths.changed(network=False)
    assert paths.watching  # until somebody looks again
    await paths.aclose()


async def test_metered_way_is_left_out_where_it_may_carry_nothing_and_a_cable_is_not() -> None:
    paths = make((WIFI, CELL), metered_bytes=0)
    paths._refresh()
    assert not paths.watching
    paths = make((WIFI, CELL, CABLE), metered_bytes=0)
    die(paths, "eth0")
    assert paths.usual.name == "eth0"
    await paths.aclose()


async def test_metered_way_whose_bytes_are_used_up_is_left() -> None:
    paths = make((WIFI, CELL), metered_bytes=100_000)
    die(paths, "wwan0")
    meter = paths.others[0].meter
    meter.bytes_up, meter.bytes_down, meter.connections = 1000, 50_000, 2
    assert paths.begin("shop.test").name == "wwan0"
    meter.bytes_down = 99_000
    assert paths.begin("shop.test") is paths.first
    assert paths.others[0].booked == 1000 + 99_000 + 2 * limits.PATH_CONNECTION_BYTES
    await paths.aclose()


async def test_cellular_way_that_costs_nobody_anything_has_no_bound() -> None:
    paths = make((WIFI, dataclasses.replace(CELL, metered=False)), metered_bytes=0)
    die(paths, "wwan0")
    paths.others[0].meter.bytes_down = 50_000_000
    assert paths.begin("shop.test").name == "wwan0"
    await paths.aclose()


async def test_quality_is_that_of_the_way_calls_begin_on() -> None:
    paths = make((WIFI, CELL))
    now = asyncio.get_running_loop().time()
    paths.first.steering.sensing.dialled("shop.test", 0.02, 0.02)
    assert paths.quality().level is Level.EXCELLENT
    die(paths, "wwan0")
    paths.usual.steering.sensing.dialled("shop.test", 0.5, 0.5)
    moved = paths.quality()
    assert (moved.level, moved.evidence) == (Level.FAIR, "over wwan0: round trip 500 ms (1 samples)")
    assert moved.since_s <= asyncio.get_running_loop().time() - now
    paths.changed(network=True)
    assert paths.quality().evidence == "round trip 20 ms (1 samples)"
    await paths.aclose()


async def test_way_that_is_back_is_judged_by_what_answered_and_not_by_how_long_it_was_dark() -> None:
    steering = make_path(WIFI).steering
    steering.sensing.dialled("shop.test", 0.02, 0.02)
    steering.sensing.dialling("shop.test")
    for took_s in (0.02, 1.02):  # the second may have been a repeated SYN's
        steering.sensing.heard_at -= 40.0
        steering.back(took_s)
        assert steering.sensing.silent_s(asyncio.get_running_loop().time()) == 0.0
        assert steering.quality().level is Level.EXCELLENT
        assert steering.heard_at >= steering.sensing.heard_at


class Names:
    """DNS over HTTPS that answers when it is told to."""

    def __init__(self, address: str = "", *, silent: bool = False) -> None:
        self._found = Found((address,), 60.0, "DoH test")
        self._silent = silent
        self.asked = self.given_up = 0
        self.closed = False

    async def ask(self, host: str, *, avoid: Collection[str] = (), on_note: Callable[[str], None] = print) -> Found:
        self.asked += 1
        try:
            if self._silent:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return self._found

    def shun(self, source: str) -> None:
        pass

    def doubt(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


async def test_name_that_is_asked_for_in_the_dark_goes_over_to_the_way_that_calls_move_to() -> None:
    paths, first, other, notes = make((WIFI, CELL)), Names(silent=True), Names("192.0.2.1"), []
    paths._refresh()
    asking = asyncio.ensure_future(WaysDoh(first, lambda: paths).ask("shop.test", on_note=notes.append))
    await asyncio.sleep(0)
    paths._path("wwan0").doh = other  # type: ignore[assignment]
    die(paths, "wwan0")
    assert (await asking).addresses == ("192.0.2.1",)
    assert (first.asked, first.given_up, other.asked, notes) == (1, 1, 1, ["asked for over wwan0 instead"])
    await paths.aclose()
    assert other.closed


async def test_name_is_asked_for_over_the_first_way_where_there_is_one_and_a_cancelled_question_is_given_up() -> None:
    paths, first = make((WIFI,)), Names("192.0.2.2")
    paths._refresh()
    assert (await WaysDoh(first, lambda: paths).ask("shop.test")).addresses == ("192.0.2.2",)
    assert (await WaysDoh(first, lambda: None).ask("shop.test")).addresses == ("192.0.2.2",)
    both, silent = make((WIFI, CELL)), Names(silent=True)
    both._refresh()
    asking = asyncio.ensure_future(WaysDoh(silent, lambda: both).ask("shop.test"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (silent.asked, silent.given_up) == (1, 1)
    for each in (paths, both):
        await each.aclose()


async def test_first_way_that_leads_to_another_network_is_not_dead_any_more() -> None:
    paths = make((WIFI, CELL))
    die(paths, "wwan0")
    paths.changed(network=True)
    assert not paths.away
    await paths.aclose()


async def test_switched_off_nothing_is_looked_at() -> None:
    paths = make((WIFI, CELL), enabled=False)
    paths.changed(network=True)
    assert not paths.watching
    await paths.aclose()


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("shop.test", False), ("203.0.113.9", False), ("2001:db8::1", False), ("172.32.0.1", False),
        ("localhost", True), ("printer", True), ("nas.local", True), ("Router.LAN.", True), ("127.0.0.1", True),
        ("192.168.1.1", True), ("10.0.0.1", True), ("172.16.0.1", True), ("fe80::1%wlan0", True), ("fd00::1", True),
        ("::1", True),
    ],
)  # fmt: skip
def test_stays_says_which_hosts_another_way_does_not_lead_to(host: str, local: bool) -> None:
    assert stays(host) is local
