"""Sessions of the gateway that outlive their connections, on a VirtualLoop: what goes on, what ends, who may go on."""

import asyncio
import logging

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.appgw.port import Delivery, Push
from stormline.core import limits, limits_platform
from stormline.core.codes import Action, Code, action
from stormline.core.errors import RequestRefused
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.gateway.carrier import Carrier
from stormline.gateway.config import Quota
from stormline.gateway.handover import Handover
from stormline.gateway.registry import Registry
from stormline.gateway.revocation import Revocations
from stormline.gateway.router import Router
from stormline.gateway.session import Hub
from stormline.testing.simloop import SimClock, SimRng, on_virtual_time
from stormline.wire import events as e
from stormline.wire import messages as m
from stormline.wire import tokens
from stormline.wire.connection import Connection
from stormline.wire.states import Role, State

KEY = Ed25519PrivateKey.generate()


class Tls:
    def selected_alpn_protocol(self):
        return m.ALPN


class Transport:
    """What a carrier sees of the network."""

    def __init__(self):
        self.sent = bytearray()
        self.closed = False

    def get_extra_info(self, name):
        return {"ssl_object": Tls(), "peername": ("192.0.2.1", 5)}.get(name)

    def set_write_buffer_limits(self, high):
        pass

    def write(self, data):
        self.sent += data

    def get_write_buffer_size(self):
        return 0

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True

    abort = close


class Gate:
    """Answers when it is told to; counts what it did."""

    name = "test"

    def __init__(self):
        self.go = asyncio.Event()
        self.worked = []
        self.cancelled = 0

    async def handle(self, exchange):
        self.worked.append(exchange.method)
        if exchange.method != "now":
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        await exchange.reply(0, (), exchange.method.encode())


class Node:
    """A node without sockets."""

    def __init__(self, name="n1", *, broker=None, **hub):
        self.gate = Gate()
        self.opened, self.closed = [], []
        loop = asyncio.get_running_loop()
        self.clock = SimClock(loop)
        self.hub = Hub(
            keys={"demo": {"k1": KEY.public_key()}},
            router=Router([self.gate]),
            registry=Registry(),
            clock=self.clock,
            rng=SimRng(name),
            unit="u1",
            heartbeat_s=60.0,
            node=name,
            opened=lambda who, about: self.opened.append(who.session),
            closed=lambda who: self.closed.append(who.session),
            **hub,
        )
        self.engine = MemoryEngine(broker) if broker is not None else None
        if self.engine is not None:
            self.handover = Handover(self.hub, self.engine)
            self.hub.fetch = self.handover.fetch

    async def start(self):
        await self.handover.start(self.engine)
        return self

    async def stop(self):
        for carrier in list(self.hub.connections):
            carrier.abort()
            carrier.connection_lost(None)
        self.hub.waiting.close()
        await settle()
        assert not self.hub.tasks
        assert self.hub.room.size == 0
        if self.engine is not None:
            await self.engine.close()


class Phone:
    """A client: the machine of its session, and the connection it has now."""

    def __init__(self, clock, device="d1", *, app="demo", user="", life_s=600, capabilities=(m.RESUME,)):
        self.clock, self.app = clock, app
        self.device, self.user, self.life_s, self.capabilities = device, user, life_s, capabilities
        self.machine = None
        self.welcome = None
        self.transport = None
        self.carrier = None

    def dial(self, node):
        self.transport = Transport()
        self.carrier = Carrier(node.hub, asyncio.get_running_loop())
        self.carrier.connection_made(self.transport)

    def hello(self, **fields):
        now = int(self.clock.wall())
        claims = tokens.DeviceToken(app=self.app, device=self.device, user=self.user, iat=now, exp=now + self.life_s)
        return m.Hello((1,), self.app, tokens.mint(claims, key=KEY, kid="k1"), capabilities=self.capabilities, **fields)

    def join(self, node):
        """Begin a session."""
        self.dial(node)
        self.machine = Connection(Role.CLIENT, 0.0)
        self.machine.send_hello(self.hello())
        self.talk()
        (welcomed, *_) = self.hear()
        self.welcome = welcomed.welcome
        return self

    async def back(self, node, *, token=None, received=None):
        """Go on with the session over another connection; give the WELCOME."""
        if not self.machine.detached:
            self.machine.detach(2**40)
        self.dial(node)
        greeting = Connection(Role.CLIENT, 0.0)
        received = self.machine.received if received is None else received
        greeting.send_hello(self.hello(resume=token or self.welcome.resume, received=received))
        self.carrier.data_received(greeting.data_to_send())
        for _ in range(100):
            if self.transport.sent:
                break
            await asyncio.sleep(0.1)
        greeting.receive_data(bytes(self.transport.sent), 0.0)
        self.transport.sent.clear()
        event = greeting.next_event()
        assert isinstance(event, e.Welcomed), event
        if event.welcome.resumed:
            self.machine.resume(greeting, event.welcome.received, 0.0)
        else:
            self.machine = greeting
        self.welcome = event.welcome
        self.talk()
        return event.welcome

    def lose(self):
        """Lose the connection; what was sent and not heard is gone."""
        self.machine.detach(2**40)
        self.carrier.connection_lost(ConnectionResetError())

    def talk(self):
        self.carrier.data_received(self.machine.data_to_send())

    def hear(self):
        self.machine.receive_data(bytes(self.transport.sent), 0.0)
        self.transport.sent.clear()
        events = list(iter(self.machine.next_event, None))
        if self.machine.has_data_to_send and not self.transport.closed:
            self.talk()
        return events

    def call(self, method):
        call_id = self.machine.send_call("test", method)
        self.talk()
        return call_id


def pushed(node, push):
    """Push to the device `d1`; give what will be its outcome."""
    outcome = asyncio.get_running_loop().create_future()
    node.hub.registry.push("demo", "d1", push, outcome.set_result)
    return outcome


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


@on_virtual_time
async def test_call_in_flight_runs_on_and_its_answer_comes_once():
    node = Node()
    phone = Phone(node.clock).join(node)
    call = phone.call("slow")
    await settle()
    phone.lose()
    await settle()
    node.gate.go.set()
    await settle()
    assert (await phone.back(node)).resumed
    assert [(event.call_id, event.body) for event in phone.hear()] == [(call, b"slow")]
    assert node.gate.worked == ["slow"]
    assert (node.opened, node.closed) == ([phone.welcome.session], [])
    await node.stop()


@on_virtual_time
async def test_answer_that_was_lost_on_its_way_comes_again_and_no_other_does():
    node = Node()
    node.gate.go.set()
    phone = Phone(node.clock).join(node)
    heard = phone.call("heard")
    await settle()
    assert [event.call_id for event in phone.hear()] == [heard]
    lost = phone.call("lost")
    await settle()
    phone.lose()
    assert (await phone.back(node)).resumed
    assert [event.call_id for event in phone.hear()] == [lost]
    assert node.gate.worked == ["heard", "lost"]
    await node.stop()


@on_virtual_time
async def test_push_to_a_session_that_waits_is_acknowledged_when_its_client_is_back():
    node = Node()
    phone = Phone(node.clock).join(node)
    phone.lose()
    push = pushed(node, Push("p1", "t", b"x"))
    await settle()
    assert (await phone.back(node)).resumed
    (received,) = phone.hear()
    assert (received.push_id, received.seq) == ("p1", 1)
    phone.machine.send_ack(1)
    phone.talk()
    assert await push is Delivery.ACKED
    await node.stop()


@on_virtual_time
async def test_pushes_to_a_session_that_waits_are_bounded():
    node = Node()
    phone = Phone(node.clock).join(node)
    phone.lose()
    body = bytes(limits.PUSH_BODY_BYTES_MAX)
    pushes = [pushed(node, Push(f"p{number}", "t", body)) for number in range(9)]
    await settle()
    assert [push.result() for push in pushes if push.done()] == [Delivery.OFFLINE] * 8
    assert node.hub.room.size <= limits.KEPT_ROOM_BYTES + limits.FRAME_BYTES_MAX
    await node.stop()
    assert await pushes[0] is Delivery.UNCONFIRMED


@on_virtual_time
async def test_window_over_ends_the_session_and_its_calls():
    node = Node(resume_window_s=30.0)
    phone = Phone(node.clock).join(node)
    phone.machine.send_call("test", "slow", deadline_s=300.0)
    phone.talk()
    await settle()
    phone.lose()
    await asyncio.sleep(10.0)
    other = Phone(node.clock, "d2").join(node)
    other.lose()
    await asyncio.sleep(19.5)
    assert (node.gate.cancelled, node.closed) == (0, [])
    await asyncio.sleep(1.0)
    assert (node.gate.cancelled, node.closed) == (1, [phone.welcome.session])
    await asyncio.sleep(10.0)
    assert len(node.closed) == 2
    assert len(node.hub.registry) == len(node.hub.waiting) == 0
    assert not (await phone.back(node)).resumed
    await node.stop()


@on_virtual_time
async def test_half_open_connection_is_left_and_can_do_nothing_to_the_session():
    node = Node()
    phone = Phone(node.clock).join(node)
    stale_carrier, stale_machine = phone.carrier, phone.machine.data_to_send()
    assert (await phone.back(node)).resumed
    session = node.hub.registry.get("demo", "d1")
    late = Connection(Role.CLIENT, 0.0)
    late.send_hello(phone.hello())
    late.send_call("test", "now")
    stale_carrier.data_received(stale_machine + late.data_to_send())
    stale_carrier.connection_lost(ConnectionResetError())
    await settle()
    assert node.gate.worked == []
    assert node.hub.registry.get("demo", "d1") is session
    phone.call("now")
    await settle()
    assert [event.body for event in phone.hear()] == [b"now"]
    assert node.closed == []
    await node.stop()


@on_virtual_time
async def test_fresh_greeting_of_the_device_ends_the_session_that_waits():
    node = Node()
    phone = Phone(node.clock).join(node)
    phone.call("slow")
    await settle()
    phone.lose()
    other = Phone(node.clock).join(node)
    await settle()
    assert (node.gate.cancelled, len(node.hub.waiting)) == (1, 0)
    assert node.hub.registry.session_of("demo", "d1") == other.welcome.session
    assert node.closed == []  # the directory's entry is the newer one's
    await node.stop()


@on_virtual_time
async def test_resume_with_anything_wrong_is_a_fresh_session(caplog):
    caplog.set_level(logging.DEBUG)
    node = Node()
    for wrong in ("secret", "session", "device", "user", "frames", "garbage"):
        phone = Phone(node.clock, user="ann").join(node)
        earlier, token = phone.welcome.session, phone.welcome.resume
        phone.lose()
        received = None
        match wrong:
            case "secret":
                token = token[:-1] + ("0" if token[-1] != "0" else "1")
            case "session":
                token = ".".join([token.split(".")[0], "x" * 22, token.split(".")[2]])
            case "device":
                phone.device = "d2"
            case "user":
                phone.user = "bob"
            case "frames":
                received = 7
            case "garbage":
                token = "." * 4000
        welcome = await phone.back(node, token=token, received=received)
        assert not welcome.resumed, wrong
        assert welcome.session != earlier
        assert token.split(".")[-1] not in caplog.text or wrong == "garbage"
    await node.stop()


@on_virtual_time
async def test_frames_kept_no_more_mean_a_fresh_session(monkeypatch):
    monkeypatch.setattr(limits, "KEPT_BYTES_MAX", 20)
    node = Node()
    phone = Phone(node.clock).join(node)
    phone.call("now")
    phone.call("now")
    await settle()
    phone.lose()
    assert not (await phone.back(node)).resumed
    await node.stop()


@on_virtual_time
async def test_token_that_expires_closes_the_connection_and_the_session_goes_on_with_a_new_one():
    node = Node()
    phone = Phone(node.clock, life_s=100).join(node)
    await asyncio.sleep(90.0)
    phone.call("slow")
    await asyncio.sleep(11.0)
    (closed,) = phone.hear()
    assert (closed.code, closed.by_peer) == (Code.TOKEN_EXPIRED, True)
    assert phone.transport.closed
    assert phone.machine.state is State.OPEN
    node.gate.go.set()
    await settle()
    assert (await phone.back(node)).resumed
    assert [event.body for event in phone.hear()] == [b"slow"]
    await node.stop()


@on_virtual_time
async def test_wall_clock_that_jumps_expires_nothing():
    node = Node()
    phone = Phone(node.clock, life_s=100).join(node)
    node.clock.step_wall(90 * 86400.0)
    await asyncio.sleep(50.0)
    assert phone.hear() == []
    await node.stop()


@on_virtual_time
async def test_client_that_cannot_resume_ends_with_its_connection():
    node = Node()
    phone = Phone(node.clock, capabilities=()).join(node)
    assert (phone.welcome.resume, phone.welcome.resume_window_s) == ("", 0.0)
    phone.carrier.connection_lost(None)
    assert node.closed == [phone.welcome.session]
    assert not node.hub.waiting
    await node.stop()


@on_virtual_time
async def test_sessions_that_wait_are_bounded_the_oldest_gives_way(monkeypatch):
    monkeypatch.setattr(limits_platform, "SESSIONS_WAITING_MAX", 2)
    node = Node()
    phones = [Phone(node.clock, f"d{number}").join(node) for number in range(3)]
    for phone in phones:
        phone.lose()
    assert node.closed == [phones[0].welcome.session]
    assert len(node.hub.waiting) == 2
    await node.stop()


class TestOtherNode:
    @on_virtual_time
    async def test_session_goes_on_there_with_answers_and_pushes(self):
        broker = MemoryBroker()
        first, second = await Node("n1", broker=broker).start(), await Node("n2", broker=broker).start()
        phone = Phone(first.clock).join(first)
        session = phone.welcome.session
        call = phone.call("slow")
        push = pushed(first, Push("p1", "t", b"x"))
        await settle()
        phone.lose()
        asyncio.get_running_loop().call_later(1.0, first.gate.go.set)
        welcome = await phone.back(second)
        assert (welcome.resumed, welcome.session) == (True, session)
        events = phone.hear()
        assert [type(event) for event in events] == [e.PushReceived, e.ReplyReceived]
        assert (events[1].call_id, events[1].body) == (call, b"slow")
        assert await push is Delivery.UNCONFIRMED
        assert (first.closed, len(first.hub.registry)) == ([session], 0)
        assert second.opened == [session]
        second.gate.go.set()
        assert phone.call("slow") > call
        await settle()
        assert [event.body for event in phone.hear()] == [b"slow"]
        assert (first.gate.worked, second.gate.worked) == (["slow"], ["slow"])
        phone.lose()
        assert (await phone.back(second)).resumed
        await first.stop()
        await second.stop()

    @on_virtual_time
    async def test_welcome_that_was_lost_there_leaves_the_earlier_token_good(self):
        broker = MemoryBroker()
        first, second = await Node("n1", broker=broker).start(), await Node("n2", broker=broker).start()
        phone = Phone(first.clock).join(first)
        call = phone.call("now")
        await settle()
        phone.lose()
        dial = Phone(first.clock)
        dial.dial(second)
        greeting = Connection(Role.CLIENT, 0.0)
        greeting.send_hello(dial.hello(resume=phone.welcome.resume, received=phone.machine.received))
        dial.carrier.data_received(greeting.data_to_send())
        dial.carrier.connection_lost(None)  # before the other node has answered, and so before the WELCOME
        await asyncio.sleep(1.0)
        assert len(second.hub.waiting) == 1
        assert (await phone.back(second)).resumed
        assert [event.call_id for event in phone.hear()] == [call]
        await first.stop()
        await second.stop()

    @on_virtual_time
    async def test_call_that_does_not_end_fails_and_may_have_been_delivered(self):
        broker = MemoryBroker()
        first, second = await Node("n1", broker=broker).start(), await Node("n2", broker=broker).start()
        phone = Phone(first.clock).join(first)
        call = phone.call("slow")
        await settle()
        phone.lose()
        assert (await phone.back(second)).resumed
        (failed,) = phone.hear()
        assert (failed.call_id, failed.code, failed.maybe_delivered) == (call, Code.CALL_UNAVAILABLE, True)
        assert first.gate.cancelled == 1
        await first.stop()
        await second.stop()

    @on_virtual_time
    async def test_holder_that_is_gone_or_says_no_means_a_fresh_session(self):
        broker = MemoryBroker()
        first, second = await Node("n1", broker=broker).start(), await Node("n2", broker=broker).start()
        phone = Phone(first.clock).join(first)
        phone.lose()
        token = phone.welcome.resume
        assert not (await phone.back(second, token=token[:-1] + "g")).resumed
        assert len(first.hub.waiting) == 1
        gone = Phone(first.clock, "d2").join(first)
        gone.lose()
        await first.stop()
        assert not (await gone.back(second)).resumed
        await second.stop()

    @on_virtual_time
    async def test_older_login_never_takes_the_place_of_a_newer_one(self):
        broker = MemoryBroker()
        first, second = await Node("n1", broker=broker).start(), await Node("n2", broker=broker).start()
        old = Phone(first.clock).join(first)
        await asyncio.sleep(1.0)
        new = Phone(first.clock).join(second)
        await settle()
        for node in (second, second):  # it never heard that it is replaced: its link was dead
            old.dial(node)
            greeting = Connection(Role.CLIENT, 0.0)
            greeting.send_hello(old.hello(resume=old.welcome.resume))
            old.carrier.data_received(greeting.data_to_send())
            await asyncio.sleep(2.0)
            greeting.receive_data(bytes(old.transport.sent), 0.0)
            heard = list(iter(greeting.next_event, None))
            assert [event.code for event in heard if isinstance(event, e.Closed)] == [Code.REPLACED]
        assert not new.transport.closed
        new.lose()
        assert (await new.back(first)).resumed
        await first.stop()
        await second.stop()

    @on_virtual_time
    async def test_client_that_never_heard_of_its_newer_session_comes_back(self):
        node = Node("n1")
        phone = Phone(node.clock).join(node)
        token = phone.welcome.resume
        phone.lose()
        await asyncio.sleep(limits.RESUME_WINDOW_S + 1.0)
        assert not (await phone.back(node, token=token)).resumed
        phone.lose()
        assert not (await phone.back(node, token=token, received=0)).resumed  # the WELCOME before was lost
        await node.stop()

    @on_virtual_time
    async def test_one_session_is_given_to_one_node_only(self):
        broker = MemoryBroker()
        nodes = [await Node(f"n{number}", broker=broker).start() for number in (1, 2, 3)]
        phone = Phone(nodes[0].clock).join(nodes[0])
        phone.call("slow")
        await settle()
        phone.lose()
        dials = []
        for node in nodes[1:]:
            dial = Phone(nodes[0].clock)
            dial.dial(node)
            greeting = Connection(Role.CLIENT, 0.0)
            greeting.send_hello(dial.hello(resume=phone.welcome.resume, received=phone.machine.received))
            dial.carrier.data_received(greeting.data_to_send())
            dials.append((dial, greeting))
        await asyncio.sleep(4.0)
        resumed = []
        for dial, greeting in dials:
            greeting.receive_data(bytes(dial.transport.sent), 0.0)
            resumed.append(greeting.next_event().welcome.resumed)
        assert sorted(resumed) == [False, True]
        for node in nodes:
            await node.stop()


class TestRevocation:
    @on_virtual_time
    async def test_sessions_end_with_their_code_on_every_node_connected_or_waiting(self):
        broker = MemoryBroker()
        nodes = [await Node(f"n{number}", broker=broker).start() for number in (1, 2)]
        revocations = [Revocations(node.hub.registry, node.engine, unit="u1") for node in nodes]
        for one, node in zip(revocations, nodes, strict=True):
            await one.start(node.engine)
        here = Phone(nodes[0].clock, "d1", user="ann").join(nodes[0])
        there = Phone(nodes[0].clock, "d2", user="ann").join(nodes[1])
        waits = Phone(nodes[0].clock, "d3", user="ann").join(nodes[1])
        waits.lose()
        other = Phone(nodes[0].clock, "d4", user="bob").join(nodes[1])
        assert await revocations[0].revoke("demo", user="ann") == 1
        await settle()
        for phone in (here, there):
            (closed,) = phone.hear()
            assert (closed.code, action(closed.code)) == (Code.REVOKED, Action.STOP)
        assert not (await waits.back(nodes[1])).resumed
        assert other.hear() == []
        assert await revocations[1].revoke("demo", device="d4", renew=True) == 1
        (closed,) = other.hear()
        assert (closed.code, action(closed.code)) == (Code.TOKEN_REVOKED, Action.RENEW)
        for node in nodes:
            await node.stop()

    @on_virtual_time
    async def test_other_nodes_that_cannot_be_told_are_named(self):
        broker = MemoryBroker()
        node = await Node(broker=broker).start()
        Phone(node.clock).join(node)
        revocations = Revocations(node.hub.registry, node.engine, unit="u1")
        await node.engine.close()
        with pytest.raises(RequestRefused) as refused:
            await revocations.revoke("demo", device="d1")
        assert refused.value.code == "unavailable"
        assert len(node.hub.registry) == 0
        node.engine = None
        await node.stop()


class TestQuotas:
    @on_virtual_time
    async def test_app_at_its_quota_of_sessions_is_refused_and_hurts_no_other(self):
        node = Node(quotas={"demo": Quota(sessions=2)})
        node.hub.keys = {**node.hub.keys, "other": {"k1": KEY.public_key()}}
        first = Phone(node.clock, "d1").join(node)
        Phone(node.clock, "d2").join(node)
        refused = Phone(node.clock, "d3")
        refused.dial(node)
        refused.machine = Connection(Role.CLIENT, 0.0)
        refused.machine.send_hello(refused.hello())
        refused.talk()
        (closed,) = refused.hear()
        assert (closed.code, closed.retry_after_s) == (Code.OVERLOADED, limits_platform.QUOTA_RETRY_S)
        Phone(node.clock, "d3", app="other").join(node)
        first.lose()
        assert (await first.back(node)).resumed  # what it has it keeps
        Phone(node.clock, "d2").join(node)
        first.machine.close()
        first.talk()
        Phone(node.clock, "d3").join(node)
        await node.stop()

    @on_virtual_time
    async def test_app_at_its_quota_of_calls_is_refused_and_hurts_no_other(self):
        node = Node(quotas={"demo": Quota(calls=2)})
        node.hub.keys = {**node.hub.keys, "other": {"k1": KEY.public_key()}}
        phone, other = Phone(node.clock).join(node), Phone(node.clock, "d2", app="other").join(node)
        for _ in range(3):
            phone.call("slow")
        await settle()
        (failed,) = phone.hear()
        assert (failed.call_id, failed.code) == (5, Code.CALL_TOO_MANY)
        assert failed.retry_after_s == limits_platform.CALL_RETRY_AFTER_S
        assert not failed.maybe_delivered
        other.call("now")
        await settle()
        assert [event.body for event in other.hear()] == [b"now"]
        node.gate.go.set()
        await settle()
        assert len(phone.hear()) == 2
        phone.call("now")
        await settle()
        assert [event.body for event in phone.hear()] == [b"now"]
        await node.stop()
