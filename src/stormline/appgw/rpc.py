"""The RPC gate: a device's call becomes one engine request to the service that listens on `rpc.<method>`."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Final, Protocol

from stormline.appgw import identity
from stormline.appgw.port import Exchange
from stormline.core import errors, ids, limits, limits_platform
from stormline.core.codes import Code
from stormline.core.errors import CallError
from stormline.engine.port import Message, reply_error

_log = logging.getLogger("stormline.appgw")

KEY_CHARS_MAX: Final = 255
"""An idempotency key; the draft of the header (draft-ietf-httpapi-idempotency-key-header) leaves it to the server."""


class Requester(Protocol):
    """What this gate needs of the engine."""

    async def request(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, timeout_s: float
    ) -> Message:
        """See `engine.port.Engine.request`."""
        ...

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """See `engine.port.Engine.publish`."""
        ...


class RpcGate:
    """Gate `rpc`. The method names the subject, the body is the argument, the answer's body the result, status 0.

    The service gets `Stormline-App`, `Stormline-Device`, `Stormline-User` (`appgw.identity`), `Stormline-Deadline-Ms`
    (milliseconds the caller still waits), `Stormline-Call` and, where the caller gave one, `Idempotency-Key`. Where the
    caller goes away first, the id of `Stormline-Call` is sent to `rpc.CANCEL.<method>`. A service says no in the manner
    of NATS services: `Nats-Service-Error-Code` and `Nats-Service-Error`.

    | what happens                                  | code             | maybe delivered              |
    |-----------------------------------------------|------------------|------------------------------|
    | malformed method or key                       | CALL_BAD_REQUEST | no                           |
    | body too large                                | CALL_TOO_LARGE   | no                           |
    | nobody listens                                | CALL_NOT_FOUND   | no                           |
    | the engine is away; the service is overloaded | CALL_UNAVAILABLE | as the engine knows; no      |
    | no answer by the deadline                     | CALL_DEADLINE    | yes                          |
    | the service says no                           | CALL_FAILED      | only for codes of 500 and up |
    """

    name: Final = "rpc"

    def __init__(self, engine: Requester) -> None:
        self._engine = engine
        self._gathered = 0
        self._serial = 0

    async def handle(self, exchange: Exchange) -> None:
        """See `appgw.port.Gate.handle`."""
        try:
            method = ids.check_method(exchange.method)
        except errors.ConfigError as error:
            raise CallError(Code.CALL_BAD_REQUEST, str(error)) from error
        headers = dict(identity.headers(exchange.identity))
        self._serial += 1
        headers["Stormline-Call"] = f"{exchange.identity.session}.{self._serial}"
        key = _idempotency_key(exchange)
        if key:
            headers["Idempotency-Key"] = key
        body = exchange.whole_body()
        if body is not None:
            await self._answer(exchange, method, body, headers)
            return
        gathered = bytearray()
        try:
            await self._gather(exchange, gathered)
            await self._answer(exchange, method, bytes(gathered), headers)
        finally:
            self._gathered -= len(gathered)

    async def _gather(self, exchange: Exchange, body: bytearray) -> None:
        try:
            async with asyncio.timeout_at(exchange.deadline):
                async for chunk in exchange.body():
                    if len(body) + len(chunk) > limits.CALL_BODY_BYTES_MAX:
                        raise CallError(
                            Code.CALL_TOO_LARGE, f"an argument has at most {limits.CALL_BODY_BYTES_MAX} bytes"
                        )
                    if self._gathered + len(chunk) > limits_platform.RPC_GATHERED_BYTES_MAX:
                        raise CallError(
                            Code.CALL_UNAVAILABLE,
                            "too many large arguments at once",
                            retry_after_s=limits_platform.CALL_RETRY_AFTER_S,
                        )
                    body += chunk
                    self._gathered += len(chunk)
        except TimeoutError as error:
            raise CallError(Code.CALL_DEADLINE, "the deadline passed before the argument was whole") from error

    async def _answer(self, exchange: Exchange, method: str, body: bytes, headers: dict[str, str]) -> None:
        answer = await self._request(method, body, headers, exchange.deadline)
        problem = reply_error(answer)
        if problem is not None:
            raise _said_no(*problem)
        await exchange.reply(0, (), answer.data)

    async def _request(self, method: str, body: bytes, headers: dict[str, str], deadline: float) -> Message:
        timeout_s = deadline - asyncio.get_running_loop().time()
        if timeout_s <= 0:
            raise CallError(Code.CALL_DEADLINE, "the deadline passed before the call was whole")
        headers["Stormline-Deadline-Ms"] = str(round(timeout_s * 1000))
        try:
            return await self._engine.request(f"rpc.{method}", body, headers, timeout_s=timeout_s)
        except asyncio.CancelledError:
            with contextlib.suppress(errors.EngineError):  # the service goes on then, and nobody hears its answer
                await self._engine.publish(f"rpc.CANCEL.{method}", headers["Stormline-Call"].encode())
            raise
        except errors.NoResponders as error:
            raise CallError(Code.CALL_NOT_FOUND, f"no service answers {method}") from error
        except errors.EngineTimeout as error:
            raise CallError(Code.CALL_DEADLINE, f"{method}: no answer in time", maybe_delivered=True) from error
        except errors.EngineError as error:
            _log.info("rpc %s: %s", method, error)
            raise CallError(
                Code.CALL_UNAVAILABLE,
                "the service bus is away",
                retry_after_s=limits_platform.CALL_RETRY_AFTER_S,
                maybe_delivered=error.maybe_delivered,
            ) from error
        except errors.ConfigError as error:  # all but the size has been checked above
            raise CallError(Code.CALL_TOO_LARGE, str(error)) from error


def _idempotency_key(exchange: Exchange) -> str:
    keys = [value for name, value in exchange.headers if name.lower() == "idempotency-key"]
    if not keys:
        return ""
    key = keys[0]
    if len(keys) > 1 or not 1 <= len(key) <= KEY_CHARS_MAX or not (key.isascii() and key.isprintable()) or " " in key:
        raise CallError(
            Code.CALL_BAD_REQUEST, f"Idempotency-Key: expected one of 1 to {KEY_CHARS_MAX} printable ASCII characters"
        )
    return key


def _said_no(code: int, text: str) -> CallError:
    if code == 503:
        return CallError(
            Code.CALL_UNAVAILABLE, f"503 {text}".rstrip(), retry_after_s=limits_platform.CALL_RETRY_AFTER_S
        )
    return CallError(Code.CALL_FAILED, f"{code} {text}".rstrip(), maybe_delivered=code >= 500)
