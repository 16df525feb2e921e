"""What every command shares: its options, how it prints, how it finds the running platform."""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        help="State folder; else STORMLINE_STATE, else the user's own.",
        show_default=False,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Settings file; else STORMLINE_CONFIG, else stormline.toml in the state folder.",
        show_default=False,
    ),
]


PIPE_COLUMNS = 200
"""Width of a table where there is no terminal: addresses and paths must not be cut for the program behind the pipe."""


def console() -> "Console":
    """Give a console for people, on standard output."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def print_json(value: Any) -> None:
    """Print one JSON value on one line, at once."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def harmless(text: str) -> str:
    """Give a text that came from elsewhere without what a terminal would obey."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def nobody_reads() -> None:
    """Send what is still printed to nowhere: the program behind the pipe has ended (`stormline up | head`)."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def environ() -> dict[str, str]:
    """Give the process environment; the rooms below take it as an argument."""
    return dict(os.environ)


@contextlib.contextmanager
def ended_cleanly() -> "Iterator[None]":
    """Take the networks down on SIGTERM too, as on Ctrl-C."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
