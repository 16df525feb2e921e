"""What a client believes of dispatch's answers: versions over restarts, keys that change, clocks that are wrong."""

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.client.acceptance import Acceptance
from stormline.client.store import Store
from stormline.core import errors, limits, limits_network
from stormline.wire import plan as wire_plan
from stormline.wire.bundle import Bundle
from stormline.wire.jws import SigningKey
from stormline.wire.plan import Plan, Unchanged

NOW = 1_800_000_000
OLD, NEW = (SigningKey(Ed25519PrivateKey.generate(), kid) for kid in ("plan-old", "plan-new"))
YEARS = 10 * 365 * 86400


class Clock:
    def __init__(self, wall_s=float(NOW)):
        self.wall_s, self.now = wall_s, 100.0

    def wall(self):
        return self.wall_s

    def monotonic(self):
        return self.now


def bundle(*keys):
    return Bundle(
        app="shop",
        dispatch=("192.0.2.1:443",),
        dispatch_name="d.test",
        dispatch_keys={key.kid: key.public_text for key in keys or (OLD,)},
    )


def signed(version=1, *, key=OLD, issued_at=NOW, life_s=600):
    made = Plan(app="shop", version=version, issued_at=issued_at, expires_at=issued_at + life_s)
    return wire_plan.sign(made, key=key.key, kid=key.kid)


@pytest.fixture(name="store")
def _store(tmp_path):
    store = Store(tmp_path, "shop")
    store.open()
    yield store
    store.close()


def refused(acceptance, text, **more):
    with pytest.raises(errors.AnswerRejected) as caught:
        acceptance.take(text, (), **more)
    return caught.value.reason


@pytest.mark.parametrize("damage", [b"", b"junk", b"\xff\x00", None])
def test_older_version_is_refused_after_a_restart_though_the_plan_is_damaged(store, tmp_path, damage):
    Acceptance(bundle(), Clock(), store).take(signed(7), ())
    file = tmp_path / "shop.plan"
    file.unlink() if damage is None else file.write_bytes(damage)
    again = Acceptance(bundle(), Clock(), store)
    assert again.restore() is None
    assert refused(again, signed(6)) == "stale-version"
    assert again.take(signed(7), ()).version == 7


def test_replay_put_into_the_plan_file_is_refused_too(store, tmp_path):
    Acceptance(bundle(), Clock(), store).take(signed(7), ())
    (tmp_path / "shop.plan").write_text(signed(3))
    assert Acceptance(bundle(), Clock(), store).restore() is None


@pytest.mark.parametrize("damage", ["", "junk", "[]", '{"version": -4, "kids": ["plan-old"]}', '{"version": 1e99}'])
def test_damaged_floor_is_as_good_as_none(store, damage):
    store.save_floor(damage)
    assert Acceptance(bundle(), Clock(), store).take(signed(1), ()).version == 1


def test_floor_outlives_a_change_of_keys_with_overlap_and_not_another_platform(store):
    Acceptance(bundle(OLD), Clock(), store).take(signed(7), ())
    assert refused(Acceptance(bundle(OLD, NEW), Clock(), store), signed(6, key=NEW)) == "stale-version"
    Acceptance(bundle(OLD, NEW), Clock(), store).take(signed(8, key=NEW), ())
    assert refused(Acceptance(bundle(NEW), Clock(), store), signed(7, key=NEW)) == "stale-version"
    other = SigningKey(Ed25519PrivateKey.generate(), "plan-of-another")
    assert Acceptance(bundle(other), Clock(), store).take(signed(1, key=other), ()).version == 1


def test_key_that_is_not_in_the_bundle_is_said_to_be_unknown():
    assert refused(Acceptance(bundle(OLD), Clock(), None), signed(key=NEW)) == "unknown-key"


def test_expired_plan_of_the_last_run_is_held_as_stale(store):
    Acceptance(bundle(), Clock(), store).take(signed(7), ())
    again = Acceptance(bundle(), Clock(NOW + 30 * 86400.0), store)
    assert again.restore().version == 7
    assert (again.fresh, again.stands) == (False, False)


@pytest.mark.parametrize("life_s", [60, 3600])
def test_plan_stands_for_some_of_its_own_lives_after_its_end(store, life_s):
    running = Acceptance(bundle(), clock := Clock(), store)
    running.take(signed(7, life_s=life_s), ())
    end_s = life_s * (1 + limits_network.PLAN_STALE_LIVES)
    for age_s, judged in (
        (life_s - 1, (True, True)),
        (life_s + 1, (False, True)),
        (end_s - 1, (False, True)),
        (end_s + 1, (False, False)),
    ):
        clock.now = 100.0 + age_s
        restored = Acceptance(bundle(), Clock(NOW + age_s), store)
        restored.restore()
        assert (running.fresh, running.stands) == (restored.fresh, restored.stands) == judged


@pytest.mark.parametrize("wrong_s", [-YEARS, YEARS])
class TestWrongClock:
    def test_lone_answer_in_the_clear_is_refused(self, wrong_s):
        acceptance = Acceptance(bundle(), Clock(NOW + wrong_s), None)
        for _ in range(3):
            assert refused(acceptance, signed(), source="192.0.2.1") in ("expired", "not-yet-valid")

    def test_verified_server_s_time_is_believed_and_carried_on(self, wrong_s):
        clock = Clock(NOW + wrong_s)
        acceptance = Acceptance(bundle(), clock, None)
        assert acceptance.take(signed(1), (), server_wall=float(NOW)).version == 1
        clock.now += 7200.0
        assert acceptance.take(signed(2, issued_at=NOW + 7200), (), source="192.0.2.1").version == 2
        assert refused(acceptance, signed(3), source="192.0.2.1") in ("expired", "not-yet-valid")

    def test_two_centres_that_agree_are_believed_of_a_clock_behind_alone(self, wrong_s):
        acceptance = Acceptance(bundle(), Clock(NOW + wrong_s), None)
        refused(acceptance, signed(4), source="192.0.2.1")
        if wrong_s > 0:  # it may be a recording, given by one and the same attacker
            assert refused(acceptance, signed(4, issued_at=NOW + 20), source="192.0.2.2") == "expired"
        else:
            assert acceptance.take(signed(4, issued_at=NOW + 20), (), source="192.0.2.2").version == 4

    def test_two_centres_that_do_not_agree_are_not(self, wrong_s):
        acceptance = Acceptance(bundle(), Clock(NOW + wrong_s), None)
        refused(acceptance, signed(4), source="192.0.2.1")
        assert refused(acceptance, signed(4, issued_at=NOW + 4000), source="192.0.2.2") in ("expired", "not-yet-valid")

    def test_forged_answer_is_no_witness(self, wrong_s):
        acceptance = Acceptance(bundle(), Clock(NOW + wrong_s), None)
        assert refused(acceptance, signed(4, key=SigningKey(NEW.key, OLD.kid)), source="192.0.2.1") == "signature"
        assert refused(acceptance, signed(4), source="192.0.2.2") in ("expired", "not-yet-valid")


def test_right_clock_takes_no_recording_though_two_centres_give_it():
    acceptance = Acceptance(bundle(), Clock(), None)
    late = signed(4, issued_at=NOW - int(limits.PLAN_LIFE_S) - 4000)
    assert refused(acceptance, late, source="192.0.2.1") == "expired"
    assert refused(acceptance, late, source="192.0.2.2") == "expired"


# -- what is confirmed ------------------------------------------------------------------------------------------------
def whole(version=1, *, key=OLD, keys=()):
    made = Plan(
        app="shop",
        version=version,
        issued_at=NOW,
        expires_at=NOW + 600,
        unknown=("a.test",),
        keys={each.kid: each.public_text for each in keys},
    )
    made = msgspec.structs.replace(made, digest=wire_plan.content_digest(made))
    return made, wire_plan.sign(made, key=key.key, kid=key.kid)


def confirmed(held, version, *, issued_at, asked=("a.test",)):
    answer = Unchanged(
        app="shop",
        version=version,
        issued_at=issued_at,
        expires_at=issued_at + 600,
        held=held.digest,
        asked=wire_plan.question_digest("shop", asked),
    )
    return wire_plan.sign_unchanged(answer, key=OLD.key, kid=OLD.kid)


def test_plan_that_is_confirmed_is_fresh_again_also_after_a_restart(store):
    clock = Clock()
    acceptance = Acceptance(bundle(), clock, store)
    held, text = whole()
    acceptance.take(text, ("a.test",))
    clock.now, clock.wall_s = clock.now + 700.0, clock.wall_s + 700.0
    assert not acceptance.fresh
    said = confirmed(held, 2, issued_at=NOW + 700)
    assert acceptance.take(said, ("a.test",)).unknown == ("a.test",)
    assert (acceptance.fresh, acceptance.plan.version) == (True, 2)
    again = Acceptance(bundle(), clock, store)
    assert again.restore().version == 2
    assert again.fresh


def test_word_that_another_plan_is_unchanged_is_refused(store):
    acceptance = Acceptance(bundle(), Clock(), store)
    held, text = whole()
    acceptance.take(text, ("a.test",))
    other = msgspec.structs.replace(held, digest="x" * 22)
    for said in (confirmed(other, 2, issued_at=NOW), confirmed(held, 2, issued_at=NOW, asked=("b.test",))):
        with pytest.raises(errors.AnswerRejected):
            acceptance.take(said, ("a.test",))
    assert (acceptance.plan.version, Acceptance(bundle(), Clock(), store).restore().version) == (1, 1)


# -- keys that plans tell of ------------------------------------------------------------------------------------------
def test_key_told_by_a_plan_is_trusted_from_then_on_and_after_a_restart(store):
    acceptance = Acceptance(bundle(OLD), Clock(), store)
    _, told = whole(keys=(OLD, NEW))
    acceptance.take(told, ("a.test",))
    assert acceptance.kids == ("plan-new", "plan-old")
    assert acceptance.take(signed(2, key=NEW), ()).version == 2
    again = Acceptance(bundle(OLD), Clock(), store)
    assert again.restore().version == 2, "signed by a key that the bundle does not hold"
    assert again.take(signed(3, key=NEW), ()).version == 3


def test_plan_that_tells_of_too_many_keys_or_of_none_that_is_one_adds_no_trust(store):
    acceptance = Acceptance(bundle(OLD), Clock(), store)
    many = [SigningKey(Ed25519PrivateKey.generate(), f"k{n}") for n in range(limits_network.CENTRE_KEYS_MAX + 1)]
    acceptance.take(whole(keys=many)[1], ("a.test",))
    bad = Plan(app="shop", version=2, issued_at=NOW, expires_at=NOW + 600, keys={"k": "no key"})
    acceptance.take(wire_plan.sign(bad, key=OLD.key, kid=OLD.kid), ())
    assert acceptance.kids == ("plan-old",)
