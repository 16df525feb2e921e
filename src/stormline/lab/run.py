"""Runs clients under test on stages, some side by side, and once more those that cannot be trusted.

A group of runs is prepared whole, begins at one moment and is taken down whole, so that nobody's start or end falls
into another's measurement.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from stormline.core import errors, limits_lab
from stormline.core.clock import Clock
from stormline.lab import ablation, clients, levels, profiles, results, workload
from stormline.lab.driving import Driver
from stormline.lab.results import Result, RunKey
from stormline.lab.stage import Stage, StageReport
from stormline.net.clock import SystemClock
from stormline.policy.level import Level

STANDARD_DURATION_S: Final = 40.0
"""Of each run of the standard set: long enough for the longest blackout and what comes after it, and short enough for
the whole set to take ten minutes on two cores."""
JOBS_PER_CORE: Final = 4
"""Eight runs side by side on two cores leave the shaper as punctual as one alone (p99 0.15 ms): they mostly wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What happened just now."""

    key: RunKey
    what: str
    """`kept` (the file has it), `begin`, `ask` (a request ended), `again` (not to be trusted: once more), `result`."""
    ok: bool = True
    text: str = ""
    result: Result | None = None


OnProgress = Callable[[Progress], None]


def plan(
    profile_names: Sequence[str],
    client_names: Sequence[str],
    seeds: Sequence[int],
    *,
    requests: int | None = None,
    duration_s: float | None = None,
    without: Sequence[str] = (),
) -> list[RunKey]:
    """List the runs of every profile with every client and seed, those of one profile and seed together.

    Args:
        profile_names: of `profiles.PROFILES`.
        client_names: of `clients.CLIENTS`.
        seeds: of the schedule and of the faults.
        requests: None for the profile's own rate.
        duration_s: None for the profile's own.
        without: means our client shall not use; peers run as they are.

    Raises:
        ConfigError: a name or number is wrong; the message says which.
    """
    ablation.split(without)
    keys = []
    for profile_name in dict.fromkeys(profile_names):
        profile = profiles.get(profile_name)
        length_s = duration_s if duration_s is not None else profile.duration_s
        if not 0 < length_s <= workload.DURATION_S_MAX:
            raise errors.ConfigError(f"duration: expected 0 to {workload.DURATION_S_MAX:g} s, got {length_s:g}")
        count = requests if requests is not None else max(1, round(profile.requests * length_s / profile.duration_s))
        if not 1 <= count <= workload.REQUESTS_MAX:
            raise errors.ConfigError(f"requests: expected 1 to {workload.REQUESTS_MAX}, got {count}")
        for seed in dict.fromkeys(seeds):
            for name in dict.fromkeys(client_names):
                client = clients.get(name)
                keys.append(
                    RunKey(
                        profile=profile_name,
                        client=name,
                        seed=seed,
                        requests=count,
                        duration_s=length_s,
                        without=tuple(dict.fromkeys(without)) if client.ours else (),
                    )
                )
    return keys


def usual_jobs() -> int:
    """Give how many runs this machine can carry side by side."""
    return min(limits_lab.LAB_JOBS_MAX, JOBS_PER_CORE * len(os.sched_getaffinity(0)))


def seconds(keys: Sequence[RunKey], jobs: int) -> float:
    """Estimate how long runs take."""
    return sum(
        max(key.duration_s for key in group) + workload.PATIENCE_S / 2 + _OVERHEAD_S for group in groups(keys, jobs)
    )


_OVERHEAD_S: Final = 4.0


def groups(keys: Sequence[RunKey], jobs: int) -> Iterator[list[RunKey]]:
    """Split runs into groups of at most `jobs`; those of one group have one profile, seed and duration."""
    group: list[RunKey] = []
    for key in keys:
        if group and (len(group) == jobs or _together(key) != _together(group[0])):
            yield group
            group = []
        group.append(key)
    if group:
        yield group


def _together(key: RunKey) -> tuple[str, int, float]:
    return key.profile, key.seed, key.duration_s


def run_all(
    keys: Iterable[RunKey],
    *,
    jobs: int,
    out: Path | None = None,
    environ: Mapping[str, str],
    on_progress: OnProgress = lambda _: None,
    clock: Clock | None = None,
) -> list[Result]:
    """Run what is not yet in the file of results; runs that cannot be trusted are repeated once.

    Args:
        keys: the runs.
        jobs: how many at a time.
        out: a file of JSON lines that has results of before and takes the new ones; None keeps nothing.
        environ: our environment, to find the peers' Python.
        on_progress: told what happens, from other threads as well.
        clock: monotonic; the machine's where None.

    Returns:
        A result for each run, in the order of `keys`.

    Raises:
        ConfigError: `jobs` is out of range, or no Python here has a client's packages.
        PlatformError: the laboratory cannot work here; a client did not start; the file cannot be used.
    """
    if not 1 <= jobs <= limits_lab.LAB_JOBS_MAX:
        raise errors.ConfigError(f"jobs: expected 1 to {limits_lab.LAB_JOBS_MAX}, got {jobs}")
    wanted = list(dict.fromkeys(keys))
    for key in wanted:
        clients.python_for(clients.get(key.client), environ)  # before the first run, not after an hour
    found = {result.key(): result for result in (results.read(out) if out is not None and out.exists() else [])}
    for key in wanted:
        if key in found:
            on_progress(Progress(key=key, what="kept", result=found[key]))
    runner = _Runner(environ, on_progress, clock or SystemClock())
    for group in groups([key for key in wanted if key not in found], jobs):
        done = {result.key(): result for result in runner.run_group(group)}
        doubtful = [result for result in done.values() if result.distrust]
        for result in doubtful:
            on_progress(Progress(key=result.key(), what="again", ok=False, text=result.distrust))
        if doubtful:
            again = runner.run_group([result.key() for result in doubtful])
            done |= {first.key(): _better(first, second) for first, second in zip(doubtful, again, strict=True)}
        for key, result in done.items():
            found[key] = result
            if out is not None:
                results.append(out, result)
            on_progress(Progress(key=key, what="result", ok=not result.distrust, result=result))
    return [found[key] for key in wanted]


def _better(first: Result, second: Result) -> Result:
    """Give the run that the machine got in the way of less."""
    return second if not second.distrust or second.wait_max_ms <= first.wait_max_ms else first


class _Runner:
    """Runs groups."""

    def __init__(self, environ: Mapping[str, str], on_progress: OnProgress, clock: Clock) -> None:
        self._environ = environ
        self._on_progress = on_progress
        self._clock = clock

    def run_group(self, group: Sequence[RunKey]) -> list[Result]:
        """Run runs of one profile side by side; gives their results in the same order."""
        with tempfile.TemporaryDirectory(prefix="stormline-lab-") as folder, contextlib.ExitStack() as stack:
            runs = [_Run(key, Path(folder) / str(number)) for number, key in enumerate(group)]
            with ThreadPoolExecutor(max_workers=max(1, min(len(runs), os.cpu_count() or 1))) as pool:
                for run in runs:
                    stack.callback(run.close)
                list(pool.map(lambda run: run.prepare(self._environ, self._tell(run.key)), runs))
            for run in runs:
                run.driver.wait_ready()
            for run in runs:
                run.begin()
                self._on_progress(Progress(key=run.key, what="begin"))
            until_s = self._clock.monotonic() + group[0].duration_s + workload.PATIENCE_S + limits_lab.LAB_DRAIN_S
            return [run.end(until_s, self._clock) for run in runs]

    def _tell(self, key: RunKey) -> Callable[[Mapping[str, Any]], None]:
        def tell(line: Mapping[str, Any]) -> None:
            self._on_progress(Progress(key=key, what="ask", ok=bool(line["ok"]), text=str(line["kind"])))

        return tell


class _Run:
    """One client on its own stage."""

    def __init__(self, key: RunKey, folder: Path) -> None:
        self.key = key
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._schedule = workload.schedule(key.seed, key.requests, key.duration_s)
        self._off, self._no_effect = ablation.split(key.without)

    def prepare(self, environ: Mapping[str, str], on_line: Callable[[Mapping[str, Any]], None]) -> None:
        """Build the stage and start the client."""
        (self._folder / "stage").mkdir(parents=True)
        (self._folder / "driver").mkdir()
        self._stage = self._stack.enter_context(
            Stage(
                profiles.get(self.key.profile),
                self.key.seed,
                folder=self._folder / "stage",
                duration_s=self.key.duration_s,
            )
        )
        self.driver = self._stack.enter_context(
            Driver(
                clients.get(self.key.client),
                self._schedule,
                base_url=self._stage.base_url,
                ca_file=Path(self._stage.ca_file),
                folder=self._folder / "driver",
                environ=environ,
                popen=lambda words, env, more: self._stage.popen(words, env, **more),
                # No means of the stage's: any app may name a public server for DNS over HTTPS.
                options={"disabled": list(self._off), "doh": [[self._stage.doh_url, list(self._stage.dns_servers)]]},
                on_line=on_line,
            )
        )

    def begin(self) -> None:
        """Start the clocks of the faults and of the client."""
        self._stage.begin()
        self.driver.go()

    def end(self, until_s: float, clock: Clock) -> Result:
        """Wait for the end and give the result."""
        problem = self.driver.wait_end(until_s, clock)
        report = self._stage.finish()
        self.close()
        last = self.driver.end or {}
        result = results.summarise(
            self.key,
            results.outcomes(self._schedule, self.driver.lines),
            _traffic(report),
            results.Trust(
                wait_p99_ms=last.get("wait_p99_ms", 0.0),
                wait_max_ms=last.get("wait_max_ms", 0.0),
                lag_max_ms=last.get("lag_max_ms", 0.0),
                server_lag_ms=round(report.loop_lag_ms, 2),
                shaper_p99_ms=round(report.shaper["lateness_p99_ms"], 3),
                problem=problem or ("the shaper overflowed" if report.shaper["overflow_packets"] else ""),
            ),
            events=[self._fault(event) for event in report.events],
            cpu_s=last.get("cpu_s", 0.0),
            no_effect=self._no_effect,
            told=results.examples(self.driver.lines),
        )
        spent = {name: last[name] for name in ("extra_bytes", "extras_refused") if name in last}
        return self._with_levels(msgspec.structs.replace(result, **spent))

    def _with_levels(self, result: Result) -> Result:
        """Add what the client took the network for, and how near it was."""
        if not self.driver.levels:
            return result
        key = self.key
        second = "second-link" not in key.without
        course = levels.course_of(profiles.get(key.profile), key.seed, key.duration_s, second=second)
        told = [(at_s, Level(level)) for at_s, level in self.driver.levels]
        found = levels.score(told, course, key.duration_s)
        return msgspec.structs.replace(
            result,
            levels=self.driver.levels,
            level_near_pct=round(found.near_pct, 2),
            level_prompt_pct=round(found.prompt_pct, 2),
            level_missed=found.missed,
        )

    def _fault(self, event: Mapping[str, Any]) -> results.Fault:
        until_s = event["until_s"]
        return results.Fault(
            event["at_s"], event["what"], self.key.duration_s + workload.PATIENCE_S if until_s is None else until_s
        )

    def close(self) -> None:
        """Take everything down; again is harmless."""
        self._stack.close()


def _traffic(report: StageReport) -> results.Traffic:
    return results.Traffic(
        connections=report.connections["tcp"] + report.connections["quic"],
        bytes_up=report.bytes_up,
        bytes_down=report.bytes_down,
        duplicates=results.count_duplicates(report.requests_by_id),
        quic_connections=report.connections["quic"],
    )
