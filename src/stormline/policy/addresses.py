"""Which address of a host to try first: history, bans and the preferred family, per network.

    order = book.plan(network_id, host, candidates, now, left={address that just failed})
    book.observe(AddressOutcome(...), now)

Mars's start (`stn/src/simple_ipport_sort.cc`): the last eight verdicts in a shift register, a ban at three failures, six
minutes more for each further one up to thirty, a record's life of a day. Changed:

- a ban needs proof that the network itself worked since the failures began; in a blackout every address fails and none
  is to blame;
- an address that lost a race was slower, not broken, and is not charged (Mars books it as timed out);
- parole: after half a minute (doubling) a banned address may be tried once, behind the others; Mars waits out the ban;
- never all: where every address is banned, all are used, the one whose ban ends first in front;
- nothing is shuffled here: among equals the given order stands, so whoever wants load spread shuffles before;
- families: IPv6 first (RFC 8305 section 4) until it loses, and again `limits.FAMILY_REPROBE_S` later.
"""

import enum
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from stormline.core import limits
from stormline.policy.estimate import sound

HISTORY_BITS: Final = 8
"""Verdicts in an address's register (Mars)."""
BAN_FAILURES: Final = 3
"""Failures among them from which an address is banned (Mars)."""
FAMILY_LOSSES: Final = 2
"""Losses in a row to the other family after which a family is second: one can be chance."""
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
    """

    network_id: str
    host: str
    candidate: Candidate
    verdict: Verdict
    connect_s: float | None = None


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

    __slots__ = ("ban_until", "connect_s", "failed_at", "failing_since", "parole_at", "paroles", "register", "seen_at")

    def __init__(self, now: float) -> None:
        self.register = 0
        self.seen_at = now
        self.failed_at: float | None = None
        self.failing_since: float | None = None
        self.ban_until: float | None = None
        self.parole_at: float | None = None
        self.paroles = 0
        self.connect_s: float | None = None

    @property
    def failures(self) -> int:
        return self.register.bit_count()


class _Family:
    """Which family goes first on one network."""

    __slots__ = ("losses", "probing_until", "second_until", "worked_at")

    def __init__(self) -> None:
        self.losses = 0
        self.second_until: float | None = None  # IPv6 is second until then
        self.probing_until: float | None = None
        self.worked_at: float | None = None  # anything worked on this network


class AddressBook:
    """Histories of addresses. One for a client; bounded, the longest unused host goes first."""

    __slots__ = ("_hosts", "_networks", "dropped")

    def __init__(self) -> None:
        self._hosts: OrderedDict[tuple[str, str], dict[Candidate, _Record]] = OrderedDict()
        self._networks: OrderedDict[str, _Family] = OrderedDict()
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
            The good ones by families in turn; then one on parole; then what the request has left. Banned ones without
            parole are left out unless nothing else is there. Never empty where `candidates` is not.
        """
        records = self._hosts.get((network_id, host), {})
        unique = list(dict.fromkeys(candidates))
        family = self._networks.get(network_id)
        good, parole, banned = [], [], []
        for candidate in (each for each in unique if each not in left):
            record = records.get(candidate)
            if record is None or not self._banned(record, family, now):
                good.append(candidate)
            elif record.parole_at is not None and now >= record.parole_at:
                parole.append(candidate)
            else:
                banned.append(candidate)
        good.sort(key=lambda each: _rank(records.get(each), now))
        first = self._first_family(network_id, {each.family for each in good}, now)
        order = [Ranked(each, False, _why(records.get(each))) for each in _interleave(good, first)]
        for candidate in parole[:1]:
            record = records[candidate]
            self._begin_parole(record, now)
            order.append(Ranked(candidate, True, f"on parole, {_why(record)}"))
        order += [Ranked(each, False, "left by this request") for each in unique if each in left]
        if not order:
            soonest = sorted(banned, key=lambda each: records[each].ban_until or 0.0)
            order = [Ranked(each, True, f"nothing else is left, {_why(records[each])}") for each in soonest]
        return order

    def observe(self, outcome: AddressOutcome, now: float) -> None:
        """Learn from one verdict. Raises nothing."""
        family = self._family(outcome.network_id)
        records = self._records(outcome.network_id, outcome.host)
        record = records.get(outcome.candidate)
        if record is None:
            if outcome.verdict is Verdict.OUTRUN:
                self._learn_family(family, outcome, now)
                return
            record = self._add(records, outcome.candidate, now)
        elif now - record.seen_at >= limits.ADDRESS_MEMORY_S:
            record = records[outcome.candidate] = _Record(now)
        record.seen_at = now
        if outcome.connect_s is not None:
            sample = sound(outcome.connect_s, limits.SAMPLE_DURATION_S_MAX)
            self.dropped += sample is None
            if sample is not None:
                known = record.connect_s
                record.connect_s = sample if known is None else known + (sample - known) / 4.0
        if outcome.verdict is Verdict.WORKED:
            family.worked_at = now
            self._forgive(record)
        elif outcome.verdict is Verdict.FAILED:
            self._charge(record, now)
        self._learn_family(family, outcome, now)

    def ban(self, network_id: str, host: str, candidate: Candidate, now: float, span_s: float) -> None:
        """Ban an address because dispatch or its server said so, at most for `limits.ADDRESS_BAN_S_MAX`."""
        span = sound(span_s, limits.SAMPLE_DURATION_S_MAX)
        if span is None:
            self.dropped += 1
            return
        records = self._records(network_id, host)
        record = records.get(candidate) or self._add(records, candidate, now)
        record.register = _MASK
        record.failing_since = None  # told, not guessed: it needs no proof
        record.failed_at = record.seen_at = now
        record.ban_until = now + min(span, limits.ADDRESS_BAN_S_MAX)
        record.parole_at = None

    def next_timer(self) -> float | None:
        """None: bans and paroles are looked at when an order is made."""
        return None

    # -- one record ---------------------------------------------------------------------------------------------------
    def _banned(self, record: _Record, family: _Family | None, now: float) -> bool:
        if record.ban_until is None or now >= record.ban_until:
            return False
        since = record.failing_since
        if since is None:
            return True
        return family is not None and family.worked_at is not None and family.worked_at >= since

    def _charge(self, record: _Record, now: float) -> None:
        if record.failed_at is not None and 0.0 <= now - record.failed_at < limits.ADDRESS_FAILURE_SPAN_S:
            return
        record.register = (record.register << 1 | 1) & _MASK
        record.failed_at = now
        if record.failing_since is None and record.ban_until is None:
            record.failing_since = now
        if record.failures >= BAN_FAILURES:
            steps = record.failures - BAN_FAILURES + 1
            record.ban_until = now + min(limits.ADDRESS_BAN_S * steps, limits.ADDRESS_BAN_S_MAX)
            self._begin_parole(record, now)

    def _begin_parole(self, record: _Record, now: float) -> None:
        """Set the moment of the next try: later each time, also where nobody tells what became of this one."""
        record.parole_at = now + limits.ADDRESS_PAROLE_S * 2.0 ** min(record.paroles, 6)
        record.paroles += 1

    def _forgive(self, record: _Record) -> None:
        record.register = record.register << 1 & _MASK
        record.failing_since = record.ban_until = record.parole_at = None
        record.paroles = 0

    # -- families -----------------------------------------------------------------------------------------------------
    def _first_family(self, network_id: str, families: set[int], now: float) -> int:
        """Give the family with the head start; where IPv6's time as second is over, one request finds out."""
        memory = self._networks.get(network_id)
        if len(families) < 2 or memory is None or memory.second_until is None:
            return 6
        if now < memory.second_until:
            return 4
        if memory.probing_until is not None and now < memory.probing_until:
            return 4
        memory.probing_until = now + limits.FAMILY_PROBE_S
        return 6

    def _learn_family(self, memory: _Family, outcome: AddressOutcome, now: float) -> None:
        if outcome.candidate.family == 4:
            return
        if outcome.verdict is Verdict.WORKED:
            memory.losses = 0
            memory.second_until = memory.probing_until = None
            return
        memory.losses += 1
        if memory.losses >= FAMILY_LOSSES and (memory.second_until is None or now >= memory.second_until):
            memory.second_until = now + limits.FAMILY_REPROBE_S
            memory.probing_until = None

    # -- tables -------------------------------------------------------------------------------------------------------
    def _family(self, network_id: str) -> _Family:
        memory = self._networks.get(network_id)
        if memory is None:
            memory = self._networks[network_id] = _Family()
            if len(self._networks) > limits.TIMEOUT_NETWORKS_MAX:
                self._networks.popitem(last=False)
        else:
            self._networks.move_to_end(network_id)
        return memory

    def _records(self, network_id: str, host: str) -> dict[Candidate, _Record]:
        key = (network_id, host)
        records = self._hosts.get(key)
        if records is None:
            records = self._hosts[key] = {}
            if len(self._hosts) > limits.ADDRESS_HOSTS_MAX:
                self._hosts.popitem(last=False)
        else:
            self._hosts.move_to_end(key)
        return records

    def _add(self, records: dict[Candidate, _Record], candidate: Candidate, now: float) -> _Record:
        if len(records) >= limits.ADDRESSES_PER_HOST_MAX:
            del records[min(records, key=lambda each: records[each].seen_at)]
        record = records[candidate] = _Record(now)
        return record


def _rank(record: _Record | None, now: float) -> tuple[int, float, int]:
    """Order good candidates: what failed last behind what did not, then by speed in steps of a factor of two."""
    if record is None or now - record.seen_at >= limits.ADDRESS_MEMORY_S:
        return (0, 0.0, 1)
    # An unknown address stands with the quick ones, but behind them: one that is known to work wins.
    pace = 0 if record.connect_s is None else max(0, (round(record.connect_s * 1000.0) // 50).bit_length())
    return (record.failures if record.register & 1 else 0, float(pace), 0)


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
