"""What the trace of a call is told by its executor."""

import functools
from typing import Final

from stormline.client.lanes import Lane, Reply
from stormline.client.trace import CallTrace
from stormline.core import limits
from stormline.outbound.held import Held
from stormline.policy.means import Step

H1: Final = "h1"
H2: Final = "h2"
"""`wire.plan.Carrier`, by value: that module is loaded with a platform only."""
_shown: Final = functools.lru_cache(limits.POOL_PLACES_REMEMBERED)(str)


def where(step: Step) -> str:
    """Say at which addresses."""
    return f" at {', '.join(map(str, step.addresses))}" if step.addresses else ""


def tell_where(lane: Lane) -> None:
    """Tell the trace on which connection an attempt failed, where it came to one."""
    held = lane.held
    if held is not None and held.peer is not None:
        lane.run.trace.failed_on(str(held.peer), spoken(held), reused=not lane.dialled)


def spoken(held: Held) -> str:
    """Say which protocol a connection speaks."""
    return H2 if held.shared is not None else H1


def tell(trace: CallTrace, reply: Reply) -> None:
    """Tell the trace whose answer it is."""
    if reply.held is not None:
        trace.connected(_shown(reply.held.peer), reply.carrier, reused=reply.reused)
    trace.answered(reply.status)
