"""The record of upstreams in the engine: followed by every gateway as it changes, written by operators.

A record that cannot be read is not used: the one before it goes on, and a line in the log says why. So does the loss of
the engine: a gateway that started without it has the upstreams of its settings until it comes.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from stormline.appgw import upstreams
from stormline.appgw.upstreams import Rules
from stormline.core import errors
from stormline.core import limits_api as limits
from stormline.core.errors import RequestRefused
from stormline.engine.port import KeyValue

_log = logging.getLogger("stormline.appgw")

_BUCKET: Final = "api"
_KEY: Final = "upstreams"


class Keys(Protocol):
    """What is needed of the engine."""

    async def kv(self, bucket: str, *, persistent: bool, ttl_s: float | None = None) -> KeyValue:
        """See `engine.port.Engine.kv`."""
        ...


class UpstreamRules:
    """One unit's record.

    Args:
        engine: the engine.
        unit: the unit.
        changed: told of new rules; those without any upstream where there is no record.
    """

    def __init__(self, engine: Keys, *, unit: str, changed: Callable[[Rules], None]) -> None:
        self._engine = engine
        self._prefix = unit
        self._key = f"{unit}.{_KEY}"
        self._changed = changed

    async def follow(self) -> None:
        """Tell of the record, and of every change of it, for ever."""
        while True:
            try:
                kv = await self._engine.kv(_BUCKET, persistent=True)
                async with contextlib.aclosing(kv.watch(self._prefix)) as changes:
                    async for change in changes:
                        if change.key == self._key:
                            self._take(change.value, change.revision)
            except errors.EngineError as error:
                _log.debug("upstreams are not followed: %s", error)
            await asyncio.sleep(limits.UPSTREAM_FOLLOW_PAUSE_S)

    def _take(self, value: bytes | None, revision: int) -> None:
        try:
            rules = Rules() if value is None else upstreams.decode(value)
        except errors.ConfigError as error:
            _log.error("upstreams of revision %d are not used: %s", revision, error)
            return
        self._changed(rules)
        _log.info("upstreams of revision %d: %d", revision, len(rules.upstreams))

    async def read(self) -> Rules:
        """Give the record with its revision; 0 where there is none.

        Raises:
            RequestRefused: `unavailable`: the engine is away. `internal`: it cannot be read.
        """
        try:
            entry = await (await self._engine.kv(_BUCKET, persistent=True)).get(self._key)
        except errors.EngineError as error:
            raise _unavailable(error) from error
        if entry is None:
            return Rules()
        try:
            return msgspec.structs.replace(upstreams.decode(entry.value), revision=entry.revision)
        except errors.ConfigError as error:
            raise RequestRefused("internal", str(error)) from error

    async def write(self, data: bytes, expected: int | None) -> int:
        """Check a record and write it; give its revision.

        Args:
            data: as JSON.
            expected: the revision it was made from, 0 for none yet; None for any.

        Raises:
            RequestRefused: `bad-request`: it is malformed. `changed`: somebody else has written meanwhile.
                `unavailable`: the engine is away; it may have been written.
        """
        try:
            data = upstreams.encode(msgspec.structs.replace(upstreams.decode(data), revision=0))
        except errors.ConfigError as error:
            raise RequestRefused("bad-request", str(error)) from error
        try:
            kv = await self._engine.kv(_BUCKET, persistent=True)
            if expected is None:
                return await kv.put(self._key, data)
            if expected == 0:
                return await kv.create(self._key, data)
            return await kv.update(self._key, data, expected)
        except errors.Conflict as error:
            raise RequestRefused("changed", "the upstreams were changed meanwhile: read them again") from error
        except errors.EngineError as error:
            raise _unavailable(error) from error


def _unavailable(error: errors.EngineError) -> RequestRefused:
    return RequestRefused("unavailable", f"the engine is away: {error}", retry_after_s=limits.UPSTREAM_FOLLOW_PAUSE_S)
