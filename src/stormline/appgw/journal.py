"""Clearing up behind a node that has died: each keeps a list of the entries it holds, and the first living node acts.

The list lies in the engine in chunks of some hundred keys, so that a new session costs a share of a write, and the
sessions of a node are found without a look at anybody else's. What is listed need not be true any more: an entry is
ended only if it still is of that run of that node, by compare-and-set. So each device is said to be offline once,
however many nodes clear up at the same time, and one that has come back elsewhere is never touched.
"""

import asyncio
import logging
from typing import Final

import msgspec

from stormline.appgw import record
from stormline.appgw.directory import Buckets, Watcher
from stormline.appgw.nodes import Nodes
from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.clock import Clock
from stormline.core.ids import from_subject_token, subject_token
from stormline.engine.port import Entry, KeyValue

_log = logging.getLogger("stormline.appgw")
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[str]).decode


def _prefix(node: str, run: str = "") -> str:
    return f"j.{subject_token(node)}" + (f".{run}" if run else "")


class NodeJournal:
    """This node's list; see `appgw.directory.Journal`. Pure but for `work`.

    Keys go into the open chunk until it is full. Chunks that have become sparse give what is left of them to the open
    one, so there are never more than a few times as many as the sessions fill.
    """

    def __init__(self, node: str, run: str) -> None:
        self._prefix = _prefix(node, run)
        self._new: dict[str, None] = {}
        self._chunk_of: dict[str, int] = {}
        self._chunks: dict[int, dict[str, None]] = {0: {}}
        self._open = 0
        self._stale: set[int] = set()  # to be deleted
        self._written_s: float | None = None

    def add(self, key: str) -> None:
        """See `appgw.directory.Journal`."""
        if key not in self._chunk_of:
            self._new[key] = None

    def drop(self, key: str) -> None:
        """See `appgw.directory.Journal`."""
        self._new.pop(key, None)
        number = self._chunk_of.pop(key, None)
        if number is None:
            return
        chunk = self._chunks[number]
        del chunk[key]
        if number != self._open and len(chunk) < limits.JOURNAL_CHUNK_KEYS_MIN:
            self._dissolve(number)

    def again(self) -> None:
        """See `appgw.directory.Journal`."""
        self._new.update(dict.fromkeys(self._chunk_of))
        self._chunk_of.clear()
        self._chunks = {0: {}}
        self._open = 0
        self._stale.clear()

    async def work(self, kv: KeyValue) -> None:
        """Write what is new, at most once in `limits.JOURNAL_PAUSE_S`; then delete what was dissolved."""
        now = asyncio.get_running_loop().time()
        if not self._new and not self._stale:
            return
        if self._written_s is not None and now - self._written_s < limits.JOURNAL_PAUSE_S:
            return
        stale = list(self._stale)
        while self._new:
            chunk = self._chunks[self._open]
            taken = list(self._new)[: limits.JOURNAL_CHUNK_KEYS_MAX - len(chunk)]
            for key in taken:
                del self._new[key]
                chunk[key] = None
                self._chunk_of[key] = self._open
            number = self._open
            try:
                await kv.put(f"{self._prefix}.{number}", _encode(list(chunk)))
            except BaseException:
                for key in taken:
                    if self._chunk_of.get(key) == number:  # it may have ended meanwhile
                        del self._chunk_of[key], chunk[key]
                        self._new[key] = None
                raise
            if len(chunk) >= limits.JOURNAL_CHUNK_KEYS_MAX:
                self._open = max(self._chunks) + 1
                self._chunks[self._open] = {}
        for number in stale:
            await kv.delete(f"{self._prefix}.{number}")
            self._stale.discard(number)
        self._written_s = now

    def _dissolve(self, number: int) -> None:
        for key in self._chunks.pop(number):
            del self._chunk_of[key]
            self._new[key] = None
        self._stale.add(number)


class Clearing:
    """Ends the entries of nodes that have died, where this node is the first that lives.

    Args:
        engine: where they are kept.
        nodes: says who lives.
        unit: this unit.
        node: this node.
        run: this start of it.
        clock: wall time.
        watcher: told of each device.
    """

    def __init__(
        self, engine: Buckets, nodes: Nodes, *, unit: str, node: str, run: str, clock: Clock, watcher: Watcher
    ) -> None:
        self._engine = engine
        self._nodes = nodes
        self._bucket = record.bucket_of(unit)
        self._node = node
        self._run = run
        self._clock = clock
        self._watcher = watcher
        self._dead: dict[tuple[str, str], int] = {}
        self._woken = asyncio.Event()
        self._behind_us = True  # an earlier run of this node may have left something

    def died(self, node: str, run: str, seen_ms: int) -> None:
        """Note the death of a node; `seen_ms` is when it was heard last."""
        if len(self._dead) < limits.NODES_MAX:
            self._dead[node, run] = seen_ms
        self._woken.set()

    async def run(self) -> None:
        """Clear up, until cancelled. What another node has begun and not ended is done again."""
        while True:
            self._woken.clear()
            try:
                if self._behind_us:
                    await self._own_past()
                if self._dead and self._nodes.first():
                    for (node, run), seen_ms in list(self._dead.items()):
                        await self._clear(node, run, seen_ms)
                        del self._dead[node, run]
            except errors.EngineError as error:
                _log.info("clearing up waits: %s", error)
                await asyncio.sleep(limits.DIRECTORY_TICK_S)
                continue
            try:  # where there is nothing to do now but somebody is dead, another node is at it, and may die too
                async with asyncio.timeout(limits.NODE_LEASE_S if self._dead else None):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def _open(self) -> KeyValue:
        try:
            return await self._engine.kv(self._bucket, persistent=False, ttl_s=limits.DIRECTORY_LIFE_S)
        except errors.ConfigError as error:
            raise errors.EngineError(str(error)) from error

    async def _own_past(self) -> None:
        kv = await self._open()
        now_ms = int(self._clock.wall() * 1000)
        for run in {key.split(".")[2] for key in await kv.under(_prefix(self._node))}:
            if run != self._run:
                await self._clear(self._node, run, now_ms)
        self._behind_us = False

    async def _clear(self, node: str, run: str, seen_ms: int) -> None:
        kv = await self._open()
        ended = 0
        for name, chunk in (await kv.under(_prefix(node, run))).items():
            try:
                keys = _decode(chunk.value)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                keys = []
            for start in range(0, len(keys), limits.DIRECTORY_WRITES_MAX):
                some = keys[start : start + limits.DIRECTORY_WRITES_MAX]
                entries = await kv.get_many(some)
                ended += sum(
                    await asyncio.gather(
                        *(self._end(kv, key, entry, node, run, seen_ms) for key, entry in entries.items())
                    )
                )
            await kv.delete(name)
        if ended:
            _log.info("ended %d sessions of node %s, which has died", ended, node)

    async def _end(self, kv: KeyValue, key: str, entry: Entry, node: str, run: str, seen_ms: int) -> bool:
        there = record.read(entry.value)
        if there is None or not there.online or (there.node, there.run) != (node, run):
            return False
        left = record.ended(there, max(there.seen_ms, seen_ms))
        try:
            await kv.update(key, record.encode(left), entry.revision)
        except errors.Conflict:
            return False  # the device is back, or another node was quicker
        _, app, device = key.split(".")
        await self._watcher.offline(key, from_subject_token(app), from_subject_token(device), left, "lease")
        return True
