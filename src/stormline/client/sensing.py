"""What a client notices of the network it is on, as samples for its level (`policy.level`).

Nothing is sent for it: handshakes, first bytes, bodies and the kernel's own figures tell, and so does silence while
something is owed.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Protocol

from stormline.core import limits, limits_level
from stormline.net.clock import time_of
from stormline.policy.level import Level, LevelBook, LevelEstimator, Quality, body_rate
from stormline.policy.shape import Pattern, RequestShape

if TYPE_CHECKING:
    from stormline.net.tcpinfo import TcpInfo
    from stormline.outbound.held import Held

_MAY_BE_SILENT: Final = frozenset({Pattern.LONG_POLL, Pattern.STREAM})
"""Here silence is no failure."""


_SAID_NO_S: Final = 0.5
"""What failed sooner was refused, by the peer or by this machine."""


class Waiting(Protocol):
    """A call, as far as its waiting goes; see `steering.Call`.

    Attributes:
        asked_at: the loop's time when its request had left; None before, and once the answer began.
        first_byte_s: from then to the head of an answer; None where none came yet.
    """

    asked_at: float | None
    first_byte_s: float | None

    @property
    def shape(self) -> RequestShape:
        """What it looks like."""
        ...


class Sensing:
    """Feeds the levels of one client's networks. Belongs to one event loop.

    Args:
        network_id: names the network it is on.
        calls: those under way, the longest running first.
        server_s: what the server of a request is known to need at a quantile, None for unknown.
        rtt_least_s: the shortest round trip to a host that was measured, None for none.
        signal: bars of the radio, 0 to 4, where the platform tells.

    Attributes:
        heard_at: the loop's time when the network last brought anything.
    """

    def __init__(
        self,
        network_id: Callable[[], str],
        calls: Iterable[Waiting],
        server_s: Callable[[RequestShape, float], float | None],
        rtt_least_s: Callable[[str], float | None],
        signal: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._time = time_of(asyncio.get_running_loop())
        self._network_id = network_id
        self._calls = calls
        self._server_s = server_s
        self._rtt_least_s = rtt_least_s
        self.signal = signal
        self._book = LevelBook()
        self._dials: dict[str, float] = {}
        self._begun: dict[Waiting, float] = {}
        self._arrived: dict[Waiting, None] = {}
        self._dark_at, self._dark_told_at = math.inf, -math.inf
        self._kernel_tells = False
        self.heard_at = -math.inf

    def quality(self) -> Quality:
        """Give the quality of the network at this moment."""
        now = self._time()
        return self._estimator(now).quality(now, silent_s=self._silent_s(now), signal=self.signal())

    def silent_s(self, now: float) -> float:
        """Give for how long nothing has come although something is owed, beyond what the servers may need."""
        return self._silent_s(now)

    def weak(self) -> Quality | None:
        """Give the quality where it is bad or poor, None elsewhere; asked for each call, so it is cheap."""
        now = self._time()
        quiet = (self._calls or self._dials) and now - self.heard_at >= limits_level.LEVEL_SILENCE_S
        if not (quiet or self._estimator(now).held.weak):
            return None
        quality = self.quality()
        return quality if quality.level.weak else None

    def carries(self) -> Level:
        """Give what the network would carry while it brings anything; see `Quality.carries`."""
        now = self._time()
        estimator = self._estimator(now)
        return estimator.held if estimator.age_s(now) <= limits_level.LEVEL_MEMORY_S else Level.UNKNOWN

    # -- what is noticed ----------------------------------------------------------------------------------------------
    def dialling(self, host: str) -> None:
        """A dial begins: a handshake is owed."""
        if len(self._dials) >= limits.TIMEOUT_HOSTS_MAX:
            self._dials.clear()
        self._dials.setdefault(host, self._time())

    def dialled(self, host: str, rtt_s: float | None, took_s: float) -> None:
        """One stands: its TCP handshake's round trip, where that is one, and how long it took with TLS."""
        now = self._time()
        self.heard(now)
        self._dials.pop(host, None)
        if rtt_s is not None:
            self._estimator(now).observe_round_trip(rtt_s, now, sent_at=now - took_s, signal=self.signal())

    def dial_failed(self, host: str, tried_s: float) -> None:
        """An address said no, or nothing: then the handshake is still owed, by whichever address is tried next."""
        if tried_s < _SAID_NO_S:
            self._dials.pop(host, None)

    def heard(self, at: float) -> None:
        """The network brought something at a moment of the loop's time: a dark spell is over."""
        if at <= self.heard_at:
            return
        if (
            at - self.heard_at >= limits_level.LEVEL_SILENCE_S
        ):  # else there is nothing to reckon, and this is done for each
            silent_s = self._silent_s(at)
            if silent_s >= limits_level.LEVEL_SILENCE_S:
                self._estimator(at).observe_silence(silent_s, at)
        self.heard_at, self._dark_at = at, math.inf

    def changed(self) -> None:
        """The device is on another network, or back on one: what the last one was silent about says nothing of it."""
        self._dials.clear()
        self.heard_at, self._dark_at = self._time(), math.inf

    def back(self, rtt_s: float | None) -> None:
        """A network that calls had left is back; `rtt_s` is its handshake's. Nobody waited meanwhile."""
        self.changed()
        if rtt_s is not None:
            self._estimator(self.heard_at).observe_round_trip(rtt_s, self.heard_at)

    def looked(self, call: Waiting, held: "Held", info: "TcpInfo | None") -> None:
        """The connection of a call that waits was looked at: what it and the kernel heard are signs of life.

        Where all that was sent has been acknowledged the path owes nothing: the server is waited for.
        """
        at = held.heard_at
        if info is not None:
            self._kernel_tells = True
            if info.ack_age_s is not None:
                at = max(at, self._time() - info.ack_age_s)
            if info.unacked_bytes == 0 and not info.notsent_bytes:
                self._arrived[call] = None
            else:
                self._arrived.pop(call, None)
        self.heard(at)

    def entered(self, call: Waiting) -> None:
        """A call begins."""
        self._begun[call] = self._time()

    def left(self, call: Waiting) -> None:
        """A call is over. Where it ended in silence the silence goes on, until something is heard."""
        now = self._time()
        if now - self.heard_at >= limits_level.LEVEL_SILENCE_S:
            silent_s = self._silent_s(now)
            if silent_s >= limits_level.LEVEL_SILENCE_S:
                self._dark_at, self._dark_told_at = now - silent_s, now
        self._begun.pop(call, None)
        self._arrived.pop(call, None)

    def answered(
        self,
        call: Waiting,
        held: "Held",
        *,
        first_byte_s: float | None,
        body_s: float,
        answer_bytes: int,
        server_s: float | None,
        queued: bool,
    ) -> None:
        """An answer came whole.

        The wait for its first byte less the server's time is a round trip and what was lost on it. Where the server
        does not tell its time, only what its usual slowest does not explain is the network's. The kernel's smoothed
        round trip is the least, else the shortest that was measured: a server's word is not exact.
        """
        now = self._time()
        estimator, signal = self._estimator(now), self.signal()
        if call.shape.pattern in _MAY_BE_SILENT:
            return
        rate = body_rate(answer_bytes, body_s, estimator.rtt_s(now))
        if rate is not None:
            estimator.observe_rate(
                rate, now, sent_at=now - body_s - (first_byte_s or 0.0), queued=queued, signal=signal
            )
        if first_byte_s is None:
            return
        info = held.tcp_info()
        kernel_s = None if info is None else info.rtt_s
        least_s = self._rtt_least_s(call.shape.host) if kernel_s is None else kernel_s
        server = self._server_s(call.shape, 0.95) if server_s is None else server_s
        trip_s = max(least_s or 0.0, first_byte_s - (server or 0.0))
        estimator.observe_round_trip(
            min(first_byte_s, trip_s),
            now,
            sent_at=now - body_s - first_byte_s,
            queued=queued,
            signal=signal,
        )

    # -- inside -------------------------------------------------------------------------------------------------------
    def _estimator(self, now: float) -> LevelEstimator:
        return self._book.at(self._network_id(), now)

    def _silent_s(self, now: float) -> float:
        """Give for how long nothing has come although something is owed, beyond what the servers may need.

        Owed are answers from when their requests had left; connections, where a call waits for one, from when the call
        began and a dial too; and what the last call that ended in silence had waited for.
        """
        dark = now - self._dark_told_at <= limits_level.LEVEL_MEMORY_S
        owed_at, waiting_at = self._dark_at if dark else math.inf, math.inf
        for call in itertools.islice(self._calls, limits.QUEUE_CALLS_MAX):
            if call.shape.pattern in _MAY_BE_SILENT:
                continue
            if call in self._arrived:
                continue
            if call.asked_at is not None:
                owed_at = min(owed_at, call.asked_at + self._allowance_s(call.shape))
            elif call.first_byte_s is None:
                waiting_at = min(waiting_at, self._begun.get(call, now))
        if self._dials:
            owed_at = min(owed_at, max(waiting_at, min(self._dials.values())))
        return max(0.0, now - max(owed_at, self.heard_at))

    def _allowance_s(self, shape: RequestShape) -> float:
        usual_s = self._server_s(shape, 0.95) or 0.0
        # Where the kernel tells, the look at the connection shows that the question has arrived.
        return usual_s if self._kernel_tells else limits_level.LEVEL_SERVER_S + 2.0 * usual_s
