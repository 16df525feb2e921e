"""Datagrams to one peer over a socket of our own: what the kernel has taken is known to the datagram.

This room raises `OSError`; the rooms above give it its phase.
"""

import asyncio
import collections
import contextlib
import errno
import ipaddress
import socket
from collections.abc import Callable, Iterable
from typing import Final

from stormline.core import errors, limits_quic
from stormline.core.values import Address
from stormline.net.clock import time_of
from stormline.net.stream import bind_device, closed_error
from stormline.net.system import LINUX

_MTU_DISCOVER: Final = ((socket.IPPROTO_IP, 10), (socket.IPPROTO_IPV6, 23)) if LINUX else ()
"""IP_MTU_DISCOVER and IPV6_MTU_DISCOVER."""
_PMTUDISC_PROBE: Final = 3
"""Never fragment, and leave it to us how large a datagram passes (RFC 9000 section 14)."""


class UdpSocket:
    """A connected UDP socket, watched by the loop from the start. Made by `open_udp`.

    Args:
        sock: connected and non-blocking; owned from now on.
        loop: the loop it is used on.

    Attributes:
        peer: the far end.
        local: our end.
        heard_at: the loop's time when a datagram of the peer was last taken off the socket, or when it was made.
        sent: datagrams that the kernel has taken over its life.
        received: bytes taken off the socket.
        on_readable: called when something has come, or an error.
        on_writable: called when the kernel has taken everything that was held.
    """

    __slots__ = ("_fd", "_held", "_loop", "_sock", "_time", "_writing", "heard_at", "local", "on_readable",
                 "on_writable", "peer", "received", "sent")  # fmt: skip

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._time = time_of(loop)
        self._sock: socket.socket | None = sock
        self._fd = sock.fileno()
        self._held: collections.deque[bytes] = collections.deque()
        self._writing = False
        self.heard_at = self._time()
        self.sent = self.received = 0
        self.on_readable: Callable[[], None] = _nothing
        self.on_writable: Callable[[], None] = _nothing
        self.peer = Address(*sock.getpeername()[:2])
        self.local = Address(*sock.getsockname()[:2])
        loop.add_reader(self._fd, self._readable)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._sock is None

    @property
    def held(self) -> int:
        """Datagrams that the kernel has not taken yet."""
        return len(self._held)

    def _readable(self) -> None:
        self.on_readable()

    def receive(self) -> list[bytes]:
        """Give what has come, at most `limits_quic.QUIC_DATAGRAMS_PER_TURN` datagrams; never waits.

        Raises:
            OSError: it is closed, or the path has said no (`ConnectionRefusedError` and the like); it goes on.
        """
        sock = self._sock
        if sock is None:
            raise closed_error()
        came: list[bytes] = []
        try:
            while len(came) < limits_quic.QUIC_DATAGRAMS_PER_TURN:
                came.append(sock.recv(limits_quic.QUIC_DATAGRAM_BYTES))
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            if not came:
                raise
        if came:
            self.heard_at = self._time()
            self.received += sum(map(len, came))
        return came

    def send(self, datagrams: Iterable[bytes]) -> None:
        """Hand datagrams to the kernel; what it does not take now is held, in order, until it does.

        One that is too large for the path is lost, as it would be on the way.

        Raises:
            OSError: it is closed, or the system has no way to the peer; what was held is dropped.
        """
        self._held.extend(datagrams)
        if not self._writing:
            self._flush()

    def _flush(self) -> None:
        sock, held = self._sock, self._held
        if sock is None:
            raise closed_error()
        while held:
            try:
                sock.send(held[0])
            except (BlockingIOError, InterruptedError):
                if not self._writing:
                    self._writing = True
                    self._loop.add_writer(self._fd, self._writable)
                return
            except OSError as error:
                if error.errno == errno.EMSGSIZE:
                    held.popleft()
                    continue
                held.clear()
                raise
            held.popleft()
            self.sent += 1

    def _writable(self) -> None:
        with contextlib.suppress(OSError):  # a path that is gone: QUIC's timers deal with the loss
            self._flush()
        if not self._held and self._sock is not None:
            self._writing = False
            self._loop.remove_writer(self._fd)
            self.on_writable()

    def close(self) -> None:
        """Close at once; may be called again."""
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.remove_reader(self._fd)
            if self._writing:
                self._loop.remove_writer(self._fd)
            self._held.clear()
            sock.close()


def _nothing() -> None:
    """Do nothing, where nobody listens yet."""


def open_udp(address: Address, *, device: str | None = None) -> UdpSocket:
    """Give a socket that talks to one address. Nothing is sent. To be called inside a running loop.

    Args:
        address: an IP literal, IPv6 with a `%scope` where it needs one, and a port.
        device: go out by the network interface of this name, whatever the system's routes prefer (Linux).

    Raises:
        OSError: the system has no way there.
        LocalProtocolError: the host is not an IP literal.
    """
    try:
        literal = ipaddress.ip_address(address.host)
    except ValueError:
        raise errors.LocalProtocolError(f"open_udp takes an IP literal, not {address.host[:80]!r}") from None
    target: tuple[str, int] | tuple[str, int, int, int] = (address.host, address.port)
    if literal.version == 6:
        scope = literal.scope_id
        scope_id = 0 if scope is None else int(scope) if scope.isdecimal() else socket.if_nametoindex(scope)
        target = (address.host.partition("%")[0], address.port, 0, scope_id)
    sock = socket.socket(socket.AF_INET6 if literal.version == 6 else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        if device is not None:
            bind_device(sock, device)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, limits_quic.QUIC_SOCKET_BYTES)
        for level, option in _MTU_DISCOVER[literal.version == 6 :][:1]:
            sock.setsockopt(level, option, _PMTUDISC_PROBE)
        sock.connect(target)
        return UdpSocket(sock, asyncio.get_running_loop())
    except BaseException:
        sock.close()
        raise
