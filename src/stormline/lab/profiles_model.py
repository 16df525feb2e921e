"""What a profile of the laboratory is made of: links, servers, DNS, and events in the course of a run."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from stormline.core import errors, limits_lab
from stormline.core.clock import Rng
from stormline.lab import traces
from stormline.lab.chance import SeededRng
from stormline.lab.faults import Fault
from stormline.lab.specs import Behaviour, DnsSpec
from stormline.netmodel.params import GilbertElliott

RTT_STEP_S: Final = 1.0
"""How long a round-trip time drawn from `RttQuantiles` holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RttQuantiles:
    """Round-trip times as published: points of their distribution, straight lines between."""

    points: tuple[tuple[float, float], ...]
    """(percentile, milliseconds), from 0 to 100."""

    def __post_init__(self) -> None:
        shares = [share for share, _ in self.points]
        times = [ms for _, ms in self.points]
        if len(self.points) < 2 or shares[0] != 0 or shares[-1] != 100:
            raise errors.ConfigError("rtt quantiles: must run from 0 to 100")
        if any(b <= a for a, b in itertools.pairwise(shares)) or times != sorted(times) or times[0] < 0:
            raise errors.ConfigError("rtt quantiles: must rise")

    def at_s(self, share: float) -> float:
        """Give the round-trip time in seconds below which `share` (0 to 100) of all lie."""
        for (low, low_ms), (high, high_ms) in itertools.pairwise(self.points):
            if share <= high:
                return (low_ms + (high_ms - low_ms) * (share - low) / (high - low)) / 1000
        return self.points[-1][1] / 1000

    def steps(self, duration_s: float, rng: Rng) -> list[dict[str, Any]]:
        """Make a link's schedule: each way has half of a round trip, drawn anew every `RTT_STEP_S`.

        The draws are spread evenly over the distribution (one from each of as many equal parts as there are steps),
        so that each run has the published percentiles; only their order is chance.
        """
        count = max(1, math.ceil(duration_s / RTT_STEP_S))
        shares = [(part + rng.random()) * 100 / count for part in range(count)]
        order = sorted(range(count), key=lambda _: rng.random())
        return [
            {"at_s": place * RTT_STEP_S, "set": {"delay_s": round(self.at_s(shares[part]) / 2, 6)}}
            for place, part in enumerate(order)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """One uplink. Parameters are plain data as in `netmodel.params.read_params`."""

    up: Mapping[str, Any] = field(default_factory=dict)
    down: Mapping[str, Any] = field(default_factory=dict)
    fades: Mapping[str, Any] | None = None
    """As in `netmodel.params.read_fades`."""
    rtt: RttQuantiles | None = None
    """A round-trip time that changes during the run; the delays of `up` and `down` are those before it."""

    def trace_names(self) -> list[str]:
        """Name the capacity traces it needs."""
        return [str(way["trace"]) for way in (self.up, self.down) if way.get("trace")]

    def numbers(self) -> str:
        """Say its numbers in one line: round trip, rates to and from the device, loss of each direction, queue."""
        rtt_ms = (self.up.get("delay_s", 0.0) + self.down.get("delay_s", 0.0)) * 1000
        parts = [f"{rtt_ms:g} ms"]
        if self.rtt is not None:
            parts = ["/".join(f"{ms:g}" for _, ms in self.rtt.points[1:-1]) + " ms"]
        rates = [way.get("trace") or _rate(way.get("rate_bps")) for way in (self.down, self.up)]
        parts.append(" / ".join(rates))
        if loss_pct := self.down.get("loss_pct"):
            parts.append(f"{loss_pct:g} % loss")
        if burst := self.down.get("burst"):
            chain = GilbertElliott(**burst)
            parts.append(f"{chain.mean_loss_pct:g} % loss in bursts of {100 / chain.r_pct:g} packets")
        if self.fades:
            parts.append("fades of {duration_s:g} s every {period_s:g} s lose {loss_pct:g} %".format(**self.fades))
        if queue_bytes := self.down.get("queue_bytes"):
            parts.append(f"queue {queue_bytes // 1024} KB")
        return ", ".join(parts)


def _rate(bps: float | None) -> str:
    if bps is None:
        return "no bound"
    return f"{bps / 1e6:g} Mbit/s" if bps >= 1e6 else f"{bps / 1e3:g} kbit/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """The origin: its addresses and what each does wrong."""

    v4: int = 3
    """How many IPv4 addresses it has."""
    v6: int = 0
    """How many IPv6 addresses; they come after the others in indexes."""
    behaviour: Behaviour = field(default_factory=Behaviour)
    """Of all addresses."""
    special: Mapping[int, Behaviour] = field(default_factory=dict)
    """Of some addresses, by index, instead."""

    def __post_init__(self) -> None:
        # Three more of each family are taken by the captive server, DNS and one that nobody has.
        most = limits_lab.LAB_SERVER_ADDRESSES_MAX - 2
        if not (0 <= self.v4 <= most and 0 <= self.v6 <= most and self.v4 + self.v6 >= 1):
            raise errors.ConfigError(f"server: must have 1 to {most} addresses")
        if any(not 0 <= index < self.v4 + self.v6 for index in self.special):
            raise errors.ConfigError("server: special behaviour of an address that is not there")

    def of(self, index: int) -> Behaviour:
        """Give the behaviour of one address."""
        return self.special.get(index, self.behaviour)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happens to a run. Times are seconds since its begin."""

    at_s: float
    """0: it is so before the first packet."""
    fault: Fault
    until_s: float | None = None
    """None: to the end."""

    @property
    def what(self) -> str:
        """What happens, for reports and plots."""
        return self.fault.what


Plan: TypeAlias = Callable[[float, Rng], Iterable[Event]]
"""Makes the events of a run from its duration and a source of chance."""


def _no_events(duration_s: float, rng: Rng) -> Iterator[Event]:
    return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A weak network and its servers, with a load that suits it."""

    name: str
    about: str
    """One sentence with its numbers."""
    wifi: LinkSpec
    cell: LinkSpec | None = None
    """The second uplink; None: the device has one."""
    plan: Plan = _no_events
    """What happens when; see `expand`."""
    server: ServerSpec = field(default_factory=ServerSpec)
    dns: DnsSpec = field(default_factory=DnsSpec)
    requests: int = 300
    """In `duration_s`."""
    duration_s: float = 120.0
    scheme: str = "https"
    """`https` or `http`."""

    def expand(self, seed: int, duration_s: float | None = None) -> tuple[Event, ...]:
        """Make the events of one run, in order of time; the same arguments give the same events.

        Args:
            seed: of the run.
            duration_s: another duration than the profile's.

        Raises:
            ConfigError: events out of order, too many, or equal ones that overlap.
        """
        length_s = self.duration_s if duration_s is None else duration_s
        events = sorted(self.plan(length_s, SeededRng(f"plan/{self.name}", seed)), key=lambda event: event.at_s)
        if len(events) > limits_lab.LAB_EVENTS_MAX:
            raise errors.ConfigError(f"profile {self.name}: more than {limits_lab.LAB_EVENTS_MAX} events")
        busy: dict[str, float] = {}
        for event in events:
            until_s = math.inf if event.until_s is None else event.until_s
            if not 0 <= event.at_s < until_s:
                raise errors.ConfigError(f"profile {self.name}: {event.what} ends before it begins")
            if event.at_s < busy.get(event.what, -1.0):
                raise errors.ConfigError(f"profile {self.name}: {event.what} overlaps itself")
            busy[event.what] = until_s
        return tuple(events)

    def requests_in(self, duration_s: float) -> int:
        """Give the number of requests for another duration: the same load per second, at least one."""
        return max(1, round(self.requests * duration_s / self.duration_s))

    def trace_names(self) -> list[str]:
        """Name the capacity traces its links need."""
        return sorted({name for spec in (self.wifi, self.cell) if spec is not None for name in spec.trace_names()})

    def missing_traces(self, folder: Path) -> list[str]:
        """Name the recordings it needs that are not in a folder; a profile with any cannot run."""
        there = {*traces.recorded(folder), *traces.synthetic()}
        return [name for name in self.trace_names() if name not in there]


# -- ways to say what a link is like ----------------------------------------------------------------------------------
def link(
    *,
    rtt_ms: float,
    down_mbps: float | None = None,
    up_mbps: float | None = None,
    loss_pct: float = 0.0,
    queue_kb: int | None = None,
    **both: Any,
) -> LinkSpec:
    """Describe a symmetric link in the words of a data sheet.

    Args:
        rtt_ms: round-trip time, half each way.
        down_mbps: megabits a second to the device; None: no bound.
        up_mbps: megabits a second from it.
        loss_pct: loss of packets in each direction.
        queue_kb: kilobytes (1024) that each direction's queue holds; None: the default.
        both: further parameters of both directions.
    """
    common: dict[str, Any] = {"delay_s": rtt_ms / 2000, **both}
    if loss_pct:
        common["loss_pct"] = loss_pct
    if queue_kb is not None:
        common["queue_bytes"] = queue_kb * 1024
    up = common if up_mbps is None else {**common, "rate_bps": up_mbps * 1e6}
    down = common if down_mbps is None else {**common, "rate_bps": down_mbps * 1e6}
    return LinkSpec(up=up, down=down)


def recorded_link(*, rtt_ms: float, down: str, up: str, queue_kb: int) -> LinkSpec:
    """Describe a link whose capacity follows traces, by name."""
    common = {"delay_s": rtt_ms / 2000, "queue_bytes": queue_kb * 1024}
    return LinkSpec(up={**common, "trace": up}, down={**common, "trace": down})


def with_fades(spec: LinkSpec, **fades: Any) -> LinkSpec:
    """Give a link with fades."""
    return dataclasses.replace(spec, fades=fades)


# -- ways to say what happens when ------------------------------------------------------------------------------------
def always(*faults: Fault) -> Plan:
    """Have faults for the whole run."""
    return lambda duration_s, rng: [Event(at_s=0.0, fault=fault) for fault in faults]


def between(begin: float, end: float, *faults: Fault) -> Plan:
    """Have faults from one share of the run to another (0 to 1)."""
    return lambda duration_s, rng: [
        Event(at_s=begin * duration_s, fault=fault, until_s=end * duration_s) for fault in faults
    ]


def together(*plans: Plan) -> Plan:
    """Have what several plans say."""

    def plan(duration_s: float, rng: Rng) -> Iterator[Event]:
        for each in plans:
            yield from each(duration_s, rng)

    return plan


def each_in_turn(begin: float, end: float, *faults: Fault) -> Plan:
    """Have one fault after the other, without a pause, from one share of the run to another."""

    def plan(duration_s: float, rng: Rng) -> Iterator[Event]:
        step_s = (end - begin) * duration_s / len(faults)
        for number, fault in enumerate(faults):
            at_s = begin * duration_s + number * step_s
            yield Event(at_s=at_s, fault=fault, until_s=at_s + step_s)

    return plan


def episodes(fault: Fault, *, every_s: float, length_s: float) -> Plan:
    """Have a fault once in each `every_s`, at a moment of chance that leaves air before and after.

    A run shorter than one round has one episode, shortened with it.
    """

    def plan(duration_s: float, rng: Rng) -> Iterator[Event]:
        rounds = max(1, round(duration_s / every_s))
        slot_s = duration_s / rounds
        dark_s = min(length_s, length_s * slot_s / every_s)
        free_s = slot_s - dark_s
        for number in range(rounds):
            at_s = number * slot_s + free_s * (0.25 + 0.5 * rng.random())
            yield Event(at_s=at_s, fault=fault, until_s=at_s + dark_s)

    return plan


def blinking(fault: Fault, *, good_s: float, bad_s: float) -> Plan:
    """Have a fault in a fixed rhythm, beginning at a moment of chance within the first good time."""

    def plan(duration_s: float, rng: Rng) -> Iterator[Event]:
        at_s = good_s * (0.25 + 0.75 * rng.random())
        while at_s < duration_s:
            yield Event(at_s=at_s, fault=fault, until_s=at_s + bad_s)
            at_s += good_s + bad_s

    return plan
