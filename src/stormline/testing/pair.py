"""Two ends of a long connection joined without I/O, on virtual time: for tests of everything that speaks the protocol.

    pair = open_pair()
    call_id = pair.client.send_call("rpc", "orders.create", body=b"{}")
    heard = pair.pump()                      # heard.server == [CallReceived(call_id=1, ...)]
    pair.server.send_reply(call_id, 0, body=b"done")
    heard = pair.pump()                      # heard.client == [ReplyReceived(call_id=1, ...)]

Bytes stay in order and are never lost; `cut` ends the stream of one direction where it stands.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, TypeAlias

from stormline.core import limits
from stormline.wire import frames
from stormline.wire import messages as m
from stormline.wire.connection import Connection
from stormline.wire.events import Event, HelloReceived, Welcomed
from stormline.wire.states import Role

Split: TypeAlias = Callable[[bytes], Iterable[bytes]]
"""Cuts what is on its way into the pieces in which it arrives."""

HELLO: Final = m.Hello(versions=(m.VERSION,), app="shop", client="stormline.testing", capabilities=(m.PLAN,))
"""The HELLO of `open_pair`; carries no token."""
WELCOME: Final = m.Welcome(version=m.VERSION, session="s1", device="d1", capabilities=(m.PLAN,))
"""The WELCOME of `open_pair`."""
HELLO_RESUME: Final = m.Hello(versions=(m.VERSION,), app="shop", capabilities=(m.PLAN, m.RESUME))
"""The HELLO of a pair whose session can outlive its transport."""
WELCOME_RESUME: Final = m.Welcome(m.VERSION, "s1", "d1", resume="token", capabilities=(m.PLAN, m.RESUME))
"""Its WELCOME."""


def whole(data: bytes) -> Iterator[bytes]:
    """Deliver all at once."""
    yield data


def byte_by_byte(data: bytes) -> Iterator[bytes]:
    """Deliver one byte at a time."""
    for at in range(len(data)):
        yield data[at : at + 1]


def random_pieces(seed: int, size_max: int = 64) -> Split:
    """Give a split into pieces of 1 to `size_max` bytes; the same seed cuts the same way."""
    rng = random.Random(seed)  # noqa: S311  (a reproducible cut, not a secret)

    def cut(data: bytes) -> Iterator[bytes]:
        at = 0
        while at < len(data):
            size = rng.randint(1, size_max)
            yield data[at : at + size]
            at += size

    return cut


class Heard(NamedTuple):
    """What each side was told, in order."""

    client: list[Event]
    server: list[Event]


class Pair:
    """A client's and a server's machine, the bytes on their way between them, and a clock that only moves when told.

    Args:
        split: how delivered bytes are cut into pieces.
        heartbeat_s: the client's heartbeat, None for never.
        idle_s: silence after which the server gives the client up, None for never.

    Attributes:
        client: the client's machine.
        server: the server's machine.
        now: virtual monotonic seconds, from 0.
    """

    def __init__(self, *, split: Split = whole, heartbeat_s: float | None = None, idle_s: float | None = None) -> None:
        self.now = 0.0
        self.client = Connection(Role.CLIENT, self.now, heartbeat_s=heartbeat_s)
        self.server = Connection(Role.SERVER, self.now, idle_s=idle_s)
        self._split = split
        self._under_way = {Role.CLIENT: bytearray(), Role.SERVER: bytearray()}
        self._cut: set[Role] = set()
        self._heard = Heard([], [])

    def side(self, role: Role) -> Connection:
        """Give the machine of `role`."""
        return self.client if role is Role.CLIENT else self.server

    def under_way(self, to: Role) -> int:
        """Bytes sent to `to` and not delivered yet; takes what the sender has put out since."""
        sent = self.side(to.peer).data_to_send()
        if to not in self._cut:
            self._under_way[to] += sent
        return len(self._under_way[to])

    def deliver(self, to: Role, size: int | None = None) -> list[Event]:
        """Deliver up to `size` bytes (None: all that is on its way) to one side; give what it was told.

        Nothing is delivered while a server holds its reading back, as a real one would pause its socket.

        Raises:
            RemoteProtocolError: the bytes broke the rules. Its CLOSE is on its way then, and events told before it
                are given by the next `deliver` or `pump`.
        """
        machine = self.side(to)
        self._listen(to)
        if machine.reading_held:
            return self._take(to)
        size = self.under_way(to) if size is None else min(size, self.under_way(to))
        data = bytes(self._under_way[to][:size])
        del self._under_way[to][:size]
        for piece in self._split(data):
            machine.receive_data(piece, self.now)
            self._listen(to)
        if to in self._cut and not self._under_way[to]:
            machine.receive_eof(self.now)
            self._listen(to)
        return self._take(to)

    def pump(self) -> Heard:
        """Deliver in both directions until nothing moves any more; give what each side was told.

        Raises:
            RemoteProtocolError: as `deliver`; pump again to bring the CLOSE to the other side.
        """
        client: list[Event] = []
        server: list[Event] = []
        while True:
            try:
                told_server = self.deliver(Role.SERVER)
                server += told_server
                told_client = self.deliver(Role.CLIENT)
                client += told_client
            except BaseException:
                self._heard.client[:0] = client
                self._heard.server[:0] = server
                raise
            held = self.server.reading_held
            moving = self.under_way(Role.CLIENT) or (self.under_way(Role.SERVER) and not held)
            if not (moving or told_server or told_client):
                return Heard(client, server)

    def advance(self, seconds: float) -> Heard:
        """Let time pass; every timer fires when it is due and its frames are delivered at once."""
        end = self.now + seconds
        client: list[Event] = []
        server: list[Event] = []
        while True:
            due = [timer for side in (self.client, self.server) if (timer := side.next_timer()) is not None]
            self.now = max(self.now, min([*due, end]))
            for side in (self.client, self.server):
                timer = side.next_timer()
                if timer is not None and timer <= self.now:
                    side.handle_timer(self.now)
            heard = self.pump()
            client += heard.client
            server += heard.server
            if self.now >= end:
                return Heard(client, server)

    def cut(self, to: Role) -> None:
        """End the stream to one side: after the bytes already sent it sees the end, and what is sent later is lost."""
        self.under_way(to)
        self._cut.add(to)

    def lose(self, to_server: int, to_client: int) -> Heard:
        """Lose the transport: of what is on its way so many bytes still arrive, the rest never does."""
        heard = Heard(self.deliver(Role.CLIENT, to_client), self.deliver(Role.SERVER, to_server))
        for role in Role:
            self.under_way(role)
            self._under_way[role].clear()
            if self.side(role).resumable:
                self.side(role).detach()
        return heard

    def join(self, *, welcome_lost: bool = False) -> bool:
        """Go on over a new transport; give False where one side keeps too little for it, and nothing was changed.

        Args:
            welcome_lost: the transport dies under the WELCOME: the server has resumed, the client has not.
        """
        for role in Role:  # what a transport before this one still carried goes nowhere
            self.under_way(role)
            self._under_way[role].clear()
        client, server = Connection(Role.CLIENT, self.now), Connection(Role.SERVER, self.now)
        client.send_hello(m.Hello((m.VERSION,), "shop", resume="token", received=self.client.received))
        told(server, *said(client), now=self.now)
        if not (self.server.can_resume(self.client.received) and self.client.can_resume(self.server.received)):
            return False
        server.send_welcome(m.Welcome(m.VERSION, "s1", "d1", resumed=True, received=self.server.received))
        self.server.resume(server, self.client.received, self.now)
        if welcome_lost:
            self.server.data_to_send()
            return True
        client.receive_data(self.server.data_to_send(), self.now)
        event = client.next_event()
        if not isinstance(event, Welcomed):
            raise AssertionError(f"the client heard no WELCOME but {event}")
        self.client.resume(client, event.welcome.received, self.now)
        return True

    def open(self, hello: m.Hello = HELLO, welcome: m.Welcome = WELCOME) -> Heard:
        """Go through HELLO and WELCOME; give what each side was told."""
        self.client.send_hello(hello)
        first = self.pump()
        if not any(isinstance(event, HelloReceived) for event in first.server):
            raise AssertionError(f"the server heard no HELLO but {first.server}")
        self.server.send_welcome(welcome)
        rest = self.pump()
        return Heard(first.client + rest.client, first.server + rest.server)

    def _listen(self, to: Role) -> None:
        heard = self._heard.client if to is Role.CLIENT else self._heard.server
        while (event := self.side(to).next_event()) is not None:
            heard.append(event)

    def _take(self, to: Role) -> list[Event]:
        heard = self._heard.client if to is Role.CLIENT else self._heard.server
        told = heard.copy()
        heard.clear()
        return told


def told(machine: Connection, *messages: m.Message, now: float = 0.0) -> list[Event]:
    """Bring messages to one machine as from a peer that keeps no rules; give what it makes of them.

    Raises:
        RemoteProtocolError: they broke the rules.
    """
    machine.receive_data(b"".join(frames.encode(message) for message in messages), now)
    return list(iter(machine.next_event, None))


def said(machine: Connection) -> list[m.Message]:
    """Take what a machine has put out, as messages."""
    buffer = frames.FrameBuffer(limits.FRAME_BYTES_MAX)
    buffer.feed(machine.data_to_send())
    return list(iter(buffer.next_message, None))


def open_pair(*, split: Split = whole, heartbeat_s: float | None = None, idle_s: float | None = None) -> Pair:
    """Give a pair whose session stands; its greeting events are used up."""
    pair = Pair(split=split, heartbeat_s=heartbeat_s, idle_s=idle_s)
    pair.open()
    return pair
