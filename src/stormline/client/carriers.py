"""Opening the long connection by whatever passes: TLS with its own ALPN, a WebSocket over TLS, or short HTTP.

The first carrier has a head start; the next is tried beside it where it is late, and in its place where it fails. What
was learned of a network says which is first (`policy.carriers`).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from stormline.client.steering import Steering
from stormline.core import errors, limits_carriers
from stormline.core.phase import Phase
from stormline.core.values import Address
from stormline.net.stream import Stream, reason_of
from stormline.outbound.pool import Connector, HttpPool
from stormline.outbound.short import Place, open_short
from stormline.policy.carriers import RANK
from stormline.wire import messages

_log = logging.getLogger("stormline.client")

TLS: Final = "sl-tls"
WSS: Final = "sl-wss"
SHORT: Final = "sl-short"
OnStage = Callable[[str], None]


class Target(NamedTuple):
    """Where a gateway can be reached: addresses, or a name to be resolved; by what; and whom its certificate names."""

    carrier: str
    server_name: str
    host: str
    port: int
    addresses: tuple[Address, ...] | None


def carrier_of(stream: Stream) -> str:
    """Give the carrier by which a stream was opened, as in `wire.plan.Carrier`."""
    carrier: str = getattr(stream, "carrier", TLS)
    return carrier


class Carriers:
    """Opens streams to gateways for one client, and says when a better carrier is to be tried.

    Args:
        steering: says on which network the client is, and what was learned there.
        dialers: what connects, by carrier; each offers the carrier's ALPN.
        timeout_s: for one connection to one target.
        pool: connections for short HTTP, of HTTP/1.1; None: it is not used.
    """

    def __init__(
        self, steering: Steering, dialers: Mapping[str, Connector], timeout_s: float, pool: HttpPool | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._steering = steering
        self._dialers = dialers
        self._timeout_s = timeout_s
        self._pool = pool
        self._climbing: asyncio.TimerHandle | None = None

    async def open(self, targets: Sequence[Target], on_stage: OnStage, home: str = "") -> Stream:
        """Give a stream on which a HELLO can be said.

        Args:
            targets: gateways.
            on_stage: told how far it is.
            home: the node that has the session which is to go on; short HTTP can go there by way of any other.

        Raises:
            RefusedError: nothing passes, and a gateway said that it takes nobody for a while.
            TransportError: nothing passes; the text says why, by carrier and target.
        """
        self._steering.enter_network()
        by_carrier = {
            carrier: [each for each in targets if each.carrier == carrier]
            for carrier in self._steering.carriers.order(self._network, {each.carrier for each in targets})
            if carrier in self._dialers or (carrier == SHORT and self._pool is not None)
        }
        waiting = list(by_carrier)
        running: dict[asyncio.Task[Stream], str] = {}
        failures: list[str] = []
        refusal: errors.RefusedError | None = None
        try:
            while waiting or running:
                if waiting:
                    carrier = waiting.pop(0)
                    opening = self.open_by(by_carrier[carrier], on_stage, home)
                    running[asyncio.create_task(opening, name=f"stormline open {carrier}")] = carrier
                done, _ = await asyncio.wait(
                    running,
                    timeout=limits_carriers.CARRIER_HEAD_START_S if waiting else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in sorted(done, key=lambda each: RANK.index(running[each])):
                    if isinstance(error := task.exception(), errors.TransportError):
                        self.failed(running.pop(task))
                        failures.append(str(error))
                    elif isinstance(error, errors.RefusedError):
                        running.pop(task)
                        refusal = error
                    else:
                        return self._chosen(running, task)
        finally:
            await _give_up(running)
        if refusal is not None:
            raise refusal
        raise errors.ConnectError("; ".join(failures), phase=Phase.CONNECT, maybe_delivered=False)

    def _chosen(self, running: dict[asyncio.Task[Stream], str], task: asyncio.Task[Stream]) -> Stream:
        """Take the first that stands; a better one that had its head start and is still not there has failed."""
        carrier = running.pop(task)
        for late in running.values():
            if RANK.index(late) < RANK.index(carrier):
                self.failed(late)
        return task.result()

    async def open_by(self, targets: Sequence[Target], on_stage: OnStage, home: str = "") -> Stream:
        """Give a stream by one carrier to the first target that can be reached; see `open`.

        Raises:
            RefusedError: none can, and one said that it takes nobody for a while.
            TransportError: none can; the text says why.
        """
        failures = []
        refusal: errors.RefusedError | None = None
        for target in targets:
            try:
                return await self._dial(target, on_stage, home)
            except errors.TransportError as error:
                failures.append(str(error))
            except errors.RefusedError as error:
                refusal = error
        if refusal is not None:
            raise refusal
        raise errors.ConnectError("; ".join(failures), phase=Phase.CONNECT, maybe_delivered=False)

    async def _dial(self, target: Target, on_stage: OnStage, home: str) -> Stream:
        if target.carrier == SHORT:
            return await self._open_short(target, on_stage, home)
        ends_at = self._loop.time() + self._timeout_s
        stream = await self._dialers[target.carrier].dial(
            target.host,
            target.port,
            tls=True,
            timeout_s=self._timeout_s,
            addresses=target.addresses,
            server_name=target.server_name,
            on_stage=on_stage,
        )
        if target.carrier == WSS:
            return await _upgrade(stream, target, ends_at)
        if stream.alpn != messages.ALPN:
            stream.close()
            raise errors.TlsError(
                f"{stream.peer} does not speak {messages.ALPN}", phase=Phase.TLS, maybe_delivered=False
            )
        return stream

    async def _open_short(self, target: Target, on_stage: OnStage, home: str) -> Stream:
        if self._pool is None:
            raise errors.ConnectError("no short HTTP here", phase=Phase.CONNECT, maybe_delivered=False)
        place = Place(target.server_name, target.host, target.port, target.addresses, self._timeout_s)
        try:
            return await open_short(self._pool, place, home=home, on_stage=on_stage)
        except OSError as error:
            raise errors.ConnectError(reason_of(error), phase=Phase.CONNECT, maybe_delivered=False) from error

    # -- what became of it ---------------------------------------------------------------------------------------------

    @property
    def _network(self) -> str:
        return self._steering.network.id

    def failed(self, carrier: str) -> None:
        """Take note that no session came to stand by a carrier, and no gateway said why."""
        self._steering.carriers.failed(self._network, carrier)

    def stalled(self, carrier: str) -> None:
        """Take note that a session has left a carrier that had fallen silent for one that passes."""
        self._steering.carriers.stalled(self._network, carrier)

    def stands(self, carrier: str, climb: Callable[[str], None]) -> None:
        """Take note that a session stands.

        Args:
            carrier: by what.
            climb: called with a better carrier when it is due to be tried; told of the outcome is `tried`.
        """
        self._steering.carriers.stands(self._network, carrier, self._loop.time())
        if carrier != RANK[0]:
            self._steering.learned()
        self.watch(carrier, climb)

    def tried(self, carrier: str, *, good: bool) -> None:
        """Take note how a trial beside the standing session ended."""
        self._steering.carriers.tried(self._network, carrier, self._loop.time(), good=good)
        self._steering.learned()

    def watch(self, standing: str, climb: Callable[[str], None]) -> None:
        """Have `climb` called when a better carrier than the standing one is due."""
        self.close()
        due = self._steering.carriers.next_timer(self._network, standing)
        if due is not None:
            self._climbing = self._loop.call_at(due, self._due, standing, climb)

    def _due(self, standing: str, climb: Callable[[str], None]) -> None:
        self._climbing = None
        better = self._steering.carriers.climb(self._network, standing, self._loop.time())
        if better is not None:
            climb(better)
        else:  # another network, or it was put off
            self.watch(standing, climb)

    def close(self) -> None:
        """Try nothing better any more."""
        if self._climbing is not None:
            self._climbing.cancel()
            self._climbing = None


async def _upgrade(raw: Stream, target: Target, ends_at: float) -> Stream:
    """Open a WebSocket on a connection to a gateway."""
    from stormline.outbound.websocket import open_websocket  # 50 ms of imports, for those who need it

    host = target.server_name if target.port == 443 else f"{target.server_name}:{target.port}"
    try:
        async with asyncio.timeout_at(ends_at) as timeout:
            return await open_websocket(raw, host)
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise errors.DeadlineExceeded(
            f"{raw.peer}: no WebSocket in time", phase=Phase.TLS, maybe_delivered=False
        ) from error
    except OSError as error:
        raise errors.TlsError(f"{raw.peer}: {reason_of(error)}", phase=Phase.TLS, maybe_delivered=False) from error


async def _give_up(running: Mapping[asyncio.Task[Stream], str]) -> None:
    """End what is still being opened, and close what stands unused."""
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
    for task in running:
        if not task.cancelled() and task.exception() is None:
            task.result().close()
