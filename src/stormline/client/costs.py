"""What a client costs its device: bytes, connections, and how often it woke it up for nothing that anybody asked."""

from collections.abc import Callable
from typing import NamedTuple

from stormline.core.values import Address
from stormline.net.meter import Meter
from stormline.net.stream import TcpStream
from stormline.outbound.race import OpenTcp


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
    """

    bytes_up: int = 0
    bytes_down: int = 0
    connections: int = 0
    handshakes: int = 0
    wakeups: int = 0
    hedges: int = 0
    hedge_bytes_up: int = 0
    joined: int = 0


class Counting:
    """Counts for one client.

    Args:
        busy: says whether a call is under way.

    Attributes:
        meters: of its sockets, one for each way out that it has used.
    """

    __slots__ = ("_busy", "hedge_bytes_up", "hedges", "meters", "wakeups")

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self.meters = [Meter()]
        self.wakeups = self.hedges = self.hedge_bytes_up = 0

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
        )
