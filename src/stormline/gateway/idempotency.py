"""A request with an `Idempotency-Key` is done once: who sends it again gets the first one's answer.

The answer is kept in the engine, for all nodes, for `limits.IDEMPOTENCY_LIFE_S`. A key belongs to the caller and the
endpoint. What certainly was not done is not kept: the request may be sent again with the same key.
"""

import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.clock import Clock
from stormline.core.errors import RequestRefused
from stormline.engine.port import KeyValue
from stormline.gateway.apikeys import Buckets

_log = logging.getLogger("stormline.gateway")
_BUCKET: Final = "idempotency"


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """A request that was begun, and its answer once there is one. Fields are only ever added at the end.

    Attributes:
        request: hash of what was asked.
        begun_ms: when, in milliseconds since 1970.
        answer: JSON of the answer; empty while there is none.
        code: code of the error, empty where there was none.
        message: the error's text.
    """

    request: bytes
    begun_ms: int
    answer: bytes = b""
    code: str = ""
    message: str = ""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Kept).decode


class Idempotency:
    """Does requests once."""

    def __init__(self, engine: Buckets, *, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    async def once(
        self, who: str, what: str, key: str, request: bytes, work: Callable[[], Awaitable[bytes]]
    ) -> tuple[bytes, bool]:
        """Do the work unless it was done, and give its answer and whether it is a kept one.

        Args:
            who: the caller.
            what: the endpoint.
            key: what the caller sent.
            request: what is asked, as it came.
            work: does it; gives the JSON of the answer.

        Raises:
            RequestRefused: `conflict`: the first is still under way; `key-reused`: it asked for something else;
                `unavailable`: the engine is away; and what the work raises or raised.
        """
        name = "i." + hashlib.sha256("\0".join((who, what, key)).encode("utf-8", "replace")).hexdigest()
        begun = _Kept(hashlib.sha256(request).digest(), int(self._clock.wall() * 1000))
        try:
            kv = await self._open()
            revision, kept = await self._begin(kv, name, begun)
        except errors.EngineError as error:
            raise RequestRefused(
                "unavailable",
                "the engine is away: whether this was done before is not known",
                retry_after_s=limits.CALL_RETRY_AFTER_S,
            ) from error
        if kept is not None:
            return _answer(kept, begun), True
        try:
            answer = await work()
        except RequestRefused as error:
            if error.maybe_delivered:
                await self._keep(kv, name, revision, begun, code=error.code, message=str(error))
            else:
                await self._forget(kv, name, revision)
            raise
        except BaseException:  # cancelled: it may have been done
            await self._keep(kv, name, revision, begun, code="deadline", message="the first request was given up")
            raise
        await self._keep(kv, name, revision, begun, answer=answer)
        return answer, False

    async def _begin(self, kv: KeyValue, name: str, begun: _Kept) -> tuple[int, _Kept | None]:
        try:
            return await kv.create(name, _encode(begun)), None
        except errors.Conflict:
            entry = await kv.get(name)
        if entry is None:
            return await kv.create(name, _encode(begun)), None
        kept = _decode(entry.value)
        if not (kept.answer or kept.code) and begun.begun_ms - kept.begun_ms > limits.IDEMPOTENCY_RUNNING_S * 1000:
            # Its node has died in the middle: whether it was done is not known, and not found out by doing it again.
            return entry.revision, msgspec.structs.replace(
                kept, code="deadline", message="what became of the first request is not known"
            )
        return entry.revision, kept

    async def _keep(self, kv: KeyValue, name: str, revision: int, begun: _Kept, **outcome: bytes | str) -> None:
        kept = msgspec.structs.replace(begun, **outcome)
        try:
            await kv.update(name, _encode(kept), revision)
        except errors.EngineError as error:
            _log.warning("the answer to a request with an idempotency key was not kept: %s", error)

    async def _forget(self, kv: KeyValue, name: str, revision: int) -> None:
        try:
            await kv.delete(name, revision)
        except errors.EngineError as error:
            _log.warning("a request with an idempotency key that was not done blocks its key: %s", error)

    async def _open(self) -> KeyValue:
        try:
            return await self._engine.kv(_BUCKET, persistent=True, ttl_s=limits.IDEMPOTENCY_LIFE_S)
        except errors.ConfigError as error:
            raise errors.EngineError(str(error)) from error


def _answer(kept: _Kept, now: _Kept) -> bytes:
    if kept.request != now.request:
        raise RequestRefused("key-reused", "Idempotency-Key: it was used for another request")
    if kept.code:
        raise RequestRefused(kept.code, kept.message, maybe_delivered=True)
    if not kept.answer:
        raise RequestRefused("conflict", "the first request with this Idempotency-Key is under way", retry_after_s=1.0)
    return kept.answer
