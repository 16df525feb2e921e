"""What the pool hands out: the right to a connection, and what a request may know and say of it."""

import asyncio
import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.stream import Stream
from stormline.net.tls import TlsStream
from stormline.outbound.http1 import Http1Connection
from stormline.outbound.messages import HttpRequest

if TYPE_CHECKING:
    from stormline.net.tcpinfo import TcpInfo
    from stormline.outbound.http2 import Http2Connection
    from stormline.outbound.http3 import Http3Connection


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
    h1: bool = False


def key_of(
    request: HttpRequest, addresses: tuple[Address, ...] | None, server_name: str | None, h1: bool = False
) -> Key:
    """Give the place a request is for; `h1`: one where only HTTP/1.1 is spoken.

    Raises:
        LocalProtocolError: it is for something else than HTTP.
    """
    return _key(request.scheme, request.host, request.port, addresses, server_name, h1)


@functools.lru_cache(limits.POOL_PLACES_REMEMBERED)
def _key(
    scheme: str, host: str, port: int, addresses: tuple[Address, ...] | None, server_name: str | None, h1: bool
) -> Key:
    if scheme not in ("http", "https"):
        raise errors.LocalProtocolError(f"scheme {scheme[:20]!r} is neither http nor https")
    return Key(Origin(scheme, host.lower(), port), addresses, server_name, h1)


class Held:
    """The right to one connection, from its grant to its release; what a request may know and say of the one it is on.

    Attributes:
        key: the place it leads to.
        connection: HTTP/1.1, one request at a time.
        shared: HTTP/2 or HTTP/3, in its stead, for many.
        made: the pool's count of what began, when it was made: who began to wait before has a lower number.
        promised: requests that were given a stream of it and have not begun.
        on_doubt: called when it is doubted or distrusted.
        released: the right is given back.
        aside: it is mute for now, until another shows whether that is its own fault; see `set_aside`.
    """

    __slots__ = ("_doubted_at", "_mute_at", "_probed_at", "aside", "connection", "key", "made", "on_doubt", "promised",
                 "released", "shared")  # fmt: skip

    def __init__(self, key: Key, connection: Http1Connection | None, made: int = 0) -> None:
        self.key = key
        self.connection = connection
        self.shared: Http2Connection | Http3Connection | None = None
        self.made = made
        self.promised = 0
        self.on_doubt: Callable[[Held], None] | None = None
        self.released = self.aside = False
        self._doubted_at: float | None = None  # silent: until it brings anything, no new request is put on it
        self._mute_at: float | None = None  # alive and not answering: until it answers something, the same
        self._probed_at: float | None = None

    @property
    def stream(self) -> Stream | None:
        """The bytes below, None while the connection is being made. HTTP/3's only tells of itself: it carries none."""
        connection = self.shared or self.connection
        return None if connection is None else cast("Stream", connection.stream)

    @property
    def peer(self) -> Address | None:
        """Who is at the other end."""
        connection = self.shared or self.connection
        return None if connection is None else connection.stream.peer

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

    # -- HTTP/2 ---------------------------------------------------------------------------------------------------
    @property
    def live(self) -> bool:
        """It is HTTP/2, takes requests, though maybe not at once, and nothing speaks against putting them on it."""
        return self.shared is not None and not (self.released or self.shared.retired or self.silent or self.mute)

    def room(self, served: int | None) -> int:
        """Requests that may be put on it at once; 0 or less for none.

        Args:
            served: after how many requests it is believed to end. One that has carried as many, answered all and not
                gone away takes one more, to see.
        """
        shared = self.shared
        if shared is None:
            return 0
        room = shared.room
        if served is not None and (shared.open_streams or self.promised):
            room = min(room, served - shared.begun)
        return room - self.promised

    @property
    def resting_since(self) -> float | None:
        """The loop's time since when an HTTP/2 connection carries nothing, and nothing was promised; None else."""
        return None if self.shared is None or self.promised else self.shared.idle_since

    def fit(self, window: Callable[[str, int], int]) -> None:
        """Let the server have as much of each answer on its way as the link is known to bear; see `policy.window`.

        Args:
            window: gives the bytes for a host, from those that are allowed now.
        """
        if self.shared is not None:
            self.shared.fit(window(self.key.origin.host, self.shared.window_bytes))

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
        if self.on_doubt is not None:
            self.on_doubt(self)

    def distrust(self) -> None:
        """It does not answer: put no further request on it until it answers one. What it carries goes on."""
        self.shun_session()
        self._mute_at = asyncio.get_running_loop().time()
        self.aside = False
        if self.on_doubt is not None:
            self.on_doubt(self)

    def set_aside(self) -> None:
        """It has not answered yet, which may be no fault of it: put no further request on it until it does."""
        if not self.mute:
            self.distrust()
            self.aside = True

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


class Follower(Protocol):
    """Who follows one request on its way through the pool and over its connection. Its methods must not raise.

    Attributes:
        phase: the stage that was told last; QUEUED before the first.
    """

    phase: Phase

    def stage(self, stage: Phase) -> None:
        """A stage begins."""
        ...

    def note(self, line: str) -> None:
        """A decision was taken, in words."""
        ...

    def on_held(self, held: Held) -> None:
        """The request is put on a connection; nothing of it has been sent."""
        ...


class Unfollowed:
    """`Follower` of a request that nobody follows: it knows how far the request is, and no more."""

    __slots__ = ("phase",)

    def __init__(self) -> None:
        self.phase = Phase.QUEUED

    def stage(self, stage: Phase) -> None:
        """See `Follower.stage`."""
        self.phase = stage

    def note(self, line: str) -> None:
        """See `Follower.note`."""

    def on_held(self, held: Held) -> None:
        """See `Follower.on_held`."""


def too_late(host: str, phase: Phase) -> errors.DeadlineExceeded:
    """Say that the deadline passed before a request was put on a connection."""
    return errors.DeadlineExceeded(f"{host}: the deadline passed, while in {phase}", phase=phase, maybe_delivered=False)


class Checks:
    """Finds out of HTTP/2 connections whether they live, each once at a time.

    Args:
        dead: told of one that does not.
    """

    __slots__ = ("_dead", "_tasks")

    def __init__(self, dead: Callable[[Held], None]) -> None:
        self._dead = dead
        self._tasks: dict[Held, asyncio.Task[None]] | None = {}

    def add(self, held: Held) -> None:
        """A request waited long in vain: see whether the connection lives, before more are put on it for ever."""
        if self._tasks is not None and held not in self._tasks and not held.released:
            task = asyncio.create_task(self._check(held), name="check a silent connection")
            self._tasks[held] = task
            task.add_done_callback(lambda _: None if self._tasks is None else self._tasks.pop(held, None))

    async def _check(self, held: Held) -> None:
        if held.shared is not None and not await held.shared.check(limits.H2_CHECK_S):
            self._dead(held)

    def close(self) -> None:
        """Check nothing any more."""
        tasks, self._tasks = self._tasks, None
        for task in (tasks or {}).values():
            with contextlib.suppress(RuntimeError):  # its loop is closed already
                task.cancel()
