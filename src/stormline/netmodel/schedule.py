"""What happens to a link in the course of time, from plain data.

[{"at_s": 5, "blackout": {"mode": "hold", "duration_s": 8}},
 {"at_s": 20, "set": {"delay_s": 0.3}},
 {"at_s": 30, "end_blackout": True}]
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from stormline.core import errors, limits_lab
from stormline.netmodel.params import BlackoutMode, LinkParams, read_params
from stormline.netmodel.trace import Trace


@dataclass(frozen=True, slots=True)
class SetParams:
    """Change some parameters; the others stay as they are at that moment."""

    fields: Mapping[str, object]
    traces: Mapping[str, Trace]

    def apply(self, params: LinkParams) -> LinkParams:
        """Give `params` with the change."""
        return read_params(self.fields, base=params, traces=self.traces)


@dataclass(frozen=True, slots=True)
class StartBlackout:
    """The link goes dark."""

    mode: BlackoutMode
    duration_s: float = math.inf
    """Until an `EndBlackout` where infinite."""


@dataclass(frozen=True, slots=True)
class EndBlackout:
    """The link comes back."""


Change: TypeAlias = SetParams | StartBlackout | EndBlackout


@dataclass(frozen=True, slots=True)
class Schedule:
    """Changes in order of time. Immutable: the two directions of a link may share it.

    Raises:
        ConfigError: steps out of order or out of range, too many, or a round shorter than its steps.
    """

    steps: tuple[tuple[float, Change], ...]
    """(seconds since the schedule's start, what happens)."""
    repeat_s: float | None = None
    """Length of a round after which it starts again; None: once."""

    def __post_init__(self) -> None:
        if len(self.steps) > limits_lab.SCHEDULE_STEPS_MAX:
            raise errors.ConfigError(f"schedule: more than {limits_lab.SCHEDULE_STEPS_MAX} steps")
        times = [at_s for at_s, _ in self.steps]
        if any(not (math.isfinite(at_s) and at_s >= 0) for at_s in times) or times != sorted(times):
            raise errors.ConfigError("schedule: at_s must be 0 or more, in order")
        if self.repeat_s is not None:
            if not (math.isfinite(self.repeat_s) and self.repeat_s >= limits_lab.SCHEDULE_REPEAT_S_MIN):
                raise errors.ConfigError(f"schedule: repeat_s must be {limits_lab.SCHEDULE_REPEAT_S_MIN} or more")
            if not times or times[-1] >= self.repeat_s:
                raise errors.ConfigError("schedule: a round needs steps, all before repeat_s")

    def step(self, number: int) -> tuple[float, Change] | None:
        """Give step `number`, counted from 0 through all rounds, with its time since the start; None past the end."""
        if self.repeat_s is None:
            return self.steps[number] if number < len(self.steps) else None
        rounds, index = divmod(number, len(self.steps))
        at_s, change = self.steps[index]
        return rounds * self.repeat_s + at_s, change


_KEYS: Final = {"set", "blackout", "end_blackout"}
_NO_TRACES: Final[Mapping[str, Trace]] = {}


def read_schedule(
    steps: Sequence[Mapping[str, object]],
    *,
    repeat_s: float | None = None,
    base: LinkParams | None = None,
    traces: Mapping[str, Trace] = _NO_TRACES,
) -> Schedule:
    """Make a schedule of plain data; the module's docstring shows its form.

    Args:
        steps: mappings with `at_s` and one of `set`, `blackout`, `end_blackout`.
        repeat_s: length of a round; None: once.
        base: the link's parameters at the start; every `set` is tried on them, so that a mistake shows now.
        traces: the capacity traces that `set` may name.

    Raises:
        ConfigError: a step is not understood; the message names it by its number, from 1.
    """
    made: list[tuple[float, Change]] = []
    params = base or LinkParams()
    for number, step in enumerate(steps, 1):
        what = f"schedule step {number}"
        at_s = _seconds(step.get("at_s"), f"{what}: at_s")
        named = sorted(str(key) for key in step if key != "at_s")
        if len(named) != 1 or named[0] not in _KEYS:
            raise errors.ConfigError(f"{what}: needs one of {', '.join(sorted(_KEYS))} besides at_s")
        change = _change(named[0], step[named[0]], what, traces)
        if isinstance(change, SetParams):
            try:
                params = change.apply(params)
            except errors.ConfigError as error:
                raise errors.ConfigError(f"{what}: {error}") from None
        made.append((at_s, change))
    return Schedule(tuple(made), repeat_s)


def _change(kind: str, value: object, what: str, traces: Mapping[str, Trace]) -> Change:
    if kind == "end_blackout":
        if value is not True:
            raise errors.ConfigError(f"{what}: end_blackout must be true")
        return EndBlackout()
    if not isinstance(value, Mapping):
        raise errors.ConfigError(f"{what}: {kind} must be a mapping")
    if kind == "set":
        return SetParams(dict(value), traces)
    _only(value, ("mode", "duration_s"), what)
    try:
        mode = BlackoutMode(value.get("mode", BlackoutMode.DROP))
    except ValueError:
        raise errors.ConfigError(f"{what}: mode must be one of {', '.join(BlackoutMode)}") from None
    duration = value.get("duration_s")
    return StartBlackout(mode, math.inf if duration is None else _seconds(duration, f"{what}: duration_s"))


def _only(data: Mapping[str, object], known: Iterable[str], what: str) -> None:
    unknown = sorted(set(map(str, data)) - set(known))
    if unknown:
        raise errors.ConfigError(f"{what}: unknown {', '.join(unknown)}")


def _seconds(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise errors.ConfigError(f"{what} must be a number of seconds of 0 or more, not {value!r}")
    return float(value)
