"""How the business API says no: problems (RFC 9457), and the bound of what it reads."""

import http
import math
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from stormline.appgw import calls
from stormline.core import limits, limits_platform
from stormline.core.errors import RequestRefused
from stormline.web import bodies

MEDIA_TYPE: Final = "application/problem+json"
_STATUS: Final = {
    "unauthorized": 401,
    "forbidden": 403,
    "not-found": 404,
    "method-not-allowed": 405,
    "timeout": 408,
    "conflict": 409,
    "changed": 412,
    "key-reused": 422,
    "precondition-required": 428,
    "too-many": 429,
    "internal": 500,
    **calls.NUMBERS,
}


class ErrorBody(BaseModel):
    """Why not, for programs."""

    code: str
    message: str


class Problem(BaseModel):
    """The form of every error (RFC 9457)."""

    title: str
    status: int
    detail: str
    maybe_delivered: bool = Field(default=False, description="what was asked may have been done all the same")
    error: ErrorBody


RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    "default": {
        "description": "an error",
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
}
"""The errors of every endpoint, for its description."""


def problem(
    code: str,
    message: str,
    *,
    status: int | None = None,
    retry_after_s: float | None = None,
    maybe_delivered: bool = False,
) -> JSONResponse:
    """Make the answer that says no."""
    headers = {}
    if retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(retry_after_s))
    status = status or _STATUS[code]
    if status == 401:
        headers["www-authenticate"] = 'Bearer realm="stormline"'
    body = Problem(
        title=http.HTTPStatus(status).phrase,
        status=status,
        detail=message,
        maybe_delivered=maybe_delivered,
        error=ErrorBody(code=code, message=message),
    )
    return JSONResponse(body.model_dump(), status, headers, media_type=MEDIA_TYPE)


def handle_errors(app: FastAPI) -> None:
    """Have an application answer every error so."""

    @app.exception_handler(RequestRefused)
    async def refused(_: Request, error: RequestRefused) -> Response:
        return problem(error.code, str(error), retry_after_s=error.retry_after_s, maybe_delivered=error.maybe_delivered)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        # Where and what, never the value: it may be somebody's message.
        found = [f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in error.errors()[:8]]
        return problem("bad-request", "; ".join(found)[: limits.REASON_CHARS_MAX])

    @app.exception_handler(HTTPException)
    async def from_http(_: Request, error: HTTPException) -> Response:
        code = next((code for code, status in _STATUS.items() if status == error.status_code), "bad-request")
        answer = problem("method-not-allowed" if error.status_code == 405 else code, str(error.detail),
                         status=error.status_code)  # fmt: skip
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:  # Starlette logs it, by raising it on
        return problem("internal", "internal error")


def describe(app: FastAPI) -> None:
    """Put the form of errors into the application's OpenAPI document, in place of FastAPI's own."""
    made = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            whole = made()
            schemas = whole.setdefault("components", {}).setdefault("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            for model in (Problem, ErrorBody):
                schemas[model.__name__] = model.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas[model.__name__].pop("$defs", None)
            for path in whole["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
        assert app.openapi_schema is not None  # noqa: S101 - made just now
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


class BoundedBody:
    """ASGI middleware: takes a request's body whole, within a bound of size and time, before anything else sees it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._bodies = bodies.Reader(limits_platform.ADMIN_BODY_TIMEOUT_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._bodies.read(scope, receive, limits_platform.ADMIN_BODY_BYTES_MAX)
        except bodies.Gone:
            return
        except RequestRefused as error:
            refusal = problem(error.code, str(error))
            refusal.headers["connection"] = "close"  # the rest is not worth reading
            await refusal(scope, receive, send)
            return
        await self._app(scope, bodies.replay(body, receive), send)
