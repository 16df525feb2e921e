"""What is kept of a network between two starts: plain values, and the rules that join, bound and age them.

The policies give and take these (`AddressBook.export`, `TimeoutPolicy.export`, `Strategy.export`); `client.memory` puts
them into files. Moments are whole seconds of the wall clock, since monotonic clocks begin anew with each start; spans
are milliseconds. Nothing here says what was asked or answered: hosts, their addresses, and numbers.
"""

import hashlib
from typing import Final, NamedTuple, TypeVar

from stormline.core import limits, limits_carriers, limits_memory

_NUMBER_MAX: Final = 2.0**53
Buckets = tuple[int, ...]
"""`estimate.DurationSketch.summary`."""


class AddressRecord(NamedTuple):
    """One address of a host.

    Attributes:
        address: an IP literal.
        port: its port.
        carrier: what is spoken there, as in `addresses.Candidate`.
        seen_at: when it was last tried.
        register: its last eight verdicts, newest lowest, 1 for a failure.
        failed: the last verdict was a failure.
        ban_until: when its ban ends; 0: none.
        connect_ms: what TCP and TLS take; None where it never stood.
    """

    address: str
    port: int
    carrier: str
    seen_at: int
    register: int
    failed: bool
    ban_until: int
    connect_ms: int | None


class FamilyRecord(NamedTuple):
    """IPv6's losses to IPv4 since it last worked.

    Attributes:
        losses: how many in a row.
        lost_at: when the last was.
    """

    losses: int
    lost_at: int


class PathRecord(NamedTuple):
    """What one class of a host's requests takes.

    Attributes:
        digest: `path_digest` of the class: which it was cannot be read from it.
        cost: what its server needs.
        answer_bytes: size of its answers; None: not known.
    """

    digest: str
    cost: Buckets
    answer_bytes: int | None


class ProtocolRecord(NamedTuple):
    """How one protocol did at a host.

    Attributes:
        name: `h1`, `h2`, `h3`, `long`.
        good: answers that count, faded.
        bad: failures that count, faded.
        pace_ms: what an answer's first byte takes; None: not known.
        at: when it was last heard of.
    """

    name: str
    good: float
    bad: float
    pace_ms: int | None
    at: int


class RateRecord(NamedTuple):
    """A rate that was measured.

    Attributes:
        bytes_per_s: how fast.
        at: when.
    """

    bytes_per_s: float
    at: int


class HostRecord(NamedTuple):
    """All that is kept of a host on one network.

    Attributes:
        host: its name.
        at: when it was last used.
        uses: how much it is used, faded.
        tls_port: where it was asked over TLS; 0: it was not.
        ipv6: IPv6's losses there.
        addresses: the newest last.
        rtt: round trips.
        paths: the newest last.
        protocols: how each did.
    """

    host: str
    at: int
    uses: float = 0.0
    tls_port: int = 0
    ipv6: FamilyRecord | None = None
    addresses: tuple[AddressRecord, ...] = ()
    rtt: Buckets = ()
    paths: tuple[PathRecord, ...] = ()
    protocols: tuple[ProtocolRecord, ...] = ()


class CarrierRecord(NamedTuple):
    """A carrier of the long connection that did not pass where another did.

    Attributes:
        name: `sl-tls`, ...
        try_at: when it is tried again.
        pause_s: how long was waited for that.
    """

    name: str
    try_at: int
    pause_s: int


class HeartbeatRecord(NamedTuple):
    """What silences a long connection survives on a network.

    Attributes:
        at: when something was last learned of it.
        good_ms: the longest that was survived, 0: none was.
        bad_ms: the shortest that was lost, 0: none was.
        losses: links that finding it has cost so far.
        bad_at: when that was lost last, 0: never.
        settled: the heartbeat below it has stood for a while.
        false_at: when a loss last proved to be by chance; 0: never.
    """

    at: int
    good_ms: int = 0
    bad_ms: int = 0
    losses: int = 0
    bad_at: int = 0
    settled: bool = False
    false_at: int = 0


class NetworkRecord(NamedTuple):
    """All that is kept of a network.

    Attributes:
        at: when it was last used.
        ipv6: IPv6's losses on it.
        rtt: round trips, whatever the host.
        up, down: rates.
        heartbeat: what silences a long connection survives; None: not known.
        hosts: those used last at the end.
        carriers: those that did not pass.
    """

    at: int
    ipv6: FamilyRecord | None = None
    rtt: Buckets = ()
    up: RateRecord | None = None
    down: RateRecord | None = None
    heartbeat: HeartbeatRecord | None = None
    hosts: tuple[HostRecord, ...] = ()
    carriers: tuple[CarrierRecord, ...] = ()


def path_digest(path_class: str) -> str:
    """Give a name for a path class that does not show it: paths may hold what nobody should read in a file."""
    return hashlib.blake2b(path_class.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def merge(one: NetworkRecord, other: NetworkRecord) -> NetworkRecord:
    """Join what two clients have kept of the same network: of each host, and of the network itself, the newer word.

    Nothing is averaged: two words on the same thing rest for the most part on the same events. Where both are of the
    same second the first stands. The result is within the bounds of `bound`.
    """
    first, second = (one, other) if one.at >= other.at else (other, one)
    joined = first._replace(
        ipv6=first.ipv6 if first.ipv6 is not None else second.ipv6,
        rtt=first.rtt or second.rtt,
        up=_newer(first.up, second.up),
        down=_newer(first.down, second.down),
        heartbeat=_newer(first.heartbeat, second.heartbeat),
        hosts=(*one.hosts, *other.hosts),
    )
    return bound(joined)


def bound(record: NetworkRecord, *, hosts_max: int = limits_memory.MEMORY_HOSTS_MAX) -> NetworkRecord:
    """Give the record with no more than may be kept: the hosts used last, and of each its newest addresses and paths.

    Hosts come in the order of their last use, the newest at the end, each once. Left out are names longer than a DNS
    name may be, and whatever holds a number that is none of ours (`_NUMBER_MAX`).
    """
    if not _is_sound(record._replace(hosts=())):
        record = NetworkRecord(at=0, hosts=record.hosts)
    newest: dict[str, HostRecord] = {}
    for each in record.hosts:
        known = newest.get(each.host)
        if (
            len(each.host) <= limits_memory.MEMORY_NAME_CHARS_MAX
            and _is_sound(each)
            and (known is None or each.at > known.at)
        ):
            newest[each.host] = each
    hosts = sorted(newest.values(), key=lambda each: each.at)
    return record._replace(
        rtt=record.rtt[: limits.SKETCH_SAMPLES_KEPT],
        carriers=tuple(each for each in record.carriers if len(each.name) <= limits_memory.MEMORY_WORD_CHARS_MAX)[
            : limits_carriers.CARRIERS_REMEMBERED
        ],
        hosts=tuple(_bound_host(each) for each in hosts[max(0, len(hosts) - max(0, hosts_max)) :]),
    )


def _is_sound(value: object) -> bool:
    """Say whether all numbers in a record are ones that we would have written."""
    if isinstance(value, tuple):
        return all(map(_is_sound, value))
    return not isinstance(value, int | float) or -_NUMBER_MAX <= value <= _NUMBER_MAX  # NaN is neither


def _bound_host(record: HostRecord) -> HostRecord:
    def short(*texts: str) -> bool:
        return all(len(text) <= limits_memory.MEMORY_WORD_CHARS_MAX for text in texts)

    addresses = [each for each in record.addresses if short(each.address, each.carrier)]
    paths = [each for each in record.paths if short(each.digest)][-limits_memory.MEMORY_PATHS_MAX :]
    protocols = [each for each in record.protocols if short(each.name)]
    return record._replace(
        rtt=record.rtt[: limits.SKETCH_SAMPLES_KEPT],
        addresses=tuple(addresses[-limits_memory.MEMORY_ADDRESSES_MAX :]),
        paths=tuple(each._replace(cost=each.cost[: limits.SKETCH_SAMPLES_KEPT]) for each in paths),
        protocols=tuple(protocols[: limits_memory.MEMORY_PROTOCOLS_MAX]),
    )


_Dated = TypeVar("_Dated", RateRecord, HeartbeatRecord)


def _newer(one: _Dated | None, other: _Dated | None) -> _Dated | None:
    return max((each for each in (one, other) if each is not None), key=lambda each: each.at, default=None)
