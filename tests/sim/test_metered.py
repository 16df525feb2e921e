"""Addresses that go dark by turns, answers that are late: where bytes cost money rescues cost a share, and no answer.

Each seed is another phone and other troubles. The same happens to a client on WiFi, to one on a metered network, and to
one that makes nothing beside a silent attempt.
"""

import asyncio
import contextlib
from typing import NamedTuple

import pytest

from stormline.client.api import AsyncClient
from stormline.client.config import Config
from stormline.client.costs import Costs
from stormline.client.outside import Outside
from stormline.core import errors, limits_means
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
ADDRESSES = ("198.51.100.1", "198.51.100.2", "198.51.100.3")
CALLS = 300
BODY = b"x" * 3000
KEY = {"stormline.plan": "key"}
SHARE, FLOAT = limits_means.METERED_SHARE, limits_means.METERED_FLOAT_BYTES


class Outcome(NamedTuple):
    answered: int
    costs: Costs


class Servers:
    """An origin: one address after the other is dark for some seconds, and some answers are late."""

    def __init__(self, net, rng):
        self.rng = rng
        self.tasks = HttpTasks()
        self.hosts = [net.host(ip, ip) for ip in ADDRESSES]
        for host in self.hosts:
            host.listen(443, self.accept)
        self.trouble = asyncio.create_task(self.go_dark(), name="troubles")

    async def go_dark(self):
        while True:
            await asyncio.sleep(self.rng.uniform(1.0, 5.0))
            host = self.rng.choice(self.hosts)
            host.dark = True
            await asyncio.sleep(self.rng.uniform(1.0, 6.0))
            host.dark = False

    def accept(self, sock):
        context = SimTlsContext(("h2", "http/1.1"), names=(NAME,))
        SimTransport(sock, lambda: Connection(self.answer, self.tasks), context)

    async def answer(self, asked, exchange):
        if self.rng.chance(0.05):
            await asyncio.sleep(2.0)
        exchange.head(200, [], len(BODY))
        exchange.piece(BODY)
        exchange.end()

    async def stop(self):
        self.trouble.cancel()
        await asyncio.gather(self.trouble, return_exceptions=True)
        for host in self.hosts:
            host.unlisten(443)
            host.kill_connections()
        await self.tasks.stop()


def use(seed, network, *, activity="foreground", disabled=frozenset()):
    """Let an app ask for a while; give what it got and what that cost."""

    async def main():
        loop, rng = asyncio.get_running_loop(), SimRng(seed, "metered")
        net = SimNet(loop, rng.child("net"))
        link = net.link("phone", LinkParams(delay_s=rng.uniform(0.01, 0.06)))
        host = net.host("phone", "10.0.0.2", link=link)
        servers = Servers(net, rng.child("servers"))

        async def open_tcp(address):
            return await open_tcp_of(host)(Address(*address))

        outside = Outside(
            clock=SimClock(loop),
            rng=rng.child("client"),
            open_tcp=open_tcp,
            trust=SimTrust(),
            is_assigned=lambda ip: ip in host.addresses,
            resolver=lambda: Resolver(SimNames(host, net, lambda name: ADDRESSES)),
            environ={},
            network=lambda how: NoNetworkPort(),
        )
        answered = 0
        config = Config(network=network, disabled=disabled, report=False)
        async with AsyncClient(config=config, outside=outside) as client:
            client.set_activity(activity)
            for _ in range(CALLS):
                with contextlib.suppress(errors.TransportError):
                    answered += (await client.get(f"https://{NAME}/items", extensions=KEY)).content == BODY
                await asyncio.sleep(0.5)
            costs = client.costs
        await servers.stop()
        return Outcome(answered, costs)

    return simloop.run(main, time_max_s=20_000.0).result


@pytest.mark.parametrize("number", range(6))
def test_rescues_on_a_metered_network_cost_their_share_and_no_answer(number, base_seed):
    free, metered, none = (
        use(base_seed + number, "wifi"),
        use(base_seed + number, "cell"),
        use(base_seed + number, "cell", activity="background", disabled=frozenset({"hedge"})),
    )
    assert free.answered == metered.answered == none.answered == CALLS
    assert free.costs.extra_bytes == 0
    assert metered.costs.hedges > 0
    total = metered.costs.bytes_up + metered.costs.bytes_down
    assert metered.costs.extra_bytes <= FLOAT + SHARE * total
    assert metered.costs.extras_refused > 0
    assert total <= (1.0 + SHARE) * (none.costs.bytes_up + none.costs.bytes_down) + FLOAT
