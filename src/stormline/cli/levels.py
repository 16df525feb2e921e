"""`stormline bench levels`: how near the client's level of the network is to the truth, on virtual time."""

import math
import statistics
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stormline.bench.results import Row
    from stormline.lab.profiles_model import Profile

PROFILES: Final = (
    "wifi", "4g", "3g", "edge", "lossy4g", "subway", "elevator", "uber", "syn-lte", "syn-umts", "syn-evdo", "trap-hol",
    "trap-oversize",
)  # fmt: skip
"""All whose trouble is the link's own and that need no recordings; thresholds were chosen on them."""
SEEDS: Final = 5
DURATION_S: Final = 120.0
GOAL_PCT: Final = 90.0
"""Of the time within one step of the truth."""
CEILING: Final = "who sees every packet"
"""The peer: `lab.levels.ceiling_pct`."""


class _Tally:
    """Figures over profiles."""

    def __init__(self) -> None:
        self.near: list[float] = []
        self.prompt: list[float] = []
        self.delays: list[float] = []
        self.changes = self.seen = 0

    def play(self, profile: "Profile") -> "list[Row]":
        """Play one profile with some seeds, and give its rows."""
        from stormline.bench.results import row
        from stormline.lab import held_out, levels, workload
        from stormline.testing import simlevel

        found, ceilings = [], []
        for seed in range(1, SEEDS + 1):
            course = levels.course_of(profile, seed, DURATION_S, made=held_out.drawings())
            asks = [
                (ask.at_s, ask.size) for ask in workload.schedule(seed, profile.requests_in(DURATION_S), DURATION_S)
            ]
            played = simlevel.run(course, asks, seed=seed, duration_s=DURATION_S)
            found.append(levels.score([(at_s, level) for at_s, level, _ in played.told], course, DURATION_S))
            ceilings.append(levels.ceiling_pct(course, played.sent, played.heard, DURATION_S))
        near, prompt = (statistics.fmean(getattr(each, what) for each in found) for what in ("near_pct", "prompt_pct"))
        self.near.append(near)
        self.prompt.append(prompt)
        self.changes += sum(each.seen + each.missed for each in found)
        self.seen += sum(each.seen for each in found)
        self.delays += [each.delay_max_s for each in found if not math.isnan(each.delay_max_s)]
        return [
            row(f"level_{profile.name}_near_pct", near, "%", goal=GOAL_PCT, better="higher", peer=CEILING,
                peer_value=statistics.fmean(ceilings)),
            row(f"level_{profile.name}_prompt_pct", prompt, "%", goal=GOAL_PCT, better="higher"),
        ]  # fmt: skip

    def rows(self, name: str) -> "list[Row]":
        """Give the rows of all."""
        from stormline.bench.results import row
        from stormline.lab import levels

        seen_pct = 100.0 * self.seen / max(1, self.changes)
        return [
            row(f"{name}_near_pct", statistics.fmean(self.near), "%", goal=GOAL_PCT, better="higher"),
            row(f"{name}_prompt_pct", statistics.fmean(self.prompt), "%", goal=GOAL_PCT, better="higher"),
            row(f"{name}_changes_seen_pct", seen_pct, "%", goal=99.0, better="higher"),
            row(f"{name}_delay_max_s", max(self.delays, default=math.nan), "s", goal=levels.LAG_S),
        ]


def run() -> "list[Row]":
    """Play every profile with some seeds, and those that nothing was chosen on; takes four minutes."""
    from stormline.lab import held_out, profiles

    rows = []
    for name, those in (
        ("level", tuple(profiles.get(each) for each in PROFILES)),
        ("level_watched", held_out.there((*held_out.WATCHED, *held_out.WATCHED_RECORDED))),
        ("level_fresh", held_out.there((*held_out.FRESH, *held_out.FRESH_RECORDED))),
    ):
        tally = _Tally()
        for profile in those:
            rows += tally.play(profile)
        rows += tally.rows(name)
    return rows
