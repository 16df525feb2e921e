"""What a scheduling centre does beside answering: it probes endpoints, and takes part in its unit."""

import asyncio
from collections.abc import Awaitable, Callable

from stormline.core import errors
from stormline.core.clock import Rng
from stormline.dispatch.health import Drains
from stormline.dispatch.probing import HealthConfig, Monitor, Prober
from stormline.dispatch.unit import RulesSource, UnitLink
from stormline.engine.port import Engine, Handler


class Beside:
    """The tasks of a centre that must live as long as it answers.

    Args:
        source: where the rules come from.
        health: how endpoints are probed; None: they are not.
        rng: for the moments of probes.

    Attributes:
        monitor: says which endpoints may be handed out; None: all.
    """

    def __init__(self, source: RulesSource, health: HealthConfig | None, rng: Rng) -> None:
        self._source = source
        self._link: UnitLink | None = None
        self.monitor: Monitor | None = None
        if health is not None:
            self.monitor = Monitor(health.policy, Drains(), Prober(health), rng=rng, told=self._touched)
        self._tasks: list[asyncio.Task[None]] = []
        self._ends: list[Callable[[], None]] = []

    def _touched(self, hosts: frozenset[str]) -> None:
        if self._link is not None:
            self._link.touched(hosts)

    def begin(self, unit: str, answer: Handler, connect: Callable[[], Awaitable[Engine]] | None) -> None:
        """Begin with the rules there are, and follow their changes.

        Args:
            unit: this centre's.
            answer: answers what comes through gateways of the unit.
            connect: makes the connection to the engine, over which they are told of changes; None: there is none.
        """
        if (monitor := self.monitor) is not None:
            monitor.watch(self._source.current())
            self._ends.append(self._source.on_change(lambda old, new: monitor.watch(new)))
            self._tasks.append(asyncio.create_task(monitor.run(), name="health probes"))
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
