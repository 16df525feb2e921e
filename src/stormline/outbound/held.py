"""What the pool counts and hands out: places, the right to a connection, connections being made."""

import asyncio
import collections
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.stream import Stream, TlsStream
from stormline.outbound.http1 import Http1Connection

if TYPE_CHECKING:
    from stormline.net.tcpinfo import TcpInfo
    from stormline.outbound.http2 import Http2Connection


class Origin(NamedTuple):
    """Whom requests are for."""

    scheme: str
    host: str
    port: int


class Key(NamedTuple):
    """What two requests must have in common to share a connection."""

    origin: Origin
    addresses: tuple[Address, ...] | None
    server_name: str | None


class Held:
    """The right to one connection, from its grant to its release; what a request may know and say of the one it is on.

    Attributes:
        key: the place it leads to.
        connection: HTTP/1.1, one request at a time.
        shared: HTTP/2, in its stead, for many.
        released: the right is given back.
    """

    __slots__ = ("_doubted_at", "_mute_at", "_probed_at", "connection", "key", "released", "shared")

    def __init__(self, key: Key, connection: Http1Connection | None) -> None:
        self.key = key
        self.connection = connection
        self.shared: Http2Connection | None = None
        self.released = False
        self._doubted_at: float | None = None  # silent: until it brings anything, no new request is put on it
        self._mute_at: float | None = None  # alive and not answering: until it answers something, the same
        self._probed_at: float | None = None

    @property
    def stream(self) -> Stream | None:
        """The bytes below, None while the connection is being made."""
        connection = self.shared or self.connection
        return None if connection is None else connection.stream

    @property
    def peer(self) -> Address | None:
        """Who is at the other end."""
        stream = self.stream
        return None if stream is None else stream.peer

    @property
    def heard_at(self) -> float:
        """The loop's time when it last brought bytes, for whomever."""
        stream = self.stream
        return 0.0 if stream is None else stream.heard_at

    @property
    def answered(self) -> bool:
        """It has given an answer before, to any request."""
        if self.shared is not None:
            return self.shared.answered_at is not None
        return self.connection is not None and self.connection.answers > 0

    def tcp_info(self) -> "TcpInfo | None":
        """What the kernel says of it, where it says anything."""
        stream = self.stream
        return None if stream is None else stream.tcp_info()

    # -- signs of life --------------------------------------------------------------------------------------------
    @property
    def can_probe(self) -> bool:
        """It has a ping."""
        return self.shared is not None

    def probe(self) -> None:
        """Ask for a sign of life; `heard_at` tells what came of it."""
        if self.shared is not None and not self.shared.closed:
            self._probed_at = asyncio.get_running_loop().time()
            self.shared.ping()

    def probe_age_s(self, now: float) -> float | None:
        """Seconds since a probe that nothing has answered yet; None where there is none."""
        probed_at = self._probed_at
        return None if probed_at is None or self.heard_at > probed_at else now - probed_at

    def doubt(self) -> None:
        """It is silent: put no further request on it until it brings something. What it carries goes on."""
        self.shun_session()
        self._doubted_at = asyncio.get_running_loop().time()

    def distrust(self) -> None:
        """It does not answer: put no further request on it until it answers one. What it carries goes on."""
        self.shun_session()
        self._mute_at = asyncio.get_running_loop().time()

    def shun_session(self) -> None:
        """Resume no TLS session there any more, if it was resumed and has not answered anything."""
        stream = self.stream
        if isinstance(stream, TlsStream) and not self.answered:
            stream.shun_session()

    @property
    def mute(self) -> bool:
        """It has not answered since it was distrusted."""
        if self._mute_at is None or self.shared is None:
            return False
        answered_at = self.shared.answered_at
        if answered_at is not None and answered_at > self._mute_at:
            self._mute_at = None
        return self._mute_at is not None

    @property
    def silent(self) -> bool:
        """It has brought nothing since it was doubted."""
        if self._doubted_at is not None and self.heard_at > self._doubted_at:
            self._doubted_at = None
        return self._doubted_at is not None


class Progress:
    """How far one request is, for its deadline's error."""

    __slots__ = ("_host", "_on_stage", "phase")

    def __init__(self, host: str, on_stage: Callable[[str], None]) -> None:
        self._host = host
        self._on_stage = on_stage
        self.phase = Phase.QUEUED

    def stage(self, stage: str) -> None:
        """Note that a stage begins."""
        self.phase = Phase(stage)
        self._on_stage(stage)

    def too_late(self) -> errors.DeadlineExceeded:
        """Say that the deadline passed before the request was put on a connection."""
        return errors.DeadlineExceeded(
            f"{self._host}: the deadline passed, while in {self.phase}", phase=self.phase, maybe_delivered=False
        )


class Opening:
    """A connection being made for all who ask for its place: the first to ask begins it, the last to leave ends it."""

    __slots__ = ("_notes", "_told", "phase", "task", "waiting")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.waiting = 0
        self.phase = Phase.QUEUED
        self._told: dict[Progress, Callable[[str], None]] = {}
        self._notes: collections.deque[str] = collections.deque(maxlen=limits.POOL_NOTES_KEPT)

    def join(self, progress: "Progress", on_note: Callable[[str], None]) -> None:
        """Wait for it too; what happens from now on is told."""
        self.waiting += 1
        self._told[progress] = on_note
        if self.phase is not Phase.QUEUED:
            progress.stage(self.phase)

    def leave(self, progress: "Progress") -> None:
        """Wait for it no longer."""
        self.waiting -= 1
        self._told.pop(progress, None)

    def stage(self, stage: str) -> None:
        """Note that a stage begins, and tell all who wait."""
        self.phase = Phase(stage)
        for progress in list(self._told):
            progress.stage(stage)

    def note(self, line: str) -> None:
        """Note a decision, and tell all who wait."""
        self._notes.append(line)
        for on_note in list(self._told.values()):
            on_note(line)

    @property
    def story(self) -> str:
        """What was decided last."""
        return "; ".join(self._notes) or "no address failed"
