"""The order of addresses: what worked first, what failed behind, bans with parole, and never an empty list."""

import math

import pytest

from stormline.core import limits, limits_memory
from stormline.policy.addresses import AddressBook, AddressOutcome, Candidate, Verdict

NET, HOST = "home", "a.test"
ONE, TWO, THREE = (Candidate(f"192.0.2.{number}", 443, "h2") for number in (1, 2, 3))
SIX = Candidate("2001:db8::1", 443, "h2")


def tell(book, candidate, verdict, now, *, network=NET, host=HOST, **more):
    book.observe(AddressOutcome(network, host, candidate, verdict, **more), now)


def order(book, candidates, now, *, network=NET, **more):
    return [ranked.candidate for ranked in book.plan(network, HOST, candidates, now, **more)]


def fail(book, candidate, now, times=1, *, other=None, gap_s=10.0):
    """Let `candidate` fail some times; `other` works half a second after each. Give the moment of the last failure."""
    for number in range(times):
        at = now + number * gap_s
        tell(book, candidate, Verdict.FAILED, at)
        if other is not None:
            tell(book, other, Verdict.WORKED, at + 0.5)
    return now + (times - 1) * gap_s


class TestOrder:
    def test_given_order_stands_where_nothing_is_known(self):
        assert order(AddressBook(), [TWO, ONE, THREE], 0.0) == [TWO, ONE, THREE]

    def test_repeated_candidate_counts_once(self):
        assert order(AddressBook(), [ONE, TWO, ONE], 0.0) == [ONE, TWO]

    def test_what_works_goes_first_and_what_failed_last(self):
        book = AddressBook()
        tell(book, ONE, Verdict.FAILED, 0.0)
        tell(book, THREE, Verdict.WORKED, 0.0)
        assert order(book, [ONE, TWO, THREE], 1.0) == [THREE, TWO, ONE]

    def test_quicker_one_goes_first_small_differences_do_not_count(self):
        book = AddressBook()
        for candidate, seconds in ((ONE, 0.4), (TWO, 0.031), (THREE, 0.030)):
            tell(book, candidate, Verdict.WORKED, 0.0, connect_s=seconds)
        assert order(book, [ONE, TWO, THREE], 1.0) == [TWO, THREE, ONE]

    def test_one_success_clears_a_failure(self):
        book = AddressBook()
        tell(book, ONE, Verdict.FAILED, 0.0)
        tell(book, ONE, Verdict.WORKED, 2.0)
        assert order(book, [ONE, TWO], 3.0) == [ONE, TWO]

    def test_outrun_address_is_not_charged(self):
        book = AddressBook()
        for now in range(20):
            tell(book, ONE, Verdict.OUTRUN, now)
            tell(book, TWO, Verdict.WORKED, now)
        assert set(order(book, [ONE, TWO], 20.0)) == {ONE, TWO}
        assert not any(ranked.banned for ranked in book.plan(NET, HOST, [ONE, TWO], 20.0))

    def test_retry_leaves_the_failed_address(self):
        book = AddressBook()
        tell(book, ONE, Verdict.WORKED, 0.0)
        assert order(book, [ONE, TWO], 1.0, left={ONE}) == [TWO, ONE]
        assert order(book, [ONE], 1.0, left={ONE}) == [ONE]

    def test_retry_prefers_a_banned_address_to_the_one_it_has_left(self):
        book = AddressBook()
        last = fail(book, ONE, 0.0, 3, other=THREE)
        assert order(book, [ONE, TWO], last + 1.0, left={TWO}) == [ONE, TWO]

    def test_networks_and_hosts_and_carriers_are_apart(self):
        book = AddressBook()
        fail(book, ONE, 0.0, 5, other=TWO)
        assert order(book, [ONE, TWO], 50.0, network="other") == [ONE, TWO]
        assert [each.candidate for each in book.plan(NET, "b.test", [ONE], 50.0)] == [ONE]
        h3 = ONE._replace(carrier="h3")
        assert order(book, [ONE, h3], 45.0) == [h3]

    def test_record_of_yesterday_says_nothing(self):
        book = AddressBook()
        fail(book, ONE, 0.0, 5, other=TWO)
        assert order(book, [ONE, THREE], limits.ADDRESS_MEMORY_S + 100.0) == [ONE, THREE]

    def test_that_an_address_worked_is_remembered_for_a_week(self):
        book = AddressBook()
        tell(book, TWO, Verdict.WORKED, 0.0)
        assert order(book, [ONE, TWO], limits_memory.MEMORY_LIFE_S - 1.0) == [TWO, ONE]
        assert order(book, [ONE, TWO], limits_memory.MEMORY_LIFE_S) == [ONE, TWO]

    def test_address_that_never_worked_stays_behind_the_unknown(self):
        book = AddressBook()
        tell(book, ONE, Verdict.FAILED, 0.0)
        assert order(book, [ONE, TWO], limits.ADDRESS_BAN_S + 1.0) == [TWO, ONE]
        tell(book, ONE, Verdict.FAILED, limits.ADDRESS_MEMORY_S + 100.0)
        tell(book, TWO, Verdict.WORKED, limits.ADDRESS_MEMORY_S + 100.0)
        assert order(book, [ONE, TWO], limits.ADDRESS_MEMORY_S + 200.0) == [TWO, ONE]


class TestBans:
    def test_third_failure_bans_and_parole_comes_early_and_behind_the_others(self):
        book = AddressBook()
        last = fail(book, ONE, 0.0, 2, other=TWO)
        assert order(book, [ONE, TWO], last + 1.0) == [TWO, ONE]
        last = fail(book, ONE, last + 10.0, other=TWO)
        assert order(book, [ONE, TWO], last + 1.0) == [TWO]
        parole = last + limits.ADDRESS_PAROLE_S
        ranked = book.plan(NET, HOST, [ONE, TWO], parole)
        assert [(each.candidate, each.banned) for each in ranked] == [(TWO, False), (ONE, True)]
        assert order(book, [ONE, TWO], parole + 1.0) == [TWO], "once"

    def test_paroles_come_ever_later(self):
        book = AddressBook()
        start = last = fail(book, ONE, 0.0, 3, other=TWO)
        waits = []
        for tick in range(1, 900):
            now = start + tick
            if ONE in order(book, [ONE, TWO], now):
                waits.append(now - last)
                last = fail(book, ONE, now, other=TWO)
        assert waits[:4] == [30.0, 60.0, 120.0, 240.0]

    def test_parole_that_works_frees_the_address(self):
        book = AddressBook()
        last = fail(book, ONE, 0.0, 3, other=TWO)
        at = last + limits.ADDRESS_PAROLE_S
        order(book, [ONE, TWO], at)
        tell(book, ONE, Verdict.WORKED, at)
        assert set(order(book, [ONE, TWO], at + 1.0)) == {ONE, TWO}

    @pytest.mark.parametrize(("failures", "minutes"), [(3, 6), (4, 12), (5, 18), (6, 24), (7, 30), (8, 30)])
    def test_bans_grow_as_mars_has_them(self, failures, minutes):
        book = AddressBook()
        last = fail(book, ONE, 0.0, failures, other=TWO)
        end = last + minutes * 60.0

        def banned(now):
            ranked = book.plan(NET, HOST, [ONE, TWO], now)
            return not any(each.candidate == ONE and not each.banned for each in ranked)

        assert banned(last + 1.0)
        assert banned(end - 1.0)
        assert not banned(end)

    def test_failures_at_the_same_moment_count_once(self):
        book = AddressBook()
        for number in range(50):
            tell(book, ONE, Verdict.FAILED, number * 0.01)
        tell(book, TWO, Verdict.WORKED, 0.6)
        assert order(book, [ONE, TWO], 1.0) == [TWO, ONE]

    def test_blackout_bans_nothing(self):
        book = AddressBook()
        for now in range(0, 100, 4):
            for candidate in (ONE, TWO):
                tell(book, candidate, Verdict.FAILED, now, tried_s=3.0)
        tell(book, TWO, Verdict.WORKED, 200.0)
        assert set(order(book, [ONE, TWO], 201.0)) == {ONE, TWO}

    def test_failure_counts_where_something_worked_while_it_was_tried(self):
        book = AddressBook()
        for now in (10.0, 30.0, 50.0):
            tell(book, TWO, Verdict.WORKED, now - 2.0)
            tell(book, ONE, Verdict.FAILED, now, tried_s=3.0)
        assert order(book, [ONE, TWO], 51.0) == [TWO]

    def test_last_address_is_never_banned(self):
        book = AddressBook()
        other = Candidate("198.51.100.1", 443)
        fail(book, ONE, 0.0, 8, other=other)
        last = fail(book, TWO, 80.0, 3, other=other)
        order(book, [ONE, THREE], last)  # takes the parole
        ranked = book.plan(NET, HOST, [ONE, TWO], last + 1.0)
        assert [each.candidate for each in ranked] == [TWO, ONE], "soonest free first"
        assert order(book, [ONE], last + 2.0) == [ONE]

    def test_ban_from_dispatch_holds_without_proof_and_is_bounded(self):
        book = AddressBook()
        book.ban(NET, HOST, ONE, 0.0, 3600.0)
        assert order(book, [ONE, TWO], 1.0) == [TWO]
        assert set(order(book, [ONE, TWO], limits.ADDRESS_BAN_S_MAX)) == {ONE, TWO}
        book.ban(NET, HOST, TWO, 0.0, math.nan)
        assert book.dropped == 1


class TestFamilies:
    def test_ipv6_goes_first_and_families_alternate(self):
        other = Candidate("2001:db8::2", 443, "h2")
        assert order(AddressBook(), [ONE, TWO, SIX, other], 0.0) == [SIX, ONE, other, TWO]

    def test_broken_ipv6_is_second_after_two_losses_and_tried_again_after_a_while(self):
        book = AddressBook()
        for now in (0.0, 1.0):
            assert order(book, [SIX, ONE], now)[0] == SIX
            tell(book, SIX, Verdict.OUTRUN, now)
            tell(book, ONE, Verdict.WORKED, now)
        assert order(book, [SIX, ONE], 2.0) == [ONE, SIX]
        again = 1.0 + limits.FAMILY_REPROBE_S
        assert order(book, [SIX, ONE], again - 1.0) == [ONE, SIX]
        assert order(book, [SIX, ONE], again) == [SIX, ONE], "one request finds out"
        assert order(book, [SIX, ONE], again) == [ONE, SIX], "and only one"
        tell(book, SIX, Verdict.WORKED, again + 0.1)
        assert order(book, [SIX, ONE], again + 1.0) == [SIX, ONE], "healed"

    def test_lost_probe_makes_it_wait_again(self):
        book = AddressBook()
        for now in (0.0, 1.0, 1.0 + limits.FAMILY_REPROBE_S):
            order(book, [SIX, ONE], now)
            tell(book, SIX, Verdict.OUTRUN, now)
        assert order(book, [SIX, ONE], 100.0 + limits.FAMILY_REPROBE_S) == [ONE, SIX]

    def test_probe_that_nobody_reports_is_repeated(self):
        book = AddressBook()
        for now in (0.0, 1.0):
            tell(book, SIX, Verdict.OUTRUN, now)
        again = 1.0 + limits.FAMILY_REPROBE_S
        assert order(book, [SIX, ONE], again)[0] == SIX
        assert order(book, [SIX, ONE], again + limits.FAMILY_PROBE_S)[0] == SIX

    def test_preference_is_the_networks_own(self):
        book = AddressBook()
        for now in (0.0, 1.0):
            tell(book, SIX, Verdict.OUTRUN, now)
        assert order(book, [SIX, ONE], 2.0, network="other") == [SIX, ONE]

    def test_failures_in_a_blackout_say_nothing_of_ipv6(self):
        book = AddressBook()
        for now in range(10):
            tell(book, SIX, Verdict.FAILED, now)
            tell(book, ONE, Verdict.FAILED, now)
        tell(book, ONE, Verdict.WORKED, 20.0)
        tell(book, SIX, Verdict.WORKED, 20.0, host="b.test")
        assert order(book, [ONE, SIX], 20.0 + limits.ADDRESS_BAN_S) == [SIX, ONE]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -1.0, 2**63, "x"])
def test_wild_durations_raise_nothing_and_an_address_is_still_chosen(value):
    book = AddressBook()
    tell(book, ONE, Verdict.WORKED, 0.0, connect_s=value)
    tell(book, TWO, Verdict.FAILED, 0.0, tried_s=value)
    assert order(book, [ONE, TWO], 1.0)[0] == ONE
    assert book.dropped == (0 if value is None else 2)


class TestFamiliesOfHosts:
    def lose(self, book, now, *, host=HOST):
        tell(book, ONE, Verdict.WORKED, now, host=host)
        tell(book, SIX, Verdict.OUTRUN, now, host=host)

    def test_host_that_is_worse_over_ipv6_goes_ipv4_first_where_others_do_well(self):
        book = AddressBook()
        for now in range(4):
            self.lose(book, float(now))
            tell(book, SIX, Verdict.WORKED, now + 0.5, host="b.test")
        assert order(book, [SIX, ONE], 5.0) == [ONE, SIX]
        assert [each.candidate for each in book.plan(NET, "b.test", [SIX, ONE], 5.0)] == [SIX, ONE]

    def test_it_is_found_out_when_the_host_does_well_again(self):
        book = AddressBook()
        for now in range(2):
            self.lose(book, float(now))
            tell(book, SIX, Verdict.WORKED, now + 0.5, host="b.test")
        later = 2.0 + limits.FAMILY_REPROBE_S
        assert order(book, [SIX, ONE], later) == [SIX, ONE]
        assert order(book, [SIX, ONE], later + 1.0) == [ONE, SIX]
        tell(book, SIX, Verdict.WORKED, later + 2.0)
        assert order(book, [SIX, ONE], later + 3.0) == [SIX, ONE]

    def test_request_that_failed_over_ipv6_goes_on_over_ipv4(self):
        other = Candidate("2001:db8::2", 443, "h2")
        assert order(AddressBook(), [SIX, other, ONE, TWO], 0.0, left={SIX}) == [ONE, other, TWO, SIX]

    def test_marked_host_goes_ipv4_first(self):
        book = AddressBook()
        tell(book, SIX, Verdict.WORKED, 0.0)
        assert order(book, [SIX, ONE], 1.0, ipv4_first=True) == [ONE, SIX]

    def test_hosts_that_lost_are_bounded(self):
        book = AddressBook()
        for number in range(3 * limits.FAMILY_RECORDS_MAX):
            self.lose(book, 0.0, host=f"h{number}.test")
        assert len(book._families) <= 2 * limits.FAMILY_RECORDS_MAX


class TestClassesOfPath:
    """An API that IPv6 does badly by, at a host that it does well by."""

    BIG = (NET, HOST, "GET /big")

    def lose(self, book, times, now=0.0):
        for number in range(times):
            book.class_failed(*self.BIG)
            book.class_answered(*self.BIG, 4, now + number)

    def test_ipv6_is_second_for_a_class_that_ipv4_answered_twice_in_its_place(self):
        book = AddressBook()
        self.lose(book, 1)
        assert book.class_leads(*self.BIG, 1.0)
        self.lose(book, 1, 1.0)
        assert book.ipv6_is_second(*self.BIG, 2.0)
        assert not book.class_leads(*self.BIG, 2.0)
        assert book.class_leads(NET, HOST, "GET /small", 2.0)
        assert not book.ipv6_is_second(NET, HOST, "GET /small", 2.0)
        assert not book.ipv6_is_second("other", HOST, "GET /big", 2.0)

    def test_class_that_fails_over_both_families_says_nothing_of_ipv6(self):
        book = AddressBook()
        for _ in range(5):
            book.class_failed(*self.BIG)
        assert book.class_leads(*self.BIG, 1.0)

    def test_one_answer_over_ipv6_clears_it_and_one_of_another_class_does_not(self):
        book = AddressBook()
        self.lose(book, 2)
        book.class_answered(NET, HOST, "GET /small", 6, 3.0)
        assert book.ipv6_is_second(*self.BIG, 4.0)
        book.class_answered(*self.BIG, 6, 5.0)
        assert not book.ipv6_is_second(*self.BIG, 6.0)

    def test_ipv6_is_tried_anew_once_when_its_time_as_second_is_over(self):
        book = AddressBook()
        self.lose(book, 2)
        later = 1.0 + limits.FAMILY_REPROBE_S
        assert book.class_leads(*self.BIG, later)
        assert not book.class_leads(*self.BIG, later + 0.1)

    def test_classes_remembered_are_bounded(self):
        book = AddressBook()
        for number in range(5 * limits.FAMILY_CLASSES_MAX):
            book.class_failed(NET, HOST, f"GET /{number}")
        assert len(book._classes) <= 2 * limits.FAMILY_CLASSES_MAX
