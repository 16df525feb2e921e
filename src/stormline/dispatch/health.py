"""Which endpoints may be handed out: verdicts from probes, drains by hand, and a floor below both. Pure.

An endpoint that nobody has probed counts as well. It is ill after `fall` failed probes in a row, well again after
`rise` good ones; one that falls again and again is not believed for a while (flap damping). What is handed out for a
host is never nothing, and never less than `floor_share` of the endpoints that are not drained: probes see the network
from one place, and that place may be the ill one.

Each centre probes for itself. Two centres of a unit may therefore judge differently for a while; a client that asks
one and then the other gets two good answers, not one truth.
"""

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.core.values import Address
from stormline.dispatch.head import Drained
from stormline.wire.plan import Endpoint

Standing = Callable[[tuple[Endpoint, ...]], tuple[Endpoint, ...]]
"""Gives those endpoints of one host that may be handed out, in their order; never none of some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    """How probes become verdicts.

    Attributes:
        interval_s: from the end of one probe to the next, before jitter.
        jitter: part of it by which each pause is drawn shorter or longer, 0 to below 1.
        fall: failed probes in a row until ill.
        rise: good ones in a row until well.
        floor_share: share of a host's endpoints, those drained aside, that is handed out whatever the probes say.

    Raises:
        ConfigError: one is out of range; the message names it.
    """

    interval_s: float = limits.HEALTH_INTERVAL_S
    jitter: float = limits.HEALTH_JITTER
    fall: int = limits.HEALTH_FALL
    rise: int = limits.HEALTH_RISE
    floor_share: float = limits.HEALTH_FLOOR_SHARE

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not limits.HEALTH_INTERVAL_S_MIN <= self.interval_s < math.inf:
            raise errors.ConfigError(f"health: interval_s must be at least {limits.HEALTH_INTERVAL_S_MIN}")
        if not 0 <= self.jitter < 1:
            raise errors.ConfigError("health: jitter must be 0 to below 1")
        if self.fall < 1 or self.rise < 1:
            raise errors.ConfigError("health: fall and rise must be at least 1")
        if not 0 <= self.floor_share <= 1:
            raise errors.ConfigError("health: floor_share must be 0 to 1")

    def pause_s(self, chance: float) -> float:
        """Give the pause before the next probe, from a number drawn in [0, 1)."""
        return self.interval_s * (1 + self.jitter * (2 * chance - 1))

    def floor(self, count: int) -> int:
        """Give how many of `count` endpoints are handed out at least."""
        return max(min(1, count), math.ceil(self.floor_share * count))


class Target(NamedTuple):
    """What is probed: endpoints of several hosts that are the same to the network are one target.

    Attributes:
        host: IP literal, or a name.
        port: its port.
        carrier: how it is spoken to.
        server_name: name for SNI and certificate, empty for that of the host it serves.
    """

    host: str
    port: int
    carrier: str
    server_name: str

    @property
    def address(self) -> Address:
        """Where it is."""
        return Address(self.host, self.port)


def target_of(endpoint: Endpoint) -> Target:
    """Give what is probed for an endpoint."""
    return Target(endpoint.host, endpoint.port, endpoint.carrier, endpoint.server_name)


class Verdict(enum.StrEnum):
    """What is thought of a target."""

    UNKNOWN = "unknown"
    """Not judged yet, or not probed at all: handed out."""
    WELL = "well"
    ILL = "ill"
    DAMPED = "damped"
    """It answers, and is not believed yet: it fell too often of late."""


class Condition:
    """One target's course.

    Attributes:
        verdict: what is thought of it.
        since: when that began.
        streak: probes in a row of the latest kind: positive good ones, negative failed ones; 0 before the first.
        reason: why the latest probe failed, empty where it did not.
        usable_until: when it was usable last, before it fell; fixed until it falls anew, so that an order made of it
            changes only with a verdict.
    """

    __slots__ = ("_falls", "_falls_at", "reason", "since", "streak", "usable_until", "verdict")

    def __init__(self, now: float) -> None:
        self.verdict = Verdict.UNKNOWN
        self.since = now
        self.streak = 0
        self.reason = ""
        self.usable_until = now
        self._falls = 0.0
        self._falls_at = now

    @property
    def usable(self) -> bool:
        """Whether it is handed out by right, and not for want of better."""
        return self.verdict in (Verdict.UNKNOWN, Verdict.WELL)

    def falls(self, now: float) -> float:
        """Give the falls remembered: each counts 1 and fades by half in `limits.HEALTH_FLAP_HALF_LIFE_S`."""
        age_s = max(0.0, now - self._falls_at)
        return self._falls * math.exp2(-age_s / limits.HEALTH_FLAP_HALF_LIFE_S)

    def observe(self, good: bool, reason: str, now: float, policy: HealthPolicy) -> bool:
        """Take a probe's outcome in; True where `usable` changed."""
        before = self.usable
        if good:
            self.streak = max(self.streak, 0) + 1
            self.reason = ""
        else:
            self.streak = min(self.streak, 0) - 1
            self.reason = reason[: limits.HEALTH_REASON_CHARS_MAX]
        verdict = self._judge(now, policy)
        if verdict is Verdict.ILL and self.verdict is not Verdict.ILL:
            self._falls = min(self.falls(now) + 1, limits.HEALTH_FLAP_MAX)
            self._falls_at = now
            if before:
                self.usable_until = now
        if verdict is not self.verdict:
            self.verdict = verdict
            self.since = now
        return self.usable is not before

    def _judge(self, now: float, policy: HealthPolicy) -> Verdict:
        if -self.streak >= policy.fall:
            return Verdict.ILL
        if self.streak < policy.rise:
            return self.verdict
        if self.usable:
            return Verdict.WELL
        believed_below = limits.HEALTH_FLAP_REUSE if self.verdict is Verdict.DAMPED else limits.HEALTH_FLAP_SUPPRESS
        return Verdict.WELL if self.falls(now) < believed_below else Verdict.DAMPED


class Drains:
    """Holds what is out of service by hand, for one centre. Whoever wants it to hold for all tells each.

    Attributes:
        revision: grows with each change.
    """

    def __init__(self, drains: Iterable[Drained] = ()) -> None:
        self._drains: dict[Drained, None] = {}
        self._told: list[Callable[[Drained], None]] = []
        self.revision = 0
        for drain in drains:
            self.put(drain)

    def put(self, drain: Drained) -> bool:
        """Take endpoints out of service; False where they were already.

        Raises:
            ConfigError: more than `limits.DRAINS_MAX`, or a port out of range.
        """
        if not 0 <= drain.port < 65536 or not drain.host:
            raise errors.ConfigError(f"drain: port {drain.port} must be 0 to 65535, and the host not be empty")
        if drain in self._drains:
            return False
        if len(self._drains) >= limits.DRAINS_MAX:
            raise errors.ConfigError(f"drain: at most {limits.DRAINS_MAX} at once")
        self._drains[drain] = None
        self._changed(drain)
        return True

    def end(self, drain: Drained) -> bool:
        """Take them back into service; False where this was no drain."""
        if drain not in self._drains:
            return False
        del self._drains[drain]
        self._changed(drain)
        return True

    def all(self) -> tuple[Drained, ...]:
        """Give the drains, oldest first."""
        return tuple(self._drains)

    def covers(self, host: str, port: int) -> bool:
        """Say whether an endpoint at this address is out of service."""
        drains = self._drains
        return bool(drains) and (Drained(host=host, port=port) in drains or Drained(host=host) in drains)

    def on_change(self, told: Callable[[Drained], None]) -> None:
        """Have `told` called with each drain that began or ended, after it did."""
        self._told.append(told)

    def _changed(self, drain: Drained) -> None:
        self.revision += 1
        for told in self._told:
            told(drain)


class Part(NamedTuple):
    """To whom endpoints belong: to a host, or as gateways to an app; the other name is empty."""

    host: str = ""
    app: str = ""


class Rules(Protocol):
    """What is needed of a rule set; `dispatch.rules.RuleSet` is one."""

    @property
    def disabled(self) -> tuple[str, ...]:
        """Means and carriers that are switched off."""
        ...

    @property
    def hosts(self) -> "Mapping[str, HostEndpoints]":
        """Hosts by name."""
        ...

    @property
    def gateways(self) -> Mapping[str, tuple[Endpoint, ...]]:
        """Gateways by app."""
        ...


class HostEndpoints(Protocol):
    """What is needed of a host's rules."""

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Its endpoints."""
        ...


class TargetState(msgspec.Struct, frozen=True, kw_only=True):
    """A target as the admin API shows it.

    Attributes:
        address: where it is.
        carrier: how it is spoken to.
        server_name: name for SNI and certificate.
        verdict: see `Verdict`.
        since_s: seconds for which it has been so.
        streak: good probes in a row, failed ones below zero.
        falls: falls remembered.
        reason: why the latest probe failed.
        drained: it is out of service by hand.
    """

    address: str
    carrier: str
    server_name: str
    verdict: Verdict
    since_s: float
    streak: int
    falls: float
    reason: str
    drained: bool


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything, as the admin API shows it.

    Attributes:
        revision: see `Health.revision`.
        unprobed: targets that are not probed: too many, or of a kind that cannot be.
        drains: what is out of service by hand.
        targets: those probed.
    """

    revision: int
    unprobed: int
    drains: tuple[Drained, ...]
    targets: tuple[TargetState, ...]


class Health:
    """Conditions of the targets of a rule set, and what may be handed out.

    Args:
        policy: how probes become verdicts.
        drains: what is out of service by hand; may change at any time.
        can_probe: says whether a target can be probed at all; others are handed out as if they were well.
    """

    def __init__(
        self, policy: HealthPolicy, drains: Drains, *, can_probe: Callable[[Target], bool] = lambda target: True
    ) -> None:
        self._policy = policy
        self._drains = drains
        self._can_probe = can_probe
        self._conditions: dict[Target, Condition] = {}
        self._due_at: dict[Target, float] = {}
        self._names: dict[Target, str] = {}
        self._changes = 0
        self.unprobed = 0
        """Targets of the rules that are not probed."""

    # -- what is handed out ------------------------------------------------------------------------------------------

    @property
    def revision(self) -> int:
        """Grows whenever `standing` may answer differently than before; part of the key of whoever keeps answers."""
        return self._changes + self._drains.revision

    def standing(self, endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
        """Give those endpoints of one host that may be handed out, in their order.

        Drained ones only where all are: then one. Of the others the good ones, and of the ill ones as many as the
        floor wants, those first that fell last; all where none is good.
        """
        serving = [each for each in endpoints if not self._drains.covers(each.host, each.port)]
        if not serving:
            return (min(endpoints, key=self._doubt),) if endpoints else ()
        good = [each for each in serving if self._usable(each)]
        if len(good) == len(endpoints):
            return endpoints
        if not good:
            return tuple(serving)
        missing = self._policy.floor(len(serving)) - len(good)
        if missing <= 0:
            return tuple(good)
        ill = sorted((each for each in serving if not self._usable(each)), key=self._doubt)[:missing]
        chosen = {id(each) for each in (*good, *ill)}
        return tuple(each for each in serving if id(each) in chosen)

    def _usable(self, endpoint: Endpoint) -> bool:
        return not self._doubt(endpoint)[0]

    def _doubt(self, endpoint: Endpoint) -> tuple[bool, float]:
        """Order endpoints: what is well first, then what fell last."""
        condition = self._conditions.get(target_of(endpoint))
        if condition is None or condition.usable:
            return False, 0.0
        return True, -condition.usable_until

    # -- what is probed ----------------------------------------------------------------------------------------------

    def watch(self, names: Mapping[Target, str], now: float, chance: Callable[[], float]) -> None:
        """Take these targets in the place of the earlier ones; those that stay keep their course.

        Args:
            names: the name that the certificate of each must carry; see `targets`.
            now: monotonic seconds.
            chance: draws numbers in [0, 1): the first probe of each new target comes at a random moment of an interval.
        """
        probed = [target for target in names if self._can_probe(target)][: limits.HEALTH_TARGETS_MAX]
        self.unprobed = len(names) - len(probed)
        before = self._conditions
        self._conditions = {target: before.get(target) or Condition(now) for target in probed}
        self._due_at = {target: self._due_at.get(target, now + chance() * self._policy.interval_s) for target in probed}
        self._names = {target: names[target] for target in probed}
        if any(not before[target].usable for target in before.keys() - self._conditions.keys()):
            self._changes += 1

    def take_due(self, now: float) -> list[tuple[Target, str]]:
        """Give what is to be probed now, each with the name its certificate must carry.

        It is not due again before `observe` was told the outcome.
        """
        due = [target for target, at in self._due_at.items() if at <= now]
        for target in due:
            self._due_at[target] = math.inf
        return [(target, self._names[target]) for target in due]

    def next_due(self) -> float | None:
        """Give when `take_due` has something next, in monotonic seconds; None for never."""
        at = min(self._due_at.values(), default=math.inf)
        return None if at == math.inf else at

    def observe(self, target: Target, good: bool | None, reason: str, now: float, chance: float) -> bool:
        """Take a probe's outcome in; True where what is handed out may have changed.

        Args:
            target: what was probed; one that is no longer watched is ignored.
            good: whether it did all that was asked of it; None: the probe says nothing.
            reason: why not.
            now: monotonic seconds.
            chance: a number drawn in [0, 1), for the pause to the next probe.
        """
        condition = self._conditions.get(target)
        if condition is None:
            return False
        self._due_at[target] = now + self._policy.pause_s(chance)
        if good is None or not condition.observe(good, reason, now, self._policy):
            return False
        self._changes += 1
        return True

    def snapshot(self, now: float) -> Snapshot:
        """Give everything there is to see."""
        return Snapshot(
            revision=self.revision,
            unprobed=self.unprobed,
            drains=self._drains.all(),
            targets=tuple(self._state(target, condition, now) for target, condition in self._conditions.items()),
        )

    def _state(self, target: Target, condition: Condition, now: float) -> TargetState:
        return TargetState(
            address=str(target.address),
            carrier=target.carrier,
            server_name=target.server_name,
            verdict=condition.verdict,
            since_s=round(max(0.0, now - condition.since), 1),
            streak=condition.streak,
            falls=round(condition.falls(now), 2),
            reason=condition.reason,
            drained=self._drains.covers(target.host, target.port),
        )


def parts(rules: Rules) -> Iterator[tuple[Part, tuple[Endpoint, ...]]]:
    """Give the endpoints of each app's gateways, then of each host, without those whose carrier is switched off."""
    off = frozenset(rules.disabled)

    def on(endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
        return tuple(each for each in endpoints if each.carrier not in off) if off else endpoints

    for app, endpoints in rules.gateways.items():
        yield Part(app=app), on(endpoints)
    for host, plan in rules.hosts.items():
        yield Part(host=host), on(plan.endpoints)


def targets(many: Iterable[Rules]) -> dict[Target, str]:
    """Give the targets of rule sets, each with the name its certificate must carry; the gateways of each set first."""
    found: dict[Target, str] = {}
    for rules in many:
        for part, endpoints in parts(rules):
            for endpoint in endpoints:
                found.setdefault(target_of(endpoint), endpoint.server_name or part.host or endpoint.host)
    return found
