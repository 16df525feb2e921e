"""`stormline relay`: the keys that requests through the relay are sealed for."""

import datetime
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from stormline.cli import output
from stormline.core import errors, limits_platform, limits_relay

if TYPE_CHECKING:
    from stormline.assembly import layout

group = typer.Typer(help="The relay: the keys that requests through it are sealed for.", no_args_is_help=True)
_STEP_S = 0.2


def add_to(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(group, name="relay", rich_help_panel="Platform")


@group.callback()
def _group() -> None:
    """The relay: the keys that requests through it are sealed for."""


@group.command("rotate")
def rotate(state: output.StateOption = None, json: output.JsonFlag = False) -> None:
    """Make a new key, have the plans name it, and end the old one once no plan that names it is in use.

    Broken off, or where the rules cannot be changed now, it is gone on with by the next call: no other key is made.
    """
    from stormline.assembly import prepare
    from stormline.cli import admin
    from stormline.net.clock import SystemClock
    from stormline.relay import keys

    clock = SystemClock()
    where = admin.place(output.environ(), state)
    platform = admin.running(where)
    if "relay" not in platform.addresses or "dispatch" not in platform.addresses:
        raise errors.PlatformError("relay rotate: relay and dispatch are not both part of the running platform")
    (new, *_) = keys.rotate(where.relay_key, clock.wall())
    _wait(lambda: _lists(platform.addresses["relay"], new.key.key_id), "the relay does not take the new key up")
    prepare.renew_bundle(where, prepare.publish_relay_keys(where, clock.wall()))
    _wait(_RulesNameIt(where, platform), "the rules still name the old key: see 'stormline dispatch status'")
    held = keys.settle(where.relay_key, clock.wall() + limits_relay.RELAY_KEY_OVERLAP_S)
    if json:
        output.print_json({"keys": [{"id": each.key.key_id, "until": each.until} for each in held]})
        return
    print(f"plans name key {held[0].key.key_id}")
    for each in held[1:]:
        if each.until is not None:
            until = datetime.datetime.fromtimestamp(each.until, datetime.UTC)
            print(f"key {each.key.key_id} is good until {until:%Y-%m-%d %H:%M} UTC")


def _lists(address: str, key_id: int) -> bool:
    import httpx2

    from stormline.wire import ohttp

    try:
        answer = httpx2.get(f"http://{address}/", timeout=limits_platform.ADMIN_TIMEOUT_S, trust_env=False)
        return any(key.key_id == key_id for key in ohttp.decode_keys(answer.content))
    except (httpx2.HTTPError, errors.RemoteProtocolError):
        return False


class _RulesNameIt:
    """Says whether every rule about the relay names its keys of now; looks at all rules once for each version."""

    def __init__(self, where: "layout.Layout", platform: "layout.Admin") -> None:
        self._where = where
        self._platform = platform
        self._stale_version = 0

    def __call__(self) -> bool:
        import msgspec

        from stormline.cli import admin
        from stormline.dispatch import relay_keys, rules

        with admin.AdminApi(self._platform, "dispatch", self._platform.admin_key) as api:
            status = api.call("GET", "/v1/admin/status")
            if status["rollout"] is not None:
                raise errors.PlatformError("relay rotate: a roll-out of rules is open; call this again once it is over")
            if status["version"] == self._stale_version:
                return False
            found = rules.decode(msgspec.json.encode(api.call("GET", "/v1/admin/rules")))
        self._stale_version = found.version
        return relay_keys.renewed(found, relay_keys.read(self._where.relay_keys)) is found


def _wait(holds: Callable[[], bool], otherwise: str) -> None:
    """Wait for something.

    Raises:
        PlatformError: it did not come to hold within `limits_relay.RELAY_ROTATE_WAIT_S`.
    """
    from stormline.net.clock import SystemClock

    clock = SystemClock()
    ends_at = clock.monotonic() + limits_relay.RELAY_ROTATE_WAIT_S
    while not holds():
        if clock.monotonic() > ends_at:
            raise errors.PlatformError(f"relay rotate: {otherwise}; call it again")
        time.sleep(_STEP_S)
