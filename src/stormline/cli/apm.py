"""`stormline apm`: success and speed, as clients saw them."""

import base64
import datetime
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from stormline.cli import output

if TYPE_CHECKING:
    from rich.table import Table

    from stormline.cli.admin import AdminApi

WATCH_PAUSE_S = 2.0
"""Between two looks of `--watch`: as often as a person reads."""

group = typer.Typer(help="Success and speed, as clients saw them.", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(group, name="apm", rich_help_panel="Platform")


@group.callback()
def _group() -> None:
    """Success and speed, as clients saw them."""


@group.command("top")
def top(
    window: Annotated[int, typer.Option("--window", metavar="S", min=1, help="Seconds to look back.")] = 300,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every two seconds, until Ctrl-C.")] = False,
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Show success rate and times by host, busiest first.

    With --json and --watch: one JSON object per look.
    """
    from stormline.cli import admin

    platform = admin.running(admin.place(output.environ(), state))
    with admin.AdminApi(platform, "apm", platform.admin_key) as api:
        if watch and not json and sys.stdout.isatty():  # elsewhere there is no picture to replace: one after the other
            _watch(api, window)
            return
        while True:
            answer = _ask(api, window)
            if json:
                output.print_json(answer)
            else:
                output.console().print(_table(answer))
            if not watch:
                return
            time.sleep(WATCH_PAUSE_S)


@group.command("feedback")
def feedback(
    feedback_id: Annotated[str, typer.Argument(metavar="[ID]", help="One, with its log; none: a list.")] = "",
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="FILE", help="Private key of a sealed log.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the log there, for `netlog show --dir`.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="As many at most, the newest.")] = 50,
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Show what users said, the newest first; or one of them, with the calls that had failed.

    With --json and an ID: its log as base64.
    """
    from stormline.cli import admin, netlog

    platform = admin.running(admin.place(output.environ(), state))
    with admin.AdminApi(platform, "apm", platform.admin_key) as api:
        if not feedback_id:
            found = api.call("GET", "/v1/feedback", query={"limit": limit})
            if json:
                output.print_json(found)
            else:
                for each in found["feedback"]:
                    print(output.harmless(_said(each)))
            return
        one = api.call("GET", f"/v1/feedback/{quote(feedback_id, safe='')}")
    log = base64.b64decode(one["log"])
    if out is not None:
        out.expanduser().write_bytes(log)
    if json:
        output.print_json(one)
        return
    print(output.harmless(_said(one)))
    netlog.show_file(log, key)


def _said(entry: dict[str, Any]) -> str:
    at = datetime.datetime.fromtimestamp(entry["received_at_ms"] / 1000, datetime.UTC).isoformat(" ", "seconds")[:-6]
    user = f", user {entry['user']}" if entry["user"] else ""
    about = f"{entry['app']}, device {entry['device']}{user}, {entry['client']} on {entry['platform']}"
    return f"{at} {entry['id']} ({about}; log {entry['log_bytes']} bytes)\n  {entry['text']}"


@group.command("diagnoses")
def diagnoses(
    window: Annotated[int, typer.Option("--window", metavar="S", min=1, help="Seconds to look back.")] = 86_400,
    host: Annotated[str, typer.Option("--host", metavar="NAME", help="Only about this host.")] = "",
    verdict: Annotated[str, typer.Option("--verdict", metavar="NAME", help="Only with this verdict.")] = "",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="So many of the latest.")] = 20,
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Show what devices found out about failures: how many of each verdict, and the latest.

    With --json: all that they found too.
    """
    from stormline.cli import admin

    platform = admin.running(admin.place(output.environ(), state))
    query: dict[str, str | int | float] = {"window_s": window, "host": host, "verdict": verdict, "limit": limit}
    with admin.AdminApi(platform, "apm", platform.admin_key) as api:
        answer = api.call("GET", "/v1/diagnoses", query=query)
    if json:
        output.print_json(answer)
        return
    console = output.console()
    for each in answer["verdicts"]:
        console.print(f"{each['verdict']}: {each['times']} times, {each['devices']} devices")
    console.print(_latest(answer["diagnoses"]))


def _latest(found: list[dict[str, Any]]) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("at", "device", "host", "network", "verdict", "confidence", "why"):
        table.add_column(column)
    for each in found:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(each["received_at_ms"] / 1000))
        words = [each[name] for name in ("device", "host", "network", "verdict", "confidence", "why")]
        table.add_row(at, *map(escape, words))
    return table


def _ask(api: "AdminApi", window: int) -> dict[str, Any]:
    answer: dict[str, Any] = api.call("GET", "/v1/top", query={"window_s": window})
    return answer


def _watch(api: "AdminApi", window: int) -> None:
    from rich.live import Live

    with Live(_table(_ask(api, window)), console=output.console(), auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_PAUSE_S)
            live.update(_table(_ask(api, window)), refresh=True)


def _table(answer: dict[str, Any]) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"last {answer['window_s']} s", title_justify="left", box=None, pad_edge=False)
    table.add_column("host")
    for column in ("calls", "success", "network", "http", "parse", "p50 ms", "p95 ms", "p99 ms"):
        table.add_column(column, justify="right")
    table.add_column("failures")
    for row in (*answer["hosts"], {"host": "all", **answer["total"]}):
        shares = [_percent(row[name]) for name in ("success_pct", "network_pct", "http_pct", "parse_pct")]
        times = [_number(row[name]) for name in ("p50_ms", "p95_ms", "p99_ms")]
        failures = ", ".join(f"{kind} {count}" for kind, count in row["failures"].items())
        table.add_row(escape(row["host"]), str(row["calls"]), *shares, *times, escape(failures))
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
