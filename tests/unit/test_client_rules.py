"""Business rules: which fits, what it says, and what is refused; addresses of the settings."""

import types

import pytest

from stormline.client.config import Config
from stormline.client.rules import BusinessRule, ClearHttp, Rules, check_addresses, known_addresses
from stormline.core import errors, limits_means
from stormline.core.values import Address
from stormline.policy import presets
from stormline.policy.presets import Preset
from stormline.wire.httpsig import VerifyKey

CLEAR = ClearHttp(keys={"k": VerifyKey("hmac-sha256", b"0123456789abcdef")})


class TestFit:
    @pytest.mark.parametrize(
        ("host", "path", "asked", "fits"),
        [
            ("a.test", "/**", ("a.test", "/"), True),
            ("a.test", "/**", ("a.test", "/x/y"), True),
            ("a.test", "/**", ("b.test", "/"), False),
            ("*.a.test", "/**", ("x.a.test", "/"), True),
            ("*.a.test", "/**", ("y.x.a.test", "/"), True),
            ("*.a.test", "/**", ("a.test", "/"), False),
            ("*.a.test", "/**", ("xa.test", "/"), False),
            ("*", "/login", ("b.test", "/login"), True),
            ("*", "/login", ("b.test", "/login/"), False),
            ("*", "/login", ("b.test", "/logins"), False),
            ("*", "/users/*/orders", ("b.test", "/users/7/orders"), True),
            ("*", "/users/*/orders", ("b.test", "/users/7/8/orders"), False),
            ("*", "/v*/items", ("b.test", "/v12/items"), True),
            ("*", "/v*/items", ("b.test", "/w/items"), False),
            ("*", "/a*a", ("b.test", "/a"), False),
            ("*", "/a*a", ("b.test", "/aa"), True),
            ("*", "/home/**", ("b.test", "/home"), True),
            ("*", "/feed/**", ("b.test", "/feed/x/y"), True),
            ("*", "/home/**", ("b.test", "/homes"), False),
            ("*", "/*", ("b.test", "/x"), True),
            ("*", "/*", ("b.test", "/x/y"), False),
            ("*", "/**", ("b.test", "*"), True),
        ],
    )
    def test_host_and_path_decide(self, host, path, asked, fits):
        assert BusinessRule(host=host, path=path).fits("GET", *asked) is fits

    def test_method_decides_where_one_is_named(self):
        rule = BusinessRule(methods=("POST", "PUT"))
        assert rule.fits("PUT", "a.test", "/")
        assert not rule.fits("GET", "a.test", "/")

    def test_first_rule_that_fits_counts_and_host_case_does_not(self):
        first, second = BusinessRule(host="a.test", path="/login", business="one"), BusinessRule(business="two")
        rules = Rules((first, second))
        assert rules.find("GET", "A.test", "/login") is first
        assert rules.find("GET", "a.test", "/login?x=1".partition("?")[0]) is first
        assert rules.find("GET", "a.test", "/other") is second
        assert Rules((first,)).find("GET", "b.test", "/") is None


class TestPlan:
    def test_preset_is_that_of_its_name_with_the_tries_of_the_rule(self):
        assert BusinessRule(plan="key").preset is presets.KEY
        made = BusinessRule(plan="key", tries={"ip-direct": 2, "original": 1}).preset
        assert (made.ip_direct, made.original, made.attempts) == (2, 1, presets.KEY.attempts)

    def test_consent_to_clear_http_is_one_try_unless_another_number_is_named(self):
        assert BusinessRule(clear=CLEAR).preset.clear == 1
        assert BusinessRule(clear=CLEAR, tries={"clear": 3}).preset.clear == 3
        assert BusinessRule(clear=CLEAR, plan=Preset(name="own", clear=2)).preset.clear == 2

    def test_no_preset_asks_in_clear_or_for_the_original_url_by_itself(self):
        assert {(each.clear, each.original) for each in presets.PRESETS.values()} == {(0, 0)}

    @pytest.mark.parametrize(
        ("fields", "word"),
        [
            ({"host": "A.test"}, "host"),
            ({"host": ""}, "host"),
            ({"host": "a.*"}, "host"),
            ({"host": "a b"}, "host"),
            ({"path": "login"}, "path"),
            ({"path": "/a?b"}, "path"),
            ({"path": "/**/a"}, "path"),
            ({"path": "/a**"}, "path"),
            ({"path": "/" + "a" * limits_means.RULE_PATH_CHARS_MAX}, "path"),
            ({"methods": "GET"}, "methods"),
            ({"methods": ("GE T",)}, "methods"),
            ({"plan": "fast"}, "login, key, ordinary"),
            ({"plan": 5}, "login, key, ordinary"),
            ({"tries": {"pigeon": 1}}, "pigeon"),
            ({"tries": {"original": 4}}, "original"),
            ({"tries": {"direct": True}}, "direct"),
            ({"tries": {"attempts": 0}}, "attempts"),
            ({"tries": {"clear": 1}}, "consent"),
            ({"plan": "login", "clear": CLEAR}, "TLS only"),
            ({"deadline_s": 0}, "deadline_s"),
            ({"deadline_s": "5"}, "deadline_s"),
            ({"parse_wait_s": 1e9}, "parse_wait_s"),
            ({"priority": 10}, "priority"),
            ({"priority": True}, "priority"),
            ({"parse": 5}, "parse"),
            ({"ipv4_first": 1}, "ipv4_first"),
        ],
    )
    def test_rule_that_cannot_hold_is_refused_by_name(self, fields, word):
        with pytest.raises(errors.ConfigError, match=word) as caught:
            BusinessRule(**fields)
        assert "rule for" in str(caught.value)

    @pytest.mark.parametrize(
        ("fields", "word"),
        [({}, "keys"), ({"keys": {"k": b"x"}}, "VerifyKey"), ({"keys": CLEAR.keys, "port": 0}, "port")],
    )
    def test_consent_that_could_never_be_answered_is_refused(self, fields, word):
        with pytest.raises(errors.ConfigError, match=word):
            ClearHttp(**fields)


class TestConfig:
    def test_rules_and_addresses_are_checked_with_the_config(self):
        rule = BusinessRule()
        assert Config(rules=[rule]).rules == (rule,)
        with pytest.raises(errors.ConfigError, match="BusinessRule"):
            Config(rules=({"host": "a.test"},))
        with pytest.raises(errors.ConfigError, match="at most"):
            Config(rules=(rule,) * (limits_means.RULES_MAX + 1))
        with pytest.raises(errors.ConfigError, match="no IP address"):
            Config(addresses={"a.test": ("b.test",)})

    @pytest.mark.parametrize("name", ["clear", "original", "h1", "hedge", "ip-direct"])
    def test_every_means_can_be_switched_off(self, name):
        assert Config(disabled=frozenset({name})).disabled == {name}

    def test_addresses_are_read_in_every_form(self):
        found = check_addresses(
            {"A.test": ("192.0.2.1", "192.0.2.1:8443", "2001:db8::1", "[2001:db8::1]:8443", "192.0.2.1")}, what="x"
        )
        assert found == {
            "a.test": (
                Address("192.0.2.1", 0),
                Address("192.0.2.1", 8443),
                Address("2001:db8::1", 0),
                Address("2001:db8::1", 8443),
            )
        }

    @pytest.mark.parametrize(
        "given",
        [
            ["a.test"],
            {"a.test": "192.0.2.1"},
            {"": ("192.0.2.1",)},
            {"a.test": (5,)},
            {"a.test": ("192.0.2.1:0",)},
            {"a.test": ("192.0.2.1",) * (limits_means.MEANS_ADDRESSES_MAX + 1)},
            {f"{n}.test": () for n in range(limits_means.MEANS_HOSTS_MAX + 1)},
        ],
    )
    def test_addresses_that_are_none_are_refused(self, given):
        with pytest.raises(errors.ConfigError, match="x"):
            check_addresses(given, what="x")

    def test_pinned_and_backup_addresses_of_a_config_follow_those_for_ip_direct(self):
        config = types.SimpleNamespace(
            addresses={"a.test": ("192.0.2.1",)},
            pinned={"b.test": ("192.0.2.2",)},
            backup_addresses={"a.test": ("192.0.2.3", "192.0.2.1")},
        )
        assert known_addresses(**vars(config)) == {
            "a.test": (Address("192.0.2.1", 0), Address("192.0.2.3", 0)),
            "b.test": (Address("192.0.2.2", 0),),
        }
