"""The gate before a call's first attempt: almost always open, and where it is not, the line before it.

The rules are `policy.admission`'s; here are the futures that callers wait on. A call holds a place from here to the
head of its answer, and gives it up while it pauses. Long polls and streams hold none: waiting is what they are for.
"""

import asyncio
from typing import Any, Final, Protocol

from stormline.client.trace import CallTrace
from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.net.clock import time_of
from stormline.policy import admission as policy
from stormline.policy.admission import Gate, Ticket, Verdict
from stormline.policy.shape import Pattern, RequestShape

_HELD: Final = (Pattern.LONG_POLL, Pattern.STREAM)
_LARGE: Final = (Pattern.UPLOAD, Pattern.DOWNLOAD)
_REFUSALS: Final = frozenset({429, 503})


class Guest(Protocol):
    """A call, as far as the gate is concerned.

    Attributes:
        gate: that of its host, while it holds a place; else None.
        level: in flight when it got its place.
        admitted_at: when that was, the loop's time.
        came_at: when it first came to the gate; 0 before.
        judged: what became of the attempt is known already.
        urgency: 0 to 7; a large request on a weak link becomes background work, unless it is a key one.
        ends_at: its deadline, the loop's time.
    """

    gate: Gate | None
    level: int
    admitted_at: float
    came_at: float
    judged: bool
    urgency: int
    ends_at: float
    first_byte_s: float | None

    @property
    def shape(self) -> RequestShape:
        """What it looks like."""
        ...

    @property
    def trace(self) -> CallTrace:
        """Follows it."""
        ...


class Admission:
    """The gates of one client. Belongs to one event loop.

    Args:
        enabled: False lets everything through.

    Attributes:
        policy: the rules, and what they have learned.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._loop = asyncio.get_running_loop()
        self._time = time_of(self._loop)
        self._enabled = enabled
        self.policy = policy.Admission()

    def enter(self, guest: Guest) -> bool:
        """Give a place where there is one: True, and the call may go. Costs less than 2 us."""
        if not self._enabled or guest.shape.pattern in _HELD:
            return True
        if self.policy.weak_limit < limits.ADMISSION_FULL and guest.shape.pattern in _LARGE and guest.urgency:
            guest.urgency = policy.BACKGROUND  # it would fill the link: half of the room is the small ones'
        gate = self.policy.gate(guest.shape.host)
        if not gate.enter(guest.urgency):
            return False
        self._admit(guest, gate)
        return True

    async def wait(self, guest: Guest) -> None:
        """Wait for a place, as far as the call's deadline lets; the place is the call's when this returns.

        Cancelled at any moment, the call holds no place and is in no line.

        Raises:
            QueueFull: too many wait already.
            DeadlineExceeded: the deadline came first; `phase` is QUEUED.
        """
        gate = self.policy.gate(guest.shape.host)
        now = self._time()
        if not guest.came_at:
            guest.came_at = now
        ticket = self.policy.queue(gate, guest.urgency, now, since=guest.came_at, by=guest.ends_at)
        if ticket is None:
            raise errors.QueueFull(
                f"{gate.host}: {self.policy.waiting} requests wait for room already",
                phase=Phase.QUEUED,
                maybe_delivered=False,
            )
        ticket.payload = granted = self._loop.create_future()
        guest.trace.enter(Phase.QUEUED)
        guest.trace.note(f"{gate.in_flight} in flight to {gate.host}, room for {gate.room}: {gate.waiting} wait")
        self._tell(self.policy.serve(gate, now))  # those before may be background work that this one does not wait for
        try:
            async with asyncio.timeout_at(guest.ends_at) as timeout:
                await granted
        except BaseException as error:
            if ticket.granted:  # in this very moment
                self._tell(self.policy.leave(gate, self._time(), ticket.urgency))
            else:
                self.policy.drop(gate, ticket)
            if isinstance(error, TimeoutError) and timeout.expired():
                raise self._too_late(gate) from error
            raise
        if ticket.late:
            raise self._too_late(gate)
        self._admit(guest, gate)

    async def back(self, guest: Guest) -> bool:
        """Get a place for another attempt of a call that gave its own up; False where none is to be had in time.

        What became of its attempts before stands then: one of them may have been processed.
        """
        if guest.gate is not None or self.enter(guest):
            return True
        try:
            await self.wait(guest)
        except (errors.DeadlineExceeded, errors.QueueFull) as error:
            guest.trace.note(str(error))
            return False
        return True

    @staticmethod
    def _too_late(gate: Gate) -> errors.DeadlineExceeded:
        return errors.DeadlineExceeded(
            f"{gate.host}: no room in time for an answer by the deadline, {gate.in_flight} in flight",
            phase=Phase.QUEUED,
            maybe_delivered=False,
        )

    def _admit(self, guest: Guest, gate: Gate) -> None:
        guest.gate = gate
        guest.level = gate.in_flight
        guest.admitted_at = self._time()
        guest.judged = False
        if not guest.came_at:
            guest.came_at = guest.admitted_at

    def leave(self, guest: Guest, *, good: bool = False) -> None:
        """Take the place back, if the call has one; harmless at any time.

        Args:
            guest: the call.
            good: its attempt was answered.
        """
        gate = guest.gate
        if gate is None:
            return
        guest.gate = None
        now = self._time()
        if good and not guest.judged:
            gate.observe(guest.level, Verdict.GOOD, guest.admitted_at, now)
        called = self.policy.leave(gate, now, guest.urgency)
        if called:
            self._tell(called)

    def answered(self, guest: Guest, status: int) -> None:
        """Learn from the status of an answer."""
        if status in _REFUSALS:
            self._judge(guest, Verdict.REFUSED)

    def failed(self, guest: Guest, error: errors.TransportError) -> None:
        """Learn from a failed attempt."""
        if isinstance(error, errors.DeadlineExceeded) and error.phase is Phase.FIRST_BYTE:
            self.silent(guest)

    def silent(self, guest: Guest) -> None:
        """Learn that an answer is overdue; it says something of load where others were answered meanwhile."""
        gate = guest.gate
        if gate is not None and gate.answered_at > guest.admitted_at:
            self._judge(guest, Verdict.SILENT)

    def _judge(self, guest: Guest, verdict: Verdict) -> None:
        if guest.gate is not None and not guest.judged:
            guest.judged = True
            guest.gate.observe(guest.level, verdict, guest.admitted_at, self._time())

    # -- lanes beside ---------------------------------------------------------------------------------------------
    def beside(self, guest: Guest, task: "asyncio.Task[Any]") -> None:
        """Count a lane beside as in flight for as long as its task runs; see `Gate.may_beside`."""
        gate = guest.gate
        if gate is not None:
            gate.in_flight += 1
            # Not in the task: one that is cancelled before its first step does nothing at all.
            task.add_done_callback(lambda _: self._tell(self.policy.leave(gate, self._time())))

    # -- what is measured -----------------------------------------------------------------------------------------
    def learn(self, guest: Guest, weak: bool, bytes_per_s: float | None, rtt_s: float | None) -> None:
        """Learn from an answer that came whole, and from how the link does; some in a second are enough."""
        if not self._enabled:
            return
        if guest.first_byte_s is not None and guest.shape.pattern not in _HELD:
            shape = guest.shape
            self.policy.latency(shape.host, shape.path_class, guest.level, guest.first_byte_s, self._time())
        self._tell(self.policy.link(weak=weak, bytes_per_s=bytes_per_s, rtt_s=rtt_s, now=self._time()))

    def network_changed(self) -> None:
        """What is known of the link is another link's."""
        self._tell(self.policy.link(weak=False, bytes_per_s=None, rtt_s=None, now=self._time()))

    def _tell(self, called: list[Ticket]) -> None:
        for ticket in called:
            if not ticket.payload.done():
                ticket.payload.set_result(None)
