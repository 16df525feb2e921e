"""Own protocols: a business ships a plug-in that owns a protocol id, and the gateway carries its messages both ways.

A plug-in is an installed package with an entry point of the group `stormline.protocols`: its name is the protocol id,
what it names is a callable without arguments that gives an `OwnProtocol`. `docs/howto/own-protocol.md` builds one.

On the wire a stream is one call of the gate with the protocol's id, method `open`, whose body and whose answer's body
carry messages (`wire.ownframes`) for as long as both sides like. It outlives lost connections as any call does.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib import metadata
from typing import Final, Protocol

from stormline.appgw.port import Exchange, Identity
from stormline.core import errors, ids, limits_platform
from stormline.core import limits_api as limits
from stormline.core.codes import Code
from stormline.core.errors import CallError
from stormline.policy.ratelimit import RateLimiter
from stormline.wire import ownframes
from stormline.wire.messages import Headers

_log = logging.getLogger("stormline.appgw")

ENTRY_POINTS: Final = "stormline.protocols"
"""Group of the entry points of plug-ins."""
OPEN: Final = "open"
"""The one method of an own protocol's gate."""
_TAKEN: Final = frozenset({"api", "rpc", "dispatch", "session", "sync", "push"})
"""Gates of the house."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the gateway allows one protocol.

    Attributes:
        message_bytes: largest message, either way; one that is larger ends its stream.
        messages_per_s: messages a second from one stream, in the long run; those beyond wait, and hold the device back.
        burst: messages at once.
        streams_per_device: open streams of one device; beyond it CALL_TOO_MANY.
        streams: open streams on one node; beyond it CALL_UNAVAILABLE.
    """

    message_bytes: int = limits.OWN_MESSAGE_BYTES
    messages_per_s: float = limits.OWN_MESSAGES_PER_S
    burst: int = limits.OWN_MESSAGES_BURST
    streams_per_device: int = limits.OWN_STREAMS_PER_DEVICE
    streams: int = limits.OWN_STREAMS_MAX


class Stream(Protocol):
    """One device's stream of a protocol, in the hands of its plug-in."""

    @property
    def identity(self) -> Identity:
        """Whose it is, as the device's token proved."""
        ...

    @property
    def headers(self) -> Headers:
        """What the device sent with the opening, unchecked but bounded."""
        ...

    @property
    def is_open(self) -> bool:
        """Messages can still be sent."""
        ...

    async def send(self, message: bytes) -> None:
        """Send a message; returns when the device's connection has taken it, so a slow device holds the sender back.

        Any number of tasks may send at once: each message goes whole. Cancelled, a message may have gone in part; the
        stream is closed then.

        Raises:
            CallError: the stream is closed (CALL_CANCELLED), or the message larger than the limit (CALL_TOO_LARGE).
        """
        ...

    def close(self) -> None:
        """End the stream once the callback that runs has returned; the device sees its regular end. Harmless later."""
        ...


class OwnProtocol(Protocol):
    """What a plug-in is. Its callbacks for one stream run one after the other, those of streams side by side.

    An exception of a callback ends that stream, with CALL_FAILED at the device, and nothing else.
    """

    @property
    def name(self) -> str:
        """The protocol id: a DNS label."""
        ...

    @property
    def limits(self) -> Limits:
        """What the gateway allows it; read once."""
        ...

    async def opened(self, stream: Stream) -> None:
        """A device opened a stream. Raise `CallError` to refuse it, before anything is sent."""
        ...

    async def message(self, stream: Stream, message: bytes) -> None:
        """A message came. Until this returns the next one waits, and at last the device does."""
        ...

    async def closed(self, stream: Stream) -> None:
        """The stream is over, for whatever reason; told once for each that `opened` was called with."""
        ...


def load() -> tuple[OwnProtocol, ...]:
    """Give the plug-ins that are installed; one that cannot be loaded is left out, with a line in the log."""
    found: dict[str, OwnProtocol] = {}
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        try:
            protocol: OwnProtocol = entry.load()()
            check(protocol)
            if protocol.name != entry.name or protocol.name in found:
                raise errors.ConfigError(f"its name is {protocol.name!r}, its entry point {entry.name!r}")
        except Exception:
            # Others' code: whatever it raises, the platform's own gates must serve.
            _log.exception("own protocol %r cannot be loaded", entry.name)
            continue
        found[entry.name] = protocol
        _log.info("own protocol %r of %s", entry.name, entry.value)
    return tuple(found.values())


def check(protocol: OwnProtocol) -> None:
    """Make sure that a plug-in can be served.

    Raises:
        ConfigError: its name is no label or the house's own, or a limit is out of range.
    """
    ids.check_label(protocol.name, "protocol")
    if protocol.name in _TAKEN:
        raise errors.ConfigError(f"protocol {protocol.name!r}: that name is the platform's")
    given = protocol.limits
    if not 0 < given.message_bytes <= limits.OWN_MESSAGE_BYTES_MAX:
        raise errors.ConfigError(f"protocol {protocol.name!r}: message_bytes up to {limits.OWN_MESSAGE_BYTES_MAX}")
    if not (given.messages_per_s > 0 and given.burst >= 1 and given.streams_per_device >= 1 and given.streams >= 1):
        raise errors.ConfigError(f"protocol {protocol.name!r}: its limits must be above 0")


class _Stream:
    """See `Stream`."""

    def __init__(self, exchange: Exchange, message_bytes: int) -> None:
        self._exchange = exchange
        self._message_bytes = message_bytes
        self._sending = asyncio.Lock()
        self._waiting: asyncio.Timeout | None = None
        self.begun = False
        self.closing = False
        self.is_open = True

    @property
    def identity(self) -> Identity:
        return self._exchange.identity

    @property
    def headers(self) -> Headers:
        return self._exchange.headers

    async def send(self, message: bytes) -> None:
        if len(message) > self._message_bytes:
            raise CallError(Code.CALL_TOO_LARGE, f"a message has at most {self._message_bytes} bytes")
        async with self._sending:
            await self._begin()
            try:
                await self._exchange.send(ownframes.pack(message))
            except BaseException:
                self.is_open = False
                self.close()
                raise

    async def begin(self) -> None:
        """Say yes to the device, once."""
        async with self._sending:
            await self._begin()

    async def _begin(self) -> None:
        if not self.is_open:
            raise CallError(Code.CALL_CANCELLED, "the stream is closed")
        if not self.begun:
            self.begun = True
            await self._exchange.reply(0, (), more=True)

    def close(self) -> None:
        self.closing = True
        if self._waiting is not None:
            self._waiting.reschedule(0.0)

    async def next(self, chunks: AsyncIterator[bytes]) -> bytes | None:
        """Wait for more of the device's body; None where it has ended, or the stream is to be closed."""
        if self.closing:
            return None
        try:
            async with asyncio.timeout(None) as self._waiting:
                return await anext(chunks, None)
        except TimeoutError:
            return None
        finally:
            self._waiting = None

    async def finish(self) -> None:
        """End it regularly."""
        async with self._sending:
            if self.is_open:
                self.is_open = False
                await self._exchange.finish()


class ProtocolGate:
    """The gate of one own protocol.

    | what happens                               | code             | maybe delivered |
    |--------------------------------------------|------------------|-----------------|
    | not opened as a stream is                  | CALL_BAD_REQUEST | no              |
    | the device has too many streams            | CALL_TOO_MANY    | no              |
    | the node has too many                      | CALL_UNAVAILABLE | no              |
    | the plug-in refuses                        | as it says       | as it says      |
    | a message too large                        | CALL_TOO_LARGE   | yes             |
    | the device's body ends within a message    | CALL_BAD_REQUEST | yes             |
    | the plug-in fails                          | CALL_FAILED      | yes             |

    Raises:
        ConfigError: see `check`.
    """

    def __init__(self, protocol: OwnProtocol) -> None:
        check(protocol)
        self._protocol = protocol
        self._limits = protocol.limits
        self._open: Counter[tuple[str, str]] = Counter()
        self._count = 0

    @property
    def name(self) -> str:
        """The protocol id."""
        return self._protocol.name

    async def handle(self, exchange: Exchange) -> None:
        """See `appgw.port.Gate.handle`."""
        who = (exchange.identity.app, exchange.identity.device)
        if exchange.method != OPEN or exchange.whole_body() is not None:
            raise CallError(Code.CALL_BAD_REQUEST, f"a stream of {self.name} begins with {OPEN!r} and goes on")
        if self._open[who] >= self._limits.streams_per_device:
            raise CallError(Code.CALL_TOO_MANY, f"this device has {self._open[who]} streams of {self.name} open")
        if self._count >= self._limits.streams:
            raise CallError(
                Code.CALL_UNAVAILABLE,
                f"too many streams of {self.name} are open",
                retry_after_s=limits_platform.CALL_RETRY_AFTER_S,
            )
        self._open[who] += 1
        self._count += 1
        exchange.live_on()
        stream = _Stream(exchange, self._limits.message_bytes)
        try:
            await self._serve(exchange, stream)
        except CallError:
            raise
        except errors.RemoteProtocolError as error:
            raise CallError(Code.CALL_TOO_LARGE, str(error), maybe_delivered=True) from error
        except Exception as error:
            _log.exception("own protocol %s failed", self.name)
            raise CallError(Code.CALL_FAILED, f"{self.name} failed", maybe_delivered=True) from error
        finally:
            stream.is_open = False
            self._count -= 1
            self._open[who] -= 1
            if not self._open[who]:
                del self._open[who]
            await self._tell_closed(stream)

    async def _serve(self, exchange: Exchange, stream: _Stream) -> None:
        loop = asyncio.get_running_loop()
        rate = RateLimiter(rate_per_s=self._limits.messages_per_s, burst=self._limits.burst, keys_max=1)
        unpacker = ownframes.Unpacker(self._limits.message_bytes)
        await self._protocol.opened(stream)
        await stream.begin()
        chunks = exchange.body()
        while (chunk := await stream.next(chunks)) is not None:
            for message in unpacker.feed(chunk):
                while (wait_s := rate.take("", loop.time())) > 0.0:  # noqa: ASYNC110 - a moment, not an event
                    await asyncio.sleep(wait_s)
                await self._protocol.message(stream, message)
                if stream.closing:
                    break
        if unpacker.partial and not stream.closing:
            raise CallError(Code.CALL_BAD_REQUEST, "the stream ended within a message", maybe_delivered=True)
        await stream.finish()

    async def _tell_closed(self, stream: Stream) -> None:
        """Tell the plug-in, also where the task of the call is cancelled."""
        telling = asyncio.ensure_future(self._closed(stream))
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(telling)

    async def _closed(self, stream: Stream) -> None:
        try:
            async with asyncio.timeout(limits.OWN_CLOSED_S):
                await self._protocol.closed(stream)
        except Exception:
            _log.exception("own protocol %s failed as a stream was closed", self.name)
