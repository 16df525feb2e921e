"""Who is online, calls of devices, and the keys of businesses: what a business's backend and its operators ask."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from stormline.cli import output
from stormline.core import errors

if TYPE_CHECKING:
    from stormline.cli.admin import AdminApi

_NAMES = "device, user, node, state, network, version, tags, since / seen"


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.command("presence", rich_help_panel="Business")(presence)
    app.command("call-device", rich_help_panel="Business")(call_device)
    keys = typer.Typer(help="Keys of businesses for the business API.", no_args_is_help=True)
    keys.command("make")(make_key)
    keys.command("list")(list_keys)
    keys.command("revoke")(revoke_key)
    app.add_typer(keys, name="apikey", rich_help_panel="Business")


def _api(state: "output.StateOption") -> tuple["AdminApi", str]:
    from stormline.cli import admin

    platform = admin.running(admin.place(output.environ(), state))
    return admin.AdminApi(platform, "admin", platform.business_key), platform.app


def presence(
    device: Annotated[
        str,
        typer.Argument(metavar="[DEVICE]", help="One device; without it those that are online.", show_default=False),
    ] = "",
    user: Annotated[str, typer.Option("--user", metavar="ID", help="The devices of this user.")] = "",
    counts: Annotated[bool, typer.Option("--counts", help="Numbers by unit, version and network.")] = False,
    tag: Annotated[str, typer.Option("--tag", metavar="WORD", help="List devices with this tag.")] = "",
    version: Annotated[str, typer.Option("--version", metavar="V", help="List devices with this app version.")] = "",
    network: Annotated[str, typer.Option("--network", metavar="KIND", help="List devices on wifi, cell, wired.")] = "",
    node: Annotated[str, typer.Option("--node", metavar="NAME", help="List devices of this node.")] = "",
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="Devices listed at most.")] = 100,
    cursor: Annotated[str, typer.Option("--cursor", metavar="TEXT", help="Where the page before ended.")] = "",
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Say who is online: one device, a user's devices, a list, or numbers."""
    if sum((bool(device), bool(user), counts)) > 1:
        raise errors.ConfigError("expected one of DEVICE, --user and --counts")
    api, app = _api(state)
    with api:
        if counts:
            answer = api.call("GET", "/v1/presence/counts", query={"app": app})
        elif device:
            answer = api.call("GET", f"/v1/presence/devices/{quote(device, safe='')}", query={"app": app})
        elif user:
            answer = api.call("GET", f"/v1/presence/users/{quote(user, safe='')}", query={"app": app})
        else:
            wanted = {"tag": tag, "version": version, "network": network, "node": node, "cursor": cursor}
            answer = api.call("GET", "/v1/presence", query={"app": app, "limit": limit, **wanted})
    if json:
        output.print_json(answer)
    elif counts:
        _show_counts(answer)
    else:
        _show_devices([answer] if device else answer["devices"])
        if answer.get("cursor"):
            print(f"more: --cursor {answer['cursor']}")
        for silent in answer.get("silent", []):
            print(f"node {silent} did not answer: its devices are missing")


def _show_counts(answer: Any) -> None:
    from rich.table import Table

    table = Table(
        "unit", "devices", "nodes", "versions", "networks", title=f"{answer['app']}: {answer['devices']} online"
    )
    for unit, count in answer["units"].items():
        table.add_row(
            unit, str(count["devices"]), str(count["nodes"]), _numbers(count["versions"]), _numbers(count["networks"])
        )
    output.console().print(table)


def _numbers(found: dict[str, int]) -> str:
    by_size = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{output.harmless(name) or 'none'} {number}" for name, number in by_size)


def _show_devices(devices: list[Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(*_NAMES.split(", "))
    for one in devices:
        when_ms = one["epoch"] if one["online"] else one["seen_ms"]
        row = (
            one["device"],
            one["user"],
            one["node"],
            "online" if one["online"] else "offline",
            one["network"],
            one["version"],
            " ".join(one["tags"]),
            datetime.fromtimestamp(when_ms / 1000, UTC).isoformat(" ", "seconds") if when_ms else "never",
        )
        table.add_row(*(Text(output.harmless(text)) for text in row))
    output.console().print(table)


def call_device(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="Device to call.")],
    method: Annotated[str, typer.Argument(metavar="METHOD", help="What the app on it serves, such as door.open.")],
    params: Annotated[str, typer.Argument(metavar="JSON", help="The argument.")] = "null",
    key: Annotated[str, typer.Option("--key", metavar="KEY", help="Idempotency key: it is done once.")] = "",
    deadline: Annotated[float, typer.Option("--deadline", metavar="SECONDS", help="How long to wait.")] = 15.0,
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Call a device of the running platform and print its answer."""
    import json as json_text

    from stormline.cli import admin
    from stormline.core import limits_platform

    try:
        argument = json_text.loads(params)
    except ValueError as error:
        raise errors.ConfigError(f"JSON {params[:40]!r}: {error}") from error
    platform = admin.running(admin.place(output.environ(), state))
    request = {"app": platform.app, "device": device, "method": method, "params": argument, "deadline_s": deadline}
    wait_s = deadline + limits_platform.ADMIN_TIMEOUT_S
    with admin.AdminApi(platform, "admin", platform.business_key, timeout_s=wait_s) as api:
        answer = api.call("POST", "/v1/calls", body=request, headers={"idempotency-key": key} if key else None)
    if json:
        output.print_json(answer)
    else:
        print(json_text.dumps(answer["result"], indent=2, ensure_ascii=False))


def make_key(
    scope: Annotated[
        list[str], typer.Option("--scope", metavar="NAME", help="push, presence, call or revoke; repeatable.")
    ],
    label: Annotated[str, typer.Option("--label", metavar="TEXT", help="Whose it is.")] = "",
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """Make a key for a business and print it, this once."""
    api, app = _api(state)
    with api:
        answer = api.call("POST", "/v1/keys", body={"app": app, "scopes": scope, "label": label})
    if json:
        output.print_json(answer)
    else:
        print(answer["key"])


def list_keys(state: output.StateOption = None, json: output.JsonFlag = False) -> None:
    """List the keys of businesses, without their secrets."""
    from rich.table import Table

    api, _ = _api(state)
    with api:
        answer = api.call("GET", "/v1/keys")
    if json:
        output.print_json(answer)
        return
    table = Table("id", "app", "scopes", "label", "made")
    for one in answer["keys"]:
        made = datetime.fromtimestamp(one["made_ms"] / 1000, UTC).isoformat(" ", "seconds")
        table.add_row(one["id"], one["app"], " ".join(one["scopes"]), output.harmless(one["label"]), made)
    output.console().print(table)


def revoke_key(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Its id, as the list says it.")],
    state: output.StateOption = None,
    json: output.JsonFlag = False,
) -> None:
    """End a key, on every node at once."""
    api, _ = _api(state)
    with api:
        answer = api.call("DELETE", f"/v1/keys/{quote(key_id, safe='')}")
    if json:
        output.print_json(answer)
    else:
        print(f"key {answer['id']} has ended")
