"""Codes that travel on the wire. The hundred a code lies in says what its receiver should do.

| range   | action          | meaning                                                              |
|---------|-----------------|----------------------------------------------------------------------|
| 0       | NONE            | all is well                                                          |
| 100-199 | RETRY           | temporary: the same thing may be tried again here, after the pause   |
| 200-299 | MOVE            | connect elsewhere (or again): this node or unit is not the place now |
| 300-399 | RENEW           | get a fresh token or plan, then try again                            |
| 400-499 | STOP            | asking again will not help; a person or a new version must act       |
| 500-599 | CALL            | only this call failed; the connection is well                        |

Names are for people; programs act on `action(code)`, so an unknown code is still understood.
"""

import enum


class Action(enum.StrEnum):
    """What the receiver of a code does."""

    NONE = "none"
    RETRY = "retry"
    MOVE = "move"
    RENEW = "renew"
    STOP = "stop"
    CALL = "call"


class Code(enum.IntEnum):
    """Every code this version sends."""

    OK = 0

    OVERLOADED = 100
    HELLO_TIMEOUT = 101
    HEARTBEAT_TIMEOUT = 102
    INTERNAL = 103

    GOING_AWAY = 200
    WRONG_UNIT = 201

    TOKEN_MISSING = 300
    TOKEN_EXPIRED = 301
    TOKEN_NOT_YET_VALID = 302
    TOKEN_KEY_UNKNOWN = 303
    TOKEN_REVOKED = 304

    TOKEN_INVALID = 400
    VERSION_UNSUPPORTED = 401
    PROTOCOL_ERROR = 402
    FRAME_TOO_LARGE = 403
    APP_UNKNOWN = 404
    REPLACED = 405
    FLOW_CONTROL = 406
    REVOKED = 407

    CALL_NOT_FOUND = 500
    CALL_UNAVAILABLE = 501
    CALL_DEADLINE = 502
    CALL_CANCELLED = 503
    CALL_REFUSED = 504
    CALL_FAILED = 505
    CALL_TOO_LARGE = 506
    CALL_BAD_REQUEST = 507
    CALL_UPSTREAM = 508
    CALL_TOO_MANY = 509


_ACTIONS = {0: Action.NONE, 1: Action.RETRY, 2: Action.MOVE, 3: Action.RENEW, 4: Action.STOP, 5: Action.CALL}


def action(code: int) -> Action:
    """Say what a receiver does on `code`, known by name here or not; outside every range it stops."""
    if code == 0:
        return Action.NONE
    return _ACTIONS.get(code // 100, Action.STOP) if code >= 100 else Action.STOP


def name(code: int) -> str:
    """Give the code's name in lower case, or `code-N` where this version knows none."""
    try:
        return Code(code).name.lower().replace("_", "-")
    except ValueError:
        return f"code-{code}"
