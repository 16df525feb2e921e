"""`stormline lab`: how clients fare on bad networks, beside each other, on real kernels."""

import contextlib
import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stormline.cli import lab_relay, output
from stormline.core import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.table import Table

    from stormline.bench.results import Row
    from stormline.lab.diagnosing import Outcome as Diagnosed
    from stormline.lab.results import Result, RunKey
    from stormline.lab.run import Progress
    from stormline.lab.starts import Visit
    from stormline.lab.verdicts import Outcome

RESULTS = Path("bench/results")
LINES = "lab.jsonl"
PAGE = "lab.html"
WIDE_COLUMNS = 120
"""A terminal this wide has room for both figures of eight clients."""
MEAN_GOAL_PCT = 99.9
"""Success within 10 s, mean of the standard set's profiles: what these networks would allow."""
DIAGNOSIS_GOAL_S = 10.0
"""How long people wait for an explanation, a busy machine included."""

SeedOption = Annotated[
    list[int] | None,
    typer.Option("--seed", metavar="N", help="Of requests, faults and chance; repeatable; default 1."),
]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", metavar="N", min=1, help="Runs side by side; default what this machine carries."),
]

group = typer.Typer(help="How clients fare on bad networks, on real kernels (needs root).")


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(group, name="lab", rich_help_panel="Measurement")


@group.callback(invoke_without_command=True)
def _standard(
    context: typer.Context,
    seed: SeedOption = None,
    duration: Annotated[
        float | None, typer.Option("--duration", metavar="S", help="Seconds of each run; default 40.")
    ] = None,
    jobs: JobsOption = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for results and report.")] = RESULTS,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the results that are there.")] = False,
) -> None:
    """Run the standard set with every client and write the report, in about ten minutes.

    Writes lab.jsonl (every request), lab.json (the figures) and lab.html (the report).
    """
    if context.invoked_subcommand is not None:
        return
    from stormline.lab import clients, profiles, run
    from stormline.lab.namespaces import require_lab

    require_lab()
    there = [name for name in _available() if clients.get(name).standard]
    keys = run.plan(profiles.STANDARD, there, seed or [1], duration_s=duration or run.STANDARD_DURATION_S)
    lines = out / LINES
    if not resume:
        lines.unlink(missing_ok=True)
    found = _run(keys, jobs=jobs, out=lines, on_result=lambda _: None)
    _keep(found, out)
    output.console().print(_matrix(found))
    output.console().print(f"report: {out / PAGE}")


@group.command("run")
def run_(
    profile: Annotated[list[str], typer.Option("--profile", metavar="NAME", help="Network; repeatable.")],
    client: Annotated[
        list[str] | None,
        typer.Option("--client", metavar="NAME", help="Client under test; repeatable; default stormline."),
    ] = None,
    seed: SeedOption = None,
    without: Annotated[
        str, typer.Option("--without", metavar="MEANS", help="Leave means of stormline out: hedge,racing,quic,...")
    ] = "",
    requests: Annotated[
        int | None, typer.Option("--requests", metavar="N", help="Requests of a run; default the profile's rate.")
    ] = None,
    duration: Annotated[
        float | None, typer.Option("--duration", metavar="S", help="Seconds of a run; default the profile's.")
    ] = None,
    jobs: JobsOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Keep results there as JSON lines; runs that it has are not run."),
    ] = None,
    json: output.JsonFlag = False,
) -> None:
    """Run clients on profiles; with --json one object for each run."""
    from stormline.lab import results, run
    from stormline.lab.namespaces import require_lab

    left_out = tuple(name.strip() for name in without.split(",") if name.strip())
    keys = run.plan(
        profile, client or ["stormline"], seed or [1], requests=requests, duration_s=duration, without=left_out
    )
    require_lab()

    def show(result: "Result") -> None:
        if json:
            output.print_json(results.data(result, whole=False))

    found = _run(keys, jobs=jobs, out=out, on_result=show)
    if not json:
        output.console().print(_details(found))
        _notes(found)


@group.command("list")
def list_(json: output.JsonFlag = False) -> None:
    """Show the profiles and the clients there are."""
    from rich.markup import escape
    from rich.table import Table

    from stormline.lab import clients, profiles

    there = set(_available(quiet=True))
    if json:
        output.print_json(
            {
                "profiles": [
                    {"name": each.name, "group": name, "about": each.about, "standard": each.name in profiles.STANDARD}
                    for name, group in profiles.GROUPS.items()
                    for each in group
                ],
                "clients": [
                    {"name": each.name, "about": each.about, "available": each.name in there}
                    for each in clients.CLIENTS.values()
                ],
            }
        )
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, those in profiles.GROUPS.items():
        table.add_row(f"[bold]{escape(name)}[/bold]", "")
        for profile in those:
            mark = "*" if profile.name in profiles.STANDARD else " "
            table.add_row(f" {mark} {escape(profile.name)}", escape(profile.about))
    table.add_row("[bold]Clients[/bold]", "")
    for client in clients.CLIENTS.values():
        missing = "" if client.name in there else " (not installed: make peers)"
        table.add_row(f"   {escape(client.name)}", escape(client.about + missing))
    output.console().print(table)
    output.console().print("* of the standard set")


@group.command("validate")
def validate(
    effort: Annotated[
        float, typer.Option("--effort", metavar="SHARE", help="Share of the full samples, 0.1 to 1.")
    ] = 1.0,
    json: output.JsonFlag = False,
) -> None:
    """Measure whether this machine's emulated links do what they say, in half a minute; exit 1 where they do not."""
    from stormline.lab import validate as measure

    def show(figure: measure.Figure) -> None:
        if not json:
            bound = "at most" if figure.better == "lower" else "at least"
            tries = f" (try {figure.tries})" if figure.tries > 1 else ""
            print(
                f"{'ok  ' if figure.ok else 'MISS'} {figure.name}: {figure.value:.2f} {figure.unit}, "
                f"{bound} {figure.target:g}{tries}",
                flush=True,
            )

    result = measure.validate(on_figure=show, effort=effort)
    if json:
        output.print_json(result.data())
    if not result.ok:
        raise typer.Exit(1)


@group.command("verdicts")
def verdicts_(
    seed: SeedOption = None,
    case: Annotated[
        list[str] | None, typer.Option("--case", metavar="NAME", help="What is made; repeatable; default all.")
    ] = None,
    watch: Annotated[
        str, typer.Option("--watch", metavar="HOW", help="How the client watches: auto, netlink, polling, off.")
    ] = "auto",
    jobs: JobsOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Keep figures, matrix and runs in verdicts.json there.")
    ] = None,
    json: output.JsonFlag = False,
) -> None:
    """Make each fault of a network and look at what the client says of it; exit 1 where it is surely wrong."""
    import tempfile

    from stormline.lab import run, verdicts
    from stormline.lab.namespaces import require_lab

    require_lab()
    known = {each.name: each for each in verdicts.CASES}
    unknown = [name for name in case or () if name not in known]
    if unknown:
        raise errors.ConfigError(f"--case {unknown[0]}: there are {', '.join(known)}")
    cases = [known[name] for name in case] if case else list(known.values())
    with output.ended_cleanly(), tempfile.TemporaryDirectory() as folder:
        found = verdicts.run_all(
            cases,
            seed or [1],
            folder=Path(folder),
            jobs=jobs or run.usual_jobs(),
            watch=watch,
            on_outcome=lambda each: output.print_json(each.data()) if json else None,
        )
    if out is not None:
        _keep_verdicts(found, out.expanduser())
    if not json:
        output.console().print(_confusion(found))
    if any(each.wrong_high for each in found):
        raise typer.Exit(1)


@group.command("diagnose")
def diagnose_(
    seed: SeedOption = None,
    case: Annotated[
        list[str] | None, typer.Option("--case", metavar="NAME", help="What is made; repeatable; default all.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print what `stormline diagnose` prints for people.")] = False,
    jobs: JobsOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Keep figures and verdicts in lab_diagnosis.json there.")
    ] = None,
    json: output.JsonFlag = False,
) -> None:
    """Make what goes wrong with networks and ask `stormline diagnose` there; exit 1 where it is surely wrong."""
    import tempfile

    from stormline.lab import diagnosing, run
    from stormline.lab.namespaces import require_lab

    known = {each.name: each for each in diagnosing.CASES}
    unknown = [name for name in case or () if name not in known]
    if unknown:
        raise errors.ConfigError(f"--case {unknown[0]}: there are {', '.join(known)}")
    require_lab()
    cases = [known[name] for name in case] if case else list(known.values())
    seeds = seed or [1]
    with output.ended_cleanly(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if show:
            for each in cases:
                print(diagnosing.shown(each, seeds[0], folder / each.name), flush=True)
            return
        found = diagnosing.run_all(
            cases,
            seeds,
            folder=folder,
            jobs=jobs or run.usual_jobs(),
            on_outcome=lambda each: output.print_json(each.data()) if json else None,
        )
    if out is not None:
        _keep_diagnoses(found, out.expanduser())
    if not json:
        output.console().print(_diagnosed(found))
    if any(each.surely_wrong for each in found):
        raise typer.Exit(1)


@group.command("starts")
def starts_(
    seed: SeedOption = None,
    restarts: Annotated[
        int, typer.Option("--restarts", metavar="N", help="Starts of each app on the three harsh networks.")
    ] = 20,
    way: Annotated[
        list[str] | None,
        typer.Option("--way", metavar="NAME", help="How the host is reached: origin, long, names; repeatable."),
    ] = None,
    jobs: JobsOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Keep figures and starts in lab_starts.json there.")
    ] = None,
    json: output.JsonFlag = False,
) -> None:
    """Start an app again and again on networks it knows, beside one that forgets; exit 1 where that is no gain.

    Figures: start30_success_pct (all first requests answered within 30 s of the start) and
    return_median_reduction_pct (time to the first answer on a return, against the first visit).
    """
    import tempfile

    from stormline.lab import run, starts
    from stormline.lab.namespaces import require_lab

    unknown = [name for name in way or () if name not in starts.WAYS]
    if unknown:
        raise errors.ConfigError(f"--way {unknown[0]}: there are {', '.join(starts.WAYS)}")
    seeds = seed or [1]
    starts.journey(seeds[0], restarts)
    require_lab()
    with output.ended_cleanly(), tempfile.TemporaryDirectory() as folder:
        found = starts.run_all(
            seeds,
            folder=Path(folder),
            jobs=jobs or max(1, run.usual_jobs() // 2),
            restarts=restarts,
            ways=way or starts.WAYS,
            on_visit=lambda each: output.print_json(each.data()) if json else None,
        )
    rows = _starts_rows(found)
    if out is not None:
        _keep_starts(found, rows, out.expanduser())
    if not json:
        output.console().print(_starts_table(found))
        for each in rows[:3]:
            print(f"{each.name}: {each.ours:g} {each.unit}, {each.peer} {each.peer_value:g} (goal {each.goal:g})")
    if not all(each.ok for each in rows[:2]):
        raise typer.Exit(1)


group.command("relay")(lab_relay.relay)


@group.command("report")
def report(
    source: Annotated[Path, typer.Option("--in", metavar="FILE", help="Results, JSON lines.")] = RESULTS / LINES,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The page.")] = RESULTS / PAGE,
    json: output.JsonFlag = False,
) -> None:
    """Write one HTML page of results: success, times, cost and timelines."""
    from stormline.lab import results

    found = results.read(source.expanduser())
    _write_page(found, out.expanduser())
    if json:
        output.print_json({"report": str(out), "runs": len(found), "distrusted": sum(bool(r.distrust) for r in found)})
    else:
        output.console().print(_matrix(found))
        print(f"wrote {out}")


# -- running ----------------------------------------------------------------------------------------------------------
def _available(*, quiet: bool = False) -> list[str]:
    """List the clients that can be run here; says which cannot."""
    from stormline.lab import clients

    names = []
    for client in clients.CLIENTS.values():
        try:
            clients.python_for(client, output.environ())
        except errors.ConfigError as error:
            if not quiet:
                print(f"left out: {error}", file=sys.stderr)
            continue
        names.append(client.name)
    return names


def _run(
    keys: "Sequence[RunKey]", *, jobs: int | None, out: Path | None, on_result: "Callable[[Result], None]"
) -> "list[Result]":
    from stormline.lab import results, run

    jobs = jobs or run.usual_jobs()
    kept = {result.key() for result in results.read(out)} if out is not None and out.exists() else set()

    with output.ended_cleanly(), _watching([key for key in keys if key not in kept], jobs) as watch:

        def progress(event: "Progress") -> None:
            watch(event)
            if event.result is not None:
                on_result(event.result)

        return run.run_all(keys, jobs=jobs, out=out, environ=output.environ(), on_progress=progress)


@contextlib.contextmanager
def _watching(keys: "Sequence[RunKey]", jobs: int) -> "Iterator[Callable[[Progress], None]]":
    """Show how far the runs are on standard error: a bar on a terminal, else a line for each run."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from stormline.lab import run

    console = Console(stderr=True, highlight=False)
    asked = sum(key.requests for key in keys)
    minutes = run.seconds(keys, jobs) / 60
    if minutes >= 1:
        console.print(f"{len(keys)} runs, {jobs} side by side: about {minutes:.0f} min")
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} requests"),
        TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("preparing", total=asked)
        failed = 0

        def watch(event: "run.Progress") -> None:
            nonlocal failed
            name = f"{event.key.profile}, {event.key.client}, seed {event.key.seed}"
            if event.what == "ask":
                failed += not event.ok
                bar.update(task, advance=1, description=f"{event.key.profile} ({failed} failed)")
            elif event.what == "again":
                bar.update(task, total=(bar.tasks[0].total or 0) + event.key.requests)
                bar.console.print(f"once more: {name}: {event.text}")
            elif event.what == "result" and event.result is not None and not console.is_terminal:
                bar.console.print(f"{name}: {event.result.ok} of {event.result.requests}")

        yield watch


def _keep(found: "Sequence[Result]", folder: Path) -> None:
    """Write the figures and the page."""
    from stormline.bench import results as bench
    from stormline.lab import results

    document = bench.document("lab", _rows(found))
    document["runs"] = [results.data(result, whole=False) for result in found]
    bench.keep(document, folder)
    _write_page(found, folder / PAGE)


def _keep_verdicts(found: "Sequence[Outcome]", folder: Path) -> None:
    """Write how often verdicts were right and surely wrong, the matrix, and every run."""
    from stormline.bench import results as bench
    from stormline.lab import verdicts

    rows = []
    for name in dict.fromkeys(each.case.name for each in found):
        runs = [each for each in found if each.case.name == name]
        right_pct = 100.0 * sum(each.right for each in runs) / len(runs)
        wrong = sum(bool(each.wrong_high) for each in runs)
        rows.append(bench.row(f"verdict_{name}_right_pct", right_pct, "%", goal=100.0, better="higher"))
        rows.append(bench.row(f"verdict_{name}_surely_wrong", wrong, "runs", goal=0.0))
    wrong = sum(bool(each.wrong_high) for each in found)
    rows.append(bench.row("verdict_all_surely_wrong", wrong, "runs", goal=0.0))
    document = bench.document("verdicts", rows)
    document["matrix"] = verdicts.matrix(found)
    document["runs"] = [each.data() for each in found]
    bench.keep(document, folder)


def _keep_diagnoses(found: "Sequence[Diagnosed]", folder: Path) -> None:
    """Write how often diagnoses were right and surely wrong, how long they took, and what each said."""
    from stormline.bench import results as bench

    longest_s = max(each.said["took_s"] for each in found)
    right_pct = 100.0 * sum(each.right for each in found) / len(found)
    wrong = sum(each.surely_wrong for each in found)
    rows = [
        bench.row("diagnosis_right_pct", right_pct, "%", goal=100.0, better="higher"),
        bench.row("diagnosis_surely_wrong", wrong, "runs", goal=0.0),
        bench.row("diagnosis_longest_s", longest_s, "s", goal=DIAGNOSIS_GOAL_S),
    ]
    document = bench.document("lab_diagnosis", rows)
    document["runs"] = [each.data(whole=False) for each in found]
    bench.keep(document, folder)


def _keep_starts(found: "Sequence[Visit]", rows: "list[Row]", folder: Path) -> None:
    """Write the figures, and every start."""
    from stormline.bench import results as bench
    from stormline.lab import starts

    document = bench.document("lab_starts", rows)
    document["seeds"] = sorted({each.seed for each in found})
    document["fields"] = starts.FIELDS
    document["starts"] = [starts.line(each) for each in found]
    bench.keep(document, folder)


def _starts_rows(found: "Sequence[Visit]") -> "list[Row]":
    from stormline.bench import results as bench
    from stormline.lab import starts

    return [
        bench.row(
            each.name, each.value, each.unit, goal=each.goal, better=each.better,
            peer="" if each.without is None else "without learning", peer_value=each.without,
        )
        for each in starts.figures(found)
    ]  # fmt: skip


def _starts_table(found: "Sequence[Visit]") -> "Table":
    """Show what starts took until their first answer, by network and way."""
    from rich.table import Table

    from stormline.lab import starts

    table = Table("network", "way", box=None, pad_edge=False)
    for name in ("first visit s", "return s", "without s", "less %", "ok", "ok without"):
        table.add_column(name, justify="right")
    for each in starts.cells(found):
        times = (f"{value:.2f}" for value in (each.first_s, each.return_s, each.without_s))
        table.add_row(
            each.network,
            each.way,
            *times,
            f"{each.reduction_pct:.0f}",
            f"{each.ok}/{each.starts}",
            f"{each.without_ok}/{each.starts}",
        )
    return table


def _rows(found: "Sequence[Result]") -> list[Any]:
    """Give our success on each profile beside the best peer's."""
    from stormline.bench.results import row
    from stormline.lab import clients, report

    table = report.Table([result for result in found if not result.without])
    rows = []
    for profile in table.profiles:
        cells = {label: cell for label in table.labels if (cell := table.cell(profile, label)) is not None}
        ours = next((cell for label, cell in cells.items() if clients.CLIENTS[label].ours), None)
        peers = {label: cell.ok_pct for label, cell in cells.items() if not clients.CLIENTS[label].ours}
        if ours is None or not peers:
            continue
        best = max(peers, key=lambda label: peers[label])
        rows.append(
            row(f"{profile}_success_pct", ours.ok_pct, "%", goal=peers[best], better="higher", peer=best,
                peer_value=peers[best])
        )  # fmt: skip
    means = {label: mean[0] for label in table.labels if (mean := table.mean(label)) is not None}
    whole = next((label for label in means if clients.CLIENTS[label].ours), None)
    if whole is not None and len(means) > 1:
        best = max((label for label in means if label != whole), key=lambda label: means[label])
        rows.append(
            row("mean_success_pct", means[whole], "%", goal=MEAN_GOAL_PCT, better="higher", peer=best,
                peer_value=means[best])
        )  # fmt: skip
    return rows


def _write_page(found: "Sequence[Result]", path: Path) -> None:
    from stormline.bench import results as bench
    from stormline.lab import report

    machine = bench.document("lab", [])["machine"]
    when = datetime.datetime.fromtimestamp(_wall_s(), tz=datetime.UTC).date().isoformat()
    text = report.page(found, machine=machine, when=when)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise errors.PlatformError(f"lab: cannot write {path}: {error.strerror}") from error


def _wall_s() -> float:
    from stormline.net.clock import SystemClock

    return SystemClock().wall()


# -- showing ----------------------------------------------------------------------------------------------------------
def _details(found: "Sequence[Result]") -> "Table":
    from rich.markup import escape
    from rich.table import Table

    from stormline.lab import ablation

    table = Table(
        title="percent right within 10 s and 3 s; time to success; cost a request", title_justify="left", box=None,
        pad_edge=False,
    )  # fmt: skip
    table.add_column("profile", no_wrap=True)
    table.add_column("client", no_wrap=True)
    for column in ("seed", "10 s", "3 s", "p50", "p95", "p99", "conn.", "KB", "again"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("failures")
    for result in found:
        times = ["-" if value is None else f"{value:.2f}" for value in (result.p50_s, result.p95_s, result.p99_s)]
        failures = ", ".join(f"{kind} {count}" for kind, count in result.failures.items())
        table.add_row(
            escape(result.profile),
            escape(ablation.label(result)),
            str(result.seed),
            f"{100 * result.ok / result.requests:.1f}{'†' if result.distrust else ''}",
            f"{100 * result.ok_3s / result.requests:.1f}",
            *times,
            str(result.connections),
            f"{(result.bytes_up + result.bytes_down) / result.requests / 1000:.1f}",
            str(result.duplicates),
            escape(failures),
        )
    return table


def _confusion(found: "Sequence[Outcome]") -> "Table":
    """Give what was said by what was made."""
    from rich.table import Table

    from stormline.lab import verdicts

    table = Table(
        title="last verdict while the cause was there (?: low confidence); surely wrong for a moment",
        title_justify="left", box=None, pad_edge=False,
    )  # fmt: skip
    for column in ("made", "said", "wrong", "seen after"):
        table.add_column(column, no_wrap=column == "made")
    for name, said in verdicts.matrix(found).items():
        runs = [each for each in found if each.case.name == name]
        times = [each.first_right_s for each in runs if each.first_right_s is not None]
        table.add_row(
            name,
            ", ".join(f"{count} {label}" for label, count in sorted(said.items(), key=lambda each: -each[1])),
            str(sum(bool(each.wrong_high) for each in runs)),
            f"{sorted(times)[len(times) // 2]:.1f} s" if times else "-",
        )
    return table


def _diagnosed(found: "Sequence[Diagnosed]") -> "Table":
    """Give what was said by what was made."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("made", "seed", "said", "confidence", "s", "hint"):
        table.add_column(column)
    for each in found:
        mark = "" if each.right else " (surely wrong)" if each.surely_wrong else " (not right)"
        table.add_row(
            each.case.name,
            str(each.seed),
            each.verdict + mark,
            each.said["confidence"],
            f"{each.said['took_s']:.1f}",
            each.said["hint"],
        )
    return table


def _notes(found: "Sequence[Result]") -> None:
    """Say what a reader of the table must know."""
    for name in sorted({name for result in found for name in result.no_effect}):
        print(f"without {name}: no effect, this version of stormline does not have it")
    for result in found:
        if result.distrust:
            print(f"† {result.profile}, {result.client}, seed {result.seed} is not to be trusted: {result.distrust}")


def _matrix(found: "Sequence[Result]") -> "Table":
    """Give success by profile and client, within 10 s and (in brackets) within 3 s."""
    from rich.markup import escape
    from rich.table import Table

    from stormline.lab import report

    cells = report.Table(found)
    wide = output.console().width >= WIDE_COLUMNS
    table = Table(
        title=f"percent right within 10 s{' (3 s)' if wide else ''}, mean of the seeds", title_justify="left",
        box=None, pad_edge=False,
    )  # fmt: skip
    table.add_column("profile", no_wrap=True)
    for label in cells.labels:
        table.add_column(escape(label), justify="right", overflow="fold")
    for profile in cells.profiles:
        shown = []
        for label in cells.labels:
            cell = cells.cell(profile, label)
            mark = "†" if cell is not None and cell.distrust else ""
            shown.append("-" if cell is None else _share(cell.ok_pct, cell.ok_3s_pct, wide=wide) + mark)
        table.add_row(escape(profile), *shown)
    if len(cells.profiles) > 1:
        means = [cells.mean(label) for label in cells.labels]
        table.add_section()
        table.add_row("mean", *("-" if mean is None else _share(*mean, wide=wide) for mean in means))
    return table


def _share(ok_pct: float, ok_3s_pct: float, *, wide: bool) -> str:
    from stormline.lab.report import percent

    colour = "green" if ok_pct >= 99.5 else "yellow" if ok_pct >= 90 else "red"
    return f"[{colour}]{percent(ok_pct)}[/{colour}]" + (f" ({percent(ok_3s_pct)})" if wide else "")
