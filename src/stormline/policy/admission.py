"""How many requests may be in flight to one host at once, and who goes next where more want to.

    gate = admission.gate(host)
    if not gate.enter():                             # the usual case: there is room
            ticket = admission.queue(gate, urgency, now)  # then: wait until it is granted
    ...
    gate.observe(level, Verdict.GOOD, began_at, now)  # what became of the attempt
    called = admission.leave(gate, now)               # whose waiting ends now

A host begins with more room than a healthy one ever needs (`limits.ADMISSION_FULL`), so nobody waits and nothing is
reckoned but a count. Room shrinks on three signs, and each has a floor of its own:

- **It says so**: 503 or 429. Multiplicative decrease, down to one. Only where failures are more frequent with more in
  flight: a server that fails one request in five whatever we do is not helped by asking it one at a time. So each host
  has a small table of failures by requests in flight.
- **It does not answer**, while it answers others: the same, but no lower than `limits.ADMISSION_SILENT_FLOOR`.
- **Answers take longer the more are in flight**: what is queued in the path or the server is in flight times (1 - least
  latency / latency), the estimate of TCP Vegas (Brakmo and Peterson 1995) as Netflix's concurrency-limits uses it for
  requests. Here it only takes room above `limits.ADMISSION_GRADIENT_FLOOR`: latencies of mobile networks vary by
  themselves.

Decrease and growth are TCP's (RFC 5681): one decrease for all attempts that began before it; afterwards quickly up to
the number that failed, then one by one, later after each failure. A weak link bounds the whole beside that
(`weak_limit`): what it cannot carry waits here, in order, instead of in its queue.

Who waits is ordered by the moment it came plus its urgency (RFC 9218, 0 the most urgent) times
`limits.ADMISSION_AGE_S`: within a class first come, first served; a class passes another by that much and no more, so
nobody starves.
"""

import enum
import heapq
import itertools
import math
from typing import Any, Final

from stormline.core import limits
from stormline.policy.estimate import sound
from stormline.policy.recent import RecentTable

KEY: Final = 0
NORMAL: Final = 3
BACKGROUND: Final = 7
URGENCIES: Final = {"key": KEY, "normal": NORMAL, "background": BACKGROUND}
"""Names of urgencies; 3 is RFC 9218's default, and it keeps 7 for background work (section 4.1)."""

DECREASE: Final = 0.7
"""What is left of the number at which it failed. CUBIC's factor (RFC 9438 section 4.6): Reno's half would leave a host
that takes three with one."""
HOLD_S: Final = 4.0
"""How long after a decrease room does not grow; doubles while growth is punished, up to `HOLD_S_MAX`."""
HOLD_S_MAX: Final = 128.0
ROUNDS: Final = 2
"""Successes for each place of the room before it grows."""
SHARE_BELOW: Final = 2.0
"""Failures depend on what is in flight where their share is this many times the share at half as much."""
SHARE_SLACK: Final = 0.02
"""And by this more: a share measured on few."""
LEVELS_EXACT: Final = 8
"""Up to here each number in flight has a row of its own in the table of failures, then each doubling."""
LEVELS: Final = 14
ROW_MAX: Final = 64.0
"""Results that a row holds; then it is halved, so that it forgets."""
ROW_KNOWN: Final = 5.0
"""Results from which a row says anything."""
QUEUED_MAX: Final = 8.0
"""Requests that may be queued, by latency, before that is too many (Netflix's beta is of this size at such limits)."""
GRADIENT_RUN: Final = 3
"""Samples in a row that must say so, `GRADIENT_PAUSE_S` apart: the end of a dark spell is not one."""
GRADIENT_PAUSE_S: Final = 0.5
LATE_SHARE: Final = 0.8
"""Of what an answer usually takes; with less time than that left it cannot come."""
USUAL_GAIN: Final = 0.1
BASE_S: Final = 60.0
"""Age at which the least latency is measured anew."""
WEAK_BDPS: Final = 3.0
"""Room on a weak link, in products of its bandwidth and delay: it is never idle, and its queue is short."""
REQUEST_BYTES: Final = 1400.0
"""What one small request and its answer put on a link; a larger one only makes the room too large."""


class Verdict(enum.Enum):
    """What became of an attempt, as far as the host's room goes."""

    GOOD = "good"
    """It was answered."""
    REFUSED = "refused"
    """It was answered 503 or 429."""
    SILENT = "silent"
    """It was not answered in its time, by a host that answers others."""
    UNKNOWN = "unknown"
    """Cancelled, or failed in a way that says nothing of load."""


class Ticket:
    """A place in the line.

    Attributes:
        urgency: 0 to 7, as RFC 9218's.
        since: when it came, monotonic seconds.
        by: its deadline.
        granted: it may go, and is counted as in flight.
        late: it cannot be answered by then any more, and is out of the line.
        given_up: who held it is gone.
        payload: the waiter's own.
    """

    __slots__ = ("by", "given_up", "granted", "late", "order", "payload", "since", "urgency")

    def __init__(self, urgency: int, since: float, number: int, by: float = math.inf) -> None:
        self.urgency = urgency
        self.since = since
        self.order = (since + urgency * limits.ADMISSION_AGE_S, number)
        self.by = by
        self.granted = self.late = self.given_up = False
        self.payload: Any = None

    def __lt__(self, other: "Ticket") -> bool:
        return self.order < other.order


class Gate:
    """One host's room.

    Attributes:
        host: which.
        in_flight: requests, lanes beside one included.
        background: of them, those of urgency 7.
        room: how many may be in flight now.
        refusing: the room is small because the host said that it has too much to do.
        waiting: how many wait.
        answered_at: when an attempt was last answered well, monotonic seconds.
        usual_s: what such an attempt takes, smoothed.
    """

    __slots__ = ("_aimd", "_failed", "_full", "_heap", "_total", "answered_at", "background", "host", "in_flight",
                 "refusing", "room", "usual_s", "waiting")  # fmt: skip

    def __init__(self, host: str) -> None:
        self.host = host
        self.in_flight = self.background = self.waiting = 0
        self.room = limits.ADMISSION_FULL
        self.refusing = False
        self.answered_at = -math.inf
        self.usual_s = 0.0
        self._full = limits.ADMISSION_FULL  # as much as the link lets
        self._heap: list[Ticket] = []
        self._total: list[float] | None = None  # attempts by number in flight; made at the first failure's
        self._failed: list[float] | None = None
        self._aimd: _Aimd | None = None  # None while nothing ever went wrong

    @property
    def limited(self) -> bool:
        """It has less room than a healthy host has."""
        return self.room < limits.ADMISSION_FULL

    def enter(self, urgency: int = NORMAL) -> bool:
        """Take a place where there is one and nobody waits."""
        if self.in_flight >= self.room or self.waiting:
            return False
        if urgency == BACKGROUND:
            if not self._room_for_background():
                return False
            self.background += 1
        self.in_flight += 1
        return True

    @property
    def may_beside(self) -> bool:
        """Another attempt may run beside one that is silent: beyond the room where that is a guess, else within it."""
        return not self.refusing or self.in_flight < self.room

    def _room_for_background(self) -> bool:
        """Background work leaves half of a room that is not whole to the others."""
        return self.room >= limits.ADMISSION_FULL or self.background < max(1, self.room // 2)

    # -- the line -----------------------------------------------------------------------------------------------------
    def add(self, ticket: Ticket) -> None:
        """Put a ticket into the line."""
        heapq.heappush(self._heap, ticket)
        self.waiting += 1

    def drop(self, ticket: Ticket) -> None:
        """Its holder waits no longer; one that was granted gives its place back by `leave`."""
        if ticket.granted or ticket.late or ticket.given_up:
            return
        ticket.given_up = True
        self.waiting -= 1
        while self._heap and self._heap[0].given_up:
            heapq.heappop(self._heap)
        if len(self._heap) > 2 * self.waiting + 8:  # those in the middle
            self._heap = [each for each in self._heap if not each.given_up]
            heapq.heapify(self._heap)

    def serve(self, now: float) -> list[Ticket]:
        """Grant what there is room for, in order; give what is granted, and what is `late` then.

        Who could not be answered in time any more does not go: where more is asked than a host can do, all would wait
        until just before their deadlines, and then cost it work for nobody.
        """
        granted: list[Ticket] = []
        hopeless = now + LATE_SHARE * self.usual_s
        aside: list[Ticket] = []
        while self.waiting > len(aside) and self.in_flight < self.room:
            ticket = heapq.heappop(self._heap)
            if ticket.given_up:
                continue
            if ticket.urgency == BACKGROUND and not self._room_for_background():
                aside.append(ticket)
                continue
            self.waiting -= 1
            if ticket.by < hopeless:
                ticket.late = True
                granted.append(ticket)
                continue
            ticket.granted = True
            self.in_flight += 1
            self.background += ticket.urgency == BACKGROUND
            granted.append(ticket)
        for ticket in aside:
            heapq.heappush(self._heap, ticket)
        return granted

    # -- how much room ------------------------------------------------------------------------------------------------
    def bound(self, full: int) -> None:
        """Set the most room that the link lets it have."""
        self._full = full
        self._set()

    def _set(self) -> None:
        aimd = self._aimd
        self.room = self._full if aimd is None else min(self._full, aimd.limit)
        self.refusing = aimd is not None and aimd.refused and aimd.limit < limits.ADMISSION_FULL

    def observe(self, level: int, verdict: Verdict, began_at: float, now: float) -> None:
        """Learn from an attempt that ended.

        Args:
            level: in flight when it began, itself included.
            verdict: what became of it.
            began_at: when it began.
            now: monotonic seconds.
        """
        if verdict is Verdict.UNKNOWN:
            return
        aimd = self._aimd
        if aimd is not None and now - aimd.sign_at >= limits.ADMISSION_MEMORY_S:
            self._aimd = aimd = None
            self._total = self._failed = None
            self._set()
        if self._total is None or self._failed is None:
            self._total, self._failed = [0.0] * LEVELS, [0.0] * LEVELS
        row = _row(level)
        self._total[row] += 1.0
        if self._total[row] > ROW_MAX:
            self._total[row] *= 0.5
            self._failed[row] *= 0.5
        if verdict is Verdict.GOOD:
            self.answered_at = now
            self.usual_s += USUAL_GAIN * (now - began_at - self.usual_s)
            if aimd is not None and aimd.won(self._full, now, pressed=self.waiting > 0 or level >= aimd.limit):
                self._set()
            return
        self._failed[row] += 1.0
        if aimd is not None and self._by_load(aimd.bad) is False:
            aimd.lift()  # as many fail with less in flight: that was not it
            self._set()
        elif level > 1 and self._by_load(level) is not False:
            floor = 1 if verdict is Verdict.REFUSED else limits.ADMISSION_SILENT_FLOOR
            self._shrink(level, max(floor, math.floor(DECREASE * level)), began_at, now, verdict is Verdict.REFUSED)

    def queued(self, level: int, queued: float, now: float) -> None:
        """Learn that, by its latency, this many of what was in flight were queued."""
        aimd = self._aimd
        if aimd is None:
            if queued <= QUEUED_MAX:
                return
            self._aimd = aimd = _Aimd()
        if aimd.gradient(queued, now) and level > limits.ADMISSION_GRADIENT_FLOOR:
            lower = max(limits.ADMISSION_GRADIENT_FLOOR, math.floor(0.9 * level))
            if lower < aimd.limit:
                self._shrink(level, lower, now, now, refused=False)

    def _shrink(self, level: int, lower: int, began_at: float, now: float, refused: bool) -> None:
        aimd = self._aimd
        if aimd is None:
            aimd = self._aimd = _Aimd()
        aimd.lost(level, max(lower, self._knee(lower)), began_at, now, refused=refused)
        self._set()

    def _by_load(self, level: int) -> bool | None:
        """Say whether failures are more frequent with more in flight: half of `level` and less against the rest.

        None where too little is known: then less is tried, and that tells.
        """
        if self._total is None or self._failed is None:
            return None
        split = _row(level // 2)
        below, below_failed = sum(self._total[: split + 1]), sum(self._failed[: split + 1])
        above, above_failed = sum(self._total[split + 1 :]), sum(self._failed[split + 1 :])
        if below < ROW_KNOWN or not above:
            return None
        return above_failed > above * (SHARE_BELOW * below_failed / below + SHARE_SLACK)

    def _knee(self, lower: int) -> int:
        """Give the highest number in flight up to `LEVELS_EXACT` that is known to do no harm, `lower` where none is."""
        if self._total is None or self._failed is None:
            return lower
        best = lower
        for row in range(1, LEVELS_EXACT + 1):
            if self._total[row] >= ROW_KNOWN:
                if self._failed[row] > SHARE_SLACK * self._total[row]:
                    break
                best = max(best, row)
        return best


class _Aimd:
    """The room of a host that has shown trouble."""

    __slots__ = ("_changed_at", "_hold_s", "_hold_until", "_run", "_sample_at", "_wins", "bad", "limit", "refused",
                 "sign_at")  # fmt: skip

    def __init__(self) -> None:
        self.limit = limits.ADMISSION_FULL
        self.refused = False
        self.sign_at = -math.inf
        self.bad = limits.ADMISSION_FULL  # in flight when it failed
        self._changed_at = -math.inf
        self._hold_s = HOLD_S
        self._hold_until = -math.inf
        self._wins = self._run = 0
        self._sample_at = -math.inf

    def lost(self, level: int, lower: int, began_at: float, now: float, *, refused: bool) -> None:
        """Shrink to `lower`, unless that is done already for what began as early as this."""
        self.sign_at = now
        self._wins = 0
        if lower >= self.limit or (began_at < self._changed_at and level > self.limit):
            return  # it had begun under an earlier, larger room
        grown = self.limit < limits.ADMISSION_FULL
        self._hold_s = min(HOLD_S_MAX, 2.0 * self._hold_s) if grown else HOLD_S
        self._hold_until = now + self._hold_s
        self._changed_at = now
        self.bad = level
        self.limit = lower
        self.refused = self.refused or refused

    def lift(self) -> None:
        """Less in flight did not help."""
        self.limit = min(limits.ADMISSION_FULL, max(2 * self.limit, self.bad))
        self._wins = 0
        self._hold_until = -math.inf
        self.refused = self.refused and self.limit < limits.ADMISSION_FULL

    def won(self, full: int, now: float, *, pressed: bool) -> bool:
        """Count a success; say whether the room has grown."""
        if not pressed or self.limit >= full or now < self._hold_until:
            return False
        self._wins += 1
        if self._wins < ROUNDS * self.limit:
            return False
        self._wins = 0
        # Quickly to what had failed (slow start to ssthresh), then carefully beyond it.
        near = self.bad - 1
        self.limit = min(full, max(self.limit + 1, min(2 * self.limit, near)))
        self._changed_at = now
        if self.limit > near:
            self._hold_until = now + self._hold_s / 2.0
        if self.limit >= limits.ADMISSION_FULL:
            self.refused = False
            self._hold_s = HOLD_S
        return True

    def gradient(self, queued: float, now: float) -> bool:
        """Take one estimate of what is queued; say whether it has been too much for long enough."""
        if queued <= QUEUED_MAX:
            self._run = 0
            return False
        if now < self._sample_at + GRADIENT_PAUSE_S:
            return False
        self._sample_at = now
        self._run += 1
        self.sign_at = max(self.sign_at, now)
        return self._run >= GRADIENT_RUN


class _Base:
    """The least latency of one class of requests, of this span of time and the one before."""

    __slots__ = ("before", "least", "since")

    def __init__(self) -> None:
        self.least = self.before = math.inf
        self.since = -math.inf

    def take(self, latency_s: float, now: float) -> float:
        if now >= self.since + BASE_S:
            self.before = self.least if now < self.since + 2.0 * BASE_S else math.inf
            self.least = math.inf
            self.since = now
        self.least = min(self.least, latency_s)
        return min(self.least, self.before)


class Admission:
    """The gates of all hosts of one client, and how many may wait in all.

    Guarantees: never more in flight to a host than its room, but for lanes beside a silent one where the room is a
    guess; nobody waits while there is room (background work: half of it); within a class the first goes first; whoever
    came `limits.ADMISSION_AGE_S` times the difference of their urgencies earlier is never passed.

    Attributes:
        weak_limit: room that the link lets each host have.
        dropped: samples that were not sound.
    """

    __slots__ = ("_bases", "_gates", "_numbers", "dropped", "waiting", "weak_limit")

    def __init__(self) -> None:
        self._gates: dict[str, Gate] = {}
        self._bases = RecentTable[tuple[str, str], _Base](limits.ADMISSION_HOSTS_MAX, _Base)
        self._numbers = itertools.count()
        self.waiting = 0
        self.weak_limit = limits.ADMISSION_FULL
        self.dropped = 0

    def gate(self, host: str) -> Gate:
        """Give a host's gate."""
        gate = self._gates.get(host)
        return self._make(host) if gate is None else gate

    def _make(self, host: str) -> Gate:
        if len(self._gates) >= limits.ADMISSION_HOSTS_MAX:
            # Those in use and those that have learned something stay, as long as there are others.
            idle = [each for each in self._gates.values() if not each.in_flight and not each.waiting]
            for gate in sorted(idle, key=lambda each: each.limited)[: len(self._gates) // 2]:
                del self._gates[gate.host]
        gate = self._gates[host] = Gate(host)
        gate.bound(self.weak_limit)
        return gate

    def queue(
        self, gate: Gate, urgency: int, now: float, *, since: float | None = None, by: float = math.inf
    ) -> Ticket | None:
        """Get into the line; None where `limits.ADMISSION_WAITING_MAX` wait already.

        Args:
            gate: of which host.
            urgency: 0 to 7.
            now: monotonic seconds.
            since: when it first came, where it comes back from a pause.
            by: its deadline.
        """
        if self.waiting >= limits.ADMISSION_WAITING_MAX:
            return None
        ticket = Ticket(urgency, now if since is None else since, next(self._numbers), by)
        gate.add(ticket)
        self.waiting += 1
        return ticket

    def drop(self, gate: Gate, ticket: Ticket) -> None:
        """Its holder waits no longer."""
        if not (ticket.granted or ticket.late or ticket.given_up):
            self.waiting -= 1
        gate.drop(ticket)

    def serve(self, gate: Gate, now: float) -> list[Ticket]:
        """Give the tickets that are granted now, and those that are `late`."""
        if not gate.waiting:
            return []
        called = gate.serve(now)
        self.waiting -= len(called)
        return called

    def leave(self, gate: Gate, now: float, urgency: int = NORMAL) -> list[Ticket]:
        """Give a place back; give the tickets whose waiting ends by that, as `serve`."""
        gate.in_flight -= 1
        gate.background -= urgency == BACKGROUND
        return self.serve(gate, now) if gate.waiting else []

    def latency(self, host: str, path_class: str, level: int, latency_s: object, now: float) -> None:
        """Learn from how long the first byte of an answer took.

        Args:
            host: of the answer.
            path_class: of the request; classes are not compared with each other.
            level: in flight when it began.
            latency_s: what it took. What is no number is dropped.
            now: monotonic seconds.
        """
        latency = sound(latency_s, limits.SAMPLE_DURATION_S_MAX)
        if latency is None or latency <= 0.0:
            self.dropped += 1
            return
        base_s = self._bases.use((host, path_class)).take(latency, now)
        harm = latency - base_s >= limits.ADMISSION_QUEUED_S_MIN
        self.gate(host).queued(level, level * (1.0 - base_s / latency) if harm else 0.0, now)

    def link(self, *, weak: bool, bytes_per_s: float | None, rtt_s: float | None, now: float) -> list[Ticket]:
        """Learn how the link does; give the tickets whose waiting ends by that, as `serve`.

        Args:
            weak: it is slow (`stall.has_room` says no).
            bytes_per_s: measured; None where it is not known, and then nothing is bounded: a far satellite is slow to
                answer and carries much.
            rtt_s: measured.
            now: monotonic seconds.
        """
        bound = limits.ADMISSION_FULL
        rate, rtt = sound(bytes_per_s, limits.SAMPLE_BYTES_PER_S_MAX), sound(rtt_s, limits.SAMPLE_DURATION_S_MAX)
        if weak and rate is not None and rtt is not None:
            wanted = math.ceil(WEAK_BDPS * rate * rtt / REQUEST_BYTES)
            bound = min(max(limits.ADMISSION_WEAK_FLOOR, wanted), limits.ADMISSION_FULL)
        if bound == self.weak_limit:
            return []
        self.weak_limit = bound
        granted: list[Ticket] = []
        for gate in self._gates.values():
            gate.bound(bound)
            granted += self.serve(gate, now)
        return granted

    def next_timer(self) -> float | None:
        """None: nothing here happens by itself."""
        return None


def _row(level: int) -> int:
    """Give the row of a number in flight: itself, then one for each doubling."""
    if level <= LEVELS_EXACT:
        return max(0, level)
    return min(LEVELS - 1, LEVELS_EXACT + level.bit_length() - 3)
