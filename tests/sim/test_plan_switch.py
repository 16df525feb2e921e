"""An operator flips a switch while clients ask: HTTP/2 is broken on a server, and is switched off.

Real clients, the real dispatch application, virtual time. Each seed is another fleet: round trips, moments, how often
each client asks. Nobody tells the clients; they hear of it with their next plan.
"""

import asyncio
import dataclasses

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.client.api import AsyncClient
from stormline.client.config import Config
from stormline.client.outside import Outside
from stormline.core import errors
from stormline.core.values import Secret
from stormline.dispatch.config import DispatchConfig
from stormline.dispatch.rules import RuleSet
from stormline.dispatch.service import DispatchService
from stormline.net.network import NoNetworkPort
from stormline.net.resolve import Resolver
from stormline.netmodel.params import LinkParams
from stormline.testing import simloop
from stormline.testing.simdevice import SimNames
from stormline.testing.simhttp import Connection
from stormline.testing.simloop import SimClock, SimRng
from stormline.testing.simnet import SimNet
from stormline.testing.simplatform import open_tcp_of
from stormline.testing.simserver import HttpServer, HttpTasks, SimTransport, asgi
from stormline.testing.simtls import SimTlsContext, SimTrust
from stormline.wire.bundle import Bundle
from stormline.wire.jws import SigningKey
from stormline.wire.plan import HostPlan, Policy

APP, NAME, CENTRE = "demo", "api.sim", "203.0.113.10"
ORIGIN = "198.51.100.1"
TTL_S = 40
"""Life of a plan; a client asks for the next when three quarters of it are over, at its next request."""
PHONES = 3
PHASE_S = 120.0
PATIENCE_S = 20.0


@dataclasses.dataclass
class Call:
    """One call and what became of it."""

    began: float
    took_s: float
    version: str
    attempts: int


class Origin:
    """One address that speaks HTTP/2 and HTTP/1.1.

    Attributes:
        ill: it takes requests over HTTP/2 and does not answer them.
    """

    def __init__(self, net):
        self.ill = False
        self.asked = []
        self._tasks = HttpTasks()
        self._host = net.host("origin", ORIGIN)
        self._host.listen(443, self._accept)

    def _accept(self, sock):
        context = SimTlsContext(("h2", "http/1.1"), names=(NAME,))
        SimTransport(sock, lambda: Connection(self._answer, self._tasks), context)

    async def _answer(self, asked, exchange):
        self.asked.append((asyncio.get_running_loop().time(), exchange.version))
        if self.ill and exchange.version == 2:
            await asyncio.Event().wait()
        exchange.head(200, [], 2)
        exchange.piece(b"ok")
        exchange.end()

    async def stop(self):
        self._host.unlisten(443)
        self._host.kill_connections()
        await self._tasks.stop()


class Centre:
    """The real dispatch application, and its operator."""

    def __init__(self, net, loop, rng):
        plan_key, token_key = (
            SigningKey(Ed25519PrivateKey.from_private_bytes(rng.token_bytes(32)), kid) for kid in ("plan-1", "token-1")
        )
        rules = RuleSet(version=1, hosts={NAME: HostPlan(dns=True, ttl_s=TTL_S)}, apps={APP: frozenset({NAME})})
        config = DispatchConfig(
            host="127.0.0.1",
            port=0,
            tls=None,
            unit="u1",
            rules=rules,
            plan_key=plan_key,
            token_key=token_key,
            admin_key=Secret("simulated-admin-key"),
        )
        self._service = DispatchService(config, clock=SimClock(loop), rng=rng.child("dispatch"))
        context = SimTlsContext(("http/1.1",), names=("dispatch.sim",))
        app = asgi(self._service.app(trusted=True))
        self._server = HttpServer(net.host("dispatch", CENTRE), 443, app, context=context)
        self._server.start()
        self.bundle = Bundle(
            app=APP,
            dispatch=(f"{CENTRE}:443",),
            dispatch_name="dispatch.sim",
            dispatch_keys={plan_key.kid: plan_key.public_text},
        )

    def switch_off(self, name):
        old = self._service.source.current()
        host = HostPlan(dns=True, ttl_s=TTL_S, policy=Policy(disabled=(name,)))
        self._service.source.put(msgspec.structs.replace(old, version=old.version + 1, hosts={NAME: host}))

    async def stop(self):
        await self._server.kill()


class Phone:
    def __init__(self, number, net, loop, rng, centre):
        self.rng = rng
        self.loop = loop
        self.delay_s = rng.uniform(0.01, 0.1)
        link = net.link(f"phone-{number}", LinkParams(delay_s=self.delay_s))
        host = net.host(f"phone-{number}", f"10.0.0.{number + 2}", link=link)
        outside = Outside(
            clock=SimClock(loop),
            rng=rng.child("client"),
            open_tcp=open_tcp_of(host),
            trust=SimTrust(),
            is_assigned=lambda ip: ip in host.addresses,
            resolver=lambda: Resolver(SimNames(host, net, lambda name: (ORIGIN,))),
            environ={},
            network=lambda how: NoNetworkPort(),
        )
        config = Config(bundle=centre.bundle, network="wifi", report=False, network_probes=False)
        self.client = AsyncClient(config=config, outside=outside)
        self.calls = []

    async def use(self, until):
        while self.loop.time() < until:
            await asyncio.sleep(self.rng.uniform(1.0, 9.0))
            began = self.loop.time()
            try:
                answer = await self.client.get(f"https://{NAME}/", extensions={"stormline.deadline_s": PATIENCE_S})
                version, attempts = answer.http_version, len(answer.extensions["stormline"].record.attempts)
            except errors.TransportError:
                version, attempts = "", 0
            self.calls.append(Call(began, self.loop.time() - began, version, attempts))


def play(seed):
    """Three phases: well; HTTP/2 ill; the same, and HTTP/2 switched off."""

    async def main():
        loop, rng = asyncio.get_running_loop(), SimRng(seed, "switch")
        net = SimNet(loop, rng.child("net"))
        origin, centre = Origin(net), Centre(net, loop, rng)
        phones = [Phone(number, net, loop, rng.child(f"phone-{number}"), centre) for number in range(PHONES)]
        users = [asyncio.create_task(phone.use(3 * PHASE_S)) for phone in phones]
        await asyncio.sleep(PHASE_S)
        origin.ill = True
        await asyncio.sleep(PHASE_S)
        centre.switch_off("h2")
        await asyncio.gather(*users)
        for phone in phones:
            await phone.client.aclose()
        await origin.stop()
        await centre.stop()
        return phones, origin

    return simloop.run(main, time_max_s=20_000.0).result


@pytest.mark.parametrize("number", range(4))
def test_switch_that_is_flipped_while_clients_ask_acts_within_a_plan_s_life(number, base_seed):
    phones, origin = play(base_seed + number)
    heard_s = TTL_S + 9.0  # the next request after three quarters of it asks beside, and the one after that obeys
    for phone in phones:

        def spoken(first, last, calls=phone.calls):
            found = [call for call in calls if first <= call.began < last]
            assert found
            return found

        assert all(call.version == "HTTP/2" for call in spoken(0.0, PHASE_S - PATIENCE_S))
        ill = spoken(PHASE_S, 2 * PHASE_S)
        off = spoken(2 * PHASE_S + heard_s, 3 * PHASE_S)
        assert all((call.version, call.attempts) == ("HTTP/1.1", 1) for call in off)
        # Name, TCP, TLS and question, at most: nothing is tried over HTTP/2 any more.
        assert all(call.took_s <= 4 * (2 * phone.delay_s + 0.01) for call in off)
        assert sum(call.took_s for call in ill) / len(ill) > sum(call.took_s for call in off) / len(off)
    spared = [version for at, version in origin.asked if 2 * PHASE_S + heard_s + PATIENCE_S <= at < 3 * PHASE_S]
    assert spared
    assert set(spared) == {1}
