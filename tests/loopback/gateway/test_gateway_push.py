"""Pushes from the business API to devices: here, on another node, gone, deaf, and while the engine is away."""

import asyncio
import base64

import pytest

from stormline.core import limits, limits_platform
from stormline.core.codes import Code
from stormline.wire import events as e

pytestmark = pytest.mark.loopback


async def push(gateway, device="d1", **fields):
    fields.setdefault("body", {"a": 1})
    answer = await gateway.admin.post("/v1/push", json={"device": device, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def online(gateway, device="d1"):
    return (await gateway.admin.get(f"/v1/devices/{device}")).json()


class TestPush:
    async def test_push_is_acknowledged_by_the_device(self, gateway, bus):
        await gateway.start(bus.connect)
        device = await gateway.connect("d1")
        result = await push(gateway, topic="news", id="p1")
        assert result == {"state": "acked", "id": "p1", "node": "n1"}
        event = await device.next(e.PushReceived)
        assert (event.push_id, event.topic, event.body) == ("p1", "news", b'{"a":1}')
        assert event.expires_ms is not None

    async def test_push_of_bytes_arrives_as_they_are(self, gateway):
        await gateway.start()
        device = await gateway.connect("d1")
        body = bytes(range(256)) * 128  # the largest
        fields = {"device": "d1", "body_base64": base64.b64encode(body).decode()}
        result = (await gateway.admin.post("/v1/push", json=fields)).json()
        assert result["state"] == "acked"
        event = await device.next(e.PushReceived)
        assert event.body == body
        assert event.push_id == result["id"]

    async def test_push_to_nobody_is_offline(self, gateway, bus, eventually):
        await gateway.start(bus.connect)
        assert await push(gateway, id="p1") == {"state": "offline", "id": "p1", "node": ""}
        device = await gateway.connect("d1")
        await device.close()

        async def offline():
            return (await push(gateway))["state"] == "offline"

        await eventually(offline)

    async def test_push_without_acknowledgement_is_unconfirmed_and_not_sent_twice(self, gateway):
        await gateway.start()
        device = await gateway.connect("d1")
        device.ack = False
        results = await asyncio.gather(push(gateway, id="p1"), push(gateway, id="p1"))
        assert [one["state"] for one in results] == ["unconfirmed", "unconfirmed"]
        assert (await push(gateway, id="p1"))["state"] == "unconfirmed"
        assert (await device.next(e.PushReceived)).push_id == "p1"
        assert device.events.empty()

    async def test_push_with_an_id_seen_before_is_delivered_once(self, gateway, bus):
        await gateway.start(bus.connect)
        device = await gateway.connect("d1")
        for _ in range(3):
            assert (await push(gateway, id="p1"))["state"] == "acked"
        await push(gateway, id="p2")
        got = [(await device.next(e.PushReceived)).push_id for _ in range(2)]
        assert got == ["p1", "p2"]
        again = await gateway.connect("d1")  # what was acknowledged stays so on the next session
        assert (await push(gateway, id="p1"))["state"] == "acked"
        assert again.events.empty()

    async def test_push_unconfirmed_on_a_lost_session_is_sent_on_the_next(self, gateway):
        await gateway.start()
        device = await gateway.connect("d1")
        device.ack = False
        waiting = asyncio.create_task(push(gateway, id="p1"))
        await device.next(e.PushReceived)
        again = await gateway.connect("d1")
        assert (await waiting)["state"] == "unconfirmed"
        assert (await push(gateway, id="p1"))["state"] == "acked"
        assert (await again.next(e.PushReceived)).push_id == "p1"

    async def test_pushes_beyond_what_may_be_unacknowledged_are_busy(self, gateway):
        await gateway.start()
        device = await gateway.connect("d1")
        device.ack = False
        waiting = [asyncio.create_task(push(gateway)) for _ in range(limits.PUSHES_UNACKED_MAX)]
        for _ in waiting:
            await device.next(e.PushReceived)
        assert (await push(gateway))["state"] == "busy"
        await asyncio.gather(*waiting)


class TestNodes:
    async def test_push_crosses_to_the_node_that_holds_the_session(self, gateway, second, bus, eventually):
        await gateway.start(bus.connect)
        await second.start(bus.connect, node="n2")
        device = await second.connect("d1")

        async def found():
            return (await online(gateway))["node"] == "n2"

        await eventually(found)
        assert await push(gateway, id="p1") == {"state": "acked", "id": "p1", "node": "n2"}
        assert (await device.next(e.PushReceived)).push_id == "p1"

    async def test_device_that_moves_is_found_where_it_went(self, gateway, second, bus, eventually):
        await gateway.start(bus.connect)
        await second.start(bus.connect, node="n2")
        first = await gateway.connect("d1")

        async def at(node):
            return (await online(second))["node"] == node

        await eventually(lambda: at("n1"))
        moved = await second.connect("d1")
        await eventually(lambda: found_at(gateway, "n2"))
        first.vanish()  # and its late end takes nothing away from the new one
        await eventually(lambda: no_sessions(gateway))
        assert await push(gateway, id="p1") == {"state": "acked", "id": "p1", "node": "n2"}
        assert (await moved.next(e.PushReceived)).push_id == "p1"

    async def test_sessions_are_announced_again_when_the_engine_returns(self, gateway, second, bus, eventually):
        await gateway.start(bus.connect)
        await second.start(bus.connect, node="n2")
        devices = [await second.connect(f"d{number}") for number in range(40)]
        await eventually(lambda: found_at(gateway, "n2", "d39"))
        await bus.cut()
        await eventually(lambda: away(gateway))
        moved = await gateway.connect("d0")  # a newer session, opened while nobody could know
        assert (await push(gateway, "d0"))["state"] == "acked"  # it is here, so it needs no engine
        answer = await gateway.admin.post("/v1/push", json={"device": "d1", "body": 1})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert answer.headers["retry-after"]
        await bus.heal()
        for number in range(1, 40):
            await eventually(lambda number=number: found_at(gateway, "n2", f"d{number}"))
        await eventually(lambda: found_at(second, "n1", "d0"))
        assert (await devices[0].wait_closed()).code == Code.REPLACED
        assert (await push(second, "d0"))["node"] == "n1"
        assert (await push(gateway, "d7"))["state"] == "acked"
        assert moved.machine.state.value == "open"


class TestApi:
    async def test_key_missing_or_wrong_is_refused(self, gateway):
        await gateway.start()
        for headers in ({"authorization": ""}, {"authorization": "Bearer wrong"}, {"authorization": "Basic x"}):
            for method, path in (("POST", "/v1/push"), ("GET", "/v1/devices/d1"), ("GET", "/v1/sessions")):
                answer = await gateway.admin.request(method, path, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
                assert answer.headers["www-authenticate"].startswith("Bearer")
        assert (await gateway.admin.get("/healthz", headers={"authorization": ""})).status_code == 200

    @pytest.mark.parametrize(
        ("fields", "status", "code"),
        [
            ({}, 400, "bad-request"),
            ({"device": "d1"}, 400, "bad-request"),
            ({"device": "", "body": 1}, 400, "bad-request"),
            ({"device": "d" * 129, "body": 1}, 400, "bad-request"),
            ({"device": "d1", "body": 1, "body_base64": "AA=="}, 400, "bad-request"),
            ({"device": "d1", "body_base64": "?"}, 400, "bad-request"),
            ({"device": "d1", "body": 1, "ttl_s": 0}, 400, "bad-request"),
            ({"device": "d1", "body": 1, "ttl_s": 1e12}, 400, "bad-request"),
            ({"device": "d1", "body": 1, "id": "x" * 129}, 400, "bad-request"),
            ({"device": "d1", "body": 1, "id": "ä"}, 400, "bad-request"),
            ({"device": "d1", "body": 1, "topic": "t" * 129}, 400, "bad-request"),
            ({"device": "d1", "body": 1, "unknown": 1}, 400, "bad-request"),
            ({"device": "d1", "body": 1, "app": "other"}, 404, "not-found"),
            ({"device": "d1", "body": "x" * limits.PUSH_BODY_BYTES_MAX}, 413, "too-large"),
            ({"device": "d1", "body": "x" * limits_platform.ADMIN_BODY_BYTES_MAX}, 413, "too-large"),
        ],
    )
    async def test_push_malformed_is_refused_with_the_reason(self, gateway, fields, status, code):
        await gateway.start()
        answer = await gateway.admin.post("/v1/push", json=fields)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert answer.json()["error"]["message"]

    async def test_other_paths_and_methods_answer_in_the_same_form(self, gateway):
        await gateway.start()
        answer = await gateway.admin.get("/nothing")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not-found")
        answer = await gateway.admin.get("/v1/push")
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method-not-allowed")
        answer = await gateway.admin.post("/v1/push", content=b"{")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad-request")
        answer = await gateway.admin.post("/v1/push", content=b"[" * 100_000)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad-request")

    async def test_presence_and_sessions_tell_what_is(self, gateway, bus, eventually):
        await gateway.start(bus.connect)
        device = await gateway.connect("a/b c", user="ann")
        await gateway.connect("d2")
        assert (await online(gateway, "a%2Fb%20c")) == {
            "app": "demo",
            "device": "a/b c",
            "online": True,
            "node": "n1",
            "session": device.welcome.session,
        }
        assert (await online(gateway, "nobody"))["online"] is False
        answer = (await gateway.admin.get("/v1/sessions", params={"limit": 1})).json()
        assert (answer["count"], len(answer["sessions"]), answer["node"]) == (2, 1, "n1")
        assert answer["sessions"][0]["user"] == "ann"
        assert (await gateway.admin.get("/v1/sessions", params={"limit": -1})).status_code == 400

    async def test_openapi_describes_every_endpoint(self, gateway):
        await gateway.start()
        paths = (await gateway.admin.get("/openapi.json")).json()["paths"]
        upstreams = {"/v1/upstreams", "/v1/upstreams/health", "/v1/identity-keys"}
        assert set(paths) - upstreams == {
            "/v1/audit",
            "/v1/calls",
            "/v1/devices/{device}",
            "/v1/keys",
            "/v1/keys/{key_id}",
            "/v1/presence",
            "/v1/presence/counts",
            "/v1/presence/devices/{device}",
            "/v1/presence/users/{user}",
            "/v1/push",
            "/v1/revocations",
            "/v1/sessions",
            "/v1/load",
            "/healthz",
        }
        assert upstreams < set(paths)


async def found_at(gateway, node, device="d1"):
    answer = await gateway.admin.get(f"/v1/devices/{device}")
    return answer.status_code == 200 and answer.json()["node"] == node


async def no_sessions(gateway):
    return await gateway.sessions() == 0


async def away(gateway):
    return (await gateway.admin.get("/healthz")).json()["engine"] == "unavailable"
