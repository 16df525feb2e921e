"""Every exception stormline raises, in one tree.

    StormlineError
    ├── ConfigError                 a setting, file or argument is wrong; names what and where
    │   ├── BundleError             the client bundle cannot be used
    │   ├── DocumentError           an OpenAPI document cannot be made into a client (`pointer`)
    │   └── RulesRejected           a scheduling centre may not serve these rules (`reason`)
    ├── TransportError              a request failed on its way; carries `phase` and `maybe_delivered`
    │   ├── QueueFull               too many requests wait for a connection already
    │   ├── ResolveError            no address for the name
    │   ├── ConnectError            no connection to any address
    │   │   └── ProxyError          a proxy was reached and made no connection
    │   ├── TlsError                the peer could not be verified, or the handshake failed
    │   ├── WriteError              the connection broke while sending
    │   ├── ReadError               the connection broke while waiting or reading
    │   ├── ProtocolViolation       the peer's HTTP cannot be understood
    │   │   └── UntrustedAnswer     it came in clear, and nothing shows that it is the origin's
    │   ├── DecodeError             the body is truncated or corrupt
    │   ├── ChannelLost             the long connection went away under the call
    │   ├── GatewayError            the gateway answered that it cannot get the answer (`code`, `retry_after_s`)
    │   └── DeadlineExceeded        time ran out: of the call, or of one phase
    ├── ApiError                    an HTTP API answered a generated client: no (`status`, `error`)
    │   └── UnexpectedAnswer        it answered what its document does not know
    ├── CallError                   the other side answered: no (`code`, `retry_after_s`)
    ├── ProtocolError               the rules of the wire were broken
    │   ├── LocalProtocolError      by us: a bug, or a call in the wrong state
    │   └── RemoteProtocolError     by the peer; carries the `code` to close with
    ├── RefusedError                the gateway refused or ended the session (`code`, `action`)
    ├── SignatureError              a signed text is not from whom it claims, or is not for us
    │   ├── UnknownKeyError         it names a key we do not have
    │   ├── ExpiredError            it was good once
    │   └── NotYetValidError        it will be good later: one of the two clocks is wrong
    ├── ServiceError                a business service's own no (`status`, `reason`)
    ├── RequestRefused              one of our own HTTP services says no; `code` is the word sent to the caller
    ├── DispatchError               the scheduling centre gave no usable answer
    │   ├── DispatchUnreachable     none of its addresses answered
    │   └── AnswerRejected          it answered, but the answer may not be trusted; `reason` says why
    ├── EngineError                 the distributed engine (NATS) cannot do it now
    │   ├── EngineUnavailable       it is down or unreachable
    │   ├── NoResponders            nobody listens on the subject
    │   ├── EngineTimeout           it took the message, and no answer came in time
    │   ├── EngineFull              it has no room for more
    │   └── Conflict                a key or subject is not at the revision the writer believed
    ├── OutboxError                 a call cannot be left in the outbox: its file cannot be used
    │   └── OutboxFull              it holds too many
    ├── StoreError                  the analytics store cannot do it now
    │   └── StoreBusy               its queue is full; `retry_after_s`
    └── PlatformError               a part of the platform did not start or died

What a caller can act on: `TransportError.maybe_delivered` (False: the request was certainly not processed, so
anything may be sent again) and the same on `EngineError`, `CallError.code`, `RefusedError.action`.
"""

from typing import Any

from stormline.core import codes
from stormline.core.phase import Phase


class StormlineError(Exception):
    """Root of the tree; catching it catches all that stormline raises on purpose."""


class ConfigError(StormlineError):
    """A setting, file or argument is wrong. The message names what and where."""


class BundleError(ConfigError):
    """The client bundle is missing, unreadable or not a bundle."""


class DocumentError(ConfigError):
    """An OpenAPI document is malformed, too large, or refers to what is not in it.

    Attributes:
        pointer: where, as a JSON pointer (RFC 6901) in its fragment form, `#/paths/...`.
    """

    def __init__(self, pointer: str, detail: str) -> None:
        super().__init__(f"{pointer}: {detail}")
        self.pointer = pointer


class RulesRejected(ConfigError):
    """Rules of a scheduling centre, or the record that names them, may not be served.

    Attributes:
        reason: `record` (it cannot be read), `too-large`, `damaged` (not the bytes the record names), `malformed` (no
            rule set by its form), `format` (of another version's), `invalid` (it contradicts itself or passes a
            bound), `older` (the record is from before what is served) or `fault` (ours, while reading them).
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class TransportError(StormlineError):
    """A request failed on its way.

    Attributes:
        phase: how far it had come.
        maybe_delivered: False where it is certain that the peer did not get the request whole and so cannot have
            acted on it; True where it may have.
        trace: the call's trace (`stormline.client.trace.CallTrace`), with its timeline and story, where the error is
            that of a client's call; None else.
    """

    def __init__(self, message: str, *, phase: Phase, maybe_delivered: bool) -> None:
        super().__init__(message)
        self.trace: Any = None
        self.phase = phase
        self.maybe_delivered = maybe_delivered


class QueueFull(TransportError):
    """Too many requests wait for a connection already; this one was not queued."""


class ResolveError(TransportError):
    """No address is known for the name."""


class ConnectError(TransportError):
    """No connection could be made to any address tried."""


class ProxyError(ConnectError):
    """A proxy was reached, and did not connect us: it refused, wants other credentials, does not speak its part, or
    does not show the right certificate."""


class TlsError(TransportError):
    """The peer's certificate was not accepted, or the handshake failed."""


class WriteError(TransportError):
    """The connection broke while the request was being sent."""


class ReadError(TransportError):
    """The connection broke while waiting for the answer or reading it."""


class ProtocolViolation(TransportError):
    """The peer's answer breaks HTTP."""


class UntrustedAnswer(ProtocolViolation):
    """An answer that came over clear HTTP does not show that it is the origin's own."""


class DecodeError(TransportError):
    """The answer's body is truncated or corrupt."""


class ChannelLost(TransportError):
    """The long connection went away under the call."""


class GatewayError(TransportError):
    """The gateway answered for the origin: it cannot get the answer.

    Attributes:
        code: a `codes.Code` value, or one this version does not know.
        retry_after_s: seconds to wait before asking again, None where the gateway gave none.
    """

    def __init__(
        self, message: str, *, phase: Phase, maybe_delivered: bool, code: int = 0, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, phase=phase, maybe_delivered=maybe_delivered)
        self.code = code
        self.retry_after_s = retry_after_s


class DeadlineExceeded(TransportError):
    """Time ran out: of the whole call, or of the phase named by `phase`."""


class ApiError(StormlineError):
    """An HTTP API answered a generated client with a status that stands for an error.

    Attributes:
        status: the HTTP status.
        error: the decoded body where the document says what it is, else None.
        body: the body as it came.
        headers: the answer's fields by lower-case name; of repeated ones the values with commas between.
    """

    def __init__(
        self, message: str, *, status: int, error: Any = None, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = error
        self.body = body
        self.headers = headers or {}


class UnexpectedAnswer(ApiError):
    """An HTTP API answered with a status, content type or body that its document does not know."""


class CallError(StormlineError):
    """The other side answered that it will not or cannot do the call.

    Attributes:
        code: a `codes.Code` value, or one this version does not know.
        reason: for people.
        retry_after_s: seconds to wait before asking again, None where the peer gave none.
        maybe_delivered: True where the work may have been done all the same (a deadline at the far end, say).
    """

    def __init__(
        self, code: int, reason: str, *, retry_after_s: float | None = None, maybe_delivered: bool = False
    ) -> None:
        super().__init__(f"{codes.name(code)}: {reason}" if reason else codes.name(code))
        self.code = code
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.maybe_delivered = maybe_delivered


class ProtocolError(StormlineError):
    """The rules of the wire protocol were broken. Abstract: look at the two below."""


class LocalProtocolError(ProtocolError):
    """This side tried something that the state of the connection does not allow."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules.

    Attributes:
        code: what to close the connection with.
    """

    def __init__(self, message: str, code: codes.Code = codes.Code.PROTOCOL_ERROR) -> None:
        super().__init__(message)
        self.code = code


class RefusedError(StormlineError):
    """The gateway refused the session, or ended it, with a code.

    Attributes:
        code: why.
        action: what to do now.
        retry_after_s: earliest next try, None where the gateway gave none.
    """

    def __init__(self, code: int, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{codes.name(code)}: {reason}" if reason else codes.name(code))
        self.code = code
        self.reason = reason
        self.action = codes.action(code)
        self.retry_after_s = retry_after_s


class SignatureError(StormlineError):
    """A signed text is forged, altered, made with an unknown key, or meant for another use."""


class UnknownKeyError(SignatureError):
    """A signed text names a key that is not among ours: forged, or the keys were changed since."""


class ExpiredError(SignatureError):
    """A signed text is genuine and past its time."""


class NotYetValidError(SignatureError):
    """A signed text is genuine and from the future: the signer's clock or ours is wrong."""


class ServiceError(StormlineError):
    """A handler of a business service says no; its caller gets a `CallError` with both.

    Attributes:
        status: a number as in HTTP. Below 500 says that nothing was done, so the call may be made again; 503 that it
            should be, later.
        reason: for people.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status} {reason}".rstrip())
        self.status = status
        self.reason = reason


class RequestRefused(StormlineError):
    """An HTTP service of ours refuses a request. The message is for the caller and holds no secret.

    Attributes:
        code: one lower-case word with dashes, sent in the error answer; callers act on it.
        retry_after_s: earliest next try, None where trying again will not help.
        maybe_delivered: what was asked may have been done all the same.
    """

    def __init__(
        self, code: str, message: str, *, retry_after_s: float | None = None, maybe_delivered: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
        self.maybe_delivered = maybe_delivered


class DispatchError(StormlineError):
    """The scheduling centre gave no usable answer."""


class DispatchUnreachable(DispatchError):
    """None of the scheduling centre's addresses answered."""


class AnswerRejected(DispatchError):
    """The scheduling centre's answer may not be trusted.

    Attributes:
        reason: `signature`, `expired`, `not-yet-valid`, `wrong-app`, `stale-version`, `malformed`, `too-large`,
            `unknown-key`, `wrong-base` (it builds upon another plan than the one held) or `refused`.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"dispatch answer rejected ({reason}): {detail}")
        self.reason = reason


class EngineError(StormlineError):
    """The distributed engine could not do what was asked.

    Attributes:
        maybe_delivered: False where it is certain that nobody acted on the message and no key was written; True
            where somebody may have.
    """

    def __init__(self, message: str, *, maybe_delivered: bool = False) -> None:
        super().__init__(message)
        self.maybe_delivered = maybe_delivered


class EngineUnavailable(EngineError):
    """The distributed engine is down, unreachable, reconnecting, or takes no more."""


class NoResponders(EngineError):
    """Nobody listens on the subject of a request; nothing was done."""


class EngineTimeout(EngineError):
    """No answer came in time; whoever got the request may have acted on it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, maybe_delivered=True)


class EngineFull(EngineError):
    """A stream or the engine holds as much as it may; nothing was written."""


class Conflict(EngineError):
    """A key or subject is not at the revision the writer believed, or exists already; nothing was written."""


class OutboxError(StormlineError):
    """A call could not be left in the outbox, or what is in there not be read: its file cannot be used."""


class OutboxFull(OutboxError):
    """The outbox has no room for another call; it was not taken."""


class StoreError(StormlineError):
    """The analytics store could not do what was asked."""


class StoreBusy(StoreError):
    """The analytics store is well but has no room for more work just now.

    Attributes:
        retry_after_s: seconds to wait before asking again.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PlatformError(StormlineError):
    """A part of the platform did not start, or died and did not come back."""
