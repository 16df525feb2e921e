"""How long a network keeps a silent connection, from what became of some of different silence."""

import itertools

import pytest

from stormline.core import limits_diagnosis as limits
from stormline.policy.natlife import Fate, Lifetime, Tried, decided, in_words, judge, ladder_s

ANSWERED, LOST, RESET, CLOSED, UNKNOWN = Fate
GONE = "lost without a word"


def tried(*those: tuple[float, Fate]) -> list[Tried]:
    return [Tried(*each) for each in those]


def test_ladder_goes_up_by_one_factor_to_the_limit() -> None:
    ladder = ladder_s(300.0)
    assert len(ladder) == limits.DIAGNOSIS_NAT_CONNECTIONS
    assert (ladder[0], ladder[-1]) == (pytest.approx(300.0 / limits.DIAGNOSIS_NAT_SPAN), 300.0)
    factors = [after / before for before, after in itertools.pairwise(ladder)]
    assert factors == pytest.approx([factors[0]] * len(factors))
    assert factors[0] < 1.5


def test_shortest_silence_is_longer_than_what_may_still_come_of_an_answer() -> None:
    assert ladder_s(limits.DIAGNOSIS_NAT_LIMIT_S_MIN)[0] > limits.DIAGNOSIS_NAT_REST_S


CASES = {
    "nothing": ((), Lifetime(), ""),
    "nothing that says anything": (((0.0, UNKNOWN),), Lifetime(), ""),
    "a limit": (
        ((20, ANSWERED), (40, ANSWERED), (60, LOST), (90, LOST)), Lifetime(40, 60, sure=True),
        f"a connection answers after 40 s of silence and is {GONE} after 60 s; a packet every 38 s keeps it"),
    "one loss alone": (
        ((20, ANSWERED), (60, LOST)), Lifetime(20, 60),
        (f"a connection answers after 20 s of silence and is {GONE} after 60 s, as far as one can tell;"
        " a packet every 19 s keeps it")),
    "a limit that is told": (
        ((2, ANSWERED), (3, RESET), (5, LOST)), Lifetime(2, 3, reset=True, sure=True),
        "a connection answers after 2.0 s of silence and is reset after 3.0 s; a packet every 1.9 s keeps it"),
    "shorter than all that was tried": (
        ((20, LOST), (30, LOST)), Lifetime(0, 20, sure=True), f"a connection is {GONE} after 20 s"),
    "longer than all that was tried": (
        ((20, ANSWERED), (300, ANSWERED)), Lifetime(300),
        "a connection answers after 300 s of silence; longer than that"),
    "the network died in the middle": (
        ((20, ANSWERED), (300, UNKNOWN)), Lifetime(20),
        "a connection answers after 20 s of silence; more was not found out"),
    "the server ends it": (
        ((20, ANSWERED), (60, CLOSED), (61, CLOSED)), Lifetime(61, None, 60),
        "the server ends a silent connection after 60 s; the network keeps it for longer"),
    "the server ends what the network has not forgotten": (
        ((60, CLOSED), (90, LOST), (95, LOST)), Lifetime(60, 90, 60, sure=True),
        f"a connection answers after 60 s of silence and is {GONE} after 90 s; a packet every 57 s keeps it"),
    "a loss by chance": (
        ((20, LOST), (40, ANSWERED), (300, ANSWERED)), Lifetime(300, by_chance=1),
        "a connection answers after 300 s of silence; longer than that"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_connections_give_a_lifetime_and_words_for_it_in_any_order(case: str) -> None:
    those, lifetime, words = CASES[case]
    assert judge(tried(*those)) == judge(tried(*reversed(those))) == lifetime
    assert in_words(lifetime, 300.0) == words


def test_waiting_ends_with_the_second_loss_above_all_that_was_survived() -> None:
    assert not decided(tried((20, ANSWERED), (40, LOST)))
    assert decided(tried((20, ANSWERED), (40, LOST), (60, RESET)))
    assert not decided(tried((40, LOST), (60, LOST), (90, ANSWERED)))
    assert not decided(tried((40, UNKNOWN), (60, UNKNOWN)))
