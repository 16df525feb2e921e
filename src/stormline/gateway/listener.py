"""Listening for clients: several ports, and on each several carriers, told apart by what comes first.

| first byte | then                | it is                                                         |
|------------|---------------------|---------------------------------------------------------------|
| `0x16`     | TLS, ALPN `sl/1`    | a session                                                     |
| `0x16`     | TLS, other ALPN     | HTTP: one of the two below, inside TLS                        |
| `0x0d`     | PROXY header        | one of the others, for the peer the header names              |
| `G`        | `GET`               | HTTP: an upgrade to a WebSocket, a session inside             |
| `P`        | `POST`              | HTTP: a piece of a session over short HTTP                    |
| `0x00`     |                     | a session without TLS                                         |

What has no TLS is taken only at doors that are plain, and from fronts that ended it. Fronts are addresses from which
every connection must begin with a PROXY header; from all others none is taken.

The kernel keeps the first bytes until it is known what they are (MSG_PEEK), so TLS, the WebSocket and the session
each see their connection from its first byte.

No more are begun than the node is quick enough for (`policy.intake`). The others wait, for a while, then they are
reset: a client that hears so comes back later, one that waits for longer has given up when its turn comes. Why
connections ended before they were sessions is counted.
"""

import asyncio
import contextlib
import functools
import ipaddress
import logging
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, cast

from stormline.core import errors, limits, limits_carriers, limits_platform
from stormline.core.values import Address
from stormline.gateway.carrier import Carrier
from stormline.gateway.short import Channels
from stormline.gateway.short_http import HttpStart, ShortConnection
from stormline.gateway.websocket import WebSocketCarrier
from stormline.policy.intake import Intake
from stormline.web.peers import line_of
from stormline.wire import messages as m
from stormline.wire import proxyprotocol

_log = logging.getLogger("stormline.gateway")

_IPPROTO_MPTCP: Final = 262
_TCP_NOTSENT_LOWAT: Final = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_HANDSHAKE: Final = 0x16
"""TLS record type of a ClientHello (RFC 8446 section 5.1)."""
_PROXY: Final = proxyprotocol.SIGNATURE[0]
_FRAME: Final = 0x00
"""First byte of a frame: its length is below 2^24."""
_GET: Final = ord("G")
_ESTABLISHED: Final = 1
"""State of a TCP connection that neither side has ended, first byte of Linux's `struct tcp_info`."""
_AT_ONCE: Final = struct.pack("ii", 1, 0)
"""SO_LINGER that makes a close a reset: whoever is turned away knows it at once, and nothing of it stays here."""
_POST: Final = ord("P")


class Door(NamedTuple):
    """An address to listen on.

    Attributes:
        address: IP address and port, 0 for a free one.
        plain: sessions without TLS are taken too.
    """

    address: Address
    plain: bool = False


def listen(address: Address, *, mptcp: bool = True, reuse_port: bool = False) -> socket.socket:
    """Make a listening socket: of MPTCP (RFC 8684) where this kernel has it, else of TCP.

    A client that does not ask for MPTCP gets TCP from either.

    Args:
        address: where.
        mptcp: ask for MPTCP.
        reuse_port: let other processes of this user listen on the same port; the kernel spreads connections.

    Raises:
        PlatformError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = _new_socket(family, mptcp=mptcp)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(tuple(address))
        sock.listen(limits_platform.GATEWAY_BACKLOG)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        raise errors.PlatformError(f"gateway: cannot listen on {address}: {reason}") from error
    return sock


def _new_socket(family: socket.AddressFamily, *, mptcp: bool) -> socket.socket:
    if mptcp:
        with contextlib.suppress(OSError):
            sock = socket.socket(family, socket.SOCK_STREAM, _IPPROTO_MPTCP)
            try:  # kernels before 6.9 have MPTCP without what a session sets on its connection
                sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, limits_platform.SEND_UNSENT_BYTES)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:
                sock.close()
                raise
            return sock
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what is accepted inherits it
    return sock


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    sock.close()


class Listener:
    """Takes connections at several doors and hands each to the protocol object that fits.

    Made inside a running loop; takes connections from `start` on.

    Args:
        doors: where to listen.
        session: makes the protocol object of a session.
        tls: gives the context for a connection that comes now, by what has come of its ClientHello.
        origins: pages that may open a WebSocket, see `WebSocketCarrier`.
        fronts: networks (`10.0.0.0/8`) whose connections begin with a PROXY header.
        mptcp: see `listen`.
        reuse_port: see `listen`.
        intake: the pace of new connections.
        connected: gives the number of connections that stand.
        connections_max: connections at once, those that do not stand yet included; beyond it they are reset.
        channels: serve short HTTP; None: it is not served.

    Attributes:
        addresses: where it listens, in the order of `doors`; the real ports.
        closes: connections that did not come to stand, by the reason.
        leaving: it was stopped: what still comes to stand is sent away.

    Raises:
        PlatformError: an address is taken or not ours.
    """

    def __init__(
        self,
        doors: Sequence[Door],
        session: Callable[[], asyncio.Protocol],
        tls: Callable[[bytes], ssl.SSLContext],
        *,
        origins: Sequence[str] = (),
        fronts: Sequence[str] = (),
        mptcp: bool = True,
        reuse_port: bool = False,
        intake: Intake | None = None,
        connected: Callable[[], int] = lambda: 0,
        connections_max: int = limits_platform.SESSIONS_MAX,
        channels: Channels | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.intake = intake or Intake(self._loop.time())
        self.closes: Counter[str] = Counter()
        self.leaving = False
        self._connected = connected
        self._connections_max = connections_max
        self._lines: dict[str, dict[_Arrival, None]] = {}  # of each line the oldest first
        self._waiting: dict[_Arrival, float] = {}  # since when they wait to be begun, the first first
        self._beginning: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self.session = session
        self.channels = channels
        self.tls = tls
        self.origins = origins
        self._fronts = [ipaddress.ip_network(each) for each in fronts]
        self._arrivals: dict[_Arrival, None] = {}  # the oldest first
        self._timer: asyncio.TimerHandle | None = None
        self._paused: asyncio.TimerHandle | None = None
        self._doors: list[tuple[socket.socket, bool]] = []
        try:
            for door in doors:
                self._doors.append((listen(door.address, mptcp=mptcp, reuse_port=reuse_port), door.plain))
        except errors.PlatformError:
            self.close()
            raise
        self.addresses = [Address(*sock.getsockname()[:2]) for sock, _ in self._doors]

    def start(self) -> None:
        """Take connections from now on."""
        self._look_later()
        self._resume()

    def stop(self) -> None:
        """Take no more connections; those that came before, also where nobody has looked at them yet, go on.

        May be called again.
        """
        self.leaving = True
        for sock, plain in self._doors:
            self._accept(sock, plain, to_the_end=True)
        self._pause()
        doors, self._doors = self._doors, []
        for sock, _ in doors:
            sock.close()

    def close(self) -> None:
        """Take no more connections, and drop those that are not sessions yet. May be called again."""
        self._pause()
        doors, self._doors = self._doors, []
        for sock, _ in doors:
            sock.close()
        for arrival in list(self._arrivals):
            arrival.drop("stopping")
        for timer in (self._timer, self._look, self._beginning):
            if timer is not None:
                timer.cancel()
        self._timer = self._look = self._beginning = None

    @property
    def arriving(self) -> int:
        """Connections that are not sessions yet."""
        return len(self._arrivals)

    def is_front(self, host: str) -> bool:
        """Say whether connections from an address begin with a PROXY header."""
        if not self._fronts:
            return False
        address = ipaddress.ip_address(host.partition("%")[0])
        return any(address in network for network in self._fronts)

    def _look_later(self) -> None:
        due = self._loop.time() + limits_carriers.INTAKE_LOOK_S
        self._look = self._loop.call_at(due, self._look_at_lag, due)

    def _look_at_lag(self, due: float) -> None:
        self.intake.look(max(0.0, self._loop.time() - due))
        self._look_later()

    def _resume(self) -> None:
        self._paused = None
        for sock, plain in self._doors:
            self._loop.add_reader(sock.fileno(), self._accept, sock, plain)

    def _pause(self) -> None:
        if self._paused is not None:
            self._paused.cancel()
            self._paused = None
        for sock, _ in self._doors:
            self._loop.remove_reader(sock.fileno())

    def _pause_for(self, seconds: float) -> None:
        self._pause()
        self._paused = self._loop.call_later(seconds, self._resume)

    def _accept(self, door: socket.socket, plain: bool, *, to_the_end: bool = False) -> None:
        for _ in range(limits_platform.GATEWAY_BACKLOG if to_the_end else limits_carriers.ACCEPTS_PER_TURN):
            if not to_the_end and len(self._waiting) >= limits_carriers.INTAKE_WAITING_MAX:
                self._pause_for(limits_carriers.INTAKE_PAUSE_S)
                return
            try:
                sock, peer = door.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.error("gateway: cannot accept: %s", error.strerror)
                self.closes["cannot-accept"] += 1
                self._pause_for(limits_carriers.ACCEPT_PAUSE_S)
                return
            sock.setblocking(False)
            address = Address(*peer[:2])
            line = line_of(address.host)
            if not self._make_room(line, address.host):
                self.closes["full"] += 1
                _reset(sock)
                continue
            arrival = _Arrival(self, sock, address, line, plain=plain)
            self._arrivals[arrival] = None
            self._lines.setdefault(line, {})[arrival] = None
            if self._timer is None:
                self._timer = self._loop.call_later(limits_platform.TLS_HANDSHAKE_TIMEOUT_S, self._sweep)
            arrival.look()

    def _make_room(self, line: str, host: str) -> bool:
        """Have room for one more of a line: the oldest that is no session yet goes; False where there is none."""
        same_line = self._lines.get(line, {})
        if len(same_line) >= limits_carriers.ARRIVALS_PER_LINE_MAX and not self.is_front(host):
            next(iter(same_line)).drop("crowded-line")
        elif len(self._arrivals) >= limits_carriers.ARRIVALS_MAX:
            next(iter(self._arrivals)).drop("crowded")
        elif len(self._arrivals) + self._connected() >= self._connections_max:
            if not self._arrivals:
                return False
            next(iter(self._arrivals)).drop("full")
        return True

    def wait(self, arrival: "_Arrival") -> None:
        """Begin a connection when its turn comes."""
        self._waiting[arrival] = self._loop.time()
        if self._beginning is None:
            self._begin()

    def _begin(self) -> None:
        self._beginning = None
        now = self._loop.time()
        while self._waiting:
            arrival, since = next(iter(self._waiting.items()))
            if now - since > limits_carriers.INTAKE_WAIT_S:
                arrival.drop("overloaded", reset=True)
            elif arrival.given_up:
                arrival.drop("gone")
            elif self.intake.room(now):
                del self._waiting[arrival]
                self.intake.began()
                arrival.begin()
            else:
                pause_s = max(self.intake.wait_s(), limits_carriers.INTAKE_PAUSE_S)
                self._beginning = self._loop.call_later(pause_s, self._begin)
                return

    def _sweep(self) -> None:
        """Drop those that are late; one timer serves all, the oldest stands first."""
        self._timer = None
        now = self._loop.time()
        for arrival in list(self._arrivals):
            if arrival.due > now:
                self._timer = self._loop.call_at(arrival.due, self._sweep)
                return
            _log.info("%s: nothing that could be served came in time", arrival.peer)
            arrival.drop("late")

    def over(self, arrival: "_Arrival") -> bool:
        """Count a connection no longer: it is a session, or gone. False where that was known."""
        if arrival not in self._arrivals:
            return False
        del self._arrivals[arrival]
        self._waiting.pop(arrival, None)
        same_line = self._lines[arrival.line]
        del same_line[arrival]
        if not same_line:
            del self._lines[arrival.line]
        return True


class _Arrival(asyncio.Protocol):
    """One connection until its carrier stands.

    Attributes:
        peer: who is at the other end.
        line: the subscriber's line that the connection came from.
        due: when it is dropped, in the loop's time.
    """

    __slots__ = ("_first", "_front", "_header", "_hello", "_listener", "_loop", "_plain", "_sock", "_task", "_told",
                 "_transport", "due", "line", "peer")  # fmt: skip

    def __init__(self, listener: Listener, sock: socket.socket, peer: Address, line: str, *, plain: bool) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._first = -1
        self._sock: socket.socket | None = sock
        self._plain = plain
        self._front = listener.is_front(peer.host)
        self._hello = b""
        self._header = b""  # of the PROXY protocol, as far as it has come
        self._told: Address | None = None
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self.peer = peer
        self.line = line
        self.due = self._loop.time() + limits_platform.TLS_HANDSHAKE_TIMEOUT_S

    # -- the first bytes -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Look at the first byte, or wait for it."""
        sock = self._sock
        if sock is None:
            return
        try:
            first = self._peek(sock)
        except (BlockingIOError, InterruptedError):
            self._loop.add_reader(sock.fileno(), self.look)
            return
        except (OSError, errors.RemoteProtocolError) as error:
            _log.info("%s: %s", self.peer, error)
            self.drop("broken")
            return
        self._loop.remove_reader(sock.fileno())
        if first:
            self._enter(sock, first)
        else:
            self.drop("gone")

    def _peek(self, sock: socket.socket) -> bytes:
        """Give the first bytes of what is carried; none where the connection has ended."""
        if self._front and not self._read_header(sock):
            return b""
        return sock.recv(limits_carriers.PEEK_BYTES, socket.MSG_PEEK)

    def _read_header(self, sock: socket.socket) -> bool:
        """Take the PROXY header off, and not a byte of what follows; False where the connection has ended."""
        size = proxyprotocol.HEAD_BYTES
        while True:
            if len(self._header) >= proxyprotocol.HEAD_BYTES:
                size = proxyprotocol.size_of(self._header[: proxyprotocol.HEAD_BYTES])
                if len(self._header) == size:
                    break
            data = sock.recv(size - len(self._header))
            if not data:
                return False
            self._header += data
        told = proxyprotocol.parse(self._header)
        if told is not None:
            self._told = self.peer = told
        self._front, self._plain = False, True  # it has ended TLS, where there was any
        return True

    def _enter(self, sock: socket.socket, begin: bytes) -> None:
        """Have the connection handed to a transport, with TLS or as it is, when its turn comes."""
        first = begin[0]
        if first != _HANDSHAKE and not (self._plain and first in (_FRAME, _GET, _POST)):
            reason = "a PROXY header, and it is no front" if first == _PROXY else f"first byte {first:#04x}"
            _log.info("%s refused: %s", self.peer, reason)
            self.drop("not-served")
            return
        self._first = first
        self._hello = begin
        self._listener.wait(self)

    @property
    def given_up(self) -> bool:
        """The peer has ended its side, behind what it has sent."""
        if self._sock is None:
            return False
        with contextlib.suppress(OSError):
            return self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED
        return False

    def begin(self) -> None:
        """Its turn has come."""
        sock, self._sock = self._sock, None  # the transport's from now on
        if sock is not None:
            self._task = self._loop.create_task(self._connect(sock, self._hello))
            self._hello = b""

    async def _connect(self, sock: socket.socket, begin: bytes) -> None:
        try:
            if self._first == _HANDSHAKE:
                await self._loop.connect_accepted_socket(
                    lambda: self,
                    sock,
                    ssl=self._listener.tls(begin),
                    ssl_handshake_timeout=limits_platform.TLS_HANDSHAKE_TIMEOUT_S,
                    ssl_shutdown_timeout=limits.CLOSE_FLUSH_S,
                )
            else:
                await self._loop.connect_accepted_socket(lambda: self, sock)
        except OSError as error:  # ssl.SSLError is one
            _log.info("%s: no TLS: %s", self.peer, error)
            if self._listener.over(self):
                self._listener.closes["no-tls"] += 1
        finally:
            self._task = None

    def drop(self, why: str, *, reset: bool = False) -> None:
        """Close it, however far it is; `why` is counted."""
        if self._listener.over(self):
            self._listener.closes[why] += 1
        if self._sock is not None:
            self._loop.remove_reader(self._sock.fileno())
            _reset(self._sock) if reset else self._sock.close()
            self._sock = None
        elif self._transport is not None:
            self._transport.abort()
        elif self._task is not None:
            self._task.cancel()

    # -- the transport's callbacks, until it has its protocol object ---------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TLS stands, or there is none."""
        self._listener.intake.finished()
        self._transport = cast("asyncio.Transport", transport)
        tls = transport.get_extra_info("ssl_object")
        if self._first == _FRAME or (tls is not None and tls.selected_alpn_protocol() == m.ALPN):
            protocol = self._listener.session()
            self._listener.over(self)
        elif self._listener.channels is None:
            protocol = self._websocket()
        else:
            protocol = HttpStart(
                self._websocket, functools.partial(self._short, self._listener.channels), over=self._gone
            )
        self._transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._told is not None and isinstance(protocol, Carrier):
            protocol.peer = str(self._told)

    def _websocket(self) -> WebSocketCarrier:
        listener = self._listener
        return WebSocketCarrier(
            listener.session,
            origins=listener.origins,
            peer=self._told,
            stands=self._stands,
            leaving=lambda: listener.leaving,
        )

    def _short(self, channels: Channels) -> ShortConnection:
        return ShortConnection(channels, peer=self._told, stands=self._is_over)

    def _is_over(self) -> None:
        self._listener.over(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It ended before its TLS stood."""
        self._gone()

    def _gone(self) -> None:
        if self._listener.over(self):
            self._listener.closes["gone"] += 1

    def _stands(self, stands: bool) -> None:
        if self._listener.over(self) and not stands:
            self._listener.closes["no-websocket"] += 1
