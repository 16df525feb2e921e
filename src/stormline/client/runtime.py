"""All parts of one client on one event loop, put together: pool, dispatch, long connection, executor, recorder."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterable
from importlib import metadata

from stormline.client.answer import Answer
from stormline.client.config import Config
from stormline.client.executor import CallLimits, Executor
from stormline.client.longline import LongLine
from stormline.client.recorder import Recorder
from stormline.client.scheduling import Scheduling
from stormline.client.store import Store
from stormline.client.trace import CallTrace
from stormline.net import trust
from stormline.net.clock import SystemClock, SystemRng
from stormline.net.resolve import Resolver
from stormline.outbound.dial import Dialer
from stormline.outbound.messages import Headers, HttpRequest
from stormline.outbound.pool import HttpPool
from stormline.telemetry.timeline import CallRecord
from stormline.wire import messages
from stormline.wire.plan import Endpoint

_log = logging.getLogger("stormline.client")
CLIENT_NAME = f"stormline/{metadata.version('stormline')}"


class Runtime:
    """A client's working parts. Made inside a running loop, used only there, ended by `aclose`."""

    def __init__(self, config: Config, *, foreign_context: ssl.SSLContext | None = None) -> None:
        self.config = config
        self.loop = asyncio.get_running_loop()
        self.clock = SystemClock()
        self.rng = SystemRng()
        self._resolver = Resolver()
        self._pool = HttpPool(Dialer(self._resolver, foreign_context or trust.foreign_context()), self.clock)
        self._roles_pool: HttpPool | None = None
        self._store: Store | None = None
        self.scheduling: Scheduling | None = None
        self.longline: LongLine | None = None
        self._recorder: Recorder | None = None
        if config.bundle is not None:
            self._join(config, config.bundle.app)
        self._executor = Executor(config, pool=self._pool, scheduling=self.scheduling, longline=self.longline)

    def _join(self, config: Config, app: str) -> None:
        """Set up the parts that need a platform."""
        bundle = config.bundle
        if bundle is None:
            return
        if config.store is not None:
            self._store = Store(config.store, app)
            self._store.open()
        context = trust.roles_context(bundle.ca_pem, ("http/1.1",)) if bundle.ca_pem else trust.foreign_context()
        long_alpn = (messages.ALPN,)
        long_context = (
            trust.roles_context(bundle.ca_pem, long_alpn) if bundle.ca_pem else trust.foreign_context(long_alpn)
        )
        self._roles_pool = HttpPool(Dialer(self._resolver, context), self.clock)
        self.scheduling = Scheduling(config, bundle, self._roles_pool, self.clock, self._store)
        self.longline = LongLine(
            config, app, self.scheduling, Dialer(self._resolver, long_context), self.rng, CLIENT_NAME
        )
        if config.report:
            self._recorder = Recorder(
                self._roles_pool, self._report_endpoint, self.scheduling.token, self.rng, CLIENT_NAME
            )

    def _report_endpoint(self) -> Endpoint | None:
        plan = self.scheduling.plan if self.scheduling is not None else None
        return plan.report if plan is not None else None

    def record(self, record: CallRecord) -> None:
        """Take a finished call's record."""
        if self._recorder is not None:
            self._recorder.add(record)

    def trace(self, *, method: str, host: str, path: str, business: str = "") -> CallTrace:
        """Begin to follow a call."""
        return CallTrace(
            self.clock,
            self.rng,
            method=method,
            host=host,
            path=path,
            business=business or self.config.business,
            network=self.config.network,
            sink=self.record,
        )

    async def execute(
        self,
        *,
        method: str,
        scheme: str,
        host: str,
        port: int,
        target: bytes,
        headers: Headers,
        body: bytes | AsyncIterable[bytes] | None,
        timeouts: dict[str, float | None],
        trace: CallTrace,
    ) -> Answer:
        """Run one HTTP request; see `Executor.execute`.

        Args:
            timeouts: `deadline`, `read` and `connect` in seconds; absent or None takes the config's.
        """
        call_limits = CallLimits(
            deadline_s=timeouts.get("deadline") or self.config.deadline_s,
            read_timeout_s=timeouts.get("read") or self.config.read_timeout_s,
            connect_timeout_s=timeouts.get("connect") or self.config.connect_timeout_s,
        )
        request = HttpRequest(method, scheme, host, port, target, headers, body)
        return await self._executor.execute(request, call_limits, trace)

    def abandon(self) -> None:
        """Close the sockets of a runtime whose loop is closed; nothing can be sent any more."""
        for pool in (self._pool, self._roles_pool):
            if pool is not None:
                pool.close()
        if self.longline is not None:
            self.longline.abandon()
        if self._store is not None:
            self._store.close()

    async def aclose(self) -> None:
        """Send the last report, say good-bye to the gateway, close every connection."""
        if self._recorder is not None:
            await self._recorder.aclose()
        if self.longline is not None:
            await self.longline.aclose()
        if self.scheduling is not None:
            await self.scheduling.aclose()
        for pool in (self._pool, self._roles_pool):
            if pool is not None:
                await pool.aclose()
        if self._store is not None:
            self._store.close()
