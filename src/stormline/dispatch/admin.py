"""The admin API of a scheduling centre: rules, roll-outs and drains. OpenAPI at `/v1/admin/openapi.json`.

| endpoint | what |
| --- | --- |
| `GET /v1/admin/status` | which rules are served, and whether newer ones may exist |
| `GET /v1/admin/health` | what the probes of this centre think of each endpoint |
| `GET /v1/admin/rules` | the rules that hold for all, or `?version=` |
| `PUT /v1/admin/rules` | check and publish a rule set; `If-Match` with the version it was made from |
| `POST /v1/admin/rules/diff` | what a rule set would change |
| `GET /v1/admin/rules/diff` | what differs between two versions |
| `GET /v1/admin/rules/history` | versions that are kept, and who did what, when and why |
| `POST /v1/admin/rules/rollback` | an earlier version's content under a new version |
| `POST /v1/admin/rollout` | give a rule set to a first share of the devices |
| `GET /v1/admin/rollout` | the roll-out under way |
| `POST /v1/admin/rollout/step`, `.../halt` | give it to more devices; end it and go back |
| `PUT /v1/admin/rollout/outcomes` | how calls fare with and without it; halts it where they are worse |
| `GET /v1/admin/drains`, `POST`, `POST .../end` | endpoints out of service by hand |

All need `Authorization: Bearer ADMIN_KEY`. The ETag of the rules is their newest version. Who and why are given with
each change and kept with it. Errors are `{"error": {"code", "message"}}`, the codes those of `dispatch.editor`.
"""

import asyncio
import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from stormline.core import errors, limits
from stormline.core import limits_platform as bounds
from stormline.core.errors import RequestRefused
from stormline.core.values import Secret
from stormline.dispatch import admin_models as models
from stormline.dispatch import compare
from stormline.dispatch import rules as dispatch_rules
from stormline.dispatch.admin_models import DrainOrder, Order, OutcomesOrder, RollbackOrder, StepOrder
from stormline.dispatch.compare import Differences
from stormline.dispatch.editor import Author, Changed, Editor
from stormline.dispatch.head import Drained, Head, Rollout
from stormline.dispatch.health import Snapshot
from stormline.web import bearer, bodies
from stormline.wire import hostname

STATUS: Final = {
    "bad-request": 400,
    "unauthorized": 401,
    "not-found": 404,
    "no-rollout": 404,
    "method-not-allowed": 405,
    "timeout": 408,
    "unchanged": 409,
    "rollout-open": 409,
    "changed": 412,
    "too-large": 413,
    "rules-invalid": 422,
    "no-live-endpoint": 422,
    "precondition-required": 428,
    "internal": 500,
    "unavailable": 503,
}
"""HTTP status by error code."""

_LARGE: Final = ("/rules", "/rules/diff", "/rollout")
"""Paths that take a rule set."""
_ETAG = re.compile(r'(?:W/)?"([0-9]{1,16})"')
_RULES_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "description": "a rule set, as `GET /v1/admin/rules` gives it; its own `version` is not looked at",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}

_Who = Annotated[
    str, Query(min_length=1, max_length=bounds.RULES_WHO_CHARS_MAX, description="who changes it: a name, kept with it")
]
_Why = Annotated[str, Query(max_length=bounds.RULES_WHY_CHARS_MAX, description="why, kept with it")]
_Version = Annotated[int | None, Query(ge=1, le=2**53 - 1, description="absent: the one that holds for all")]
_IfMatch = Annotated[str | None, Header(description='ETag of the rules it was made from, such as `"7"`; `*` for any')]


def make_app(editor: Editor, *, key: Secret, health: Callable[[], Snapshot] | None = None, prefix: str = "") -> FastAPI:
    """Make the ASGI application.

    Args:
        editor: what it works on.
        key: bearer key.
        health: gives what the probes think; None: there are none to show.
        prefix: path it is mounted under, for the OpenAPI page.
    """
    app = FastAPI(
        title="stormline dispatch",
        version="1",
        docs_url=None,
        redoc_url=None,
        servers=[{"url": prefix}] if prefix else None,
        responses={"default": {"model": models.ErrorAnswer}},
        redirect_slashes=False,
    )
    # Only for the OpenAPI page: `_Gate` has looked at the key before a handler is found.
    locked = [Depends(HTTPBearer(auto_error=False, description="the admin key"))]
    for router in (_reading(editor, health), _rules(editor), _rollout(editor), _drains(editor)):
        app.include_router(router, dependencies=locked)
    _handle_errors(app)
    app.add_middleware(_Gate, key=key)
    return app


def mount(editor: Editor, *, key: Secret, health: Callable[[], Snapshot] | None = None) -> tuple[str, ASGIApp]:
    """Give the path and the application to mount in a scheduling centre."""
    return "/v1/admin", make_app(editor, key=key, health=health, prefix="/v1/admin")


def _reading(editor: Editor, health: Callable[[], Snapshot] | None) -> APIRouter:
    router = APIRouter()

    @router.get("/health", response_model=models.HealthAnswer)
    async def probed() -> Response:
        """Give what the probes of this centre think; other centres may think otherwise."""
        if health is None:
            raise RequestRefused("not-found", "this centre shows no health")
        return _json(health())

    @router.get("/status", response_model=models.StatusAnswer)
    async def status() -> Response:
        """Say which rules are served here."""
        head, book = editor.book.head, editor.book
        return _json(
            {
                "version": book.current().version,
                "newest": head.version if head else book.current().version,
                "stale": book.stale,
                "problem": book.problem,
                "rejects": book.rejects,
                "hosts": len(book.current().hosts),
                "apps": len(book.current().apps),
                "rollout": _shown_rollout(head.rollout if head else None),
                "drains": [str(each) for each in book.drains],
            }
        )

    @router.get("/rules")
    async def rules(version: _Version = None) -> Response:
        """Give the rules that hold for all, or those of a version; the ETag is the newest version."""
        found = await editor.rules(version)
        head = editor.book.head
        etag = head.version if version is None and head is not None else found.version
        return Response(dispatch_rules.encode(found), media_type="application/json", headers=_headers(etag))

    @router.get("/rules/diff", response_model=models.DiffAnswer)
    async def diff(old: _Version = None, new: _Version = None) -> Response:
        """Say what differs between two versions."""
        return _json(_shown_differences(await editor.compare(old, new)))

    @router.get("/rules/history", response_model=models.HistoryAnswer)
    async def history(
        limit: Annotated[int, Query(ge=1, le=bounds.RULES_LOG_MAX)] = bounds.RULES_LOG_MAX,
    ) -> Response:
        """Say who did what, newest first, and which versions can be gone back to."""
        head = editor.head()
        versions = [
            {"version": each.version, "bytes": each.body.size, "digest": each.body.digest} for each in head.versions
        ]
        return _json(
            {
                "version": head.current,
                "newest": head.version,
                "versions": versions,
                "log": [msgspec.structs.asdict(each) for each in head.log[:limit]],
            }
        )

    return router


def _rules(editor: Editor) -> APIRouter:
    router = APIRouter()

    @router.put("/rules", openapi_extra=_RULES_BODY, response_model=models.ChangeAnswer)
    async def publish(
        request: Request,
        who: _Who,
        why: _Why = "",
        dry_run: Annotated[bool, Query(description="check everything, write nothing")] = False,
        force: Annotated[bool, Query(description="publish also where a host has no live endpoint")] = False,
        if_match: _IfMatch = None,
    ) -> Response:
        """Check a rule set and give it to everybody."""
        expected = _expected(if_match, needed=True)
        data = await _body(request)
        changed = await editor.publish(data, Author(who, why), expected=expected, force=force, dry_run=dry_run)
        return _shown_change(changed, dry_run=dry_run)

    @router.post("/rules/diff", openapi_extra=_RULES_BODY, response_model=models.DiffAnswer)
    async def would_change(request: Request) -> Response:
        """Say what a rule set would change; looks at no endpoint and needs no engine."""
        new = await editor.check(await _body(request))
        return _json(_shown_differences(compare.diff(await editor.rules(None), new)))

    @router.post("/rules/rollback", response_model=models.ChangeAnswer)
    async def rollback(order: RollbackOrder, if_match: _IfMatch = None) -> Response:
        """Give everybody an earlier version's content under a new version."""
        expected = _expected(if_match, needed=False)
        changed = await editor.rollback(order.version, order.author, expected=expected, dry_run=order.dry_run)
        return _shown_change(changed, dry_run=order.dry_run)

    return router


def _rollout(editor: Editor) -> APIRouter:
    router = APIRouter(prefix="/rollout")

    @router.post("", openapi_extra=_RULES_BODY, response_model=models.ChangeAnswer)
    async def start(
        request: Request,
        who: _Who,
        steps: Annotated[str, Query(max_length=200, description="percentages, growing, such as `1,10,50`")],
        why: _Why = "",
        dry_run: Annotated[bool, Query(description="check everything, write nothing")] = False,
        force: Annotated[bool, Query(description="start also where a host has no live endpoint")] = False,
        if_match: _IfMatch = None,
    ) -> Response:
        """Check a rule set and give it to the first share of the devices."""
        expected = _expected(if_match, needed=True)
        shares = _steps(steps)
        data = await _body(request)
        changed = await editor.publish(
            data, Author(who, why), expected=expected, steps=shares, force=force, dry_run=dry_run
        )
        return _shown_change(changed, dry_run=dry_run)

    @router.get("", response_model=models.MaybeRollout)
    async def show() -> Response:
        """Give the roll-out under way, null where there is none."""
        return _json({"rollout": _shown_rollout(editor.head().rollout)})

    @router.post("/step", response_model=models.StateAnswer)
    async def step(order: StepOrder) -> Response:
        """Give it to more devices; at 100 percent it holds for all and is over."""
        return _shown_state(await editor.step(order.percent, order.author))

    @router.post("/halt", response_model=models.StateAnswer)
    async def halt(order: Order) -> Response:
        """End it, and give everybody what held before under a new version."""
        return _shown_state(await editor.halt(order.author))

    @router.put("/outcomes", response_model=models.JudgementAnswer)
    async def outcomes(order: OutcomesOrder) -> Response:
        """Tell how calls fare; halts the roll-out where they fare worse with it."""
        head, judgement = await editor.outcomes(order.version, order.new.counts, order.old.counts)
        return _json({"halted": judgement.worse, "p_value": judgement.p_value, "version": head.current})

    return router


def _drains(editor: Editor) -> APIRouter:
    router = APIRouter(prefix="/drains")

    @router.get("", response_model=models.DrainsAnswer)
    async def show() -> Response:
        """Give what is out of service by hand."""
        return _json({"drains": [msgspec.structs.asdict(each) for each in editor.head().drains]})

    @router.post("", response_model=models.StateAnswer)
    async def drain(order: DrainOrder) -> Response:
        """Take endpoints out of service: new plans no longer name them where others can serve."""
        return _shown_state(await editor.drain(_drained(order), order.author))

    @router.post("/end", response_model=models.StateAnswer)
    async def end(order: DrainOrder) -> Response:
        """Take endpoints back into service."""
        return _shown_state(await editor.drain(_drained(order), order.author, end=True))

    return router


# -- requests ---------------------------------------------------------------------------------------------------------
def _expected(if_match: str | None, *, needed: bool) -> int | None:
    if if_match is None:
        if needed:
            raise RequestRefused(
                "precondition-required", "If-Match: the ETag of the rules this was made from, or '*' for any"
            )
        return None
    if if_match.strip() == "*":
        return None
    match = _ETAG.fullmatch(if_match.strip())
    if match is None:
        raise RequestRefused("bad-request", 'If-Match: expected one ETag such as "7", or *')
    return int(match[1])


def _steps(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(each) for each in text.split(","))
    except ValueError:
        raise RequestRefused("bad-request", "steps: expected percentages such as 1,10,50") from None


def _drained(order: DrainOrder) -> Drained:
    try:
        return Drained(hostname.normalise(order.host), order.port)
    except errors.ConfigError as error:
        raise RequestRefused("bad-request", str(error)) from error


async def _body(request: Request) -> bytes:
    """Read a rule set within a bound of size and time."""
    body = bytearray()
    try:
        async with asyncio.timeout(bounds.RULES_BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > bounds.RULES_BYTES_MAX:
                    raise RequestRefused("too-large", f"a rule set has at most {bounds.RULES_BYTES_MAX} bytes")
    except TimeoutError:
        raise RequestRefused("timeout", "the body did not come in time") from None
    return bytes(body)


class _Gate:
    """ASGI middleware before everything: the key first, then small bodies whole, within a bound of size and time.

    A rule set is read by its own handler, which knows its bound.
    """

    def __init__(self, app: ASGIApp, key: Secret) -> None:
        self._app = app
        self._key = key.reveal().encode()
        self._bodies = bodies.Reader(bounds.REQUEST_BODY_TIMEOUT_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        headers = dict(scope["headers"])
        try:
            if not (path.endswith("/openapi.json") or bearer.proves(headers.get(b"authorization", b""), self._key)):
                raise RequestRefused("unauthorized", "the admin API needs 'Authorization: Bearer ADMIN_KEY'")
            if not path.endswith(_LARGE):
                body = await self._bodies.read(scope, receive, bounds.DISPATCH_SMALL_BODY_BYTES_MAX)
                receive = bodies.replay(body, receive)
        except bodies.Gone:
            return  # nobody waits for an answer
        except RequestRefused as error:
            await _refusal(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


# -- answers ----------------------------------------------------------------------------------------------------------
def _headers(etag: int | None = None) -> dict[str, str]:
    return {"cache-control": "no-store", **({} if etag is None else {"etag": f'"{etag}"'})}


def _json(value: object, *, status: int = 200, etag: int | None = None) -> Response:
    return Response(
        msgspec.json.encode(value), status_code=status, media_type="application/json", headers=_headers(etag)
    )


def _shown_differences(differences: Differences) -> dict[str, object]:
    return {"count": differences.count, "differences": [msgspec.structs.asdict(each) for each in differences.listed]}


def _shown_rollout(rollout: Rollout | None) -> dict[str, object] | None:
    if rollout is None:
        return None
    return {
        "version": rollout.version,
        "percent": rollout.percent,
        "steps": rollout.steps,
        "started_at": rollout.started_at,
        "stepped_at": rollout.stepped_at,
        "new": rollout.new,
        "old": rollout.old,
        "looks": rollout.looks.done,
    }


def _state(head: Head) -> dict[str, object]:
    return {
        "version": head.current,
        "newest": head.version,
        "rollout": _shown_rollout(head.rollout),
        "drains": [str(each) for each in head.drains],
    }


def _shown_state(head: Head) -> Response:
    return _json(_state(head), etag=head.version)


def _shown_change(changed: Changed, *, dry_run: bool) -> Response:
    answer = {
        **_state(changed.head),
        **_shown_differences(changed.differences),
        "dry_run": dry_run,
        "dead": changed.dead,
        "served": changed.served,
    }
    return _json(answer, etag=changed.head.version)


def _error(code: str, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, STATUS.get(code, 500), headers)


def _refusal(error: RequestRefused) -> JSONResponse:
    headers = {}
    if error.code == "unauthorized":
        headers["www-authenticate"] = "Bearer"
    if error.code in ("unauthorized", "too-large", "timeout"):
        headers["connection"] = "close"  # the rest is not worth reading
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return _error(error.code, str(error), headers)


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestRefused)
    async def refused(_: Request, error: RequestRefused) -> Response:
        return _refusal(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        found = [f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in error.errors()[:8]]
        return _error("bad-request", "; ".join(found)[: limits.REASON_CHARS_MAX])

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        code = "method-not-allowed" if error.status_code == 405 else "not-found"
        return _error(code, "this path does not know the method" if error.status_code == 405 else "no such path")

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> Response:
        return _error("bad-request", "the peer went away")  # nobody reads it

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:  # Starlette logs it, by raising it on
        return _error("internal", "this request met a fault of the server; it is logged")
