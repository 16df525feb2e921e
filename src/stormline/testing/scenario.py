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

from stormline.core import errors, limits_lab
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
    "gateway-roll",
    "slow-reader",
    "twin",
    "dispatch-down",
    "engine-cut",
    "origin-slow",
    "origin-dies",
    # of origins that clients ask themselves
    "dead",
    "refused",
    "tls-hang",
    "tls-cut",
    "mute",
    "stall",
    "cut",
    "reset",
    "idle-close",
    "goaway",
    "refuse-stream",
    "busy",
    "narrow",
    "broken",
    "damage",
    "slow",
    "dns-fails",
    "dns-slow",
    "dns-moves",
    "told-change",
    "kill",
]
ADDRESS_FAULTS: Final = frozenset(
    {
        "dead", "refused", "tls-hang", "tls-cut", "mute", "stall", "cut", "reset", "idle-close", "goaway",
        "refuse-stream", "busy", "narrow", "broken", "damage", "slow", "kill",
    }
)  # fmt: skip
"""Faults of one address of an origin, or of all."""
DIRECT_FAULTS: Final = ADDRESS_FAULTS | {"dns-fails", "dns-slow", "dns-moves", "told-change"}
"""Faults of worlds with `[direct]`, beside those of links and clocks."""
LINK_FAULTS: Final = frozenset({"blackout", "lost-answers", "link", "switch-address", "nat-forget", "wall-step"})
"""Faults of every world."""


CallKind = Literal[
    "get", "post", "post-key", "rpc", "rpc-key",
    "large", "coded", "plain", "upload", "upload-key", "events", "poll", "once",
]  # fmt: skip
_PLATFORM_KINDS: Final = frozenset({"rpc", "rpc-key"})
_DIRECT_KINDS: Final = frozenset({"large", "coded", "plain", "upload", "upload-key", "events", "poll", "once"})
_HAVE_NO_PLACE: Final = {False: "need a platform, and there is [direct]", True: "need [direct]"}
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
        push_bytes: size of a push's body.
        ack_s: how long an application takes over a push.
        push_tries: how often the sender repeats a push that was not acked.
        cancel_pct: share of calls whose caller cancels them; with `[direct]`.
        priorities: calls are key, normal or background ones; with `[direct]`.
        vary_pct: share of reads whose answer is another each time it is asked for; with `[direct]`.
        hurry_pct: share of calls whose deadline is a second or two; with `[direct]`.
    """

    devices: Annotated[int, msgspec.Meta(ge=1, le=limits_lab.SIM_DEVICES_MAX)] = 2
    calls_per_s: Annotated[float, msgspec.Meta(gt=0, le=100)] = 0.7
    mix: dict[CallKind, _Share] = msgspec.field(default_factory=lambda: dict(_MIX))
    deadline_s: Amount = (4.0, 15.0)
    up_bytes: Amount = (20, 3000)
    down_bytes: Amount = (20, 8000)
    pushes_per_s: float = 0.4
    push_bytes: Amount = 0
    ack_s: Amount = (0.0, 0.8)
    push_tries: Annotated[int, msgspec.Meta(ge=1, le=100)] = 4
    cancel_pct: float = 0.0
    hurry_pct: float = 0.0
    vary_pct: float = 0.0
    priorities: bool = False


class Direct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A world whose clients ask origins themselves.

    Attributes:
        origins: names there are.
        addresses: of each, of both families in turn.
        http2_pct: how often an address speaks HTTP/2 too.
        cost_s: what a server needs for an answer, on average.
        platform: dispatch is there too, and tells clients the origins' addresses; nothing goes over a gateway.
        configured: clients have the origins' addresses in their settings, for where names fail, and a rule that has
            late reads hedged.
        networks: kinds of network the clients are told to be on, one is drawn for each.
        network_changes_pct: how often a client is told of a new address.
        spare: the last address of each origin has no trouble of its own, unless it hits all.
        small_faults: there are those of `testing.buggify` too.
    """

    origins: Annotated[int, msgspec.Meta(ge=1, le=4)] = 2
    addresses: Annotated[int, msgspec.Meta(ge=1, le=8)] = 3
    http2_pct: float = 50.0
    cost_s: Amount = (0.005, 0.05)
    platform: bool = False
    configured: bool = False
    networks: tuple[Literal["unknown", "wifi", "cell", "wired"], ...] = ("unknown", "wifi", "cell")
    network_changes_pct: float = 50.0
    spare: bool = False
    small_faults: bool = True


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
        all_pct: how often it hits all devices, gateways or addresses at once; else one of them.
        pct: of a server's fault: how many of the requests in a hundred it hits while it lasts.
        places: narrow: requests side by side that it takes; each beyond has `pct` more of a chance to be refused.
        retry_after_s: busy, broken: what `Retry-After` says; absent for none.
        bytes_per_s: slow-reader: how much the device takes from its network.
        half_open_pct: twin: how often the link of the copy before is dark while the new one comes.
        elsewhere_pct: twin: how often the new copy comes to another gateway.
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
    pct: Amount = 100.0
    places: Amount = 2
    retry_after_s: Amount | None = None
    bytes_per_s: Amount = 0
    half_open_pct: float = 0.0
    elsewhere_pct: float = 50.0


class Checks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must come out of every run, beside the invariants.

    Attributes:
        success_pct: share of calls that get their answer, at least.
        read_success_pct: the same of reads and of writes with a key, which may be tried again.
        acked_pct: share of pushes whose sender was told `acked` in the end, at least.
        ipv6_pct: share of the calls after the storm that are answered over IPv6, at least.
        p95_s: 95 of 100 calls that ask and get a small answer take no longer; 0 for any time. Those of devices that
            read slowly do not count.
        bin_pct: share of the devices hit by a gateway's end that may begin to come back in the same 0.1 s, but for
            chance (three standard deviations); 0 for any.
        tries: connections that such devices may begin until all are back, for each of them; 0 for any number.
        back_s: within which all are back; 0 for any time.
    """

    success_pct: float = 0.0
    read_success_pct: float = 0.0
    acked_pct: float = 0.0
    ipv6_pct: float = 0.0
    p95_s: float = 0.0
    bin_pct: float = 0.0
    tries: float = 0.0
    back_s: float = 0.0


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
        even: devices are dealt to all of them; else all come to the first.
        small_faults: there are those of `testing.buggify` too.
        direct: there are none, clients ask origins themselves.
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
    even: bool = False
    small_faults: bool = True
    direct: Direct | None = None
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
        if fault.kind not in LINK_FAULTS and (fault.kind in DIRECT_FAULTS) is (scenario.direct is None):
            needs = "[direct]" if scenario.direct is None else "gateways, and [direct] has none"
            raise errors.ConfigError(f"{where}: fault {number} ({fault.kind}) needs {needs}")
    strange = sorted(set(scenario.workload.mix) & (_PLATFORM_KINDS if scenario.direct is not None else _DIRECT_KINDS))
    if strange:
        raise errors.ConfigError(f"{where}: calls of kind {strange[0]!r} {_HAVE_NO_PLACE[scenario.direct is None]}")
    if not sum(scenario.workload.mix.values()) > 0:
        raise errors.ConfigError(f"{where}: the mix is empty")
    return scenario


def with_devices(scenario: Scenario, devices: int) -> Scenario:
    """Give the same scenario with another number of devices.

    Raises:
        ConfigError: too many.
    """
    if not 1 <= devices <= limits_lab.SIM_DEVICES_MAX:
        raise errors.ConfigError(f"devices: expected 1 to {limits_lab.SIM_DEVICES_MAX}, got {devices}")
    workload = msgspec.structs.replace(scenario.workload, devices=devices)
    return msgspec.structs.replace(scenario, workload=workload)


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
