"""What one client knows of its network: it looks, is told of changes, and finds out what is wrong when requests fail.

The policies decide (`policy.network`, `policy.verdict`); here they are fed with what calls meet, and their wishes are
carried out. Nothing is sent while requests succeed.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from stormline.client.config import Config
from stormline.core import errors
from stormline.core import limits_network as limits
from stormline.core.clock import Clock, Rng, SleepClock
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net import probes
from stormline.net.files import write_atomic
from stormline.net.network import NetworkPort
from stormline.net.stream import Stream
from stormline.policy.network import Change, ClockWatch, NetworkChange, NetworkInfo, NetworkTracker
from stormline.policy.shape import Pattern
from stormline.policy.verdict import Condition, Finding, Met, Probe, ProbeKind, Verdict, VerdictMachine

if TYPE_CHECKING:
    from stormline.client.lanes import Reply, Run

_log = logging.getLogger("stormline.client")
_PENDING_LOOK_S: Final = 2.0
"""How long a call may be without a connection before that counts as a silence; then again after as long."""
_NETWORK_AUTHENTICATION_REQUIRED: Final = 511


class NetworkStatus(NamedTuple):
    """What is known of the network.

    Attributes:
        info: what it is; `info.id` is its hashed name.
        verdict: how it does.
        change: what has just changed; None where only the verdict has, and where nobody is being told.
    """

    info: NetworkInfo
    verdict: Verdict
    change: NetworkChange | None = None


Told = Callable[[NetworkStatus], None]
"""Takes what is known, each time it changes."""


class Tools(Protocol):
    """What the client lends: for probes, and to act on changes."""

    async def addresses_of(self, host: str, port: int) -> tuple[Address, ...]:
        """Give the addresses of a name."""
        ...

    async def open_tcp(self, address: Address) -> Stream:
        """Connect to one address."""
        ...

    def context(self) -> ssl.SSLContext:
        """Give the TLS context that requests use."""
        ...

    def is_assigned(self, host: str) -> bool:
        """Say whether an address is the machine's own now."""
        ...

    def sweep(self) -> None:
        """Leave what goes by addresses that are gone."""
        ...

    def changed(self, change: NetworkChange) -> None:
        """Do what a change calls for."""
        ...

    def recognised(self, info: NetworkInfo) -> None:
        """Take note that the network is the same as before, and is known by another id now."""
        ...

    def heard_at(self) -> float:
        """Give when something last came over the network (loop time)."""
        ...


class NetworkState:
    """One client's view of its network. Belongs to one event loop; ended by `close`.

    Args:
        config: the client's settings.
        port: where knowledge comes from; closed with this object where `owned`.
        owned: the port is this client's alone.
        clock: time.
        rng: chance.
        environ: the machine's environment variables.
        tools: the client; held weakly.
    """

    def __init__(
        self,
        config: Config,
        port: NetworkPort,
        *,
        owned: bool,
        clock: Clock,
        rng: Rng,
        environ: Mapping[str, str],
        tools: Tools,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._port = port
        self._owned = owned
        self._clock = clock
        self._rng = rng
        self._tools = weakref.ref(tools)
        self._callbacks: list[Told] = []
        self._captive = probes.CaptiveUrl(config.captive_url) if config.captive_url is not None else None
        self._may_probe = probes_wanted(config, environ)
        self._tracker = NetworkTracker(installation_key(config.store, rng), port.look())
        self._machine = VerdictMachine(
            captive=self._captive is not None, name_servers=probes.name_servers() if self._may_probe else ()
        )
        self._machine.changed(self._tracker.info, self._loop.time())
        self._boottime = clock.boottime if isinstance(clock, SleepClock) else None
        self._clocks = ClockWatch(*self._read_clocks())
        self._skew = self._read_skew()
        self._refined = ""  # the network that was looked at once more
        self._verdict = self._machine.judge(self._loop.time())
        self._look_timer: asyncio.TimerHandle | None = None
        self._later_timer: asyncio.TimerHandle | None = None
        self._round_timer: asyncio.TimerHandle | None = None
        self._pending_timer: asyncio.TimerHandle | None = None
        self._pending: dict[Run, float] = {}
        self._round: asyncio.Task[None] | None = None
        self._closed = False
        me = weakref.ref(self)  # the port is held by the loop, and must not hold us
        port.watch(lambda: None if (state := me()) is None else state._poked())
        self._look_later()

    # -- what is known ------------------------------------------------------------------------------------------------
    @property
    def info(self) -> NetworkInfo:
        """The network requests go out by."""
        return self._tracker.info

    def may_be_there(self) -> bool:
        """False where it is known that there is no network."""
        return self.info.routed is not False

    @property
    def status(self) -> NetworkStatus:
        """What is known now."""
        return NetworkStatus(self._tracker.info, self._judge())

    def on_change(self, told: Told) -> Callable[[], None]:
        """Have `told` called on the loop with each change; what it raises is logged.

        Returns:
            What ends it.

        Raises:
            LocalProtocolError: there are too many already.
        """
        if len(self._callbacks) >= limits.NETWORK_CALLBACKS_MAX:
            raise errors.LocalProtocolError(f"more than {limits.NETWORK_CALLBACKS_MAX} callbacks for the network")
        self._callbacks.append(told)

        def end() -> None:
            with contextlib.suppress(ValueError):
                self._callbacks.remove(told)

        return end

    def _judge(self) -> Verdict:
        self._verdict = self._machine.judge(self._loop.time())
        return self._verdict

    def _rejudge(self) -> None:
        before = self._verdict
        after = self._judge()
        if after[:2] != before[:2] or after.host != before.host:
            _log.info("network: %s (%s): %s", after.condition, after.confidence, after.why)
            self._tell(None)

    def _tell(self, change: NetworkChange | None) -> None:
        status = NetworkStatus(self._tracker.info, self._verdict, change)
        for told in list(self._callbacks):
            try:
                told(status)
            except Exception:
                _log.exception("a callback for the network failed")

    # -- looking ------------------------------------------------------------------------------------------------------
    def _read_clocks(self) -> tuple[float, float, float | None]:
        clock = self._clock
        return clock.monotonic(), clock.wall(), None if self._boottime is None else self._boottime()

    def _read_skew(self) -> float:
        """Give how far the clock that goes on in sleep is ahead of the one that does not."""
        ahead = None if self._boottime is None else self._boottime()
        return (self._clock.wall() if ahead is None else ahead) - self._clock.monotonic()

    def _poked(self) -> None:
        """The port says that something may have changed."""
        if self._look_timer is None and not self._closed:
            self._look_timer = self._loop.call_later(limits.NETWORK_SETTLE_S, self._look)

    def _look(self) -> None:
        if self._look_timer is not None:
            self._look_timer.cancel()
            self._look_timer = None
        if (tools := self._tools()) is not None:
            tools.sweep()
        self.look()

    def ways(self) -> tuple[NetworkInfo, ...]:
        """Give the ways out, named; see `NetworkPort.ways`."""
        return () if self._closed else tuple(map(self._tracker.named, self._port.ways()))

    def neighbour(self, index: int, address: str) -> probes.Beside | None:
        """Give what the kernel knows of a machine on the link; see `NetworkPort.neighbour`."""
        return None if self._closed else self._port.neighbour(index, address)

    @property
    def may_probe(self) -> bool:
        """Packets may be sent to find out what is wrong."""
        return self._may_probe

    def look(self) -> NetworkChange | None:
        """Look now, and do what a change calls for; give it."""
        if self._closed:
            return None
        tools = self._tools()
        assigned = tools.is_assigned if tools is not None else _none_is
        now = self._loop.time()
        before = self._tracker.info
        change = self._tracker.observe(self._port.look(), now, assigned)
        if self._tracker.info != before:
            self._machine.changed(self._tracker.info, now)
        self._look_later()
        if change is not None:
            self._deliver(change)
        else:
            if tools is not None and self._tracker.info.id != before.id:
                tools.recognised(self._tracker.info)
            self._rejudge()
        return change

    def _look_later(self) -> None:
        """Look once more when a loss is due, or when a new network will show more of itself."""
        now = self._loop.time()
        due = self._tracker.lost_due_at
        missing_s = self._tracker.look_again_s
        if self._later_timer is not None:
            self._later_timer.cancel()
            self._later_timer = None
        if due is not None:
            self._later_timer = self._loop.call_at(max(due, now) + 0.001, self._later)
        elif missing_s is not None and self._tracker.info.id != self._refined:
            self._refined = self._tracker.info.id  # once for each network
            self._later_timer = self._loop.call_later(missing_s, self._later)

    def _later(self) -> None:
        self._later_timer = None
        self._look()

    def _deliver(self, change: NetworkChange) -> None:
        _log.info("network: %s: %s -> %s", change.change, change.before.id, change.after.id)
        tools = self._tools()
        if tools is not None:
            tools.changed(change)
        self._judge()
        self._tell(change)

    def _check_clocks(self) -> None:
        skew = self._read_skew()
        if abs(skew - self._skew) < limits.SLEEP_S_MIN:
            return
        self._skew = skew
        jump = self._clocks.observe(*self._read_clocks())
        if jump.stepped_s:
            _log.info("the wall clock was set by %.1f s", jump.stepped_s)
        if jump.slept_s:
            _log.info("the machine slept for %.1f s", jump.slept_s)
            if self.look() is None:
                self._deliver(NetworkChange(Change.WOKEN, self._tracker.info, self._tracker.info))

    # -- what calls meet ----------------------------------------------------------------------------------------------
    def begin(self, run: "Run", *, here: bool = True) -> None:
        """A call begins; not `here`: over another network than this one."""
        self._port.touch()
        self._check_clocks()
        if here and run.shape.pattern is Pattern.CALL:
            self._pending[run] = self._loop.time()
            if self._pending_timer is None:
                self._pending_timer = self._loop.call_later(_PENDING_LOOK_S, self._look_pending)

    def end(self, run: "Run") -> None:
        """It has its answer, or none."""
        self._pending.pop(run, None)

    def _look_pending(self) -> None:
        """Notice calls that find no connection, long before they fail."""
        self._pending_timer = None
        if self._closed or not self._pending:
            return
        now = self._loop.time()
        tools = self._tools()
        heard_at = tools.heard_at() if tools is not None else now
        for run, since in list(self._pending.items())[: limits.VERDICT_HOSTS_MAX]:
            waits = run.asked_at is None and now - since >= _PENDING_LOOK_S
            if waits and heard_at <= since and not _is_local(run.request.host):
                resolving = run.trace.timeline.stage == Phase.RESOLVE
                self._machine.observe(run.request.host, Met.DNS_SILENT if resolving else Met.SILENT, now)
        self._after_failure(now)
        self._pending_timer = self._loop.call_later(_PENDING_LOOK_S, self._look_pending)

    def answered(self, run: "Run", reply: "Reply") -> None:
        """An attempt was answered."""
        request, now = run.request, self._loop.time()
        if _is_local(request.host) or (reply.held is not None and _is_local(_host_of(reply.held.peer))):
            return
        if reply.status == _NETWORK_AUTHENTICATION_REQUIRED and request.scheme == "http":
            self._machine.observe(request.host, Met.FOREIGN, now)
            self._after_failure(now)
            return
        asked_s = now - (run.ends_at - run.limits.deadline_s)
        calm = self._verdict.condition in (Condition.OK, Condition.SLOW)
        self._machine.answered(
            request.host,
            now,
            took_s=asked_s if run.shape.pattern is Pattern.CALL else None,
            server=None if reply.held is None else reply.held.peer,
            tls=request.scheme == "https",
        )
        if not calm:
            self._rejudge()

    def met(self, host: str, error: errors.TransportError | None) -> None:
        """An attempt failed with `error`, or is waited for in vain (None)."""
        met = Met.SILENT if error is None else met_of(error)
        if met is None or _is_local(host):
            return
        now = self._loop.time()
        self._machine.observe(host, met, now)
        self._after_failure(now)

    def _after_failure(self, now: float) -> None:
        self._rejudge()
        if self._closed or not self._may_probe or self._round is not None:
            return
        # What nobody told of is found out now: a look costs less than a probe.
        if self._machine.next_round_at(now) is not None:
            self.look()
        wanted = self._machine.wanted(now)
        if wanted:
            self._round = self._loop.create_task(self._probe_all(wanted), name="network probes")
            self._round.add_done_callback(self._probed)
        else:
            self._next_round(now)

    def _next_round(self, now: float) -> None:
        at = self._machine.next_round_at(now)
        if at is not None and self._round_timer is None:
            self._round_timer = self._loop.call_at(max(at, now + limits.PROBE_NEIGHBOUR_LOOK_S), self._round_due)

    def _round_due(self) -> None:
        self._round_timer = None
        self._after_failure(self._loop.time())

    # -- probes -------------------------------------------------------------------------------------------------------
    def _probed(self, task: asyncio.Task[None]) -> None:
        self._round = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("probing the network failed", exc_info=error)
        if not self._closed:
            self._next_round(self._loop.time())

    async def _probe_all(self, wanted: list[Probe]) -> None:
        found = await asyncio.gather(*(self._probe(each) for each in wanted))
        self._machine.take(zip(wanted, found, strict=True), self._loop.time())
        self._rejudge()

    async def _probe(self, probe: Probe) -> Finding:
        tools = self._tools()
        if tools is None:
            return Finding.UNKNOWN
        if probe.kind is ProbeKind.GATEWAY:
            return await probes.gateway(self._tracker.info, self._port.neighbour)
        if probe.kind is ProbeKind.CAPTIVE and self._captive is not None:
            return await probes.captive(self._captive, tools.addresses_of, tools.open_tcp)
        if probe.address is None:
            return Finding.UNKNOWN
        if probe.kind is ProbeKind.DNS:
            number = int.from_bytes(self._rng.token_bytes(2), "big")
            return await probes.dns(probe.address, probe.host, number)
        context = tools.context() if probe.tls else None
        return await probes.server(probe.address, probe.host, context, tools.open_tcp)

    def names_lie(self, host: str) -> None:
        """A trusted resolver contradicts the network's about `host`."""
        self._machine.names_lie(host)
        self._rejudge()

    def close(self) -> None:
        """End it; again is harmless, also where the loop is closed."""
        self._closed = True
        for timer in (self._look_timer, self._later_timer, self._round_timer, self._pending_timer):
            if timer is not None:
                timer.cancel()
        if self._round is not None:
            with contextlib.suppress(RuntimeError):
                self._round.cancel()
        if self._owned:
            self._port.close()

    async def aclose(self) -> None:
        """End it, and wait for the probes under way."""
        task = self._round
        self.close()
        if task is not None:
            await asyncio.wait([task])


def _none_is(host: str) -> bool:
    return False


def _host_of(address: Address | None) -> str:
    return "" if address is None else address.host


def _is_local(host: str) -> bool:
    """Say whether a host is this machine, which says nothing of its network."""
    if host.startswith("127."):
        return host[-1].isdigit()
    return host in ("localhost", "::1") or host.endswith(".localhost")


def met_of(error: errors.TransportError) -> Met | None:
    """Say what a failed attempt met; None where that says nothing of the network."""
    if isinstance(error, errors.GatewayError | errors.ProxyError | errors.QueueFull | errors.ChannelLost):
        return None
    cause = _cause(error)
    if isinstance(error, errors.ResolveError):
        if isinstance(cause, TimeoutError):
            return Met.DNS_SILENT
        absent = isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME
        return Met.DNS_ABSENT if absent else Met.DNS_FAILED
    if isinstance(error, errors.DeadlineExceeded):
        if error.phase is Phase.RESOLVE:
            return Met.DNS_SILENT
        return Met.SILENT if error.phase.reached(Phase.CONNECT) else None
    if isinstance(cause, ssl.SSLCertVerificationError):
        return Met.BAD_CERTIFICATE
    if isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError):
        if cause.errno in (errno.EACCES, errno.EPERM):
            return Met.DENIED
        if cause.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL):
            return Met.UNREACHABLE
        if cause.errno == errno.ECONNREFUSED:
            return Met.REFUSED
        if isinstance(cause, TimeoutError):
            return Met.SILENT
    if isinstance(error, errors.ConnectError | errors.TlsError | errors.WriteError | errors.ReadError):
        return Met.BROKEN
    return None


def _cause(error: BaseException) -> BaseException | None:
    """Give the innermost cause that is the system's or TLS's."""
    found: BaseException | None = None
    for _ in range(8):
        if error.__cause__ is None:
            break
        error = error.__cause__
        if isinstance(error, OSError):
            found = error
    return found


def probes_wanted(config: Config, environ: Mapping[str, str]) -> bool:
    """Say whether probes may be made: as the config has it, else the variable `STORMLINE_NETWORK_PROBES`."""
    if config.network_probes is not None:
        return config.network_probes
    return environ.get("STORMLINE_NETWORK_PROBES", "on").strip().lower() not in ("off", "0", "no", "false")


def installation_key(folder: Path | None, rng: Rng) -> bytes:
    """Give the key that names of networks are hashed with: that of the folder, made at first use; else a new one."""
    fresh = rng.token_bytes(limits.NETWORK_KEY_BYTES)
    if folder is None:
        return fresh
    path = folder / "network.key"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            key = _read_key(path)
            if len(key) == limits.NETWORK_KEY_BYTES:
                return key
            write_atomic(path, fresh, mode=0o600)  # what a crash left half written
        else:
            with open(descriptor, "wb") as file:
                file.write(fresh)
    return fresh


def _read_key(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(limits.NETWORK_KEY_BYTES + 1)
