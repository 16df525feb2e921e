"""The line before a host, whatever comes: bounded, in order, and nobody starves in it."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stormline.core import limits
from stormline.policy.admission import Admission, Ticket, Verdict

urgencies = st.integers(0, 7)
rooms = st.integers(1, 12)
HOST = "shop.test"


class Line(RuleBasedStateMachine):
    """Calls come, go, give up and report, in any order; time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission()
        self.gate = self.admission.gate(HOST)
        self.now = 0.0
        self.inside: list[tuple[int, int, float]] = []  # urgency, level, since
        self.waiting: list[Ticket] = []
        self.granted_now: list[Ticket] = []

    def _take(self, called: list[Ticket]) -> None:
        """Check who goes, and count them as inside."""
        for ticket in called:
            assert ticket.granted
            assert ticket in self.waiting, "granted twice, or after it was given up"
            for other in self.waiting:
                if other is ticket:
                    continue
                if other.urgency == ticket.urgency:
                    assert other.order > ticket.order, "within a class the first goes first"
                elif other.urgency < 7:  # background work may be held back by its share
                    passed_s = ticket.since - other.since
                    assert passed_s <= limits.ADMISSION_AGE_S * (other.urgency - ticket.urgency) + 1e-9
            self.waiting.remove(ticket)
            self.inside.append((ticket.urgency, self.gate.in_flight, self.now))

    @rule(urgency=urgencies)
    def come(self, urgency: int) -> None:
        if self.gate.enter(urgency):
            assert not self.waiting or all(each.urgency == 7 for each in self.waiting)
            self.inside.append((urgency, self.gate.in_flight, self.now))
            return
        ticket = self.admission.queue(self.gate, urgency, self.now)
        assert ticket is not None
        self.waiting.append(ticket)
        self._take(self.admission.serve(self.gate, self.now))

    @precondition(lambda self: self.inside)
    @rule(which=st.integers(0, 1000), verdict=st.sampled_from(Verdict))
    def go(self, which: int, verdict: Verdict) -> None:
        urgency, level, since = self.inside.pop(which % len(self.inside))
        self.gate.observe(level, verdict, since, self.now)
        self._take(self.admission.leave(self.gate, self.now, urgency))

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 1000))
    def give_up(self, which: int) -> None:
        self.admission.drop(self.gate, self.waiting.pop(which % len(self.waiting)))

    @rule(seconds=st.floats(0.001, 20.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(weak=st.booleans(), rate=st.floats(500.0, 1e6), rtt_s=st.floats(0.01, 3.0))
    def link(self, weak: bool, rate: float, rtt_s: float) -> None:
        self._take(self.admission.link(weak=weak, bytes_per_s=rate, rtt_s=rtt_s, now=self.now))

    @invariant()
    def counts_are_exact(self) -> None:
        assert self.gate.in_flight == len(self.inside)
        assert self.gate.waiting == self.admission.waiting == len(self.waiting)
        assert self.gate.background == sum(urgency == 7 for urgency, _, _ in self.inside)
        assert 1 <= self.gate.room <= limits.ADMISSION_FULL

    @invariant()
    def nobody_but_background_work_waits_while_there_is_room(self) -> None:
        if self.gate.in_flight < self.gate.room and not self._just_grown():
            assert all(each.urgency == 7 for each in self.waiting)

    def _just_grown(self) -> bool:
        return bool(self.waiting) and self.gate.in_flight > 0  # served when the next one leaves

    def teardown(self) -> None:
        while self.inside:
            self.go(0, Verdict.UNKNOWN)
        assert not self.waiting, "somebody starved"
        assert self.gate.in_flight == 0


TestLine = Line.TestCase
TestLine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@given(st.lists(st.tuples(st.floats(0.0, 5.0), urgencies), min_size=1, max_size=60), rooms)
def test_line_serves_everybody_and_passes_nobody_by_more_than_the_age_allows(
    arrivals: list[tuple[float, int]], room: int
) -> None:
    admission = Admission()
    gate = admission.gate(HOST)
    gate.bound(room)
    while gate.enter():
        pass
    now, tickets = 0.0, []
    for gap, urgency in arrivals:
        now += gap
        ticket = admission.queue(gate, urgency, now)
        assert ticket is not None
        tickets.append(ticket)
    served: list[Ticket] = []
    inside = [3] * room
    while inside:
        urgency = inside.pop(0)
        for ticket in admission.leave(gate, now, urgency):
            served.append(ticket)
            inside.append(ticket.urgency)
        assert gate.in_flight <= room
    assert set(map(id, served)) == set(map(id, tickets))
    assert gate.in_flight == admission.waiting == 0


@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from(Verdict), st.floats(0.0, 30.0)), max_size=200),
)
def test_room_is_never_less_than_one_and_comes_back_in_the_end(
    results: list[tuple[int, Verdict, float]],
) -> None:
    admission = Admission()
    gate = admission.gate(HOST)
    now = 0.0
    for level, verdict, gap in results:
        now += gap
        gate.observe(level, verdict, now - gap, now)
        assert 1 <= gate.room <= limits.ADMISSION_FULL
    gate.observe(1, Verdict.GOOD, now, now + limits.ADMISSION_MEMORY_S + 1.0)
    assert not gate.limited


@given(st.floats(), st.floats(), st.booleans())
def test_link_of_any_numbers_leaves_a_room(rate: float, rtt_s: float, weak: bool) -> None:
    admission = Admission()
    admission.link(weak=weak, bytes_per_s=rate, rtt_s=rtt_s, now=0.0)
    assert limits.ADMISSION_WEAK_FLOOR <= admission.gate(HOST).room <= limits.ADMISSION_FULL


@given(st.integers(1, 100), st.one_of(st.floats(), st.none()), st.floats(0, 1000))
def test_latency_of_any_number_leaves_a_room(level: int, latency_s: float | None, now: float) -> None:
    admission = Admission()
    for each in range(5):
        admission.latency(HOST, "GET /", level, latency_s, now + each)
    assert admission.gate(HOST).room >= limits.ADMISSION_GRADIENT_FLOOR
    assert not math.isnan(admission.gate(HOST).room)
