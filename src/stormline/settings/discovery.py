"""How a client command finds a platform without being told: its bundle.

`STORMLINE_BUNDLE` wins, then the bundle a running platform left in the state folder. With neither, the client works
stand-alone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from stormline.core import errors, limits
from stormline.settings.load import state_folder
from stormline.wire import bundle as wire_bundle

BUNDLE_NAME: Final = "bundle.json"


class Found(NamedTuple):
    """A bundle and the file it came from."""

    bundle: wire_bundle.Bundle
    file: Path


def find_bundle(environ: Mapping[str, str], *, state: Path | None = None) -> Found | None:
    """Find the platform to talk to.

    Args:
        environ: the process environment.
        state: state folder from the command line.

    Returns:
        The bundle named by `STORMLINE_BUNDLE`, else the one in the state folder, else None: stand-alone.

    Raises:
        BundleError: `STORMLINE_BUNDLE` names a file that is missing, or the bundle found is not usable.
    """
    if named := environ.get("STORMLINE_BUNDLE"):
        path = Path(named).expanduser()
        return Found(read_bundle(path, what="STORMLINE_BUNDLE"), path)
    try:
        folder = state_folder(environ, state)
    except errors.ConfigError:
        return None  # no home folder, so no platform of this user either
    path = folder / BUNDLE_NAME
    data = _read(path, f"bundle {path}")
    return None if data is None else Found(wire_bundle.decode(data, where=f"bundle {path}"), path)


def read_bundle(path: Path, *, what: str = "bundle") -> wire_bundle.Bundle:
    """Read a bundle file.

    Raises:
        BundleError: there is none, it cannot be read, or it is not a bundle; the message names `what` and the path.
    """
    where = f"{what} {path}"
    data = _read(path, where)
    if data is None:
        raise errors.BundleError(f"{where}: no such file")
    return wire_bundle.decode(data, where=where)


def _read(path: Path, where: str) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(limits.BUNDLE_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise errors.BundleError(f"{where}: cannot be read: {error.strerror}") from error
