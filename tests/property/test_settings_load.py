"""Settings hold for any input: the same value from every source, and one named error for anything else."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from stormline.core import errors
from stormline.settings import load
from stormline.settings.model import Ports

PORTS = st.dictionaries(st.sampled_from(list(Ports.__struct_fields__)), st.integers(0, 65535))
KEYS = st.one_of(
    st.sampled_from(["host", "unit", "app", "log_level", "ports", "nats", "api", "gateway", "upstreams", "url"]),
    st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8),
)
VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)


def _toml(value: object) -> str:
    """Write a TOML value; JSON's escapes are TOML's."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return {"inf": "inf", "-inf": "-inf", "nan": "nan"}.get(str(value), repr(value))
    if isinstance(value, list):
        return f"[{', '.join(_toml(each) for each in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)} = {_toml(each)}' for key, each in value.items())}}}"
    return json.dumps(value).replace("\x7f", "\\u007F")


def _load(env: Mapping[str, str], toml: str = "") -> load.Settings:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "stormline.toml").write_text(toml)
        return load.load(env, state=Path(folder))


@given(PORTS)
def test_ports_from_environment_and_from_file_are_the_same(ports: dict[str, int]) -> None:
    from_env = _load({f"STORMLINE_PORTS__{name.upper()}": str(port) for name, port in ports.items()})
    from_file = _load({}, "[ports]\n" + "".join(f"{name} = {port}\n" for name, port in ports.items()))
    assert from_env.ports == from_file.ports
    assert all(getattr(from_env.ports, name) == port for name, port in ports.items())


@given(PORTS, PORTS)
def test_ports_environment_wins_key_by_key(env_ports: dict[str, int], file_ports: dict[str, int]) -> None:
    env = {f"STORMLINE_PORTS__{name.upper()}": str(port) for name, port in env_ports.items()}
    ports = _load(env, "[ports]\n" + "".join(f"{name} = {port}\n" for name, port in file_ports.items())).ports
    defaults = Ports()
    for name in Ports.__struct_fields__:
        expected = env_ports.get(name, file_ports.get(name, getattr(defaults, name)))
        assert getattr(ports, name) == expected


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_toml_gives_settings_or_one_config_error(table: dict[str, object]) -> None:
    toml = "".join(f"{json.dumps(key)} = {_toml(value)}\n" for key, value in table.items())
    try:
        settings = _load({}, toml)
    except errors.ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert load.decode(load.encode(settings), where="x") == settings


@given(st.binary(max_size=64))
def test_any_bytes_give_settings_or_one_config_error(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "stormline.toml").write_bytes(data)
        try:
            load.load({}, state=Path(folder))
        except errors.ConfigError as error:
            assert folder in str(error)


@given(st.dictionaries(st.one_of(KEYS, st.just("ports__gateway"), st.just("api__upstreams")), st.text(max_size=12)))
def test_any_environment_gives_settings_or_one_config_error(variables: dict[str, str]) -> None:
    env = {f"STORMLINE_{name.upper()}": value for name, value in variables.items()}
    try:
        settings = _load(env)
    except errors.ConfigError as error:
        assert "environment variable STORMLINE_" in str(error)
    else:
        assert load.decode(load.encode(settings), where="x") == settings
