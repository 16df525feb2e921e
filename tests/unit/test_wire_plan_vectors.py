"""The vectors of dispatch's answers: as the code writes them, and as a JWT library that is not ours reads them."""

import json
import runpy
from pathlib import Path
from typing import Any

import jwt
import msgspec
import pytest

from stormline.wire import jws, plan

FOLDER = Path(__file__).parents[1] / "vectors"
VECTORS: dict[str, Any] = json.loads((FOLDER / "plans.json").read_text(encoding="utf-8"))
KEYS = jws.load_public_keys({VECTORS["key"]["kid"]: VECTORS["key"]["public"]})


def read(name: str, held: plan.Plan | None = None) -> plan.Plan:
    return plan.verify(
        VECTORS["answers"][name], keys=KEYS, app="shop", hosts=VECTORS["hosts"], version_min=7, wall=VECTORS["now"],
        held=held,
    )  # fmt: skip


def test_file_is_what_the_code_writes() -> None:
    made = runpy.run_path(str(FOLDER / "make_plans.py"))["make"]()
    assert (FOLDER / "plans.json").read_text(encoding="utf-8") == made


def test_answers_are_read_as_they_say() -> None:
    held = read("plan")
    assert (held.version, held.digest) == (7, VECTORS["question"]["held"])
    assert (read("unchanged", held).version, read("unchanged", held).hosts) == (9, held.hosts)
    assert json.loads(msgspec.json.encode(read("changes", held))) == VECTORS["after_changes"]
    home = plan.verify_home(
        VECTORS["answers"]["home"], keys=KEYS, app="shop", user="ann", epoch_min=0, wall=VECTORS["now"]
    )
    assert (home.unit, home.epoch) == ("u2", 3)


@pytest.mark.parametrize("name", VECTORS["answers"])
def test_signature_is_right_to_another_reader(name: str) -> None:
    key = next(iter(KEYS.values()))
    found = jwt.api_jws.PyJWS(algorithms=["EdDSA"]).decode_complete(VECTORS["answers"][name], key, algorithms=["EdDSA"])
    assert found["header"] | {"typ": ""} == {"alg": "EdDSA", "kid": "p1", "typ": ""}
    assert json.loads(found["payload"])["app"] == "shop"


def test_question_is_read() -> None:
    assert plan.decode_request(json.dumps(VECTORS["question"]).encode()).changes
