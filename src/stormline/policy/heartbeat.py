"""How long a long connection may be silent on each network: found by trying, with few lost links.

    silence_s = heartbeats.plan(network_id, now, cap_s)         # ping after this much silence
    heartbeats.observe(network_id, silence_s, now, alive=True)  # how a silence ended: with an answer, or with a loss
    heartbeats.dialled(network_id, now, worked=True)            # the first dial after a loss: was it the network?

Translators and firewalls forget a connection that was silent for too long, and tell nobody. What they count is packets
of either direction; so every frame, ours or the peer's, begins the silence anew, and what rides on other traffic costs
no wake-up.

The search goes up from what is safe, in steps of a quarter. The first loss is not believed: half a step lower is tried,
and where that is survived, the lost silence once more. Two losses, or one bisection after them, leave a bracket that
is narrow enough: a little below its lower end is the heartbeat. That costs three links at most; most limits cost two.
A silence that was survived before and is lost now is followed at once: first by a fifth, then down to the shortest, and
up again in smaller steps. What is settled is questioned after a day, then ever more rarely: by the silence that was
lost last.

Losses that prove false (the same silence is survived soon after) make a network *noisy*: there each loss needs a second
one at the same silence before it is believed, however many it takes.

A loss counts only where the connection was alive before, the silence was unbroken on one network, and the first dial
afterwards stood at once. Anything else says nothing of translators.
"""

import math
from dataclasses import dataclass
from typing import Final

from stormline.core import limits, limits_heartbeat, limits_memory
from stormline.policy.estimate import sound
from stormline.policy.recent import RecentTable
from stormline.policy.snapshot import HeartbeatRecord

_SAME: Final = 0.99
"""Two silences that differ by less are the same: clocks and timers are not exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Between what the search runs, in seconds; see `limits_heartbeat` for what each means."""

    min_s: float = limits_heartbeat.HEARTBEAT_MIN_S
    start_s: float = limits_heartbeat.HEARTBEAT_START_S
    max_s: float = limits_heartbeat.HEARTBEAT_MAX_S


class Silence:
    """How long one connection was silent before what was sent last, until an answer proves that it survived.

    Args:
        now: monotonic seconds; the connection has just been used.
    """

    __slots__ = ("_asked_s", "_moved_at")

    def __init__(self, now: float) -> None:
        self._moved_at = now
        self._asked_s = 0.0

    def went(self, now: float) -> None:
        """Something was sent: whether the silence before it was survived will be seen."""
        self._asked_s = max(self._asked_s, now - self._moved_at)
        self._moved_at = now

    def came(self, now: float) -> float:
        """Something came: give the longest silence that it proves to be survived."""
        survived_s = max(self._asked_s, now - self._moved_at)
        self._asked_s, self._moved_at = 0.0, now
        return survived_s

    def lost_s(self, now: float) -> float:
        """Give the silence that a connection did not survive which ended now: before the question, else up to now."""
        return self._asked_s or now - self._moved_at

    def void(self, now: float) -> None:
        """What was silent until now says nothing: the network changed, or the device slept."""
        self._asked_s, self._moved_at = 0.0, now


class _Known:
    """What is known of one network.

    Attributes:
        good_s: longest silence that was survived, 0 where none was.
        bad_s: shortest that was lost and not survived since, infinite where none was.
        bad_at: when it was lost last.
        hits: how often that one was lost.
        losses: links lost since the search began.
        before: `good_s`, `bad_s` and `bad_at` as they were before a silence was lost that had been survived; they
            hold again if that loss proves false.
        calm: beats in a row that were answered since the heartbeat was found.
        settled: enough were.
        probe_s: pause before it is questioned.
        false_at: when a loss last proved false.
        lost: a loss that waits for its proof: its silence and moment.
        at: when something was learned.
    """

    __slots__ = ("at", "bad_at", "bad_s", "before", "calm", "false_at", "good_s", "hits", "losses", "lost",
                 "probe_s", "settled")  # fmt: skip

    def __init__(self) -> None:
        self.good_s = 0.0
        self.bad_s, self.bad_at = math.inf, -math.inf
        self.hits = self.losses = self.calm = 0
        self.before: tuple[float, float, float] | None = None
        self.settled = False
        self.probe_s = limits_heartbeat.HEARTBEAT_REPROBE_S
        self.false_at = -math.inf
        self.lost: tuple[float, float] | None = None
        self.at = -math.inf

    def noisy(self, now: float) -> bool:
        """Say whether links are lost by chance here."""
        return now - self.false_at < limits_heartbeat.HEARTBEAT_NOISY_S

    def found(self, now: float) -> bool:
        """Say whether the limit is known closely enough."""
        noisy = self.noisy(now)
        believed = self.hits >= limits_heartbeat.HEARTBEAT_HITS_NOISY if noisy else self.losses >= 2
        return believed and self.bad_s <= self.good_s * limits_heartbeat.HEARTBEAT_BRACKET

    def survived(self, silence_s: float, now: float) -> None:
        self.at = now
        if silence_s >= self.bad_s * _SAME:
            self._take_back(now)
        self.good_s = max(self.good_s, silence_s)
        if self.found(now) and silence_s >= self.good_s * limits_heartbeat.HEARTBEAT_MARGIN * _SAME:
            self.calm += 1
            if not self.settled and self.calm >= limits_heartbeat.HEARTBEAT_CONFIRMED:
                self.settle()

    def _take_back(self, now: float) -> None:
        """What was lost is survived: the loss was by chance, or the limit is another one now."""
        if self.settled:
            self.probe_s = limits_heartbeat.HEARTBEAT_REPROBE_S
        else:
            self.false_at = now
        self.settled, self.calm = False, 0
        self.bad_s, self.hits, self.losses = math.inf, 0, 0
        if self.before is not None:
            (self.good_s, self.bad_s, self.bad_at), self.before = self.before, None
            if self.bad_s < math.inf:
                self._believe()

    def _believe(self) -> None:
        self.hits = self.losses = limits_heartbeat.HEARTBEAT_HITS_NOISY

    def settle(self) -> None:
        self.settled, self.before = True, None
        self._believe()

    def died(self, silence_s: float, now: float) -> None:
        self.at, self.calm = now, 0
        if silence_s >= self.bad_s * _SAME:
            self.bad_at = now
            self.hits += 1
            self.losses += 1
            if self.settled:  # it was questioned, and is as before
                self.probe_s = min(2.0 * self.probe_s, limits_heartbeat.HEARTBEAT_REPROBE_MAX_S)
            return
        if silence_s <= self.good_s:
            if self.before is None:
                self.before = self.good_s, self.bad_s, self.bad_at
                self.losses = 0 if self.found(now) else self.losses
            self.good_s = 0.0
        self.bad_s, self.bad_at, self.hits, self.settled = silence_s, now, 1, False
        self.losses += 1

    def next_s(self, now: float, bounds: Bounds) -> float:
        """Give the silence to try next, or to keep."""
        good_s, bad_s = self.good_s, self.bad_s
        if math.isinf(bad_s):
            return good_s * limits_heartbeat.HEARTBEAT_STEP or bounds.start_s
        if not good_s:
            if self.before is not None and self.losses == 1:
                return max(bounds.min_s, bad_s * limits_heartbeat.HEARTBEAT_BACK)
            return max(bounds.min_s, bad_s * 0.5 if self.noisy(now) else 0.0)
        if self.found(now):
            if now - self.bad_at >= self.probe_s:
                return bad_s
            return max(bounds.min_s, good_s * limits_heartbeat.HEARTBEAT_MARGIN)
        if bad_s <= good_s * limits_heartbeat.HEARTBEAT_NEAR:
            return bad_s
        fine = self.losses >= 2 and not self.noisy(now)
        step = limits_heartbeat.HEARTBEAT_STEP_FINE if fine else limits_heartbeat.HEARTBEAT_STEP
        return min(good_s * step, math.sqrt(good_s * bad_s))


class Heartbeats:
    """What is known of all networks. The table is bounded, the network unused for longest goes first.

    Args:
        bounds: between what is searched.
    """

    __slots__ = ("_bounds", "_networks")

    def __init__(self, bounds: Bounds | None = None) -> None:
        self._bounds = bounds or Bounds()
        self._networks: RecentTable[str, _Known] = RecentTable(limits_memory.MEMORY_NETWORKS_MAX, _Known)

    def plan(self, network_id: str, now: float, cap_s: float = math.inf) -> float:
        """Give the silence after which to ping.

        Args:
            network_id: where.
            now: monotonic seconds.
            cap_s: the longest that the gateway and the user's activity allow.
        """
        known = self._networks.find(network_id)
        silence_s = self._bounds.start_s if known is None else known.next_s(now, self._bounds)
        return min(silence_s, self._bounds.max_s, cap_s)

    def proven_s(self, network_id: str) -> float:
        """Give the longest silence that a connection survived on a network; 0 where none is known."""
        known = self._networks.find(network_id)
        return 0.0 if known is None else known.good_s

    def settled(self, network_id: str) -> bool:
        """Say whether the limit of a network is known, and the heartbeat below it has stood for a while."""
        known = self._networks.find(network_id)
        return known is not None and known.settled

    def observe(self, network_id: str, silence_s: float, now: float, *, alive: bool) -> bool:
        """Learn that a connection was silent and then answered, or did not. A loss waits for `dialled`.

        Returns:
            False where the silence is unsound, or too short to say anything: nothing is learned.
        """
        silence = sound(silence_s, limits.WIRE_SECONDS_MAX)
        if silence is None or silence < self._bounds.min_s * _SAME:
            return False
        known = self._networks.use(network_id)
        if alive:
            known.lost = None
            known.survived(silence, now)
        else:
            known.lost = silence, now
        return True

    def dialled(self, network_id: str, now: float, *, worked: bool) -> bool:
        """Learn how the first dial after a loss ended: only one that stands soon says that the network was alive.

        Returns:
            True where a loss is believed by it.
        """
        known = self._networks.find(network_id)
        if known is None or known.lost is None:
            return False
        (silence_s, lost_at), known.lost = known.lost, None
        if not worked or now - lost_at > limits_heartbeat.HEARTBEAT_PROOF_S:
            return False
        known.died(silence_s, now)
        return True

    # -- between starts -----------------------------------------------------------------------------------------------
    def export(self, network_id: str, now: float, wall_s: float) -> HeartbeatRecord | None:
        """Give what is to be kept of a network; None where there is nothing."""
        known = self._networks.find(network_id)
        if known is None or now - known.at >= limits_memory.MEMORY_LIFE_S:
            return None
        return HeartbeatRecord(
            at=round(known.at + wall_s),
            good_ms=round(known.good_s * 1000.0),
            bad_ms=0 if math.isinf(known.bad_s) else round(known.bad_s * 1000.0),
            losses=known.losses,
            bad_at=0 if math.isinf(known.bad_s) else round(known.bad_at + wall_s),
            settled=known.settled,
            false_at=0 if math.isinf(known.false_at) else round(known.false_at + wall_s),
        )

    def restore(self, network_id: str, kept: HeartbeatRecord, now: float, wall_s: float) -> None:
        """Take over what was kept, where nothing is known yet and it is not too old."""
        at = min(now, kept.at - wall_s)
        good_s = sound(kept.good_ms / 1000.0, limits.WIRE_SECONDS_MAX)
        bad_s = sound(kept.bad_ms / 1000.0, limits.WIRE_SECONDS_MAX)
        found = self._networks.find(network_id)
        if (
            now - at >= limits_memory.MEMORY_LIFE_S
            or good_s is None
            or bad_s is None
            or 0.0 < good_s < self._bounds.min_s * _SAME
            or 0.0 < bad_s <= max(good_s, self._bounds.min_s * _SAME)
            or (found is not None and found.at > -math.inf)
        ):
            return
        known = self._networks.use(network_id)
        known.at, known.good_s = at, good_s
        if kept.false_at:
            known.false_at = min(now, kept.false_at - wall_s)
        if bad_s:
            known.bad_s, known.bad_at, known.hits = bad_s, min(now, kept.bad_at - wall_s), 1
            known.losses = max(1, min(kept.losses, limits_heartbeat.HEARTBEAT_HITS_NOISY))
            if kept.settled and good_s:
                known.settle()
