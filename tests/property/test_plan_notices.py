"""Changed plans through lossy, repeating, reordering ways: a client that obeys its notices ends with the right plan.

Two centres take over each change at a time of their own and tell it; messages are lost, repeated and overtaken; a
centre starts anew; a session ends and a new one begins, or does not read for a while. The client asks only for what
its notices name, at a centre that may be behind.
"""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stormline.appgw.plans import PlanChange  # noqa: TC001 - the one import block stays plain
from stormline.dispatch.rules import RuleSet
from stormline.dispatch.unit import Announcements
from stormline.gateway.notices import AppChanges
from stormline.wire.plan import Endpoint, HostPlan

APP = "shop"
NAMES = ("a.example", "b.example", "c.example")
CENTRES = st.integers(0, 1)


def plan(number: int) -> HostPlan:
    return HostPlan(endpoints=(Endpoint(host="192.0.2.1", port=1 + number),))


class Story(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        first = RuleSet(version=1, hosts={name: plan(0) for name in NAMES}, apps={APP: frozenset(NAMES)})
        self.history = [first]
        self.at = [0, 0]
        """Which entry of the history each centre answers from."""
        self.centres = [Announcements(first), Announcements(first)]
        self.under_way: list[PlanChange] = []
        self.gateway = AppChanges()
        self.session = 0
        self.reading = True
        # the client
        self.held = {name: (1, each) for name, each in first.hosts.items()}
        self.noticed = 0
        self.owed: set[str] = set()

    # -- the rules ----------------------------------------------------------------------------------------------------
    @rule(names=st.sets(st.sampled_from(NAMES)), number=st.integers(0, 5), switch=st.booleans())
    def change(self, names: set[str], number: int, switch: bool) -> None:
        last = self.history[-1]
        changed = {**last.hosts, **{name: plan(number) for name in names}}
        disabled = ("long",) if switch else last.disabled
        self.history.append(msgspec.structs.replace(last, version=last.version + 1, hosts=changed, disabled=disabled))

    @rule(which=CENTRES)
    def centre_takes_over(self, which: int) -> None:
        if self.at[which] < len(self.history) - 1:
            before = self.history[self.at[which]]
            self.at[which] = len(self.history) - 1
            self.centres[which].changed(before, self.history[-1])

    @rule(which=CENTRES)
    def centre_starts_anew(self, which: int) -> None:
        self.centres[which] = Announcements(self.history[self.at[which]])

    # -- the way ------------------------------------------------------------------------------------------------------
    @rule(which=CENTRES, lost=st.booleans())
    def centre_tells(self, which: int, lost: bool) -> None:
        changes = self.centres[which].take()
        if not lost:
            self.under_way += changes

    @rule(which=CENTRES)
    def centre_fails_to_tell(self, which: int) -> None:
        self.centres[which].give_back(self.centres[which].take())

    @rule(which=CENTRES)
    def centre_beats(self, which: int) -> None:
        self.under_way += self.centres[which].versions()

    @rule(pick=st.integers(0, 9), again=st.booleans())
    def gateway_hears(self, pick: int, again: bool) -> None:
        if self.under_way:
            change = self.under_way.pop(pick % len(self.under_way))
            self.gateway.take(change)
            if again:
                self.under_way.append(change)

    # -- the client ---------------------------------------------------------------------------------------------------
    @rule(which=CENTRES)
    def session_tells(self, which: int) -> None:
        due = self.gateway.due(self.session) if self.reading else None
        if due is not None:
            self.session = due.number
            self.noticed = max(self.noticed, due.version)
            for name, (version, _) in self.held.items():
                if name in due.hosts or (not due.hosts and version < due.version):
                    self.owed.add(name)
            self.ask(which)

    @rule(reading=st.booleans())
    def session_pauses(self, reading: bool) -> None:
        self.reading = reading

    @rule(which=CENTRES)
    def session_begins_anew(self, which: int) -> None:
        self.session = 0
        self.reading = True
        self.session_tells(which)

    def ask(self, which: int) -> None:
        rules = self.history[self.at[which]]
        for name in list(self.owed):
            if rules.version >= self.held[name][0]:  # an older answer is refused
                self.held[name] = (rules.version, rules.hosts[name])
            if rules.version >= self.noticed:  # else the centre is behind: what is owed stays owed
                self.owed.discard(name)

    # -- what always holds --------------------------------------------------------------------------------------------
    @invariant()
    def gateway_never_knows_of_more_than_there_is(self) -> None:
        assert self.gateway.version <= self.history[-1].version

    def teardown(self) -> None:
        for which in (0, 1):
            self.centre_takes_over(which)
            self.centre_beats(which)
        while self.under_way:
            self.gateway_hears(0, False)
        self.reading = True
        self.session_tells(0)
        self.ask(0)
        assert {name: each for name, (_, each) in self.held.items()} == self.history[-1].hosts


def test_answer_from_a_centre_that_is_ahead_does_not_hide_what_was_not_asked_for() -> None:
    story = Story()
    story.change({"a.example"}, 1, False)
    story.centre_takes_over(0)
    story.centre_tells(0, False)
    story.centre_beats(0)
    while story.under_way:
        story.gateway_hears(0, False)
    story.change({"b.example"}, 2, False)
    story.centre_takes_over(1)
    story.centre_tells(1, True)
    story.session_tells(1)
    assert story.held["a.example"][0] == 3
    assert story.held["b.example"][0] == 3, "the first notice of a session means any host"
    story.teardown()


Story.TestCase.settings = settings(max_examples=200, stateful_step_count=50)
TestStory = Story.TestCase
