"""How long a network keeps the way back of a silent connection, from connections that were silent for a while. Pure.

    for silence_s in ladder_s(limit_s): ...   # a connection each, side by side: silent for so long, then used once
    decided(tried)                            # what is still silent need not be waited for
    judge(tried)                              # between what the limit is

Translators and firewalls forget a connection that was silent for too long. What is sent on it then is swallowed, or
answered with a reset; a server that has had enough says so, by an end that still gets through. So an end is the
server's limit and a proof that the way was open, and silence or a reset is the network's.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

from stormline.core import limits_diagnosis as limits
from stormline.core import limits_heartbeat


class Fate(enum.StrEnum):
    """What became of a connection that was silent."""

    ANSWERED = "answered"
    """It was used, and answered."""
    LOST = "lost"
    """It was used, nothing came back, and a new connection stood at once."""
    RESET = "reset"
    """It was used, or waited, and a reset came."""
    CLOSED = "closed"
    """The server ended it."""
    UNKNOWN = "unknown"
    """It says nothing: the network was dead or became another, or the server did not play."""


class Tried(NamedTuple):
    """One connection.

    Attributes:
        silence_s: how long no packet went either way.
        fate: what became of it.
    """

    silence_s: float
    fate: Fate


class Lifetime(NamedTuple):
    """Between what the limit of a network is.

    Attributes:
        answered_s: the longest silence that was survived; 0 where none was.
        lost_s: the shortest that was lost, above that; None where none was.
        closed_s: after how long the server ended one; None where it ended none.
        reset: a reset came, so the loss is noticed when the connection is used.
        sure: more than one connection says that silence is lost.
        by_chance: connections lost although a longer silence was survived.
    """

    answered_s: float = 0.0
    lost_s: float | None = None
    closed_s: float | None = None
    reset: bool = False
    sure: bool = False
    by_chance: int = 0

    @property
    def keep_alive_s(self) -> float | None:
        """The longest pause between two packets that is known to be safe; None where none is."""
        return self.answered_s * limits_heartbeat.HEARTBEAT_MARGIN or None


_GONE = (Fate.LOST, Fate.RESET)
_ALIVE = (Fate.ANSWERED, Fate.CLOSED)


def ladder_s(limit_s: float) -> tuple[float, ...]:
    """Give the silences to try, shortest first: each longer than the one before by the same factor, up to the limit."""
    steps = limits.DIAGNOSIS_NAT_CONNECTIONS - 1
    factor = limits.DIAGNOSIS_NAT_SPAN ** (1.0 / steps)
    return tuple(limit_s / factor ** (steps - step) for step in range(steps + 1))


def judge(tried: Sequence[Tried]) -> Lifetime:
    """Say what connections tell of their network, in any order."""
    answered_s = max((each.silence_s for each in tried if each.fate in _ALIVE), default=0.0)
    gone = [each for each in tried if each.fate in _GONE]
    lost = sorted(each.silence_s for each in gone if each.silence_s > answered_s)
    return Lifetime(
        answered_s=answered_s,
        lost_s=lost[0] if lost else None,
        closed_s=min((each.silence_s for each in tried if each.fate is Fate.CLOSED), default=None),
        reset=any(each.fate is Fate.RESET and each.silence_s > answered_s for each in tried),
        sure=len(lost) > 1,
        by_chance=len(gone) - len(lost),
    )


def decided(tried: Sequence[Tried]) -> bool:
    """Say whether longer silences would tell nothing new: two are lost, and none that is longer was survived."""
    return judge(tried).sure


def in_words(found: Lifetime, limit_s: float) -> str:
    """Say what was found; empty for nothing."""
    answered_s, keep_s = found.answered_s, found.keep_alive_s
    keep = "" if keep_s is None else f"; a packet every {_seconds(keep_s)} keeps it"
    if found.lost_s is not None:
        how = "reset" if found.reset else "lost without a word"
        sure = "" if found.sure else ", as far as one can tell"
        before = f"answers after {_seconds(answered_s)} of silence and " if answered_s else ""
        return f"a connection {before}is {how} after {_seconds(found.lost_s)}{sure}{keep}"
    if not answered_s and found.closed_s is None:
        return ""
    if found.closed_s is not None:
        return f"the server ends a silent connection after {_seconds(found.closed_s)}; the network keeps it for longer"
    longer = "longer than that" if answered_s >= limit_s * _NEARLY else "more was not found out"
    return f"a connection answers after {_seconds(answered_s)} of silence; {longer}"


_NEARLY = 0.95
"""Of the limit: a connection's silence is measured, and begins a little after it was asked for."""


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10.0 else f"{value:.1f} s"
