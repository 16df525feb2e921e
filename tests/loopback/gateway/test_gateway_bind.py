"""Whose a session is, changed while it stands: for services, for the directory and for who ends a user's sessions."""

import asyncio
import json

import pytest
from tests.loopback.gateway.conftest import APP, token

from stormline.core.codes import Code
from stormline.core.errors import CallError
from stormline.engine.port import Reply
from stormline.wire import events as e
from stormline.wire import messages as m

pytestmark = pytest.mark.loopback


async def bind(device, user, of="d1"):
    answer = await device.call("session", "bind", body=token(of, user=user).encode())
    return json.loads(answer.body)


async def test_calls_after_it_are_the_user_s_and_one_under_way_is_not(gateway, bus, service, eventually):
    seen, go = [], asyncio.Event()

    async def note(message):
        seen.append(message.headers.get("Stormline-User", ""))
        await go.wait()
        return Reply(b"1")

    await service.serve("rpc.who.am-i", note)
    await gateway.start(bus.connect)
    device = await gateway.connect("d1")

    async def connected():
        return (await gateway.admin.get("/healthz")).json()["engine"] == "connected"

    await eventually(connected)
    first = device.open("rpc", "who.am-i")

    async def begun():
        return len(seen) == 1

    await eventually(begun)
    assert (await bind(device, "ann"))["user"] == "ann"
    second = device.open("rpc", "who.am-i")
    go.set()
    assert [(await device.answer(each)).body for each in (first, second)] == [b"1", b"1"]
    assert seen == ["", "ann"]


async def test_directory_and_revocation_know_the_user(gateway, bus, eventually):
    await gateway.start(bus.connect)
    device = await gateway.connect("d1")
    await bind(device, "ann")

    async def found():
        answer = (await gateway.admin.get("/v1/presence/users/ann")).json()
        return [each["device"] for each in answer["devices"]] == ["d1"]

    await eventually(found)
    await bind(device, "bob")

    async def moved():
        gone = (await gateway.admin.get("/v1/presence/users/ann")).json()["devices"] == []
        there = (await gateway.admin.get("/v1/presence/users/bob")).json()["devices"]
        return gone and len(there) == 1

    await eventually(moved)
    assert (await gateway.admin.post("/v1/revocations", json={"user": "ann"})).json() == {"ended": 0}
    assert (await gateway.admin.post("/v1/revocations", json={"user": "bob"})).json() == {"ended": 1}
    assert (await device.next(e.Closed)).code == Code.REVOKED


@pytest.mark.parametrize(
    ("user", "token_of_now", "resumed"), [("ann", True, True), ("ann", False, False), ("", True, False)]
)
async def test_session_goes_on_by_the_new_resume_token_and_as_the_new_user_alone(gateway, user, token_of_now, resumed):
    await gateway.start()
    device = await gateway.open()
    welcome = await device.hello(app=APP, token=token("d1"), capabilities=(m.RESUME,))
    bound = await bind(device, "ann")
    device.writer.transport.abort()
    other = await gateway.open()
    got = await other.hello(
        app=APP,
        token=token("d1", user=user),
        resume=bound["resume"] if token_of_now else welcome.resume,
        received=1,
        capabilities=(m.RESUME,),
    )
    assert (got.resumed, got.session == welcome.session, got.user) == (resumed, resumed, user)


async def test_what_is_no_binding_is_refused(gateway):
    await gateway.start()
    device = await gateway.connect("d1")
    for method, body, code in (
        ("unbind", b"", Code.CALL_NOT_FOUND),
        ("bind", b"", Code.CALL_REFUSED),
        ("bind", b"\xff", Code.CALL_REFUSED),
        ("bind", token("d2", user="ann").encode(), Code.CALL_REFUSED),
    ):
        with pytest.raises(CallError) as raised:
            await device.call("session", method, body=body)
        assert (raised.value.code, raised.value.maybe_delivered) == (code, False)
    call = device.open("session", "bind", body=b"x", more=True)
    with pytest.raises(CallError) as raised:
        await device.answer(call)
    assert raised.value.code == Code.CALL_TOO_LARGE
