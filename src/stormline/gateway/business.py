"""The part of the business API that businesses use most: push, who is online, calls of devices. See `gateway.admin`.

Requests that do something take an `Idempotency-Key` (`gateway.idempotency`); an answer that was kept carries
`Idempotency-Replayed: true`.
"""

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from stormline.appgw.port import Delivery
from stormline.appgw.presence import Device, Filter, Page, UnitCount
from stormline.appgw.push import PushResult
from stormline.core import errors, limits, limits_platform
from stormline.core.errors import RequestRefused
from stormline.gateway.access import Access, Caller
from stormline.gateway.idempotency import Idempotency

_T = TypeVar("_T")
Name = Annotated[str, Field(min_length=1, max_length=limits.NAME_BYTES_MAX)]
Word = Annotated[str, Field(max_length=limits.HELLO_WORD_CHARS_MAX)]


class PushRequest(BaseModel):
    """A push to one device."""

    model_config = ConfigDict(extra="forbid")

    app: str | None = Field(default=None, description="application id; may be absent where the node serves only one")
    device: Name
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


class DevicePresence(BaseModel):
    """A device and its newest session."""

    app: str
    device: str
    online: bool = Field(description="true also while its session waits for it after a lost connection")
    user: str = Field(default="", description="who is logged in, empty for nobody")
    unit: str = ""
    node: str = ""
    session: str = ""
    epoch: int = Field(default=0, description="grows with each session of the device")
    seen_ms: int = Field(
        default=0,
        description="milliseconds since 1970: of an ended session when it was seen last, kept for "
        f"{limits_platform.DIRECTORY_LIFE_S / 3600:.0f} h; of a live one when its entry was written; 0 in lists",
    )
    network: str = "unknown"
    client: str = ""
    version: str = Field(default="", description="version of the application")
    tags: list[str] = []


class DevicesAnswer(BaseModel):
    """Devices of a user, those online first."""

    devices: list[DevicePresence]


class PageAnswer(BaseModel):
    """Some of the devices that are online."""

    devices: list[DevicePresence]
    cursor: str = Field(description="give it back for the next page; empty after the last")
    silent: list[str] = Field(description="nodes that did not answer in time; their devices are missing")


class UnitCounts(BaseModel):
    """Devices that are online in one unit."""

    devices: int
    nodes: int = Field(description="living nodes")
    versions: dict[str, int] = Field(description="by version of the application; rare ones together as `other`")
    networks: dict[str, int]


class CountsAnswer(BaseModel):
    """Devices of an app that are online; a second old at most."""

    app: str
    devices: int
    units: dict[str, UnitCounts]


class CallRequest(BaseModel):
    """A call to one device."""

    model_config = ConfigDict(extra="forbid")

    app: str | None = Field(default=None, description="application id; may be absent where only one is served")
    device: Name
    method: str = Field(
        max_length=limits.METHOD_CHARS_MAX,
        pattern=r"^[a-z0-9_-]+(\.[a-z0-9_-]+)+$",
        description="dotted name that the app on the device serves",
    )
    params: JsonValue = Field(default=None, description="the argument")
    deadline_s: float = Field(default=limits.CALL_DEADLINE_S, gt=0, le=limits_platform.API_CALL_DEADLINE_MAX_S)


class CallAnswer(BaseModel):
    """What the device answered."""

    result: JsonValue


class Presence(Protocol):
    """See `appgw.presence.Presence`."""

    async def device(self, app: str, device: str) -> Device:
        """Give one device."""
        ...

    async def of_user(self, app: str, user: str) -> list[Device]:
        """Give the devices of a user."""
        ...

    async def page(self, app: str, wanted: Filter, *, node: str = "", cursor: str = "", limit: int) -> Page:
        """List devices."""
        ...

    def counts(self, app: str) -> dict[str, UnitCount]:
        """Count devices."""
        ...


class Calls(Protocol):
    """See `appgw.calls.DeviceCalls`."""

    async def call(self, app: str, device: str, method: str, body: bytes, *, key: str = "", deadline_s: float) -> bytes:
        """Call a device."""
        ...


class Business(msgspec.Struct, frozen=True, kw_only=True):
    """What these endpoints work on.

    Attributes:
        push: see `appgw.push.PushService.push`.
        presence: says who is online.
        calls: calls devices.
        once: does requests with a key once.
    """

    push: Callable[..., Awaitable[PushResult]]
    presence: Presence
    calls: Calls
    once: Idempotency


Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=limits_platform.IDEMPOTENCY_KEY_CHARS_MAX,
        pattern=r"^[\x21-\x7e]+$",
        description="the same key again is the same request: it is done once, and its answer given again",
    ),
]
App = Annotated[str | None, Query(description="application id; may be absent where only one is served")]


def router(business: Business, access: Access) -> APIRouter:
    """Make the endpoints."""
    routes = APIRouter(prefix="/v1")
    _add_deeds(routes, business, access)
    _add_presence(routes, business, access)
    return routes


def _add_deeds(routes: APIRouter, business: Business, access: Access) -> None:
    may_push = Annotated[Caller, Depends(access.allow("push"))]
    may_call = Annotated[Caller, Depends(access.allow("call"))]

    async def once(
        caller: Caller, what: str, key: str | None, request: Request, work: Callable[[], Awaitable[BaseModel]]
    ) -> Response:
        async def json() -> bytes:
            return (await work()).model_dump_json().encode()

        if key is None:
            return Response(await json(), media_type="application/json")
        answer, kept = await business.once.once(caller.who, what, key, await request.body(), json)
        headers = {"idempotency-replayed": "true"} if kept else None
        return Response(answer, media_type="application/json", headers=headers)

    @routes.post("/push", response_model=PushAnswer)
    async def push(order: PushRequest, request: Request, caller: may_push, key: Key = None) -> Response:
        """Push to one device and wait for what becomes of it."""
        app, caller.target = caller.app_of(order.app), order.device
        content = _content(order)

        async def work() -> PushAnswer:
            result = await business.push(
                app, order.device, content, topic=order.topic, push_id=order.id, ttl_s=order.ttl_s
            )
            return PushAnswer(state=result.delivery, id=result.push_id, node=result.node)

        return await once(caller, "push", key, request, work)

    @routes.post("/calls", response_model=CallAnswer)
    async def call(order: CallRequest, request: Request, caller: may_call, key: Key = None) -> Response:
        """Call a device and give its answer. Who goes away before the answer cancels the call."""
        app, caller.target = caller.app_of(order.app), order.device
        params = _json(order.params, "params")

        async def work() -> CallAnswer:
            body = await business.calls.call(
                app, order.device, order.method, params, key=key or "", deadline_s=order.deadline_s
            )
            try:
                return CallAnswer(result=msgspec.json.decode(body) if body else None)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise RequestRefused("failed", "the device's answer is not JSON", maybe_delivered=True) from error

        return await _unless_gone(request, once(caller, "call", key, request, work))


def _add_presence(routes: APIRouter, business: Business, access: Access) -> None:
    may_look = Annotated[Caller, Depends(access.allow("presence"))]

    @routes.get("/presence/counts")
    async def counts(caller: may_look, app: App = None) -> CountsAnswer:
        """Count the devices of an app that are online, by unit, version and network."""
        name = caller.app_of(app)
        units = {unit: UnitCounts(**_fields(count)) for unit, count in business.presence.counts(name).items()}
        return CountsAnswer(app=name, devices=sum(unit.devices for unit in units.values()), units=units)

    @routes.get("/presence/devices/{device:path}")
    async def one(device: Annotated[Name, Path()], caller: may_look, app: App = None) -> DevicePresence:
        """Say whether a device is online, where and with what, or when it was seen last."""
        caller.target = device
        return _shown(await asked(business.presence.device(caller.app_of(app), device)))

    @routes.get("/presence/users/{user:path}")
    async def of_user(user: Annotated[Name, Path()], caller: may_look, app: App = None) -> DevicesAnswer:
        """Give the devices where a user is, or was last, logged in."""
        caller.target = user
        found = await asked(business.presence.of_user(caller.app_of(app), user))
        return DevicesAnswer(devices=[_shown(each) for each in found])

    @routes.get("/presence")
    async def page(
        caller: may_look,
        app: App = None,
        tag: Word = "",
        version: Word = "",
        network: Literal["", "wifi", "cell", "wired", "unknown"] = "",
        user: Annotated[str, Query(max_length=limits.NAME_BYTES_MAX)] = "",
        node: Annotated[str, Query(max_length=32)] = "",
        cursor: Annotated[str, Query(max_length=1024)] = "",
        limit: Annotated[int, Query(ge=1, le=limits_platform.PRESENCE_PAGE_MAX)] = limits_platform.PRESENCE_PAGE,
    ) -> PageAnswer:
        """List the devices that are online, those that fit all that is given."""
        wanted = Filter(tag, version, network, user)
        found = await business.presence.page(caller.app_of(app), wanted, node=node, cursor=cursor, limit=limit)
        return PageAnswer(devices=[_shown(each) for each in found.devices], cursor=found.cursor, silent=found.silent)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Do the work while its caller stays; whoever goes away cancels it."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestRefused("deadline", "the caller has gone away", maybe_delivered=True)
        return await working
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def asked(question: Awaitable[_T]) -> _T:
    """Ask what needs the engine.

    Raises:
        RequestRefused: it is away, or a name is malformed.
    """
    try:
        return await question
    except errors.EngineError as error:
        raise RequestRefused(
            "unavailable", "the engine is away", retry_after_s=limits_platform.CALL_RETRY_AFTER_S
        ) from error
    except errors.ConfigError as error:
        raise RequestRefused("bad-request", str(error)) from error


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    return msgspec.structs.asdict(struct)


def _shown(device: Device) -> DevicePresence:
    return DevicePresence(**{**_fields(device), "tags": list(device.tags)})


def _json(value: object, what: str) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, RecursionError, OverflowError) as error:
        raise RequestRefused("bad-request", f"{what}: {error}") from error


def _content(order: PushRequest) -> bytes:
    given = order.model_fields_set
    if ("body" in given) == ("body_base64" in given):
        raise RequestRefused("bad-request", "expected exactly one of body and body_base64")
    if order.body_base64 is None:
        return _json(order.body, "body")
    try:
        return base64.b64decode(order.body_base64, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestRefused("bad-request", f"body_base64: {error}") from error
