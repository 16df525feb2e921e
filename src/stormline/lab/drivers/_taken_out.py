"""Takes means out of the client under test for which it has no setting, by putting the simplest thing in their place.

Nobody would want to switch these off but to see what they are worth, so no request pays for asking whether they are on:
the laboratory changes them in the process that it starts for one run. `ablation.TAKEN_OUT` has their names.
"""

import math
from collections.abc import Callable, Collection
from typing import Any

from stormline.client import executor, steering
from stormline.core import limits
from stormline.outbound.dial import Pace
from stormline.policy import addresses


def take_out(names: Collection[str]) -> frozenset[str]:
    """Take means out of this process, for good; give those of `names` that were taken."""
    for name in (taken := frozenset(names) & _HOW.keys()):
        _HOW[name]()
    return taken


def _racing() -> None:
    """The next address is begun only where the one before has failed, and silence is waited out."""
    pace = steering.Steering.pace

    def alone(self: steering.Steering, host: str) -> Pace:
        return pace(self, host)._replace(stagger_s=math.inf, repeat_s=math.inf)

    _put(steering.Steering, "pace", alone)


def _lanes() -> None:
    """No attempt beside a silent one: the next begins when the first has failed."""
    _put(executor.Executor, "_open_beside", lambda self, lane, **more: None)


def _knocks() -> None:
    """Nobody knocks at a dark path."""
    _put(executor.Executor, "_knock", lambda self, peer: None)


def _history() -> None:
    """Nothing is learned of addresses or families: each connection takes them as names give them."""
    _put(addresses.AddressBook, "observe", lambda self, outcome, now: None)


def _families() -> None:
    """IPv6 is always first (RFC 8305 section 4), whatever became of it."""
    _put(addresses.AddressBook, "_first_family", lambda self, network_id, host, good, left, now: 6)


def _windows() -> None:
    """Every answer may fill the link: the largest window, whatever the link is."""
    most = limits.H2_STREAM_WINDOW_BYTES
    _put(steering.Steering, "window_bytes", lambda self, host, now_bytes: most)


def _spread() -> None:
    """Requests under way stay on one HTTP/2 connection as long as it lives."""
    _put(steering.Steering, "may_spread", lambda self, host: False)


def _retries() -> None:
    """What failed is not tried again."""
    _put(executor.Executor, "_granted", _never)


async def _never(self: executor.Executor, run: object, pause_s: float, *, heard: bool) -> bool:
    return False


_HOW: dict[str, Callable[[], None]] = {
    "racing": _racing,
    "lanes": _lanes,
    "knocks": _knocks,
    "history": _history,
    "families": _families,
    "windows": _windows,
    "spread": _spread,
    "retries": _retries,
}


def _put(owner: type, name: str, what: Callable[..., Any]) -> None:
    if not hasattr(owner, name):
        raise AttributeError(f"{owner.__name__} has no {name}: what the laboratory takes out has moved")
    setattr(owner, name, what)
