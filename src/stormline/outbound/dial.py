"""Connecting to an origin: staggered racing connect (RFC 8305 section 5) with TLS inside the race.

An address whose TCP answers but whose TLS does not finish (a captive portal, a wrong machine behind the number, a
middle box) loses like one that refuses: the winner is the first that has shown the right certificate.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Protocol

from stormline.core import errors, limits
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.stream import Stream, TcpStream, open_tcp, reason_of, start_tls

OpenTcp = Callable[[Address], Awaitable[TcpStream]]
"""Connects to one address; `net.stream.open_tcp` is the real one."""


class AddressSource(Protocol):
    """What the dialer needs of a resolver; `net.resolve.Resolver` is one."""

    async def resolve(self, host: str, port: int) -> tuple[Address, ...]:
        """Give the addresses of a name; raises OSError, or TimeoutError where its own patience ended."""
        ...

    def doubt(self, host: str) -> None:
        """Take note that no address of the last answer for `host` worked."""
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


class Dialer:
    """Makes connections that trust whom `context` says. Stateless; one serves any number of dials at once.

    Args:
        resolver: finds addresses where the caller gives none.
        context: TLS to every origin dialled through this dialer: trust, versions, ALPN.
        stagger_s: head start of each address before the next is tried too.
        open_tcp: connects to one address; cancelled or failed it leaves nothing behind.
    """

    def __init__(
        self,
        resolver: AddressSource,
        context: ssl.SSLContext,
        *,
        stagger_s: float = limits.CONNECT_STAGGER_S,
        open_tcp: OpenTcp = open_tcp,
    ) -> None:
        self._resolver = resolver
        self._context = context
        self._stagger_s = stagger_s
        self._open_tcp = open_tcp

    async def dial(
        self,
        host: str,
        port: int,
        *,
        tls: bool,
        timeout_s: float,
        addresses: tuple[Address, ...] | None = None,
        server_name: str | None = None,
        on_stage: Callable[[str], None] = quiet,
        on_note: Callable[[str], None] = quiet,
    ) -> Stream:
        """Give a connected stream to the first address that is up, and shows its certificate where `tls`.

        Nothing of a request is sent: every error has `maybe_delivered` False. Cancelled or failed, no descriptor and
        no task stays behind.

        Args:
            host: the origin's name (or IP literal); resolved where `addresses` is None.
            port: its port, where it is resolved.
            tls: speak TLS.
            timeout_s: seconds for all of it.
            addresses: where to connect instead of resolving (IP direct): IP literals, the best first.
            server_name: name for SNI and certificate; `host` where None. Never an address of `addresses`.
            on_stage: told `resolve`, `connect`, `tls` as each begins.
            on_note: told in words which address failed, and which won.

        Raises:
            ResolveError: no address.
            ConnectError: no address took the connection; the text lists each with its reason.
            TlsError: at least one did, and none finished the handshake with the right certificate; lists all.
            DeadlineExceeded: `timeout_s` ran out; `phase` is the stage it ran out in, the text lists the addresses.
            LocalProtocolError: `addresses` holds a name.
        """
        race = _Race(on_stage, on_note)
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                candidates = await self._candidates(host, port, addresses, race)
                race.enter(Phase.CONNECT)
                name = (server_name or host) if tls else None
                return await race.run(
                    candidates, lambda address: self._connect(address, name, race), stagger_s=self._stagger_s
                )
        except TimeoutError as error:
            if not timeout.expired():
                raise
            story = race.story() or "no address failed"
            raise errors.DeadlineExceeded(
                f"{host}: not connected within {timeout_s:.3g} s, while in {race.phase}; {story}",
                phase=race.phase,
                maybe_delivered=False,
            ) from error

    async def _candidates(
        self, host: str, port: int, given: tuple[Address, ...] | None, race: "_Race"
    ) -> tuple[Address, ...]:
        if given is None:
            race.enter(Phase.RESOLVE)
            try:
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
        return interleave(given)

    async def _connect(self, address: Address, name: str | None, race: "_Race") -> Stream:
        raw = await self._open_tcp(address)
        if name is None:
            return raw
        try:
            race.enter(Phase.TLS)
            return await start_tls(raw, self._context, name)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError; ValueError: no name TLS could ask for
            raise _TlsFailed(reason_of(error)) from error
        except BaseException:
            raw.close()
            raise


class _TlsFailed(Exception):
    """TCP connected, TLS did not finish."""


class _Race:
    """One dial: how far it is, what failed, and the racers."""

    __slots__ = ("_failures", "_on_note", "_on_stage", "_running", "_unfinished", "phase")

    def __init__(self, on_stage: Callable[[str], None], on_note: Callable[[str], None]) -> None:
        self._on_stage = on_stage
        self._on_note = on_note
        self._failures: dict[Address, Exception] = {}
        self._running: dict[asyncio.Task[Stream], Address] = {}
        self._unfinished: list[Address] = []
        self.phase = Phase.QUEUED

    def enter(self, phase: Phase) -> None:
        """Go on to `phase`, where it is not there yet: only the first racer in it is told of."""
        if phase is not self.phase:
            self.phase = phase
            self._on_stage(phase.value)

    def story(self) -> str:
        """Tell which addresses failed and why, and which are still being tried."""
        lines = [f"{address}: {reason_of(error)}" for address, error in self._failures.items()]
        return "; ".join(lines + [f"{address}: no answer yet" for address in self._unfinished])

    async def run(
        self,
        candidates: tuple[Address, ...],
        connect: Callable[[Address], Coroutine[None, None, Stream]],
        stagger_s: float,
    ) -> Stream:
        """Give the first stream that stands; every other one is closed before this returns or raises."""
        stream: Stream | None = None
        try:
            stream = await self._first(candidates, connect, stagger_s)
            await self._close_losers()
            return stream
        except BaseException:
            if stream is not None:
                stream.close()
            await self._close_losers()
            raise

    async def _first(
        self,
        candidates: tuple[Address, ...],
        connect: Callable[[Address], Coroutine[None, None, Stream]],
        stagger_s: float,
    ) -> Stream:
        waiting = list(reversed(candidates))
        while waiting or self._running:
            if waiting:
                address = waiting.pop()
                self._running[asyncio.create_task(connect(address), name=f"connect {address}")] = address
            done, _ = await asyncio.wait(
                self._running, timeout=stagger_s if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in [each for each in self._running if each in done]:  # in the order they were begun
                error = task.exception()
                if error is None:
                    self._on_note(f"connected to {self._running[task]}, {len(self._failures)} failed before")
                    del self._running[task]
                    return task.result()
                if not isinstance(error, (OSError, _TlsFailed)):
                    raise error  # not the network's: a bug, or a callback of the caller
                address = self._running.pop(task)
                self._failures[address] = error
                self._on_note(f"{address} failed: {reason_of(error)}")
        story = f"no connection: {self.story()}"
        if any(isinstance(error, _TlsFailed) for error in self._failures.values()):
            raise errors.TlsError(story, phase=Phase.TLS, maybe_delivered=False)
        raise errors.ConnectError(story, phase=Phase.CONNECT, maybe_delivered=False)

    async def _close_losers(self) -> None:
        losers, self._running = self._running, {}
        self._unfinished += losers.values()
        for task in losers:
            if task.done():
                _close_result(task)
            else:
                task.cancel()
                # A callback, not only the wait below: that one may be cancelled too.
                task.add_done_callback(_close_result)
        if losers:
            await asyncio.wait(losers)


def _close_result(task: asyncio.Task[Stream]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()
