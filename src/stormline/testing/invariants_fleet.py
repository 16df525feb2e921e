"""What must hold where many devices meet gateways that come and go, devices that do not read, and devices twice."""

import math
from collections.abc import Iterator
from typing import Final

from stormline.core.codes import Code
from stormline.testing.history import CallEntry, History
from stormline.testing.invariants import Invariant
from stormline.testing.scenario import Checks

BIN_S: Final = 0.1
"""Attempts are counted in bins of this length."""
BACK_LOOK_S: Final = 120.0
"""How long after a gateway's end its clients are looked at."""
HERD_MIN: Final = 6
"""Fewer devices are no herd: chance alone has them come together."""
_SIGMAS: Final = 3.0
"""How far chance may go beyond the share: with few devices some moment has more than its part."""
AFTER_SLOW_S: Final = 20.0
"""How long a device that reads again may still be busy with what has piled up."""


def is_slow(history: History, call: CallEntry) -> bool:
    """Say whether its device read slowly at some time during a call."""
    end_s = call.ended_s if call.ended_s is not None else history.end_s
    return any(
        device == call.device and begun_s < end_s and call.started_s < over_s + AFTER_SLOW_S
        for device, begun_s, over_s in history.fleet.slow
    )


def pushes_are_well_after_the_storm(history: History) -> Iterator[str]:
    """A push sent when every fault is over, and some time has passed, is acknowledged."""
    for push in history.pushes.values():
        if push.fresh and not push.confirmed:
            yield f"push {push.id} to {push.device} was not acknowledged on a healthy network: {push.results}"


def a_replaced_copy_stays_away(history: History) -> Iterator[str]:
    """A device that was told that a newer copy has its place does not come back by itself."""
    for goodbye in history.fleet.goodbyes:
        if goodbye.code == Code.REPLACED:
            for device, at_s in history.fleet.welcomes:
                if device == goodbye.device and at_s > goodbye.at_s:
                    yield f"{device} was told at {goodbye.at_s:.3f} s that it is replaced, and is back at {at_s:.3f} s"


def only_a_newer_copy_replaces(history: History) -> Iterator[str]:
    """The newest login of a device has the session: no older copy, however late it is back, takes it away."""
    for goodbye in history.fleet.goodbyes:
        if goodbye.code == Code.REPLACED and not history.fleet.newer_copy(goodbye.device, goodbye.at_s):
            yield f"{goodbye.device} was told at {goodbye.at_s:.3f} s that it is replaced, and no newer copy had begun"


def one_copy_is_left(history: History) -> Iterator[str]:
    """Of several copies all but the newest have heard in the end that they are replaced."""
    told = {goodbye.device for goodbye in history.fleet.goodbyes if goodbye.code == Code.REPLACED}
    for device_id, copies in history.fleet.copies.items():
        for name, _ in copies[:-1]:
            if name not in told:
                yield f"{name}, an older copy of {device_id}, never heard that it is replaced"


ALL: Final[tuple[Invariant, ...]] = (
    pushes_are_well_after_the_storm,
    a_replaced_copy_stays_away,
    only_a_newer_copy_replaces,
    one_copy_is_left,
)
"""Every invariant, in the order they are reported."""


def check(history: History) -> list[str]:
    """Give every breach as `invariant name: what happened`."""
    return [f"{each.__name__}: {breach}" for each in ALL for breach in each(history)]


def herd(history: History, checks: Checks) -> list[str]:
    """Say where clients of a gateway that ended come back too much at once, too often, or too late."""
    problems: list[str] = []
    fleet = history.fleet
    for number, (gateway, at_s, ids) in enumerate(fleet.outages):
        end_s = min([at_s + BACK_LOOK_S, *(other[1] for other in fleet.outages[number + 1 :])])
        hit = {fleet.names[each] for each in ids if each in fleet.names}
        if len(hit) < HERD_MIN:
            continue
        dials = [(name, begun_s) for name, begun_s in fleet.dials if name in hit and at_s < begun_s <= end_s]
        first: dict[str, float] = {}
        for name, begun_s in dials:
            first.setdefault(name, begun_s)
        bins: dict[int, int] = {}
        for begun_s in first.values():
            bins[int((begun_s - at_s) / BIN_S)] = bins.get(int((begun_s - at_s) / BIN_S), 0) + 1
        most = max(bins.values(), default=0)
        where = f"after the end of {gateway} at {at_s:.3f} s"
        share = checks.bin_pct / 100
        if share and most > share * len(hit) + _SIGMAS * math.sqrt(share * (1.0 - share) * len(hit)):
            problems.append(f"check: {most} of {len(hit)} devices began to come back in the same {BIN_S:g} s {where}")
        if checks.tries and len(dials) > checks.tries * len(hit):
            problems.append(f"check: {len(dials)} connections were begun by {len(hit)} devices {where}")
        back = {name for name, welcome_s in fleet.welcomes if at_s < welcome_s <= at_s + checks.back_s}
        if checks.back_s and hit - back:
            problems.append(f"check: {len(hit - back)} of {len(hit)} devices were not back {checks.back_s:g} s {where}")
    return problems
