"""What users say, from a client to the APM's store and to an operator: once, whole, bounded, whatever the way did."""

import asyncio
import base64
import contextlib
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

import stormline
from stormline.client.background import BACKGROUND
from stormline.client.config import Config
from stormline.core import limits_netlog as limits
from stormline.net.clock import SystemRng
from stormline.telemetry import feedback, netlog
from stormline.telemetry.netlog import Failure
from stormline.testing.gateway import answering
from stormline.testing.world import APM_NAME, Pki, make_pki, running_world, wait_until
from stormline.wire import jws
from stormline.wire.plan import Carrier, Endpoint

pytestmark = pytest.mark.loopback

SECRET = "a-secret-of-the-query"
DEAD = f"http://127.0.0.1:1/orders?token={SECRET}"


@pytest.fixture(name="pki", scope="module")
def _pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(name="apm_spec", scope="module")
def _apm_spec(apm_spec: Any, devices: Any, pki: Pki) -> Any:
    """Settings of an APM as a platform has it: TLS, and device tokens signed by its dispatch, or by the tests."""

    def spec(store: Path | None = None, **more: Any) -> dict[str, Any]:
        keys = {"k1": devices.public, pki.token_key.kid: pki.token_key.public_text}
        return apm_spec(store, tls=[str(each) for each in pki.apm], token_keys=keys, **more)  # type: ignore[no-any-return]

    return spec


@pytest.fixture(name="ask")
def _ask(make_api: Any, pki: Pki) -> Any:
    """Ask a role as its operator; its certificate is of the platform's authority, for another name."""
    context = ssl.create_default_context(cadata=pki.ca.ca_pem)
    context.check_hostname = False
    return lambda role: make_api(f"https://{role.address}", verify=context)


@pytest.fixture(name="api")
def _api(shared_apm: Any, ask: Any) -> Any:
    return ask(shared_apm)


@pytest.fixture(name="background")
def _background() -> Iterator[None]:
    yield
    BACKGROUND.stop()


def _endpoint(role: Any) -> Endpoint:
    return Endpoint(host="127.0.0.1", port=role.address.port, carrier=Carrier.H1, server_name=APM_NAME)


async def _fail(client: Any, url: str = DEAD) -> None:
    with contextlib.suppress(httpx2.TransportError):
        await client.get(url)


def _content(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def _log_of(api: Any, feedback_id: str, key: Any = None) -> netlog.Reading:
    return netlog.read([base64.b64decode(api.get(f"/v1/feedback/{feedback_id}")["log"])], key)


async def test_feedback_brings_the_last_failures_in_full_and_no_secret(
    pki: Pki, shared_apm: Any, api: Any, tmp_path: Path
) -> None:
    async with (
        running_world(pki, answering(), report=_endpoint(shared_apm)) as here,
        here.client(store=tmp_path / "device", deadline_s=2.0) as client,
    ):
        await _fail(client)
        said = await client.feedback("The cart is empty again. Ärgerlich!")
    assert (said.state, said.reason) == ("sent", "")
    [entry] = [each for each in api.get("/v1/feedback")["feedback"] if each["id"] == said.id]
    assert (entry["id"], entry["text"], entry["app"]) == (said.id, "The cart is empty again. Ärgerlich!", "demo")
    assert entry["device"]
    assert entry["client"].startswith("stormline/")
    assert entry["log_bytes"] > 0
    [found] = _log_of(api, said.id).entries
    failure = found.record
    assert isinstance(failure, Failure)
    assert (failure.call.host, failure.call.path, failure.call.failure) == ("127.0.0.1", "/orders", "tcp.failed")
    assert failure.call.attempts
    assert any("try direct" in line for _, line in failure.story)
    assert failure.causes[0].startswith("ConnectError")
    assert failure.network.condition
    assert SECRET not in json.dumps(netlog.shown(failure))
    assert not list((tmp_path / "device" / "feedback").iterdir())


async def test_feedback_kept_without_a_way_is_sent_after_a_restart_and_once(
    pki: Pki, apm_spec: Any, start_role: Any, ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FEEDBACK_RETRY_S", 0.5)
    store = tmp_path / "apm"
    role = start_role(apm_spec(store))
    endpoint = _endpoint(role)
    async with running_world(pki, answering(), report=endpoint) as here:
        role.kill()
        device = tmp_path / "device"
        async with here.client(store=device, deadline_s=2.0) as client:
            first = await client.feedback("one")
            second = await client.feedback("two")
        assert (first.state, second.state) == ("kept", "kept")
        assert first.reason
        assert len(list((device / "feedback").iterdir())) == 2
        role = start_role(apm_spec(store, port=endpoint.port))
        async with here.client(store=device) as client:
            await client.get("https://shop.test/")
            await wait_until(lambda: not list((device / "feedback").iterdir()))
    found = ask(role).get("/v1/feedback")["feedback"]
    assert sorted(each["text"] for each in found) == ["one", "two"]
    assert {each["id"] for each in found} == {first.id, second.id}


async def test_feedback_of_a_sealed_log_is_read_with_the_key_alone(
    pki: Pki, shared_apm: Any, api: Any, tmp_path: Path
) -> None:
    private = X25519PrivateKey.generate()
    key = jws.b64url(private.public_key().public_bytes_raw())
    async with (
        running_world(pki, answering(), report=_endpoint(shared_apm)) as here,
        here.client(store=tmp_path, network_log_key=key, deadline_s=2.0) as client,
    ):
        await _fail(client)
        said = await client.feedback("sealed")
    assert said.state == "sent"
    closed = _log_of(api, said.id)
    assert (closed.entries, closed.sealed) == ([], 1)
    [found] = _log_of(api, said.id, private).entries
    assert isinstance(found.record, Failure)
    assert b"/orders" not in _content(tmp_path)


async def test_feedback_of_earlier_starts_of_the_app_is_packed_too(
    pki: Pki, shared_apm: Any, api: Any, tmp_path: Path
) -> None:
    async with running_world(pki, answering(), report=_endpoint(shared_apm)) as here:
        async with here.client(store=tmp_path, deadline_s=2.0) as client:
            await _fail(client)
        async with here.client(store=tmp_path, deadline_s=2.0) as client:
            await _fail(client, "http://127.0.0.1:1/second")
            said = await client.feedback("both")
    paths = [entry.record.call.path for entry in _log_of(api, said.id).entries]  # type: ignore[union-attr]
    assert paths == ["/orders", "/second"]


@pytest.mark.usefixtures("background")
async def test_synchronous_client_says_it_too(pki: Pki, shared_apm: Any, api: Any, tmp_path: Path) -> None:
    async with running_world(pki, answering(), report=_endpoint(shared_apm)) as here:

        def say() -> Any:
            with stormline.Client(config=Config(bundle=here.bundle, report=False, store=tmp_path)) as client:
                return client.feedback("from a thread")

        said = await asyncio.to_thread(say)
    assert said.state == "sent"
    assert api.get(f"/v1/feedback/{said.id}")["text"] == "from a thread"


# -- what the APM takes -----------------------------------------------------------------------------------------------
def _said(**change: Any) -> bytes:
    fields: dict[str, Any] = {"id": "a" * 26, "said_at_ms": 1_800_000_000_000, "text": "hello"}
    return feedback.encode(feedback.Feedback(**(fields | change)))


def _post(api: Any, body: bytes, token: str | None = None, **headers: str) -> httpx2.Response:
    return api.client.post(  # type: ignore[no-any-return]
        feedback.PATH,
        content=body,
        headers={
            "authorization": f"Bearer {token or api.devices.token()}",
            "content-type": feedback.MEDIA_TYPE,
            **headers,
        },
    )


def test_same_feedback_twice_is_stored_once_also_over_a_restart(
    start_role: Any, apm_spec: Any, ask: Any, devices: Any, tmp_path: Path
) -> None:
    role = start_role(apm_spec(tmp_path / "store"))
    api = ask(role)
    answers = [_post(api, _said()).json(), _post(api, _said(text="changed")).json()]
    assert [answer["repeated"] for answer in answers] == [False, True]
    role.kill()
    api = ask(start_role(apm_spec(tmp_path / "store")))
    assert _post(api, _said(), devices.token("enrolled-anew")).json() == {"id": "a" * 26, "repeated": True}
    assert _post(api, _said(), devices.token(app="other")).json()["repeated"] is False
    assert [each["text"] for each in api.get("/v1/feedback", app="demo")["feedback"]] == ["hello"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"\xff" * 100, 400),
        (_said(text=""), 400),
        (_said(text="x" * (limits.FEEDBACK_TEXT_CHARS_MAX + 1)), 400),
        (_said(id="../../etc/passwd"), 400),
        (_said(version=2), 400),
        (_said(said_at_ms=-1), 400),
        (_said(log=bytes(limits.FEEDBACK_BYTES_MAX)), 413),
    ],
    ids=["empty", "garbage", "no-text", "long-text", "path-as-id", "version", "time", "size"],
)
def test_feedback_that_is_none_is_refused(api: Any, body: bytes, status: int) -> None:
    assert _post(api, body, api.devices.token("sloppy")).status_code == status


def test_feedback_needs_a_token_and_its_reading_the_admin_key(api: Any) -> None:
    assert _post(api, _said(), "nonsense").status_code == 401
    assert _post(api, _said(), **{"content-type": "text/plain"}).status_code == 415
    for path in ("/v1/feedback", f"/v1/feedback/{'a' * 26}"):
        assert api.admin(path, key="wrong").status_code == 401
    assert api.admin("/v1/feedback/nobody-said-this").status_code == 404


def test_device_that_says_too_much_has_to_wait_and_others_do_not(api: Any) -> None:
    names = ["".join(each) for each in zip(*[iter("abcdefghijklmnopqrstuvwxyz" * 26)] * 26, strict=True)]
    token = api.devices.token("talker")
    ids = [name[:25] + letter for name, letter in zip(names, "abcdefghijklmnop", strict=False)]
    answers = [_post(api, _said(id=each), token) for each in ids[: limits.FEEDBACK_DEVICE_BURST + 1]]
    assert [answer.status_code for answer in answers] == [200] * limits.FEEDBACK_DEVICE_BURST + [429]
    assert 0 < int(answers[-1].headers["retry-after"]) <= limits.FEEDBACK_DEVICE_PAUSE_S
    assert _post(api, _said(id="z" * 26), api.devices.token("quiet")).status_code == 200


def test_random_bytes_of_a_log_come_back_as_they_went(api: Any) -> None:
    log = SystemRng().token_bytes(50_000)
    assert _post(api, _said(id="q" * 26, log=log), api.devices.token("binary")).status_code == 200
    assert base64.b64decode(api.get(f"/v1/feedback/{'q' * 26}")["log"]) == log
