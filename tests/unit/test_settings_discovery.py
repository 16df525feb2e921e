"""How client commands find the platform."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.core import errors
from stormline.settings import discovery
from stormline.wire import bundle as wire_bundle
from stormline.wire import jws


@pytest.fixture(name="data")
def _data() -> bytes:
    """An encoded bundle of app `demo`."""
    key = jws.b64url(Ed25519PrivateKey.generate().public_key().public_bytes_raw())
    return wire_bundle.encode(
        wire_bundle.Bundle(
            app="demo", dispatch=("127.0.0.1:8701",), dispatch_name="dispatch.stormline.test", dispatch_keys={"k1": key}
        )
    )


def test_discovery_bundle_in_state_folder_is_found(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "bundle.json").write_bytes(data)
    found = discovery.find_bundle({"STORMLINE_STATE": str(tmp_path)})
    assert found is not None
    assert found.file == tmp_path / "bundle.json"
    assert found.bundle.app == "demo"


def test_discovery_variable_wins_over_state_folder(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "bundle.json").write_bytes(b"broken")
    named = tmp_path / "mine.json"
    named.write_bytes(data)
    found = discovery.find_bundle({"STORMLINE_STATE": str(tmp_path), "STORMLINE_BUNDLE": str(named)})
    assert found is not None
    assert found.file == named


def test_discovery_nothing_there_means_stand_alone(tmp_path: Path) -> None:
    assert discovery.find_bundle({"STORMLINE_STATE": str(tmp_path / "none")}) is None
    assert discovery.find_bundle({}) is None


def test_discovery_named_bundle_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(errors.BundleError, match=r"^STORMLINE_BUNDLE .*none\.json: no such file"):
        discovery.find_bundle({"STORMLINE_BUNDLE": str(tmp_path / "none.json")})


def test_discovery_damaged_bundle_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "bundle.json").write_bytes(b"{")
    with pytest.raises(errors.BundleError, match=r"bundle .*bundle\.json: not a client bundle"):
        discovery.find_bundle({}, state=tmp_path)


def test_discovery_unreadable_bundle_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "bundle.json").mkdir()
    with pytest.raises(errors.BundleError, match="cannot be read: Is a directory"):
        discovery.find_bundle({}, state=tmp_path)
