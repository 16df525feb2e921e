"""`Service`: a business service in a few lines.

    import stormline

    service = stormline.Service("greeter", version="1.0.0")

    @service.method("greeter.hello")
    async def hello(call: stormline.ServiceCall) -> str:
        return f"Hello {call.params}, on {call.device}"

    service.run()

It keeps the conventions that a service in any language may keep by itself (docs/howto/write-an-rpc-service.md): NATS
micro-services, so that `nats micro` finds it, its version and its counts. Uses nothing of the platform's insides.
"""

import asyncio
import contextlib
import inspect
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import msgspec
import nats.micro
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.micro.request import Request
from nats.micro.service import ServiceConfig

from stormline.core import errors, ids
from stormline.core import limits_platform as limits
from stormline.core import limits_service as bounds
from stormline.core.values import Secret
from stormline.engine.nats_link import FAILURES, CancelGuard, shut
from stormline.net.clock import SystemRng

_log = logging.getLogger("stormline.service")
CANCEL: Final = "rpc.CANCEL"
"""Below it, by method, the ids of calls whose callers are gone. Capitals, so that no method can have that name."""


@dataclass(frozen=True, slots=True)
class ServiceCall:
    """One call, as a handler sees it.

    Attributes:
        method: what is called.
        params: the argument: what JSON says, or what the method was registered with.
        app: the caller's app, checked by the platform.
        device: its device.
        user: its user, empty where nobody is logged in.
        deadline_s: seconds the caller still waited when it asked, None where it did not say. The handler is cancelled
            then, as it is when the caller goes away.
        key: the idempotency key, empty for none: the same one of the same user is the same call again.
        headers: all headers.
    """

    method: str
    params: Any = field(repr=False)
    app: str
    device: str
    user: str
    deadline_s: float | None
    key: str
    headers: Mapping[str, str] = field(repr=False)


Handler = Callable[[ServiceCall], Any | Awaitable[Any]]
_H = TypeVar("_H", bound=Handler)


@dataclass(frozen=True, slots=True)
class _Method:
    name: str
    handler: Handler
    decoder: msgspec.json.Decoder[Any]


class Service:
    """A service: named methods on the platform's bus.

    Several processes of one name share the calls. Handlers run side by side; one that is cancelled, because the caller
    went away or its deadline passed, has to leave things in order as any task has.

    Args:
        name: letters, digits, `-` and `_`; what discovery and the queue group call it.
        version: a semantic version (semver.org).
        description: for people.
        at_once: calls under way; one more is answered 503.

    Raises:
        ConfigError: a name or version that NATS services do not have, or `at_once` below 1.
    """

    def __init__(
        self, name: str, *, version: str, description: str = "", at_once: int = bounds.SERVICE_CALLS_AT_ONCE
    ) -> None:
        try:
            self._config = ServiceConfig(name=name, version=version, description=description or None)
        except ValueError as error:
            raise errors.ConfigError(f"service {name!r} {version!r}: {error}") from error
        if at_once < 1:
            raise errors.ConfigError(f"at_once={at_once!r}: expected at least 1")
        self._at_once = at_once
        self._rng = SystemRng()
        self._methods: dict[str, _Method] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._serial = 0
        self.ready = asyncio.Event()
        """Set while it answers calls."""

    def method(self, name: str, params: Any = Any) -> Callable[[_H], _H]:
        """Register a handler of calls, plain or async; it gives what JSON can carry.

        A `ServiceError` that it raises is told to the caller with its status and text. Any other exception is answered
        500 with its type's name, and logged here.

        Args:
            name: dotted name, `orders.create`.
            params: what the argument is decoded into: a `msgspec.Struct`, a dataclass, any annotation `msgspec` knows.
                What does not fit is answered 400 and never reaches the handler.

        Raises:
            ConfigError: no method's name, or one that is taken.
        """
        if ids.check_method(name) in self._methods:
            raise errors.ConfigError(f"service {self._config.name}: {name} is registered already")

        def register(handler: _H) -> _H:
            self._methods[name] = _Method(name, handler, msgspec.json.Decoder(params))
            return handler

        return register

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM: `serve` in a loop of its own, with `NATS_URL`, `NATS_USER` (default `biz`) and
        `NATS_PASSWORD` of the environment.

        Raises:
            ConfigError: one is missing.
        """
        missing = [name for name in ("NATS_URL", "NATS_PASSWORD") if not os.environ.get(name)]
        if missing:
            raise errors.ConfigError(f"service {self._config.name}: set {' and '.join(missing)} in the environment")
        environment = os.environ
        asyncio.run(
            self._until_signal(
                environment["NATS_URL"], environment.get("NATS_USER", "biz"), Secret(environment["NATS_PASSWORD"])
            )
        )

    async def _until_signal(self, url: str, user: str, password: Secret) -> None:
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await self.serve(url, user=user, password=password, stop=stop)

    async def serve(
        self, url: str, *, user: str = "biz", password: Secret | str, stop: asyncio.Event | None = None
    ) -> None:
        """Answer calls until `stop` is set or the task is cancelled, however often NATS comes and goes.

        After `stop` no new call is taken, and those under way get `SERVICE_DRAIN_S`. After a cancellation they end at
        once.

        Args:
            url: address of NATS, or several with commas.
            user: account's user.
            password: its password.
            stop: set to end it.
        """
        if not isinstance(password, Secret):  # of a Secret another would take the mask
            password = Secret(password)
        guard = CancelGuard()
        stopping = asyncio.create_task((stop or asyncio.Event()).wait(), name=f"{self._config.name} stop")
        attempt = 0
        try:
            while not stopping.done():
                try:
                    await self._serve(url, user, password, guard, stopping)
                    attempt = 0
                    if not stopping.done():
                        _log.warning("%s: lost NATS at %s", self._config.name, url)
                except FAILURES as error:
                    attempt += 1
                    level = logging.WARNING if attempt == 1 else logging.DEBUG
                    _log.log(level, "%s: no NATS yet: %r", self._config.name, error)
                guard.check()
                whole_s = limits.ENGINE_RECONNECT_PAUSE_S * 2.0 ** min(attempt, 16)
                pause_s = min(whole_s, limits.ENGINE_RECONNECT_PAUSE_MAX_S)
                spread = 0.5 + self._rng.random() / 2
                await asyncio.wait([stopping], timeout=pause_s * spread)
        finally:
            stopping.cancel()
            for task in self._under_way.values():
                task.cancel()
            await asyncio.gather(stopping, *self._under_way.values(), return_exceptions=True)

    async def _serve(
        self, url: str, user: str, password: Secret, guard: CancelGuard, stopping: "asyncio.Task[bool]"
    ) -> None:
        """Be on NATS for one connection's life."""
        client, gone = Client(), asyncio.Event()

        async def on_error(error: Exception) -> None:
            _log.debug("%s: %r", self._config.name, error)

        async def on_gone() -> None:
            gone.set()

        try:
            async with asyncio.timeout(limits.ENGINE_CONNECT_TIMEOUT_S):
                await client.connect(
                    url.split(","),
                    name=self._config.name,
                    user=user,
                    password=password.reveal(),
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=limits.ENGINE_CONNECT_TIMEOUT_S,
                    ping_interval=limits.ENGINE_PING_S,
                    max_outstanding_pings=limits.ENGINE_PINGS_MAX,
                    error_cb=on_error,
                    disconnected_cb=on_gone,
                    closed_cb=on_gone,
                )
                service = await self._register(client)
            guard.check()
            self.ready.set()
            _log.info("%s %s: answering on NATS at %s", self._config.name, self._config.version, url)
            lost = asyncio.create_task(gone.wait(), name=f"{self._config.name} lost")
            try:
                while client.is_connected and not stopping.done():  # looked at, too: the client does not always tell
                    await asyncio.wait([lost, stopping], timeout=limits.ENGINE_LOOK_S, return_when="FIRST_COMPLETED")
            finally:
                lost.cancel()
            if stopping.done() and client.is_connected:
                self.ready.clear()
                await service.stop()  # its subscriptions are gone: nothing new comes
                if self._under_way:
                    await asyncio.wait(self._under_way.values(), timeout=bounds.SERVICE_DRAIN_S)
                for task in self._under_way.values():
                    task.cancel()
                await asyncio.gather(*self._under_way.values(), return_exceptions=True)
                await client.flush(limits.ENGINE_CONNECT_TIMEOUT_S)
        finally:
            self.ready.clear()
            await shut(client)

    async def _register(self, client: Client) -> nats.micro.service.Service:
        service = await nats.micro.add_service(client, self._config)
        for method in self._methods.values():
            name = method.name.replace(".", "-")

            async def take(request: Request, method: _Method = method) -> None:
                self._take(request, method)

            await service.add_endpoint(
                name=name, subject=f"rpc.{method.name}", queue_group=self._config.name, handler=take
            )
            await client.subscribe(f"{CANCEL}.{method.name}", cb=self._cancelled)
        await client.flush(limits.ENGINE_CONNECT_TIMEOUT_S)  # registered when we say so
        return service

    async def _cancelled(self, message: Msg) -> None:
        """A caller is gone; its call may be another process's."""
        task = self._under_way.get(message.data.decode("ascii", "replace"))
        if task is not None:
            task.cancel()

    def _take(self, request: Request, method: _Method) -> None:
        """Begin a call. The client gives messages one at a time, so the work is a task of its own."""
        self._serial += 1
        call_id = (request.headers or {}).get("Stormline-Call") or f"#{self._serial}"
        busy = len(self._under_way) >= self._at_once
        work = _refuse(request, "503", "busy") if busy else self._answer(request, method)
        task = asyncio.create_task(work, name=f"call {method.name}")
        if busy or call_id in self._under_way:
            call_id = f"#{self._serial}"
        self._under_way[call_id] = task
        task.add_done_callback(lambda _: self._under_way.pop(call_id, None))

    async def _answer(self, request: Request, method: _Method) -> None:
        try:
            call = _read(request, method)
            async with asyncio.timeout(call.deadline_s) as timeout:
                result = method.handler(call)
                if inspect.isawaitable(result):
                    result = await result
            data = msgspec.json.encode(result)
        except errors.ServiceError as error:
            await _refuse(request, str(error.status), error.reason)
        except asyncio.CancelledError:  # nobody waits, or the process ends: the work may have been done
            with contextlib.suppress(*FAILURES):
                await _refuse(request, "500", "cancelled")
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and timeout.expired():
                await _refuse(request, "504", "the caller's deadline passed while it worked")
                return
            _log.exception("%s failed", method.name)
            await _refuse(request, "500", type(error).__name__)
        else:
            with contextlib.suppress(*FAILURES):  # the caller hears that the bus is away
                await request.respond(data)


def _read(request: Request, method: _Method) -> ServiceCall:
    headers = request.headers or {}
    text = headers.get("Stormline-Deadline-Ms")
    deadline_s = None
    if text is not None:
        if not (text.removeprefix("-").isdigit() and text.isascii()):
            raise errors.ServiceError(400, "Stormline-Deadline-Ms: expected milliseconds")
        deadline_s = int(text[:18]) / 1000
        if deadline_s <= 0:
            raise errors.ServiceError(408, "the caller's deadline has passed; nothing was done")
    try:
        params = method.decoder.decode(request.data) if request.data else msgspec.convert(None, method.decoder.type)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise errors.ServiceError(400, f"parameters: {error}") from error
    names = ("Stormline-App", "Stormline-Device", "Stormline-User")
    app, device, user = (unquote(headers.get(name, "")) for name in names)
    return ServiceCall(method.name, params, app, device, user, deadline_s, headers.get("Idempotency-Key", ""), headers)


async def _refuse(request: Request, status: str, reason: str) -> None:
    with contextlib.suppress(*FAILURES):
        await request.respond_error(status, " ".join(reason.split())[:500])
