"""What a run gives: one JSON object of a fixed shape for each client, and JSON lines of them on disk."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stormline.core import errors, limits_lab
from stormline.lab import workload


class Outcome(NamedTuple):
    """How one request went."""

    at_s: float
    """When it was due."""
    took_s: float
    """From that moment to its end, however it ended."""
    kind: str
    """Empty where it succeeded, else why not (the kinds of `drivers/_harness.py`)."""


class Fault(NamedTuple):
    """Something that was wrong with the network or a server for a while."""

    at_s: float
    what: str
    until_s: float


class RunKey(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a run the same run: with these it meets the same requests, faults and chance."""

    profile: str
    client: str
    seed: int
    requests: int
    duration_s: float
    without: tuple[str, ...] = ()


class Trust(msgspec.Struct, frozen=True, kw_only=True):
    """How far the machine got in the way of a run."""

    wait_p99_ms: float = 0.0
    """How long the client waited for a core."""
    wait_max_ms: float = 0.0
    lag_max_ms: float = 0.0
    """The longest its loop stood still, by its own doing or the machine's."""
    server_lag_ms: float = 0.0
    """The servers' loop, at its worst."""
    shaper_p99_ms: float = 0.0
    """From when a packet was due to when it was sent on."""
    problem: str = ""
    """What went wrong altogether, such as a client that ended early."""

    def reason(self) -> str:
        """Say why the run is not to be trusted; empty where it is."""
        if self.problem:
            return self.problem
        bounds = (
            ("the client waited for a core, p99", self.wait_p99_ms, limits_lab.LAB_WAIT_P99_MS_MAX),
            ("the client waited for a core", self.wait_max_ms, limits_lab.LAB_WAIT_MS_MAX),
            ("the servers' loop stood still", self.server_lag_ms, limits_lab.LAB_WAIT_MS_MAX),
            ("the shaper was late", self.shaper_p99_ms, limits_lab.LAB_SHAPER_LATE_MS_MAX),
        )
        for what, value_ms, bound_ms in bounds:
            if value_ms > bound_ms:
                return f"{what}: {value_ms:.0f} ms (bound {bound_ms:g})"
        return ""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What the servers and the links saw of a run."""

    connections: int
    bytes_up: int
    bytes_down: int
    duplicates: int
    """Requests that reached a server again after it had come once."""
    quic_connections: int = 0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one client. The first thirteen fields are a promise to programs; the others may change."""

    profile: str
    client: str
    seed: int
    requests: int
    ok: int
    """Right answers within `workload.PATIENCE_S`."""
    p50_s: float | None
    """Time to success of the successes; None where there was none."""
    p95_s: float | None
    p99_s: float | None
    failures: dict[str, int]
    connections: int
    bytes_up: int
    bytes_down: int
    duplicates: int
    ok_3s: int
    """Right answers within `workload.IMPATIENCE_S`."""
    duration_s: float
    without: list[str] = []
    no_effect: list[str] = []
    """Of `without`: means this client does not have."""
    quic_connections: int = 0
    distrust: str = ""
    """Why the run is not to be trusted; empty where it is."""
    wait_p99_ms: float = 0.0
    wait_max_ms: float = 0.0
    lag_max_ms: float = 0.0
    server_lag_ms: float = 0.0
    shaper_p99_ms: float = 0.0
    cpu_s: float = 0.0
    """CPU time of the client's process from begin to end."""
    extra_bytes: int = 0
    """What was made beside attempts where bytes cost money, as the client reckoned it; peers do not tell."""
    extras_refused: int = 0
    """How often it was not made for want of bytes."""
    examples: dict[str, str] = {}
    """For each kind of failure the words most of them came with."""
    levels: list[tuple[float, str]] = []
    """What the client took the network for: (second, level) whenever that changed; empty where it does not tell."""
    level_near_pct: float | None = None
    """Share of the time in which that was within one step of the truth (`levels.Score.near_pct`)."""
    level_prompt_pct: float | None = None
    """The same, where a level may be some seconds late (`levels.Score.prompt_pct`)."""
    level_missed: int = 0
    """Changes of two steps that it did not see in time."""
    outcomes: list[Outcome] = []
    events: list[Fault] = []

    def key(self) -> RunKey:
        """Give what it is a run of."""
        return RunKey(
            profile=self.profile,
            client=self.client,
            seed=self.seed,
            requests=self.requests,
            duration_s=self.duration_s,
            without=tuple(self.without),
        )


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Give the value that `share` of the values are at most (nearest rank); None of nothing."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def count_duplicates(requests_by_id: Mapping[Any, int]) -> int:
    """Count the requests that came to the servers more than once."""
    return sum(count - 1 for count in requests_by_id.values() if count > 1)


def outcomes(schedule: Iterable[workload.Ask], lines: Iterable[Mapping[str, Any]]) -> list[Outcome]:
    """Join what was asked with what a driver told; a request it never told of failed as `other`.

    A success later than the user's patience is none: the driver ends it, this makes sure.
    """
    told = {line["id"]: line for line in lines if "id" in line}
    joined = []
    for ask in schedule:
        line = told.get(ask.id)
        if line is None:
            joined.append(Outcome(ask.at_s, workload.PATIENCE_S, "other"))
            continue
        took_s = max(0.0, round(line["end_s"] - ask.at_s, 4))
        kind = "" if line["ok"] else str(line["kind"]) or "other"
        if not kind and took_s > workload.PATIENCE_S + limits_lab.LAB_LATE_END_S:
            kind = "timeout"
        joined.append(Outcome(ask.at_s, took_s, kind))
    return joined


def examples(lines: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Give for each kind of failure the words that most of them came with, and how often."""
    words: dict[str, Counter[str]] = {}
    for line in lines:
        if "id" in line and not line["ok"]:
            words.setdefault(str(line["kind"]), Counter())[str(line["detail"])] += 1
    return {
        kind: f"{found.most_common(1)[0][0]} ({found.most_common(1)[0][1]} of {found.total()})"
        for kind, found in sorted(words.items())
    }


def summarise(
    key: RunKey,
    found: Sequence[Outcome],
    traffic: Traffic,
    trust: Trust,
    *,
    events: Sequence[Fault] = (),
    cpu_s: float = 0.0,
    no_effect: Sequence[str] = (),
    told: Mapping[str, str] | None = None,
) -> Result:
    """Make the result of a run."""
    times = sorted(outcome.took_s for outcome in found if not outcome.kind)
    failures = Counter(outcome.kind for outcome in found if outcome.kind)
    return Result(
        profile=key.profile,
        client=key.client,
        seed=key.seed,
        requests=key.requests,
        ok=len(times),
        p50_s=percentile(times, 0.5),
        p95_s=percentile(times, 0.95),
        p99_s=percentile(times, 0.99),
        failures=dict(sorted(failures.items())),
        connections=traffic.connections,
        bytes_up=traffic.bytes_up,
        bytes_down=traffic.bytes_down,
        duplicates=traffic.duplicates,
        ok_3s=sum(1 for took_s in times if took_s <= workload.IMPATIENCE_S),
        duration_s=key.duration_s,
        without=list(key.without),
        no_effect=list(no_effect),
        quic_connections=traffic.quic_connections,
        distrust=trust.reason(),
        wait_p99_ms=trust.wait_p99_ms,
        wait_max_ms=trust.wait_max_ms,
        lag_max_ms=trust.lag_max_ms,
        server_lag_ms=trust.server_lag_ms,
        shaper_p99_ms=trust.shaper_p99_ms,
        cpu_s=cpu_s,
        examples=dict(told or {}),
        outcomes=list(found),
        events=list(events),
    )


def data(result: Result, *, whole: bool = True) -> dict[str, Any]:
    """Give a result as plain data for JSON; without single requests and faults where not `whole`."""
    plain: dict[str, Any] = msgspec.to_builtins(result)
    if not whole:
        del plain["outcomes"], plain["events"], plain["levels"]
    return plain


def append(path: Path, result: Result) -> None:
    """Add a result to a file of JSON lines.

    Raises:
        PlatformError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data(result), separators=(",", ":")) + "\n")
    except OSError as error:
        raise errors.PlatformError(f"lab: cannot write {path}: {error.strerror}") from error


def read(path: Path) -> list[Result]:
    """Read a file of JSON lines; of runs that were repeated the last. A last line that a crash cut short is left out.

    Raises:
        PlatformError: it cannot be read.
        ConfigError: a line is no result; the message says which.
    """
    try:
        if path.stat().st_size > limits_lab.LAB_RESULTS_BYTES_MAX:
            raise errors.ConfigError(f"{path}: more than {limits_lab.LAB_RESULTS_BYTES_MAX} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.PlatformError(f"lab: cannot read {path}: {error}") from error
    found: dict[RunKey, Result] = {}
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            result = msgspec.json.decode(line, type=Result)
        except msgspec.DecodeError as error:
            if number == len(lines):
                break
            raise errors.ConfigError(f"{path}, line {number}: {error}") from error
        found[result.key()] = result
    return list(found.values())
