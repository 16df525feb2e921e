"""Which plans have changed, and telling the sessions of this node so: jittered, joined, bounded.

For each app the last few changes are kept by number. A session knows the number of the last one it was told, so what
it is told next is exactly what changed since: one message, however many changes there were. Changes go out in passes
over the sessions of the app; each session has its own random moment in a pass, and a change that comes during a pass
goes with it to those who still wait, and by the next pass to the others. So nobody waits for longer than two passes.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, Protocol

from stormline.appgw import plans, subjects
from stormline.appgw.plans import PlanChange
from stormline.core import limits_platform as limits
from stormline.core.clock import Rng
from stormline.engine.port import Listener, Message, Subscription

_log = logging.getLogger("stormline.gateway")


class Due(NamedTuple):
    """What a session has yet to be told.

    Attributes:
        number: of the newest change; the session keeps it.
        version: newest version of the plan.
        hosts: hosts whose plan changed since the session was told last; empty for any.
    """

    number: int
    version: int
    hosts: tuple[str, ...]


class AppChanges:
    """The last changes of one app's plan. Pure.

    Attributes:
        number: number of the newest change, from 1; 0 before the first.
        version: newest version known, 0 for none.
    """

    def __init__(self) -> None:
        self.number = 0
        self.version = 0
        self._hosts: deque[tuple[str, ...]] = deque(maxlen=limits.NOTICE_CHANGES_KEPT)
        self._joined: dict[int, Due] = {}

    def take(self, change: PlanChange) -> bool:
        """Take a change in; False where it is no news: known already, from another centre say, or older."""
        hosts = change.hosts
        if change.version < self.version:
            return False
        if change.version == self.version:
            if change.since != change.version or not hosts:
                return False
        elif change.since != self.version or self.version == 0:
            hosts = ()  # a change in between was not heard of: any host may have changed
        self.version = change.version
        self.number += 1
        self._hosts.append(hosts)
        self._joined.clear()
        return True

    def due(self, told: int) -> Due | None:
        """Give what a session has yet to be told that was told last of change `told`; 0 for none."""
        if told >= self.number:
            return None
        found = self._joined.get(told)
        if found is None:
            behind = self.number - told
            known = told > 0 and behind <= len(self._hosts)
            hosts = plans.join_hosts(list(self._hosts)[-behind:]) if known else ()
            found = self._joined[told] = Due(self.number, self.version, hosts)
        return found


class Recipient(Protocol):
    """A session that can be told."""

    @property
    def app(self) -> str:
        """Its application id."""
        ...

    def tell_changes(self) -> None:
        """Tell it what `Notices.due` has for it, now or when its client reads again. Never raises, never waits."""
        ...


class Bus(Protocol):
    """What is needed of the engine."""

    async def subscribe(self, subject: str, handler: Listener, *, queue: str = "") -> Subscription:
        """See `engine.port.Engine.subscribe`."""
        ...


class Notices:
    """The changes this node knows of, and their way to its sessions. Belongs to the running loop.

    Args:
        apps: apps served here; changes of others are dropped.
        rng: for each session's moment.
        sessions: gives the live sessions of the node.
    """

    def __init__(self, apps: Collection[str], *, rng: Rng, sessions: Callable[[], Iterator[Recipient]]) -> None:
        self._apps = {app: AppChanges() for app in apps}
        self._rng = rng
        self._sessions = sessions
        self._passes: dict[str, asyncio.Task[None]] = {}

    async def start(self, engine: Bus, unit: str) -> Subscription:
        """Begin to hear the unit's centres; the interest outlives losses of the engine."""
        return await engine.subscribe(subjects.of_unit(unit, plans.NOTICES), self.take)

    async def take(self, message: Message) -> None:
        """Take a centre's message; one that is malformed is dropped with a line in the log."""
        try:
            changes = plans.decode_changes(message.data)
        except ValueError as error:  # msgspec's are such
            _log.warning("malformed notice of a changed plan: %s", error)
            return
        for change in changes:
            known = self._apps.get(change.app)
            if known is not None and known.take(change):
                _log.info("plan of app %s changed: version %d", change.app, change.version)
                if change.app not in self._passes:
                    task = asyncio.get_running_loop().create_task(self._tell(change.app, known), name="plan notices")
                    self._passes[change.app] = task

    def due(self, app: str, told: int) -> Due | None:
        """See `AppChanges.due`."""
        known = self._apps.get(app)
        return None if known is None else known.due(told)

    async def close(self) -> None:
        """End the passes that run."""
        tasks = list(self._passes.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _tell(self, app: str, changes: AppChanges) -> None:
        loop = asyncio.get_running_loop()
        try:
            number = 0
            while number != changes.number:
                number = changes.number
                begin = loop.time()
                recipients = [each for each in self._sessions() if each.app == app]
                moments = sorted((self._rng.random() * limits.NOTICE_SPREAD_S, at) for at in range(len(recipients)))
                for moment, at in moments:
                    if (wait_s := begin + moment - loop.time()) > limits.NOTICE_STEP_S:
                        await asyncio.sleep(wait_s)
                    recipients[at].tell_changes()
        finally:
            del self._passes[app]
