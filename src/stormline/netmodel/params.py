"""What one direction of a link is like: frozen values, and how they are read from plain data (a profile, JSON).

Percentages run from 0 to 100, times are seconds, sizes are bytes of whole IP packets.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from stormline.core import errors, limits_lab
from stormline.netmodel.trace import Trace

_T = TypeVar("_T")


class BlackoutMode(enum.StrEnum):
    """What happens to packets while a link is dark."""

    DROP = "drop"
    """What is sent into the dark is lost."""
    HOLD = "hold"
    """The sender's modem keeps packets, as many as the queue holds, and sends them when the light comes back."""


class Distribution(enum.StrEnum):
    """How lengths of time spread around their mean."""

    FIXED = "fixed"
    """Always the mean."""
    UNIFORM = "uniform"
    """Evenly between 0.5 and 1.5 times the mean."""
    EXPONENTIAL = "exponential"
    """Memoryless; many short ones, few long ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GilbertElliott:
    """Loss in bursts: a chain of two states that takes one step per packet (Gilbert 1960, Elliott 1963).

    The mean loss is `mean_loss_pct`; the chain stays in the bad state for 100 / `r_pct` packets in the mean.
    """

    p_pct: float
    """Chance of a step from good to bad."""
    r_pct: float
    """Chance of a step from bad to good; above 0, or the first burst never ends."""
    loss_good_pct: float = 0.0
    """Loss in the good state."""
    loss_bad_pct: float = 100.0
    """Loss in the bad state."""

    def __post_init__(self) -> None:
        for name in ("p_pct", "r_pct", "loss_good_pct", "loss_bad_pct"):
            _check_pct(f"burst.{name}", getattr(self, name))
        if self.r_pct == 0:
            raise errors.ConfigError("link parameter burst.r_pct: must be above 0")

    @property
    def mean_loss_pct(self) -> float:
        """Share of packets lost in the long run."""
        bad = self.p_pct / (self.p_pct + self.r_pct)
        return self.loss_good_pct * (1 - bad) + self.loss_bad_pct * bad


@dataclass(frozen=True, slots=True, kw_only=True)
class FadeParams:
    """Episodes in which the radio is bad: they come by time, not by packet, and hit both directions at once."""

    period_s: float
    """Mean time from the start of one fade to the start of the next."""
    duration_s: float
    """Mean length of a fade; below `period_s`."""
    loss_pct: float
    """Share of packets lost during a fade."""
    distribution: Distribution = Distribution.FIXED
    """How fades and the gaps between them spread around their means."""

    def __post_init__(self) -> None:
        _check_number("fades.period_s", self.period_s)
        _check_number("fades.duration_s", self.duration_s)
        _check_pct("fades.loss_pct", self.loss_pct)
        if self.period_s < limits_lab.FADE_PERIOD_S_MIN:
            raise errors.ConfigError(f"link parameter fades.period_s: must be {limits_lab.FADE_PERIOD_S_MIN} or more")
        if not 0 < self.duration_s < self.period_s:
            raise errors.ConfigError("link parameter fades.duration_s: must be above 0 and below period_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkParams:
    """One direction of a link. The defaults are a perfect wire.

    A packet passes these stages in order: MTU, queue, serialisation by rate or trace, blackout, loss, delay, reordering
    and duplication. What is lost on the air has used the link's capacity, as on a real radio.
    """

    delay_s: float = 0.0
    """Propagation: every packet arrives at least this long after it was offered."""
    jitter_s: float = 0.0
    """More delay, drawn evenly from 0 to this for each packet. Order is kept, so the mean added is larger when packets
    are closer together than this."""
    rate_bps: float | None = None
    """Bits per second; None: no bound. Not together with `trace`."""
    trace: Trace | None = None
    """Recorded or synthetic capacity instead of a rate."""
    trace_offset_s: float = 0.0
    """Where in the trace to start."""
    queue_bytes: int = limits_lab.LINK_QUEUE_BYTES
    """Bytes that may wait for their turn, the packet being sent included; what does not fit is dropped (drop-tail)."""
    loss_pct: float = 0.0
    """Independent loss."""
    burst: GilbertElliott | None = None
    """Loss in bursts, besides `loss_pct`."""
    reorder_pct: float = 0.0
    """Share of packets that are held back by `reorder_gap_s`."""
    reorder_gap_s: float = 0.01
    """How long; packets sent up to this much later overtake the one held back."""
    duplicate_pct: float = 0.0
    """Share of packets that arrive twice."""
    mtu_bytes: int = limits_lab.LINK_MTU_BYTES_MAX
    """Larger packets vanish without a word, as behind a router whose ICMP is filtered."""

    def __post_init__(self) -> None:
        for name in ("delay_s", "jitter_s", "trace_offset_s", "reorder_gap_s"):
            _check_number(name, getattr(self, name))
        for name in ("loss_pct", "reorder_pct", "duplicate_pct"):
            _check_pct(name, getattr(self, name))
        if self.rate_bps is not None:
            _check_number("rate_bps", self.rate_bps)
            if self.rate_bps < limits_lab.LINK_RATE_BPS_MIN:
                raise errors.ConfigError(f"link parameter rate_bps: must be {limits_lab.LINK_RATE_BPS_MIN:g} or more")
            if self.trace is not None:
                raise errors.ConfigError("link parameters rate_bps and trace: give one of them")
        for name in ("queue_bytes", "mtu_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise errors.ConfigError(f"link parameter {name}: must be a whole number above 0, not {value!r}")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise errors.ConfigError(f"link parameter {name}: must be a number of 0 or more, not {value!r}")


def _check_pct(name: str, value: object) -> None:
    _check_number(name, value)
    if isinstance(value, int | float) and value > 100:
        raise errors.ConfigError(f"link parameter {name}: must be a percentage from 0 to 100, not {value!r}")


# -- from plain data --------------------------------------------------------------------------------------------------
_NO_TRACES: Final[Mapping[str, Trace]] = {}


def read_params(
    data: Mapping[str, object], *, base: LinkParams | None = None, traces: Mapping[str, Trace] = _NO_TRACES
) -> LinkParams:
    """Make parameters of plain data: keys are the fields' names, `burst` is a mapping or None, `trace` a name.

    Args:
        data: the fields to set.
        base: where fields that are not named come from; the defaults where None. A rate given in `data` ends a trace
            of the base and the other way round.
        traces: the capacity traces that may be named.

    Raises:
        ConfigError: an unknown field, trace or a value out of range; the message names it.
    """
    base = base or LinkParams()
    changes: dict[str, object] = dict(data)
    if isinstance(changes.get("burst"), Mapping):
        changes["burst"] = _build(GilbertElliott, changes["burst"], "link parameter burst")
    elif changes.get("burst") is not None:
        raise errors.ConfigError("link parameter burst: must be a mapping")
    name = changes.get("trace")
    if name is not None:
        if not isinstance(name, str) or name not in traces:
            raise errors.ConfigError(f"link parameter trace: no trace named {name!r} among {', '.join(sorted(traces))}")
        changes["trace"] = traces[name]
        changes.setdefault("rate_bps", None)
    if changes.get("rate_bps") is not None:
        changes.setdefault("trace", None)
    return _build(lambda **fields: dataclasses.replace(base, **fields), changes, "link parameters", LinkParams)


def read_fades(data: Mapping[str, object]) -> FadeParams:
    """Make fade parameters of plain data: keys are the fields' names.

    Raises:
        ConfigError: an unknown or missing field, or a value out of range.
    """
    fields = dict(data)
    if "distribution" in fields:
        try:
            fields["distribution"] = Distribution(str(fields["distribution"]))
        except ValueError:
            raise errors.ConfigError(
                f"link parameter fades.distribution: must be one of {', '.join(Distribution)}"
            ) from None
    return _build(FadeParams, fields, "link parameter fades")


def _build(make: Callable[..., _T], data: object, what: str, fields_of: type | None = None) -> _T:
    """Call a dataclass with fields from outside, saying what is wrong where they do not fit."""
    if not isinstance(data, Mapping):
        raise errors.ConfigError(f"{what}: must be a mapping")
    target = fields_of or make
    if not dataclasses.is_dataclass(target):
        raise TypeError(f"{target!r} is no dataclass")
    known = {field.name: field for field in dataclasses.fields(target)}
    unknown = sorted(str(name) for name in data if name not in known)
    if unknown:
        raise errors.ConfigError(f"{what}: unknown {', '.join(unknown)}")
    missing = [name for name, field in known.items() if field.default is dataclasses.MISSING and name not in data]
    if missing and fields_of is None:
        raise errors.ConfigError(f"{what}: {', '.join(missing)} missing")
    return make(**data)
