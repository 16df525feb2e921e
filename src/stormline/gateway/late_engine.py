"""An engine that may not be there yet: the gateway serves without it, and with it from the moment it comes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.engine.port import Engine, KeyValue, Message

_log = logging.getLogger("stormline.gateway")


class LateEngine:
    """The part of `engine.port.Engine` that the application gateways need, before and after the first connection.

    Before it, everything raises `EngineUnavailable`. Once connected the engine itself bears its losses.

    Args:
        connect: makes the connection; tries for a while, then raises `EngineUnavailable`.
        ready: told of the engine once, before anything else uses it: the place to serve and subscribe.
    """

    def __init__(self, connect: Callable[[], Awaitable[Engine]], *, ready: Callable[[Engine], Awaitable[None]]) -> None:
        self._connect = connect
        self._ready = ready
        self._engine: Engine | None = None

    @property
    def connected(self) -> bool:
        """See `engine.port.Engine.connected`."""
        return self._engine is not None and self._engine.connected

    async def run(self) -> None:
        """Connect, however long that takes; returns once it has."""
        reason = ""
        while True:
            try:
                engine = await self._connect()
            except errors.EngineUnavailable as error:
                if str(error) != reason:
                    _log.warning("serving without the engine: %s", error)
                reason = str(error)
                await asyncio.sleep(limits.ENGINE_RECONNECT_PAUSE_MAX_S)
                continue
            try:
                await self._ready(engine)
            except BaseException:
                await engine.close()
                raise
            self._engine = engine
            return

    async def close(self) -> None:
        """Leave the engine."""
        if self._engine is not None:
            await self._engine.close()

    async def request(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, timeout_s: float
    ) -> Message:
        """See `engine.port.Engine.request`."""
        return await self._present().request(subject, data, headers, timeout_s=timeout_s)

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """See `engine.port.Engine.publish`."""
        await self._present().publish(subject, data, headers)

    async def kv(self, bucket: str, *, persistent: bool, ttl_s: float | None = None) -> KeyValue:
        """See `engine.port.Engine.kv`."""
        return await self._present().kv(bucket, persistent=persistent, ttl_s=ttl_s)

    def _present(self) -> Engine:
        if self._engine is None:
            raise errors.EngineUnavailable("engine unavailable")
        return self._engine
