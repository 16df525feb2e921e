"""TLS above a stream, without I/O of its own: records in and out of memory."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Final

from stormline.core import errors, limits
from stormline.net.sessions import SessionKey, TlsSessions, worth_keeping
from stormline.net.stream import Stream, TcpStream, closed_error
from stormline.net.tcpinfo import TcpInfo

_TLS_RECORD_BYTES: Final = 16 * 1024
"""The most plain text one TLS record carries (RFC 8446 section 5.1)."""


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

    def leave_quiet(self) -> None:
        """See `Stream.leave_quiet`."""
        self._raw.leave_quiet()

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
            raise closed_error()
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
            raise closed_error()
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
            raise closed_error()
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
            raise closed_error()
        while (data := self._take(size_max)) is None:
            received = self._raw.receive_nowait()
            if received is None:
                return None
            self._feed(received)
        return data

    def watch(self, watcher: Callable[[], None]) -> bool:
        """See `TcpStream.watch`. What has come already is there before it is first called."""
        return isinstance(self._raw, TcpStream) and not self._receiving and self._raw.watch(watcher)

    def _take(self, size_max: int) -> bytes | None:
        """Give plain bytes of what has come, None where it makes none."""
        if self._plain:
            data, self._plain = self._plain[:size_max], self._plain[size_max:]
            return data
        plain = None if self._starved else self._decrypt(size_max)
        if plain and self._sessions is not None:
            self._keep_session(self._sessions)
        return plain

    def shown(self) -> tuple[str, str, bytes]:
        """Give the version of TLS, the cipher, and the certificate that the peer showed, as DER; each may be empty."""
        cipher = self._tls.cipher()
        return self._tls.version() or "", cipher[0] if cipher else "", self._tls.getpeercert(binary_form=True) or b""

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
            # Nothing at all is the end (close_notify): asked again it says so again, and waits for no more.
            self._starved = bool(plain) and not (incoming.pending or incoming.eof or tls.pending())
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
