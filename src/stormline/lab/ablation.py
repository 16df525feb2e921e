"""What each means is worth: runs with one or more of them left out, beside the whole."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from stormline.core import errors
from stormline.lab.results import Result
from stormline.policy.means import SWITCHES

WITHOUT: Final = (
    "hedge", "racing", "ip-direct", "long", "direct", "relay", "clear", "original", "quic", "second-link", "h2", "h1",
    "doh", "resume", "admission", "lanes", "knocks", "history", "families", "windows", "spread", "retries",
)  # fmt: skip
"""Means that can be left out. Those this version does not have are accepted and have no effect, so that a series of
runs can be repeated from version to version."""

TAKEN_OUT: Final = ("racing", "lanes", "knocks", "history", "families", "windows", "spread", "retries")
"""Those of them that the client has no setting for: the laboratory takes them out, see `drivers/_taken_out.py`."""


def split(without: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split the means to leave out into those this version has and those it does not: they have no effect.

    Raises:
        ConfigError: one is not known.
    """
    unknown = [name for name in without if name not in WITHOUT]
    if unknown:
        raise errors.ConfigError(f"without {unknown[0]!r}: expected some of {', '.join(WITHOUT)}")
    have = {*SWITCHES, "h2", "doh", "admission", "second-link", *TAKEN_OUT}
    return tuple(name for name in without if name in have), tuple(name for name in without if name not in have)


def label(result: Result) -> str:
    """Name what was run: the client, and what it went without."""
    return f"{result.client} without {', '.join(result.without)}" if result.without else result.client


class Worth(NamedTuple):
    """What leaving out some means changed on one profile; positive where they help."""

    profile: str
    client: str
    without: tuple[str, ...]
    pairs: int
    """Runs compared, each with the whole of the same seed, requests and duration."""
    success_points: float
    """Points of success within the user's patience."""
    success_3s_points: float
    p95_s: float | None
    """Seconds of p95; None where one side had no success."""
    bytes_ratio: float | None
    """Bytes with the means to bytes without them."""
    no_effect: bool
    """True where this version has none of these means: any difference is chance."""


def compare(found: Sequence[Result]) -> list[Worth]:
    """Compare every run that went without something with the whole run of the same seed and load."""
    whole = {_load(result): result for result in found if not result.without}
    pairs: dict[tuple[str, str, tuple[str, ...]], list[tuple[Result, Result]]] = {}
    for result in found:
        if result.without and (other := whole.get(_load(result))) is not None:
            pairs.setdefault((result.profile, result.client, tuple(result.without)), []).append((other, result))
    return [_worth(profile, client, without, those) for (profile, client, without), those in pairs.items()]


def _load(result: Result) -> tuple[str, str, int, int, float]:
    return result.profile, result.client, result.seed, result.requests, result.duration_s


def _worth(profile: str, client: str, without: tuple[str, ...], pairs: Sequence[tuple[Result, Result]]) -> Worth:
    asked = sum(with_.requests for with_, _ in pairs)
    times = [(a.p95_s, b.p95_s) for a, b in pairs]
    known = [b - a for a, b in times if a is not None and b is not None]
    bytes_with = sum(with_.bytes_up + with_.bytes_down for with_, _ in pairs)
    bytes_without = sum(less.bytes_up + less.bytes_down for _, less in pairs)
    return Worth(
        profile=profile,
        client=client,
        without=without,
        pairs=len(pairs),
        success_points=100 * sum(with_.ok - less.ok for with_, less in pairs) / asked,
        success_3s_points=100 * sum(with_.ok_3s - less.ok_3s for with_, less in pairs) / asked,
        p95_s=sum(known) / len(known) if len(known) == len(pairs) else None,
        bytes_ratio=bytes_with / bytes_without if bytes_without else None,
        no_effect=all(set(less.without) <= set(less.no_effect) for _, less in pairs),
    )
