"""A client that comes back to a network it knows begins there with what worked: the first answer takes one connection.

Each seed is another phone: its round trip, how far its servers are, what is wrong with the first choice, how long the
app was closed.
"""

import asyncio
import dataclasses

import pytest

from stormline.client.api import AsyncClient
from stormline.client.config import Config
from stormline.client.outside import Outside
from stormline.core import errors, limits
from stormline.core.values import Address
from stormline.net.network import NoNetworkPort
from stormline.net.resolve import Resolver
from stormline.netmodel.params import LinkParams
from stormline.testing import simloop
from stormline.testing.simdevice import SimNames
from stormline.testing.simhttp import Connection
from stormline.testing.simloop import SimClock, SimRng
from stormline.testing.simnet import SimNet
from stormline.testing.simplatform import open_tcp_of
from stormline.testing.simserver import HttpTasks, SimTransport
from stormline.testing.simtls import SimTlsContext, SimTrust

NAME = "api.sim"
PATIENCE_S = 10.0
GOOD, GOOD_TOO, GOOD_THREE = "198.51.100.7", "198.51.100.8", "198.51.100.9"
FIRST = {
    "first-dead": "198.51.100.1",
    "ipv6-dead": "2001:db8::1",
    "ipv6-tls-hangs": "2001:db8::1",
    "first-tls-hangs": "198.51.100.1",
    "h2-mute": GOOD,
    "h2-mute-beside-dead": "198.51.100.1",
}
"""The address that DNS gives first, and what is wrong with it."""


async def inline(work):
    work()


class Servers:
    """An origin: one address that is as the trouble says, two that are well."""

    def __init__(self, net, trouble):
        self.trouble = trouble
        self.tasks = HttpTasks()
        self.held = []
        more = (GOOD_THREE, "2001:db8::1") if trouble == "h2-mute-beside-dead" else ()
        self.addresses = tuple(dict.fromkeys((FIRST[trouble], GOOD, GOOD_TOO, *more)))
        self.hosts = {ip: net.host(ip, ip) for ip in self.addresses}
        for ip, host in self.hosts.items():
            first = ip == FIRST[trouble]
            host.dark = (first and trouble.endswith("dead")) or ip in more[1:]
            hangs = first and trouble.endswith("hangs")
            host.listen(443, self.held.append if hangs else self.accept)

    def accept(self, sock):
        context = SimTlsContext(("h2", "http/1.1"), names=(NAME,))
        SimTransport(sock, lambda: Connection(self.answer, self.tasks), context)

    async def answer(self, asked, exchange):
        if self.trouble.startswith("h2-mute") and exchange.version == 2:
            await asyncio.Event().wait()
        exchange.head(200, [], 2)
        exchange.piece(b"ok")
        exchange.end()

    async def stop(self):
        for host in self.hosts.values():
            host.unlisten(443)
            host.kill_connections()
        for sock in self.held:
            sock.close()
        await self.tasks.stop()


@dataclasses.dataclass
class First:
    """The first request of a start.

    Attributes:
        ok: it was answered.
        took_s: that long.
        begun: addresses that connections to were begun for it.
    """

    ok: bool
    took_s: float
    begun: list


class Phone:
    def __init__(self, trouble, seed):
        self.loop = asyncio.get_running_loop()
        self.rng = SimRng(seed, trouble)
        self.delay_s = self.rng.uniform(0.01, 0.12)
        self.net = SimNet(self.loop, self.rng.child("net"))
        link = self.net.link("phone", LinkParams(delay_s=self.delay_s))
        self.host = self.net.host("phone", "10.0.0.2", link=link)
        self.servers = Servers(self.net, trouble)
        self.begun = []

    async def open_tcp(self, address):
        self.begun.append(address.host)
        return await open_tcp_of(self.host)(Address(*address))

    def client(self, store):
        outside = Outside(
            clock=SimClock(self.loop),
            rng=self.rng.child(f"client-{self.loop.time()}"),
            open_tcp=self.open_tcp,
            trust=SimTrust(),
            is_assigned=lambda ip: ip in self.host.addresses,
            resolver=lambda: Resolver(SimNames(self.host, self.net, lambda host: self.servers.addresses)),
            environ={},
            aside=inline,
            logs=False,
            network=lambda how: NoNetworkPort(),
        )
        return AsyncClient(config=Config(store=store, network="wifi", report=False), outside=outside)

    async def start(self, store, calls):
        """Run the app once; give what became of its first request."""
        async with self.client(store) as client:
            first = await self.ask(client)
            for _ in range(calls - 1):
                await self.ask(client)
                await asyncio.sleep(2.0)
        return first

    async def ask(self, client):
        self.begun.clear()
        began = self.loop.time()
        try:
            ok = (await client.get(f"https://{NAME}/", extensions={"stormline.deadline_s": PATIENCE_S})).text == "ok"
        except errors.TransportError:
            ok = False
        return First(ok, self.loop.time() - began, list(self.begun))

    async def away(self):
        """Close the app for minutes to days."""
        await asyncio.sleep(self.rng.choice((120.0, 3600.0, 20 * 3600.0)))


def two_starts(trouble, seed, stores, calls=6, between=lambda phone: None):
    """Start twice, with a store for each; give the phone and what became of the first request of each start."""

    async def main():
        phone = Phone(trouble, seed)
        first = await phone.start(stores[0], calls)
        await phone.away()
        between(phone)
        second = await phone.start(stores[1], 1)
        await phone.servers.stop()
        return phone, first, second

    return simloop.run(main, time_max_s=200_000.0).result


def straight_s(phone):
    """Give what name, TCP, TLS and question take: four round trips, and a little."""
    return 4 * (2 * phone.delay_s + 0.01)


@pytest.mark.parametrize("trouble", FIRST)
@pytest.mark.parametrize("number", range(10))
def test_second_start_goes_straight_to_what_worked(trouble, number, base_seed, tmp_path):
    phone, first, second = two_starts(trouble, base_seed + number, (tmp_path, tmp_path))
    assert second.ok
    assert len(second.begun) == 1
    assert second.begun[0] in (GOOD, GOOD_TOO, GOOD_THREE)
    assert second.took_s <= straight_s(phone) < first.took_s


@pytest.mark.parametrize("number", range(5))
def test_http2_that_is_mute_at_every_address_costs_the_first_start_some_seconds(number, base_seed):
    _, first, _ = two_starts("h2-mute-beside-dead", base_seed + number, (None, None), calls=1)
    assert first.ok
    assert first.took_s <= 0.8 * PATIENCE_S  # the five connections that could be tried over HTTP/2 would take longer


@pytest.mark.parametrize("trouble", ["h2-mute", "h2-mute-beside-dead"])
@pytest.mark.parametrize("number", range(5))
def test_one_request_is_enough_to_learn_that_http2_is_mute(trouble, number, base_seed, tmp_path):
    phone, _, second = two_starts(trouble, base_seed + number, (tmp_path, tmp_path), calls=1)
    assert second.ok
    assert len(second.begun) == 1
    assert second.took_s <= straight_s(phone)


@pytest.mark.parametrize("trouble", FIRST)
@pytest.mark.parametrize("number", range(3))
def test_second_start_without_a_store_pays_as_the_first_did(trouble, number, base_seed):
    phone, first, second = two_starts(trouble, base_seed + number, (None, None))
    assert second.begun[: len(first.begun)] == first.begun[: len(second.begun)]
    assert second.took_s > straight_s(phone)


@pytest.mark.parametrize("trouble", ["first-dead", "ipv6-dead"])
@pytest.mark.parametrize("number", range(5))
def test_memory_that_is_wrong_by_now_costs_a_head_start_and_no_answer(trouble, number, base_seed, tmp_path):
    def swap(phone):
        for ip, host in phone.servers.hosts.items():
            host.dark = ip != FIRST[trouble]

    phone, _, second = two_starts(trouble, base_seed + number, (tmp_path, tmp_path), between=swap)
    assert second.ok
    # Both that worked are dead now: the one that was dead is the third to be tried, a stagger after each.
    assert second.took_s <= straight_s(phone) + 2 * limits.CONNECT_STAGGER_S_MAX


@pytest.mark.parametrize("number", range(5))
def test_memory_costs_nothing_where_all_is_well(number, base_seed, tmp_path):
    def heal(phone):
        phone.servers.hosts[FIRST["ipv6-dead"]].dark = False

    def ask(stores):
        phone, _, second = two_starts("ipv6-dead", base_seed + number, stores, between=heal)
        assert second.ok
        assert len(second.begun) == 1
        assert second.took_s <= straight_s(phone)

    ask((tmp_path, tmp_path))
    ask((None, None))


def test_address_that_healed_is_used_again(base_seed, tmp_path):
    async def main():
        phone = Phone("ipv6-dead", base_seed)
        await phone.start(tmp_path, 3)
        phone.servers.hosts[FIRST["ipv6-dead"]].dark = False
        used = set()
        async with phone.client(tmp_path) as client:
            for _ in range(8):
                used.update((await phone.ask(client)).begun)
                await asyncio.sleep(limits.FAMILY_REPROBE_S / 4)
        await phone.servers.stop()
        return used

    assert FIRST["ipv6-dead"] in simloop.run(main, time_max_s=200_000.0).result
