"""Which addresses are bad, and what dispatch is told of them."""

import pytest

from stormline.apm.judging import APM, AddressCounts, LogLine, Order, bad, orders, suspects
from stormline.core import limits_platform as limits

A, B, C, D = (f"192.0.2.{number}:443" for number in range(1, 5))
NONE: frozenset[str] = frozenset()
NOW = 1_800_000_000.0


def counts(address: str, tries: int = 100, failures: int = 0, failing: int | None = None) -> AddressCounts:
    return AddressCounts(address, tries, failures, 10, min(failures, 9) if failing is None else failing)


class TestSuspects:
    @pytest.mark.parametrize(
        ("tries", "failures", "devices", "failing", "suspected"),
        [
            (10, 10, 3, 3, True),
            (20, 10, 6, 3, True),
            (21, 10, 3, 3, False),
            (9, 9, 3, 3, False),
            (1000, 1000, 2, 2, False),
            (1000, 900, 7, 3, False),
            (0, 0, 0, 0, False),
        ],
    )
    def test_several_devices_most_of_them_several_failures_and_most_of_the_tries(
        self, tries: int, failures: int, devices: int, failing: int, suspected: bool
    ) -> None:
        each = AddressCounts(A, tries, failures, devices, failing)
        assert suspects([each]) == ([each] if suspected else [])


class TestBad:
    def test_address_that_fails_while_the_others_of_its_host_serve_is_bad(self) -> None:
        ill = counts(A, failures=90)
        assert bad([ill, counts(B), counts(C)], [frozenset({A, B})], NONE) == [ill]

    def test_address_of_no_host_is_nobodys_business(self) -> None:
        assert bad([counts(A, failures=90), counts(B)], [frozenset({B, C})], NONE) == []

    @pytest.mark.parametrize("others", [[], [counts(B, failures=90)], [counts(B, failures=21)]])
    def test_where_the_others_fail_too_or_are_not_tried_no_address_is_to_blame(
        self, others: list[AddressCounts]
    ) -> None:
        assert bad([counts(A, failures=90), *others], [frozenset({A, B})], NONE) == []

    def test_half_of_a_host_stays_in_service(self) -> None:
        some = [counts(A, failures=90), counts(B, failures=90), counts(C), counts(D)]
        assert [each.address for each in bad(some, [frozenset({A, B, C, D})], NONE)] == [A, B]
        assert bad(some, [frozenset({A, B, C})], NONE) == []
        assert bad(some, [frozenset({A, B, C, D})], frozenset({D})) == []

    def test_what_is_drained_already_is_left(self) -> None:
        assert bad([counts(A, failures=90), counts(B)], [frozenset({A, B})], frozenset({A})) == []

    def test_each_host_that_has_the_address_must_bear_its_loss(self) -> None:
        some = [counts(A, failures=90), counts(B)]
        assert bad(some, [frozenset({A, B}), frozenset({A})], NONE) == []
        assert bad(some, [frozenset({A}), frozenset({A, B})], NONE) == []


class TestOrders:
    def test_bad_address_is_drained_and_the_reason_said(self) -> None:
        [order] = orders([counts(A, 40, 38, 12)], [], [], NOW)
        assert order == Order(A, "38 of 40 attempts of the last 60 s failed, for 12 devices, while others served")
        assert len(order.why) <= limits.RULES_WHY_CHARS_MAX

    def test_our_drain_ends_after_a_while_that_doubles_with_each_time(self) -> None:
        def log(age_s: float, times: int) -> list[LogLine]:
            lines = [LogLine(int(NOW - age_s), APM, "drain", A)]
            for _ in range(times - 1):
                lines += [LogLine(1, APM, "undrain", A), LogLine(0, APM, "drain", A)]
            return lines

        hold_s = limits.BAD_HOLD_S
        assert orders([], [A], log(hold_s - 1, 1), NOW) == []
        assert orders([], [A], log(hold_s, 1), NOW) == [Order(A, f"tried again after {hold_s:.0f} s", end=True)]
        assert orders([], [A], log(3 * hold_s, 3), NOW) == []
        assert orders([], [A], log(4 * hold_s, 3), NOW)[0].end
        assert orders([], [A], log(limits.BAD_HOLD_S_MAX, 99), NOW)[0].end

    def test_no_more_are_out_of_use_at_once_than_the_bound(self) -> None:
        many = [counts(f"192.0.2.9:{port}", 40, 40) for port in range(1, 100)]
        given = orders(many, [], [], NOW)
        assert len(given) == limits.BAD_DRAINS_MAX
        log = [LogLine(int(NOW), APM, "drain", order.address) for order in given]
        assert orders(many, [order.address for order in given], log, NOW) == []
        by_hand = [LogLine(int(NOW), "ann", "drain", order.address) for order in given]
        assert len(orders(many, [order.address for order in given], by_hand, NOW)) == limits.BAD_DRAINS_MAX

    def test_drains_of_people_are_theirs(self) -> None:
        assert orders([], [A, "192.0.2.2"], [LogLine(0, "ann", "drain", A)], NOW) == []
        mine_first = [LogLine(5, "ann", "drain", A), LogLine(4, "ann", "undrain", A), LogLine(3, APM, "drain", A)]
        assert orders([], [A], mine_first, NOW) == []

    def test_what_a_person_took_back_is_left_alone_for_a_while(self) -> None:
        taken_back = [LogLine(int(NOW) - 60, "ann", "undrain", A), LogLine(int(NOW) - 90, APM, "drain", A)]
        assert orders([counts(A, 40, 40)], [], taken_back, NOW) == []
        assert len(orders([counts(A, 40, 40)], [], taken_back, NOW + limits.BAD_RESPECT_S)) == 1
        ours = [LogLine(int(NOW) - 1, APM, "undrain", A), LogLine(int(NOW) - 400, APM, "drain", A)]
        assert len(orders([counts(A, 40, 40)], [], ours, NOW)) == 1
