"""A world without gateways: clients that ask origins themselves, at several addresses each, and every kind of trouble.

report = simworld.run("direct-servers", 7)        # a scenario with `[direct]` comes here
"""

import asyncio
import contextlib
import socket
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.core import errors
from stormline.core.values import Address, Secret
from stormline.dispatch.config import DispatchConfig
from stormline.dispatch.rules import RuleSet
from stormline.dispatch.service import DispatchService
from stormline.netmodel.params import LinkParams
from stormline.testing import scenario as scenarios
from stormline.testing.buggify import Buggify
from stormline.testing.history import History
from stormline.testing.ranked import ranked
from stormline.testing.scenario import Direct, Fault, Scenario
from stormline.testing.simclient import DirectDevice
from stormline.testing.simfaults import LinkFaults
from stormline.testing.simloop import SimClock, SimRng, VirtualLoop
from stormline.testing.simnet import NoFaults, SimNet, Switch
from stormline.testing.simorigin import Origin, OriginHost, Trouble
from stormline.testing.simplatform import APP, Ledger
from stormline.testing.simserver import HttpServer, asgi
from stormline.testing.simtls import SimTlsContext
from stormline.wire.bundle import Bundle
from stormline.wire.jws import SigningKey
from stormline.wire.plan import Carrier, Endpoint, HostPlan

_DRAIN_S: Final = 600.0
"""How long after the storm calls in flight may still run: the pauses of an event stream, the hold of a long poll."""
_LOOK_S: Final = 1.0
"""How often sizes that have bounds are looked at."""
_REST_S: Final = 60.0
"""After which a client that has nothing to do must hold nothing."""
_HEALTHY: Final = LinkParams(delay_s=0.01)
_DISPATCH: Final = Address("203.0.113.10", 443)
_UNIT: Final = "u1"


class Names:
    """The DNS of a world.

    Attributes:
        slow_s: how much longer than usual an answer takes now.
        failing: it answers nothing.
    """

    def __init__(self, origins: list[Origin], rng: SimRng) -> None:
        self._origins = {origin.name: origin for origin in origins}
        self._rng = rng
        self.slow_s = 0.0
        self.failing = False
        self.hidden: set[Address] = set()

    def answer(self, host: str) -> tuple[str, ...]:
        """Give the addresses of a name, in any order."""
        if self.failing:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        origin = self._origins.get(host)
        if origin is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        shown = [at.address.host for at in origin.hosts if at.address not in self.hidden]
        start = self._rng.integer(0, len(shown) - 1)
        return tuple(shown[start:] + shown[:start])

    def pause_s(self) -> float:
        """Give how much longer an answer takes now."""
        return self.slow_s


class Dispatch:
    """The real dispatch application, which tells clients the addresses of origins, and serves no gateway."""

    def __init__(self, net: SimNet, origins: list[Origin], loop: VirtualLoop, rng: SimRng) -> None:
        plan_key = SigningKey(Ed25519PrivateKey.from_private_bytes(rng.token_bytes(32)), "plan-1")
        token_key = SigningKey(Ed25519PrivateKey.from_private_bytes(rng.token_bytes(32)), "token-1")
        plans = {
            origin.name: HostPlan(
                endpoints=ranked(
                    Endpoint(host=at.address.host, port=at.address.port, carrier=Carrier.H1, server_name=origin.name)
                    for at in origin.hosts
                )
            )
            for origin in origins
        }
        config = DispatchConfig(
            host="127.0.0.1",
            port=0,
            tls=None,
            unit=_UNIT,
            rules=RuleSet(version=1, hosts=plans, apps={APP: frozenset(plans)}),
            plan_key=plan_key,
            token_key=token_key,
            admin_key=Secret("simulated-admin-key"),
        )
        service = DispatchService(config, clock=SimClock(loop), rng=rng.child("dispatch"))
        self._server = HttpServer(
            net.host("dispatch", _DISPATCH.host),
            _DISPATCH.port,
            asgi(service.app(trusted=True)),
            context=SimTlsContext(("http/1.1",), names=("dispatch.sim",)),
        )
        self._server.start()
        self.bundle = Bundle(
            app=APP,
            dispatch=(str(_DISPATCH),),
            dispatch_name="dispatch.sim",
            dispatch_keys={plan_key.kid: plan_key.public_text},
        )

    async def stop(self) -> None:
        """End it."""
        await self._server.kill()


class DirectFaults(LinkFaults):
    """The troubles of one run: links, clocks, origins, names.

    Args: as `LinkFaults`, and
        origins: whom else it hits.
        names: DNS.
        spare: the last address of each origin is left alone.
    """

    def __init__(
        self, faults: tuple[Fault, ...], *, origins: list[Origin], names: Names, spare: bool, **world: Any
    ) -> None:
        super().__init__(faults, **world)
        self._origins = origins
        self._names = names
        self._spare = spare

    def _some(self, fault: Fault, rng: SimRng) -> list[tuple[Origin, OriginHost]]:
        """Give whom a fault of addresses hits: all of one origin, or one or two of them."""
        origin = rng.choice(self._origins)
        if rng.chance(fault.all_pct / 100):
            return [(origin, at) for at in origin.hosts]
        exposed = origin.hosts[:-1] if self._spare else origin.hosts
        first = rng.choice(exposed)
        others = [at for at in exposed if at is not first and rng.chance(0.2)]
        return [(origin, at) for at in (first, *others[:1])]

    async def _address(self, fault: Fault, rng: SimRng) -> None:
        lasts_s = scenarios.draw(fault.lasts_s, rng)
        trouble = Trouble(
            fault.kind,
            pct=scenarios.draw(fault.pct, rng),
            seconds=scenarios.draw(fault.seconds, rng),
            places=int(scenarios.draw(fault.places, rng)) if fault.kind == "narrow" else 0,
            retry_after_s=None if fault.retry_after_s is None else scenarios.draw(fault.retry_after_s, rng),
            deep=rng.chance(0.5),
        )

        async def one(at: OriginHost) -> None:
            async with self._alone(f"{fault.kind} {at.address}"):
                at.troubles[fault.kind] = trouble
                await self._pause(lasts_s)
                del at.troubles[fault.kind]

        await asyncio.gather(*(one(at) for _, at in self._some(fault, rng)))

    async def _unreachable(self, fault: Fault, rng: SimRng) -> None:
        lasts_s = scenarios.draw(fault.lasts_s, rng)

        async def one(origin: Origin, at: OriginHost) -> None:
            async with self._alone(f"{at.address}"):
                if fault.kind == "dead":
                    at.host.dark = True
                else:
                    origin.deafen(at)
                await self._pause(lasts_s)
                at.host.dark = False
                origin.listen(at)

        await asyncio.gather(*(one(origin, at) for origin, at in self._some(fault, rng)))

    async def _kill(self, fault: Fault, rng: SimRng) -> None:
        for _, at in self._some(fault, rng):
            at.host.kill_connections()

    async def _dns(self, fault: Fault, rng: SimRng) -> None:
        async with self._alone("dns"):
            self._names.failing = fault.kind == "dns-fails"
            self._names.slow_s = scenarios.draw(fault.seconds, rng) if fault.kind == "dns-slow" else 0.0
            await self._pause(scenarios.draw(fault.lasts_s, rng))
            self._names.failing, self._names.slow_s = False, 0.0

    async def _dns_moves(self, fault: Fault, rng: SimRng) -> None:
        """Some addresses leave DNS and are gone."""
        origin = rng.choice(self._origins)
        leaving = [at for at in origin.hosts[:-1] if rng.chance(0.6)]
        async with self._alone(f"moves {origin.name}"), contextlib.AsyncExitStack() as stack:
            for at in leaving:
                await stack.enter_async_context(self._alone(f"{at.address}"))
                self._names.hidden.add(at.address)
                at.host.dark = True
            await self._pause(scenarios.draw(fault.lasts_s, rng))
            for at in leaving:
                self._names.hidden.discard(at.address)
                at.host.dark = False

    async def _told_change(self, fault: Fault, rng: SimRng) -> None:
        """The system speaks of a change of the network where there is none."""
        for device in self._hit(fault, rng):
            if isinstance(device, DirectDevice):
                device.client.network_changed()


DirectFaults.kinds = {
    **LinkFaults.kinds,
    **dict.fromkeys(scenarios.ADDRESS_FAULTS, DirectFaults._address),
    "dead": DirectFaults._unreachable,
    "refused": DirectFaults._unreachable,
    "kill": DirectFaults._kill,
    "dns-fails": DirectFaults._dns,
    "dns-slow": DirectFaults._dns,
    "dns-moves": DirectFaults._dns_moves,
    "told-change": DirectFaults._told_change,
}


class DirectWorld:
    """One run.

    Args:
        scenario: what happens; with `direct`.
        direct: that part of it.
        seed: all chance comes from it.
        history: takes down what happens.
    """

    def __init__(self, scenario: Scenario, direct: Direct, seed: int, history: History) -> None:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualLoop):
            raise errors.LocalProtocolError("a simulated world needs a VirtualLoop")
        self._loop = loop
        self._scenario = scenario
        self._direct = direct
        self._history = history
        self._rng = SimRng(seed, "direct")
        self._stormy = Buggify(self._rng.child("buggify"))
        self._sites = Switch(self._stormy if direct.small_faults else NoFaults())
        self.net = SimNet(loop, self._rng.child("net"), sites=self._sites)
        ledger = Ledger(history)
        self.origins = [self._origin(number, ledger) for number in range(direct.origins)]
        self._names = Names(self.origins, self._rng.child("dns"))
        self._dispatch = (
            Dispatch(self.net, self.origins, loop, self._rng.child("platform")) if direct.platform else None
        )
        self.devices = [self._device(number) for number in range(1, scenario.workload.devices + 1)]
        self._calls: list[asyncio.Task[object]] = []
        self._over = False

    def _origin(self, number: int, ledger: Ledger) -> Origin:
        rng = self._rng.child(f"origin-{number}")
        origin = Origin(f"o{number}.sim", ledger, rng, cost_s=scenarios.draw(self._direct.cost_s, rng))
        for each in range(self._direct.addresses):
            ip = f"2001:db8:{number + 1}::{each + 1}" if each % 2 == 0 else f"198.51.{100 + number}.{each + 1}"
            http2 = rng.chance(self._direct.http2_pct / 100)
            origin.add(self.net.host(f"o{number}-{each}", ip), ip, http2=http2)
        return origin

    def _device(self, number: int) -> DirectDevice:
        return DirectDevice(
            number,
            loop=self._loop,
            net=self.net,
            scenario=self._scenario,
            names=tuple(origin.name for origin in self.origins),
            answer=self._names.answer,
            pause=self._names.pause_s,
            history=self._history,
            rng=self._rng.child(f"device-{number}"),
            bundle=self._dispatch.bundle if self._dispatch is not None else None,
            addresses=self._configured(),
        )

    def _configured(self) -> dict[str, tuple[str, ...]]:
        """Give what clients have in their settings."""
        if not self._direct.configured:
            return {}
        return {origin.name: tuple(at.address.host for at in origin.hosts) for origin in self.origins}

    async def run(self) -> None:
        """Play the scenario to its end."""
        faults = DirectFaults(
            self._scenario.faults,
            loop=self._loop,
            devices=self.devices,
            rng=self._rng.child("faults"),
            origins=self.origins,
            names=self._names,
            spare=self._direct.spare,
        )
        faults.start()
        looking = asyncio.create_task(self._look(), name="world looks")
        duration_s = scenarios.draw(self._scenario.duration_s, self._rng)
        workers = [asyncio.create_task(self._use(device), name=f"{device.name} calls") for device in self.devices]
        await asyncio.sleep(duration_s)
        self._over = True
        await faults.stop()
        self._heal()
        await asyncio.gather(*workers)
        await asyncio.sleep(scenarios.draw(self._scenario.recovery_s, self._rng))
        await self._last_calls()
        if self._calls:
            await asyncio.wait(self._calls, timeout=_DRAIN_S)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await self._close()

    async def _close(self) -> None:
        hanging = [task for task in self._calls if not task.done()]
        for task in self._calls:
            if task.done():
                task.result()
            else:
                task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        if not hanging:
            await asyncio.sleep(_REST_S)
            for device in self.devices:
                device.rest()
        for device in self.devices:
            await device.stop()
        for origin in self.origins:
            await origin.stop()
        if self._dispatch is not None:
            await self._dispatch.stop()
        history = self._history
        history.end_s = self._loop.time()
        history.packets = self.net.packets
        history.fired = dict(self._stormy.fired)
        for at in [at for origin in self.origins for at in origin.hosts]:
            for kind, number in at.hits.items():
                history.fired[kind] = history.fired.get(kind, 0) + number

    def _heal(self) -> None:
        """End the storm: links are good, nothing fails on purpose any more."""
        self._sites.off()
        for device in self.devices:
            if device.host.link is not None:
                device.host.link.heal(_HEALTHY)

    async def _use(self, device: DirectDevice) -> None:
        rng = self._rng.child(f"use-{device.name}")
        work = self._scenario.workload
        kinds = [kind for kind, share in work.mix.items() if share > 0]
        total = sum(work.mix[kind] for kind in kinds)
        while True:
            await asyncio.sleep(rng.gap_s(work.calls_per_s))
            if self._over:
                return
            at, kind = rng.uniform(0, total), kinds[-1]
            for kind in kinds:
                at -= work.mix[kind]
                if at <= 0:
                    break
            self._start(device, kind)

    def _start(self, device: DirectDevice, kind: str, *, fresh: bool = False) -> asyncio.Task[object]:
        task: asyncio.Task[object] = asyncio.create_task(device.call(kind, fresh=fresh), name=f"{device.name} {kind}")
        self._calls.append(task)
        return task

    async def _last_calls(self) -> None:
        """After the storm: what is asked now must be answered. Reads go first, as in `simworld`."""
        for kinds in (("get", "plain"), ("post", "upload", "post-key", "coded", "large", "once")):
            started = [self._start(device, kind, fresh=True) for device in self.devices for kind in kinds]
            await asyncio.wait(started, timeout=_DRAIN_S)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for device in self.devices:
                device.look()
