"""The link model: what becomes of each packet offered to one direction of a link.

    link = LinkModel(LinkParams(delay_s=0.05, rate_bps=1e6), rng, now)
    verdict = link.offer(1200, now)          # verdict.deliver_at == (now + 0.0596,), or () with a reason
    ...
    for revised in link.advance(now):        # when `next_change()` has come, and after each command
        ...                                  # what was said of packet `revised.ticket` no longer holds

Laboratory and simulator use this one model. It does no I/O and holds no packet: the caller keeps the bytes.
"""

import enum
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from stormline.core.clock import Rng
from stormline.netmodel.fades import Fades
from stormline.netmodel.params import BlackoutMode, LinkParams
from stormline.netmodel.schedule import EndBlackout, Schedule, SetParams, StartBlackout
from stormline.netmodel.trace import TraceCursor


class Reason(enum.StrEnum):
    """Why a packet was lost."""

    MTU = "mtu"
    """Larger than the link takes."""
    QUEUE = "queue"
    """The queue was full."""
    BLACKOUT = "blackout"
    """Sent while the link was dark."""
    FADE = "fade"
    """Sent while the radio was bad."""
    LOSS = "loss"
    """Lost by chance, each packet for itself."""
    BURST = "burst"
    """Lost by the chain that makes bursts."""


class Verdict(NamedTuple):
    """What becomes of one packet."""

    ticket: int
    """Names the packet in later verdicts; counts up from 1."""
    deliver_at: tuple[float, ...]
    """Moments of its arrival: one, two where the link duplicates it, none where it is lost. Infinity: the link holds
    it, and a revised verdict will say when (or that) it leaves."""
    reason: Reason | None
    """Why it is lost; None where it is not."""


@dataclass(slots=True)
class LinkStatistics:
    """What has happened since the start. Packets count as what the last verdict on them says."""

    offered_packets: int = 0
    offered_bytes: int = 0
    delivered_packets: int = 0
    """Each packet once, also where it arrives twice."""
    delivered_bytes: int = 0
    held_packets: int = 0
    """Waiting for a blackout of unknown length to end."""
    duplicated_packets: int = 0
    reordered_packets: int = 0
    """Held back so that others may overtake; one whose verdict is revised may count again."""
    queue_bytes_max: int = 0
    """The most bytes that ever waited."""
    lost: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))


class _Waiting:
    """A packet in the queue: accepted, and not yet wholly on the air."""

    __slots__ = ("depart_s", "floor_s", "left_bytes", "size_bytes", "start_s", "verdict")

    def __init__(self, size_bytes: int, floor_s: float) -> None:
        self.size_bytes = size_bytes
        self.left_bytes: float = size_bytes  # what remains to be sent; less than the size after a change in mid-packet
        self.floor_s = floor_s  # the earliest arrival that kept the order when this packet came
        self.start_s = math.nan
        self.depart_s = math.nan
        self.verdict = _UNDECIDED


_UNDECIDED: Final = Verdict(0, (), None)


class LinkModel:
    """One direction of a link.

    Guarantees: a packet never arrives before `now + delay_s`; packets arrive in the order offered, except those held
    back by `reorder_pct`; over no stretch of time leaves more than the rate allows plus one packet; no more than
    `queue_bytes` wait. The same parameters, chance and calls give the same verdicts.

    Time: every method takes monotonic seconds, and they never go back from call to call. A change (parameters,
    blackout, schedule) holds for packets that have not left the queue; those on the air arrive as promised. A command
    therefore may revise verdicts; the caller collects them with `advance`.
    """

    __slots__ = (
        "_air_floor_s", "_backlog_bytes", "_bad", "_blackout_mode", "_blackout_until_s", "_busy_until_s", "_cursor",
        "_fades", "_next_step", "_next_step_s", "_params", "_revised", "_rng", "_schedule", "_schedule_start_s",
        "_statistics", "_ticket", "_waiting",
    )  # fmt: skip

    def __init__(self, params: LinkParams, rng: Rng, now: float, *, fades: Fades | None = None) -> None:
        """Make a link with an empty queue.

        Args:
            params: what the link is like.
            rng: where its chance comes from; give each direction its own.
            now: monotonic seconds; a trace starts here.
            fades: bad moments, the same object for both directions.
        """
        self._params = params
        self._rng = rng
        self._fades = fades
        self._cursor: TraceCursor | None = None
        self._ticket = 0
        self._waiting: deque[_Waiting] = deque()
        self._backlog_bytes = 0
        self._busy_until_s = now
        self._air_floor_s = -math.inf
        self._bad = False
        self._blackout_mode = BlackoutMode.DROP
        self._blackout_until_s = -math.inf
        self._schedule: Schedule | None = None
        self._schedule_start_s = now
        self._next_step = 0
        self._next_step_s = math.inf
        self._revised: dict[int, Verdict] = {}
        self._statistics = LinkStatistics()
        self._enter_trace(now)

    # -- reading ------------------------------------------------------------------------------------------------------
    @property
    def params(self) -> LinkParams:
        """The parameters as of the last call."""
        return self._params

    def statistics(self) -> LinkStatistics:
        """Give a copy of the counters."""
        now = self._statistics
        return LinkStatistics(
            now.offered_packets, now.offered_bytes, now.delivered_packets, now.delivered_bytes, now.held_packets,
            now.duplicated_packets, now.reordered_packets, now.queue_bytes_max, dict(now.lost),
        )  # fmt: skip

    def backlog_bytes(self, now: float) -> int:
        """Bytes that wait for their turn at `now`, the packet being sent included."""
        self._drain(now)
        return self._backlog_bytes

    def dark(self, now: float) -> bool:
        """True during a blackout."""
        return now < self._blackout_until_s

    def next_change(self) -> float | None:
        """The moment at which `advance` has something to do; None where none will come by itself, minus infinity where
        revised verdicts wait already.

        Fades, traces and blackouts of known length are no changes: verdicts know them in advance.
        """
        if self._revised:
            return -math.inf
        return None if self._next_step_s == math.inf else self._next_step_s

    # -- packets ------------------------------------------------------------------------------------------------------
    def offer(self, size_bytes: int, now: float) -> Verdict:
        """Send a packet of `size_bytes` into the link at `now`."""
        if now >= self._next_step_s:
            self._run_schedule(now)
        self._ticket += 1
        counted = self._statistics
        counted.offered_packets += 1
        counted.offered_bytes += size_bytes
        params = self._params
        if size_bytes > params.mtu_bytes:
            return self._count(Verdict(self._ticket, (), Reason.MTU), size_bytes)
        if self._waiting:
            self._drain(now)
        if self._backlog_bytes + size_bytes > params.queue_bytes:
            return self._count(Verdict(self._ticket, (), Reason.QUEUE), size_bytes)
        holding = now < self._blackout_until_s and self._blackout_mode is BlackoutMode.HOLD
        if params.rate_bps is None and self._cursor is None and not holding and not self._waiting:
            return self._count(self._decide(self._ticket, now, now), size_bytes)
        packet = _Waiting(size_bytes, self._air_floor_s)
        self._waiting.append(packet)
        self._backlog_bytes += size_bytes
        counted.queue_bytes_max = max(counted.queue_bytes_max, self._backlog_bytes)
        self._send(packet, now)
        packet.verdict = self._count(self._decide(self._ticket, packet.depart_s, now), size_bytes)
        return packet.verdict

    def _drain(self, now: float) -> None:
        """Forget packets that have left the queue."""
        waiting = self._waiting
        while waiting and waiting[0].depart_s <= now:
            self._backlog_bytes -= waiting.popleft().size_bytes

    def _send(self, packet: _Waiting, now: float) -> None:
        """Find when the packet's first and last bytes go on the air, after all that wait before it."""
        start_s = max(now, self._busy_until_s)
        if start_s < self._blackout_until_s and self._blackout_mode is BlackoutMode.HOLD:
            start_s = self._blackout_until_s
        depart_s = start_s
        if start_s != math.inf:
            if self._cursor is not None:
                depart_s = self._cursor.take(math.ceil(packet.left_bytes), start_s)
            elif self._params.rate_bps is not None:
                depart_s = start_s + packet.left_bytes * 8 / self._params.rate_bps
        packet.start_s, packet.depart_s = start_s, depart_s
        self._busy_until_s = depart_s

    def _decide(self, ticket: int, depart_s: float, now: float) -> Verdict:
        """Say what becomes of a packet that is wholly on the air at `depart_s`."""
        if depart_s == math.inf:
            return Verdict(ticket, (math.inf,), None)
        reason = self._lose(depart_s, now)
        if reason is not None:
            return Verdict(ticket, (), reason)
        params, random = self._params, self._rng.random
        arrive_s = depart_s + params.delay_s
        if params.jitter_s:
            arrive_s += params.jitter_s * random()
        if params.reorder_pct and random() * 100 < params.reorder_pct:
            # Keeps behind those before it, and does not hold up those after it.
            arrive_s = max(arrive_s, self._air_floor_s) + params.reorder_gap_s
            self._statistics.reordered_packets += 1
            return Verdict(ticket, (arrive_s,), None)
        if arrive_s < self._air_floor_s:
            arrive_s = self._air_floor_s
        self._air_floor_s = arrive_s
        if params.duplicate_pct and random() * 100 < params.duplicate_pct:
            return Verdict(ticket, (arrive_s, arrive_s), None)
        return Verdict(ticket, (arrive_s,), None)

    def _lose(self, depart_s: float, now: float) -> Reason | None:
        if depart_s < self._blackout_until_s and self._blackout_mode is BlackoutMode.DROP:
            return Reason.BLACKOUT
        params, random = self._params, self._rng.random
        if self._fades is not None:
            fade_pct = self._fades.loss_pct_at(depart_s, now)
            if fade_pct and random() * 100 < fade_pct:
                return Reason.FADE
        if params.loss_pct and random() * 100 < params.loss_pct:
            return Reason.LOSS
        burst = params.burst
        if burst is not None:
            self._bad = random() * 100 >= burst.r_pct if self._bad else random() * 100 < burst.p_pct
            loss_pct = burst.loss_bad_pct if self._bad else burst.loss_good_pct
            if loss_pct and random() * 100 < loss_pct:
                return Reason.BURST
        return None

    def _count(self, verdict: Verdict, size_bytes: int, sign: int = 1) -> Verdict:
        counted = self._statistics
        if verdict.reason is not None:
            counted.lost[verdict.reason] += sign
        elif verdict.deliver_at[0] == math.inf:
            counted.held_packets += sign
        else:
            counted.delivered_packets += sign
            counted.delivered_bytes += sign * size_bytes
            counted.duplicated_packets += sign * (len(verdict.deliver_at) - 1)
        return verdict

    # -- changes ------------------------------------------------------------------------------------------------------
    def advance(self, now: float) -> list[Verdict]:
        """Do what the schedule asks for up to `now`, and give the verdicts that no longer hold as they hold now.

        Each names a packet by its ticket and replaces all that was said of it; it has not arrived yet.
        """
        if now >= self._next_step_s:
            self._run_schedule(now)
        revised = list(self._revised.values())
        self._revised.clear()
        return revised

    def reconfigure(self, params: LinkParams, now: float) -> None:
        """Be another link from `now` on. A trace that stays the same goes on where it is."""
        self._pause(now)
        self._enter(params, now)
        self._revise(now)

    def start_blackout(self, mode: BlackoutMode, now: float, *, until_s: float = math.inf) -> None:
        """Go dark at `now`; one that is on already is replaced.

        Args:
            mode: what happens to packets.
            now: monotonic seconds.
            until_s: when light comes back; infinity: at `end_blackout`.
        """
        self._pause(now)
        self._blackout_mode, self._blackout_until_s = mode, until_s
        self._revise(now)

    def end_blackout(self, now: float) -> None:
        """Come back now; nothing happens where there is no blackout. Packets that were held leave in their order."""
        if now < self._blackout_until_s:
            self._pause(now)
            self._blackout_until_s = -math.inf
            self._revise(now)

    def set_schedule(self, schedule: Schedule | None, now: float, *, start_s: float | None = None) -> None:
        """Follow a schedule instead of the one before, from its first step.

        Args:
            schedule: what happens when; None: nothing more.
            now: monotonic seconds.
            start_s: its time 0, `now` where None. Steps that lie before `now` are done at once, in order.
        """
        self._schedule = schedule
        self._schedule_start_s = now if start_s is None else start_s
        self._next_step = 0
        self._find_next_step()
        if self._next_step_s <= now:
            self._run_schedule(now)

    def set_fades(self, fades: Fades | None, now: float) -> None:
        """Have these fades from `now` on; for both directions give both the same object."""
        self._pause(now)
        self._fades = fades
        self._revise(now)

    def _find_next_step(self) -> None:
        step = None if self._schedule is None else self._schedule.step(self._next_step)
        self._next_step_s = math.inf if step is None else self._schedule_start_s + step[0]

    def _run_schedule(self, now: float) -> None:
        self._pause(now)
        while self._schedule is not None and self._next_step_s <= now:
            step = self._schedule.step(self._next_step)
            if step is not None:
                match step[1]:
                    case SetParams() as change:
                        self._enter(change.apply(self._params), now)
                    case StartBlackout(mode, duration_s):
                        self._blackout_mode, self._blackout_until_s = mode, self._next_step_s + duration_s
                    case EndBlackout():
                        self._blackout_until_s = -math.inf
            self._next_step += 1
            self._find_next_step()
        self._revise(now)

    def _enter(self, params: LinkParams, now: float) -> None:
        before = self._params
        self._params = params
        if params.trace is not before.trace or params.trace_offset_s != before.trace_offset_s:
            self._enter_trace(now)

    def _enter_trace(self, now: float) -> None:
        params = self._params
        self._cursor = None
        if params.trace is not None:
            self._cursor = TraceCursor(params.trace, now - params.trace_offset_s, now)

    def _pause(self, now: float) -> None:
        """Before a change: credit the packet being sent with the part that is on the air already."""
        self._drain(now)
        if not self._waiting or self._cursor is not None:
            return  # under a trace the packet starts anew: at most one opportunity is lost
        packet = self._waiting[0]
        if packet.start_s < now < packet.depart_s:
            packet.left_bytes *= (packet.depart_s - now) / (packet.depart_s - packet.start_s)

    def _revise(self, now: float) -> None:
        """After a change: decide anew on all that still waits. What was lost stays lost, and still uses the link."""
        self._busy_until_s = now
        if self._cursor is not None:
            self._cursor.skip_past(now)
        if not self._waiting:
            return
        self._air_floor_s = self._waiting[0].floor_s
        for packet in self._waiting:
            packet.floor_s = self._air_floor_s
            self._send(packet, now)
            said = packet.verdict
            if said.reason is not None:
                continue
            self._count(said, packet.size_bytes, -1)
            packet.verdict = self._count(self._decide(said.ticket, packet.depart_s, now), packet.size_bytes)
            if packet.verdict != said:
                self._revised[said.ticket] = packet.verdict
