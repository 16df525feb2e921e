"""What the pool keeps of each place: connections, who waits for one, and what its servers have shown."""

import asyncio
import collections
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.stream import Stream
from stormline.outbound.dial import quiet
from stormline.outbound.held import Follower, Held, Key, too_late
from stormline.outbound.http1 import Http1Connection


class Connector(Protocol):
    """What the pool needs of a dialer; `outbound.dial.Dialer` is one."""

    async def dial(
        self,
        host: str,
        port: int,
        *,
        tls: bool,
        timeout_s: float,
        addresses: tuple[Address, ...] | None = None,
        server_name: str | None = None,
        left: Collection[Address] = (),
        h1: bool = False,
        on_stage: Callable[[Phase], None] = quiet,
        on_note: Callable[[str], None] = quiet,
    ) -> Stream:
        """Give a connected stream; see `Dialer.dial`."""
        ...


class Sense(Protocol):
    """What the pool asks of whoever knows the network."""

    def window_bytes(self, host: str, now_bytes: int) -> int:
        """Give the window of an HTTP/2 connection's streams, from the one it has; see `Held.fit`."""
        ...

    def overdue(self, held: Held, quiet_s: float) -> bool:
        """Say whether another request had better not be put on a connection that has owed an answer for so long."""
        ...

    def may_spread(self, host: str) -> bool:
        """Say whether requests under way to a host may be spread over several connections."""
        ...


class NoSense:
    """The `Sense` where nothing is known: windows stay, every connection is relied on, and none is made beside it."""

    def window_bytes(self, host: str, now_bytes: int) -> int:
        """See `Sense.window_bytes`."""
        return now_bytes

    def overdue(self, held: Held, quiet_s: float) -> bool:
        """See `Sense.overdue`."""
        return False

    def may_spread(self, host: str) -> bool:
        """See `Sense.may_spread`."""
        return False


def is_overdue(held: Held, sense: Sense) -> bool:
    """Say whether a connection is silent while it owes an answer, so that another request had better go elsewhere."""
    quiet_since = None if held.shared is None else held.shared.quiet_since
    if quiet_since is None:
        return False
    quiet_s = asyncio.get_running_loop().time() - quiet_since
    return quiet_s >= limits.STALL_OVERDUE_S and sense.overdue(held, quiet_s)


class Times(NamedTuple):
    """Bounds of one request: `head_by` and `body_by` in the loop's time; see `HttpPool.request`."""

    head_by: float
    body_by: float
    read_timeout_s: float | None
    connect_timeout_s: float | None


class Idle(NamedTuple):
    """An HTTP/1.1 connection that waits for a request.

    Attributes:
        connection: it.
        since: the clock's monotonic time.
        made: see `Held.made`.
    """

    connection: Http1Connection
    since: float
    made: int


class Known:
    """What the servers of a place have shown; it outlives their connections.

    Attributes:
        speaks_h1: HTTP/1.1 was the best they agreed to.
        streams: requests side by side that one connection was allowed; None: not told yet.
        served: requests after which one was ended while more were on their way, which were refused; None: none was.
    """

    __slots__ = ("served", "speaks_h1", "streams")

    def __init__(self) -> None:
        self.speaks_h1 = False
        self.streams: int | None = None
        self.served: int | None = None

    @property
    def takes(self) -> int | None:
        """Requests that a new connection takes at once; None where nobody knows."""
        if self.streams is None or self.served is None:
            return self.streams
        return min(self.streams, self.served)


class Memory:
    """What is known of places, those asked last: at most `limits.POOL_PLACES_REMEMBERED`."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: collections.OrderedDict[Key, Known] = collections.OrderedDict()

    def of(self, key: Key) -> Known:
        """Give what is known of a place, for everybody to add to."""
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Known()
            if len(self._known) > limits.POOL_PLACES_REMEMBERED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        return known


class Waiter:
    """A request that waits for a connection, or for a stream of one.

    Attributes:
        number: the pool's count of what began: who waits for longer has the lower one.
        left: addresses to whose connections it is not given, unless they are made after it began to wait.
        times: its bounds.
        follower: told what is done for it.
        connect_by: the loop's time at which the connection being made for it has taken too long.
        since: the loop's time when it began to wait.
        grant: a right of its own, or one to share in which a stream is promised to it.
        impatient: it has waited for `limits.H2_STREAM_WAIT_S`.
        timer: looks after the times above.
    """

    __slots__ = ("connect_by", "follower", "grant", "impatient", "left", "number", "since", "timer", "times")

    def __init__(
        self,
        number: int,
        left: Collection[Address],
        times: Times,
        follower: Follower,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.left: Collection[Address] = frozenset(left) if left else ()
        self.times = times
        self.follower = follower
        self.connect_by: float | None = None
        self.since = loop.time()
        self.grant: asyncio.Future[Held] = loop.create_future()
        self.impatient = False
        self.timer: asyncio.TimerHandle | None = None

    def may_use(self, peer: Address | None, made: int) -> bool:
        """Say whether a connection to `peer` is for it."""
        return not self.left or peer not in self.left or made > self.number

    def next_look(self, now: float) -> float:
        """Give the moment at which one of its times comes."""
        head_by = self.times.head_by
        look = head_by if self.impatient else min(head_by, self.since + limits.H2_STREAM_WAIT_S)
        return min(look, self.connect_by) if self.connect_by is not None and self.connect_by > now else look

    def fail(self, error: BaseException) -> None:
        """End the waiting, unless it has ended."""
        if not self.grant.done():
            self.grant.set_exception(error)

    def too_late(self, key: Key, opening: "Opening | None") -> errors.DeadlineExceeded:
        """Say that its time is over: in waiting for `opening`, or for its turn (None)."""
        if opening is None:
            return too_late(key.origin.host, self.follower.phase)
        waited_s = asyncio.get_running_loop().time() - self.since
        return errors.DeadlineExceeded(
            f"{key.origin.host}: not connected within {waited_s:.3g} s, while in {opening.phase}; {opening.story}",
            phase=opening.phase,
            maybe_delivered=False,
        )


class Opening:
    """A connection being made to a place that may speak HTTP/2, for all who wait there.

    What happens is told to those whom no connection serves that stands already; of several being made only by the
    first.

    Attributes:
        held: the right it uses up.
        beside: others served when it was begun.
        phase: how far it is.
        task: its work.
    """

    __slots__ = ("_notes", "_place", "beside", "held", "phase", "task")

    def __init__(self, place: "Place", held: Held) -> None:
        self.held = held
        self.beside = place.live > 0
        self.phase = Phase.QUEUED
        self.task: asyncio.Task[object] | None = None
        self._place = place
        self._notes: collections.deque[str] = collections.deque(maxlen=limits.POOL_NOTES_KEPT)

    def stage(self, stage: Phase) -> None:
        """Note that a stage begins."""
        self.phase = stage
        for waiter in self._told():
            waiter.follower.stage(stage)

    def note(self, line: str) -> None:
        """Note a decision."""
        self._notes.append(line)
        for waiter in self._told():
            waiter.follower.note(line)

    def _told(self) -> list[Waiter]:
        place = self._place
        if not place.openings or place.openings[0] is not self:
            return []
        return [waiter for waiter in place.waiters if not place.serves(waiter)]

    @property
    def story(self) -> str:
        """What was decided last."""
        return "; ".join(self._notes) or "no address failed"

    def cancel(self) -> None:
        """Give it up."""
        if self.task is not None:
            self.task.cancel()


class Place:
    """One place that requests go to.

    Attributes:
        key: what its requests have in common.
        known: what its servers have shown.
        used: rights given and not released, those of HTTP/2 connections and of connections being made included.
        idle: HTTP/1.1 connections that wait for a request, oldest first.
        shared: rights of HTTP/2 connections.
        openings: connections being made for all who wait, oldest first.
        waiters: who waits, first come first; an ordered set, for `add` and `remove` to change.
        more_at: the loop's time before which no connection is made beside those that serve.
    """

    __slots__ = ("_picky", "idle", "key", "known", "more_at", "openings", "shared", "used", "waiters")

    def __init__(self, key: Key, known: Known) -> None:
        self.key = key
        self.known = known
        self.used = 0
        self.idle: list[Idle] = []
        self.shared: list[Held] = []
        self.openings: list[Opening] = []
        self.waiters: dict[Waiter, None] = {}
        self.more_at = 0.0
        self._picky = 0  # waiters that do not take every connection

    def add(self, waiter: Waiter) -> None:
        """Have one wait, after all others."""
        self.waiters[waiter] = None
        self._picky += bool(waiter.left)

    def remove(self, waiter: Waiter) -> bool:
        """Have one wait no longer; False where it does not."""
        if waiter not in self.waiters:
            return False
        del self.waiters[waiter]
        self._picky -= bool(waiter.left)
        return True

    @property
    def empty(self) -> bool:
        """There is nothing to keep it for."""
        return not (self.used or self.idle or self.waiters)

    @property
    def may_share(self) -> bool:
        """A new connection may speak HTTP/2."""
        return self.key.origin.scheme == "https" and not self.known.speaks_h1 and not self.key.h1

    @property
    def live(self) -> int:
        """HTTP/2 connections that take requests."""
        return sum([held.live for held in self.shared])

    def take(self, waiter: Waiter | None, left: Collection[Address] = ()) -> Held | None:
        """Give an HTTP/2 connection that takes a request at once, for one who waits or (None) has just come.

        The one with the fewest requests, as one lost packet holds up all answers that share its connection (RFC 9114
        section 2). One with a large answer on its way is given only where there is no other.
        """
        found: Held | None = None
        least: tuple[bool, int] | None = None
        for held in self.shared:
            if held.shared is None or not held.live or held.room(self.known.served) <= 0:
                continue
            if (held.peer in left) if waiter is None else not waiter.may_use(held.peer, held.made):
                continue
            load = held.shared.laden, held.shared.open_streams + held.promised
            if least is None or load < least:
                found, least = held, load
        return found

    def crowded(self, held: Held, sense: Sense) -> int:
        """Give how many connections the load of the one that was just taken calls for; 0: no more than there are.

        Two for a large answer on its way, so that small ones do not wait behind it; several where many requests share
        one on a link that has room for others.
        """
        if held.shared is None:
            return 0
        if held.shared.open_streams >= limits.H2_STREAMS_CROWDED and sense.may_spread(self.key.origin.host):
            return limits.H2_CONNECTIONS_SPREAD
        return 2 if held.shared.laden else 0

    def answered_beside(self, held: Held, since: float) -> bool:
        """Say whether another HTTP/2 connection that takes requests has answered one since then."""
        others = [each.shared.answered_at for each in self.shared if each is not held and each.live and each.shared]
        return any(answered_at is not None and answered_at > since for answered_at in others)

    def has_room(self) -> bool:
        """An HTTP/2 connection takes a request at once."""
        return any(held.live and held.room(self.known.served) > 0 for held in self.shared)

    def serves(self, waiter: Waiter) -> bool:
        """Say whether an HTTP/2 connection that stands will have a stream for one who waits."""
        return any(held.live and waiter.may_use(held.peer, held.made) for held in self.shared)

    def unserved(self) -> Waiter | None:
        """Give the first who waits and whom no connection serves; None where there is none."""
        live = self.live
        if live and not self._picky:
            return None
        for waiter in self.waiters:
            if not waiter.grant.done() and (not live or (waiter.left and not self.serves(waiter))):
                return waiter
        return None

    def wants_another(self, now: float) -> bool:
        """Say whether those who wait call for one more HTTP/2 connection than stand and are being made."""
        if all(waiter.grant.done() for waiter in self.waiters):
            return False
        opening = len(self.openings)
        if not opening and self.unserved() is not None:
            return True
        takes = self.known.takes
        if not takes or now < self.more_at or self.live + opening >= limits.H2_CONNECTIONS_MAX:
            return False  # where nobody knows what one takes, that which stands or is being made will tell
        if takes < limits.H2_STREAMS_FEW:
            return len(self.waiters) > opening * takes
        return not opening and next(iter(self.waiters)).impatient
