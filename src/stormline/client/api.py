"""`AsyncClient` and `Client`: httpx2 clients with stormline underneath, and what only stormline can do on top."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx2

from stormline.client.channel import Channel
from stormline.client.config import Config
from stormline.client.configured import ForeignContext
from stormline.client.costs import Costs
from stormline.client.masking import mask_logger
from stormline.client.network import NetworkStatus, Told
from stormline.client.outside import REAL, Outside
from stormline.client.rules import Parse
from stormline.client.trace import CallTrace
from stormline.client.transport import HOLD, AsyncTransport, Transport, make_config
from stormline.core import errors
from stormline.core.limits_diagnosis import DIAGNOSIS_NAT_LIMIT_S
from stormline.core.phase import Phase
from stormline.core.values import Secret
from stormline.policy.activity import Activity
from stormline.policy.level import Quality
from stormline.wire.bundle import Bundle

if TYPE_CHECKING:
    from stormline.client.feedback import Feedback
    from stormline.telemetry.diagnosis import Diagnosis, NatProgress
    from stormline.wire.plan import Home


class AsyncClient(httpx2.AsyncClient):
    """An `httpx2.AsyncClient` whose requests go by stormline. Lines of httpx2's log are masked; see `MaskUrls`.

    Args:
        bundle: client bundle or the path of one; None takes the file named by `STORMLINE_BUNDLE`, if any.
        config: further settings.
        parse: asked for its verdict on each whole answer, for the statistics; an exception of it counts as False and
            is not raised. Answers that are streamed are not asked about: see `mark_parsed`. A rule's own comes first.
        verify: TLS trust for origins reached directly.
        outside: the machine it runs on; another one in simulation.
        **options: as `httpx2.AsyncClient`, without `transport` and `mounts`; the default of `timeout` is the config's.
            `proxy` and `trust_env` take the place of the config's.

    Raises:
        BundleError: the bundle cannot be used.
        ConfigError: an option would lead requests past stormline.
    """

    def __init__(
        self,
        bundle: Bundle | str | os.PathLike[str] | None = None,
        *,
        config: Config | None = None,
        parse: Parse | None = None,
        verify: ForeignContext | None = None,
        outside: Outside = REAL,
        **options: Any,
    ) -> None:
        self._parse = parse
        config = with_proxy(make_config(config, bundle), options)
        self._storm = AsyncTransport(config=config, verify=verify, outside=outside)
        mask_logger("httpx2")
        super().__init__(transport=self._storm, **_options(options, config))

    async def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        """Send a request; see `httpx2.AsyncClient.send`."""
        held: list[CallTrace] = []
        request.extensions = {**request.extensions, HOLD: held}
        try:
            response = await super().send(request, stream=stream, **options)
        except BaseException:
            finish(held, None, None)
            raise
        finish(held, None if stream else response, self._parse)
        return response

    def network_changed(self) -> None:
        """Say that the device has another network now; see `AsyncTransport.network_changed`."""
        self._storm.network_changed()

    async def preconnect(self, url: str) -> bool:
        """Have a connection for the origin of `url`; see `AsyncTransport.preconnect`."""
        return await self._storm.preconnect(url)

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
        """Find out what is wrong with the network, or with the way to an origin, within ten seconds.

        Interfaces, routes, the router, names by every source, TCP and TLS to each address, HTTP, QUIC, login pages,
        proxy, clock, the way and its packet size are looked at side by side, over sockets of its own; what it needs
        privileges for and has not, it says. The verdict comes with one hint that a person can act on. It is reported
        where there is a platform and `Config.report` is on.

        Args:
            url: asked about, by one GET of it; None: that of the last call that failed, without its query, else the
                network alone.
            trace: ask the routers on the way, and for the size of packets.
            nat: after all else, find out how long the network keeps a silent connection: eight to the origin are each
                left in silence for a time of its own, `nat_limit_s` at most, and used once. It takes as long.
            nat_limit_s: the longest silence, `limits_diagnosis.DIAGNOSIS_NAT_LIMIT_S_MIN` to `..._MAX` seconds.
            nat_told: told how far that is, once a second, on the client's event loop; must not block or raise.
            plain_url: a page in clear HTTP to look at for what the network puts in.
            plain_sha256: the digest of that page's content where it is known, hexadecimal.

        Raises:
            ConfigError: a URL is none of http or https, or `nat_limit_s` is out of its bounds.
        """
        return await self._storm.diagnose(
            url, trace=trace, nat=nat, nat_limit_s=nat_limit_s, nat_told=nat_told,
            plain_url=plain_url, plain_sha256=plain_sha256,
        )  # fmt: skip

    def forget(self) -> None:
        """Forget what was learned of networks and hosts, also on disk; see `AsyncTransport.forget`."""
        self._storm.forget()

    async def feedback(self, text: str) -> "Feedback":
        """Send what a user says of the app, with the last failures; see `AsyncTransport.feedback`."""
        return await self._storm.feedback(text)

    def set_activity(self, activity: Activity | str) -> None:
        """Say what the user does with the app; see `AsyncTransport.set_activity`."""
        self._storm.set_activity(activity)

    @property
    def home(self) -> "Home | None":
        """The unit in which the user's data lives; see `AsyncTransport.home`."""
        return self._storm.home

    @property
    def costs(self) -> Costs:
        """What the client has cost so far: bytes, connections, wake-ups, hedges."""
        return self._storm.costs

    @property
    def quality(self) -> Quality:
        """How good the network is; see `AsyncTransport.quality`."""
        return self._storm.quality

    @property
    def network(self) -> NetworkStatus:
        """What is known of the network now: what it is, and how it does; see `AsyncTransport.network`."""
        return self._storm.network

    def on_network(self, told: Told) -> Callable[[], None]:
        """Have `told` called when that changes; see `AsyncTransport.on_network`."""
        return self._storm.on_network(told)

    def channel(self) -> Channel:
        """Give the duplex channel of this client: calls both ways and pushes.

        Raises:
            ConfigError: the client has no bundle, so there is no platform to talk to.
        """
        runtime = self._storm.runtime()
        if runtime.longline is None:
            raise errors.ConfigError("a channel needs a platform: give the client a bundle")
        return Channel(runtime, runtime.longline)


class Client(httpx2.Client):
    """An `httpx2.Client` whose requests go by stormline. Arguments as `AsyncClient`."""

    def __init__(
        self,
        bundle: Bundle | str | os.PathLike[str] | None = None,
        *,
        config: Config | None = None,
        parse: Parse | None = None,
        verify: ForeignContext | None = None,
        **options: Any,
    ) -> None:
        self._parse = parse
        config = with_proxy(make_config(config, bundle), options)
        self._storm = Transport(config=config, verify=verify)
        mask_logger("httpx2")
        super().__init__(transport=self._storm, **_options(options, config))

    def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        """Send a request; see `httpx2.Client.send`."""
        held: list[CallTrace] = []
        request.extensions = {**request.extensions, HOLD: held}
        try:
            response = super().send(request, stream=stream, **options)
        except BaseException:
            finish(held, None, None)
            raise
        finish(held, None if stream else response, self._parse)
        return response

    def network_changed(self) -> None:
        """Say that the device has another network now; see `AsyncTransport.network_changed`."""
        self._storm.network_changed()

    def preconnect(self, url: str) -> bool:
        """Have a connection for the origin of `url`; see `AsyncTransport.preconnect`."""
        return self._storm.preconnect(url)

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
        return self._storm.diagnose(
            url, trace=trace, nat=nat, nat_limit_s=nat_limit_s, nat_told=nat_told,
            plain_url=plain_url, plain_sha256=plain_sha256,
        )  # fmt: skip

    def forget(self) -> None:
        """Forget what was learned of networks and hosts, also on disk; see `AsyncTransport.forget`."""
        self._storm.forget()

    def feedback(self, text: str) -> "Feedback":
        """Send what a user says of the app, with the last failures; see `AsyncTransport.feedback`."""
        return self._storm.feedback(text)

    def set_activity(self, activity: Activity | str) -> None:
        """Say what the user does with the app; see `AsyncTransport.set_activity`."""
        self._storm.set_activity(activity)

    @property
    def home(self) -> "Home | None":
        """The unit in which the user's data lives; see `AsyncTransport.home`."""
        return self._storm.home

    @property
    def costs(self) -> Costs:
        """What the client has cost so far: bytes, connections, wake-ups, hedges."""
        return self._storm.costs

    @property
    def quality(self) -> Quality:
        """How good the network is; see `AsyncTransport.quality`."""
        return self._storm.quality

    @property
    def network(self) -> NetworkStatus:
        """What is known of the network now: what it is, and how it does; see `AsyncTransport.network`."""
        return self._storm.network

    def on_network(self, told: Told) -> Callable[[], None]:
        """Have `told` called when that changes; see `AsyncTransport.on_network`."""
        return self._storm.on_network(told)


def with_proxy(config: Config, options: dict[str, Any]) -> Config:
    """Give the config with what httpx2's options say about proxies; `proxy` is taken out of them.

    Raises:
        ConfigError: the proxy is none that can be used.
    """
    proxy = options.pop("proxy", None)
    if proxy is not None:
        config = replace(config, proxy=_proxy_url(proxy))
    if "trust_env" in options:  # stays there: httpx2 has uses of its own for it
        config = replace(config, trust_env=bool(options["trust_env"]))
    return config


def _proxy_url(proxy: Any) -> str:
    """Give the URL of a `proxy=` argument: a text, a URL object or a `Proxy` object of either module."""
    if getattr(proxy, "ssl_context", None) is not None or getattr(proxy, "headers", None):
        raise errors.ConfigError("proxy: headers and ssl_context of a Proxy object are not supported")
    url = getattr(proxy, "url", proxy)
    if not isinstance(url, str) and not hasattr(url, "raw_host"):
        raise errors.ConfigError("proxy: expected a URL or an httpx2.Proxy")
    text = Secret.reveal(url) if isinstance(url, Secret) else str(url)
    auth = getattr(proxy, "raw_auth", None)  # which the object keeps apart from its URL
    if auth is None:
        return text
    scheme, _, rest = text.partition("://")
    return f"{scheme}://{quote(auth[0], safe='')}:{quote(auth[1], safe='')}@{rest}"


def _options(options: dict[str, Any], config: Config) -> dict[str, Any]:
    """Complete the options for httpx2.

    Raises:
        ConfigError: one of them would lead requests past stormline.
    """
    for name in ("transport", "mounts"):
        if options.get(name) is not None:
            raise errors.ConfigError(
                f"{name}=: requests would go past stormline; give httpx2's own client a stormline transport instead"
            )
    timeout = httpx2.Timeout(None, connect=config.connect_timeout_s, read=config.read_timeout_s)
    return {"timeout": timeout, **options}


def finish(held: list[CallTrace], response: httpx2.Response | None, parse: Parse | None) -> None:
    """Close the traces of one `send`: all requests of its redirects, the last with the business's verdict.

    Where the body is still to be streamed (`response` None) the last trace ends with it.
    """
    if not held:
        return
    *earlier, last = held
    for trace in earlier:
        trace.finish()
    if response is None:
        last.release()
        return
    parse = last.parse or parse
    if parse is not None:
        last.enter(Phase.PARSE)
        try:
            verdict = parse(response)
        except Exception as error:  # the hook is a witness; it must not fail the call it judges
            last.parsed(ok=False, reason=type(error).__name__)
        else:
            if verdict is not None:
                last.parsed(ok=verdict)
    last.enter(Phase.CALLBACK)
    last.finish()


def mark_parsed(response: Any, ok: bool, reason: str = "") -> bool:
    """Say what the business thinks of an answer that came by stormline, under httpx2 or httpx.

    For verdicts that no `parse=` can give: on a stream, or after work elsewhere. May be called again, from any thread:
    the last word counts until the call's record is sent. That is about a second after the call's end; where its rule
    has `parse_wait_s` and no verdict is there, so much later.

    Args:
        response: the answer.
        ok: the body is what it should be.
        reason: in a few words, for the call's story; it is masked and cut.

    Returns:
        False where the record may have gone without this word.

    Raises:
        LocalProtocolError: the response did not come by stormline.
    """
    trace = getattr(response, "extensions", {}).get("stormline")
    if not isinstance(trace, CallTrace):
        raise errors.LocalProtocolError("mark_parsed: the response did not come by stormline")
    return trace.mark(ok, reason)
