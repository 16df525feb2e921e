"""From a question and the rules to the answer. Pure; signing is `dispatch.signer`."""

from stormline.core import errors, limits
from stormline.dispatch.rules import RuleSet
from stormline.wire import hostname
from stormline.wire.plan import HostPlan, Plan, PlanRequest


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
        return tuple(sorted({hostname.normalise(host) for host in request.hosts}))
    except errors.ConfigError as error:
        raise errors.RequestRefused("bad-host", str(error)) from None


def check_app(app: str, rules: RuleSet) -> None:
    """Make sure that the rules know the app.

    Raises:
        RequestRefused: they do not (`app-unknown`).
    """
    if app not in rules.apps:
        raise errors.RequestRefused("app-unknown", f"app {app[:80]!r} is not known here")


def plan_for(request: PlanRequest, rules: RuleSet, wall: float) -> Plan:
    """Answer a question. Every host asked for is in `hosts` or in `unknown`, in its normal form.

    Args:
        request: the question.
        rules: checked rules.
        wall: now, seconds since 1970.

    Raises:
        RequestRefused: the app is unknown, or see `hosts_of`.
    """
    check_app(request.app, rules)
    allowed = rules.apps[request.app]
    known: dict[str, HostPlan] = {}
    unknown: list[str] = []
    for host in hosts_of(request):
        if host in allowed:
            known[host] = rules.hosts[host]
        else:
            unknown.append(host)
    issued_at = int(wall)
    return Plan(
        app=request.app,
        version=rules.version,
        issued_at=issued_at,
        expires_at=issued_at + int(limits.PLAN_LIFE_S),
        unit=rules.unit,
        hosts=known,
        gateways=rules.gateways.get(request.app, ()),
        unknown=tuple(unknown),
        report=rules.report,
        disabled=rules.disabled,
    )
