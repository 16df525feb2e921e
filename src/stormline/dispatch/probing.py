"""Probes of endpoints: a TCP connection, a TLS handshake with the name verified, one HTTP request, one QUIC datagram.

| carrier                   | a probe is good where                                                                  |
|---------------------------|----------------------------------------------------------------------------------------|
| `sl-tls`                  | TLS stands with a certificate for the name, and ALPN (RFC 7301) agrees on `sl/1`       |
| `sl-wss`, `sl-short`      | the same with `http/1.1`                                                               |
| `h2`                      | the same with `h2`                                                                     |
| `h1`                      | the same with `http/1.1` or none; where the host has an `HttpCheck`, its status is one |
| in `HealthConfig.tcp`     | the TCP connection stands                                                              |
| `h3`, `sl-quic`           | it says over UDP which versions of QUIC it speaks, and one of ours is among them       |
| another                   | not probed, and handed out                                                             |

A redirect is an answer like any other and never followed; an answer's body is not read. Endpoints that are names and
not addresses are not probed either. Silence over UDP says something only where another server answers: many networks
let none of it out, and a centre in one of them would take QUIC from all of its clients.
"""

import asyncio
import contextlib
import itertools
import logging
import ssl
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.clock import Rng
from stormline.core.values import Address
from stormline.dispatch.head import Drained
from stormline.dispatch.health import Drains, Health, HealthPolicy, Part, Rules, Snapshot, Target, target_of, targets
from stormline.dispatch.health import parts as parts_of
from stormline.net.stream import Stream, open_tcp, reason_of
from stormline.net.tls import start_tls
from stormline.net.trust import foreign_context, roles_context
from stormline.outbound.http1 import Http1Connection
from stormline.outbound.http1_codec import encode
from stormline.outbound.messages import HttpRequest
from stormline.wire import messages, quic, short, websocket
from stormline.wire.plan import Carrier, Endpoint

_log = logging.getLogger("stormline.dispatch")

_ALPN: Final[Mapping[str, str]] = {
    Carrier.LONG_TLS: messages.ALPN,
    Carrier.LONG_WSS: websocket.ALPN,
    Carrier.SHORT: short.ALPN,
    Carrier.H1: "http/1.1",
    "h2": "h2",
}
_QUIC: Final = frozenset({Carrier.H3.value, Carrier.LONG_QUIC.value})


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
    """What a probe found: `reason` says why it is not good; None: nothing can be said."""

    good: bool | None
    reason: str = ""


Probe = Callable[[Target, str], Awaitable[Outcome]]
"""Probes a target whose certificate must carry the name given. Raises nothing but cancellation."""
Tried = Mapping[Target, str]
"""Why what was tried is ill; what is not in it is well, or was not tried."""
Try = Callable[[Mapping[Target, str]], Awaitable[Tried]]
"""Tries targets once, each with the name its certificate must carry; see `Prober.ill`."""


class Prober:
    """Probes of real endpoints.

    Args:
        config: what is asked.
        rng: for what nobody may guess.

    Raises:
        ConfigError: the CA cannot be read.
    """

    def __init__(self, config: HealthConfig, *, rng: Rng) -> None:
        self._rng = rng
        self._quic_answers: OrderedDict[Address, float] = OrderedDict()
        self._checks = dict(config.checks)
        self._tcp = config.tcp
        self._contexts = {carrier: _context(carrier, config.ca_pem) for carrier in _ALPN}

    def can_probe(self, target: Target) -> bool:
        """Say whether a target is of a kind that is probed."""
        known = target.carrier in self._contexts or target.carrier in self._tcp or target.carrier in _QUIC
        return known and target.address.is_ip

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
            if stage == "quic" and not self._quic_passes(target.address):
                return Outcome(None, "quic: silent, as all servers of QUIC are from here")
            return Outcome(False, f"{stage}: nothing within {limits.HEALTH_TIMEOUT_S:g} s")
        except (OSError, errors.StormlineError) as error:
            return Outcome(False, f"{stage}: {reason_of(error)}")

    async def ill(self, names: Mapping[Target, str]) -> dict[Target, str]:
        """Probe each of these once, and say of the ill ones why; see `Try`.

        At most `limits.HEALTH_PROBES_MAX` are probed at once. What is not of a kind that is probed, and what is beyond
        `limits.RULES_LIVE_TARGETS_MAX`, counts as well.
        """
        room = asyncio.Semaphore(limits.HEALTH_PROBES_MAX)

        async def one(target: Target) -> Outcome:
            async with room:
                return await self.probe(target, names[target])

        tried = [target for target in names if self.can_probe(target)][: limits.RULES_LIVE_TARGETS_MAX]
        outcomes = await asyncio.gather(*map(one, tried))
        return {
            target: outcome.reason for target, outcome in zip(tried, outcomes, strict=True) if outcome.good is False
        }

    async def _probe(self, target: Target, name: str, enter: Callable[[str], None]) -> Outcome:
        if target.carrier in _QUIC:
            enter("quic")
            return await self._ask_versions(target)
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

    async def _ask_versions(self, target: Target) -> Outcome:
        drawn = self._rng.token_bytes(2 * quic.ID_BYTES)
        ids = drawn[: quic.ID_BYTES], drawn[quic.ID_BYTES :]
        transport, answers = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: _Answers(*ids), remote_addr=(target.host, target.port)
        )
        try:
            while not answers.versions.done():
                transport.sendto(quic.question(*ids))
                await asyncio.wait([answers.versions], timeout=limits.HEALTH_QUIC_REPEAT_S)
            versions = answers.versions.result()
        finally:
            answers.versions.cancel()
            transport.close()
        self._quic_answers[target.address] = asyncio.get_running_loop().time()
        self._quic_answers.move_to_end(target.address)
        while len(self._quic_answers) > limits.HEALTH_TARGETS_MAX:
            self._quic_answers.popitem(last=False)
        if versions & quic.VERSIONS:
            return Outcome(True)
        shown = ", ".join(f"{version:#010x}" for version in sorted(versions)[:4])
        return Outcome(False, f"quic: it speaks {shown} and no version of ours")

    def _quic_passes(self, beside: Address) -> bool:
        """Say whether another server than this one has answered over UDP of late."""
        since = asyncio.get_running_loop().time() - limits.HEALTH_QUIC_WITNESS_S
        latest = itertools.islice(reversed(self._quic_answers.items()), 2)
        return any(address != beside and at >= since for address, at in latest)


class _Answers(asyncio.DatagramProtocol):
    """Waits for the versions; whatever else arrives is passed over, as it may be forged."""

    def __init__(self, destination: bytes, source: bytes) -> None:
        self._ids = destination, source
        self.versions: asyncio.Future[frozenset[int]] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, addr: object) -> None:
        found = quic.read_answer(data, *self._ids)
        if found is not None and not self.versions.done():
            self.versions.set_result(found)

    def error_received(self, exc: Exception) -> None:
        if not self.versions.done():
            self.versions.set_exception(exc)


def _context(carrier: str, ca_pem: bytes | None) -> ssl.SSLContext:
    alpn = (_ALPN[carrier],)
    if ca_pem is not None and carrier in (Carrier.LONG_TLS, Carrier.LONG_WSS, Carrier.SHORT):
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
    """Has the targets of the rules probed, each in its time, and says whose endpoints stand otherwise now.

    Args:
        policy: how often, and how outcomes become verdicts.
        drains: what is out of service by hand.
        prober: probes; None: nothing is probed, and only drains count.
        rng: for the moments of probes.
        told: told of whatever it answers otherwise for than before, beside changes of the rules.
    """

    def __init__(
        self,
        policy: HealthPolicy,
        drains: Drains,
        prober: Prober | None,
        *,
        rng: Rng,
        told: Callable[[frozenset[Part]], None],
    ) -> None:
        self._health = Health(policy, drains, can_probe=_none if prober is None else prober.can_probe)
        self._probe: Probe = _unknown if prober is None else prober.probe
        self._probes_any = prober is not None
        self._rng = rng
        self._told = told
        self._parts: dict[Part, tuple[tuple[Endpoint, ...], ...]] = {}
        self._served: dict[Target, list[Part]] = {}
        self._shown: dict[Part, tuple[tuple[Endpoint, ...], ...]] = {}
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

    def watch(self, *served: Rules) -> None:
        """Probe what these rules hold from now on, in the place of the earlier ones.

        Args:
            served: rule sets that answers are made from: one, or two while a roll-out is open.
        """
        self._health.watch(targets(served), asyncio.get_running_loop().time(), self._rng.random)
        if self._health.unprobed and self._probes_any:
            _log.info("%d endpoints are not probed", self._health.unprobed)
        self._parts = {}
        self._served = {}
        for rules in served:
            for part, endpoints in parts_of(rules):
                lists = self._parts.get(part, ())
                if endpoints in lists:
                    continue
                self._parts[part] = (*lists, endpoints)
                for endpoint in endpoints:
                    self._served.setdefault(target_of(endpoint), []).append(part)
        partly = {part: self._standing(part) for part in self._parts}
        self._shown = {part: some for part, some in partly.items() if some != self._parts[part]}
        self._wake.set()

    def _standing(self, part: Part) -> tuple[tuple[Endpoint, ...], ...]:
        return tuple(self(endpoints) for endpoints in self._parts[part])

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
        served = (found for target, found in self._served.items() if drain.covers(target.address))
        self._tell({part for found in served for part in found})

    def _tell(self, touched: Iterable[Part]) -> None:
        changed = []
        for part in touched:
            whole = self._parts[part]
            before, now = self._shown.get(part, whole), self._standing(part)
            if now != before:
                changed.append(part)
            self._shown[part] = now
            if now == whole:
                del self._shown[part]
        if changed:
            self._told(frozenset(changed))


def _none(target: Target) -> bool:
    return False


async def _unknown(target: Target, name: str) -> Outcome:
    return Outcome(True)
