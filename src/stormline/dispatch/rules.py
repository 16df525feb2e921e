"""What dispatch knows: which hosts there are, how each is reached, and which app may ask for which.

A rule set is data: made by assembly or an operator, replaced whole, under a version that only grows.
"""

import ipaddress
from collections.abc import Iterable
from typing import Annotated, Any, Final

import msgspec

from stormline.core import errors, ids
from stormline.core import limits_platform as limits
from stormline.policy import means, presets
from stormline.wire import hostname, jws, ohttp, pathpattern, strictjson
from stormline.wire.plan import LONG_CARRIERS, PUSH, SEALED, Carrier, Endpoint, HostPlan, Policy

FORMAT: Final = "stormline-rules/1"
MEANS: Final = frozenset(each.value for each in means.Means)
"""What can be put in order and counted, by name."""
SWITCHES: Final = frozenset({*means.SWITCHES, *(each.value for each in Carrier)})
"""What can be switched off, by name."""
_CARRIERS: Final = frozenset(each.value for each in Carrier)


class Network(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Where a range of client addresses is.

    Attributes:
        region: one of the rule set's regions, empty where it is not known.
        operator: name of the network operator, empty where it is not known.
    """

    region: str = ""
    operator: str = ""


class Region(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A part of the world.

    Attributes:
        unit: unit that serves clients in it, empty for no preference.
        near: other regions, nearest first.
        countries: ISO 3166 codes by which a MaxMind database finds it.
    """

    unit: str = ""
    near: tuple[str, ...] = ()
    countries: frozenset[str] = frozenset()


class Homes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How users are shared out among units.

    Attributes:
        epoch: grows with every change of what follows.
        units: weight by unit.
        moved: users that are elsewhere than their hash says: unit by user.
    """

    epoch: Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)] = 0
    units: dict[str, Annotated[int, msgspec.Meta(ge=0, le=2**31)]] = {}
    moved: dict[str, str] = {}


class RuleSet(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """All rules of one scheduling centre.

    Build one and pass it through `check`, or read one with `decode`, before it is used.

    Attributes:
        format: always `FORMAT`.
        version: only grows; old content comes back under a new version.
        unit: unit of this scheduling centre, empty where there is only one.
        hosts: how to reach each host, by its name.
        apps: the hosts each app is told about, by app id; for any other host the answer is 'unknown'.
        preload: hosts each app is told about unasked, by app id; they must be among its hosts.
        gateways: where an app's long connection can go, by app id.
        report: where telemetry goes (HTTPS), None for nowhere.
        disabled: means and carriers that are switched off for every app, by name.
        dns_only: the switch for everything: dispatch names no endpoint, and clients use plain DNS.
        regions: parts of the world, by name.
        networks: where client addresses are, by CIDR; the longest prefix counts.
        operators: autonomous system numbers of each network operator, by its name, for a MaxMind database.
        homes: how users are shared out among units, None for no word on it.
    """

    format: str = FORMAT
    version: Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)]
    unit: str = ""
    hosts: dict[str, HostPlan] = {}
    apps: dict[str, frozenset[str]] = {}
    preload: dict[str, tuple[str, ...]] = {}
    gateways: dict[str, tuple[Endpoint, ...]] = {}
    report: Endpoint | None = None
    disabled: tuple[str, ...] = ()
    dns_only: bool = False
    regions: dict[str, Region] = {}
    networks: dict[str, Network] = {}
    operators: dict[str, frozenset[int]] = {}
    homes: Homes | None = None


_decoder = msgspec.json.Decoder(RuleSet)
_host_decoder = msgspec.json.Decoder(HostPlan)
_endpoint_decoder = msgspec.json.Decoder(Endpoint)
_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()


class _Check:
    """One pass over a rule set. Equal endpoints and names become one object: most hosts share theirs."""

    def __init__(self, rules: RuleSet, *, typed: bool) -> None:
        self._rules = rules
        self._typed = typed  # it came out of the decoder, which has held it to the types' own bounds
        self._endpoints: dict[Endpoint, Endpoint] = {}

    def run(self) -> RuleSet:
        rules = self._rules
        if not 1 <= rules.version < 2**53:
            raise errors.ConfigError(f"rules: version {rules.version} must be at least 1")
        if rules.unit:
            ids.check_label(rules.unit, "rules: unit")
        _check_switches(rules.disabled, "rules")
        self._check_places()
        hosts: dict[str, HostPlan] = {}
        for name, plan in rules.hosts.items():
            host = _host(name, "rules")
            if host in hosts:
                raise errors.ConfigError(f"rules: host {host!r} is there twice")
            hosts[host] = self._host_plan(host, plan)
        apps = self._apps(hosts)
        preload: dict[str, tuple[str, ...]] = {}
        for app, names in rules.preload.items():
            where = f"rules: preload of app {app[:80]!r}"
            _at_most(names, limits.PRELOAD_HOSTS_MAX, where, "hosts")
            preload[app] = tuple(dict.fromkeys(_host(name, where) for name in names))
            for host in preload[app]:
                if host not in apps.get(app, ()):
                    raise errors.ConfigError(f"{where}: {host!r} is not among the app's hosts")
        gateways: dict[str, tuple[Endpoint, ...]] = {}
        for app, endpoints in rules.gateways.items():
            if app not in apps:
                raise errors.ConfigError(f"rules: gateways of app {app[:80]!r}, which is not among the apps")
            gateways[app] = self._all(endpoints, f"rules: gateway of app {app!r}")
            _small(gateways[app], limits.GATEWAYS_BYTES_MAX, f"rules: gateways of app {app!r}")
        report = self._all((rules.report,), "rules: report")[0] if rules.report else None
        return msgspec.structs.replace(
            rules, hosts=hosts, apps=apps, preload=preload, gateways=gateways, report=report,
            networks=_networks(rules),
        )  # fmt: skip

    def _apps(self, hosts: dict[str, HostPlan]) -> dict[str, frozenset[str]]:
        own = {host: host for host in hosts}
        apps = {}
        for app, names in self._rules.apps.items():
            ids.check_label(app, "rules: app")
            known = frozenset(own.get(name) or _host(name, f"rules: app {app!r}") for name in names)
            unknown = sorted(known - hosts.keys())
            if unknown:
                raise errors.ConfigError(f"rules: app {app!r} lists host {unknown[0]!r}, which has no rules")
            apps[app] = known
        return apps

    def _host_plan(self, host: str, plan: HostPlan) -> HostPlan:
        where = f"rules: host {host!r}"
        _at_most(plan.endpoints, limits.RULES_NAMES_MAX, where, "endpoints")
        data = _small(plan, limits.HOST_RULE_BYTES_MAX, where)
        if not self._typed:
            try:
                _host_decoder.decode(data)
            except msgspec.MsgspecError as error:
                raise errors.ConfigError(f"{where}: {error}") from error
        endpoints = self._all(plan.endpoints, where)
        if plan.dns and endpoints:
            raise errors.ConfigError(f"{where}: it says 'dns' and has endpoints: which of the two?")
        if not plan.dns and not any(each.weight for each in endpoints):
            raise errors.ConfigError(f"{where}: no endpoint with a weight; say 'dns' where that is meant")
        if plan.ttl_s is not None and plan.ttl_s < limits.RULES_TTL_S_MIN:
            raise errors.ConfigError(f"{where}: ttl_s {plan.ttl_s} must be at least {limits.RULES_TTL_S_MIN}")
        if plan.policy is not None:
            self._policy(plan.policy, f"{where}: policy")
        for number, each in enumerate(plan.paths, 1):
            place = f"{where}: path {number} ({each.path[:80]!r})"
            try:
                pathpattern.check(each.path)
            except errors.ConfigError as error:
                raise errors.ConfigError(f"{place}: {error}") from None
            self._policy(each.policy, place)
        same = all(a is b for a, b in zip(endpoints, plan.endpoints, strict=True))
        return plan if same else msgspec.structs.replace(plan, endpoints=endpoints)

    def _policy(self, policy: Policy, where: str) -> None:
        if policy.preset and policy.preset not in presets.PRESETS:
            raise errors.ConfigError(f"{where}: preset {policy.preset[:40]!r}: one of {', '.join(presets.PRESETS)}")
        for name in (*policy.order, *policy.tries):
            if name not in MEANS:
                raise errors.ConfigError(f"{where}: {name[:40]!r} is no means: one of {', '.join(sorted(MEANS))}")
        _check_switches(policy.disabled, where)
        _at_most(policy.relays, limits.RULES_NAMES_MAX, where, "relays")
        for number, relay in enumerate(policy.relays, 1):
            place = f"{where}: relay {number}"
            if relay.carrier != SEALED:
                raise errors.ConfigError(f"{place}: carrier {relay.carrier[:40]!r}: expected {SEALED!r}")
            try:
                keys = ohttp.decode_keys(jws.b64url_decode(relay.keys))
            except (ValueError, errors.RemoteProtocolError) as error:
                raise errors.ConfigError(f"{place}: keys: {error}") from None
            if not keys:
                raise errors.ConfigError(f"{place}: no key that clients know how to use")
            self._endpoint(relay, place)

    def _all(self, endpoints: Iterable[Endpoint], where: str) -> tuple[Endpoint, ...]:
        endpoints = tuple(endpoints)
        _at_most(endpoints, limits.RULES_NAMES_MAX, where, "endpoints")
        for number, each in enumerate(endpoints, 1):
            if each.carrier not in _CARRIERS:
                names = ", ".join(sorted(_CARRIERS))
                raise errors.ConfigError(f"{where}: endpoint {number}: carrier {each.carrier[:40]!r}: one of {names}")
            if each.keys:
                raise errors.ConfigError(f"{where}: endpoint {number}: only relays have keys")
        return tuple(self._endpoint(each, f"{where}: endpoint {n}") for n, each in enumerate(endpoints, 1))

    def _endpoint(self, endpoint: Endpoint, where: str) -> Endpoint:
        known = self._endpoints.get(endpoint)
        if known is not None:
            return known
        if not 0 < endpoint.port < 65536:
            raise errors.ConfigError(f"{where}: port {endpoint.port} must be 1 to 65535")
        if not self._typed:
            try:
                _endpoint_decoder.decode(_encoder.encode(endpoint))
            except msgspec.MsgspecError as error:
                raise errors.ConfigError(f"{where}: {error}") from error
        if endpoint.role not in ("", PUSH):
            raise errors.ConfigError(f"{where}: role {endpoint.role[:40]!r}: expected {PUSH!r} or nothing")
        for what in ("unit", "operator", "region"):
            if getattr(endpoint, what):
                ids.check_label(getattr(endpoint, what), f"{where}: {what}")
        if endpoint.region and endpoint.region not in self._rules.regions:
            raise errors.ConfigError(f"{where}: region {endpoint.region!r} is not among the regions")
        host = _host(endpoint.host, where)
        server_name = _host(endpoint.server_name, where) if endpoint.server_name else ""
        if (host, server_name) != (endpoint.host, endpoint.server_name):
            known = msgspec.structs.replace(endpoint, host=host, server_name=server_name)
        self._endpoints[endpoint] = known or endpoint
        return known or endpoint

    def _check_places(self) -> None:
        rules = self._rules
        for what, table, most in (
            ("regions", rules.regions, limits.REGIONS_MAX),
            ("operators", rules.operators, limits.REGIONS_MAX),
            ("networks", rules.networks, limits.NETWORKS_MAX),
        ):
            _at_most(table, most, "rules", what)
        countries: dict[str, str] = {}
        for name, region in rules.regions.items():
            where = f"rules: region {name[:80]!r}"
            ids.check_label(name, "rules: region")
            if region.unit:
                ids.check_label(region.unit, f"{where}: unit")
            for near in region.near:
                if near not in rules.regions:
                    raise errors.ConfigError(f"{where}: near {near[:80]!r} is not among the regions")
            for code in sorted(region.countries):
                if countries.setdefault(code, name) != name:
                    raise errors.ConfigError(f"{where}: country {code[:8]!r} is in {countries[code]!r} too")
        for name in rules.operators:
            ids.check_label(name, "rules: operator")
        for cidr, place in rules.networks.items():
            where = f"rules: network {cidr[:80]!r}"
            if place.region and place.region not in rules.regions:
                raise errors.ConfigError(f"{where}: region {place.region[:80]!r} is not among the regions")
            if place.operator:
                ids.check_label(place.operator, f"{where}: operator")
        if rules.homes is not None:
            if not any(rules.homes.units.values()):
                raise errors.ConfigError("rules: homes: no unit with a weight")
            for unit in (*rules.homes.units, *rules.homes.moved.values()):
                ids.check_label(unit, "rules: homes: unit")


def check(rules: RuleSet) -> RuleSet:
    """Give the same rules with every name and network in its normal form.

    Raises:
        ConfigError: something is malformed, named twice, refers to what is not there, or is too large; or a host has
            no endpoint with a weight. The message names what and where.
    """
    return _Check(rules, typed=False).run()


def _networks(rules: RuleSet) -> dict[str, Network]:
    found: dict[str, Network] = {}
    for cidr, place in rules.networks.items():
        try:
            normal = str(ipaddress.ip_network(cidr))
        except ValueError as error:
            raise errors.ConfigError(f"rules: network {cidr[:80]!r}: {error}") from None
        if normal in found:
            raise errors.ConfigError(f"rules: network {normal!r} is there twice")
        found[normal] = place
    return found


def _check_switches(names: tuple[str, ...], where: str) -> None:
    if len(names) > limits.RULES_NAMES_MAX:
        raise errors.ConfigError(f"{where}: at most {limits.RULES_NAMES_MAX} means can be disabled")
    for name in names:
        if name not in SWITCHES and name not in LONG_CARRIERS:
            known = ", ".join(sorted((*SWITCHES, *LONG_CARRIERS)))
            raise errors.ConfigError(f"{where}: {name[:40]!r} cannot be disabled: one of {known}")


def _at_most(things: Any, most: int, where: str, what: str) -> None:
    if len(things) > most:
        raise errors.ConfigError(f"{where}: {len(things)} {what}: at most {most}")


def _small(thing: object, most: int, where: str) -> bytes:
    data = _encoder.encode(thing)
    if len(data) > most:
        raise errors.ConfigError(f"{where}: {len(data)} bytes as JSON: at most {most}")
    return data


def _host(name: str, where: str) -> str:
    try:
        return hostname.normalise(name)
    except errors.ConfigError as error:
        raise errors.ConfigError(f"{where}: {error}") from None


def encode(rules: RuleSet) -> bytes:
    """Give the rules as indented JSON, the form of the file."""
    return msgspec.json.format(msgspec.json.encode(rules, order="deterministic"), indent=2) + b"\n"


def decode(data: bytes, *, where: str = "rules") -> RuleSet:
    """Read rules from JSON and check them.

    100,000 hosts take about 2 s and 100 MB.

    Args:
        data: the file's bytes.
        where: named in errors, usually the path.

    Raises:
        RulesRejected: `too-large`, `malformed`, `format`, or `invalid`: see `check`.
    """
    if len(data) > limits.RULES_BYTES_MAX:
        raise errors.RulesRejected(
            "too-large", f"{where}: {len(data)} bytes, a rule set has at most {limits.RULES_BYTES_MAX}"
        )
    try:
        rules = strictjson.decode(data, _decoder)
    except ValueError as error:
        raise errors.RulesRejected("malformed", f"{where}: not a rule set: {_blamed(data) or error}") from error
    if rules.format != FORMAT:
        raise errors.RulesRejected("format", f"{where}: format {rules.format[:40]!r}, this version reads {FORMAT!r}")
    try:
        return _Check(rules, typed=True).run()
    except errors.ConfigError as error:
        raise errors.RulesRejected("invalid", str(error)) from error


def _blamed(data: bytes) -> str:
    """Name the host whose rule cannot be read: the decoder says only `$.hosts[...]`."""
    try:
        for host, raw in _raw_decoder.decode(_raw_decoder.decode(data)["hosts"]).items():
            try:
                _host_decoder.decode(raw)
            except msgspec.MsgspecError as error:
                return f"host {host[:80]!r}: {error}"
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, RecursionError):
        pass
    return ""
