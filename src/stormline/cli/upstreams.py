"""`stormline upstreams`: where the API gate sends requests."""

from pathlib import Path
from typing import Annotated, Any

import typer

from stormline.cli import output
from stormline.core import errors

_File = Annotated[Path, typer.Argument(metavar="FILE", help="The record, as 'show --out FILE' wrote it.")]
_Over = Annotated[bool, typer.Option("--over", help="Write over what somebody else changed since.")]
_Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write it there, to be changed and set.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Where HTTP requests of devices go, by host and path.", no_args_is_help=True)
    group.command("show")(show)
    group.command("set")(replace)
    group.command("health")(health)
    app.add_typer(group, name="upstreams", rich_help_panel="Platform")


def show(out: _Out = None, state: output.StateOption = None, json: output.JsonFlag = False) -> None:
    """Show the unit's record of upstreams, in the form `set` takes."""
    import msgspec

    found = _call(state, "GET", "/v1/upstreams")
    data = msgspec.json.format(msgspec.json.encode(found), indent=2)
    if out is not None:
        out.expanduser().write_bytes(data + b"\n")
    if json:
        output.print_json(found)
    elif out is None:
        print(data.decode())
    else:
        print(f"wrote revision {found.get('revision', 0)} to {out}; change it, then: stormline upstreams set {out}")


def replace(
    file: _File,
    over: _Over = False,
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Check a record and give it to every gateway of the unit, while they run."""
    import msgspec

    data = file.read_bytes()
    try:
        record = msgspec.json.decode(data)
        revision = int(record.get("revision", 0))
    except (ValueError, TypeError, AttributeError) as error:
        raise errors.ConfigError(f"{file}: not a record of upstreams: {error}") from None
    done = _call(state, "PUT", "/v1/upstreams", content=data, headers={"if-match": "*" if over else f'"{revision}"'})
    if json:
        output.print_json(done)
    else:
        print(f"revision {done['revision']} holds")


def health(state: output.StateOption = None, json: output.JsonFlag = False) -> None:
    """Show what a gateway thinks of each endpoint; others may think otherwise."""
    from rich.table import Table

    found = _call(state, "GET", "/v1/upstreams/health")
    if json:
        output.print_json(found)
        return
    table = Table("upstream", "host", "path", "endpoint", "weight", "circuit")
    for each in found["upstreams"]:
        for endpoint in each["endpoints"]:
            row = (endpoint["origin"], str(endpoint["weight"]), endpoint["circuit"])
            table.add_row(each["name"], each["host"], each["path"], *row)
    output.console().print(table)


def _call(state: Path | None, method: str, path: str, **options: Any) -> Any:
    from stormline.cli import admin

    running = admin.running(admin.place(output.environ(), state))
    with admin.AdminApi(running, "admin", running.admin_key) as api:
        return api.call(method, path, **options)
