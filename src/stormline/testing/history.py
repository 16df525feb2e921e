"""What happened in a simulated run, as the invariants look at it afterwards. Plain data, no behaviour."""

from dataclasses import dataclass, field
from typing import Final

from stormline.telemetry.timeline import CallRecord

_WRITES: Final = frozenset({"post", "rpc", "upload"})


@dataclass(slots=True, kw_only=True)
class CallEntry:
    """One call of an application.

    Attributes:
        id: unique in the run; origin and service know the call by it.
        device: who called.
        kind: `get`, `post`, `post-key`, `rpc`, `rpc-key`; in worlds without a platform more of them, see `simdirect`.
        deadline_s: what it was given.
        started_s: virtual time.
        ended_s: virtual time, None while it runs.
        error: class of the exception it ended with, empty for none.
        message: its text.
        phase: the error's phase, empty where it has none.
        maybe_delivered: the error's word.
        status: HTTP status, 0 for none.
        intact: the answer was the one to this call, whole.
        fresh: no fault of the scenario was on any more when it began.
        head_s: when the head of its answer came, None where none did or nobody looked.
        cancelled_s: when its caller cancelled it, None where it did not.
        hurried: its deadline is so short that it says nothing of the network.
    """

    id: str
    device: str
    kind: str
    deadline_s: float
    started_s: float
    ended_s: float | None = None
    error: str = ""
    message: str = ""
    phase: str = ""
    maybe_delivered: bool = False
    status: int = 0
    intact: bool = False
    fresh: bool = False
    head_s: float | None = None
    cancelled_s: float | None = None
    hurried: bool = False

    @property
    def ok(self) -> bool:
        """It got its answer."""
        return self.ended_s is not None and not self.error and self.status in (0, 200)

    @property
    def is_write(self) -> bool:
        """It changes something where it is processed."""
        return self.kind.partition("-")[0] in _WRITES

    @property
    def has_key(self) -> bool:
        """It may be repeated."""
        return self.kind.endswith("-key")


@dataclass(slots=True, kw_only=True)
class PushEntry:
    """One push a business sent, with all its repetitions.

    Attributes:
        id: the push's id.
        device: to whom.
        results: what the sender was told each time; `error` where it was told nothing.
        shown: how often the application saw it; of a device with several copies the one that saw it most often.
        acked_s: when the application called `ack`, None where it did not.
        confirmed_s: when the sender was first told `acked`, None where it never was.
        intact: the application saw what was sent.
        fresh: no fault of the scenario was on any more when it was sent first.
        size: bytes of its body, at least.
        seen_by: how often each copy of the device saw it.
    """

    id: str
    device: str
    results: list[str] = field(default_factory=list)
    shown: int = 0
    acked_s: float | None = None
    confirmed_s: float | None = None
    intact: bool = True
    fresh: bool = False
    size: int = 0
    seen_by: dict[str, int] = field(default_factory=dict)

    @property
    def confirmed(self) -> bool:
        """The sender was told that it arrived."""
        return self.confirmed_s is not None


@dataclass(slots=True, kw_only=True)
class Processing:
    """What origin or service did for one call.

    Attributes:
        arrivals: requests that came.
        keyless: those of them without an idempotency key.
        executed: times the work was done.
        refusals: requests answered with a status that is no answer.
    """

    arrivals: int = 0
    keyless: int = 0
    executed: int = 0
    refusals: int = 0


@dataclass(frozen=True, slots=True)
class LinkLife:
    """One session of a device, over all its connections: from when to when its client held it."""

    device: str
    addresses: tuple[str, ...]
    opened_s: float
    closed_s: float


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """A call's record, and when in virtual time it was made (its own time is the device's wall clock, which steps)."""

    record: CallRecord
    ended_s: float

    @property
    def started_s(self) -> float:
        """When the call began."""
        return self.ended_s - self.record.total_ms / 1000

    @property
    def call_id(self) -> str:
        """The id of the call it is about: the last part of its path or method."""
        return self.record.path.rpartition("/")[2].rpartition(".")[2]


@dataclass(slots=True)
class Attempt:
    """One request that the executor gave to the pool of connections, from then to its answer's head or its failure.

    Attributes:
        call_id: for which call.
        began_s: virtual time.
        ended_s: virtual time, None while it runs.
        error: class of what it failed with, empty for none.
        retry_after_s: the seconds that the answer's `Retry-After` said, None where it said none.
    """

    call_id: str
    began_s: float
    ended_s: float | None = None
    error: str = ""
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class RetryAsk:
    """One question to a client's retry budget, or a first request that it was told of.

    Attributes:
        device: whose budget.
        host: for which host.
        at_s: virtual time.
        cost: what was granted, in tokens: 1 for a retry, less where nothing had been heard; 0 for one refused.
        first: it is a first request, not a retry.
        later: it was told to wait, and for how long; the client goes on after that without asking again.
    """

    device: str
    host: str
    at_s: float
    cost: float
    first: bool = False
    later: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One call that waited before its host, and was let in.

    Attributes:
        device: whose.
        host: to whom.
        call_id: which.
        urgency: 0 to 7.
        came_s: when it first came to the gate, virtual time.
        queued_s: when it got into the line.
        granted_s: when it might go.
    """

    device: str
    host: str
    call_id: str
    urgency: int
    came_s: float
    queued_s: float
    granted_s: float


@dataclass(slots=True, kw_only=True)
class DirectHistory:
    """What is looked at in worlds whose clients ask origins themselves.

    Attributes:
        attempts: what the executor gave to the pool, in order.
        lanes: the most attempts of one call that ran side by side, by call.
        asks: what became of the retry budget, in order.
        connects: connections begun, as (device, address, virtual time).
        dark: when a device's link was dark both ways, as (device, from, to).
        stories: what each call told of itself.
        waits: calls that waited for room before their hosts, in the order they went.
        left: what a client still held when it had nothing to do, or after it was closed.
    """

    attempts: list[Attempt] = field(default_factory=list)
    lanes: dict[str, int] = field(default_factory=dict)
    asks: list[RetryAsk] = field(default_factory=list)
    connects: list[tuple[str, str, float]] = field(default_factory=list)
    dark: list[tuple[str, float, float]] = field(default_factory=list)
    stories: dict[str, list[str]] = field(default_factory=dict)
    waits: list[Wait] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Goodbye:
    """A device was refused for good.

    Attributes:
        device: which.
        at_s: when its application heard of it, virtual time.
        code: the gateway's.
        reason: its words.
    """

    device: str
    at_s: float
    code: int
    reason: str


@dataclass(slots=True, kw_only=True)
class FleetHistory:
    """What is looked at where many devices meet gateways that come and go.

    Attributes:
        dials: connections begun to gateways, as (device, virtual time).
        welcomes: WELCOMEs heard, as (device, virtual time).
        goodbyes: devices that were refused for good.
        outages: when gateways were lost or asked their clients to leave, as (gateway, virtual time, devices hit).
        slow: when a device took little or nothing from its network, as (device, from, to).
        names: which device, by the id the platform knows it by; of one that has copies the newest.
        copies: of a device that has several the names, the newest last, with the time when each began.
    """

    dials: list[tuple[str, float]] = field(default_factory=list)
    welcomes: list[tuple[str, float]] = field(default_factory=list)
    goodbyes: list[Goodbye] = field(default_factory=list)
    outages: list[tuple[str, float, frozenset[str]]] = field(default_factory=list)
    slow: list[tuple[str, float, float]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    copies: dict[str, list[tuple[str, float]]] = field(default_factory=dict)

    def newer_copy(self, name: str, at_s: float) -> bool:
        """Say whether a newer copy of the same device had begun by then."""
        for copies in self.copies.values():
            names = [copy for copy, began_s in copies if began_s <= at_s]
            if name in names:
                return names[-1] != name
        return False


@dataclass(frozen=True, slots=True)
class Bound:
    """The most that was seen of something that has a bound."""

    what: str
    seen: float
    bound: float


@dataclass(slots=True, kw_only=True)
class History:
    """All of one run."""

    scenario: str
    seed: int
    calls: dict[str, CallEntry] = field(default_factory=dict)
    pushes: dict[str, PushEntry] = field(default_factory=dict)
    processed: dict[str, Processing] = field(default_factory=dict)
    records: dict[str, list[RecordEntry]] = field(default_factory=dict)
    strange_pushes: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    links: list[LinkLife] = field(default_factory=list)
    bounds: dict[str, Bound] = field(default_factory=dict)
    direct: DirectHistory = field(default_factory=DirectHistory)
    fleet: FleetHistory = field(default_factory=FleetHistory)
    end_s: float = 0.0
    packets: int = 0
    fired: dict[str, int] = field(default_factory=dict)

    def saw(self, what: str, value: float, bound: float) -> None:
        """Note the most that was seen of `what`."""
        before = self.bounds.get(what)
        if before is None or value > before.seen:
            self.bounds[what] = Bound(what, value, bound)

    def success_pct(self) -> float:
        """Share of calls that got their answer."""
        return 100.0 * sum(call.ok for call in self.calls.values()) / max(1, len(self.calls))
