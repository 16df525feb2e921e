"""The long connection of a client over time: opened when wanted, shared by all, reopened after a loss."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from stormline.client.beating import Beating
from stormline.client.carriers import SHORT, Carriers, Target, carrier_of
from stormline.client.config import Config
from stormline.client.greeting import greet
from stormline.client.link import Link, LinkCall
from stormline.client.scheduling import Scheduling
from stormline.client.trace import CallTrace
from stormline.core import codes, errors, limits
from stormline.core.clock import Rng
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.stream import Stream
from stormline.policy.activity import Conduct
from stormline.policy.carriers import RANK
from stormline.policy.reconnect import Reconnect, renewable
from stormline.wire import events as e
from stormline.wire import messages

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
        self, config: Config, app: str, scheduling: Scheduling, carriers: Carriers, rng: Rng, client_name: str
    ) -> None:
        self._config = config
        self._app = app
        self._scheduling = scheduling
        self._carriers = carriers
        self._rng = rng
        self._client_name = client_name
        self._loop = asyncio.get_running_loop()
        self._reconnect = Reconnect()
        self._link: Link | None = None
        self._opening: asyncio.Task[Link] | None = None
        self._on_stages: list[OnStage] = []
        self._keeping: asyncio.Task[None] | None = None
        self._leaving: dict[Link, None] = {}  # in order, so that runs repeat
        self._lesser: Link | None = None  # stands by, until the one by a better carrier is welcomed
        self._climbing: asyncio.Task[None] | None = None
        self._beside: asyncio.Task[None] | None = None
        self._suspects: list[str] = []
        self._lost = asyncio.Event()
        self._renewed = False
        self._nudge = asyncio.Event()
        self._hurry = asyncio.Event()
        self.beating = Beating(self._loop)
        self.beating.doubting.stalled = self._stalled
        self.woke: Callable[[], None] = lambda: None  # told when a timer of its own fires
        self.listener: LineListener | None = None
        self.last_refusal: errors.RefusedError | None = None
        scheduling.through = self.ask
        scheduling.line_stands = self._is_welcomed

    @property
    def stopped(self) -> bool:
        """True where the gateway refused for good; only a new token or plan changes that."""
        return self._reconnect.stopped

    @property
    def paused(self) -> bool:
        """True where no link stands and, after failures, none is tried for a while: other means come first."""
        standing = self.link is not None or self._opening is not None
        return not standing and self._reconnect.failing and self.pause_s() > 0

    def pause_s(self) -> float:
        """Seconds until a link may be tried again, 0 where it may be now."""
        due = self._reconnect.next_timer()
        return max(0.0, due - self._loop.time()) if due is not None else 0.0

    @property
    def link(self) -> Link | None:
        """The link that takes calls, None where there is none."""
        return self._link if self._link is not None and self._link.standing else None

    def _is_welcomed(self) -> bool:
        # Told by notices and asked for plans is one capability: a gateway that does not have it knows no gate for them.
        link = self.link
        return link is not None and link.welcome is not None and messages.PLAN in link.machine.capabilities

    async def get(self, on_stage: OnStage = lambda stage: None) -> tuple[Link, bool]:
        """Give a link with room for a call and whether it stood before; opens one where none does.

        Waits while the back-off lasts, and for room: the caller brings the deadline. Safe to cancel: an attempt that
        others wait for goes on. Open the call before the next `await`.

        Raises:
            TransportError: none could be opened; `maybe_delivered` is False. Where the gateway refused for good, its
                cause is the RefusedError.
        """
        link = self.link
        stood = link is not None
        if link is None:
            link = await self._join_opening(on_stage)
        if not link.machine.can_call:
            on_stage(Phase.QUEUED)
            await link.slot()
        return link, stood

    async def _join_opening(self, on_stage: OnStage) -> Link:
        on_stage(Phase.CONNECT)
        opening = self._begin_opening()
        self._on_stages.append(on_stage)
        try:
            return await asyncio.shield(opening)
        finally:
            self._on_stages.remove(on_stage)

    def _begin_opening(self, leave: Link | None = None) -> asyncio.Task[Link]:
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(leave), name="stormline open link")
            self._opening.add_done_callback(self._opened)
        return self._opening

    async def call(
        self, trace: CallTrace, gate: str, method: str, *, ends_at: float, target: str = "",
        headers: messages.Headers = (), body: bytes = b"", more: bool = False, impatient: bool = False,
        user: str | None = None,
    ) -> tuple[LinkCall, bool]:  # fmt: skip
        """Open a call, on a link that stands or a new one; give it and whether its link stood before.

        Args:
            trace: told how far it is.
            ends_at: the call's deadline in the loop's time; bounds this wait too.
            impatient: it ends where the connection is lost and no gateway can be reached at once; else it waits for
                the session to go on, as long as that may.
            user: whose session it must be, empty for nobody's; None for any.

        Raises:
            DeadlineExceeded: no link in time.
            TransportError: no link, see `get`; or the link went away in this moment (phase SEND); or the call cannot go
                over one (too many headers, phase QUEUED). `maybe_delivered` is False.
        """
        try:
            async with asyncio.timeout_at(ends_at) as timeout:
                link, stood = await self.get(trace.enter)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise errors.DeadlineExceeded(
                "no long connection in time", phase=Phase.CONNECT, maybe_delivered=False
            ) from error
        if user is not None and (link.welcome is None or link.welcome.user != user):
            raise errors.ConnectError("the session is not that user's", phase=Phase.CONNECT, maybe_delivered=False)
        trace.connected(link.peer, carrier_of(link.stream), reused=stood)
        trace.enter(Phase.SEND)
        try:
            call = link.call(
                gate, method, target=target, headers=headers, body=body, more=more,
                deadline_s=ends_at - self._loop.time(),
            )  # fmt: skip
        except errors.LocalProtocolError as error:  # it went away in this moment, or the call is too large for it
            phase = Phase.QUEUED if link.standing else Phase.SEND
            raise errors.WriteError(str(error), phase=phase, maybe_delivered=False) from error
        call.impatient = impatient
        self.beating.called(link)
        return call, stood

    async def ask(self, body: bytes) -> bytes:
        """Ask dispatch through the link that stands; opens none. Safe to cancel.

        Args:
            body: a `PlanRequest` as JSON.

        Raises:
            TransportError: no link, or it went away.
            CallError: the gateway or dispatch said no.
        """
        link = self.link
        if link is None or link.welcome is None:
            raise errors.ConnectError("no long connection stands", phase=Phase.CONNECT, maybe_delivered=False)
        small = len(body) <= limits.CHUNK_BYTES_MAX
        call = link.call("dispatch", "plan", body=body if small else b"", more=not small)
        try:
            if not small:
                call.start_body(_once(body))
            reply = await call.reply()
            gathered = bytearray()
            while chunk := await call.read():
                gathered += chunk
                if len(gathered) > limits.PLAN_BYTES_MAX:
                    raise errors.AnswerRejected("too-large", f"more than {limits.PLAN_BYTES_MAX} bytes")
            if reply.status not in (0, 200):
                raise errors.AnswerRejected("refused", f"status {reply.status} through the gateway")
            return bytes(gathered)
        finally:
            call.cancel()

    def _opened(self, task: asyncio.Task[Link]) -> None:
        self._opening = None
        if task.cancelled():
            return
        failed = task.exception() is not None  # retrieved: the waiters have it, and there may be none left
        if failed:
            self.beating.unreachable()
        waiting = self._waiting
        if failed and waiting is not None:
            waiting.lose_patience()
            if self._reconnect.stopped:
                waiting.end("the gateway takes this device no longer")
            elif waiting.calls_open:
                self._begin_opening()

    def _stage(self, stage: str) -> None:
        for on_stage in self._on_stages:
            on_stage(stage)

    @property
    def _waiting(self) -> Link | None:
        """The link whose connection is lost, and which waits for the next one."""
        return self._link if self._link is not None and self._link.detached else None

    async def move(self) -> None:
        """Take the session to another connection, to another gateway where there is one; calls go on there.

        The connection that carries it is left once the next one stands. Does nothing where the session cannot move, or
        is being opened.

        Raises:
            TransportError: no other connection could be made; where the session has left its own, it waits.
        """
        link = self.link
        if link is not None and link.resumable and self._opening is None:
            await asyncio.shield(self._begin_opening(link))

    async def _open(self, leave: Link | None = None) -> Link:
        """Open a link, or take the session of the one that waits, or that is to be left, to a new connection."""
        while (pause := self.pause_s()) > 0:
            self._hurry.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._hurry.wait()
        if self._reconnect.stopped:
            raise errors.ConnectError(
                f"the gateway refused for good: {self.last_refusal}", phase=Phase.CONNECT, maybe_delivered=False
            ) from self.last_refusal
        try:
            targets = self._targets()
            if not targets:
                await self._scheduling.refresh()
                targets = self._targets()
            token = await self._scheduling.token()
        except errors.DispatchError as error:
            self._reconnect.observe_failure(self._loop.time(), self._rng.random())
            raise errors.ConnectError(str(error), phase=Phase.PLAN, maybe_delivered=False) from error
        failure = "dispatch names none"
        if targets:
            try:
                return await self._open_one(targets, token, leave)
            except errors.RefusedError as refusal:
                raise errors.ConnectError(str(refusal), phase=Phase.CONNECT, maybe_delivered=False) from refusal
            except errors.TransportError as error:
                failure = str(error)
        self._reconnect.observe_failure(self._loop.time(), self._rng.random())
        raise errors.ConnectError(f"no gateway can be reached: {failure}", phase=Phase.CONNECT, maybe_delivered=False)

    async def _open_one(self, targets: list[Target], token: str, leave: Link | None) -> Link:
        """Open a link to one of these; where a session waits, to the first that comes to a greeting.

        Raises:
            RefusedError: a gateway takes this device not now, or not at all.
            TransportError: none can be reached.
        """
        for left in range(len(targets), 0, -1):
            stream = await self._open_stream(targets, _home(leave or self._waiting))
            if leave is not None and leave.resumable and not leave.detached:
                leave.detach()
            waiting = self._waiting
            if waiting is None:
                return self._start(stream, token)
            try:
                return await self._resume(waiting, stream, token)
            except errors.TransportError:
                if left == 1:
                    raise
                targets = self._targets()  # where this one has gone behind the others
        raise errors.ConnectError("no gateway is named", phase=Phase.CONNECT, maybe_delivered=False)

    async def _open_stream(self, targets: list[Target], home: str) -> Stream:
        try:
            return await self._carriers.open(targets, self._stage, home)
        except errors.RefusedError as refusal:  # by HTTP, in place of a WebSocket
            self._refused(refusal)
            raise

    def _start(self, stream: Stream, token: str) -> Link:
        stream.leave_quiet()
        link = Link(stream, self)
        self.beating.start(link)
        link.woke = self.woke
        try:
            link.start(self._hello(token))
        except errors.LocalProtocolError as error:
            stream.close()
            raise errors.WriteError(
                f"the greeting cannot be sent: {error}", phase=Phase.CONNECT, maybe_delivered=False
            ) from error
        self._link = link
        return link

    def _hello(self, token: str, waiting: Link | None = None) -> messages.Hello:
        welcome = waiting.welcome if waiting is not None else None
        return messages.Hello(
            versions=(messages.VERSION,),
            app=self._app,
            token=token,
            resume=welcome.resume if welcome is not None else "",
            received=waiting.machine.received if waiting is not None else 0,
            network=self._config.network,
            client=self._client_name,
            capabilities=(messages.PLAN, messages.RESUME),
            app_version=self._config.app_version,
            tags=self._config.tags,
        )

    async def _resume(self, waiting: Link, stream: Stream, token: str) -> Link:
        """Let the session go on over a stream, or begin a fresh one there where the gateway has it no more.

        Raises:
            RefusedError: the gateway takes this device not now, or not at all.
            ConnectError: it did not come to a greeting.
        """
        stream.leave_quiet()
        try:
            machine, welcome = await greet(stream, self._hello(token, waiting), heartbeat_s=self.beating.silence_s())
            if welcome.resumed:
                waiting.attach(stream, machine, welcome)
                return waiting
        except errors.RefusedError as refusal:
            stream.close()
            self._refused(refusal, suspect=str(stream.peer))
            raise
        except errors.LocalProtocolError as error:
            stream.close()
            waiting.end(str(error))
            raise errors.ConnectError(str(error), phase=Phase.CONNECT, maybe_delivered=False) from error
        except errors.TransportError:
            stream.close()
            self._suspect(str(stream.peer))
            self._carriers.failed(carrier_of(stream))
            raise
        except BaseException:
            stream.close()
            raise
        waiting.end("the gateway has the session no more")
        link = self._link = Link(stream, self, heartbeat_s=self.beating.silence_s(), machine=machine)
        self.beating.start(link)
        link.woke = self.woke
        link.begin(welcome)
        return link

    def _targets(self) -> list[Target]:
        """Gateways of the plan, best first; one that broke off before its WELCOME goes behind the others."""
        plan = self._scheduling.plan
        if plan is None:
            return []
        off = self._config.disabled.union(plan.disabled)
        named: list[Target] = []
        numbered: dict[tuple[str, str], dict[Address, None]] = {}
        for endpoint in (*plan.gateways, *(each for host in plan.hosts.values() for each in host.endpoints)):
            if endpoint.carrier not in RANK or endpoint.carrier in off or not endpoint.server_name:
                continue
            address = Address(endpoint.host, endpoint.port)
            if address.is_ip:
                numbered.setdefault((endpoint.carrier, endpoint.server_name), {})[address] = None
            else:
                named.append(Target(endpoint.carrier, endpoint.server_name, *address, None))
        if all(str(address) in self._suspects for addresses in numbered.values() for address in addresses):
            self._suspects = self._suspects[-1:]  # all have failed: begin anew, the last one last
        groups = []
        for name, addresses in numbered.items():
            suspect = tuple(address for address in addresses if str(address) in self._suspects)
            good = tuple(address for address in addresses if address not in suspect)
            groups += [(rank, name, group) for rank, group in enumerate((good, suspect)) if group]
        groups.sort(key=lambda group: group[0])  # stable: the plan's order stays
        numbers = [Target(by, name, name, group[0].port, group) for _, (by, name), group in groups]
        return [*numbers, *dict.fromkeys(named)]

    # -- from one carrier to another -------------------------------------------------------------------------------

    def _take_along(self, link: Link, stream: Stream, token: str) -> bool:
        """Begin to take the session of a link that stands, and its calls, to another stream; False where it cannot go.

        Should it not come to stand there, it comes back by whatever passes.
        """
        if link is not self.link or not link.resumable or self._opening is not None:
            return False
        link.detach()
        self._carriers.close()
        opening = self._opening = asyncio.create_task(self._go_on(link, stream, token), name="stormline move link")
        opening.add_done_callback(lambda task: stream.close() if task.cancelled() else None)
        opening.add_done_callback(self._opened)
        return True

    async def _go_on(self, link: Link, stream: Stream, token: str) -> Link:
        try:
            return await self._resume(link, stream, token)
        except (errors.RefusedError, errors.TransportError) as error:
            _log.info("the session does not go on by %s: %s", carrier_of(stream), error)
        try:
            return await self._open()
        except errors.TransportError:
            self._lost.set()
            raise

    def _climb(self, carrier: str) -> None:
        self._climbing = asyncio.create_task(self._try_better(carrier), name="stormline climb")

    async def _try_better(self, carrier: str) -> None:
        """Open a stream by a better carrier beside the one that stands, and go over where no call would notice."""
        targets = [each for each in self._targets() if each.carrier == carrier]
        try:
            stream = await self._carriers.open_by(targets, lambda stage: None)
        except (errors.TransportError, errors.RefusedError) as error:
            _log.info("%s does not pass yet: %s", carrier, error)
            self._carriers.tried(carrier, good=False)
        else:
            self._carriers.tried(carrier, good=True)
            await self._go_over(stream)
        if (link := self.link) is not None and link.welcome is not None:
            self._carriers.watch(carrier_of(link.stream), self._climb)

    async def _go_over(self, stream: Stream) -> None:
        try:
            token = await self._scheduling.token()
        except errors.DispatchError:
            stream.close()
            return
        standing = self.link
        if standing is None or standing.busy or self._opening is not None:
            stream.close()
        elif self._take_along(standing, stream, token):
            await asyncio.wait([self._begin_opening()])
            if self.link is None or self.link.carrier != carrier_of(stream):
                self._carriers.tried(carrier_of(stream), good=False)
        else:
            self._lesser = standing
            self._start(stream, token)

    def _stalled(self, link: Link) -> None:
        """Calls wait on a link that has fallen silent: see whether short HTTP passes beside it."""
        if self._beside is None and link is self.link and link.resumable and link.carrier != SHORT:
            self._beside = asyncio.create_task(self._try_beside(link), name="stormline beside")
            self._beside.add_done_callback(self._tried_beside)

    def _tried_beside(self, task: asyncio.Task[None]) -> None:
        self._beside = None

    async def _try_beside(self, link: Link) -> None:
        """Take the session to short HTTP where that answers first. The gateway knows by their numbers what it has."""
        since = self._loop.time()
        targets = [each for each in self._targets() if each.carrier == SHORT]
        if not targets:
            return
        try:
            token = await self._scheduling.token()
            stream = await self._carriers.open_by(targets, lambda stage: None, _home(link))
        except (errors.TransportError, errors.DispatchError) as error:
            _log.info("nothing beside the silent connection to %s: %s", link.peer, error)
            return
        silent, carrier = link.stream.heard_at < since and link.busy, link.carrier
        there = getattr(stream, "node", "") == _home(link)  # elsewhere its calls might end
        if silent and there and self._take_along(link, stream, token):
            _log.info("%s is silent: the session goes on over short HTTP", carrier)
            self._carriers.stalled(carrier)
        else:
            stream.close()

    # -- kept open for pushes --------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Keep a link open from now on: pushes and calls of the server need one."""
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._keep(), name="stormline keep link")

    async def unkeep(self) -> None:
        """Reopen no link any more that no call asks for. One that stands stays."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        for leaving in list(self._leaving):
            leaving.linger_no_longer()

    async def _keep(self) -> None:
        while (due := self._reconnect.keep_timer()) is not None:
            if (pause := due - self._loop.time()) > 0:
                self._nudge.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._nudge.wait()
                continue  # it may have changed meanwhile
            self._lost.clear()
            self.woke()
            try:
                if self.link is None:
                    await self._join_opening(lambda stage: None)
            except errors.TransportError as error:
                _log.info("long connection: %s", error)
            except errors.StormlineError:
                _log.exception("long connection")
                self._reconnect.observe_failure(self._loop.time(), self._rng.random())
            else:
                await self._lost.wait()

    # -- what the link tells -----------------------------------------------------------------------------------------

    def link_welcomed(self, link: Link, welcome: messages.Welcome) -> None:
        """See `LinkListener`."""
        self._carriers.stands(carrier_of(link.stream), self._climb)
        if (lesser := self._lesser) is not None and lesser is not link:
            self._lesser = None
            self._leaving[lesser] = None  # the gateway ends it: a device has one session
        self._reconnect.observe_success(self._loop.time(), spread_s=welcome.return_spread_s)
        self._suspects.clear()
        self.last_refusal = None
        self._renewed = False
        self.beating.welcomed(link)
        for leaving in list(self._leaving):
            leaving.linger_no_longer()
        if welcome.unit:
            self._scheduling.unit = welcome.unit
        if self.listener is not None:
            self.listener.line_welcomed(link, welcome)

    def link_push(self, link: Link, push: e.PushReceived) -> None:
        """See `LinkListener`. Without a listener the push stays unacknowledged, so its sender knows."""
        if self.listener is not None:
            self.listener.line_push(link, push)

    def link_notice(self, link: Link, notice: e.NoticeReceived) -> None:
        """See `LinkListener`."""
        self._scheduling.notice(notice.version, notice.hosts)

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
        """See `LinkListener`: the next call opens a new link, a kept one comes back within the spread asked for.

        A kept one stays for pushes until the next stands, or the gateway ends it.
        """
        if self._link is link:
            self._link = None
            self._leaving[link] = None
            link.lingers = self._keeping is not None and not self._keeping.done()
            self._reconnect.observe_leave(self._loop.time(), self._rng.random(), event.spread_s)
            self._lost.set()

    def link_ended(self, link: Link, closed: e.Closed) -> None:
        """See `LinkListener`: decide when to come back."""
        if not link.machine.detached:
            self.beating.ended(link, closed)
        if link in self._leaving:
            del self._leaving[link]
        elif link is self._lesser:
            self._lesser = None
        elif self._link is link and link.welcome is None and self._lesser is not None and self._lesser.standing:
            self._link, self._lesser = self._lesser, None  # the better carrier brought no session after all
            self._carriers.tried(carrier_of(link.stream), good=False)
            self._carriers.watch(carrier_of(self._link.stream), self._climb)
        else:
            if self._link is link:
                self._link = None
                self._carriers.close()
            if link.welcome is None and not closed.by_peer:
                self._carriers.failed(carrier_of(link.stream))
            if not link.machine.detached:  # then its return was planned when its connection was lost
                self._plan_return(link.peer, closed, welcomed=link.welcome is not None)
            self._lost.set()
        if self.listener is not None:
            self.listener.line_ended(link, closed)

    def link_detached(self, link: Link, closed: e.Closed) -> None:
        """See `LinkListener`: take the session elsewhere at once where calls wait for it, or one is kept for pushes."""
        if self._link is not link:
            link.end("another link has taken its place")
            return
        self._carriers.close()
        self.beating.ended(link, closed)
        self._plan_return(link.peer, closed, welcomed=True)
        if self._reconnect.stopped:
            link.end("the gateway takes this device no longer")
            return
        self._lost.set()
        if link.calls_open:
            self._begin_opening()

    def _plan_return(self, peer: str, closed: e.Closed, *, welcomed: bool) -> None:
        now, chance = self._loop.time(), self._rng.random()
        if closed.by_peer and closed.code != codes.Code.OK:
            refusal = errors.RefusedError(closed.code, closed.reason, closed.retry_after_s)
            self._refused(refusal, suspect="" if welcomed else peer, stood=welcomed)
        elif welcomed:
            self._reconnect.observe_loss(now, chance, soon=closed.code == codes.Code.HEARTBEAT_TIMEOUT)
        else:
            self._suspect(peer)
            self._reconnect.observe_failure(now, chance)

    def _suspect(self, peer: str) -> None:
        self._suspects = [each for each in self._suspects if each != peer][-limits.DIAL_CANDIDATES_MAX :]
        self._suspects.append(peer)

    def _refused(self, refusal: errors.RefusedError, *, suspect: str = "", stood: bool = False) -> None:
        """A gateway said no, or ended a session that stood, with a code.

        Args:
            refusal: what it said.
            suspect: its `ip:port`, which is tried last from now on.
            stood: it ended a session that stood.
        """
        if suspect:
            self._suspect(suspect)
        self.last_refusal = refusal
        if renewable(refusal) and not self._renewed and self._scheduling.token_rejected():
            self._renewed = True
            self._suspects.clear()  # the token was at fault, not the gateway
            self._reconnect.reset()
        elif refusal.action in (codes.Action.STOP, codes.Action.RENEW):
            self._reconnect.observe_stop()
        elif stood and refusal.action is codes.Action.MOVE and refusal.retry_after_s is None:
            self._reconnect.observe_loss(self._loop.time(), self._rng.random())  # others were sent away with it
        else:
            self._reconnect.observe_failure(self._loop.time(), self._rng.random(), retry_after_s=refusal.retry_after_s)

    def network_changed(self, gone: Callable[[Stream], bool], *, doubt: bool = True) -> None:
        """Leave a link whose local address is gone, and ask any other for a sign of life; no back-off holds us up.

        Without `doubt` links whose address is there are left in peace.
        """
        links = self._links()
        if not doubt:
            links = [link for link in links if gone(link.stream)]
            if not links:
                return
        for link in links:
            link.silence.void(self._loop.time())
            link.network_changed(gone)
        self._reconnect.reset()  # after them: a link that ends here plans its return, and there is nothing to wait for
        self._nudge.set()
        self._hurry.set()
        if self._waiting is not None and self._waiting.calls_open:
            self._begin_opening()

    def _links(self) -> list[Link]:
        return [*self._leaving, *(link for link in (self._lesser, self._link) if link is not None)]

    def behave(self, conduct: Conduct) -> None:
        """Behave as the user's activity asks: heartbeat, and when a link comes back that nobody waits for."""
        self.beating.cap_s = conduct.heartbeat_s
        for link in self._links():
            link.set_heartbeat(self.beating.silence_s())
        self._reconnect.set_pace(conduct.return_first_s, conduct.return_max_s)
        self._nudge.set()

    def abandon(self) -> None:
        """Drop everything at once, without a word; also for a line whose event loop is closed."""
        self.listener = None
        with contextlib.suppress(RuntimeError):  # a closed loop cannot cancel any more
            self._carriers.close()
            for task in (self._keeping, self._opening, self._climbing, self._beside):
                if task is not None:
                    task.cancel()
        for link in self._links():
            link.abandon()

    async def aclose(self) -> None:
        """Say good-bye and end everything."""
        await self.unkeep()
        self._carriers.close()
        for task in (self._beside, self._climbing, self._opening):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        links = self._links()
        self._link = None
        await asyncio.gather(*(link.close() for link in links))


def _home(link: Link | None) -> str:
    """Say at which node a link's session is, as its resume token says; empty where it is at none."""
    welcome = link.welcome if link is not None else None
    return welcome.resume.partition(".")[0] if welcome is not None else ""


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body
