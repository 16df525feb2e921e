"""The gateway's business API over HTTP: push to devices, see who is there. OpenAPI at `/openapi.json`.

| endpoint                    | who       | what                                              |
|-----------------------------|-----------|---------------------------------------------------|
| `POST /v1/push`             | admin key | push to one device, wait for its acknowledgement  |
| `GET /v1/devices/{device}`  | admin key | where the device has its session                  |
| `POST /v1/revocations`      | admin key | end the sessions of a device or a user            |
| `GET /v1/sessions`          | admin key | sessions of this node                             |
| `/v1/upstreams`             | operators | upstreams, see `gateway.admin_upstreams`          |
| `GET /v1/load`              | admin key | new connections: pace, lag, and why they ended    |
| `GET /healthz`              | anyone    | 200 while this process serves, 503 while it drains |

Errors are always `{"error": {"code", "message"}}`, `code` one lower-case word with dashes; 503 carries `Retry-After`.
"""

import base64
import binascii
import hmac
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from stormline.appgw.directory import Location
from stormline.appgw.port import Delivery, Identity
from stormline.appgw.push import PushResult
from stormline.core import errors, limits, limits_platform
from stormline.core.errors import RequestRefused
from stormline.core.values import Secret
from stormline.gateway.admin_upstreams import UpstreamsView, make_router
from stormline.web import bodies

_log = logging.getLogger("stormline.gateway")

_STATUS = {
    "bad-request": 400,
    "unauthorized": 401,
    "not-found": 404,
    "method-not-allowed": 405,
    "timeout": 408,
    "changed": 412,
    "too-large": 413,
    "precondition-required": 428,
    "internal": 500,
    "unavailable": 503,
}


class PushRequest(BaseModel):
    """A push to one device."""

    model_config = ConfigDict(extra="forbid")

    app: str | None = Field(default=None, description="application id; may be absent where the node serves only one")
    device: str = Field(min_length=1, description="device id")
    topic: str = Field(default="", description="what it belongs to, empty for the device itself")
    body: JsonValue = Field(default=None, description="content as a JSON value; sent to the device as UTF-8 JSON")
    body_base64: str | None = Field(default=None, description="content as bytes, instead of `body`")
    id: str = Field(
        default="",
        max_length=limits_platform.PUSH_ID_CHARS_MAX,
        description="the push's own id: the same one again reaches the device once; drawn where absent",
    )
    ttl_s: float = Field(
        default=limits_platform.PUSH_TTL_S,
        gt=0,
        le=limits_platform.PUSH_TTL_MAX_S,
        description="seconds after which the push is worthless",
    )


class PushAnswer(BaseModel):
    """What became of a push."""

    state: Delivery = Field(
        description="`acked`: the application took it over; `offline`: no session, not kept for later; `unconfirmed`: "
        "sent, not acknowledged in time, may have arrived; `busy`: not sent, the device has too many open; `expired`"
    )
    id: str
    node: str = Field(description="the node that had the device's session, empty where none had")


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


class ErrorBody(BaseModel):
    """Why not."""

    code: str
    message: str


class ErrorAnswer(BaseModel):
    """The form of every error."""

    error: ErrorBody


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
        key: bearer key.
        node: this node.
        unit: this unit.
        apps: apps served here.
        push: see `appgw.push.PushService.push`.
        lookup: see `appgw.directory.Directory.lookup`.
        revoke: see `gateway.revocation.Revocations.revoke`.
        sessions: gives the live sessions of this node.
        counts: gives sessions, connections and calls.
        load: tells how the node fares with new connections.
        engine_connected: says whether the engine is there.
        upstreams: what operators see and change of the upstreams.
    """

    key: Secret
    node: str
    unit: str
    apps: tuple[str, ...]
    push: Callable[..., Awaitable[PushResult]]
    lookup: Callable[[str, str], Awaitable[Location | None]]
    revoke: Callable[..., Awaitable[int]]
    sessions: Callable[[], Iterator[SessionView]]
    counts: Callable[[], tuple[int, int, int]]
    load: Callable[[], Load]
    engine_connected: Callable[[], bool]
    upstreams: UpstreamsView


def make_app(view: AdminView) -> FastAPI:
    """Make the ASGI application."""
    app = FastAPI(
        title="stormline gateway",
        version="1",
        docs_url=None,
        redoc_url=None,
        responses={"default": {"model": ErrorAnswer}},
    )
    locked = [Depends(_key_check(view))]

    @app.post("/v1/push", dependencies=locked)
    async def push(order: PushRequest) -> PushAnswer:
        """Push to one device and wait for what becomes of it."""
        result = await view.push(
            _app_of(view, order.app),
            order.device,
            _content(order),
            topic=order.topic,
            push_id=order.id,
            ttl_s=order.ttl_s,
        )
        return PushAnswer(state=result.delivery, id=result.push_id, node=result.node)

    @app.post("/v1/revocations", dependencies=locked)
    async def revoke(order: RevocationRequest) -> RevocationAnswer:
        """End the sessions of a device or a user, on every node of the unit."""
        if bool(order.device) == bool(order.user):
            raise RequestRefused("bad-request", "expected exactly one of device and user")
        app_id, renew = _app_of(view, order.app), order.action == "renew"
        return RevocationAnswer(ended=await view.revoke(app_id, device=order.device, user=order.user, renew=renew))

    @app.get("/v1/devices/{device:path}", dependencies=locked)
    async def presence(device: str, app: str | None = None) -> DeviceAnswer:
        """Say where a device has its session. A session opened a moment ago may not be known yet."""
        return await _find(view, _app_of(view, app), device)

    @app.get("/v1/sessions", dependencies=locked)
    async def sessions(
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

    _tell_load(app, view, locked)
    app.include_router(make_router(view.upstreams))
    _handle_errors(app)
    app.add_middleware(_BoundedBody)
    return app


def _tell_load(app: FastAPI, view: AdminView, locked: list[Any]) -> None:
    @app.get("/v1/load", dependencies=locked)
    async def load() -> LoadAnswer:
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


def _key_check(view: AdminView) -> Callable[..., Awaitable[None]]:
    bearer = HTTPBearer(auto_error=False, description="the business key")

    async def check(given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> None:
        key = given.credentials if given is not None else ""
        if not hmac.compare_digest(key.encode("utf-8", "replace"), view.key.reveal().encode()):
            raise RequestRefused("unauthorized", "expected Authorization: Bearer <business key>")

    return check


def _app_of(view: AdminView, app_id: str | None) -> str:
    if app_id is None:
        if len(view.apps) != 1:
            raise RequestRefused("bad-request", "app: this node serves several, name one")
        return view.apps[0]
    if app_id not in view.apps:
        raise RequestRefused("not-found", f"app {app_id[:64]!r} is not served here")
    return app_id


async def _find(view: AdminView, app_id: str, device: str) -> DeviceAnswer:
    try:
        place = await view.lookup(app_id, device)
    except errors.EngineError as error:
        raise RequestRefused(
            "unavailable", "the engine is away", retry_after_s=limits_platform.CALL_RETRY_AFTER_S
        ) from error
    except errors.ConfigError as error:
        raise RequestRefused("bad-request", str(error)) from error
    if place is None:
        return DeviceAnswer(app=app_id, device=device, online=False)
    return DeviceAnswer(app=app_id, device=device, online=True, node=place.node, session=place.session)


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


def _content(order: PushRequest) -> bytes:
    given = order.model_fields_set
    if ("body" in given) == ("body_base64" in given):
        raise RequestRefused("bad-request", "expected exactly one of body and body_base64")
    if order.body_base64 is None:
        try:
            return msgspec.json.encode(order.body)
        except (UnicodeEncodeError, RecursionError, OverflowError) as error:
            raise RequestRefused("bad-request", f"body: {error}") from error
    try:
        return base64.b64decode(order.body_base64, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestRefused("bad-request", f"body_base64: {error}") from error


def _error(code: str, message: str, *, status: int | None = None, retry_after_s: float | None = None) -> JSONResponse:
    headers = {}
    if retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(retry_after_s))
    status = status or _STATUS[code]
    if status == 401:
        headers["www-authenticate"] = 'Bearer realm="stormline"'
    return JSONResponse({"error": {"code": code, "message": message}}, status, headers)


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestRefused)
    async def refused(_: Request, error: RequestRefused) -> Response:
        return _error(error.code, str(error), retry_after_s=error.retry_after_s)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        # Where and what, never the value: it may be somebody's message.
        found = [f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in error.errors()[:8]]
        return _error("bad-request", "; ".join(found)[: limits.REASON_CHARS_MAX])

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        code = next((code for code, status in _STATUS.items() if status == error.status_code), "bad-request")
        return _error(code, str(error.detail), status=error.status_code)

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:  # Starlette logs it, by raising it on
        return _error("internal", "internal error")


class _BoundedBody:
    """ASGI middleware: takes a request's body whole, within a bound of size and time, before anything else sees it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._bodies = bodies.Reader(limits_platform.ADMIN_BODY_TIMEOUT_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._bodies.read(scope, receive, limits_platform.ADMIN_BODY_BYTES_MAX)
        except bodies.Gone:
            return
        except RequestRefused as error:
            refusal = _error(error.code, str(error))
            refusal.headers["connection"] = "close"  # the rest is not worth reading
            await refusal(scope, receive, send)
            return
        await self._app(scope, bodies.replay(body, receive), send)
