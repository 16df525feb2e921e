"""Calls of devices to business services on the engine, while it is there and while it is not."""

import asyncio
import contextlib

import pytest

from stormline.core import limits
from stormline.core.codes import Code
from stormline.core.errors import CallError, EngineUnavailable
from stormline.engine.port import Reply, error_reply

pytestmark = pytest.mark.loopback


async def failing(device, method, **fields):
    with pytest.raises(CallError) as raised:
        await device.call("rpc", method, **fields)
    return raised.value


class TestCall:
    async def test_call_is_answered_by_the_service_that_learns_who_asks(self, gateway, bus, service, eventually):
        seen = []

        async def create(message):
            seen.append(message)
            return Reply(b"{" + message.data + b"}")

        await service.serve("rpc.orders.create", create)
        await gateway.start(bus.connect)
        device = await gateway.connect("d1", user="änn")
        await eventually(lambda: connected(gateway))
        answer = await device.call(
            "rpc", "orders.create", body=b"x", headers=(("idempotency-key", "k-1"), ("other", "1")), deadline_s=5.0
        )
        assert (answer.status, answer.headers, answer.body) == (0, {}, b"{x}")
        headers = {name: value for name, value in seen[0].headers.items() if not name.startswith("Nats-")}
        assert 0 < int(headers.pop("Stormline-Deadline-Ms")) <= 5000
        assert headers.pop("Stormline-Call")
        assert headers == {
            "Stormline-App": "demo",
            "Stormline-Device": "d1",
            "Stormline-User": "%C3%A4nn",
            "Idempotency-Key": "k-1",
        }

    async def test_large_argument_and_result_go_in_chunks(self, gateway, bus, service, eventually):
        async def echo(message):
            return Reply(message.data)

        await service.serve("rpc.big.echo", echo)
        await gateway.start(bus.connect)
        device = await gateway.connect()
        await eventually(lambda: connected(gateway))
        chunks = [bytes([n % 256]) * 10_000 for n in range(70)]
        call = device.open("rpc", "big.echo", more=True)
        _, answer = await asyncio.gather(device.upload(call, chunks), device.answer(call))
        assert answer.body == b"".join(chunks)

    async def test_refusals_have_their_codes(self, gateway, bus, service, eventually):
        async def no(message):
            return error_reply(int(message.data), "because")

        async def never(message):
            await asyncio.Event().wait()
            return Reply()

        await service.serve("rpc.say.no", no)
        await service.serve("rpc.say.nothing", never)
        await gateway.start(bus.connect)
        device = await gateway.connect()
        await eventually(lambda: connected(gateway))

        error = await failing(device, "say.no", body=b"409")
        assert (error.code, error.reason, error.maybe_delivered) == (Code.CALL_FAILED, "409 because", False)
        error = await failing(device, "say.no", body=b"500")
        assert (error.code, error.reason, error.maybe_delivered) == (Code.CALL_FAILED, "500 because", True)
        error = await failing(device, "say.no", body=b"503")
        assert (error.code, error.maybe_delivered) == (Code.CALL_UNAVAILABLE, False)
        assert error.retry_after_s
        error = await failing(device, "nobody.listens")
        assert (error.code, error.maybe_delivered) == (Code.CALL_NOT_FOUND, False)
        error = await failing(device, "say.nothing", deadline_s=0.3)
        assert (error.code, error.maybe_delivered) == (Code.CALL_DEADLINE, True)
        for method in ("", "one", "a.>", "a.*", "A.b", "a..b", "a b.c", "rpc." + "x" * 200):
            assert (await failing(device, method)).code == Code.CALL_BAD_REQUEST
        for keys in (["a b"], ["ä"], ["x" * 256], ["a", "b"], [""]):
            headers = tuple(("Idempotency-Key", key) for key in keys)
            assert (await failing(device, "say.no", body=b"409", headers=headers)).code == Code.CALL_BAD_REQUEST

    async def test_argument_beyond_the_bound_is_refused(self, gateway, bus, service, eventually):
        await gateway.start(bus.connect)
        device = await gateway.connect()
        await eventually(lambda: connected(gateway))
        call = device.open("rpc", "too.large", more=True)
        chunk = bytes(limits.CHUNK_BYTES_MAX)
        upload = asyncio.create_task(device.upload(call, [chunk] * (limits.CALL_BODY_BYTES_MAX // len(chunk) + 1)))
        with pytest.raises(CallError) as raised:
            await device.answer(call)
        assert raised.value.code == Code.CALL_TOO_LARGE
        upload.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await upload

    async def test_argument_that_never_ends_is_a_deadline_and_undelivered(self, gateway, bus, service, eventually):
        await gateway.start(bus.connect)
        device = await gateway.connect()
        await eventually(lambda: connected(gateway))
        call = device.open("rpc", "not.whole", more=True, deadline_s=0.2)
        with pytest.raises(CallError) as raised:
            await device.answer(call)
        assert (raised.value.code, raised.value.maybe_delivered) == (Code.CALL_DEADLINE, False)


class TestEngineAway:
    async def test_engine_cut_and_healed_sessions_stay_and_calls_work_again(self, gateway, bus, service, eventually):
        async def echo(message):
            return Reply(message.data)

        await service.serve("rpc.a.echo", echo)
        await gateway.start(bus.connect)
        device = await gateway.connect()
        await eventually(lambda: connected(gateway))
        assert (await device.call("rpc", "a.echo", body=b"1")).body == b"1"
        await bus.cut()
        await eventually(lambda: not_connected(gateway))
        error = await failing(device, "a.echo", body=b"2")
        assert (error.code, error.maybe_delivered) == (Code.CALL_UNAVAILABLE, False)
        assert error.retry_after_s
        other = await gateway.connect("d2")  # and new sessions come
        health = (await gateway.admin.get("/healthz")).json()
        assert (health["status"], health["engine"], health["sessions"]) == ("ok", "unavailable", 2)
        await bus.heal()
        await eventually(lambda: connected(gateway))

        async def answers():
            try:
                return (await other.call("rpc", "a.echo", body=b"3")).body == b"3"
            except CallError:
                return False

        await eventually(answers)
        assert (await device.call("rpc", "a.echo", body=b"4")).body == b"4"

    async def test_engine_away_at_the_start_is_found_later(self, gateway, bus, service, eventually):
        async def echo(message):
            return Reply(message.data)

        await service.serve("rpc.a.echo", echo)
        await bus.cut()

        async def connect():
            engine = await bus.connect()
            if not engine.connected:
                raise EngineUnavailable("not yet")
            return engine

        await gateway.start(connect)
        device = await gateway.connect()
        assert (await failing(device, "a.echo")).code == Code.CALL_UNAVAILABLE
        await bus.heal()
        await eventually(lambda: connected(gateway))

        async def answers():
            try:
                return (await device.call("rpc", "a.echo", body=b"3")).body == b"3"
            except CallError:
                return False

        await eventually(answers)


async def connected(gateway):
    return (await gateway.admin.get("/healthz")).json()["engine"] == "connected"


async def not_connected(gateway):
    return not await connected(gateway)
