"""What a scheduling centre's configuration refuses."""

from pathlib import Path
from typing import Any

import pytest

from stormline.core import errors
from stormline.core.values import Secret
from stormline.dispatch.config import DispatchConfig, KeyFile
from stormline.dispatch.rules import RuleSet
from stormline.wire.plan import HostPlan

ADMIN = "an-admin-key-0123"


def config(**change: Any) -> DispatchConfig:
    arguments: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "tls": None,
        "unit": "u1",
        "rules": RuleSet(version=1),
        "plan_key": KeyFile(Path("plan.pem"), "plan-1"),
        "token_key": KeyFile(Path("token.pem"), "token-1"),
        "admin_key": Secret(ADMIN),
    }
    return DispatchConfig(**(arguments | change))


def test_rules_are_checked_and_given_the_unit() -> None:
    held = config(rules=RuleSet(version=1, hosts={"A.Example.": HostPlan(dns=True)})).rules
    assert held.unit == "u1"
    assert set(held.hosts) == {"a.example"}


def test_repr_shows_no_secret() -> None:
    assert ADMIN not in repr(config())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"port": -1}, "port"),
        ({"port": 65536}, "port"),
        ({"plain_port": 65536}, "plain_port"),
        ({"unit": ""}, "unit"),
        ({"unit": "U1"}, "unit"),
        ({"rules": RuleSet(version=1, unit="u2")}, "u2"),
        ({"rules": RuleSet(version=0)}, "version"),
        ({"admin_key": Secret("short")}, "admin_key"),
        ({"admin_key": Secret("")}, "admin_key"),
        ({"admin_key": Secret(ADMIN + " ")}, "admin_key"),
        ({"admin_key": Secret(ADMIN + "é")}, "admin_key"),
        ({"token_key": KeyFile(Path("token.pem"), "plan-1")}, "plan-1"),
        ({"enrol_burst": 0}, "enrol_burst"),
        ({"enrol_rate_per_s": 0.0}, "enrol_rate_per_s"),
        ({"enrol_rate_per_s": float("nan")}, "enrol_rate_per_s"),
    ],
)
def test_wrong_value_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        config(**change)
    assert named in str(caught.value)
    assert ADMIN not in str(caught.value)
