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
from typing import Final, Protocol

from stormline.core import errors, limits
from stormline.core.values import Address
from stormline.net import tcpinfo
from stormline.net.meter import UNREAD
from stormline.net.sessions import SessionKey, TlsSessions, worth_keeping
from stormline.net.tcpinfo import TcpInfo

_log = logging.getLogger("stormline.net")

_TLS_RECORD_BYTES: Final = 16 * 1024
"""The most plain text one TLS record carries (RFC 8446 section 5.1)."""
_SO_BINDTODEVICE: Final = getattr(socket, "SO_BINDTODEVICE", 25)
_IPPROTO_MPTCP: Final = 262
"""`socket.IPPROTO_MPTCP`, which a Python built on an old system lacks."""
_NO_MPTCP: Final = frozenset({errno.EPROTONOSUPPORT, errno.ENOPROTOOPT, errno.EINVAL, errno.EOPNOTSUPP})
"""How kernels refuse MPTCP: built without it, switched off, too old to know it, too old for TCP_NODELAY on it."""
_KEEPALIVE: Final = (
    (("TCP_KEEPIDLE", "TCP_KEEPALIVE"), limits.TCP_KEEPALIVE_IDLE_S),  # the second is macOS's name for the same
    (("TCP_KEEPINTVL",), limits.TCP_KEEPALIVE_INTERVAL_S),
    (("TCP_KEEPCNT",), limits.TCP_KEEPALIVE_PROBES),
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


def _closed() -> OSError:
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

    __slots__ = ("_arrived", "_broken", "_drained", "_eager", "_fd", "_loop", "_poll", "_reader", "_receiving",
                 "_sending", "_sent", "_size_max", "_sock", "_tcp_info", "_watching", "_writer", "alpn", "heard_at",
                 "local", "meter", "peer")  # fmt: skip

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, *, tcp_info: bool = True) -> None:
        self._loop = loop
        self._tcp_info = tcp_info
        self.heard_at = loop.time()
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
        self._poll: select.poll | None = None  # made when it is first asked whether it is readable

    @property
    def sent_bytes(self) -> int:
        """Bytes the kernel has taken."""
        return self._sent

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._sock is None

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
            raise _closed()
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
            await self._give_turn()  # before the bytes are taken: a cancellation here loses none
            data = None if self._drained and self._arrived is None else self.receive_nowait(size_max)
            while data is None:
                await self._wait_readable(size_max)
                data = self.receive_nowait(size_max)
            return data
        finally:
            self._receiving = False

    def receive_nowait(self, size_max: int = limits.RECEIVE_BYTES_MAX) -> bytes | None:
        """See `Stream.receive_nowait`."""
        if self._sock is None:
            raise _closed()
        if self._arrived is None:
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
            self.heard_at = self._loop.time()
            self.meter.bytes_down += len(data)
        return data

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
        self._eager += 1
        if self._eager >= limits.EAGER_OPERATIONS_MAX:
            self._eager = 0
            await asyncio.sleep(0)

    async def _wait_readable(self, size_max: int) -> None:
        """Wait until something has arrived for this task, or is said to be there."""
        if self._sock is None:
            raise _closed()
        self._eager = 0
        self._size_max = size_max
        waiter = self._reader = self._loop.create_future()
        if not self._watching:
            self._loop.add_reader(self._fd, self._on_readable)
            self._watching = True
        try:
            await waiter
        except BaseException:
            self._drained = False  # given up before the loop had its say: the next call asks for itself
            raise
        finally:
            self._reader = None

    def _on_readable(self) -> None:
        """Take what has come for the task that waits, or stop watching where none does."""
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
            raise _closed()
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
        waiter.set_exception(_closed())


def _new_socket(family: socket.AddressFamily, *, mptcp: bool) -> socket.socket:
    """Make a socket that sends small writes at once: of MPTCP where it is wanted and the kernel has it."""
    if mptcp:
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


async def open_tcp(
    address: Address, *, mptcp: bool = False, tcp_info: bool = True, device: str | None = None
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
            sock.setsockopt(socket.SOL_SOCKET, _SO_BINDTODEVICE, device.encode())
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


class TlsStream:
    """`Stream` through TLS above another, which it owns. Made by `start_tls`.

    Attributes:
        resumed: an earlier session was resumed: no certificates were sent.
    """

    __slots__ = ("_incoming", "_key", "_offered", "_outgoing", "_piece_bytes", "_piece_mark", "_plain", "_raw",
                 "_receiving", "_sending", "_sent", "_sessions", "_shunned_in", "_starved", "_tls", "alpn", "local",
                 "peer", "resumed")  # fmt: skip

    def __init__(
        self, raw: Stream, context: ssl.SSLContext, server_name: str, sessions: TlsSessions | None, port: int
    ) -> None:
        self._raw = raw
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._sessions = sessions  # None as well once this connection has given what it has
        self._shunned_in = sessions
        self._key = SessionKey(server_name.lower(), port, context)
        self._offered = sessions.get(self._key) if sessions is not None else None
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name, session=self._offered)
        self.resumed = False
        self._plain = b""  # decrypted by is_readable, not yet received
        self._starved = False  # TLS makes nothing more of what has come: to ask it again would cost an exception
        self._receiving = self._sending = False
        self._sent = 0  # plain bytes of finished records
        self._piece_bytes = self._piece_mark = 0  # the record on its way: plain size; raw.sent_bytes before it
        self.alpn: str | None = None
        self.peer = raw.peer
        self.local = raw.local

    @property
    def sent_bytes(self) -> int:
        """Plain bytes of every record of which the kernel has taken at least one byte."""
        if self._piece_bytes and self._raw.sent_bytes > self._piece_mark:
            return self._sent + self._piece_bytes
        return self._sent

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._raw.closed

    @property
    def heard_at(self) -> float:
        """See `Stream.heard_at`; records of TLS itself count, any byte does."""
        return self._raw.heard_at

    def tcp_info(self) -> TcpInfo | None:
        """See `Stream.tcp_info`."""
        return self._raw.tcp_info()

    async def _handshake(self) -> None:
        while True:
            done = True
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                done = False
            if self._outgoing.pending:
                await self._raw.send_all(self._outgoing.read())
            if done:
                break
            self._feed(await self._raw.receive())
        self.alpn = self._tls.selected_alpn_protocol()
        self.resumed = bool(self._tls.session_reused)

    def _feed(self, data: bytes) -> None:
        self._starved = False
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    async def send_all(self, data: bytes | memoryview) -> None:
        """See `Stream.send_all`. Any size: it is sent record by record, so that `sent_bytes` is exact to a record."""
        if self._sending:
            raise errors.LocalProtocolError("another task is sending on this stream")
        if self._raw.closed:
            raise _closed()
        self._sending = True
        try:
            if self.has_unsent:
                await self._flush()
            for offset in range(0, len(data), _TLS_RECORD_BYTES):
                self._encrypt(data[offset : offset + _TLS_RECORD_BYTES])
                await self._flush()
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._sending = False

    def send_nowait(self, data: bytes | memoryview) -> int:
        """See `Stream.send_nowait`: at most one record, and none before the one before it is out."""
        if self._sending:
            raise errors.LocalProtocolError("another task is sending on this stream")
        if self._raw.closed:
            raise _closed()
        if (self.has_unsent and not self._flush_nowait()) or not data:
            return 0
        piece = data[:_TLS_RECORD_BYTES]
        self._encrypt(piece)
        self._flush_nowait()
        return len(piece)

    @property
    def has_unsent(self) -> bool:
        """See `Stream.has_unsent`; also what TLS itself has to say, such as the answer to a key update."""
        return self._outgoing.pending > 0 or self._raw.has_unsent

    def _encrypt(self, piece: bytes | memoryview) -> None:
        """Make a record, and have `sent_bytes` count it as soon as a byte of it is out. All before it must be out."""
        size = self._tls.write(piece)
        if size != len(piece):
            raise ssl.SSLError(ssl.SSL_ERROR_SSL, "TLS took only a part of a record")
        self._settle()
        self._piece_mark = self._raw.sent_bytes
        self._piece_bytes = size

    def _settle(self) -> None:
        """Count the record on its way for good: all of it is out, or no more of it ever will be."""
        self._sent = self.sent_bytes
        self._piece_bytes = 0

    async def _flush(self) -> None:
        await self._raw.send_all(self._outgoing.read())
        self._settle()

    def _flush_nowait(self) -> bool:
        """Send what waits as far as it goes; say whether the kernel has all of it."""
        raw = self._raw
        if self._outgoing.pending:
            data = self._outgoing.read()
            while data and (taken := raw.send_nowait(data)):
                data = data[taken:]
            self._outgoing.write(data)
        elif raw.has_unsent:
            raw.send_nowait(b"")
        if self.has_unsent:
            return False
        self._settle()
        return True

    async def receive(self, size_max: int = limits.RECEIVE_BYTES_MAX) -> bytes:
        """See `Stream.receive`; a cut is told from an end: without close_notify it raises `ssl.SSLEOFError`."""
        if self._receiving:
            raise errors.LocalProtocolError("another task is receiving on this stream")
        if self._raw.closed:
            raise _closed()
        self._receiving = True
        try:
            while (data := self._take(size_max)) is None:
                self._feed(await self._raw.receive())
            return data
        finally:
            self._receiving = False

    def receive_nowait(self, size_max: int = limits.RECEIVE_BYTES_MAX) -> bytes | None:
        """See `Stream.receive_nowait`."""
        if self._raw.closed:
            raise _closed()
        while (data := self._take(size_max)) is None:
            received = self._raw.receive_nowait()
            if received is None:
                return None
            self._feed(received)
        return data

    def _take(self, size_max: int) -> bytes | None:
        """Give plain bytes of what has come, None where it makes none."""
        if self._plain:
            data, self._plain = self._plain[:size_max], self._plain[size_max:]
            return data
        plain = None if self._starved else self._decrypt(size_max)
        if plain and self._sessions is not None:
            self._keep_session(self._sessions)
        return plain

    def shun_session(self) -> None:
        """Take note that this connection brought nothing; where it was resumed, nothing more is resumed there."""
        if self.resumed and self._shunned_in is not None:
            self._sessions = None
            self._shunned_in.shun(self._key)

    def _keep_session(self, sessions: TlsSessions) -> None:
        """Put the session aside for a later connection. Tickets of TLS 1.3 come after the handshake, as a rule before
        the first answer; the stdlib tells of the last one only, so a connection gives one."""
        self._sessions = None
        offered, self._offered = self._offered, None
        session = self._tls.session
        if session is not None and worth_keeping(session, self._tls.version(), offered):
            sessions.put(self._key, session)

    def _decrypt(self, size_max: int) -> bytes | None:
        """Give plain bytes out of what has come, None where a record is not whole yet, `b""` after close_notify."""
        incoming, tls = self._incoming, self._tls
        try:
            plain = tls.read(size_max)
            self._starved = not (incoming.pending or incoming.eof or tls.pending())
            return plain
        except ssl.SSLWantReadError:
            self._starved = True
            return None
        except ssl.SSLZeroReturnError:
            return b""
        finally:
            if self._outgoing.pending and not self._sending:
                self._send_leftover()

    def _send_leftover(self) -> None:
        """Send what TLS itself has to say (a key update's answer, an alert) as far as the kernel takes it now."""
        with contextlib.suppress(OSError):
            self._flush_nowait()

    def is_readable(self) -> bool:
        """See `Stream.is_readable`. Reads what is there: a late session ticket is not application data."""
        if self._plain or self._receiving:
            return bool(self._plain)
        try:
            plain = self.receive_nowait()
        except OSError:  # also TLS's
            return True
        self._plain = plain or b""
        return plain is not None

    def close(self) -> None:
        """See `Stream.close`. Says close_notify where the kernel takes it at once and no record is half sent."""
        if not self._sending and not self.has_unsent:
            with contextlib.suppress(OSError, ssl.SSLError, ValueError):
                self._tls.unwrap()
            self._send_leftover()
        self._raw.close()


async def start_tls(
    raw: Stream,
    context: ssl.SSLContext,
    server_name: str,
    *,
    sessions: TlsSessions | None = None,
    port: int = 0,
) -> TlsStream:
    """Shake hands as a client on `raw` and take it over; failed or cancelled, `raw` is closed.

    Args:
        raw: a fresh connection, or a tunnel to the peer.
        context: says whom to trust, which versions and which ALPN names.
        server_name: the name the certificate must carry and that is asked for (SNI), also where the address was given
            by number.
        sessions: where to take a session to resume from and to leave this connection's; None: no resumption.
        port: tells services of one name apart in `sessions`; a session is never offered to another.

    Raises:
        ssl.SSLCertVerificationError: the certificate is not trusted or not for `server_name`.
        ssl.SSLError: the handshake failed otherwise; `ssl.SSLEOFError` where the peer hung up in it.
        OSError: the connection broke.
    """
    try:
        stream = TlsStream(raw, context, server_name, sessions, port)
        if isinstance(raw, TcpStream):
            raw.meter.handshakes += 1
        try:
            await stream._handshake()
        except ssl.SSLError:
            stream._send_leftover()  # the alert that tells the peer why
            raise
        return stream
    except BaseException:
        raw.close()
        raise
