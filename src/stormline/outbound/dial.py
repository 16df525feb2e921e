"""Connecting to an origin: staggered racing connect (RFC 8305 section 5) with TLS inside the race.

An address whose TCP answers but whose TLS does not finish (a captive portal, a wrong machine behind the number, a
middle box) loses like one that refuses: the winner is the first that has shown the right certificate. How they race
is in `race`; here is who races.
"""

import asyncio
import ssl
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.sessions import TlsSessions
from stormline.net.stream import Stream, TcpStream, open_tcp, reason_of
from stormline.net.tls import start_tls
from stormline.outbound.race import Advice as Advice
from stormline.outbound.race import OpenTcp as OpenTcp
from stormline.outbound.race import Pace as Pace
from stormline.outbound.race import Race


class AddressSource(Protocol):
    """What the dialer needs of a resolver; `net.resolve.Resolver` is one."""

    async def resolve(self, host: str, port: int) -> tuple[Address, ...]:
        """Give the addresses of a name; raises OSError, or TimeoutError where its own patience ended."""
        ...

    def doubt(self, host: str) -> None:
        """Take note that none of the addresses it gave for a name worked."""
        ...


class NameKeeper(Protocol):
    """A resolver that learns from dials, and knows more addresses than it gives first; `client.names` has one."""

    async def find(self, host: str, port: int, *, on_note: Callable[[str], None]) -> tuple[Address, ...]:
        """Give the addresses of a name and say where they come from; raises as `AddressSource.resolve`."""
        ...

    def doubt(self, host: str) -> None:
        """Take note that none of the addresses it gave for a name worked."""
        ...

    def proved(self, host: str, address: Address) -> None:
        """Take note that an address has shown the certificate of `host`."""
        ...

    def impostor(self, host: str, address: Address) -> None:
        """Take note that an address has shown somebody else's."""
        ...

    async def more(
        self, host: str, port: int, seen: Collection[Address], *, tls: bool, on_note: Callable[[str], None]
    ) -> tuple[Address, ...]:
        """Give addresses beyond those `seen`, none where there are no others."""
        ...


def quiet(_: str) -> None:
    """Take a stage or a note and do nothing: the default of `on_stage` and `on_note`."""


def interleave(addresses: Iterable[Address]) -> tuple[Address, ...]:
    """Order addresses for racing: families alternate, beginning with the first one's (RFC 8305 section 4).

    Within a family the order stays; each address comes once; at most `limits.DIAL_CANDIDATES_MAX` are kept.
    """
    unique = dict.fromkeys(addresses)
    v6 = [address for address in unique if ":" in address.host]
    v4 = [address for address in unique if ":" not in address.host]
    first, second = (v6, v4) if next(iter(unique), Address("", 0)) in v6 else (v4, v6)
    mixed: list[Address] = []
    for index in range(max(len(first), len(second))):
        mixed += first[index : index + 1] + second[index : index + 1]
    return tuple(mixed[: limits.DIAL_CANDIDATES_MAX])


class _NoAdvice:
    """The `Advice` where nothing is known: families in turn, one pace for all."""

    def __init__(self, stagger_s: float) -> None:
        self._pace = Pace(stagger_s=stagger_s)

    def order(self, host: str, addresses: Sequence[Address], left: Collection[Address]) -> Sequence[Address]:
        if not left:
            return interleave(addresses)
        fresh = [address for address in addresses if address not in left]
        return (*interleave(fresh), *interleave(address for address in addresses if address in left))

    def pace(self, host: str) -> Pace:
        return self._pace

    def connected(self, host: str, address: Address, *, connect_s: float, tls_s: float | None) -> None:
        pass

    def failed(self, host: str, address: Address, *, tried_s: float) -> None:
        pass

    def outrun(self, host: str, address: Address) -> None:
        pass


class Dialer:
    """Makes connections that trust whom `context` says. Stateless; one serves any number of dials at once.

    Args:
        resolver: finds addresses where the caller gives none.
        context: TLS to every origin dialled through this dialer: trust, versions, ALPN.
        stagger_s: head start of each address before the next is tried too; not used where there is advice.
        open_tcp: connects to one address; cancelled or failed it leaves nothing behind.
        advice: says in which order and how patiently addresses are tried, and is told what became of them; None:
            families in turn, the default `Pace`.
        sessions: TLS sessions to resume and to keep; None: every handshake is a full one.
        h1_context: gives the same trust with HTTP/1.1 as all that is offered; None: `context` serves there too.
        context_of: gives the context for one dial to a host in the place of `context`: the same trust, another offer
            of protocols.
        keeper: finds addresses in the place of `resolver`, gives more of them in need, and is told whose they are.
    """

    def __init__(
        self,
        resolver: AddressSource,
        context: ssl.SSLContext,
        *,
        stagger_s: float = limits.CONNECT_STAGGER_S,
        open_tcp: OpenTcp = open_tcp,
        advice: Advice | None = None,
        sessions: TlsSessions | None = None,
        h1_context: Callable[[], ssl.SSLContext] | None = None,
        context_of: Callable[[str], ssl.SSLContext] | None = None,
        keeper: NameKeeper | None = None,
    ) -> None:
        self._context_of = context_of
        self._resolver = resolver
        self._h1_context = h1_context
        self._keeper = keeper
        self._context = context
        self._open_tcp = open_tcp
        self._sessions = sessions
        self._advice = _NoAdvice(stagger_s) if advice is None else advice

    async def dial(
        self,
        host: str,
        port: int,
        *,
        tls: bool,
        timeout_s: float,
        addresses: tuple[Address, ...] | None = None,
        server_name: str | None = None,
        left: Collection[Address] = (),
        h1: bool = False,
        on_stage: Callable[[Phase], None] = quiet,
        on_note: Callable[[str], None] = quiet,
    ) -> Stream:
        """Give a connected stream to the first address that is up, and shows its certificate where `tls`.

        Ends before its time only where every address said no (refused, unreachable, cut off, a wrong certificate): at
        one that is only silent it keeps knocking.

        Nothing of a request is sent: every error has `maybe_delivered` False. Cancelled or failed, no descriptor and
        no task stays behind.

        Args:
            host: the origin's name (or IP literal); resolved where `addresses` is None.
            port: its port, where it is resolved.
            tls: speak TLS.
            timeout_s: seconds for all of it.
            addresses: where to connect instead of resolving (IP direct): IP literals, the best first.
            server_name: name for SNI and certificate; `host` where None. Never an address of `addresses`.
            left: addresses on which the request has failed already; they come last.
            h1: offer HTTP/1.1 alone.
            on_stage: told `resolve`, `connect`, `tls` as each begins.
            on_note: told in words which address failed and why, what is done about silence, and which one won.

        Raises:
            ResolveError: no address.
            ConnectError: no address took the connection; the text lists each with its reason.
            TlsError: at least one did, and none finished the handshake with the right certificate; lists all.
            DeadlineExceeded: `timeout_s` ran out; `phase` is the stage it ran out in, the text lists the addresses.
            LocalProtocolError: `addresses` holds a name.
        """
        keeper = self._keeper if addresses is None else None
        context = self._context_for(host, tls=tls, h1=h1)
        race = self._race(host, port, server_name or host if tls else None, context, keeper, on_stage, on_note)
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                given = await self._addresses(host, port, addresses, race, on_note)
                order = self._advice.order(host, given, left)[: limits.DIAL_CANDIDATES_MAX]
                race.enter(Phase.CONNECT)
                stream = await race.run(order, self._advice.pace(host))
                if tls and keeper is not None and _verifies(self._context):
                    keeper.proved(host, stream.peer)
                return stream
        except (errors.ConnectError, errors.TlsError):
            if addresses is None:
                (self._keeper or self._resolver).doubt(host)
            raise
        except TimeoutError as error:
            if not timeout.expired():
                raise
            if addresses is None and race.phase is not Phase.RESOLVE:
                (self._keeper or self._resolver).doubt(host)
            race.tell_timed_out()
            story = race.story() or "no address failed"
            raise errors.DeadlineExceeded(
                f"{host}: not connected within {timeout_s:.3g} s, while in {race.phase}; {story}",
                phase=race.phase,
                maybe_delivered=False,
            ) from error

    def _context_for(self, host: str, *, tls: bool, h1: bool) -> ssl.SSLContext:
        if h1 and self._h1_context is not None:
            return self._h1_context()
        return self._context if self._context_of is None or not tls else self._context_of(host)

    def _race(
        self,
        host: str,
        port: int,
        tls_name: str | None,
        context: ssl.SSLContext,
        keeper: NameKeeper | None,
        on_stage: Callable[[Phase], None],
        on_note: Callable[[str], None],
    ) -> Race:
        async def shake(raw: TcpStream) -> Stream:
            return await start_tls(raw, context, tls_name or host, sessions=self._sessions, port=port)

        return Race(
            host,
            self._advice,
            self._open_tcp,
            None if tls_name is None else shake,
            on_stage=on_stage,
            on_note=on_note,
            more=None if keeper is None else _Reserves(keeper, host, port, tls_name is not None, on_note),
        )

    async def _addresses(
        self,
        host: str,
        port: int,
        given: tuple[Address, ...] | None,
        race: Race,
        on_note: Callable[[str], None],
    ) -> tuple[Address, ...]:
        if given is None:
            race.enter(Phase.RESOLVE)
            try:
                if self._keeper is not None:
                    given = await self._keeper.find(host, port, on_note=on_note)
                else:
                    given = await self._resolver.resolve(host, port)
            except OSError as error:  # TimeoutError too: the resolver's own patience
                raise errors.ResolveError(
                    f"{host}: {reason_of(error)}", phase=Phase.RESOLVE, maybe_delivered=False
                ) from error
        for address in given:
            if not address.is_ip:
                raise errors.LocalProtocolError(f"cannot connect directly to {address}: not an IP literal")
        if not given:
            raise errors.ResolveError(f"{host}: no address", phase=Phase.RESOLVE, maybe_delivered=False)
        return tuple(dict.fromkeys(given))


def _verifies(context: ssl.SSLContext) -> bool:
    """Say whether a handshake with it proves anything: an app may have switched that off."""
    return context.check_hostname and context.verify_mode is ssl.CERT_REQUIRED


class _Reserves:
    """The `Reinforcements` of one dial, from a `NameKeeper`."""

    def __init__(self, keeper: NameKeeper, host: str, port: int, tls: bool, on_note: Callable[[str], None]) -> None:
        self._keeper = keeper
        self._host = host
        self._port = port
        self._tls = tls
        self._on_note = on_note

    def impostor(self, address: Address) -> None:
        self._keeper.impostor(self._host, address)

    async def more(self, seen: Collection[Address]) -> Sequence[Address]:
        return await self._keeper.more(self._host, self._port, seen, tls=self._tls, on_note=self._on_note)
