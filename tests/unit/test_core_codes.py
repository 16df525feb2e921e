"""Codes: the hundred says what to do, also for codes of later versions."""

import pytest

from stormline.core import codes
from stormline.core.codes import Action, Code


@pytest.mark.parametrize(
    ("code", "action"),
    [
        (Code.OK, Action.NONE),
        (Code.OVERLOADED, Action.RETRY),
        (Code.GOING_AWAY, Action.MOVE),
        (Code.TOKEN_EXPIRED, Action.RENEW),
        (Code.TOKEN_INVALID, Action.STOP),
        (Code.REPLACED, Action.STOP),
        (Code.CALL_DEADLINE, Action.CALL),
        (199, Action.RETRY),
        (599, Action.CALL),
        (600, Action.STOP),
        (99, Action.STOP),
        (1, Action.STOP),
        (-1, Action.STOP),
        (10**9, Action.STOP),
    ],
)
def test_action_follows_the_hundred_and_stops_outside_every_range(code: int, action: Action) -> None:
    assert codes.action(code) is action


def test_every_code_has_a_name_and_an_action_of_its_range() -> None:
    for code in Code:
        assert codes.name(code) == code.name.lower().replace("_", "-")
        assert (codes.action(code) is Action.NONE) is (code is Code.OK)
        assert code.name.startswith("CALL_") is (codes.action(code) is Action.CALL)


def test_unknown_code_still_has_a_name() -> None:
    assert codes.name(177) == "code-177"
