"""What is settled before the first process: keys, certificates, rules, and what clients and commands are told."""

import random
import stat
from pathlib import Path

import msgspec
import pytest

from stormline.assembly import layout, prepare, roles
from stormline.core import errors
from stormline.dispatch import rules as dispatch_rules
from stormline.net.clock import SystemClock
from stormline.settings import load
from stormline.wire import bundle as wire_bundle
from stormline.wire import jws


class _Rng(random.Random):
    def token_bytes(self, size: int) -> bytes:
        return self.randbytes(size)


def _prepare(folder: Path, *only: str, demo: bool = False, **overrides: object) -> prepare.Prepared:
    free = {f"ports.{part}": 0 for part in ("dispatch", "gateway", "admin", "apm", "console", "nats", "shop")}
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    settings = load.load({}, state=folder, overrides={**free, **dotted})
    place = layout.Layout(folder)
    return prepare.prepare(
        settings, place, roles.choose(only, demo=demo), demo=demo, clock=SystemClock(), rng=_Rng(len(only))
    )


def _rules(folder: Path) -> dispatch_rules.RuleSet:
    return dispatch_rules.decode((folder / "rules.json").read_bytes())


def test_prepare_every_running_part_gets_a_port_of_its_own(tmp_path: Path) -> None:
    ports = msgspec.to_builtins(_prepare(tmp_path, demo=True).resolved.settings.ports)
    assert all(ports.values())
    assert len(set(ports.values())) == len(ports)


def test_prepare_part_that_does_not_run_gets_none(tmp_path: Path) -> None:
    ports = _prepare(tmp_path, "dispatch").resolved.settings.ports
    assert ports.dispatch
    assert (ports.gateway, ports.nats) == (0, 0)


def test_prepare_external_engine_needs_no_port(tmp_path: Path) -> None:
    prepared = _prepare(tmp_path, "gateway", nats__url="nats://127.0.0.1:4222")
    assert prepared.resolved.settings.ports.nats == 0


def test_prepare_demo_sends_its_host_through_the_gateway_to_the_shop(tmp_path: Path) -> None:
    settings = _prepare(tmp_path, demo=True).resolved.settings
    assert settings.api.upstreams == {"shop.demo": f"http://127.0.0.1:{settings.ports.shop}"}
    endpoints = _rules(tmp_path).hosts["shop.demo"].endpoints
    assert [each.carrier for each in endpoints] == ["sl-tls", "sl-wss", "sl-short"]
    assert {(each.host, each.port) for each in endpoints} == {("127.0.0.1", settings.ports.gateway)}
    assert {each.server_name for each in endpoints} == {"gateway.stormline.test"}
    assert _rules(tmp_path).apps == {"demo": frozenset({"shop.demo", "apm.stormline.test"})}


def test_prepare_telemetry_goes_to_the_apm(tmp_path: Path) -> None:
    settings = _prepare(tmp_path, demo=True).resolved.settings
    report = _rules(tmp_path).report
    assert report is not None
    assert (report.host, report.port, report.server_name) == ("127.0.0.1", settings.ports.apm, "apm.stormline.test")


def test_prepare_without_gateway_and_apm_promises_neither(tmp_path: Path) -> None:
    prepared = _prepare(tmp_path, "dispatch", api__upstreams={"a.example": "http://127.0.0.1:1"})
    assert _rules(tmp_path).hosts == {}
    assert _rules(tmp_path).report is None
    assert prepared.bundle.preload == ()


def test_prepare_upstream_set_by_the_operator_is_kept_beside_the_demo(tmp_path: Path) -> None:
    prepared = _prepare(tmp_path, demo=True, api__upstreams={"a.example": "http://127.0.0.1:1"})
    assert set(prepared.resolved.settings.api.upstreams) == {"shop.demo", "a.example"}
    assert set(_rules(tmp_path).hosts) == {"shop.demo", "a.example", "apm.stormline.test"}


def test_prepare_names_the_advertised_address_and_listens_on_the_other(tmp_path: Path) -> None:
    prepared = _prepare(tmp_path, demo=True, host="0.0.0.0", advertise="192.0.2.7")
    assert prepared.bundle.dispatch == (f"192.0.2.7:{prepared.resolved.settings.ports.dispatch}",)
    assert _rules(tmp_path).hosts["shop.demo"].endpoints[0].host == "192.0.2.7"
    assert prepared.resolved.settings.host == "0.0.0.0"


def test_prepare_again_finds_everything_again(tmp_path: Path) -> None:
    first, second = _prepare(tmp_path, "dispatch"), _prepare(tmp_path, "dispatch")
    assert second.bundle.ca_pem == first.bundle.ca_pem
    assert second.bundle.dispatch_keys == first.bundle.dispatch_keys
    assert second.resolved.token_keys == first.resolved.token_keys
    assert second.admin.keys == first.admin.keys


def test_prepare_bundle_is_one_a_client_reads(tmp_path: Path) -> None:
    bundle = _prepare(tmp_path, demo=True).bundle
    assert wire_bundle.decode(wire_bundle.encode(bundle)) == bundle
    assert bundle.dispatch_name == "dispatch.stormline.test"


def test_prepare_plan_and_token_keys_differ(tmp_path: Path) -> None:
    resolved = _prepare(tmp_path).resolved
    assert not set(resolved.plan_keys) & set(resolved.token_keys)
    assert jws.load_public_keys({**resolved.plan_keys, **resolved.token_keys})


class TestRulesVersion:
    def test_rules_unchanged_keep_their_version(self, tmp_path: Path) -> None:
        for _ in range(2):
            _prepare(tmp_path, "dispatch")
            assert _rules(tmp_path).version == 1

    def test_rules_changed_get_a_higher_version_and_never_an_old_one(self, tmp_path: Path) -> None:
        versions = []
        for only in (("dispatch",), ("dispatch", "apm"), ("dispatch",)):
            _prepare(tmp_path, *only)
            versions.append(_rules(tmp_path).version)
        assert versions == [1, 2, 3]

    def test_rules_damaged_name_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "rules.json").write_text("{")
        with pytest.raises(errors.ConfigError, match=r"rules\.json: not a rule set"):
            _prepare(tmp_path, "dispatch")


class TestAnnounce:
    def test_announce_writes_bundle_for_all_and_admin_for_us(self, tmp_path: Path) -> None:
        place = layout.Layout(tmp_path)
        prepared = _prepare(tmp_path, "dispatch")
        prepare.announce(prepared, place, {"dispatch": "127.0.0.1:1"})
        assert stat.S_IMODE(place.admin.stat().st_mode) == 0o600
        admin = layout.read(place.admin, layout.Admin)
        assert admin == msgspec.structs.replace(prepared.admin, addresses={"dispatch": "127.0.0.1:1"})
        assert wire_bundle.decode(place.bundle.read_bytes()) == prepared.bundle

    def test_announce_without_dispatch_gives_clients_no_bundle(self, tmp_path: Path) -> None:
        place = layout.Layout(tmp_path)
        prepare.announce(_prepare(tmp_path, "apm"), place, {"apm": "127.0.0.1:1"})
        assert not place.bundle.exists()
