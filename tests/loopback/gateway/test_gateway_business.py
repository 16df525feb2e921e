"""Keys, scopes, rates, idempotency and audit of the business API; and schemathesis tries all of it."""

import asyncio
import contextlib

import hypothesis
import pytest

from stormline.core import limits_platform
from stormline.wire import events as e

pytestmark = pytest.mark.loopback


async def make_key(gateway, *scopes, **fields):
    answer = await gateway.admin.post("/v1/keys", json={"scopes": list(scopes), **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def bearer(made):
    return {"authorization": f"Bearer {made['key']}"}


async def keys_known(gateway):
    answer = await gateway.admin.get("/v1/presence/counts", headers={"authorization": "Bearer slk_a_b"})
    return answer.status_code == 401


def code(answer):
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == answer.status_code
    return answer.status_code, body["error"]["code"]


class TestKeys:
    async def test_key_allows_its_scopes_until_it_is_revoked_on_every_node(self, gateway, second, bus, eventually):
        await gateway.start(bus.connect)
        await second.start(bus.connect, node="n2")
        await eventually(lambda: keys_known(gateway))
        await eventually(lambda: keys_known(second))
        made = await make_key(gateway, "push", "presence", label="shop backend")
        assert made["key"].startswith(f"slk_{made['id']}_")
        assert (made["app"], made["scopes"]) == ("demo", ["push", "presence"])

        async def works(node):
            return (await node.admin.get("/v1/presence/counts", headers=bearer(made))).status_code == 200

        assert await works(gateway)
        await eventually(lambda: works(second))
        push = {"device": "d1", "body": 1}
        assert (await second.admin.post("/v1/push", json=push, headers=bearer(made))).json()["state"] == "offline"
        call = {"device": "d1", "method": "a.b"}
        assert code(await second.admin.post("/v1/calls", json=call, headers=bearer(made))) == (403, "forbidden")
        for path in ("/v1/keys", "/v1/audit", "/v1/sessions"):
            assert code(await gateway.admin.get(path, headers=bearer(made))) == (403, "forbidden")
        listed = (await second.admin.get("/v1/keys")).json()["keys"]
        assert [one["label"] for one in listed] == ["shop backend"]
        assert made["key"] not in str(listed)
        assert (await second.admin.delete(f"/v1/keys/{made['id']}")).json() == {"id": made["id"]}
        assert code(await second.admin.get("/v1/presence/counts", headers=bearer(made))) == (401, "unauthorized")

        async def ended():
            return not await works(gateway)

        await eventually(ended)
        assert code(await second.admin.delete(f"/v1/keys/{made['id']}")) == (404, "not-found")

    async def test_wrong_secrets_and_scopes_are_refused(self, gateway, bus, eventually):
        await gateway.start(bus.connect)
        await eventually(lambda: keys_known(gateway))
        made = await make_key(gateway, "push")
        for text in ("x", "slk_", f"slk_{made['id']}_", f"slk_{made['id']}_wrong", made["key"][:-1], made["key"] + "a"):
            answer = await gateway.admin.post("/v1/push", json={}, headers={"authorization": f"Bearer {text}"})
            assert code(answer) == (401, "unauthorized"), text
        assert code(await gateway.admin.post("/v1/keys", json={"scopes": ["keys"]})) == (400, "bad-request")
        assert code(await gateway.admin.post("/v1/keys", json={"scopes": []})) == (400, "bad-request")
        fields = {"scopes": ["push"], "app": "other"}
        assert code(await gateway.admin.post("/v1/keys", json=fields)) == (404, "not-found")

    async def test_key_that_asks_too_often_waits(self, gateway, eventually, monkeypatch):
        monkeypatch.setattr(limits_platform, "API_KEY_RATE_PER_S", 0.001)
        monkeypatch.setattr(limits_platform, "API_KEY_BURST", 3)
        await gateway.start()
        await eventually(lambda: keys_known(gateway))
        made = await make_key(gateway, "presence")
        answers = [await gateway.admin.get("/v1/presence/counts", headers=bearer(made)) for _ in range(4)]
        assert [answer.status_code for answer in answers[:3]] == [200] * 3
        assert code(answers[3]) == (429, "too-many")
        assert int(answers[3].headers["retry-after"]) >= 1
        assert (await gateway.admin.get("/v1/presence/counts")).status_code == 200  # the operator has no rate


class TestIdempotency:
    async def test_request_sent_again_is_done_once_on_every_node(self, gateway, second, bus, eventually):
        await gateway.start(bus.connect)
        await second.start(bus.connect, node="n2")
        device = await gateway.connect("d1")
        calls = []

        async def serve():
            while True:
                calls.append(event := await device.next(e.CallReceived, wait_s=60))
                device.machine.send_reply(event.call_id, 0, body=str(len(calls)).encode())
                device.flush()

        serving = asyncio.create_task(serve())

        async def known():
            return (await second.admin.get("/v1/devices/d1")).json()["online"]

        await eventually(known)
        order, key = {"device": "d1", "method": "door.open"}, {"idempotency-key": "k-1"}
        first = await gateway.admin.post("/v1/calls", json=order, headers=key)
        again = await second.admin.post("/v1/calls", json=order, headers=key)
        assert first.json() == again.json() == {"result": 1}
        assert ("idempotency-replayed" in first.headers, again.headers["idempotency-replayed"]) == (False, "true")
        other = await second.admin.post("/v1/calls", json={**order, "params": 2}, headers=key)
        assert code(other) == (422, "key-reused")
        assert (await second.admin.post("/v1/calls", json=order)).json() == {"result": 2}  # without a key it is new
        push = await second.admin.post("/v1/push", json={"device": "d1", "body": 1}, headers=key)
        assert push.json()["state"] == "acked"  # a key belongs to its endpoint
        assert len(calls) == 2
        serving.cancel()

    async def test_request_under_way_is_a_conflict_and_what_was_not_done_may_be_sent_again(self, gateway, bus):
        await gateway.start(bus.connect)
        order, key = {"device": "d1", "method": "door.open"}, {"idempotency-key": "k-1"}
        missing = await gateway.admin.post("/v1/calls", json=order, headers=key)
        assert code(missing) == (404, "offline")
        device = await gateway.connect("d1")
        waiting = asyncio.create_task(gateway.admin.post("/v1/calls", json=order, headers=key))
        event = await device.next(e.CallReceived)
        assert code(await gateway.admin.post("/v1/calls", json=order, headers=key)) == (409, "conflict")
        device.vanish()  # whether it was done is not known, and stays so
        assert code(await waiting) == (504, "deadline")
        await gateway.connect("d1")
        again = await gateway.admin.post("/v1/calls", json=order, headers=key)
        assert code(again) == (504, "deadline")
        assert again.json()["maybe_delivered"] is True
        assert event.method == "door.open"

    async def test_engine_away_a_request_with_a_key_is_not_done(self, gateway, bus, eventually):
        await gateway.start(bus.connect)
        device = await gateway.connect("d1")
        await bus.cut()

        async def refused():
            answer = await gateway.admin.post(
                "/v1/push", json={"device": "d1", "body": 1}, headers={"idempotency-key": "k"}
            )
            return answer.status_code == 503

        await eventually(refused)
        while not device.events.empty():
            device.events.get_nowait()
        await gateway.admin.post("/v1/push", json={"device": "d1", "body": 1}, headers={"idempotency-key": "k"})
        assert device.events.empty()
        await bus.heal()


class TestAudit:
    async def test_everything_asked_is_noted_without_what_was_sent(self, gateway, bus, eventually):
        await gateway.start(bus.connect)
        await eventually(lambda: keys_known(gateway))
        made = await make_key(gateway, "push")
        await gateway.admin.post("/v1/push", json={"device": "d1", "body": "the secret text"}, headers=bearer(made))
        await gateway.admin.get("/v1/presence/users/ann", headers=bearer(made))

        async def noted():
            deeds = (await gateway.admin.get("/v1/audit")).json()["deeds"]
            return [deed for deed in deeds if deed["who"] == made["id"]]

        await eventually(noted)
        [push] = await noted()
        del push["at_ms"]
        assert push == {
            "node": "n1",
            "who": made["id"],
            "app": "demo",
            "what": "push",
            "target": "d1",
            "result": "ok",
        }
        deeds = (await gateway.admin.get("/v1/audit")).json()["deeds"]
        assert [one for one in deeds if one["target"] == made["id"] and one["who"] == "operator"]
        assert "secret text" not in str(deeds)
        assert made["key"] not in str(deeds)


class TestSchemathesis:
    @pytest.mark.timeout(120)
    async def test_every_endpoint_answers_as_its_description_says(self, gateway, bus):
        if not hasattr(bus, "broker"):
            pytest.skip("one engine is enough")
        await gateway.start(bus.connect)
        device = await gateway.connect("0")

        async def serve():
            while True:
                event = await device.next(e.CallReceived, wait_s=120)
                device.machine.send_reply(event.call_id, 0, body=event.body)
                device.flush()

        serving = asyncio.create_task(serve())
        try:
            tried = await asyncio.to_thread(_try_all, f"{gateway.admin.base_url}", dict(gateway.admin.headers))
        finally:
            serving.cancel()
        assert len(tried) == 19


def _try_all(origin, headers):
    """Have schemathesis make requests, right and wrong ones, for every operation; give the operations."""
    import schemathesis
    from schemathesis import checks

    schema = schemathesis.openapi.from_url(f"{origin}/openapi.json", headers=headers)
    tried = []
    checks.load_all_checks()
    chosen = [
        checks.CHECKS.get_one(name)
        for name in ("content_type_conformance", "response_schema_conformance", "status_code_conformance")
    ]
    for operation in schema.get_all_operations():
        operation = operation.ok()
        tried.append(operation.label)
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):

            @hypothesis.settings(
                max_examples=8,
                deadline=None,
                database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
                phases=[hypothesis.Phase.generate],
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def ask(case):
                answer = case.call(headers=headers, timeout=20)
                assert answer.status_code != 500
                case.validate_response(answer, checks=chosen)

            with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # nothing to be got wrong
                ask()
    return tried
