"""A session's machine on its way from one process to another, while no transport carries it."""

import msgspec

from stormline.core.errors import LocalProtocolError
from stormline.wire.connection import Connection
from stormline.wire.kept import Room
from stormline.wire.pushes import Pushes
from stormline.wire.states import Role, State


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """All that a machine without open calls holds. Fields are only ever added at the end, with a default.

    Attributes:
        next_call: id of the next call of ours.
        peer_call: highest id of the peer's calls.
        push_seq: number of the last push.
        unacked: pushes that the device has not acknowledged.
        first: number of the first of `frames`.
        received: frames of the peer received.
        frames: what the peer may lack.
        capabilities: optional features in force.
    """

    next_call: int
    peer_call: int
    push_seq: int
    unacked: tuple[int, ...]
    first: int
    received: int
    frames: tuple[bytes, ...]
    capabilities: tuple[str, ...]


def snapshot(machine: Connection) -> Snapshot:
    """Give what a server's machine holds.

    Raises:
        LocalProtocolError: calls are open, or a transport carries the session, or it cannot be resumed.
    """
    if machine._calls or not machine.detached or not machine.resumable:
        raise LocalProtocolError("only a session that waits, without open calls, can be handed over")
    ledger, pushes = machine._ledger(), machine._account()
    return Snapshot(
        next_call=machine._next_call,
        peer_call=machine._peer_call,
        push_seq=pushes.seq,
        unacked=tuple(sorted(pushes.unacked)),
        first=ledger.first,
        received=ledger.received,
        frames=tuple(ledger.after(ledger.first - 1) or ()),
        capabilities=machine.capabilities,
    )


def restore(taken: Snapshot, now: float, *, idle_s: float | None, room: Room) -> Connection:
    """Give a server's machine that goes on where the one of the snapshot was; it waits for a transport."""
    machine = Connection(Role.SERVER, now, idle_s=idle_s, room=room)
    machine.state = State.OPEN
    machine.detached = machine._counts = True
    machine._greet_by = None
    machine.capabilities = taken.capabilities
    machine._next_call, machine._peer_call = taken.next_call, taken.peer_call
    machine._pushes = Pushes(taken.push_seq, taken.unacked)
    machine._ledger().restore(taken.first, taken.received, list(taken.frames))
    return machine
