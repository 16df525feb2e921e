"""Upstreams as configured, ids as headers, gates by name."""

import pytest

from stormline.appgw import identity, subjects
from stormline.appgw.port import Identity
from stormline.appgw.upstreams import Book, Place, read_upstreams
from stormline.core import errors
from stormline.core.codes import Code
from stormline.core.values import Address
from stormline.gateway.router import Router


class TestUpstreams:
    def test_upstreams_are_read_with_their_default_ports(self):
        book = Book(
            read_upstreams(
                {
                    "API.shop.example.": "http://127.0.0.1:8707",
                    "pay.example": "https://10.0.0.1/",
                    "v6.example:8443": "http://[::1]:80",
                    "::1": "http://127.0.0.1",
                }
            )
        )
        assert {route.rule.host: route.targets[0].place for route in book} == {
            "api.shop.example": Place("http", Address("127.0.0.1", 8707)),
            "pay.example": Place("https", Address("10.0.0.1", 443)),
            "v6.example:8443": Place("http", Address("::1", 80)),
            "::1": Place("http", Address("127.0.0.1", 80)),
        }

    @pytest.mark.parametrize(
        ("name", "origin"),
        [
            ("a.example", "127.0.0.1:80"),
            ("a.example", "ftp://127.0.0.1"),
            ("a.example", "http://"),
            ("a.example", "http://127.0.0.1/path"),
            ("a.example", "http://localhost:80"),
            ("a.example", "http://127.0.0.1:x"),
            ("a.example:x", "http://127.0.0.1"),
            ("a.example:0", "http://127.0.0.1"),
            ("*.example", "http://127.0.0.1"),
            ("", "http://127.0.0.1"),
        ],
    )
    def test_upstream_malformed_is_a_config_error(self, name, origin):
        with pytest.raises(errors.ConfigError):
            read_upstreams({name: origin})


class TestIdentity:
    def test_ids_stay_distinct_and_cannot_leave_their_header(self):
        names = ["a", "a b", "a%20b", "a\r\nX: y", "ä", "漢", " a", "a:b/c", "\x7f", '"']
        written = [dict(identity.headers(Identity("demo", name, "", "s")))["Stormline-Device"] for name in names]
        assert len(set(written)) == len(names)
        assert all(text.isascii() and text.isprintable() and " " not in text for text in written)
        assert written[0] == "a"

    def test_user_absent_has_no_header(self):
        assert [name for name, _ in identity.headers(Identity("demo", "d", "", "s"))] == [
            "Stormline-App",
            "Stormline-Device",
        ]

    def test_node_subjects_are_safe_tokens(self):
        assert subjects.of_node("u1", ">", "push") == "u.ouyq.node.hy.push"


class TestRouter:
    def test_gate_is_found_by_name_or_the_call_fails(self):
        class Gate:
            name = "one"

            async def handle(self, exchange):
                raise AssertionError

        gate = Gate()
        router = Router([gate])
        assert router.route("one") is gate
        with pytest.raises(errors.CallError) as raised:
            router.route("two")
        assert raised.value.code == Code.CALL_NOT_FOUND
        with pytest.raises(errors.ConfigError):
            Router([gate, gate])
