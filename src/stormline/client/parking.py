"""Requests that wait for the network: `extensions={"stormline.wait_for_network": 60.0}`.

While it is known that there is none they wait here, without an attempt, a connection or a place in flight, and go the
moment it is back. Their deadline begins then. A request whose attempts all failed because there was no way out comes
here too; nothing of it had left.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from stormline.client.trace import CallTrace
from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.outbound.race import NO_WAY_OUT


class Waiting(Protocol):
    """A call, as far as it can wait here.

    Attributes:
        ends_at: its deadline, the loop's time.
    """

    ends_at: float
    park_until: float | None

    @property
    def deadline_s(self) -> float:
        """How long it may take once it goes."""
        ...

    @property
    def wait_network_s(self) -> float:
        """How long it may wait; 0 for not at all."""
        ...

    @property
    def trace(self) -> CallTrace:
        """Follows it."""
        ...


class Parking:
    """Where the requests of one client wait. Belongs to one event loop.

    The network counts as absent where it is known to be, and from the moment an attempt found no way out and the
    machine has no route, until `changed` is called, a call comes through, or a look finds a route again.

    Args:
        has_route: says whether the machine has a way out; sends nothing.
        known: says whether there is a network as far as somebody knows who watches it.
        woke: told when a look wakes the device.
    """

    def __init__(
        self,
        has_route: Callable[[], bool],
        known: Callable[[], bool] = lambda: True,
        woke: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_route = has_route
        self._known = known
        self._woke = woke
        self._parked: dict[asyncio.Future[None], None] = {}
        self._look: asyncio.TimerHandle | None = None
        self.absent = False

    @property
    def available(self) -> bool:
        """There is a network, as far as is known."""
        return not self.absent and self._known()

    @property
    def parked(self) -> int:
        """Requests that wait."""
        return len(self._parked)

    def failed(self, error: BaseException) -> bool:
        """Learn from a call that failed; say whether that was because there is no network."""
        if not _no_way_out(error):
            return False
        if not self.absent and not self._has_route():
            self.absent = True
        return not self.available

    def changed(self) -> None:
        """The network is another one, or back: whoever waits goes."""
        self.absent = False
        self._release()

    async def wait(self, call: Waiting) -> None:
        """Wait until there is a network, as long as the call may; its deadline begins when this returns.

        Cancelled, nothing is left behind.

        Raises:
            ConnectError: there was none in time; `phase` is QUEUED and `maybe_delivered` False.
            QueueFull: too many wait already.
        """
        if self.available:
            return
        if len(self._parked) >= limits.PARKED_MAX:
            raise errors.QueueFull(
                f"{len(self._parked)} requests wait for the network already", phase=Phase.QUEUED, maybe_delivered=False
            )
        now = self._loop.time()
        if call.park_until is None:
            call.park_until = now + call.wait_network_s
        call.trace.enter(Phase.QUEUED)
        call.trace.note("no network: waits for it")
        future = self._loop.create_future()
        self._parked[future] = None
        self._plan_look()
        try:
            async with asyncio.timeout_at(call.park_until):
                await future
        except TimeoutError as error:
            raise errors.ConnectError(
                f"no network for {self._loop.time() - now:.3g} s", phase=Phase.QUEUED, maybe_delivered=False
            ) from error
        finally:
            self._parked.pop(future, None)
            if not self._parked and self._look is not None:
                self._look.cancel()
                self._look = None
        call.trace.note(f"the network is back after {self._loop.time() - now:.3g} s")
        call.ends_at = self._loop.time() + call.deadline_s

    async def again(self, call: Waiting, error: errors.TransportError) -> bool:
        """After a call has failed: wait for the network if that is what it lacked; say whether to ask again.

        Raises:
            ConnectError, QueueFull: see `wait`.
        """
        if error.maybe_delivered or not call.wait_network_s or not self.failed(error):
            return False
        await self.wait(call)
        return True

    def _plan_look(self) -> None:
        if self._look is None:
            self._look = self._loop.call_later(limits.PARK_LOOK_S, self._look_out)

    def _look_out(self) -> None:
        self._look = None
        self._woke()
        if self._has_route() and self._known():
            self.changed()
        elif self._parked:
            self._plan_look()

    def _release(self) -> None:
        for future in self._parked:
            if not future.done():
                future.set_result(None)

    def close(self) -> None:
        """Wait for nothing any more; also where the loop is closed."""
        with contextlib.suppress(RuntimeError):
            if self._look is not None:
                self._look.cancel()


def _no_way_out(error: BaseException) -> bool:
    """Say whether an attempt failed before anything could leave: no route, or no name server to be reached."""
    if isinstance(error, errors.ResolveError):
        return True
    return isinstance(error, errors.ConnectError) and getattr(error.__cause__, "errno", None) in NO_WAY_OUT
