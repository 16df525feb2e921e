"""Connections made before they are asked for: names, TCP and TLS are behind the first request then, not before it."""

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from stormline.client.config import Config
from stormline.client.longcall import LONG_CARRIERS
from stormline.client.recourse import allowed, origins
from stormline.core import errors, limits_memory
from stormline.outbound.held import key_of
from stormline.outbound.messages import HttpRequest
from stormline.outbound.pool import HttpPool
from stormline.outbound.proxy_rules import ProxyRules
from stormline.policy.means import Means

if TYPE_CHECKING:
    from stormline.client.longline import LongLine
    from stormline.client.scheduling import Scheduling

_log = logging.getLogger("stormline.client")
_PORTS = {"http": 80, "https": 443}


class Preconnector:
    """Makes one connection to an origin by the means a request would try first.

    Attributes:
        scheduling, longline: of a platform, where there is one.
        h1: the pool can offer HTTP/1.1 alone.
        sparing: nothing is connected to: the app is in the background, or somebody pays for each byte.
    """

    def __init__(
        self,
        config: Config,
        pool: HttpPool,
        proxies: ProxyRules,
    ) -> None:
        self._config = config
        self._pool = pool
        self._proxies = proxies
        self._under_way = 0
        self._tasks: set[asyncio.Task[bool]] = set()
        self.scheduling: Scheduling | None = None
        self.longline: LongLine | None = None
        self.h1 = False
        self.sparing = False

    def begin(self, urls: list[str]) -> None:
        """Connect to some origins without waiting for it; at most `limits_memory.PRECONNECTS_MAX`."""
        for url in urls[: limits_memory.PRECONNECTS_MAX]:
            task = asyncio.get_running_loop().create_task(self.open(url), name="stormline preconnect")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def open(self, url: str) -> bool:
        """Have a connection for the origin of `url`; at most `limits_memory.PRECONNECT_S`.

        Returns:
            True where one stands at the end, made now or before. False where none could be made, where `sparing`, and
            where `limits_memory.PRECONNECTS_MAX` are being made already. Raises nothing but CancelledError.
        """
        if self.sparing or self._under_way >= limits_memory.PRECONNECTS_MAX:
            return False
        self._under_way += 1
        try:
            async with asyncio.timeout(limits_memory.PRECONNECT_S):
                return await self._open(url)
        except (errors.StormlineError, TimeoutError, ValueError) as error:
            _log.debug("no pre-connect: %s", type(error).__name__)  # its text may quote the URL
            return False
        finally:
            self._under_way -= 1

    async def _open(self, url: str) -> bool:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme, 0)
        if not parts.hostname or not port:
            raise ValueError("no URL of an origin")
        host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode("ascii")
        request = HttpRequest("GET", parts.scheme, host, port, b"/", (), None)
        disabled = self._config.disabled
        h1 = False
        proxied = self._proxies.proxy_for(request.scheme, host, port) is not None
        if self.scheduling is not None:
            plan = await self.scheduling.host_plan(host)
            off = frozenset[str]() if self.scheduling.plan is None else frozenset(self.scheduling.plan.disabled)
            if plan is not None and plan.policy is not None:
                off = off.union(plan.policy.disabled)
            disabled, h1 = disabled | off, self.h1 and "h2" in off
            endpoints = allowed(plan.endpoints, off) if plan is not None else ()
            long = any(each.carrier in LONG_CARRIERS for each in endpoints) and Means.LONG not in disabled
            if long and self.longline is not None and not self.longline.stopped and not self.longline.paused:
                await self.longline.get()
                return True
            steps = () if proxied or Means.IP_DIRECT in disabled else origins(endpoints, request)
            if steps:
                step = steps[0]
                key = key_of(request, step.addresses, step.server_name or None, h1)
                return await self._pool.preconnect(key, limits_memory.PRECONNECT_S)
        if Means.DIRECT in disabled:
            return False
        return await self._pool.preconnect(key_of(request, None, None, h1), limits_memory.PRECONNECT_S)

    async def aclose(self) -> None:
        """Give up what is under way."""
        tasks = self.abandon()
        if tasks:
            await asyncio.wait(tasks)

    def abandon(self) -> list[asyncio.Task[bool]]:
        """Give it up without waiting; also where the event loop is closed. Give the tasks."""
        tasks = list(self._tasks)
        with contextlib.suppress(RuntimeError):
            for task in tasks:
                task.cancel()
        return tasks
