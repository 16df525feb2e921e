"""The operators' part of the gateway's API: the upstreams of the API gate, and the keys of signed identities.

| endpoint                   | who           | what                                                                 |
|----------------------------|---------------|----------------------------------------------------------------------|
| `GET /v1/upstreams`        | operators' key | the unit's record; its ETag is the revision                         |
| `PUT /v1/upstreams`        | operators' key | check and replace it; `If-Match` with the revision it was made from |
| `GET /v1/upstreams/health` | operators' key | what this node thinks of each endpoint                              |
| `GET /v1/identity-keys`    | anyone        | public keys of signed identities, as a JWK set                       |

An upstream's address is where the gateway connects, inside our own network: the key of businesses does not open it.
"""

import hmac
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from stormline.appgw import upstreams
from stormline.appgw.upstreams import Book, Rules
from stormline.core.errors import RequestRefused
from stormline.core.values import Secret

_ETAG = re.compile(r'(?:W/)?"([0-9]{1,19})"')
_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "description": "the record, as `GET /v1/upstreams` gives it",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}
_IfMatch = Annotated[str | None, Header(description="ETag of the record it was made from; `*` for any")]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamsView:
    """What these endpoints work on.

    Attributes:
        key: the operators' key; None: nobody has it.
        read: see `appgw.upstream_rules.UpstreamRules.read`.
        write: see `appgw.upstream_rules.UpstreamRules.write`.
        book: the upstreams in use on this node.
        now: monotonic time.
        public_keys: see `appgw.identity.Signer.public_keys`; None: identities are not signed.
    """

    key: Secret | None
    read: Callable[[], Awaitable[Rules]]
    write: Callable[[bytes, int | None], Awaitable[int]]
    book: Book
    now: Callable[[], float]
    public_keys: Mapping[str, Any] | None


def make_router(view: UpstreamsView) -> APIRouter:
    """Make the endpoints."""
    router = APIRouter()
    locked = [Depends(_key_check(view.key))]

    @router.get("/v1/upstreams", dependencies=locked)
    async def show() -> Response:
        """Give the unit's record, with its revision as ETag."""
        rules = await view.read()
        data = msgspec.json.format(upstreams.encode(rules), indent=2) + b"\n"
        return Response(data, media_type="application/json", headers=_etag(rules.revision))

    @router.put("/v1/upstreams", dependencies=locked, openapi_extra=_BODY)
    async def replace(request: Request, if_match: _IfMatch = None) -> Response:
        """Check a record and give it to every gateway of the unit."""
        revision = await view.write(await request.body(), _expected(if_match))
        data = msgspec.json.encode({"revision": revision})
        return Response(data, media_type="application/json", headers=_etag(revision))

    @router.get("/v1/upstreams/health", dependencies=locked)
    async def health() -> Response:
        """Say what this node thinks of each endpoint in use, those of its settings too."""
        now = view.now()
        shown = [
            {
                "name": route.rule.name,
                "host": route.rule.host,
                "path": route.rule.path,
                "endpoints": [
                    {
                        "origin": f"{target.place.scheme}://{target.place.address}",
                        "weight": target.weight,
                        "circuit": target.breaker.state(now).value,
                    }
                    for target in route.targets
                ],
            }
            for route in view.book
        ]
        return Response(msgspec.json.encode({"upstreams": shown}), media_type="application/json")

    @router.get("/v1/identity-keys")
    async def identity_keys() -> Response:
        """Give the keys with which a service checks `Stormline-Identity`."""
        if view.public_keys is None:
            raise RequestRefused("not-found", "this node signs no identities")
        return Response(
            msgspec.json.encode(view.public_keys),
            media_type="application/jwk-set+json",
            headers={"cache-control": "public, max-age=300"},
        )

    return router


def _key_check(key: Secret | None) -> Callable[..., Awaitable[None]]:
    bearer = HTTPBearer(auto_error=False, description="the operators' key")

    async def check(given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> None:
        said = given.credentials if given is not None else ""
        if key is None or not hmac.compare_digest(said.encode("utf-8", "replace"), key.reveal().encode()):
            raise RequestRefused("unauthorized", "expected Authorization: Bearer <operators' key>")

    return check


def _etag(revision: int) -> dict[str, str]:
    return {"etag": f'"{revision}"'}


def _expected(if_match: str | None) -> int | None:
    if if_match is None:
        raise RequestRefused(
            "precondition-required", "If-Match: the ETag of the record this was made from, or '*' for any"
        )
    if if_match.strip() == "*":
        return None
    match = _ETAG.fullmatch(if_match.strip())
    if match is None:
        raise RequestRefused("bad-request", 'If-Match: expected one ETag such as "7", or *')
    return int(match[1])
