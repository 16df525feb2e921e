"""Byte streams on raw non-blocking sockets: TCP, and TLS above it.

Works on every asyncio loop with `add_reader`/`add_writer` (asyncio's selector loop, uvloop). A transport of asyncio
takes bytes into a buffer of its own and says nothing about when the kernel got them; a socket of our own does, and
that moment is the boundary of the two-phase rule (`Stream.sent_bytes`). TLS runs in memory (`ssl.SSLObject`) above
the same stream, so the boundary is as exact there.

This room raises `OSError` and `ssl.SSLError`; the rooms above give them their phase.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import select
import socket
import ssl
from collections.abc import Callable
from typing import Final, Protocol

from stormline.core import errors, limits
from stormline.core.values import Address
from stormline.net import tcpinfo
from stormline.net.clock import time_of
from stormline.net.meter import UNREAD
from stormline.net.system import LINUX, PORTABLE
from stormline.net.tcpinfo import TcpInfo

_log = logging.getLogger("stormline.net")
_SO_BINDTODEVICE: Final[int | None] = getattr(socket, "SO_BINDTODEVICE", None) if LINUX else None
_IPPROTO_MPTCP: Final[int | None] = 262 if LINUX else None
"""`socket.IPPROTO_MPTCP`, which a Python built on an old system lacks; other systems have MPTCP in other ways."""
_NO_MPTCP: Final = frozenset({errno.EPROTONOSUPPORT, errno.ENOPROTOOPT, errno.EINVAL, errno.EOPNOTSUPP})
"""How kernels refuse MPTCP: built without it, switched off, too old to know it, too old for TCP_NODELAY on it."""
_KEEPALIVE: Final[tuple[tuple[tuple[str, ...], int], ...]] = (
    ()
    if PORTABLE
    else (
        (("TCP_KEEPIDLE", "TCP_KEEPALIVE"), limits.TCP_KEEPALIVE_IDLE_S),  # the second is macOS's name for the same
        (("TCP_KEEPINTVL",), limits.TCP_KEEPALIVE_INTERVAL_S),
        (("TCP_KEEPCNT",), limits.TCP_KEEPALIVE_PROBES),
    )
)
"""Names of socket options, the first that this system has counts, and their values."""


class Stream(Protocol):
    """A two-way stream of bytes to one peer. One task may read while another writes.

    Attributes:
        peer: the far end.
        local: our end.
        alpn: the application protocol agreed in TLS, None where none was.
    """

    peer: Address
    local: Address
    alpn: str | None

    @property
    def sent_bytes(self) -> int:
        """Application bytes of which the kernel has taken at least a part, over the stream's life.

        Stays readable after `close`. While it has not grown since a request was begun, no byte of that request
        can have reached the peer.
        """
        ...

    @property
    def closed(self) -> bool:
        """True after `close`."""
        ...

    @property
    def heard_at(self) -> float:
        """The loop's time when bytes of the peer were last taken off the socket, or when it was connected.

        It moves only while somebody reads; what the kernel holds unread is in `tcp_info` (`heard_age_s`).
        """
        ...

    def leave_quiet(self) -> None:
        """Have the kernel ask the peer for no signs of life: who uses the stream does."""
        ...

    def tcp_info(self) -> TcpInfo | None:
        """Say what the kernel knows about the connection below, without waiting.

        None where it cannot be read: not on this system, switched off, closed or broken.
        """
        ...

    async def send_all(self, data: bytes | memoryview) -> None:
        """Send every byte; return when the kernel has taken them all.

        Cancelled in the middle, the stream is closed: a part may be out. `sent_bytes` stays true. After a failure
        the stream cannot send again, but what the peer had sent before can still be received.

        Raises:
            OSError: the connection is broken or closed.
            ssl.SSLError: TLS is broken.
            LocalProtocolError: another task is sending.
        """
        ...

    def send_nowait(self, data: bytes | memoryview) -> int:
        """Take over what can go without waiting; give the number of bytes, 0 where none can.

        The kernel may not have all of them yet: see `has_unsent`. What is left of `data` is the caller's.

        Raises:
            OSError: the connection is broken or closed.
            ssl.SSLError: TLS is broken.
            LocalProtocolError: another task is sending.
        """
        ...

    @property
    def has_unsent(self) -> bool:
        """True where the kernel does not have all that `send_nowait` took over: the rest of one TLS record.

        It goes before anything that is sent later. `send_all`, also of nothing, waits until it is out; closed before
        that, the stream drops it.
        """
        ...

    async def receive(self, size_max: int = limits.RECEIVE_BYTES_MAX) -> bytes:
        """Give the next bytes, at least one and at most `size_max`; `b""` at a clean end of the stream.

        Cancellation loses no byte: the next call goes on where this one was.

        Raises:
            OSError: the connection is broken or closed (`ConnectionAbortedError` where `close` was called).
            ssl.SSLEOFError: TLS ended without close_notify: what came may be cut short (RFC 8446 section 6.1).
            ssl.SSLError: TLS is broken otherwise.
            LocalProtocolError: another task is receiving.
        """
        ...

    def receive_nowait(self, size_max: int = limits.RECEIVE_BYTES_MAX) -> bytes | None:
        """Give what is there without waiting: None for nothing yet, else as `receive`, which no task may be in.

        Raises:
            OSError: see `receive`.
        """
        ...

    def is_readable(self) -> bool:
        """Say, without waiting, whether `receive` has something: bytes, the end, or an error.

        For a connection at rest that means: do not use it again.
        """
        ...

    def close(self) -> None:
        """Close at once; may be called again. A pending `send_all` or `receive` ends with ConnectionAbortedError."""
        ...


def reason_of(error: BaseException) -> str:
    """Say in a few words why an operation of this room failed; names no data."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate refused: {error.verify_message or error.reason}"
    if isinstance(error, ssl.SSLEOFError):
        return "TLS cut off"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or str(error)).lower().replace('_', ' ')}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__


def closed_error() -> OSError:
    """Make what a closed stream raises."""
    return ConnectionAbortedError(errno.ECONNABORTED, "the stream was closed here")


class TcpStream:
    """`Stream` over one connected TCP or MPTCP socket, which it owns.

    The loop watches for reading from the first wait on, and takes bytes off the socket for a task that waits and at
    most what that task asked for. The first event that finds no task waiting ends the watch: the bytes stay in the
    kernel, whose full buffer stops the peer, and who always comes back in time never pays for watching again.

    Args:
        sock: connected and non-blocking.
        loop: the loop it is used on.
        tcp_info: answer `tcp_info` where the system can; off, it is as on a system that cannot.

    Attributes:
        heard_at: see `Stream.heard_at`.
        meter: counts what passes.
    """

    __slots__ = (
        "_arrived",
        "_broken",
        "_drained",
        "_eager",
        "_fd",
        "_loop",
        "_poll",
        "_reader",
        "_receiving",
        "_sending",
        "_sent",
        "_size_max",
        "_sock",
        "_tcp_info",
        "_time",
        "_watcher",
        "_watching",
        "_writer",
        "alpn",
        "heard_at",
        "local",
        "meter",
        "peer",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, *, tcp_info: bool = True) -> None:
        self._loop = loop
        self._tcp_info = tcp_info
        self._time = time_of(loop)
        self.heard_at = self._time()
        self._fd = sock.fileno()  # a loop is given the number: asked about an object, selectors formats its repr
        self._reader: asyncio.Future[None] | None = None  # set while a task waits for bytes
        self._size_max = 0  # how many it asked for
        self._watching = False  # the loop watches for reading
        self._arrived: bytes | OSError | None = None  # taken off the socket for a task that has not come for it yet
        self._drained = False  # the socket was just empty: asking it again before the loop says so would be in vain
        self._writer: asyncio.Future[None] | None = None  # set exactly while the loop watches for writing
        self._receiving = self._sending = False
        self._broken = False  # a send failed: what follows would not join what came before
        self._sent = 0
        self._eager = 0
        self.meter = UNREAD
        self.alpn: str | None = None
        self.peer = Address(*sock.getpeername()[:2])
        self.local = Address(*sock.getsockname()[:2])
        self._sock: socket.socket | None = sock
        self._watcher: Callable[[], None] | None = None  # called in the place of a task that waits for bytes
        self._poll: select.poll | None = None  # made when it is first asked whether it is readable

    @property
    def sent_bytes(self) -> int:
        """Bytes the kernel has taken."""
        return self._sent

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._sock is None

    def leave_quiet(self) -> None:
        """See `Stream.leave_quiet`."""
        with contextlib.suppress(OSError):
            if self._sock is not None:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)

    def tcp_info(self) -> TcpInfo | None:
        """See `Stream.tcp_info`."""
        if self._sock is None or not self._tcp_info:
            return None
        return tcpinfo.read(self._sock)

    async def send_all(self, data: bytes | memoryview) -> None:
        """See `Stream.send_all`."""
        if self._sending:
            raise errors.LocalProtocolError("another task is sending on this stream")
        self._sending = True
        try:
            offset = self._send(data)
            while offset < len(data):
                await self._wait_writable()
                offset += self._send(memoryview(data)[offset:])
            self._eager += 1
            if self._eager >= limits.EAGER_OPERATIONS_MAX:
                await self._give_turn()
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._sending = False

    def send_nowait(self, data: bytes | memoryview) -> int:
        """See `Stream.send_nowait`: here it is what the kernel takes."""
        if self._sending:
            raise errors.LocalProtocolError("another task is sending on this stream")
        return self._send(data)

    @property
    def has_unsent(self) -> bool:
        """See `Stream.has_unsent`: never here."""
        return False

    def _send(self, data: bytes | memoryview) -> int:
        if self._sock is None:
            raise closed_error()
        if self._broken:
            raise BrokenPipeError(errno.EPIPE, "an earlier send on this stream failed")
        # What is sent now may be answered before the next `receive`; where the loop watches, it says so soon enough.
        self._drained = self._watching
        try:
            taken = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._broken = True
            raise
        self._sent += taken
        self.meter.bytes_up += taken
        return taken

    async def receive(self, size_max: int = limits.RECEIVE_BYTES_MAX) -> bytes:
        """See `Stream.receive`."""
        if self._receiving:
            raise errors.LocalProtocolError("another task is receiving on this stream")
        self._receiving = True
        try:
            self._eager += 1
            if self._eager >= limits.EAGER_OPERATIONS_MAX:
                await self._give_turn()  # before the bytes are taken: a cancellation here loses none
            data = None if self._drained and self._arrived is None else self.receive_nowait(size_max)
            while data is None:
                try:
                    await self._readable(size_max)
                except BaseException:
                    self._drained = False  # given up before the loop had its say: the next call asks for itself
                    raise
                finally:
                    self._reader = None
                data = self.receive_nowait(size_max)
            return data
        finally:
            self._receiving = False

    def receive_nowait(self, size_max: int = limits.RECEIVE_BYTES_MAX) -> bytes | None:
        """See `Stream.receive_nowait`."""
        if self._sock is None:
            raise closed_error()
        if self._arrived is None:
            if self._drained and self._watcher is not None:
                return None  # the loop says when there is more
            return self._recv(self._sock, size_max)
        arrived, self._arrived = self._arrived, None
        if isinstance(arrived, OSError):
            raise arrived
        if len(arrived) > size_max:  # taken for a task that asked for more, and was cancelled
            self._arrived = arrived[size_max:]
        return arrived[:size_max]

    def _recv(self, sock: socket.socket, size_max: int) -> bytes | None:
        try:
            data = sock.recv(size_max)
        except (BlockingIOError, InterruptedError):
            self._drained = True
            return None
        if data:
            self._drained = len(data) < size_max
            self.heard_at = self._time()
            self.meter.bytes_down += len(data)
        return data

    def watch(self, watcher: Callable[[], None]) -> bool:
        """Have `watcher` called whenever bytes, the end or an error may have come, for `receive_nowait` to tell.

        From then on nobody calls `receive`. It is called once more when the stream has been closed here. A task that
        waits in `receive` costs a turn of the event loop more for everything that comes.

        Returns:
            True; a stream that cannot do it gives False and changes nothing.
        """
        if self._sock is None or self._receiving:
            return False
        self._watcher = watcher
        if not self._watching:
            self._loop.add_reader(self._fd, self._on_readable)
            self._watching = True
        return True

    def is_readable(self) -> bool:
        """See `Stream.is_readable`; a closed stream is readable, as `receive` fails at once."""
        if self._sock is None or self._arrived is not None:
            return True
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self._fd, select.POLLIN)
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """See `Stream.close`."""
        sock, self._sock = self._sock, None
        if sock is None:
            return
        # The loop must forget the descriptor before it is closed: its number may be another socket's a moment later.
        if self._watching:
            self._watching = False
            self._loop.remove_reader(self._fd)
        self._arrived = None
        if self._watcher is not None:
            watcher, self._watcher = self._watcher, None
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon(watcher)
        if self._reader is not None:
            _fail(self._reader)
            self._reader = None
        if self._writer is not None:
            self._loop.remove_writer(self._fd)
            _fail(self._writer)
            self._writer = None
        sock.close()

    async def _give_turn(self) -> None:
        """Let other tasks run now and then, however fast the peer is."""
        self._eager = 0
        await asyncio.sleep(0)

    def _readable(self, size_max: int) -> asyncio.Future[None]:
        """Give what is done when something has arrived for this task, or is said to be there."""
        if self._sock is None:
            raise closed_error()
        self._eager = 0
        self._size_max = size_max
        waiter = self._reader = self._loop.create_future()
        if not self._watching:
            self._loop.add_reader(self._fd, self._on_readable)
            self._watching = True
        return waiter

    def _on_readable(self) -> None:
        """Take what has come for the task that waits, or stop watching where none does."""
        if self._watcher is not None:
            self._drained = False
            self._watcher()
            return
        waiter, sock = self._reader, self._sock
        if waiter is None or waiter.done() or sock is None:
            if self._watching:
                self._watching = False
                self._loop.remove_reader(self._fd)
            return
        try:
            self._arrived = self._recv(sock, self._size_max)
        except OSError as error:
            self._arrived = error  # the kernel tells an error once
        if self._arrived is not None:
            waiter.set_result(None)

    async def _wait_writable(self) -> None:
        if self._sock is None:
            raise closed_error()
        self._eager = 0
        waiter = self._writer = self._loop.create_future()
        self._loop.add_writer(self._fd, _wake, waiter)
        try:
            await waiter
        finally:
            if self._writer is waiter:
                self._writer = None
                self._loop.remove_writer(self._fd)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _fail(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(closed_error())


def _new_socket(family: socket.AddressFamily, *, mptcp: bool) -> socket.socket:
    """Make a socket that sends small writes at once: of MPTCP where it is wanted and the kernel has it."""
    if mptcp and _IPPROTO_MPTCP is not None:
        try:
            return _set_up(socket.socket(family, socket.SOCK_STREAM, _IPPROTO_MPTCP))
        except OSError as error:
            if error.errno not in _NO_MPTCP:
                raise
            _log.debug("no MPTCP here, TCP instead: %s", error.strerror)
    return _set_up(socket.socket(family, socket.SOCK_STREAM))


def _set_up(sock: socket.socket) -> socket.socket:
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError:
        sock.close()
        raise
    _keep_alive(sock)
    return sock


def _keep_alive(sock: socket.socket) -> None:
    """Have the kernel ask a silent peer for signs of life, where it lets us say when."""
    with contextlib.suppress(OSError):
        for names, value in _KEEPALIVE:
            option = next((getattr(socket, name) for name in names if hasattr(socket, name)), None)
            if option is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # last: not at the system's own pace, which is hours


def bind_device(sock: socket.socket, device: str) -> None:
    """Have a socket go out by one network interface.

    Raises:
        OSError: the system cannot, there is no such interface, or it is not allowed.
    """
    if _SO_BINDTODEVICE is None:  # to go out by another way than the one that was asked for would be worse
        raise OSError(errno.ENOPROTOOPT, "this system binds no connection to an interface")
    sock.setsockopt(socket.SOL_SOCKET, _SO_BINDTODEVICE, device.encode())


async def open_tcp(
    address: Address,
    *,
    mptcp: bool = False,
    tcp_info: bool = True,
    device: str | None = None,
    segment_bytes: int | None = None,
) -> TcpStream:
    """Connect to one address; small writes are sent at once (TCP_NODELAY).

    A peer that is silent is asked for signs of life where the system lets us say when; one that gives none ends the
    connection (`ETIMEDOUT`) after `limits.TCP_KEEPALIVE_IDLE_S` and `limits.TCP_KEEPALIVE_PROBES` pauses of
    `limits.TCP_KEEPALIVE_INTERVAL_S`.

    Cancelled or failed, it leaves no descriptor behind. It waits as long as the kernel does (minutes): the caller
    brings the deadline. `connect_ex` with `add_writer` instead of `loop.sock_connect`, which refuses MPTCP sockets.

    Args:
        address: an IP literal, IPv6 with a `%scope` where it needs one, and a port.
        mptcp: ask for Multipath TCP (RFC 8684); it is TCP where this kernel, the path or the peer does not have it.
        tcp_info: see `TcpStream`.
        device: go out by the network interface of this name, whatever the system's routes prefer (Linux).
        segment_bytes: the most that a segment may carry, either way (RFC 9293 section 3.7.1); None: as the link has it.

    Raises:
        OSError: no connection; `ConnectionRefusedError`, `TimeoutError` and so on by errno.
        LocalProtocolError: the host is not an IP literal.
    """
    try:
        literal = ipaddress.ip_address(address.host)
    except ValueError:
        raise errors.LocalProtocolError(f"open_tcp takes an IP literal, not {address.host[:80]!r}") from None
    target: tuple[str, int] | tuple[str, int, int, int] = (address.host, address.port)
    if literal.version == 6:
        scope = literal.scope_id
        scope_id = 0 if scope is None else int(scope) if scope.isdecimal() else socket.if_nametoindex(scope)
        target = (address.host.partition("%")[0], address.port, 0, scope_id)
    loop = asyncio.get_running_loop()
    sock = _new_socket(socket.AF_INET6 if literal.version == 6 else socket.AF_INET, mptcp=mptcp)
    try:
        if device is not None:
            bind_device(sock, device)
        if segment_bytes is not None and hasattr(socket, "TCP_MAXSEG"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
        code = sock.connect_ex(target)
        if code in (errno.EINPROGRESS, errno.EINTR):
            waiter = loop.create_future()
            loop.add_writer(sock.fileno(), _wake, waiter)
            try:
                await waiter
            finally:
                loop.remove_writer(sock.fileno())
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        stream = TcpStream(sock, loop, tcp_info=tcp_info)
        if stream.local == stream.peer:
            # A free local port was its own target: TCP's simultaneous open met itself. Nobody listens there.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        return stream
    except BaseException:
        sock.close()
        raise
