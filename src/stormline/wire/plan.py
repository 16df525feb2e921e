"""The dispatch answer: where and how to connect, per host, signed.

A plan commands; the client obeys within its own means. Fields are added, never given another meaning; a reader
ignores what it does not know.
"""

import enum
from collections.abc import Iterable, Mapping
from typing import Annotated, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from stormline.core import errors, limits
from stormline.wire import jws, strictjson

TYP: Final = "stormline-plan+jws"

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]  # integers that every JSON reader keeps exact
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Timeout = Annotated[float, msgspec.Meta(gt=0)]


class Carrier(enum.StrEnum):
    """How an endpoint is spoken to."""

    LONG_TLS = "sl-tls"
    """The long connection over TLS 1.3 on TCP."""
    H1 = "h1"
    """The origin itself, HTTP/1.1 over TLS."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One address that can serve a host.

    Attributes:
        host: IP literal (a name only where an operator insists).
        port: TCP or UDP port.
        carrier: a `Carrier`; a client skips endpoints whose carrier it does not know.
        server_name: name for SNI and certificate check; empty means the request's own host.
        unit: unit the endpoint belongs to.
        weight: share among endpoints of equal rank; 0 keeps it as a last resort.
    """

    host: str
    port: _Port
    carrier: str = Carrier.LONG_TLS
    server_name: str = ""
    unit: str = ""
    weight: _Count = 100


class HostPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What to do for one host.

    Attributes:
        endpoints: best first.
        connect_timeout_s: wait for one connection, None where the client decides.
        deadline_s: whole call with all attempts, None where the client decides.
    """

    endpoints: tuple[Endpoint, ...] = ()
    connect_timeout_s: _Timeout | None = None
    deadline_s: _Timeout | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A whole answer.

    Attributes:
        app: the app it is for; a client refuses another's.
        version: only grows; a client refuses an older one than it has.
        issued_at: seconds since 1970 at the centre, also the client's hint of the true time.
        expires_at: not to be used as fresh from this second on.
        unit: unit of the answering centre.
        hosts: plans by host name, lower case, without port.
        gateways: where the app's long connection can go, whatever the host.
        unknown: hosts asked for that dispatch has no word on: use plain DNS.
        report: where telemetry goes (HTTPS), None for nowhere.
        disabled: means that are switched off everywhere, by name (`long`, `direct`, ...).
    """

    app: str
    version: _Count
    issued_at: _Count
    expires_at: _Count
    unit: str = ""
    hosts: dict[str, HostPlan] = {}
    gateways: tuple[Endpoint, ...] = ()
    unknown: tuple[str, ...] = ()
    report: Endpoint | None = None
    disabled: tuple[str, ...] = ()


_decoder = msgspec.json.Decoder(Plan)


def sign(plan: Plan, *, key: Ed25519PrivateKey, kid: str) -> str:
    """Sign a plan for the wire."""
    return jws.sign(msgspec.json.encode(plan), key=key, kid=kid, typ=TYP)


def verify(
    text: str | bytes,
    *,
    keys: Mapping[str, Ed25519PublicKey],
    app: str,
    hosts: Iterable[str],
    version_min: int,
    wall: float,
) -> Plan:
    """Check a dispatch answer before anything in it is used.

    Args:
        text: the answer's body.
        keys: dispatch's public keys, shipped in the client bundle.
        app: the app asked for.
        hosts: the hosts asked for; each must be answered, as known or unknown.
        version_min: version of the newest plan held; an older answer is a replay.
        wall: now, seconds since 1970.

    Raises:
        AnswerRejected: with the reason; nothing of the answer may be used.
    """
    if len(text) > limits.PLAN_BYTES_MAX:
        raise errors.AnswerRejected("too-large", f"{len(text)} bytes, at most {limits.PLAN_BYTES_MAX}")
    try:
        payload = jws.verify(text, keys=keys, typ=TYP, size_max=limits.PLAN_BYTES_MAX)
    except errors.UnknownKeyError as error:
        raise errors.AnswerRejected("unknown-key", str(error)) from error
    except errors.SignatureError as error:
        raise errors.AnswerRejected("signature", str(error)) from error
    try:
        plan = strictjson.decode(payload, _decoder)
    except ValueError as error:
        raise errors.AnswerRejected("malformed", str(error)) from error
    if plan.app != app:
        raise errors.AnswerRejected("wrong-app", f"it is for {plan.app!r}, we are {app!r}")
    if wall >= plan.expires_at + limits.CLOCK_SKEW_S:
        raise errors.AnswerRejected("expired", f"it expired {wall - plan.expires_at:.0f} s ago")
    if plan.issued_at > wall + limits.CLOCK_SKEW_S:
        raise errors.AnswerRejected("not-yet-valid", f"it is from {plan.issued_at - wall:.0f} s in the future")
    if plan.version < version_min:
        raise errors.AnswerRejected("stale-version", f"version {plan.version}, we hold {version_min}")
    missing = [host for host in hosts if host not in plan.hosts and host not in plan.unknown]
    if missing:
        raise errors.AnswerRejected("malformed", f"it says nothing of {missing[0]!r}, which was asked for")
    return plan


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A question to dispatch, JSON in a POST body.

    Attributes:
        app: application id.
        hosts: hosts to plan for, at most `limits.PLAN_HOSTS_MAX`.
        version: newest plan version held, 0 for none.
    """

    app: str
    hosts: tuple[str, ...]
    version: _Count = 0


_request_decoder = msgspec.json.Decoder(PlanRequest)


def decode_request(data: bytes) -> PlanRequest:
    """Read a question to dispatch; the caller has bounded its size.

    Raises:
        ValueError: it is none; the message says what is wrong with it.
    """
    return strictjson.decode(data, _request_decoder)
