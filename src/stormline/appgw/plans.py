"""Plans through the long connection: the gate `dispatch`, and how a unit's scheduling centres tell of changed plans.

A centre publishes `Changes` on the unit's subject `plan.notice`; every gateway of the unit hears them and tells its
sessions (`gateway.notices`). A device's question goes the other way, as a request on `plan.ask`, to one of the unit's
centres.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Final, Protocol

import msgspec

from stormline.appgw import identity, subjects
from stormline.appgw.port import Exchange
from stormline.core import errors, limits, limits_platform
from stormline.core.codes import Code
from stormline.core.errors import CallError
from stormline.engine.port import Message, reply_error

_log = logging.getLogger("stormline.appgw")

NOTICES: Final = "plan.notice"
"""Last part of the subject (`subjects.of_unit`) on which changes are told."""
QUESTIONS: Final = "plan.ask"
"""Last part of the subject on which questions are answered."""
QUEUE: Final = "dispatch"
"""Queue group of the centres of a unit: one of them gets each question."""
ADDRESS_HEADER: Final = "Stormline-Address"
"""Header of a question: the IP address the device's connection comes from, as its gateway sees it."""
METHOD: Final = "plan"
"""The one method of the gate."""

_Version = Annotated[int, msgspec.Meta(ge=0, le=limits.PLAN_VERSION_MAX)]
_Host = Annotated[str, msgspec.Meta(max_length=limits.NOTICE_HOST_CHARS_MAX)]
_Hosts = Annotated[tuple[_Host, ...], msgspec.Meta(max_length=limits.PLAN_HOSTS_MAX)]


class PlanChange(msgspec.Struct, frozen=True, array_like=True):
    """One app's plan changed. Fields are only ever added at the end, with a default.

    Attributes:
        app: application id.
        version: of the rules in which it changed.
        since: version of its last change before, 0 where that is not known. Who knows of exactly that one may rely on
            `hosts`; equal to `version` where only the standing of endpoints changed.
        hosts: hosts whose plan changed since then; empty where any may have.
    """

    app: str
    version: _Version
    since: _Version = 0
    hosts: _Hosts = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(
    Annotated[tuple[PlanChange, ...], msgspec.Meta(max_length=limits_platform.NOTICE_CHANGES_MAX)]
)


def join_hosts(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Join lists of changed hosts, in which empty means any; so does a joined one that would be too long."""
    joined: set[str] = set()
    for hosts in parts:
        if not hosts:
            return ()
        joined.update(hosts)
    return tuple(sorted(joined)) if len(joined) <= limits.PLAN_HOSTS_MAX else ()


def encode_changes(changes: Iterable[PlanChange]) -> Iterator[bytes]:
    """Give messages of at most `limits_platform.NOTICE_CHANGES_MAX` changes each."""
    batch: list[PlanChange] = []
    for change in changes:
        batch.append(change)
        if len(batch) == limits_platform.NOTICE_CHANGES_MAX:
            yield _encoder.encode(batch)
            batch = []
    if batch:
        yield _encoder.encode(batch)


def decode_changes(data: bytes) -> tuple[PlanChange, ...]:
    """Read one message of `encode_changes`.

    Raises:
        ValueError: it is not one.
    """
    return _decoder.decode(data)


class Requester(Protocol):
    """What the gate needs of the engine."""

    async def request(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, timeout_s: float
    ) -> Message:
        """See `engine.port.Engine.request`."""
        ...


class DispatchGate:
    """Gate `dispatch`, method `plan`: the body is a `wire.plan.PlanRequest` as JSON, the answer's body the signed plan.

    The gate looks at neither: the question is the centre's to check, the answer the device's. The centre gets
    `Stormline-App` and so on (`appgw.identity`) and `Stormline-Address`.

    | what happens                                | code             | maybe delivered        |
    |---------------------------------------------|------------------|------------------------|
    | another method                              | CALL_NOT_FOUND   | no                     |
    | question too large, by us or the centre     | CALL_TOO_LARGE   | no                     |
    | question malformed                          | CALL_BAD_REQUEST | no                     |
    | the app is not known, the question refused  | CALL_REFUSED     | no                     |
    | the engine is away; no centre; overloaded   | CALL_UNAVAILABLE | as the engine knows    |
    | no answer by the deadline                   | CALL_DEADLINE    | yes                    |
    | a fault of the centre                       | CALL_FAILED      | yes                    |
    """

    name: Final = "dispatch"

    def __init__(self, engine: Requester, *, unit: str) -> None:
        self._engine = engine
        self._subject = subjects.of_unit(unit, QUESTIONS)

    async def handle(self, exchange: Exchange) -> None:
        """See `appgw.port.Gate.handle`."""
        if exchange.method != METHOD:
            raise CallError(Code.CALL_NOT_FOUND, f"the gate dispatch has no method {exchange.method[:40]!r}")
        deadline = min(exchange.deadline, asyncio.get_running_loop().time() + limits_platform.DISPATCH_GATE_TIMEOUT_S)
        body = exchange.whole_body()
        if body is None:
            body = await self._gather(exchange, deadline)
        if len(body) > limits_platform.PLAN_REQUEST_BYTES_MAX:
            raise _too_large()
        headers = dict(identity.headers(exchange.identity))
        if exchange.peer:
            headers[ADDRESS_HEADER] = exchange.peer
        answer = await self._ask(body, headers, deadline)
        problem = reply_error(answer)
        if problem is not None:
            raise _said_no(*problem)
        if len(answer.data) > limits.PLAN_BYTES_MAX:
            raise CallError(Code.CALL_FAILED, "the centre's answer is larger than a plan may be", maybe_delivered=True)
        await exchange.reply(0, (), answer.data)

    async def _gather(self, exchange: Exchange, deadline: float) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout_at(deadline):
                async for chunk in exchange.body():
                    body += chunk
                    if len(body) > limits_platform.PLAN_REQUEST_BYTES_MAX:
                        raise _too_large()
        except TimeoutError as error:
            raise CallError(Code.CALL_DEADLINE, "the deadline passed before the question was whole") from error
        return bytes(body)

    async def _ask(self, body: bytes, headers: dict[str, str], deadline: float) -> Message:
        timeout_s = deadline - asyncio.get_running_loop().time()
        if timeout_s <= 0:
            raise CallError(Code.CALL_DEADLINE, "the deadline passed before the question was whole")
        try:
            return await self._engine.request(self._subject, body, headers, timeout_s=timeout_s)
        except errors.EngineTimeout as error:
            raise CallError(
                Code.CALL_DEADLINE, "no scheduling centre answered in time", maybe_delivered=True
            ) from error
        except errors.EngineError as error:  # also where nobody listens: a centre may be back in a moment
            _log.info("plan of app %s: %s", headers.get("Stormline-App", ""), error)
            raise CallError(
                Code.CALL_UNAVAILABLE,
                "no scheduling centre can be asked from here now",
                retry_after_s=limits_platform.CALL_RETRY_AFTER_S,
                maybe_delivered=error.maybe_delivered,
            ) from error


def _too_large() -> CallError:
    return CallError(Code.CALL_TOO_LARGE, f"a question has at most {limits_platform.PLAN_REQUEST_BYTES_MAX} bytes here")


def _said_no(status: int, text: str) -> CallError:
    match status:
        case 400:
            return CallError(Code.CALL_BAD_REQUEST, text)
        case 413:
            return CallError(Code.CALL_TOO_LARGE, text)
        case 503:
            return CallError(Code.CALL_UNAVAILABLE, text, retry_after_s=limits_platform.CALL_RETRY_AFTER_S)
        case _ if 400 <= status < 500:
            return CallError(Code.CALL_REFUSED, text)
        case _:
            return CallError(Code.CALL_FAILED, f"{status} {text}".rstrip(), maybe_delivered=True)
