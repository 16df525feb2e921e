"""What a shaper is told and what it answers: one JSON object per message, one answer per command."""

import enum
from typing import Any, TypeAlias

import msgspec


class Direction(enum.StrEnum):
    """Which way through a link."""

    UP = "up"
    """From the near end (the device) to the far end."""
    DOWN = "down"
    BOTH = "both"


class Port(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One end of a link: a TUN device in a network namespace."""

    netns: str
    """Path of the namespace, `/run/netns/NAME`."""
    device: str


class LinkSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A link between two devices. Parameters are plain data as in `netmodel.params.read_params`."""

    name: str
    near: Port
    far: Port
    up: dict[str, Any] = {}
    down: dict[str, Any] = {}
    fades: dict[str, Any] | None = None
    seed: int = 0
    """The same seed and packets meet the same chance."""


class Setup(msgspec.Struct, frozen=True, tag="setup", forbid_unknown_fields=True, kw_only=True):
    """The first command, and only the first."""

    links: list[LinkSetup]
    traces: list[str] = []
    """Names of capacity traces that parameters and schedules may use."""
    trace_folder: str | None = None
    real_time: bool = True
    """Ask for SCHED_FIFO and locked memory; goes on without where they are refused."""


class Reconfigure(msgspec.Struct, frozen=True, tag="reconfigure", forbid_unknown_fields=True, kw_only=True):
    """Change some parameters of a link, from the defaults on where `whole`."""

    link: str
    direction: Direction = Direction.BOTH
    fields: dict[str, Any]
    whole: bool = False


class StartBlackout(msgspec.Struct, frozen=True, tag="start-blackout", forbid_unknown_fields=True, kw_only=True):
    """Make a link dark, for a time or until told otherwise."""

    link: str
    direction: Direction = Direction.BOTH
    mode: str = "drop"
    duration_s: float | None = None


class EndBlackout(msgspec.Struct, frozen=True, tag="end-blackout", forbid_unknown_fields=True, kw_only=True):
    """Bring a link back."""

    link: str
    direction: Direction = Direction.BOTH


class Follow(msgspec.Struct, frozen=True, tag="follow", forbid_unknown_fields=True, kw_only=True):
    """Follow a schedule (`netmodel.schedule.read_schedule`) instead of the one before; no steps: none."""

    link: str
    direction: Direction = Direction.BOTH
    steps: list[dict[str, Any]]
    repeat_s: float | None = None
    start_s: float | None = None
    """Its time 0 on CLOCK_MONOTONIC, which all processes of a machine share; None: now."""


class SetFades(msgspec.Struct, frozen=True, tag="set-fades", forbid_unknown_fields=True, kw_only=True):
    """Have other fades on a link (both directions), or none; the first gap begins at `start_s`."""

    link: str
    fades: dict[str, Any] | None
    seed: int = 0
    start_s: float | None = None


class AskStatistics(msgspec.Struct, frozen=True, tag="statistics", forbid_unknown_fields=True):
    """Ask for the counters."""

    reset_lateness: bool = False
    """Begin the lateness figures anew after this answer."""


class AskDrops(msgspec.Struct, frozen=True, tag="drops", forbid_unknown_fields=True):
    """Take the oldest remembered losses out of the shaper's memory."""


class Stop(msgspec.Struct, frozen=True, tag="stop", forbid_unknown_fields=True):
    """End. Packets on their way are lost."""


Command: TypeAlias = (
    Setup | Reconfigure | StartBlackout | EndBlackout | Follow | SetFades | AskStatistics | AskDrops | Stop
)


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The answer to `Setup`: packets flow."""

    scheduler: str
    """`fifo`, or `other` where real time was refused or not asked for."""
    memory_locked: bool


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The command holds from `at_s` on."""

    at_s: float
    """CLOCK_MONOTONIC."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The command was not carried out; nothing changed."""

    message: str
    machine: bool = False
    """True where the machine refused; False where the command makes no sense."""


class Lateness(msgspec.Struct, frozen=True):
    """How late something happened, seconds; all 0 where it never happened."""

    count: int
    p50_s: float
    p99_s: float
    max_s: float


class DirectionStatistics(msgspec.Struct, frozen=True):
    """Counters of one direction of one link since the start."""

    link: str
    direction: Direction
    offered_packets: int
    offered_bytes: int
    delivered_packets: int
    delivered_bytes: int
    held_packets: int
    duplicated_packets: int
    reordered_packets: int
    queue_bytes_max: int
    lost: dict[str, int]
    """By reason (`netmodel.link.Reason`)."""


class Statistics(msgspec.Struct, frozen=True, tag="statistics"):
    """What a shaper did, and how far it can be trusted."""

    at_s: float
    links: list[DirectionStatistics]
    deliveries: Lateness
    """From the moment a packet was due to the moment it was written."""
    wakeups: Lateness
    """From the moment the shaper wanted to run to the moment it did; shows a busy machine also without traffic."""
    overflow_packets: int
    """Dropped because `limits_lab.SHAPER_PACKETS_MAX` were on their way: the run is void."""
    write_errors: int
    """Packets a device refused (it is down, or its namespace ends)."""
    cpu_s: float
    """CPU time used since the start."""


class Drop(msgspec.Struct, frozen=True, array_like=True):
    """One lost packet."""

    at_s: float
    link: str
    direction: Direction
    size_bytes: int
    reason: str
    protocol: int
    """IP protocol number: 6 TCP, 17 UDP, 1 and 58 ICMP; 255 where it is no IP packet."""


class Drops(msgspec.Struct, frozen=True, tag="drops"):
    """Lost packets, oldest first; ask again until the list is empty."""

    drops: list[Drop]
    forgotten: int
    """Lost packets that were forgotten since the start because nobody asked in time."""


Answer: TypeAlias = Ready | Done | Failed | Statistics | Drops
