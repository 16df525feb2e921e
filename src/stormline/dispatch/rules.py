"""What dispatch knows: which hosts there are, how each is reached, and which app may ask for which.

A rule set is data: made by assembly or an operator, replaced whole, under a version that only grows.
"""

from typing import Annotated, Final

import msgspec

from stormline.core import errors, ids
from stormline.core import limits_platform as limits
from stormline.wire import hostname, strictjson
from stormline.wire.plan import Endpoint, HostPlan

FORMAT: Final = "stormline-rules/1"


class RuleSet(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """All rules of one scheduling centre.

    Build one and pass it through `check`, or read one with `decode`, before it is used.

    Attributes:
        format: always `FORMAT`.
        version: only grows; old content comes back under a new version.
        unit: unit of this scheduling centre, empty where there is only one.
        hosts: how to reach each host, by its name.
        apps: the hosts each app is told about, by app id; for any other host the answer is 'unknown'.
        gateways: where an app's long connection can go, by app id.
        report: where telemetry goes (HTTPS), None for nowhere.
        disabled: means that are switched off for every app, by name.
    """

    format: str = FORMAT
    version: Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)]
    unit: str = ""
    hosts: dict[str, HostPlan] = {}
    apps: dict[str, frozenset[str]] = {}
    gateways: dict[str, tuple[Endpoint, ...]] = {}
    report: Endpoint | None = None
    disabled: tuple[str, ...] = ()


_decoder = msgspec.json.Decoder(RuleSet)
_endpoint_decoder = msgspec.json.Decoder(HostPlan)


def check(rules: RuleSet) -> RuleSet:
    """Give the same rules with every host name in its normal form.

    Raises:
        ConfigError: an app id, unit, host name or endpoint is malformed, a host is named twice, an app lists a host
            without rules, or there are too many endpoints; the message names it.
    """
    if not 1 <= rules.version < 2**53:
        raise errors.ConfigError(f"rules: version {rules.version} must be at least 1")
    if rules.unit:
        ids.check_label(rules.unit, "rules: unit")
    if len(rules.disabled) > limits.RULES_NAMES_MAX:
        raise errors.ConfigError(f"rules: at most {limits.RULES_NAMES_MAX} means can be disabled")
    hosts: dict[str, HostPlan] = {}
    for name, plan in rules.hosts.items():
        host = _host(name, "rules")
        if host in hosts:
            raise errors.ConfigError(f"rules: host {host!r} is there twice")
        hosts[host] = _check_host(host, plan)
    apps: dict[str, frozenset[str]] = {}
    for app, names in rules.apps.items():
        ids.check_label(app, "rules: app")
        apps[app] = frozenset(_host(name, f"rules: app {app!r}") for name in names)
        unknown = sorted(apps[app] - hosts.keys())
        if unknown:
            raise errors.ConfigError(f"rules: app {app!r} lists host {unknown[0]!r}, which has no rules")
    gateways: dict[str, tuple[Endpoint, ...]] = {}
    for app, endpoints in rules.gateways.items():
        if app not in apps:
            raise errors.ConfigError(f"rules: gateways of app {app[:80]!r}, which is not among the apps")
        if len(endpoints) > limits.RULES_NAMES_MAX:
            raise errors.ConfigError(f"rules: app {app!r}: at most {limits.RULES_NAMES_MAX} gateways")
        gateways[app] = tuple(_check_endpoint(f"gateway of app {app!r}", endpoint) for endpoint in endpoints)
    report = _check_endpoint("report", rules.report) if rules.report else None
    return msgspec.structs.replace(rules, hosts=hosts, apps=apps, gateways=gateways, report=report)


def _host(name: str, where: str) -> str:
    try:
        return hostname.normalise(name)
    except errors.ConfigError as error:
        raise errors.ConfigError(f"{where}: {error}") from None


def _check_host(host: str, plan: HostPlan) -> HostPlan:
    if len(plan.endpoints) > limits.RULES_NAMES_MAX:
        raise errors.ConfigError(f"rules: host {host!r}: at most {limits.RULES_NAMES_MAX} endpoints")
    try:
        # What was built in Python has not been through the decoder's own bounds (ports, time-outs) yet.
        plan = _endpoint_decoder.decode(msgspec.json.encode(plan))
    except msgspec.MsgspecError as error:
        raise errors.ConfigError(f"rules: host {host!r}: {error}") from error
    endpoints = tuple(_check_endpoint(f"host {host!r}", endpoint) for endpoint in plan.endpoints)
    return msgspec.structs.replace(plan, endpoints=endpoints)


def _check_endpoint(what: str, endpoint: Endpoint) -> Endpoint:
    where = f"rules: {what}: endpoint"
    if not 0 < endpoint.port < 65536:
        raise errors.ConfigError(f"{where}: port {endpoint.port} must be 1 to 65535")
    if endpoint.unit:
        ids.check_label(endpoint.unit, f"{where}: unit")
    server_name = _host(endpoint.server_name, where) if endpoint.server_name else ""
    return msgspec.structs.replace(endpoint, host=_host(endpoint.host, where), server_name=server_name)


def encode(rules: RuleSet) -> bytes:
    """Give the rules as indented JSON, the form of the file."""
    return msgspec.json.format(msgspec.json.encode(rules, order="deterministic"), indent=2) + b"\n"


def decode(data: bytes, *, where: str = "rules") -> RuleSet:
    """Read rules from JSON and check them.

    Args:
        data: the file's bytes.
        where: named in errors, usually the path.

    Raises:
        ConfigError: too large, not JSON, of another format, or see `check`.
    """
    if len(data) > limits.RULES_BYTES_MAX:
        raise errors.ConfigError(f"{where}: {len(data)} bytes, a rule set has at most {limits.RULES_BYTES_MAX}")
    try:
        rules = strictjson.decode(data, _decoder)
    except ValueError as error:
        raise errors.ConfigError(f"{where}: not a rule set: {error}") from error
    if rules.format != FORMAT:
        raise errors.ConfigError(f"{where}: format {rules.format[:40]!r}, this version reads {FORMAT!r}")
    return check(rules)
