"""What a client has learned of its network, and what follows from it: the policies, joined and given a clock.

The policies are pure and each knows its own matter (`policy.timeouts`, `addresses`, `budget`, `stall`). Here they are
fed with what the calls of one client meet, and asked on their behalf; nothing is decided here.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from stormline.client.sensing import Sensing
from stormline.core import limits, limits_means
from stormline.core.clock import Rng
from stormline.core.values import Address
from stormline.net.clock import SystemClock, SystemRng
from stormline.outbound.dial import Pace
from stormline.policy import stall
from stormline.policy import strategy as strategies
from stormline.policy.addresses import AddressBook, AddressOutcome, Candidate, Verdict
from stormline.policy.budget import RetryBudget, RetryVerdict
from stormline.policy.carriers import CarrierPolicy
from stormline.policy.hedge import HedgePolicy
from stormline.policy.level import BEHAVIOUR, Quality
from stormline.policy.quality import State
from stormline.policy.shape import Network, Pattern, Queue, RequestShape, server_timing_s
from stormline.policy.snapshot import HeartbeatRecord, NetworkRecord
from stormline.policy.strategy import Strategy
from stormline.policy.timeouts import Outcome, TimeoutPolicy, Timeouts
from stormline.policy.window import stream_window_bytes

if TYPE_CHECKING:
    from stormline.net.tcpinfo import TcpInfo
    from stormline.outbound.held import Held
    from stormline.outbound.messages import HttpRequest

_SYN_RETRY_S: Final = 0.9
"""From a second on a TCP handshake may have been a repeated SYN's (RFC 6298 section 2.1): no round trip to learn."""


class Call(Protocol):
    """What a call is to its network, as long as it runs.

    Attributes:
        shape: what it looks like.
        bytes_down: of its answer, as far as they are still to come; -1 where nobody knows.
        asked_at: the loop's time when its request had left; None before, and once the answer began.
        first_byte_s: from then to the head of an answer; None where none came yet.
        queued: others were under way when it began.
        answering: the connection that its answer comes over.
        key: it matters more than others: nothing is tried out while it is under way.
    """

    queued: bool
    key: bool
    bytes_down: int
    asked_at: float | None
    first_byte_s: float | None
    answering: "Held | None"

    @property
    def shape(self) -> RequestShape:
        """What it looks like."""
        ...

    @property
    def ipv4_first(self) -> bool:
        """It was marked as worse over IPv6."""
        ...


class Trying(Protocol):
    """A call, by what it has tried.

    Attributes:
        request: what is asked.
        left: addresses that were tried for it in vain.
        shape: what it looks like.
    """

    request: "HttpRequest"
    left: set[Address]
    shape: RequestShape

    @property
    def ipv4_first(self) -> bool:
        """It was marked as worse over IPv6."""
        ...


class Steering:
    """One client's experience. Belongs to one event loop.

    Attributes:
        network: where its requests go out.
        timeouts: how long things may take.
        addresses: which addresses of a host to use.
        budget: how much may be repeated.
        sensing: how good the network is.
        hedges: when a second request beside a late one is worth its bytes.
        carriers: by what the long connection is tried.
        strategy: which protocol to speak to whom, and when to try something else than the best.
        recalls: gives what was kept of a network between starts, None where nothing was; asked once for each network.
        last_peer: the address that was connected to last.
        learned: called where something new is worth keeping; must not raise.
        spare: asked for the bytes of what is made beside something else.

    Args:
        network: where its requests go out now.
        rng: chance, for trials.
        wall_s: the wall clock, by which the age of what was kept is told.
        prefers_ipv4: says whether a host was marked as worse over IPv6.
        beside: of the same client on another network; what was learned is kept together.
    """

    def __init__(
        self,
        network: Network,
        *,
        rng: Rng | None = None,
        wall_s: Callable[[], float] | None = None,
        prefers_ipv4: Callable[[str], bool] = lambda host: False,
        beside: "Steering | None" = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: dict[Call, None] = {}
        self._sampled_at: dict[str, float] = {}
        self._dialled: dict[str, tuple[Address, ...]] = {}  # of hosts dialled lately
        self._heard_at = -math.inf
        self.network = network
        self.timeouts = TimeoutPolicy()
        self.sensing = Sensing(
            lambda: self.network.id,
            self._calls,
            lambda shape, quantile: self.timeouts.server_s(shape, quantile),
            lambda host: self.timeouts.rtt_s(self.network, host, 0.0),
        )
        self.addresses = AddressBook()
        self.budget = RetryBudget()
        self.hedges = HedgePolicy()
        self.strategy = Strategy(self.addresses.worked_within)
        self.carriers = CarrierPolicy()
        self.recalls: Callable[[Network], NetworkRecord | None] = lambda network: None
        self.learned: Callable[[], None] = lambda: None
        self.spare: Callable[[int], bool] = lambda cost_bytes: True
        self._rng = SystemRng() if rng is None else rng
        self._wall_s = SystemClock().wall if wall_s is None else wall_s
        self._prefers_ipv4 = prefers_ipv4
        self.last_peer: Address | None = None
        if beside is not None:
            self.share(beside)
        self._entered = ""  # the network whose memory was asked for last

    def share(self, other: "Steering") -> None:
        """Keep what is learned where another keeps it: each knows its network by its id."""
        self.timeouts, self.addresses, self.budget = other.timeouts, other.addresses, other.budget
        self.hedges, self.strategy, self.carriers = other.hedges, other.strategy, other.carriers

    # -- what is kept of networks -------------------------------------------------------------------------------------
    def enter_network(self) -> None:
        """Begin with what was kept of the network the client is on, where it was not here already."""
        if self._entered == self.network.id:
            return
        self._entered = self.network.id
        now = self._loop.time()
        self.strategy.enter(self.network.id, now)
        kept = self.recalls(self.network)
        if kept is not None:
            ahead_s = self._wall_s() - now
            strategies.recall(kept, self.network, self.addresses, self.timeouts, self.strategy, now, ahead_s)
            self.carriers.restore(self.network.id, kept.carriers, now, ahead_s)

    def heartbeat(self) -> HeartbeatRecord | None:
        """Give what long connections have learned of silence on the network the client is on; None where nothing."""
        self.enter_network()
        now = self._loop.time()
        return self.strategy.heartbeats.export(self.network.id, now, self._wall_s() - now)

    def rename(self, network: Network) -> None:
        """Know the network by another name from now on, with what was learned of it, and what was kept under that."""
        if network.id == self.network.id:
            return
        learned, self.network = self.collect(self.network), network
        now = self._loop.time()
        ahead_s = self._wall_s() - now
        strategies.recall(learned, network, self.addresses, self.timeouts, self.strategy, now, ahead_s)
        self.carriers.restore(network.id, learned.carriers, now, ahead_s)
        self.enter_network()
        self.learned()

    def collect(self, network: Network) -> NetworkRecord:
        """Give what is to be kept of a network."""
        now = self._loop.time()
        ahead_s = self._wall_s() - now
        record = strategies.collect(network, self.addresses, self.timeouts, self.strategy, now, ahead_s)
        return record._replace(carriers=self.carriers.export(network.id, ahead_s))

    def forget(self) -> None:
        """Forget what was learned of every network; what is under way is not touched."""
        self.timeouts = TimeoutPolicy()
        self.addresses = AddressBook()
        self.hedges = HedgePolicy()
        self.carriers = CarrierPolicy()
        self.strategy = Strategy(self.addresses.worked_within)
        self.strategy.enter(self.network.id, self._loop.time())

    def _tries_out(self) -> bool:
        """Say whether something else than the best is to be tried now: by chance, where that harms nobody."""
        now = self._loop.time()
        if not self.strategy.may_explore(self.network.id, now) or any(call.key for call in self._calls):
            return False
        weak = self.timeouts.state(self.network, now) is State.BAD or not self.room("")
        return not weak and self.strategy.explore(self.network.id, now, self._rng.random())

    def protocols(self, host: str, offered: Sequence[str]) -> Sequence[str]:
        """Put the protocols that may be offered to a host into the order to try them in.

        Where the usual one, the first, was left, chance gives it another trial; one that does well needs none.
        """
        self.enter_network()
        order = self.strategy.choose(self.network.id, host, offered, self._loop.time()).protocols
        return offered if order[0] != offered[0] and self._tries_out() else order

    # -- what the dialer asks and tells (`outbound.dial.Advice`) ----------------------------------------------------
    def order(
        self, host: str, addresses: Sequence[Address], left: Collection[Address], *, ipv4_first: bool = False
    ) -> list[Address]:
        """Put addresses into the order in which to start them; IPv6 goes first where it has not lost."""
        self.enter_network()
        self._dialled.pop(host, None)
        if len(self._dialled) >= limits.DIALLED_HOSTS_MAX:
            del self._dialled[next(iter(self._dialled))]
        self._dialled[host] = tuple(addresses)
        if len(addresses) < 2:
            return list(addresses)
        ranked = self.addresses.plan(
            self.network.id,
            host,
            [_candidate(each) for each in addresses],
            self._loop.time(),
            left=[_candidate(each) for each in left],
            ipv4_first=ipv4_first or self._prefers_ipv4(host) or self._asks_ipv4_first(host),
        )
        # Families are tried anew by the book, when their time has come.
        family = ranked[0].candidate.family
        others = [each for each in ranked[1:] if each.candidate.family == family and not each.banned]
        if others and not left and self._tries_out():
            other = others[int(self._rng.random() * len(others))]
            ranked.sort(key=lambda each: each is not other)  # a stable sort: the rest stays as it is
        return [Address(each.candidate.address, each.candidate.port) for each in ranked]

    def _asks_ipv4_first(self, host: str) -> bool:
        """Say whether a call under way to a host is of those that are worse over IPv6.

        Connections are a host's, not a call's, so a dial is not told for whom it is. That others, which wait for the
        same connection, get it over IPv4 too costs them nothing.
        """
        now = self._loop.time()
        return any(
            call.shape.host == host
            and (call.ipv4_first or not self.addresses.class_leads(self.network.id, host, call.shape.path_class, now))
            for call in itertools.islice(reversed(self._calls), limits.QUEUE_CALLS_MAX)
        )

    def left_of(self, call: Trying) -> Collection[Address]:
        """Give the addresses that a repetition of a call leaves: those it failed on, all of IPv6 where that is worse.

        Worse by the settings, for the host or the call, or as it was measured. As long as there is an IPv4 address that
        the call has not failed on.
        """
        asked, left = call.shape, call.left
        if not (
            call.ipv4_first
            or self._prefers_ipv4(asked.host)
            or self.addresses.ipv6_is_second(self.network.id, asked.host, asked.path_class, self._loop.time())
        ):
            return left
        known = self._dialled.get(asked.host, ())
        if all(":" in each.host or each in left for each in known):
            return left
        return left.union(each for each in known if ":" in each.host)

    def pace(self, host: str) -> Pace:
        """Give the patience of one dial."""
        asks = BEHAVIOUR[self.sensing.carries()]
        limits_of = self.timeouts.plan(RequestShape(host=host), self.network, self._loop.time(), patience=asks.patience)
        usual_s = self.timeouts.rtt_s(self.network, host, 0.9)
        self.sensing.dialling(host)
        if usual_s is None or limits_of is None:
            return Pace(beside=self._spares_handshake)
        return Pace(
            stagger_s=min(max(asks.stagger_s, 1.5 * usual_s), limits.CONNECT_STAGGER_S_MAX),
            repeat_s=max(limits.DIAL_REPEAT_S, 4.0 * usual_s),
            connect_s=limits_of.connect_s,
            tls_s=limits_of.tls_s,
            beside=self._spares_handshake,
        )

    def _spares_handshake(self) -> bool:
        return self.spare(limits_means.HEDGE_HANDSHAKE_BYTES)

    def connected(self, host: str, address: Address, *, connect_s: float, tls_s: float | None) -> None:
        """An address won."""
        now = self._loop.time()
        self._heard_at = now
        self.last_peer = address
        self.strategy.touch(self.network.id, host, now)
        rtt_s = connect_s if connect_s < _SYN_RETRY_S else None
        self.sensing.dialled(host, rtt_s, connect_s + (tls_s or 0.0))
        if rtt_s is not None:
            self.timeouts.observe_rtt(self.network, host, rtt_s, now)
        self._judge(host, address, Verdict.WORKED, connect_s=connect_s + (tls_s or 0.0))

    def failed(self, host: str, address: Address, *, tried_s: float) -> None:
        """An address failed."""
        self.sensing.dial_failed(host, tried_s)
        self._judge(host, address, Verdict.FAILED, tried_s=tried_s)

    def outrun(self, host: str, address: Address) -> None:
        """Another won before an address could show anything."""
        self._judge(host, address, Verdict.OUTRUN)

    def _judge(
        self,
        host: str,
        address: Address,
        verdict: Verdict,
        *,
        connect_s: float | None = None,
        tried_s: float | None = None,
    ) -> None:
        outcome = AddressOutcome(self.network.id, host, _candidate(address), verdict, connect_s, tried_s)
        self.addresses.observe(outcome, self._loop.time())
        self.learned()

    @property
    def heard_at(self) -> float:
        """Loop time at which something last came over the network."""
        return self._heard_at

    def heard(self) -> None:
        """Something came over the network."""
        self._heard_at = self._loop.time()
        self.sensing.heard(self._heard_at)

    def back(self, took_s: float) -> None:
        """A network that calls had left has answered a TCP handshake, in so long."""
        self.sensing.back(took_s if took_s < _SYN_RETRY_S else None)
        self._heard_at = self._loop.time()

    def quality(self) -> Quality:
        """Give the quality of the network at this moment."""
        return self.sensing.quality()

    # -- calls ------------------------------------------------------------------------------------------------------
    def enter(self, call: Call, host: str) -> None:
        """A call begins."""
        self.enter_network()
        call.queued = bool(self._calls)
        self._calls[call] = None
        self.sensing.entered(call)
        self.budget.observe_request(host, self._loop.time())

    def take(self, call: Call) -> None:
        """A call goes on here that began on another network."""
        self.enter_network()
        self._calls[call] = None
        self.sensing.entered(call)

    @property
    def calls(self) -> Iterable[Call]:
        """The calls under way, the longest running first."""
        return self._calls

    def busy(self) -> bool:
        """Calls are under way."""
        return bool(self._calls)

    def leave(self, call: Call) -> None:
        """A call is over, its answer's body with it."""
        self.sensing.left(call)
        self._calls.pop(call, None)

    def plan(self, call: Call, *, ends_at: float, attempt: int, attempts: int) -> Timeouts | None:
        """Give the limits of one attempt of a call; see `TimeoutPolicy.plan`."""
        return self.timeouts.plan(
            call.shape,
            self.network,
            self._loop.time(),
            deadline=ends_at,
            attempt=attempt,
            attempts=attempts,
            queue=self._queue(call),
            patience=BEHAVIOUR[self.sensing.carries()].patience,
        )

    def look(
        self,
        call: Call,
        held: "Held",
        *,
        asked_at: float,
        limit_s: float,
        may_fresh: bool,
        fresh_at: float | None,
        left: Collection[Address] = (),
    ) -> stall.Decision:
        """Decide what the silence of a connection calls for; see `stall.plan`.

        Args:
            call: whose answer is waited for.
            held: the connection it is waited for on.
            asked_at: the loop's time when the request had left.
            limit_s: the time-out for the first packet.
            may_fresh: the request may be sent again.
            fresh_at: the loop's time when another lane was opened beside this one.
            left: addresses that were tried for this call in vain.
        """
        now = self._loop.time()
        info = held.tcp_info()
        self.sensing.looked(call, held, info)
        queue = self._queue(call)
        up, down = self.timeouts.bytes_per_s(self.network, now)
        known = [rate for rate in (up, down) if rate is not None]
        learned_s = self.timeouts.rtt_s(self.network, call.shape.host, 0.5)
        rtt_s = learned_s if info is None or info.rtt_s is None else info.rtt_s
        return stall.plan(
            stall.Silence(
                waited_s=now - asked_at,
                heard_age_s=now - held.heard_at,
                limit_s=limit_s,
                unacked_bytes=None if info is None else _owed_bytes(info, now - asked_at),
                backoffs=None if info is None else info.backoffs,
                rto_s=None if info is None else info.rto_s,
                ack_age_s=None if info is None else info.ack_age_s,
                rtt_s=rtt_s,
                network_age_s=now - max(self._heard_at, held.heard_at),
                can_probe=held.can_probe,
                probe_age_s=held.probe_age_s(now),
                fresh_age_s=None if fresh_at is None else now - fresh_at,
                may_fresh=may_fresh,
                server_cost_s=call.shape.server_cost_s,
                unproven=not held.answered and call.shape.pattern is Pattern.CALL and self._has_others(held, left),
                learned_cost_s=self.timeouts.learned_cost_s(call.shape),
            ),
            stall.Link(
                bytes_per_s=min(known, default=None),
                rtt_s=learned_s if learned_s is not None else rtt_s,
                queued_bytes=queue.bytes_up + queue.bytes_down,
                state=self.timeouts.state(self.network, now),
            ),
        )

    def _has_others(self, held: "Held", left: Collection[Address]) -> bool:
        """Say whether the host of a connection has addresses that a call has not tried."""
        return any(each != held.peer and each not in left for each in self._dialled.get(held.key.origin.host, ()))

    def knocked_at(self, held: "Held") -> list[Address]:
        """Give the addresses at which to see whether the path of a connection is there: its own, and some others.

        Where only its own is dead the others tell that the link is not.
        """
        others = [each for each in self._dialled.get(held.key.origin.host, ()) if each != held.peer]
        own = [] if held.peer is None else [held.peer]
        return own + others[: limits.KNOCKS_BESIDE_MAX]

    def overdue(self, held: "Held", quiet_s: float) -> bool:
        """Say whether the next request had better not be put on a silent connection; see `stall.overdue`."""
        host = held.key.origin.host
        info = held.tcp_info()
        rtt_s = self.timeouts.rtt_s(self.network, host, 0.5) if info is None else info.rtt_s
        return stall.overdue(
            stall.Silence(
                waited_s=quiet_s,
                unacked_bytes=None if info is None else _owed_bytes(info, quiet_s),
                backoffs=None if info is None else info.backoffs,
                rto_s=None if info is None else info.rto_s,
                rtt_s=rtt_s,
            ),
            self._link(host),
        )

    def look_idle(self, held: "Held") -> stall.Decision:
        """Decide what the silence of a connection calls for that owes nothing at the moment."""
        now = self._loop.time()
        silent_s = now - held.heard_at
        return stall.plan(
            stall.Silence(
                waited_s=silent_s,
                heard_age_s=silent_s,
                expecting=False,
                can_probe=held.can_probe,
                probe_age_s=held.probe_age_s(now),
                may_fresh=False,
            ),
            stall.Link(),
        )

    def room(self, host: str) -> bool:
        """Say whether a second connection would cost nobody an answer now."""
        return stall.has_room(self._link(host))

    def _link(self, host: str) -> stall.Link:
        now = self._loop.time()
        up, down = self.timeouts.bytes_per_s(self.network, now)
        return stall.Link(
            bytes_per_s=min([rate for rate in (up, down) if rate is not None], default=None),
            rtt_s=self.timeouts.rtt_s(self.network, host, 0.5),
            state=self.timeouts.state(self.network, now),
        )

    def link(self, host: str) -> tuple[bool, float | None, float | None]:
        """Give what `client.admission` asks of the link: whether it is weak, its measured rate and round trip."""
        rates = self.timeouts.bytes_per_s(self.network, self._loop.time())
        known = [rate for rate in rates if rate is not None]
        return not self.room(host), min(known, default=None), self.timeouts.rtt_s(self.network, host, 0.5)

    def may_spread(self, host: str) -> bool:
        """Say whether requests under way may be spread over several connections: where the link has room for them."""
        return self.room(host)

    def window_bytes(self, host: str, now_bytes: int) -> int:
        """Give the window of an HTTP/2 connection's streams to `host`; see `policy.window`."""
        down = self.timeouts.bytes_per_s(self.network, self._loop.time())[1]
        return stream_window_bytes(now_bytes, down, self.timeouts.rtt_s(self.network, host, 0.1))

    def may_retry(self, host: str, *, heard: bool) -> RetryVerdict:
        """Ask for one repetition; see `RetryBudget.plan`."""
        return self.budget.plan(host, self._loop.time(), heard=heard)

    def heard_since(self, held: "Held", since: float) -> bool:
        """Say whether the path of a connection is alive: since then it has acknowledged all, or anything here came."""
        if max(self._heard_at, held.heard_at) > since:
            return True
        info = held.tcp_info()
        if info is None or info.unacked_bytes or info.ack_age_s is None:
            return False
        return self._loop.time() - info.ack_age_s > since

    def tried_all(self, call: Trying, held: "Held") -> bool:
        """Say whether the host of a connection has no address that a call has not tried."""
        known = self._dialled.get(call.request.host, ())
        return all(address == held.peer or address in call.left for address in known)

    def outdone(self, call: Call, protocol: str, *, waited_s: float) -> None:
        """Learn that a call had its answer by another protocol, while this one had kept it waiting for so long."""
        now = self._loop.time()
        self.strategy.observe(self.network.id, call.shape.host, protocol, now, worked=False, tried_s=waited_s)
        self.learned()

    def hedge(self, call: Call, waited_s: float) -> bool:
        """Say whether a read that has waited this long gets a second one beside it; then its bytes are taken."""
        asked = call.shape
        late_s = self.hedges.late_s(self.network.id, asked.host, asked.path_class)
        if late_s is None or waited_s < late_s or not self.room(asked.host):
            return False
        return self.hedges.grant(asked.request_bytes + self.timeouts.answer_bytes(asked)) and self.spares(call)

    def spares(self, call: Call) -> bool:
        """Say whether another attempt beside one that may still succeed is worth its bytes; then they are taken."""
        asked = call.shape
        answer = self.timeouts.learned_answer_bytes(asked) or limits_means.METERED_ANSWER_BYTES
        return self.spare(limits_means.HEDGE_HANDSHAKE_BYTES + asked.request_bytes + answer)

    def _queue(self, call: Call) -> Queue:
        now = self._loop.time()
        requests = len(self._calls) - (call in self._calls)
        bytes_down = 0
        waited_s = 0.0
        for other in itertools.islice(self._calls, limits.QUEUE_CALLS_MAX):  # those that run for longest
            if other is call:
                continue
            # An answer of which nothing is known is not reckoned with: a guess for each of ten calls that one mute
            # server keeps waiting would make the eleventh wait for minutes.
            expected = other.bytes_down
            bytes_down += expected if expected >= 0 else self.timeouts.learned_answer_bytes(other.shape) or 0
            if other.asked_at is not None and other.shape.pattern is Pattern.CALL:
                waited_s = max(waited_s, now - other.asked_at)
        # Where another attempt costs nobody an answer it need not be put off because others wait already.
        return Queue(requests, 0, bytes_down, 0.0 if self.room(call.shape.host) else waited_s)

    # -- what became of them ------------------------------------------------------------------------------------------
    def samples(self, host: str) -> bool:
        """Say whether an answer of `host` that came now should be learned from: some in a second are enough."""
        now = self._heard_at = self._loop.time()
        self.sensing.heard(now)
        if now < self._sampled_at.get(host, -math.inf) + limits.SAMPLE_PAUSE_S:
            return False
        if len(self._sampled_at) >= limits.TIMEOUT_HOSTS_MAX:
            self._sampled_at.clear()
        self._sampled_at[host] = now
        return True

    def answered(
        self,
        call: Call,
        held: "Held",
        peer: Address,
        *,
        first_byte_s: float | None,
        body_s: float,
        answer_bytes: int,
        server_timing: bytes | None,
        protocol: str = "",
        tls_port: int = 0,
    ) -> None:
        """Learn from an answer."""
        now = self._loop.time()
        asked = call.shape
        network_id, host = self.network.id, asked.host
        holds = asked.pattern in (Pattern.LONG_POLL, Pattern.STREAM)
        pace_s = None if holds or call.queued else first_byte_s
        self.strategy.observe(network_id, host, protocol, now, worked=True, pace_s=pace_s, tls_port=tls_port)
        server_s = None if server_timing is None else server_timing_s(server_timing.decode("latin-1"))
        self._judge(asked.host, peer, Verdict.WORKED)
        self.addresses.class_answered(network_id, host, asked.path_class, 6 if ":" in peer.host else 4, now)
        self.hedges.observe(
            self.network.id,
            asked.host,
            asked.path_class,
            first_byte_s=first_byte_s if asked.pattern is Pattern.CALL else None,
            carried_bytes=asked.request_bytes + answer_bytes,
            now=now,
        )
        self.timeouts.observe(
            Outcome(
                network=self.network,
                host=asked.host,
                path_class=asked.path_class,
                answered=True,
                first_byte_s=first_byte_s,
                body_s=body_s,
                total_s=None if first_byte_s is None else first_byte_s + body_s,
                request_bytes=asked.request_bytes,
                answer_bytes=answer_bytes,
                server_s=server_s,
                queued=call.queued,
                held=holds,
            ),
            now,
        )
        self.sensing.answered(
            call,
            held,
            first_byte_s=first_byte_s,
            body_s=body_s,
            answer_bytes=answer_bytes,
            server_s=server_s,
            queued=call.queued,
        )

    def moved(self, size: int, seconds: float, host: str) -> None:
        """Learn from an answer that is still coming: so much came in so long."""
        rtt_s = self.timeouts.rtt_s(self.network, host, 0.5) or 0.0
        rate = size / max(seconds + rtt_s, 0.001)
        self.timeouts.observe_rate(self.network, self._loop.time(), down_bytes_per_s=rate)

    def unanswered(self, call: Call, peer: Address | None, *, waited_s: float | None, protocol: str = "") -> None:
        """Learn from an attempt that the path failed: a time-out (with what was waited), or a connection that broke."""
        now = self._loop.time()
        asked = call.shape
        self.strategy.observe(self.network.id, asked.host, protocol, now, worked=False, tried_s=waited_s)
        if peer is not None:
            self._judge(asked.host, peer, Verdict.FAILED, tried_s=waited_s or 0.0)
            if ":" in peer.host:
                self.addresses.class_failed(self.network.id, asked.host, asked.path_class)
        self.timeouts.observe(
            Outcome(
                network=self.network,
                host=asked.host,
                path_class=asked.path_class,
                answered=False,
                first_byte_s=waited_s,
                request_bytes=asked.request_bytes,
                held=asked.pattern in (Pattern.LONG_POLL, Pattern.STREAM),
            ),
            now,
        )

    def overloaded(self, host: str, retry_after_s: float | None) -> None:
        """`host` said that it has too much to do."""
        self.budget.observe_overload(host, self._loop.time(), retry_after_s=retry_after_s)


class Planned:
    """The `Advice` for gateways: what dispatch has put in front goes first, whatever its family, until it has lost.

    Args:
        steering: what was learned.
    """

    def __init__(self, steering: Steering) -> None:
        self._steering = steering
        self.pace = steering.pace
        self.connected = steering.connected
        self.failed = steering.failed
        self.outrun = steering.outrun

    def order(self, host: str, addresses: Sequence[Address], left: Collection[Address]) -> list[Address]:
        """See `Steering.order`."""
        return self._steering.order(host, addresses, left, ipv4_first=":" not in addresses[0].host)


def _owed_bytes(info: "TcpInfo", waited_s: float) -> int | None:
    """Give what the kernel has in vain: bytes not acknowledged, or that it cannot even send as the way out is gone.

    A window that the peer has shut holds bytes back too, but then it answers the probes.
    """
    if not info.unacked_bytes and info.notsent_bytes and info.ack_age_s is not None and info.ack_age_s >= waited_s:
        return info.notsent_bytes
    return info.unacked_bytes


def _candidate(address: Address) -> Candidate:
    return Candidate(address.host, address.port)
