"""The table of states: nothing that it forbids is sent or received, whatever the message."""

import pytest

from stormline.core.codes import Code
from stormline.core.errors import LocalProtocolError, RemoteProtocolError
from stormline.testing.pair import HELLO, WELCOME, said, told
from stormline.wire import messages as m
from stormline.wire import states
from stormline.wire.connection import Connection
from stormline.wire.states import Role, State

SAMPLES: dict[type[m.Message], m.Message] = {
    m.Hello: HELLO,
    m.Welcome: WELCOME,
    m.Close: m.Close(0),
    m.Call: m.Call(0, "rpc", "a.b"),  # the id is put in by `sample`
    m.Data: m.Data(0, b"x"),
    m.Reply: m.Reply(0, 0),
    m.Fail: m.Fail(0, 500),
    m.Cancel: m.Cancel(0),
    m.Credit: m.Credit(0, 1),
    m.Push: m.Push(1, "p1"),
    m.Ack: m.Ack(()),
    m.Ping: m.Ping(1),
    m.Pong: m.Pong(1),
    m.GoAway: m.GoAway(200, 99),
    m.Notice: m.Notice(7, ("api.example",)),
    m.Received: m.Received(0),
}
BY_CALLEE = (m.Reply, m.Fail, m.Credit)
"""Messages about a call that the one who was called sends; DATA and CANCEL are sent here by the caller."""


def connection(role: Role, state: State) -> Connection:
    """Bring a connection into a state, with one call of each side open where the state allows it."""
    machine = Connection(role, 0.0)
    first = {Role.CLIENT: 1, Role.SERVER: 2}[role.peer]
    if role is Role.CLIENT:
        if state in (State.GREETING, State.OPEN, State.DRAINING):
            machine.send_hello(HELLO)
            machine.send_call("rpc", "a.b", more=True)
        if state in (State.OPEN, State.DRAINING):
            told(machine, WELCOME)
    else:
        if state in (State.GREETING, State.OPEN, State.DRAINING):
            told(machine, HELLO)
        if state in (State.OPEN, State.DRAINING):
            machine.send_welcome(WELCOME)
            machine.send_call("rpc", "a.b", more=True)
    if state in (State.OPEN, State.DRAINING):
        told(machine, m.Call(first, "rpc", "a.b", more=True))
    if state is State.DRAINING:
        machine.send_goaway(Code.GOING_AWAY)
    if state is State.CLOSED:
        machine.close()
    assert machine.state is state
    machine.capabilities += (m.RESUME,)  # its message is understood; counting has tests of its own
    said(machine)
    told(machine)
    return machine


def sample(role: Role, kind: type[m.Message]) -> m.Message:
    """Give a message as the peer of `role` would send it, right but for the state."""
    peers = 1 if role is Role.SERVER else 2
    ours = 3 - peers
    message = SAMPLES[kind]
    if isinstance(message, m.Call):
        return m.Call(peers + 2, message.gate, message.method)
    if hasattr(message, "id") and not isinstance(message, m.Push):
        values = [getattr(message, name) for name in message.__struct_fields__[1:]]
        return kind(ours if kind in BY_CALLEE else peers, *values)
    return message


def act(machine: Connection, kind: type[m.Message]) -> None:
    """Send one message of a kind by the machine's own method."""
    ours = 1 if machine.role is Role.CLIENT else 2
    peers = 3 - ours
    actions = {
        m.Hello: lambda: machine.send_hello(HELLO),
        m.Welcome: lambda: machine.send_welcome(WELCOME),
        m.Close: lambda: machine._send(m.Close(0)),  # `close` itself may be called in every state
        m.Call: lambda: machine.send_call("rpc", "a.b"),
        m.Data: lambda: machine.send_data(ours, b"x"),
        m.Reply: lambda: machine.send_reply(peers, 0),
        m.Fail: lambda: machine.send_fail(peers, 500),
        m.Cancel: lambda: machine._send(m.Cancel(ours)),  # `send_cancel` too
        m.Credit: lambda: machine._send(m.Credit(peers, 1)),
        m.Push: lambda: machine.send_push("p1", b""),
        m.Ack: lambda: machine._send(m.Ack((1,))),
        m.Ping: lambda: machine.ping(0.0),
        m.Pong: lambda: machine._send(m.Pong(1)),
        m.GoAway: lambda: machine.send_goaway(Code.GOING_AWAY),
        m.Notice: lambda: machine.send_notice(7, ("api.example",)),
        m.Received: lambda: machine._send(m.Received(0)),
    }
    actions[kind]()


EVERY = [(role, state, kind) for role in Role for state in State for kind in m.ALL]


def _named(case: tuple[Role, State, type[m.Message]]) -> str:
    return "-".join([case[0], case[1], case[2].__name__])


@pytest.mark.parametrize("case", EVERY, ids=_named)
def test_receive_message_of_each_kind_in_each_state_follows_the_table(case: tuple[Role, State, type[m.Message]]):
    role, state, kind = case
    machine = connection(role, state)
    after = states.after_receive(role, state, kind)
    if state is State.CLOSED or (role is Role.SERVER and state is State.GREETING):  # nothing is read there
        assert told(machine, sample(role, kind)) == []
        assert machine.state is state
    elif after is None:
        with pytest.raises(RemoteProtocolError) as caught:
            told(machine, sample(role, kind))
        assert caught.value.code is Code.PROTOCOL_ERROR
        assert machine.state is State.CLOSED
        assert [type(message) for message in said(machine)] == [m.Close]
    else:
        told(machine, sample(role, kind))
        assert machine.state is after


@pytest.mark.parametrize("case", EVERY, ids=_named)
def test_send_message_of_each_kind_in_each_state_follows_the_table(case: tuple[Role, State, type[m.Message]]):
    role, state, kind = case
    machine = connection(role, state)
    after = states.after_send(role, state, kind)
    if after is None:
        with pytest.raises(LocalProtocolError):
            act(machine, kind)
        assert machine.state is state
        assert said(machine) == []
    else:
        act(machine, kind)
        assert machine.state is after
        assert [type(message) for message in said(machine)] == [kind]


def test_table_whatever_one_side_sends_in_a_state_the_other_may_receive_there():
    for (role, state), kinds in states.SENDS.items():
        for kind, after in kinds.items():
            assert states.after_receive(role.peer, state, kind) is after


def test_table_call_that_crosses_a_goaway_is_received():
    for role in Role:
        assert states.after_receive(role, State.DRAINING, m.Call) is State.DRAINING
        assert states.after_send(role, State.DRAINING, m.Call) is None


def test_table_closed_allows_nothing():
    for role in Role:
        assert not any(states.after_send(role, State.CLOSED, kind) for kind in m.ALL)
        assert not any(states.after_receive(role, State.CLOSED, kind) for kind in m.ALL)
