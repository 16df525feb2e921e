"""The platform behind the device that moves: one scheduling centre, and one gateway under several addresses and ports.

Run as `python -m stormline.lab.starts_servers` inside the servers' namespace, told by its arguments. It writes the
client's bundle, says so in one line on its output, takes each line of its input as how far the centre's wall clock is
to be ahead (seconds), as the device's is, and says that it is; and ends when its input does.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, Final

import uvloop

from stormline.assembly.authority import Authority, ensure_authority, ensure_signing_key
from stormline.core import ids
from stormline.core.values import Address, Secret
from stormline.dispatch import service
from stormline.dispatch.config import DispatchConfig, KeyFile
from stormline.dispatch.rules import RuleSet
from stormline.engine.memory import MemoryBroker, MemoryEngine
from stormline.engine.nats import EngineConfig
from stormline.engine.port import Engine
from stormline.gateway import server
from stormline.gateway.config import GatewayConfig
from stormline.lab.specs import SHOP
from stormline.lab.starts_networks import DISPATCH, GATEWAY_IPV6, GATEWAY_PORTS, GATEWAYS, ORIGIN_PORTS
from stormline.net.clock import SystemClock, SystemRng
from stormline.wire import bundle, jws
from stormline.wire.plan import Carrier, Endpoint, HostPlan

APP: Final = "starts"
LONG_HOST: Final = "api.lab.test"
"""The host that dispatch serves over the long connection; `specs.SHOP` is asked at its own addresses."""
_DISPATCH_NAME: Final = "dispatch.lab.test"
_GATEWAY_NAME: Final = "gateway.lab.test"
_GATEWAY_PORT: Final = 7000
"""Where it listens; the kernel leads every other address and port there."""
_PLAN_FILE: Final = "plan-sign.pem"
_ENROL_FILE: Final = "token-sign.pem"
_NO_ENGINE: Final = EngineConfig(url="nats://127.0.0.1:1", user="nobody", password=Secret("nothing"))


class _Ahead(SystemClock):
    """The machine's clock with the time of day of a later start."""

    later_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.later_s


def rules(origin: tuple[str, ...]) -> RuleSet:
    """Give what dispatch says.

    Args:
        origin: the origin's addresses, in the order dispatch has them.
    """
    shop = [
        Endpoint(host=host, port=port, carrier=carrier, weight=_weight(port, place))
        for port, carrier in zip(ORIGIN_PORTS, (Carrier.H2, Carrier.H1), strict=True)
        for place, host in enumerate(origin)
    ]
    gateways = [
        Endpoint(host=host, port=port, carrier=Carrier.LONG_TLS, server_name=_GATEWAY_NAME, weight=_weight(port, place))
        for port in GATEWAY_PORTS
        for place, host in enumerate((GATEWAY_IPV6, *GATEWAYS))
    ]
    return RuleSet(
        version=1,
        hosts={SHOP: HostPlan(endpoints=tuple(shop)), LONG_HOST: HostPlan(endpoints=tuple(gateways))},
        apps={APP: frozenset({SHOP, LONG_HOST})},
        preload={APP: (SHOP, LONG_HOST)},
    )


def _weight(port: int, place: int) -> int:
    """Give a weight by which nearly every device has the addresses in this order, and other ports as a last resort."""
    return 10 ** (12 - 4 * min(place, 3)) if port == 443 else 0


def addresses_script(origin: tuple[str, ...]) -> str:
    """Give the commands that lead all addresses and ports of the plan to where somebody listens."""
    lines = [f"ip address add {host}/32 dev lo" for host in (DISPATCH, *GATEWAYS)]
    lines.append(f"ip address add {GATEWAY_IPV6}/128 dev lo nodad")
    ports = f"tcp dport {{ {', '.join(map(str, GATEWAY_PORTS))} }}"
    nat = [f"ip daddr {host} {ports} dnat ip to {GATEWAYS[0]}:{_GATEWAY_PORT}" for host in GATEWAYS]
    nat.append(f"ip6 daddr {GATEWAY_IPV6} {ports} dnat ip6 to [{GATEWAY_IPV6}]:{_GATEWAY_PORT}")
    for host in origin:
        family, place = ("ip6", f"[{host}]") if ":" in host else ("ip", host)
        nat.append(f"{family} daddr {host} tcp dport {ORIGIN_PORTS[1]} dnat {family} to {place}:{ORIGIN_PORTS[0]}")
    hook = "type nat hook prerouting priority dstnat;"
    chain = "\n".join((hook, *nat))
    lines.append(f"nft -f - <<'END'\ntable inet starts {{\nchain places {{\n{chain}\n}}\n}}\nEND")
    return "\n".join(lines)


async def dispatch(
    said: RuleSet, authority: Authority, stop: asyncio.Event, *, clock: SystemClock | None = None
) -> "asyncio.Task[None]":
    """Start the scheduling centre; gives its work once it answers.

    Args:
        said: its rules.
        authority: of all certificates and keys.
        stop: ends it.
        clock: its time; None: the machine's.
    """
    keys = authority.folder
    plan_key = ensure_signing_key(keys / _PLAN_FILE, "plan")
    token_key = ensure_signing_key(keys / _ENROL_FILE, "token")
    config = DispatchConfig(
        host=DISPATCH,
        port=443,
        tls=authority.issue("dispatch", names=[_DISPATCH_NAME], ips=[DISPATCH]),
        unit="u1",
        rules=said,
        plan_key=KeyFile(keys / _PLAN_FILE, plan_key.kid),
        token_key=token_key,
        admin_key=Secret(ids.new_id(SystemRng())),
    )
    up: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
    work = service.run(config, clock=clock or SystemClock(), rng=SystemRng(), started=up.set_result, stop=stop)
    task = asyncio.create_task(work, name="dispatch")
    await wait_started(task, up)
    return task


async def _gateway(told: dict[str, Any], authority: Authority, stop: asyncio.Event) -> "asyncio.Task[None]":
    """Start the gateway; gives its work once it takes connections."""
    token_key: jws.SigningKey = ensure_signing_key(authority.folder / _ENROL_FILE, "token")
    broker = MemoryBroker()

    async def memory() -> Engine:
        return MemoryEngine(broker)

    config = GatewayConfig(
        host="::",
        port=_GATEWAY_PORT,
        tls=authority.issue("gateway", names=[_GATEWAY_NAME]),
        apps={APP: {token_key.kid: token_key.public_text}},
        api_upstreams={LONG_HOST: told["upstream"]},
        engine=_NO_ENGINE,
        admin_key=Secret(ids.new_id(SystemRng())),
    )
    up: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
    work = server.run(
        config,
        clock=SystemClock(),
        rng=SystemRng(),
        started=lambda address, _: up.set_result(address),
        stop=stop,
        connect=memory,
    )
    task = asyncio.create_task(work, name="gateway")
    await wait_started(task, up)
    return task


async def wait_started(task: "asyncio.Task[None]", up: "asyncio.Future[Any]") -> None:
    """Wait until a service says that it answers; raises what ended it instead."""
    waited: set[asyncio.Future[Any]] = {task, up}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    if not up.done():
        await task


def write_bundle(path: Path, authority: Authority, preload: tuple[str, ...]) -> None:
    """Write what the app ships; `preload` are hosts that it asks dispatch about at once."""
    key = ensure_signing_key(authority.folder / _PLAN_FILE, "plan")
    content = bundle.Bundle(
        app=APP,
        dispatch=(f"{DISPATCH}:443",),
        dispatch_name=_DISPATCH_NAME,
        dispatch_keys={key.kid: key.public_text},
        ca_pem=authority.ca_pem,
        preload=preload,
    )
    path.write_bytes(bundle.encode(content))


async def run(told: dict[str, Any], authority: Authority) -> None:
    """Serve until the input ends.

    Args:
        told: `origin` (addresses), `upstream` (`http://ip` behind the gateway).
        authority: of all certificates and keys.
    """
    stop, clock = asyncio.Event(), _Ahead()
    centre = await dispatch(rules(tuple(told["origin"])), authority, stop, clock=clock)
    tasks = [centre, await _gateway(told, authority, stop)]
    _say_ready()
    while later_s := await asyncio.to_thread(sys.stdin.readline):
        clock.later_s = float(later_s)
        _say_ready()
    stop.set()
    await asyncio.gather(*tasks)


def _say_ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def main(told: dict[str, Any]) -> None:
    """Write the bundle and serve.

    Args:
        told: as for `run`, and `authority` (its folder) and `bundle` (path to write).
    """
    authority = ensure_authority(Path(told["authority"]), clock=SystemClock(), rng=SystemRng())
    write_bundle(Path(told["bundle"]), authority, (SHOP, LONG_HOST))
    uvloop.run(run(told, authority))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
