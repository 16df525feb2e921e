"""Which address of a host to try first: history, bans and the preferred family, per network.

    order = book.plan(network_id, host, candidates, now, left={address that just failed})
    book.observe(AddressOutcome(...), now)

The start is Mars's (`stn/src/simple_ipport_sort.cc`): the last eight verdicts in a shift register, a ban at three
failures, six minutes more for each further one up to thirty, a record's life of a day. Changed:

- a failure counts only where something else worked on the same network while it was tried or shortly after: in a
  blackout every address fails and none is to blame;
- an address that lost a race was slower, not broken, and is not charged (Mars books it as timed out);
- parole: after half a minute (doubling) a banned address may be tried once, behind the others; Mars waits out the ban;
- never all: where every address is banned, all are used, the one whose ban ends first in front;
- nothing is shuffled here: among equals the given order stands, so whoever wants load spread shuffles before;
- families: IPv6 first (RFC 8305 section 4) until it loses, on the network or at one host, and again
  `limits.FAMILY_REPROBE_S` later. A request that failed over IPv6 goes on over IPv4. A class of path whose requests
  fail over IPv6 and are answered over IPv4 is remembered by itself: its host's small answers may pass where its large
  ones do not (a path that swallows large packets), and each of them would clear the host;
- a start is no time for trials: what is taken over from an earlier one (`restore`) is believed for some minutes.
"""

import enum
import math
from collections import deque
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from stormline.core import limits, limits_memory
from stormline.policy.estimate import sound
from stormline.policy.recent import RecentTable
from stormline.policy.snapshot import AddressRecord, FamilyRecord

HISTORY_BITS: Final = 8
"""Verdicts in an address's register (Mars)."""
BAN_FAILURES: Final = 3
"""Failures among them from which an address is banned (Mars)."""
FAMILY_LOSSES: Final = 2
"""Losses in a row to the other family after which a family is second: one can be chance."""
PROOF_S: Final = 5.0
"""How long after a failure something else may still prove that the network worked: the retry elsewhere."""
SPAN_GAP_S: Final = 1.0
"""Signs of a working network this close together are one span of time."""
SPANS_MAX: Final = 16
"""Spans remembered per network; a failure waits `PROOF_S` for its proof, no longer."""
_Key = tuple[str, str, str, int, str]  # network, host, address, port, carrier
_MASK: Final = (1 << HISTORY_BITS) - 1


class Verdict(enum.StrEnum):
    """What became of trying an address."""

    WORKED = "worked"
    """It connected (TLS included where there is any), or answered."""
    FAILED = "failed"
    """Refused, timed out, cut, or presented a wrong certificate."""
    OUTRUN = "outrun"
    """Another won the race before it could show anything."""


class Candidate(NamedTuple):
    """One place to connect to.

    Attributes:
        address: an IP literal.
        port: TCP or UDP port.
        carrier: what is spoken there (`h1`, `h2`, `h3`, `sl-tls`); each has a history of its own.
    """

    address: str
    port: int
    carrier: str = ""

    @property
    def family(self) -> int:
        """4 or 6."""
        return 6 if ":" in self.address else 4


class AddressOutcome(NamedTuple):
    """One verdict on one candidate.

    Attributes:
        network_id: where it was tried.
        host: for which host.
        candidate: what was tried.
        verdict: what became of it.
        connect_s: how long TCP and TLS took, where they stood; unsound values are dropped.
        tried_s: how long a failed one was tried; unsound values are dropped.
    """

    network_id: str
    host: str
    candidate: Candidate
    verdict: Verdict
    connect_s: float | None = None
    tried_s: float | None = None


class Ranked(NamedTuple):
    """A candidate in its place.

    Attributes:
        candidate: what to try.
        banned: it is tried on parole or because nothing else is left.
        why: for the call's story.
    """

    candidate: Candidate
    banned: bool
    why: str


class _Record:
    """One address's history; see the module."""

    __slots__ = ("ban_until", "connect_s", "failed_at", "parole_at", "paroles", "register", "seen_at", "unproved_from")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.register = 0
        self.seen_at = -math.inf
        self.failed_at: float | None = None  # the last verdict was a failure, then
        self.unproved_from: float | None = None  # that failure does not count yet; it was tried from then on
        self.ban_until: float | None = None
        self.parole_at: float | None = None
        self.paroles = 0
        self.connect_s: float | None = None

    @property
    def failures(self) -> int:
        return self.register.bit_count()

    @property
    def life_s(self) -> float:
        """Age at which it says nothing any more: that an address was well is the safer guess, so it lasts longer."""
        return limits_memory.MEMORY_LIFE_S if self.failed_at is None else limits.ADDRESS_MEMORY_S


class _FamilyMemory:
    """Whether IPv6 goes first, on a network or at one host of it."""

    __slots__ = ("losses", "lost_at", "probing_until", "second_until", "unproved")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.losses = 0
        self.unproved = False  # of a class of path: it failed over IPv6, and has not been answered since
        self.lost_at = -math.inf
        self.second_until: float | None = None  # IPv6 is second until then
        self.probing_until: float | None = None

    def lose(self, now: float) -> None:
        self.losses += 1
        self.lost_at = now
        if self.losses >= FAMILY_LOSSES and (self.second_until is None or now >= self.second_until):
            self.second_until = now + limits.FAMILY_REPROBE_S
            self.probing_until = None

    def is_second(self, now: float) -> bool:
        return self.second_until is not None and now < self.second_until

    def may_lead(self, now: float) -> bool:
        """Say whether IPv6 has its head start; where its time as second is over, one request finds out."""
        if self.second_until is None:
            return True
        if now < self.second_until or (self.probing_until is not None and now < self.probing_until):
            return False
        self.probing_until = now + limits.FAMILY_PROBE_S
        return True


class _NetworkMemory:
    """When a network worked."""

    __slots__ = ("worked",)

    def __init__(self) -> None:
        self.worked: deque[tuple[float, float]] = deque(maxlen=SPANS_MAX)

    def observe_worked(self, now: float) -> None:
        if self.worked and 0.0 <= now - self.worked[-1][1] <= SPAN_GAP_S:
            self.worked[-1] = (self.worked[-1][0], now)
        else:
            self.worked.append((now, now))

    def worked_within(self, start: float, end: float) -> bool:
        return any(first <= end and last >= start for first, last in self.worked)


class AddressBook:
    """Histories of addresses. One for a client; bounded, those unused for longest go first."""

    __slots__ = ("_classes", "_families", "_networks", "_records", "dropped")

    def __init__(self) -> None:
        # Of a network under the host "", else of one host; only where IPv6 ever lost.
        self._families = RecentTable[tuple[str, str], _FamilyMemory](limits.FAMILY_RECORDS_MAX, _FamilyMemory)
        # Of classes of path (network, host, class); only where one failed over IPv6.
        self._classes = RecentTable[tuple[str, str, str], _FamilyMemory](limits.FAMILY_CLASSES_MAX, _FamilyMemory)
        self._records = RecentTable[_Key, _Record](limits.ADDRESS_RECORDS_MAX, _Record)
        self._networks = RecentTable[str, _NetworkMemory](limits.TIMEOUT_NETWORKS_MAX, _NetworkMemory)
        self.dropped = 0
        """Samples that were not sound."""

    def plan(
        self,
        network_id: str,
        host: str,
        candidates: Sequence[Candidate],
        now: float,
        *,
        left: Collection[Candidate] = (),
        ipv4_first: bool = False,
    ) -> list[Ranked]:
        """Put candidates into the order in which a race should start them.

        Args:
            network_id: where it goes out.
            host: for which host.
            candidates: what there is, best first where nothing is known; the same one twice counts once.
            now: monotonic seconds.
            left: what this request has failed on already; goes last, and where IPv6 is among it IPv4 goes first.
            ipv4_first: the host is known to be worse over IPv6.

        Returns:
            The good ones by families in turn; then one on parole; where none is good also the banned ones, soonest free
            first; then what the request has left. Never empty where `candidates` is not.
        """
        unique = list(dict.fromkeys(candidates))
        records = {each: self._find(network_id, host, each, now) for each in unique}
        network = self._networks.find(network_id)
        good, parole, banned = [], [], []
        for candidate in (each for each in unique if each not in left):
            record = records[candidate]
            if record is not None and network is not None:
                self._settle(record, network, now)
            if record is None or record.ban_until is None or now >= record.ban_until:
                good.append(candidate)
            elif record.parole_at is not None and now >= record.parole_at:
                parole.append((candidate, record))
            else:
                banned.append((record.ban_until, candidate, record))
        good.sort(key=lambda each: _rank(records[each], now))
        first = 4 if ipv4_first else self._first_family(network_id, host, good, left, now)
        order = [Ranked(each, False, _why(records[each])) for each in _interleave(good, first)]
        for candidate, record in parole[:1]:
            self._begin_parole(record, now)
            order.append(Ranked(candidate, True, f"on parole, {_why(record)}"))
        if not good:
            banned.sort(key=lambda each: each[0])
            order += [Ranked(each, True, f"nothing else is left, {_why(record)}") for _, each, record in banned]
        return order + [Ranked(each, False, "left by this request") for each in unique if each in left]

    def observe(self, outcome: AddressOutcome, now: float) -> None:
        """Learn from one verdict. Raises nothing."""
        network = self._networks.use(outcome.network_id)
        record = self._find(outcome.network_id, outcome.host, outcome.candidate, now)
        if record is None and outcome.verdict is Verdict.OUTRUN:
            self._learn_family(network, outcome, now)
            return
        record = self._use(outcome.network_id, outcome.host, outcome.candidate, now)
        sample = self._sound(outcome.connect_s)
        if sample is not None:
            known = record.connect_s
            record.connect_s = sample if known is None else known + (sample - known) / 4.0
        if outcome.verdict is Verdict.WORKED:
            network.observe_worked(now)
            self._forgive(record)
        elif outcome.verdict is Verdict.FAILED:
            self._charge(record, network, now, self._sound(outcome.tried_s) or 0.0)
        self._learn_family(network, outcome, now)

    def ban(self, network_id: str, host: str, candidate: Candidate, now: float, span_s: float) -> None:
        """Ban an address because dispatch or its server said so, at most for `limits.ADDRESS_BAN_S_MAX`."""
        span = sound(span_s, limits.SAMPLE_DURATION_S_MAX)
        if span is None:
            self.dropped += 1
            return
        record = self._use(network_id, host, candidate, now)
        record.register = _MASK
        record.unproved_from = None
        record.failed_at = now
        record.ban_until = now + min(span, limits.ADDRESS_BAN_S_MAX)
        record.parole_at = None

    def next_timer(self) -> float | None:
        """None: bans and paroles are looked at when an order is made."""
        return None

    # -- one record ---------------------------------------------------------------------------------------------------
    def _charge(self, record: _Record, network: _NetworkMemory, now: float, tried_s: float) -> None:
        self._settle(record, network, now)
        if record.failed_at is not None and 0.0 <= now - record.failed_at < limits.ADDRESS_FAILURE_SPAN_S:
            return
        record.failed_at = now
        record.unproved_from = now - tried_s
        self._settle(record, network, now)

    def _settle(self, record: _Record, network: _NetworkMemory, now: float) -> None:
        """Count the last failure where the network has been seen to work, forget it where it has not in time."""
        if record.unproved_from is None or record.failed_at is None:
            return
        if network.worked_within(record.unproved_from, record.failed_at + PROOF_S):
            record.unproved_from = None
            record.register = (record.register << 1 | 1) & _MASK
            if record.failures >= BAN_FAILURES:
                span = limits.ADDRESS_BAN_S * (record.failures - BAN_FAILURES + 1)
                record.ban_until = record.failed_at + min(span, limits.ADDRESS_BAN_S_MAX)
                if record.parole_at is None:
                    self._begin_parole(record, record.failed_at)
        elif now > record.failed_at + PROOF_S:
            record.unproved_from = None

    def _begin_parole(self, record: _Record, now: float) -> None:
        """Set the moment of the next try: later each time, also where nobody tells what became of this one."""
        record.parole_at = now + limits.ADDRESS_PAROLE_S * 2.0 ** min(record.paroles, 6)
        record.paroles += 1

    def _forgive(self, record: _Record) -> None:
        record.register = record.register << 1 & _MASK
        record.failed_at = record.unproved_from = record.ban_until = record.parole_at = None
        record.paroles = 0

    def _sound(self, value: object) -> float | None:
        if value is None:
            return None
        sample = sound(value, limits.SAMPLE_DURATION_S_MAX)
        self.dropped += sample is None
        return sample

    # -- families -----------------------------------------------------------------------------------------------------
    def _first_family(
        self, network_id: str, host: str, good: list[Candidate], left: Collection[Candidate], now: float
    ) -> int:
        """Give the family with the head start."""
        if len({each.family for each in good}) < 2:
            return 6
        if any(each.family == 6 for each in left):
            return 4
        found = (self._families.find(key) for key in ((network_id, ""), (network_id, host)))
        return 6 if all(memory is None or memory.may_lead(now) for memory in found) else 4

    def _learn_family(self, network: _NetworkMemory, outcome: AddressOutcome, now: float) -> None:
        if outcome.candidate.family == 4:
            return
        keys = ((outcome.network_id, ""), (outcome.network_id, outcome.host))
        if outcome.verdict is Verdict.WORKED:
            for memory in map(self._families.find, keys):
                if memory is not None:
                    memory.clear()
        # Where it failed the network may be dark, which says nothing of IPv6.
        elif outcome.verdict is Verdict.OUTRUN or network.worked_within(now - PROOF_S, now):
            for key in keys:
                self._families.use(key).lose(now)

    def class_failed(self, network_id: str, host: str, path_class: str) -> None:
        """A request of a class of path failed over IPv6: it counts once one is answered over IPv4."""
        self._classes.use((network_id, host, path_class)).unproved = True

    def class_answered(self, network_id: str, host: str, path_class: str, family: int, now: float) -> None:
        """A request of a class of path was answered over a family. Costs nothing where none has failed over IPv6."""
        if not len(self._classes):
            return
        memory = self._classes.find((network_id, host, path_class))
        if memory is None:
            return
        if family == 6:
            memory.clear()
        elif memory.unproved:
            memory.unproved = False
            memory.lose(now)

    def class_leads(self, network_id: str, host: str, path_class: str, now: float) -> bool:
        """Say whether IPv6 has its head start with a class of path, for all that was measured of that class alone.

        Where its time as second is over one request finds out, so ask only for a dial that begins now.
        """
        memory = self._classes.find((network_id, host, path_class)) if len(self._classes) else None
        return memory is None or memory.may_lead(now)

    def ipv6_is_second(self, network_id: str, host: str, path_class: str, now: float) -> bool:
        """Say whether IPv6 was measured as worse, on a network, at a host or for a class of path; changes nothing."""
        found = (
            self._families.find((network_id, "")),
            self._families.find((network_id, host)),
            self._classes.find((network_id, host, path_class)),
        )
        return any(memory is not None and memory.is_second(now) for memory in found)

    # -- between starts -----------------------------------------------------------------------------------------------
    def worked_within(self, network_id: str, start: float, end: float) -> bool:
        """Say whether anything is known to have worked on a network between two moments."""
        network = self._networks.find(network_id)
        return network is not None and network.worked_within(start, end)

    def export(
        self, network_id: str, hosts: Collection[str], now: float, wall_s: float
    ) -> dict[str, list[AddressRecord]]:
        """Give what is to be kept of the addresses of some hosts, those tried last at the end.

        Args:
            network_id: where.
            hosts: of whom.
            now: monotonic seconds.
            wall_s: the wall clock less the monotonic one.
        """
        kept: dict[str, list[AddressRecord]] = {}
        memory = self._networks.use(network_id)
        for (network, host, address, port, carrier), record in self._records.items():
            if network == network_id and host in hosts:
                self._settle(record, memory, now)
                kept.setdefault(host, []).append(_exported(address, port, carrier, record, wall_s))
        return kept

    def export_family(self, network_id: str, host: str, wall_s: float) -> FamilyRecord | None:
        """Give IPv6's losses at a host, or (empty) on the network, to be kept; None where there are none."""
        memory = self._families.find((network_id, host))
        if memory is None or not memory.losses:
            return None
        return FamilyRecord(memory.losses, round(memory.lost_at + wall_s))

    def restore(self, network_id: str, host: str, kept: AddressRecord, now: float, wall_s: float) -> None:
        """Take over what was kept of an address, unless something is known of it already, or it is too old.

        Args:
            network_id: where.
            host: of whom.
            kept: any numbers.
            now: monotonic seconds.
            wall_s: the wall clock less the monotonic one.
        """
        candidate = Candidate(kept.address, kept.port, kept.carrier)
        seen_at = min(now, kept.seen_at - wall_s)
        life_s = limits.ADDRESS_MEMORY_S if kept.failed else limits_memory.MEMORY_LIFE_S
        if now - seen_at >= life_s or self._records.find((network_id, host, *candidate)) is not None:
            return
        record = self._records.use((network_id, host, *candidate))
        record.seen_at = seen_at
        record.register = kept.register & _MASK
        connect_s = None if kept.connect_ms is None else sound(kept.connect_ms / 1000.0, limits.SAMPLE_DURATION_S_MAX)
        record.connect_s = connect_s
        if kept.failed:
            record.failed_at = now  # it stays behind for now, however long ago that was
            if kept.ban_until - wall_s > now:
                record.ban_until = min(kept.ban_until - wall_s, now + limits.ADDRESS_BAN_S_MAX)
                self._begin_parole(record, now)

    def restore_family(self, network_id: str, host: str, kept: FamilyRecord, now: float, wall_s: float) -> None:
        """Take over what was kept of IPv6 at a host, or (empty) on the network; see `restore`.

        One loss is enough here: at a start nothing is waited for that may be broken.
        """
        lost_at = min(now, kept.lost_at - wall_s)
        known = self._families.find((network_id, host))
        if kept.losses < 1 or now - lost_at >= limits_memory.MEMORY_LIFE_S or (known is not None and known.losses):
            return
        memory = self._families.use((network_id, host))
        memory.losses = max(FAMILY_LOSSES, min(kept.losses, _MASK))
        memory.lost_at = lost_at
        memory.second_until = now + limits.FAMILY_REPROBE_S

    # -- tables -------------------------------------------------------------------------------------------------------
    def _find(self, network_id: str, host: str, candidate: Candidate, now: float) -> _Record | None:
        record = self._records.find((network_id, host, *candidate))
        return None if record is None or now - record.seen_at >= record.life_s else record

    def _use(self, network_id: str, host: str, candidate: Candidate, now: float) -> _Record:
        record = self._records.use((network_id, host, *candidate))
        if now - record.seen_at >= record.life_s:
            record.clear()
        record.seen_at = now
        return record


def _rank(record: _Record | None, now: float) -> tuple[int, int]:
    """Order good candidates: known to work, by pace in factors of two; not known; never seen to work; failed lately."""
    if record is None:
        return (1, 0)
    if record.failed_at is not None and now - record.failed_at < limits.ADDRESS_BAN_S:
        return (3, 0)
    if record.failed_at is not None and record.connect_s is None:
        return (2, 0)
    return (0, 0 if record.connect_s is None else (round(record.connect_s * 1000.0) // 50).bit_length())


def _interleave(candidates: list[Candidate], first: int) -> list[Candidate]:
    """Alternate the families, `first` in front (RFC 8305 section 4)."""
    ahead = [each for each in candidates if each.family == first]
    behind = [each for each in candidates if each.family != first]
    mixed: list[Candidate] = []
    for index in range(max(len(ahead), len(behind))):
        mixed += ahead[index : index + 1] + behind[index : index + 1]
    return mixed


def _why(record: _Record | None) -> str:
    if record is None:
        return "not known yet"
    return f"{record.failures} of the last {HISTORY_BITS} failed"


def _exported(address: str, port: int, carrier: str, record: _Record, wall_s: float) -> AddressRecord:
    return AddressRecord(
        address,
        port,
        carrier,
        round(record.seen_at + wall_s),
        record.register,
        record.failed_at is not None,
        0 if record.ban_until is None else round(record.ban_until + wall_s),
        None if record.connect_s is None else round(record.connect_s * 1000.0),
    )
