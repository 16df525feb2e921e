"""The dispatch answer: where and how to connect, per host, signed.

A plan commands; the client obeys within its own means. Fields are added, never given another meaning; a reader
ignores what it does not know.

Four texts, each signed for its own use (`typ`):

    plan         everything about the hosts asked for (and those the app always needs)
    changes      the same for who holds a plan: only the hosts that differ from it
    unchanged    what you hold is still true, under this version and until this time; some 300 bytes
    home         a user's unit and epoch; goes beside one of the others, so that those can be shared by all devices

`digest` is the centre's name for the content of a plan without version and times. A client sends it back as `held` and
never computes it, so a client that does not know a newer field still takes part.
"""

import enum
import hashlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from stormline.core import errors, limits
from stormline.wire import jws, pathpattern, strictjson

T = TypeVar("T")

TYP: Final = "stormline-plan+jws"
TYP_CHANGES: Final = "stormline-plan-changes+jws"
TYP_UNCHANGED: Final = "stormline-plan-unchanged+jws"
TYP_HOME: Final = "stormline-home+jws"
PUSH: Final = "push"
"""The role of gateways for devices that only receive pushes or run in the background, and of such a device."""
CLEAR_CENTRE: Final = "http"
"""`carrier` of a centre that is asked in clear HTTP, where its signature alone protects."""
SEALED: Final = "ohttp"
"""`carrier` of a relay: clear HTTP that carries sealed requests (RFC 9458)."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]  # integers that every JSON reader keeps exact
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Timeout = Annotated[float, msgspec.Meta(gt=0)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Urgency = Annotated[int, msgspec.Meta(ge=0, le=7)]
_Tries = Annotated[int, msgspec.Meta(ge=0, le=100)]


class Carrier(enum.StrEnum):
    """How an endpoint is spoken to."""

    LONG_TLS = "sl-tls"
    """The long connection over TLS 1.3 on TCP."""
    LONG_QUIC = "sl-quic"
    """The long connection over QUIC."""
    LONG_WSS = "sl-wss"
    """The long connection inside a WebSocket over TLS."""
    SHORT = "sl-short"
    """The gateway over single HTTPS requests, where nothing long-lived passes."""
    H1 = "h1"
    """The origin itself, HTTP/1.1 over TLS."""
    H2 = "h2"
    """The origin itself, HTTP/2 over TLS."""
    H3 = "h3"
    """The origin itself, HTTP/3."""


LONG_CARRIERS: Final = frozenset({Carrier.LONG_TLS, Carrier.LONG_QUIC, Carrier.LONG_WSS, Carrier.SHORT})
"""Carriers that lead to a gateway, not to the origin."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One address that can serve a host.

    Attributes:
        host: IP literal (a name only where an operator insists).
        port: TCP or UDP port.
        carrier: a `Carrier`; a client skips endpoints whose carrier it does not know.
        server_name: name for SNI and certificate check; empty means the request's own host.
        unit: unit the endpoint belongs to.
        weight: share among endpoints of equal rank; 0 keeps it as a last resort.
        region: region it stands in, empty where it does not matter.
        operator: network operator it is close to, empty where it does not matter.
        role: `push` for a gateway that serves push-only and background devices, else empty.
        keys: of a relay alone: the keys to seal for, `application/ohttp-keys` as base64url, the first that fits.
    """

    host: str
    port: _Port
    carrier: str = Carrier.LONG_TLS
    server_name: str = ""
    unit: str = ""
    weight: _Count = 100
    region: str = ""
    operator: str = ""
    role: str = ""
    keys: str = ""


class Policy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How to carry requests. What is not set is the client's own decision.

    Attributes:
        preset: a preset by its name (`login`, `key`, `ordinary`), empty for the client's own choice.
        order: means in the order in which they are tried; empty for the client's own.
        tries: the most tries, by means.
        connect_timeout_s: wait for one connection.
        read_timeout_s: longest silence while waiting for an answer.
        deadline_s: whole call with all attempts.
        relay: whether requests may go through a relay.
        relays: the relays that may be used, best first; carrier `SEALED`.
        clear: whether clear HTTP may be used at all. A permission, not an order: the app must have consented too, and
            say whose signature counts.
        sample: share of the calls of which a record is sent, 0 to 1.
        urgency: who goes first where not all can go, 0 (first) to 7 (RFC 9218 section 4.1).
        disabled: means or carriers that are switched off, by name.
    """

    preset: str = ""
    order: tuple[str, ...] = ()
    tries: dict[str, _Tries] = {}
    connect_timeout_s: _Timeout | None = None
    read_timeout_s: _Timeout | None = None
    deadline_s: _Timeout | None = None
    relay: bool | None = None
    relays: tuple[Endpoint, ...] = ()
    clear: bool | None = None
    sample: _Share | None = None
    urgency: _Urgency | None = None
    disabled: tuple[str, ...] = ()


_NO_POLICY = Policy()


class PathPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What else holds for some requests of a host: those that fit every condition that is set.

    Attributes:
        path: pattern of the path without the query, see `wire.pathpattern`.
        methods: HTTP methods; empty for all.
        query: value by name of a query parameter; null for any value. A parameter that is there more than once fits
            by any of its values.
        headers: value by name of a request header, in any case; null for any value.
        business: tag of the business, empty for all.
        policy: laid over the host's.
    """

    path: str = "/**"
    methods: tuple[str, ...] = ()
    query: dict[str, str | None] = {}
    headers: dict[str, str | None] = {}
    business: str = ""
    policy: Policy = _NO_POLICY


class HostPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What to do for one host.

    Attributes:
        endpoints: best first.
        connect_timeout_s: wait for one connection, None where the client decides; `policy` counts before it.
        deadline_s: whole call with all attempts, None where the client decides; `policy` counts before it.
        policy: for all requests to the host, None for the client's own decisions.
        paths: for some of them; the first that fits counts, see `policy_for`.
        ttl_s: the longest this may be used before dispatch is asked again, None for `limits.PLAN_LIFE_S`.
        dns: there are no endpoints on purpose: use plain DNS, with this policy.
    """

    endpoints: tuple[Endpoint, ...] = ()
    connect_timeout_s: _Timeout | None = None
    deadline_s: _Timeout | None = None
    policy: Policy | None = None
    paths: tuple[PathPlan, ...] = ()
    ttl_s: _Count | None = None
    dns: bool = False


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
        disabled: means and carriers that are switched off everywhere, by name (`long`, `direct`, `h3`, ...).
        dns_only: dispatch is out of use: every host by plain DNS. Hosts and gateways are empty then, so that a client
            that does not know this does the same.
        keys: public keys, base64url by key id, that may sign plans from now on; a client adds them to those it trusts.
        digest: the centre's name for the content, sent back as `held`.
        base: of a `changes` answer alone: the digest of the plan to which it is to be applied.
        gone: of a `changes` answer alone: hosts of the base of which nothing is said any more.
        centres: where dispatch can be asked: `h1` over TLS, `CLEAR_CENTRE` in clear HTTP; empty where only the bundle
            says so.
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
    dns_only: bool = False
    keys: dict[str, str] = {}
    digest: str = ""
    base: str = ""
    gone: tuple[str, ...] = ()
    centres: tuple[Endpoint, ...] = ()


class Unchanged(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to who holds the truth already.

    Attributes:
        app: the app it is for.
        version: the version under which the content held is true now.
        issued_at: seconds since 1970 at the centre.
        expires_at: the new expiry of what is held.
        held: digest of the plan that is confirmed.
        asked: `question_digest` of the question.
    """

    app: str
    version: _Count
    issued_at: _Count
    expires_at: _Count
    held: str
    asked: str


class Home(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a user belongs.

    Attributes:
        app: the app it is for.
        user: the user.
        unit: the user's unit.
        epoch: grows whenever units are cut anew; what was said under an older one no longer counts.
        issued_at: seconds since 1970 at the centre.
        expires_at: not to be used from this second on.
    """

    app: str
    user: str
    unit: str
    epoch: _Count = 0
    issued_at: _Count
    expires_at: _Count


# -- what holds for a request -----------------------------------------------------------------------------------------
def policy_for(
    host_plan: HostPlan,
    method: str = "GET",
    path: str = "/",
    query: Iterable[tuple[str, str]] = (),
    headers: Iterable[tuple[str, str]] = (),
    business: str = "",
) -> Policy:
    """Say how one request is to be carried.

    The host's policy holds; over it comes that of the **first** of the host's paths that fits, in the order in which
    the operator wrote them. A value that is set replaces the host's, `tries` by each means; what the host has switched
    off (`disabled`) no path switches on again. The host plan's own time-outs count where neither says anything.

    Args:
        host_plan: what dispatch says of the host.
        method: as it is sent.
        path: as in the URL, without the query.
        query: parameters, decoded, in any order; read only where a path that fits has such a condition.
        headers: request headers, likewise.
        business: tag of the business.
    """
    found = host_plan.policy or _NO_POLICY
    lists: dict[str, tuple[tuple[str, str], ...]] = {}
    for each in host_plan.paths:
        if each.methods and method not in each.methods:
            continue
        if (each.business and each.business != business) or not pathpattern.fits(each.path, path):
            continue
        if each.query:
            pairs = lists.get("query") or tuple(query)
            lists["query"] = pairs
            if not all(_holds(name, value, pairs) for name, value in each.query.items()):
                continue
        if each.headers:
            pairs = lists.get("headers") or tuple((name.lower(), value) for name, value in headers)
            lists["headers"] = pairs
            if not all(_holds(name.lower(), value, pairs) for name, value in each.headers.items()):
                continue
        found = _over(found, each.policy)
        break
    if found.connect_timeout_s is None and host_plan.connect_timeout_s is not None:
        found = msgspec.structs.replace(found, connect_timeout_s=host_plan.connect_timeout_s)
    if found.deadline_s is None and host_plan.deadline_s is not None:
        found = msgspec.structs.replace(found, deadline_s=host_plan.deadline_s)
    return found


def _holds(name: str, value: str | None, pairs: tuple[tuple[str, str], ...]) -> bool:
    return any(name == given and value in (None, text) for given, text in pairs)


def _over(base: Policy, top: Policy) -> Policy:
    """Lay one policy over another."""
    change = {
        name: value
        for name in Policy.__struct_fields__
        if (value := getattr(top, name)) is not None and value not in ("", (), {})
    }
    if top.tries:
        change["tries"] = base.tries | top.tries
    change["disabled"] = tuple(dict.fromkeys((*base.disabled, *top.disabled)))
    return msgspec.structs.replace(base, **change)


# -- signing ----------------------------------------------------------------------------------------------------------
_decoder = msgspec.json.Decoder(Plan)
_unchanged_decoder = msgspec.json.Decoder(Unchanged)
_home_decoder = msgspec.json.Decoder(Home)


def content_digest(plan: Plan) -> str:
    """Give the centre's name for what a plan says, whatever its version and times: 22 characters, 128 bits."""
    bare = msgspec.structs.replace(plan, version=0, issued_at=0, expires_at=0, digest="", base="", gone=())
    return _digest(msgspec.json.encode(bare, order="deterministic"))


def question_digest(app: str, hosts: Iterable[str]) -> str:
    """Give the name of a question: the app and the hosts in their normal form, in any order."""
    return _digest(msgspec.json.encode([app, sorted(set(hosts))]))


def _digest(data: bytes) -> str:
    return jws.b64url(hashlib.sha256(data).digest()[:16])


def sign(plan: Plan, *, key: Ed25519PrivateKey, kid: str) -> str:
    """Sign a plan for the wire; one with a `base` as a `changes` answer."""
    return jws.sign(msgspec.json.encode(plan), key=key, kid=kid, typ=TYP_CHANGES if plan.base else TYP)


def sign_unchanged(answer: Unchanged, *, key: Ed25519PrivateKey, kid: str) -> str:
    """Sign an 'unchanged' for the wire."""
    return jws.sign(msgspec.json.encode(answer), key=key, kid=kid, typ=TYP_UNCHANGED)


def sign_home(home: Home, *, key: Ed25519PrivateKey, kid: str) -> str:
    """Sign a user's home for the wire."""
    return jws.sign(msgspec.json.encode(home), key=key, kid=kid, typ=TYP_HOME)


def changes(held: Mapping[str, bytes], base: str, plan: Plan) -> Plan:
    """Give the `changes` answer for who holds another plan.

    Args:
        held: what was held, as `host_digests` gave it.
        base: its digest.
        plan: what is true now, whole.
    """
    now = host_digests(plan)
    return msgspec.structs.replace(
        plan,
        hosts={host: each for host, each in plan.hosts.items() if held.get(host) != now[host]},
        gone=tuple(sorted(host for host in held if host not in now)),
        base=base,
    )


def host_digests(plan: Plan) -> dict[str, bytes]:
    """Give 8 bytes for what a plan says of each host; two that differ by chance are one in 2^64."""
    return {
        host: hashlib.sha256(msgspec.json.encode(each, order="deterministic")).digest()[:8]
        for host, each in plan.hosts.items()
    }


def split(body: bytes) -> tuple[bytes, bytes]:
    """Part the body of an answer into the signed answer and the signed `home`, which is empty where there is none.

    They stand in lines of their own; a later line is for readers that know it.
    """
    plan, _, rest = body.partition(b"\n")
    return plan, rest.partition(b"\n")[0]


# -- what a client believes -------------------------------------------------------------------------------------------
def verify(
    text: str | bytes,
    *,
    keys: Mapping[str, Ed25519PublicKey],
    app: str,
    hosts: Iterable[str],
    version_min: int,
    wall: float,
    held: Plan | None = None,
    server_wall: float | None = None,
    expired_ok: bool = False,
) -> Plan:
    """Check a dispatch answer before anything in it is used.

    Args:
        text: the answer's body (its first line, see `split`).
        keys: dispatch's public keys, shipped in the client bundle or told by `Plan.keys`.
        app: the app asked for.
        hosts: the hosts asked for, in their normal form; each must be answered, as known or unknown.
        version_min: version of the newest plan held; an older answer is a replay.
        wall: now, seconds since 1970.
        held: the plan whose digest was sent as `held`: `unchanged` and `changes` are taken then, and give that plan
            with new times, or with what changed.
        server_wall: the same moment by a clock that the caller trusts more than the device's, such as the `Date` of an
            answer over TLS; None for none. What is in its time by one of the two clocks is in its time: a device whose
            clock is wrong by years still gets a plan.
        expired_ok: take a plan that has expired too; for the last good one from disk, to be used as stale.

    Returns:
        A whole plan, whichever answer it was.

    Raises:
        AnswerRejected: with the reason; nothing of the answer may be used.
    """
    asked = tuple(hosts)
    if len(text) > limits.PLAN_BYTES_MAX:
        raise errors.AnswerRejected("too-large", f"{len(text)} bytes, at most {limits.PLAN_BYTES_MAX}")
    typ = jws.typ_of(text) if held is not None else TYP
    payload = _payload(text, keys, typ if typ in (TYP_CHANGES, TYP_UNCHANGED) else TYP)
    plan: Plan
    if held is not None and typ == TYP_UNCHANGED:
        plan = _confirmed(held, _decode(payload, _unchanged_decoder), app, asked)
    else:
        plan = _decode(payload, _decoder)
        if plan.base and typ != TYP_CHANGES:
            raise errors.AnswerRejected("malformed", "a whole plan has no base")
    _check_app_and_time(plan, app, wall, server_wall, expired_ok=expired_ok)
    if plan.version < version_min:
        raise errors.AnswerRejected("stale-version", f"version {plan.version}, we hold {version_min}")
    if held is not None and typ == TYP_CHANGES:
        plan = _applied(held, plan)
    missing = [host for host in asked if host not in plan.hosts and host not in plan.unknown]
    if missing:
        raise errors.AnswerRejected("malformed", f"it says nothing of {missing[0]!r}, which was asked for")
    return plan


def verify_home(
    text: str | bytes, *, keys: Mapping[str, Ed25519PublicKey], app: str, user: str, epoch_min: int, wall: float
) -> Home:
    """Check what dispatch says of a user's home.

    Args:
        text: the second line of an answer, see `split`.
        keys: dispatch's public keys.
        app: the app asked for.
        user: the user asked for.
        epoch_min: newest epoch known; an older answer is a replay.
        wall: now, seconds since 1970.

    Raises:
        AnswerRejected: with the reason.
    """
    home = _decode(_payload(text, keys, TYP_HOME), _home_decoder)
    _check_app_and_time(home, app, wall, None, expired_ok=False)
    if home.user != user:
        raise errors.AnswerRejected("malformed", "it is the home of another user")
    if home.epoch < epoch_min:
        raise errors.AnswerRejected("stale-version", f"epoch {home.epoch}, we know {epoch_min}")
    return home


def _payload(text: str | bytes, keys: Mapping[str, Ed25519PublicKey], typ: str) -> bytes:
    try:
        return jws.verify(text, keys=keys, typ=typ, size_max=limits.PLAN_BYTES_MAX)
    except errors.UnknownKeyError as error:
        raise errors.AnswerRejected("unknown-key", str(error)) from error
    except errors.SignatureError as error:
        raise errors.AnswerRejected("signature", str(error)) from error


def _decode(payload: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return strictjson.decode(payload, decoder)
    except ValueError as error:
        raise errors.AnswerRejected("malformed", str(error)) from error


def _check_app_and_time(
    answer: Plan | Home, app: str, wall: float, server_wall: float | None, *, expired_ok: bool
) -> None:
    if answer.app != app:
        raise errors.AnswerRejected("wrong-app", f"it is for {answer.app!r}, we are {app!r}")
    walls = (wall,) if server_wall is None else (wall, server_wall)
    early = min(answer.issued_at - now for now in walls)
    late = min(now - answer.expires_at for now in walls)
    if any(
        answer.issued_at <= now + limits.CLOCK_SKEW_S and (expired_ok or now < answer.expires_at + limits.CLOCK_SKEW_S)
        for now in walls
    ):
        return
    if early > limits.CLOCK_SKEW_S:
        raise errors.AnswerRejected("not-yet-valid", f"it is from {early:.0f} s in the future")
    raise errors.AnswerRejected("expired", f"it expired {late:.0f} s ago")


def _confirmed(held: Plan, answer: Unchanged, app: str, asked: tuple[str, ...]) -> Plan:
    if answer.app != app:
        raise errors.AnswerRejected("wrong-app", f"it is for {answer.app!r}, we are {app!r}")
    if not held.digest or answer.held != held.digest:
        raise errors.AnswerRejected("wrong-base", "it confirms another plan than the one held")
    if answer.asked != question_digest(app, asked):
        raise errors.AnswerRejected("wrong-base", "it answers another question")
    return msgspec.structs.replace(
        held, version=answer.version, issued_at=answer.issued_at, expires_at=answer.expires_at
    )


def _applied(held: Plan, answer: Plan) -> Plan:
    if not held.digest or answer.base != held.digest:
        raise errors.AnswerRejected("wrong-base", "it changes another plan than the one held")
    left_out = {*answer.gone, *answer.unknown}
    kept = {host: each for host, each in held.hosts.items() if host not in left_out}
    return msgspec.structs.replace(answer, hosts=kept | answer.hosts, base="", gone=())


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A question to dispatch, JSON in a POST body. All but app and hosts may be left out.

    Attributes:
        app: application id.
        hosts: hosts to plan for, at most `limits.PLAN_HOSTS_MAX`.
        version: newest plan version seen, 0 for none.
        device: device id, for roll-outs and for a stable place among equal endpoints.
        network: kind of network (`wifi`, `cell`, ...).
        role: `push` for a push-only or background device.
        token: device token of a logged-in user; the answer then has the user's `home` beside it.
        held: `Plan.digest` of what is held; the answer may then be 'unchanged'.
        changes: the client can also read a `changes` answer.
        kids: ids of the plan keys it trusts; the centre signs with one of them where it can.
    """

    app: str
    hosts: tuple[str, ...]
    version: _Count = 0
    device: str = ""
    network: str = ""
    role: str = ""
    token: str = ""
    held: str = ""
    changes: bool = False
    kids: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Never show the token."""
        return f"PlanRequest(app={self.app!r}, hosts={self.hosts!r}, version={self.version})"


_request_decoder = msgspec.json.Decoder(PlanRequest)


def decode_request(data: bytes) -> PlanRequest:
    """Read a question to dispatch; the caller has bounded its size.

    Raises:
        ValueError: it is none; the message says what is wrong with it.
    """
    return strictjson.decode(data, _request_decoder)
