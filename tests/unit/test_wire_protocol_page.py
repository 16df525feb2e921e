"""The page of the wire protocol says what the code does."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from stormline.core import limits
from stormline.wire import messages as m

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "protocol.md"


@pytest.fixture(scope="module")
def maker() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "make_protocol.py"))


def test_protocol_page_made_parts_are_fresh(maker: dict[str, Any]):
    page = PAGE.read_text(encoding="utf-8")
    assert maker["fill"](page) == page, "stale: run docs/make_protocol.py"


def test_protocol_page_without_a_place_for_a_part_is_refused(maker: dict[str, Any]):
    with pytest.raises(ValueError, match="states"):
        maker["fill"](PAGE.read_text(encoding="utf-8").replace("<!-- made: states -->", ""))


@pytest.mark.parametrize("kind", m.ALL, ids=lambda kind: kind.__name__)
def test_message_docstring_gives_every_field_a_meaning(kind: type[m.Message], maker: dict[str, Any]):
    assert list(maker["meanings"](kind)) == list(kind.__struct_fields__)


def test_protocol_page_shows_the_bytes_that_its_prose_explains():
    page = PAGE.read_text(encoding="utf-8")
    vectors = json.loads((ROOT / "tests" / "vectors" / "protocol.json").read_text(encoding="utf-8"))
    frames = {entry["name"]: entry["frame"] for entry in vectors["messages"] + vectors["readings"]}
    full = frames["hello-smallest"]
    assert f"{full[:8]} {full[8:]}" in page
    assert f"`{full[:8]}` is the length, {int(full[:8], 16)}." in page
    short = frames["hello-without-optional-fields"]
    assert f"`{short[:8]}` `{short[8:]}`" in page


def test_protocol_page_names_every_bound_of_the_frames(maker: dict[str, Any]):
    shown = {name for name, _ in maker["LIMITS"]}
    prefixes = ("FRAME_", "CHUNK_", "CREDIT_", "CALLS_", "CALL_HEADER", "PUSH_BODY", "PUSHES_", "HELLO_", "HEARTBEAT")
    assert {name for name in vars(limits) if name.startswith(prefixes)} <= shown
