"""The states of a long connection as a table: which message may be sent and received where, and what follows.

`docs/reference/protocol.md` is made from this table; no rule of order lives anywhere else.
"""

import enum
from collections.abc import Mapping
from typing import Final, TypeAlias

from stormline.wire import messages as m


class Role(enum.StrEnum):
    """Which side of the connection."""

    CLIENT = "client"
    SERVER = "server"

    @property
    def peer(self) -> "Role":
        """The other side."""
        return Role.SERVER if self is Role.CLIENT else Role.CLIENT


class State(enum.StrEnum):
    """Where a connection stands, the same for both sides."""

    NEW = "new"
    """Nothing said yet."""
    GREETING = "greeting"
    """HELLO is said, WELCOME is not. The client may already send calls; the server reads them after WELCOME."""
    OPEN = "open"
    DRAINING = "draining"
    """One side said GOAWAY: no new calls, open ones go on."""
    CLOSED = "closed"


Table: TypeAlias = Mapping[tuple[Role, State], Mapping[type[m.Message], State]]

COUNTED: Final[frozenset[type[m.Message]]] = frozenset(
    {m.Call, m.Data, m.Reply, m.Fail, m.Cancel, m.Credit, m.Push, m.Ack, m.Notice}
)
"""Messages that belong to the session: counted, kept until confirmed, and sent again where it goes on elsewhere. The
others belong to one connection."""

_CALL_TRAFFIC: Final = (m.Data, m.Reply, m.Fail, m.Cancel, m.Credit, m.Ping, m.Pong, m.Received)


def _stay(state: State, *kinds: type[m.Message]) -> dict[type[m.Message], State]:
    return dict.fromkeys(kinds, state)


SENDS: Final[Table] = {
    (Role.CLIENT, State.NEW): {m.Hello: State.GREETING, m.Close: State.CLOSED},
    (Role.CLIENT, State.GREETING): {
        **_stay(State.GREETING, m.Call, m.Data, m.Cancel),
        m.Close: State.CLOSED,
    },
    (Role.CLIENT, State.OPEN): {
        **_stay(State.OPEN, m.Call, m.Ack, *_CALL_TRAFFIC),
        m.GoAway: State.DRAINING,
        m.Close: State.CLOSED,
    },
    (Role.CLIENT, State.DRAINING): {
        **_stay(State.DRAINING, m.Ack, m.GoAway, *_CALL_TRAFFIC),
        m.Close: State.CLOSED,
    },
    (Role.SERVER, State.NEW): {m.Close: State.CLOSED},
    (Role.SERVER, State.GREETING): {m.Welcome: State.OPEN, m.Close: State.CLOSED},
    (Role.SERVER, State.OPEN): {
        **_stay(State.OPEN, m.Call, m.Push, m.Notice, *_CALL_TRAFFIC),
        m.GoAway: State.DRAINING,
        m.Close: State.CLOSED,
    },
    (Role.SERVER, State.DRAINING): {
        **_stay(State.DRAINING, m.Push, m.Notice, m.GoAway, *_CALL_TRAFFIC),
        m.Close: State.CLOSED,
    },
}
"""What each side may send, by its own role and state, and the state after it. What one side may send the other may
receive in the matching state; a CALL or PUSH that crosses a GOAWAY on its way is received in DRAINING as well."""

CROSSING: Final[frozenset[type[m.Message]]] = frozenset({m.Call})
"""Messages that may still arrive in DRAINING although they may no longer be sent: they crossed the GOAWAY."""


def _receives() -> dict[tuple[Role, State], Mapping[type[m.Message], State]]:
    table: dict[tuple[Role, State], Mapping[type[m.Message], State]] = {}
    for role in Role:
        for state in State:
            crossing = _stay(state, *CROSSING) if state is State.DRAINING else {}
            table[role, state] = {**SENDS.get((role.peer, state), {}), **crossing}
    return table


_RECEIVES: Final = _receives()  # made once: it is looked at with each message
_NOTHING: Final[Mapping[type[m.Message], State]] = {}


def after_send(role: Role, state: State, kind: type[m.Message]) -> State | None:
    """Give the state after sending, None where it is not allowed."""
    return SENDS.get((role, state), _NOTHING).get(kind)


def after_receive(role: Role, state: State, kind: type[m.Message]) -> State | None:
    """Give the state after receiving, None where it is not allowed."""
    return _RECEIVES[role, state].get(kind)
