"""What a call may fall back on besides another lane: configured addresses, HTTP/1.1, clear HTTP, and a hedge.

The executor asks here; nothing here is asked unless the call's plan or the settings have it.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final

from stormline.client.following import MemoryBody
from stormline.client.lanes import Lane, Reply, Run
from stormline.client.patterns import content_length
from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.outbound.messages import Headers, HttpRequest, field_value
from stormline.policy.means import H1, HEDGE, Means, Step
from stormline.policy.resend import SAFE_METHODS

if TYPE_CHECKING:
    from stormline.client.rules import ClearHttp
    from stormline.client.steering import Steering
    from stormline.wire.plan import Endpoint

ORIGIN_CARRIERS: Final = ("h1", "h2")
"""`wire.plan.Carrier`, by value: that module is loaded with a platform only. Both are asked the same way: which of the
two is spoken is agreed upon in TLS (ALPN)."""
_OUTDONE: Final = 3.0
"""How many times as long HTTP/2 must have been silent: a server that takes its time takes it over either."""
Known = Mapping[str, tuple[Address, ...]]
"""Addresses by host, from the settings; port 0 stands for the request's own."""


def allowed(endpoints: "tuple[Endpoint, ...]", off: Collection[str]) -> "tuple[Endpoint, ...]":
    """Give the endpoints whose carrier dispatch has not switched off."""
    return tuple(each for each in endpoints if each.carrier not in off) if off else endpoints


def origins(endpoints: "tuple[Endpoint, ...]", request: HttpRequest) -> tuple[Step, ...]:
    """Give the steps to the origin's own addresses; they speak TLS for the standard port's service, and no other.

    Addresses that go by the same name are raced together, and tried as often as there are of them.
    """
    if request.scheme != "https":
        return ()
    places: dict[str, list[Address]] = {}
    for each in endpoints:
        if (
            each.carrier in ORIGIN_CARRIERS
            and request.port in (443, each.port)
            and (address := Address(each.host, each.port)).is_ip
            and address not in places.setdefault(each.server_name, [])
        ):
            places[each.server_name].append(address)
    return tuple(Step(Means.IP_DIRECT, tuple(addresses), name) for name, addresses in places.items() for _ in addresses)


def backups(known: Known, request: HttpRequest) -> tuple[Step, ...]:
    """Give the steps to the origin's addresses from the settings: raced together, as often as there are some."""
    given = known.get(request.host.lower(), ()) if request.scheme == "https" else ()
    addresses = tuple(Address(each.host, each.port or request.port) for each in given)
    return (Step(Means.IP_DIRECT, addresses, backup=True),) * len(addresses)


def clear_step(run: Run, known: Known) -> Step | None:
    """Give the step over clear HTTP, None where the request may not be asked that way; the story says why."""
    from stormline.client import clear

    request, consent = run.request, run.limits.clear
    if consent is None:
        return None
    why = "it is asked in clear anyway" if request.scheme != "https" else clear.may_ask(request)
    if why:
        run.trace.note(f"no clear HTTP: {why}")
        return None
    given = known.get(request.host.lower(), ())
    return Step(Means.CLEAR, tuple(Address(each.host, consent.port) for each in given if not each.port))


def goes_in_clear(lane: Lane) -> "ClearHttp | None":
    """Give the consent by which the answer of a lane is judged, None where it comes over TLS or nobody asked for it."""
    request = lane.run.request
    clear = lane.step.means is Means.CLEAR or (request.scheme == "http" and request.method == "GET")
    return lane.run.limits.clear if clear else None


async def ask_in_clear(
    lane: Lane,
    consent: "ClearHttp",
    ask: Callable[[Lane, HttpRequest], Awaitable[Reply]],
    *,
    nonce: str,
    wall_s: Callable[[], float],
) -> Reply:
    """Ask over HTTP without TLS, and give what is signed.

    Args:
        lane: the attempt.
        consent: whose signature counts.
        ask: sends a request and gives the head of its answer.
        nonce: unique, in hexadecimal.
        wall_s: the wall clock.

    Raises:
        Failed: it failed, or nothing shows that the answer is the origin's.
        TransportError: its body broke off or was late.
    """
    from stormline.client import clear

    sent = clear.in_clear(lane.run.request, consent, nonce)
    reply = await ask(lane, sent)
    try:
        async with asyncio.timeout_at(lane.run.ends_at) as timeout:
            return await clear.judged(reply, sent, consent, nonce=nonce, now_s=wall_s())
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise errors.DeadlineExceeded(
            f"{sent.host}: the deadline passed, while in {Phase.BODY}", phase=Phase.BODY, maybe_delivered=True
        ) from error


def is_late(lane: Lane, steering: "Steering", now: float) -> bool:
    """Say whether a second request beside a lane is worth its bytes: a read, later than most, and there is room."""
    run = lane.run
    if lane.hedged or lane.fresh_at is not None or lane.asked_at is None or HEDGE in run.off:
        return False
    return run.request.method in SAFE_METHODS and steering.hedge(run, now - lane.asked_at)


def find_blocked(lane: Lane, steering: "Steering") -> None:
    """See whether HTTP/2 itself is what stalls: the path is alive, and another address does or would do no better.

    Then what is tried next is one request on one connection: HTTP/1.1, which nothing else can hold up.
    """
    run, held = lane.run, lane.held
    if run.blocked or H1 in run.off or held is None or held.shared is None or lane.asked_at is None:
        return
    if not steering.heard_since(held, lane.asked_at):
        return  # dark: another protocol would be as dark
    if held.peer is not None:
        run.stalled.add(held.peer.host)
    if len(run.stalled) > 1 or steering.tried_all(run, held):
        run.blocked = True
        lane.note(f"HTTP/2 stalls at {held.peer}, and not there alone: HTTP/1.1 from here")


def outdone(silent: Lane, reply: Reply, now: float) -> bool:
    """Learn that HTTP/1.1 has answered a call in a fraction of the time that a lane over HTTP/2 was silent for.

    At an address that is silent over HTTP/2, or after two were: else it may be the address that is silent.

    Returns:
        The address is not to blame.
    """
    run, held, peer = silent.run, silent.held, None if reply.held is None else reply.held.peer
    if reply.carrier != "h1" or peer is None or held is None or held.shared is None or silent.asked_at is None:
        return False
    same = peer.host in run.stalled
    waited_s = now - silent.asked_at
    if not (same or len(run.stalled) > 1) or run.first_byte_s is None or waited_s < _OUTDONE * run.first_byte_s:
        return False
    silent.path.steering.outdone(run, "h2", waited_s=waited_s)
    return same


def worse(first: errors.TransportError | None, second: errors.TransportError) -> errors.TransportError:
    """Give the error that says most: one that may have been delivered before all others, then who came furthest."""
    if first is None:
        return second
    if first.maybe_delivered is not second.maybe_delivered:
        return first if first.maybe_delivered else second
    return first if first.phase.reached(second.phase) else second


def is_final(error: BaseException) -> bool:
    """Say whether a means cannot do better a moment later: the name does not exist."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME:
            return True
        cause = cause.__cause__
    return False


def length_of(headers: Headers) -> int:
    """Give the length an answer announces, -1 where it does not."""
    value = field_value(headers, b"content-length")
    size = None if value is None else content_length(value)
    return -1 if size is None else size


async def keep(reply: Reply) -> Reply | None:
    """Take the body of an answer into memory, so that its connection is free; None where it is too large for that."""
    if not reply.source.complete and length_of(reply.headers) > limits.RETRY_KEPT_BYTES:
        return None
    pieces: list[bytes] = []
    size = 0
    try:
        while piece := await reply.source.read():
            pieces.append(piece)
            size += len(piece)
            if size > limits.RETRY_KEPT_BYTES:
                await reply.source.aclose()
                break
    except errors.TransportError:
        pieces.clear()
    return reply._replace(source=MemoryBody(b"".join(pieces)))
