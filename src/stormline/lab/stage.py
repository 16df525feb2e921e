"""A stage: one profile brought to life, for one client.

    with Stage(profiles.get("elevator"), seed=1, folder=folder) as stage:
        client = stage.popen([python, "client.py", stage.base_url, str(stage.ca_file)])
        stage.begin()
        client.wait()
        report = stage.finish()

Any number of stages may run beside each other, in one process or in several.
"""

import contextlib
import functools
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from stormline.assembly.authority import Authority, ensure_authority
from stormline.core import errors
from stormline.core.clock import Clock
from stormline.lab import messages as m
from stormline.lab import specs, traces
from stormline.lab.chance import SeededRng
from stormline.lab.control import Shaper
from stormline.lab.namespaces import CELL, WIFI, Topology, Uplink, require_lab
from stormline.lab.origin_answers import CHECK_PATH
from stormline.lab.origin_control import OriginProcess
from stormline.lab.profiles_model import Event, LinkSpec, Profile
from stormline.net.clock import SystemClock, SystemRng

_FIRST_FREE_HOST: Final = 3
"""Host numbers on the WiFi network: 1 is the router, 2 the device at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """What a run was, as seen from the stage."""

    requests_by_id: dict[int, int]
    """How often the origin was asked for each item."""
    connections: dict[str, int]
    """Connections the origin accepted, by transport: `tcp`, `quic`."""
    bytes_up: int
    """Bytes of IP packets the device sent on all uplinks since `begin`, those lost on the way included."""
    bytes_down: int
    """Bytes of IP packets sent towards it."""
    captive_requests: int
    """Requests that reached a captive server instead of the origin."""
    dns_questions: int
    """Questions by plain DNS."""
    doh_questions: int
    """Questions by DNS over HTTPS."""
    events: list[dict[str, Any]]
    """`at_s` and `until_s` (None: to the end) since `begin`, and `what`."""
    shaper: dict[str, Any]
    """`lateness_p99_ms`, `lateness_max_ms`, `packets`, `drops` by reason, `overflow_packets`: all 0 where the run can
    be trusted but for losses the profile asks for."""
    loop_lag_ms: float
    """The longest time the servers' own loop was late."""


class Stage:
    """A context manager: everything is made by entering and gone after leaving, also by an exception or SIGINT."""

    def __init__(
        self,
        profile: Profile,
        seed: int,
        *,
        folder: Path,
        duration_s: float | None = None,
        trace_folder: Path | None = None,
        names: Mapping[str, Sequence[str]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Plan a stage; nothing is made yet.

        Args:
            profile: the network and its servers.
            seed: of all chance: links, servers, DNS, moments of events.
            folder: for certificates; made where it is not there.
            duration_s: of the run, where it is not the profile's own; events keep their rhythm.
            trace_folder: where recordings lie; None: `traces.folder()`.
            names: more names that DNS knows, and their addresses; who answers there is the caller's business.
            clock: where time comes from; the machine's where None.

        Raises:
            ConfigError: the profile needs a recording that is not there, or its events make no sense.
        """
        self.profile = profile
        self.duration_s = profile.duration_s if duration_s is None else duration_s
        self._seed = seed
        self._folder = folder
        self._trace_folder = traces.folder() if trace_folder is None else trace_folder
        self._names = {name: list(addresses) for name, addresses in (names or {}).items()}
        self._clock = clock or SystemClock()
        missing = profile.missing_traces(self._trace_folder)
        if missing:
            raise errors.ConfigError(
                f"profile {profile.name}: no recordings {', '.join(missing)} in {self._trace_folder} "
                "(STORMLINE_TRACES names another folder)"
            )
        self.events: tuple[Event, ...] = profile.expand(seed, self.duration_s)
        """What will happen."""
        self._stack = contextlib.ExitStack()
        self._lock = threading.RLock()
        """Shaper and origin take commands of one thread at a time."""
        self._stop = threading.Event()
        self._runner: threading.Thread | None = None
        self._failure: Exception | None = None
        self._hosts = _FIRST_FREE_HOST
        self._begun: m.Statistics | None = None

    # -- life ---------------------------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        """Make everything; the device's network works when this returns.

        Raises:
            PlatformError: the laboratory cannot work here, or a step failed; then nothing is left behind.
        """
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes and remove all networks; again is harmless.

        Raises:
            PlatformError: something could not be removed; the rest was.
        """
        with _undisturbed():
            self._halt()
            self._stack.close()

    def _build(self) -> None:
        require_lab()
        server = self.profile.server
        usual = max(server.v4, server.v6)
        # Two addresses more: the captive server's, and the one of DNS.
        self.topology = self._stack.enter_context(Topology(server_addresses=usual + 2))
        self.origin = self._stack.enter_context(OriginProcess(self.topology.server, self._clock))
        v4, v6 = self.topology.server_v4, self.topology.server_v6
        self.addresses: tuple[str, ...] = (*v4[: server.v4], *v6[: server.v6])
        """The origin's true addresses."""
        self.captive = v4[usual]
        """IPv4 address of a server that answers everything with its own page and a wrong certificate."""
        self.dns_servers: tuple[str, ...] = (v4[usual + 1],)
        """What the device's resolv.conf names."""
        self.doh_url = f"https://{specs.DOH}/dns-query"
        """DNS over HTTPS (RFC 8484), at the address of `dns_servers`; its certificate is of `ca_file` and for this name
        and that address."""
        self.check_url = f"http://{v4[usual + 1]}{CHECK_PATH}"
        """Answers 204 in clear HTTP where no captive portal is in the way; no name has to be resolved for it."""
        self.base_url = f"{self.profile.scheme}://{specs.SHOP}"
        """What clients ask."""
        self.topology.device.set_resolvers(self.dns_servers)
        setup = self._origin_setup(captive_v6=v6[usual] if server.v6 else None)
        self.shaper = self._stack.enter_context(Shaper(self._shaper_setup()))
        self.origin.set_up(setup)
        if self.profile.cell is None:
            self.topology.device.shell(f"ip link set {CELL.name} down")
        for event in self.events:
            if event.at_s == 0:
                event.fault.apply(self)

    def _origin_setup(self, *, captive_v6: str | None) -> specs.OriginSetup:
        rng = SystemRng()
        authority = ensure_authority(self._folder / "ca", clock=self._clock, rng=rng)
        stranger = ensure_authority(self._folder / "stranger", clock=self._clock, rng=rng)
        self.ca_file = authority.certificate
        """The authority that clients shall trust."""
        (resolver,) = self.dns_servers
        certificates = {
            "origin": _issue(authority, "origin", [specs.SHOP], self.addresses),
            "doh": _issue(authority, "doh", [specs.DOH], [resolver]),
            "captive": _issue(stranger, "captive", [specs.SHOP], []),
        }
        captives = [self.captive, *([captive_v6] if captive_v6 else [])]
        page = specs.Behaviour(page=True)
        server = self.profile.server
        listeners = [
            specs.Listener(address=address, certificate="origin", behaviour=server.of(index))
            for index, address in enumerate(self.addresses)
        ]
        listeners += [
            specs.Listener(address=address, certificate="captive", behaviour=page, counted=False)
            for address in captives
        ]
        told = specs.Behaviour(date_skew_s=server.behaviour.date_skew_s)
        listeners.append(specs.Listener(address=resolver, certificate="doh", behaviour=told, counted=False))
        return specs.OriginSetup(
            seed=self._seed,
            certificates=certificates,
            listeners=listeners,
            zone={**self._names, specs.SHOP: list(self.addresses), specs.DOH: [resolver]},
            lies=captives,
            dns=self.profile.dns,
            dns_addresses=[resolver],
        )

    def _links(self) -> Iterator[tuple[Uplink, LinkSpec]]:
        yield WIFI, self.profile.wifi
        if self.profile.cell is not None:
            yield CELL, self.profile.cell

    def _shaper_setup(self) -> m.Setup:
        # Capacity traces begin with the run, see `begin`.
        links = [
            self.topology.link_setup(
                uplink, up=_without_trace(spec.up), down=_without_trace(spec.down), seed=self._seed
            )
            for uplink, spec in self._links()
        ]
        return m.Setup(links=links, traces=self.profile.trace_names(), trace_folder=str(self._trace_folder))

    # -- the client ---------------------------------------------------------------------------------------------------
    def popen(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a program on the device, where names are asked of `dns_servers`.

        Args:
            argv: the program and its arguments.
            env: its environment; ours where None.
            options: of `subprocess.Popen`.

        Returns:
            The process; it is killed when the stage ends, and the caller waits for it and closes its pipes.
        """
        if env is not None:
            options["env"] = dict(env)
        return self.topology.device.popen(argv, **options)

    # -- the run ------------------------------------------------------------------------------------------------------
    def begin(self) -> float:
        """Start the clock of the events, fades and traces.

        Returns:
            The moment, in monotonic seconds.

        Raises:
            PlatformError: a process of the stage is gone.
        """
        if self._runner is not None:
            raise errors.ConfigError("a stage begins once")
        with self._lock:
            self.origin.report(reset_lag=True)
            self._begun = self.shaper.statistics(reset_lateness=True)
            start_s = self._clock.monotonic()
            for uplink, spec in self._links():
                self._start_link(uplink, spec, start_s)
        self._runner = threading.Thread(target=self._run_events, args=(start_s,), name="lab-events", daemon=True)
        self._runner.start()
        return start_s

    def _start_link(self, uplink: Uplink, spec: LinkSpec, start_s: float) -> None:
        for direction, params in ((m.Direction.UP, spec.up), (m.Direction.DOWN, spec.down)):
            if params.get("trace"):
                # Each seed has a stretch of its own, the first one the recording's beginning.
                place = {"trace": params["trace"], "trace_offset_s": (self._seed - 1) * self.profile.duration_s}
                self.shaper.reconfigure(uplink.name, place, direction=direction)
        if spec.fades is not None:
            self.shaper.set_fades(uplink.name, dict(spec.fades), seed=self._seed, start_s=start_s)
        if spec.rtt is not None:
            rng = SeededRng(f"rtt/{uplink.name}", self._seed)
            self.shaper.follow(uplink.name, spec.rtt.steps(self.duration_s, rng), start_s=start_s)

    def _run_events(self, start_s: float) -> None:
        actions: list[tuple[float, Callable[[], None]]] = []
        for event in self.events:
            if event.at_s > 0:
                actions.append((event.at_s, functools.partial(event.fault.apply, self)))
            if event.until_s is not None:
                actions.append((event.until_s, functools.partial(event.fault.undo, self)))
        for at_s, act in sorted(actions, key=lambda action: action[0]):
            if self._stop.wait(max(0.0, start_s + at_s - self._clock.monotonic())):
                return
            try:
                with self._lock:
                    act()
            except Exception as error:  # whatever it is: the run is not what its profile says
                self._failure = error
                return

    def _halt(self) -> None:
        self._stop.set()
        if self._runner is not None:
            self._runner.join()

    def finish(self) -> StageReport:
        """Stop the events and give the report.

        Raises:
            ConfigError: `begin` was not called.
            PlatformError: an event could not be carried out, so that the run is void, or a process is gone.
        """
        if self._begun is None:
            raise errors.ConfigError("a stage that has not begun cannot finish")
        self._halt()
        if self._failure is not None:
            raise errors.PlatformError(f"an event of the run failed: {self._failure!r}") from self._failure
        seen, passed = self.origin.report(), self.shaper.statistics()
        up = _offered(passed, m.Direction.UP) - _offered(self._begun, m.Direction.UP)
        down = _offered(passed, m.Direction.DOWN) - _offered(self._begun, m.Direction.DOWN)
        return StageReport(
            requests_by_id={int(number): count for number, count in seen.requests_by_id.items()},
            connections={"tcp": seen.connections, "quic": 0},
            bytes_up=up,
            bytes_down=down,
            captive_requests=seen.captive_requests,
            dns_questions=seen.dns_questions,
            doh_questions=seen.doh_questions,
            events=[{"at_s": event.at_s, "what": event.what, "until_s": event.until_s} for event in self.events],
            shaper=_summary(passed),
            loop_lag_ms=seen.lag_ms,
        )

    # -- for faults ---------------------------------------------------------------------------------------------------
    def behave(self, unit: Iterable[int], behaviour: specs.Behaviour | None) -> None:
        """Let origin addresses, by index, behave otherwise; None: as the profile has it."""
        self.origin.behave({self.addresses[index]: behaviour or self.profile.server.of(index) for index in unit})

    def set_dns(self, dns: specs.DnsSpec | None) -> None:
        """Let DNS answer otherwise; None: as the profile has it."""
        self.origin.set_dns(dns or self.profile.dns)

    def next_host(self) -> int:
        """Give a host number that the device had on no link yet."""
        self._hosts += 1
        return self._hosts - 1


def _issue(authority: Authority, role: str, names: Sequence[str], ips: Sequence[str]) -> specs.Certificate:
    files = authority.issue(role, names=names, ips=ips)
    return specs.Certificate(str(files.certificate), str(files.key))


def _without_trace(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != "trace"}


def _offered(statistics: m.Statistics, direction: m.Direction) -> int:
    return sum(link.offered_bytes for link in statistics.links if link.direction is direction)


def _summary(statistics: m.Statistics) -> dict[str, Any]:
    drops: dict[str, int] = {}
    for link in statistics.links:
        for reason, count in link.lost.items():
            if count:
                drops[reason] = drops.get(reason, 0) + count
    return {
        "lateness_p99_ms": statistics.deliveries.p99_s * 1000,
        "lateness_max_ms": statistics.deliveries.max_s * 1000,
        "packets": sum(link.offered_packets for link in statistics.links),
        "drops": drops,
        "overflow_packets": statistics.overflow_packets,
    }


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold SIGINT back until the end of a clean-up: half of one would leave networks behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
