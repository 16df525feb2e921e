"""Device tokens: claims, times, and the way through another library."""

import json

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.core import errors, limits
from stormline.core.codes import Action, Code, action
from stormline.wire import jws, plan, tokens

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEYS = {"t1": KEY.public_key()}
NOW = 1_800_000_000
TOKEN = tokens.DeviceToken(app="shop", device="d1", user="u1", iat=NOW, exp=NOW + 3600)
CLAIMS: dict[str, object] = {"aud": "shop", "sub": "d1", "iat": NOW, "exp": NOW + 60}


def signed(payload: bytes, typ: str = tokens.TYP) -> str:
    return jws.sign(payload, key=KEY, kid="t1", typ=typ)


def check(text: str, wall: float = NOW) -> tokens.DeviceToken:
    return tokens.verify(text, keys=KEYS, wall=wall)


def test_verify_own_token_gives_its_claims() -> None:
    assert check(tokens.mint(TOKEN, key=KEY, kid="t1")) == TOKEN


def test_token_without_user_is_nobodys() -> None:
    assert check(signed(json.dumps(CLAIMS).encode())).user == ""


def test_claim_of_a_newer_version_is_ignored() -> None:
    assert check(signed(json.dumps(CLAIMS | {"jti": "x", "scope": ["a"]}).encode())).app == "shop"


@pytest.mark.parametrize(
    ("wall", "good"),
    [
        (NOW, True),
        (NOW + 3599.999, True),
        (NOW + 3600, False),
        (NOW + 1e12, False),
        (NOW - limits.CLOCK_SKEW_S, True),
        (NOW - limits.CLOCK_SKEW_S - 1, False),
    ],
)
def test_token_is_good_in_its_time_only(wall: float, good: bool) -> None:
    text = tokens.mint(TOKEN, key=KEY, kid="t1")
    if good:
        assert check(text, wall) == TOKEN
    else:
        late = wall > NOW
        with pytest.raises(errors.ExpiredError if late else errors.NotYetValidError) as caught:
            check(text, wall)
        assert tokens.refusal_code(caught.value) is (Code.TOKEN_EXPIRED if late else Code.TOKEN_NOT_YET_VALID)


def test_not_before_in_the_future_is_refused() -> None:
    text = signed(json.dumps(CLAIMS | {"nbf": NOW + 200, "exp": NOW + 900}).encode())
    with pytest.raises(errors.NotYetValidError, match="future"):
        check(text)
    assert check(text, NOW + 200).device == "d1"


def test_forged_token_that_is_also_expired_counts_as_forged() -> None:
    text = tokens.mint(TOKEN, key=Ed25519PrivateKey.from_private_bytes(bytes(32)), kid="t1")
    with pytest.raises(errors.SignatureError) as caught:
        check(text, NOW + 9999)
    assert tokens.refusal_code(caught.value) is Code.TOKEN_INVALID


def test_token_of_an_unknown_key_asks_for_a_new_token() -> None:
    with pytest.raises(errors.UnknownKeyError) as caught:
        check(tokens.mint(TOKEN, key=KEY, kid="rotated-away"))
    assert tokens.refusal_code(caught.value) is Code.TOKEN_KEY_UNKNOWN
    assert action(Code.TOKEN_KEY_UNKNOWN) is Action.RENEW


@pytest.mark.parametrize(
    "change",
    [
        {"aud": ""},
        {"sub": ""},
        {"aud": "x" * 129},
        {"sub": "é" * 65},
        {"user": "x" * 129},
        {"aud": ["shop"]},
        {"sub": 7},
        {"exp": "soon"},
        {"exp": -1},
        {"exp": -(10**400)},
        {"iat": 10**400},
        {"exp": 2**53},
        {"iat": True},
        {"exp": None},
        {"nbf": "x"},
    ],
)
def test_malformed_claims_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(errors.SignatureError):
        check(signed(json.dumps(CLAIMS | change).encode()))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{}",
        b"[]",
        b'{"aud":"shop","sub":"d1","iat":1,"exp":9999999999,"x":' + b"[" * 1200 + b"]" * 1200 + b"}",
        b'{"aud":"shop","sub":"\\ud800","iat":1,"exp":9999999999}',
        b'{"aud":"shop","sub":"d1","iat":1,"exp":9999999999,"x":"\xff"}',
        b'{"aud":"shop","sub":"d1","sub":"d2","iat":1,"exp":9999999999}',
        b'{"aud":"shop","sub":"d1","iat":1,"exp":NaN}',
    ],
)
def test_malformed_payload_is_refused(payload: bytes) -> None:
    with pytest.raises(errors.SignatureError):
        check(signed(payload))


def test_plan_does_not_pass_for_a_token() -> None:
    with pytest.raises(errors.SignatureError, match="use"):
        check(signed(json.dumps(CLAIMS).encode(), typ=plan.TYP))


def test_ordinary_jwt_does_not_pass_for_a_token() -> None:
    with pytest.raises(errors.SignatureError, match="use"):
        check(signed(json.dumps(CLAIMS).encode(), typ="JWT"))


def test_token_over_the_bound_is_refused_unread() -> None:
    with pytest.raises(errors.SignatureError, match="at most"):
        check(signed(json.dumps(CLAIMS | {"x": "y" * limits.TOKEN_BYTES_MAX}).encode()))


class TestPyJwt:
    def test_our_token_verifies_there(self) -> None:
        token = tokens.DeviceToken(app="shop", device="d1", iat=1, exp=2**40)
        claims = jwt.decode(
            tokens.mint(token, key=KEY, kid="t1"), KEY.public_key(), algorithms=["EdDSA"], audience="shop"
        )
        assert claims == {"aud": "shop", "sub": "d1", "iat": 1, "exp": 2**40}

    def test_their_token_verifies_here(self) -> None:
        text = jwt.encode(CLAIMS, KEY, algorithm="EdDSA", headers={"kid": "t1", "typ": tokens.TYP})
        assert check(text) == tokens.DeviceToken(app="shop", device="d1", iat=NOW, exp=NOW + 60)

    def test_their_expired_token_is_refused_here(self) -> None:
        text = jwt.encode(CLAIMS | {"exp": NOW - 1}, KEY, algorithm="EdDSA", headers={"kid": "t1", "typ": tokens.TYP})
        with pytest.raises(errors.ExpiredError):
            check(text)


def test_device_of_a_token_is_told_to_its_holder_and_of_anything_else_nothing() -> None:
    key = Ed25519PrivateKey.generate()
    token = tokens.mint(tokens.DeviceToken(app="shop", device="d-1", iat=0, exp=1), key=key, kid="k")
    assert tokens.device_of(token) == "d-1"
    for text in ("", "a", "a.b.c", "a.!.c", "é.é.é", token[:40]):
        assert tokens.device_of(text) == ""
