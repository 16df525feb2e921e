"""A user's home as the client keeps it: over restarts, against forgers and old words, and no longer than it holds."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormline.client.residence import Residence
from stormline.client.store import Store
from stormline.core import errors, limits
from stormline.wire import plan as wire_plan
from stormline.wire.plan import Home, Plan

NOW = 1_800_000_000
KEY, FORGER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
KEYS = {"k": KEY.public_key()}


class Clock:
    def __init__(self, wall_s=float(NOW)):
        self.wall_s, self.now = wall_s, 100.0

    def wall(self):
        return self.wall_s

    def monotonic(self):
        return self.now


def signed(unit="u1", *, key=KEY, **change):
    fields = {"app": "shop", "user": "ann", "unit": unit, "epoch": 1, "issued_at": NOW, "expires_at": NOW + 600}
    return wire_plan.sign_home(Home(**(fields | change)), key=key, kid="k").encode()


def residence(store=None, *, user="ann", clock=None):
    made = Residence("shop", clock or Clock(), store)
    made.belong_to(user)
    return made


@pytest.fixture(name="store")
def _store(tmp_path):
    store = Store(tmp_path, "shop")
    store.open()
    yield store
    store.close()


def refused(made, text, walls=(float(NOW),)):
    with pytest.raises(errors.AnswerRejected) as caught:
        made.take(text, KEYS, walls)
    return caught.value.reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (signed(key=FORGER), "signature"),
        (signed(app="bank"), "wrong-app"),
        (signed(user="ben"), "malformed"),
        (signed(issued_at=NOW - 9000, expires_at=NOW - 8400), "expired"),
        (signed(issued_at=NOW + 9000, expires_at=NOW + 9600), "not-yet-valid"),
        (wire_plan.sign(Plan(app="shop", version=1, issued_at=NOW, expires_at=NOW + 9), key=KEY, kid="k").encode(),
         "signature"),
        (b"junk", "signature"),
    ],
)  # fmt: skip
def test_word_that_is_not_dispatch_s_for_this_user_now_is_refused(text, reason):
    made = residence()
    made.take(signed("u7"), KEYS, (float(NOW),))
    assert refused(made, text) == reason
    assert made.home.unit == "u7"


def test_epoch_only_grows_also_over_restarts_and_users(store):
    made = residence(store)
    made.take(signed("u1", epoch=5), KEYS, (float(NOW),))
    assert refused(made, signed("u2", epoch=4)) == "stale-version"
    again = residence(store)
    again.restore(KEYS)
    assert again.home.unit == "u1"
    assert refused(again, signed("u2", epoch=4)) == "stale-version"
    again.belong_to("ben")
    assert again.home is None
    assert refused(again, signed("u2", epoch=4, user="ben")) == "stale-version"
    again.take(signed("u3", epoch=5, user="ben"), KEYS, (float(NOW),))
    assert again.home.unit == "u3"


def test_home_holds_until_it_expires_by_the_monotonic_clock():
    clock = Clock()
    made = residence(clock=clock)
    made.take(signed(), KEYS, (float(NOW),))
    clock.now += 599.0
    assert made.home is not None
    clock.now += 1.0
    assert made.home is None


def test_clock_that_is_wrong_is_helped_by_a_server_s(store):
    clock = Clock(wall_s=5.0)
    made = residence(store, clock=clock)
    assert refused(made, signed(), walls=(clock.wall_s,)) == "not-yet-valid"
    made.take(signed(), KEYS, (clock.wall_s, float(NOW)))
    assert made.home.unit == "u1"


@pytest.mark.parametrize("later_s", [0, 300, 601, 10**9])
def test_kept_home_holds_for_what_is_left_of_its_life(store, later_s):
    residence(store).take(signed(), KEYS, (float(NOW),))
    clock = Clock(NOW + later_s)
    again = residence(store, clock=clock)
    again.restore(KEYS)
    assert (again.home is not None) is (later_s < 600)
    clock.now += max(0, 600 - later_s)
    assert again.home is None


@pytest.mark.parametrize("damage", [b"", b"junk", b"\xff\xfe", signed(key=FORGER), b"x" * (2 * limits.HOME_BYTES_MAX)])
def test_damaged_file_is_as_good_as_none(store, tmp_path, damage):
    residence(store).take(signed(), KEYS, (float(NOW),))
    (tmp_path / "shop.home").write_bytes(damage)
    again = residence(store)
    again.restore(KEYS)
    assert again.home is None
    again.take(signed("u2"), KEYS, (float(NOW),))
    assert again.home.unit == "u2"


@pytest.mark.parametrize("user", ["", "ben"])
def test_another_user_s_home_is_not_used(store, tmp_path, user):
    residence(store).take(signed(), KEYS, (float(NOW),))
    again = residence(store, user=user)
    again.restore(KEYS)
    assert again.home is None
    if user:
        assert (tmp_path / "shop.home").read_bytes() == b""


def test_nobody_has_no_home():
    made = residence(user="")
    made.take(signed(), KEYS, (float(NOW),))
    assert made.home is None
