"""The ladder: which step comes after which failure."""

import pytest

from stormline.core import limits
from stormline.core.values import Address
from stormline.policy.means import Means, Outcome, Step, plan
from stormline.policy.presets import KEY

ORIGINS = tuple(Step(Means.IP_DIRECT, (Address(f"192.0.2.{n}", 443),)) for n in range(1, 4))
CERTAIN = Outcome(maybe_delivered=False)
UNKNOWN = Outcome(maybe_delivered=True)


def climb(ladder, *outcomes):
    """Give the steps a ladder gives, the first and one after each outcome."""
    return [ladder.next(), *(ladder.next(outcome) for outcome in outcomes)]


def ladder(method="GET", *, has_key=False, **change):
    fields = {"long": True, "origins": (), "disabled": (), "method": method, "has_key": has_key}
    return plan(**(fields | change))


class TestPlan:
    def test_order_is_long_then_numbered_then_dns(self):
        steps = climb(ladder(origins=ORIGINS[:2]), CERTAIN, CERTAIN, CERTAIN)
        assert [(step.means, step.addresses) for step in steps] == [
            (Means.LONG, ()),
            (Means.IP_DIRECT, ORIGINS[0].addresses),
            (Means.IP_DIRECT, ORIGINS[1].addresses),
            (Means.DIRECT, ()),
        ]

    def test_long_that_just_failed_comes_last(self):
        steps = climb(ladder(long_last=True, origins=ORIGINS[:1]), CERTAIN, CERTAIN)
        assert [step.means for step in steps] == [Means.IP_DIRECT, Means.DIRECT, Means.LONG]

    def test_dns_stays_where_dispatch_names_many_addresses(self):
        steps = climb(ladder(origins=ORIGINS * 5), *[CERTAIN] * 10)
        assert [step.means for step in steps if step][-1] is Means.DIRECT

    @pytest.mark.parametrize(
        ("disabled", "left"),
        [
            ((), ["long", "ip-direct", "direct"]),
            (("long",), ["ip-direct", "direct"]),
            (("ip-direct",), ["long", "direct"]),
            (("direct",), ["long", "ip-direct"]),
            (("long", "ip-direct", "direct"), []),
            (("unheard-of",), ["long", "ip-direct", "direct"]),
        ],
    )
    def test_means_that_are_switched_off_are_left_out(self, disabled, left):
        steps = climb(ladder(origins=ORIGINS[:1], disabled=disabled), *[CERTAIN] * 5)
        assert list(dict.fromkeys(step.means for step in steps if step)) == left

    def test_without_dispatch_there_is_dns_as_often_as_tries_allow(self):
        steps = climb(ladder(long=False), *[CERTAIN] * 6)
        assert [step.means for step in steps if step] == [Means.DIRECT] * limits.ATTEMPTS_MAX

    def test_last_means_to_the_origin_is_tried_again_but_not_the_long_connection(self):
        steps = climb(ladder(disabled=("direct", "ip-direct")), *[CERTAIN] * 4)
        assert [step.means for step in steps if step] == [Means.LONG]

    def test_name_that_does_not_exist_is_not_asked_for_again(self):
        assert climb(ladder(long=False), Outcome(maybe_delivered=False, final=True)) == [Step(Means.DIRECT), None]


class TestRefusals:
    """A peer that says it has not processed a request (GOAWAY, REFUSED_STREAM) costs no try: the means works."""

    REFUSED = Outcome(maybe_delivered=False, untouched=True)

    @pytest.mark.parametrize("method", ["GET", "POST"])
    def test_refused_request_goes_elsewhere_by_the_same_means_without_costing_a_try(self, method):
        made = ladder(method, long=False)
        steps = climb(made, *[self.REFUSED] * 12)
        assert steps == [Step(Means.DIRECT)] * 13
        assert made.tries == 1

    def test_refusals_are_bounded(self):
        steps = climb(ladder(long=False), *[self.REFUSED] * (limits.REFUSALS_MAX + limits.ATTEMPTS_MAX + 1))
        assert len([step for step in steps if step]) == limits.REFUSALS_MAX + limits.ATTEMPTS_MAX


class TestBeside:
    def test_read_may_have_another_step_beside_it_as_often_as_tries_allow(self):
        made = ladder(long=False)
        made.next()
        assert [made.beside() for _ in range(4)] == [Step(Means.DIRECT)] * 3 + [None]

    def test_write_has_nothing_beside_it(self):
        made = ladder("POST")
        made.next()
        assert made.beside() is None
        assert made.next(CERTAIN).means is Means.DIRECT

    def test_step_beside_counts_as_a_try(self):
        made = ladder(long=False)
        made.next()
        made.beside()
        assert len([step for step in [made.next(CERTAIN) for _ in range(4)] if step]) == 2

    def test_caller_that_wants_no_repetition_gets_none(self):
        made = ladder(long=False, resends=False)
        made.next()
        assert made.beside() is None
        assert made.next(UNKNOWN) is None

    def test_caller_that_wants_no_repetition_still_gets_what_was_never_sent_sent(self):
        assert climb(ladder(long=False, resends=False), CERTAIN)[1] == Step(Means.DIRECT)


class TestTwoPhases:
    @pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "CALL"])
    def test_write_that_may_have_arrived_gets_no_other_step(self, method):
        assert climb(ladder(method, origins=ORIGINS), UNKNOWN, CERTAIN, CERTAIN)[1:] == [None, None, None]

    def test_write_that_did_not_arrive_goes_on(self):
        assert climb(ladder("POST"), CERTAIN)[1].means is Means.DIRECT

    def test_write_with_a_key_goes_on(self):
        assert climb(ladder("POST", has_key=True), UNKNOWN)[1].means is Means.DIRECT

    def test_read_goes_on(self):
        assert climb(ladder("GET"), UNKNOWN)[1].means is Means.DIRECT

    @pytest.mark.parametrize("method", ["GET", "POST"])
    def test_body_that_was_read_from_cannot_be_sent_again(self, method):
        spent = Outcome(maybe_delivered=False, body_spent=True)
        assert climb(ladder(method, has_key=True), spent, CERTAIN)[1:] == [None, None]


class TestStale:
    STALE = Outcome(maybe_delivered=False, reused=True)

    def test_stale_connection_gives_the_same_step_once_more_and_fresh(self):
        first, second, third = climb(ladder(), self.STALE, self.STALE)
        assert (first.means, first.fresh) == (Means.LONG, False)
        assert (second.means, second.fresh) == (Means.LONG, True)
        assert third.means is Means.DIRECT

    def test_stale_connection_does_not_excuse_a_write_that_may_have_arrived(self):
        assert climb(ladder("POST"), Outcome(maybe_delivered=True, reused=True))[1] is None

    def test_each_step_has_its_own_stale_connection(self):
        steps = climb(ladder(), *[self.STALE] * 3)
        assert [(step.means, step.fresh) for step in steps if step] == [
            (Means.LONG, False), (Means.LONG, True), (Means.DIRECT, False), (Means.DIRECT, True),
        ]  # fmt: skip


class TestRelayBeside:
    RELAYS = tuple(Step(Means.RELAY, (Address(f"198.51.100.{n}", 80),)) for n in (1, 2))

    def test_a_relay_may_be_taken_ahead_of_its_turn_and_then_not_again(self):
        made = ladder(origins=ORIGINS[:1], relays=self.RELAYS)
        assert made.next().means is Means.LONG
        assert made.ends_with(Means.RELAY)
        assert made.beside(Means.RELAY) == self.RELAYS[0]
        assert not made.ends_with(Means.RELAY)
        assert made.beside(Means.RELAY) is None
        assert [step.means for step in (made.next(CERTAIN), made.next(CERTAIN))] == [Means.IP_DIRECT, Means.DIRECT]
        assert made.tries == limits.ATTEMPTS_MAX
        assert made.next(CERTAIN) is None

    def test_the_step_that_failed_is_still_the_one_that_is_judged(self):
        made = ladder(long=False, origins=ORIGINS[:1], relays=self.RELAYS)
        first = made.next()
        made.beside(Means.RELAY)
        again = made.next(Outcome(maybe_delivered=False, reused=True))
        assert (again.means, again.fresh, again.addresses) == (first.means, True, first.addresses)

    def test_a_write_has_none_beside(self):
        made = ladder("POST", relays=self.RELAYS)
        made.next()
        assert made.beside(Means.RELAY) is None
        assert made.ends_with(Means.RELAY)

    def test_what_may_not_be_taken_is_left_out_before_a_relay(self):
        made = ladder("POST", long=False, origins=ORIGINS[:1], relays=self.RELAYS, preset=KEY)
        made.next()
        assert made.skip_to(Means.RELAY) == self.RELAYS[0]
        assert [made.next(CERTAIN), made.next(CERTAIN)] == [self.RELAYS[1], None]
        assert ladder().skip_to(Means.RELAY) is None
