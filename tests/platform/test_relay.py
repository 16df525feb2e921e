"""The platform's relay, with every part a real process: found by the plan, and used where nothing else gets through."""

import json
import time
from typing import Any

import httpx2
import msgspec
import pytest

import stormline
from stormline.assembly import layout
from stormline.client.config import load_bundle
from stormline.core import limits
from stormline.net.clock import SystemClock
from stormline.testing.platform import RunningPlatform, running_platform
from stormline.wire import jws, ohttp

pytestmark = pytest.mark.platform
ORDERS = "https://shop.demo/orders"
URL = "https://shop.demo/feed"
"""In no DNS: the demo's origin cannot be asked directly."""


async def test_without_a_name_and_without_the_long_connection_a_request_goes_through_the_relay(
    platform: RunningPlatform,
) -> None:
    async with _client(platform) as client:
        response = await client.get(URL)
        record = response.extensions["stormline"].record
    assert response.status_code == 200
    assert record.attempts[-1].means == "relay"
    listed = httpx2.get(f"http://{platform.addresses['relay']}/", trust_env=False)
    assert [key.key_id for key in ohttp.decode_keys(listed.content)] == [1]


async def test_first_request_of_a_client_whose_bundle_is_all_it_has_goes_through_the_relay(
    platform: RunningPlatform,
) -> None:
    """No scheduling centre answers it, and its name is in no DNS."""
    bundle = load_bundle(platform.state / "bundle.json")
    assert bundle is not None
    lost = msgspec.structs.replace(bundle, dispatch=("127.0.0.1:1",), centres=())
    async with stormline.AsyncClient(config=stormline.Config(bundle=lost, trust_env=False), timeout=20) as client:
        response = await client.get(URL)
    assert response.status_code == 200
    assert response.extensions["stormline"].record.attempts[-1].means == "relay"


def _client(platform: RunningPlatform) -> stormline.AsyncClient:
    config = stormline.Config(
        bundle=load_bundle(platform.state / "bundle.json"), disabled=frozenset({"long"}), trust_env=False
    )
    return stormline.AsyncClient(config=config, timeout=20)


def _rotate(platform: RunningPlatform) -> list[dict[str, Any]]:
    answer = platform.command("relay", "rotate", "--json")
    assert answer.returncode == 0, answer.stderr
    keys: list[dict[str, Any]] = json.loads(answer.stdout)["keys"]
    return keys


def _rules(platform: RunningPlatform) -> dict[str, Any]:
    rules: dict[str, Any] = json.loads(platform.command("dispatch", "show", "--json").stdout)
    return rules


def _key_ids(rules: dict[str, Any]) -> list[int]:
    [relay] = rules["hosts"]["shop.demo"]["policy"]["relays"]
    return [key.key_id for key in ohttp.decode_keys(jws.b64url_decode(relay["keys"]))]


def _key_ids_become(platform: RunningPlatform, wanted: list[int]) -> None:
    ends_at = SystemClock().monotonic() + 30
    while (found := _key_ids(_rules(platform))) != wanted:
        assert SystemClock().monotonic() < ends_at, found
        time.sleep(0.1)


async def test_a_rotated_key_is_in_the_plans_and_old_rules_cannot_bring_the_old_one_back(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with running_platform(tmp_path_factory.mktemp("rotation") / "state") as platform:
        async with _client(platform) as client:
            assert (await client.get(URL)).status_code == 200
            before = _rules(platform)
            assert _key_ids(before) == [1]

            new, old = _rotate(platform)
            assert (new["id"], new["until"], old["id"]) == (2, None, 1)
            assert old["until"] >= SystemClock().wall() + limits.PLAN_LIFE_S
            assert _key_ids(_rules(platform)) == [2, 1]
            bundle = load_bundle(platform.state / "bundle.json")
            assert bundle is not None
            assert [key.key_id for key in ohttp.decode_keys(jws.b64url_decode(bundle.relays[0].keys))] == [2, 1]
            # Who holds a plan of before is served as well.
            assert (await client.get(URL)).extensions["stormline"].record.attempts[-1].means == "relay"

            file = platform.state / "old.json"
            file.write_text(json.dumps(before | {"disabled": ["h3"]}))
            done = platform.command("dispatch", "set", str(file), "--over", "--force")
            assert done.returncode == 0, done.stderr
            after = _rules(platform)
            assert (after["disabled"], _key_ids(after)) == (["h3"], [2, 1])
            done = platform.command("dispatch", "rollback", str(before["version"]))
            assert done.returncode == 0, done.stderr
            _key_ids_become(platform, [2, 1])

            # The old key's time is over: who still has its plan asks for a newer one and is served within the call.
            _end_old_keys(platform)
            response = await client.post(ORDERS, json={"item": 3})
            assert response.status_code == 201, response.text
            [attempt] = [each for each in response.extensions["stormline"].record.attempts if each.means == "relay"]
            assert attempt.failure == ""


def _end_old_keys(platform: RunningPlatform) -> None:
    """Have the time of the keys that were rotated out be over, and wait until the relay knows."""
    path = layout.Layout(platform.state).relay_key
    newest, *others = path.read_text().splitlines()
    path.write_text("\n".join([newest, *(f"{line.rpartition(' ')[0]} 1" for line in others)]))
    ends_at = SystemClock().monotonic() + 30
    while len(_listed(platform)) != 1:
        assert SystemClock().monotonic() < ends_at
        time.sleep(0.1)


def _listed(platform: RunningPlatform) -> list[int]:
    answer = httpx2.get(f"http://{platform.addresses['relay']}/", trust_env=False)
    return [key.key_id for key in ohttp.decode_keys(answer.content)]
