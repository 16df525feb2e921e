"""Settings: where values come from, what wins, and what a wrong one is told."""

from pathlib import Path

import pytest

from stormline.core import errors
from stormline.settings import load
from stormline.settings.model import Nats, Ports


def _load(tmp_path: Path, toml: str = "", env: dict[str, str] | None = None, **overrides: object) -> load.Settings:
    (tmp_path / "stormline.toml").write_text(toml)
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return load.load(env or {}, state=tmp_path, overrides=dotted)


class TestStateFolder:
    def test_state_option_wins_over_everything(self, tmp_path: Path) -> None:
        env = {"STORMLINE_STATE": "/x", "XDG_STATE_HOME": "/y", "HOME": "/z"}
        assert load.state_folder(env, tmp_path) == tmp_path

    def test_state_variable_wins_over_xdg(self) -> None:
        env = {"STORMLINE_STATE": "/x", "XDG_STATE_HOME": "/y", "HOME": "/z"}
        assert load.state_folder(env) == Path("/x")

    def test_state_xdg_wins_over_home(self) -> None:
        assert load.state_folder({"XDG_STATE_HOME": "/y", "HOME": "/z"}) == Path("/y/stormline")

    def test_state_relative_xdg_is_ignored(self) -> None:
        assert load.state_folder({"XDG_STATE_HOME": "y", "HOME": "/z"}) == Path("/z/.local/state/stormline")

    def test_state_relative_option_becomes_absolute(self) -> None:
        assert load.state_folder({}, Path("here")) == Path.cwd() / "here"

    def test_state_without_home_says_what_to_set(self) -> None:
        with pytest.raises(errors.ConfigError, match="--state, STORMLINE_STATE or HOME"):
            load.state_folder({})


class TestSources:
    def test_load_nothing_given_gives_defaults(self, tmp_path: Path) -> None:
        settings = load.load({}, state=tmp_path)
        assert settings.state == str(tmp_path)
        assert (settings.host, settings.unit, settings.app, settings.log_level) == ("127.0.0.1", "u1", "demo", "info")
        assert settings.ports == Ports(
            dispatch=8701, gateway=8702, admin=8703, apm=8704, console=8705, nats=8706, shop=8707
        )

    def test_load_file_in_state_folder_is_read(self, tmp_path: Path) -> None:
        settings = _load(tmp_path, 'unit = "u7"\n[ports]\ngateway = 9000\n')
        assert settings.unit == "u7"
        assert settings.ports.gateway == 9000
        assert settings.ports.dispatch == 8701

    def test_load_named_file_replaces_the_one_in_the_state_folder(self, tmp_path: Path) -> None:
        (tmp_path / "stormline.toml").write_text('unit = "u7"')
        other = tmp_path / "other.toml"
        other.write_text('app = "shop"')
        settings = load.load({}, state=tmp_path, file=other)
        assert (settings.unit, settings.app) == ("u1", "shop")

    def test_load_file_named_by_the_environment_is_read_unless_another_is_given(self, tmp_path: Path) -> None:
        named, given = tmp_path / "named.toml", tmp_path / "given.toml"
        named.write_text('app = "named"')
        given.write_text('app = "given"')
        env = {"STORMLINE_CONFIG": str(named)}
        assert load.load(env, state=tmp_path).app == "named"
        assert load.load(env, state=tmp_path, file=given).app == "given"
        with pytest.raises(errors.ConfigError, match="no such file"):
            load.load({"STORMLINE_CONFIG": str(tmp_path / "none.toml")}, state=tmp_path)

    def test_load_environment_wins_over_file(self, tmp_path: Path) -> None:
        settings = _load(tmp_path, "[ports]\ngateway = 9000\napm = 9001\n", {"STORMLINE_PORTS__GATEWAY": "9100"})
        assert (settings.ports.gateway, settings.ports.apm) == (9100, 9001)

    @pytest.mark.parametrize("name", sorted(load.NOT_SETTINGS - {"STATE", "CONFIG"}))
    def test_load_variable_that_is_no_setting_is_left_alone(self, tmp_path: Path, name: str) -> None:
        assert _load(tmp_path, env={f"STORMLINE_{name}": "1"}) == _load(tmp_path)

    def test_load_command_line_wins_over_environment(self, tmp_path: Path) -> None:
        env = {"STORMLINE_NATS__URL": "nats://127.0.0.1:1"}
        assert _load(tmp_path, env=env, nats__url="nats://127.0.0.1:2").nats.url == "nats://127.0.0.1:2"

    def test_load_lists_from_file_and_from_environment_agree(self, tmp_path: Path) -> None:
        from_file = _load(tmp_path, '[gateway]\nlisten = ["127.0.0.1:1", "[::1]:2"]\nfronts = ["10.0.0.0/8"]\n')
        variables = {"STORMLINE_GATEWAY__LISTEN": "127.0.0.1:1, [::1]:2", "STORMLINE_GATEWAY__FRONTS": "10.0.0.0/8"}
        assert from_file.gateway == _load(tmp_path, "", variables).gateway
        assert from_file.gateway.listen == ("127.0.0.1:1", "[::1]:2")

    def test_load_upstreams_from_file_and_from_environment_agree(self, tmp_path: Path) -> None:
        from_file = _load(tmp_path, '[api.upstreams]\n"shop.demo" = "http://127.0.0.1:8707"\n')
        from_env = _load(tmp_path, env={"STORMLINE_API__UPSTREAMS": '{"shop.demo": "http://127.0.0.1:8707"}'})
        assert from_file.api == from_env.api
        assert from_file.api.upstreams == {"shop.demo": "http://127.0.0.1:8707"}

    def test_load_variables_of_other_uses_are_left_alone(self, tmp_path: Path) -> None:
        env = {"STORMLINE_DEBUG": "1", "STORMLINE_BUNDLE": "/b", "STORMLINE_STATE": "/s", "PATH": "/bin"}
        assert _load(tmp_path, env=env).state == str(tmp_path)

    def test_settings_encoded_and_decoded_are_equal(self, tmp_path: Path) -> None:
        settings = _load(tmp_path, nats__core_password="geheim")
        assert load.decode(load.encode(settings), where="x") == settings


class TestWrongInput:
    @pytest.mark.parametrize(
        ("toml", "said"),
        [
            ("ports = [", "not TOML"),
            ('unti = "u2"', "unknown key 'unti' (did you mean 'unit'?)"),
            ("[ports]\ngatway = 1", "unknown key 'ports.gatway' (did you mean 'gateway'?)"),
            ("zzz = 1", "expected one of: host, advertise, unit, app"),
            ("ports = 3", "ports: expected a table [ports], got a number"),
            ('[ports]\ngateway = "9"', "ports.gateway: expected a port, 0 to 65535 (0: a free one), got '9'"),
            ("[ports]\ngateway = 65536", "ports.gateway: expected a port"),
            ("[ports]\ngateway = -1", "ports.gateway: expected a port"),
            ("[ports]\ngateway = true", "ports.gateway: expected a port"),
            ("[ports]\ngateway = 1.5", "ports.gateway: expected a port"),
            ('host = "gateway.example"', "host: expected an IP address"),
            ('host = "0.0.0.0"', "advertise: expected the IP address that clients use"),
            ('advertise = "::"', "advertise: expected an IP address that clients can connect to"),
            ('unit = "U1"', "unit: expected 1 to 32 of a-z, 0-9"),
            ('app = ""', "app: expected 1 to 32 of a-z, 0-9"),
            ('log_level = "loud"', "log_level: expected debug, info, warning or error, got 'loud'"),
            ('[api.upstreams]\n"shop.demo" = "ftp://127.0.0.1:1"', "api.upstreams: expected host names"),
            ('[api.upstreams]\n"shop.demo" = "http://elsewhere:1"', "api.upstreams: expected host names"),
            ('[api.upstreams]\n"shop.demo" = "http://127.0.0.1:1/path"', "api.upstreams: expected host names"),
            ('[gateway]\nlisten = ["localhost:1"]', "gateway.listen: expected addresses"),
            ('[gateway]\nfronts = ["10.0.0.1/8"]', "gateway.fronts: expected networks"),
            ('[gateway]\norigins = ["https://app.example/"]', "gateway.origins: expected origins"),
            ('[api.upstreams]\n"shop demo" = "http://127.0.0.1:1"', "api.upstreams: expected host names"),
            ('[nats]\nurl = "http://127.0.0.1:1"', "nats.url: expected nats://host:port"),
            ('state = "/x"', "use --state or STORMLINE_STATE"),
        ],
    )
    def test_load_wrong_file_names_file_key_and_expectation(self, tmp_path: Path, toml: str, said: str) -> None:
        with pytest.raises(errors.ConfigError) as caught:
            _load(tmp_path, toml)
        assert said in str(caught.value)
        if not said.startswith("advertise: expected the"):
            assert str(tmp_path / "stormline.toml") in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("variable", "value", "said"),
        [
            ("STORMLINE_PORTS__GATEWAY", "x", "ports.gateway: expected a port"),
            ("STORMLINE_PORTS__GATEWAY", "", "ports.gateway: expected a port"),
            ("STORMLINE_PORTS__GATWAY", "1", "did you mean 'gateway'?"),
            ("STORMLINE_PORTS", "1", "ports is a section; expected one of: ports.dispatch"),
            ("STORMLINE_UNIT__X", "1", "unknown setting 'unit.x': unit has no parts"),
            ("STORMLINE_API__UPSTREAMS", "{", "api.upstreams: expected host names"),
            ("STORMLINE_", "1", "unknown setting ''"),
        ],
    )
    def test_load_wrong_variable_names_it(self, tmp_path: Path, variable: str, value: str, said: str) -> None:
        with pytest.raises(errors.ConfigError) as caught:
            _load(tmp_path, env={variable: value})
        assert f"environment variable {variable}:" in str(caught.value)
        assert said in str(caught.value)

    def test_load_named_file_missing_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(errors.ConfigError, match=r"config file .*none\.toml: no such file"):
            load.load({}, state=tmp_path, file=tmp_path / "none.toml")

    def test_load_file_that_is_a_folder_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(errors.ConfigError, match="cannot be read: Is a directory"):
            load.load({}, state=tmp_path, file=tmp_path)

    def test_load_huge_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(errors.ConfigError, match="larger than"):
            _load(tmp_path, "#" * (256 * 1024 + 1))

    def test_load_file_that_is_not_utf8_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "stormline.toml").write_bytes(b"unit = '\xff'")
        with pytest.raises(errors.ConfigError, match="not TOML"):
            load.load({}, state=tmp_path)

    def test_decode_damaged_settings_says_where(self) -> None:
        with pytest.raises(errors.ConfigError, match=r"^run/settings\.json: not a settings file"):
            load.decode(b"{}", where="run/settings.json")


class TestSecrets:
    def test_repr_of_settings_shows_no_password(self) -> None:
        nats = Nats(url="nats://127.0.0.1:4222", core_user="u", core_password="geheim", biz_password="geheim")
        assert "geheim" not in repr(nats)

    def test_error_about_a_password_or_url_does_not_show_it(self, tmp_path: Path) -> None:
        with pytest.raises(errors.ConfigError) as caught:
            _load(tmp_path, '[nats]\nurl = "nats://user:geheim@127.0.0.1:4222"')
        assert "geheim" not in str(caught.value)
        with pytest.raises(errors.ConfigError) as caught:
            _load(tmp_path, "[nats]\ncore_password = 4711")
        assert "4711" not in str(caught.value)
