"""What a user says, with every part a real process: by the APM's own address, and through the gateway."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import stormline
from stormline.client.config import load_bundle
from stormline.client.outside import REAL
from stormline.core.values import Address
from stormline.net.stream import TcpStream
from stormline.testing.platform import RunningPlatform

pytestmark = pytest.mark.platform


@pytest.mark.parametrize("way", ["apm", "gateway"])
async def test_feedback_is_read_by_the_operator_with_the_failures_before_it(
    platform: RunningPlatform, tmp_path: Path, way: str
) -> None:
    async def open_tcp(address: Address) -> TcpStream:
        if way == "gateway" and address == platform.addresses["apm"]:
            raise ConnectionRefusedError(111, "Connection refused")
        return await REAL.open_tcp(address)

    config = stormline.Config(
        bundle=load_bundle(platform.state / "bundle.json"), store=tmp_path, report=False, trust_env=False
    )
    async with stormline.AsyncClient(config=config, outside=replace(REAL, open_tcp=open_tcp), timeout=20) as client:
        assert (await client.get("https://shop.demo/no-such-page")).status_code == 404
        said = await client.feedback(f"by {way}")
    assert (said.state, said.reason) == ("sent", "")
    listed = platform.command("apm", "feedback", "--json")
    assert {each["id"]: each["text"] for each in json.loads(listed.stdout)["feedback"]}[said.id] == f"by {way}"
    shown = platform.command("apm", "feedback", said.id, "--out", str(tmp_path / "log"))
    assert f"by {way}" in shown.stdout
    assert "FAILED GET shop.demo/no-such-page: http.404, status 404" in shown.stdout
    again = platform.command("netlog", "show", "--dir", str(tmp_path / "log"), "--failures", "--json")
    assert json.loads(again.stdout.splitlines()[0])["call"]["path"] == "/no-such-page"
    assert platform.command("apm", "feedback", "b" * 26).returncode == 1
