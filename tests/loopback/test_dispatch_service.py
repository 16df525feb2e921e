"""A real scheduling centre on loopback: over TLS by address, as a client asks it, and as an attacker does."""

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.assembly.authority import ensure_authority, ensure_signing_key
from stormline.core import errors, limits, limits_platform
from stormline.core.values import Address, Secret
from stormline.dispatch import service
from stormline.dispatch.config import DispatchConfig, KeyFile
from stormline.dispatch.rules import Homes, Network, Region, RuleSet
from stormline.net.clock import SystemClock, SystemRng
from stormline.web.server import TlsFiles
from stormline.wire import jws, plan, tokens
from stormline.wire.plan import Endpoint, HostPlan

pytestmark = pytest.mark.loopback

NAME = "dispatch.stormline.test"
ADMIN = "an-admin-key-0123"
HOST = "api.shop.example"
NEXT_HOP = HostPlan(endpoints=(Endpoint(host="127.0.0.1", port=8702, server_name="gateway.stormline.test"),))
RULES = RuleSet(
    version=4,
    hosts={HOST: NEXT_HOP},
    apps={"shop": frozenset({HOST}), "bank": frozenset()},
    report=Endpoint(host="127.0.0.1", port=8704, carrier="h1"),
)


class Moved:
    """The true clock with a hand on it."""

    def __init__(self) -> None:
        self.shift_s = 0.0

    def monotonic(self) -> float:
        return SystemClock().monotonic() + self.shift_s

    def wall(self) -> float:
        return SystemClock().wall() + self.shift_s


@dataclass
class Centre:
    """A running scheduling centre."""

    address: Address
    plain: Address | None
    client: httpx2.AsyncClient
    plain_client: httpx2.AsyncClient | None
    trust: ssl.SSLContext
    plan_keys: dict[str, Any]
    token_keys: dict[str, Any]
    clock: Moved
    stop: asyncio.Event
    task: asyncio.Task[None]

    async def ask(self, *hosts: str, app: str = "shop") -> httpx2.Response:
        return await self.client.post("/v1/plan", json={"app": app, "hosts": hosts})

    def verify(self, text: str | bytes, *hosts: str, app: str = "shop", wall: float | None = None) -> plan.Plan:
        now = self.clock.wall() if wall is None else wall
        return plan.verify(text, keys=self.plan_keys, app=app, hosts=hosts, version_min=0, wall=now)


Start = Callable[..., Awaitable[Centre]]


@pytest.fixture(name="start")
async def _start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start a scheduling centre with certificates and keys as assembly makes them."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**change: Any) -> Centre:
            clock = Moved()
            ca = ensure_authority(tmp_path / "pki", clock=clock, rng=SystemRng())
            plan_key = ensure_signing_key(tmp_path / "pki" / "plan-sign.pem", "plan")
            token_key = ensure_signing_key(tmp_path / "pki" / "token-sign.pem", "token")
            arguments: dict[str, Any] = {
                "host": "127.0.0.1",
                "port": 0,
                "tls": ca.issue("dispatch", names=[NAME], ips=["127.0.0.1"]),
                "plain_port": 0,
                "unit": "u1",
                "rules": RULES,
                "plan_key": KeyFile(tmp_path / "pki" / "plan-sign.pem", plan_key.kid),
                "token_key": token_key,
                "admin_key": Secret(ADMIN),
            }
            config = DispatchConfig(**(arguments | change))
            stop = asyncio.Event()
            addresses: list[Address] = []
            plains: list[Address] = []
            answering = asyncio.Event()

            def started(address: Address) -> None:
                addresses.append(address)
                answering.set()

            task = asyncio.create_task(
                service.run(
                    config, clock=clock, rng=SystemRng(), started=started, stop=stop, plain_started=plains.append
                )
            )

            async def end() -> None:
                stop.set()
                await asyncio.wait({task})
                if not task.cancelled():
                    task.exception()

            stack.push_async_callback(end)
            wait = asyncio.create_task(answering.wait())
            await asyncio.wait({wait, task}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                wait.cancel()
                task.result()
            trust = ssl.create_default_context(cadata=ca.ca_pem)
            client = await stack.enter_async_context(_client(f"https://{addresses[0]}", trust))
            plain = None
            if plains:
                plain = await stack.enter_async_context(
                    httpx2.AsyncClient(base_url=f"http://{plains[0]}", trust_env=False)
                )
            return Centre(
                address=addresses[0],
                plain=plains[0] if plains else None,
                client=client,
                plain_client=plain,
                trust=trust,
                plan_keys=jws.load_public_keys({plan_key.kid: plan_key.public_text}),
                token_keys=jws.load_public_keys({token_key.kid: token_key.public_text}),
                clock=clock,
                stop=stop,
                task=task,
            )

        yield start


@contextlib.asynccontextmanager
async def _client(base_url: str, trust: ssl.SSLContext) -> AsyncIterator[httpx2.AsyncClient]:
    """An HTTP client that connects by address and checks the certificate's name."""

    async def name(request: httpx2.Request) -> None:
        request.extensions["sni_hostname"] = NAME

    async with httpx2.AsyncClient(
        base_url=base_url, verify=trust, trust_env=False, event_hooks={"request": [name]}
    ) as client:
        yield client


def refused(answer: httpx2.Response, status: int, code: str) -> str:
    """Check the one shape of every error; give its message."""
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"code", "message"}
    assert body["error"]["code"] == code
    assert body["error"]["message"]
    return str(body["error"]["message"])


class TestPlan:
    async def test_plan_fetched_over_tls_by_address_verifies(self, start: Start) -> None:
        centre = await start()
        answer = await centre.ask(HOST, "www.else.example")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/jose")
        got = centre.verify(answer.content, HOST, "www.else.example")
        assert got.hosts == {HOST: NEXT_HOP}
        assert got.unknown == ("www.else.example",)
        assert (got.version, got.unit, got.report) == (4, "u1", RULES.report)

    async def test_certificate_under_another_name_or_authority_is_not_accepted(self, start: Start) -> None:
        centre = await start()
        async with httpx2.AsyncClient(verify=centre.trust, trust_env=False) as client:
            with pytest.raises(httpx2.ConnectError):
                await client.get(f"https://{centre.address}/healthz", extensions={"sni_hostname": "evil.example"})
        async with httpx2.AsyncClient(verify=ssl.create_default_context(), trust_env=False) as client:
            with pytest.raises(httpx2.ConnectError):
                await client.get(f"https://{centre.address}/healthz", extensions={"sni_hostname": NAME})

    async def test_only_tls_1_3_is_spoken(self, start: Start) -> None:
        centre = await start()
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionResetError)):  # the reset can overtake the alert
            await asyncio.open_connection(*centre.address, ssl=old)

    async def test_altered_or_truncated_answer_is_rejected(self, start: Start) -> None:
        centre = await start()
        text = (await centre.ask(HOST)).text
        head, payload, signature = text.split(".")
        claims = json.loads(jws.b64url_decode(payload))
        claims["hosts"][HOST]["endpoints"][0]["host"] = "10.6.6.6"
        for changed in (
            f"{head}.{jws.b64url(json.dumps(claims).encode())}.{signature}",
            text[:-1],
            text[: len(text) // 2],
            text + "\n",
            "<html>captive portal</html>",
        ):
            with pytest.raises(errors.AnswerRejected) as caught:
                centre.verify(changed, HOST)
            assert caught.value.reason == "signature"

    async def test_answer_for_another_app_time_or_question_is_rejected(self, start: Start) -> None:
        centre = await start()
        text = (await centre.ask(HOST)).content
        late = centre.clock.wall() + limits.PLAN_LIFE_S + limits.CLOCK_SKEW_S + 1
        for reason, check in (
            ("wrong-app", lambda: centre.verify(text, HOST, app="bank")),
            ("expired", lambda: centre.verify(text, HOST, wall=late)),
            ("not-yet-valid", lambda: centre.verify(text, HOST, wall=centre.clock.wall() - 9999)),
            ("malformed", lambda: centre.verify(text, "www.else.example")),
        ):
            with pytest.raises(errors.AnswerRejected) as caught:
                check()
            assert caught.value.reason == reason

    async def test_answer_of_another_centre_is_rejected(self, start: Start) -> None:
        centre = await start(plan_key=jws.SigningKey(Ed25519PrivateKey.generate(), "plan-other"))
        with pytest.raises(errors.AnswerRejected) as caught:
            centre.verify((await centre.ask(HOST)).content, HOST)
        assert caught.value.reason == "unknown-key"

    async def test_signed_bytes_are_reused_and_then_renewed(self, start: Start) -> None:
        centre = await start()
        first = (await centre.ask(HOST)).content
        assert (await centre.ask(HOST.upper() + ".")).content == first
        centre.clock.shift_s = limits_platform.PLAN_REFRESH_S + 1
        assert (await centre.ask(HOST)).content != first

    async def test_get_answers_the_same(self, start: Start) -> None:
        centre = await start()
        posted = await centre.ask(HOST, "b.example")
        got = await centre.client.get("/v1/plan", params={"app": "shop", "host": [HOST, "b.example"]})
        assert (got.status_code, got.content) == (200, posted.content)

    async def test_plain_port_gives_the_same_plan(self, start: Start) -> None:
        centre = await start()
        assert centre.plain_client is not None
        answer = await centre.plain_client.post("/v1/plan", json={"app": "shop", "hosts": [HOST]})
        assert centre.verify(answer.content, HOST).hosts == {HOST: NEXT_HOP}

    async def test_who_holds_the_plan_is_told_so_in_few_bytes(self, start: Start) -> None:
        centre = await start()
        held = centre.verify((await centre.ask(HOST)).content, HOST)
        question = {"app": "shop", "hosts": [HOST], "version": held.version, "held": held.digest}
        answer = await centre.client.post("/v1/plan", json=question)
        assert len(answer.content) < 450
        again = plan.verify(
            answer.content, keys=centre.plan_keys, app="shop", hosts=[HOST], version_min=4, wall=centre.clock.wall(),
            held=held,
        )  # fmt: skip
        assert again.hosts == held.hosts

    async def test_user_gets_the_home_beside_the_plan_and_a_bad_token_costs_the_home_alone(self, start: Start) -> None:
        centre = await start(rules=msgspec.structs.replace(RULES, homes=Homes(epoch=2, units={"u1": 1})))
        minted = await centre.client.post(
            "/v1/admin/tokens",
            json={"app": "shop", "device": "d", "user": "ann"},
            headers={"authorization": f"Bearer {ADMIN}"},
        )
        token = minted.json()["token"]
        question = {"app": "shop", "hosts": [HOST], "token": token}
        signed, home = plan.split((await centre.client.post("/v1/plan", json=question)).content)
        assert centre.verify(signed, HOST).hosts == {HOST: NEXT_HOP}
        read = plan.verify_home(
            home, keys=centre.plan_keys, app="shop", user="ann", epoch_min=2, wall=centre.clock.wall()
        )
        assert (read.unit, read.epoch) == ("u1", 2)
        for bad in (token[:-4], "x"):
            answer = await centre.client.post("/v1/plan", json=question | {"token": bad})
            assert plan.split(answer.content) == (answer.content, b"")
            assert centre.verify(answer.content, HOST).hosts == {HOST: NEXT_HOP}

    async def test_client_is_placed_by_its_address(self, start: Start) -> None:
        far, close = (Endpoint(host=f"192.0.2.{n}", port=443, carrier="h2", unit=f"u{n}") for n in (1, 2))
        rules = msgspec.structs.replace(
            RULES,
            hosts={HOST: HostPlan(endpoints=(far, close))},
            regions={"here": Region(unit="u2")},
            networks={"127.0.0.0/8": Network(region="here")},
        )
        centre = await start(rules=rules)
        got = centre.verify((await centre.ask(HOST)).content, HOST)
        assert got.hosts[HOST].endpoints == (close, far)

    async def test_plan_keys_of_a_rotation_overlap(self, start: Start) -> None:
        following = jws.SigningKey(Ed25519PrivateKey.generate(), "plan-next")
        centre = await start(plan_keys_more=(following,))
        told = centre.verify((await centre.ask(HOST)).content, HOST).keys
        question = {"app": "shop", "hosts": [HOST], "kids": ["plan-next"]}
        later = await centre.client.post("/v1/plan", json=question)
        keys = jws.load_public_keys({"plan-next": told["plan-next"]})
        got = plan.verify(later.content, keys=keys, app="shop", hosts=[HOST], version_min=0, wall=centre.clock.wall())
        assert got.hosts == {HOST: NEXT_HOP}

    async def test_unknown_app_is_not_found(self, start: Start) -> None:
        centre = await start()
        assert "nobody" in refused(await centre.ask(HOST, app="nobody"), 404, "app-unknown")
        refused(await centre.client.get("/v1/plan", params={"app": "nobody"}), 404, "app-unknown")

    async def test_bad_and_too_many_hosts_are_bad_requests(self, start: Start) -> None:
        centre = await start()
        assert "b.example:443" in refused(await centre.ask(HOST, "b.example:443"), 400, "bad-host")
        many = [f"h{n}.example" for n in range(limits.PLAN_HOSTS_MAX + 1)]
        refused(await centre.ask(*many), 400, "too-many-hosts")

    async def test_malformed_body_is_a_bad_request(self, start: Start) -> None:
        centre = await start()
        for body in (
            b"",
            b"[]",
            b"{}",
            b"\xff\xfe",
            b'{"app":"shop"}',
            b'{"app":"shop","hosts":"a"}',
            b'{"app":"shop","app":"bank","hosts":[]}',
            b'{"app":"shop","hosts":[],"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
            b"[" * 50_000,
        ):
            refused(await centre.client.post("/v1/plan", content=body), 400, "bad-request")

    async def test_malformed_query_is_a_bad_request(self, start: Start) -> None:
        centre = await start()
        for query in ("", "host=a.example", "app=shop&app=bank", "app=shop&hosts=a.example", "app=shop&version=1"):
            refused(await centre.client.get(f"/v1/plan?{query}"), 400, "bad-request")

    async def test_too_large_body_is_refused_with_and_without_its_length(self, start: Start) -> None:
        centre = await start()
        large = b" " * (limits_platform.PLAN_REQUEST_BYTES_MAX + 1)

        async def chunks() -> AsyncIterator[bytes]:
            for at in range(0, len(large), 8192):
                yield large[at : at + 8192]

        refused(await centre.client.post("/v1/plan", content=large), 413, "too-large")
        refused(await centre.client.post("/v1/plan", content=chunks()), 413, "too-large")
        assert (await centre.ask(HOST)).status_code == 200


class TestEnrolment:
    async def test_device_gets_a_fresh_id_and_a_token_for_it(self, start: Start) -> None:
        centre = await start()
        answers = [(await centre.client.post("/v1/devices", json={"app": "shop"})).json() for _ in range(3)]
        assert len({answer["device"] for answer in answers}) == 3
        for answer in answers:
            assert set(answer) == {"device", "token", "expires_at"}
            token = tokens.verify(answer["token"], keys=centre.token_keys, wall=centre.clock.wall())
            assert (token.app, token.device, token.user) == ("shop", answer["device"], "")
            assert token.exp == answer["expires_at"] == token.iat + limits.TOKEN_LIFE_S

    async def test_id_cannot_be_chosen(self, start: Start) -> None:
        centre = await start()
        for extra in ({"device": "mine"}, {"user": "admin"}, {"life_s": 1e9}):
            refused(await centre.client.post("/v1/devices", json={"app": "shop"} | extra), 400, "bad-request")

    async def test_token_is_no_plan_and_not_signed_by_the_plan_key(self, start: Start) -> None:
        centre = await start()
        token = (await centre.client.post("/v1/devices", json={"app": "shop"})).json()["token"]
        with pytest.raises(errors.AnswerRejected):
            centre.verify(token)
        with pytest.raises(errors.SignatureError):
            tokens.verify(token, keys=centre.plan_keys, wall=centre.clock.wall())

    async def test_unknown_app_malformed_and_large_bodies_are_refused(self, start: Start) -> None:
        centre = await start()
        post = centre.client.post
        refused(await post("/v1/devices", json={"app": "nobody"}), 404, "app-unknown")
        refused(await post("/v1/devices", content=b"x"), 400, "bad-request")
        refused(await post("/v1/devices", content=b'{"app":' + b"[" * 3000), 400, "bad-request")
        large = b" " * (limits_platform.DISPATCH_SMALL_BODY_BYTES_MAX + 1)
        refused(await post("/v1/devices", content=large), 413, "too-large")

    async def test_too_many_from_one_address_wait_and_may_come_again(self, start: Start) -> None:
        centre = await start(enrol_burst=2, enrol_rate_per_s=0.1)
        codes = [(await centre.client.post("/v1/devices", json={"app": "shop"})).status_code for _ in range(2)]
        answer = await centre.client.post("/v1/devices", json={"app": "shop"})
        assert codes == [200, 200]
        refused(answer, 429, "rate-limited")
        assert 0 < int(answer.headers["retry-after"]) <= 10
        assert (await centre.ask(HOST)).status_code == 200
        centre.clock.shift_s = float(answer.headers["retry-after"])
        assert (await centre.client.post("/v1/devices", json={"app": "shop"})).status_code == 200


class TestAdmin:
    async def mint(self, centre: Centre, key: str | None = ADMIN, **body: object) -> httpx2.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        wanted = {"app": "shop", "device": "till-7"} | body
        return await centre.client.post("/v1/admin/tokens", json=wanted, headers=headers)

    async def test_operator_mints_for_a_named_device_and_user(self, start: Start) -> None:
        centre = await start()
        answer = (await self.mint(centre, user="ann>*", life_s=60)).json()
        token = tokens.verify(answer["token"], keys=centre.token_keys, wall=centre.clock.wall())
        assert (token.app, token.device, token.user) == ("shop", "till-7", "ann>*")
        assert token.exp - token.iat == 60

    @pytest.mark.parametrize("key", [None, "", "wrong", ADMIN[:-1], ADMIN + "x", ADMIN.upper(), "\xe9" * 17])
    async def test_wrong_key_is_unauthorized(self, start: Start, key: str | None) -> None:
        centre = await start()
        headers = [] if key is None else [(b"authorization", f"Bearer {key}".strip().encode("latin-1"))]
        answer = await centre.client.post("/v1/admin/tokens", content=b'{"app":"shop","device":"d"}', headers=headers)
        assert ADMIN not in refused(answer, 401, "unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"

    async def test_other_scheme_is_unauthorized(self, start: Start) -> None:
        centre = await start()
        answer = await centre.client.post("/v1/admin/tokens", json={}, headers={"authorization": f"Basic {ADMIN}"})
        refused(answer, 401, "unauthorized")

    async def test_what_cannot_be_minted_is_refused(self, start: Start) -> None:
        centre = await start()
        for body in (
            {"device": ""},
            {"device": "x" * 129},
            {"device": "é" * 65},
            {"user": "x" * 129},
            {"life_s": 0},
            {"life_s": limits_platform.ADMIN_TOKEN_LIFE_MAX_S + 1},
            {"life_s": "long"},
            {"exp": 1},
        ):
            refused(await self.mint(centre, **body), 400, "bad-request")
        refused(await self.mint(centre, app="nobody"), 404, "app-unknown")

    async def test_no_log_line_holds_a_token_or_key(self, start: Start, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.DEBUG):
            centre = await start()
            answers = [await self.mint(centre), await centre.client.post("/v1/devices", json={"app": "shop"})]
            await self.mint(centre, key="wrong-key-0123456789")
        secrets = [ADMIN, "wrong-key-0123456789", *(answer.json()["token"] for answer in answers)]
        assert [secret for secret in secrets if secret in caplog.text] == []
        assert "till-7" in caplog.text


class TestOther:
    async def test_plain_port_gives_no_tokens(self, start: Start) -> None:
        centre = await start()
        assert centre.plain_client is not None
        headers = {"authorization": f"Bearer {ADMIN}"}
        for path in ("/v1/devices", "/v1/admin/tokens"):
            answer = await centre.plain_client.post(path, json={"app": "shop", "device": "d"}, headers=headers)
            refused(answer, 403, "tls-required")
        assert (await centre.plain_client.get("/healthz")).status_code == 200

    async def test_no_plain_port_unless_asked_for(self, start: Start) -> None:
        centre = await start(plain_port=None)
        assert centre.plain is None
        assert (await centre.ask(HOST)).status_code == 200

    async def test_health_names_unit_and_version(self, start: Start) -> None:
        centre = await start()
        assert (await centre.client.get("/healthz")).json() == {
            "closes": {},
            "status": "ok",
            "unit": "u1",
            "version": 4,
            "stale": False,
            "rejects": {},
        }

    async def test_keys_are_a_jwk_set_that_other_software_reads(self, start: Start) -> None:
        centre = await start()
        answer = await centre.client.get("/v1/keys")
        keys = jwt.PyJWKSet.from_dict(answer.json())
        token = (await centre.client.post("/v1/devices", json={"app": "shop"})).json()["token"]
        kid = jwt.get_unverified_header(token)["kid"]
        assert jwt.decode(token, keys[kid], algorithms=["EdDSA"], audience="shop")["aud"] == "shop"
        assert {key["kid"] for key in answer.json()["keys"]} == {*centre.plan_keys, *centre.token_keys}
        assert "d" not in set().union(*answer.json()["keys"])

    async def test_unknown_path_and_method_have_the_same_shape(self, start: Start) -> None:
        centre = await start()
        refused(await centre.client.get("/v1/nothing"), 404, "not-found")
        refused(await centre.client.get("/v1/plan/"), 404, "not-found")
        answer = await centre.client.put("/v1/keys")
        refused(answer, 405, "method-not-allowed")
        assert "GET" in answer.headers["allow"]

    async def test_fault_of_ours_has_the_same_shape_and_tells_nothing(
        self, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        centre = await start()
        monkeypatch.setattr(centre.clock, "wall", lambda: 1 / 0)
        assert "division" not in refused(await centre.ask(HOST), 500, "internal")
        assert "ZeroDivisionError" in caplog.text


class TestLife:
    async def test_stop_ends_it_with_idle_connections_and_half_sent_bodies(self, start: Start) -> None:
        centre = await start()
        assert centre.plain is not None
        await centre.ask(HOST)
        reader, writer = await asyncio.open_connection(*centre.plain)
        writer.write(b"POST /v1/plan HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        _, tls_writer = await asyncio.open_connection(*centre.address, ssl=centre.trust, server_hostname=NAME)
        await centre.ask(HOST)  # by now the half-sent request is being read
        centre.stop.set()
        await asyncio.wait_for(centre.task, 10)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"stopping"' in answer
        for each in (writer, tls_writer):
            each.close()
            with contextlib.suppress(OSError, ssl.SSLError):
                await each.wait_closed()
        with pytest.raises(OSError, match=r"[Cc]onnect"):
            await asyncio.open_connection(*centre.address)

    async def test_peer_that_leaves_in_the_middle_of_a_body_harms_nobody(
        self, start: Start, caplog: pytest.LogCaptureFixture
    ) -> None:
        centre = await start()
        assert centre.plain is not None
        _, writer = await asyncio.open_connection(*centre.plain)
        writer.write(b"POST /v1/plan HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        await centre.ask(HOST)
        writer.transport.abort()
        assert (await centre.ask(HOST)).status_code == 200
        await centre.client.aclose()
        centre.stop.set()
        await centre.task
        assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []

    async def test_body_that_does_not_come_times_out(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits_platform, "REQUEST_BODY_TIMEOUT_S", 0.05)
        centre = await start()
        assert centre.plain is not None
        reader, writer = await asyncio.open_connection(*centre.plain)
        writer.write(b"POST /v1/plan HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 100\r\n\r\n{")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"timeout"' in answer
        writer.close()
        await writer.wait_closed()

    async def test_cancellation_ends_it_like_a_stop(self, start: Start) -> None:
        centre = await start()
        centre.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await centre.task
        with pytest.raises(OSError, match=r"[Cc]onnect"):
            await asyncio.open_connection(*centre.address)

    async def test_taken_port_is_a_platform_error_and_leaves_nothing(self, start: Start) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(errors.PlatformError, match=str(port)):
                await start(port=port)
            with pytest.raises(errors.PlatformError, match=str(port)):
                await start(plain_port=port)

    async def test_files_that_cannot_be_used_are_config_errors(self, start: Start, tmp_path: Path) -> None:
        bad = tmp_path / "bad.pem"
        bad.write_text("half")
        for change in (
            {"tls": TlsFiles(bad, bad)},
            {"tls": TlsFiles(tmp_path / "none.pem", bad)},
            {"plan_key": KeyFile(bad, "plan-x")},
            {"token_key": KeyFile(tmp_path / "none.pem", "token-x")},
        ):
            with pytest.raises(errors.ConfigError, match=r"(bad|none)\.pem"):
                await start(**change)
