"""The gateway's business API over HTTP: push to devices, see who is there, call them. OpenAPI at `/openapi.json`.

| endpoint                             | scope      | what                                                    |
|--------------------------------------|------------|---------------------------------------------------------|
| `POST /v1/push`                      | `push`     | push to one device, wait for its acknowledgement        |
| `POST /v1/calls`                     | `call`     | call a device, wait for its answer                      |
| `GET /v1/presence/counts`            | `presence` | devices online, by unit, version and network            |
| `GET /v1/presence/devices/{device}`  | `presence` | one device: online or seen last, where and with what    |
| `GET /v1/presence/users/{user}`      | `presence` | the devices of a user                                   |
| `GET /v1/presence`                   | `presence` | devices online, filtered, in pages                      |
| `GET /v1/devices/{device}`           | `presence` | where a device has its session, in short                |
| `POST /v1/revocations`               | `revoke`   | end the sessions of a device or a user                  |
| `GET /v1/sessions`                   | operator   | sessions of this node                                   |
| `GET`, `POST /v1/keys`, `DELETE ...` | operator   | keys of businesses                                      |
| `GET /v1/audit`                      | operator   | the newest requests on this node: who, what, the result |
| `GET /v1/load`                       | operator   | new connections: pace, lag, and why they ended          |
| `/v1/upstreams`                      | operator   | upstreams, see `gateway.admin_upstreams`                |
| `GET /healthz`                       | anyone     | 200 while this process serves, 503 while it drains      |

The operator's key is the platform's own business key; other keys have scopes (`gateway.apikeys`). Errors are problems
(RFC 9457) with `error: {"code", "message"}` beside their title, `code` one lower-case word with dashes; what may be
tried again later carries `Retry-After`, and `maybe_delivered` says that what was asked may have been done all the same.
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
from fastapi import Depends, FastAPI, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from stormline.appgw.port import Identity
from stormline.core import limits_platform
from stormline.core.errors import RequestRefused
from stormline.gateway import problems
from stormline.gateway.access import KEYS, Access, Caller
from stormline.gateway.admin_upstreams import UpstreamsView, make_router
from stormline.gateway.apikeys import ApiKey, ApiKeys
from stormline.gateway.audit import Audit
from stormline.gateway.business import App, Business, Name, asked, router


class RevocationRequest(BaseModel):
    """Whose sessions end, on every node of the unit, whether they have a connection or wait for one."""

    model_config = ConfigDict(extra="forbid")

    app: str | None = Field(default=None, description="application id; may be absent where the node serves only one")
    device: str = Field(default="", description="device id; this or `user`")
    user: str = Field(default="", description="user id: all sessions of this user")
    action: Literal["stop", "renew"] = Field(
        default="stop", description="`stop`: clients stay away until a person acts; `renew`: they need a new token"
    )


class RevocationAnswer(BaseModel):
    """What was done."""

    ended: int = Field(description="sessions ended on this node; the other nodes end theirs at the same time")


class DeviceAnswer(BaseModel):
    """Where a device is."""

    app: str
    device: str
    online: bool
    node: str = ""
    session: str = ""


class SessionAnswer(BaseModel):
    """One live session of this node."""

    app: str
    device: str
    user: str
    session: str
    peer: str
    calls: int = Field(description="calls in progress")
    waiting_bytes: int = Field(
        description="bytes for its client that the kernel has not taken: one that reads has none"
    )
    kept_bytes: int = Field(description="bytes kept until its client confirms them, to be sent again after a loss")


class SessionsAnswer(BaseModel):
    """Live sessions of this node."""

    node: str
    count: int = Field(description="all sessions, also those not listed")
    connections: int = Field(description="open connections, also those that are no session yet")
    calls: int = Field(description="calls in progress")
    sessions: list[SessionAnswer]


class LoadAnswer(BaseModel):
    """How the node fares with new connections."""

    node: str
    status: Literal["ok", "draining"]
    connections: int = Field(description="open connections, also those that are no session yet")
    arriving: int = Field(description="connections before that: silent, in a handshake, in an upgrade")
    lag_s: float = Field(description="how late the event loop was a moment ago")
    pace_per_s: float = Field(description="connections begun a second at most; the others wait")
    closes: dict[str, int] = Field(description="connections that did not come to stand, by the reason")
    refusals: dict[str, int] = Field(description="those that stood and were ended before their WELCOME, by the code")


class HealthAnswer(BaseModel):
    """How the node is."""

    status: Literal["ok", "draining"]
    node: str
    unit: str
    engine: Literal["connected", "unavailable"]
    sessions: int


class KeyRequest(BaseModel):
    """A key for a business."""

    model_config = ConfigDict(extra="forbid")

    app: str | None = Field(default=None, description="application id; may be absent where the node serves only one")
    scopes: list[Literal["push", "presence", "call", "revoke"]] = Field(min_length=1, max_length=4)
    label: str = Field(default="", max_length=64, description="for people")


class KeyAnswer(BaseModel):
    """A key, without its secret."""

    id: str
    app: str
    scopes: list[str]
    label: str
    made_ms: int = Field(description="milliseconds since 1970")


class MadeKeyAnswer(KeyAnswer):
    """A key that was just made."""

    key: str = Field(description="the key itself; it is shown this once")


class KeysAnswer(BaseModel):
    """All keys, the oldest first."""

    keys: list[KeyAnswer]


class RevokedAnswer(BaseModel):
    """Which key has ended."""

    id: str


class DeedAnswer(BaseModel):
    """One request."""

    at_ms: int
    node: str
    who: str = Field(description="id of the key, or `operator`")
    app: str
    what: str
    target: str
    result: str = Field(description="`ok`, or the code of the error")


class AuditAnswer(BaseModel):
    """The newest requests on this node, the newest first."""

    deeds: list[DeedAnswer]


class SessionView(Protocol):
    """What is shown of a session."""

    @property
    def identity(self) -> Identity:
        """Whose it is."""
        ...

    @property
    def peer(self) -> str:
        """Where it comes from."""
        ...

    @property
    def calls_open(self) -> int:
        """Calls in progress."""
        ...

    @property
    def waiting_bytes(self) -> int:
        """Bytes for its client that the kernel has not taken."""
        ...

    @property
    def kept_bytes(self) -> int:
        """Bytes kept until its client confirms them."""
        ...


class Load(NamedTuple):
    """What is known of new connections; see `LoadAnswer`."""

    draining: bool
    arriving: int
    lag_s: float
    pace_per_s: float
    closes: dict[str, int]
    refusals: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminView:
    """What the API works on.

    Attributes:
        node: this node.
        unit: this unit.
        access: says who may do what.
        business: what the endpoints of businesses work on.
        revoke: see `gateway.revocation.Revocations.revoke`.
        sessions: gives the live sessions of this node.
        counts: gives sessions, connections and calls.
        load: tells how the node fares with new connections.
        engine_connected: says whether the engine is there.
        upstreams: what operators see and change of the upstreams.
        keys: the keys of businesses.
        audit: what was done.
    """

    node: str
    unit: str
    access: Access
    business: Business
    revoke: Callable[..., Awaitable[int]]
    sessions: Callable[[], Iterator[SessionView]]
    counts: Callable[[], tuple[int, int, int]]
    load: Callable[[], Load]
    engine_connected: Callable[[], bool]
    upstreams: UpstreamsView
    keys: ApiKeys
    audit: Audit


def make_app(view: AdminView) -> FastAPI:
    """Make the ASGI application."""
    app = FastAPI(
        title="stormline gateway",
        version="1",
        docs_url=None,
        redoc_url=None,
        responses=problems.RESPONSES,
    )
    app.include_router(router(view.business, view.access))
    _add_sessions(app, view)
    _add_operating(app, view)
    _tell_load(app, view)
    app.include_router(make_router(view.upstreams))
    problems.describe(app)
    problems.handle_errors(app)
    app.add_middleware(problems.BoundedBody)
    return app


def _add_sessions(app: FastAPI, view: AdminView) -> None:
    may_revoke = Annotated[Caller, Depends(view.access.allow("revoke"))]
    may_look = Annotated[Caller, Depends(view.access.allow("presence"))]
    operator = Annotated[Caller, Depends(view.access.allow(KEYS))]

    @app.post("/v1/revocations")
    async def revoke(order: RevocationRequest, caller: may_revoke) -> RevocationAnswer:
        """End the sessions of a device or a user, on every node of the unit."""
        if bool(order.device) == bool(order.user):
            raise RequestRefused("bad-request", "expected exactly one of device and user")
        caller.target = order.device or order.user
        app_id, renew = caller.app_of(order.app), order.action == "renew"
        return RevocationAnswer(ended=await view.revoke(app_id, device=order.device, user=order.user, renew=renew))

    @app.get("/v1/devices/{device:path}")
    async def place(device: Annotated[Name, Path()], caller: may_look, app: App = None) -> DeviceAnswer:
        """Say where a device has its session."""
        caller.target = device
        found = await asked(view.business.presence.device(caller.app_of(app), device))
        if not found.online:
            return DeviceAnswer(app=found.app, device=device, online=False)
        return DeviceAnswer(app=found.app, device=device, online=True, node=found.node, session=found.session)

    @app.get("/v1/sessions")
    async def sessions(
        caller: operator,
        limit: Annotated[
            int, Query(ge=0, le=limits_platform.ADMIN_SESSIONS_LISTED_MAX)
        ] = limits_platform.ADMIN_SESSIONS_LISTED_MAX,
    ) -> SessionsAnswer:
        """Count and list the live sessions of this node, oldest first."""
        count, connections, calls = view.counts()
        return SessionsAnswer(
            node=view.node,
            count=count,
            connections=connections,
            calls=calls,
            sessions=[_session(one) for one in islice(view.sessions(), limit)],
        )


def _add_operating(app: FastAPI, view: AdminView) -> None:
    operator = Annotated[Caller, Depends(view.access.allow(KEYS))]

    @app.get("/v1/keys")
    async def keys(caller: operator) -> KeysAnswer:
        """List the keys of businesses."""
        return KeysAnswer(keys=[KeyAnswer(**_key_fields(key)) for key in view.keys.all()])

    @app.post("/v1/keys")
    async def make_key(order: KeyRequest, caller: operator) -> MadeKeyAnswer:
        """Make a key; only this answer holds it."""
        key, text = await asked(view.keys.make(caller.app_of(order.app), tuple(order.scopes), order.label))
        caller.target = key.id
        return MadeKeyAnswer(**_key_fields(key), key=text)

    @app.delete("/v1/keys/{key_id}")
    async def revoke_key(key_id: str, caller: operator) -> RevokedAnswer:
        """End a key, on every node at once."""
        caller.target = key_id
        if not await asked(view.keys.revoke(key_id)):
            raise RequestRefused("not-found", "there is no such key")
        return RevokedAnswer(id=key_id)

    @app.get("/v1/audit")
    async def audit(
        caller: operator, limit: Annotated[int, Query(ge=1, le=limits_platform.AUDIT_KEPT)] = 100
    ) -> AuditAnswer:
        """Give the newest requests on this node."""
        deeds = await asked(view.audit.last(limit))
        return AuditAnswer(deeds=[DeedAnswer(**msgspec.structs.asdict(deed)) for deed in deeds])


def _tell_load(app: FastAPI, view: AdminView) -> None:
    operator = Annotated[Caller, Depends(view.access.allow(KEYS))]

    @app.get("/v1/load")
    async def load(caller: operator) -> LoadAnswer:
        """Tell how the node fares with new connections, and why they ended."""
        found = view.load()
        return LoadAnswer(
            node=view.node,
            status="draining" if found.draining else "ok",
            connections=view.counts()[1],
            arriving=found.arriving,
            lag_s=found.lag_s,
            pace_per_s=found.pace_per_s,
            closes=found.closes,
            refusals=found.refusals,
        )

    @app.get("/healthz")
    async def healthz(response: Response) -> HealthAnswer:
        """Say that this node serves, and whether it has its engine. Without one it still serves what needs none.

        While it drains the status is 503, so that what asks here sends it nobody.
        """
        engine: Literal["connected", "unavailable"] = "connected" if view.engine_connected() else "unavailable"
        draining = view.load().draining
        if draining:
            response.status_code = 503
        return HealthAnswer(
            status="draining" if draining else "ok",
            node=view.node,
            unit=view.unit,
            engine=engine,
            sessions=view.counts()[0],
        )


def _key_fields(key: ApiKey) -> dict[str, Any]:
    return {"id": key.id, "app": key.app, "scopes": list(key.scopes), "label": key.label, "made_ms": key.made_ms}


def _session(session: SessionView) -> SessionAnswer:
    who = session.identity
    return SessionAnswer(
        app=who.app,
        device=who.device,
        user=who.user,
        session=who.session,
        peer=session.peer,
        calls=session.calls_open,
        waiting_bytes=session.waiting_bytes,
        kept_bytes=session.kept_bytes,
    )
