"""The two-phase rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormline.policy.resend import SAFE_METHODS, may_resend

METHODS = ["GET", "HEAD", "OPTIONS", "TRACE", "QUERY", "POST", "PUT", "PATCH", "DELETE", "CALL", "get", "X-OWN"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("has_key", [False, True])
def test_what_certainly_did_not_arrive_may_be_sent_again(method, has_key):
    assert may_resend(method, maybe_delivered=False, has_key=has_key)


@pytest.mark.parametrize("method", METHODS)
def test_what_may_have_arrived_is_sent_again_only_where_twice_does_no_harm(method):
    assert may_resend(method, maybe_delivered=True, has_key=True)
    assert may_resend(method, maybe_delivered=True, has_key=False) is (method in SAFE_METHODS)


@given(st.text())
def test_method_nobody_knows_counts_as_a_write(method):
    assert may_resend(method, maybe_delivered=True, has_key=False) is (method in SAFE_METHODS)


def test_idempotent_writes_are_writes():
    assert not {"PUT", "DELETE", "POST", "PATCH"} & SAFE_METHODS
