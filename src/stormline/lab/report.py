"""One self-contained HTML page of a set of runs: no script, nothing loaded, for light and dark."""

import html
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from stormline.core import errors
from stormline.lab import ablation, charts, clients, profiles, results, workload
from stormline.lab.results import Result

COLOURS: Final = 8
"""Clients that have a colour of their own; more share them."""
STYLE: Final = Path(__file__).with_name("report.css")


class Cell:
    """The runs of one client on one profile, over the seeds."""

    def __init__(self, runs: Sequence[Result]) -> None:
        self.runs = runs
        self.requests = sum(run.requests for run in runs)
        self.ok_pct = 100 * sum(run.ok for run in runs) / self.requests
        self.ok_3s_pct = 100 * sum(run.ok_3s for run in runs) / self.requests
        self.times_s = sorted(outcome.took_s for run in runs for outcome in run.outcomes if not outcome.kind)
        self.p50_s = results.percentile(self.times_s, 0.5)
        self.p95_s = results.percentile(self.times_s, 0.95)
        self.p99_s = results.percentile(self.times_s, 0.99)
        self.connections = sum(run.connections for run in runs) / len(runs)
        self.kilobytes = sum(run.bytes_up + run.bytes_down for run in runs) / self.requests / 1000
        self.resent_pct = 100 * sum(run.duplicates for run in runs) / self.requests
        self.distrust = [f"seed {run.seed}: {run.distrust}" for run in runs if run.distrust]

    def examples(self) -> str:
        """Give the words that failures came with, of the first run that has any."""
        told = next((run.examples for run in self.runs if run.examples), {})
        return "; ".join(f"{kind}: {words}" for kind, words in told.items())

    def failures(self) -> str:
        """Say what failed, most frequent first."""
        kinds: dict[str, int] = {}
        for run in self.runs:
            for kind, count in run.failures.items():
                kinds[kind] = kinds.get(kind, 0) + count
        return ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items(), key=lambda item: -item[1]))


class Table:
    """Results by profile and client."""

    def __init__(self, found: Sequence[Result]) -> None:
        there = {result.profile for result in found}
        known = [name for name in profiles.PROFILES if name in there]
        self.profiles = known + sorted(there - set(known))
        labels = dict.fromkeys(ablation.label(result) for result in found)
        order = {name: place for place, name in enumerate(clients.CLIENTS)}
        self.labels = sorted(labels, key=lambda label: (order.get(label.partition(" ")[0], len(order)), label))
        runs: dict[tuple[str, str], list[Result]] = {}
        for result in found:
            runs.setdefault((result.profile, ablation.label(result)), []).append(result)
        self._cells = {where: Cell(those) for where, those in runs.items()}

    def cell(self, profile: str, label: str) -> Cell | None:
        """Give a cell, None where there was no such run."""
        return self._cells.get((profile, label))

    def colour(self, label: str) -> str:
        """Give the class of a client's colour."""
        return f"c{self.labels.index(label) % COLOURS}"

    def mean(self, label: str) -> tuple[float, float] | None:
        """Give the mean success over the profiles within both patiences; None where a profile is missing."""
        cells = [self.cell(profile, label) for profile in self.profiles]
        there = [cell for cell in cells if cell is not None]
        if len(there) < len(cells) or not there:
            return None
        return sum(cell.ok_pct for cell in there) / len(there), sum(cell.ok_3s_pct for cell in there) / len(there)


def percent(value: float) -> str:
    """Show a percentage: 100 only where nothing failed."""
    return "100" if value == 100 else f"{min(value, 99.9):.1f}"


def seconds(value: float | None) -> str:
    """Show a time."""
    return "-" if value is None else f"{value:.2f}"


def page(found: Sequence[Result], *, machine: str, when: str) -> str:
    """Make the page.

    Args:
        found: the results.
        machine: where they were measured.
        when: when.

    Raises:
        ConfigError: there are none.
    """
    if not found:
        raise errors.ConfigError("lab: no results to report; run 'stormline lab' first")
    table = Table(found)
    parts = [
        _head(found, machine, when),
        _legend(table),
        _success(table),
        _times(table),
        _cost(table),
        _ablation(found),
        _timelines(found, table),
        _failures(table),
        _trust(found),
    ]
    style = STYLE.read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>stormline laboratory</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>\n{style}</style></head>\n<body><main>\n"
        + "\n".join(filter(None, parts))
        + "\n</main></body></html>\n"
    )


def _head(found: Sequence[Result], machine: str, when: str) -> str:
    seeds = sorted({result.seed for result in found})
    durations = sorted({result.duration_s for result in found})
    asked = sum(result.requests for result in found)
    facts = [
        f"{len(found)} runs, {asked} requests",
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}",
        f"{' and '.join(f'{duration:g}' for duration in durations)} s each",
        machine,
        when,
    ]
    told = " · ".join(html.escape(fact) for fact in facts)
    return (
        f'<header><h1>How clients fare on bad networks</h1><p class="facts">{told}</p>'
        f"<p>Every client was asked the same at the same moments. A success is status 200 and the right bytes within "
        f"{workload.PATIENCE_S:g} s of the moment it was due; the small figure counts those within "
        f"{workload.IMPATIENCE_S:g} s, as an impatient user does. Real kernels, emulated links.</p></header>"
    )


def _about(profile: str) -> str:
    known = profiles.PROFILES.get(profile)
    return known.about if known is not None else ""


def _name(profile: str) -> str:
    return f'<th scope="row" title="{html.escape(_about(profile))}">{html.escape(profile)}</th>'


def _legend(table: Table) -> str:
    entries = []
    for label in table.labels:
        client = clients.CLIENTS.get(label.partition(" ")[0])
        about = f' <span class="about">{html.escape(client.about)}</span>' if client is not None else ""
        entries.append(f'<li><i class="{table.colour(label)}"></i><b>{html.escape(label)}</b>{about}</li>')
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _header(table: Table) -> str:
    heads = "".join(
        f'<th scope="col" class="{table.colour(label)}">{html.escape(label)}</th>' for label in table.labels
    )
    return f'<thead><tr><th scope="col">profile</th>{heads}</tr></thead>'


def _shade(loss_pct: float) -> str:
    """Give the style of a heat cell: pale for a lost request, strong where half are lost."""
    strength = 0 if loss_pct <= 0 else 10 + 60 * min(1.0, loss_pct / 50) ** 0.6
    return f' style="--heat:{strength:.0f}%"'


def _heat(ok_pct: float, ok_3s_pct: float, hint: str, mark: str = "") -> str:
    return (
        f'<td class="heat"{_shade(100 - ok_pct)} title="{html.escape(hint)}"><b>{percent(ok_pct)}</b>{mark}'
        f"<small>{percent(ok_3s_pct)}</small></td>"
    )


def _success(table: Table) -> str:
    rows = []
    for profile in table.profiles:
        cells = []
        for label in table.labels:
            cell = table.cell(profile, label)
            if cell is None:
                cells.append('<td class="none">-</td>')
                continue
            hint = f"{label} on {profile}: {cell.failures() or 'nothing failed'}"
            cells.append(_heat(cell.ok_pct, cell.ok_3s_pct, hint, "†" if cell.distrust else ""))
        rows.append(f"<tr>{_name(profile)}{''.join(cells)}</tr>")
    if len(table.profiles) > 1:
        cells = []
        for label in table.labels:
            mean = table.mean(label)
            cells.append('<td class="none">-</td>' if mean is None else _heat(*mean, f"{label}, mean of the profiles"))
        rows.append(f'<tr class="mean"><th scope="row">mean</th>{"".join(cells)}</tr>')
    return (
        "<section><h2>Success</h2><p>Percent of the requests, within 10 s and (small) within 3 s. Point at a cell to "
        f"see what failed.</p>{_even(_table(table, rows))}</section>"
    )


def _times(table: Table) -> str:
    figures = []
    for profile in table.profiles:
        curves = []
        for label in table.labels:
            cell = table.cell(profile, label)
            if cell is not None:
                curves.append(charts.Curve(label, table.colour(label), cell.times_s, cell.requests))
        name = html.escape(profile)
        figures.append(
            f"<figure><figcaption>{name}</figcaption>{charts.cdf(curves, f'{name}: time to success')}</figure>"
        )
    return (
        "<section><h2>Time to success</h2><p>Percent of all requests that had succeeded after a time (logarithmic). A "
        f'line that ends below the top leaves requests unanswered.</p><div class="grid-of">{"".join(figures)}</div>'
        f"</section>{_percentiles(table)}"
    )


def _percentiles(table: Table) -> str:
    def show(cell: Cell) -> str:
        return f"<b>{seconds(cell.p50_s)}</b><small>{seconds(cell.p95_s)} · {seconds(cell.p99_s)}</small>"

    return _folded(table, "The same as figures: p50, p95 and p99 in seconds, of the successes", show)


def _cost(table: Table) -> str:
    def show(cell: Cell) -> str:
        resent = f"<small>{cell.resent_pct:.0f} % again</small>" if cell.resent_pct >= 0.5 else ""
        return f"<b>{cell.kilobytes:.1f} KB</b><small>{cell.connections:.0f} conn.</small>{resent}"

    return (
        "<section><h2>What it cost</h2><p>Bytes on the device's links for each request asked, both ways, headers and "
        "retransmissions included; connections that the servers accepted in a run; requests that came to a server "
        f"again.</p>{_even(_plain(table, show))}</section>"
    )


def _table(table: Table, rows: Sequence[str]) -> str:
    return f"<table>{_header(table)}<tbody>{''.join(rows)}</tbody></table>"


def _even(inside: str) -> str:
    return f'<div class="wide even">{inside}</div>'


def _plain(table: Table, show: Callable[[Cell], str]) -> str:
    rows = []
    for profile in table.profiles:
        cells = []
        for label in table.labels:
            cell = table.cell(profile, label)
            cells.append('<td class="none">-</td>' if cell is None else f"<td>{show(cell)}</td>")
        rows.append(f"<tr>{_name(profile)}{''.join(cells)}</tr>")
    return _table(table, rows)


def _folded(table: Table, summary: str, show: Callable[[Cell], str]) -> str:
    return f"<details><summary>{summary}</summary>{_even(_plain(table, show))}</details>"


def _ablation(found: Sequence[Result]) -> str:
    worths = ablation.compare(found)
    if not worths:
        return ""
    rows = []
    for worth in worths:
        ratio = "-" if worth.bytes_ratio is None else f"{worth.bytes_ratio:.2f}"
        p95 = "-" if worth.p95_s is None else f"{worth.p95_s:+.2f} s"
        note = "not in this version: chance alone" if worth.no_effect else ""
        rows.append(
            f'<tr><th scope="row">{html.escape(worth.profile)}</th><td>{html.escape(", ".join(worth.without))}</td>'
            f"<td>{worth.success_points:+.1f}</td><td>{worth.success_3s_points:+.1f}</td><td>{p95}</td><td>{ratio}</td>"
            f"<td>{worth.pairs}</td><td>{note}</td></tr>"
        )
    return (
        "<section><h2>What each means is worth</h2><p>The whole client against itself without some means, same seeds: "
        "points of success gained within 10 s and 3 s, p95 saved, bytes with to bytes without.</p>"
        '<div class="wide"><table><thead><tr><th>profile</th><th>means</th><th>10 s</th><th>3 s</th><th>p95</th>'
        f"<th>bytes</th><th>pairs</th><th></th></tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _timelines(found: Sequence[Result], table: Table) -> str:
    drawn = []
    widest = max(table.profiles, key=lambda profile: _tellable(found, profile))
    for profile in table.profiles:
        seed = min(result.seed for result in found if result.profile == profile)
        runs = {ablation.label(r): r for r in found if r.profile == profile and r.seed == seed}
        lanes = [
            charts.Lane(label, table.colour(label), runs[label].outcomes) for label in table.labels if label in runs
        ]
        first = next(iter(runs.values()))
        drawing = charts.timeline(lanes, first.events, first.duration_s, workload.PATIENCE_S)
        told = f'{html.escape(profile)} <span class="about">{html.escape(_about(profile))} Seed {seed}.</span>'
        drawn.append(
            f"<details{' open' if profile == widest else ''}><summary>{told}</summary>"
            f'<div class="wide">{drawing}</div></details>'
        )
    return (
        "<section><h2>Timelines</h2><p>One run of each profile. A dot is a request at the moment it was due, as high "
        "as it took (square root); a cross is one that failed. Bands are faults. Point at one to read it.</p>"
        f"{''.join(drawn)}</section>"
    )


def _tellable(found: Iterable[Result], profile: str) -> tuple[bool, float]:
    """Rank profiles by how much their timeline tells: faults that come and go, and what they cost."""
    runs = [result for result in found if result.profile == profile]
    passing = any(1.0 < event.until_s - event.at_s < run.duration_s / 2 for run in runs for event in run.events)
    return passing, sum(run.requests - run.ok for run in runs) / len(runs)


def _failures(table: Table) -> str:
    rows = []
    for profile in table.profiles:
        for label in table.labels:
            cell = table.cell(profile, label)
            if cell is not None and cell.failures():
                rows.append(
                    f'<tr><th scope="row">{html.escape(profile)}</th><td>{html.escape(label)}</td>'
                    f'<td class="left">{html.escape(cell.failures())}<small>{html.escape(cell.examples())}</small></td>'
                    "</tr>"
                )
    if not rows:
        return ""
    head = "<thead><tr><th>profile</th><th>client</th><th>failures by kind</th></tr></thead>"
    return (
        f"<section><h2>What failed</h2><details><summary>{len(rows)} of the cells above</summary>"
        f'<div class="wide"><table>{head}<tbody>{"".join(rows)}</tbody></table></div></details></section>'
    )


def _trust(found: Sequence[Result]) -> str:
    doubtful = [result for result in found if result.distrust]
    late = max(result.shaper_p99_ms for result in found)
    wait = max(result.wait_p99_ms for result in found)
    told = (
        f"Packets left the shaper at most {late:.1f} ms late (p99 of the worst run); a client waited for a core "
        f"at most {wait:.1f} ms (p99 of the worst run)."
    )
    if not doubtful:
        return f"<section><h2>Trust</h2><p>{told} No run was in doubt.</p></section>"
    items = "".join(
        f"<li>{html.escape(f'{r.profile}, {ablation.label(r)}, seed {r.seed}: {r.distrust}')}</li>" for r in doubtful
    )
    why = f"Not to be trusted (†), each already repeated once:</p><ul>{items}</ul>"
    return f"<section><h2>Trust</h2><p>{told} {why}</section>"
