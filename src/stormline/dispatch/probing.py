"""Probes of endpoints: a TCP connection, a TLS handshake with the name verified, one HTTP request.

| carrier                   | a probe is good where                                                                  |
|---------------------------|----------------------------------------------------------------------------------------|
| `sl-tls`                  | TLS stands with a certificate for the name, and ALPN (RFC 7301) agrees on `sl/1`       |
| `h2`                      | the same with `h2`                                                                     |
| `h1`                      | the same with `http/1.1` or none; where the host has an `HttpCheck`, its status is one |
| in `HealthConfig.tcp`     | the TCP connection stands                                                              |
| another                   | not probed, and handed out: there is no QUIC here                                      |

A redirect is an answer like any other and never followed; an answer's body is not read. Endpoints that are names and
not addresses are not probed either.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.clock import Rng
from stormline.dispatch.head import Drained
from stormline.dispatch.health import Drains, Health, HealthPolicy, Rules, Snapshot, Target, target_of
from stormline.net.stream import Stream, open_tcp, reason_of
from stormline.net.tls import start_tls
from stormline.net.trust import foreign_context, roles_context
from stormline.outbound.http1 import Http1Connection
from stormline.outbound.http1_codec import encode
from stormline.outbound.messages import HttpRequest
from stormline.wire import messages
from stormline.wire.plan import Carrier, Endpoint

_log = logging.getLogger("stormline.dispatch")

_ALPN: Final[Mapping[str, str]] = {Carrier.LONG_TLS: messages.ALPN, Carrier.H1: "http/1.1", "h2": "h2"}


class HttpCheck(NamedTuple):
    """What a host is asked beyond the handshake.

    Attributes:
        path: request target of a GET, beginning with `/`.
        statuses: good answers.
    """

    path: str
    statuses: frozenset[int] = frozenset({200, 204})


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """What the probes of a centre need.

    Attributes:
        policy: how often, and how outcomes become verdicts.
        ca_pem: the platform's CA, which `sl-tls` is verified against, and `h1` and `h2` beside the system's roots; None
            for the system's roots alone.
        checks: what to ask a host, by the name its certificate carries.
        tcp: carriers of which only the TCP connection is tried.

    Raises:
        ConfigError: a path does not begin with `/`, or the CA cannot be read.
    """

    policy: HealthPolicy = field(default_factory=HealthPolicy)
    ca_pem: bytes | None = None
    checks: Mapping[str, HttpCheck] = field(default_factory=dict)
    tcp: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Check the paths; the CA is read by `Prober`."""
        for host, check in self.checks.items():
            if not check.path.startswith("/") or not check.statuses:
                raise errors.ConfigError(
                    f"health: check of {host!r}: a path beginning with '/' and a status are needed"
                )


class Outcome(NamedTuple):
    """What a probe found: `reason` says why it is not good."""

    good: bool
    reason: str = ""


Probe = Callable[[Target, str], Awaitable[Outcome]]
"""Probes a target whose certificate must carry the name given. Raises nothing but cancellation."""


class Prober:
    """Probes of real endpoints.

    Args:
        config: what is asked.

    Raises:
        ConfigError: the CA cannot be read.
    """

    def __init__(self, config: HealthConfig) -> None:
        self._checks = dict(config.checks)
        self._tcp = config.tcp
        self._contexts = {carrier: _context(carrier, config.ca_pem) for carrier in _ALPN}

    def can_probe(self, target: Target) -> bool:
        """Say whether a target is of a kind that is probed."""
        return (target.carrier in self._contexts or target.carrier in self._tcp) and target.address.is_ip

    async def probe(self, target: Target, name: str) -> Outcome:
        """See `Probe`; takes at most `limits.HEALTH_TIMEOUT_S`. Cancelled, it leaves no descriptor behind."""
        stage = "connect"

        def enter(new: str) -> None:
            nonlocal stage
            stage = new

        try:
            async with asyncio.timeout(limits.HEALTH_TIMEOUT_S):
                return await self._probe(target, name, enter)
        except TimeoutError as error:
            if error.errno is not None:  # the kernel's own, of the connection
                return Outcome(False, f"{stage}: {reason_of(error)}")
            return Outcome(False, f"{stage}: nothing within {limits.HEALTH_TIMEOUT_S:g} s")
        except (OSError, errors.StormlineError) as error:
            return Outcome(False, f"{stage}: {reason_of(error)}")

    async def _probe(self, target: Target, name: str, enter: Callable[[str], None]) -> Outcome:
        raw = await open_tcp(target.address)
        try:
            if target.carrier in self._tcp:
                return Outcome(True)
            enter("tls")
            stream = await start_tls(raw, self._contexts[target.carrier], name)
            wanted = _ALPN[target.carrier]
            if stream.alpn != wanted and not (stream.alpn is None and target.carrier == Carrier.H1):
                return Outcome(False, f"tls: it speaks {stream.alpn or 'no protocol by name'}, not {wanted}")
            check = self._checks.get(name) if target.carrier == Carrier.H1 else None
            if check is None:
                return Outcome(True)
            enter("http")
            status = await _status(stream, name, check.path)
            return Outcome(True) if status in check.statuses else Outcome(False, f"http: status {status}")
        finally:
            raw.close()


def _context(carrier: str, ca_pem: bytes | None) -> ssl.SSLContext:
    alpn = (_ALPN[carrier],)
    if ca_pem is not None and carrier == Carrier.LONG_TLS:
        return roles_context(ca_pem, alpn)
    context = foreign_context(alpn)
    if ca_pem is not None:
        roles_context(ca_pem, ())  # says it where there is no CA in it
        context.load_verify_locations(cadata=ca_pem.decode("ascii"))
    return context


async def _status(stream: Stream, name: str, path: str) -> int:
    connection = Http1Connection(stream)
    deadline_at = connection.loop.time() + limits.HEALTH_TIMEOUT_S
    request = HttpRequest("GET", "https", name, 443, path.encode("ascii"), ((b"user-agent", b"stormline-health"),))
    try:
        answer = await connection.exchange(
            encode(request), deadline_at=deadline_at, done=lambda reusable: None, on_stage=lambda stage: None
        )
        return answer.status
    finally:
        connection.close()


class Monitor:
    """Has the targets of the rules probed, each in its time, and says which hosts' endpoints stand otherwise now.

    Args:
        policy: how often, and how outcomes become verdicts.
        drains: what is out of service by hand.
        prober: probes.
        rng: for the moments of probes.
        told: told of hosts for which it answers otherwise than before, beside changes of the rules.
    """

    def __init__(
        self,
        policy: HealthPolicy,
        drains: Drains,
        prober: Prober,
        *,
        rng: Rng,
        told: Callable[[frozenset[str]], None],
    ) -> None:
        self._health = Health(policy, drains, can_probe=prober.can_probe)
        self._probe: Probe = prober.probe
        self._rng = rng
        self._told = told
        self._hosts: dict[str, tuple[Endpoint, ...]] = {}
        self._served: dict[Target, list[str]] = {}
        self._shown: dict[str, tuple[Endpoint, ...]] = {}
        self._wake = asyncio.Event()
        self._room = asyncio.Semaphore(limits.HEALTH_PROBES_MAX)
        self._probes: dict[asyncio.Task[None], None] = {}
        drains.on_change(self._drained)

    @property
    def revision(self) -> int:
        """See `Health.revision`."""
        return self._health.revision

    def __call__(self, endpoints: tuple[Endpoint, ...], /) -> tuple[Endpoint, ...]:
        """Give those that may be handed out (`planner.Standing`); see `Health.standing`."""
        return self._health.standing(endpoints)

    def snapshot(self) -> Snapshot:
        """See `Health.snapshot`."""
        return self._health.snapshot(asyncio.get_running_loop().time())

    def watch(self, rules: Rules) -> None:
        """Probe what these rules hold from now on, in the place of the earlier ones."""
        self._health.watch(rules, asyncio.get_running_loop().time(), self._rng.random)
        if self._health.unprobed:
            _log.info("%d endpoints are not probed", self._health.unprobed)
        self._hosts = {host: plan.endpoints for host, plan in rules.hosts.items()}
        self._served = {}
        for host, endpoints in self._hosts.items():
            for endpoint in endpoints:
                self._served.setdefault(target_of(endpoint), []).append(host)
        partly = {host: self(endpoints) for host, endpoints in self._hosts.items()}
        self._shown = {host: some for host, some in partly.items() if some != self._hosts[host]}
        self._wake.set()

    async def run(self) -> None:
        """Probe until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._wake.clear()
                for target, name in self._health.take_due(loop.time()):
                    task = loop.create_task(self._run_probe(target, name), name="health probe")
                    self._probes[task] = None
                    task.add_done_callback(lambda done: self._probes.pop(done, None))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._health.next_due()):
                        await self._wake.wait()
        finally:
            probes = list(self._probes)
            for task in probes:
                task.cancel()
            if probes:
                await asyncio.wait(probes)

    async def _run_probe(self, target: Target, name: str) -> None:
        outcome = Outcome(False, "a fault of the probe")
        try:
            async with self._room:
                outcome = await self._probe(target, name)
        except Exception:
            _log.exception("the probe of %s failed", target.address)
        now = asyncio.get_running_loop().time()
        if self._health.observe(target, outcome.good, outcome.reason, now, self._rng.random()):
            _log.warning("%s (%s): %s", target.address, name, outcome.reason or "well")
            self._tell(self._served.get(target, ()))
        self._wake.set()

    def _drained(self, drain: Drained) -> None:
        served = (hosts for target, hosts in self._served.items() if drain.covers(target.address))
        self._tell({host for hosts in served for host in hosts})

    def _tell(self, hosts: Iterable[str]) -> None:
        changed = []
        for host in hosts:
            endpoints = self._hosts[host]
            before, now = self._shown.get(host, endpoints), self(endpoints)
            if now != before:
                changed.append(host)
            self._shown[host] = now
            if now == endpoints:
                del self._shown[host]
        if changed:
            self._told(frozenset(changed))
