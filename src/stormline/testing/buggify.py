"""Small faults in places where real systems have them too: short reads, refused dials, slow answers.

The product has no such places in its code. The simulated kernel, services and wrappers ask here before they act, and
they are given a `Buggify` only in simulation. As in FoundationDB, of the places a run has only a quarter are switched
on, so that one kind of fault does not hide all others, and those fire a quarter of the time; rarer ones say so.
"""

from typing import Final

from stormline.testing.simloop import SimRng

ACTIVE_PCT: Final = 25.0
"""Share of sites switched on in a run."""
FIRE_PCT: Final = 25.0
"""How often a site that is on fires."""
SITES: Final = {
    "dial-refused": FIRE_PCT,
    "dial-slow": FIRE_PCT,
    "receive-short": FIRE_PCT,
    "send-short": FIRE_PCT,
    "close-early": 0.3,
    "engine-slow": FIRE_PCT,
    "engine-lost": 5.0,
    "service-slow": FIRE_PCT,
    "origin-slow": FIRE_PCT,
    "origin-hangs-up": 5.0,
    "app-slow": FIRE_PCT,
}
"""Every site, and how often in a hundred it fires where it is on."""
_SHORT_BYTES_MAX: Final = 700
"""The most that a short read or write moves: less than a segment, so records and frames are cut everywhere."""


class Buggify:
    """The sites of one run.

    Args:
        rng: chance of its own; which sites are on depends on the seed alone, not on the order of questions.
        only: the sites that are on, instead of drawing them.
    """

    def __init__(self, rng: SimRng, *, only: frozenset[str] | None = None) -> None:
        drawn = {site for site in SITES if rng.child(site).chance(ACTIVE_PCT / 100)}
        self._on: dict[str, SimRng] = {
            site: rng.child(f"{site}/fire") for site in SITES if site in (drawn if only is None else only)
        }
        self.fired: dict[str, int] = dict.fromkeys(self._on, 0)

    def fires(self, site: str) -> bool:
        """True where the fault called `site` is to happen now."""
        rng = self._on.get(site)
        if rng is None or not rng.chance(SITES[site] / 100):
            return False
        self.fired[site] += 1
        return True

    def size(self, site: str, size: int) -> int:
        """Give how much of `size` bytes one operation does: all of them, or less where `site` fires."""
        if size <= 1 or not self.fires(site):
            return size
        return self._on[site].integer(1, min(size, _SHORT_BYTES_MAX))
