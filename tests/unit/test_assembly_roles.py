"""Which processes a platform is made of."""

import sys
from pathlib import Path

import pytest

from stormline.assembly import roles
from stormline.core import errors
from stormline.settings.model import Gateway, Ports, Settings


def test_choose_nothing_asked_gives_all_but_the_demo() -> None:
    assert [role.name for role in roles.choose((), demo=False)] == ["dispatch", "gateway", "apm", "relay", "console"]


def test_choose_demo_adds_the_shop() -> None:
    assert [role.name for role in roles.choose((), demo=True)][-1] == "shop"


def test_choose_only_wins_over_demo_and_keeps_the_order() -> None:
    assert [role.name for role in roles.choose(("apm", "dispatch", "apm"), demo=True)] == ["dispatch", "apm"]


def test_choose_unknown_role_names_those_there_are() -> None:
    with pytest.raises(errors.ConfigError, match="unknown role 'db': expected one of dispatch, gateway, apm"):
        roles.choose(("db",), demo=False)


def test_roles_cover_every_port_of_the_settings_once() -> None:
    parts = [part for role in roles.ROLES.values() for part in role.ports]
    assert sorted([*parts, "nats"]) == sorted(Ports.__struct_fields__)


def test_role_command_runs_this_interpreter() -> None:
    command = roles.ROLES["apm"].command(Path("/s"))
    assert command == [sys.executable, "-m", "stormline.assembly.role", "apm", "--state", "/s"]


def test_check_installed_missing_package_says_what_to_install() -> None:
    role = roles.ROLES["apm"]._replace(packages=("no_such_package_anywhere",))
    with pytest.raises(errors.PlatformError, match=r"'no_such_package_anywhere' is missing: install stormline\[apm\]"):
        roles.check_installed([role])


def test_check_installed_all_there_passes() -> None:
    roles.check_installed(roles.ROLES.values())


def test_spread_gives_the_gateway_a_process_for_each_worker() -> None:
    settings = Settings(state="/s", gateway=Gateway(workers=3))
    spread = roles.spread(roles.choose(("dispatch", "gateway"), demo=False), settings)
    assert [role.process for role in spread] == ["dispatch", "gateway", "gateway-2", "gateway-3"]
    assert spread[3].command(Path("/s"))[-2:] == ["--worker", "3"]
    assert spread[1].command(Path("/s"))[-2:] == ["--state", "/s"]
