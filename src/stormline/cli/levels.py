"""`stormline bench levels`: how near the client's level of the network is to the truth, on virtual time."""

import math
import statistics
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stormline.bench.results import Row

PROFILES: Final = (
    "wifi", "4g", "3g", "edge", "lossy4g", "subway", "elevator", "uber", "syn-lte", "syn-umts", "syn-evdo", "trap-hol",
    "trap-oversize",
)  # fmt: skip
"""All whose trouble is the link's own and that need no recordings."""
SEEDS: Final = 5
DURATION_S: Final = 120.0
GOAL_PCT: Final = 90.0
"""Of the time within one step of the truth."""


def run() -> "list[Row]":
    """Play every profile with some seeds; takes two minutes."""
    from stormline.bench.results import row
    from stormline.lab import levels, profiles, workload
    from stormline.testing import simlevel

    rows, delays, changes, seen = [], [], 0, 0
    for name in PROFILES:
        profile, found = profiles.get(name), []
        for seed in range(1, SEEDS + 1):
            course = levels.course_of(profile, seed, DURATION_S)
            asks = [
                (ask.at_s, ask.size) for ask in workload.schedule(seed, profile.requests_in(DURATION_S), DURATION_S)
            ]
            played = simlevel.run(course, asks, seed=seed, duration_s=DURATION_S)
            found.append(levels.score([(at_s, level) for at_s, level, _ in played.told], course, DURATION_S))
        for what in ("near_pct", "prompt_pct"):
            value = statistics.fmean(getattr(each, what) for each in found)
            rows.append(row(f"level_{name}_{what}", value, "%", goal=GOAL_PCT, better="higher"))
        changes += sum(each.seen + each.missed for each in found)
        seen += sum(each.seen for each in found)
        delays += [each.delay_max_s for each in found if not math.isnan(each.delay_max_s)]
    rows.append(row("level_changes_seen_pct", 100.0 * seen / max(1, changes), "%", goal=99.0, better="higher"))
    rows.append(row("level_delay_max_s", max(delays, default=math.nan), "s", goal=levels.LAG_S))
    return rows
