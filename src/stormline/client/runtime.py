"""All parts of one client on one event loop, put together: pool, dispatch, long connection, executor, recorder."""

import asyncio
import contextlib
import functools
import itertools
import os
import ssl
import weakref
from collections.abc import AsyncIterable, Callable, Coroutine, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from stormline.client import configured, joining, patterns
from stormline.client.allowance import Allowance
from stormline.client.answer import Answer
from stormline.client.config import Config
from stormline.client.costs import Costs, Counting, Extras
from stormline.client.executor import Executor
from stormline.client.names import NameService
from stormline.client.network import NetworkState
from stormline.client.outside import REAL, Names, Outside
from stormline.client.parking import Parking
from stormline.client.path import Path
from stormline.client.paths import Paths
from stormline.client.preconnect import Preconnector
from stormline.client.steering import Planned, Steering
from stormline.client.trace import CallTrace
from stormline.core import errors, ids, limits_means, limits_memory
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.meter import Meter
from stormline.net.sessions import TlsSessions
from stormline.net.stream import Stream, reason_of
from stormline.outbound.dial import Advice, Dialer
from stormline.outbound.messages import Headers, HttpRequest
from stormline.outbound.pool import Connector, HttpPool
from stormline.outbound.proxy import ProxyDialer
from stormline.policy.activity import CONDUCT, Activity
from stormline.policy.level import Quality, bars
from stormline.policy.network import Change, NetworkChange, NetworkInfo, is_metered
from stormline.policy.resend import SAFE_METHODS
from stormline.policy.shape import Network
from stormline.telemetry.timeline import CallRecord

if TYPE_CHECKING:
    from stormline.client.diagnostics import Diagnostics
    from stormline.client.feedback import Feedback, FeedbackSender
    from stormline.client.lanes import Run
    from stormline.client.longline import LongLine
    from stormline.client.memory import NetworkMemory
    from stormline.client.netlog import NetworkLog
    from stormline.client.recorder import Recorder
    from stormline.client.relaying import Relaying
    from stormline.client.rules import BusinessRule
    from stormline.client.scheduling import Scheduling
    from stormline.client.store import Store
    from stormline.client.surroundings import Around
    from stormline.telemetry.diagnosis import Diagnosis
    from stormline.wire.plan import Endpoint, Home

CLIENT_NAME = f"stormline/{metadata.version('stormline')}"


class Runtime:
    """A client's working parts. Made inside a running loop, used only there, ended by `aclose`.

    Attributes:
        netlog: the network log, None where there is none.
        on_record: told of every finished call's record, besides the platform; must not raise.
    """

    netlog: "NetworkLog | None" = None
    _diagnostics: "Diagnostics | None" = None
    _feedback: "FeedbackSender | None" = None
    _failed_url = ""

    def __init__(
        self, config: Config, *, foreign_context: "configured.ForeignContext | None" = None, outside: Outside = REAL
    ) -> None:
        self.config = config
        self.pid = os.getpid()
        self._over = True  # until there is something to close
        self.loop = asyncio.get_running_loop()
        self.clock = outside.clock
        self.rng = outside.rng
        self._call_prefix = ids.new_id(self.rng)
        self._call_numbers = itertools.count(1)
        self._outside = outside
        self._proxies = configured.proxies_of(config, outside)
        self._sessions = TlsSessions()
        alpn = ("h2", "http/1.1") if config.http2 else ("http/1.1",)
        self.network = NetworkState(
            config,
            config.network_port or outside.network(configured.network_watch(config, outside.environ)),
            owned=config.network_port is None,
            clock=self.clock,
            rng=self.rng,
            environ=outside.environ,
            tools=self,
        )
        self.steering = Steering(
            self._place(self.network.info),
            rng=self.rng,
            wall_s=self.clock.wall,
            prefers_ipv4=functools.partial(configured.prefers_ipv4, config),
        )
        self.steering.sensing.signal = functools.partial(_bars, self.network)
        self.counting = Counting(self.steering.busy)
        self._extras = self._share_extras()
        self.parking = Parking(outside.has_route, self.network.may_be_there, self.counting.woke)
        self.conduct = CONDUCT[Activity.FOREGROUND]
        context, h1_context = configured.tls_contexts(config, foreign_context, outside, alpn)
        self._context, self._h1_context = context, h1_context
        self.names: NameService | None = None
        self._resolver: Names
        if outside.resolver is None:
            self._resolver = self.names = self._name_service(context)
        else:
            self._resolver = outside.resolver()
        self._pool = HttpPool(self._dialer(context, self.steering, h1_context), self.clock, sense=self.steering)
        self._paths = self._make_paths()
        self.preconnector = Preconnector(config, self._pool, self._proxies)
        self._memory: NetworkMemory | None = None
        self.rules, addresses = configured.rules_of(config)
        self._awaited: dict[CallTrace, asyncio.TimerHandle | None] = {}
        self._roles_pool: HttpPool | None = None
        self._store: Store | None = None
        self.scheduling: Scheduling | None = None
        self.longline: LongLine | None = None
        self._recorder: Recorder | None = None
        self.on_record: Callable[[CallRecord], None] | None = None
        self._allowance = Allowance(config, self.rng)
        self._joining = joining.Joining()
        self._over = False
        if config.bundle is not None:
            self._join(config, config.bundle.app)
        self._open_folders(config)
        self._executor = self._make_executor(addresses, h1=h1_context is not None)
        self._executor.relaying = self._make_relaying()
        self.preconnector.h1 = h1_context is not None and not self._proxies
        for pool in (self._pool, self._roles_pool):
            if pool is not None:
                pool.on_wake = self.counting.woke
        self.preconnector.scheduling, self.preconnector.longline = self.scheduling, self.longline
        if config.preconnect:
            self.preconnector.begin(self._wanted(config.preconnect))

    def _make_executor(self, addresses: Mapping[str, tuple[Address, ...]], *, h1: bool) -> Executor:
        executor = Executor(
            self.config,
            paths=self._paths,
            rng=self.rng,
            wall_s=self.clock.wall,
            open_tcp=self.counting.measured(self._outside.open_tcp),
            scheduling=self.scheduling,
            longline=self.longline,
            proxies=self._proxies,
            left=functools.partial(_left, weakref.ref(self)),
            addresses=addresses,
            h1=h1,
            parking=self.parking,
            hedged=self.counting.hedged,
            network=self.network,
        )
        executor.failed = functools.partial(_failed, weakref.ref(self))
        return executor

    def _make_paths(self) -> Paths:
        """Make the ways out: the system's own choice, and what others are made with when they are needed."""
        make = weakref.WeakMethod(self._path_over)  # a client that nobody closed must go as soon as nobody holds it

        def made(info: NetworkInfo) -> Path:
            path_over = make()
            if path_over is None:
                raise RuntimeError("the client is gone")
            return path_over(info)

        return Paths(
            Path("", self._pool, self.steering, self.counting.meters[0]),
            ways=self.network.ways,
            make=made,
            open_tcp=self._outside.open_tcp,
            open_over=self._outside.open_over,
            enabled=self.config.second_path and not self._proxies,
            metered_bytes=self.config.second_path_bytes,
            woke=self.counting.woke,
            hedged=self.counting.hedged,
        )

    def _share_extras(self) -> Extras:
        """Make what bounds the extra bytes of the system's own choice where that is metered."""
        told, network = self.config.network, weakref.ref(self.network)  # a client that nobody closed must go

        def metered() -> bool:
            state = network()
            return state is not None and is_metered(state.info, told)

        extras = self.counting.share(self.counting.meters[0], metered)
        self.steering.spare = extras.take
        return extras

    def _path_over(self, info: NetworkInfo) -> Path:
        """Make what another way out than the system's own choice needs."""
        meter = Meter()
        self.counting.meters.append(meter)
        steering = Steering(
            Network(info.id, info.kind),
            rng=self.rng,
            wall_s=self.clock.wall,
            prefers_ipv4=functools.partial(configured.prefers_ipv4, self.config),
            beside=self.steering,
        )
        metered = is_metered(info)
        steering.spare = self.counting.share(meter, lambda: metered).take
        offers = None if self._h1_context is None else configured.Offers(steering, self._context, self._h1_context)
        open_tcp = self.counting.measured(functools.partial(self._outside.open_over, info.interface), meter)
        sessions = TlsSessions()  # or a server could tell that it is the same device
        doh = None
        if self.config.doh:
            from stormline.client.doh_ways import doh_over

            doh = doh_over(self.config, self.clock, self._context, open_tcp, steering, sessions)
        dialer = Dialer(
            self._resolver,
            self._context,
            open_tcp=open_tcp,
            advice=steering,
            sessions=sessions,
            h1_context=self._h1_context,
            context_of=None if offers is None else offers.context_of,
            keeper=self.names,
        )
        pool = HttpPool(dialer, self.clock, sense=steering)
        pool.on_wake = self.counting.woke
        return Path(info.interface, pool, steering, meter, doh)

    def _open_folders(self, config: Config) -> None:
        """Set up what is kept between starts."""
        self._memory = self._remember(config)
        self.netlog = self._keep_log(config)
        if config.bundle is not None and (config.network_log_dir or config.store) is not None:
            self._speaker()  # what is kept of earlier starts is sent

    def _remember(self, config: Config) -> "NetworkMemory | None":
        if config.store is None:
            return None
        from stormline.client.memory import NetworkFiles, NetworkMemory  # who keeps nothing need not load it

        return NetworkMemory(self.steering, NetworkFiles(config.store), self.clock, self._outside.aside)

    def _keep_log(self, config: Config) -> "NetworkLog | None":
        folder = config.network_log_dir or (config.store / "netlog" if config.store is not None else None)
        if folder is None or not config.network_log_bytes or not self._outside.logs:
            return None
        from stormline.client import netlog  # as above

        store = netlog.open_store(folder, bytes_max=config.network_log_bytes, key=config.network_log_key)
        return netlog.NetworkLog(store, functools.partial(netlog.snapshot, weakref.ref(self)), self.clock)

    def _speaker(self) -> "FeedbackSender":
        """Give what sends feedback."""
        if self._feedback is None:
            from stormline.client import feedback  # who says nothing need not load it

            self._feedback = feedback.sender(self, self._outside, self._roles_pool)
        return self._feedback

    async def feedback(self, text: str) -> "Feedback":
        """Send what a user says; see `AsyncTransport.feedback`."""
        from stormline.client import feedback

        return await self._speaker().say(text, feedback.packer(self))

    def _wanted(self, preconnect: tuple[str, ...]) -> list[str]:
        """Give the URLs to connect to at the start."""
        urls = [each for each in preconnect if each != "*"]
        if "*" in preconnect:
            steering = self.steering
            steering.enter_network()
            used = steering.strategy.most_used(steering.network.id, self.loop.time(), limits_memory.PRECONNECTS_MAX)
            urls += [f"https://{f'[{host}]' if ':' in host else host}:{port}/" for host, port in used]
        return urls

    # -- diagnoses ----------------------------------------------------------------------------------------------------
    def diagnostics(self) -> "Diagnostics":
        """Give what finds out what is wrong; made at its first use."""
        if self._diagnostics is None:
            from stormline.client.diagnostics import Diagnostics  # who never asks need not load it

            self._diagnostics = Diagnostics(weakref.WeakMethod(self._around))
        self._diagnostics.failed_url = self._failed_url
        return self._diagnostics

    def _around(self, host: str) -> "Around":
        """Give what a diagnosis of a host takes."""
        from stormline.client.surroundings import Around

        self.network.look()
        return Around(
            outside=self._outside,
            config=self.config,
            network=self.network,
            foreground=self.conduct is CONDUCT[Activity.FOREGROUND] and not self._over,
            is_busy=self.steering.busy,
            open_tcp=self.counting.measured(self._outside.open_tcp),
            remembered=() if self.names is None else self.names.remembered(host),
            scheduling=self.scheduling,
            proxies=self._proxies,
            connector=functools.partial(self._dialer, self._context),
            context=self._context,
            h1_context=self._h1_context or (lambda: self._context),
            roles_context=self._roles_context,
            heartbeat=self.steering.heartbeat,
            report=None if self._recorder is None and self.netlog is None else self._keep_diagnosis,
        )

    def _keep_diagnosis(self, found: "Diagnosis") -> None:
        """Put what was found into the network log, and have it told to the platform."""
        if self.netlog is not None:
            self.netlog.record_diagnosis(found)
        if self._recorder is not None:
            self._recorder.add_diagnosis(found)

    # -- what `network` needs (`client.network.Tools`) ----------------------------------------------------------------
    def _place(self, info: NetworkInfo) -> Network:
        """Give the network as the policies name it."""
        kind = self.config.network if self.config.network != "unknown" else info.kind
        return Network(kind if info.routed is None and not info.interface and not info.name else info.id, kind)

    async def addresses_of(self, host: str, port: int) -> tuple[Address, ...]:
        """Give the addresses of a name."""
        return await self._resolver.resolve(host, port)

    async def open_tcp(self, address: Address) -> Stream:
        """Connect to one address."""
        return await self._outside.open_tcp(address)

    def context(self) -> ssl.SSLContext:
        """Give the TLS context of requests to origins."""
        return self._context

    def is_assigned(self, host: str) -> bool:
        """Say whether an address is this machine's now."""
        return self._outside.is_assigned(host)

    def heard_at(self) -> float:
        """Give when something last came over the network."""
        return self.steering.heard_at

    def sweep(self) -> None:
        """Leave what goes by addresses that are gone, though the network may be the same."""
        self._leave_gone(doubt=False)
        self._paths.changed(network=False)

    def changed(self, change: NetworkChange) -> None:
        """Act on a change of the network."""
        if change.change is Change.LOST:
            return  # what is gone with it has been swept
        self.steering.network = self._place(change.after)
        self._extras.entered()
        if self._feedback is not None:
            self._feedback.send_kept()
        self._leave_gone(doubt=True)
        self._paths.changed(network=True)

    def recognised(self, info: NetworkInfo) -> None:
        """Go on under the name that the network has now, such as its router's, which was not known before."""
        if info.routed is not False:
            self.steering.rename(self._place(info))

    def _dialer(
        self,
        context: ssl.SSLContext,
        advice: Advice | None = None,
        h1_context: Callable[[], ssl.SSLContext] | None = None,
        *,
        roles: bool = False,
    ) -> Connector:
        # A caller's own context cannot be copied, so it is offered as it is.
        offers = None if h1_context is None else configured.Offers(self.steering, context, h1_context)
        open_tcp = self._outside.open_mptcp if self.config.mptcp else self._outside.open_tcp
        dialer = Dialer(
            self._resolver,
            context,
            open_tcp=self.counting.measured(open_tcp),
            advice=advice,
            sessions=self._sessions,
            h1_context=h1_context,
            context_of=None if offers is None else offers.context_of,
            # The roles' certificates are of an authority of their own: they prove nothing about who lies in DNS.
            keeper=None if roles else self.names,
        )
        if not self._proxies:
            return dialer
        return ProxyDialer(
            dialer,
            self._proxies,
            context=context,
            resolver=self._resolver,
            by_name=not roles,
            proxy_context=self._outside.trust.foreign_context,
        )

    def _name_service(self, context: ssl.SSLContext) -> NameService:
        """Make what finds names: the system, DNS over HTTPS, a file; as configured."""
        config, outside, steering = self.config, self._outside, self.steering
        doh = file = None
        if config.doh:
            from stormline.client.doh_ways import WaysDoh, doh_over

            me = weakref.ref(self)
            first = doh_over(config, self.clock, context, outside.open_tcp, steering, self._sessions)
            doh = WaysDoh(first, lambda: getattr(me(), "_paths", None))
        if config.store is not None:
            from stormline.client.names_file import NamesFile

            file = NamesFile(config.store, config.bundle.app if config.bundle is not None else "")
        return NameService(
            config,
            outside.names(),
            wall_s=self.clock.wall,
            doh=doh,
            network=lambda: steering.network.id,
            file=file,
        )

    async def resolve(self, host: str) -> tuple[str, ...]:
        """Find the addresses of a name, so that a request that follows need not wait for them.

        Raises:
            ResolveError: nobody has one.
        """
        try:
            found = await self._resolver.resolve(host, 443)
        except OSError as error:
            raise errors.ResolveError(
                f"{host}: {reason_of(error)}", phase=Phase.RESOLVE, maybe_delivered=False
            ) from error
        return tuple(each.host for each in found)

    def _join(self, config: Config, app: str) -> None:
        """Set up the parts that need a platform."""
        # Imported here: most of the client's code, and all of its cryptography, is for clients of a platform.
        from stormline.client.carriers import TLS, WSS, Carriers
        from stormline.client.commands import Commands
        from stormline.client.longline import LongLine
        from stormline.client.recorder import Recorder
        from stormline.client.scheduling import Scheduling
        from stormline.client.store import Store
        from stormline.wire import messages

        bundle = config.bundle
        if bundle is None:
            return
        if config.store is not None:
            self._store = Store(config.store, app)
            self._store.open()
        context, long_context = self._roles_context(("http/1.1",)), self._roles_context((messages.ALPN,))
        self._roles_pool = HttpPool(self._dialer(context, roles=True), self.clock)
        self.scheduling = Scheduling(
            config,
            bundle,
            self._roles_pool,
            self.clock,
            self._store,
            rng=self.rng,
            doh=self.names.by_doh if self.names is not None and config.doh else None,
            names=self._resolver.resolve,
        )
        steering = self.steering
        self.scheduling.network = lambda: "" if steering.network.kind == "unknown" else steering.network.kind
        self._allowance.scheduling, self._allowance.commands = self.scheduling, Commands()
        planned = Planned(steering)
        dialers = {
            TLS: self._dialer(long_context, planned, roles=True),
            WSS: self._dialer(context, planned, roles=True),
        }
        carriers = Carriers(steering, dialers, config.connect_timeout_s, self._roles_pool)
        self.longline = LongLine(config, app, self.scheduling, carriers, self.rng, CLIENT_NAME)
        self.longline.woke = self.counting.woke
        self.longline.beating.follow(steering)
        if config.report:
            self._recorder = Recorder(
                self._roles_pool,
                self._report_endpoint,
                self.scheduling.token,
                self.rng,
                CLIENT_NAME,
            )

    def _roles_context(self, alpn: tuple[str, ...]) -> ssl.SSLContext:
        """Give the trust in the platform's own roles."""
        trust, bundle = self._outside.trust, self.config.bundle
        ca_pem = "" if bundle is None else bundle.ca_pem
        return trust.roles_context(ca_pem, alpn) if ca_pem else trust.foreign_context(alpn)

    def _make_relaying(self) -> "Relaying | None":
        if self.scheduling is None or self._proxies:  # a proxy that lets this through lets the rest through too
            return None
        from stormline.client.relaying import Relaying, by_host

        scheduling, bundle = self.scheduling, self.config.bundle
        return Relaying(
            clock=self.clock,
            rng=self.rng,
            plan=lambda: scheduling.plan,
            bundled=by_host(bundle.relays if bundle is not None else ()),
            ask_keys=scheduling.ask_soon,
        )

    def _report_endpoint(self) -> "Endpoint | None":
        plan = self.scheduling.plan if self.scheduling is not None else None
        return plan.report if plan is not None else None

    def record(self, record: CallRecord) -> None:
        """Take a finished call's record."""
        self._heard(record)
        if self._recorder is not None:
            self._recorder.add(record)

    def _heard(self, record: CallRecord) -> None:
        """Take a record that the platform is not sent."""
        if self.on_record is not None:
            self.on_record(record)

    def rule(self, method: str, host: str, target: bytes) -> "BusinessRule | None":
        """Give the rule for a request, None where none fits; only to be asked where there are `rules`."""
        return None if self.rules is None else self.rules.find(method, host, target.decode("latin-1").partition("?")[0])

    def trace(
        self, *, method: str, host: str, path: str, business: str = "", rule: "BusinessRule | None" = None
    ) -> CallTrace:
        """Begin to follow a call."""
        if rule is not None:
            business = business or rule.business
        trace = CallTrace(
            self.clock,
            f"{self._call_prefix}-{next(self._call_numbers)}",
            method=method,
            host=host,
            path=path,
            business=business or self.config.business,
            network=self.steering.network.kind,
            sink=self.record,
        )
        if self.netlog is not None:
            trace.log = self.netlog.finished
        if rule is not None:
            trace.parse = rule.parse
            if rule.parse_wait_s:
                trace.wait = functools.partial(self._wait_for_verdict, wait_s=rule.parse_wait_s)
        return trace

    def _wait_for_verdict(self, trace: CallTrace, wait_s: float) -> bool:
        """Keep a call's record for its verdict, for this long; False where too many are kept. Any thread."""
        if self._over or len(self._awaited) >= limits_means.PARSE_WAITING_MAX:
            return False
        self._awaited[trace] = None
        with contextlib.suppress(RuntimeError):  # its loop is closed: `abandon` sends none either
            self.loop.call_soon_threadsafe(self._start_waiting, trace, wait_s)
        return True

    def _start_waiting(self, trace: CallTrace, wait_s: float) -> None:
        if trace in self._awaited:
            self._awaited[trace] = self.loop.call_later(wait_s, self._wait_is_over, trace)

    def _wait_is_over(self, trace: CallTrace) -> None:
        timer = self._awaited.pop(trace, None)
        if timer is not None:
            timer.cancel()
        trace.send()

    def execute(
        self,
        *,
        method: str,
        scheme: str,
        host: str,
        port: int,
        target: bytes,
        headers: Headers,
        body: bytes | AsyncIterable[bytes] | None,
        extensions: Mapping[str, Any],
        trace: CallTrace,
        rule: "BusinessRule | None" = None,
    ) -> Coroutine[None, None, Answer]:
        """Run one HTTP request; see `Executor.execute`.

        Args:
            rule: that fits the request.
            extensions: of the request: `timeout` with `read` and `connect` in seconds, as httpx means them (None: no
                such bound; what is absent takes the config's), `stormline.deadline_s`, `stormline.retries`,
                `stormline.plan` (the name of a preset, in the place of the rule's), and what `patterns` reads.

        Raises:
            LocalProtocolError: an extension has a wrong type or value.
        """
        shape = patterns.request_shape(
            method=method,
            host=host,
            target=target.decode("ascii", "replace"),
            headers=headers,
            body=body,
            extensions=extensions,
        )
        request = HttpRequest(method, scheme, host, port, target, headers, body)
        call_limits = self._allowance.of(request, shape, extensions, rule, trace, self._heard)
        joins = extensions.get("stormline.join_reads", self.config.join_reads)
        if not joins and method in SAFE_METHODS:
            return self._executor.execute(request, shape, call_limits, trace)
        send = functools.partial(self._executor.execute, request, shape, call_limits, trace)
        if method not in SAFE_METHODS:
            return self._write(request, send)
        key = joining.key_of(request, shape.pattern) if joins else None
        return send() if key is None else self._joining.get(key, send, trace, call_limits)

    async def _write(self, request: HttpRequest, send: Callable[[], Coroutine[None, None, Answer]]) -> Answer:
        """Send what may change what reads that are under way will find: nobody joins those any more."""
        self._joining.written(request)
        try:
            return await send()
        finally:
            self._joining.written(request)

    @property
    def owns_store(self) -> bool:
        """True where this process is the device: it has the lock of `Config.store`."""
        return self._store is not None and self._store.owned

    @property
    def home(self) -> "Home | None":
        """Where the user belongs; see `Scheduling.home`."""
        return None if self.scheduling is None else self.scheduling.home

    @property
    def quality(self) -> Quality:
        """How good the way is that calls use now."""
        return self._paths.quality()

    @property
    def costs(self) -> Costs:
        """What the client has cost so far."""
        return self.counting.read(joined=self._joining.joined)

    def set_activity(self, activity: Activity | str) -> None:
        """Behave as `policy.activity` has it for what the user does now; see `AsyncTransport.set_activity`."""
        try:
            activity = Activity(activity)
        except ValueError:
            raise errors.ConfigError(f"activity {activity!r}: expected one of {', '.join(Activity)}") from None
        self.conduct = CONDUCT[activity]
        self._executor.hedges = self.conduct.hedges
        if self.scheduling is not None:
            self.scheduling.act_as(push=activity is not Activity.FOREGROUND)
        if self.longline is not None:
            self.longline.behave(self.conduct)

    def network_changed(self) -> None:
        """Leave what the network that was left behind carried, and doubt the rest; see `AsyncTransport`."""
        change = self.network.look()
        if change is None or change.change is Change.LOST:
            self._leave_gone(doubt=True)

    def _leave_gone(self, *, doubt: bool) -> None:
        """Close what goes by addresses that are gone; `doubt` what is left."""
        hosts: dict[str, bool] = {}

        def gone(stream: Stream) -> bool:
            host = stream.local.host
            if host not in hosts:
                hosts[host] = not self._outside.is_assigned(host)
            return hosts[host]

        if doubt:
            self._sessions.clear()
            if self.names is not None:
                self.names.network_changed()
            self.steering.sensing.changed()
        for path in self._paths.others:
            path.pool.leave(gone)
        for pool in (self._pool, self._roles_pool):
            if pool is not None:
                pool.leave(gone)
                if doubt:
                    pool.doubt()
        if self.scheduling is not None and doubt:
            self.scheduling.network_changed()
        if self.longline is not None:
            self.longline.network_changed(gone, doubt=doubt)
        if doubt:
            self._executor.admission.network_changed()
            self.parking.changed()

    def forget(self) -> None:
        """Forget what was learned of networks, also what is kept of it on disk; see `AsyncTransport.forget`."""
        if self._memory is not None:
            self._memory.forget()
        else:
            self.steering.forget()
        for path in self._paths.others:
            path.steering.share(self.steering)

    def abandon(self) -> None:
        """Close every socket at once, without a word: nobody uses it any more, or its loop is closed.

        In a child after `fork` it does nothing: the sockets, and what TLS would say on them, are the parent's.
        """
        if self._over or os.getpid() != self.pid:
            return
        self._over = True
        self._awaited.clear()
        self.parking.close()
        speaking = (self._diagnostics, self._recorder, self._feedback, self.longline, self.scheduling)
        for part in (*speaking, self._memory, self.netlog, self.preconnector):
            if part is not None:
                part.abandon()
        for closable in (self._paths, self.network, self._pool, self._roles_pool, self._resolver):
            if closable is not None:
                with contextlib.suppress(RuntimeError):  # a closed loop cannot wake who waits
                    closable.close()
        if self._store is not None:
            self._store.close()

    def __del__(self) -> None:
        """Leave no socket behind where the client was never closed."""
        if getattr(self, "_over", True) or os.getpid() != self.pid:
            return
        if self.loop.is_closed() or not self.loop.is_running():
            self.abandon()
            return
        self._over = True
        parts = Runtime.__new__(Runtime)  # a live loop is touched from its own thread only; and this object is going
        parts.__dict__.update(self.__dict__, _over=False)
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(parts.abandon)

    async def aclose(self) -> None:
        """Send the last report, say good-bye to the gateway, close every connection."""
        if self._over:
            return
        self._over = True
        for trace in list(self._awaited):
            self._wait_is_over(trace)
        if self._diagnostics is not None:
            await self._diagnostics.aclose()
        if self._recorder is not None:
            await self._recorder.aclose()
        if self._feedback is not None:
            await self._feedback.aclose()
        await self.preconnector.aclose()
        self.parking.close()
        await self._joining.aclose()
        await self._executor.aclose()
        await self._paths.aclose()
        await self.network.aclose()
        if self._memory is not None:
            await self._memory.aclose()
        if self.netlog is not None:
            await self.netlog.aclose(self._outside.aside)
        if self.longline is not None:
            await self.longline.aclose()
        if self.scheduling is not None:
            await self.scheduling.aclose()
        for pool in (self._pool, self._roles_pool):
            if pool is not None:
                await pool.aclose()
        if self.names is not None:
            await self.names.aclose()
        self._resolver.close()
        if self._store is not None:
            self._store.close()


def _bars(network: NetworkState) -> int | None:
    """Give the bars of the radio where the system tells its signal; of the network alone, so that a client can go."""
    return bars(network.info.kind, network.info.signal_dbm)


def _left(runtime: weakref.ref[Runtime], stream: Stream) -> bool:
    """Say whether the address of a silent connection is gone; then the network has changed, and nobody said so.

    By a weak reference: a client that nobody closed must go, and its sockets with it, as soon as nobody holds it.
    """
    client = runtime()
    if client is None or client._outside.is_assigned(stream.local.host):
        return False
    client.network_changed()
    return True


def _failed(runtime: weakref.ref[Runtime], run: "Run") -> None:
    """Take note of a call that failed for good; of a key one, have it found out why."""
    client, request = runtime(), run.request
    if client is None:
        return
    path = request.target.decode("ascii", "replace").partition("?")[0] if request.method in SAFE_METHODS else "/"
    client._failed_url = f"{request.scheme}://{Address(request.host, request.port)}{path}"
    if run.limits.preset.name == "key" and client.config.diagnose:
        client.diagnostics().failed()
