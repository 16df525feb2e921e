"""The platform's relay, with every part a real process: found by the plan, and used where nothing else gets through."""

import httpx2
import pytest

import stormline
from stormline.client.config import load_bundle
from stormline.testing.platform import RunningPlatform
from stormline.wire import ohttp

pytestmark = pytest.mark.platform
URL = "https://shop.demo/feed"
"""In no DNS: the demo's origin cannot be asked directly."""


async def test_without_a_name_and_without_the_long_connection_a_request_goes_through_the_relay(
    platform: RunningPlatform,
) -> None:
    config = stormline.Config(
        bundle=load_bundle(platform.state / "bundle.json"), disabled=frozenset({"long"}), trust_env=False
    )
    async with stormline.AsyncClient(config=config, timeout=20) as client:
        response = await client.get(URL)
        record = response.extensions["stormline"].record
    assert response.status_code == 200
    assert record.attempts[-1].means == "relay"
    listed = httpx2.get(f"http://{platform.addresses['relay']}/", trust_env=False)
    assert [key.key_id for key in ohttp.decode_keys(listed.content)] == [1]
