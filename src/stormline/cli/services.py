"""`stormline services`: which business services answer, in which version, how often."""

from typing import TYPE_CHECKING

import typer

from stormline.cli import output
from stormline.core import errors

if TYPE_CHECKING:
    from stormline.assembly.services import ServiceProcess


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Platform")(services)


def services(state: output.StateOption = None, json: output.JsonFlag = False) -> None:
    """List the business services that answer now: name, version, processes, methods, and how many calls they took."""
    import asyncio
    import dataclasses

    from stormline.assembly import layout, prepare
    from stormline.assembly import services as finding
    from stormline.cli import admin

    where = admin.place(output.environ(), state)
    admin.running(where)
    resolved = layout.read(where.resolved, layout.Resolved)
    if resolved is None:
        raise errors.PlatformError("services: the platform's engine is known to who runs it alone; ask on its machine")
    found = asyncio.run(finding.discover(prepare.core_engine(resolved.settings)))
    if json:
        output.print_json([dataclasses.asdict(process) for process in found])
        return
    if not found:
        print("no business service answers")
        return
    _show(found)


def _show(found: "list[ServiceProcess]") -> None:
    from rich.table import Table

    table = Table("service", "version", "processes", "calls", "methods", box=None)
    for name, version in sorted({(process.name, process.version) for process in found}):
        processes = [process for process in found if (process.name, process.version) == (name, version)]
        methods = sorted({method for process in processes for method in process.methods})
        table.add_row(
            output.harmless(name),
            output.harmless(version),
            str(len(processes)),
            str(sum(process.requests for process in processes)),
            output.harmless(" ".join(methods)),
        )
    output.console().print(table)
