"""A role of a platform on a stage, as a process of its own inside the servers' namespace.

Run as `python -m stormline.lab.platform_roles`: one line on the input says which role and how, one line on the output
that it answers. It ends in order when its input does, so it never outlives who started it.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from stormline.core import limits_lab
from stormline.core.values import Address, Secret
from stormline.lab.hijack import Box, Lie
from stormline.net.clock import SystemClock, SystemRng
from stormline.wire.plan import PlanRequest

if TYPE_CHECKING:
    from stormline.dispatch.config import DispatchConfig
    from stormline.engine.nats import EngineConfig

UNIT: Final = "u1"


class EngineAt(msgspec.Struct, frozen=True):
    """Where an engine is, and who roles are to it."""

    url: str
    user: str
    password: str

    def __repr__(self) -> str:
        """Never show the password."""
        return f"EngineAt({self.url})"


class EngineRole(msgspec.Struct, frozen=True, tag="engine", kw_only=True):
    """An embedded engine, on the namespace's loopback."""

    folder: str
    port: int


class CentreRole(msgspec.Struct, frozen=True, tag="centre", kw_only=True):
    """A scheduling centre that follows the rules in the engine."""

    host: str
    port: int
    plain_port: int
    certificate: str
    certificate_key: str
    plan_key: str
    plan_kid: str
    token_key: str
    token_kid: str
    admin_key: str
    rules: str
    """File with the rules that the platform's settings say."""
    held: str
    """Where its copy of the rules in the engine is kept."""
    engine: EngineAt


class GatewayRole(msgspec.Struct, frozen=True, tag="gateway", kw_only=True):
    """An access gateway."""

    host: str
    port: int
    certificate: str
    certificate_key: str
    apps: dict[str, dict[str, str]]
    admin_key: str
    engine: EngineAt


class BoxRole(msgspec.Struct, frozen=True, tag="box", kw_only=True):
    """A box on the way, see `lab.hijack`."""

    host: str
    ports: dict[Lie, int]
    centre: tuple[str, int]
    forger: tuple[str, int]
    other_app: str
    record: PlanRequest


Role: TypeAlias = EngineRole | CentreRole | GatewayRole | BoxRole


class Answers(msgspec.Struct, frozen=True, omit_defaults=True):
    """It answers; the engine says how roles reach it."""

    engine: EngineAt | None = None


Started = Callable[[Answers], None]


async def _engine(role: EngineRole, started: Started, stop: asyncio.Event) -> None:
    from stormline.engine.server import start_server

    server = await start_server(Path(role.folder), rng=SystemRng(), port=role.port)
    core = server.core
    started(Answers(EngineAt(core.url, core.user, core.password.reveal())))
    try:
        await stop.wait()
    finally:
        await server.stop()


def _centre_config(role: CentreRole) -> "DispatchConfig":
    from stormline.dispatch import rules
    from stormline.dispatch.config import DispatchConfig, KeyFile
    from stormline.web.server import TlsFiles

    return DispatchConfig(
        host=role.host,
        port=role.port,
        plain_port=role.plain_port,
        tls=TlsFiles(Path(role.certificate), Path(role.certificate_key)),
        unit=UNIT,
        rules=rules.decode(Path(role.rules).read_bytes(), where=role.rules),
        plan_key=KeyFile(Path(role.plan_key), role.plan_kid),
        token_key=KeyFile(Path(role.token_key), role.token_kid),
        admin_key=Secret(role.admin_key),
    )


async def _centre(role: CentreRole, started: Started, stop: asyncio.Event) -> None:
    from stormline.dispatch import admin, service
    from stormline.dispatch.book import Book
    from stormline.dispatch.editor import Editor
    from stormline.engine import nats
    from stormline.engine.port import Engine

    config, clock, rng = _centre_config(role), SystemClock(), SystemRng()

    async def connect() -> Engine:
        return await nats.connect(_engine_config(role.engine), rng=rng, wait_s=0)

    book = Book(config.rules, unit=UNIT, path=Path(role.held), clock=clock, rng=rng, connect=connect)
    async with book.following():
        await service.run(
            config,
            clock=clock,
            rng=rng,
            started=lambda address: started(Answers()),
            stop=stop,
            source=book,
            admin=admin.mount(Editor(book, unit=UNIT, clock=clock), key=Secret(role.admin_key)),
            connect=connect,
        )


async def _gateway(role: GatewayRole, started: Started, stop: asyncio.Event) -> None:
    from stormline.gateway import server
    from stormline.gateway.config import GatewayConfig
    from stormline.web.server import TlsFiles

    config = GatewayConfig(
        host=role.host,
        port=role.port,
        tls=TlsFiles(Path(role.certificate), Path(role.certificate_key)),
        unit=UNIT,
        apps=role.apps,
        engine=_engine_config(role.engine),
        admin_key=Secret(role.admin_key),
    )
    await server.run(
        config, clock=SystemClock(), rng=SystemRng(), started=lambda address, admin: started(Answers()), stop=stop
    )


async def _box(role: BoxRole, started: Started, stop: asyncio.Event) -> None:
    box = Box(Address(*role.centre), Address(*role.forger), role.other_app)
    try:
        await box.start(role.host, role.ports, role.record)
        started(Answers())
        await stop.wait()
    finally:
        box.close()


def _engine_config(at: EngineAt) -> "EngineConfig":
    from stormline.engine.nats import EngineConfig

    return EngineConfig(url=at.url, user=at.user, password=Secret(at.password))


async def run() -> None:
    """Be the role that the first line of the input says, until the input ends."""
    reader = asyncio.StreamReader(limit=limits_lab.LAB_ORIGIN_LINE_BYTES_MAX)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    role = msgspec.json.decode(await reader.readline(), type=Role)
    stop = asyncio.Event()

    async def wait_end() -> None:
        await reader.read()
        stop.set()

    def started(answers: Answers) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(answers) + b"\n")
        sys.stdout.buffer.flush()

    waiting = loop.create_task(wait_end())
    try:
        await _service(role, started, stop)
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])
        transport.close()


def _service(role: Role, started: Started, stop: asyncio.Event) -> Awaitable[None]:
    match role:
        case EngineRole():
            return _engine(role, started, stop)
        case CentreRole():
            return _centre(role, started, stop)
        case GatewayRole():
            return _gateway(role, started, stop)
        case BoxRole():
            return _box(role, started, stop)


if __name__ == "__main__":
    import uvloop

    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
