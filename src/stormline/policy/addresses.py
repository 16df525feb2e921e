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
- families: IPv6 first (RFC 8305 section 4) until it loses, and again `limits.FAMILY_REPROBE_S` later.
"""

import enum
import math
from collections import deque
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from stormline.core import limits
from stormline.policy.estimate import sound
from stormline.policy.recent import RecentTable

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


class _NetworkMemory:
    """When a network worked, and which family goes first on it."""

    __slots__ = ("losses", "probing_until", "second_until", "worked")

    def __init__(self) -> None:
        self.losses = 0
        self.second_until: float | None = None  # IPv6 is second until then
        self.probing_until: float | None = None
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

    __slots__ = ("_networks", "_records", "dropped")

    def __init__(self) -> None:
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
    ) -> list[Ranked]:
        """Put candidates into the order in which a race should start them.

        Args:
            network_id: where it goes out.
            host: for which host.
            candidates: what there is, best first where nothing is known; the same one twice counts once.
            now: monotonic seconds.
            left: what this request has failed on already; goes last.

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
        first = self._first_family(network_id, {each.family for each in good}, now)
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
    def _first_family(self, network_id: str, families: set[int], now: float) -> int:
        """Give the family with the head start; where IPv6's time as second is over, one request finds out."""
        memory = self._networks.find(network_id)
        if len(families) < 2 or memory is None or memory.second_until is None:
            return 6
        if now < memory.second_until:
            return 4
        if memory.probing_until is not None and now < memory.probing_until:
            return 4
        memory.probing_until = now + limits.FAMILY_PROBE_S
        return 6

    def _learn_family(self, memory: _NetworkMemory, outcome: AddressOutcome, now: float) -> None:
        if outcome.candidate.family == 4:
            return
        if outcome.verdict is Verdict.WORKED:
            memory.losses = 0
            memory.second_until = memory.probing_until = None
            return
        if outcome.verdict is Verdict.FAILED and not memory.worked_within(now - PROOF_S, now):
            return  # the network may be dark, which says nothing of IPv6
        memory.losses += 1
        if memory.losses >= FAMILY_LOSSES and (memory.second_until is None or now >= memory.second_until):
            memory.second_until = now + limits.FAMILY_REPROBE_S
            memory.probing_until = None

    # -- tables -------------------------------------------------------------------------------------------------------
    def _find(self, network_id: str, host: str, candidate: Candidate, now: float) -> _Record | None:
        record = self._records.find((network_id, host, *candidate))
        return None if record is None or now - record.seen_at >= limits.ADDRESS_MEMORY_S else record

    def _use(self, network_id: str, host: str, candidate: Candidate, now: float) -> _Record:
        record = self._records.use((network_id, host, *candidate))
        if now - record.seen_at >= limits.ADDRESS_MEMORY_S:
            record.clear()
        record.seen_at = now
        return record


def _rank(record: _Record | None, now: float) -> tuple[bool, bool, int]:
    """Order good candidates: what failed last goes behind, what is known to work ahead, by pace in factors of two."""
    if record is None:
        return (False, True, 0)
    failing = record.failed_at is not None and now - record.failed_at < limits.ADDRESS_BAN_S
    return (failing, False, 0 if record.connect_s is None else (round(record.connect_s * 1000.0) // 50).bit_length())


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
