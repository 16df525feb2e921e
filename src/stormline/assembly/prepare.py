"""What is settled before the first process starts, and what is told once the last one answers."""

import os
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from stormline.assembly import authority, keys, layout, ports
from stormline.assembly.names import SERVER_NAMES, SHOP_HOST
from stormline.assembly.roles import Role
from stormline.console.access import link
from stormline.core import errors, ids, limits_relay
from stormline.core.clock import Clock, Rng
from stormline.core.values import Address, Secret
from stormline.dispatch import relay_keys as rules_relay_keys
from stormline.dispatch import rules as dispatch_rules
from stormline.engine.nats import EngineConfig, connect
from stormline.engine.server import RunningServer
from stormline.relay import keys as relay_keys
from stormline.settings import discovery
from stormline.settings.model import Nats, Settings
from stormline.wire import bundle as wire_bundle
from stormline.wire import hostname, jws
from stormline.wire.plan import SEALED, Carrier, Endpoint, HostPlan, Policy

ENGINE_HOST: Final = "127.0.0.1"
"""The embedded engine serves this machine's processes; what is on other machines gets an external one."""


class Prepared(NamedTuple):
    """All that is known before a process runs.

    Attributes:
        resolved: what the roles are told.
        admin: what commands are told; without addresses yet.
        bundle: what clients are told.
    """

    resolved: layout.Resolved
    admin: layout.Admin
    bundle: wire_bundle.Bundle


def prepare(
    settings: Settings, place: layout.Layout, chosen: Iterable[Role], *, demo: bool, clock: Clock, rng: Rng
) -> Prepared:
    """Settle ports, certificates, keys and rules, finding again what an earlier run made.

    Call it with the state folder locked.

    Raises:
        PlatformError: a port is taken, or a file of the state folder is damaged or cannot be written.
        ConfigError: a certificate, key or rule is wrong; the message names it.
    """
    running = {role.name: role for role in chosen}
    settings = _settle_ports(settings, running.values(), rng=rng)
    if "shop" in running:
        upstream = f"http://{Address(settings.advertised, settings.ports.shop)}"
        upstreams = {SHOP_HOST: upstream, **settings.api.upstreams}
        settings = msgspec.structs.replace(settings, api=msgspec.structs.replace(settings.api, upstreams=upstreams))
        origins = {SHOP_HOST: upstream, **settings.relay.origins}
        settings = msgspec.structs.replace(settings, relay=msgspec.structs.replace(settings.relay, origins=origins))
    ca = authority.ensure_authority(place.pki, clock=clock, rng=rng)
    for role, name in SERVER_NAMES.items():
        ca.issue(role, names=[name], ips=[settings.advertised])
    plan_key = authority.ensure_signing_key(place.plan_key, "plan")
    token_key = authority.ensure_signing_key(place.token_key, "token")
    authority.ensure_signing_key(place.identity_key, "identity")
    api_keys = keys.ensure_keys(place, rng=rng)
    relay = _relay(settings, place, clock.wall()) if "relay" in running else None
    _keep_rules(_rules(settings, running, relay), place)
    resolved = layout.Resolved(
        settings=settings,
        plan_keys={plan_key.kid: plan_key.public_text},
        token_keys={token_key.kid: token_key.public_text},
        console_key=ids.new_id(rng),
    )
    admin = layout.Admin(
        pid=os.getpid(),
        app=settings.app,
        unit=settings.unit,
        addresses={},
        ca_file=str(ca.certificate),
        keys=api_keys,
        console_link=_console_link(resolved) if "console" in running else "",
    )
    bundle = wire_bundle.Bundle(
        app=settings.app,
        dispatch=(str(Address(settings.advertised, settings.ports.dispatch)),),
        dispatch_name=SERVER_NAMES["dispatch"],
        dispatch_keys=resolved.plan_keys,
        ca_pem=ca.ca_pem,
        preload=(SHOP_HOST,) if demo and "gateway" in running else (),
        centres=(wire_bundle.Centre(host=settings.advertised, port=settings.ports.dispatch, unit=settings.unit),),
        relays=() if relay is None else _bundled(relay, settings),
    )
    return Prepared(resolved, admin, bundle)


def has_engine(settings: Settings, running: Iterable[Role]) -> bool:
    """Say whether the platform runs an engine of its own."""
    return not settings.nats.url and any(role.needs_engine for role in running)


async def check_external_engine(settings: Settings, *, rng: Rng) -> None:
    """Log in to the external engine once: a wrong address or password is one clear error, not one per role.

    Raises:
        EngineError: it cannot be reached, or refuses us.
    """
    engine = await connect(core_engine(settings), rng=rng)
    await engine.close()


def core_engine(settings: Settings) -> EngineConfig:
    """Say how the platform's own roles connect to the engine."""
    nats = settings.nats
    return EngineConfig(url=nats.url, user=nats.core_user, password=Secret(nats.core_password), replicas=nats.replicas)


def with_engine(resolved: layout.Resolved, server: RunningServer) -> layout.Resolved:
    """Add where the embedded engine is, and the passwords, which it has drawn itself."""
    nats = Nats(
        url=server.core.url,
        core_user=server.core.user,
        core_password=server.core.password.reveal(),
        biz_user=server.biz.user,
        biz_password=server.biz.password.reveal(),
    )
    return msgspec.structs.replace(resolved, settings=msgspec.structs.replace(resolved.settings, nats=nats))


def announce(prepared: Prepared, place: layout.Layout, addresses: Mapping[str, str]) -> None:
    """Write what commands and clients find the platform by; only once everything answers.

    Raises:
        PlatformError: a file cannot be written.
    """
    layout.write(place.admin, msgspec.structs.replace(prepared.admin, addresses=dict(addresses)))
    if "dispatch" in addresses:
        layout.write(place.bundle, wire_bundle.encode(prepared.bundle), mode=0o644)


def _console_link(resolved: layout.Resolved) -> str:
    settings = resolved.settings
    return link(Address(settings.advertised, settings.ports.console), Secret(resolved.console_key), tls=False)


def _settle_ports(settings: Settings, running: Iterable[Role], *, rng: Rng) -> Settings:
    roles = list(running)
    hosts = {part: settings.host for role in roles for part in role.ports}
    if has_engine(settings, roles):
        hosts["nats"] = ENGINE_HOST
    chosen = ports.choose(hosts, msgspec.to_builtins(settings.ports), rng=rng)
    return msgspec.structs.replace(settings, ports=msgspec.structs.replace(settings.ports, **chosen))


def _relay(settings: Settings, place: layout.Layout, wall: float) -> Endpoint:
    """Give the relay as clients are told of it; its key is made at the first start and kept."""
    if not place.relay_key.exists():
        relay_keys.write_key(place.relay_key, 1)
    return Endpoint(
        host=settings.advertised,
        port=settings.ports.relay,
        carrier=SEALED,
        unit=settings.unit,
        keys=publish_relay_keys(place, wall),
    )


def _bundled(relay: Endpoint, settings: Settings) -> tuple[wire_bundle.Relay, ...]:
    """Give the relay as the bundle names it, for where no scheduling centre can be asked."""
    hosts = sorted({hostname.normalise(origin.partition(":")[0]) for origin in settings.relay.origins})
    named = tuple(hosts[: limits_relay.BUNDLE_RELAY_HOSTS_MAX])
    place = wire_bundle.Relay(host=relay.host, port=relay.port, keys=relay.keys, hosts=named)
    return (place,) if named and Address(relay.host, relay.port).is_ip else ()


def renew_bundle(place: layout.Layout, listed: str) -> None:
    """Have the bundle name the relay's keys of now.

    Raises:
        BundleError: it cannot be read.
        PlatformError: it cannot be written.
    """
    bundle = discovery.read_bundle(place.bundle)
    relays = tuple(msgspec.structs.replace(each, keys=listed) for each in bundle.relays)
    if relays != bundle.relays:
        layout.write(place.bundle, wire_bundle.encode(msgspec.structs.replace(bundle, relays=relays)), mode=0o644)


def publish_relay_keys(place: layout.Layout, wall: float) -> str:
    """Write down which keys the relay has now, so that rules name these; gives them as rules have them.

    Raises:
        ConfigError: a file is damaged.
        PlatformError: it cannot be written.
    """
    listed = jws.b64url(relay_keys.read_keys((place.relay_key,), wall).listed)
    told = rules_relay_keys.read(place.relay_keys)
    if told.listed != listed:
        layout.write(place.relay_keys, told.then(listed))
    return listed


def _rules(settings: Settings, running: Mapping[str, Role], relay: Endpoint | None) -> dispatch_rules.RuleSet:
    """Say how each host is reached: over the long connection to this unit's gateway, and through the relay."""
    hosts: dict[str, HostPlan] = {}
    gateways: dict[str, tuple[Endpoint, ...]] = {}
    if "gateway" in running:
        places = tuple(
            Endpoint(
                host=settings.advertised,
                port=settings.ports.gateway,
                carrier=carrier,
                server_name=SERVER_NAMES["gateway"],
                unit=settings.unit,
            )
            for carrier in (Carrier.LONG_TLS, Carrier.LONG_WSS, Carrier.SHORT)
        )
        names = [*settings.api.upstreams, *([SERVER_NAMES["apm"]] if "apm" in running else [])]
        hosts = {host: HostPlan(endpoints=places) for host in names}
        gateways = {settings.app: places}
    if relay is not None:
        for origin in settings.relay.origins:
            host = origin.partition(":")[0]
            known = hosts.get(host, HostPlan(dns=True))
            hosts[host] = msgspec.structs.replace(known, policy=Policy(relays=(relay,)))
    report = None
    if "apm" in running:
        report = Endpoint(
            host=settings.advertised,
            port=settings.ports.apm,
            carrier=Carrier.H1,
            server_name=SERVER_NAMES["apm"],
            unit=settings.unit,
        )
    return dispatch_rules.check(
        dispatch_rules.RuleSet(
            version=1,
            unit=settings.unit,
            hosts=hosts,
            apps={settings.app: frozenset(hosts)},
            gateways=gateways,
            report=report,
        )
    )


def _keep_rules(rules: dispatch_rules.RuleSet, place: layout.Layout) -> None:
    """Write the rules under a version above the last run's, unless they say the same.

    A client refuses a plan older than the one it holds, so versions grow across starts too.
    """
    try:
        held = dispatch_rules.decode(place.rules.read_bytes(), where=str(place.rules))
    except FileNotFoundError:
        layout.write(place.rules, dispatch_rules.encode(rules))
        return
    except OSError as error:
        raise errors.PlatformError(f"state folder: cannot read {place.rules}: {error.strerror}") from error
    if msgspec.structs.replace(held, version=1) != rules:
        layout.write(place.rules, dispatch_rules.encode(msgspec.structs.replace(rules, version=held.version + 1)))
