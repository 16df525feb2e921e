"""What is counted, kept, confirmed and sent again, and what a caller may believe of a call meanwhile."""

import pytest

from stormline.core import limits
from stormline.core.codes import Code
from stormline.core.errors import LocalProtocolError, RemoteProtocolError
from stormline.testing.pair import HELLO_RESUME, WELCOME_RESUME, Pair, said, told
from stormline.wire import events as e
from stormline.wire import handover, kept
from stormline.wire import messages as m
from stormline.wire.connection import Connection
from stormline.wire.states import Role, State


def open_pair(**times) -> Pair:
    pair = Pair(**times)
    pair.open(HELLO_RESUME, WELCOME_RESUME)
    return pair


def test_session_without_the_capability_keeps_nothing_and_cannot_be_detached():
    pair = Pair()
    pair.client.send_hello(HELLO_RESUME)
    pair.client.send_call("rpc", "a.b")
    pair.pump()
    pair.server.send_welcome(m.Welcome(1, "s1", "d1"))
    pair.pump()
    for machine in (pair.client, pair.server):
        assert (machine.resumable, machine.kept_bytes, machine.received) == (False, 0, 0)
        with pytest.raises(LocalProtocolError):
            machine.detach()
    with pytest.raises(RemoteProtocolError, match="capability"):
        told(pair.server, m.Received(0))


def test_idle_session_makes_nothing():
    pair = open_pair()
    pair.client.ping(0.0)
    pair.pump()
    assert pair.client._kept is pair.server._kept is None


def test_calls_of_the_first_flight_are_frames_of_the_session():
    pair = Pair()
    pair.client.send_hello(HELLO_RESUME)
    pair.client.send_call("rpc", "a.b")
    pair.pump()
    pair.server.send_welcome(WELCOME_RESUME)
    pair.pump()
    assert pair.server.received == 1


def test_confirmation_goes_with_each_ping_and_pong_and_frees_what_is_kept():
    pair = open_pair()
    call = pair.client.send_call("rpc", "a.b")
    pair.pump()
    pair.server.send_reply(call, 0)
    pair.pump()
    assert pair.client.kept_bytes > 0
    assert pair.server.kept_bytes > 0
    pair.client.ping(0.0)
    assert said(pair.client) == [m.Ping(1), m.Received(1)]
    assert told(pair.server, m.Ping(1), m.Received(1)) == []
    assert said(pair.server) == [m.Pong(1), m.Received(1)]
    told(pair.client, m.Received(1))
    assert pair.client.kept_bytes == pair.server.kept_bytes == 0


@pytest.mark.parametrize("size", [0, limits.CHUNK_BYTES_MAX])
def test_confirmation_comes_after_so_many_frames_or_bytes(size):
    pair = open_pair()
    call = pair.client.send_call("rpc", "a.b", more=True)
    for _ in range(limits.RECEIVED_EVERY_FRAMES if size == 0 else 2):
        pair.client.send_data(call, bytes(size))
    pair.deliver(Role.SERVER)
    assert [type(message) for message in said(pair.server)] == [m.Received]


def test_confirmation_of_more_than_was_sent_is_a_violation():
    pair = open_pair()
    with pytest.raises(RemoteProtocolError, match="more than were sent"):
        told(pair.server, m.Received(1))


def test_call_counts_as_delivered_exactly_where_it_may_have_been():
    pair = open_pair()
    left = pair.client.send_call("rpc", "a.b")
    boundary = pair.client.queued_bytes
    stayed = pair.client.send_call("rpc", "a.b")
    pair.client.detach(sent_bytes=boundary)
    new = pair.client.send_call("rpc", "a.b")
    assert pair.client.call_offset(left) < 0  # below zero: of no bytes it is certain that they did not leave
    assert min(pair.client.call_offset(stayed), pair.client.call_offset(new)) > 2**62
    pair.server.detach()
    assert pair.join()
    hello = pair.client.call_offset(left)
    assert 0 < hello < pair.client.call_offset(stayed) < pair.client.call_offset(new) < pair.client.queued_bytes
    heard = pair.pump()
    assert [event.call_id for event in heard.server] == [left, stayed, new]


@pytest.mark.parametrize("side", Role)
def test_call_given_up_before_the_peer_has_it_is_never_said_and_what_follows_moves_up(side):
    pair = open_pair()
    ours, theirs = pair.side(side), pair.side(side.peer)
    has = ours.send_call("rpc", "a.b")
    pair.pump()
    lost = ours.send_call("rpc", "a.b", more=True)
    ours.send_data(lost, b"piece")
    waits = ours.send_call("rpc", "a.b", body=b"1")
    ours.data_to_send()
    pair.client.detach()
    pair.server.detach()
    for given_up in (ours.send_call("rpc", "a.b"), has, lost):
        ours.send_cancel(given_up)
    assert pair.join()
    after = ours.send_call("rpc", "a.b")
    heard = pair.pump()
    events = heard.client if side is Role.SERVER else heard.server
    assert [(type(event), event.call_id) for event in events] == [
        (e.CallReceived, waits), (e.CallCancelled, has), (e.CallReceived, after),
    ]  # fmt: skip
    assert theirs.received == ours._kept.sent == 4
    assert pair.join()
    assert pair.pump() == ([], [])


def test_frame_of_a_later_version_is_sent_again_as_it_was():
    pair = open_pair()
    unknown = b"\x00\x00\x00\x02\x91\x63"
    pair.server.detach()
    pair.server._ledger().add(unknown)
    pair.client.detach()
    client = Connection(Role.CLIENT, 0.0)
    pair.server.resume(client, 0, 0.0)
    assert pair.server.data_to_send() == unknown


def test_call_that_the_peer_has_is_delivered_wherever_the_session_goes():
    pair = open_pair()
    call = pair.client.send_call("rpc", "a.b")
    pair.pump()
    pair.lose(0, 0)
    assert pair.join()
    assert pair.client.call_offset(call) < 0


def test_silence_after_a_ping_ends_the_transport_and_not_the_session():
    pair = open_pair(heartbeat_s=10.0)
    pair.client.ping(0.0)
    pair.client.data_to_send()
    pair.client.handle_timer(limits.HEARTBEAT_ANSWER_S)
    closed = pair.client.next_event()
    assert (closed.code, closed.lost) == (Code.HEARTBEAT_TIMEOUT, True)
    assert pair.client.next_event() is None
    pair.client.detach()
    assert pair.client.next_timer() is None
    assert pair.client.state is State.OPEN


def test_end_of_the_stream_leaves_the_session():
    pair = open_pair()
    pair.client.receive_eof(0.0)
    assert pair.client.next_event().lost
    assert pair.client.next_event() is None
    assert pair.client.resumable


@pytest.mark.parametrize(("code", "state"), [(Code.TOKEN_EXPIRED, State.OPEN), (Code.REPLACED, State.CLOSED)])
def test_close_that_asks_for_a_new_token_leaves_the_session_and_any_other_ends_it(code, state):
    pair = open_pair()
    (closed,) = told(pair.client, m.Close(code))
    assert (closed.code, closed.by_peer) == (code, True)
    assert pair.client.state is state


def test_goaway_heard_ends_with_its_connection():
    """Calls it will not serve count as failed, so their frames must never be sent again."""
    pair = open_pair()
    pair.server.send_goaway(Code.GOING_AWAY)
    call = pair.client.send_call("rpc", "a.b")
    (_, failed) = pair.deliver(Role.CLIENT)
    assert (failed.call_id, failed.maybe_delivered) == (call, False)
    assert not pair.client.resumable
    assert pair.server.resumable  # its word may have been lost


def test_detached_session_says_nothing_that_belongs_to_a_connection():
    pair = open_pair()
    pair.server.detach()
    pair.server.ping(0.0)
    with pytest.raises(LocalProtocolError, match="there is none"):
        pair.server.send_goaway(Code.GOING_AWAY)
    pair.server.send_push("p1", b"")
    assert pair.server.data_to_send() == b""
    pair.server.receive_data(b"\xff" * 100, 0.0)
    assert pair.server.next_event() is None
    assert pair.server.state is State.OPEN


def test_room_that_all_sessions_share_is_given_back():
    room = kept.Room(100)
    first, second = kept.Kept(room), kept.Kept(room)
    for number in range(8):
        first.add(bytes(10))
        assert first.sent == number + 1
    second.add(bytes(30))  # no room: its own goes, the other's stays
    assert (second.after(0), second.after(1), room.size) == (None, [], 80)
    assert first.confirmed(3)
    assert room.size == 50
    assert not first.confirmed(9)
    assert first.confirmed(1)  # an older word
    assert first.after(2) is None
    assert len(first.after(5) or []) == 3
    first.release()
    assert room.size == 0


class TestHandover:
    def test_machine_goes_on_where_it_was(self):
        pair = open_pair()
        call = pair.client.send_call("rpc", "a.b")
        pair.server.send_push("p1", b"1")
        pair.pump()
        pair.server.send_reply(call, 0, body=b"lost")
        pair.server.send_push("p2", b"2")
        pair.lose(0, 0)
        room = kept.Room(10**6)
        taken = handover.snapshot(pair.server)
        pair.server = handover.restore(taken, 5.0, idle_s=None, room=room)
        assert room.size == sum(map(len, taken.frames))
        assert pair.join()
        assert [type(event) for event in pair.deliver(Role.CLIENT)] == [e.ReplyReceived, e.PushReceived]
        pair.client.send_ack(2)
        pair.client.send_ack(1)
        assert pair.pump().server == [e.PushAcked((2,)), e.PushAcked((1,))]
        assert pair.client.send_call("rpc", "a.b") == call + 2
        pair.server.send_call("rpc", "a.b")
        assert len(pair.pump().server) == 1

    def test_machine_in_use_is_not_given_away(self):
        pair = open_pair()
        with pytest.raises(LocalProtocolError):
            handover.snapshot(pair.server)
        pair.client.send_call("rpc", "a.b")
        pair.pump()
        pair.lose(0, 0)
        with pytest.raises(LocalProtocolError):
            handover.snapshot(pair.server)
        with pytest.raises(LocalProtocolError):
            handover.snapshot(Connection(Role.SERVER, 0.0))
