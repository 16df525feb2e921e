"""The two sides of PUSH on the memory engine: outcomes, repetitions, expiry."""

import asyncio

import pytest

from stormline.appgw import subjects
from stormline.appgw.port import Delivery, Push
from stormline.appgw.push import PushNode, PushService
from stormline.appgw.record import Record
from stormline.core import errors, limits, limits_platform
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.engine.port import reply_error
from stormline.net.clock import SystemClock, SystemRng


class Devices:
    """Sessions by device, and how each answers."""

    def __init__(self, **sessions):
        self.sessions = dict(sessions)
        self.outcome = Delivery.ACKED
        self.sent = []
        self.holding = False
        self.held = []
        self.asked = asyncio.Event()

    def session_of(self, app, device):
        return self.sessions.get(device)

    def push(self, app, device, push, told):
        self.sent.append(push.push_id)
        self.asked.set()
        if self.holding:
            self.held.append(told)
        else:
            told(self.outcome)


class Places:
    """The directory."""

    def __init__(self):
        self.answers = []

    async def lookup(self, app, device):
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer


class Node:
    def __init__(self, broker, name, **sessions):
        self.engine = MemoryEngine(broker)
        self.devices = Devices(**sessions)
        self.places = Places()
        self.receiver = PushNode(self.devices, unit="u1", node=name, clock=SystemClock())
        self.service = PushService(
            self.engine, self.places, self.receiver, unit="u1", node=name, clock=SystemClock(), rng=SystemRng()
        )


@pytest.fixture(name="broker")
def _broker():
    return MemoryBroker()


@pytest.fixture(name="a")
def _a(broker):
    return Node(broker, "a")


@pytest.fixture(name="b")
async def _b(broker):
    node = Node(broker, "b", d1="s1")
    await node.receiver.start(node.engine)
    return node


class TestService:
    async def test_push_goes_to_the_node_of_the_directory(self, a, b):
        a.places.answers = [Record("b", "", "s1", 1)]
        result = await a.service.push("demo", "d1", b"x", push_id="p1")
        assert (result.delivery, result.push_id, result.node) == (Delivery.ACKED, "p1", "b")
        assert b.devices.sent == ["p1"]

    async def test_id_is_drawn_where_the_sender_gave_none(self, a, b):
        a.places.answers = [Record("b", "", "s1", 1), Record("b", "", "s1", 1)]
        ids = {(await a.service.push("demo", "d1", b"x")).push_id for _ in range(2)}
        assert len(ids) == 2

    async def test_device_that_moved_meanwhile_is_followed_once(self, a, b):
        a.places.answers = [Record("gone", "", "s0", 1), Record("b", "", "s1", 2)]
        assert (await a.service.push("demo", "d1", b"x")).node == "b"

    async def test_node_that_died_is_offline(self, a):
        a.places.answers = [Record("gone", "", "s0", 1), Record("gone", "", "s0", 1)]
        result = await a.service.push("demo", "d1", b"x")
        assert (result.delivery, result.node) == (Delivery.OFFLINE, "")

    async def test_session_here_is_used_also_where_the_directory_knows_nothing(self, b):
        assert (await b.service.push("demo", "d1", b"x")).delivery is Delivery.ACKED
        b.places.answers = [errors.EngineUnavailable("away")]
        assert (await b.service.push("demo", "d1", b"x")).delivery is Delivery.ACKED

    async def test_engine_away_and_device_elsewhere_is_unavailable(self, a):
        a.places.answers = [errors.EngineUnavailable("away")]
        with pytest.raises(errors.RequestRefused) as raised:
            await a.service.push("demo", "d1", b"x")
        assert raised.value.code == "unavailable"

    async def test_engine_lost_while_waiting_is_unconfirmed(self, broker, a, b):
        b.devices.holding = True
        a.places.answers = [Record("b", "", "s1", 1)]
        waiting = asyncio.create_task(a.service.push("demo", "d1", b"x"))
        await b.devices.asked.wait()
        broker.cut()
        assert (await waiting).delivery is Delivery.UNCONFIRMED
        b.devices.held[0](Delivery.ACKED)

    async def test_malformed_order_of_another_node_is_refused(self, a, b):
        answer = await a.engine.request(subjects.of_node("u1", "b", "push"), b"\xc1", timeout_s=1.0)
        assert reply_error(answer)[0] == 400

    @pytest.mark.parametrize(
        ("fields", "code"),
        [
            ({"device": ""}, "bad-request"),
            ({"device": "d" * 129}, "bad-request"),
            ({"topic": "t" * 129}, "bad-request"),
            ({"push_id": "p" * 129}, "bad-request"),
            ({"push_id": "p\n"}, "bad-request"),
            ({"ttl_s": 0.0}, "bad-request"),
            ({"ttl_s": float("nan")}, "bad-request"),
            ({"body": bytes(limits.PUSH_BODY_BYTES_MAX + 1)}, "too-large"),
        ],
    )
    async def test_push_out_of_bounds_is_refused(self, b, fields, code):
        arguments = {"app": "demo", "device": "d1", "body": b"x", **fields}
        with pytest.raises(errors.RequestRefused) as raised:
            await b.service.push(arguments.pop("app"), arguments.pop("device"), arguments.pop("body"), **arguments)
        assert raised.value.code == code
        assert not b.devices.sent


class TestNode:
    async def deliver(self, node, push_id="p1", **fields):
        return await node.receiver.deliver("demo", "d1", Push(push_id, "", b"x", **fields))

    async def test_push_expired_is_not_sent(self, b):
        assert await self.deliver(b, expires_ms=1000) is Delivery.EXPIRED
        assert not b.devices.sent

    async def test_repetition_at_the_same_moment_shares_one_delivery(self, b):
        b.devices.holding = True
        waiting = [asyncio.create_task(self.deliver(b)) for _ in range(5)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # one who asked leaves: the others still hear
        b.devices.held[0](Delivery.ACKED)
        assert await asyncio.gather(*waiting[1:]) == [Delivery.ACKED] * 4
        assert b.devices.sent == ["p1"]

    async def test_repetition_after_busy_or_on_a_new_session_is_sent(self, b):
        b.devices.outcome = Delivery.BUSY
        assert await self.deliver(b) is Delivery.BUSY
        b.devices.outcome = Delivery.UNCONFIRMED
        assert await self.deliver(b) is Delivery.UNCONFIRMED
        assert await self.deliver(b) is Delivery.UNCONFIRMED
        assert len(b.devices.sent) == 2
        b.devices.sessions["d1"] = "s2"
        b.devices.outcome = Delivery.ACKED
        assert await self.deliver(b) is Delivery.ACKED
        del b.devices.sessions["d1"]
        assert await self.deliver(b) is Delivery.ACKED  # it was, whatever became of the device
        assert len(b.devices.sent) == 3

    async def test_memory_of_pushes_is_bounded(self, b, monkeypatch):
        monkeypatch.setattr(limits_platform, "PUSH_RECENT_MAX", 3)
        for number in range(5):
            await self.deliver(b, f"p{number}")
        await self.deliver(b, "p4")
        await self.deliver(b, "p0")
        assert b.devices.sent == ["p0", "p1", "p2", "p3", "p4", "p0"]

    async def test_acknowledgement_after_all_who_asked_have_gone_answers_a_repetition(self, b):
        b.devices.holding = True
        waiting = asyncio.create_task(self.deliver(b))
        await b.devices.asked.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
        b.devices.held[0](Delivery.ACKED)
        assert await self.deliver(b) is Delivery.ACKED
        assert b.devices.sent == ["p1"]

    async def test_acknowledgement_is_awaited_for_a_while_only(self, b, monkeypatch):
        monkeypatch.setattr(limits, "PUSH_ACK_TIMEOUT_S", 0.0)
        b.devices.holding = True
        assert await self.deliver(b) is Delivery.UNCONFIRMED
        assert await self.deliver(b) is Delivery.UNCONFIRMED  # the first may still be acknowledged
        assert b.devices.sent == ["p1"]

    async def test_push_the_session_does_not_take_is_not_remembered(self, b, monkeypatch):
        def broken(*arguments):
            raise errors.LocalProtocolError("too large")

        with monkeypatch.context() as patched:
            patched.setattr(b.devices, "push", broken)
            with pytest.raises(errors.LocalProtocolError):
                await self.deliver(b)
        assert await self.deliver(b) is Delivery.ACKED

    async def test_close_ends_deliveries_that_run(self, b):
        b.devices.holding = True
        waiting = asyncio.create_task(self.deliver(b))
        await b.devices.asked.wait()
        b.receiver.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
