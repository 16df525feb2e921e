"""Which addresses devices find bad, and what is to be done about it. Pure.

An address is bad where it fails for several devices, in most of their attempts, while other addresses of the same host
serve. It is then taken out of service as an operator would do it, by a drain under the name `APM`: told to every
centre and device, kept in the log of changes with its reason, and ended by whoever knows better. Nobody reports on what
nobody uses, so after a while it is taken back, and found bad again if it still is; each time the while is twice as
long. All that has to be remembered stands in the log itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from stormline.core import limits_platform as limits

APM: Final = "apm"
"""In whose name addresses are drained."""


class AddressCounts(NamedTuple):
    """How attempts at an address fared.

    Attributes:
        address: `ip:port`, `[v6]:port`.
        tries: attempts.
        failures: those that failed.
        devices: devices that tried it.
        failing: those of them for which it failed.
    """

    address: str
    tries: int
    failures: int
    devices: int
    failing: int


class LogLine(msgspec.Struct, frozen=True):
    """One line of dispatch's log of changes, newest first there.

    Attributes:
        at: seconds since 1970.
        who: who did it.
        what: `drain`, `undrain` and others.
        detail: what it was done to.
    """

    at: int
    who: str
    what: str
    detail: str = ""


class Order(NamedTuple):
    """What dispatch is to be told.

    Attributes:
        address: which endpoint.
        why: for people.
        end: take it back into service.
    """

    address: str
    why: str
    end: bool = False


def suspects(counts: Iterable[AddressCounts]) -> list[AddressCounts]:
    """Give the addresses that fail for several devices, and for most, and in most attempts, whatever others do.

    Devices count beside attempts, so that one that tries without end, or lies, is one voice.
    """
    return [
        each
        for each in counts
        if each.failing >= limits.BAD_DEVICES_MIN
        and each.failing >= limits.BAD_SHARE_MIN * each.devices
        and each.failures >= limits.BAD_FAILURES_MIN
        and each.failures >= limits.BAD_SHARE_MIN * each.tries
    ]


def bad(
    counts: Sequence[AddressCounts], groups: Iterable[frozenset[str]], drained: frozenset[str]
) -> list[AddressCounts]:
    """Give the addresses that are to be taken out of service.

    Args:
        counts: how attempts fared of late.
        groups: addresses that stand for each other: those of one host, or of one app's gateways.
        drained: addresses that are out of service already.

    Returns:
        Suspects that are in a group, where in each of their groups others were tried and serve, and at least half of
        the group stays in service.
    """
    by_address = {each.address: each for each in counts}
    suspected = {each.address: each for each in suspects(counts) if each.address not in drained}
    sure: set[str] = set()
    doubted: set[str] = set()
    for group in groups:
        ill = group & suspected.keys()
        others = [by_address[each] for each in group - ill - drained if each in by_address]
        tries, failures = sum(each.tries for each in others), sum(each.failures for each in others)
        serve = tries > 0 and failures <= limits.BAD_OTHERS_SHARE_MAX * tries
        stay = len(group - drained - ill) >= len(group) / 2
        (sure if serve and stay else doubted).update(ill)
    return [each for address, each in suspected.items() if address in sure - doubted]


def orders(found: Iterable[AddressCounts], drains: Iterable[str], log: Sequence[LogLine], wall: float) -> list[Order]:
    """Say what is to be drained, and which of our drains are to end.

    Args:
        found: bad addresses.
        drains: what is out of service, as dispatch names it.
        log: the log of changes, newest first.
        wall: now, seconds since 1970.
    """
    last = _last(log)
    ours = [address for address in drains if (line := last.get(address)) and (line.who, line.what) == (APM, "drain")]
    given = [
        Order(
            each.address,
            f"{each.failures} of {each.tries} attempts of the last {limits.BAD_WINDOW_S:.0f} s failed, "
            f"for {each.failing} devices, while others served",
        )
        for each in found
        if not _left_alone(last.get(each.address), wall)
    ][: max(0, limits.BAD_DRAINS_MAX - len(ours))]
    for address in ours:
        times = sum(each.who == APM and each.what == "drain" and each.detail == address for each in log)
        hold_s = min(limits.BAD_HOLD_S_MAX, limits.BAD_HOLD_S * 2.0 ** min(times - 1, 32))
        if wall - last[address].at >= hold_s:
            given.append(Order(address, f"tried again after {hold_s:.0f} s", end=True))
    return given


def _last(log: Sequence[LogLine]) -> Mapping[str, LogLine]:
    """Give the newest line about each endpoint."""
    return {line.detail: line for line in reversed(log) if line.what in ("drain", "undrain")}


def _left_alone(line: LogLine | None, wall: float) -> bool:
    """Say whether a person took it back into service a moment ago."""
    return line is not None and line.what == "undrain" and line.who != APM and wall - line.at < limits.BAD_RESPECT_S
