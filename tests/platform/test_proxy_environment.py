"""A platform started in an environment of proxies: its parts and its commands work, and go to no proxy."""

import json
import socket

import pytest

from stormline.testing.platform import running_platform

pytestmark = pytest.mark.platform

NO_PROXY = ",".join(["fd00:1:2::/64", "[::1]", ".a.test", "", "10.0.0.0/8", *(f"h{n}.test" for n in range(4000))])


def test_platform_in_an_environment_of_proxies_works_and_asks_none(tmp_path, monkeypatch):
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))
        proxy.listen()
        proxy.setblocking(False)
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            for variable in (name, name.lower()):
                monkeypatch.setenv(variable, f"http://u:p%40ss@127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", NO_PROXY)
        monkeypatch.setenv("REQUEST_METHOD", "GET")
        with running_platform(tmp_path / "state") as platform:
            answer = platform.command("get", "https://shop.demo/feed", "--json")
            assert answer.returncode == 0, answer.stderr
            assert json.loads(answer.stdout)["timeline"]["means"] == "long"
            order = platform.command("call", "orders.create", '{"item": 3}', "--json")
            assert order.returncode == 0, order.stderr
            seen = platform.command("apm", "top", "--json")
            assert seen.returncode == 0, seen.stderr
        with pytest.raises(BlockingIOError):
            proxy.accept()
