"""A QUIC connection of a client: `qh3` does the protocol in memory, the socket, the clock and the timer are ours.

Imported only where QUIC is used: `qh3` is an extra, and takes 70 ms to load.
"""

import asyncio
import collections
import contextlib
import errno
import logging
import ssl
from typing import Final, NamedTuple, Protocol

from qh3.quic import events as told
from qh3.quic.configuration import QuicConfiguration
from qh3.quic.connection import QuicConnection, QuicConnectionError
from qh3.tls import SessionTicket

from stormline.core import limits_quic as limits
from stormline.core.values import Address
from stormline.net.clock import time_of
from stormline.net.quictrust import QuicTrust
from stormline.net.stream import closed_error
from stormline.net.tcpinfo import TcpInfo
from stormline.net.udp import UdpSocket, open_udp

_TLS_ALERTS: Final = range(0x100, 0x200)
"""Transport error codes that are alerts of TLS (RFC 9001 section 4.8)."""
_BAD_CERTIFICATE: Final = 0x100 + 42
_EARLY_DATA: Final = 0xFFFFFFFF
"""How a ticket says that it allows early data (RFC 9001 section 4.6.1)."""
_IDLE: Final = "Idle timeout"
"""What qh3 calls the end by silence, which has no code of its own."""
_OUT_OF_TIME: Final = 10
"""X509_V_ERR_CERT_HAS_EXPIRED."""

# qh3 writes the peer's words to its log as warnings. A level set by the application itself stays.
if logging.getLogger("quic").level == logging.NOTSET:
    logging.getLogger("quic").setLevel(logging.ERROR)


class QuicClosed(ConnectionError):
    """The connection was ended with a code, by the peer or because the peer broke the rules.

    Attributes:
        code: of the application where `by_application`, else of QUIC (RFC 9000 section 20).
        by_application: which of the two.
    """

    def __init__(self, code: int, reason: str, *, by_application: bool) -> None:
        words = "".join(each if each.isprintable() else "?" for each in reason[: limits.QUIC_CLOSE_REASON_CHARS_MAX])
        super().__init__(errno.ECONNRESET, f"QUIC ended with code {code:#x}" + (f": {words}" if words else ""))
        self.code = code
        self.by_application = by_application


class QuicUser(Protocol):
    """Who uses a connection; its methods must not raise."""

    def on_ready(self) -> None:
        """The handshake is over: streams may be used."""
        ...

    def on_data(self, stream_id: int, data: bytes, ended: bool) -> None:
        """Bytes of a stream came, in order; credit for them is given back as soon as the connection is not paused."""
        ...

    def on_reset(self, stream_id: int, code: int) -> None:
        """The peer gave up what it sends on a stream."""
        ...

    def on_stop(self, stream_id: int, code: int) -> None:
        """The peer does not want what we send on a stream; it is reset already."""
        ...

    def on_pong(self, number: int) -> None:
        """A ping was acknowledged."""
        ...

    def on_turn(self) -> None:
        """Something came or time passed: what waits may go on. `flush` is to be called, in this turn or the next."""
        ...

    def on_end(self, cause: BaseException) -> None:
        """It is over; called once, never for `close`."""
        ...


class Place(NamedTuple):
    """Where a ticket may be used again.

    Attributes:
        server_name: the name the certificate was checked for, lower case.
        port: of the service.
        trust: whom it was checked against.
    """

    server_name: str
    port: int
    trust: QuicTrust


class QuicTickets:
    """Tickets of finished handshakes, bounded, in memory only, each given out once (RFC 8446 appendix C.4).

    They hold secrets: nothing of them is shown.
    """

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: collections.OrderedDict[Place, collections.deque[SessionTicket]] = collections.OrderedDict()

    def __len__(self) -> int:
        """Tickets kept."""
        return sum(map(len, self._places.values()))

    def get(self, place: Place) -> SessionTicket | None:
        """Take the newest ticket of a place out, None where there is none that is still good."""
        kept = self._places.get(place)
        while kept:
            ticket = kept.pop()
            if not kept:
                del self._places[place]
            if ticket.is_valid:
                return ticket
        return None

    def put(self, place: Place, ticket: SessionTicket) -> None:
        """Keep a ticket for one later connection to the same place."""
        kept = self._places.get(place)
        if kept is None:
            kept = self._places[place] = collections.deque(maxlen=limits.QUIC_TICKETS_PER_PLACE_MAX)
        kept.append(ticket)
        self._places.move_to_end(place)
        if len(self._places) > limits.QUIC_TICKET_PLACES_MAX:
            self._places.popitem(last=False)

    def clear(self) -> None:
        """Forget them all: the network is another."""
        self._places.clear()


class _Core(QuicConnection):
    """`QuicConnection` that can be kept from taking what came out of its core, which gives credit as it is taken."""

    paused = False

    def _drain_core(self) -> None:
        if not self.paused:
            super()._drain_core()


class QuicLink:
    """One QUIC connection to one address, of which the client is one end. To be made inside a running loop.

    Looks like a `Stream` to whoever only asks who is at the other end and how long ago it was heard.

    Args:
        address: an IP literal and a port.
        server_name: the name the certificate must carry, and that is asked for (SNI).
        trust: whom to believe.
        user: told of everything; see `QuicUser`.
        alpn: the application protocol; a server that does not speak it ends the handshake.
        tickets: to resume with and to keep new ones in; None: a full handshake each time.
        stream_window_bytes: what the peer may have on its way on each stream.
        device: see `open_udp`.

    Attributes:
        peer: the far end.
        local: our end.
        alpn: see above.
        ready: the handshake is over.
        early: streams may be used for early data, which may be replayed (RFC 8446 section 8): for reads only.
        resumed: an earlier session was resumed: no certificates were sent.
        early_accepted: the server took the early data.

    Raises:
        OSError: the system has no way there.
        LocalProtocolError: the host is not an IP literal.
    """

    __slots__ = ("_device", "_due", "_loop", "_place", "_quic", "_sent_before", "_socket", "_tickets", "_time",
                 "_timer", "_user", "_waiter", "alpn", "cause", "early", "early_accepted", "local", "peer", "ready",
                 "resumed")  # fmt: skip

    def __init__(
        self,
        address: Address,
        server_name: str,
        trust: QuicTrust,
        user: QuicUser,
        *,
        alpn: str,
        tickets: QuicTickets | None = None,
        stream_window_bytes: int,
        device: str | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._time = time_of(self._loop)
        self._user = user
        self._device = device
        self._tickets = tickets
        self._place = Place(server_name.lower(), address.port, trust)
        ticket = tickets.get(self._place) if tickets is not None else None
        self._quic = _Core(
            configuration=QuicConfiguration(
                alpn_protocols=[alpn],
                server_name=server_name,
                cadata=trust.pem,
                idle_timeout=limits.QUIC_IDLE_S,
                max_data=limits.QUIC_CONNECTION_WINDOW_BYTES,
                max_stream_data=stream_window_bytes,
                session_ticket=ticket,
            ),
            session_ticket_handler=self._keep,
        )
        self.alpn: str | None = alpn
        self.early = ticket is not None and ticket.max_early_data_size == _EARLY_DATA
        self.ready = self.resumed = self.early_accepted = False
        self.cause: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # when it fires
        self._sent_before = 0  # by sockets it had before
        self._socket = open_udp(address, device=device)
        self.peer, self.local = self._socket.peer, self._socket.local
        self._listen()
        try:
            self._quic.connect(self._far, self._time())
        except BaseException:
            self._socket.close()
            raise

    @property
    def _far(self) -> tuple[str, int]:
        """The peer as qh3 takes it, which knows no scopes of IPv6."""
        return self.peer.host.partition("%")[0], self.peer.port

    def _listen(self) -> None:
        self._socket.on_readable = self._readable
        self._socket.on_writable = self._turn

    def _keep(self, ticket: SessionTicket) -> None:
        if self._tickets is not None:
            self._tickets.put(self._place, ticket)

    # -- as a stream ----------------------------------------------------------------------------------------------
    @property
    def closed(self) -> bool:
        """True where it is over."""
        return self._socket.closed

    @property
    def heard_at(self) -> float:
        """The loop's time when a datagram of the peer last came, or when the socket was made."""
        return self._socket.heard_at

    @property
    def datagrams_sent(self) -> int:
        """Datagrams the kernel has taken, over its life."""
        return self._sent_before + self._socket.sent

    def leave_quiet(self) -> None:
        """Do nothing: the kernel asks a peer of UDP for no signs of life."""

    def tcp_info(self) -> TcpInfo | None:
        """Say that the kernel knows nothing of it."""
        return None

    # -- streams --------------------------------------------------------------------------------------------------
    @property
    def streams_left(self) -> int:
        """Two-way streams that may be opened now: the peer's limit (RFC 9000 section 4.6) less those opened."""
        quic = self._quic
        return quic.max_concurrent_bidi_streams - quic.get_next_available_stream_id() // 4

    def next_stream(self, *, one_way: bool = False) -> int:
        """Give the number that the stream has which the next `send` opens."""
        return self._quic.get_next_available_stream_id(one_way)

    def send(self, stream_id: int, data: bytes | memoryview, *, ended: bool = False) -> bool:
        """Queue bytes of a stream, any number of them; False where the stream takes no more."""
        try:
            self._quic.send_stream_data(stream_id, data, ended)
        except (ValueError, QuicConnectionError):
            return False
        return True

    def unsent(self, stream_id: int) -> int:
        """Give the bytes of a stream that are in no datagram yet; 0 for one that is over."""
        return self._quic.get_send_buffer_size(stream_id)

    def abort(self, stream_id: int, code: int) -> None:
        """Give up both directions of a stream (RFC 9000 section 3.5); one that is over is left alone."""
        for end in (self._quic.reset_stream, self._quic.stop_stream):
            with contextlib.suppress(ValueError, QuicConnectionError):
                end(stream_id, code)

    def ignore(self, stream_id: int, code: int) -> None:
        """Ask the peer to send nothing more on a stream."""
        with contextlib.suppress(ValueError, QuicConnectionError):
            self._quic.stop_stream(stream_id, code)

    def ping(self, number: int) -> None:
        """Ask for a sign of life; `QuicUser.on_pong` tells of it."""
        with contextlib.suppress(ValueError, QuicConnectionError):
            self._quic.send_ping(number)

    @property
    def paused(self) -> bool:
        """The peer gets no credit, and nothing is told of what comes; set by `pause`."""
        return self._quic.paused

    def pause(self, paused: bool) -> None:
        """Give the peer credit, or none. Datagrams are taken and acknowledged all the same."""
        if self._quic.paused and not paused and not self.closed:
            self._quic.paused = False
            self._loop.call_soon(self._resume)
        self._quic.paused = paused

    def _resume(self) -> None:
        if not self.closed:
            self._quic.handle_timer(self._time())  # which takes what waits
            self._turn()

    # -- in and out -----------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """Make datagrams of what may be sent now and hand them to the kernel."""
        if self.closed:
            return
        if self._socket.held <= limits.QUIC_DATAGRAMS_HELD_MAX // 2:
            try:
                self._socket.send([data for data, _ in self._quic.datagrams_to_send(self._time())])
            except QuicConnectionError as error:
                self._end(QuicClosed(error.error_code, error.reason_phrase, by_application=False))
                return
            except OSError as error:
                if not self.ready:
                    self._end(error)
                    return
        self._arm()

    def _arm(self) -> None:
        """See to the next loss or idle time-out. A timer that fires early costs less than one moved for each packet."""
        due = self._quic.get_timer()
        if due is None or self.closed:
            return
        if self._timer is not None:
            if self._due <= due:
                return
            self._timer.cancel()
        self._timer, self._due = self._loop.call_at(due, self._time_came), due

    def _time_came(self) -> None:
        self._timer = None
        now, due = self._time(), self._quic.get_timer()
        if due is not None and due <= now:
            self._quic.handle_timer(now)
            self._turn()
        else:
            self._arm()

    def _readable(self) -> None:
        try:
            came = self._socket.receive()
        except OSError as error:
            # Anybody on the path can send an ICMP message; once the peer has shown who it is, only it counts.
            if not self.ready and not self.closed:
                self._end(error)
            return
        if came:
            try:
                self._quic.receive_many_datagrams(came, self._far, self._time())
            except QuicConnectionError as error:
                self._end(QuicClosed(error.error_code, error.reason_phrase, by_application=False))
                return
            self._turn()

    def _turn(self) -> None:
        user, event = self._user, self._quic.next_event()
        while event is not None and not self.closed:
            kind = event.__class__
            if kind is told.StreamDataReceived:
                user.on_data(event.stream_id, event.data, event.end_stream)  # type: ignore[attr-defined]
            elif kind is told.ConnectionTerminated:
                self._terminated(event)  # type: ignore[arg-type]
                return
            else:
                self._tell(event)
            event = self._quic.next_event()
        if not self.closed:
            user.on_turn()

    def _tell(self, event: told.QuicEvent) -> None:
        if isinstance(event, told.StreamReset):
            self._user.on_reset(event.stream_id, event.error_code)
        elif isinstance(event, told.StopSendingReceived):
            self._user.on_stop(event.stream_id, event.error_code)
        elif isinstance(event, told.PingAcknowledged):
            self._user.on_pong(event.uid)
        elif isinstance(event, told.HandshakeCompleted):
            self.ready, self.early = True, False
            self.resumed, self.early_accepted = event.session_resumed, event.early_data_accepted
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
            self._user.on_ready()

    async def handshake(self) -> None:
        """Wait until the peer has shown its certificate. Cancelled, the connection stays: it is the caller's to close.

        Raises:
            OSError: nobody is there, or it ended.
            ssl.SSLCertVerificationError: the peer is somebody else, or nobody we trust.
            ssl.SSLError: it speaks no protocol of ours.
        """
        if not self.ready and self.cause is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self.cause is not None:
            raise self.cause

    # -- the end --------------------------------------------------------------------------------------------------
    def _terminated(self, event: told.ConnectionTerminated) -> None:
        code, reason = event.error_code, event.reason_phrase
        if not self.ready and code in _TLS_ALERTS:
            self._end(_tls_error(code, reason))
        elif reason == _IDLE:
            self._end(TimeoutError(errno.ETIMEDOUT, "nothing came for too long"))
        else:
            self._end(QuicClosed(code, reason, by_application=event.frame_type is None))

    def _end(self, cause: BaseException) -> None:
        if self.closed:
            return
        self.cause = cause
        self._drop()
        self._user.on_end(cause)

    def _drop(self) -> None:
        self._socket.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self, code: int = 0) -> None:
        """Say why, in one datagram, and close at once; may be called again."""
        if self.closed:
            return
        self.cause = closed_error()
        with contextlib.suppress(OSError, QuicConnectionError):
            self._quic.close(code)
            self._socket.send([data for data, _ in self._quic.datagrams_to_send(self._time())])
        self._drop()

    # -- another address of ours ----------------------------------------------------------------------------------
    def rebind(self, device: str | None = None) -> bool:
        """Go on from a new socket, under another connection id (RFC 9000 section 9.5): the network is another.

        The server checks the new path by itself (section 9.3). False where that is not possible: the handshake is not
        over, the server forbids it or has given no other id, or the system has no way there.
        """
        forbidden = self._quic._applied_transport_parameters  # the only way to ask for it
        if not self.ready or self.closed or forbidden is None or forbidden.disable_active_migration:
            return False
        fresh: UdpSocket | None = None
        try:
            fresh = open_udp(self.peer, device=device or self._device)
            self._quic.change_connection_id()
        except (OSError, ValueError, QuicConnectionError):
            if fresh is not None:
                fresh.close()
            return False
        self._sent_before += self._socket.sent
        fresh.heard_at = self._socket.heard_at
        self._socket.close()
        self._socket, self.local = fresh, fresh.local
        self._listen()
        return True


def _tls_error(code: int, reason: str) -> ssl.SSLError:
    words = "".join(each if each.isprintable() else "?" for each in reason[: limits.QUIC_CLOSE_REASON_CHARS_MAX])
    if code != _BAD_CERTIFICATE:
        failed = ssl.SSLError(ssl.SSL_ERROR_SSL, words)
        failed.reason = f"alert {code - 0x100}" + (f", {words}" if words else "")
        return failed
    refused = ssl.SSLCertVerificationError(ssl.SSL_ERROR_SSL, words)
    refused.verify_message = words
    refused.verify_code = _OUT_OF_TIME if "xpired" in words or "not valid" in words else 0
    return refused
