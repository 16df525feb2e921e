"""Keys of businesses for the business API: each for one app and some scopes, made and revoked at run time.

A key is `slk_<id>_<secret>`; the secret is 256 bits of chance and is shown once, when the key is made. What is kept is
its SHA-256: nothing slows guessing down, and against 256 bits nothing needs to. All keys lie in the engine, and every
node holds them all, told of each change at once: a check costs no question, and goes on while the engine is away.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
from typing import Final, Protocol

import msgspec

from stormline.core import errors, ids
from stormline.core import limits_platform as limits
from stormline.core.clock import Clock, Rng
from stormline.core.errors import RequestRefused
from stormline.engine.port import KeyValue

_log = logging.getLogger("stormline.gateway")

SCOPES: Final = ("push", "presence", "call", "revoke")
"""What a key may be allowed."""
PREFIX: Final = "slk_"
_BUCKET: Final = "apikeys"
_BELOW: Final = "k"


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key, without its secret.

    Attributes:
        id: its name, also in logs.
        app: the app it is for.
        scopes: what it allows.
        label: for people.
        made_ms: when, in milliseconds since 1970.
        hash: SHA-256 of the secret, hexadecimal.
    """

    id: str
    app: str
    scopes: tuple[str, ...]
    label: str = ""
    made_ms: int
    hash: str

    def __repr__(self) -> str:
        """Show no hash."""
        return f"ApiKey({self.id!r}, {self.app!r}, {self.scopes})"


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(ApiKey).decode


class Buckets(Protocol):
    """What is needed of the engine."""

    async def kv(self, bucket: str, *, persistent: bool, ttl_s: float | None = None) -> KeyValue:
        """See `engine.port.Engine.kv`."""
        ...


class ApiKeys:
    """All keys, as this node knows them."""

    def __init__(self, engine: Buckets, *, clock: Clock, rng: Rng) -> None:
        self._engine = engine
        self._clock = clock
        self._rng = rng
        self._keys: dict[str, ApiKey] = {}
        self._known = False

    async def run(self) -> None:
        """Keep them up to date, until cancelled. The engine may come and go."""
        while True:
            try:
                kv = await self._open()
                for key, entry in (await kv.under(_BELOW)).items():
                    self._apply(key, entry.value)
                self._known = True
                async with contextlib.aclosing(kv.watch(_BELOW)) as changes:
                    async for change in changes:
                        self._apply(change.key, change.value)
            except errors.EngineError as error:
                _log.debug("keys of businesses: %s", error)
            await asyncio.sleep(limits.DIRECTORY_TICK_S)

    def check(self, text: str) -> ApiKey | None:
        """Give the key that a bearer proves, None where it proves none.

        Raises:
            RequestRefused: `unavailable`: the engine was not there yet, so no key is known.
        """
        name, separator, secret = text.removeprefix(PREFIX).partition("_")
        if not (text.startswith(PREFIX) and separator):
            return None
        if not self._known:
            raise RequestRefused("unavailable", "the keys are not known yet", retry_after_s=limits.CALL_RETRY_AFTER_S)
        key = self._keys.get(name)
        proof = _hash(secret)
        return key if key is not None and hmac.compare_digest(proof, key.hash) else None

    def all(self) -> list[ApiKey]:
        """Give all keys, the oldest first."""
        return sorted(self._keys.values(), key=lambda key: (key.made_ms, key.id))

    async def make(self, app: str, scopes: tuple[str, ...], label: str = "") -> tuple[ApiKey, str]:
        """Make a key, and give it and its text, which nobody can give again.

        Raises:
            RequestRefused: `bad-request`: a scope is unknown, or there are too many keys.
            EngineError: the engine is away; then there may be a key that nobody knows.
        """
        unknown = sorted(set(scopes) - set(SCOPES))
        if unknown or not scopes:
            raise RequestRefused("bad-request", f"scopes: expected some of {', '.join(SCOPES)}")
        if len(self._keys) >= limits.API_KEYS_MAX:
            raise RequestRefused("bad-request", f"there are {len(self._keys)} keys: revoke some first")
        secret = ids.new_id(self._rng, 32)
        key = ApiKey(
            id=ids.new_id(self._rng, 8),
            app=app,
            scopes=tuple(scope for scope in SCOPES if scope in scopes),
            label=label,
            made_ms=int(self._clock.wall() * 1000),
            hash=_hash(secret),
        )
        await (await self._open()).create(f"{_BELOW}.{key.id}", _encode(key))
        self._keys[key.id] = key
        return key, f"{PREFIX}{key.id}_{secret}"

    async def revoke(self, name: str) -> bool:
        """End a key on all nodes; give False where there is none.

        Raises:
            EngineError: the engine is away; the key may still be valid.
        """
        if name not in self._keys:
            return False
        await (await self._open()).delete(f"{_BELOW}.{name}")
        self._keys.pop(name, None)
        return True

    async def _open(self) -> KeyValue:
        try:
            return await self._engine.kv(_BUCKET, persistent=True)
        except errors.ConfigError as error:
            raise errors.EngineError(str(error)) from error

    def _apply(self, key: str, value: bytes | None) -> None:
        name = key.rpartition(".")[2]
        if value is None:
            self._keys.pop(name, None)
            return
        try:
            self._keys[name] = _decode(value)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._keys.pop(name, None)
            _log.warning("key %s of a business cannot be read", name)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()
