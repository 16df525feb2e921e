"""Ports: free ones found, busy ones named, none given twice."""

import random
import socket

import pytest

from stormline.assembly import ports
from stormline.core import errors

pytestmark = pytest.mark.loopback

HOST = "127.0.0.1"


class _Rng(random.Random):
    def token_bytes(self, size: int) -> bytes:
        return self.randbytes(size)


@pytest.fixture(name="rng")
def _rng() -> _Rng:
    """A seeded source of chance."""
    return _Rng(7)


def _hosts(*parts: str) -> dict[str, str]:
    return dict.fromkeys(parts, HOST)


def test_choose_zero_gives_free_ports_that_differ(rng: _Rng) -> None:
    wanted = dict.fromkeys("abcdef", 0)
    chosen = ports.choose(_hosts(*wanted), wanted, rng=rng)
    assert len(set(chosen.values())) == 6
    for port in chosen.values():
        socket.create_server((HOST, port)).close()


def test_choose_drawn_ports_lie_below_the_range_of_outgoing_connections(rng: _Rng) -> None:
    chosen = ports.choose(_hosts("a"), {"a": 0}, rng=rng)
    assert 16_384 <= chosen["a"] < 32_768


def test_choose_same_chance_after_a_port_was_taken_gives_another() -> None:
    first = ports.choose(_hosts("a"), {"a": 0}, rng=_Rng(1))["a"]
    with socket.create_server((HOST, first)):
        assert ports.choose(_hosts("a"), {"a": 0}, rng=_Rng(1))["a"] != first


def test_choose_drawn_port_avoids_a_wanted_one() -> None:
    first = ports.choose(_hosts("a"), {"a": 0}, rng=_Rng(1))["a"]
    chosen = ports.choose(_hosts("a", "b"), {"a": 0, "b": first}, rng=_Rng(1))
    assert chosen["b"] == first
    assert chosen["a"] != first


def test_choose_busy_port_names_part_address_and_setting(rng: _Rng) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(errors.PlatformError) as caught:
            ports.choose(_hosts("apm"), {"apm": port}, rng=rng)
    assert f"apm: cannot listen on 127.0.0.1:{port}: Address already in use" in str(caught.value)
    assert "STORMLINE_PORTS__APM" in str(caught.value)


def test_choose_one_port_for_two_parts_is_refused(rng: _Rng) -> None:
    port = ports.choose(_hosts("a"), {"a": 0}, rng=rng)["a"]
    with pytest.raises(errors.PlatformError, match="Address already in use"):
        ports.choose(_hosts("a", "b"), {"a": port, "b": port}, rng=rng)


def test_choose_part_that_does_not_run_keeps_its_port_untested(rng: _Rng) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        assert ports.choose(_hosts("a"), {"a": 0, "b": port}, rng=rng)["b"] == port


def test_choose_host_that_is_not_ours_names_it(rng: _Rng) -> None:
    with pytest.raises(errors.PlatformError, match=r"a: cannot listen on 192\.0\.2\.1"):
        ports.choose({"a": "192.0.2.1"}, {"a": 0}, rng=rng)


def test_choose_works_on_ipv6(rng: _Rng) -> None:
    port = ports.choose({"a": "::1"}, {"a": 0}, rng=rng)["a"]
    socket.create_server(("::1", port), family=socket.AF_INET6).close()
