"""From a question and the rules to the answer. Pure; signing is `dispatch.signer`."""

import functools
from typing import Protocol

import msgspec

from stormline.core import errors, limits, limits_platform
from stormline.dispatch import nearest
from stormline.dispatch.nearest import ClientPlace, Nearest
from stormline.dispatch.rules import RuleSet
from stormline.wire import hostname
from stormline.wire import plan as wire_plan
from stormline.wire.plan import Endpoint, Home, HostPlan, Plan, PlanRequest


class Standing(Protocol):
    """Which endpoints are well enough to be handed out."""

    @property
    def revision(self) -> int:
        """Grows whenever an answer may have become another."""

    def __call__(self, endpoints: tuple[Endpoint, ...], /) -> tuple[Endpoint, ...]:
        """Give those that may be handed out, in the same order; never none of some."""


class Everywhere:
    """The standing of a centre that does not probe: all are well."""

    revision = 0

    def __call__(self, endpoints: tuple[Endpoint, ...], /) -> tuple[Endpoint, ...]:
        """Give all of them."""
        return endpoints


def hosts_of(request: PlanRequest) -> tuple[str, ...]:
    """Give the hosts asked for: in their normal form, sorted, each once.

    Raises:
        RequestRefused: too many (`too-many-hosts`), or one is no host name (`bad-host`).
    """
    if len(request.hosts) > limits.PLAN_HOSTS_MAX:
        raise errors.RequestRefused(
            "too-many-hosts", f"{len(request.hosts)} hosts asked for, at most {limits.PLAN_HOSTS_MAX} are answered"
        )
    try:
        return (_kept if len(request.hosts) <= limits_platform.QUESTION_CACHE_HOSTS_MAX else _normal)(request.hosts)
    except errors.ConfigError as error:
        raise errors.RequestRefused("bad-host", str(error)) from None


def _normal(hosts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({hostname.normalise(host) for host in hosts}))


_kept = functools.lru_cache(limits_platform.QUESTION_CACHE)(_normal)


def check_app(app: str, rules: RuleSet) -> None:
    """Make sure that the rules know the app.

    Raises:
        RequestRefused: they do not (`app-unknown`).
    """
    if app not in rules.apps:
        raise errors.RequestRefused("app-unknown", f"app {app[:80]!r} is not known here")


def plan_for(
    request: PlanRequest,
    rules: RuleSet,
    wall: float,
    *,
    near: Nearest | None = None,
    place: ClientPlace | None = None,
    standing: Standing | None = None,
) -> Plan:
    """Answer a question. Every host asked for is in `hosts` or in `unknown`, in its normal form.

    Hosts of the app's preload list are answered beside them as far as `limits.PLAN_HOSTS_MAX` allows.

    Args:
        request: the question.
        rules: checked rules.
        wall: now, seconds since 1970.
        near: orders endpoints for `place`; None leaves them as they stand.
        place: where the client is; None where that is not known.
        standing: leaves out endpoints that are not well; None for no such knowledge.

    Raises:
        RequestRefused: the app is unknown, or see `hosts_of`.
    """
    check_app(request.app, rules)
    allowed = rules.apps[request.app]
    known: dict[str, HostPlan] = {}
    unknown: list[str] = []
    off = frozenset(rules.disabled)
    where = place or ClientPlace(push=request.role == wire_plan.PUSH)

    def fit(endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
        left = tuple(each for each in endpoints if each.carrier not in off) if off else endpoints
        if standing is not None and left:
            left = standing(left)
        left = nearest.for_role(left, push=where.push)
        return near.order(left, where) if near is not None else left

    asked = hosts_of(request)
    extra = [host for host in rules.preload.get(request.app, ()) if host not in asked]
    for host in (*asked, *extra[: limits.PLAN_HOSTS_MAX - len(asked)]):
        if host in allowed and not rules.dns_only:
            rule = rules.hosts[host]
            endpoints = fit(rule.endpoints)
            known[host] = rule if endpoints == rule.endpoints else msgspec.structs.replace(rule, endpoints=endpoints)
        elif host in asked:
            unknown.append(host)
    issued_at = int(wall)
    life_s = min((each.ttl_s for each in known.values() if each.ttl_s is not None), default=limits.PLAN_LIFE_S)
    return Plan(
        app=request.app,
        version=rules.version,
        issued_at=issued_at,
        expires_at=issued_at + int(min(life_s, limits.PLAN_LIFE_S)),
        unit=rules.unit,
        hosts=known,
        gateways=() if rules.dns_only else fit(rules.gateways.get(request.app, ())),
        unknown=tuple(unknown),
        report=rules.report,
        disabled=rules.disabled,
        dns_only=rules.dns_only,
    )


def home_for(app: str, user: str, rules: RuleSet, wall: float) -> Home | None:
    """Give a user's home, None where the rules say nothing of units.

    Args:
        app: app of the user's token.
        user: the user.
        rules: checked rules.
        wall: now, seconds since 1970.
    """
    if not user or rules.homes is None:
        return None
    unit = rules.homes.moved.get(user) or nearest.choose(f"{app}\n{user}", rules.homes.units.items())
    issued_at = int(wall)
    return Home(
        app=app,
        user=user,
        unit=unit,
        epoch=rules.homes.epoch,
        issued_at=issued_at,
        expires_at=issued_at + int(limits.PLAN_LIFE_S),
    )
