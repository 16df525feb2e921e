"""Whether datagrams get to a QUIC server and back: how many, and how fast.

Each asks for the versions that the server speaks (`wire.quic`), which costs neither side a handshake.
"""

import asyncio
import contextlib
import errno
import socket
from typing import Final, NamedTuple

from stormline.core import limits_diagnosis as limits
from stormline.core.clock import Rng
from stormline.core.values import Address
from stormline.net.icmp import family_of, target_of
from stormline.wire import quic

_RECEIVE_BYTES: Final = 2048


class QuicPing(NamedTuple):
    """What came back.

    Attributes:
        sent: datagrams that went out.
        answered: those that were answered.
        rtt_s: the shortest round trip; None where none was answered.
        versions: of QUIC, as the server told them.
        refused: the machine says that nobody listens there.
        why_not: why none could be sent; empty where they could.
    """

    sent: int
    answered: int
    rtt_s: float | None
    versions: frozenset[int] = frozenset()
    refused: bool = False
    why_not: str = ""


async def ping(address: Address, rng: Rng, rtt_s: float = 0.0) -> QuicPing:
    """Ask one address, one datagram after the other, so that they make no queue of their own.

    Ends after `limits_diagnosis.DIAGNOSIS_QUIC_ENOUGH` answers with nothing lost. Never raises; safe to cancel.

    Args:
        address: an IP literal and a port.
        rng: for the ids by which answers are known.
        rtt_s: round trip of TCP to the same machine.
    """
    try:
        with socket.socket(family_of(address.host), socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.connect(target_of(*address))
            return await _Asking(sock, rng).all(rtt_s)
    except OSError as error:
        return QuicPing(0, 0, None, why_not=error.strerror or str(error))


class _Asking:
    """The questions to one address, and their answers."""

    def __init__(self, sock: socket.socket, rng: Rng) -> None:
        self._sock = sock
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._asked: dict[bytes, tuple[bytes, float]] = {}  # source id: destination id, when
        self._trips: dict[bytes, float] = {}
        self._versions: set[int] = set()
        self._refused = False
        self._why = ""
        self._heard = asyncio.Event()

    async def all(self, rtt_s: float) -> QuicPing:
        """Ask until enough is known."""
        slow = rtt_s >= limits.DIAGNOSIS_SLOW_RTT_S
        count = limits.DIAGNOSIS_QUIC_ENOUGH if slow else limits.DIAGNOSIS_QUIC_DATAGRAMS
        pause_s = min(max(1.5 * rtt_s, limits.DIAGNOSIS_QUIC_PAUSE_S), limits.DIAGNOSIS_QUIC_PAUSE_S_MAX)
        asked, trips = self._asked, self._trips
        listener = self._loop.create_task(self._listen(), name="QUIC answers")
        try:
            for number in range(1, count + 1):
                self._ask()
                await self._hear(pause_s)
                if (self._refused and not trips) or limits.DIAGNOSIS_QUIC_ENOUGH <= number == len(trips):
                    break
            until = self._loop.time() + limits.DIAGNOSIS_QUIC_S
            while len(trips) < len(asked) and not self._refused and self._loop.time() < until:
                await self._hear(until - self._loop.time())
        finally:
            listener.cancel()
            await asyncio.wait({listener})
        shortest_s = min(trips.values(), default=None)
        why = "" if asked else self._why
        return QuicPing(len(asked), len(trips), shortest_s, frozenset(self._versions), self._refused, why)

    def _ask(self) -> None:
        drawn = self._rng.token_bytes(2 * quic.ID_BYTES)
        destination, source = drawn[: quic.ID_BYTES], drawn[quic.ID_BYTES :]
        try:
            self._sock.send(quic.question(destination, source))
            self._asked[source] = destination, self._loop.time()
        except OSError as error:
            self._refused |= error.errno == errno.ECONNREFUSED
            self._why = error.strerror or str(error)

    async def _listen(self) -> None:
        while True:
            try:
                data = await self._loop.sock_recv(self._sock, _RECEIVE_BYTES)
            except OSError as error:
                self._refused |= error.errno == errno.ECONNREFUSED
                self._heard.set()
                await asyncio.sleep(limits.DIAGNOSIS_POLL_S)
                continue
            now = self._loop.time()
            for source, (destination, at) in self._asked.items():
                told = None if source in self._trips else quic.read_answer(data, destination, source)
                if told is not None:
                    self._trips[source] = now - at
                    self._versions.update(told)
                    self._heard.set()

    async def _hear(self, longest_s: float) -> None:
        """Wait for the next answer, so long at most."""
        self._heard.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._heard.wait()
