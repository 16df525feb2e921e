"""The long connection: calls, their bodies and credit, cancelling, and pushes."""

import pytest

from stormline.core import limits
from stormline.core.codes import Code
from stormline.core.errors import LocalProtocolError, RemoteProtocolError
from stormline.testing.pair import Pair, open_pair, said, told
from stormline.wire import events as e
from stormline.wire import messages as m
from stormline.wire.connection import Connection
from stormline.wire.states import Role, State

CHUNK = bytes(limits.CHUNK_BYTES_MAX)


def violates(machine: Connection, *messages: m.Message, code: Code = Code.PROTOCOL_ERROR) -> None:
    """Assert that the last message breaks the rules, with this code, and that the peer is told so."""
    said(machine)
    with pytest.raises(RemoteProtocolError) as caught:
        told(machine, *messages)
    assert caught.value.code is code
    (*_, close) = said(machine)
    assert isinstance(close, m.Close)
    assert close.code == code


def open_call(pair: Pair, *, more: bool = False) -> int:
    call_id = pair.client.send_call("rpc", "a.b", more=more)
    pair.pump()
    return call_id


# -- calls ----------------------------------------------------------------------------------------------------------
def test_call_with_everything_arrives_as_it_was_sent():
    pair = open_pair()
    headers = (("Accept", "a/b"), ("x-bytes", "\xe4\xff"), ("Accept", "c/d"))
    call_id = pair.client.send_call(
        "api", "PUT", target="https://a.test/x?y", headers=headers, body=b"\x00\xff", more=True, deadline_s=2.5
    )
    (event,) = pair.pump().server
    assert event == e.CallReceived(call_id, "api", "PUT", "https://a.test/x?y", headers, b"\x00\xff", True, 2.5)


@pytest.mark.parametrize(("deadline_s", "heard"), [(None, None), (0.0, 0.0), (-3.0, 0.0), (0.0014, 0.001)])
def test_call_deadline_travels_in_milliseconds_and_never_below_zero(deadline_s, heard):
    pair = open_pair()
    pair.client.send_call("rpc", "a.b", deadline_s=deadline_s)
    assert pair.pump().server[0].deadline_s == heard


def test_call_ids_are_odd_for_the_client_and_even_for_the_server():
    pair = open_pair()
    assert [pair.client.send_call("rpc", "a.b") for _ in range(3)] == [1, 3, 5]
    assert [pair.server.send_call("rpc", "a.b") for _ in range(3)] == [2, 4, 6]
    heard = pair.pump()
    assert [event.call_id for event in heard.server] == [1, 3, 5]
    assert [event.call_id for event in heard.client] == [2, 4, 6]


def test_call_of_the_server_is_answered_by_the_client():
    pair = open_pair()
    call_id = pair.server.send_call("session", "refresh")
    pair.pump()
    pair.client.send_reply(call_id, 0, body=b"ok")
    assert pair.pump().server == [e.ReplyReceived(call_id, 0, (), b"ok", False)]


@pytest.mark.parametrize("call_id", [2, 0, -1, 3, 1])
def test_call_id_of_the_wrong_side_or_not_growing_is_a_violation(call_id: int):
    server = open_pair().server
    violates(server, m.Call(3, "rpc", "a.b"), m.Call(call_id, "rpc", "a.b"))


def test_call_id_that_skips_some_is_fine():
    (event,) = told(open_pair().server, m.Call(2**63 + 1, "rpc", "a.b"))
    assert event.call_id == 2**63 + 1


@pytest.mark.parametrize(
    "message",
    [
        m.Data(1, b"x"),
        m.Cancel(1),
        m.Credit(1, 5),
        m.Reply(2, 0),
        m.Fail(2, 500),
        m.Credit(2, 5),
        m.Credit(0, 5),
        m.Data(-1, b""),
        m.Reply(1, 0),  # it is for the one who was called to answer
        m.Cancel(2),  # and for the caller to cancel
    ],
)
def test_message_about_a_call_never_opened_is_a_violation(message: m.Message):
    violates(open_pair().server, message)


@pytest.mark.parametrize("message", [m.Reply(1, 0), m.Fail(1, 500), m.Data(1, b"x"), m.Credit(1, 5)])
def test_late_message_about_our_call_that_ended_is_ignored(message: m.Message):
    pair = open_pair()
    pair.client.send_cancel(open_call(pair))
    assert told(pair.client, message) == []
    assert pair.client.state is State.OPEN


@pytest.mark.parametrize("message", [m.Cancel(1), m.Data(1, b"x", True), m.Credit(1, 5)])
def test_late_message_about_a_call_of_the_peer_that_ended_is_ignored(message: m.Message):
    pair = open_pair()
    pair.server.send_fail(open_call(pair, more=True), Code.CALL_NOT_FOUND)
    assert told(pair.server, message) == []
    assert pair.server.state is State.OPEN


def test_second_reply_while_the_first_goes_on_is_a_violation():
    pair = open_pair()
    call_id = open_call(pair)
    violates(pair.client, m.Reply(call_id, 0, more=True), m.Reply(call_id, 0))


def test_second_reply_is_refused_here():
    pair = open_pair()
    call_id = open_call(pair)
    pair.server.send_reply(call_id, 0, more=True)
    with pytest.raises(LocalProtocolError):
        pair.server.send_reply(call_id, 0)


def test_answer_to_a_call_that_is_not_open_is_refused_here():
    pair = open_pair()
    ours = pair.server.send_call("rpc", "a.b")
    for call_id in (ours, 1, 99):
        with pytest.raises(LocalProtocolError):
            pair.server.send_reply(call_id, 0)
        with pytest.raises(LocalProtocolError):
            pair.server.send_fail(call_id, Code.CALL_FAILED)


def test_fail_ends_the_call_and_carries_all_it_knows():
    pair = open_pair()
    call_id = open_call(pair)
    pair.server.send_fail(call_id, Code.CALL_DEADLINE, "too slow", retry_after_s=2.0, maybe_delivered=True)
    assert pair.pump().client == [e.CallFailed(call_id, Code.CALL_DEADLINE, "too slow", 2.0, True)]
    assert not pair.client.is_open(call_id)
    assert not pair.server.is_open(call_id)


def test_fail_after_half_an_answer_ends_the_call():
    pair = open_pair()
    call_id = open_call(pair)
    pair.server.send_reply(call_id, 200, body=b"half", more=True)
    pair.server.send_fail(call_id, Code.CALL_UPSTREAM)
    assert [type(event) for event in pair.pump().client] == [e.ReplyReceived, e.CallFailed]
    assert pair.client.open_calls() == []


def test_cancel_ends_the_call_on_both_sides_and_the_answer_on_its_way_is_dropped():
    pair = open_pair()
    call_id = open_call(pair)
    pair.server.send_reply(call_id, 0)
    pair.client.send_cancel(call_id, Code.CALL_DEADLINE)
    assert pair.pump() == ([], [])
    second = open_call(pair)
    pair.client.send_cancel(second, Code.CALL_DEADLINE)
    assert pair.pump() == ([], [e.CallCancelled(second, Code.CALL_DEADLINE)])
    assert not pair.server.is_open(second)
    pair.client.send_cancel(second)  # harmless
    assert pair.client.data_to_send() == b""


def test_calls_beyond_the_bound_are_refused_here_until_one_ends():
    pair = open_pair()
    for _ in range(limits.CALLS_IN_FLIGHT_MAX):
        assert pair.client.can_call
        pair.client.send_call("rpc", "a.b")
    assert not pair.client.can_call
    with pytest.raises(LocalProtocolError):
        pair.client.send_call("rpc", "a.b")
    pair.pump()
    pair.server.send_reply(1, 0)
    pair.pump()
    assert pair.client.can_call
    assert pair.server.can_call  # its own calls are counted apart


def test_calls_of_a_peer_beyond_the_bound_are_answered_and_hurt_no_other():
    server = open_pair().server
    ids = range(1, 2 * limits.CALLS_IN_FLIGHT_MAX + 5, 2)
    heard = told(server, *[m.Call(call_id, "rpc", "a.b", more=True) for call_id in ids])
    assert len(heard) == limits.CALLS_IN_FLIGHT_MAX
    assert [(fail.id, fail.code) for fail in said(server)] == [(513, Code.CALL_TOO_MANY), (515, Code.CALL_TOO_MANY)]
    assert told(server, m.Data(513, b"late", True), m.Data(1, b"good", True)) == [e.DataReceived(1, b"good", True)]
    server.send_reply(1, 0)
    assert len(told(server, m.Call(517, "rpc", "a.b"))) == 1


def test_call_offset_is_where_its_first_byte_stands_in_all_that_was_put_out():
    pair = open_pair()
    pair.client.send_data(pair.client.send_call("rpc", "a.b", more=True), b"123")
    before = pair.client.queued_bytes
    pair.client.data_to_send()  # what has been taken counts all the same
    assert pair.client.call_offset(pair.client.send_call("rpc", "a.b")) == before
    assert pair.client.queued_bytes == before + len(pair.client.data_to_send())
    with pytest.raises(LocalProtocolError):
        pair.client.call_offset(99)


# -- bounds ---------------------------------------------------------------------------------------------------------
def test_chunk_larger_than_the_bound_is_refused_on_both_sides():
    pair = open_pair()
    call_id = open_call(pair, more=True)
    large = CHUNK + b"x"
    with pytest.raises(LocalProtocolError):
        pair.client.send_call("rpc", "a.b", body=large)
    with pytest.raises(LocalProtocolError):
        pair.client.send_data(call_id, large)
    with pytest.raises(LocalProtocolError):
        pair.server.send_reply(call_id, 0, body=large)
    violates(open_pair().server, m.Call(1, "rpc", "a.b", body=large), code=Code.FRAME_TOO_LARGE)
    violates(pair.server, m.Data(call_id, large), code=Code.FRAME_TOO_LARGE)
    violates(pair.client, m.Reply(call_id, 0, body=large), code=Code.FRAME_TOO_LARGE)


HEADERS_OVER = [
    tuple(("n", "v") for _ in range(limits.CALL_HEADERS_MAX + 1)),
    (("n", "v" * limits.CALL_HEADER_BYTES_MAX),),
]


@pytest.mark.parametrize("headers", HEADERS_OVER, ids=["too-many", "too-long"])
def test_headers_over_the_bound_are_refused_here_and_the_connection_lives(headers: m.Headers):
    pair = open_pair()
    call_id = open_call(pair, more=True)
    for attempt in (
        lambda: pair.client.send_call("rpc", "a.b", headers=headers),
        lambda: pair.client.send_data(call_id, b"", trailers=headers),
        lambda: pair.server.send_reply(call_id, 0, headers=headers),
        lambda: pair.server.send_push("p", b"", headers=headers),
    ):
        with pytest.raises(LocalProtocolError):
            attempt()
    assert pair.pump() == ([], [])


@pytest.mark.parametrize("headers", HEADERS_OVER, ids=["too-many", "too-long"])
def test_headers_over_the_bound_from_the_peer_are_a_violation(headers: m.Headers):
    violates(open_pair().server, m.Call(1, "rpc", "a.b", headers=headers))
    violates(open_pair().client, m.Push(1, "p", headers=headers))
    pair = open_pair()
    call_id = open_call(pair, more=True)
    violates(pair.server, m.Data(call_id, b"", True, headers))
    violates(pair.client, m.Reply(call_id, 0, headers))


def test_headers_of_exactly_the_bound_pass():
    pair = open_pair()
    headers = (("n", "v" * (limits.CALL_HEADER_BYTES_MAX - 1)),)
    pair.client.send_call("rpc", "a.b", headers=headers, body=CHUNK)
    assert pair.pump().server[0].headers == headers


def test_call_too_large_for_one_frame_is_refused_here_and_leaves_no_trace():
    pair = open_pair()
    with pytest.raises(LocalProtocolError):
        pair.client.send_call("api", "GET", target="https://a.test/" + "x" * limits.FRAME_BYTES_MAX)
    assert pair.client.open_calls() == []
    assert pair.client.send_call("rpc", "a.b") == 1


def test_text_that_is_no_unicode_is_refused_here():
    pair = open_pair()
    with pytest.raises(LocalProtocolError):
        pair.client.send_call("rpc", "\ud800")
    assert pair.pump() == ([], [])


# -- bodies and credit ----------------------------------------------------------------------------------------------
def test_body_in_chunks_both_ways_arrives_whole_and_ends_the_call():
    pair = open_pair()
    call_id = open_call(pair, more=True)
    pair.client.send_data(call_id, b"up1")
    pair.client.send_data(call_id, b"up2", end=True, trailers=(("sum", "6"),))
    assert pair.pump().server == [
        e.DataReceived(call_id, b"up1", False),
        e.DataReceived(call_id, b"up2", True, (("sum", "6"),)),
    ]
    pair.server.send_reply(call_id, 200, body=b"d1", more=True)
    pair.server.send_data(call_id, b"d2", end=True)
    pair.pump()
    assert not pair.client.is_open(call_id)
    assert not pair.server.is_open(call_id)


def test_answer_that_ends_before_the_question_ends_the_call_on_both_sides():
    pair = open_pair()
    call_id = open_call(pair, more=True)
    pair.server.send_reply(call_id, 413)
    pair.client.send_data(call_id, b"still sending")  # crosses the answer
    assert not pair.server.is_open(call_id)
    assert pair.pump() == ([e.ReplyReceived(call_id, 413, (), b"", False)], [])
    assert pair.client.credit(call_id) == 0
    with pytest.raises(LocalProtocolError):
        pair.client.send_data(call_id, b"more")


def test_answer_may_begin_before_the_question_has_ended():
    pair = open_pair()
    call_id = open_call(pair, more=True)
    pair.server.send_reply(call_id, 0, more=True)
    pair.client.send_data(call_id, b"up", end=True)
    heard = pair.pump()
    assert heard.server == [e.DataReceived(call_id, b"up", True)]
    pair.server.send_data(call_id, b"down", end=True)
    assert pair.pump().client == [e.DataReceived(call_id, b"down", True)]


def test_body_bytes_where_none_are_expected_are_a_violation():
    pair = open_pair()
    violates(pair.server, m.Call(1, "rpc", "a.b"), m.Data(1, b"x"))
    pair = open_pair()
    violates(pair.server, m.Call(1, "rpc", "a.b", more=True), m.Data(1, b"", True), m.Data(1, b"x"))
    pair = open_pair()
    violates(pair.client, m.Data(open_call(pair), b"before the reply"))


def test_body_bytes_where_none_are_being_sent_are_refused_here():
    pair = open_pair()
    call_id = open_call(pair)
    for side in (pair.client, pair.server):
        with pytest.raises(LocalProtocolError):
            side.send_data(call_id, b"x")


def spend(pair: Pair, call_id: int) -> None:
    while pair.client.credit(call_id):
        pair.client.send_data(call_id, CHUNK)


def test_body_without_credit_is_refused_here():
    pair = open_pair()
    call_id = open_call(pair, more=True)
    assert pair.client.credit(call_id) == limits.CREDIT_BYTES
    spend(pair, call_id)
    with pytest.raises(LocalProtocolError):
        pair.client.send_data(call_id, b"x")
    pair.client.send_data(call_id, b"", end=True)  # the end itself costs nothing


@pytest.mark.parametrize("role", list(Role))
def test_body_without_credit_from_the_peer_is_a_violation(role: Role):
    pair = open_pair()
    chunks = limits.CREDIT_BYTES // limits.CHUNK_BYTES_MAX
    if role is Role.SERVER:
        begin, machine = m.Call(1, "rpc", "a.b", body=b"x", more=True), pair.server
    else:
        open_call(pair)
        begin, machine = m.Reply(1, 0, body=b"x", more=True), pair.client
    violates(machine, begin, *[m.Data(1, CHUNK)] * chunks, code=Code.FLOW_CONTROL)


def test_consume_of_half_a_window_grants_it_again():
    pair = open_pair()
    call_id = open_call(pair, more=True)
    spend(pair, call_id)
    pair.pump()
    half = limits.CREDIT_BYTES // 2
    pair.server.consume(call_id, half - 1)
    assert pair.server.data_to_send() == b""
    pair.server.consume(call_id, 1)
    assert pair.pump().client == [e.CreditGranted(call_id, half)]
    assert pair.client.credit(call_id) == half


def test_body_longer_than_many_windows_flows_where_it_is_consumed():
    pair = open_pair()
    call_id = open_call(pair, more=True)
    for _ in range(8):
        spend(pair, call_id)
        for event in pair.pump().server:
            pair.server.consume(call_id, len(event.body))
        pair.pump()
        assert pair.client.credit(call_id) == limits.CREDIT_BYTES
    pair.client.send_data(call_id, b"", end=True)
    assert pair.pump().server[-1].end


def test_consume_counts_the_bytes_of_the_first_message():
    pair = open_pair()
    call_id = pair.client.send_call("rpc", "a.b", body=CHUNK, more=True)
    pair.pump()
    pair.server.consume(call_id, len(CHUNK))
    with pytest.raises(LocalProtocolError):
        pair.server.consume(call_id, 1)
    assert pair.client.credit(call_id) == limits.CREDIT_BYTES - len(CHUNK)


@pytest.mark.parametrize("size", [-1, 11, 2**31])
def test_consume_of_more_than_came_is_refused(size: int):
    pair = open_pair()
    call_id = open_call(pair, more=True)
    pair.client.send_data(call_id, bytes(10))
    pair.pump()
    with pytest.raises(LocalProtocolError):
        pair.server.consume(call_id, size)


def test_consume_after_the_body_or_the_call_has_ended_does_nothing():
    pair = open_pair()
    call_id = open_call(pair, more=True)
    spend(pair, call_id)
    pair.client.send_data(call_id, b"", end=True)
    pair.pump()
    pair.server.consume(call_id, limits.CREDIT_BYTES)
    pair.server.consume(99, 5)
    assert pair.server.data_to_send() == b""


@pytest.mark.parametrize("size", [0, -1])
def test_credit_of_nothing_is_a_violation(size: int):
    pair = open_pair()
    violates(pair.client, m.Credit(open_call(pair, more=True), size), code=Code.FLOW_CONTROL)


def test_credit_beyond_the_largest_window_is_a_violation():
    pair = open_pair()
    call_id = open_call(pair, more=True)
    room = limits.CREDIT_WINDOW_BYTES_MAX - limits.CREDIT_BYTES
    assert told(pair.client, m.Credit(call_id, room)) == [e.CreditGranted(call_id, limits.CREDIT_WINDOW_BYTES_MAX)]
    violates(pair.client, m.Credit(call_id, 1), code=Code.FLOW_CONTROL)


def test_credit_granted_before_the_answer_begins_counts_for_it():
    pair = open_pair()
    call_id = open_call(pair)
    assert told(pair.server, m.Credit(call_id, 1000)) == []
    assert pair.server.credit(call_id) == 0
    pair.server.send_reply(call_id, 200, more=True)
    assert pair.server.credit(call_id) == limits.CREDIT_BYTES + 1000


def test_credit_for_a_body_that_was_sent_whole_is_ignored():
    pair = open_pair()
    assert told(pair.client, m.Credit(open_call(pair), 5)) == []


# -- pushes ---------------------------------------------------------------------------------------------------------
def test_push_with_everything_arrives_and_its_acknowledgement_comes_back_once():
    pair = open_pair()
    assert pair.server.send_push("p1", b"\x00x", topic="orders", headers=(("a", "b"),), expires_ms=5) == 1
    assert pair.pump().client == [e.PushReceived(1, "p1", "orders", (("a", "b"),), b"\x00x", 5)]
    pair.client.send_ack(1)
    size = pair.client.queued_bytes
    pair.client.send_ack(1)
    pair.client.send_ack(7)  # never came
    assert pair.client.queued_bytes == size
    assert pair.pump().server == [e.PushAcked((1,))]


@pytest.mark.parametrize("seq", [0, -1, 1, 3])
def test_push_out_of_sequence_is_a_violation(seq: int):
    violates(open_pair().client, m.Push(1, "p1"), m.Push(seq, "p2"))


def test_push_acknowledged_in_any_order_and_repeatedly_is_told_once_each():
    pair = open_pair()
    for number in range(3):
        pair.server.send_push(f"p{number}", b"")
    assert told(pair.server, m.Ack((3, 1, 3)), m.Ack((1, 2)), m.Ack((2,)), m.Ack(())) == [
        e.PushAcked((3, 1)),
        e.PushAcked((2,)),
    ]


@pytest.mark.parametrize("seq", [0, -1, 2])
def test_push_acknowledged_that_was_never_sent_is_a_violation(seq: int):
    pair = open_pair()
    pair.server.send_push("p1", b"")
    violates(pair.server, m.Ack((1, seq)))


def test_pushes_beyond_the_unacknowledged_bound_wait_with_the_sender():
    pair = open_pair()
    for _ in range(limits.PUSHES_UNACKED_MAX):
        assert pair.server.can_push
        pair.server.send_push("p", b"")
    assert not pair.server.can_push
    with pytest.raises(LocalProtocolError):
        pair.server.send_push("p", b"")
    assert len(pair.pump().client) == limits.PUSHES_UNACKED_MAX
    pair.client.send_ack(40)
    pair.pump()
    assert pair.server.can_push
    assert not pair.client.can_push


def test_pushes_of_a_server_beyond_the_unacknowledged_bound_are_a_violation():
    pushes = [m.Push(seq, "p") for seq in range(1, limits.PUSHES_UNACKED_MAX + 2)]
    violates(open_pair().client, *pushes, code=Code.FLOW_CONTROL)


def test_push_larger_than_the_bound_is_refused_on_both_sides():
    large = bytes(limits.PUSH_BODY_BYTES_MAX + 1)
    with pytest.raises(LocalProtocolError):
        open_pair().server.send_push("p", large)
    violates(open_pair().client, m.Push(1, "p", body=large), code=Code.FRAME_TOO_LARGE)
    pair = open_pair()
    pair.server.send_push("p", large[1:])
    assert len(pair.pump().client) == 1
