"""Finds out that a link is half-open by the first call that is not answered over it."""

import asyncio
from typing import TYPE_CHECKING

from stormline.client.link import Link
from stormline.core import limits_heartbeat
from stormline.policy import halfopen

if TYPE_CHECKING:
    from collections.abc import Callable


class Doubting:
    """Has links asked for a sign of life while calls wait over them in silence: one timer for each such link.

    Attributes:
        stalled: told of a link that was asked and is as silent as before, while its calls still wait.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.stalled: Callable[[Link], None] = lambda link: None
        self._timers: dict[Link, asyncio.TimerHandle] = {}

    def called(self, link: Link) -> None:
        """A call was put on a link."""
        if link.closed is not None:
            return
        now, timer = self._loop.time(), self._timers.get(link)
        if timer is not None:
            if timer.when() <= now + limits_heartbeat.DOUBT_FIRST_S:
                return
            timer.cancel()
        self._watch(link, now, 0)

    def _watch(self, link: Link, since: float, asked: int) -> None:
        info = link.stream.tcp_info()
        due = since + halfopen.doubt_after_s(None if info is None else info.rtt_s, asked)
        self._timers[link] = self._loop.call_at(due, self._look, link, since, asked)

    def _look(self, link: Link, since: float, asked: int) -> None:
        del self._timers[link]
        if link.closed is not None or not link.machine.open_calls():
            return
        heard_at = link.stream.heard_at
        if heard_at > since:
            self._watch(link, heard_at, asked)
            return
        info = link.stream.tcp_info()
        if info is None:
            link.check()
        else:
            link.check(halfopen.answer_within_s(info.rtt_s, info.unacked_bytes, info.ack_age_s))
        due = self._loop.time() + halfopen.beside_after_s(None if info is None else info.rtt_s)
        self._timers[link] = self._loop.call_at(due, self._look_again, link, since, asked)

    def _look_again(self, link: Link, since: float, asked: int) -> None:
        """See whether it is still silent, a moment after it was asked."""
        del self._timers[link]
        if link.closed is not None or not link.machine.open_calls():
            return
        info = link.stream.tcp_info()
        if link.stream.heard_at <= since and (info is None or halfopen.stalls(info.unacked_bytes, info.ack_age_s)):
            self.stalled(link)
        if asked + 1 < limits_heartbeat.DOUBTS_MAX:
            self._watch(link, self._loop.time(), asked + 1)

    def ended(self, link: Link) -> None:
        """A link is over."""
        timer = self._timers.pop(link, None)
        if timer is not None:
            timer.cancel()
