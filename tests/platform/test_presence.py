"""Who is online, calls of devices and keys of businesses, by the commands, on a whole platform."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from stormline.client.api import AsyncClient
from stormline.client.config import Config, load_bundle
from stormline.core.values import Secret
from stormline.net.clock import SystemClock
from stormline.testing.platform import RunningPlatform

pytestmark = pytest.mark.platform

PATIENCE_S = 30.0


def _json(platform: RunningPlatform, *arguments: str) -> dict[str, Any]:
    answer = platform.command(*arguments, "--json")
    assert (answer.returncode, answer.stderr) == (0, "")
    shown: dict[str, Any] = json.loads(answer.stdout)
    return shown


def _until(condition: Callable[[], bool], what: str) -> None:
    clock = SystemClock()
    end = clock.monotonic() + PATIENCE_S
    while not condition():
        assert clock.monotonic() < end, f"not in time: {what}"


@contextlib.contextmanager
def _device(platform: RunningPlatform, device: str, user: str) -> Iterator[None]:
    """Have a device with a handler: the client as an app uses it, in a thread of its own."""
    token = _json(platform, "token", "--device", device, "--user", user)["token"]
    bundle = load_bundle(str(platform.state / "bundle.json"))
    config = Config(
        bundle=bundle,
        token=Secret(token),
        report=False,
        network="cell",
        app_version="4.2",
        tags=("kiosk",),
        network_probes=False,
    )
    online, leave = threading.Event(), threading.Event()

    async def be() -> None:
        async with AsyncClient(config=config) as client, client.channel() as channel:
            channel.serve("door.open", lambda params: {"opened": params})
            await channel.wait_connected()
            online.set()
            await asyncio.to_thread(leave.wait)

    thread = threading.Thread(target=lambda: asyncio.run(be()))
    thread.start()
    try:
        assert online.wait(PATIENCE_S)
        yield
    finally:
        leave.set()
        thread.join()


class TestPresence:
    def test_device_is_found_counted_called_and_remembered(self, platform: RunningPlatform) -> None:
        with _device(platform, "p-1", "ann"):
            shown = _json(platform, "presence", "p-1")
            assert (shown["online"], shown["user"], shown["node"], shown["unit"]) == (True, "ann", "n1", "u1")
            assert (shown["network"], shown["version"], shown["tags"]) == ("cell", "4.2", ["kiosk"])
            _until(lambda: bool(_json(platform, "presence", "--user", "ann")["devices"]), "the user is known")
            assert [one["device"] for one in _json(platform, "presence", "--tag", "kiosk")["devices"]] == ["p-1"]
            assert _json(platform, "presence", "--version", "9")["devices"] == []
            counts = _json(platform, "presence", "--counts")
            assert counts["units"]["u1"]["versions"]["4.2"] == 1
            assert _json(platform, "call-device", "p-1", "door.open", '{"n": 1}') == {"result": {"opened": {"n": 1}}}
            answer = platform.command("call-device", "p-1", "door.close")
            assert answer.returncode == 1
            assert "HTTP 405" in answer.stderr
            for arguments in ((), ("p-1",), ("--user", "ann"), ("--counts",)):
                answer = platform.command("presence", *arguments)
                assert (answer.returncode, answer.stderr) == (0, "")
                assert "4.2" in answer.stdout
        _until(lambda: not _json(platform, "presence", "p-1")["online"], "the device has left")
        assert _json(platform, "presence", "p-1")["seen_ms"] > 0
        assert "offline" in platform.command("presence", "--user", "ann").stdout
        answer = platform.command("call-device", "p-1", "door.open")
        assert answer.returncode == 1
        assert "HTTP 404" in answer.stderr

    def test_two_questions_at_once_are_refused(self, platform: RunningPlatform) -> None:
        answer = platform.command("presence", "p-1", "--counts")
        assert answer.returncode == 1
        assert answer.stderr.startswith("error: expected one of")


class TestApiKeys:
    def test_key_works_until_it_is_revoked(self, platform: RunningPlatform) -> None:
        made = _json(platform, "apikey", "make", "--scope", "presence", "--label", "till")
        url = f"http://{platform.addresses['admin']}/v1/presence/counts"

        def status() -> int:
            headers = {"authorization": f"Bearer {made['key']}"}
            return httpx2.get(url, headers=headers, timeout=PATIENCE_S, trust_env=False).status_code

        assert status() == 200
        listed = platform.command("apikey", "list")
        assert "till" in listed.stdout
        assert made["key"] not in listed.stdout
        assert platform.command("apikey", "revoke", made["id"]).returncode == 0
        assert status() == 401
        assert "404" in platform.command("apikey", "revoke", made["id"]).stderr
        assert "HTTP 400" in platform.command("apikey", "make", "--scope", "everything").stderr
