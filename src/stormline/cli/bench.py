"""`stormline bench`: what things cost, beside a peer, in the same run."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stormline.cli import output
from stormline.core import errors

if TYPE_CHECKING:
    from stormline.bench.results import Row


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench", rich_help_panel="Measurement")(bench)


def _benches() -> dict[str, Callable[[], "list[Row]"]]:
    from stormline.bench import appgw, appgw_api, client, dispatch, engine, gateway, heartbeat, herd, netlog, relay
    from stormline.cli import levels

    return {
        "appgw": lambda: [*appgw.run(), *appgw_api.run()],
        "client": client.run,
        "dispatch": dispatch.run,
        "engine": engine.run,
        "gateway": gateway.run,
        "heartbeat": heartbeat.run,
        "herd": herd.run,
        "levels": levels.run,
        "netlog": netlog.run,
        "relay": relay.run,
    }


def bench(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="appgw, client, dispatch, engine, gateway, heartbeat, herd, levels, netlog or relay; 'all' runs all.",
        ),
    ] = "all",
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for NAME.json.")] = Path("bench/results"),
    json: output.JsonFlag = False,
) -> None:
    """Measure and write the results; CPU time per operation, ratios to a peer count more than absolute values."""
    from rich.table import Table

    from stormline.bench import results

    benches = _benches()
    if name != "all" and name not in benches:
        raise errors.ConfigError(f"bench {name!r}: expected one of {', '.join(benches)}, all")
    for each in benches if name == "all" else [name]:
        result = results.document(each, benches[each]())
        path = results.keep(result, out)
        if json:
            output.print_json(result)
            continue
        table = Table("figure", "ours", "goal", "peer", "ok", title=f"{each}, {result['machine']}, kept in {path}")
        for row in result["rows"]:
            peer = f"{row['peer_value']:.1f} {row['peer']}" if row["peer"] else ""
            table.add_row(
                row["name"],
                f"{row['ours']:.1f} {row['unit']}",
                f"{row['goal']:.1f}",
                peer,
                "yes" if row["ok"] else "no",
            )
        output.console().print(table)
