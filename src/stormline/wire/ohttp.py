"""Messages sealed end to end: Oblivious HTTP (RFC 9458) and its chunked form (draft-ietf-ohai-chunked-ohttp-08).

What a client says to the gateway of a relay is sealed with the gateway's public key by HPKE (RFC 9180); the answer is
sealed with a key that both derive from that. Whoever stands between sees neither, and can change neither unnoticed.

    sealed, key = seal_request(config, content, entropy=rng.token_bytes(ENTROPY_BYTES))    # client
    content, key = open_request(keys, sealed)                                              # gateway
    answer = seal_response(key, content, nonce=rng.token_bytes(NONCE_BYTES))               # gateway
    content = open_response(key, answer)                                                   # client

One KEM, X25519: who offers none of it is passed over. The content is a binary HTTP message (`wire.bhttp`); nothing here
looks into it. A sealed request can be sent again by anybody who saw it: the gateway has to bound that.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from stormline.core import errors, limits_relay
from stormline.core.errors import RemoteProtocolError
from stormline.wire import bhttp, hpke

KEYS_TYPE: Final = "application/ohttp-keys"
REQUEST_TYPE: Final = "message/ohttp-req"
RESPONSE_TYPE: Final = "message/ohttp-res"
CHUNKED_REQUEST_TYPE: Final = "message/ohttp-chunked-req"
CHUNKED_RESPONSE_TYPE: Final = "message/ohttp-chunked-res"
KEY_PROBLEM: Final = "https://iana.org/assignments/http-problem-types#ohttp-key"
"""Type of the problem (RFC 9457) by which a gateway says that the key is none of its own (RFC 9458 section 5.3)."""
DATE_PROBLEM: Final = "https://iana.org/assignments/http-problem-types#date"
"""Type of the problem by which a client learns that its clock is off (RFC 9458 section 6.5.2)."""
RELAY_NAME: Final = "stormline-relay"
"""Who speaks in `Proxy-Status` (RFC 9209) where an answer is the gateway's own."""
MAYBE_DELIVERED: Final = "maybe-delivered"
"""Parameter of that `Proxy-Status`: the origin may have the request."""
REPEATABLE: Final = frozenset({b"GET", b"HEAD", b"OPTIONS"})
"""Methods that change nothing (RFC 9110 section 9.2.1): sent again by another, the answer tells him nothing. A request
with any other says when it was made."""
ENTROPY_BYTES: Final = 32
"""Fresh randomness for one request: the ephemeral X25519 key."""
NONCE_BYTES: Final = 32
"""Fresh randomness for one response; the suite in use takes as much of it as it needs."""

_PUBLIC_BYTES: Final = 32
_HEADER_BYTES: Final = 7
_FINAL: Final = b"final"


class Suite(NamedTuple):
    """Algorithms beside the KEM, by their numbers in RFC 9180 section 7."""

    kdf: int
    aead: int

    @property
    def known(self) -> bool:
        """It can be used here."""
        return self.kdf == hpke.HKDF_SHA256 and self.aead in hpke.KEY_BYTES


AES_128_GCM: Final = Suite(hpke.HKDF_SHA256, hpke.AES_128_GCM)
CHACHA20: Final = Suite(hpke.HKDF_SHA256, hpke.CHACHA20)
SUITES: Final = (AES_128_GCM, CHACHA20)
"""What our gateways offer."""


class KeyConfig(NamedTuple):
    """A gateway's public key (RFC 9458 section 3.1).

    Attributes:
        key_id: its name, 0 to 255.
        public: X25519 key.
        suites: what may be used with it, best first.
    """

    key_id: int
    public: bytes
    suites: tuple[Suite, ...] = SUITES

    def encode(self) -> bytes:
        """Give it as it stands in a list of keys, without its length."""
        pairs = b"".join(suite.kdf.to_bytes(2, "big") + suite.aead.to_bytes(2, "big") for suite in self.suites)
        return b"".join(
            (bytes((self.key_id,)), hpke.X25519.to_bytes(2, "big"), self.public, len(pairs).to_bytes(2, "big"), pairs)
        )


@dataclass(frozen=True)
class GatewayKey:
    """A gateway's private key. Printing one shows no secret: the key object has no text form."""

    key_id: int
    private: X25519PrivateKey
    suites: tuple[Suite, ...] = SUITES

    @cached_property
    def public(self) -> bytes:
        """Its public part."""
        return self.private.public_key().public_bytes_raw()

    @cached_property
    def opener(self) -> hpke.PrivateKey:
        """What opens requests."""
        return hpke.PrivateKey(self.private)

    @property
    def config(self) -> KeyConfig:
        """What clients are told."""
        return KeyConfig(self.key_id, self.public, self.suites)


@dataclass(frozen=True, slots=True)
class ResponseKey:
    """What both sides keep to seal and open the answer to one request."""

    enc: bytes
    aead: int
    secret: bytes = field(repr=False)


# -- keys -------------------------------------------------------------------------------------------------------------
def encode_keys(configs: Iterable[KeyConfig]) -> bytes:
    """Give keys as `application/ohttp-keys`, best first."""
    return b"".join(len(each).to_bytes(2, "big") + each for each in (config.encode() for config in configs))


def decode_keys(data: bytes) -> tuple[KeyConfig, ...]:
    """Read a list of keys; those with a KEM or without a suite that is known here are passed over.

    Raises:
        RemoteProtocolError: an error anywhere in it: then none of it is used (RFC 9458 section 3.2).
    """
    if len(data) > limits_relay.RELAY_KEYS_BYTES_MAX:
        raise RemoteProtocolError(f"a list of keys has more than {limits_relay.RELAY_KEYS_BYTES_MAX} bytes")
    found, at, count = [], 0, 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 2], "big")
        text = data[at + 2 : at + 2 + length]
        count += 1
        if len(data) < at + 2 or len(text) < length or length < 3:
            raise RemoteProtocolError("a list of keys is cut short")
        if count > limits_relay.RELAY_KEYS_MAX:
            raise RemoteProtocolError(f"a list of more than {limits_relay.RELAY_KEYS_MAX} keys")
        at += 2 + length
        config = decode_key(text) if int.from_bytes(text[1:3], "big") == hpke.X25519 else None
        if config is not None and choose(config) is not None:
            found.append(config)
    return tuple(found)


def decode_key(data: bytes) -> KeyConfig:
    """Read one key configuration.

    Raises:
        RemoteProtocolError: it is none, or has another KEM.
    """
    at = 3 + _PUBLIC_BYTES
    pairs = data[at + 2 :]
    if len(data) < at + 2 or int.from_bytes(data[1:3], "big") != hpke.X25519:
        raise RemoteProtocolError("no key configuration with X25519")
    if len(pairs) != int.from_bytes(data[at : at + 2], "big") or not pairs or len(pairs) % 4:
        raise RemoteProtocolError("a key configuration's list of algorithms does not fit its length")
    numbers = [int.from_bytes(pairs[each : each + 2], "big") for each in range(0, len(pairs), 2)]
    suites = tuple(map(Suite, numbers[::2], numbers[1::2]))
    return KeyConfig(data[0], data[3:at], suites)


def choose(config: KeyConfig) -> Suite | None:
    """Give the gateway's first suite that is known here, None where none is."""
    return next((suite for suite in config.suites if suite.known), None)


# -- whole messages ---------------------------------------------------------------------------------------------------
def seal_request(config: KeyConfig, content: bytes, *, entropy: bytes) -> tuple[bytes, ResponseKey]:
    """Seal a request.

    Args:
        config: the gateway's key.
        content: the request, binary HTTP.
        entropy: `ENTROPY_BYTES` random bytes that are used for nothing else, ever.

    Returns:
        What goes on the way, and what opens the answer.

    Raises:
        ValueError: the key cannot be used: no suite that is known, or no point of the curve.
    """
    sender = _Sender(config, _WHOLE, entropy)
    return sender.header + sender.context.seal(content), sender.response


def open_request(keys: Mapping[int, GatewayKey], data: bytes) -> tuple[bytes, ResponseKey]:
    """Open a request.

    Args:
        keys: the gateway's, by id.
        data: what came.

    Raises:
        RemoteProtocolError: it is no sealed request.
        UnknownKeyError: it is for a key, or a suite, that is not among these.
        SignatureError: it is not what was sealed with that key.
    """
    receiver = _Receiver(keys, data, _WHOLE)
    return receiver.context.open(data[receiver.bytes :]), receiver.response


def seal_response(key: ResponseKey, content: bytes, *, nonce: bytes) -> bytes:
    """Seal the answer to a request.

    Args:
        key: from `open_request`. One answer is sealed with it, no more.
        content: the response, binary HTTP.
        nonce: `NONCE_BYTES` random bytes.
    """
    nonce = nonce[: _entropy_bytes(key.aead)]
    return nonce + _answers(key, nonce).seal(content)


def open_response(key: ResponseKey, data: bytes) -> bytes:
    """Open the answer to a request.

    Raises:
        RemoteProtocolError: it is no sealed response.
        SignatureError: it is not the answer that the gateway sealed for this request.
    """
    size = _entropy_bytes(key.aead)
    if len(data) < size + hpke.TAG_BYTES:
        raise RemoteProtocolError("a sealed response is cut short")
    return _answers(key, data[:size]).open(data[size:])


# -- chunks -----------------------------------------------------------------------------------------------------------
class RequestSealer:
    """Seals a request piece by piece; see `seal_request`.

    Attributes:
        response: what opens the answer.
    """

    def __init__(self, config: KeyConfig, *, entropy: bytes) -> None:
        sender = _Sender(config, _CHUNKED, entropy)
        self._head = sender.header
        self._context = sender.context
        self.response = sender.response

    def chunk(self, content: bytes, *, last: bool = False) -> bytes:
        """Seal the next piece.

        Args:
            content: at most `limits_relay.RELAY_CHUNK_BYTES`, which every gateway takes.
            last: it is the end; nothing may follow.
        """
        head, self._head = self._head, b""
        return head + _frame(self._context.seal(content, _FINAL if last else b""), last=last)


class RequestOpener:
    """Opens a request as it comes; see `open_request`.

    Attributes:
        response: what seals the answer; None until the request's first bytes are here.
    """

    def __init__(self, keys: Mapping[int, GatewayKey]) -> None:
        self._keys = keys
        self._head = b""
        self._context: hpke.Context | None = None
        self._chunks = _Chunks()
        self.response: ResponseKey | None = None

    def feed(self, data: bytes, *, last: bool = False) -> list[bytes]:
        """Take bytes and give the pieces that they complete.

        Args:
            data: the next bytes.
            last: no more will come; only then, and without an error, the request is whole.

        Raises:
            RemoteProtocolError: it is no sealed request, or cut short.
            UnknownKeyError: it is for a key, or a suite, that is not among these.
            SignatureError: it is not what was sealed with that key.
        """
        if self._context is None:
            self._head += data
            if len(self._head) < _HEADER_BYTES + _PUBLIC_BYTES and not last:
                return []
            receiver = _Receiver(self._keys, self._head, _CHUNKED)
            self._context, self.response = receiver.context, receiver.response
            data, self._head = self._head[receiver.bytes :], b""
        context = self._context
        return [context.open(sealed, _FINAL if final else b"") for sealed, final in self._chunks.feed(data, last)]


class ResponseSealer:
    """Seals the answer to a request piece by piece; see `seal_response`."""

    def __init__(self, key: ResponseKey, *, nonce: bytes) -> None:
        self._head = nonce[: _entropy_bytes(key.aead)]
        self._sealing = _answers(key, self._head)

    def chunk(self, content: bytes, *, last: bool = False) -> bytes:
        """Seal the next piece; see `RequestSealer.chunk`."""
        head, self._head = self._head, b""
        return head + _frame(self._sealing.seal(content, _FINAL if last else b""), last=last)


class ResponseOpener:
    """Opens the answer to a request as it comes; see `open_response`."""

    def __init__(self, key: ResponseKey) -> None:
        self._key = key
        self._head = b""
        self._sealing: hpke.Sequence | None = None
        self._chunks = _Chunks()

    def feed(self, data: bytes, *, last: bool = False) -> list[bytes]:
        """Take bytes and give the pieces that they complete; see `RequestOpener.feed`.

        Raises:
            RemoteProtocolError: it is no sealed response, or cut short.
            SignatureError: it is not the answer that the gateway sealed for this request.
        """
        if self._sealing is None:
            self._head += data
            size = _entropy_bytes(self._key.aead)
            if len(self._head) < size:
                if last:
                    raise RemoteProtocolError("a sealed response is cut short")
                return []
            self._sealing = _answers(self._key, self._head[:size])
            data, self._head = self._head[size:], b""
        sealing = self._sealing
        return [sealing.open(sealed, _FINAL if final else b"") for sealed, final in self._chunks.feed(data, last)]


def _frame(sealed: bytes, *, last: bool) -> bytes:
    return b"\0" + sealed if last else bhttp.varint(len(sealed)) + sealed


class _Chunks:
    """Cuts a stream into sealed chunks; holds at most one."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._final = False

    def feed(self, data: bytes, last: bool) -> list[tuple[bytes, bool]]:
        self._buffer += data
        found: list[tuple[bytes, bool]] = []
        while not self._final and self._buffer and len(self._buffer) >= (size := 1 << (self._buffer[0] >> 6)):
            length, at = bhttp.read_varint(bytes(self._buffer[:size]), 0)
            self._check(length)
            if length == 0:
                self._final = True
                del self._buffer[:at]
            elif len(self._buffer) < at + length:
                break
            else:
                found.append((bytes(self._buffer[at : at + length]), False))
                del self._buffer[: at + length]
        if self._final:
            self._check(len(self._buffer))
        if last:
            if not self._final:
                raise RemoteProtocolError("a sealed message is cut short")
            found.append((bytes(self._buffer), True))
        return found

    def _check(self, length: int) -> None:
        if length > limits_relay.RELAY_CHUNK_BYTES_MAX + hpke.TAG_BYTES:
            raise RemoteProtocolError(f"a sealed chunk has more than {limits_relay.RELAY_CHUNK_BYTES_MAX} bytes")


# -- the keys of one exchange -----------------------------------------------------------------------------------------
_WHOLE: Final = b"message/bhttp "
_CHUNKED: Final = b"message/bhttp chunked "


def _entropy_bytes(aead: int) -> int:
    return max(hpke.NONCE_BYTES, hpke.KEY_BYTES[aead])


def _header(key_id: int, suite: Suite) -> bytes:
    return bytes((key_id,)) + b"".join(number.to_bytes(2, "big") for number in (hpke.X25519, suite.kdf, suite.aead))


def _response_key(context: hpke.Context, enc: bytes, suite: Suite, label: bytes) -> ResponseKey:
    return ResponseKey(enc, suite.aead, context.export(label + b"response", _entropy_bytes(suite.aead)))


class _Sender:
    """The client's side (RFC 9458 section 4.3)."""

    def __init__(self, config: KeyConfig, label: bytes, entropy: bytes) -> None:
        suite = choose(config)
        if suite is None:
            raise ValueError("no suite of this key is known here")
        header = _header(config.key_id, suite)
        info = label + b"request\0" + header
        enc, self.context = hpke.sender(config.public, info, aead=suite.aead, entropy=entropy)
        self.header = header + enc
        self.response = _response_key(self.context, enc, suite, label)


class _Receiver:
    """The gateway's side."""

    def __init__(self, keys: Mapping[int, GatewayKey], data: bytes, label: bytes) -> None:
        self.bytes = _HEADER_BYTES + _PUBLIC_BYTES
        if len(data) < self.bytes:
            raise RemoteProtocolError("a sealed request is cut short")
        header, enc = data[:_HEADER_BYTES], data[_HEADER_BYTES : self.bytes]
        kem, kdf, aead = (int.from_bytes(header[at : at + 2], "big") for at in (1, 3, 5))
        key, suite = keys.get(header[0]), Suite(kdf, aead)
        if key is None or kem != hpke.X25519 or suite not in key.suites or not suite.known:
            raise errors.UnknownKeyError(f"no key {header[0]} with algorithms {kem:#06x} {kdf:#06x} {aead:#06x}")
        try:
            self.context = hpke.recipient(enc, key.opener, label + b"request\0" + header, aead=aead)
        except ValueError as error:
            raise errors.SignatureError(f"no key was sent that can be used: {error}") from None
        self.response = _response_key(self.context, enc, suite, label)


def _answers(key: ResponseKey, nonce: bytes) -> hpke.Sequence:
    """Give what seals and opens the answers (RFC 9458 section 4.4)."""
    secret = hpke.extract(key.enc + nonce, key.secret)
    return hpke.Sequence(
        key.aead, hpke.expand(secret, b"key", hpke.KEY_BYTES[key.aead]), hpke.expand(secret, b"nonce", hpke.NONCE_BYTES)
    )
