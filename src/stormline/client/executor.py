"""Runs one HTTP request up its ladder of means until one answers, and tells its trace what happens."""

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from stormline.client.answer import Answer, LongBody, RequestBody, gateway_error
from stormline.client.config import Config
from stormline.client.trace import CallTrace
from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.outbound.messages import HttpRequest
from stormline.outbound.pool import HttpPool
from stormline.policy import means
from stormline.policy.means import Means, Outcome, Step
from stormline.policy.reconnect import renewable
from stormline.policy.resend import SAFE_METHODS

if TYPE_CHECKING:
    # What needs a platform is imported with one (`runtime`); here it is only named.
    from stormline.client.link import LinkCall
    from stormline.client.longline import LongLine
    from stormline.client.scheduling import Scheduling
    from stormline.wire.events import ReplyReceived
    from stormline.wire.plan import Endpoint

_LONG_TLS: Final = "sl-tls"
_H1: Final = "h1"
_H2: Final = "h2"
"""`wire.plan.Carrier`, by value: that module is loaded with a platform only."""
_NOT_FORWARDED: Final = frozenset(
    {b"connection", b"host", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding", b"upgrade"}
)
"""Hop-by-hop fields (RFC 9110 section 7.6.1); the host is in the target."""


class CallLimits(NamedTuple):
    """Time of one call, seconds: `deadline_s` until the head of the answer over all attempts, `read_timeout_s` the
    longest silence (None for any), `connect_timeout_s` one connection (None: as long as the deadline lets)."""

    deadline_s: float
    read_timeout_s: float | None
    connect_timeout_s: float | None


class Executor:
    """Runs calls; one per client, used by all its tasks at once."""

    def __init__(
        self,
        config: Config,
        *,
        pool: HttpPool,
        scheduling: "Scheduling | None",
        longline: "LongLine | None",
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
            TransportError: no means gave an answer. Of all attempts' errors it is one that may have been delivered, if
                there is one, else the one that came furthest; so its `maybe_delivered` holds for the call as a whole.
            LocalProtocolError: the request cannot be sent as it is.
            asyncio.CancelledError: nothing is left behind.
            Exception: of the source of the request's body.
        """
        run = _Run(request, RequestBody(request.body, trace.handed_down), call_limits, trace)
        worst: errors.TransportError | None = None
        try:
            ladder = await self._ladder(run)
            step = ladder.next()
            while step is not None and run.remaining() > 0:
                trace.attempt(step)
                trace.handed_down(run.size)
                try:
                    return await self._try(step, run)
                except _Failed as failed:
                    error = failed.error
                    trace.attempt_failed(error)
                    worst = _worse(worst, error)
                    step = ladder.next(
                        Outcome(
                            maybe_delivered=error.maybe_delivered,
                            reused=failed.reused or renewable(error.__cause__),
                            body_spent=run.body.spent,
                        )
                    )
            raise worst if worst is not None else self._nothing_tried(run)
        except BaseException as error:
            if not isinstance(error, errors.TransportError):
                trace.attempt_failed(error)
            trace.failed(error)
            raise

    def _nothing_tried(self, run: "_Run") -> errors.TransportError:
        if run.remaining() <= 0:
            return errors.DeadlineExceeded(
                f"{run.request.host}: no time left to ask it", phase=Phase.PLAN, maybe_delivered=False
            )
        return errors.ConnectError(
            f"{run.request.host}: every means to reach it is switched off or was refused",
            phase=Phase.PLAN,
            maybe_delivered=False,
        )

    async def _ladder(self, run: "_Run") -> means.Ladder:
        request, trace = run.request, run.trace
        endpoints: tuple[Endpoint, ...] = ()
        disabled = self._config.disabled
        if self._scheduling is not None:
            trace.enter(Phase.PLAN)
            host_plan = await self._scheduling.host_plan(request.host, wait_s=run.remaining())
            endpoints = host_plan.endpoints if host_plan is not None else ()
            plan = self._scheduling.plan
            if plan is not None:
                disabled = disabled.union(plan.disabled)
                stale = ", stale" if self._scheduling.stale else ""
                known = f"{len(host_plan.endpoints)} endpoints" if host_plan else "host unknown"
                trace.note(f"plan version {plan.version}{stale}: {known}")
            if self._scheduling.last_error is not None:
                trace.note(str(self._scheduling.last_error))
        longline = self._longline if any(each.carrier == _LONG_TLS for each in endpoints) else None
        return means.plan(
            long=longline is not None and not longline.stopped,
            long_last=longline is not None and longline.paused,
            origins=_origins(endpoints, request),
            disabled=disabled,
            method=request.method.upper(),
            has_key=_has_key(request),
        )

    async def _try(self, step: Step, run: "_Run") -> Answer:
        if step.means is Means.LONG and self._longline is not None:
            return await self._try_long(self._longline, run)
        return await self._try_direct(step, run)

    async def _try_long(self, longline: "LongLine", run: "_Run") -> Answer:
        request, body = run.request, run.body
        whole = body.whole
        first = whole if whole is not None and len(whole) <= limits.CHUNK_BYTES_MAX else b""
        more = body.present and not first
        try:
            call, stood = await longline.call(
                run.trace,
                "api",
                request.method,
                ends_at=run.ends_at,
                target=_url(request),
                headers=_long_headers(request),
                body=first,
                more=more,
            )
        except errors.TransportError as error:
            # It stood and went away in this moment: nothing of the call had left.
            raise _Failed(error, reused=error.phase is Phase.SEND) from error
        try:
            if more:
                call.start_body(body.chunks())
            reply = await _head(call, run)
        except BaseException as error:
            call.cancel()
            if isinstance(error, errors.CallError):
                error = gateway_error(error, Phase.FIRST_BYTE)
            if isinstance(error, errors.TransportError):
                stale = isinstance(error, errors.ChannelLost) and (stood or call.accepted)
                raise _Failed(error, reused=stale) from error
            raise
        run.trace.answered(reply.status)
        return Answer(
            run.trace,
            LongBody(call, run.limits.read_timeout_s),
            status=reply.status,
            headers=tuple(
                (name.encode("latin-1", "replace"), value.encode("latin-1", "replace")) for name, value in reply.headers
            ),
        )

    async def _try_direct(self, step: Step, run: "_Run") -> Answer:
        request, trace = run.request, run.trace
        if run.body.whole is None:
            request = replace(request, body=run.body.chunks())
        progress = _Progress(trace)
        try:
            response = await self._pool.request(
                request,
                deadline_s=run.remaining(),
                body_deadline_s=limits.CALL_DEADLINE_MAX_S,
                connect_timeout_s=run.limits.connect_timeout_s,
                read_timeout_s=run.limits.read_timeout_s if run.limits.read_timeout_s is not None else math.inf,
                addresses=(step.address,) if step.address is not None else None,
                server_name=step.server_name or None,
                fresh=step.fresh,
                on_stage=progress.stage,
                on_note=trace.note,
            )
        except errors.TransportError as error:
            raise _Failed(error, reused=not progress.dialled and error.phase.reached(Phase.SEND)) from error
        carrier = _H2 if response.http_version == "HTTP/2" else _H1
        trace.connected(str(response.peer), carrier, reused=response.reused)
        trace.answered(response.status)
        return Answer(
            trace,
            response.source,
            status=response.status,
            reason=response.reason,
            http_version=response.http_version,
            headers=tuple(response.headers),
        )


class _Run:
    """One call on its way: what is asked, how much time it has, who follows it."""

    __slots__ = ("_loop", "body", "ends_at", "limits", "request", "size", "trace")

    def __init__(self, request: HttpRequest, body: RequestBody, call_limits: CallLimits, trace: CallTrace) -> None:
        self._loop = asyncio.get_running_loop()
        self.request = request
        self.body = body
        self.limits = call_limits
        self.trace = trace
        self.ends_at = self._loop.time() + call_limits.deadline_s
        self.size = len(request.target) + sum([len(name) + len(value) + 4 for name, value in request.headers])
        self.size += len(body.whole or b"")

    def silent_until(self, quiet_since: float) -> float:
        """Give the moment at which a silence since `quiet_since` has been too long."""
        silence_s = self.limits.read_timeout_s
        return self.ends_at if silence_s is None else min(self.ends_at, quiet_since + silence_s)

    def remaining(self) -> float:
        """Seconds until the deadline."""
        return self.ends_at - self._loop.time()


class _Failed(Exception):
    """One step failed.

    Attributes:
        error: how.
        reused: on a connection that had stood before and may just have been stale.
    """

    def __init__(self, error: errors.TransportError, *, reused: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.reused = reused


class _Progress:
    """Hears of the stages of one direct attempt.

    Attributes:
        dialled: it made a connection of its own.
    """

    __slots__ = ("_trace", "dialled")

    def __init__(self, trace: CallTrace) -> None:
        self._trace = trace
        self.dialled = False

    def stage(self, stage: str) -> None:
        """A stage begins."""
        if stage == Phase.CONNECT:
            self.dialled = True
        self._trace.enter(stage)


async def _head(call: "LinkCall", run: _Run) -> "ReplyReceived":
    """Wait for the answer's head: until the deadline, and no longer in silence than the read timeout.

    Pieces of our own body that leave break the silence: an upload may take longer than any one wait.
    """
    while True:
        until = run.silent_until(call.quiet_since)
        try:
            async with asyncio.timeout_at(until) as timeout:
                if not call.sending:
                    await call.left()
                run.trace.enter(Phase.FIRST_BYTE)
                return await call.reply()
        except TimeoutError as error:
            if not timeout.expired():
                raise  # of the body's source
            if run.silent_until(call.quiet_since) > until:
                continue
            call.doubt()
            raise errors.DeadlineExceeded(
                "no answer over the long connection "
                + ("within the deadline" if until == run.ends_at else f"for {run.limits.read_timeout_s:.3g} s"),
                phase=Phase.SEND if call.sending else Phase.FIRST_BYTE,
                maybe_delivered=call.maybe_delivered,
            ) from error


def _has_key(request: HttpRequest) -> bool:
    """Say whether a write may be repeated; of a read nobody asks."""
    if request.method in SAFE_METHODS:
        return False
    return any(name.lower() == b"idempotency-key" for name, _ in request.headers)


def _origins(endpoints: "tuple[Endpoint, ...]", request: HttpRequest) -> tuple[Step, ...]:
    """Give the steps to the origin's own addresses; they speak TLS for the standard port's service, and no other."""
    if request.scheme != "https":
        return ()
    return tuple(
        Step(Means.IP_DIRECT, address, each.server_name)
        for each in endpoints
        if each.carrier == _H1 and request.port in (443, each.port) and (address := Address(each.host, each.port)).is_ip
    )


def _long_headers(request: HttpRequest) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in request.headers
        if name.lower() not in _NOT_FORWARDED
    )


def _url(request: HttpRequest) -> str:
    host = f"[{request.host}]" if ":" in request.host else request.host
    default = 443 if request.scheme == "https" else 80
    port = "" if request.port == default else f":{request.port}"
    return f"{request.scheme}://{host}{port}{request.target.decode('ascii', 'replace')}"


def _worse(first: errors.TransportError | None, second: errors.TransportError) -> errors.TransportError:
    """Give the error that says most: one that may have been delivered before all others, then who came furthest."""
    if first is None:
        return second
    if first.maybe_delivered is not second.maybe_delivered:
        return first if first.maybe_delivered else second
    return first if first.phase.reached(second.phase) else second
