"""A world of the simulator: network, platform, devices with their applications, and trouble, all from one seed.

report = simworld.run("elevator", 7)
report.problems                       # [] where everything held that must hold
"""

import asyncio
from dataclasses import dataclass
from typing import Final

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.gateway.node import GatewayNode
from stormline.netmodel.params import LinkParams
from stormline.testing import invariants, invariants_direct, simloop
from stormline.testing import scenario as scenarios
from stormline.testing.buggify import Buggify
from stormline.testing.history import History, PushEntry
from stormline.testing.scenario import Scenario
from stormline.testing.simdevice import Device, push_content
from stormline.testing.simdirect import DirectWorld
from stormline.testing.simfaults import Faults
from stormline.testing.simloop import SimRng, SimulationFailed, VirtualLoop
from stormline.testing.simnet import SimNet, Switch
from stormline.testing.simplatform import APP, Platform

_DRAIN_S: Final = 180.0
"""How long after the storm calls in flight may still run: the longest deadline, and a body that stalls."""
_LOOK_S: Final = 1.0
"""How often sizes that have bounds are looked at."""
_PUSH_PAUSE_S: Final = (0.2, 4.0)
"""Pause before a business repeats a push."""
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
        self._sites = Switch(self._stormy)
        self.net = SimNet(loop, self._rng.child("net"), sites=self._sites)
        self.platform = Platform(
            loop, self.net, self._rng.child("platform"), self._sites, history, gateways=scenario.gateways
        )
        self.devices = [
            Device(
                number,
                loop=loop,
                net=self.net,
                platform=self.platform,
                scenario=scenario,
                history=history,
                rng=self._rng.child(f"device-{number}"),
                sites=self._sites,
            )
            for number in range(1, scenario.workload.devices + 1)
        ]
        self._calls: list[asyncio.Task[object]] = []
        self._pushes = 0
        self._over = False

    async def run(self) -> None:
        """Play the scenario to its end."""
        await self.platform.start()
        for device in self.devices:
            await device.start()
        faults = Faults(
            self._scenario.faults, loop=self._loop, devices=self.devices, platform=self.platform,
            rng=self._rng.child("faults"),
        )  # fmt: skip
        faults.start()
        looking = asyncio.create_task(self._look(), name="world looks")
        duration_s = scenarios.draw(self._scenario.duration_s, self._rng)
        workers = [asyncio.create_task(self._use(device), name=f"{device.name} calls") for device in self.devices]
        workers += [asyncio.create_task(self._push_to(device), name=f"push {device.name}") for device in self.devices]
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
        for task in self._calls:
            if task.done():
                task.result()
            else:
                task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for device in self.devices:
            await device.stop()
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
            if self._over:
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
        for kinds in (("get",), ("post", "rpc", "post-key", "rpc-key")):
            started = [self._start(device, kind, fresh=True) for device in self.devices for kind in kinds]
            await asyncio.wait(started, timeout=_DRAIN_S)

    # -- the business that pushes ------------------------------------------------------------------------------------

    async def _push_to(self, device: Device) -> None:
        rng = self._rng.child(f"push-{device.name}")
        rate = self._scenario.workload.pushes_per_s
        while rate > 0:
            await asyncio.sleep(rng.gap_s(rate))
            if self._over:
                return
            target = device.look()
            if target:
                self._pushes += 1
                entry = PushEntry(id=f"p{self._pushes}", device=target)
                self._history.pushes[entry.id] = entry
                task = asyncio.create_task(self._send(entry, rng.child(entry.id)), name=f"push {entry.id}")
                self._calls.append(task)

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
    """

    scenario: str
    seed: int
    problems: list[str]
    history: History
    virtual_s: float
    trace_hash: str

    @property
    def repeat(self) -> str:
        """The command that repeats this run."""
        return f"stormline sim {self.scenario} --seed {self.seed}"


def run(name: str, seed: int, *, scenario: Scenario | None = None, log: list[str] | None = None) -> Report:
    """Run a scenario with a seed and check it.

    Args:
        name: name of a scenario that ships, or a `.toml` file.
        seed: any whole number.
        scenario: the scenario itself, where it is not to be loaded.
        log: takes a line for every event, for people.

    Raises:
        ConfigError: see `scenario.load`.
    """
    scenario = scenario if scenario is not None else scenarios.load(name)
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
            main, on_trace=None if log is None else lambda now, line: log.append(f"{now:12.6f} {line}")
        )
        virtual_s, trace_hash = outcome.end_s, outcome.trace_hash
    except SimulationFailed as error:
        problems += error.problems
    problems += invariants.check(history)
    if scenario.direct is not None:
        problems += invariants_direct.check(history)
    if not problems:
        problems += _thresholds(history, scenario.checks)
    where = f"{name} seed {seed}"
    return Report(name, seed, [f"{where}: {line}" for line in problems], history, virtual_s, trace_hash)


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
    times = sorted((call.ended_s or 0.0) - call.started_s for call in calls if call.ok and call.kind in _SMALL_KINDS)
    slow_s = times[len(times) * 95 // 100] if len(times) >= _CHECK_SAMPLE_MIN else 0.0
    if checks.p95_s and slow_s > checks.p95_s:
        problems.append(f"check: 5 of 100 calls took longer than {slow_s:.3f} s, {checks.p95_s:g} are allowed")
    return problems


_SMALL_KINDS: Final = frozenset({"get", "coded", "plain", "post", "post-key", "once"})
"""Calls whose time is that of the network."""
_CHECK_SAMPLE_MIN: Final = 10
"""Fewer calls say nothing about a share."""
