"""The supervisor behind `stormline up`: starts every part, keeps each alive, and ends them all.

One process a role, or several. Each tells that it answers by writing its run file; nobody guesses from a log or a
port. The kernel ends the children with the supervisor, however it dies (`net.child`).
"""

import asyncio
import collections
import contextlib
import functools
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from stormline.assembly import inspect, layout, lock, prepare, roles
from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.clock import Clock, Rng
from stormline.core.values import Address
from stormline.engine.server import RunningServer, start_server
from stormline.net.child import Child, start_child
from stormline.settings.model import Settings

ENGINE: Final = "nats"
"""Name of the embedded engine among the parts."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What happens to the platform, in order.

    Attributes:
        event: `starting`, `answers` (a part, first time), `ready` (all of them), `died` (a part), `back` (a part
            answers again), `stopping`.
        state: the state folder, with `starting`.
        part: which role's process, or `nats`.
        pid: its process.
        addresses: `ip:port` by part: the role's own, and with `ready` all.
        console: link that opens the console, with `ready`; holds its key.
        reason: why it died.
        pause_s: seconds until it is started again, None where it is not.
    """

    event: str
    state: str = ""
    part: str = ""
    pid: int = 0
    addresses: dict[str, str] = {}
    console: str = ""
    reason: str = ""
    pause_s: float | None = None


class _Engine:
    """The embedded engine as the roles' start needs it."""

    server: RunningServer

    def __init__(self) -> None:
        self.answered = asyncio.Event()


class Platform:
    """One run of a platform on this machine. `run` may be called once."""

    def __init__(
        self,
        settings: Settings,
        *,
        only: Sequence[str] = (),
        demo: bool = False,
        clock: Clock,
        rng: Rng,
        notify: Callable[[Event], None],
    ) -> None:
        """Prepare a run.

        Args:
            settings: as loaded; ports may be 0.
            only: names of the roles to run; empty for all.
            demo: whether to run the demo too.
            clock: for certificates, restarts.
            rng: for keys and free ports.
            notify: told of every event, from the event loop.

        Raises:
            ConfigError: `only` names something that is not a role.
        """
        self._settings = settings
        self._roles = roles.spread(roles.choose(only, demo=demo), settings)
        self._demo = demo
        self._clock = clock
        self._rng = rng
        self._notify = notify
        self._place = layout.Layout(Path(settings.state))
        self._children: dict[str, Child] = {}
        self._addresses: dict[str, str] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set; on return every child has ended and the run files are gone.

        Cancellation stops the platform as `stop` does.

        Raises:
            PlatformError: a platform already runs on the state folder, a part did not start, or one died too often.
            ConfigError: something in the state folder or the settings is wrong.
            EngineError: the engine did not start.
        """
        roles.check_installed(self._roles)
        layout.make_folder(self._place.state)
        with lock.StateLock(self._place.lock):
            self._notify(Event(event="starting", state=str(self._place.state)))
            self._clear()
            try:
                await _until(stop, self._work())
            finally:
                try:
                    self._notify(Event(event="stopping"))
                finally:
                    await self._end()

    def kill(self) -> None:
        """Kill every child at once. `run` then returns soon."""
        for child in self._children.values():
            child.send_signal(signal.SIGKILL)

    # -- up -----------------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Start everything, say so, and keep it alive; ends only with an error."""
        for folder in (self._place.run, self._place.logs):
            layout.make_folder(folder)
        prepared = prepare.prepare(
            self._settings, self._place, self._roles, demo=self._demo, clock=self._clock, rng=self._rng
        )
        resolved = prepared.resolved
        async with asyncio.TaskGroup() as group:
            if prepare.has_engine(self._settings, self._roles):
                engine = _Engine()
                live = functools.partial(self._live_engine, resolved.settings.ports.nats, engine)
                group.create_task(self._keep(ENGINE, engine.answered, live), name=f"keep {ENGINE}")
                await engine.answered.wait()
                resolved = prepare.with_engine(resolved, engine.server)
            elif any(role.needs_engine for role in self._roles):
                await prepare.check_external_engine(resolved.settings, rng=self._rng)
            layout.write(self._place.resolved, resolved)
            answers = [asyncio.Event() for _ in self._roles]
            for role, answered in zip(self._roles, answers, strict=True):
                live = functools.partial(self._live, role, answered)
                group.create_task(self._keep(role.process, answered, live), name=f"keep {role.process}")
            for answered in answers:
                await answered.wait()
            await self._wait_healthy()
            addresses = self._known_addresses()
            prepare.announce(prepared, self._place, addresses)
            self._notify(Event(event="ready", addresses=addresses, console=prepared.admin.console_link))

    async def _wait_healthy(self) -> None:
        """Wait until every part is well too: a gateway answers before it has reached the engine, for one."""
        sick: list[str] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.HEALTHY_TIMEOUT_S):
                while True:
                    parts = await inspect.parts(self._place)
                    sick = [f"{part.part}: {part.health}" for part in parts if part.health != "ok"]
                    if not sick:
                        return
                    await asyncio.sleep(limits.HEALTHY_PAUSE_S)
        raise errors.PlatformError(f"not well within {limits.HEALTHY_TIMEOUT_S:.0f} s: {', '.join(sick) or 'unknown'}")

    def _known_addresses(self) -> dict[str, str]:
        order = [part for role in roles.ROLES.values() for part in role.ports]
        return {part: self._addresses[part] for part in (*order, ENGINE) if part in self._addresses}

    async def _keep(self, name: str, answered: asyncio.Event, live: Callable[[], Awaitable[str]]) -> None:
        """Keep one part alive: run `live`, which ends with the reason of the part's end, again and again.

        Raises:
            PlatformError: it did not answer at its first start, or died too often since.
        """
        deaths: collections.deque[float] = collections.deque(maxlen=limits.ROLE_RESTARTS_MAX)
        pause_s = limits.ROLE_RESTART_PAUSE_S
        while True:
            started = self._clock.monotonic()
            try:
                reason = await live()
            except errors.PlatformError as error:
                if not answered.is_set():
                    raise
                reason = str(error)
            now = self._clock.monotonic()
            deaths.append(now)
            if len(deaths) == limits.ROLE_RESTARTS_MAX and now - deaths[0] <= limits.ROLE_RESTARTS_WINDOW_S:
                raise errors.PlatformError(
                    f"{name} died {len(deaths)} times within {limits.ROLE_RESTARTS_WINDOW_S:.0f} s, last: {reason}"
                )
            if now - started > limits.ROLE_RESTARTS_WINDOW_S:
                pause_s = limits.ROLE_RESTART_PAUSE_S
            self._notify(Event(event="died", part=name, reason=reason, pause_s=pause_s))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, limits.ROLE_RESTART_PAUSE_MAX_S)

    def _answers(self, run: layout.RoleRun, answered: asyncio.Event) -> None:
        if run.role in (*roles.ROLES, ENGINE):  # further workers listen where the first does, or for themselves
            self._addresses.update(run.addresses)
        event = "back" if answered.is_set() else "answers"
        self._notify(Event(event=event, part=run.role, pid=run.pid, addresses=run.addresses))
        answered.set()

    async def _live_engine(self, port: int, engine: "_Engine") -> str:
        """Start the embedded engine, wait until it ends, and give the reason."""
        server = await start_server(self._place.nats, rng=self._rng, host=prepare.ENGINE_HOST, port=port)
        child = self._children[ENGINE] = server.child
        engine.server = server
        address = str(Address(prepare.ENGINE_HOST, port))
        run = layout.RoleRun(role=ENGINE, pid=child.pid, addresses={ENGINE: address})
        layout.write(self._place.role(ENGINE), run)
        try:
            self._answers(run, engine.answered)
            reason = await server.wait()
            return reason or _reason(await child.wait(), "")
        finally:
            layout.remove(self._place.role(ENGINE))

    async def _live(self, role: roles.Role, answered: asyncio.Event) -> str:
        """Start a role, wait until it answers, then until it ends, and give the reason."""
        log_file = self._place.log(role.process)
        since = log_file.stat().st_size if log_file.exists() else 0
        child = start_child(role.process, role.command(self._place.state), log=log_file)
        self._children[role.process] = child
        try:
            self._answers(await self._wait_answer(role, child, since), answered)
            code = await child.wait()
        finally:
            layout.remove(self._place.role(role.process))
        return _reason(code, layout.last_words(log_file, since))

    async def _wait_answer(self, role: roles.Role, child: Child, since: int) -> layout.RoleRun:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.ROLE_START_TIMEOUT_S):
                while child.returncode is None:
                    run = layout.read(self._place.role(role.process), layout.RoleRun)
                    if run is not None and run.pid == child.pid:
                        return run
                    await asyncio.sleep(limits.ROLE_POLL_S)
        words = layout.last_words(child.log, since)
        if child.returncode is not None:
            raise errors.PlatformError(f"{role.process} did not start: {_reason(child.returncode, words)}")
        await child.stop(limits.ROLE_STOP_TIMEOUT_S)
        waited = f"{role.process} did not answer within {limits.ROLE_START_TIMEOUT_S:.0f} s"
        raise errors.PlatformError(f"{waited}: {words}" if words else waited)

    # -- down ---------------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """End every child: all roles side by side, then the engine they talk to."""
        layout.remove(self._place.bundle, self._place.admin)
        engine = self._children.get(ENGINE)
        drain_s = max(0.0, self._settings.gateway.drain_s - limits.DRAIN_S)  # beyond what every role has
        await asyncio.gather(
            *(
                child.stop(limits.ROLE_STOP_TIMEOUT_S + (drain_s if name.startswith("gateway") else 0.0))
                for name, child in self._children.items()
                if child is not engine
            )
        )
        if engine is not None:
            await engine.stop(limits.ENGINE_GRACE_S)
        self._clear()

    def _clear(self) -> None:
        """Remove the files that live as long as a run, also those a killed supervisor left."""
        layout.remove(*self._place.running(), self._place.resolved, self._place.bundle, self._place.admin)


def _reason(code: int, words: str) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return words or f"exit code {code}"


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends or `stop` is set; it has ended in every case.

    Raises:
        StormlineError: the first that ended it.
    """
    working = asyncio.create_task(work, name="platform")
    stopping = asyncio.create_task(stop.wait(), name="platform stop")
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        working.cancel()
        [outcome, _] = await asyncio.gather(working, stopping, return_exceptions=True)
    while isinstance(outcome, BaseExceptionGroup):  # several parts may fail at once; the first names the cause
        outcome = outcome.exceptions[0]
    if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
        raise outcome
