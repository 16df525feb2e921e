"""Signed answers are made once and given out often, within bounds; and keys on disk."""

from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from stormline.core import errors
from stormline.core import limits_platform as limits
from stormline.dispatch.nearest import Measures
from stormline.dispatch.rules import Network, Region, RuleSet, check
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


def test_the_answer_that_was_signed_first_goes_first() -> None:
    signer = PlanSigner(KEY, entries_max=2)
    a = signer.answer(ask("a.example"), rules(), NOW)
    b = signer.answer(ask("b.example"), rules(), NOW)
    signer.answer(ask("c.example"), rules(), NOW)
    assert signer.answer(ask("b.example"), rules(), NOW) is b
    assert signer.answer(ask("a.example"), rules(), NOW + 1) != a
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


class TestHeld:
    """What is answered to who says what is held."""

    def held(self, signer: PlanSigner, at: RuleSet) -> Plan:
        return read(signer.answer(ask("a.example", "b.example"), at, NOW))

    def question(self, plan: Plan, **change: object) -> PlanRequest:
        asked = ask("a.example", "b.example", version=plan.version)
        return msgspec.structs.replace(asked, held=plan.digest, **change)

    def test_same_content_under_a_new_version_is_unchanged_and_small(self) -> None:
        signer = PlanSigner(KEY)
        plan = self.held(signer, rules(1))
        text = signer.answer(self.question(plan), rules(2), NOW + 100)
        assert len(text) < 450
        now = wire_plan.verify(
            text, keys=KEYS, app="shop", hosts=["a.example", "b.example"], version_min=1, wall=NOW + 100, held=plan
        )
        assert (now.version, now.hosts, now.issued_at) == (2, plan.hosts, int(NOW) + 100)
        assert signer.answer(self.question(plan), rules(2), NOW + 101) is text

    def test_another_centre_confirms_it_too(self) -> None:
        plan = self.held(PlanSigner(KEY), rules(1))
        assert len(PlanSigner(KEY).answer(self.question(plan), rules(1), NOW)) < 450

    def test_changes_are_sent_to_who_can_read_them_alone(self) -> None:
        signer = PlanSigner(KEY)
        plan = self.held(signer, many(1))
        whole = signer.answer(self.question(plan), many(2), NOW)
        part = signer.answer(self.question(plan, changes=True), many(2), NOW)
        assert read(whole).version == 2
        assert len(part) < len(whole) / 2
        now = wire_plan.verify(part, keys=KEYS, app="shop", hosts=["a.example"], version_min=1, wall=NOW, held=plan)
        assert now == read(whole)
        stranger = PlanSigner(KEY).answer(self.question(plan, changes=True), many(2), NOW)
        assert read(stranger) == read(whole)

    def test_what_nobody_held_gets_a_whole_plan(self) -> None:
        asked = msgspec.structs.replace(ask("a.example"), held="nonsense", changes=True)
        assert read(PlanSigner(KEY).answer(asked, rules(), NOW)).version == 1


class Standing:
    """Endpoints by their health."""

    def __init__(self) -> None:
        self.revision = 0
        self.down: set[str] = set()

    def __call__(self, endpoints: tuple[Endpoint, ...]) -> tuple[Endpoint, ...]:
        return tuple(each for each in endpoints if each.host not in self.down) or endpoints


class TestPlacement:
    RULES = check(
        RuleSet(
            version=1,
            hosts={"a.example": HostPlan(endpoints=tuple(Endpoint(host=f"192.0.2.{n}", port=1) for n in range(1, 4)))},
            apps={"shop": frozenset({"a.example"})},
            regions={"eu": Region(unit="u1")},
            networks={"10.0.0.0/8": Network(region="eu")},
        )
    )

    def first(self, signer: PlanSigner, wall: float = NOW, **change: object) -> str:
        asked = msgspec.structs.replace(ask("a.example"), **change)
        return read(signer.answer(asked, self.RULES, wall), wall).hosts["a.example"].endpoints[0].host

    def test_signature_is_shared_within_a_group_and_devices_are_spread(self) -> None:
        signer = PlanSigner(KEY)
        firsts = {self.first(signer, device=f"d{n}") for n in range(300)}
        assert firsts == {"192.0.2.1", "192.0.2.2", "192.0.2.3"}
        assert len(signer) <= limits.PLACEMENT_BUCKETS
        assert self.first(signer, device="d7") == self.first(PlanSigner(KEY), NOW + 999, device="d7")

    def test_health_is_obeyed_at_once_and_never_leaves_nothing(self) -> None:
        standing = Standing()
        signer = PlanSigner(KEY, standing=standing)
        gone = self.first(signer, device="d")
        standing.down, standing.revision = {gone}, 1
        assert self.first(signer, device="d") != gone
        standing.down, standing.revision = {f"192.0.2.{n}" for n in range(1, 4)}, 2
        assert self.first(signer, device="d") == gone

    def test_new_measures_are_obeyed_at_once(self) -> None:
        signer = PlanSigner(KEY)
        bad = self.first(signer, device="d")
        signer.measures = Measures(quality={Endpoint(host=bad, port=1): 0.1}, revision=1)
        assert self.first(signer, device="d") != bad


class TestKeys:
    NEXT = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(32)), "plan-2")

    def test_all_keys_are_told_and_each_client_is_answered_under_one_it_trusts(self) -> None:
        signer = PlanSigner(KEY, others=(self.NEXT,))
        plan = read(signer.answer(ask("a.example"), rules(), NOW))
        assert plan.keys == {"plan-1": KEY.public_text, "plan-2": self.NEXT.public_text}
        only_next = msgspec.structs.replace(ask("a.example"), kids=("plan-2",))
        text = signer.answer(only_next, rules(), NOW)
        keys = {"plan-2": self.NEXT.key.public_key()}
        assert wire_plan.verify(text, keys=keys, app="shop", hosts=(), version_min=0, wall=NOW).keys == plan.keys
        assert signer.key_for(("other",)) is KEY

    def test_without_a_rotation_no_key_is_told(self) -> None:
        assert read(PlanSigner(KEY).answer(ask("a.example"), rules(), NOW)).keys == {}


def many(version: int) -> RuleSet:
    """Ten hosts, of which the first is elsewhere in each version."""
    hosts = {f"{name}.example": HostPlan(endpoints=(Endpoint(host="192.0.2.1", port=1),)) for name in "abcdefghij"}
    hosts["a.example"] = HostPlan(endpoints=(Endpoint(host=f"192.0.2.{version}", port=1),))
    apps = {"shop": frozenset(hosts)}
    return check(RuleSet(version=version, hosts=hosts, apps=apps, preload={"shop": tuple(hosts)}))


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
