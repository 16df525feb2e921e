"""How much is done for a request: tries by each means, and the three presets that a business chooses from.

The order of the means is `policy.means`'s, or a dispatch plan's; a preset says how often each is tried. The published
request library that this follows ("request success rate", see docs/explanation/means.md) had four means of repetition:
IP direct as often as it had addresses, and its relay, clear HTTP and the original URL off or one to three times.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from stormline.core import errors, limits, limits_means


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Tries by each means, and what holds for all of them. A maximum each: `attempts` bounds all together.

    Attributes:
        name: for people and for the story.
        long: tries over the long connection, 0 or 1.
        ip_direct: tries at configured addresses; None: as many as there are addresses.
        direct: tries by the host's name, the first attempt among them. Each further one goes elsewhere: to another
            address where there is one, always on another connection. None: as many as `attempts` leaves.
        relay: tries through relays that dispatch names, 0 to `limits_means.MEANS_TRIES_MAX`, each through the next.
        clear: tries over clear HTTP, 0 to `limits_means.MEANS_TRIES_MAX`; only by a rule that says what to trust.
        original: tries of the original URL as it stands, as if nothing were known: every address, a connection of its
            own. 0 to `limits_means.MEANS_TRIES_MAX`.
        attempts: steps of one call, 1 to `limits_means.PLAN_ATTEMPTS_MAX`.
        tls_only: what is asked for without TLS is refused, and clear HTTP is never used.
        hedge: a read that is later than most gets a second one beside it where there is room (`policy.hedge`).
    """

    name: str
    long: int = 1
    ip_direct: int | None = None
    direct: int | None = None
    relay: int = 1
    clear: int = 0
    original: int = 0
    attempts: int = limits.ATTEMPTS_MAX
    tls_only: bool = False
    hedge: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: one is out of its range; the message names it.
        """
        most = {
            "long": 1,
            "ip_direct": limits_means.MEANS_ADDRESSES_MAX,
            "direct": limits_means.PLAN_ATTEMPTS_MAX,
            "relay": limits_means.MEANS_TRIES_MAX,
            "clear": limits_means.MEANS_TRIES_MAX,
            "original": limits_means.MEANS_TRIES_MAX,
        }
        for name, largest in most.items():
            value = getattr(self, name)
            if value is None and name in ("ip_direct", "direct"):
                continue
            if not is_whole(value, 0, largest):
                raise errors.ConfigError(f"plan {self.name!r}: {name}={value!r}: expected a number from 0 to {largest}")
        largest = limits_means.PLAN_ATTEMPTS_MAX
        if not is_whole(self.attempts, 1, largest):
            raise errors.ConfigError(
                f"plan {self.name!r}: attempts={self.attempts!r}: expected a number from 1 to {largest}"
            )
        if self.tls_only and self.clear:
            raise errors.ConfigError(f"plan {self.name!r}: clear={self.clear}: the plan asks over TLS only")

    def with_tries(self, tries: Mapping[str, int]) -> "Preset":
        """Give the preset with other tries.

        Args:
            tries: number by means, `long`, `ip-direct`, `direct`, `relay`, `clear`, `original`, or `attempts` for all
                of them.

        Raises:
            ConfigError: no such means, or a number out of its range.
        """
        unknown = [name for name in tries if name not in TRIES]
        if unknown:
            raise errors.ConfigError(f"tries: no such means: {unknown[0]!r}; there are {', '.join(TRIES)}")
        changes: dict[str, int] = {name.replace("-", "_"): number for name, number in tries.items()}
        return replace(self, **changes)  # type: ignore[arg-type]


def is_whole(value: object, least: int, most: int) -> bool:
    """Say whether a value that a person wrote is a whole number within bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


TRIES: Final = ("long", "ip-direct", "direct", "relay", "clear", "original", "attempts")
"""What `Preset.with_tries` takes."""
LOGIN: Final = Preset(name="login", long=0, relay=0, tls_only=True)
"""Credentials: to the origin itself and nowhere else, by its name and at its configured addresses, over TLS only."""
KEY: Final = Preset(name="key", relay=2, attempts=limits_means.PLAN_ATTEMPTS_MAX, hedge=True)
"""What the app cannot do without: every safe means, more steps, and a second request beside a late read."""
ORDINARY: Final = Preset(name="ordinary")
"""Everything else, and every request that no rule names: the means that cost nothing unless something fails."""
PRESETS: Final[Mapping[str, Preset]] = {preset.name: preset for preset in (LOGIN, KEY, ORDINARY)}
"""By name."""


def preset(name: object) -> Preset:
    """Give a preset by its name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    found = PRESETS.get(name) if isinstance(name, str) else None
    if found is None:
        raise errors.ConfigError(f"plan {name!r}: expected one of {', '.join(PRESETS)}")
    return found
