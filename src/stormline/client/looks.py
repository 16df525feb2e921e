"""When lanes are looked at for the first time: one timer for all of them, as almost none lives to see its look."""

import asyncio
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from stormline.core import limits
from stormline.net.clock import time_of

L = TypeVar("L", bound=Hashable)
"""A lane."""


class FirstLooks(Generic[L]):
    """Calls back once for each lane that is still on its way `limits.LOOK_FIRST_S` after it was put on a connection.

    Args:
        look: called with the lane.
    """

    __slots__ = ("_due", "_look", "_loop", "_time", "_timer")

    def __init__(self, look: Callable[[L], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._time = time_of(self._loop)
        self._look: Final = look
        self._due: dict[L, float] = {}  # in the order of their times, as all wait equally long
        self._timer: asyncio.TimerHandle | None = None

    def add(self, lane: L) -> None:
        """Look at a lane in a while."""
        due = self._time() + limits.LOOK_FIRST_S
        self._due[lane] = due
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._time_came)

    def discard(self, lane: L) -> None:
        """It is over."""
        self._due.pop(lane, None)

    def _time_came(self) -> None:
        now = self._time()
        self._timer = None
        for lane in [lane for lane, due in self._due.items() if due <= now]:
            if self._due.pop(lane, None) is not None:
                self._look(lane)
        if self._due and self._timer is None:
            self._timer = self._loop.call_at(next(iter(self._due.values())), self._time_came)

    def close(self) -> None:
        """Look at nothing any more."""
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
