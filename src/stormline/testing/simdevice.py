"""A device of a simulated world: the real client with its channel, and an application that uses both."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from typing import Any, Final, cast

import httpx2

from stormline.client.channel import Channel, Push
from stormline.client.config import Config
from stormline.client.link import Link
from stormline.client.longline import LongLine
from stormline.client.outside import Outside
from stormline.client.runtime import Runtime
from stormline.client.transport import AsyncTransport
from stormline.core import errors, limits
from stormline.core.codes import Code
from stormline.core.values import Address, Secret
from stormline.net.network import NoNetworkPort
from stormline.net.resolve import Found
from stormline.net.stream import TcpStream
from stormline.telemetry.timeline import CallRecord
from stormline.testing import scenario as scenarios
from stormline.testing.history import CallEntry, Goodbye, History, LinkLife, PushEntry, RecordEntry
from stormline.testing.scenario import Scenario
from stormline.testing.simloop import SimClock, SimRng, VirtualLoop
from stormline.testing.simnet import Host, Nat, SimNet, Sites
from stormline.testing.simplatform import APP, ORIGIN, SHOP, Platform, SimTcpStream, answer_text
from stormline.testing.simtls import SimTrust
from stormline.wire import events as e
from stormline.wire import messages, tokens

_DNS_ASK_S: Final = 1.0
"""Wait for one answer of DNS."""
_DNS_TRIES: Final = 4


class SimNames:
    """`net.resolve.NameSource` of a simulated host: one question over its link, repeated where it is lost.

    Args:
        host: the machine that asks.
        net: its network.
        answer: gives the addresses of a name when the answer is back; raises socket.gaierror where it has none.
    """

    def __init__(self, host: Host, net: SimNet, answer: Callable[[str], tuple[str, ...]]) -> None:
        self._host = host
        self._net = net
        self._answer = answer

    def ask(self, host: str, *, refresh: bool) -> asyncio.Future[Found]:
        """See `net.resolve.NameSource.ask`."""
        return asyncio.get_running_loop().create_task(self._ask(host), name=f"resolve {host}")

    def withdraw(self, host: str) -> None:
        """See `net.resolve.NameSource.withdraw`: the answer will come anyway."""

    async def _ask(self, host: str) -> Found:
        for _ in range(_DNS_TRIES):
            if not self._host.addresses:
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DNS_ASK_S):
                    await self._net.ask(self._host, 64, 160)
                    return Found(self._answer(host))
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


class _Watched(Channel):
    """A channel that tells of each session, when it has ended, the addresses it went over and when it began.

    Of one that was never welcomed it is not known when it began.
    """

    def __init__(
        self,
        runtime: Runtime,
        longline: LongLine,
        welcomed: Callable[[str], float],
        ended: Callable[[tuple[str, ...], float | None], None],
    ) -> None:
        super().__init__(runtime, longline)
        self._heard_welcome = welcomed
        self._ended = ended
        self._sessions: dict[Link, tuple[tuple[str, ...], float]] = {}

    def line_welcomed(self, link: Link, welcome: messages.Welcome) -> None:
        """See `client.longline.LineListener`."""
        begun_s = self._heard_welcome(link.peer)  # calls may have gone with its HELLO
        addresses, opened_s = self._sessions.get(link, ((), begun_s))
        self._sessions[link] = ((*addresses, link.peer), opened_s)
        super().line_welcomed(link, welcome)

    def line_ended(self, link: Link, closed: e.Closed) -> None:
        """See `client.longline.LineListener`."""
        self._ended(*self._sessions.pop(link, ((link.peer,), None)))
        super().line_ended(link, closed)

    async def __aexit__(self, *exc: object) -> None:
        """Close it: what stands still ends with the client."""
        await super().__aexit__(*exc)
        for addresses, opened_s in self._sessions.values():
            self._ended(addresses, opened_s)


def _shop_only(host: str) -> tuple[str, ...]:
    """Give the origin's address for its name."""
    if host != SHOP:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return (ORIGIN.host,)


class Device:
    """The device and its application.

    Args: those of the world, and
        twin_of: it is another copy of this one, on a machine of its own.
        avoids: gateway that it does not reach.

    Attributes:
        host: its machine.
        clock: its clocks.
        name: its name in the run.
        device_id: what the platform knows it by, empty while that is not known.
        replaced: it was told that a newer copy has taken its place.
    """

    def __init__(
        self,
        number: int,
        *,
        loop: VirtualLoop,
        net: SimNet,
        platform: Platform,
        scenario: Scenario,
        history: History,
        rng: SimRng,
        sites: Sites,
        twin_of: "Device | None" = None,
        avoids: Address | None = None,
    ) -> None:
        self.number = number
        self.name = f"d{number}"
        self._loop = loop
        self._net = net
        self._platform = platform
        self._scenario = scenario
        self._history = history
        self._rng = rng
        self._sites = sites
        self._moves = 0
        self._calls = 0
        self._dialled: dict[str, float] = {}
        self._twin_of = twin_of
        self._avoids = avoids
        link = net.link(
            self.name,
            scenarios.draw_link(scenario.link, rng.child("up")),
            scenarios.draw_link(scenario.link, rng.child("down")),
            fades=scenarios.draw_fades(scenario.fades, rng.child("fades")),
        )
        self.host = net.host(self.name, self._inner_ip(), link=link, nat=self._nat())
        self.clock = SimClock(loop)
        history.records[self.name] = []
        self._transport: AsyncTransport | None = None
        self._client: httpx2.AsyncClient | None = None
        self._channel: Channel | None = None
        self._reader: asyncio.Task[None] | None = None
        self.device_id = ""
        self.replaced = False

    # -- network -----------------------------------------------------------------------------------------------------

    def _inner_ip(self) -> str:
        if self.number > 255:
            return f"{11 + self._moves}.{self.number // 65536}.{self.number // 256 % 256}.{self.number % 256}"
        return f"10.{self.number}.{self._moves // 250}.{self._moves % 250 + 1}"

    def _nat(self) -> Nat | None:
        idle = self._scenario.nat_idle_s
        if idle is None:
            return None
        outer = f"100.{64 + self.number}.{self._moves // 250}.{self._moves % 250 + 1}"
        return Nat(outer, scenarios.draw(idle, self._rng.child(f"nat-{self._moves}")))

    def leave_network(self, *, kill: bool) -> None:
        """Lose the network."""
        self.host.leave_network(kill=kill)

    def join_network(self) -> None:
        """Be on a network again, with another address."""
        self._moves += 1
        self.host.join_network(self._inner_ip(), self._nat())

    def went_dark(self, lasts_s: float) -> None:
        """See `simfaults.Machine`; nobody asks here."""

    async def _open_tcp(self, address: Address) -> TcpStream:
        if any(gateway.address == address for gateway in self._platform.gateways):
            if address == self._avoids:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            self._history.fleet.dials.append((self.name, self._loop.time()))
        sock = await self.host.connect(address)
        self._dialled[str(address)] = self._loop.time()
        return SimTcpStream(cast("Any", sock), self._loop)

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Make the client, open the channel."""
        rng = self._rng.child("client")
        token = self._mint() if rng.chance(0.5) or self._twin_of is not None else None
        outside = Outside(
            clock=self.clock,
            rng=rng,
            open_tcp=self._open_tcp,
            trust=SimTrust(),
            names=lambda: SimNames(self.host, self._net, _shop_only),
            environ={},
            has_route=lambda: True,
            network=lambda how: NoNetworkPort(),
            is_assigned=lambda ip: ip in self.host.addresses,
        )
        config = Config(bundle=self._platform.bundle, token=token, network_probes=False)
        self._transport = AsyncTransport(config=config, outside=outside)
        runtime = self._transport.runtime()
        runtime.on_record = self._take_record
        self._client = httpx2.AsyncClient(transport=self._transport, timeout=None)
        if runtime.longline is None:
            raise errors.LocalProtocolError("the simulated client has a bundle, and so a long line")
        self._channel = _Watched(runtime, runtime.longline, self._welcomed, self._ended)
        await self._channel.__aenter__()
        self._reader = asyncio.create_task(self._read_pushes(self._channel), name=f"{self.name} pushes")

    def _welcomed(self, peer: str) -> float:
        now = self._loop.time()
        self._history.fleet.welcomes.append((self.name, now))
        return self._dialled.get(peer, now)

    def _ended(self, addresses: tuple[str, ...], opened_s: float | None) -> None:
        now = self._loop.time()
        opened_s = self._dialled.get(addresses[-1], now) if opened_s is None else opened_s
        self._history.links.append(LinkLife(self.name, addresses, opened_s, now))

    def _mint(self) -> Secret:
        now = int(self._platform.server_clock.wall())
        self.device_id = self.name if self._twin_of is None else self._twin_of.device_id
        key = self._platform.token_key
        claims = tokens.DeviceToken(app=APP, device=self.device_id, iat=now, exp=now + int(limits.TOKEN_LIFE_S))
        return Secret(tokens.mint(claims, key=key.key, kid=key.kid))

    async def stop(self) -> None:
        """Close everything."""
        if self._channel is not None:
            await self._channel.__aexit__(None, None, None)
        if self._reader is not None:
            await self._reader
        if self._client is not None:
            await self._client.aclose()

    def _take_record(self, record: CallRecord) -> None:
        self._history.records[self.name].append(RecordEntry(record, self._loop.time()))

    # -- pushes ------------------------------------------------------------------------------------------------------

    async def _read_pushes(self, channel: Channel) -> None:
        rng = self._rng.child("pushes")
        try:
            async for push in channel.pushes():
                self._saw(push)
                await self._think(rng)
                push.ack()
                entry = self._history.pushes.get(push.id)
                if entry is not None and entry.acked_s is None:
                    entry.acked_s = self._loop.time()
        except errors.RefusedError as error:
            now = self._loop.time()
            self.replaced = error.code == Code.REPLACED
            self._history.fleet.goodbyes.append(Goodbye(self.name, now, error.code, error.reason))
            if self.replaced and self._history.fleet.newer_copy(self.name, now):
                return
            self._history.given_up.append(f"{self.name} at {self._loop.time():.3f} s: {error}")

    async def _think(self, rng: SimRng) -> None:
        """Take the time an application takes over a push."""
        think_s = scenarios.draw(self._scenario.workload.ack_s, rng)
        if self._sites.fires("app-slow"):
            think_s += rng.uniform(0.0, 6.0)
        await asyncio.sleep(think_s)

    def _saw(self, push: Push) -> None:
        self._loop.trace(self.name, "shown", push.id)
        entry = self._history.pushes.get(push.id)
        if entry is None:
            self._history.strange_pushes.append(push.id)
            return
        entry.seen_by[self.name] = entry.seen_by.get(self.name, 0) + 1
        entry.shown = max(entry.seen_by.values())
        entry.intact = entry.intact and (push.topic, push.body) == push_content(entry)

    # -- calls -------------------------------------------------------------------------------------------------------

    async def call(self, kind: str, *, fresh: bool = False) -> CallEntry:
        """Make one call of a kind and note what becomes of it."""
        self._calls += 1
        work, rng = self._scenario.workload, self._rng.child(f"call-{self._calls}")
        entry = CallEntry(
            id=f"{self.name}-{self._calls}",
            device=self.name,
            kind=kind,
            deadline_s=scenarios.draw(work.deadline_s, rng),
            started_s=self._loop.time(),
            fresh=fresh,
        )
        self._history.calls[entry.id] = entry
        size = int(scenarios.draw(work.down_bytes, rng))
        up = int(scenarios.draw(work.up_bytes, rng))
        try:
            if kind.startswith("rpc"):
                await self._rpc(entry, size, up)
            else:
                await self._http(entry, size, up, rng)
        except errors.CallError as error:
            entry.error, entry.message = "CallError", str(error)
            entry.maybe_delivered = error.maybe_delivered
        except errors.TransportError as error:
            entry.error, entry.message = type(error).__name__, str(error)
            entry.phase, entry.maybe_delivered = error.phase.value, error.maybe_delivered
        except Exception as error:  # told by an invariant, with the call it happened to
            entry.error, entry.message = type(error).__name__, str(error)
        entry.ended_s = self._loop.time()
        self._loop.trace(self.name, entry.id, entry.error, entry.status, entry.maybe_delivered)
        return entry

    async def _http(self, entry: CallEntry, size: int, up: int, rng: SimRng) -> None:
        if self._client is None:
            raise errors.LocalProtocolError("the device is not started")
        options: dict[str, Any] = {"extensions": {"stormline.deadline_s": entry.deadline_s}}
        if entry.has_key:
            options["headers"] = {"idempotency-key": f"key-{entry.id}"}
        method = "GET"
        if entry.is_write:
            method = "POST"
            body = bytes(up)
            options["content"] = _pieces(body) if rng.chance(0.15) else body
        url = f"https://{SHOP}/op/{entry.id}?size={size}"
        if rng.chance(0.3):
            async with self._client.stream(method, url, **options) as response:
                content = await response.aread()
        else:
            response = await self._client.request(method, url, **options)
            content = response.content
        entry.status = response.status_code
        entry.intact = content == answer_text(entry.id, size)

    async def _rpc(self, entry: CallEntry, size: int, up: int) -> None:
        if self._channel is None:
            raise errors.LocalProtocolError("the device is not started")
        answer = await self._channel.call(
            f"orders.{entry.id}",
            {"size": size, "fill": "x" * up},
            deadline_s=entry.deadline_s,
            idempotency_key=f"key-{entry.id}" if entry.has_key else "",
        )
        entry.intact = answer == answer_text(entry.id, size).decode()

    # -- what is looked at now and then ------------------------------------------------------------------------------

    def look(self) -> str:
        """Note sizes that have bounds; give the device's id where it is known."""
        if self._channel is not None and self._channel.session is not None:
            self.device_id = self._channel.session.device
            self._history.fleet.names[self.device_id] = self.name
        self._history.saw(f"{self.name} TCP connections", self.host.connections, limits.POOL_CONNECTIONS_MAX)
        return self.device_id


async def _pieces(body: bytes) -> Any:
    for start in range(0, len(body), 1000):
        yield body[start : start + 1000]
        await asyncio.sleep(0.01)


def push_content(entry: PushEntry) -> tuple[str, bytes]:
    """Give topic and body of a push, made from its id."""
    return f"topic-{len(entry.id) % 3}", f"{entry.id} for {entry.device}".encode().ljust(entry.size, b".")
