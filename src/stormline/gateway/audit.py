"""Who did what by the business API, when, and what came of it: bounded, and without what was sent.

Each is a line in the log of the role (`stormline.audit`), and an entry in the engine, where each node keeps its last
`limits.AUDIT_KEPT` for `limits.AUDIT_LIFE_S`. Where the engine is away the log is all there is.
"""

import asyncio
import logging
from collections import deque
from typing import Final

import msgspec

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.clock import Clock
from stormline.core.ids import subject_token
from stormline.engine.port import KeyValue
from stormline.gateway.apikeys import Buckets

_log = logging.getLogger("stormline.audit")
_BUCKET: Final = "audit"


class Deed(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        at_ms: when it ended, in milliseconds since 1970.
        node: the node that served it.
        who: id of the key, or `operator`.
        app: the app it was about, empty where it came to none.
        what: what was asked, as the key's scope says it.
        target: the device, user or key it was about.
        result: `ok`, or the code of the error.
    """

    at_ms: int
    node: str
    who: str
    app: str
    what: str
    target: str
    result: str


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Deed).decode


class Audit:
    """Writes this node's deeds, and reads all nodes'."""

    def __init__(self, engine: Buckets, *, node: str, clock: Clock) -> None:
        self._engine = engine
        self._node = node
        self._clock = clock
        self._waiting: deque[Deed] = deque(maxlen=limits.AUDIT_KEPT)
        self._woken = asyncio.Event()

    def note(self, who: str, app: str, what: str, target: str, result: str) -> None:
        """Note a deed; never waits."""
        at_ms = int(self._clock.wall() * 1000)
        deed = Deed(at_ms=at_ms, node=self._node, who=who, app=app, what=what, target=target[:256], result=result)
        _log.info("%s %s/%s %r: %s", who, app, what, deed.target, result)
        self._waiting.append(deed)
        self._woken.set()

    async def run(self) -> None:
        """Write them, until cancelled. The oldest gives way to the newest, also over a restart."""
        number = -1
        while True:
            self._woken.clear()
            try:
                kv = await self._open()
                if number < 0:
                    number = await self._last_number(kv)
                while self._waiting:
                    key = f"a.{subject_token(self._node)}.{(number + 1) % limits.AUDIT_KEPT}"
                    await kv.put(key, _encode(self._waiting[0]))
                    number += 1
                    self._waiting.popleft()
            except errors.EngineError as error:
                _log.debug("audit: %s", error)
                await asyncio.sleep(limits.DIRECTORY_TICK_S)
                continue
            await self._woken.wait()

    async def last(self, limit: int) -> list[Deed]:
        """Give the newest of this node, the newest first.

        Raises:
            EngineError: the engine is away.
        """
        entries = await (await self._open()).under(f"a.{subject_token(self._node)}")
        newest = sorted(entries.values(), key=lambda entry: entry.revision, reverse=True)[:limit]
        return [_decode(entry.value) for entry in newest]

    async def _last_number(self, kv: KeyValue) -> int:
        entries = await kv.under(f"a.{subject_token(self._node)}")
        newest = max(entries, key=lambda key: entries[key].revision, default="")
        return int(newest.rpartition(".")[2]) if newest else -1

    async def _open(self) -> KeyValue:
        try:
            return await self._engine.kv(_BUCKET, persistent=True, ttl_s=limits.AUDIT_LIFE_S)
        except errors.ConfigError as error:
            raise errors.EngineError(str(error)) from error
