"""Looking at a running platform from outside."""

import asyncio
import contextlib
import os
import ssl
from typing import Final, NamedTuple

import httpx2

from stormline.assembly import layout
from stormline.assembly.names import SERVER_NAMES
from stormline.assembly.roles import ROLES
from stormline.core import errors, limits
from stormline.core.values import parse_address

_HEALTH: Final = {"dispatch": "https", "apm": "https", "admin": "http"}
"""Parts that tell how they are at `/healthz`; of the others it is only seen whether they take a connection."""


class Part(NamedTuple):
    """One part of the platform as seen now.

    Attributes:
        part: what it is.
        role: name of the process it belongs to.
        pid: that process.
        address: `ip:port`.
        health: `ok`, or what is wrong.
    """

    part: str
    role: str
    pid: int
    address: str
    health: str


async def parts(place: layout.Layout) -> list[Part]:
    """Look at every part that has a run file: does its process live, does it answer.

    Raises:
        PlatformError: a run file is damaged, or the authority's certificate cannot be read.
    """
    read = (layout.read(path, layout.RoleRun) for path in place.running())
    runs = sorted((run for run in read if run is not None), key=_place_of)
    try:
        trust = ssl.create_default_context(cafile=place.ca)
    except OSError as error:
        raise errors.PlatformError(f"{place.ca}: cannot be read: {error}") from error
    async with httpx2.AsyncClient(verify=trust, timeout=limits.HEALTH_TIMEOUT_S, trust_env=False) as http:
        looks = [_look(run, part, http) for run in runs for part in run.addresses]
        return list(await asyncio.gather(*looks))


def _place_of(run: layout.RoleRun) -> tuple[int, str]:
    """Order as in `ROLES`, workers of one role side by side, the engine last."""
    role = run.role.partition("-")[0]
    return (list(ROLES).index(role) if role in ROLES else len(ROLES), run.role)


async def _look(run: layout.RoleRun, part: str, http: httpx2.AsyncClient) -> Part:
    address = run.addresses[part]
    try:
        os.kill(run.pid, 0)
    except OSError:
        health = "process gone"
    else:
        health = await (_ask(part, address, http) if part in _HEALTH else _connect(address))
    return Part(part, run.role, run.pid, address, health)


async def _ask(part: str, address: str, http: httpx2.AsyncClient) -> str:
    name = SERVER_NAMES.get(part)
    try:
        answer = await http.get(
            f"{_HEALTH[part]}://{address}/healthz", extensions={"sni_hostname": name} if name else {}
        )
        body = answer.json()
    except httpx2.TimeoutException:
        return f"no answer within {limits.HEALTH_TIMEOUT_S:g} s"
    except httpx2.HTTPError as error:
        return f"does not answer: {error}"
    except ValueError:
        return f"HTTP {answer.status_code}, no JSON"
    if isinstance(body, dict) and body.get("status") == "draining":
        return "draining"
    if answer.status_code != 200:
        return f"HTTP {answer.status_code}"
    engine = body.get("engine", "connected") if isinstance(body, dict) else "connected"
    return "ok" if engine == "connected" else f"engine {engine}"


async def _connect(address: str) -> str:
    try:
        host, port = parse_address(address)
        async with asyncio.timeout(limits.HEALTH_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"no connection within {limits.HEALTH_TIMEOUT_S:g} s"
    except (OSError, errors.ConfigError) as error:
        return f"does not answer: {getattr(error, 'strerror', None) or error}"
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return "ok"
