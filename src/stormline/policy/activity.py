"""What a client does less of when nobody looks at it.

| | foreground | background | inactive |
| --- | --- | --- | --- |
| heartbeat of the long connection, at most | 60 s | 3600 s | 3600 s |
| first return of a lost one that only pushes need | within 1 s | within 30 s | within 300 s |
| longest pause between two such tries | 60 s | 300 s | 600 s |
| another attempt beside one that only looks dead | yes | no | no |
| connections made before they are needed | yes | no | no |

Whoever calls is served at once in every state: only what nobody waits for is put off. Within its bound the heartbeat is
what each network stands (`policy.heartbeat`): in the foreground it is short, because there a dead connection hurts, in
the background it is as long as was proven. The pauses are Mars's (`stn/src/longlink_connect_monitor.cc`: 15 s to 600 s
by activity). Not copied: seven days without a try when nobody is logged in, and a reconnect jitter that only some rows
have. A gateway that asks for a shorter heartbeat gets it (`heartbeat_s` of its configuration, 600 s unless set).
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stormline.core import limits, limits_heartbeat


class Activity(enum.StrEnum):
    """What the user does with the app."""

    FOREGROUND = "foreground"
    """Looks at it."""
    BACKGROUND = "background"
    """Has it open, and looks at something else."""
    INACTIVE = "inactive"
    """Has not looked at it for long (Mars: ten minutes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """How a client behaves in one state.

    Attributes:
        heartbeat_s: longest silence of the long connection before a PING; a gateway may ask for less.
        return_first_s: span over which a lost long connection comes back that nobody waits for.
        return_max_s: longest pause between two tries of it.
        hedges: another attempt may be made beside one whose connection only looks dead. One whose time is over is
            followed by another in every state.
        preconnects: connections may be made before they are needed.
    """

    heartbeat_s: float
    return_first_s: float
    return_max_s: float
    hedges: bool
    preconnects: bool


CONDUCT: Final[Mapping[Activity, Conduct]] = {
    Activity.FOREGROUND: Conduct(
        heartbeat_s=limits.HEARTBEAT_S,
        return_first_s=limits.RECONNECT_FIRST_S,
        return_max_s=limits.RECONNECT_MAX_S,
        hedges=True,
        preconnects=True,
    ),
    Activity.BACKGROUND: Conduct(
        heartbeat_s=limits_heartbeat.HEARTBEAT_MAX_S,
        return_first_s=30.0,
        return_max_s=300.0,
        hedges=False,
        preconnects=False,
    ),
    Activity.INACTIVE: Conduct(
        heartbeat_s=limits_heartbeat.HEARTBEAT_MAX_S,
        return_first_s=300.0,
        return_max_s=600.0,
        hedges=False,
        preconnects=False,
    ),
}
"""The table above."""
