"""Signed texts: what is accepted, and everything that must not be."""

import base64
import hashlib
import hmac
import json

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.core import errors
from stormline.wire import jws

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
KEYS = {"k1": KEY.public_key()}
TYP = "test+jws"

# RFC 8037 Appendix A: the key of A.1 and A.2, the signature of A.4.
RFC_D = "nWGxne_9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A"
RFC_X = "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"
RFC_SIGNING_INPUT = "eyJhbGciOiJFZERTQSJ9.RXhhbXBsZSBvZiBFZDI1NTE5IHNpZ25pbmc"
RFC_SIGNATURE = "hgyY0il_MGCjP0JzlnLWG1PPOt7-09PGcvMg3AIbQR6dWbhijcNR4ki4iylGjg5BhVsPt9g7sVvpAr_MuM0KAg"


def check(text: str | bytes, *, size_max: int = 10_000) -> bytes:
    return jws.verify(text, keys=KEYS, typ=TYP, size_max=size_max)


def forge(header: bytes, payload: bytes = b"hello", *, key: Ed25519PrivateKey = KEY) -> str:
    """Sign any header with the true key: only the header is at fault."""
    signed = f"{jws.b64url(header)}.{jws.b64url(payload)}"
    return f"{signed}.{jws.b64url(key.sign(signed.encode()))}"


def header(**members: object) -> bytes:
    return json.dumps({"alg": "EdDSA", "kid": "k1", "typ": TYP} | members).encode()


def good() -> str:
    return jws.sign(b"hello", key=KEY, kid="k1", typ=TYP)


def test_verify_own_signature_gives_the_payload() -> None:
    assert check(good()) == b"hello"
    assert check(good().encode()) == b"hello"


def test_verify_empty_payload_is_a_payload() -> None:
    assert check(jws.sign(b"", key=KEY, kid="k1", typ=TYP)) == b""


class TestRfc8037:
    """Appendix A.4, at the level of the signature: its header has no `kid`, so as a text we refuse it."""

    def test_vector_signature_verifies(self) -> None:
        keys = jws.load_public_keys({"rfc": RFC_X})
        keys["rfc"].verify(jws.b64url_decode(RFC_SIGNATURE), RFC_SIGNING_INPUT.encode())

    def test_vector_is_what_we_sign(self) -> None:
        key = Ed25519PrivateKey.from_private_bytes(jws.b64url_decode(RFC_D))
        assert jws.SigningKey(key, "rfc").public_text == RFC_X
        assert jws.b64url(key.sign(RFC_SIGNING_INPUT.encode())) == RFC_SIGNATURE

    def test_vector_as_a_text_without_kid_is_refused(self) -> None:
        with pytest.raises(errors.SignatureError, match="kid"):
            jws.verify(
                f"{RFC_SIGNING_INPUT}.{RFC_SIGNATURE}", keys=jws.load_public_keys({"rfc": RFC_X}), typ=TYP, size_max=999
            )


class TestHeader:
    def test_unknown_kid_is_an_unknown_key(self) -> None:
        with pytest.raises(errors.UnknownKeyError):
            check(forge(header(kid="k2")))

    @pytest.mark.parametrize("typ", ["", "JWT", "TEST+JWS", "test+jws "])
    def test_other_typ_is_refused(self, typ: str) -> None:
        with pytest.raises(errors.SignatureError, match="signed for use as"):
            check(forge(header(typ=typ)))

    @pytest.mark.parametrize("alg", ["none", "None", "NONE", "", "HS256", "ES256", "Ed25519", "eddsa"])
    def test_other_alg_is_refused(self, alg: str) -> None:
        with pytest.raises(errors.SignatureError, match="algorithm"):
            check(forge(header(alg=alg)))

    def test_alg_none_with_empty_signature_is_refused(self) -> None:
        with pytest.raises(errors.SignatureError):
            check(f"{jws.b64url(header(alg='none'))}.{jws.b64url(b'hello')}.")

    def test_hmac_with_the_public_key_is_refused(self) -> None:
        for secret in (
            KEY.public_key().public_bytes_raw(),
            KEY.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo),
        ):
            signed = f"{jws.b64url(header(alg='HS256'))}.{jws.b64url(b'hello')}"
            mac = hmac.new(secret, signed.encode(), hashlib.sha256).digest()
            with pytest.raises(errors.SignatureError):
                check(f"{signed}.{jws.b64url(mac)}")

    @pytest.mark.parametrize(
        "extra",
        [
            {"crit": ["exp"]},
            {"crit": []},
            {"b64": False, "crit": ["b64"]},
            {"jwk": {}},
            {"x5u": "https://x"},
            {"cty": ""},
        ],
    )
    def test_other_member_is_refused(self, extra: dict[str, object]) -> None:
        with pytest.raises(errors.SignatureError, match="unknown field"):
            check(forge(header(**extra)))

    @pytest.mark.parametrize(
        "raw",
        [
            b'{"alg":"none","alg":"EdDSA","kid":"k1","typ":"test+jws"}',
            b'{"alg":"EdDSA","kid":"k2","kid":"k1","typ":"test+jws"}',
            b'{"alg":"EdDSA","kid":"k1","typ":"x","t\\u0079p":"test+jws"}',
        ],
    )
    def test_member_twice_is_refused(self, raw: bytes) -> None:
        with pytest.raises(errors.SignatureError, match="twice"):
            check(forge(raw))

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"null",
            b"[]",
            b'"EdDSA"',
            b"{}",
            b'{"alg":"EdDSA","kid":1,"typ":"test+jws"}',
            b'{"alg":["EdDSA"],"kid":"k1","typ":"test+jws"}',
            b'\xef\xbb\xbf{"alg":"EdDSA","kid":"k1","typ":"test+jws"}',
            b'{"alg":"EdDSA","kid":"\xff","typ":"test+jws"}',
            b'{"alg":"EdDSA","kid":"k1","typ":"test+jws"}}',
            '{"alg":"EdDSA","kid":"k1","typ":"test+jws"}'.encode("utf-16"),
            b"[" * 5000 + b"]" * 5000,
            b'{"x":' * 1500 + b"1" + b"}" * 1500,
        ],
    )
    def test_malformed_header_is_refused(self, raw: bytes) -> None:
        with pytest.raises(errors.SignatureError):
            check(forge(raw), size_max=100_000)

    def test_members_in_another_order_are_accepted(self) -> None:
        assert check(forge(b'{ "typ": "test+jws", "kid": "k1",\n "alg": "EdDSA" }')) == b"hello"


class TestText:
    @pytest.mark.parametrize("tail", ["\n", " ", "\r\n", "=", "==", ".", "\x00", "A", "é"])
    def test_something_behind_it_is_refused(self, tail: str) -> None:
        with pytest.raises(errors.SignatureError):
            check(good() + tail)

    @pytest.mark.parametrize("lead", ["\n", " ", "\ufeff", "Bearer ", "."])
    def test_something_before_it_is_refused(self, lead: str) -> None:
        with pytest.raises(errors.SignatureError):
            check(lead + good())

    @pytest.mark.parametrize(
        "text", ["", ".", "..", "...", "a.b", "a.b.c", "a.b.c.d", "\ud800", "\ud800.\ud800.\ud800"]
    )
    def test_what_is_no_signed_text_is_refused(self, text: str) -> None:
        with pytest.raises(errors.SignatureError):
            check(text)

    @pytest.mark.parametrize("part", [0, 1, 2])
    def test_padding_is_refused(self, part: int) -> None:
        parts = jws.sign(b"1234", key=KEY, kid="k1", typ=TYP).split(".")
        parts[part] += "=" * (-len(parts[part]) % 4 or 4)
        with pytest.raises(errors.SignatureError):
            check(".".join(parts))

    def test_non_canonical_ending_is_refused(self) -> None:
        head, payload, signature = good().split(".")  # 5 and 64 bytes: the last character carries unused bits
        alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
        for at, part in ((1, payload), (2, signature)):
            changed = part[:-1] + alphabet[alphabet.index(part[-1]) + 1]
            assert base64.urlsafe_b64decode(changed + "==") == base64.urlsafe_b64decode(part + "==")
            parts = [head, payload, signature]
            parts[at] = changed
            with pytest.raises(errors.SignatureError, match="canonical"):
                check(".".join(parts))

    def test_standard_alphabet_is_refused(self) -> None:
        with pytest.raises(ValueError, match="base64url"):
            jws.b64url_decode("+/+/")

    def test_other_key_is_refused(self) -> None:
        with pytest.raises(errors.SignatureError, match="wrong signature"):
            check(forge(header(), key=OTHER))

    @pytest.mark.parametrize("length", [0, 1, 32, 63, 65, 128])
    def test_signature_of_another_length_is_refused(self, length: int) -> None:
        signed = good().rpartition(".")[0]
        with pytest.raises(errors.SignatureError):
            check(f"{signed}.{jws.b64url(bytes(length))}")

    def test_payload_of_another_text_is_refused(self) -> None:
        mine, theirs = good().split("."), jws.sign(b"other", key=KEY, kid="k1", typ=TYP).split(".")
        with pytest.raises(errors.SignatureError, match="wrong signature"):
            check(".".join([mine[0], theirs[1], mine[2]]))

    def test_signature_with_s_plus_l_is_refused(self) -> None:
        # RFC 8032 section 5.1.7: S must be below the group order, or every text would have a second valid form.
        order = 2**252 + 27742317777372353535851937790883648493
        signed, _, signature = good().rpartition(".")
        raw = jws.b64url_decode(signature)
        twin = raw[:32] + (int.from_bytes(raw[32:], "little") + order).to_bytes(32, "little")
        with pytest.raises(errors.SignatureError, match="wrong signature"):
            check(f"{signed}.{jws.b64url(twin)}")

    def test_size_at_the_bound_passes_and_one_more_does_not(self) -> None:
        text = good()
        assert check(text, size_max=len(text)) == b"hello"
        with pytest.raises(errors.SignatureError, match="at most"):
            check(text, size_max=len(text) - 1)

    def test_size_is_counted_in_bytes(self) -> None:
        with pytest.raises(errors.SignatureError, match="at most"):
            check("é" * 100, size_max=150)


class TestPublicKeys:
    def test_keys_round_trip(self) -> None:
        text = jws.SigningKey(KEY, "k1").public_text
        assert jws.load_public_keys({"k1": text})["k1"] == KEY.public_key()
        assert len(jws.b64url_decode(text)) == jws.PUBLIC_KEY_BYTES

    @pytest.mark.parametrize("text", ["", "A", "AAAA", RFC_X + "A", RFC_X + "=", RFC_X[:-1], "é", RFC_X[:-1] + "p"])
    def test_what_is_no_key_is_refused_by_id(self, text: str) -> None:
        with pytest.raises(errors.SignatureError, match="public key 'k9'"):
            jws.load_public_keys({"k9": text})

    def test_signing_key_shows_no_secret(self) -> None:
        secret = KEY.private_bytes_raw()
        shown = repr(jws.SigningKey(KEY, "k1"))
        assert jws.b64url(secret) not in shown
        assert secret.hex() not in shown


class TestPyJwt:
    """The same form in another library, both ways."""

    def test_our_text_verifies_there(self) -> None:
        text = jws.sign(b'{"a":1}', key=KEY, kid="k1", typ=TYP)
        assert jwt.decode(text, KEY.public_key(), algorithms=["EdDSA"]) == {"a": 1}
        assert jwt.get_unverified_header(text) == {"alg": "EdDSA", "kid": "k1", "typ": TYP}

    def test_their_text_verifies_here(self) -> None:
        text = jwt.encode({"a": 1}, KEY, algorithm="EdDSA", headers={"kid": "k1", "typ": TYP})
        assert json.loads(check(text)) == {"a": 1}

    def test_their_text_without_kid_is_refused(self) -> None:
        with pytest.raises(errors.SignatureError, match="kid"):
            check(jwt.encode({"a": 1}, KEY, algorithm="EdDSA", headers={"typ": TYP}))

    def test_their_alg_none_is_refused(self) -> None:
        with pytest.raises(errors.SignatureError):
            check(jwt.encode({"a": 1}, "", algorithm="none", headers={"kid": "k1", "typ": TYP}))
