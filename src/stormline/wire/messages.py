"""Every message of the long connection. `docs/reference/protocol.md` is this table in prose.

A message travels as a MessagePack array `[tag, field, ...]` in the order written here. Fields are only ever added at
the end, with a default: a reader takes the default for what is absent and skips what it does not know.
"""

from typing import Final, TypeAlias

import msgspec

VERSION: Final = 1
"""The protocol version of this file."""
ALPN: Final = "sl/1"
"""Application protocol name on TLS and QUIC (RFC 7301)."""

PLAN: Final = "plan"
"""Capability: the client wants to be told by NOTICE when its plan has changed."""
RESUME: Final = "resume"
"""Capability: both sides keep the frames of the session until the other has confirmed them."""
CAPABILITIES: Final = frozenset({PLAN, RESUME})
"""Optional features this version knows. One is in force where HELLO and WELCOME both name it."""

Headers: TypeAlias = tuple[tuple[str, str], ...]
"""Name and value pairs in order. HTTP field values are the Latin-1 reading of their bytes."""


class Hello(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """First message of a client: who it is and what it wants.

    Attributes:
        versions: protocol versions it speaks.
        app: application id; says whose keys check the token.
        token: device token (`wire.tokens`), empty where it has none.
        unit: unit the client believes its user belongs to, empty where it does not know.
        resume: resume token of an earlier WELCOME, empty for a new session.
        received: how many frames of the session it resumes it has received.
        network: kind of network, `wifi`, `cell`, `wired` or `unknown`.
        client: name and version of its library, for statistics.
        capabilities: optional features it understands.
        app_version: version of the application, for statistics.
        tags: words the application gives this device, by which a business finds it.
    """

    versions: tuple[int, ...]
    app: str
    token: str = ""
    unit: str = ""
    resume: str = ""
    received: int = 0
    network: str = "unknown"
    client: str = ""
    capabilities: tuple[str, ...] = ()
    app_version: str = ""
    tags: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Show all but the credentials."""
        return f"Hello(versions={self.versions}, app={self.app!r}, unit={self.unit!r}, client={self.client!r})"


class Welcome(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """The server's yes.

    Attributes:
        version: the version both now speak.
        session: id of this session, for logs.
        device: device id from the token.
        user: user id from the token, empty where nobody is logged in.
        unit: unit that really serves the user.
        unit_epoch: grows with every move of the user.
        resume: token to resume this session with, empty where it cannot be resumed.
        resume_window_s: seconds after a loss in which it can.
        resumed: this is an earlier session going on.
        heartbeat_s: longest silence the server wants before a PING.
        time_ms: server time, milliseconds since 1970.
        capabilities: optional features in force.
        received: how many frames of a session that goes on the server has received.
        return_spread_s: come back at a random moment within so many seconds where the connection is lost without a
            word: others are lost with it; 0 for no advice.
    """

    version: int
    session: str
    device: str
    user: str = ""
    unit: str = ""
    unit_epoch: int = 0
    resume: str = ""
    resume_window_s: float = 0.0
    resumed: bool = False
    heartbeat_s: float = 0.0
    time_ms: int = 0
    capabilities: tuple[str, ...] = ()
    received: int = 0
    return_spread_s: float = 0.0

    def __repr__(self) -> str:
        """Show all but the credential."""
        return f"Welcome(session={self.session!r}, device={self.device!r}, resumed={self.resumed})"


class Close(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Last message of either side.

    Attributes:
        code: why; its range says what the receiver should do (`core.codes`).
        reason: for people.
        retry_after_ms: earliest next try, None where there is no advice.
    """

    code: int
    reason: str = ""
    retry_after_ms: int | None = None


class Call(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Opens a call; either side may.

    Attributes:
        id: odd for calls of the client, even for those of the server; only grows.
        gate: which application gateway it is for: `api`, `rpc`, `session`, or an open protocol's name.
        method: HTTP method, or RPC method.
        target: URL for `api`, else empty.
        headers: metadata.
        body: the body, or its first chunk.
        more: DATA follows.
        deadline_ms: time left when it was sent, None for the receiver's default.
    """

    id: int
    gate: str
    method: str
    target: str = ""
    headers: Headers = ()
    body: bytes = b""
    more: bool = False
    deadline_ms: int | None = None


class Data(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """A chunk of a call's or a reply's body; the sender is the one whose CALL or REPLY said `more`.

    Attributes:
        id: the call.
        body: the chunk; may be empty, to end a body.
        end: this is the last one.
        trailers: metadata known only at the end; read on the last chunk.
    """

    id: int
    body: bytes
    end: bool = False
    trailers: Headers = ()


class Reply(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """The answer to a call, or its beginning.

    Attributes:
        id: the call.
        status: HTTP status for `api`, 0 else.
        headers: metadata.
        body: the body, or its first chunk.
        more: DATA follows.
    """

    id: int
    status: int
    headers: Headers = ()
    body: bytes = b""
    more: bool = False


class Fail(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """Ends one call without (the rest of) an answer.

    Attributes:
        id: the call.
        code: why (`core.codes`).
        reason: for people.
        retry_after_ms: earliest next try, None where there is no advice.
        maybe_delivered: the work may have been done.
    """

    id: int
    code: int
    reason: str = ""
    retry_after_ms: int | None = None
    maybe_delivered: bool = False


class Cancel(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """The caller no longer wants the answer; no message about this call follows from it.

    Attributes:
        id: the call.
        code: why: 503 given up, 502 its deadline passed.
    """

    id: int
    code: int = 503


class Credit(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """Allows the peer more body bytes on a call.

    Attributes:
        id: the call.
        size: bytes on top of what was allowed before; at least 1.
    """

    id: int
    size: int


class Push(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """A message to the device; server to client only.

    Attributes:
        seq: number in this session, from 1, without gaps.
        id: the message's own id; the same message redelivered has the same one.
        topic: what it belongs to, empty for the device itself.
        headers: metadata.
        body: content.
        expires_ms: wall time after which it is worthless, milliseconds since 1970; None for never.
    """

    seq: int
    id: str
    topic: str = ""
    headers: Headers = ()
    body: bytes = b""
    expires_ms: int | None = None


class Ack(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """The application has taken these pushes over; client to server only.

    Attributes:
        seqs: sequence numbers of the pushes, in any order.
    """

    seqs: tuple[int, ...]


class Ping(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """Asks for a PONG with the same number.

    Attributes:
        nonce: any integer.
    """

    nonce: int


class Pong(msgspec.Struct, tag=12, array_like=True, frozen=True):
    """Answers a PING.

    Attributes:
        nonce: the number of the PING.
    """

    nonce: int


class GoAway(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """Open no more calls here; those after `last_call` were not and will not be processed.

    Attributes:
        code: why (`core.codes`).
        last_call: highest call id of the receiver that is still served.
        reason: for people.
        spread_ms: leave at a random moment within this span.
        retry_after_ms: earliest return to this node, None where there is no advice.
    """

    code: int
    last_call: int
    reason: str = ""
    spread_ms: int = 0
    retry_after_ms: int | None = None


GATEWAYS: Final = "@gateways"
"""Stands in a notice beside the names of hosts, none of which looks like it, for the gateways of the plan."""


class Notice(msgspec.Struct, tag=14, array_like=True, frozen=True):
    """The plan has changed: ask for it anew. Server to client only, where the capability `plan` is in force.

    Attributes:
        version: newest version of the plan that the server knows of.
        hosts: hosts whose plan changed since the notice before, in their normal form: ask for them anew; `@gateways`
            among them says that the plan's gateways changed. Empty: ask for each host whose plan was got under an older
            version.
    """

    version: int
    hosts: tuple[str, ...] = ()


class Received(msgspec.Struct, tag=15, array_like=True, frozen=True):
    """Confirms frames of the session: the sender of these need not keep them any longer.

    Only where the capability `resume` is in force.

    Attributes:
        count: how many frames of the session have been received on all its connections; see `states.COUNTED`.
    """

    count: int


Message: TypeAlias = (
    Hello | Welcome | Close | Call | Data | Reply | Fail | Cancel | Credit | Push | Ack | Ping | Pong | GoAway | Notice
    | Received
)  # fmt: skip
ALL: Final = (
    Hello, Welcome, Close, Call, Data, Reply, Fail, Cancel, Credit, Push, Ack, Ping, Pong, GoAway, Notice, Received,
)  # fmt: skip
