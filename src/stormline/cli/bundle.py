"""`stormline bundle` and `stormline token`: what an app ships, and who a device is."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from stormline.cli import output

if TYPE_CHECKING:
    from stormline.assembly.layout import Admin
    from stormline.wire.bundle import Bundle

DeviceOption = Annotated[str, typer.Option("--device", metavar="ID", help="Device the token is for.")]
UserOption = Annotated[str, typer.Option("--user", metavar="ID", help="User logged in on the device.")]

group = typer.Typer(help="Make and read client bundles.", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(group, name="bundle", rich_help_panel="Platform")
    app.command("token", rich_help_panel="Platform")(token)


@group.command("export")
def export(
    device: DeviceOption = "",
    user: UserOption = "",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write it there; else to standard output.")
    ] = None,
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Write the bundle of the running platform: the one file a client needs.

    With --device it also holds a token of that device, and is then as secret as the token.
    """
    from stormline.assembly import layout
    from stormline.cli import admin
    from stormline.core import errors
    from stormline.settings import discovery
    from stormline.wire import bundle as wire_bundle

    where = admin.place(output.environ(), state)
    platform = admin.running(where)
    bundle = discovery.read_bundle(where.bundle)
    if user and not device:
        raise errors.ConfigError("--user needs --device: a token is for a device")
    if device:
        bundle = msgspec.structs.replace(bundle, token=mint(platform, device, user)["token"])
    data = wire_bundle.encode(bundle)
    if out is None:
        if json:
            output.print_json(msgspec.to_builtins(bundle))
        else:
            print(data.decode(), end="")
        return
    layout.write(out.expanduser(), data, mode=0o600 if device else 0o644)
    if json:
        output.print_json({"file": str(out), "app": bundle.app, "device": device})
    else:
        print(f"wrote {out}; clients use it with STORMLINE_BUNDLE={out}")


@group.command("show")
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The bundle.")], json: output.JsonFlag = False
) -> None:
    """Show what a bundle holds; never the token itself."""
    from stormline.settings import discovery

    bundle = discovery.read_bundle(file.expanduser())
    shown = _summary(bundle)
    if json:
        output.print_json(shown)
        return
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name, value in shown.items():
        table.add_row(name, ", ".join(value) if isinstance(value, list) else str(value))
    output.console().print(table)


def token(
    device: Annotated[str, typer.Option("--device", metavar="ID", help="Device the token is for.")],
    user: UserOption = "",
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Mint a device token: who a session belongs to, signed by the platform."""
    from stormline.cli import admin

    minted = mint(admin.running(admin.place(output.environ(), state)), device, user)
    if json:
        output.print_json(minted)
    else:
        print(minted["token"])


def mint(platform: "Admin", device: str, user: str) -> dict[str, object]:
    """Have dispatch mint a device token; the answer has `token` and what else dispatch tells of it."""
    from stormline.cli import admin

    with admin.AdminApi(platform, "dispatch", platform.admin_key) as api:
        answer: dict[str, object] = api.call(
            "POST", "/v1/admin/tokens", body={"app": platform.app, "device": device, "user": user}
        )
    return answer


def _summary(bundle: "Bundle") -> dict[str, object]:
    from stormline.core.values import Address

    return {
        "app": bundle.app,
        "dispatch": list(bundle.dispatch),
        "dispatch_name": bundle.dispatch_name,
        "dispatch_keys": sorted(bundle.dispatch_keys),
        "preload": list(bundle.preload),
        "relays": [f"{Address(each.host, each.port)} for {', '.join(each.hosts)}" for each in bundle.relays],
        "ca": "its own" if bundle.ca_pem else "system trust store",
        "token": "present" if bundle.token else "none",
    }
