"""The scheduling centre over HTTP.

    POST /v1/plan           PlanRequest as JSON -> signed plan (JWS compact, application/jose); with a user's token the
                            signed home in a second line
    GET  /v1/plan           ?app=&host=&host=   -> the same, for people with curl
    POST /v1/devices        {"app"}             -> {"device", "token", "expires_at"}: a new device
    POST /v1/admin/tokens   {"app", "device", "user", "life_s"}, Authorization: Bearer ADMIN_KEY -> the same
    GET  /v1/keys           public keys as a JWK set (RFC 7517)
    GET  /healthz           {"status": "ok", ...}; `stale` where newer rules may exist, `rejects` of rules by reason
         /v1/admin/...      changing the rules: `dispatch.admin`
    GET, POST /dns-query    DNS over HTTPS, on the port behind TLS only: `dispatch.doh`

Every error is `{"error": {"code", "message"}}`. Bodies are read within a bound of size and of time.
"""

import asyncio
import logging
import math
import ssl
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, TypeVar, cast

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from stormline.appgw import plans
from stormline.core import errors, ids, limits, limits_platform
from stormline.core.clock import Clock, Rng
from stormline.core.values import Address
from stormline.dispatch import planner
from stormline.dispatch.beside import Beside
from stormline.dispatch.config import DispatchConfig, KeyFile
from stormline.dispatch.doh import Doh
from stormline.dispatch.geo import GeoDatabases
from stormline.dispatch.rules import RuleSet
from stormline.dispatch.signer import PlanSigner, read_signing_key
from stormline.dispatch.unit import HeldRules, RulesSource
from stormline.dispatch.zone import ClientNetwork
from stormline.engine.port import Engine, Message, Reply, error_reply
from stormline.policy.ratelimit import RateLimiter
from stormline.web import bearer, bodies, peers
from stormline.web.server import HttpServer, TlsFiles
from stormline.wire import plan as wire_plan
from stormline.wire import strictjson, tokens
from stormline.wire.jws import SigningKey
from stormline.wire.plan import Endpoint, PlanRequest

_log = logging.getLogger("stormline.dispatch")

STATUS: Final = {
    "bad-request": 400,
    "bad-host": 400,
    "too-many-hosts": 400,
    "unauthorized": 401,
    "tls-required": 403,
    "app-unknown": 404,
    "not-found": 404,
    "method-not-allowed": 405,
    "timeout": 408,
    "too-large": 413,
    "rate-limited": 429,
    "internal": 500,
    "stopping": 503,
}
"""HTTP status by error code."""

_PLAN: Final = "/v1/plan"
_PLAN_MEDIA: Final = "application/jose"
_PLAN_TYPE: Final = (b"content-type", _PLAN_MEDIA.encode())
_NO_STORE: Final = {"cache-control": "no-store"}
_NO_STORE_RAW: Final = (b"cache-control", b"no-store")


class EnrolRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/devices`. The id is ours to choose: any other member is refused, not ignored."""

    app: str


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/admin/tokens`.

    Attributes:
        app: application id, one the rules know.
        device: device id.
        user: user id, empty for nobody.
        life_s: seconds until the token expires.
    """

    app: str
    device: Annotated[str, msgspec.Meta(min_length=1)]
    user: str = ""
    life_s: Annotated[float, msgspec.Meta(ge=1, le=limits_platform.ADMIN_TOKEN_LIFE_MAX_S)] = limits.TOKEN_LIFE_S


class TokenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A device and its token; `expires_at` in seconds since 1970."""

    device: str
    token: str
    expires_at: int

    def __repr__(self) -> str:
        """Never show the token."""
        return f"TokenAnswer(device={self.device!r}, token='***', expires_at={self.expires_at})"


T = TypeVar("T")

_enrol_decoder = msgspec.json.Decoder(EnrolRequest)
_token_decoder = msgspec.json.Decoder(TokenRequest)


class DispatchService:
    """The HTTP application and its state: signed answers, enrolment rates.

    One instance serves any number of listeners of one event loop.
    """

    def __init__(
        self,
        config: DispatchConfig,
        *,
        clock: Clock,
        rng: Rng,
        source: RulesSource | None = None,
        standing: planner.Standing | None = None,
        admin: tuple[str, ASGIApp] | None = None,
    ) -> None:
        self._config = config
        self.source = source or HeldRules(config.rules)
        self._admin = admin
        self._clock = clock
        self._rng = rng
        self._plan_key = _load(config.plan_key)
        self._token_key = _load(config.token_key)
        self._more_plan_keys = tuple(_load(key) for key in config.plan_keys_more)
        self._token_keys = {self._token_key.kid: self._token_key.key.public_key()}
        self._geo = GeoDatabases(config.geo) if config.geo else None
        locate = self._geo.find if self._geo is not None else None
        self._signer = PlanSigner(self._plan_key, others=self._more_plan_keys, standing=standing, locate=locate)
        self._enrolments = RateLimiter(
            rate_per_s=config.enrol_rate_per_s, burst=config.enrol_burst, keys_max=limits_platform.ENROL_ADDRESSES_MAX
        )
        self._admin_key = config.admin_key.reveal().encode("ascii")
        self._bodies = bodies.Reader(limits_platform.REQUEST_BODY_TIMEOUT_S)
        self.doh = Doh(
            config.doh, self.source.current, clock=clock, rng=rng, standing=self._signer.standing, order=self._order
        )
        """Answers DNS over HTTPS."""

    @property
    def _rules(self) -> RuleSet:
        return self.source.current()

    def _order(self, endpoints: tuple[Endpoint, ...], client: ClientNetwork) -> tuple[Endpoint, ...]:
        """Put endpoints in the order that is best for a client of whom DNS tells the network."""
        near = self._signer.nearest(self._rules)
        address, _, bits = client.network.partition("/")
        return near.order(endpoints, near.place(address, prefix=int(bits) if bits else None))

    def app(self, *, trusted: bool) -> ASGIApp:
        """Make the ASGI application of one listener.

        Args:
            trusted: the listener is behind TLS. False refuses all that gives out tokens.
        """
        enrol, mint = (self._enrol, self._mint) if trusted else (_refuse_plain, _refuse_plain)
        more = [Mount(self._admin[0], self._admin[1])] if trusted and self._admin is not None else []
        app = Starlette(
            routes=[
                Route(_PLAN, self._plan_get, methods=["GET", "POST"]),  # POST is answered in front of this
                Route("/v1/devices", enrol, methods=["POST"]),
                Route("/v1/admin/tokens", mint, methods=["POST"]),
                Route("/v1/keys", self._keys, methods=["GET"]),
                Route("/healthz", self._healthz, methods=["GET"]),
                *more,
            ],
            exception_handlers={
                errors.RequestRefused: _on_refused,
                HTTPException: _on_http,
                bodies.Gone: _on_gone,
                Exception: _on_bug,
            },
        )
        # A redirect would name an address taken from the question's own Host header.
        app.router.redirect_slashes = False
        return self._plans_in_front(app)

    def close(self) -> None:
        """Let go of the files held open."""
        if self._geo is not None:
            self._geo.close()

    def stop_reading(self) -> None:
        """End the wait for bodies that are still coming, so that a stop is not held up by a slow peer."""
        self._bodies.stop()
        self.doh.stop_reading()

    # -- plans --------------------------------------------------------------------------------------------------------

    def _plans_in_front(self, app: ASGIApp) -> ASGIApp:
        """Answer questions for plans that come by POST, and let `app` answer the rest.

        Routing and a framework's objects cost several times what it takes to find signed bytes that are there.
        """

        def both(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            plan = scope["type"] == "http" and scope["path"] == _PLAN and scope["method"] == "POST"
            return (self._plan_post if plan else app)(scope, receive, send)

        return both

    async def _plan_post(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._bodies.read(scope, receive, limits_platform.PLAN_REQUEST_BYTES_MAX)
            client = scope.get("client")
            text = self.answer(_question(body), address=client[0] if client else "")
        except bodies.Gone:
            return  # nobody waits for an answer
        except errors.RequestRefused as error:
            await _refusal(error)(scope, receive, send)
            return
        except Exception:
            await _fault()(scope, receive, send)
            raise  # the server logs it
        headers = [_NO_STORE_RAW, (b"content-length", b"%d" % len(text)), _PLAN_TYPE]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    async def _plan_get(self, request: Request) -> Response:
        if len(request.scope["query_string"]) > limits_platform.PLAN_REQUEST_BYTES_MAX:
            raise errors.RequestRefused(
                "too-large", f"a query has at most {limits_platform.PLAN_REQUEST_BYTES_MAX} bytes"
            )
        query = request.query_params
        unknown = sorted(set(query) - {"app", "host"})
        if unknown or len(query.getlist("app")) != 1:
            raise errors.RequestRefused("bad-request", "expected ?app=APP&host=HOST, host as often as needed")
        question = PlanRequest(app=query["app"], hosts=tuple(query.getlist("host")))
        text = self.answer(question, address=request.client.host if request.client else "")
        return Response(text, media_type=_PLAN_MEDIA, headers=_NO_STORE)

    def answer(self, question: PlanRequest, *, address: str = "") -> bytes:
        """Give the body of the answer: the signed plan, and in a second line the user's signed home if asked for.

        A token that is not good costs the home, not the plan: what a client needs most is where to connect.

        Args:
            question: the question.
            address: the client's IP address as text, empty where it is not known.

        Raises:
            RequestRefused: see `planner.plan_for`.
        """
        wall = self._clock.wall()
        rules = self.source.for_device(question.device, question.version)
        text = self._signer.answer(question, rules, wall, address=address)
        if not question.token:
            return text
        try:
            token = tokens.verify(question.token, keys=self._token_keys, wall=wall)
        except errors.SignatureError as error:
            _log.info("no home: %s", error)
            return text
        if token.app != question.app:
            return text
        home = self._signer.home(token.app, token.user, rules, wall, kids=question.kids)
        return text + b"\n" + home if home else text

    async def answer_engine(self, message: Message) -> Reply:
        """Answer a question that came through a gateway of the unit; see `appgw.plans`."""
        try:
            if len(message.data) > limits_platform.PLAN_REQUEST_BYTES_MAX:
                raise errors.RequestRefused(
                    "too-large", f"a question has at most {limits_platform.PLAN_REQUEST_BYTES_MAX} bytes"
                )
            return Reply(self.answer(_question(message.data), address=message.headers.get(plans.ADDRESS_HEADER, "")))
        except errors.RequestRefused as error:
            return error_reply(STATUS[error.code], f"{error.code}: {error}")

    # -- devices ------------------------------------------------------------------------------------------------------

    async def _enrol(self, request: Request) -> Response:
        wait_s = self._enrolments.take(peer_key(request), self._clock.monotonic())
        if wait_s > 0:
            raise errors.RequestRefused("rate-limited", "too many devices from this address", retry_after_s=wait_s)
        body = await self._bodies.read(request.scope, request.receive, limits_platform.DISPATCH_SMALL_BODY_BYTES_MAX)
        wanted = _decode(body, _enrol_decoder)
        planner.check_app(wanted.app, self._rules)
        return self._token(wanted.app, ids.new_id(self._rng), "", limits.TOKEN_LIFE_S)

    async def _mint(self, request: Request) -> Response:
        if not bearer.proves(request.headers.get("authorization", "").encode("latin-1"), self._admin_key):
            raise errors.RequestRefused("unauthorized", "the admin API needs 'Authorization: Bearer ADMIN_KEY'")
        body = await self._bodies.read(request.scope, request.receive, limits_platform.DISPATCH_SMALL_BODY_BYTES_MAX)
        wanted = _decode(body, _token_decoder)
        planner.check_app(wanted.app, self._rules)
        for what, name in (("device", wanted.device), ("user", wanted.user)):
            if len(name.encode()) > limits.NAME_BYTES_MAX:
                raise errors.RequestRefused("bad-request", f"{what}: at most {limits.NAME_BYTES_MAX} bytes")
        _log.info("admin token: app %s, device %r, life %.0f s", wanted.app, wanted.device, wanted.life_s)
        return self._token(wanted.app, wanted.device, wanted.user, wanted.life_s)

    def _token(self, app: str, device: str, user: str, life_s: float) -> Response:
        issued_at = int(self._clock.wall())
        claims = tokens.DeviceToken(app=app, device=device, user=user, iat=issued_at, exp=issued_at + int(life_s))
        token = tokens.mint(claims, key=self._token_key.key, kid=self._token_key.kid)
        return _json(TokenAnswer(device=device, token=token, expires_at=claims.exp))

    # -- small ones ---------------------------------------------------------------------------------------------------

    async def _keys(self, request: Request) -> Response:
        # For operators and backends. Clients take theirs from the bundle: keys fetched from the one whose signature
        # they are to check prove nothing.
        return _json(
            {
                "keys": [
                    *(_jwk(key, wire_plan.TYP) for key in (self._plan_key, *self._more_plan_keys)),
                    _jwk(self._token_key, tokens.TYP),
                ]
            }
        )

    async def _healthz(self, request: Request) -> Response:
        rules, source = self._rules, self.source
        shown = {"unit": rules.unit, "version": rules.version, "stale": source.stale, "rejects": source.rejects}
        return _json({"status": "ok", **shown, "closes": request.scope.get("state", {}).get("closes", {})})


def _question(body: bytes) -> PlanRequest:
    try:
        return wire_plan.decode_request(body)
    except ValueError as error:
        raise errors.RequestRefused("bad-request", f"not a plan request: {error}") from error


def peer_key(request: Request) -> str:
    """Name the peer for rate bounds: what one line gets."""
    return peers.line_of(request.client.host if request.client else "")


def _load(key: SigningKey | KeyFile) -> SigningKey:
    return SigningKey(read_signing_key(key.path), key.kid) if isinstance(key, KeyFile) else key


def _jwk(key: SigningKey, typ: str) -> dict[str, str]:
    # RFC 8037 section 2; "typ" is ours: what the key signs.
    return {
        "kty": "OKP",
        "crv": "Ed25519",
        "alg": "EdDSA",
        "use": "sig",
        "kid": key.kid,
        "x": key.public_text,
        "typ": typ,
    }


def _decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return strictjson.decode(body, decoder)
    except ValueError as error:
        raise errors.RequestRefused("bad-request", f"malformed body: {error}") from error


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(value),
        status_code=status,
        media_type="application/json",
        headers={**_NO_STORE, **(headers or {})},
    )


def _error(code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    return _json({"error": {"code": code, "message": message}}, STATUS[code], headers)


async def _refuse_plain(request: Request) -> Response:
    raise errors.RequestRefused("tls-required", "tokens are given out over TLS only; this port is plain HTTP")


def _refusal(error: errors.RequestRefused) -> Response:
    headers = {}
    if error.code == "unauthorized":
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return _error(error.code, str(error), headers)


def _fault() -> Response:
    return _error("internal", "this request met a fault of the server; it is logged")


async def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.RequestRefused)  # noqa: S101  Starlette picked the handler by type
    return _refusal(error)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  Starlette picked the handler by type
    if error.status_code == 405:
        return _error("method-not-allowed", "this path does not know the method", dict(error.headers or {}))
    return _error("not-found", "no such path")


async def _on_gone(request: Request, error: Exception) -> Response:
    return _error("bad-request", "the peer went away")  # nobody reads it


async def _on_bug(request: Request, error: Exception) -> Response:
    return _fault()


def _check_tls(tls: TlsFiles) -> None:
    # Before the port is taken, so that a bad file is one clear error. The empty password keeps OpenSSL from asking
    # for one on the terminal.
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.certificate, tls.key, password="")
    except OSError as error:
        raise errors.ConfigError(f"dispatch: cannot use {tls.certificate} with key {tls.key}: {error}") from error


async def run(
    config: DispatchConfig,
    *,
    clock: Clock,
    rng: Rng,
    started: Callable[[Address], None],
    stop: asyncio.Event,
    plain_started: Callable[[Address], None] | None = None,
    source: RulesSource | None = None,
    connect: Callable[[], Awaitable[Engine]] | None = None,
    admin: tuple[str, ASGIApp] | None = None,
    beside: Beside | None = None,
) -> None:
    """Serve until `stop` is set.

    Args:
        config: what to serve.
        clock: time of plans, tokens and rates.
        rng: source of device ids.
        started: called once with the real address when requests are answered on every port.
        stop: ends the service; it then returns within `limits_platform.HTTP_DRAIN_S` and a little.
        plain_started: called before `started` with the address of the plain port, where there is one.
        source: where the rules come from; None for those of the settings, for ever.
        connect: makes the connection to the engine, over which gateways of the unit are told of changed plans and ask
            for their devices; None for a centre that is asked over HTTP alone.
        admin: more of the admin API, for the port behind TLS: a path and the application under it.
        beside: what is done beside answering, made over `source` and `config.health`; None where nobody else looks at
            it.

    Raises:
        ConfigError: a key or certificate file cannot be used.
        PlatformError: a port is taken, the server did not start, or the part that speaks to the engine died.

    Cancellation stops it as `stop` does.
    """
    source = source or HeldRules(config.rules)
    beside = beside or Beside(source, config.health, rng)
    service = DispatchService(config, clock=clock, rng=rng, source=source, standing=beside.monitor, admin=admin)
    if config.tls is not None:
        _check_tls(config.tls)
    servers: list[HttpServer] = []

    def listen(port: int, what: str, tls: TlsFiles | None, *, trusted: bool) -> None:
        # Starlette and uvicorn describe the same ASGI callable by types that do not match.
        app = cast("Any", service.app(trusted=trusted))
        app = service.doh.in_front(app) if trusted else app
        servers.append(HttpServer(app, host=config.host, port=port, what=what, tls=tls))

    try:
        listen(config.port, "dispatch", config.tls, trusted=True)
        if config.plain_port is not None:
            listen(config.plain_port, "dispatch (plain)", None, trusted=False)
        service.doh.listens(servers[0].address)
        beside.begin(config.unit, service.answer_engine, connect)
        for server in servers:
            await server.start()
        if len(servers) > 1 and plain_started is not None:
            plain_started(servers[1].address)
        for server in servers:
            _log.info("dispatch answers on %s", server.address)
        started(servers[0].address)
        await beside.wait(stop)
    finally:
        service.stop_reading()
        stops: list[Awaitable[None]] = [beside.end(), *(server.stop() for server in servers)]
        await asyncio.gather(*stops)
        service.close()
        await service.doh.close()
    _log.info("dispatch stopped")
