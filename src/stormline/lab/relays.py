"""What a relay is worth: on weak networks with and without it, and in an operator's incident.

On the weak networks one client asks throughout. In the incident each request is the first of an app: one that has a
connection keeps it, and it is those who come that are hit. Some ways through the operator's network are broken then:
a share of the connections to the origin is lost whole, and a smaller share of those to a relay beside it. Both shares
are set so that what they lead to is what was reported of such an incident; what an off-site relay makes of it is not.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from stormline.core import errors, limits_lab
from stormline.core.clock import Clock
from stormline.lab import clients, profiles, relays_servers, results, workload
from stormline.lab.driving import Driver
from stormline.lab.faults import LostFlows
from stormline.lab.profiles_model import Event, Profile, ServerSpec, link
from stormline.lab.relays_servers import OFF_SITE, ON_SITE
from stormline.lab.results import Outcome, Result
from stormline.lab.stage import Stage, StageReport
from stormline.lab.starts import favour
from stormline.net.clock import SystemClock

PROFILES: Final = ("dns-hijack", "ssl-cut", "dead-ip", "udp-block")
ALONE: Final = ("ip-direct", "doh")
"""What a client that knows the origin by its name alone goes without, beside the relay."""
CURVES: Final[Mapping[str, tuple[str, ...]]] = {
    "no relay": (),
    "on-site relay": (ON_SITE,),
    "off-site relay": (OFF_SITE, ON_SITE),
}
"""Relays of the plan, best first."""
DIRECT_PCT: Final = 93.6
"""Share of the connections to the origin that are lost in the incident: 28 to 30 % of first requests fail by it."""
ON_SITE_PCT: Final = 50.0
"""Share of those to the relay beside it: some 4 % of first requests fail by both."""
BEGIN_S: Final = 10.0
BUCKET_S: Final = 5.0
RATE: Final = 5.0
"""First requests a second in the incident."""
CLIENT: Final = "stormline"


class Case(NamedTuple):
    """One run.

    Attributes:
        name: what of.
        profile: the network.
        seed: of all chance.
        duration_s: of the run.
        requests: in it.
        relays: addresses of relays that the plan names.
        off: what the client goes without.
        fresh: each request is the first of an app.
        begin_s: when the incident begins, and how long before the end of the run it is over.
    """

    name: str
    profile: Profile
    seed: int
    duration_s: float
    requests: int
    relays: tuple[str, ...] = (OFF_SITE, ON_SITE)
    off: tuple[str, ...] = ()
    fresh: bool = False
    begin_s: float = 0.0


def ablation(seeds: Sequence[int], duration_s: float) -> list[Case]:
    """Give the runs on weak networks: the whole and the client that knows a name alone, each with and without relay."""
    cases = []
    for name in PROFILES:
        profile = profiles.get(name)
        for seed in seeds:
            for off in ((), ("relay",), ALONE, (*ALONE, "relay")):
                relays = () if ALONE[0] in off and "relay" in off else (OFF_SITE, ON_SITE)
                requests = profile.requests_in(duration_s)
                cases.append(Case(name, profile, seed, duration_s, requests, relays=relays, off=off))
    return cases


def incident_profile(direct_pct: float, on_site_pct: float, origin: Sequence[str], begin_s: float) -> Profile:
    """Give the network of the incident.

    Args:
        direct_pct: connections to the origin that are lost.
        on_site_pct: connections to the relay beside it that are lost.
        origin: its addresses.
        begin_s: see `Case`.
    """

    def plan(duration_s: float, _: object) -> Iterator[Event]:
        until_s = duration_s - begin_s
        yield Event(at_s=begin_s, until_s=until_s, fault=LostFlows(pct=direct_pct, hosts=tuple(origin)))
        if on_site_pct:
            yield Event(at_s=begin_s, until_s=until_s, fault=LostFlows(pct=on_site_pct, hosts=(ON_SITE,)))

    return Profile(
        name="operator-incident",
        about="A share of the connections to the origin is lost in the operator's network for most of the run.",
        wifi=link(rtt_ms=60, down_mbps=12, up_mbps=6),
        plan=plan,
        server=ServerSpec(v4=len(origin)),
    )


_ORIGIN: Final = ("203.0.113.10", "203.0.113.11", "203.0.113.12")


def incident(
    seeds: Sequence[int],
    duration_s: float,
    *,
    curves: Sequence[str] = tuple(CURVES),
    direct_pct: float = DIRECT_PCT,
    on_site_pct: float = ON_SITE_PCT,
    begin_s: float = BEGIN_S,
    rate: float = RATE,
) -> list[Case]:
    """Give the runs of the incident; `rate` is that of requests, a second."""
    profile = incident_profile(direct_pct, on_site_pct, _ORIGIN, begin_s)
    requests = round(rate * duration_s)
    return [
        Case(name, profile, seed, duration_s, requests, relays=CURVES[name], fresh=True, begin_s=begin_s)
        for seed in seeds
        for name in curves
    ]


# -- what came of it --------------------------------------------------------------------------------------------------
class Curve(NamedTuple):
    """The runs of one kind of the incident.

    Attributes:
        name: of `CURVES`.
        requests: asked while it lasted, so that none had its patience over by its end.
        failed_pct: of these.
        points: of all runs together, by when they were asked: (second, requests, percent that were answered right).
        median_s: time to success of those in it that had one.
    """

    name: str
    requests: int
    failed_pct: float
    points: tuple[tuple[float, int, float], ...]
    median_s: float | None


def curve(name: str, found: Sequence[Result], *, begin_s: float = BEGIN_S) -> Curve:
    """Sum up the runs of one curve."""
    duration_s = found[0].duration_s
    outcomes = [each for result in found for each in result.outcomes]
    inside = [each for each in outcomes if begin_s <= each.at_s < duration_s - begin_s - workload.PATIENCE_S]
    count = max(1, round(duration_s / BUCKET_S))
    buckets: list[list[Outcome]] = [[] for _ in range(count)]
    for each in outcomes:
        buckets[min(count - 1, int(each.at_s / BUCKET_S))].append(each)
    times = sorted(each.took_s for each in inside if not each.kind)
    return Curve(
        name,
        len(inside),
        _failed_pct(inside),
        tuple((at * BUCKET_S, len(some), round(100.0 - _failed_pct(some), 2)) for at, some in enumerate(buckets)),
        results.percentile(times, 0.5),
    )


def _failed_pct(outcomes: Sequence[Outcome]) -> float:
    return 100.0 * sum(bool(each.kind) for each in outcomes) / max(1, len(outcomes))


# -- running ----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _platform(stage: Stage, relays: Sequence[str], folder: Path) -> Iterator[Path]:
    """Run the platform's servers; gives the path of the client's bundle.

    Raises:
        PlatformError: they did not start.
    """
    stage.topology.server.shell(relays_servers.addresses_script())
    bundle = folder / "bundle.json"
    told = {
        "authority": str(stage.ca_file.parent),
        "bundle": str(bundle),
        "origin": stage.addresses,
        "relays": list(relays),
        "upstream": f"http://{stage.dns_servers[0]}",
    }
    words = [sys.executable, "-m", "stormline.lab.relays_servers", json.dumps(told)]
    process = stage.topology.server.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        favour(process.pid)
        if process.stdout is None or process.stdout.readline() != b"ready\n":
            raise errors.PlatformError("relays: the platform did not start")
        yield bundle
    finally:
        process.kill()
        process.communicate()


def _schedule(case: Case) -> list[workload.Ask]:
    return workload.schedule(case.seed, case.requests, case.duration_s)


def run(case: Case, folder: Path, *, environ: Mapping[str, str], clock: Clock | None = None) -> Result:
    """Make one run.

    Args:
        case: what.
        folder: an empty folder of its own.
        environ: our environment.
        clock: monotonic; the machine's where None.

    Raises:
        PlatformError: the laboratory cannot work here, or a process did not start.
    """
    clock = clock or SystemClock()
    (folder / "driver").mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(Stage(case.profile, case.seed, folder=folder / "stage", duration_s=case.duration_s))
        bundle = stack.enter_context(_platform(stage, case.relays, folder))
        driver = stack.enter_context(
            Driver(
                clients.get(CLIENT),
                _schedule(case),
                base_url=stage.base_url,
                ca_file=Path(stage.ca_file),
                folder=folder / "driver",
                environ=environ,
                popen=lambda words, env, more: stage.popen(words, env, **more),
                options={
                    "bundle": str(bundle),
                    "disabled": list(case.off),
                    "doh": [[stage.doh_url, list(stage.dns_servers)]],
                    "fresh": case.fresh,
                },
            )
        )
        for pid in (stage.origin.pid, driver.pid):
            favour(pid)
        driver.wait_ready()
        stage.begin()
        driver.go()
        until_s = clock.monotonic() + case.duration_s + workload.PATIENCE_S + limits_lab.LAB_DRAIN_S
        problem = driver.wait_end(until_s, clock)
        report = stage.finish()
    return _summed_up(case, driver, problem, report)


def _summed_up(case: Case, driver: Driver, problem: str, report: StageReport) -> Result:
    last = driver.end or {}
    trust = results.Trust(
        wait_p99_ms=last.get("wait_p99_ms", 0.0),
        wait_max_ms=last.get("wait_max_ms", 0.0),
        lag_max_ms=last.get("lag_max_ms", 0.0),
        server_lag_ms=round(report.loop_lag_ms, 2),
        shaper_p99_ms=round(report.shaper["lateness_p99_ms"], 3),
        problem=problem or ("the shaper overflowed" if report.shaper["overflow_packets"] else ""),
    )
    traffic = results.Traffic(
        connections=report.connections["tcp"],
        bytes_up=report.bytes_up,
        bytes_down=report.bytes_down,
        duplicates=results.count_duplicates(report.requests_by_id),
    )
    key = results.RunKey(
        profile=case.profile.name,
        client=CLIENT,
        seed=case.seed,
        requests=case.requests,
        duration_s=case.duration_s,
        without=case.off,
    )
    return results.summarise(
        key,
        results.outcomes(_schedule(case), driver.lines),
        traffic,
        trust,
        cpu_s=last.get("cpu_s", 0.0),
        told=results.examples(driver.lines),
    )


def run_all(
    cases: Sequence[Case],
    *,
    folder: Path,
    jobs: int,
    environ: Mapping[str, str],
    again: bool = True,
    on_result: Callable[[Case, Result], None] = lambda *_: None,
) -> list[Result]:
    """Make runs, some side by side; gives them in the order of `cases`.

    Args:
        cases: the runs.
        folder: an empty folder of their own.
        jobs: how many at a time.
        environ: our environment.
        again: one that cannot be trusted is made once more.
        on_result: told of each, from other threads as well.

    Raises:
        PlatformError: see `run`.
    """

    def one(number: int) -> Result:
        case = cases[number]
        found = run(case, folder / str(number), environ=environ)
        if found.distrust and again:
            second = run(case, folder / f"{number}-again", environ=environ)
            found = second if not second.distrust or second.wait_max_ms <= found.wait_max_ms else found
        on_result(case, found)
        return found

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        return list(pool.map(one, range(len(cases))))


def failures(result: Result) -> dict[str, Any]:
    """Give what went wrong in a run, for people."""
    return {kind: result.examples.get(kind, "") for kind in result.failures}
