"""Which nodes live, and what they hold: each tells all others once a second.

A node that was not heard for `limits.NODE_LEASE_S` has died: whatever the directory says of its sessions is void from
then on. Silence counts only while we hear: time in which the engine was away, or this process stood still, is nobody's.
A run of a node is one start of its process; a node that comes back is another run.

Also the numbers of sessions by app, version and network travel so: a sum over living nodes costs no reading.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from stormline.appgw import subjects
from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.clock import Clock
from stormline.engine.port import Listener, Message, Subscription

_log = logging.getLogger("stormline.appgw")
_SUBJECT = "beats"


class Count(msgspec.Struct, array_like=True):
    """Devices of one app on one node.

    Attributes:
        devices: all.
        versions: by version of the application; rare ones together as `other`.
        networks: by kind of network.
    """

    devices: int = 0
    versions: dict[str, int] = {}
    networks: dict[str, int] = {}


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """What a node says. Fields are only ever added at the end, with a default.

    Attributes:
        unit: its unit.
        node: its name.
        run: this start of its process.
        apps: what it holds, by app.
        leaving: this is its last word.
        asks: it has just begun to listen, and wants to hear the others now.
    """

    unit: str
    node: str
    run: str
    apps: dict[str, Count] = {}
    leaving: bool = False
    asks: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Beat)


class Bus(Protocol):
    """What is needed of the engine."""

    @property
    def connected(self) -> bool:
        """See `engine.port.Engine.connected`."""
        ...

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """See `engine.port.Engine.publish`."""
        ...


class Subscriber(Protocol):
    """What listening needs of the engine."""

    async def subscribe(self, subject: str, handler: Listener, *, queue: str = "") -> Subscription:
        """See `engine.port.Engine.subscribe`."""
        ...


class _Heard:
    __slots__ = ("at", "beat")

    def __init__(self, beat: Beat, at: float) -> None:
        self.beat = beat
        self.at = at


class Nodes:
    """The living nodes, as this one hears them. Belongs to the running loop.

    Args:
        engine: the way to the others; may be away at any time.
        unit: this unit.
        node: this node.
        run: this start of it.
        clock: wall time.
        counts: gives what this node holds now, by app.
        died: told of each node of this unit that has died or left: its name, its run, and when it was heard last, in
            milliseconds since 1970.
    """

    def __init__(
        self,
        engine: Bus,
        *,
        unit: str,
        node: str,
        run: str,
        clock: Clock,
        counts: Callable[[], dict[str, Count]],
        died: Callable[[str, str, int], None],
    ) -> None:
        self._engine = engine
        self._unit = unit
        self._node = node
        self._run = run
        self._clock = clock
        self._counts = counts
        self._died = died
        self._heard: dict[tuple[str, str, str], _Heard] = {}
        self._gone: dict[tuple[str, str, str], None] = {}
        self._answering: asyncio.Task[None] | None = None
        self._began: float | None = None
        self._looked = 0.0

    # -- for those who ask ---------------------------------------------------------------------------------------

    def alive(self, node: str, run: str, epoch_ms: int = 0) -> bool:
        """Say whether a run of a node of this unit lives. One never heard of is believed while we have listened for
        less than a lease, or where it wrote less than a lease ago (`epoch_ms`)."""
        if node == self._node:
            return run == self._run
        key = (self._unit, node, run)
        if key in self._heard:
            return True
        if key in self._gone:
            return False
        if self._began is None or self._looked - self._began < limits.NODE_LEASE_S:
            return True
        return self._clock.wall() * 1000 - epoch_ms < limits.NODE_LEASE_S * 1000

    def live(self) -> list[Beat]:
        """Give the newest word of each living node of every unit we hear, by unit and name; ours is of now."""
        beats = {key: heard.beat for key, heard in self._heard.items()}
        beats[self._unit, self._node, self._run] = self._beat()
        return [beats[key] for key in sorted(beats)]

    def first(self) -> bool:
        """Say whether this node is the first by name of the living ones of its unit: who does what is done once."""
        return all(node >= self._node for unit, node, _ in self._heard if unit == self._unit)

    # -- for the node --------------------------------------------------------------------------------------------

    async def start(self, engine: Subscriber) -> Subscription:
        """Begin to hear the others."""
        return await engine.subscribe(f"u.*.{_SUBJECT}", self._take)

    async def run(self) -> None:
        """Speak, and look who has fallen silent, until cancelled."""
        loop = asyncio.get_running_loop()
        self._looked = loop.time()
        asks = True
        try:
            while True:
                asks = not await self._say(self._beat(asks=asks)) and asks
                await asyncio.sleep(limits.NODE_BEAT_S)
                self._look(loop.time())
        finally:
            if self._answering is not None:
                self._answering.cancel()

    async def leave(self) -> None:
        """Say that this node ends: its sessions are gone now."""
        await self._say(self._beat(leaving=True))

    # -- inside --------------------------------------------------------------------------------------------------

    def _beat(self, *, leaving: bool = False, asks: bool = False) -> Beat:
        return Beat(self._unit, self._node, self._run, self._counts(), leaving, asks)

    async def _say(self, beat: Beat) -> bool:
        try:
            await self._engine.publish(subjects.of_unit(self._unit, _SUBJECT), _encoder.encode(beat))
        except errors.EngineError:
            return False  # nobody counts this time
        return True

    async def _answer(self) -> None:
        """Answer those who have just come: several at once get one answer."""
        await asyncio.sleep(limits.NODE_ANSWER_S)
        self._answering = None
        await self._say(self._beat())

    async def _take(self, message: Message) -> None:
        try:
            beat = _decoder.decode(message.data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            _log.warning("the word of a node that cannot be read was dropped")
            return
        now = asyncio.get_running_loop().time()
        if self._began is None:
            self._began = now
        key = (beat.unit, beat.node, beat.run)
        if beat.unit == self._unit and beat.node == self._node:
            return
        if beat.leaving:
            if key in self._heard and beat.unit == self._unit:
                self._died(beat.node, beat.run, int(self._clock.wall() * 1000))
            self._forget(key)
            return
        if key not in self._heard:
            if len(self._heard) >= limits.NODES_MAX:
                _log.warning("more than %d nodes: %s/%s is not heard", limits.NODES_MAX, beat.unit, beat.node)
                return
            _log.info("node %s/%s is there", beat.unit, beat.node)
            self._gone.pop(key, None)
        self._heard[key] = _Heard(beat, now)
        if beat.asks and self._answering is None:
            self._answering = asyncio.get_running_loop().create_task(self._answer(), name="gateway nodes answer")

    def _look(self, now: float) -> None:
        away = not self._engine.connected
        gap, self._looked = now - self._looked, now
        if away or gap > 2 * limits.NODE_BEAT_S:  # the engine was away, or we stood still: silence says nothing
            for heard in self._heard.values():
                heard.at = now
            if self._began is not None:
                self._began = now
            return
        for key, heard in list(self._heard.items()):
            silent_s = now - heard.at
            if silent_s > limits.NODE_LEASE_S:
                self._forget(key)
                unit, node, run = key
                _log.warning("node %s/%s was not heard for %.0f s: it has died", unit, node, silent_s)
                if unit == self._unit:
                    self._died(node, run, int((self._clock.wall() - silent_s) * 1000))

    def _forget(self, key: tuple[str, str, str]) -> None:
        self._heard.pop(key, None)
        self._gone[key] = None
        if len(self._gone) > limits.NODES_MAX:
            del self._gone[next(iter(self._gone))]
