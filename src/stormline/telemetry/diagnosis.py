"""What was found out about a network and one origin, and what was concluded: plain data, to show, keep and send.

It holds no credentials, no query and no body. What is told of the device's own place is the kind of its network, the
address of its next router and of the routers on the way; not the device's own addresses, and no name of a WiFi.
"""

from typing import Any, NamedTuple

import msgspec

from stormline.core.checks import CheckName, CheckState


class Check(msgspec.Struct, kw_only=True):
    """One thing that was looked at.

    Attributes:
        name: what; see `CheckName`. One name may come more than once, for each address.
        state: how it ended.
        took_s: how long it took.
        detail: in words; of one that was skipped, why.
        data: what was found, by names that depend on the check: see docs/explanation/diagnosis.md.
    """

    name: CheckName
    state: CheckState
    took_s: float = 0.0
    detail: str = ""
    data: dict[str, Any] = {}


class NatProgress(NamedTuple):
    """How far it is found out how long the network keeps silent connections.

    Attributes:
        waited_s: since it began.
        limit_s: the longest silence that is tried.
        waiting: connections that are silent still.
        answered_s: the longest silence that was survived so far; 0 for none.
        lost_s: the shortest that was lost, above that; None for none.
    """

    waited_s: float
    limit_s: float
    waiting: int
    answered_s: float
    lost_s: float | None


class Diagnosis(msgspec.Struct, kw_only=True):
    """What was found, and what it means.

    Attributes:
        version: 1.
        url: what was asked about, without user, query and fragment; empty where it was the network alone.
        host: its host.
        network: kind of network, as `NetworkInfo.kind`.
        automatic: it came by itself, after a key request had failed.
        started_at: wall time, seconds since 1970.
        took_s: how long it took.
        verdict: see `policy.diagnosis.Cause`.
        confidence: `high` or `low`.
        hint: what a person can do, in English.
        why: what the verdict is said from.
        checks: what was looked at.
    """

    version: int = 1
    url: str
    host: str
    network: str = "unknown"
    automatic: bool = False
    started_at: float
    took_s: float
    verdict: str
    confidence: str
    hint: str
    why: str
    checks: list[Check] = []

    def named(self, name: str) -> list[Check]:
        """Give the checks of a name."""
        return [each for each in self.checks if each.name == name]
