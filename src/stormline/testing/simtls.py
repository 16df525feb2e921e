"""TLS 1.3 in simulation: its round trips, record sizes and failures, without its cryptography.

`net.tls.TlsStream` runs unchanged above it: `SimTlsContext.wrap_bio` gives an object that speaks like
`ssl.SSLObject`. A record is five bytes of header, the text, and 17 bytes that stand for content type and tag.

    client hello  ->                        server name, ALPN offered; 517 bytes, 770 with a ticket
                  <-  server's flight       names of the certificate, ALPN chosen; 2,800 bytes, 260 where it resumes
    finished      ->  (and data at once)    74 bytes
                  <-  session ticket        512 bytes
"""

import ssl
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

_HEADER_BYTES: Final = 5
_TAG_BYTES: Final = 17
_ALERT: Final = 21
_HANDSHAKE: Final = 22
_DATA: Final = 23
_HELLO_BYTES: Final = 517
_HELLO_RESUMING_BYTES: Final = 770
_FLIGHT_BYTES: Final = 2800
_FLIGHT_RESUMED_BYTES: Final = 260
_FINISHED_BYTES: Final = 74
_TICKET_BYTES: Final = 512


def _record(kind: int, payload: bytes) -> bytes:
    return bytes((kind, 3, 3)) + (len(payload) + _TAG_BYTES).to_bytes(2, "big") + payload + bytes(_TAG_BYTES)


def _words(size: int, *parts: Iterable[str]) -> bytes:
    text = "\n".join(",".join(part) for part in parts).encode()
    return text.ljust(size - _HEADER_BYTES - _TAG_BYTES, b"\0")


def _read_words(payload: bytes) -> list[list[str]]:
    return [line.split(",") if line else [] for line in payload.rstrip(b"\0").decode("utf-8", "replace").split("\n")]


def _eof() -> ssl.SSLEOFError:
    error = ssl.SSLEOFError(8, "EOF occurred in violation of protocol")
    error.reason = "UNEXPECTED_EOF_WHILE_READING"
    return error


def _refused(name: str) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.reason = "CERTIFICATE_VERIFY_FAILED"
    error.verify_message = f"Hostname mismatch, certificate is not valid for '{name}'."
    return error


class SimTlsSession:
    """What a client keeps of a connection; stands for `ssl.SSLSession`.

    Attributes:
        ticket: what the server called it, empty where it sent none.
    """

    def __init__(self, ticket: str = "") -> None:
        self.ticket = ticket

    @property
    def has_ticket(self) -> bool:
        """True where it can be resumed."""
        return bool(self.ticket)


class SimTlsObject:
    """One side of a TLS connection in memory; the methods are those of `ssl.SSLObject`."""

    def __init__(
        self,
        context: "SimTlsContext",
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        *,
        server_side: bool,
        server_hostname: str,
        session: SimTlsSession | None,
    ) -> None:
        self.session = session
        self.session_reused = False
        self._context = context
        self._incoming = incoming
        self._outgoing = outgoing
        self._server = server_side
        self._name = server_hostname
        self._raw = bytearray()
        self._plain = bytearray()
        self._alpn: str | None = None
        self._greeted = False
        self._secure = False
        self._closed = False

    def selected_alpn_protocol(self) -> str | None:
        """The protocol agreed, None where none was."""
        return self._alpn

    def pending(self) -> int:
        """Bytes that have come in and were not read."""
        return len(self._raw) + len(self._plain)

    def version(self) -> str:
        """The version of TLS."""
        return "TLSv1.3"

    def do_handshake(self) -> None:
        """Go on with the handshake; raises SSLWantReadError where more has to come first."""
        if not self._server and not self._greeted:
            self._greeted = True
            ticket = [self.session.ticket] if self.session is not None else []
            size = _HELLO_RESUMING_BYTES if ticket else _HELLO_BYTES
            hello = _words(size, [self._name], self._context.alpn, ticket)
            self._outgoing.write(_record(_HANDSHAKE, hello))
        while not self._secure:
            record = next(self._records(), None)
            if record is None:
                raise _eof() if self._incoming.eof else ssl.SSLWantReadError()
            kind, payload = record
            if kind != _HANDSHAKE:
                raise self._alert(payload)
            self._step(_read_words(payload))

    def _step(self, words: list[list[str]]) -> None:
        if not self._server:
            names, chosen, resumed = words
            self.session_reused = bool(resumed)
            if not self.session_reused and self._name not in names:
                self._outgoing.write(_record(_ALERT, b"bad certificate"))
                raise _refused(self._name)
            self._alpn = chosen[0] if chosen else None
            self._outgoing.write(_record(_HANDSHAKE, _words(_FINISHED_BYTES, ["finished"])))
            self._secure = True
        elif not self._greeted:
            offered = words[1] if len(words) > 1 else []
            common = [each for each in self._context.alpn if each in offered]
            self._alpn = common[0] if common else None
            self._greeted = True
            self.session_reused = len(words) > 2 and self._context.redeem(words[2])
            if self.session_reused:
                flight = _words(_FLIGHT_RESUMED_BYTES, [], common[:1], ["resumed"])
            else:
                flight = _words(_FLIGHT_BYTES, self._context.names, common[:1], [])
            self._outgoing.write(_record(_HANDSHAKE, flight))
        else:
            self._secure = True
            self._outgoing.write(_record(_HANDSHAKE, _words(_TICKET_BYTES, ["ticket", self._context.issue()])))

    def _alert(self, payload: bytes) -> ssl.SSLError:
        error = ssl.SSLError(1, payload.decode("ascii", "replace"))
        error.reason = "SSLV3_ALERT_BAD_CERTIFICATE"
        return error

    def _records(self) -> Iterator[tuple[int, bytes]]:
        """Give whole records as they are there."""
        self._raw += self._incoming.read()
        while len(self._raw) >= _HEADER_BYTES:
            size = _HEADER_BYTES + int.from_bytes(self._raw[3:5], "big")
            if len(self._raw) < size:
                return
            record = bytes(self._raw[:size])
            del self._raw[:size]
            yield record[0], record[_HEADER_BYTES : size - _TAG_BYTES]

    def read(self, size_max: int) -> bytes:
        """Give plain bytes; see `ssl.SSLObject.read` for what it raises."""
        while not self._plain:
            if self._closed:
                raise ssl.SSLZeroReturnError(6, "TLS/SSL connection has been closed (EOF)")
            record = next(self._records(), None)
            if record is None:
                if self._incoming.eof:
                    raise _eof()
                raise ssl.SSLWantReadError
            kind, payload = record
            if kind == _DATA:
                self._plain += payload
            elif kind == _HANDSHAKE:
                self.session = SimTlsSession(_read_words(payload)[0][-1])
            elif kind == _ALERT:
                if payload != b"close":
                    raise self._alert(payload)
                self._closed = True
        data = bytes(self._plain[:size_max])
        del self._plain[:size_max]
        return data

    def write(self, data: bytes | memoryview) -> int:
        """Put plain bytes into a record."""
        self._outgoing.write(_record(_DATA, bytes(data)))
        return len(data)

    def unwrap(self) -> None:
        """Say close_notify; the peer's is not waited for."""
        self._outgoing.write(_record(_ALERT, b"close"))
        if not self._closed:
            raise ssl.SSLWantReadError


class SimTlsContext:
    """Stands for an `ssl.SSLContext`.

    Args:
        alpn: protocols offered or accepted, the best first.
        names: what the certificate is for; for a server.
    """

    check_hostname = True
    verify_mode = ssl.CERT_REQUIRED

    def __init__(self, alpn: Sequence[str], *, names: Sequence[str] = ()) -> None:
        self.alpn = tuple(alpn)
        self.names = tuple(names)
        self._issued = 0
        self._open: set[str] = set()

    def issue(self) -> str:
        """Make a ticket."""
        self._issued += 1
        ticket = str(self._issued)
        self._open.add(ticket)
        return ticket

    def redeem(self, tickets: Sequence[str]) -> bool:
        """Say whether a client may resume by its ticket: one that was made here and not used yet."""
        known = self._open.intersection(tickets)
        self._open -= known
        return bool(known)

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | None = None,
        session: SimTlsSession | None = None,
    ) -> SimTlsObject:
        """See `ssl.SSLContext.wrap_bio`."""
        return SimTlsObject(
            self,
            incoming,
            outgoing,
            server_side=server_side,
            server_hostname=server_hostname or "",
            session=session,
        )


class SimTrust:
    """Makes simulated contexts where a client would make real ones (`net.trust`). A certificate is good for the names
    it carries, whoever signed it."""

    def foreign_context(self, alpn: Sequence[str] = ("http/1.1",)) -> ssl.SSLContext:
        """See `net.trust.foreign_context`."""
        return SimTlsContext(alpn)  # type: ignore[return-value]

    def roles_context(self, ca_pem: bytes | str, alpn: Sequence[str]) -> ssl.SSLContext:
        """See `net.trust.roles_context`."""
        return SimTlsContext(alpn)  # type: ignore[return-value]
