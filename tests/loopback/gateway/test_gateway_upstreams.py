"""Upstreams by rules that change while it runs: endpoints that fail, time-outs, retries, signed identity."""

import asyncio
import json

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.core import limits, limits_api
from stormline.core.codes import Code
from stormline.core.errors import CallError
from stormline.core.values import Secret
from stormline.testing.foreign import running_server
from stormline.wire import jws

pytestmark = pytest.mark.loopback

HOST = "api.shop.example"
NAME = "gateway.test"
"""What the test's certificate is for."""
OPERATORS = "an-operators-key-0123456789"
KEY = {"authorization": f"Bearer {OPERATORS}"}
IDENTITY = jws.SigningKey(Ed25519PrivateKey.generate(), "identity-1")
DOWN = "http://127.0.0.1:1"


def saying(text, status=200, seen=None, headers=()):
    """Make an application that says what it is."""

    async def app(scope, receive, send):
        if seen is not None:
            seen.append(scope)
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": status, "headers": [*headers]})
        await send({"type": "http.response.body", "body": text.encode()})

    return app


def upstream_of(*origins, name="orders", **rule):
    endpoints = [{"origin": origin} if isinstance(origin, str) else origin for origin in origins]
    return {"name": name, "host": HOST, "endpoints": endpoints, **rule}


@pytest.fixture(name="ruled")
async def _ruled(gateway, eventually):
    """Give what starts a gateway with a record of upstreams, or changes it, and waits until it is in use."""

    async def rule(*upstreams, **changes):
        if gateway.address.host == "":
            await gateway.start(operator_key=Secret(OPERATORS), identity_key=IDENTITY, **changes)
        answer = await gateway.admin.get("/v1/upstreams", headers=KEY)
        record = answer.json() | {"upstreams": list(upstreams)}
        put = await gateway.admin.put("/v1/upstreams", json=record, headers={**KEY, "if-match": answer.headers["etag"]})
        assert put.status_code == 200, put.text

        async def in_use():
            shown = (await gateway.admin.get("/v1/upstreams/health", headers=KEY)).json()["upstreams"]
            there = {(each["name"], each["path"], tuple(one["origin"] for one in each["endpoints"])) for each in shown}
            return there >= {
                (each["name"], each.get("path", "/**"), tuple(one["origin"] for one in each["endpoints"]))
                for each in upstreams
            }

        await eventually(in_use)

    return rule


async def circuits(gateway, name="orders"):
    shown = (await gateway.admin.get("/v1/upstreams/health", headers=KEY)).json()["upstreams"]
    return [one["circuit"] for each in shown if each["name"] == name for one in each["endpoints"]]


async def failing(device, method="GET", path="/", **fields):
    with pytest.raises(CallError) as raised:
        await device.call("api", method, target=f"http://{HOST}{path}", **fields)
    return raised.value


class TestRules:
    async def test_first_pattern_that_fits_decides_and_rules_go_before_settings(self, gateway, upstream, ruled):
        one, two, three = [await upstream(saying(text)) for text in ("one", "two", "three")]
        await ruled(
            upstream_of(one, name="a", path="/orders/*/items"),
            upstream_of(two, name="b", path="/orders/**"),
            api_upstreams={HOST: three},
        )
        device = await gateway.connect()
        said = [
            (await device.get(f"http://{HOST}{path}")).body for path in ("/orders/7/items", "/orders/7", "/x?/orders/")
        ]
        assert said == [b"one", b"two", b"three"]

    async def test_changed_rules_hold_from_the_next_request_on(self, gateway, upstream, ruled):
        go = asyncio.Event()

        async def slow(scope, receive, send):
            await go.wait()
            await saying("slow")(scope, receive, send)

        await ruled(upstream_of(await upstream(slow)))
        device = await gateway.connect()
        begun = asyncio.create_task(device.get(f"http://{HOST}/"))
        await ruled(upstream_of(await upstream(saying("new"))))
        assert (await device.get(f"http://{HOST}/")).body == b"new"
        go.set()
        assert (await begun).body == b"slow"
        await ruled()

        async def gone():
            error = await failing(device)
            return error.code == Code.CALL_NOT_FOUND

        for _ in range(100):
            if await gone():
                return
        raise AssertionError

    async def test_app_that_may_not_ask_finds_nothing(self, gateway, upstream, ruled):
        await ruled(upstream_of(await upstream(saying("x")), apps=["other"]))
        assert (await failing(await gateway.connect())).code == Code.CALL_NOT_FOUND

    @pytest.mark.parametrize(
        "record",
        [
            b"{",
            b'{"upstreams": [], "more": 1}',
            b'{"format": "stormline-upstreams/2"}',
            json.dumps({"upstreams": [upstream_of()]}).encode(),
            json.dumps({"upstreams": [upstream_of({"origin": DOWN, "weight": 0})]}).encode(),
            json.dumps({"upstreams": [upstream_of("http://localhost:1")]}).encode(),
            json.dumps({"upstreams": [upstream_of(DOWN, DOWN)]}).encode(),
            json.dumps({"upstreams": [upstream_of(DOWN), upstream_of(DOWN)]}).encode(),
            json.dumps({"upstreams": [upstream_of(DOWN, path="orders")]}).encode(),
            json.dumps({"upstreams": [upstream_of(DOWN, read_timeout_s=0)]}).encode(),
            json.dumps({"upstreams": [upstream_of(DOWN, retries=9)]}).encode(),
            json.dumps({"upstreams": [upstream_of(DOWN, name="a b")]}).encode(),
        ],
    )
    async def test_malformed_record_is_refused_and_changes_nothing(self, gateway, record):
        await gateway.start(operator_key=Secret(OPERATORS))
        put = await gateway.admin.put("/v1/upstreams", content=record, headers={**KEY, "if-match": "*"})
        assert (put.status_code, put.json()["error"]["code"]) == (400, "bad-request")
        assert (await gateway.admin.get("/v1/upstreams", headers=KEY)).headers["etag"] == '"0"'

    async def test_only_operators_and_only_from_what_they_have_read(self, gateway):
        await gateway.start(operator_key=Secret(OPERATORS))
        record = {"upstreams": [upstream_of(DOWN)]}
        for method, path in (("GET", "/v1/upstreams"), ("PUT", "/v1/upstreams"), ("GET", "/v1/upstreams/health")):
            assert (await gateway.admin.request(method, path, json=record)).status_code == 401
        put = await gateway.admin.put("/v1/upstreams", json=record, headers=KEY)
        assert put.status_code == 428
        put = await gateway.admin.put("/v1/upstreams", json=record, headers={**KEY, "if-match": '"0"'})
        assert put.status_code == 200
        again = await gateway.admin.put("/v1/upstreams", json=record, headers={**KEY, "if-match": '"0"'})
        assert (again.status_code, again.json()["error"]["code"]) == (412, "changed")
        again = await gateway.admin.put("/v1/upstreams", json=record, headers={**KEY, "if-match": put.headers["etag"]})
        assert again.status_code == 200

    async def test_engine_away_leaves_the_rules_in_use(self, gateway, upstream, ruled):
        await ruled(upstream_of(await upstream(saying("x"))))
        gateway.broker.cut()
        assert (await gateway.admin.get("/v1/upstreams", headers=KEY)).status_code == 503
        assert (await (await gateway.connect()).get(f"http://{HOST}/")).body == b"x"


class TestEndpoints:
    async def test_requests_are_shared_out_by_weight(self, gateway, upstream, ruled):
        one, two, three = [await upstream(saying(text)) for text in ("1", "2", "3")]
        await ruled(
            upstream_of({"origin": one, "weight": 3}, {"origin": two, "weight": 1}, {"origin": three, "weight": 0})
        )
        device = await gateway.connect()
        said = [(await device.get(f"http://{HOST}/")).body for _ in range(8)]
        assert (said.count(b"1"), said.count(b"2"), said.count(b"3")) == (6, 2, 0)

    async def test_endpoint_down_costs_no_request_and_is_left_alone(self, gateway, upstream, ruled):
        await ruled(upstream_of(DOWN, await upstream(saying("up"))))
        device = await gateway.connect()
        for number in range(30):
            answer = await device.call("api", "POST", target=f"http://{HOST}/", body=b"%d" % number)
            assert answer.body == b"up"
        assert await circuits(gateway) == ["open", "closed"]

    async def test_all_endpoints_left_alone_fails_at_once_and_says_when_to_come_back(self, gateway, ruled):
        await ruled(upstream_of(DOWN))
        device = await gateway.connect()
        codes = [(await failing(device)).code for _ in range(limits_api.BREAKER_FAILURES)]
        assert codes == [Code.CALL_UPSTREAM] * limits_api.BREAKER_FAILURES
        error = await failing(device)
        assert (error.code, error.maybe_delivered) == (Code.CALL_UNAVAILABLE, False)
        assert error.retry_after_s > 0
        assert await circuits(gateway) == ["open"]

    async def test_endpoint_that_came_back_is_used_again(self, gateway, raw_upstream, ruled, eventually):
        well = False

        async def handler(reader, writer):
            while await reader.readuntil(b"\r\n\r\n"):
                if not well:
                    return
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        await ruled(upstream_of(await raw_upstream(handler), retries=0))
        device = await gateway.connect()
        for _ in range(limits_api.BREAKER_FAILURES):
            await failing(device)
        assert await circuits(gateway) == ["open"]
        well = True

        async def back():
            try:
                return (await device.get(f"http://{HOST}/")).status == 200
            except CallError:
                return False

        await eventually(back)
        assert await circuits(gateway) == ["closed"]

    async def test_callers_who_have_no_time_do_not_speak_against_an_endpoint(self, gateway, upstream, ruled):
        async def slow(scope, receive, send):
            await receive()
            await receive()

        await ruled(upstream_of(await upstream(slow)))
        device = await gateway.connect()
        for _ in range(2 * limits_api.BREAKER_FAILURES):
            assert (await failing(device, deadline_s=0.02)).code == Code.CALL_DEADLINE
        assert await circuits(gateway) == ["closed"]


def breaking(count):
    """Give a handler that reads a request and hangs up, counting them."""

    async def handler(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        count.append(1)

    return handler


class TestTwoPhases:
    @pytest.mark.parametrize(
        ("method", "headers", "again"),
        [("GET", (), True), ("POST", (), False), ("PUT", (), False), ("POST", (("Idempotency-Key", "k"),), True)],
    )
    async def test_what_was_handed_over_is_sent_again_only_where_that_is_safe(
        self, gateway, upstream, raw_upstream, ruled, method, headers, again
    ):
        broken = []
        first = await raw_upstream(breaking(broken))
        await ruled(upstream_of({"origin": first, "weight": 1000}, await upstream(saying("other"))))
        device = await gateway.connect()
        if again:
            answer = await device.call("api", method, target=f"http://{HOST}/", headers=headers, body=b"")
            assert answer.body == b"other"
        else:
            error = await failing(device, method, headers=headers, body=b"x")
            assert (error.code, error.maybe_delivered) == (Code.CALL_UPSTREAM, True)
        assert len(broken) == 1

    async def test_streamed_body_goes_again_only_where_it_was_not_begun(self, gateway, upstream, ruled):
        seen = []

        async def app(scope, receive, send):
            body = b""
            while (message := await receive())["more_body"]:
                body += message["body"]
            seen.append(body + message["body"])
            await saying("ok")(scope, _nothing, send)

        await ruled(upstream_of({"origin": DOWN, "weight": 1000}, await upstream(app)))
        device = await gateway.connect()
        call = device.open("api", "POST", target=f"http://{HOST}/", more=True)
        _, answer = await asyncio.gather(device.upload(call, [bytes(1000)] * 3), device.answer(call))
        assert (answer.body, seen) == (b"ok", [bytes(3000)])

    async def test_503_is_taken_elsewhere_for_reads_and_passed_on_for_writes(self, gateway, upstream, ruled):
        busy = await upstream(saying("busy", 503))
        await ruled(upstream_of({"origin": busy, "weight": 1000}, await upstream(saying("free"))))
        device = await gateway.connect()
        assert (await device.get(f"http://{HOST}/")).body == b"free"
        written = await device.call("api", "POST", target=f"http://{HOST}/", body=b"x")
        assert (written.status, written.body) == (503, b"busy")

    async def test_last_503_is_passed_on(self, gateway, upstream, ruled):
        await ruled(upstream_of(await upstream(saying("a", 503)), await upstream(saying("b", 503))))
        answer = await (await gateway.connect()).get(f"http://{HOST}/")
        assert answer.status == 503

    async def test_retries_end_with_their_budget(self, gateway, upstream, ruled):
        asked, spare = [], []

        async def often_busy(scope, receive, send):
            asked.append(1)
            await saying("a", 503 if len(asked) % 5 < 2 else 200)(scope, receive, send)

        first, second = await upstream(often_busy), await upstream(saying("b", seen=spare))
        await ruled(upstream_of({"origin": first, "weight": 1000}, {"origin": second, "weight": 1}))
        device = await gateway.connect()
        begin = asyncio.get_running_loop().time()
        statuses = [(await device.get(f"http://{HOST}/")).status for _ in range(200)]
        earned = limits.RETRY_BURST + limits.RETRY_SHARE * 200
        earned += limits.RETRY_FLOOR_PER_S * (asyncio.get_running_loop().time() - begin)
        assert limits.RETRY_BURST <= len(spare) <= earned + 2
        assert statuses.count(503) >= 80 - len(spare) - 2
        assert await circuits(gateway) == ["closed", "closed"]

    async def test_kept_connection_that_the_upstream_closed_costs_no_read(self, gateway, raw_upstream, ruled):
        served = 0

        async def handler(reader, writer):
            nonlocal served
            await reader.readuntil(b"\r\n\r\n")
            served += 1
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            await reader.readuntil(b"\r\n\r\n")  # the second request over it is not answered

        await ruled(upstream_of(await raw_upstream(handler)))
        device = await gateway.connect()
        for _ in range(5):
            assert (await device.get(f"http://{HOST}/")).status == 200
        assert served == 5


async def _nothing():
    return {"type": "http.request", "body": b"", "more_body": False}


class TestTimeouts:
    async def test_silence_before_the_answer_is_bounded_and_another_endpoint_asked(
        self, gateway, upstream, raw_upstream, ruled
    ):
        async def silent(reader, writer):
            await reader.read()

        mute = {"origin": await raw_upstream(silent), "weight": 1000}
        await ruled(upstream_of(mute, await upstream(saying("other")), first_byte_timeout_s=0.2))
        device = await gateway.connect()
        assert (await device.get(f"http://{HOST}/")).body == b"other"

    async def test_silence_in_the_body_is_bounded_and_never_a_short_good_answer(self, gateway, raw_upstream, ruled):
        async def stalls(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + bytes(50_000))
            await writer.drain()
            await reader.read()

        await ruled(upstream_of(await raw_upstream(stalls), read_timeout_s=0.2))
        error = await failing(await gateway.connect())
        assert (error.code, error.maybe_delivered) == (Code.CALL_DEADLINE, True)

    async def test_body_that_trickles_for_longer_than_any_silence_is_whole(self, gateway, upstream, ruled):
        async def trickles(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(10):
                await send({"type": "http.response.body", "body": b"x" * 10, "more_body": True})
                await asyncio.sleep(0.05)
            await send({"type": "http.response.body", "body": b""})

        await ruled(upstream_of(await upstream(trickles), first_byte_timeout_s=0.4, read_timeout_s=0.4))
        assert len((await (await gateway.connect()).get(f"http://{HOST}/")).body) == 100

    async def test_all_of_it_is_bounded(self, gateway, upstream, ruled):
        async def endless(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                await asyncio.sleep(0.02)

        await ruled(upstream_of(await upstream(endless), timeout_s=0.3))
        assert (await failing(await gateway.connect())).code == Code.CALL_DEADLINE


class TestIdentity:
    async def test_a_service_checks_who_asks_with_a_standard_library(self, gateway, upstream, ruled):
        seen = []
        await ruled(upstream_of(await upstream(saying("x", seen=seen))))
        device = await gateway.connect("d 1", user="änn")
        for _ in range(2):
            await device.get(f"http://{HOST}/", headers=(("Stormline-Identity", "forged"),))
        texts = [dict(scope["headers"])[b"stormline-identity"].decode() for scope in seen]
        assert texts[0] == texts[1]  # one signature serves many requests
        keys = jwt.PyJWKSet.from_dict((await gateway.admin.get("/v1/identity-keys", headers={})).json())
        header = jwt.get_unverified_header(texts[0])
        assert (header["typ"], header["alg"]) == ("stormline-identity+jwt", "EdDSA")
        claims = jwt.decode(
            texts[0], keys[header["kid"]], algorithms=["EdDSA"], audience="orders", issuer="stormline:u1"
        )
        assert (claims["app"], claims["device"], claims["user"]) == ("demo", "d 1", "änn")
        assert claims["exp"] - claims["iat"] == limits_api.IDENTITY_LIFE_S
        assert claims["sid"] == device.welcome.session
        with pytest.raises(jwt.InvalidAudienceError):
            jwt.decode(texts[0], keys[header["kid"]], algorithms=["EdDSA"], audience="payments")

    async def test_without_a_key_there_is_none_to_show(self, gateway):
        await gateway.start()
        assert (await gateway.admin.get("/v1/identity-keys")).status_code == 404

    async def test_answers_cannot_speak_for_the_platform(self, gateway, upstream, ruled):
        await ruled(upstream_of(await upstream(saying("x", headers=[(b"Stormline-User", b"y"), (b"x-a", b"1")]))))
        answer = await (await gateway.connect()).get(f"http://{HOST}/")
        assert "x-a" in answer.headers
        assert not [name for name in answer.headers if name.lower().startswith("stormline")]

    async def test_the_caller_s_deadline_travels(self, gateway, upstream, ruled):
        seen = []
        await ruled(upstream_of(await upstream(saying("x", seen=seen))))
        device = await gateway.connect()
        await device.get(f"http://{HOST}/", deadline_s=3.0)
        assert 2000 <= int(dict(seen[0]["headers"])[b"stormline-deadline-ms"]) <= 3000


class TestTls:
    @pytest.fixture(name="secure")
    def _secure(self, authority, tmp_path):
        """Run an upstream that speaks TLS, for the name in the certificate."""
        (tmp_path / "served").mkdir()
        with running_server("hypercorn", tmp_path / "served", authority.files) as server:
            yield f"https://{server.address}"

    async def test_upstream_over_tls_is_asked_by_the_name_in_its_certificate(self, gateway, authority, secure):
        await gateway.start(api_upstreams={NAME: secure, HOST: secure}, api_ca=authority.files.certificate)
        device = await gateway.connect()
        assert (await device.get(f"https://{NAME}/hello")).body == b"hello"
        assert (await device.get(f"https://{NAME}/large/1000192")).body == bytes(range(256)) * 3907
        call = device.open("api", "POST", target=f"https://{NAME}/chunked", more=True)
        _, answer = await asyncio.gather(device.upload(call, [b"x" * 10_000] * 30), device.answer(call))
        assert answer.body == b"x" * 300_000
        error = await failing(device)  # another name than that in the certificate
        assert (error.code, error.maybe_delivered) == (Code.CALL_UPSTREAM, False)
        assert "certificate" in error.reason
