"""Capacity traces for the laboratory: recorded ones read from a folder, synthetic ones always."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from stormline.core import errors, limits_lab
from stormline.lab.chance import SeededRng
from stormline.netmodel.synthetic import SHAPES, make_trace
from stormline.netmodel.trace import Trace

_SYNTHETIC_S: Final = 600.0
_SYNTHETIC: Final = {shape.name: shape for shape in SHAPES}
_ROOT: Final = Path(__file__).parents[3]
RECORDED_FOLDER: Final = _ROOT.parent / "shared" / "traces"
"""Where recordings are looked for: beside the project, never in it. They need not be there."""
FOLDER_VARIABLE: Final = "STORMLINE_TRACES"
_SUFFIXES: Final = frozenset({".up", ".down"})


def folder() -> Path:
    """Give the folder that the environment names (`STORMLINE_TRACES`), else `RECORDED_FOLDER`."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else RECORDED_FOLDER


def recorded(folder: Path = RECORDED_FOLDER) -> list[str]:
    """List the names of the recordings in a folder (`<name>.up`, `<name>.down`); empty where there is none."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())


def synthetic() -> list[str]:
    """List the names of the traces that are made, `lte-like.up` and so on: one for each direction."""
    return sorted(f"{name}{suffix}" for name in _SYNTHETIC for suffix in _SUFFIXES)


def load(name: str, folder: Path = RECORDED_FOLDER) -> Trace:
    """Read the recording of that name, or make the synthetic trace.

    Raises:
        ConfigError: no such trace, or its file is no trace; the message names it.
    """
    stem, _, direction = name.rpartition(".")
    if stem in _SYNTHETIC and f".{direction}" in _SUFFIXES:
        made = make_trace(_SYNTHETIC[stem], SeededRng(name, 1), _SYNTHETIC_S)
        made.name = name
        return made
    path = folder / name
    if name != path.name or path.suffix not in _SUFFIXES or not path.is_file():
        known = ", ".join([*recorded(folder), *synthetic()])
        raise errors.ConfigError(f"no trace named {name!r} in {folder}; there are {known}")
    if path.stat().st_size > limits_lab.TRACE_FILE_BYTES_MAX:
        raise errors.ConfigError(f"trace {path}: larger than {limits_lab.TRACE_FILE_BYTES_MAX} bytes")
    try:
        return Trace.parse(path.read_text(encoding="ascii", errors="replace"), name=name)
    except OSError as error:
        raise errors.ConfigError(f"trace {path}: cannot be read: {error.strerror}") from error


def load_all(names: Iterable[str], folder: Path = RECORDED_FOLDER) -> dict[str, Trace]:
    """Load several traces by name.

    Raises:
        ConfigError: one of them cannot be had.
    """
    return {name: load(name, folder) for name in names}
