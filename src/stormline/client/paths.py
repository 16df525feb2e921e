"""The ways out of the machine that one client uses, and when a call takes another than the system's own.

`policy.paths` decides. Here its ways get what they need: connections of their own, bound to an interface, and their own
view of that network's quality. Where the machine has one way only, nothing is made and nothing is asked.
"""

import asyncio
import functools
import ipaddress
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Final

from stormline.client.lanes import Failed, Lane, Reply, Run
from stormline.client.path import Path
from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.stream import TcpStream
from stormline.policy.level import Quality
from stormline.policy.means import Means
from stormline.policy.network import NetworkInfo, is_metered
from stormline.policy.paths import PathPolicy, Way
from stormline.policy.shape import Network

_LOCAL: Final = (".localhost", ".local", ".home.arpa", ".internal", ".lan")
_PRIVATE: Final = tuple(
    ipaddress.ip_network(each)
    for each in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "fc00::/7", "fe80::/10")
)
_SECONDS_A_DAY: Final = 86_400.0


class Paths:
    """The ways out of one client. Belongs to one event loop.

    Args:
        first: the system's own choice.
        ways: gives the networks there are, that of the system's choice first; takes less than a millisecond.
        make: makes what another way needs.
        open_tcp: connects over the system's own choice.
        open_over: connects over the interface of a name.
        enabled: another way may be used.
        metered_bytes: what a metered one may carry at once; None for the usual.
        woke: told when a timer fires while no call is under way.
        hedged: told the size of each request that is sent again over another way.

    Attributes:
        attempt: makes one attempt over a lane; set by the executor.
        first: the system's own choice.
        usual: what calls begin on.
        away: that is another than the first.
        watching: there may be a second way: calls that wait are looked at.
        dark: something is amiss: answers are to be told.
    """

    def __init__(
        self,
        first: Path,
        *,
        ways: Callable[[], Sequence[NetworkInfo]],
        make: Callable[[NetworkInfo], Path],
        open_tcp: Callable[[Address], Awaitable[TcpStream]],
        open_over: Callable[[str, Address], Awaitable[TcpStream]],
        enabled: bool,
        metered_bytes: int | None = None,
        woke: Callable[[], None] = lambda: None,
        hedged: Callable[[int], None] = lambda request_bytes: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._ways = ways
        self._make = make
        self._open_tcp = open_tcp
        self._open_over = open_over
        self._enabled = enabled
        self._metered = metered_bytes != 0
        room = limits.PATH_METERED_BYTES if metered_bytes is None else max(1, metered_bytes)
        self._policy = PathPolicy(metered_bytes=room, metered_bytes_per_s=room / _SECONDS_A_DAY)
        self._found: dict[str, NetworkInfo] = {}
        self._others: dict[str, Path] = {}
        self._lanes: dict[Lane, None] = {}
        self._fresh = False
        self._timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._probing: asyncio.Task[None] | None = None
        self._woke = woke
        self._hedged = hedged
        self._closed = False
        self._beside: Path | None = None  # the way that calls were last tried on in the dark
        self._moved_at = -math.inf  # when calls last began to begin on another way
        self.attempt: Callable[[Lane], Coroutine[None, None, Reply]] | None = None
        self.first = self.usual = first
        self.away = False
        self.watching = enabled
        self.dark = False

    @property
    def others(self) -> list[Path]:
        """The ways that were made beside the first."""
        return list(self._others.values())

    def quality(self) -> Quality:
        """Give the quality of the way that calls begin on now; where that is not the first, its evidence names it."""
        found = self.usual.steering.quality()
        evidence = f"over {self.usual.name}: {found.evidence}" if self.away else found.evidence
        here_s = self._loop.time() - self._moved_at
        return found._replace(since_s=min(found.since_s, here_s), evidence=evidence)

    def names_over(self) -> Path:
        """Give the way that names are to be asked over: in the dark the one that calls are tried on."""
        beside = self._beside
        if self.away or not self.dark or beside is None or beside not in self._others.values():
            return self.usual
        return beside

    # -- which there are ----------------------------------------------------------------------------------------------
    def changed(self, *, network: bool) -> None:
        """Something about the ways may have changed; `network`: the first leads to another network than before."""
        if not self._enabled or self._closed:
            return
        self._fresh = False
        self.watching = True
        if network:
            self._policy.heard(self.first.name, self._loop.time())
        if self.away:
            self._refresh()
            self._replan()

    def _refresh(self) -> None:
        """Look which ways there are."""
        self._fresh = True
        found = self._ways()[: limits.PATHS_MAX]
        ways = []
        for number, info in enumerate(found):
            metered = is_metered(info)
            if number and metered and not self._metered:
                continue
            ways.append(Way(info.interface, metered))
            if not number:
                self.first.name = info.interface
            elif (path := self._others.get(info.interface)) is not None and path.steering.network.id != info.id:
                path.steering.network = Network(info.id, info.kind)
                path.pool.doubt()
        self._policy.routes(ways if len(ways) > 1 else ())
        self._found = {info.interface: info for info in found}
        self.watching = len(ways) > 1
        self.dark = self.dark and self.watching

    def _path(self, name: str) -> Path:
        """Give the way of a name that the policy knows, made now where it was never used."""
        if name == self.first.name:
            return self.first
        path = self._others.get(name)
        if path is None:
            if len(self._others) >= limits.PATHS_MAX:  # of interfaces that have come and gone
                self._others.pop(next(iter(self._others))).close()
            path = self._others[name] = self._make(self._found[name])
        return path

    # -- calls --------------------------------------------------------------------------------------------------------
    def begin(self, host: str) -> Path:
        """Give the way that a call begins on, where that is not the first as a matter of course."""
        self._settle()
        return self.first if stays(host) else self.usual

    def again(self, run: Run) -> None:
        """An attempt has failed: the next begins where calls begin now, if that is not the first way."""
        if self.away and not stays(run.request.host):
            switch(run, self.usual)

    def watch(self, lane: Lane) -> None:
        """A lane begins: it is looked at as long as it waits."""
        if lane.step.means is Means.LONG or stays(lane.run.request.host):
            return
        self._lanes[lane] = None
        lane.watched = self._lanes
        if self._timer is None:
            self._timer = self._loop.call_later(limits.PATH_LOOK_S, self._look)

    def answered(self, lane: Lane) -> None:
        """A lane was answered, while a way is dark or was."""
        if stays(lane.run.request.host):
            return
        now = self._loop.time()
        self._hear(now)
        dead = self._policy.answered(lane.path.name, now)
        if dead is not None:
            lane.note(f"{dead} is dead: {lane.path.name} until it is back")
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(0.0, self._look)  # whoever waits in the dark need not wait on
        self.dark = self._policy.troubled
        self._settle()

    def _look(self) -> None:
        self._timer = None
        if self._closed:
            return
        if not self._fresh:
            self._refresh()  # also where all calls were quick: the next ones pay nothing where there is one way
        if not self.watching:
            for lane in self._lanes:
                lane.watched = None
            self._lanes.clear()
            return
        if not self._lanes:
            return
        now = self._loop.time()
        for lane in self._lanes:
            if lane.held is not None and lane.asked_at is not None:
                lane.path.steering.sensing.looked(lane.run, lane.held, lane.held.tcp_info())
        self._hear(now)
        silent = {path: path.steering.sensing.silent_s(now) for path in {lane.path for lane in self._lanes}}
        for lane in list(self._lanes):
            dark_s = silent[lane.path]
            if self.away and lane.path is self.first:
                self._rescue(lane, self.usual, dark_s)
            elif dark_s >= self._dark_s(lane):
                other = self._policy.beside(lane.path.name, dark_s=dark_s, now=now)
                if other is not None:
                    self._beside = self._path(other)
                    self._rescue(lane, self._beside, dark_s)
        self.dark = self._policy.troubled
        self._settle()
        if self._timer is None:
            self._timer = self._loop.call_later(limits.PATH_LOOK_S, self._look)

    def _dark_s(self, lane: Lane) -> float:
        """Give the silence that is no round trip of a slow link."""
        steering = lane.path.steering
        rtt_s = steering.timeouts.rtt_s(steering.network, lane.run.request.host, 0.9)
        return max(limits.PATH_DARK_S, limits.PATH_DARK_ROUND_TRIPS * (rtt_s or 0.0))

    def _hear(self, now: float) -> None:
        """Tell the policy over which ways something has come since it was last told."""
        for path in (self.first, *self._others.values()):
            at = path.heard_at()
            if at > path.told_at:
                path.told_at = at
                self._policy.heard(path.name, now)

    def _settle(self) -> None:
        """Book what the other ways have carried, and see which one calls begin on now."""
        now = self._loop.time()
        for path in self._others.values():
            meter = path.meter
            total = meter.bytes_up + meter.bytes_down + limits.PATH_CONNECTION_BYTES * meter.connections
            if total > path.booked:
                self._policy.carried(path.name, total - path.booked, now)
                path.booked = total
        self._replan()

    def _replan(self) -> None:
        names = self._policy.plan(self._loop.time())
        usual = self._path(names[0]) if names else self.first
        if usual is not self.usual:
            self.usual, self._moved_at = usual, self._loop.time()
        self.away = self.usual is not self.first
        self._plan_probe()

    # -- another way for a call that waits ----------------------------------------------------------------------------
    def _rescue(self, lane: Lane, path: Path, dark_s: float) -> None:
        """Give a call that waits in the dark another way, where it may have one."""
        run = lane.run
        taken = run.over or run.detours >= limits.ATTEMPTS_MAX
        if taken or run.path is path or any(other.path is path for other in run.others.values()):
            return
        why = f"{lane.path.name} is dark for {dark_s:.1f} s"
        if run.ladder.repeatable and not run.body.spent:
            self._open_beside(lane, path, why)
        elif lane.held is None and lane.main and not run.body.spent:
            # Nothing of it has left, nor will: a connection is told to the lane before anything is sent on it.
            run.detours += 1
            lane.note(f"{why}: over {path.name} instead")
            switch(run, path)
            run.left.clear()
            run.move(errors.ConnectError(why, phase=Phase.CONNECT, maybe_delivered=False))

    def _open_beside(self, lane: Lane, path: Path, why: str) -> None:
        run = lane.run
        verdict = path.steering.may_retry(run.request.host, heard=False)
        if not verdict.allowed or self.attempt is None:
            run.trace.note(verdict.why)
            return
        run.detours += 1
        if not run.has_room():
            next(iter(run.others)).cancel()  # as dark as this one
        other = Lane(run, lane.step, lane.looks, quiet=True, path=path)
        lane.note(f"{why}: over {path.name} too")
        run.trace.handed_down(run.shape.request_bytes)
        self._hedged(run.shape.request_bytes)
        self.watch(other)
        run.beside(other, self.attempt(other), functools.partial(_note_failure, other))

    # -- is a dead way back? ------------------------------------------------------------------------------------------
    def _plan_probe(self) -> None:
        at = self._policy.next_timer()
        idle = self._probe_timer is None and self._probing is None
        if at is not None and idle and not self._closed and self._busy():
            self._probe_timer = self._loop.call_at(max(at, self._loop.time()), self._probe_due)

    def _busy(self) -> bool:
        """Say whether calls are under way: an idle app asks nothing."""
        return any(path.steering.busy() for path in (self.first, *self._others.values()))

    def _probe_due(self) -> None:
        self._probe_timer = None
        if not self._busy():
            self._woke()
            return  # the next call asks
        name = self._policy.probe(self._loop.time())
        if name is None:
            self._plan_probe()
            return
        self._probing = self._loop.create_task(self._probe(self._path(name)), name=f"is {name} back?")
        self._probing.add_done_callback(self._probed)

    def _probed(self, task: asyncio.Task[None]) -> None:
        self._probing = None
        if not self._closed:
            self._replan()

    async def _probe(self, path: Path) -> None:
        """Ask a dead way for one TCP connection, to where there was one before."""
        alive = False
        asked_at = self._loop.time()
        peer = path.steering.last_peer or self.usual.steering.last_peer
        try:
            if peer is not None:
                open_tcp = self._open_tcp if path is self.first else functools.partial(self._open_over, path.name)
                async with asyncio.timeout(limits.PATH_PROBE_S):
                    (await open_tcp(peer)).close()
                    alive = True
        except ConnectionRefusedError:
            alive = True  # somebody there has said so
        except OSError:
            pass
        finally:
            if alive:
                path.steering.back(self._loop.time() - asked_at)
            self._policy.probed(path.name, self._loop.time(), alive=alive)

    def close(self) -> None:
        """End it; again is harmless, also where the loop is closed."""
        self._closed = True
        self.watching = False
        for timer in (self._timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        for path in self._others.values():
            path.close()
        if self._probing is not None:
            self._probing.cancel()

    async def aclose(self) -> None:
        """End it, and wait for what runs."""
        task = self._probing
        self.close()
        for path in self._others.values():
            await path.pool.aclose()
        if task is not None:
            await asyncio.wait([task])


def switch(run: Run, path: Path) -> None:
    """Have a call count as one of another way."""
    if run.path is not path:
        run.path.steering.leave(run)
        run.path = path
        path.steering.take(run)


@functools.lru_cache(limits.PATH_CLASSES_CACHED)
def stays(host: str) -> bool:
    """Say whether a host is of this machine or its link, by its name or number: another way does not lead there."""
    name = host.lower().rstrip(".")
    try:
        literal = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return "." not in name or name.endswith(_LOCAL)
    return literal.is_loopback or any(literal in each for each in _PRIVATE)


def _note_failure(lane: Lane, error: BaseException) -> None:
    if isinstance(error, Failed):
        lane.note(f"over {lane.path.name}: failed in {error.error.phase}: {error.error}")
    else:
        lane.note(f"over {lane.path.name}: failed: {type(error).__name__}")
