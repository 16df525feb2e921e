"""`stormline netlog`: read what a client's network log holds, and make one file of it that a person can send."""

import datetime
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stormline.cli import output
from stormline.core import errors

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    from stormline.telemetry.netlog import Entry, Reading, Record

DirOption = Annotated[
    Path | None,
    typer.Option(
        "--dir", metavar="DIR", help="Folder of the log, or a file of it; else that of the client commands.",
        show_default=False,
    ),
]  # fmt: skip
KeyOption = Annotated[
    Path | None,
    typer.Option("--key", metavar="FILE", help="Private key of a sealed log.", show_default=False),
]  # fmt: skip

group = typer.Typer(help="The network log of a client.", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(group, name="netlog", rich_help_panel="Client")


@group.callback()
def _group() -> None:
    """The network log of a client."""


@group.command("show")
def show(
    folder: DirOption = None,
    key: KeyOption = None,
    since: Annotated[
        float | None, typer.Option("--since", metavar="S", min=0, help="Only the last S seconds.", show_default=False)
    ] = None,
    failures: Annotated[bool, typer.Option("--failures", help="Only calls that failed, and what was found.")] = False,
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Show calls that failed, counts of the others, and lines of the app's own log, the oldest first.

    With --json: one JSON object per record, and one at the end that says what could not be read.
    """
    show_reading(_read(_place(folder, state), key), since=since, failures=failures, json=json)


def show_file(data: bytes, key: Path | None) -> None:
    """Print a log that is one file."""
    from stormline.telemetry import netlog

    show_reading(netlog.read([data], read_key(key)), since=None, failures=False, json=False)


def show_reading(reading: "Reading", *, since: float | None, failures: bool, json: bool) -> None:
    """Print what was read."""
    from stormline.net.clock import SystemClock
    from stormline.telemetry import netlog

    earliest_ms = 0.0 if since is None else (SystemClock().wall() - since) * 1000
    kinds = (netlog.Failure, netlog.Finding) if failures else ()
    for entry in reading.entries:
        if entry.record.at_ms < earliest_ms or (kinds and not isinstance(entry.record, kinds)):
            continue
        if json:
            output.print_json({"instance": entry.instance, "number": entry.number, **netlog.shown(entry.record)})
        else:
            for line in lines(entry):
                print(output.harmless(line))
    unread = {
        "lost": reading.lost,
        "damaged_bytes": reading.damaged_bytes,
        "malformed": reading.malformed,
        "sealed": reading.sealed,
    }
    if json:
        output.print_json({"type": "unread", **unread, "keys": sorted(reading.keys)})
        return
    if reading.sealed:
        print(f"sealed: {reading.sealed} records, to the key {', '.join(sorted(reading.keys))}: give it with --key")
    if said := [f"{count} {name.replace('_', ' ')}" for name, count in unread.items() if count and name != "sealed"]:
        print(f"not read: {', '.join(said)}")


def lines(entry: "Entry") -> list[str]:
    """Give a record as people read it: one line, and what belongs to it indented."""
    from stormline.telemetry.netlog import Failure, Finding

    record = entry.record
    at = datetime.datetime.fromtimestamp(record.at_ms / 1000, datetime.UTC).isoformat(" ", "milliseconds")[:-6]
    first, *rest = _words(record)
    more: list[str] = []
    if isinstance(record, Failure):
        more += [f"  {milliseconds:9.1f} ms  {line}" for milliseconds, line in record.story]
        more += [f"  {'caused by' if index else 'error'}: {cause}" for index, cause in enumerate(record.causes)]
        more.append(f"  network: {_network(record)}")
    elif isinstance(record, Finding):
        from stormline.telemetry import netlog

        more.append(f"  {netlog.shown(record)['content']}")
    return [f"{at} {first}", *(f"  {line}" for line in rest), *more]


def _words(record: "Record") -> list[str]:
    from stormline.telemetry import netlog

    match record:
        case netlog.Began():
            return [f"began: {record.client} on {record.platform}, process {record.pid}"]
        case netlog.Failure(call=call):
            where = f"{call.method} {call.host}{call.path}"
            stages = ", ".join(f"{stage} {spent:.0f}" for stage, spent in call.stages_ms.items())
            status = f", status {call.status}" if call.status else ""
            return [f"FAILED {where}: {call.failure or 'parse'}{status}, {call.total_ms:.0f} ms ({stages})"]
        case netlog.Summary():
            lost = f", {record.lost} records lost" if record.lost else ""
            mean = record.total_ms / record.calls if record.calls else 0.0
            return [
                f"{record.calls} calls succeeded, {mean:.0f} ms on average, {record.slowest_ms:.0f} ms at most{lost}"
            ]
        case netlog.Line():
            first, *rest = record.text.splitlines() or [""]
            return [f"{record.name or record.level} {record.logger}: {first}", *rest, *record.trace.splitlines()]
        case netlog.Finding():
            return [f"diagnosis of {record.call_id or 'no call'}"]


def _network(record: Any) -> str:
    network = record.network
    parts = [network.kind, network.condition, network.why, f"level {network.level}" if network.level else ""]
    return ", ".join(filter(None, parts)) or "unknown"


@group.command("export")
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to.")],
    folder: DirOption = None,
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Write the whole log as one file, that `netlog show --dir FILE` reads. What is sealed stays so."""
    from stormline.net.files import write_atomic
    from stormline.telemetry import netlog

    reading = netlog.Reading()
    parts: list[bytes] = []
    for data in _files(_place(folder, state)):
        of: bytes | None = None
        for block in netlog.blocks(data, reading):
            if block.header.data != of:
                of = block.header.data
                parts.append(of)
            parts.append(block.data)
    written = b"".join(parts)
    write_atomic(file.expanduser(), written, mode=0o600)
    if json:
        output.print_json({"file": str(file), "bytes": len(written), "damaged_bytes": reading.damaged_bytes})
    else:
        print(f"{len(written)} bytes in {file}; readable by you alone")


@group.command("key")
def key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where the private key goes; it must not be there.")],
    json: output.JsonFlag = False,
) -> None:
    """Make a key that logs are sealed to, and print its public half for `Config.network_log_key`.

    The private half stays with whoever reads logs, never with the app.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    from stormline.telemetry import netlog
    from stormline.wire import jws

    private = X25519PrivateKey.generate()
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    descriptor = os.open(file.expanduser(), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as out:
        out.write(pem)
    public = private.public_key().public_bytes_raw()
    if json:
        output.print_json({"file": str(file), "key": jws.b64url(public), "key_id": netlog.key_id(public).hex()})
    else:
        print(jws.b64url(public))


def read_key(path: Path | None) -> "X25519PrivateKey | None":
    """Read a private key; None for none.

    Raises:
        ConfigError: the file holds none.
    """
    if path is None:
        return None
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    try:
        found = serialization.load_pem_private_key(path.expanduser().read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise errors.ConfigError(f"{path}: not a private key") from error
    if not isinstance(found, X25519PrivateKey):
        raise errors.ConfigError(f"{path}: expected an X25519 key, as `stormline netlog key` makes it")
    return found


def _place(folder: Path | None, state: Path | None) -> Path:
    if folder is not None:
        return folder.expanduser()
    from stormline.client.netlog import FOLDER
    from stormline.settings import load

    return load.state_folder(output.environ(), state) / "client" / FOLDER


def _files(place: Path) -> list[bytes]:
    from stormline.net.logfile import read_folder

    if place.is_file():
        return [place.read_bytes()]
    return read_folder(place)


def _read(place: Path, key: Path | None) -> "Reading":
    from stormline.telemetry import netlog

    return netlog.read(_files(place), read_key(key))
