"""What meets a gateway's clients: first bytes, WebSockets, device tokens, sessions that go on. As `fuzz.targets`."""

import asyncio
import atexit
import contextlib
import functools
import ipaddress
import re
import socket
from typing import Any, cast
from unittest import mock

from fuzz import corpus
from stormline.core import errors, limits, limits_platform
from stormline.core.values import Address
from stormline.gateway import listener
from stormline.gateway.websocket import WebSocketCarrier
from stormline.wire import events as e
from stormline.wire import frames, handover, jws, proxyprotocol, tokens
from stormline.wire import messages as m
from stormline.wire.connection import Connection
from stormline.wire.kept import Room
from stormline.wire.states import Role, State


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop


# -- the first bytes of a connection -----------------------------------------------------------------------------------
_PEER = ("192.0.2.9", 9)


class _Door:
    """A listening socket to which one connection has come."""

    def __init__(self, sock: socket.socket) -> None:
        self._waiting = [sock]

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        """Give it."""
        if not self._waiting:
            raise BlockingIOError
        return self._waiting.pop(), _PEER


class _Looked(listener._Arrival):
    """An arrival that is told apart, and then carries nothing."""

    entered: tuple[int, bytes] | None = None

    async def _connect(self, sock: socket.socket, begin: bytes) -> None:
        left = b""
        with contextlib.suppress(BlockingIOError):
            while piece := sock.recv(1 << 16):
                left += piece
        sock.close()
        self.entered = (self._first, left)
        assert left.startswith(begin), "the looks took bytes away"


async def _arrive(data: bytes, piece_bytes: int, *, front: bool, plain: bool) -> tuple[str, bytes, Address | None]:
    ours, theirs = socket.socketpair()
    takes = listener.Listener([], asyncio.Protocol, lambda hello: None, fronts=[_PEER[0]] if front else [])
    with ours, mock.patch.object(listener, "_Arrival", _Looked):
        takes._accept(_Door(theirs), plain)
        [arrival] = cast("list[_Looked]", list(takes._arrivals))
        at = 0
        while at < len(data) and arrival._sock is not None:
            ours.sendall(data[at : at + piece_bytes])
            at += piece_bytes
            arrival.look()
        if arrival._task is not None:
            ours.sendall(data[at:])
            await arrival._task
    verdict, rest = "waits" if takes.arriving else "refused", b""
    if arrival.entered is not None:
        first, rest = arrival.entered
        verdict = f"{first:#04x}"
        assert verdict == "0x16" or ((plain or front) and verdict in ("0x00", "0x47", "0x50")), (
            "taken, and not to be taken"
        )
    arrival._task = None
    takes.close()
    return verdict, rest, arrival._told


def fuzz_first_bytes(data: bytes) -> None:
    """A connection is taken, refused or waited for, the same however the bytes come; its carrier misses not a byte."""
    for front, plain in ((False, False), (False, True), (True, False)):
        whole = _loop().run_until_complete(_arrive(data, max(1, len(data)), front=front, plain=plain))
        pieces = _loop().run_until_complete(_arrive(data, 1, front=front, plain=plain))
        assert whole == pieces, "another cut, another verdict"
        verdict, rest, told = whole
        if verdict.startswith("0x"):
            size = proxyprotocol.size_of(data[: proxyprotocol.HEAD_BYTES]) if front else 0
            assert rest == data[size:], "the carrier gets other bytes than were sent"
        assert front or told is None, "a header was taken from who is no front"
        if told is not None:
            ipaddress.ip_address(told.host)


# -- WebSocket ---------------------------------------------------------------------------------------------------------
class _Wire(asyncio.Transport):
    """The connection below a WebSocket: takes down what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.said = bytearray()
        self.closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """There is a peer, and no TLS."""
        return ("192.0.2.9", 9) if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take it down."""
        assert not self.closing, "written to what is closed"
        self.said += data

    def is_closing(self) -> bool:
        """See `asyncio.BaseTransport`."""
        return self.closing

    def close(self) -> None:
        """See `asyncio.BaseTransport`."""
        self.closing = True

    abort = close


_END = b"\r\n\r\n"
_DATE = re.compile(rb"Date: [^\r]*\r\n")


class _Sink(asyncio.Protocol):
    """A session that takes bytes."""

    def __init__(self) -> None:
        self.heard = bytearray()

    def data_received(self, data: bytes) -> None:
        """Take them."""
        self.heard += data


def _upgrade(pieces: list[bytes]) -> tuple[bytes, bytes, bool]:
    wire, sink, stands = _Wire(), _Sink(), []
    carrier = WebSocketCarrier(lambda: sink, origins=(), peer=None, stands=lambda *_: stands.append(True))
    carrier.connection_made(wire)
    for piece in pieces:
        if piece and not wire.closing:
            carrier.data_received(piece)
    ends = wire.closing
    assert len(stands) <= 1, "it stands twice"
    assert not sink.heard or stands, "bytes for a session that was not opened"
    assert ends or carrier._ws.parser_exc is None, "open after a fault"
    wire.closing = True
    carrier.connection_lost(None)
    assert len(stands) == 1, "nobody was told that it is over"
    return bytes(sink.heard), _DATE.sub(b"", bytes(wire.said)), ends


def _agree(one: tuple[bytes, bytes, bool], other: tuple[bytes, bytes, bool]) -> bool:
    """Compare all but the words of a good-bye: who breaks two rules at once is told of one."""
    return (one[0], one[1].partition(_END)[0], one[2]) == (other[0], other[1].partition(_END)[0], other[2])


def fuzz_websocket(data: bytes) -> None:
    """A WebSocket gives its session the bytes of its messages, the same however they are cut, and answers in bounds."""
    head, end, rest = data.partition(_END)
    heard, said, ends = waited = _upgrade([head + end, rest])
    assert len(heard) <= len(data), "more than was sent"
    assert len(said) <= 2 * len(data) + limits_platform.REQUEST_HEAD_BYTES_MAX, "answers have no bound"
    assert _agree(_upgrade([bytes((byte,)) for byte in data]), waited), "another cut, another conversation"
    # Who does not wait for the answer to his upgrade may have no answer to what he sends with it.
    together = _upgrade([data])
    assert (together[0], together[2]) == (heard, ends), "another cut, other messages"


# -- device tokens -----------------------------------------------------------------------------------------------------
def fuzz_tokens(data: bytes) -> None:
    """A token gives SignatureError, or claims within their bounds that were signed for this use and survive signing."""
    text = data.decode("utf-8", "surrogateescape")
    assert isinstance(tokens.device_of(text) + tokens.user_of(text), str)
    genuine = jws.sign(data, key=corpus.KEY, kid=corpus.KID, typ=tokens.TYP)
    for each in (text, genuine):
        try:
            token = tokens.verify(each, keys=corpus.KEYS, wall=float(corpus.NOW))
        except errors.SignatureError as error:
            tokens.refusal_code(error)
            continue
        sizes = [len(name.encode()) for name in (token.app, token.device, token.user)]
        assert min(sizes[:2]) > 0, "a token without a name"
        assert max(sizes) <= limits.NAME_BYTES_MAX, "a name out of bounds"
        assert token.exp > corpus.NOW, "it has expired"
        assert max(token.iat, token.nbf) <= corpus.NOW + limits.CLOCK_SKEW_S, "it is from the future"
        again = tokens.mint(token, key=corpus.KEY, kid=corpus.KID)
        assert tokens.verify(again, keys=corpus.KEYS, wall=float(corpus.NOW)) == token, "it does not survive signing"


# -- sessions that go on -----------------------------------------------------------------------------------------------
class _Host:
    """A side that keeps its session over several transports: greets, resumes where it can, answers calls."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.room = Room(limits.KEPT_BYTES_MAX)
        self.session: Connection | None = None
        self.story: list[str] = []

    def meet(self, flight: bytes, piece_bytes: int) -> None:
        """Live through one transport, from its first byte to its loss."""
        machine = Connection(self.role, 0.0, room=self.room)
        if self.role is Role.CLIENT:
            received = self.session.received if self.session is not None else 0
            machine.send_hello(m.Hello((1,), corpus.APP, capabilities=(m.PLAN, m.RESUME), received=received))
        said = machine.data_to_send()
        try:
            for at in range(0, len(flight), piece_bytes):
                machine.receive_data(flight[at : at + piece_bytes], 1.0)
                while (event := machine.next_event()) is not None:
                    self.story.append(repr(event))
                    machine = self._act(machine, event)
        except errors.RemoteProtocolError as error:
            self.story.append(str(error))
        said += machine.data_to_send()
        buffer = frames.FrameBuffer(limits.FRAME_BYTES_MAX)
        buffer.feed(said)
        self.story += [repr(each) for each in iter(buffer.next_message, None)]
        assert len(buffer) == 0, "it ends within a frame"
        self._part(machine)

    def _act(self, machine: Connection, event: e.Event) -> Connection:
        match event:
            case e.HelloReceived(hello=hello):
                earlier = self.session
                goes_on = earlier is not None and earlier.can_resume(hello.received)
                machine.send_welcome(
                    m.Welcome(
                        1, "s", "d", capabilities=(m.PLAN, m.RESUME), resumed=goes_on,
                        received=earlier.received if goes_on and earlier is not None else 0,
                    )
                )  # fmt: skip
                return self._enter(machine, hello.received, goes_on=goes_on)
            case e.Welcomed(welcome=welcome):
                earlier = self.session
                goes_on = welcome.resumed and earlier is not None and earlier.can_resume(welcome.received)
                return self._enter(machine, welcome.received, goes_on=goes_on)
            case e.CallReceived() if machine.is_open(event.call_id):
                machine.send_reply(event.call_id, 200, body=event.body, more=event.more)
        return machine

    def _enter(self, machine: Connection, received: int, *, goes_on: bool) -> Connection:
        session = self.session
        if goes_on and session is not None:
            lacks = len((session._kept.after(received) if session._kept is not None else None) or [])
            session.resume(machine, received, 1.0)
            self.story.append(f"goes on; {lacks} frames again")
            return session
        if session is not None:
            session.release()
        self.session = machine
        if self.role is Role.SERVER and machine.can_push:
            machine.send_push("p", b"pushed")
        elif self.role is Role.CLIENT and machine.can_call:
            machine.send_call("rpc", "a.b", more=True)
        return machine

    def _part(self, machine: Connection) -> None:
        session = self.session
        if machine is not session or session is None:
            return
        if not session.resumable:
            session.release()
            self.session = None
            return
        session.detach()
        assert session.next_timer() is None, "a timer without a transport"
        assert session.kept_bytes == self.room.size <= limits.KEPT_BYTES_MAX, "what is kept is not what is counted"
        if self.role is Role.SERVER and not session._calls:
            given = handover.snapshot(session)
            restored = handover.restore(given, 1.0, idle_s=None, room=Room(limits.KEPT_BYTES_MAX))
            assert handover.snapshot(restored) == given, "a session does not survive being handed over"

    def end(self) -> list[str]:
        """End it; give all that happened."""
        if self.session is not None:
            self.session.close()
            self.session.release()
            assert self.session.state is State.CLOSED
        assert self.room.size == 0, "an ended session keeps frames"
        return self.story


def fuzz_resumption(data: bytes) -> None:
    """A session over several transports keeps its counts and bounds, and is the same one however the bytes are cut.

    The transports' flights are separated by `corpus.LOST`.
    """
    flights = data.split(corpus.LOST, 3)
    for role in Role:
        stories = []
        for piece_bytes in (1 << 16, 1):
            host = _Host(role)
            for flight in flights:
                host.meet(flight, piece_bytes)
            stories.append(host.end())
        assert stories[0] == stories[1], "another cut, another session"
