"""Runs one HTTP request up its ladder of means until one answers, and tells its trace what happens."""

import asyncio
import contextlib
import functools
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING

from stormline.client import recourse, telling
from stormline.client.admission import Admission
from stormline.client.answer import Answer, RequestBody
from stormline.client.config import Config
from stormline.client.following import FollowedBody
from stormline.client.lanes import CallLimits, Failed, Lane, Reply, Run
from stormline.client.longcall import LONG_CARRIERS, ask_long
from stormline.client.looks import FirstLooks
from stormline.client.network import NetworkState
from stormline.client.parking import Parking
from stormline.client.paths import Paths, switch
from stormline.client.patterns import answer_pattern
from stormline.client.trace import CallTrace
from stormline.client.watching import BodyWatch, StreamWatch
from stormline.core import errors, limits
from stormline.core.clock import Rng
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.clock import time_of
from stormline.net.stream import Stream
from stormline.outbound.dial import OpenTcp
from stormline.outbound.held import Held
from stormline.outbound.messages import BodySource, Headers, HttpRequest, field_value
from stormline.outbound.proxy import forwarded
from stormline.outbound.proxy_rules import DIRECT, ProxyRules
from stormline.policy import means
from stormline.policy.budget import retry_after_s
from stormline.policy.means import Means, Outcome, Step
from stormline.policy.presets import ORDINARY
from stormline.policy.reconnect import renewable
from stormline.policy.resend import SAFE_METHODS
from stormline.policy.shape import Pattern, RequestShape
from stormline.policy.stall import Action

if TYPE_CHECKING:
    # What needs a platform is imported with one (`runtime`); here it is only named.
    from stormline.client.longline import LongLine
    from stormline.client.relaying import Relaying
    from stormline.client.rules import ClearHttp
    from stormline.client.scheduling import Scheduling
    from stormline.wire.plan import Endpoint


class Executor:
    """Runs calls; one per client, used by all its tasks at once.

    Attributes:
        admission: who may go.
        relaying: asks through relays; None: no platform names any.
        hedges: attempts may be made beside one that only looks dead.
        failed: told of calls that failed for good.

    Args:
        config: the client's settings.
        paths: the ways out, each with its connections and what the client has learned of its network.
        rng: spreads pauses.
        wall_s: the wall clock, for dates in `Retry-After`.
        open_tcp: connects to one address, to see whether the path is there.
        scheduling: plans of a platform.
        longline: its long connection.
        proxies: which requests go through a proxy.
        parking: where calls wait for a network.
        hedged: told the size of each request that is sent again beside a silent one.
        left: says whether the machine has lost the address of a silent connection; then all such are closed already.
        addresses: of origins, by host, from the settings.
        h1: the pool can offer HTTP/1.1 alone.
        network: told what calls meet.
    """

    def __init__(
        self,
        config: Config,
        *,
        paths: Paths,
        rng: Rng,
        wall_s: Callable[[], float],
        open_tcp: OpenTcp,
        scheduling: "Scheduling | None",
        longline: "LongLine | None",
        proxies: ProxyRules = DIRECT,
        left: Callable[[Stream], bool] = lambda stream: False,
        network: NetworkState,
        parking: Parking,
        hedged: Callable[[int], None] = lambda request_bytes: None,
        addresses: Mapping[str, tuple[Address, ...]] = {},
        h1: bool = False,
    ) -> None:
        self._config = config
        self._paths = paths
        self._first = paths.first
        self._steering = paths.first.steering
        paths.attempt = self._run_over
        self._rng = rng
        self._wall_s = wall_s
        self._scheduling = scheduling
        self._longline = longline
        self._proxies = proxies
        self._left = left
        self._addresses = addresses
        self._plain = not (addresses or proxies)
        self._h1 = h1 and not proxies
        self._network = network
        self._open_tcp = open_tcp
        self._parking = parking
        self._hedged = hedged
        self.hedges = True
        self.relaying: Relaying | None = None
        self.failed: Callable[[Run], None] | None = None
        self._knocking: dict[Address, asyncio.Task[None]] = {}
        self.admission = Admission(enabled=config.admission)
        self._loop = asyncio.get_running_loop()
        self._time = time_of(self._loop)
        self._looks = FirstLooks(self._look)

    async def execute(
        self, request: HttpRequest, shape: RequestShape, call_limits: CallLimits, trace: CallTrace
    ) -> Answer:
        """Get an answer.

        Args:
            request: what is asked; a body in memory can be sent again, a stream once it was read from cannot.
            shape: what it looks like.
            call_limits: the call's time.
            trace: follows the call; it is finished here only where the call fails.

        Raises:
            TransportError: no means gave an answer. Of all attempts' errors it is one that may have been delivered, if
                there is one, else the one that came furthest; so its `maybe_delivered` holds for the call as a whole.
            LocalProtocolError: the request cannot be sent as it is.
            asyncio.CancelledError: nothing is left behind.
            Exception: of the source of the request's body.
        """
        run = Run(request, RequestBody(request.body, trace.handed_down), shape, call_limits, trace)
        paths = self._paths
        run.path = path = paths.begin(request.host) if paths.away else self._first
        if (weak := path.steering.sensing.weak()) is not None:
            trace.note(f"the network is {weak.level}: {weak.evidence}")
        self._network.begin(run, here=path is self._first)
        good = False
        try:
            if call_limits.wait_network_s:
                await self._parking.wait(run)
            if not self.admission.enter(run):
                await self.admission.wait(run)
            path.steering.enter(run, request.host)
            reply: Reply | None = None
            while reply is None:  # once more where there was no network, and the call waits for one
                if self._scheduling is None:
                    run.ladder = self._laid_out(run, (), self._config.disabled)
                else:
                    run.ladder = await self._ladder(run, self._scheduling)
                try:
                    reply = await self._climb(run)
                except errors.TransportError as error:
                    await self._parked(run, error)
            good = True
            if self._parking.absent:
                self._parking.changed()
        except BaseException as error:
            run.path.steering.leave(run)
            if isinstance(error, errors.TransportError):
                error.trace = trace
                self._parking.failed(error)
                if self.failed is not None:
                    self.failed(run)
            else:
                trace.attempt_failed(error)
            trace.failed(error)
            raise
        finally:
            self._network.end(run)
            run.end_lanes()
            self.admission.leave(run, good=good)
        if reply.untrusted:
            trace.distrust()
        return Answer(
            trace,
            self._followed(run, reply),
            status=reply.status,
            reason=reply.reason,
            http_version=reply.http_version,
            headers=reply.headers,
        )

    async def _parked(self, run: Run, error: errors.TransportError) -> None:
        """Wait for a network where there was none and the call waits for one; else raise `error`."""
        self.admission.leave(run)
        if not await self._parking.again(run, error):
            raise error
        run.left.clear()
        if not self.admission.enter(run):
            await self.admission.wait(run)

    async def _climb(self, run: Run) -> Reply:
        """Take steps until one gives an answer that stands."""
        worst: errors.TransportError | None = None
        kept: Reply | None = None  # an answer that says "try again"
        untrusted: Reply | None = None
        step = run.ladder.next()
        while step is not None and run.remaining() > 0:
            run.trace.attempt(step)
            run.trace.handed_down(run.shape.request_bytes)
            lane = Lane(run, step, self._looks, quiet=False)
            if self._paths.watching:
                self._paths.watch(lane)
            if self.relaying is not None:
                self.relaying.watch(lane, self._open_beside)
            try:
                reply = await run.first(self._try(lane))
            except Failed as failed:
                error = failed.error
                if lane.path is self._first and run.path is self._first:
                    self._network.met(run.request.host, error)
                telling.tell_where(lane)
                run.trace.attempt_failed(error)
                self.admission.failed(run, error)
                worst = recourse.worse(worst, error)
                untrusted = failed.untrusted or untrusted
                self._paths.again(run)
                step = await self._after_failure(run, failed)
            else:
                telling.tell(run.trace, reply)
                if run.stalled:
                    recourse.outdone(lane, reply, self._time())
                if reply.path is not None and reply.path is not run.path:
                    switch(run, reply.path)
                if reply.path is None or reply.path is self._first:
                    self._network.answered(run, reply)
                pause_s = self._asks_for_patience(run, reply)
                if pause_s is None:
                    return reply
                kept = await recourse.keep(reply)
                if kept is None:
                    return reply
                run.trace.attempt_refused(reply.status)
                step = await self._after_answer(run, pause_s)
            finally:
                lane.end()
        if (last := kept or untrusted) is not None:
            return last
        raise worst if worst is not None else self._nothing_tried(run)

    async def _after_failure(self, run: Run, failed: Failed) -> Step | None:
        """Give the step after a failed one, None where the failure stands."""
        error = failed.error
        renew = renewable(error.__cause__)
        step = run.ladder.next(
            Outcome(
                maybe_delivered=error.maybe_delivered,
                reused=failed.reused or renew,
                untouched=failed.untouched,
                body_spent=run.body.spent,
                final=recourse.is_final(error),
            )
        )
        nobody_has_it = not error.maybe_delivered  # through a relay it is no repetition then
        relayed = nobody_has_it and step is not None and step.means is means.Means.RELAY
        if step is None or failed.reused or failed.untouched or renew or relayed or not step.repeats:
            return step
        said_no = isinstance(error, errors.ConnectError | errors.ResolveError | errors.TlsError)
        pause_s = self._pause_s(run) if said_no and not step.backup else 0.0  # other addresses have said nothing
        if await self._granted(run, pause_s, heard=failed.heard):
            return step
        return run.ladder.skip_to(means.Means.RELAY) if nobody_has_it else None

    async def _after_answer(self, run: Run, pause_s: float) -> Step | None:
        """Give the step after an answer that says "try again", None where it stands."""
        step = run.ladder.next(Outcome(maybe_delivered=True, body_spent=run.body.spent))
        if step is None:
            return None
        try:  # there is an answer: what is waited for must not use up the time in which it can be given
            async with asyncio.timeout_at(run.ends_at - limits.RETRY_KEPT_S) as timeout:
                return step if await self._granted(run, pause_s, heard=True) else None
        except TimeoutError:
            if not timeout.expired():
                raise
            run.trace.note("no time left to ask again")
            return None

    async def _granted(self, run: Run, pause_s: float, *, heard: bool) -> bool:
        """Wait until a repetition may be made, and take its token from the budget; False where there is none."""
        while True:
            verdict = self._steering.may_retry(run.request.host, heard=heard)
            if verdict.allowed:
                return await self._pause(run, pause_s)
            if verdict.wait_s == 0.0:
                run.trace.note(verdict.why)
                return False
            # Everybody was told the same moment: spread, or all are back in it.
            spread_s = verdict.wait_s * limits.RETRY_AFTER_SPREAD * self._rng.random()
            if not await self._pause(run, max(pause_s, verdict.wait_s + spread_s)):
                return False
            pause_s = 0.0

    def _pause_s(self, run: Run) -> float:
        doubled = limits.RETRY_PAUSE_S * 2.0 ** max(0, run.ladder.tries - 2)
        return doubled * (0.5 + self._rng.random())

    async def _pause(self, run: Run, pause_s: float) -> bool:
        """Wait before another attempt; False where that would take all the time there is."""
        if pause_s >= run.remaining():
            run.trace.note(f"no time left for a pause of {pause_s:.3g} s")
            return False
        if pause_s > 0.0:
            run.trace.enter(Phase.QUEUED)
            run.trace.note(f"pause {pause_s:.3g} s")
            run.asked_at = None  # nothing is owed meanwhile
            self.admission.leave(run)
            await asyncio.sleep(pause_s)
        return await self.admission.back(run)

    def _asks_for_patience(self, run: Run, reply: Reply) -> float | None:
        """Say how long an answer wants us to wait before asking again; None where it is the answer.

        A read, or a write with a key, that a busy or broken server could not serve is asked again (RFC 9110 sections
        15.6.3 to 15.6.5, RFC 6585 section 4).
        """
        if reply.status >= 400:
            self.admission.answered(run, reply.status)
        if reply.status not in self._config.retry_statuses:
            return None
        host = run.request.host
        told = field_value(reply.headers, b"retry-after")
        after_s = None if told is None else retry_after_s(told.decode("latin-1"), self._wall_s())
        if reply.status == 429 or after_s is not None:
            self._steering.overloaded(host, after_s)
        if not run.ladder.repeatable or run.body.spent:
            return None
        return self._pause_s(run) if after_s is None else after_s

    # -- lanes that fall silent ---------------------------------------------------------------------------------------
    def _look(self, lane: Lane) -> None:
        """Do what the silence of a lane calls for."""
        run, held = lane.run, lane.held
        lane.timer = None
        if held is None or run.over:
            return
        if held.stream is not None and not lane.heard() and self._left(held.stream):
            lane.note(f"our address {held.stream.local.host} is gone")
            return  # it fails at this moment, and is asked again where it may be
        if lane.asked_at is None:
            lane.timer = self._loop.call_later(limits.LOOK_FIRST_S, self._look, lane)  # it is still being sent
            return
        may_open = run.ladder.repeatable and not run.body.spent and run.has_room()
        steering = lane.path.steering
        timeouts = steering.plan(
            run,
            ends_at=run.ends_at,
            attempt=run.ladder.tries,
            attempts=1 if held.answered or not may_open else limits.ATTEMPTS_MAX,
        )
        if timeouts is None:
            return
        decision = steering.look(
            run,
            held,
            asked_at=lane.asked_at,
            limit_s=timeouts.first_packet_s,
            may_fresh=may_open,
            fresh_at=lane.fresh_at,
            left=run.left,
        )
        if decision.action is Action.PROBE:
            held.probe()
        elif decision.action is Action.KNOCK and self.hedges and lane.path is self._first:
            for peer in self._steering.knocked_at(held):
                self._knock(peer)
        elif decision.action is Action.FRESH:
            lane.note(f"{held.peer} is silent: {decision.why}")
            held.doubt()
            if self.hedges and steering.spares(run):
                self._open_beside(lane)
        elif decision.action is Action.GIVE_UP and lane.fresh_at is None:
            lane.note(f"{held.peer} does not answer: {decision.why} ({timeouts.basis})")
            held.distrust()
            lane.given_up = True
            self.admission.silent(run)
            self._leave(lane, may_open=may_open)
        elif decision.action is Action.PROVE and held.peer is not None and steering.spares(run):
            lane.note(f"{held.peer} has not shown that it answers: {decision.why}")
            held.set_aside()
            run.left.add(held.peer)
            self._open_beside(lane, unproven=True)
        elif lane.fresh_at is None and self._is_shunned(lane, held) and steering.room(run.request.host):
            lane.note(f"{held.peer} does not answer another request either")
            lane.given_up = True
            self._leave(lane, may_open=may_open)
        elif may_open and run.limits.preset.hedge and recourse.is_late(lane, steering, self._time()):
            lane.hedged = True
            lane.note(f"{held.peer} is later than most; a second request beside it")
            self._open_beside(lane, hedge=True)
        again_s = min(decision.look_again_s, limits.LOOK_S_MAX)
        lane.timer = self._loop.call_later(again_s, self._look, lane)

    def _is_shunned(self, lane: Lane, held: Held) -> bool:
        """Say whether others have found out that the connection of a lane is not worth waiting for."""
        if held.mute and not held.aside:
            return True
        asked_at = lane.asked_at
        return (held.mute or held.silent) and asked_at is not None and lane.path.pool.answered_beside(held, asked_at)

    def _leave(self, lane: Lane, *, may_open: bool) -> None:
        """Seek the answer elsewhere than at an address that does not answer."""
        run, held = lane.run, lane.held
        if held is None or lane.asked_at is None:
            return
        if held.heard_at <= lane.asked_at and lane.path is self._first:
            self._network.met(run.request.host, None)
        # A connection that brought something meanwhile says nothing of the path, and must not make us more patient.
        dark = held.heard_at <= lane.asked_at
        waited_s = self._time() - lane.asked_at if dark else None
        lane.path.steering.unanswered(run, held.peer, waited_s=waited_s, protocol=telling.spoken(held))
        if held.peer is not None:
            run.left.add(held.peer)
        if may_open:
            self._open_beside(lane)

    def _knock(self, peer: Address) -> None:
        """Find out whether the path is there: one TCP connection, which is closed again; `Steering` hears of it."""
        if peer not in self._knocking:
            task = self._knocking[peer] = self._loop.create_task(self._knock_at(peer), name="knock")
            task.add_done_callback(lambda _: self._knocking.pop(peer, None))

    async def _knock_at(self, peer: Address) -> None:
        with contextlib.suppress(OSError):
            async with asyncio.timeout(limits.STALL_PROBE_SLOW_S):
                stream = await self._open_tcp(peer)
                self._steering.heard()
                stream.close()

    async def aclose(self) -> None:
        """End what runs beside the calls."""
        self._looks.close()
        tasks = list(self._knocking.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _open_beside(
        self, lane: Lane, *, hedge: bool = False, unproven: bool = False, by: "means.Means | None" = None
    ) -> None:
        """Take another step beside a silent or (`hedge`) late lane, where request, host, budget and deadline allow.

        Args:
            lane: the silent one.
            hedge: it is only late.
            unproven: an answer over the other is to show that its connection does not give any.
            by: the means of that step, for a request that nobody has; None: the next one.
        """
        run = lane.run
        if not hedge:
            lane.fresh_at = self._time()
            if self._h1:
                recourse.find_blocked(lane, lane.path.steering)
        if run.gate is not None and not run.gate.may_beside:
            run.trace.note(f"{run.gate.host} has too much to do for another attempt beside")
            return
        if by is None and not (verdict := self._steering.may_retry(run.request.host, heard=lane.heard())).allowed:
            run.trace.note(verdict.why)
            return
        step = run.ladder.beside(by)
        if step is None or step.means is Means.LONG:
            return
        other = Lane(run, step, self._looks, quiet=True, path=lane.path)
        if not hedge:
            other.newer_than = lane.asked_at
        elif lane.held is not None and lane.held.peer is not None:
            run.left.add(lane.held.peer)  # not on the connection that is late
        other.note(f"try {step.means}{telling.where(step)}")
        run.trace.handed_down(run.shape.request_bytes)
        self._hedged(run.shape.request_bytes)
        attempt = self._run_beside(other, lane if unproven else None)
        task = run.beside(other, attempt, functools.partial(_beside_failed, other, lane))
        self.admission.beside(run, task)

    def _run_over(self, lane: Lane) -> Coroutine[None, None, Reply]:
        return self._run_beside(lane, None)

    async def _run_beside(self, lane: Lane, unproven: Lane | None) -> Reply:
        try:
            reply = await self._try(lane)
        finally:
            lane.end()
        held = None if unproven is None else unproven.held
        if unproven is not None and held is not None and not held.answered:
            held.distrust()
            if not recourse.outdone(unproven, reply, self._time()):
                lane.path.steering.unanswered(lane.run, held.peer, waited_s=None)
        return reply

    # -- the body -----------------------------------------------------------------------------------------------------
    def _followed(self, run: Run, reply: Reply) -> BodySource:
        """Give the body of an answer, with what is to be done while it comes."""
        source, known = reply.source, run.limits
        if source.complete:
            run.path.steering.leave(run)
            self._learn(run, reply, body_s=0.0, answer_bytes=None)
            return source
        streams = answer_pattern(run.shape.pattern, reply.headers) is Pattern.STREAM
        may_resume = (
            reply.status == 200
            and run.request.method == "GET"
            and known.resends
            and not streams
            and not run.body.present
        )
        run.asked_at = None
        run.answering = reply.held
        run.bytes_down = recourse.length_of(reply.headers)
        began = self._time()
        watch: StreamWatch | BodyWatch | None = None
        if streams:
            source.patience(known.stream_timeout_s if known.stream_timeout_s is not None else math.inf)
            if reply.held is not None:
                watch = StreamWatch(run.path.steering, run.path.pool, reply.held)
        gap_s = self._be_patient(run, source) if may_resume else None

        def ended(size: int, whole: bool) -> None:
            run.path.steering.leave(run)
            if watch is not None:
                watch.end()
            if whole and not streams:
                self._learn(run, reply, body_s=self._time() - began, answer_bytes=size)

        def moved(size: int, seconds: float) -> None:
            run.path.steering.moved(size, seconds, run.request.host)
            if reply.held is not None:
                reply.held.fit(run.path.steering.window_bytes)

        resume = functools.partial(self._resume, run) if may_resume else None
        body = FollowedBody(reply, ended, resume, None if streams else moved)
        if may_resume and gap_s is not None and reply.held is not None and reply.held.can_probe:
            watch = BodyWatch(gap_s, lambda: run.answering, lambda: body.waiting_since, lambda: body.patience(0.0))
        return body

    def _be_patient(self, run: Run, source: BodySource) -> float | None:
        """Bear silences of a body that can be continued elsewhere no longer than they are likely to end.

        Not on a slow link: what is under way there would be asked for twice.

        Returns:
            There: how long a silence is a matter of course; None where they are borne no longer than that.
        """
        timeouts = run.path.steering.plan(run, ends_at=math.inf, attempt=run.ladder.tries, attempts=1)
        if timeouts is None or timeouts.packet_gap_s is None:
            return None
        if not run.path.steering.room(run.request.host):
            return timeouts.packet_gap_s
        silence_s = run.limits.read_timeout_s
        source.patience(timeouts.packet_gap_s if silence_s is None else min(silence_s, timeouts.packet_gap_s))
        return None

    async def _resume(self, run: Run, error: errors.TransportError, fields: Headers) -> Reply:
        """Ask again for a body that broke off; see `following.Resume`."""
        run.trace.attempt_failed(error)
        if isinstance(error, errors.DeadlineExceeded) and run.answering is not None and run.answering.peer is not None:
            run.left.add(run.answering.peer)  # its connection may still stand, and would be taken
        run.ends_at = self._time() + run.limits.deadline_s
        run.over = False
        request = run.request
        run.request = request._replace(headers=(*request.headers, *fields))
        try:
            step = await self._after_answer(run, 0.0)
            while step is not None and run.remaining() > 0:
                run.trace.note(f"the body broke off; asking again{' for the rest' if fields else ''}")
                run.trace.attempt(step)
                switch(run, self._paths.begin(run.request.host))
                lane = Lane(run, step, self._looks, quiet=True)
                if self._paths.watching:
                    self._paths.watch(lane)
                try:
                    reply = await run.first(self._try(lane))
                    telling.tell(run.trace, reply)
                    switch(run, reply.path or self._first)
                    run.answering = reply.held
                    self._be_patient(run, reply.source)
                    return reply
                except Failed as failed:
                    telling.tell_where(lane)
                    run.trace.attempt_failed(failed.error)
                    step = await self._after_failure(run, failed)
                finally:
                    lane.end()
            raise error
        finally:
            run.request = request
            run.end_lanes()
            self.admission.leave(run)

    # -- the steps ----------------------------------------------------------------------------------------------------
    def _nothing_tried(self, run: Run) -> errors.TransportError:
        if run.remaining() <= 0:
            return errors.DeadlineExceeded(
                f"{run.request.host}: no time left to ask it", phase=Phase.PLAN, maybe_delivered=False
            )
        return errors.ConnectError(
            f"{run.request.host}: every means to reach it is switched off or was refused",
            phase=Phase.PLAN,
            maybe_delivered=False,
        )

    async def _ladder(self, run: Run, scheduling: "Scheduling") -> means.Ladder:
        """Lay out the steps as the platform's plan says."""
        trace = run.trace
        trace.enter(Phase.PLAN)
        host_plan = await scheduling.host_plan(run.request.host, wait_s=run.remaining())
        if host_plan is not None:
            run.obey(host_plan)
        off = run.limits.off
        plan = scheduling.plan
        if plan is not None:
            off = off.union(plan.disabled)
            stale = ", stale" if scheduling.stale else ""
            known = f"{len(host_plan.endpoints)} endpoints" if host_plan else "host unknown"
            trace.note(f"plan version {plan.version}{stale}: {known}")
            trace.record.plan_version = plan.version
        if scheduling.last_error is not None:
            trace.note(str(scheduling.last_error))
        if telling.H2 in off:
            run.blocked = self._h1
        endpoints = () if host_plan is None else recourse.allowed(host_plan.endpoints, off)
        return self._laid_out(run, endpoints, self._config.disabled | off)

    def _laid_out(self, run: Run, endpoints: "tuple[Endpoint, ...]", disabled: frozenset[str]) -> means.Ladder:
        """Lay out the steps of a call."""
        request = run.request
        preset, run.off = run.limits.preset, disabled
        method = request.method.upper()
        has_key = method not in SAFE_METHODS and _has_key(request)  # of a read nobody asks
        relays = () if self.relaying is None else self.relaying.steps(run)
        if self._plain and preset is ORDINARY and not (endpoints or relays) and run.limits.clear is None:
            return means.by_name(disabled=disabled, method=method, has_key=has_key, resends=run.limits.resends)
        if preset.tls_only and request.scheme != "https":
            raise errors.LocalProtocolError(f"{request.host}: the plan {preset.name!r} asks over TLS only")
        proxied = self._proxies.proxy_for(request.scheme, request.host, request.port) is not None
        addresses: recourse.Known = {} if proxied else self._addresses
        longline = self._longline if any(each.carrier in LONG_CARRIERS for each in endpoints) else None
        return means.plan(
            long=longline is not None and not longline.stopped,
            long_last=longline is not None and longline.paused,
            origins=() if proxied else recourse.origins(endpoints, request),  # a proxy finds the origin by its name
            disabled=disabled,
            method=method,
            has_key=has_key,
            resends=run.limits.resends,
            preset=preset,
            backup=recourse.backups(addresses, request) if addresses else (),
            relays=relays,
            clear=recourse.clear_step(run, addresses) if run.limits.clear is not None else None,
            order=run.limits.order,
        )

    def _try(self, lane: Lane) -> Coroutine[None, None, Reply]:
        if lane.step.means is Means.LONG and self._longline is not None:
            return ask_long(self._longline, lane.run, self._left)
        if lane.step.means is Means.RELAY and self.relaying is not None:
            return self.relaying.ask(lane)
        if lane.run.limits.clear is None or (consent := recourse.goes_in_clear(lane)) is None:
            return self._try_direct(lane, lane.run.request)
        return self._try_in_clear(lane, consent)

    async def _try_in_clear(self, lane: Lane, consent: "ClearHttp") -> Reply:
        nonce = self._rng.token_bytes(16).hex()
        try:
            return await recourse.ask_in_clear(lane, consent, self._try_direct, nonce=nonce, wall_s=self._wall_s)
        except errors.TransportError as error:
            raise self._judged(lane, error) from error

    async def _try_direct(self, lane: Lane, request: HttpRequest) -> Reply:
        run, step, path = lane.run, lane.step, lane.path
        known = run.limits
        as_new = step.means is Means.ORIGINAL
        if run.body.whole is None:
            request = request._replace(body=run.body.chunks())
        try:
            response = await path.pool.request(
                forwarded(request, self._proxies) if self._proxies.proxies else request,
                deadline_s=run.remaining(),
                body_deadline_s=limits.CALL_DEADLINE_MAX_S,
                connect_timeout_s=known.connect_timeout_s,
                read_timeout_s=math.inf if known.read_timeout_s is None else known.read_timeout_s,
                addresses=step.addresses or None,
                server_name=step.server_name or None,
                newer_than=lane.begun_at if as_new else lane.newer_than,
                left=() if as_new or path is not run.path else run.left and path.steering.left_of(run),
                h1=run.blocked and request.scheme == "https",
                follower=lane,
            )
        except errors.TransportError as error:
            raise self._judged(lane, error) from error
        now = self._time()
        path.steering.sensing.heard(now)
        if self._paths.dark:
            self._paths.answered(lane)
        if lane.asked_at is not None:
            run.first_byte_s = now - lane.asked_at
        return Reply(
            response.status,
            response.reason,
            response.http_version,
            tuple(response.headers),
            response.source,
            lane.held,
            telling.H2 if response.http_version == "HTTP/2" else telling.H1,
            response.reused,
            False,
            path,
        )

    def _learn(self, run: Run, reply: Reply, *, body_s: float, answer_bytes: int | None) -> None:
        """Learn from an answer that came whole: from some in a second of each host."""
        held = reply.held
        peer = None if held is None else held.peer
        if held is None or peer is None or not run.path.steering.samples(run.request.host):
            return
        run.path.steering.answered(
            run,
            held,
            peer,
            first_byte_s=run.first_byte_s,
            body_s=body_s,
            answer_bytes=max(0, recourse.length_of(reply.headers)) if answer_bytes is None else answer_bytes,
            server_timing=field_value(reply.headers, b"server-timing"),
            protocol=reply.carrier,
            tls_port=run.request.port if run.request.scheme == "https" else 0,
        )
        self.admission.learn(run, *run.path.steering.link(run.request.host))
        if reply.held is not None:
            reply.held.fit(run.path.steering.window_bytes)

    def _judged(self, lane: Lane, error: errors.TransportError) -> Failed:
        """Say what the failure of an attempt means, and learn from it."""
        run, held = lane.run, lane.held
        sent = error.phase.reached(Phase.SEND)
        reused = not lane.dialled and sent and not isinstance(error, errors.DeadlineExceeded)
        untouched = (
            held is not None and not error.maybe_delivered and isinstance(error, errors.ReadError | errors.WriteError)
        )
        if held is not None and not untouched:
            held.shun_session()
        if held is not None and not reused and not untouched:
            timed_out = isinstance(error, errors.DeadlineExceeded) and lane.asked_at is not None
            waited_s = self._time() - lane.asked_at if timed_out and lane.asked_at is not None else None
            lane.path.steering.unanswered(run, held.peer, waited_s=waited_s, protocol=telling.spoken(held))
            if held.peer is not None:
                run.left.add(held.peer)
        if self._h1 and isinstance(error, errors.DeadlineExceeded):
            recourse.find_blocked(lane, lane.path.steering)
        silent = isinstance(error, errors.DeadlineExceeded) and not lane.heard()
        return Failed(error, reused=reused, untouched=untouched, heard=not silent)


def _has_key(request: HttpRequest) -> bool:
    """Say whether a write may be repeated."""
    return field_value(request.headers, b"idempotency-key") is not None


def _beside_failed(lane: Lane, silent: Lane, error: BaseException) -> None:
    """Note how a lane beside a silent one failed; the silent one may have another then."""
    silent.fresh_at = None
    if isinstance(error, Failed):
        lane.note(f"failed in {error.error.phase}: {error.error}")
    else:
        lane.note(f"failed: {type(error).__name__}")
