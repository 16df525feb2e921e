"""The heartbeat of a client's long connection: the policy is asked for its pace, and told how each silence ended."""

import asyncio
import math
from typing import TYPE_CHECKING

from stormline.client.doubting import Doubting
from stormline.client.link import Link
from stormline.core import limits
from stormline.core.codes import Code
from stormline.policy.heartbeat import Heartbeats
from stormline.wire import events as e

if TYPE_CHECKING:
    from stormline.client.steering import Steering


class Beating:
    """Keeps the pace of the links of one `LongLine`.

    Attributes:
        doubting: finds out that a link has fallen silent.
        cap_s: longest silence that the user's activity allows; a gateway may ask for less.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._time = loop.time
        self.doubting = Doubting(loop)
        self._steering: Steering | None = None
        self._own = Heartbeats()
        self.cap_s = limits.HEARTBEAT_S

    def follow(self, steering: "Steering") -> None:
        """Share what a client knows of its networks, from now on."""
        self._steering = steering

    def heartbeats(self) -> Heartbeats:
        """Give what is known of networks."""
        return self._own if self._steering is None else self._steering.strategy.heartbeats

    def network(self) -> str:
        """Give the id of the network that the client is on; what was kept of it is there."""
        if self._steering is None:
            return ""
        self._steering.enter_network()
        return self._steering.network.id

    def _learned(self) -> None:
        if self._steering is not None:
            self._steering.learned()

    def silence_s(self) -> float:
        """Give the silence after which to ping, from now on."""
        return self.heartbeats().plan(self.network(), self._time(), self.cap_s)

    def start(self, link: Link) -> None:
        """A link is begun: follow its silences."""
        link.survived = lambda silence_s: self._survived(link, silence_s)
        link.set_heartbeat(self.silence_s())

    def _survived(self, link: Link, silence_s: float) -> None:
        if _is_short(link):
            return
        heartbeats, network_id, now = self.heartbeats(), self.network(), self._time()
        if heartbeats.observe(network_id, silence_s, now, alive=True):
            planned_s = heartbeats.plan(network_id, now, self.cap_s)
            if not math.isclose(planned_s, link.heartbeat_s):
                link.set_heartbeat(planned_s)
                self._learned()

    def called(self, link: Link) -> None:
        """A call was put on a link."""
        self.doubting.called(link)

    def welcomed(self, link: Link) -> None:
        """A session stands: what was lost just before it was lost on a network that lives."""
        if self.heartbeats().dialled(self.network(), self._time(), worked=True):
            self._learned()
        link.set_heartbeat(self.silence_s())

    def ended(self, link: Link, closed: e.Closed) -> None:
        """A link is over. One that its peer closed says nothing, nor does one that we closed for another reason."""
        self.doubting.ended(link)
        if link.welcome is None:
            self.unreachable()
        elif not _is_short(link) and not closed.by_peer and (closed.lost or closed.code == Code.HEARTBEAT_TIMEOUT):
            now = self._time()
            self.heartbeats().observe(self.network(), link.silence.lost_s(now), now, alive=False)

    def unreachable(self) -> None:
        """No gateway could be reached: it was the network that was dead."""
        self.heartbeats().dialled(self.network(), self._time(), worked=False)


def _is_short(link: Link) -> bool:
    """Say whether a link is never silent by itself: then it says nothing of what silence a network stands."""
    return link.carrier == "sl-short"
