"""The APM role: takes reports from devices, answers operators.

| endpoint           | who                  | what                                                                    |
|--------------------|----------------------|-------------------------------------------------------------------------|
| `POST /v1/report`  | device token         | a batch of call records; 200 once it is stored                          |
| `POST /v1/feedback`| device token         | what a user says, with the last failures; 200 once it is stored, once   |
| `GET /v1/feedback` | admin key            | what users said: `window_s`, `app`, `limit`; `/ID` one, with its log    |
| `GET /v1/top`      | admin key            | health per host: `window_s`, `app`                                      |
| `GET /v1/series`   | admin key            | calls and successes over time: `window_s`, `step_s`, `app`              |
| `GET /v1/calls`    | admin key            | latest calls with their stages: `window_s`, `app`, `host`, `limit`      |
| `GET /v1/addresses`| admin key            | attempts and failures by address: `window_s`, `app`                     |
| `GET /v1/diagnoses`| admin key            | latest diagnoses: `window_s`, `app`, `host`, `verdict`, `limit`         |
| `GET /v1/stats`    | admin key            | counts of this process: stored, left out, refused                       |
| `GET /healthz`     | anyone               | 200 where the store answers, else 503                                   |

Errors are `{"error": {"code", "message"}}` with the names of `core.codes`; 503 carries `Retry-After`.
"""

import asyncio
import contextlib
import hmac
import logging
import math
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from stormline.apm import questions
from stormline.apm.config import ApmConfig
from stormline.apm.feedback import FeedbackDesk, TooOften
from stormline.apm.ingest import Ingest
from stormline.apm.rows import Origin
from stormline.apm.store import Store
from stormline.apm.telling import telling
from stormline.core import codes, errors, limits_netlog
from stormline.core import limits_platform as limits
from stormline.core.clock import Clock
from stormline.core.codes import Code
from stormline.core.values import Address, Secret
from stormline.telemetry import feedback, report
from stormline.web.server import HttpServer
from stormline.wire import jws, tokens

log = logging.getLogger("stormline.apm")

_ADMIN_KEY_CHARS_MIN = 16
_GZIP = 16 + zlib.MAX_WBITS  # RFC 1952 framing, nothing else


class _Refused(Exception):
    """Ends a request with an error answer; never leaves this module."""

    def __init__(self, status: int, code: Code, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(content),
        status,
        {"cache-control": "no-store", **(headers or {})},
        media_type="application/json",
    )


def _error(status: int, code: Code, message: str, *, retry_after_s: float | None = None) -> Response:
    headers = {}
    if retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(retry_after_s))
    if status == 401:
        headers["www-authenticate"] = 'Bearer realm="stormline"'
    if status in {408, 413}:
        headers["connection"] = "close"  # the rest of the body is not worth reading
    return _json({"error": {"code": codes.name(code), "message": message}}, status, headers)


def _bearer(request: Request) -> str:
    scheme, _, credential = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not credential.strip():
        raise _Refused(401, Code.TOKEN_MISSING, "expected Authorization: Bearer <token>")
    return credential.strip()


def _number(query: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= most):
        raise _Refused(400, Code.CALL_BAD_REQUEST, f"{name} must be a whole number from 1 to {most}")
    return int(text)


def _word(query: Mapping[str, str], name: str) -> str:
    text = query.get(name, "")
    if len(text) > limits.REPORT_HOST_CHARS_MAX:
        raise _Refused(400, Code.CALL_BAD_REQUEST, f"{name} has at most {limits.REPORT_HOST_CHARS_MAX} characters")
    return text


def gunzip(data: bytes, size_max: int) -> bytes:
    """Decompress one gzip member (RFC 1952), never to more than `size_max` bytes.

    Raises:
        ValueError: malformed, truncated, or followed by something.
        OverflowError: larger than `size_max`.
    """
    engine = zlib.decompressobj(_GZIP)
    try:
        plain = engine.decompress(data, size_max + 1)
    except zlib.error as error:
        raise ValueError(f"malformed gzip: {error}") from error
    if len(plain) > size_max:
        raise OverflowError(f"more than {size_max} bytes")
    if not engine.eof or engine.unused_data:
        raise ValueError("truncated gzip, or something after it")
    return plain


async def _discard(chunks: AsyncIterator[bytes]) -> None:
    """Read on for a while without keeping: to close on a sender in mid-sentence resets what it would have read."""
    seen = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limits.REPORT_DISCARD_S):
            async for chunk in chunks:
                seen += len(chunk)
                if seen > limits.REPORT_DISCARD_BYTES_MAX:
                    return


class ApmService:
    """The role's HTTP side over an open store and a running ingest.

    Attributes:
        app: the ASGI application.
    """

    def __init__(
        self,
        *,
        store: Store,
        ingest: Ingest,
        token_keys: Mapping[str, Ed25519PublicKey],
        admin_key: Secret,
        clock: Clock,
    ) -> None:
        self._store = store
        self._ingest = ingest
        self._token_keys = token_keys
        self._admin_key = admin_key.reveal().encode()
        self._clock = clock
        self._desk = FeedbackDesk(store, clock)
        self._body_bytes = 0
        get = ["GET"]
        self._health_lock = asyncio.Lock()
        self._well_until = -math.inf
        self.app = Starlette(
            routes=[
                Route("/v1/report", self._guarded(self._report), methods=["POST"]),
                Route(feedback.PATH, self._guarded(self._feedback), methods=["POST"]),
                Route(feedback.PATH, self._guarded(self._said), methods=get),
                Route(feedback.PATH + "/{id}", self._guarded(self._said_one), methods=get),
                Route("/v1/top", self._guarded(self._top), methods=get),
                Route("/v1/series", self._guarded(self._series), methods=get),
                Route("/v1/calls", self._guarded(self._calls), methods=get),
                Route("/v1/addresses", self._guarded(self._addresses), methods=get),
                Route("/v1/diagnoses", self._guarded(self._diagnoses), methods=get),
                Route("/v1/stats", self._guarded(self._stats), methods=get),
                Route("/healthz", self._guarded(self._health), methods=get),
            ],
            exception_handlers={HTTPException: _http_error, Exception: _internal_error},
        )

    def _guarded(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Turn the errors a handler may raise into their answers."""

        async def guarded(request: Request) -> Response:
            try:
                return await handler(request)
            except _Refused as refusal:
                return _error(refusal.status, refusal.code, str(refusal), retry_after_s=refusal.retry_after_s)
            except errors.StoreBusy as error:
                return _error(503, Code.OVERLOADED, str(error), retry_after_s=error.retry_after_s)
            except errors.StoreError as error:
                log.warning("%s: %s", request.url.path, error)
                return _error(
                    503, Code.INTERNAL, "the store cannot do it now", retry_after_s=limits.INGEST_RETRY_AFTER_S
                )
            except ClientDisconnect:
                return Response(status_code=400)  # nobody is there to read it

        return guarded

    # -- devices ------------------------------------------------------------------------------------------------------

    async def _report(self, request: Request) -> Response:
        token = self._device(request)
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != report.MEDIA_TYPE:
            raise _Refused(415, Code.CALL_BAD_REQUEST, f"content-type must be {report.MEDIA_TYPE}")
        data = await self._body(request)
        try:
            salvaged = report.salvage(data)
        except ValueError as error:
            raise _Refused(400, Code.CALL_BAD_REQUEST, str(error)) from error
        batch = salvaged.report
        origin = Origin(token.app, token.device, token.user, batch.platform, batch.client)
        receipt = await self._ingest.submit(origin, salvaged)
        return _json({"stored": receipt.stored, "dropped": receipt.dropped})

    async def _feedback(self, request: Request) -> Response:
        token = self._device(request)
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != feedback.MEDIA_TYPE:
            raise _Refused(415, Code.CALL_BAD_REQUEST, f"content-type must be {feedback.MEDIA_TYPE}")
        data = await self._body(request, limits_netlog.FEEDBACK_BYTES_MAX)
        try:
            said = feedback.decode(data)
        except ValueError as error:
            raise _Refused(400, Code.CALL_BAD_REQUEST, str(error)) from error
        try:
            fresh = await self._desk.take(Origin(token.app, token.device, token.user), said)
        except TooOften as error:
            raise _Refused(429, Code.OVERLOADED, str(error), retry_after_s=error.wait_s) from error
        return _json({"id": said.id, "repeated": not fresh})

    def _device(self, request: Request) -> tokens.DeviceToken:
        try:
            return tokens.verify(_bearer(request), keys=self._token_keys, wall=self._clock.wall())
        except errors.SignatureError as error:
            raise _Refused(401, tokens.refusal_code(error), str(error)) from error

    async def _body(self, request: Request, size_max: int = report.BATCH_BYTES_MAX) -> bytes:
        """Read a body whole, decompressed; bounded in size, time and in memory over all requests."""
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in {"identity", "gzip"}:
            raise _Refused(415, Code.CALL_BAD_REQUEST, "content-encoding must be gzip or none")
        too_large = _Refused(413, Code.CALL_TOO_LARGE, f"a body has at most {size_max} bytes here")
        chunks = request.stream()
        length = request.headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and (len(length) > 12 or int(length) > size_max):
            await _discard(chunks)
            raise too_large
        held = 0
        body = bytearray()
        try:
            async with asyncio.timeout(limits.REPORT_BODY_TIMEOUT_S):
                async for chunk in chunks:
                    if len(body) + len(chunk) > size_max:
                        await _discard(chunks)
                        raise too_large
                    if self._body_bytes + len(chunk) > limits.REPORT_BODIES_BYTES_MAX:
                        raise errors.StoreBusy("too many reports at once", retry_after_s=limits.INGEST_RETRY_AFTER_S)
                    self._body_bytes += len(chunk)
                    held += len(chunk)
                    body += chunk
        except TimeoutError:
            raise _Refused(408, Code.CALL_DEADLINE, "the body came too slowly") from None
        finally:
            self._body_bytes -= held
        if encoding == "identity":
            return bytes(body)
        try:
            return gunzip(bytes(body), size_max)
        except OverflowError:
            raise too_large from None
        except ValueError as error:
            raise _Refused(400, Code.CALL_BAD_REQUEST, str(error)) from error

    # -- operators ----------------------------------------------------------------------------------------------------

    def _admin(self, request: Request) -> None:
        if not hmac.compare_digest(_bearer(request).encode(), self._admin_key):
            raise _Refused(401, Code.TOKEN_INVALID, "wrong admin key")

    def _since_ms(self, window_s: int) -> int:
        return int((self._clock.wall() - window_s) * 1000)

    async def _top(self, request: Request) -> Response:
        self._admin(request)
        query = request.query_params
        window_s = _number(query, "window_s", 300, limits.APM_WINDOW_S_MAX)
        answer = await questions.top(self._store, since_ms=self._since_ms(window_s), app=_word(query, "app"))
        return _json({"window_s": window_s, **answer})

    async def _series(self, request: Request) -> Response:
        self._admin(request)
        query = request.query_params
        window_s = _number(query, "window_s", 900, limits.APM_WINDOW_S_MAX)
        step_s = _number(query, "step_s", 15, limits.APM_WINDOW_S_MAX)
        points = math.ceil(window_s / step_s)
        if points > limits.APM_SERIES_POINTS_MAX:
            raise _Refused(400, Code.CALL_BAD_REQUEST, f"at most {limits.APM_SERIES_POINTS_MAX} points in one answer")
        # Points begin at whole steps, so that a point keeps its meaning from one answer to the next.
        end_s = math.floor(self._clock.wall() / step_s + 1) * step_s
        start_s = end_s - points * step_s
        answer = await questions.series(
            self._store, since_ms=start_s * 1000, step_ms=step_s * 1000, points=points, app=_word(query, "app")
        )
        return _json({"start_s": start_s, "step_s": step_s, **answer})

    async def _calls(self, request: Request) -> Response:
        self._admin(request)
        query = request.query_params
        window_s = _number(query, "window_s", 3600, limits.APM_WINDOW_S_MAX)
        calls = await questions.calls(
            self._store,
            since_ms=self._since_ms(window_s),
            app=_word(query, "app"),
            host=_word(query, "host"),
            limit=_number(query, "limit", 50, limits.APM_CALLS_MAX),
        )
        return _json({"calls": calls})

    async def _addresses(self, request: Request) -> Response:
        self._admin(request)
        query = request.query_params
        window_s = _number(query, "window_s", int(limits.BAD_WINDOW_S), limits.APM_WINDOW_S_MAX)
        counts = await questions.addresses(self._store, since_ms=self._since_ms(window_s), app=_word(query, "app"))
        return _json({"window_s": window_s, "addresses": [each._asdict() for each in counts]})

    async def _said(self, request: Request) -> Response:
        self._admin(request)
        query = request.query_params
        window_s = _number(query, "window_s", limits_netlog.FEEDBACK_DAYS * 86400, limits_netlog.FEEDBACK_DAYS * 86400)
        found = await self._desk.list(
            since_ms=self._since_ms(window_s),
            app=_word(query, "app"),
            limit=_number(query, "limit", 50, limits_netlog.FEEDBACK_LIST_MAX),
        )
        return _json({"feedback": found})

    async def _said_one(self, request: Request) -> Response:
        self._admin(request)
        found = await self._desk.one(request.path_params["id"]) if feedback.is_id(request.path_params["id"]) else None
        if found is None:
            raise _Refused(404, Code.CALL_NOT_FOUND, "no such feedback")
        return _json(found)

    async def _diagnoses(self, request: Request) -> Response:
        self._admin(request)
        query = request.query_params
        answer = await questions.diagnoses(
            self._store,
            since_ms=self._since_ms(_number(query, "window_s", 86_400, limits.APM_WINDOW_S_MAX)),
            app=_word(query, "app"),
            host=_word(query, "host"),
            verdict=_word(query, "verdict"),
            limit=_number(query, "limit", 50, limits.APM_CALLS_MAX),
        )
        return _json(answer)

    async def _stats(self, request: Request) -> Response:
        self._admin(request)
        return _json({"ingest": asdict(self._ingest.stats), "body_bytes": self._body_bytes})

    async def _health(self, request: Request) -> Response:
        # Anyone may ask: however many do, the store hears one of them at a time and one a second.
        async with self._health_lock:
            if self._clock.monotonic() >= self._well_until:
                await questions.answers(self._store)
                self._well_until = self._clock.monotonic() + limits.APM_HEALTH_S
        return _json({"ok": True, "closes": request.scope.get("state", {}).get("closes", {})})


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return _error(status, Code.CALL_NOT_FOUND, "no such endpoint" if status == 404 else "no such method here")


async def _internal_error(request: Request, error: Exception) -> Response:
    return _error(500, Code.INTERNAL, "internal error")


async def run(config: ApmConfig, *, clock: Clock, started: Callable[[Address], None], stop: asyncio.Event) -> None:
    """Be the APM until `stop` is set.

    `started` is called once, when requests are answered. After `stop`: no new connections, requests in flight get at
    most `limits.HTTP_DRAIN_S`, what is queued is stored, the store is closed.

    Raises:
        ConfigError: a key or the choice of store is wrong.
        StoreError: the store cannot be opened.
        PlatformError: the address is taken, or the writer died.
    """
    if len(config.admin_key.reveal()) < _ADMIN_KEY_CHARS_MIN:
        raise errors.ConfigError(f"apm admin_key: at least {_ADMIN_KEY_CHARS_MIN} characters")
    try:
        keys = jws.load_public_keys(config.token_keys)
    except errors.SignatureError as error:
        raise errors.ConfigError(f"apm token_keys: {error}") from error
    store = Store(path=config.store_path, url=config.store_url)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        await store.open()
        ingest = Ingest(store.insert, store.insert_diagnoses, clock)
        service = ApmService(store=store, ingest=ingest, token_keys=keys, admin_key=config.admin_key, clock=clock)
        server = HttpServer(service.app, host=config.host, port=config.port, what="apm", tls=config.tls)
        if config.dispatch is not None:
            await stack.enter_async_context(telling(config.dispatch, store, clock))
        writer = asyncio.create_task(ingest.run(), name="apm ingest")
        stopped = asyncio.create_task(stop.wait(), name="apm stop")
        try:
            await server.start()
            started(server.address)
            log.info("apm answers on %s", server.address)
            await asyncio.wait({writer, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            await server.stop()
            ingest.close()
            [outcome] = await asyncio.gather(writer, return_exceptions=True)
        if isinstance(outcome, BaseException):
            raise errors.PlatformError(f"apm: the writer died: {outcome!r}") from outcome
