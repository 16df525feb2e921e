"""The machine of the long connection under anything: bytes, cuts, legal and illegal actions in any order."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stormline.core import limits
from stormline.core.codes import Code
from stormline.core.errors import LocalProtocolError, RemoteProtocolError
from stormline.testing.pair import HELLO, WELCOME, byte_by_byte, open_pair, random_pieces, told, whole
from stormline.wire import events as e
from stormline.wire import frames
from stormline.wire import messages as m
from stormline.wire.connection import Connection
from stormline.wire.states import Role, State

IDS = st.integers(-1, 9)
BODIES = st.binary(max_size=40)
CODES = st.sampled_from([0, 101, 200, 402, 500, 503, 99999, -1])
PLAUSIBLE: st.SearchStrategy[m.Message] = st.one_of(
    st.builds(m.Hello, versions=st.sampled_from([(1,), (2,), (1, 2)]), app=st.just("shop")),
    st.builds(m.Welcome, version=st.sampled_from([1, 2]), session=st.just("s"), device=st.just("d")),
    st.builds(m.Close, code=CODES),
    st.builds(m.Call, id=IDS, gate=st.just("rpc"), method=st.just("a.b"), body=BODIES, more=st.booleans()),
    st.builds(m.Data, id=IDS, body=BODIES, end=st.booleans()),
    st.builds(m.Reply, id=IDS, status=st.just(0), body=BODIES, more=st.booleans()),
    st.builds(m.Fail, id=IDS, code=CODES, maybe_delivered=st.booleans()),
    st.builds(m.Cancel, id=IDS),
    st.builds(m.Credit, id=IDS, size=st.integers(-1, 2**32)),
    st.builds(m.Push, seq=IDS, id=st.just("p"), body=BODIES),
    st.builds(m.Ack, seqs=st.lists(IDS, max_size=3).map(tuple)),
    st.builds(m.Ping, nonce=st.integers()).filter(lambda ping: -(2**63) <= ping.nonce < 2**64),
    st.builds(m.Pong, nonce=IDS),
    st.builds(m.GoAway, code=CODES, last_call=IDS, spread_ms=st.integers(-5, 5)),
    st.builds(m.Received, count=IDS),
    st.builds(m.Notice, version=IDS, hosts=st.lists(st.just("a.example"), max_size=101).map(tuple)),
)
FLIGHT = st.lists(PLAUSIBLE.map(frames.encode) | st.binary(max_size=12), max_size=12).map(b"".join)


def busy(role: Role, *, greeted: bool) -> Connection:
    """Give a machine with an open call and an unacknowledged push, or one before its greeting."""
    machine = Connection(role, 0.0)
    if role is Role.CLIENT:
        machine.send_hello(HELLO)
        if greeted:
            told(machine, WELCOME)
            machine.send_call("rpc", "a.b", more=True)
    elif greeted:
        told(machine, HELLO)
        machine.send_welcome(WELCOME)
        machine.send_call("rpc", "a.b", more=True)
        machine.send_push("p", b"")
    machine.data_to_send()
    return machine


def outcome(machine: Connection, pieces: list[bytes]) -> tuple[list[e.Event], str, bytes]:
    """Give all that a machine makes of these pieces: its events, the violation it saw, its output."""
    heard: list[e.Event] = []
    fault = ""
    for piece in pieces:
        machine.receive_data(piece, 1.0)
        try:
            heard += iter(machine.next_event, None)
        except RemoteProtocolError as error:
            fault = str(error)
        if machine.role is Role.SERVER and machine.state is State.GREETING:
            machine.send_welcome(WELCOME)
            try:
                heard += iter(machine.next_event, None)
            except RemoteProtocolError as error:
                fault = str(error)
    return heard, fault, machine.data_to_send()


@pytest.mark.parametrize("role", list(Role))
@given(data=FLIGHT, greeted=st.booleans(), seed=st.integers(0, 2**32))
def test_connection_any_bytes_however_cut_give_the_same_events_and_only_the_named_error(
    role: Role, data: bytes, greeted: bool, seed: int
):
    at_once = outcome(busy(role, greeted=greeted), [data])
    assert outcome(busy(role, greeted=greeted), list(byte_by_byte(data))) == at_once
    assert outcome(busy(role, greeted=greeted), list(random_pieces(seed)(data))) == at_once
    fault, output = at_once[1], at_once[2]
    if fault:
        buffer = frames.FrameBuffer(limits.FRAME_BYTES_MAX)
        buffer.feed(output)
        (*_, last) = iter(buffer.next_message, None)
        assert isinstance(last, m.Close)
        assert last.code != Code.OK


class Talk(RuleBasedStateMachine):
    """Two sides that keep the rules, over a way that delivers in order and late.

    Held at all times: every call of either side ends exactly once; what arrives is what was sent; credit never falls
    below zero; with nothing under way both sides know the same open calls; nothing raises but illegal actions, and
    those change nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pair = open_pair(split=whole)
        self.ends: dict[tuple[Role, int], str] = {}
        """How each call ended for its caller, by caller and id; empty while it has not."""
        self.sent: dict[tuple[Role, int, Role], bytearray] = {}
        """Body bytes by caller, id and sender."""
        self.came: dict[tuple[Role, int, Role], bytearray] = {}
        self.asked: dict[Role, dict[int, bool]] = {role: {} for role in Role}
        """Calls that each side has been asked and not yet ended: whether the answer has begun."""
        self.pushes_come: list[int] = []
        self.notices: list[tuple[int, tuple[str, ...]]] = []
        """Sent and not yet heard of."""

    # -- what the sides do ------------------------------------------------------------------------------------------
    @rule(role=st.sampled_from(Role), body=BODIES, more=st.booleans())
    def call(self, role: Role, body: bytes, more: bool) -> None:
        machine = self.pair.side(role)
        if not machine.can_call:
            self._refused(machine, lambda: machine.send_call("rpc", "a.b"))
            return
        call_id = machine.send_call("rpc", "a.b", body=body, more=more)
        assert (role, call_id) not in self.ends
        self.ends[role, call_id] = ""
        self.sent[role, call_id, role] = bytearray(body)

    @rule(role=st.sampled_from(Role), pick=st.integers(0, 99), body=BODIES, more=st.booleans())
    def reply(self, role: Role, pick: int, body: bytes, more: bool) -> None:
        waiting = [call_id for call_id, begun in self.asked[role].items() if not begun]
        if not waiting:
            return
        call_id = waiting[pick % len(waiting)]
        self.pair.side(role).send_reply(call_id, 0, body=body, more=more)
        self.sent[role.peer, call_id, role] = bytearray(body)
        if more:
            self.asked[role][call_id] = True
        else:
            del self.asked[role][call_id]

    @rule(role=st.sampled_from(Role), pick=st.integers(0, 99), maybe=st.booleans())
    def fail(self, role: Role, pick: int, maybe: bool) -> None:
        if self.asked[role]:
            call_id = list(self.asked[role])[pick % len(self.asked[role])]
            self.pair.side(role).send_fail(call_id, Code.CALL_FAILED, maybe_delivered=maybe)
            del self.asked[role][call_id]

    @rule(role=st.sampled_from(Role), pick=st.integers(0, 99))
    def cancel(self, role: Role, pick: int) -> None:
        machine = self.pair.side(role)
        if machine.open_calls():
            call_id = machine.open_calls()[pick % len(machine.open_calls())]
            machine.send_cancel(call_id)
            self._end(role, call_id, "cancel")

    @rule(role=st.sampled_from(Role), pick=st.integers(0, 99), chunks=st.integers(1, 20))
    def stream(self, role: Role, pick: int, chunks: int) -> None:
        for _ in range(chunks):
            self.data(role, pick, limits.CHUNK_BYTES_MAX, False)

    @rule(role=st.sampled_from(Role), pick=st.integers(0, 99), size=st.integers(0, 16384), end=st.booleans())
    def data(self, role: Role, pick: int, size: int, end: bool) -> None:
        machine = self.pair.side(role)
        sending = [call_id for call_id, call in machine._calls.items() if call.sending]
        if not sending:
            return
        call_id = sending[pick % len(sending)]
        caller = role if machine._calls[call_id].ours else role.peer
        if size > machine.credit(call_id):
            self._refused(machine, lambda: machine.send_data(call_id, bytes(size)))
            return
        body = bytes([pick]) * size
        machine.send_data(call_id, body, end=end)
        self.sent[caller, call_id, role] += body
        if end and caller is not role:
            del self.asked[role][call_id]

    @rule(role=st.sampled_from(Role), pick=st.integers(0, 99), part=st.sampled_from([1.0, 0.6, 0.01]))
    def consume(self, role: Role, pick: int, part: float) -> None:
        machine = self.pair.side(role)
        receiving = [(call_id, call) for call_id, call in machine._calls.items() if call.receiving]
        if receiving:
            call_id, call = receiving[pick % len(receiving)]
            held = limits.CREDIT_BYTES - call.receive_credit - call.consumed
            machine.consume(call_id, int(held * part))
            self._refused(machine, lambda: machine.consume(call_id, limits.CREDIT_BYTES + 1))

    @rule(body=BODIES)
    def push(self, body: bytes) -> None:
        if self.pair.server.can_push:
            self.pair.server.send_push("p", body)

    @rule(pick=st.integers(0, 99))
    def ack(self, pick: int) -> None:
        if self.pushes_come:
            self.pair.client.send_ack(self.pushes_come.pop(pick % len(self.pushes_come)))

    @rule(version=st.integers(0, 3), hosts=st.lists(st.sampled_from(["a.example", "b.example"]), max_size=2))
    def notice(self, version: int, hosts: list[str]) -> None:
        self.pair.server.send_notice(version, tuple(hosts))
        self.notices.append((version, tuple(hosts)))

    @rule(role=st.sampled_from(Role))
    def ping(self, role: Role) -> None:
        self.pair.side(role).ping(self.pair.now)

    @precondition(lambda self: len(self.ends) > 8)
    @rule(role=st.sampled_from(Role))
    def goaway(self, role: Role) -> None:
        self.pair.side(role).send_goaway(Code.GOING_AWAY)

    @rule(role=st.sampled_from(Role))
    def break_a_rule(self, role: Role) -> None:
        machine = self.pair.side(role)
        for attempt in (
            lambda: machine.send_hello(HELLO),
            lambda: machine.send_welcome(WELCOME),
            lambda: machine.send_reply(10**6, 0),
            lambda: machine.send_fail(10**6, 500),
            lambda: machine.send_data(10**6, b"x"),
            lambda: machine.call_offset(10**6),
            lambda: machine.send_call("rpc", "a.b", body=bytes(limits.CHUNK_BYTES_MAX + 1)),
            lambda: machine.send_call("rpc", "x" * limits.FRAME_BYTES_MAX),
            lambda: machine.send_call("rpc", "a.b", headers=(("n", "v"),) * (limits.CALL_HEADERS_MAX + 1)),
            lambda: machine.send_push("p", bytes(limits.PUSH_BODY_BYTES_MAX + 1)),
            lambda: machine.send_notice(-1),
            lambda: machine.send_notice(1, ("a.example",) * (limits.PLAN_HOSTS_MAX + 1)),
        ):
            self._refused(machine, attempt)

    # -- the way between them ---------------------------------------------------------------------------------------
    @rule(role=st.sampled_from(Role), size=st.integers(1, 60) | st.none())
    def deliver(self, role: Role, size: int | None) -> None:
        for event in self.pair.deliver(role, size):
            self._hear(role, event)

    def _hear(self, role: Role, event: e.Event) -> None:
        match event:
            case e.CallReceived():
                assert event.call_id not in self.asked[role]
                self.asked[role][event.call_id] = False
                self.came[role.peer, event.call_id, role.peer] = bytearray(event.body)
                if not event.more:
                    assert event.body == self.sent[role.peer, event.call_id, role.peer]
            case e.ReplyReceived():
                self.came[role, event.call_id, role.peer] = bytearray(event.body)
                if not event.more:
                    assert event.body == self.sent[role, event.call_id, role.peer]
                    self._end(role, event.call_id, "reply")
            case e.DataReceived():
                ours = event.call_id not in self.asked[role]
                way = (role if ours else role.peer, event.call_id, role.peer)
                self.came[way] += event.body
                if event.end:
                    assert self.came[way] == self.sent[way]
                    if ours:
                        self._end(role, event.call_id, "reply")
                else:
                    assert self.sent[way].startswith(self.came[way])
            case e.CallFailed():
                self._end(role, event.call_id, "fail")
            case e.CallCancelled():
                del self.asked[role][event.call_id]
            case e.PushReceived():
                self.pushes_come.append(event.seq)
            case e.NoticeReceived():
                assert role is Role.CLIENT
                assert (event.version, event.hosts) == self.notices.pop(0)
            case e.PushAcked() | e.CreditGranted() | e.PongReceived() | e.GoingAway():
                pass
            case _:
                raise AssertionError(f"unexpected {event}")

    def _end(self, role: Role, call_id: int, how: str) -> None:
        assert self.ends[role, call_id] == "", f"call {call_id} of the {role} ended twice"
        self.ends[role, call_id] = how

    def _refused(self, machine: Connection, attempt: Any) -> None:
        before = snapshot(machine)
        with pytest.raises(LocalProtocolError):
            attempt()
        assert snapshot(machine) == before

    # -- what always holds ------------------------------------------------------------------------------------------
    @invariant()
    def credit_is_never_below_zero_nor_above_a_window(self) -> None:
        for role in Role:
            for call in self.pair.side(role)._calls.values():
                assert 0 <= call.send_credit <= limits.CREDIT_BYTES
                assert 0 <= call.receive_credit <= limits.CREDIT_BYTES
                assert 0 <= call.consumed < limits.CREDIT_BYTES // 2

    @invariant()
    def machine_and_owner_agree_on_open_calls(self) -> None:
        for role in Role:
            machine = self.pair.side(role)
            assert machine.open_calls() == [i for (who, i), how in self.ends.items() if who is role and not how]
            assert [i for i, call in machine._calls.items() if not call.ours] == list(self.asked[role])
            assert machine._peer_calls_open == len(self.asked[role])

    @invariant()
    def both_sides_agree_when_nothing_is_under_way(self) -> None:
        pair = self.pair
        if not any(pair.under_way(role) for role in Role) and not len(pair.client._in) and not len(pair.server._in):
            assert set(pair.client._calls) == set(pair.server._calls)
            assert pair.client._account().unacked == pair.server._account().unacked
            for call_id, call in pair.client._calls.items():
                other = pair.server._calls[call_id]
                assert call.answered == other.answered
                assert (call.send_credit, other.send_credit) == (
                    other.receive_credit if call.sending else call.send_credit,
                    call.receive_credit if other.sending else other.send_credit,
                )

    def teardown(self) -> None:
        for _ in range(2):
            heard = self.pair.pump()
            for role, told_events in ((Role.CLIENT, heard.client), (Role.SERVER, heard.server)):
                for event in told_events:
                    self._hear(role, event)
            self.both_sides_agree_when_nothing_is_under_way()
            for role in Role:
                for call_id in self.pair.side(role).open_calls():
                    self.pair.side(role).send_cancel(call_id)
                    self._end(role, call_id, "cancel")
        assert not self.pair.client._calls
        assert not self.pair.server._calls
        assert all(self.ends.values())


def snapshot(machine: Connection) -> dict[str, Any]:
    """Give all that a machine holds, by value."""
    held = {name: value for name, value in vars(machine).items() if name not in ("_in", "_calls")}
    held = {name: value.copy() if hasattr(value, "copy") else value for name, value in held.items()}
    calls = {i: tuple(getattr(call, name) for name in call.__slots__) for i, call in machine._calls.items()}
    return held | {"buffered": len(machine._in), "calls": calls}


Talk.TestCase.settings = settings(stateful_step_count=60)
TestTalk = Talk.TestCase
