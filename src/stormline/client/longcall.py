"""An HTTP request as a call over the long connection."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from stormline.client.answer import LongBody, gateway_error
from stormline.client.lanes import Failed, Reply, Run
from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.net.stream import Stream
from stormline.outbound.messages import HttpRequest
from stormline.policy.level import Level
from stormline.policy.resend import SAFE_METHODS

if TYPE_CHECKING:
    # What needs a platform is imported with one (`runtime`); here it is only named.
    from stormline.client.link import LinkCall
    from stormline.client.longline import LongLine
    from stormline.wire.events import ReplyReceived

LONG_CARRIERS: Final = frozenset({"sl-tls", "sl-wss", "sl-short"})
"""`wire.plan.Carrier`, by value: that module is loaded with a platform only."""
_NOT_FORWARDED: Final = frozenset(
    {b"connection", b"host", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding", b"upgrade"}
)
"""Hop-by-hop fields (RFC 9110 section 7.6.1); the host is in the target."""

_EFFECTIVE: Final = {Level.BAD: "slow-2g", Level.POOR: "2g", Level.FAIR: "3g"}
"""What the gateway is told of a network that is not good, by the client hint ECT: it answers in fewer bytes then."""


async def ask_long(longline: "LongLine", run: Run, left: Callable[[Stream], bool]) -> Reply:
    """Ask over the long connection; see `Executor` for `left`.

    Raises:
        Failed: it gave no answer.
    """
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
            headers=_long_headers(request, _EFFECTIVE.get(run.path.steering.sensing.carries())),
            body=first,
            more=more,
            impatient=request.method in SAFE_METHODS,
        )
    except errors.TransportError as error:
        # It stood and went away in this moment: nothing of the call had left.
        raise Failed(error, reused=error.phase is Phase.SEND) from error
    try:
        if more:
            call.start_body(body.chunks())
        reply = await _head(call, run, left)
    except BaseException as error:
        call.cancel()
        if isinstance(error, errors.CallError):
            error = gateway_error(error, Phase.FIRST_BYTE)
        if isinstance(error, errors.TransportError):
            stale = isinstance(error, errors.ChannelLost) and (stood or call.accepted)
            raise Failed(error, reused=stale) from error
        raise
    return Reply(
        status=reply.status,
        reason=b"",
        http_version="HTTP/1.1",
        headers=tuple(
            (name.encode("latin-1", "replace"), value.encode("latin-1", "replace")) for name, value in reply.headers
        ),
        source=LongBody(call, run.limits.read_timeout_s),
        held=None,
        carrier=call.carrier,
        reused=stood,
    )


async def _head(call: "LinkCall", run: Run, left: Callable[[Stream], bool]) -> "ReplyReceived":
    """Wait for the answer's head: until the deadline, and no longer in silence than the read timeout.

    Pieces of our own body that leave break the silence: an upload may take longer than any one wait.
    """
    looked = False
    while True:
        until = run.silent_until(call.quiet_since)
        look_at = until if looked else min(until, call.quiet_since + limits.LOOK_FIRST_S)
        try:
            async with asyncio.timeout_at(look_at) as timeout:
                if not call.sending:
                    await call.left()
                run.trace.enter(Phase.FIRST_BYTE)
                return await call.reply()
        except TimeoutError as error:
            if not timeout.expired():
                raise  # of the body's source
            if look_at < until:
                looked = True
                left(call.stream)  # where that closes it, the next wait says so
                continue
            if run.silent_until(call.quiet_since) > until:
                continue
            call.doubt()
            raise errors.DeadlineExceeded(
                "no answer over the long connection "
                + ("within the deadline" if until == run.ends_at else f"for {run.limits.read_timeout_s:.3g} s"),
                phase=Phase.SEND if call.sending else Phase.FIRST_BYTE,
                maybe_delivered=call.maybe_delivered,
            ) from error


def _long_headers(request: HttpRequest, effective: str | None) -> tuple[tuple[str, str], ...]:
    kept = tuple(
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in request.headers
        if name.lower() not in _NOT_FORWARDED
    )
    if effective is None or any(name.lower() == "ect" for name, _ in kept):
        return kept
    return (*kept, ("ect", effective))


def _url(request: HttpRequest) -> str:
    host = f"[{request.host}]" if ":" in request.host else request.host
    default = 443 if request.scheme == "https" else 80
    port = "" if request.port == default else f":{request.port}"
    return f"{request.scheme}://{host}{port}{request.target.decode('ascii', 'replace')}"
