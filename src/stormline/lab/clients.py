"""The clients under test, and the Python that can run each: they are plug-ins, a file of `drivers/` and a line here."""

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stormline.core import errors

PEERS_VARIABLE: Final = "STORMLINE_LAB_PEERS"
"""Names the environment (folder) that the peers are installed in."""
PEERS_FOLDER: Final = ".venv-peers"

DRIVERS: Final = Path(__file__).with_name("drivers")
HARNESS: Final = DRIVERS / "_harness.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """One client under test."""

    name: str
    about: str
    packages: tuple[str, ...]
    """Modules its driver imports."""
    ours: bool = False
    """True where it is stormline: it runs in our own environment, and means can be left out."""
    standard: bool = True
    """True where it belongs to the standard set."""

    @property
    def driver(self) -> Path:
        """Its file."""
        return DRIVERS / f"{self.name}.py"


CLIENTS: Final[Mapping[str, Client]] = {
    client.name: client
    for client in (
        Client(name="stormline", about="stormline under httpx2", packages=("httpx2",), ours=True),
        Client(
            name="stormline_cell",
            about="stormline told that the network is cellular: bytes cost money",
            packages=("httpx2",),
            ours=True,
            standard=False,
        ),
        Client(name="httpx2", about="httpx2, defaults: 5 s a phase, no retry", packages=("httpx2",)),
        Client(
            name="httpx_tenacity",
            about="httpx with tenacity: 3 attempts of 3.3 s",
            packages=("httpx", "tenacity"),
        ),
        Client(
            name="aiohttp_retry", about="aiohttp: 3 attempts, 3 s connect, 4 s silence", packages=("aiohttp",)
        ),
        Client(
            name="niquests",
            about="niquests: happy eyeballs, 3 attempts, 3 s connect, 4 s read",
            packages=("niquests",),
        ),
        Client(name="pycurl", about="libcurl multi, HTTP/2, no retry, no limits", packages=("pycurl",)),
        Client(
            name="httpx_h2",
            about="httpx with HTTP/2: 5 s a phase, no retry",
            packages=("httpx", "h2"),
        ),
        Client(
            name="pycurl_retry",
            about="libcurl, HTTP/2: 3 attempts, 3 s connect, 4 s silence, fresh connection",
            packages=("pycurl",),
        ),
    )
}  # fmt: skip


def get(name: str) -> Client:
    """Give a client by its name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    client = CLIENTS.get(name)
    if client is None:
        raise errors.ConfigError(f"client {name!r}: expected one of {', '.join(CLIENTS)}")
    return client


def peers_python(environ: Mapping[str, str]) -> Path | None:
    """Give the Python of the peers' environment: `STORMLINE_LAB_PEERS`, else `.venv-peers` beside our own environment.

    Returns:
        None where neither is there.
    """
    named = environ.get(PEERS_VARIABLE)
    folder = Path(named).expanduser() if named else Path(sys.prefix).parent / PEERS_FOLDER
    python = folder / "bin" / "python"
    return python if python.is_file() else None


def python_for(client: Client, environ: Mapping[str, str]) -> Path:
    """Give the Python that runs a client: our own for stormline; for peers theirs, else ours where it has the packages.

    Raises:
        ConfigError: none has its packages.
    """
    own = Path(sys.executable)
    if client.ours:
        return own
    peers = peers_python(environ)
    if peers is not None:
        return peers
    missing = [package for package in client.packages if importlib.util.find_spec(package) is None]
    if missing:
        raise errors.ConfigError(
            f"client {client.name}: needs {missing[0]} in an environment of the peers' own: run 'make peers', "
            f"or name one with {PEERS_VARIABLE}"
        )
    return own
