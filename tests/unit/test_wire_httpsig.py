"""Signed answers: RFC 9421's own vectors, RFC 9530's digests, and what proves nothing."""

import base64

import pytest

from stormline.core import errors, limits, limits_means
from stormline.wire import httpsig
from stormline.wire.httpsig import Asked, InnerList, Item, Signer, Token, VerifyKey

ASKED = Asked(
    "POST",
    "https",
    "example.com",
    "/foo?param=Value&Pet=dog",
    (
        (b"Host", b"example.com"),
        (b"Date", b"Tue, 20 Apr 2021 02:07:55 GMT"),
        (b"Content-Type", b"application/json"),
        (
            b"Content-Digest",
            b"sha-512=:WZDPaVn/7XgHaAy8pmojAkGWoRx2UFChF41A2svX+TaPm+AbwAgBWnrIiYllu7BNNyealdVLvRwEmTHWXvJwew==:",
        ),
        (b"Content-Length", b"18"),
    ),
)
"""RFC 9421 appendix B.2: `test-request`."""
BODY = b'{"hello": "world"}'
SECRET = base64.b64decode("uzvJfB4u3N0Jy4T7NZ75MDVcr8zSTInedJtkgcu46YW4XByzNJjxBdtjUkdJPBtbmHhIDi6pcl8jsasjlTMtDQ==")
"""Appendix B.1.5: `test-shared-secret`."""
ED25519_PUBLIC = base64.b64decode("MCowBQYDK2VwAyEAJrQLj5P/89iXES9+vFgrIy29clF9CC/oPPsw3c5D0bs=")[-32:]
"""Appendix B.1.4: `test-key-ed25519`."""

SIG_B26 = (
    'sig-b26=("date" "@method" "@path" "@authority" "content-type" "content-length")'
    ';created=1618884473;keyid="test-key-ed25519"'
)


class TestVectors:
    @pytest.mark.parametrize(
        ("key", "signature_input", "signature"),
        [
            (
                VerifyKey("hmac-sha256", SECRET),
                'sig-b25=("date" "@authority" "content-type");created=1618884473;keyid="test-shared-secret"',
                "sig-b25=:pxcQw6G3AjtMBQjwo8XzkZf/bws5LelbaMk5rGIGtE8=:",
            ),
            (
                VerifyKey("ed25519", ED25519_PUBLIC),
                SIG_B26,
                "sig-b26=:wqcAqbmYJ2ji2glfAMaRy4gruYYnx2nEFN2HN6jrnDnQCK1u02Gb04v9EDgwUPiu4A0w6vuQv5lIp5WPpBKRCw==:",
            ),
        ],
        ids=["B.2.5", "B.2.6"],
    )
    def test_signature_of_the_rfc_verifies_and_no_other_byte_does(self, key, signature_input, signature):
        ((label, covered),) = httpsig.parse_dictionary(signature_input).items()
        signed = httpsig.parse_dictionary(signature)[label].value
        base = httpsig.signature_base(covered, asked=ASKED)
        assert key.verifies(signed, base)
        assert not key.verifies(signed, base.replace(b"application/json", b"application/xml"))
        assert not key.verifies(signed[:-1] + bytes([signed[-1] ^ 1]), base)

    def test_signature_base_is_the_text_of_the_rfc(self):
        # Appendix B.2.6
        text = 's=("date" "@method" "@path" "@authority");created=1618884473;keyid="k"'
        covered = httpsig.parse_dictionary(text)["s"]
        assert httpsig.signature_base(covered, asked=ASKED).decode().splitlines() == [
            '"date": Tue, 20 Apr 2021 02:07:55 GMT',
            '"@method": POST',
            '"@path": /foo',
            '"@authority": example.com',
            '"@signature-params": ("date" "@method" "@path" "@authority");created=1618884473;keyid="k"',
        ]

    def test_digests_of_the_rfc_are_the_bodys(self):
        sha512 = dict(ASKED.headers)[b"Content-Digest"].decode()
        sha256 = "sha-256=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=:"
        assert httpsig.digest_fits(sha512, BODY)
        assert httpsig.digest_fits(sha256, BODY)
        assert httpsig.digest_fits(f"{sha256}, {sha512}", BODY)
        assert httpsig.content_digest(BODY) == sha256
        assert httpsig.content_digest(BODY, "sha-512") == sha512

    @pytest.mark.parametrize(
        "value",
        [
            "", "sha-256", "sha-256=:AAAA:", "md5=:AAAA:", 'sha-256="x"', "sha-256=(:AAAA:)", "sha-256=:X48E9:", "=",
            "sha-256=:X48E9qOokqqrvdts8nOJRJN3OWDUoyWxBf7kbu9DBPE=:, sha-512=:AAAA:",
        ],
    )  # fmt: skip
    def test_digest_that_is_another_bodys_or_none_does_not_fit(self, value):
        assert not httpsig.digest_fits(value, BODY)


class TestStructuredFields:
    @pytest.mark.parametrize(
        ("text", "members"),
        [
            ("", {}),
            ("a", {"a": Item(True, {})}),
            ("a=1, b=?0;x", {"a": Item(1, {}), "b": Item(False, {"x": True})}),
            ('a="q\\"\\\\"', {"a": Item('q"\\', {})}),
            ("a=tok/en", {"a": Item(Token("tok/en"), {})}),
            ("a=:aGk=:", {"a": Item(b"hi", {})}),
            ('a=("x" "y";req);n=-5', {"a": InnerList((Item("x", {}), Item("y", {"req": True})), {"n": -5})}),
            ("a=( )", {"a": InnerList((), {})}),
            ("a=1,a=2", {"a": Item(2, {})}),
        ],
    )
    def test_dictionary_is_read(self, text, members):
        assert httpsig.parse_dictionary(text) == members

    @pytest.mark.parametrize(
        "text",
        [
            "a=", "a=1,", "A=1", "a=1 b=2", 'a=("x""y")', "a=(1", "a=:*:", "a=1.5", "a=?2", 'a="\u00e9"', 'a="', "a;",
            ",",
            "a=((1))", "a=@1", "a=:a:",
            ",".join(f"k{n}=1" for n in range(limits_means.SIGNATURE_MEMBERS_MAX + 1)),
            f"a=({' '.join(['1'] * (limits_means.SIGNATURE_COMPONENTS_MAX + 1))})",
            "a" + "".join(f";p{n}" for n in range(limits_means.SIGNATURE_PARAMS_MAX + 1)),
            f'a="{"x" * limits_means.SIGNATURE_FIELD_CHARS_MAX}"',
        ],
    )  # fmt: skip
    def test_text_that_breaks_grammar_or_bounds_is_refused(self, text):
        with pytest.raises(ValueError):  # noqa: PT011
            httpsig.parse_dictionary(text)


PRIVATE = bytes(range(32))
SIGN = Signer("hmac-sha256", SECRET)
KEYS = {"k": VerifyKey("hmac-sha256", SECRET)}
GET = Asked("GET", "http", "shop.test", "/items?page=2", ((b"host", b"shop.test"),))
NOW = 1_700_000_000
HEAD = ((b"content-type", b"application/json"), (b"x-other", b"1"))


def signed(asked=GET, status=200, body=BODY, *, nonce="n1", created=NOW, sign=SIGN, keyid="k", cover=("content-type",)):
    lines = httpsig.sign_answer(
        asked, status, HEAD, body, keyid=keyid, sign=sign, created=created, nonce=nonce, cover=cover
    )
    return (*HEAD, *lines)


def check(headers, *, asked=GET, status=200, body=BODY, nonce="n1", keys=KEYS, now_s=float(NOW)):
    return httpsig.check_answer(asked, status, headers, body, keys=keys, nonce=nonce, now_s=now_s)


class TestAnswer:
    def test_signed_answer_is_trusted_for_what_is_covered(self):
        verdict = check(signed())
        assert verdict.trusted
        assert verdict.covered == {"content-type", "content-digest"}

    def test_ed25519_answer_is_trusted(self):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        public = Ed25519PrivateKey.from_private_bytes(PRIVATE).public_key().public_bytes_raw()
        assert check(signed(sign=Signer("ed25519", PRIVATE)), keys={"k": VerifyKey("ed25519", public)}).trusted

    @pytest.mark.parametrize(
        ("headers", "differs"),
        [
            (HEAD, {}),
            ((*HEAD, (b"content-digest", httpsig.content_digest(BODY).encode())), {}),
            (signed(), {"body": b"injected"}),
            (signed(), {"status": 404}),
            (signed(), {"asked": GET._replace(target="/items?page=3")}),
            (signed(), {"asked": GET._replace(authority="evil.test")}),
            (signed(), {"asked": GET._replace(method="HEAD")}),
            (signed(), {"nonce": "n2"}),
            (signed(), {"keys": {}}),
            (signed(), {"keys": {"other": KEYS["k"]}}),
            (signed(), {"keys": {"k": VerifyKey("hmac-sha256", b"another secret, 16+")}}),
            (signed(), {"keys": {"k": VerifyKey("ed25519", ED25519_PUBLIC)}}),
            (tuple((n, b"text/html" if n == b"content-type" else v) for n, v in signed()), {}),
            ((*signed(), (b"content-type", b"text/html")), {}),
            (tuple((n, v.replace(b'"@status" ', b"")) for n, v in signed()), {}),
            (tuple((n, v.replace(b' "@request-target";req', b"")) for n, v in signed()), {}),
            (tuple((n, v.replace(b'"content-digest" ', b"")) for n, v in signed()), {}),
        ],
    )  # fmt: skip
    def test_answer_that_differs_from_what_was_signed_is_not_trusted(self, headers, differs):
        verdict = check(headers, **differs)
        assert not verdict.trusted
        assert verdict.why

    @pytest.mark.parametrize("weak", [b'"@status"', b'"content-digest"', b'"@method";req', b'"@authority";req'])
    def test_valid_signature_that_covers_too_little_proves_nothing(self, weak):
        covered = httpsig._wanted()
        items = tuple(item for item in covered.items if httpsig.serialize(item).encode() != weak)
        assert len(items) == len(covered.items) - 1
        covered = InnerList(items, {"created": NOW, "keyid": "k", "nonce": "n1"})
        digest = (b"content-digest", httpsig.content_digest(BODY).encode())
        base = httpsig.signature_base(covered, asked=GET, status=200, headers=(*HEAD, digest))
        headers = (
            *HEAD,
            digest,
            (b"signature-input", f"s={httpsig.serialize(covered)}".encode()),
            (b"signature", f"s={httpsig.serialize(Item(SIGN(base), {}))}".encode()),
        )
        assert not check(headers).trusted

    @pytest.mark.parametrize("now_s", [NOW - 10.0 * 365 * 86_400, NOW + 90.0 * 86_400])
    def test_wrong_clock_does_not_matter_where_our_nonce_is_signed(self, now_s):
        assert check(signed(), now_s=now_s).trusted

    @pytest.mark.parametrize(
        ("age_s", "trusted"),
        [
            (0.0, True),
            (limits_means.CLEAR_SIGNATURE_AGE_S, True),
            (limits_means.CLEAR_SIGNATURE_AGE_S + 1, False),
            (-limits.CLOCK_SKEW_S, True),
            (-limits.CLOCK_SKEW_S - 1, False),
        ],
    )
    def test_signature_without_a_nonce_counts_by_its_age(self, age_s, trusted):
        assert check(signed(nonce=None), now_s=NOW + age_s).trusted is trusted

    def test_one_good_signature_among_others_is_enough(self):
        good = dict(signed())
        both = {
            b"signature-input": b'x=("@status");keyid="k", ' + good[b"signature-input"],
            b"signature": b"x=:AAAA:, " + good[b"signature"],
        }
        assert check(tuple((name, both.get(name, value)) for name, value in good.items())).trusted

    def test_nonce_comes_back_from_what_was_asked_for(self):
        assert httpsig.nonce_of(httpsig.accept_signature("abc")) == "abc"
        assert httpsig.nonce_of(b"sl=(") is None
        assert httpsig.nonce_of(b"sl=()") is None


class TestKeys:
    def test_key_is_not_shown(self):
        assert "uzv" not in repr(KEYS["k"])
        assert repr(SECRET) not in repr(KEYS)

    @pytest.mark.parametrize(
        ("algorithm", "key"),
        [("rsa", b"x" * 32), ("ed25519", b"x"), ("hmac-sha256", b"short"), ("hmac-sha256", "a text of 16 chars")],
    )
    def test_key_that_cannot_be_one_is_refused(self, algorithm, key):
        with pytest.raises(errors.ConfigError):
            VerifyKey(algorithm, key)
