"""Sessions that outlive their transports: whatever is cut wherever, each message arrives once and in order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from tests.property.test_wire_connection import Talk

from stormline.core import limits
from stormline.testing.pair import HELLO_RESUME, WELCOME_RESUME, Pair, whole
from stormline.wire.states import Role

CUTS = st.integers(0, 400) | st.integers(0, 2**17)


class Cut(Talk):
    """As `Talk`, over transports that die at any byte.

    What holds there holds here: each call ends once, bodies and pushes arrive whole, once and in order, and with
    nothing under way both sides agree.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(split=whole)
        self.pair.open(HELLO_RESUME, WELCOME_RESUME)

    @rule(to_server=CUTS, to_client=CUTS)
    def lose(self, to_server: int, to_client: int) -> None:
        if not self.pair.client.detached:
            self._heard(self.pair.lose(to_server, to_client))

    @rule()
    def lose_welcome(self) -> None:
        if self.pair.client.detached:
            assert self.pair.join(welcome_lost=True)

    @rule()
    def join(self) -> None:
        if self.pair.client.detached:
            assert self.pair.join(), "less is kept than the bounds allow"
            assert not self.pair.server.detached

    @rule(role=st.sampled_from(Role))
    def goaway(self, role: Role) -> None:
        """One who has heard it does not resume; see `test_goaway_heard_ends_with_its_connection`."""

    def _heard(self, heard) -> None:
        for role, events in ((Role.CLIENT, heard.client), (Role.SERVER, heard.server)):
            for event in events:
                self._hear(role, event)

    @invariant()
    def both_sides_agree_when_nothing_is_under_way(self) -> None:
        if not (self.pair.client.detached or self.pair.server.detached):
            super().both_sides_agree_when_nothing_is_under_way()

    @invariant()
    def what_is_kept_is_what_the_other_side_may_lack(self) -> None:
        for role in Role:
            machine, other = self.pair.side(role), self.pair.side(role.peer)
            if machine._kept is not None:
                assert machine._kept.first - 1 <= other.received <= machine._kept.sent
                assert machine._kept.size <= limits.KEPT_BYTES_MAX

    def teardown(self) -> None:
        self.join()
        super().teardown()


Cut.TestCase.settings = settings(stateful_step_count=60)
TestCut = Cut.TestCase


class Small(Cut):
    """With little room: a session goes on whole, or is refused."""

    def __init__(self) -> None:
        self.over = False
        super().__init__()

    @rule()
    def join(self) -> None:
        if self.pair.client.detached and not self.pair.join():
            lacks = [
                machine._kept is not None and machine._kept.first - 1 > other.received
                for machine, other in ((self.pair.client, self.pair.server), (self.pair.server, self.pair.client))
            ]
            assert any(lacks), "refused although all is kept"
            self.over = True
            self.__init__()  # a fresh session, as after a refusal

    @rule()
    def lose_welcome(self) -> None:
        """Only a whole session resumes; `Cut` has it."""

    @invariant()
    def what_is_kept_is_what_the_other_side_may_lack(self) -> None:
        for role in Role:
            ledger = self.pair.side(role)._kept
            assert ledger is None or ledger.size <= limits.KEPT_BYTES_MAX


Small.TestCase.settings = settings(stateful_step_count=60)


class TestSmall(Small.TestCase):
    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch):
        monkeypatch.setattr(limits, "KEPT_BYTES_MAX", 300)
        monkeypatch.setattr(limits, "RECEIVED_EVERY_FRAMES", 3)
