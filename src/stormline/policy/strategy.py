"""What works best on each network: which protocol at which host, which hosts are used, and when to try something else.

    choice = strategy.choose(network_id, host, ("h2", "h1"), now)     # what to offer, best first
    strategy.observe(network_id, host, "h2", now, worked=True, ...)   # what became of it
    if strategy.may_explore(network_id, now) and strategy.explore(network_id, now, chance):
        ...                                                           # this once something else than the best

Addresses, families and time-outs have policies of their own (`addresses`, `timeouts`). `collect` gathers what all of
them know of a network, `recall` gives it back at the next start: a returning network begins with its best.

A protocol is left only where it is clearly worse, and what it did fades by half in three days, so that it comes back
by itself; a failure counts only where something else worked on the same network meanwhile (as for addresses: in a
blackout everything fails). To find out earlier that something became better, one in fifty chances is given to it, never
more than once a minute on a network. The caller asks for none for a request that matters or on a weak network.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from stormline.core import limits, limits_memory
from stormline.policy.addresses import PROOF_S, AddressBook
from stormline.policy.estimate import sound
from stormline.policy.heartbeat import Heartbeats
from stormline.policy.recent import RecentTable
from stormline.policy.shape import Network
from stormline.policy.snapshot import HostRecord, NetworkRecord, ProtocolRecord
from stormline.policy.timeouts import TimeoutPolicy

BELIEVED: Final = 2.5
"""Answers and failures, faded, from which a protocol is left for one of which nothing is known: three of today."""
BELIEVED_BESIDE: Final = 1.0
"""The same where the other one is known to work: more than one, and three for five days."""
WORSE_SHARE: Final = 0.3
"""How much larger its share of failures must be before another one goes first."""
WORSE_PACE: Final = 1.5
"""How much slower its answers must be, where neither fails more: less is the weather."""
PRIOR_BAD: Final = 0.2
"""Failures that every protocol begins with, in one trial: what is not known is no better than what works."""
COUNT_MAX: Final = 100.0
"""Answers and failures that count at most; more say nothing new, and would take days to fade."""

Worked = Callable[[str, float, float], bool]
"""Says whether a network worked between two moments; `AddressBook.worked_within` does."""


class Choice(NamedTuple):
    """What to speak.

    Attributes:
        protocols: all that were offered, the best first.
        why: for the call's story.
    """

    protocols: tuple[str, ...]
    why: str


class _ProtocolMemory:
    """How one protocol does at one host."""

    __slots__ = ("at", "bad", "failed_at", "good", "pace_s", "unproved_from")

    def __init__(self) -> None:
        self.good = self.bad = 0.0
        self.pace_s: float | None = None
        self.at = -math.inf
        self.failed_at = -math.inf
        self.unproved_from: float | None = None  # the last failure does not count yet; it was tried from then on

    def fade(self, now: float) -> None:
        if now > self.at:
            factor = _faded(1.0, now - self.at)
            self.good *= factor
            self.bad *= factor
            self.at = now

    def settle(self, worked: Worked, network_id: str, now: float) -> None:
        """Count the last failure where the network has been seen to work, forget it where it has not in time."""
        if self.unproved_from is None:
            return
        if worked(network_id, self.unproved_from, self.failed_at + PROOF_S):
            self.unproved_from = None
            self.bad = min(COUNT_MAX, self.bad + 1.0)
        elif now > self.failed_at + PROOF_S:
            self.unproved_from = None

    @property
    def weight(self) -> float:
        return self.good + self.bad

    @property
    def bad_share(self) -> float:
        return (self.bad + PRIOR_BAD) / (self.weight + 1.0)


_UNKNOWN: Final = _ProtocolMemory()


class _HostMemory:
    """One host on one network."""

    __slots__ = ("at", "protocols", "tls_port", "uses")

    def __init__(self) -> None:
        self.at = -math.inf
        self.uses = 0.0
        self.tls_port = 0
        self.protocols: dict[str, _ProtocolMemory] = {}

    def protocol(self, name: str) -> _ProtocolMemory | None:
        """Give what is kept of a protocol, None where there are too many already."""
        found = self.protocols.get(name)
        if found is None and len(self.protocols) < limits_memory.MEMORY_PROTOCOLS_MAX:
            found = self.protocols[name] = _ProtocolMemory()
        return found


class _NetworkMemory:
    __slots__ = ("entered_at", "explored_at")

    def __init__(self) -> None:
        self.entered_at: float | None = None
        self.explored_at = -math.inf


class Strategy:
    """What works best where. One for a client; all tables are bounded, what is unused for longest goes first.

    Args:
        worked: says whether a network worked between two moments.

    Attributes:
        heartbeats: how long a long connection may be silent on each network.
    """

    __slots__ = ("_hosts", "_networks", "_worked", "heartbeats")

    def __init__(self, worked: Worked) -> None:
        self._worked = worked
        self.heartbeats = Heartbeats()
        self._hosts = RecentTable[tuple[str, str], _HostMemory](limits_memory.STRATEGY_HOSTS_MAX, _HostMemory)
        self._networks = RecentTable[str, _NetworkMemory](limits.TIMEOUT_NETWORKS_MAX, _NetworkMemory)

    # -- protocols ----------------------------------------------------------------------------------------------------
    def choose(self, network_id: str, host: str, offered: Sequence[str], now: float) -> Choice:
        """Put the protocols that both sides may speak into the order to try them in.

        Args:
            network_id: where.
            host: at whom.
            offered: names, the one that is best where nothing is known first; never empty.
            now: monotonic seconds.

        Returns:
            All of them: the given order stands, except that what is clearly worse lets another go first.
        """
        memory = self._hosts.find((network_id, host))
        if memory is None or len(offered) < 2:
            return Choice(tuple(offered), "nothing known")
        known: dict[str, _ProtocolMemory] = {}
        for name in offered:
            found = known[name] = memory.protocols.get(name, _UNKNOWN)
            if found is not _UNKNOWN:
                found.settle(self._worked, network_id, now)
                found.fade(now)
        best = offered[0]
        for name in offered[1:]:
            if _better(known[name], known[best]):
                best = name
        if best == offered[0]:
            return Choice(tuple(dict.fromkeys(offered)), "usual order")
        left = known[offered[0]]
        why = f"{offered[0]} did badly here: {left.bad:.1f} of {left.weight:.1f} failed"
        return Choice(tuple(dict.fromkeys((best, *offered))), why)

    def observe(
        self,
        network_id: str,
        host: str,
        protocol: str,
        now: float,
        *,
        worked: bool,
        pace_s: object = None,
        tried_s: object = None,
        tls_port: int = 0,
    ) -> None:
        """Learn from an attempt that ended. Raises nothing.

        Args:
            network_id: where.
            host: at whom.
            protocol: what was spoken; empty where it came to nothing.
            now: monotonic seconds.
            worked: an answer came, whatever it said. False: the path failed.
            pace_s: what the answer's first byte took, where nothing else was under way; unsound values are dropped.
            tried_s: how long a failed attempt was waited for; unsound values are dropped.
            tls_port: the port, where TLS was spoken.
        """
        memory = self._hosts.use((network_id, host))
        if worked:
            memory.uses = min(COUNT_MAX, _faded(memory.uses, now - memory.at) + 1.0)
            memory.tls_port = tls_port or memory.tls_port
        memory.at = max(memory.at, now)
        found = memory.protocol(protocol) if protocol else None
        if found is None:
            return
        found.settle(self._worked, network_id, now)
        found.fade(now)
        if not worked:
            tried = sound(tried_s, limits.SAMPLE_DURATION_S_MAX) or 0.0
            if found.unproved_from is None:
                found.unproved_from = now - tried
            found.failed_at = now
            found.settle(self._worked, network_id, now)
            return
        found.good = min(COUNT_MAX, found.good + 1.0)
        sample = sound(pace_s, limits.SAMPLE_DURATION_S_MAX)
        if sample is not None:
            found.pace_s = sample if found.pace_s is None else found.pace_s + (sample - found.pace_s) / 8.0

    def touch(self, network_id: str, host: str, now: float) -> None:
        """Take note that a host was reached, so that what is known of it is kept."""
        memory = self._hosts.use((network_id, host))
        memory.at = max(memory.at, now)

    # -- trials -------------------------------------------------------------------------------------------------------
    def enter(self, network_id: str, now: float) -> None:
        """The client is on this network from now on: for `limits_memory.EXPLORE_QUIET_S` nothing is tried."""
        self._networks.use(network_id).entered_at = now

    def may_explore(self, network_id: str, now: float) -> bool:
        """Say whether a trial is possible now, so that a random number is worth drawing."""
        memory = self._networks.find(network_id)
        return (
            memory is not None
            and memory.entered_at is not None
            and now - memory.entered_at >= limits_memory.EXPLORE_QUIET_S
            and now - memory.explored_at >= limits_memory.EXPLORE_PAUSE_S
        )

    def explore(self, network_id: str, now: float, chance: float) -> bool:
        """Say whether something else than the best is to be tried, this once; then none for a while.

        Args:
            network_id: where.
            now: monotonic seconds.
            chance: a draw from [0, 1).
        """
        if chance >= limits_memory.EXPLORE_SHARE or not self.may_explore(network_id, now):
            return False
        self._networks.use(network_id).explored_at = now
        return True

    # -- use ----------------------------------------------------------------------------------------------------------
    def most_used(self, network_id: str, now: float, count: int) -> list[tuple[str, int]]:
        """Give the hosts asked most on a network over TLS, with their port, most used first; at most `count`."""
        found = [
            (-_faded(memory.uses, now - memory.at), host, memory.tls_port)
            for (network, host), memory in self._hosts.items()
            if network == network_id and memory.tls_port and now - memory.at < limits_memory.MEMORY_LIFE_S
        ]
        return [(host, port) for _, host, port in sorted(found)[: max(0, count)]]

    # -- between starts -----------------------------------------------------------------------------------------------
    def export(self, network_id: str, now: float, wall_s: float) -> NetworkRecord:
        """Give what is to be kept, of `limits_memory.MEMORY_HOSTS_MAX` hosts; of addresses and times nothing."""
        for (network, _), memory in self._hosts.items():
            if network == network_id:
                for each in memory.protocols.values():
                    each.settle(self._worked, network_id, now)
        hosts = [
            HostRecord(
                host,
                round(memory.at + wall_s),
                uses=round(memory.uses, 2),
                tls_port=memory.tls_port,
                protocols=tuple(_exported(name, each, wall_s) for name, each in memory.protocols.items()),
            )
            for (network, host), memory in self._hosts.items()
            if network == network_id and now - memory.at < limits_memory.MEMORY_LIFE_S
        ]
        hosts.sort(key=lambda each: each.at)
        return NetworkRecord(
            at=max((each.at for each in hosts), default=round(now + wall_s)),
            heartbeat=self.heartbeats.export(network_id, now, wall_s),
            hosts=tuple(hosts[-limits_memory.MEMORY_HOSTS_MAX :]),
        )

    def restore(self, network_id: str, kept: NetworkRecord, now: float, wall_s: float) -> None:
        """Take over what was kept, where nothing is known yet and it is not too old."""
        if kept.heartbeat is not None:
            self.heartbeats.restore(network_id, kept.heartbeat, now, wall_s)
        for record in kept.hosts:
            at = min(now, record.at - wall_s)
            if now - at >= limits_memory.MEMORY_LIFE_S or self._hosts.find((network_id, record.host)) is not None:
                continue
            memory = self._hosts.use((network_id, record.host))
            memory.at = at
            memory.uses = sound(record.uses, COUNT_MAX) or 0.0
            memory.tls_port = record.tls_port if 0 < record.tls_port < 65536 else 0
            for each in record.protocols:
                found = memory.protocol(each.name)
                if found is None:
                    break
                found.at = min(now, each.at - wall_s)
                found.good = sound(each.good, COUNT_MAX) or 0.0
                found.bad = sound(each.bad, COUNT_MAX) or 0.0
                pace_s = None if each.pace_ms is None else each.pace_ms / 1000.0
                found.pace_s = None if pace_s is None else sound(pace_s, limits.SAMPLE_DURATION_S_MAX)


def collect(
    network: Network, book: AddressBook, timeouts: TimeoutPolicy, strategy: Strategy, now: float, wall_s: float
) -> NetworkRecord:
    """Gather what is to be kept of a network from those who know it.

    Names are given as they are: `snapshot.bound`, which whoever writes it down applies, leaves out those too long.

    Args:
        network: which.
        book: its addresses and families.
        timeouts: its round trips, rates and costs.
        strategy: its hosts and protocols.
        now: monotonic seconds.
        wall_s: the wall clock less the monotonic one.
    """
    known = strategy.export(network.id, now, wall_s)
    names = [each.host for each in known.hosts]
    times = timeouts.export(network, names, wall_s)
    addresses = book.export(network.id, frozenset(names), now, wall_s)
    hosts = tuple(
        each._replace(
            ipv6=book.export_family(network.id, each.host, wall_s),
            addresses=tuple(addresses.get(each.host, ())[-limits_memory.MEMORY_ADDRESSES_MAX :]),
            rtt=timed.rtt,
            paths=timed.paths,
        )
        for each, timed in zip(known.hosts, times.hosts, strict=True)
    )
    ipv6 = book.export_family(network.id, "", wall_s)
    return known._replace(ipv6=ipv6, rtt=times.rtt, up=times.up, down=times.down, hosts=hosts)


def recall(
    kept: NetworkRecord,
    network: Network,
    book: AddressBook,
    timeouts: TimeoutPolicy,
    strategy: Strategy,
    now: float,
    wall_s: float,
) -> None:
    """Give back what was kept of a network. What is known already stands; what is too old is left out.

    Args:
        kept: within the bounds of `snapshot.bound`.
        network, book, timeouts, strategy, now, wall_s: as for `collect`.
    """
    strategy.restore(network.id, kept, now, wall_s)
    fresh = [each for each in kept.hosts if now - min(now, each.at - wall_s) < limits_memory.MEMORY_LIFE_S]
    kept = kept._replace(hosts=tuple(fresh))
    if now - min(now, kept.at - wall_s) >= limits_memory.MEMORY_LIFE_S:
        kept = kept._replace(ipv6=None, rtt=(), up=None, down=None)
    timeouts.restore(network, kept, now, wall_s)
    if kept.ipv6 is not None:
        book.restore_family(network.id, "", kept.ipv6, now, wall_s)
    for record in kept.hosts:
        if record.ipv6 is not None:
            book.restore_family(network.id, record.host, record.ipv6, now, wall_s)
        for each in record.addresses:
            book.restore(network.id, record.host, each, now, wall_s)


def _better(one: _ProtocolMemory, other: _ProtocolMemory) -> bool:
    """Say whether `one` is to be tried before `other`, which is the usual one."""
    if other.weight <= (BELIEVED_BESIDE if one.good >= 0.5 else BELIEVED):
        return False
    worse = other.bad_share - one.bad_share
    if worse >= WORSE_SHARE:
        return True
    if worse < -0.05 or one.weight < BELIEVED or one.pace_s is None or other.pace_s is None:
        return False
    return one.pace_s * WORSE_PACE <= other.pace_s


def _faded(value: float, passed_s: float) -> float:
    return value * math.exp2(-max(0.0, passed_s) / limits_memory.MEMORY_HALF_LIFE_S)


def _exported(name: str, memory: _ProtocolMemory, wall_s: float) -> ProtocolRecord:
    pace_ms = None if memory.pace_s is None else round(memory.pace_s * 1000.0)
    return ProtocolRecord(name, round(memory.good, 2), round(memory.bad, 2), pace_ms, round(memory.at + wall_s))
