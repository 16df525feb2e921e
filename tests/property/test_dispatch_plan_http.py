"""Questions for plans by POST, answered before the framework: the same, byte for byte, as through it."""

import asyncio
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message

from stormline.core import errors, limits, limits_platform
from stormline.core.values import Secret
from stormline.dispatch import service
from stormline.dispatch.config import DispatchConfig
from stormline.dispatch.rules import Homes, Network, Region, RuleSet
from stormline.dispatch.service import DispatchService
from stormline.testing.simloop import SimRng
from stormline.wire import plan, tokens
from stormline.wire.jws import SigningKey
from stormline.wire.plan import Endpoint, HostPlan, PlanRequest

WALL = 1_800_000_000
KEYS = [SigningKey(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32), f"k{number}") for number in range(3)]
NEAR, FAR = (Endpoint(host=f"192.0.2.{n}", port=443, carrier="h2", region=region) for n, region in ((1, "a"), (2, "b")))
RULES = RuleSet(
    version=4,
    hosts={"a.example": HostPlan(endpoints=(NEAR, FAR)), "b.example": HostPlan(endpoints=(FAR,), ttl_s=20)},
    apps={"shop": frozenset({"a.example", "b.example"}), "bank": frozenset()},
    preload={"shop": ("b.example",)},
    regions={"a": Region(), "b": Region()},
    networks={"198.51.100.0/24": Network(region="a"), "203.0.113.0/24": Network(region="b")},
    homes=Homes(epoch=2, units={"u1": 1, "u2": 1}),
)


class Still:
    """A clock that stands; `wall` fails where it is told to."""

    broken = False

    def monotonic(self) -> float:
        return 0.0

    def wall(self) -> float:
        if self.broken:
            raise ZeroDivisionError
        return float(WALL)


CLOCK = Still()
SERVICE = DispatchService(
    DispatchConfig(
        host="127.0.0.1", port=0, tls=None, unit="u1", rules=RULES, plan_key=KEYS[0], token_key=KEYS[2],
        admin_key=Secret("an-admin-key-0123"), plan_keys_more=(KEYS[1],),
    ),
    clock=CLOCK, rng=SimRng(1),
)  # fmt: skip
TOKEN = tokens.mint(
    tokens.DeviceToken(app="shop", device="d", user="ann", iat=WALL, exp=WALL + 60), key=KEYS[2].key, kid=KEYS[2].kid
)
HELD = msgspec.json.decode(
    plan.jws.b64url_decode(SERVICE.answer(PlanRequest(app="shop", hosts=("a.example",))).split(b".")[1])
)["digest"]


async def through_the_framework(request: Request) -> Response:
    """Answer as the service would if this question had a route like every other."""
    most = limits_platform.PLAN_REQUEST_BYTES_MAX
    too_large = errors.RequestRefused("too-large", f"a body has at most {most} bytes here")
    length = request.headers.get("content-length", "0")
    if not length.isdigit() or len(length) > 18 or int(length) > most:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise too_large
    try:
        question = plan.decode_request(bytes(body))
    except ValueError as error:
        raise errors.RequestRefused("bad-request", f"not a plan request: {error}") from error
    text = SERVICE.answer(question, address=request.client.host if request.client else "")
    return Response(text, media_type="application/jose", headers={"cache-control": "no-store"})


FRAMEWORK = Starlette(
    routes=[Route("/v1/plan", through_the_framework, methods=["POST"])],
    exception_handlers={errors.RequestRefused: service._on_refused, Exception: service._on_bug},
)
OURS = SERVICE.app(trusted=False)

hosts = st.sampled_from(["a.example", "A.example.", "b.example", "c.example", "bad host", "b.example:443", "é.example"])
questions = st.builds(
    PlanRequest, app=st.sampled_from(["shop", "bank", "nobody", ""]), hosts=st.lists(hosts, max_size=4).map(tuple),
    version=st.integers(0, 9), device=st.sampled_from(["", "d1", "d2", "Gerät"]),
    role=st.sampled_from(["", "push", "x"]), network=st.text(max_size=3), token=st.sampled_from(["", TOKEN, "x"]),
    held=st.sampled_from(["", HELD, "unknown"]), changes=st.booleans(),
    kids=st.lists(st.sampled_from(["k0", "k1", "k9"]), max_size=2).map(tuple),
)  # fmt: skip
bodies = st.one_of(
    questions.map(msgspec.json.encode),
    questions.map(lambda each: msgspec.json.format(msgspec.json.encode(each))),
    questions.map(lambda each: msgspec.json.encode(each)[:-1] + b',"app":"bank"}'),
    questions.map(lambda each: msgspec.json.encode(each)[:-1] + b',"x":{"y":1,"y":2}}'),
    st.just(msgspec.json.encode(PlanRequest(app="shop", hosts=("a.example",) * (limits.PLAN_HOSTS_MAX + 1)))),
    st.just(b" " * (limits_platform.PLAN_REQUEST_BYTES_MAX + 1)),
    st.binary(max_size=40),
)
lengths = st.sampled_from([None, b"true", b"0", b"-1", b"", b"x", b"9" * 19, b"65537", "٣".encode()])
addresses = st.sampled_from([None, "198.51.100.7", "203.0.113.7", "::ffff:203.0.113.7", "nonsense"])


@st.composite
def requests(draw: st.DrawFn) -> tuple[dict[str, Any], list[Message]]:
    """Give a request as a server tells it: its scope, and its body in pieces."""
    body, length, address = draw(bodies), draw(lengths), draw(addresses)
    cuts = sorted(draw(st.lists(st.integers(0, len(body)), max_size=3)))
    pieces = [body[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    headers = [(b"host", b"centre"), (b"content-type", b"application/json")]
    if length is not None:
        headers.append((b"content-length", b"%d" % len(body) if length == b"true" else length))
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/plan", "raw_path": b"/v1/plan", "query_string": b"", "root_path": "", "headers": headers,
        "client": address and (address, 5), "server": ("centre", 80),
    }  # fmt: skip
    return scope, [
        {"type": "http.request", "body": piece, "more_body": at < len(pieces) - 1} for at, piece in enumerate(pieces)
    ]


async def ask(app: ASGIApp, scope: dict[str, Any], messages: list[Message]) -> list[Message]:
    """Give all that an application says, and then what it raised."""
    told: list[Message] = []
    coming = iter(messages)

    async def receive() -> Message:
        return next(coming, {"type": "http.disconnect"})

    async def send(message: Message) -> None:
        told.append(message)

    try:
        await app(dict(scope), receive, send)
    except (ZeroDivisionError, ClientDisconnect) as error:
        told.append({"type": type(error).__name__})
    return told


@given(requests())
def test_answer_is_the_same_as_through_the_framework(request: tuple[dict[str, Any], list[Message]]) -> None:
    ours, theirs = (asyncio.run(ask(app, *request)) for app in (OURS, FRAMEWORK))
    assert ours == theirs
    assert [each["type"] for each in ours] == ["http.response.start", "http.response.body"]


@given(requests())
def test_fault_of_ours_is_told_and_raised_the_same(request: tuple[dict[str, Any], list[Message]]) -> None:
    CLOCK.broken = True
    try:
        ours, theirs = (asyncio.run(ask(app, *request)) for app in (OURS, FRAMEWORK))
    finally:
        CLOCK.broken = False
    assert ours == theirs


@given(requests())
def test_peer_that_left_in_the_middle_is_told_nothing(request: tuple[dict[str, Any], list[Message]]) -> None:
    scope, messages = request
    scope["headers"] = scope["headers"][:2]
    small = sum(len(each["body"]) for each in messages) <= limits_platform.PLAN_REQUEST_BYTES_MAX
    told = asyncio.run(ask(OURS, scope, [each | {"more_body": True} for each in messages]))
    assert bool(told) is not small
