"""Keys of the relay in the rules: old ones become those of now, others' stay."""

import dataclasses

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from stormline.core import errors, limits_relay
from stormline.dispatch import relay_keys
from stormline.dispatch.relay_keys import RelayKeys, renewed
from stormline.dispatch.rules import RuleSet, check
from stormline.wire import jws, ohttp
from stormline.wire.plan import SEALED, Endpoint, HostPlan, PathPlan, Policy


def listed(*keys):
    return jws.b64url(ohttp.encode_keys(key.config for key in keys))


OLD, NOW, NEXT, OTHERS = (
    ohttp.GatewayKey(number, X25519PrivateKey.from_private_bytes(bytes([number]) * 32)) for number in range(1, 5)
)
TOLD = RelayKeys().then(listed(OLD)).then(listed(NOW, OLD)).then(listed(NOW))


def relay(keys, host="192.0.2.7"):
    return Endpoint(host=host, port=80, carrier=SEALED, keys=keys)


def rules(*relays):
    policy = Policy(relays=relays)
    with_path = HostPlan(dns=True, paths=(PathPlan(path="/pay/*", policy=policy),))
    hosts = {"a.test": HostPlan(dns=True, policy=policy), "b.test": with_path, "c.test": HostPlan(dns=True)}
    return check(RuleSet(version=3, hosts=hosts))


def relays_of(rules):
    return [rules.hosts["a.test"].policy.relays, rules.hosts["b.test"].paths[0].policy.relays]


def test_old_keys_become_those_of_now_wherever_they_are_named():
    found = renewed(rules(relay(listed(OLD)), relay(listed(OTHERS), host="198.51.100.9")), TOLD)
    for mine, others in relays_of(found):
        assert (mine.keys, mine.host) == (listed(NOW), "192.0.2.7")
        assert others.keys == listed(OTHERS)
    assert found.version == 3


def test_rules_that_name_the_keys_of_now_are_the_same_object():
    held = rules(relay(listed(NOW)))
    assert renewed(held, TOLD) is held
    assert renewed(held, RelayKeys()) is held


def test_an_overlap_names_both_and_is_put_in_the_place_of_either():
    told = TOLD.then(listed(NEXT, NOW))
    assert set(told.former) == {jws.b64url(OLD.public)}
    for keys in (listed(NOW), listed(OLD), listed(NOW, OLD)):
        assert relays_of(renewed(rules(relay(keys)), told))[0][0].keys == listed(NEXT, NOW)


def test_the_past_is_bounded_and_the_newest_of_it_stays():
    told = RelayKeys()
    for number in range(limits_relay.RELAY_FORMER_KEYS_MAX + 3):
        key = dataclasses.replace(OLD, private=X25519PrivateKey.from_private_bytes((8 * number).to_bytes(32, "little")))
        told = told.then(listed(key))
        last, before = key, told
    assert len(before.former) == limits_relay.RELAY_FORMER_KEYS_MAX
    assert jws.b64url(last.public) in told.known


def test_what_is_known_is_read_from_its_file(tmp_path):
    path = tmp_path / "relay-keys.json"
    assert relay_keys.read(path) == RelayKeys()
    path.write_bytes(msgspec.json.encode(TOLD))
    assert relay_keys.read(path) == TOLD
    for damaged in (b"{", b'{"listed": "AC0B"}', b'{"listed": "?"}'):
        path.write_bytes(damaged)
        with pytest.raises(errors.ConfigError, match="relay"):
            relay_keys.read(path)
