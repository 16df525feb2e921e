"""How long a changed plan takes from the admin API into the hands of clients.

A platform of its own processes on this machine, and the client's own parts in this one: each session enrols by a
token, holds a long connection over TLS, is told of a change by its gateway at its random moment, asks through that
connection, and has checked the signature of what it holds.
"""

import asyncio
import contextlib
import ssl
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import httpx2

from stormline.assembly import layout
from stormline.assembly.names import SERVER_NAMES
from stormline.assembly.platform import Event, Platform
from stormline.client.config import Config, load_bundle
from stormline.client.runtime import Runtime
from stormline.core import errors
from stormline.core.values import Secret
from stormline.net.clock import SystemClock, SystemRng
from stormline.settings import load
from stormline.settings.model import Ports
from stormline.wire.bundle import Bundle

SESSIONS: Final = 200
CHANGES: Final = 6
"""Changes of the plan, one after the other: 1,200 waits in all."""
_PAUSE_S: Final = 2.5
"""Between two changes: none meets the pass of the one before."""
_LOOK_S: Final = 0.005
_LATE_S: Final = 30.0
_HOST: Final = "api.shop.example"
_SETTINGS: Final = f"""
[api.upstreams]
"{_HOST}" = "http://127.0.0.1:9"
"""


def waits_s(sessions: int = SESSIONS, changes: int = CHANGES) -> list[float]:
    """Give, for each change and session, the seconds from the change's request to the plan held; shortest first.

    Raises:
        PlatformError: the platform did not start, or a client did not get a plan.
    """
    with tempfile.TemporaryDirectory(prefix="stormline-bench-") as folder:
        state = Path(folder) / "state"
        state.mkdir(mode=0o700)
        (state / "stormline.toml").write_text(_SETTINGS)
        return asyncio.run(_measure(state, sessions, changes))


async def _measure(state: Path, sessions: int, changes: int) -> list[float]:
    async with _platform(state) as bundle, _admin(state) as admin, contextlib.AsyncExitStack() as stack:
        clients: list[Runtime] = []
        for number in range(sessions):
            token = await _token(admin, bundle.app, f"bench-{number}")
            clients.append(Runtime(Config(bundle=bundle, token=token, report=False)))
            stack.push_async_callback(clients[-1].aclose)
            await _join(clients[-1])
        found: list[float] = []
        for number in range(changes):
            await asyncio.sleep(_PAUSE_S)
            found += await _change(admin, clients, deadline_s=10.0 + number)
        return sorted(found)


@contextlib.asynccontextmanager
async def _platform(state: Path) -> AsyncIterator[Bundle]:
    ports = {f"ports.{part}": 0 for part in Ports.__struct_fields__}
    settings = load.load({}, state=state, overrides=ports)
    ready, stop = asyncio.Event(), asyncio.Event()

    def notify(event: Event) -> None:
        if event.event == "ready":
            ready.set()

    roles = ("dispatch", "gateway")
    platform = Platform(settings, only=roles, clock=SystemClock(), rng=SystemRng(), notify=notify)
    running = asyncio.create_task(platform.run(stop), name="platform")
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        bundle = load_bundle(layout.Layout(state).bundle) if ready.is_set() else None
        if bundle is not None:
            yield bundle
    finally:
        waiting.cancel()
        stop.set()
        await running


@contextlib.asynccontextmanager
async def _admin(state: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """Give a client of dispatch's admin API."""
    admin = layout.read(layout.Layout(state).admin, layout.Admin)
    if admin is None:
        raise errors.PlatformError("bench: the platform is gone")

    async def name(request: httpx2.Request) -> None:
        request.extensions["sni_hostname"] = SERVER_NAMES["dispatch"]

    async with httpx2.AsyncClient(
        base_url=f"https://{admin.addresses['dispatch']}/v1/admin",
        verify=ssl.create_default_context(cafile=admin.ca_file),
        headers={"authorization": f"Bearer {admin.keys.admin}"},
        event_hooks={"request": [name]},
        trust_env=False,
        timeout=_LATE_S,
    ) as client:
        yield client


async def _token(admin: httpx2.AsyncClient, app: str, device: str) -> Secret:
    answer = await admin.post("/tokens", json={"app": app, "device": device})
    return Secret(answer.raise_for_status().json()["token"])


async def _join(client: Runtime) -> None:
    """Wait until the client has a plan and a long connection that was welcomed."""
    if client.scheduling is None or client.longline is None:
        raise errors.PlatformError("bench: a client without its platform")
    late_at = client.loop.time() + _LATE_S
    while not client.scheduling.line_stands():
        if client.loop.time() > late_at:
            raise errors.PlatformError("bench: a client was not welcomed by the gateway")
        with contextlib.suppress(errors.TransportError):  # it waits before it tries again
            await client.longline.get()
        await asyncio.sleep(_LOOK_S)
    await client.scheduling.host_plan(_HOST)


async def _change(admin: httpx2.AsyncClient, clients: list[Runtime], *, deadline_s: float) -> list[float]:
    """Change the plan; gives for each client the seconds until it held the new one."""
    rules = (await admin.get("/rules")).raise_for_status().json()
    before: int = rules["version"]
    rules["hosts"][_HOST]["deadline_s"] = deadline_s
    loop, found, waiting = asyncio.get_running_loop(), [], set(clients)
    begin = loop.time()
    publishing = asyncio.create_task(
        admin.put("/rules", params={"who": "bench"}, json=rules, headers={"if-match": "*"})
    )
    try:
        while waiting:
            now = loop.time()
            holding = {each for each in waiting if _version(each) > before}
            found += [now - begin] * len(holding)
            waiting -= holding
            if now - begin > _LATE_S:
                raise errors.PlatformError(f"bench: {len(waiting)} of {len(clients)} clients did not get the plan")
            await asyncio.sleep(_LOOK_S)
    finally:
        (await publishing).raise_for_status()
    return found


def _version(client: Runtime) -> int:
    plan = client.scheduling.plan if client.scheduling is not None else None
    return plan.version if plan is not None else 0
