"""A session over a transport of the test's own: what it costs at most, and that one call's end is its own."""

import asyncio
import contextlib
import contextvars

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.appgw.plans import PlanChange
from stormline.appgw.port import Answer, Delivery, Push
from stormline.core import limits, limits_platform
from stormline.core.codes import Code
from stormline.core.errors import CallError
from stormline.gateway.carrier import Carrier
from stormline.gateway.notices import AppChanges
from stormline.gateway.registry import Registry
from stormline.gateway.router import Router
from stormline.gateway.session import Hub
from stormline.net.clock import SystemClock, SystemRng
from stormline.wire import events as e
from stormline.wire import messages as m
from stormline.wire import tokens
from stormline.wire.connection import Connection
from stormline.wire.states import Role

KEY = Ed25519PrivateKey.generate()


class Tls:
    def selected_alpn_protocol(self):
        return m.ALPN


class Transport:
    """What a session sees of the network; the test decides when the peer takes anything."""

    def __init__(self):
        self.sent = bytearray()
        self.buffered = 0
        self.reading = True
        self.closed = False
        self.writes = 0

    def get_extra_info(self, name):
        return {"ssl_object": Tls(), "peername": ("192.0.2.1", 5)}.get(name)

    def set_write_buffer_limits(self, high):
        pass

    def write(self, data):
        self.sent += data
        self.writes += 1
        self.buffered += len(data)

    def get_write_buffer_size(self):
        return self.buffered

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True

    abort = close


MARK = contextvars.ContextVar("mark", default="none")


class AtOnce:
    """Answers without a task, or does not."""

    name = "once"

    def handle(self, exchange):
        match exchange.method:
            case "size":
                return Answer(0, (("n", "v"),), bytes(int(exchange.target)))
            case "no":
                raise CallError(Code.CALL_REFUSED, "no", retry_after_s=2.0)
            case "bug":
                raise RuntimeError("secret detail")
            case "headers":
                return Answer(0, (("n", "v"),) * (limits.CALL_HEADERS_MAX + 1))
            case "later":
                return self._later(exchange)

    async def _later(self, exchange):
        size = sum([len(chunk) async for chunk in exchange.body()])
        await exchange.reply(size)


class Gate:
    """Does what the call's method says."""

    name = "test"

    def __init__(self):
        self.go = asyncio.Event()
        self.cancelled = 0
        self.done = []

    async def handle(self, exchange):
        match exchange.method:
            case "reply":
                await exchange.reply(0, (), b"ok")
            case "large":
                await exchange.reply(0, (), bytes(limits.CREDIT_BYTES * 2))
            case "mark":
                before = MARK.get()
                MARK.set(exchange.target)
                await asyncio.sleep(0)
                await exchange.reply(0, (), f"{before} {MARK.get()}".encode())
            case "stubborn":
                with contextlib.suppress(asyncio.CancelledError):
                    await self.go.wait()
                raise TimeoutError
            case "wait":
                try:
                    await self.go.wait()
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
            case "say no":
                raise CallError(Code.CALL_REFUSED, "no", retry_after_s=2.0, maybe_delivered=True)
            case "bug":
                raise RuntimeError("secret detail")
            case "half":
                await exchange.reply(0, (), b"half", more=True)
            case "half, then no":
                await exchange.reply(0, (), b"half", more=True)
                raise CallError(Code.CALL_UPSTREAM, "broke")
            case "count":
                size = 0
                async for chunk in exchange.body():
                    size += len(chunk)
                await exchange.reply(size)
            case "ignore":
                await exchange.reply(7)
        self.done.append(exchange.method)


class Pair:
    """A session and the client's machine on the other end."""

    def __init__(self):
        self.gate = Gate()
        self.ended = []
        self.changes = AppChanges()
        self.hub = Hub(
            keys={"demo": {"k1": KEY.public_key()}},
            router=Router([self.gate, AtOnce()]),
            registry=Registry(),
            clock=SystemClock(),
            rng=SystemRng(),
            unit="u1",
            heartbeat_s=60.0,
            opened=lambda who, about: None,
            closed=lambda who: self.ended.append(who.device),
            changes_due=self.due,
        )
        self.loop = asyncio.get_running_loop()
        self.transport = Transport()
        self.carrier = Carrier(self.hub, self.loop)
        self.carrier.connection_made(self.transport)
        self.client = Connection(Role.CLIENT, 0.0)
        iat = int(SystemClock().wall())
        token = tokens.mint(tokens.DeviceToken(app="demo", device="d1", iat=iat, exp=iat + 60), key=KEY, kid="k1")
        self.client.send_hello(m.Hello(versions=(1,), app="demo", token=token, capabilities=(m.PLAN, "other")))
        self.talk()
        self.session = self.carrier.session

    def due(self, app, told):
        assert app == "demo"
        return self.changes.due(told)

    def talk(self):
        self.carrier.data_received(self.client.data_to_send())

    def hear(self):
        """Give the client what was sent, and what it makes of it."""
        self.client.receive_data(bytes(self.transport.sent), 0.0)
        self.transport.sent.clear()
        events = []
        while (event := self.client.next_event()) is not None:
            events.append(event)
        return events

    def call(self, method, gate="test", **fields):
        call_id = self.client.send_call(gate, method, **fields)
        self.talk()
        return call_id

    def push(self, push):
        outcome = self.loop.create_future()
        self.session.push(push, outcome.set_result)
        return outcome

    def pause(self):
        self.carrier.pause_writing()

    def resume(self):
        self.transport.buffered = 0
        self.carrier.resume_writing()


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture(name="pair")
async def _pair():
    pair = Pair()
    assert isinstance(pair.hear()[0], e.Welcomed)
    yield pair
    pair.carrier.connection_lost(None)
    await settle()
    assert not pair.hub.tasks
    assert not pair.hub.connections


class TestCalls:
    async def test_outcomes_each_end_their_call_alone(self, pair, caplog):
        pair.call("wait")
        for method in ("reply", "say no", "bug", "half", "half, then no", "unanswered"):
            pair.call(method)
        await settle()
        fails = {event.call_id: event for event in pair.hear() if isinstance(event, e.CallFailed)}
        assert {call_id: event.code for call_id, event in fails.items()} == {
            5: Code.CALL_REFUSED,
            7: Code.CALL_FAILED,
            9: Code.CALL_FAILED,
            11: Code.CALL_UPSTREAM,
            13: Code.CALL_FAILED,
        }
        assert (fails[5].reason, fails[5].retry_after_s, fails[5].maybe_delivered) == ("no", 2.0, True)
        assert fails[7].reason == "internal error"
        assert len([record for record in caplog.records if record.exc_info]) == 3  # each once
        assert pair.session.calls_open == 1
        pair.gate.go.set()

    async def test_deadline_passed_on_arrival_is_not_worked_on(self, pair):
        pair.call("reply", deadline_s=0.0)
        await settle()
        assert [event.code for event in pair.hear()] == [Code.CALL_DEADLINE]
        assert not pair.gate.done

    async def test_cancel_ends_the_work(self, pair):
        call = pair.call("wait")
        await settle()
        pair.client.send_cancel(call)
        pair.talk()
        await settle()
        assert pair.gate.cancelled == 1
        assert not pair.hub.tasks
        assert pair.hear() == []

    async def test_lost_connection_ends_all_calls(self, pair):
        for _ in range(50):
            pair.call("wait")
        await settle()
        pair.carrier.connection_lost(ConnectionResetError())
        await settle()
        assert pair.gate.cancelled == 50
        assert pair.ended == ["d1"]
        assert len(pair.hub.registry) == 0

    async def test_body_is_counted_and_gives_credit_back(self, pair):
        call = pair.call("count", more=True)
        chunk = bytes(limits.CHUNK_BYTES_MAX)
        count = 3 * limits.CREDIT_BYTES // len(chunk)
        for _ in range(count):
            assert pair.client.credit(call) >= len(chunk)
            pair.client.send_data(call, chunk)
            pair.talk()
            await settle()
            pair.hear()
        pair.client.send_data(call, b"", end=True)
        pair.talk()
        await settle()
        assert pair.hear()[-1].status == count * len(chunk)

    async def test_body_nobody_reads_is_held_back_by_credit(self, pair):
        call = pair.call("wait", more=True)
        chunk = bytes(limits.CHUNK_BYTES_MAX)
        while pair.client.credit(call) >= len(chunk):
            pair.client.send_data(call, chunk)
            pair.talk()
            await settle()
            pair.hear()
        assert pair.client.credit(call) < len(chunk)

    async def test_answer_before_the_body_ends_is_good(self, pair):
        call = pair.call("ignore", more=True)
        await settle()
        assert [event.status for event in pair.hear()] == [7]
        assert not pair.client.is_open(call)

    async def test_call_cancelled_before_its_task_has_begun_leaves_nothing(self, pair):
        call = pair.client.send_call("test", "reply")
        pair.client.send_cancel(call)
        pair.talk()
        await settle()
        assert not pair.gate.done
        assert not pair.hub.tasks
        assert pair.hub.calls == {"demo": 0}
        assert pair.hear() == []

    @pytest.mark.parametrize("method", ["wait", "stubborn"])
    async def test_call_whose_gate_misses_the_deadline_fails_with_it(self, pair, monkeypatch, caplog, method):
        monkeypatch.setattr(limits_platform, "CALL_DEADLINE_GRACE_S", 0.0)
        pair.call(method, deadline_s=0.001)
        await asyncio.wait(list(pair.hub.tasks))
        await settle()
        [failed] = pair.hear()
        assert (failed.code, failed.maybe_delivered) == (Code.CALL_DEADLINE, True)
        assert pair.gate.cancelled == (method == "wait")
        assert not [record for record in caplog.records if record.exc_info]

    async def test_each_call_has_a_context_of_its_own(self, pair):
        for mark in ("a", "b"):
            pair.call("mark", target=mark)
        await settle()
        assert [event.body for event in pair.hear()] == [b"none a", b"none b"]
        assert MARK.get() == "none"


class TestAnswersAtOnce:
    async def test_answer_costs_no_task(self, pair):
        call = pair.call("size", gate="once", target="5")
        assert not pair.hub.tasks
        assert pair.hear() == [e.ReplyReceived(call, 0, (("n", "v"),), bytes(5), False)]

    async def test_failure_ends_its_call_alone(self, pair, caplog):
        for method in ("no", "bug", "headers"):
            pair.call(method, gate="once")
        events = pair.hear()
        assert [event.code for event in events] == [Code.CALL_REFUSED, Code.CALL_FAILED, Code.CALL_FAILED]
        assert (events[0].reason, events[0].retry_after_s) == ("no", 2.0)
        assert events[1].reason == events[2].reason == "internal error"
        assert len([record for record in caplog.records if record.exc_info]) == 2
        assert pair.call("size", gate="once", target="1")
        assert len(pair.hear()) == 1

    async def test_gate_may_take_a_task_where_it_has_to_wait(self, pair):
        call = pair.call("later", gate="once", body=b"abc", more=True)
        assert len(pair.hub.tasks) == 1
        pair.client.send_data(call, b"de", end=True)
        pair.talk()
        await settle()
        assert [event.status for event in pair.hear()] == [5]

    async def test_large_answer_goes_under_flow_control(self, pair):
        call = pair.call("size", gate="once", target=str(2 * limits.CREDIT_BYTES))
        await settle()
        got = sum(len(event.body) for event in pair.hear())
        assert got == limits.CREDIT_BYTES
        while got < 2 * limits.CREDIT_BYTES:
            pair.client.consume(call, limits.CREDIT_BYTES // 2)
            pair.talk()
            await settle()
            got += sum(len(event.body) for event in pair.hear())
        await settle()
        assert not pair.hub.tasks

    async def test_answers_to_calls_of_one_read_leave_together_but_not_without_bound(self, pair):
        count = limits_platform.ANSWERS_JOINED_MAX
        for _ in range(2 * count + 1):
            pair.client.send_call("once", "size", target="9")
        before = pair.transport.writes
        pair.talk()
        assert pair.transport.writes - before == 3
        assert len(pair.hear()) == 2 * count + 1

    async def test_peer_that_does_not_read_gets_answers_in_order_once_it_does(self, pair):
        pair.pause()
        calls = [pair.call("reply")]
        calls += [pair.call("size", gate="once", target="1") for _ in range(3)]
        await settle()
        assert not pair.transport.sent
        pair.resume()
        await settle()
        assert [event.call_id for event in pair.hear()] == calls
        assert not pair.hub.tasks


class TestBackPressure:
    async def test_answer_waits_for_credit_then_goes_on(self, pair):
        call = pair.call("large")
        await settle()
        got = sum(len(event.body) for event in pair.hear())
        assert got == limits.CREDIT_BYTES
        assert not pair.gate.done
        while not pair.gate.done:
            pair.client.consume(call, limits.CREDIT_BYTES // 2)
            pair.talk()
            await settle()
            got += sum(len(event.body) for event in pair.hear())
        assert got == 2 * limits.CREDIT_BYTES

    async def test_peer_that_does_not_read_stops_senders_and_is_not_read(self, pair):
        pair.pause()
        assert not pair.transport.reading
        for _ in range(5):
            pair.call("reply")
        await settle()
        assert not pair.transport.sent
        pair.resume()
        assert pair.transport.reading
        await settle()
        assert [event.call_id for event in pair.hear()] == [1, 3, 5, 7, 9]  # in the order they waited

    async def test_waiting_sender_that_is_cancelled_lets_the_next_go(self, pair):
        pair.pause()
        calls = [pair.call("reply") for _ in range(3)]
        await settle()
        pair.client.send_cancel(calls[0])
        pair.talk()
        await settle()
        pair.resume()
        await settle()
        assert [event.call_id for event in pair.hear()] == calls[1:]

    async def test_backlog_beyond_the_bound_ends_the_session_with_a_code(self, pair):
        pair.pause()
        pair.transport.buffered = limits_platform.SESSION_BACKLOG_BYTES_MAX
        delivery = pair.push(Push("p1", "", b"x"))
        await settle()
        assert pair.transport.closed
        assert pair.hear()[-1].code == Code.OVERLOADED
        assert await delivery is Delivery.UNCONFIRMED

    async def test_call_that_was_sending_when_the_session_ended_says_nothing_more(self, pair, caplog):
        pair.call("large")
        pair.session.close(Code.GOING_AWAY, "test")
        await settle()
        assert not [record for record in caplog.records if record.exc_info]


class TestPush:
    async def test_push_is_acknowledged_or_lost_with_the_session(self, pair):
        first = pair.push(Push("p1", "t", b"x"))
        second = pair.push(Push("p2", "t", b"x"))
        await settle()
        seqs = [event.seq for event in pair.hear()]
        pair.client.send_ack(seqs[0])
        pair.talk()
        assert await first is Delivery.ACKED
        pair.carrier.connection_lost(None)
        assert await second is Delivery.UNCONFIRMED
        assert await pair.push(Push("p3", "t", b"x")) is Delivery.OFFLINE


class TestNotices:
    async def test_change_is_told_once(self, pair):
        pair.changes.take(PlanChange("demo", 7))
        pair.session.tell_changes()
        pair.session.tell_changes()
        assert pair.hear() == [e.NoticeReceived(7, ())]
        pair.changes.take(PlanChange("demo", 8, 7, ("a.example",)))
        pair.session.tell_changes()
        assert pair.hear() == [e.NoticeReceived(8, ("a.example",))]

    async def test_client_that_does_not_read_costs_nothing_and_hears_all_in_one_when_it_reads_again(self, pair):
        pair.changes.take(PlanChange("demo", 1))
        pair.session.tell_changes()
        pair.hear()
        pair.pause()
        for version in range(2, 10):
            pair.changes.take(PlanChange("demo", version, version - 1, (f"h{version % 3}.example",)))
            pair.session.tell_changes()
        assert not pair.transport.sent
        pair.resume()
        assert pair.hear() == [e.NoticeReceived(9, ("h0.example", "h1.example", "h2.example"))]

    async def test_client_that_was_asked_to_leave_is_still_told_and_one_that_left_is_not(self, pair):
        pair.carrier.go_away(Code.GOING_AWAY, "update", spread_s=1.0)
        pair.changes.take(PlanChange("demo", 7))
        pair.session.tell_changes()
        assert pair.hear()[-1] == e.NoticeReceived(7, ())
        pair.session.close(Code.OK, "")
        pair.transport.sent.clear()
        pair.changes.take(PlanChange("demo", 8))
        pair.session.tell_changes()
        assert not pair.transport.sent
