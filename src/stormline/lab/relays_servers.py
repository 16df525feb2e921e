"""The platform behind the device that needs a relay: one scheduling centre, and relays at some addresses.

Run as `python -m stormline.lab.relays_servers` inside the servers' namespace, told by its arguments. It writes the
client's bundle, says so in one line on its output, and ends when its input does.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, Final

import uvloop

from stormline.assembly.authority import ensure_authority
from stormline.dispatch.rules import RuleSet
from stormline.lab import starts_servers
from stormline.lab.specs import SHOP
from stormline.lab.starts_networks import DISPATCH
from stormline.net.clock import SystemClock, SystemRng
from stormline.relay import keys, service
from stormline.wire import jws, ohttp
from stormline.wire.plan import SEALED, Carrier, Endpoint, HostPlan, Policy

ON_SITE: Final = "203.0.113.70"
"""A relay beside the origin: what troubles the way there troubles this one too."""
OFF_SITE: Final = "198.51.100.70"
"""A relay elsewhere."""
PORT: Final = 80


def addresses_script() -> str:
    """Give the commands that make the platform's addresses."""
    return "\n".join(f"ip address add {host}/32 dev lo" for host in (DISPATCH, ON_SITE, OFF_SITE))


def rules(origin: tuple[str, ...], relays: tuple[str, ...], listed: str) -> RuleSet:
    """Give what dispatch says.

    Args:
        origin: the origin's addresses.
        relays: addresses of relays, best first.
        listed: their keys.
    """
    endpoints = tuple(Endpoint(host=host, port=443, carrier=Carrier.H2) for host in origin)
    found = tuple(Endpoint(host=host, port=PORT, carrier=SEALED, keys=listed) for host in relays)
    plan = HostPlan(endpoints=endpoints, policy=Policy(relays=found))
    app = starts_servers.APP
    return RuleSet(version=1, hosts={SHOP: plan}, apps={app: frozenset({SHOP})}, preload={app: (SHOP,)})


async def _relay(host: str, key: Path, upstream: str, stop: asyncio.Event) -> "asyncio.Task[None]":
    """Start a relay and its gateway; gives its work once it answers."""
    config = service.RelayConfig(host=host, ports=(PORT,), keys=(key,), origins={SHOP: (upstream,)})
    up: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    work = service.run(config, clock=SystemClock(), rng=SystemRng(), started=up.set_result, stop=stop)
    task = asyncio.create_task(work, name=f"relay {host}")
    await starts_servers.wait_started(task, up)
    return task


async def run(told: dict[str, Any]) -> None:
    """Write the bundle, and serve until the input ends.

    Args:
        told: `authority` (folder of all keys), `bundle` (path to write), `origin` (addresses), `relays` (addresses, as
            plans name them), `upstream` (`http://ip` behind the relays, where the network is good).
    """
    authority = ensure_authority(Path(told["authority"]), clock=SystemClock(), rng=SystemRng())
    starts_servers.write_bundle(Path(told["bundle"]), authority, (SHOP,))
    path = authority.folder / "relay-key"
    listed = jws.b64url(ohttp.encode_keys([keys.write_key(path, 1).config]))
    stop = asyncio.Event()
    said = rules(tuple(told["origin"]), tuple(told["relays"]), listed)
    tasks = [await starts_servers.dispatch(said, authority, stop)]
    tasks += [await _relay(host, path, told["upstream"], stop) for host in (ON_SITE, OFF_SITE)]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    stop.set()
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    uvloop.run(run(json.loads(sys.argv[1])))
