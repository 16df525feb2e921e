"""What a scheduling centre does beside answering: it probes endpoints, and takes part in its unit."""

import asyncio
from collections.abc import Awaitable, Callable

from stormline.core import errors
from stormline.core.clock import Rng
from stormline.dispatch.head import Drained
from stormline.dispatch.health import Drains, HealthPolicy, Part
from stormline.dispatch.probing import HealthConfig, Monitor, Prober
from stormline.dispatch.rules import RuleSet
from stormline.dispatch.unit import RulesSource, UnitLink
from stormline.engine.port import Engine, Handler


class Beside:
    """The tasks of a centre that must live as long as it answers.

    Args:
        source: where the rules come from.
        health: how endpoints are probed; None: they are not, and only drains count.
        rng: for the moments of probes.

    Attributes:
        monitor: says which endpoints may be handed out.
        ill: tries endpoints once, as they are probed; None: they are not.
    """

    def __init__(self, source: RulesSource, health: HealthConfig | None, rng: Rng) -> None:
        self._source = source
        self._link: UnitLink | None = None
        self._drains = Drains()
        policy = HealthPolicy() if health is None else health.policy
        prober = None if health is None else Prober(health, rng=rng)
        self.ill = None if prober is None else prober.ill
        self.monitor = Monitor(policy, self._drains, prober, rng=rng, told=self._touched)
        self._tasks: list[asyncio.Task[None]] = []
        self._ends: list[Callable[[], None]] = []

    def _changed(self, old: RuleSet | None, new: RuleSet) -> None:
        self.monitor.watch(*self._source.served())

    def _drained(self, wanted: tuple[Drained, ...]) -> None:
        """Take out of service what is wanted so, and give the rest back."""
        for each in set(self._drains.all()).difference(wanted):
            self._drains.end(each)
        for each in wanted:
            self._drains.put(each)

    def _touched(self, parts: frozenset[Part]) -> None:
        if self._link is not None:
            self._link.touched(parts)

    def begin(self, unit: str, answer: Handler, connect: Callable[[], Awaitable[Engine]] | None) -> None:
        """Begin with the rules there are, and follow their changes.

        Args:
            unit: this centre's.
            answer: answers what comes through gateways of the unit.
            connect: makes the connection to the engine, over which they are told of changes; None: there is none.
        """
        self.monitor.watch(*self._source.served())
        self._ends.append(self._source.on_change(self._changed))
        self._ends.append(self._source.on_drains(self._drained))
        self._tasks.append(asyncio.create_task(self.monitor.run(), name="health probes"))
        if connect is not None:
            self._link = UnitLink(unit, rules=self._source.current(), answer=answer)
            self._ends.append(self._source.on_change(self._link.changed))
            self._tasks.append(asyncio.create_task(self._link.run(connect), name="dispatch unit"))

    async def wait(self, stop: asyncio.Event) -> None:
        """Wait for the order to stop.

        Raises:
            PlatformError: a part that must live has died.
        """
        stopped = asyncio.create_task(stop.wait(), name="dispatch stop")
        try:
            await asyncio.wait([stopped, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done() and not stopped.done():
                    cause = task.exception()
                    raise errors.PlatformError(f"dispatch: {task.get_name()} died: {cause!r}") from cause
        finally:
            stopped.cancel()

    async def end(self) -> None:
        """End all of it."""
        for end in self._ends:
            end()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
