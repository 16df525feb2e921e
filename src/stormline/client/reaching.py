"""How far one address of an origin can be reached: TCP, TLS, and whose certificate is shown there.

Where a certificate is not accepted it is looked at all the same, over a connection that trusts anybody and carries
nothing but the name of the host; nothing that such a connection says is taken for the origin's.
"""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple, TypeVar

from stormline.client.findings import Findings, Open, reason_in_words
from stormline.core import limits_diagnosis as limits
from stormline.core.checks import CheckName, CheckState, Reason
from stormline.core.clock import Clock, Rng
from stormline.core.values import Address
from stormline.net.icmp import family_of, target_of
from stormline.net.stream import Stream, open_tcp
from stormline.net.tls import start_tls
from stormline.net.webask import Asked
from stormline.outbound.dial import OpenTcp
from stormline.wire import certificate
from stormline.wire.certificate import Certificate

T = TypeVar("T")

_TIME_CODES: Final = {9: Reason.NOT_YET_VALID, 10: Reason.EXPIRED}
"""X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED."""
_NAME_CODES: Final = frozenset({62, 64})
"""X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH."""
_CUT: Final = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError, ssl.SSLEOFError, EOFError)


class Origin(NamedTuple):
    """What is asked for.

    Attributes:
        scheme: `http` or `https`.
        host: a name or an IP literal.
        port: TCP.
        target: path and query as they are sent.
    """

    scheme: str
    host: str
    port: int
    target: str

    @property
    def field(self) -> str:
        """The value of `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == {"http": 80, "https": 443}[self.scheme] else f"{host}:{self.port}"


class Shown(NamedTuple):
    """What a server showed that nobody vouches for."""

    certificate: Certificate | None
    date: str


def reason_of_tcp(error: BaseException) -> Reason:
    """Say why a connection did not come about."""
    if isinstance(error, ConnectionRefusedError):
        return Reason.REFUSED
    if isinstance(error, TimeoutError):
        return Reason.SILENT
    number = getattr(error, "errno", None)
    if number in (errno.EACCES, errno.EPERM):
        return Reason.DENIED
    if number in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL):
        return Reason.UNREACHABLE
    return Reason.CUT


def reason_of_tls(error: BaseException) -> Reason:
    """Say why a handshake failed, as far as the failure itself tells."""
    if isinstance(error, ssl.SSLCertVerificationError):
        code = getattr(error, "verify_code", 0)
        if code in _NAME_CODES:
            return Reason.WRONG_NAME
        return _TIME_CODES.get(code, Reason.UNTRUSTED)
    if isinstance(error, TimeoutError):
        return Reason.SILENT
    return Reason.CUT if isinstance(error, _CUT) else Reason.FAILED


def has_way(address: Address) -> OSError | None:
    """Say why the kernel has no way to an address; None where it has one. Sends nothing."""
    try:
        with socket.socket(family_of(address.host), socket.SOCK_DGRAM) as probe:
            probe.connect(target_of(*address))
    except OSError as error:
        return error
    return None


def trusting(alpn: tuple[str, ...] = ("http/1.1",)) -> ssl.SSLContext:
    """Give a context that trusts anybody, to see what is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(list(alpn))
    return context


def skew_of(date: str, asked_s: float, clock: Clock) -> float | None:
    """Give how far our clock is ahead of that of a server which sent `Date`; None where it sent none.

    Args:
        date: RFC 9110 section 5.6.7; it is cut to whole seconds.
        asked_s: between question and answer.
        clock: ours.
    """
    try:
        told = parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    return clock.wall() - asked_s / 2.0 - (told + 0.5)


class Reaching:
    """Reaches addresses of one origin, and tells what it finds.

    Args:
        origin: whose they are.
        context: whom requests trust.
        h1_context: the same trust, with HTTP/1.1 as all that is offered.
        open_tcp: connects as requests do.
        findings: take what is found.
        clock: ours.
        rng: for names that cannot exist.
        stalls: told of an address at which a handshake is silent for a while.

    Attributes:
        rtt_s: of TCP's handshake, by address.
        silent_s: for how long a handshake of TLS brought nothing in the end, by address.
        skews: how far our clock is ahead of servers that nobody vouches for.
    """

    def __init__(
        self,
        origin: Origin,
        *,
        context: ssl.SSLContext,
        h1_context: Callable[[], ssl.SSLContext],
        open_tcp: OpenTcp,
        findings: Findings,
        clock: Clock,
        rng: Rng,
        stalls: Callable[[Address], None],
    ) -> None:
        self._origin = origin
        self._context = context
        self._h1_context = h1_context
        self._open_tcp = open_tcp
        self._findings = findings
        self._clock = clock
        self._rng = rng
        self._stalls = stalls
        self._loop = asyncio.get_running_loop()
        self.skews: list[float] = []
        self.rtt_s: dict[Address, float] = {}
        self.silent_s: dict[Address, float] = {}

    async def reach(self, address: Address, sources: list[str]) -> bool:
        """Connect to an address, and shake hands there where the origin speaks TLS; say whether that went well."""
        place: dict[str, Any] = {
            "address": address.host,
            "port": address.port,
            "family": 6 if ":" in address.host else 4,
        }
        check = self._findings.begin(CheckName.TCP, **place, sources=sources)
        no_way = has_way(address)
        if no_way is not None and reason_of_tcp(no_way) is Reason.UNREACHABLE:
            family = "IPv6" if ":" in address.host else "IPv4"
            check.end(CheckState.SKIPPED, f"this network has no way out over {family}", reason=Reason.UNREACHABLE)
            return False
        began = self._loop.time()
        try:
            async with asyncio.timeout(limits.DIAGNOSIS_TCP_S):
                raw = await self._open_tcp(address)
        except OSError as error:
            check.end(CheckState.BAD, reason_in_words(error), reason=reason_of_tcp(error))
            return False
        rtt_s = self.rtt_s[address] = self._loop.time() - began
        check.end(CheckState.OK, f"connected in {1000 * rtt_s:.0f} ms", rtt_s=round(rtt_s, 4))
        if self._origin.scheme != "https":
            raw.close()
            return True
        return await self._shake(self._findings.begin(CheckName.TLS, **place), raw, address)

    async def _shake(self, check: Open, raw: Stream, address: Address) -> bool:
        began = self._loop.time()
        shaking = self._loop.create_task(start_tls(raw, self._context, self._origin.host), name=f"TLS with {address}")
        stalled = self._loop.call_later(limits.DIAGNOSIS_STALL_S, self._stalls, address)
        try:
            async with asyncio.timeout(limits.DIAGNOSIS_TLS_S):
                stream = await shaking
        except (OSError, ValueError) as error:
            reason = reason_of_tls(error)
            if reason is Reason.SILENT:
                self.silent_s[address] = self._loop.time() - max(began, raw.heard_at)
            await self._fail(check, address, error, reason)
            return False
        finally:
            stalled.cancel()
            shaking.cancel()
            await asyncio.wait({shaking})
            if shaking.cancelled():  # perhaps before it had begun, and taken the stream over
                raw.close()
        version, cipher, der = stream.shown()
        alpn = stream.alpn or ""
        stream.close()
        check.end(
            CheckState.OK, f"{version} with the right certificate, {alpn or 'no ALPN'}",
            version=version, cipher=cipher, alpn=alpn, took_s=round(self._loop.time() - began, 4),
            verified=self._context.verify_mode is ssl.CERT_REQUIRED, **_told(certificate.read(der)),
        )  # fmt: skip
        return True

    async def _fail(self, check: Open, address: Address, error: BaseException, reason: Reason) -> None:
        """Find out more about a handshake that failed."""
        words = getattr(error, "verify_message", "") or reason_in_words(error)
        check.data["reason"] = reason
        if not isinstance(error, ssl.SSLCertVerificationError):
            check.end(CheckState.BAD, words)
            return
        shown = await self._quietly(self._look(address, self._origin.host, ask=True))
        found = shown.certificate if shown is not None else None
        if found is not None:
            if not found.covers(self._origin.host):
                reason = Reason.WRONG_NAME
            check.data.update(_told(found), reason=reason)
            if reason is Reason.UNTRUSTED and not found.self_signed:
                check.data["minted"] = bool(await self._quietly(self._mints(address, found)))
        check.end(CheckState.BAD, words)

    async def _look(self, address: Address, name: str, *, ask: bool) -> Shown:
        """See what is shown for a name; `ask`: also for the time, of nothing that anybody has asked for."""
        async with asyncio.timeout(limits.DIAGNOSIS_TLS_S):
            stream = await start_tls(await self._open_tcp(address), trusting(), name)
        try:
            found = certificate.read(stream.shown()[2])
            date = ""
            if ask:
                asked = Asked(self._origin.field, method="HEAD")
                began = self._loop.time()
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(limits.DIAGNOSIS_STALL_S):
                        await asked.over(stream)
                date = asked.field("date")
                skew_s = skew_of(date, self._loop.time() - began, self._clock)
                if skew_s is not None:
                    self.skews.append(skew_s)
            return Shown(found, date)
        finally:
            stream.close()

    async def _mints(self, address: Address, found: Certificate) -> bool:
        """Say whether a certificate of the same issuer is made up for a name that cannot exist (RFC 6761)."""
        name = f"{self._rng.token_bytes(6).hex()}.invalid"
        made = (await self._look(address, name, ask=False)).certificate
        return made is not None and made.covers(name) and made.issuer == found.issuer

    async def _quietly(self, looking: Awaitable[T]) -> T | None:
        with contextlib.suppress(OSError, ValueError):
            return await looking
        return None

    async def in_small_pieces(self, address: Address) -> float | None:
        """Ask over a connection whose segments are small; give how long that took, None where it failed."""
        began = self._loop.time()
        try:
            async with asyncio.timeout(limits.DIAGNOSIS_HTTP_S):
                stream: Stream = await open_tcp(address, segment_bytes=limits.DIAGNOSIS_SMALL_SEGMENT_BYTES)
                try:
                    if self._origin.scheme == "https":
                        stream = await start_tls(stream, self._h1_context(), self._origin.host)
                    asked = Asked(self._origin.field, self._origin.target)
                    if stream.alpn != "h2":  # whose context cannot be had without it: the handshake has to do
                        await asked.over(stream)
                finally:
                    stream.close()
        except (OSError, ValueError):
            return None
        return self._loop.time() - began if asked.whole or stream.alpn == "h2" else None


def _told(found: Certificate | None) -> dict[str, Any]:
    """Give what is told of a certificate."""
    if found is None:
        return {}
    return {
        "issuer": found.issuer,
        "subject": found.subject,
        "not_before": found.not_before,
        "not_after": found.not_after,
        "fingerprint": found.fingerprint,
        "self_signed": found.self_signed,
    }
