"""Sealing for a public key: HPKE (RFC 9180), base mode, with X25519 and HKDF-SHA256, as Oblivious HTTP needs it.

    enc, context = sender(public, info, aead=AES_128_GCM, entropy=rng.token_bytes(32))    # one side
    context = recipient(enc, PrivateKey(private), info, aead=AES_128_GCM)                 # the other

Both contexts then seal and open the same messages in the same order, and export the same secrets.
"""

import hmac
from functools import lru_cache
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from pyhpke import AEADId, CipherSuite, ContextInterface, KDFId, KEMId, KEMKey, KEMKeyPair, OpenError, PyHPKEError

from stormline.core import errors

AES_128_GCM: Final = 0x0001
AES_256_GCM: Final = 0x0002
CHACHA20: Final = 0x0003
KEY_BYTES: Final = {AES_128_GCM: 16, AES_256_GCM: 32, CHACHA20: 32}
"""Size of a key by AEAD (RFC 9180 section 7.3)."""
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
X25519: Final = 0x0020
HKDF_SHA256: Final = 0x0001


def extract(salt: bytes, secret: bytes) -> bytes:
    """HKDF-SHA256's first step (RFC 5869 section 2.2)."""
    return hmac.digest(salt, secret, "sha256")


def expand(key: bytes, info: bytes, size: int) -> bytes:
    """HKDF-SHA256's second step (RFC 5869 section 2.3), for one block: at most 32 bytes."""
    return hmac.digest(key, info + b"\1", "sha256")[:size]


class Sequence:
    """An AEAD with the nonces of messages that come in order (RFC 9180 section 5.2)."""

    __slots__ = ("_aead", "_base", "_count")

    def __init__(self, aead: int, key: bytes, base_nonce: bytes) -> None:
        self._aead = ChaCha20Poly1305(key) if aead == CHACHA20 else AESGCM(key)
        self._base = int.from_bytes(base_nonce, "big")
        self._count = 0

    def _next(self) -> bytes:
        nonce = (self._base ^ self._count).to_bytes(NONCE_BYTES, "big")
        self._count += 1
        return nonce

    def seal(self, content: bytes, aad: bytes = b"") -> bytes:
        """Seal the next message."""
        return self._aead.encrypt(self._next(), content, aad)

    def open(self, sealed: bytes, aad: bytes = b"") -> bytes:
        """Open the next message.

        Raises:
            SignatureError: it is not what was sealed there.
        """
        try:
            return self._aead.decrypt(self._next(), sealed, aad)
        except InvalidTag:
            raise errors.SignatureError("this is not what was sealed, or not with this key") from None


class Context:
    """What two sides have in common once one has sealed for the other's key (RFC 9180 section 5.1)."""

    __slots__ = ("_context",)

    def __init__(self, context: ContextInterface) -> None:
        self._context = context

    def seal(self, content: bytes, aad: bytes = b"") -> bytes:
        """Seal the next message."""
        return self._context.seal(content, aad)

    def open(self, sealed: bytes, aad: bytes = b"") -> bytes:
        """Open the next message.

        Raises:
            SignatureError: it is not what was sealed there.
        """
        try:
            return self._context.open(sealed, aad)
        except OpenError:
            raise errors.SignatureError("this is not what was sealed, or not with this key") from None

    def export(self, purpose: bytes, size: int) -> bytes:
        """Give a secret for another purpose (RFC 9180 section 5.3)."""
        return self._context.export(purpose, size)


@lru_cache(len(KEY_BYTES))
def _suite(aead: int) -> CipherSuite:
    return CipherSuite.new(KEMId.DHKEM_X25519_HKDF_SHA256, KDFId.HKDF_SHA256, AEADId(aead))


def sender(public: bytes, info: bytes, *, aead: int, entropy: bytes) -> tuple[bytes, Context]:
    """Begin to seal for a key; gives what the other side needs, and the context.

    Args:
        public: the other side's X25519 key.
        info: what it is for; both sides say the same.
        aead: one of `KEY_BYTES`.
        entropy: 32 random bytes that are used for nothing else, ever.

    Raises:
        ValueError: it is no key that can be used.
    """
    private = X25519PrivateKey.from_private_bytes(entropy)
    key = KEMKey.from_pyca_cryptography_key(X25519PublicKey.from_public_bytes(public))
    ephemeral = KEMKeyPair(
        KEMKey.from_pyca_cryptography_key(private), KEMKey.from_pyca_cryptography_key(private.public_key())
    )
    try:
        enc, context = _suite(aead).create_sender_context(key, info=info, eks=ephemeral)
    except PyHPKEError as error:
        raise ValueError(str(error)) from error
    return enc, Context(context)


class PrivateKey:
    """A private key as `recipient` takes it: made once for a key, as making it costs a twentieth of an exchange."""

    __slots__ = ("kem",)

    def __init__(self, private: X25519PrivateKey) -> None:
        self.kem = KEMKey.from_pyca_cryptography_key(private)


def recipient(enc: bytes, private: PrivateKey, info: bytes, *, aead: int) -> Context:
    """Begin to open what was sealed for a key.

    Args:
        enc: what `sender` gave.
        private: the key.
        info: what it is for.
        aead: one of `KEY_BYTES`.

    Raises:
        ValueError: it is nothing that a sender gives.
    """
    try:
        return Context(_suite(aead).create_recipient_context(enc, private.kem, info=info))
    except PyHPKEError as error:
        raise ValueError(str(error)) from error
