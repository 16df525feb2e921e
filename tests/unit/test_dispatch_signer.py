"""Signed answers are made once and given out often, within bounds; and keys on disk."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.dispatch.rules import RuleSet, check
from stormline.dispatch.signer import PlanSigner, read_signing_key
from stormline.wire import plan as wire_plan
from stormline.wire.jws import SigningKey
from stormline.wire.plan import Endpoint, HostPlan, Plan, PlanRequest

NOW = 1_800_000_000.0
KEY = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))), "plan-1")
KEYS = {"plan-1": KEY.key.public_key()}


def rules(version: int = 1) -> RuleSet:
    host = HostPlan(endpoints=(Endpoint(host="127.0.0.1", port=8702),))
    return check(
        RuleSet(
            version=version,
            hosts={"a.example": host},
            apps={"shop": frozenset({"a.example"}), "bank": frozenset({"a.example"})},
        )
    )


def ask(*hosts: str, app: str = "shop", version: int = 0) -> PlanRequest:
    return PlanRequest(app=app, hosts=hosts, version=version)


def read(text: bytes, wall: float = NOW, app: str = "shop") -> Plan:
    return wire_plan.verify(text, keys=KEYS, app=app, hosts=(), version_min=0, wall=wall)


def test_answer_verifies_and_holds_the_plan() -> None:
    plan = read(PlanSigner(KEY).answer(ask("a.example", "b.example"), rules(), NOW))
    assert set(plan.hosts) == {"a.example"}
    assert plan.unknown == ("b.example",)


def test_equal_question_within_the_period_gets_the_same_bytes() -> None:
    signer = PlanSigner(KEY)
    first = signer.answer(ask("a.example", "b.example"), rules(), NOW)
    assert signer.answer(ask("B.example.", "a.example", version=1), rules(), NOW + limits.PLAN_REFRESH_S - 1) is first
    assert len(signer) == 1


@pytest.mark.parametrize("wall", [NOW + limits.PLAN_REFRESH_S, NOW + 1e6, NOW - 1, NOW - 1e6])
def test_after_the_period_or_a_step_of_the_clock_it_is_signed_again(wall: float) -> None:
    signer = PlanSigner(KEY)
    first = signer.answer(ask("a.example"), rules(), NOW)
    again = signer.answer(ask("a.example"), rules(), wall)
    assert again != first
    assert read(again, wall).issued_at == int(wall)
    assert (len(signer), signer.bytes_held) == (1, len(again))


def test_new_rules_are_answered_at_once() -> None:
    signer = PlanSigner(KEY)
    assert read(signer.answer(ask("a.example"), rules(1), NOW)).version == 1
    assert read(signer.answer(ask("a.example"), rules(2), NOW)).version == 2


def test_apps_do_not_share_answers() -> None:
    signer = PlanSigner(KEY)
    signer.answer(ask("a.example"), rules(), NOW)
    assert read(signer.answer(ask("a.example", app="bank"), rules(), NOW), app="bank").app == "bank"


def test_refusals_are_not_remembered() -> None:
    signer = PlanSigner(KEY)
    for request in (ask(app="none"), ask("a b")):
        with pytest.raises(errors.RequestRefused):
            signer.answer(request, rules(), NOW)
    assert (len(signer), signer.bytes_held) == (0, 0)


def test_the_answer_not_asked_for_longest_goes_first() -> None:
    signer = PlanSigner(KEY, entries_max=2)
    a = signer.answer(ask("a.example"), rules(), NOW)
    signer.answer(ask("b.example"), rules(), NOW)
    signer.answer(ask("a.example"), rules(), NOW)
    signer.answer(ask("c.example"), rules(), NOW)
    assert signer.answer(ask("a.example"), rules(), NOW) is a
    assert len(signer) == 2


def test_answer_larger_than_the_memory_is_given_and_not_kept() -> None:
    signer = PlanSigner(KEY, bytes_max=10)
    assert read(signer.answer(ask("a.example"), rules(), NOW)).app == "shop"
    assert (len(signer), signer.bytes_held) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(-20, 60)), max_size=60))
def test_memory_stays_within_its_bounds(steps: list[tuple[int, float]]) -> None:
    signer, wall = PlanSigner(KEY, entries_max=5, bytes_max=2500), NOW
    for host, step in steps:
        wall += step
        plan = read(signer.answer(ask(f"h{host}.example"), rules(), wall), wall)
        assert wall - limits.PLAN_REFRESH_S < plan.issued_at <= wall
        assert len(signer) <= 5
        assert 0 <= signer.bytes_held <= 2500


def pem(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey, password: bytes = b"") -> bytes:
    how = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)


class TestKeyFile:
    def test_key_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "plan.pem"
        path.write_bytes(pem(KEY.key))
        assert read_signing_key(path).public_key() == KEY.key.public_key()

    @pytest.mark.parametrize(
        "data",
        [b"", b"\x00", pem(KEY.key)[:60], pem(ec.generate_private_key(ec.SECP256R1())), pem(KEY.key, b"secret")],
        ids=["empty", "zero", "half", "p-256", "with-password"],
    )
    def test_what_is_no_such_key_is_refused_by_path(self, tmp_path: Path, data: bytes) -> None:
        path = tmp_path / "plan.pem"
        path.write_bytes(data)
        with pytest.raises(errors.ConfigError, match=r"plan\.pem: not an? "):
            read_signing_key(path)

    def test_missing_file_and_folder_are_refused_by_path(self, tmp_path: Path) -> None:
        for path in (tmp_path / "none.pem", tmp_path):
            with pytest.raises(errors.ConfigError, match=r"cannot read the signing key"):
                read_signing_key(path)
