"""Dispatch answers: each reason to reject one, and questions."""

import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.core import errors, limits
from stormline.wire import jws, plan, tokens
from stormline.wire.plan import Endpoint, HostPlan, Plan, PlanRequest

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEYS = {"p1": KEY.public_key()}
NOW = 1_800_000_000
GATEWAY = Endpoint(host="127.0.0.1", port=8702, server_name="gateway.internal", unit="u1")
PLAN = Plan(
    app="shop",
    version=7,
    issued_at=NOW,
    expires_at=NOW + 3600,
    unit="u1",
    hosts={"api.shop.example": HostPlan(endpoints=(GATEWAY,), connect_timeout_s=2.5)},
    unknown=("other.example",),
    report=Endpoint(host="127.0.0.1", port=8704, carrier="h1"),
    disabled=("direct",),
)
HOSTS = ("api.shop.example", "other.example")


def check(
    text: str | bytes, *, app: str = "shop", hosts: tuple[str, ...] = HOSTS, version_min: int = 0, wall: float = NOW
) -> Plan:
    return plan.verify(text, keys=KEYS, app=app, hosts=hosts, version_min=version_min, wall=wall)


def rejection(text: str | bytes, **arguments: object) -> str:
    with pytest.raises(errors.AnswerRejected) as caught:
        check(text, **arguments)  # type: ignore[arg-type]
    return caught.value.reason


def good() -> str:
    return plan.sign(PLAN, key=KEY, kid="p1")


def altered(**change: object) -> str:
    """A plan with other members, well signed."""
    members = json.loads(jws.b64url_decode(good().split(".")[1])) | change
    return jws.sign(json.dumps(members).encode(), key=KEY, kid="p1", typ=plan.TYP)


def test_verify_own_plan_gives_it_whole() -> None:
    assert check(good()) == PLAN
    assert check(good().encode()) == PLAN


def test_member_of_a_newer_version_is_ignored() -> None:
    assert check(altered(tomorrow={"a": [1]})) == PLAN


def test_endpoint_with_unknown_carrier_is_kept_for_the_client_to_skip() -> None:
    hosts = {"api.shop.example": {"endpoints": [{"host": "127.0.0.1", "port": 1, "carrier": "sl-quic"}]}}
    assert check(altered(hosts=hosts)).hosts["api.shop.example"].endpoints[0].carrier == "sl-quic"


def test_wrong_app_is_rejected() -> None:
    assert rejection(good(), app="bank") == "wrong-app"


def test_older_version_than_held_is_rejected() -> None:
    assert check(good(), version_min=7) == PLAN
    assert rejection(good(), version_min=8) == "stale-version"


@pytest.mark.parametrize(
    ("wall", "reason"),
    [
        (NOW + 3600 + limits.CLOCK_SKEW_S - 1, ""),
        (NOW + 3600 + limits.CLOCK_SKEW_S, "expired"),
        (NOW - limits.CLOCK_SKEW_S, ""),
        (NOW - limits.CLOCK_SKEW_S - 1, "not-yet-valid"),
    ],
)
def test_plan_is_good_in_its_time_only(wall: float, reason: str) -> None:
    if reason:
        assert rejection(good(), wall=wall) == reason
    else:
        assert check(good(), wall=wall) == PLAN


def test_host_asked_for_and_not_answered_is_rejected() -> None:
    assert rejection(good(), hosts=("api.shop.example", "third.example")) == "malformed"


def test_hosts_may_be_an_iterator() -> None:
    assert plan.verify(good(), keys=KEYS, app="shop", hosts=iter(HOSTS), version_min=0, wall=NOW) == PLAN


def test_unknown_key_is_named_as_such() -> None:
    assert rejection(plan.sign(PLAN, key=KEY, kid="p2")) == "unknown-key"


def test_other_key_under_a_known_id_is_rejected() -> None:
    other = Ed25519PrivateKey.from_private_bytes(bytes(32))
    assert rejection(plan.sign(PLAN, key=other, kid="p1")) == "signature"


def test_device_token_does_not_pass_for_a_plan() -> None:
    token = tokens.DeviceToken(app="shop", device="d", iat=NOW, exp=NOW + 9)
    assert rejection(tokens.mint(token, key=KEY, kid="p1")) == "signature"


@pytest.mark.parametrize("cut", [0, 1, 30, 100, -1, -2, -60])
def test_truncated_text_is_rejected(cut: int) -> None:
    assert rejection(good()[:cut]) == "signature"


def test_text_over_the_bound_is_rejected_unread() -> None:
    assert rejection("x" * (limits.PLAN_BYTES_MAX + 1)) == "too-large"
    assert rejection("é" * (limits.PLAN_BYTES_MAX // 2 + 1)) in {"too-large", "signature"}


@pytest.mark.parametrize("text", ["<html>login</html>", "", "\ud800", b"\xff\xfe", b"\x00" * 50, "{}"])
def test_what_is_no_plan_is_rejected(text: str | bytes) -> None:
    assert rejection(text) == "signature"


@pytest.mark.parametrize(
    "change",
    [
        {"version": -1},
        {"version": 10**400},
        {"version": 1.5},
        {"issued_at": -(10**400)},
        {"expires_at": 10**400},
        {"hosts": []},
        {"hosts": {"api.shop.example": {"endpoints": [{"host": "127.0.0.1", "port": 0}]}}},
        {"hosts": {"api.shop.example": {"endpoints": [{"host": "127.0.0.1", "port": 65536}]}}},
        {"hosts": {"api.shop.example": {"endpoints": [{"host": "127.0.0.1", "port": 1, "weight": -1}]}}},
        {"hosts": {"api.shop.example": {"connect_timeout_s": 0}}},
        {"hosts": {"api.shop.example": {"deadline_s": -5}}},
        {"report": "https://127.0.0.1"},
        {"disabled": "long"},
    ],
)
def test_malformed_members_are_rejected(change: dict[str, object]) -> None:
    assert rejection(altered(**change)) == "malformed"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[1]",
        b'{"app":"shop","version":7,"issued_at":1800000000,"expires_at":1800003600,"x":'
        + b"[" * 99999
        + b"]" * 99999
        + b"}",
        b'{"app":"bank","app":"shop","version":7,"issued_at":1800000000,"expires_at":1800003600}',
        b'{"app":"shop","version":7,"issued_at":1800000000,"expires_at":1800003600,"x":"\xff"}',
    ],
    ids=["empty", "array", "deep", "twice", "utf-8"],
)
def test_malformed_payload_is_rejected(payload: bytes) -> None:
    assert rejection(jws.sign(payload, key=KEY, kid="p1", typ=plan.TYP), hosts=()) == "malformed"


class TestRequest:
    def test_request_round_trips(self) -> None:
        assert plan.decode_request(b'{"app":"shop","hosts":["a.example"],"version":3}') == PlanRequest(
            app="shop", hosts=("a.example",), version=3
        )

    @pytest.mark.parametrize(
        "body",
        [b"", b"{}", b"[]", b'{"app":"a"}', b'{"app":"a","hosts":"b"}', b'{"app":"a","hosts":[1]}', b"\xff",
         b'{"app":"a","hosts":[],"version":-1}', b'{"app":"a","app":"b","hosts":[]}',
         b'{"app":"a","hosts":[],"x":' + b"[" * 30000 + b"]" * 30000 + b"}", b"[" * 60000],
    )  # fmt: skip
    def test_malformed_request_is_a_value_error(self, body: bytes) -> None:
        with pytest.raises(ValueError, match=r"."):
            plan.decode_request(body)
