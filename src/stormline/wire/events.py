"""What happens on a long connection, as the session machine tells it. Read this first."""

from typing import TypeAlias

import msgspec

from stormline.wire.messages import Headers, Hello, Welcome


class HelloReceived(msgspec.Struct, frozen=True):
    """Server: a client introduced itself. Answer with `send_welcome` or `close`; nothing else is read until then."""

    hello: Hello


class Welcomed(msgspec.Struct, frozen=True):
    """Client: the session stands."""

    welcome: Welcome


class CallReceived(msgspec.Struct, frozen=True):
    """The peer calls us. With `more`, `DataReceived` events bring the rest of the body.

    Attributes:
        deadline_s: seconds the peer still waits, None where it did not say.
    """

    call_id: int
    gate: str
    method: str
    target: str
    headers: Headers
    body: bytes
    more: bool
    deadline_s: float | None


class ReplyReceived(msgspec.Struct, frozen=True):
    """The answer to a call of ours began; with `more`, `DataReceived` events bring the rest."""

    call_id: int
    status: int
    headers: Headers
    body: bytes
    more: bool


class DataReceived(msgspec.Struct, frozen=True):
    """A further chunk of a body. Tell the machine by `consume` when it has been used up."""

    call_id: int
    body: bytes
    end: bool
    trailers: Headers = ()


class CallFailed(msgspec.Struct, frozen=True):
    """A call of ours ended without (the rest of) an answer.

    Attributes:
        maybe_delivered: the work may have been done all the same.
    """

    call_id: int
    code: int
    reason: str
    retry_after_s: float | None
    maybe_delivered: bool


class CallCancelled(msgspec.Struct, frozen=True):
    """The peer no longer wants the answer to its call; the machine has forgotten it."""

    call_id: int
    code: int


class CreditGranted(msgspec.Struct, frozen=True):
    """More body bytes may be sent on this call: `available` in all."""

    call_id: int
    available: int


class PushReceived(msgspec.Struct, frozen=True):
    """Client: a push came. Confirm with `send_ack` once the application has taken it over."""

    seq: int
    push_id: str
    topic: str
    headers: Headers
    body: bytes
    expires_ms: int | None


class PushAcked(msgspec.Struct, frozen=True):
    """Server: the device confirmed these pushes."""

    seqs: tuple[int, ...]


class NoticeReceived(msgspec.Struct, frozen=True):
    """Client: the plan has changed (see `messages.Notice`). A hint, not proof: what counts is the signed answer.

    Attributes:
        hosts: hosts whose plan changed; empty where any may have.
    """

    version: int
    hosts: tuple[str, ...]


class PongReceived(msgspec.Struct, frozen=True):
    """The peer answered a ping after `rtt_s` seconds."""

    rtt_s: float


class GoingAway(msgspec.Struct, frozen=True):
    """The peer wants us to leave: no new calls here, those open go on."""

    code: int
    reason: str
    spread_s: float
    retry_after_s: float | None


class Closed(msgspec.Struct, frozen=True):
    """The connection is over. `by_peer` tells whose CLOSE it was; without one the code is HEARTBEAT_TIMEOUT or OK.

    Attributes:
        lost: the connection ended without a CLOSE of either side.
    """

    code: int
    reason: str
    retry_after_s: float | None = None
    by_peer: bool = False
    lost: bool = False


Event: TypeAlias = (
    HelloReceived
    | Welcomed
    | CallReceived
    | ReplyReceived
    | DataReceived
    | CallFailed
    | CallCancelled
    | CreditGranted
    | PushReceived
    | PushAcked
    | NoticeReceived
    | PongReceived
    | GoingAway
    | Closed
)
