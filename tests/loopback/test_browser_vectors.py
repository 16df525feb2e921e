"""The browser's client, a second implementation of the protocol, held against the published vectors."""

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.loopback

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "protocol.json").read_text(encoding="utf-8"))


def test_browser_reads_and_writes_every_vector_and_refuses_the_invalid(browser: Any) -> None:
    ran = browser.run("vectors.html")
    assert [each for each in ran if each["error"]] == []
    names = {each["name"] for each in ran}
    assert {f"writes {entry['name']}" for entry in VECTORS["messages"]} <= names
    assert {f"reads {entry['name']}" for entry in VECTORS["messages"] + VECTORS["readings"]} <= names
    assert {f"refuses {entry['name']}" for entry in VECTORS["invalid"] if entry["role"] == "client"} <= names
