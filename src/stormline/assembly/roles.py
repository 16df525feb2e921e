"""The processes a platform is made of."""

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from stormline.core import errors
from stormline.settings.model import Settings


class Role(NamedTuple):
    """One process.

    Attributes:
        name: as in `--only`.
        ports: the parts it listens for, as in the settings; the first is the one people ask for.
        needs_engine: whether it needs NATS; dispatch uses it where it is there.
        extra: what to install for it.
        packages: what must be importable for it to run.
        module: what its process runs. The demo lies above this room, which may not import it but may start it.
        worker: which of several processes of this role, from 1.
    """

    name: str
    ports: tuple[str, ...]
    needs_engine: bool
    extra: str
    packages: tuple[str, ...]
    module: str = "stormline.assembly.role"
    worker: int = 1

    @property
    def process(self) -> str:
        """Name of its process, as in the names of its files."""
        return process_name(self.name, self.worker)

    def command(self, state: Path) -> list[str]:
        """Give the command line of its process."""
        more = ["--worker", str(self.worker)] if self.worker > 1 else []
        return [sys.executable, "-m", self.module, self.name, "--state", str(state), *more]


def process_name(role: str, worker: int) -> str:
    """Name one of a role's processes: the first by the role alone."""
    return role if worker == 1 else f"{role}-{worker}"


_SERVER = ("uvicorn", "uvloop", "starlette")
_STORE = ("chdb", "clickhouse_connect", "pyarrow")

ROLES: Final = {
    role.name: role
    for role in (
        Role("dispatch", ("dispatch",), False, "server", (*_SERVER, "fastapi")),
        Role("gateway", ("gateway", "admin"), True, "server", (*_SERVER, "nats", "fastapi")),
        Role("apm", ("apm",), False, "apm", (*_SERVER, *_STORE)),
        Role("relay", ("relay",), False, "server", _SERVER),
        Role("console", ("console",), False, "console", _SERVER),
        Role("shop", ("shop",), True, "server", (*_SERVER, "nats"), "stormline.demo.role"),
    )
}
"""Every role, in the order of the table that `up` prints."""

DEMO: Final = frozenset({"shop"})


def choose(only: Sequence[str], *, demo: bool) -> list[Role]:
    """Settle which roles run.

    Args:
        only: names from the command line; empty for all.
        demo: whether the demo's parts run too, where `only` does not say.

    Raises:
        ConfigError: a name is not a role.
    """
    for name in only:
        if name not in ROLES:
            raise errors.ConfigError(f"unknown role {name!r}: expected one of {', '.join(ROLES)}")
    if only:
        return [role for role in ROLES.values() if role.name in only]
    return [role for role in ROLES.values() if demo or role.name not in DEMO]


def spread(roles: Iterable[Role], settings: Settings) -> list[Role]:
    """Give a role for each process: the gateway has as many as the settings say."""
    counts = {"gateway": settings.gateway.workers}
    return [role._replace(worker=1 + each) for role in roles for each in range(counts.get(role.name, 1))]


def check_installed(roles: Iterable[Role]) -> None:
    """Make sure that what the roles import is installed.

    Raises:
        PlatformError: something is not; the message says what to install.
    """
    for role in roles:
        for package in role.packages:
            if importlib.util.find_spec(package) is None:
                raise errors.PlatformError(
                    f"{role.name}: the package {package!r} is missing: install stormline[{role.extra}]"
                )
