"""What an application gateway sees of the outside: who calls, the call itself, and the way down to a device.

The gateway above implements `Exchange` and `Downlink`; the application gateways in this room implement `Gate`.
"""

import enum
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from stormline.wire.messages import Headers


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose session a call came on, as its token proved.

    Attributes:
        app: application id.
        device: device id, unique within the app.
        user: user id, empty where nobody is logged in.
        session: id of the session, for logs and the directory.
        login_ms: when the client first came without a session to go on with, milliseconds since 1970; 0 where that is
            not known. All sessions that this client has after it have the same.
        returned: the client had a session before.
    """

    app: str
    device: str
    user: str
    session: str
    login_ms: int = 0
    returned: bool = False

    def older_than(self, login_ms: int) -> bool:
        """Say whether this is a client that came back and whose place a later login has: the newest login stays."""
        return self.returned and 0 < self.login_ms < login_ms


class Exchange(Protocol):
    """One call of a device, from the side that serves it. Independent of the connection it came on.

    A gate answers either by one `reply`, or by `reply(more=True)`, any number of `send`, and `finish`. It fails by
    raising `CallError`, also between `reply` and `finish`: then the caller sees a broken body, never a short good one.

    The task that handles the call is cancelled when the caller cancels or its connection ends, and nothing sent
    afterwards reaches anybody. All methods may be cancelled; what a cancelled `send` had not yet handed over is lost.
    """

    @property
    def identity(self) -> Identity:
        """Who calls."""
        ...

    @property
    def peer(self) -> str:
        """IP address the caller's connection comes from, empty where it is not known."""
        ...

    @property
    def network(self) -> str:
        """Kind of network the caller said it is on: `wifi`, `cell`, `wired` or `unknown`."""
        ...

    @property
    def gate(self) -> str:
        """Name of the application gateway called."""
        ...

    @property
    def method(self) -> str:
        """HTTP or RPC method, unchecked."""
        ...

    @property
    def target(self) -> str:
        """URL, unchecked; empty for gates that have none."""
        ...

    @property
    def headers(self) -> Headers:
        """The caller's headers, unchecked but bounded in number and size."""
        ...

    @property
    def deadline(self) -> float:
        """By when the answer must have begun, as `loop.time()`. A gate gives up by then and says what it knows."""
        ...

    @property
    def body_deadline(self) -> float:
        """By when it must have ended: the same where the caller named a deadline, much later where it named none."""
        ...

    def whole_body(self) -> bytes | None:
        """Give the caller's body where it came whole with the call, None where it has to be read from `body`."""
        ...

    def body(self) -> AsyncIterator[bytes]:
        """Give the caller's body chunk by chunk, once. Asking for the next chunk says that the last is used up, so
        the caller may send more: a gate that does not read holds the caller back."""
        ...

    def live_on(self) -> None:
        """Let the call live as long as its session: it is a conversation, and no deadline holds for it."""
        ...

    async def reply(self, status: int, headers: Headers = (), body: bytes = b"", *, more: bool = False) -> None:
        """Begin the answer. A body beyond one chunk is cut and sent under flow control.

        Raises:
            CallError: the call has ended.
            LocalProtocolError: a second reply, or more headers than the wire carries.
        """
        ...

    async def send(self, chunk: bytes) -> None:
        """Send more of the body; returns when the connection has taken it, so a slow caller holds the gate back.

        Raises:
            CallError: the call has ended.
        """
        ...

    async def finish(self) -> None:
        """End the body begun by `reply(more=True)`.

        Raises:
            CallError: the call has ended.
        """
        ...


class Answer(NamedTuple):
    """A whole answer; see `Exchange.reply`.

    Attributes:
        status: HTTP's, or 0.
        headers: metadata.
        body: content.
    """

    status: int
    headers: Headers = ()
    body: bytes = b""


class Gate(Protocol):
    """An application gateway."""

    @property
    def name(self) -> str:
        """The gate name that calls carry."""
        ...

    def handle(self, exchange: Exchange) -> Answer | Coroutine[Any, Any, None]:
        """Serve one call: give the whole answer where it is known at once, else what serves it, as `async def` does.

        An answer given at once costs no task, in the context of the connection; it is sent when that takes it. What
        serves a call runs as a task in a context of its own.

        Raises:
            CallError: the answer is no. Any other exception counts as CALL_FAILED; neither touches other calls.
        """
        ...


class Delivery(enum.StrEnum):
    """What became of a push."""

    ACKED = "acked"
    """The application on the device has taken it over."""
    OFFLINE = "offline"
    """The device has no session. The push was not delivered, and nothing keeps it for later in this version."""
    UNCONFIRMED = "unconfirmed"
    """It was sent and not acknowledged in time: it may or may not have arrived."""
    BUSY = "busy"
    """Not sent: the device has not acknowledged earlier pushes, and no more may be under way to it."""
    EXPIRED = "expired"
    """Not sent: it was worthless by then."""


@dataclass(frozen=True, slots=True)
class Push:
    """A message to one device.

    Attributes:
        push_id: its own id; the same message sent again carries the same one.
        topic: what it belongs to, empty for the device itself.
        body: content, at most `limits.PUSH_BODY_BYTES_MAX`.
        expires_ms: wall time after which it is worthless, milliseconds since 1970; None for never.
    """

    push_id: str
    topic: str
    body: bytes
    expires_ms: int | None = None


Told: TypeAlias = Callable[[Delivery], None]
"""Hears once what became of a push. Never raises."""


class Place(Protocol):
    """Where a device is; `appgw.record.Record` is one."""

    @property
    def node(self) -> str:
        """The node that holds its session."""
        ...

    @property
    def session(self) -> str:
        """The session's id."""
        ...


class Lookup(Protocol):
    """What those who send to a device need of the directory."""

    async def lookup(self, app: str, device: str) -> Place | None:
        """See `appgw.directory.Directory.lookup`."""
        ...


class Downlink(Protocol):
    """The way to the devices whose sessions this node holds."""

    def session_of(self, app: str, device: str) -> str | None:
        """Give the id of the device's live session on this node."""
        ...

    def push(self, app: str, device: str, push: Push, told: Told) -> None:
        """Send a push. `told` hears at once where it was not sent, else with its acknowledgement or the end of the
        device's session. Never raises for what the device does or does not do."""
        ...
