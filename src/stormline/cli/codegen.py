"""`stormline codegen`: a typed client from an OpenAPI document."""

from pathlib import Path
from typing import Annotated

import typer

from stormline.cli import output


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("codegen", rich_help_panel="Development")(codegen)


def codegen(
    document: Annotated[Path, typer.Argument(metavar="FILE", help="The OpenAPI document, 3.0 or 3.1, as JSON.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="PATH", help="The module to write, or the folder to write it to.")
    ] = Path(),
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Name of the module in a folder; else from the title.")
    ] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit code 1 where the file is not what would be written.")
    ] = False,
    json: output.JsonFlag = False,
) -> int:
    """Write a typed Python client of an HTTP API: msgspec models, asynchronous and synchronous methods.

    Nothing outside the document is read. The same document gives the same text.
    """
    from stormline.codegen import generate
    from stormline.core import errors
    from stormline.core import limits_codegen as limits
    from stormline.net.files import write_atomic

    with document.expanduser().open("rb") as source:
        made = generate.generate(source.read(limits.CODEGEN_DOCUMENT_BYTES_MAX + 1), name=name)
    place = out.expanduser()
    if place.suffix == ".py":
        if name:
            raise errors.ConfigError("--name is for a folder; --out names the module already")
    else:
        place = place / f"{made.name}.py"
    data = made.code.encode()
    fresh = place.is_file() and place.read_bytes() == data
    if not check and not fresh:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, data, mode=0o644)
    if json:
        output.print_json(
            {"file": str(place), "operations": made.operations, "models": made.models, "fresh": fresh or not check}
        )
    elif check:
        print(f"{place}: {'as it should be' if fresh else 'not what the document gives'}")
    else:
        print(f"{'kept' if fresh else 'wrote'} {place}: {made.operations} operations, {made.models} models")
    return 1 if check and not fresh else 0
