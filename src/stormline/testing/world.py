"""A small platform in one process: the real dispatch, gateways that play scripts, and clients that know both.

async with running_world(make_pki(folder), answering()) as world, world.client() as client:
    await client.get(f"https://{HOST}/")
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from stormline.assembly.authority import Authority, ensure_authority, ensure_signing_key
from stormline.client.api import AsyncClient
from stormline.client.config import Config
from stormline.core.values import Address, Secret
from stormline.dispatch import service
from stormline.dispatch.config import DispatchConfig, KeyFile
from stormline.dispatch.rules import RuleSet
from stormline.dispatch.unit import HeldRules
from stormline.net.clock import SystemClock, SystemRng
from stormline.testing.gateway import Script, ScriptedGateway, scripted_gateway
from stormline.testing.ranked import ranked
from stormline.web.server import TlsFiles
from stormline.wire.bundle import Bundle
from stormline.wire.jws import SigningKey
from stormline.wire.plan import Carrier, Endpoint, HostPlan

APP: Final = "demo"
HOST: Final = "shop.test"
"""A host that only the gateway can reach: no DNS knows it."""
BOTH: Final = "localhost"
"""A host that the gateway and the client itself can reach."""
GATEWAY_NAME: Final = "gateway.stormline.test"
DISPATCH_NAME: Final = "dispatch.stormline.test"
APM_NAME: Final = "apm.stormline.test"
CLOSED_ADDRESS: Final = Address("127.0.0.1", 1)
"""An address where nobody listens."""
WAIT_S: Final = 10.0
"""How long `wait_until` waits."""


class Pki(NamedTuple):
    """Keys and certificates of one platform, and the folder they lie in."""

    ca: Authority
    plan_key: SigningKey
    token_key: SigningKey
    folder: Path
    gateway: TlsFiles
    dispatch: TlsFiles
    apm: TlsFiles


def make_pki(folder: Path) -> Pki:
    """Make keys and certificates as assembly does."""
    ca = ensure_authority(folder, clock=SystemClock(), rng=SystemRng())
    return Pki(
        ca=ca,
        plan_key=ensure_signing_key(folder / "plan-sign.pem", "plan"),
        token_key=ensure_signing_key(folder / "token-sign.pem", "token"),
        folder=folder,
        gateway=ca.issue("gateway", names=[GATEWAY_NAME]),
        dispatch=ca.issue("dispatch", names=[DISPATCH_NAME]),
        apm=ca.issue("apm", names=[APM_NAME]),
    )


@dataclass(kw_only=True)
class World:
    """What one test runs against.

    Attributes:
        bundle: how clients find dispatch.
        gateway: what came to the gateway.
        dispatch: where dispatch answers.
        pki: its keys.
        rules: what dispatch says.
        dispatch_stop: set, it ends dispatch.
    """

    bundle: Bundle
    gateway: ScriptedGateway
    dispatch: Address
    pki: Pki
    rules: RuleSet
    dispatch_stop: asyncio.Event

    def config(self, **change: Any) -> Config:
        """Give a client's config; the report is off unless a test asks for it."""
        return replace(Config(bundle=self.bundle, report=False), **change)

    def client(self, **change: Any) -> AsyncClient:
        """Give a client of this platform."""
        return AsyncClient(config=self.config(**change))

    async def stop_dispatch(self) -> None:
        """End dispatch and wait until nothing listens there."""
        self.dispatch_stop.set()
        await wait_until(lambda: not listens(self.dispatch))


@contextlib.asynccontextmanager
async def running_world(pki: Pki, *scripts: Script, token: str = "", **rules: Any) -> AsyncIterator[World]:
    """Run dispatch and a gateway that plays these scripts.

    Args:
        pki: keys and certificates.
        *scripts: one per connection to the gateway, the last for all that follow.
        token: device token of the bundle.
        **rules: changes of the rules.
    """
    async with scripted_gateway(pki.gateway, *scripts) as gateway:
        made = rules_for(gateway.address, **rules)
        async with running_dispatch(pki, made) as (address, stop):
            yield World(
                bundle=bundle_for(pki, address, token=token),
                gateway=gateway,
                dispatch=address,
                pki=pki,
                rules=made,
                dispatch_stop=stop,
            )


@contextlib.asynccontextmanager
async def running_dispatch(
    pki: Pki,
    rules: RuleSet,
    *,
    started_plain: Callable[[Address], None] | None = None,
    source: HeldRules | None = None,
    **change: Any,
) -> AsyncIterator[tuple[Address, asyncio.Event]]:
    """Run the real dispatch service.

    Args:
        pki: keys and certificates.
        rules: what it says.
        started_plain: told its port of clear HTTP, where it has one.
        source: the rules in the hand of the test, which may put others in.
        **change: of its config.
    """
    arguments: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "tls": pki.dispatch,
        "unit": "u1",
        "rules": rules,
        "plan_key": KeyFile(pki.folder / "plan-sign.pem", pki.plan_key.kid),
        "token_key": pki.token_key,
        "admin_key": Secret("an-admin-key-0123456789"),
    }
    stop, answering = asyncio.Event(), asyncio.Event()
    addresses: list[Address] = []

    def started(address: Address) -> None:
        addresses.append(address)
        answering.set()

    config = DispatchConfig(**(arguments | change))
    task = asyncio.create_task(
        service.run(
            config,
            clock=SystemClock(),
            rng=SystemRng(),
            started=started,
            stop=stop,
            plain_started=started_plain,
            source=source,
        )
    )
    await answering.wait()
    try:
        yield addresses[0], stop
    finally:
        stop.set()
        await task


def bundle_for(pki: Pki, *dispatch: Address, **change: Any) -> Bundle:
    """Give a bundle that names these addresses of dispatch."""
    fields: dict[str, Any] = {
        "app": APP,
        "dispatch": tuple(str(address) for address in dispatch),
        "dispatch_name": DISPATCH_NAME,
        "dispatch_keys": {pki.plan_key.kid: pki.plan_key.public_text},
        "ca_pem": pki.ca.ca_pem,
    }
    return Bundle(**(fields | change))


def rules_for(*gateways: Address, version: int = 1, **change: Any) -> RuleSet:
    """Give rules by which these gateways serve `HOST` and `BOTH`."""
    endpoints = ranked(
        Endpoint(host=each.host, port=each.port, carrier=Carrier.LONG_TLS, server_name=GATEWAY_NAME)
        for each in gateways
    )
    fields: dict[str, Any] = {
        "version": version,
        "hosts": {HOST: HostPlan(endpoints=endpoints), BOTH: HostPlan(endpoints=endpoints)},
        "apps": {APP: frozenset({HOST, BOTH})},
        "gateways": {APP: endpoints},
    }
    return RuleSet(**(fields | change))


def listens(address: Address) -> bool:
    """Say whether somebody takes connections there."""
    with socket.socket() as sock:
        return sock.connect_ex(address) == 0


async def wait_until(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds.

    Raises:
        TimeoutError: it did not within `WAIT_S`.
    """
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - of any kind, also what no event tells of
            await asyncio.sleep(0.005)
