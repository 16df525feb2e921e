"""`stormline sim`: the real client and gateway on a simulated network and virtual time, checked for what must hold."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from stormline.cli import output
from stormline.core import errors

if TYPE_CHECKING:
    from stormline.testing.simworld import Report


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("sim", rich_help_panel="Measurement")(sim)


def sim(
    scenario: Annotated[
        str,
        typer.Argument(
            metavar="[SCENARIO]", help="Name of a scenario, a .toml file, or 'all'; without it they are listed."
        ),
    ] = "",
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="The seed, or the first of several; else drawn.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", min=1, metavar="N", help="How many seeds, one after another; 1.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=0, metavar="S", help="Go on with new seeds for this long.")
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, metavar="N", help="Have so many devices instead of the scenario's."),
    ] = None,
    log: Annotated[bool, typer.Option("--log", help="Print every event of the run.")] = False,
    json: output.JsonFlag = False,
) -> int:
    """Run scenarios of bad networks and failing servers on virtual time; the same seed does the same things.

    Exit code 1 where something did not hold; the line printed repeats that very run.
    """
    from stormline.net.clock import SystemClock, SystemRng
    from stormline.testing import scenario as scenarios
    from stormline.testing import simworld

    if not scenario:
        return _list(json=json)
    if seeds is not None and seconds is not None:
        raise errors.ConfigError("--seeds and --seconds: give one of them")
    names = scenarios.names() if scenario == "all" else (scenario,)
    loaded = {name: scenarios.load(name) for name in names}
    clock = SystemClock()
    start_s = clock.monotonic()
    first = seed if seed is not None else int(SystemRng().random() * 1_000_000)
    last = first + (seeds or 1)
    failed = number = 0
    at = first
    while clock.monotonic() - start_s < seconds if seconds is not None else at < last:
        for name, each in loaded.items():
            lines: list[str] | None = [] if log else None
            report = simworld.run(name, at, scenario=each, devices=devices or 0, log=lines)
            number += 1
            failed += bool(report.problems)
            _show(report, lines or [], json=json, quiet=seconds is not None or len(loaded) * (last - first) > 20)
        at += 1
    if not json:
        spent_s = clock.monotonic() - start_s
        print(f"{number} runs from seed {first} in {spent_s:.1f} s, {failed} with problems")
    return 1 if failed else 0


def _list(*, json: bool) -> int:
    from rich.table import Table

    from stormline.testing import scenario as scenarios

    known = {name: scenarios.load(name).about for name in scenarios.names()}
    if json:
        output.print_json([{"name": name, "about": about} for name, about in known.items()])
        return 0
    table = Table("scenario", "what happens")
    for name, about in known.items():
        table.add_row(name, about)
    output.console().print(table)
    return 0


def summary(report: "Report") -> dict[str, Any]:
    """Give a run's figures, the JSON of the command."""
    history = report.history
    pushes = history.pushes.values()
    return {
        "scenario": report.scenario,
        "seed": report.seed,
        "ok": not report.problems,
        "calls": len(history.calls),
        "success_pct": round(history.success_pct(), 2),
        "pushes": len(pushes),
        "acked": sum(push.confirmed for push in pushes),
        "virtual_s": round(report.virtual_s, 3),
        "packets": history.packets,
        "faults": history.fired,
        "trace_hash": report.trace_hash,
        "problems": report.problems,
        "repeat": report.repeat,
    }


def _show(report: "Report", lines: list[str], *, json: bool, quiet: bool) -> None:
    figures = summary(report)
    if json:
        output.print_json(figures)
        return
    for line in lines:
        print(line)
    for problem in report.problems:
        print(problem)
    if report.problems:
        print(f"repeat it with: {report.repeat}")
    elif not quiet:
        print(
            f"{report.scenario} seed {report.seed}: well; {figures['calls']} calls, {figures['success_pct']} % "
            f"succeeded; {figures['acked']} of {figures['pushes']} pushes acked; {figures['virtual_s']:.0f} virtual "
            f"seconds, {figures['packets']} packets, trace {report.trace_hash}"
        )
