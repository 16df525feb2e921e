"""The troubles of a scenario, as tasks on virtual time: each waits for its moment, happens, and ends."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, ClassVar, Final, Protocol

from stormline.netmodel.params import BlackoutMode
from stormline.testing.history import History
from stormline.testing.scenario import Fault, draw, draw_link
from stormline.testing.simloop import SimClock, SimRng, VirtualLoop
from stormline.testing.simnet import Host
from stormline.testing.simplatform import Gateway, Platform

_READS_EVERY_S: Final = 1.0
"""How often a program that reads slowly takes something."""


class Twin(Protocol):
    """Begins another copy of a device."""

    async def __call__(self, name: str, *, elsewhere: bool, dark_s: float) -> str:
        """Begin it and give its name, empty where there is no session to take over.

        Args:
            name: the device whose copy it is.
            elsewhere: it comes to another gateway than the newest copy before it.
            dark_s: for how long the link of that copy is dark from now on.
        """
        ...


class Machine(Protocol):
    """A device as its troubles see it.

    Attributes:
        name: its name in the run.
        host: its machine.
        clock: its clocks.
    """

    name: str
    host: Host
    clock: SimClock

    def leave_network(self, *, kill: bool) -> None:
        """Lose the network; `kill`: the system breaks the old connections."""
        ...

    def join_network(self) -> None:
        """Be on a network again, with another address."""
        ...

    def went_dark(self, lasts_s: float) -> None:
        """Its link is dark both ways from now on, for so long."""
        ...


class LinkFaults:
    """The troubles of devices and their links; those of servers are added by what inherits from it.

    Args:
        faults: what there is.
        loop: virtual time.
        devices: whom it hits.
        rng: when, how long, whom.
    """

    kinds: ClassVar[dict[str, Callable[[Any, Fault, SimRng], Awaitable[None]]]]

    def __init__(
        self, faults: tuple[Fault, ...], *, loop: VirtualLoop, devices: Sequence[Machine], rng: SimRng
    ) -> None:
        self._faults = faults
        self._loop = loop
        self._devices = list(devices)
        self._rng = rng
        self._tasks: list[asyncio.Task[None]] = []
        self._locks: dict[str, asyncio.Lock] = {}
        self._ended = asyncio.Event()

    def start(self) -> None:
        """Let trouble begin."""
        for number, fault in enumerate(self._faults):
            rng = self._rng.child(f"fault-{number}")
            self._tasks.append(asyncio.create_task(self._run(fault, rng), name=f"fault {fault.kind}"))

    async def stop(self) -> None:
        """Begin nothing new; what has begun ends now, in good order."""
        self._ended.set()
        await asyncio.gather(*self._tasks)

    async def _pause(self, seconds: float) -> None:
        """Let time pass, but not beyond the end of all trouble."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._ended.wait()

    async def _run(self, fault: Fault, rng: SimRng) -> None:
        begin = self.kinds[fault.kind]
        if fault.at_s is not None:
            await self._pause(draw(fault.at_s, rng) - self._loop.time())
            if not self._ended.is_set():
                await self._one(begin, fault, rng)
            return
        while fault.every_s is not None:
            await self._pause(max(0.01, draw(fault.every_s, rng)))
            if self._ended.is_set():
                return
            await self._one(begin, fault, rng)

    async def _one(self, begin: Callable[[Any, Fault, SimRng], Awaitable[None]], fault: Fault, rng: SimRng) -> None:
        self._loop.trace("fault", fault.kind)
        await begin(self, fault, rng)
        self._loop.trace("fault over", fault.kind)

    def _hit(self, fault: Fault, rng: SimRng) -> list[Machine]:
        everybody = rng.chance(fault.all_pct / 100)
        return list(self._devices) if everybody else [rng.choice(self._devices)]

    @contextlib.asynccontextmanager
    async def _alone(self, what: str) -> AsyncIterator[None]:
        """One trouble of a kind at a time on one thing: two that overlap would undo each other halfway."""
        async with self._locks.setdefault(what, asyncio.Lock()):
            yield

    # -- the network -------------------------------------------------------------------------------------------------

    async def _blackout(self, fault: Fault, rng: SimRng) -> None:
        mode = rng.choice(["drop", "hold"]) if fault.mode == "either" else fault.mode
        lasts_s = draw(fault.lasts_s, rng)
        for device in self._hit(fault, rng):
            if device.host.link is not None:
                device.host.link.blackout(BlackoutMode(mode), lasts_s, direction=fault.direction)
                if fault.direction == "both":
                    device.went_dark(lasts_s)
        await self._pause(lasts_s)

    async def _lost_answers(self, fault: Fault, rng: SimRng) -> None:
        lasts_s = draw(fault.lasts_s, rng)
        for device in self._hit(fault, rng):
            if device.host.link is not None:
                device.host.link.blackout(BlackoutMode.DROP, lasts_s, direction="down")
        await self._pause(lasts_s)

    async def _link(self, fault: Fault, rng: SimRng) -> None:
        [device] = self._hit(fault, rng)[:1]
        link = device.host.link
        if link is None:
            return
        async with self._alone(f"link {device.name}"):
            pipes = [pipe for pipe in (link.up, link.down) if fault.direction != ("down" if pipe is link.up else "up")]
            before = [pipe.model.params for pipe in pipes]
            for pipe, params in zip(pipes, before, strict=True):
                pipe.become(draw_link(fault.set, rng, base=params))
            await self._pause(draw(fault.lasts_s, rng))
            for pipe, params in zip(pipes, before, strict=True):
                pipe.become(params)

    async def _switch_address(self, fault: Fault, rng: SimRng) -> None:
        [device] = self._hit(fault, rng)[:1]
        async with self._alone(f"address {device.name}"):
            device.leave_network(kill=rng.chance(fault.kill_pct / 100))
            await self._pause(draw(fault.lasts_s, rng))
            device.join_network()

    async def _nat_forget(self, fault: Fault, rng: SimRng) -> None:
        for device in self._hit(fault, rng):
            if device.host.nat is not None:
                device.host.nat.forget()

    async def _wall_step(self, fault: Fault, rng: SimRng) -> None:
        seconds = draw(fault.seconds, rng)
        clocks = self._server_clocks() if fault.on == "server" else [each.clock for each in self._hit(fault, rng)]
        for clock in clocks:
            clock.step_wall(seconds)
        await self._pause(draw(fault.lasts_s, rng))
        for clock in clocks:
            clock.step_wall(-seconds)

    def _server_clocks(self) -> list[SimClock]:
        return []


class Faults(LinkFaults):
    """All troubles of one run with a platform.

    Args: as `LinkFaults`, and
        platform: whom else it hits.
        history: takes down which devices were slow.
        twin: begins another copy of a device.
    """

    def __init__(
        self,
        faults: tuple[Fault, ...],
        *,
        loop: VirtualLoop,
        devices: Sequence[Machine],
        platform: Platform,
        rng: SimRng,
        history: History,
        twin: Twin,
    ) -> None:
        super().__init__(faults, loop=loop, devices=devices, rng=rng)
        self._platform = platform
        self._history = history
        self._twin_of = twin

    def _server_clocks(self) -> list[SimClock]:
        return [self._platform.server_clock, *(gateway.clock for gateway in self._platform.gateways)]

    def _gateways(self, fault: Fault, rng: SimRng) -> list[Gateway]:
        everybody = rng.chance(fault.all_pct / 100)
        return list(self._platform.gateways) if everybody else [rng.choice(self._platform.gateways)]

    async def _down(self, gateway: Gateway, stop: Awaitable[None], lasts_s: float) -> None:
        await stop
        await self._pause(lasts_s)
        await gateway.start()

    async def _gateway(self, fault: Fault, rng: SimRng) -> None:
        lasts_s = draw(fault.lasts_s, rng)

        async def one(gateway: Gateway) -> None:
            async with self._alone(gateway.name):
                match fault.kind:
                    case "gateway-drain":
                        stop = gateway.drain()
                    case "gateway-power-cut":
                        stop = gateway.crash(power=True)
                    case _:
                        stop = gateway.crash(power=False)
                await self._down(gateway, stop, lasts_s)

        async with asyncio.TaskGroup() as group:
            for gateway in self._gateways(fault, rng):
                group.create_task(one(gateway))

    async def _roll(self, fault: Fault, rng: SimRng) -> None:
        """Drain the gateways one after the other, as an update does; each is down for a while."""
        for gateway in self._platform.gateways:
            async with self._alone(gateway.name):
                await self._down(gateway, gateway.drain(), draw(fault.lasts_s, rng))
            await self._pause(draw(fault.seconds, rng))

    async def _slow_reader(self, fault: Fault, rng: SimRng) -> None:
        bytes_per_s, lasts_s = draw(fault.bytes_per_s, rng), draw(fault.lasts_s, rng)
        [device] = self._hit(fault, rng)[:1]
        async with self._alone(f"reading {device.name}"):
            begun_s = self._loop.time()
            while not self._ended.is_set() and self._loop.time() < begun_s + lasts_s:
                device.host.let_read(int(bytes_per_s * _READS_EVERY_S))
                await self._pause(_READS_EVERY_S)
            device.host.let_read(None)
            self._history.fleet.slow.append((device.name, begun_s, self._loop.time()))

    async def _twin(self, fault: Fault, rng: SimRng) -> None:
        [device] = self._hit(fault, rng)[:1]
        async with self._alone(f"copies of {device.name}"):
            dark_s = draw(fault.lasts_s, rng)
            newest = await self._twin_of(
                device.name, elsewhere=rng.chance(fault.elsewhere_pct / 100),
                dark_s=dark_s if rng.chance(fault.half_open_pct / 100) else 0.0,
            )  # fmt: skip
            if newest:
                self._loop.trace("a copy of", device.name, "is", newest)
            await self._pause(dark_s)

    async def _dispatch_down(self, fault: Fault, rng: SimRng) -> None:
        async with self._alone("dispatch"):
            await self._platform.dispatch.kill()
            await self._pause(draw(fault.lasts_s, rng))
            self._platform.dispatch.start()

    async def _engine_cut(self, fault: Fault, rng: SimRng) -> None:
        async with self._alone("engine"):
            self._platform.broker.cut()
            await self._pause(draw(fault.lasts_s, rng))
            self._platform.broker.heal(restarted=rng.chance(fault.restarted_pct / 100))

    async def _origin_slow(self, fault: Fault, rng: SimRng) -> None:
        async with self._alone("origin speed"):
            self._platform.origin.extra_s = draw(fault.seconds, rng)
            await self._pause(draw(fault.lasts_s, rng))
            self._platform.origin.extra_s = 0.0

    async def _origin_dies(self, fault: Fault, rng: SimRng) -> None:
        async with self._alone("origin"):
            await self._platform.origin.kill()
            await self._pause(draw(fault.lasts_s, rng))
            self._platform.origin.start()


LinkFaults.kinds = {
    "blackout": LinkFaults._blackout,
    "lost-answers": LinkFaults._lost_answers,
    "link": LinkFaults._link,
    "switch-address": LinkFaults._switch_address,
    "nat-forget": LinkFaults._nat_forget,
    "wall-step": LinkFaults._wall_step,
}
Faults.kinds = {
    **LinkFaults.kinds,
    "gateway-crash": Faults._gateway,
    "gateway-power-cut": Faults._gateway,
    "gateway-drain": Faults._gateway,
    "gateway-roll": Faults._roll,
    "slow-reader": Faults._slow_reader,
    "twin": Faults._twin,
    "dispatch-down": Faults._dispatch_down,
    "engine-cut": Faults._engine_cut,
    "origin-slow": Faults._origin_slow,
    "origin-dies": Faults._origin_dies,
}
