"""The console role: one page for operators, fed by the APM's HTTP API.

| path            | what                                                                                     |
|-----------------|------------------------------------------------------------------------------------------|
| `/?key=...`     | the link: sets the session cookie and goes on to `/`, other parameters kept              |
| `/` and files   | the page; `window_s` and `host` say what it shows first                                  |
| `/api/overview` | `window_s`: `{"state": "up", "top", "series"}` or `{"state": "away", "reason"}`          |
| `/api/calls`    | `window_s`, `host`: `{"state": "up", "calls"}` or away                                   |

Without the cookie everything but the link is 401. The browser talks to the console only; the admin key stays here.
"""

import asyncio
import logging
from collections.abc import Callable
from html import escape
from importlib import resources
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from stormline.console.access import Access, host_allowed
from stormline.console.config import ConsoleConfig
from stormline.console.source import Answer, ApmSource, Away
from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.clock import Clock
from stormline.core.values import Address
from stormline.web.server import HttpServer

log = logging.getLogger("stormline.console")

_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_STEPS_S: Final = {"300": "5", "3600": "60", "86400": "1440"}
"""Windows the page offers, each with the step that gives it 60 points."""
_CALLS_SHOWN: Final = "25"
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}

# A page, not a redirect: after a redirect from another site's link a SameSite=Strict cookie would not be sent.
_ENTER: Final = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<meta http-equiv="refresh" content="0;url=%s"><title>stormline console</title><p><a href="/">Open the console</a></p>
"""
_LOCKED: Final = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<meta name="viewport" content="width=device-width"><title>stormline console: locked</title>
<h1>This console is locked</h1>
<p>Open it with the link that was printed when the platform started: it ends in <code>/?key=...</code> and is good
until the console restarts.</p>
"""


class Console:
    """The ASGI application.

    Args:
        access: checks link and cookie.
        source: where the numbers come from.
        host_names: names allowed in `Host`, see `access.host_allowed`.
    """

    def __init__(self, *, access: Access, source: ApmSource, host_names: tuple[str, ...] = ()) -> None:
        self._access = access
        self._source = source
        self._host_names = host_names
        folder = resources.files("stormline.console") / "static"
        self._files = {path: ((folder / name).read_bytes(), media) for path, (name, media) in _FILES.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        request = Request(scope, receive)
        response = await self._answer(request)
        response.headers.update(_HEADERS)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        if not host_allowed(request.headers.get("host", ""), self._host_names):
            return _plain(421, "this console does not go by that name")
        if request.method not in {"GET", "HEAD"}:
            return _plain(405, "only GET")
        path, query = request.url.path, request.query_params
        if path == "/" and "key" in query:
            if self._access.key_matches(query["key"]):
                view = urlencode([(name, value) for name, value in query.multi_items() if name != "key"])
                page = _ENTER % escape(f"/?{view}" if view else "/")
                return HTMLResponse(page, headers={"set-cookie": self._access.set_cookie()})
            return HTMLResponse(_LOCKED, 401)
        if not self._access.signed_in(request.cookies):
            return _json({"state": "locked"}, 401) if path.startswith("/api/") else HTMLResponse(_LOCKED, 401)
        if path in self._files:
            content, media = self._files[path]
            return Response(content, media_type=media)
        if path == "/api/overview":
            return await self._overview(query.get("window_s", "300"))
        if path == "/api/calls":
            return await self._calls(query.get("window_s", "300"), query.get("host", ""))
        return _plain(404, "no such page")

    async def _overview(self, window_s: str) -> Response:
        step_s = _STEPS_S.get(window_s)
        if step_s is None:
            return _plain(400, f"window_s must be one of {', '.join(_STEPS_S)}")
        top, series = await asyncio.gather(
            self._source.ask("/v1/top", window_s=window_s),
            self._source.ask("/v1/series", window_s=window_s, step_s=step_s),
        )
        return _combined(top=top, series=series)

    async def _calls(self, window_s: str, host: str) -> Response:
        if window_s not in _STEPS_S or len(host) > limits.REPORT_HOST_CHARS_MAX:
            return _plain(400, "bad window_s or host")
        answer = await self._source.ask("/v1/calls", window_s=window_s, host=host, limit=_CALLS_SHOWN)
        return _combined(latest=answer)


def _combined(**answers: Answer) -> Response:
    for answer in answers.values():
        if isinstance(answer, Away):
            return _json({"state": "away", "reason": answer.reason})
    return _json({"state": "up", **answers})


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _plain(status: int, text: str) -> Response:
    return Response(text, status, media_type="text/plain")


async def run(config: ConsoleConfig, *, clock: Clock, started: Callable[[Address], None], stop: asyncio.Event) -> None:
    """Be the console until `stop` is set.

    `started` is called once, when the page is served. It does not wait for the APM: a console that says 'the APM is
    away' is worth more than none. `access.link` makes the link to give to the operator.

    Raises:
        ConfigError: a key or the CA file is wrong.
        PlatformError: the address is taken.
    """
    access = Access(config.access_key, tls=config.tls is not None)
    try:
        source = ApmSource(url=config.apm_url, ca=config.apm_ca, admin_key=config.admin_key, clock=clock)
    except OSError as error:  # ssl.SSLError is one
        raise errors.ConfigError(f"console apm_ca {config.apm_ca}: {error}") from error
    async with source:
        app = Console(access=access, source=source, host_names=config.host_names)
        server = HttpServer(app, host=config.host, port=config.port, what="console", tls=config.tls)
        try:
            await server.start()
            started(server.address)
            log.info("console answers on %s", server.address)
            await stop.wait()
        finally:
            await server.stop()
