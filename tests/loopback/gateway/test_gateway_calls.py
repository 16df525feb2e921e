"""Businesses call devices: over HTTP and over NATS, on this node and another; what goes wrong has its word."""

import asyncio
import contextlib

import pytest

from stormline.core import limits
from stormline.core.codes import Code
from stormline.core.ids import subject_token
from stormline.wire import events as e

pytestmark = pytest.mark.loopback


async def serve(device, answer):
    """Have a device answer the calls it gets: `answer(event)` gives a body, or a code to fail with."""
    while True:
        event = await device.next(e.CallReceived, wait_s=60)
        given = answer(event)
        if isinstance(given, bytes):
            size = limits.CHUNK_BYTES_MAX
            device.machine.send_reply(event.call_id, 0, body=given[:size], more=len(given) > size)
            for at in range(size, len(given), size):
                device.machine.send_data(event.call_id, given[at : at + size], end=at + size >= len(given))
        elif given is not None:
            device.machine.send_fail(event.call_id, given, "no", maybe_delivered=given is Code.CALL_FAILED)
        device.flush()


@pytest.fixture(name="serving")
async def _serving():
    tasks = []

    def start(device, answer):
        tasks.append(asyncio.create_task(serve(device, answer)))

    yield start
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def call(gateway, device="d1", method="door.open", headers=None, **fields):
    answer = await gateway.admin.post(
        "/v1/calls", json={"device": device, "method": method, **fields}, headers=headers or {}
    )
    return answer.status_code, answer.json()


def word(answer):
    status, body = answer
    assert body["error"]["message"] == body["detail"]
    return status, body["error"]["code"], body["maybe_delivered"]


class TestHttp:
    async def test_device_answers_on_this_node_and_on_another(self, gateway, second, bus, serving, eventually):
        await gateway.start(bus.connect)
        await second.start(bus.connect, node="n2")
        calls = []

        def answer(event):
            calls.append(event)
            return b'{"got":' + event.body + b"}"

        for node, name in ((gateway, "d1"), (second, "d2")):
            serving(await node.connect(name), answer)
        await eventually(lambda: known(gateway, "d2"))
        for name in ("d1", "d2"):
            assert await call(gateway, name, params={"x": [1]}) == (200, {"result": {"got": {"x": [1]}}})
        assert await call(gateway, "d2") == (200, {"result": {"got": None}})
        assert {(one.gate, one.method) for one in calls} == {("rpc", "door.open")}
        assert all(0 < one.deadline_s <= limits.CALL_DEADLINE_S for one in calls)

    async def test_large_arguments_and_answers_go_in_chunks(self, gateway, second, bus, serving, eventually):
        await gateway.start(bus.connect)
        await second.start(bus.connect, node="n2")
        device = await second.connect("d1")
        size = 100_000

        async def answer():
            event = await device.next(e.CallReceived)
            body = bytearray(event.body)
            while True:
                data = await device.next(e.DataReceived)
                body += data.body
                if data.end:
                    break
            device.machine.send_reply(event.call_id, 0, body=bytes(body[: limits.CHUNK_BYTES_MAX]), more=True)
            for at in range(limits.CHUNK_BYTES_MAX, len(body), 5000):
                device.machine.send_data(event.call_id, bytes(body[at : at + 5000]), end=at + 5000 >= len(body))
            device.flush()

        await eventually(lambda: known(gateway, "d1"))
        answering = asyncio.create_task(answer())
        assert await call(gateway, params="x" * size) == (200, {"result": "x" * size})
        await answering

    async def test_what_goes_wrong_has_its_word(self, gateway, second, bus, serving, eventually):
        await gateway.start(bus.connect)
        await second.start(bus.connect, node="n2")
        outcomes = {
            "no.such": Code.CALL_NOT_FOUND,
            "is.busy": Code.CALL_TOO_MANY,
            "has.failed": Code.CALL_FAILED,
            "not.json": b"{",
            "no.answer": None,
        }
        for node, name in ((gateway, "d1"), (second, "d2")):
            serving(await node.connect(name), lambda event: outcomes[event.method])
        await eventually(lambda: known(gateway, "d2"))
        for name in ("d1", "d2"):
            assert word(await call(gateway, name, "no.such")) == (405, "no-handler", False)
            assert word(await call(gateway, name, "is.busy")) == (503, "busy", False)
            assert word(await call(gateway, name, "has.failed")) == (502, "failed", True)
            assert word(await call(gateway, name, "not.json")) == (502, "failed", True)
            assert word(await call(gateway, name, "no.answer", deadline_s=0.2)) == (504, "deadline", True)
        assert word(await call(gateway, "nobody")) == (404, "offline", False)
        assert word(await call(gateway, method="notdotted")) == (400, "bad-request", False)
        assert word(await call(gateway, params="x" * limits.CREDIT_BYTES)) == (413, "too-large", False)

    async def test_session_that_ends_in_the_middle_may_have_done_it(self, gateway, bus):
        await gateway.start(bus.connect)
        device = await gateway.connect("d1")
        waiting = asyncio.create_task(call(gateway))
        await device.next(e.CallReceived)
        device.vanish()
        assert word(await waiting) == (504, "deadline", True)

    async def test_caller_that_goes_away_cancels_the_call(self, gateway, second, bus, eventually):
        await gateway.start(bus.connect)
        await second.start(bus.connect, node="n2")
        for node, name in ((gateway, "d1"), (second, "d2")):
            device = await node.connect(name)
            await eventually(lambda name=name: known(gateway, name))
            waiting = asyncio.create_task(call(gateway, name))
            event = await device.next(e.CallReceived)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            assert (await device.next(e.CallCancelled)).call_id == event.call_id


class TestNats:
    @pytest.mark.parametrize("bus", ["nats"], indirect=True)
    async def test_business_calls_a_device_by_subject(self, gateway, second, bus, service, serving, eventually):
        await gateway.start(bus.connect)
        await second.start(bus.connect, node="n2")
        keys = []

        def answer(event):
            keys.append(dict(event.headers))
            return Code.CALL_NOT_FOUND if event.method != "door.open" else b"<" + event.body + b">"

        serving(await second.connect("d.1"), answer)
        await eventually(lambda: known(gateway, "d.1"))

        async def ask(subject, body=b"", **headers):
            message = await service._client.request(
                subject, body, timeout=10, headers={name.replace("_", "-"): value for name, value in headers.items()}
            )
            given = message.headers or {}
            return given.get("Nats-Service-Error-Code"), given.get("Nats-Service-Error", ""), message.data

        to = f"device.demo.{subject_token('d.1')}"
        for _ in range(4):  # whichever node takes it
            assert await ask(f"{to}.door.open", b"now", Idempotency_Key="k1") == (None, "", b"<now>")
        assert keys[0] == {"idempotency-key": "k1"}
        assert (await ask(f"{to}.door.shut"))[:2] == ("405", "no-handler: no")
        assert (await ask(f"device.demo.{subject_token('nobody')}.door.open"))[0] == "404"
        assert (await ask(f"device.other.{subject_token('d.1')}.door.open"))[0] == "400"
        assert (await ask("device.demo.NOTATOKEN.door.open"))[0] == "400"
        assert (await ask(f"{to}.door.open", Stormline_Deadline_Ms="soon"))[0] == "400"


async def known(gateway, device):
    return (await gateway.admin.get(f"/v1/devices/{device}")).json()["online"]
