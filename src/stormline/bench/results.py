"""What a bench gives: rows of our figure beside a peer's from the same run, printed and kept."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec

from stormline.core import errors


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure.

    Attributes:
        name: stable over versions.
        ours: our figure.
        unit: of both figures; `us` is CPU time of the measured process per operation.
        goal: what we want to reach, as a number in `unit`.
        better: which way is better.
        peer: what we compare with.
        peer_value: its figure, from the same run; None where there is no peer.
        ok: the goal is reached.
    """

    name: str
    ours: float
    unit: str
    goal: float
    better: Literal["lower", "higher"]
    peer: str = ""
    peer_value: float | None = None
    ok: bool


def row(
    name: str, ours: float, unit: str, *, goal: float, better: Literal["lower", "higher"] = "lower",
    peer: str = "", peer_value: float | None = None,
) -> Row:  # fmt: skip
    """Make a row and judge it."""
    reached = ours <= goal if better == "lower" else ours >= goal
    return Row(
        name=name, ours=round(ours, 3), unit=unit, goal=round(goal, 3), better=better, peer=peer,
        peer_value=None if peer_value is None else round(peer_value, 3), ok=reached,
    )  # fmt: skip


def document(bench: str, rows: list[Row]) -> dict[str, Any]:
    """Give the whole result, with where it was measured."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    python = sys.version.split()[0]
    machine = f"{platform.machine()}, {cores} cores, {platform.system()} {platform.release()}, Python {python}"
    return {
        "bench": bench,
        "commit": _commit(),
        "machine": machine,
        "rows": [msgspec.to_builtins(each) for each in rows],
    }


def keep(result: dict[str, Any], folder: Path) -> Path:
    """Write a result into `folder`; gives the file.

    Raises:
        PlatformError: it cannot be written.
    """
    path = folder / f"{result['bench']}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
    except OSError as error:
        raise errors.PlatformError(f"bench: cannot write {path}: {error.strerror}") from error
    return path


def _commit() -> str:
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--dirty"],  # noqa: S607
            capture_output=True, text=True, check=False, cwd=Path(__file__).parent, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return asked.stdout.strip() or "unknown"
