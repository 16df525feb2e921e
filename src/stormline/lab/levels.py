"""Whether a client knows how good its network is: its levels over time beside the truth of a profile.

The truth is no opinion: `policy.level.level_of` of what the profile makes the link be at each moment
(`netmodel.course`). Troubles of servers, of names and of boxes on the way are none of the link's; there the truth stays
what the link is worth.
"""

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from stormline.lab import traces
from stormline.lab.chance import SeededRng
from stormline.lab.faults import Dark, Handover
from stormline.lab.namespaces import WIFI
from stormline.lab.profiles_model import Event, LinkSpec, Profile
from stormline.netmodel.course import TRACE_WINDOW_S, Course
from stormline.netmodel.params import LinkParams, read_fades, read_params
from stormline.netmodel.trace import Trace
from stormline.policy.level import LEVELS, Level, level_of

STEP_S: Final = 0.1
"""Distance of the moments that are compared."""
LAG_S: Final = 5.0
"""How late a level may be."""
WARM_S: Final = 2.0
"""From the begin of a run: before that nothing can be known."""


# -- truth ------------------------------------------------------------------------------------------------------------
def course_of(
    profile: Profile,
    seed: int,
    duration_s: float,
    *,
    folder: Path | None = None,
    made: Mapping[str, Trace] = {},
    second: bool = False,
) -> Course:
    """Lay out what the link in use is in one run of a profile: the WiFi one, in a hand-over the cellular one.

    Args:
        profile: of the laboratory.
        seed: of the run.
        duration_s: of the run.
        folder: of recorded traces; None: the usual one.
        made: further traces by name.
        second: the client has a second way: where the WiFi one is dark, the cellular one is in use if there is any.

    Raises:
        ConfigError: a trace is missing.
    """
    names = [name for name in profile.trace_names() if name not in made]
    known = {**made, **traces.load_all(names, traces.folder() if folder is None else folder)}
    offset_s = (seed - 1) * profile.duration_s
    up, down = _params(profile.wifi, known, offset_s)
    changes: list[tuple[float, LinkParams, LinkParams]] = []
    if profile.wifi.rtt is not None:
        changes += [
            (step["at_s"], read_params(step["set"], base=up), read_params(step["set"], base=down))
            for step in profile.wifi.rtt.steps(duration_s, SeededRng(f"rtt/{WIFI.name}", seed))
        ]
    dark = []
    for event in profile.expand(seed, duration_s):
        until_s = math.inf if event.until_s is None else event.until_s
        fault = event.fault
        moves = isinstance(fault, Handover) or (second and isinstance(fault, Dark) and fault.uplink == WIFI.name)
        if moves and profile.cell is not None:
            changes += [(event.at_s, *_params(profile.cell, known, offset_s)), *_back(event, up, down)]
        elif isinstance(fault, Dark) and fault.uplink in (None, WIFI.name):
            dark.append((event.at_s, until_s))
    fades = None if profile.wifi.fades is None else read_fades(profile.wifi.fades)
    return Course(up=up, down=down, fades=fades, changes=tuple(changes), dark=tuple(dark))


def _back(event: Event, up: LinkParams, down: LinkParams) -> list[tuple[float, LinkParams, LinkParams]]:
    return [] if event.until_s is None else [(event.until_s, up, down)]


def _params(spec: LinkSpec, known: dict[str, Trace], offset_s: float) -> tuple[LinkParams, LinkParams]:
    up, down = (
        read_params({**way, **({"trace_offset_s": offset_s} if way.get("trace") else {})}, traces=known)
        for way in (spec.up, spec.down)
    )
    return up, down


def truth(course: Course, at_s: float) -> Level:
    """Say what a link is worth at a moment."""
    now = course.at(at_s)
    rate = math.inf if now.bytes_per_s is None else now.bytes_per_s
    return level_of(now.rtt_s, rate, 1.0 if now.dark else now.loss, loss_events=now.loss_events)


# -- the score --------------------------------------------------------------------------------------------------------
class Score(NamedTuple):
    """How well levels follow the truth.

    Attributes:
        near_pct: share of the time within one step of the truth of that moment.
        prompt_pct: the same, where a level may be `LAG_S` late: within one step of what was true at some moment since.
        exact_pct: share of the time exactly right.
        changes: changes of the truth by two steps or more, that lasted for a second at least.
        seen: of these, how many were seen (within one step) before the truth was another again, or `LAG_S` had passed.
        missed: of these, how many lasted for `LAG_S` and were not seen within it.
        delay_p50_s: how long it took, of those seen; NaN where there is none.
        delay_max_s: the longest.
        moves_per_min: how often the level changed.
        truth_moves_per_min: how often the truth did.
    """

    near_pct: float
    prompt_pct: float
    exact_pct: float
    changes: int
    seen: int
    missed: int
    delay_p50_s: float
    delay_max_s: float
    moves_per_min: float
    truth_moves_per_min: float


def score(told: Iterable[tuple[float, Level]], course: Course, duration_s: float) -> Score:
    """Compare what a client told with the truth.

    Args:
        told: (second, level) whenever the level has changed, in order.
        course: of the link.
        duration_s: of the run.
    """
    moments = [number * STEP_S for number in range(int(WARM_S / STEP_S), int(duration_s / STEP_S))]
    levels = _filled(list(told), moments)
    ranks = [level.rank for level in levels]
    true = [truth(course, at_s).rank for at_s in moments]
    lag = round(LAG_S / STEP_S)
    near = [abs(mine - right) <= 1 for mine, right in zip(ranks, true, strict=True)]
    prompt = [
        any(abs(mine - right) <= 1 for right in true[max(0, number - lag) : number + 1])
        for number, mine in enumerate(ranks)
    ]
    delays, changes, missed = _delays(ranks, true, lag)
    minutes = max(1e-9, len(moments) * STEP_S / 60.0)
    return Score(
        near_pct=100.0 * sum(near) / len(near),
        prompt_pct=100.0 * sum(prompt) / len(prompt),
        exact_pct=100.0 * sum(mine == right for mine, right in zip(ranks, true, strict=True)) / len(true),
        changes=changes,
        seen=len(delays),
        missed=missed,
        delay_p50_s=sorted(delays)[len(delays) // 2] if delays else math.nan,
        delay_max_s=max(delays, default=math.nan),
        moves_per_min=_moves(ranks) / minutes,
        truth_moves_per_min=_moves(true) / minutes,
    )


def ceiling_pct(course: Course, sent: Sequence[float], heard: Sequence[float], duration_s: float) -> float:
    """Give the best `near_pct` that is possible without a packet more than there was, in percent.

    It is that of somebody who sees every packet, knows the round trip and whatever else the link is worth at each
    moment, and cannot know two things: that it has gone dark, until a packet that was sent into the dark is overdue by
    a round trip; and that there is light again, until one comes.

    Args:
        course: of the link.
        sent: when the device sent packets, in order.
        heard: when one reached it, in order.
        duration_s: of the run.
    """
    near, dark, since_s, before, last = [], False, 0.0, 0, 0
    for number in range(round(duration_s / STEP_S)):
        at_s = number * STEP_S
        now, right = course.at(at_s), truth(course, at_s).rank
        if now.dark is not dark:
            dark, since_s, before = now.dark, at_s, last
        last = right
        if dark:
            # What was on its way is lost too; a trace is called dark when it has been so for a while.
            begin_s = since_s - now.rtt_s - (0.0 if course.params_at(at_s)[1].trace is None else TRACE_WINDOW_S)
            known = bisect.bisect_right(sent, at_s - now.rtt_s) > bisect.bisect_left(sent, begin_s - STEP_S)
        else:
            known = not since_s or bisect.bisect_right(heard, at_s) > bisect.bisect_left(heard, since_s - STEP_S)
        if at_s >= WARM_S - STEP_S / 2.0:
            near.append(known or abs(before - right) <= 1)
    return 100.0 * sum(near) / len(near)


def _filled(told: Sequence[tuple[float, Level]], moments: Sequence[float]) -> list[Level]:
    """Give the level at each moment."""
    filled, place, level = [], 0, LEVELS[0]
    for at_s in moments:
        while place < len(told) and told[place][0] <= at_s + 1e-9:
            level = told[place][1]
            place += 1
        filled.append(level)
    return filled


def _moves(ranks: Sequence[int]) -> int:
    return sum(a != b for a, b in itertools.pairwise(ranks))


def _delays(ranks: Sequence[int], true: Sequence[int], lag: int) -> tuple[list[float], int, int]:
    """Give the delays of the changes that were seen, the number of all, and of those missed."""
    delays: list[float] = []
    changes = missed = 0
    for begin, (before, new) in enumerate(itertools.pairwise(true), 1):
        if abs(new - before) < 2:
            continue
        end = next((at for at in range(begin, len(true)) if abs(true[at] - new) > 1), len(true))
        if (end - begin) * STEP_S < 1.0:
            continue
        changes += 1
        seen = next((at for at in range(begin, min(end, begin + lag)) if abs(ranks[at] - new) <= 1), None)
        if seen is not None:
            delays.append((seen - begin) * STEP_S)
        elif end - begin >= lag:
            missed += 1
    return delays, changes, missed
