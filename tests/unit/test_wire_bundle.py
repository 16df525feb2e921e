"""The client bundle: what a reader accepts, and that every fault names the file."""

import json

import msgspec
import pytest

from stormline.core import errors, limits, limits_relay
from stormline.core.values import Address
from stormline.wire import bundle
from stormline.wire.bundle import Bundle, Relay

KEY = "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"
BUNDLE = Bundle(
    app="shop",
    dispatch=("127.0.0.1:8701", "[::1]:8701"),
    dispatch_name="dispatch.internal",
    dispatch_keys={"plan-1": KEY},
    ca_pem="-----BEGIN CERTIFICATE-----\n",
    token="secret-token",
    preload=("api.shop.example",),
)


def changed(**change: object) -> bytes:
    return json.dumps(json.loads(bundle.encode(BUNDLE)) | change).encode()


def fault(data: bytes) -> str:
    with pytest.raises(errors.BundleError) as caught:
        bundle.decode(data, where="/x/bundle.json")
    assert str(caught.value).startswith("/x/bundle.json: ")
    return str(caught.value)


def test_bundle_round_trips() -> None:
    assert bundle.decode(bundle.encode(BUNDLE)) == BUNDLE
    assert BUNDLE.addresses() == (Address("127.0.0.1", 8701), Address("::1", 8701))


def test_file_is_indented_and_ends_with_a_newline() -> None:
    text = bundle.encode(BUNDLE).decode()
    assert text.endswith("}\n")
    assert '\n  "app": "shop"' in text


def test_file_edited_by_hand_with_other_spaces_is_read() -> None:
    assert bundle.decode(b"\n\t" + bundle.encode(BUNDLE).replace(b"\n", b"\r\n") + b"\n") == BUNDLE


def test_repr_masks_the_token() -> None:
    assert "secret-token" not in repr(BUNDLE)
    assert "secret-token" not in str(BUNDLE)


def test_member_of_a_newer_version_is_ignored() -> None:
    assert bundle.decode(changed(relay=["127.0.0.1:1"])) == BUNDLE


RELAY = Relay(host="192.0.2.7", port=80, keys="AAEC", hosts=("api.shop.example", "shop.example"))


def test_relays_round_trip_and_a_bundle_without_any_is_as_it_was() -> None:
    with_relay = msgspec.structs.replace(BUNDLE, relays=(RELAY,) * limits_relay.BUNDLE_RELAYS_MAX)
    assert bundle.decode(bundle.encode(with_relay)) == with_relay
    assert b"relays" not in bundle.encode(BUNDLE)


@pytest.mark.parametrize(
    "change",
    [
        {"host": "relay.example"},
        {"port": 0},
        {"keys": ""},
        {"keys": "A"},
        {"keys": "*"},
        {"keys": "AAAA" * limits_relay.RELAY_KEYS_BYTES_MAX},
        {"hosts": ["API.shop.example"]},
        {"hosts": ["api.shop.example:443"]},
        {"hosts": ["a.test"] * (limits_relay.BUNDLE_RELAY_HOSTS_MAX + 1)},
        {"hosts": "a.test"},
    ],
)
def test_useless_relay_is_refused(change: dict[str, object]) -> None:
    fault(changed(relays=[json.loads(msgspec.json.encode(RELAY)) | change]))


def test_more_relays_than_a_bundle_may_have_are_refused() -> None:
    relays = [json.loads(msgspec.json.encode(RELAY))] * (limits_relay.BUNDLE_RELAYS_MAX + 1)
    assert "at most" in fault(changed(relays=relays))


def test_newer_format_is_refused_by_name() -> None:
    assert "stormline-bundle/9" in fault(changed(format="stormline-bundle/9"))


@pytest.mark.parametrize(
    "change",
    [
        {"app": ""},
        {"app": "Shop"},
        {"app": "a/../b"},
        {"dispatch": []},
        {"dispatch": ["127.0.0.1"]},
        {"dispatch": ["127.0.0.1:0"]},
        {"dispatch": ["127.0.0.1:65536"]},
        {"dispatch": ["127.0.0.1:" + "1" * 5000]},
        {"dispatch": [":1"]},
        {"dispatch": "127.0.0.1:1"},
        {"dispatch_keys": {}},
        {"dispatch_keys": {"k": "AAAA"}},
        {"dispatch_keys": {"k": KEY + "="}},
        {"ca_pem": None},
    ],
)
def test_useless_member_is_refused(change: dict[str, object]) -> None:
    fault(changed(**change))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe{}",
        b"\x00" * 100,
        b"[" * 100_000,
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        bundle.encode(BUNDLE)[:-40],
        bundle.encode(BUNDLE).replace(b'"app": "shop"', b'"app": "shop", "app": "bank"'),
    ],
    ids=["empty", "null", "array", "object", "utf-16", "zeros", "open", "deep", "half", "twice"],
)
def test_what_is_no_bundle_is_refused(data: bytes) -> None:
    fault(data)


def test_file_over_the_bound_is_refused_unread() -> None:
    assert "at most" in fault(bundle.encode(BUNDLE) + b" " * limits.BUNDLE_BYTES_MAX)
