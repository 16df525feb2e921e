"""Runs one HTTP request up its ladder of means until one answers, and tells its trace what happens."""

import asyncio
from dataclasses import dataclass, replace

from stormline.client.answer import Answer, LongBody, RequestBody, gateway_error
from stormline.client.config import Config
from stormline.client.link import LinkCall
from stormline.client.longline import LongLine
from stormline.client.scheduling import Scheduling, renewable
from stormline.client.trace import CallTrace
from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.outbound.messages import HttpRequest
from stormline.outbound.pool import HttpPool
from stormline.policy import means
from stormline.policy.means import Means, Outcome, Step
from stormline.wire.events import ReplyReceived
from stormline.wire.plan import Carrier, HostPlan

_HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding", b"upgrade"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Time of one call, seconds: `deadline_s` until the head of the answer over all attempts, `read_timeout_s` the
    longest silence, `connect_timeout_s` one connection."""

    deadline_s: float
    read_timeout_s: float
    connect_timeout_s: float


class Executor:
    """Runs calls; one per client, used by all its tasks at once."""

    def __init__(
        self,
        config: Config,
        *,
        pool: HttpPool,
        scheduling: Scheduling | None,
        longline: LongLine | None,
    ) -> None:
        self._config = config
        self._pool = pool
        self._scheduling = scheduling
        self._longline = longline

    async def execute(self, request: HttpRequest, call_limits: CallLimits, trace: CallTrace) -> Answer:
        """Get an answer.

        Args:
            request: what is asked; a body in memory can be sent again, a stream once it was read from cannot.
            call_limits: the call's time.
            trace: follows the call; it is finished here only where the call fails.

        Raises:
            TransportError: no means gave an answer; the error is that of the attempt that came furthest.
            asyncio.CancelledError: nothing is left behind.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + call_limits.deadline_s
        body = RequestBody(request.body)
        worst: errors.TransportError | None = None
        try:
            ladder = await self._ladder(request, trace)
            step = ladder.next()
            while step is not None:
                remaining = ends_at - loop.time()
                if remaining <= 0:
                    break
                trace.attempt(step)
                try:
                    return await self._try(step, request, body, replace(call_limits, deadline_s=remaining), trace)
                except _Failed as failed:
                    error = failed.error
                    trace.attempt_failed(error)
                    worst = _worse(worst, error)
                    step = ladder.next(
                        Outcome(
                            maybe_delivered=error.maybe_delivered,
                            reused=failed.reused or renewable(error.__cause__),
                            body_spent=body.spent,
                        )
                    )
            raise worst or errors.DeadlineExceeded(
                f"{request.host}: no time left", phase=Phase.QUEUED, maybe_delivered=False
            )
        except BaseException as error:
            trace.failed(error)
            raise

    async def _ladder(self, request: HttpRequest, trace: CallTrace) -> means.Ladder:
        host_plan: HostPlan | None = None
        disabled = set(self._config.disabled)
        if self._scheduling is not None:
            trace.enter(Phase.PLAN)
            host_plan = await self._scheduling.host_plan(request.host)
            plan = self._scheduling.plan
            if plan is not None:
                disabled |= set(plan.disabled)
                stale = ", stale" if self._scheduling.stale else ""
                known = f"{len(host_plan.endpoints)} endpoints" if host_plan else "host unknown"
                trace.note(f"plan version {plan.version}{stale}: {known}")
            if self._scheduling.last_error is not None:
                trace.note(str(self._scheduling.last_error))
        has_key = any(name.lower() == b"idempotency-key" for name, _ in request.headers)
        endpoints = host_plan.endpoints if host_plan is not None else ()
        offered = any(each.carrier == Carrier.LONG_TLS for each in endpoints)
        return means.plan(
            long=offered and self._longline is not None and self._longline.usable,
            origins=tuple(
                Step(Means.IP_DIRECT, Address(each.host, each.port), each.server_name)
                for each in endpoints
                if each.carrier == Carrier.H1
            ),
            disabled=disabled,
            method=request.method.upper(),
            has_key=has_key,
        )

    async def _try(
        self, step: Step, request: HttpRequest, body: RequestBody, call_limits: CallLimits, trace: CallTrace
    ) -> Answer:
        if step.means is Means.LONG and self._longline is not None:
            return await self._try_long(self._longline, request, body, call_limits, trace)
        return await self._try_direct(step, request, body, call_limits, trace)

    async def _try_long(
        self,
        longline: LongLine,
        request: HttpRequest,
        body: RequestBody,
        call_limits: CallLimits,
        trace: CallTrace,
    ) -> Answer:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + call_limits.deadline_s
        try:
            async with asyncio.timeout(call_limits.deadline_s):
                link, stood = await longline.get(trace.enter)
        except TimeoutError as error:
            failure = errors.DeadlineExceeded("no long connection in time", phase=Phase.CONNECT, maybe_delivered=False)
            raise _Failed(failure, reused=False) from error
        except errors.TransportError as error:
            raise _Failed(error, reused=False) from error
        trace.connected(link.peer, Carrier.LONG_TLS, reused=stood)
        trace.enter(Phase.SEND)
        whole = body.whole
        first = whole if whole is not None and len(whole) <= limits.CHUNK_BYTES_MAX else b""
        more = body.present and not first
        headers = tuple(
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in request.headers
            if name.lower() not in _HOP_BY_HOP and name.lower() != b"host"
        )
        remaining = ends_at - loop.time()
        try:
            call = link.call(
                "api", request.method, target=_url(request), headers=headers, body=first, more=more,
                deadline_s=remaining,
            )  # fmt: skip
        except errors.LocalProtocolError as error:
            unsent = errors.WriteError(str(error), phase=Phase.QUEUED, maybe_delivered=False)
            raise _Failed(unsent, reused=stood) from error
        sender = asyncio.create_task(call.send_body(body.chunks()), name="stormline send body") if more else None
        try:
            async with asyncio.timeout(min(remaining, call_limits.read_timeout_s)):
                if sender is None:
                    await link.drained()
                trace.enter(Phase.FIRST_BYTE)
                reply = await _reply(call, sender)
        except TimeoutError as error:
            link.check()
            failure = errors.DeadlineExceeded(
                f"no answer over the long connection to {link.peer} within {call_limits.read_timeout_s:.3g} s",
                phase=Phase.FIRST_BYTE,
                maybe_delivered=call.maybe_delivered,
            )
            _drop(call, sender)
            raise _Failed(failure, reused=False) from error
        except errors.CallError as error:
            _drop(call, sender)
            raise _Failed(gateway_error(error, Phase.FIRST_BYTE), reused=False) from error
        except errors.TransportError as error:
            _drop(call, sender)
            raise _Failed(error, reused=stood) from error
        except BaseException:
            _drop(call, sender)
            raise
        trace.answered(reply.status)
        return Answer(
            trace,
            LongBody(call, sender, call_limits.read_timeout_s),
            status=reply.status,
            headers=tuple(
                (name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in reply.headers
            ),
        )

    async def _try_direct(
        self, step: Step, request: HttpRequest, body: RequestBody, call_limits: CallLimits, trace: CallTrace
    ) -> Answer:
        dialled = False

        def on_stage(stage: str) -> None:
            nonlocal dialled
            dialled = dialled or stage in (Phase.RESOLVE, Phase.CONNECT)
            trace.enter(stage)

        try:
            response = await self._pool.request(
                replace(request, body=body.whole if body.whole is not None else body.chunks()),
                deadline_s=call_limits.deadline_s,
                body_deadline_s=limits.CALL_DEADLINE_MAX_S,
                addresses=(step.address,) if step.address is not None else None,
                server_name=step.server_name or None,
                on_stage=on_stage,
                on_note=trace.note,
            )
        except errors.TransportError as error:
            raise _Failed(error, reused=not dialled and error.phase.reached(Phase.SEND)) from error
        trace.connected(str(response.peer), Carrier.H1, reused=response.reused)
        trace.answered(response.status)
        return Answer(
            trace,
            response.source,
            status=response.status,
            reason=response.reason,
            http_version=response.http_version,
            headers=tuple(response.headers),
        )


class _Failed(Exception):
    """One step failed."""

    def __init__(self, error: errors.TransportError, *, reused: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.reused = reused


async def _reply(call: LinkCall, sender: "asyncio.Task[None] | None") -> ReplyReceived:
    """Wait for the answer's head; a body source that fails while it is read fails the call at once."""
    if sender is None:
        return await call.reply()
    waiting = asyncio.ensure_future(call.reply())
    try:
        await asyncio.wait({waiting, sender}, return_when=asyncio.FIRST_COMPLETED)
        if sender.done() and not waiting.done():
            sender.result()
        return await waiting
    finally:
        waiting.cancel()


def _drop(call: LinkCall, sender: "asyncio.Task[None] | None") -> None:
    if sender is not None:
        sender.cancel()
    call.cancel()


def _url(request: HttpRequest) -> str:
    host = f"[{request.host}]" if ":" in request.host else request.host
    default = 443 if request.scheme == "https" else 80
    port = "" if request.port == default else f":{request.port}"
    return f"{request.scheme}://{host}{port}{request.target.decode('ascii', 'replace')}"


def _worse(first: errors.TransportError | None, second: errors.TransportError) -> errors.TransportError:
    """Give the error that came furthest: it says most about what is wrong."""
    if first is None:
        return second
    return first if first.phase.reached(second.phase) else second
