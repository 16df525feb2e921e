"""Listening for clients: several ports, and on each several carriers, told apart by what comes first.

| first byte | then                | it is                                                         |
|------------|---------------------|---------------------------------------------------------------|
| `0x16`     | TLS, ALPN `sl/1`    | a session                                                     |
| `0x16`     | TLS, other ALPN     | HTTP: `GET` with an upgrade to a WebSocket, a session inside  |
| `0x0d`     | PROXY header        | one of the other three, for the peer the header names         |
| `G`        |                     | HTTP without TLS                                              |
| `0x00`     |                     | a session without TLS                                         |

What has no TLS is taken only at doors that are plain, and from fronts that ended it. Fronts are addresses from which
every connection must begin with a PROXY header; from all others none is taken.

The kernel keeps the first bytes until it is known what they are (MSG_PEEK), so TLS, the WebSocket and the session
each see their connection from its first byte.
"""

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, cast

from stormline.core import errors, limits, limits_carriers, limits_platform
from stormline.core.values import Address
from stormline.gateway.carrier import Carrier
from stormline.gateway.websocket import WebSocketCarrier
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

    Attributes:
        addresses: where it listens, in the order of `doors`; the real ports.

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
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.session = session
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
        self._paused = None
        for sock, plain in self._doors:
            self._loop.add_reader(sock.fileno(), self._accept, sock, plain)

    def close(self) -> None:
        """Take no more connections, and drop those that are not sessions yet. May be called again."""
        self._pause()
        doors, self._doors = self._doors, []
        for sock, _ in doors:
            sock.close()
        for arrival in list(self._arrivals):
            arrival.drop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

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

    def _pause(self) -> None:
        if self._paused is not None:
            self._paused.cancel()
            self._paused = None
        for sock, _ in self._doors:
            self._loop.remove_reader(sock.fileno())

    def _accept(self, door: socket.socket, plain: bool) -> None:
        for _ in range(limits_carriers.ACCEPTS_PER_TURN):
            try:
                sock, peer = door.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.error("gateway: cannot accept: %s", error.strerror)
                self._pause()
                self._paused = self._loop.call_later(limits_carriers.ACCEPT_PAUSE_S, self.start)
                return
            if len(self._arrivals) >= limits_carriers.ARRIVALS_MAX:
                next(iter(self._arrivals)).drop()
            sock.setblocking(False)
            arrival = _Arrival(self, sock, Address(*peer[:2]), plain=plain)
            self._arrivals[arrival] = None
            if self._timer is None:
                self._timer = self._loop.call_later(limits_platform.TLS_HANDSHAKE_TIMEOUT_S, self._sweep)
            arrival.look()

    def _sweep(self) -> None:
        """Drop those that are late; one timer serves all, the oldest stands first."""
        self._timer = None
        now = self._loop.time()
        for arrival in list(self._arrivals):
            if arrival.due > now:
                self._timer = self._loop.call_at(arrival.due, self._sweep)
                return
            _log.info("%s: nothing that could be served came in time", arrival.peer)
            arrival.drop()

    def over(self, arrival: "_Arrival") -> None:
        """Count a connection no longer: it is a session, or gone."""
        self._arrivals.pop(arrival, None)


class _Arrival(asyncio.Protocol):
    """One connection until its carrier stands.

    Attributes:
        peer: who is at the other end.
        due: when it is dropped, in the loop's time.
    """

    __slots__ = ("_first", "_front", "_header", "_listener", "_loop", "_plain", "_sock", "_task", "_told", "_transport",
                 "due", "peer")  # fmt: skip

    def __init__(self, listener: Listener, sock: socket.socket, peer: Address, *, plain: bool) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._first = -1
        self._sock: socket.socket | None = sock
        self._plain = plain
        self._front = listener.is_front(peer.host)
        self._header = b""  # of the PROXY protocol, as far as it has come
        self._told: Address | None = None
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self.peer = peer
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
            self.drop()
            return
        self._loop.remove_reader(sock.fileno())
        if first:
            self._enter(sock, first)
        else:
            self.drop()

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
        """Hand the connection to a transport: with TLS, or as it is."""
        first = begin[0]
        if first != _HANDSHAKE and not (self._plain and first in (_FRAME, _GET)):
            reason = "a PROXY header, and it is no front" if first == _PROXY else f"first byte {first:#04x}"
            _log.info("%s refused: %s", self.peer, reason)
            self.drop()
            return
        self._first = first
        self._sock = None  # the transport's from now on
        self._task = self._loop.create_task(self._connect(sock, begin))

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
            self._listener.over(self)
        finally:
            self._task = None

    def drop(self) -> None:
        """Close it, however far it is."""
        self._listener.over(self)
        if self._sock is not None:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            self._sock = None
        elif self._transport is not None:
            self._transport.abort()
        elif self._task is not None:
            self._task.cancel()

    # -- the transport's callbacks, until it has its protocol object ---------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TLS stands, or there is none."""
        self._transport = cast("asyncio.Transport", transport)
        tls = transport.get_extra_info("ssl_object")
        if self._first == _FRAME or (tls is not None and tls.selected_alpn_protocol() == m.ALPN):
            protocol = self._listener.session()
            self._listener.over(self)
        else:
            protocol = WebSocketCarrier(
                self._listener.session,
                origins=self._listener.origins,
                peer=self._told,
                stands=lambda: self._listener.over(self),
            )
        self._transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._told is not None and isinstance(protocol, Carrier):
            protocol.peer = str(self._told)

    def connection_lost(self, exc: Exception | None) -> None:
        """It ended before its TLS stood."""
        self._listener.over(self)
