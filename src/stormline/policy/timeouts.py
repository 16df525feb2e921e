"""How long one attempt of one request may take, phase by phase.

    limits = policy.plan(shape, network, now, deadline=deadline, attempt=1, attempts=4, queue=queue)
    ...                                      # limits.connect_s, .first_packet_s, .packet_gap_s, ...
    policy.observe(Outcome(...), now)        # what became of it

Four questions, as in Mars ("the thinking behind read and write time-outs", scheme two and three): the whole task, one
attempt's reading and writing, the first packet, packet to packet; and connect and TLS before them. Mars's formula is
the cold start; then what is measured takes over. `docs/explanation/timeouts.md` has the formulas and examples.

What differs from Mars, and why:

- Mars knows two classes of network and fixed numbers; here round trips and rates are measured per network and host,
  and a network whose round trips are short counts as fast, whatever its kind.
- Its Excellent works only where the server's cost is given as exactly 0, its Bad does nothing. Here the server's cost
  is a term of its own in every state, and Bad is more patient.
- With a server cost given its cap of 22 or 30 s no longer holds while without one it does; here no term is capped but
  by the deadline, so that a larger request never has less time.
- Its first-packet clock runs from the first byte, so a slow upload must be guessed; ours from the last byte taken by
  the kernel, and sending has a silence time-out of its own.
- Clocks are exact, not of one second.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from stormline.core import limits, limits_memory
from stormline.policy.estimate import DurationSketch, RateWindow, sound
from stormline.policy.quality import FAST_KINDS, NetworkQuality, State
from stormline.policy.recent import RecentTable
from stormline.policy.shape import ANSWER_BYTES_UNKNOWN, NO_QUEUE, Network, Pattern, Queue, RequestShape
from stormline.policy.snapshot import HostRecord, NetworkRecord, PathRecord, RateRecord, path_digest

# -- cold start: Mars, stn/config.h and stn/src/task_profile.cc; (fast kinds, others) ----------------------------------
COLD_FIRST_S: Final = (12.0, 15.0)
"""First packet, without sizes."""
COLD_FIRST_EXCELLENT_S: Final = (7.0, 10.0)
"""The same on an excellent network."""
COLD_BYTES_PER_S: Final = (12 * 1024.0, 4 * 1024.0)
"""The slowest rate reckoned with. Also where round trips are measured but no rate is."""
COLD_QUEUED_S: Final = (1.5, 3.0)
"""For each request in flight before this one."""
COLD_QUEUED_MAX: Final = 5
"""How many of these count."""
COLD_GAP_S: Final = (8.0, 12.0)
"""Packet to packet."""
TASK_ATTEMPT_S: Final = 20.0
"""Whole task per attempt, without the server's cost: 15 + 5 s."""
# -- ours --------------------------------------------------------------------------------------------------------------
COLD_RTT_S: Final = (0.3, 0.7)
"""Round trip reckoned with before one is measured: a far server; EDGE."""
STATE_FACTOR: Final = {State.EXCELLENT: 1.0, State.EVALUATING: 1.5, State.BAD: 2.0}
"""Patience by state of the network."""
PATIENCE_MAX: Final = 4.0
"""More than this is no patience that a level asks for."""
ATTEMPT_FACTORS: Final = (1.0, 1.5, 2.0)
"""Patience by attempt, the last for all later ones: first short, retries longer (iQiyi's article on success rates)."""
QUEUED_S: Final = (0.3, 0.6)
"""For each request in flight before this one, where round trips are measured: a fifth of Mars's. Requests pile up
where a dead spot begins, before any answer can tell of it."""
WAITED_FACTOR: Final = 2.0
"""Where another request on the network has been waiting for long, this one may wait twice as long."""
RTT_FACTOR: Final = 2.0
"""A first packet may take twice the 99th percentile of the round trips."""
RTO_FACTOR: Final = 3.0
"""And one RTO and its double more: a packet lost twice (RFC 6298 section 5.5) is no dead path."""
GAP_RTO_FACTOR: Final = 7.0
"""Within a body three losses in a row are borne: RTO + 2 RTO + 4 RTO."""
RTO_MIN_S: Final = 0.3
"""Least RTO reckoned with: Linux' 0.2 s and a delayed acknowledgement."""
RTO_VARIANCE_S: Final = 0.2
"""What the kernel's RTO is above the round trip at least (Linux: `tcp_rto_min`)."""
SYN_LOSSES_S: Final = 3.0
"""Two SYNs lost: 1 + 2 s (RFC 6298 section 2.1)."""
TLS_ROUND_TRIPS: Final = 2.0
"""TLS 1.2's; TLS 1.3 needs one."""
TLS_BYTES: Final = 6 * 1024
"""A server's certificates and the rest of its handshake."""
TLS_WORK_S: Final = 0.5
"""Signatures on both sides, on busy machines."""
RATE_SHARE: Final = 0.5
"""Share of the measured rate that is counted on: others use the link too."""
SHARE_GROWTH: Final = 1.5
"""How much longer each attempt's share of the deadline is than the one before."""
SET_UP_RTTS: Final = 3.0
"""Round trips before a question can be asked on a new connection: TCP, TLS 1.2."""
RATE_SAMPLE_BYTES_MIN: Final = 16 * 1024
"""Less than this tells more of slow start than of the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """The limits of one attempt, seconds, each above 0 and none longer than what is left of the whole task.

    Attributes:
        task_s: from now to the deadline that all attempts share; infinite where there is none.
        first_by_s: from the attempt's start to the answer's first packet, connecting included; what is left after it
            is worth another attempt. `task_s` where no other attempt would fit.
        connect_s: one TCP connection.
        tls_s: one TLS handshake.
        send_gap_s: longest time in which the kernel takes nothing of a request that is being sent.
        first_packet_s: from the last byte the kernel took to the first packet of the answer.
        packet_gap_s: between two packets of the answer; None: silence is no failure (an idle stream).
        read_write_s: from the first byte sent to the last received.
        basis: how it was reckoned, for the call's story.
    """

    task_s: float
    first_by_s: float
    connect_s: float
    tls_s: float
    send_gap_s: float
    first_packet_s: float
    packet_gap_s: float | None
    read_write_s: float
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one attempt. What was not measured is None; unsound numbers are dropped and counted.

    Attempts that the caller cancelled, or that another one outran, are not told: they say nothing.

    Attributes:
        network: where it went out.
        host: its host.
        path_class: its class.
        answered: an answer came, whatever its status. False: the path failed (a time-out, refused, cut).
        first_byte_s: from the last byte sent to the answer's first; where none came, to the moment it was given up
            (None where something other than silence ended it).
        body_s: from the answer's first byte to its last.
        total_s: from the first byte sent to the answer's last.
        request_bytes: sent.
        answer_bytes: received.
        server_s: what the server says that it needed (`shape.server_timing_s`).
        queued: other requests were in flight before it on the same link.
        held: the server was asked to wait (long poll, stream): its waiting teaches nothing.
    """

    network: Network
    host: str
    path_class: str = ""
    answered: bool
    first_byte_s: float | None = None
    body_s: float | None = None
    total_s: float | None = None
    request_bytes: int = 0
    answer_bytes: int = 0
    server_s: float | None = None
    queued: bool = False
    held: bool = False


class _NetworkMemory:
    __slots__ = ("answered_at", "down", "quality", "rtt", "up")

    def __init__(self) -> None:
        self.answered_at = -math.inf
        self.rtt = DurationSketch()
        self.up = RateWindow()
        self.down = RateWindow()
        self.quality = NetworkQuality()


class _PathMemory(DurationSketch):
    """What one class of one host's requests costs its server, and how large the answers are."""

    __slots__ = ("answer_bytes",)

    def __init__(self) -> None:
        super().__init__()
        self.answer_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class _Measures:
    """All numbers that one plan is made from."""

    fast: bool
    state: State
    rtt_s: float | None  # the 99th percentile, widened
    rtt_usual_s: float  # the 90th
    up: float
    down: float
    cost_s: float
    answer_bytes: int

    @property
    def rto_s(self) -> float:
        return max(RTO_MIN_S, self.rtt_usual_s + RTO_VARIANCE_S)


class TimeoutPolicy:
    """Plans time-outs and learns from what became of them. One for a client; all tables are bounded.

    Guarantees, whatever was observed: every time-out is above 0 and at most what is left until the deadline; a larger
    request, a longer queue, slower round trips or a slower rate never shorten one.
    """

    __slots__ = ("_kept", "_networks", "_paths", "_rtts", "dropped")

    def __init__(self) -> None:
        # From earlier starts: what a path costs, by host and digest, until a request of its class comes.
        self._kept = RecentTable[tuple[str, str], _PathMemory](
            limits_memory.MEMORY_HOSTS_MAX * limits_memory.MEMORY_PATHS_MAX, _PathMemory
        )
        self._networks = RecentTable[Network, _NetworkMemory](limits.TIMEOUT_NETWORKS_MAX, _NetworkMemory)
        self._rtts = RecentTable[tuple[str, str], DurationSketch](limits.TIMEOUT_HOSTS_MAX, DurationSketch)
        self._paths = RecentTable[tuple[str, str], _PathMemory](limits.TIMEOUT_HOSTS_MAX, _PathMemory)
        self.dropped = 0
        """Samples that were not sound."""

    # -- planning -----------------------------------------------------------------------------------------------------
    def plan(
        self,
        shape: RequestShape,
        network: Network,
        now: float,
        *,
        deadline: float = math.inf,
        attempt: int = 1,
        attempts: int = 1,
        queue: Queue = NO_QUEUE,
        patience: float = 1.0,
    ) -> Timeouts | None:
        """Give the limits of the attempt that begins now.

        May be asked again in the middle of an attempt that learned something (a first connection gives the first round
        trip), with the same `attempt`.

        Args:
            shape: the request.
            network: where it goes out.
            now: monotonic seconds.
            deadline: when the caller's patience ends, for all attempts together.
            attempt: 1 for the first.
            attempts: the most there may be in all, this one and earlier ones included.
            queue: what goes before it.
            patience: what the network's level asks for (`level.Behaviour.patience`); the state's own where larger.

        Returns:
            None where less than `limits.TIMEOUT_MIN_S` is left: no attempt is worth beginning.
        """
        left = deadline - now
        if not left >= limits.TIMEOUT_MIN_S:  # NaN is no time either
            return None
        measures = self._measure(shape, network, now)
        patience = max(STATE_FACTOR[measures.state], sound(patience, PATIENCE_MAX) or 1.0)
        patience *= ATTEMPT_FACTORS[min(max(attempt, 1), len(ATTEMPT_FACTORS)) - 1]
        moving = _moving_s(shape, queue, measures)
        first = _first_s(measures, patience, queue) + measures.cost_s + moving
        gap = _gap_s(measures, patience) + _size(queue.bytes_down) / measures.down
        reading = measures.answer_bytes / measures.down
        need = _need_s(measures, queue) + measures.cost_s + moving
        first_by, read_write = _share(left, need, attempt, attempts), first + gap + reading + moving
        if shape.pattern is Pattern.LONG_POLL:
            first_by, first, read_write = left, first + _hold_s(shape), read_write + _hold_s(shape)
        elif shape.pattern is Pattern.STREAM:
            # Some servers send the head with the first event only, so the head has the patience of the cold start.
            first = max(first, COLD_FIRST_S[0 if measures.fast else 1] + measures.cost_s + moving)
            first_by = read_write = left
        elif shape.pattern is Pattern.UPLOAD:
            first_by = read_write = left
        elif shape.pattern is Pattern.DOWNLOAD:
            read_write = left
        connect, tls = _set_up_s(measures, patience, queue)
        return Timeouts(
            task_s=left,
            first_by_s=first_by,
            connect_s=min(connect, first_by),
            tls_s=min(tls, first_by),
            send_gap_s=min(gap + _size(queue.bytes_up) / measures.up, left),
            first_packet_s=min(first, first_by),
            packet_gap_s=None if shape.pattern is Pattern.STREAM else min(gap, left),
            read_write_s=min(read_write, left),
            basis=_basis(measures),
        )

    def task_s(self, shape: RequestShape, attempts: int) -> float:
        """Give the whole task's time where the caller names no deadline: Mars's, infinite for streams and large bodies.

        (15 s + the server's cost + 5 s) for each attempt, at most `limits.CALL_DEADLINE_MAX_S`.
        """
        if shape.pattern in (Pattern.STREAM, Pattern.UPLOAD, Pattern.DOWNLOAD):
            return math.inf
        cost = sound(shape.server_cost_s, limits.SERVER_COST_S_MAX) or 0.0
        if shape.pattern is Pattern.LONG_POLL:
            cost += _hold_s(shape)
        return min((TASK_ATTEMPT_S + cost) * max(1, attempts), limits.CALL_DEADLINE_MAX_S)

    def state(self, network: Network, now: float) -> State:
        """Give how a network does."""
        memory = self._networks.find(network)
        return State.EVALUATING if memory is None else memory.quality.state(now)

    def bytes_per_s(self, network: Network, now: float) -> tuple[float | None, float | None]:
        """Give the measured rates up and down, None where not known."""
        memory = self._networks.find(network)
        return (None, None) if memory is None else (memory.up.bytes_per_s(now), memory.down.bytes_per_s(now))

    def rtt_s(self, network: Network, host: str, share: float) -> float | None:
        """Give a quantile of the round trips to `host`, else of its network's; None where none was measured."""
        sketch = self._rtt_sketch(network, host)
        return None if sketch is None else sketch.quantile(share)

    def server_s(self, shape: RequestShape, share: float) -> float | None:
        """Give what the server needs for such a request: as told, else a quantile of what was learned, else None."""
        cost = sound(shape.server_cost_s, limits.SERVER_COST_S_MAX)
        path = self._path(shape.host, shape.path_class)
        return cost if cost is not None or path is None else path.quantile(share)

    def answer_bytes(self, shape: RequestShape) -> int:
        """Give the size of answer to expect: as told, as learned for its path class, else 128 KB."""
        learned = self.learned_answer_bytes(shape)
        return ANSWER_BYTES_UNKNOWN if learned is None else learned

    def learned_cost_s(self, shape: RequestShape) -> float | None:
        """Give what answers of its path class have cost the server, at their slowest; None where none has come."""
        path = self._path(shape.host, shape.path_class)
        return None if path is None else path.quantile(0.95)

    def next_timer(self) -> float | None:
        """None: nothing here happens by itself."""
        return None

    def learned_answer_bytes(self, shape: RequestShape) -> int | None:
        """Give the size of answer that is told or was learned; None where it would be a guess."""
        if shape.answer_bytes is not None:
            return _size(shape.answer_bytes)
        path = self._path(shape.host, shape.path_class)
        return None if path is None else path.answer_bytes

    def _rtt_sketch(self, network: Network, host: str) -> DurationSketch | None:
        own = self._rtts.find((network.id, host))
        if own is not None and len(own):
            return own
        memory = self._networks.find(network)
        return None if memory is None or not len(memory.rtt) else memory.rtt

    def _measure(self, shape: RequestShape, network: Network, now: float) -> _Measures:
        up, down = self.bytes_per_s(network, now)
        sketch = self._rtt_sketch(network, shape.host)
        usual = None if sketch is None else sketch.quantile(0.9)
        fast = network.kind in FAST_KINDS or (usual is not None and usual <= limits.TIMEOUT_FAST_RTT_S)
        kind = 0 if fast else 1
        return _Measures(
            fast=fast,
            state=self.state(network, now),
            rtt_s=None if sketch is None else sketch.upper(),
            rtt_usual_s=COLD_RTT_S[kind] if usual is None else usual,
            up=COLD_BYTES_PER_S[kind] if up is None else max(1.0, up * RATE_SHARE),
            down=COLD_BYTES_PER_S[kind] if down is None else max(1.0, down * RATE_SHARE),
            cost_s=self.server_s(shape, 0.95) or 0.0,
            answer_bytes=self.answer_bytes(shape),
        )

    # -- learning -----------------------------------------------------------------------------------------------------
    def observe_rtt(self, network: Network, host: str, rtt_s: object, now: float) -> None:
        """Take a bare round trip: a TCP handshake's, TCP_INFO's, an HTTP/2 PING's."""
        sample = self._sound(rtt_s, limits.SAMPLE_DURATION_S_MAX)
        if sample is not None:
            self._networks.use(network).rtt.observe(sample, now)
            self._rtts.use((network.id, host)).observe(sample, now)

    def observe_rate(
        self, network: Network, now: float, *, up_bytes_per_s: object = None, down_bytes_per_s: object = None
    ) -> None:
        """Take a rate that something else measured (TCP_INFO's delivery rate)."""
        memory = self._networks.use(network)
        for given, window in ((up_bytes_per_s, memory.up), (down_bytes_per_s, memory.down)):
            sample = None if given is None else self._sound(given, limits.SAMPLE_BYTES_PER_S_MAX)
            if sample is not None:
                window.observe(sample, now)

    def observe(self, outcome: Outcome, now: float) -> None:
        """Learn from an attempt that ended. Takes any numbers, raises nothing."""
        network = self._networks.use(outcome.network)
        waited = self._optional(outcome.first_byte_s)
        if not outcome.answered:
            network.quality.observe_failure(outcome.host, now)
            # Given up after `waited`, and nothing else was answered meanwhile: the path needs at least that long, or is
            # dark. Without this a network that became slower than every time-out would never be seen to be.
            if waited is not None and not outcome.held and network.answered_at < now - waited:
                network.rtt.observe(waited, now)
                self._rtts.use((outcome.network.id, outcome.host)).observe(waited, now)
            return
        network.answered_at = now
        body = self._optional(outcome.body_s)
        total = self._optional(outcome.total_s)
        server = self._optional(outcome.server_s)
        if server is not None and server > limits.SERVER_COST_S_MAX:
            server = limits.SERVER_COST_S_MAX
        path = self._use_path(outcome.host, outcome.path_class, now)
        answer, request = _size(outcome.answer_bytes), _size(outcome.request_bytes)
        # Large sizes are believed at once, small ones only bit by bit.
        known = path.answer_bytes
        path.answer_bytes = answer if known is None or answer >= known else known - (known - answer + 7) // 8
        if body is not None and answer >= RATE_SAMPLE_BYTES_MIN:
            # The first packets came a round trip before the last acknowledgement could speed up the rest.
            rtt = self.rtt_s(outcome.network, outcome.host, 0.5) or 0.0
            network.down.observe(min(answer / max(body + rtt, 0.001), limits.SAMPLE_BYTES_PER_S_MAX), now)
        if outcome.held:
            return
        if waited is not None:
            self._learn_wait(outcome, network, path, waited, server, now)
        if total is not None:
            own = server if server is not None else path.quantile(0.5) or 0.0
            fast = outcome.network.kind in FAST_KINDS
            network.quality.observe_answer(outcome.host, request + answer, max(0.0, total - own), now, fast=fast)

    def _learn_wait(
        self,
        outcome: Outcome,
        network: _NetworkMemory,
        path: _PathMemory,
        waited: float,
        server: float | None,
        now: float,
    ) -> None:
        """Split the wait for the first packet into the server's part and the path's."""
        least = 0.0
        if server is not None:
            path.observe(min(server, waited), now)
        else:
            rtt = self.rtt_s(outcome.network, outcome.host, 0.25)
            # Behind others, or on a bad network, a long wait says nothing of the server.
            if rtt is not None and not outcome.queued and network.quality.state(now) is not State.BAD:
                path.observe(max(0.0, waited - rtt), now)
            # The wait holds one round trip whole: the quickest there was, or less.
            server, least = path.quantile(0.5), min(self.rtt_s(outcome.network, outcome.host, 0.0) or 0.0, waited)
        if server is not None:
            on_path = max(least, waited - server)
            network.rtt.observe(on_path, now)
            self._rtts.use((outcome.network.id, outcome.host)).observe(on_path, now)

    # -- between starts -----------------------------------------------------------------------------------------------
    def export(self, network: Network, hosts: Collection[str], wall_s: float) -> NetworkRecord:
        """Give what is to be kept of a network and of some hosts on it; of what others learn there is nothing in it.

        Args:
            network: where.
            hosts: of whom.
            wall_s: the wall clock less the monotonic one.
        """
        paths: dict[str, dict[str, _PathMemory]] = {host: {} for host in hosts}
        for (host, digest), path in self._kept.items():
            if host in paths:
                paths[host][digest] = path
        for (host, path_class), path in self._paths.items():
            if host in paths:
                digest = path_digest(path_class)
                paths[host].pop(digest, None)
                paths[host][digest] = path
        rtts = {host: self._rtts.find((network.id, host)) for host in hosts}
        memory = self._networks.find(network) or _NetworkMemory()
        return NetworkRecord(
            at=0,
            rtt=memory.rtt.summary(),
            up=_rate(memory.up, wall_s),
            down=_rate(memory.down, wall_s),
            hosts=tuple(
                HostRecord(
                    host,
                    0,
                    rtt=() if (rtt := rtts[host]) is None else rtt.summary(),
                    paths=tuple(
                        PathRecord(digest, path.summary(), path.answer_bytes)
                        for digest, path in list(paths[host].items())[-limits_memory.MEMORY_PATHS_MAX :]
                    ),
                )
                for host in hosts
            ),
        )

    def restore(self, network: Network, kept: NetworkRecord, now: float, wall_s: float) -> None:
        """Take over what was kept of a network and its hosts, where nothing is known of them yet.

        What was measured then counts as a few samples of now: enough not to begin with the cold start's patience, and
        soon outweighed by what is measured.
        """
        if kept.rtt or kept.up or kept.down:
            memory = self._networks.use(network)
            memory.rtt.restore(kept.rtt, now)
            for window, rate in ((memory.up, kept.up), (memory.down, kept.down)):
                if rate is not None and window.last() is None:
                    sample = sound(rate.bytes_per_s, limits.SAMPLE_BYTES_PER_S_MAX)
                    window.observe(sample or 0.0, min(now, rate.at - wall_s))
        for record in kept.hosts:
            if record.rtt:
                self._rtts.use((network.id, record.host)).restore(record.rtt, now)
            for each in record.paths:
                path = self._kept.use((record.host, each.digest))
                if not len(path) and path.answer_bytes is None:
                    path.restore(each.cost, now)
                    path.answer_bytes = None if each.answer_bytes is None else _size(each.answer_bytes)

    def _path(self, host: str, path_class: str) -> _PathMemory | None:
        path = self._paths.find((host, path_class))
        if path is None and len(self._kept):
            path = self._kept.find((host, path_digest(path_class)))
        return path

    def _use_path(self, host: str, path_class: str, now: float) -> _PathMemory:
        kept = None if self._paths.find((host, path_class)) is not None else self._path(host, path_class)
        path = self._paths.use((host, path_class))
        if kept is not None:
            path.restore(kept.summary(), now)
            path.answer_bytes = kept.answer_bytes
        return path

    def _sound(self, value: object, largest: float) -> float | None:
        sample = sound(value, largest)
        self.dropped += sample is None
        return sample

    def _optional(self, value: object) -> float | None:
        return None if value is None else self._sound(value, limits.SAMPLE_DURATION_S_MAX)


def _size(value: object) -> int:
    """Give a size in bytes; 0 for what is none."""
    return min(value, 2**53) if isinstance(value, int) and value > 0 else 0


def _hold_s(shape: RequestShape) -> float:
    """Give how long the server of a long poll may hold it."""
    hold = sound(shape.hold_s, limits.SAMPLE_DURATION_S_MAX)
    return limits.LONG_POLL_HOLD_S if hold is None else hold


def _moving_s(shape: RequestShape, queue: Queue, measures: _Measures) -> float:
    """Give how long what must move before the first packet can come keeps the link busy."""
    own = min(_size(shape.request_bytes), limits.TIMEOUT_SEND_BUFFER_BYTES)
    return (own + _size(queue.bytes_up)) / measures.up + _size(queue.bytes_down) / measures.down


def _first_s(measures: _Measures, patience: float, queue: Queue) -> float:
    """Give the path's part of the first packet's time."""
    kind = 0 if measures.fast else 1
    ahead = min(_size(queue.requests), COLD_QUEUED_MAX)
    waited = WAITED_FACTOR * (sound(queue.waited_s, limits.SAMPLE_DURATION_S_MAX) or 0.0)
    if measures.rtt_s is None:
        cold = COLD_FIRST_EXCELLENT_S if measures.state is State.EXCELLENT else COLD_FIRST_S
        return max(cold[kind] + ahead * COLD_QUEUED_S[kind], waited)
    floor = limits.TIMEOUT_FLOOR_FAST_S if measures.fast else limits.TIMEOUT_FLOOR_SLOW_S
    measured = patience * max(floor, RTT_FACTOR * measures.rtt_s + RTO_FACTOR * measures.rto_s)
    return max(measured + ahead * max(QUEUED_S[kind], measures.rtt_usual_s), waited)


def _need_s(measures: _Measures, queue: Queue) -> float:
    """Give what a first attempt needs on the path from nothing to the first packet, if the path works.

    Where nothing is measured it is a guess: the cold start's patience would leave no second attempt. The first
    connection measures, and then the plan is made anew.
    """
    if measures.rtt_s is None:
        return (SET_UP_RTTS + 1.0) * measures.rtt_usual_s + RTO_FACTOR * measures.rto_s
    return SET_UP_RTTS * measures.rtt_usual_s + _first_s(measures, STATE_FACTOR[measures.state], queue)


def _gap_s(measures: _Measures, patience: float) -> float:
    """Give the packet-to-packet time-out, without what is queued ahead."""
    kind = 0 if measures.fast else 1
    if measures.rtt_s is None:
        return COLD_GAP_S[kind]
    floor = limits.TIMEOUT_GAP_FAST_S_MIN if measures.fast else limits.TIMEOUT_GAP_SLOW_S_MIN
    measured = patience * (RTT_FACTOR * measures.rtt_s + GAP_RTO_FACTOR * measures.rto_s)
    return min(max(floor, measured), limits.TIMEOUT_GAP_S_MAX)


def _set_up_s(measures: _Measures, patience: float, queue: Queue) -> tuple[float, float]:
    """Give the time-outs of one TCP connection and one TLS handshake."""
    ahead = _size(queue.bytes_up) / measures.up + _size(queue.bytes_down) / measures.down
    connect = tls = limits.TIMEOUT_CONNECT_S_MAX
    if measures.rtt_s is not None:
        trip = patience * RTT_FACTOR * measures.rtt_s
        connect = min(connect, trip + SYN_LOSSES_S)
        lost = patience * RTO_FACTOR * measures.rto_s
        tls = min(tls, TLS_ROUND_TRIPS * trip + lost + TLS_WORK_S + TLS_BYTES / measures.down)
    return connect + ahead, tls + ahead


def _share(left: float, need: float, attempt: int, attempts: int) -> float:
    """Give the time in which this attempt must have shown life, so that the later ones have time of their own.

    The shares grow by `SHARE_GROWTH` from attempt to attempt and fill the deadline. As many attempts are reckoned with
    as leave this one what it needs on a path that works: cutting one short on a slow network buys nothing.
    """
    need *= SHARE_GROWTH ** (min(max(attempt, 1), limits.ATTEMPTS_MAX) - 1)
    for count in range(min(attempts, limits.ATTEMPTS_MAX) - max(attempt, 1) + 1, 1, -1):
        share = left * (SHARE_GROWTH - 1.0) / (SHARE_GROWTH**count - 1.0)
        if share >= need:
            return share
    return left


def _basis(measures: _Measures) -> str:
    if measures.rtt_s is None:
        return f"{measures.state}, nothing measured: cold start"
    return (
        f"{measures.state}, rtt {measures.rtt_usual_s * 1000:.0f} ms (p90), down {measures.down / 1024:.0f} KiB/s"
        f" counted on, server {measures.cost_s * 1000:.0f} ms"
    )


def _rate(window: RateWindow, wall_s: float) -> RateRecord | None:
    last = window.last()
    return None if last is None else RateRecord(round(last[1], 1), round(last[0] + wall_s))
