"""`stormline dispatch`: the rules clients are commanded by, changed while the platform runs."""

import datetime
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stormline.cli import output
from stormline.core import errors
from stormline.core import limits_platform as limits

if TYPE_CHECKING:
    from stormline.cli.admin import AdminApi

group = typer.Typer(help="Rules that clients are commanded by: change, roll out, go back, drain.", no_args_is_help=True)
rollout = typer.Typer(help="Give new rules to a share of the devices first.", no_args_is_help=True)
group.add_typer(rollout, name="rollout")

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A rule set as JSON; - for standard input.")]
WhyOption = Annotated[
    str, typer.Option("--why", "-m", metavar="TEXT", help="Why, kept with the change.", show_default=False)
]
WhoOption = Annotated[
    str, typer.Option("--who", metavar="NAME", help="Who, kept with the change; else your login.", show_default=False)
]
DryRunFlag = Annotated[bool, typer.Option("--dry-run", help="Check everything and show what would change.")]
ForceFlag = Annotated[bool, typer.Option("--force", help="Also where a host has no live endpoint, or no app is left.")]
OverFlag = Annotated[
    bool, typer.Option("--over", help="Also where the rules were changed since the file was taken from them.")
]
EndpointArgument = Annotated[
    str, typer.Argument(metavar="HOST[:PORT]", help="An endpoint as the rules name it; without a port all of its host.")
]


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(group, name="dispatch", rich_help_panel="Platform")


@group.callback()
def _group() -> None:
    """Rules that clients are commanded by: change, roll out, go back, drain."""


# -- looking ----------------------------------------------------------------------------------------------------------
@group.command("status")
def status(state: output.StateOption = None, json: output.JsonFlag = False) -> None:
    """Show which rules are served, and whether newer ones may exist."""
    with _api(state) as api:
        answer = api.call("GET", "/v1/admin/status")
    if json:
        output.print_json(answer)
        return
    print(f"version {answer['version']}, {answer['hosts']} hosts, {answer['apps']} apps")
    if answer["stale"]:
        why = f": {answer['problem']}" if answer["problem"] else ""
        print(f"stale, newer rules may exist{why}")
    if rejects := answer.get("rejects"):
        print(f"refused since the start: {', '.join(f'{count} {why}' for why, count in sorted(rejects.items()))}")
    _print_rollout(answer["rollout"])
    for each in answer["drains"]:
        print(f"drained: {each}")


@group.command("health")
def health(state: output.StateOption = None, json: output.JsonFlag = False) -> None:
    """Show what the probes think of each endpoint, the ill ones first."""
    with _api(state) as api:
        answer = api.call("GET", "/v1/admin/health")
    if json:
        output.print_json(answer)
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("address", "carrier", "name", "verdict", "for", "why"):
        table.add_column(column)
    for each in sorted(answer["targets"], key=lambda each: (each["streak"] >= 0, each["address"])):
        verdict = f"{each['verdict']}, drained" if each["drained"] else each["verdict"]
        duration = str(datetime.timedelta(seconds=round(each["since_s"])))
        cells = (each["address"], each["carrier"], each["server_name"], verdict, duration, each["reason"])
        table.add_row(*map(escape, cells))
    output.console().print(table)
    if answer["unprobed"]:
        print(f"{answer['unprobed']} more are not probed, and handed out")


@group.command("show")
def show(
    version: Annotated[
        int | None, typer.Option("--version", metavar="N", help="An earlier version; else the one that holds.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write it there, to be changed and set.")
    ] = None,
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Show the rules, in the form `set` takes."""
    import msgspec

    from stormline.assembly import layout

    with _api(state) as api:
        rules = api.call("GET", "/v1/admin/rules", query=_given(version=version))
    data = msgspec.json.format(msgspec.json.encode(rules), indent=2) + b"\n"
    if out is not None:
        layout.write(out.expanduser(), data, mode=0o644)
    if json:
        output.print_json({"file": str(out), "version": rules["version"]} if out is not None else rules)
    elif out is not None:
        print(f"wrote version {rules['version']} to {out}; change it, then: stormline dispatch set {out}")
    else:
        print(data.decode(), end="")


@group.command("diff")
def diff(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A rule set to hold against the one that holds.")
    ] = None,
    old: Annotated[int | None, typer.Option("--old", metavar="N", help="A version; else the one that holds.")] = None,
    new: Annotated[int | None, typer.Option("--new", metavar="N", help="A version; else the one that holds.")] = None,
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Show what a file would change, or what differs between two versions."""
    if file is None and old is None and new is None:
        raise errors.ConfigError("dispatch diff: name a file, or versions with --old and --new")
    if file is not None and (old is not None or new is not None):
        raise errors.ConfigError("dispatch diff: a file is held against the rules that hold; no --old and --new then")
    with _api(state) as api:
        if file is not None:
            answer = api.call("POST", "/v1/admin/rules/diff", content=_read(file))
        else:
            answer = api.call("GET", "/v1/admin/rules/diff", query=_given(old=old, new=new))
    if json:
        output.print_json(answer)
    elif answer["count"]:
        _print_differences(answer)
    else:
        print("no difference")


@group.command("history")
def history(
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=limits.RULES_LOG_MAX)] = 20,
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Show who changed what, when and why, newest first."""
    with _api(state) as api:
        answer = api.call("GET", "/v1/admin/rules/history", query={"limit": limit})
    if json:
        output.print_json(answer)
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("when (UTC)", "who", "what", "version", "detail", "why"):
        table.add_column(column)
    for each in answer["log"]:
        cells = (_when(each["at"]), each["who"], each["what"], str(each["version"]), each["detail"], each["why"])
        table.add_row(*map(escape, cells))
    output.console().print(table)
    kept = ", ".join(str(each["version"]) for each in answer["versions"])
    print(f"version {answer['version']} holds; kept: {kept}")


# -- changing ---------------------------------------------------------------------------------------------------------
@group.command("set")
def set_rules(
    file: FileArgument,
    why: WhyOption = "",
    who: WhoOption = "",
    dry_run: DryRunFlag = False,
    force: ForceFlag = False,
    over: OverFlag = False,
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Check a rule set and give it to everybody.

    The version in the file says which rules it was made from: where they were changed since, it is refused.
    """
    query = {"who": _who(who), "why": why, "dry_run": _flag(dry_run), "force": _flag(force)}
    data = _read(file)
    with _api(state) as api:
        answer = api.call("PUT", "/v1/admin/rules", content=data, query=query, headers=_if_match(data, file, over))
    _print_change(answer, json=json)


@group.command("rollback")
def rollback(
    version: Annotated[
        int | None, typer.Argument(metavar="[VERSION]", help="The version to go back to; else the one before.")
    ] = None,
    why: WhyOption = "",
    who: WhoOption = "",
    dry_run: DryRunFlag = False,
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Give everybody what an earlier version says, under a new version."""
    body = {"who": _who(who), "why": why, "dry_run": dry_run, **_given(version=version)}
    with _api(state) as api:
        answer = api.call("POST", "/v1/admin/rules/rollback", body=body)
    _print_change(answer, json=json)


@group.command("drain")
def drain(
    endpoint: EndpointArgument,
    why: WhyOption = "",
    who: WhoOption = "",
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Take an endpoint out of service; new plans name it only where nothing else could serve."""
    _drain(endpoint, "/v1/admin/drains", why, who, state, json=json)


@group.command("undrain")
def undrain(
    endpoint: EndpointArgument,
    why: WhyOption = "",
    who: WhoOption = "",
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Take an endpoint back into service."""
    _drain(endpoint, "/v1/admin/drains/end", why, who, state, json=json)


@rollout.command("start")
def start(
    file: FileArgument,
    steps: Annotated[str, typer.Option("--steps", metavar="P,P,...", help="Shares of the devices, in percent.")],
    why: WhyOption = "",
    who: WhoOption = "",
    dry_run: DryRunFlag = False,
    force: ForceFlag = False,
    over: OverFlag = False,
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Check a rule set and give it to the first share of the devices."""
    query = {"who": _who(who), "why": why, "dry_run": _flag(dry_run), "force": _flag(force), "steps": steps}
    data = _read(file)
    with _api(state) as api:
        answer = api.call("POST", "/v1/admin/rollout", content=data, query=query, headers=_if_match(data, file, over))
    _print_change(answer, json=json)


@rollout.command("show")
def rollout_show(state: output.StateOption = None, json: output.JsonFlag = False) -> None:
    """Show the roll-out under way."""
    with _api(state) as api:
        answer = api.call("GET", "/v1/admin/rollout")
    if json:
        output.print_json(answer)
    elif answer["rollout"] is None:
        print("no roll-out is open")
    else:
        _print_rollout(answer["rollout"])


@rollout.command("step")
def rollout_step(
    percent: Annotated[
        float | None, typer.Argument(metavar="[PERCENT]", help="The share; else the next of its steps.")
    ] = None,
    why: WhyOption = "",
    who: WhoOption = "",
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Give the new rules to more devices; at 100 percent they hold for all."""
    body = {"who": _who(who), "why": why, **_given(percent=percent)}
    with _api(state) as api:
        answer = api.call("POST", "/v1/admin/rollout/step", body=body)
    _print_state(answer, json=json)


@rollout.command("halt")
def rollout_halt(
    why: WhyOption = "", who: WhoOption = "", state: output.StateOption = None, json: output.JsonFlag = False
) -> None:
    """End the roll-out and give everybody what held before, under a new version."""
    with _api(state) as api:
        answer = api.call("POST", "/v1/admin/rollout/halt", body={"who": _who(who), "why": why})
    _print_state(answer, json=json)


# -- inside -----------------------------------------------------------------------------------------------------------
def _api(state: Path | None) -> "AdminApi":
    from stormline.cli import admin

    platform = admin.running(admin.place(output.environ(), state))
    return admin.AdminApi(platform, "dispatch", platform.admin_key, timeout_s=limits.DISPATCH_ADMIN_TIMEOUT_S)


def _drain(endpoint: str, path: str, why: str, who: str, state: Path | None, *, json: bool) -> None:
    from stormline.core.values import parse_address

    try:
        host, port = parse_address(endpoint)
    except errors.ConfigError:
        host, port = endpoint.strip("[]"), 0  # without a port; dispatch judges the host
    with _api(state) as api:
        answer = api.call("POST", path, body={"who": _who(who), "why": why, "host": host, "port": port})
    _print_state(answer, json=json)


def _read(file: Path) -> bytes:
    most = limits.RULES_BYTES_MAX
    if str(file) == "-":
        data = sys.stdin.buffer.read(most + 1)
    else:
        with file.expanduser().open("rb") as opened:
            data = opened.read(most + 1)
    if len(data) > most:
        raise errors.ConfigError(f"{file}: a rule set has at most {most} bytes")
    return data


def _if_match(data: bytes, file: Path, over: bool) -> dict[str, str]:
    """Say which version the file was made from: it stands in it."""
    import msgspec

    if over:
        return {"if-match": "*"}
    try:
        version = msgspec.json.decode(data)["version"]
        return {"if-match": f'"{int(version)}"'}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise errors.ConfigError(f"{file}: not JSON: {error}") from error
    except (KeyError, TypeError, ValueError):
        raise errors.ConfigError(f"{file}: not a rule set: it says no version") from None


def _who(given: str) -> str:
    environ = output.environ()
    name = given or environ.get("SUDO_USER") or environ.get("USER") or environ.get("LOGNAME") or f"uid {os.getuid()}"
    return name[: limits.RULES_WHO_CHARS_MAX]


def _given(**options: float | None) -> dict[str, float]:
    return {name: value for name, value in options.items() if value is not None}


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _when(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def _print_change(answer: dict[str, Any], *, json: bool) -> None:
    if json:
        output.print_json(answer)
        return
    _print_differences(answer)
    for name in answer["dead"]:
        print(f"no endpoint answers: {name}")
    if answer["dry_run"]:
        print(f"nothing was written; version {answer['version']} holds")
        return
    _print_state(answer, json=False)
    if not answer["served"]:
        print("this centre does not serve it yet: stormline dispatch status")


def _print_state(answer: dict[str, Any], *, json: bool) -> None:
    if json:
        output.print_json(answer)
        return
    print(f"version {answer['version']} holds")
    _print_rollout(answer["rollout"])
    for each in answer["drains"]:
        print(f"drained: {each}")


def _print_rollout(found: dict[str, Any] | None) -> None:
    if found is None:
        return
    steps = ", ".join(f"{each:g}" for each in found["steps"])
    print(f"version {found['version']} goes to {found['percent']:g} % of the devices (steps {steps})")
    for arm, label in (("new", "with it"), ("old", "without")):
        counts = found[arm]
        if counts["calls"]:
            print(f"  {label}: {counts['calls']} calls, {100 * counts['successes'] / counts['calls']:.2f} % succeeded")


def _print_differences(answer: dict[str, Any]) -> None:
    for each in answer["differences"]:
        if each["before"] is not None:
            print(f"- {each['path']}: {each['before']}")
        if each["after"] is not None:
            print(f"+ {each['path']}: {each['after']}")
    more = answer["count"] - len(answer["differences"])
    if more:
        print(f"and {more} more differences")
