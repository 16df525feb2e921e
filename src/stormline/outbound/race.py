"""The race of one dial: which address is started when, who may begin TLS, and what is done about silence.

- The next address is started at once where one fails, and else when those before it have had their head start (RFC
  8305 section 5).
- One TLS handshake is left alone while it moves: on a slow link every other one takes its bandwidth. Who is connected
  meanwhile waits at the gate, and no further address is started.
- A lost SYN is repeated by the kernel after 1, 3 and 7 s, which sleeps past the end of a blackout. So a silent address
  is knocked at again at an even pace, beside the connections to it that are on their way.
- Where an address fails, or is silent for long, whoever knows of others is asked; they are started as soon as they are
  known.
- Where all addresses say no and nobody knows of others, the race is over. Where one was only silent they are begun
  again, until the caller's time is over.

The race itself runs in the dial's task and sleeps until something ended or is due; each connection is a task.
"""

import asyncio
import errno
import math
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from stormline.core import errors, limits, limits_means
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.stream import Stream, TcpStream, reason_of
from stormline.net.trust import is_impostor

NO_WAY_OUT: Final = frozenset({errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL})
"""How the kernel says that nothing can leave for an address. Where it says so of all, the error's cause has one."""
OpenTcp = Callable[[Address], Awaitable[TcpStream]]
"""Connects to one address; `net.stream.open_tcp` is the real one."""
Shake = Callable[[TcpStream], Awaitable[Stream]]
"""Does TLS on a connection and takes it over; failed or cancelled, the connection is closed."""


def _always() -> bool:
    return True


class Pace(NamedTuple):
    """How patient one dial is, seconds.

    Attributes:
        stagger_s: head start of each address before the next is started too.
        repeat_s: an address that has shown nothing for so long is knocked at once more; infinite: never.
        connect_s: one TCP connection may take.
        tls_s: one TLS handshake may take.
        beside: asked before a TLS handshake is begun beside another of the dial; where it says no the one that is under
            way has until it was silent for `limits_means.METERED_SILENCE_S`.
    """

    stagger_s: float = limits.CONNECT_STAGGER_S
    repeat_s: float = limits.DIAL_REPEAT_S
    connect_s: float = limits.TIMEOUT_CONNECT_S_MAX
    tls_s: float = limits.TIMEOUT_CONNECT_S_MAX
    beside: Callable[[], bool] = _always


_DEFAULT_PACE: Final = Pace()


class Advice(Protocol):
    """What a dialer asks about addresses, and tells; belongs to one network. Called in the event loop, never waits.

    Of an address that was started a dial tells `connected`, `failed` (once, however often it was tried), first the one
    and then the other where it was begun again, or `outrun`. Of a dial that its caller cancelled it tells only what had
    failed before.
    """

    def order(self, host: str, addresses: Sequence[Address], left: Collection[Address]) -> Sequence[Address]:
        """Give the order in which to start `addresses`; `left`, where this request has failed already, last."""
        ...

    def pace(self, host: str) -> Pace:
        """Give the patience for a dial that begins now."""
        ...

    def connected(self, host: str, address: Address, *, connect_s: float, tls_s: float | None) -> None:
        """Take note: it won. `tls_s` is None where no TLS was asked for; waiting for others is in neither time."""
        ...

    def failed(self, host: str, address: Address, *, tried_s: float) -> None:
        """Take note: it said no, or nothing for the whole of the pace's patience."""
        ...

    def outrun(self, host: str, address: Address) -> None:
        """Take note: another won before it could show anything."""
        ...


class Reinforcements(Protocol):
    """What a race in need asks for addresses, and tells who showed a wrong certificate."""

    def impostor(self, address: Address) -> None:
        """Take note: it is not who was asked for."""
        ...

    def more(self, seen: Collection[Address]) -> Coroutine[Any, Any, Sequence[Address]]:
        """Give addresses beyond those `seen`, the best first; none where there are no others."""
        ...


class _TlsFailed(Exception):
    """TCP connected, TLS did not finish."""


class _TlsSilent(_TlsFailed):
    """The peer has not said all that TLS needs, and not that it will not."""


class _Racer:
    """One connection on its way.

    Attributes:
        address: where to.
        began_at: when it was started, in the loop's time as all here.
        since: since when its address has been asked for TCP in vain: a repeat continues the wait of those before it.
        task: makes it.
        raw: the TCP connection, as soon as it stands.
        up_at: when it stood.
        tls_at: when TLS was begun, None before.
        turn: what it waits for at the gate.
    """

    __slots__ = ("address", "began_at", "raw", "since", "task", "tls_at", "turn", "up_at")

    def __init__(self, address: Address, began_at: float, since: float) -> None:
        self.address = address
        self.began_at = self.up_at = began_at
        self.since = since
        self.raw: TcpStream | None = None
        self.tls_at: float | None = None
        self.turn: asyncio.Future[None] | None = None
        self.task: asyncio.Task[Stream]

    @property
    def sign_at(self) -> float:
        """When it last showed life, or was last given something to answer."""
        if self.raw is None:
            return self.began_at
        heard_at: float = getattr(self.raw, "heard_at", self.up_at)
        return max(heard_at, self.up_at if self.tls_at is None else self.tls_at)


class Race:
    """One dial: how far it is, what failed, and the racers. Runs once.

    Args:
        host: whose addresses they are, for `advice`.
        advice: is told what became of them.
        open_tcp: connects to one address.
        shake: does TLS; None: the TCP connection is what was asked for.
        on_stage: told each stage as the first racer enters it.
        on_note: told decisions in words.
        more: asked for further addresses in need; None: there are no others.
    """

    def __init__(
        self,
        host: str,
        advice: Advice,
        open_tcp: OpenTcp,
        shake: Shake | None,
        *,
        on_stage: Callable[[Phase], None],
        on_note: Callable[[str], None],
        more: Reinforcements | None = None,
    ) -> None:
        self._host = host
        self._advice = advice
        self._open_tcp = open_tcp
        self._shake = shake
        self._on_stage = on_stage
        self._on_note = on_note
        self._more = more
        self._asking: asyncio.Task[Sequence[Address]] | None = None
        self._loop = asyncio.get_running_loop()
        self._pace = _DEFAULT_PACE
        self._repeat_s = _DEFAULT_PACE.repeat_s
        self._thrifty = False  # no bytes are left for a handshake beside another
        self._order: Sequence[Address] = ()
        self._waiting: deque[Address] = deque()  # not started in this round
        self._live: dict[_Racer, None] = {}  # in the order they were started
        self._gate: deque[_Racer] = deque()  # connected, and another's handshake goes first
        self._ending: set[asyncio.Task[Stream]] = set()  # dismissed
        self._left: list[_Racer] = []  # live when the race ended
        self._failures: dict[Address, Exception] = {}  # the last of each address
        self._told: set[Address] = set()  # failures that `advice` knows
        self._knocked: dict[Address, float] = {}  # when each was last started; a repeat that failed at once counts too
        self._repeats: dict[Address, int] = {}
        self._rounds = 1
        self._round_at = -math.inf  # when this round began or is to begin
        self._start_at = -math.inf  # when the next of those that wait is started, if none fails before
        self._wake: asyncio.Future[float] | None = None
        self._now = -math.inf
        self._due = math.inf  # until when the race sleeps
        self.phase = Phase.QUEUED

    def enter(self, phase: Phase) -> None:
        """Go on to `phase`, where it is not there yet: only the first racer in it is told of."""
        if phase is not self.phase:
            self.phase = phase
            self._on_stage(phase)

    def story(self) -> str:
        """Tell which addresses failed and why, and which are still being tried."""
        trying = {racer.address: "no answer yet" for racer in self._left}
        trying |= {racer.address: "connected, TLS not finished" for racer in self._left if racer.raw is not None}
        failed = {address: reason_of(error) for address, error in self._failures.items()}
        failed |= {address: f"{failed[address]}, tried again" for address in failed if address in trying}
        return "; ".join(f"{address}: {what}" for address, what in (failed | (trying | failed)).items())

    async def run(self, order: Sequence[Address], pace: Pace) -> Stream:
        """Give the first stream that stands; every other one is closed before this returns or raises.

        Args:
            order: the order in which to start; at least one.
            pace: the patience; how long all of it may take is the caller's to say, by cancelling.

        Raises:
            ConnectError: every address refused the connection, or it could not be reached.
            TlsError: the same, and at least one took it and then ended TLS or showed a wrong certificate.
        """
        self._order = order
        self._pace = pace
        self._repeat_s = max(pace.repeat_s, limits.DIAL_REPEAT_S_MIN)
        winner: _Racer | None = None
        try:
            winner = await self._watch()
            self._tell_won(winner)
            await self._end()
            return winner.task.result()
        except BaseException:
            if winner is not None:
                _close_result(winner.task)
            await self._end()
            raise

    def tell_timed_out(self) -> None:
        """Tell the advice which addresses were silent for long enough to be worth it when the time was over."""
        now = self._time()
        for address in dict.fromkeys(racer.address for racer in self._left):
            racers = [racer for racer in self._left if racer.address == address]
            signs = [racer.sign_at for racer in racers if racer.raw is not None]
            silent_s = now - max(signs, default=min(racer.since for racer in racers))
            if silent_s >= min(self._repeat_s, self._pace.connect_s):
                self._tell_failed(address, silent_s)

    # -- the race -----------------------------------------------------------------------------------------------------
    async def _watch(self) -> _Racer:
        """Do what is due and sleep until more is, until one has won or all have said no."""
        now = self._start_at = self._round_at = self._time()
        self._waiting.extend(self._order)
        self._start_due(now, at_once=False)
        while self._live or self._waiting or self._asking:
            now = await self._sleep()
            lost: list[Exception] = []
            for racer in [each for each in self._live if each.task.done()]:
                if racer not in self._live:
                    continue  # dismissed a moment ago, with one that failed like it
                del self._live[racer]
                error = racer.task.exception()
                if error is None:
                    return racer
                if not isinstance(error, (OSError, _TlsFailed)):
                    raise error  # not the network's: a bug, or a callback of the caller
                self._lose(racer, error, now)
                lost.append(error)
            lost += self._end_overdue(now)
            came = self._take_more(now)
            if lost:
                self._ask_for_more()
            self._begin_again(lost, now)
            self._start_due(now, at_once=bool(lost) or came)
            self._open_gate(now)
            self._repeat_silent(now)
        raise self._all_failed()

    async def _connect(self, racer: _Racer) -> Stream:
        raw = racer.raw = await self._open_tcp(racer.address)
        racer.up_at = self._time()
        if self._shake is None:
            return raw
        for other in self._live:
            if other.address == racer.address and other.raw is None:
                other.since = other.began_at  # the address has answered: the wait of a repeat is its own now
        try:
            await self._pass_gate(racer)
            self.enter(Phase.TLS)
        except BaseException:
            raw.close()
            raise
        try:
            return await self._shake(raw)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError; ValueError: no name TLS could ask for
            failure = _TlsSilent if isinstance(error, TimeoutError) else _TlsFailed
            raise failure(reason_of(error)) from error

    def _time(self) -> float:
        """Give the loop's time, and never less than before: what was due may be a little ahead of a coarse clock."""
        self._now = max(self._now, self._loop.time())
        return self._now

    async def _sleep(self) -> float:
        """Wait until a racer ended or something is due; give the time, never before what was due."""
        self._due = self._next_due()
        self._wake = self._loop.create_future()
        timer = None if self._due == math.inf else self._loop.call_at(self._due, self._poke, self._due)
        try:
            self._now = max(self._now, await self._wake)  # timers may fire a little early: the time has come
            return self._time()
        finally:
            self._wake = None
            if timer is not None:
                timer.cancel()

    def _poke(self, now: float = -math.inf) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(now)

    def _look_by(self, at: float) -> None:
        """See to it that the race looks after its racers at `at`, if it would have slept longer."""
        if at < self._due:
            self._poke()

    def _ended(self, task: asyncio.Task[Stream]) -> None:
        if task in self._ending:
            self._ending.discard(task)
            _close_result(task)
        self._poke()

    def _next_due(self) -> float:
        gate_at = self._gate_at()
        due = max(self._start_at, gate_at) if self._waiting else math.inf
        if self._gate:
            due = min(due, gate_at)
        for racer in self._live:
            due = min(due, self._bound_at(racer))
        for sign_at in self._signs().values():
            due = min(due, max(sign_at + self._repeat_s, gate_at))
        return due

    # -- starting -----------------------------------------------------------------------------------------------------
    def _start(self, address: Address, now: float, since: float) -> None:
        racer = _Racer(address, now, since)
        racer.task = asyncio.create_task(self._connect(racer), name=f"connect {address}")
        racer.task.add_done_callback(self._ended)
        self._live[racer] = None
        self._knocked[address] = now

    def _start_due(self, now: float, *, at_once: bool) -> None:
        """Start those whose turn it is; the first one `at_once` where another has just failed."""
        if at_once:
            self._start_at = max(now, self._round_at)
        while self._waiting and now >= self._start_at and (at_once or now >= self._gate_at()):
            address = self._waiting.popleft()
            if self._live and not at_once and self._rounds == 1:
                self._on_note(f"trying {address} too: no connection after {self._pace.stagger_s:.3g} s")
            self._start(address, now, now)
            self._start_at = now + self._pace.stagger_s
            at_once = False

    def _begin_again(self, lost: Iterable[Exception], now: float) -> None:
        """Line up the addresses that are not on their way once more, where none waits and one was only silent."""
        pending = now < self._round_at
        if self._waiting and not pending:
            return
        if not any(map(_is_silence, lost if self._live else self._failures.values())):
            return
        busy = {racer.address for racer in self._live} | set(self._waiting)
        self._waiting.extend(address for address in self._order if address not in busy)
        if not pending and self._waiting:
            self._start_at = self._round_at = max(now, self._round_at + limits.DIAL_ROUND_S_MIN)
            self._rounds += 1
            if self._rounds == 2:
                self._on_note("no address is left: beginning again as long as there is time")

    # -- reinforcements -----------------------------------------------------------------------------------------------
    def _ask_for_more(self) -> None:
        if self._more is None or self._asking is not None or len(self._order) >= limits.DIAL_CANDIDATES_MAX:
            return
        asking = self._more.more(tuple(self._order))
        self._asking = self._loop.create_task(asking, name=f"more addresses of {self._host}")
        self._asking.add_done_callback(self._answered)

    def _answered(self, asking: asyncio.Task[Sequence[Address]]) -> None:
        if not asking.cancelled():
            asking.exception()  # looked at in `_take_more`, unless the race is over
        self._poke()

    def _take_more(self, now: float) -> bool:
        """Line up the addresses that came, before all others; False where none did."""
        if self._asking is None or not self._asking.done():
            return False
        asking, self._asking = self._asking, None
        fresh = [each for each in asking.result() if each not in self._order]
        fresh = fresh[: limits.DIAL_CANDIDATES_MAX - len(self._order)]
        if not fresh:
            return False
        self._order = (*self._order, *fresh)
        self._waiting.extendleft(reversed(fresh))
        self._start_at = self._round_at = min(now, self._round_at)
        return True

    # -- silence ------------------------------------------------------------------------------------------------------
    def _repeat_silent(self, now: float) -> None:
        """Knock once more at each address of which nothing was heard for the pace's time."""
        gate_at, signs = self._gate_at(), self._signs()
        for address, sign_at in signs.items():
            if now < max(sign_at + self._repeat_s, gate_at):
                continue
            racers = [racer for racer in self._live if racer.address == address]
            since = min((racer.since for racer in racers if racer.raw is None), default=now)
            beside = len(self._live) - len(signs)  # each address has a place of its own, the rest is for repeats
            if len(racers) >= limits.DIAL_KNOCKS_MAX or len(self._order) + beside >= limits.DIAL_RACERS_MAX:
                self._dismiss(racers[0])
            self._ask_for_more()
            if address not in self._repeats:
                self._on_note(f"{address} is silent: knocking again every {self._repeat_s:.3g} s")
            self._repeats[address] = self._repeats.get(address, 0) + 1
            self._start(address, now, since)

    def _signs(self) -> dict[Address, float]:
        """Give for each address on its way when one of its racers last showed life or was last given the chance to."""
        signs: dict[Address, float] = {}
        for racer in self._live:
            known_at = signs.get(racer.address, self._knocked[racer.address])
            signs[racer.address] = max(known_at, racer.sign_at)
        return signs

    # -- the gate -----------------------------------------------------------------------------------------------------
    def _gate_at(self) -> float:
        """Give when the next handshake may begin: when none is within its head start any more.

        A head start is two of its racer's round trips, anew with every sign of life; long silence ends it too.
        """
        opens_at = -math.inf
        for racer in self._live:
            if racer.tls_at is not None:
                head_s = max(limits.TLS_HEAD_START_S, 2.0 * (racer.up_at - racer.began_at))
                silent_s = limits_means.METERED_SILENCE_S if self._thrifty else 0.0
                opens_at = max(opens_at, racer.sign_at + max(silent_s, min(head_s, self._repeat_s)))
        return opens_at

    def _may_shake(self) -> bool:
        """Say whether a handshake may begin beside those under way; where not, it may after their long silence."""
        if self._thrifty or all(racer.tls_at is None for racer in self._live) or self._pace.beside():
            return True
        self._thrifty = True
        return False

    async def _pass_gate(self, racer: _Racer) -> None:
        gate_at = self._gate_at()
        if not (self._gate or racer.up_at < gate_at or self._may_shake()):
            gate_at = self._gate_at()
        if self._gate or racer.up_at < gate_at:
            self._on_note(f"{racer.address} is connected and waits: another's TLS has its head start")
            racer.turn = self._loop.create_future()
            self._gate.append(racer)
            self._look_by(gate_at)
            await racer.turn
        else:
            racer.tls_at = racer.up_at
            self._look_by(racer.up_at + self._pace.tls_s)

    def _open_gate(self, now: float) -> None:
        if self._gate and now >= self._gate_at() and (self._may_shake() or now >= self._gate_at()):
            racer = self._gate.popleft()
            racer.tls_at = now
            if racer.turn is not None and not racer.turn.done():
                racer.turn.set_result(None)

    # -- ending -------------------------------------------------------------------------------------------------------
    def _bound_at(self, racer: _Racer) -> float:
        if racer.raw is None:
            return racer.since + self._pace.connect_s
        return math.inf if racer.tls_at is None else racer.tls_at + self._pace.tls_s

    def _end_overdue(self, now: float) -> list[Exception]:
        """Give up the racers that have used up their patience; give their failures."""
        lost: list[Exception] = []
        for racer in list(self._live):
            if racer in self._live and now >= self._bound_at(racer):
                self._dismiss(racer)
                if racer.raw is None:
                    lost.append(TimeoutError(f"no connection within {self._pace.connect_s:.3g} s"))
                else:
                    lost.append(_TlsSilent(f"TLS not finished within {self._pace.tls_s:.3g} s"))
                self._lose(racer, lost[-1], now)
        return lost

    def _lose(self, racer: _Racer, error: Exception, now: float) -> None:
        before = self._failures.get(racer.address)
        if before is None or reason_of(before) != reason_of(error):  # what happens every round is told once
            self._on_note(f"{racer.address} failed: {reason_of(error)}")
        self._failures[racer.address] = error
        if self._more is not None and error.__cause__ is not None and is_impostor(error.__cause__):
            self._more.impostor(racer.address)
        self._tell_failed(racer.address, now - racer.since)
        if racer.raw is None:  # what befell its SYN befalls the repeated ones
            for other in [each for each in self._live if each.address == racer.address and each.raw is None]:
                self._dismiss(other)

    def _dismiss(self, racer: _Racer) -> None:
        del self._live[racer]
        if racer in self._gate:
            self._gate.remove(racer)
        if racer.task.done():
            _close_result(racer.task)
        else:
            self._ending.add(racer.task)  # closed when it ends, also where nobody waits for that
            racer.task.cancel()

    async def _end(self) -> None:
        """End all that still run; they are gone when this returns."""
        self._left += self._live
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait((self._asking,))
        for racer in list(self._live):
            self._dismiss(racer)
        if self._ending:
            await asyncio.wait(list(self._ending))

    def _all_failed(self) -> errors.TransportError:
        story = f"no connection: {self.story()}"
        failures = list(self._failures.values())
        failed: errors.TransportError
        if any(isinstance(error, _TlsFailed) for error in failures):
            failed = errors.TlsError(story, phase=Phase.TLS, maybe_delivered=False)
        else:
            failed = errors.ConnectError(story, phase=Phase.CONNECT, maybe_delivered=False)
        # Of several the one that says most of the path: somebody else answered; there was a way out.
        strangers = (error for error in failures if isinstance(error.__cause__, ssl.SSLCertVerificationError))
        tried = (error for error in reversed(failures) if getattr(error, "errno", None) not in NO_WAY_OUT)
        failed.__cause__ = next(strangers, next(tried, failures[-1] if failures else None))
        return failed

    def _tell_won(self, winner: _Racer) -> None:
        repeats = f", {sum(self._repeats.values())} repeats" if self._repeats else ""
        self._on_note(f"connected to {winner.address}, {len(self._failures)} failed before{repeats}")
        tls_s = None if winner.tls_at is None else self._time() - winner.tls_at
        self._advice.connected(self._host, winner.address, connect_s=winner.up_at - winner.began_at, tls_s=tls_s)
        for address in dict.fromkeys(racer.address for racer in self._live):
            if address != winner.address and address not in self._told:
                self._advice.outrun(self._host, address)

    def _tell_failed(self, address: Address, tried_s: float) -> None:
        if address not in self._told:
            self._told.add(address)
            self._advice.failed(self._host, address, tried_s=tried_s)


def _is_silence(error: Exception) -> bool:
    """Say whether a failure was no answer, which may have come a moment later; else the answer was no."""
    return isinstance(error, (TimeoutError, _TlsSilent))


def _close_result(task: asyncio.Task[Stream]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()
