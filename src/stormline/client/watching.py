"""Looks after answers that are silent: for hours, as event streams may be, or in the middle of a body."""

import asyncio
from collections.abc import Callable
from typing import Final

from stormline.client.steering import Steering
from stormline.core import limits
from stormline.outbound.held import Held
from stormline.outbound.pool import HttpPool
from stormline.policy.stall import Action


class StreamWatch:
    """Sees to it that an answer which may be silent for hours is not waited for on a connection that is dead.

    Silence is no failure of a stream; but a connection that does not answer a ping is closed, which ends it.
    """

    __slots__ = ("_held", "_loop", "_pool", "_steering", "_timer")

    def __init__(self, steering: Steering, pool: HttpPool, held: Held) -> None:
        self._loop = asyncio.get_running_loop()
        self._steering = steering
        self._pool = pool
        self._held = held
        self._timer = self._loop.call_later(limits.STALL_LIVENESS_S, self._look)

    def _look(self) -> None:
        held = self._held
        decision = self._steering.look_idle(held)
        if decision.action is Action.PROBE:
            held.probe()
        elif decision.action is Action.GIVE_UP:
            stream = held.stream
            self._pool.leave(lambda each: each is stream)
            return
        asked = held.probe_age_s(self._loop.time()) is not None
        again_s = limits.HEARTBEAT_ANSWER_S if asked else decision.look_again_s
        self._timer = self._loop.call_later(again_s, self._look)

    def end(self) -> None:
        """The stream is over."""
        self._timer.cancel()


_SOON_S: Final = 0.001
"""A look that is due so soon is due."""


class BodyWatch:
    """Tells a server that has stopped in the middle of a body from a slow or dark link, on HTTP/2.

    What a server has sent comes before its answer to a later ping. Where that answer is there and no more of the body
    came, none of it is on its way, however slow the link is: it may be asked for elsewhere.

    Args:
        gap_s: silence that is a matter of course.
        held: gives the connection that the body comes over.
        since: gives the loop's time since when somebody waits in vain for the next piece; None: nobody does.
        stopped: called where the server has stopped; the body then fails, and may go on elsewhere.
    """

    __slots__ = ("_gap_s", "_held", "_loop", "_since", "_stopped", "_task", "_timer")

    def __init__(
        self,
        gap_s: float,
        held: Callable[[], Held | None],
        since: Callable[[], float | None],
        stopped: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._gap_s = gap_s
        self._held = held
        self._since = since
        self._stopped = stopped
        self._task: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(gap_s, self._look)

    def _look(self) -> None:
        since = self._since()
        left_s = self._gap_s if since is None else self._gap_s - (self._loop.time() - since)
        if since is None or left_s > _SOON_S:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            self._task = self._loop.create_task(self._ask(since), name="ask whether a body's server lives")

    async def _ask(self, since: float) -> None:
        held = self._held()
        shared = None if held is None else held.shared
        if shared is not None and await shared.fence(limits.HEARTBEAT_ANSWER_S) and self._since() == since:
            self._stopped()
        self._timer = self._loop.call_later(self._gap_s, self._look)

    def end(self) -> None:
        """The body is over."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
