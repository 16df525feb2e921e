"""Looks after an answer that may be silent for hours."""

import asyncio

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
