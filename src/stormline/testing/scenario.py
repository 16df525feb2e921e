"""Scenarios: what applications do, what goes wrong, and what must come out, as TOML.

    about = "A lift: the link is dark for some seconds, again and again."

    [link]
    delay_s = [0.02, 0.08]        # a pair is drawn from, anew for every seed
    loss_pct = [0, 1]

    [workload]
    calls_per_s = 1.0
    mix = { get = 4, post = 2, post-key = 1, rpc = 1, rpc-key = 1 }

    [[faults]]
    kind = "blackout"
    every_s = [15, 30]
    lasts_s = [3, 15]

    [checks]
    success_pct = 60

All numbers may be a pair. Unknown names are refused; `docs/explanation/simulation.md` lists the kinds of fault.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from stormline.core import errors
from stormline.netmodel.params import FadeParams, LinkParams, read_fades, read_params
from stormline.testing.simloop import SimRng

FOLDER: Final = Path(__file__).parent / "scenarios"
"""Where the scenarios that ship are."""

Amount = float | tuple[float, float]
"""A number, or the ends of a range to draw it from."""
_Share = Annotated[float, msgspec.Meta(ge=0)]

FaultKind = Literal[
    "blackout",
    "lost-answers",
    "link",
    "switch-address",
    "nat-forget",
    "wall-step",
    "gateway-crash",
    "gateway-power-cut",
    "gateway-drain",
    "dispatch-down",
    "engine-cut",
    "origin-slow",
    "origin-dies",
]


CallKind = Literal["get", "post", "post-key", "rpc", "rpc-key"]
_MIX: Final[dict[CallKind, float]] = {"get": 4, "post": 3, "post-key": 2, "rpc": 2, "rpc-key": 1}


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What applications do.

    Attributes:
        devices: how many there are.
        calls_per_s: calls of each device, at random moments.
        mix: shares of the kinds of call.
        deadline_s: deadline of each call.
        up_bytes: size of a request's body.
        down_bytes: size of an answer.
        pushes_per_s: pushes to each device.
        ack_s: how long an application takes over a push.
        push_tries: how often the sender repeats a push that was not acked.
    """

    devices: Annotated[int, msgspec.Meta(ge=1, le=50)] = 2
    calls_per_s: Annotated[float, msgspec.Meta(gt=0, le=100)] = 0.7
    mix: dict[CallKind, _Share] = msgspec.field(default_factory=lambda: dict(_MIX))
    deadline_s: Amount = (4.0, 15.0)
    up_bytes: Amount = (20, 3000)
    down_bytes: Amount = (20, 8000)
    pushes_per_s: float = 0.4
    ack_s: Amount = (0.0, 0.8)
    push_tries: Annotated[int, msgspec.Meta(ge=1, le=100)] = 4


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of trouble.

    Attributes:
        kind: what happens.
        at_s: once, at this time; or
        every_s: again and again, this long after the last has ended.
        lasts_s: how long it lasts.
        mode: blackout: what becomes of packets, `drop` or `hold`.
        direction: blackout, link: `up`, `down` or `both`.
        set: link: parameters of the link while it lasts, as in `[link]`.
        seconds: wall-step: how far the clock jumps. origin-slow: how much longer each answer takes.
        on: wall-step: whose clock, `device` or `server`.
        kill_pct: switch-address: how often the system breaks the old connections; else they hang.
        restarted_pct: engine-cut: how often it comes back with an empty memory.
        all_pct: how often it hits all devices or gateways at once; else one of them.
    """

    kind: FaultKind
    at_s: Amount | None = None
    every_s: Amount | None = None
    lasts_s: Amount = 5.0
    mode: Literal["drop", "hold", "either"] = "drop"
    direction: Literal["up", "down", "both"] = "both"
    set: dict[str, Amount] = {}
    seconds: Amount = 60.0
    on: Literal["device", "server"] = "device"
    kill_pct: float = 50.0
    restarted_pct: float = 30.0
    all_pct: float = 0.0


class Checks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must come out of every run, beside the invariants.

    Attributes:
        success_pct: share of calls that get their answer, at least.
        read_success_pct: the same of reads and of writes with a key, which may be tried again.
        acked_pct: share of pushes whose sender was told `acked` in the end, at least.
    """

    success_pct: float = 0.0
    read_success_pct: float = 0.0
    acked_pct: float = 0.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole scenario.

    Attributes:
        about: one sentence for people.
        duration_s: how long applications and faults go on.
        recovery_s: what comes after them on a healthy network before the last calls, which must succeed.
        link: each device's access link, fields of `netmodel.params.LinkParams`.
        fades: bad moments of the radio, fields of `netmodel.params.FadeParams`; absent for none.
        nat_idle_s: after which a NAT on the way forgets a connection; absent for no NAT.
        gateways: how many there are.
        workload: what applications do.
        faults: what goes wrong.
        checks: what must come out.
    """

    about: str
    duration_s: Amount = 60.0
    recovery_s: Amount = 75.0
    link: dict[str, Amount] = {}
    fades: dict[str, Amount | str] = {}
    nat_idle_s: Amount | None = None
    gateways: Annotated[int, msgspec.Meta(ge=1, le=9)] = 2
    workload: Workload = Workload()
    faults: tuple[Fault, ...] = ()
    checks: Checks = Checks()


def draw(amount: Amount, rng: SimRng) -> float:
    """Give the number, or one of its range."""
    return rng.uniform(*amount) if isinstance(amount, tuple) else amount


def draw_link(fields: dict[str, Amount], rng: SimRng, *, base: LinkParams | None = None) -> LinkParams:
    """Give the parameters of one link.

    Raises:
        ConfigError: see `netmodel.params.read_params`.
    """
    whole = {"queue_bytes", "mtu_bytes"}
    drawn = {name: draw(amount, rng) for name, amount in fields.items()}
    return read_params({name: int(value) if name in whole else value for name, value in drawn.items()}, base=base)


def draw_fades(fields: dict[str, Amount | str], rng: SimRng) -> FadeParams | None:
    """Give the fades of one link, None where there are none.

    Raises:
        ConfigError: see `netmodel.params.read_fades`.
    """
    if not fields:
        return None
    return read_fades({name: value if isinstance(value, str) else draw(value, rng) for name, value in fields.items()})


def read(text: str, *, where: str) -> Scenario:
    """Read a scenario.

    Raises:
        ConfigError: not TOML, or not a scenario; the message names `where` and what is wrong.
    """
    try:
        scenario = msgspec.convert(tomllib.loads(text), Scenario)
        rng = SimRng(0)
        draw_link(scenario.link, rng)
        draw_fades(scenario.fades, rng)
        for fault in scenario.faults:
            draw_link(fault.set, rng)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, errors.ConfigError) as error:
        raise errors.ConfigError(f"{where}: {error}") from error
    for number, fault in enumerate(scenario.faults, 1):
        if (fault.at_s is None) == (fault.every_s is None):
            raise errors.ConfigError(f"{where}: fault {number} ({fault.kind}) needs one of at_s and every_s")
    if not sum(scenario.workload.mix.values()) > 0:
        raise errors.ConfigError(f"{where}: the mix is empty")
    return scenario


def names() -> tuple[str, ...]:
    """Name the scenarios that ship."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load(name: str) -> Scenario:
    """Give a scenario that ships, or that of a file ending in `.toml`.

    Raises:
        ConfigError: there is none of that name, or it cannot be read.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if path.parent == FOLDER and path.stem not in names():
        raise errors.ConfigError(f"scenario {name!r}: expected one of {', '.join(names())}, or a .toml file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.ConfigError(f"{path}: {error}") from error
    return read(text, where=str(path))
