"""The state folder: what lies where, and how its small files are written and read.

STATE/                0700
├── lock              held by the running supervisor; its pid inside
├── stormline.toml    settings, where the operator wrote any
├── keys.json         0600, keys of the HTTP APIs; made at first start and kept
├── pki/              certificate authority, certificates and signing keys; made at first start and kept
├── relay-keys.json   public keys of the relay's gateway, of now and of the past
├── rules.json        what the settings say that dispatch answers; its version grows with each change
├── rules-held.json   0600, the rules dispatch served last, for when the engine is away
├── nats/             the embedded engine's store
├── apm/              the analytics store
├── logs/             one file per process
├── bundle.json       what a client needs, for `settings.discovery`; while the platform runs
├── admin.json        0600, addresses and keys for the commands of this machine; while the platform runs
└── run/              0700, resolved settings and one file per role that answers; while the platform runs
"""

import contextlib
import os
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from stormline.core import errors, limits, limits_platform
from stormline.core.values import Secret
from stormline.net.files import write_atomic
from stormline.settings.discovery import BUNDLE_NAME
from stormline.settings.model import Settings

T = TypeVar("T")

ERROR_PREFIX: Final = "error: "
"""How a role's last line begins when it says why it ends."""


class Layout(NamedTuple):
    """Paths in one state folder."""

    state: Path

    @property
    def lock(self) -> Path:
        """Held by the running supervisor."""
        return self.state / "lock"

    @property
    def keys(self) -> Path:
        """Keys of the HTTP APIs."""
        return self.state / "keys.json"

    @property
    def pki(self) -> Path:
        """Certificates and signing keys."""
        return self.state / "pki"

    @property
    def plan_key(self) -> Path:
        """Private key that signs dispatch answers."""
        return self.pki / "plan-key.pem"

    @property
    def token_key(self) -> Path:
        """Private key that signs device tokens."""
        return self.pki / "token-key.pem"

    @property
    def identity_key(self) -> Path:
        """Private key that signs the identities upstreams are told."""
        return self.pki / "identity-key.pem"

    @property
    def relay_key(self) -> Path:
        """Private keys of the relay's gateway."""
        return self.pki / "relay-key"

    @property
    def relay_keys(self) -> Path:
        """Its public keys, of now and of the past."""
        return self.state / "relay-keys.json"

    @property
    def ca(self) -> Path:
        """Certificate of the authority."""
        return self.pki / "ca.pem"

    def certificate(self, role: str) -> Path:
        """Give the certificate of a role."""
        return self.pki / f"{role}.pem"

    def certificate_key(self, role: str) -> Path:
        """Give the key of a role's certificate."""
        return self.pki / f"{role}-key.pem"

    @property
    def rules(self) -> Path:
        """What the settings say that dispatch answers."""
        return self.state / "rules.json"

    @property
    def rules_held(self) -> Path:
        """What dispatch served last."""
        return self.state / "rules-held.json"

    @property
    def nats(self) -> Path:
        """The embedded engine's folder."""
        return self.state / "nats"

    @property
    def apm(self) -> Path:
        """The analytics store's folder."""
        return self.state / "apm"

    @property
    def logs(self) -> Path:
        """One log per process."""
        return self.state / "logs"

    @property
    def bundle(self) -> Path:
        """The client bundle."""
        return self.state / BUNDLE_NAME

    @property
    def admin(self) -> Path:
        """Addresses and keys for commands."""
        return self.state / "admin.json"

    @property
    def run(self) -> Path:
        """Files that live as long as the platform runs."""
        return self.state / "run"

    @property
    def resolved(self) -> Path:
        """Settings as the supervisor resolved them, for the roles."""
        return self.run / "settings.json"

    def role(self, process: str) -> Path:
        """Give the run file of a role's process."""
        return self.run / f"{process}.json"

    def running(self) -> list[Path]:
        """Give the run files there are."""
        return sorted(path for path in self.run.glob("*.json") if path != self.resolved)

    def log(self, process: str) -> Path:
        """Give the log of a role's process."""
        return self.logs / f"{process}.log"


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor tells every role, in `run/settings.json`.

    Attributes:
        settings: all settings, with real ports and the engine's address and passwords.
        plan_keys: public keys that sign plans, base64url by key id.
        token_keys: public keys that sign device tokens, base64url by key id.
        console_key: key in the link that opens the console; drawn anew for each run of the platform.
    """

    settings: Settings
    plan_keys: dict[str, str]
    token_keys: dict[str, str]
    console_key: str

    def __repr__(self) -> str:
        """Show no key."""
        return f"Resolved(settings={self.settings!r}, plan_keys={sorted(self.plan_keys)})"


class RoleRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a role says of itself once it answers.

    Attributes:
        role: name of its process.
        pid: that process.
        addresses: where it listens, `ip:port` by what for.
    """

    role: str
    pid: int
    addresses: dict[str, str]


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the HTTP APIs, as bearer tokens.

    Attributes:
        admin: operators: dispatch's and APM's admin APIs, the console.
        business: business backends: the gateway's push and call API.
    """

    admin: str
    business: str

    def __repr__(self) -> str:
        """Never show them."""
        return "Keys(***)"


class Admin(msgspec.Struct, frozen=True, kw_only=True):
    """What the commands of this machine need to reach the running platform.

    Attributes:
        pid: the supervisor.
        app: application id.
        unit: this unit.
        addresses: `ip:port` by part.
        ca_file: PEM file of the platform's certificate authority.
        keys: keys of the HTTP APIs.
        console_link: opens the console, key and all; empty where none runs.
    """

    pid: int
    app: str
    unit: str
    addresses: dict[str, str]
    ca_file: str
    keys: Keys
    console_link: str = ""

    def __repr__(self) -> str:
        """Show no key."""
        return f"Admin(pid={self.pid}, app={self.app!r}, unit={self.unit!r}, addresses={self.addresses!r})"

    @property
    def admin_key(self) -> Secret:
        """Key of the operators' APIs."""
        return Secret(self.keys.admin)

    @property
    def business_key(self) -> Secret:
        """Key of the business API."""
        return Secret(self.keys.business)


def make_folder(path: Path) -> None:
    """Make a folder for its owner alone; one that is there stays as it is.

    Raises:
        PlatformError: it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise errors.PlatformError(f"state folder: cannot make {path}: {error.strerror}") from error


def write(path: Path, value: object, *, mode: int = 0o600) -> None:
    """Write a small JSON file in one step: a reader sees the old one or the new one, never half of one.

    Raises:
        PlatformError: it cannot be written.
    """
    data = value if isinstance(value, bytes) else msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    try:
        write_atomic(path, data, mode=mode)
    except OSError as error:
        raise errors.PlatformError(f"state folder: cannot write {path}: {error.strerror}") from error


def read(path: Path, kind: type[T]) -> T | None:
    """Read a file that `write` made; None where there is none.

    Raises:
        PlatformError: it cannot be read or is not what it should be.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limits_platform.PLATFORM_FILE_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise errors.PlatformError(f"state folder: cannot read {path}: {error.strerror}") from error
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise errors.PlatformError(f"state folder: {path} is damaged: {error}") from error


def remove(*paths: Path) -> None:
    """Remove files; those that are not there do not matter."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def last_words(log: Path, since: int) -> str:
    """Give the line of a log that most likely says why its process ended; empty where it says nothing.

    Args:
        log: the file.
        since: where in it the process began to write, in bytes.
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since if since <= size else 0, size - limits_platform.LOG_TAIL_BYTES_MAX))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
    return (said or lines or [""])[-1][: limits.REASON_CHARS_MAX]
