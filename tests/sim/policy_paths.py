"""A small model of a path for policies: one queue each way, losses mended by doubling time-outs, dark spells.

A pure loop over virtual time, no packets on any loop: an exchange is reckoned whole when it begins. What it is given:
rates as functions of time, so that a dead spot is a rate and a blackout is a rate of zero.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

STEP_S = 0.01
SEGMENT_BYTES = 1400
NEVER_S = 600.0


def steady(bytes_per_s: float) -> Callable[[float], float]:
    return lambda _now: bytes_per_s


@dataclass
class Exchange:
    start_s: float
    request_bytes: int
    answer_bytes: int
    sent_s: float = 0.0
    """The kernel has taken the last byte; it takes a small request at once."""
    first_s: float = NEVER_S
    last_s: float = NEVER_S
    queue_requests: int = 0
    queue_bytes_up: int = 0
    queue_bytes_down: int = 0


@dataclass
class Path:
    """One access link.

    Attributes:
        up, down: bytes per second at a moment; 0 is dark, and what is sent then is lost.
        trip_s: round trip of an empty link.
        loss: chance of each packet to be lost.
        server_s: what the server needs.
    """

    up: Callable[[float], float]
    down: Callable[[float], float]
    trip_s: float
    loss: float
    chance: random.Random
    server_s: float = 0.02
    up_free_s: float = 0.0
    down_free_s: float = 0.0
    exchanges: list[Exchange] = field(default_factory=list)

    def _serve(self, begin_s: float, size: int, rate: Callable[[float], float]) -> float:
        """Give when `size` bytes that take their turn at `begin_s` are through."""
        now, left = begin_s, float(size)
        while left > 0.0 and now < begin_s + NEVER_S:
            carried = rate(now)
            if carried * STEP_S >= left:
                return now + left / carried
            left -= carried * STEP_S
            now += STEP_S
        return now

    def _recover(self, now: float, rate: Callable[[float], float]) -> float:
        """Give when a packet sent at `now` gets on its way: losses and dark spells cost doubling time-outs."""
        rto = max(0.2, 1.5 * self.trip_s + 0.2)
        while self.chance.random() < self.loss or rate(now) <= 0.0:
            now += rto
            rto = min(60.0, 2 * rto)
            if now > NEVER_S * 2:
                break
        return now

    def exchange(self, start_s: float, request_bytes: int, answer_bytes: int) -> Exchange:
        """Reckon one request over a connection that stands; calls come in the order of their start."""
        made = Exchange(start_s, request_bytes, answer_bytes, sent_s=start_s)
        for each in self.exchanges:
            if each.last_s > start_s:
                made.queue_requests += 1
                made.queue_bytes_down += each.answer_bytes
        moved = self._recover(start_s, self.up)
        through = self._serve(max(moved, self.up_free_s), request_bytes + 60, self.up)
        self.up_free_s = through
        asked = through + self.trip_s / 2 + self.server_s
        turn = max(self._recover(asked, self.down), self.down_free_s)
        first = self._serve(turn, min(answer_bytes, SEGMENT_BYTES), self.down)
        last = first
        left = answer_bytes - SEGMENT_BYTES
        if left > 0:
            # A lost packet in the body is mended by a fast retransmission, now and then by a time-out.
            last = self._serve(first, left, self.down)
            if self.chance.random() < 1.0 - (1.0 - self.loss) ** (left / SEGMENT_BYTES):
                last += 1.5 * self.trip_s
        self.down_free_s = max(self.down_free_s, last)
        made.first_s, made.last_s = first + self.trip_s / 2, last + self.trip_s / 2
        self.exchanges.append(made)
        return made

    def connect(self, now: float) -> float:
        """Give how long a handshake takes that begins now, infinite-like where the path is dark for good."""
        rto, begin = 1.0, now
        while self.chance.random() < self.loss or self.up(now) <= 0.0:
            now += rto
            rto *= 2
            if now - begin > NEVER_S:
                return NEVER_S
        return now - begin + self.trip_s
