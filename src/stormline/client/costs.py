"""What a client costs its device: bytes, connections, and how often it woke it up for nothing that anybody asked."""

from collections.abc import Callable
from typing import NamedTuple

from stormline.core.values import Address
from stormline.net.meter import Meter
from stormline.net.stream import TcpStream
from stormline.outbound.race import OpenTcp
from stormline.policy.extras import ExtraBytes


class Costs(NamedTuple):
    """Counts since a client began.

    Attributes:
        bytes_up: on all its sockets, TLS included; its names are resolved by the system and not counted.
        bytes_down: the same, received.
        connections: made, by races and probes too.
        handshakes: of TLS that were begun.
        wakeups: timers of ours that fired while no call was under way: heartbeats, returns of the long connection,
            looks for a network, connections that expired, reports.
        hedges: attempts made beside one that was silent.
        hedge_bytes_up: of requests that such attempts sent again.
        joined: requests that were not sent because one like them was under way.
        extra_bytes: what was made beside something else on metered networks, as it was reckoned: hedges, second lanes,
            second handshakes.
        extras_refused: how often that was not made for want of bytes.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    connections: int = 0
    handshakes: int = 0
    wakeups: int = 0
    hedges: int = 0
    hedge_bytes_up: int = 0
    joined: int = 0
    extra_bytes: int = 0
    extras_refused: int = 0


class Extras:
    """Gives bytes to what is made beside something else: all there are, or a share where the network is metered.

    Args:
        meter: of the way out.
        metered: says whether its bytes cost money now.

    Attributes:
        share: of a metered network; one for all that the way leads to, so that a change gives nothing anew.
    """

    __slots__ = ("_meter", "_metered", "share")

    def __init__(self, meter: Meter, metered: Callable[[], bool]) -> None:
        self._meter = meter
        self._metered = metered
        self.share = ExtraBytes()

    def entered(self) -> None:
        """The way leads to another network: what was carried before does not count there."""
        self.share.start(self._meter.bytes_up + self._meter.bytes_down)

    def take(self, cost_bytes: int) -> bool:
        """Ask for bytes."""
        if not self._metered():
            return True
        self.share.carried(self._meter.bytes_up + self._meter.bytes_down)
        return self.share.take(cost_bytes)


class Counting:
    """Counts for one client.

    Args:
        busy: says whether a call is under way.

    Attributes:
        meters: of its sockets, one for each way out that it has used.
        extras: what is made beside something else, as many.
    """

    __slots__ = ("_busy", "extras", "hedge_bytes_up", "hedges", "meters", "wakeups")

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self.meters = [Meter()]
        self.extras: list[Extras] = []
        self.wakeups = self.hedges = self.hedge_bytes_up = 0

    def share(self, meter: Meter, metered: Callable[[], bool]) -> Extras:
        """Give what gives bytes to what is made beside something else over one way out."""
        extras = Extras(meter, metered)
        self.extras.append(extras)
        return extras

    def woke(self) -> None:
        """A timer of ours fired."""
        if not self._busy():
            self.wakeups += 1

    def hedged(self, request_bytes: int) -> None:
        """An attempt is made beside one that is silent."""
        self.hedges += 1
        self.hedge_bytes_up += request_bytes

    def measured(self, open_tcp: OpenTcp, meter: Meter | None = None) -> OpenTcp:
        """Give `open_tcp` with its streams measured, by a meter of `meters`; the first where it is None."""
        meter = self.meters[0] if meter is None else meter

        async def opened(address: Address) -> TcpStream:
            stream = await open_tcp(address)
            meter.connections += 1
            stream.meter = meter
            return stream

        return opened

    def read(self, *, joined: int) -> Costs:
        """Give the counts as they are now."""
        meters = self.meters
        return Costs(
            bytes_up=sum(each.bytes_up for each in meters),
            bytes_down=sum(each.bytes_down for each in meters),
            connections=sum(each.connections for each in meters),
            handshakes=sum(each.handshakes for each in meters),
            wakeups=self.wakeups,
            hedges=self.hedges,
            hedge_bytes_up=self.hedge_bytes_up,
            joined=joined,
            extra_bytes=sum(each.share.bytes_taken for each in self.extras),
            extras_refused=sum(each.share.refused for each in self.extras),
        )
