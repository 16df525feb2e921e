"""What holds for a request, and the answers to who holds a plan already."""

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.core import errors, limits
from stormline.wire import jws, plan
from stormline.wire.plan import Endpoint, Home, HostPlan, PathPlan, Plan, PlanRequest, Policy, Unchanged, policy_for

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEYS = {"p1": KEY.public_key()}
NOW = 1_800_000_000
HOSTS = ("a.example", "b.example")
AT = HostPlan(endpoints=(Endpoint(host="192.0.2.1", port=443, carrier="h2", region="eu"),))
ELSEWHERE = HostPlan(endpoints=(Endpoint(host="192.0.2.2", port=443, carrier="h2"),))


def whole(version: int = 7, issued_at: int = NOW, **change: object) -> Plan:
    made = Plan(
        app="shop",
        version=version,
        issued_at=issued_at,
        expires_at=issued_at + 3600,
        hosts={"a.example": AT, "b.example": AT},
    )
    made = msgspec.structs.replace(made, **change)
    return msgspec.structs.replace(made, digest=plan.content_digest(made))


HELD = whole()


def check(text: str, held: Plan | None = HELD, **change: object) -> Plan:
    arguments = {"keys": KEYS, "app": "shop", "hosts": HOSTS, "version_min": 7, "wall": NOW} | change
    return plan.verify(text, held=held, **arguments)  # type: ignore[arg-type]


def rejection(text: str, held: Plan | None = HELD, **change: object) -> str:
    with pytest.raises(errors.AnswerRejected) as caught:
        check(text, held, **change)
    return caught.value.reason


def confirmed(**change: object) -> str:
    fields = {
        "app": "shop",
        "version": 9,
        "issued_at": NOW,
        "expires_at": NOW + 600,
        "held": HELD.digest,
        "asked": plan.question_digest("shop", HOSTS),
    }
    return plan.sign_unchanged(Unchanged(**(fields | change)), key=KEY, kid="p1")  # type: ignore[arg-type]


def changed(now: Plan, base: Plan = HELD) -> str:
    return plan.sign(plan.changes(plan.host_digests(base), base.digest, now), key=KEY, kid="p1")


class TestPolicy:
    def test_host_without_policy_leaves_all_to_the_client(self) -> None:
        assert policy_for(HostPlan()) == Policy()

    def test_first_path_that_fits_counts(self) -> None:
        host = HostPlan(
            paths=(
                PathPlan(path="/pay/*", methods=("POST",), policy=Policy(preset="key")),
                PathPlan(path="/pay/**", policy=Policy(preset="ordinary")),
                PathPlan(policy=Policy(preset="login")),
            )
        )
        asked = [("POST", "/pay/1"), ("GET", "/pay/1"), ("POST", "/pay/1/2"), ("GET", "/other")]
        assert [policy_for(host, *each).preset for each in asked] == ["key", "ordinary", "ordinary", "login"]

    def test_path_is_laid_over_the_host_value_by_value(self) -> None:
        host = HostPlan(
            connect_timeout_s=1.0,
            deadline_s=9.0,
            policy=Policy(tries={"direct": 2, "clear": 1}, deadline_s=5.0, disabled=("h3",), clear=True, urgency=3),
            paths=(PathPlan(policy=Policy(tries={"clear": 0}, clear=False, disabled=("long",), urgency=0)),),
        )
        assert policy_for(host) == Policy(
            tries={"direct": 2, "clear": 0},
            deadline_s=5.0,
            connect_timeout_s=1.0,
            disabled=("h3", "long"),
            clear=False,
            urgency=0,
        )

    @pytest.mark.parametrize(
        ("condition", "fits"),
        [
            (PathPlan(query={"v": "2"}), True),
            (PathPlan(query={"v": "3"}), False),
            (PathPlan(query={"v": None, "w": None}), False),
            (PathPlan(headers={"x-Plan": "gold"}), True),
            (PathPlan(headers={"x-plan": None}), True),
            (PathPlan(headers={"x-plan": "GOLD"}), False),
            (PathPlan(business="home"), True),
            (PathPlan(business="pay"), False),
            (PathPlan(query={"v": "1"}, headers={"X-PLAN": "gold"}, business="home"), True),
            (PathPlan(query={"v": "1"}, headers={"none": None}), False),
        ],
    )
    def test_every_condition_that_is_set_must_hold(self, condition: PathPlan, fits: bool) -> None:
        host = HostPlan(paths=(msgspec.structs.replace(condition, policy=Policy(urgency=1)),))
        found = policy_for(
            host, query=iter([("v", "1"), ("v", "2")]), headers=iter([("X-Plan", "gold")]), business="home"
        )
        assert (found.urgency == 1) is fits


class TestUnchanged:
    def test_plan_held_lives_on_under_the_new_version(self) -> None:
        got = check(confirmed())
        assert got == msgspec.structs.replace(HELD, version=9, issued_at=NOW, expires_at=NOW + 600)
        assert len(confirmed()) < 450

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"app": "bank"}, "wrong-app"),
            ({"held": "x"}, "wrong-base"),
            ({"asked": plan.question_digest("shop", ["a.example"])}, "wrong-base"),
            ({"version": 6}, "stale-version"),
            ({"expires_at": NOW - 600}, "expired"),
            ({"issued_at": NOW + 600}, "not-yet-valid"),
        ],
    )
    def test_what_confirms_something_else_is_rejected(self, change: dict[str, object], reason: str) -> None:
        assert rejection(confirmed(**change)) == reason

    def test_without_a_plan_or_its_digest_it_is_rejected(self) -> None:
        assert rejection(confirmed(), None) == "signature"
        assert rejection(confirmed(held=""), msgspec.structs.replace(HELD, digest="")) == "wrong-base"

    def test_altered_truncated_or_of_another_key_is_rejected(self) -> None:
        text = confirmed()
        other = jws.sign(b"{}", key=Ed25519PrivateKey.from_private_bytes(bytes(32)), kid="p1", typ=plan.TYP_UNCHANGED)
        for each in (text[:-1], text[:90], text.replace(".", ".A", 1), other):
            assert rejection(each) == "signature"
        assert rejection(jws.sign(b"[]", key=KEY, kid="p1", typ=plan.TYP_UNCHANGED)) == "malformed"


class TestChanges:
    def test_only_what_differs_travels_and_the_whole_comes_out(self) -> None:
        now = whole(version=8, hosts={"a.example": AT, "b.example": ELSEWHERE}, disabled=("h3",))
        sent = plan.changes(plan.host_digests(HELD), HELD.digest, now)
        assert set(sent.hosts) == {"b.example"}
        assert check(changed(now)) == now

    def test_host_that_went_is_gone_or_unknown(self) -> None:
        now = whole(version=8, hosts={"a.example": AT}, unknown=("b.example",))
        assert check(changed(now)) == now
        fewer = whole(version=8, hosts={"a.example": AT})
        assert check(changed(fewer), hosts=("a.example",)) == fewer
        assert rejection(changed(fewer)) == "malformed"

    def test_other_base_or_none_is_rejected(self) -> None:
        now = whole(version=8, hosts={"a.example": ELSEWHERE, "b.example": AT})
        assert rejection(changed(now), now) == "wrong-base"
        assert rejection(changed(now), None) == "signature"

    def test_whole_plan_with_a_base_is_rejected(self) -> None:
        with_base = msgspec.structs.replace(HELD, base="x")
        assert rejection(jws.sign(msgspec.json.encode(with_base), key=KEY, kid="p1", typ=plan.TYP)) == "malformed"

    def test_digest_is_of_the_content_alone(self) -> None:
        assert whole(version=99, issued_at=NOW + 5).digest == HELD.digest
        assert whole(disabled=("h3",)).digest != HELD.digest


class TestTime:
    def test_wrong_device_clock_is_borne_where_the_server_says_the_time(self) -> None:
        text = plan.sign(HELD, key=KEY, kid="p1")
        for wrong in (0.0, NOW - 1e8, NOW + 1e8):
            assert check(text, wall=wrong, server_wall=NOW + 1.0) == HELD
            with pytest.raises(errors.AnswerRejected):
                check(text, wall=wrong)

    def test_expired_plan_from_disk_is_taken_where_that_is_asked_for(self) -> None:
        text = plan.sign(HELD, key=KEY, kid="p1")
        assert check(text, wall=NOW + 1e6, expired_ok=True) == HELD
        assert rejection(text, wall=NOW - 1e6, expired_ok=True) == "not-yet-valid"


class TestKeys:
    def test_next_key_is_told_by_a_plan_and_then_believed(self) -> None:
        following = jws.SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(32)), "p2")
        told = check(plan.sign(whole(keys={"p2": following.public_text}), key=KEY, kid="p1"), None)
        later = plan.sign(HELD, key=following.key, kid="p2")
        assert rejection(later, None) == "unknown-key"
        assert check(later, None, keys=KEYS | jws.load_public_keys(told.keys)) == HELD


class TestHome:
    HOME = Home(app="shop", user="ann", unit="u2", epoch=3, issued_at=NOW, expires_at=NOW + 60)

    def read(self, **change: object) -> Home:
        arguments = {"keys": KEYS, "app": "shop", "user": "ann", "epoch_min": 3, "wall": NOW} | change
        return plan.verify_home(plan.sign_home(self.HOME, key=KEY, kid="p1"), **arguments)  # type: ignore[arg-type]

    def test_home_is_read(self) -> None:
        assert self.read() == self.HOME

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"app": "bank"}, "wrong-app"),
            ({"user": "bob"}, "malformed"),
            ({"epoch_min": 4}, "stale-version"),
            ({"wall": NOW + 60 + limits.CLOCK_SKEW_S}, "expired"),
            ({"keys": {}}, "unknown-key"),
        ],
    )
    def test_home_of_somebody_or_sometime_else_is_rejected(self, change: dict[str, object], reason: str) -> None:
        with pytest.raises(errors.AnswerRejected) as caught:
            self.read(**change)
        assert caught.value.reason == reason

    def test_home_does_not_pass_for_a_plan_nor_a_plan_for_a_home(self) -> None:
        assert rejection(plan.sign_home(self.HOME, key=KEY, kid="p1")) == "signature"
        with pytest.raises(errors.AnswerRejected):
            plan.verify_home(plan.sign(HELD, key=KEY, kid="p1"), keys=KEYS, app="shop", user="", epoch_min=0, wall=NOW)

    def test_body_parts_into_its_lines(self) -> None:
        assert [plan.split(body) for body in (b"", b"a", b"a\n", b"a\nb", b"a\nb\nc")] == [
            (b"", b""),
            (b"a", b""),
            (b"a", b""),
            (b"a", b"b"),
            (b"a", b"b"),
        ]


def test_question_shows_no_token() -> None:
    assert "secret" not in repr(PlanRequest(app="a", hosts=(), token="secret"))
