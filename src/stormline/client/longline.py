"""The long connection of a client over time: opened when wanted, shared by all, reopened after a loss."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from stormline.client.config import Config
from stormline.client.link import Link
from stormline.client.scheduling import Scheduling, renewable
from stormline.core import codes, errors
from stormline.core.clock import Rng
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.stream import Stream
from stormline.outbound.dial import Dialer
from stormline.policy.reconnect import Reconnect
from stormline.wire import events as e
from stormline.wire import messages
from stormline.wire.plan import Carrier

_log = logging.getLogger("stormline.client")
OnStage = Callable[[str], None]


class LineListener(Protocol):
    """Who hears what comes in over the long connection, whichever link carries it."""

    def line_welcomed(self, link: Link, welcome: messages.Welcome) -> None:
        """A session stands (again)."""
        ...

    def line_push(self, link: Link, push: e.PushReceived) -> None:
        """A push came."""
        ...

    def line_call(self, link: Link, call: e.CallReceived) -> None:
        """The server calls."""
        ...

    def line_call_data(self, link: Link, event: e.DataReceived | e.CallCancelled) -> None:
        """More of a server's call, or its end."""
        ...

    def line_ended(self, link: Link, closed: e.Closed) -> None:
        """The session is over."""
        ...


class LongLine:
    """Holds at most one link; who wants one while it is being opened waits for the same attempt."""

    def __init__(
        self, config: Config, app: str, scheduling: Scheduling, dialer: Dialer, rng: Rng, client_name: str
    ) -> None:
        self._config = config
        self._app = app
        self._scheduling = scheduling
        self._dialer = dialer
        self._rng = rng
        self._client_name = client_name
        self._loop = asyncio.get_running_loop()
        self._reconnect = Reconnect()
        self._link: Link | None = None
        self._opening: asyncio.Task[Link] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._leaving: set[Link] = set()
        self._lost = asyncio.Event()
        self._renewed = False
        self.listener: LineListener | None = None
        self.last_refusal: errors.RefusedError | None = None

    @property
    def usable(self) -> bool:
        """True where a link stands or may be tried now."""
        standing = self._link is not None and self._link.usable
        return standing or self._opening is not None or self._reconnect.may_try(self._loop.time())

    @property
    def stopped(self) -> bool:
        """True where the gateway refused for good; only a new token or plan changes that."""
        return self._reconnect.stopped

    def pause_s(self) -> float:
        """Seconds until a link may be tried again, 0 where it may be now."""
        due = self._reconnect.next_timer()
        return max(0.0, due - self._loop.time()) if due is not None else 0.0

    @property
    def link(self) -> Link | None:
        """The link that stands, None where none does."""
        return self._link if self._link is not None and self._link.usable else None

    async def get(self, on_stage: OnStage = lambda stage: None) -> tuple[Link, bool]:
        """Give a usable link and whether it stood before; opens one where none does.

        Safe to cancel: an attempt that others wait for goes on.

        Raises:
            TransportError: none could be opened; `maybe_delivered` is False.
        """
        if self._link is not None and self._link.usable:
            return self._link, True
        on_stage(Phase.CONNECT)
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(on_stage), name="stormline open link")
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening), False

    def _opened(self, task: asyncio.Task[Link]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # retrieved: the waiters have it, and there may be none left

    async def _open(self, on_stage: OnStage) -> Link:
        endpoints = self._endpoints()
        try:
            if not endpoints:
                await self._scheduling.refresh()
                endpoints = self._endpoints()
        except errors.DispatchError as error:
            self._reconnect.observe_failure(self._loop.time(), self._rng.random())
            raise errors.ConnectError(str(error), phase=Phase.PLAN, maybe_delivered=False) from error
        if not endpoints:
            self._reconnect.observe_failure(self._loop.time(), self._rng.random())
            raise errors.ConnectError(
                "dispatch names no gateway for a long connection", phase=Phase.PLAN, maybe_delivered=False
            )
        try:
            token = await self._scheduling.token()
        except errors.DispatchError as error:
            self._reconnect.observe_failure(self._loop.time(), self._rng.random())
            raise errors.ConnectError(str(error), phase=Phase.PLAN, maybe_delivered=False) from error
        failures = []
        for server_name, addresses in endpoints.items():
            try:
                stream = await self._dialer.dial(
                    server_name,
                    addresses[0].port,
                    tls=True,
                    timeout_s=self._config.connect_timeout_s,
                    addresses=addresses,
                    server_name=server_name,
                    on_stage=on_stage,
                )
                if stream.alpn != messages.ALPN:
                    stream.close()
                    raise errors.TlsError(
                        f"{stream.peer} does not speak {messages.ALPN}", phase=Phase.TLS, maybe_delivered=False
                    )
            except errors.TransportError as error:
                failures.append(str(error))
            else:
                return self._start(stream, token)
        self._reconnect.observe_failure(self._loop.time(), self._rng.random())
        raise errors.ConnectError(
            f"no gateway can be reached: {'; '.join(failures)}", phase=Phase.CONNECT, maybe_delivered=False
        )

    def _start(self, stream: Stream, token: str) -> Link:
        link = Link(stream, self)
        link.start(
            messages.Hello(
                versions=(messages.VERSION,),
                app=self._app,
                token=token,
                network=self._config.network,
                client=self._client_name,
            )
        )
        self._link = link
        return link

    def _endpoints(self) -> dict[str, tuple[Address, ...]]:
        """Gateways of the plan: addresses, best first, by the name their certificate is checked against."""
        plan = self._scheduling.plan
        found: dict[str, dict[Address, None]] = {}
        if plan is not None:
            for endpoint in (*plan.gateways, *(each for host in plan.hosts.values() for each in host.endpoints)):
                if endpoint.carrier == Carrier.LONG_TLS and endpoint.server_name:
                    found.setdefault(endpoint.server_name, {})[Address(endpoint.host, endpoint.port)] = None
        return {name: tuple(addresses) for name, addresses in found.items()}

    # -- kept open for pushes --------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Keep a link open from now on: pushes and calls of the server need one."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(), name="stormline keep link")

    async def _keep(self) -> None:
        while not self._reconnect.stopped:
            self._lost.clear()
            try:
                await self.get()
            except errors.TransportError as error:
                _log.info("long connection: %s", error)
            else:
                await self._lost.wait()
            due = self._reconnect.next_timer()
            if due is not None:
                await asyncio.sleep(max(0.0, due - self._loop.time()))

    # -- what the link tells -----------------------------------------------------------------------------------------

    def link_welcomed(self, link: Link, welcome: messages.Welcome) -> None:
        """See `LinkListener`."""
        self._reconnect.observe_success()
        self.last_refusal = None
        self._renewed = False
        if self.listener is not None:
            self.listener.line_welcomed(link, welcome)

    def link_push(self, link: Link, push: e.PushReceived) -> None:
        """See `LinkListener`. Without a listener the push stays unacknowledged, so its sender knows."""
        if self.listener is not None:
            self.listener.line_push(link, push)

    def link_call(self, link: Link, call: e.CallReceived) -> None:
        """See `LinkListener`."""
        if self.listener is not None:
            self.listener.line_call(link, call)
        else:
            link.machine.send_fail(call.call_id, codes.Code.CALL_NOT_FOUND, "this device serves no calls")
            link.flush()

    def link_call_data(self, link: Link, event: e.DataReceived | e.CallCancelled) -> None:
        """See `LinkListener`."""
        if self.listener is not None:
            self.listener.line_call_data(link, event)

    def link_leaving(self, link: Link, event: e.GoingAway) -> None:
        """See `LinkListener`: the next call opens a new link, a kept one comes back within the spread asked for."""
        if self._link is link:
            self._link = None
            self._leaving.add(link)
            self._reconnect.observe_leave(self._loop.time(), self._rng.random(), event.spread_s)
            self._lost.set()

    def link_ended(self, link: Link, closed: e.Closed) -> None:
        """See `LinkListener`: decide when to come back."""
        if link in self._leaving:
            self._leaving.discard(link)
            return
        now, chance = self._loop.time(), self._rng.random()
        if closed.by_peer and closed.code != codes.Code.OK:
            refusal = errors.RefusedError(closed.code, closed.reason, closed.retry_after_s)
            self.last_refusal = refusal
            if renewable(refusal) and not self._renewed and self._scheduling.token_rejected():
                self._renewed = True
                self._reconnect.reset()
            elif refusal.action in (codes.Action.STOP, codes.Action.RENEW):
                self._reconnect.observe_stop()
            else:
                self._reconnect.observe_failure(now, chance, retry_after_s=closed.retry_after_s)
        elif link.welcome is not None:
            self._reconnect.observe_loss(now, chance)
        else:
            self._reconnect.observe_failure(now, chance)
        if self._link is link:
            self._link = None
        self._lost.set()
        if self.listener is not None:
            self.listener.line_ended(link, closed)

    def abandon(self) -> None:
        """Close the sockets; for a line whose event loop is closed."""
        for link in (*self._leaving, *([self._link] if self._link is not None else [])):
            link.abandon()

    async def aclose(self) -> None:
        """Say good-bye and end everything."""
        for task in (self._keeping, self._opening):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        links = [*self._leaving, *([self._link] if self._link is not None else [])]
        self._link = None
        await asyncio.gather(*(link.close() for link in links))
