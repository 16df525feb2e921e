"""The long connection: HELLO and WELCOME, GOAWAY, CLOSE, the end of the stream, and time."""

import math

import pytest

from stormline.core import limits
from stormline.core.codes import Code
from stormline.core.errors import LocalProtocolError, RemoteProtocolError
from stormline.testing.pair import HELLO, WELCOME, Pair, byte_by_byte, open_pair, random_pieces, said, told, whole
from stormline.wire import events as e
from stormline.wire import frames
from stormline.wire import messages as m
from stormline.wire.connection import Connection, explain
from stormline.wire.states import Role, State


def refused(machine: Connection, data: bytes, now: float = 0.0) -> RemoteProtocolError:
    """Feed bytes that must be refused; the CLOSE put out must carry the error's code."""
    machine.receive_data(data, now)
    with pytest.raises(RemoteProtocolError) as caught:
        list(iter(machine.next_event, None))
    (close,) = said(machine)
    assert isinstance(close, m.Close)
    assert close.code == caught.value.code
    assert machine.state is State.CLOSED
    assert machine.next_timer() is None
    assert told(machine, m.Ping(1)) == []
    return caught.value


# -- HELLO and WELCOME ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("split", [whole, byte_by_byte, random_pieces(1)], ids=["whole", "bytes", "random"])
def test_greeting_calls_in_the_flight_of_the_hello_are_heard_after_the_welcome(split):
    pair = Pair(split=split)
    pair.client.send_hello(HELLO)
    first = pair.client.send_call("rpc", "a.b", body=b"1", more=True)
    pair.client.send_data(first, b"2", end=True)
    given_up = pair.client.send_call("rpc", "a.c")
    pair.client.send_cancel(given_up)
    assert pair.pump() == ([], [e.HelloReceived(HELLO)])
    assert pair.pump() == ([], [])
    pair.server.send_welcome(WELCOME)
    heard = pair.pump()
    assert heard.client == [e.Welcomed(WELCOME)]
    assert heard.server == [
        e.CallReceived(1, "rpc", "a.b", "", (), b"1", True, None),
        e.DataReceived(1, b"2", True),
        e.CallReceived(3, "rpc", "a.c", "", (), b"", False, None),
        e.CallCancelled(3, Code.CALL_CANCELLED),
    ]


def test_server_between_hello_and_welcome_reads_nothing_and_asks_to_pause():
    server = Connection(Role.SERVER, 0.0)
    assert not server.reading_held
    assert told(server, HELLO) == [e.HelloReceived(HELLO)]
    assert not server.reading_held
    server.receive_data(b"GET / HTTP/1.1\r\n", 0.1)  # would break the rules, were it read
    assert server.next_event() is None
    assert server.reading_held
    server.send_welcome(WELCOME)
    assert not server.reading_held
    with pytest.raises(RemoteProtocolError):
        server.next_event()


def test_server_that_refuses_a_hello_never_looks_at_what_came_with_it():
    server = Connection(Role.SERVER, 0.0)
    told(server, HELLO, m.Call(1, "rpc", "orders.create"))
    server.close(Code.TOKEN_EXPIRED, "expired", retry_after_s=1.5)
    assert list(iter(server.next_event, None)) == [e.Closed(Code.TOKEN_EXPIRED, "expired", 1.5)]
    assert said(server) == [m.Close(Code.TOKEN_EXPIRED, "expired", 1500)]


def test_server_frame_larger_than_before_hello_allowed_is_read_after_the_welcome():
    pair = Pair()
    pair.client.send_hello(HELLO)
    pair.client.send_call("rpc", "a.b", body=bytes(limits.CHUNK_BYTES_MAX))
    pair.pump()
    pair.server.send_welcome(WELCOME)
    (call,) = pair.pump().server
    assert len(call.body) == limits.CHUNK_BYTES_MAX


def test_server_hello_larger_than_allowed_is_refused_by_its_length():
    length = limits.FRAME_BEFORE_HELLO_BYTES_MAX + 1
    assert refused(Connection(Role.SERVER, 0.0), length.to_bytes(4, "big")).code is Code.FRAME_TOO_LARGE


def test_client_hello_larger_than_a_server_takes_is_refused_here():
    client = Connection(Role.CLIENT, 0.0)
    with pytest.raises(LocalProtocolError, match="Hello"):
        client.send_hello(m.Hello((1,), "shop", token="t" * limits.FRAME_BEFORE_HELLO_BYTES_MAX))
    assert (client.state, client.data_to_send()) == (State.NEW, b"")


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/report HTTP/1.1\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n",
        bytes(64),
        b"\xff" * 64,
        b"\x00\x00\x00\x01\xc1",
        (2**31).to_bytes(4, "big"),
    ],
    ids=["get", "post", "h2", "tls", "ssh", "proxy", "zeros", "ones", "no-message", "2-gib"],
)
@pytest.mark.parametrize("role", list(Role))
def test_garbage_instead_of_the_first_frame_closes_with_a_stop_code(role: Role, data: bytes):
    machine = Connection(role, 0.0)
    if role is Role.CLIENT:
        machine.send_hello(HELLO)
        said(machine)
    assert refused(machine, data).code in (Code.FRAME_TOO_LARGE, Code.PROTOCOL_ERROR)


@pytest.mark.parametrize("versions", [(), (0,), (2, 3), tuple(range(2, 500)), (2**63,)])
def test_server_hello_without_our_version_is_refused(versions: tuple[int, ...]):
    server = Connection(Role.SERVER, 0.0)
    assert refused(server, frames.encode(m.Hello(versions, "shop"))).code is Code.VERSION_UNSUPPORTED


def test_server_hello_with_our_version_among_later_ones_is_taken():
    assert told(Connection(Role.SERVER, 0.0), m.Hello((3, 2, 1), "shop"))


def test_client_welcome_of_another_version_is_refused():
    client = Connection(Role.CLIENT, 0.0)
    client.send_hello(HELLO)
    said(client)
    assert refused(client, frames.encode(m.Welcome(2, "s", "d"))).code is Code.VERSION_UNSUPPORTED


@pytest.mark.parametrize("span", [math.nan, math.inf, -math.inf, -1.0, 1e300])
@pytest.mark.parametrize("field", ["heartbeat_s", "resume_window_s"])
def test_client_welcome_with_an_impossible_time_span_is_refused(field: str, span: float):
    client = Connection(Role.CLIENT, 0.0)
    client.send_hello(HELLO)
    said(client)
    refused(client, frames.encode(m.Welcome(1, "s", "d", **{field: span})))


# -- deadlines of the greeting --------------------------------------------------------------------------------------
def test_server_hello_that_dribbles_does_not_extend_its_deadline():
    server = Connection(Role.SERVER, 100.0)
    due = 100.0 + limits.HELLO_TIMEOUT_S
    for step, byte in enumerate(frames.encode(HELLO)[:-1]):
        server.receive_data(bytes([byte]), 100.0 + 0.1 * step)
        assert server.next_event() is None
        assert server.next_timer() == due
    server.handle_timer(math.nextafter(due, 0))
    assert server.state is State.NEW
    server.handle_timer(due)
    (closed,) = iter(server.next_event, None)
    assert (closed.code, closed.by_peer) == (Code.HELLO_TIMEOUT, False)
    assert [message.code for message in said(server)] == [Code.HELLO_TIMEOUT]


def test_server_that_cannot_make_up_its_mind_ends_at_the_same_deadline():
    pair = Pair()
    pair.client.send_hello(HELLO)
    pair.pump()
    heard = pair.advance(limits.HELLO_TIMEOUT_S)
    assert [event.code for event in heard.server] == [Code.HELLO_TIMEOUT]


def test_client_without_a_welcome_gives_up_at_its_deadline():
    client = Connection(Role.CLIENT, 7.0)
    assert client.next_timer() is None
    client.send_hello(HELLO)
    assert client.next_timer() == 7.0 + limits.HELLO_TIMEOUT_S
    client.handle_timer(7.0 + limits.HELLO_TIMEOUT_S)
    (closed,) = iter(client.next_event, None)
    assert closed.code == Code.HELLO_TIMEOUT


# -- GOAWAY ---------------------------------------------------------------------------------------------------------
def test_goaway_open_calls_go_on_and_new_ones_are_refused_here():
    pair = open_pair()
    call_id = pair.client.send_call("rpc", "a.b")
    pair.pump()
    pair.server.send_goaway(Code.GOING_AWAY, "update", spread_s=3.0, retry_after_s=60.0)
    assert pair.pump().client == [e.GoingAway(Code.GOING_AWAY, "update", 3.0, 60.0)]
    assert not pair.client.can_call
    with pytest.raises(LocalProtocolError):
        pair.client.send_call("rpc", "a.b")
    pair.server.send_reply(call_id, 0, body=b"done")
    assert pair.pump().client == [e.ReplyReceived(call_id, 0, (), b"done", False)]


def test_goaway_call_that_crossed_it_fails_as_certainly_undelivered():
    pair = open_pair()
    served = pair.client.send_call("rpc", "a.b")
    pair.pump()
    pair.server.send_goaway(Code.GOING_AWAY, "update")
    crossing = pair.client.send_call("rpc", "a.c", more=True)
    pair.client.send_data(crossing, b"rest", end=True)
    heard = pair.pump()
    assert heard.server == []
    assert heard.client == [
        e.GoingAway(Code.GOING_AWAY, "update", 0.0, None),
        e.CallFailed(crossing, Code.GOING_AWAY, "update", None, False),
    ]
    assert pair.client.open_calls() == [served]
    assert not pair.server.is_open(crossing)


def test_goaway_call_answered_already_is_not_called_undelivered():
    client = Connection(Role.CLIENT, 0.0)
    client.send_hello(HELLO)
    told(client, WELCOME)
    call_id = client.send_call("rpc", "a.b")
    _, _, failed = told(client, m.Reply(call_id, 0, more=True), m.GoAway(200, 0))
    assert failed.maybe_delivered


def test_goaway_of_both_sides_at_once_is_no_violation():
    pair = open_pair()
    pair.client.send_goaway(Code.GOING_AWAY)
    pair.server.send_goaway(Code.GOING_AWAY)
    pair.server.send_goaway(Code.GOING_AWAY, "again")
    heard = pair.pump()
    assert [type(event) for event in heard.client] == [e.GoingAway, e.GoingAway]
    assert [type(event) for event in heard.server] == [e.GoingAway]


def test_goaway_pushes_still_go_out_and_are_acknowledged():
    pair = open_pair()
    pair.server.send_goaway(Code.GOING_AWAY)
    pair.server.send_push("p1", b"x")
    pair.pump()
    pair.client.send_ack(1)
    assert pair.pump().server == [e.PushAcked((1,))]


def test_goaway_with_a_spread_below_zero_means_none():
    pair = open_pair()
    (event,) = told(pair.client, m.GoAway(200, 0, "x" * 1000, -5, -5))
    assert (event.spread_s, event.retry_after_s, len(event.reason)) == (0.0, 0.0, limits.REASON_CHARS_MAX)


# -- CLOSE and the end of the stream --------------------------------------------------------------------------------
def test_close_tells_both_sides_and_a_second_one_does_nothing():
    pair = open_pair()
    call_id = pair.client.send_call("rpc", "a.b")
    pair.pump()
    pair.server.close(Code.REPLACED, "another device", retry_after_s=0.25)
    pair.server.close(Code.OK)
    heard = pair.pump()
    assert heard.server == [e.Closed(Code.REPLACED, "another device", 0.25)]
    assert heard.client == [e.Closed(Code.REPLACED, "another device", 0.25, by_peer=True)]
    assert pair.client.open_calls() == [call_id]  # for the owner to fail
    assert pair.client.call_offset(call_id) > 0
    pair.client.send_cancel(call_id)
    assert pair.client.open_calls() == []
    assert pair.client.data_to_send() == b""


@pytest.mark.parametrize("seconds", [math.inf, 1e300])
def test_close_with_an_endless_pause_says_the_longest(seconds: float):
    pair = open_pair()
    pair.server.close(Code.OVERLOADED, retry_after_s=seconds)
    (closed,) = pair.pump().client
    assert closed.retry_after_s == limits.WIRE_SECONDS_MAX


def test_close_reason_longer_than_allowed_is_cut_on_both_ways():
    pair = open_pair()
    pair.server.close(Code.OK, "x" * 10_000)
    (closed,) = pair.pump().client
    assert closed.reason == "x" * limits.REASON_CHARS_MAX
    (closed,) = told(open_pair().client, m.Close(0, "y" * 10_000))
    assert closed.reason == "y" * limits.REASON_CHARS_MAX


def test_close_before_anything_was_said_is_understood_by_the_other_side():
    pair = Pair()
    pair.server.close(Code.OVERLOADED)
    assert [event.code for event in pair.pump().client] == [Code.OVERLOADED]
    pair = Pair()
    pair.client.close()
    assert [event.by_peer for event in pair.pump().server] == [True]


def test_eof_after_whole_frames_gives_their_events_first():
    pair = open_pair()
    pair.client.send_call("rpc", "a.b")
    pair.cut(Role.SERVER)
    call, closed = pair.pump().server
    assert isinstance(call, e.CallReceived)
    assert (closed.lost, closed.by_peer) == (True, False)
    assert pair.server.data_to_send() == b""


def test_eof_inside_a_frame_is_a_loss_and_no_violation():
    pair = open_pair()
    pair.server.receive_data(frames.encode(m.Ping(1))[:-1], 0.0)
    pair.server.receive_eof(0.0)
    (closed,) = iter(pair.server.next_event, None)
    assert closed.lost


def test_eof_between_hello_and_welcome_is_told_after_the_welcome():
    server = Connection(Role.SERVER, 0.0)
    told(server, HELLO, m.Call(1, "rpc", "a.b"))
    server.receive_eof(0.0)
    assert server.next_event() is None
    server.send_welcome(WELCOME)
    assert [type(event) for event in iter(server.next_event, None)] == [e.CallReceived, e.Closed]


def test_eof_after_a_close_adds_nothing():
    pair = open_pair()
    pair.client.close()
    pair.cut(Role.SERVER)
    assert len(pair.pump().server) == 1


def test_violation_after_good_messages_is_raised_after_their_events():
    pair = open_pair()
    pair.server.receive_data(frames.encode(m.Ping(1)) + frames.encode(m.Call(1, "rpc", "a.b")) + bytes(4), 0.0)
    assert isinstance(pair.server.next_event(), e.CallReceived)
    with pytest.raises(RemoteProtocolError):
        pair.server.next_event()
    assert [type(message) for message in said(pair.server)] == [m.Pong, m.Close]
    assert pair.server.next_event() is None


def test_explain_each_way_to_end_says_who_did_it():
    assert explain(e.Closed(Code.REPLACED, "twin", by_peer=True)) == "the peer closed it (replaced: twin)"
    assert explain(e.Closed(Code.OK, "", lost=True)) == "it was lost (ok)"
    assert explain(e.Closed(999, "")) == "we closed it (code-999)"


# -- ping, heartbeat, idle ------------------------------------------------------------------------------------------
def test_ping_answered_gives_the_round_trip_time():
    pair = open_pair()
    pair.client.ping(0.0)
    pair.client.ping(0.0)  # one at a time
    assert len(said(pair.client)) == 1
    assert told(pair.server, m.Ping(1)) == []
    assert said(pair.server) == [m.Pong(1)]
    assert told(pair.client, m.Pong(1), now=0.25) == [e.PongReceived(0.25)]


def test_ping_answer_with_another_number_is_ignored():
    pair = open_pair()
    pair.client.ping(0.0)
    assert told(pair.client, m.Pong(77), now=0.25) == []
    assert told(pair.client, m.Pong(1), now=0.5) == [e.PongReceived(0.5)]
    assert told(pair.client, m.Pong(1), now=0.75) == []


def test_ping_before_the_session_stands_is_refused_and_leaves_no_trace():
    client = Connection(Role.CLIENT, 0.0)
    with pytest.raises(LocalProtocolError):
        client.ping(0.0)
    client.send_hello(HELLO)
    told(client, WELCOME)
    said(client)
    client.ping(0.0)
    assert said(client) == [m.Ping(1)]


def test_heartbeat_on_a_quiet_link_pings_after_each_silence():
    pair = open_pair(heartbeat_s=60.0)
    heard = pair.advance(200.0)
    assert [type(event) for event in heard.client] == [e.PongReceived] * 3
    assert pair.client.next_timer() == 240.0


def test_heartbeat_frames_from_the_peer_put_it_off():
    pair = open_pair(heartbeat_s=60.0)
    pair.advance(50.0)
    pair.server.send_push("p1", b"")
    pair.pump()
    assert pair.client.next_timer() == 110.0


def test_heartbeat_without_an_answer_ends_the_link():
    pair = open_pair(heartbeat_s=60.0)
    pair.cut(Role.SERVER)
    client = pair.client
    client.handle_timer(60.0)
    assert client.next_timer() == 60.0 + limits.HEARTBEAT_ANSWER_S
    client.handle_timer(60.0 + limits.HEARTBEAT_ANSWER_S)
    (closed,) = iter(client.next_event, None)
    assert (closed.code, closed.by_peer) == (Code.HEARTBEAT_TIMEOUT, False)


def test_heartbeat_answer_queued_behind_a_slow_body_does_not_end_the_link():
    pair = open_pair()
    call_id = pair.client.send_call("api", "GET", target="https://a.test/")
    pair.client.ping(0.0)
    told(pair.client, m.Reply(call_id, 200, more=True), now=5.0)
    told(pair.client, m.Data(call_id, bytes(16_000)), now=11.0)
    pair.client.handle_timer(11.0)
    assert pair.client.state is State.OPEN
    assert pair.client.next_timer() == 11.0 + limits.HEARTBEAT_ANSWER_S
    assert told(pair.client, m.Pong(1), now=18.0) == [e.PongReceived(18.0)]


def test_idle_client_that_says_nothing_is_given_up():
    pair = open_pair(idle_s=150.0)
    pair.advance(149.0)
    assert pair.server.state is State.OPEN
    heard = pair.advance(1.0)
    assert [event.code for event in heard.server] == [Code.HEARTBEAT_TIMEOUT]
    assert [event.code for event in heard.client] == [Code.HEARTBEAT_TIMEOUT]


def test_idle_bytes_that_never_make_a_frame_break_no_silence():
    pair = open_pair(idle_s=150.0)
    for second, byte in enumerate(frames.encode(m.Ping(2**60))[:-1]):
        assert told(pair.server, now=float(second * 10)) == []
        pair.server.receive_data(bytes([byte]), float(second * 10))
        assert pair.server.next_event() is None
    assert pair.server.next_timer() == 150.0


def test_idle_client_with_the_ordinary_heartbeat_stays():
    pair = open_pair(heartbeat_s=limits.HEARTBEAT_S, idle_s=limits.SESSION_IDLE_S)
    pair.advance(3600.0)
    assert pair.server.state is State.OPEN
