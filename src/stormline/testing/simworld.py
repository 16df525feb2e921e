"""A world of the simulator: network, platform, devices with their applications, and trouble, all from one seed.

report = simworld.run("elevator", 7)
report.problems                       # [] where everything held that must hold
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from stormline.core import errors, limits_lab
from stormline.core import limits_platform as limits
from stormline.core.limits import CLOSE_FLUSH_S, KEPT_BYTES_MAX, PUSH_BODY_BYTES_MAX, PUSHES_UNACKED_MAX
from stormline.core.values import Address
from stormline.gateway.node import GatewayNode
from stormline.netmodel.params import BlackoutMode, LinkParams
from stormline.testing import invariants, invariants_direct, invariants_fleet, simloop
from stormline.testing import scenario as scenarios
from stormline.testing.buggify import Buggify
from stormline.testing.history import History, PushEntry
from stormline.testing.scenario import Scenario
from stormline.testing.simdevice import Device, push_content
from stormline.testing.simdirect import DirectWorld
from stormline.testing.simfaults import Faults
from stormline.testing.simloop import SimRng, SimulationFailed, VirtualLoop
from stormline.testing.simnet import NoFaults, SimNet, Switch
from stormline.testing.simplatform import APP, Gateway, Platform

if TYPE_CHECKING:
    from stormline.gateway.carrier import Carrier

_DRAIN_S: Final = 180.0
"""How long after the storm calls in flight may still run: the longest deadline, and a body that stalls."""
_LOOK_S: Final = 1.0
"""How often sizes that have bounds are looked at."""
_PUSH_PAUSE_S: Final = (0.2, 4.0)
"""Pause before a business repeats a push."""
_LAST_KINDS: Final = ("post", "rpc", "post-key", "rpc-key")
"""What is called last, beside reads."""
_LAST_AT_ONCE: Final = 100
"""Devices that make their last calls together: a service takes no more than so many at once."""
_COPIES_MAX: Final = 64
"""Copies of devices in one run."""
_WAITING_BYTES_MAX: Final = limits.SEND_BUFFER_BYTES + PUSHES_UNACKED_MAX * (PUSH_BODY_BYTES_MAX + 1024)
"""What may wait in a gateway for one client: what its senders put out before they pause, and pushes, which do not."""
_LATE_S: Final = 2.0
"""How late a timer of the gateway's wheel may be, and our look after it."""
_OUTLIVES_S: Final = CLOSE_FLUSH_S + _LATE_S
"""How long a connection may stand when its session has ended."""
_HEALTHY: Final = LinkParams(delay_s=0.01)


class World:
    """One run.

    Args:
        scenario: what happens.
        seed: all chance comes from it.
        history: takes down what happens.
    """

    def __init__(self, scenario: Scenario, seed: int, history: History) -> None:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualLoop):
            raise errors.LocalProtocolError("a simulated world needs a VirtualLoop")
        self._loop = loop
        self._scenario = scenario
        self._history = history
        self._rng = SimRng(seed, "world")
        self._stormy = Buggify(self._rng.child("buggify"))
        self._sites = Switch(self._stormy if scenario.small_faults else NoFaults())
        self.net = SimNet(loop, self._rng.child("net"), sites=self._sites)
        self.platform = Platform(
            loop, self.net, self._rng.child("platform"), self._sites, history, gateways=scenario.gateways,
            even=scenario.even,
        )  # fmt: skip
        self.devices = [self._device(number) for number in range(1, scenario.workload.devices + 1)]
        self._copies = {device.name: [device] for device in self.devices}
        self._workers: list[asyncio.Task[None]] = []
        self._over_since: dict[Carrier, float] = {}
        self._calls: list[asyncio.Task[object]] = []
        self._pushes = 0

    def _device(self, number: int, *, twin_of: Device | None = None, avoids: Address | None = None) -> Device:
        return Device(
            number,
            loop=self._loop,
            net=self.net,
            platform=self.platform,
            scenario=self._scenario,
            history=self._history,
            rng=self._rng.child(f"device-{number}"),
            sites=self._sites,
            twin_of=twin_of,
            avoids=avoids,
        )

    async def run(self) -> None:
        """Play the scenario to its end."""
        await self.platform.start()
        for device in self.devices:
            await device.start()
        faults = Faults(
            self._scenario.faults, loop=self._loop, devices=self.devices, platform=self.platform,
            rng=self._rng.child("faults"), history=self._history, twin=self._twin,
        )  # fmt: skip
        faults.start()
        looking = asyncio.create_task(self._look(), name="world looks")
        duration_s = scenarios.draw(self._scenario.duration_s, self._rng)
        for device in self.devices:
            self._work(self._use(device), f"{device.name} calls")
        for device in self.devices:
            self._work(self._push_to(device), f"push {device.name}")
        await asyncio.sleep(duration_s)
        await faults.stop()
        self._heal()
        for worker in self._workers:
            worker.cancel()  # it waits for its next moment
        for outcome in await asyncio.gather(*self._workers, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        await asyncio.sleep(scenarios.draw(self._scenario.recovery_s, self._rng))
        await self._last_calls()
        if self._calls:
            await asyncio.wait(self._calls, timeout=_DRAIN_S)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await self._close()

    def _work(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._workers.append(asyncio.create_task(work, name=name))

    async def _twin(self, name: str, *, elsewhere: bool, dark_s: float) -> str:
        """See `simfaults.Twin`."""
        copies = self._copies[name]
        earlier = copies[-1]
        device_id = earlier.look()
        there = [each for each in self.platform.gateways if each.holds(device_id)]
        if not there or len(self._copies) * len(copies) > _COPIES_MAX:
            return ""
        if dark_s and earlier.host.link is not None:
            earlier.host.link.blackout(BlackoutMode.DROP, dark_s)
        number = len(self.devices) + 1
        device = self._device(number, twin_of=earlier, avoids=there[0].address if elsewhere else None)
        self.devices.append(device)
        copies.append(device)
        now = self._loop.time()
        known = self._history.fleet.copies.setdefault(device_id, [(earlier.name, 0.0)])
        known.append((device.name, now))
        await device.start()
        self._work(self._use(device), f"{device.name} calls")
        return device.name

    async def _close(self) -> None:
        for task in self._calls:
            if task.done():
                task.result()
            else:
                task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await asyncio.gather(*(device.stop() for device in self.devices))
        await self.platform.stop()
        self._history.end_s = self._loop.time()
        self._history.packets = self.net.packets
        self._history.fired = dict(self._stormy.fired)

    def _heal(self) -> None:
        """End the storm: links are good, nothing fails on purpose any more."""
        self._sites.off()
        for device in self.devices:
            if device.host.link is not None:
                device.host.link.heal(_HEALTHY)

    # -- applications ------------------------------------------------------------------------------------------------

    async def _use(self, device: Device) -> None:
        rng = self._rng.child(f"use-{device.name}")
        work = self._scenario.workload
        kinds = [kind for kind, share in work.mix.items() if share > 0]
        shares = [work.mix[kind] for kind in kinds]
        while True:
            await asyncio.sleep(rng.gap_s(work.calls_per_s))
            if device.replaced:
                return
            at = rng.uniform(0, sum(shares))
            kind = kinds[-1]
            for kind, share in zip(kinds, shares, strict=True):  # noqa: B007
                at -= share
                if at <= 0:
                    break
            self._start(device, kind)

    def _start(self, device: Device, kind: str, *, fresh: bool = False) -> asyncio.Task[object]:
        task: asyncio.Task[object] = asyncio.create_task(device.call(kind, fresh=fresh), name=f"{device.name} {kind}")
        self._calls.append(task)
        return task

    async def _last_calls(self) -> None:
        """After the storm: what is asked now must be answered.

        Reads go first: they may find that a NAT has forgotten the connection, which a write could not bear.
        """
        rest = [kind for kind in _LAST_KINDS if self._scenario.workload.mix.get(kind)]
        for kinds in (["get"], rest):
            devices = [device for device in self.devices if not device.replaced]
            for first in range(0, len(devices), _LAST_AT_ONCE):
                await self._last_calls_of(devices[first : first + _LAST_AT_ONCE], kinds, pushes=kinds is rest)

    async def _last_calls_of(self, devices: list[Device], kinds: list[str], *, pushes: bool) -> None:
        started = [self._start(device, kind, fresh=True) for device in devices for kind in kinds]
        if pushes and self._scenario.workload.pushes_per_s > 0:
            started += [
                self._start_push(target, self._rng.child(f"last-push-{target}"), fresh=True)
                for target in dict.fromkeys(device.look() for device in devices)
                if target
            ]
        if started:
            await asyncio.wait(started, timeout=_DRAIN_S)

    # -- the business that pushes ------------------------------------------------------------------------------------

    async def _push_to(self, device: Device) -> None:
        rng = self._rng.child(f"push-{device.name}")
        rate = self._scenario.workload.pushes_per_s
        while rate > 0:
            await asyncio.sleep(rng.gap_s(rate))
            target = device.look()
            if target:
                self._start_push(target, rng)

    def _start_push(self, target: str, rng: SimRng, *, fresh: bool = False) -> asyncio.Task[object]:
        self._pushes += 1
        size = int(scenarios.draw(self._scenario.workload.push_bytes, rng))
        entry = PushEntry(id=f"p{self._pushes}", device=target, fresh=fresh, size=size)
        self._history.pushes[entry.id] = entry
        task: asyncio.Task[object] = asyncio.create_task(
            self._send(entry, rng.child(entry.id)), name=f"push {entry.id}"
        )
        self._calls.append(task)
        return task

    async def _send(self, entry: PushEntry, rng: SimRng) -> None:
        """Push, and repeat it under the same id until it is acked or patience ends."""
        topic, body = push_content(entry)
        for _ in range(self._scenario.workload.push_tries):
            nodes = [gateway.node for gateway in self.platform.gateways if gateway.node is not None]
            result = "no gateway"
            if nodes:
                result = await self._push_once(rng.choice(nodes), entry, topic, body)
            entry.results.append(result)
            self._loop.trace("push", entry.id, result)
            if result == "acked":
                entry.confirmed_s = self._loop.time()
                return
            await asyncio.sleep(rng.uniform(*_PUSH_PAUSE_S))

    async def _push_once(self, node: GatewayNode, entry: PushEntry, topic: str, body: bytes) -> str:
        try:
            result = await node.push.push(APP, entry.device, body, topic=topic, push_id=entry.id)
        except errors.RequestRefused as error:
            return f"error {error.code}"
        except errors.EngineError as error:
            return f"error {type(error).__name__}"
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is not None and me.cancelling():
                raise
            return "error node died"  # the delivery it shared was ended with its node
        return result.delivery.value

    # -- looking -----------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for device in self.devices:
                device.look()
            for gateway in self.platform.gateways:
                if gateway.node is not None:
                    for task in gateway.node.background:
                        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                            self._loop.problems.append(f"{gateway.name}: {task.get_name()} died: {error!r}")
                    sessions, connections, calls = gateway.node.counts()
                    self._history.saw(f"{gateway.name} sessions", sessions, len(self.devices))
                    self._history.saw(f"{gateway.name} connections", connections, limits.SESSIONS_MAX)
                    self._history.saw(f"{gateway.name} calls", calls, limits.GATEWAY_CALLS_MAX)
                    self._look_at_connections(gateway)

    def _look_at_connections(self, gateway: Gateway) -> None:
        """Note what a client costs that does not read: its bytes, how long it is borne, how long its end takes."""
        now, saw = self._loop.time(), self._history.saw
        for carrier in gateway.connections():
            waiting = carrier._transport.get_write_buffer_size()
            saw(f"{gateway.name} bytes waiting for one client", waiting, _WAITING_BYTES_MAX)
            if carrier._over:
                over_s = now - self._over_since.setdefault(carrier, now)
                saw(f"{gateway.name} seconds that a session's end outlives it", over_s, _OUTLIVES_S)
            elif carrier._paused_at is not None:
                paused_s = now - carrier._paused_at
                saw(f"{gateway.name} seconds without room for a client", paused_s, limits.STALL_TIMEOUT_S + _LATE_S)
            if carrier.session is not None:
                kept = carrier.session.connection.kept_bytes
                saw(f"{gateway.name} bytes kept for one client", kept, KEPT_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class Report:
    """What came out of one run.

    Attributes:
        scenario: its name.
        seed: its seed.
        problems: everything that does not hold, each line naming scenario and seed.
        history: what happened.
        virtual_s: how long it was.
        trace_hash: equal for equal runs; empty where the run broke off.
        devices: how many there were, where these are not the scenario's own; else 0.
    """

    scenario: str
    seed: int
    problems: list[str]
    history: History
    virtual_s: float
    trace_hash: str
    devices: int = 0

    @property
    def repeat(self) -> str:
        """The command that repeats this run."""
        devices = f" --devices {self.devices}" if self.devices else ""
        return f"stormline sim {self.scenario} --seed {self.seed}{devices}"


def run(
    name: str, seed: int, *, scenario: Scenario | None = None, devices: int = 0, log: list[str] | None = None
) -> Report:
    """Run a scenario with a seed and check it.

    Args:
        name: name of a scenario that ships, or a `.toml` file.
        seed: any whole number.
        scenario: the scenario itself, where it is not to be loaded.
        devices: how many to have instead of the scenario's; 0 for those.
        log: takes a line for every event, for people.

    Raises:
        ConfigError: see `scenario.load`.
    """
    scenario = scenario if scenario is not None else scenarios.load(name)
    if devices:
        scenario = scenarios.with_devices(scenario, devices)
    history = History(scenario=name, seed=seed)

    async def main() -> None:
        if scenario.direct is not None:
            await DirectWorld(scenario, scenario.direct, seed, history).run()
        else:
            await World(scenario, seed, history).run()

    problems: list[str] = []
    virtual_s, trace_hash = 0.0, ""
    try:
        outcome = simloop.run(
            main,
            steps_max=limits_lab.SIM_STEPS_MAX + scenario.workload.devices * limits_lab.SIM_DEVICE_STEPS,
            on_trace=None if log is None else lambda now, line: log.append(f"{now:12.6f} {line}"),
        )
        virtual_s, trace_hash = outcome.end_s, outcome.trace_hash
    except SimulationFailed as error:
        problems += error.problems
    problems += invariants.check(history)
    problems += (invariants_fleet if scenario.direct is None else invariants_direct).check(history)
    if not problems:
        problems += _thresholds(history, scenario.checks)
    where = f"{name} seed {seed}"
    return Report(name, seed, [f"{where}: {line}" for line in problems], history, virtual_s, trace_hash, devices)


def _thresholds(history: History, checks: scenarios.Checks) -> list[str]:
    calls = [
        call for call in history.calls.values() if not (call.fresh or call.hurried or call.cancelled_s is not None)
    ]
    # A body that is a stream can be sent once only, with a key or without.
    safe = [call for call in calls if not call.is_write or (call.has_key and not call.kind.startswith("upload"))]
    pushes = list(history.pushes.values())
    fresh = {call.id for call in history.calls.values() if call.fresh}
    records = [entry for entries in history.records.values() for entry in entries]
    families = [entry.record.family for entry in records if entry.call_id in fresh]
    figures = (
        ("success", sum(call.ok for call in calls), len(calls), checks.success_pct),
        ("success of reads and keyed writes", sum(call.ok for call in safe), len(safe), checks.read_success_pct),
        ("acked pushes", sum(push.confirmed for push in pushes), len(pushes), checks.acked_pct),
    )
    problems = [
        f"check: {what} {100 * good / total:.1f} % of {total}, at least {least:g} % are asked for"
        for what, good, total, least in figures
        if total >= _CHECK_SAMPLE_MIN and 100 * good / total < least
    ]
    if 100 * families.count(6) < checks.ipv6_pct * len(families):
        problems.append(f"check: {families.count(6)} of {len(families)} calls after the storm went over IPv6")
    problems += invariants_fleet.herd(history, checks)
    calls = [call for call in calls if not invariants_fleet.is_slow(history, call)]
    times = sorted((call.ended_s or 0.0) - call.started_s for call in calls if call.ok and call.kind in _SMALL_KINDS)
    slow_s = times[len(times) * 95 // 100] if len(times) >= _CHECK_SAMPLE_MIN else 0.0
    if checks.p95_s and slow_s > checks.p95_s:
        problems.append(f"check: 5 of 100 calls took longer than {slow_s:.3f} s, {checks.p95_s:g} are allowed")
    return problems


_SMALL_KINDS: Final = frozenset({"get", "coded", "plain", "post", "post-key", "once"})
"""Calls whose time is that of the network."""
_CHECK_SAMPLE_MIN: Final = 10
"""Fewer calls say nothing about a share."""
