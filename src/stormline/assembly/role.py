"""One role's process: `python -m stormline.assembly.role NAME --state DIR`, started by the supervisor.

It reads what the supervisor settled, runs the room's service on uvloop, writes its run file once the service answers,
and ends on SIGTERM. Whatever ends it otherwise is one line on standard error, which is its log.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from stormline.assembly import layout
from stormline.assembly.names import SERVER_NAMES
from stormline.assembly.roles import process_name
from stormline.core import errors
from stormline.core.clock import Clock, Rng
from stormline.core.values import Address, Secret, parse_address
from stormline.net.clock import SystemClock, SystemRng
from stormline.settings.model import Settings

_log = logging.getLogger("stormline.assembly")


class Context(NamedTuple):
    """What a role's service is built from.

    Attributes:
        place: the state folder.
        resolved: what the supervisor settled.
        keys: keys of the HTTP APIs.
        clock: this machine's.
        rng: this machine's.
        stop: set when the role shall end.
        started: to be called once, when the service answers, with its addresses by part.
        worker: which of the role's processes this is, from 1.
    """

    place: layout.Layout
    resolved: layout.Resolved
    keys: layout.Keys
    clock: Clock
    rng: Rng
    stop: asyncio.Event
    started: Callable[[Mapping[str, Address]], None]
    worker: int = 1

    @property
    def settings(self) -> Settings:
        """All settings, resolved."""
        return self.resolved.settings

    @property
    def admin_key(self) -> Secret:
        """Key of the operators' APIs."""
        return Secret(self.keys.admin)

    @property
    def business_key(self) -> Secret:
        """Key of the business API."""
        return Secret(self.keys.business)


Service = Callable[[Context], Awaitable[None]]
"""A role's service: runs until `Context.stop` is set."""


async def _dispatch(context: Context) -> None:
    from stormline.assembly.prepare import core_engine
    from stormline.dispatch import admin, rules, service
    from stormline.dispatch.beside import Beside
    from stormline.dispatch.book import Book
    from stormline.dispatch.config import DispatchConfig, KeyFile
    from stormline.dispatch.doh import DohConfig
    from stormline.dispatch.editor import Editor
    from stormline.dispatch.probing import HealthConfig
    from stormline.dispatch.relay_keys import Keeper
    from stormline.dispatch.zone import Resolver
    from stormline.engine.port import Engine
    from stormline.settings.load import dns_servers
    from stormline.web.server import TlsFiles

    place, settings = context.place, context.settings
    [plan_kid], [token_kid] = context.resolved.plan_keys, context.resolved.token_keys
    config = DispatchConfig(
        host=settings.host,
        port=settings.ports.dispatch,
        tls=TlsFiles(place.certificate("dispatch"), place.certificate_key("dispatch")),
        unit=settings.unit,
        rules=rules.decode(place.rules.read_bytes(), where=str(place.rules)),
        plan_key=KeyFile(place.plan_key, plan_kid),
        token_key=KeyFile(place.token_key, token_kid),
        admin_key=context.admin_key,
        health=HealthConfig(ca_pem=place.ca.read_bytes()),
        doh=DohConfig(
            upstream=dns_servers(settings.dns.upstream),
            resolver=Resolver(
                name=SERVER_NAMES["dispatch"], port=settings.ports.dispatch, addresses=(settings.advertised,)
            ),
        ),
    )

    async def connect() -> Engine:
        from stormline.engine import nats

        return await nats.connect(core_engine(settings), rng=context.rng, wait_s=0)

    book = Book(
        config.rules,
        unit=settings.unit,
        path=place.rules_held,
        clock=context.clock,
        rng=context.rng,
        connect=connect if settings.nats.url else None,
    )
    beside = Beside(book, config.health, context.rng)
    keeper = Keeper(place.relay_keys, book)
    editor = Editor(book, unit=settings.unit, clock=context.clock, ill=beside.ill, renew=keeper.renew)
    async with book.following(), keeper.keeping(editor):
        await service.run(
            config,
            clock=context.clock,
            rng=context.rng,
            started=lambda address: context.started({"dispatch": address}),
            stop=context.stop,
            source=book,
            admin=admin.mount(editor, key=context.admin_key, health=beside.monitor.snapshot),
            beside=beside,
            connect=connect if settings.nats.url else None,
        )


async def _apm(context: Context) -> None:
    from stormline.apm import service
    from stormline.apm.config import ApmConfig, DispatchAdmin
    from stormline.web.server import TlsFiles

    place, settings = context.place, context.settings
    config = ApmConfig(
        host=settings.host,
        port=settings.ports.apm,
        tls=TlsFiles(place.certificate("apm"), place.certificate_key("apm")),
        store_path=place.apm,
        token_keys=context.resolved.token_keys,
        admin_key=context.admin_key,
        dispatch=DispatchAdmin(
            url=f"https://{Address(settings.advertised, settings.ports.dispatch)}",
            admin_key=context.admin_key,
            ca=place.ca,
            server_name=SERVER_NAMES["dispatch"],
        ),
    )
    await service.run(
        config,
        clock=context.clock,
        started=lambda address: context.started({"apm": address}),
        stop=context.stop,
    )


async def _gateway(context: Context) -> None:
    from stormline.appgw import protocols
    from stormline.assembly import authority
    from stormline.assembly.prepare import core_engine
    from stormline.gateway import server
    from stormline.gateway.config import GatewayConfig, Quota
    from stormline.web.server import TlsFiles

    place, settings = context.place, context.settings
    upstreams = dict(settings.api.upstreams)
    if settings.ports.apm:  # what users say reaches it through the gateway where nothing else gets there
        apm = Address(settings.advertised, settings.ports.apm)
        upstreams.setdefault(SERVER_NAMES["apm"], f"https://{apm}")
    config = GatewayConfig(
        host=settings.host,
        port=settings.ports.gateway,
        listen=tuple(map(parse_address, settings.gateway.listen)),
        plain=tuple(map(parse_address, settings.gateway.plain)),
        fronts=settings.gateway.fronts,
        origins=settings.gateway.origins,
        tls=TlsFiles(place.certificate("gateway"), place.certificate_key("gateway")),
        reuse_port=settings.gateway.workers > 1,
        unit=settings.unit,
        node=f"n{context.worker}",
        apps={settings.app: context.resolved.token_keys},
        api_upstreams=upstreams,
        api_ca=place.ca,
        quotas={settings.app: Quota(settings.gateway.sessions_per_app, settings.gateway.calls_per_app)},
        drain_s=settings.gateway.drain_s,
        engine=core_engine(settings),
        admin_host=settings.host,
        admin_port=settings.ports.admin if context.worker == 1 else 0,
        admin_key=context.business_key,
        operator_key=context.admin_key,
        identity_key=authority.ensure_signing_key(place.identity_key, "identity"),
        protocols=protocols.load(),
    )
    await server.run(
        config,
        clock=context.clock,
        rng=context.rng,
        started=lambda address, admin: context.started({"gateway": address, "admin": admin}),
        stop=context.stop,
    )


async def _relay(context: Context) -> None:
    from stormline.relay import service
    from stormline.settings.load import relay_origins

    settings = context.settings
    config = service.RelayConfig(
        host=settings.host,
        ports=(settings.ports.relay,),
        keys=(context.place.relay_key,),
        origins=relay_origins(settings.relay.origins),
    )
    await service.run(
        config,
        clock=context.clock,
        rng=context.rng,
        started=lambda addresses: context.started({"relay": addresses[0]}),
        stop=context.stop,
    )


async def _console(context: Context) -> None:
    from stormline.console import service
    from stormline.console.config import ConsoleConfig

    settings = context.settings
    config = ConsoleConfig(
        host=settings.host,
        port=settings.ports.console,
        apm_url=f"https://{Address(settings.advertised, settings.ports.apm)}",
        apm_ca=context.place.ca,
        admin_key=context.admin_key,
        access_key=Secret(context.resolved.console_key),
    )
    await service.run(
        config,
        clock=context.clock,
        started=lambda address: context.started({"console": address}),
        stop=context.stop,
    )


SERVICES: Mapping[str, Service] = {
    "dispatch": _dispatch,
    "gateway": _gateway,
    "apm": _apm,
    "relay": _relay,
    "console": _console,
}


def run(name: str, worker: int, place: layout.Layout, service: Service) -> int:
    """Be a role until SIGTERM, and give the exit code. Errors are printed, one line each."""
    try:
        return _run(process_name(name, worker), worker, place, service)
    except ModuleNotFoundError as error:
        return _fail(f"the package {(error.name or '').partition('.')[0]!r} is missing: install stormline[server]")
    except (errors.StormlineError, OSError) as error:
        return _fail(str(error))
    except Exception as error:
        _log.exception("%s ended by a fault", name)
        return _fail(f"{type(error).__name__}: {error}")


def _run(process: str, worker: int, place: layout.Layout, service: Service) -> int:
    import uvloop

    resolved = layout.read(place.resolved, layout.Resolved)
    keys = layout.read(place.keys, layout.Keys)
    if resolved is None or keys is None:
        raise errors.PlatformError(f"{place.state} is not prepared: roles are started by 'stormline up'")
    logging.basicConfig(
        level=resolved.settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)

        def started(addresses: Mapping[str, Address]) -> None:
            told = {part: str(address) for part, address in addresses.items()}
            layout.write(place.role(process), layout.RoleRun(role=process, pid=os.getpid(), addresses=told))

        context = Context(place, resolved, keys, SystemClock(), SystemRng(), stop, started, worker)
        try:
            await service(context)
        finally:
            layout.remove(place.role(process))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
    return 0


def _fail(message: str) -> int:
    print(f"{layout.ERROR_PREFIX}{' '.join(message.split())}", file=sys.stderr, flush=True)  # noqa: T201
    return 1


def main(arguments: Sequence[str], services: Mapping[str, Service] = SERVICES) -> int:
    """Run the role named on the command line.

    Args:
        arguments: `NAME --state DIR [--worker N]`.
        services: the roles there are; rooms above this one bring their own.
    """
    parser = argparse.ArgumentParser(description="One role of a platform; started by 'stormline up'.")
    parser.add_argument("name", choices=sorted(services))
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--worker", type=int, default=1)
    known = parser.parse_args(arguments)
    return run(known.name, known.worker, layout.Layout(known.state), services[known.name])


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
