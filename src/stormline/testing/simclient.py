"""A device that asks origins itself: the real client without a gateway, an application that uses it, and probes.

Kinds of call: `get`, `large` (an answer of some hundred KB), `coded` (gzip), `plain` (no TLS), `post`, `upload` (a body
that is a stream), both also with a key; `events` (a stream of events with pauses of minutes), `poll` (a long poll) and
`once` (what may have been delivered is not sent again).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, NamedTuple, cast

import httpx2

from stormline.client.admission import Guest
from stormline.client.api import AsyncClient
from stormline.client.config import Config
from stormline.client.outside import Outside
from stormline.client.rules import BusinessRule
from stormline.client.trace import CallTrace
from stormline.core import errors, limits
from stormline.core.values import Address
from stormline.net.network import NoNetworkPort
from stormline.net.resolve import Found
from stormline.net.stream import TcpStream
from stormline.outbound.held import Held
from stormline.outbound.messages import HttpRequest, HttpResponse
from stormline.policy.admission import URGENCIES
from stormline.policy.budget import RetryVerdict
from stormline.telemetry.timeline import CallRecord
from stormline.testing import scenario as scenarios
from stormline.testing.history import Attempt, CallEntry, History, RecordEntry, RetryAsk, Wait
from stormline.testing.scenario import Scenario
from stormline.testing.simdevice import SimNames
from stormline.testing.simloop import SimClock, SimRng, VirtualLoop
from stormline.testing.simnet import Host, Nat, SimNet, SimSocket
from stormline.testing.simorigin import event_text
from stormline.testing.simplatform import SimTcpStream, answer_text
from stormline.testing.simtls import SimTrust
from stormline.wire.bundle import Bundle

LARGE_BYTES: Final = (20_000, 200_000)
"""Size of a large answer."""
HURRY_S: Final = (0.3, 2.5)
"""Deadline of a call in a hurry."""
EVENT_GAPS_S: Final = (0.5, 90.0)
"""Pauses between events."""
EVENTS_SILENCE_S: Final = 2 * EVENT_GAPS_S[1]
"""After which the application takes a stream for dead; the client does not."""
HOLD_S: Final = (1.0, 40.0)
"""How long a long poll is held."""
_VERSIONS: Final = limits.ATTEMPTS_MAX + limits.REFUSALS_MAX + 1
"""Answers a call may be given that are others each time."""
_BODY_PIECE_BYTES: Final = 2000
_OUR_MODULES: Final = ("stormline.client", "stormline.outbound", "stormline.net")


class _Request(NamedTuple):
    """One call of the application, laid out.

    Attributes:
        method: HTTP method.
        url: whole.
        headers: beside those of the client.
        body: all, or a source of pieces, or None.
        expected: the bodies of right answers.
        streamed: the application reads the answer piece by piece.
    """

    method: str
    url: str
    headers: dict[str, str]
    body: Any
    expected: tuple[bytes, ...]
    streamed: bool


class ProbedPool:
    """Stands between executor and pool, and takes down each attempt."""

    def __init__(self, pool: Any, loop: asyncio.AbstractEventLoop, history: History) -> None:
        self._pool = pool
        self._loop = loop
        self._seen = history.direct
        self._running: dict[str, int] = {}

    @property
    def running(self) -> int:
        """Attempts under way."""
        return sum(self._running.values())

    async def request(self, request: HttpRequest, **options: Any) -> HttpResponse:
        """See `HttpPool.request`."""
        call_id = request.target.decode().partition("?")[0].rpartition("/")[2]
        entry = Attempt(call_id, self._loop.time())
        self._seen.attempts.append(entry)
        beside = self._running[call_id] = self._running.get(call_id, 0) + 1
        self._seen.lanes[call_id] = max(beside, self._seen.lanes.get(call_id, 0))
        try:
            response = cast("HttpResponse", await self._pool.request(request, **options))
            after = dict(response.headers).get(b"retry-after", b"")
            entry.retry_after_s = float(after) if after.isdigit() else None
            return response
        except BaseException as error:
            entry.error = type(error).__name__
            raise
        finally:
            entry.ended_s = self._loop.time()
            self._running[call_id] -= 1

    def answered_beside(self, held: Held, since: float) -> bool:
        """See `HttpPool.answered_beside`."""
        return bool(self._pool.answered_beside(held, since))


class ProbedBudget:
    """Takes down what is asked of a retry budget and what it grants."""

    def __init__(self, budget: Any, device: str, history: History) -> None:
        self._budget = budget
        self._device = device
        self._seen = history.direct

    def plan(self, host: str, now: float, *, heard: bool = True) -> RetryVerdict:
        """See `RetryBudget.plan`."""
        verdict = cast("RetryVerdict", self._budget.plan(host, now, heard=heard))
        cost = (1.0 if heard else limits.RETRY_UNHEARD_COST) if verdict.allowed else 0.0
        self._seen.asks.append(RetryAsk(self._device, host, now, cost, later=verdict.wait_s > 0.0))
        return verdict

    def observe_request(self, host: str, now: float) -> None:
        """See `RetryBudget.observe_request`."""
        self._seen.asks.append(RetryAsk(self._device, host, now, 0.0, first=True))
        self._budget.observe_request(host, now)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._budget, name)


class DirectDevice:
    """The device and its application; a `simfaults.Machine`.

    Args:
        number: which one.
        loop: virtual time.
        net: the network it is on.
        scenario: what its application does.
        names: the origins' names.
        answer: what DNS says; see `SimNames`.
        pause: what DNS takes longer than usual now, seconds.
        history: takes down what happens.
        rng: its chance.
        bundle: of a platform, None for none.
        addresses: of origins, for its settings.
    """

    def __init__(
        self,
        number: int,
        *,
        loop: VirtualLoop,
        net: SimNet,
        scenario: Scenario,
        names: tuple[str, ...],
        answer: Callable[[str], tuple[str, ...]],
        pause: Callable[[], float],
        history: History,
        rng: SimRng,
        bundle: Bundle | None,
        addresses: Mapping[str, tuple[str, ...]],
    ) -> None:
        direct = scenario.direct
        if direct is None:
            raise errors.LocalProtocolError("the scenario has no [direct]")
        self.name = f"d{number}"
        self._number = number
        self._loop = loop
        self._net = net
        self._scenario = scenario
        self._names = names
        self._history = history
        self._rng = rng
        self._moves = self._calls = 0
        link = net.link(
            self.name,
            scenarios.draw_link(scenario.link, rng.child("up")),
            scenarios.draw_link(scenario.link, rng.child("down")),
            fades=scenarios.draw_fades(scenario.fades, rng.child("fades")),
        )
        self.host: Host = net.host(self.name, self._inner_ip(), link=link, nat=self._nat())
        self.clock = SimClock(loop)
        self._told_pct = direct.network_changes_pct
        self._sockets: list[SimSocket] = []
        self._traces: dict[str, CallTrace] = {}
        history.records[self.name] = []
        outside = Outside(
            clock=self.clock,
            rng=rng.child("client"),
            open_tcp=self._open_tcp,
            trust=SimTrust(),
            has_route=lambda: True,
            is_assigned=lambda ip: ip in self.host.addresses,
            names=lambda: _SlowNames(self.host, net, answer, pause),
            environ={},
            network=lambda how: NoNetworkPort(),
        )
        kind = rng.child("network").choice(direct.networks)
        # Every means of the plan of full effort, in no more steps than all that is known of a run allows for.
        rules = (BusinessRule(plan="key", tries={"attempts": limits.ATTEMPTS_MAX}),) if addresses else ()
        config = Config(
            bundle=bundle, network=kind, report=False, addresses=addresses, rules=rules, network_probes=False
        )
        self.client = AsyncClient(config=config, outside=outside)
        self.runtime = self.client._storm.runtime()
        self.runtime.on_record = self._take_record
        self._pool = self.runtime._pool
        self._probed = ProbedPool(self._pool, loop, history)
        self.runtime._paths.first.pool = self._probed  # type: ignore[assignment]
        self.runtime.steering.budget = ProbedBudget(  # type: ignore[assignment]
            self.runtime.steering.budget, self.name, history
        )
        self._gate = self.runtime._executor.admission
        self._make_wait = self._gate.wait
        self._gate.wait = self._wait  # type: ignore[method-assign]
        self._make_trace = self.runtime.trace
        self.runtime.trace = self._trace  # type: ignore[method-assign]

    # -- network -----------------------------------------------------------------------------------------------------
    def _inner_ip(self) -> str:
        return f"10.{self._number}.{self._moves // 250}.{self._moves % 250 + 1}"

    def _nat(self) -> Nat | None:
        idle = self._scenario.nat_idle_s
        if idle is None:
            return None
        outer = f"100.{64 + self._number}.{self._moves // 250}.{self._moves % 250 + 1}"
        return Nat(outer, scenarios.draw(idle, self._rng.child(f"nat-{self._moves}")))

    def leave_network(self, *, kill: bool) -> None:
        """Lose the network."""
        self.host.leave_network(kill=kill)
        self.tell_change("left")

    def join_network(self) -> None:
        """Be on a network again, with another address."""
        self._moves += 1
        self.host.join_network(self._inner_ip(), self._nat())
        self.tell_change("joined")

    def tell_change(self, what: str) -> None:
        """Tell the client that its network has changed, if its application looks after such things."""
        if self._rng.child(f"told-{what}-{self._moves}").chance(self._told_pct / 100):
            self.client.network_changed()

    def went_dark(self, lasts_s: float) -> None:
        """See `simfaults.Machine`."""
        now = self._loop.time()
        self._history.direct.dark.append((self.name, now, now + lasts_s))

    async def _open_tcp(self, address: Address) -> TcpStream:
        self._history.direct.connects.append((self.name, str(address), self._loop.time()))
        sock = await self.host.connect(address)
        self._sockets.append(sock)
        return SimTcpStream(cast("Any", sock), self._loop)

    # -- probes ------------------------------------------------------------------------------------------------------
    def _trace(self, **fields: Any) -> CallTrace:
        trace = self._make_trace(**fields)
        call_id = str(fields["path"]).rpartition("/")[2]
        self._traces[call_id] = trace
        return trace

    async def _wait(self, guest: Guest) -> None:
        queued_s = self._loop.time()
        await self._make_wait(guest)
        self._history.direct.waits.append(
            Wait(
                device=self.name,
                host=guest.shape.host,
                call_id=guest.trace.record.path.rpartition("/")[2],
                urgency=guest.urgency,
                came_s=guest.came_at,
                queued_s=queued_s,
                granted_s=self._loop.time(),
            )
        )

    def _take_record(self, record: CallRecord) -> None:
        self._history.records[self.name].append(RecordEntry(record, self._loop.time()))

    def look(self) -> None:
        """Note sizes that have bounds."""
        self._history.saw(f"{self.name} connections", self._pool.open_connections, limits.POOL_CONNECTIONS_MAX)
        self._history.saw(f"{self.name} waiting", self._gate.policy.waiting, limits.ADMISSION_WAITING_MAX)

    def open_sockets(self) -> int:
        """Give how many of its simulated descriptors are open."""
        self._sockets = [sock for sock in self._sockets if not sock.closed]
        return len(self._sockets)

    def rest(self) -> None:
        """Note what it still holds although it has had nothing to do for longer than connections are kept."""
        held = {
            "attempts that run": self._probed.running,
            "connections": self._pool.open_connections,
            "sockets": self.open_sockets(),
            "calls that never left": len(self.runtime.steering._calls),
            "calls that wait for room": self._gate.policy.waiting,
            "places that were not given back": sum(gate.in_flight for gate in self._gate.policy._gates.values()),
        }
        self._history.direct.left += [
            f"{self.name} at rest: {number} {what}" for what, number in held.items() if number
        ]

    async def stop(self) -> None:
        """Close the client, and note what it has not let go."""
        await self.client.aclose()
        await asyncio.sleep(0)
        for call_id, trace in self._traces.items():
            self._history.direct.stories[call_id] = [line for _, line in trace.timeline.story]
        left = self._history.direct.left
        if self.open_sockets():
            left.append(f"{self.name} closed: {self.open_sockets()} sockets")
        left += [f"{self.name} closed: a timer of {name}" for name in self._loop.timers(_OUR_MODULES)]

    # -- calls -------------------------------------------------------------------------------------------------------
    async def call(self, kind: str, *, fresh: bool = False) -> CallEntry:
        """Make one call of a kind and note what becomes of it."""
        self._calls += 1
        work, rng = self._scenario.workload, self._rng.child(f"call-{self._calls}")
        hurried = not fresh and rng.chance(work.hurry_pct / 100)
        entry = CallEntry(
            id=f"{self.name}-{self._calls}",
            device=self.name,
            kind=kind,
            deadline_s=rng.uniform(*HURRY_S) if hurried else scenarios.draw(work.deadline_s, rng),
            started_s=self._loop.time(),
            fresh=fresh,
            hurried=hurried,
        )
        self._history.calls[entry.id] = entry
        asking: asyncio.Task[None] = asyncio.create_task(self._ask(entry, rng), name=f"{entry.id} {kind}")
        if not fresh and rng.chance(work.cancel_pct / 100):
            await asyncio.wait([asking], timeout=rng.uniform(0.0, 1.0) ** 3 * 10.0)
            if asking.cancel():
                entry.cancelled_s = self._loop.time()
        await asyncio.wait([asking])
        if asking.cancelled():
            entry.error, entry.phase, entry.maybe_delivered = "CancelledError", "cancelled", True
        else:
            asking.result()
        entry.ended_s = self._loop.time()
        self._loop.trace(self.name, entry.id, entry.error, entry.status, entry.maybe_delivered)
        return entry

    async def _ask(self, entry: CallEntry, rng: SimRng) -> None:
        try:
            if entry.kind in ("poll", "once"):
                await self._by_extension(entry, rng)
            else:
                await self._by_client(entry, self._lay_out(entry, rng), {})
        except errors.TransportError as error:
            entry.error, entry.message = type(error).__name__, str(error)
            entry.phase, entry.maybe_delivered = error.phase.value, error.maybe_delivered
        except Exception as error:  # told by an invariant, with the call it happened to
            entry.error, entry.message = type(error).__name__, str(error)

    def _lay_out(self, entry: CallEntry, rng: SimRng) -> _Request:
        work = self._scenario.workload
        size = int(rng.uniform(*LARGE_BYTES) if entry.kind == "large" else scenarios.draw(work.down_bytes, rng))
        query = f"size={size}"
        expected: tuple[bytes, ...] = (answer_text(entry.id, size),)
        headers: dict[str, str] = {"idempotency-key": f"key-{entry.id}"} if entry.has_key else {}
        if entry.kind == "coded":
            query += "&coded=1"
        if rng.chance(0.5):
            query += "&range=1"
        if not entry.is_write and rng.chance(work.vary_pct / 100):
            query += "&vary=1"
            expected = tuple(answer_text(f"{entry.id}.{each}", size) for each in range(_VERSIONS))
        if entry.kind == "events":
            number, gap_s = rng.integer(1, 4), rng.uniform(*EVENT_GAPS_S)
            query, headers["accept"] = f"events={number}&gap={gap_s:.3f}", "text/event-stream"
            expected = (b"".join(event_text(entry.id, each) for each in range(number)),)
        body: Any = None
        if entry.is_write:
            up = int(scenarios.draw(work.up_bytes, rng))
            body = bytes(up)
            if entry.kind.startswith("upload"):
                body = _pieces(bytes(up * 10), rng.uniform(0.0, 0.2))
        scheme = "http" if entry.kind == "plain" else "https"
        url = f"{scheme}://{rng.choice(self._names)}/op/{entry.id}?{query}"
        return _Request("POST" if entry.is_write else "GET", url, headers, body, expected, rng.chance(0.4))

    async def _by_client(self, entry: CallEntry, asked: _Request, extensions: dict[str, Any]) -> None:
        options: dict[str, Any] = {
            "extensions": {"stormline.deadline_s": entry.deadline_s, **self._priority(entry), **extensions},
            "headers": asked.headers,
            "content": asked.body,
        }
        if entry.kind == "events":
            options["timeout"] = httpx2.Timeout(None, read=EVENTS_SILENCE_S)
        async with self.client.stream(asked.method, asked.url, **options) as response:
            entry.head_s = self._loop.time()
            if asked.streamed:
                content = b"".join([piece async for piece in response.aiter_bytes()])
            else:
                content = await response.aread()
        entry.status = response.status_code
        entry.intact = content in asked.expected

    def _priority(self, entry: CallEntry) -> dict[str, Any]:
        if not self._scenario.workload.priorities:
            return {}
        return {"stormline.priority": self._rng.child(f"priority-{entry.id}").choice(tuple(URGENCIES))}

    async def _by_extension(self, entry: CallEntry, rng: SimRng) -> None:
        """Ask with what only a request's extensions say: a poll that the server may hold, a read that goes out once."""
        size = int(scenarios.draw(self._scenario.workload.down_bytes, rng))
        query, extensions = f"size={size}", {}
        if entry.kind == "poll":
            hold_s = rng.uniform(*HOLD_S)
            entry.deadline_s += 2 * hold_s
            query += f"&hold={hold_s:.3f}"
            extensions = {"stormline.pattern": "long-poll", "stormline.hold_s": hold_s}
        else:
            extensions = {"stormline.retries": False}
        url = f"https://{rng.choice(self._names)}/op/{entry.id}?{query}"
        await self._by_client(entry, _Request("GET", url, {}, None, (answer_text(entry.id, size),), False), extensions)


class _SlowNames(SimNames):
    """DNS that takes longer at times."""

    def __init__(
        self, host: Host, net: SimNet, answer: Callable[[str], tuple[str, ...]], pause: Callable[[], float]
    ) -> None:
        super().__init__(host, net, answer)
        self._pause = pause

    async def _ask(self, host: str) -> Found:
        await asyncio.sleep(self._pause())
        return await super()._ask(host)


async def _pieces(body: bytes, pause_s: float) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _BODY_PIECE_BYTES):
        yield body[start : start + _BODY_PIECE_BYTES]
        await asyncio.sleep(pause_s)
