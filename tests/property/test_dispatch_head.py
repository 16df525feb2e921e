"""The record of the rules under any order of changes."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.dispatch import head as heads
from stormline.dispatch import rollout
from stormline.dispatch.head import Body, Drained, Head, Note
from stormline.dispatch.rollout import Counts, Looks

NOTE = Note(who="ann", why="because", at=1_700_000_000)


def _body(version: int, digest: str) -> Body:
    return Body(heads.body_id(version, digest), 1, 10, digest)


class Rules(RuleBasedStateMachine):
    """Operators, a guard and settings change one record; beside it a model of what clients may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.head: Head = heads.first(_body(1, "c0"), 1, "lineage", NOTE)
        self.content = {1: "c0"}
        self.count = 0

    def _move(self, head: Head) -> None:
        assert head.version >= self.head.version
        assert head.log[0].number >= self.head.log[0].number
        self.head = head
        for each in head.versions:
            held = self.content.setdefault(each.version, each.body.digest)
            assert held == each.body.digest, "a version never says two things"

    def _fresh(self) -> Body:
        self.count += 1
        return _body(self.head.version + 1, f"c{self.count}")

    @rule()
    def publish(self) -> None:
        body = self._fresh()
        try:
            self._move(heads.publish(self.head, body, NOTE))
        except errors.RequestRefused as error:
            assert (error.code, self.head.rollout is None) == ("rollout-open", False)
        else:
            assert self.head.current == self.head.version

    @rule(behind=st.integers(1, 3))
    def publish_late(self, behind: int) -> None:
        """A body that was written for a version long taken moves nothing."""
        try:
            heads.publish(self.head, _body(self.head.version + 1 - behind, "late"), NOTE)
        except errors.Conflict:
            pass
        except errors.RequestRefused as error:
            assert error.code == "rollout-open"
        else:
            raise AssertionError("a late body was published")

    @rule(steps=st.lists(st.sampled_from([1.0, 5.0, 20.0, 50.0, 100.0]), min_size=1, max_size=4, unique=True))
    def start(self, steps: list[float]) -> None:
        before = self.head
        try:
            self._move(heads.start(self.head, self._fresh(), tuple(sorted(steps)), NOTE))
        except errors.RequestRefused as error:
            assert error.code == "rollout-open"
        else:
            assert self.head.version == before.version + 1
            assert (self.head.rollout is None) == (min(steps) == 100)
            assert self.head.current == (before.current if self.head.rollout else self.head.version)

    @rule()
    @precondition(lambda self: self.head.rollout is not None)
    def step(self) -> None:
        opened = self.head.rollout
        assert opened is not None
        self._move(heads.step(self.head, None, NOTE))
        if self.head.rollout is None:
            assert self.head.current == opened.version
        else:
            assert self.head.rollout.percent > opened.percent

    @rule()
    @precondition(lambda self: self.head.rollout is not None)
    def halt(self) -> None:
        before = self.head
        self._move(heads.halt(self.head, NOTE))
        assert self.head.version == before.version + 1
        assert self.head.current == self.head.version
        assert self.head.body(self.head.current).digest == before.body(before.current).digest

    @rule(bad=st.integers(0, 1000), calls=st.integers(0, 3000))
    @precondition(lambda self: self.head.rollout is not None)
    def outcomes(self, bad: int, calls: int) -> None:
        opened = self.head.rollout
        assert opened is not None
        before = self.head
        new, old = Counts(calls, calls - min(bad, calls)), Counts(5000, 4990)
        head, judgement = heads.outcomes(self.head, opened.version, new, old, NOTE)
        self._move(head)
        assert judgement.worse == (head.rollout is None)
        if judgement.worse:
            assert head.body(head.current).digest == before.body(before.current).digest

    @rule(to=st.one_of(st.none(), st.integers(1, 40)))
    def rollback(self, to: int | None) -> None:
        before = self.head
        try:
            self._move(heads.rollback(self.head, to, NOTE))
        except errors.RequestRefused as error:
            assert error.code in ("rollout-open", "not-found", "unchanged")
        else:
            assert self.head.version == self.head.current == before.version + 1
            assert self.content[self.head.current] != before.body(before.current).digest
            if to is not None:
                assert self.content[self.head.current] == self.content[to]

    @rule(port=st.integers(0, 3), end=st.booleans())
    def drain(self, port: int, end: bool) -> None:
        one = Drained("192.0.2.1", port)
        was = one in self.head.drains
        try:
            self._move((heads.undrain if end else heads.drain)(self.head, one, NOTE))
        except errors.RequestRefused as error:
            assert error.code in ("unchanged", "not-found")
            assert was != end
        else:
            assert (one in self.head.drains) != end

    @invariant()
    def it_is_whole_and_bounded(self) -> None:
        head = self.head
        assert heads.decode(heads.encode(head)) == head
        assert len(head.versions) <= limits.RULES_VERSIONS_MAX
        assert len(head.log) <= limits.RULES_LOG_MAX
        assert head.current <= head.version
        assert heads.needed(head).items() <= head.bodies().items()
        if head.rollout is not None:
            assert head.current < head.rollout.version == head.version


TestRules = Rules.TestCase
TestRules.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.text(min_size=1, max_size=40), st.integers(1, 2**53 - 1), st.floats(0.0, 100.0), st.floats(0.0, 100.0))
def test_device_that_takes_part_stays_in_while_the_share_grows(
    device: str, version: int, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    assert 0.0 <= rollout.place(device, version) < 100.0
    assert not rollout.takes_part(device, version, low) or rollout.takes_part(device, version, high)


_counts = st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)).map(lambda two: Counts(max(two), min(two)))


@given(_counts, _counts)
def test_tail_is_a_probability_and_one_side_at_most_is_worse(new: Counts, old: Counts) -> None:
    one, other = rollout.tail(new, old), rollout.tail(old, new)
    assert 0.0 <= one <= 1.0
    assert max(one, other) == 1.0


@given(_counts, _counts, st.integers(0, 50), st.integers(0, 10**6))
def test_judge_never_goes_back_in_its_looks(new: Counts, old: Counts, done: int, next_calls: int) -> None:
    looks = Looks(done, next_calls)
    judgement = rollout.judge(new, old, looks)
    assert judgement.looks.done in (done, done + 1)
    assert judgement.looks.next_calls >= next_calls or judgement.p_value is None
    assert not (judgement.worse and new.successes * old.calls >= old.successes * new.calls)
    if judgement.p_value is not None:
        again = rollout.judge(new, old, judgement.looks)
        assert again.p_value is None


@given(st.binary(max_size=300))
def test_any_bytes_are_a_record_or_one_error(data: bytes) -> None:
    try:
        heads.decode(data)
    except errors.ConfigError as error:
        assert str(error).startswith("rules in the engine")
