"""The bytes of what is made beside something else on a metered network."""

from stormline.core import limits_means
from stormline.policy.extras import ExtraBytes
from stormline.policy.network import NetworkInfo, is_metered

FLOAT = limits_means.METERED_FLOAT_BYTES


def test_first_rescue_is_possible_before_anything_was_carried():
    extras = ExtraBytes()
    assert extras.take(limits_means.HEDGE_HANDSHAKE_BYTES + 500 + limits_means.METERED_ANSWER_BYTES)
    assert extras.take(limits_means.HEDGE_HANDSHAKE_BYTES)


def test_float_that_is_used_up_comes_back_by_the_share_of_what_is_of_use():
    extras = ExtraBytes()
    assert extras.take(FLOAT)
    assert not extras.take(1)
    extras.carried(FLOAT)  # that was what had been taken
    assert not extras.take(1)
    extras.carried(FLOAT + 100_000)
    assert extras.take(5_000)
    assert not extras.take(10)
    assert (extras.taken, extras.refused, extras.bytes_taken) == (2, 3, FLOAT + 5_000)


def test_bucket_is_never_fuller_than_at_its_beginning():
    extras = ExtraBytes()
    extras.carried(10**9)
    assert not extras.take(FLOAT + 1)
    assert extras.take(FLOAT)


def test_what_was_carried_on_another_network_fills_nothing():
    extras = ExtraBytes()
    extras.take(FLOAT)
    extras.start(10**9)
    extras.carried(10**9 + 20)
    assert not extras.take(2)
    assert extras.take(1)


def test_network_is_metered_as_it_says_and_else_where_it_is_cellular():
    assert is_metered(NetworkInfo(metered=True), "wifi")
    assert not is_metered(NetworkInfo(metered=False), "cell")
    assert is_metered(NetworkInfo(), "cell")
    assert is_metered(NetworkInfo(kind="cell"))
    assert not is_metered(NetworkInfo(kind="cell"), "wifi")
    assert not is_metered(NetworkInfo())
    assert is_metered(NetworkInfo(interface="wwan0"))
    assert not is_metered(NetworkInfo(interface="wwan0"), "wired")
    assert not is_metered(NetworkInfo(kind="wifi", interface="cell0"))
