"""The transports that go under httpx and httpx2 clients."""

import asyncio
import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self

from stormline.client.answer import Answer
from stormline.client.background import BACKGROUND, PulledBody
from stormline.client.config import Config, load_bundle
from stormline.client.costs import Costs
from stormline.client.flavours import flavour_of
from stormline.client.network import NetworkStatus, Told
from stormline.client.outside import REAL, Outside
from stormline.client.runtime import Runtime
from stormline.core import errors
from stormline.core.limits_diagnosis import DIAGNOSIS_NAT_LIMIT_S
from stormline.policy.activity import Activity
from stormline.policy.level import Quality

if TYPE_CHECKING:
    from httpx2 import AsyncBaseTransport, BaseTransport

    from stormline.client.configured import ForeignContext
    from stormline.client.feedback import Feedback
    from stormline.telemetry.diagnosis import Diagnosis, NatProgress
    from stormline.wire.bundle import Bundle
    from stormline.wire.plan import Home
else:
    # They hold no code that is needed here, and are no more httpx2's than httpx's: whoever has a client of either
    # module has loaded that one, and need not load the other.
    AsyncBaseTransport = BaseTransport = object

HOLD = "stormline.hold"
"""Request extension: a list that takes the call's trace; its owner then finishes the trace."""
_PORTS: Final = {"http": 80, "https": 443}
_INHERITED: Final[list[Runtime]] = []
"""What came over by `fork`: kept from being collected, as its sockets are the parent's."""


def make_config(config: Config | None, bundle: "Bundle | str | os.PathLike[str] | None") -> Config:
    """Join a config with a bundle given beside it."""
    config = config if config is not None else Config()
    if bundle is None and config.bundle is not None:
        return config
    return replace(config, bundle=load_bundle(bundle))


def run_request(runtime: Runtime, request: Any, body: Any) -> Coroutine[None, None, Answer]:
    """Run a request of either module on the runtime's loop.

    Raises:
        Exception: of the module, for a URL that is neither http nor https.
    """
    url = request.url
    scheme, target = url.scheme, url.raw_path
    if scheme not in _PORTS:
        raise flavour_of(request).unsupported(request)
    path = target.partition(b"?")[0].decode("ascii", "replace")
    host = url.raw_host.decode("ascii")
    extensions = request.extensions
    rule = None if runtime.rules is None else runtime.rule(request.method, host, target)
    trace = runtime.trace(
        method=request.method,
        host=host,
        path=url.path if "%" in path else path,
        business=str(extensions.get("stormline.business", "")),
        rule=rule,
    )
    hold = extensions.get(HOLD)
    if hold is not None:
        if hold:
            hold[-1].release()  # of the redirect before; its body has ended
        trace.held = True
        hold.append(trace)
    return runtime.execute(
        method=request.method,
        scheme=scheme,
        host=host,
        port=url.port or _PORTS[scheme],
        target=target,
        headers=tuple(request.headers.raw),
        body=body,
        extensions=extensions,
        trace=trace,
        rule=rule,
    )


class AsyncTransport(AsyncBaseTransport):
    """Goes under an asynchronous client: `httpx2.AsyncClient(transport=stormline.AsyncTransport())`, httpx the same.

    With a client bundle requests go by dispatch and the long connection; without one to the origin itself. Belongs to
    the event loop it is first used on; used again after that loop has been closed it starts anew on the next one.

    Args:
        bundle: client bundle or the path of one; None takes the file named by `STORMLINE_BUNDLE`, if any.
        config: further settings.
        verify: TLS trust for origins reached directly; None for the system's. The platform's roles are verified by
            the bundle's own CA, whatever stands here. A context is taken as it is, its ALPN too. A function that makes
            one for a sequence of ALPN names lets us offer HTTP/1.1 alone where HTTP/2 stalls.
        outside: the machine it runs on; another one in simulation.

    Raises:
        BundleError: the bundle cannot be used.
    """

    def __init__(
        self,
        bundle: "Bundle | str | os.PathLike[str] | None" = None,
        *,
        config: Config | None = None,
        verify: "ForeignContext | None" = None,
        outside: Outside = REAL,
    ) -> None:
        self._config = make_config(config, bundle)
        self._verify = verify
        self._outside = outside
        self._runtime: Runtime | None = None
        self._activity = Activity.FOREGROUND

    async def __aenter__(self) -> Self:
        """Make the transport ready, and give it; without `async with` it is made ready at its first request."""
        self.runtime()
        if self._config.http2:
            importlib.import_module("stormline.outbound.http2")  # now, and not while the first request waits
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close it; see `aclose`."""
        await self.aclose()

    @property
    def used(self) -> bool:
        """True where there is something to close."""
        return self._runtime is not None

    def runtime(self) -> Runtime:
        """Give the parts on the running loop, making them at first use.

        Raises:
            LocalProtocolError: no asyncio loop runs, or the transport belongs to another loop that still lives.
        """
        loop = _running_loop()
        runtime = self._runtime
        if runtime is not None and runtime.loop is loop:
            return runtime
        if runtime is not None and runtime.pid != os.getpid():
            _INHERITED.append(runtime)  # after a fork: the parent's, and not to be touched
        elif runtime is not None:
            if not runtime.loop.is_closed():
                raise errors.LocalProtocolError(
                    "this transport belongs to another event loop; use one transport per loop"
                )
            runtime.abandon()
        self._runtime = Runtime(self._config, foreign_context=self._verify, outside=self._outside)
        self._runtime.set_activity(self._activity)
        return self._runtime

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request of httpx2 or httpx; give a response of the same module.

        Raises:
            TransportError: of `stormline.errors` and of the caller's module at once.
        """
        flavour = flavour_of(request)
        body = flavour.body_in_memory(request)
        try:
            answer = await run_request(self.runtime(), request, body if body is not None else request.stream)
        except (errors.TransportError, errors.LocalProtocolError) as error:
            raise flavour.convert(error, request) from error
        return flavour.response(answer, request)

    def network_changed(self) -> None:
        """Say that the device has another network now, or is back on one: WiFi left, cellular taken, woken from sleep.

        Connections from addresses that this machine no longer has are closed at once, and what was under way on them
        is asked again where it may be; no other connection gets a new request before it has shown that it lives.
        Without this call the same is found out by waiting. To be called on the event loop the transport is used on;
        harmless at any time.
        """
        if self._runtime is not None and not self._runtime.loop.is_closed():
            self._runtime.network_changed()

    async def preconnect(self, url: str) -> bool:
        """Have a connection for the origin of `url`: name, TCP, TLS and HTTP/2's settings, at most ten seconds.

        For what is likely to be asked next. One is made by the means a request would try first, and none where one
        stands or is being made, nor while the app is in the background. Nothing is asked of the origin.

        Returns:
            True where a connection stands. Raises nothing for a network or URL that does not allow it: False.
        """
        return await self.runtime().preconnector.open(url)

    async def diagnose(
        self,
        url: str | None = None,
        *,
        trace: bool = True,
        nat: bool = False,
        nat_limit_s: float = DIAGNOSIS_NAT_LIMIT_S,
        nat_told: "Callable[[NatProgress], None] | None" = None,
        plain_url: str | None = None,
        plain_sha256: str = "",
    ) -> "Diagnosis":
        """Find out what is wrong with the network, or with the way to an origin; see `AsyncClient.diagnose`."""
        return await self.runtime().diagnostics().diagnose(
            url, trace=trace, nat=nat, nat_limit_s=nat_limit_s, nat_told=nat_told,
            plain_url=plain_url, plain_sha256=plain_sha256,
        )  # fmt: skip

    def forget(self) -> None:
        """Forget what was learned of networks and hosts, also what `Config.store` keeps of it.

        The device token and the plan stay. To be called on the event loop the transport is used on.
        """
        if self._runtime is not None and not self._runtime.loop.is_closed():
            self._runtime.forget()
        elif self._config.store is not None:
            from stormline.client.memory import NetworkFiles

            NetworkFiles(self._config.store).forget()

    async def feedback(self, text: str) -> "Feedback":
        """Send what a user says of the app, with the last calls that failed, to the platform's APM.

        By any way there is. Where there is none it is kept (on disk where the client has a folder, at most
        `limits_netlog.FEEDBACK_KEPT_MAX`) and sent when there is one again, once; also after a restart. Takes
        `limits_netlog.FEEDBACK_SEND_S` at most. Cancelled, it stays kept.

        Args:
            text: 1 to `limits_netlog.FEEDBACK_TEXT_CHARS_MAX` characters; it is sent as it is.

        Returns:
            Its id, and whether it was sent or is kept.

        Raises:
            ConfigError: the text has another length, or there is neither a platform nor a folder.
        """
        return await self.runtime().feedback(text)

    def set_activity(self, activity: Activity | str) -> None:
        """Say what the user does with the app: `foreground` (from the start), `background` or `inactive`.

        What nobody waits for is put off in the background, and nothing is made on suspicion: see `policy.activity`.
        Requests are served at once in every state. To be called on the event loop the transport is used on.

        Raises:
            ConfigError: there is no such activity.
        """
        try:
            self._activity = Activity(activity)
        except ValueError:
            raise errors.ConfigError(f"activity {activity!r}: expected one of {', '.join(Activity)}") from None
        if self._runtime is not None and not self._runtime.loop.is_closed():
            self._runtime.set_activity(self._activity)

    @property
    def home(self) -> "Home | None":
        """The unit in which the data of the logged-in user lives, and the epoch of that word, as dispatch signed it.

        None where the device token names no user, where dispatch has no units or was not asked yet, and once the word
        has expired.
        """
        return self._runtime.home if self._runtime is not None else None

    @property
    def costs(self) -> Costs:
        """What it has cost so far: bytes, connections, wake-ups, hedges. Counted anew for each event loop."""
        return self._runtime.costs if self._runtime is not None else Costs()

    async def resolve(self, host: str) -> tuple[str, ...]:
        """Find the IP addresses of a name before it is needed; the next request to it does not wait for them.

        Raises:
            ResolveError: nobody has one.
            LocalProtocolError: as `runtime`.
        """
        return await self.runtime().resolve(host)

    @property
    def quality(self) -> Quality:
        """How good the network is: level, for how long it has held, confidence, and what speaks for it in words.

        It is that of the network which calls use now: once they have left a dead one for another way, of that way.
        Costs no packet: it follows from the requests that are made anyway, so it is unknown before the first and a
        minute after the last. To be asked for on the event loop the transport is used on.
        """
        if self._runtime is None or self._runtime.loop.is_closed():
            return Quality()
        return self._runtime.quality

    @property
    def network(self) -> NetworkStatus:
        """What is known of the network now: what it is, and how it does, with a hint that a person can act on.

        To be read on the event loop the transport is used on; makes the transport ready where it is not yet.
        """
        return self.runtime().network.status

    def on_network(self, told: Told) -> Callable[[], None]:
        """Have `told` called on the event loop with a `NetworkStatus`, when the network or the verdict on it changes.

        Returns:
            What ends it.
        """
        return self.runtime().network.on_change(told)

    async def aclose(self) -> None:
        """Send what telemetry is left, and close every connection.

        Raises:
            LocalProtocolError: called on another event loop than the one it is used on, while that one lives.
        """
        runtime = self._runtime
        if runtime is None:
            return
        if runtime.loop.is_closed() or runtime.pid != os.getpid():
            runtime.abandon()
        elif runtime.loop is _running_loop():
            await runtime.aclose()
        else:
            raise errors.LocalProtocolError("this transport belongs to another event loop; close it there")
        self._runtime = None


class Transport(BaseTransport):
    """Goes under a synchronous client: `httpx2.Client(transport=stormline.Transport())`, httpx the same.

    All synchronous transports of a process share one background thread with an event loop. Safe to use from any
    number of threads; after a fork the child starts its own.

    Args: as `AsyncTransport`.
    """

    def __init__(
        self,
        bundle: "Bundle | str | os.PathLike[str] | None" = None,
        *,
        config: Config | None = None,
        verify: "ForeignContext | None" = None,
    ) -> None:
        self._inner = AsyncTransport(config=make_config(config, bundle), verify=verify)

    def __enter__(self) -> Self:
        """Give the transport; it is made ready at its first request."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close it; see `close`."""
        self.close()

    def handle_request(self, request: Any) -> Any:
        """Send a request of httpx2 or httpx; give a response of the same module.

        Raises:
            TransportError: of `stormline.errors` and of the caller's module at once.
        """
        flavour = flavour_of(request)
        whole = flavour.body_in_memory(request)
        pulled = PulledBody(request.stream) if whole is None else None
        wait = functools.partial(BACKGROUND.run, body=pulled)
        try:
            answer = wait(self._run(request, whole if pulled is None else pulled))
        except (errors.TransportError, errors.LocalProtocolError) as error:
            raise flavour.convert(error, request) from error
        return flavour.response(answer, request, wait)

    async def _run(self, request: Any, body: Any) -> Answer:
        return await run_request(self._inner.runtime(), request, body)

    def network_changed(self) -> None:
        """Say that the device has another network now; see `AsyncTransport.network_changed`. Any thread may call it."""
        if self._inner.used:
            BACKGROUND.run(self._changed())

    async def _changed(self) -> None:
        self._inner.network_changed()

    def preconnect(self, url: str) -> bool:
        """Have a connection for the origin of `url`; see `AsyncTransport.preconnect`. Any thread may call it."""
        return BACKGROUND.run(self._inner.preconnect(url))

    def diagnose(
        self,
        url: str | None = None,
        *,
        trace: bool = True,
        nat: bool = False,
        nat_limit_s: float = DIAGNOSIS_NAT_LIMIT_S,
        nat_told: "Callable[[NatProgress], None] | None" = None,
        plain_url: str | None = None,
        plain_sha256: str = "",
    ) -> "Diagnosis":
        """Find out what is wrong; see `AsyncClient.diagnose`. Any thread may call it."""
        return BACKGROUND.run(
            self._inner.diagnose(
                url, trace=trace, nat=nat, nat_limit_s=nat_limit_s, nat_told=nat_told,
                plain_url=plain_url, plain_sha256=plain_sha256,
            )
        )  # fmt: skip

    def forget(self) -> None:
        """Forget what was learned of networks and hosts; see `AsyncTransport.forget`. Any thread may call it."""
        BACKGROUND.run(self._forgotten())

    async def _forgotten(self) -> None:
        self._inner.forget()

    def feedback(self, text: str) -> "Feedback":
        """Send what a user says of the app; see `AsyncTransport.feedback`. Any thread may call it."""
        return BACKGROUND.run(self._said(text))

    async def _said(self, text: str) -> "Feedback":
        return await self._inner.feedback(text)

    def set_activity(self, activity: Activity | str) -> None:
        """Say what the user does with the app; see `AsyncTransport.set_activity`. Any thread may call it."""
        if self._inner.used:
            BACKGROUND.run(self._behave(activity))
        else:
            self._inner.set_activity(activity)

    async def _behave(self, activity: Activity | str) -> None:
        self._inner.set_activity(activity)

    @property
    def home(self) -> "Home | None":
        """Where the user belongs; see `AsyncTransport.home`."""
        return self._inner.home

    @property
    def costs(self) -> Costs:
        """What it has cost so far; see `AsyncTransport.costs`."""
        return self._inner.costs

    @property
    def quality(self) -> Quality:
        """How good the network is; see `AsyncTransport.quality`. Any thread may ask."""
        return BACKGROUND.run(self._judged()) if self._inner.used else Quality()

    async def _judged(self) -> Quality:
        return self._inner.quality

    @property
    def network(self) -> NetworkStatus:
        """What is known of the network now; see `AsyncTransport.network`. Any thread may ask."""
        return BACKGROUND.run(self._status())

    async def _status(self) -> NetworkStatus:
        return self._inner.network

    def on_network(self, told: Told) -> Callable[[], None]:
        """Have `told` called when that changes, in stormline's own thread; see `AsyncTransport.on_network`."""
        end = BACKGROUND.run(self._on_network(told))
        loop = BACKGROUND.loop()

        def end_there() -> None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(end)

        return end_there

    async def _on_network(self, told: Told) -> Callable[[], None]:
        return self._inner.on_network(told)

    def close(self) -> None:
        """Send what telemetry is left, and close every connection."""
        if self._inner.used:
            BACKGROUND.run(self._inner.aclose())


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise errors.LocalProtocolError(
            "stormline's asynchronous transport needs asyncio (trio is not supported)"
        ) from None
