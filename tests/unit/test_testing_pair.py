"""The joined pair of machines: a tool that other tests trust."""

import pytest

from stormline.core import limits
from stormline.core.codes import Code
from stormline.core.errors import RemoteProtocolError
from stormline.testing.pair import HELLO, WELCOME, Pair, byte_by_byte, open_pair, random_pieces, told
from stormline.wire import events as e
from stormline.wire import frames
from stormline.wire import messages as m
from stormline.wire.states import Role, State


def test_pair_open_tells_both_sides_of_the_greeting():
    pair = Pair()
    assert pair.open() == ([e.Welcomed(WELCOME)], [e.HelloReceived(HELLO)])
    assert pair.side(Role.CLIENT).state is pair.side(Role.SERVER).state is State.OPEN


def test_pair_deliver_of_some_bytes_keeps_the_rest_under_way():
    pair = open_pair()
    pair.client.send_call("rpc", "a.b")
    size = pair.under_way(Role.SERVER)
    assert pair.deliver(Role.SERVER, size - 1) == []
    assert pair.under_way(Role.SERVER) == 1
    assert [type(event) for event in pair.deliver(Role.SERVER)] == [e.CallReceived]


def test_pair_pump_after_a_violation_gives_what_was_told_before_it_and_the_close():
    pair = open_pair()
    pair.client.send_call("rpc", "a.b")
    pair.client._out.append(frames.encode(m.Push(1, "a client may not")))
    with pytest.raises(RemoteProtocolError):
        pair.pump()
    heard = pair.pump()
    assert [type(event) for event in heard.server] == [e.CallReceived]
    assert [event.code for event in heard.client] == [Code.PROTOCOL_ERROR]


def test_pair_cut_loses_what_is_sent_after_it_only():
    pair = open_pair()
    pair.client.send_call("rpc", "a.b")
    pair.cut(Role.SERVER)
    pair.client.send_call("rpc", "a.c")
    assert [type(event) for event in pair.pump().server] == [e.CallReceived, e.Closed]


def test_pair_advance_fires_timers_in_their_order_and_stops_at_the_end():
    pair = open_pair(heartbeat_s=10.0, idle_s=15.0)
    heard = pair.advance(35.0)
    assert pair.now == 35.0
    assert [type(event) for event in heard.client] == [e.PongReceived] * 3
    assert heard.server == []


@pytest.mark.parametrize("split", [byte_by_byte, random_pieces(3)], ids=["bytes", "random"])
def test_pair_split_cuts_and_loses_nothing(split):
    data = bytes(range(256)) * 3
    assert b"".join(split(data)) == data
    pair = open_pair(split=split)
    pair.server.send_push("p", bytes(limits.PUSH_BODY_BYTES_MAX))
    assert len(pair.pump().client) == 1


def test_told_brings_messages_that_no_peer_would_send():
    with pytest.raises(RemoteProtocolError):
        told(open_pair().server, WELCOME)
