"""Signed texts: JWS compact serialization (RFC 7515) with Ed25519 (RFC 8037), and nothing else.

One algorithm, so there is nothing to negotiate and no `alg` confusion. Every text also names its use in `typ`
(RFC 8725 section 3.11): a device token can never pass for a dispatch answer, nor the other way round.
"""

import base64
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from stormline.core import errors
from stormline.wire import strictjson

_ALPHABET = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
PUBLIC_KEY_BYTES: Final = 32


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    """Protected header; `crit` and any other parameter is refused by being unknown (RFC 7515 section 4.1.11)."""

    alg: str
    kid: str
    typ: str


_header_decoder = msgspec.json.Decoder(_Header)


class SigningKey(NamedTuple):
    """A private key and the id under which verifiers know its public half.

    Printing one shows no secret: the key object has no text form.
    """

    key: Ed25519PrivateKey
    kid: str

    @property
    def public_text(self) -> str:
        """The public key as base64url, the form `load_public_keys` reads."""
        return b64url(self.key.public_key().public_bytes_raw())


def b64url(data: bytes) -> str:
    """Encode as base64url without padding (RFC 7515 section 2)."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def b64url_decode(text: str | bytes) -> bytes:
    """Decode base64url without padding; strict: other characters and non-canonical endings are refused.

    Raises:
        ValueError: not canonical base64url.
    """
    raw = text.encode("ascii") if isinstance(text, str) else text
    if not _ALPHABET.issuperset(raw):
        raise ValueError("not base64url")
    data = base64.urlsafe_b64decode(raw + b"=" * (-len(raw) % 4))
    if base64.urlsafe_b64encode(data).rstrip(b"=") != raw:
        raise ValueError("not canonical base64url")
    return data


def sign(payload: bytes, *, key: Ed25519PrivateKey, kid: str, typ: str) -> str:
    """Sign `payload`.

    Args:
        payload: the bytes to carry; not encrypted, anyone can read them.
        key: private key.
        kid: the id under which verifiers know the public key.
        typ: the use of this text, checked by `verify`.
    """
    header = msgspec.json.encode(_Header(alg="EdDSA", kid=kid, typ=typ))
    signed = f"{b64url(header)}.{b64url(payload)}"
    return f"{signed}.{b64url(key.sign(signed.encode('ascii')))}"


def verify(text: str | bytes, *, keys: Mapping[str, Ed25519PublicKey], typ: str, size_max: int) -> bytes:
    """Check a signed text and give its payload.

    Args:
        text: what came in.
        keys: public keys by key id.
        typ: the use expected.
        size_max: longest text accepted, in characters.

    Raises:
        UnknownKeyError: signed with a key that is not in `keys`.
        SignatureError: too long, malformed, another algorithm or use, or a wrong signature.
    """
    raw = text.encode("utf-8", "replace") if isinstance(text, str) else text
    if len(raw) > size_max:
        raise errors.SignatureError(f"signed text of {len(raw)} bytes, at most {size_max} are accepted")
    parts = raw.split(b".")
    if len(parts) != 3:
        raise errors.SignatureError("not a signed text: expected three parts")
    try:
        header = strictjson.decode(b64url_decode(parts[0]), _header_decoder)
        payload = b64url_decode(parts[1])
        signature = b64url_decode(parts[2])
    except ValueError as error:
        raise errors.SignatureError(f"malformed signed text: {error}") from error
    if header.alg != "EdDSA":
        raise errors.SignatureError(f"algorithm {header.alg[:20]!r} is not accepted, only EdDSA")
    if header.typ != typ:
        raise errors.SignatureError(f"signed for use as {header.typ[:40]!r}, not as {typ!r}")
    key = keys.get(header.kid)
    if key is None:
        raise errors.UnknownKeyError(f"signed with unknown key {header.kid[:40]!r}")
    try:
        key.verify(signature, raw[: len(parts[0]) + 1 + len(parts[1])])
    except InvalidSignature:
        raise errors.SignatureError(f"wrong signature (key {header.kid!r})") from None
    return payload


def typ_of(text: str | bytes) -> str:
    """Say for which use a text claims to be signed; empty where it says nothing readable. Nothing is checked by this:
    hand the answer to `verify`, which makes sure of it."""
    raw = text.encode("utf-8", "replace") if isinstance(text, str) else text
    try:
        return strictjson.decode(b64url_decode(raw[: raw.find(b".")]), _header_decoder).typ
    except ValueError:
        return ""


def load_public_keys(keys: Mapping[str, str]) -> dict[str, Ed25519PublicKey]:
    """Read public keys from base64url text by key id.

    Raises:
        SignatureError: one of them is not a key; the message names its id.
    """
    loaded = {}
    for kid, text in keys.items():
        try:
            loaded[kid] = Ed25519PublicKey.from_public_bytes(b64url_decode(text))
        except ValueError as error:
            raise errors.SignatureError(f"public key {kid!r} is not an Ed25519 key: {error}") from error
    return loaded
