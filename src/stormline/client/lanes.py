"""One call on its way, and its lanes: attempts, one after the other or side by side, of which the first answer counts.

The first lane runs in the caller's own task: almost every call needs no other, and a task costs more than all that is
decided here. A lane that falls silent may have another opened beside it, which is a task; where that one wins, the
first is interrupted, as `asyncio.timeout` would, and its caller gets the winner's answer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import TYPE_CHECKING, Final, NamedTuple

from stormline.client.answer import RequestBody
from stormline.client.trace import CallTrace
from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.net.clock import time_of
from stormline.outbound.messages import BodySource, Headers, HttpRequest
from stormline.policy.means import Ladder, Means, Step
from stormline.policy.presets import ORDINARY, Preset
from stormline.policy.shape import RequestShape

if TYPE_CHECKING:
    from stormline.client.commands import Command
    from stormline.client.looks import FirstLooks
    from stormline.client.path import Path
    from stormline.client.rules import ClearHttp
    from stormline.core.values import Address
    from stormline.outbound.held import Held
    from stormline.policy.admission import Gate
    from stormline.wire.plan import HostPlan


_NOTHING_OFF: Final[frozenset[str]] = frozenset()


class CallLimits(NamedTuple):
    """Time of one call, and what its caller says of it.

    Attributes:
        deadline_s: seconds until the head of the answer over all attempts.
        read_timeout_s: the longest silence (None for any).
        connect_timeout_s: one connection (None: as long as the deadline lets).
        stream_timeout_s: the longest silence of a body that turns out to be a stream.
        resends: a request that may have been processed may be sent again, where its method allows that.
        preset: how often each means is tried.
        clear: consent to clear HTTP, None for none.
        urgency: 0 to 7, as RFC 9218's.
        wait_network_s: how long it may wait for a network; 0 for not at all.
        ipv4_first: it is worse over IPv6; see `BusinessRule`.
        command: what the plan of dispatch says of it, None for nothing.
        told: gives its limits once dispatch has said something of its host; None where that is known.
    """

    deadline_s: float
    read_timeout_s: float | None
    connect_timeout_s: float | None
    stream_timeout_s: float | None
    resends: bool
    preset: Preset = ORDINARY
    clear: "ClearHttp | None" = None
    urgency: int = 3
    wait_network_s: float = 0.0
    ipv4_first: bool = False
    command: "Command | None" = None
    told: "Callable[[HostPlan], CallLimits] | None" = None

    @property
    def off(self) -> frozenset[str]:
        """What dispatch has switched off for it."""
        return _NOTHING_OFF if self.command is None else self.command.off

    @property
    def order(self) -> tuple[Means, ...]:
        """Means that dispatch wants first."""
        return () if self.command is None else self.command.order


class Failed(Exception):
    """One step failed.

    Attributes:
        error: how.
        reused: on a connection that had stood before and may just have been stale.
        untouched: the request has certainly not been processed, and that is not the path's fault.
        heard: something came back from the peer.
        untrusted: an answer that nobody vouches for, to be given where there is no other.
    """

    def __init__(
        self,
        error: errors.TransportError,
        *,
        reused: bool,
        untouched: bool = False,
        heard: bool = True,
        untrusted: "Reply | None" = None,
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.reused = reused
        self.untouched = untouched
        self.heard = heard
        self.untrusted = untrusted


class Reply(NamedTuple):
    """The head of an answer that one lane got, and the way to its body.

    Attributes:
        status, reason, http_version, headers: as `Answer`.
        source: the body.
        held: the connection it came over; None for the long connection.
        carrier: `h1`, `h2`, `sl-tls`.
        reused: the connection had stood before.
        untrusted: nobody vouches for it.
        path: the way it came; None for the long connection.
    """

    status: int
    reason: bytes
    http_version: str
    headers: Headers
    source: BodySource
    held: "Held | None"
    carrier: str
    reused: bool
    untrusted: bool = False
    path: "Path | None" = None


class Run:
    """One call on its way: what is asked, how much time it has, who follows it, and its lanes.

    Attributes:
        loop: the event loop it runs on.
        time: its clock.
        shape: what the request looks like.
        left: addresses that were tried for this call in vain.
        off: what is switched off for it.
        answering: the connection that its answer comes over; None for the long one, and before.
        stalled: IP addresses where HTTP/2 has stalled for it on a path that is alive.
        blocked: HTTP/1.1 alone: HTTP/2 is switched off, or has stalled at two addresses, or its host has none that was
            not tried.
        ladder: the steps it may take; set before the first.
        path: the way out that its next lane takes; set before the first.
        detours: attempts made over another way than the one that was dark.
        others: lanes that run beside the first.
        over: nobody waits for a lane any more.
        asked_at: the loop's time when the request had left; None before, and once the answer began.
        first_byte_s: from then to the head of the answer.
        queued: others were under way when it began.
        key: it matters more than others; see `steering.Call`.
        bytes_down: of the answer, as far as they are still to come; -1 where nobody knows.
        gate, level, admitted_at, came_at, judged, urgency: see `admission.Guest`.
        park_until, wait_network_s, deadline_s: see `parking.Waiting`.
    """

    __slots__ = ("_interrupted", "_moved", "_task", "_waiter", "_won", "admitted_at", "answering",
                 "asked_at", "blocked", "body", "bytes_down", "came_at", "detours", "ends_at", "first_byte_s",
                 "gate", "judged", "key", "ladder", "left", "level", "limits", "loop", "off", "others", "over",
                 "park_until", "path", "queued", "request", "shape", "stalled", "time", "trace", "urgency")  # fmt: skip
    ladder: Ladder
    path: "Path"

    def __init__(
        self, request: HttpRequest, body: RequestBody, shape: RequestShape, call_limits: CallLimits, trace: CallTrace
    ) -> None:
        self.loop = loop = asyncio.get_running_loop()
        self.time = time = time_of(loop)
        self.request = request
        self.body = body
        self.limits = call_limits
        self.trace = trace
        self.ends_at = time() + call_limits.deadline_s
        self.shape = shape
        self.left: set[Address] = set()
        self.off: Collection[str] = ()
        self.stalled: set[str] = set()
        self.blocked = False
        self.answering: Held | None = None
        self.others: dict[asyncio.Task[Reply], Lane] = {}
        self.over = False
        self.asked_at: float | None = None
        self.first_byte_s: float | None = None
        self.bytes_down = -1
        self.queued = False
        self.key = call_limits.preset.name == "key"
        self.gate: Gate | None = None
        self.level = 0
        self.admitted_at = self.came_at = 0.0
        self.judged = False
        self.urgency = call_limits.urgency
        self.park_until: float | None = None
        self._task: asyncio.Task[object] | None = None  # the caller's, while the first lane runs in it
        self._interrupted = False
        self._moved: errors.TransportError | None = None
        self.detours = 0
        self._won: Reply | None = None
        self._waiter: asyncio.Future[None] | None = None

    def obey(self, host_plan: "HostPlan") -> None:
        """Take over what dispatch says of its host, where that was not known when it began.

        Its urgency stays: it has been let in by then.
        """
        told = self.limits.told
        if told is not None:
            before, self.limits = self.limits, told(host_plan)
            self.ends_at += self.limits.deadline_s - before.deadline_s
            self.key = self.limits.preset.name == "key"

    def silent_until(self, quiet_since: float) -> float:
        """Give the moment at which a silence since `quiet_since` has been too long."""
        silence_s = self.limits.read_timeout_s
        return self.ends_at if silence_s is None else min(self.ends_at, quiet_since + silence_s)

    @property
    def deadline_s(self) -> float:
        """How long it may take once it goes."""
        return self.limits.deadline_s

    @property
    def wait_network_s(self) -> float:
        """How long it may wait for a network."""
        return self.limits.wait_network_s

    @property
    def ipv4_first(self) -> bool:
        """It is worse over IPv6."""
        return self.limits.ipv4_first

    def remaining(self) -> float:
        """Seconds until the deadline."""
        return self.ends_at - self.time()

    # -- lanes --------------------------------------------------------------------------------------------------------
    async def first(self, lane: Awaitable[Reply]) -> Reply:
        """Run a lane in the caller's task; give its answer, or that of a lane beside it that was quicker.

        Raises:
            Failed: it failed, and so did all beside it.
            asyncio.CancelledError: the caller was cancelled.
        """
        task = asyncio.current_task(self.loop)
        if task is None:
            raise errors.LocalProtocolError("a call needs a task to run in")
        before = task.cancelling()
        self._task = task
        try:
            return await lane
        except asyncio.CancelledError:
            if not self._interrupted:
                raise
            self._interrupted = False
            moved, self._moved = self._moved, None
            if task.uncancel() > before or (self._won is None and moved is None):
                raise
            if moved is not None:
                raise Failed(moved, reused=False, untouched=True, heard=False) from moved
            return self._take()
        except Failed:
            self._task = None
            if self._interrupted:  # in the moment it failed by itself
                self._interrupted, self._moved = False, None
                task.uncancel()
            answer = await self._any_other()
            if answer is None:
                raise
            return answer
        finally:
            self._task = None

    def move(self, error: errors.TransportError) -> None:
        """End the first lane, of which nothing has been sent: it fails with `error`, and the call may go on elsewhere.

        Exact: the lane's task does not run again before it is cancelled.
        """
        if self._task is not None and not self._interrupted:
            self._interrupted, self._moved = True, error
            self._task.cancel()

    def has_room(self) -> bool:
        """Say whether another lane may be opened; one that was given up makes room for it."""
        return len(self.others) < limits.LANES_MAX - 1 or any(lane.given_up for lane in self.others.values())

    def beside(
        self, lane: "Lane", attempt: Coroutine[None, None, Reply], failed: Callable[[BaseException], None]
    ) -> asyncio.Task[Reply]:
        """Run a lane beside those there are, as a task; where there are too many already, one that was given up ends.

        Args:
            lane: what is told of the attempt.
            attempt: the attempt itself.
            failed: told how it failed, where it did.
        """
        if len(self.others) >= limits.LANES_MAX - 1:
            next(task for task, other in self.others.items() if other.given_up).cancel()
        task = asyncio.create_task(attempt, name="another attempt")
        self.others[task] = lane
        task.add_done_callback(lambda _: self._other_done(task, failed))
        return task

    def _other_done(self, task: asyncio.Task[Reply], failed: Callable[[BaseException], None]) -> None:
        self.others.pop(task, None)
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                failed(error)
            elif self.over or self._won is not None:
                _let_go(task.result())
            else:
                self._won = task.result()
                if self._task is not None:
                    self._interrupted = True
                    self._task.cancel()
        if self._waiter is not None and not self._waiter.done() and (self._won is not None or not self.others):
            self._waiter.set_result(None)

    async def _any_other(self) -> Reply | None:
        """Wait for the lanes beside the first, which has failed; None where all fail too."""
        if self._won is None and self.others:
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return None if self._won is None else self._take()

    def _take(self) -> Reply:
        answer, self._won = self._won, None
        if answer is None:
            raise errors.LocalProtocolError("no lane has won")
        return answer

    def end_lanes(self) -> None:
        """Give up every lane that still runs; what they hold is freed as soon as the loop gets to it."""
        self.over = True
        for task in list(self.others):
            task.cancel()
        if self._won is not None:
            _let_go(self._take())


class Lane:
    """One attempt of a call, as the pool and the connection tell of it: their `Follower`.

    Attributes:
        held: the connection it was put on.
        begun_at: the loop's time when it began.
        phase: how far it is.
        asked_at: the loop's time when the request had left.
        dialled: a connection was made for it.
        fresh_at: the loop's time when another lane was opened beside this one.
        hedged: another was opened beside it because it was late.
        given_up: an answer over it is not expected any more, though one would still count.
        path: the way out it takes.
        looks: see there.
        watched: the lanes of which this is one, as long as it is looked at for a dark way; see `client.paths`.
        newer_than: it takes no connection that has brought nothing since this moment of the loop's time.
    """

    __slots__ = ("_quiet", "_time", "_trace", "asked_at", "begun_at", "dialled", "fresh_at", "given_up", "hedged",
                 "held", "looks", "newer_than", "path", "phase", "run", "step", "timer", "watched")  # fmt: skip

    def __init__(
        self, run: Run, step: Step, looks: "FirstLooks[Lane]", *, quiet: bool, path: "Path | None" = None
    ) -> None:
        self._time = run.time
        self._trace = run.trace
        self._quiet = quiet
        self.looks = looks
        self.path = run.path if path is None else path
        self.watched: dict[Lane, None] | None = None
        self.run = run
        self.step = step
        self.begun_at = self._time()
        self.phase = Phase.QUEUED
        self.held: Held | None = None
        self.asked_at: float | None = None
        self.fresh_at: float | None = None
        self.newer_than = self.begun_at if step.fresh else None
        self.dialled = self.given_up = self.hedged = False
        self.timer: asyncio.TimerHandle | None = None

    def stage(self, stage: Phase) -> None:
        """A stage begins. Of lanes side by side only the first is the call's timeline."""
        self.phase = stage
        if stage is Phase.FIRST_BYTE:
            self.asked_at = self._time()
            if self.path is self.run.path:  # another way owes what was asked over it, not this one
                self.run.asked_at = self.asked_at
        elif stage is Phase.CONNECT:
            self.dialled = True
        if not self._quiet:
            self._trace.timeline.enter(stage, self._trace.monotonic())

    def note(self, line: str) -> None:
        """A decision was taken."""
        self._trace.note(f"beside: {line}" if self._quiet else line)

    def on_held(self, held: "Held") -> None:
        """The request is put on a connection."""
        self.held = held
        self.looks.add(self)

    def end(self) -> None:
        """It is over."""
        self.looks.discard(self)
        if self.watched is not None:
            self.watched.pop(self, None)
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    @property
    def main(self) -> bool:
        """It runs in the caller's own task."""
        return not self._quiet

    def heard(self) -> bool:
        """Something came back since it began: the path is not dark."""
        return self.held is not None and self.held.heard_at > self.begun_at


_ENDING: set[asyncio.Task[None]] = set()
"""Answers being let go: a loop keeps only weak references to its tasks."""


def _let_go(reply: Reply) -> None:
    """Close an answer that nobody wants."""
    task = asyncio.get_running_loop().create_task(_close(reply), name="let an answer go")
    _ENDING.add(task)
    task.add_done_callback(_ENDING.discard)


async def _close(reply: Reply) -> None:
    await reply.source.aclose()
